"""Metrics and health of a coordinator: the state behind its HTTP endpoint, and the probe of Kafka.

Leaders and standbys put their metrics on a :class:`MetricsBoard`, the only object here that several threads share under
a lock. The board is served by :class:`rollbridge.observe.http_service.Endpoint`.

:class:`KafkaProbe` probes Kafka. A leader that is cut off from Kafka, but not from ZooKeeper, keeps the leader node
without being able to lead. An idle leader would not even notice, since its consumer waits. So the leader probes at
intervals, and gives up the lead without an answer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Self

from kio.schema.metadata.v12 import MetadataRequest, MetadataResponse

from rollbridge.base.deadlines import Deadline
from rollbridge.base.logs import log_defect
from rollbridge.base.metrics import REQUEST_BOUNDS_S, Histogram, Sample
from rollbridge.errors import RollbridgeError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.metadata import Broker, Cluster
from rollbridge_coordinator.config import CoordinatorSettings
from rollbridge_coordinator.core.metric_samples import READINGS_AGE

logger = logging.getLogger(__name__)

# Metrics on a board


INTERVAL_S: Final = 1.0


class MetricsBoard:
    """Latest metrics of each leader and standby of one coordinator; safe to use from several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._sheets: dict[str, _Sheet] = {}

    def put(self, name: str, samples: Sequence[Sample], led: str = "") -> None:
        """Replace the samples under this name, which must not change afterwards.

        Args:
            led: Group whose leader reports, which adds the age of the sheet; empty for a standby.
        """
        with self._lock:
            self._sheets[name] = _Sheet(samples, led, self._clock())

    def drop(self, name: str) -> None:
        with self._lock:
            self._sheets.pop(name, None)

    def samples(self) -> list[Sample]:
        """Return all samples, in the order of their names, and their age."""
        with self._lock:
            sheets = [self._sheets[name] for name in sorted(self._sheets)]
        now_s = self._clock()
        found = [sample for sheet in sheets for sample in sheet.samples]
        ages = [Sample(READINGS_AGE, (sheet.led,), max(now_s - sheet.at_s, 0.0)) for sheet in sheets if sheet.led]
        return [*found, *ages]


class _Sheet(NamedTuple):
    samples: Sequence[Sample]
    led: str
    at_s: float


class RequestTimes:
    """Durations of requests by operation, of a closed set; safe to use from several threads."""

    def __init__(self, operations: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._durations = {operation: Histogram(REQUEST_BOUNDS_S) for operation in operations}

    def note(self, operation: str, seconds: float) -> None:
        """Count a request that was answered.

        Raises:
            KeyError: there is no such operation.
        """
        with self._lock:
            self._durations[operation].note(seconds)

    def durations(self) -> dict[str, Histogram]:
        with self._lock:
            return {operation: known.copy() for operation, known in self._durations.items()}


class MetricsSheet:
    """Metrics of one group on the board, replaced every second while it is led or followed, and removed after."""

    def __init__(self, board: MetricsBoard | None, group: str, *, is_standby: bool = False) -> None:
        """Prepare; without a board, nothing is published."""
        self._name = f"{group} standby" if is_standby else group
        self._led = "" if is_standby else group
        self._board = board
        self._next_s = 0.0

    @property
    def is_wanted(self) -> bool:
        """True if the metrics are served."""
        return self._board is not None

    def put(self, samples: Callable[[], Iterable[Sample]]) -> None:
        """Replace the metrics if the interval has passed."""
        if self._board is None or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + INTERVAL_S
        self._board.put(self._name, list(samples()), self._led)

    def remove(self) -> None:
        if self._board is not None:
            self._board.drop(self._name)


# Probe of Kafka


TIMEOUT_MIN_S: Final = 3.0
"""Shortest time-out of a probe: brokers may be slow for a moment, and giving way costs a takeover."""
WATCH_S: Final = 5.0
"""Interval between probes of all brokers, which only feed the coordinator's health."""
_NOTHING: Final = MetadataRequest(topics=(), allow_auto_topic_creation=False, include_topic_authorized_operations=False)


class KafkaProbe:
    """Probe that sends the brokers an empty metadata request; not thread-safe."""

    def __init__(self, settings: CoordinatorSettings, kafka: KafkaClient) -> None:
        self._timeout_s = max(settings.session_timeout_s, TIMEOUT_MIN_S)
        self._asked = time.monotonic()
        self._kafka = kafka

    def beat(self) -> None:
        """Probe if the interval has passed.

        Raises:
            KafkaUnavailableError: no broker answers.
        """
        if time.monotonic() - self._asked >= self._timeout_s / 3:
            self.ask()

    def ask(self) -> None:
        """Probe now.

        Raises:
            KafkaUnavailableError: no broker answers.
        """
        with self._kafka.borrow(connect_timeout_s=self._timeout_s, request_timeout_s=self._timeout_s) as cluster:
            cluster.metadata(())
        self._asked = time.monotonic()

    def is_there(self) -> bool:
        """Return True if a broker answers now."""
        try:
            self.ask()
        except RollbridgeError:
            return False
        return True


class ReachWatch(threading.Thread):
    """Thread that probes each broker at intervals, to find those that this coordinator does not reach.

    A leader probes Kafka itself, and needs only one broker that answers. The result is shown in the coordinator's
    record and by its health; no decision depends on it.
    """

    def __init__(self, kafka: KafkaClient, is_leading: Callable[[], bool], changed: Callable[[], None]) -> None:
        """Prepare; entering the watch starts the thread, which calls ``changed`` when :attr:`unreachable` has."""
        super().__init__(name="brokers", daemon=True)
        self._kafka = kafka
        self._is_leading = is_leading
        self._changed = changed
        self._ended = threading.Event()
        self._failed: dict[int, str] = {}
        self.is_answered = False
        """True if Kafka answered the last time, or while this coordinator leads and would notice a failure itself."""
        self.unreachable: tuple[str, ...] = ()
        """Brokers that the cluster lists as alive and that did not answer twice in a row."""

    def run(self) -> None:
        """Probe until the watch is left."""
        while not self._ended.wait(WATCH_S if self.is_answered else WATCH_S / 5):
            try:
                with self._kafka.borrow(connect_timeout_s=TIMEOUT_MIN_S, request_timeout_s=TIMEOUT_MIN_S) as cluster:
                    self.look(cluster)
                self._kafka.trim()
            except Exception:  # health would stay as it is, whatever becomes of the brokers
                log_defect(logger, "brokers.check-failed")

    def look(self, cluster: Cluster) -> None:
        """Probe each broker now."""
        try:
            brokers = {int(item.node_id): Broker(item.host, item.port) for item in cluster.metadata(()).brokers}
        except RollbridgeError:
            self.is_answered = self._is_leading()
            return
        self.is_answered = True
        failed = {node: fault for node, place in brokers.items() if (fault := _fault_of(cluster, node, place))}
        lasting = sorted(failed.keys() & self._failed.keys())
        # Keep the first text: each change would be written to ZooKeeper.
        self._failed = {node: self._failed.get(node, fault) for node, fault in failed.items()}
        unreachable = tuple(
            f"broker {node} at {':'.join(map(str, brokers[node]))}: {self._failed[node]}" for node in lasting
        )
        if unreachable != self.unreachable:
            self.unreachable = unreachable
            logger.warning('brokers.unreachable brokers="%s"', "; ".join(unreachable) or "none")
            self._changed()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()


def _fault_of(cluster: Cluster, node: int, place: Broker) -> str:
    try:
        with cluster.within(Deadline(TIMEOUT_MIN_S)):
            cluster.broker_connection(node, place).call(_NOTHING, MetadataResponse)
    except RollbridgeError as fault:
        return str(fault)
    return ""
