"""Rolling commits wait for native transactions of others without holding anybody up.

No segment can be sealed while a native transaction is open on it, and a leader that seals does nothing else. So it is
looked before anything is begun: what needs a rolling commit waits then, with later commits of its connections, and all
others go on. There is no bound but the one of Kafka: these transactions end by themselves
(``transaction.max.timeout.ms``, 15 minutes).
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final

from bridge.model.foreign import ForeignTransaction
from bridge.model.under_way import Roll
from coordinator.group import GroupState, HeldRoll
from coordinator.steps import Steps, look_for_foreign

logger = logging.getLogger(__name__)

LOOK_SOON_MS: Final = 20
"""How soon it is looked a second time: most native transactions, our own among them, end within milliseconds."""
LOOK_AGAIN_MS: Final = 200
"""How soon it is looked again after that."""
TELL_MS: Final = 60_000
"""How often a log says for whom a rolling commit waits."""
NAMED_MAX: Final = 5
"""How many of them are named."""


def name_some(found: Collection[ForeignTransaction]) -> str:
    """Return who holds native transactions open, for people."""
    named = "; ".join(sorted(map(str, found))[:NAMED_MAX])
    return named if len(found) <= NAMED_MAX else f"{named}; and {len(found) - NAMED_MAX} more"


def must_wait(group: GroupState, rolls: Collection[Roll], now_ms: int) -> Steps[bool]:
    """Return whether native transactions of others are open on what a rolling commit would seal; nothing is written.

    One that is open at two looks is waited for, as in a scale.
    """
    key = tuple(sorted(roll.stream for roll in rolls))
    streams = [group.streams[name] for name in key]
    topics = [stream.topic_of(item.id) for stream in streams for item in stream.history.active.segments]
    found = frozenset((yield from look_for_foreign(topics)))
    before = group.held_rolls.get(key)
    lasting = found if before is None else found & before.seen
    if not lasting:
        group.held_rolls.pop(key, None)
        return False
    if before is None:
        group.held_rolls[key] = HeldRoll(now_ms + LOOK_SOON_MS, found)
        return True
    told_ms = before.told_ms
    if told_ms is None:
        group.counts["rolling_commits_held"] += 1
    if told_ms is None or not 0 <= now_ms - told_ms < TELL_MS:
        told_ms = now_ms
        logger.info(
            "%s: a rolling commit of %s waits for native transactions of others: %s",
            group.name,
            ", ".join(key),
            name_some(lasting),
        )
    group.held_rolls[key] = HeldRoll(now_ms + LOOK_AGAIN_MS, found, told_ms=told_ms)
    return True


def release_due(group: GroupState, now_ms: int) -> None:
    """Let rolling commits that wait be planned again, so that it is looked again; forget those that nobody needs."""
    for key, item in list(group.held_rolls.items()):
        if now_ms < item.due_ms <= now_ms + LOOK_AGAIN_MS:
            continue  # no longer than that, should the clock have been set back
        if item.waits:
            item.waits = False
        else:
            del group.held_rolls[key]  # it was free to be planned for a whole turn, and was not
