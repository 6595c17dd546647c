"""Producers that know gateways and nothing else of us: librdkafka in the process, Kafka's own in Java beside it.

Each has one transactional id, which it takes over from a producer that was killed, from an earlier one of its own that
it has given up or left with a transaction open, and which is taken from it in the same way. While nobody else has the
id, it may be refused nothing: its transactions may stay open for longer than any history.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from integration_tests.foreign.java import JavaError, JavaProducer
from integration_tests.history.events import Answer, Kind, Operation, Refusal, Write
from integration_tests.history.natives import kept, topic_of
from integration_tests.history.notebook import CALL_S, Notebook
from integration_tests.history.tasks import Task

LEASE_MS: Final = 3_600_000
REQUEST_S: Final = (6, 30, 30)
"""After so long without an answer a producer sends a request again; a gateway may stand still for longer than the
shortest."""
LARGE: Final = 150
"""Records of one transaction in twenty."""
HELD_S: Final = 3.0
"""For so long some transactions stay open, at most."""
KEYS: Final = 4
ABORT_OF_NOTHING: Final = "INVALID_TXN_STATE"
"""What librdkafka is told, by a broker as well, if it aborts before its AddPartitionsToTxn was taken, and the one
before, of the same producer id and epoch, is committed: that request is not sent again then."""
SKIPPED: Final = "OUT_OF_ORDER_SEQUENCE_NUMBER: skipped sequence numbers"
"""What librdkafka says if an abort has purged records that it had sent once and was to send again: it goes on numbering
behind them, which a broker refuses as well, and takes other numbers after another abort."""
REMOVED: Final = "_DESTROY_BROKER"
"""What librdkafka from 2.11 on says, and has its user abort for, if it takes a broker away that metadata name no more
while a request to it is under way."""
STUCK_S: Final = 10.0
"""By so much a call of librdkafka's overruns its time before it is given up, and its producer with it."""


class RefusedError(Exception):
    """A producer was refused something.

    Attributes:
        code: Name of the error.
        is_fatal: Whether the producer has to be made anew; otherwise it may abort.
    """

    def __init__(self, code: str, *, is_fatal: bool) -> None:
        super().__init__(code)
        self.code = code
        self.is_fatal = is_fatal


class UnclearError(Exception):
    """There was no answer in time."""


class Foreign(Protocol):
    """A transactional producer of somebody else's. Methods raise :class:`RefusedError` and :class:`UnclearError`."""

    def init(self) -> None:
        """Fence those before it, and end what they left open."""

    def begin(self) -> None:
        """Begin a transaction, which asks nobody."""

    def send(self, write: Write) -> None:
        """Queue a record."""

    def flush(self) -> None:
        """Wait until all records are acknowledged."""

    def copy(self, topic: str, offset: int) -> None:
        """Commit an offset of the producer's consumer group with the transaction."""

    def end(self, *, commit: bool) -> None:
        """Commit or abort."""

    def die(self) -> None:
        """Be gone at once, as far as that can be done."""


def group_of(producer: str) -> str:
    """Consumer group whose offsets a producer commits."""
    return f"through-{producer}"


class Librdkafka:
    """confluent-kafka's producer; transactions v1."""

    def __init__(self, servers: str, transactional_id: str, request_s: int, log: Path) -> None:
        self._settings = {"bootstrap.servers": servers, "socket.timeout.ms": request_s * 1000, "log_level": 4}
        self._failed: list[KafkaError] = []
        self._consumer: Consumer | None = None
        self._id = transactional_id
        self._producer = kept(
            Producer(
                {
                    **self._settings,
                    "transactional.id": transactional_id,
                    "transaction.timeout.ms": LEASE_MS,
                    "message.timeout.ms": 300_000,
                    "partitioner": "murmur2_random",
                    "linger.ms": 1,
                    "reconnect.backoff.max.ms": 1_000,
                }
            )
        )

    def init(self) -> None:
        self._ask("init_transactions", self._producer.init_transactions)

    def begin(self) -> None:
        self._failed.clear()
        try:
            self._producer.begin_transaction()
        except KafkaException as fault:
            raise _refused(fault.args[0]) from fault

    def send(self, write: Write) -> None:
        topic, value, key = topic_of(write.stream), write.value.encode(), write.key.encode()
        try:
            self._producer.produce(topic, value, key, on_delivery=self._told)
        except KafkaException as fault:
            if fault.args[0].code() == KafkaError._STATE:
                self.end(commit=True)  # of a transaction that has failed, this says for what
            raise _refused(fault.args[0]) from fault

    def flush(self) -> None:
        if self._producer.flush(CALL_S):
            raise UnclearError("flush")
        for error in self._failed:
            raise _refused(error)

    def copy(self, topic: str, offset: int) -> None:
        if self._consumer is None:
            self._consumer = Consumer({**self._settings, "group.id": group_of(self._id)})
        offsets = [TopicPartition(topic, 0, offset)]
        metadata = self._consumer.consumer_group_metadata()
        self._ask(
            "send_offsets_to_transaction",
            lambda left: self._producer.send_offsets_to_transaction(offsets, metadata, left),
        )

    def end(self, *, commit: bool) -> None:
        if commit:
            self._ask("commit_transaction", self._producer.commit_transaction)
        else:
            self._ask("abort_transaction", self._producer.abort_transaction)

    def die(self) -> None:
        # There is no other way: it is left alone, and its connections with it.
        if self._consumer is not None:
            self._consumer.close()

    def _ask(self, what: str, call: Any) -> None:
        deadline = time.monotonic() + CALL_S
        while True:
            try:
                _bounded(what, call, max(deadline - time.monotonic(), 0.1))
            except KafkaException as fault:
                error = fault.args[0]
                if not error.retriable() or error.fatal() or error.txn_requires_abort():
                    raise _refused(error) from fault
                if time.monotonic() > deadline:
                    raise UnclearError(what) from fault
            else:
                return

    def _told(self, error: KafkaError | None, message: Message) -> None:
        # What was purged was of a transaction that has been aborted.
        if error is not None and error.code() not in (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT):
            self._failed.append(error)


def _bounded(what: str, call: Callable[[float], object], timeout_s: float) -> None:
    """Call, and wait for not much longer than the call was given: librdkafka's do not always keep it.

    Seen with 2.16: once its AddOffsetsToTxn has timed out in the queue of a coordinator that was away, it sends it no
    more, and ``send_offsets_to_transaction`` comes back neither at its time-out nor ever.
    """
    faults: list[BaseException] = []
    over = threading.Event()

    def work() -> None:
        try:
            call(timeout_s)
        except BaseException as fault:
            faults.append(fault)
        over.set()

    threading.Thread(target=work, name=what, daemon=True).start()
    if not over.wait(timeout_s + STUCK_S):
        raise UnclearError(f"{what} has not come back")
    for fault in faults:
        raise fault


def _refused(error: KafkaError) -> RefusedError:
    return RefusedError(f"{error.name()}: {error.str()}", is_fatal=not error.txn_requires_abort())


_FATAL_IN_JAVA: Final = frozenset(
    {
        "ProducerFencedException",
        "InvalidProducerEpochException",
        "OutOfOrderSequenceException",
        "InvalidTxnStateException",
        "InvalidPidMappingException",
        "IllegalStateException",
    }
)


class Java:
    """Kafka's own producer in a process; transactions v2."""

    def __init__(self, servers: str, transactional_id: str, request_s: int, log: Path) -> None:
        self._id = transactional_id
        settings = {
            "transaction.timeout.ms": LEASE_MS,
            "request.timeout.ms": request_s * 1000,
            "max.block.ms": int(CALL_S * 1000),
            "delivery.timeout.ms": 300_000,
            "linger.ms": 1,
            "reconnect.backoff.max.ms": 1_000,
        }
        self._java = JavaProducer(servers, transactional_id, log, settings=settings)

    def init(self) -> None:
        self._do("init")

    def begin(self) -> None:
        self._do("forget")
        self._do("begin")

    def send(self, write: Write) -> None:
        self._do("put", topic_of(write.stream), write.key, write.value)

    def flush(self) -> None:
        self._do("await")

    def copy(self, topic: str, offset: int) -> None:
        self._do("copy", group_of(self._id), topic, 0, offset, "-")

    def end(self, *, commit: bool) -> None:
        self._do("commit" if commit else "abort")

    def die(self) -> None:
        self._java.kill()

    def _do(self, *words: object) -> None:
        deadline = time.monotonic() + CALL_S
        while True:
            try:
                self._java.do(*words)
            except JavaError as fault:
                if fault.kind != "TimeoutException":
                    raise RefusedError(str(fault), is_fatal=fault.kind in _FATAL_IN_JAVA) from fault
                # An end, and a start, may be asked for again; what was sent, the producer sends again by itself.
                if words[0] not in ("init", "commit", "abort") or time.monotonic() > deadline:
                    raise UnclearError(str(words[0])) from fault
            else:
                return


class _Life:
    """One producer, until it has to be made anew."""

    def __init__(self, producer: Foreign) -> None:
        self.producer = producer
        self.open: Operation | None = None
        """What is open, as it is noted."""


class _Passer:
    """Writes one transaction after the other through gateways, and notes what becomes of each."""

    def __init__(self, make: type[Librdkafka] | type[Java], task: Task, book: Notebook) -> None:
        self._make, self._task, self._book = make, task, book
        self._choice = random.Random(task.seed)
        self._id = task.client_name
        self._request_s = self._choice.choice(REQUEST_S)
        self._count = 0
        self._life: _Life | None = None
        self._zombies: list[_Life] = []

    def step(self) -> None:
        """Write one transaction; whatever becomes of it is noted."""
        self._count += 1
        what = "start"
        try:
            self._life = self._life or self._started()
            what = "transaction"
            self._transaction(self._life)
        except RefusedError as fault:
            self._refused(what, fault)
        except UnclearError:
            self._give_up()
        if self._life is not None and self._choice.random() < 0.04:
            self._leave_open()

    def finish(self) -> None:
        """Be gone."""
        self._give_up()

    def _started(self) -> _Life:
        life = self._new_life()
        try:
            life.producer.init()
        except BaseException:
            life.producer.die()
            raise
        for zombie in self._zombies:
            self._wake(zombie)
        self._zombies.clear()
        return life

    def _new_life(self) -> _Life:
        log = Path(self._task.out).with_suffix(".producers")
        return _Life(self._make(self._task.bootstrap_servers, self._id, self._request_s, log))

    def _refused(self, what: str, fault: RefusedError) -> None:
        if not fault.code.startswith((SKIPPED, REMOVED)):
            self._book.note(Refusal(self._book.client, what, fault.code, time.monotonic_ns()).to_line())
        self._give_up()

    def _give_up(self) -> None:
        if self._life is not None:
            self._life.producer.die()
            self._life = None

    def _leave_open(self) -> None:
        """Begin a transaction, and leave the producer with it to its fate: another one takes its id."""
        life = self._life
        assert life is not None
        self._life = None
        try:
            self._count += 1
            life.open = self._filled(life, self._writes(self._choice.randint(1, 20)))
            if self._choice.random() < 0.7:
                life.producer.flush()
        except (RefusedError, UnclearError) as fault:
            if isinstance(fault, RefusedError):
                self._refused("write", fault)
            life.producer.die()
            return
        if self._choice.random() < 0.5:
            life.producer.die()
        else:
            self._zombies.append(life)

    def _wake(self, zombie: _Life) -> None:
        """A producer whose id was taken goes on, and may not be heard."""
        assert zombie.open is not None
        self._count += 1
        asked = replace(zombie.open, wish="commit", fenced=True, asked=time.monotonic_ns())
        self._book.note(asked.to_line())
        try:
            if self._choice.random() < 0.5:
                zombie.producer.send(asked.writes[0])
            zombie.producer.end(commit=True)
        except RefusedError:
            self._book.note(replace(asked, answer=Answer.FAILED, answered=time.monotonic_ns()).to_line())
        except UnclearError:
            pass
        else:
            self._book.note(replace(asked, answer=Answer.OK, answered=time.monotonic_ns()).to_line())
        zombie.producer.die()

    def _transaction(self, life: _Life) -> None:
        choice, producer = self._choice, life.producer
        count = LARGE if choice.random() < 0.05 else choice.randint(1, 8)
        commit = choice.random() < 0.8
        offset = time.monotonic_ns() // 1_000_000 if choice.random() < 0.3 else None
        writes = self._writes(count)
        topic = topic_of(self._task.streams[-1])
        is_first = choice.random() < 0.3
        open_one = self._begun(life, writes, offset)
        if offset is not None and is_first:
            producer.copy(topic, offset)
        self._send(producer, writes)
        if offset is not None and not is_first:
            producer.copy(topic, offset)
        if choice.random() < 0.3:
            producer.flush()
        if choice.random() < 0.2:
            time.sleep(choice.random() * HELD_S)
        self._end(producer, open_one, commit=commit)

    def _end(self, producer: Foreign, open_one: Operation, *, commit: bool) -> None:
        asked = replace(open_one, wish="commit" if commit else "abort", asked=time.monotonic_ns())
        self._book.note(asked.to_line())
        try:
            producer.end(commit=commit)
        except RefusedError as fault:
            is_foreseen = fault.code.startswith((SKIPPED, REMOVED) if commit else ABORT_OF_NOTHING)
            if not is_foreseen:
                refusal = Refusal(self._book.client, f"end of {asked.name}", fault.code, time.monotonic_ns())
                self._book.note(refusal.to_line())
            if fault.is_fatal:
                self._give_up()
                return
            producer.end(commit=False)
            self._book.note(replace(asked, answer=Answer.FAILED, answered=time.monotonic_ns()).to_line())
            return
        self._book.note(replace(asked, answer=Answer.OK, answered=time.monotonic_ns()).to_line())

    def _filled(self, life: _Life, writes: Sequence[Write]) -> Operation:
        open_one = self._begun(life, writes, None)
        self._send(life.producer, writes)
        return open_one

    def _begun(self, life: _Life, writes: Sequence[Write], offset: int | None) -> Operation:
        """Begin a transaction, and note what will be in it, which is to be aborted as long as nothing else is noted."""
        book = self._book
        operation = replace(
            book.asked(Kind.GATEWAY, f"{book.client}:{self._count}, through a gateway", list(writes), "abort"),
            producer=self._id,
            offset=offset,
        )
        book.note(operation.to_line())
        life.producer.begin()
        return operation

    def _send(self, producer: Foreign, writes: Sequence[Write]) -> None:
        for place, write in enumerate(writes):
            producer.send(write)
            if place and self._choice.random() < 0.02:
                producer.flush()

    def _writes(self, count: int) -> list[Write]:
        book, choice = self._book, self._choice
        streams = choice.sample(self._task.streams, choice.randint(1, len(self._task.streams)))
        return [
            Write(
                choice.choice(streams), f"{book.client}-{choice.randrange(KEYS)}", f"{book.client}:{self._count}:{at}"
            )
            for at in range(count)
        ]


def pass_with_librdkafka(task: Task, book: Notebook, stopping: threading.Event) -> None:
    """Write transactions with librdkafka until asked to end."""
    _pass(_Passer(Librdkafka, task, book), stopping)


def pass_with_java(task: Task, book: Notebook, stopping: threading.Event) -> None:
    """Write transactions with Kafka's producer in Java until asked to end."""
    _pass(_Passer(Java, task, book), stopping)


def _pass(passer: _Passer, stopping: threading.Event) -> None:
    while not stopping.is_set():
        passer.step()
    passer.finish()
