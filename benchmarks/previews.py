"""Opening a reader that previews, beside one open transaction and many that have ended.

The transactions are real ones: one begins first and stays open, the others write a record each; every second one is
aborted. Then a reader is opened and read: ``read_committed`` until its first record is there, ``read_uncommitted``
until it has shown all records of the open transaction.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Final

from benchmarks.harness import OURS, Better, Experiment, Measure, Measured, Row
from benchmarks.site import Site
from rollbridge.client.transaction import AbortFuture, CommitFuture, Transaction
from rollbridge.consumer.reader import IsolationLevel

OPEN: Final = 10
IN_FLIGHT: Final = 256
FEW, MANY = 5_000, 20_000
COMMITTED: Final = "read_committed"


def experiment(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """After 5,000 and 20,000 ended transactions (a tenth of both if ``quick``)."""
    few, many = (FEW // 10, MANY // 10) if quick else (FEW, MANY)
    less, more = History(site, few), History(site, many)
    what = "opening a reader with `read_uncommitted`, until it has shown the records of one open transaction"
    return Experiment(
        name="previews",
        rounds=rounds,
        warm_ups=2,
        sides={
            OURS: more.opening("read_uncommitted"),
            COMMITTED: more.opening("read_committed"),
            f"{few:,} ended": less.opening("read_uncommitted"),
        },
        rows=[
            Row(
                name="previews",
                title=f"{what}, beside {many:,} ended ones, against `read_committed` until its first record",
                metric="took_ms",
                unit="ms",
                better=Better.LESS,
                bar=1.0,
                peers=(COMMITTED,),
            ),
            Row(
                name="previews-growth",
                title=f"the same against {few:,} ended ones",
                metric="took_ms",
                unit="ms",
                better=Better.LESS,
                bar=1.5,
                peers=(f"{few:,} ended",),
            ),
        ],
    )


class History:
    """A stream with one open transaction and many that have ended, made when it is first needed."""

    def __init__(self, site: Site, ended: int) -> None:
        self._site = site
        self._ended = ended
        self._stream = ""
        self._open: Transaction | None = None

    def opening(self, isolation: IsolationLevel) -> Measure:
        """Open a reader and read to the end of what there is."""

        def measure() -> Measured:
            if self._open is None:
                self._make()
            is_preview = isolation == "read_uncommitted"
            left = OPEN if is_preview else 1
            start = time.perf_counter()
            with self._site.bridge.reader(self._stream, isolation=isolation) as reader:
                for record in reader:
                    left -= record.committed is not is_preview
                    if not left:
                        break
                took_s = time.perf_counter() - start
            return {"took_ms": took_s * 1000}

        return measure

    def _make(self) -> None:
        begin = self._site.bridge.begin
        self._stream = stream = self._site.make_stream(f"previews-{self._ended}")
        self._open = begin(stream)
        for number in range(OPEN):
            self._open.write(stream, key=b"%d" % number, value=b"open")
        self._open.flush()
        waiting: deque[CommitFuture | AbortFuture] = deque()
        for number in range(self._ended):
            transaction = begin(stream)
            transaction.write(stream, key=b"%d" % number, value=b"ended")
            if number % 2:
                waiting.append(transaction.commit_async())
            else:
                transaction.flush()
                waiting.append(transaction.abort_async())
            if len(waiting) > IN_FLIGHT:
                waiting.popleft().result(60)
        for future in waiting:
            future.result(60)
