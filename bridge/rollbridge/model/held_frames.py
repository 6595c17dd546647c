"""The frames of a transaction as a fold holds them: objects while their batches are cached, beyond that 32 bytes each.

A transaction may have hundreds of thousands of frames, and a group as many transactions. Where a batch is not cached,
what is needed of a frame is where it stands and what it counts; that is packed into four words, and an object is only
made of it while somebody looks at it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, overload

from rollbridge.model.frames import PieceKey
from rollbridge.model.identifiers import COUNT_BITS, COUNT_MAX

Partition = tuple[str, int]
"""Topic and partition of a buffer."""

_WORDS: Final = 4
_HALF_BITS: Final = 32
_HALF_MASK: Final = (1 << _HALF_BITS) - 1


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


class _Packed:
    """Frames without a batch: offset; partition and first count; records and size; piece and start.

    Partitions and pieces are numbered as they come.
    """

    __slots__ = ("at", "numbers", "partitions", "pieces", "words")

    def __init__(self, cached: int) -> None:
        self.words = array("Q")
        # Of the frames that are cached, their places among all.
        self.at = array("Q", range(cached))
        self.partitions: list[Partition] = []
        self.pieces: list[PieceKey] = []
        self.numbers: dict[PieceKey, int] = {}


class HeldFrames(Sequence[FrameRef]):
    """Frames in order of arrival: a list of those that are cached, and, once there is one that is not, the packed."""

    __slots__ = ("_cached", "_packed")

    def __init__(self, frames: Iterable[FrameRef] = ()) -> None:
        """Hold these."""
        self._cached: list[FrameRef] = []
        self._packed: _Packed | None = None
        if frames:
            self.extend(frames)

    def append(self, frame: FrameRef) -> None:
        """Hold one more."""
        if frame.batch is not None:
            self.append_cached(frame)
        else:
            self.append_place(
                frame.partition, frame.offset, frame.piece, frame.first_count, frame.records, frame.size, frame.start
            )

    def append_cached(self, frame: FrameRef) -> None:
        """Hold one more with its batch."""
        if self._packed is not None:
            self._packed.at.append(len(self))
        self._cached.append(frame)

    def append_place(
        self, partition: Partition, offset: int, piece: PieceKey, first_count: int, records: int, size: int, start: int
    ) -> None:
        """Hold one more, of which only the place is kept."""
        packed = self._packed
        if packed is None:
            packed = self._packed = _Packed(len(self._cached))
        number = packed.numbers.get(piece)
        if number is None:
            number = packed.numbers[piece] = len(packed.pieces)
            packed.pieces.append(piece)
        partitions = packed.partitions
        if partition not in partitions:
            partitions.append(partition)
        packed.words.extend(
            (
                offset,
                partitions.index(partition) << COUNT_BITS | first_count,
                records << _HALF_BITS | size,
                number << _HALF_BITS | start,
            )
        )

    def extend(self, frames: Iterable[FrameRef]) -> None:
        """Hold more."""
        for frame in frames:
            self.append(frame)

    @property
    def all_cached(self) -> Sequence[FrameRef] | None:
        """The frames, if each has its batch."""
        return self._cached if self._packed is None else None

    def counts(self) -> Iterator[tuple[PieceKey, int]]:
        """Piece and number of records of each; no objects are made for it."""
        packed = self._packed
        if packed is None:
            return ((frame.piece, frame.records) for frame in self._cached)
        return self._counts(packed)

    def _counts(self, packed: _Packed) -> Iterator[tuple[PieceKey, int]]:
        words, pieces = packed.words, packed.pieces
        cached = iter(self._cached)
        places = iter(packed.at)
        due = next(places, -1)
        at = 2
        for index in range(len(self)):
            if index == due:
                frame = next(cached)
                yield frame.piece, frame.records
                due = next(places, -1)
            else:
                yield pieces[words[at + 1] >> _HALF_BITS], words[at] >> _HALF_BITS
                at += _WORDS

    def __len__(self) -> int:
        packed = self._packed
        return len(self._cached) if packed is None else len(self._cached) + len(packed.words) // _WORDS

    def __iter__(self) -> Iterator[FrameRef]:
        packed = self._packed
        return iter(self._cached) if packed is None else (self._of(place, packed) for place in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> FrameRef: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[FrameRef]: ...

    def __getitem__(self, index: int | slice) -> FrameRef | Sequence[FrameRef]:
        packed = self._packed
        if packed is None:
            return self._cached[index]
        if isinstance(index, slice):
            return [self._of(place, packed) for place in range(*index.indices(len(self)))]
        return self._of(range(len(self))[index], packed)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(other) == len(self) and all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # they change

    def __repr__(self) -> str:
        return f"<HeldFrames: {len(self._cached)} cached of {len(self)}>"

    def _of(self, index: int, packed: _Packed) -> FrameRef:
        at = packed.at
        before = bisect_left(at, index)
        if before < len(at) and at[before] == index:
            return self._cached[before]
        word = (index - before) * _WORDS
        offset, placed, counted, numbered = packed.words[word : word + _WORDS]
        return FrameRef(
            packed.partitions[placed >> COUNT_BITS],
            offset,
            packed.pieces[numbered >> _HALF_BITS],
            placed & COUNT_MAX,
            counted >> _HALF_BITS,
            counted & _HALF_MASK,
            None,
            numbered & _HALF_MASK,
        )


NO_FRAMES: Final = HeldFrames()
"""Of a transaction that takes no more."""


class ChosenFrames(Sequence[FrameRef]):
    """Some of the frames, in their order."""

    __slots__ = ("_frames", "_places")

    def __init__(self, frames: HeldFrames, places: Sequence[int]) -> None:
        self._frames = frames
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> FrameRef: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[FrameRef]: ...

    def __getitem__(self, index: int | slice) -> FrameRef | Sequence[FrameRef]:
        if isinstance(index, slice):
            return [self._frames[place] for place in self._places[index]]
        return self._frames[self._places[index]]
