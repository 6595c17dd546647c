"""The backend without containers: the processes that ``rollbridge up`` starts, one broker and one ZooKeeper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

from bridge.embedded import CoordinatorHandle, EmbeddedCluster
from integration_tests.backends.interface import Ability, Clock, Coordinator
from integration_tests.clocks import FileClock
from integration_tests.coordinators import coordinator


class LocalCluster(EmbeddedCluster):
    """An embedded cluster with what tests ask of any backend."""

    brokers: Final = ("kafka",)
    zookeepers: Final = ("zookeeper",)
    can: Final = frozenset({Ability.CLOCK})

    def runs(self, part: str) -> bool:
        """Whether a process of the part runs."""
        cluster, _ = self._running()
        return any(process.is_running() for process in cluster.processes(part))

    def kill_coordinator(self, handle: Coordinator) -> None:
        """As the embedded cluster does it."""
        super().kill_coordinator(_own(handle))

    def stop_coordinator(self, handle: Coordinator) -> None:
        """As the embedded cluster does it."""
        super().stop_coordinator(_own(handle))

    def coordinator(
        self, root: str, name: str, logs: Path, environment: Mapping[str, str]
    ) -> AbstractContextManager[object]:
        """A coordinator process under any root path."""
        return coordinator(self, root, name, logs, **environment)

    @contextmanager
    def clocked_coordinator(self, root: str, name: str, logs: Path) -> Iterator[Clock]:
        """A coordinator process with a clock of its own, whose file is beside its log."""
        clock = FileClock(logs)
        with self.coordinator(root, name, logs, clock.environment):
            yield clock


def _own(handle: Coordinator) -> CoordinatorHandle:
    assert isinstance(handle, CoordinatorHandle), f"{handle.name} belongs to another cluster"
    return handle
