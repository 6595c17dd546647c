"""A simulated world of conditional writes: segments, native transactions v2, writers, strangers, scales and losses.

Time is the number of steps. Each step lets one actor go on: a client asks for writes, a connection carries out one
effect of a round, a marker is written, a request that was delayed arrives, a stranger writes, a segment is sealed. What
is written is judged in the end by :func:`faults`, which knows the log and nothing of the code under test.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from bridge.tests.sim_effects import Blocked, Driven
from rollbridge.base.deadlines import Deadline
from rollbridge.base.effects import AnyEffect
from rollbridge.base.ids import SegmentId
from rollbridge.base.sn import (
    ANY,
    DLSN,
    EMPTY,
    OPERATION_HEADER,
    SN,
    TRANSACTION_ID_HEADER,
    pack_transaction_id,
    unpack_transaction_id,
)
from rollbridge.cas.machine import (
    Append,
    Appended,
    AppendQueue,
    Began,
    CheckActive,
    ConditionalAppend,
    End,
    Ended,
    Failed,
    Fenced,
    Lost,
    Recover,
    Replied,
    RoundEvent,
    RoundState,
    Sealed,
    Stalled,
)
from rollbridge.cas.request import AppendRequest, CasFuture, NewRecord
from rollbridge.errors import (
    CasOutcomeUnknownError,
    CasWriteError,
    KafkaUnavailableError,
    TransactionIdOutOfOrderError,
    TruncatedError,
)
from rollbridge.kafka.fetch import Stretch
from rollbridge.kafka.records import LogRecord
from rollbridge.kafka.segment_tail import EndOf, Read
from rollbridge.stream.conditions import Scope
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import KeyRange
from rollbridge.stream.names import Partition, StreamName, parse_segment_topic
from rollbridge.stream.reading import KeyLineage

STREAM: Final = StreamName("s", "s")
KEYS: Final = {b"a": 0.2, b"b": 0.3, b"c": 0.8}
"""Keys and their positions."""
LOSS: Final = 0.04
STALL: Final = 0.02
CONNECTIONS: Final = 3
CLIENTS: Final = 2
"""Writers of each connection."""
STEPS: Final = 1_500
DRAIN_STEPS: Final = 20_000


class Stuck(AssertionError):
    """A write gets no answer."""


# The log


@dataclass(eq=False)
class Txn:
    """A native transaction; it is decided for readers once its marker is written."""

    topic: Topic
    is_committed: bool | None = None
    is_marked: bool = False

    @property
    def is_open(self) -> bool:
        return not self.is_marked


@dataclass(eq=False)
class Entry:
    """An offset: a record, or a marker without ``record``."""

    txn: Txn | None
    record: LogRecord | None = None
    visible_at: int | None = None

    @property
    def is_visible_record(self) -> bool:
        return self.record is not None and (self.txn is None or bool(self.txn.is_committed and self.txn.is_marked))


@dataclass(eq=False)
class Topic:
    segment: SegmentId
    entries: list[Entry] = field(default_factory=list)
    sealed: bool = False
    stable: int = 0

    def append(self, txn: Txn | None, key: bytes | None, value: bytes, headers: list[tuple[str, bytes | None]]) -> int:
        offset = len(self.entries)
        self.entries.append(Entry(txn, LogRecord(offset, 0, key, value, headers)))
        return offset

    def mark(self, txn: Txn) -> None:
        self.entries.append(Entry(txn))
        txn.is_marked = True

    def stable_end(self) -> int:
        for offset in range(self.stable, len(self.entries)):
            txn = self.entries[offset].txn
            if txn is not None and txn.is_open:
                return offset
        return len(self.entries)

    def committed(self) -> Iterator[LogRecord]:
        for entry in self.entries:
            if entry.is_visible_record and entry.record is not None:
                yield entry.record


@dataclass(eq=False)
class Producer:
    """What the transaction coordinator knows of a transactional id."""

    owner: object
    epoch: int = 0
    txn: Txn | None = None
    marking: Txn | None = None


@dataclass(eq=False)
class Session:
    """What a client knows of its transactional id."""

    name: str
    owner: object
    epoch: int = -1
    is_ready: bool = False
    has_open: bool = False


class World:
    """All segments, and everybody."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0
        self.history = EpochHistory.create([KeyRange(0.0, 1.0)], 0)
        self.topics: dict[SegmentId, Topic] = {}
        self.producers: dict[str, Producer] = {}
        self.delayed: list[tuple[str, int, Callable[[Producer], None]]] = []
        self.strangers: list[Txn] = []
        self.losing = True
        self.sealing: list[SegmentId] = []
        self.ranges: list[KeyRange] = []
        for segment in self.history.active.segments:
            self.topics[segment.id] = Topic(segment.id)
        self.connections = [Connection(self, number) for number in range(CONNECTIONS)]

    # What goes on by itself

    def step(self) -> None:
        self.now += 1
        actors: list[Callable[[], object]] = [item.go_on for item in self.connections for _ in range(8)]
        actors += [self._mark] * 4 + [self._arrive]
        if self.losing:
            actors += [client.act for item in self.connections for client in item.clients]
            actors += [self._stranger, self._scale] if self.rng.random() < 0.3 else []
            actors += [self._time_out] if self.rng.random() < 0.05 else []
            actors += [self._usurp] if self.rng.random() < 0.02 else []
        else:
            actors += [self._stranger, self._scale, self._time_out]
        self.rng.choice(actors)()
        for topic in self.topics.values():
            end = topic.stable_end()
            for entry in topic.entries[topic.stable : end]:
                entry.visible_at = self.now
            topic.stable = end

    def run(self) -> None:
        for _ in range(STEPS):
            self.step()
        self.losing = False
        for _ in range(DRAIN_STEPS):
            self.step()
            if not any(client.waiting() for item in self.connections for client in item.clients):
                for producer in self.producers.values():
                    self.write_marker(producer)
                return
        raise Stuck("a write gets no answer")

    def _mark(self) -> None:
        marking = [producer for producer in self.producers.values() if producer.marking is not None]
        if marking:
            self.write_marker(self.rng.choice(marking))

    def write_marker(self, producer: Producer) -> None:
        if producer.marking is not None:
            producer.marking.topic.mark(producer.marking)
            producer.marking = None

    def _arrive(self) -> None:
        """A request that was lost on its way arrives, unless the id was used since."""
        if self.delayed:
            name, epoch, apply = self.delayed.pop(self.rng.randrange(len(self.delayed)))
            producer = self.producers[name]
            if producer.epoch == epoch:
                apply(producer)

    def _stranger(self) -> None:
        if self.strangers and (not self.losing or self.rng.random() < 0.5):
            ended = self.strangers.pop(self.rng.randrange(len(self.strangers)))
            ended.is_committed = self.rng.random() < 0.6
            ended.topic.mark(ended)
            return
        key = self.rng.choice([*KEYS])
        topic = self.topics[self.history.active.segment_at(KEYS[key]).id]
        if topic.sealed or not self.losing:
            return
        txn = Txn(topic) if self.rng.random() < 0.3 else None
        headers = self.rng.choice([[], [("rollbridge", b"?")], [(TRANSACTION_ID_HEADER, b"short")]])
        topic.append(txn, key, b"stranger-%d" % self.now, list(headers))
        if txn is not None:
            self.strangers.append(txn)

    def _scale(self) -> None:
        if not self.sealing:
            if not self.losing or self.rng.random() < 0.7 or len(self.history.records) > 6:
                return
            self.sealing = [segment.id for segment in self.history.active.segments]
            for segment in self.sealing:
                self.topics[segment].sealed = True
            return
        topics = [self.topics[segment] for segment in self.sealing]
        if any(topic.stable_end() < len(topic.entries) for topic in topics):
            return
        cuts = self.rng.choice([[0.0, 1.0], [0.0, 0.5, 1.0], [0.0, 0.25, 1.0]])
        ranges = [KeyRange(low, high) for low, high in itertools.pairwise(cuts)]
        record = self.history.plan_scale([segment.number for segment in self.sealing], ranges, 0)
        ends = {topic.segment: len(topic.entries) for topic in topics}
        self.history = self.history.with_records(record).with_sealed_ends(record.epoch, ends)
        for item in self.history.active.segments:
            self.topics.setdefault(item.id, Topic(item.id))
        self.sealing = []

    def _time_out(self) -> None:
        """The transaction coordinator ends a native transaction that was open for too long."""
        found = [producer for producer in self.producers.values() if producer.txn is not None]
        if found:
            producer = self.rng.choice(found)
            self.end(producer, commits=False)

    def _usurp(self) -> None:
        """Somebody takes a transactional id over."""
        if self.producers:
            self._take_over(self.rng.choice([*self.producers.values()]))

    def _take_over(self, producer: Producer) -> None:
        producer.owner = None
        self.end(producer, commits=False)

    def end(self, producer: Producer, *, commits: bool) -> None:
        if producer.txn is not None:
            self.write_marker(producer)
            producer.txn.is_committed = commits
            producer.marking, producer.txn = producer.txn, None
        producer.epoch += 1

    # What rounds ask for

    def perform(self, effect: AnyEffect, round_: ConditionalAppend, session: Session) -> RoundEvent | None:
        """Carry out an effect; None if there is no answer yet."""
        rng = self.rng
        match effect:
            case EndOf() | Read():
                answer = self.answer(effect)
                chance = rng.random() if self.losing else 1.0
                if chance < STALL * (5 if round_.state is RoundState.SEARCHING else 1):  # few rounds come to that
                    if round_.state is RoundState.SEARCHING:
                        doubt(round_)
                    return Stalled("open") if answer is None else Replied(KafkaUnavailableError("lost"))
                return None if answer is None else Replied(answer)
            case CheckActive():
                first = round_.requests[0]
                active = self.history.active.segment_at(KEYS[first.key or b""]).id
                if self.losing and rng.random() < LOSS:
                    return Failed(KafkaUnavailableError("ZooKeeper is away"))
                return Replied(None) if active == first.lineage.active else Sealed()
            case Append():
                return self._append(round_, session)
            case End():
                return self._end(effect, round_, session)
            case Recover():
                return self.recover(session, round_)
            case _:
                raise AssertionError(effect)

    def answer(self, need: AnyEffect) -> Stretch | int | None:
        assert isinstance(need, EndOf | Read)
        topic = self.topics[parse_segment_topic(need.place[0])[1]]
        if isinstance(need, EndOf):
            return len(topic.entries)
        end = min(max(topic.stable_end(), need.offset), need.offset + self.rng.randint(1, 6))
        if end == need.offset < need.to:
            return None
        found = topic.entries[need.offset : end]
        records = [entry.record for entry in found if entry.is_visible_record and entry.record is not None]
        aborted = sum(entry.record is not None and not entry.is_visible_record for entry in found)
        return Stretch(need.offset, end, records, len(topic.entries), aborted, 0)

    def _append(self, round_: ConditionalAppend, session: Session) -> RoundEvent:
        producer = self.producers[session.name]
        topic = self.topics[round_.tail.segment]
        offsets: list[int] = []

        def apply(producer: Producer) -> None:
            if topic.sealed or producer.txn is not None:
                return
            self.write_marker(producer)
            producer.txn = Txn(topic)
            for request in round_.requests:
                for record in request.records:
                    value = record.value or b""
                    offsets.append(topic.append(producer.txn, record.key, value, record.headers))

        if producer.owner is not session.owner:
            session.is_ready = False
            return Fenced("taken")
        if producer.epoch != session.epoch:
            session.is_ready = False
            return Lost("timed out")
        if topic.sealed:
            return Sealed()
        if self.losing and self.rng.random() < LOSS / 4:
            return Failed(KafkaUnavailableError("denied"))
        if self.losing and self.rng.random() < LOSS:
            session.is_ready = False
            self._lose(producer, session, apply)
            return Lost("append")
        session.has_open = True
        apply(producer)
        return Appended(offsets[0])

    def _end(self, effect: End, round_: ConditionalAppend, session: Session) -> RoundEvent:
        producer = self.producers[session.name]
        if not session.has_open:
            return Ended()
        session.has_open = False
        if self.losing and self.rng.random() < LOSS / 4:
            self._take_over(producer)
        if producer.owner is not session.owner:
            session.is_ready = False
            return Fenced("taken")
        if producer.epoch != session.epoch:
            session.is_ready = False
            return Lost("timed out")
        if self.losing and self.rng.random() < LOSS * 2:
            session.is_ready = False
            self._lose(producer, session, lambda producer: self.end(producer, commits=effect.commits))
            return Lost("end")
        if self.losing and self.rng.random() < LOSS / 4:
            session.has_open = True
            return Failed(KafkaUnavailableError("refused"))
        self.end(producer, commits=effect.commits)
        session.epoch = producer.epoch
        return Ended()

    def _lose(self, producer: Producer, session: Session, apply: Callable[[Producer], None]) -> None:
        """A request or its answer is lost, or it comes later."""
        where = self.rng.randrange(3)
        if where == 0:
            apply(producer)
        elif where == 1:
            self.delayed.append((session.name, producer.epoch, apply))

    def recover(self, session: Session, round_: ConditionalAppend | None = None) -> RoundEvent:
        """The id is initialised: nothing of it is open any more, and nothing that is delayed has an effect."""
        producer = self.producers.setdefault(session.name, Producer(session.owner))
        if round_ is not None and self.losing and self.rng.random() < LOSS * 3:
            self._take_over(producer)
        if producer.owner is not session.owner:
            return Fenced("taken")
        if self.losing and self.rng.random() < LOSS * 2:
            if round_ is not None:
                doubt(round_)
            return Failed(KafkaUnavailableError("init"))
        self.end(producer, commits=False)
        session.epoch, session.is_ready, session.has_open = producer.epoch, True, False
        return Ended()


class Connection:
    """Queues of one connection, and the rounds under way."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.known = world.history
        self.queues: dict[SegmentId, AppendQueue] = {}
        self.driven: dict[SegmentId, Iterator[None]] = {}
        self.leases = 0
        self.sessions: deque[Session] = deque()
        self.clients = [SimClient(self, f"{number}-{place}") for place in range(CLIENTS)]

    def put(self, request: AppendRequest, *, is_moved: bool = False) -> None:
        segment = request.lineage.active
        if segment not in self.queues:
            self.queues[segment] = AppendQueue("s/s", segment, place_of_segment)
        self.queues[segment].put(request, is_moved=is_moved)

    def lineage(self, position: float) -> KeyLineage:
        if self.world.rng.random() < 0.2:
            self.known = self.world.history
        return KeyLineage(self.known, position)

    def lineage_of(self, position: float, expected: SN) -> KeyLineage:
        """As ``CasWriter._check_place``: an SN may be of an epoch that is not known here yet."""
        lineage = self.lineage(position)
        if expected.dlsn is not None and lineage.base(expected.dlsn.segment) is None:
            self.known = self.world.history
        return self.lineage(position)

    def go_on(self) -> None:
        """One effect of one of the rounds."""
        for segment, queue in self.queues.items():
            if queue.queue and segment not in self.driven:
                self.driven[segment] = self._drive(queue)
        if self.driven:
            segment = self.world.rng.choice([*self.driven])
            if next(self.driven[segment], self) is self:
                del self.driven[segment]

    def _drive(self, queue: AppendQueue) -> Iterator[None]:
        """As ``StreamAppender._step``, until nothing waits."""
        world = self.world
        while queue.queue:
            queue.take_turns()
            round_ = queue.take(10_000)
            if not isinstance(round_, ConditionalAppend):
                yield
                continue
            session: Session | None = None
            while session is None:
                yield
                session = self._session(round_.requests)
            if not round_.requests[0].done():
                started = world.now
                effect = round_.handle(Began(looks=round_.hopeless or queue.contention.looks_first()))
                while effect is not None:
                    yield
                    event = world.perform(effect, round_, session)
                    if event is not None:
                        effect = round_.handle(event)
                self.sessions.insert(len(self.sessions) if session.is_ready else 0, session)
                yield from self._settle(queue, round_, world.now - started)

    def _session(self, requests: Sequence[AppendRequest]) -> Session | None:
        """A session that is ready; of a new lease if somebody has taken an id of the old one."""
        if not self.sessions:
            self.leases += 1
            names = [f"{self.number}-{self.leases}-{index}" for index in range(3)]
            self.sessions.extend(Session(name, self) for name in names)
        session = self.sessions.popleft()
        if not session.is_ready or session.has_open:
            event = self.world.recover(session)
            if isinstance(event, Fenced):
                self.sessions.clear()
                return None
            if isinstance(event, Failed):
                session.is_ready = False
                self.sessions.append(session)
                for request in requests:
                    request.settle(event.fault)
        return session

    def _settle(self, queue: AppendQueue, round_: ConditionalAppend, took: int) -> Iterator[None]:
        match round_.result:
            case Sealed():
                for request in [*round_.requests, *queue.drain()]:
                    while self.lineage(KEYS[request.key or b""]).active == queue.segment:
                        yield
                    request.lineage = self.lineage(KEYS[request.key or b""])
                    self.put(request, is_moved=True)
            case Failed(fault):
                for request in round_.requests:
                    request.settle(fault)
            case _:
                for request, verdict in queue.settle(round_, took / 1000):
                    session = self._session([])
                    if session is not None and session.is_ready:
                        self.sessions.append(session)
                    asked = Driven(queue.tails.find(request.lineage, request.token))
                    found = yield from asked.turns(self._answer)
                    request.settle(found or queue.refusal(request, verdict))

    def _answer(self, need: AnyEffect) -> Stretch | int:
        if (answer := self.world.answer(need)) is None:
            raise Blocked
        return answer


def place_of_segment(segment: SegmentId) -> Partition:
    return STREAM.segment_topic(segment), 0


class SimDeadline(Deadline):
    """Deadline in steps."""

    __slots__ = ("_until", "_world")

    def __init__(self, world: World, steps: float) -> None:
        super().__init__(math.inf)
        self._world, self._until = world, world.now + steps

    def passed(self) -> bool:
        return self._world.losing and self._world.now > self._until


@dataclass(eq=False)
class Attempt:
    """A write, and what came of it."""

    request: AppendRequest
    asked: int
    answers: list[tuple[int, object]] = field(default_factory=list)
    is_doubtful: bool = False


def doubt(round_: ConditionalAppend) -> None:
    """What became of a round's commit cannot be found out."""
    for request in round_.requests:
        assert isinstance(request.owner, SimClient)
        for attempt in request.owner.attempts:
            attempt.is_doubtful |= attempt.request is request


class SimClient:
    """Writer that asks for all kinds of writes, and learns from answers."""

    def __init__(self, connection: Connection, name: str) -> None:
        self.connection = connection
        self.name = name
        self.attempts: list[Attempt] = []
        self._known: dict[bytes, list[SN]] = {key: [] for key in KEYS}
        self._count = itertools.count()

    def waiting(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if not attempt.answers]

    def act(self) -> None:
        rng = self.connection.world.rng
        waiting = self.waiting()
        if len(waiting) >= 4 or (waiting and rng.random() < 0.7):
            return
        key = rng.choice([*KEYS])
        before: AppendRequest | None = None
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            before = self._write(key, before)

    def _write(self, key: bytes, before: AppendRequest | None) -> AppendRequest:
        world = self.connection.world
        rng = world.rng
        scope = rng.choice([*Scope])
        known = self._known[key]
        expected: SN | AppendRequest = before or EMPTY
        if before is None and known:
            expected = known[-1] if rng.random() < 0.8 else rng.choice([*known, ANY, EMPTY])
        operation = f"{self.name}-{next(self._count)}".encode().ljust(16)
        repeatable = isinstance(expected, SN) and expected != ANY and rng.random() < 0.2
        rising = rng.random() < 0.2
        records = []
        for number in range(rng.choice([1, 1, 2, 3])):
            transaction_id = rng.randint(0, 40) + world.now // 40 if rising or rng.random() < 0.1 else None
            headers: list[tuple[str, bytes | None]] = [(OPERATION_HEADER, operation)]
            if transaction_id is not None:
                headers.append((TRANSACTION_ID_HEADER, pack_transaction_id(transaction_id)))
            records.append(NewRecord(key, b"%d" % number, headers, transaction_id, 1))
        earlier = [item.request for item in self.attempts[-5:] if item.request.repeatable]
        if before is None and earlier and rng.random() < 0.2:
            # The same write once more, after its answer or before.
            again = rng.choice(earlier)
            operation, expected, scope, records = again.operation, again.expected, again.scope, [*again.records]
            key, repeatable, rising = again.records[0].key or b"", True, again.monotonic_ids
        lineage = self.connection.lineage_of(KEYS[key], expected if isinstance(expected, SN) else ANY)
        request = AppendRequest(
            owner=self,
            records=records,
            expected=expected,
            scope=scope,
            operation=operation,
            lineage=lineage,
            deadline=SimDeadline(world, rng.choice([200.0, math.inf, math.inf])),
            timestamp_ms=0,
            monotonic_ids=rising,
            repeatable=repeatable,
        )
        attempt = Attempt(request, world.now)
        self.attempts.append(attempt)

        def told(_: CasFuture) -> None:
            fault = request.exception()
            attempt.answers.append((world.now, fault or request.results()))
            if fault is None:
                self._known[key].append(request.result())
            elif isinstance(fault, CasWriteError) and fault.actual != ANY:
                self._known[key].append(fault.actual)

        request.add_done_callback(told)
        self.connection.put(request)
        return request


# The judgement


@dataclass(frozen=True)
class Stored:
    """A record of the final log of a position."""

    sequence_id: int
    dlsn: DLSN
    record: LogRecord
    visible_at: int

    @property
    def operation(self) -> bytes | None:
        return next((value for name, value in self.record.headers if name == OPERATION_HEADER), None)

    @property
    def transaction_id(self) -> int | None:
        for name, value in self.record.headers:
            if name == TRANSACTION_ID_HEADER and value is not None and len(value) == 8:
                return unpack_transaction_id(value)
        return None


def log_of(world: World, position: float) -> list[Stored]:
    """Every committed record that a position's lineage holds, in order."""
    found = []
    for stage in reversed(KeyLineage(world.history, position).stages):
        for offset, entry in enumerate(world.topics[stage.segment].entries):
            if entry.is_visible_record and entry.record is not None:
                place = DLSN.of(stage.segment, offset)
                found.append(Stored(stage.base + offset, place, entry.record, entry.visible_at or world.now + 1))
    return found


def faults(world: World) -> list[str]:
    """Return which promises of docs/guarantees.md are broken, rows 18 to 20 and 28."""
    logs = {key: log_of(world, position) for key, position in KEYS.items()}
    told: dict[DLSN, int] = {}
    attempts = [item for connection in world.connections for client in connection.clients for item in client.attempts]
    for attempt in attempts:
        for at, answer in attempt.answers:
            if isinstance(answer, list):
                for sn in answer:
                    told[sn.dlsn] = min(told.get(sn.dlsn, at), at)
    found = []
    for attempt in attempts:
        key = attempt.request.records[0].key or b""
        found += [f"{attempt.request.operation!r}: {text}" for text in _faults_of(attempt, logs[key], told)]
    return found


def _faults_of(attempt: Attempt, log: list[Stored], told: dict[DLSN, int]) -> Iterator[str]:
    request = attempt.request
    size = len(request.records)
    own = [number for number, stored in enumerate(log) if stored.operation == request.operation]
    if own and (len(own) > size or own != [*range(own[0], own[0] + len(own))]):
        yield f"written more than once, or not side by side: {own}"
        return
    if own and len(own) != size:
        yield f"written in part: {own}"
    if own:
        yield from _unfounded(attempt, log[: own[0]])
    if len(attempt.answers) != 1:
        yield f"answered {len(attempt.answers)} times"
        return
    at, answer = attempt.answers[0]
    match answer:
        case list():
            if [(sn.sequence_id, sn.dlsn) for sn in answer] != [(log[i].sequence_id, log[i].dlsn) for i in own]:
                yield "told SNs at which it does not stand"
        case CasOutcomeUnknownError():
            if not attempt.is_doubtful:
                yield "called unknown, although it was known"
        case CasWriteError():
            if own and (not request.repeatable or shown(log[own[0]], told) < attempt.asked):
                yield "refused, and written"
            if isinstance(request.expected, SN):
                yield from _false_refusal(attempt, answer, at, log, told)
        case _:
            if own and not request.repeatable:
                yield f"failed as {answer!r}, and written"
            own_ids = request.monotonic_ids or isinstance(request.expected, AppendRequest)
            if isinstance(answer, TransactionIdOutOfOrderError) and not own_ids:
                yield "refused for an id that it did not care about"
            if isinstance(answer, TruncatedError):
                yield "nothing was truncated"


def _unfounded(attempt: Attempt, before: list[Stored]) -> Iterator[str]:
    """What speaks against an accepted write, after the records before it."""
    request = attempt.request
    expected = request.expected
    if isinstance(expected, AppendRequest):
        if expected.exception() is not None:
            if not isinstance(expected.exception(), CasOutcomeUnknownError):
                yield "written after a write that was not"
            return
        expected = expected.result()
    scoped = [item for item in before if request.scope is Scope.SEGMENT or item.record.key == request.records[0].key]
    if not _holds(expected, request.scope, scoped):
        yield f"accepted, although {expected} was expected and the log has {scoped[-1:]}"
    if request.monotonic_ids:
        last = next((item.transaction_id for item in reversed(before) if item.transaction_id is not None), None)
        for record in request.records:
            if record.transaction_id is not None:
                if last is not None and record.transaction_id < last:
                    yield f"transaction id {record.transaction_id} after {last}"
                last = record.transaction_id


def _holds(expected: SN, scope: Scope, scoped: list[Stored]) -> bool:
    if expected == ANY:
        return True
    if expected.empty or not scoped:
        return not scoped and (expected.empty or scope is Scope.KEY)
    place = expected.sequence_id
    assert place is not None
    return scoped[-1].sequence_id == place if scope is Scope.SEGMENT else scoped[-1].sequence_id <= place


def shown(item: Stored, told: dict[DLSN, int]) -> int:
    """Since when somebody may know of a record."""
    return min(item.visible_at, told.get(item.dlsn, item.visible_at))


def _false_refusal(
    attempt: Attempt, answer: CasWriteError, at: int, log: list[Stored], told: dict[DLSN, int]
) -> Iterator[str]:
    """What speaks against a refusal: the record is not there, or was not, is not the last, or is the expected one."""
    request, actual = attempt.request, answer.actual
    key = request.records[0].key
    scoped = [item for item in log if request.scope is Scope.SEGMENT or item.record.key == key]
    upto = [item for item in scoped if actual.sequence_id is not None and item.sequence_id <= actual.sequence_id]
    if not actual.empty and (not upto or upto[-1].sequence_id != actual.sequence_id or shown(upto[-1], told) > at):
        yield f"refused because of {actual}, which is not there"
        return
    if answer.expected != request.expected or (_holds(answer.expected, request.scope, upto)):
        yield f"refused although {request.expected} holds"
    for item in scoped[len(upto) :]:
        if shown(item, told) < attempt.asked:
            yield f"refused because of {actual}, behind which {item.dlsn} was known before it was asked for"
            return
