"""Futures: all of a transaction's resolve, or fail, together, from its one control record."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.base.ids import SegmentId, TransactionId, local_sequence
from rollbridge.base.sn import DLSN
from rollbridge.client.frame_writer import PartWriter
from rollbridge.client.futures import Completion, FrameLimits, PartSegment, WriteFuture
from rollbridge.client.results import CommitResult, PartHandle, Piece, find_ends
from rollbridge.commitlog.control import EXPIRED, ControlKind, ControlRecord, Placement, Run
from rollbridge.errors import (
    InvalidRequestError,
    OutcomeUnknownError,
    RollbridgeError,
    TransactionAbortedError,
    TransactionClosedError,
    TransactionCommittedError,
)
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import even_ranges
from rollbridge.stream.names import GroupName, StreamName
from rollbridge.stream.routing import Route

ID = TransactionId.of(1, 7)
ORDERS = "sales/orders"


def control(kind: ControlKind, *, reason: str = "", placement: Placement | None = None) -> bytes:
    return ControlRecord(
        transaction=ID,
        kind=kind,
        client_name="c",
        begun_ms=0,
        decided_ms=0,
        controller_epoch=1,
        reason=reason,
        placement=placement or {},
    ).encode_value()


def writer(completion: Completion, *, part: int = 0, segments: int = 1) -> PartWriter:
    config = StreamConfig(name=StreamName.parse(ORDERS), group=GroupName("sales"), created_ms=0, buffer_topic_id="")
    route = Route.of(config, EpochHistory.create(even_ranges(segments), 0).active)
    return PartWriter(completion, part, [route], FrameLimits(), lambda place, key, value: None)


def write(target: PartWriter, count: int) -> list[WriteFuture]:
    return [target.write(ORDERS, b"k", b"v", (), None) for _ in range(count)]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=12),
    st.integers(0, 2),
)
def test_a_record_stands_where_the_runs_of_its_part_say(runs: list[tuple[int, int, int]], part: int) -> None:
    """The slow and obvious way: list every offset of the part, then take the k-th."""
    placed: list[Run] = []
    offset = 100
    for owner, count, gap in runs:
        offset += gap
        placed.append(Run(owner, offset, count))
        offset += count
    expected = [run.base_offset + index for run in placed if run.part == part for index in range(run.count)]
    segment = SegmentId.of(0, 5)
    completion = Completion(ID.bytes)
    futures = write(writer(completion, part=part), len(expected))
    completion.settle(control(ControlKind.COMMIT, placement={ORDERS: {segment: placed}}), 3)
    assert [future.result(0) for future in futures] == [
        DLSN.of(segment, offset, local_sequence(part, count)) for count, offset in enumerate(expected)
    ]


def test_records_find_the_segment_with_their_number_whatever_its_epoch() -> None:
    completion = Completion(ID.bytes)
    target = writer(completion, segments=2)
    futures = {key: target.write(ORDERS, key, b"v", (), None) for key in (b"a", b"b", b"c", b"d")}
    by_segment = {0: SegmentId.of(0, 8), 1: SegmentId.of(1, 8)}
    counts = {piece.segment: piece.records for piece in target.pieces()}
    assert len(counts) == 2, "the keys were chosen to go to both segments"
    runs = {by_segment[number]: [Run(0, 10 * (number + 1), count)] for number, count in counts.items()}
    completion.settle(control(ControlKind.COMMIT, placement={ORDERS: runs}), 0)
    for future in futures.values():
        assert future.result().segment == by_segment[future.part_segment.number]
        assert future.result().local_sequence == future.local_sequence == future.count


def test_nothing_is_known_before_the_outcome() -> None:
    future = write(writer(Completion(ID.bytes)), 1)[0]
    assert not future.done()
    assert future.running()
    assert not future.cancel()
    assert not future.cancelled()
    with pytest.raises(TimeoutError):
        future.result(0.01)
    with pytest.raises(TimeoutError):
        future.exception(0.01)


def test_whoever_waits_for_ever_before_the_commit_is_asked_for_is_told() -> None:
    completion = Completion(ID.bytes)
    future = write(writer(completion), 1)[0]
    completion.ends_here = True
    for wait in (future.result, future.exception):
        with pytest.raises(InvalidRequestError, match=r"wait for ever. Call commit\(\) first; flush\(\) waits until"):
            wait()
    with pytest.raises(TimeoutError, match="its commit has not been asked for"):
        future.result(0.01)
    completion.closed = True
    with pytest.raises(TimeoutError, match=r"after 0.01 s$"):
        future.result(0.01)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (control(ControlKind.ABORT, reason="client"), TransactionAbortedError, "client"),
        (control(ControlKind.ABORT, reason=EXPIRED), TransactionAbortedError, "lease"),
    ],
)
def test_all_futures_fail_together(value: bytes, error: type[RollbridgeError], text: str) -> None:
    completion = Completion(ID.bytes)
    futures = write(writer(completion), 5)
    completion.settle(value, 0)
    for future in futures:
        assert future.done()
        with pytest.raises(error, match=text):
            future.result()
        assert isinstance(future.exception(), error)


def test_each_raise_is_of_an_error_of_its_own() -> None:
    completion = Completion(ID.bytes)
    completion.settle(control(ControlKind.ABORT, reason="x"), 0)
    assert completion.error() is not completion.error()


def test_a_record_of_a_part_that_the_commit_left_out_says_so() -> None:
    completion = Completion(ID.bytes)
    future = write(writer(completion, part=2), 1)[0]
    completion.settle(control(ControlKind.COMMIT, placement={ORDERS: {SegmentId.of(0, 0): [Run(0, 0, 5)]}}), 0)
    with pytest.raises(TransactionCommittedError):
        future.result()


def test_an_outcome_that_will_not_be_learned_is_unknown() -> None:
    completion = Completion(ID.bytes)
    future = write(writer(completion), 1)[0]
    completion.give_up("closed")
    with pytest.raises(OutcomeUnknownError, match="closed") as unknown:
        future.result()
    assert unknown.value.transaction == str(ID)


def test_giving_up_changes_no_outcome() -> None:
    completion = Completion(ID.bytes)
    completion.settle(control(ControlKind.COMMIT), 0)
    completion.give_up("closed")
    assert completion.error() is None


def test_refusals_name_what_happened() -> None:
    completion = Completion(ID.bytes)
    assert type(completion.refusal()) is TransactionClosedError
    completion.settle(control(ControlKind.COMMIT), 0)
    assert isinstance(completion.refusal(), TransactionCommittedError)
    aborted = Completion(ID.bytes)
    aborted.settle(control(ControlKind.ABORT, reason="x"), 0)
    assert isinstance(aborted.refusal(), TransactionAbortedError)


def test_callbacks_are_called_once_with_the_future_before_or_after() -> None:
    completion = Completion(ID.bytes)
    early, late = write(writer(completion), 2)
    called: list[WriteFuture] = []
    early.add_done_callback(called.append)
    assert called == []
    completion.settle(control(ControlKind.COMMIT), 0)
    late.add_done_callback(called.append)
    assert called == [early, late]


def test_a_callback_that_fails_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    completion = Completion(ID.bytes)
    future = write(writer(completion), 1)[0]
    called: list[WriteFuture] = []
    future.add_done_callback(lambda _: 1 / 0)
    future.add_done_callback(called.append)
    completion.settle(control(ControlKind.COMMIT), 0)
    assert called == [future]
    assert "callback" in caplog.text


def test_many_threads_wait_for_one_outcome() -> None:
    completion = Completion(ID.bytes)
    futures = write(writer(completion), 8)
    waiting = threading.Barrier(9)
    results: list[DLSN] = []

    def wait(future: WriteFuture) -> None:
        waiting.wait(10)
        results.append(future.result(10))

    threads = [threading.Thread(target=wait, args=(future,)) for future in futures]
    for thread in threads:
        thread.start()
    waiting.wait(10)
    completion.settle(control(ControlKind.COMMIT, placement={ORDERS: {SegmentId.of(0, 0): [Run(0, 4, 8)]}}), 0)
    for thread in threads:
        thread.join(10)
    assert sorted(result.offset for result in results) == list(range(4, 12))


def test_a_result_is_worked_out_when_asked_for_and_only_once() -> None:
    asked = itertools.count()

    def ends() -> tuple[DLSN, DLSN]:
        next(asked)
        return DLSN(0, 0, 1), DLSN(0, 1, 2)

    result = CommitResult(ID, 2, 9, ends)
    assert (result.first, result.last) == (DLSN(0, 0, 1), DLSN(0, 1, 2))
    assert next(asked) == 1
    assert "0-0:1:0" in repr(result)


def test_results_and_handles_survive_pickling() -> None:
    result = CommitResult(ID, 2, 9, lambda: (DLSN(0, 0, 1), DLSN(0, 1, 2)))
    copy = pickle.loads(pickle.dumps(result))
    assert copy == result
    assert hash(copy) == hash(result)
    assert (copy.first, copy.last, copy.records, copy.position) == (result.first, result.last, 2, 9)
    assert copy != CommitResult(ID, 2, 10, lambda: (None, None))
    handle = PartHandle(ID, 3, (Piece(3, 0, 1, 5, 0, 4),))
    assert pickle.loads(pickle.dumps(handle)) == handle
    assert handle.records == 5
    assert len(pickle.dumps(handle)) < 1_000


def record(placement: Placement) -> ControlRecord:
    return ControlRecord(ID, ControlKind.COMMIT, "c", 0, 0, 1, placement=placement)


def test_the_ends_of_a_commit_span_streams_segments_and_parts() -> None:
    placement = {
        ORDERS: {
            SegmentId.of(1, 4): [Run(0, 50, 2), Run(1, 52, 3), Run(0, 55, 1)],
            SegmentId.of(0, 6): [Run(1, 0, 2)],
        },
        "sales/payments": {SegmentId.of(0, 9): [Run(0, 7, 1)]},
    }
    pieces: Iterable[Piece] = [
        Piece(0, 0, 1, 3, first_count=1, last_count=6),
        Piece(1, 0, 1, 3, first_count=0, last_count=4),
        Piece(1, 0, 0, 2, first_count=2, last_count=3),
        Piece(0, 1, 0, 1, first_count=5, last_count=5),
    ]
    first, last = find_ends(record(placement), {ORDERS: 0, "sales/payments": 1}, pieces)
    assert first == DLSN(4, 1, 50, local_sequence(0, 1))
    assert last == DLSN(9, 0, 7, local_sequence(0, 5))


def test_what_stands_in_prepared_segments_is_found_by_the_numbers_that_it_was_written_to() -> None:
    large = SegmentId.of((1 << 30) + 8, 4)
    placed = record({ORDERS: {large: [Run(0, 0, 3)]}})._replace(prepared={ORDERS: {large: 1}})
    pieces: Iterable[Piece] = [Piece(0, 0, 1, 3, first_count=1, last_count=6)]
    first = DLSN(4, (1 << 30) + 8, 0, local_sequence(0, 1))
    last = DLSN(4, (1 << 30) + 8, 2, local_sequence(0, 6))
    assert find_ends(placed, {ORDERS: 0}, pieces) == (first, last)
    completion = Completion(ID.bytes)
    completion.settle(placed.encode_value(), 9)
    part_segment = PartSegment(completion, 0, ORDERS, 0, 1)
    assert [part_segment.locate(index, count) for index, count in enumerate((1, 4, 6))] == [
        first,
        DLSN(4, (1 << 30) + 8, 1, local_sequence(0, 4)),
        last,
    ]


def test_an_empty_commit_has_no_ends() -> None:
    assert find_ends(record({}), {}, []) == (None, None)


@pytest.mark.parametrize("reason", ["", "expired", "c"])
@pytest.mark.parametrize("kind", [ControlKind.COMMIT, ControlKind.ABORT])
def test_the_end_of_another_clients_transaction_with_the_same_id_is_told_apart(kind: ControlKind, reason: str) -> None:
    value = control(kind, reason=reason)
    assert not Completion(ID.bytes, "c").is_of_another(value)
    assert not Completion(ID.bytes).is_of_another(value), "whose it is is not known here"
    for name in ("cc", "d", "dd", ""):
        assert Completion(ID.bytes, name).is_of_another(value)
    assert not Completion(ID.bytes, "d").is_of_another(b"\x02\x00"), "what cannot be read says nothing"
