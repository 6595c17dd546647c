"""Metrics and health over HTTP, within bounds, and what a container's health check makes of them."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from prometheus_client.openmetrics import parser as openmetrics

from rollbridge.errors import KafkaUnavailableError, LocalEnvironmentError
from rollbridge.metrics import SampleCollector
from rollbridge.model.metrics import Family, FamilyKind, Sample
from rollbridge.serving import http_service
from rollbridge.serving.endpoint import Endpoint, ProcessSamples
from rollbridge.serving.healthcheck import COORDINATOR, VARIABLES, check
from rollbridge.serving.http_service import CONNECTIONS_MAX

LAG = Family("rollbridge_lag_messages", FamilyKind.GAUGE, "How far it is behind.", ("group",))
HELD = Family("rollbridge_transactions", FamilyKind.GAUGE, "What it holds.", ("group",))
SCALES = Family("rollbridge_scales_total", FamilyKind.COUNTER, "How often it was scaled.", ("group",))


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


def test_the_endpoint_serves_metrics_and_health() -> None:
    wrong: list[str] = []
    with endpoint(wrong, [Sample(LAG, ("s/a",), -1), Sample(HELD, ("s/a",), 2)]) as serving:
        status, kind, body = ask(serving.port, "/metrics")
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert body.decode() == (
            f"# HELP rollbridge_lag_messages {LAG.about}\n"
            "# TYPE rollbridge_lag_messages gauge\n"
            'rollbridge_lag_messages{group="s/a"} -1.0\n'
            f"# HELP rollbridge_transactions {HELD.about}\n"
            "# TYPE rollbridge_transactions gauge\n"
            'rollbridge_transactions{group="s/a"} 2.0\n'
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
    with endpoint([], [Sample(SCALES, ("s/a",), 3)]) as serving:
        status, kind, body = ask(serving.port, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert (status, (kind or "").partition(";")[0]) == (200, "application/openmetrics-text")
        assert body.endswith(b"# EOF\n")
        [family] = openmetrics.text_string_to_metric_families(body.decode())  # type: ignore[no-untyped-call]
        assert (family.name, family.type, family.documentation) == (
            "rollbridge_scales",
            "counter",
            SCALES.about,
        )


def test_a_client_that_says_nothing_keeps_nobody_waiting() -> None:
    with endpoint([]) as serving, socket.create_connection(("127.0.0.1", serving.port)):
        assert ask(serving.port, "/healthz")[0] == 200


def test_an_address_that_can_not_be_used_is_refused() -> None:
    with endpoint([]) as serving, pytest.raises(LocalEnvironmentError, match=f"127.0.0.1:{serving.port}: .*in use"):
        Endpoint("127.0.0.1", serving.port, SampleCollector(list), list)


def test_what_is_not_known_now_is_asked_for_again_and_a_defect_is_told(caplog: pytest.LogCaptureFixture) -> None:
    faults: list[Exception] = [KafkaUnavailableError("nobody answers"), ZeroDivisionError()]

    def samples() -> list[Sample]:
        raise faults.pop(0)

    with Endpoint("127.0.0.1", 0, SampleCollector(samples), list) as serving:
        assert ask(serving.port, "/metrics")[::2] == (503, b"nobody answers\n")
        assert ask(serving.port, "/metrics")[::2] == (500, b"a defect; the log has more\n")
    [defect] = [record for record in caplog.records if record.exc_info]
    assert "a defect kept /metrics from being answered" in defect.getMessage()


def test_the_process_is_served_beside_the_samples() -> None:
    with Endpoint("127.0.0.1", 0, ProcessSamples(lambda: [Sample(LAG, ("s/a",), 1)], (LAG, HELD)), list) as serving:
        text = ask(serving.port, "/metrics")[2].decode()
    assert "process_cpu_seconds_total" in text
    assert 'rollbridge_lag_messages{group="s/a"} 1.0' in text
    assert "# TYPE rollbridge_transactions gauge" in text, "a family is there even without a sample"


def test_slow_clients_take_so_many_threads_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_service, "REQUEST_S", 3600.0)
    with endpoint([]) as serving:
        with ExitStack() as stack:
            for _ in range(CONNECTIONS_MAX):
                stack.enter_context(socket.create_connection(("127.0.0.1", serving.port), timeout=60))
            assert ask(serving.port, "/healthz")[0] == 503
        while ask(serving.port, "/healthz")[0] != 200:
            pass  # until their threads have noticed that they are gone


def test_whoever_does_not_send_his_request_in_time_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_service, "REQUEST_S", 0.1)
    with endpoint([]) as serving, socket.create_connection(("127.0.0.1", serving.port), timeout=60) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert slow.recv(1) == b""


@pytest.mark.parametrize("service", list(VARIABLES))
def test_the_health_check_says_what_the_service_says(service: str) -> None:
    wrong: list[str] = []
    with endpoint(wrong, host="0.0.0.0") as serving:
        environment = {VARIABLES[service]: f"0.0.0.0:{serving.port}"}
        assert check(environment, service) == (0, "ok")
        wrong.append("Kafka does not answer")
        assert check(environment, service) == (1, "Kafka does not answer")
    code, said = check(environment, service)
    assert (code, said.partition(":")[0]) == (1, f"the {service} does not answer")


@pytest.mark.parametrize("address", [None, "", "9464", ":9464", "host:"])
def test_the_health_check_fails_without_an_address(address: str | None) -> None:
    assert check({} if address is None else {VARIABLES[COORDINATOR]: address})[0] == 1


def test_the_health_check_knows_its_services_only() -> None:
    assert check({}, "kafka") == (1, "'kafka' is none of coordinator, gateway")
