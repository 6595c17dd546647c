"""How a run gets its backend, and what becomes of tests that the backend cannot serve."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from integration_tests.backends.choice import BACKEND_VARIABLE, REQUIRE_VARIABLE, demand
from integration_tests.backends.interface import Ability
from integration_tests.backends.local import LocalCluster

ROOT = Path(__file__).parents[1]
ON_CONTAINERS = "integration_tests/containers/test_faults.py::test_a_disk_without_a_limit_cannot_be_filled"
NOBODY = {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}


def run(test: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """One test as a run of its own."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", test],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, BACKEND_VARIABLE: "auto", REQUIRE_VARIABLE: "", **environment},
        timeout=120,
        check=False,
    )


def test_without_an_engine_tests_on_containers_are_skipped_and_say_why() -> None:
    said = run(ON_CONTAINERS, **NOBODY)
    assert said.returncode == 0, said.stdout
    assert "1 skipped" in said.stdout
    assert said.stdout.count("no container engine answers") >= 2, "in the line of the test and in the summary"


@pytest.mark.parametrize("required", ["1", "containers"])
@pytest.mark.parametrize("why", [NOBODY, {BACKEND_VARIABLE: "local"}], ids=["no engine", "local"])
def test_what_would_be_skipped_fails_if_that_is_required(why: dict[str, str], required: str) -> None:
    said = run(ON_CONTAINERS, **{REQUIRE_VARIABLE: required, **why})
    assert said.returncode == 1, said.stdout
    assert f"{REQUIRE_VARIABLE}={required}" in said.stdout


def test_all_tests_of_servers_are_skipped_where_docker_was_asked_for_in_vain() -> None:
    test = "integration_tests/test_topics.py::test_ends_and_truncation"
    said = run(test, **{BACKEND_VARIABLE: "docker", **NOBODY})
    assert said.returncode == 0, said.stdout
    assert "1 skipped" in said.stdout


def test_a_test_is_told_what_its_servers_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REQUIRE_VARIABLE, raising=False)
    demand(LocalCluster(), [Ability.CLOCK])
    with pytest.raises(pytest.skip.Exception, match="the local backend cannot do this here: partition, packet loss"):
        demand(LocalCluster(), [Ability.PARTITION, Ability.CLOCK, Ability.LOSS])
    monkeypatch.setenv(REQUIRE_VARIABLE, "containers")
    with pytest.raises(pytest.skip.Exception, match="partition"):
        demand(LocalCluster(), [Ability.PARTITION])
    monkeypatch.setenv(REQUIRE_VARIABLE, "1")
    with pytest.raises(pytest.fail.Exception, match="partition"):
        demand(LocalCluster(), [Ability.PARTITION])
