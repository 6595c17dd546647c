"""Succession: when a coordinator competes for the lead of a group, and when it hands over. Pure.

Each group has a first choice by rendezvous hashing, so groups spread evenly and few move when a coordinator starts or
stops. But availability comes first: no coordinator serves during a takeover, so

- a vacant lead is for a *warm* coordinator, one that has followed the group closely and has little left to read; among
  those, and if there is none, it is for the first choice. All others wait briefly, so that not all begin at once;
- a leader hands over only after it has served for many times as long as its takeover took, and then only to a first
  choice that is warm. So no work is thrown away, and the next takeover is short.

The decision is made before the controller epoch is raised, which is what makes a takeover cost something.

**Failed terms.** A leader whose brokers refuse it, or do not answer, may be cut off from what others reach. A failed
request ends its term; if it only hears nothing of a buffer for :data:`DEAF_S`, it hands over to a coordinator that does
(:func:`hands_over_to`). After either it rests (:class:`Setbacks`): it is the last to compete for the group, and not
ready for it, so that no leader hands over to it before the rest is over. Without others it leads on as before.

**Time.** A leader deletes by age, and any clock may be wrong: one that is ahead would delete everything, and marks made
by one that is behind would let the next leader delete recent data. So :class:`Times` keeps two bounds. A thing is old
only by :meth:`Times.earliest`, the lowest of the clocks; time stamps for later checks of age are :meth:`Times.stamp`,
the highest. Between two leaders nothing is deleted too early as long as one clock that both have read is right. If the
clocks differ by more than a limit, nothing is deleted by age until they are corrected. The clocks are ZooKeeper's,
which stamps the controller epoch; the brokers', by the append times of what the leader reads; and the machine's own.

Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (rendezvous hashing); Kafka's
preferred leaders, which must be in sync before they are elected; Spanner's TrueTime, an interval in place of a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import xxhash

from rollbridge.stream.names import GroupName

SERVED_FACTOR: Final = 10
"""Shortest service of a leader, in multiples of its takeover, so that at most a tenth of the time is lost."""
SERVED_MIN_S: Final = 1.0
"""Shortest service in seconds, so that a flapping coordinator does not move its groups each time."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The live coordinators.

    Attributes:
        ready: By name, the groups that each could lead after a short takeover.
    """

    ready: Mapping[str, Collection[GroupName]] = field(default_factory=dict)

    def is_ready(self, name: str, group: GroupName) -> bool:
        """Return True if a coordinator is alive and could lead the group after a short takeover."""
        return group in self.ready.get(name, ())

    def first_choice(self, group: GroupName) -> str | None:
        """Return the coordinator that should lead a group in the long run; None if there is none."""
        return first_choice(group, self.ready)

    def next_in_line(self, group: GroupName) -> str | None:
        """Return the coordinator that should take a vacant lead; None if there is none."""
        ready = [name for name in self.ready if self.is_ready(name, group)]
        return first_choice(group, ready or self.ready)


def first_choice(group: GroupName, coordinators: Iterable[str]) -> str | None:
    """Return the coordinator that should lead a group; None if there are none."""
    return max(
        coordinators, key=lambda name: (xxhash.xxh64_intdigest(f"{group.node}|{name}".encode()), name), default=None
    )


def stands_in_s(
    group: GroupName, name: str, candidates: Candidates, vacant_s: float, patience_s: float, *, rests: bool = False
) -> float:
    """Return the remaining wait of a coordinator before it competes for a vacant lead, in seconds; 0 is now.

    One that rests comes after all others.
    """
    is_behind = rests and any(other != name for other in candidates.ready)
    if candidates.next_in_line(group) == name and not is_behind:
        return 0.0
    return max((2 if is_behind else 1) * patience_s - vacant_s, 0.0)


def gives_way_in_s(
    group: GroupName, name: str, candidates: Candidates, served_s: float, takeover_s: float
) -> float | None:
    """Return the time that a leader still serves before it hands over, in seconds; 0 is now, None is never."""
    choice = candidates.first_choice(group)
    if choice is None or choice == name or not candidates.is_ready(choice, group):
        return None
    return max(SERVED_FACTOR * takeover_s - served_s, SERVED_MIN_S - served_s, 0.0)


# Terms that get nowhere


UNHEARD_S: Final = 15.0
"""Silence of a partition after which a takeover begins again, and a standby counts as cold."""
DEAF_S: Final = 2 * UNHEARD_S
"""Silence after which a leader hands over; a standby that hears nothing either is cold by then."""
REST_S: Final = 60.0
"""Rest after the first failed term; twice as long after each further one."""
REST_MAX_S: Final = 16 * REST_S


def hands_over_to(group: GroupName, name: str, candidates: Candidates) -> str | None:
    """Return the warm coordinator that takes over from a leader that hears nothing of a buffer; None without one."""
    warm = [other for other in candidates.ready if other != name and candidates.is_ready(other, group)]
    return first_choice(group, warm)


@dataclass(slots=True)
class Setbacks:
    """Failed terms of a group, as this coordinator remembers them."""

    count: int = 0
    _rest_s: float = 0.0
    _until_s: float = 0.0

    def note(self, began_s: float, now_s: float) -> None:
        """Note the failure of a term that began at a time; after a long term the rest is the first again."""
        self.count += 1
        is_first = not self._rest_s or now_s - began_s > REST_MAX_S
        self._rest_s = REST_S if is_first else min(2 * self._rest_s, REST_MAX_S)
        self._until_s = now_s + self._rest_s

    def left_s(self, now_s: float) -> float:
        """Return the remaining rest of this coordinator, in seconds; 0 if none."""
        return max(self._until_s - now_s, 0.0)


# Bounds of the time


SPREAD_MAX_MS: Final = 60_000
"""Difference of clocks above which nothing is deleted by age."""


@dataclass(slots=True)
class Times:
    """Differences of other clocks to a leader's own, which neither jumps nor stops during its term.

    All are in milliseconds; a clock that is behind has one below 0.

    Attributes:
        low_ms, high_ms: Bounds of ZooKeeper's.
        append_ms: A lower bound of the brokers'; None if nothing has been read yet.
        wall_ms: A lower bound of the machine's, if it has moved ahead.
    """

    low_ms: int = 0
    high_ms: int = 0
    append_ms: int | None = None
    wall_ms: int = 0

    def earliest(self, now_ms: int) -> int:
        """Return the time by the lowest clock: what is older by this one is older by all of them."""
        return now_ms + min(self.low_ms, 0)

    def latest(self, now_ms: int) -> int:
        """Return the time by the highest clock: with this stamp nothing seems older than it is."""
        return now_ms + max(self.high_ms, self.append_ms or 0, self.wall_ms, 0)

    def common(self, now_ms: int) -> int:
        return now_ms + self.low_ms

    def stamp(self, now_ms: int) -> int:
        """Return the time to stamp with: the latest; the middle one if the latest is too far off."""
        return self.lease(now_ms) if self.differ else self.latest(now_ms)

    def lease(self, now_ms: int) -> int:
        """Return the time by which leases end: the median of three clocks, right if one of them is wrong.

        The brokers', by which leases begin, is one of them, with its lower bound.
        """
        others = (self.low_ms, min(self.low_ms, 0) if self.append_ms is None else self.append_ms)
        return now_ms + sorted((0, *others))[1]

    @property
    def spread_ms(self) -> int:
        return self.latest(0) - self.earliest(0)

    @property
    def differ(self) -> bool:
        """True if they differ so much that nothing may be deleted by age."""
        return self.spread_ms > SPREAD_MAX_MS

    def witness(self, before_ms: int, witnessed_ms: int, after_ms: int) -> None:
        """Note that ZooKeeper's clock showed ``witnessed_ms`` between two times of the own one."""
        self.low_ms = witnessed_ms - after_ms
        self.high_ms = witnessed_ms - before_ms

    def witness_append(self, appended_ms: int, now_ms: int) -> None:
        """Note that a broker's clock has shown ``appended_ms``, now or earlier; 0 if none was read yet."""
        if not appended_ms:
            return  # nothing was folded in this term; 1970 would contradict the right clocks
        found = appended_ms - now_ms
        self.append_ms = found if self.append_ms is None else max(self.append_ms, found)

    def witness_wall(self, shown_ms: int, now_ms: int) -> None:
        """Note the machine's clock; it may have been set, or the process may have been paused."""
        self.wall_ms = max(self.wall_ms, shown_ms - now_ms)
