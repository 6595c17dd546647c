"""What Spark's workers set on their connections, so that small pieces do not wait for acknowledgements."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Iterator

import pytest

from rollbridge.spark.prompt import Prompt, be_prompt, promptly

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="acknowledgements can be asked for on Linux only")


@pytest.fixture
def end() -> Iterator[socket.socket]:
    """One end of a connection, whose acknowledgements are delayed."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connected:
        accepted, _ = server.accept()
        with accepted:
            delay(connected)
            yield connected


@pytest.fixture
def in_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")


def delay(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
    assert settings(connection)[1] == 0


def settings(connection: socket.socket) -> tuple[int, int]:
    """Whether nothing is kept back, and whether what comes is acknowledged at once."""
    return tuple(  # type: ignore[return-value]  # there are two
        int(connection.getsockopt(socket.IPPROTO_TCP, name) != 0) for name in (socket.TCP_NODELAY, socket.TCP_QUICKACK)
    )


@pytest.mark.usefixtures("in_worker")
def test_connections_become_prompt_and_stay_open(end: socket.socket) -> None:
    be_prompt()
    assert settings(end) == (1, 1)
    end.sendall(b"still there")


@pytest.mark.usefixtures("in_worker")
def test_each_item_is_acknowledged_before_the_next_is_waited_for(end: socket.socket) -> None:
    def sent() -> Iterator[int]:
        for number in range(3):
            assert settings(end) == (1, 1)
            delay(end)
            yield number

    assert list(promptly(sent())) == [0, 1, 2]
    assert settings(end) == (1, 1)


class Reader(Prompt):
    def __init__(self, what: str) -> None:
        self.what = what


@pytest.mark.usefixtures("in_worker")
def test_the_arrival_of_an_object_makes_the_worker_prompt(end: socket.socket) -> None:
    raw = pickle.dumps(Reader("x"))
    assert settings(end) == (0, 0)
    assert pickle.loads(raw).what == "x"
    assert settings(end) == (1, 1)


@pytest.mark.usefixtures("in_worker")
def test_what_is_no_connection_or_is_closed_meanwhile_does_no_harm(end: socket.socket) -> None:
    left, right = socket.socketpair()
    one, other = os.pipe()
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with left, right, datagrams:
        items = promptly(iter(range(2)))
        assert next(items) == 0
        end.close()
        os.close(one)
        os.close(other)
        assert list(items) == [1]


def test_other_processes_are_left_alone(end: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_REUSE_WORKER", raising=False)
    be_prompt()
    assert list(promptly(range(2))) == [0, 1]
    assert pickle.loads(pickle.dumps(Reader("x"))).what == "x"
    assert settings(end) == (0, 0)
