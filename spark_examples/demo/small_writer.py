"""Another writer of the same stream: one small transaction after another, each committed before the next begins."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import rollbridge

RECORDS: Final = 10
"""Records of one small transaction."""
PAUSE_S: Final = 0.01
"""Between two of them; without it they would take one of two processors for themselves."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One small transaction; times on the monotonic clock of the machine."""

    number: int
    asked_s: float
    answered_s: float


def notes(number: int, keys: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Return keys and values of one small transaction: notes on aircraft."""
    for place in range(RECORDS):
        key = keys[(number * RECORDS + place) % len(keys)]
        yield key, json.dumps({"note": number, "place": place, "aircraft": key.decode()}).encode()


class SmallWriter:
    """Writes notes in a thread of its own, unless paused."""

    def __init__(self, bootstrap_servers: str, zookeeper: str, stream: str, keys: Sequence[bytes]) -> None:
        self._bridge = rollbridge.connect(bootstrap_servers, zookeeper=zookeeper, client_name="tower")
        self._stream, self._keys = stream, keys
        self._commits: list[Commit] = []
        self._turn = threading.Lock()
        threading.Thread(target=self._run, name="small writer", daemon=True).start()

    def pause(self) -> int:
        """Stop after the transaction that was committed last; returns how many there were."""
        self._turn.acquire()
        return len(self._commits)

    def resume(self) -> None:
        """Continue."""
        self._turn.release()

    def commits(self) -> list[Commit]:
        """Return the transactions, in order."""
        return list(self._commits)

    def _run(self) -> None:
        while True:
            with self._turn:
                asked_s = time.monotonic()
                with self._bridge.transaction(self._stream) as txn:
                    txn.write_all(self._stream, notes(len(self._commits), self._keys))
                self._commits.append(Commit(len(self._commits), asked_s, time.monotonic()))
            time.sleep(PAUSE_S)
