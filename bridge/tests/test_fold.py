"""The fold by examples: manifests, limits, leases, late and foreign messages, and what is refused."""

from __future__ import annotations

from collections import Counter

import pytest

from bridge.tests.buffers import STREAMS, Buffer, buffer_of, check_batch, fold_all
from bridge.tests.refusals import raises_code
from rollbridge.base.ids import BEGUN_TWICE, TransactionId
from rollbridge.buffer import fold as buffer_module
from rollbridge.buffer.fold import STRANGER_BYTES, BufferFold, BufferLimits
from rollbridge.buffer.frames import FrameHeader, FrameKind, Manifest, PieceKey
from rollbridge.buffer.state import CACHED_PRICE, DEADLINES_MIN
from rollbridge.buffer.table import State
from rollbridge.commitlog.control import EXPIRED

A, B = STREAMS[:2]


def merged(buffer: Buffer, identifier: bytes) -> list[tuple[PieceKey, int]]:
    return [(frame.piece, frame.first_count) for frame in buffer.fold.open[identifier].merged_frames()]


def test_exactly_the_named_parts_are_merged_and_zombies_left_out() -> None:
    buffer = Buffer()
    t = buffer.begin(1)
    buffer.data(t, 0, 2, part=0)
    buffer.data(t, 0, 3, part=1)
    buffer.data(t, 0, 3, part=2)  # a retry of part 1 under its own part number
    buffer.data(t, 3, 1, part=1, segment=4)
    buffer.data(t, 3, 1, part=2, segment=4)
    buffer.commit(t, {(0, 0, 0): 2, (2, 0, 0): 3, (2, 0, 4): 1})
    assert buffer.fold.open[t].is_complete()
    assert merged(buffer, t) == [((0, 0, 0), 0), ((2, 0, 0), 0), ((2, 0, 4), 3)]


def test_a_manifest_that_ends_inside_a_frame_can_never_be_met() -> None:
    buffer = Buffer()
    t = buffer.begin(1)
    buffer.data(t, 0, 2)
    buffer.data(t, 2, 2)
    buffer.commit(t, {(0, 0, 0): 3})
    assert buffer.fold.open[t].is_complete()
    assert "holds 2 records where the commit names 1 more" in (buffer.fold.open[t].manifest_fault() or "")
    assert merged(buffer, t) == [((0, 0, 0), 0)], "never more than it names"


def test_a_manifest_that_names_a_stream_too_many_can_never_be_met() -> None:
    buffer = Buffer()
    t = buffer.begin(1)
    buffer.commit(t, {(0, 1, 0): 1})
    assert not buffer.fold.open[t].is_complete()
    assert "the transaction has 1 streams" in (buffer.fold.open[t].manifest_fault() or "")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, b"x"),
        (b"", b"x"),
        (b"RB", b"x"),
        (bytes(44), b"x"),
        (b"XX" + FrameHeader(FrameKind.DATA, bytes(16)).pack()[2:], b"x"),
        (b"RB\x00" + FrameHeader(FrameKind.DATA, bytes(16)).pack()[3:], b"x"),
        (b"RB\x01\x09" + FrameHeader(FrameKind.DATA, bytes(16)).pack()[4:], b"x"),
        (FrameHeader(FrameKind.BEGIN, b"\0\0\0\1" + bytes(12)).pack(), b"x"),
        (FrameHeader(FrameKind.DATA, bytes(16), part=1 << 23).pack(), b"x"),
        (FrameHeader(FrameKind.DATA, bytes(16), segment=1 << 31).pack(), b"x"),
        (FrameHeader(FrameKind.DATA, bytes(16), first_count=1 << 40).pack(), b"x"),
        (FrameHeader(FrameKind.DATA, bytes(16)).pack(), None),
        (FrameHeader(FrameKind.DATA, bytes(16)).pack() + b"\0", b"x"),
    ],
)
def test_foreign_messages_are_counted_and_skipped(key: bytes | None, value: bytes | None) -> None:
    buffer = Buffer()
    buffer.raw(key, value)
    t = buffer.begin(1)
    assert buffer.fold.rejected == {"foreign": 1}
    assert buffer.fold.stranger is not None
    assert buffer.fold.stranger[:2] == (buffer_of(A), 0)
    begins = [None if content is None else content[:STRANGER_BYTES] for content in (key, value)]
    assert [buffer.fold.stranger.key, buffer.fold.stranger.value] == begins
    assert list(buffer.fold.open) == [t]
    assert buffer.fold.positions == {buffer_of(A): 2}


def test_frames_of_a_stream_that_is_not_the_transactions_are_foreign() -> None:
    buffer = Buffer()
    t = buffer.begin(1, A)
    buffer.data(t, 0, 1, stream=B)
    assert buffer.fold.rejected == {"foreign": 1}
    assert buffer.fold.stranger is None, "it is a frame, of a client at fault"
    assert buffer.fold.open[t].frames == []


def test_bytes_of_a_transaction_are_known_by_stream() -> None:
    buffer = Buffer()
    one, several = buffer.begin(1, A), buffer.begin(2, A, B)
    assert list(buffer.fold.open[several].bytes_by_stream()) == []
    for number, (stream, size) in enumerate(((A, 10), (B, 20), (B, 300), (A, 4_000))):
        buffer.data(several, number, 1, segment=number, stream=stream, size=size)
    buffer.data(one, 0, 1, size=50)
    sizes: Counter[str] = Counter()
    for frame in buffer.fold.open[several].frames:
        sizes[(A, B)[frame.piece.stream]] += frame.size
    assert dict(buffer.fold.open[several].bytes_by_stream()) == dict(sizes)
    assert sum(sizes.values()) == buffer.fold.open[several].bytes
    assert [name for name, _ in buffer.fold.open[one].bytes_by_stream()] == [A]


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_an_end_counts_in_the_first_streams_buffer_only(end: str) -> None:
    buffer = Buffer()
    t = buffer.begin(1, A, B)
    buffer.begin(1, A, B, into=B)
    if end == "commit":
        buffer.commit(t, {}, stream=B)
    else:
        buffer.abort(t, stream=B)
    assert buffer.fold.open[t].state is State.OPEN
    assert buffer.fold.rejected == {"foreign": 1}


def test_decisions_keep_their_order_when_one_is_refused_later() -> None:
    buffer = Buffer()
    ids = [buffer.begin(counter) for counter in range(3)]
    for t in ids:
        buffer.commit(t, {})
    buffer.fold.refuse(ids[0], "incomplete", 9)
    assert list(buffer.fold.decided) == ids
    assert (buffer.fold.open[ids[0]].state, buffer.fold.open[ids[0]].decided_ms) == (State.ABORTING, 9)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (FrameKind.DATA, b"not a batch"),
        (FrameKind.DATA, b"2|wrong count"),
        (FrameKind.DATA, b""),
        (FrameKind.COMMIT, b"\xff"),
        (FrameKind.COMMIT, Manifest({PieceKey(0, 0, 0): 0}).encode()),
        (FrameKind.COMMIT, Manifest({PieceKey(0, -1, 0): 1}).encode()),
        (FrameKind.ABORT, b""),
        (FrameKind.EXTEND, b""),
    ],
)
def test_a_corrupt_frame_aborts_its_transaction_and_no_other(kind: FrameKind, value: bytes) -> None:
    buffer = Buffer()
    t, other = buffer.begin(1), buffer.begin(2)
    buffer.data(t, 0, 1)
    buffer.now_ms = 3
    buffer.raw(FrameHeader(kind, t, first_count=1, records=1).pack(), value)
    item = buffer.fold.open[t]
    assert (item.state, item.decided_ms) == (State.ABORTING, 3)
    assert item.reason == f"a {kind.name} frame is corrupt"
    assert item.frames == []
    assert buffer.fold.cached_bytes == 0
    assert buffer.fold.open[other].state is State.OPEN
    assert buffer.fold.rejected == {"corrupt": 1}


def test_a_data_frame_without_records_is_corrupt_whatever_it_holds() -> None:
    buffer = Buffer()
    t = buffer.begin(1)
    buffer.data(t, 0, 0)
    assert buffer.fold.open[t].state is State.ABORTING


def test_a_corrupt_begin_frame_opens_nothing() -> None:
    buffer = Buffer()
    buffer.raw(FrameHeader(FrameKind.BEGIN, bytes(16)).pack(), b"\x02")
    assert not buffer.fold.open
    assert buffer.fold.rejected == {"corrupt": 1}


def test_the_second_begin_frame_changes_nothing_even_if_it_differs() -> None:
    buffer = Buffer()
    t = buffer.begin(1, A, B, lease_ms=10)
    buffer.now_ms = 50
    buffer.begin(1, A, lease_ms=99)
    item = buffer.fold.open[t]
    assert (list(item.begin.streams), item.begun_ms, item.deadline_ms, item.begun_in) == ([A, B], 0, 10, {A})


def test_what_two_clients_have_begun_is_refused_while_it_is_open() -> None:
    buffer = Buffer()
    open_, asked = buffer.begin(1, A, B), buffer.begin(2, A, B)
    buffer.data(asked, 0, 1)
    buffer.begin(2, A, B, into=B)
    buffer.commit(asked, {(0, 0, 0): 1})
    for number in (1, 2):
        buffer.begin(number, A, B, client="another")
    assert buffer.fold.decided[open_].state is State.ABORTING
    assert buffer.fold.decided[open_].reason == BEGUN_TWICE
    assert buffer.fold.decided[asked].state is State.COMMITTING, "all that it had is known"


def test_beyond_the_cache_only_positions_are_kept() -> None:
    buffer = Buffer(BufferLimits(cache_bytes_max=25 + 2 * CACHED_PRICE, cache_bytes_per_transaction_max=10_000))
    one, other = buffer.begin(1), buffer.begin(2)
    buffer.data(one, 0, 1, size=20)
    buffer.data(other, 0, 1, size=6)
    buffer.data(other, 1, 1, size=5)
    assert [frame.batch is None for frame in buffer.fold.open[one].frames] == [False]
    assert [frame.batch is None for frame in buffer.fold.open[other].frames] == [True, False]
    assert [(frame.offset, frame.size) for frame in buffer.fold.open[other].frames] == [(3, 6), (4, 5)]
    assert buffer.fold.cached_bytes == 25 + 2 * CACHED_PRICE


def test_one_transaction_can_not_take_the_whole_cache() -> None:
    buffer = Buffer(BufferLimits(cache_bytes_max=10_000, cache_bytes_per_transaction_max=10 + CACHED_PRICE))
    one, other = buffer.begin(1), buffer.begin(2)
    for first in range(3):
        buffer.data(one, first, 1, size=10)
    buffer.data(other, 0, 1, size=10)
    assert [frame.batch is None for frame in buffer.fold.open[one].frames] == [False, True, True]
    assert [frame.batch is None for frame in buffer.fold.open[other].frames] == [False]


def test_a_transaction_over_its_limit_is_aborted_when_it_passes_it() -> None:
    buffer = Buffer(BufferLimits(transaction_bytes_max=20))
    t = buffer.begin(1)
    buffer.data(t, 0, 1, size=20)
    assert buffer.fold.open[t].state is State.OPEN
    buffer.now_ms = 8
    buffer.data(t, 1, 1, size=2)
    item = buffer.fold.open[t]
    assert (item.state, item.reason, item.decided_ms) == (State.ABORTING, "it exceeds 20 bytes", 8)
    assert item.frames == []


def test_one_open_transaction_too_many_is_aborted_and_room_is_free_again_after_an_end() -> None:
    buffer = Buffer(BufferLimits(open_transactions_max=2))
    one, two, three = (buffer.begin(counter) for counter in range(3))
    assert [buffer.fold.open[t].state for t in (one, two, three)] == [State.OPEN, State.OPEN, State.ABORTING]
    assert buffer.fold.open[three].reason == "more than 2 transactions are open"
    buffer.commit(one, {})
    assert buffer.fold.open[buffer.begin(4)].state is State.OPEN
    assert buffer.fold.open[buffer.begin(5)].state is State.ABORTING


@pytest.mark.parametrize(
    ("asked_ms", "asked"), [(86_400_001, "1 day, 0:00:00.001000"), (2**63 - 1, "9223372036854775807 ms")]
)
def test_a_lease_over_the_limit_is_refused_with_both_quoted(asked_ms: int, asked: str) -> None:
    buffer = Buffer(BufferLimits(lease_ms_max=100))
    buffer.now_ms = 7
    long, short = buffer.begin(1, lease_ms=asked_ms), buffer.begin(2, lease_ms=100)
    buffer.data(long, 0, 1)
    buffer.commit(long, {PieceKey(0, 0, 0): 1})
    refused = buffer.fold.open[long]
    assert refused.state is State.ABORTING
    assert refused.reason == (
        f"it asked for a lease of {asked}; the coordinators' limit, lease_ms_max, is 0:00:00.100000"
    )
    assert list(buffer.fold.decided) == [long]
    assert buffer.fold.open[short].deadline_ms == 107
    assert buffer.fold.ages.next_deadline_ms() == 107


def test_a_lease_runs_out_after_its_deadline_in_order() -> None:
    buffer = Buffer()
    late, soon, ended = (buffer.begin(counter, lease_ms=lease) for counter, lease in enumerate((30, 10, 20)))
    buffer.abort(ended)
    assert buffer.fold.ages.overdue(10) == []
    assert [item.id for item in buffer.fold.ages.overdue(11)] == [soon]
    assert [item.id for item in buffer.fold.ages.overdue(99)] == [soon, late]
    buffer.fold.expire(soon, 99)
    assert (buffer.fold.open[soon].state, buffer.fold.open[soon].reason) == (State.ABORTING, EXPIRED)
    assert list(buffer.fold.decided) == [ended, soon]


def test_a_commit_that_was_asked_for_does_not_expire() -> None:
    buffer = Buffer()
    t = buffer.begin(1, lease_ms=10)
    buffer.commit(t, {(0, 0, 0): 1})
    assert buffer.fold.ages.overdue(99) == []
    buffer.fold.expire(t, 99)
    assert buffer.fold.open[t].state is State.COMMITTING


def test_an_abort_that_is_requested() -> None:
    buffer = Buffer()
    one, other = buffer.begin(1), buffer.begin(2)
    buffer.commit(other, {})
    assert buffer.fold.request_abort(one, "admin", 4)
    assert buffer.fold.request_abort(one, "admin again", 5), "asking again gives the same answer"
    assert not buffer.fold.request_abort(other, "admin", 4), "its commit is decided"
    assert (buffer.fold.open[one].reason, buffer.fold.open[one].decided_ms) == ("admin", 4)
    with pytest.raises(KeyError):
        buffer.fold.request_abort(bytes(16), "admin", 4)


def test_settling_what_is_not_decided_is_a_defect_and_changes_nothing() -> None:
    buffer = Buffer()
    t = buffer.begin(1)
    buffer.data(t, 0, 1)
    with raises_code("invalid-transition", match="is open and got abort-logged"):
        buffer.fold.settle(t)
    assert buffer.fold.open[t].state is State.OPEN
    assert buffer.fold.cached_bytes == 10 + CACHED_PRICE
    with pytest.raises(KeyError):
        buffer.fold.settle(bytes(16))


def test_the_memory_of_ended_transactions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollbridge.buffer.fold.TOMBSTONES_MAX", 3)
    buffer = Buffer()
    for counter in range(5):
        t = buffer.begin(counter, A, B)
        buffer.abort(t)
        buffer.fold.settle(t)
    opened = [buffer.begin(counter, A, B, into=B) in buffer.fold.open for counter in range(5)]
    assert opened == [True, True, False, False, False], "the oldest are forgotten first"


def test_deadlines_of_ended_transactions_are_forgotten_long_before_they_pass() -> None:
    buffer = Buffer()
    stays = buffer.begin(0, lease_ms=10**8)
    begin = buffer.log[0].value
    for counter in range(1, 3 * DEADLINES_MIN):
        t = TransactionId.of(0, counter).bytes
        for kind, value in ((FrameKind.BEGIN, begin), (FrameKind.COMMIT, Manifest({}).encode())):
            buffer.fold.fold(A, ("x", 0), 4 * counter + kind, 0, FrameHeader(kind, t).pack(), value)
        buffer.fold.settle(t)
    assert list(buffer.fold.open) == [stays]
    assert len(buffer.fold.ages._deadlines) <= DEADLINES_MIN + 3
    assert [item.id for item in buffer.fold.ages.overdue(10**10)] == [stays]


def test_outcomes_from_the_commit_log_hold_after_the_fold_has_caught_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_module, "TOMBSTONES_MAX", 1)
    first = Buffer()
    t = first.begin(1)
    first.commit(t, {})
    again = BufferFold(BufferLimits(), check_batch, {b"older": 0, t: 1})
    again.late = {}
    fold_all(again, first.log)
    assert not again.open
    assert again.rejected == {"late": 1, "zombie": 1}
    assert {item: begun.first_offsets for item, begun in again.late.items()} == {t: {buffer_of(A): 0}}
    again.caught_up()
    assert not fold_all(again, [first.log[0]._replace(offset=2)]).open
    assert list(again._tombstones) == [t], "the latest, up to the bound"


def test_an_outcome_is_not_kept_for_what_whoever_resumed_has_left_in_the_buffer() -> None:
    first = Buffer()
    t = first.begin(1)
    resumed = [first.log[0]._replace(key=FrameHeader(FrameKind.BEGIN, t, part=2).pack())]  # the owner's is truncated
    cold, warm = BufferFold(BufferLimits(), check_batch, {t: 0}), BufferFold(BufferLimits(), check_batch)
    cold.late, warm.late = {}, {}
    fold_all(cold, resumed)
    fold_all(warm, resumed).conclude(t)
    assert cold.late == warm.late == {}, "nothing can open it again"


def test_a_transaction_that_had_an_outcome_after_all_is_discarded() -> None:
    buffer = Buffer()
    t = buffer.begin(1)
    buffer.data(t, 0, 1)
    buffer.commit(t, {(0, 0, 0): 1})
    buffer.fold.discard(t)
    assert not buffer.fold.open
    assert not buffer.fold.decided
    assert buffer.fold.cached_bytes == 0
    assert buffer.fold.ages.come_of_age(10**9) == []
    buffer.begin(1)
    assert not buffer.fold.open


def test_the_log_floor_is_where_the_oldest_open_transaction_began() -> None:
    buffer = Buffer()
    buffer.fold.log_position = 5
    old = buffer.begin(1)
    buffer.fold.log_position = 9
    buffer.begin(2)
    assert buffer.fold.log_floor() == {buffer_of(A): 5}
    buffer.commit(old, {})
    buffer.fold.settle(old)
    assert buffer.fold.log_floor() == {buffer_of(A): 9}


def test_the_low_water_mark_is_the_first_frame_of_what_is_undecided() -> None:
    buffer = Buffer()
    early, late = buffer.begin(1, A), buffer.begin(2, A, B)
    buffer.data(early, 0, 1)
    buffer.begin(2, A, B, into=B)
    buffer.raw(None, b"foreign", stream=B)
    topic_a, topic_b = buffer_of(A), buffer_of(B)
    assert buffer.fold.low_water() == {topic_a: 0, topic_b: 0}
    buffer.abort(early)
    assert buffer.fold.low_water() == {topic_a: 0, topic_b: 0}, "decided, but not yet in the commit log"
    buffer.fold.settle(early)
    assert buffer.fold.low_water() == {topic_a: 1, topic_b: 0}
    buffer.commit(late, {})
    buffer.fold.settle(late)
    assert buffer.fold.low_water() == {topic_a: 5, topic_b: 2}
