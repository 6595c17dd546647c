"""Metrics and health over HTTP, and what a container's health check makes of them."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rollbridge.errors import ConfigError, LocalEnvironmentError
from rollbridge_coordinator.config import CoordinatorSettings
from rollbridge_coordinator.healthcheck import VARIABLE, check
from rollbridge_coordinator.shell.endpoint import Endpoint, MetricsBoard, MetricsFile
from rollbridge_coordinator.state.metrics import Vitals, coordinator_lines, faults, joined, process_lines, standby_lines
from rollbridge_devcluster.state import free_port

SAMPLE = re.compile(r'[a-z_]+(\{([a-z_]+="([^"\\\n]|\\["\\n])*",?)+\})? -?[0-9.e+]+')


def settings(metrics_address: str) -> CoordinatorSettings:
    return CoordinatorSettings(bootstrap_servers="b:1", zookeeper="z:1", name="c", metrics_address=metrics_address)


@contextmanager
def endpoint(wrong: list[str], metrics: str = "a 1\n", host: str = "127.0.0.1") -> Iterator[Endpoint]:
    with Endpoint(host, 0, lambda: metrics, lambda: wrong) as serving:
        yield serving


def ask(port: int, path: str, method: str = "GET") -> tuple[int, str | None, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request(method, path)
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


def test_all_samples_of_a_metric_stand_together_under_one_head() -> None:
    text = joined([standby_lines("s/a", None, 2), standby_lines("s/b", 7, 0)])
    assert text.splitlines() == [
        "# TYPE rollbridge_standby_lag_messages gauge",
        'rollbridge_standby_lag_messages{group="s/a"} -1',
        'rollbridge_standby_lag_messages{group="s/b"} 7',
        "# TYPE rollbridge_standby_transactions gauge",
        'rollbridge_standby_transactions{group="s/a"} 2',
        'rollbridge_standby_transactions{group="s/b"} 0',
    ]


def test_every_line_is_one_that_prometheus_reads() -> None:
    about = coordinator_lines('a "b"\\\n', "1.0", healthy=True, groups=3, led=2)
    own = process_lines(cpu_s=1.5, resident_bytes=1 << 30, open_files=9, started_s=1.7e9)
    lines = joined([about, own]).splitlines()
    assert r'rollbridge_coordinator_info{name="a \"b\"\\\n",version="1.0"} 1' in lines
    assert "rollbridge_coordinator_healthy 1" in lines
    assert "rollbridge_coordinator_groups_led 2" in lines
    assert [line for line in lines if not line.startswith("# TYPE ") and not SAMPLE.fullmatch(line)] == []


def test_metrics_stand_on_the_board_while_they_are_written() -> None:
    board = MetricsBoard()
    first, second = (MetricsFile("", group, board=board) for group in ("s/a", "s/b"))
    second.write(lambda: ["b 1"])
    first.write(lambda: ["a 1"])
    first.write(lambda: ["a 2"])
    assert board.sheets() == [["a 1"], ["b 1"]], "by name, and no more than once a second"
    first.remove()
    first.remove()
    assert board.sheets() == [["b 1"]]


def test_the_endpoint_serves_metrics_and_health() -> None:
    wrong: list[str] = []
    with endpoint(wrong, "rollbridge_x 1\n") as serving:
        assert ask(serving.port, "/metrics") == (200, "text/plain; version=0.0.4; charset=utf-8", b"rollbridge_x 1\n")
        assert ask(serving.port, "/healthz?verbose") == (200, "text/plain; charset=utf-8", b"ok\n")
        assert ask(serving.port, "/metrics", "HEAD")[0::2] == (200, b"")
        wrong += ["not connected to ZooKeeper", "Kafka does not answer"]
        status, _, body = ask(serving.port, "/healthz")
        assert (status, body) == (503, b"not connected to ZooKeeper\nKafka does not answer\n")
        assert ask(serving.port, "/")[0] == 404
        assert ask(serving.port, "/metrics", "POST")[0] == 501
    with pytest.raises(ConnectionRefusedError):
        ask(serving.port, "/healthz")


def test_a_client_that_says_nothing_keeps_nobody_waiting() -> None:
    with endpoint([]) as serving, socket.create_connection(("127.0.0.1", serving.port)):
        assert ask(serving.port, "/healthz")[0] == 200


def test_an_address_that_can_not_be_used_is_refused() -> None:
    with endpoint([]) as serving, pytest.raises(LocalEnvironmentError, match=f"127.0.0.1:{serving.port}: .*in use"):
        Endpoint("127.0.0.1", serving.port, str, list)


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
