"""A transaction as its frames in the buffers make it: what has arrived, and whether that is what its commit names."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from rollbridge.model.commit_order import CommitOrder
from rollbridge.model.conditions import RefusedCondition
from rollbridge.model.control import is_too_scattered, scattered_reason
from rollbridge.model.fences import NO_SESSION, Owners, Session
from rollbridge.model.frames import (
    BeginFrame,
    Manifest,
    PieceKey,
)
from rollbridge.model.held_frames import NO_FRAMES, ChosenFrames, FrameRef, HeldFrames, Partition
from rollbridge.model.identifiers import TransactionId
from rollbridge.model.transaction import State

__all__ = ["NO_FRAMES", "BufferedTransaction", "FrameRef", "HeldFrames", "LateBegin", "Partition"]

# Prices: what each thing that a client can write makes a fold hold, in bytes of memory, objects included. Measured with
# tracemalloc on CPython 3.11, 64 bits, and rounded up; ``bridge/tests/test_prices.py`` measures them again. They do not
# depend on what is cached, so that whoever folds the same frames comes to the same price.
TRANSACTION_PRICE: Final = 3_000
"""A BEGIN frame: 2,090 with what the fold notes of its state and age; the rest is what a leader notes besides."""
STREAM_PRICE: Final = 400
"""A stream in it: 180 to 300, with a BEGIN frame and a first offset in its buffer."""
OWNER_PRICE: Final = 60
"""Somebody who has resumed it: 40."""
PIECE_PRICE: Final = 350
"""The first frame of a piece: 190 to 290, since dictionaries grow by doubling."""
FRAME_PRICE: Final = 40
"""Any frame: 32 packed, and the room into which arrays grow."""
CACHED_PRICE: Final = 300
"""A frame that is cached, besides the bytes of its batch: 270."""
LATE_PRICE: Final = 400
"""A transaction that has an outcome and whose BEGIN frame was met again: 300."""
LATE_STREAM_PRICE: Final = 16
"""A stream in it, besides its name: 8."""
LATE_PLACE_PRICE: Final = 200
"""A partition in which such a frame stands: 60 to 170."""
NAMED_PRICE: Final = 350
"""A piece, an offset of a consumer group or a condition that a COMMIT frame names: 150 to 330, and its texts."""


def text_price(text: str | None) -> int:
    """What a text takes."""
    return 0 if text is None else sys.getsizeof(text)


def begin_price(begin: BeginFrame) -> int:
    """What a transaction takes of which only this frame has come."""
    return TRANSACTION_PRICE + STREAM_PRICE * len(begin.epochs) + begin.text_bytes


def manifest_price(manifest: Manifest) -> int:
    """What a COMMIT frame takes."""
    if not manifest.offsets and not manifest.conditions:
        return NAMED_PRICE * len(manifest.pieces)
    named = len(manifest.pieces) + len(manifest.conditions) + sum(len(item.offsets) + 1 for item in manifest.offsets)
    texts = sum(len(item.condition.key or b"") for item in manifest.conditions)
    texts += sum(text_price(topic) for item in manifest.offsets for topic, _ in item.offsets)
    return NAMED_PRICE * named + texts


@dataclass(frozen=True, slots=True)
class LateBegin:
    """BEGIN frames of a transaction that has an outcome: its streams, and where each stands."""

    streams: tuple[str, ...]
    first_offsets: dict[Partition, int] = field(default_factory=dict)


def late_price(begun: LateBegin) -> int:
    """What such a transaction takes."""
    named = sum(LATE_STREAM_PRICE + text_price(name) for name in begun.streams)
    return LATE_PRICE + named + LATE_PLACE_PRICE * len(begun.first_offsets)


@dataclass(slots=True, eq=False)
class BufferedTransaction:
    """What the fold knows of one transaction."""

    id: bytes
    begin: BeginFrame
    begun_ms: int
    state: State = State.OPEN
    reason: str = ""
    manifest: Manifest | None = None
    refused: RefusedCondition | None = None
    decided_ms: int = 0
    frames: HeldFrames = field(default_factory=HeldFrames)
    bytes: int = 0
    cached_bytes: int = 0
    """What its cached frames take in memory."""
    held_bytes: int = 0
    """What everything else of it takes."""
    is_refused: bool = False
    """Whether it only waits to be logged as aborted."""
    last_count: dict[PieceKey, int] = field(default_factory=dict)
    begun_in: set[str] = field(default_factory=set)
    first_offsets: dict[Partition, int] = field(default_factory=dict)
    log_position: int = 0
    """The commit log holds no outcome of it, or of a transaction that began after it, before this offset."""
    owners: Owners = field(init=False)
    ended_by: Session = NO_SESSION
    """Whose session asked for its end; somebody else may have resumed it since."""
    order: CommitOrder | None = None
    """Where its commit stands among those of the connection that asked for it; None if it is not numbered."""

    def __post_init__(self) -> None:
        self.owners = Owners(self.begin)

    @property
    def deadline_ms(self) -> int:
        """When the lease runs out, ms since 1970."""
        return self.begun_ms + self.begin.lease_ms

    def __str__(self) -> str:
        return str(self.transaction_id)

    @property
    def transaction_id(self) -> TransactionId:
        """The id as a value."""
        return TransactionId.from_bytes(self.id)

    def is_complete(self) -> bool:
        """Whether every frame that the manifest names has arrived, and a BEGIN frame in each stream's buffer."""
        if self.manifest is None or len(self.begun_in) < len(self.begin.streams):
            return False
        if self._is_plain():
            return True
        missing = dict(self.manifest.pieces)
        for piece, records in self.frames.counts():
            left = missing.get(piece)
            if left is not None:
                missing[piece] = left - records
        return all(left <= 0 for left in missing.values())

    def manifest_fault(self) -> str | None:
        """Why what arrived can never be what the manifest names although nothing is missing; None if it is."""
        if self.is_too_scattered():
            return scattered_reason(len(self.frames))
        missing = dict(self.manifest.pieces) if self.manifest else {}
        for piece, records in () if self._is_plain() else self.frames.counts():
            left = missing.get(piece, 0)
            if 0 < left < records:
                return f"a frame of {piece} holds {records} records where the commit names {left} more"
            if left > 0:
                missing[piece] = left - records
        for piece in missing:
            if piece.stream >= len(self.begin.streams):
                return f"the commit names {piece}, but the transaction has {len(self.begin.streams)} streams"
        for item in self.manifest.conditions if self.manifest else ():
            if item.stream >= len(self.begin.streams):
                return f"the commit expects something of stream {item.stream} of {len(self.begin.streams)}"
        return None

    def written_streams(self) -> set[str]:
        """The streams of which its commit names records; anybody may forge one that names a stream it has not."""
        names = list(self.begin.streams)
        pieces = self.manifest.pieces if self.manifest else ()
        return {names[piece.stream] for piece in pieces if piece.stream < len(names)}

    def expected_streams(self) -> set[str]:
        """The streams of which its commit expects something; likewise."""
        names = list(self.begin.streams)
        conditions = self.manifest.conditions if self.manifest else ()
        return {names[item.stream] for item in conditions if item.stream < len(names)}

    def is_too_scattered(self) -> bool:
        """Whether its COMMIT record might be too large for the commit log."""
        return is_too_scattered(len(self.frames), len(self.last_count))

    def merged_frames(self) -> Sequence[FrameRef]:
        """Exactly the frames that the manifest names, in order of arrival; late and zombie ones are left out."""
        if self._is_plain():
            return self.frames
        merged = array("Q")
        missing = dict(self.manifest.pieces) if self.manifest else {}
        for place, (piece, records) in enumerate(self.frames.counts()):
            left = missing.get(piece, 0)
            if left >= records:
                missing[piece] = left - records
                merged.append(place)
        return self.frames if len(merged) == len(self.frames) else ChosenFrames(self.frames, merged)

    def price(self) -> int:
        """What it takes in memory without cached frames, as if everything had come at once."""
        return (
            begin_price(self.begin)
            + FRAME_PRICE * len(self.frames)
            + PIECE_PRICE * len(self.last_count)
            + OWNER_PRICE * self.owners.resumed
            + (0 if self.manifest is None else manifest_price(self.manifest))
        )

    def _is_plain(self) -> bool:
        """Whether there is one frame for each piece of the manifest and nothing else, as in most small transactions.

        It is asked several times for each transaction, so that the general answers are only worked out for the rest.
        """
        if self.manifest is None:
            return False
        pieces = self.manifest.pieces
        # No two frames of one piece: each piece that has arrived has one entry among the last counts.
        if not len(self.frames) == len(self.last_count) == len(pieces):
            return False
        for frame in self.frames.all_cached or ():
            if pieces.get(frame.piece) != frame.records:
                return False
        if self.frames.all_cached is None:
            return all(pieces.get(piece) == records for piece, records in self.frames.counts())
        return True
