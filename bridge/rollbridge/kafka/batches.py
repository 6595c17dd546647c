"""Record batches (magic v2) as plain values: read, check, stamp, build and merge them; no input or output.

A frame's value is a ready-made batch, and forwarding one changes nothing but the producer fields of its 61-byte
header and the checksum, so the records themselves are neither copied nor looked at.

Source: Kafka documentation, "Record Batch"; the checksum is CRC-32C over everything from the attributes on.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from typing import Final, NamedTuple

import cramjam
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from crc32c import crc32c

from rollbridge.errors import CorruptDataError

# --------------------------------------------------------------------------------------------------------------------
# Decompression with a bound: a batch of one megabyte can claim to hold a thousand, and must not get the memory.


# xerial's framing of snappy, which Kafka's clients in Java use: a header of 16 bytes, then blocks with their lengths.
_XERIAL: Final = b"\x82SNAPPY\0"
_XERIAL_HEADER_BYTES: Final = 16
_GZIP_WINDOW: Final = 31
_FIRST_TRY_BYTES: Final = 1 << 16
_EXPECTED_RATIO: Final = 4


def decompress(codec: str, data: memoryview, limit_bytes: int) -> bytes | bytearray | memoryview:
    """Decompress what Kafka's codec of this name (``gzip``, ``snappy``, ``lz4``, ``zstd``) made.

    Raises:
        CorruptDataError: It does not decompress, or not to at most ``limit_bytes``.
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
    """Neither format has to say how much it holds, so try with more and more room."""
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


Batch = bytes | bytearray | memoryview
Headers = Sequence[tuple[str, bytes | None]]

# base offset, length, partition leader epoch, magic, crc, attributes, last offset delta, base timestamp,
# max timestamp, producer id, producer epoch, base sequence, record count
_HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_FROM_ATTRIBUTES: Final = struct.Struct(">hiqqqhii")
_UP_TO_CRC: Final = struct.Struct(">qiibI")
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

SEQUENCE_MAX: Final = (1 << 31) - 1

DECOMPRESSED_BYTES_MAX: Final = 64 << 20
"""Most that the records of one batch may take decompressed, unless the reader says otherwise."""

# Offset and timestamp deltas are varints: at a new place in a larger batch, each record may need 4 bytes more for the
# offset delta, 9 for the timestamp delta and 2 for the length.
_REBATCH_GROWTH_BYTES: Final = 15


class Compression(IntEnum):
    """Codecs, numbered as in a batch's attributes."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4

    @classmethod
    def named(cls, name: str) -> Compression:
        """Look up a codec by Kafka's name (``none``, ``gzip``, ``snappy``, ``lz4``, ``zstd``); else ValueError."""
        try:
            return cls[name.upper()]
        except KeyError:
            raise ValueError(f"unknown compression {name!r}; known: {', '.join(c.name.lower() for c in cls)}") from None


BUFFER_BYTES_MIN: Final = 4 * 1024 * 1024
"""Least room for what waits for the brokers in a client: a batch of each of its segments must fit in."""


class BatchHeader(NamedTuple):
    """The fixed 61 bytes in front of the records of a batch."""

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
        """Bytes of the whole batch."""
        return self.length + _LENGTH_OVERHEAD

    @property
    def compression(self) -> int:
        """Codec number; one that is not in :class:`Compression` is possible in a foreign batch."""
        return self.attributes & _COMPRESSION_MASK

    @property
    def is_transactional(self) -> bool:
        """Whether the batch belongs to a native transaction."""
        return bool(self.attributes & _TRANSACTIONAL)

    @property
    def is_append_time(self) -> bool:
        """Whether the broker's time, which is ``max_timestamp``, stands for the timestamps of all records."""
        return bool(self.attributes & _LOG_APPEND_TIME)

    @property
    def is_control(self) -> bool:
        """Whether the batch is a marker, not data."""
        return bool(self.attributes & _CONTROL)


_as_header = BatchHeader._make
_offset_of = attrgetter("offset")


class Record(NamedTuple):
    """One record of a batch; ``timestamp`` in milliseconds, ``value`` None is a tombstone."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


class Place(NamedTuple):
    """Where a batch went: its first record is record ``offset_delta`` of output batch number ``batch``."""

    batch: int
    offset_delta: int


@dataclass(frozen=True, slots=True)
class Rebatched:
    """Fewer, larger batches, and for every input batch its place in them, in input order."""

    batches: list[Batch]
    places: list[Place]


def parse_header(batch: Batch) -> BatchHeader:
    """Read the header of a complete batch.

    Raises:
        CorruptDataError: Too short, not magic 2, a length other than the buffer's, or a negative record count.
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
    """The batches that stand one after the other in the answer to a fetch; the last, if it is cut short, is left out.

    Raises:
        CorruptDataError: While iterating: one claims to be smaller than its header.
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


def validate_frame(batch: Batch, count: int, *, deep: bool = False) -> BatchHeader:
    """Check that a client's batch can be forwarded as it is: the broker would accept it as data.

    Args:
        batch: One complete batch, with no bytes after it.
        count: Number of records it must hold, at least 1.
        deep: Also decompress and parse every record, as the broker does. Costs about 0.5 µs per record; without it
            a batch with a right checksum over wrong bytes is found only when the broker refuses it.

    Raises:
        CorruptDataError: Anything else than a plain data batch of ``count`` records with a right checksum.
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
        # A batch can count its records right in the header and number them wrong inside.
        for delta, record in enumerate(read_records(batch)):
            if record.offset != header.base_offset + delta:
                raise CorruptDataError(f"record {delta} of a batch is numbered {record.offset - header.base_offset}")
    return header


def stamped_header(
    batch: Batch, *, producer_id: int, producer_epoch: int, base_sequence: int, transactional: bool = True
) -> bytes:
    """Return the 61 bytes to send in front of ``batch[61:]`` for it to be this producer's.

    Base offset and leader epoch are reset, the producer fields and the transactional bit set, the checksum renewed;
    the records are read once for the checksum and not copied.

    Raises:
        CorruptDataError: Not one complete batch of data.
    """
    header = parse_header(batch)
    if header.is_control:
        raise CorruptDataError("a control batch is a broker's marker and cannot be appended by a producer")
    if header.record_count == 0:
        raise CorruptDataError("a record batch without records cannot be appended")
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


def framed(body: Batch, *, codec: int, count: int, base_timestamp: int, max_timestamp: int) -> bytes:
    """A batch of records that are encoded already, and of no producer yet.

    Args:
        body: The records, compressed as a whole if there is a codec.
        codec: Its number.
        count: How many records there are, numbered from 0 on.
        base_timestamp: What their timestamps count from, in ms since 1970.
        max_timestamp: The latest of these.
    """
    tail = _FROM_ATTRIBUTES.pack(codec, count - 1, base_timestamp, max_timestamp, -1, -1, -1, count)
    length = HEADER_BYTES - _LENGTH_OVERHEAD + len(body)
    return b"".join((_UP_TO_CRC.pack(0, length, -1, _MAGIC, crc32c(body, crc32c(tail))), tail, body))


def stamp(
    batch: Batch, *, producer_id: int, producer_epoch: int, base_sequence: int, transactional: bool = True
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


def next_sequence(sequence: int, count: int) -> int:
    """Sequence number that follows ``count`` records from ``sequence`` on: after 2^31-1 comes 0, never a negative."""
    return (sequence + count) & SEQUENCE_MAX


def read_records(batch: Batch, *, limit_bytes: int = DECOMPRESSED_BYTES_MAX) -> Iterator[Record]:
    """Iterate over the records of a complete batch, decompressed; the checksum is not looked at.

    Args:
        batch: One complete batch.
        limit_bytes: Most memory that its records may take decompressed.

    Raises:
        CorruptDataError: While iterating, at the first byte that does not parse, or if it is larger than allowed.
    """
    header = parse_header(batch)
    records = iter(DefaultRecordBatch(uncompressed(header, batch, limit_bytes=limit_bytes)))
    seen = 0
    while True:
        try:
            record = next(records)
        except StopIteration:
            break
        except Exception as exc:  # the compiled reader raises whatever it trips over
            raise CorruptDataError(f"record {seen} of {header.record_count} does not parse: {exc}") from exc
        seen += 1
        yield Record(record.offset, record.timestamp, record.key, record.value, record.headers)
    if seen != header.record_count:
        raise CorruptDataError(f"record batch claims {header.record_count} records and holds {seen}")


def check_crc(header: BatchHeader, batch: Batch) -> None:
    """Raise CorruptDataError unless the checksum of a complete batch is right."""
    actual = crc32c(memoryview(batch)[_CRC_START:])
    if actual != header.crc:
        raise CorruptDataError(f"record batch has checksum {header.crc:#010x}, its bytes give {actual:#010x}")


def check_numbering(batch: Batch) -> None:
    """Raise CorruptDataError unless the records of an uncompressed batch are numbered from 0 on, one by one.

    Brokers look at that inside of compressed batches only, and take any number in others. A consumer believes it, and
    goes on to read behind it, over records of others. Costs about 0.3 µs per record.
    """
    header = parse_header(batch)
    if header.compression != Compression.NONE:
        return
    wanted = range(header.base_offset, header.base_offset + header.record_count)
    try:
        numbers = list(map(_offset_of, DefaultRecordBatch(batch)))
    except Exception as exc:  # the compiled reader raises whatever it trips over
        raise CorruptDataError(f"a record of a batch of {header.record_count} does not parse: {exc}") from exc
    if numbers != list(wanted):
        raise CorruptDataError(f"the {header.record_count} records of a batch are not numbered one by one inside")


def uncompressed(header: BatchHeader, batch: Batch, *, limit_bytes: int = DECOMPRESSED_BYTES_MAX) -> Batch:
    """The same batch with its records as they are, at most ``limit_bytes`` of them; its checksum is not renewed.

    Raises:
        CorruptDataError: It does not decompress, or is larger than allowed.
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
    """Builds one batch, record by record, up to ``max_bytes`` before compression; not thread-safe."""

    def __init__(self, max_bytes: int, compression: Compression = Compression.NONE) -> None:
        self._max_bytes = max_bytes
        self._compression = compression
        self._builder = self._fresh()
        self._count = 0

    def _fresh(self) -> DefaultRecordBatchBuilder:
        return _new_builder(self._max_bytes, self._compression)

    def append(self, timestamp: int, key: bytes | None, value: bytes | None, headers: Headers = ()) -> bool:
        """Add one record; False, and nothing added, if the batch would exceed ``max_bytes``.

        The first record always fits, so that a limit never makes a writer loop; bound single records by
        :func:`record_size_max`. ``timestamp`` is in milliseconds since 1970.
        """
        listed = headers if isinstance(headers, list) else list(headers)
        if self._builder.append(self._count, timestamp, key, value, listed) is None:
            return False
        self._count += 1
        return True

    @property
    def count(self) -> int:
        """Records added so far."""
        return self._count

    @property
    def size(self) -> int:
        """Bytes so far, header included, before compression."""
        return self._builder.size()

    def build(self) -> bytes:
        """Return the complete batch and start over with an empty one; ValueError if there is no record."""
        if self._count == 0:
            raise ValueError("a record batch needs at least one record")
        batch = bytes(self._builder.build())
        self._builder = self._fresh()
        self._count = 0
        return batch


def record_size_max(key: bytes | None, value: bytes | None, headers: Headers = ()) -> int:
    """Upper bound of the bytes of a batch that holds just this record, uncompressed."""
    return DefaultRecordBatchBuilder.estimate_size_in_bytes(key, value, headers)


def rebatch(batches: Iterable[Batch], max_bytes: int, *, compression: Compression = Compression.NONE) -> Rebatched:
    """Merge neighbouring small batches into few larger ones, records and their order unchanged.

    A batch is never split, so all its records lie side by side in one output batch. One that is alone in its output
    batch (because it is large, or its neighbours are) is handed back as it came, whatever its compression.

    Args:
        batches: Complete data batches.
        max_bytes: Bound for a merged batch before compression; a single input larger than that stays as it is.
        compression: Codec for merged batches.

    Raises:
        CorruptDataError: An input is not a batch, its records do not parse, or one that is handed back numbers them
            wrongly.
    """
    merged = Rebatched([], [])
    waiting: list[Batch] = []
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
            bound = max_bytes  # a bomb perhaps: it stays as it is, and brokers look into it
        else:
            bound = sum(record_size_max(r.key, r.value, r.headers) for r in read_records(batch))
        if waiting_bytes + bound > max_bytes:
            close()
        merged.places.append(Place(len(merged.batches), count))
        waiting.append(batch)
        waiting_bytes += bound
        count += header.record_count
        ends.append(count)
    close()
    return merged


def _is_larger(header: BatchHeader, batch: Batch, limit_bytes: int) -> bool:
    """Whether a compressed batch holds more than ``limit_bytes``; its records are not made for that.

    Raises:
        CorruptDataError: It does not decompress, or is larger than any may be.
    """
    try:
        uncompressed(header, batch, limit_bytes=limit_bytes)
    except CorruptDataError:
        uncompressed(header, batch)
        return True
    return False


def _join(batches: Sequence[Batch], ends: Sequence[int], bound: int, compression: Compression) -> bytes:
    """One batch with the records of several, each of which ends at the given count.

    A leader's hot loop, so records go from the compiled reader to the compiled builder directly.
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
    except Exception as exc:  # the codecs behind it raise errors of half a dozen libraries
        raise CorruptDataError(f"record {count} of merged batches does not parse: {exc}") from exc
    if not fits:
        raise AssertionError(f"merged batch exceeds its computed bound of {bound} bytes")
    return bytes(builder.build())
