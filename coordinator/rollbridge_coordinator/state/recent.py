"""The last hour of a group, in samples of ten seconds: what was committed, and how long that took. Pure.

A leader counts from 0 in each term. A :class:`Tally` is what it had counted at one moment, and the difference of two of
one term is what happened in between; of a term that has just begun only its own part is known. An :class:`Hour` keeps
the tallies of a group for as long as its coordinator runs, whichever terms they are of.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rollbridge.model.metrics import LATENCY_BOUNDS_S
from rollbridge_coordinator.state.group import GroupState

STEP_MS: Final = 10_000
"""Between two tallies."""
TALLIES_KEPT: Final = 361
"""An hour of them, and the one before: 0.2 MB for each group that is led."""
MINUTE_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class Tally:
    """What the leader of one term had counted at one moment.

    Attributes:
        at_ms: When, by the leader's clock.
        term: Controller epoch.
        since_ms: When the term began.
        committed, aborted: Transactions that had ended.
        records, bytes: What had been committed.
        latencies: Commits by latency: how many are in each bucket of ``LATENCY_BOUNDS_S``.
    """

    at_ms: int
    term: int
    since_ms: int
    committed: int
    aborted: int
    records: int
    bytes: int
    latencies: Sequence[int]


def tally_of(group: GroupState, now_ms: int) -> Tally:
    """Return what a leader has counted so far."""
    metrics = group.metrics
    return Tally(
        at_ms=now_ms,
        term=group.controller_epoch,
        since_ms=metrics.since_ms,
        committed=group.counts["transactions_committed"],
        aborted=metrics.aborted.total(),
        records=metrics.records.total(),
        bytes=metrics.bytes.total(),
        latencies=array("q", map(sum, zip(*(known.counts for known in metrics.latencies.values()), strict=True))),
    )


@dataclass(frozen=True, slots=True)
class Period:
    """What happened in a period of time; of a rate there is none where it is empty.

    Attributes:
        at_ms: Its end.
        ms: Its length.
        committed, aborted: Transactions that have ended.
        records, bytes: What was committed.
        latencies: Commits by latency, as in a tally.
    """

    at_ms: int
    ms: int
    committed: int
    aborted: int
    records: int
    bytes: int
    latencies: tuple[int, ...]

    def per_second(self, count: int) -> float:
        """Return a number of its events as a rate."""
        return count * 1000 / self.ms if self.ms else 0.0

    def latency_ms(self, quantile: float) -> float | None:
        """Return the latency that this part of its commits did not exceed, as far as buckets tell; None without any."""
        found = quantile_of(self.latencies, LATENCY_BOUNDS_S, quantile)
        return None if found is None else found * 1000


def between(before: Tally | None, after: Tally) -> Period:
    """Return what happened between two tallies; before a term's first one, since its beginning."""
    if before is None or before.term != after.term:
        before = Tally(min(after.since_ms, after.at_ms), after.term, after.since_ms, 0, 0, 0, 0, ())
    known = before.latencies or (0,) * len(after.latencies)
    return Period(
        at_ms=after.at_ms,
        ms=max(after.at_ms - before.at_ms, 0),
        committed=after.committed - before.committed,
        aborted=after.aborted - before.aborted,
        records=after.records - before.records,
        bytes=after.bytes - before.bytes,
        latencies=tuple(now - then for now, then in zip(after.latencies, known, strict=True)),
    )


def quantile_of(counts: Sequence[int], bounds: Sequence[float], quantile: float) -> float | None:
    """Return a quantile of values in buckets, even inside of each; None if there are none.

    Values beyond the last bound are taken for that bound, as by ``histogram_quantile`` of Prometheus.
    """
    total = sum(counts)
    if not total:
        return None
    rank, below = quantile * total, 0
    for index, bound in enumerate(bounds):
        count = counts[index]
        if count and below + count >= rank:
            low = bounds[index - 1] if index else 0.0
            return low + (bound - low) * (rank - below) / count
        below += count
    return bounds[-1]


class Hour:
    """Tallies of a group, each of a moment after the one before; at most :data:`TALLIES_KEPT`. Not thread-safe."""

    def __init__(self) -> None:
        """Begin without any."""
        self._tallies: deque[Tally] = deque(maxlen=TALLIES_KEPT)

    def add(self, tally: Tally) -> None:
        """Add a tally. Those of a later time go: the clock of a former leader was ahead."""
        while self._tallies and self._tallies[-1].at_ms >= tally.at_ms:
            self._tallies.pop()
        self._tallies.append(tally)

    def periods(self, now_ms: int) -> Iterator[Period]:
        """Return what happened between the tallies of the last hour, oldest first."""
        oldest_ms = now_ms - (TALLIES_KEPT - 1) * STEP_MS
        before: Tally | None = None
        for tally in self._tallies:
            if tally.at_ms > oldest_ms:
                yield between(before, tally)
            before = tally

    def last_minute(self, now_ms: int) -> Period | None:
        """Return what happened in the last minute, or in less, of the present term; None if nothing is known."""
        if not self._tallies or now_ms - self._tallies[-1].at_ms > MINUTE_MS:
            return None
        after = self._tallies[-1]
        of_term = [tally for tally in list(self._tallies)[-7:] if tally.term == after.term]
        if len(of_term) > 1:
            return between(of_term[0], after)
        return between(None, after) if after.at_ms - after.since_ms <= MINUTE_MS else None
