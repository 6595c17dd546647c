"""Settings of a coordinator daemon."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from bridge.errors import ConfigError
from bridge.model.buffer import BufferLimits
from coordinator.group import LeaderSettings


def _default_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """Settings of a coordinator daemon; all faults are reported at once."""

    bootstrap_servers: str
    """Kafka brokers, ``host:port,…``."""
    zookeeper: str
    """ZooKeeper servers, ``host:port,…``, with a chroot if wanted."""
    zookeeper_root: str = "/rollbridge"
    """Path under which everything stands."""
    name: str = field(default_factory=_default_name)
    """Name of this daemon among the coordinators; must be unique."""
    session_timeout_s: float = 6.0
    """ZooKeeper session time-out: how soon another daemon takes over when this one dies."""
    patience_s: float = 3.0
    """How long a daemon that is not a group's first choice waits before it leads a group that nobody leads."""
    seal_timeout_s: float = 900.0
    """How long sealing a topic may wait for native transactions of others; brokers abort those after 15 minutes."""
    poll_s: float = 0.05
    """Longest wait for new frames before other work is looked at."""
    replication_factor: int = -1
    """Replication factor of commit logs; -1 is the brokers' default."""
    limits: BufferLimits = field(default_factory=BufferLimits)
    leader: LeaderSettings = field(default_factory=LeaderSettings)
    security: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Security settings for Kafka, named as in confluent-kafka's configuration."""

    def __post_init__(self) -> None:
        faults = [
            f"{name}: {value} is not positive"
            for name, value in (
                ("session_timeout_s", self.session_timeout_s),
                ("seal_timeout_s", self.seal_timeout_s),
                ("poll_s", self.poll_s),
            )
            if not value > 0
        ]
        faults += [f"{name}: missing" for name in ("bootstrap_servers", "zookeeper", "name") if not getattr(self, name)]
        if "/" in self.name:
            faults.append(f"name: {self.name!r} holds a slash")
        if faults:
            raise ConfigError("; ".join(faults))
