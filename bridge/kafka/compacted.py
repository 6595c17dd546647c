"""Compacted topics of one partition: the latest value of each key, and values at given offsets.

Only what is committed counts. A native transaction of somebody else that is still open ends what can be read for now.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from bridge.errors import KafkaUnavailable
from bridge.kafka.clients import consumer_config, open_consumer
from bridge.kafka.metadata import Isolation
from bridge.kafka.translate import translate

logger = logging.getLogger(__name__)

_AT_ONCE: Final = 500
_TIMEOUT_S: Final = 30.0
_BEHIND_OTHERS_S: Final = 5.0
_PAUSE_S: Final = 0.05
_OUT_OF_RANGE: Final = (KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET)


class Latest(NamedTuple):
    """The latest record of a key."""

    offset: int
    value: bytes


def read_latest(bootstrap_servers: str, security: Mapping[str, str], topic: str) -> dict[bytes, Latest]:
    """The latest record of each key that has not been deleted.

    Raises:
        KafkaUnavailable, NotFoundError, NotAuthorizedError
    """
    found: dict[bytes, Latest] = {}
    for message in read_all(bootstrap_servers, security, topic):
        key, value = message.key() or b"", message.value()
        if value is None:
            found.pop(key, None)
        else:
            found[key] = Latest(message.offset() or 0, value)
    return found


def read_values(
    bootstrap_servers: str, security: Mapping[str, str], topic: str, offsets: Iterable[int]
) -> dict[int, bytes | None]:
    """The values at some offsets; None where there is no record, because it was deleted or replaced.

    One that stands behind a native transaction of somebody else that is still open is waited for, for a while.

    Raises:
        KafkaUnavailable, NotFoundError, NotAuthorizedError
    """
    found: dict[int, bytes | None] = dict.fromkeys(offsets)
    with _reading(bootstrap_servers, security, topic) as consumer:
        for offset in sorted(found):
            deadline = time.monotonic() + _BEHIND_OTHERS_S
            while True:
                consumer.assign([TopicPartition(topic, 0, offset)])
                message = next(_until_end(consumer, topic), None)
                if message is not None:
                    found[offset] = message.value() if message.offset() == offset else None
                    break
                # The high watermark, or the last stable offset: this consumer sees what is committed only.
                _, end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=_TIMEOUT_S)
                if offset < end or time.monotonic() > deadline:
                    break
                time.sleep(_PAUSE_S)
    return found


def read_all(
    bootstrap_servers: str, security: Mapping[str, str], topic: str, partition: int = 0, start: int = 0
) -> Iterator[Message]:
    """The committed records of any topic's partition, from an offset that it holds to its present end.

    Raises:
        KafkaUnavailable, NotFoundError, NotAuthorizedError
    """
    with _reading(bootstrap_servers, security, topic) as consumer:
        consumer.assign([TopicPartition(topic, partition, start)])
        yield from _until_end(consumer, topic)


@contextmanager
def _reading(bootstrap_servers: str, security: Mapping[str, str], topic: str) -> Iterator[Consumer]:
    config = consumer_config(bootstrap_servers, isolation=Isolation.READ_COMMITTED, security=security)
    consumer = open_consumer({**config, "enable.partition.eof": True}, f"read topic {topic}", logger)
    try:
        yield consumer
    finally:
        consumer.close()


def _until_end(consumer: Consumer, topic: str) -> Iterator[Message]:
    """The records from where the consumer is to the present end."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        first = consumer.poll(max(deadline - time.monotonic(), 0))
        if first is None:
            raise KafkaUnavailable(f"no broker gave topic {topic} within {_TIMEOUT_S:g} s")
        for message in (first, *consumer.consume(_AT_ONCE, 0)):
            error = message.error()
            if error is None:
                deadline = time.monotonic() + _TIMEOUT_S
                yield message
            elif error.code() == KafkaError._PARTITION_EOF or error.code() in _OUT_OF_RANGE:
                return
            else:
                fault = translate(error, f"read topic {topic}", f"topic {topic}")
                if not isinstance(fault, KafkaUnavailable):
                    raise fault
                logger.info("reading %s goes on: %s", topic, fault)
