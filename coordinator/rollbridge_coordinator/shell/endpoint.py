"""A small HTTP server beside the coordinator: ``/metrics`` for Prometheus, ``/healthz`` for whoever restarts it."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, Self

from kio.schema.metadata.v12 import MetadataRequest, MetadataResponse

from rollbridge.errors import EnvironmentProblem, RollbridgeError
from rollbridge.kafka.metadata import Cluster
from rollbridge_coordinator.config import CoordinatorSettings
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.metrics import clock_lines, count_lines, fault_lines

logger = logging.getLogger(__name__)

METRICS: Final = "/metrics"
HEALTH: Final = "/healthz"
REQUEST_S: Final = 5.0
"""How long a client may take to ask."""
_TEXT: Final = "text/plain; charset=utf-8"
_EXPOSITION: Final = "text/plain; version=0.0.4; charset=utf-8"


class Endpoint:
    """Answers from threads of its own while it is entered."""

    def __init__(self, host: str, port: int, metrics: Callable[[], str], faults: Callable[[], list[str]]) -> None:
        """Bind the address; entering it begins to answer.

        Args:
            host: Address of this machine, or a name of it.
            port: 0 for a free one.
            metrics: The document in Prometheus' text format.
            faults: What is wrong; an empty list is healthy.

        Raises:
            EnvironmentProblem: the address can not be used.
        """
        try:
            self._server = _Server(host, port, metrics, faults)
        except OSError as fault:
            raise EnvironmentProblem(f"metrics can not be served at {host}:{port}: {fault}") from fault
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)

    @property
    def port(self) -> int:
        """The port, also if a free one was asked for."""
        return int(self._server.server_address[1])

    def __enter__(self) -> Self:
        self._thread.start()
        logger.info("metrics and health at port %d", self.port)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, metrics: Callable[[], str], faults: Callable[[], list[str]]) -> None:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        self.metrics = metrics
        self.faults = faults
        super().__init__((str(address[0]), port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_S
    server_version = "rollbridge"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == METRICS:
            self._answer(HTTPStatus.OK, _EXPOSITION, self.server.metrics())
        elif path == HEALTH:
            faults = self.server.faults()
            status = HTTPStatus.SERVICE_UNAVAILABLE if faults else HTTPStatus.OK
            self._answer(status, _TEXT, "".join(f"{line}\n" for line in faults or ["ok"]))
        else:
            self._answer(HTTPStatus.NOT_FOUND, _TEXT, f"there are {METRICS} and {HEALTH}\n")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


# --------------------------------------------------------------------------------------------------------------------
# Metrics as a file, for Prometheus' node exporter (its textfile collector), and on a board for whoever asks.


INTERVAL_S: Final = 1.0


class MetricsBoard:
    """What the leaders and standbys of one coordinator have written last; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sheets: dict[str, list[str]] = {}

    def put(self, name: str, lines: list[str]) -> None:
        """Replace what stands under this name."""
        with self._lock:
            self._sheets[name] = lines

    def drop(self, name: str) -> None:
        """Remove it, if there is any."""
        with self._lock:
            self._sheets.pop(name, None)

    def sheets(self) -> list[list[str]]:
        """All that there is, by name."""
        with self._lock:
            return [self._sheets[name] for name in sorted(self._sheets)]


class MetricsFile:
    """Written anew every second while a group is led or followed, and gone after.

    Without a directory there is no file, and without a board nothing is put there.
    """

    def __init__(self, directory: str, group: str, suffix: str = "", board: MetricsBoard | None = None) -> None:
        self._name = f"rollbridge-{group.replace('/', '.')}{suffix}.prom"
        self._path = Path(directory) / self._name if directory else None
        self._board = board
        self._next_s = 0.0

    def write(self, lines: Callable[[], Iterable[str]]) -> None:
        """Replace the file by the present metrics, if it is time. What can not be written is logged, once."""
        if (self._path is None and self._board is None) or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + INTERVAL_S
        present = list(lines())
        if self._board is not None:
            self._board.put(self._name, present)
        if self._path is None:
            return
        draft = self._path.with_suffix(".tmp")
        try:
            draft.write_text("\n".join(present) + "\n", encoding="utf-8")
            draft.replace(self._path)
        except OSError as fault:
            logger.warning("metrics are not written any more: %s", fault)
            self._path = None

    def remove(self) -> None:
        """The group is not led, or followed, here any more."""
        if self._board is not None:
            self._board.drop(self._name)
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def leader_lines(group: GroupState) -> Iterator[str]:
    """The metrics of a leader."""
    segments = sum(len(item.aborted.indexes) for item in group.snapshots.partitions.values())
    yield from count_lines(str(group.name), group.counts)
    yield from fault_lines(str(group.name), ((name, fault.code) for name, fault in group.faults.items()))
    yield from clock_lines(str(group.name), group.times.spread_ms, differ=group.times.differ)
    yield from group.snapshots.metrics.lines(str(group.name), segments)


# --------------------------------------------------------------------------------------------------------------------
# The pulse: whether Kafka answers this coordinator.
# A leader that is cut off from Kafka, but not from ZooKeeper, keeps the leader node and can do nothing. An idle one
# would not even notice, since a consumer waits patiently. So it asks now and then, and gives way when there is no
# answer.


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
