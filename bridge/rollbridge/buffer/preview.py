"""Preview: the frames of open transactions, and the position to read from. Pure.

A preview begins where a takeover would (:mod:`rollbridge.buffer.replay`). :class:`PreviewStart` takes the rest of the
commit log and of the buffer, and the snapshots' aborted transactions, and makes the :class:`PreviewFold` to show. That
builds on :class:`~rollbridge.buffer.fold.BufferFold`, which drops duplicates, zombies and unreadable frames, and keeps
no bytes of frames. An outcome from the commit log, or an ABORT frame, ends a transaction; later frames of it are not
shown. Frames in a record of ongoing transactions are not folded again: :class:`RecordedFrames` says where to read them.

Source: PIP-196 (a snapshot spares the reading of what has ended; readers filter by its aborted transactions).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final

from rollbridge.base.sn import LONG_MAX
from rollbridge.buffer.fold import BufferFold, BufferLimits
from rollbridge.buffer.frames import unpack_header
from rollbridge.buffer.replay import BufferPlaces, LookUp, OngoingTransactions, log_start, look_up
from rollbridge.buffer.snapshots import AbortedTransactions
from rollbridge.buffer.state import BufferedTransaction, FrameRef, HeldFrames
from rollbridge.buffer.table import State
from rollbridge.commitlog.control import ControlKind
from rollbridge.commitlog.outcomes import EndedIds
from rollbridge.stream.names import Partition

ENDED_MAX: Final = 200_000
"""Outcomes that are kept in mind because the frames of their transactions may not have been read yet."""
FAR: Final = 1_000
"""Messages between two recorded frames from which on it is quicker to fetch at the second than to read all of them."""

CheckBatch = Callable[[bytes, int], str | None]
Shown = tuple[BufferedTransaction, FrameRef, bytes]
"""A frame of an open transaction, with its record batch."""


class PreviewFold:
    """Open transactions in the buffer of one stream. Not thread-safe."""

    def __init__(
        self,
        check_batch: CheckBatch,
        ended: Iterable[bytes] = (),
        *,
        floors: Mapping[Partition, int] | None = None,
        is_over: Callable[[BufferedTransaction], bool] = lambda _: False,
    ) -> None:
        """Start with nothing open.

        Args:
            check_batch: Says what is wrong with a record batch that should hold a number of records; None if nothing.
            ended: Ids of transactions whose end is known before the first frame is read.
            floors: For each partition, the offset below which no message is folded.
            is_over: Tells of a transaction whose first frame has been folded whether it had an outcome before.
        """
        self._ended: OrderedDict[bytes, None] = OrderedDict.fromkeys(ended)
        self._fold = BufferFold(BufferLimits(cache_bytes_max=0, lease_ms_max=LONG_MAX), check_batch, self._ended)
        self._fold.positions.update(floors or {})
        self._fold.fresh = []
        self._is_over = is_over

    @property
    def open(self) -> Mapping[bytes, BufferedTransaction]:
        """The open transactions, by id."""
        return self._fold.open

    @property
    def ended(self) -> Collection[bytes]:
        """Ids of transactions that have ended, or whose client has asked to abort them."""
        return self._ended.keys()

    def restore(self, stream: str, record: OngoingTransactions) -> RecordedFrames:
        """Restore the recorded transactions that have not ended; nothing of the partition has been folded yet.

        Returns:
            Positions of their frames.
        """
        recorded: list[tuple[BufferedTransaction, HeldFrames]] = []
        for known in record.transactions:
            if known.id not in self._ended:
                self._fold.restore(stream, record.partition, known)
                item = self._fold.open[known.id]
                recorded.append((item, item.frames))
                item.frames = HeldFrames()
        (self._fold.fresh or []).clear()
        return RecordedFrames(recorded, self.open)

    def end(self, transaction: bytes, now_ms: int) -> None:
        """Take note of an outcome."""
        item = self._fold.open.get(transaction)
        if item is not None:
            self._forget(item, now_ms)
        self._note(transaction)

    def learn(self, ended: Iterable[bytes]) -> None:
        """Take note of outcomes of transactions that are not open here."""
        for transaction in ended:
            self._note(transaction)

    def fold(
        self, stream: str, partition: Partition, offset: int, appended_ms: int, key: bytes | None, value: bytes | None
    ) -> Iterator[Shown]:
        """Take one message of the buffer, and give the frames in it that may be shown, with their record batches."""
        header = unpack_header(key)
        if header is None or value is None:
            return
        self._fold.fold(stream, partition, offset, appended_ms, key, value)
        self._fold.ages.come_of_age(appended_ms + 1)  # the result is not needed here
        self._fold.extended.clear()  # nor whose leases were extended
        item = self._fold.open.get(header.transaction)
        if item is None:
            return
        if self._fold.fresh:
            self._fold.fresh.clear()
            if self._is_over(item):
                self.end(item.id, appended_ms)
                return
        if item.state is State.ABORTING:
            self.end(item.id, appended_ms)
            return
        fresh = item.frames
        item.frames = HeldFrames()  # once shown they are not needed any more, and a transaction may have millions
        for frame in fresh:
            yield item, frame, value[frame.start : frame.start + frame.size]

    def _forget(self, item: BufferedTransaction, now_ms: int) -> None:
        self._fold.refuse(item.id, "its outcome is known", now_ms)
        self._fold.settle(item.id)

    def _note(self, transaction: bytes) -> None:
        self._ended[transaction] = None
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)


class RecordedFrames:
    """Frames of one partition that a record of ongoing transactions lists, in the order in which they are read."""

    def __init__(
        self, recorded: Iterable[tuple[BufferedTransaction, HeldFrames]], still_open: Mapping[bytes, object]
    ) -> None:
        """Skip frames of transactions that are not in ``still_open``, which may change meanwhile."""
        self._open = still_open
        self._left = heapq.merge(*map(_placed, recorded), key=lambda item: (item[1].offset, item[1].start))
        self._next: tuple[BufferedTransaction, FrameRef] | None = next(self._left, None)

    @property
    def offset(self) -> int | None:
        """Offset of the next frame; None if there is none left."""
        while self._next is not None and self._next[0].id not in self._open:
            self._next = next(self._left, None)
        return None if self._next is None else self._next[1].offset

    def take(self, offset: int, key: bytes | None, value: bytes | None) -> Iterator[Shown]:
        """Give the recorded frames in a message, with their record batches; frames before it are passed by.

        The buffer begins behind these, so they have ended.
        """
        header = unpack_header(key)
        while (due := self.offset) is not None and due <= offset:
            assert self._next is not None
            item, frame = self._next
            self._next = next(self._left, None)
            if due == offset and value is not None and header is not None and header.transaction == item.id:
                yield item, frame, value[frame.start : frame.start + frame.size]


def _placed(recorded: tuple[BufferedTransaction, HeldFrames]) -> Iterator[tuple[BufferedTransaction, FrameRef]]:
    item, frames = recorded
    return ((item, frame) for frame in frames)


class PreviewStart:
    """Collects the outcomes needed before the first frame is shown. Not thread-safe.

    In this order: pass the commit log from :attr:`log_begin` to its end to :meth:`hear`; each partition's messages from
    its floor to its end to :meth:`rehearse`; the transactions of :meth:`doubts` that were aborted to :meth:`exclude`;
    if :meth:`is_unsure` or :meth:`is_cut`, the record of ended transactions to :meth:`exclude_ended`, and the commit
    log from where that ends to :attr:`log_begin` to :meth:`hear`; then call :meth:`make`.

    Attributes:
        log_begin: Offset of the commit log after which the outcomes of the buffers' transactions are.
    """

    def __init__(
        self, stream: str, places: BufferPlaces, log_end: int, log_begin: int | None, check_batch: CheckBatch
    ) -> None:
        """Begin where a takeover would.

        Args:
            stream: ``scope/stream`` whose buffer it is.
            places: Its partitions.
            log_end: End of the commit log, asked for before those of the buffers.
            log_begin: Offset at which outcomes begin of what is in the partitions without a snapshot; None: there is
                nothing in these.
            check_batch: As for :class:`PreviewFold`.
        """
        self._stream = stream
        self._places = places
        self._check_batch = check_batch
        self._known = {item: place for item, place in places.items() if place.snapshot is not None}
        begins = [log_start(self._known, log_end, 0)] + ([] if log_begin is None else [log_begin])
        self.log_begin: Final = min(begins)
        self._aborted = {
            item: AbortedTransactions.of(place.snapshot)
            for item, place in self._known.items()
            if place.snapshot is not None
        }
        self._ended: dict[bytes, None] = {}
        self._begun: set[bytes] = set()
        self._rehearsal: PreviewFold | None = None

    @property
    def floors(self) -> dict[Partition, int]:
        """Offset of each partition at which folding begins."""
        return {item: place.floor for item, place in self._places.items()}

    @property
    def has_snapshots(self) -> bool:
        """Return True if some partition is not read from its beginning."""
        return bool(self._known)

    def hear(self, transaction: bytes, kind: ControlKind) -> None:
        """Take note of a record of the commit log."""
        if kind is ControlKind.BEGIN:
            self._begun.add(transaction)
        else:
            self._ended[transaction] = None

    def rehearse(
        self, partition: Partition, offset: int, appended_ms: int, key: bytes | None, value: bytes | None
    ) -> None:
        """Take a message of the buffer, to learn which transactions their clients have aborted, and what seems open."""
        for _ in self._rehearsing().fold(self._stream, partition, offset, appended_ms, key, value):
            pass  # not shown

    def doubts(self) -> LookUp:
        """Return the transactions that seem open, by where to search for them."""
        found = look_up(self._aborted, self._rehearsing().open.values())
        self.exclude(found.aborted)
        return found

    def asks(self, transaction: BufferedTransaction) -> LookUp:
        """Return the same for one that has begun since."""
        return look_up(self._aborted, [transaction])

    def exclude(self, transactions: Iterable[bytes]) -> None:
        """Exclude transactions that a search found aborted."""
        self._ended.update(dict.fromkeys(transactions))

    def is_unsure(self) -> bool:
        """Return True if the commit log has to be read further back.

        It does not have to for transactions of which it says that they have begun: their leader holds them open.
        """
        return any(
            item.id not in self._ended
            and item.id not in self._begun
            and not self._known.keys().isdisjoint(item.first_offsets)
            and not self._is_recorded(item)
            for item in self._rehearsing().open.values()
        )

    def is_cut(self, log_first: int) -> bool:
        """Return True if outcomes of what seems open may be missing, because the commit log begins at this offset.

        Of partitions without a snapshot it is not known where they began, only when.
        """
        return 0 < log_first >= self.log_begin and any(
            item.id not in self._ended and item.id not in self._begun for item in self._rehearsing().open.values()
        )

    def exclude_ended(self, ended: EndedIds) -> None:
        """Take note of which transactions have ended, as a leader has written it down."""
        self.exclude(
            item.id
            for item in self._rehearsing().open.values()
            if item.id not in self._begun and (item.id in ended or ended.is_lost(item.id, item.begun_ms))
        )

    def make(
        self, is_over: Callable[[BufferedTransaction], bool] = lambda _: False
    ) -> tuple[PreviewFold, dict[Partition, RecordedFrames]]:
        """Return the fold to show from, and where frames that it does not fold again are read.

        Args:
            is_over: As for :class:`PreviewFold`; not asked of what seemed open before.
        """
        rehearsal = self._rehearsing()
        cleared = rehearsal.open.keys() - self._ended.keys()
        fold = PreviewFold(
            self._check_batch,
            [*self._ended, *rehearsal.ended],
            floors=self.floors,
            is_over=lambda item: item.id not in cleared and is_over(item),
        )
        recorded = {
            item: fold.restore(self._stream, place.ongoing)
            for item, place in self._places.items()
            if place.ongoing is not None
        }
        self._rehearsal = None
        return fold, recorded

    def _rehearsing(self) -> PreviewFold:
        if self._rehearsal is None:
            self._rehearsal = PreviewFold(self._check_batch, self._ended, floors=self.floors)
            for place in self._places.values():
                if place.ongoing is not None:
                    self._rehearsal.restore(self._stream, place.ongoing)
        return self._rehearsal

    def _is_recorded(self, item: BufferedTransaction) -> bool:
        return any(offset < self._places[partition].floor for partition, offset in item.first_offsets.items())
