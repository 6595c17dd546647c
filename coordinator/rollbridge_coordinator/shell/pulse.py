"""The pulse: whether Kafka answers this coordinator.

A leader that is cut off from Kafka, but not from ZooKeeper, keeps the leader node and can do nothing. An idle one would
not even notice, since a consumer waits patiently. So it asks now and then, and gives way when there is no answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Self

from kio.schema.metadata.v12 import MetadataRequest, MetadataResponse

from rollbridge.errors import RollbridgeError
from rollbridge.kafka.metadata import Cluster
from rollbridge_coordinator.config import CoordinatorSettings

TIMEOUT_MIN_S: Final = 3.0
"""Brokers may be slow for a moment, and giving way costs a takeover."""
WATCH_S: Final = 5.0
"""How often a coordinator that leads nothing asks, for the sake of its health only."""


class Pulse:
    """Asks the brokers for nothing in particular; not thread-safe."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        timeout_s = max(settings.session_timeout_s, TIMEOUT_MIN_S)
        self._every_s = timeout_s / 3
        self._asked = time.monotonic()
        self._cluster = Cluster(
            settings.bootstrap_servers,
            security=settings.security,
            connect_timeout_s=timeout_s,
            request_timeout_s=timeout_s,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.close()

    def beat(self) -> None:
        """Ask, if it is time to.

        Raises:
            KafkaUnavailable: nobody answers.
        """
        if time.monotonic() - self._asked >= self._every_s:
            self.ask()

    def ask(self) -> None:
        """Ask now. Raises as :meth:`beat` does."""
        request = MetadataRequest(topics=(), allow_auto_topic_creation=False, include_topic_authorized_operations=False)
        self._cluster.ask_any(request, MetadataResponse)
        self._asked = time.monotonic()

    def is_there(self) -> bool:
        """Whether anybody answers now."""
        try:
            self.ask()
        except RollbridgeError:
            return False
        return True


class PulseWatch(threading.Thread):
    """Asks again and again while this coordinator leads nothing, so that its health is known; a leader asks anyway.

    It only looks: what a coordinator does does not depend on it.
    """

    def __init__(self, settings: CoordinatorSettings, is_leading: Callable[[], bool]) -> None:
        """Prepare; entering it begins."""
        super().__init__(name="pulse", daemon=True)
        self._pulse = Pulse(settings)
        self._is_leading = is_leading
        self._ended = threading.Event()
        self.is_answered = False
        """Whether Kafka has answered when it was asked last; true while a leader would notice."""

    def run(self) -> None:
        """Ask until it is left."""
        with self._pulse:
            while not self._ended.wait(WATCH_S if self.is_answered else WATCH_S / 5):
                self.is_answered = self._is_leading() or self._pulse.is_there()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
