"""Record batches (magic 2) as plain values: parse, check, stamp, build and merge them. No I/O, no shared state.

A frame's value is a ready-made batch. Forwarding one changes only its 61-byte header (big-endian), so the records
behind it are neither copied nor parsed::

    offset  bytes  field                    set by stamped_header()
           +------------------------------+
    0      | 8     base offset            |  0
    8      | 4     length                 |  kept: bytes behind this field, so size = length + 12
    12     | 4     partition leader epoch |  -1
    16     | 1     magic (2)              |
    17     | 4     CRC-32C                |  renewed
           +------------------------------+  <- the checksum covers everything from here on
    21     | 2     attributes             |  transactional bit
    23     | 4     last offset delta      |
    27     | 8     base timestamp (ms)    |
    35     | 8     max timestamp (ms)     |
    43     | 8     producer id            |  set
    51     | 2     producer epoch         |  set
    53     | 4     base sequence          |  set
    57     | 4     record count           |
           +------------------------------+
    61     | records, compressed as one   |
           +------------------------------+

    attributes:  0x07 codec   0x08 log append time   0x10 transactional   0x20 control

Decompression is bounded: a batch of one megabyte may claim to hold a gigabyte, and must not get that memory.

Source: Kafka documentation, "Record Batch".
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from operator import attrgetter
from typing import Final, NamedTuple, Protocol, TypeVar

import cramjam
from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode, zstd_encode
from aiokafka.record.default_records import DefaultRecord, DefaultRecordBatch, DefaultRecordBatchBuilder
from google_crc32c import extend

from rollbridge.base.avro import decode_long, encode_long
from rollbridge.errors import CorruptDataError

# Bounded decompression.

# xerial's snappy framing, used by Kafka's Java clients: a header of 16 bytes, then blocks prefixed by their lengths.
_XERIAL: Final = b"\x82SNAPPY\0"
_XERIAL_HEADER_BYTES: Final = 16
_GZIP_WINDOW: Final = 31
_FIRST_TRY_BYTES: Final = 1 << 16
_EXPECTED_RATIO: Final = 4


def decompress(codec: str, data: memoryview, limit_bytes: int) -> bytes | bytearray | memoryview:
    """Decompress the records of a batch with Kafka's codec of this name (``gzip``, ``snappy``, ``lz4``, ``zstd``).

    Raises:
        CorruptDataError: ``data`` does not decompress, or takes more than ``limit_bytes`` decompressed.
    """
    try:
        match codec:
            case "gzip":
                return _gunzip(data, limit_bytes)
            case "snappy":
                return _unsnap(data, limit_bytes)
            case "lz4" | "zstd":
                return _grow(codec, data, limit_bytes)
            case _:
                raise CorruptDataError(f"compression {codec} is not known")
    except (cramjam.DecompressionError, zlib.error, struct.error) as exc:
        raise CorruptDataError(f"records do not decompress with {codec} to at most {limit_bytes} bytes: {exc}") from exc


def _gunzip(data: memoryview, limit_bytes: int) -> bytes:
    out = bytearray()
    rest = bytes(data)
    while rest:
        member = zlib.decompressobj(_GZIP_WINDOW)
        out += member.decompress(rest, limit_bytes - len(out) + 1)
        if len(out) > limit_bytes:
            raise CorruptDataError(f"records decompress with gzip to more than {limit_bytes} bytes")
        if not member.eof:
            raise CorruptDataError("records compressed with gzip are cut short")
        rest = member.unused_data
    return bytes(out)


def _unsnap(data: memoryview, limit_bytes: int) -> bytes:
    if bytes(data[: len(_XERIAL)]) != _XERIAL:
        return _unsnap_block(data, limit_bytes)
    out = bytearray()
    position = _XERIAL_HEADER_BYTES
    while position < len(data):
        (size,) = struct.unpack_from(">i", data, position)
        position += 4
        if not 0 < size <= len(data) - position:
            raise CorruptDataError(f"snappy block of {size} bytes, where {len(data) - position} are left")
        out += _unsnap_block(data[position : position + size], limit_bytes - len(out))
        position += size
    return bytes(out)


def _unsnap_block(block: memoryview, limit_bytes: int) -> bytes:
    size = cramjam.snappy.decompress_raw_len(block)
    if size > limit_bytes:
        raise CorruptDataError(f"snappy block decompresses to {size} bytes, more than {limit_bytes}")
    return bytes(cramjam.snappy.decompress_raw(block))


def _grow(codec: str, data: memoryview, limit_bytes: int) -> memoryview:
    """Decompress lz4 or zstd into a growing buffer: neither format has to declare its decompressed size."""
    into = cramjam.lz4.decompress_into if codec == "lz4" else cramjam.zstd.decompress_into
    room = min(limit_bytes, max(_FIRST_TRY_BYTES, len(data) * _EXPECTED_RATIO))
    while True:
        out = bytearray(room)
        try:
            return memoryview(out)[: into(data, out)]
        except cramjam.DecompressionError:
            if room >= limit_bytes:
                raise
            room = min(limit_bytes, room * 4)


RawBatch = bytes | bytearray | memoryview
Headers = Sequence[tuple[str, bytes | None]]

# The fields of BatchHeader, in the layout drawn above.
_HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_FROM_ATTRIBUTES: Final = struct.Struct(">hiqqqhii")
_UP_TO_CRC: Final = struct.Struct(">qiibI")
_TIMES: Final = struct.Struct(">qq")
_TIMES_AT: Final = 27
HEADER_BYTES: Final = _HEADER.size
_LENGTH: Final = struct.Struct(">i")
_LENGTH_OFFSET: Final = 8
_LENGTH_OVERHEAD: Final = 12
_CRC_START: Final = 21
_MAGIC: Final = 2
_COMPRESSION_MASK: Final = 0x07
_LOG_APPEND_TIME: Final = 0x08
_TRANSACTIONAL: Final = 0x10
_CONTROL: Final = 0x20


DECOMPRESSED_BYTES_MAX: Final = 64 << 20
"""Default limit on the decompressed bytes of one batch's records."""

# Offset and timestamp deltas are varints. Moved into a larger batch, a record may need 4 more bytes for its offset
# delta, 9 for its timestamp delta and 2 for its length.
_REBATCH_GROWTH_BYTES: Final = 15


class Compression(IntEnum):
    """Compression codec, numbered as in a batch's attributes."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4

    @classmethod
    def named(cls, name: str) -> Compression:
        """Return the codec of this Kafka name (``none``, ``gzip``, ``snappy``, ``lz4``, ``zstd``).

        Raises:
            ValueError: There is no such codec.
        """
        try:
            return cls[name.upper()]
        except KeyError:
            raise ValueError(f"unknown compression {name!r}; known: {', '.join(c.name.lower() for c in cls)}") from None


BUFFER_BYTES_MIN: Final = 4 * 1024 * 1024
"""Smallest buffer of a client for batches not yet acknowledged: one batch of each of its segments must fit in."""


class BatchHeader(NamedTuple):
    """Header of a record batch: the fixed 61 bytes in front of the records."""

    base_offset: int
    length: int
    partition_leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size(self) -> int:
        """Size of the whole batch in bytes."""
        return self.length + _LENGTH_OVERHEAD

    @property
    def compression(self) -> int:
        """Codec number; a foreign batch may hold one that :class:`Compression` lacks."""
        return self.attributes & _COMPRESSION_MASK

    @property
    def is_transactional(self) -> bool:
        """True if the batch belongs to a native transaction."""
        return bool(self.attributes & _TRANSACTIONAL)

    @property
    def is_compacted(self) -> bool:
        """True if compaction has taken records out of the batch."""
        return self.record_count <= self.last_offset_delta

    @property
    def is_append_time(self) -> bool:
        """True if all records carry the broker's append time, which is ``max_timestamp``."""
        return bool(self.attributes & _LOG_APPEND_TIME)

    @property
    def is_control(self) -> bool:
        """True for a control batch: a transaction marker, not data."""
        return bool(self.attributes & _CONTROL)


T = TypeVar("T")
_as_header = BatchHeader._make
_offset_of = attrgetter("offset")
_place_of = attrgetter("offset", "timestamp")


class LogRecord(NamedTuple):
    """One record of a batch; ``timestamp`` in ms since 1970, a ``value`` of None is a tombstone."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


class BatchPlace(NamedTuple):
    """Place of an input batch: its first record is record ``offset_delta`` of output batch number ``batch``."""

    batch: int
    offset_delta: int


@dataclass(frozen=True, slots=True)
class Rebatched:
    """Fewer, larger batches, and the place of every input batch in them, in input order."""

    batches: list[RawBatch]
    places: list[BatchPlace]


def parse_header(batch: RawBatch) -> BatchHeader:
    """Parse the header of a complete batch.

    Raises:
        CorruptDataError: The batch is too short, not magic 2, of another length than it claims, or its record count
            is negative.
    """
    size = len(batch)
    if size < HEADER_BYTES:
        raise CorruptDataError(f"{size} bytes are no record batch: its header alone has {HEADER_BYTES}")
    header = _as_header(_HEADER.unpack_from(batch))
    if header.magic != _MAGIC:
        raise CorruptDataError(f"record batch has magic {header.magic}, not {_MAGIC}")
    if header.length + _LENGTH_OVERHEAD != size:
        raise CorruptDataError(f"record batch claims {header.size} bytes and has {size}")
    if header.record_count < 0:
        raise CorruptDataError(f"record batch claims {header.record_count} records")
    return header


def complete_batches(raw: bytes | memoryview) -> Iterator[memoryview]:
    """Split the records of a fetch response into batches, leaving out a last one that is cut short.

    Raises:
        CorruptDataError: While iterating: a batch claims to be smaller than its header.
    """
    view = memoryview(raw)
    position = 0
    while position + HEADER_BYTES <= len(view):
        (length,) = _LENGTH.unpack_from(view, position + _LENGTH_OFFSET)
        size = length + _LENGTH_OVERHEAD
        if size < HEADER_BYTES:
            raise CorruptDataError(f"a record batch claims {size} bytes, fewer than its header has")
        if position + size > len(view):
            return
        yield view[position : position + size]
        position += size


class FetchedBatches:
    """Consecutive batches, split and their headers parsed at each iteration.

    A fetch may bring ten thousand batches of one record each. Keeping that many headers and views costs four times
    their parsing, in garbage collections.

    Attributes:
        last: Header of the last batch that was checked; None if there is none.
    """

    __slots__ = ("_raw", "last")

    def __init__(self, raw: bytes | memoryview) -> None:
        self._raw = memoryview(raw)
        self.last: BatchHeader | None = None

    def check(self) -> None:
        """Check the checksums, and leave out what comes from a batch on that is cut short or corrupt.

        Raises:
            CorruptDataError: There is a corrupt batch.
        """
        sound = 0
        try:
            for header, batch in self:
                if crc32c(batch[_CRC_START:]) != header.crc:
                    check_crc(header, batch)
                self.last = header
                sound += len(batch)
        finally:
            self._raw = self._raw[:sound]

    def __iter__(self) -> Iterator[tuple[BatchHeader, memoryview]]:
        view = self._raw
        position, behind = 0, len(view)
        unpack = _HEADER.unpack_from
        while position + HEADER_BYTES <= behind:
            header = _as_header(unpack(view, position))
            size = header.length + _LENGTH_OVERHEAD
            if size < HEADER_BYTES:
                raise CorruptDataError(f"a record batch claims {size} bytes, fewer than its header has")
            end = position + size
            if end > behind:
                return
            batch = view[position:end]
            if header.magic != _MAGIC or header.record_count < 0:
                parse_header(batch)
            yield header, batch
            position = end


def validate_frame(batch: RawBatch, count: int, *, deep: bool = False) -> BatchHeader:
    """Check that a client's batch can be forwarded unchanged, that is, that a broker would accept it as data.

    Args:
        batch: One complete batch, with no bytes after it.
        count: Number of records it must hold, at least 1.
        deep: Also decompress and parse every record, as the broker does. Costs about 0.5 µs per record; without it,
            wrong bytes under a right checksum come to light only when the broker refuses the batch.

    Raises:
        CorruptDataError: ``batch`` is not a plain data batch of ``count`` records with a right checksum.
    """
    header = parse_header(batch)
    if header.attributes & ~_COMPRESSION_MASK:
        raise CorruptDataError(
            f"record batch has attributes {header.attributes:#x}: a frame holds plain data, neither transactional, "
            "control nor broker-timestamped"
        )
    if header.compression > Compression.ZSTD:
        raise CorruptDataError(f"record batch has unknown compression {header.compression}")
    if count < 1 or header.record_count != count:
        raise CorruptDataError(f"record batch holds {header.record_count} records, expected {count}")
    if header.last_offset_delta != count - 1:
        raise CorruptDataError(f"record batch of {count} records has last offset delta {header.last_offset_delta}")
    check_crc(header, batch)
    if deep:
        # The header may count the records right while the records number themselves wrong.
        for delta, record in enumerate(read_records(batch)):
            if record.offset != header.base_offset + delta:
                raise CorruptDataError(f"record {delta} of a batch is numbered {record.offset - header.base_offset}")
    return header


def check_data(batch: RawBatch) -> BatchHeader:
    """Return the header of a batch that a producer may append.

    Raises:
        CorruptDataError: ``batch`` is not one complete batch of data.
    """
    header = parse_header(batch)
    if header.is_control:
        raise CorruptDataError("a control batch is a broker's marker and cannot be appended by a producer")
    if header.record_count == 0:
        raise CorruptDataError("a record batch without records cannot be appended")
    return header


_OF_FRAME: Final = struct.Struct(">8xi4xbIhi30xi")
_COUNT: Final = struct.Struct(">i")
_COUNT_PLACE: Final = 57
_OF_JOINED: Final = struct.Struct(">8xi4xb5xb")
_OF_FRAME_ATTRIBUTES_MAX: Final = 4  # the codecs, and nothing else


def is_frame(batch: RawBatch, count: int) -> bool:
    """Return whether :func:`validate_frame` takes a batch, in half the time; it says what is wrong with another."""
    if len(batch) < HEADER_BYTES or count < 1:
        return False
    length, magic, crc, attributes, last_offset_delta, records = _OF_FRAME.unpack_from(batch)
    return bool(
        length + _LENGTH_OVERHEAD == len(batch)
        and magic == _MAGIC
        and 0 <= attributes <= _OF_FRAME_ATTRIBUTES_MAX
        and records == count
        and last_offset_delta == count - 1
        and crc32c(memoryview(batch)[_CRC_START:]) == crc
    )


def join_bound(size: int, records: int) -> int:
    """Return by how many bytes, at most, an uncompressed batch makes a batch longer into which it is merged."""
    return size - HEADER_BYTES + records * _REBATCH_GROWTH_BYTES


def joined(batches: Sequence[RawBatch], ends: Sequence[int], max_bytes: int) -> bytes | None:
    """Merge uncompressed batches into one, as :func:`rebatch` does, in less time; None if that is needed.

    Args:
        batches: Several complete data batches.
        ends: How many records they hold up to the end of each.
        max_bytes: Limit on the merged batch.

    Raises:
        CorruptDataError: The records of an input do not parse, or are not as many as ``ends`` says.
    """
    bound = HEADER_BYTES + join_bound(sum(map(len, batches)) - HEADER_BYTES * (len(batches) - 1), ends[-1])
    if bound > max_bytes or not all(map(_is_uncompressed, batches)):
        return None
    return _join(batches, ends, bound, Compression.NONE)


def _is_uncompressed(batch: RawBatch) -> bool:
    size = len(batch)
    if size < HEADER_BYTES:
        return False
    length, magic, codec = _OF_JOINED.unpack_from(batch)
    return bool(length + _LENGTH_OVERHEAD == size and magic == _MAGIC and not codec & _COMPRESSION_MASK)


def stamped_header(
    batch: RawBatch, *, producer_id: int, producer_epoch: int, base_sequence: int, transactional: bool = True
) -> bytes:
    """Return the header that makes ``batch`` this producer's: send its 61 bytes in front of ``batch[61:]``.

    Reset the base offset and the leader epoch, set the producer fields and the transactional bit, renew the checksum.
    The records are read once, for the checksum, and not copied.

    Raises:
        CorruptDataError: ``batch`` is not one complete batch of data.
    """
    header = check_data(batch)
    attributes = header.attributes & ~_TRANSACTIONAL
    if transactional:
        attributes |= _TRANSACTIONAL
    tail = _FROM_ATTRIBUTES.pack(
        attributes,
        header.last_offset_delta,
        header.base_timestamp,
        header.max_timestamp,
        producer_id,
        producer_epoch,
        base_sequence,
        header.record_count,
    )
    crc = crc32c(memoryview(batch)[HEADER_BYTES:], crc32c(tail))
    return _UP_TO_CRC.pack(0, header.length, -1, _MAGIC, crc) + tail


def single_record(key: bytes, value: bytes, timestamp_ms: int) -> bytes:
    """Return a batch of one record without headers, and without a checksum, which :func:`stamped_header` works out.

    A large value is copied once, and read once for the checksum; a builder does both several times.
    """
    front = b"".join((b"\0\0\0", encode_long(len(key)), key, encode_long(len(value))))
    size = encode_long(len(front) + len(value) + 1)
    tail = _FROM_ATTRIBUTES.pack(Compression.NONE, 0, timestamp_ms, timestamp_ms, -1, -1, -1, 1)
    length = HEADER_BYTES - _LENGTH_OVERHEAD + len(size) + len(front) + len(value) + 1
    return b"".join((_UP_TO_CRC.pack(0, length, -1, _MAGIC, 0), tail, size, front, value, b"\0"))


def framed(body: RawBatch, *, codec: int, count: int, base_timestamp: int, max_timestamp: int) -> bytes:
    """Return a batch around encoded records, with no producer set.

    Args:
        body: The records, compressed as one unless ``codec`` is 0.
        codec: Number of the compression codec.
        count: Number of records; their offset deltas run from 0.
        base_timestamp: Base of their timestamp deltas, in ms since 1970.
        max_timestamp: Latest of their timestamps, in ms since 1970.
    """
    return framed_parts((body,), codec=codec, count=count, base_timestamp=base_timestamp, max_timestamp=max_timestamp)


def framed_parts(
    parts: Sequence[RawBatch], *, codec: int, count: int, base_timestamp: int, max_timestamp: int
) -> bytes:
    """Return a batch around encoded records that are in several pieces; see :func:`framed`."""
    tail = _FROM_ATTRIBUTES.pack(codec, count - 1, base_timestamp, max_timestamp, -1, -1, -1, count)
    length = HEADER_BYTES - _LENGTH_OVERHEAD + sum(map(len, parts))
    crc = crc32c(tail)
    for part in parts:
        crc = crc32c(part, crc)
    return b"".join((_UP_TO_CRC.pack(0, length, -1, _MAGIC, crc), tail, *parts))


_ENCODERS: Final[Mapping[int, Callable[[bytes], bytes]]] = {
    Compression.GZIP: gzip_encode,
    Compression.SNAPPY: snappy_encode,
    Compression.LZ4: lz4_encode,
    Compression.ZSTD: zstd_encode,
}


def compressed(records: RawBatch, codec: int) -> tuple[RawBatch, int]:
    """Return the records of a batch as compressed by a codec, and the codec; as they are if that makes them no smaller.

    Args:
        records: As encoded behind the header of a batch.
        codec: Number of the codec.
    """
    encode = _ENCODERS.get(codec)
    if encode is None:
        return records, Compression.NONE
    found = encode(bytes(records))
    return (found, codec) if len(found) < len(records) else (records, Compression.NONE)


def finished(batch: RawBatch, rest: bytes, size: int, codec: int) -> bytes:
    """Return a batch whose first record's last header has a longer value, compressed.

    Args:
        batch: Uncompressed, without a producer.
        rest: What the value has in addition, behind what is there.
        size: Bytes of the value that is there; below 64.
        codec: Number of the compression codec.
    """
    if not rest and codec == Compression.NONE:
        return bytes(batch)
    _, _, base_timestamp, max_timestamp, _, _, _, count = _FROM_ATTRIBUTES.unpack_from(batch, _CRC_START)
    records: RawBatch = memoryview(batch)[HEADER_BYTES:]
    if rest:
        length, place = decode_long(records, 0)
        end = place + length
        begin = end - size
        more = encode_long(size + len(rest))
        length += len(more) - 1 + len(rest)
        parts = (encode_long(length), records[place : begin - 1], more, records[begin:end], rest, records[end:])
        records = b"".join(parts)
    body, used = compressed(records, codec)
    return framed(
        body,
        codec=used,
        count=count,
        base_timestamp=base_timestamp,
        max_timestamp=max_timestamp,
    )


def retimed(batch: RawBatch, latest_ms: int) -> bytes:
    """Return a copy of a batch whose latest record has another time, and the others as long before it as they were.

    Only the header changes, for records hold differences to its base; :func:`stamped_header` renews the checksum.
    """
    copied = bytearray(batch)
    base_ms, max_ms = _TIMES.unpack_from(copied, _TIMES_AT)
    _TIMES.pack_into(copied, _TIMES_AT, base_ms + latest_ms - max_ms, latest_ms)
    return bytes(copied)


def stamp(
    batch: RawBatch, *, producer_id: int, producer_epoch: int, base_sequence: int, transactional: bool = True
) -> bytes:
    """Return a copy of ``batch`` as this producer's; see :func:`stamped_header`."""
    header = stamped_header(
        batch,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        transactional=transactional,
    )
    return b"".join((header, memoryview(batch)[HEADER_BYTES:]))


def read_records(batch: RawBatch, *, limit_bytes: int = DECOMPRESSED_BYTES_MAX) -> Iterator[LogRecord]:
    """Iterate over the records of a complete batch, decompressed; the checksum is not checked.

    Args:
        batch: One complete batch.
        limit_bytes: Limit on the decompressed bytes of its records.

    Raises:
        CorruptDataError: While iterating: a record does not parse, or the records exceed ``limit_bytes``.
    """
    header = parse_header(batch)
    records = iter(DefaultRecordBatch(uncompressed(header, batch, limit_bytes=limit_bytes)))
    seen = 0
    while True:
        try:
            record = next(records)
        except StopIteration:
            break
        except Exception as exc:  # the compiled reader lets errors of any class through
            raise CorruptDataError(f"record {seen} of {header.record_count} does not parse: {exc}") from exc
        seen += 1
        yield LogRecord(record.offset, record.timestamp, record.key, record.value, record.headers)
    if seen != header.record_count:
        raise CorruptDataError(f"record batch claims {header.record_count} records and holds {seen}")


class PlainRecord(Protocol):
    """Record as aiokafka's compiled reader returns it; see :class:`LogRecord`."""

    @property
    def offset(self) -> int:
        """Offset of the record in its log."""

    @property
    def timestamp(self) -> int:
        """Timestamp in ms since 1970."""

    @property
    def key(self) -> bytes | None:
        """None if it has none."""

    @property
    def value(self) -> bytes | None:
        """None for a tombstone."""


_NUMBERS_AT_ONCE: Final = 10_000
PLAIN_RECORDS_MAX: Final = 1_000
"""Records up to which a batch is read at once."""


def plain_records(batch: RawBatch) -> Sequence[PlainRecord] | None:
    """Return the records of an uncompressed batch of few; None of another, or if they do not parse.

    :func:`read_records` reads every batch, one record after the other, and says what is wrong.
    """
    if not _is_uncompressed(batch):
        return None
    try:
        (count,) = _COUNT.unpack_from(batch, _COUNT_PLACE)
        found = list(DefaultRecordBatch(batch)) if 0 < count <= PLAIN_RECORDS_MAX else None
    except Exception:  # the compiled reader lets errors of any class through
        return None
    return found if found is None or len(found) == count else None


def crc32c(data: RawBatch, crc: int = 0) -> int:
    """Return the checksum of bytes behind those that have ``crc``; all but ``bytes`` are copied for the library."""
    return int(extend(crc, data if isinstance(data, bytes) else bytes(data)))


def check_crc(header: BatchHeader, batch: RawBatch) -> None:
    """Check the checksum of a complete batch; raise CorruptDataError if it is wrong."""
    actual = crc32c(memoryview(batch)[_CRC_START:])
    if actual != header.crc:
        raise CorruptDataError(f"record batch has checksum {header.crc:#010x}, its bytes give {actual:#010x}")


def check_numbering(batch: RawBatch) -> None:
    """Check that the records of an uncompressed batch are numbered 0, 1, 2 and so on; raise CorruptDataError if not.

    Brokers check the numbering only of compressed batches. A consumer trusts it: after a number too large it continues
    behind that offset and skips records of others. Costs about 0.15 µs per record.
    """
    if parse_header(batch).compression == Compression.NONE:
        _check_sound(batch, all(some == [*numbers] for numbers, some in _slices(batch, _offset_of)))


def checked_times(batch: RawBatch) -> tuple[int, int]:
    """Return the earliest and the latest time of an uncompressed batch's records; check their numbering as above.

    Its header may say other ones, to which brokers pay no attention.
    """
    is_sound = True
    times: list[int] = []
    for numbers, some in _slices(batch, _place_of):
        is_sound = is_sound and [offset for offset, _ in some] == [*numbers]
        times += [time for _, time in some]
        times = [min(times), max(times)] if times else []
    _check_sound(batch, is_sound and bool(times))
    return times[0], times[1]


def _slices(batch: RawBatch, read: Callable[[DefaultRecord], T]) -> Iterator[tuple[range, list[T]]]:
    """Yield numbers, and what is read of the records that should have them; last none, and of what is behind them.

    Some at a time, since the loop over them is not interrupted for other threads.
    """
    header = parse_header(batch)
    wanted = range(header.base_offset, header.base_offset + header.record_count)
    try:
        found = map(read, DefaultRecordBatch(batch))
        for place in range(0, len(wanted), _NUMBERS_AT_ONCE):
            numbers = wanted[place : place + _NUMBERS_AT_ONCE]
            yield numbers, list(islice(found, len(numbers)))
        yield range(0), list(islice(found, 1))
    except Exception as exc:  # the compiled reader lets errors of any class through
        raise CorruptDataError(f"a record of a batch of {header.record_count} does not parse: {exc}") from exc


def _check_sound(batch: RawBatch, is_sound: bool) -> None:
    if not is_sound:
        count = parse_header(batch).record_count
        raise CorruptDataError(f"the {count} records of a batch are not numbered one by one inside")


def uncompressed(header: BatchHeader, batch: RawBatch, *, limit_bytes: int = DECOMPRESSED_BYTES_MAX) -> RawBatch:
    """Return the batch with its records decompressed, to at most ``limit_bytes``; the checksum is not renewed.

    Raises:
        CorruptDataError: The records do not decompress, or exceed ``limit_bytes``.
    """
    if header.compression == Compression.NONE:
        return batch
    if header.compression > Compression.ZSTD:
        raise CorruptDataError(f"record batch has unknown compression {header.compression}")
    codec = Compression(header.compression).name.lower()
    records = decompress(codec, memoryview(batch)[HEADER_BYTES:], limit_bytes)
    head = bytearray(memoryview(batch)[:HEADER_BYTES])
    struct.pack_into(">i", head, _LENGTH_OFFSET, HEADER_BYTES - _LENGTH_OVERHEAD + len(records))
    struct.pack_into(">h", head, _CRC_START, header.attributes & ~_COMPRESSION_MASK)
    return b"".join((head, records))


def _new_builder(max_bytes: int, compression: Compression) -> DefaultRecordBatchBuilder:
    return DefaultRecordBatchBuilder(
        magic=_MAGIC,
        compression_type=int(compression),
        is_transactional=0,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=max_bytes,
    )


class BatchBuilder:
    """Builder of one batch, record by record, up to ``max_bytes`` before compression. Not thread-safe."""

    def __init__(self, max_bytes: int, compression: Compression = Compression.NONE) -> None:
        self._max_bytes = max_bytes
        self._compression = compression
        self._builder = self._fresh()
        self._count = 0

    def _fresh(self) -> DefaultRecordBatchBuilder:
        return _new_builder(self._max_bytes, self._compression)

    def append(self, timestamp: int, key: bytes | None, value: bytes | None, headers: Headers = ()) -> bool:
        """Add one record; return False, adding nothing, if the batch would exceed ``max_bytes``.

        The first record always fits, so that no limit makes a writer loop; bound single records by
        :func:`record_size_max`. ``timestamp`` is in ms since 1970.
        """
        listed = headers if isinstance(headers, list) else list(headers)
        if self._builder.append(self._count, timestamp, key, value, listed) is None:
            return False
        self._count += 1
        return True

    @property
    def count(self) -> int:
        """Number of records added so far."""
        return self._count

    @property
    def size(self) -> int:
        """Size so far in bytes, header included, before compression."""
        return self._builder.size()

    def build(self) -> bytes:
        """Return the complete batch and start an empty one.

        Raises:
            ValueError: No record was added.
        """
        if self._count == 0:
            raise ValueError("a record batch needs at least one record")
        batch = bytes(self._builder.build())
        self._builder = self._fresh()
        self._count = 0
        return batch


def record_size_max(key: bytes | None, value: bytes | None, headers: Headers = ()) -> int:
    """Return an upper bound on the bytes of an uncompressed batch that holds only this record."""
    return DefaultRecordBatchBuilder.estimate_size_in_bytes(key, value, headers)


def rebatch(batches: Iterable[RawBatch], max_bytes: int, *, compression: Compression = Compression.NONE) -> Rebatched:
    """Merge neighbouring small batches into fewer, larger ones; records and their order stay the same.

    A batch is never split, so its records lie side by side in one output batch. A batch that has its output batch to
    itself (because it is large, or its neighbours are) is returned unchanged, whatever its compression.

    Args:
        batches: Complete data batches.
        max_bytes: Limit on a merged batch before compression; a single larger input stays as it is.
        compression: Codec of merged batches.

    Raises:
        CorruptDataError: An input is not a batch, its records do not parse, or a batch returned unchanged numbers its
            records wrong.
    """
    merged = Rebatched([], [])
    waiting: list[RawBatch] = []
    ends: list[int] = []
    waiting_bytes = HEADER_BYTES
    count = 0

    def close() -> None:
        nonlocal waiting_bytes, count
        if waiting:
            if len(waiting) == 1:
                check_numbering(waiting[0])
                merged.batches.append(waiting[0])
            else:
                merged.batches.append(_join(waiting, ends, waiting_bytes, compression))
        waiting.clear()
        ends.clear()
        waiting_bytes = HEADER_BYTES
        count = 0

    for batch in batches:
        header = parse_header(batch)
        if header.attributes & _COMPRESSION_MASK == Compression.NONE:
            bound = len(batch) - HEADER_BYTES + header.record_count * _REBATCH_GROWTH_BYTES
        elif _is_larger(header, batch, max_bytes):
            bound = max_bytes  # possibly a decompression bomb: left as it is, for brokers to check
        else:
            bound = sum(record_size_max(r.key, r.value, r.headers) for r in read_records(batch))
        if waiting_bytes + bound > max_bytes:
            close()
        merged.places.append(BatchPlace(len(merged.batches), count))
        waiting.append(batch)
        waiting_bytes += bound
        count += header.record_count
        ends.append(count)
    close()
    return merged


def _is_larger(header: BatchHeader, batch: RawBatch, limit_bytes: int) -> bool:
    """Return whether a compressed batch decompresses to more than ``limit_bytes``, without parsing its records.

    Raises:
        CorruptDataError: The batch does not decompress, or exceeds ``DECOMPRESSED_BYTES_MAX``.
    """
    try:
        uncompressed(header, batch, limit_bytes=limit_bytes)
    except CorruptDataError:
        uncompressed(header, batch)
        return True
    return False


def _join(batches: Sequence[RawBatch], ends: Sequence[int], bound: int, compression: Compression) -> bytes:
    """Merge batches into one; ``ends`` holds the running count of records after each.

    This is a leader's hot loop, so records go from the compiled reader to the compiled builder directly.
    """
    builder = _new_builder(bound, compression)
    append = builder.append
    count = 0
    fits = True
    try:
        for batch, until in zip(batches, ends, strict=True):
            for record in DefaultRecordBatch(batch):
                fits = fits and append(count, record.timestamp, record.key, record.value, record.headers) is not None
                count += 1
            if count != until:
                raise CorruptDataError(
                    f"a record batch does not hold the number of records that it claims, by {until - count}"
                )
    except CorruptDataError:
        raise
    except Exception as exc:  # the codecs raise errors of half a dozen libraries
        raise CorruptDataError(f"record {count} of merged batches does not parse: {exc}") from exc
    if not fits:
        raise AssertionError(f"merged batch exceeds its computed bound of {bound} bytes")
    return bytes(builder.build())
