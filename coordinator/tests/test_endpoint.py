"""Metrics and health over HTTP, and what a container's health check makes of them."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
from prometheus_client.openmetrics import parser as openmetrics

from rollbridge.errors import ConfigError, LocalEnvironmentError
from rollbridge.metrics import SampleCollector
from rollbridge.model.metrics import Sample
from rollbridge_coordinator.config import CoordinatorSettings
from rollbridge_coordinator.healthcheck import VARIABLE, check
from rollbridge_coordinator.shell.endpoint import Endpoint, MetricsBoard, MetricsFile
from rollbridge_coordinator.state.families import COUNTS, READINGS_AGE, STANDBY_HELD, STANDBY_LAG, standby_samples
from rollbridge_coordinator.state.metrics import Vitals, faults
from rollbridge_devcluster.state import free_port


def settings(metrics_address: str) -> CoordinatorSettings:
    return CoordinatorSettings(bootstrap_servers="b:1", zookeeper="z:1", name="c", metrics_address=metrics_address)


@contextmanager
def endpoint(wrong: list[str], samples: Iterable[Sample] = (), host: str = "127.0.0.1") -> Iterator[Endpoint]:
    kept = list(samples)
    with Endpoint(host, 0, SampleCollector(lambda: kept), lambda: wrong) as serving:
        yield serving


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, str | None, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.getheader("Content-Type"), response.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("vitals", "found"),
    [
        (Vitals(connected=True, registered=True, answered=True), []),
        (Vitals(connected=False, registered=True, answered=True), ["not connected to ZooKeeper"]),
        (Vitals(connected=True, registered=False, answered=True), ["not registered among the coordinators"]),
        (
            Vitals(connected=False, registered=False, answered=False),
            ["not connected to ZooKeeper", "Kafka does not answer"],
        ),
        (
            Vitals(connected=True, registered=True, answered=True, ended=["s/a", "s/b"]),
            ["the thread of group s/a has ended", "the thread of group s/b has ended"],
        ),
    ],
)
def test_healthy_is_who_could_lead(vitals: Vitals, found: list[str]) -> None:
    assert list(faults(vitals)) == found


def test_metrics_stand_on_the_board_while_they_are_written() -> None:
    board = MetricsBoard()
    first, second = (MetricsFile("", group, board=board) for group in ("s/a", "s/b"))
    second.write(lambda: standby_samples("s/b", 2, 0))
    first.write(lambda: standby_samples("s/a", 0, 0))
    first.write(lambda: standby_samples("s/a", 1, 0))
    lags = [sample for sample in board.samples() if sample.family is STANDBY_LAG]
    assert lags == [Sample(STANDBY_LAG, ("s/a",), 0), Sample(STANDBY_LAG, ("s/b",), 2)], "no more than once a second"
    first.remove()
    first.remove()
    assert [sample.labels for sample in board.samples() if sample.family is not READINGS_AGE] == [("s/b",), ("s/b",)]


def test_the_age_of_a_leaders_metrics_is_that_at_the_scrape() -> None:
    now_s = 5.0
    board = MetricsBoard(lambda: now_s)
    leader, standby = MetricsFile("", "s/a", board=board), MetricsFile("", "s/b", ".standby", board)
    leader.write(lambda: standby_samples("s/a", 0, 0))
    standby.write(lambda: standby_samples("s/b", 0, 0))
    now_s = 405.5
    ages = [sample for sample in board.samples() if sample.family is READINGS_AGE]
    assert ages == [Sample(READINGS_AGE, ("s/a",), 400.5)], "of a standby there is none"
    leader.remove()
    assert not [sample for sample in board.samples() if sample.family is READINGS_AGE], "another one leads"


def test_the_endpoint_serves_metrics_and_health() -> None:
    wrong: list[str] = []
    with endpoint(wrong, standby_samples("s/a", None, 2)) as serving:
        status, kind, body = ask(serving.port, "/metrics")
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert body.decode() == (
            f"# HELP rollbridge_standby_lag_messages {STANDBY_LAG.about}\n"
            "# TYPE rollbridge_standby_lag_messages gauge\n"
            'rollbridge_standby_lag_messages{group="s/a"} -1.0\n'
            f"# HELP rollbridge_standby_transactions {STANDBY_HELD.about}\n"
            "# TYPE rollbridge_standby_transactions gauge\n"
            'rollbridge_standby_transactions{group="s/a"} 2.0\n'
        )
        assert ask(serving.port, "/healthz?verbose") == (200, "text/plain; charset=utf-8", b"ok\n")
        assert ask(serving.port, "/metrics", "HEAD")[0::2] == (200, b"")
        wrong += ["not connected to ZooKeeper", "Kafka does not answer"]
        status, _, body = ask(serving.port, "/healthz")
        assert (status, body) == (503, b"not connected to ZooKeeper\nKafka does not answer\n")
        assert ask(serving.port, "/")[0] == 404
        assert ask(serving.port, "/metrics", "POST")[0] == 501
    with pytest.raises(ConnectionRefusedError):
        ask(serving.port, "/healthz")


def test_a_client_gets_the_format_that_it_accepts() -> None:
    with endpoint([], [Sample(COUNTS["scales"], ("s/a",), 3)]) as serving:
        status, kind, body = ask(serving.port, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert (status, (kind or "").partition(";")[0]) == (200, "application/openmetrics-text")
        assert body.endswith(b"# EOF\n")
        [family] = openmetrics.text_string_to_metric_families(body.decode())  # type: ignore[no-untyped-call]
        assert (family.name, family.type, family.documentation) == (
            "rollbridge_scales",
            "counter",
            COUNTS["scales"].about,
        )


def test_a_client_that_says_nothing_keeps_nobody_waiting() -> None:
    with endpoint([]) as serving, socket.create_connection(("127.0.0.1", serving.port)):
        assert ask(serving.port, "/healthz")[0] == 200


def test_an_address_that_can_not_be_used_is_refused() -> None:
    with endpoint([]) as serving, pytest.raises(LocalEnvironmentError, match=f"127.0.0.1:{serving.port}: .*in use"):
        Endpoint("127.0.0.1", serving.port, SampleCollector(list), list)


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


def test_the_health_check_says_what_the_coordinator_says() -> None:
    wrong: list[str] = []
    with endpoint(wrong, host="0.0.0.0") as serving:
        environment = {VARIABLE: f"0.0.0.0:{serving.port}"}
        assert check(environment) == (0, "ok")
        wrong.append("Kafka does not answer")
        assert check(environment) == (1, "Kafka does not answer")
    code, said = check(environment)
    assert (code, said.partition(":")[0]) == (1, "the coordinator does not answer")


@pytest.mark.parametrize("address", [None, "", "9464", ":9464", "host:"])
def test_the_health_check_fails_without_an_address(address: str | None) -> None:
    assert check({} if address is None else {VARIABLE: address})[0] == 1


def test_a_coordinator_that_waits_for_zookeeper_says_so_and_ends_when_it_is_told_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        environment = {**os.environ, VARIABLE: f"127.0.0.1:{free_port()}"}
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
            assert any("metrics and health at port" in line for line in process.stderr)
            # It tries to connect, so what it does first is over.
            silent.accept()[0].close()
            assert check(environment) == (1, "not connected to ZooKeeper\nKafka does not answer")
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.communicate()
