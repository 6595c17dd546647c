"""Clients of streams that lose records: one is truncated, one is compacted, and one loses the ends of its logs."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from typing import Any, Final

import rollbridge
from integration_tests.history.events import Kind, Write
from integration_tests.history.notebook import CALL_S, Notebook
from integration_tests.history.tasks import Task
from integration_tests.patience import once_available
from rollbridge.errors import ConflictError, RollbridgeError, TruncatedError, UnavailableError

POLL_S: Final = 0.5
KEY: Final = b"state"
COMPACTED: Final = 25
"""So many updates are between two compactions, about."""
Entries = list[str]


def follow(client: rollbridge.Bridge, task: Task, book: Notebook, stopping: threading.Event) -> None:
    """Read a stream from where it begins, rest now and then, and begin anew when what comes next was truncated."""
    choice = random.Random(task.seed)
    position: Any = "earliest"
    run = 0
    while not stopping.is_set():
        try:
            with client.reader(task.streams[0], start=position) as reader:
                while not stopping.is_set():
                    with book.timed("poll of a follower", POLL_S):
                        record = reader.poll(POLL_S)
                    if record is not None:
                        value = (record.value or b"").decode(errors="backslashreplace")
                        place = {"segment": int(record.segment), "offset": record.offset}
                        book.note({**place, "value": value, "run": run})
                        position = reader.position
                        if choice.random() < 0.02:
                            stopping.wait(choice.uniform(0, 3))
        except TruncatedError:
            position, run = "earliest", run + 1
        except UnavailableError:
            time.sleep(0.2)


def shared_state(client: rollbridge.Bridge, stream: str) -> rollbridge.Synchronizer[Entries, str]:
    """A list that several processes share; an entry that comes twice is refused by everybody."""
    return client.synchronizer(
        stream, KEY, [], _append, states=rollbridge.Codec.json(), updates=rollbridge.Codec.json(), transaction_timeout=5
    )


def _append(entries: Entries, entry: str) -> Entries:
    if entry in entries:
        raise ValueError(f"{entry} came twice")
    return [*entries, entry]


def keep(client: rollbridge.Bridge, task: Task, book: Notebook, stopping: threading.Event) -> None:
    """Append to a list, in two threads that share an object, and compact and truncate now and then."""
    out = book.out
    with once_available(lambda: shared_state(client, task.streams[0])) as shared:
        threads = [
            threading.Thread(
                target=_append_entries, args=(shared, task, Notebook(f"{task.name}-{number}", out), stopping)
            )
            for number in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _append_entries(
    shared: rollbridge.Synchronizer[Entries, str], task: Task, book: Notebook, stopping: threading.Event
) -> None:
    choice = random.Random(f"{task.seed} {book.client}")
    count = 0
    while not stopping.wait(0.1):
        count += 1
        entry = f"{book.client}:{count}"
        write = Write(task.streams[0], KEY.decode(), entry)

        def unless_there(entries: Entries, entry: str = entry) -> list[str] | None:
            return None if entry in entries else [entry]

        with suppress(RollbridgeError, TimeoutError):
            with book.noted(Kind.UPDATE, entry, [write]), book.timed("update", CALL_S):
                shared.update(unless_there)
            if choice.random() < 1 / COMPACTED:
                with suppress(ConflictError):  # of other keys, or of a group that has not read everything
                    shared.compact(truncate=choice.random() < 0.9)
