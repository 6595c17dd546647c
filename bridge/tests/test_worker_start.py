"""What Spark's workers set on their connection to Spark, so that small pieces do not wait for acknowledgements."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rollbridge.spark.worker import Prompt, promptly

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="acknowledgements can be asked for on Linux only")

WORKER: dict[str, Any] = {"__name__": "pyspark.worker"}
exec("def main(infile, outfile):\n    return outfile()\n", WORKER)
"""As Spark's workers begin: their module, the name of the function and of its first argument."""


@contextmanager
def connected() -> Iterator[socket.socket]:
    """One end of a connection, whose acknowledgements are delayed."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            delay(one)
            yield one


@pytest.fixture
def end() -> Iterator[socket.socket]:
    """The worker's end of its connection to Spark."""
    with connected() as one:
        yield one


@pytest.fixture
def other() -> Iterator[socket.socket]:
    """A connection that somebody else in the worker has."""
    with connected() as one:
        yield one


@pytest.fixture
def in_worker(monkeypatch: pytest.MonkeyPatch, end: socket.socket) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Runs something as Spark's worker would."""
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    with os.fdopen(os.dup(end.fileno()), "rb") as infile:
        yield lambda work: WORKER["main"](infile, work)


def delay(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
    assert settings(connection)[1] == 0


def settings(connection: socket.socket) -> tuple[int, int]:
    """Whether nothing is kept back, and whether what comes is acknowledged at once."""
    return tuple(  # type: ignore[return-value]  # there are two
        int(connection.getsockopt(socket.IPPROTO_TCP, name) != 0) for name in (socket.TCP_NODELAY, socket.TCP_QUICKACK)
    )


class Reader(Prompt):
    """What Spark sends ahead of its work, with some state."""

    def __init__(self) -> None:
        self.start = 7


def test_each_item_is_acknowledged_before_the_next_is_waited_for(
    end: socket.socket, other: socket.socket, in_worker: Callable[[Callable[[], Any]], Any]
) -> None:
    def sent() -> Iterator[int]:
        for number in range(3):
            assert settings(end) == (1, 1)
            delay(end)
            yield number

    assert in_worker(lambda: list(promptly(sent()))) == [0, 1, 2]
    assert settings(end) == (1, 1)
    assert settings(other) == (0, 0), "it is not Spark's"
    end.sendall(b"still there")


def test_the_arrival_of_an_object_makes_the_worker_prompt(
    end: socket.socket, other: socket.socket, in_worker: Callable[[Callable[[], Any]], Any]
) -> None:
    raw = pickle.dumps(Reader())
    assert settings(end) == (0, 0)
    in_worker(lambda: pickle.loads(raw))
    assert settings(end) == (1, 1)
    assert settings(other) == (0, 0), "it is not Spark's"


@pytest.mark.parametrize("is_closed", [False, True])
def test_what_is_no_connection_or_is_closed_meanwhile_does_no_harm(
    monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    one, two = socket.socketpair()
    with one, two, os.fdopen(os.dup(one.fileno()), "rb") as infile:
        items = WORKER["main"](infile, lambda: promptly(iter(range(2))))
        if is_closed:
            infile.close()
        assert WORKER["main"](infile, lambda: list(items)) == [0, 1]
    assert WORKER["main"](None, lambda: list(promptly(range(2)))) == [0, 1]


def test_other_processes_are_left_alone(end: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_REUSE_WORKER", raising=False)
    with os.fdopen(os.dup(end.fileno()), "rb") as infile:
        assert WORKER["main"](infile, lambda: list(promptly(range(2)))) == [0, 1]
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    assert list(promptly(range(2))) == [0, 1], "nobody of Spark's has called"
    assert settings(end) == (0, 0)
