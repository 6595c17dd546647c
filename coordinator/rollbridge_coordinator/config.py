"""Settings of a coordinator daemon, and their sources.

Addresses and security have the same sources as for clients (:mod:`rollbridge.config`). Everything else comes from
``ROLLBRIDGE_COORDINATOR_...`` variables, such as ``ROLLBRIDGE_COORDINATOR_CACHE_BYTES_MAX``, or from the table
``[coordinator]`` of the TOML file that ``ROLLBRIDGE_CONFIG`` names; flags win over both. In the file, names may also be
spelt as in PIP-196: ``transactionBufferSegmentedSnapshotEnabled``.
"""

from __future__ import annotations

import os
import re
import socket
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final
from urllib.parse import urlsplit

from rollbridge.base.options import (
    MIB,
    by_present_names,
    constants_of,
    faults_of,
    keys_of,
    option,
    table_of,
    unknown,
    unknown_variables,
    values_of,
)
from rollbridge.buffer.fold import BufferLimits
from rollbridge.config import CONFIG_VARIABLE, ConnectionSettings, load_settings
from rollbridge.errors import ConfigError
from rollbridge_coordinator.core.settings import LeaderSettings, ScalingSettings, SnapshotSettings

PREFIX: Final = "ROLLBRIDGE_COORDINATOR_"
_TABLE: Final = "coordinator"
_NOWHERE: Final = "none"
_ADDRESSES: Final = ("bootstrap_servers", "zookeeper", "zookeeper_root")
TOKEN_CHARACTERS_MIN: Final = 16
TOKEN_DIFFERENT_MIN: Final = 6
_ADDRESS: Final = re.compile(r"(?P<host>[^\s:\[\]]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
_CAPITAL: Final = re.compile("(?<!^)(?=[A-Z])")


def _default_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def _endpoint(address: str) -> tuple[str, int] | None:
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found["port"]) > 65535:
        return None
    return found["host"].strip("[]"), int(found["port"])


def _check_address(address: str) -> None:
    if address and _endpoint(address) is None:
        raise ValueError(f"{address!r} is not HOST:PORT")


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if url and (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or "@" in parts.netloc
        or parts.query
        or parts.fragment
    ):
        raise ValueError(f"{url!r} is not http://HOST/ or https://HOST/, with a port or a path if needed")


def _check_token(token: str) -> None:
    if token and (len(token) < TOKEN_CHARACTERS_MIN or not all("!" <= letter <= "~" for letter in token)):
        raise ValueError("is too short, or has characters other than ASCII letters, digits and punctuation")
    if token and len(set(token)) < TOKEN_DIFFERENT_MIN:
        raise ValueError("has too few different characters to be random")


def _check_peer(address: str) -> None:
    if address != _NOWHERE:
        _check_address(address)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """Settings of a coordinator daemon; all faults are reported at once."""

    connection: ConnectionSettings
    """Brokers, ZooKeeper, and the coordinator's own credentials."""
    name: str = option(_default_name)
    """Name of this daemon among the coordinators; must be unique. Also set by the flag ``--name``. If left out: host
    and process id."""
    session_timeout_s: float = 6.0
    """ZooKeeper session time-out: time until another daemon takes over when this one is paused or its machine is gone.
    Also set by the flag ``--session-timeout``."""
    wait_at_start_s: float = option(-1, low=-1)
    """Time to wait at start for Kafka and ZooKeeper before the process ends with exit code 7. -1: no limit. Wrong
    credentials, or a path of another cluster, end it at once.
    """
    merge_timeout_s: float = 900.0
    """Longest time of a merge, that is, of its native transaction; at most ``transaction.max.timeout.ms`` of the
    brokers. A round that takes longer is merged one transaction at a time, and one that still does is aborted."""
    standby_transactions_max: int = option(300_000, low=0)
    """Most transactions that a standby holds for one group, open or ended since the last snapshots, about 0.4 KB each;
    beyond that it pauses for a minute. 0: no standby; a takeover reads everything since the snapshots.
    """
    replication_factor: int = option(-1, low=-1)
    """Replication factor of commit logs; -1 is the brokers' default."""
    metrics_address: str = option("", check=_check_address)
    """``HOST:PORT`` at which ``/metrics`` and ``/healthz`` are served over HTTP, without access control; port 0 is a
    free one, which the log names. Not served if empty; ``0.0.0.0:9464`` in the container image."""
    metrics_texts: bool = True
    """Show client and label of the oldest transaction in metrics, cut to 64 characters: records of others may be
    recognized by them.
    """
    probe_socket: str = ""
    """Path of a Unix socket that answers `/healthz` and `/livez` to probes of this machine, independent of traffic at
    other addresses. Not served if empty; ``/tmp/rollbridge.sock`` in the container image.
    """
    page_address: str = option("", check=_check_address)
    """``HOST:PORT`` of the live page over HTTP. Everyone who reaches it can read it, so bind it to ``127.0.0.1``, or to
    an address behind a proxy; port 0 is a free one, which the log names. Not served if empty.
    """
    page_url: str = option("", check=_check_url)
    """URL at which operators reach the page, if not its address: behind a proxy, say. Other coordinators' pages link to
    it. If left out: its address, unless that is local to this machine.
    """
    page_token: str = option("", check=_check_token, secret=True)
    """Token for abort, extend and scale on the page: 16 or more random characters (``openssl rand -hex 16``). Empty:
    the page only shows."""
    peer_address: str = option("", check=_check_peer)
    """``HOST:PORT`` at which other coordinators connect to notice the end of this process (nothing is served); port 0
    is a free one. Set it where only certain ports are open between machines. ``none``: no port, so a killed coordinator
    is replaced when its session times out. If left out: the address from which ZooKeeper is reached, and a free port.
    """
    limits: BufferLimits = field(default_factory=BufferLimits)
    leader: LeaderSettings = field(default_factory=LeaderSettings)
    """Settings of a leader, those of snapshots among them."""

    patience_s: ClassVar[float] = 3.0
    """Time that a daemon waits before it leads a vacant group that another coordinator should take: one that follows
    the group closely, or its first choice."""
    seal_timeout_s: ClassVar[float] = 60.0
    """Longest time of a seal, for which all streams of the group wait, before its stream waits alone. A seal waits 2 s
    for native transactions of others, and 3 s for partitions without a leader."""
    poll_s: ClassVar[float] = 0.05
    """Longest wait for new frames before other work is done."""
    standby_cache_bytes_max: ClassVar[int] = 64 * MIB
    """Most bytes of frames that a standby keeps in memory for one group."""

    def __post_init__(self) -> None:
        faults = list(faults_of(self, self.limits, self.leader, self.leader.snapshots, self.leader.scaling))
        faults += [] if self.name else ["name: missing"]
        if self.page_address and self.page_address == self.metrics_address and not self.page_address.endswith(":0"):
            faults.append(f"page_address: metrics are served at {self.page_address}; give the page another port")
        if "/" in self.name:
            faults.append(f"name: {self.name!r} holds a slash")
        ConfigError.raise_for(faults)

    @property
    def is_shown(self) -> bool:
        """True if other coordinators may notice by a connection that this one lives."""
        return self.peer_address != _NOWHERE

    @property
    def peer_endpoint(self) -> tuple[str, int] | None:
        return _endpoint(self.peer_address)

    @property
    def page_endpoint(self) -> tuple[str, int] | None:
        return _endpoint(self.page_address)

    @property
    def metrics_endpoint(self) -> tuple[str, int] | None:
        return _endpoint(self.metrics_address)


def load_coordinator_settings(
    flags: Mapping[str, str | float | None], environ: Mapping[str, str] | None = None
) -> CoordinatorSettings:
    """Load the settings from flags, the environment and the TOML file, in this order of precedence.

    Raises:
        ConfigError: settings are wrong, unknown or missing; all of them are named.
    """
    environ = os.environ if environ is None else environ
    given = {key: None if (value := flags.get(key)) is None else str(value) for key in _ADDRESSES}
    connection = load_settings(given)
    faults: list[str] = []
    fixed = {PREFIX + key.upper(): value for key, value in _CONSTANTS.items()}
    strange = list(unknown_variables(environ, PREFIX, {PREFIX + key.upper() for key in (*_KEYS, *_FORMER)}, fixed))
    variables = {key: value for key in (*_KEYS, *_FORMER) if (value := environ.get(PREFIX + key.upper()))}
    values = by_present_names(_from_file(environ), "file", faults, *_TABLES)
    values |= by_present_names(variables, "environment", faults, *_TABLES)
    values |= {key: value for key, value in flags.items() if value is not None and key not in _ADDRESSES}
    faults += unknown(values, _KEYS, constants=_CONSTANTS)
    found = {kind: values_of(kind, values, faults) for kind in _TABLES}
    ConfigError.raise_for(sorted([*(f"{_TABLE}.{fault}" for fault in faults), *strange]))
    return CoordinatorSettings(
        **found[CoordinatorSettings],
        connection=connection,
        limits=BufferLimits(**found[BufferLimits]),
        leader=LeaderSettings(
            **found[LeaderSettings],
            snapshots=SnapshotSettings(**found[SnapshotSettings]),
            scaling=ScalingSettings(**found[ScalingSettings]),
        ),
    )


_TABLES: Final = (CoordinatorSettings, BufferLimits, LeaderSettings, SnapshotSettings, ScalingSettings)
_KEYS: Final = keys_of(*_TABLES)
_CONSTANTS: Final = {key: value for kind in _TABLES for key, value in constants_of(kind).items()} | {
    "gather_ms_max": LeaderSettings.late_commit_batch_ms,
    "scaling_check_ms": f"scaling_window_ms / {ScalingSettings.scaling_checks}",
}
"""Options of the last release among them."""
_FORMER: Final = [name for kind in _TABLES for row in table_of(kind) for name in row.former]


def _from_file(environ: Mapping[str, str]) -> dict[str, object]:
    """Return the coordinator's table of the TOML file; the file has been read, and the rest checked, before."""
    path = environ.get(CONFIG_VARIABLE)
    if not path:
        return {}
    with Path(path).expanduser().open("rb") as file:
        table = tomllib.load(file).get(_TABLE, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{_TABLE} (in {path}): is {table!r}, but a table is expected")
    return {_CAPITAL.sub("_", name).lower(): value for name, value in table.items()}
