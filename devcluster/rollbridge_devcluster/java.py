"""The Java of this machine, and the command lines of the embedded servers.

Start time matters most, so the servers map their classes from an archive (application class-data sharing) instead of
parsing them from the jars: the broker answers after 1.1 s instead of 2.3 s. The first broker that is stopped in good
order records the archive into the cache. It is only an optimisation: a JVM starts without an unsuitable archive.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollbridge.errors import LocalEnvironmentError

JAVA_MAJOR_MIN: Final = 17
"""Brokers of Kafka 4 need Java 17."""

_ARCHIVES = "classes"
_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that is new enough."""

    executable: str
    major: int
    banner: str
    """Output of ``java -version``; tells one build from another."""

    @property
    def home(self) -> Path:
        """Return its own directory, with links resolved."""
        return Path(self.executable).resolve().parent.parent


def find_java() -> Java:
    """Find Java 17 or newer: in ``JAVA_HOME``, else on ``PATH``.

    Raises:
        LocalEnvironmentError: there is none; the message says what was found instead.
    """
    found: list[str] = []
    for origin, executable in _candidates():
        try:
            banner = subprocess.run(
                [executable, "-version"], capture_output=True, text=True, timeout=30, check=True
            ).stderr
        except (OSError, subprocess.SubprocessError) as exc:
            found.append(f"{executable} ({origin}) does not run: {exc}")
            continue
        version = _VERSION.search(banner)
        # Up to Java 8 the major number was the second one: "1.8.0".
        major = 0 if version is None else int(version[2] if version[1] == "1" and version[2] else version[1])
        if major >= JAVA_MAJOR_MIN:
            return Java(executable, major, banner)
        found.append(f"{executable} ({origin}) is Java {major or 'of unknown version'}")
    raise LocalEnvironmentError(
        f"Java {JAVA_MAJOR_MIN} or newer is needed to run Kafka and ZooKeeper, but "
        + ("; ".join(found) if found else "there is no java on PATH and JAVA_HOME is not set")
        + "; install one (on Debian: openjdk-17-jre-headless) or set JAVA_HOME"
    )


def _candidates() -> Iterator[tuple[str, str]]:
    if home := os.environ.get("JAVA_HOME"):
        yield "JAVA_HOME", str(Path(home) / "bin" / "java")
    if on_path := shutil.which("java"):
        yield "PATH", on_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Jvm:
    """Settings of one server's JVM."""

    java: Java
    classpath: Sequence[Path]
    heap: str
    """As after ``-Xmx``: ``1g``, ``256m``."""
    short_lived: bool
    """True starts faster and uses less memory; False runs faster in the long run."""
    scratch: Path
    """Directory for unpacked native libraries."""

    def command(self, main_class: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
        """Return the command line that runs a class."""
        if self.short_lived:
            tuning = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        else:
            tuning = ["-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20"]
        return [
            self.java.executable,
            f"-Xmx{self.heap}",
            *tuning,
            "-XX:+ExitOnOutOfMemoryError",
            # The mmapped statistics file can stall a JVM for as long as the disk does, and stays behind on SIGKILL.
            "-XX:-UsePerfData",
            "-Xshare:auto",
            "-Djava.awt.headless=true",
            "-Djava.net.preferIPv4Stack=true",
            f"-Djava.io.tmpdir={self.scratch}",
            *options,
            "-cp",
            os.pathsep.join(map(str, self.classpath)),
            main_class,
            *arguments,
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassArchive:
    """The recorded classes of one server, for one Java and one set of jars."""

    kept: Path
    """Its place in the cache, for all clusters."""
    recording: Path
    """File that a JVM of one cluster writes when it ends."""

    @classmethod
    def of(cls, name: str, java: Java, classpath: Sequence[Path], cache: Path, scratch: Path) -> ClassArchive:
        """Return the archive for this Java and these jars; if either changes, it is another one."""
        key = hashlib.sha256("\n".join([java.banner, *map(str, classpath)]).encode()).hexdigest()[:16]
        file = f"{name}-{key}.jsa"
        return cls(kept=cache / _ARCHIVES / file, recording=scratch / file)

    def use(self) -> list[str]:
        """Return the JVM options that map the archive; none without one."""
        # Whether it fits is the JVM's business, and a reason for it not to is none of the user's.
        return [f"-XX:SharedArchiveFile={self.kept}", "-Xlog:cds=off"] if self.kept.exists() else []

    def use_or_record(self) -> list[str]:
        """Return the same, or the options that record the archive if there is none yet."""
        return self.use() or [f"-XX:ArchiveClassesAtExit={self.recording}", "-Xlog:cds=off"]


def records_classes(command: Sequence[str]) -> bool:
    """Return True if a JVM with this command line records an archive when it ends in good order."""
    return any(option.startswith("-XX:ArchiveClassesAtExit=") for option in command)


def forget_recordings(scratch: Path) -> None:
    """Remove recordings that a killed JVM may have left half-written."""
    for recording in scratch.glob("*.jsa"):
        recording.unlink()


def keep_recordings(scratch: Path, cache: Path) -> None:
    """Move recordings into the cache; only for JVMs that ended normally, so that they are complete."""
    for recording in scratch.glob("*.jsa"):
        kept = cache / _ARCHIVES / recording.name
        kept.parent.mkdir(parents=True, exist_ok=True)
        # In two steps, as the cache may be on another file system.
        part = kept.with_name(f".{kept.name}.{os.getpid()}")
        shutil.move(recording, part)
        os.replace(part, kept)
