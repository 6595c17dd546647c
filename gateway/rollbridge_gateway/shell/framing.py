"""Messages of the Kafka protocol on a connection, each behind its length: of clients to this gateway, and of its own.

A large message is received where it stays: its memory is there before its bytes come, and the event loop reads them
right into it. So what is relayed is copied once by the kernel on each side, and not at all in between. Small ones are
read together, many with one call of the system::

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
from collections.abc import Callable
from typing import Final, cast
from weakref import WeakKeyDictionary

from rollbridge_gateway.bounds import Message

AHEAD_BYTES: Final = 64 << 10
"""Most bytes that are read before they are asked for."""
_LARGE_BYTES: Final = 16 << 10
_LENGTH_BYTES: Final = 4
_JOINED_BYTES: Final = 16 << 10
"""A message up to this is written in one piece with its length, as each piece is a call of the system."""

_scratch: WeakKeyDictionary[asyncio.AbstractEventLoop, memoryview] = WeakKeyDictionary()


def _scratch_of(loop: asyncio.AbstractEventLoop) -> memoryview:
    """Return memory for one read, which all connections of a loop share: what is read is taken out before the next."""
    found = _scratch.get(loop)
    if found is None:
        found = _scratch[loop] = memoryview(bytearray(AHEAD_BYTES))
    return found


class MessageStream(asyncio.BufferedProtocol):
    """One connection, as messages. Belongs to one event loop; one task at a time receives, and one sends.

    Attributes:
        received: Bytes that have come.
    """

    def __init__(self, opened: Callable[[MessageStream], None] = lambda stream: None) -> None:
        """Prepare.

        Args:
            opened: Called once it is connected, with TLS where that is used.
        """
        self.received = 0
        self._opened = opened
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._scratch = _scratch_of(self._loop)
        self._ahead = bytearray()
        self._body: memoryview | None = None
        self._has_come = 0
        self._reader: asyncio.Future[None] | None = None
        self._is_paused = False
        self._has_ended = False
        self._is_lost = False
        self._is_full = False
        self._writer: asyncio.Future[None] | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()

    @classmethod
    async def connect(cls, host: str, port: int, tls: ssl.SSLContext | None) -> MessageStream:
        """Connect to a server.

        Raises:
            OSError: it cannot be reached.
        """
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(cls, host, port, ssl=tls, server_hostname=host if tls else None)
        return stream

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
        while len(ahead) < _LENGTH_BYTES:
            await self._more()
        found = int.from_bytes(ahead[:_LENGTH_BYTES], "big", signed=True)
        del ahead[:_LENGTH_BYTES]
        return found

    async def message(self, size: int) -> Message:
        """Return the next message, of so many bytes.

        Raises:
            EOFError: the connection ends before.
        """
        ahead = self._ahead
        if len(ahead) < size:
            if size >= _LARGE_BYTES:
                return await self._large(size)
            while len(ahead) < size:
                await self._more()
        data = bytes(memoryview(ahead)[:size])
        del ahead[:size]
        self._read_on()
        return data

    async def _large(self, size: int) -> bytearray:
        data = bytearray(size)
        self._has_come = len(self._ahead)
        data[: self._has_come] = self._ahead
        self._ahead.clear()
        with memoryview(data) as body:
            self._body = body
            try:
                while self._has_come < size:
                    await self._more()
            finally:
                self._body = None
        return data

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

    def send(self, data: Message) -> None:
        """Send a message behind its length; :meth:`drain` waits until most of it has gone.

        Raises:
            ConnectionResetError: the connection is closed.
        """
        if self.transport.is_closing():
            raise ConnectionResetError("the connection is closed")
        length = len(data).to_bytes(_LENGTH_BYTES, "big")
        if len(data) <= _JOINED_BYTES:
            self.transport.write(length + data)
        else:
            self.transport.write(length)
            self.transport.write(data)

    async def drain(self) -> None:
        """Wait until the connection takes more.

        Raises:
            ConnectionResetError: it is closed.
        """
        if self._is_full and not self._is_lost:
            self._writer = self._loop.create_future()
            await self._writer
        if self._is_lost:
            raise ConnectionResetError("the connection is closed")

    def close(self) -> None:
        """Close the connection, once what was written has gone."""
        if self._transport is not None:
            self._transport.close()

    async def closed(self) -> None:
        """Wait until it is closed."""
        await asyncio.shield(self._closed)

    # Of the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._opened(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._body is not None:
            return self._body[self._has_come :]
        return self._scratch[: AHEAD_BYTES - len(self._ahead)]

    def buffer_updated(self, nbytes: int) -> None:
        self.received += nbytes
        if self._body is not None:
            self._has_come += nbytes
            if self._has_come == len(self._body):
                self._body = None  # there may be another read before whoever waits for it goes on
        else:
            self._ahead += self._scratch[:nbytes]
            if len(self._ahead) >= AHEAD_BYTES and not self._is_paused:
                self._is_paused = True
                self.transport.pause_reading()
        self._wake(self._reader)

    def eof_received(self) -> bool:
        self._has_ended = True
        self._wake(self._reader)
        return self.transport.get_extra_info("sslcontext") is None  # its answers still go out

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_ended = self._is_lost = True
        self._wake(self._reader)
        self._wake(self._writer)
        self._wake(self._closed)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._wake(self._writer)

    @staticmethod
    def _wake(waiter: asyncio.Future[None] | None) -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
