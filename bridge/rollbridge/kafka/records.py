"""Codec of record batches (magic 2): one parser of headers, one walker over records, one builder. No I/O, no state.

What a batch claims is checked here, against the bytes that are there, and nothing is allocated by a claim. A lie is a
:class:`CorruptDataError`, for every reader:

- of its header, in :func:`parse_header` and :class:`FetchedBatches`: size, magic, number of records and last offset;
- of its records, in :func:`read_chunks`: sizes, counts and numbers, each within what holds it;
- of its compression: at most ``limit_bytes`` are decompressed, as a megabyte may claim to hold a gigabyte.

:mod:`rollbridge.kafka.columns` walks and builds the same as columns.

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

A record, whose lengths are zigzag varints; below 0, a key or value is null::

    length | attributes | timestamp delta | offset delta | length, key | length, value | count, headers

Any client may write header names that are not UTF-8. They are read, and written again, byte for byte: a text holds a
surrogate in place of each byte that does not decode (:pep:`383`), so such a name never equals one of ours. aiokafka's
compiled reader and builder refuse these names; Python does their work for such batches only.

Source: Kafka documentation, "Record Batch" and "Record"; Kafka's ``DefaultRecord`` for lengths below 0.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import chain, islice
from operator import attrgetter, eq, lt
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import cramjam
from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode, zstd_encode
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from google_crc32c import extend

from rollbridge.base.avro import decode_long, encode_long
from rollbridge.errors import CorruptDataError, InvalidRequestError

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
_LENGTH_OFFSET: Final = 8
_LENGTH_OVERHEAD: Final = 12
_BEFORE_RECORDS: Final = HEADER_BYTES - _LENGTH_OVERHEAD
"""Bytes of the header that the length counts."""
_CRC_START: Final = 21
_MAGIC: Final = 2
_COMPRESSION_MASK: Final = 0x07
_LOG_APPEND_TIME: Final = 0x08
_TRANSACTIONAL: Final = 0x10
_CONTROL: Final = 0x20
_RECORD_BYTES_MIN: Final = 7
"""Bytes of the smallest record: one for each of its fields, of which none holds anything."""

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


_as_header: Final[Callable[[tuple[int, ...]], BatchHeader]] = partial(tuple.__new__, BatchHeader)
"""Equivalent of ``BatchHeader(*fields)`` in a third of the time."""


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
        CorruptDataError: The batch is too short, not magic 2, of another length than it claims, or cannot hold the
            records that it claims.
    """
    size = len(batch)
    if size < HEADER_BYTES:
        raise CorruptDataError(f"{size} bytes are no record batch: its header alone has {HEADER_BYTES}")
    fields = _HEADER.unpack_from(batch)
    count = fields[12]
    if fields[3] != _MAGIC:
        raise CorruptDataError(f"record batch has magic {fields[3]}, not {_MAGIC}")
    if fields[1] + _LENGTH_OVERHEAD != size:
        raise CorruptDataError(f"record batch claims {fields[1] + _LENGTH_OVERHEAD} bytes and has {size}")
    if not 0 <= count <= fields[6] + 1:
        raise CorruptDataError(f"record batch claims {count} records, and last offset delta {fields[6]}")
    if not fields[5] & _COMPRESSION_MASK:
        _check_count(count, size - HEADER_BYTES)
    return _as_header(fields)


def _check_count(count: int, size: int) -> None:
    if count * _RECORD_BYTES_MIN > size:
        raise CorruptDataError(f"record batch claims {count} records in {size} bytes")


class FetchedBatches:
    """Consecutive batches, split and their headers parsed at each iteration; a last one that is cut short is left out.

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
            fields = unpack(view, position)
            length, count = fields[1], fields[12]
            end = position + length + _LENGTH_OVERHEAD
            if end - position < HEADER_BYTES:
                raise CorruptDataError(f"a record batch claims {end - position} bytes, fewer than its header has")
            if end > behind:
                return
            batch = view[position:end]
            room = length - _BEFORE_RECORDS
            if fields[3] != _MAGIC or not 0 <= count <= fields[6] + 1 or count * _RECORD_BYTES_MIN > room:
                parse_header(batch)
            yield _as_header(fields), batch
            position = end


def validate_frame(batch: RawBatch, count: int) -> BatchHeader:
    """Check that a client's batch can be forwarded unchanged; its records are not walked over.

    Args:
        batch: One complete batch, with no bytes after it.
        count: Number of records it must hold, at least 1.

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
    if header.is_compacted:
        raise CorruptDataError(f"a record batch of {header.record_count} records claims more offsets")
    return header


_OF_FRAME: Final = struct.Struct(">8xi4xbIhi30xi")
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
    return _join(batches, ends, bound)


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


def batch_of_one(timestamp: int, key: bytes | None, value: bytes | None, headers: Headers = ()) -> bytes:
    """Return an uncompressed batch of one record, whatever its header names; ``timestamp`` in ms since 1970.

    A large value is copied once; a builder does so several times.
    """
    front = b"".join((b"\0\0\0", encode_field(key), encode_long(-1 if value is None else len(value))))
    back = b"".join((encode_long(len(headers)), *(encode_header(*header) for header in headers)))
    size = encode_long(len(front) + len(value or b"") + len(back))
    parts = size + front, value or b"", back
    return framed(*parts, codec=Compression.NONE, count=1, base_timestamp=timestamp, max_timestamp=timestamp)


def encode_field(content: bytes | None) -> bytes:
    """Encode a key or a value behind its length."""
    return encode_long(-1) if content is None else encode_long(len(content)) + content


def encode_header(name: str, value: bytes | None) -> bytes:
    """Encode a header of a record."""
    return encode_field(name.encode("utf-8", _HOW)) + encode_field(value)


def is_plain(headers: Headers) -> bool:
    """Return whether all header names encode as UTF-8, as :class:`BatchBuilder` requires."""
    try:
        "".join(name for name, _ in headers).encode()
    except UnicodeEncodeError:
        return False
    return True


def framed(*parts: RawBatch, codec: int, count: int, base_timestamp: int, max_timestamp: int) -> bytes:
    """Return a batch around encoded records, with no producer set.

    Args:
        parts: The records in pieces; compressed as one unless ``codec`` is 0.
        codec: Number of the compression codec.
        count: Number of records; their offset deltas run from 0.
        base_timestamp: Base of their timestamp deltas, in ms since 1970.
        max_timestamp: Latest of their timestamps, in ms since 1970.
    """
    tail = _FROM_ATTRIBUTES.pack(codec, count - 1, base_timestamp, max_timestamp, -1, -1, -1, count)
    length = _BEFORE_RECORDS + sum(map(len, parts))
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
    return framed(body, codec=used, count=count, base_timestamp=base_timestamp, max_timestamp=max_timestamp)


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


class ParsedRecord(Protocol):
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

    @property
    def headers(self) -> list[tuple[str, bytes | None]]:
        """Names and values."""


AT_ONCE: Final = 128
"""Records parsed ahead of what is handed out: more would set off a garbage collection each time."""


def read_chunks(
    batch: RawBatch,
    header: BatchHeader | None = None,
    *,
    limit_bytes: int = DECOMPRESSED_BYTES_MAX,
    any_names: bool = True,
    by_ends: bool = False,
) -> Iterator[list[ParsedRecord]]:
    """Walk over the records of a complete batch, :data:`AT_ONCE` at a time; the checksum is not checked.

    Their numbers rise, within the batch, by one each unless compaction has taken records. Brokers check that only of
    compressed batches. A reader that trusted a number could continue anywhere, and skip records of others.

    Args:
        batch: One complete batch, of which a megabyte can hold millions of records.
        header: Its header, if it was parsed before.
        limit_bytes: Limit on the decompressed bytes of its records.
        any_names: False if header names have to be UTF-8, since the records are to be written.
        by_ends: True to trust numbers between two that are right, unless compaction has left gaps. Checking each takes
            50 ns, where parsing takes 100.

    Raises:
        CorruptDataError: While iterating, behind the sound records: one does not parse or is numbered wrong, or they
            are others than the header claims, or exceed ``limit_bytes``.
    """
    if header is None:
        header = parse_header(batch)
    base, last = header.base_offset, header.base_offset + header.last_offset_delta
    done, offset = 0, base
    fault: Exception | None = None
    if header.record_count <= AT_ONCE and (few := read_few(batch, header, limit_bytes=limit_bytes, by_ends=by_ends)):
        yield few
        return
    plain = uncompressed(header, batch, limit_bytes=limit_bytes)
    found: Iterator[ParsedRecord] = chain(DefaultRecordBatch(plain))  # itself, it iterates once from the beginning
    while fault is None:
        chunk: list[ParsedRecord] = []
        try:
            chunk.extend(islice(found, AT_ONCE))  # those before a fault are in it
        except Exception as exc:  # the compiled reader lets errors of any class through
            if any_names and isinstance(exc, UnicodeDecodeError):
                found = islice(_decoded(header, plain), done + len(chunk), None)
            else:
                fault = exc
        else:
            if not chunk:
                return
        if chunk and not _is_numbered(header, chunk, offset, by_ends=by_ends):
            sound = _sound(chunk, offset, last, is_compacted=header.is_compacted)
            if sound < len(chunk):
                where = f"{chunk[sound].offset}, in a batch of offsets {base} to {last}"
                fault = CorruptDataError(f"record {done + sound} is numbered {where}")
                del chunk[sound:]
        if chunk:
            offset = chunk[-1].offset + 1
            done += len(chunk)
            yield chunk
    if isinstance(fault, CorruptDataError):
        raise fault
    raise CorruptDataError(f"record {done} of {header.record_count} does not parse: {fault}") from fault


def read_few(
    batch: RawBatch, header: BatchHeader, *, limit_bytes: int = DECOMPRESSED_BYTES_MAX, by_ends: bool = False
) -> list[ParsedRecord] | None:
    """Return all records of a batch; None if it has a fault, which :func:`read_chunks` names."""
    try:
        plain = uncompressed(header, batch, limit_bytes=limit_bytes) if header.compression else batch
        found: list[ParsedRecord] = list(DefaultRecordBatch(plain))
    except Exception:  # the compiled reader lets errors of any class through
        return None
    return found if found and _is_numbered(header, found, header.base_offset, by_ends=by_ends) else None


def add_values(batch: RawBatch, header: BatchHeader, keys: list[bytes | None], values: list[bytes | None]) -> None:
    """Append keys and values of all records to lists, the fastest way; check only the last number of a full batch.

    Raises:
        CorruptDataError: A record does not parse, and the lists may have grown.
    """
    if header.is_compacted:
        for chunk in read_chunks(batch, header):
            keys += [record.key for record in chunk]
            values += [record.value for record in chunk]
        return
    add_key, add_value = keys.append, values.append
    record: ParsedRecord | None = None
    try:
        for record in DefaultRecordBatch(uncompressed(header, batch) if header.compression else batch):
            add_key(record.key)
            add_value(record.value)
    except Exception as exc:  # the compiled reader lets errors of any class through
        raise CorruptDataError(f"a record of a batch of {header.record_count} does not parse: {exc}") from exc
    if record is None or record.offset != header.base_offset + header.last_offset_delta:
        raise CorruptDataError(f"the last of {header.record_count} records of a batch is not numbered as such")


def _is_numbered(header: BatchHeader, chunk: Sequence[ParsedRecord], offset: int, *, by_ends: bool) -> bool:
    is_compacted = header.record_count <= header.last_offset_delta
    if (by_ends or len(chunk) == 1) and not is_compacted:
        return chunk[0].offset == offset and chunk[-1].offset == offset + len(chunk) - 1
    numbers = [record.offset for record in chunk]
    if is_compacted:
        last = header.base_offset + header.last_offset_delta
        return offset <= numbers[0] and numbers[-1] <= last and all(map(lt, numbers, islice(numbers, 1, None)))
    return numbers == [*range(offset, offset + len(chunk))]


def _sound(chunk: Sequence[ParsedRecord], offset: int, last: int, *, is_compacted: bool) -> int:
    """Return how many of some records are numbered right, the first of which is at least ``offset``."""
    for sound, record in enumerate(chunk):
        if not (offset <= record.offset <= last if is_compacted else record.offset == offset):
            return sound
        offset = record.offset + 1
    return len(chunk)


def read_parsed(
    batch: RawBatch, header: BatchHeader | None = None, *, limit_bytes: int = DECOMPRESSED_BYTES_MAX
) -> Iterator[ParsedRecord]:
    """Iterate over the records of a batch one by one; see :func:`read_chunks`."""
    return chain.from_iterable(read_chunks(batch, header, limit_bytes=limit_bytes))


def read_records(
    batch: RawBatch, header: BatchHeader | None = None, *, limit_bytes: int = DECOMPRESSED_BYTES_MAX
) -> Iterator[LogRecord]:
    """Iterate over the records of a batch as tuples; see :func:`read_chunks`."""
    return map(_as_record, map(_fields, read_parsed(batch, header, limit_bytes=limit_bytes)))


_fields = attrgetter(*LogRecord._fields)
_as_record: Final[Callable[[tuple[object, ...]], LogRecord]] = partial(tuple.__new__, LogRecord)

# Records one by one, in Python.

_HOW: Final = "surrogateescape"
Data = TypeVar("Data", bytes, memoryview)


class EncodedRecord(NamedTuple, Generic[Data]):
    """Record as it is encoded: its fields, and places in the data.

    Attributes:
        start: Place behind its length.
        counted: Place of the number of headers.
        listed: Place of the first header.
        end: Place behind the record.
    """

    moment: int
    delta: int
    key: Data | None
    value: Data | None
    headers: list[tuple[Data, Data | None]]
    start: int
    counted: int
    listed: int
    end: int


def decode_record(data: Data, place: int) -> EncodedRecord[Data]:
    """Decode the record at a place.

    Raises:
        CorruptDataError: It does not parse, or claims more or less than it has.
    """
    try:
        length, start = decode_long(data, place)
        end = start + length
        if not _RECORD_BYTES_MIN - 1 <= length <= len(data) - start:
            raise CorruptDataError(f"a record claims {length} bytes, and {len(data) - start} are there")
        moment, place = decode_long(data, start + 1)  # behind the attributes
        delta, place = decode_long(data, place)
        key, place = _taken(data, place, end)
        value, counted = _taken(data, place, end)
        count, listed = decode_long(data, counted)
        if not 0 <= 2 * count <= end - listed:
            raise CorruptDataError(f"a record claims {count} headers in {end - listed} bytes")
        place = listed
        headers: list[tuple[Data, Data | None]] = []
        for _ in range(count):
            name, place = _taken(data, place, end)
            if name is None:
                raise CorruptDataError("a record has a header without a name")
            content, place = _taken(data, place, end)
            headers.append((name, content))
    except IndexError:
        raise CorruptDataError("a record ends behind its batch") from None
    except InvalidRequestError as fault:
        raise CorruptDataError(f"a record does not parse: {fault}") from None
    if place != end:
        raise CorruptDataError(f"a record of {length} bytes ends at byte {place - start}")
    return EncodedRecord(moment, delta, key, value, headers, start, counted, listed, end)


def _taken(data: Data, place: int, end: int) -> tuple[Data | None, int]:
    """Return the bytes behind their length, None if that is below 0, and the place behind them."""
    size, place = decode_long(data, place)
    if size > end - place:
        raise CorruptDataError(f"a record claims a field of {size} bytes where {end - place} are left")
    return (None, place) if size < 0 else (data[place : place + size], place + size)


def _decoded(header: BatchHeader, plain: RawBatch) -> Iterator[LogRecord]:
    data = bytes(memoryview(plain)[HEADER_BYTES:])
    place = 0
    for _ in range(header.record_count):
        found = decode_record(data, place)
        place = found.end
        timestamp = header.max_timestamp if header.is_append_time else header.base_timestamp + found.moment
        headers = [(name.decode("utf-8", _HOW), content) for name, content in found.headers]
        yield LogRecord(header.base_offset + found.delta, timestamp, found.key, found.value, headers)
    if place != len(data):
        raise CorruptDataError(f"{len(data) - place} bytes are behind the {header.record_count} records of a batch")


def crc32c(data: RawBatch, crc: int = 0) -> int:
    """Return the checksum of bytes behind those that have ``crc``; all but ``bytes`` are copied for the library."""
    return int(extend(crc, data if isinstance(data, bytes) else bytes(data)))


def check_crc(header: BatchHeader, batch: RawBatch) -> None:
    """Check the checksum of a complete batch; raise CorruptDataError if it is wrong."""
    actual = crc32c(memoryview(batch)[_CRC_START:])
    if actual != header.crc:
        raise CorruptDataError(f"record batch has checksum {header.crc:#010x}, its bytes give {actual:#010x}")


_offset_of = attrgetter("offset")


def check_numbering(batch: RawBatch) -> None:
    """Walk over the records of an uncompressed batch that is to be appended; brokers do so for compressed ones.

    Raises:
        CorruptDataError: It is none, or as :func:`read_chunks`, in two thirds of its time.
    """
    header = check_data(batch)
    if header.compression != Compression.NONE:
        return
    base = header.base_offset
    try:
        found = map(eq, map(_offset_of, DefaultRecordBatch(batch)), range(base, base + header.record_count))
        # Up to the end, which is reached once. The loop over some is not interrupted for other threads.
        some = [all(list(islice(found, 10_000))) for _ in range(0, header.record_count + 1, 10_000)]
    except Exception as exc:  # the compiled reader lets errors of any class through
        raise CorruptDataError(f"a record of a batch of {header.record_count} does not parse: {exc}") from exc
    if not all(some):
        raise CorruptDataError(f"the {header.record_count} records of a batch are not numbered one by one")


def uncompressed(header: BatchHeader, batch: RawBatch, *, limit_bytes: int = DECOMPRESSED_BYTES_MAX) -> RawBatch:
    """Return the batch with its records decompressed, to at most ``limit_bytes``; the checksum is not renewed.

    Raises:
        CorruptDataError: The records do not decompress, exceed ``limit_bytes``, or cannot be as many as claimed.
    """
    if header.compression == Compression.NONE:
        return batch
    if header.compression > Compression.ZSTD:
        raise CorruptDataError(f"record batch has unknown compression {header.compression}")
    codec = Compression(header.compression).name.lower()
    records = decompress(codec, memoryview(batch)[HEADER_BYTES:], limit_bytes)
    _check_count(header.record_count, len(records))
    head = bytearray(memoryview(batch)[:HEADER_BYTES])
    struct.pack_into(">i", head, _LENGTH_OFFSET, _BEFORE_RECORDS + len(records))
    struct.pack_into(">h", head, _CRC_START, header.attributes & ~_COMPRESSION_MASK)
    return b"".join((head, records))


RecordBuilder = DefaultRecordBatchBuilder
"""The compiled builder: ``append`` returns None for a record that does not fit, and takes the first one always."""


def new_builder(max_bytes: int, compression: int = Compression.NONE) -> RecordBuilder:
    """Return an empty builder of a batch without a producer, of up to ``max_bytes`` before compression."""
    return RecordBuilder(_MAGIC, compression, 0, -1, -1, -1, max_bytes)


class BatchBuilder:
    """Builder of one batch, record by record, up to ``max_bytes`` before compression. Not thread-safe."""

    def __init__(self, max_bytes: int, compression: Compression = Compression.NONE) -> None:
        self._max_bytes = max_bytes
        self._compression = compression
        self._builder = new_builder(max_bytes, compression)
        self._count = 0

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
        self._builder = new_builder(self._max_bytes, self._compression)
        self._count = 0
        return batch


def record_size_max(key: bytes | None, value: bytes | None, headers: Headers = ()) -> int:
    """Return an upper bound on the bytes of an uncompressed batch that holds only this record."""
    return RecordBuilder.estimate_size_in_bytes(key, value, headers)


def record_size(key: bytes | None, value: bytes | None, headers: Headers) -> int:
    """Return the bytes of key, value and headers, as limits count them."""
    return RecordBuilder.size_of(key, value, headers)


def rebatch(batches: Iterable[RawBatch], max_bytes: int) -> Rebatched:
    """Merge neighbouring small batches into fewer, larger ones; records and their order stay the same.

    A batch is never split, so its records lie side by side in one output batch. A batch that has its output batch to
    itself (because it is large, or its neighbours are) is returned unchanged, whatever its compression.

    Args:
        batches: Complete data batches.
        max_bytes: Limit on a merged batch; a single larger input stays as it is.

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
                merged.batches.append(_join(waiting, ends, waiting_bytes))
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


def _join(batches: Sequence[RawBatch], ends: Sequence[int], bound: int) -> bytes:
    """Merge batches into one; ``ends`` holds the running count of records after each.

    This is a leader's hot loop, so records go from the compiled reader to the compiled builder directly, which numbers
    them again.
    """
    builder = new_builder(bound)
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
