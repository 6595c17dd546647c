"""Plain Kafka operations that many tests need; none of them knows rollbridge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic


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


def read_all(servers: str, partition: TopicPartition) -> list[bytes | None]:
    """Everything that a ``read_committed`` consumer can see of a partition now."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "read-all",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 20,
            # Takes effect where a topic was truncated; to ask for the beginning takes the library half a second.
            "auto.offset.reset": "earliest",
        }
    )
    try:
        consumer.assign([TopicPartition(partition.topic, partition.partition, 0)])
        values: list[bytes | None] = []
        while True:
            message = consumer.poll(30)
            assert message is not None, f"{partition.topic} neither gave a record nor ended"
            error = message.error()
            if error is None:
                values.append(message.value())
            elif error.code() == KafkaError._PARTITION_EOF:
                return values
            else:
                assert error.retriable(), error
    finally:
        consumer.close()
