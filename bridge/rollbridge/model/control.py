"""Control records: the entries of a group's commit log, one COMMIT or ABORT for every transaction, in commit order.

A COMMIT record lists where the records went as runs of consecutive offsets, so clients resolve their futures, and
auditors their counts, from the commit log alone.

Source: DistributedLog transactions, "commit log stream" and begin/commit/abort control records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from functools import lru_cache
from typing import Final

import rollbridge_schemas
from rollbridge.model.avro import encode_long, encode_string, encode_text
from rollbridge.model.commit_order import LineKey
from rollbridge.model.conditions import RefusedCondition
from rollbridge.model.errors import CorruptDataError, InvalidRequestError
from rollbridge.model.ids import OWNER_PART, PART_MAX, SegmentId, TransactionId
from rollbridge.model.mapper import Mapper

EXPIRED = "expired"
"""The reason of an ABORT record whose transaction outlived its lease."""
FENCED = "fenced: a newer session of its client has begun"
"""The reason of an ABORT record whose transaction was begun by a session that a newer one had replaced."""
OVERTAKEN = "out of order: its connection had given this commit up, and asked for later ones"
"""The reason of an ABORT record whose commit came when its connection no longer counted on it."""
FORSAKEN = "out of order: an earlier commit of its connection never arrived"
"""The reason of an ABORT record whose commit waited in vain for an earlier one."""
_RESUMED: Final = "resumed as part "

CONTROL_RECORD_BYTES_MAX: Final = 16 * 1024 * 1024
"""``max.message.bytes`` of a commit log: a record batch that holds one record, headers of both included."""
_HEAD_BYTES: Final = 1024 * 1024
"""What a record takes at most beside its placement, with the names of all streams that a transaction may have."""
_SEGMENT_BYTES: Final = 16
"""What a segment takes at most: its id, and the counts of its runs."""
_RUN_BYTES: Final = 19
"""What a run takes at most: a part has 23 bits, an offset 63, the records of a frame 32."""


def bytes_of_record(frames: int, pieces: int) -> int:
    """Return how many bytes the COMMIT record of a transaction takes in the commit log at most.

    Each frame may become a run of its own, because plain writers write in between, and frames of several parts.

    Args:
        frames: Its frames.
        pieces: The pieces that they belong to, which are not less than its segments.
    """
    return _HEAD_BYTES + frames * _RUN_BYTES + pieces * _SEGMENT_BYTES


FRAMES_HARMLESS: Final = (CONTROL_RECORD_BYTES_MAX - _HEAD_BYTES) // (_RUN_BYTES + _SEGMENT_BYTES)
"""So many frames always fit, whatever they belong to: about 449,000."""


def is_too_scattered(frames: int, pieces: int) -> bool:
    """Return whether the COMMIT record of a transaction might be too large for the commit log."""
    return frames > FRAMES_HARMLESS and bytes_of_record(frames, pieces) > CONTROL_RECORD_BYTES_MAX


def scattered_reason(frames: int) -> str:
    """The reason of an ABORT record whose transaction has too many frames."""
    return (
        f"it has {frames} frames, and a commit record of more than {CONTROL_RECORD_BYTES_MAX} bytes would have to list "
        "them; write more at once, or less in one transaction"
    )


def long_lease_reason(asked_ms: int, allowed_ms: int) -> str:
    """The reason of an ABORT record whose transaction asked for a longer lease than its leader grants."""
    asked, allowed = (_duration(ms) for ms in (asked_ms, allowed_ms))
    return f"it asked for a lease of {asked}; the coordinators' limit, lease_ms_max, is {allowed}"


def _duration(ms: int) -> str:
    """A text for any number that a frame may hold, which may be more than a ``timedelta`` takes."""
    try:
        return str(timedelta(milliseconds=ms))
    except OverflowError:
        return f"{ms} ms"


def resumed_reason(part: int) -> str:
    """The reason of a COMMIT record: empty, or who asked for it if the transaction had been resumed."""
    return "" if part == OWNER_PART else f"{_RESUMED}{part}"


def owner_of(reason: str) -> int:
    """The inverse of :func:`resumed_reason`."""
    number = reason.removeprefix(_RESUMED)
    is_part = number.isascii() and number.isdigit() and len(number) <= len(str(PART_MAX))
    return int(number) if is_part else OWNER_PART


class ControlKind(StrEnum):
    """What a control record says."""

    BEGIN = "BEGIN"
    COMMIT = "COMMIT"
    ABORT = "ABORT"


@dataclass(frozen=True, slots=True)
class Run:
    """Records of one part at consecutive offsets of a segment."""

    part: int
    base_offset: int
    count: int


Placement = Mapping[str, Mapping[SegmentId, Sequence[Run]]]
"""Where the records of a transaction stand: scope/stream → segment → runs in order of offset."""


@dataclass(frozen=True, slots=True)
class ControlRecord:
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
    placement: Placement = field(default_factory=dict)
    refused: RefusedCondition | None = None
    order: tuple[LineKey, int] | None = None
    """The number of a commit among those of its connection; None if it was not numbered."""

    def encode_value(self) -> bytes:
        """Avro binary of the record; its Kafka key is the transaction id's 16 bytes.

        Put together by hand, in the order of the schema's fields, because a leader writes one for every transaction.
        """
        parts = [
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
            (connection, epoch), number = self.order
            parts += (_PRESENT, encode_long(connection), encode_long(epoch), encode_long(number))
        return b"".join(parts)

    def counts(self) -> dict[str, int]:
        """How many records stand in each stream."""
        found: dict[str, int] = {}
        for stream, _, runs in self.segments():
            found[stream] = found.get(stream, 0) + sum(run.count for run in runs)
        return found

    def segments(self) -> Iterator[tuple[str, SegmentId, Sequence[Run]]]:
        """Every stream and segment that holds records, with its runs."""
        for stream, segments in self.placement.items():
            for segment, runs in segments.items():
                yield stream, segment, runs


_REFUSED: Final = Mapper(RefusedCondition, "control_record.refused")


def decode_control(key: bytes | None, value: bytes | None) -> ControlRecord:
    """The control record in a message of a commit log.

    Raises:
        CorruptDataError: the message is not one.
    """
    try:
        datum = rollbridge_schemas.codec("control_record").decode(value or b"")
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
        )
    except (rollbridge_schemas.SchemaError, InvalidRequestError) as fault:
        raise CorruptDataError(f"a message of the commit log is no control record: {fault}") from fault


def _order(datum: Mapping[str, int]) -> tuple[LineKey, int]:
    return (datum["connection"], datum["epoch"]), datum["number"]


_KINDS: Final = tuple(ControlKind)
_END: Final = encode_long(0)
"""Ends an array."""
_NULL, _PRESENT = encode_long(0), encode_long(1)
"""The branch that a nullable value takes."""


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


def _add_segments(parts: list[bytes], segments: Mapping[SegmentId, Sequence[Run]]) -> None:
    if segments:
        parts.append(encode_long(len(segments)))
        for segment, runs in segments.items():
            parts.append(encode_long(int(segment)))
            if runs:
                parts.append(encode_long(len(runs)))
                for run in runs:
                    parts += (encode_long(run.part), encode_long(run.base_offset), encode_long(run.count))
            parts.append(_END)
    parts.append(_END)


def peek_kind(value: bytes | None) -> ControlKind | None:
    """The kind of a control record from its first byte, without decoding the rest; None if it can not be one.

    The kind is the schema's first field, and Avro writes an enum as the zigzag number of its symbol.
    """
    return _KINDS[value[0] >> 1] if value and value[0] in (0, 2, 4) else None


def has_reason(value: bytes) -> bool:
    """Whether a control record has a reason; a commit rarely does. It is the schema's second field."""
    return len(value) > 1 and value[1] != 0


def add_run(runs: list[Run], part: int, base_offset: int, count: int) -> None:
    """Append to a segment's runs, joining with the last one where the offsets continue."""
    if runs and runs[-1].part == part and runs[-1].base_offset + runs[-1].count == base_offset:
        runs[-1] = Run(part, runs[-1].base_offset, runs[-1].count + count)
    else:
        runs.append(Run(part, base_offset, count))
