"""Connection to one broker: requests go out in order, answers come back in order.

Bodies are kio's entities; a caller with a large body passes ready-made buffers instead, which are sent without being
copied. A connection that broke or timed out stays closed: the outcome of in-flight requests is unknown, and only the
caller knows whether that matters. A connection belongs to one thread and holds no lock.
"""

from __future__ import annotations

import io
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final, TypeVar, cast

from kio.schema.api_versions.v3 import ApiVersionsRequest, ApiVersionsResponse
from kio.schema.end_txn.v5 import EndTxnRequest
from kio.schema.errors import ErrorCode
from kio.schema.sasl_authenticate.v2 import SaslAuthenticateRequest, SaslAuthenticateResponse
from kio.schema.sasl_handshake.v1 import SaslHandshakeRequest, SaslHandshakeResponse
from kio.serial import entity_reader, entity_writer
from kio.static.protocol import Payload

from rollbridge.base.deadlines import Deadline
from rollbridge.base.forks import forks, refusal
from rollbridge.base.security import Security
from rollbridge.errors import InvalidRequestError, KafkaUnavailableError
from rollbridge.kafka import errors as codes
from rollbridge.kafka.errors import UNSUPPORTED_BROKER, AuthenticationError, ConnectionLostError

R = TypeVar("R", bound=Payload)
Buffer = bytes | bytearray | memoryview

# No answer to our requests comes near this size; a larger one means that the other side is not a broker.
RESPONSE_BYTES_MAX: Final = 64 << 20
_REST_S: Final = 3.0
"""Longest pause within an answer that has begun to arrive."""
# Brokers close a connection after connections.max.idle.ms, 10 minutes by default. One idle for almost as long is
# replaced, so that no request races with the broker's close.
_IDLE_MAX_S: Final = 540.0
_READ_BUFFER_BYTES: Final = 64 << 10
_LENGTH: Final = struct.Struct(">i")
_REQUEST_HEAD: Final = struct.Struct(">ihhih")
_CORRELATION_ID: Final = struct.Struct(">i")
# The only answers without tagged fields in their header; clients of any age must be able to read ApiVersions.
_PLAIN_ANSWERS: Final = frozenset((ApiVersionsResponse.__api_key__, SaslHandshakeResponse.__api_key__))
_IOV_MAX: Final = 512
_SILENCE_S: Final = 3.0


@cache
def _software_version() -> str:
    try:
        return version("rollbridge")
    except PackageNotFoundError:
        return "0"


TRANSACTION_VERSION: Final = "transaction.version"
"""Kafka's name of the feature that transactions v2 are."""
TRANSACTIONS_V2: Final = 2


def lacks(version: int, address: str, *, is_known: bool) -> tuple[str, str] | None:
    """Return what a cluster lacks for transactions v2, and what to do about it; None if it has them.

    Args:
        version: Its ``transaction.version``; 0 if it has none.
        address: Of its brokers.
        is_known: True if its brokers could have them.
    """
    if version >= TRANSACTIONS_V2:
        return None
    level = f"{TRANSACTION_VERSION}={TRANSACTIONS_V2}"
    upgrade = f"kafka-features.sh --bootstrap-server {address} upgrade --feature {level}"
    if not is_known:
        return (
            "is of a release before 4.0, which has no transactions v2 (KIP-890)",
            f"upgrade all brokers to Kafka 4.0 or later, and then: {upgrade}",
        )
    return f"has {TRANSACTION_VERSION} {version}, and {TRANSACTIONS_V2} is needed (KIP-890)", upgrade


class Connection:
    """Authenticated connection to a broker. Not thread-safe.

    Args:
        connect_timeout_s: Limit on connecting and authenticating together, whatever the broker does.
        request_timeout_s: Longest wait for the answer to a request; a ``deadline`` shortens it.
        on_silence: Called when an answer was awaited in vain for more than a few seconds.

    Attributes:
        request_timeout_s: As given, or as its present user has set it.
        deadline: Deadline of the connection's present user for any answer; None leaves ``request_timeout_s`` alone.

    Raises:
        KafkaUnavailableError: No broker answered at ``host:port`` in time.
        AuthenticationError: TLS or SASL failed.
        InvalidRequestError: The broker is older than Kafka 4.0.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        security: Security | None = None,
        client_id: str = "rollbridge",
        connect_timeout_s: float = 10.0,
        request_timeout_s: float = 30.0,
        on_silence: Callable[[], None] = lambda: None,
    ) -> None:
        security = security or Security()
        self.address: Final = f"{host}:{port}"
        self._client_id = client_id.encode()
        self.request_timeout_s = request_timeout_s
        self._on_silence = on_silence
        self.deadline: Deadline | None = Deadline(connect_timeout_s)
        self._correlation_id = 0
        self._waiting: deque[tuple[int, Deadline]] = deque()
        self._expires_at = float("inf")
        self._last_used = time.monotonic()
        self._closed = False
        self._forks = forks()
        self._socket = self._connect(host, port, security, connect_timeout_s)
        # Buffered, so that a small answer takes one system call.
        self._reader = cast("io.BufferedReader", self._socket.makefile("rb", buffering=_READ_BUFFER_BYTES))
        self.api_versions: dict[int, tuple[int, int]] = {}
        self.transaction_version = 0
        try:
            self._introduce()
            if security.uses_sasl:
                self._authenticate(security)
        except BaseException:
            self.close()
            raise
        self.deadline = None

    def __repr__(self) -> str:
        return f"<Connection to {self.address}{', closed' if self._closed else ''}>"

    @property
    def in_flight(self) -> int:
        """Number of in-flight requests."""
        return len(self._waiting)

    def alive(self) -> bool:
        """Return whether the connection is open on both sides with no request in flight.

        Costs one system call. A broker that goes away right after is noticed only by the next request.
        """
        if self._closed or self._waiting:
            return False
        # With nothing in flight the broker sends nothing, so readable means closed.
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return not poller.poll(0)

    def fileno(self) -> int:
        """Return the socket's file descriptor, to wait for answers on several connections."""
        return self._socket.fileno()

    def has_answer(self) -> bool:
        """Return whether an answer has begun to arrive, or :meth:`receive` would fail without waiting.

        Costs one or two system calls and never waits.
        """
        if self._closed or not self._waiting:
            return False
        try:
            if self._socket.gettimeout() != 0.0:  # setting it takes a system call
                self._socket.settimeout(0.0)
            if self._reader.peek(1):
                return True
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:
            return True
        if isinstance(self._socket, ssl.SSLSocket):
            return True  # end of the connection: without data, peek() raises SSLWantReadError
        # Either nothing has arrived, or the broker has closed the connection.
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(0))

    def expired(self) -> bool:
        """Return whether the SASL session is so old that the broker is about to close the connection."""
        return time.monotonic() >= self._expires_at

    def overdue(self) -> bool:
        """Return whether the answer to the oldest in-flight request is past its deadline."""
        return bool(self._waiting) and self._waiting[0][1].passed()

    def usable(self) -> bool:
        """Return whether to send a new request: alive, and neither idle nor authenticated for too long."""
        now = time.monotonic()
        return now < self._expires_at and now - self._last_used < _IDLE_MAX_S and self.alive()

    def close(self) -> None:
        """Close the socket; the outcome of in-flight requests stays unknown. May be called again."""
        self._closed = True
        self._waiting.clear()
        if hasattr(self, "_reader"):
            self._reader.close()
        self._socket.close()

    def call(self, request: Payload, response_type: type[R]) -> R:
        """Send one request and return its answer; see :meth:`send` and :meth:`receive`."""
        self.send(request)
        return self.receive(response_type)

    def send(self, request: Payload) -> None:
        """Send one request.

        Raises:
            ConnectionLostError: The broker may or may not have received it.
        """
        body = io.BytesIO()
        entity_writer(type(request))(body, request)
        self.send_body(request.__api_key__, request.__version__, (body.getbuffer(),))

    def send_body(self, api_key: int, api_version: int, body: Sequence[Buffer]) -> None:
        """Send one request of a flexible version whose body is the given buffers, without copying them.

        Raises:
            ConnectionLostError: The broker may or may not have received it.
        """
        self._require_open()
        self._correlation_id = (self._correlation_id + 1) & 0x7FFF_FFFF
        head = self._request_head(api_key, api_version, sum(len(part) for part in body))
        self._last_used = time.monotonic()
        self._waiting.append((self._correlation_id, Deadline(self._patience_s())))
        try:
            self._send_all((head, *body))
        except OSError as exc:
            raise self._lost(exc) from exc

    def receive(self, response_type: type[R]) -> R:
        """Return the answer to the oldest unanswered request.

        Raises:
            ConnectionLostError: No answer came in time, or not the answer to that request.
        """
        self._require_open()
        if not self._waiting:
            raise ValueError("no request is under way")
        correlation_id, deadline = self._waiting.popleft()
        try:
            data = self._read_frame(deadline)
        except BaseException:  # an interrupt as well: the answer would be taken for that of the next request
            self.close()
            raise
        (answered,) = _CORRELATION_ID.unpack_from(data)
        if answered != correlation_id:
            raise self._lost(f"answer {answered} came for request {correlation_id}")
        offset = _CORRELATION_ID.size
        if response_type.__api_key__ not in _PLAIN_ANSWERS:
            if data[offset] != 0:
                raise self._lost("answer with tagged header fields, which no version that we speak has")
            offset += 1
        try:
            entity, _ = entity_reader(response_type)(data, offset)
        except Exception as exc:  # after any decoding error the stream cannot be trusted
            raise self._lost(f"answer of {len(data)} bytes does not parse: {exc}") from exc
        self._last_used = time.monotonic()
        return entity

    def require(self, api_key: int, api_version: int, what: str) -> None:
        """Raise InvalidRequestError unless the broker supports this version of this request."""
        low, high = self.api_versions.get(api_key, (0, -1))
        if not low <= api_version <= high:
            raise InvalidRequestError(
                f"broker {self.address} does not support {what} version {api_version} (it has {low} to {high}); "
                "Kafka 4.0 or later is needed",
                code=UNSUPPORTED_BROKER,
            )

    @property
    def knows_transactions_v2(self) -> bool:
        """True if the broker is of a release with transactions v2, whether they are on or not."""
        # Feature levels of which 0 is one are not among those that it says to support (KIP-584).
        return self.api_versions.get(EndTxnRequest.__api_key__, (0, 0))[1] >= EndTxnRequest.__version__

    def require_transactions_v2(self) -> None:
        """Raise InvalidRequestError unless the cluster has transactions v2, and say how it gets them."""
        lacking = lacks(self.transaction_version, self.address, is_known=self.knows_transactions_v2)
        if lacking is not None:
            why = f"Kafka at {self.address} {lacking[0]}; nothing was written; {lacking[1]}"
            raise InvalidRequestError(why, code=UNSUPPORTED_BROKER)

    def _connect(self, host: str, port: int, security: Security, timeout_s: float) -> socket.socket:
        try:
            raw = socket.create_connection((host, port), timeout=timeout_s)
        except OSError as exc:
            raise KafkaUnavailableError(f"cannot connect to Kafka at {self.address}: {exc}") from exc
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if not security.uses_tls:
                return raw
            raw.settimeout(max(0.001, self._patience_s()))
            return security.tls_context().wrap_socket(raw, server_hostname=host)
        except ssl.SSLCertVerificationError as exc:
            raw.close()
            raise AuthenticationError(f"cannot trust the certificate of {self.address}: {exc.verify_message}") from exc
        except ssl.SSLError as exc:
            raw.close()
            raise AuthenticationError(f"TLS handshake with {self.address} failed: {exc}") from exc
        except OSError as exc:
            raw.close()
            raise KafkaUnavailableError(f"cannot connect to Kafka at {self.address}: {exc}") from exc
        except BaseException:
            raw.close()
            raise

    def _introduce(self) -> None:
        try:
            answer = self.call(
                ApiVersionsRequest(client_software_name="rollbridge", client_software_version=_software_version()),
                ApiVersionsResponse,
            )
        except ConnectionLostError as exc:
            raise KafkaUnavailableError(f"{self.address} does not answer as a Kafka broker does: {exc}") from exc
        if answer.error_code != ErrorCode.none:
            raise InvalidRequestError(
                f"broker {self.address} does not understand ApiVersions version 3; Kafka 4.0 or later is needed",
                code=UNSUPPORTED_BROKER,
            )
        self.api_versions = {key.api_key: (key.min_version, key.max_version) for key in answer.api_keys}
        for feature in answer.finalized_features:
            if feature.name == TRANSACTION_VERSION:
                self.transaction_version = feature.max_version_level

    def _authenticate(self, security: Security) -> None:
        mechanism = security.mechanism or ""
        try:
            handshake = self.call(SaslHandshakeRequest(mechanism=mechanism), SaslHandshakeResponse)
            if handshake.error_code != ErrorCode.none:
                raise AuthenticationError(
                    f"broker {self.address} does not offer {mechanism}, but {', '.join(handshake.mechanisms)}"
                )
            security.authenticate(self._sasl_exchange)
        except ConnectionLostError as exc:
            # Not a refusal: a broker that refuses answers; one that stops or restarts hangs up or is silent.
            raise KafkaUnavailableError(f"broker {self.address} did not answer during SASL {mechanism}: {exc}") from exc

    def _sasl_exchange(self, message: bytes) -> bytes:
        answer = self.call(SaslAuthenticateRequest(auth_bytes=message), SaslAuthenticateResponse)
        if answer.error_code != ErrorCode.none:
            reason = answer.error_message or codes.name(answer.error_code)
            raise AuthenticationError(f"broker {self.address} refused our credentials: {reason}")
        lifetime_s = answer.session_lifetime.total_seconds()
        if lifetime_s > 0:
            # connections.max.reauth.ms: the broker closes the connection on a later request, so stop in good time.
            self._expires_at = time.monotonic() + lifetime_s * 0.8
        return answer.auth_bytes

    def _request_head(self, api_key: int, api_version: int, body_bytes: int) -> bytes:
        # SaslHandshake is our only request without a flexible version: no tagged fields in its header.
        tags = b"" if api_key == SaslHandshakeRequest.__api_key__ else b"\0"
        head_bytes = _REQUEST_HEAD.size - _LENGTH.size + len(self._client_id) + len(tags)
        fixed = _REQUEST_HEAD.pack(
            head_bytes + body_bytes, api_key, api_version, self._correlation_id, len(self._client_id)
        )
        return fixed + self._client_id + tags

    def _send_all(self, parts: Sequence[Buffer]) -> None:
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.settimeout(max(0.001, self._patience_s()))
            for part in parts:
                self._socket.sendall(part)
            return
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        first = 0
        if self._socket.gettimeout() != 0.0:
            self._socket.settimeout(max(0.001, self._patience_s()))
        while first < len(views):
            try:
                sent = self._socket.sendmsg(views[first : first + _IOV_MAX])
            except BlockingIOError:  # the socket is non-blocking after has_answer(); small requests fit its buffer
                self._socket.settimeout(max(0.001, self._patience_s()))
                continue
            while first < len(views) and sent >= len(views[first]):
                sent -= len(views[first])
                first += 1
            if sent:
                views[first] = views[first][sent:]

    def _read_frame(self, deadline: Deadline) -> bytes:
        try:
            whole = self._buffered_frame()
            if whole is not None:
                return whole
            # Where has_answer() has said yes, perhaps long after the answer came, the rest of it is on its way.
            rest_s = _REST_S if self._socket.gettimeout() == 0.0 else 0.001
            self._socket.settimeout(max(rest_s, deadline.left()))
            head: bytes = self._reader.read(_LENGTH.size)
            if len(head) < _LENGTH.size:
                raise self._lost("closed by the broker")
            (size,) = _LENGTH.unpack(head)
            if not _LENGTH.size <= size <= RESPONSE_BYTES_MAX:
                raise self._lost(f"answer of {size} bytes: not a Kafka broker")
            body: bytes = self._reader.read(size)
        except TimeoutError as exc:
            if time.monotonic() - self._last_used >= _SILENCE_S:
                self._on_silence()
            raise self._lost("no answer in time") from exc
        except OSError as exc:
            raise self._lost(exc) from exc
        if len(body) < size:
            raise self._lost("closed by the broker in the middle of an answer")
        return body

    def _buffered_frame(self) -> bytes | None:
        """Return an answer without its length if it is buffered whole after :meth:`has_answer`; else None."""
        if self._socket.gettimeout() != 0.0:
            return None
        try:
            buffered = self._reader.peek(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return None
        if len(buffered) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(buffered)
        if not _CORRELATION_ID.size <= size <= len(buffered) - _LENGTH.size:
            return None
        self._reader.read(_LENGTH.size)
        return self._reader.read(size)

    def _patience_s(self) -> float:
        if self.deadline is None:
            return self.request_timeout_s
        return min(self.request_timeout_s, self.deadline.left())

    def _require_open(self) -> None:
        if self._forks != forks():
            raise refusal()
        if self._closed:
            raise ConnectionLostError(f"connection to Kafka at {self.address} is closed")

    def _lost(self, why: object) -> ConnectionLostError:
        self.close()
        return ConnectionLostError(f"connection to Kafka at {self.address} lost: {why}")
