"""Native producers of a topic that a stream has adopted: they know nothing of us, and write beside everybody else.

Each writes under keys of its own, and under others after an unclear answer, as what it was about may still come.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from confluent_kafka import KafkaException, Message, Producer

from integration_tests.history.events import Answer, Kind, Operation, Write
from integration_tests.history.notebook import CALL_S, Notebook
from integration_tests.history.tasks import Task
from rollbridge.base.ids import SegmentId
from rollbridge.base.sn import DLSN
from rollbridge_devcluster.jars import JarCache
from rollbridge_devcluster.java import find_java

PARTITIONS: Final = 3
BETWEEN_S: Final = 0.1
AT_ONCE: Final = 8
"""Records that are sent before an answer is waited for, at most."""
HELD_S: Final = 1.5
"""For so long some native transactions stay open."""
JAVA_PRODUCER: Final = "org.apache.kafka.tools.ConsoleProducer"
JAVA_RECORDS: Final = 200
_Places = dict[str, str | None]
_KEPT: Final[list[Producer]] = []
"""Whoever destroys a producer waits for librdkafka's threads, now and then for ever (confluentinc/librdkafka#3470)."""


def kept(producer: Producer) -> Producer:
    """Return a producer of somebody else's program; it is there until its process is gone (:func:`leave`)."""
    _KEPT.append(producer)
    return producer


def leave(code: int) -> None:
    """End a process that has kept producers without waiting for librdkafka: what they were told is noted."""
    if _KEPT:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def topic_of(stream: str) -> str:
    """The topic that a stream has adopted; it exists before its stream does."""
    return stream.replace("/", ".")


def produce(task: Task, book: Notebook, stopping: threading.Event) -> None:
    """Write without idempotence, one record after the other: each comes once, unless a leader changes meanwhile."""
    native = _Native(task, book, {"retries": 0, "enable.idempotence": False}, Kind.UNSEQUENCED)
    while not stopping.wait(BETWEEN_S):
        native.write(1)


def produce_idempotently(task: Task, book: Notebook, stopping: threading.Event) -> None:
    """Write several records at once, of which each comes once and those of a key in their order."""
    native = _Native(task, book, {"enable.idempotence": True})
    while not stopping.wait(BETWEEN_S):
        native.write(native.choice.randint(1, AT_ONCE))


def produce_in_transactions(task: Task, book: Notebook, stopping: threading.Event) -> None:
    """Write native transactions, of which some are aborted and some stay open for a while."""
    native = _Native(task, book, {"transactional.id": f"native-{task.name}"})
    begun = False
    while not stopping.wait(BETWEEN_S):
        try:
            if not begun:
                native.producer.init_transactions(CALL_S)
                begun = True
            native.commit(stopping)
        except KafkaException:
            # The next one of this id ends what is open; what was asked for is noted.
            native.producer, begun = native.connected(), False


def produce_with_java(task: Task, book: Notebook, stopping: threading.Event) -> None:
    """Write some records with Apache Kafka's own producer, once; nothing is broken meanwhile, so it must succeed."""
    choice = random.Random(task.seed)
    keys = [f"{book.client}-{choice.randint(0, 9)}" for _ in range(JAVA_RECORDS)]
    writes = [Write(task.streams[0], key, f"{book.client}:{number}") for number, key in enumerate(keys)]
    asked = [book.asked(Kind.NATIVE, write.value, [write]) for write in writes]
    classpath = os.pathsep.join(map(str, JarCache.default().ensure("kafka", "tools", quiet=True)))
    command = [find_java().executable, "-Xmx256m", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "-cp", classpath]
    keyed = ["--reader-property", "parse.key=true", "--reader-property", "key.separator=:"]
    done = subprocess.run(
        [
            *command,
            JAVA_PRODUCER,
            "--bootstrap-server",
            task.bootstrap_servers,
            "--topic",
            topic_of(task.streams[0]),
            "--sync",
            "--timeout",
            "0",
            *keyed,
        ],
        input="".join(f"{write.key}:{write.value}\n" for write in writes).encode(),
        capture_output=True,
        timeout=180,
        check=False,
        cwd=Path(task.out).parent,
    )
    if done.returncode:
        raise RuntimeError(f"a Java producer ended with {done.returncode}: {done.stderr.decode(errors='replace')}")
    for item in asked:
        with book.answered(item):
            pass


def write_keys(bootstrap: str, topic: str, keys: Sequence[bytes], client_id: str) -> dict[bytes, int]:
    """Write a record of each key as a plain producer does; return the partition of each that was taken."""
    places: dict[bytes, int] = {}

    def told(error: object, message: Message) -> None:
        if error is None:
            places[message.key() or b""] = message.partition() or 0

    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "client.id": client_id,
            "enable.idempotence": True,
            "partitioner": "murmur2_random",
            "message.timeout.ms": int(CALL_S * 1000),
        }
    )
    for key in keys:
        producer.produce(topic, b"v", key, on_delivery=told)
    producer.flush(2 * CALL_S)
    return places


class _Native:
    """One producer, and what it has been told of the records that it has sent."""

    def __init__(
        self,
        task: Task,
        book: Notebook,
        settings: dict[str, Any],
        kind: Literal[Kind.NATIVE, Kind.UNSEQUENCED] = Kind.NATIVE,
    ) -> None:
        self._kind = kind
        self.choice = random.Random(task.seed)
        self._settings = {
            "bootstrap.servers": task.bootstrap_servers,
            "partitioner": "murmur2_random",
            "linger.ms": 1,
            "acks": "all",
            **settings,
        }
        self.producer = self.connected()
        self._stream = task.streams[0]
        self._topic = topic_of(self._stream)
        self._is_rolling = task.role == "rolling"
        self._book = book
        self._count = 0
        self._places: _Places = {}

    def connected(self) -> Producer:
        """One more producer."""
        return kept(Producer(self._settings))

    def write(self, count: int) -> None:
        """Write some records outside of transactions, and wait for the answers to all."""
        asked = [self._book.asked(self._kind, write.value, [write]) for write in self._writes(count)]
        with suppress(KafkaException):  # the topic is gone for now
            self._send([write for item in asked for write in item.writes])
        self.producer.flush(CALL_S)
        for item in asked:
            self._answer(item, is_there=item.writes[0].value in self._places)

    def commit(self, stopping: threading.Event) -> None:
        """Write one transaction; KafkaException if nobody knows whether it is committed."""
        writes = self._writes(self.choice.randint(1, AT_ONCE))
        wish = "abort" if self.choice.random() < 0.25 else "commit"
        self.producer.begin_transaction()
        asked = self._book.asked(Kind.NATIVE, f"{writes[0].value}, native transaction", writes, wish)
        self._send(writes)
        if self.choice.random() < 0.1:
            stopping.wait(HELD_S)
        end = self.producer.commit_transaction if wish == "commit" else self.producer.abort_transaction
        deadline = time.monotonic() + CALL_S
        while True:
            try:
                end(CALL_S)
            except KafkaException as fault:
                error = fault.args[0]
                if error.txn_requires_abort() and wish == "commit":
                    self.producer.abort_transaction(CALL_S)
                    self._book.note(replace(asked, answer=Answer.FAILED, answered=time.monotonic_ns()).to_line())
                    return
                if not error.retriable() or time.monotonic() > deadline:
                    self._book.unclear += 1
                    raise
            else:
                self._answer(asked, is_there=True)
                return

    def _writes(self, count: int) -> list[Write]:
        book = self._book
        writes = []
        for _ in range(count):
            self._count += 1
            key = f"{book.client}-{book.unclear}-{self.choice.randint(0, 3)}"
            writes.append(Write(self._stream, key, f"{book.client}:{self._count}"))
        return writes

    def _send(self, writes: Sequence[Write]) -> None:
        self._places.clear()
        for write in writes:
            self.producer.produce(self._topic, write.value.encode(), write.key.encode(), on_delivery=self._told)

    def _told(self, error: object, message: Message) -> None:
        if error is None:
            offset, value = message.offset(), (message.value() or b"").decode()
            # An answer to a record that was sent twice need not say where the first one stands. A gateway's says -1 for
            # the first record of a batch of a transaction, and librdkafka counts the others on from there.
            known = offset is not None and offset >= 0 and not self._is_rolling
            segment = SegmentId.of(message.partition() or 0, 0)
            self._places[value] = str(DLSN.of(segment, offset or 0, 0)) if known else None

    def _answer(self, asked: Operation, *, is_there: bool) -> None:
        if not is_there:
            self._book.unclear += 1
            return
        writes = tuple(replace(write, place=self._places.get(write.value)) for write in asked.writes)
        done = replace(asked, answer=Answer.OK, answered=time.monotonic_ns(), writes=writes)
        self._book.note(done.to_line())
