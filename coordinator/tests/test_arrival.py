"""A coordinator that waits at its start for servers: what it says, and what ends it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from rollbridge.errors import AuthenticationError, KafkaUnavailableError, UnavailableError
from rollbridge_coordinator.shell import arrival
from rollbridge_coordinator.shell.arrival import Arrival, StoppedWaitingError

KAFKA = "Kafka at broker:9092"


class Pauses(threading.Event):
    """An event that makes time pass instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1_000.0

    def wait(self, timeout: float | None = None) -> bool:
        """Let the pause pass."""
        assert timeout is not None
        self.now_s += timeout
        return self.is_set()


def failing(times: int, then: Callable[[], str] = lambda: "there") -> Callable[[], str]:
    """An attempt that fails at first."""
    left = iter(range(times))

    def attempt() -> str:
        if next(left, None) is None:
            return then()
        raise KafkaUnavailableError("no broker answers")

    return attempt


@pytest.fixture
def pauses() -> Pauses:
    return Pauses()


def waiting(pauses: Pauses, wait_s: float = arrival.FOR_EVER) -> Arrival:
    return Arrival(wait_s, pauses, lambda: pauses.now_s)


def test_servers_that_answer_at_once_are_not_spoken_of(pauses: Pauses, caplog: pytest.LogCaptureFixture) -> None:
    assert waiting(pauses).until(KAFKA, failing(0)) == "there"
    assert not caplog.records


def test_it_waits_and_says_so_once_and_then_each_minute(pauses: Pauses, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    present = waiting(pauses)
    seen: list[str] = []

    def found() -> str:
        seen.append(present.waits_for)
        return "there"

    assert present.until(KAFKA, failing(200, found)) == "there"
    took_s = pauses.now_s - 1_000
    assert took_s > 5 * arrival.TOLD_S
    *waits, answers = [record.getMessage() for record in caplog.records]
    assert took_s // arrival.TOLD_S <= len(waits) <= took_s // arrival.TOLD_S + 1
    assert waits[0].startswith("waits for Kafka at broker:9092 since 0 s: no broker answers")
    assert "they answer, after" in answers
    assert "waits for Kafka at broker:9092 since" in seen[0], "what /healthz shows meanwhile"
    assert present.waits_for == ""


@pytest.mark.parametrize("wait_s", [0, 30])
def test_the_last_error_is_told_when_the_time_is_up(pauses: Pauses, wait_s: float) -> None:
    with pytest.raises(UnavailableError, match="no broker answers"):
        waiting(pauses, wait_s).until(KAFKA, failing(10_000))
    assert wait_s <= pauses.now_s - 1_000 <= wait_s + arrival.PAUSE_MAX_S


def test_the_time_counts_for_all_servers_together(pauses: Pauses) -> None:
    present = waiting(pauses, 30)
    present.until("ZooKeeper", failing(5))
    with pytest.raises(UnavailableError):
        present.until(KAFKA, failing(10_000))
    assert pauses.now_s - 1_000 <= 30 + arrival.PAUSE_MAX_S


def test_whoever_is_to_end_waits_no_longer(pauses: Pauses) -> None:
    pauses.set()
    with pytest.raises(StoppedWaitingError, match="asked to end while it waited for Kafka"):
        waiting(pauses).until(KAFKA, failing(10_000))


def test_what_waiting_cannot_mend_ends_it_at_once(pauses: Pauses) -> None:
    def refused() -> str:
        raise AuthenticationError("refused our credentials")

    with pytest.raises(AuthenticationError):
        waiting(pauses).until(KAFKA, refused)
    assert pauses.now_s == 1_000
