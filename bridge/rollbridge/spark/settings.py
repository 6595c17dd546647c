"""Options of the Spark formats: what is missing, wrong or unknown is named at once, before anything is read or written.

Spark hands options over with lower-cased names. What is no option of ours may be one of Spark's own, which it passes on
with the others (``checkpointLocation``); everything else is refused, because it would be a slip that nobody notices.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from rollbridge.client.runtime import ClientOptions
from rollbridge.config import ConnectionSettings
from rollbridge.errors import ConfigError, InvalidNameError, InvalidRequestError
from rollbridge.kafka.batches import compression_faults
from rollbridge.model.names import GroupName, StreamName
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
    """Takes options one after the other and collects what is wrong with them, until :meth:`finish`."""

    def __init__(self, options: Mapping[str, str]) -> None:
        """Begin with nothing taken; ``options`` are as Spark gives them."""
        self._left = {name.lower(): value.strip() for name, value in options.items()}
        self._known: list[str] = []
        self.faults: list[str] = []

    def text(self, name: str, default: str = "", *, needed: bool = False) -> str:
        """An option as it is; empty counts as missing."""
        self._known.append(name)
        value = self._left.pop(name.lower(), "")
        if needed and not value:
            self.faults.append(f"{name}: is missing")
        return value or default

    def has(self, name: str) -> bool:
        """Whether an option that has not been taken is given."""
        return bool(self._left.get(name.lower()))

    def flag(self, name: str, default: bool) -> bool:
        """``true`` or ``false``."""
        return self.choice(name, ("true", "false"), str(default).lower()) == "true"

    def choice(self, name: str, allowed: Iterable[str], default: str) -> str:
        """One of several words, in any case; the default if it is none of them."""
        known = {word.lower(): word for word in allowed}
        value = self.text(name, default)
        if value.lower() not in known:
            self.faults.append(f"{name}: {value!r} is none of {', '.join(known.values())}")
        return known.get(value.lower(), default)

    def number(self, name: str, default: int | None = None, *, at_least: int = 1) -> int | None:
        """A whole number with a lower bound."""
        value = self.text(name)
        if not value:
            return default
        if not value.isdecimal() or int(value) < at_least:
            self.faults.append(f"{name}: {value!r} is no whole number from {at_least} on")
            return default
        return int(value)

    def prefixed(self, prefix: str) -> dict[str, str]:
        """All options whose names begin so, without the prefix; those that were taken before are not among them."""
        names = [name for name in self._left if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._left.pop(name) for name in names}

    def finish(self) -> None:
        """Raise ConfigError if anything was wrong, or is left that nobody has taken."""
        for name in sorted(self._left.keys() - SPARKS_OWN):
            nearest = difflib.get_close_matches(name, [known.lower() for known in self._known], n=1, cutoff=0.6)
            meant = next((known for known in self._known if known.lower() in nearest), None)
            self.faults.append(f"{name}: is unknown" + (f"; did you mean {meant}?" if meant else ""))
        if self.faults:
            raise ConfigError("; ".join(self.faults))


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkSettings:
    """What the source and the sink have in common. It can be pickled, and its ``repr`` shows no secrets."""

    connection: ConnectionSettings
    streams: tuple[str, ...]
    """``scope/stream``, as many as are named; never empty."""
    group: GroupName | None
    """The transaction group that the streams must belong to, if one is named."""
    client_name: str | None
    """As it was given; ``connection`` has a stand-in if it was not."""
    options: ClientOptions
    """How a connection behaves: with the codec that was asked for."""
    include_headers: bool | None
    """None: not said."""
    quick_ack: bool = True
    """Whether workers acknowledge at once what Spark sends them."""

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
    streams = _streams(reader, needed=streams_needed)
    servers = reader.text(SERVERS, needed=True)
    zookeeper = reader.text(ZOOKEEPER, needed=True)
    root = reader.text(ROOT, "/rollbridge")
    group = _group(reader)
    client_name = reader.text(CLIENT_NAME)
    compression = reader.text(COMPRESSION, "none").lower()
    headers = reader.text(INCLUDE_HEADERS).lower()
    if headers not in ("", "true", "false"):
        reader.faults.append(f"{INCLUDE_HEADERS}: {headers!r} is none of true, false")
    quick_ack = reader.flag(QUICK_ACK, True)
    codec_faults = list(compression_faults(compression))
    reader.faults += codec_faults
    connection: ConnectionSettings | None = None
    try:
        connection = ConnectionSettings(
            bootstrap_servers=servers or _STAND_IN,
            zookeeper=zookeeper or _STAND_IN,
            zookeeper_root=root,
            kafka=reader.prefixed(_KAFKA),
            zookeeper_security=reader.prefixed(_ZOOKEEPER),
            **({"client_name": client_name} if client_name else {}),
        )
    except ConfigError as exc:
        for fault in str(exc).split("; "):
            name, colon, rest = fault.partition(": ")
            reader.faults.append(f"{_NAMES_OF_SETTINGS.get(name, name)}{colon}{rest}")
    if connection is None or len(reader.faults) > before:
        return None
    return SparkSettings(
        connection=connection,
        streams=streams,
        group=group,
        client_name=client_name or None,
        options=ClientOptions(compression=compression),
        include_headers=None if not headers else headers == "true",
        quick_ack=quick_ack,
    )


def _streams(reader: OptionReader, *, needed: bool) -> tuple[str, ...]:
    names = tuple(name.strip() for name in reader.text(STREAM, needed=needed).split(",") if name.strip())
    for name in names:
        try:
            StreamName.parse(name)
        except InvalidNameError as exc:
            reader.faults.append(f"{STREAM}: {exc}")
    if len(set(names)) < len(names):
        reader.faults.append(f"{STREAM}: {', '.join(names)}: one of them is named twice")
    return names


def _group(reader: OptionReader) -> GroupName | None:
    name = reader.text(GROUP)
    try:
        return GroupName.parse(name) if name else None
    except InvalidNameError as exc:
        reader.faults.append(f"{GROUP}: {exc}")
        return None


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
class SourceSettings:
    """What a source is to read, and how. It can be pickled."""

    shared: SparkSettings
    stream: StreamName
    start: str
    """What :func:`~rollbridge.model.position.parse_start` understands."""
    end: str
    max_records: int | None
    min_partitions: int | None
    fail_on_data_loss: bool
    preview: bool
    """Whether records of open transactions are read as well."""
    columns: tuple[str, ...]
    """Columns on request that the options ask for."""


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
    start = reader.text(STARTING, "latest" if kind == "streaming" else "earliest")
    end = reader.text(ENDING, "latest")
    max_records = reader.number(MAX_RECORDS)
    min_partitions = reader.number(MIN_PARTITIONS)
    fail_on_data_loss = reader.flag(FAIL_ON_DATA_LOSS, True)
    preview = reader.choice(ISOLATION, (COMMITTED, UNCOMMITTED), COMMITTED) == UNCOMMITTED
    transaction = reader.flag(INCLUDE_TRANSACTION, False)
    position = reader.flag(INCLUDE_COMMIT_POSITION, False)
    faults = reader.faults
    if kind == "batch" and max_records is not None:
        faults.append(f"{MAX_RECORDS}: is for streaming queries; a batch ends at {ENDING}")
    if kind == "streaming" and options.get(ENDING.lower()):
        faults.append(f"{ENDING}: is for batches; a streaming query that is to end has trigger(availableNow=True)")
    if kind == "streaming" and preview:
        faults.append(f"{ISOLATION}: {UNCOMMITTED} is for batches: it previews what is open when it is read")
    if end == "earliest":
        faults.append(f"{ENDING}: nothing ends before the earliest record")
    stream: StreamName | None = None
    if shared is not None and len(shared.streams) > 1:
        faults.append(f"{STREAM}: a source reads one stream; make a source of each and unite them")
    elif shared is not None:
        stream = StreamName.parse(shared.streams[0])
        for name, text in ((STARTING, start), (ENDING, end)):
            try:
                parse_start(stream, text)
            except InvalidRequestError as exc:
                faults.append(f"{name}: {exc}")
    reader.finish()
    assert shared is not None  # its faults were raised
    assert stream is not None
    return SourceSettings(
        shared=shared,
        stream=stream,
        start=start,
        end=end,
        max_records=max_records,
        min_partitions=min_partitions,
        fail_on_data_loss=fail_on_data_loss,
        preview=preview,
        columns=(
            *(HEADERS if shared.include_headers else ()),
            *(TRANSACTION if transaction else ()),
            *(COMMIT_POSITION if position else ()),
            *(PREVIEW if preview else ()),
        ),
    )
