"""Small Java programs for Python ones: compiled once, by a compiler among the pinned jars, as a JRE has none."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from rollbridge.errors import LocalEnvironmentError
from rollbridge_devcluster.jars import JarCache
from rollbridge_devcluster.java import find_java

COMPILER: Final = "compiler"
"""The set of jars that holds it."""


def program_command(
    source: Path, classpath: Sequence[Path], *, heap: str = "256m", options: Sequence[str] = ()
) -> list[str]:
    """Return the command line that runs a program of one file, without its arguments.

    Args:
        source: The file, named after its public class.
        classpath: Jars that it needs.
        heap: As after ``-Xmx``.
        options: Further ones of the JVM.

    Raises:
        LocalEnvironmentError: there is no Java, the compiler cannot be fetched, or the program does not compile.
    """
    folders = [compile_program(source, classpath), *classpath]
    tuning = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Xmx{heap}"]
    return [find_java().executable, *tuning, *options, "-cp", os.pathsep.join(map(str, folders)), source.stem]


def compile_program(source: Path, classpath: Sequence[Path]) -> Path:
    """Return the folder of a program's classes, from the cache or compiled now. Raises as above."""
    jars = JarCache.default()
    content = "\n".join([source.read_text(encoding="utf-8"), *(path.name for path in classpath)])
    digest = hashlib.sha256(content.encode()).hexdigest()
    folder = jars.directory / "programs" / f"{source.stem}-{digest[:16]}"
    if folder.exists():
        return folder
    [compiler] = jars.ensure(COMPILER)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        command = [find_java().executable, "-jar", str(compiler), "-17", "-proc:none", "-nowarn"]
        command += ["-cp", os.pathsep.join(map(str, classpath)), "-d", str(made), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LocalEnvironmentError(f"{source.name} does not compile: {done.stderr.strip()}")
        with suppress(OSError):  # another process was faster
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder
