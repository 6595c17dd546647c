"""What a transaction sends, in which order, and what it makes of failed sends; the brokers are played by the test."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import chain, repeat
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from rollbridge.client.futures import Completion, FrameLimits
from rollbridge.client.identity import CommitNumbers
from rollbridge.client.results import PartHandle, Piece
from rollbridge.client.runtime import BeginPlan, Explained, Runtime
from rollbridge.client.sender import Undelivered
from rollbridge.client.transaction import Transaction
from rollbridge.client.writing import Part
from rollbridge.errors import (
    BackpressureError,
    IncompleteError,
    InvalidRequestError,
    NotAuthorizedError,
    OutcomeUnknownError,
    TransactionAbortedError,
    TransactionClosedError,
    TransactionCommittedError,
    TransactionExpiredError,
    UnavailableError,
)
from rollbridge.kafka.ratelimit import LIMITER
from rollbridge.model.control import EXPIRED, ControlKind, ControlRecord
from rollbridge.model.epochs import EpochHistory
from rollbridge.model.frames import (
    BUNDLE_BYTES_MAX,
    BeginFrame,
    FrameKind,
    decode_abort,
    decode_begin,
    decode_manifest,
    unpack_bundle,
    unpack_header,
)
from rollbridge.model.ids import TransactionId
from rollbridge.model.keyspace import even_ranges
from rollbridge.model.names import GroupName, StreamName
from rollbridge.model.records import StreamConfig
from rollbridge.model.routing import Route

ORDERS, PAYMENTS = "sales/orders", "sales/payments"
GROUP = GroupName("sales")
BUFFER = "sales.orders.transaction-buffer"
REFUSED = Undelivered(ErrorCode.message_too_large, is_refusal=True, topic=BUFFER)
LOST = Undelivered(ErrorCode.unknown_server_error, is_refusal=False, topic=BUFFER)
DENIED = Undelivered(ErrorCode.topic_authorization_failed, is_refusal=True, topic=BUFFER)
LEASE_END = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Sent:
    topic: str
    partition: int
    kinds: list[FrameKind]
    """The kinds of the frames in the message; several if it is a bundle."""
    value: bytes
    """The value of the last frame."""
    delivered: Callable[[Any], object]
    soon: bool


@dataclass
class RecordingSender:
    """Stands where the producer would; acknowledges when the test says so."""

    sent: list[Sent] = field(default_factory=list)
    full_after: int = 1_000_000
    acknowledged: int = 0
    asked: Callable[[], None] = lambda: None
    """Called before a frame is taken, while the transaction waits for it."""

    def send(self, topic: str, partition: int, key: bytes, value: bytes, delivered: Any) -> None:
        self.asked()
        if len(self.sent) >= self.full_after:
            raise BackpressureError("full")
        self._note(topic, partition, key, value, delivered, soon=False)

    def send_soon(self, topic: str, partition: int, key: bytes, value: bytes, delivered: Any) -> None:
        self._note(topic, partition, key, value, delivered, soon=True)

    def wait_until(self, reached: Callable[[], bool], timeout_s: float | None) -> bool:
        return reached()

    def _note(self, topic: str, partition: int, key: bytes, value: bytes, delivered: Any, *, soon: bool) -> None:
        header = unpack_header(key)
        assert header is not None
        frames = unpack_bundle(header, value) if header.kind is FrameKind.BUNDLE else [(header, 0, value)]
        assert {inner.transaction for inner, _, _ in frames} == {header.transaction}
        kinds = [inner.kind for inner, _, _ in frames]
        self.sent.append(Sent(topic, partition, kinds, frames[-1][2], delivered, soon))

    def kinds(self, stream: str) -> list[FrameKind]:
        topic = StreamName.parse(stream).buffer_topic()
        return [kind for item in self.sent if item.topic == topic for kind in item.kinds]

    def acknowledge(self, count: int | None = None, fault: Undelivered | None = None) -> None:
        """Report the fate of the oldest frames that have none yet."""
        end = len(self.sent) if count is None else self.acknowledged + count
        for item in self.sent[self.acknowledged : end]:
            self.acknowledged += 1
            item.delivered(fault)


@dataclass
class Waiting:
    waiting: dict[bytes, Completion] = field(default_factory=dict)


class Streams:
    """Streams of two segments whose first epoch is sealed."""

    config = StreamConfig(name=StreamName.parse(ORDERS), group=GROUP, created_ms=0, buffer_topic_id="")

    def __init__(self) -> None:
        first = EpochHistory.create(even_ranges(2), 0)
        second = replace(
            first.plan_scale([0, 1], even_ranges(2), 1), sealed_ends={item.id: 5 for item in first.active.segments}
        )
        self.history = first.with_records(second)
        self.generation = 1

    def grown(self, route: Route) -> Route:
        return route

    def view(self, stream: str) -> Streams:
        return self

    def find(self, name: str) -> str | None:
        return name if "/" in name else None

    read = view


@dataclass
class Bench:
    """A client without a cluster."""

    sender: RecordingSender = field(default_factory=RecordingSender)
    catalog: Streams = field(default_factory=Streams)
    outcomes: Waiting = field(default_factory=Waiting)
    plan: BeginPlan = field(init=False)
    runtime: Runtime = field(init=False)
    events: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.use(ORDERS, PAYMENTS)
        self.runtime = Runtime(
            self.sender,  # type: ignore[arg-type]
            self.catalog,  # type: ignore[arg-type]
            self.outcomes,  # type: ignore[arg-type]
            FrameLimits(),
            0.01,
            CommitNumbers(lambda _: 25_000),
            timedelta(days=7),
            lambda group, transaction, timeout_s: LEASE_END,
            lambda group, transaction: Explained(f"nobody leads {group}", self.events),
        )

    def use(self, *streams: str, partitions: int = 4, segments: int = 1) -> None:
        history = EpochHistory.create(even_ranges(segments), 0)
        routes = tuple(
            Route.of(
                StreamConfig(
                    name=StreamName.parse(stream),
                    group=GROUP,
                    buffer_partitions=partitions,
                    created_ms=0,
                    buffer_topic_id="",
                ),
                history.active,
            )
            for stream in streams
        )
        begin = BeginFrame("loader", 0, "a label", 1_000, dict.fromkeys(streams, 0))
        self.plan = BeginPlan(GROUP, begin, routes, 0)

    def begin(self, counter: int = 6) -> Transaction:
        return Transaction(self.runtime, self.plan, counter)

    def settle(self, transaction: Transaction, kind: ControlKind, reason: str = "", offset: int = 5) -> None:
        record = ControlRecord(transaction.id, kind, "loader", 0, 0, 1, reason=reason)
        self.outcomes.waiting.pop(transaction.id.bytes).settle(record.encode_value(), offset)


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


def test_one_stream_needs_no_acknowledgement_before_the_commit(bench: Bench) -> None:
    bench.use(ORDERS)
    transaction = bench.begin()
    transaction.write(ORDERS, key=b"k", value=b"v")
    transaction.commit_async()
    assert bench.sender.kinds(ORDERS) == [FrameKind.BEGIN, FrameKind.DATA, FrameKind.COMMIT]
    assert decode_manifest(bench.sender.sent[-1].value).pieces == {(0, 0, 0): 1}


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
        transaction = bench.begin(counter)
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
    bench.use(ORDERS)
    transaction = bench.begin()
    first, second = transaction.commit_async(), transaction.commit_async()
    assert bench.sender.kinds(ORDERS).count(FrameKind.COMMIT) == 1
    bench.settle(transaction, ControlKind.COMMIT)
    assert first.result(0) == second.result(0) == transaction.commit()
    assert (first.result().records, first.result().first, first.result().position) == (0, None, 5)


def test_a_frame_refused_before_the_commit_makes_it_incomplete(bench: Bench) -> None:
    bench.use(ORDERS)
    transaction = bench.begin()
    with pytest.raises(UnavailableError):
        transaction.flush()
    bench.sender.acknowledge()
    future = transaction.write(ORDERS, key=b"k", value=b"v")
    with pytest.raises(UnavailableError):
        transaction.flush()
    bench.sender.acknowledge(fault=REFUSED)
    with pytest.raises(IncompleteError, match="too large"):
        transaction.commit()
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
    bench.use(ORDERS)
    transaction = bench.begin()
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
    bench.use(ORDERS)
    transaction = bench.begin()
    future = transaction.commit_async()
    bench.sender.acknowledge(1, fault=REFUSED)
    assert isinstance(future.exception(0), IncompleteError)
    assert bench.outcomes.waiting == {}
    transaction.abort()
    assert bench.sender.kinds(ORDERS) == [FrameKind.BEGIN, FrameKind.COMMIT]


def test_a_begin_that_may_have_arrived_is_taken_back(bench: Bench) -> None:
    bench.use(ORDERS)
    transaction = bench.begin()
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
    bench.use(ORDERS)
    transaction = bench.begin()
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
    bench.use(ORDERS)
    transaction = bench.begin()
    with pytest.raises(OutcomeUnknownError, match="nobody leads sales/default") as unknown:
        transaction.commit()
    assert unknown.value.transaction == str(transaction.id)
    bench.settle(transaction, ControlKind.COMMIT)
    assert transaction.commit().records == 0


def test_abort_drops_what_was_not_sent(bench: Bench) -> None:
    bench.use(ORDERS)
    transaction = bench.begin()
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
    bench.use(ORDERS)
    transaction = bench.begin()
    transaction.commit_async()
    bench.settle(transaction, ControlKind.COMMIT)
    with pytest.raises(TransactionCommittedError):
        transaction.abort()
    assert FrameKind.ABORT not in bench.sender.kinds(ORDERS)


def test_abort_of_a_commit_that_ends_as_aborted_is_what_was_wanted(bench: Bench) -> None:
    bench.use(ORDERS)
    transaction = bench.begin()
    transaction.commit_async()
    bench.settle(transaction, ControlKind.ABORT, reason="too large")
    transaction.abort()


@pytest.mark.parametrize("wish", ["commit_async", "abort_async"])
def test_nothing_can_be_written_after_the_end_was_asked_for(bench: Bench, wish: str) -> None:
    transaction = bench.begin()
    getattr(transaction, wish)()
    with pytest.raises(TransactionClosedError):
        transaction.write(ORDERS, key=b"k", value=b"v")
    with pytest.raises(TransactionClosedError):
        transaction.write_all(ORDERS, [(b"k", b"v")])


def test_an_open_transaction_learns_that_it_ended(bench: Bench) -> None:
    bench.use(ORDERS)
    transaction = bench.begin()
    transaction.write(ORDERS, key=b"k", value=b"v")
    bench.settle(transaction, ControlKind.ABORT, reason=EXPIRED)
    for attempt in (lambda: transaction.write(ORDERS, value=b"v"), transaction.commit):
        with pytest.raises(TransactionExpiredError):
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


@pytest.mark.parametrize("wish", ["commit_async", "abort_async"])
def test_back_pressure_at_the_end_of_a_bundle_leaves_it_open(bench: Bench, wish: str) -> None:
    bench.use(ORDERS)
    transaction = bench.begin()
    transaction.write(ORDERS, key=b"k", value=b"v")
    bench.sender.full_after = 0
    with pytest.raises(BackpressureError):
        getattr(transaction, wish)()
    bench.sender.full_after = 10
    transaction.commit_async()
    [message] = bench.sender.sent
    assert message.kinds == [FrameKind.BEGIN, FrameKind.DATA, FrameKind.COMMIT]


def test_a_small_transaction_is_one_message(bench: Bench) -> None:
    bench.use(ORDERS)
    transaction = bench.begin()
    transaction.write(ORDERS, key=b"k", value=b"v")
    assert bench.sender.sent == []
    transaction.commit_async()
    [message] = bench.sender.sent
    assert message.kinds == [FrameKind.BEGIN, FrameKind.DATA, FrameKind.COMMIT]


def test_what_waits_in_the_outbox_goes_after_a_moment(bench: Bench) -> None:
    bench.use(ORDERS)
    transaction = bench.begin()
    long_ago, deadline = time.monotonic() - 60, time.monotonic() + 120
    while not bench.sender.sent:
        transaction.cut_older(long_ago)
        assert time.monotonic() < deadline
    assert bench.sender.kinds(ORDERS) == [FrameKind.BEGIN]
    transaction.cut_older(long_ago)
    assert bench.sender.kinds(ORDERS) == [FrameKind.BEGIN], "and only once"


def test_a_transaction_whose_frames_wait_for_room_is_not_prompt(bench: Bench) -> None:
    """Housekeeping holds its lock meanwhile, for which the thread of an event loop must not wait."""
    bench.use(ORDERS)
    transaction = bench.begin()
    found: list[bool] = []
    bench.sender.asked = lambda: found.append(transaction.is_prompt())
    while not found:
        assert transaction.is_prompt()
        transaction.cut_older(time.monotonic() - 60)
    assert found == [False]
    assert transaction.is_prompt()


def test_large_frames_go_by_themselves_behind_what_waits(bench: Bench) -> None:
    bench.use(ORDERS)
    transaction = bench.begin()
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
    bench.use(ORDERS)
    transaction = bench.begin()
    transaction.write(ORDERS, key=b"k", value=b"v")
    with pytest.raises(UnavailableError, match="still being sent"):
        transaction.flush()
    assert bench.sender.kinds(ORDERS) == [FrameKind.BEGIN, FrameKind.DATA]
    bench.sender.acknowledge()
    transaction.flush()


def test_flush_tells_of_a_refused_frame(bench: Bench) -> None:
    bench.use(ORDERS)
    transaction = bench.begin()
    with pytest.raises(UnavailableError):
        transaction.flush()
    bench.sender.acknowledge(fault=REFUSED)
    with pytest.raises(IncompleteError, match="too large"):
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
    bench.use(ORDERS)
    owner = bench.begin()
    part = Part(bench.runtime, bench.plan, owner.completion, 3)
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
    bench.use(ORDERS)
    owner = bench.begin()
    part = Part(bench.runtime, bench.plan, owner.completion, 3)
    bench.settle(owner, ControlKind.ABORT, reason="x")
    with pytest.raises(TransactionAbortedError):
        part.finish()


def test_the_end_of_a_block_commits(bench: Bench) -> None:
    bench.use(ORDERS)
    with pytest.raises(OutcomeUnknownError), bench.begin() as transaction:
        transaction.write(ORDERS, value=b"v")
    assert bench.sender.kinds(ORDERS) == [FrameKind.BEGIN, FrameKind.DATA, FrameKind.COMMIT]


def test_an_exception_in_a_block_is_the_reason_of_the_abort(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.use(ORDERS)
    with pytest.raises(ZeroDivisionError), bench.begin() as transaction:
        transaction.write(ORDERS, value=bytes(1 // 0))
    assert bench.sender.kinds(ORDERS) == [FrameKind.BEGIN, FrameKind.ABORT]
    assert decode_abort(bench.sender.sent[-1].value).startswith("ZeroDivisionError: ")
    assert "was not seen to abort" in caplog.text, "nobody answered, and the user's own exception must come first"


def test_a_block_that_aborted_by_itself_ends_quietly(bench: Bench) -> None:
    bench.use(ORDERS)
    with bench.begin() as transaction:
        transaction.abort_async()
    assert bench.sender.kinds(ORDERS) == [FrameKind.BEGIN, FrameKind.ABORT]


def test_a_timestamp_before_1970_is_refused(bench: Bench) -> None:
    with pytest.raises(InvalidRequestError, match="1970"):
        bench.begin().write(ORDERS, value=b"v", timestamp=-1)


def test_what_only_an_open_transaction_needs_is_let_go(bench: Bench) -> None:
    bench.use(ORDERS)
    transaction = bench.begin()
    completion = transaction.completion
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
    bench.runtime = replace(bench.runtime, explain=lambda *_: next(found))
    txn = bench.begin()
    with pytest.raises(OutcomeUnknownError):
        txn.commit(timeout=0.2)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    text = f"a transaction's commit waits: nobody leads {GROUP}; it goes on waiting"
    assert told == ([] if looks is None else [text])


def test_a_commit_that_its_leader_has_read_is_told_to_wait_for_what_the_leader_says() -> None:
    bench = Bench()
    why = "its leader says: waits for stream sales/orders, which is in an error state"
    bench.runtime = replace(bench.runtime, explain=lambda *_: Explained(why, is_read=True))
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

    bench.runtime = replace(bench.runtime, explain=explain)
    asked.append(bench.begin())
    txn = asked[0]
    with nullcontext() if error is None else pytest.raises(error):
        txn.commit(timeout=0)
