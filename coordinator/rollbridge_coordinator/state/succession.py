"""Succession: when a coordinator stands for the lead of a group, and when it gives way. Pure.

Each group has a first choice by rendezvous hashing, so groups spread evenly and few move when a coordinator comes or
goes. But that somebody leads comes first: a takeover costs time in which nobody serves, so

- a vacant lead is for whoever is *warm*, which is to say has followed the group closely and has little left to read;
  among those, and if nobody is, it is for the first choice. All others wait for a moment, lest all begin at once;
- who has taken over never gives way before it has served for many times as long as that took, and then only to a
  first choice that says it is warm, so what is done is not thrown away, and the next takeover is a short one.

The decision is made before the controller epoch is raised, which is what makes a takeover cost something.

Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (rendezvous hashing); Kafka's
preferred leaders, which must be in sync before they are elected.
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
        """Whether a coordinator is there and could lead the group with a short takeover."""
        return group in self.ready.get(name, ())

    def first_choice(self, group: GroupName) -> str | None:
        """Who should lead a group in the long run; None if nobody is there."""
        return first_choice(group, self.ready)

    def next_in_line(self, group: GroupName) -> str | None:
        """Who should take a vacant lead; None if nobody is there."""
        ready = [name for name in self.ready if self.is_ready(name, group)]
        return first_choice(group, ready or self.ready)


def first_choice(group: GroupName, coordinators: Iterable[str]) -> str | None:
    """Which of the coordinators should lead a group; None if there are none."""
    return max(
        coordinators, key=lambda name: (xxhash.xxh64_intdigest(f"{group.node}|{name}".encode()), name), default=None
    )


def stands_in_s(group: GroupName, name: str, candidates: Candidates, vacant_s: float, patience_s: float) -> float:
    """How long a coordinator still waits before it stands for a lead that has been vacant for a time, s; 0 is now."""
    if candidates.next_in_line(group) == name:
        return 0.0
    return max(patience_s - vacant_s, 0.0)


def gives_way_in_s(
    group: GroupName, name: str, candidates: Candidates, served_s: float, takeover_s: float
) -> float | None:
    """How long a leader still serves before it gives way, s; None if there is nobody to give way to. 0 is now.

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
