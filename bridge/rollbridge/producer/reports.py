"""Delivery reports: what callbacks are still to hear, and the calls that are due."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from confluent_kafka import KafkaError

from rollbridge.errors import RollbridgeError
from rollbridge.model.sn import SN
from rollbridge.producer.faults import as_kafka_error
from rollbridge.producer.message import ProducedMessage

OnDelivery = Callable[[KafkaError | None, ProducedMessage], object]
Locate = Callable[[], SN]
"""Gives the SN of a record whose fate is known, or raises its error."""


class Reports:
    """Collects what callbacks are to be told, on whichever thread learns it, and tells it where the user polls."""

    def __init__(self, *, only_errors: bool) -> None:
        self._only_errors = only_errors
        self._due: deque[tuple[OnDelivery, ProducedMessage]] = deque()
        self._changed = threading.Condition()
        self.pending = 0
        """Records whose fate is not known and will be told."""

    def __len__(self) -> int:
        return len(self._due)

    def expect(self) -> None:
        """A record with a callback was taken."""
        with self._changed:
            self.pending += 1

    def tell(self, report: OnDelivery, message: ProducedMessage, locate: Locate) -> None:
        """The fate of an expected record is known; ``message`` is completed with it."""
        try:
            message.placed(locate())
        except RollbridgeError as fault:
            message.failed(as_kafka_error(fault))
        with self._changed:
            self.pending -= 1
            if message.error() is not None or not self._only_errors:
                self._due.append((report, message))
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Return once a call is due, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._due, timeout_s)

    def serve(self) -> int:
        """Make the calls that are due; how many there were."""
        served = 0
        while self._due:
            try:
                report, message = self._due.popleft()
            except IndexError:  # another thread was faster
                break
            served += 1
            report(message.error(), message)
        return served
