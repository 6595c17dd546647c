"""A plain Kafka consumer that knows nothing of rollbridge: a pattern, ``read_committed``, and a loop.

It notes when each small transaction has arrived in full, counts the flights, and checks that none is doubled and that
those of one aircraft come in the order in which they were written.
"""

from __future__ import annotations

import copy
import json
import logging
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from confluent_kafka import Consumer, KafkaError, KafkaException, Message

from spark_examples.demo.flights import parse_value

logger = logging.getLogger(__name__)

_BATCH = 5_000


@dataclass(slots=True)
class Seen:
    """Everything that the reader has noted; times on the monotonic clock of the machine."""

    rows: set[int] = field(default_factory=set)
    carriers: Counter[str] = field(default_factory=Counter)
    doubled: int = 0
    """Records that came a second time."""
    out_of_order: int = 0
    """Flights that came before an earlier one of the same aircraft."""
    notes: Counter[int] = field(default_factory=Counter)
    """Number of records of each small transaction."""
    arrived_s: dict[int, float] = field(default_factory=dict)
    """When the last record of each small transaction arrived."""
    found_s: dict[int, float] = field(default_factory=dict)
    """When something arrived for the first time from the youngest of the topics that hold a small transaction."""
    arrivals_s: list[float] = field(default_factory=list)
    """When anything arrived, so that silences can be found."""
    topics: dict[str, float] = field(default_factory=dict)
    """When something arrived for the first time from each topic."""


class PlainReader:
    """Reads and notes in a thread of its own."""

    def __init__(self, bootstrap_servers: str, pattern: str, group: str) -> None:
        self._seen = Seen()
        self._noting = threading.Lock()
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
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="plain reader", daemon=True)
        self._thread.start()

    def counts(self) -> tuple[int, int]:
        """Return the numbers of flights and of small records."""
        with self._noting:
            return len(self._seen.rows), self._seen.notes.total()

    def seen(self) -> Seen:
        """Return everything that was noted."""
        with self._noting:
            return copy.deepcopy(self._seen)

    def close(self) -> None:
        """Leave the consumer group."""
        self._ended.set()
        self._thread.join()
        self._consumer.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            if (first := self._consumer.poll(0.05)) is not None:
                # consume() waits until it has as many as it was asked for; with a time-out of 0 it takes what is there.
                messages = [first, *self._consumer.consume(_BATCH, 0)]
                now_s = time.monotonic()
                with self._noting:
                    self._seen.arrivals_s.append(now_s)
                    for message in messages:
                        self._note(message, now_s)

    def _note(self, message: Message, now_s: float) -> None:
        if (fault := message.error()) is not None:
            if fault.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                return  # no topic matches the pattern yet
            raise KafkaException(fault)
        topic, partition, offset, value = message.topic(), message.partition(), message.offset(), message.value()
        if topic is None or partition is None or offset is None or value is None:
            raise ValueError(f"a record without a place or without a value: {topic} {partition} {offset}")
        seen = self._seen
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
            return
        row, carrier = parse_value(value)
        seen.doubled += row in seen.rows
        seen.rows.add(row)
        seen.carriers[carrier.decode()] += 1
        if isinstance(key := message.key(), bytes):
            seen.out_of_order += row < self._last_row.get(key, -1)
            self._last_row[key] = row
