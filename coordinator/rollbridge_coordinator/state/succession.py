"""Succession: when a coordinator stands for the lead of a group, and when it gives way. Pure.

Each group has a first choice by rendezvous hashing, so groups spread evenly and few move when a coordinator comes or
goes. But that somebody leads comes first: a takeover costs time in which nobody serves, so

- a vacant lead is for whoever is *warm*, which is to say has followed the group closely and has little left to read;
  among those, and if nobody is, it is for the first choice. All others wait for a moment, lest all begin at once;
- who has taken over never gives way before it has served for many times as long as that took, and then only to a
  first choice that says it is warm, so what is done is not thrown away, and the next takeover is a short one.

The decision is made before the controller epoch is raised, which is what makes a takeover cost something.

**Terms that get nowhere.** A leader whose brokers refuse it, or do not answer, may be cut off from what others reach. A
failed request ends its term; if it only hears nothing of a buffer for :data:`DEAF_S`, it hands over to a coordinator
that does (:func:`hands_over_to`). After either it rests (:class:`Setbacks`): it is the last one to stand for the group,
and not ready for it, so that nobody gives way to it before the rest is over. Without others it leads on as before.

**Time.** A leader deletes by age, and any clock may be wrong: one that is ahead would delete everything, and marks made
by one that is behind would let the next leader delete what is young. So :class:`Times` keeps two bounds. A thing is old
only by :meth:`Times.earliest`, the lowest of the clocks; what will be judged by its age is stamped with
:meth:`Times.stamp`, the highest. Between two leaders nothing is deleted too early as long as one clock that both have
asked is right. If the clocks differ by more than a limit, nothing is deleted for its age until they are set right. The
clocks are ZooKeeper's, which stamps the controller epoch; the brokers', by the append times of what the leader reads;
and the machine's own.

Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (rendezvous hashing); Kafka's
preferred leaders, which must be in sync before they are elected; Spanner's TrueTime, an interval in place of a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import xxhash

from rollbridge.model.names import GroupName

SERVED_FACTOR: Final = 10
"""A leader serves at least so many times as long as its takeover took, so that at most a tenth of the time is lost."""
SERVED_MIN_S: Final = 1.0
"""And at least so long, lest a coordinator that comes and goes moves its groups each time."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The coordinators that are alive.

    Attributes:
        ready: By name, the groups that each could lead with a short takeover.
    """

    ready: Mapping[str, Collection[GroupName]] = field(default_factory=dict)

    def is_ready(self, name: str, group: GroupName) -> bool:
        """Return True if a coordinator is there and could lead the group with a short takeover."""
        return group in self.ready.get(name, ())

    def first_choice(self, group: GroupName) -> str | None:
        """Return who should lead a group in the long run; None if nobody is there."""
        return first_choice(group, self.ready)

    def next_in_line(self, group: GroupName) -> str | None:
        """Return who should take a vacant lead; None if nobody is there."""
        ready = [name for name in self.ready if self.is_ready(name, group)]
        return first_choice(group, ready or self.ready)


def first_choice(group: GroupName, coordinators: Iterable[str]) -> str | None:
    """Return which of the coordinators should lead a group; None if there are none."""
    return max(
        coordinators, key=lambda name: (xxhash.xxh64_intdigest(f"{group.node}|{name}".encode()), name), default=None
    )


def stands_in_s(
    group: GroupName, name: str, candidates: Candidates, vacant_s: float, patience_s: float, *, rests: bool = False
) -> float:
    """Return how long a coordinator waits before it stands for a lead vacant for a time, in seconds; 0 is now.

    One that rests stands behind all others.
    """
    is_behind = rests and any(other != name for other in candidates.ready)
    if candidates.next_in_line(group) == name and not is_behind:
        return 0.0
    return max((2 if is_behind else 1) * patience_s - vacant_s, 0.0)


def gives_way_in_s(
    group: GroupName, name: str, candidates: Candidates, served_s: float, takeover_s: float
) -> float | None:
    """Return how long a leader still serves before it gives way, in seconds; 0 is now, None if to nobody.

    Args:
        group: Which group it leads.
        name: Its name.
        candidates: Who is alive, as far as it knows.
        served_s: How long it has served.
        takeover_s: How long its takeover took.
    """
    choice = candidates.first_choice(group)
    if choice is None or choice == name or not candidates.is_ready(choice, group):
        return None
    return max(SERVED_FACTOR * takeover_s - served_s, SERVED_MIN_S - served_s, 0.0)


# Terms that get nowhere


UNHEARD_S: Final = 15.0
"""Time without a word of a partition after which a takeover begins again, and a standby counts as cold."""
DEAF_S: Final = 2 * UNHEARD_S
"""The same time after which a leader hands over; a standby that does not hear either is cold by then."""
REST_S: Final = 60.0
"""Rest after the first term that got nowhere; twice as long after each further one."""
REST_MAX_S: Final = 16 * REST_S


def hands_over_to(group: GroupName, name: str, candidates: Candidates) -> str | None:
    """Return who takes over from a leader that hears nothing of a buffer: one that is warm; None if nobody is."""
    warm = [other for other in candidates.ready if other != name and candidates.is_ready(other, group)]
    return first_choice(group, warm)


@dataclass(slots=True)
class Setbacks:
    """Terms of a group that got nowhere, as this coordinator remembers them.

    Attributes:
        count: How many there were.
    """

    count: int = 0
    _rest_s: float = 0.0
    _until_s: float = 0.0

    def note(self, began_s: float, now_s: float) -> None:
        """Note that a term which began at a time has got nowhere; the rest is the first again if it lasted for long."""
        self.count += 1
        is_first = not self._rest_s or now_s - began_s > REST_MAX_S
        self._rest_s = REST_S if is_first else min(2 * self._rest_s, REST_MAX_S)
        self._until_s = now_s + self._rest_s

    def left_s(self, now_s: float) -> float:
        """Return how long this coordinator still rests, in seconds; 0 if it does not."""
        return max(self._until_s - now_s, 0.0)


# Bounds of the time


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
        """Return the time by the lowest clock: what is older than something by this one is so by all of them."""
        return now_ms + min(self.low_ms, 0)

    def latest(self, now_ms: int) -> int:
        """Return the time by the highest clock: with this stamp nothing seems older than it is."""
        return now_ms + max(self.high_ms, self.append_ms or 0, self.wall_ms, 0)

    def common(self, now_ms: int) -> int:
        """Return the time by ZooKeeper's clock, which is the same one for all leaders."""
        return now_ms + self.low_ms

    def stamp(self, now_ms: int) -> int:
        """Return the time to stamp with: the latest; the middle one if the latest is so far off that it would last."""
        return self.lease(now_ms) if self.differ else self.latest(now_ms)

    def lease(self, now_ms: int) -> int:
        """Return the time by which leases end: the middle one of three clocks, right if one of them is wrong.

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
        """Note that ZooKeeper's clock showed ``witnessed_ms`` between two times of the own one."""
        self.low_ms = witnessed_ms - after_ms
        self.high_ms = witnessed_ms - before_ms

    def witness_append(self, appended_ms: int, now_ms: int) -> None:
        """Note that a broker's clock has shown ``appended_ms``, now or at any time before; 0 if none was met yet."""
        if not appended_ms:
            return  # nothing was folded in this term; 1970 would be a witness against whoever is right
        found = appended_ms - now_ms
        self.append_ms = found if self.append_ms is None else max(self.append_ms, found)

    def witness_wall(self, shown_ms: int, now_ms: int) -> None:
        """Note that the machine's clock shows ``shown_ms``; it may have been set, or the process have stood still."""
        self.wall_ms = max(self.wall_ms, shown_ms - now_ms)
