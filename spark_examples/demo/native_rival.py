"""The same with a native Kafka transaction, to compare: the flights in one, small writes beside it, and a reader.

A topic of its own with one partition. The open transaction pins the last stable offset, so a ``read_committed`` reader
gets nothing of what others write behind it until it ends.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from confluent_kafka import Producer

from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.topics import TopicSpec
from spark_examples.demo import flights
from spark_examples.demo.common import until
from spark_examples.demo.plain_reader import PlainReader
from spark_examples.demo.small_writer import RECORDS, notes

logger = logging.getLogger(__name__)

_PAUSE_S: Final = 0.05
_TIMEOUT_MS: Final = 300_000
"""Enough for the demo; brokers allow at most 15 minutes."""


@dataclass(frozen=True, slots=True)
class RivalReport:
    """What was seen of the native transaction."""

    open_s: float
    """From its first record to the answer to its commit."""
    longest_wait_s: float
    """Longest time from the acknowledgement of a small write to its arrival at the reader."""
    flights: int
    small_written: int
    small_read: int


class NativeRival:
    """A transactional producer, an ordinary one beside it, and a reader of both."""

    def __init__(self, bootstrap_servers: str, topic: str, lines: Sequence[bytes]) -> None:
        self._topic, self._lines = topic, lines
        servers = {"bootstrap.servers": bootstrap_servers}
        KafkaClient(bootstrap_servers).topics.create_topics([TopicSpec(name=topic, replication_factor=1)])
        self._producer = Producer({**servers, "linger.ms": 0}, logger=logger)
        own = {"transactional.id": topic, "transaction.timeout.ms": _TIMEOUT_MS}
        self._transaction = Producer({**servers, **own, "queue.buffering.max.messages": 1_000_000}, logger=logger)
        self._transaction.init_transactions(30)
        self._acked_s: dict[int, float] = {}
        self._ended = threading.Event()
        self.reader = PlainReader(bootstrap_servers, re.escape(topic), topic)

    def begin(self) -> None:
        """Open the transaction, write all flights, and have small writes follow them."""
        self._transaction.begin_transaction()
        self._opened_s = time.monotonic()
        for row, line in enumerate(self._lines):
            key, value = flights.record(row, line)
            self._transaction.produce(self._topic, value, key, on_delivery=_check)
        if self._transaction.flush(60):
            raise TimeoutError("the flights of the native transaction were not acknowledged within 60 s")
        self._thread = threading.Thread(target=self._write, name="native writer", daemon=True)
        self._thread.start()

    def acked(self) -> int:
        """Return how many small writes are acknowledged."""
        return len(self._acked_s)

    def commit(self) -> RivalReport:
        """Commit, wait until the reader has everything, and report."""
        self._transaction.commit_transaction(60)
        closed_s = time.monotonic()
        self._ended.set()
        self._thread.join()
        everything = (len(self._lines), len(self._acked_s) * RECORDS)
        until(lambda: self.reader.counts() == everything, "the native reader has everything")
        seen = self.reader.seen()
        self.reader.close()
        return RivalReport(
            open_s=closed_s - self._opened_s,
            longest_wait_s=max(arrived_s - self._acked_s[number] for number, arrived_s in seen.arrived_s.items()),
            flights=len(seen.rows),
            small_written=len(self._acked_s),
            small_read=len(seen.notes),
        )

    def _write(self) -> None:
        """Write a few records beside the transaction, again and again."""
        while not self._ended.wait(_PAUSE_S):
            number = len(self._acked_s)
            for key, value in notes(number, [b"beside"]):
                self._producer.produce(self._topic, value, key, on_delivery=_check)
            if self._producer.flush(60):
                raise TimeoutError("a small write beside the native transaction was not acknowledged within 60 s")
            self._acked_s[number] = time.monotonic()


def _check(fault: object, _: object) -> None:
    """Without a callback librdkafka drops a refused record silently."""
    if fault is not None:
        raise RuntimeError(f"a record of the native rival was refused: {fault}")
