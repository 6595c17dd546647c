"""A client's connection: frames in, answers out in the order of the requests, many of them under way.

What holds a client up, in this order: the number of its requests under way; the bytes of all requests under way in this
gateway; what its socket takes. Bytes that are no request close the connection and are told of in the log once a minute
at most; nothing that a client sends ends more than its own connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import Final, Protocol

from rollbridge.kafka.ratelimit import limited
from rollbridge_gateway.bounds import MalformedError
from rollbridge_gateway.shell.relay import BrokerGoneError
from rollbridge_gateway.wire import Head, read_head

logger = logging.getLogger(__name__)
_strange = limited(logging.getLogger(f"{__name__}.strange"))

REQUESTS_MAX: Final = 100
"""Most requests of a connection under way."""
_HEAD_BYTES: Final = 10

Answer = Awaitable[bytes | None]
"""Bytes without their length, or None if the request has no answer."""


class RequestRoom:
    """Bytes of requests that may be under way, of all connections together. Belongs to one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._freed = asyncio.Condition()

    async def take(self, size: int) -> None:
        """Wait until there is room for so many bytes; one request always has room."""
        async with self._freed:
            await self._freed.wait_for(lambda: not self.taken or self.taken + size <= self.limit)
            self.taken += size

    async def give(self, size: int) -> None:
        """Give back what was taken."""
        async with self._freed:
            self.taken -= size
            self._freed.notify_all()


class Observer(Protocol):
    """Is told of what happens on connections."""

    def answered(self, head: Head, seconds: float) -> None:
        """A request was answered, after so many seconds."""

    def received(self, size: int) -> None:
        """A request of so many bytes has come."""

    def sent(self, size: int) -> None:
        """An answer of so many bytes has gone."""

    def closed(self, fault: MalformedError | BrokerGoneError) -> None:
        """A connection was closed, since its client sent what is no request, or since its broker is gone."""


class Responder(Protocol):
    """Serves the requests of one connection."""

    async def dispatch(self, data: bytes, head: Head) -> Answer:
        """Begin to serve a request; called in the order of requests, which what is begun here keeps.

        Raises:
            MalformedError: it is none.
            BrokerGoneError: the connection cannot go on.
        """

    async def admits(self, size: int) -> bool:
        """Return whether a request of so many bytes is accepted by now.

        Raises:
            BrokerGoneError: the connection cannot go on.
        """

    def leave(self) -> None:
        """Take note that the client is gone: what has not begun need not begin."""

    async def close(self) -> None:
        """Let go of everything."""


async def serve(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    dispatcher: Responder,
    room: RequestRoom,
    request_bytes_max: int,
    observer: Observer,
) -> None:
    """Serve a connection until its client closes it, or sends what is no request.

    Args:
        reader, writer: The connection, which is closed at the end.
        dispatcher: Serves the requests, and is closed at the end.
        room: Bytes that may be under way.
        request_bytes_max: Largest request.
        observer: Is told of it.
    """
    answers: asyncio.Queue[tuple[asyncio.Future[bytes | None], int] | None] = asyncio.Queue(REQUESTS_MAX)
    sending = asyncio.create_task(_send(answers, writer, room, observer), name="answers")
    try:
        while not sending.done():
            size = int.from_bytes(await reader.readexactly(4), "big", signed=True)
            if not _HEAD_BYTES <= size <= request_bytes_max or not await dispatcher.admits(size):
                raise MalformedError(f"a request of {size} bytes")
            await room.take(size)
            try:
                data = await reader.readexactly(size)
                observer.received(size)
                head = read_head(data)
                begun = await dispatcher.dispatch(data, head)
            except BaseException:
                await asyncio.shield(room.give(size))
                raise
            task = asyncio.ensure_future(_observed(begun, head, observer))
            await answers.put((task, size))
    except MalformedError as fault:
        _tell_strange(fault, observer)
    except (asyncio.IncompleteReadError, BrokerGoneError, OSError) as fault:
        if isinstance(fault, BrokerGoneError):
            observer.closed(fault)
        logger.debug("a connection ends: %r", fault)
    except Exception:
        logger.exception("a connection is closed by an error that nobody foresaw")
    finally:
        dispatcher.leave()
        if not sending.done():
            await answers.put(None)
        await asyncio.wait({sending})
        await _drop(answers, room)
        await dispatcher.close()
        writer.close()


def _tell_strange(fault: MalformedError, observer: Observer) -> None:
    observer.closed(fault)
    _strange.warning("a connection is closed, whose client sent what is no request; the log at DEBUG says what")
    logger.debug("no request: %s", fault)


async def _observed(begun: Answer, head: Head, observer: Observer) -> bytes | None:
    began_s = time.monotonic()
    answer = await begun
    observer.answered(head, time.monotonic() - began_s)
    return answer


async def _send(
    answers: asyncio.Queue[tuple[asyncio.Future[bytes | None], int] | None],
    writer: asyncio.StreamWriter,
    room: RequestRoom,
    observer: Observer,
) -> None:
    while (item := await answers.get()) is not None:
        task, size = item
        try:
            data = await task
            if data is not None:
                writer.write(len(data).to_bytes(4, "big"))
                writer.write(data)
                observer.sent(len(data))
                await writer.drain()
        except (MalformedError, BrokerGoneError, OSError) as fault:
            if isinstance(fault, MalformedError):
                _tell_strange(fault, observer)
            elif isinstance(fault, BrokerGoneError):
                observer.closed(fault)
            writer.close()
            return
        except Exception:
            logger.exception("a request failed by an error that nobody foresaw; its connection is closed")
            writer.close()
            return
        finally:
            await room.give(size)


async def _drop(answers: asyncio.Queue[tuple[asyncio.Future[bytes | None], int] | None], room: RequestRoom) -> None:
    """Give up the answers that nobody waits for any more. What they do goes on to its end."""
    while not answers.empty():
        item = answers.get_nowait()
        if item is not None:
            item[0].add_done_callback(_ignore)
            await room.give(item[1])


def _ignore(task: asyncio.Future[bytes | None]) -> None:
    if not task.cancelled():
        task.exception()
