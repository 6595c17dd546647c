"""What each image is built from: a digest of its inputs, which is quick to tell, and the files, which are not.

The toolbox is the base of all. Kafka and ZooKeeper stand on a Java, the coordinator on a Python.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rollbridge.embedded.jars import JarCache
from rollbridge.errors import EnvironmentProblem
from rollbridge.images import host, names
from rollbridge.images.tree import Tree

DOCKERFILE: Final = "Dockerfile"
PROJECT: Final = Path(__file__).parents[3]
"""The checkout of rollbridge that this module belongs to, if it belongs to one."""
PROJECT_FILES: Final = (
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "requirements/coordinator.lock",
    "bridge",
    "coordinator",
    "schemas",
)
"""What the coordinator's image is built from; ``.dockerignore`` lists the same."""
_SOURCES: Final = tuple(Path(__file__).with_name(name) for name in ("host.py", "recipes.py", "tree.py"))
"""The code on which an image depends."""
_KAFKA_JARS: Final = ("kafka", "kafka-image", "tools")
_ZOOKEEPER_JARS: Final = ("zookeeper", "zookeeper-image")
_TOOL: Final = re.compile(r"^  (kafka-[a-z-]+\.sh)\)", re.MULTILINE)
_LEFT_OUT: Final = re.compile(r"(^|/)(__pycache__|tests)/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one image is made."""

    base: str | None
    """Name of the image on which it stands; the build argument ``base_argument`` says so."""
    inputs: Callable[[], Iterator[str]]
    """What it depends on beside its base. If none of it has changed, neither has the image."""
    context: Callable[[Path], Tree]
    """Collects the files. Is given a directory that is removed when the image is built."""
    base_argument: str = "BASE"
    arguments: Mapping[str, str] = field(default_factory=dict)
    labels: Callable[[], Mapping[str, str]] = dict


def digest(inputs: Iterator[str]) -> str:
    """One word for all of them."""
    return hashlib.sha256("\n".join(inputs).encode()).hexdigest()[:32]


def _definition(name: str) -> Iterator[str]:
    """This package's code and the files of one definition."""
    for file in (*_SOURCES, *sorted((host.DEFINITIONS / name).iterdir())):
        yield hashlib.sha256(file.read_bytes()).hexdigest()


def _with_files(name: str, files: Tree, scratch: Path) -> Tree:
    """A context in which the Dockerfile unpacks the files with ``ADD``, which keeps links and modes."""
    archive = scratch / "files.tar"
    with archive.open("wb") as target:
        files.pack(target)
    return Tree(files={"files.tar": archive, DOCKERFILE: host.DEFINITIONS / name / DOCKERFILE})


def _toolbox_inputs() -> Iterator[str]:
    yield from _definition("toolbox")
    yield from host.fingerprint(host.find_tools().values())


def _java_inputs() -> Iterator[str]:
    yield from _definition("java")
    yield host.java_identity(host.java_home())


def _java_context(scratch: Path) -> Tree:
    return _with_files("java", host.java(host.java_home(), JarCache.default().directory), scratch)


def _python_inputs() -> Iterator[str]:
    yield from _definition("python")
    yield f"{sys.version} {sys.base_prefix}"


def _server_inputs(name: str, *jar_sets: str) -> Iterator[str]:
    yield from _definition(name)
    yield from (jar.sha256 for jar in JarCache.default().jars(*jar_sets))


def kafka_files() -> Tree:
    """Everything in Kafka's image but the jars."""
    definition = host.DEFINITIONS / "kafka"
    context = Tree(files={DOCKERFILE: definition / DOCKERFILE})
    for name in ("kafka-run-class.sh", "kafka-server-start.sh"):
        context.write((definition / name).read_text(encoding="utf-8"), f"opt/bin/{name}", executable=True)
    tool = (definition / "tool.sh").read_text(encoding="utf-8")
    for name in _TOOL.findall(tool):
        context.write(tool, f"opt/bin/{name}", executable=True)
    for name in ("run", "record-classes"):
        context.write((definition / name).read_text(encoding="utf-8"), f"docker/{name}", executable=True)
    for name in ("server.properties", "log4j2.yaml", "tools-log4j2.yaml"):
        context.add(definition / name, f"docker/{name}")
    return context


def _kafka_context(_: Path) -> Tree:
    context = kafka_files()
    for jar in JarCache.default().ensure(*_KAFKA_JARS):
        context.add(jar, f"opt/libs/{jar.name}")
    return context


def _zookeeper_context(_: Path) -> Tree:
    definition = host.DEFINITIONS / "zookeeper"
    context = Tree(files={DOCKERFILE: definition / DOCKERFILE, "conf/logback.xml": definition / "logback.xml"})
    for jar in JarCache.default().ensure(*_ZOOKEEPER_JARS):
        context.add(jar, f"home/lib/{jar.name}")
    for name in ("zkServer.sh", "zkCli.sh", "record-classes"):
        context.write((definition / name).read_text(encoding="utf-8"), f"home/bin/{name}", executable=True)
    entry = "docker-entrypoint.sh"
    context.write((definition / entry).read_text(encoding="utf-8"), entry, executable=True)
    return context


def _project() -> Tree:
    """The files of the checkout that make the coordinator's image."""
    missing = [name for name in (DOCKERFILE, *PROJECT_FILES) if not (PROJECT / name).exists()]
    if missing:
        raise EnvironmentProblem(
            f"{names.COORDINATOR} is built from a checkout of rollbridge, and {PROJECT} is none: "
            f"{', '.join(missing)} missing"
        )
    everything = Tree()
    for name in (DOCKERFILE, *PROJECT_FILES):
        everything.add(PROJECT / name, name)
    return Tree(files={path: source for path, source in everything.files.items() if not _LEFT_OUT.search(path)})


def _coordinator_inputs() -> Iterator[str]:
    for path, source in sorted(_project().files.items()):
        yield f"{path} {hashlib.sha256(source.read_bytes()).hexdigest()}"


def _coordinator_context(_: Path) -> Tree:
    context = _project()
    context.add(_wheels(PROJECT / "requirements" / "coordinator.lock", JarCache.default().directory), "wheels")
    return context


def _wheels(lock: Path, cache: Path) -> Path:
    """A directory with all wheels of a lock file, fetched once; pip checks their hashes, here and in the build."""
    key = hashlib.sha256(f"{sys.version} {lock.read_text(encoding='utf-8')}".encode()).hexdigest()[:16]
    wheels = cache / "wheels" / key
    if not wheels.exists():
        draft = wheels.with_name(f".{key}.{os.getpid()}")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary", ":all:", "--require-hashes", "-r", str(lock), "--dest", str(draft)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise EnvironmentProblem(f"the wheels of {lock} can not be fetched: {done.stderr.strip()}")
        draft.rename(wheels)
    return wheels


RECIPES: Final[Mapping[str, Recipe]] = {
    names.TOOLBOX: Recipe(
        base=None,
        inputs=_toolbox_inputs,
        context=lambda scratch: _with_files("toolbox", host.toolbox(), scratch),
        labels=lambda: {names.LABEL_TOOLS: " ".join(sorted(host.find_tools()))},
    ),
    names.JAVA: Recipe(base=names.TOOLBOX, inputs=_java_inputs, context=_java_context),
    names.PYTHON: Recipe(
        base=names.TOOLBOX,
        inputs=_python_inputs,
        context=lambda scratch: _with_files("python", host.python(), scratch),
    ),
    names.KAFKA: Recipe(base=names.JAVA, inputs=lambda: _server_inputs("kafka", *_KAFKA_JARS), context=_kafka_context),
    names.ZOOKEEPER: Recipe(
        base=names.JAVA,
        inputs=lambda: _server_inputs("zookeeper", *_ZOOKEEPER_JARS),
        context=_zookeeper_context,
        arguments={"HOME_DIR": f"/apache-zookeeper-{names.ZOOKEEPER.rpartition(':')[2]}-bin"},
    ),
    names.COORDINATOR: Recipe(
        base=names.PYTHON,
        base_argument="PYTHON_IMAGE",
        inputs=_coordinator_inputs,
        context=_coordinator_context,
        arguments={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "wheels"},
    ),
}
