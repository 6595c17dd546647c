"""A barrier for appends: the marker of a native transaction that partitions join and that writes nothing.

A marker takes the lock of a partition's log as every append does, so what was inside of it, or waits for it in front,
stands below the marker. To get one written where no record can be appended any more, a partition joins a transaction
with a batch that has a wrong checksum: since transactions v2 a partition joins with its first Produce request, before
the batch is looked at, and stays joined when that is refused. Then the transaction is aborted. So a barrier can be put
up at any point, again and again, and leaves nothing but markers.

Source: KIP-890 (a partition joins with its first Produce v12 request).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kio.schema.errors import ErrorCode
from kio.schema.produce.v12 import ProduceResponse

from rollbridge.kafka import codes
from rollbridge.kafka.batches import HEADER_BYTES, BatchBuilder, stamped_header
from rollbridge.kafka.codes import Meaning
from rollbridge.kafka.coordination import Coordination, RequestRefused
from rollbridge.kafka.errors import KafkaUnavailable, NotAuthorizedError
from rollbridge.kafka.metadata import Cluster
from rollbridge.kafka.pipeline import PRODUCE_KEY, PRODUCE_VERSION, Producer, produce_body, request_start
from rollbridge.kafka.wire import Connection

_TRANSACTION_TIMEOUT_MS: Final = 60_000
_BROKER_TIMEOUT_MS: Final = 5_000
_FIRST_OF_CHECKSUM: Final = 17
_VALUE: Final = bytes(78)


def corrupt_batch(producer: Producer | None = None) -> bytes:
    """Return a batch that no broker takes: its checksum is wrong, and it is larger than a marker."""
    builder = BatchBuilder(1 << 10)
    builder.append(0, None, _VALUE)
    batch = bytearray(builder.build())
    if producer is not None:
        header = stamped_header(batch, producer_id=producer.producer_id, producer_epoch=producer.epoch, base_sequence=0)
        batch[:HEADER_BYTES] = header
    batch[_FIRST_OF_CHECKSUM] ^= 0xFF
    return bytes(batch)


class Barrier:
    """Has markers written with one transactional id, whose every earlier use it ends; not thread-safe.

    Raises:
        KafkaUnavailable: From :meth:`open` and :meth:`close`: it can not be told whether markers were written. Join all
            partitions again, after :meth:`forget`.
        NotAuthorizedError: The transactional id must not be used.
    """

    def __init__(self, cluster: Cluster, transactional_id: str) -> None:
        self._cluster = cluster
        self._transactional_id = transactional_id
        self._producer: Producer | None = None

    @property
    def is_open(self) -> bool:
        """Whether partitions can join."""
        return self._producer is not None

    def open(self, timeout_s: float) -> None:
        """Begin a transaction, unless one is begun."""
        if self._producer is None:
            self._producer = self._take_over(timeout_s)

    def join(self, connection: Connection, topics: Iterable[str]) -> dict[str, ErrorCode]:
        """Have partition 0 of each topic join, and return how a leader refuses the batch with which that is done.

        MESSAGE_TOO_LARGE and CORRUPT_MESSAGE mean that it has joined.

        Raises:
            KafkaUnavailable: The connection was lost.
        """
        if self._producer is None:
            raise AssertionError("a barrier is joined only while it is open")
        connection.require(PRODUCE_KEY, PRODUCE_VERSION, "Produce")
        batch = corrupt_batch(self._producer)
        start = request_start(self._transactional_id, _BROKER_TIMEOUT_MS)
        items = [((topic, 0), batch[:HEADER_BYTES], batch) for topic in topics]
        connection.send_body(PRODUCE_KEY, PRODUCE_VERSION, produce_body(start, items))
        answer = connection.receive(ProduceResponse)
        return {topic.name: topic.partition_responses[0].error_code for topic in answer.responses}

    def close(self, timeout_s: float) -> None:
        """Abort the transaction; return when every partition that has joined has its marker.

        Taking the id anew does both: it aborts what is open, and is answered when all markers are written.
        """
        self._producer = None
        self._producer = self._take_over(timeout_s)

    def forget(self) -> None:
        """Begin a new transaction next time: somebody else has used the id, or an answer was lost."""
        self._producer = None

    def _take_over(self, timeout_s: float) -> Producer:
        coordination = Coordination(
            self._cluster,
            self._transactional_id,
            transaction_timeout_ms=_TRANSACTION_TIMEOUT_MS,
            retry_timeout_s=timeout_s,
        )
        try:
            return coordination.take_over()
        except RequestRefused as exc:
            if exc.meaning is Meaning.DENIED:
                resource = f"transactional id {self._transactional_id}"
                raise NotAuthorizedError(
                    f"not allowed to use {resource}, which sealing needs: {codes.name(exc.error)}", resource=resource
                ) from exc
            raise KafkaUnavailable(f"no markers can be written with {self._transactional_id}: {exc}") from exc
