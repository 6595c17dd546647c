"""Compacted topics of one partition: the latest value of each key, and values at given offsets.

Only what is committed counts. A native transaction of somebody else that is still open ends what can be read for now.

Where that end is, the leader is asked beforehand. That a consumer has come to an end says less: right after an election
the new leader's high watermark may be behind what its predecessor has acknowledged, and consumers are told that end;
ListOffsets is not answered until the new leader has caught up (KIP-207).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Final, NamedTuple

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from rollbridge.errors import KafkaUnavailable
from rollbridge.kafka.clients import consumer_config, open_consumer
from rollbridge.kafka.log_offsets import LogOffsets
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.patience import Backoff, Deadline
from rollbridge.kafka.quiet import limited
from rollbridge.kafka.translate import translate

logger = limited(logging.getLogger(__name__))

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
    if not found:
        return found
    ends = LogOffsets(bootstrap_servers, security=security)
    with closing(ends), _reading(bootstrap_servers, security, topic) as consumer:
        end = _end(ends, topic)
        deadline = Deadline(_BEHIND_OTHERS_S)
        backoff = Backoff(_PAUSE_S)
        while max(found) >= end and not deadline.passed():
            backoff.sleep(deadline)
            end = _end(ends, topic)
        for offset in sorted(item for item in found if item < end):
            consumer.assign([TopicPartition(topic, 0, offset)])
            message = next(_until(consumer, topic, end), None)
            if message is not None and message.offset() == offset:
                found[offset] = message.value()
    return found


def read_all(
    bootstrap_servers: str, security: Mapping[str, str], topic: str, partition: int = 0, start: int = 0
) -> Iterator[Message]:
    """The committed records of any topic's partition, from an offset that it holds to its present end.

    Raises:
        KafkaUnavailable, NotFoundError, NotAuthorizedError
    """
    with closing(LogOffsets(bootstrap_servers, security=security)) as ends:
        end = _end(ends, topic, partition)
    if start >= end:
        return
    with _reading(bootstrap_servers, security, topic) as consumer:
        consumer.assign([TopicPartition(topic, partition, start)])
        yield from _until(consumer, topic, end)


def is_end(message: Message, end: int) -> bool:
    """Whether nothing below an offset comes after this, a message of a consumer or its news of an end.

    The last offsets of a log may be markers, which are not handed out, so that only the news of an end tells; and news
    of an earlier end tells of a leader that has just been elected.
    """
    offset = message.offset()
    if offset is None:
        return False
    error = message.error()
    if error is None:
        return offset + 1 >= end
    return error.code() == KafkaError._PARTITION_EOF and offset >= end


def _end(offsets: LogOffsets, topic: str, partition: int = 0) -> int:
    return offsets.end([topic], Isolation.READ_COMMITTED, partition, timeout_s=_TIMEOUT_S)[topic]


@contextmanager
def _reading(bootstrap_servers: str, security: Mapping[str, str], topic: str) -> Iterator[Consumer]:
    config = consumer_config(bootstrap_servers, isolation=Isolation.READ_COMMITTED, security=security)
    consumer = open_consumer({**config, "enable.partition.eof": True}, f"read topic {topic}", logger)
    try:
        yield consumer
    finally:
        consumer.close()


def _until(consumer: Consumer, topic: str, end: int) -> Iterator[Message]:
    """The records from where the consumer is to an end that the leader has told."""
    deadline = Deadline(_TIMEOUT_S)
    while True:
        first = consumer.poll(deadline.left())
        if first is None:
            raise KafkaUnavailable(f"no broker gave topic {topic} up to offset {end} within {_TIMEOUT_S:g} s")
        for message in (first, *consumer.consume(_AT_ONCE, 0)):
            error = message.error()
            if error is None:
                deadline = Deadline(_TIMEOUT_S)
                yield message
            elif error.code() in _OUT_OF_RANGE:
                return
            elif error.code() == KafkaError._PARTITION_EOF:
                logger.debug("%s: the end was told at %s, wanted is %d", topic, message.offset(), end)
            else:
                fault = translate(error, f"read topic {topic}", f"topic {topic}")
                if not isinstance(fault, KafkaUnavailable):
                    raise fault
                logger.info("reading %s goes on: %s", topic, fault)
            if is_end(message, end):
                return
