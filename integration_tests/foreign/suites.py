"""Test suites of other projects' clients, from their published packages, run against our servers."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from integration_tests.foreign.others import made
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


def _outcome(case: ElementTree.Element) -> str:
    """Return passed, skipped, or the first line of what has failed."""
    for kind in ("failure", "error"):
        found = case.find(kind)
        if found is not None:
            return (found.get("message") or kind).splitlines()[0]
    return "skipped" if case.find("skipped") is not None else "passed"
