"""compose.yaml, with version 2 of compose and with version 1.29: it starts, works, and is set for several machines."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from testcontainers.compose import DockerCompose

from integration_tests.backends import engine as engines
from integration_tests.backends.choice import lacking
from integration_tests.backends.engine import engine, host, publishing_address
from integration_tests.container_health import health
from integration_tests.images import PROMETHEUS, VARIABLES, provide
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.monitoring.runbook import alerts
from rollbridge_devcluster.state import free_port

pytestmark = pytest.mark.containers

ROOT = Path(__file__).parents[1]
PROFILES = ["gateway", "metrics"]


class Compose(DockerCompose):
    """A project of its own; with the program docker-compose (version 1.29) too, which testcontainers does not know."""

    @cached_property
    def compose_command_property(self) -> list[str]:
        command = super().compose_command_property
        return command if self.docker_command_path is None else [command[0], *command[2:]]

    def is_installed(self) -> bool:
        """Whether this version of compose is on this machine."""
        command = [self.docker_command_path] if self.docker_command_path else ["docker", "compose"]
        return (
            shutil.which(command[0]) is not None
            and subprocess.run([*command, "version"], capture_output=True).returncode == 0
        )

    def run(self, *arguments: str, stdin: str | None = None, refused: bool = False, **more: str) -> str:
        """Run a command of compose; returns what it says, and why if it is refused."""
        done = subprocess.run(
            [*self.compose_command_property, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=240,
            cwd=ROOT,
            env={**os.environ, **more},
        )
        assert (done.returncode != 0) == refused, done.stderr
        return done.stderr if refused else done.stdout

    def in_profile(self, *profiles: str, files: Sequence[Path] = ()) -> Compose:
        """The same project with profiles, and more files."""
        assert isinstance(self.compose_file_name, list)
        return replace(self, profiles=[*profiles], compose_file_name=[*self.compose_file_name, *map(str, files)])


@pytest.fixture(params=[pytest.param(None, id="docker compose"), "docker-compose"])
def compose(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Compose]:
    """Compose with a project of its own, with ports of its own; what it has made is removed after."""
    found = [Compose(ROOT, docker_command_path=path) for path in (None, "docker-compose")]
    if not any(one.is_installed() for one in found):
        lacking("no compose is installed (Debian: docker-compose)", containers=True)
    project = f"rollbridge-test-{uuid.uuid4().hex[:8]}"
    files = [str(ROOT / "compose.yaml"), str(tmp_path / "marks.json")]
    settings = tmp_path / "settings"
    made = Compose(ROOT, files, wait=False, env_file=str(settings), docker_command_path=request.param)
    if not made.is_installed():
        pytest.skip(f"{request.param or 'docker compose'} is not installed")
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
    variables = {"COMPOSE_PROJECT_NAME": project, "BIND": publishing_address(), "OUTSIDE": host()}
    variables |= {variable: name for name, variable in VARIABLES.items()}  # what is here, a stand-in or not
    taken: list[int] = []
    for name in ("KAFKA_PORT", "ZOOKEEPER_PORT", "METRICS_PORT_1", "METRICS_PORT_2", "PROMETHEUS_PORT", "GRAFANA_PORT"):
        taken.append(free_port(taken))
        variables[name] = str(taken[-1])
    for number in (1, 2):
        first = free_port(taken, 2)  # its own, and the one broker's
        taken += [first, first + 1]
        variables |= {f"GATEWAY_PORT_{number}": str(first), f"GATEWAY_PORTS_{number}": f"{first}-{first + 1}"}
    settings.write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
    yield made
    if engine().containers.list(all=True, filters={"label": f"com.docker.compose.project={project}"}):
        made.in_profile(*PROFILES).stop()


def published_ports(config: str) -> set[tuple[str, str]]:
    """Address and port of this machine for each port that a configuration publishes, as either version writes it."""
    short = re.findall(r"^ +- (?:(\S+):)?(\d+):\d+(?:/tcp)?$", config, re.MULTILINE)
    blocks = re.findall(r"^ +- mode: ingress\n((?: +\w+: .*\n)+)", config, re.MULTILINE)
    fields = [dict(re.findall(r"^ +(\w+): \"?([^\"\n]*)\"?$", block, re.MULTILINE)) for block in blocks]
    return {*short, *((each.get("host_ip", ""), each["published"]) for each in fields)}


def test_compose_starts_everything_and_a_client_works_with_it(compose: Compose) -> None:
    compose.start()
    ids = compose.run("ps", "--quiet").split()
    assert len(ids) == 4
    containers = [engine().containers.get(one) for one in ids]
    eventually(lambda: {health(container) for container in containers} == {"healthy"}, "all of them are healthy")

    def client(*arguments: str, stdin: str | None = None) -> Any:
        return compose.run("run", "--rm", "-T", "client", *arguments, stdin=stdin)

    client("stream", "create", "sales/orders")
    client("produce", "sales/orders", "--key-separator", ":", stdin="a:1\nb:2\n")
    assert client("consume", "sales/orders", "--format", "{key} {value}").splitlines() == ["a 1", "b 2"]


def test_the_profile_gateway_serves_a_plain_producer(compose: Compose) -> None:
    with_gateways = compose.in_profile("gateway")
    with_gateways.start()
    gateways = {
        name: engine().containers.get(with_gateways.run("ps", "--quiet", name).strip())
        for name in ("gateway-1", "gateway-2")
    }
    eventually(lambda: {health(gateway) for gateway in gateways.values()} == {"healthy"}, "both are healthy")
    compose.run("run", "--rm", "-T", "client", "stream", "create", "sales/orders")
    for name, gateway in gateways.items():
        published = [int(found[0]["HostPort"]) for found in gateway.ports.values() if found]
        settings = {"bootstrap.servers": f"{host()}:{min(published)}", "transactional.id": name}
        producer = Producer({**settings, "transaction.timeout.ms": 900_000})
        producer.init_transactions(PATIENCE_S)
        producer.begin_transaction()
        producer.produce("sales.orders", name)
        producer.commit_transaction(PATIENCE_S)
    said = compose.run("run", "--rm", "-T", "client", "consume", "sales/orders", "--format", "{value}")
    assert sorted(said.split()) == ["gateway-1", "gateway-2"]


def test_the_profile_metrics_scrapes_the_coordinators_by_our_rules(compose: Compose) -> None:
    if shutil.which("prometheus") is None:
        lacking("no Prometheus is installed, of which its image is built (Debian: prometheus)")
    provide([PROMETHEUS], pull=False)
    # Grafana cannot be built: its settings are looked at below.
    with_metrics = compose.in_profile("metrics")
    with_metrics.services = ["coordinator-1", "coordinator-2", "prometheus"]
    with_metrics.start()
    [container] = with_metrics.run("ps", "--quiet", "prometheus").split()
    eventually(lambda: health(engine().containers.get(container)) == "healthy", "Prometheus is healthy")
    published = engine().containers.get(container).ports["9090/tcp"][0]["HostPort"]

    def ask(path: str) -> Any:
        with urllib.request.urlopen(f"http://{publishing_address()}:{published}/api/v1/{path}", timeout=60) as answer:
            return json.load(answer)["data"]

    def healths() -> list[str]:
        return [target["health"] for target in ask("targets")["activeTargets"]]

    eventually(lambda: healths() == ["up", "up"], "both coordinators are scraped")
    names = {rule["name"] for group in ask("rules")["groups"] for rule in group["rules"]}
    assert names == alerts().keys()
    assert [
        fault["lastError"] for group in ask("rules")["groups"] for fault in group["rules"] if fault.get("lastError")
    ] == []


def test_the_profile_metrics_mounts_what_is_there(compose: Compose) -> None:
    found = compose.in_profile("metrics").run("config")
    given = {Path(path) for path in re.findall(rf"({re.escape(str(ROOT))}[^:\s]*)", found)} - {ROOT}
    docs, package = ROOT / "docs" / "monitoring", ROOT / "bridge" / "rollbridge" / "monitoring"
    assert given == {docs, docs / "grafana", package}
    scraped = (docs / "prometheus.yml").read_text(encoding="utf-8")
    texts = (ROOT / "compose.yaml").read_text(encoding="utf-8") + scraped
    mounted = {"/etc/rollbridge": docs, "/usr/share/rollbridge": package}
    inside = {mounted[at] / name for at, name in re.findall(rf"({'|'.join(mounted)})/([\w./-]+)", texts)}
    assert inside == {docs / "prometheus.yml", package / "rules.yaml", package / "board.json"}
    assert all(path.is_file() for path in inside)
    assert "rule_files: [/usr/share/rollbridge/rules.yaml]" in scraped
    services = compose.run("config", "--services").split()
    assert set(re.findall(r'"([\w-]+):9464"', scraped)) == {name for name in services if "coordinator" in name}
    services = compose.in_profile("gateway").run("config", "--services").split()
    [names] = re.findall(r"names: \[(.*)\], type: A, port: 9464", scraped)
    assert set(names.split(", ")) == {name for name in services if "gateway" in name}


def test_compose_takes_the_settings_for_several_machines(compose: Compose, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "containers.md").read_text(encoding="utf-8")
    (override,) = re.findall(r"```yaml\n# compose\.override\.yaml\n(.*?)```", page, re.DOTALL)
    (settings,) = re.findall(r"```properties\n# \.env\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "compose.override.yaml"
    file.write_text(override)
    several = compose.in_profile(files=[file])
    variables = dict(line.split("=", 1) for line in settings.splitlines() if line and not line.startswith("#"))
    found = re.sub(r"\n\s+(?=server\.)", " ", several.run("config", **variables))

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
    assert "BIND" in several.run("config", refused=True, **{**variables, "BIND": ""})
    assert {address for address, _ in published_ports(compose.run("config", BIND=""))} == {"127.0.0.1"}
