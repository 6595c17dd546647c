"""The client processes of a history."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from integration_tests.defects import defects_in
from integration_tests.history.events import (
    Call,
    Handed,
    Line,
    Listed,
    Operation,
    Reading,
    Refusal,
    read_calls,
    read_handed,
    read_listed,
    read_operations,
    read_refusals,
)
from integration_tests.history.tasks import Task
from integration_tests.patience import PATIENCE_S
from integration_tests.pauses import pause
from rollbridge.base.ids import SegmentId

AT_GATEWAYS: Final = ("passer", "javan")
"""Roles of clients that know gateways, and nothing else of us."""
THROUGH: Final = ("through", "rolling")
"""Roles of native producers, idempotent and transactional ones, that write through gateways to what has an owner."""
_ENVIRONMENT = {**os.environ, "PYTHONFAULTHANDLER": "1"}


def _abort(child: psutil.Process) -> str:
    """Have a process put its stacks into its log, and end; say what state it was in, and where in the kernel."""
    told = f"{child.pid} {child.status()} {Path(f'/proc/{child.pid}/wchan').read_text()}"
    child.send_signal(signal.SIGABRT)
    psutil.wait_procs([child], timeout=10)
    return told


class Workers:
    """Starts clients, and knows what they have noted. Use it in a ``with`` block: nobody is left afterwards."""

    def __init__(self, bootstrap_servers: str, zookeeper: str, folder: Path, seed: int) -> None:
        self.gateways = ""
        """Addresses of gateways, for clients that write through them."""
        self._bootstrap_servers = bootstrap_servers
        self._zookeeper = zookeeper
        self._folder = folder
        self._seed = seed
        self._processes: dict[str, tuple[Task, subprocess.Popen[bytes]]] = {}
        self._killed: set[str] = set()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for _task, process in self._processes.values():
            if process.poll() is None:
                os.kill(process.pid, signal.SIGCONT)
                if kind is not None:  # what each was in the middle of goes into its log
                    process.send_signal(signal.SIGABRT)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(10)
                process.kill()
                process.wait(PATIENCE_S)
            assert process.stdin is not None
            process.stdin.close()

    def start(self, role: str, streams: tuple[str, ...], heir_of: str | None = None) -> str:
        """One more client, perhaps with the name of a dead one; its choices follow from the seed and its number."""
        number = len(self._processes)
        name = f"{role[0]}{number}"
        out = str(self._folder / f"{name}.jsonl")
        dead = None if heir_of is None else self._processes[heir_of][0]
        left = None if dead is None else (dead.client_name, dead.out)
        seed = self._seed * 1_000 + number
        servers = self.gateways if role in (*AT_GATEWAYS, *THROUGH) else self._bootstrap_servers
        task = Task(name, role, servers, self._zookeeper, streams, seed, out, left)
        command = [sys.executable, "-m", "integration_tests.history.clients", task.to_json()]
        with (self._folder / f"{name}.log").open("wb") as log:
            client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=_ENVIRONMENT)
        self._processes[name] = task, client
        return name

    def alive(self, role: str = "writer", stream: str | None = None) -> list[str]:
        """Those of a role that are alive, or those of them that do it to one stream."""
        found = [
            name
            for name, (task, _) in self._processes.items()
            if task.role == role and stream in (None, task.streams[0])
        ]
        return [name for name in found if self._processes[name][1].poll() is None]

    def kill(self, name: str) -> None:
        """SIGKILL, and return when it is gone."""
        self._killed.add(name)
        self._processes[name][1].kill()
        self._processes[name][1].wait(PATIENCE_S)

    def kill_all(self, role: str) -> list[Task]:
        """SIGKILL all of a role that are alive; returns what each was told to do."""
        names = self.alive(role)
        for name in names:
            self.kill(name)
        return [self._processes[name][0] for name in names]

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self._processes[name][1].pid, number)

    def pause(self, name: str) -> None:
        """Have one stand still; SIGCONT wakes it up."""
        pause(self._processes[name][1])

    def deaths(self) -> Iterator[str]:
        """Those that ended although nobody killed them or asked them to end, and defects that were logged."""
        for name, (_, process) in self._processes.items():
            if name not in self._killed and process.poll() not in (None, 0):
                yield f"client {name} ended with {process.returncode}{self._said(name)}"
        yield from defects_in(self._folder)  # gateways and coordinators of a test's own log there, too

    def _said(self, name: str) -> str:
        said = (self._folder / f"{name}.log").read_text(errors="replace")
        return f", and said: {said[-12_000:]}"

    def stop(self, role: str, timeout_s: float) -> None:
        """Ask all clients of a role to end, and return when they have.

        Raises:
            AssertionError: One has not; with what it was in the middle of.
        """
        ending = [item for item in self._processes.values() if item[0].role == role and item[1].poll() is None]
        for _, process in ending:
            process.terminate()
        for task, process in ending:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                children = [_abort(child) for child in psutil.Process(process.pid).children(recursive=True)]
                process.send_signal(signal.SIGABRT)
                process.wait(PATIENCE_S)
                why = f"has not ended in {timeout_s} s, with children {children}"
                raise AssertionError(f"client {task.name} {why}{self._said(task.name)}") from None

    def noted(self, roles: Collection[str] = ("writer",)) -> int:
        """How many lines the writers have noted, or those of some roles."""
        outs = [Path(task.out) for task, _ in self._processes.values() if task.role in roles]
        return sum(path.read_bytes().count(b"\n") for path in outs if path.exists())

    def operations(self, role: str = "writer", stream: str | None = None) -> Iterator[Operation]:
        """What those of a role did, or those of them that do it to one stream."""
        for task, _ in self._processes.values():
            if task.role == role and stream in (None, task.streams[0]):
                yield from read_operations(self._lines(task))

    def handed(self) -> Iterator[Handed]:
        """What members of groups were handed."""
        for task, _ in self._processes.values():
            if task.role in ("member", "namer"):
                yield from read_handed(self._lines(task))

    def awaited(self) -> list[str]:
        """Updates of a state that members of a group were handed for which its stream waits."""
        awaiting = [task for task, _ in self._processes.values() if task.role == "awaited"]
        return [line["update"] for task in awaiting for line in self._lines(task) if "update" in line]

    def listed(self) -> Iterator[Listed]:
        """What readers of whole transactions were given."""
        for task, _ in self._processes.values():
            if task.role == "lister":
                yield from read_listed(self._lines(task))

    def readings(self) -> Iterator[Reading]:
        """What the readers saw."""
        for task, _ in self._processes.values():
            if task.role == "reader":
                lines = [line for line in self._lines(task) if "segment" in line]
                rows = [(SegmentId.from_int(line["segment"]), line["offset"], line["value"]) for line in lines]
                yield Reading(task.name, task.streams[0], tuple(rows), tuple(line["at"] for line in lines))

    def refusals(self) -> Iterator[Refusal]:
        """What producers at gateways were refused."""
        for task, _ in self._processes.values():
            yield from read_refusals(self._lines(task))

    def followed(self) -> Iterator[Reading]:
        """What followers of a stream that is truncated saw, each time from where they began."""
        for task, _ in self._processes.values():
            if task.role == "follower":
                runs: dict[int, list[tuple[SegmentId, int, str]]] = {}
                for line in self._lines(task):
                    if "run" in line:
                        row = SegmentId.from_int(line["segment"]), line["offset"], line["value"]
                        runs.setdefault(line["run"], []).append(row)
                for run, rows in runs.items():
                    yield Reading(f"{task.name}, run {run}", task.streams[0], tuple(rows))

    def calls(self) -> Iterator[Call]:
        """Calls that took longer than they were given."""
        for task, _ in self._processes.values():
            yield from read_calls(self._lines(task))

    def _lines(self, task: Task) -> Iterator[Line]:
        """Whole lines; one that was cut by a kill is none."""
        path = Path(task.out)
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return (json.loads(line) for line in lines)
