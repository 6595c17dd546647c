"""A plain Kafka consumer that knows nothing of rollbridge: a pattern, ``read_committed``, and a loop.

It notes when each small transaction has arrived in full, counts the flights, and checks that none is doubled and that
those of one aircraft come in the order in which they were written.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from confluent_kafka import Consumer, KafkaError, KafkaException, Message

from spark_examples.demo.flights import parse_value
from spark_examples.demo.helper import serve

logger = logging.getLogger(__name__)

_BATCH = 5_000


@dataclass(frozen=True, slots=True)
class Counts:
    """How far the reader has come."""

    flights: int
    small_records: int


@dataclass(slots=True)
class Seen:
    """Everything that the reader has noted."""

    rows: set[int] = field(default_factory=set)
    carriers: Counter[str] = field(default_factory=Counter)
    doubled: int = 0
    """Records that came a second time."""
    out_of_order: int = 0
    """Flights that came before an earlier one of the same aircraft."""
    notes: Counter[int] = field(default_factory=Counter)
    """Number of records of each small transaction."""
    arrived_s: dict[int, float] = field(default_factory=dict)
    """When the last record of each small transaction arrived, on the monotonic clock of the machine."""
    found_s: dict[int, float] = field(default_factory=dict)
    """When something arrived for the first time from the youngest of the topics that hold a small transaction."""
    arrivals_s: list[float] = field(default_factory=list)
    """When anything arrived, so that silences can be found."""
    topics: dict[str, float] = field(default_factory=dict)
    """When something arrived for the first time from each topic."""

    def counts(self) -> Counts:
        """How far that is."""
        return Counts(len(self.rows), self.notes.total())


class PlainReader:
    """Reads and notes."""

    def __init__(self, bootstrap_servers: str, pattern: str, group: str) -> None:
        self.seen = Seen()
        self._last_row: dict[bytes, int] = {}
        self._offsets: defaultdict[tuple[str, int], int] = defaultdict(lambda: -1)
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap_servers,
                "group.id": group,
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                # What it reads already goes on when a new topic is found.
                "partition.assignment.strategy": "cooperative-sticky",
                # How soon a new topic that matches the pattern is found; the default is five minutes.
                "topic.metadata.refresh.interval.ms": 100,
            },
            logger=logger,
        )
        self._consumer.subscribe([f"^{pattern}$"])

    def step(self) -> None:
        """Read what is there, or wait a moment."""
        first = self._consumer.poll(0.05)
        if first is None:
            return
        # consume() waits until it has as many as it was asked for; with a time-out of 0 it takes what is there.
        messages = [first, *self._consumer.consume(_BATCH, 0)]
        now_s = time.monotonic()
        self.seen.arrivals_s.append(now_s)
        for message in messages:
            self._note(message, now_s)

    def close(self) -> None:
        """Leave the consumer group."""
        self._consumer.close()

    def _note(self, message: Message, now_s: float) -> None:
        if (fault := message.error()) is not None:
            if fault.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                return  # no topic matches the pattern yet
            raise KafkaException(fault)
        topic, partition, offset, value = message.topic(), message.partition(), message.offset(), message.value()
        if topic is None or partition is None or offset is None or value is None:
            raise ValueError(f"a record without a place or without a value: {topic} {partition} {offset}")
        seen = self.seen
        if offset <= self._offsets[topic, partition]:
            seen.doubled += 1
            return
        self._offsets[topic, partition] = offset
        found_s = seen.topics.setdefault(topic, now_s)
        if value.startswith(b"{"):
            number = json.loads(value)["note"]
            seen.notes[number] += 1
            seen.arrived_s[number] = now_s
            seen.found_s[number] = max(found_s, seen.found_s.get(number, 0.0))
        else:
            row, carrier = parse_value(value)
            if row in seen.rows:
                seen.doubled += 1
            seen.rows.add(row)
            seen.carriers[carrier.decode()] += 1
            key = message.key()
            if isinstance(key, bytes):
                if row < self._last_row.get(key, -1):
                    seen.out_of_order += 1
                self._last_row[key] = row


def main(connection: Connection, bootstrap_servers: str, pattern: str, group: str) -> None:
    """The reader as a helper process; it answers ``counts`` and ``seen``."""
    reader = PlainReader(bootstrap_servers, pattern, group)
    try:
        serve(connection, {"counts": lambda: reader.seen.counts(), "seen": lambda: reader.seen}, reader.step)
    finally:
        reader.close()
