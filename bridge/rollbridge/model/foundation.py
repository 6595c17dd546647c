"""Foundations: what is kept of the epochs that a history has dropped, so that what it answers stays the same.

An epoch is dropped when nothing of it is left: the segments that ended with it are removed, no transaction refers to
it. Four things are built on it nevertheless. Sequence ids grow along the lineage, so each segment of the first epoch
that is kept has a *base*. A condition asks whether there may have been a record of a key, so each part of the key space
has an *end*: the sequence id after the last record that may have stood there. Partition numbers count the segments, so
those of that epoch keep theirs. And a stream that was deleted and created again is told apart by when it was created.

Such a stream stands on a foundation from its first epoch on: its epochs and its sequence ids go on above all that its
former lives have used (:mod:`rollbridge.model.lives`), so ``born``, the epoch with which this life began, is above 0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from rollbridge.model.errors import InvalidRequestError
from rollbridge.model.identifiers import Epoch
from rollbridge.model.keyspace import KeyRange


@dataclass(frozen=True, slots=True)
class Foundation:
    """What a history stands on whose first epochs have been dropped.

    Attributes:
        first: The first epoch that is kept, 1 or more.
        created_ms: When the first epoch of this life was planned.
        bases: Where sequence ids begin in each segment of that epoch, in order of their ranges.
        lows: Lower ends of the parts of the key space that differ in what was dropped; the first is 0.
        ends: For each part the sequence id after the last record that may have been dropped; 0 if there was none.
        born: The first epoch of this life of the stream; those below it belong to a former one.
        born_sequence: Its first sequence id; likewise.
        partitions: The partition numbers of the segments of the first epoch that is kept, in order of their ranges;
            empty where they are counted from 0.

    Raises:
        InvalidRequestError: it makes no sense.
    """

    first: Epoch
    created_ms: int
    bases: tuple[int, ...]
    lows: tuple[float, ...] = (0.0,)
    ends: tuple[int, ...] = (0,)
    born: int = 0
    born_sequence: int = 0
    partitions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sound = (
            0 <= self.born <= self.first
            and self.first > 0
            and self.lows[:1] == (0.0,)
            and len(self.lows) == len(self.ends)
            and len(self.partitions) in (0, len(self.bases))
            and len(set(self.partitions)) == len(self.partitions)
            and min(self.partitions, default=0) >= 0
        )
        if not sound or list(self.lows) != sorted(set(self.lows)) or min(*self.bases, *self.ends, self.lows[-1]) < 0:
            raise InvalidRequestError(f"what is kept of the epochs before {self.first} makes no sense")

    def datum(self) -> dict[str, Any]:
        """What the schema of a stream's truncation holds of it."""
        return {
            "first_epoch": self.first,
            "created_ms": self.created_ms,
            "bases": list(self.bases),
            "lows": list(self.lows),
            "ends": list(self.ends),
            "born": self.born,
            "born_sequence": self.born_sequence,
            "partitions": list(self.partitions),
        }

    @classmethod
    def of_datum(cls, datum: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`datum`."""
        bases, lows, ends, partitions = (tuple(datum[name]) for name in ("bases", "lows", "ends", "partitions"))
        first, created_ms = Epoch(datum["first_epoch"]), datum["created_ms"]
        return cls(first, created_ms, bases, lows, ends, datum["born"], datum["born_sequence"], partitions)

    def end_at(self, position: float) -> int:
        """The sequence id after the last record at a position of the key space that may have been dropped."""
        return self.ends[bisect_right(self.lows, position) - 1]


def overlaid(
    lows: tuple[float, ...], ends: tuple[int, ...], over: Mapping[KeyRange, int]
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Parts of the key space, as in a :class:`Foundation`, with other ends on ranges that do not overlap."""
    ranges = sorted(over)
    starts = [item.low for item in ranges]
    bounds = sorted({*lows, *starts, *(item.high for item in ranges if item.high < 1.0)})
    return _joined((low, _end_over(low, ranges, starts, over, lows, ends)) for low in bounds)


def _end_over(
    low: float,
    ranges: list[KeyRange],
    starts: list[float],
    over: Mapping[KeyRange, int],
    lows: tuple[float, ...],
    ends: tuple[int, ...],
) -> int:
    place = bisect_right(starts, low) - 1
    if place >= 0 and low in ranges[place]:
        return over[ranges[place]]
    return ends[bisect_right(lows, low) - 1]


def _joined(parts: Iterable[tuple[float, int]]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Neighbours with the same end are one part."""
    kept: list[tuple[float, int]] = []
    for low, end in parts:
        if not kept or kept[-1][1] != end:
            kept.append((low, end))
    return tuple(low for low, _ in kept), tuple(end for _, end in kept)
