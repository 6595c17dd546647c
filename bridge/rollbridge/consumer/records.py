"""Records as readers hand them out, with everything that is known of their place.

A record is a tuple with attributes: reading is fast only if next to nothing is done for each record, so all but key and
value is computed on request. A :class:`Record` wraps confluent-kafka's message, or a preview; one that a reader has
fetched itself is a :class:`.StoredRecord`. :class:`Message` is a record with confluent-kafka's methods, for
:class:`rollbridge.Consumer`.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from confluent_kafka import KafkaError
from confluent_kafka import Message as KafkaMessage

from rollbridge.base.attribution import RECORD_HEADER, Attribution, own_header, unpack_record_header, unpack_run
from rollbridge.base.forks import hold, is_gone
from rollbridge.base.ids import SegmentId, TransactionId
from rollbridge.base.sn import DLSN, SN, TRANSACTION_ID_HEADER, unpack_transaction_id
from rollbridge.errors import CorruptDataError, InvalidRequestError, NotFoundError, TruncatedError
from rollbridge.kafka.clients import UNREADABLE, get_headers
from rollbridge.kafka.committed import FetchedHeads, seen_in
from rollbridge.kafka.fetch import LogReader
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.records import LogRecord, is_plain
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.names import Partition, PlaceIndex, SegmentPlaces, StreamName, show_partition

# Writers of the records that a native consumer hands out, of which only the first of a frame names them.
#
# confluent-kafka hands out records one by one, without their batches. So what the first record of a frame says of those
# behind it (:class:`.Attribution`) is remembered, and a record is looked up by its offset. Nothing is done for an
# application that never asks: messages are examined once it has asked, and from then on as they come.
#
# A consumer that begins in the middle of a frame is not given the first record. Brokers return whole batches, whatever
# offset is asked for; so on request the batch is fetched once more, without librdkafka::
#
#                        begins here
#                             v
#     | head 1 2 3 4 5 | head 1 2 3 4 | head 1 2 ...
#       ^---- not handed out ---^       ^ from the first head on, everything is known
#
# A run that a head has announced is known for good. That a record belongs to *no* run is said only of offsets of which
# every record was seen: from a head on without a gap, as they were handed out, or in what was fetched last. So nothing
# has to be told of seeks, resets and logs that were cut: they leave a gap, and whatever follows a gap is unknown until
# the next head, or fetched.
#
# Source: Kafka's ``Fetcher``, which skips the records of a batch before the offset that was asked for.


RUNS_MAX: Final = 4_096
"""Runs of a partition beyond which the older half is forgotten, and fetched again on request."""
NUMBERS_MAX: Final = 1_000_000
"""The same for single numbers of runs with gaps: a stranger's header may have a million."""
_FETCH_BYTES: Final = 256 * 1024
_NEVER: Final = 1 << 63


class Writers:
    """Knowledge of who wrote the records of some partitions. Thread-safe."""

    def __init__(self, fetch: Callable[[Partition, int], FetchedHeads]) -> None:
        """Know nothing; ``fetch`` returns what a broker gives for an offset, from the beginning of its batch on."""
        self._fetch = fetch
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._known: dict[Partition, _KnownRuns] = {}
        self._latest: Sequence[KafkaMessage] = ()
        self._is_asked = False

    def handed_out(self, messages: Sequence[KafkaMessage]) -> None:
        """Note messages as a consumer hands them out, in order."""
        if not self._is_asked:
            self._latest = messages
            return
        with self._lock:
            self._learn(messages)

    def find(self, place: Partition, offset: int) -> tuple[bytes, int] | None:
        """Return transaction id and local sequence of a record without a header; None if no transaction wrote it.

        Raises:
            KafkaUnavailableError: It would have to be looked up, and no broker answers.
            NotFoundError: It cannot be known any more: its frame was deleted, or compaction may have taken the head.
        """
        if self._process != os.getpid():  # in a child, another thread of the parent may have held the lock at the fork
            self._lock, self._process = threading.RLock(), os.getpid()
        with self._lock:
            if not self._is_asked:
                self._is_asked = True
                self._learn(self._latest)
                self._latest = ()
            known = self._known.setdefault(place, _KnownRuns())
            found = known.handed_out.find(offset)
            if found is not None or known.since <= offset < known.end:
                return found
            if offset not in known.fetched_offsets:
                known.take(self._fetch(place, offset), place, offset)
            if offset in known.doubtful:
                raise NotFoundError(why_unknown(place, offset))
            return known.fetched.find(offset)

    def _learn(self, messages: Sequence[KafkaMessage]) -> None:
        for message in messages:
            place = message.topic() or "", message.partition() or 0
            known = self._known.get(place)
            if known is None:
                known = self._known[place] = _KnownRuns()
            headers = get_headers(message)
            known.learn(message.offset() or 0, own_header(headers) if headers else None)


class _KnownRuns:
    """Known runs of a partition.

    Attributes:
        handed_out: Runs that were announced by records that were handed out.
        begin, end: Offsets between which all records were handed out, up to the last one, without a gap.
        since: Offset from which on all runs of these are in ``handed_out``: that of a head, or of a batch.
        fetched, fetched_offsets, doubtful: What was fetched last.
    """

    __slots__ = ("begin", "doubtful", "end", "fetched", "fetched_offsets", "handed_out", "since")

    def __init__(self) -> None:
        self.begin = self.end = 0
        self.since = _NEVER
        self.handed_out = self.fetched = _Runs()
        self.fetched_offsets = range(0)
        self.doubtful: frozenset[int] = frozenset()

    def learn(self, offset: int, value: bytes | None) -> None:
        """Note a record that is handed out, with its header."""
        if offset != self.end:
            if offset < self.end:
                self.handed_out = _Runs()  # the consumer has gone back
            self.begin, self.since = offset, _NEVER
        self.end = offset + 1
        if value is not None:
            self.handed_out.add(offset, value)
            self.since = min(self.since, offset)
        self.since = max(self.since, self.handed_out.begin)

    def take(self, seen: FetchedHeads, place: Partition, offset: int) -> None:
        """Replace what was fetched before by what was fetched for an offset.

        Raises:
            TruncatedError: It does not hold the offset.
        """
        if offset not in seen.offsets:
            raise TruncatedError(
                f"offset {offset} of {show_partition(place)} has been deleted: who wrote it cannot be known any more"
            )
        self.fetched, self.fetched_offsets, self.doubtful = _Runs(), seen.offsets, seen.doubtful
        for head, value, end in seen.heads:
            self.fetched.add(head, value, end)
        if self.begin <= offset < self.end:
            # A batch begins where it ends, and no run reaches into that.
            self.since = max(min(self.since, seen.offsets.stop), self.handed_out.begin)


class _Runs:
    """Runs of records by their offsets; beyond a bound, the older half is forgotten, below ``begin``."""

    __slots__ = ("_begins", "_ends", "_numbers", "_runs", "begin")

    def __init__(self) -> None:
        self._numbers = self.begin = 0
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._runs: list[tuple[Attribution, Sequence[int]]] = []

    def add(self, offset: int, value: bytes, end: int | None = None) -> None:
        """Add a run behind the others, which ends at ``end`` at the latest; any header ends the run before it.

        A single record carries a header itself.
        """
        if self._ends and self._ends[-1] > offset:
            self._ends[-1] = offset
        try:
            run = unpack_run(value)
        except InvalidRequestError:
            return  # a plain writer used the name for something else
        if run.records == 1:
            return
        self._begins.append(offset)
        self._runs.append((run, run.sequences()))
        self._ends.append(min(offset + run.records, end or offset + run.records))
        self._numbers += len(run.steps)
        if end is None and len(self._begins) > 1 and (len(self._begins) > RUNS_MAX or self._numbers > NUMBERS_MAX):
            half = len(self._begins) // 2
            self._numbers -= sum(len(old.steps) for old, _ in self._runs[:half])
            del self._begins[:half], self._ends[:half], self._runs[:half]
            self.begin = self._begins[0]

    def find(self, offset: int) -> tuple[bytes, int] | None:
        """Return the id and the local sequence of a record without a header; None if it belongs to no known run."""
        at = bisect_right(self._begins, offset) - 1
        if at < 0:
            return None
        run, sequences = self._runs[at]
        return (run.transaction, sequences[offset - self._begins[at]]) if offset < self._ends[at] else None


def why_unknown(place: Partition, offset: int) -> str:
    """Return what is said of a record whose head compaction may have taken."""
    return (
        f"compaction has taken records before offset {offset} of {show_partition(place)} out of its batch: whether a "
        "transaction wrote it cannot be known any more"
    )


class BatchFetcher:
    """Fetch of the batches at an offset, on a connection of its own that is kept."""

    def __init__(self, connect: Callable[[], LogReader]) -> None:
        self._connect = connect
        self._reader: LogReader | None = None

    def __call__(self, place: Partition, offset: int) -> FetchedHeads:
        """Return what is seen from the beginning of the batch on that holds an offset.

        Raises:
            KafkaUnavailableError, NotFoundError, NotAuthorizedError, CorruptDataError.
        """
        topic, number = place
        if self._reader is None or is_gone(self._reader):
            self._reader = self._connect()
            hold(self, "_reader")
        raw = self._reader.fetch_raw(
            topic, offset, partition=number, isolation=Isolation.READ_UNCOMMITTED, max_bytes=_FETCH_BYTES
        )
        return seen_in(raw.batches, offset)

    def close(self) -> None:
        """Disconnect; the next fetch connects again."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


HeaderList = list[tuple[str, bytes | None]]

OWN_HEADERS: Final = frozenset({RECORD_HEADER, TRANSACTION_ID_HEADER})
"""Headers that rollbridge adds; readers leave them out."""

HistoryOf = Callable[[StreamName], EpochHistory | None]
PlacesOf = Callable[[StreamName], SegmentPlaces]


class Origin:
    """Context shared by the records of one reader: its streams and their epochs, and a place in the commit log.

    Attributes:
        index: What partitions are.
        names: Streams that the application knows by another name, as by that of an adopted topic.
        commit_position: Offset of the transaction's record in the commit log, where that is known.
        writers: What is known of who wrote records without a header; None where each record of a transaction has one.
    """

    __slots__ = ("_history_of", "_partitions", "commit_position", "index", "names", "writers")

    def __init__(
        self,
        history_of: HistoryOf,
        commit_position: int | None = None,
        index: PlaceIndex | None = None,
        names: Mapping[StreamName, str] = MappingProxyType({}),
        writers: Writers | None = None,
    ) -> None:
        self._history_of = history_of
        self.index = PlaceIndex() if index is None else index
        self.names = names
        self._partitions: dict[tuple[StreamName, SegmentId], int] = {}
        self.commit_position = commit_position
        self.writers = writers

    def at(self, commit_position: int) -> Origin:
        """Return the context for the records of one transaction."""
        other = Origin(self._history_of, commit_position, self.index, self.names, self.writers)
        other._partitions = self._partitions
        return other

    def place_of(self, raw: KafkaMessage | Preview) -> tuple[StreamName, SegmentId]:
        """Return the stream and segment of a record.

        Raises:
            InvalidNameError: the message is of no segment.
        """
        if isinstance(raw, Preview):
            return raw.stream, raw.segment
        return self.index.find((raw.topic() or "", raw.partition() or 0))

    def sequence_id(self, stream: StreamName, segment: SegmentId, offset: int) -> int | None:
        """Return the sequence id of a record; None while the end of a predecessor is unknown."""
        history = self._history_of(stream)
        if history is None:
            return None
        base = history.graph.sequence_bases.get(segment)
        return None if base is None else base + offset

    def partition(self, stream: StreamName, segment: SegmentId) -> int | None:
        """Return the partition number of a segment, see :class:`.SegmentNode`; None if it was never known."""
        found = self._partitions.get((stream, segment))
        if found is None and (history := self._history_of(stream)) is not None:
            # Kept after a segment or its stream is gone: the application may still hold records of it.
            self._partitions |= {(stream, item): number for item, number in history.graph.partitions.items()}
            found = self._partitions.get((stream, segment))
        return found


class Preview:
    """Record of an open transaction, as it is in the buffer, with the methods of confluent-kafka's message."""

    __slots__ = ("_places", "_record", "local_sequence", "segment", "transaction_id")

    def __init__(
        self,
        places: SegmentPlaces,
        segment: SegmentId,
        transaction_id: TransactionId,
        local_sequence: int,
        record: tuple[int, bytes | None, bytes | None, HeaderList],
    ) -> None:
        """Create a preview.

        Args:
            places: Stream it is written to, and where its segments lie.
            segment: Segment of the transaction's reference epoch.
            record: Timestamp in ms since 1970, key, value and headers.
        """
        self._places = places
        self.segment = segment
        self.transaction_id = transaction_id
        self.local_sequence = local_sequence
        self._record = record

    @property
    def stream(self) -> StreamName:
        """Stream it is written to."""
        return self._places.stream

    def topic(self) -> str:
        """Return the topic of its segment in the transaction's reference epoch; a commit may choose another one."""
        return self._places.of(self.segment)[0]

    def partition(self) -> int:
        """Return the partition of its segment there."""
        return self._places.of(self.segment)[1]

    def offset(self) -> None:
        """Return None: the offset is not assigned before the commit."""

    def key(self) -> bytes | None:
        """Return the key."""
        return self._record[1]

    def value(self) -> bytes | None:
        """Return the value."""
        return self._record[2]

    def headers(self) -> HeaderList:
        """Return the headers, rollbridge's own included."""
        return self._record[3]

    def timestamp(self) -> tuple[int, int]:
        """Return the kind of timestamp (1: creation time) and ms since 1970."""
        return 1, self._record[0]


class _Row(NamedTuple):
    key: bytes | None
    value: bytes | None


class Record(tuple[Any, ...]):
    """Record as :meth:`rollbridge.Bridge.reader` hands it out."""

    # A tuple made of a tuple takes two thirds of the time of a named one or of an object with slots, and key and value
    # are read without executing Python bytecode.
    __slots__ = ()
    if TYPE_CHECKING:

        @property
        def key(self) -> bytes | None:
            """The key; None if there is none."""

        @property
        def value(self) -> bytes | None:
            """The value; None for a tombstone."""
    else:
        key, value = (vars(_Row)[name] for name in _Row._fields)

    @property
    def raw(self) -> KafkaMessage | Preview:
        """confluent-kafka's message, or a :class:`Preview`."""
        raw: KafkaMessage | Preview = self[2]
        return raw

    @property
    def origin(self) -> Origin:
        """Context shared with other records of its reader."""
        origin: Origin = self[3]
        return origin

    @property
    def topic(self) -> str:
        """Kafka topic of its segment."""
        return self.raw.topic() or ""

    @property
    def stream(self) -> str:
        """Name of its stream, ``scope/stream``."""
        return str(self._place()[0])

    @property
    def segment(self) -> SegmentId:
        """Its segment; for a preview, that of the transaction's reference epoch."""
        return self._place()[1]

    @property
    def epoch(self) -> int:
        """Epoch in which its segment began."""
        return self.segment.epoch

    @property
    def committed(self) -> bool:
        """True unless this is a preview, whose transaction was open when it was read and may still be aborted."""
        return not isinstance(self.raw, Preview)

    @property
    def offset(self) -> int | None:
        """Its offset in the segment; None for a preview."""
        return self.raw.offset()

    @property
    def timestamp_ms(self) -> int:
        """Timestamp of the record, ms since 1970."""
        return self.raw.timestamp()[1]

    @property
    def headers(self) -> HeaderList:
        """Headers as the writer gave them.

        Raises:
            CorruptDataError: Another Kafka client wrote a header whose name is not UTF-8.
        """
        return [item for item in self._headers() if item[0] not in OWN_HEADERS]

    @property
    def transaction_id(self) -> TransactionId | None:
        """Transaction that wrote it; None for a plain or compare-and-set write.

        Raises:
            NotFoundError: Compaction has taken out of its batch what said so; also from all that depends on it. A
                topic that was compacted when the record was written says it with each record.
        """
        return self._source()[0]

    @property
    def local_sequence(self) -> int | None:
        """Its number in its transaction, made of part and count; None without a transaction."""
        return self._source()[1]

    @property
    def dlsn(self) -> DLSN | None:
        """Its place in the stream; None for a preview."""
        offset = self.offset
        return None if offset is None else DLSN.of(self.segment, offset, self.local_sequence or 0)

    @property
    def sn(self) -> SN | None:
        """DLSN, sequence id and the transaction id that its writer gave it; None for a preview."""
        dlsn = self.dlsn
        return None if dlsn is None else sn_at(dlsn, *self._place(), given_id(self._readable_headers()), self.origin)

    @property
    def commit_position(self) -> int | None:
        """Offset of its transaction's record in the commit log, where the reader knows it."""
        return self.origin.commit_position

    def __repr__(self) -> str:
        # Without its writer: printing a record must not ask a broker.
        where = f"{self.segment}:{self.offset}" if self.committed else f"preview of {self.transaction_id}"
        return f"<Record {self.stream} {where} key={self.key!r} value of {len(self.value or b'')} bytes>"

    def _place(self) -> tuple[StreamName, SegmentId]:
        return self.origin.place_of(self.raw)

    def _headers(self) -> HeaderList:
        return headers_of(self.raw)

    def _readable_headers(self) -> HeaderList:
        """Return the headers to search for rollbridge's own; none if they cannot be decoded."""
        try:
            return self._headers()
        except CorruptDataError:
            return []

    def _source(self) -> tuple[TransactionId, int] | tuple[None, None]:
        return source_of(self.raw, self.origin)


def last_offsets(messages: Sequence[KafkaMessage], shared: Container[str]) -> dict[Partition, int]:
    """Return the last offset of each partition. Consumers hand out runs of one, so the search is short.

    Only ``shared`` topics have several; in others, messages are not asked for their partitions one by one.
    """
    topics = set(map(KafkaMessage.topic, messages))
    missing: set[Partition] = {(topic or "", 0) for topic in topics if topic not in shared}
    if len(missing) < len(topics):
        missing |= {_place(message) for message in messages if message.topic() in shared}
    found: dict[Partition, int] = {}
    for message in reversed(messages):
        place = _place(message)
        if place in missing:
            missing.discard(place)
            found[place] = message.offset() or 0
            if not missing:
                break
    return found


def _place(message: KafkaMessage) -> Partition:
    return message.topic() or "", message.partition() or 0


def record_of(raw: KafkaMessage | Preview, origin: Origin) -> Record:
    """Return the record of one message."""
    return Record((raw.key(), raw.value(), raw, origin))


def message_of(partition: Partition, record: LogRecord, timestamp_kind: int, leader_epoch: int) -> KafkaMessage:
    """Return confluent-kafka's message for a record of a partition that was read without it."""
    topic, number = partition
    headers: list[tuple[str, str | bytes | None]] = [*record.headers] if is_plain(record.headers) else UNREADABLE
    return KafkaMessage(
        topic=topic,
        partition=number,
        offset=record.offset,
        key=record.key,
        value=record.value,
        headers=headers or None,
        timestamp=(timestamp_kind, record.timestamp),
        leader_epoch=leader_epoch,
    )


def headers_of(raw: KafkaMessage | Preview) -> HeaderList:
    """Return the headers of a message, rollbridge's own included.

    Raises:
        CorruptDataError: A name is not UTF-8, which confluent-kafka cannot decode and rollbridge never writes.
    """
    found: object = raw.headers() if isinstance(raw, Preview) else get_headers(raw)
    if found is UNREADABLE:
        raise CorruptDataError(
            f"the headers of the record at {raw.topic()}, offset {raw.offset()}, cannot be given, as a name is not "
            "UTF-8; key and value can be read without them"
        )
    # The type that confluent-kafka shares with producers is wider than what a consumer hands out.
    return cast("HeaderList", found or [])


def _own_headers(raw: KafkaMessage | Preview) -> HeaderList:
    """Return the headers to search for rollbridge's own; none if they cannot be decoded."""
    try:
        return headers_of(raw)
    except CorruptDataError:
        return []


def source_of(raw: KafkaMessage | Preview, origin: Origin) -> tuple[TransactionId, int] | tuple[None, None]:
    if isinstance(raw, Preview):
        return raw.transaction_id, raw.local_sequence
    value = own_header(_own_headers(raw))
    if value is not None:
        try:
            return unpack_record_header(value)
        except InvalidRequestError:
            return None, None  # a plain writer used the header for something else
    found = None
    if origin.writers is not None and _is_in_stream(raw, origin):
        found = origin.writers.find(_place(raw), raw.offset() or 0)
    return (None, None) if found is None else (TransactionId.from_bytes(found[0]), found[1])


def _is_in_stream(raw: KafkaMessage | Preview, origin: Origin) -> bool:
    try:
        origin.place_of(raw)
    except InvalidRequestError:
        return False
    return True


def given_id(headers: HeaderList) -> int | None:
    """Return the transaction id that the writer gave a record with these headers."""
    for name, value in headers:
        if name == TRANSACTION_ID_HEADER and value is not None:
            try:
                return unpack_transaction_id(value)
            except InvalidRequestError:
                break
    return None


def sn_at(dlsn: DLSN, stream: StreamName, segment: SegmentId, given: int | None, origin: Origin) -> SN:
    return SN(dlsn, given, origin.sequence_id(stream, segment, dlsn.offset))


def dlsn_of(raw: KafkaMessage, origin: Origin) -> DLSN | None:
    offset = raw.offset()
    return None if offset is None else DLSN.of(origin.place_of(raw)[1], offset, source_of(raw, origin)[1] or 0)


def sn_of(raw: KafkaMessage, origin: Origin) -> SN | None:
    dlsn = dlsn_of(raw, origin)
    return None if dlsn is None else sn_at(dlsn, *origin.place_of(raw), given_id(_own_headers(raw)), origin)


# Records with confluent-kafka's methods


class Message:
    """Record as :class:`rollbridge.Consumer` hands it out, with confluent-kafka's methods and additional attributes.

    ``topic()`` is the stream, by the name that was subscribed to, and ``partition()`` the number of the segment in it,
    valid for as long as the stream lives; the topic that holds the segment in Kafka is :attr:`segment_topic`. In an
    adopted topic that was never scaled, and in a plain one, both are Kafka's own.
    """

    __slots__ = ("_origin", "_raw")

    def __init__(self, raw: KafkaMessage, origin: Origin) -> None:
        self._raw = raw
        self._origin = origin

    def error(self) -> KafkaError | None:
        """Return the error, if this is no record."""
        return self._raw.error()

    def topic(self) -> str | None:
        """Return ``scope/stream``, or the topic that was subscribed to; for an error, whatever Kafka names."""
        topic = self._raw.topic()
        try:
            stream = self._origin.place_of(self._raw)[0]
        except InvalidRequestError:
            return topic
        return topic and (self._origin.names.get(stream) or str(stream))

    def partition(self) -> int | None:
        """Return the partition number of its segment; Kafka's in a plain topic.

        No other segment of the stream ever gets that number, whatever is scaled or rolled.
        """
        try:
            return self._origin.partition(*self._origin.place_of(self._raw))
        except InvalidRequestError:
            return self._raw.partition()

    def offset(self) -> int | None:
        """Return the offset in its segment."""
        return self._raw.offset()

    def key(self) -> bytes | None:
        """Return the key."""
        return self._raw.key()

    def value(self) -> bytes | None:
        """Return the value; None for a tombstone."""
        return self._raw.value()

    def headers(self) -> HeaderList | None:
        """Return the headers as the writer gave them; None if there are none.

        Raises:
            CorruptDataError: Another Kafka client wrote a header whose name is not UTF-8.
        """
        return [item for item in headers_of(self._raw) if item[0] not in OWN_HEADERS] or None

    def timestamp(self) -> tuple[int, int]:
        """Return the kind of timestamp, and ms since 1970."""
        return self._raw.timestamp()

    def latency(self) -> float | None:
        """Return None, as for any consumed message."""
        return self._raw.latency()

    def leader_epoch(self) -> int | None:
        """Return Kafka's partition leader epoch; the stream's epoch is :attr:`epoch`."""
        return self._raw.leader_epoch()

    def delivery_count(self) -> int | None:
        """Return None: only share consumers count deliveries."""
        return None

    # What deserializers need

    def deserialized_key(self) -> Any:
        """Return the key as :meth:`set_key` has set it."""
        return self._raw.key()

    def deserialized_value(self) -> Any:
        """Return the value as :meth:`set_value` has set it."""
        return self._raw.value()

    def set_key(self, key: Any) -> None:
        """Replace the key, as by what it means."""
        self._raw.set_key(key)

    def set_value(self, value: Any) -> None:
        """Replace the value."""
        self._raw.set_value(value)

    def set_headers(self, headers: list[tuple[str, str | bytes | None]]) -> None:
        """Replace the headers, rollbridge's own included."""
        self._raw.set_headers(headers)

    def set_error(self, error: KafkaError | None) -> None:
        """Replace the error."""
        self._raw.set_error(error)

    def __len__(self) -> int:
        return len(self._raw)

    @property
    def raw(self) -> KafkaMessage:
        """confluent-kafka's message."""
        return self._raw

    def record(self) -> Record:
        """Return the same record with attributes in place of methods."""
        return record_of(self._raw, self._origin)

    @property
    def segment_topic(self) -> str:
        """Kafka topic of its segment."""
        return self._raw.topic() or ""

    @property
    def place(self) -> Partition:
        """Kafka topic and partition that its segment is."""
        return _place(self._raw)

    @property
    def segment(self) -> SegmentId:
        """Its segment.

        Raises:
            InvalidNameError: It is of a plain topic, which has no segments.
        """
        return self._origin.place_of(self._raw)[1]

    @property
    def epoch(self) -> int:
        """Epoch in which its segment began; raises as :attr:`segment`."""
        return self.segment.epoch

    @property
    def committed(self) -> bool:
        """Always True: a consumer in a group sees committed records only."""
        return True

    @property
    def transaction_id(self) -> TransactionId | None:
        """Transaction that wrote it; None for a plain or compare-and-set write.

        Asks a broker, once, if reading began in the middle of a batch and this is one of its records.

        Raises:
            KafkaUnavailableError, NotFoundError: it would have to ask, and gets no answer.
        """
        return source_of(self._raw, self._origin)[0]

    @property
    def local_sequence(self) -> int | None:
        """Its number in its transaction, made of part and count; None without a transaction.

        May ask a broker, as :attr:`transaction_id`.
        """
        return source_of(self._raw, self._origin)[1]

    @property
    def dlsn(self) -> DLSN | None:
        """Its place in the stream; None in a plain topic."""
        return dlsn_of(self._raw, self._origin) if self._is_in_stream() else None

    @property
    def sn(self) -> SN | None:
        """DLSN, sequence id and the transaction id that its writer gave it; None in a plain topic."""
        return sn_of(self._raw, self._origin) if self._is_in_stream() else None

    def _is_in_stream(self) -> bool:
        return _is_in_stream(self._raw, self._origin)

    @property
    def commit_position(self) -> int | None:
        """Always None: a consumer does not read the commit log; :meth:`rollbridge.Bridge.transactions` does."""
        return self._origin.commit_position

    def __repr__(self) -> str:
        if self._raw.error() is not None:
            return f"<Message {self._raw.error()}>"
        where = f"{self.partition()}:{self.offset()}"
        return f"<Message {self.topic()} {where} key={self.key()!r} value of {len(self)} bytes>"
