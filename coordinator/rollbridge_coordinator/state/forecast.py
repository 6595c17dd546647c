"""Forecast: where the next record of a segment will stand, as long as nobody but this leader writes there. Pure.

A control record says where a transaction's records stand, so it can only be written once they have their offsets: a
second request, after the first is answered. A leader that knows the offsets beforehand sends both together. It learns
from the answers whether it was right; if it was not, the round is aborted, done again the long way, and the topic is
left alone for a while, longer each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rollbridge.model.buffered import FrameRef

Items = Sequence[tuple[str, FrameRef]]

BYTES_MAX: Final = 512 * 1024
"""Rounds larger than this gain nothing, and lose more if the forecast is wrong."""
PATIENCE_MAX: Final = 1024


@dataclass(slots=True)
class _Topic:
    """What is known of a topic: its next offset, and for how many rounds it is not to be relied on."""

    next: int
    patience: int
    resting: int = 0


class Forecast:
    """Remembers where rounds have ended. Not thread-safe."""

    __slots__ = ("_patience", "_topics")

    def __init__(self, patience: int) -> None:
        """Start without knowledge; after a forecast that was wrong a topic rests for ``patience`` rounds at least."""
        self._patience = patience
        self._topics: dict[str, _Topic] = {}

    def offsets(self, items: Items) -> list[int] | None:
        """The offset that each frame's first record will get; None if that can not be said, or is not worth it."""
        ends: dict[str, int] = {}
        size = 0
        expected = []
        for topic, frame in items:
            end = ends.get(topic)
            if end is None:
                known = self._topics.get(topic)
                if known is None or known.resting:
                    return None
                end = known.next
            expected.append(end)
            ends[topic] = end + frame.records
            size += frame.size
        return expected if expected and size <= BYTES_MAX else None

    def note(self, items: Items, offsets: Sequence[int], expected: Sequence[int] | None = None) -> None:
        """Take note of where a round's frames stand, which ends now: a marker follows in each topic.

        ``expected`` is what :meth:`offsets` said of them, if the round relied on it.
        """
        ends: dict[str, int] = {}
        missed: set[str] = set()
        for place, ((topic, frame), offset) in enumerate(zip(items, offsets, strict=True)):
            ends[topic] = offset + frame.records + 1
            if expected is not None and expected[place] != offset:
                missed.add(topic)
        for topic, end in ends.items():
            known = self._topics.get(topic)
            if known is None:
                self._topics[topic] = _Topic(end, self._patience)
            elif topic in missed:
                known.next, known.resting = end, known.patience
                known.patience = min(2 * known.patience, PATIENCE_MAX)
            else:
                known.next, known.resting = end, max(known.resting - 1, 0)
                if expected is not None:
                    known.patience = max(known.patience - 1, self._patience)

    def forget(self, topics: Iterable[str]) -> None:
        """Segments that are sealed will not be written to any more."""
        for topic in topics:
            self._topics.pop(topic, None)
