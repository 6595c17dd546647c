"""Waiting for native transactions of others, and for leaders that are away, without holding anybody up.

No segment can be sealed while a native transaction is open on it, or while nobody leads it. So it is looked before a
scale or rolling commit is begun: what needs it waits then, with later commits of its connections, and all others go on.
There is no bound but the one of Kafka: these transactions end by themselves (``transaction.max.timeout.ms``, 15
minutes). What comes up between the look and the seal is waited for in
:mod:`rollbridge_coordinator.procedures.suspended`.

What is open at two looks is waited for. Others are of the kind that conditional writers make, which end within
milliseconds; there may always be one of these.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from rollbridge.model.foreign import ForeignTransaction, Obstacle, name_some
from rollbridge.model.under_way import Roll
from rollbridge_coordinator.state.group import GroupState, HeldRoll, Wait
from rollbridge_coordinator.state.steps import Steps, end_foreign, look_for_obstacles

logger = logging.getLogger(__name__)

LOOK_SOON_MS: Final = 20
"""How soon it is looked a second time: most native transactions, our own among them, end within milliseconds."""
LOOK_AGAIN_MS: Final = 200
"""How soon it is looked again after that."""
TELL_MS: Final = 60_000
"""How often a log says for whom something waits."""


def look_again(topics: Sequence[str], before: Wait | None, now_ms: int) -> Steps[Wait | None]:
    """Return how it is waited for what keeps topics from being sealed, after an earlier wait; None if that is over.

    An earlier wait in which nothing was seen was for something else: what is found now is looked at twice all the same.
    """
    found = frozenset((yield from look_for_obstacles(topics)))
    if before is None or not before.seen:
        since_ms = now_ms if before is None else before.since_ms
        return Wait(since_ms, now_ms + LOOK_SOON_MS, found) if found else None
    lasting = found & before.seen
    if not lasting:
        return None
    return replace(before, due_ms=now_ms + LOOK_AGAIN_MS, seen=found, lasting=lasting)


def is_due(wait: Wait, now_ms: int, most_ms: int = LOOK_AGAIN_MS) -> bool:
    """Return whether it is to be looked again, ``most_ms`` after the last look: the clock may have been set back."""
    return not now_ms < wait.due_ms <= now_ms + most_ms


def tell(group: GroupState, what: str, wait: Wait, now_ms: int) -> Wait:
    """Say in the log, once a minute, for whom something waits."""
    if not wait.lasting or (wait.told_ms is not None and 0 <= now_ms - wait.told_ms < TELL_MS):
        return wait
    named = name_some(wait.lasting)
    logger.info("%s: %s waits for %s", group.name, what, named)
    return replace(wait, told_ms=now_ms)


def abort_lasting(group: GroupState, found: Collection[Obstacle]) -> Steps[str | None]:
    """Abort native transactions of others, as was asked for; why that could not be done, None if it was."""
    foreign = sorted((item for item in found if isinstance(item, ForeignTransaction)), key=str)
    if not foreign:
        return None
    failed = yield from end_foreign(foreign)
    if failed is None:
        group.counts["foreign_aborted"] += len(foreign)
    return failed


def must_wait(group: GroupState, rolls: Collection[Roll], now_ms: int) -> Steps[bool]:
    """Return whether something keeps what a rolling commit would seal from being sealed; nothing is written."""
    key = tuple(sorted(roll.stream for roll in rolls))
    streams = [group.streams[name] for name in key]
    topics = [stream.topic_of(item.id) for stream in streams for item in stream.history.active.segments]
    before = group.held_rolls.pop(key, None)
    wait = yield from look_again(topics, None if before is None else before.wait, now_ms)
    if wait is None:
        return False
    told = tell(group, f"a rolling commit of {', '.join(key)}", wait, now_ms)
    group.counts["rolling_commits_held"] += wait.told_ms is None and told.told_ms is not None
    group.held_rolls[key] = HeldRoll(told)
    return True


def release_due(group: GroupState, now_ms: int) -> None:
    """Let rolling commits that wait be planned again, so that it is looked again; forget those that nobody needs."""
    for key, item in list(group.held_rolls.items()):
        if not is_due(item.wait, now_ms):
            continue
        if not item.is_due:
            item.is_due = True
        else:
            del group.held_rolls[key]  # it was free to be planned for a whole turn, and was not
