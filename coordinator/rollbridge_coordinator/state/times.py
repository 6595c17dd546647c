"""What time it is for sure: bounds from several clocks, of which any may be wrong. Pure.

Deleting by one clock deletes everything when that clock is ahead, and marks made by one that is behind make the next
leader delete what is young. So there are two times: what is to be old is old only by :meth:`Times.earliest`, the lowest
of the clocks; what will be judged by its age is stamped with :meth:`Times.stamp`, the highest. Nothing is deleted too
early between two leaders as long as one clock of those that both have asked is right. Clocks that differ by more than a
bound are no clocks: then nothing is deleted for its age until somebody has set them right.

Witnesses of a leader: ZooKeeper's clock, which stamps the controller epoch when the leader raises it; brokers' append
times of what it reads; its machine's clock, as it is when it is looked at again.

Source: Spanner's TrueTime, an interval in place of a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SPREAD_MAX_MS: Final = 60_000
"""Clocks that differ by more are not believed when something is to be deleted."""


@dataclass(slots=True)
class Times:
    """How far other clocks differ from a leader's own, which neither jumps nor stands still during its term.

    All are differences to the own clock in milliseconds; a clock that is behind has one below 0.

    Attributes:
        low_ms, high_ms: Bounds of ZooKeeper's.
        append_ms: A lower bound of the brokers'; None if nothing has been read yet.
        wall_ms: A lower bound of the machine's, if that is ahead of what it was.
    """

    low_ms: int = 0
    high_ms: int = 0
    append_ms: int | None = None
    wall_ms: int = 0

    def earliest(self, now_ms: int) -> int:
        """The time by the lowest clock: what is older than something by this one is so by all of them."""
        return now_ms + min(self.low_ms, 0)

    def latest(self, now_ms: int) -> int:
        """The time by the highest clock: with this stamp nothing seems older than it is."""
        return now_ms + max(self.high_ms, self.append_ms or 0, self.wall_ms, 0)

    def stamp(self, now_ms: int) -> int:
        """What to stamp with: the latest time; or the middle one, if that is worlds away and would be kept for ages."""
        return self.lease(now_ms) if self.differ else self.latest(now_ms)

    def lease(self, now_ms: int) -> int:
        """The time by which leases end: the middle one of three clocks, so that it is right if one of them is wrong.

        The brokers', by which leases begin, is one of them, with the least that it can show.
        """
        others = (self.low_ms, min(self.low_ms, 0) if self.append_ms is None else self.append_ms)
        return now_ms + sorted((0, *others))[1]

    @property
    def spread_ms(self) -> int:
        """By how much the clocks differ at most."""
        return self.latest(0) - self.earliest(0)

    @property
    def differ(self) -> bool:
        """Whether they differ so much that nothing may be deleted for its age."""
        return self.spread_ms > SPREAD_MAX_MS

    def witness(self, before_ms: int, witnessed_ms: int, after_ms: int) -> None:
        """ZooKeeper's clock showed ``witnessed_ms`` between two times of the own one."""
        self.low_ms = witnessed_ms - after_ms
        self.high_ms = witnessed_ms - before_ms

    def witness_append(self, appended_ms: int, now_ms: int) -> None:
        """A broker's clock has shown ``appended_ms``, now or at any time before."""
        found = appended_ms - now_ms
        self.append_ms = found if self.append_ms is None else max(self.append_ms, found)

    def witness_wall(self, shown_ms: int, now_ms: int) -> None:
        """The machine's clock shows ``shown_ms``; it may have been set, or the process may have stood still."""
        self.wall_ms = max(self.wall_ms, shown_ms - now_ms)
