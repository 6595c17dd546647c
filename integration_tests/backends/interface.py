"""What tests may ask of the servers they run against, whichever way these are run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self


class Ability(StrEnum):
    """What a backend may be able to do; a test names what it needs with ``@pytest.mark.needs``."""

    CONTAINERS = "containers"
    """Servers and coordinators run in containers, from the images that users run."""
    PARTITION = "partition"
    """The network between named parties is cut, both ways or one way."""
    LOSS = "packet loss"
    BANDWIDTH = "bandwidth"
    """What one party sends is limited."""
    DISK_FULL = "disk full"
    """A server's data directory has no room left."""
    CLOCK = "clock"
    """The clock of one coordinator is set."""
    DISK_STALL = "disk that stands still"
    """Writes of a broker to its disk wait for a while; only of a cluster that was asked for so."""
    LOG_CUT = "logs that become shorter"
    """The log of a topic loses its end, as where Kafka has one replica and the power fails."""
    SERVER_CLOCK = "clock of a server"
    """The clock of one broker or ZooKeeper server is wrong."""


class Unsupported(Exception):
    """This backend, or this machine's kernel, cannot do what was asked for; the text says which and why."""


class Clock(Protocol):
    """The wall clock of one coordinator."""

    def set(self, offset_s: float) -> None:
        """From now on it is ahead of the true time by this much, or behind it."""


class Coordinator(Protocol):
    """A coordinator that a test has started."""

    @property
    def name(self) -> str:
        """The part's name, for ``kill``, ``pause``, ``resume`` and ``restart``."""

    @property
    def alive(self) -> bool:
        """Whether this very one still runs."""

    def wait_exit(self, timeout_seconds: float) -> int:
        """Wait until it has ended; returns its exit code, negative when a signal ended it."""


class AnyCluster(Protocol):
    """Brokers and ZooKeeper servers, and coordinators as they are asked for.

    Servers are known by the name of their part: ``kafka`` and ``zookeeper``, or ``kafka-1``, ``zookeeper-1`` and so on
    where there are several. Each comes back after a restart with its data and under its address.
    """

    @property
    def brokers(self) -> Sequence[str]:
        """Names of the brokers' parts."""

    @property
    def zookeepers(self) -> Sequence[str]:
        """Names of the ZooKeeper servers' parts."""

    @property
    def can(self) -> frozenset[Ability]:
        """What this backend can do here, on this machine."""

    @property
    def bootstrap_servers(self) -> str:
        """Kafka's address for clients on this machine."""

    @property
    def zookeeper(self) -> str:
        """ZooKeeper's address for clients on this machine."""

    @property
    def kafka_cluster_id(self) -> str:
        """The id that Kafka gives for itself."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def kill(self, part: str) -> None:
        """SIGKILL, and return when it is gone."""

    def pause(self, part: str) -> None:
        """Connections stay open and nothing answers."""

    def resume(self, part: str) -> None:
        """The end of a pause."""

    def paused(self, part: str) -> AbstractContextManager[None]:
        """A pause for the length of a block."""

    def restart(self, part: str, *, gracefully: bool = True) -> None:
        """Stop a part if it runs, start it again on the same data and address, and return when it answers."""

    def add_listener(self, name: str, advertised: str) -> str:
        """Have the only broker listen at one more address, where it says that it is at ``advertised``; restarts it."""

    def stall_disk(self, part: str, seconds: float) -> None:
        """Let no write of a broker to its logs come to an end for a while, and return when it is over.

        Raises:
            Unsupported: the cluster was not made for it, or this machine cannot do it.
        """

    def log_ends(self, topic: str) -> list[int]:
        """Offsets at which the log of the only partition of a topic can be cut so that no native transaction is halved.

        Raises:
            Unsupported: this backend cannot do it.
        """

    def cut_log(self, topic: str, end: int) -> None:
        """Kill the broker, let the only partition of a topic end at an offset, and start the broker again.

        Raises:
            Unsupported: this backend cannot do it.
        """

    def back_up_zookeeper(self) -> None:
        """Copy what all ZooKeeper servers hold at one moment; they stand still meanwhile."""

    def restore_zookeeper(self) -> None:
        """Kill all ZooKeeper servers, start them on the latest copy, and return when they answer."""

    def start_coordinator(
        self, *, env: Mapping[str, str] | None = None, crash_at: str | None = None, ahead_s: float = 0.0
    ) -> Coordinator:
        """Start one more coordinator under the usual root path, and return when it has registered.

        Its clock is ahead of the true time by ``ahead_s``, or behind it.
        """

    def keep_logs(self, folder: Path) -> None:
        """Put what all servers and coordinators have said into files of a folder, which is made."""

    def runs(self, part: str) -> bool:
        """Whether a part runs."""

    def kill_coordinator(self, handle: Coordinator) -> None:
        """SIGKILL a coordinator; harmless when it is gone already."""

    def stop_coordinator(self, handle: Coordinator) -> None:
        """Ask a coordinator to end, and return when it has."""

    def coordinator(
        self, root: str, name: str, logs: Path, environment: Mapping[str, str]
    ) -> AbstractContextManager[object]:
        """A coordinator of a test's own, under any root path; started in the background, logs to ``logs/NAME.log``."""

    def clocked_coordinator(self, root: str, name: str, logs: Path) -> AbstractContextManager[Clock]:
        """The same with a clock that can be set."""
