"""HTTP service of a daemon: an address that is bound at once, and answered on threads while it is entered.

Nobody can keep it busy without bound: there are so many connections at a time, each has so much time to send its
request and to take its answer, however slowly the bytes come, and a request has so many bytes. Each connection is for
one request.
"""

from __future__ import annotations

import io
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self

from rollbridge.calls import Deadline
from rollbridge.errors import LocalEnvironmentError

logger = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 24
"""At a time; further ones are told to come again."""
REQUEST_S: Final = 5.0
"""Within which a request has to have come, all of it."""
SEND_S: Final = 10.0
"""Within which an answer has to have gone."""
REQUEST_BYTES_MAX: Final = 32 * 1024
"""Of a request, headers and body."""


class BoundHttpServer(ThreadingHTTPServer):
    """Server at an address or name of this machine, IPv4 or IPv6, with a thread for each connection."""

    daemon_threads = True
    block_on_close = False  # what is under way ends with the process

    def __init__(self, host: str, port: int, handler: type[BoundedHandler]) -> None:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        self._free = threading.BoundedSemaphore(CONNECTIONS_MAX)
        super().__init__((str(address[0]), port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own, if there is one left."""
        if not self._free.acquire(blocking=False):
            try:
                request.settimeout(0)  # what does not fit into the socket's buffer is not worth waiting for
                request.send(b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n")
            except OSError:
                pass
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and make room for another connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what a client has done to its connection; nobody else is concerned."""
        logger.debug("a connection has failed", exc_info=True)


class _TooLongError(OSError):
    """A request has more bytes than are read."""


class _BoundedStream(io.RawIOBase):
    """What a client sends, for so long and up to so many bytes in all."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline = Deadline(REQUEST_S)
        self._left = REQUEST_BYTES_MAX

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._deadline.left()
        if left_s <= 0:
            raise TimeoutError("the request has not come in time")
        if self._left <= 0:
            raise _TooLongError("the request has too many bytes")
        self._connection.settimeout(left_s)
        count = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._left -= count
        return count


class BoundedHandler(BaseHTTPRequestHandler):
    """Handler of a :class:`BoundHttpServer`, which reads a request within its bounds and sends answers in time."""

    server_version = "rollbridge"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        # The name is of the base class, whose stream has neither a bound nor a deadline.
        self.rfile = io.BufferedReader(_BoundedStream(self.connection))

    def handle_one_request(self) -> None:
        self.requestline = self.request_version = self.command = ""
        try:
            super().handle_one_request()
        except _TooLongError:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def send(self, status: HTTPStatus, body: bytes, kind: str, extra: Mapping[str, str] | None = None) -> None:
        """Send an answer of this type, with these headers more; only the headers if that is what was asked for."""
        self.connection.settimeout(SEND_S)
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(extra or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("%s: %s", self.client_address[0], (format % args).encode("unicode_escape").decode())


class HttpService:
    """Service that answers from threads of its own while it is entered."""

    def __init__(self, bind: Callable[[], BoundHttpServer], *, what: str, title: str, thread: str) -> None:
        """Bind the address; entering the service begins to answer.

        Args:
            bind: Makes the server.
            what: What is served, and where, for an error.
            title: The same for the log.
            thread: Name of the thread that accepts connections.

        Raises:
            LocalEnvironmentError: the address cannot be used.
        """
        try:
            self._server = bind()
        except OSError as fault:
            raise LocalEnvironmentError(f"{what}: {fault}") from fault
        self._title = title
        self._thread = threading.Thread(target=self._server.serve_forever, name=thread, daemon=True)

    @property
    def port(self) -> int:
        """Port that is listened on, also if a free one was asked for."""
        return int(self._server.server_address[1])

    def __enter__(self) -> Self:
        self._thread.start()
        logger.info("%s at port %d", self._title, self.port)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
