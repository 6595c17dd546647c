"""Simulation of a sender and its links: they are idle, too old, closed by brokers, silent; dials fail or hang.

The sender, its dispatcher and its cache of leaders are the real ones, and so are sockets, as far as they are polled;
brokers, the clock and the thread that reaches brokers are not. ``run(seed)`` repeats a history exactly.
"""

from __future__ import annotations

import random
import socket
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from rollbridge.errors import AuthenticationError, KafkaUnavailableError, NotAuthorizedError, RollbridgeError
from rollbridge.kafka import dispatch as dispatching
from rollbridge.kafka import metadata
from rollbridge.kafka import sender as sending
from rollbridge.kafka.dispatch import BrokerLink, Dispatcher
from rollbridge.kafka.errors import ConnectionLostError
from rollbridge.kafka.metadata import Broker, Cluster
from rollbridge.kafka.queues import Lane, PartitionQueue, QueuedBatch
from rollbridge.kafka.sender import Sender, SenderLimits
from rollbridge.stream.names import Partition

NODES = (1, 2, 3)
TOPICS = ("a", "b", "c", "d")
IDLE_S, OLD_S, REQUEST_S, DIAL_S = 540.0, 900.0, 30.0, 10.0
HEALTHY_S = 300.0
"""Within this time what belongs to brokers without a fault is written, whatever the others do."""


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class BrokerNode:
    """A broker: its part of the partitions' logs is shared, as replicas are in sync."""

    def __init__(self, world: World, node: int) -> None:
        self.world, self.node = world, node
        self.state = "up"
        self.lines: list[Line] = []

    def hang_up(self) -> None:
        for line in self.lines:
            line.far.close()
        self.lines.clear()


class Line:
    """A connection: readable when its broker has closed it or answered."""

    def __init__(self, world: World, broker: BrokerNode) -> None:
        self._world, self._broker = world, broker
        self.address = f"broker-{broker.node}"
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.opened = self.used = world.clock.now
        self.sent: deque[tuple[list[Any], float]] = deque()
        self.is_closed = False
        broker.lines.append(self)
        world.lines.append(self)

    @property
    def in_flight(self) -> int:
        return len(self.sent)

    def fileno(self) -> int:
        return self.near.fileno()

    def is_cut(self) -> bool:
        return self.far.fileno() < 0

    def alive(self) -> bool:
        return not (self.is_closed or self.sent or self.is_cut())

    def expired(self) -> bool:
        return self._world.clock.now - self.opened >= OLD_S

    def usable(self) -> bool:
        return self.alive() and not self.expired() and self._world.clock.now - self.used < IDLE_S

    def overdue(self) -> bool:
        return bool(self.sent) and self._world.clock.now - self.sent[0][1] >= REQUEST_S

    def has_answer(self) -> bool:
        return bool(self.sent) and (self.is_cut() or self._broker.state == "up")

    def require(self, *_: object) -> None:
        pass

    def send_body(self, _key: int, _version: int, items: list[Any]) -> None:
        assert not self.is_closed, "a closed connection was used"
        if self.is_cut():
            self.close()
            raise ConnectionLostError("cut")
        self.used = self._world.clock.now
        self.sent.append((items, self.used))

    def receive(self, _kind: object) -> Any:
        items, _ = self.sent.popleft()
        if self.is_cut():
            if self._world.rng.random() < 0.5:  # it was written, and the answer is lost
                for item in items:
                    self._world.append(self._broker.node, *item)
            self.close()
            raise ConnectionLostError("cut")
        answers = defaultdict(list)
        for item in items:
            (topic, number), *_ = item
            code, base = self._world.append(self._broker.node, *item)
            answers[topic].append(SimpleNamespace(index=number, error_code=code, base_offset=base, error_message=None))
        return SimpleNamespace(
            responses=[SimpleNamespace(name=topic, partition_responses=found) for topic, found in answers.items()]
        )

    def close(self) -> None:
        self.is_closed = True
        self.sent.clear()
        self.near.close()
        self.far.close()


class Batch(QueuedBatch):
    """A batch of one record, which is its number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.count, self.data = 1, bytes(10)
        self.number = number


class Leaders(Cluster):
    """The real cache of leaders; what brokers say is the world's."""

    def __init__(self, world: World) -> None:
        super().__init__("broker-1:1")
        self._world = world

    def metadata(self, topics: Iterable[str] | None, *, with_operations: bool = False) -> Any:
        if all(broker.state != "up" for broker in self._world.brokers.values()):
            raise KafkaUnavailableError("nobody answers")
        return SimpleNamespace(
            brokers=[SimpleNamespace(node_id=node, host=f"broker-{node}", port=1) for node in NODES],
            topics=[
                SimpleNamespace(
                    name=topic,
                    topic_id=topic,
                    error_code=ErrorCode.none,
                    partitions=[
                        SimpleNamespace(partition_index=0, leader_id=node, leader_epoch=epoch)
                        for node, epoch in [self._world.leaders[topic]]
                    ],
                )
                for topic in topics or ()
            ],
        )

    def dial(self, broker: Broker) -> Any:
        found = self._world.brokers[int(broker.host.rpartition("-")[2])]
        match found.state:
            case "up":
                return Line(self._world, found)
            case "hung":
                self._world.clock.sleep(DIAL_S)
                raise KafkaUnavailableError(f"{broker.host} does not answer")
            case "refusing":
                raise AuthenticationError(f"{broker.host} refuses the password")
            case _:
                raise KafkaUnavailableError(f"{broker.host} is away")


class InlineCall:
    """Stands for the thread that reaches brokers: what it does is done at once."""

    under_way = done = False

    def __init__(self, _name: str) -> None:
        pass

    def begin(self, run: Callable[[], None], then: Callable[[], object]) -> None:
        run()
        then()

    def wait(self, _seconds: float) -> bool:
        return True


class PlainSender(Sender[Batch]):
    """A sender without anything of frames or streams."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.all = {topic: PartitionQueue[Batch]((topic, 0), Lane(), placed=True) for topic in TOPICS}
        self.told: list[int] = []
        self.turns_left = 0
        limits = SenderLimits(buffer_bytes=1 << 20, block_s=1.0)
        super().__init__(lambda: Leaders(world), limits, name="sender", producer=(7, 0))

    def write(self, topic: str, batch: Batch, *, may_send: bool) -> None:
        with self.lock:
            self.all[topic].pending.append(batch)
            self.queued(self.all[topic], batch, may_send=may_send)

    def written(self, queue: PartitionQueue[Batch], batch: Batch, base_offset: int) -> None:
        assert self.world.logs[queue.topic][base_offset] == batch.number, "it is somewhere else"
        self._settle(batch)

    def unclear(self, queue: PartitionQueue[Batch], batch: Batch, code: ErrorCode) -> None:
        raise AssertionError(code)

    too_large = refused = denied = unclear  # type: ignore[assignment]

    def delayed(self, queue: PartitionQueue[Batch], code: ErrorCode) -> None:
        pass

    def changed(self, queue: PartitionQueue[Batch]) -> None:
        self._dispatch.note(queue)

    def _queues(self) -> Iterable[PartitionQueue[Batch]]:
        return self.all.values()

    def _unsettled(self) -> int:
        return sum(1 for queue in self.all.values() for _ in queue.held())

    def _cut(self, now: float) -> None:
        pass

    def _due(self) -> float:
        return float("inf")

    def _check(self, now: float) -> None:
        pass

    def _forgotten(self, queue: PartitionQueue[Batch], batch: Batch) -> None:
        pass

    def _identify_denied(self, fault: NotAuthorizedError) -> None:
        raise AssertionError(fault)

    def _tell(self, batch: Batch) -> None:
        self.told.append(batch.number)

    def turn(self) -> None:
        """One turn of the thread, without waiting."""
        self._woken = False
        self.wake()
        super()._turn()

    def _turn(self) -> None:
        self.turns_left -= 1
        self._stopping = not self.turns_left
        self.world.clock.sleep(0.1)
        self.turn()


class World:
    """A sender, three brokers, and what happens to them."""

    def __init__(self, seed: int, clock: Clock) -> None:
        self.rng, self.clock = random.Random(seed), clock
        self.lines: list[Line] = []
        self.logs: dict[str, list[int]] = {topic: [] for topic in TOPICS}
        self.sequences: dict[str, dict[tuple[int, int], int]] = defaultdict(dict)
        self.brokers = {node: BrokerNode(self, node) for node in NODES}
        self.leaders = {topic: (self.rng.choice(NODES), 0) for topic in TOPICS}
        self.sender = PlainSender(self)
        self.count = 0

    def append(self, node: int, target: Partition, stamp: tuple[int, int], batch: Batch) -> tuple[ErrorCode, int]:
        topic, _ = target
        if self.leaders[topic][0] != node:
            return ErrorCode.not_leader_or_follower, -1
        epoch, sequence = stamp
        known = self.sequences[topic]
        if stamp in known:
            return ErrorCode.none, known[stamp]
        last = max((number for of, number in known if of == epoch), default=-1)
        if sequence != last + 1:
            return ErrorCode.out_of_order_sequence_number, -1
        known[stamp] = len(self.logs[topic])
        self.logs[topic].append(batch.number)
        return ErrorCode.none, known[stamp]

    def write(self) -> None:
        self.sender.write(self.rng.choice(TOPICS), Batch(self.count), may_send=self.rng.random() < 0.5)
        self.count += 1

    def step(self) -> None:
        chance = self.rng.random()
        broker = self.brokers[self.rng.choice(NODES)]
        if chance < 0.35:
            self.write()
        elif chance < 0.75:
            self.sender.turn()
        elif chance < 0.80:
            broker.state = self.rng.choice(["up", "up", "away", "hung", "refusing", "silent"])
            if broker.state in ("away", "refusing") and self.rng.random() < 0.7:
                broker.hang_up()
        elif chance < 0.84:
            broker.hang_up()
        elif chance < 0.86:
            self.clock.sleep(self.rng.choice([IDLE_S, OLD_S]) + 1)
        elif chance < 0.89:
            topic = self.rng.choice(TOPICS)
            self.leaders[topic] = self.rng.choice(NODES), self.leaders[topic][1] + 1
        else:
            self.clock.sleep(self.rng.choice([0.001, 0.1, 1.0, 10.0, REQUEST_S]))

    def others_are_served(self) -> None:
        """While some brokers are away, what belongs to the others is written."""
        healthy = {node for node, broker in self.brokers.items() if broker.state == "up"}
        topics = [topic for topic, (node, _) in self.leaders.items() if node in healthy]
        for topic in topics:
            self.sender.write(topic, Batch(self.count), may_send=True)
            self.count += 1
        until = self.clock.now + HEALTHY_S
        while any(self.sender.all[topic].waiting or self.sender.all[topic].in_flight for topic in topics):
            assert self.clock.now < until, f"{topics} wait for brokers that are not theirs"
            self.sender.turn()
            self.clock.sleep(0.05)

    def finish(self) -> None:
        """Everything is well again, and stays so."""
        for broker in self.brokers.values():
            broker.state = "up"
        for _ in range(2_000):
            self.sender.turn()
            self.clock.sleep(0.1)
            if not self.sender._unsettled():
                break
        self.sender.tell()
        assert sorted(self.sender.told) == list(range(self.count)), "somebody was not told"
        assert sorted(number for log in self.logs.values() for number in log) == list(range(self.count))
        assert all(log == sorted(log) for log in self.logs.values()), "out of order"
        held = {id(link.connection) for link in self.sender._dispatch.links.values()}
        assert all(line.is_closed for line in self.lines if id(line) not in held), "a connection was left open"


@contextmanager
def world_of(seed: int) -> Iterator[World]:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patched:
        for module in (dispatching, sending, metadata):
            patched.setattr(module, "time", clock)
        patched.setattr(sending, "BackgroundCall", InlineCall)
        patched.setattr(dispatching, "produce_body", lambda _start, items: items)
        patched.setattr(
            dispatching,
            "_item",
            lambda queue, batch, producer, **_: (queue.target, (producer[1], batch.sequence), batch),
        )
        world = World(seed, clock)
        try:
            yield world
        finally:
            for line in world.lines:
                line.close()
            world.sender.disconnect()


def run(seed: int) -> None:
    with world_of(seed) as world:
        for number in range(300):
            world.step()
            if number % 50 == 49:
                world.others_are_served()
        world.finish()


@pytest.mark.long_cases("1", "2", "3")
@pytest.mark.parametrize("block", range(4))
def test_every_batch_is_written_once_whatever_happens_to_links(block: int) -> None:
    for seed in range(block * 500, block * 500 + 500):
        try:
            run(seed)
        except Exception as fault:
            fault.add_note(f"seed {seed}")
            raise


def close_and_keep(self: Dispatcher[Batch], node: int) -> None:
    """Two owners: one closes what the other polls."""
    link = self.links.get(node)
    if link is not None:
        link.connection.close()


def leave_open(self: Dispatcher[Batch], node: int) -> None:
    self.links.pop(node, None)


def open_or_stop(self: Dispatcher[Batch], node: int, lock: Any) -> None:
    """The first broker that cannot be reached keeps the others waiting."""
    connection = self._dial(node)
    with lock:
        self.links[node] = BrokerLink(connection)


def reach_together(self: Dispatcher[Batch], lock: Any) -> None:
    try:
        reach(self, lock)
    except RollbridgeError:
        self.back_off()


reach = Dispatcher.reach


@pytest.mark.parametrize(
    "mutant",
    [
        {"_close": close_and_keep},
        {"_close": leave_open},
        {"_open": open_or_stop, "reach": reach_together},
    ],
    ids=["two-owners", "left-open", "one-for-all"],
)
def test_the_checks_catch_a_defect(mutant: dict[str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, wrong in mutant.items():
        monkeypatch.setattr(Dispatcher, name, wrong)

    def goes_wrong(seed: int) -> bool:
        try:
            run(seed)
        except Exception:
            return True
        return False

    assert any(goes_wrong(seed) for seed in range(40))


@pytest.mark.logs_defects
def test_a_turn_that_meets_a_defect_is_got_past() -> None:
    """Its connections are given up, whatever was wrong with them, and what was in flight is written."""
    with world_of(1) as world:
        for _ in range(20):
            world.write()
            world.sender.turn()
        for link in world.sender._dispatch.links.values():
            link.connection.close()  # by somebody who does not own it
        with pytest.raises(ValueError, match="file descriptor"):
            world.sender.turn()
        world.write()
        world.sender.turns_left = 100
        world.sender._run()
        assert sorted(world.sender.told) == list(range(world.count))


@pytest.mark.logs_defects
def test_a_sender_whose_turns_all_fail_says_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with world_of(1) as world:
        sender, turns = world.sender, iter(range(100))

        def fail() -> None:
            sender._stopping = next(turns) == 99
            raise RuntimeError("in every turn")

        monkeypatch.setattr(sender, "_turn", fail)
        assert sender.silence_s == 0
        sender._run()
        assert sender.silence_s == pytest.approx(100 * dispatching.BACKOFF_MAX_S)
