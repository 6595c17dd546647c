"""Clients in other languages, each with the protocol written anew: kafkajs (JavaScript) and franz-go (Go).

A test that wants one is skipped where its language is not installed. What they need is fetched once, by the versions
and checksums that their lock files pin, into the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from integration_tests.patience import PATIENCE_S
from rollbridge_devcluster.jars import default_cache

SOURCES: Final = Path(__file__).parent
_GO_MINOR_MIN: Final = 21
"""From Go 1.21 on an older Go fetches the one that a module asks for."""
MODULE: Final = ("go.mod", "go.sum")


def kafkajs() -> list[str]:
    """Return the command that runs ``kafkajs.js``; skips the test without Node.js and npm."""
    return node_program(SOURCES / "kafkajs.js")


def node_program(source: Path) -> list[str]:
    """Return the command that runs a program that needs kafkajs; skips the test without Node.js and npm."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("Node.js and npm are not installed")

    def install(folder: Path) -> None:
        output_of([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], folder)

    folder = _made("kafkajs", [SOURCES / "package.json", SOURCES / "package-lock.json"], install)
    return ["env", f"NODE_PATH={folder / 'node_modules'}", node, str(source)]


def franz() -> list[str]:
    """Return the command that runs ``franz.go``; skips the test without a Go that can build it."""
    go_command()

    def build(folder: Path) -> None:
        build_go(folder / "franz.go")

    return [str(_made("franz", [SOURCES / name for name in (*MODULE, "franz.go")], build) / "franz")]


def build_go(source: Path) -> list[str]:
    """Build a program that needs franz-go, beside its source; return the command that runs it. Skips as above."""
    for name in MODULE:
        if not (source.parent / name).exists():
            shutil.copy(SOURCES / name, source.parent)
    output_of([go_command(), "build", "-o", source.stem, source.name], source.parent)
    return [str(source.with_suffix(""))]


def go_command() -> str:
    """Return where Go is; skips the test without one that can build what needs franz-go."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("Go is not installed")
    version = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=True).stdout.strip()
    numbers = version.removeprefix("go").split(".")
    if len(numbers) < 2 or (int(numbers[0]), int(numbers[1])) < (1, _GO_MINOR_MIN):
        pytest.skip(f"{version or 'this Go'} is older than 1.{_GO_MINOR_MIN}")
    return go


OTHERS: Final = (kafkajs, franz)


def run(command: Sequence[str], servers: str, topic: str, name: str, records: int, *ends: str) -> None:
    """Write transactions of so many records, one for each of ``ends``, and return once all have ended."""
    arguments = [*command, servers, topic, name, str(records), *ends]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(ends), done.stdout + done.stderr


def _made(name: str, sources: Sequence[Path], make: Callable[[Path], None]) -> Path:
    """Return a folder of these files in which ``make`` has done its work, perhaps in an earlier run."""

    def fill(folder: Path) -> None:
        for source in sources:
            shutil.copy(source, folder)
        make(folder)

    return made(name, b"".join(source.read_bytes() for source in sources), fill)


def made(name: str, content: bytes, make: Callable[[Path], None]) -> Path:
    """Return the folder of this content that ``make`` has filled, perhaps in an earlier run."""
    folder = default_cache() / "tests" / f"{name}-{hashlib.sha256(content).hexdigest()[:16]}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            make(fresh)
            with suppress(OSError):  # another process was faster
                os.rename(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return folder


def output_of(command: Sequence[str], folder: Path) -> str:
    """Return what a command prints that runs in a folder; whatever keeps it from success fails the test."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=4 * PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout
