"""Load of segments: how much was written to each, as a leader measures it, and rates over windows of time. Pure.

A leader looks at the ends, or sizes, of active segments at intervals. What it has seen is kept by the *number* of a
segment, which names one key range for good: a rolling commit puts another topic under the number, and the rate goes on.

Counted is what stands in the segments, whoever wrote it. Markers of native transactions take an offset each and count
as records: one a round and segment. Records that a rolling commit puts into segments of their own, large transactions
among them, are not counted, as they never come to the segments that could be split.

A window is *full* once the leader has measured for as long as it is; before, it has no rate. A new leader begins
without any.

Source: Pravega's ``AutoScaleProcessor``, which gets rates of 2, 5, 10 and 20 minutes of each segment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rollbridge.model.epochs import EpochHistory
from rollbridge.model.ids import SegmentId

WINDOWS: Final = (1.0, 2.5, 5.0, 10.0)
"""Lengths of the windows, as multiples of the shortest: 2, 5, 10 and 20 minutes."""
_FINENESS: Final = 16
"""Samples are kept as far apart as this part of their age, so that some sixty do for all windows."""
_LENGTH_MAX: Final = 1.5
"""A window between two samples may be longer by this factor; beyond it too little was measured to tell."""


class LoadSample(NamedTuple):
    """How much had been written to a segment by a time, ms by the leader's clock, since it was first seen."""

    ms: int
    written: int


@dataclass(slots=True)
class SegmentLoad:
    """What was measured of one segment number.

    Attributes:
        segment: The segment that has the number now.
        value: Its end, or its size, at the last look.
        samples: Oldest first.
    """

    segment: SegmentId
    value: int
    samples: list[LoadSample]

    def rate(self, window_ms: float, spacing_ms: int) -> float | None:
        """Return what was written each second of a window that ends with the last look; None if it is not full.

        Args:
            window_ms: Its length.
            spacing_ms: Time between two looks.
        """
        newest = self.samples[-1]
        older = next((item for item in reversed(self.samples) if newest.ms - item.ms >= window_ms), None)
        if older is None or newest.ms - older.ms > _LENGTH_MAX * window_ms + 2 * spacing_ms:
            return None
        return _rate(older, newest)

    def peak(self, stretch_ms: float, window_ms: float) -> float:
        """Return the highest rate of any stretch of time, at least so long, in a window that ends now."""
        since_ms = self.samples[-1].ms - window_ms
        highest, start = 0.0, 0
        for place, newer in enumerate(self.samples):
            while start + 1 < place and newer.ms - self.samples[start + 1].ms >= stretch_ms:
                start += 1
            if newer.ms > since_ms and newer.ms - self.samples[start].ms >= stretch_ms:
                highest = max(highest, _rate(self.samples[start], newer))
        return highest

    def add(self, sample: LoadSample, longest_ms: float) -> None:
        """Add a sample, and drop those that no window needs any more."""
        kept: list[LoadSample] = []
        for item in self.samples:
            if len(kept) > 1 and item.ms - kept[-2].ms < (sample.ms - item.ms) / _FINENESS:
                kept[-1] = item  # the one between these two is not needed at this age
            else:
                kept.append(item)
        kept.append(sample)
        beyond = sum(sample.ms - item.ms >= longest_ms for item in kept)
        self.samples = kept[max(beyond - 1, 0) :]


def _rate(older: LoadSample, newer: LoadSample) -> float:
    return (newer.written - older.written) * 1000 / (newer.ms - older.ms)


@dataclass(slots=True)
class StreamLoad:
    """What a leader has measured of one stream in its term.

    Attributes:
        unit: What is counted.
        looked_ms: When it was looked last.
        segments: By number, those that are active.
        made_ms: When each active number was made, by its epoch record; that outlives leaders.
        epoch: Newest epoch that is known.
    """

    unit: str = ""
    looked_ms: int = 0
    segments: dict[int, SegmentLoad] = field(default_factory=dict)
    made_ms: dict[int, int] = field(default_factory=dict)
    epoch: int = -1

    def note(
        self, history: EpochHistory, now_ms: int, unit: str, values: Mapping[SegmentId, int], longest_ms: float
    ) -> None:
        """Take note of a look at the active segments.

        Args:
            history: The stream's.
            now_ms: Time of the look.
            unit: What ``values`` count: ``events`` for ends, ``bytes`` for sizes. Another one than before starts anew.
            values: By segment; of those left out nothing is known now.
            longest_ms: The longest window of interest.
        """
        if unit != self.unit or now_ms < self.looked_ms:
            self.unit, self.segments = unit, {}
        self._learn(history)
        self.looked_ms = now_ms
        for item in history.active.segments:
            value = values.get(item.id)
            if value is None:
                continue
            known = self.segments.get(int(item.id.number))
            if known is None:
                self.segments[int(item.id.number)] = SegmentLoad(item.id, value, [LoadSample(now_ms, 0)])
                continue
            if now_ms == known.samples[-1].ms:
                continue
            written = known.samples[-1].written + self._since(known, item.id, value, history)
            known.segment, known.value = item.id, value
            known.add(LoadSample(now_ms, written), longest_ms)

    def _since(self, known: SegmentLoad, segment: SegmentId, value: int, history: EpochHistory) -> int:
        """Return what was written since the last look; retention makes sizes smaller, and counts as nothing."""
        if segment == known.segment:
            return max(value - known.value, 0)
        node = history.graph.nodes.get(known.segment)
        end = None if node is None or self.unit != "events" else node.sealed_end
        return value + (0 if end is None else max(end - known.value, 0))

    def _learn(self, history: EpochHistory) -> None:
        numbers = {int(item) for item in history.active.numbers}
        if history.active.epoch == self.epoch:
            return
        for record in history.records[max(self.epoch + 1 - history.first, 0) :]:
            for item in record.segments:
                self.made_ms.setdefault(int(item.id.number), record.created_ms)
        self.made_ms = {number: ms for number, ms in self.made_ms.items() if number in numbers}
        self.segments = {number: item for number, item in self.segments.items() if number in numbers}
        self.epoch = history.active.epoch

    def rates(self, number: int, window_ms: int, spacing_ms: int) -> tuple[float | None, ...]:
        """Return the rates of a segment over all windows, the shortest first; None for those that are not full.

        Args:
            number: Of the segment.
            window_ms: Length of the shortest window.
            spacing_ms: Time between two looks.
        """
        known = self.segments.get(number)
        if known is None or known.samples[-1].ms != self.looked_ms:
            return (None,) * len(WINDOWS)
        return tuple(known.rate(window_ms * factor, spacing_ms) for factor in WINDOWS)

    def peak(self, number: int, window_ms: int) -> float:
        """Return the highest rate of a segment over the shortest window within the longest; see :meth:`rates`."""
        known = self.segments.get(number)
        return 0.0 if known is None else known.peak(window_ms, window_ms * WINDOWS[-1])
