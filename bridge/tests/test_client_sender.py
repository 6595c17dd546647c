"""The thread of an event loop does not wait for the sender of frames: it is told that there is no room."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from rollbridge.client.sender import FrameBatch, FrameSender
from rollbridge.errors import BackpressureError
from rollbridge.kafka.client import KafkaClient

NOWHERE = "127.0.0.1:1"
"""Where no broker is: what is queued stays there."""
SMALL, LARGE = b"x" * 100, b"x" * 40_000


@pytest.fixture
def sender() -> Iterator[FrameSender]:
    made = FrameSender(KafkaClient(NOWHERE), buffer_bytes=100_000, block_s=3_600)
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


def test_closing_waits_for_callbacks_and_for_what_they_send(sender: FrameSender) -> None:
    sent_after: list[bool] = []

    def deliver(_fault: object) -> None:
        while not sender._is_awaited:
            time.sleep(0.001)
        sender.send_soon("topic", 0, b"key", b"value", lambda _: None)
        sent_after.append(sender._stopping)

    batch = FrameBatch(0.0)
    batch.delivered.append(deliver)
    with sender.lock:
        sender._settle(batch)
        sender.wake()
    assert sender.stop(0.5) == 1, "there is no broker"
    assert sent_after == [False]


def test_a_callback_that_would_send_after_the_end_is_no_defect(sender: FrameSender) -> None:
    batch, called = FrameBatch(0.0), []

    def deliver(_fault: object) -> None:
        called.append(True)
        sender.send_soon("topic", 0, b"key", b"value", lambda _: None)

    batch.delivered.append(deliver)
    sender._stopping = True
    sender._tell(batch)
    assert called
