"""Guests: clients of a stream that is deleted and made anew under its name while they write to it.

Each thing stands where its client was told, or in a life of the stream that is over.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import rollbridge
from integration_tests.history.events import Kind, Write
from integration_tests.history.notebook import CALL_S, Notebook
from integration_tests.history.tasks import Task
from rollbridge.errors import RollbridgeError


def visit(client: rollbridge.Bridge, task: Task, book: Notebook, stopping: threading.Event) -> None:
    """Write to the stream in every way, one thing after the other; begin anew when it is another one."""
    choice = random.Random(task.seed)
    count = 0
    while not stopping.is_set():
        try:
            with ExitStack() as writers:
                guest = Guest(client, task.streams[0], book, choice, writers)
                goes_on = True
                while goes_on and not stopping.is_set():
                    count += 1
                    goes_on = guest.step(f"{task.name}:{count}")
        except (RollbridgeError, TimeoutError):
            time.sleep(0.05)


class Guest:
    """One view of the stream."""

    def __init__(
        self, client: rollbridge.Bridge, stream: str, book: Notebook, choice: random.Random, writers: ExitStack
    ) -> None:
        self._client = client
        self._stream = stream
        self._book = book
        self._choice = choice
        self._plain = client.writer(stream)
        writers.callback(self._plain.close)
        self._conditional = client.cas_writer(stream, timeout=20)
        writers.callback(self._conditional.close)

    def step(self, value: str) -> bool:
        """Write one record; False if it is not there, or nobody knows."""
        key = f"{self._book.client}-{self._choice.randint(0, 3)}"
        write = Write(self._stream, key, value)
        chance = self._choice.random()
        told: list[Write] = []
        if chance < 0.4:
            with self._book.noted(Kind.PLAIN, value, [write]) as done:
                sn = self._plain.write(key.encode(), value.encode()).result(CALL_S)
                told.append(replace(write, place=str(sn.dlsn)))
                done(writes=tuple(told))
        elif chance < 0.6:
            expected = self._conditional.tail(key.encode(), scope="key")
            with self._book.noted(Kind.CONDITIONAL, value, [write]) as done:
                sn = self._conditional.write(key.encode(), value.encode(), expected=expected, scope="key")
                told.append(replace(write, place=str(sn.dlsn)))
                done(writes=tuple(told))
        else:
            transaction = self._client.begin(self._stream)
            future = transaction.write(self._stream, key=key.encode(), value=value.encode())
            with self._book.noted(Kind.TRANSACTION, str(transaction.id), [write]) as done:
                transaction.commit(timeout=CALL_S)
                told.append(replace(write, place=str(future.result(1))))
                done(writes=tuple(told))
        return bool(told)
