"""Connections to brokers: a client connection's own one, and those on which the gateway itself asks.

Requests of a client go out as they came, answers come back in order. Each client connection has one, so that the broker
sees each client as itself: its credentials, its quotas, its pace. A broker answers in order, so an answer belongs to
the oldest request that waits for one; nothing has to be renumbered.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeVar

from kio.schema.api_versions.v3 import ApiVersionsRequest, ApiVersionsResponse
from kio.schema.errors import ErrorCode
from kio.schema.metadata.v12 import MetadataRequest, MetadataResponse
from kio.schema.metadata.v12.request import MetadataRequestTopic
from kio.schema.metadata.v12.response import MetadataResponseTopic
from kio.schema.types import TopicName

from rollbridge.base.security import Security
from rollbridge.config import ConnectionSettings
from rollbridge.errors import KafkaUnavailableError, RollbridgeError
from rollbridge.kafka.connection import Connection
from rollbridge.kafka.metadata import parse_bootstrap
from rollbridge.metadata.gateways import LackingRight
from rollbridge_gateway.protocol import wire
from rollbridge_gateway.protocol.versions import VersionRange
from rollbridge_gateway.protocol.wire import RawMessage
from rollbridge_gateway.server.framing import MessageStream

logger = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_BYTES_MAX: Final = 256 << 20
"""Largest answer that is passed on; what a broker sends beyond it is no answer."""
CONNECT_S: Final = 10.0


class BrokerGoneError(ConnectionError):
    """The broker has closed the connection, or cannot be reached; its client is disconnected, as if by the broker."""


class AnswerRoom(Protocol):
    """Room for answers that the client has not taken yet."""

    async def take(self, size: int) -> None:
        """Wait until there is room for so many bytes."""

    def give(self, size: int) -> None:
        """Give some of it back."""


class Upstream:
    """Connection to one broker. Belongs to the event loop that made it."""

    def __init__(self, stream: MessageStream, room: AnswerRoom, closed: Callable[[], None]) -> None:
        """Take over an open connection; applications call :meth:`connect`."""
        self._stream = stream
        self._room = room
        self._closed = closed
        self._waiting: deque[asyncio.Future[RawMessage]] = deque()
        self._numbers = itertools.count(1)
        self._failed = False
        self._receiving = asyncio.create_task(self._receive(), name="upstream")

    @classmethod
    async def connect(
        cls, host: str, port: int, tls: ssl.SSLContext | None, room: AnswerRoom, closed: Callable[[], None]
    ) -> Upstream:
        """Connect.

        Args:
            tls: How it is encrypted; None if it is not.
            room: Room for answers, from when they come; the client's connection gives it back.
            closed: Called when the broker has closed it, while no answer is awaited.

        Raises:
            BrokerGoneError: the broker cannot be reached.
        """
        try:
            async with asyncio.timeout(CONNECT_S):
                stream = await MessageStream.connect(host, port, tls)
        except (OSError, TimeoutError) as fault:
            raise BrokerGoneError(f"broker {host}:{port} cannot be reached: {fault}") from fault
        return cls(stream, room, closed)

    def send(self, data: RawMessage, *, is_answered: bool = True) -> asyncio.Future[RawMessage]:
        """Send a request without its length; return the future answer, likewise.

        Raises:
            BrokerGoneError: the connection is closed; also from the future.
        """
        if self._failed:
            raise BrokerGoneError("the broker has closed the connection")
        try:
            self._stream.send(data)
        except ConnectionError as fault:
            raise BrokerGoneError(f"the broker has closed the connection: {fault}") from fault
        answer: asyncio.Future[RawMessage] = asyncio.get_running_loop().create_future()
        if is_answered:
            self._waiting.append(answer)
        else:
            answer.set_result(b"")
        return answer

    async def drain(self) -> None:
        """Wait until the broker has taken most of what was sent."""
        try:
            await self._stream.drain()
        except ConnectionError as fault:
            raise BrokerGoneError(f"the broker has closed the connection: {fault}") from fault

    async def ask(self, key: int, version: int, client_id: str | None, values: Mapping[str, Any]) -> Any:
        """Send a request of the gateway's own, and return its answer, an entity of kio's.

        Raises:
            BrokerGoneError: the connection is closed.
            MalformedError: the answer is none.
        """
        number = next(self._numbers) & 0x7FFF_FFFF
        answer = await self.send(wire.write_request(key, version, number, client_id, values))
        self._room.give(len(answer))
        return wire.read_answer(answer, key, version)

    async def close(self) -> None:
        """Close the connection; who waits for an answer gets an error."""
        self._receiving.cancel()
        await asyncio.wait({self._receiving})

    async def _receive(self) -> None:
        stream, waiting = self._stream, self._waiting
        try:
            while True:
                size = await stream.size()
                if not 4 <= size <= ANSWER_BYTES_MAX:
                    raise BrokerGoneError(f"an answer of {size} bytes")
                await self._room.take(size)
                data = await stream.message(size)
                if not waiting:
                    raise BrokerGoneError("an answer without a request")
                answer = waiting.popleft()
                if not answer.done():
                    answer.set_result(data)
        except (EOFError, OSError) as fault:
            logger.debug("broker.closed: %r", fault)
        finally:
            self._fail()
            self._stream.close()

    def _fail(self) -> None:
        self._failed = True
        if not self._waiting:
            self._closed()
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(BrokerGoneError("the broker has closed the connection"))
                answer.exception()  # who has gone does not ask for it


_ASK_S = 5.0
_OPERATIONS: Final = {"Read": 1 << 3, "Write": 1 << 4, "Describe": 1 << 8}
"""Bits of ``topic_authorized_operations``: the codes of Kafka's ``AclOperation``."""


@dataclass(frozen=True, slots=True)
class Brokers:
    """The brokers of the cluster.

    Attributes:
        addresses: Host and port of each, by its id.
        versions: What they have in common, by API key.
        cluster_id: Id of the cluster.
    """

    addresses: Mapping[int, tuple[str, int]]
    versions: Mapping[int, VersionRange]
    cluster_id: str = ""


class BrokerWatch:
    """Asks any broker, with the gateway's own credentials; first the one that answered last."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._answers: tuple[str, int] | None = None
        self.security = Security.from_config(settings.kafka)

    def tls_context(self) -> ssl.SSLContext | None:
        """Return how clients' connections to brokers are encrypted; None if they are not.

        Without SASL a broker identifies a connection by its certificate: clients do not get the gateway's.
        """
        if not self.security.uses_tls:
            return None
        if self.security.uses_sasl:
            return self.security.tls_context()
        return replace(self.security, certificate_location=None, key_location=None, key_password=None).tls_context()

    def ask(self, known: Brokers | None) -> Brokers:
        """Return the brokers.

        Raises:
            KafkaUnavailableError: none of those known, or named at the start, answered.
        """
        wanted = [*(known.addresses.values() if known else ()), *parse_bootstrap(self._settings.bootstrap_servers)]
        return self._of_any(wanted, self._ask)

    def lacking(self, known: Brokers, needs: Sequence[LackingRight]) -> list[LackingRight]:
        """Return what this gateway lacks of what it needs; topics that are not there count for nothing.

        Raises:
            KafkaUnavailableError: no broker answered.
        """
        if not needs:
            return []
        found = {str(item.name): item for item in self.look(known, {item.topic for item in needs})}
        return [
            item
            for item in needs
            if item.topic in found
            and (
                found[item.topic].error_code is ErrorCode.topic_authorization_failed
                or (
                    found[item.topic].error_code is ErrorCode.none
                    and not int(found[item.topic].topic_authorized_operations) & _OPERATIONS[item.operation]
                )
            )
        ]

    def look(self, known: Brokers, names: Collection[str]) -> Sequence[MetadataResponseTopic]:
        """Return what a broker answers to Metadata about topics, which are not made by that.

        Raises:
            KafkaUnavailableError: no broker answered.
        """
        wanted = tuple(MetadataRequestTopic(topic_id=None, name=TopicName(name)) for name in sorted(names))
        request = MetadataRequest(
            topics=wanted, allow_auto_topic_creation=False, include_topic_authorized_operations=True
        )

        def ask(host: str, port: int) -> Sequence[MetadataResponseTopic]:
            with closing(self._connection(host, port)) as connection:
                return connection.call(request, MetadataResponse).topics

        return self._of_any(known.addresses.values(), ask)

    def _of_any(self, wanted: Iterable[tuple[str, int]], ask: Callable[[str, int], T]) -> T:
        last: RollbridgeError | None = None
        for address in sorted(wanted, key=lambda item: item != self._answers):
            try:
                found = ask(*address)
            except RollbridgeError as fault:
                last = fault
            else:
                self._answers = address
                return found
        raise KafkaUnavailableError(f"no broker answers: {last}") from last

    def _connection(self, host: str, port: int) -> Connection:
        return Connection(
            host,
            port,
            security=self.security,
            client_id=self._settings.client_name,
            connect_timeout_s=_ASK_S,
            request_timeout_s=_ASK_S,
        )

    def _ask(self, host: str, port: int) -> Brokers:
        connection = self._connection(host, port)
        try:
            answer = connection.call(
                MetadataRequest(topics=(), allow_auto_topic_creation=False, include_topic_authorized_operations=False),
                MetadataResponse,
            )
            said = connection.call(
                ApiVersionsRequest(client_software_name="rollbridge-gateway", client_software_version="1"),
                ApiVersionsResponse,
            )
        finally:
            connection.close()
        if not answer.brokers:  # it stood still, and the controller has taken it for dead
            raise KafkaUnavailableError(f"broker {host}:{port} knows none that is alive, not even itself")
        return Brokers(
            {int(item.node_id): (item.host, int(item.port)) for item in answer.brokers},
            {int(item.api_key): VersionRange(int(item.min_version), int(item.max_version)) for item in said.api_keys},
            answer.cluster_id or "",
        )
