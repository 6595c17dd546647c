"""The same with a native Kafka transaction, to compare: the flights in one, small writes beside it, and a reader.

A topic of its own with one partition. The open transaction pins the last stable offset, so a ``read_committed`` reader
gets nothing of what others write behind it until it ends.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

from confluent_kafka import Consumer, KafkaException, Message, Producer

from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.topics import TopicSpec
from spark_examples.demo import flights
from spark_examples.demo.flights import Flights
from spark_examples.demo.helper import serve

logger = logging.getLogger(__name__)

_SMALL: Final = b"small:"
_RECORDS: Final = 10
_PAUSE_SECONDS: Final = 0.05
_CATCH_UP_SECONDS: Final = 30.0
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

    def __init__(self, bootstrap_servers: str, topic: str, rows: Flights) -> None:
        self._topic = topic
        self._servers: dict[str, str | int | float | bool] = {"bootstrap.servers": bootstrap_servers}
        KafkaClient(bootstrap_servers).topics.create_topics([TopicSpec(name=topic, replication_factor=1)])
        self._producer = Producer({**self._servers, "linger.ms": 0}, logger=logger)
        self._transaction = Producer(
            {
                **self._servers,
                "transactional.id": topic,
                "transaction.timeout.ms": _TIMEOUT_MS,
                "queue.buffering.max.messages": 1_000_000,
            },
            logger=logger,
        )
        self._transaction.init_transactions(30)
        self._flights = rows
        self._opened_s = self._closed_s = 0.0
        self._acked_s: dict[int, float] = {}
        self._arrived_s: dict[int, float] = {}
        self._read_flights = 0
        self._ended = threading.Event()
        self._reader = threading.Thread(target=self._read, name="native-reader", daemon=True)
        self._reader.start()

    def begin(self) -> None:
        """Open the transaction and write all flights."""
        self._transaction.begin_transaction()
        self._opened_s = time.monotonic()
        for key, value in self._flights.records(0, len(self._flights)):
            self._transaction.produce(self._topic, value, key, on_delivery=_check)
        if self._transaction.flush(60):
            raise TimeoutError("the flights of the native transaction were not acknowledged within 60 s")

    def read(self) -> tuple[int, int]:
        """How many flights and how many small writes the reader has."""
        return self._read_flights, len(self._arrived_s)

    def commit(self) -> RivalReport:
        """Commit, wait until the reader has everything, and report."""
        self._transaction.commit_transaction(60)
        self._closed_s = time.monotonic()
        deadline = self._closed_s + _CATCH_UP_SECONDS
        while self._read_flights < len(self._flights) or len(self._arrived_s) < len(self._acked_s):
            if time.monotonic() > deadline:
                break  # the report shows what is missing
            time.sleep(0.01)
        arrived = dict(self._arrived_s)
        return RivalReport(
            open_s=self._closed_s - self._opened_s,
            longest_wait_s=max(arrived[number] - self._acked_s[number] for number in arrived),
            flights=self._read_flights,
            small_written=len(self._acked_s),
            small_read=len(arrived),
        )

    def step(self) -> None:
        """Write a few records beside the transaction while it is open."""
        if self._opened_s and not self._closed_s:
            number = len(self._acked_s)
            for _ in range(_RECORDS):
                self._producer.produce(self._topic, b"%s%d" % (_SMALL, number), on_delivery=_check)
            if self._producer.flush(60):
                raise TimeoutError("a small write beside the native transaction was not acknowledged within 60 s")
            self._acked_s[number] = time.monotonic()
        time.sleep(_PAUSE_SECONDS)

    def close(self) -> None:
        """End the reader."""
        self._ended.set()
        self._reader.join()

    def _read(self) -> None:
        consumer = Consumer(
            {
                **self._servers,
                "group.id": self._topic,
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
            },
            logger=logger,
        )
        consumer.subscribe([self._topic])
        while not self._ended.is_set():
            first = consumer.poll(0.05)
            if first is None:
                continue
            messages = [first, *consumer.consume(5_000, 0)]
            now_s = time.monotonic()
            for message in messages:
                value = _value(message)
                if value.startswith(_SMALL):
                    self._arrived_s[int(value.removeprefix(_SMALL))] = now_s
                else:
                    self._read_flights += 1
        consumer.close()


def main(connection: Connection, bootstrap_servers: str, topic: str) -> None:
    """The rival as a helper process; it answers ``ready``, ``begin`` and ``commit``."""
    rival = NativeRival(bootstrap_servers, topic, flights.load())
    try:
        serve(connection, {"ready": lambda: None, "begin": rival.begin, "commit": rival.commit}, rival.step)
    finally:
        rival.close()


def _value(message: Message) -> bytes:
    value = message.value()
    if message.error() is not None or value is None:
        raise KafkaException(message.error())
    return value


def _check(fault: object, _: object) -> None:
    """Without a callback librdkafka drops a refused record silently."""
    if fault is not None:
        raise RuntimeError(f"a record of the native rival was refused: {fault}")
