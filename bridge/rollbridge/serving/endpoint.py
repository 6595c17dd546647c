"""Metrics and health of a daemon over HTTP: ``/metrics`` for Prometheus, ``/healthz`` for whatever restarts it.

This module needs ``rollbridge[metrics]``, the official ``prometheus_client``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import Final

from prometheus_client import Metric, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from rollbridge.errors import UnavailableError
from rollbridge.metrics import SampleCollector
from rollbridge.model.metrics import Family, Sample
from rollbridge.serving.http_service import BoundedHandler, BoundHttpServer, HttpService

logger = logging.getLogger(__name__)

_TEXT: Final = "text/plain; charset=utf-8"


class ProcessSamples(Collector):
    """What a daemon serves: the process by the names that Prometheus' own clients use, and metrics of ours."""

    def __init__(self, samples: Callable[[], Iterable[Sample]], families: Sequence[Family]) -> None:
        """Prepare; ``samples`` is called from the threads that scrape."""
        self._collectors = (ProcessCollector(registry=None), SampleCollector(samples, families))

    def collect(self) -> Iterator[Metric]:
        """Yield the families as they are now."""
        for collector in self._collectors:
            yield from collector.collect()


class Endpoint(HttpService):
    """HTTP server that answers from its own threads while it is entered."""

    def __init__(self, host: str, port: int, metrics: Collector, faults: Callable[[], list[str]]) -> None:
        """Bind the address; entering the endpoint begins to answer.

        Args:
            host: Address of this machine, or its name.
            port: Port to listen on, 0 for a free one.
            metrics: What is served, in the format that a client accepts; collects in threads of the server. Where it
                raises :exc:`~rollbridge.errors.UnavailableError`, the client is told to come again.
            faults: Returns what is wrong, an empty list if healthy; called from threads of the server.

        Raises:
            LocalEnvironmentError: the address cannot be used.
        """
        super().__init__(
            lambda: _Server(host, port, metrics, faults),
            what=f"metrics cannot be served at {host}:{port}",
            title="metrics and health",
            thread="metrics",
        )


class _Server(BoundHttpServer):
    def __init__(self, host: str, port: int, metrics: Collector, faults: Callable[[], list[str]]) -> None:
        self.metrics = metrics
        self.faults = faults
        super().__init__(host, port, _Handler)


class _Handler(BoundedHandler):
    server: _Server

    def do_GET(self) -> None:
        try:
            answer = self._answer(self.path.partition("?")[0])
        except UnavailableError as fault:
            answer = _said(HTTPStatus.SERVICE_UNAVAILABLE, [str(fault)])
        except Exception:
            logger.exception("a defect kept %s from being answered", self.path)
            answer = _said(HTTPStatus.INTERNAL_SERVER_ERROR, ["a defect; the log has more"])
        self.send(*answer)

    do_HEAD = do_GET

    def _answer(self, path: str) -> tuple[HTTPStatus, bytes, str]:
        match path:
            case "/metrics":
                encode, kind = choose_encoder(self.headers.get("Accept", ""))
                return HTTPStatus.OK, encode(self.server.metrics), kind
            case "/healthz":
                faults = self.server.faults()
                return _said(HTTPStatus.SERVICE_UNAVAILABLE if faults else HTTPStatus.OK, faults or ["ok"])
            case _:
                return _said(HTTPStatus.NOT_FOUND, ["there are /metrics and /healthz"])


def _said(status: HTTPStatus, lines: Iterable[str]) -> tuple[HTTPStatus, bytes, str]:
    return status, "".join(f"{line}\n" for line in lines).encode(), _TEXT
