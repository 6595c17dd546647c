"""From a producer's batches to frames of a transaction. Pure; a batch becomes all of its frames, or an error.

Two ways:

*Passed.* On a topic that a stream has adopted and not left, the producer's own partition holds, and the batch becomes
one frame. Only its first record is touched, which gets rollbridge's header; compressed records are decompressed and
compressed again for that, but not parsed::

    length | attributes, deltas, key, value | 2 headers | h1 | h2
    longer | the same                       | 3         | h1 | h2 | rollbridge: transaction, sequence, run

*Routed.* Elsewhere the key decides the segment, as it does for every other writer of the stream. Records are parsed and
built again, in one loop.

A producer that hands on what it has read hands on rollbridge's header with it, which tells of another transaction and
another place: these records are routed, and lose it.

Checked before a frame is handed on: checksum, numbering, time and size of the batch. What a broker would refuse is
refused here: it would cost the whole transaction at the commit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple

from rollbridge.base.attribution import (
    HEADER_VALUE,
    HEADER_VALUE_BYTES,
    RECORD_HEADER,
    append_step,
    pack_rest,
    pack_run,
)
from rollbridge.base.avro import encode_long
from rollbridge.errors import CorruptDataError, InvalidRequestError
from rollbridge.kafka.record_limits import RecordLimits
from rollbridge.kafka.records import (
    DECOMPRESSED_BYTES_MAX,
    HEADER_BYTES,
    BatchHeader,
    Compression,
    RawBatch,
    RecordBuilder,
    check_crc,
    compressed,
    decode_record,
    encode_header,
    finished,
    framed,
    new_builder,
    parse_header,
    read_chunks,
    uncompressed,
)
from rollbridge.stream.keyspace import HASH_SEED
from rollbridge_gateway.producer.table import KafkaFault

_NAME: Final = RECORD_HEADER.encode()
_GROWTH_BYTES: Final = 64
"""Most that a batch grows by the header of its first record."""


@dataclass(frozen=True, slots=True)
class Target:
    """A stream as a transaction writes to it.

    Attributes:
        limits: What its records and batches may be.
        segments: Number of its segments.
        bounds, hash_of: The segment of a key is number ``bisect_right(bounds, hash_of(key, HASH_SEED))``.
        is_each: True if each record gets rollbridge's header.
        is_partitioned: True if its segments are the partitions of a topic, in their order.
    """

    limits: RecordLimits
    segments: int
    bounds: Sequence[int]
    hash_of: Callable[[bytes, int], int]
    is_each: bool
    is_partitioned: bool


class CarriedFrame(NamedTuple):
    """A frame: place of its segment, batch, counts of its first and last record, number of its records."""

    at: int
    batch: bytes
    first: int
    last: int
    records: int


class BatchAuthor(NamedTuple):
    """Writer: the transaction's id, the local sequence number of its part's record 0, and the first count."""

    transaction: bytes
    base: int
    first: int


def check_batch(batch: RawBatch) -> BatchHeader:
    """Return the header of a transactional producer's batch.

    Raises:
        CorruptDataError: its checksum is wrong.
        InvalidRequestError: it is not one complete batch, or not what a transactional producer sends.
    """
    try:
        header = parse_header(batch)
    except CorruptDataError as fault:
        raise InvalidRequestError(f"{fault}; nothing was written") from fault
    if header.is_append_time:
        raise InvalidRequestError(
            "a producer sets no time of an append; nothing was written", fault=KafkaFault.TIMESTAMP
        )
    if header.is_control or not header.is_transactional:
        raise InvalidRequestError("the batch is not one of a transactional producer's data; nothing was written")
    if header.compression > Compression.ZSTD:
        raise InvalidRequestError(f"the batch has unknown compression {header.compression}; nothing was written")
    if header.record_count < 1 or header.last_offset_delta != header.record_count - 1:
        raise InvalidRequestError(
            f"a batch of {header.record_count} records has last offset delta {header.last_offset_delta}; nothing was "
            "written"
        )
    if header.base_offset:
        raise InvalidRequestError(f"a batch has the base offset {header.base_offset}, not 0; nothing was written")
    if header.base_sequence < 0 or header.producer_id < 0 or header.producer_epoch < 0:
        raise InvalidRequestError("the batch names no producer; nothing was written")
    check_crc(header, batch)
    return header


def carry(batch: RawBatch, partition: int, target: Target, author: BatchAuthor) -> list[CarriedFrame]:
    """Return the frames of a batch that :func:`check_batch` has taken; ``partition`` is the producer's.

    Raises:
        CorruptDataError: it does not decompress, or its records do not parse, or are others than its header says.
        RecordTooLargeError: one of its records is.
        InvalidRequestError: the topic has no such partition, or it has not been taken in yet; or the stream does not
            take one of its records, or its time. ``fault`` is what the client is told then.
    """
    header = parse_header(batch)
    if target.is_partitioned and not 0 <= partition < target.segments:
        raise InvalidRequestError(
            f"there is no partition {partition} among {target.segments} so far; nothing was written",
            fault=KafkaFault.NO_TOPIC,
        )
    plain = uncompressed(header, batch, limit_bytes=DECOMPRESSED_BYTES_MAX)
    limits = target.limits
    fits = len(plain) + _GROWTH_BYTES <= min(limits.batch_bytes, limits.record_bytes_max)
    is_plain = not target.is_each and not limits.needs_key and _NAME not in bytes(plain)
    is_passed = target.is_partitioned and fits and is_plain
    if is_passed or limits.adopted is not None:
        earliest, latest = _times(plain)
        _check_time(limits, earliest)
        _check_time(limits, latest)
        if is_passed:
            return [_passed(header, plain, partition, author, latest)]
    return _routed(header, plain, partition, target, author)


def _times(plain: RawBatch) -> tuple[int, int]:
    """Return the earliest and the latest time of the records; the header may say others, which brokers pass over."""
    times: list[int] = []
    for chunk in read_chunks(plain, any_names=False):
        times += [record.timestamp for record in chunk]
        times = [min(times), max(times)]
    return times[0], times[1]


def _check_time(limits: RecordLimits, timestamp: int) -> None:
    try:
        limits.check_time(timestamp)
    except InvalidRequestError as fault:
        raise InvalidRequestError(str(fault), fault=KafkaFault.TIMESTAMP) from fault


# Passed


def _passed(
    header: BatchHeader, plain: RawBatch, partition: int, author: BatchAuthor, max_timestamp: int
) -> CarriedFrame:
    count = header.record_count
    run = pack_run(author.transaction, author.base + author.first, count, b"\1" * (count - 1))
    own = encode_header(RECORD_HEADER, run)
    data = memoryview(plain)
    first = decode_record(data, HEADER_BYTES)
    begin, counted, listed, end = first[-4:]
    more = encode_long(len(first.headers) + 1)
    size = encode_long(end - begin + len(more) - (listed - counted) + len(own))
    parts: tuple[RawBatch, ...] = (size, data[begin:counted], more, data[listed:end], own, data[end:])
    codec = header.compression
    if codec:
        made, codec = compressed(b"".join(parts), codec)
        parts = (made,)
    frame = framed(*parts, codec=codec, count=count, base_timestamp=header.base_timestamp, max_timestamp=max_timestamp)
    return CarriedFrame(partition, frame, author.first, author.first + count - 1, count)


# Routed


class _OpenBatch:
    """Open batch of one segment."""

    __slots__ = ("append", "builder", "first", "last", "records", "steps")

    def __init__(self, builder: RecordBuilder, append: Callable[..., object], count: int) -> None:
        self.builder = builder
        self.append = append
        self.first = self.last = count
        self.records = 1
        self.steps = bytearray()

    def frame(self, at: int, codec: int, *, is_each: bool) -> CarriedFrame:
        """Return what it holds."""
        rest = b"" if is_each else pack_rest(self.records, self.steps)
        made = finished(self.builder.build(), rest, HEADER_VALUE_BYTES, codec)
        return CarriedFrame(at, made, self.first, self.last, self.records)


def _routed(
    header: BatchHeader, plain: RawBatch, partition: int, target: Target, author: BatchAuthor
) -> list[CarriedFrame]:
    limits, each, bounds, hash_of = target.limits, target.is_each, target.bounds, target.hash_of
    locate, seed, pack, key_of, base = bisect_right, HASH_SEED, HEADER_VALUE.pack, author.transaction, author.base
    fixed = partition if target.is_partitioned else None
    keyless = partition % target.segments
    slots: dict[int, _OpenBatch] = {}
    frames: list[CarriedFrame] = []
    count = author.first
    for record in chain.from_iterable(read_chunks(plain, any_names=False)):
        key, value, timestamp = record.key, record.value, record.timestamp
        given = [header for header in record.headers if header[0] != RECORD_HEADER]
        if fixed is not None:
            at = fixed
        elif key is None:
            at = keyless
        else:
            at = locate(bounds, hash_of(key, seed)) if bounds else 0
        slot = slots.get(at)
        own = [*given, (RECORD_HEADER, pack(key_of, base + count))] if each else given
        if slot is None or slot.append(slot.records, timestamp, key, value, own) is None:
            own = own if each else [*given, (RECORD_HEADER, pack(key_of, base + count))]
            limits.check(key, value, own)
            if slot is not None:
                frames.append(slot.frame(at, header.compression, is_each=each))
            builder = new_builder(limits.batch_bytes)
            builder.append(0, timestamp, key, value, own)
            slots[at] = _OpenBatch(builder, limits.append_of(builder), count)
        else:
            slot.records += 1
            append_step(slot.steps, count - slot.last)
            slot.last = count
        count += 1
    frames += [slot.frame(at, header.compression, is_each=each) for at, slot in slots.items()]
    return sorted(frames, key=lambda frame: frame.first)


class ProducedBatch(NamedTuple):
    """A batch on its way: raw bytes, the stream, and the partition that its producer named."""

    stream: str
    partition: int
    batch: bytes
    records: int
    is_compressed: bool = False
