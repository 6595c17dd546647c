"""What tests ask of their servers, whatever these run on; the tests know nothing else of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from rollbridge_devcluster.ephemeral import EphemeralCluster
from rollbridge_devcluster.nodes import Node


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


class AnyCluster(EphemeralCluster):
    """Servers and coordinators of the development cluster, with what only tests do to them."""

    @property
    @abstractmethod
    def can(self) -> frozenset[Ability]:
        """What this backend can do here, on this machine."""

    @abstractmethod
    def start_coordinator(
        self, *, env: Mapping[str, str] | None = None, crash_at: str | None = None, ahead_s: float = 0.0
    ) -> Node:
        """Start one more coordinator under the usual root path, and return when it has registered.

        Args:
            env: Environment variables for it.
            crash_at: The point at which it kills itself, as ``integration_tests.crashing`` writes it.
            ahead_s: By how much its clock is ahead of the true time, or behind it.
        """

    @abstractmethod
    def coordinator(
        self, root: str, name: str, logs: Path, environment: Mapping[str, str]
    ) -> AbstractContextManager[object]:
        """A coordinator of a test's own, under any root path; started in the background, logs to ``logs/NAME.log``."""

    @abstractmethod
    def clocked_coordinator(self, root: str, name: str, logs: Path) -> AbstractContextManager[Clock]:
        """The same with a clock that can be set."""

    @abstractmethod
    def keep_logs(self, folder: Path) -> None:
        """Put what all servers and coordinators have said into files of a folder, which is made."""

    @abstractmethod
    def back_up_zookeeper(self) -> None:
        """Copy what all ZooKeeper servers hold at one moment; they stand still meanwhile."""

    @abstractmethod
    def restore_zookeeper(self) -> None:
        """Kill all ZooKeeper servers, start them on the latest copy, and return when they answer."""

    def stall_disk(self, part: str, seconds: float) -> None:
        """Let no write of a broker to its logs come to an end for a while, and return when it is over.

        Raises:
            Unsupported: the cluster was not made for it, or this machine cannot do it.
        """
        raise Unsupported(f"the disk of {part} cannot be made to stand still")

    def log_ends(self, topic: str) -> list[int]:
        """Offsets at which the log of the only partition of a topic can be cut so that no native transaction is halved.

        Raises:
            Unsupported: this backend cannot do it.
        """
        raise Unsupported(f"where the log of {topic} can be cut is not looked for in containers")

    def cut_log(self, topic: str, end: int) -> None:
        """Kill the broker, let the only partition of a topic end at an offset, and start the broker again.

        Raises:
            Unsupported: this backend cannot do it.
        """
        raise Unsupported(f"the log of {topic} cannot be cut at {end} inside of a container")
