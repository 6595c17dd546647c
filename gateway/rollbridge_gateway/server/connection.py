"""A client's connection: frames in, answers out in the order of the requests, many of them under way.

What holds a client up, in this order: the number of its requests under way; what has come of all large requests in this
gateway that are not whole, and the bytes of all requests under way; what its socket takes. What a client may hold up is
limited in time, see :mod:`rollbridge_gateway.server.framing`. Bytes that are no request close the connection and are
told of in the log once a minute at most; nothing that a client sends ends more than its own connection.

Tour of a gateway request, stop 1 of 5: see docs/tour.md.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable
from typing import Final, Protocol

from rollbridge.base.logs import limited, log_defect
from rollbridge_gateway.protocol.wire import Head, MalformedError, RawMessage, read_head
from rollbridge_gateway.server.framing import PIECE_BYTES, REQUEST_S, Closing, MessageStream, Pace, Traffic
from rollbridge_gateway.server.relay import BrokerGoneError

# Byte budget shared by connections, first in first out when exhausted.
#
# A connection that takes piece by piece keeps what it has while it waits for more. So that not all wait for each other,
# one of those may exceed the limit, until it gives back what it has.


SMALL_BYTES: Final = 16 << 10
"""Size up to which a request need not wait, on demand: it ends what others wait for."""


class ByteBudget:
    """Room for so many bytes. Belongs to one event loop."""

    def __init__(self, limit: int) -> None:
        """Start empty."""
        self.limit = limit
        self.taken = 0
        self._beyond: object = None
        """Connection that may exceed the limit."""
        self._waiting: deque[tuple[int, object, asyncio.Future[None]]] = deque()

    @property
    def is_crowded(self) -> bool:
        """True if a connection waits."""
        return bool(self._waiting)

    async def take(self, size: int, *, small_at_once: bool = False, by: object = None) -> None:
        """Wait until there is room for so many bytes; one always has room, however large.

        Args:
            size: Number of bytes.
            small_at_once: True if few bytes need not wait.
            by: Connection that takes piece by piece; it waits only for one other that does.
        """
        is_beyond = by is not None and by is self._beyond
        if is_beyond or (not self._waiting and self._fits(size, by)) or (small_at_once and size <= SMALL_BYTES):
            self.taken += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        item = (size, by, turn)
        self._waiting.append(item)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.give(size)
            elif item in self._waiting:
                self._waiting.remove(item)
                self._let_in()
            raise

    def give(self, size: int, by: object = None) -> None:
        """Give back what was taken; who has taken piece by piece, all of it at once."""
        self.taken -= size
        if by is not None and by is self._beyond:
            self._beyond = None
        self._let_in()

    def _fits(self, size: int, by: object) -> bool:
        if not self.taken or self.taken + size <= self.limit:
            return True
        if by is None or self._beyond is not None:
            return False
        self._beyond = by
        return True

    def _let_in(self) -> None:
        while self._waiting and self._fits(*self._waiting[0][:2]):
            size, _, turn = self._waiting.popleft()
            if not turn.done():
                self.taken += size
                turn.set_result(None)


logger = logging.getLogger(__name__)
_strange = limited(logging.getLogger(f"{__name__}.strange"))

REQUEST_BYTES_MAX: Final = 100 << 20
"""Largest request, as brokers' ``socket.request.max.bytes`` by default."""
REQUESTS_MAX: Final = 100
"""Most requests of a connection under way."""
_HEAD_BYTES: Final = 10

Answer = Awaitable[RawMessage | None]
"""Bytes without their length, or None if the request has no answer."""


class ClientConnection:
    """A client's connection, as the watch over all of them sees it, and what it takes of the room of answers."""

    def __init__(self, stream: MessageStream, pace: Pace, answers: ByteBudget) -> None:
        """Begin; ``answers`` is the room of brokers' answers, of all connections together."""
        self._stream = stream
        self._pace = pace
        self._answers = answers
        self._resting: asyncio.Future[None] | None = None
        self.requests = self.written = self.held = self.under_way = 0
        self.is_within = False
        self.is_aborted = False
        self.is_ending = False

    def look(self, now_s: float, *, is_stranger: bool, requests_wait: bool) -> Closing | None:
        """Return why this connection is to be closed; None if it is not."""
        unsent = self._stream.transport.get_write_buffer_size()
        seen = Traffic(
            requests=self.requests,
            received=self._stream.received // PIECE_BYTES,
            is_within=self.is_within,
            taken=self.written - unsent,
            unsent=unsent,
            held=self.held,
            under_way=self.under_way,
            is_stranger=is_stranger,
        )
        return self._pace.look(seen, now_s, requests_wait=requests_wait, answers_wait=self._answers.is_crowded)

    def wrote(self, size: int) -> None:
        """Note that so many bytes of answers were written."""
        self.written += size

    def abort(self) -> None:
        """Close it at once; what was written and not taken is lost."""
        self.is_aborted = True
        self._stream.transport.abort()

    def broker_gone(self) -> None:
        """Close it, since its broker has; what is under way does not need the broker, or finds out by itself."""
        if not self.under_way:
            self._stream.close()

    def end(self) -> None:
        """Close it once what is under way is answered; no more than one further request is read."""
        self.is_ending = True

    async def rest(self) -> None:
        """Wait until nothing is under way."""
        while self.under_way:
            self._resting = asyncio.get_running_loop().create_future()
            await self._resting

    def ended(self) -> None:
        """Note that a request was answered, or given up."""
        self.under_way -= 1
        if not self.under_way and self.is_ending:
            self._stream.close()
        if not self.under_way and self._resting is not None and not self._resting.done():
            self._resting.set_result(None)

    async def take(self, size: int) -> None:
        """Wait until there is room for a broker's answer."""
        await self._answers.take(size, small_at_once=True)
        self.held += size

    def give(self, size: int) -> None:
        """Give back room of answers, of which this connection has not more than it took."""
        size = min(size, self.held)
        self.held -= size
        self._answers.give(size)


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

    async def dispatch(self, data: RawMessage, head: Head) -> Answer:
        """Begin to serve a request; called in the order of requests, which what is begun here keeps.

        Raises:
            MalformedError: it is none.
            BrokerGoneError: the connection cannot continue.
        """

    async def admits(self, size: int) -> bool:
        """Return whether a request of so many bytes is accepted by now.

        Raises:
            BrokerGoneError: the connection cannot continue.
        """

    def leave(self) -> None:
        """Take note that the client is gone: what has not begun need not begin."""

    async def close(self) -> None:
        """Let go of everything; answers that brokers still owe fail."""


async def serve(
    stream: MessageStream,
    dispatcher: Responder,
    line: ClientConnection,
    coming: ByteBudget,
    room: ByteBudget,
    observer: Observer,
) -> None:
    """Serve a connection until its client closes it, or sends what is no request; close it and ``dispatcher`` then.

    Args:
        coming: Room of what has come of large requests that are not whole; a small one waits for none of them.
        room: Room of requests under way, from when they are whole: they end without their client.
    """
    answers: asyncio.Queue[tuple[asyncio.Future[RawMessage | None], int] | None] = asyncio.Queue(REQUESTS_MAX)
    has_come = 0

    async def take(size: int) -> None:
        nonlocal has_come
        await coming.take(size, by=line)
        has_come += size

    sending = asyncio.create_task(_send(answers, stream, line, room, observer), name="answers")
    try:
        while not (line.is_aborted or line.is_ending):
            size = await stream.size()
            if not _HEAD_BYTES <= size <= REQUEST_BYTES_MAX or not await dispatcher.admits(size):
                raise MalformedError(f"a request of {size} bytes")
            line.requests += 1
            line.is_within = True
            try:
                data = await stream.message(size, take)
                line.is_within = False
                await room.take(size)
            finally:
                coming.give(has_come, line)
                has_come = 0
            try:
                observer.received(size)
                head = read_head(data)
                begun = await dispatcher.dispatch(data, head)
            except BaseException:
                room.give(size)
                raise
            task = asyncio.ensure_future(_observed(begun, head, observer))
            line.under_way += 1
            await answers.put((task, size))
    except MalformedError as fault:
        _tell_strange(fault, observer)
    except (EOFError, BrokerGoneError, OSError) as fault:
        if isinstance(fault, BrokerGoneError):
            observer.closed(fault)
        logger.debug("connection.ended: %r", fault)
    except Exception:
        log_defect(logger, "connection.failed: closing it")
    finally:
        dispatcher.leave()
        await answers.put(None)
        # Who has closed its side may still read; a broker would not ask. What brokers owe is not awaited for ever.
        await asyncio.wait({sending}, timeout=REQUEST_S)
        await dispatcher.close()
        await asyncio.wait({sending})
        line.give(line.held)
        await stream.close_within(REQUEST_S)


def _tell_strange(fault: MalformedError, observer: Observer) -> None:
    observer.closed(fault)
    _strange.warning("connection.malformed: its client sent what is no request; closing it; DEBUG says what")
    logger.debug("request.malformed: %s", fault)


async def _observed(begun: Answer, head: Head, observer: Observer) -> RawMessage | None:
    began_s = time.monotonic()
    answer = await begun
    observer.answered(head, time.monotonic() - began_s)
    return answer


async def _send(
    answers: asyncio.Queue[tuple[asyncio.Future[RawMessage | None], int] | None],
    stream: MessageStream,
    line: ClientConnection,
    room: ByteBudget,
    observer: Observer,
) -> None:
    is_broken = False
    while (item := await answers.get()) is not None:
        task, size = item
        try:
            if is_broken:
                task.add_done_callback(_ignore)  # it continues to its end
                continue
            data = await task
            if data is not None:
                await stream.deliver(data, line.wrote)
                observer.sent(len(data))
                line.give(len(data) if answers.qsize() else line.held)
        except (MalformedError, BrokerGoneError, OSError) as fault:
            if isinstance(fault, MalformedError):
                _tell_strange(fault, observer)
            elif isinstance(fault, BrokerGoneError):
                observer.closed(fault)
            is_broken = True
        except Exception:
            log_defect(logger, "request.failed: closing its connection")
            is_broken = True
        finally:
            line.ended()
            room.give(size)
        if is_broken:
            stream.close()


def _ignore(task: asyncio.Future[RawMessage | None]) -> None:
    if not task.cancelled():
        task.exception()
