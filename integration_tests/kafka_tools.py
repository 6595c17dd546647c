"""Plain Kafka operations that many tests need; none of them knows rollbridge."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from integration_tests.patience import PATIENCE_S


def producer_config(servers: str) -> dict[str, Any]:
    """Return the settings of an idempotent producer that makes no topics and reports only what was not written."""
    return {
        "bootstrap.servers": servers,
        "linger.ms": 0,
        "metadata.recovery.rebootstrap.trigger.ms": 2_000,
        "enable.idempotence": True,
        "allow.auto.create.topics": False,
        "delivery.report.only.error": True,
    }


def create_topic(servers: str, topic: str, partitions: int = 1, settings: Mapping[str, str] | None = None) -> None:
    """Create a topic and return when that is done."""
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic(topic, partitions, 1, config=dict(settings or {}))])[topic].result(120)


def produce(servers: str, topic: str, values: Sequence[bytes], partition: int = 0) -> None:
    """Write values to a partition, in this order whatever is tried again, and return when all are acknowledged."""
    failures: list[KafkaError] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            failures.append(error)

    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 0})
    for value in values:
        producer.produce(topic, value, partition=partition, on_delivery=delivered)
    assert producer.flush(60) == 0
    assert not failures


def read_places(
    servers: str, places: Sequence[tuple[str, int]], *, isolation: str = "read_committed", first: int = 0
) -> dict[tuple[str, int], list[Message]]:
    """The records of each partition from an offset to the end that there is now; checksums are checked."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "plain-reader",
            "enable.auto.commit": False,
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "check.crcs": True,
            "fetch.wait.max.ms": 20,
            # Takes effect where a topic was truncated; to ask for the beginning takes the library half a second.
            "auto.offset.reset": "earliest",
        }
    )
    found: dict[tuple[str, int], list[Message]] = {place: [] for place in places}
    unread, last = set(places), None
    deadline = time.monotonic() + PATIENCE_S
    with closing(consumer):
        consumer.assign([TopicPartition(*place, first) for place in places])
        while unread:
            assert time.monotonic() < deadline, f"the ends of {unread} were not reached, and the last error was {last}"
            message = consumer.poll(0.05)
            for one in [] if message is None else [message, *consumer.consume(10_000, 0)]:
                place, error = (one.topic() or "", one.partition() or 0), one.error()
                if error is None:
                    found[place].append(one)
                elif error.code() == KafkaError._PARTITION_EOF:
                    unread.discard(place)
                else:
                    last = error
    return found


def read_all(servers: str, partition: TopicPartition) -> list[bytes | None]:
    """Everything that a ``read_committed`` consumer can see of a partition now."""
    [found] = read_places(servers, [(partition.topic, partition.partition)]).values()
    return [message.value() for message in found]
