"""Late commits one after another: how long a rolling commit stays open for the next, or waits for it. Pure.

A client that commits transactions of a former epoch one after the other waits for each answer, so no wait before a
rolling commit can bring two of them together. Instead the segments that took the first stay open for a moment, they
*linger*, and the next is merged into them as into active segments. That is right as long as nothing at all has been
written to the segments that continue them: whatever is written there comes after it, in time and in the order of keys.
See docs/protocol.md, "Late commits one after another".

Where clients commit late side by side, those that come while a rolling commit is under way go into the next one. Where
that takes several as well, it waits a moment for more.

How long both take follows from what has happened: a lone late commit finds nothing open and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from rollbridge.model.changes import CommittingTransactions
from rollbridge.model.names import Partition

LOOK_MS: Final = 10
"""Interval of the looks at what continues lingering segments: so much longer than before readers may wait for them."""
SEGMENTS_MAX: Final = 16
"""Segments that continue lingering ones, at most: each look asks for the end of each."""
TOTAL: Final = 5
"""How many times the longest linger segments stay open, at most, however many commits come one after another."""
PATIENCE: Final = 10
"""Late commits come one after another if so many times the longest linger, at most, is between them."""

Numbers = Mapping[str, AbstractSet[int]]
"""Segments by the names of their streams, as numbers."""


@dataclass(slots=True)
class Lingering:
    """A rolling commit that is visible, and whose segments for transactions take more of them before they are sealed.

    Attributes:
        committing: Its record, which stands in ZooKeeper until they are.
        duplicates: Numbers of these segments, by stream.
        behind: Numbers of the segments that continue them, by stream.
        places: Where those lie.
        since_ms: Since when they linger.
        until_ms: Until when, unless something else ends it.
        is_used: Whether a further commit was merged into them.
    """

    committing: CommittingTransactions
    duplicates: Numbers
    behind: Numbers
    places: tuple[Partition, ...]
    since_ms: int
    until_ms: int
    is_used: bool = False

    def takes(self, replaced: Numbers) -> bool:
        """Return True if all segments that were written to, and are not active any more, are among them."""
        return bool(replaced) and all(
            name in self.duplicates and self.duplicates[name] >= numbers for name, numbers in replaced.items()
        )

    def is_before(self, written: Numbers) -> bool:
        """Return True if one of the segments that are written to continues them."""
        return any(not numbers.isdisjoint(self.behind.get(name, ())) for name, numbers in written.items())

    def prolong(self, now_ms: int, most_ms: int) -> None:
        """Let them linger on after a further commit, within the bound."""
        self.is_used = True
        self.until_ms = min(now_ms + most_ms, self.since_ms + TOTAL * most_ms)

    def is_over(self, now_ms: int) -> bool:
        """Return True if the time is up; also if the clock was set back."""
        return not self.since_ms <= now_ms < self.until_ms


@dataclass(frozen=True, slots=True)
class _Last:
    """The last late commits of a stream.

    Attributes:
        at_ms: When they became visible.
        took_ms: How long their rolling commit took.
        lines: How many connections they were of.
        patience_ms: How soon the next must come for the segments to linger.
    """

    at_ms: int
    took_ms: int
    lines: int
    patience_ms: int


@dataclass(slots=True)
class LateCommits:
    """How late commits have come so far, by stream.

    Attributes:
        linger_ms_max: How long segments linger after each, at most; 0: never.
        gather_ms_max: How long a rolling commit waits for more, at most; 0: never.
    """

    linger_ms_max: int
    gather_ms_max: int
    _last: dict[str, _Last] = field(default_factory=dict)

    def note(self, streams: Iterable[str], began_ms: int, now_ms: int, lines: int) -> int:
        """Take note of late commits that have become visible; return for how long their segments are to linger, ms."""
        names = list(streams)
        waits = [self._since_last(name, now_ms) for name in names]
        known = [item for item in waits if item is not None]
        took_ms = max(now_ms - began_ms, 0)
        patience_ms = PATIENCE * self.linger_ms_max
        self._last |= dict.fromkeys(names, _Last(now_ms, took_ms, lines, patience_ms))
        return min(max(known), self.linger_ms_max) if len(known) == len(waits) else 0

    def was_in_vain(self, streams: Iterable[str]) -> None:
        """Take note that nothing came while segments lingered: the next must come sooner for them to linger again."""
        for name in streams:
            last = self._last.get(name)
            if last is not None:
                self._last[name] = _Last(last.at_ms, last.took_ms, last.lines, self.linger_ms_max)

    def gather_ms(self, streams: Iterable[str], now_ms: int) -> int:
        """Return how long a rolling commit of streams is to wait for more, ms.

        It waits if the last one took commits of several connections and was no longer ago than it had taken: for half
        of that time, so that rolling commits follow each other a little slower, and each takes more.
        """
        found = [self._last.get(name) for name in streams]
        last = [
            item for item in found if item is not None and item.lines > 1 and 0 <= now_ms - item.at_ms <= item.took_ms
        ]
        return min([self.gather_ms_max, *(item.took_ms // 2 for item in last)]) if len(last) == len(found) else 0

    def _since_last(self, name: str, now_ms: int) -> int | None:
        """Return how long ago the last late commits of a stream were; None if that is too long ago."""
        last = self._last.get(name)
        if last is None or not 0 <= now_ms - last.at_ms <= last.patience_ms:
            return None
        return now_ms - last.at_ms
