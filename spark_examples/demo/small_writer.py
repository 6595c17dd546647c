"""Another writer of the same stream: one small transaction after another, each committed before the next begins."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

import rollbridge
from spark_examples.demo.helper import serve

RECORDS: Final = 10
"""Records of one small transaction."""
PAUSE_SECONDS: Final = 0.01
"""Between two of them; without it they would take one of two processors for themselves."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One small transaction; times on the monotonic clock of the machine."""

    number: int
    asked_s: float
    answered_s: float


class SmallWriter:
    """Writes notes on aircraft."""

    def __init__(self, connection: rollbridge.Bridge, stream: str, keys: Sequence[bytes]) -> None:
        self.commits: list[Commit] = []
        self._bridge = connection
        self._stream = stream
        self._keys = keys
        self._paused = True

    def pause(self) -> int:
        """Stop after the transaction that was committed last; returns how many there were."""
        self._paused = True
        return len(self.commits)

    def resume(self) -> None:
        """Go on."""
        self._paused = False

    def progress(self) -> Commit | None:
        """The transaction that was committed last."""
        return self.commits[-1] if self.commits else None

    def step(self) -> None:
        """Commit one, unless paused."""
        if not self._paused:
            number = len(self.commits)
            asked_s = time.monotonic()
            with self._bridge.transaction(self._stream) as txn:
                for place in range(RECORDS):
                    key = self._keys[(number * RECORDS + place) % len(self._keys)]
                    value = json.dumps({"note": number, "place": place, "aircraft": key.decode()})
                    txn.write(self._stream, key=key, value=value.encode())
            self.commits.append(Commit(number, asked_s, time.monotonic()))
        time.sleep(PAUSE_SECONDS)


def main(
    connection: Connection, bootstrap_servers: str, zookeeper: str, client_name: str, stream: str, keys: list[bytes]
) -> None:
    """The writer as a helper process; it answers ``pause``, ``resume``, ``progress`` and ``commits``."""
    with rollbridge.connect(bootstrap_servers, zookeeper=zookeeper, client_name=client_name) as b:
        writer = SmallWriter(b, stream, keys)
        serve(
            connection,
            {
                "pause": writer.pause,
                "resume": writer.resume,
                "progress": writer.progress,
                "commits": lambda: writer.commits,
            },
            writer.step,
        )
