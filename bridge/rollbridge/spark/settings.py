"""Options of the Spark formats, checked all at once before anything is read or written.

Spark hands options over with lower-cased names, some of its own (``checkpointLocation``) among them. Every other option
that no format has is refused, because a misspelt option would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from pyspark.sql import types as T

from rollbridge.base.options import keys_of, option, unknown, values_of, words
from rollbridge.config import ClientOptions, ConnectionSettings
from rollbridge.errors import ConfigError, InvalidNameError, InvalidRequestError
from rollbridge.kafka.records import Compression
from rollbridge.stream.names import TOPICS_SCOPE, GroupName, StreamName, check_adoptable, check_stream_or_topic
from rollbridge.stream.positions import ReadPosition, parse_log_start, parse_start

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


# The columns of ``format("rollbridge")``: their names and types.


_HEADERS: Final = T.ArrayType(
    T.StructType([T.StructField("key", T.StringType()), T.StructField("value", T.BinaryType())])
)
_COLUMNS: Final[Mapping[str, T.DataType]] = {
    "key": T.BinaryType(),
    "value": T.BinaryType(),
    "topic": T.StringType(),
    "partition": T.IntegerType(),
    "offset": T.LongType(),
    "timestamp": T.TimestampType(),
    "timestampType": T.IntegerType(),
    "headers": _HEADERS,
    "stream": T.StringType(),
    "segment": T.LongType(),
    "epoch": T.LongType(),
    "sequenceId": T.LongType(),
    "transactionId": T.StringType(),
    "localSequence": T.LongType(),
    "commitPosition": T.LongType(),
    "committed": T.BooleanType(),
}
HEADERS: Final = ("headers",)
TRANSACTION: Final = ("transactionId", "localSequence")
COMMIT_POSITION: Final = ("commitPosition",)
PREVIEW: Final = ("committed",)
_ON_REQUEST: Final = frozenset((*HEADERS, *TRANSACTION, *COMMIT_POSITION, *PREVIEW))


def schema_of(asked: Iterable[str]) -> StructType:
    """Return the columns that are always there, and those on request that are asked for."""
    wanted = set(asked)
    return T.StructType(
        [T.StructField(name, kind) for name, kind in _COLUMNS.items() if name not in _ON_REQUEST or name in wanted]
    )


def check_schema(schema: StructType) -> list[str]:
    """Return the names of a schema's columns; the schema may be the user's.

    Raises:
        ConfigError: columns are unknown or of another type; all of them are named.
    """
    known = {name.lower(): name for name in _COLUMNS}
    faults, names = [], []
    for field in schema.fields:
        name = known.get(field.name.lower())
        if name is None:
            faults.append(f"there is no column {field.name}; the columns are {', '.join(_COLUMNS)}")
        elif _plain(field.dataType) != _plain(_COLUMNS[name]):
            wanted, given = _COLUMNS[name].simpleString(), field.dataType.simpleString()
            faults.append(f"column {name} is of type {wanted}, not {given}: cast it behind the source")
        else:
            names.append(name)
    if faults:
        raise ConfigError("schema: " + "; ".join(faults))
    return names


def _plain(kind: T.DataType) -> str:
    """Return a type without its nullability, which makes no difference."""
    return str(kind.simpleString())


# Records to Arrow columns

STREAM: Final = "stream"
TOPIC: Final = "topic"
SERVERS: Final = "kafka.bootstrap.servers"
ZOOKEEPER: Final = "zookeeper"
ROOT: Final = "zookeeper.root"
GROUP: Final = "group"
CLIENT_NAME: Final = "client.name"
COMPRESSION: Final = "compression"
INCLUDE_HEADERS: Final = "includeHeaders"

SPARKS_OWN: Final = frozenset({"checkpointlocation", "path", "queryname"})
"""Options of Spark itself that it passes on to sources and sinks."""
_CONSTANTS: Final = {"quickack": "true"}
"""Options of the last release that cannot be set any more."""
_KAFKA: Final = "kafka."
_ZOOKEEPER: Final = "zookeeper."
_NAMES_OF_SETTINGS: Final = {"bootstrap_servers": SERVERS, "zookeeper_root": ROOT, "client_name": CLIENT_NAME}
"""Fields of :class:`ConnectionSettings` and the options that set them."""
_STAND_IN: Final = "missing:1"
_SOME_STREAM: Final = StreamName(TOPICS_SCOPE, "some")


class OptionReader:
    """Reader that takes options one table after the other and collects their faults, until :meth:`finish`."""

    def __init__(self, options: Mapping[str, str]) -> None:
        """Begin with nothing taken; ``options`` are as Spark gives them."""
        self._left = {name.lower(): value.strip() for name, value in options.items()}
        self._known: set[str] = set()
        self.faults: list[str] = []

    def read(self, table: type) -> dict[str, Any]:
        """Take the values of a table's options; an empty one counts as missing, and a wrong one gets its default."""
        keys = keys_of(table)
        self._known |= keys
        return values_of(table, {key: self._left.pop(key.lower(), "") or None for key in keys}, self.faults)

    def has(self, name: str) -> bool:
        """Return True if an option is given and was not taken yet."""
        return bool(self._left.get(name.lower()))

    def prefixed(self, prefix: str) -> dict[str, str]:
        """Take all options with a prefix that were not taken before; the prefix is cut off their names."""
        names = [name for name in self._left if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._left.pop(name) for name in names}

    def finish(self) -> None:
        """End the reading.

        Raises:
            ConfigError: options were at fault, or were not taken by any table.
        """
        self.faults += unknown(self._left.keys() - SPARKS_OWN, self._known, constants=_CONSTANTS)
        ConfigError.raise_for(self.faults)


def _streams(text: str) -> tuple[str, ...]:
    """Parse the names of streams, or of topics that streams have adopted.

    Raises:
        ValueError: there is none, or one is wrong or there twice; all faults are named.
    """
    return _names(text, check_stream_or_topic, "stream")


def _topics(text: str) -> tuple[str, ...]:
    return _names(text, check_adoptable, "topic")


def _names(text: str, check: Callable[[str], object], what: str) -> tuple[str, ...]:
    names, faults = words(text), []
    for name in names:
        try:
            check(name)
        except InvalidNameError as exc:
            faults.append(str(exc))
    if not names:
        faults.append(f"names no {what}")
    if len(set(names)) < len(names):
        faults.append(f"{', '.join(names)}: one of them is named twice")
    if faults:
        raise ValueError("; ".join(faults))
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkOptions:
    """Options of all formats."""

    streams: tuple[str, ...] = option((), key=STREAM, convert=_streams)
    """``scope/stream``, or the topic that a stream has adopted. The sink takes several, separated by commas: they are
    written in one transaction, and the column ``topic`` names the stream of each row, as it is named here. Required
    unless ``topic`` is given."""
    topics: tuple[str, ...] = option((), key=TOPIC, convert=_topics)
    """The same for adopted topics alone, named as Spark's own sink names them; with ``stream`` the sink writes to
    both."""
    servers: str = option(MISSING, key=SERVERS)
    """Kafka brokers, as every executor reaches them: ``host:port,...``"""
    zookeeper: str = option(MISSING, key=ZOOKEEPER)
    """ZooKeeper servers: ``host:port,...``"""
    root: str = option("/rollbridge", key=ROOT)
    """Path of the ZooKeeper node under which all metadata is kept."""
    group: GroupName | None = option(None, key=GROUP, convert=GroupName.parse)
    """Transaction group that the streams must belong to; streams of another one are refused."""
    client_name: str | None = option(None, key=CLIENT_NAME)
    """Client name of the transactions; only one query or job may use a name at a time. If left out: ``spark-`` and the
    query's id."""
    compression: str = option("none", key=COMPRESSION, convert=str.lower, check=Compression.named)
    """Compression codec of the sink: none, gzip, snappy, lz4 or zstd."""
    include_headers: bool | None = option(None, key=INCLUDE_HEADERS, choices={"true": True, "false": False})
    """Read, or write, the column ``headers``. If left out: ``false`` for a source, ``true`` for the sink."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkSettings(SparkOptions):
    """Settings common to the source and the sink. They can be pickled, and their ``repr`` shows no secrets."""

    connection: ConnectionSettings
    """Settings of the connection, with a placeholder for the client's name if none was given."""
    options: ClientOptions
    """Behaviour of a connection, with the compression codec of the options."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the streams and adopted topics, as the options name them."""
        return (*self.streams, *self.topics)

    def connected_as(self, client_name: str) -> ConnectionSettings:
        return replace(self.connection, client_name=client_name)


def read_settings(reader: OptionReader, *, streams_needed: bool = True) -> SparkSettings | None:
    """Return the settings that the formats share; None if they are at fault, which ``reader.finish()`` then raises.

    With ``streams_needed``, ``stream`` or ``topic`` must be given.
    """
    before = len(reader.faults)
    if streams_needed and not reader.has(STREAM) and not reader.has(TOPIC):
        reader.faults.append(f"{STREAM}: is missing, or {TOPIC} for an adopted topic")
    values = reader.read(SparkOptions)
    options = SparkOptions(**values)
    for name in sorted(set(options.streams) & set(options.topics)):
        reader.faults.append(f"{TOPIC}: {name} is among {STREAM} as well")
    try:
        connection = ConnectionSettings(
            bootstrap_servers=options.servers or _STAND_IN,
            zookeeper=options.zookeeper or _STAND_IN,
            zookeeper_root=options.root,
            kafka=reader.prefixed(_KAFKA),
            zookeeper_security=reader.prefixed(_ZOOKEEPER),
            **({"client_name": options.client_name} if options.client_name else {}),
        )
    except ConfigError as exc:
        for fault in exc.faults:
            name, colon, rest = fault.partition(": ")
            reader.faults.append(f"{_NAMES_OF_SETTINGS.get(name, name)}{colon}{rest}")
        return None
    if len(reader.faults) > before:
        return None
    return SparkSettings(**values, connection=connection, options=ClientOptions(compression=options.compression))


# Options of the sources


STARTING: Final = "startingOffsets"
ENDING: Final = "endingOffsets"
MAX_RECORDS: Final = "maxRecordsPerTrigger"
MIN_PARTITIONS: Final = "minPartitions"
FAIL_ON_DATA_LOSS: Final = "failOnDataLoss"
ISOLATION: Final = "isolation"
INCLUDE_TRANSACTION: Final = "includeTransaction"
INCLUDE_COMMIT_POSITION: Final = "includeCommitPosition"

COMMITTED: Final = "read_committed"
UNCOMMITTED: Final = "read_uncommitted"

Kind = Literal["schema", "batch", "streaming"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Options of every source."""

    start: str = option("", key=STARTING)
    """Start of a query without a checkpoint: ``earliest``, ``latest``, a time (``2026-01-31T12:00:00Z``, or ms since
    1970), a DLSN (``4-0:17:3``), an SN (``dlsn=4-0:17:3,seq=1017``) or a position (``sales/orders@4-0:17,4-1:0``). If
    left out: ``latest``; ``earliest`` in a batch."""
    end: str = option("", key=ENDING)
    """End of a batch, exclusive, in the same formats. If left out: ``latest``."""
    max_records: int | None = option(None, key=MAX_RECORDS, low=1)
    """Maximum number of offsets in a micro-batch, shared out among segments in proportion to their backlog; control
    markers count, so there may be fewer rows. If left out: no limit."""
    fail_on_data_loss: bool = option(True, key=FAIL_ON_DATA_LOSS)
    """Fail if records to be read were deleted or lost, or if compaction took away which transaction wrote one that is
    asked for; ``false`` logs a warning, and the query continues at what is left."""

    def places(self, kind: Kind, check: Callable[[str], object] | None, faults: list[str]) -> dict[str, str]:
        """Return start and end, with defaults that depend on the kind of query; note what that does not have.

        ``check`` raises InvalidRequestError for what is no place; None if that cannot be told.
        """
        if kind == "batch" and self.max_records is not None:
            faults.append(f"{MAX_RECORDS}: is for streaming queries; a batch ends at {ENDING}")
        if kind == "streaming" and self.end:
            faults.append(f"{ENDING}: is for batches; a streaming query that is to end has trigger(availableNow=True)")
        start = self.start or ("latest" if kind == "streaming" else "earliest")
        places = {"start": start, "end": self.end or "latest"}
        for name, text in zip((STARTING, ENDING), places.values(), strict=True):
            try:
                if check is not None:
                    check(text)
            except InvalidRequestError as exc:
                faults.append(f"{name}: {exc}")
        return places


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions(ReadOptions):
    """Options of the format ``rollbridge``."""

    min_partitions: int | None = option(None, key=MIN_PARTITIONS, low=1)
    """Minimum number of tasks, approximately; ranges are split to reach it."""
    isolation: str = option(COMMITTED, key=ISOLATION, choices=(COMMITTED, UNCOMMITTED))
    """``read_uncommitted``, only in a batch: also read the records of transactions that are open now, with
    ``committed`` false."""
    transaction: bool = option(False, key=INCLUDE_TRANSACTION)
    """Add the columns ``transactionId`` and ``localSequence``."""
    position: bool = option(False, key=INCLUDE_COMMIT_POSITION)
    """Add the column ``commitPosition``; the driver reads the commit log for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings(SourceOptions):
    """Settings of a source; can be pickled."""

    shared: SparkSettings

    @property
    def stream(self) -> str:
        """The stream, or the topic that it has adopted; which stream that is the driver looks up."""
        [name] = self.shared.names
        return name

    @property
    def preview(self) -> bool:
        """True if records of open transactions are read as well."""
        return self.isolation == UNCOMMITTED

    @property
    def columns(self) -> tuple[str, ...]:
        """Optional columns that the options ask for."""
        return (
            *(HEADERS if self.shared.include_headers else ()),
            *(TRANSACTION if self.transaction else ()),
            *(COMMIT_POSITION if self.position else ()),
            *(PREVIEW if self.preview else ()),
        )


def read_source(options: Mapping[str, str], kind: Kind) -> SourceSettings:
    """Return the settings in a source's options.

    Options and defaults differ by the kind of query.

    Raises:
        ConfigError: options are missing, wrong or unknown; all of them are named.
    """
    reader = OptionReader(options)
    shared = read_settings(reader)
    values = reader.read(SourceOptions)
    found = SourceOptions(**values)
    faults = reader.faults
    stream = ""
    if shared is not None and len(shared.names) > 1:
        faults.append(f"{STREAM}: a source reads one stream; make a source of each and unite them")
    elif shared is not None:
        stream = shared.names[0]
    places = found.places(kind, partial(_check_place, stream) if stream else None, faults)
    if kind == "streaming" and found.isolation == UNCOMMITTED:
        faults.append(f"{ISOLATION}: {UNCOMMITTED} is for batches: it previews what is open when it is read")
    if places["end"] == "earliest":
        faults.append(f"{ENDING}: nothing ends before the earliest record")
    reader.finish()
    assert shared is not None  # its faults were raised
    return SourceSettings(**{**values, **places}, shared=shared)


def _check_place(stream: str, text: str) -> None:
    """Raise InvalidRequestError unless a text is a place in a stream; whose position it is, is unknown for a topic."""
    if "/" in stream:
        parse_start(StreamName.parse(stream), text)
    elif "@" in text:
        ReadPosition.parse(text)
    else:
        parse_start(_SOME_STREAM, text)


# Options of the sink


LABEL: Final = "label"
LABEL_NUMBER: Final = "label.number"
SEGMENTS_PER_TASK: Final = "segments.per.task"
REPLAY: Final = "replay"
COMPARE, TRUST = "compare", "trust"


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """Options of the sink in addition to those of all formats."""

    replay: str = option(COMPARE, key=REPLAY, choices=(COMPARE, TRUST))
    """``compare``: a repeated micro-batch or job must have the rows that were committed; ``trust`` takes it for the
    same without a comparison."""
    segments_per_task: int | None = option(None, key=SEGMENTS_PER_TASK, low=1)
    """Maximum number of segments to which the rows of one task go; needed with very many tasks, see
    docs/spark.md#limits."""
    lease_hours: int = option(24, key="lease.hours", high=7 * 24)
    """Lease of a transaction: hours that it may stay open."""
    commit_seconds: int = option(600, key="commit.timeout.seconds", low=1)
    """Seconds that the driver waits for the outcome of a commit; a merge takes about 3 s per GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Options of batch jobs."""

    label: str = option("", key=LABEL)
    """Label of the job, only in a batch and with ``client.name``: a job whose label was committed before writes
    nothing, see docs/spark.md#labels."""
    number: int = option(0, key=LABEL_NUMBER, low=0)
    """Number of the job among those of its label; these numbers never fall."""


# Settings of ``format("rollbridge-transactions")``


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings(ReadOptions):
    """Settings of a read of a commit log; can be pickled."""

    shared: SparkSettings

    @property
    def group(self) -> GroupName | None:
        """Group to read; None for the group of the stream."""
        return self.shared.group


def read_log_settings(options: Mapping[str, str], kind: Kind) -> LogSettings:
    """Return the settings in the options of ``rollbridge-transactions``.

    Raises:
        ConfigError: options are missing, wrong or unknown; all of them are named.
    """
    reader = OptionReader(options)
    shared = read_settings(reader, streams_needed=False)
    values = reader.read(ReadOptions)
    places = ReadOptions(**values).places(kind, parse_log_start, reader.faults)
    if shared is not None and shared.group is None and not shared.names:
        reader.faults.append(f"{GROUP}: is missing, or {STREAM} or {TOPIC} to take the group of")
    reader.finish()
    assert shared is not None  # its faults were raised
    return LogSettings(**{**values, **places}, shared=shared)
