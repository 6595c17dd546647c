"""Metrics and health over HTTP, within bounds, and what a container's health check makes of them."""

from __future__ import annotations

import gzip
import http.client
import re
import select
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from prometheus_client.openmetrics import parser as openmetrics

from rollbridge.base.deadlines import Deadline
from rollbridge.base.metrics import Family, FamilyKind, Sample
from rollbridge.errors import KafkaUnavailableError, LocalEnvironmentError
from rollbridge.metrics import FRESH_S, MetricsPage, ProcessSamples, SampleCollector
from rollbridge.observe import http_service
from rollbridge.observe.healthcheck import COORDINATOR, VARIABLES, check
from rollbridge.observe.http_service import CONNECTIONS_MAX, PER_ADDRESS_MAX, Endpoint, Probe, network_of

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


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 403), ("evil.example:9464", 403), ("127.0.0.1.evil.example", 403), ("a@127.0.0.1", 403),
        ("127.0.0.1", 200), ("[::1]:9464", 200), ("localhost:9464", 200), ("coordinator-1:9464", 200),
        (f"{socket.gethostname()}.corp.example:9464", 200), ("metrics.rollbridge.svc:9464", 200),
        ("metrics.rollbridge.svc.cluster.local:9464", 200), ("metrics.svc.evil.example", 403),
    ],
)  # fmt: skip
def test_metrics_are_not_for_a_site_whose_name_leads_here(host: str, status: int) -> None:
    with endpoint([]) as serving:
        assert ask(serving.port, "/metrics", Host=host)[0] == status
        assert ask(serving.port, "/healthz", Host=host)[0] == 200, "probes have names of their own"


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


@pytest.mark.parametrize(
    ("accepted", "is_compressed"),
    [
        ("gzip", True),
        ("br, gzip;q=0.5", True),
        ("gzip;q=0", False),
        ("gzip;q=0.0", False),
        ("identity", False),
        ("", False),
    ],
)
def test_a_large_answer_is_compressed_for_who_takes_that(accepted: str, is_compressed: bool) -> None:
    many = [Sample(LAG, (f"s/{number}",), 1) for number in range(1_000)]
    with endpoint([], many) as serving:
        connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=120)
        connection.request("GET", "/metrics", headers={"Accept-Encoding": accepted})
        response = connection.getresponse()
        body = response.read()
        connection.close()
        plain = ask(serving.port, "/metrics", **{"Accept-Encoding": "identity"})[2]
        assert (response.getheader("Content-Encoding") == "gzip") is is_compressed
        assert response.getheader("Content-Length") == str(len(body))
        assert (gzip.decompress(body) if is_compressed else body) == plain
        assert not is_compressed or len(body) < len(plain) / 5
        assert ask(serving.port, "/healthz", **{"Accept-Encoding": accepted})[2] == b"ok\n", "not worth it"


def test_an_address_that_can_not_be_used_is_refused() -> None:
    with endpoint([]) as serving, pytest.raises(LocalEnvironmentError, match=f"127.0.0.1:{serving.port}: .*in use"):
        Endpoint("127.0.0.1", serving.port, SampleCollector(list), list)


@pytest.mark.logs_defects
def test_what_is_not_known_now_is_asked_for_again_and_a_defect_is_told(caplog: pytest.LogCaptureFixture) -> None:
    faults: list[Exception] = [KafkaUnavailableError("nobody answers"), ZeroDivisionError()]

    def samples() -> list[Sample]:
        raise faults.pop(0)

    with Endpoint("127.0.0.1", 0, SampleCollector(samples), list) as serving:
        assert ask(serving.port, "/metrics")[::2] == (503, b"nobody answers\n")
        assert ask(serving.port, "/metrics")[::2] == (500, b"a defect; the log has more\n")
    [defect] = [record for record in caplog.records if record.exc_info]
    assert "defect: http.defect path=/metrics" in defect.getMessage()


def test_the_process_is_served_beside_the_samples() -> None:
    with Endpoint("127.0.0.1", 0, ProcessSamples(lambda: [Sample(LAG, ("s/a",), 1)], (LAG, HELD)), list) as serving:
        text = ask(serving.port, "/metrics")[2].decode()
    assert "process_cpu_seconds_total" in text
    assert 'rollbridge_lag_messages{group="s/a"} 1.0' in text
    assert "# TYPE rollbridge_transactions gauge" in text, "a family is there even without a sample"


def silent(stack: ExitStack, port: int, count: int, source: str = "127.0.0.1") -> list[socket.socket]:
    """Connections that send nothing."""
    return [
        stack.enter_context(socket.create_connection(("127.0.0.1", port), 60, source_address=(source, 0)))
        for _ in range(count)
    ]


def test_whoever_asks_at_once_is_served_whatever_others_hold_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_service, "REQUEST_S", 3600.0)
    with endpoint([]) as serving, ExitStack() as stack:
        for source in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
            for _ in range(5):
                silent(stack, serving.port, CONNECTIONS_MAX, source)
                assert [ask(serving.port, path)[0] for path in ("/healthz", "/livez", "/metrics")] == [200] * 3


def test_one_address_takes_no_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_service, "REQUEST_S", 3600.0)
    with endpoint([]) as serving, ExitStack() as stack:
        [slow] = silent(stack, serving.port, 1)
        slow.sendall(b"GET /healthz HTTP/1.1\r\n")
        for source in ("127.0.0.2", "127.0.0.3", "127.0.0.2"):
            silent(stack, serving.port, 4 * CONNECTIONS_MAX, source)
        slow.sendall(b"\r\n")
        assert slow.recv(12) == b"HTTP/1.0 200"


def test_an_address_has_so_many_places_and_loses_its_own_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_service, "REQUEST_S", 3600.0)
    with endpoint([]) as serving, ExitStack() as stack:
        connections = silent(stack, serving.port, 4 * PER_ADDRESS_MAX)
        for connection in connections[:-PER_ADDRESS_MAX]:
            assert connection.recv(1) == b"", "it was closed"
        for connection in connections[-PER_ADDRESS_MAX:]:
            connection.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert connection.recv(12) == b"HTTP/1.0 200"


def test_all_addresses_together_have_so_many_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_service, "REQUEST_S", 3600.0)
    with endpoint([]) as serving, ExitStack() as stack:
        open_ones = [
            connection
            for number in range(1, 5)
            for connection in silent(stack, serving.port, PER_ADDRESS_MAX, f"127.0.0.{number}")
        ]

        def are_open() -> int:
            closed, _, _ = select.select(open_ones, (), (), 0.1)  # nobody is sent anything
            open_ones[:] = [connection for connection in open_ones if connection not in closed]
            return len(open_ones)

        until(lambda: are_open() == CONNECTIONS_MAX)


def test_who_does_not_take_his_answer_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_service, "SEND_S", 3600.0)
    many = [Sample(LAG, (f"s/{number:0100}",), 1) for number in range(100_000)]
    with endpoint([], many) as serving, ExitStack() as stack:
        for _ in range(3):
            for greedy in silent(stack, serving.port, CONNECTIONS_MAX):
                with suppress(OSError):
                    greedy.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            until(lambda: ask(serving.port, "/healthz")[0] == 200)


def test_probes_are_answered_at_a_socket_of_their_own(tmp_path: Path) -> None:
    path, goes_on = tmp_path / "probe.sock", threading.Event()

    def busy() -> list[Sample]:
        goes_on.wait(60)
        return []

    with (
        Endpoint("127.0.0.1", 0, SampleCollector(busy), list) as serving,
        Probe(str(path), lambda: ["Kafka does not answer"]),
        ExitStack() as stack,
    ):
        for source in ("127.0.0.1", "127.0.0.2"):
            for connection in silent(stack, serving.port, PER_ADDRESS_MAX, source):
                connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        until(lambda: ask(serving.port, "/healthz")[0] == 503)  # all threads are at work
        environment = {"ROLLBRIDGE_COORDINATOR_PROBE_SOCKET": str(path)}
        assert check(environment) == (1, "Kafka does not answer")
        assert check(environment, ["coordinator", "--alive"]) == (0, "ok")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        goes_on.set()
    assert not path.exists()
    assert check(environment)[0] == 1


def test_a_probe_takes_the_place_of_one_that_was_killed_and_of_none_that_lives(tmp_path: Path) -> None:
    path = tmp_path / "probe.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with Probe(str(path), list), pytest.raises(LocalEnvironmentError, match=re.escape(str(path))):
        Probe(str(path), list)
    path.write_text("a file of somebody")
    with pytest.raises(LocalEnvironmentError):
        Probe(str(path), list)
    assert path.read_text() == "a file of somebody"


def test_a_probe_leaves_the_place_of_one_that_stands_still(tmp_path: Path) -> None:
    path = tmp_path / "probe.sock"
    with ExitStack() as stack:
        paused = stack.enter_context(socket.socket(socket.AF_UNIX))
        paused.bind(str(path))
        paused.listen(0)
        while True:  # until nobody is let in any more
            waits = stack.enter_context(socket.socket(socket.AF_UNIX))
            waits.setblocking(False)
            if waits.connect_ex(str(path)):
                break
        with pytest.raises(LocalEnvironmentError):
            Probe(str(path), list)
        assert path.exists()


def test_metrics_are_collected_once_a_second_by_one_thread_at_a_time() -> None:
    now_s, collected, at_once = 5.0, 0, threading.Lock()

    def samples() -> list[Sample]:
        nonlocal collected
        with at_once:
            collected += 1
            return [Sample(LAG, ("s/a",), collected)]

    page = MetricsPage(SampleCollector(samples), lambda: now_s)
    with ThreadPoolExecutor(8) as pool:
        read = {body for body, _ in pool.map(lambda _: page.read(""), range(50))}
    assert (len(read), collected) == (1, 1)
    now_s += FRESH_S
    assert page.read("")[0] not in read
    assert page.read("application/openmetrics-text; version=1.0.0")[0].endswith(b"# EOF\n")


@pytest.mark.parametrize(
    ("one", "other", "are_alike"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_what_counts_as_one_address(one: str, other: str, are_alike: bool) -> None:
    assert (network_of(one) == network_of(other)) is are_alike
    assert network_of("2001:db8::1%eth0") == "2001:db8::/64", "people read it in the log"


def until(condition: Callable[[], bool]) -> None:
    deadline = Deadline(60)
    while not condition():
        assert not deadline.passed()


@pytest.mark.parametrize("service", list(VARIABLES))
def test_the_health_check_says_what_the_service_says(service: str) -> None:
    wrong: list[str] = []
    with endpoint(wrong, host="0.0.0.0") as serving:
        environment = {VARIABLES[service][1]: f"0.0.0.0:{serving.port}"}
        assert check(environment, [service]) == (0, "ok")
        wrong.append("Kafka does not answer")
        assert check(environment, [service]) == (1, "Kafka does not answer")
        assert check(environment, ["--alive", service]) == (0, "ok")
    code, said = check(environment, [service])
    assert (code, said.partition(":")[0]) == (1, f"the {service} does not answer")


@pytest.mark.parametrize("address", [None, "", "9464", ":9464", "host:"])
def test_the_health_check_fails_without_an_address(address: str | None) -> None:
    assert check({} if address is None else {VARIABLES[COORDINATOR][1]: address})[0] == 1


def test_the_health_check_knows_its_services_only() -> None:
    assert check({}, ["kafka"]) == (1, "'kafka' is none of coordinator, gateway")
