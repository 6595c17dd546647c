"""Frames: the messages of a transaction buffer.

A frame's Kafka key is a fixed header, so that nothing has to be decoded to route or drop it; its value is a ready-made
Kafka record batch (DATA) or an Avro record (BEGIN, COMMIT, ABORT).

======  =====  ============================================================
offset  bytes  field of the header (big-endian)
======  =====  ============================================================
0       2      magic ``RB``
2       1      version, 1
3       1      kind: 1 BEGIN, 2 DATA, 3 COMMIT, 4 ABORT, 5 BUNDLE
4       16     transaction id
20      4      part
24      4      segment number (DATA), else 0
28      8      local sequence count of the first record (DATA), else 0
36      4      number of records (DATA) or of frames (BUNDLE), else 0
40      4      epoch of the client's session
======  =====  ============================================================

In a COMMIT frame, and in an ABORT frame that takes a commit back, the three fields from 24 on hold the order among the
commits of the connection, see :mod:`rollbridge.model.commit_order`: its low 31 bits, its high 24 bits and the number of
the commit in 40, and how many numbers before it may be under way.

A small transaction would be three messages or more, and cost mostly what messages cost. Therefore several frames of
one transaction may travel as one: a BUNDLE's value is these frames in their order, each as the header's fields from
the kind on without the transaction, the length of its value in four bytes, and its value. A bundle means what its
frames mean one after the other.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple

import rollbridge_schemas
from rollbridge.model.commit_order import CommitOrder, order_of
from rollbridge.model.conditions import CONDITIONS_MAX, KEY_BYTES_MAX, StreamCondition
from rollbridge.model.errors import CorruptDataError, InvalidNameError, InvalidRequestError
from rollbridge.model.group_offsets import PARTITIONS_MAX, GroupOffsets
from rollbridge.model.ids import COUNT_MAX, PART_MAX, SEGMENT_NUMBER_MAX, TransactionId
from rollbridge.model.mapper import Mapper
from rollbridge.model.names import StreamName, check_client_name
from rollbridge.model.outcomes import RETAIN_DEFAULT

HEADER: Final = Struct(">2sBB16sIIQII")
MAGIC: Final = b"RB"
VERSION: Final = 1

LABEL_CHARACTERS_MAX: Final = 1_000
FRAME_BYTES_DEFAULT: Final = 896 * 1024
"""As large as the default limits of brokers and streams allow: what a frame costs is shared by more records."""
REASON_CHARACTERS_MAX: Final = 1_000
STREAMS_MAX: Final = 1_000
"""Most streams of a transaction. These three keep its ZooKeeper record far below ZooKeeper's limit of 1 MiB, also where
a client does not keep to them."""

_CACHED_BYTES_MAX: Final = 512
"""Larger values are decoded each time: with them the caches could grow to gigabytes."""
_CACHED_VALUES_MAX: Final = 1024
"""A value of so many bytes can name 128 pieces, or 60 streams, which take 40 KB: two caches stay below 80 MB."""

BUFFER_OVERHEAD_BYTES: Final = 4096
"""How much larger a buffer topic's message limit is than its segments': room for the header and the outer batch."""


class FrameKind(IntEnum):
    """What a frame is."""

    BEGIN = 1
    DATA = 2
    COMMIT = 3
    ABORT = 4
    BUNDLE = 5


class FrameHeader(NamedTuple):
    """The header of a frame; ``transaction`` is the id's 16 bytes, because they serve as a dictionary key."""

    kind: FrameKind
    transaction: bytes
    part: int = 0
    segment: int = 0
    first_count: int = 0
    records: int = 0
    client_epoch: int = 0

    def pack(self) -> bytes:
        """The 44 bytes of the header."""
        return HEADER.pack(MAGIC, VERSION, *self)

    @property
    def order(self) -> CommitOrder | None:
        """Where an end stands among the commits of its connection; None if it is not numbered."""
        return order_of(self.segment, self.first_count, self.records, self.client_epoch)


_KINDS: Final = {int(kind): kind for kind in FrameKind}
_ENDS: Final = (FrameKind.COMMIT, FrameKind.ABORT)


def unpack_header(key: bytes | None) -> FrameHeader | None:
    """The header in a message's key, or None if the message is not a frame of this version."""
    if key is None or len(key) != HEADER.size:
        return None
    magic, version, kind, transaction, part, segment, first_count, records, client_epoch = HEADER.unpack(key)
    known = _KINDS.get(kind)
    if magic != MAGIC or version != VERSION or known is None or transaction[2:4] != b"\0\0":
        return None
    if part > PART_MAX or segment > SEGMENT_NUMBER_MAX or (first_count > COUNT_MAX and known not in _ENDS):
        return None
    return FrameHeader(known, transaction, part, segment, first_count, records, client_epoch)


_INNER: Final = Struct(">BIIQIII")
_SIZE: Final = Struct(">I")
_KIND_BYTE: Final = slice(3, 4)
_TRANSACTION_BYTES: Final = slice(4, 20)
_AFTER_TRANSACTION: Final = slice(20, HEADER.size)
BUNDLED_FRAME_BYTES: Final = _INNER.size
"""What a frame takes in a bundle besides its value."""
BUNDLE_BYTES_MAX: Final = 16 * 1024
"""Clients bundle frames up to this; larger ones cost little enough by themselves."""


def pack_bundle(frames: Sequence[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """Several frames of one transaction, each as packed header and value, as one: its header and value."""
    parts: list[bytes] = []
    for key, value in frames:
        parts += (key[_KIND_BYTE], key[_AFTER_TRANSACTION], _SIZE.pack(len(value)), value)
    head = frames[0][0]
    whole = HEADER.pack(MAGIC, VERSION, FrameKind.BUNDLE, head[_TRANSACTION_BYTES], 0, 0, 0, len(frames), 0)
    return whole, b"".join(parts)


def unpack_bundle(header: FrameHeader, value: bytes) -> list[tuple[FrameHeader, int, bytes]]:
    """The frames of a bundle: header, where its value begins in the bundle's, and the value.

    Raises:
        CorruptDataError: it is not made as it should be; none of its frames can be trusted.
    """
    frames: list[tuple[FrameHeader, int, bytes]] = []
    end = 0
    whole = len(value)
    for _ in range(header.records):
        start = end + BUNDLED_FRAME_BYTES
        if start > whole:
            raise CorruptDataError(f"a bundle of {header.records} frames ends after {len(frames)}")
        kind, part, segment, first_count, records, client_epoch, size = _INNER.unpack_from(value, end)
        end = start + size
        known = _KINDS.get(kind)
        if known is None or known is FrameKind.BUNDLE or end > whole:
            raise CorruptDataError(f"frame {len(frames)} of a bundle is of kind {kind} and {size} bytes long")
        if part > PART_MAX or segment > SEGMENT_NUMBER_MAX or (first_count > COUNT_MAX and known not in _ENDS):
            raise CorruptDataError(f"frame {len(frames)} of a bundle has an impossible header")
        inner = FrameHeader(known, header.transaction, part, segment, first_count, records, client_epoch)
        frames.append((inner, start, value[start:end]))
    if end != whole or not frames:
        raise CorruptDataError(f"a bundle of {header.records} frames and {whole} bytes ends at {end}")
    return frames


@dataclass(frozen=True, slots=True)
class BeginFrame:
    """The value of a BEGIN frame; ``streams`` maps ``scope/stream`` to its reference epoch, in order."""

    client_name: str
    client_epoch: int
    label: str | None
    lease_ms: int
    streams: Mapping[str, int]
    retain_ms: int = RETAIN_DEFAULT
    places: Mapping[str, int] = field(init=False)
    epochs: tuple[tuple[str, int], ...] = field(init=False)
    """The same as ``streams``, to be looked up by place."""
    text_bytes: int = field(init=False, compare=False, repr=False)
    """Memory that its texts take."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", {name: place for place, name in enumerate(self.streams)})
        object.__setattr__(self, "epochs", tuple(self.streams.items()))
        texts = (*self.streams, self.client_name, self.label or "")
        object.__setattr__(self, "text_bytes", sum(map(sys.getsizeof, texts)))

    @property
    def home(self) -> str:
        """The stream in whose buffer the end is asked for."""
        return next(iter(self.streams))

    def encode(self) -> bytes:
        """Avro binary."""
        return rollbridge_schemas.codec(_BEGINS.schema).encode(_BEGINS.to_datum(self))


_BEGINS: Final = Mapper(BeginFrame, "begin_frame")


def decode_begin(value: bytes) -> BeginFrame:
    """Decode a BEGIN frame's value. Transactions of one client mostly carry the same bytes, hence the cache.

    Raises:
        CorruptDataError: not such a value, one without streams, one that names a stream twice, or one that holds what
            no client may send: a name that is none, a label that is too long, too many streams.
    """
    return _cached_begin(value) if len(value) <= _CACHED_BYTES_MAX else _begin(value)


def _begin(value: bytes) -> BeginFrame:
    datum = _decode("begin_frame", value)
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
        raise CorruptDataError(f"a BEGIN frame holds a name that is none: {fault}") from fault
    return begin


_cached_begin = lru_cache(maxsize=_CACHED_VALUES_MAX)(_begin)


_OFFSETS: Final = Mapper(GroupOffsets, "commit_frame.offsets")
_CONDITIONS: Final = Mapper(StreamCondition, "commit_frame.conditions")


class PieceKey(NamedTuple):
    """Names what one part wrote for one segment of one stream (by its place in the BEGIN frame)."""

    part: int
    stream: int
    segment: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The value of a COMMIT frame: how many records of each piece the transaction contains. Exactly this is merged."""

    pieces: Mapping[PieceKey, int]
    offsets: tuple[GroupOffsets, ...] = ()
    """Consumer group offsets that are committed with it."""
    conditions: tuple[StreamCondition, ...] = ()
    """What must hold where it is merged."""

    @property
    def records(self) -> int:
        """Number of records of the whole transaction."""
        return sum(self.pieces.values())

    def encode(self) -> bytes:
        """Avro binary."""
        return rollbridge_schemas.codec("commit_frame").encode(
            {
                "entries": [
                    {"part": key.part, "stream": key.stream, "segment": key.segment, "records": records}
                    for key, records in self.pieces.items()
                ],
                "offsets": list(map(_OFFSETS.to_datum, self.offsets)),
                "conditions": list(map(_CONDITIONS.to_datum, self.conditions)),
            }
        )


def decode_manifest(value: bytes) -> Manifest:
    """Decode a COMMIT frame's value.

    Raises:
        CorruptDataError: not such a value, a piece named twice, a negative number in one, a count not positive, or
            offsets or conditions that there can not be.
    """
    return _cached_manifest(value) if len(value) <= _CACHED_BYTES_MAX else _manifest(value)


def _manifest(value: bytes) -> Manifest:
    pieces: dict[PieceKey, int] = {}
    datum = _decode("commit_frame", value)
    for entry in datum["entries"]:
        key = PieceKey(entry["part"], entry["stream"], entry["segment"])
        if key in pieces or entry["records"] <= 0 or min(key) < 0:
            raise CorruptDataError(f"a COMMIT frame names {key} twice, below 0 or with {entry['records']} records")
        pieces[key] = entry["records"]
    try:
        offsets = tuple(map(_OFFSETS.of_datum, datum["offsets"]))
        conditions = tuple(map(_CONDITIONS.of_datum, datum["conditions"]))
    except InvalidRequestError as fault:
        raise CorruptDataError(f"a COMMIT frame holds offsets or conditions that there can not be: {fault}") from fault
    if sum(len(item.offsets) for item in offsets) > PARTITIONS_MAX or len(conditions) > CONDITIONS_MAX:
        raise CorruptDataError(
            f"a COMMIT frame holds more than {PARTITIONS_MAX} offsets or {CONDITIONS_MAX} conditions"
        )
    if sum(len(item.condition.key or b"") for item in conditions) > KEY_BYTES_MAX:
        raise CorruptDataError(f"a COMMIT frame holds conditions with more than {KEY_BYTES_MAX} bytes of keys")
    if any(item.stream < 0 for item in conditions):
        raise CorruptDataError("a COMMIT frame holds a condition on a stream below 0")
    return Manifest(pieces, offsets, conditions)


_cached_manifest = lru_cache(maxsize=_CACHED_VALUES_MAX)(_manifest)


def encode_abort(reason: str) -> bytes:
    """The value of an ABORT frame."""
    return rollbridge_schemas.codec("abort_frame").encode({"reason": reason})


def decode_abort(value: bytes) -> str:
    """The reason in an ABORT frame's value, at most 1,000 characters of it.

    Raises:
        CorruptDataError: not such a value.
    """
    return str(_decode("abort_frame", value)["reason"])[:REASON_CHARACTERS_MAX]


def _decode(schema: str, value: bytes) -> rollbridge_schemas.Datum:
    try:
        return rollbridge_schemas.codec(schema).decode(value)
    except rollbridge_schemas.SchemaError as fault:
        raise CorruptDataError(str(fault)) from fault


def buffer_partition(transaction: TransactionId, partitions: int) -> int:
    """The partition of every buffer of ``partitions`` partitions that holds a transaction's frames, all of them."""
    return transaction.counter % partitions
