"""What an image takes from the machine that builds it: programs, the shared libraries that they need, a Java, a Python.

Everything in an image comes from one machine, so it fits together; and nothing has to be fetched.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from rollbridge.embedded.java import find_java
from rollbridge.errors import EnvironmentProblem
from rollbridge.images.tree import Tree

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
        EnvironmentProblem: there is none that is new enough.
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
        EnvironmentProblem: the runtime can not be made.
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
            raise EnvironmentProblem(f"no Java runtime can be made of {home}: {said}") from fault
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
