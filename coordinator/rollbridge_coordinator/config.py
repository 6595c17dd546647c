"""Settings of a coordinator daemon, and where they come from.

Addresses and security come from where clients have them from (:mod:`rollbridge.config`). Everything else comes from
``ROLLBRIDGE_COORDINATOR_...`` variables, such as ``ROLLBRIDGE_COORDINATOR_CACHE_BYTES_MAX``, or from the table
``[coordinator]`` of the TOML file that ``ROLLBRIDGE_CONFIG`` names; flags win over both. In the file, names may also be
spelt as in PIP-196: ``transactionBufferSnapshotSegmentSize``.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import socket
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rollbridge.config import CONFIG_VARIABLE, load_settings
from rollbridge.errors import ConfigError
from rollbridge.model.buffer import BufferLimits
from rollbridge_coordinator.state.group import LeaderSettings
from rollbridge_coordinator.state.snapshots import SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, SnapshotSettings

PREFIX: Final = "ROLLBRIDGE_COORDINATOR_"
_TABLE: Final = "coordinator"
_MAY_BE_ZERO: Final = {"transaction_meta_persist_count", "standby_transactions_max"}
_SNAPSHOTS: Final = "snapshots"
_TEXTS: Final = {"name", "metrics_dir", "metrics_address", "peer_address"}
_NOWHERE: Final = "none"
_SWITCH: Final = "transaction_buffer_segmented_snapshot_enabled"
_ADDRESS: Final = re.compile(r"(?P<host>[^\s:\[\]]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
_CAPITAL: Final = re.compile("(?<!^)(?=[A-Z])")


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
    seal_timeout_s: float = 60.0
    """How long sealing may take, for which all streams of the group wait, before its stream waits alone."""
    merge_timeout_s: float = 900.0
    """How long the native transaction of a merge may be open; ``transaction.max.timeout.ms`` of the brokers at most."""
    poll_s: float = 0.05
    """Longest wait for new frames before other work is looked at."""
    standby_transactions_max: int = 300_000
    """Transactions that a standby holds for one group at most, open or ended since the last snapshots; 0: it follows
    nothing, and a takeover reads everything since these."""
    standby_cache_bytes_max: int = 64 * 1024 * 1024
    """Bytes of frames that a standby keeps in memory for one group."""
    replication_factor: int = -1
    """Replication factor of commit logs; -1 is the brokers' default."""
    metrics_dir: str = ""
    """Directory for one file of metrics for each group that is led, in Prometheus' text format; none if empty."""
    metrics_address: str = ""
    """``HOST:PORT`` at which ``/metrics`` and ``/healthz`` are answered; port 0 is a free one, none if empty."""
    peer_address: str = ""
    """``HOST:PORT`` at which other coordinators hold a connection to this one; port 0 is a free one. Empty: the address
    from which ZooKeeper is reached, and a free port. ``none``: nowhere, so the end of this process shows only when its
    session has timed out."""
    limits: BufferLimits = field(default_factory=BufferLimits)
    leader: LeaderSettings = field(default_factory=LeaderSettings)
    """Also holds when snapshots are taken, and how."""
    security: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Security settings for Kafka, named as in confluent-kafka's configuration."""
    zookeeper_security: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Security settings of the way to ZooKeeper."""

    def __post_init__(self) -> None:
        numbers = {
            "session_timeout_s": self.session_timeout_s,
            "patience_s": self.patience_s,
            "seal_timeout_s": self.seal_timeout_s,
            "merge_timeout_s": self.merge_timeout_s,
            "poll_s": self.poll_s,
            "standby_transactions_max": self.standby_transactions_max,
            "standby_cache_bytes_max": self.standby_cache_bytes_max,
            **{item.name: getattr(self.limits, item.name) for item in dataclasses.fields(self.limits)},
            **{name: getattr(self.leader, name) for name in _fields(LeaderSettings) - {_SNAPSHOTS}},
            **{name: getattr(self.leader.snapshots, name) for name in _fields(SnapshotSettings) - {_SWITCH}},
        }
        faults = [
            f"{name}: {value} is not positive"
            for name, value in numbers.items()
            if value < 0 or (not value and name not in _MAY_BE_ZERO)
        ]
        faults += [f"{name}: missing" for name in ("bootstrap_servers", "zookeeper", "name") if not getattr(self, name)]
        size = self.leader.snapshots.transaction_buffer_snapshot_segment_size
        if not SEGMENT_BYTES_MIN <= size <= SEGMENT_BYTES_MAX:
            faults.append(
                f"transaction_buffer_snapshot_segment_size: {size} is not in {SEGMENT_BYTES_MIN}..{SEGMENT_BYTES_MAX}"
            )
        if "/" in self.name:
            faults.append(f"name: {self.name!r} holds a slash")
        if self.metrics_address and self.metrics_endpoint is None:
            faults.append(f"metrics_address: {self.metrics_address!r} is not HOST:PORT")
        if self.peer_address not in ("", _NOWHERE) and self.peer_endpoint is None:
            faults.append(f"peer_address: {self.peer_address!r} is not HOST:PORT")
        if faults:
            raise ConfigError("; ".join(faults))

    @property
    def is_shown(self) -> bool:
        """Whether other coordinators may see from a connection that this one lives."""
        return self.peer_address != _NOWHERE

    @property
    def peer_endpoint(self) -> tuple[str, int] | None:
        """Host and port of ``peer_address``; None if there is none."""
        return _endpoint(self.peer_address)

    @property
    def metrics_endpoint(self) -> tuple[str, int] | None:
        """Host and port of ``metrics_address``; None if there is none."""
        return _endpoint(self.metrics_address)


def load_coordinator_settings(
    flags: Mapping[str, str | float | None], environ: Mapping[str, str] | None = None
) -> CoordinatorSettings:
    """The settings from flags, the environment and the TOML file, in this order of strength.

    Raises:
        ConfigError: something is wrong, unknown or missing; everything is named.
    """
    environ = os.environ if environ is None else environ
    addresses = ("bootstrap_servers", "zookeeper", "zookeeper_root")
    given = {name: flags.get(name) for name in addresses}
    connection = load_settings({name: None if value is None else str(value) for name, value in given.items()})
    own = _fields(CoordinatorSettings) - {*addresses, "security", "zookeeper_security", "limits", "leader"}
    limits, leader, snapshots = _fields(BufferLimits), _fields(LeaderSettings) - {_SNAPSHOTS}, _fields(SnapshotSettings)
    known = own | limits | leader | snapshots
    values = _from_file(environ) | {
        name: environ[variable] for name in sorted(known) if environ.get(variable := PREFIX + name.upper())
    }
    values |= {name: value for name, value in flags.items() if value is not None and name not in addresses}
    faults = [f"{_TABLE}.{name}: is unknown{_nearest(name, known)}" for name in values.keys() - known]
    parsed: dict[str, Any] = {}
    for name in values.keys() & known:
        try:
            parsed[name] = _parse(name, values[name])
        except (ValueError, KeyError):
            faults.append(
                f"{_TABLE}.{name}: {values[name]!r} is not {'true or false' if name == _SWITCH else 'a number'}"
            )
    if faults:
        raise ConfigError("; ".join(sorted(faults)))
    return CoordinatorSettings(
        bootstrap_servers=connection.bootstrap_servers,
        zookeeper=connection.zookeeper,
        zookeeper_root=connection.zookeeper_root,
        security=connection.kafka,
        zookeeper_security=connection.zookeeper_security,
        limits=BufferLimits(**{name: parsed[name] for name in parsed.keys() & limits}),
        leader=LeaderSettings(
            **{name: parsed[name] for name in parsed.keys() & leader},
            snapshots=SnapshotSettings(**{name: parsed[name] for name in parsed.keys() & snapshots}),
        ),
        **{name: parsed[name] for name in parsed.keys() & own},
    )


def _endpoint(address: str) -> tuple[str, int] | None:
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found["port"]) > 65535:
        return None
    return found["host"].strip("[]"), int(found["port"])


def _fields(kind: type) -> set[str]:
    return {item.name for item in dataclasses.fields(kind)}


def _parse(name: str, value: object) -> object:
    """Names and paths are text, delays in seconds may be fractions, one is a switch, all others are whole numbers."""
    if name in _TEXTS:
        return str(value)
    if name == _SWITCH:
        return {"true": True, "false": False}[str(value).lower()]
    return float(str(value)) if name.endswith("_s") else int(str(value))


def _from_file(environ: Mapping[str, str]) -> dict[str, object]:
    """The table of the TOML file, which has been read and checked for everything else before."""
    path = environ.get(CONFIG_VARIABLE)
    if not path:
        return {}
    with Path(path).expanduser().open("rb") as file:
        table = tomllib.load(file).get(_TABLE, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{_TABLE} (in {path}): is {table!r}, but a table is expected")
    return {_CAPITAL.sub("_", name).lower(): value for name, value in table.items()}


def _nearest(key: str, known: set[str]) -> str:
    nearest = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {nearest[0]}?" if nearest else ""
