"""Metrics and health of a gateway: what threads get of them is what its event loop says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rollbridge.base.metrics import Histogram, Sample
from rollbridge.config import ConnectionSettings
from rollbridge.errors import ConfigError, UnavailableError
from rollbridge_gateway.__main__ import PREFIX, FromLoop, connected, main
from rollbridge_gateway.producer.writes import SAVE_S
from rollbridge_gateway.server.metrics import CONNECTIONS, REQUESTS, Counts
from rollbridge_gateway.settings import GatewaySettings


class Counted:
    """What a gateway counts, and on which threads it was asked."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.threads: set[str] = set()
        self.wrong: list[str] = []

    def samples(self) -> Iterator[Sample]:
        """All samples."""
        self.threads.add(threading.current_thread().name)
        yield Sample(CONNECTIONS, (), self.counts.connections)
        for api, histogram in self.counts.requests.items():
            yield Sample(REQUESTS, (api,), histogram.copy())

    def faults(self) -> list[str]:
        """What is wrong."""
        self.threads.add(threading.current_thread().name)
        return self.wrong


@contextmanager
def loop_of_its_own() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs on a thread named ``loop``."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="loop")
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_a_thread_gets_what_the_loop_says() -> None:
    counted = Counted()
    counted.counts.connections = 3
    counted.counts.note("PRODUCE", 0.2)
    with loop_of_its_own() as loop:
        asked = FromLoop(loop, counted)
        samples = {sample.family: sample.value for sample in asked.samples()}
        assert asked.faults() == []
        counted.wrong.append("its lease in ZooKeeper has run out")
        assert asked.faults() == ["its lease in ZooKeeper has run out"]
    assert samples[CONNECTIONS] == 3
    assert counted.threads == {"loop"}
    counted.counts.note("PRODUCE", 0.2)
    seen = samples[REQUESTS]
    assert isinstance(seen, Histogram)
    assert seen.count == 1, "a sample does not change any more"


def test_a_loop_that_stands_still_is_not_healthy() -> None:
    released = threading.Event()
    with loop_of_its_own() as loop:
        loop.call_soon_threadsafe(released.wait)
        asked = FromLoop(loop, Counted(), 0.05)
        try:
            assert asked.faults() == ["its event loop has not answered for 0.05 s"]
            with pytest.raises(UnavailableError, match="has not answered"):
                asked.samples()
        finally:
            released.set()
        assert FromLoop(loop, Counted(), 60).faults() == []
    assert asked.faults() == ["the gateway has ended"]


def test_options_are_variables_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}_METRICS_ADDRESS", "nowhere")
    monkeypatch.setenv(f"{PREFIX}_SESSION_TIMEOUT_S", "7")
    context = main.make_context("gateway", ["--listen", "0.0.0.0:9192"])
    assert context.params["metrics"] == "nowhere"
    assert context.params["session_timeout_s"] == 7.0
    connection = ConnectionSettings(bootstrap_servers="b:1", zookeeper="z:1")
    with pytest.raises(ConfigError, match="metrics: 'nowhere' is not HOST:PORT"):
        GatewaySettings(connection=connection, metrics="nowhere")


def test_no_leader_is_waited_for_longer_than_clients_wait_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("rollbridge_gateway.__main__.connect", lambda *servers, **options: given.update(options))
    connected(GatewaySettings(connection=ConnectionSettings(bootstrap_servers="b:1", zookeeper="z:1")))
    options = given["options"]
    assert max(options.commit_timeout_s, options.admin_timeout_s) < SAVE_S
