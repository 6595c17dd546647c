"""Retention of streams: when to note where a stream ends, and at which of these marks it may be truncated. Pure.

Records carry times that their writers chose, so they are no measure of age. What counts is when a record was there at
the latest: now and then the leader notes where the active segments end, with the time, and with how much had been
written to the stream. Truncation is at one of these marks, so it keeps at least what the limits say, and at most about
a fiftieth more, or as much as is written between two looks.

Source: Pravega's retention set (``RetentionSet``, "Pravega Stream Retention").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rollbridge.model.epochs import EpochHistory
from rollbridge.model.identifiers import SegmentId
from rollbridge.model.records import FOREVER, Mark, Retention, marks_to_json

MARKS_PER_LIMIT: Final = 50
PLACES_MAX: Final = 5_000
"""Offsets in the marks of one limit; a ZooKeeper node holds 1 MiB."""


@dataclass(slots=True)
class ByteCounter:
    """How much has been written to a stream, told from the sizes of its segments at each look.

    A new leader goes on from the last mark; what was written between that and its first look is not counted, so more
    is kept for a while than has to be.
    """

    written: int | None = None
    epoch: int = -1
    sizes: dict[SegmentId, int] = field(default_factory=dict)

    def wanted(self, history: EpochHistory) -> list[SegmentId]:
        """The segments whose sizes are to be given to :meth:`count`: those that may have grown since the last look."""
        active = history.active.segment_ids
        return [
            item
            for item in history.stored()
            if item in active or item in self.sizes or (self.written is not None and item.epoch > self.epoch)
        ]

    def count(self, history: EpochHistory, sizes: Mapping[SegmentId, int], marks: Sequence[Mark]) -> int:
        """Take note of sizes in bytes; gives how much has been written so far."""
        if self.written is None:
            self.written = marks[-1].written if marks else sum(sizes.values())
        else:
            self.written += sum(max(size - self.sizes.get(item, 0), 0) for item, size in sizes.items())
        active = history.active.segment_ids
        known = self.sizes | dict(sizes)
        self.sizes = {item: size for item, size in known.items() if item in active}
        self.epoch = history.active.epoch
        return self.written


def is_mark_due(
    marks: Sequence[Mark], now_ms: int, written: int, cut: Mapping[SegmentId, int], policy: Retention
) -> bool:
    """Whether to note that the active segments end at ``cut`` now."""
    if not marks:
        return True
    last = marks[-1]
    if dict(last.cut) == dict(cut):
        return False  # what ended there then ends there still
    share = max(1, min(MARKS_PER_LIMIT, PLACES_MAX // len(cut)))
    return (policy.ms != FOREVER and (now_ms - last.ms) * share >= policy.ms) or (
        policy.bytes != FOREVER and (written - last.written) * share >= policy.bytes
    )


def marks_within(history: EpochHistory, marks: Iterable[Mark]) -> list[Mark]:
    """The marks whose segments are all in the history: where the others are there is nothing to truncate any more."""
    known = history.segments().keys()
    return [mark for mark in marks if mark.cut.keys() <= known]


def marks_that_fit(marks: Sequence[Mark], bytes_max: int) -> list[Mark]:
    """The marks, as many of them as fit into a node of so many bytes; without some of them a little more is kept."""
    kept = list(marks)
    while kept and len(marks_to_json(kept)) > bytes_max:
        del kept[-2::-2]
        if len(kept) == 1:
            break
    return kept


def place_to_truncate(marks: Sequence[Mark], now_ms: int, written: int, policy: Retention) -> int | None:
    """Which of the marks is the latest before which everything may go; None if there is none."""
    for place in range(len(marks) - 1, -1, -1):
        mark = marks[place]
        if (policy.ms != FOREVER and now_ms - mark.ms >= policy.ms) or (
            policy.bytes != FOREVER and written - mark.written >= policy.bytes
        ):
            return place
    return None
