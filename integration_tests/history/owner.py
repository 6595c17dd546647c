"""The owner of a topic that a stream has adopted: it adds partitions, makes it anew, and takes it back.

Where it takes it back or makes it again, it follows docs/adopted-topics.md: end what is open, release the topic, adopt
it again. Partitions are added without more ado, or beside that. Clients write to it meanwhile in every way, natively
too.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Final

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

import rollbridge
from integration_tests.history.natives import topic_of
from integration_tests.patience import eventually
from rollbridge.errors import RollbridgeError, StreamExistsError, StreamNotFoundError
from rollbridge.kafka.client import KafkaClient

PARTITIONS: Final = 2
PARTITIONS_MAX: Final = 6
"""A topic with more is made anew instead."""
PAUSE_S: Final = (0.02, 1.0)
"""For so long its clients write between two things that it does: a few records, or many."""
KAFKA_S: Final = 60


class Owner:
    """Owner of one topic; used by one thread at a time."""

    def __init__(self, bootstrap_servers: str, zookeeper: str, stream: str, seed: int) -> None:
        """The topic is named after the stream."""
        self._choice = random.Random(seed)
        self._bootstrap_servers = bootstrap_servers
        self._zookeeper = zookeeper
        self.stream: Final = stream
        self._topic = topic_of(stream)
        self._kafka = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})
        self._refusal = ""
        self.since = time.monotonic_ns()
        """When the topic as it is now was made, in ns of the clock of operations."""

    def begin(self) -> None:
        """Make the topic, and have it adopted."""
        self._create()
        with self._connect() as client:
            client.admin.adopt_topic(self._topic, stream=self.stream, partitioner="murmur2")

    def take_back(self, over: threading.Event) -> None:
        """Release the topic and adopt it again, again and again."""
        self._again_and_again(lambda: True, over)

    def grow(self, over: threading.Event) -> None:
        """Add a partition, again and again."""
        self._again_and_again(self._add_partition, over)

    def make_anew(self, over: threading.Event) -> None:
        """Delete the topic and make it again under its name, again and again."""
        self._again_and_again(self._make_anew, over)

    def _again_and_again(self, change: Callable[[], bool], over: threading.Event) -> None:
        """Change the topic, and release it and adopt it again if ``change`` says so."""
        with self._connect() as client:
            while True:
                is_to_be_released = change()
                # Its clients go on with what they know, before anybody has noticed or after that.
                is_over = over.wait(self._choice.uniform(*PAUSE_S))
                if is_to_be_released:
                    self._persist(lambda: self._release(client), f"topic {self._topic} is released")
                    self._persist(lambda: self._adopt(client), f"topic {self._topic} is adopted")
                if is_over or over.wait(self._choice.uniform(*PAUSE_S)):
                    return

    def _persist(self, tries: Callable[[], bool], what: str) -> None:
        """Try until it is done; the last refusal is told if it never is."""
        self._refusal = ""
        try:
            eventually(tries, what, KAFKA_S)
        except AssertionError as late:
            raise AssertionError(f"{late}: {self._refusal}") from late

    def _release(self, client: rollbridge.Bridge) -> bool:
        """End what is open there and release the topic; False if it may not be released yet."""
        aborts: list[str] = []
        try:
            for record in client.admin.transactions():
                if self.stream in map(str, record.streams):
                    try:
                        client.admin.abort_transaction(record.id, group=record.group)
                    except RollbridgeError as fault:
                        aborts.append(f"{record.id}: {fault}")
            client.admin.release_topic(self._topic)
        except StreamNotFoundError:
            return True
        except RollbridgeError as fault:
            self._refusal = f"{fault}; aborts that were refused: {aborts}"
            return False
        return True

    def _adopt(self, client: rollbridge.Bridge) -> bool:
        # Native producers wrote some keys while there were fewer partitions.
        try:
            client.admin.adopt_topic(self._topic, stream=self.stream, partitioner="murmur2", check=False)
        except StreamExistsError:
            return True
        except RollbridgeError as fault:
            self._refusal = str(fault)
            return False
        return True

    def _add_partition(self) -> bool:
        """Add a partition; return whether to release the topic: half of the times to no purpose."""
        with KafkaClient(self._bootstrap_servers) as kafka:
            admin = kafka.topics
            count = admin.describe([self._topic])[self._topic].partitions
        if count >= PARTITIONS_MAX:
            return self._make_anew()
        self._kafka.create_partitions([NewPartitions(self._topic, count + 1)])[self._topic].result(KAFKA_S)
        return self._choice.random() < 0.5

    def _make_anew(self) -> bool:
        """Delete the topic and make it again; return True, since it must be released then.

        The controller has made it before brokers have heard of it: until then, they acknowledge what they write into
        the log that they are to delete.
        """
        with KafkaClient(self._bootstrap_servers) as kafka:
            admin = kafka.topics
            former = admin.topic_ids([self._topic]).get(self._topic)
            self._kafka.delete_topics([self._topic])[self._topic].result(KAFKA_S)
            eventually(self._is_created, f"topic {self._topic} is made again", KAFKA_S)
            eventually(
                lambda: admin.topic_ids([self._topic]).get(self._topic, former) != former,
                f"brokers know of topic {self._topic}",
                KAFKA_S,
            )
        self.since = time.monotonic_ns()
        return True

    def _is_created(self) -> bool:
        """Whether it could be made: where it is not gone yet, it exists."""
        try:
            self._create()
        except KafkaException:
            return False
        return True

    def _create(self) -> None:
        self._kafka.create_topics([NewTopic(self._topic, PARTITIONS)])[self._topic].result(KAFKA_S)

    def _connect(self) -> rollbridge.Bridge:
        options = rollbridge.ClientOptions(admin_timeout_s=KAFKA_S)
        return rollbridge.connect(self._bootstrap_servers, zookeeper=self._zookeeper, options=options)
