"""The pulse: whether Kafka answers this coordinator.

A leader that is cut off from Kafka, but not from ZooKeeper, keeps the leader node and can do nothing. An idle one would
not even notice, since a consumer waits patiently. So it asks now and then, and gives way when there is no answer.
"""

from __future__ import annotations

import time
from typing import Final, Self

from kio.schema.metadata.v12 import MetadataRequest, MetadataResponse

from bridge.errors import RollbridgeError
from bridge.kafka.metadata import Cluster
from coordinator.config import CoordinatorSettings

TIMEOUT_MIN_S: Final = 3.0
"""Brokers may be slow for a moment, and giving way costs a takeover."""


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
