"""What each image is made of: trees of files, programs of the machine that builds it, and recipes.

The toolbox is the base of all. Kafka and ZooKeeper stand on a Java, the coordinator on a Python. Everything in a
stand-in comes from one machine, so it fits together, and nothing but jars and wheels has to be fetched. A recipe has a
digest of its inputs, which is quick to tell, and its files, which are not.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final

from rollbridge.errors import LocalEnvironmentError
from rollbridge_devcluster import image_names as names
from rollbridge_devcluster.jars import JarCache
from rollbridge_devcluster.java import find_java

# -- trees of files -----------------------------------------------------------------------------------------

_EXECUTABLE: Final = 0o755
_PLAIN: Final = 0o644


@dataclass(slots=True)
class Tree:
    """What goes where; paths in the image have no leading slash. What is added twice counts once, as it was last."""

    files: dict[str, Path] = field(default_factory=dict)
    texts: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Content and mode."""
    links: dict[str, str] = field(default_factory=dict)
    directories: dict[str, int] = field(default_factory=dict)
    """Mode. Directories that files stand in need not be named."""

    def add(self, source: Path, path: str) -> None:
        """A file, or a directory with all that is in it; symbolic links are followed."""
        if not source.is_dir():
            self.files[path] = source
            return
        for directory, _, files in os.walk(source, followlinks=True):
            inside = PurePosixPath(path) / Path(directory).relative_to(source)
            for name in files:
                if (Path(directory) / name).exists():
                    self.files[str(inside / name)] = Path(directory) / name

    def write(self, text: str, path: str, *, executable: bool = False) -> None:
        """A file with this content."""
        self.texts[path] = (text, _EXECUTABLE if executable else _PLAIN)

    def pack(self, target: BinaryIO) -> None:
        """Write the archive. Everything belongs to root; a file that stands at several places is stored once."""
        with tarfile.open(fileobj=target, mode="w") as tar:
            for path, mode in sorted(self.directories.items()):
                tar.addfile(_member(path, tarfile.DIRTYPE, mode))
            for path, link in sorted(self.links.items()):
                tar.addfile(_member(path, tarfile.SYMTYPE, 0o777, link))
            for path, (text, mode) in sorted(self.texts.items()):
                content = text.encode()
                member = _member(path, tarfile.REGTYPE, mode)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            stored: dict[Path, str] = {}
            for path, source in sorted(self.files.items()):
                self._pack_file(tar, path, source.resolve(), stored)

    @staticmethod
    def _pack_file(tar: tarfile.TarFile, path: str, source: Path, stored: dict[Path, str]) -> None:
        executable = os.access(source, os.X_OK) or ".so" in source.name
        mode = _EXECUTABLE if executable else _PLAIN
        if source in stored:
            tar.addfile(_member(path, tarfile.LNKTYPE, mode, stored[source]))
            return
        stored[source] = path
        with source.open("rb") as file:
            member = _member(path, tarfile.REGTYPE, mode)
            member.size = os.fstat(file.fileno()).st_size
            tar.addfile(member, file)


def _member(path: str, kind: bytes, mode: int, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(path)
    member.type = kind
    member.mode = mode
    member.linkname = link
    return member


# -- what an image takes from the machine that builds it ----------------------------------------------------

SEARCH_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEFINITIONS: Final = Path(__file__).with_name("definitions")
TOOLS: Final = tuple((DEFINITIONS / "toolbox" / "tools.txt").read_text(encoding="utf-8").split())
"""Programs of the toolbox. Those that this machine lacks are left out, and the image's label tells."""

_LOADED: Final = (
    "libnss_files.so.2",
    "libnss_dns.so.2",
    "libresolv.so.2",
    "libgcc_s.so.1",
    "libstdc++.so.6",
    "libz.so.1",
    "libm.so.6",
    "libdl.so.2",
    "librt.so.1",
    "libpthread.so.0",
)
"""Libraries that are loaded by name at run time, or that compiled Python packages count on."""
_PLUGINS: Final = ("xtables", "faketime")
"""Directories of libraries that programs of the toolbox load, or that a program is started with."""
_USR_MERGED: Final = ("bin", "sbin", "lib", "lib64")
_LDD_LINE: Final = re.compile(r"^\s*(?:\S+ => )?(/\S+) \(0x[0-9a-f]+\)$", re.MULTILINE)
_JAVA_MODULES: Final = (
    "java.base,java.compiler,java.desktop,java.instrument,java.logging,java.management,java.management.rmi,java.naming,"
    "java.net.http,java.rmi,java.scripting,java.security.jgss,java.security.sasl,java.sql,java.xml,jdk.crypto.ec,"
    "jdk.jcmd,jdk.management,jdk.management.agent,jdk.naming.dns,jdk.security.auth,jdk.unsupported,jdk.zipfs"
)
_JAVA_LEFT_OUT: Final = frozenset({"demo", "docs", "include", "jmods", "legal", "man", "src.zip"})
_PYTHON_LEFT_OUT: Final = re.compile(
    r"(^|/)(__pycache__|config-[^/]+|dist-packages|idlelib|site-packages|test|tests|tkinter|turtledemo)/|\.a$|_tkinter"
)


def libraries(listing: str) -> set[str]:
    """The files that ``ldd`` names, the dynamic loader included."""
    return set(_LDD_LINE.findall(listing))


def in_image(path: str | Path) -> str:
    """Where a file of this machine stands in an image, in which ``/bin`` and its like are links into ``/usr``."""
    relative = str(path).lstrip("/")
    return f"usr/{relative}" if relative.partition("/")[0] in _USR_MERGED else relative


def needed_by(programs: Iterable[Path]) -> set[Path]:
    """The shared libraries of programs and of other libraries; nothing for what is a script or linked statically."""
    answer = subprocess.run(
        ["ldd", *(str(program) for program in programs)], capture_output=True, text=True, check=False
    )
    return {Path(library) for library in libraries(answer.stdout)}


def find_tools() -> dict[str, Path]:
    """The programs of the toolbox that this machine has, by name."""
    found = {name: shutil.which(name, path=SEARCH_PATH) for name in TOOLS}
    return {name: Path(path) for name, path in found.items() if path is not None}


def fingerprint(files: Iterable[Path]) -> Iterator[str]:
    """What tells one state of files from another, without reading them."""
    for file in files:
        stat = file.stat()
        yield f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}"


def toolbox() -> Tree:
    """A root file system with the tools, the libraries that almost everything needs, and users root and nobody."""
    tree = Tree()
    tools = find_tools()
    loaded = [file for name in _LOADED if (file := _library(name)) is not None]
    plugins = [file for name in _PLUGINS for file in _plugins(name)]
    for name, program in tools.items():
        tree.add(program, f"{in_image(program.parent)}/{name}")
    for library in (*loaded, *plugins, *needed_by([*tools.values(), *loaded, *plugins])):
        tree.add(library, in_image(library))
    for name in ("etc/protocols", "etc/services", "etc/ssl/certs/ca-certificates.crt"):
        if (file := Path("/", name)).exists():
            tree.add(file, name)
    tree.write("root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n", "etc/passwd")
    tree.write("root:x:0:\nnogroup:x:65534:\n", "etc/group")
    tree.write("passwd: files\ngroup: files\nhosts: files dns\n", "etc/nsswitch.conf")
    tree.write("/usr/local/lib\n", "etc/ld.so.conf")
    tree.write('ID=rollbridge\nNAME="files of the machine that built the image"\n', "etc/os-release")
    tree.links = {name: f"usr/{name}" for name in _USR_MERGED}
    tree.directories = {"tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700}
    tree.directories |= dict.fromkeys(("dev", "opt", "proc", "run", "sys", "usr/local/bin", "usr/sbin"), 0o755)
    return tree


def java_home() -> Path:
    """The directory of the Java that would go into an image.

    Raises:
        LocalEnvironmentError: there is none that is new enough.
    """
    return find_java().home


def java_identity(home: Path) -> str:
    """What tells one Java from another."""
    release = home / "release"
    said = release.read_text(encoding="utf-8") if release.exists() else find_java().banner
    return f"{home} {said} {_JAVA_MODULES}"


def java(home: Path, cache: Path) -> Tree:
    """A Java runtime at ``/opt/java/openjdk``: linked from the modules that the servers need if this machine has a JDK,
    else all of its runtime.

    Args:
        home: What :func:`java_home` found.
        cache: Directory in which linked runtimes are kept.

    Raises:
        LocalEnvironmentError: the runtime cannot be made.
    """
    key = hashlib.sha256(java_identity(home).encode()).hexdigest()[:16]
    runtime = cache / "runtimes" / key
    if not runtime.exists():
        runtime.parent.mkdir(parents=True, exist_ok=True)
        draft = runtime.with_name(f".{key}.{os.getpid()}")
        try:
            _make_runtime(home, draft)
            draft.rename(runtime)
        except (OSError, subprocess.CalledProcessError) as fault:
            said = getattr(fault, "stderr", None) or str(fault)
            raise LocalEnvironmentError(f"no Java runtime can be made of {home}: {said}") from fault
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    tree = Tree()
    tree.add(runtime, "opt/java/openjdk")
    for library in needed_by([runtime / "bin" / "java", *runtime.rglob("*.so")]):
        if not library.is_relative_to(runtime):
            tree.add(library, in_image(library))
    return tree


def python() -> Tree:
    """This interpreter with its standard library and the wheels of ``ensurepip``, below ``/usr/local``."""
    paths = sysconfig.get_paths()
    standard_library = Path(paths["stdlib"])
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    executable = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    tree = Tree(links={f"usr/local/bin/{alias}": name for alias in ("python", "python3")})
    tree.add(executable, f"usr/local/bin/{name}")
    modules = Tree()
    modules.add(standard_library, f"usr/local/lib/{name}")
    tree.files |= {path: source for path, source in modules.files.items() if not _PYTHON_LEFT_OUT.search(path)}
    if (wheels := sysconfig.get_config_var("WHEEL_PKG_DIR")) and Path(wheels).is_dir():
        # Debian keeps them apart from the standard library.
        tree.add(Path(wheels), wheels.strip("/"))
    compiled = [source for path, source in tree.files.items() if path.endswith(".so")]
    for library in needed_by([executable, *compiled]):
        own = library.is_relative_to(sys.base_prefix) and sys.base_prefix != "/usr"
        tree.add(library, f"usr/local/lib/{library.name}" if own else in_image(library))
    return tree


def _make_runtime(home: Path, target: Path) -> None:
    link = home / "bin" / "jlink"
    if link.exists():
        command = [str(link), "--add-modules", _JAVA_MODULES, "--strip-debug", "--no-header-files", "--no-man-pages"]
        subprocess.run([*command, "--output", str(target)], capture_output=True, text=True, check=True)
    else:
        shutil.copytree(
            home,
            target,
            ignore=lambda _, names: _JAVA_LEFT_OUT & set(names),
            ignore_dangling_symlinks=True,
        )
    # The archive of the JDK's own classes, on which those of the servers are based.
    subprocess.run([str(target / "bin" / "java"), "-Xshare:dump"], capture_output=True, text=True, check=True)


def _library_directories() -> Iterator[Path]:
    architecture = sysconfig.get_config_var("MULTIARCH")
    for directory in ("/usr/lib", "/lib"):
        if architecture:
            yield Path(directory, architecture)
        yield Path(f"{directory}64")
        yield Path(directory)


def _library(name: str) -> Path | None:
    return next((file for directory in _library_directories() if (file := directory / name).exists()), None)


def _plugins(name: str) -> Iterator[Path]:
    directory = _library(name)
    if directory is not None:
        yield from sorted(directory.glob("*.so*"))


# -- recipes ------------------------------------------------------------------------------------------------

DOCKERFILE: Final = "Dockerfile"
PROJECT: Final = Path(__file__).parents[2]
"""The checkout of rollbridge that this module belongs to, if it belongs to one."""
PROJECT_FILES: Final = (
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "requirements/coordinator.lock",
    "bridge",
    "coordinator",
    "devcluster",
    "gateway",
    "schemas",
)
"""What the coordinator's image is built from; ``.dockerignore`` lists the same."""
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
    """This code and the files of one definition."""
    for file in (Path(__file__), *sorted((DEFINITIONS / name).iterdir())):
        yield hashlib.sha256(file.read_bytes()).hexdigest()


def _with_files(name: str, files: Tree, scratch: Path) -> Tree:
    """A context in which the Dockerfile unpacks the files with ``ADD``, which keeps links and modes."""
    archive = scratch / "files.tar"
    with archive.open("wb") as target:
        files.pack(target)
    return Tree(files={"files.tar": archive, DOCKERFILE: DEFINITIONS / name / DOCKERFILE})


def _toolbox_inputs() -> Iterator[str]:
    yield from _definition("toolbox")
    yield from fingerprint(find_tools().values())


def _java_inputs() -> Iterator[str]:
    yield from _definition("java")
    yield java_identity(java_home())


def _java_context(scratch: Path) -> Tree:
    return _with_files("java", java(java_home(), JarCache.default().directory), scratch)


def _python_inputs() -> Iterator[str]:
    yield from _definition("python")
    yield f"{sys.version} {sys.base_prefix}"


def _prometheus() -> list[Path]:
    """Prometheus and its tool, of this machine.

    Raises:
        LocalEnvironmentError: they are not installed.
    """
    found = [shutil.which(name, path=SEARCH_PATH) for name in ("prometheus", "promtool")]
    if None in found:
        raise LocalEnvironmentError(
            f"{names.PROMETHEUS} is built from the Prometheus of this machine, which has none; on Debian: "
            "apt install prometheus; no image was made"
        )
    return [Path(name) for name in found if name is not None]


def _prometheus_inputs() -> Iterator[str]:
    yield from _definition("prometheus")
    yield from fingerprint(_prometheus())


def _prometheus_context(scratch: Path) -> Tree:
    tree, programs = Tree(), _prometheus()
    for program in programs:
        tree.add(program, in_image(f"/bin/{program.name}"))
    for library in needed_by(programs):
        tree.add(library, in_image(library))
    return _with_files("prometheus", tree, scratch)


def _server_inputs(name: str, *jar_sets: str) -> Iterator[str]:
    yield from _definition(name)
    yield from (jar.sha256 for jar in JarCache.default().jars(*jar_sets))


def kafka_files() -> Tree:
    """Everything in Kafka's image but the jars."""
    definition = DEFINITIONS / "kafka"
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
    definition = DEFINITIONS / "zookeeper"
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
        raise LocalEnvironmentError(
            f"{names.COORDINATOR} is built from a checkout of rollbridge, and {PROJECT} is not one: "
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
            raise LocalEnvironmentError(f"the wheels of {lock} cannot be fetched: {done.stderr.strip()}")
        draft.rename(wheels)
    return wheels


RECIPES: Final[Mapping[str, Recipe]] = {
    names.TOOLBOX: Recipe(
        base=None,
        inputs=_toolbox_inputs,
        context=lambda scratch: _with_files("toolbox", toolbox(), scratch),
        labels=lambda: {names.LABEL_TOOLS: " ".join(sorted(find_tools()))},
    ),
    names.JAVA: Recipe(base=names.TOOLBOX, inputs=_java_inputs, context=_java_context),
    names.PYTHON: Recipe(
        base=names.TOOLBOX,
        inputs=_python_inputs,
        context=lambda scratch: _with_files("python", python(), scratch),
    ),
    names.KAFKA: Recipe(base=names.JAVA, inputs=lambda: _server_inputs("kafka", *_KAFKA_JARS), context=_kafka_context),
    names.ZOOKEEPER: Recipe(
        base=names.JAVA,
        inputs=lambda: _server_inputs("zookeeper", *_ZOOKEEPER_JARS),
        context=_zookeeper_context,
        arguments={"HOME_DIR": f"/apache-zookeeper-{names.ZOOKEEPER.rpartition(':')[2]}-bin"},
    ),
    names.PROMETHEUS: Recipe(base=names.TOOLBOX, inputs=_prometheus_inputs, context=_prometheus_context),
    names.COORDINATOR: Recipe(
        base=names.PYTHON,
        base_argument="PYTHON_IMAGE",
        inputs=_coordinator_inputs,
        context=_coordinator_context,
        arguments={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "wheels"},
    ),
}
