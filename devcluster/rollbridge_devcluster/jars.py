"""Pinned jars, downloaded once into the user's cache with verified checksums.

``jars.lock`` names every file with its SHA-256 and size. A file enters the cache by an atomic rename after its checksum
was verified, so a file there is complete; several processes may fetch at once. Each process verifies the checksums
again before it uses the files: others may write to the cache, too.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import http.client
import logging
import os
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import platformdirs
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from rollbridge.errors import LocalEnvironmentError

_log = logging.getLogger(__name__)

LOCK_FILE: Final = Path(__file__).with_name("jars.lock")
REPOSITORY_VARIABLE: Final = "ROLLBRIDGE_MAVEN_REPOSITORY"
"""Environment variable with the base URL of another Maven 2 repository."""

_CONNECTIONS = 8
_ATTEMPTS = 4
_TIMEOUT_SECONDS = 30.0
_NO_USE_RETRYING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS})
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Jar:
    """One file of a Maven 2 repository, with its pinned checksum and size."""

    path: str
    sha256: str
    size_bytes: int

    @property
    def name(self) -> str:
        """Return the file name, which holds artifact and version and so is unique in the cache."""
        return self.path.rpartition("/")[2]


def read_lock(lock_file: Path = LOCK_FILE) -> Mapping[str, tuple[Jar, ...]]:
    """Parse a lock file into its sets of jars, in the file's order."""
    sets: dict[str, list[Jar]] = {}
    for line in lock_file.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            set_name, sha256, size_bytes, path = line.split()
            sets.setdefault(set_name, []).append(Jar(path, sha256, int(size_bytes)))
    return {name: tuple(jars) for name, jars in sets.items()}


def default_cache() -> Path:
    """Return the directory of jars, shared by runs and checkouts."""
    return Path(platformdirs.user_cache_dir("rollbridge"))


def repository() -> str:
    """Return the Maven repository's base URL: the environment variable, else Maven Central."""
    if override := os.environ.get(REPOSITORY_VARIABLE):
        return override.rstrip("/")
    # Imported here because only a fetch needs it, and every command of the command line would pay for it.
    from jgo.constants import MAVEN_CENTRAL_URL

    return MAVEN_CENTRAL_URL.rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class JarCache:
    """The jars of a lock file on this machine."""

    directory: Path
    """Holds ``jars/``; created when first needed."""
    lock_file: Path = LOCK_FILE
    local_repository: Path | None = None
    """Maven's own cache on this machine; files with the right checksum are copied from there."""
    retry_seconds: float = 0.5
    """Pause after the first failed attempt; doubled after each further one."""

    @classmethod
    def default(cls, lock_file: Path = LOCK_FILE) -> JarCache:
        """Return the cache of this user, which also reads Maven's."""
        maven = Path.home() / ".m2" / "repository"
        return cls(directory=default_cache(), lock_file=lock_file, local_repository=maven)

    def jars(self, *set_names: str) -> list[Jar]:
        """Return the jars of the named sets, each once."""
        sets = read_lock(self.lock_file)
        return list(dict.fromkeys(jar for name in set_names for jar in sets[name]))

    def location(self, jar: Jar) -> Path:
        """Return the path of a jar in the cache, fetched or not."""
        return self.directory / "jars" / jar.name

    def missing(self, *set_names: str) -> list[Jar]:
        """Return the jars of the named sets that are not fetched yet."""
        return [jar for jar in self.jars(*set_names) if not self._has(jar)]

    def ensure(self, *set_names: str, quiet: bool = False) -> list[Path]:
        """Fetch the missing jars of the named sets and return all their files, in the lock's order.

        Shows a progress bar on standard error if that is a terminal, else two lines.

        Raises:
            LocalEnvironmentError: the repository cannot be reached or lacks a file, or the cache cannot be written.
            LocalEnvironmentError: a file is not the pinned one.
        """
        if self.missing(*set_names):
            with self._one_fetcher_at_a_time():
                # Asked again: another process may have fetched them while this one waited.
                if missing := self.missing(*set_names):
                    self._fetch_all(missing, Console(stderr=True, quiet=quiet))
        return [self.location(jar) for jar in self.jars(*set_names)]

    def _has(self, jar: Jar) -> bool:
        path = self.location(jar)
        try:
            found = path.stat()
            # The time of the inode's last change, which programs do not set back, unlike that of the content.
            return found.st_size == jar.size_bytes and _sha256(path, found.st_ino, found.st_ctime_ns) == jar.sha256
        except OSError:
            return False

    @contextmanager
    def _one_fetcher_at_a_time(self) -> Iterator[None]:
        try:
            (self.directory / "jars").mkdir(parents=True, exist_ok=True)
            lock = open(self.directory / "jars" / ".lock", "w", encoding="utf-8")  # noqa: SIM115 - closed below
        except OSError as exc:
            raise LocalEnvironmentError(f"the jar cache {self.directory} cannot be written: {exc}") from exc
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _fetch_all(self, jars: Sequence[Jar], console: Console) -> None:
        started = time.monotonic()
        base = repository()
        total = sum(jar.size_bytes for jar in jars)
        console.print(
            f"Fetching {len(jars)} jars ({total / 1e6:.0f} MB) into {self.directory}; kept for the next time",
            soft_wrap=True,
        )
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        give_up = threading.Event()
        with progress, ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="fetch-jar") as pool:
            bar = progress.add_task("jars", total=total)

            def fetch(jar: Jar) -> None:
                if not give_up.is_set():
                    self._fetch(jar, base, give_up)
                    progress.advance(bar, jar.size_bytes)

            # The large ones first, so that none of them is alone at the end.
            futures = [pool.submit(fetch, jar) for jar in sorted(jars, key=lambda jar: jar.size_bytes, reverse=True)]
            try:
                for future in futures:
                    future.result()
            finally:
                give_up.set()
        console.print(f"Fetched and verified in {time.monotonic() - started:.0f} s")

    def _fetch(self, jar: Jar, base: str, give_up: threading.Event) -> None:
        if self.local_repository is not None:
            source = self.local_repository / jar.path
            try:
                self._keep(jar, source.read_bytes(), str(source))
                return
            except FileNotFoundError:
                pass
            except (OSError, LocalEnvironmentError) as exc:
                _log.info('jar.unusable path=%s reason="%s"', source, exc)
        url = f"{base}/{jar.path}"
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
                    self._keep(jar, response.read(), url)
                return
            except (OSError, http.client.HTTPException, LocalEnvironmentError) as exc:
                if isinstance(exc, urllib.error.HTTPError):
                    # The error is the response, and holds the connection.
                    exc.close()
                if attempt == _ATTEMPTS or give_up.is_set() or not _worth_retrying(exc):
                    if isinstance(exc, LocalEnvironmentError):
                        raise
                    raise LocalEnvironmentError(
                        f"{jar.name} cannot be fetched from {base}: {exc}; check the network, or set "
                        f"{REPOSITORY_VARIABLE} to another Maven repository"
                    ) from exc
                _log.info('jar.fetch-failed jar=%s attempt=%s reason="%s"', jar.name, attempt, exc)
                give_up.wait(self.retry_seconds * 2 ** (attempt - 1))

    def _keep(self, jar: Jar, content: bytes, source: str) -> None:
        """Put a file in its place, whole or not at all.

        Raises:
            LocalEnvironmentError: it is not the pinned one.
        """
        found = hashlib.sha256(content).hexdigest()
        if found != jar.sha256:
            raise LocalEnvironmentError(
                f"{jar.name} from {source} has SHA-256 {found}, but {jar.sha256} is pinned; it was thrown away",
                code="checksum-mismatch",
            )
        location = self.location(jar)
        handle, name = tempfile.mkstemp(prefix=f".{jar.name}.", dir=location.parent)
        part = Path(name)
        try:
            with open(handle, "wb") as file:
                file.write(content)
            part.chmod(0o644)
            os.replace(part, location)
        finally:
            part.unlink(missing_ok=True)


@cache
def _sha256(path: Path, _inode: int, _changed_ns: int) -> str:
    """Return the checksum of a file, computed again after a change."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _worth_retrying(exc: Exception) -> bool:
    # A wrong checksum is tried again too: a proxy may have cut the answer short without an error.
    match exc:
        case urllib.error.HTTPError(code=status):
            return status in _TRANSIENT_STATUS
        case OSError(errno=number):
            return number not in _NO_USE_RETRYING
        case _:
            return True
