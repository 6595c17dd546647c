"""The worked example of PDP-24 ("So as an example: Lets say we have two transactions created against epoch 1").

The proposal's steps are quoted above each test. Its history begins with epoch 1; ours begins with 0, so epoch 0 is one
segment that is scaled to s11, s12, s13 .. s1n before the example begins. Its sij is the j-th segment of epoch i.
"""

from __future__ import annotations

import pytest

from rollbridge.base.ids import SegmentId
from rollbridge.stream.epochs import EpochCause, EpochHistory, EpochRecord
from rollbridge.stream.keyspace import even_ranges
from rollbridge.stream.names import StreamName

N, M = 4, 3
STREAM = StreamName("scope", "stream")

BEFORE = EpochHistory.create(even_ranges(1), created_ms=0)
EPOCH_1 = BEFORE.with_records(BEFORE.plan_scale([0], even_ranges(N), created_ms=1))
S1 = [1, 2, 3, 4]
"""Segment numbers (primary ids) of s11 .. s1n."""
EPOCH_2 = EPOCH_1.with_records(EPOCH_1.plan_scale(S1, even_ranges(M), created_ms=2))
S2 = [5, 6, 7]
"""Segment numbers of s21 .. s2m."""
EPOCH_4 = EPOCH_2.with_records(*EPOCH_2.plan_rolling(1, created_ms=3))


def ids(record: EpochRecord) -> list[SegmentId]:
    return [item.id for item in record.segments]


def target(history: EpochHistory, transaction_epoch: int) -> list[SegmentId] | None:
    """The rule of "CommitTransaction": into the active epoch if it has the same root, else a rolling commit (None)."""
    if history.active.reference_epoch == transaction_epoch:
        return ids(history.active)
    return None


def test_1_epoch_1_holds_s11_to_s1n() -> None:
    assert ids(EPOCH_1.active) == [SegmentId.of(number, epoch=1) for number in S1]
    assert EPOCH_1.active.reference_epoch == 1, "a fresh epoch has a loopback reference"


def test_4_the_scale_makes_epoch_2_with_s21_to_s2m() -> None:
    """scale happens --> new segments after scale s21, s22, s23 ... s2m"""
    assert ids(EPOCH_2.active) == [SegmentId.of(number, epoch=2) for number in S2]
    assert EPOCH_2.active.reference_epoch == 2
    assert EPOCH_2.active.cause is EpochCause.SCALE


def test_5_t2_commits_after_the_scale_and_needs_a_rolling_commit() -> None:
    """t2 commit comes --> (txn epoch 1 < active epoch 2)"""
    assert target(EPOCH_2, transaction_epoch=1) is None


def test_5_epoch_3_duplicates_epoch_1_and_holds_t2() -> None:
    """epoch 3: s11.#3, s12.#3, s13.#3 ... s1n.#3"""
    third = EPOCH_4.record(3)
    assert ids(third) == [SegmentId.of(number, epoch=3) for number in S1]
    assert [item.range for item in third.segments] == [item.range for item in EPOCH_1.active.segments]
    assert third.reference_epoch == 1
    assert third.cause is EpochCause.ROLLING_TRANSACTIONS


def test_5_epoch_4_duplicates_epoch_2_and_is_active() -> None:
    """epoch 4: s21.#4, s22.#4, s23.#4 ... s2m.#4"""
    assert EPOCH_4.active.epoch == 4
    assert ids(EPOCH_4.active) == [SegmentId.of(number, epoch=4) for number in S2]
    assert [item.range for item in EPOCH_4.active.segments] == [item.range for item in EPOCH_2.active.segments]
    assert EPOCH_4.active.reference_epoch == 2
    assert EPOCH_4.active.cause is EpochCause.ROLLING_ACTIVE


@pytest.mark.parametrize("written", [[1], [3], [2, 4], S1])
def test_5_both_epochs_are_these_whatever_t2_wrote_to_since_all_segments_share_keys(written: list[int]) -> None:
    """n = 4 and m = 3 have no end of a range in common but those of the key space, so one part is all of it."""
    assert EPOCH_2.plan_rolling(1, created_ms=3, numbers=written) == (EPOCH_4.record(3), EPOCH_4.record(4))


def test_case_1_t3_begins_before_the_rolling_commit() -> None:
    """case 1: before 4.b: t3 epoch: 2 .. t3 segments => s21.#t3 s22.#t3 .. s2m.#t3

    It stays open over the rolling commit and is merged into epoch 4: "s2i.#4 is a duplicate of s2i so any transaction
    on epoch 2 can be merged into epoch 4 as they share the same primaryId".
    """
    assert EPOCH_2.reference.epoch == 2
    assert ids(EPOCH_2.reference) == [SegmentId.of(number, epoch=2) for number in S2]
    assert target(EPOCH_4, transaction_epoch=2) == [SegmentId.of(number, epoch=4) for number in S2]


def test_case_2_t3_begins_after_the_rolling_commit() -> None:
    """case 2: after 4.b: t3 epoch: 4.. t3 segments => s21.#t3, s22.#t3 .. s2m.#t3

    The segments are those of epoch 2, although epoch 4 is active: "All transactions will always be created against the
    reference epoch" (Controller Metadata, which settles what the overview leaves open). It is merged into epoch 4.
    """
    assert EPOCH_4.active.epoch == 4
    assert EPOCH_4.reference.epoch == 2
    assert ids(EPOCH_4.reference) == [SegmentId.of(number, epoch=2) for number in S2]
    assert target(EPOCH_4, EPOCH_4.reference.epoch) == [SegmentId.of(number, epoch=4) for number in S2]


def test_reference_epochs_of_controller_metadata() -> None:
    """if epoch 2 was created as a duplicate of epoch 0 then 2 will have reference epoch set to 0. Now say a new epoch 4
    needs to be created which is a duplicate of 2. It will refer to the reference epoch in 2 which is 0."""
    history = EpochHistory.create(even_ranges(2), created_ms=0)
    history = history.with_records(history.plan_scale([0], even_ranges(4)[:2], created_ms=1))
    history = history.with_records(*history.plan_rolling(0, created_ms=2))
    assert [record.reference_epoch for record in history.records] == [0, 1, 0, 1]
    history = history.with_records(*history.plan_rolling(2, created_ms=3))
    assert [record.reference_epoch for record in history.records] == [0, 1, 0, 1, 0, 1]
    assert ids(history.record(4)) == [SegmentId.of(0, 4), SegmentId.of(1, 4)]
    assert ids(history.record(5)) == [SegmentId.of(2, 5), SegmentId.of(3, 5), SegmentId.of(1, 5)]
    assert history.reference.epoch == 1
