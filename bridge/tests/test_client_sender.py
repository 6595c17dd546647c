"""The thread of an event loop does not wait for the sender of frames: it is told that there is no room."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rollbridge.client.sender import FrameSender
from rollbridge.errors import BackpressureError

NOWHERE = "127.0.0.1:1"
"""Where no broker is: what is queued stays there."""
SMALL, LARGE = b"x" * 100, b"x" * 40_000


@pytest.fixture
def sender() -> Iterator[FrameSender]:
    made = FrameSender(NOWHERE, buffer_bytes=100_000, block_s=3_600)
    made.prompt(threading.get_ident())
    yield made
    made.close(0)


def send(sender: FrameSender, value: bytes) -> None:
    sender.send("topic", 0, b"key", value, lambda fault: None)


def fill(sender: FrameSender, value: bytes) -> None:
    """Send until there is no room; a million frames would be more than there is."""
    for _ in range(1_000_000):
        send(sender, value)


@pytest.mark.parametrize("value", [SMALL, LARGE], ids=["small", "large"])
def test_where_there_is_no_room_it_is_told_at_once(sender: FrameSender, value: bytes) -> None:
    """Any other thread would wait for an hour here."""
    with pytest.raises(BackpressureError, match="full; this was not queued"):
        fill(sender, value)
    assert 100_000 - 2 * len(value) <= sender.bytes <= 100_000 + len(value)
    others = threading.Thread(target=send, args=(sender, value), daemon=True)
    others.start()
    with sender.lock:
        sender.bytes -= 50_000  # as if brokers had taken it
        sender._progress.notify_all()
    others.join()


@pytest.mark.parametrize("value", [SMALL, LARGE], ids=["small", "large"])
def test_while_another_thread_holds_the_lock_it_is_told(sender: FrameSender, value: bytes) -> None:
    """So it is where a broker takes nothing, and whoever writes to it waits."""
    for _ in range(3):
        with sender.lock, pytest.raises(BackpressureError, match="not queued"):
            send(sender, value)
    assert sender.bytes == 0
    assert sender._unsettled() == 0
    while True:  # it does not try again for a moment
        try:
            send(sender, value)
        except BackpressureError:
            continue
        break
    with sender.lock:
        assert sender._unsettled() == 1
