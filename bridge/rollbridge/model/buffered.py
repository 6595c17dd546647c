"""A transaction as its frames in the buffers make it: what has arrived, and whether that is what its commit names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bridge.model.commit_order import CommitOrder
from bridge.model.conditions import RefusedCondition
from bridge.model.control import is_too_scattered, scattered_reason
from bridge.model.fences import NO_SESSION, Owners, Session
from bridge.model.frames import (
    BeginFrame,
    Manifest,
    PieceKey,
)
from bridge.model.identifiers import TransactionId
from bridge.model.transaction import State

Partition = tuple[str, int]
"""Topic and partition of a buffer."""


@dataclass(slots=True)
class FrameRef:
    """A DATA frame of an open transaction: where it stands, and its record batch while that is cached."""

    partition: Partition
    offset: int
    piece: PieceKey
    first_count: int
    records: int
    size: int
    batch: bytes | None
    start: int = 0
    """Where the batch begins in the message's value, if the frame came in a bundle."""


@dataclass(frozen=True, slots=True)
class LateBegin:
    """BEGIN frames of a transaction that has an outcome: its streams, and where each stands."""

    streams: tuple[str, ...]
    first_offsets: dict[Partition, int] = field(default_factory=dict)


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
    frames: list[FrameRef] = field(default_factory=list)
    bytes: int = 0
    cached_bytes: int = 0
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
        for frame in self.frames:
            left = missing.get(frame.piece)
            if left is not None:
                missing[frame.piece] = left - frame.records
        return all(left <= 0 for left in missing.values())

    def manifest_fault(self) -> str | None:
        """Why what arrived can never be what the manifest names although nothing is missing; None if it is."""
        if self.is_too_scattered():
            return scattered_reason(len(self.frames))
        missing = dict(self.manifest.pieces) if self.manifest else {}
        for frame in () if self._is_plain() else self.frames:
            left = missing.get(frame.piece, 0)
            if 0 < left < frame.records:
                return f"a frame of {frame.piece} holds {frame.records} records where the commit names {left} more"
            if left > 0:
                missing[frame.piece] = left - frame.records
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
        merged: list[FrameRef] = []
        missing = dict(self.manifest.pieces) if self.manifest else {}
        for frame in self.frames:
            left = missing.get(frame.piece, 0)
            if left >= frame.records:
                missing[frame.piece] = left - frame.records
                merged.append(frame)
        return merged

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
        for frame in self.frames:  # noqa: SIM110 - a loop takes half the time of all() with a generator
            if pieces.get(frame.piece) != frame.records:
                return False
        return True
