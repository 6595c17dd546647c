"""The frames of a round as the batches that are appended: large ones as they are, small ones of many joined.

The order within each topic is that of the items; topics are independent of each other.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from rollbridge.kafka.batches import check_numbering, rebatch
from rollbridge.model.buffered import FrameRef

SMALL_BYTES: Final = 32 * 1024
"""Frames below this are joined with their neighbours; larger ones are cheaper to forward as they are."""
JOINED_BYTES_MAX: Final = 512 * 1024


class FrameFeed:
    """Turns (topic, frame) items into batches, lazily, and their base offsets back into those of the items."""

    def __init__(self, items: Sequence[tuple[str, FrameRef]], read: Callable[[FrameRef], bytes]) -> None:
        """Prepare.

        Args:
            items: Frames with their topics, in order.
            read: Reads a frame whose batch is not cached.
        """
        self._items = items
        self._read = read
        # Of each item, the batch that holds it and the place of its first record there. There may be a million.
        self._batches = array("q", [-1]) * len(items)
        self._deltas = array("q", [0]) * len(items)
        self._made = 0
        self.at: tuple[int, ...] = ()
        """Places of the items whose batch was made last, or is being made."""

    def batches(self) -> Iterator[tuple[str, bytes]]:
        """The batches to append, in order; frames that are not cached are read when they are due."""
        waiting: dict[str, list[int]] = {}
        sizes: dict[str, int] = {}
        for index, (topic, frame) in enumerate(self._items):
            if frame.size < SMALL_BYTES:
                queue = waiting.setdefault(topic, [])
                queue.append(index)
                sizes[topic] = sizes.get(topic, 0) + frame.size
                if sizes[topic] >= JOINED_BYTES_MAX:
                    yield from self._join(topic, waiting.pop(topic))
                    del sizes[topic]
                continue
            if topic in waiting:
                yield from self._join(topic, waiting.pop(topic))
                del sizes[topic]
            self.at = (index,)
            self._batches[index] = self._made
            self._made += 1
            batch = self._batch(frame)
            check_numbering(batch)
            yield topic, batch
        for topic, indexes in waiting.items():
            yield from self._join(topic, indexes)

    def offsets(self, bases: Sequence[int]) -> list[int]:
        """The offset of each item's first record, from the base offsets of the batches."""
        return [bases[batch] + delta for batch, delta in zip(self._batches, self._deltas, strict=True)]

    def items_of(self, batch: int) -> tuple[int, ...]:
        """Places of the items whose records are in a batch that was made; none if it is not one of frames."""
        made = [place for place, number in enumerate(self._batches) if number == batch]
        return tuple(made) if batch < self._made else ()

    def _join(self, topic: str, indexes: Sequence[int]) -> Iterator[tuple[str, bytes]]:
        self.at = tuple(indexes)
        joined = rebatch([self._batch(self._items[index][1]) for index in indexes], JOINED_BYTES_MAX)
        for index, place in zip(indexes, joined.places, strict=True):
            self._batches[index] = self._made + place.batch
            self._deltas[index] = place.offset_delta
        self._made += len(joined.batches)
        for batch in joined.batches:
            yield topic, bytes(batch)

    def _batch(self, frame: FrameRef) -> bytes:
        return frame.batch if frame.batch is not None else self._read(frame)
