"""Messages on a connection: whole and in order however their bytes come, under both event loops that there are."""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import socket
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop

from rollbridge.base.logs import LIMITER
from rollbridge.base.security import validities
from rollbridge.config import ConnectionSettings
from rollbridge.errors import ConfigError
from rollbridge_gateway.server.framing import AHEAD_BYTES, PIECE_BYTES, Closing, MessageStream, Pace, Traffic
from rollbridge_gateway.server.server import telling
from rollbridge_gateway.settings import GatewaySettings

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


# When a connection is let go, with a clock that the test sets.


def closing(*seen: tuple[float, Traffic], requests_wait: bool = False, answers_wait: bool = False) -> Closing | None:
    """What is said at the last look; nothing before."""
    pace = Pace(0)
    said: Closing | None = None
    for now_s, traffic in seen:
        assert said is None
        said = pace.look(traffic, now_s, requests_wait=requests_wait, answers_wait=answers_wait)
    return said


def test_a_connection_that_asks_for_nothing_is_closed_in_the_end() -> None:
    asked = Traffic(requests=1, received=0)
    assert closing((9, Traffic())) is None
    assert closing((10, Traffic())) is Closing.MUTE
    assert closing((599, asked), (1198, asked)) is None
    assert closing((599, asked), (1199, asked)) is Closing.IDLE


def test_the_first_request_has_to_come_soon_unless_there_is_no_room_for_it() -> None:
    begun, coming = Traffic(requests=1, is_within=True), Traffic(requests=1, received=1, is_within=True)
    assert closing((9, begun), (10, begun)) is Closing.MUTE
    assert closing((9, begun), (10, coming), (39, coming)) is None, "a large one may take its time"
    assert closing((29, Traffic()), requests_wait=True) is None
    assert closing((30, Traffic()), requests_wait=True) is Closing.MUTE


def test_a_request_under_way_may_take_its_time_and_rest_begins_behind_it() -> None:
    waits = Traffic(requests=1, under_way=1)
    done = Traffic(requests=1)
    assert closing((1, waits), (5_000, waits), (5_599, done)) is None
    assert closing((1, waits), (5_000, waits), (5_600, done)) is Closing.IDLE


def test_the_rest_of_a_request_has_to_come_piece_by_piece() -> None:
    begun = Traffic(requests=2, is_within=True)
    more = Traffic(requests=2, received=1, is_within=True)
    assert closing((10, begun), (39, begun)) is None
    assert closing((10, begun), (40, begun)) is Closing.UNFINISHED
    assert closing((10, begun), (39, more), (68, more)) is None
    assert closing((10, begun), (39, more), (69, more)) is Closing.UNFINISHED


def test_requests_before_it_give_a_request_no_time() -> None:
    """A client that always has something under way does not hold up a half request beside it."""
    begun = Traffic(requests=2, is_within=True, under_way=1)
    assert closing((10, begun), (25, begun), (40, begun)) is Closing.UNFINISHED


def test_while_others_wait_a_whole_request_has_no_more_time_than_a_piece() -> None:
    looks = [(10 + 5 * at, Traffic(requests=2, received=at, is_within=True)) for at in range(7)]
    assert closing(*looks) is None
    assert closing(*looks, requests_wait=True) is Closing.UNFINISHED
    several = [(10 + 5 * at, Traffic(requests=at + 2, is_within=True)) for at in range(50)]
    assert closing(*several, requests_wait=True) is None


def test_answers_have_to_be_taken_piece_by_piece() -> None:
    full = Traffic(requests=1, under_way=1, unsent=PIECE_BYTES, held=PIECE_BYTES)
    drop = Traffic(requests=1, under_way=1, unsent=PIECE_BYTES - 5, taken=5, held=PIECE_BYTES)
    piece = Traffic(requests=1, under_way=1, unsent=7, taken=PIECE_BYTES, held=PIECE_BYTES)
    assert closing((599, full)) is None
    assert closing((599, full), (600, drop)) is Closing.UNTAKEN
    assert closing((599, full), (600, piece), (1199, piece)) is None
    assert closing((599, full), (600, piece), (1200, piece)) is Closing.UNTAKEN


def test_while_others_wait_for_their_room_answers_have_less_time() -> None:
    full = Traffic(requests=1, under_way=1, unsent=PIECE_BYTES, held=PIECE_BYTES)
    stuck = Traffic(requests=1, under_way=1, held=PIECE_BYTES)
    little = Traffic(requests=1, under_way=1, held=PIECE_BYTES - 1)
    for traffic in (full, stuck):
        assert closing((29, traffic), answers_wait=True) is None
        assert closing((29, traffic), (30, traffic), answers_wait=True) is Closing.UNTAKEN
    assert closing((29, stuck), (10_000, stuck)) is None
    assert closing((29, little), (10_000, little), answers_wait=True) is None


@pytest.mark.parametrize(
    "traffic", [Traffic(requests=2, is_stranger=True), Traffic(requests=9, under_way=1, is_stranger=True)]
)
def test_a_login_has_a_limit_whatever_the_client_does_meanwhile(traffic: Traffic) -> None:
    assert closing((29, traffic)) is None
    assert closing((29, traffic), (30, traffic)) is Closing.LOGIN


# What clients are told when TLS fails, and certificates that run out.


CERTIFICATES = Path(__file__).parents[2] / "integration_tests/certificates"
SERVER, AUTHORITY, STRANGER = (str(CERTIFICATES / name) for name in ("server.pem", "ca.pem", "stranger.pem"))
VERSIONS = (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)


def settings(certificate: str = SERVER) -> GatewaySettings:
    return GatewaySettings(
        connection=ConnectionSettings(bootstrap_servers="k:1", zookeeper="z:1"),
        certificate=certificate,
        client_ca=AUTHORITY,
    )


def handshake(port: int, version: ssl.TLSVersion, authority: str, certificate: str | None) -> str:
    """What a client is told."""
    context = ssl.create_default_context(cafile=authority)
    context.maximum_version = version
    if certificate is not None:
        context.load_cert_chain(certificate, password="only-a-test")
    with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        try:
            with context.wrap_socket(raw, server_hostname="127.0.0.1") as connection:
                return connection.recv(5).decode()
        except ssl.SSLError as fault:
            return str(fault.reason)


def told(failed: Callable[[], None], *client: object) -> str:
    """What a client of a server like a gateway's is told."""

    async def ask() -> str:
        context = settings().tls_context()
        assert context is not None
        context.sslobject_class = telling(failed)
        loop, greetings = asyncio.get_running_loop(), []

        async def greet(stream: MessageStream) -> None:
            with suppress(OSError):
                await stream.encrypt(context, 60)
                stream.transport.write(b"hello")

        def opened(stream: MessageStream) -> None:
            greetings.append(loop.create_task(greet(stream)))

        server = await loop.create_server(lambda: MessageStream(opened), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            found = await asyncio.to_thread(handshake, port, *client)  # type: ignore[arg-type]
            await asyncio.wait(greetings)
            return found

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(ask())


@pytest.mark.parametrize("version", VERSIONS)
def test_a_client_without_a_certificate_gets_an_alert_and_the_log_says_why(
    version: ssl.TLSVersion, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMITER, "filter", lambda record: True)
    failures: list[None] = []
    with caplog.at_level(logging.WARNING):
        found = told(lambda: failures.append(None), version, AUTHORITY, None)
    expected = {VERSIONS[0]: "SSLV3_ALERT_HANDSHAKE_FAILURE", VERSIONS[1]: "TLSV13_ALERT_CERTIFICATE_REQUIRED"}
    assert found == expected[version]
    assert "tls.refused reason='PEER_DID_NOT_RETURN_A_CERTIFICATE'" in caplog.text
    assert len(failures) == 1


@pytest.mark.parametrize("version", VERSIONS)
def test_one_of_another_authority_is_told_so(version: ssl.TLSVersion, tmp_path: Path) -> None:
    mine = made(tmp_path, 30)
    assert told(lambda: None, version, AUTHORITY, str(mine)) == "TLSV1_ALERT_UNKNOWN_CA"


def test_one_that_does_not_trust_the_gateway_is_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMITER, "filter", lambda record: True)
    with caplog.at_level(logging.WARNING):
        assert told(lambda: None, VERSIONS[1], STRANGER, None) == "CERTIFICATE_VERIFY_FAILED"
    assert "tls.refused reason='TLSV1_ALERT_UNKNOWN_CA'" in caplog.text


@pytest.mark.parametrize("version", VERSIONS)
def test_who_has_one_gets_in(version: ssl.TLSVersion) -> None:
    assert told(lambda: pytest.fail("nothing has failed"), version, AUTHORITY, SERVER) == "hello"


def made(folder: Path, days: int) -> Path:
    """A certificate with its key that runs out after so many days."""
    path = folder / "made.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-days", str(days)]
    subprocess.run([*command, "-keyout", str(path), "-out", f"{path}.crt"], check=True, capture_output=True)
    with path.open("ab") as file, Path(f"{path}.crt").open("rb") as crt:
        shutil.copyfileobj(crt, file)
    return path


def test_a_certificate_that_has_run_out_is_refused_and_one_that_soon_will_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checked = settings(str(made(tmp_path, 20)))
    [(begin, until)] = validities(checked.certificate)
    with caplog.at_level(logging.WARNING):
        checked.check_certificate(until - timedelta(days=15))
        assert not caplog.records
        checked.check_certificate(until - timedelta(days=13))
    assert f"certificate.expires file={checked.certificate} until={until:%Y-%m-%d}" in caplog.text
    with pytest.raises(ConfigError, match=r"made\.pem has run out on .* nothing was begun; renew it"):
        checked.check_certificate(until)
    with pytest.raises(ConfigError, match=rf"made\.pem is valid from {begin:%Y-%m-%d} .* nothing was begun; start it"):
        checked.check_certificate(begin - timedelta(seconds=1))
    checked.check_certificate(begin)


def test_an_authoritys_that_has_run_out_is_told_and_keeps_no_gateway_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for days, name in ((20, "own"), (10, "authority")):
        (tmp_path / name).mkdir()
        made(tmp_path / name, days)
    chain = tmp_path / "chain.pem"
    chain.write_text("".join((tmp_path / name / "made.pem").read_text() for name in ("own", "authority")))
    checked = settings(str(chain))
    own, authority = (item.end for item in validities(str(chain)))
    with caplog.at_level(logging.WARNING):
        checked.check_certificate(authority + timedelta(days=1))
    assert f"certificate.expires file={chain} until={authority:%Y-%m-%d}" in caplog.text
    with pytest.raises(ConfigError, match=f"has run out on {own:%Y-%m-%d}"):
        checked.check_certificate(own)
