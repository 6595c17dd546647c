"""Transaction state built from frames in the buffers: which pieces have arrived, and whether the commit names them.

Frames are held as objects while their batches are cached, and packed into 32 bytes each beyond that: a transaction may
have hundreds of thousands of frames, and a group as many transactions. :class:`HeldFrames` makes an object of a packed
frame only while it is accessed::

    word 0   offset (64)
    word 1   partition (24) | first count (40)
    word 2   records (32)   | size (32)
    word 3   piece (32)     | start (32)

Prices bound the memory of a fold, and :class:`Ages` orders transactions by age and lease. Pure.
"""

from __future__ import annotations

import heapq
import sys
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self, overload

from rollbridge.base.ids import COUNT_BITS, COUNT_MAX, OWNER_PART, TransactionId
from rollbridge.buffer.frames import BeginFrame, Manifest, PieceKey
from rollbridge.buffer.owners import NO_SESSION, Owners, SessionName
from rollbridge.buffer.savepoints import HeldSavepoint
from rollbridge.buffer.table import AbortCause, State
from rollbridge.commitlog.commit_order import CommitOrder
from rollbridge.commitlog.control import is_too_scattered, scattered_reason
from rollbridge.stream.conditions import RefusedCondition
from rollbridge.stream.names import Partition

# Held frames.

_WORDS: Final = 4
_HALF_BITS: Final = 32
_HALF_MASK: Final = (1 << _HALF_BITS) - 1


@dataclass(slots=True)
class FrameRef:
    """DATA frame of an open transaction: its place in the buffer, and its record batch while that is cached."""

    partition: Partition
    offset: int
    piece: PieceKey
    first_count: int
    records: int
    size: int
    batch: bytes | None
    start: int = 0
    """Offset of the batch in the message's value, if the frame came in a bundle."""


class _Packed:
    """Frames without a batch, in the words drawn above; partitions and pieces are numbered in order of arrival."""

    __slots__ = ("at", "numbers", "partitions", "pieces", "words")

    def __init__(self, cached: int) -> None:
        self.words = array("Q")
        # Places of the cached frames among all.
        self.at = array("Q", range(cached))
        self.partitions: list[Partition] = []
        self.pieces: list[PieceKey] = []
        self.numbers: dict[PieceKey, int] = {}


class HeldFrames(Sequence[FrameRef]):
    """Frames in order of arrival: a list of the cached ones and, once there is one without a batch, the packed ones."""

    __slots__ = ("_cached", "_packed")

    def __init__(self, frames: Iterable[FrameRef] = ()) -> None:
        """Hold the given frames."""
        self._cached: list[FrameRef] = []
        self._packed: _Packed | None = None
        if frames:
            self.extend(frames)

    def append(self, frame: FrameRef) -> None:
        """Add a frame, packed unless it has its batch."""
        if frame.batch is not None:
            self.append_cached(frame)
        else:
            self.append_place(
                frame.partition, frame.offset, frame.piece, frame.first_count, frame.records, frame.size, frame.start
            )

    def append_cached(self, frame: FrameRef) -> None:
        if self._packed is not None:
            self._packed.at.append(len(self))
        self._cached.append(frame)

    def append_place(
        self, partition: Partition, offset: int, piece: PieceKey, first_count: int, records: int, size: int, start: int
    ) -> None:
        """Add a frame without its batch, packed."""
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
        for frame in frames:
            self.append(frame)

    @property
    def all_cached(self) -> Sequence[FrameRef] | None:
        """All frames, if each has its batch; else None."""
        return self._cached if self._packed is None else None

    def counts(self) -> Iterator[tuple[PieceKey, int]]:
        """Iterate over piece and number of records of each frame, without unpacking it."""
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

    def move(self, places: Mapping[int, int]) -> None:
        """Give the streams of pieces other places."""

        def moved(piece: PieceKey) -> PieceKey:
            return piece._replace(stream=places.get(piece.stream, piece.stream))

        for frame in self._cached:
            frame.piece = moved(frame.piece)
        packed = self._packed
        if packed is not None:
            packed.pieces = [moved(piece) for piece in packed.pieces]
            packed.numbers = {piece: number for number, piece in enumerate(packed.pieces)}

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
"""Frames of a transaction that accepts no more."""


class ChosenFrames(Sequence[FrameRef]):
    """Selection of frames, in order."""

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


__all__ = ["NO_FRAMES", "BufferedTransaction", "FrameRef", "HeldFrames", "LateBegin"]

# Prices: bytes of memory, objects included, that each thing a client can write makes a fold hold. Measured with
# tracemalloc on CPython 3.11, 64 bits, and rounded up; ``bridge/tests/test_prices.py`` measures them again. They do not
# depend on caching, so every fold of the same frames arrives at the same price.
TRANSACTION_PRICE: Final = 3_000
"""A BEGIN frame: 2,090 with what the fold notes of its state and age; the rest is what a leader notes besides."""
STREAM_PRICE: Final = 400
"""A stream in it: 180 to 300, with a BEGIN frame and a first offset in its buffer."""
OWNER_PRICE: Final = 60
"""An owner who has resumed it: 40."""
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
"""Price of a partition that has such a frame: 60 to 170."""
NAMED_PRICE: Final = 350
"""A piece, an offset of a consumer group or a condition that a COMMIT frame names: 150 to 330, and its texts."""
DETAILS_PRICE: Final = 350
"""Price of the details committed with an offset: 250 to 330, and their text."""
SAVEPOINT_PRICE: Final = 600
"""A savepoint without what it names: 500."""
NOTE_PRICE: Final = 250
"""A note of one, besides its bytes: 200."""
LISTS_PRICE: Final = 1_200
"""Price of the lists of a transaction whose BEGIN frames name different streams: 1,000."""
LATER_PRICE: Final = 400
"""An owner who may come to own it and names other streams, besides these: 330."""


def text_price(text: str | None) -> int:
    """Return the memory of a text in bytes."""
    return 0 if text is None else sys.getsizeof(text)


def begin_price(begin: BeginFrame) -> int:
    """Return the price of a transaction of which only this frame has arrived."""
    return TRANSACTION_PRICE + STREAM_PRICE * len(begin.epochs) + begin.text_bytes


def manifest_price(manifest: Manifest) -> int:
    """Return the price of a COMMIT frame."""
    if not manifest.offsets and not manifest.conditions:
        return NAMED_PRICE * len(manifest.pieces)
    named = len(manifest.pieces) + len(manifest.conditions) + sum(len(item.offsets) + 1 for item in manifest.offsets)
    texts = sum(len(item.condition.key or b"") for item in manifest.conditions)
    for item in manifest.offsets:
        texts += sum(text_price(topic) for topic, _ in item.offsets)
        texts += sum(DETAILS_PRICE + text_price(beside.metadata) for beside in item.details.values())
    return NAMED_PRICE * named + texts


def savepoint_price(held: HeldSavepoint | None) -> int:
    """Return the price of what is in force of the savepoints of a transaction."""
    if held is None:
        return 0
    notes = held.frame.notes
    texts = sum(text_price(name) + len(value) for name, value in notes.items())
    return SAVEPOINT_PRICE + manifest_price(held.frame.manifest) + NOTE_PRICE * len(notes) + texts


@dataclass(frozen=True, slots=True)
class LateBegin:
    """BEGIN frames of a transaction that has an outcome: its streams, and the first offset in each partition."""

    streams: tuple[str, ...]
    first_offsets: dict[Partition, int] = field(default_factory=dict)


def late_price(begun: LateBegin) -> int:
    named = sum(LATE_STREAM_PRICE + text_price(name) for name in begun.streams)
    return LATE_PRICE + named + LATE_PLACE_PRICE * len(begun.first_offsets)


class _Matched(NamedTuple):
    """How so many frames match a manifest: whether all are there, and one that holds more than it names, if any."""

    manifest: Manifest
    frames: int
    is_complete: bool
    misfit: str

    @classmethod
    def of(cls, manifest: Manifest, frames: HeldFrames) -> Self:
        """Compare them, which takes time in proportion to the frames."""
        missing, misfit = dict(manifest.pieces), ""
        for piece, records in frames.counts():
            left = missing.get(piece, 0)
            if left > 0:
                if left < records and not misfit:
                    misfit = f"a frame of {piece} holds {records} records where the commit names {left} more"
                missing[piece] = left - records
        return cls(manifest, len(frames), all(left <= 0 for left in missing.values()), misfit)


@dataclass(slots=True)
class StreamLists:
    """Streams of a transaction whose BEGIN frames do not all name the same.

    See :mod:`rollbridge.buffer.joins`, which changes it.

    Attributes:
        is_guessed: True if the list in force is a later owner's, as no BEGIN frame of the first owner has been met.
        later: Lists of possible later owners: part numbers above that of the list in force.
        strays: Streams that are not on the list in force, with their reference epochs, and the index of their pieces.
        joins: For each stream that joined late: the parts with which it did, in the order of its buffer.
        barred: Parts that will never own it, as their BEGIN frame in the home stream's buffer did not count.
        next_place: Index of the next stray.
    """

    is_guessed: bool = False
    later: dict[int, Mapping[str, int]] = field(default_factory=dict)
    strays: dict[str, tuple[int, int]] = field(default_factory=dict)
    joins: dict[str, tuple[int, ...]] = field(default_factory=dict)
    barred: set[int] = field(default_factory=set)
    next_place: int = 1 << 24

    def price(self) -> int:
        names = sum(STREAM_PRICE + text_price(name) for name in self.strays)
        later = sum(LATER_PRICE + LATE_STREAM_PRICE * len(item) for item in self.later.values())
        return LISTS_PRICE + names + later + STREAM_PRICE * len(self.joins) + OWNER_PRICE * len(self.barred)


@dataclass(slots=True, eq=False)
class BufferedTransaction:
    """State of one transaction in the fold."""

    id: bytes
    begin: BeginFrame
    begun_ms: int
    state: State = State.OPEN
    reason: str = ""
    cause: AbortCause = AbortCause.OTHER
    """Why it ends as aborted, if it does."""
    manifest: Manifest | None = None
    refused: RefusedCondition | None = None
    decided_ms: int = 0
    met_ms: int = 0
    """Time when its COMMIT frame was folded, by :attr:`.BufferFold.now_ms`."""
    frames: HeldFrames = field(default_factory=HeldFrames)
    bytes: int = 0
    beside: dict[int, int] | None = None
    """Those of its bytes that are not of its first stream, by the place of the stream; None while there are none."""
    cached_bytes: int = 0
    """Memory of its cached frames."""
    held_bytes: int = 0
    """Memory of everything else."""
    is_refused: bool = False
    """True if it only waits to be logged as aborted."""
    last_count: dict[PieceKey, int] = field(default_factory=dict)
    begun_in: set[str] = field(default_factory=set)
    first_offsets: dict[Partition, int] = field(default_factory=dict)
    log_position: int = 0
    """The commit log holds no outcome of it, or of a transaction that began after it, before this offset."""
    barrier: Mapping[Partition, int] | None = None
    """Ends of its buffers that a leader must fold before it decides; None until they are known.

    They belong to one question: a lease extension, a joining stream or a commit asks another one.
    """
    owners: Owners = field(init=False)
    ended_by: SessionName = NO_SESSION
    """Session that asked for its end; another one may have resumed the transaction since."""
    order: CommitOrder | None = None
    """Position of its commit among those of the requesting connection; None if it is not numbered."""
    savepoint: HeldSavepoint | None = None
    """Combined state of its savepoints; None if it has none."""
    lister: int = OWNER_PART
    """Part of the owner whose list of streams is in force: that of ``begin``."""
    lists: StreamLists | None = None
    """Its lists of streams; None if all of its BEGIN frames name the same."""
    _match: _Matched | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.owners = Owners(self.begin)

    @property
    def deadline_ms(self) -> int:
        """Expiry of the lease, ms since 1970."""
        return self.begun_ms + self.begin.lease_ms

    def note_beside(self, place: int, size: int) -> None:
        """Record bytes of another stream than the first."""
        if self.beside is None:
            self.beside = {}
        self.beside[place] = self.beside.get(place, 0) + size

    def bytes_by_stream(self) -> Iterator[tuple[str, int]]:
        """Iterate over its streams that have frames, with the bytes of these."""
        left = self.bytes
        for place, size in (self.beside or {}).items():
            left -= size
            if place < len(self.begin.epochs):  # not of one that only another owner named
                yield self.begin.epochs[place][0], size
        if left:
            yield self.begin.home, left

    def __str__(self) -> str:
        return str(self.transaction_id)

    @property
    def transaction_id(self) -> TransactionId:
        return TransactionId.from_bytes(self.id)

    def place_of(self, stream: str) -> int | None:
        """Return the index of a stream's pieces, even if another owner named it; else None."""
        place = self.begin.places.get(stream)
        if place is None and self.lists is not None and stream in self.lists.strays:
            return self.lists.strays[stream][1]
        return place

    def all_streams(self) -> Mapping[str, int]:
        """Return its streams with their reference epochs, also those that only another owner named."""
        if self.lists is None or not self.lists.strays:
            return self.begin.streams
        return {name: epoch for name, (epoch, _) in self.lists.strays.items()} | dict(self.begin.streams)

    def is_settled_whose(self) -> bool:
        """Return whether there is no doubt about its streams, as far as its frames have been met."""
        return self.lists is None or not (self.lists.is_guessed or self.lists.later or self.lists.strays)

    def names_beyond(self) -> bool:
        """Return whether the manifest names a stream of which no BEGIN frame has been met: one that joined late."""
        return self.manifest is not None and self.manifest.names_beyond(len(self.begin.epochs))

    def is_complete(self) -> bool:
        """Return whether all frames that the manifest names have arrived, and a BEGIN frame in each stream's buffer."""
        manifest = self.manifest
        if manifest is None or len(self.begun_in) < len(self.begin.streams):
            return False
        # Of pieces in a stream that has not joined, no frame has arrived.
        if (manifest.conditions and self.names_beyond()) or (self.lists is not None and not self._all_begun()):
            return False
        return self._is_plain() or self._matched(manifest).is_complete

    def _all_begun(self) -> bool:
        return not self.names_beyond() and self.begun_in.issuperset(self.begin.streams)

    def arrived(self) -> dict[PieceKey, int]:
        """Return how many records of each piece of its owners have arrived and count, as far as anybody can tell.

        Of owners before the one who made the last savepoint that is exactly what it names.
        """
        found: dict[PieceKey, int] = {}
        counted = [self._counted(name) for name in self.begin.streams]
        for piece, records in self.frames.counts():
            if piece.stream < len(counted) and piece.part in counted[piece.stream]:
                found[piece] = found.get(piece, 0) + records
        held = self.savepoint
        if held is None:
            return found
        chain = self.owners.parts
        before = frozenset(chain[: chain.index(held.part)] if held.part in chain else ())
        for piece in [item for item in found if item.part in before]:
            records = min(found.pop(piece), held.pieces.get(piece, 0))
            if records:
                found[piece] = records
        return found

    def _counted(self, stream: str) -> Collection[int]:
        """Return the parts of owners whose records in a stream count: all, but for a stream that joined since."""
        chain = self.owners.parts
        joined = () if self.lists is None else self.lists.joins.get(stream, ())
        since = max((chain.index(part) for part in joined if part in chain), default=0)
        return chain[since:]

    def manifest_fault(self) -> str | None:
        """Return why the complete set of frames can never match the manifest; None if it does."""
        return self.frames_fault() or self.names_fault()

    def frames_fault(self) -> str | None:
        """Return the same, as far as it follows from the frames that have arrived."""
        if self.is_too_scattered():
            return scattered_reason(len(self.frames))
        if self.manifest is not None and not self._is_plain():
            misfit = self._matched(self.manifest).misfit
            if misfit:
                return misfit
        return None

    def names_fault(self) -> str | None:
        """Return the same, as far as it follows from the begin and the manifest alone."""
        for piece in self.manifest.pieces if self.manifest else ():
            if piece.stream >= len(self.begin.streams):
                return f"the commit names {piece}, but the transaction has {len(self.begin.streams)} streams"
        for item in self.manifest.conditions if self.manifest else ():
            if item.stream >= len(self.begin.streams):
                return f"the commit expects something of stream {item.stream} of {len(self.begin.streams)}"
        return None

    def written_streams(self) -> set[str]:
        """Return the streams whose records its commit names, leaving out places that a forged commit made up."""
        names = list(self.begin.streams)
        pieces = self.manifest.pieces if self.manifest else ()
        return {names[piece.stream] for piece in pieces if piece.stream < len(names)}

    def written_segments(self) -> dict[str, set[int]]:
        """Return the numbers of the segments whose records its commit names, by stream; places as above."""
        names = list(self.begin.streams)
        found: dict[str, set[int]] = {}
        for piece in self.manifest.pieces if self.manifest else ():
            if piece.stream < len(names):
                found.setdefault(names[piece.stream], set()).add(piece.segment)
        return found

    def expected_streams(self) -> set[str]:
        """Return the streams on which its commit has conditions, leaving out places that a forged commit made up."""
        names = list(self.begin.streams)
        conditions = self.manifest.conditions if self.manifest else ()
        return {names[item.stream] for item in conditions if item.stream < len(names)}

    def is_too_scattered(self) -> bool:
        """Return whether its COMMIT record might be too large for the commit log."""
        return is_too_scattered(len(self.frames), len(self.last_count))

    def merged_frames(self) -> Sequence[FrameRef]:
        """Return exactly the frames that the manifest names, in order of arrival, without late and zombie ones."""
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
        """Return its memory without cached frames, as if all frames had arrived at once."""
        return (
            begin_price(self.begin)
            + FRAME_PRICE * len(self.frames)
            + PIECE_PRICE * len(self.last_count)
            + OWNER_PRICE * self.owners.resumed
            + (0 if self.manifest is None else manifest_price(self.manifest))
            + (0 if self.savepoint is None else savepoint_price(self.savepoint))
            + (0 if self.lists is None else self.lists.price())
        )

    def _matched(self, manifest: Manifest) -> _Matched:
        """Return how the frames match the manifest; looked at again only when one of them has changed."""
        known = self._match
        if known is None or known.manifest is not manifest or known.frames != len(self.frames):
            known = self._match = _Matched.of(manifest, self.frames)
        return known

    def _is_plain(self) -> bool:
        """Return whether each piece of the manifest has one frame and there are no others, as in most transactions.

        Called several times per transaction, so that only the rest pays for the general computations.
        """
        if self.manifest is None:
            return False
        pieces = self.manifest.pieces
        # No two frames of one piece: each piece that has arrived has one entry among the last counts.
        if len(self.last_count) != len(pieces):
            return False
        cached = self.frames.all_cached
        if cached is None:
            return len(self.frames) == len(pieces) and all(
                pieces.get(piece) == records for piece, records in self.frames.counts()
            )
        if len(cached) == len(pieces) == 1:
            return pieces.get(cached[0].piece) == cached[0].records
        return len(cached) == len(pieces) and all(pieces.get(frame.piece) == frame.records for frame in cached)


# Ages and leases.

DEADLINES_MIN: Final = 1_000


class Ages:
    """Begin times and lease deadlines of transactions; the owner of ``known`` decides which are open."""

    def __init__(self, known: Mapping[bytes, BufferedTransaction]) -> None:
        """Watch a dictionary of transactions; :meth:`add` has to be called for each new one."""
        self._known = known
        self._deadlines: list[tuple[int, bytes]] = []
        self._young: deque[BufferedTransaction] = deque()

    def add(self, item: BufferedTransaction) -> None:
        """Add a transaction that has become open."""
        heapq.heappush(self._deadlines, (item.deadline_ms, item.id))
        self._young.append(item)

    def extend(self, item: BufferedTransaction) -> None:
        """Record that the lease of a transaction does not end when it was known to."""
        heapq.heappush(self._deadlines, (item.deadline_ms, item.id))

    def overdue(self, now_ms: int) -> list[BufferedTransaction]:
        """Return open transactions whose lease has expired, oldest deadline first, changing nothing."""
        found: list[BufferedTransaction] = []
        kept: list[tuple[int, bytes]] = []
        while self._deadlines and self._deadlines[0][0] < now_ms:
            entry = heapq.heappop(self._deadlines)
            item = self._known.get(entry[1])
            # Its deadline has its own entry if it was changed; duplicates are adjacent.
            if (
                item is not None
                and item.state is State.OPEN
                and item.deadline_ms == entry[0]
                and item not in found[-1:]
            ):
                found.append(item)
                kept.append(entry)
        for entry in kept:
            heapq.heappush(self._deadlines, entry)
        return found

    def come_of_age(self, begun_before_ms: int) -> list[BufferedTransaction]:
        """Return transactions begun before a time that are still open; each is returned once, oldest first."""
        young = self._young
        found = []
        still = State.OPEN
        while young:
            item = young[0]
            is_open = item.state is still
            if is_open and item.begun_ms >= begun_before_ms:
                break
            young.popleft()
            if is_open:
                found.append(item)
        return found

    def next_deadline_ms(self) -> int | None:
        """Return the earliest deadline that may still matter; None if there is none."""
        return self._deadlines[0][0] if self._deadlines else None

    def shed(self) -> None:
        """Drop the deadlines of transactions that are gone, once they are many.

        Most end long before their lease; without this their deadlines would stay until then.
        """
        if len(self._deadlines) > 2 * len(self._known) + DEADLINES_MIN:
            self._sort()

    def tidy(self) -> None:
        """Drop the entries of transactions that are gone; :meth:`come_of_age` returns all others once more."""
        self._sort()
        self._young = deque(self._known.values())

    def _sort(self) -> None:
        self._deadlines = [(item.deadline_ms, item.id) for item in self._known.values()]
        heapq.heapify(self._deadlines)
