"""Where an embedded cluster lives, and the state file by which every command finds it.

The state file holds what was decided (addresses, identity, how many coordinators), not what runs: the operating system
is asked that each time (``rollbridge.embedded.processes``), so a stale file can mislead nobody.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from rollbridge.config import ADDRESSES_FILE, ADDRESSES_FORMAT
from rollbridge.embedded.ports import LOOPBACK
from rollbridge.errors import EnvironmentProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The loopback ports of the servers."""

    kafka: int
    kafka_controller: int
    zookeeper: int


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is decided about an embedded cluster."""

    kafka_cluster_id: str
    """22 characters, as Kafka formats ids."""
    ports: Ports
    coordinators: int
    """How many coordinators belong to the cluster."""
    ephemeral: bool = False
    """The whole directory goes when the cluster stops."""
    short_lived: bool = False
    """The servers start faster and need less memory, but are slower in the long run."""
    kafka_heap: str = "1g"
    """As after ``-Xmx``."""
    kafka_settings: Mapping[str, str] = field(default_factory=dict)
    """Broker settings on top of ours."""
    zookeeper_settings: Mapping[str, str] = field(default_factory=dict)
    """ZooKeeper's settings on top of ours."""
    running: bool = False
    """Somebody started it and nobody stopped it since; a part may have died nevertheless."""

    @property
    def bootstrap_servers(self) -> str:
        """Kafka's address."""
        return f"{LOOPBACK}:{self.ports.kafka}"

    @property
    def zookeeper(self) -> str:
        """ZooKeeper's address."""
        return f"{LOOPBACK}:{self.ports.zookeeper}"

    def stopped(self) -> Self:
        """The same cluster after it was stopped."""
        return replace(self, running=False)

    def to_json(self) -> str:
        """The content of the state file; the addresses stand in it for programs in other languages."""
        document = {
            "format": ADDRESSES_FORMAT,
            "bootstrap_servers": self.bootstrap_servers,
            "zookeeper": self.zookeeper,
            **asdict(self),
        }
        return json.dumps(document, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: it is not that.
        """
        document: Any = json.loads(text)
        if not isinstance(document, dict) or document.get("format") != ADDRESSES_FORMAT:
            raise ValueError(f"it does not say that its format is {ADDRESSES_FORMAT}")
        try:
            return cls(
                kafka_cluster_id=document["kafka_cluster_id"],
                ports=Ports(**document["ports"]),
                coordinators=document["coordinators"],
                ephemeral=document["ephemeral"],
                short_lived=document["short_lived"],
                kafka_heap=document["kafka_heap"],
                kafka_settings=dict(document["kafka_settings"]),
                zookeeper_settings=dict(document.get("zookeeper_settings", {})),
                running=document["running"],
            )
        except (KeyError, TypeError) as exc:
            raise ValueError(f"a field is missing or unknown: {exc}") from exc


def write_privately(path: Path, text: str) -> None:
    """Write a file that nobody else may read, since settings of servers may hold passwords."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Home:
    """The directory of one embedded cluster."""

    path: Path

    @property
    def state_file(self) -> Path:
        """What is decided."""
        return self.path / ADDRESSES_FILE

    @property
    def logs(self) -> Path:
        """What the servers say."""
        return self.path / "logs"

    @property
    def scratch(self) -> Path:
        """Temporary files of the servers."""
        return self.path / "tmp"

    def of(self, server: str) -> Path:
        """Configuration and data of one server."""
        return self.path / server

    def load(self) -> State | None:
        """Read the state file; ``None`` when there never was a cluster here.

        Raises:
            EnvironmentProblem: the file cannot be read or is no state file.
        """
        try:
            return State.from_json(self.state_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as exc:
            raise EnvironmentProblem(
                f"{self.state_file} is not readable as the state of an embedded cluster: {exc}; "
                f"move {self.path} away to start afresh"
            ) from exc

    def save(self, state: State) -> State:
        """Replace the state file atomically."""
        part = self.state_file.with_suffix(f".{os.getpid()}")
        write_privately(part, state.to_json())
        os.replace(part, self.state_file)
        return state

    @contextmanager
    def locked(self, waiting: Callable[[], object]) -> Iterator[None]:
        """Let one command at a time change this cluster; calls ``waiting`` once if another one is at it.

        Raises:
            EnvironmentProblem: the directory cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / "lock", "w", encoding="utf-8")  # noqa: SIM115 - closed below
        except OSError as exc:
            raise EnvironmentProblem(f"{self.path} cannot be written: {exc}; choose another --home") from exc
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
