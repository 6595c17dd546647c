"""The wheel, as others install it: what it puts where, beside whom it works, and what it needs for what."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import Final
from zipfile import ZipFile

import pytest

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.coordinators import SESSION_TIMEOUT_S, until

ROOT: Final = Path(__file__).parents[1]
LOCKS: Final = ROOT / "requirements"
PYTHONS: Final = ("3.11", "3.12", "3.13")
OURS: Final = {
    "rollbridge",
    "rollbridge_coordinator",
    "rollbridge_devcluster",
    "rollbridge_gateway",
    "rollbridge_schemas",
    "pyspark_rollbridge",
    "pyspark_rollbridge_transactions",
}
COORDINATOR_OF_PYPI: Final = (
    "coordinator==1.0.0b1 --hash=sha256:5293ab393da3f1b937f8a8fc736a6d1676e92d5abc93697af7847fc40762cfac"
)
"""Somebody else's package, whose only module is called ``coordinator``."""

APPLICATION: Final = """
import sys

import coordinator
import schemas

import rollbridge

servers, zookeeper, root, scope = sys.argv[1:]
stream = f"{scope}/orders"
with rollbridge.connect(servers, zookeeper=zookeeper, zookeeper_root=root) as b:
    b.admin.create_stream(stream)
    with b.transaction(stream) as txn:
        txn.write(stream, key=b"k", value=schemas.ORDER)
    with b.reader(stream, follow=False) as reader:
        read = [record.value for record in reader]
print(read == [schemas.ORDER], coordinator.__file__.endswith("site-packages/coordinator/__init__.py"))
"""
LOADED: Final = """
import json, sys
import rollbridge
print(json.dumps([rollbridge.__version__, sorted(sys.modules)]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from this checkout."""
    place = tmp_path_factory.mktemp("wheel")
    command = [
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(place),
        str(ROOT),
    ]
    ran(sys.executable, *command)
    (found,) = place.glob("*.whl")
    return found


def ran(*command: str, **environment: str) -> str:
    """What a command prints, which is to succeed, run outside of this checkout."""
    done = subprocess.run(command, capture_output=True, text=True, env=clean(**environment), cwd="/")
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def clean(**environment: str) -> dict[str, str]:
    """An environment that leads to no other installation."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ROLLBRIDGE", "VIRTUAL"))
    }
    return {**kept, **environment}


def interpreter(version: str) -> str | None:
    """A Python of this version, on ``PATH`` or where pyenv keeps them."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    known = [which(f"python{version}"), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))]
    probe = f"import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    for path in filter(None, known):
        if subprocess.run([path, "-c", probe], capture_output=True, env=clean()).returncode == 0:
            return path
    return None


class Installation:
    """An environment of its own, with the wheel, and nothing else but what lock files pin."""

    def __init__(self, place: Path, python: str, wheel: Path) -> None:
        ran(python, "-m", "venv", str(place))
        self._place = place
        self.bin = place / "bin"
        self.install(LOCKS / "client.lock")
        self._pip("--no-deps", str(wheel))

    def install(self, requirements: Path) -> None:
        """Install what a file names, with hashes, and nothing else."""
        self._pip("--no-deps", "--require-hashes", "-r", str(requirements))

    def _pip(self, *arguments: str) -> None:
        self.python("-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)

    def python(self, *arguments: str, **environment: str) -> str:
        """What Python prints there."""
        return ran(str(self.bin / "python"), *arguments, **environment)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command line."""
        path = str(self.bin / "rollbridge")
        return subprocess.run([path, *arguments], capture_output=True, text=True, env=clean(), cwd="/")

    @contextmanager
    def coordinator(self, cluster: AnyCluster, root: str, log: Path) -> Iterator[None]:
        """One that runs there, and serves."""
        named = {
            "ROLLBRIDGE_BOOTSTRAP_SERVERS": cluster.bootstrap_servers,
            "ROLLBRIDGE_ZOOKEEPER": cluster.zookeeper,
            "ROLLBRIDGE_ZOOKEEPER_ROOT": root,
        }
        command = [str(self.bin / "rollbridge"), "coordinator", f"--session-timeout={SESSION_TIMEOUT_S}"]
        with log.open("wb") as out:
            process = subprocess.Popen(command, env=clean(**named), stderr=out, cwd="/")
        try:
            until(lambda: process.poll() is not None or b"coordinator.ready " in log.read_bytes())
            yield
        finally:
            process.terminate()
            process.wait(60)


def test_only_packages_of_ours_are_installed_and_no_tests(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == OURS | {f"rollbridge-{rollbridge.__version__}.dist-info"}
    assert not [name for name in names if "tests" in name.split("/")]
    for package in OURS:
        assert f"{package}/__init__.py" in names
    assert "rollbridge/py.typed" in names
    assert "rollbridge_schemas/epoch.avsc" in names


@pytest.mark.parametrize("version", PYTHONS)
def test_a_client_works_beside_packages_with_the_names_of_our_folders(
    version: str, wheel: Path, cluster: AnyCluster, tmp_path: Path
) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"Python {version} is not here")
    installed = Installation(tmp_path / "environment", python, wheel)
    check_what_is_loaded(installed)
    check_what_is_lacking(installed)
    (tmp_path / "others.txt").write_text(COORDINATOR_OF_PYPI)
    installed.install(tmp_path / "others.txt")
    installed.install(LOCKS / "coordinator.lock")
    application = tmp_path / "application"
    application.mkdir()
    (application / "schemas.py").write_text("ORDER = b'an order'\n")
    (application / "main.py").write_text(APPLICATION)
    root, scope, log = f"/{tmp_path.name}", f"wheel-{version.replace('.', '-')}", tmp_path / "coordinator.log"
    with installed.coordinator(cluster, root, log):
        arguments = (str(application / "main.py"), cluster.bootstrap_servers, cluster.zookeeper, root, scope)
        assert installed.python(*arguments, PYTHONWARNINGS="error").split() == ["True", "True"], log.read_text()


def check_what_is_loaded(installed: Installation) -> None:
    """An import alone loads neither a library, nor what runs a cluster, nor Spark."""
    version, modules = json.loads(installed.python("-c", LOADED))
    assert version == rollbridge.__version__
    assert installed.command("--version").stdout.split()[-1] == version
    heavy = {*OURS, "pyspark", "confluent_kafka", "kio", "kazoo", "aiokafka"}
    assert {name for name in modules if name.partition(".")[0] in heavy} == {"rollbridge", "rollbridge.version"}


def check_what_is_lacking(installed: Installation) -> None:
    """Commands that need more than a client say what would bring it."""
    for command, extra in (
        (["up"], "local"),
        (["coordinator", "--help"], "coordinator"),
    ):
        lacking = installed.command(*command)
        assert lacking.returncode == 8, lacking
        assert f".whl[{extra}]'" in lacking.stderr
        assert "nothing was done" in lacking.stderr
    assert installed.command("--help").returncode == 0
    assert installed.command("stream", "--help").returncode == 0
