"""Presence: what is taken for the end of a process, and what is not."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rollbridge.errors import LocalEnvironmentError
from rollbridge_coordinator.daemon import liveness
from rollbridge_coordinator.daemon.liveness import Liveness, PeerWatch, greeting, local_address

WAIT_S = 30.0
"""Far longer than anything here takes."""


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "AGAIN_S", 0.02)
    monkeypatch.setattr(liveness, "DIAL_S", 1.0)


@contextmanager
def peer_watch(address: str, life: str, *, is_there: bool = True) -> Iterator[threading.Event]:
    """Over one that is there; the event is set when its process is taken to have ended."""
    ended = threading.Event()
    watching = PeerWatch("one", address, life, ended.set)
    watching.start()
    try:
        assert not is_there or watching.seen.wait(WAIT_S)
        yield ended
    finally:
        watching.stop()
        watching.join(WAIT_S)
        assert not watching.is_alive()


class Impostor:
    """Listens at a port, and says what it is told to whoever comes."""

    def __init__(self, port: int = 0) -> None:
        self.server = socket.create_server(("127.0.0.1", port))
        self.port = self.server.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"

    def answer(self, said: bytes) -> socket.socket:
        self.server.settimeout(WAIT_S)
        connection, _ = self.server.accept()
        connection.sendall(said)
        return connection


PROGRAM = """
import sys, threading
from rollbridge_coordinator.daemon.liveness import Liveness
with Liveness("one", "127.0.0.1") as presence:
    print(presence.address, presence.life, flush=True)
    threading.Event().wait()
"""


def test_a_process_that_is_killed_is_seen_to_end_and_one_that_stands_still_is_not() -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address, life = process.stdout.readline().split()
        with peer_watch(address, life) as ended, peer_watch(address, life) as also:
            process.send_signal(signal.SIGSTOP)
            assert not ended.wait(1.0)
            process.kill()
            assert ended.wait(WAIT_S)
            assert also.wait(WAIT_S)
    finally:
        process.kill()
        process.wait(WAIT_S)
        if process.stdout is not None:
            process.stdout.close()


def test_one_that_was_never_seen_is_not_said_to_have_ended() -> None:
    """Its address may be another's here: that of this machine's own loopback, above all."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with peer_watch(f"127.0.0.1:{port}", "0" * 32, is_there=False) as ended:
        assert not ended.wait(0.5)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.0 400 Bad Request\r\n",
        greeting("another", "0" * 32),
        greeting("one two", "0" * 32),
        greeting("one", "no life"),
        greeting("one", "1" * 32)[:-1],
    ],
)
def test_whoever_else_answers_there_says_nothing(said: bytes) -> None:
    there = Impostor()
    with there.server, peer_watch(there.address, "0" * 32, is_there=False) as ended:
        there.answer(greeting("one", "0" * 32)).close()
        for _ in range(3):
            there.answer(said).close()
        assert not ended.is_set()


def test_a_connection_that_is_lost_is_made_again() -> None:
    there = Impostor()
    with there.server, peer_watch(there.address, "0" * 32, is_there=False) as ended:
        for _ in range(5):
            there.answer(greeting("one", "0" * 32)).close()
        assert not ended.is_set()


def test_a_port_that_is_open_for_a_moment_longer_than_its_connections_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(liveness, "AGAIN_S", 100 * WAIT_S)
    life = "f" * 32
    dying = Impostor()
    with peer_watch(dying.address, life, is_there=False) as ended:
        dying.answer(greeting("one", life)).close()
        dying.answer(b"").close()
        dying.server.close()
        assert ended.wait(WAIT_S)


def test_the_next_life_at_the_same_port_ends_the_one_before() -> None:
    there = Impostor()
    with there.server, peer_watch(there.address, "0" * 32, is_there=False) as ended:
        there.answer(greeting("one", "0" * 32)).close()
        there.answer(greeting("one", "1" * 32)).close()
        assert ended.wait(WAIT_S)


def test_whoever_talks_or_comes_too_much_is_sent_away_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "CONNECTIONS_MAX", 2)
    with Liveness("one", "127.0.0.1") as there, peer_watch(there.address, there.life) as ended:
        host, _, port = there.address.partition(":")
        with socket.create_connection((host, int(port)), WAIT_S) as talker:
            assert talker.makefile("rb").readline() == greeting("one", there.life)
            talker.sendall(b"GET / HTTP/1.0\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert talker.recv(99) == b""
        with socket.create_connection((host, int(port)), WAIT_S) as one:
            assert one.makefile("rb").readline() == greeting("one", there.life)
            with socket.create_connection((host, int(port)), WAIT_S) as many:
                assert many.recv(99) == b""
        assert not ended.is_set()


def test_a_port_that_is_taken_is_named() -> None:
    taken = Impostor()
    with taken.server, pytest.raises(LocalEnvironmentError, match=str(taken.port)):
        Liveness("one", "127.0.0.1", taken.port)


def test_the_address_is_the_one_from_which_zookeeper_is_reached() -> None:
    assert local_address("127.0.0.1:2181/chroot") == "127.0.0.1"
    assert local_address("nowhere.invalid:2181,127.0.0.1:2181") == "127.0.0.1"
    assert local_address("nowhere.invalid:2181") is None
