"""Savepoints: the records of an open transaction that count up to a moment, kept in the buffer.

The value of a SAVEPOINT frame holds what a COMMIT frame would hold at this moment, and *notes* of its maker. A
savepoint may hold only the changes since the one before (``whole`` is False), so that making one often costs little; in
force are all of them together, which the fold of the buffers keeps for each transaction.

Rolling back to a savepoint needs no more than a commit that names less: frames that a manifest does not name are left
out. The owner takes another part number, begins the transaction again under it, and writes the restored state as a
whole savepoint. So of parts before that of the last savepoint's maker exactly the named records count; of its maker's
own, and later ones, all that arrive.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import rollbridge_schemas
from rollbridge.base.avro import encode_long, encode_text
from rollbridge.base.errors import CorruptDataError
from rollbridge.base.ids import COUNT_MAX
from rollbridge.buffer.frames import Manifest, PieceKey, check_named, decode_value, manifest_of
from rollbridge.stream.conditions import StreamCondition
from rollbridge.stream.group_offsets import GroupOffsets

NOTES_MAX: Final = 10_000
"""Most notes of a savepoint, with those of earlier ones that are still in force."""
NOTES_BYTES_MAX: Final = 64 * 1024
"""Most bytes of their names and values, together."""
NOTE_NAME_CHARACTERS_MAX: Final = 1_000
SAVEPOINT_BYTES_MAX: Final = 384 * 1024
"""Largest savepoint that holds all that is in force, as the value of a frame.

A leader's answer holds it, in base64, and must fit into a ZooKeeper node together with the arrived frames.
"""


_TRUE: Final = b"\1"
_FALSE: Final = b"\0"
_PIECES_ALONE: Final = b"\0\0\0"
"""End of the pieces, no offsets, no conditions."""
_NOTES_END: Final = b"\0\0"
"""End of the notes, no details of offsets."""


@dataclass(frozen=True, slots=True)
class SavepointFrame:
    """Value of a SAVEPOINT frame.

    Attributes:
        number: Number within the transaction, 1 or more; of one owner they rise.
        whole: Whether it replaces what earlier ones said.
        manifest: Records of each piece, offsets and conditions: all of them, or those that have changed or are new.
        notes: Notes, likewise.
    """

    number: int
    whole: bool
    manifest: Manifest
    notes: Mapping[str, bytes] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the frame's value in Avro binary."""
        manifest = self.manifest
        if not manifest.offsets and not manifest.conditions:
            return self._encode_plain()
        notes = [{"name": name, "value": value.hex()} for name, value in self.notes.items()]
        head = {"number": self.number, "whole": self.whole, "notes": notes}
        return rollbridge_schemas.codec("savepoint_frame").encode(head | self.manifest.to_datum())

    def _encode_plain(self) -> bytes:
        """Return what the general encoder makes of a savepoint that has pieces and notes only; most are like that."""
        parts = [encode_long(self.number), _TRUE if self.whole else _FALSE]
        pieces = self.manifest.pieces
        if pieces:
            parts.append(encode_long(len(pieces)))
            for (part, stream, segment), records in pieces.items():
                parts += (encode_long(part), encode_long(stream), encode_long(segment), encode_long(records))
        parts.append(_PIECES_ALONE)
        if self.notes:
            parts.append(encode_long(len(self.notes)))
            for name, value in self.notes.items():
                parts += (encode_text(name), encode_long(2 * len(value)), value.hex().encode())
        parts.append(_NOTES_END)
        return b"".join(parts)

    def after(self, before: SavepointFrame) -> SavepointFrame:
        """Return what is in force once this one follows another of the same owner: one that says all of it.

        Raises:
            CorruptDataError: together they name too much.
        """
        if self.whole:
            return self
        groups = {item.group_id: item for item in (*before.manifest.offsets, *self.manifest.offsets)}
        conditions = (*before.manifest.conditions, *self.manifest.conditions)
        check_named(groups.values(), conditions, "SAVEPOINT")
        pieces = {**before.manifest.pieces, **self.manifest.pieces}
        notes = {**before.notes, **self.notes}
        _check_notes(notes)
        return SavepointFrame(self.number, True, Manifest(pieces, tuple(groups.values()), conditions), notes)


def decode_savepoint(value: bytes) -> SavepointFrame:
    """Decode a SAVEPOINT frame's value.

    Raises:
        CorruptDataError: The value does not decode, has no possible number, or names what a commit cannot name, or too
            much.
    """
    datum = decode_value("savepoint_frame", value)
    if not 1 <= datum["number"] <= COUNT_MAX:
        raise CorruptDataError(f"a SAVEPOINT frame has number {datum['number']}")
    try:
        notes = {item["name"]: bytes.fromhex(item["value"]) for item in datum["notes"]}
    except ValueError as fault:
        raise CorruptDataError(f"a note of a SAVEPOINT frame is not hexadecimal: {fault}") from fault
    _check_notes(notes)
    return SavepointFrame(datum["number"], datum["whole"], manifest_of(datum, "SAVEPOINT"), notes)


def notes_bytes(notes: Mapping[str, bytes]) -> int:
    return sum(len(name.encode()) + len(value) for name, value in notes.items())


def notes_fault(names: Iterable[str], count: int, size: int) -> str:
    """Return what is wrong with the notes of a savepoint; empty if nothing is.

    Args:
        names: Names of those that are new.
        count, size: Number and bytes of all of them, with those of earlier savepoints that are still in force.
    """
    if count > NOTES_MAX:
        return f"{count} notes; a savepoint holds {NOTES_MAX} at most, with those of earlier ones"
    if any(len(name) > NOTE_NAME_CHARACTERS_MAX for name in names):
        return f"the name of a note has more than {NOTE_NAME_CHARACTERS_MAX} characters"
    if size > NOTES_BYTES_MAX:
        return f"{size} bytes of notes; a savepoint holds {NOTES_BYTES_MAX} at most, with those of earlier ones"
    return ""


def _check_notes(notes: Mapping[str, bytes]) -> None:
    fault = notes_fault(notes, len(notes), notes_bytes(notes))
    if fault:
        raise CorruptDataError(f"a SAVEPOINT frame: {fault}")


@dataclass(frozen=True, slots=True)
class HeldSavepoint:
    """Combined state of the savepoints of an open transaction.

    Attributes:
        part: Part number of the owner who made the last one.
        frame: A frame that holds all of it.
    """

    part: int
    frame: SavepointFrame

    @property
    def pieces(self) -> Mapping[PieceKey, int]:
        """Records that count of each piece."""
        return self.frame.manifest.pieces

    @property
    def offsets(self) -> tuple[GroupOffsets, ...]:
        """Consumer group offsets that would be committed."""
        return self.frame.manifest.offsets

    @property
    def conditions(self) -> tuple[StreamCondition, ...]:
        """Conditions that would have to hold."""
        return self.frame.manifest.conditions


@dataclass(frozen=True, slots=True)
class StoredSavepoint:
    """A :class:`HeldSavepoint` in a record; ``value`` is the frame's, in base64.

    See ``schemas/rollbridge_schemas/answer.avsc``.
    """

    part: int
    value: str

    @classmethod
    def of(cls, held: HeldSavepoint) -> StoredSavepoint:
        """Return how a record holds it."""
        return cls(held.part, b64encode(held.frame.encode()).decode("ascii"))

    def held(self) -> HeldSavepoint:
        """Return what the record holds.

        Raises:
            CorruptDataError: it is none.
        """
        try:
            value = b64decode(self.value, validate=True)
        except ValueError as fault:
            raise CorruptDataError(f"a savepoint in a record is not base64: {fault}") from fault
        return HeldSavepoint(self.part, decode_savepoint(value))
