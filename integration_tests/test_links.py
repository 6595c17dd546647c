"""The link that tests cut: passes on, holds back, delivers late, hangs up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from integration_tests.links import Link


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
    thread.join(10)


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


def test_a_reset_hangs_up_and_takes_new_connections(echo: str) -> None:
    with Link(echo) as link:
        with connect(link) as connection:
            connection.sendall(b"one")
            assert connection.recv(100) == b"one"
            link.reset()
            assert connection.recv(100) == b""
        with connect(link) as connection:
            connection.sendall(b"two")
            assert connection.recv(100) == b"two"


def test_nobody_behind_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    with Link(address) as link, connect(link) as connection:
        assert connection.recv(100) == b""
