"""Owners of a transaction: by each buffer the latest one writes, by the home stream's buffer the latest one ends."""

from __future__ import annotations

from rollbridge.base.ids import OWNER_PART
from rollbridge.buffer.frames import BeginFrame
from rollbridge.buffer.owners import Owners

HOME, OTHER = "sales/orders", "sales/refunds"
FIRST = BeginFrame("billing", 1, "", 60_000, {HOME: 0, OTHER: 0})
SECOND, THIRD = (
    BeginFrame("audit", 4, "", 60_000, {HOME: 0, OTHER: 0}),
    BeginFrame("late", 2, "", 60_000, {HOME: 0, OTHER: 0}),
)


def test_the_home_stream_says_who_ends_it_and_each_buffer_who_writes() -> None:
    owners = Owners(FIRST)
    assert (owners.part, owners.session) == (OWNER_PART, ("billing", 1))
    assert owners.hand_over(OTHER, 7, SECOND)
    assert (owners.part, owners.session) == (OWNER_PART, ("billing", 1)), "that buffer does not say"
    assert (owners.last(OTHER), owners.last(HOME)) == (7, OWNER_PART)
    assert owners.is_former(OTHER, OWNER_PART)
    assert not owners.is_former(HOME, OWNER_PART)
    assert owners.hand_over(HOME, 7, SECOND)
    assert (owners.part, owners.session, owners.parts) == (7, ("audit", 4), (OWNER_PART, 7))
    assert owners.resumed == 2
    assert not owners.hand_over(HOME, 7, THIRD)
    assert not owners.hand_over(HOME, 3, THIRD)
    assert (owners.part, owners.session) == (7, ("audit", 4)), "an earlier owner that comes late is none"


def test_what_another_process_writes_for_an_owner_is_not_a_former_owners() -> None:
    owners = Owners(FIRST)
    assert not owners.is_former(HOME, 12)
    owners.hand_over(HOME, 7, SECOND)
    assert not owners.is_former(HOME, 12)
    assert not owners.is_former(HOME, 7)


def test_the_first_owners_begin_counts_until_another_one_has_come() -> None:
    owners = Owners(SECOND)
    owners.adopt(FIRST)
    assert owners.session == ("billing", 1)
    owners.hand_over(HOME, 7, SECOND)
    owners.adopt(THIRD)
    assert owners.session == ("audit", 4)


def test_restored_owners_are_as_they_were() -> None:
    before, after = Owners(FIRST), Owners(FIRST)
    for part, begin in ((7, SECOND), (9, THIRD)):
        before.hand_over(HOME, part, begin)
    before.hand_over(OTHER, 9, THIRD)
    after.restore(OTHER, before.of(OTHER), before.session)
    assert (after.part, after.session) == (OWNER_PART, ("billing", 1))
    after.restore(HOME, before.of(HOME), before.session)
    for stream in (HOME, OTHER):
        assert after.of(stream) == before.of(stream)
    assert (after.part, after.session, after.resumed) == (9, ("late", 2), before.resumed)
    after.restore(HOME, (), ("nobody", 1))
    assert (after.part, after.session) == (9, ("late", 2))
