"""A small HTTP server beside the coordinator: ``/metrics`` for Prometheus, ``/healthz`` for whoever restarts it."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self

from rollbridge.errors import EnvironmentProblem

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
