"""Seeded simulation of takeovers with streams that cannot be read, now and then or for good, and of leaders that die.

One stream is innocent, one comes back whatever befalls it, and of one the buffer is lost in the end. What must hold:

- no transaction has two outcomes, and what is visible is all of the committed ones, once;
- what names only streams that come back is committed if that was asked for, however long they were away;
- what a lost buffer has taken with it has an outcome, if a record tells of it, and that is not "committed";
- the innocent stream goes on, whatever has become of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from coordinator.tests.sim_term import assert_noticed
from coordinator.tests.sim_unled import Run
from rollbridge.base.effects import Steps
from rollbridge.metadata.changes import BUFFER_LOST, CommittingTransactions
from rollbridge_coordinator.commit import roll
from rollbridge_coordinator.core import loop
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.stream_state import JournalState
from rollbridge_coordinator.history import takeover
from rollbridge_coordinator.streams import unled


@pytest.mark.parametrize("seed", range(12))
def test_no_stream_suffers_for_another_that_cannot_be_read(seed: int) -> None:
    run = Run(seed)
    run.go()
    assert BUFFER_LOST in run.faults


def _forgetting(self: JournalState, streams: Any, faults: Any, unled: Any) -> Any:
    return _changes(self, streams, faults, ())


_changes = JournalState.changes


def _hasty(group: GroupState, now_ms: int) -> Steps[frozenset[bytes]]:
    for item in group.unled.values():
        item.is_lost = True
    return (yield from _end_lost(group, now_ms))


_end_lost = unled.end_lost


def _rash(group: GroupState, unreadable: Mapping[str, str]) -> Steps[None]:
    yield from _load_streams(group, unreadable)
    for own, item in group.unled.items():
        fault = group.waits.faults.get(own)
        item.is_lost = fault is not None and fault.code == BUFFER_LOST


_load_streams = unled.load_streams


def _silent(group: GroupState, now_ms: int) -> Steps[frozenset[bytes]]:
    yield from ()
    return frozenset()


def _whole(group: GroupState, node: str) -> Steps[bool]:
    yield from ()
    return group.unled.keys().isdisjoint(group.waits.pending_changes[node].work.streams)


def _trusting(group: GroupState, committing: CommittingTransactions) -> CommittingTransactions:
    return committing


def _none(*_: Any) -> None:
    return None


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "what is not there at the first look is lost": lambda patch: patch.setattr(takeover, "load_streams", _rash),
    "transactions do not wait for what is not led": lambda patch: patch.setattr(GroupState, "waits_for", _none),
    "the journal forgets what is not led": lambda patch: patch.setattr(JournalState, "changes", _forgetting),
    "what cannot be read counts as lost": lambda patch: patch.setattr(takeover, "end_lost", _hasty),
    "a rolling commit waits as a whole for what is not led": lambda patch: patch.setattr(loop, "take_apart", _whole),
    "a rolling commit takes what is only open": lambda patch: patch.setattr(roll, "_still_named", _trusting),
    "nothing is said of what is lost": lambda patch: patch.setattr(takeover, "end_lost", _silent),
}


@pytest.mark.long_cases("a rolling commit waits as a whole for what is not led")
@pytest.mark.parametrize("name", MUTANTS)
def test_the_simulation_finds_each_defect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    assert_noticed(lambda seed: Run(seed).go(), (22, *range(12)))  # 22 finds that rolling commits wait as a whole
