"""Messages of the Kafka protocol on a connection, each behind its length: of clients to this gateway, and of its own.

A large message is received where it stays: the event loop reads right into its memory. Memory of a client's message
grows as it fills, to no more than twice what has come, and the receiver says when: a length costs nothing. So relayed
bytes are copied once by the kernel on each side, and hardly in between. Small messages are read together, many with one
call of the system::

    waiting, not consumed yet               a large message on its way
    +--------+---------+--------+------     +------------------------+-----------------+
    | length | message | length | mess      | has come               | is read into    |
    +--------+---------+--------+------     +------------------------+-----------------+

Nothing is read beyond what is asked for but :data:`AHEAD_BYTES`, so a peer that is not served waits, and so does what
it sends.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, cast
from weakref import WeakKeyDictionary

from rollbridge_gateway.protocol.wire import LENGTH_BYTES, RawMessage

# Closing of stalled connections: the client asks for nothing, does not complete what it began, or takes no answers.
#
# Nothing has a timer of its own. The gateway checks its connections every few seconds and tells each one's
# :class:`Pace` what it sees; that remembers since when nothing has moved, and says why the connection is to be closed.
#
# A connection in the middle of something has less time than a resting one, since a part of a request takes room from
# others, as untaken answers do. It moves if :data:`PIECE_BYTES` of it do, so that a byte a minute is nothing.
# Once others wait for their room, a whole request has no more time than one piece of it has otherwise.
#
# Source: Kafka's ``connections.max.idle.ms``; it has no limit for the middle of a request.


PIECE_BYTES: Final = 64 << 10
"""Bytes that have to come or go within a limit of time."""


FIRST_S: Final = 10.0
"""Seconds for a connection's first request: clients begin with it at once."""
IDLE_S: Final = 600.0
"""Seconds for a connection at rest, and for each piece of the answers that are not taken."""
REQUEST_S: Final = 30.0
"""Seconds for a login and for each piece of a request; while others wait for room, for a request, and for each piece of
the answers."""


class Closing(Enum):
    """Why a connection is closed."""

    MUTE = "mute"
    """Its first request has not come."""
    IDLE = "idle"
    """It has asked for nothing for long."""
    UNFINISHED = "unfinished"
    """The rest of a request has not come."""
    UNTAKEN = "untaken"
    """It does not take its answers."""
    LOGIN = "login"
    """Its client has not authenticated itself."""
    SESSION = "session"
    """Its client has not authenticated itself again before its session was over."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """State of a connection, as it is seen.

    Attributes:
        requests: Requests that have begun to come so far.
        received: Pieces, of :data:`PIECE_BYTES`, of all that has come so far.
        is_within: True if a request has begun to come that is not whole.
        taken: Bytes of answers that its socket has taken so far.
        unsent: Bytes of answers that were written and not taken.
        held: Bytes of all answers that are there, these included; others may wait for one before them.
        under_way: Requests that are not answered yet.
        is_stranger: True if its client has yet to authenticate itself.
    """

    requests: int = 0
    received: int = 0
    is_within: bool = False
    taken: int = 0
    unsent: int = 0
    held: int = 0
    under_way: int = 0
    is_stranger: bool = False


class Pace:
    """Last movements of a connection. Times are those of one clock that does not go back."""

    __slots__ = ("_began_s", "_came", "_came_s", "_request_s", "_taken", "_went_s")

    def __init__(self, now_s: float) -> None:
        self._began_s = self._came_s = self._went_s = self._request_s = now_s
        self._came = (0, 0)
        self._taken = 0

    def look(
        self, seen: Traffic, now_s: float, *, requests_wait: bool = False, answers_wait: bool = False
    ) -> Closing | None:
        """Take what is seen now; return why the connection is to be closed, None if it is not.

        ``requests_wait`` and ``answers_wait`` tell that there is no room for those of others.
        """
        came = (seen.requests, seen.received)
        if not seen.is_within or came[0] != self._came[0]:
            self._request_s = now_s
        if came != self._came or (seen.under_way and not seen.is_within):
            self._came, self._came_s = came, now_s  # it rests from the last answer on
        if seen.taken >= self._taken + PIECE_BYTES or (not seen.unsent and seen.held < PIECE_BYTES):
            self._taken, self._went_s = seen.taken, now_s
        is_mute = not seen.requests or (seen.requests == 1 and seen.is_within and not seen.received)
        if is_mute and now_s - self._began_s >= (REQUEST_S if requests_wait else FIRST_S):
            return Closing.MUTE
        if seen.is_stranger and now_s - self._began_s >= REQUEST_S:
            return Closing.LOGIN
        if seen.is_within and now_s - (self._request_s if requests_wait else self._came_s) >= REQUEST_S:
            return Closing.UNFINISHED
        if answers_wait or seen.unsent:
            limit_s = REQUEST_S if answers_wait else IDLE_S
            if now_s - self._went_s >= limit_s:
                return Closing.UNTAKEN
        if not seen.is_within and not seen.under_way and now_s - self._came_s >= IDLE_S:
            return Closing.IDLE
        return None


AHEAD_BYTES: Final = 64 << 10
"""Most bytes that are read before they are asked for."""
_LARGE_BYTES: Final = 16 << 10
_JOINED_BYTES: Final = 16 << 10
"""A message up to this is written in one piece with its length, as each piece is a call of the system."""

Take = Callable[[int], Awaitable[None]]
"""Waits until so many bytes more of a large message may come."""


async def _at_once(size: int) -> None:
    pass


_scratch: WeakKeyDictionary[asyncio.AbstractEventLoop, memoryview] = WeakKeyDictionary()


def _scratch_of(loop: asyncio.AbstractEventLoop) -> memoryview:
    """Return memory for one read, which all connections of a loop share: what is read is taken out before the next."""
    found = _scratch.get(loop)
    if found is None:
        found = _scratch[loop] = memoryview(bytearray(AHEAD_BYTES))
    return found


class MessageStream(asyncio.BufferedProtocol):
    """One connection, as messages. Belongs to one event loop; one task receives, any number send.

    Attributes:
        received: Bytes that have come.
    """

    def __init__(
        self, opened: Callable[[MessageStream], None] = lambda stream: None, *, is_trusted: bool = False
    ) -> None:
        """Prepare.

        Args:
            opened: Called once it is connected; before any handshake, if :meth:`encrypt` is to begin TLS.
            is_trusted: True if the other side is a broker: what it announces comes.
        """
        self.received = 0
        self._is_trusted = is_trusted
        self._opened = opened
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._scratch = _scratch_of(self._loop)
        self._ahead = bytearray()
        self._body, self._is_filling = bytearray(), False
        self._large_bytes = self._has_come = 0
        self._reader: asyncio.Future[None] | None = None
        self._is_paused = False
        self._has_ended = False
        self._is_lost = False
        self._is_full = False
        self._is_encrypted = False
        self._writers: set[asyncio.Future[None]] = set()
        self._closed: asyncio.Future[None] = self._loop.create_future()

    @classmethod
    async def connect(cls, host: str, port: int, tls: ssl.SSLContext | None) -> MessageStream:
        """Connect to a broker.

        Raises:
            OSError: it cannot be reached.
        """
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(
            lambda: cls(is_trusted=True), host, port, ssl=tls, server_hostname=host if tls else None
        )
        return stream

    async def encrypt(self, tls: ssl.SSLContext, timeout_s: float) -> None:
        """Begin TLS with a client.

        Raises:
            OSError: The handshake fails, or takes longer.
        """
        self.transport.pause_reading()
        handshake = asyncio.ensure_future(
            self._loop.start_tls(self.transport, self, tls, server_side=True, ssl_handshake_timeout=timeout_s)
        )
        try:
            await asyncio.sleep(0)  # the protocol of TLS is in place now, and is told of the connection next
            self._loop.call_soon(self._hand_over)
            found = await handshake
        finally:
            handshake.cancel()
        if found is None or found.is_closing():
            raise ConnectionResetError("the connection was closed during its handshake")
        self._transport, self._is_encrypted = found, True

    def _hand_over(self) -> None:
        """Give TLS what has come before it was in place: uvloop reads at once, even if a connection begins paused."""
        protocol = cast(asyncio.BufferedProtocol, self.transport.get_protocol())
        came, self._ahead = self._ahead, bytearray()
        while came:
            room = memoryview(protocol.get_buffer(len(came)))[: len(came)]
            room[:] = came[: len(room)]
            del came[: len(room)]
            protocol.buffer_updated(len(room))

    @property
    def transport(self) -> asyncio.Transport:
        """The connection below."""
        assert self._transport is not None
        return self._transport

    # Receiving

    async def size(self) -> int:
        """Return the length of the next message, as it says.

        Raises:
            EOFError: the connection ends before.
        """
        ahead = self._ahead
        while len(ahead) < LENGTH_BYTES:
            await self._more()
        found = int.from_bytes(ahead[:LENGTH_BYTES], "big", signed=True)
        del ahead[:LENGTH_BYTES]
        return found

    async def message(self, size: int, take: Take = _at_once) -> RawMessage:
        """Return the next message, of so many bytes.

        Args:
            size: Number of bytes.
            take: Asked before the memory of a large message grows, with the bytes by which it does.

        Raises:
            EOFError: the connection ends before.
        """
        ahead = self._ahead
        if len(ahead) < size:
            if size >= _LARGE_BYTES:
                return await self._large(size, take)
            while len(ahead) < size:
                await self._more()
        data = bytes(memoryview(ahead)[:size])
        del ahead[:size]
        if len(ahead) <= AHEAD_BYTES // 2:  # or else each message would be read by itself
            self._read_on()
        return data

    async def _large(self, size: int, take: Take) -> bytearray:
        self._body, self._has_come = bytearray(), 0
        try:
            while (has_come := self._has_come) < size:
                step = size - has_come
                if not self._is_trusted:
                    step = min(step, max(has_come, AHEAD_BYTES))
                await take(step)
                self._grow(has_come + step)
                while self._has_come < self._large_bytes:
                    await self._more()
        finally:
            self._is_filling = False
        data, self._body = self._body, bytearray()
        return data

    def _grow(self, size: int) -> None:
        """Have a large message come up to so many bytes, first those that have come already."""
        larger, has_come, ahead = bytearray(size), self._has_come, self._ahead
        larger[:has_come] = self._body
        moved = min(size - has_come, len(ahead))
        larger[has_come : has_come + moved] = ahead[:moved]
        del ahead[:moved]
        self._body, self._has_come, self._large_bytes = larger, has_come + moved, size
        self._is_filling = self._has_come < size

    async def _more(self) -> None:
        """Wait until more has come."""
        if self._has_ended:
            raise EOFError("the connection is closed")
        self._read_on()
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _read_on(self) -> None:
        if self._is_paused and len(self._ahead) < AHEAD_BYTES and not self._has_ended:
            self._is_paused = False
            self.transport.resume_reading()

    # Sending

    def send(self, data: RawMessage) -> None:
        """Send a message behind its length; :meth:`drain` waits until most of it has gone.

        Raises:
            ConnectionResetError: the connection is closed.
        """
        length = len(data).to_bytes(LENGTH_BYTES, "big")
        if len(data) <= _JOINED_BYTES:
            self._write(length + data)
        else:
            self._write(length)
            self._write(data)

    def _write(self, data: RawMessage | memoryview) -> None:
        if self.transport.is_closing():
            raise ConnectionResetError("the connection is closed")
        self.transport.write(data)

    async def deliver(self, data: RawMessage, gone: Callable[[int], None]) -> None:
        """Send a message, and wait until most of it has gone.

        TLS takes what it is given at once, and does not say how much of it waits: it is given a piece after another.
        ``gone`` is told the bytes of each piece that was handed over.

        Raises:
            ConnectionResetError: the connection is closed.
        """
        if self._is_encrypted and len(data) > _JOINED_BYTES:
            self._write(len(data).to_bytes(LENGTH_BYTES, "big"))
            gone(LENGTH_BYTES)
            for at in range(0, len(data), PIECE_BYTES):
                piece = memoryview(data)[at : at + PIECE_BYTES]
                self._write(piece)
                gone(len(piece))
                await self.drain()
            return
        self.send(data)
        gone(LENGTH_BYTES + len(data))
        await self.drain()

    async def drain(self) -> None:
        """Wait until the connection takes more.

        Raises:
            ConnectionResetError: it is closed.
        """
        if self._is_full and not self._is_lost:
            waiter = self._loop.create_future()
            self._writers.add(waiter)
            try:
                await waiter
            finally:
                self._writers.discard(waiter)
        if self._is_lost:
            raise ConnectionResetError("the connection is closed")

    def close(self) -> None:
        """Close the connection, once what was written has gone."""
        if self._transport is not None:
            self._transport.close()

    async def close_within(self, seconds: float) -> None:
        """Close the connection; what has not gone by then is lost."""
        self.close()
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(self._closed)
        except TimeoutError:
            self.transport.abort()

    # Of the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._is_encrypted = transport.get_extra_info("sslcontext") is not None
        self._opened(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        if not self._is_filling:
            return self._scratch[: AHEAD_BYTES - len(self._ahead)]
        return memoryview(self._body)[self._has_come :]

    def buffer_updated(self, nbytes: int) -> None:
        self.received += nbytes
        if self._is_filling:
            self._has_come += nbytes
            # There may be another read before the waiting task continues.
            self._is_filling = self._has_come < self._large_bytes
        else:
            self._ahead += self._scratch[:nbytes]
            if len(self._ahead) >= AHEAD_BYTES and not self._is_paused:
                self._is_paused = True
                self.transport.pause_reading()
        self._wake(self._reader)

    def eof_received(self) -> bool:
        self._has_ended = True
        self._wake(self._reader)
        return not self._is_encrypted  # its answers still go out

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_ended = self._is_lost = True
        self._wake(self._reader)
        self._wake_writers()
        self._wake(self._closed)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._wake_writers()

    def _wake_writers(self) -> None:
        for waiter in self._writers:
            self._wake(waiter)

    @staticmethod
    def _wake(waiter: asyncio.Future[None] | None) -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
