"""Plain topics, which no stream has adopted: confluent-kafka's own producer writes to them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from confluent_kafka import Producer

from rollbridge.calls import Deadline
from rollbridge.forks import hold
from rollbridge.kafka.clients import Config
from rollbridge.kafka.ratelimit import limited_child

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.05
"""Seconds after which one of two queues of reports gives way to the other."""


class NativeProducer:
    """One idempotent producer of confluent-kafka's, made when it is first needed. Thread-safe."""

    def __init__(self, config: Config, log: logging.Logger | None = None) -> None:
        self._config = config
        self._log = limited_child(logger) if log is None else log
        self._lock = threading.Lock()
        self._producer: Producer | None = None
        hold(self, "_lock", "_producer")

    @property
    def client(self) -> Producer:
        """The producer."""
        producer = self._producer
        if producer is None:
            with self._lock:
                if self._producer is None:
                    self._producer = Producer(self._config, logger=self._log)
                producer = self._producer
        return producer

    def __len__(self) -> int:
        return 0 if self._producer is None else len(self._producer)

    def wait(self, deadline: Deadline, others: Callable[[float], None]) -> int:
        """Wait until reports are due, here or with ``others``, or the time has passed; return how many were called.

        Args:
            deadline: The time.
            others: Waits for other reports, for so many seconds.
        """
        producer = self._producer
        if producer is None:
            others(deadline.left())
            return 0
        if len(producer):
            return producer.poll(min(_LOOK_S, deadline.left()))
        others(min(_LOOK_S, deadline.left()))
        return producer.poll(0)

    def flush(self, timeout_s: float) -> int:
        """Wait until the brokers have everything; return the number of records that they do not have yet."""
        return 0 if self._producer is None else self._producer.flush(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Write what is left, and disconnect."""
        left = self.flush(timeout_s)
        if left:
            logger.warning("%d records of plain topics were not acknowledged before their producer was closed", left)
        self._producer = None
