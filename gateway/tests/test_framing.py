"""Messages on a connection: whole and in order however their bytes come, under both event loops that there are."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import pytest
import uvloop

from rollbridge_gateway.shell.framing import AHEAD_BYTES, MessageStream

LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
SIZES = (0, 1, 10, 1_000, 16_383, 16_384, 16_385, AHEAD_BYTES - 5, AHEAD_BYTES, AHEAD_BYTES + 1, 400_000, 2_500_000)
"""Around each place where another way is taken."""
SEEDS = 20

NewLoop = Callable[[], asyncio.AbstractEventLoop]


def framed(messages: Sequence[bytes]) -> bytes:
    return b"".join(len(message).to_bytes(4, "big") + message for message in messages)


def messages_of(seed: int) -> list[bytes]:
    """Some messages of all sizes."""
    chance = random.Random(seed)
    return [chance.randbytes(chance.choice(SIZES)) for _ in range(chance.randint(1, 30))]


def run(new_loop: NewLoop, what: Callable[[MessageStream, socket.socket], Awaitable[None]]) -> None:
    """Have a coroutine done with a stream, and with the other end of its connection."""

    async def body() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        _, stream = await asyncio.get_running_loop().create_connection(MessageStream, sock=ours)
        try:
            async with asyncio.timeout(60):
                await what(stream, theirs)
        finally:
            theirs.close()
            stream.close()
            await stream.close_within(60)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(body())


async def in_pieces(theirs: socket.socket, data: bytes, seed: int) -> None:
    """Send bytes in pieces of any size, now and then with a turn of the loop in between."""
    chance, loop = random.Random(seed), asyncio.get_running_loop()
    at = 0
    while at < len(data):
        size = chance.choice((1, 3, 4, 5, 1_000, 16_384, 70_000, 300_000))
        await loop.sock_sendall(theirs, data[at : at + size])
        at += size
        if chance.random() < 0.3:
            await asyncio.sleep(0)


async def received(stream: MessageStream) -> bytes:
    return bytes(await stream.message(await stream.size()))


@LOOPS
@pytest.mark.parametrize("seed", range(SEEDS))
def test_messages_come_whole_and_in_order(new_loop: NewLoop, seed: int) -> None:
    messages = messages_of(seed)

    async def reading(stream: MessageStream, theirs: socket.socket) -> None:
        sending = asyncio.create_task(in_pieces(theirs, framed(messages), seed))
        for message in messages:
            assert await received(stream) == message
        await sending
        assert stream.received == len(framed(messages))

    run(new_loop, reading)


@LOOPS
@pytest.mark.parametrize("seed", range(SEEDS))
def test_messages_go_whole_and_in_order(new_loop: NewLoop, seed: int) -> None:
    messages = messages_of(seed)

    async def writing(stream: MessageStream, theirs: socket.socket) -> None:
        async def taken() -> bytes:
            found = bytearray()
            while len(found) < len(framed(messages)):
                found += await asyncio.get_running_loop().sock_recv(theirs, 100_000)
            return bytes(found)

        taking = asyncio.create_task(taken())
        for message in messages:
            stream.send(bytearray(message) if len(message) % 2 else message)
            await stream.drain()
        assert await taking == framed(messages)

    run(new_loop, writing)


@LOOPS
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_what_was_written_is_told_piece_by_piece(new_loop: NewLoop, is_encrypted: bool) -> None:
    """Where TLS takes everything at once, no more than a piece is given to it before the ones before have gone."""

    async def writing(stream: MessageStream, theirs: socket.socket) -> None:
        gone: list[int] = []
        stream._is_encrypted = is_encrypted
        data = random.Random(1).randbytes(10 << 20)
        delivering = asyncio.create_task(stream.deliver(data, gone.append))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not delivering.done()
        assert (sum(gone) < len(data)) == is_encrypted
        found = bytearray()
        while len(found) < len(data) + 4:
            found += await asyncio.get_running_loop().sock_recv(theirs, 1 << 20)
        await delivering
        assert found == framed([data])
        assert sum(gone) == len(found)

    run(new_loop, writing)


@LOOPS
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("left", [1, 5, 30_000])
def test_a_message_that_is_cut_short_is_none(new_loop: NewLoop, size: int, left: int) -> None:
    """What came before it whole is there."""
    data = framed([b"before", bytes(size)])
    cut = data[: max(len(data) - left, 10)]

    async def reading(stream: MessageStream, theirs: socket.socket) -> None:
        sending = asyncio.create_task(in_pieces(theirs, cut, size))
        sending.add_done_callback(lambda _: theirs.shutdown(socket.SHUT_WR))
        assert await received(stream) == b"before"
        with pytest.raises(EOFError):
            await received(stream)
        stream.send(b"it may still read")  # as clients do that have closed their side
        await stream.drain()
        assert await asyncio.get_running_loop().sock_recv(theirs, 100) == framed([b"it may still read"])

    run(new_loop, reading)


@LOOPS
def test_who_is_not_read_waits(new_loop: NewLoop) -> None:
    """Of what nobody asks for no more is read than may be."""

    async def resting(stream: MessageStream, theirs: socket.socket) -> None:
        messages = [bytes([number]) * 10_000 for number in range(200)]
        sending = asyncio.create_task(in_pieces(theirs, framed(messages), 1))
        assert await received(stream) == messages[0]
        while stream.transport.is_reading():
            await asyncio.sleep(0)
        assert not sending.done()
        assert stream.received <= len(framed(messages[:1])) + AHEAD_BYTES
        for message in messages[1:]:
            assert await received(stream) == message
        await sending

    run(new_loop, resting)


@LOOPS
def test_who_does_not_read_holds_its_sender_up(new_loop: NewLoop) -> None:
    async def writing(stream: MessageStream, theirs: socket.socket) -> None:
        stream.send(bytes(10 << 20))
        waiting = asyncio.create_task(stream.drain())
        for _ in range(100):
            await asyncio.sleep(0)
        assert stream.transport.get_write_buffer_size() > 0
        assert not waiting.done()
        theirs.close()
        with pytest.raises(ConnectionError):
            await waiting
        with pytest.raises(ConnectionError):
            stream.send(b"more")

    run(new_loop, writing)


@LOOPS
def test_all_who_wait_for_their_messages_to_go_are_woken(new_loop: NewLoop) -> None:
    """Several requests of one client may be on their way to its broker."""

    async def writing(stream: MessageStream, theirs: socket.socket) -> None:
        async def send(size: int) -> None:
            stream.send(bytes(size))
            await stream.drain()

        sending = [asyncio.create_task(send(5 << 20)) for _ in range(3)]
        taken, wanted = 0, 3 * (4 + (5 << 20))
        while taken < wanted:
            taken += len(await asyncio.get_running_loop().sock_recv(theirs, 1 << 20))
        await asyncio.gather(*sending)
        sending = [asyncio.create_task(send(5 << 20)) for _ in range(3)]
        for _ in range(100):
            await asyncio.sleep(0)
        theirs.close()
        for lost in sending:
            with pytest.raises(ConnectionError):
                await lost

    run(new_loop, writing)


@LOOPS
def test_what_is_not_taken_is_lost_in_the_end(new_loop: NewLoop) -> None:
    async def closing(stream: MessageStream, theirs: socket.socket) -> None:
        stream.send(bytes(5 << 20))
        await stream.close_within(0.01)
        taken = 0
        while some := len(await asyncio.get_running_loop().sock_recv(theirs, 1 << 20)):
            taken += some
        assert taken < 5 << 20

    run(new_loop, closing)


@LOOPS
def test_a_backlog_of_small_messages_is_read_many_at_a_time(new_loop: NewLoop) -> None:
    async def reading(stream: MessageStream, theirs: socket.socket) -> None:
        reads, many = 0, 20_000
        updated = stream.buffer_updated

        def counted(size: int) -> None:
            nonlocal reads
            reads += 1
            updated(size)

        stream.buffer_updated = counted  # type: ignore[method-assign, assignment]
        sending = asyncio.create_task(in_pieces(theirs, framed([bytes(100)] * many), 1))
        for _ in range(many):
            assert len(await received(stream)) == 100
            await asyncio.sleep(0)
        await sending
        assert reads < many // 50

    run(new_loop, reading)


@LOOPS
def test_whoever_gives_up_in_the_middle_of_a_message_closes(new_loop: NewLoop) -> None:
    """A task that is cancelled leaves nothing that the event loop would read into."""

    async def reading(stream: MessageStream, theirs: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(theirs, framed([bytes(400_000)])[:100_000])
        waiting = asyncio.create_task(received(stream))
        while stream.received < 100_000:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.get_running_loop().sock_sendall(theirs, b"\0\0")
        while stream.received < 100_002:
            await asyncio.sleep(0)

    run(new_loop, reading)


@LOOPS
def test_a_connection_is_made_to_a_server(new_loop: NewLoop) -> None:
    async def body() -> None:
        served: asyncio.Queue[MessageStream] = asyncio.Queue()
        loop: Any = asyncio.get_running_loop()
        server = await loop.create_server(partial(MessageStream, served.put_nowait), "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        stream = await MessageStream.connect(host, port, None)
        other = await served.get()
        stream.send(b"ask")
        assert await received(other) == b"ask"
        other.send(b"answer")
        assert await received(stream) == b"answer"
        other.close()
        with pytest.raises(EOFError):
            await stream.size()
        await other.close_within(60)
        await stream.close_within(60)
        server.close()
        with pytest.raises(OSError, match=r"refused|111"):
            await MessageStream.connect("127.0.0.1", server_port, None)

    server_port = 1  # nobody listens there
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(body())


@LOOPS
@pytest.mark.parametrize("size", SIZES)
def test_a_large_message_grows_as_it_comes_and_as_it_may(new_loop: NewLoop, size: int) -> None:
    async def reading(stream: MessageStream, theirs: socket.socket) -> None:
        message, grown = random.Random(size).randbytes(size), 0

        async def take(more: int) -> None:
            nonlocal grown
            assert more <= max(stream.received, AHEAD_BYTES), "a length alone asks for nothing"
            for _ in range(3):
                await asyncio.sleep(0)
            assert stream.received <= 4 + grown + AHEAD_BYTES, "who is not let in waits"
            grown += more

        sending = asyncio.create_task(in_pieces(theirs, framed([message, b"next"]), size))
        assert await stream.message(await stream.size(), take) == message
        assert grown in (0, size)
        assert (grown == size) or size <= AHEAD_BYTES
        assert await received(stream) == b"next"
        await sending

    run(new_loop, reading)
