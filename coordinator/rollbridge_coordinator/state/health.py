"""Whether a coordinator could lead a group now, and why not. Pure; the daemon says what it knows of itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """What a coordinator knows of itself at one moment."""

    connected: bool
    """Its ZooKeeper session is known to live."""
    registered: bool
    """It stands among the coordinators, in this session."""
    answered: bool
    """Kafka answers, as far as is known."""
    ended: Sequence[str] = ()
    """Groups whose thread has ended although the coordinator goes on."""


def faults(vitals: Vitals) -> Iterator[str]:
    """What keeps it from leading; nothing if it is healthy, whether or not there is a group for it to lead."""
    if not vitals.connected:
        yield "not connected to ZooKeeper"
    elif not vitals.registered:
        yield "not registered among the coordinators"
    if not vitals.answered:
        yield "Kafka does not answer"
    for group in vitals.ended:
        yield f"the thread of group {group} has ended"
