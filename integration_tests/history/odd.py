"""Clients that use what they are given in odd ways: they fork, share objects between threads, and give us code to run.

What they write is checked like everything else. Each thread and each child notes under a name of its own.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import rollbridge
from integration_tests.history.events import Answer, Kind, Write
from integration_tests.history.notebook import CALL_S, Notebook
from integration_tests.history.tasks import Task
from rollbridge.errors import RollbridgeError

FORK_S: Final = 3.0
"""Between two children."""
USERS: Final = 2
"""Threads that share everything."""
_DIE_WITH_PARENT: Final = 1
"""``PR_SET_PDEATHSIG``."""


class Broken(Exception):
    """Raised by an iterator of the application."""


def leave(*_: Any) -> None:
    """A callback that ends its thread, if it can."""
    sys.exit(3)


class Odd:
    """What the threads share: a connection, and a plain writer of the first stream."""

    def __init__(self, client: rollbridge.Bridge, task: Task) -> None:
        self.client, self.task = client, task
        self.stream = task.streams[0]
        self.writer = client.writer(self.stream)
        self._met = threading.Barrier(USERS)
        self._transaction: rollbridge.Transaction | None = None

    def use(self, number: int, book: Notebook, stopping: threading.Event) -> None:
        """What one thread does."""
        choice = random.Random(self.task.seed * 10 + number)
        count = 0
        while not stopping.is_set():
            count += 1
            values = [f"{book.client}:{count}:{place}" for place in range(choice.randint(1, 5))]
            writes = [Write(self.stream, f"{book.client}-{book.unclear}", value) for value in values]
            with suppress(RollbridgeError, TimeoutError):
                if choice.random() < 0.5:
                    self._write_plainly(book, writes, choice)
                else:
                    self._commit(book, writes)
            time.sleep(0.02)

    def _write_plainly(self, book: Notebook, writes: list[Write], choice: random.Random) -> None:
        """Through an iterator that takes its time, writes by itself, and raises in the end, now and then."""
        own = Write(self.stream, f"{writes[0].key}-own", f"{writes[0].value}-own")
        raises = choice.random() < 0.3

        def rows() -> Iterator[tuple[bytes, bytes]]:
            for write in writes:
                time.sleep(choice.random() / 50)
                yield write.key.encode(), write.value.encode()
            self.writer.write(own.key.encode(), own.value.encode()).add_done_callback(leave)
            if raises:
                raise Broken

        asked = [book.asked(Kind.PLAIN, write.value, [write]) for write in (*writes, own)]
        with book.timed("write of everything", CALL_S):
            with suppress(Broken):
                self.writer.write_all(rows())
            # A stranger's failure is told to the stranger, so all of these are there.
            try:
                self.writer.flush(CALL_S)
            except (RollbridgeError, TimeoutError):
                book.unclear += 1
                return
        for item in asked:
            with book.answered(item):
                pass

    def _commit(self, book: Notebook, writes: list[Write]) -> None:
        """A transaction whose callbacks leave; its records come from another thread than its commit."""
        transaction = self.client.begin(*self.task.streams)
        told: list[BaseException] = []

        def write() -> None:
            try:
                for item in writes:
                    future = transaction.write(item.stream, key=item.key.encode(), value=item.value.encode())
                    future.add_done_callback(leave)
            except RollbridgeError as fault:
                told.append(fault)

        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        if told:
            transaction.abort("not all could be written", timeout=CALL_S)
            return
        with book.noted(Kind.TRANSACTION, str(transaction.id), writes) as done:
            future = transaction.commit_async()
            future.add_done_callback(leave)
            done(position=future.result(CALL_S).position)


def behave_oddly(client: rollbridge.Bridge, task: Task, out: Path, stopping: threading.Event) -> None:
    """Let threads share a connection, and fork now and then, until asked to end."""
    odd = Odd(client, task)
    with out.open("a", buffering=1) as lines:
        threads = [
            threading.Thread(target=odd.use, args=(number, Notebook(f"{task.name}-{number}", lines), stopping))
            for number in range(USERS)
        ]
        for thread in threads:
            thread.start()
        children: list[int] = []
        while not stopping.wait(FORK_S):
            child = os.fork()
            if child == 0:
                os._exit(_be_a_child(odd, f"{task.name}-child{len(children)}", out))
            children.append(child)
        for thread in threads:
            thread.join()
        for child in children:
            _, status = os.waitpid(child, 0)
            if status:
                raise RuntimeError(f"a child ended with {status}")


def _be_a_child(odd: Odd, name: str, out: Path) -> int:
    """Use what was inherited, which is refused, and a connection of its own; gives an exit code."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.alarm(300)
    code = 1
    with out.open("a", buffering=1) as lines:
        book = Notebook(name, lines)
        for way in ("writer", "begin"):
            write = Write(odd.stream, name, f"{name}:inherited by {way}")
            asked = book.asked(Kind.PLAIN, write.value, [write])
            try:
                if way == "writer":
                    odd.writer.write(write.key.encode(), write.value.encode())
                else:
                    odd.client.begin(odd.stream)
            except RollbridgeError:
                book.note(replace(asked, answer=Answer.FAILED).to_line())
                code = 0
            else:
                code = 2
                break
        with (
            suppress(RollbridgeError, TimeoutError),
            rollbridge.connect(odd.task.bootstrap_servers, zookeeper=odd.task.zookeeper) as client,
        ):
            transaction = client.begin(odd.stream)
            write = Write(odd.stream, name, f"{name}:own")
            future = transaction.write(odd.stream, key=write.key.encode(), value=write.value.encode())
            with book.noted(Kind.TRANSACTION, str(transaction.id), [write]) as done:
                position = transaction.commit(timeout=CALL_S).position
                done(position=position, writes=(replace(write, place=str(future.result(1))),))
    return code
