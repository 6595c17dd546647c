"""HTTP service of a coordinator: an address that is bound at once, and answered on threads while it is entered."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from rollbridge.errors import LocalEnvironmentError

logger = logging.getLogger(__name__)


class BoundHttpServer(ThreadingHTTPServer):
    """Server at an address or name of this machine, IPv4 or IPv6, with a thread for each connection."""

    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        super().__init__((str(address[0]), port), handler)


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
