"""The link that tests cut: passes on, holds back, delivers late, hangs up."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from integration_tests.links import Link
from integration_tests.patience import PATIENCE_S


@pytest.fixture
def echo() -> Iterator[str]:
    """A server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                while data := connection.recv(100):
                    connection.sendall(data)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(PATIENCE_S)


def connect(link: Link) -> socket.socket:
    host, _, port = link.address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.settimeout(10)
    return connection


def test_what_is_cut_arrives_when_it_is_healed(echo: str) -> None:
    with Link(echo) as link, connect(link) as connection:
        connection.sendall(b"one")
        assert connection.recv(100) == b"one"
        link.cut()
        connection.sendall(b"two")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(100)
        connection.settimeout(10)
        link.heal()
        assert connection.recv(100) == b"two"


def test_a_slow_link_delivers_late_in_order_and_whole(echo: str) -> None:
    with Link(echo) as link, connect(link) as connection:
        link.slow_down(delay_s=0.3)
        began = time.monotonic()
        for part in (b"one", b"two"):
            connection.sendall(part)
        assert receive(connection, 6) == b"onetwo"
        assert time.monotonic() - began >= 0.6, "it is delayed each way"
        link.slow_down()
        connection.sendall(b"three")
        assert receive(connection, 5) == b"three"


def test_a_narrow_link_lets_no_more_through(echo: str) -> None:
    sent = bytes(range(256)) * 200
    with Link(echo) as link, connect(link) as connection:
        link.slow_down(bytes_per_s=100_000)
        began = time.monotonic()
        connection.sendall(sent)
        assert receive(connection, len(sent)) == sent
        assert time.monotonic() - began >= len(sent) / 100_000


def receive(connection: socket.socket, size: int) -> bytes:
    """Exactly so many bytes."""
    found = b""
    while len(found) < size:
        data = connection.recv(size - len(found))
        assert data, "the link hung up"
        found += data
    return found
