"""HTTP service of a daemon: an address that is bound at once, and answered on threads while it is entered.

No client can keep it busy. A new connection is always accepted: if all places are taken, the address with the most
places loses the one that has waited longest for its peer's bytes. So a client that sends a whole request at once and
takes its answer is served, whatever others hold open. Each connection is for one request, with a limit of time and
bytes.

A Unix socket is a separate place for probes, out of reach of strangers.
"""

from __future__ import annotations

import gzip
import io
import logging
import socket
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from errno import ECONNREFUSED, EMSGSIZE
from functools import partial
from http import HTTPStatus
from http.client import HTTPMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv6Address, IPv6Network, ip_address
from pathlib import Path
from typing import Any, Final, Self

from prometheus_client.registry import Collector

from rollbridge.base.deadlines import Deadline
from rollbridge.base.logs import log_defect
from rollbridge.base.text import is_own_host
from rollbridge.errors import LocalEnvironmentError, UnavailableError
from rollbridge.metrics import MetricsPage

logger = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 24
"""At a time."""
PER_ADDRESS_MAX: Final = 12
"""At a time, of one address."""
REQUEST_S: Final = 5.0
"""Within which a request has to have come, all of it."""
SEND_S: Final = 10.0
"""Within which an answer has to have gone."""
REQUEST_BYTES_MAX: Final = 32 * 1024
"""Of a request, headers and body."""
COMPRESSED_FROM: Final = 1024
"""Bytes of an answer from which on it is compressed."""
COMPRESSION: Final = 4
"""Level of gzip: JSON and metrics shrink to a tenth within a few milliseconds."""


class ConnectionSlot:
    """Place of one connection; ``is_waiting`` while its thread waits for bytes to come, or to go."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection = connection
        self.address = address
        self.is_waiting = True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark the place as one that another connection may take, inside the block."""
        self.is_waiting = True
        try:
            yield
        finally:
            self.is_waiting = False


class ConnectionSlots:
    """Places of the connections of one server; safe to use from several threads."""

    def __init__(self, most: int = CONNECTIONS_MAX, of_address: int = PER_ADDRESS_MAX) -> None:
        self._most = most
        self._of_address = of_address
        self._lock = threading.Lock()
        self._taken: dict[int, ConnectionSlot] = {}  # the oldest first

    def take(self, connection: socket.socket, host: str) -> ConnectionSlot | None:
        """Return a place for a connection of this host; None if all threads are at work on answers."""
        place = ConnectionSlot(connection, network_of(host))
        with self._lock:
            counts = Counter(item.address for item in self._taken.values())
            leaves = None
            if counts[place.address] >= self._of_address:
                leaves = self._oldest_waiting({place.address})
            elif len(self._taken) >= self._most:
                waiting = {item.address for item in self._taken.values() if item.is_waiting}
                most = max((counts[address] for address in waiting), default=0)
                leaves = self._oldest_waiting({address for address in waiting if counts[address] == most})
            else:
                self._taken[id(place)] = place
                return place
            if leaves is None:
                return None
            del self._taken[id(leaves)]
            self._taken[id(place)] = place
        with suppress(OSError):
            leaves.connection.shutdown(socket.SHUT_RDWR)  # which ends what its thread waits for
        return place

    def give(self, place: ConnectionSlot) -> None:
        """Give a place back, unless another connection has taken it."""
        with self._lock:
            self._taken.pop(id(place), None)

    def _oldest_waiting(self, addresses: set[str]) -> ConnectionSlot | None:
        return next((item for item in self._taken.values() if item.is_waiting and item.address in addresses), None)


def network_of(host: str) -> str:
    """Return what counts as one address: of IPv6 the network, in which a host has any number of addresses."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, IPv6Address):
        return str(address.ipv4_mapped or IPv6Network((int(address) >> 64 << 64, 64)))
    return str(address)


class BoundHttpServer(ThreadingHTTPServer):
    """Server at an address or name of this machine, IPv4 or IPv6, with a thread for each connection."""

    daemon_threads = True
    block_on_close = False  # what is under way ends with the process
    request_queue_size = 128

    def __init__(self, host: str, port: int, handler: Callable[..., BoundedHandler]) -> None:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        self._places = ConnectionSlots()
        self._place_of: dict[socket.socket, ConnectionSlot] = {}
        super().__init__((str(address[0]), port), handler)

    def place_of(self, request: socket.socket) -> ConnectionSlot:
        """Return the place of a connection that is being answered."""
        return self._place_of[request]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own."""
        place = self._places.take(request, str(client_address[0]))
        if place is None:
            with suppress(OSError):
                request.settimeout(0)  # what does not fit into the socket's buffer is not worth waiting for
                request.send(b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n")
            self.shutdown_request(request)
            return
        self._place_of[request] = place
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and make room for another connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def _leave(self, request: socket.socket) -> None:
        self._places.give(self._place_of.pop(request))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what a client has done to its connection; no other connection is concerned."""
        logger.debug("http.connection_failed", exc_info=True)


def takes_gzip(accepted: str) -> bool:
    """Return True if a header ``Accept-Encoding`` names gzip and does not refuse it."""
    for item in accepted.split(","):
        coding, _, quality = item.replace(" ", "").lower().partition(";q=")
        if coding == "gzip":
            return quality.strip("0.") != "" or not quality
    return False


class _BoundedStream(io.RawIOBase):
    """Bytes that a client sends, within limits of time and size."""

    def __init__(self, connection: socket.socket, place: ConnectionSlot) -> None:
        self._connection = connection
        self._place = place
        self._deadline = Deadline(REQUEST_S)
        self._left = REQUEST_BYTES_MAX

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._deadline.left()
        if left_s <= 0:
            raise TimeoutError("the request has not come in time")
        if self._left <= 0:
            raise OSError(EMSGSIZE, "the request has too many bytes")
        self._connection.settimeout(left_s)
        with self._place.waiting():
            count = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._left -= count
        return count


class BoundedHandler(BaseHTTPRequestHandler):
    """Handler of a :class:`BoundHttpServer`, which reads a request within its bounds and sends answers in time."""

    server: BoundHttpServer
    server_version = "rollbridge"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.place = self.server.place_of(self.request)
        # The name is of the base class, whose stream has neither a bound nor a deadline.
        self.rfile = io.BufferedReader(_BoundedStream(self.connection, self.place))

    def handle_one_request(self) -> None:
        self.requestline = self.request_version = self.command = ""
        self.headers = HTTPMessage()  # a request that is none is answered, too
        try:
            super().handle_one_request()
        except OSError as fault:
            if fault.errno != EMSGSIZE:
                raise
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def send(self, status: HTTPStatus, body: bytes, kind: str, extra: Mapping[str, str] | None = None) -> None:
        """Send an answer of this type, with these headers more; only the headers if that is what was asked for.

        It is compressed if it is worth that, and the client takes it.
        """
        more = {"Content-Type": kind, "Vary": "Accept-Encoding", **(extra or {})}
        if len(body) >= COMPRESSED_FROM and takes_gzip(self.headers.get("Accept-Encoding", "")):
            body = gzip.compress(body, COMPRESSION, mtime=0)
            more["Content-Encoding"] = "gzip"
        self.connection.settimeout(SEND_S)
        self.send_response(status)
        for name, value in {**more, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        with self.place.waiting():
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        line = (format % args).encode("unicode_escape").decode()
        logger.debug("http.request client=%s: %s", self.client_address[0], line)


class ProbeHttpServer(BoundHttpServer):
    """The same server at a Unix socket, which only its own user can open."""

    def __init__(self, path: str, handler: Callable[..., BoundedHandler]) -> None:
        self._path = Path(path)
        self._is_bound = False
        self._places = ConnectionSlots(of_address=CONNECTIONS_MAX)
        self._place_of = {}
        self.address_family = socket.AF_UNIX
        ThreadingHTTPServer.__init__(self, path, handler)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        """Bind, in place of a socket that a process has left which was killed."""
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(self._path.stat().st_mode) and not _is_answered(self._path):
                self._path.unlink()
        self.socket.bind(str(self._path))
        self._is_bound = True
        self._path.chmod(0o600)
        self.server_name, self.server_port = str(self._path), 0

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        """Return a connection; its peer has no address."""
        return self.socket.accept()[0], ("probe", 0)

    def server_close(self) -> None:
        """Close it, and remove the socket."""
        super().server_close()
        if self._is_bound:
            self._path.unlink(missing_ok=True)


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a stalled one accepts no connection, and lives
        return probe.connect_ex(str(path)) != ECONNREFUSED


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
        return self._server.server_port

    def __enter__(self) -> Self:
        self._thread.start()
        logger.info("http.listening at=%s: %s", self.port or self._server.server_name, self._title)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


# Metrics and health of a daemon over HTTP: ``/metrics`` for Prometheus, ``/healthz`` and ``/livez`` for probes.
#
# A daemon is healthy if it could serve now, and alive as long as it answers: one that waits for Kafka must not be
# killed for it. Probes have a Unix socket of their own: on a port, a busy client could have every daemon restarted.
#
# This module needs ``rollbridge[metrics]``, the official ``prometheus_client``.


_TEXT: Final = "text/plain; charset=utf-8"
_MACHINE: Final = socket.gethostname().lower().partition(".")[0]
_PRIVATE: Final = ("internal", "local", "svc")
"""Last labels of names that cannot be registered."""


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
        handler = partial(_Handler, host.lower(), MetricsPage(metrics), faults, alive)
        super().__init__(
            lambda: BoundHttpServer(host, port, handler),
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
            lambda: ProbeHttpServer(path, partial(_Handler, "", None, faults, alive)),
            what=f"probes cannot be answered at {path}",
            title="probes",
            thread="probe",
        )


class _Handler(BoundedHandler):
    def __init__(
        self,
        host: str,
        metrics: MetricsPage | None,
        faults: Callable[[], list[str]],
        alive: Callable[[], list[str]],
        *connection: Any,
    ) -> None:
        self._host, self._metrics, self._faults, self._alive = host, metrics, faults, alive
        super().__init__(*connection)

    def do_GET(self) -> None:
        try:
            answer = self._answer(self.path.partition("?")[0])
        except UnavailableError as fault:
            answer = _said(HTTPStatus.SERVICE_UNAVAILABLE, [str(fault)])
        except Exception:
            log_defect(logger, "http.defect path=%s", self.path)
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
        known = {"localhost", self._host, name if is_private or labels[0] == _MACHINE else ""}
        return is_own_host(host, known - {""})

    def _answer(self, path: str) -> tuple[HTTPStatus, bytes, str]:
        match path:
            case "/metrics" if not self._is_asked_by_name():
                return _said(HTTPStatus.FORBIDDEN, ["ask for /metrics by address, or by the name of this machine"])
            case "/metrics" if self._metrics is not None:
                return HTTPStatus.OK, *self._metrics.read(self.headers.get("Accept", ""))
            case "/healthz":
                return _told(self._faults())
            case "/livez":
                return _told(self._alive())
            case _:
                return _said(HTTPStatus.NOT_FOUND, ["there are /metrics, /healthz and /livez"])


def _told(faults: list[str]) -> tuple[HTTPStatus, bytes, str]:
    return _said(HTTPStatus.SERVICE_UNAVAILABLE if faults else HTTPStatus.OK, faults or ["ok"])


def _said(status: HTTPStatus, lines: Iterable[str]) -> tuple[HTTPStatus, bytes, str]:
    return status, "".join(f"{line}\n" for line in lines).encode(), _TEXT
