"""Options of the Spark formats: what is missing, wrong or unknown is named at once, before anything is read or written.

Spark hands options over with lower-cased names. What is no option of ours may be one of Spark's own, which it passes on
with the others (``checkpointLocation``); everything else is refused, because it would be a slip that nobody notices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, replace
from typing import Any, Final, Literal

from rollbridge.client.runtime import ClientOptions
from rollbridge.config import ConnectionSettings
from rollbridge.errors import ConfigError, InvalidNameError, InvalidRequestError
from rollbridge.kafka.batches import Compression
from rollbridge.model.names import GroupName, StreamName
from rollbridge.model.options import keys_of, option, unknown, values_of, words
from rollbridge.model.position import parse_start
from rollbridge.spark.columns import COMMIT_POSITION, HEADERS, PREVIEW, TRANSACTION

STREAM: Final = "stream"
SERVERS: Final = "kafka.bootstrap.servers"
ZOOKEEPER: Final = "zookeeper"
ROOT: Final = "zookeeper.root"
GROUP: Final = "group"
CLIENT_NAME: Final = "client.name"
COMPRESSION: Final = "compression"
INCLUDE_HEADERS: Final = "includeHeaders"
QUICK_ACK: Final = "quickAck"

SPARKS_OWN: Final = frozenset({"checkpointlocation", "path", "queryname"})
"""Options that Spark passes on although they are meant for itself."""
_KAFKA: Final = "kafka."
_ZOOKEEPER: Final = "zookeeper."
_NAMES_OF_SETTINGS: Final = {"bootstrap_servers": SERVERS, "zookeeper_root": ROOT, "client_name": CLIENT_NAME}
"""What a :class:`ConnectionSettings` calls them, and what an option is called."""
_STAND_IN: Final = "missing:1"


class OptionReader:
    """Takes options one table after the other and collects what is wrong with them, until :meth:`finish`."""

    def __init__(self, options: Mapping[str, str]) -> None:
        """Begin with nothing taken; ``options`` are as Spark gives them."""
        self._left = {name.lower(): value.strip() for name, value in options.items()}
        self._known: set[str] = set()
        self.faults: list[str] = []

    def read(self, table: type) -> dict[str, Any]:
        """Take the values of a table's options; empty counts as missing, and what is wrong has its default."""
        keys = keys_of(table)
        self._known |= keys
        return values_of(table, {key: self._left.pop(key.lower(), "") or None for key in keys}, self.faults)

    def has(self, name: str) -> bool:
        """Whether an option that has not been taken is given."""
        return bool(self._left.get(name.lower()))

    def prefixed(self, prefix: str) -> dict[str, str]:
        """All options whose names begin so, without the prefix; those that were taken before are not among them."""
        names = [name for name in self._left if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._left.pop(name) for name in names}

    def finish(self) -> None:
        """Raise ConfigError if anything was wrong, or is left that nobody has taken."""
        self.faults += unknown(self._left.keys() - SPARKS_OWN, self._known)
        ConfigError.raise_for(self.faults)


def _streams(text: str) -> tuple[str, ...]:
    """Return the names of streams; ValueError says what is wrong with all of them."""
    names, faults = words(text), []
    for name in names:
        try:
            StreamName.parse(name)
        except InvalidNameError as exc:
            faults.append(str(exc))
    if not names:
        faults.append("names no stream")
    if len(set(names)) < len(names):
        faults.append(f"{', '.join(names)}: one of them is named twice")
    if faults:
        raise ValueError("; ".join(faults))
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkOptions:
    """Options that all formats have."""

    streams: tuple[str, ...] = option((), key=STREAM, convert=_streams)
    """``scope/stream``. The sink takes several with commas between: they are written in one transaction, and the column
    ``topic`` tells them apart. Needed."""
    servers: str = option(MISSING, key=SERVERS)
    """Kafka, as every executor reaches it: ``host:port,...``"""
    zookeeper: str = option(MISSING, key=ZOOKEEPER)
    """ZooKeeper: ``host:port,...``"""
    root: str = option("/rollbridge", key=ROOT)
    """Where the metadata stands."""
    group: GroupName | None = option(None, key=GROUP, convert=GroupName.parse)
    """The transaction group that the streams must belong to; anything else is refused."""
    client_name: str | None = option(None, key=CLIENT_NAME)
    """Whose transactions they are; at any time one query, or job, may use a name. If left out: ``spark-`` and the
    query's id."""
    compression: str = option("none", key=COMPRESSION, convert=str.lower, check=Compression.named)
    """Codec of what the sink writes: none, gzip, snappy, lz4 or zstd."""
    include_headers: bool | None = option(None, key=INCLUDE_HEADERS, choices={"true": True, "false": False})
    """Whether the column ``headers`` is read, or written. If left out: ``false`` for a source, ``true`` for the
    sink."""
    quick_ack: bool = option(True, key=QUICK_ACK)
    """``false``: workers acknowledge what Spark sends them when the kernel likes, up to 40 ms later, see
    docs/spark.md#figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkSettings(SparkOptions):
    """What the source and the sink have in common. It can be pickled, and its ``repr`` shows no secrets."""

    connection: ConnectionSettings
    """With a stand-in for the client's name, if none was given."""
    options: ClientOptions
    """How a connection behaves: with the codec that was asked for."""

    def connected_as(self, client_name: str) -> ConnectionSettings:
        """The connection's settings under the name of a client."""
        return replace(self.connection, client_name=client_name)


def read_settings(reader: OptionReader, *, streams_needed: bool = True) -> SparkSettings | None:
    """The settings that the formats share; None if they are at fault, which ``reader.finish()`` then raises.

    Args:
        reader: The options; it collects the faults.
        streams_needed: Whether ``stream`` must be given; otherwise it may be empty.
    """
    before = len(reader.faults)
    if streams_needed and not reader.has(STREAM):
        reader.faults.append(f"{STREAM}: is missing")
    values = reader.read(SparkOptions)
    options = SparkOptions(**values)
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


# --------------------------------------------------------------------------------------------------------------------
# Options of the sources: everything that is wrong with them is named at once. Pure.


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
    """Where a query without a checkpoint begins: ``earliest``, ``latest``, a time (``2026-01-31T12:00:00Z``, or ms
    since 1970), a DLSN (``4-0:17:3``), an SN (``dlsn=4-0:17:3,seq=1017``) or a position
    (``sales/orders@4-0:17,4-1:0``). If left out: ``latest``; ``earliest`` in a batch."""
    end: str = option("", key=ENDING)
    """Where a batch ends, in the same words; the record there is not read any more. If left out: ``latest``."""
    max_records: int | None = option(None, key=MAX_RECORDS, low=1)
    """Most offsets of a micro-batch, shared out among segments by what there is; markers count, so there may be fewer
    rows. If left out: no limit."""
    fail_on_data_loss: bool = option(True, key=FAIL_ON_DATA_LOSS)
    """Whether records that were deleted or lost are an error; otherwise a warning, and the query goes on at what is
    left."""

    def place_faults(self, kind: Kind) -> Iterator[str]:
        """Yield what makes no sense with the kind of a query."""
        if kind == "batch" and self.max_records is not None:
            yield f"{MAX_RECORDS}: is for streaming queries; a batch ends at {ENDING}"
        if kind == "streaming" and self.end:
            yield f"{ENDING}: is for batches; a streaming query that is to end has trigger(availableNow=True)"

    def places(self, kind: Kind) -> dict[str, str]:
        """Return where to begin and where to end, as it depends on the kind of a query."""
        start = self.start or ("latest" if kind == "streaming" else "earliest")
        return {"start": start, "end": self.end or "latest"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions(ReadOptions):
    """Options of the format ``rollbridge``."""

    min_partitions: int | None = option(None, key=MIN_PARTITIONS, low=1)
    """Cut ranges so that there are about so many tasks."""
    isolation: str = option(COMMITTED, key=ISOLATION, choices=(COMMITTED, UNCOMMITTED))
    """``read_uncommitted``, in a batch: also the records of transactions that are open now, with ``committed``
    false."""
    transaction: bool = option(False, key=INCLUDE_TRANSACTION)
    """Columns ``transactionId``, ``localSequence``."""
    position: bool = option(False, key=INCLUDE_COMMIT_POSITION)
    """Column ``commitPosition``; the driver reads the commit log for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings(SourceOptions):
    """What a source is to read, and how. It can be pickled."""

    shared: SparkSettings
    stream: StreamName

    @property
    def preview(self) -> bool:
        """Whether records of open transactions are read as well."""
        return self.isolation == UNCOMMITTED

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns on request that the options ask for."""
        return (
            *(HEADERS if self.shared.include_headers else ()),
            *(TRANSACTION if self.transaction else ()),
            *(COMMIT_POSITION if self.position else ()),
            *(PREVIEW if self.preview else ()),
        )


def read_source(options: Mapping[str, str], kind: Kind) -> SourceSettings:
    """The settings in a source's options.

    Args:
        options: As Spark gives them.
        kind: What they are read for: not every option makes sense with every query, and defaults differ.

    Raises:
        ConfigError: some are missing, wrong or unknown; all are named.
    """
    reader = OptionReader(options)
    shared = read_settings(reader)
    values = reader.read(SourceOptions)
    found = SourceOptions(**values)
    places = found.places(kind)
    faults = reader.faults
    faults += found.place_faults(kind)
    if kind == "streaming" and found.isolation == UNCOMMITTED:
        faults.append(f"{ISOLATION}: {UNCOMMITTED} is for batches: it previews what is open when it is read")
    if places["end"] == "earliest":
        faults.append(f"{ENDING}: nothing ends before the earliest record")
    stream: StreamName | None = None
    if shared is not None and len(shared.streams) > 1:
        faults.append(f"{STREAM}: a source reads one stream; make a source of each and unite them")
    elif shared is not None:
        stream = StreamName.parse(shared.streams[0])
        for name, text in zip((STARTING, ENDING), places.values(), strict=True):
            try:
                parse_start(stream, text)
            except InvalidRequestError as exc:
                faults.append(f"{name}: {exc}")
    reader.finish()
    assert shared is not None  # its faults were raised
    assert stream is not None
    return SourceSettings(**{**values, **places}, shared=shared, stream=stream)
