"""Members of consumer groups: some note what they are handed, one commits by name, one writes it on, exactly once.

A *member* reads all streams of the history with ``rollbridge.Consumer`` and commits now and then. A *transformer* reads
the first one and copies each record into a stream of copies, in transactions that carry the consumer's offsets. Either
begins anew with what its group has committed whenever something fails.
"""

from __future__ import annotations

import json
import random
import threading
import time
from contextlib import suppress
from typing import Any, Final

from confluent_kafka import KafkaException, TopicPartition

import rollbridge
from integration_tests.history.events import Handed
from integration_tests.history.notebook import CALL_S, Notebook
from integration_tests.history.tasks import Task
from rollbridge.errors import OutcomeUnknownError, RollbridgeError, UnavailableError

POLL_S: Final = 0.5
COPIED: Final = "copy:"
"""What the value of a copy begins with."""
AWAITED: Final = "history-awaited"
"""A group for which the stream of a state waits, before anything of it is truncated."""


def hand_out(task: Task, book: Notebook, stopping: threading.Event) -> None:
    """Note every record that this member is handed; commit what was noted, every ten records or so."""
    while not stopping.is_set():
        try:
            consumer = _consumer(task, "history-members")
            try:
                consumer.subscribe(list(task.streams))
                taken = 0
                while not stopping.is_set():
                    with book.timed("poll of a consumer", POLL_S):
                        message = consumer.poll(POLL_S)
                    if message is not None and message.error() is None:
                        key, value = (message.key() or b"").decode(), (message.value() or b"").decode()
                        book.note(Handed(str(message.topic()), key, value, time.monotonic_ns()).to_line())
                        taken += 1
                    if taken >= 10 or (taken and message is None):
                        consumer.commit(asynchronous=False)
                        taken = 0
            finally:
                consumer.close()
        except (KafkaException, RollbridgeError):
            time.sleep(0.2)


def hand_out_updates(task: Task, book: Notebook, stopping: threading.Event) -> None:
    """Note every update of a state, which other records of its stream are not, and commit at once."""
    while not stopping.is_set():
        try:
            consumer = _consumer(task, AWAITED)
            try:
                consumer.subscribe(list(task.streams))
                while not stopping.is_set():
                    with book.timed("poll of who is awaited", POLL_S):
                        messages = consumer.consume(100, POLL_S)
                    found = [json.loads(item.value() or b"null") for item in messages if item.error() is None]
                    for update in found:
                        if isinstance(update, str):
                            book.note({"update": update})
                    if found:
                        consumer.commit(asynchronous=False)
            finally:
                consumer.close()
        except (KafkaException, RollbridgeError):
            time.sleep(0.2)


def name_offsets(task: Task, book: Notebook, stopping: threading.Event) -> None:
    """Commit by stream and partition number what was noted, late, all of it again each time, and sometimes too much.

    The member leaves now and then and comes back, so that it is handed what was committed and nothing else. Then what
    it had committed before comes again, from a member that has not been handed it.
    """
    choice = random.Random(task.seed)
    done: dict[tuple[str, int], int] = {}
    while not stopping.is_set():
        before, done = done, {}
        try:
            consumer = _consumer(task, "history-namers")
            try:
                consumer.subscribe(list(task.streams))
                stays = choice.randint(50, 500)
                while stays > 0 and not stopping.is_set():
                    with book.timed("poll of a namer", POLL_S):
                        messages = consumer.consume(choice.choice((1, 7, 40)), POLL_S)
                    for message in messages:
                        if message.error() is not None:
                            continue
                        key, value = (message.key() or b"").decode(), (message.value() or b"").decode()
                        book.note(Handed(str(message.topic()), key, value, time.monotonic_ns(), "namers").to_line())
                        done[str(message.topic()), message.partition() or 0] = (message.offset() or 0) + 1
                        stays -= 1
                    if choice.random() < 0.5 or not messages:
                        _commit_by_name(consumer, done, choice)
                    if choice.random() < 0.1 and before:
                        with suppress(KafkaException, RollbridgeError):
                            _commit_by_name(consumer, dict(choice.sample(sorted(before.items()), 1)), choice)
            finally:
                consumer.close()
        except (KafkaException, RollbridgeError):
            time.sleep(0.2)


def _commit_by_name(consumer: rollbridge.Consumer, done: dict[tuple[str, int], int], choice: random.Random) -> None:
    if not done:
        return
    offsets = [TopicPartition(*place, offset) for place, offset in done.items()]
    for _ in range(choice.choice((1, 1, 2))):
        consumer.commit(offsets=offsets, asynchronous=choice.random() < 0.3)
    if choice.random() < 0.1:
        (topic, partition), offset = choice.choice(list(done.items()))
        with suppress(KafkaException, RollbridgeError):  # or else what it leaves out is missed
            consumer.commit(offsets=[TopicPartition(topic, partition, offset + 1_000)], asynchronous=False)


def transform(task: Task, book: Notebook, stopping: threading.Event) -> None:
    """Copy the first stream into the second one, exactly once."""
    source, target = task.streams
    choice = random.Random(task.seed)
    while not stopping.is_set():
        try:
            consumer = _consumer(task, "history-transformers")
            try:
                consumer.subscribe([source])
                with rollbridge.connect(
                    task.bootstrap_servers, zookeeper=task.zookeeper, client_name=task.name
                ) as client:
                    for left in client.unfinished(timeout=CALL_S):
                        client.resume(left.transaction).abort("its transformer has died", timeout=CALL_S)
                    while not stopping.is_set():
                        _copy(consumer, client, target, book, choice)
            finally:
                consumer.close()
        except (KafkaException, RollbridgeError):
            time.sleep(0.2)


def _copy(
    consumer: rollbridge.Consumer, client: rollbridge.Bridge, target: str, book: Notebook, choice: random.Random
) -> None:
    """Copy the next few records; an error if they have to be read again.

    With them go the positions of the member, or what comes after these messages, by their own names.
    """
    with book.timed("poll of a transformer", POLL_S):
        messages = [item for item in consumer.consume(20, POLL_S) if item.error() is None]
    if not messages:
        return
    txn = client.begin(target)
    for message in messages:
        txn.write(target, message.key(), COPIED.encode() + (message.value() or b""))
    offsets = consumer.position(consumer.assignment())
    if choice.random() < 0.5:
        after = {(item.topic() or "", item.partition() or 0): (item.offset() or 0) + 1 for item in messages}
        offsets = [TopicPartition(*place, offset) for place, offset in after.items()]
    txn.send_offsets(offsets, consumer.consumer_group_metadata())
    while True:
        try:
            txn.commit(timeout=CALL_S)
        except (OutcomeUnknownError, UnavailableError):
            continue
        return


def _consumer(task: Task, group: str) -> rollbridge.Consumer:
    return rollbridge.Consumer(
        {
            **_servers(task),
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "session.timeout.ms": 6_000,
        }
    )


def _servers(task: Task) -> dict[str, Any]:
    return {"bootstrap.servers": task.bootstrap_servers, "zookeeper": task.zookeeper}
