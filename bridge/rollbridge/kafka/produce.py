"""Produce requests around ready-made batches, and the producer ids that stand in them.

Source: KIP-98 (idempotent producer), KIP-890 (a partition joins a transaction with its first Produce v12 request). A
producer without a transactional id gets a new producer id with each request for one.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Final

from kio.schema.errors import ErrorCode
from kio.schema.init_producer_id.v5 import InitProducerIdRequest, InitProducerIdResponse
from kio.schema.types import ProducerId
from kio.static.primitive import i16, i32Timedelta

from rollbridge.calls import Deadline
from rollbridge.errors import KafkaUnavailableError
from rollbridge.kafka import errors as codes
from rollbridge.kafka.batches import HEADER_BYTES, RawBatch
from rollbridge.kafka.connection import Buffer
from rollbridge.kafka.errors import Meaning, NotAuthorizedError
from rollbridge.kafka.metadata import Cluster
from rollbridge.model.avro import encode_unsigned
from rollbridge.model.names import Partition

PRODUCE_KEY: Final = 0
PRODUCE_VERSION: Final = 12
# Brokers remember the last five batches of a producer per partition: with more in flight, a retry of the oldest would
# no longer be recognised.
IN_FLIGHT_MAX: Final = 5
# Size at which a request is sent rather than extended by the next batch: large requests gain from an early start.
REQUEST_BYTES: Final = 1 << 20
REQUEST_BATCHES: Final = 500
_ACKS_ALL: Final = -1
_PAUSE_S: Final = 0.05


def request_start(transactional_id: str | None, broker_timeout_ms: int) -> bytes:
    """Encode the first fields of Produce v12: transactional id, acks=all, and the time-out for the replicas.

    ``transactional_id`` is None for a producer without transactions.
    """
    name = b"" if transactional_id is None else transactional_id.encode()
    length = 0 if transactional_id is None else len(name) + 1
    return encode_unsigned(length) + name + struct.pack(">hi", _ACKS_ALL, broker_timeout_ms)


def produce_body(start: bytes, items: Iterable[tuple[Partition, bytes, RawBatch]]) -> list[Buffer]:
    """Return the body of Produce v12: ``start``, then the batches, given as partition, new header and whole batch."""
    topics: dict[str, list[tuple[int, bytes, RawBatch]]] = {}
    for (topic, partition), header, batch in items:
        topics.setdefault(topic, []).append((partition, header, batch))
    parts: list[Buffer] = []
    glue = bytearray(start + encode_unsigned(len(topics) + 1))
    for topic, batches in topics.items():
        name = topic.encode()
        glue += encode_unsigned(len(name) + 1) + name + encode_unsigned(len(batches) + 1)
        for partition, header, batch in batches:
            glue += struct.pack(">i", partition) + encode_unsigned(len(batch) + 1) + header
            parts += (bytes(glue), memoryview(batch)[HEADER_BYTES:])
            glue = bytearray(b"\0")
        glue += b"\0"
    glue += b"\0"
    parts.append(bytes(glue))
    return parts


def new_producer_id(cluster: Cluster, timeout_s: float = 30.0) -> tuple[int, int]:
    """Allocate a producer id; return it and its epoch.

    Retries while a broker that has just started has no ids to allocate.

    Raises:
        KafkaUnavailableError: No broker gave one within ``timeout_s``; ask again.
        NotAuthorizedError: The principal may write to no topic.
    """
    request = InitProducerIdRequest(
        transactional_id=None,
        transaction_timeout=i32Timedelta.parse(timedelta(milliseconds=0)),
        producer_id=ProducerId(-1),
        producer_epoch=i16(-1),
    )
    deadline = Deadline(timeout_s)
    while True:
        answer = cluster.ask_any(request, InitProducerIdResponse)
        if answer.error_code == ErrorCode.none:
            return answer.producer_id, answer.producer_epoch
        meaning = codes.meaning(codes.INIT, answer.error_code)
        if meaning is Meaning.DENIED:
            raise NotAuthorizedError(
                f"not allowed to write idempotently: {codes.name(answer.error_code)}", resource="cluster"
            )
        if meaning not in (Meaning.RETRY, Meaning.REFRESH) or deadline.passed():
            raise KafkaUnavailableError(f"no broker gave a producer id: {codes.name(answer.error_code)}")
        time.sleep(_PAUSE_S)
