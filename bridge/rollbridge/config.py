"""Options of the client library with their checks, and the sources of connection settings.

From strongest to weakest:

1. command line flags (or arguments of a call);
2. environment variables: ``ROLLBRIDGE_BOOTSTRAP_SERVERS``, ``ROLLBRIDGE_ZOOKEEPER``, ``ROLLBRIDGE_ZOOKEEPER_ROOT``,
   ``ROLLBRIDGE_CLIENT_NAME``, and ``ROLLBRIDGE_KAFKA_...`` and ``ROLLBRIDGE_ZOOKEEPER_SECURITY_...`` for security, such
   as ``ROLLBRIDGE_KAFKA_SASL_PASSWORD``; with ``_FILE`` appended to its name, a variable names the file of the value;
3. a TOML file, named by ``--config`` or ``ROLLBRIDGE_CONFIG``::

       bootstrap_servers = "broker-1:9093,broker-2:9093"
       zookeeper = "zk-1:2181,zk-2:2181,zk-3:2181"
       [kafka]
       security.protocol = "SASL_SSL"
       [zookeeper_security]
       digest.username = "alice"
       [coordinator]                      # read by coordinators only
       cache_bytes_max = 268435456

4. the embedded cluster, if one was started with ``rollbridge up`` and neither address is set above. One address is
   never completed from there: a foreign Kafka does not go with the embedded ZooKeeper.

Nothing is read on import. All faults are reported together, each with the name of its key and where it was set.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import platformdirs

from rollbridge.base.arguments import check_fields
from rollbridge.base.options import GIB, KIB, MIB, faults_of, filled, function, nearest, option, table_of
from rollbridge.base.security import (
    NO_SECURITY_SETTING,
    SECURITY_KEYS,
    ZOOKEEPER_SECURITY_KEYS,
    Security,
    ZooKeeperSecurity,
)
from rollbridge.buffer.frames import FRAME_BYTES_DEFAULT
from rollbridge.errors import ConfigError, LocalEnvironmentError
from rollbridge.kafka.records import BUFFER_BYTES_MIN, Compression
from rollbridge.stream.names import check_client_name
from rollbridge.stream.reading import Reset

logger = logging.getLogger(__name__)

CONFIG_VARIABLE: Final = "ROLLBRIDGE_CONFIG"
"""Environment variable with the path of the TOML file."""

HOME_VARIABLE: Final = "ROLLBRIDGE_HOME"
"""Environment variable with the directory of the cluster that runs on this machine."""
ADDRESSES_FILE: Final = "cluster.json"
"""JSON, written by ``rollbridge up``: ``bootstrap_servers``, ``zookeeper``, and whether it is ``running``."""
ADDRESSES_FORMAT: Final = 1
"""Its ``format``; a file of another one is refused."""
_TABLES: Final[Mapping[str, type[Security | ZooKeeperSecurity]]] = {
    "kafka": Security,
    "zookeeper_security": ZooKeeperSecurity,
}
"""Tables of security settings."""
_PREFIX = "ROLLBRIDGE_"
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_ROOT = re.compile(r"(/[A-Za-z0-9._-]+)+")


def _check_servers(text: str, *, port_needed: bool = True) -> None:
    if not text:
        raise ValueError("is empty")
    for address in text.split(","):
        found = _HOST_PORT.fullmatch(address.strip())
        if found is None or not (1 <= int(found[2]) <= 65535 if found[2] else not port_needed):
            raise ValueError(f"{address!r} is not host:port")


def _check_zookeeper(text: str) -> None:
    hosts, slash, chroot = text.partition("/")
    _check_servers(hosts, port_needed=False)
    if slash and not _ROOT.fullmatch(slash + chroot):
        raise ValueError(f"{slash + chroot!r} is not a ZooKeeper path")


def _check_root(path: str) -> None:
    if not _ROOT.fullmatch(path) or {".", ".."} & set(path.split("/")):
        raise ValueError(f"{path!r} is not a path such as /rollbridge")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """Everything that is needed to reach a cluster; checked on construction.

    Raises:
        ConfigError: one or several settings are wrong; all are named.
    """

    bootstrap_servers: str = option(MISSING, check=_check_servers)
    """Kafka: ``host:port``, several with commas between."""
    zookeeper: str = option(MISSING, check=_check_zookeeper)
    """``host:port``, several separated by commas; the port is 2181 if left out. A chroot may follow."""
    zookeeper_root: str = option("/rollbridge", check=_check_root)
    """Root path of one rollbridge; one per Kafka cluster."""
    client_name: str = option("rollbridge", check=check_client_name)
    """Names this client in transactions and logs: 1 to 128 of ``A-Z a-z 0-9 . _ : @ -``."""
    kafka: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Security settings under librdkafka's names. Only these pass: others could load code (``plugin.library.paths``,
    ``ssl.engine.location``) or undo what transactions rest on. Not in ``repr``, as there are secrets among them."""

    zookeeper_security: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Security settings of the way to ZooKeeper, see :mod:`rollbridge.base.security`. Not in ``repr`` either."""

    def __post_init__(self) -> None:
        faults = list(faults_of(self))
        for table, kind in _TABLES.items():
            wrong: list[str] = []
            kind.from_config(getattr(self, table), wrong)
            faults += [f"{table}.{fault}" for fault in wrong]
        ConfigError.raise_for(faults)

    def identity(self) -> str:
        """Identity and target of a connection: equal for connections that may be shared; holds no secret.

        The contents of files count, so that changed credentials make another connection.
        """
        found = hashlib.sha256(repr((self.bootstrap_servers, self.zookeeper, self.zookeeper_root)).encode())
        for table in (self.kafka, self.zookeeper_security):
            found.update(repr(sorted(table.items())).encode())
            for key in sorted(table):
                if key.endswith(".location"):
                    found.update(_content_of(Path(table[key])))
        return found.hexdigest()


def _content_of(path: Path) -> bytes:
    """Return what a file holds, or the files of a directory; nothing if it cannot be read: its user reports it."""
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        return b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files if file.is_file())
    except OSError:
        return b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientAddresses:
    """The same settings among those of confluent-kafka; what is left out comes from where :func:`load_settings` finds
    it."""

    bootstrap_servers: str | None = option(None, key="bootstrap.servers")
    """Kafka: ``host:port,...``"""
    zookeeper: str | None = None
    """ZooKeeper: ``host:port,...``"""
    zookeeper_root: str | None = option(None, key="zookeeper.root")
    """Root path. If left out: ``/rollbridge``."""
    client_id: str | None = option(None, key="client.id")
    """Names this client in transactions and logs. If left out: ``rollbridge``."""


_KEYS: Final = tuple(row.key for row in table_of(ConnectionSettings))
_VARIABLES: Final = {_PREFIX + key.upper(): key for key in _KEYS}
_SECURITY_VARIABLES: Final = {
    table: {f"{_PREFIX}{table}_{key}".upper().replace(".", "_"): key for key in keys}
    for table, keys in (("kafka", SECURITY_KEYS), ("zookeeper_security", ZOOKEEPER_SECURITY_KEYS))
}
_FILE = "_FILE"
_SECRET = "password"
_OTHERS: Final = 0o077
"""Permissions of everybody but the owner of a file."""
_ADDRESSES: Final = ("bootstrap_servers", "zookeeper")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Settings of one source; ``origin`` is its name in messages."""

    origin: str
    values: Mapping[str, str] = field(repr=False)
    security: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)
    """By table."""


def load_settings(
    flags: Mapping[str, str | None] | None = None,
    *,
    config_file: Path | None = None,
    home: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> ConnectionSettings:
    """Put the settings together from all places; see the module's head for their order.

    Args:
        flags: By key; ``None`` means not given.
        config_file: The TOML file; ``ROLLBRIDGE_CONFIG`` names it otherwise.
        home: The embedded cluster's directory; ``ROLLBRIDGE_HOME`` or the user's data directory otherwise.
        environ: The environment; the process's own by default.

    Raises:
        ConfigError: something is wrong, unknown or missing; everything is named at once.
    """
    environ = os.environ if environ is None else environ
    faults: list[str] = []
    layers = [
        _Layer(origin="command line", values={key: value for key, value in (flags or {}).items() if value}),
        _from_environment(environ, faults),
    ]
    if config_file is None and environ.get(CONFIG_VARIABLE):
        config_file = Path(environ[CONFIG_VARIABLE]).expanduser()
    if config_file is not None:
        layers.append(_from_file(config_file, faults))
    values = {key: layer.values[key] for layer in reversed(layers) for key in layer.values}
    missing = [key for key in _ADDRESSES if key not in values]
    if len(missing) == 1:
        other = next(key for key in _ADDRESSES if key in values)
        origin = next(layer.origin for layer in layers if other in layer.values)
        faults.append(
            f"{missing[0]}: not set, but {other} is (by the {origin}), so the embedded cluster does not come into it; "
            f"set both or neither"
        )
    elif missing:
        local = _from_home(home or default_home(environ))
        if local:
            values |= local
        else:
            faults.append(
                "no cluster is named and none is embedded: start one with `rollbridge up`, or set bootstrap_servers "
                f"and zookeeper (--bootstrap-servers and --zookeeper, {', '.join(list(_VARIABLES)[:2])}, or a file)"
            )
    security = {
        table: {key: value for layer in reversed(layers) for key, value in layer.security.get(table, {}).items()}
        for table in _TABLES
    }
    try:
        # Missing addresses were reported above; the stand-ins let the other settings be checked as well.
        settings = ConnectionSettings(
            **{**dict.fromkeys(_ADDRESSES, "missing:1"), **values},
            kafka=security["kafka"],
            zookeeper_security=security["zookeeper_security"],
        )
    except ConfigError as exc:
        raise ConfigError(*faults, *exc.faults) from None
    ConfigError.raise_for(faults)
    return settings


def default_home(environ: Mapping[str, str] | None = None) -> Path:
    """Return the directory of the cluster on this machine that is meant when none is named."""
    named = (os.environ if environ is None else environ).get(HOME_VARIABLE)
    return Path(named).expanduser() if named else Path(platformdirs.user_data_dir("rollbridge"))


def _from_home(home: Path) -> dict[str, str]:
    """Return the addresses of the cluster on this machine; none if it does not run."""
    path = home / ADDRESSES_FILE
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        if said["format"] != ADDRESSES_FORMAT:
            raise ValueError(f"it does not say that its format is {ADDRESSES_FORMAT}")
        return {key: str(said[key]) for key in _ADDRESSES} if said["running"] else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise LocalEnvironmentError(
            f"{path} is not readable as the state of an embedded cluster: {exc!r}; move {home} away to start afresh"
        ) from exc


def _from_environment(environ: Mapping[str, str], faults: list[str]) -> _Layer:
    values: dict[str, str] = {}
    security: dict[str, dict[str, str]] = {table: {} for table in _TABLES}
    for variable, value in sorted(environ.items()):
        if not value or not variable.startswith(_PREFIX):
            continue
        table = next((item for item in _TABLES if variable.startswith(f"{_PREFIX}{item}_".upper())), None)
        if key := _VARIABLES.get(variable):
            values[key] = value
        elif table is not None:
            known = _SECURITY_VARIABLES[table]
            if key := known.get(variable):
                security[table][key] = value
            elif (key := known.get(variable.removesuffix(_FILE))) and variable.endswith(_FILE):
                security[table][key] = _content(variable, value, faults)
            else:
                faults.append(f"{variable}: {NO_SECURITY_SETTING}{nearest(variable, known)}")
        elif meant := nearest(variable, _VARIABLES, cutoff=0.9):
            # Other variables with our prefix are none of this module's business, but this one is a slip.
            faults.append(f"{variable}: is unknown{meant}")
    return _Layer(origin="environment", values=values, security=security)


def _content(variable: str, path: str, faults: list[str]) -> str:
    """Return what a file holds, without the line feed at its end."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as exc:
        faults.append(f"{variable}: {path} cannot be read: {exc}")
        return ""


def _from_file(path: Path, faults: list[str]) -> _Layer:
    origin = f"file {path}"
    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        faults.append(f"{path}: is not readable as TOML: {exc}")
        return _Layer(origin=origin, values={})
    values: dict[str, str] = {}
    for key, value in document.items():
        match value:
            case _ if key in _TABLES or key == "coordinator":
                continue  # the latter is for coordinators alone, which check it
            case _ if key not in _KEYS:
                faults.append(f"{key} (in {path}): is unknown{nearest(key, (*_KEYS, *_TABLES))}")
            case str():
                values[key] = value
            case [*several] if key in _ADDRESSES and all(isinstance(one, str) for one in several):
                values[key] = ",".join(several)
            case _:
                faults.append(f"{key} (in {path}): is {value!r}, but text is expected")
    security: dict[str, Mapping[str, str]] = {}
    for table in _TABLES:
        content = document.get(table, {})
        if isinstance(content, dict):
            security[table] = _flatten(content)
        else:
            faults.append(f"{table} (in {path}): a table is expected")
    if any(key.endswith(_SECRET) for content in security.values() for key in content):
        _look_at_mode(path)
    return _Layer(origin=origin, values=values, security=security)


def _look_at_mode(path: Path) -> None:
    """Warn of a file with secrets that others may read. No error: mounted secrets of containers often look so."""
    mode = path.stat().st_mode & 0o777
    if mode & _OTHERS:
        logger.warning("config.exposed path=%s mode=%o: others may read its passwords, use chmod 600", path, mode)


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Undo what TOML makes of ``security.protocol = ...``: a table in a table."""
    flat: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = str(value).lower() if isinstance(value, bool) else str(value)
    return flat


# Options of connections, writers and consumers


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Options of a connection; checked on construction.

    Raises:
        ConfigError: one or several are wrong; all are named.
    """

    compression: str = option("none", check=Compression.named)
    """Codec of the frames, which records keep all the way to the segment: none, gzip, snappy, lz4 or zstd."""
    frame_bytes: int = option(FRAME_BYTES_DEFAULT, low=16 * KIB, high=MIB)
    """Bytes of a frame before compression; larger frames cost less per record, and more memory."""
    linger_s: float = 1.0
    """Maximum seconds for which records of an idle open transaction wait in this process before they are sent."""
    buffer_bytes: int = option(64 * MIB, low=BUFFER_BYTES_MIN)
    """Maximum bytes that wait for the brokers in this process; beyond it writers wait."""
    backpressure_timeout_s: float = 60.0
    """Seconds that a writer waits for room before it gets a ``BackpressureError``."""
    connect_timeout_s: float = 15.0
    """Maximum seconds for connecting."""
    commit_timeout_s: float = 120.0
    """Seconds that a commit, an abort or a flush waits unless told otherwise. A merge takes about 3 s per GB."""
    admin_timeout_s: float = 30.0
    """Seconds that an admin request waits for its answer."""
    session_timeout_s: float = 10.0
    """ZooKeeper session time-out in seconds; leases of conditional writers and pending requests end with it."""
    lease: timedelta = option(timedelta(hours=24))
    """Default time for which a transaction may stay open; at most ``lease_max``. No pings are needed."""
    lease_max: timedelta = option(timedelta(days=7))
    """Longest lease that may be asked for; coordinators have a limit of their own, with the same default."""
    transaction_bytes_max: int = 16 * GIB
    """Largest transaction that is written; coordinators abort larger ones."""
    open_transactions_max: int = 100_000
    """Maximum number of transactions that this connection keeps open at once, and of other client names that it serves,
    a few kilobytes each."""

    def __post_init__(self) -> None:
        check_fields(self)
        faults = list(faults_of(self))
        if not timedelta(0) < self.lease <= self.lease_max:
            faults.append(f"lease: {self.lease} is not positive, or longer than lease_max, {self.lease_max}")
        ConfigError.raise_for(faults)

    @property
    def codec(self) -> Compression:
        """Number of the codec."""
        return Compression.named(self.compression)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    """Options of plain writes; checked on construction.

    Raises:
        ConfigError: One or several options are wrong; the error names all of them.
    """

    linger_s: float = option(0.005, low=0, high=900)
    """Seconds that a record waits for others to share its batch; 0 sends as soon as nothing else is in flight."""
    batch_bytes: int = option(FRAME_BYTES_DEFAULT, low=KIB, high=MIB)
    """Largest batch before compression, in bytes; larger ones cost less per record."""
    compression: str = option("none", check=Compression.named)
    """Codec of the batches: none, gzip, snappy, lz4 or zstd."""
    buffer_bytes: int = option(64 * MIB, low=BUFFER_BYTES_MIN)
    """Bytes that may wait for the brokers; beyond that, writers block."""
    block_s: float = 60.0
    """Seconds that a writer blocks for room before it gets a ``BackpressureError``."""
    delivery_timeout_s: float = 300.0
    """Seconds without an answer after which a record fails; as librdkafka's ``message.timeout.ms``."""

    def __post_init__(self) -> None:
        check_fields(self)
        ConfigError.raise_for(faults_of(self))

    @property
    def codec(self) -> Compression:
        """Number of the codec in Kafka's batch header."""
        return Compression.named(self.compression)


_COOPERATIVE: Final = "cooperative-sticky"
_DAY_MS: Final = 86_400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions(ClientAddresses):
    """Settings of confluent-kafka's that rollbridge carries out itself."""

    group_id: str = option(MISSING, key="group.id", check=filled)
    """Consumer group."""
    instance_id: str | None = option(None, key="group.instance.id")
    """Name of a static member, which keeps its segments through a short absence."""
    reset: Reset = option(
        Reset.LATEST,
        key="auto.offset.reset",
        choices={
            **dict.fromkeys(("latest", "largest", "end"), Reset.LATEST),
            **dict.fromkeys(("earliest", "smallest", "beginning"), Reset.EARLIEST),
            "error": Reset.ERROR,
        },
    )
    """Start of a group that has committed nothing."""
    isolation: str = option(
        "read_committed",
        key="isolation.level",
        choices=("read_committed",),
        why="a group reads committed records only; Bridge.reader(isolation='read_uncommitted') previews those of open "
        "transactions",
    )
    """Isolation level; only committed records are read."""
    assignor: str = option(
        _COOPERATIVE,
        key="partition.assignment.strategy",
        choices=(_COOPERATIVE, "roundrobin"),
        why=f"{_COOPERATIVE} and roundrobin are; 'range' would give every segment to the same member, since each is a "
        "topic of one partition",
    )
    """Assignment of segments to members."""
    auto_commit: bool = option(True, key="enable.auto.commit")
    """Commit at intervals what was handed out."""
    interval_ms: int = option(5_000, key="auto.commit.interval.ms", low=1, high=_DAY_MS)
    """Interval between automatic commits, in ms."""
    auto_store: bool = option(True, key="enable.auto.offset.store")
    """Count a record as processed once the application asks for the next one; otherwise by ``store_offsets``."""
    show_ends: bool = option(False, key="enable.partition.eof")
    """Hand out ``_PARTITION_EOF`` events."""
    on_commit: Callable[..., None] | None = option(None, convert=function)
    """Callback after each commit, with its error, or None, and the partitions."""

    @property
    def cooperative(self) -> bool:
        """True if members keep their segments while others join and leave."""
        return self.assignor == _COOPERATIVE

    @property
    def is_static(self) -> bool:
        """True if the member keeps its segments through a short absence."""
        return self.instance_id is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings(ConsumerOptions):
    """Checked settings of a consumer; ``kafka`` is the configuration for confluent-kafka."""

    connection: ConnectionSettings
    kafka: Mapping[str, Any] = field(repr=False)
