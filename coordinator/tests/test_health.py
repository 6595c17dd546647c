"""What a coordinator says of its metrics and health, and where; and that it is asked for them before all else."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rollbridge.base.metrics import Sample
from rollbridge.config import ConnectionSettings
from rollbridge.errors import ConfigError, KafkaUnavailableError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.metadata import Broker
from rollbridge.metadata.picture import coordinator_faults
from rollbridge.metadata.records import Coordinator
from rollbridge.observe.healthcheck import COORDINATOR, VARIABLES, check
from rollbridge_coordinator.config import CoordinatorSettings
from rollbridge_coordinator.core.metric_samples import READINGS_AGE, STANDBY_LAG, standby_samples
from rollbridge_coordinator.core.metrics import ProcessHealth, faults
from rollbridge_coordinator.daemon import health
from rollbridge_coordinator.daemon.health import MetricsBoard, MetricsSheet, ReachWatch
from rollbridge_devcluster.state import free_port


def settings(metrics_address: str) -> CoordinatorSettings:
    return CoordinatorSettings(
        connection=ConnectionSettings(bootstrap_servers="b:1", zookeeper="z:1"),
        name="c",
        metrics_address=metrics_address,
    )


@pytest.mark.parametrize(
    ("known", "found"),
    [
        (ProcessHealth(connected=True, registered=True, answered=True), []),
        (ProcessHealth(connected=False, registered=True, answered=True), ["not connected to ZooKeeper"]),
        (ProcessHealth(connected=True, registered=False, answered=True), ["not registered among the coordinators"]),
        (
            ProcessHealth(connected=False, registered=False, answered=False),
            ["not connected to ZooKeeper", "Kafka does not answer"],
        ),
        (
            ProcessHealth(
                connected=True, registered=True, answered=True, unreachable=["broker 2 at b:9092: no answer"]
            ),
            ["cannot reach broker 2 at b:9092: no answer"],
        ),
        (
            ProcessHealth(connected=True, registered=True, answered=True, ended=["s/a", "s/b"]),
            ["the thread of group s/a has ended", "the thread of group s/b has ended"],
        ),
    ],
)
def test_healthy_is_who_could_lead(known: ProcessHealth, found: list[str]) -> None:
    assert list(faults(known)) == found


class Brokers:
    """Brokers of which some do not answer."""

    def __init__(self) -> None:
        self.silent: dict[int, str] = {}
        self.known = {1: Broker("a", 9092), 2: Broker("b", 9092)}

    def metadata(self, _: object) -> object:
        if not self.known:
            raise KafkaUnavailableError("no broker answers")
        return SimpleNamespace(
            brokers=[SimpleNamespace(node_id=node, host=at.host, port=at.port) for node, at in self.known.items()]
        )

    def within(self, _: object) -> AbstractContextManager[None]:
        return nullcontext()

    def broker_connection(self, node: int, _: Broker) -> object:
        if node in self.silent:
            raise KafkaUnavailableError(self.silent[node])
        return SimpleNamespace(call=lambda *_: None)


def test_a_broker_that_does_not_answer_twice_in_a_row_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, ...]] = []
    leads = [True]
    watch = ReachWatch(KafkaClient("127.0.0.1:1"), lambda: leads[0], lambda: told.append(watch.unreachable))
    brokers: Any = Brokers()
    watch.look(brokers)
    brokers.silent = {2: "no answer within 3 s"}
    watch.look(brokers)
    assert (watch.is_answered, told) == (True, []), "a moment is none"
    brokers.silent = {2: "connection refused"}
    watch.look(brokers)
    watch.look(brokers)
    assert told == [("broker 2 at b:9092: no answer within 3 s",)], "the same is told once"
    [fault] = coordinator_faults("one", replace(Coordinator(1, 1), unreachable=told[0]))
    assert (fault.label, fault.what) == ("coordinator one", f"cannot reach {told[0][0]}")
    del brokers.known[2]
    watch.look(brokers)
    assert told[1:] == [()], "one that the cluster has given up is nobody's fault"
    brokers.known.clear()
    watch.look(brokers)
    assert watch.is_answered, "whoever leads notices by itself"
    leads[0] = False
    watch.look(brokers)
    assert not watch.is_answered


@pytest.mark.logs_defects
def test_a_look_that_meets_a_defect_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "WATCH_S", 0.001)
    watch = ReachWatch(KafkaClient("127.0.0.1:1"), lambda: False, lambda: None)
    looks: list[None] = []

    def look(_: object) -> None:
        looks.append(None)
        if len(looks) == 1:
            raise ValueError("nobody foresees that")
        watch.__exit__()

    monkeypatch.setattr(watch, "look", look)
    watch.run()
    assert len(looks) == 2


def test_metrics_stand_on_the_board_while_they_are_written() -> None:
    board = MetricsBoard()
    first, second = (MetricsSheet(board, group) for group in ("s/a", "s/b"))
    second.put(lambda: standby_samples("s/b", 2, 0))
    first.put(lambda: standby_samples("s/a", 0, 0))
    first.put(lambda: standby_samples("s/a", 1, 0))
    lags = [sample for sample in board.samples() if sample.family is STANDBY_LAG]
    assert lags == [Sample(STANDBY_LAG, ("s/a",), 0), Sample(STANDBY_LAG, ("s/b",), 2)], "no more than once a second"
    first.remove()
    first.remove()
    assert [sample.labels for sample in board.samples() if sample.family is not READINGS_AGE] == [("s/b",), ("s/b",)]


def test_the_age_of_a_leaders_metrics_is_that_at_the_scrape() -> None:
    now_s = 5.0
    board = MetricsBoard(lambda: now_s)
    leader, standby = MetricsSheet(board, "s/a"), MetricsSheet(board, "s/b", is_standby=True)
    leader.put(lambda: standby_samples("s/a", 0, 0))
    standby.put(lambda: standby_samples("s/b", 0, 0))
    now_s = 405.5
    ages = [sample for sample in board.samples() if sample.family is READINGS_AGE]
    assert ages == [Sample(READINGS_AGE, ("s/a",), 400.5)], "of a standby there is none"
    leader.remove()
    assert not [sample for sample in board.samples() if sample.family is READINGS_AGE], "another one leads"


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [("", None), ("0.0.0.0:9464", ("0.0.0.0", 9464)), ("[::1]:0", ("::1", 0)), ("host-1:65535", ("host-1", 65535))],
)
def test_the_address_of_metrics_is_host_and_port(address: str, endpoint: tuple[str, int] | None) -> None:
    assert settings(address).metrics_endpoint == endpoint


@pytest.mark.parametrize("address", ["9464", ":9464", "host", "host:", "host:port", "host:65536", "::1:9464"])
def test_other_addresses_of_metrics_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=f"metrics_address: '{re.escape(address)}' is not HOST:PORT"):
        settings(address)


def test_a_coordinator_that_waits_for_zookeeper_says_so_and_ends_when_it_is_told_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        environment = {**os.environ, VARIABLES[COORDINATOR][1]: f"127.0.0.1:{free_port()}"}
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "rollbridge_coordinator",
                f"--bootstrap-servers={address}",
                f"--zookeeper={address}",
            ],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stderr is not None
            assert any("metrics and health" in line for line in process.stderr)
            # It tries to connect, so what it does first is over.
            silent.accept()[0].close()
            assert check(environment) == (1, "not connected to ZooKeeper\nKafka does not answer")
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.communicate()
