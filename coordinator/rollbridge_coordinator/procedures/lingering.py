"""Lingering: merge further late commits into the duplicates of a rolling commit, before these are sealed.

:mod:`rollbridge_coordinator.state.linger` says how long they stay open. Until they are sealed the record of the rolling
commit stands in ZooKeeper, so whoever leads next seals them at once. Whatever else asks for their ends, or for the one
place of such records, ends it first: requests, conditions, another rolling commit, a stream in an error state.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollbridge.model import paths
from rollbridge.model.pieces import BufferedTransaction
from rollbridge_coordinator.procedures.merge import merge_direct
from rollbridge_coordinator.procedures.rolling import close_roll
from rollbridge_coordinator.state.effects import EndOffsets, Now, Steps
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.linger import Lingering
from rollbridge_coordinator.state.planning import line_of


def merge_late(group: GroupState, transactions: Sequence[BufferedTransaction], now_ms: int) -> Steps[None]:
    """Merge late commits into lingering duplicates; seal these instead if anything was written to what continues them.

    The look comes after the commits were asked for. So whatever is written there and not seen was under way at the same
    time, or came later, and may stand behind them.
    """
    lingering = group.lingering
    if lingering is None or (yield from _is_written_behind(lingering)):
        yield from end_linger(group)
        return
    began_ms = group.times.stamp((yield from Now()))
    if not (yield from merge_direct(group, transactions, now_ms, lingering.committing.rolls)):
        return
    ended_ms = group.times.stamp((yield from Now()))
    group.late_commits.note(lingering.committing.streams, began_ms, ended_ms, len(set(map(line_of, transactions))))
    group.counts["late_commits_merged"] += len(transactions)
    lingering.prolong(ended_ms, group.settings.linger_ms_max)


def watch_linger(group: GroupState) -> Steps[None]:
    """Seal lingering duplicates if their time is over, or if readers have something to read behind them."""
    lingering = group.lingering
    if lingering is None:
        return
    now_ms = group.times.stamp((yield from Now()))
    if lingering.is_over(now_ms) or (yield from _is_written_behind(lingering)):
        yield from end_linger(group)


def end_linger(group: GroupState) -> Steps[None]:
    """Seal lingering duplicates, if there are any, which ends their rolling commit."""
    lingering, group.lingering = group.lingering, None
    if lingering is None:
        return
    if not lingering.is_used:
        group.late_commits.was_in_vain(lingering.committing.streams)
    yield from close_roll(group, lingering.committing, paths.committing(group.name))


def _is_written_behind(lingering: Lingering) -> Steps[bool]:
    return any((yield from EndOffsets(lingering.places)).values())
