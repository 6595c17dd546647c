"""Waiting for native transactions of others: what is open at two looks is waited for, whatever was before."""

from __future__ import annotations

import pytest

from coordinator.tests.makers import Bench
from rollbridge.base.effects import AnyEffect, run
from rollbridge.stream.conditions import ForeignTransaction, name_some, with_own
from rollbridge.stream.names import Partition
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.waits import Wait
from rollbridge_coordinator.streams.pending_changes import (
    FAR_MS,
    LOOK_AGAIN_MS,
    LOOK_SOON_MS,
    abort_lasting,
    look_again,
)

ONE, OTHER = (ForeignTransaction("topic", producer_id, 0, 0, -1) for producer_id in (1, 2))
NOW_MS = 5_000
HERE, ELSEWHERE = frozenset({("topic", 0)}), frozenset({("topic", 0), ("other", 0)})


def seen(*open_ones: ForeignTransaction, since_ms: int = 1_000, places: frozenset[Partition] = HERE) -> Wait:
    return Wait(since_ms, NOW_MS, frozenset(open_ones), places=places)


@pytest.mark.parametrize(
    ("before", "found", "after"),
    [
        (None, [], None),
        (None, [ONE], (NOW_MS, LOOK_SOON_MS, [])),
        (seen(ONE), [ONE, OTHER], (1_000, LOOK_AGAIN_MS, [ONE])),
        (seen(ONE), [OTHER], None),
        (seen(ONE), [], None),
        (seen(), [ONE], (1_000, LOOK_SOON_MS, [])),
        (seen(), [], None),
        (seen(ONE, places=ELSEWHERE), [OTHER], (1_000, LOOK_SOON_MS, [])),
        (seen(ONE, places=ELSEWHERE), [], None),
    ],
    ids=["free", "first", "lasts", "another", "over", "after something else", "nothing then", "elsewhere", "free here"],
)
def test_what_is_open_at_two_looks_is_waited_for(
    before: Wait | None, found: list[ForeignTransaction], after: tuple[int, int, list[ForeignTransaction]] | None
) -> None:
    def answer(effect: AnyEffect) -> list[ForeignTransaction]:
        assert isinstance(effect, fx.LookForObstacles)
        return found

    wait = run(look_again([("topic", 0)], before, NOW_MS), answer)
    if after is None:
        assert wait is None
    else:
        since_ms, pause_ms, lasting = after
        assert wait == Wait(since_ms, NOW_MS + pause_ms, frozenset(found), frozenset(lasting), places=HERE)


@pytest.mark.parametrize("late_ms", [FAR_MS - 1, FAR_MS, 60_000])
@pytest.mark.parametrize("third", [[], [ONE], [OTHER]], ids=["over", "lasts", "another"])
def test_what_has_begun_since_a_look_long_ago_is_waited_for_if_it_lasts(
    late_ms: int, third: list[ForeignTransaction]
) -> None:
    """Or else a leader that had much to do would have its seal wait for it, and all writers with it."""
    looks = iter([[ONE], third])
    before = Wait(1_000, NOW_MS - late_ms, frozenset({OTHER}), places=HERE)
    wait = run(look_again([("topic", 0)], before, NOW_MS), lambda _: next(looks))
    if late_ms < FAR_MS or not third:
        assert wait is None
    else:
        assert wait == Wait(1_000, NOW_MS + LOOK_AGAIN_MS, frozenset(third), frozenset(third), places=HERE)


def test_what_the_leader_has_decided_itself_is_waited_for_and_never_aborted() -> None:
    """Its id is locked while a topic lacks replicas: to take it over would hold up the group, and fence the leader."""
    group = Bench({}).group
    ids = [group.name.transactional_id(number) for number in range(3)]
    own = ForeignTransaction("topic", 3, 0, 7, -1, transactional_id=ids[1])
    aborted: list[ForeignTransaction] = []

    def answer(effect: AnyEffect) -> None:
        assert isinstance(effect, fx.EndForeign)
        aborted.extend(effect.transactions)

    assert run(abort_lasting(group, with_own([own], ids)), answer) is None
    assert aborted == []
    found = with_own([own, ONE], ids)
    assert run(abort_lasting(group, found), answer) is None
    assert aborted == [ONE]
    assert group.counts["foreign_aborted"] == 1
    assert "leader's own native transaction on topic" in name_some(found)
