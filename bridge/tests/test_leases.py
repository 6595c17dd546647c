"""Leases that are extended: whose frames count, until when, and what a new leader makes of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.buffers import STREAMS, Buffer
from rollbridge.buffer.fold import BufferLimits
from rollbridge.buffer.frames import ANYBODY, FrameHeader, FrameKind, decode_extend, encode_extend, unpack_header
from rollbridge.buffer.replay import OngoingTransaction
from rollbridge.buffer.table import Rejection

HOUR_MS = 3_600_000


def extend(buffers: Buffer, transaction: bytes, lease_ms: int, part: int = 0, stream: str = STREAMS[0]) -> None:
    buffers.raw(FrameHeader(FrameKind.EXTEND, transaction, part).pack(), encode_extend(lease_ms), stream)


@pytest.mark.parametrize("part", [0, ANYBODY])
def test_a_lease_ends_so_long_after_the_frame_as_it_says(part: int) -> None:
    buffers = Buffer()
    transaction = buffers.begin(1, lease_ms=HOUR_MS)
    buffers.now_ms = HOUR_MS - 1
    extend(buffers, transaction, 2 * HOUR_MS, part)
    item = buffers.fold.open[transaction]
    assert item.deadline_ms == 3 * HOUR_MS - 1
    assert buffers.fold.extended == {transaction}
    assert buffers.fold.ages.overdue(HOUR_MS + 1) == []
    assert buffers.fold.ages.overdue(3 * HOUR_MS) == [item]
    assert buffers.fold.ages.overdue(3 * HOUR_MS) == [item], "looking changes nothing"


def test_a_lease_is_never_made_shorter_and_never_longer_than_the_limit_allows() -> None:
    buffers = Buffer(BufferLimits(lease_ms_max=2 * HOUR_MS))
    transaction = buffers.begin(1, lease_ms=HOUR_MS)
    extend(buffers, transaction, 1)
    extend(buffers, transaction, 0)
    assert buffers.fold.open[transaction].deadline_ms == HOUR_MS
    assert not buffers.fold.extended
    buffers.now_ms = 10
    extend(buffers, transaction, 1_000 * HOUR_MS)
    assert buffers.fold.open[transaction].deadline_ms == 10 + 2 * HOUR_MS


def test_a_former_owner_and_a_frame_in_another_buffer_extend_nothing() -> None:
    buffers = Buffer()
    transaction = buffers.begin(1, *STREAMS[:2])
    buffers.begin(1, *STREAMS[:2], into=STREAMS[1])
    extend(buffers, transaction, HOUR_MS, part=7)
    extend(buffers, transaction, HOUR_MS, stream=STREAMS[1])
    assert buffers.fold.open[transaction].deadline_ms == 1000
    assert buffers.fold.rejected == {Rejection.FENCED: 1, Rejection.FOREIGN: 1}


def test_an_extended_lease_is_in_the_record_of_an_ongoing_transaction() -> None:
    buffers = Buffer()
    transaction = buffers.begin(1)
    extend(buffers, transaction, HOUR_MS)
    item = buffers.fold.open[transaction]
    partition = next(iter(item.first_offsets))
    known = OngoingTransaction.of(item, STREAMS[0], partition)
    fresh = Buffer()
    fresh.fold.restore(STREAMS[0], partition, known)
    assert fresh.fold.open[transaction].deadline_ms == HOUR_MS
    assert fresh.fold.ages.overdue(HOUR_MS) == []
    assert len(fresh.fold.ages.overdue(HOUR_MS + 1)) == 1


def test_an_older_record_of_another_buffer_does_not_make_it_shorter() -> None:
    buffers = Buffer()
    transaction = buffers.begin(1, *STREAMS[:2])
    buffers.begin(1, *STREAMS[:2], into=STREAMS[1])
    item = buffers.fold.open[transaction]
    home, other = item.first_offsets
    older = OngoingTransaction.of(item, STREAMS[1], other)
    extend(buffers, transaction, HOUR_MS)
    newer = OngoingTransaction.of(item, STREAMS[0], home)
    for records in (
        [(STREAMS[1], other, older), (STREAMS[0], home, newer)],
        [(STREAMS[0], home, newer), (STREAMS[1], other, older)],
    ):
        fresh = Buffer()
        for stream, partition, known in records:
            fresh.fold.restore(stream, partition, known)
        assert fresh.fold.open[transaction].deadline_ms == HOUR_MS
        assert fresh.fold.ages.overdue(HOUR_MS) == []
        assert len(fresh.fold.ages.overdue(HOUR_MS + 1)) == 1


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 2_000)), max_size=12))
def test_the_deadline_is_the_latest_that_was_asked_for(steps: list[tuple[int, int]]) -> None:
    buffers = Buffer()
    transaction = buffers.begin(1)
    latest = 1000
    for wait_ms, lease_ms in steps:
        buffers.now_ms += wait_ms
        extend(buffers, transaction, lease_ms)
        latest = max(latest, buffers.now_ms + lease_ms)
    assert buffers.fold.open[transaction].deadline_ms == latest
    assert buffers.fold.ages.overdue(latest) == []
    assert [item.id for item in buffers.fold.ages.overdue(latest + 1)] == [transaction]


def test_the_frame_is_what_it_says() -> None:
    header = FrameHeader(FrameKind.EXTEND, bytes(16), ANYBODY)
    assert unpack_header(header.pack()) == header
    assert decode_extend(encode_extend(5)) == 5
    assert decode_extend(encode_extend(-5)) == 0
