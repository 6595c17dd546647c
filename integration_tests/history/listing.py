"""Readers of whole transactions, in loops that are left and entered again, and whose records are asked for or not."""

from __future__ import annotations

import random
import threading
import time
from itertools import islice
from typing import Final

import rollbridge
from integration_tests.history.events import Listed
from integration_tests.history.notebook import Notebook
from integration_tests.history.tasks import Task
from rollbridge.consumer.transactions import CommittedTransaction, TransactionReader
from rollbridge.errors import NotFoundError, RollbridgeError, TruncatedError, UnavailableError
from rollbridge.stream.names import StreamName

AT_A_TIME: Final = 300
"""Transactions that one reader is asked for, at most."""
ELSEWHERE: Final = 0.02
"""How often records of other streams are asked for: they may be truncated, which takes a second to find out."""


def list_transactions(client: rollbridge.Bridge, task: Task, book: Notebook, stopping: threading.Event) -> None:
    """Note every transaction of the group in the order in which they are given, up to the end of the commit log."""
    lister = _Lister(client, task.streams, random.Random(task.seed), book)
    while True:
        ending = stopping.is_set()
        try:
            reached = lister.go_on()
        except (RollbridgeError, TimeoutError):
            time.sleep(0.2)
            continue
        if reached and ending:
            return
        if reached:
            stopping.wait(0.5)


class _Lister:
    """One place in the commit log, and how it is gone on from."""

    def __init__(
        self, client: rollbridge.Bridge, streams: tuple[str, ...], choice: random.Random, book: Notebook
    ) -> None:
        self._client = client
        self._streams = set(streams)
        self._scope = StreamName.parse(streams[0]).scope
        self._choice = choice
        self._book = book
        self._position = "earliest"

    def go_on(self) -> bool:
        """List some more; whether nothing is left of what there was."""
        with self._client.transactions(self._scope, start=self._position, follow=False) as reader:
            ahead = sum(1 for _ in islice(reader, AT_A_TIME))
        if not ahead:
            return True
        # They are there, so a reader that would wait for more is not waited for.
        follow = self._choice.random() < 0.5
        with self._client.transactions(self._scope, start=self._position, follow=follow) as reader:
            while ahead > 0:
                ahead -= self._loop(reader, ahead)
        return False

    def _loop(self, reader: TransactionReader, most: int) -> int:
        """One loop, which is left somewhere; gives how many transactions it was given."""
        taken = 0
        for transaction in reader:
            taken += 1
            values = self._values(transaction)
            self._book.note(Listed(self._book.client, transaction.order, str(transaction.id), values).to_line())
            # Either says where to go on.
            self._position = str(self._choice.choice((reader.position, transaction.position)))
            if taken == most or self._choice.random() < 0.05:
                break
        return taken

    def _values(self, transaction: CommittedTransaction) -> tuple[str, ...] | None:
        """The values of its records; None if they are not asked for, or not all of them, or cannot be read any more."""
        chance = self._choice.random()
        if chance < 0.2 or (not transaction.counts().keys() <= self._streams and self._choice.random() > ELSEWHERE):
            return None
        try:
            if chance < 0.4:
                next(transaction.records(), None)
                return None
            return tuple((record.value or b"").decode(errors="backslashreplace") for record in transaction.records())
        except (NotFoundError, TruncatedError, UnavailableError):
            return None
