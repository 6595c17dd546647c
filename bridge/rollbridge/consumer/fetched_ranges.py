"""Fetched ranges of a segment, handed out record by record or in lists, decoded on demand.

    Fetched (bytes of whole batches) -> FetchedRange -> StoredRecord, one at a time
                                                    \\--> Batch: lists of keys and values

aiokafka's compiled parser makes an object and a list of headers of each record, in 60 ns. Holding thousands of them
costs ten times that, in garbage collections. So none is held: each is reduced at once to what is wanted, and a record
that is handed out is one tuple. Batches are decoded again for more than keys and values.

The writer of a record is named in the header of the first record of its run (:mod:`rollbridge.base.attribution`),
earlier in the same batch. A batch is always decoded from its beginning, whatever offset was asked for, so such headers
are noted in passing and decoded on request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, length_hint
from typing import Any, Final, overload

from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME
from confluent_kafka import Message as KafkaMessage

from rollbridge.base.attribution import HEADER_VALUE_BYTES, own_header, unpack_run
from rollbridge.base.ids import SegmentId, TransactionId
from rollbridge.consumer.records import (
    HeaderList,
    Origin,
    Preview,
    Record,
    message_of,
    record_of,
    why_unknown,
)
from rollbridge.errors import CorruptDataError, InvalidRequestError, NotFoundError
from rollbridge.kafka.committed import BatchStanding, may_lack_heads, seen_in
from rollbridge.kafka.fetch_plan import Fetched
from rollbridge.kafka.records import (
    BatchHeader,
    LogRecord,
    RawBatch,
    add_values,
    is_plain,
    read_chunks,
    read_few,
    read_parsed,
)
from rollbridge.stream.names import Partition, StreamName, show_partition

_CHUNK: Final = 128
"""Records of small batches handed out at a time: more would set off a garbage collection each time."""
_SMALL: Final = 32
"""Records of a batch up to which it is decoded together with others."""
_headers, _key, _value = attrgetter("headers"), attrgetter("key"), attrgetter("value")
BATCH_MAX: Final = 10_000
"""Most records in a :class:`Batch`: a batch of a megabyte in Kafka may hold millions of small ones."""


class RecordContext:
    """Common context of the records of one batch, or of small consecutive ones; ``header`` is that of the first."""

    __slots__ = ("_begins", "_compacted", "_doubtful", "_heads", "_run", "header", "origin", "place")

    def __init__(self, origin: Origin, place: Partition, header: BatchHeader, batch: RawBatch = b"") -> None:
        self.origin = origin
        self.place = place
        self.header = header
        self._compacted = batch if may_lack_heads(header) else None
        self._doubtful: frozenset[int] = frozenset()
        self._begins: list[int] | None = None
        self._heads: list[tuple[bytes, int]] = []
        self._run: tuple[int, bytes, Sequence[int]] = _NO_RUN

    def note(self, offset: int, headers: HeaderList, last: int) -> None:
        """Note the headers of a record, in order, if they say who wrote records behind it, or end such a run.

        ``last`` is the last offset of its batch, at which the run ends.
        """
        value = own_header(headers)
        if value is None:
            return
        if self._begins is None:
            if len(value) == HEADER_VALUE_BYTES:
                return
            self._begins, self._heads = [], []
        if not self._begins or offset > self._begins[-1]:
            self._begins.append(offset)
            self._heads.append((value, last))

    def find(self, offset: int) -> tuple[TransactionId, int] | tuple[None, None]:
        """Return who wrote a record without a header of its own, if it belongs to a run.

        Raises:
            NotFoundError: Compaction may have taken the head of its run.
        """
        if self._compacted is not None:
            self._doubtful, self._compacted = seen_in(memoryview(self._compacted), offset).doubtful, None
        if offset in self._doubtful:
            raise NotFoundError(why_unknown(self.place, offset))
        at = bisect_right(self._begins or (), offset) - 1
        if at < 0 or self._begins is None:
            return None, None
        value, last = self._heads[at]
        known, transaction, sequences = self._run
        if known != at:
            transaction, sequences = _run_of(value)
            self._run = at, transaction, sequences
        place = offset - self._begins[at]  # by offset: compaction leaves gaps
        if place >= len(sequences) or offset > last:
            return None, None
        return TransactionId.from_bytes(transaction), sequences[place]


_NO_RUN: Final[tuple[int, bytes, Sequence[int]]] = (-1, b"", ())


def _run_of(value: bytes) -> tuple[bytes, Sequence[int]]:
    try:
        run = unpack_run(value)
    except InvalidRequestError:
        return b"", ()  # a plain writer used the name for something else
    return run.transaction, run.sequences()


class StoredRecord(Record):
    """Record that a reader has fetched itself: key, value, what the parser has made of it, and its batch."""

    __slots__ = ()

    @property
    def raw(self) -> KafkaMessage:
        """confluent-kafka's message, a new one each time."""
        key, value, parsed, batch = self
        record = LogRecord(parsed.offset, parsed.timestamp, key, value, parsed.headers)
        kind = TIMESTAMP_LOG_APPEND_TIME if batch.header.is_append_time else TIMESTAMP_CREATE_TIME
        return message_of(batch.place, record, kind, batch.header.partition_leader_epoch)

    @property
    def origin(self) -> Origin:
        """Context shared with other records of its reader."""
        origin: Origin = self[3].origin
        return origin

    @property
    def topic(self) -> str:
        """Kafka topic of its segment."""
        topic: str = self[3].place[0]
        return topic

    @property
    def committed(self) -> bool:
        """Always True."""
        return True

    @property
    def offset(self) -> int:
        """Its offset in the segment."""
        offset: int = self[2].offset
        return offset

    @property
    def timestamp_ms(self) -> int:
        """Timestamp of the record, ms since 1970."""
        timestamp: int = self[2].timestamp
        return timestamp

    def _place(self) -> tuple[StreamName, SegmentId]:
        return self.origin.index.find(self[3].place)

    def _headers(self) -> HeaderList:
        if not is_plain(self[2].headers):
            raise CorruptDataError(
                f"the headers of the record at {self.topic}, offset {self.offset}, cannot be given, as a name is not "
                "UTF-8; key and value can be read without them"
            )
        return list(self[2].headers)

    def _readable_headers(self) -> HeaderList:
        return list(self[2].headers)

    def _source(self) -> tuple[TransactionId, int] | tuple[None, None]:
        value = own_header(self[2].headers)
        if value is None:
            batch: RecordContext = self[3]
            return batch.find(self.offset)
        transaction, sequences = _run_of(value)
        return (TransactionId.from_bytes(transaction), sequences[0]) if sequences else (None, None)


class Batch(Sequence[Record]):
    """Records that were read together. Taking keys and values as lists costs least of all."""

    __slots__ = ("_keys", "_make", "_records", "_values")

    def __init__(
        self, keys: list[bytes | None], values: list[bytes | None], make: Callable[[], Iterator[Record]]
    ) -> None:
        """Create a batch; ``make`` makes its records."""
        self._keys = keys
        self._values = values
        self._make = make
        self._records: list[Record] | None = None

    @classmethod
    def of_previews(cls, previews: Sequence[Preview], origin: Origin) -> Batch:
        """Return a batch of previews."""
        keys, values = [item.key() for item in previews], [item.value() for item in previews]
        return cls(keys, values, lambda: (record_of(item, origin) for item in previews))

    def keys(self) -> list[bytes | None]:
        """Return the keys, in order."""
        return self._keys.copy()

    def values(self) -> list[bytes | None]:
        """Return the values, in order."""
        return self._values.copy()

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Record]:
        return self._make() if self._records is None else iter(self._records)

    @overload
    def __getitem__(self, place: int) -> Record: ...

    @overload
    def __getitem__(self, place: slice) -> list[Record]: ...

    def __getitem__(self, place: int | slice) -> Record | list[Record]:
        if self._records is None:
            self._records = list(self._make())
        return self._records[place]


class FetchedRange:
    """Fetched stretch of a segment, handed out in order: each record once, singly or in a batch. Not thread-safe.

    Attributes:
        end: Offset behind what is to be handed out; behind the last record there may be markers.
        is_exhausted: True once it was found that no record is left.
    """

    def __init__(self, fetched: Fetched, segment: SegmentId, wanted: range, origin: Origin) -> None:
        """Hand out the committed records at some offsets of what was fetched."""
        self.segment = segment
        self.end = wanted.stop
        self._behind = wanted.start
        self._chunk: list[Any] = []
        self._rest: Iterator[Any] = iter(())
        self.is_exhausted = False
        self._place = fetched.partition
        self._origin = origin
        self._last: int | None = None
        self._fetched = fetched

    def _batches(self) -> Iterator[tuple[BatchHeader, memoryview]]:
        """Yield the batches in which something may be left to hand out.

        Raises:
            CorruptDataError: A transaction marker does not parse.
        """
        at, end = self.next, self.end
        fetched = self._fetched
        committed: Iterable[tuple[BatchHeader, memoryview]]
        if fetched.aborted:
            committed = ((item[0], item[1]) for item in fetched.judged() if item[2] is BatchStanding.COMMITTED)
        else:
            committed = (item for item in fetched.batches if not item[0].is_control)
        for header, batch in committed:
            first = header.base_offset
            if header.record_count and first < end and first + header.last_offset_delta >= at:
                yield header, batch

    @property
    def next(self) -> int:
        """Offset behind the record handed out last, or the first one wanted."""
        if self._chunk:
            left = length_hint(self._rest)
            if left:
                last: int = self._chunk[-1].offset
                has_gap = last - self._chunk[0].offset >= len(self._chunk)
                return max(self._behind, min(self._chunk[-left].offset, last) if has_gap else last + 1 - left)
            self._behind, self._chunk = self._chunk[-1].offset + 1, []
        return self._behind

    def records(self) -> Iterator[StoredRecord]:
        """Iterate over the records that are left. If the caller leaves the loop, they are left for another one.

        Raises:
            CorruptDataError: While iterating: a record does not parse; nothing behind it is handed out, now or later.
        """
        # A chain costs less for each record than a generator that delegates, and does not close what is left.
        return chain.from_iterable(self._by_chunk())

    def _by_chunk(self) -> Iterator[Iterator[StoredRecord]]:
        """Yield iterators over some records each, which run without executing Python bytecode."""
        some = _Small(self._origin, self._place)
        at, end = self.next, self.end
        for header, batch in self._batches():
            first, last = header.base_offset, header.base_offset + header.last_offset_delta
            if header.record_count <= _SMALL and first >= at and last < end and some.add(header, batch):
                if len(some.records) >= _CHUNK:
                    yield self._hand_out(some.records, some.shared)
                    some = _Small(self._origin, self._place)
                continue
            if some.records:
                yield self._hand_out(some.records, some.shared)
                some = _Small(self._origin, self._place)
            yield from self._chunks(header, batch)
        if some.records:
            yield self._hand_out(some.records, some.shared)
        self.is_exhausted = True

    def _hand_out(self, chunk: list[Any], shared: RecordContext | None) -> Iterator[StoredRecord]:
        self._chunk, self._rest = chunk, iter(chunk)
        fields = zip(map(_key, chunk), map(_value, chunk), self._rest, repeat(shared), strict=False)
        return map(StoredRecord, fields)

    def again(self, offsets: range) -> Iterator[StoredRecord]:
        """Iterate over the records at some offsets, whether or not they were handed out."""
        return FetchedRange(self._fetched, self.segment, offsets, self._origin).records()

    def batches(self) -> Iterator[Batch]:
        """Yield the records that are left in batches, each of which counts as handed out as a whole.

        Raises:
            CorruptDataError: As for :meth:`records`.
        """
        whole = _Whole()
        at, end = self.next, self.end
        for header, batch in self._batches():
            first, last = header.base_offset, header.base_offset + header.last_offset_delta
            if first >= at and last < end and whole.add(header, batch):
                if len(whole.keys) >= BATCH_MAX:
                    self._behind = whole.end
                    yield whole.made(self)
                    whole = _Whole()
                continue
            if whole.keys:
                self._behind = whole.end
                yield whole.made(self)
                whole = _Whole()
            for some in _in_lists(self._chunks(header, batch)):
                yield Batch([record.key for record in some], [record.value for record in some], some.__iter__)
        if whole.keys:
            self._behind = whole.end
            yield whole.made(self)
        self.is_exhausted = True

    def is_empty(self) -> bool:
        """Return whether there is nothing in it but markers and aborted records."""
        return next(self._batches(), None) is None

    def is_used_up(self) -> bool:
        """Return whether no record is left; to know it, the last batch is decoded, once.

        Raises:
            CorruptDataError: As for :meth:`records`.
        """
        if self._last is None:
            self._last = self._find_last()
        return self.next > self._last

    def _find_last(self) -> int:
        """Return the last offset that is to be handed out, or the one before the first."""
        for header, batch in reversed(list(self._batches())):
            found = [item.offset for item in read_parsed(batch, header) if self.next <= item.offset < self.end]
            if found:
                return max(found)
        return self.next - 1

    def _chunks(self, header: BatchHeader, batch: RawBatch) -> Iterator[Iterator[StoredRecord]]:
        """Yield iterators over some records of a batch each."""
        last = header.base_offset + header.last_offset_delta
        low, high = max(self.next, header.base_offset), min(self.end, last + 1)
        shared = RecordContext(self._origin, self._place, header, batch)
        try:
            is_whole = low == header.base_offset and high == last + 1
            for chunk in read_chunks(batch, header, by_ends=is_whole):
                if any(map(_headers, chunk)):
                    for record in chunk:
                        shared.note(record.offset, record.headers, last)
                if not low <= chunk[0].offset <= chunk[-1].offset < high:
                    chunk = [record for record in chunk if low <= record.offset < high]
                if chunk:
                    yield self._hand_out(chunk, shared)
                    low = self.next
        except CorruptDataError as fault:
            place = show_partition(self._place)
            raise CorruptDataError(f"{place}, at offset {self.next} or behind: {fault}") from fault


class _Small:
    """Records of small batches behind each other, of which all are wanted."""

    __slots__ = ("_origin", "_place", "records", "shared")

    def __init__(self, origin: Origin, place: Partition) -> None:
        self._origin = origin
        self._place = place
        self.records: list[Any] = []
        self.shared: RecordContext | None = None

    def add(self, header: BatchHeader, batch: RawBatch) -> bool:
        """Add a batch; return False, adding nothing, if it differs from the others or needs decoding by record."""
        if may_lack_heads(header):
            return False
        shared = self.shared
        if shared is None:
            shared = self.shared = RecordContext(self._origin, self._place, header)
        elif (
            shared.header.partition_leader_epoch != header.partition_leader_epoch
            or shared.header.attributes != header.attributes
        ):
            return False
        found = read_few(batch, header, by_ends=True)
        if found is None:  # what is wrong with it is said when it is read by itself
            return False
        last = header.base_offset + header.last_offset_delta
        for record in found:
            if record.headers:
                shared.note(record.offset, record.headers, last)
        self.records += found
        return True


class _Whole:
    """Keys and values of batches of which all records are wanted."""

    __slots__ = ("_begin", "end", "keys", "values")

    def __init__(self) -> None:
        self.keys: list[bytes | None] = []
        self.values: list[bytes | None] = []
        self._begin = self.end = 0

    def add(self, header: BatchHeader, batch: RawBatch) -> bool:
        """Add a batch; return False, adding nothing, if it is large or has to be decoded record by record."""
        if header.record_count > BATCH_MAX:
            return False
        before = len(self.keys)
        try:
            add_values(batch, header, self.keys, self.values)
        except CorruptDataError:  # whatever is wrong with it is said when its records are taken one by one
            del self.keys[before:], self.values[before:]
            return False
        if not before:
            self._begin = header.base_offset
        self.end = header.base_offset + header.last_offset_delta + 1
        return True

    def made(self, stretch: FetchedRange) -> Batch:
        """Return the batch to hand out, whose records are decoded again only if more is asked for."""
        return Batch(self.keys, self.values, partial(stretch.again, range(self._begin, self.end)))


def _in_lists(chunks: Iterator[Iterator[StoredRecord]]) -> Iterator[list[StoredRecord]]:
    """Yield records in lists of up to ``BATCH_MAX`` or little more; those before one that does not parse first."""
    found: list[StoredRecord] = []
    try:
        for chunk in chunks:
            found += chunk
            if len(found) >= BATCH_MAX:
                yield found
                found = []
    except CorruptDataError:
        if found:
            yield found
        raise
    if found:
        yield found
