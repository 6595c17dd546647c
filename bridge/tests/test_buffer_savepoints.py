"""Savepoints: what their frames look like in binary, and how many notes they hold."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollbridge_schemas
from rollbridge.base.ids import COUNT_MAX
from rollbridge.buffer.frames import Manifest, PieceKey
from rollbridge.buffer.savepoints import NOTES_BYTES_MAX, NOTES_MAX, SavepointFrame, decode_savepoint
from rollbridge.client.savepoints import SavepointLog
from rollbridge.errors import InvalidRequestError
from rollbridge.stream.group_offsets import GroupOffsets

NUMBERS = st.integers(0, 2**31 - 1)
PIECES = st.dictionaries(st.builds(PieceKey, NUMBERS, NUMBERS, NUMBERS), st.integers(1, COUNT_MAX))
NOTES = st.dictionaries(st.text(max_size=20), st.binary(max_size=70), max_size=8)
OFFSETS = st.just(()) | st.just((GroupOffsets("readers", {("topic", 1): 7}),))


def general(frame: SavepointFrame) -> bytes:
    """What the general encoder makes of a frame."""
    datum: dict[str, Any] = {
        "number": frame.number,
        "whole": frame.whole,
        "notes": [{"name": name, "value": value.hex()} for name, value in frame.notes.items()],
        **frame.manifest.to_datum(),
    }
    return rollbridge_schemas.codec("savepoint_frame").encode(datum)


@given(st.integers(1, COUNT_MAX), st.booleans(), PIECES, OFFSETS, NOTES)
def test_a_frame_is_what_the_general_encoder_makes(
    number: int, whole: bool, pieces: dict[PieceKey, int], offsets: tuple[GroupOffsets, ...], notes: dict[str, bytes]
) -> None:
    frame = SavepointFrame(number, whole, Manifest(pieces, offsets), notes)
    assert frame.encode() == general(frame)
    assert decode_savepoint(frame.encode()) == frame


@given(st.lists(st.tuples(st.booleans(), NOTES), max_size=6), st.booleans())
def test_notes_in_force_are_counted_once(rounds: list[tuple[bool, dict[str, bytes]]], is_one_too_many: bool) -> None:
    """However they came to be in force, exactly as many bytes fit as are said to."""
    log = SavepointLog()
    for is_rolled_back, notes in rounds:
        if is_rolled_back:
            log.begin_anew(notes)
        else:
            log.made(Manifest({}), log.make(Manifest({}), notes, "one"), notes)
    left = NOTES_BYTES_MAX - sum(len(name.encode()) + len(value) for name, value in log.notes.items())
    name = "a name that no other has"
    rest = {name: bytes(left - len(name) + is_one_too_many)}
    if is_one_too_many:
        with pytest.raises(InvalidRequestError, match=f"{NOTES_BYTES_MAX + 1} bytes of notes; .* was made"):
            log.make(Manifest({}), rest, "one")
    else:
        assert log.make(Manifest({}), rest, "one").notes[name] == rest[name]


def test_so_many_notes_and_no_more() -> None:
    log = SavepointLog()
    notes = {str(number): b"" for number in range(NOTES_MAX)}
    log.made(Manifest({}), log.make(Manifest({}), notes, "one"), notes)
    log.make(Manifest({}), {"0": b"again"}, "one")
    with pytest.raises(InvalidRequestError, match=f"{NOTES_MAX + 1} notes"):
        log.make(Manifest({}), {"another": b""}, "one")
