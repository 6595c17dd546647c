"""Clients that use what they are given in odd ways: they fork, share objects between threads, and give us code to run.

What they write is checked like everything else. Each thread and each child notes under a name of its own.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import rollbridge
from integration_tests.history.events import Answer, Kind, Write
from integration_tests.history.notebook import CALL_S, Notebook
from integration_tests.history.tasks import Task
from integration_tests.patience import once_available
from rollbridge.errors import InvalidRequestError, RollbridgeError

FORK_S: Final = 3.0
"""Between two children."""
USERS: Final = 2
"""Threads that share everything."""
BLOCKS_S: Final = 0.2
"""For so long code of the application stands still, at most."""
_DIE_WITH_PARENT: Final = 1
"""``PR_SET_PDEATHSIG``."""
Rows = Iterator[tuple[bytes, bytes]]


class Broken(Exception):
    """Raised by code of the application."""


class Odd:
    """What the threads share: a connection, a plain and a conditional writer of the first stream, and what is open."""

    def __init__(self, client: rollbridge.Bridge, task: Task) -> None:
        self.client, self.task = client, task
        self.stream = task.streams[0]
        self.writer = client.writer(self.stream)
        self.conditional = client.cas_writer(self.stream, timeout=20)
        self.reader = client.reader(self.stream)

    def use(self, number: int, book: Notebook, stopping: threading.Event) -> None:
        """What one thread does."""
        choice = random.Random(self.task.seed * 10 + number)
        count = 0
        while not stopping.is_set():
            count += 1
            values = [f"{book.client}:{count}:{place}" for place in range(choice.randint(1, 5))]
            writes = [Write(self.stream, f"{book.client}-{book.unclear}", value) for value in values]
            chance = choice.random()
            with suppress(RollbridgeError, TimeoutError):
                if chance < 0.4:
                    self._write_plainly(book, writes, choice)
                elif chance < 0.6:
                    self._write_conditionally(book, values[0], choice)
                else:
                    self._commit(book, writes, choice)
            time.sleep(0.02)

    def callback(self, book: Notebook, name: str, choice: random.Random) -> Callable[..., None]:
        """A callback that ends its thread, if it can, raises, takes its time, or calls us again."""
        way = choice.choice(("exit", "raise", "block", "write", "commit"))
        takes_s = choice.uniform(0, BLOCKS_S)

        def called(*_: Any) -> None:
            match way:
                case "exit":
                    sys.exit(3)
                case "raise":
                    raise Broken
                case "block":
                    time.sleep(takes_s)
                case "write":
                    self._write_again(book, f"{name}-again")
                case "commit":
                    self._commit_again(book, f"{name}-again")

        return called

    def _write_again(self, book: Notebook, value: str) -> None:
        write, own = Write(self.stream, value, value), Notebook(value, book.out)
        asked = own.asked(Kind.PLAIN, value, [write])

        def answered(future: rollbridge.PlainFuture) -> None:
            with own.answered(asked) as done:
                done(writes=(replace(write, place=str(future.result(0).dlsn)),))

        self.writer.write(value.encode(), value.encode()).add_done_callback(answered)

    def _commit_again(self, book: Notebook, value: str) -> None:
        write, own = Write(self.stream, value, value), Notebook(value, book.out)
        transaction = self.client.begin(self.stream)
        transaction.write(self.stream, key=value.encode(), value=value.encode())
        asked = own.asked(Kind.TRANSACTION, str(transaction.id), [write])

        def answered(future: rollbridge.CommitFuture) -> None:
            with own.answered(asked) as done:
                done(position=future.result(0).position)

        transaction.commit_async().add_done_callback(answered)

    def _write_plainly(self, book: Notebook, writes: list[Write], choice: random.Random) -> None:
        """Through an iterator that takes its time, writes by itself, and raises or exits in the end, now and then."""
        own = Write(self.stream, f"{writes[0].key}-own", f"{writes[0].value}-own")
        chance = choice.random()

        def rows() -> Rows:
            for write in writes:
                time.sleep(choice.random() / 50)
                yield write.key.encode(), write.value.encode()
            future = self.writer.write(own.key.encode(), own.value.encode())
            future.add_done_callback(self.callback(book, own.value, choice))
            if chance < 0.2:
                raise Broken
            if chance < 0.4:
                sys.exit(3)

        asked = [book.asked(Kind.PLAIN, write.value, [write]) for write in (*writes, own)]
        with book.timed("write of everything", CALL_S):
            with suppress(Broken, SystemExit):
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

    def _write_conditionally(self, book: Notebook, value: str, choice: random.Random) -> None:
        """Under a key that all threads write."""
        key = f"{self.task.name}-shared"
        sn = self.conditional.tail(key.encode(), scope="key")
        expected = -1 if sn.sequence_id is None else sn.sequence_id
        write = Write(self.stream, key, value)
        with book.noted(Kind.CONDITIONAL, value, [write], expected=expected) as done:
            future = self.conditional.write_async(key.encode(), value.encode(), expected=sn, scope="key")
            future.add_done_callback(self.callback(book, value, choice))
            done(writes=(replace(write, place=str(future.result(CALL_S).dlsn)),))

    def _commit(self, book: Notebook, writes: list[Write], choice: random.Random) -> None:
        """A transaction that two threads write at once, and whose end two threads ask for."""
        transaction = self.client.begin(*self.task.streams)
        others = [replace(write, key=f"{write.key}-other", value=f"{write.value}-other") for write in writes]
        told: list[BaseException] = []

        def rows() -> Rows:
            for write in others:
                time.sleep(choice.random() / 50)
                yield write.key.encode(), write.value.encode()

        def write_rows() -> None:
            try:
                transaction.write_all(self.stream, rows())
            except RollbridgeError as fault:
                told.append(fault)

        thread = threading.Thread(target=write_rows)
        thread.start()
        try:
            for item in writes:
                future = transaction.write(item.stream, key=item.key.encode(), value=item.value.encode())
                future.add_done_callback(self.callback(book, item.value, choice))
        except RollbridgeError as fault:
            told.append(fault)
        thread.join()
        if told:
            transaction.abort("not all could be written", timeout=CALL_S)
            return
        positions: list[Any] = []

        def ask_as_well() -> None:
            with suppress(RollbridgeError, TimeoutError):
                positions.append(transaction.commit(timeout=CALL_S).position)

        with book.noted(Kind.TRANSACTION, str(transaction.id), [*writes, *others]) as done:
            thread = threading.Thread(target=ask_as_well)
            thread.start()
            try:
                asked = transaction.commit_async()
                asked.add_done_callback(self.callback(book, f"{writes[0].value}-commit", choice))
                position = asked.result(CALL_S).position
            finally:
                thread.join()
            done(position=position)
            if positions not in ([], [position]):
                raise RuntimeError(f"{transaction.id} was told two positions: {position} and {positions}")


def behave_oddly(client: rollbridge.Bridge, task: Task, out: Path, stopping: threading.Event) -> None:
    """Let threads share a connection, and fork now and then, until asked to end."""
    odd = once_available(lambda: Odd(client, task))
    with out.open("a", buffering=1) as lines:
        threads = [
            threading.Thread(target=odd.use, args=(number, Notebook(f"{task.name}-{number}", lines), stopping))
            for number in range(USERS)
        ]
        for thread in threads:
            thread.start()
        book = Notebook(f"{task.name}-parent", lines)
        children: list[int] = []
        while not stopping.wait(FORK_S):
            with suppress(RollbridgeError, TimeoutError):
                _fork(odd, book, children, out)
        for thread in threads:
            thread.join()
        for child in children:
            _, status = os.waitpid(child, 0)
            if status:
                raise RuntimeError(f"a child ended with {status}")


def _fork(odd: Odd, book: Notebook, children: list[int], out: Path) -> None:
    """Fork with a transaction open, and commit it afterwards."""
    name = f"{book.client}-{len(children)}"
    write = Write(odd.stream, name, name)
    transaction = odd.client.begin(odd.stream)
    transaction.write(odd.stream, key=write.key.encode(), value=write.value.encode())
    child = os.fork()
    if child == 0:
        code = 3
        try:
            faulthandler.dump_traceback_later(150, exit=True)  # before its parent is out of time, which is told where
            code = _be_a_child(odd, transaction, f"{odd.task.name}-child{len(children)}", out)
        except BaseException:
            traceback.print_exc()
        finally:  # whatever comes, it must not go on as its parent does
            sys.stderr.flush()
            os._exit(code)
    children.append(child)
    with book.noted(Kind.TRANSACTION, str(transaction.id), [write]) as done:
        done(position=transaction.commit(timeout=CALL_S).position)


def _be_a_child(odd: Odd, transaction: rollbridge.Transaction, name: str, out: Path) -> int:
    """Use what was inherited, which is refused, and a connection of its own; gives an exit code."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    inherited: dict[str, Callable[[bytes], object]] = {
        "a plain writer": lambda value: odd.writer.write(value, value),
        "a plain writer's flush": lambda _: odd.writer.flush(CALL_S),
        "a conditional writer": lambda value: odd.conditional.write(value, value, expected=rollbridge.ANY),
        "a connection": lambda _: odd.client.begin(odd.stream),
        "an open transaction": lambda value: transaction.write(odd.stream, key=value, value=value),
        "its commit": lambda _: transaction.commit(timeout=CALL_S),
        "its abort": lambda _: transaction.abort("by a child", timeout=CALL_S),
        "a reader": lambda _: odd.reader.poll(1.0),
        "an admin": lambda _: odd.client.admin.describe(odd.stream),
    }
    with out.open("a", buffering=1) as lines:
        book = Notebook(name, lines)
        for what, use in inherited.items():
            write = Write(odd.stream, f"{name}:{what}", f"{name}:{what}")
            asked = book.asked(Kind.PLAIN, write.value, [write])
            try:
                use(write.value.encode())
            except InvalidRequestError as fault:
                if "connect again" not in str(fault):
                    raise
            else:
                print(f"{name} could use what it had inherited: {what}", file=sys.stderr, flush=True)
                return 2
            book.note(replace(asked, answer=Answer.FAILED).to_line())
        with (
            suppress(RollbridgeError, TimeoutError),
            rollbridge.connect(odd.task.bootstrap_servers, zookeeper=odd.task.zookeeper) as client,
        ):
            own = client.begin(odd.stream)
            write = Write(odd.stream, name, f"{name}:own")
            future = own.write(odd.stream, key=write.key.encode(), value=write.value.encode())
            with book.noted(Kind.TRANSACTION, str(own.id), [write]) as done:
                position = own.commit(timeout=CALL_S).position
                done(position=position, writes=(replace(write, place=str(future.result(1))),))
    return 0
