"""The backend without containers: the processes that ``rollbridge up`` starts, one broker and one ZooKeeper."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from integration_tests.backends.disks import Disk
from integration_tests.backends.interface import Ability, AnyCluster, Clock, Unsupported
from integration_tests.clocks import FileClock
from integration_tests.coordinators import coordinator
from integration_tests.crashing import CRASH_AT, program
from integration_tests.defects import WATCH
from rollbridge.kafka.records import FetchedBatches
from rollbridge_devcluster.cluster import DevCluster
from rollbridge_devcluster.ephemeral import ProcessCluster
from rollbridge_devcluster.nodes import ProcessNode
from rollbridge_devcluster.state import KAFKA, ZOOKEEPER, ClusterState, Wishes


class LocalCluster(ProcessCluster, AnyCluster):
    """A cluster of processes with what tests ask of any backend."""

    def __init__(
        self, *, kafka_settings: Mapping[str, str] | None = None, stalling: bool = False, **wishes: Any
    ) -> None:
        """Only notes what is wanted.

        Args:
            kafka_settings: Of the broker, on top of our defaults.
            stalling: Have the broker's logs, but not those of the controller, on a disk that can be made to stand
                still, where this machine can do that.
            wishes: What else a cluster of processes takes.
        """
        super().__init__(kafka_settings=kafka_settings, **wishes)
        self._stalling = stalling
        self._disk: Disk | None = None

    @property
    def can(self) -> frozenset[Ability]:
        """Processes cannot do much."""
        return frozenset({Ability.CLOCK, Ability.LOG_CUT} | ({Ability.DISK_STALL} if self._disk is not None else set()))

    def stop(self) -> None:
        """Stop everything and remove the data."""
        if self._cluster is not None:
            WATCH.remove(self._cluster.home.logs)
        super().stop()
        if self._disk is not None:
            self._disk.remove()
            self._disk = None

    def _start_servers(self, cluster: DevCluster, wishes: Wishes) -> ClusterState:
        WATCH.add(cluster.home.logs)
        if self._stalling:
            with suppress(Unsupported):
                self._disk = Disk.mounted()
        if self._disk is not None:
            # The controller goes on: new settings reach the broker while its logs stand still.
            settings = {**(wishes.kafka_settings or {}), "metadata.log.dir": str(cluster.home.path / "metadata")}
            wishes = replace(wishes, kafka_settings=settings)
            cluster.up(wishes, only=[ZOOKEEPER])
            cluster.home.of(KAFKA).symlink_to(self._disk.path)
        return super()._start_servers(cluster, wishes)

    def stall_disk(self, part: str, seconds: float) -> None:
        """Let the broker's logs stand still."""
        if self._disk is None or part != KAFKA:
            raise Unsupported(f"the disk of {part} cannot be made to stand still")
        self._disk.stand_still(seconds)

    @contextmanager
    def frozen_disk(self) -> Iterator[None]:
        """Let the broker's logs stand still for the length of a block.

        Raises:
            Unsupported: they have no disk of their own.
        """
        if self._disk is None:
            raise Unsupported("the broker's logs cannot be made to stand still")
        with self._disk.frozen():
            yield

    def cut_log(self, topic: str, end: int) -> None:
        """Drop the batches from there on; the broker, which was killed, works out everything else anew."""
        self.kill(KAFKA)
        folder = self.home / KAFKA / "data" / f"{topic}-0"
        for file in folder.iterdir():
            if file.suffix in (".index", ".timeindex", ".txnindex", ".snapshot"):
                file.unlink()
        (log,) = folder.glob("*.log")
        kept = takewhile(lambda item: item[0].base_offset < end, FetchedBatches(log.read_bytes()))
        os.truncate(log, sum(header.size for header, _ in kept))
        self.restart(KAFKA)

    def log_ends(self, topic: str) -> list[int]:
        """Offsets at which the log can be cut so that no native transaction is left without its marker."""
        (log,) = (self.home / KAFKA / "data" / f"{topic}-0").glob("*.log")
        ends, open_ones = [0], set[int]()
        for header, _ in FetchedBatches(log.read_bytes()):
            if header.is_control:
                open_ones.discard(header.producer_id)
            elif header.is_transactional:
                open_ones.add(header.producer_id)
            if not open_ones:
                ends.append(header.base_offset + header.last_offset_delta + 1)
        return ends

    def back_up_zookeeper(self) -> None:
        """Copy its directory."""
        shutil.rmtree(self._backup, ignore_errors=True)
        with self.paused(ZOOKEEPER):
            shutil.copytree(self.home / ZOOKEEPER / "data", self._backup)

    def restore_zookeeper(self) -> None:
        """Put the copy in place of what there is."""
        self.kill(ZOOKEEPER)
        shutil.rmtree(self.home / ZOOKEEPER / "data")
        shutil.copytree(self._backup, self.home / ZOOKEEPER / "data")
        self.restart(ZOOKEEPER)

    @property
    def _backup(self) -> Path:
        return self.home / "zookeeper-backup"

    def start_coordinator(  # type: ignore[override]  # by a crash point instead of a program
        self, *, env: Mapping[str, str] | None = None, crash_at: str | None = None, ahead_s: float = 0.0
    ) -> ProcessNode:
        """A coordinator process, perhaps with a crash point and a clock of its own."""
        environment = {**(env or {}), **({CRASH_AT: crash_at} if crash_at else {})}
        if ahead_s:
            folder = self.home / f"clock-{self._coordinators + 1}"
            folder.mkdir()
            own = FileClock(folder)
            own.set(ahead_s)
            environment |= own.environment
        return super().start_coordinator(env=environment, program=program(environment))

    def keep_logs(self, folder: Path) -> None:
        """Copy them."""
        shutil.copytree(self.logs, folder)

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
