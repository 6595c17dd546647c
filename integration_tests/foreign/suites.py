"""Test suites of other projects' clients, from their published packages, run against our servers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from integration_tests.foreign.others import MODULE, SOURCES, go_command, made, output_of
from integration_tests.patience import PATIENCE_S

_KAFKA_PYTHON: Final = (
    "kafka-python==3.0.12 --hash=sha256:4ccda3616b9aa5c353d74a97f2770d6cd1b950890d77ab0e8890e09a48eeed65\n"
)
"""Its source package, which holds its tests."""
_SERVICE: Final = """
class ExternalService:
    def __init__(self, host, port):
        self.host, self.port = host, port

    def open(self):
        pass

    close = open


class SpawnedService:
    pass
"""
"""A module of its tests that the package lacks: how servers are started, of which there are some already."""

_FRANZ: Final = "github.com/twmb/franz-go"
_CREATED: Final = "\twaitForTopic(tb, topic, partitions)\n\n\tvar cleaned bool\n"
"""Where the tests of franz-go have created a topic, which they write to at once."""
_PREPARED: Final = "\tFunctionalTestEnv = &env\n"
"""Where those of Sarama have created all of theirs."""
_TELL: Final = """
import (
	"os"
	"os/exec"
)

func tell(topic string) {
	if said, err := exec.Command("sh", "-c", os.Getenv("TOPIC_CREATED"), topic).CombinedOutput(); err != nil {
		panic(string(said))
	}
}
"""
_SARAMA: Final = "github.com/IBM/sarama"
_SARAMA_VERSION: Final = "v1.61.1"
_SARAMA_SUM: Final = "h1:I59MWPHQUWqJNdRpsDUcbeCriog8SxjQaPfHNWxidEg="
_EXISTING: Final = """//go:build functional

package sarama

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os"

	"github.com/IBM/sarama/internal/toxiproxy"
)

func existingEnvironment(ctx context.Context, env *testEnvironment) (bool, error) {
	proxy := httptest.NewServer(http.HandlerFunc(func(answer http.ResponseWriter, _ *http.Request) {
		answer.WriteHeader(http.StatusNoContent)
	}))
	env.ToxiproxyClient = toxiproxy.NewClient(proxy.URL)
	env.KafkaBrokerAddrs = []string{os.Getenv("KAFKA_SEEDS")}
	env.KafkaVersion = os.Getenv("KAFKA_VERSION")
	return true, nil
}
"""
"""Where its tests find servers, instead of containers behind proxies that can break connections."""
_GO_SAYS: Final = re.compile(r"\s+(?:\w+_test\.go:\d+: |Error:\s+)(?!FAILED TESTING)(\S.*)")


def kafka_python(address: str, protocol: str, wanted: str, report: Path) -> dict[str, str]:
    """Run tests of kafka-python against a server; return what became of each.

    Args:
        address: Of a broker or gateway.
        protocol: Release of Kafka that the tests take the server for.
        wanted: Which of its integration tests, as ``-k`` of pytest says it.
        report: File for pytest's report.
    """

    def unpack(folder: Path) -> None:
        (folder / "wanted.txt").write_text(_KAFKA_PYTHON, encoding="utf-8")
        arguments = ["download", "--quiet", "--no-deps", "--no-binary=:all:", "--require-hashes", "-r", "wanted.txt"]
        subprocess.run([sys.executable, "-m", "pip", *arguments], cwd=folder, check=True, timeout=PATIENCE_S)
        [package] = folder.glob("kafka_python-*.tar.gz")
        with tarfile.open(package) as archive:
            archive.extractall(folder, filter="data")
        [tests] = folder.glob("kafka_python-*/test")
        (tests / "__init__.py").touch()  # otherwise the standard library's own `test` is found first
        (tests / "service.py").write_text(_SERVICE, encoding="utf-8")

    folder = made("kafka-python", _KAFKA_PYTHON.encode(), unpack)
    [source] = (item for item in folder.glob("kafka_python-*") if item.is_dir())
    environment = {
        **os.environ,
        "KAFKA_VERSION": protocol,
        "KAFKA_URI": f"kafka://{address}",
        "KAFKA_ROOT": str(source),  # where it would start servers
        "PYTHONPATH": str(source),
        "PYTEST_ADDOPTS": "",
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", wanted, f"--junit-xml={report}"]
    done = subprocess.run(
        [*command, "test/integration"],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert report.exists(), done.stdout + done.stderr
    return {case.get("name", ""): _outcome(case) for case in ElementTree.parse(report).iter("testcase")}


def franz_go(address: str, wanted: str, created: str, **settings: str) -> dict[str, str]:
    """Run tests of franz-go's client against a server; return what became of each.

    Args:
        address: Of a broker or gateway.
        wanted: Which of its tests, as ``-run`` of ``go test`` says it.
        created: Line for the shell that is run for each topic that a test has created, whose name is ``$0`` there.
        settings: Variables for the tests and for that line.
    """

    def build(folder: Path) -> None:
        for name in MODULE:
            shutil.copy(SOURCES / name, folder)
        tests = _module(folder, _FRANZ) / "pkg" / "kgo"
        _change(tests / "helpers_test.go", _CREATED, f"\ttell(topic)\n{_CREATED}")
        (tests / "tell_test.go").write_text(f"package kgo\n{_TELL}", encoding="utf-8")
        output_of([go_command(), "test", "-c", "-o", str(folder / "tests")], tests)

    content = b"".join([*((SOURCES / name).read_bytes() for name in MODULE), _TELL.encode()])
    variables = {"KGO_SEEDS": address, "KGO_LOG_LEVEL": "none", "TOPIC_CREATED": created, **settings}
    return _go_tests(made("franz-go", content, build) / "tests", wanted, variables)


def sarama(address: str, wanted: str, created: str, **settings: str) -> dict[str, str]:
    """Run tests of Sarama, as those of franz-go."""

    def build(folder: Path) -> None:
        tests = _module(folder, f"{_SARAMA}@{_SARAMA_VERSION}", _SARAMA_SUM)
        functional = tests / "functional_test.go"
        _change(functional, "func existingEnvironment(", "func proxies(")
        _change(functional, _PREPARED, f"\tfor topic := range testTopicDetails {{\n\t\ttell(topic)\n\t}}\n{_PREPARED}")
        functional.write_text(functional.read_text(encoding="utf-8").replace("Factor: 3,", "Factor: 1,"), "utf-8")
        (tests / "existing_test.go").write_text(_EXISTING, encoding="utf-8")
        (tests / "tell_test.go").write_text(f"//go:build functional\n\npackage sarama\n{_TELL}", encoding="utf-8")
        output_of([go_command(), "test", "-c", "-tags", "functional", "-o", str(folder / "tests")], tests)

    content = f"{_SARAMA_SUM}{_EXISTING}{_TELL}".encode()
    variables = {"KAFKA_SEEDS": address, "KAFKA_VERSION": "4.2.0", "TOPIC_CREATED": created, **settings}
    return _go_tests(made("sarama", content, build) / "tests", wanted, variables)


def _module(folder: Path, module: str, checksum: str | None = None) -> Path:
    """Return where the source of a Go module is; without a checksum, one that ``go.mod`` in the folder pins."""
    package = json.loads(output_of([go_command(), "mod", "download", "-json", module], folder))
    assert checksum in (None, package["Sum"])
    with zipfile.ZipFile(package["Zip"]) as archive:
        archive.extractall(folder)
    return folder / f"{package['Path']}@{package['Version']}"


def _change(file: Path, old: str, new: str) -> None:
    [before, after] = file.read_text(encoding="utf-8").split(old)
    file.write_text(f"{before}{new}{after}", encoding="utf-8")


def _go_tests(program: Path, wanted: str, variables: Mapping[str, str]) -> dict[str, str]:
    arguments = [f"-test.run={wanted}", "-test.v=test2json", f"-test.timeout={2 * PATIENCE_S:g}s"]
    done = subprocess.run(
        [go_command(), "tool", "test2json", str(program), *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=3 * PATIENCE_S,
    )
    said: dict[str, set[str]] = {}
    outcomes: dict[str, str] = {}
    for event in map(json.loads, done.stdout.splitlines()):
        test, action = event.get("Test", ""), event["Action"]
        if action == "output" and (complaint := _GO_SAYS.match(event["Output"])):
            said.setdefault(test, set()).add(complaint[1])
        elif test and action == "fail":
            outcomes[test] = "; ".join(sorted(said.get(test, ()))) or "failed"
        elif test and action in ("pass", "skip"):
            outcomes[test] = {"pass": "passed", "skip": "skipped"}[action]
    assert outcomes, done.stdout + done.stderr
    return outcomes


def _outcome(case: ElementTree.Element) -> str:
    """Return passed, skipped, or the first line of what has failed."""
    for kind in ("failure", "error"):
        found = case.find(kind)
        if found is not None:
            return (found.get("message") or kind).splitlines()[0]
    return "skipped" if case.find("skipped") is not None else "passed"
