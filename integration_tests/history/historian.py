"""The historian: a native consumer that reads the commit log while a history runs, and is waited for.

The log has a short retention then, so most of it is gone when the history is checked. What the historian has read is
the whole of it: its consumer group is named in the retention of the group, and a gap in what it was promised is a
finding.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from rollbridge.commitlog.control import ControlRecord, decode_control

NAME: Final = "historian"
_COMMIT_S: Final = 1.0
_CALL_S: Final = 10.0


class Historian(threading.Thread):
    """Reads the log from its beginning until it is told to stop."""

    def __init__(self, bootstrap_servers: str, topic: str) -> None:
        super().__init__(name=NAME, daemon=True)
        self._servers = bootstrap_servers
        self._topic = topic
        self._stopping = threading.Event()
        self._log: dict[int, ControlRecord] = {}
        self.next = 0
        self.gaps: list[str] = []

    def run(self) -> None:
        """Read, and commit now and then, whatever happens to the brokers."""
        while not self._stopping.is_set():
            consumer = Consumer(
                {
                    "bootstrap.servers": self._servers,
                    "group.id": NAME,
                    "isolation.level": "read_committed",
                    "enable.auto.commit": False,
                    "auto.offset.reset": "error",
                }
            )
            try:
                consumer.assign([TopicPartition(self._topic, 0, self.next)])
                self._read(consumer)
            except KafkaException:
                self._stopping.wait(_COMMIT_S)
            finally:
                consumer.close()

    def _read(self, consumer: Consumer) -> None:
        committed_s = time.monotonic()
        while not self._stopping.is_set():
            message = consumer.poll(0.5)
            if message is not None:
                self._take(message)
            if time.monotonic() - committed_s > _COMMIT_S:
                [place] = consumer.position([TopicPartition(self._topic, 0)])
                self.next = max(self.next, place.offset)
                consumer.commit(offsets=[TopicPartition(self._topic, 0, self.next)], asynchronous=False)
                committed_s = time.monotonic()

    def _take(self, message: Message) -> None:
        fault = message.error()
        if fault is not None:
            if fault.name() in ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE"):
                self.gaps.append(f"the commit log was truncated before {NAME} had read it from {self.next} on: {fault}")
                self._stopping.set()
            raise KafkaException(fault)
        offset = message.offset() or 0
        self._log[offset] = decode_control(message.key(), message.value())
        self.next = offset + 1

    def end(self) -> list[tuple[int, ControlRecord]]:
        """Stop, and return all that was read."""
        self._stopping.set()
        self.join(_CALL_S)
        return sorted(self._log.items(), key=lambda item: item[0])
