"""Chores: housekeeping that may be refused for good without stopping anybody.

A broker or ZooKeeper may refuse for ever what no transaction waits for: a right is missing, a quota is exceeded, a
topic of snapshots was reconfigured. Such a chore rests for a while and is tried again, ever less often; all others go
on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rollbridge_coordinator.state.effects import Refused
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.steps import Steps, abort_round

logger = logging.getLogger(__name__)

Chore = Callable[[GroupState, int], Steps[None]]


def undertake(group: GroupState, name: str, chore: Chore, now_ms: int) -> Steps[None]:
    """Do a chore unless it rests; one that is refused leaves nothing behind in the round, and rests."""
    if group.housekeeping.is_resting(name, now_ms):
        return
    try:
        yield from chore(group, now_ms)
    except Refused as refused:
        yield from abort_round()
        group.log_end = group.draft = None
        group.counts["chores_refused"] += 1
        pause_ms = group.housekeeping.rest(name, now_ms)
        logger.warning(
            "%s: housekeeping (%s) is refused, everything else goes on; it is tried again in %.0f s: %s",
            group.name,
            name,
            pause_ms / 1000,
            refused,
        )
    else:
        group.housekeeping.rested(name)
