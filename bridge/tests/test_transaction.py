"""The table of decisions: what the proposals say of each pair of state and event, and that the fold obeys every row."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import chain, product, repeat
from typing import Any, Final, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode

from bridge.tests.buffers import STREAMS, Buffer, begin_frame
from bridge.tests.refusals import raises_code
from bridge.tests.transaction_makers import BUFFER, GROUP, ORDERS, PAYMENTS, REFUSED, Bench
from rollbridge.base.ids import OWNER_PART, TransactionId
from rollbridge.base.logs import LIMITER
from rollbridge.buffer.fold import BufferLimits
from rollbridge.buffer.frames import (
    BUNDLE_BYTES_MAX,
    FrameHeader,
    FrameKind,
    Manifest,
    decode_abort,
    decode_begin,
    decode_manifest,
    encode_abort,
    encode_extend,
)
from rollbridge.buffer.savepoints import SavepointFrame
from rollbridge.buffer.table import DECISIONS, Event, Move, Rejection, Row, State, Stay, decide
from rollbridge.client.futures import Completion
from rollbridge.client.outcomes import Explained
from rollbridge.client.results import PartHandle, Piece
from rollbridge.client.sender import Undelivered
from rollbridge.client.transaction import Part, Transaction
from rollbridge.client.writing import Writing
from rollbridge.commitlog.control import EXPIRED, ControlKind
from rollbridge.errors import (
    BackpressureError,
    IncompleteError,
    InvalidRequestError,
    NotAuthorizedError,
    OutcomeUnknownError,
    TransactionAbortedError,
    TransactionClosedError,
    TransactionCommittedError,
    UnavailableError,
)

TERMINAL = (State.COMMITTED, State.ABORTED)
HELD = (State.OPEN, State.COMMITTING, State.ABORTING)

# One letter for each pair, written down from the proposals and not from the table: a capital letter is the state that
# is moved to (Open, comMitting = C, coMmitted = M, aborTing = T, aborTed = X); t taken, i ignored; of what is dropped
# l late, z zombie, e fenced, d duplicate, f foreign, w crowded, r corrupt; - cannot happen.
EXPECTED = """
                      unknown open committing aborting ended
begin                 O       t    t          t        l
resume                f       t    t          t        l
crowded               w       -    -          -        -
data                  z       t    t          l        z
data-again            -       d    d          -        -
data-of-former-owner  -       e    e          l        -
commit                z       C    l          l        z
abort                 z       T    l          l        z
savepoint             z       t    l          l        z
savepoint-again       -       d    -          -        -
extend                z       t    l          l        z
end-of-former-owner   -       e    e          e        -
resume-of-former-owner -      e    e          e        -
astray                f       f    f          f        -
corrupt               r       r    r          r        r
expire                -       T    i          i        -
refuse                -       T    T          i        -
merged                -       -    M          -        -
abort-logged          -       -    -          X        -
outcome-known         -       l    l          l        -
"""
MEANING: dict[str, Row | None] = {
    "O": Move(State.OPEN),
    "C": Move(State.COMMITTING),
    "M": Move(State.COMMITTED),
    "T": Move(State.ABORTING),
    "X": Move(State.ABORTED),
    "t": Stay.TAKEN,
    "i": Stay.IGNORED,
    "l": Rejection.LATE,
    "z": Rejection.ZOMBIE,
    "e": Rejection.FENCED,
    "d": Rejection.DUPLICATE,
    "f": Rejection.FOREIGN,
    "w": Rejection.CROWDED,
    "r": Rejection.CORRUPT,
    "-": None,
}


def expected_rows() -> Iterable[tuple[State, Event, Row | None]]:
    head, *lines = (line.split() for line in EXPECTED.strip().splitlines())
    for event, *letters in lines:
        for state, letter in zip(head, letters, strict=True):
            yield State(state), Event(event), MEANING[letter]


ROWS: Final = [(state, event) for state, rows in DECISIONS.items() for event in rows]


@pytest.mark.parametrize(("state", "event", "row"), list(expected_rows()))
def test_every_pair_is_what_the_proposals_say(state: State, event: Event, row: Row | None) -> None:
    assert DECISIONS[state].get(event) == row


def test_the_expectation_is_complete() -> None:
    pairs = [(state, event) for state, event, _ in expected_rows()]
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == set(product(DECISIONS, Event))
    assert set(DECISIONS) == set(State) - set(TERMINAL), "the fold keeps no more than the id of one that has an outcome"


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_what_is_not_in_the_table_is_a_defect_of_the_caller(state: State, event: Event) -> None:
    if (state, event) in ROWS:
        assert decide(state, event) is DECISIONS[state][event]
        return
    with raises_code("invalid-transition", match="which must not happen; nothing was written") as caught:
        decide(state, event, "t-1")
    said = vars(caught.value)
    assert (said["transaction"], said["state"], said["request"]) == ("t-1", state, event)


# --------------------------------------------------------------------------------------------------------------------
# The fold, driven through every row. A transaction of two streams was resumed once, so it has a former owner.

A, B, C = STREAMS
T: Final = TransactionId.of(0, 1).bytes
OWNER: Final = 5
"""Part number of who has resumed it and owns it now."""


def frame(buffer: Buffer, kind: FrameKind, part: int = OWNER, stream: str = A, value: bytes | None = None) -> None:
    if value is None:
        begin, end = begin_frame(A, B).encode(), encode_abort("client")
        commit, extend = Manifest({}).encode(), encode_extend(5)
        savepoint = SavepointFrame(3, True, Manifest({})).encode()
        kinds = (FrameKind.BEGIN, FrameKind.COMMIT, FrameKind.ABORT, FrameKind.EXTEND, FrameKind.SAVEPOINT)
        value = dict(zip(kinds, (begin, commit, end, extend, savepoint), strict=True))[kind]
    buffer.raw(FrameHeader(kind, T, part).pack(), value, stream)


def without_room(buffer: Buffer) -> None:
    buffer.fold.limits = BufferLimits(held_bytes_max=1)
    frame(buffer, FrameKind.BEGIN, OWNER_PART)


def astray(buffer: Buffer) -> None:
    if T in buffer.fold.open:
        frame(buffer, FrameKind.ABORT, stream=B)
    else:
        frame(buffer, FrameKind.BEGIN, OWNER_PART, C)


def savepoint(buffer: Buffer, number: int) -> None:
    """One with this number more than the one before; those that are made in a row never have the same."""
    known = buffer.fold.open[T].savepoint if T in buffer.fold.open else None
    number += 0 if known is None else known.frame.number - 2
    frame(buffer, FrameKind.SAVEPOINT, value=SavepointFrame(max(number, 1), True, Manifest({})).encode())


DRIVE: Final[dict[Event, Callable[[Buffer], object]]] = {
    Event.BEGIN: lambda buffer: frame(buffer, FrameKind.BEGIN, OWNER_PART),
    Event.RESUME: lambda buffer: frame(buffer, FrameKind.BEGIN, OWNER),
    Event.CROWDED: without_room,
    Event.DATA: lambda buffer: buffer.data(T, 10 * len(buffer.log), 1, part=OWNER),
    Event.DATA_AGAIN: lambda buffer: buffer.data(T, 0, 2, part=OWNER),
    Event.DATA_OF_FORMER: lambda buffer: buffer.data(T, 10, 1, part=OWNER_PART),
    Event.COMMIT: lambda buffer: frame(buffer, FrameKind.COMMIT),
    Event.ABORT: lambda buffer: frame(buffer, FrameKind.ABORT),
    Event.SAVEPOINT: lambda buffer: savepoint(buffer, 3),
    Event.SAVEPOINT_AGAIN: lambda buffer: savepoint(buffer, 2),
    Event.EXTEND: lambda buffer: frame(buffer, FrameKind.EXTEND),
    Event.END_OF_FORMER: lambda buffer: frame(buffer, FrameKind.ABORT, OWNER_PART),
    Event.RESUME_OF_FORMER: lambda buffer: buffer.raw(
        FrameHeader(FrameKind.BEGIN, T, OWNER + 1, first_count=OWNER_PART + 1).pack(), begin_frame(A, B).encode(), A
    ),
    Event.ASTRAY: astray,
    Event.CORRUPT: lambda buffer: frame(buffer, FrameKind.ABORT, value=b""),
    Event.EXPIRE: lambda buffer: buffer.fold.expire(T, 10**9),
    Event.REFUSE: lambda buffer: buffer.fold.refuse(T, "it cannot be merged", 0),
    Event.MERGED: lambda buffer: buffer.fold.settle(T),
    Event.ABORT_LOGGED: lambda buffer: buffer.fold.settle(T),
    Event.OUTCOME_KNOWN: lambda buffer: buffer.fold.discard(T),
}
OPENED: Final = (Event.BEGIN, Event.RESUME)
WAY: Final[dict[State, tuple[Event, ...]]] = {
    State.UNKNOWN: (),
    State.OPEN: OPENED,
    State.COMMITTING: (*OPENED, Event.COMMIT),
    State.ABORTING: (*OPENED, Event.ABORT),
    State.ENDED: (*OPENED, Event.ABORT, Event.ABORT_LOGGED),
}
"""How a transaction gets into each state."""


class Recorder(dict[Event, Row]):
    """A part of the table that notes what is looked up in it."""

    def __init__(self, state: State, seen: list[tuple[State, Event]]) -> None:
        super().__init__(DECISIONS[state])
        self.state, self.seen = state, seen

    def __getitem__(self, event: Event) -> Row:
        self.seen.append((self.state, event))
        return super().__getitem__(event)

    def get(self, event: Event, default: Any = None) -> Any:
        self.seen.append((self.state, event))
        return super().get(event, default)


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[tuple[State, Event]]:
    """What the fold looks up in the table, in order."""
    seen: list[tuple[State, Event]] = []
    for state in DECISIONS:
        monkeypatch.setitem(cast("dict[State, object]", DECISIONS), state, Recorder(state, seen))
    return seen


def in_state(state: State) -> Buffer:
    buffer = Buffer()
    for event in WAY[state]:
        DRIVE[event](buffer)
        if event is Event.RESUME:
            buffer.data(T, 0, 2, part=OWNER)
            savepoint(buffer, 3)
    return buffer


@pytest.mark.parametrize(("state", "event"), ROWS)
def test_the_fold_looks_up_every_row_and_obeys(
    state: State, event: Event, looked_up: list[tuple[State, Event]]
) -> None:
    buffer = in_state(state)
    item = buffer.fold.open.get(T)
    assert (item.state if item is not None else state) is state
    dropped = Counter(buffer.fold.rejected)
    looked_up.clear()
    DRIVE[event](buffer)
    assert looked_up[:1] == [(state, event)], "it is looked up, and before anything else"
    assert looked_up[1:] == ([(state, Event.REFUSE)] if event is Event.CORRUPT and state in HELD else [])
    row = decide(state, event)
    assert buffer.fold.rejected - dropped == ({row.value: 1} if isinstance(row, Rejection) else {})
    if isinstance(row, Move):
        item = item if item is not None else buffer.fold.open[T]
        assert item.state is row.to
        assert (T in buffer.fold.open) is (row.to not in TERMINAL)
    elif item is None:
        assert T not in buffer.fold.open
    elif event is Event.OUTCOME_KNOWN:
        assert T not in buffer.fold.open, "the whole transaction is dropped"
    elif event is not Event.CORRUPT:
        assert item.state is state


@given(st.lists(st.sampled_from(sorted(DRIVE.keys() - {Event.CROWDED}))))
def test_whatever_comes_in_whatever_order_the_table_has_a_row_for_it(events: list[Event]) -> None:
    buffer = Buffer()
    seen = [State.UNKNOWN]
    for event in events:
        item = buffer.fold.open.get(T)
        of_leader = event in (Event.REFUSE, Event.OUTCOME_KNOWN)
        if item is None and of_leader:
            continue
        if event in (Event.MERGED, Event.ABORT_LOGGED) and (item is None or item.state is State.OPEN):
            continue
        DRIVE[event](buffer)
        after = item if item is not None else buffer.fold.open.get(T)
        if after is not None and after.state is not seen[-1]:
            seen.append(after.state)
    assert len(seen) == len(set(seen)), "no state is entered twice"
    if State.COMMITTED in seen:
        assert State.ABORTING not in seen, "a commit is never visible after an abort was decided"
    path = [State.UNKNOWN, State.OPEN, State.COMMITTING, State.ABORTING, State.COMMITTED, State.ABORTED]
    assert seen == [item for item in path if item in seen]


def test_every_reason_is_used_but_those_for_whole_messages() -> None:
    rows = {row for rows in DECISIONS.values() for row in rows.values()}
    assert {row for row in rows if isinstance(row, Rejection)} == set(Rejection) - {Rejection.REPEATED, Rejection.NEWER}
    assert {row for row in rows if isinstance(row, Stay)} == set(Stay)


# What a transaction sends, in which order, and what it makes of failed sends; the brokers are played by the test.


LOST = Undelivered(ErrorCode.unknown_server_error, is_refusal=False, topic=BUFFER)
DENIED = Undelivered(ErrorCode.topic_authorization_failed, is_refusal=True, topic=BUFFER)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_begin_sends_the_same_frame_to_each_of_several_streams_and_waits_for_none(bench: Bench) -> None:
    transaction = bench.begin(counter=6)
    assert [(item.topic, item.partition, item.kinds) for item in bench.sender.sent] == [
        ("sales.orders.transaction-buffer", 2, [FrameKind.BEGIN]),
        ("sales.payments.transaction-buffer", 2, [FrameKind.BEGIN]),
    ]
    values = {item.value for item in bench.sender.sent}
    assert len(values) == 1
    begin = decode_begin(values.pop())
    assert (begin.client_name, begin.label, begin.lease_ms) == ("loader", "a label", 1_000)
    assert begin.streams == {ORDERS: 0, PAYMENTS: 0}
    assert transaction.id == TransactionId.of(0, 6)
    assert transaction.id.bytes in bench.outcomes.waiting


def test_the_commit_waits_for_the_buffers_of_other_streams(bench: Bench) -> None:
    transaction = bench.begin()
    transaction.write(ORDERS, key=b"k", value=b"v")
    transaction.write(PAYMENTS, key=b"k", value=b"v")
    transaction.commit_async()
    assert FrameKind.COMMIT not in bench.sender.kinds(ORDERS)
    bench.sender.acknowledge(3)
    assert FrameKind.COMMIT not in bench.sender.kinds(ORDERS), "a frame of payments is still on its way"
    bench.sender.acknowledge(1)
    assert bench.sender.kinds(ORDERS)[-1] is FrameKind.COMMIT
    assert FrameKind.COMMIT not in bench.sender.kinds(PAYMENTS)
    assert decode_manifest(bench.sender.sent[-1].value).pieces == {(0, 0, 0): 1, (0, 1, 0): 1}


def test_the_commit_goes_at_once_if_the_others_have_everything(bench: Bench) -> None:
    transaction = bench.begin()
    bench.sender.acknowledge()
    transaction.write(ORDERS, key=b"k", value=b"v")
    transaction.commit_async()
    assert bench.sender.kinds(ORDERS)[-1] is FrameKind.COMMIT
    assert not bench.sender.sent[-1].soon


def test_nothing_of_an_ended_transaction_waits_for_the_garbage_collector(bench: Bench) -> None:
    """In a cycle each would: a busy client spent a third of its time on looking for them."""
    bench.use(ORDERS)

    def end_one(counter: int, kind: ControlKind) -> None:
        transaction = bench.begin(counter=counter)
        written = transaction.write(ORDERS, key=b"k", value=b"v")
        answer: Any = transaction.commit_async() if kind is ControlKind.COMMIT else transaction.abort_async()
        bench.sender.acknowledge()
        bench.settle(transaction, kind)
        assert answer.exception(0) is None
        assert written.done()

    gc.collect()
    gc.disable()
    try:
        for counter, kind in enumerate([ControlKind.COMMIT, ControlKind.ABORT, ControlKind.COMMIT]):
            end_one(counter, kind)
        bench.sender.sent.clear()
        bench.runtime.commits._in_flight.look()
        assert [item for item in gc.get_objects() if isinstance(item, Transaction | Completion)] == []
    finally:
        gc.enable()


def test_a_commit_asked_for_twice_is_sent_once_and_answered_twice(bench: Bench) -> None:
    transaction = bench.begin(ORDERS)
    first, second = transaction.commit_async(), transaction.commit_async()
    assert bench.sender.kinds(ORDERS).count(FrameKind.COMMIT) == 1
    bench.settle(transaction, ControlKind.COMMIT)
    assert first.result(0) == second.result(0) == transaction.commit()
    assert (first.result().records, first.result().first, first.result().position) == (0, None, 5)


def test_a_frame_refused_before_the_commit_makes_it_incomplete(bench: Bench) -> None:
    transaction = bench.begin(ORDERS)
    with pytest.raises(UnavailableError):
        transaction.flush()
    bench.sender.acknowledge()
    future = transaction.write(ORDERS, key=b"k", value=b"v")
    with pytest.raises(UnavailableError):
        transaction.flush()
    bench.sender.acknowledge(fault=REFUSED)
    for attempt in (transaction.flush, transaction.commit):
        with pytest.raises(IncompleteError, match="too large"):
            attempt()
    assert bench.sender.kinds(ORDERS) == [FrameKind.BEGIN, FrameKind.DATA, FrameKind.ABORT]
    assert isinstance(future.exception(0), IncompleteError)
    with pytest.raises(IncompleteError):
        transaction.write(ORDERS, key=b"k", value=b"v")
    bench.settle(transaction, ControlKind.ABORT, reason="incomplete: too large")
    with pytest.raises(IncompleteError):
        transaction.commit()
    transaction.abort()


def test_a_right_that_is_missing_in_the_middle_is_named_with_its_topic(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    transaction = bench.begin(ORDERS)
    future = transaction.write(ORDERS, key=b"k", value=b"v")
    with pytest.raises(UnavailableError):
        transaction.flush()
    bench.sender.acknowledge(fault=DENIED)
    with pytest.raises(IncompleteError, match=rf"topic {BUFFER}.*TOPIC_AUTHORIZATION_FAILED") as refusal:
        transaction.commit()
    assert isinstance(refusal.value.__cause__, NotAuthorizedError)
    assert refusal.value.__cause__.resource == f"topic {BUFFER}"
    assert BUFFER in str(future.exception(0))
    assert BUFFER in caplog.text


def test_a_transaction_whose_begin_was_refused_ends_at_once(bench: Bench) -> None:
    """No leader will ever hear of it, so there is nothing to wait for."""
    transaction = bench.begin(ORDERS)
    future = transaction.commit_async()
    bench.sender.acknowledge(1, fault=REFUSED)
    assert isinstance(future.exception(0), IncompleteError)
    assert bench.outcomes.waiting == {}
    transaction.abort()
    assert bench.sender.kinds(ORDERS) == [FrameKind.BEGIN, FrameKind.COMMIT]


def test_a_begin_that_may_have_arrived_is_taken_back(bench: Bench) -> None:
    transaction = bench.begin(ORDERS)
    with pytest.raises(UnavailableError):
        transaction.flush()
    bench.sender.acknowledge(1, fault=LOST)
    assert transaction.id.bytes in bench.outcomes.waiting
    with pytest.raises(IncompleteError):
        transaction.commit()
    assert bench.sender.kinds(ORDERS) == [FrameKind.BEGIN, FrameKind.ABORT]


def test_a_frame_of_another_stream_refused_after_the_commit_was_asked_for_aborts(bench: Bench) -> None:
    transaction = bench.begin()
    transaction.write(PAYMENTS, key=b"k", value=b"v")
    future = transaction.commit_async()
    bench.sender.acknowledge(2)
    bench.sender.acknowledge(1, fault=REFUSED)
    assert bench.sender.kinds(ORDERS) == [FrameKind.BEGIN, FrameKind.ABORT]
    assert bench.sender.sent[-1].soon, "the delivery thread must never wait"
    assert not future.done(), "the log has the last word"
    bench.settle(transaction, ControlKind.ABORT, reason="incomplete")
    with pytest.raises(IncompleteError):
        future.result(0)


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize(("kind", "committed"), [(ControlKind.COMMIT, True), (ControlKind.ABORT, False)])
def test_after_a_refused_commit_frame_the_log_decides(
    bench: Bench, kind: ControlKind, committed: bool, begun: bool
) -> None:
    """Refused for sure after its begin had arrived, or lost together with it."""
    transaction = bench.begin(ORDERS)
    if begun:
        with pytest.raises(UnavailableError):
            transaction.flush()
        bench.sender.acknowledge()
    future = transaction.commit_async()
    bench.sender.acknowledge(fault=REFUSED if begun else LOST)
    assert bench.sender.kinds(ORDERS) == [FrameKind.BEGIN, FrameKind.COMMIT, FrameKind.ABORT]
    bench.settle(transaction, kind, reason="" if committed else "its commit was refused")
    if committed:
        assert future.result(0).position == 5
    else:
        with pytest.raises(IncompleteError):
            future.result(0)


def test_no_answer_in_time_is_an_unknown_outcome_and_asking_again_waits_on(bench: Bench) -> None:
    transaction = bench.begin(ORDERS)
    with pytest.raises(OutcomeUnknownError, match="nobody leads sales/default") as unknown:
        transaction.commit()
    assert unknown.value.transaction == str(transaction.id)
    bench.settle(transaction, ControlKind.COMMIT)
    assert transaction.commit().records == 0


def test_abort_drops_what_was_not_sent(bench: Bench) -> None:
    transaction = bench.begin(ORDERS)
    future = transaction.write(ORDERS, key=b"k", value=b"v")
    answer = transaction.abort_async("changed my mind")
    assert bench.sender.kinds(ORDERS) == [FrameKind.BEGIN, FrameKind.ABORT]
    assert decode_abort(bench.sender.sent[-1].value) == "changed my mind"
    bench.settle(transaction, ControlKind.ABORT, reason="changed my mind")
    assert answer.result(0) is None
    transaction.abort()
    for attempt in (transaction.commit, future.result):
        with pytest.raises(TransactionAbortedError, match="changed my mind") as aborted:
            attempt()
        assert aborted.value.reason == "changed my mind"


def test_the_opposite_request_names_the_outcome(bench: Bench) -> None:
    transaction = bench.begin(ORDERS)
    transaction.commit_async()
    bench.settle(transaction, ControlKind.COMMIT)
    with pytest.raises(TransactionCommittedError):
        transaction.abort()
    assert FrameKind.ABORT not in bench.sender.kinds(ORDERS)


def test_abort_of_a_commit_that_ends_as_aborted_is_what_was_wanted(bench: Bench) -> None:
    transaction = bench.begin(ORDERS)
    transaction.commit_async()
    bench.settle(transaction, ControlKind.ABORT, reason="too large")
    transaction.abort()


@pytest.mark.parametrize("requested_end", ["commit_async", "abort_async"])
def test_nothing_can_be_written_after_the_end_was_asked_for(bench: Bench, requested_end: str) -> None:
    transaction = bench.begin()
    getattr(transaction, requested_end)()
    with pytest.raises(TransactionClosedError):
        transaction.write(ORDERS, key=b"k", value=b"v")
    with pytest.raises(TransactionClosedError):
        transaction.write_all(ORDERS, [(b"k", b"v")])


def test_an_open_transaction_learns_that_it_ended(bench: Bench) -> None:
    transaction = bench.begin(ORDERS)
    transaction.write(ORDERS, key=b"k", value=b"v")
    bench.settle(transaction, ControlKind.ABORT, reason=EXPIRED)
    for attempt in (lambda: transaction.write(ORDERS, value=b"v"), transaction.commit):
        with raises_code("transaction-expired"):
            attempt()
    transaction.abort()
    assert bench.sender.kinds(ORDERS) == [], "there is nothing to ask for any more"


def test_back_pressure_at_commit_leaves_it_open(bench: Bench) -> None:
    transaction = bench.begin()
    bench.sender.acknowledge()
    transaction.write(ORDERS, key=b"k", value=b"v")
    for full_after in (2, 3):  # the frame does not fit, then the commit does not
        bench.sender.full_after = full_after
        with pytest.raises(OutcomeUnknownError, match="could not be asked for") as caught:
            transaction.commit(timeout=0)
        assert caught.value.transaction == str(transaction.id)
    bench.sender.full_after = 10
    transaction.write(ORDERS, key=b"k", value=b"w")
    transaction.commit_async()
    assert decode_manifest(bench.sender.sent[-1].value).pieces == {(0, 0, 0): 2}
    assert bench.sender.kinds(ORDERS) == [FrameKind.BEGIN, FrameKind.DATA, FrameKind.DATA, FrameKind.COMMIT]


@pytest.mark.parametrize("requested_end", ["commit_async", "abort_async"])
def test_back_pressure_at_the_end_of_a_bundle_leaves_it_open(bench: Bench, requested_end: str) -> None:
    transaction = bench.begin(ORDERS)
    transaction.write(ORDERS, key=b"k", value=b"v")
    bench.sender.full_after = 0
    with pytest.raises(BackpressureError):
        getattr(transaction, requested_end)()
    bench.sender.full_after = 10
    transaction.commit_async()
    [message] = bench.sender.sent
    assert message.kinds == [FrameKind.BEGIN, FrameKind.DATA, FrameKind.COMMIT]


def test_a_small_transaction_is_one_message(bench: Bench) -> None:
    transaction = bench.begin(ORDERS)
    transaction.write(ORDERS, key=b"k", value=b"v")
    assert bench.sender.sent == []
    transaction.commit_async()
    [message] = bench.sender.sent
    assert message.kinds == [FrameKind.BEGIN, FrameKind.DATA, FrameKind.COMMIT]


def test_what_waits_in_the_outbox_goes_after_a_moment(bench: Bench) -> None:
    transaction = bench.begin(ORDERS)
    long_ago, deadline = time.monotonic() - 60, time.monotonic() + 120
    while not bench.sender.sent:
        transaction._writing.cut_older(long_ago)
        assert time.monotonic() < deadline
    assert bench.sender.kinds(ORDERS) == [FrameKind.BEGIN]
    transaction._writing.cut_older(long_ago)
    assert bench.sender.kinds(ORDERS) == [FrameKind.BEGIN], "and only once"


def test_a_transaction_whose_frames_wait_for_room_is_not_prompt(bench: Bench) -> None:
    """Housekeeping holds its lock meanwhile, for which the thread of an event loop must not wait."""
    transaction = bench.begin(ORDERS)
    found: list[bool] = []
    bench.sender.asked = lambda: found.append(transaction._writing.can_write_now())
    while not found:
        assert transaction._writing.can_write_now()
        transaction._writing.cut_older(time.monotonic() - 60)
    assert found == [False]
    assert transaction._writing.can_write_now()


def test_large_frames_go_by_themselves_behind_what_waits(bench: Bench) -> None:
    transaction = bench.begin(ORDERS)
    large = b"v" * (BUNDLE_BYTES_MAX + 1)
    transaction.write(ORDERS, key=b"k", value=large)
    transaction.write(ORDERS, key=b"k", value=large * 60)
    transaction.commit_async()
    assert [message.kinds for message in bench.sender.sent] == [
        [FrameKind.BEGIN],
        [FrameKind.DATA],
        [FrameKind.DATA],
        [FrameKind.COMMIT],
    ]


def test_a_begin_that_reaches_only_some_streams_is_taken_back(bench: Bench) -> None:
    bench.sender.full_after = 1
    with pytest.raises(BackpressureError):
        bench.begin()
    assert bench.sender.kinds(ORDERS) == [FrameKind.BEGIN, FrameKind.ABORT]
    assert bench.outcomes.waiting == {}


def test_flush_sends_what_is_open_and_waits_for_it(bench: Bench) -> None:
    transaction = bench.begin(ORDERS)
    transaction.write(ORDERS, key=b"k", value=b"v")
    with pytest.raises(UnavailableError, match="still being sent"):
        transaction.flush()
    assert bench.sender.kinds(ORDERS) == [FrameKind.BEGIN, FrameKind.DATA]
    bench.sender.acknowledge()
    transaction.flush()


def test_parts_are_named_in_the_manifest(bench: Bench) -> None:
    transaction = bench.begin()
    bench.sender.acknowledge()
    transaction.write(ORDERS, key=b"k", value=b"v")
    handles = [PartHandle(transaction.id, 1, (Piece(1, 1, 0, 7, 0, 6),)), PartHandle(transaction.id, 2, ())]
    transaction.commit_async(parts=handles)
    bench.sender.acknowledge()
    assert decode_manifest(bench.sender.sent[-1].value).pieces == {(0, 0, 0): 1, (1, 1, 0): 7}


def test_parts_of_another_transaction_or_named_twice_are_refused(bench: Bench) -> None:
    transaction = bench.begin()
    handle = PartHandle(transaction.id, 1, ())
    foreign = PartHandle(TransactionId.of(0, 999), 1, ())
    for parts in ([foreign], [handle, handle]):
        with pytest.raises(InvalidRequestError):
            transaction.commit(parts=parts)
    assert FrameKind.COMMIT not in bench.sender.kinds(ORDERS)
    transaction.write(ORDERS, value=b"still open")


def test_a_part_writes_frames_of_its_own_and_ends_with_a_handle(bench: Bench) -> None:
    owner = bench.begin(ORDERS)
    part = Part(Writing(bench.runtime, bench.plan, owner._writing.completion, 3))
    part.write(ORDERS, key=b"a", value=b"v")
    with pytest.raises(UnavailableError):
        part.finish()
    bench.sender.acknowledge()
    handle = part.finish()
    assert handle == PartHandle(owner.id, 3, (Piece(3, 0, 0, 1, 0, 0),))
    assert part.finish() is handle
    with pytest.raises(TransactionClosedError, match="part 3"):
        part.write(ORDERS, value=b"v")
    owner.write(ORDERS, value=b"the owner goes on")


def test_a_part_of_an_ended_transaction_can_not_be_finished(bench: Bench) -> None:
    owner = bench.begin(ORDERS)
    part = Part(Writing(bench.runtime, bench.plan, owner._writing.completion, 3))
    bench.settle(owner, ControlKind.ABORT, reason="x")
    with pytest.raises(TransactionAbortedError):
        part.finish()


def test_the_end_of_a_block_commits(bench: Bench) -> None:
    with pytest.raises(OutcomeUnknownError), bench.begin(ORDERS) as transaction:
        transaction.write(ORDERS, value=b"v")
    assert bench.sender.kinds(ORDERS) == [FrameKind.BEGIN, FrameKind.DATA, FrameKind.COMMIT]


def test_an_exception_in_a_block_is_the_reason_of_the_abort(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeroDivisionError), bench.begin(ORDERS) as transaction:
        transaction.write(ORDERS, value=bytes(1 // 0))
    assert bench.sender.kinds(ORDERS) == [FrameKind.BEGIN, FrameKind.ABORT]
    assert decode_abort(bench.sender.sent[-1].value).startswith("ZeroDivisionError: ")
    assert "transaction.abort_unseen" in caplog.text, "nobody answered, and the user's own exception must come first"


def test_a_block_that_aborted_by_itself_ends_quietly(bench: Bench) -> None:
    with bench.begin(ORDERS) as transaction:
        transaction.abort_async()
    assert bench.sender.kinds(ORDERS) == [FrameKind.BEGIN, FrameKind.ABORT]


def test_a_timestamp_before_1970_is_refused(bench: Bench) -> None:
    with pytest.raises(InvalidRequestError, match="1970"):
        bench.begin().write(ORDERS, value=b"v", timestamp=-1)


def test_what_only_an_open_transaction_needs_is_let_go(bench: Bench) -> None:
    transaction = bench.begin(ORDERS)
    completion = transaction._writing.completion
    assert len(completion.writers) == 1
    transaction.commit_async()
    bench.settle(transaction, ControlKind.COMMIT)
    assert not completion.writers


@pytest.mark.parametrize("looks", [0, 2, None], ids=["at once", "later", "never"])
def test_a_commit_that_waits_for_something_says_so_in_the_log_and_goes_on_waiting(
    looks: int | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollbridge.client.transaction.TELL_AFTER_S", 0.001)
    monkeypatch.setattr(LIMITER, "_causes", {})
    reason = Explained(f"nobody leads {GROUP}")
    found = repeat(Explained("")) if looks is None else chain(repeat(Explained(""), looks), repeat(reason))
    bench = Bench()
    bench.leaders.explain = lambda *_: next(found)
    txn = bench.begin()
    with pytest.raises(OutcomeUnknownError):
        txn.commit(timeout=0.2)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    text = f"transaction.waits end=commit: nobody leads {GROUP}"
    assert told == ([] if looks is None else [text])


def test_a_commit_that_its_leader_has_read_is_told_to_wait_for_what_the_leader_says() -> None:
    bench = Bench()
    why = "its leader says: waits for stream sales/orders, which is in an error state"
    bench.leaders.explain = lambda *_: Explained(why, is_read=True)
    with pytest.raises(OutcomeUnknownError, match=f"{why}; it is carried out once that is over"):
        bench.begin().commit(timeout=0)


@pytest.mark.parametrize(("kind", "error"), [(ControlKind.COMMIT, None), (ControlKind.ABORT, TransactionAbortedError)])
def test_an_end_that_is_decided_while_its_leader_is_asked_why_not_is_told(
    bench: Bench, kind: ControlKind, error: type[Exception] | None
) -> None:
    bench.use(ORDERS)
    asked: list[Transaction] = []

    def explain(*_: object) -> Explained:
        while asked:
            bench.settle(asked.pop(), kind, reason="x")
        return Explained("")

    bench.leaders.explain = explain
    asked.append(bench.begin())
    txn = asked[0]
    with nullcontext() if error is None else pytest.raises(error):
        txn.commit(timeout=0)


@pytest.mark.parametrize("streams", [(ORDERS,), (ORDERS, PAYMENTS)])
@pytest.mark.parametrize("end", [Transaction.commit_async, Transaction.abort_async])
def test_no_leader_is_asked_about_a_transaction_that_no_broker_has_taken(
    bench: Bench, streams: tuple[str, ...], end: Callable[[Transaction], object]
) -> None:
    """It would call it forgotten, if it remembers none that was begun so early."""
    transaction = bench.begin(*streams)
    transaction.write(ORDERS, b"key", b"value")
    end(transaction)
    transaction._writing.doubt()
    assert bench.outcomes.doubted == []
    bench.sender.acknowledge()
    transaction._writing.doubt()
    assert bench.outcomes.doubted == [transaction.id.bytes]
