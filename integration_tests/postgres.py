"""A PostgreSQL of a test's own, Debian's, whose changes can be followed. Tests are skipped without one."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self

from integration_tests.backends.choice import lacking
from integration_tests.patience import await_exit, eventually

LOOPBACK: Final = "127.0.0.1"
USER: Final = "postgres"
"""Of the database, without a password."""
_OWNER: Final = "nobody"
"""The user of its processes if the tests' own is root, whom it does not serve."""
_SETTINGS: Final = {
    "listen_addresses": LOOPBACK,
    "wal_level": "logical",
    "fsync": "off",
    "log_min_messages": "warning",
}


class Postgres:
    """A server with one database. Ends with its ``with`` block, and leaves nothing.

    Attributes:
        port: Where it listens, at 127.0.0.1.
    """

    def __init__(self) -> None:
        """Find the programs; ends the test if they are not installed."""
        self._programs = _programs()
        with socket.create_server((LOOPBACK, 0)) as free:
            self.port = int(free.getsockname()[1])

    def __enter__(self) -> Self:
        # Not in a folder of pytest's, which another user may not enter.
        self._folder = Path(tempfile.mkdtemp(prefix="postgres-of-test-"))
        self._owner: dict[str, Any] = {"cwd": self._folder}
        if os.geteuid() == 0:
            owner = pwd.getpwnam(_OWNER)
            os.chown(self._folder, owner.pw_uid, owner.pw_gid)
            self._owner |= {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
        self._log = self._folder / "postgres.log"
        data = self._folder / "data"
        options = ["--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
        command = [str(self._programs / "initdb"), f"-D{data}", f"-U{USER}", *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **self._owner)
        given = [f"-c{name}={value}" for name, value in _SETTINGS.items()]
        with self._log.open("wb") as log:
            command = [str(self._programs / "postgres"), f"-D{data}", f"-p{self.port}", f"-k{self._folder}", *given]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, **self._owner)
        try:
            eventually(self._is_ready, "PostgreSQL is ready")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def do(self, *statements: str) -> str:
        """Carry out statements, each a transaction of its own, and return what they say, a row a line."""
        commands = [f"--command={statement}" for statement in statements]
        done = subprocess.run([*self._psql(), *commands], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    @contextmanager
    def holding(self, lock: int) -> Iterator[None]:
        """Hold an advisory lock of a number: whoever asks for it too waits until the block ends."""
        with subprocess.Popen(self._psql(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as session:
            assert session.stdin is not None
            assert session.stdout is not None
            session.stdin.write(f"SELECT pg_advisory_lock({lock});\n\\echo held\n")
            session.stdin.flush()
            try:
                while (line := session.stdout.readline()) != "held\n":
                    assert line, "psql has ended"
                yield
            finally:
                with suppress(BrokenPipeError):
                    session.stdin.close()  # psql ends with its input, and its lock with it

    def _psql(self) -> list[str]:
        options = ["--no-psqlrc", "--quiet", "--tuples-only", "--no-align", "--set=ON_ERROR_STOP=1"]
        return [
            str(self._programs / "psql"),
            *options,
            f"--host={LOOPBACK}",
            f"--port={self.port}",
            f"--username={USER}",
        ]

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        return subprocess.run([*self._psql(), "-c", "SELECT 1"], capture_output=True, check=False).returncode == 0

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)  # without waiting for its clients
        await_exit(self._process, self._log)
        shutil.rmtree(self._folder)


def _programs() -> Path:
    """The folder of its programs: Debian puts them beside the libraries."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    for folder in [*folders, *Path("/usr/lib/postgresql").glob("*/bin")]:
        if all((folder / name).exists() for name in ("initdb", "postgres", "psql")):
            return folder
    return lacking("no PostgreSQL: apt-get install postgresql (.ci/run does)")
