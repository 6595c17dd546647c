"""Records of ongoing transactions: both directions, damage, and which of them a new leader goes by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.base.ids import COUNT_MAX, COUNTER_MAX, TransactionId
from rollbridge.buffer.fold import BufferFold, BufferLimits
from rollbridge.buffer.frames import BeginFrame, PieceKey
from rollbridge.buffer.replay import (
    FRAME_BYTES,
    OngoingTransaction,
    OngoingTransactions,
    choose_ongoing,
    decode_ongoing,
    is_ongoing,
    ongoing_keys,
)
from rollbridge.buffer.snapshots import Snapshot, index_keys
from rollbridge.buffer.state import FrameRef
from rollbridge.errors import CorruptDataError

PARTITION = ("sales.orders.transaction-buffer", 1)
STREAMS = {"sales/payments": 3, "sales/orders": 7}
BEGIN = BeginFrame("loader", 4, "nightly", 86_400_000, STREAMS)

FRAMES = st.lists(
    st.tuples(
        st.integers(0, 1 << 40), st.integers(0, 1 << 30), st.integers(0, 1 << 20), st.integers(0, COUNT_MAX),
        st.integers(1, 1 << 20), st.integers(0, 1 << 30), st.integers(0, 1 << 20),
    ),
    max_size=5,
)  # fmt: skip


def frame(offset: int, part: int, segment: int, count: int, records: int, size: int, start: int) -> FrameRef:
    return FrameRef(PARTITION, offset, PieceKey(part, 1, segment), count, records, size, None, start)


def ongoing(counter: int = 1, frames: tuple[FrameRef, ...] = (), **changes: Any) -> OngoingTransaction:
    made = OngoingTransaction(
        id=TransactionId.of(2, counter).bytes,
        begin=BEGIN,
        begun_ms=1_000,
        is_begun=True,
        first_position=17,
        log_position=40,
        owners=(9,),
        owner=("loader", 5),
        frames=frames or (frame(18, 0, 2, 0, 100, 10_240, 0), frame(21, 9, 3, 100, 50, 5_120, 61)),
    )
    return replace(made, **changes)


def record(*transactions: OngoingTransaction, **changes: Any) -> OngoingTransactions:
    made = OngoingTransactions(
        partition=PARTITION,
        topic_id="id",
        generation=4,
        controller_epoch=3,
        position=100,
        replay_position=95,
        commit_log_position=50,
        transactions=transactions or (ongoing(),),
    )
    return replace(made, **changes)


def snapshot(**changes: Any) -> Snapshot:
    made = Snapshot(
        partition=PARTITION,
        topic_id="id",
        generation=4,
        controller_epoch=3,
        taken_ms=1_000,
        position=100,
        max_read_position=17,
        commit_log_position=40,
        commit_log_end=60,
        sequence_id=0,
        indexes=(),
        first_position=0,
        aborts=(),
    )
    return replace(made, **changes)


@given(st.integers(0, COUNTER_MAX), FRAMES, st.booleans(), st.none() | st.text(max_size=9))
def test_any_transaction_round_trips(counter: int, frames: list[Any], is_begun: bool, label: str | None) -> None:
    begin = replace(BEGIN, label=label)
    item = ongoing(counter, tuple(frame(*row) for row in frames), is_begun=is_begun, begin=begin)
    assert decode_ongoing(record(item).encode()) == record(item)


def test_a_frame_beyond_the_last_record_of_a_part_is_damage() -> None:
    known = record(ongoing(1, (frame(18, 0, 2, COUNT_MAX, 1, 9, 0),)))
    assert decode_ongoing(known.encode()) == known
    with pytest.raises(CorruptDataError, match="begins at record"):
        decode_ongoing(record(ongoing(1, (frame(18, 0, 2, COUNT_MAX + 1, 1, 9, 0),))).encode())


def test_a_frame_takes_few_bytes() -> None:
    frames = tuple(frame(18 + 3 * item, 0, 2, 100 * item, 100, 10_240, 61) for item in range(10_000))
    assert len(record(ongoing(1, frames)).encode()) < len(frames) * FRAME_BYTES * 0.8


def test_a_transaction_of_another_buffer_is_refused() -> None:
    begin = BeginFrame("loader", 4, None, 1_000, {"sales/payments": 3})
    with pytest.raises(CorruptDataError, match="contradicts itself"):
        decode_ongoing(record(ongoing(begin=begin)).encode())


def test_the_keys_are_none_of_an_index() -> None:
    assert [is_ongoing(key) for key in (*ongoing_keys(PARTITION), *index_keys(PARTITION))] == [True, True, False, False]


@pytest.mark.parametrize(
    ("changes", "is_used"),
    [
        ({}, True),
        ({"generation": 3}, True),
        ({"generation": 9, "controller_epoch": 2}, True),
        ({"generation": 5}, False),
        ({"generation": 1, "controller_epoch": 4}, False),
        ({"replay_position": 17}, False),
    ],
)
def test_a_record_goes_with_the_snapshot_of_its_time_or_a_later_one(changes: dict[str, int], is_used: bool) -> None:
    wanted = record(**changes)
    assert choose_ongoing([None, wanted.encode()], snapshot()).record == (wanted if is_used else None)


def test_the_record_that_spares_most_is_used_and_what_is_wrong_with_others_is_told() -> None:
    less, more = record(replay_position=50, generation=3), record()
    assert choose_ongoing([less.encode(), more.encode()], snapshot()).place == 1
    found = choose_ongoing([b"\1garbage", more.encode()], snapshot())
    assert (found.record, found.place, list(found.faults)) == (more, 1, [0])
    found = choose_ongoing([record(topic_id="other").encode()], snapshot())
    assert (found.record, found.faults) == (None, {0: "it is of another topic, with id other"})


def test_what_was_written_down_is_put_back() -> None:
    fold = BufferFold(BufferLimits(), lambda *_: None)
    fold.restore("sales/orders", PARTITION, ongoing())
    [item] = fold.open.values()
    assert OngoingTransaction.of(item, "sales/orders", PARTITION) == replace(ongoing(), owner=("loader", 4))
    assert (item.owners.part, item.owners.session) == (0, ("loader", 4)), "the home stream says whose it is"
    assert (item.bytes, item.last_count) == (15_360, {PieceKey(0, 1, 2): 0, PieceKey(9, 1, 3): 100})
    assert fold.fences.epoch_of("loader") == 4
    assert [item.id for item in fold.ages.overdue(86_402_000)] == [item.id]
    home = ("sales.payments.transaction-buffer", 0)
    fold.restore("sales/payments", home, ongoing(frames=(frame(1, 0, 0, 0, 1, 9, 0),), first_position=3))
    assert (item.owners.part, item.owners.session) == (9, ("loader", 5))
    assert item.begun_in == {"sales/orders", "sales/payments"}
    assert item.first_offsets == {PARTITION: 17, home: 3}
    assert dict(item.bytes_by_stream()) == {"sales/orders": 15_360, "sales/payments": 9}
