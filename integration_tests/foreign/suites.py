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
_TELL: Final = """package kgo

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
_GO_SAYS: Final = re.compile(r" +\w+_test\.go:\d+: (?!FAILED TESTING)(.*)")


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
    go = go_command()

    def build(folder: Path) -> None:
        for name in MODULE:
            shutil.copy(SOURCES / name, folder)
        package = json.loads(output_of([go, "mod", "download", "-json", _FRANZ], folder))
        with zipfile.ZipFile(package["Zip"]) as archive:
            archive.extractall(folder)
        [tests] = folder.glob(f"{_FRANZ}@*/pkg/kgo")
        helpers = tests / "helpers_test.go"
        [before, after] = helpers.read_text(encoding="utf-8").split(_CREATED)
        helpers.write_text(f"{before}\ttell(topic)\n{_CREATED}{after}", encoding="utf-8")
        (tests / "tell_test.go").write_text(_TELL, encoding="utf-8")
        output_of([go, "test", "-c", "-o", str(folder / "kgo.test")], tests)

    content = b"".join([*((SOURCES / name).read_bytes() for name in MODULE), _TELL.encode()])
    folder = made("franz-go", content, build)
    arguments = [f"-test.run={wanted}", "-test.v=test2json", f"-test.timeout={2 * PATIENCE_S:g}s"]
    done = subprocess.run(
        [go, "tool", "test2json", str(folder / "kgo.test"), *arguments],
        env={**os.environ, "KGO_SEEDS": address, "KGO_LOG_LEVEL": "none", "TOPIC_CREATED": created, **settings},
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
