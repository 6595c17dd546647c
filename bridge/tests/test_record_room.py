"""A commit record lists where the records went; no transaction can make one that the commit log refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.tests.buffers import Buffer
from bridge.tests.frame_makers import Frames, route_to, writer_for
from bridge.tests.transaction_makers import ORDERS, Bench
from rollbridge.base.ids import COUNTER_MAX, EPOCH_MAX, PART_MAX, SEGMENT_NUMBER_MAX, SegmentId, TransactionId
from rollbridge.base.sn import DLSN, EMPTY, SN
from rollbridge.buffer.fold import BufferLimits
from rollbridge.buffer.frames import (
    LABEL_CHARACTERS_MAX,
    REASON_CHARACTERS_MAX,
    STREAMS_MAX,
    FrameKind,
    Manifest,
    PieceKey,
    decode_manifest,
)
from rollbridge.buffer.table import State
from rollbridge.client.futures import FRAME_BYTES_MIN, FrameLimits
from rollbridge.client.results import PartHandle, Piece
from rollbridge.commitlog.control import (
    FRAMES_HARMLESS,
    ControlKind,
    ControlRecord,
    Run,
    bytes_of_record,
    is_too_scattered,
)
from rollbridge.errors import CorruptDataError, TransactionTooLargeError
from rollbridge.kafka.records import BatchBuilder
from rollbridge.stream.conditions import KEY_BYTES_MAX, Condition, RefusedCondition, Scope, StreamCondition
from rollbridge.stream.names import TOPIC_NAME_MAX

OFFSET_MAX = (1 << 63) - 1
FRAME_RECORDS_MAX = (1 << 32) - 1

runs = st.builds(
    Run, st.integers(0, PART_MAX), st.integers(0, OFFSET_MAX), st.integers(1, FRAME_RECORDS_MAX)
) | st.just(Run(PART_MAX, OFFSET_MAX, FRAME_RECORDS_MAX))
segments = st.builds(SegmentId.of, st.integers(0, SEGMENT_NUMBER_MAX), st.integers(0, EPOCH_MAX)) | st.just(
    SegmentId.of(SEGMENT_NUMBER_MAX, EPOCH_MAX)
)
placements = st.dictionaries(
    st.text("s/t.", min_size=3, max_size=TOPIC_NAME_MAX),
    st.dictionaries(segments, st.lists(runs, min_size=1, max_size=9), min_size=1, max_size=5),
    max_size=5,
)


def largest_head(placement: dict[str, dict[SegmentId, list[Run]]]) -> ControlRecord:
    """A record with the longest of everything beside its placement."""
    sn = SN(DLSN.of(SegmentId.of(SEGMENT_NUMBER_MAX, EPOCH_MAX), OFFSET_MAX, (1 << 64) - 1), OFFSET_MAX, OFFSET_MAX)
    return ControlRecord(
        transaction=TransactionId.of(1, COUNTER_MAX),
        kind=ControlKind.COMMIT,
        client_name="c" * 255,
        begun_ms=OFFSET_MAX,
        decided_ms=OFFSET_MAX,
        controller_epoch=EPOCH_MAX,
        label="東" * LABEL_CHARACTERS_MAX,
        reason="東" * REASON_CHARACTERS_MAX,
        records=OFFSET_MAX,
        size_bytes=OFFSET_MAX,
        placement=placement,
        refused=RefusedCondition("s" * TOPIC_NAME_MAX, bytes(KEY_BYTES_MAX), sn, sn),
        order=((OFFSET_MAX, EPOCH_MAX), OFFSET_MAX),
    )


def batch_of(record: ControlRecord) -> bytes:
    """The batch that the commit log is to take."""
    builder = BatchBuilder(0)
    assert builder.append(record.decided_ms, record.transaction.bytes, record.encode_value())
    return builder.build()


@given(placements)
@settings(deadline=None, max_examples=50)
def test_no_record_is_larger_than_was_counted(placement: dict[str, dict[SegmentId, list[Run]]]) -> None:
    frames = sum(len(item) for segment in placement.values() for item in segment.values())
    pieces = sum(map(len, placement.values()))
    empty: dict[str, dict[SegmentId, list[Run]]] = {
        f"{number}".ljust(TOPIC_NAME_MAX, "s"): {} for number in range(STREAMS_MAX - len(placement))
    }
    record = largest_head({**placement, **empty})
    assert len(batch_of(record)) <= bytes_of_record(frames, pieces)


def test_a_transaction_of_too_many_frames_is_aborted_while_it_is_open() -> None:
    buffer = Buffer(BufferLimits())
    one, other = buffer.begin(1), buffer.begin(2)
    buffer.data(one, 0, 1)
    item = buffer.fold.open[one]
    room = next(count for count in range(FRAMES_HARMLESS, 1 << 20) if is_too_scattered(count + 1, 1))
    item.frames.extend([item.frames[0]] * (room - 2))
    states = []
    for count in (1, 2):
        buffer.data(one, count, 1)
        states.append(item.state)
    assert states == [State.OPEN, State.ABORTING]
    assert f"it has {room + 1} frames" in item.reason
    assert not item.frames
    assert buffer.fold.open[other].state is State.OPEN


def test_one_that_was_restored_with_too_many_frames_can_not_be_merged() -> None:
    buffer = Buffer(BufferLimits())
    one = buffer.begin(1)
    buffer.data(one, 0, 1)
    buffer.commit(one, {PieceKey(0, 0, 0): 1})
    item = buffer.fold.open[one]
    assert item.manifest_fault() is None
    item.frames.extend([item.frames[0]] * 999_999)
    assert "it has 1000000 frames" in (item.manifest_fault() or "")


def test_a_forged_condition_cannot_make_the_record_of_its_refusal_too_large() -> None:
    good = StreamCondition(0, Condition(EMPTY, Scope.KEY, bytes(KEY_BYTES_MAX)))
    assert decode_manifest(Manifest({}, (), (good,)).encode()).conditions == (good,)
    one_more = StreamCondition(0, Condition(EMPTY, Scope.KEY, b"k"))
    with pytest.raises(CorruptDataError, match=f"more than {KEY_BYTES_MAX} bytes of keys"):
        decode_manifest(Manifest({}, (), (good, one_more)).encode())


def test_a_writer_refuses_a_record_for_which_there_is_no_frame_left_and_the_rest_can_be_committed() -> None:
    frames = Frames()
    writer = writer_for(frames, route_to("s/orders", 1), limits=FrameLimits(frame_bytes=FRAME_BYTES_MIN))
    writer.write("s/orders", b"k", b"first", (), None)
    writer.cut_all()
    writer.frames = next(count for count in range(FRAMES_HARMLESS, 1 << 20) if is_too_scattered(count + 3, 2))
    writer.write("s/orders", b"k", b"last", (), None)
    writer.cut_all()
    with pytest.raises(TransactionTooLargeError, match="record was not written: commit what there is"):
        writer.write("s/orders", b"k", b"no", (), None)
    with pytest.raises(TransactionTooLargeError, match="record was not written: commit what there is"):
        writer.write_some("s/orders", [(b"k", b"no")])
    assert [record.value for record in frames.records(0)[0]] == [b"first", b"last"]


def test_a_writer_that_has_sent_very_many_frames_waits_until_they_are_full() -> None:
    frames = Frames()
    writer = writer_for(frames, route_to("s/orders", 1), limits=FrameLimits(frame_bytes=FRAME_BYTES_MIN))
    writer.write("s/orders", b"k", b"first", (), None)
    writer.cut_older(float("inf"))
    assert (len(frames.taken), writer.frames) == (1, 1)
    writer.frames = FRAMES_HARMLESS // 2 + 1
    writer.write("s/orders", b"k", b"second", (), None)
    writer.cut_older(float("inf"))
    assert len(frames.taken) == 1
    for _ in range(2):
        writer.write("s/orders", b"k", bytes(FRAME_BYTES_MIN * 3 // 4), (), None)
    assert len(frames.taken) == 2


def test_parts_with_too_many_frames_are_refused_and_the_transaction_stays_open() -> None:
    bench = Bench()
    transaction = bench.begin()
    bench.sender.acknowledge()
    whole = PartHandle(transaction.id, 1, (Piece(1, 0, 0, 10**6, 0, 10**6 - 1),), frames=400_000)
    with pytest.raises(TransactionTooLargeError, match="all of its 3 parts: it has 1200000 frames"):
        transaction.commit([whole, replace(whole, part=2), replace(whole, part=3)])
    assert FrameKind.COMMIT not in bench.sender.kinds(ORDERS)
    transaction.commit_async([whole, replace(whole, part=2)])
    assert FrameKind.COMMIT in bench.sender.kinds(ORDERS)
