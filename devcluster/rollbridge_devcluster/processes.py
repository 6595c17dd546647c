"""Daemon processes that are found again by a mark in their environment.

Every process of an embedded cluster carries ``ROLLBRIDGE_EMBEDDED=PART@HOME``. Only a process with the mark is ours,
whatever its id: a process id that was reused is never signalled, and a process that was started but never recorded (its
starter was killed in between) is found as well.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

_log = logging.getLogger(__name__)

MARK: Final = "ROLLBRIDGE_EMBEDDED"

_POLL_SECONDS = 0.02
_STOPPED_SECONDS = 10.0
"""Longest wait for the threads of a process to stop."""
_FOREIGN = ("ROLLBRIDGE_CONFIG", "ROLLBRIDGE_KAFKA_", "ROLLBRIDGE_ZOOKEEPER", "ROLLBRIDGE_BOOTSTRAP_SERVERS")
"""Settings of another cluster, which the processes of this one must not inherit."""

_children: dict[int, subprocess.Popen[bytes]] = {}
"""Own children, kept so that they are reaped when they end while this process runs."""

_exit_codes: dict[int, int] = {}


def spawn(
    command: Sequence[str],
    *,
    home: Path,
    part: str,
    output: Path,
    env: Mapping[str, str] | None = None,
) -> psutil.Process:
    """Start a daemon in a session of its own, appending its output to ``output``."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
    environment = {**inherited, **(env or {}), MARK: f"{part}@{home.resolve()}"}
    with open(output, "ab") as log, _interrupted_later():
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=home,
            env=environment,
            start_new_session=True,
        )
        _children[child.pid] = child
    _log.debug("process.started part=%s pid=%s command=%s", part, child.pid, command)
    return psutil.Process(child.pid)


@contextmanager
def _interrupted_later() -> Iterator[None]:
    """Postpone an interrupt: in the middle of a start it would leave a process without a mark."""
    if threading.current_thread() is not threading.main_thread():
        yield  # where no interrupt arrives
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def run(command: Sequence[str], *, home: Path, part: str, output: Path, timeout_seconds: float) -> int | None:
    """Run a process that ends by itself, and return its exit code; ``None`` if it was killed after the time-out.

    It carries the mark like a daemon, so that it is found if this process is killed while waiting.
    """
    try:
        process = spawn(command, home=home, part=part, output=output)
        _wait([process], timeout_seconds)
        return exit_code(process.pid)
    finally:
        kill(find(home).get(part, []))  # also if spawn itself was interrupted


def reap() -> None:
    """Collect children that have ended; others would still have an id."""
    for pid, child in list(_children.items()):
        if (code := child.poll()) is not None:
            _exit_codes[pid] = code
            del _children[pid]


def exit_code(pid: int) -> int | None:
    """Return the exit code of a process started here (negative: the signal), ``None`` while it runs."""
    reap()
    return _exit_codes.get(pid)


def find(home: Path) -> dict[str, list[psutil.Process]]:
    """Return the live processes of the cluster in a directory, by part."""
    reap()
    suffix = f"@{home.resolve()}"
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid():
                continue
            mark = process.environ().get(MARK, "")
        except (psutil.Error, OSError):
            # It has just ended, or belongs to another user; either way it is not ours.
            continue
        if mark.endswith(suffix):
            found.setdefault(mark.removesuffix(suffix), []).append(process)
    return found


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal; a process that has ended needs none."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        reap()


def pause(process: psutil.Process) -> None:
    """SIGSTOP a process, and return when none of its threads runs any more: they stop one after the other."""
    send(process, signal.SIGSTOP)
    deadline = time.monotonic() + _STOPPED_SECONDS
    while not stands_still(process.pid) and time.monotonic() < deadline:
        time.sleep(0.001)


def stands_still(pid: int) -> bool:
    """Return True if all threads of a process are stopped, or if there is no /proc to tell."""
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):
            state = file.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
            if state not in "TtZX":
                return False
    return True


def stop(processes: Iterable[psutil.Process], patience_seconds: float) -> bool:
    """End processes: SIGTERM, wait, then SIGKILL. Return True if none needed that."""
    alive = list(processes)
    for process in alive:
        send(process, signal.SIGTERM)
        # A paused process would not see the request.
        send(process, signal.SIGCONT)
    alive = _wait(alive, patience_seconds)
    kill(alive)
    return not alive


def kill(processes: Iterable[psutil.Process]) -> None:
    """End processes at once, and return when they are gone."""
    alive = list(processes)
    for process in alive:
        send(process, signal.SIGKILL)
    for process in _wait(alive, 30):
        _log.warning("process.unkillable pid=%s", process.pid)


def _wait(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait until processes are gone; return those that are not."""
    deadline = time.monotonic() + seconds
    alive = list(processes)
    # Not psutil.wait_procs: it collects our children's exit codes before subprocess can.
    while alive := [process for process in alive if is_alive(process)]:
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    return alive


def is_alive(process: psutil.Process) -> bool:
    """Return True if this very process (not a later one with its id) still runs, with any of its threads."""
    reap()
    if process.pid in _children:
        return True
    try:
        if not process.is_running():
            return False
        # A process whose first thread has ended looks like a zombie while its other threads still hold its ports.
        return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
    except psutil.NoSuchProcess:
        return False
