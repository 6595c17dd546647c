"""Simulation of a client's transactions and their protocol: answers that are late, lost or faults, takeovers, forks.

Transactions and their protocol are the real ones; buffers, the sender and the leader are not. Answers come between any
two frames that are handed over, as on a thread that is faster. ``run(seed)`` repeats a history exactly.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import pytest
from kio.schema.errors import ErrorCode

from bridge.tests.transaction_makers import Bench
from rollbridge.buffer.frames import FrameKind, unpack_bundle, unpack_header
from rollbridge.client.protocol import ENDS, Due, EndAction, EndEvent, EndState, TransactionProtocol
from rollbridge.client.savepoints import SavepointFuture
from rollbridge.client.sender import Delivered, Undelivered
from rollbridge.client.sessions import TELL_EVERY_S
from rollbridge.client.transaction import Transaction
from rollbridge.client.writing import OwnerWriting
from rollbridge.commitlog.control import EXPIRED, ControlKind
from rollbridge.errors import BackpressureError, IncompleteError, RollbridgeError

STREAMS = ("sales/orders", "sales/payments", "sales/audit")
ENDING = (FrameKind.COMMIT, FrameKind.ABORT)
SEEDS = 400


@dataclass
class Message:
    """A message on its way: the kinds of its frames, and how many had been handed over to each buffer before it."""

    topic: str
    kinds: list[FrameKind]
    delivered: Delivered
    is_soon: bool
    is_repeated: bool = False


class World:
    """Buffers of one transaction, the sender in front of them, and the leader behind them."""

    def __init__(self, seed: int) -> None:
        self.choice = random.Random(seed)
        self.bench = Bench()
        self.bench.runtime = replace(self.bench.runtime, sender=cast("Any", self))
        self.bench.use(*STREAMS[: self.choice.choice((1, 2, 2, 3))])
        self.first = self.bench.plan.buffers[0][0]
        self.is_slow = self.choice.random() < 0.5
        self.faults = self.choice.choice((0.0, 0.0, 0.05, 0.3))
        self.pending: dict[str, deque[Message]] = defaultdict(deque)
        self.handed: defaultdict[str, int] = defaultdict(int)
        self.answered: defaultdict[str, int] = defaultdict(int)
        self.buffer: list[FrameKind] = []
        self.ends: list[tuple[FrameKind, bool]] = []
        self.needs: dict[str, int] = {}
        self.saved: deque[tuple[SavepointFuture, dict[str, int]]] = deque()
        self.futures: list[tuple[SavepointFuture, bool]] = []
        self.has_failed = False
        self.is_repeating = False
        self.is_over = False

    # As the sender

    def send(self, topic: str, partition: int, key: bytes, value: bytes, delivered: Delivered) -> None:
        self.deliver_some()
        if self.choice.random() < 0.05:
            raise BackpressureError("full")
        self._take(topic, key, value, delivered, is_soon=False)
        self.deliver_some()

    def send_soon(self, topic: str, partition: int, key: bytes, value: bytes, delivered: Delivered) -> None:
        self._take(topic, key, value, delivered, is_soon=True)

    def wait_until(self, reached: Callable[[], bool], timeout_s: float | None) -> bool:
        self.deliver_all()
        assert reached(), "what was sent has been answered, and somebody still waits for it"
        return True

    def _take(self, topic: str, key: bytes, value: bytes, delivered: Delivered, *, is_soon: bool) -> None:
        header = unpack_header(key)
        assert header is not None
        bundle = unpack_bundle(header, value) if header.kind is FrameKind.BUNDLE else [(header, 0, value)]
        message = Message(topic, [inner.kind for inner, _, _ in bundle], delivered, is_soon, self.is_repeating)
        if FrameKind.SAVEPOINT in message.kinds and self.saved:
            self._check(self.saved.popleft()[1], "a savepoint")
        for kind in message.kinds:
            if kind in ENDING:
                self._check_end(kind, message)
        self.handed[topic] += 1
        self.pending[topic].append(message)

    def _check(self, needs: Mapping[str, int], what: str) -> None:
        early = {topic for topic, count in needs.items() if topic != self.first and self.answered[topic] < count}
        assert not early, f"{what} is sent before the brokers have answered for what it names in {early}"

    def _check_end(self, kind: FrameKind, message: Message) -> None:
        asked = [known for known, is_repeated in self.ends if not is_repeated]
        if kind is FrameKind.COMMIT:
            self._check(self.needs, "a commit")
            assert message.is_repeated or FrameKind.COMMIT not in asked, "a commit is sent twice"
            assert FrameKind.ABORT not in asked, "a commit is sent behind an abort"
            assert message.is_repeated or not (message.is_soon and self.has_failed), (
                "a held commit is sent although a frame was refused"
            )
        self.ends.append((kind, message.is_repeated))

    # As brokers

    def deliver_some(self) -> None:
        while self.choice.random() < (0.1 if self.is_slow else 0.5) and self._deliver():
            pass

    def deliver_all(self) -> None:
        while self._deliver():
            pass

    def _deliver(self) -> bool:
        """Answer for the oldest message of a buffer: it is there, once or twice, or is refused, or nobody knows."""
        topic = self.choice.choice([name for name, items in self.pending.items() if items] or [""])
        if not topic:
            return False
        message = self.pending[topic].popleft()
        fault = None
        arrives = 1 if self.choice.random() < 0.9 else 2
        if self.choice.random() < self.faults:
            is_refusal = self.choice.random() < 0.5
            arrives = 0 if is_refusal else self.choice.randrange(2)
            fault = Undelivered(ErrorCode.message_too_large, is_refusal=is_refusal, topic=topic)
            self.has_failed = True
        if topic == self.first:
            self.buffer += message.kinds * arrives
        self.answered[topic] += 1
        message.delivered(fault)
        return True

    # As the application

    def play(self, transaction: Transaction) -> None:
        for _ in range(self.choice.randrange(1, 14)):
            self.deliver_some()
            action = self.choice.choice(
                (self.write, self.write, self.write, self.save, self.flush, self.end, self.again)
            )
            with suppress(BackpressureError, IncompleteError):
                action(transaction)
            if self.choice.random() < 0.04 and not transaction._writing.completion.settled:
                self.outcome(transaction)
                return
        while transaction._writing.protocol.asked is None and not transaction._writing.completion.closed:
            with suppress(BackpressureError):
                self.end(transaction)

    def write(self, transaction: Transaction) -> None:
        if not transaction._writing.completion.closed:
            with suppress(RollbridgeError):
                transaction.write(self.choice.choice(transaction.streams), key=b"k", value=b"v")

    def save(self, transaction: Transaction) -> None:
        if transaction._writing.completion.closed:
            return
        self.saved.append((cast("Any", None), self._now(transaction)))
        held = len(self.saved)
        try:
            future = transaction.savepoint_async()
        except RollbridgeError:
            if len(self.saved) == held:
                self.saved.pop()
            return
        self.futures.append((future, self.has_failed))

    def flush(self, transaction: Transaction) -> None:
        transaction.flush()

    def end(self, transaction: Transaction) -> None:
        self.needs = self.needs or self._now(transaction)
        before, is_closed = transaction._writing.protocol.asked, transaction._writing.completion.closed
        is_commit = self.choice.random() < 0.7
        try:
            (transaction.commit_async if is_commit else transaction.abort_async)()
        finally:
            if transaction._writing.protocol.asked is None:
                self.needs = {}
        if before is None and not is_closed:
            wanted = EndEvent.COMMIT if is_commit else EndEvent.ABORT
            assert transaction._writing.protocol.asked is wanted, "something else was asked for"
        assert before in (None, transaction._writing.protocol.asked), "something else is asked for later"

    def again(self, transaction: Transaction) -> None:
        """The leader has not heard of the end, and says so."""
        if transaction._writing._asked is not None and not self.is_over:
            self.is_repeating = True
            transaction._writing.ask_again(transaction._writing._asked.order)
            self.is_repeating = False

    def allow(self) -> None:
        """Refuse nothing any more, and let the housekeeping thread look twice, long after."""
        self.faults, self.is_repeating = 0.0, True
        for times in (1, 2):
            for line in list(self.bench.runtime.commits._in_flight._lines.values()):
                line.look(time.monotonic() + times * 2 * TELL_EVERY_S)
            self.deliver_all()

    def outcome(self, transaction: Transaction) -> None:
        """It is over: its lease ended, or a newer session has it, or this process is a fork."""
        self.is_over = True
        how = self.choice.randrange(3)
        if how == 0:
            self.bench.settle(transaction, ControlKind.ABORT, reason=EXPIRED)
        elif how == 1:
            transaction._writing.completion.fence()
        else:
            transaction._writing.completion.leave("this process is a fork")

    def _now(self, transaction: Transaction) -> dict[str, int]:
        """Return how many messages the buffers will have got once everything written has been handed over."""
        slots = [slot for slot in transaction._writing.writer.slots() if slot.in_batch or slot.ready is not None]
        found = dict(self.handed)
        for slot in slots:
            topic = transaction._writing.buffers[slot.place][0]
            found[topic] = found.get(topic, 0) + 1
        return found


def run(seed: int) -> str:
    """Play one transaction to its end, and check what has come of it; return how it ended."""
    world = World(seed)
    try:
        transaction = world.bench.begin()
    except BackpressureError:
        world.deliver_all()
        return "not begun"
    world.play(transaction)
    world.deliver_all()
    protocol, completion = transaction._writing.protocol, transaction._writing.completion
    assert world.is_over or sum(protocol.sent) <= protocol.answers, "somebody waits for what is never answered"
    for future, _ in world.futures:
        assert future.done() or world.is_over, "a savepoint is neither made nor refused"
    if world.is_over:
        return "over"
    assert protocol.state is not EndState.HELD, "the commit is held for ever"
    sent = [kind for kind, _ in world.ends]
    assert sent or completion.settled, "no end was sent"
    arrived = [kind for kind in world.buffer if kind in ENDING]
    if protocol.asked is EndEvent.COMMIT and not arrived and not completion.settled:
        assert sent[-1] is FrameKind.ABORT, "a commit did not arrive, and nothing takes it back"
    if protocol.asked is EndEvent.COMMIT and not world.has_failed:
        assert protocol.state is EndState.COMMITTING, "a commit that nothing stands against is given up"
    if protocol.state is EndState.COMMITTING:
        assert FrameKind.COMMIT in arrived, "the commit is taken for sent, and is not there"
    state = str(protocol.state.value)
    world.allow()
    if completion.key in world.bench.outcomes.waiting:
        assert not set(ENDING).isdisjoint(world.buffer), "it is open until its lease ends, though brokers take its end"
    return state


def test_ends_are_sent_when_they_may_be() -> None:
    ways = {run(seed) for seed in range(SEEDS)}
    assert ways >= {"committing", "aborting", "taken-back", "over"}


@pytest.mark.long
def test_ends_are_sent_when_they_may_be_in_many_histories() -> None:
    for seed in range(SEEDS, 20_000):
        run(seed)


def test_the_table_is_complete() -> None:
    assert ENDS.keys() == set(product(EndState, EndEvent))
    assert all(state is EndState.ENDED for (_, event), (state, _) in ENDS.items() if event is EndEvent.SETTLED)


DUE = TransactionProtocol.due


def _never_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransactionProtocol, "is_answered", lambda *_: True)


def _holds_for_ever(patch: pytest.MonkeyPatch) -> None:
    def due(self: Any, *, failed: bool) -> Iterator[Due[Any]]:
        return (item for item in DUE(self, failed=failed) if item.savepoint is not None)

    patch.setattr(TransactionProtocol, "due", due)


def _knows_no_faults(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransactionProtocol, "due", lambda self, *, failed: DUE(self, failed=False))


def _forgets_unsent_savepoints(patch: pytest.MonkeyPatch) -> None:
    def due(self: Any, *, failed: bool) -> Iterator[Due[Any]]:
        for item in DUE(self, failed=failed):
            self.dropped = 0
            yield item

    patch.setattr(TransactionProtocol, "due", due)


def _aborts_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OwnerWriting, "abort_again", lambda self: setattr(self.completion, "is_missing", False))


def _row(state: EndState, event: EndEvent, *step: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setitem(cast("Any", ENDS), (state, event), step)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "never-held": _never_held,
    "held-for-ever": _holds_for_ever,
    "knows-no-faults": _knows_no_faults,
    "forgets-unsent-savepoints": _forgets_unsent_savepoints,
    "aborts-once": _aborts_once,
    "asked-once": _row(EndState.COMMITTING, EndEvent.UNSENT, EndState.COMMITTING, EndAction.NOTHING),
    "refused-and-left": _row(EndState.COMMITTING, EndEvent.REFUSED, EndState.COMMITTING, EndAction.NOTHING),
    "sent-before-its-time": _row(EndState.HELD, EndEvent.MISSED, EndState.COMMITTING, EndAction.COMMIT),
    "again-behind-an-abort": _row(EndState.TAKEN_BACK, EndEvent.MISSED, EndState.COMMITTING, EndAction.COMMIT),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_checks_catch_a_defect(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant](monkeypatch)

    def goes_wrong(seed: int) -> bool:
        try:
            run(seed)
        except Exception:
            return True
        return False

    assert any(goes_wrong(seed) for seed in range(SEEDS))
