"""Control records: the entries of a group's commit log, one COMMIT or ABORT for every transaction, in commit order.

A COMMIT record lists where its records went, as runs of consecutive offsets, so that clients resolve their futures, and
auditors their counts, from the commit log alone. Its key is the transaction id's 16 bytes; its value is the version
(:mod:`rollbridge.base.mapper`) and Avro binary, each field a zigzag varint or a text behind its length::

    +---------+------+--------+-------------+-------+---------+-------+-------+---------+------------------+
    | version | kind | reason | client name | label | records | bytes | begun | decided | controller epoch |
    +---------+------+--------+-------------+-------+---------+-------+-------+---------+------------------+
    0         1      2
    +----------------+---------+-------+----------+
    | streams        | refused | order | prepared |
    +----------------+---------+-------+----------+

    streams   array of  stream, segments    ("scope/stream"; empty in an ABORT)
    segments  array of  segment id, runs
    runs      array of  part, base offset, count
    prepared  array of  stream, segment id, number to which the transaction wrote
    array     a number n and n items, or nothing if empty; then 0
    label, refused, order   0 for null, or 1 and the value

``kind`` and ``reason`` come first so that :func:`peek_kind` and :func:`has_reason` read one byte each. The kind is
there in every version, so it can be read from records of unknown versions. Begun and decided are ms since 1970.

Source: DistributedLog transactions, "commit log stream" and begin/commit/abort control records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import rollbridge_schemas
from rollbridge.base.avro import encode_long, encode_string, encode_text
from rollbridge.base.errors import CorruptDataError, InvalidRequestError
from rollbridge.base.ids import OWNER_PART, PART_MAX, SegmentId, TransactionId
from rollbridge.base.mapper import FRONT, Mapper, content_of, is_version
from rollbridge.commitlog.commit_order import LineKey
from rollbridge.stream.conditions import RefusedCondition

EXPIRED = "expired"
"""Reason of an ABORT record whose transaction outlived its lease."""
FENCED = "fenced: a newer session of its client has begun"
"""Reason of an ABORT record whose transaction was begun by a session that a newer one had fenced."""
OVERTAKEN = "out of order: its connection had given this commit up, and asked for later ones"
"""Reason of an ABORT record whose commit arrived after its connection had given it up."""
FORSAKEN = "out of order: an earlier commit of its connection never arrived"
"""Reason of an ABORT record whose commit waited in vain for an earlier one."""
_RESUMED: Final = "resumed as part "

CONTROL_RECORD_BYTES_MAX: Final = 16 * 1024 * 1024
"""``max.message.bytes`` of a commit log: a record batch that holds one record, headers of both included."""
_HEAD_BYTES: Final = 1024 * 1024
"""Upper bound on a record without its placement, with the names of all its streams, and those of prepared segments."""
_SEGMENT_BYTES: Final = 16
"""Upper bound on a segment: its id and the counts of its runs."""
_RUN_BYTES: Final = 19
"""Upper bound on a run: a part has 23 bits, an offset 63, the records of a frame 32."""


def bytes_of_record(frames: int, pieces: int) -> int:
    """Return an upper bound on the bytes of a transaction's COMMIT record in the commit log.

    Each frame may become a run of its own, since plain writers, and frames of other parts, may write in between.

    Args:
        frames: Number of its frames.
        pieces: Number of its pieces, which is at least that of its segments.
    """
    return _HEAD_BYTES + frames * _RUN_BYTES + pieces * _SEGMENT_BYTES


FRAMES_HARMLESS: Final = (CONTROL_RECORD_BYTES_MAX - _HEAD_BYTES) // (_RUN_BYTES + _SEGMENT_BYTES)
"""Number of frames that always fit, whatever their pieces: about 449,000."""


def is_too_scattered(frames: int, pieces: int) -> bool:
    """Return whether the COMMIT record of a transaction might be too large for the commit log."""
    return frames > FRAMES_HARMLESS and bytes_of_record(frames, pieces) > CONTROL_RECORD_BYTES_MAX


def scattered_reason(frames: int) -> str:
    """Return the reason of an ABORT record whose transaction has too many frames."""
    return (
        f"it has {frames} frames, and a commit record of more than {CONTROL_RECORD_BYTES_MAX} bytes would have to list "
        "them; write more at once, or less in one transaction"
    )


def long_lease_reason(asked_ms: int, allowed_ms: int) -> str:
    """Return the reason of an ABORT record whose transaction asked for a longer lease than its leader grants."""
    asked, allowed = (_duration(ms) for ms in (asked_ms, allowed_ms))
    return f"it asked for a lease of {asked}; the coordinators' limit, lease_ms_max, is {allowed}"


def _duration(ms: int) -> str:
    """Format a duration of any size that a frame may hold, also beyond the range of ``timedelta``."""
    try:
        return str(timedelta(milliseconds=ms))
    except OverflowError:
        return f"{ms} ms"


def resumed_reason(part: int) -> str:
    """Return the reason of a COMMIT record: the part that asked for it if the transaction was resumed, else empty."""
    return "" if part == OWNER_PART else f"{_RESUMED}{part}"


def owner_of(reason: str) -> int:
    """Return the part that :func:`resumed_reason` put into a reason; ``OWNER_PART`` if there is none."""
    number = reason.removeprefix(_RESUMED)
    is_part = number.isascii() and number.isdigit() and len(number) <= len(str(PART_MAX))
    return int(number) if is_part else OWNER_PART


class ControlKind(StrEnum):
    """Kind of a control record."""

    BEGIN = "BEGIN"
    COMMIT = "COMMIT"
    ABORT = "ABORT"


class Run(NamedTuple):
    """Records of one part at consecutive offsets of a segment."""

    part: int
    base_offset: int
    count: int  # type: ignore[assignment]  # replaces a tuple's method, which runs do not need


_run: Final[Callable[[tuple[int, int, int]], Run]] = partial(tuple.__new__, Run)
"""``Run(*fields)`` in half the time."""

Placement = Mapping[str, Mapping[SegmentId, Sequence[Run]]]
"""Placement of a transaction's records: scope/stream → segment → runs in order of offset."""

NOWHERE: Final[Placement] = {}
"""Placement of a transaction without records."""
UNPREPARED: Final[Mapping[str, Mapping[SegmentId, int]]] = {}
"""Numbers of prepared segments of a transaction that has none."""


class ControlRecord(NamedTuple):
    """One record of a commit log."""

    transaction: TransactionId
    kind: ControlKind
    client_name: str
    begun_ms: int
    decided_ms: int
    controller_epoch: int
    label: str | None = None
    reason: str = ""
    records: int = 0
    size_bytes: int = 0
    placement: Placement = NOWHERE
    refused: RefusedCondition | None = None
    order: tuple[LineKey, int] | None = None
    """Connection of a commit and its number there; None if it was not numbered."""
    prepared: Mapping[str, Mapping[SegmentId, int]] = UNPREPARED
    """Numbers of the segments to which the transaction wrote, where they are not those of ``placement``."""

    def encode_value(self) -> bytes:
        """Return the record's value in Avro binary; its Kafka key is the transaction id's 16 bytes.

        Encoded by hand, in the order of the schema's fields, because a leader writes one for every transaction.
        """
        parts = [
            FRONT,
            _head(self.kind, self.reason, self.client_name, self.label),
            encode_long(self.records),
            encode_long(self.size_bytes),
            _moments(self.begun_ms, self.decided_ms, self.controller_epoch),
        ]
        if self.placement:
            parts.append(encode_long(len(self.placement)))
            for stream, segments in self.placement.items():
                parts.append(encode_text(stream))
                _add_segments(parts, segments)
        parts.append(_END)
        parts.append(_NULL if self.refused is None else _PRESENT + _refused(self.refused))
        if self.order is None:
            parts.append(_NULL)
        else:
            line, number = self.order
            parts += (_line(line), encode_long(number))
        if self.prepared:
            _add_prepared(parts, self.prepared)
        parts.append(_END)
        return b"".join(parts)

    def counts(self) -> dict[str, int]:
        """Return the number of records in each stream."""
        found: dict[str, int] = {}
        for stream, _, runs in self.segments():
            found[stream] = found.get(stream, 0) + sum(run.count for run in runs)
        return found

    def written_number(self, stream: str, segment: SegmentId) -> int:
        """Return the number of the segment to which the transaction wrote the records now in ``segment``."""
        return self.prepared.get(stream, {}).get(segment, segment.number)

    def segments(self) -> Iterator[tuple[str, SegmentId, Sequence[Run]]]:
        """Iterate over the streams and segments that hold records, with their runs."""
        for stream, segments in self.placement.items():
            for segment, runs in segments.items():
                yield stream, segment, runs


_REFUSED: Final = Mapper(RefusedCondition, "control_record.refused")


def decode_control(key: bytes | None, value: bytes | None) -> ControlRecord:
    """Decode the control record in a message of a commit log.

    Raises:
        NewerFormatError: It is of a version that is not known here.
        CorruptDataError: The message is not a control record.
    """
    content = content_of(f"the control record of transaction {(key or b'').hex()}", value or b"")
    try:
        datum = rollbridge_schemas.codec("control_record").decode(content)
        return ControlRecord(
            transaction=TransactionId.from_bytes(key or b""),
            kind=ControlKind(datum["kind"]),
            client_name=datum["client_name"],
            begun_ms=datum["begun_ms"],
            decided_ms=datum["decided_ms"],
            controller_epoch=datum["controller_epoch"],
            label=datum["label"],
            reason=datum["reason"],
            records=datum["records"],
            size_bytes=datum["bytes"],
            placement={
                item["stream"]: {
                    SegmentId.from_int(segment["segment"]): [
                        Run(run["part"], run["base_offset"], run["count"]) for run in segment["runs"]
                    ]
                    for segment in item["segments"]
                }
                for item in datum["streams"]
            },
            refused=None if datum["refused"] is None else _REFUSED.of_datum(datum["refused"]),
            order=None if datum["order"] is None else _order(datum["order"]),
            prepared=_prepared(datum["prepared"]),
        )
    except (rollbridge_schemas.SchemaError, InvalidRequestError) as fault:
        raise CorruptDataError(f"a message of the commit log is not a control record: {fault}") from fault


def _order(datum: Mapping[str, int]) -> tuple[LineKey, int]:
    return (datum["connection"], datum["epoch"]), datum["number"]


def _prepared(items: Sequence[Mapping[str, Any]]) -> dict[str, dict[SegmentId, int]]:
    found: dict[str, dict[SegmentId, int]] = {}
    for item in items:
        found.setdefault(item["stream"], {})[SegmentId.from_int(item["segment"])] = item["number"]
    return found


_KINDS: Final = tuple(ControlKind)
_END: Final = encode_long(0)
"""End of an array."""
_NULL, _PRESENT = encode_long(0), encode_long(1)
"""Branches of a nullable value."""


@lru_cache(maxsize=1024)
def _head(kind: ControlKind, reason: str, client_name: str, label: str | None) -> bytes:
    return b"".join(
        (
            encode_long(_KINDS.index(kind)),
            encode_text(reason),
            encode_text(client_name),
            _NULL if label is None else _PRESENT + encode_text(label),
        )
    )


@lru_cache(maxsize=1024)
def _moments(begun_ms: int, decided_ms: int, controller_epoch: int) -> bytes:
    return encode_long(begun_ms) + encode_long(decided_ms) + encode_long(controller_epoch)


def _refused(refused: RefusedCondition) -> bytes:
    datum = _REFUSED.to_datum(refused)
    return b"".join(
        (
            encode_string(datum["stream"]),
            _NULL if datum["key"] is None else _PRESENT + encode_string(datum["key"]),
            encode_string(datum["expected"]),
            encode_string(datum["actual"]),
        )
    )


@lru_cache(maxsize=1024)
def _line(line: LineKey) -> bytes:
    connection, epoch = line
    return _PRESENT + encode_long(connection) + encode_long(epoch)


def _add_segments(parts: list[bytes], segments: Mapping[SegmentId, Sequence[Run]]) -> None:
    if segments:
        parts.append(encode_long(len(segments)))
        for segment, runs in segments.items():
            parts.append(encode_long(segment.epoch << 32 | segment.number))
            if runs:
                parts.append(encode_long(len(runs)))
                for part, base_offset, count in runs:
                    parts += (encode_long(part), encode_long(base_offset), encode_long(count))
            parts.append(_END)
    parts.append(_END)


def _add_prepared(parts: list[bytes], prepared: Mapping[str, Mapping[SegmentId, int]]) -> None:
    parts.append(encode_long(sum(map(len, prepared.values()))))
    for stream, numbers in prepared.items():
        for segment, number in numbers.items():
            parts += (encode_text(stream), encode_long(int(segment)), encode_long(number))


def peek_kind(value: bytes | None) -> ControlKind | None:
    """Return the kind of a control record from its first bytes, without decoding the rest; None if it is not a record.

    The kind is the schema's first field, behind the version; Avro writes an enum as the zigzag number of its symbol.
    """
    if not value:
        return None
    first = value[0]
    if is_version(first):
        if len(value) == 1:
            return None
        first = value[1]
    return _KINDS[first >> 1] if first in (0, 2, 4) else None


def has_reason(value: bytes) -> bool:
    """Return whether a control record has a reason, which is the schema's second field; a commit rarely does."""
    place = 1 + (value[0] & 1) if value else 0
    return 0 < place < len(value) and value[place] != 0


def add_run(runs: list[Run], part: int, base_offset: int, count: int) -> None:
    """Append to a segment's runs; extend the last run where part and offsets continue it."""
    if runs:
        last = runs[-1]
        if last.part == part and last.base_offset + last.count == base_offset:
            runs[-1] = _run((part, last.base_offset, last.count + count))
            return
    runs.append(_run((part, base_offset, count)))
