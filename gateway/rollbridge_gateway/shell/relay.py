"""A client connection's own connection to a broker: requests go out as they came, answers come back in order.

Each client connection has one, so that the broker sees each client as itself: its credentials, its quotas, its pace. A
broker answers in order, so an answer belongs to the oldest request that waits for one; nothing has to be renumbered.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from rollbridge_gateway import wire
from rollbridge_gateway.bounds import RawMessage
from rollbridge_gateway.shell.framing import MessageStream

logger = logging.getLogger(__name__)

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
            host, port: The broker's address.
            tls: How it is encrypted; None if it is not.
            room: Room for answers, from when they come; who passes them on gives it back.
            closed: Called when the broker has closed it, while nobody waits for an answer.

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
                    raise BrokerGoneError("an answer that nobody has asked for")
                answer = waiting.popleft()
                if not answer.done():
                    answer.set_result(data)
        except (EOFError, OSError) as fault:
            logger.debug("a broker has closed a connection: %r", fault)
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
