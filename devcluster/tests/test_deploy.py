"""Units and manifests of docs/deploy, and compose.yaml: valid, and true to what coordinators and gateways need."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import yaml

from rollbridge.config import ConnectionSettings
from rollbridge.observe.healthcheck import ALIVE, VARIABLES
from rollbridge.version import __version__
from rollbridge_coordinator.config import load_coordinator_settings
from rollbridge_coordinator.daemon.main import END_AT_LATEST_S
from rollbridge_gateway.__main__ import PREFIX
from rollbridge_gateway.__main__ import main as gateway_command
from rollbridge_gateway.settings import GatewaySettings, split_address

ROOT: Final = Path(__file__).parents[2]
DEPLOY: Final = ROOT / "docs" / "deploy"
MANIFESTS: Final = {"coordinator": "kubernetes.yaml", "gateway": "kubernetes-gateway.yaml"}
UNITS: Final = {"coordinator": "rollbridge-coordinator@.service", "gateway": "rollbridge-gateway.service"}
SERVICES: Final = tuple(MANIFESTS)
EXPOSURE_MAX: Final = 20
"""In tenths: what `systemd-analyze security` calls OK ends at 4.9."""
PROBE_SOCKET: Final = "/tmp/rollbridge.sock"
ANYWHERE: Final = "0.0.0.0:9464"
BROKERS: Final = 3
"""For so many brokers a gateway's ports are open."""
HARDENED: Final = {
    "read_only": True,
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "tmpfs": ["/tmp"],
}


def documents(service: str) -> list[dict[str, Any]]:
    """The manifests of a service."""
    return list(yaml.safe_load_all((DEPLOY / MANIFESTS[service]).read_text(encoding="utf-8")))


ALL: Final = [
    pytest.param(document, id=f"{service}-{document['kind']}-{document['metadata']['name']}")
    for service in SERVICES
    for document in documents(service)
]


def of_kind(service: str, *kinds: str) -> dict[str, Any]:
    """The first manifest of one of these kinds."""
    return next(document for document in documents(service) if document["kind"] in kinds)


def workload(service: str) -> dict[str, Any]:
    """What has the pods."""
    return of_kind(service, "Deployment", "StatefulSet")


def pod(service: str) -> Any:
    """The pod's specification."""
    return workload(service)["spec"]["template"]["spec"]


def container(service: str) -> Any:
    """The only container of the pod."""
    [only] = pod(service)["containers"]
    return only


@pytest.mark.parametrize("version", ["1.29", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("document", ALL)
def test_each_manifest_is_valid(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("service", SERVICES)
def test_probes_ask_where_no_stranger_gets(service: str) -> None:
    path = environment(service)[VARIABLES[service][0]]
    assert path.startswith(tuple(item["mountPath"] for item in container(service)["volumeMounts"])), "it is writable"
    program = ["python", "-m", "rollbridge.observe.healthcheck", service]
    assert container(service)["readinessProbe"]["exec"]["command"] == program
    assert container(service)["livenessProbe"]["exec"]["command"] == [*program, ALIVE], "who waits for servers is alive"


@pytest.mark.parametrize("service", SERVICES)
def test_metrics_are_for_prometheus_and_all_else_is_for_who_needs_it(service: str) -> None:
    policy = of_kind(service, "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= workload(service)["metadata"]["labels"].items()
    assert policy["policyTypes"] == ["Ingress"], "Kafka and ZooKeeper are anywhere"
    [first, metrics] = policy["ingress"]
    assert metrics["ports"] == [{"port": "metrics"}]
    assert "namespaceSelector" in metrics["from"][0]
    ports = {port["name"]: port["containerPort"] for port in container(service)["ports"]}
    if service == "gateway":
        [clients] = first["ports"]
        assert list(range(clients["port"], clients["endPort"] + 1)) == [*ports.values()][:-1]
    else:
        assert first["from"][0]["podSelector"]["matchLabels"] == policy["podSelector"]["matchLabels"], "its peers"


@pytest.mark.parametrize("service", SERVICES)
def test_everything_that_selects_the_pods_does(service: str) -> None:
    labels = workload(service)["spec"]["template"]["metadata"]["labels"]
    others = [item["spec"]["selector"] for item in documents(service) if item["kind"] == "Service"]
    selectors = [
        workload(service)["spec"]["selector"]["matchLabels"],
        of_kind(service, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        *others,
        *(item["labelSelector"]["matchLabels"] for item in pod(service)["topologySpreadConstraints"]),
    ]
    assert others
    assert all(selector.items() <= labels.items() for selector in selectors)
    [other] = set(SERVICES) - {service}
    strangers = workload(other)["spec"]["template"]["metadata"]["labels"]
    assert not any(selector.items() <= strangers.items() for selector in selectors)


@pytest.mark.parametrize("service", SERVICES)
def test_what_the_pod_refers_to_is_there(service: str) -> None:
    names = {"configMapRef": "ConfigMap", "secretRef": "Secret"}
    for source in container(service)["envFrom"]:
        [(reference, about)] = source.items()
        assert of_kind(service, names[reference])["metadata"]["name"] == about["name"]
    assert pod(service)["serviceAccountName"] == of_kind(service, "ServiceAccount")["metadata"]["name"]
    ports, used = {port["name"] for port in container(service)["ports"]}, set()
    for document in documents(service):
        if document["kind"] == "Service":
            used |= {port["targetPort"] for port in document["spec"]["ports"]}
    assert used <= ports


def environment(service: str) -> dict[str, str]:
    """What a pod named pod-1 in a namespace named space has in its environment."""
    fields = {"metadata.name": "pod-1", "metadata.namespace": "space"}
    found: dict[str, str] = {}
    for item in container(service)["env"]:
        value = item["value"] if "value" in item else fields[item["valueFrom"]["fieldRef"]["fieldPath"]]
        found[item["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], value)
    return {**of_kind(service, "ConfigMap")["data"], **found}


def gateway_settings(environ: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> GatewaySettings:
    """What a gateway makes of an environment and a command line; what it does not know fails the test."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    known = {f"ROLLBRIDGE_{name}" for name in ("BOOTSTRAP_SERVERS", "ZOOKEEPER", "LOG_FORMAT")}
    known |= {str(option.envvar or f"{PREFIX}_{option.name}".upper()) for option in gateway_command.params}
    assert {name for name in environ if name.startswith("ROLLBRIDGE_")} <= known
    given = gateway_command.make_context("gateway", [*arguments]).params
    wanted = {name: given[name] for name in GatewaySettings.__dataclass_fields__ if given.get(name) is not None}
    connection = ConnectionSettings(bootstrap_servers=environ["ROLLBRIDGE_BOOTSTRAP_SERVERS"], zookeeper="z:1")
    return GatewaySettings(connection=connection, **wanted)


def test_the_pods_settings_are_those_of_a_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment("coordinator").items():
        monkeypatch.setenv(name, value)
    settings = load_coordinator_settings({})
    assert settings.name == "pod-1", "each has the name of its pod"
    assert settings.metrics_endpoint == ("0.0.0.0", container("coordinator")["ports"][0]["containerPort"])
    known = {"BOOTSTRAP_SERVERS", "ZOOKEEPER", "LOG_FORMAT", "COORDINATOR_NAME", "COORDINATOR_METRICS_ADDRESS"}
    known |= {"COORDINATOR_PROBE_SOCKET"}
    assert {name.removeprefix("ROLLBRIDGE_") for name in environment("coordinator")} == known


def test_the_pods_settings_are_those_of_a_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = gateway_settings(environment("gateway"), monkeypatch)
    assert settings.name == "pod-1", "each has the name of its pod"
    headless = of_kind("gateway", "Service")
    assert headless["spec"]["clusterIP"] == "None"
    assert workload("gateway")["spec"]["serviceName"] == headless["metadata"]["name"]
    assert settings.advertise == f"pod-1.{headless['metadata']['name']}.space.svc", "clients are told of this very pod"
    ports = {port["name"]: port["containerPort"] for port in container("gateway")["ports"]}
    assert split_address(settings.metrics) == ("0.0.0.0", ports.pop("metrics"))
    first = split_address(settings.listen)[1]
    assert list(ports.values()) == [first, *(first + broker + 1 for broker in range(BROKERS))]


@pytest.mark.parametrize("service", SERVICES)
def test_the_image_is_that_of_this_release(service: str) -> None:
    image = container(service)["image"]
    assert image == f"registry.example/rollbridge/coordinator:{__version__}", "a registry that nobody has, to fill in"
    assert image.partition("/")[2] == composed()[f"{service}-1"]["image"].partition("/")[2]
    assert container(service)["args"] == [service]


@pytest.mark.parametrize("service", SERVICES)
def test_the_pod_may_do_nothing_that_it_need_not(service: str) -> None:
    assert container(service)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod(service)["securityContext"]["runAsNonRoot"] is True
    assert pod(service)["automountServiceAccountToken"] is False


@pytest.mark.parametrize("service", SERVICES)
def test_nobody_is_killed_while_it_hands_over(service: str) -> None:
    assert pod(service)["terminationGracePeriodSeconds"] > END_AT_LATEST_S
    assert float(unit(service)["Service"]["TimeoutStopSec"]) > END_AT_LATEST_S


@pytest.mark.parametrize("service", SERVICES)
def test_no_secret_ends_in_a_core_dump(service: str) -> None:
    assert unit(service)["Service"]["LimitCORE"] == "0"


def unit(service: str) -> configparser.ConfigParser:
    """The unit, whose repeated keys are of no interest here."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((DEPLOY / UNITS[service]).read_text(encoding="utf-8"))
    return parser


def environment_file(service: str) -> Iterator[tuple[str, str]]:
    """The variables of a unit."""
    for line in (DEPLOY / f"{service}.env").read_text(encoding="utf-8").splitlines():
        name, equals, value = line.partition("=")
        if equals and not name.startswith("#"):
            yield name, value


def test_the_units_settings_are_those_of_a_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_file("coordinator"):
        monkeypatch.setenv(name, value)
    settings = load_coordinator_settings({"name": "host-1"})
    assert settings.connection.zookeeper.startswith("zookeeper-1:2181,")
    assert settings.metrics_endpoint == ("127.0.0.1", 9464)
    assert unit("coordinator")["Service"]["ExecStart"].endswith("rollbridge coordinator --name %H-%i")


def test_the_units_settings_are_those_of_a_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = gateway_settings(dict(environment_file("gateway")), monkeypatch, "--name", "host")
    assert (settings.listen, settings.advertise) == ("0.0.0.0:9192", "gateway-1")
    assert settings.metrics == "127.0.0.1:9466", "beside a coordinator on the same machine"
    assert unit("gateway")["Service"]["ExecStart"].endswith("rollbridge gateway --name %H")


@pytest.mark.parametrize("service", SERVICES)
def test_a_unit_is_started_again_unless_that_would_not_help(service: str) -> None:
    about = unit(service)["Service"]
    assert about["EnvironmentFile"] == f"/etc/rollbridge/{service}.env"
    assert (about["Restart"], about["RestartPreventExitStatus"].split()) == ("always", ["2", "4"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="this machine has no systemd-analyze")
@pytest.mark.parametrize("service", SERVICES)
def test_systemd_takes_the_unit_and_finds_it_guarded(service: str, tmp_path: Path) -> None:
    file = DEPLOY / UNITS[service]
    copy = tmp_path / file.name.replace("@", "@1")
    program = "/opt/rollbridge/bin/rollbridge"
    text = file.read_text(encoding="utf-8")
    assert program in text
    copy.write_text(text.replace(program, sys.executable), encoding="utf-8")
    environment = {**os.environ, "SYSTEMD_COLORS": "0"}
    for arguments in (
        ("verify", "--man=no", str(copy)),
        ("security", "--offline=yes", f"--threshold={EXPOSURE_MAX}", str(copy)),
    ):
        done = subprocess.run(
            ["systemd-analyze", *arguments], capture_output=True, text=True, env=environment, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert arguments[0] != "verify" or not done.stderr, "unknown settings are only warned of"


# -- compose.yaml, as far as no engine is needed ---------------------------------------------------------------


def composed(**variables: str) -> dict[str, Any]:
    """The services of compose.yaml, with these variables set and all others left out."""
    text = re.sub(
        r"\$\{(\w+):-([^}]*)\}",
        lambda found: variables.get(found[1], found[2]),
        (ROOT / "compose.yaml").read_text(encoding="utf-8"),
    )
    services: dict[str, Any] = yaml.safe_load(text)["services"]
    return services


def published(service: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Address, port of the machine and port of the container, for each port; of a range each one."""
    found = []
    for mapping in service.get("ports", ()):
        address, outside, inside = mapping.rsplit(":", 2)
        (low, high), (first, last) = ((int(ends[0]), int(ends[-1])) for ends in (outside.split("-"), inside.split("-")))
        assert high - low == last - first
        found += [(address, low + step, first + step) for step in range(high - low + 1)]
    return found


@pytest.mark.parametrize("name", ["gateway-1", "gateway-2"])
def test_a_composed_gateway_is_where_it_says_that_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number = name[-1]
    variables = {f"GATEWAY_PORT_{number}": "7000", f"GATEWAY_PORTS_{number}": "7000-7001", "OUTSIDE": "machine-1"}
    for given, host, count in (({}, "localhost", BROKERS + 1), (variables, "machine-1", 2)):
        service = composed(**given)[name]
        settings = gateway_settings(service["environment"], monkeypatch)
        assert service["command"] == ["gateway"]
        assert settings.advertise == host
        listening, first = split_address(settings.listen)
        assert listening == "0.0.0.0"
        assert published(service) == [("127.0.0.1", first + step, first + step) for step in range(count)]


def test_nothing_of_a_composed_project_takes_the_port_of_another_one() -> None:
    ports = [port for service in composed().values() for _, port, _ in published(service)]
    assert len(ports) == len(set(ports))


@pytest.mark.parametrize("name", ["coordinator-1", "coordinator-2", "gateway-1", "gateway-2"])
def test_a_composed_service_is_guarded_and_looked_after(name: str) -> None:
    service = composed()[name]
    assert {key: service[key] for key in HARDENED} == HARDENED
    assert service["image"] == f"localhost/rollbridge/coordinator:{__version__}"
    assert service["restart"] == "unless-stopped"
    assert set(service["depends_on"]) == {"kafka", "zookeeper"}
    if name.startswith("gateway"):
        assert service["profiles"] == ["gateway"]
        assert service["healthcheck"]["test"] == ["CMD", "python", "-m", "rollbridge.observe.healthcheck", "gateway"]
        assert service["environment"][VARIABLES["gateway"][1]] == "0.0.0.0:9464"


def test_the_image_serves_health_where_its_check_asks() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    told = {
        name: value for pair in VARIABLES.values() for name, value in zip(pair, (PROBE_SOCKET, ANYWHERE), strict=True)
    }
    assert dict(re.findall(r"(ROLLBRIDGE_\w+)=(\S+)", text)) == told
    assert '"-m", "rollbridge.observe.healthcheck"]' in text
    assert "EXPOSE 9464\n" in text


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="this machine has no docker-compose")
def test_compose_reads_what_this_module_reads() -> None:
    def run(*arguments: str) -> str:
        command = ["docker-compose", "-f", str(ROOT / "compose.yaml"), "--profile", "gateway", *arguments]
        environment = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=120).stdout

    assert {"gateway-1", "gateway-2"} <= set(run("config", "--services").split())
    found = yaml.safe_load(run("config"))["services"]
    for name in ("gateway-1", "gateway-2"):
        mine = composed()[name]
        assert found[name]["environment"] == mine["environment"]
        assert found[name]["healthcheck"]["test"] == mine["healthcheck"]["test"]
