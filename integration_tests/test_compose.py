"""compose.yaml, with version 2 of compose and with version 1.29: it starts, works, and is set for several machines."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from integration_tests.backends.choice import lacking
from integration_tests.container_health import health
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.cli.monitoring import BOARD_FILE, RULES_FILE
from rollbridge.monitoring.rules import ALERTS
from rollbridge_devcluster import engine as engines
from rollbridge_devcluster.engine import engine, host, publishing_address
from rollbridge_devcluster.image_names import PROMETHEUS
from rollbridge_devcluster.images import VARIABLES, provide
from rollbridge_devcluster.state import free_port

pytestmark = pytest.mark.containers

ROOT = Path(__file__).parents[1]
COMPOSE = {"docker compose": ["docker", "compose"], "docker-compose": ["docker-compose"]}
"""Version 2 and version 1.29."""


def is_installed(command: Sequence[str]) -> bool:
    """Whether this version of compose is on this machine."""
    return (
        shutil.which(command[0]) is not None
        and subprocess.run([*command, "version"], capture_output=True).returncode == 0
    )


@pytest.fixture(params=[pytest.param(command, id=label) for label, command in COMPOSE.items()])
def compose(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Runs compose on a project of its own, with ports of its own; what it has made is removed after."""
    command: Sequence[str] = request.param
    if not is_installed(command):
        if not any(map(is_installed, COMPOSE.values())):
            lacking("no compose is installed (Debian: docker-compose)")
        pytest.skip(f"{' '.join(command)} is not installed")
    project = f"rollbridge-test-{uuid.uuid4().hex[:8]}"
    # So that what is made is removed even if this process is killed.
    marked = {"labels": engines.labels(project)}
    soon = {"healthcheck": {"interval": "1s"}}
    marks = {
        "services": {
            **dict.fromkeys(("kafka", "zookeeper", "client", "prometheus", "grafana"), marked),
            **{name: {**marked, **soon} for name in ("coordinator-1", "coordinator-2", "gateway-1", "gateway-2")},
        },
        "volumes": dict.fromkeys(
            ("kafka-data", "zookeeper-data", "zookeeper-log", "prometheus-data", "grafana-data"), marked
        ),
        "networks": {"default": marked},
    }
    (tmp_path / "marks.json").write_text(json.dumps(marks))
    variables = ("KAFKA_PORT", "ZOOKEEPER_PORT", "METRICS_PORT_1", "METRICS_PORT_2", "PROMETHEUS_PORT", "GRAFANA_PORT")
    environment = {**os.environ, "BIND": publishing_address(), "OUTSIDE": host()}
    environment |= {variable: name for name, variable in VARIABLES.items()}  # what is here, a stand-in or not
    for variable in variables:
        environment[variable] = str(free_port(int(environment[one]) for one in variables if one in environment))
    taken = [int(environment[one]) for one in variables]
    for number in (1, 2):
        first = free_port(taken, 2)  # its own, and the one broker's
        taken += [first, first + 1]
        environment |= {f"GATEWAY_PORT_{number}": str(first), f"GATEWAY_PORTS_{number}": f"{first}-{first + 1}"}

    def run(
        *arguments: str, stdin: str | None = None, files: Sequence[Path] = (), refused: bool = False, **more: str
    ) -> str:
        whole = [*command, "-p", project]
        for file in (ROOT / "compose.yaml", tmp_path / "marks.json", *files):
            whole += ["-f", str(file)]
        done = subprocess.run(
            [*whole, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=240,
            cwd=ROOT,
            env={**environment, **more},
        )
        assert (done.returncode != 0) == refused, done.stderr
        return done.stderr if refused else done.stdout

    yield run
    if engine().containers.list(all=True, filters={"label": f"com.docker.compose.project={project}"}):
        run("--profile", "metrics", "--profile", "gateway", "down", "--volumes", "--timeout", "20", "--remove-orphans")


def published_ports(config: str) -> set[tuple[str, str]]:
    """Address and port of this machine for each port that a configuration publishes, as either version writes it."""
    short = re.findall(r"^ +- (?:(\S+):)?(\d+):\d+(?:/tcp)?$", config, re.MULTILINE)
    blocks = re.findall(r"^ +- mode: ingress\n((?: +\w+: .*\n)+)", config, re.MULTILINE)
    fields = [dict(re.findall(r"^ +(\w+): \"?([^\"\n]*)\"?$", block, re.MULTILINE)) for block in blocks]
    return {*short, *((each.get("host_ip", ""), each["published"]) for each in fields)}


@pytest.mark.long
def test_compose_starts_everything_and_a_client_works_with_it(compose: Callable[..., str]) -> None:
    compose("up", "--detach", "--no-build")
    ids = compose("ps", "--quiet").split()
    assert len(ids) == 4
    containers = [engine().containers.get(one) for one in ids]
    eventually(lambda: {health(container) for container in containers} == {"healthy"}, "all of them are healthy")

    def client(*arguments: str, stdin: str | None = None) -> Any:
        return compose("run", "--rm", "-T", "client", *arguments, stdin=stdin)

    client("stream", "create", "sales/orders")
    client("produce", "sales/orders", "--key-separator", ":", stdin="a:1\nb:2\n")
    assert client("consume", "sales/orders", "--format", "{key} {value}").splitlines() == ["a 1", "b 2"]


@pytest.mark.long
def test_the_profile_gateway_serves_a_plain_producer(compose: Callable[..., str]) -> None:
    compose("--profile", "gateway", "up", "--detach", "--no-build")
    gateways = {
        name: engine().containers.get(compose("--profile", "gateway", "ps", "--quiet", name).strip())
        for name in ("gateway-1", "gateway-2")
    }
    eventually(lambda: {health(gateway) for gateway in gateways.values()} == {"healthy"}, "both are healthy")
    compose("run", "--rm", "-T", "client", "stream", "create", "sales/orders")
    for name, gateway in gateways.items():
        published = [int(found[0]["HostPort"]) for found in gateway.ports.values() if found]
        settings = {"bootstrap.servers": f"{host()}:{min(published)}", "transactional.id": name}
        producer = Producer({**settings, "transaction.timeout.ms": 900_000})
        producer.init_transactions(PATIENCE_S)
        producer.begin_transaction()
        producer.produce("sales.orders", name)
        producer.commit_transaction(PATIENCE_S)
    said = compose("run", "--rm", "-T", "client", "consume", "sales/orders", "--format", "{value}")
    assert sorted(said.split()) == ["gateway-1", "gateway-2"]


@pytest.mark.long
def test_the_profile_metrics_scrapes_the_coordinators_by_our_rules(compose: Callable[..., str]) -> None:
    if shutil.which("prometheus") is None:
        lacking("no Prometheus is installed, of which its image is built (Debian: prometheus)")
    provide([PROMETHEUS], pull=False)
    # Grafana cannot be built: its settings are looked at below.
    compose("--profile", "metrics", "up", "--detach", "--no-build", "coordinator-1", "coordinator-2", "prometheus")
    [container] = compose("--profile", "metrics", "ps", "--quiet", "prometheus").split()
    eventually(lambda: health(engine().containers.get(container)) == "healthy", "Prometheus is healthy")
    published = engine().containers.get(container).ports["9090/tcp"][0]["HostPort"]

    def ask(path: str) -> Any:
        with urllib.request.urlopen(f"http://{publishing_address()}:{published}/api/v1/{path}", timeout=60) as answer:
            return json.load(answer)["data"]

    def healths() -> list[str]:
        return [target["health"] for target in ask("targets")["activeTargets"]]

    eventually(lambda: healths() == ["up", "up"], "both coordinators are scraped")
    names = {rule["name"] for group in ask("rules")["groups"] for rule in group["rules"]}
    assert names == ALERTS.keys()
    assert [
        fault["lastError"] for group in ask("rules")["groups"] for fault in group["rules"] if fault.get("lastError")
    ] == []


def test_the_profile_metrics_mounts_what_is_there(compose: Callable[..., str]) -> None:
    found = compose("--profile", "metrics", "config")
    given = {Path(path) for path in re.findall(rf"({re.escape(str(ROOT))}[^:\s]*)", found)} - {ROOT}
    assert given == {ROOT / "docs" / "monitoring", ROOT / "docs" / "monitoring" / "grafana"}
    inside = re.findall(r"/etc/rollbridge/([\w./-]+)", (ROOT / "compose.yaml").read_text(encoding="utf-8"))
    assert set(inside) == {"prometheus.yml", BOARD_FILE}
    assert all((ROOT / "docs" / "monitoring" / name).is_file() for name in inside)
    scraped = (ROOT / "docs" / "monitoring" / "prometheus.yml").read_text(encoding="utf-8")
    assert f"rule_files: [{RULES_FILE}]" in scraped
    services = compose("config", "--services").split()
    assert set(re.findall(r'"([\w-]+):9464"', scraped)) == {name for name in services if "coordinator" in name}
    services = compose("--profile", "gateway", "config", "--services").split()
    [names] = re.findall(r"names: \[(.*)\], type: A, port: 9464", scraped)
    assert set(names.split(", ")) == {name for name in services if "gateway" in name}


def test_compose_takes_the_settings_for_several_machines(compose: Callable[..., str], tmp_path: Path) -> None:
    page = (ROOT / "docs" / "containers.md").read_text(encoding="utf-8")
    (override,) = re.findall(r"```yaml\n# compose\.override\.yaml\n(.*?)```", page, re.DOTALL)
    (settings,) = re.findall(r"```properties\n# \.env\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "compose.override.yaml"
    file.write_text(override)
    variables = dict(line.split("=", 1) for line in settings.splitlines() if line and not line.startswith("#"))
    found = re.sub(r"\n\s+(?=server\.)", " ", compose("config", files=[file], **variables))

    def given(key: str) -> str:
        (value,) = re.findall(rf"^ +{key}: (.*)$", found, re.MULTILINE)
        return str(value).strip("'\"")

    assert given("KAFKA_CONTROLLER_QUORUM_VOTERS").count("@") == 3
    assert given("ZOO_SERVERS").count("server.") == 3
    assert (given("KAFKA_TRANSACTION_STATE_LOG_REPLICATION_FACTOR"), given("KAFKA_MIN_INSYNC_REPLICAS")) == ("3", "2")
    published = published_ports(found)
    assert {port for _, port in published} >= {"2888", "3888", "9093", "19092"}
    assert {address for address, _ in published} == {variables["BIND"]}, "nothing listens on any other address"
    # Without an address for them they are not published on all, but refused; and with nothing set, on loopback only.
    assert "BIND" in compose("config", files=[file], refused=True, **{**variables, "BIND": ""})
    assert {address for address, _ in published_ports(compose("config", BIND=""))} == {"127.0.0.1"}
