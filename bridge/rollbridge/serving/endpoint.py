"""Metrics and health of a daemon over HTTP: ``/metrics`` for Prometheus, ``/healthz`` and ``/livez`` for probes.

A daemon is healthy if it could serve now, and alive as long as it answers: one that waits for Kafka must not be killed
for it. Probes have a Unix socket of their own, as whoever kept a port busy could else have every daemon restarted.

This module needs ``rollbridge[metrics]``, the official ``prometheus_client``.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import Final

from prometheus_client import Metric, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from rollbridge.defects import log_defect
from rollbridge.errors import UnavailableError
from rollbridge.metrics import SampleCollector
from rollbridge.model.hosts import is_own_host
from rollbridge.model.metrics import Family, Sample
from rollbridge.serving.http_service import BoundedHandler, BoundHttpServer, HttpService, ProbeHttpServer

logger = logging.getLogger(__name__)

_TEXT: Final = "text/plain; charset=utf-8"
FRESH_S: Final = 1.0
"""For which a page of metrics is answered again: whoever asks often does not keep the daemon busy."""
_MACHINE: Final = socket.gethostname().lower().partition(".")[0]
_PRIVATE: Final = ("internal", "local", "svc")
"""Last labels of names that nobody can register."""
_KINDS_MAX: Final = 10
"""Formats in which metrics are kept, so that whoever asks for many of them takes no memory."""


class MetricsPage:
    """Metrics in the formats that clients ask for, collected once a second at most, by one thread at a time."""

    def __init__(self, metrics: Collector, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare; nothing is collected before it is asked for."""
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._made: dict[str, tuple[float, bytes]] = {}

    def read(self, accept: str) -> tuple[bytes, str]:
        """Return the text and its type, for this header ``Accept``; raises what collecting them raises."""
        encode, kind = choose_encoder(accept)
        with self._lock:
            made_s, body = self._made.get(kind, (float("-inf"), b""))
            if self._clock() - made_s >= FRESH_S:
                body = encode(self._metrics)
                if len(self._made) >= _KINDS_MAX:
                    self._made.clear()
                self._made[kind] = self._clock(), body
        return body, kind


class ProcessSamples(Collector):
    """What a daemon serves: the process by the names that Prometheus' own clients use, and metrics of ours."""

    def __init__(self, samples: Callable[[], Iterable[Sample]], families: Sequence[Family]) -> None:
        """Prepare; ``samples`` is called from the threads that scrape."""
        self._collectors = (ProcessCollector(registry=None), SampleCollector(samples, families))

    def collect(self) -> Iterator[Metric]:
        """Yield the families as they are now."""
        for collector in self._collectors:
            yield from collector.collect()


def _none() -> list[str]:
    return []


class Endpoint(HttpService):
    """HTTP server that answers from its own threads while it is entered."""

    def __init__(
        self,
        host: str,
        port: int,
        metrics: Collector,
        faults: Callable[[], list[str]],
        alive: Callable[[], list[str]] = _none,
    ) -> None:
        """Bind the address; entering the endpoint begins to answer.

        Args:
            host: Address of this machine, or its name.
            port: Port to listen on, 0 for a free one.
            metrics: What is served, in the format that a client accepts; collects in threads of the server. Where it
                raises :exc:`~rollbridge.errors.UnavailableError`, the client is told to come again.
            faults: Returns what is wrong, an empty list if healthy; called from threads of the server.
            alive: Returns what only a restart mends, likewise.

        Raises:
            LocalEnvironmentError: the address cannot be used.
        """
        super().__init__(
            lambda: _Server(host, port, MetricsPage(metrics), faults, alive),
            what=f"metrics cannot be served at {host}:{port}",
            title="metrics and health",
            thread="metrics",
        )


class Probe(HttpService):
    """The same without metrics, at a Unix socket that only probes of this machine reach."""

    def __init__(self, path: str, faults: Callable[[], list[str]], alive: Callable[[], list[str]] = _none) -> None:
        """Bind the socket; entering the probe begins to answer. Arguments are those of :class:`Endpoint`.

        Raises:
            LocalEnvironmentError: the socket cannot be used.
        """
        super().__init__(
            lambda: _ProbeServer(path, faults, alive),
            what=f"probes cannot be answered at {path}",
            title="probes",
            thread="probe",
        )


class _Server(BoundHttpServer):
    def __init__(
        self,
        host: str,
        port: int,
        metrics: MetricsPage,
        faults: Callable[[], list[str]],
        alive: Callable[[], list[str]],
    ) -> None:
        self.host = host.lower()
        self.metrics = metrics
        self.faults = faults
        self.alive = alive
        super().__init__(host, port, _Handler)


class _ProbeServer(ProbeHttpServer):
    def __init__(self, path: str, faults: Callable[[], list[str]], alive: Callable[[], list[str]]) -> None:
        self.host = ""
        self.metrics = None
        self.faults = faults
        self.alive = alive
        super().__init__(path, _Handler)


class _Handler(BoundedHandler):
    server: _Server | _ProbeServer

    def do_GET(self) -> None:
        try:
            answer = self._answer(self.path.partition("?")[0])
        except UnavailableError as fault:
            answer = _said(HTTPStatus.SERVICE_UNAVAILABLE, [str(fault)])
        except Exception:
            log_defect(logger, "cannot answer %s", self.path)
            answer = _said(HTTPStatus.INTERNAL_SERVER_ERROR, ["a defect; the log has more"])
        self.send(*answer)

    do_HEAD = do_GET

    def _is_asked_by_name(self) -> bool:
        """Return whether no browser can have been led here by a site of another name.

        Of the machine's own name only the first part has to be right: it rarely knows its domain, and scrapers use it.
        Names without a dot, and those below what the internet has not, are of private networks, as of containers and
        of Kubernetes' services.
        """
        host = ", ".join(self.headers.get_all("Host", ())).lower()
        if not host:
            return True  # no browser leaves it out
        name = host.partition(":")[0]
        labels = name.split(".")
        is_private = len(labels) == 1 or labels[-1] in _PRIVATE
        known = {"localhost", self.server.host, name if is_private or labels[0] == _MACHINE else ""}
        return is_own_host(host, known - {""})

    def _answer(self, path: str) -> tuple[HTTPStatus, bytes, str]:
        match path:
            case "/metrics" if not self._is_asked_by_name():
                return _said(HTTPStatus.FORBIDDEN, ["ask for /metrics by address, or by the name of this machine"])
            case "/metrics" if self.server.metrics is not None:
                return HTTPStatus.OK, *self.server.metrics.read(self.headers.get("Accept", ""))
            case "/healthz":
                return _told(self.server.faults())
            case "/livez":
                return _told(self.server.alive())
            case _:
                return _said(HTTPStatus.NOT_FOUND, ["there are /metrics, /healthz and /livez"])


def _told(faults: list[str]) -> tuple[HTTPStatus, bytes, str]:
    return _said(HTTPStatus.SERVICE_UNAVAILABLE if faults else HTTPStatus.OK, faults or ["ok"])


def _said(status: HTTPStatus, lines: Iterable[str]) -> tuple[HTTPStatus, bytes, str]:
    return status, "".join(f"{line}\n" for line in lines).encode(), _TEXT
