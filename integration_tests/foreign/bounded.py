"""A source connector that says itself where its transactions end, stopped and let go in the middle of them.

``BoundedSource.java`` writes numbers, as far as it is allowed to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from integration_tests.foreign.connect import ConnectWorker, make_plugin
from integration_tests.patience import eventually

LENGTH: Final = 1_000
"""Records of a transaction."""
POLL: Final = 50
"""Records of a poll at most: a transaction is many of them."""
_PROGRAM: Final = Path(__file__).with_name("BoundedSource.java")
_ABORTED: Final = (1, 4)
_MINUTES_15: Final = 900_000


class BoundedSource:
    """The connector. Transactions 1 and 4 it aborts, one with the batch and the other one with a record."""

    def __init__(self, servers: str, topic: str, partitions: int, folder: Path) -> None:
        self.topic = topic
        self._servers = servers
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self._gate = folder / "gate"
        self._settings = make_plugin(folder / "plugins", _PROGRAM)
        self._config = {
            "topic": topic,
            "gate": self._gate,
            "partitions": partitions,
            "transaction.boundary": "connector",
            "transaction.records": LENGTH,
            "poll.records": POLL,
            "aborted": ",".join(map(str, _ABORTED)),
            "producer.override.transaction.timeout.ms": _MINUTES_15,
        }
        self.allow(0)

    def worker(self) -> ConnectWorker:
        """A worker that runs it, or goes on with it."""
        return ConnectWorker(self._servers, self.topic, self._folder / "connect", self._settings)

    def begin(self, worker: ConnectWorker) -> None:
        """Have a worker run it for the first time."""
        worker.connector(self.topic, "BoundedSource", self._config)

    def allow(self, end: int) -> None:
        """Let it go up to a number."""
        new = self._gate.with_suffix(".new")
        new.write_text(str(end))
        new.replace(self._gate)

    def values(self, first: int, end: int) -> list[str]:
        """Return what it writes of some numbers, whatever becomes of it."""
        return [f"{self.topic}-{number}" for number in range(first, end)]

    def kept(self, end: int) -> list[str]:
        """Return what of it a reader finds, sorted, once it has come to the end of a transaction."""
        return sorted(value for n in range(end // LENGTH) if n not in _ABORTED for value in self._transaction(n))

    def _transaction(self, number: int) -> list[str]:
        return self.values(number * LENGTH, (number + 1) * LENGTH)


def play(
    source: BoundedSource,
    committed: Callable[[], Collection[str]],
    arrived: Callable[[], Collection[str]],
    disturb: Callable[[], object],
) -> None:
    """Kill a worker in the middle of a transaction, disturb the next one in the middle of another, and count.

    Args:
        source: It has not begun.
        committed: What a reader of what is committed finds.
        arrived: What is written, at least what is open of it.
        disturb: Does something between two polls.
    """

    def await_open(first: int, end: int) -> None:
        wanted = set(source.values(first, end))
        eventually(lambda: wanted <= set(arrived()), f"{first} to {end} are written")

    with source.worker() as worker:
        source.begin(worker)
        source.allow(LENGTH // 2)
        await_open(0, LENGTH // 2)
        assert not committed()
    with source.worker() as worker:
        source.allow(2 * LENGTH + LENGTH // 2)
        await_open(2 * LENGTH, 2 * LENGTH + LENGTH // 2)
        assert sorted(committed()) == source.kept(2 * LENGTH)
    # Nobody writes: what the second one has left is behind the last whole transaction, and is written anew.
    assert sorted(committed()) == source.kept(2 * LENGTH)
    with source.worker() as worker:
        source.allow(3 * LENGTH + LENGTH // 2)
        await_open(3 * LENGTH, 3 * LENGTH + LENGTH // 2)
        disturb()
        source.allow(6 * LENGTH)
        eventually(lambda: len(committed()) >= len(source.kept(6 * LENGTH)), "all is written")
        eventually(lambda: worker.offsets(source.topic) == [{"next": 6 * LENGTH}], "its offset is committed")
    assert sorted(committed()) == source.kept(6 * LENGTH)
