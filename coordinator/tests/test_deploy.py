"""The units and manifests of docs/deploy: valid, and true to what a coordinator is and needs."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import yaml

from rollbridge.version import __version__
from rollbridge_coordinator.config import load_coordinator_settings
from rollbridge_coordinator.shell.daemon import END_AT_LATEST_S

DEPLOY: Final = Path(__file__).parents[2] / "docs" / "deploy"
UNIT: Final = DEPLOY / "rollbridge-coordinator@.service"
DOCUMENTS: Final = {
    document["kind"]: document
    for document in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
}
EXPOSURE_MAX: Final = 20
"""In tenths: what `systemd-analyze security` calls OK ends at 4.9."""


def pod() -> Any:
    return DOCUMENTS["Deployment"]["spec"]["template"]["spec"]


def container() -> Any:
    [only] = pod()["containers"]
    return only


@pytest.mark.parametrize("version", ["1.29", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("kind", list(DOCUMENTS))
def test_each_manifest_is_valid(kind: str, version: str) -> None:
    kubernetes_validate.validate(DOCUMENTS[kind], version, strict=True)


def test_the_validation_finds_what_is_wrong() -> None:
    wrong = {**DOCUMENTS["PodDisruptionBudget"], "spec": {"maxUnavailabel": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.29", strict=True)


def test_everything_that_selects_the_pods_does() -> None:
    labels = DOCUMENTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        DOCUMENTS["Deployment"]["spec"]["selector"]["matchLabels"],
        DOCUMENTS["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        DOCUMENTS["Service"]["spec"]["selector"],
        *(item["labelSelector"]["matchLabels"] for item in pod()["topologySpreadConstraints"]),
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)


def test_what_the_pod_refers_to_is_there() -> None:
    sources = container()["envFrom"]
    names = {"configMapRef": "ConfigMap", "secretRef": "Secret"}
    for source in sources:
        [(reference, about)] = source.items()
        assert DOCUMENTS[names[reference]]["metadata"]["name"] == about["name"]
    assert pod()["serviceAccountName"] == DOCUMENTS["ServiceAccount"]["metadata"]["name"]
    ports = {port["name"] for port in container()["ports"]}
    used = {container()[probe]["httpGet"]["port"] for probe in ("readinessProbe", "livenessProbe")}
    assert used | {port["targetPort"] for port in DOCUMENTS["Service"]["spec"]["ports"]} <= ports


def environment() -> dict[str, str]:
    own = {item["name"]: item.get("value", "pod-1") for item in container()["env"]}
    return {**DOCUMENTS["ConfigMap"]["data"], **own}


def test_its_settings_are_those_of_a_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    settings = load_coordinator_settings({})
    assert settings.name == "pod-1", "each has the name of its pod"
    assert settings.metrics_endpoint == ("0.0.0.0", container()["ports"][0]["containerPort"])
    known = {"BOOTSTRAP_SERVERS", "ZOOKEEPER", "LOG_FORMAT", "COORDINATOR_NAME", "COORDINATOR_METRICS_ADDRESS"}
    assert {name.removeprefix("ROLLBRIDGE_") for name in environment()} == known


def test_its_image_is_that_of_this_release() -> None:
    assert container()["image"] == f"rollbridge/coordinator:{__version__}"


def test_it_may_do_nothing_that_it_need_not() -> None:
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod()["securityContext"]["runAsNonRoot"] is True
    assert pod()["automountServiceAccountToken"] is False


def test_nobody_is_killed_while_it_hands_its_groups_over() -> None:
    assert pod()["terminationGracePeriodSeconds"] > END_AT_LATEST_S
    assert float(unit()["Service"]["TimeoutStopSec"]) > END_AT_LATEST_S
    assert container()["livenessProbe"]["httpGet"]["path"] != "/healthz", "one that waits for servers is alive"


def unit() -> configparser.ConfigParser:
    """The unit, whose repeated keys are of no interest here."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text(encoding="utf-8"))
    return parser


def test_the_units_settings_are_those_of_a_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (DEPLOY / "coordinator.env").read_text(encoding="utf-8").splitlines()
    for line in lines:
        name, equals, value = line.partition("=")
        if equals and not name.startswith("#"):
            monkeypatch.setenv(name, value)
    settings = load_coordinator_settings({"name": "host-1"})
    assert settings.zookeeper.startswith("zookeeper-1:2181,")
    assert settings.metrics_endpoint == ("127.0.0.1", 9464)
    service = unit()["Service"]
    assert service["ExecStart"].endswith("rollbridge coordinator --name %H-%i")
    assert service["RestartPreventExitStatus"].split() == ["2", "4"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="this machine has no systemd-analyze")
def test_systemd_takes_the_unit_and_finds_it_guarded(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name.replace("@", "@1")
    program = "/opt/rollbridge/bin/rollbridge"
    text = UNIT.read_text(encoding="utf-8")
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
