"""Frames: the messages of a transaction buffer.

A frame is one Kafka message. Its key is a fixed header, so that nothing has to be decoded to route or drop the frame.
Its value is a ready-made record batch (DATA) or an Avro record (all others but BUNDLE)::

    key, 44 bytes, big-endian                                                   value
    +-------+-----+------+----------------+------+---------+-------------+---------+--------+   +--------------+
    | magic | ver | kind | transaction id | part | segment | first count | records | epoch  |   | record batch |
    | "RB"  | 1,2 | 1..7 |                |      |         |             |         |        |   | or Avro      |
    +-------+-----+------+----------------+------+---------+-------------+---------+--------+   +--------------+
    0       2     3      4                20     24        28            36        40      44

    kind         1 BEGIN, 2 DATA, 3 COMMIT, 4 ABORT, 5 BUNDLE, 6 EXTEND, 7 SAVEPOINT
    part         of an EXTEND frame of an administrator: the highest number, which no part has
    ver          of all that follows, values too; magic, version, kind and transaction id are there in every version.
                 2 for SAVEPOINT, and a BUNDLE that holds one, which leaders that do not know them must not pass over
    segment      DATA: segment number; BEGIN with which a stream joins late: how many streams there were before; else 0
    first count  DATA: local sequence count of the first record; BEGIN with which an owner continues as another part
                 number: its former one and 1; else 0
    records      DATA: number of records; BUNDLE: number of frames; else 0
    epoch        epoch of the client's session; 0 in a BUNDLE

In a COMMIT frame, and in an ABORT frame that takes a commit back, the three fields from 24 on hold the order among the
commits of the connection, see :mod:`rollbridge.commitlog.commit_order`: its low 31 bits, its high 24 bits and the
number of the commit in 40, and the number of earlier commits that may be in flight.

A small transaction would be three messages or more, and its cost mostly that of the messages. Therefore several frames
of one transaction may travel as a bundle, which means the same as its frames one after the other. The key of a bundle
is a header as above with kind 5, its value the frames in order, each without magic, version and transaction id::

    value of a BUNDLE
    +------+------+---------+-------------+---------+-------+------+----------------+------+------+----
    | kind | part | segment | first count | records | epoch | size | value          | kind | part | ...
    +------+------+---------+-------------+---------+-------+------+----------------+------+------+----
    0      1      5         9             17        21      25     29               29 + size
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache, partial
from struct import Struct
from typing import Final, NamedTuple

import rollbridge_schemas
from rollbridge.base.errors import CorruptDataError, InvalidNameError, InvalidRequestError
from rollbridge.base.ids import COUNT_MAX, PART_MAX, SEGMENT_NUMBER_MAX, TransactionId
from rollbridge.base.mapper import Mapper
from rollbridge.commitlog.commit_order import CommitOrder, order_of
from rollbridge.commitlog.outcomes import RETAIN_DEFAULT
from rollbridge.stream.conditions import CONDITIONS_MAX, KEY_BYTES_MAX, StreamCondition
from rollbridge.stream.group_offsets import (
    METADATA_BYTES_MAX,
    PARTITIONS_MAX,
    GroupOffsets,
    details_to_data,
    metadata_bytes,
    with_details,
)
from rollbridge.stream.names import StreamName, check_client_name

HEADER: Final = Struct(">2sBB16sIIQII")
MAGIC: Final = b"RB"
VERSION: Final = 1
SAVEPOINT_VERSION: Final = 2
"""Of a SAVEPOINT frame and of a BUNDLE that holds one: releases before 0.3.0 refuse the transaction, and say why, where
they would pass over a kind of frame that they do not know."""

LABEL_CHARACTERS_MAX: Final = 1_000
FRAME_BYTES_DEFAULT: Final = 896 * 1024
"""Largest frame that the default limits of brokers and streams allow: more records share the cost of a frame."""
REASON_CHARACTERS_MAX: Final = 1_000
STREAMS_MAX: Final = 1_000
"""Largest number of streams in a transaction. Together with the limits on label and reason this keeps the
transaction's ZooKeeper record far below the limit of 1 MiB, even if a client ignores them."""

_CACHED_BYTES_MAX: Final = 512
"""Largest value that is cached; caches of larger ones could grow to gigabytes."""
_CACHED_VALUES_MAX: Final = 1024
"""Values per cache. 512 bytes can name 128 pieces or 60 streams, which take 40 KB: two caches stay below 80 MB."""

BUFFER_OVERHEAD_BYTES: Final = 4096
"""Bytes by which a buffer topic's message limit exceeds its segments': room for the header and the outer batch."""


class FrameKind(IntEnum):
    """Kind of a frame."""

    BEGIN = 1
    DATA = 2
    COMMIT = 3
    ABORT = 4
    BUNDLE = 5
    EXTEND = 6
    SAVEPOINT = 7


class FrameHeader(NamedTuple):
    """Header of a frame; ``transaction`` is the id's 16 bytes, which serve as a dictionary key."""

    kind: FrameKind
    transaction: bytes
    part: int = 0
    segment: int = 0
    first_count: int = 0
    records: int = 0
    client_epoch: int = 0

    def pack(self) -> bytes:
        """Return the 44 bytes of the header."""
        version = SAVEPOINT_VERSION if self.kind is _SAVEPOINT else VERSION
        return HEADER.pack(MAGIC, version, *self)

    @property
    def order(self) -> CommitOrder | None:
        """Position of an end among the commits of its connection; None if it is not numbered."""
        return order_of(self.segment, self.first_count, self.records, self.client_epoch)


_header: Final[Callable[[tuple[FrameKind, bytes, int, int, int, int, int]], FrameHeader]] = partial(
    tuple.__new__, FrameHeader
)
"""``FrameHeader(*fields)`` in half the time: a leader makes four for each small transaction."""

ANYBODY: Final = PART_MAX
"""Part number in an EXTEND frame of a sender that does not own the transaction; no part has this number."""

_KINDS: Final = {int(kind): kind for kind in FrameKind}
_ENDS: Final = (FrameKind.COMMIT, FrameKind.ABORT)
_BUNDLE: Final = FrameKind.BUNDLE
_SAVEPOINT: Final = FrameKind.SAVEPOINT
_KINDS_OF_VERSION: Final[Mapping[int, Mapping[int, FrameKind]]] = {
    VERSION: {number: kind for number, kind in _KINDS.items() if kind is not _SAVEPOINT},
    SAVEPOINT_VERSION: {int(kind): kind for kind in (_SAVEPOINT, _BUNDLE)},
}
_NO_KINDS: Final[Mapping[int, FrameKind]] = {}


def unpack_header(key: bytes | None) -> FrameHeader | None:
    """Parse the header in a message's key; return None if the message is not a frame of this version."""
    if key is None or len(key) != HEADER.size:
        return None
    magic, version, kind, transaction, part, segment, first_count, records, client_epoch = HEADER.unpack(key)
    known = _KINDS_OF_VERSION.get(version, _NO_KINDS).get(kind)
    if magic != MAGIC or known is None or transaction[2:4] != b"\0\0":
        return None
    if part > PART_MAX or segment > SEGMENT_NUMBER_MAX or (first_count > COUNT_MAX and known not in _ENDS):
        return None
    return _header((known, transaction, part, segment, first_count, records, client_epoch))


def newer_version(key: bytes | None) -> tuple[bytes, int] | None:
    """Return transaction and version of a frame that only a newer release can read; None of any other message.

    The message is no frame that :func:`unpack_header` knows.
    """
    if key is None or len(key) < _TRANSACTION_BYTES.stop or key[:2] != MAGIC or key[2] <= VERSION:
        return None
    return key[_TRANSACTION_BYTES], key[2]


def is_foreign(key: bytes | None, value: bytes | None) -> bool:
    """Return whether a message of a buffer is no frame of any version: no client has written it."""
    return (value is None or unpack_header(key) is None) and newer_version(key) is None


_INNER: Final = Struct(">BIIQIII")
_SIZE: Final = Struct(">I")
_VERSION_AT: Final = 2
_KIND_BYTE: Final = slice(3, 4)
_TRANSACTION_BYTES: Final = slice(4, 20)
_AFTER_TRANSACTION: Final = slice(20, HEADER.size)
BUNDLED_FRAME_BYTES: Final = _INNER.size
"""Bytes that a frame takes in a bundle besides its value."""
BUNDLE_BYTES_MAX: Final = 16 * 1024
"""Size up to which clients bundle frames; the cost per message hardly matters for larger ones."""


def pack_bundle(frames: Sequence[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """Bundle frames of one transaction, each a packed header and a value; return the bundle's header and value."""
    parts: list[bytes] = []
    version = VERSION
    for key, value in frames:
        parts += (key[_KIND_BYTE], key[_AFTER_TRANSACTION], _SIZE.pack(len(value)), value)
        if key[_VERSION_AT] > version:
            version = key[_VERSION_AT]
    head = frames[0][0]
    whole = HEADER.pack(MAGIC, version, FrameKind.BUNDLE, head[_TRANSACTION_BYTES], 0, 0, 0, len(frames), 0)
    return whole, b"".join(parts)


def unpack_bundle(header: FrameHeader, value: bytes) -> list[tuple[FrameHeader, int, bytes]]:
    """Split a bundle into its frames.

    Returns:
        Header of each frame, the offset of its value in the bundle's value, and its value.

    Raises:
        CorruptDataError: The bundle is malformed; none of its frames can be trusted.
    """
    frames: list[tuple[FrameHeader, int, bytes]] = []
    end = 0
    whole = len(value)
    transaction = header.transaction
    for _ in range(header.records):
        start = end + BUNDLED_FRAME_BYTES
        if start > whole:
            raise CorruptDataError(f"a bundle of {header.records} frames ends after {len(frames)}")
        kind, part, segment, first_count, records, client_epoch, size = _INNER.unpack_from(value, end)
        end = start + size
        known = _KINDS.get(kind)
        if known is None or known is _BUNDLE or end > whole:
            raise CorruptDataError(f"frame {len(frames)} of a bundle is of kind {kind} and {size} bytes long")
        if part > PART_MAX or segment > SEGMENT_NUMBER_MAX or (first_count > COUNT_MAX and known not in _ENDS):
            raise CorruptDataError(f"frame {len(frames)} of a bundle has an impossible header")
        inner = _header((known, transaction, part, segment, first_count, records, client_epoch))
        frames.append((inner, start, value[start:end]))
    if end != whole or not frames:
        raise CorruptDataError(f"a bundle of {header.records} frames and {whole} bytes ends at {end}")
    return frames


@dataclass(frozen=True, slots=True)
class BeginFrame:
    """Value of a BEGIN frame; ``streams`` maps ``scope/stream`` to its reference epoch, in order."""

    client_name: str
    client_epoch: int
    label: str | None
    lease_ms: int
    streams: Mapping[str, int]
    retain_ms: int = RETAIN_DEFAULT
    places: Mapping[str, int] = field(init=False)
    epochs: tuple[tuple[str, int], ...] = field(init=False)
    """Items of ``streams``, for lookups by place."""
    home: str = field(init=False, compare=False, repr=False)
    """Stream whose buffer receives the request to end the transaction."""
    text_bytes: int = field(init=False, compare=False, repr=False)
    """Memory of its texts in bytes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", {name: place for place, name in enumerate(self.streams)})
        object.__setattr__(self, "epochs", tuple(self.streams.items()))
        object.__setattr__(self, "home", next(iter(self.streams), ""))
        texts = (*self.streams, self.client_name, self.label or "")
        object.__setattr__(self, "text_bytes", sum(map(sys.getsizeof, texts)))

    def is_of(self, other: BeginFrame) -> bool:
        """Return whether both are of one session, as all BEGIN frames of a transaction's owner are."""
        return (self.client_name, self.client_epoch) == (other.client_name, other.client_epoch)

    def encode(self) -> bytes:
        """Return the frame's value in Avro binary."""
        return rollbridge_schemas.codec(_BEGINS.schema).encode(_BEGINS.to_datum(self))


_BEGINS: Final = Mapper(BeginFrame, "begin_frame")


def decode_begin(value: bytes) -> BeginFrame:
    """Decode a BEGIN frame's value, from a cache if it is small: transactions of one client mostly carry the same one.

    Raises:
        CorruptDataError: The value does not decode, has no streams, names a stream twice, or breaks a limit on
            clients: an invalid name, a label that is too long, too many streams.
    """
    return _cached_begin(value) if len(value) <= _CACHED_BYTES_MAX else _begin(value)


def _begin(value: bytes) -> BeginFrame:
    datum = decode_value("begin_frame", value)
    if not datum["streams"]:
        raise CorruptDataError("a BEGIN frame names no stream")
    begin = _BEGINS.of_datum({**datum, "retain_ms": max(datum["retain_ms"], RETAIN_DEFAULT)})
    if len(begin.streams) < len(datum["streams"]) or min(begin.streams.values()) < 0:
        raise CorruptDataError("a BEGIN frame names a stream twice or with a negative epoch")
    if len(begin.streams) > STREAMS_MAX or len(begin.label or "") > LABEL_CHARACTERS_MAX:
        raise CorruptDataError(f"a BEGIN frame has {len(begin.streams)} streams or too long a label")
    try:
        check_client_name(begin.client_name)
        for name in begin.streams:
            StreamName.parse(name)
    except InvalidNameError as fault:
        raise CorruptDataError(f"a BEGIN frame holds an invalid name: {fault}") from fault
    return begin


_cached_begin = lru_cache(maxsize=_CACHED_VALUES_MAX)(_begin)


_OFFSETS: Final = Mapper(GroupOffsets, "commit_frame.offsets")
_CONDITIONS: Final = Mapper(StreamCondition, "commit_frame.conditions")


class PieceKey(NamedTuple):
    """Key of a piece: what one part wrote for one segment of one stream (by its place in the BEGIN frame)."""

    part: int
    stream: int
    segment: int


piece_key: Final[Callable[[tuple[int, int, int]], PieceKey]] = partial(tuple.__new__, PieceKey)
"""``PieceKey(*fields)`` in half the time."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Value of a COMMIT frame: the number of records of each piece. Exactly these are merged."""

    pieces: Mapping[PieceKey, int]
    offsets: tuple[GroupOffsets, ...] = ()
    """Consumer group offsets to commit with the transaction."""
    conditions: tuple[StreamCondition, ...] = ()
    """Conditions that must hold where the transaction is merged."""

    @property
    def records(self) -> int:
        """Number of records of the whole transaction."""
        return sum(self.pieces.values())

    def encode(self) -> bytes:
        """Return the frame's value in Avro binary."""
        return rollbridge_schemas.codec("commit_frame").encode(self.to_datum())

    def to_datum(self) -> rollbridge_schemas.Datum:
        """Return its fields in the form of the record."""
        return {
            "entries": [
                {"part": key.part, "stream": key.stream, "segment": key.segment, "records": records}
                for key, records in self.pieces.items()
            ],
            "offsets": list(map(_OFFSETS.to_datum, self.offsets)),
            "conditions": list(map(_CONDITIONS.to_datum, self.conditions)),
            "details": details_to_data(self.offsets) if self.offsets else [],
        }

    def names_beyond(self, streams: int) -> bool:
        """Return True if it names a stream at a place of ``streams`` or more."""
        return any(key.stream >= streams for key in self.pieces) or any(
            item.stream >= streams for item in self.conditions
        )


def decode_manifest(value: bytes) -> Manifest:
    """Decode a COMMIT frame's value.

    Raises:
        CorruptDataError: The value does not decode, names a piece twice, has a negative number in one or a count that
            is not positive, or holds invalid offsets or conditions, or too many of them.
    """
    return _cached_manifest(value) if len(value) <= _CACHED_BYTES_MAX else _manifest(value)


def _manifest(value: bytes) -> Manifest:
    return manifest_of(decode_value("commit_frame", value), "COMMIT")


def manifest_of(datum: rollbridge_schemas.Datum, kind: str) -> Manifest:
    """Return the manifest in the fields of a frame of a kind; raise as :func:`decode_manifest` does."""
    pieces: dict[PieceKey, int] = {}
    for entry in datum["entries"]:
        key = PieceKey(entry["part"], entry["stream"], entry["segment"])
        if key in pieces or entry["records"] <= 0 or min(key) < 0:
            raise CorruptDataError(f"a {kind} frame names {key} twice, below 0 or with {entry['records']} records")
        pieces[key] = entry["records"]
    try:
        offsets = tuple(map(_OFFSETS.of_datum, datum["offsets"]))
        if datum["details"]:
            offsets = tuple(with_details(offsets, datum["offsets"], datum["details"]))
        conditions = tuple(map(_CONDITIONS.of_datum, datum["conditions"]))
    except InvalidRequestError as fault:
        raise CorruptDataError(f"a {kind} frame holds impossible offsets or conditions: {fault}") from fault
    check_named(offsets, conditions, kind)
    return Manifest(pieces, offsets, conditions)


def check_named(offsets: Collection[GroupOffsets], conditions: Sequence[StreamCondition], kind: str) -> None:
    """Raise CorruptDataError if a frame of a kind names more than its pieces allow, or a stream below 0."""
    if sum(len(item.offsets) for item in offsets) > PARTITIONS_MAX or len(conditions) > CONDITIONS_MAX:
        raise CorruptDataError(
            f"a {kind} frame holds more than {PARTITIONS_MAX} offsets or {CONDITIONS_MAX} conditions"
        )
    if metadata_bytes(offsets) > METADATA_BYTES_MAX:
        raise CorruptDataError(f"a {kind} frame holds offsets with more than {METADATA_BYTES_MAX} bytes of metadata")
    if sum(len(item.condition.key or b"") for item in conditions) > KEY_BYTES_MAX:
        raise CorruptDataError(f"a {kind} frame holds conditions with more than {KEY_BYTES_MAX} bytes of keys")
    if any(item.stream < 0 for item in conditions):
        raise CorruptDataError(f"a {kind} frame holds a condition on a stream below 0")


_cached_manifest = lru_cache(maxsize=_CACHED_VALUES_MAX)(_manifest)


def encode_abort(reason: str) -> bytes:
    return rollbridge_schemas.codec("abort_frame").encode({"reason": reason})


def encode_extend(lease_ms: int) -> bytes:
    return rollbridge_schemas.codec("extend_frame").encode({"lease_ms": lease_ms})


def decode_extend(value: bytes) -> int:
    """Decode how long a transaction may stay open from an EXTEND frame on, ms; 0 at least.

    Raises:
        CorruptDataError: The value does not decode.
    """
    return max(int(decode_value("extend_frame", value)["lease_ms"]), 0)


def decode_abort(value: bytes) -> str:
    """Decode the reason in an ABORT frame's value, at most 1,000 characters of it.

    Raises:
        CorruptDataError: The value does not decode.
    """
    return str(decode_value("abort_frame", value)["reason"])[:REASON_CHARACTERS_MAX]


def decode_value(schema: str, value: bytes) -> rollbridge_schemas.Datum:
    """Decode a frame's value of a schema.

    Raises:
        CorruptDataError: The value does not decode.
    """
    try:
        return rollbridge_schemas.codec(schema).decode(value)
    except rollbridge_schemas.SchemaError as fault:
        raise CorruptDataError(str(fault)) from fault


def buffer_partition(transaction: TransactionId, partitions: int) -> int:
    """Return the partition that holds all of a transaction's frames, in every buffer of ``partitions`` partitions."""
    return transaction.counter % partitions
