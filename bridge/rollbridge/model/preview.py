"""Previews: which frames of a transaction buffer belong to transactions that are open, as far as is known.

Builds on :class:`~rollbridge.model.buffer.BufferFold`, which drops duplicates, zombies and what can not be read; it
keeps no bytes of frames here. An outcome from the commit log, or an ABORT frame, ends a transaction; what comes of it
later is not shown.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from rollbridge.model.buffer import BufferFold, BufferLimits
from rollbridge.model.buffered import BufferedTransaction, FrameRef, HeldFrames, Partition
from rollbridge.model.errors import CorruptDataError
from rollbridge.model.frames import FrameKind, unpack_bundle, unpack_header
from rollbridge.model.sn import LONG_MAX
from rollbridge.model.transaction import State

ENDED_MAX: Final = 200_000
"""Outcomes that are kept in mind because the frames of their transactions may not have been read yet."""


class PreviewFold:
    """What is open in the buffer of one stream. Not thread-safe."""

    def __init__(self, check_batch: Callable[[bytes, int], str | None], ended: Iterable[bytes] = ()) -> None:
        """``ended`` are the ids of transactions whose end is known before the first frame is read."""
        self._ended: OrderedDict[bytes, None] = OrderedDict.fromkeys(ended)
        self._fold = BufferFold(BufferLimits(cache_bytes_max=0, lease_ms_max=LONG_MAX), check_batch, self._ended)

    @property
    def open(self) -> int:
        """How many transactions are open."""
        return len(self._fold.open)

    def end(self, transaction: bytes, now_ms: int) -> None:
        """Take note of an outcome."""
        item = self._fold.open.get(transaction)
        if item is not None:
            self._forget(item, now_ms)
        self._ended[transaction] = None
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def fold(
        self, stream: str, partition: Partition, offset: int, appended_ms: int, key: bytes | None, value: bytes | None
    ) -> Iterator[tuple[BufferedTransaction, FrameRef, bytes]]:
        """Take one message of the buffer, and give the frames in it that may be shown, with their record batches."""
        header = unpack_header(key)
        if header is None or value is None:
            return
        self._fold.fold(stream, partition, offset, appended_ms, key, value)
        self._fold.ages.come_of_age(appended_ms + 1)  # nobody asks here which have
        item = self._fold.open.get(header.transaction)
        if item is None:
            return
        if item.state is State.ABORTING:
            self._forget(item, appended_ms)
            return
        fresh = item.frames
        item.frames = HeldFrames()  # once shown they are not needed any more, and a transaction may have millions
        for frame in fresh:
            yield item, frame, value[frame.start : frame.start + frame.size]

    def _forget(self, item: BufferedTransaction, now_ms: int) -> None:
        self._fold.refuse(item.id, "its outcome is known", now_ms)
        self._fold.settle(item.id)


def aborted_in(key: bytes | None, value: bytes | None) -> bytes | None:
    """The id of the transaction whose ABORT frame a message of a buffer is, or holds; None for all others."""
    header = unpack_header(key)
    if header is None or value is None:
        return None
    if header.kind is FrameKind.ABORT:
        return header.transaction
    if header.kind is FrameKind.BUNDLE:
        try:
            frames = unpack_bundle(header, value)
        except CorruptDataError:
            return None
        if any(frame.kind is FrameKind.ABORT for frame, _, _ in frames):
            return header.transaction
    return None
