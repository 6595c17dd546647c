"""Values that a leader publishes of its group on the live page: immutable, made of its state in its thread. Pure.

This takes time of a leader's thread, so the result is bounded, and made only while there are viewers: histories and
settings of streams are immutable and passed as they are, and of the open transactions only the oldest and the largest
are listed (:class:`Listing`). :mod:`rollbridge_coordinator.page.documents` makes JSON of it, in another thread.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Final

from rollbridge.base.metrics import LATENCY_BOUNDS_S
from rollbridge.buffer.fold import Stranger
from rollbridge.buffer.state import BufferedTransaction
from rollbridge.buffer.table import Rejection
from rollbridge.metadata.changes import StreamFault
from rollbridge.metadata.requests import NAMED_MAX, WaitRow
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.names import Partition
from rollbridge_coordinator.commit.waiting import waits_of
from rollbridge_coordinator.core.metrics import SURVEYED_PER_S, LeaderView, PastRound, lag_of
from rollbridge_coordinator.core.state import GroupState

LISTED_MAX: Final = 100
"""Transactions in each of the two lists."""
LIVE_STREAMS_MAX: Final = 100
"""Streams of a group that are shown: those in an error state, and then the busiest."""


@dataclass(frozen=True, slots=True)
class LiveTransaction:
    """An open transaction.

    Attributes:
        client, label: Names given by its client: untrusted text.
        begun_ms, deadline_ms: Its begin, and the end of its lease.
        bytes, frames: Size of what has arrived of it; None if unknown.
        streams: The first of its streams.
        streams_count: Number of its streams.
    """

    id: str
    state: str
    client: str
    label: str
    begun_ms: int
    deadline_ms: int
    bytes: int | None
    frames: int | None
    streams: tuple[str, ...]
    streams_count: int

    @classmethod
    def of(cls, item: BufferedTransaction) -> LiveTransaction:
        """Copy the shown facts."""
        streams = tuple(item.begin.streams)
        return cls(
            id=str(item.transaction_id),
            state=item.state.value,
            client=item.begin.client_name,
            label=item.begin.label or "",
            begun_ms=item.begun_ms,
            deadline_ms=item.deadline_ms,
            bytes=item.bytes,
            frames=len(item.frames),
            streams=streams[:NAMED_MAX],
            streams_count=len(streams),
        )


@dataclass(frozen=True, slots=True)
class Listing:
    """Two lists of open transactions.

    Attributes:
        at_ms: Time of the listing.
        count: Number of all.
        oldest: Those that began first.
    """

    at_ms: int
    count: int
    oldest: tuple[LiveTransaction, ...]
    largest: tuple[LiveTransaction, ...]

    @property
    def due_ms(self) -> int:
        """Return the time of the next listing: rarely with very many, as for a survey."""
        return self.at_ms + 2 * self.count * 1000 // SURVEYED_PER_S


def list_open(transactions: Collection[BufferedTransaction], now_ms: int) -> Listing:
    """Select the oldest and the largest of the transactions whose outcome is not in the commit log yet."""
    oldest = heapq.nsmallest(LISTED_MAX, transactions, key=attrgetter("begun_ms"))
    largest = heapq.nlargest(LISTED_MAX, transactions, key=attrgetter("bytes"))
    known = {item.id: LiveTransaction.of(item) for item in (*oldest, *largest)}
    first, most = (tuple(known[item.id] for item in found) for found in (oldest, largest))
    return Listing(now_ms, len(transactions), first, most)


@dataclass(frozen=True, slots=True)
class LiveStream:
    """A stream of the group.

    Attributes:
        config, history: As its leader knows it.
        fault: Reason why its transactions wait, if it is in an error state.
        open: Open transactions that write to it, or could.
        open_bytes: Bytes of their frames for it.
        records, bytes: Committed by transactions in this term.
        lag_ms: Time that the leader has been behind it: :func:`lag_of`.
        held_bytes: About how many bytes of its buffer cannot be truncated.
    """

    config: StreamConfig
    history: EpochHistory
    fault: StreamFault | None
    open: int
    open_bytes: int
    records: int
    bytes: int
    lag: int
    lag_ms: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class LiveGroup:
    """A group as its leader sees it.

    Attributes:
        name: ``scope/group``.
        controller_epoch: The leader's term.
        serves_since_ms: End of its takeover.
        at_ms: Time of this view, by its clock.
        open_bytes: Bytes of their frames.
        oldest_ms: Begin of the first of them; None without one.
        deadline_ms: End of the first lease; None if none is open.
        streams: Its streams that are led, or a selection.
        unled: Those that are not, or the first of them, with the reasons.
        streams_count: Number of its streams.
        faults_count: Number in an error state.
        waits: What waits, the longest wait first, or the first of it.
        waits_count: Number of all that waits.
        waiting_changes: Number of scales and rolling commits among it that wait for others than clients.
        lag: Messages of all buffers that are not folded yet.
        lag_ms: Longest time that the leader has been behind one of them.
        foreign: Messages of buffers that were no frames, in this term.
        stranger: The last of them.
    """

    name: str
    controller_epoch: int
    serves_since_ms: int
    at_ms: int
    states: Mapping[str, int]
    open_bytes: int
    oldest_ms: int | None
    deadline_ms: int | None
    listing: Listing
    streams: tuple[LiveStream, ...]
    unled: tuple[tuple[StreamConfig, StreamFault], ...]
    streams_count: int
    faults_count: int
    rounds: tuple[PastRound, ...]
    waits: tuple[WaitRow, ...]
    waits_count: int
    waiting_changes: int
    lag: int
    lag_ms: int = 0
    foreign: int = 0
    stranger: Stranger | None = None


def live_group(group: GroupState, view: LeaderView, known: LiveGroup | None) -> LiveGroup:
    """Return the present view of a group.

    Args:
        known: The view before in this term; its listing is reused where a new one would take long.
    """
    survey = view.survey
    listing = None if known is None else known.listing
    if listing is None or not listing.at_ms <= view.now_ms < listing.due_ms:
        listing = list_open(group.fold.open.values(), view.now_ms)
    # Of its streams only: the tail may still know the end of a buffer that is gone.
    lags = {
        partition: lag_of(view, partition, group.fold.positions.get(partition, 0), group.metrics.since_ms)
        for partition in group.partitions()
    }
    streams = [_live_stream(group, view, name, lags) for name in _chosen(group, view)]
    waits = waits_of(group)
    return LiveGroup(
        name=str(group.name),
        controller_epoch=group.controller_epoch,
        serves_since_ms=group.serves_since_ms,
        at_ms=view.now_ms,
        states={state.value: count for state, count in survey.states.items()},
        open_bytes=survey.size,
        oldest_ms=None if survey.oldest is None else survey.oldest.begun_ms,
        deadline_ms=survey.deadline_ms,
        listing=listing,
        streams=tuple(streams),
        unled=_unled(group),
        streams_count=len(group.streams) + len(group.unled),
        faults_count=len(group.waits.faults),
        rounds=tuple(group.metrics.rounds),
        waits=tuple(waits[:LISTED_MAX]),
        waits_count=len(waits),
        waiting_changes=sum(row.is_change for row in waits),
        lag=sum(messages for messages, _ in lags.values()),
        lag_ms=max((late_ms for _, late_ms in lags.values()), default=0),
        foreign=group.fold.rejected[Rejection.FOREIGN],
        stranger=group.fold.stranger,
    )


def _unled(group: GroupState) -> tuple[tuple[StreamConfig, StreamFault], ...]:
    found = ((item.config, group.waits.faults.get(name)) for name, item in group.unled.items())
    return tuple(islice(((config, fault) for config, fault in found if fault is not None), LIVE_STREAMS_MAX))


def _chosen(group: GroupState, view: LeaderView) -> Collection[str]:
    """Return the streams to show: all, or those in an error state, and then the busiest."""
    if len(group.streams) <= LIVE_STREAMS_MAX:
        return group.streams.keys()
    written, open_of = group.metrics.bytes, view.survey.of_streams
    return heapq.nlargest(
        LIVE_STREAMS_MAX,
        group.streams,
        key=lambda name: (group.waits.faults.get(name) is not None, open_of.get(name, 0), written[name]),
    )


def _live_stream(
    group: GroupState, view: LeaderView, name: str, lags: Mapping[Partition, tuple[int, int]]
) -> LiveStream:
    led = group.streams[name]
    partitions = list(led.partitions())
    behind = [lags.get(partition, (0, 0)) for partition in partitions]
    return LiveStream(
        config=led.config,
        history=led.history,
        fault=group.waits.faults.get(name),
        open=view.survey.of_streams.get(name, 0),
        open_bytes=view.survey.bytes_of_streams.get(name, 0),
        records=group.metrics.records[name],
        bytes=group.metrics.bytes[name],
        lag=sum(messages for messages, _ in behind),
        lag_ms=max((late_ms for _, late_ms in behind), default=0),
        held_bytes=sum(view.held_bytes.get(partition, 0) for partition in partitions),
    )


# The last hour of a group, in samples of ten seconds: what was committed, and how long that took. Pure.
#
# A leader counts from 0 in each term. A :class:`CounterSample` holds its counters at one moment, and the difference of
# two of one term is the activity in between; of a term that has just begun only its own part is known. An
# :class:`CounterHistory` keeps the tallies of a group for as long as its coordinator runs, whichever terms they are of.


STEP_MS: Final = 10_000
"""Interval between tallies."""
TALLIES_KEPT: Final = 361
"""Tallies of an hour, and the one before: 0.2 MB for each group that is led."""
MINUTE_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class CounterSample:
    """Counters of the leader of one term at one moment.

    Attributes:
        at_ms: Time, by the leader's clock.
        term: Controller epoch.
        since_ms: Begin of the term.
        latencies: Commits by latency, in the buckets of ``LATENCY_BOUNDS_S``.
    """

    at_ms: int
    term: int
    since_ms: int
    committed: int
    aborted: int
    records: int
    bytes: int
    latencies: Sequence[int]


def tally_of(group: GroupState, now_ms: int) -> CounterSample:
    """Return the present counters of a leader."""
    metrics = group.metrics
    return CounterSample(
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
    """Activity in a period of time; an empty period has no rates.

    Attributes:
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
        return count * 1000 / self.ms if self.ms else 0.0

    def latency_ms(self, quantile: float) -> float | None:
        """Return a quantile of the latency of its commits, as exact as the buckets; None without any."""
        found = quantile_of(self.latencies, LATENCY_BOUNDS_S, quantile)
        return None if found is None else found * 1000


def between(before: CounterSample | None, after: CounterSample) -> Period:
    """Return the activity between two tallies; for a term's first one, since its begin."""
    if before is None or before.term != after.term:
        before = CounterSample(min(after.since_ms, after.at_ms), after.term, after.since_ms, 0, 0, 0, 0, ())
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
    """Return a quantile of values in buckets, assumed even within each; None if there are none.

    Values beyond the last bound count as that bound, as with ``histogram_quantile`` of Prometheus.
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


class CounterHistory:
    """Tallies of a group, in the order of their times; at most :data:`TALLIES_KEPT`. Not thread-safe."""

    def __init__(self) -> None:
        self._tallies: deque[CounterSample] = deque(maxlen=TALLIES_KEPT)

    def add(self, counter_sample: CounterSample) -> None:
        """Add a tally. Those of a later time are dropped: the clock of a former leader was ahead."""
        while self._tallies and self._tallies[-1].at_ms >= counter_sample.at_ms:
            self._tallies.pop()
        self._tallies.append(counter_sample)

    def periods(self, now_ms: int) -> Iterator[Period]:
        """Return the periods between the tallies of the last hour, oldest first."""
        oldest_ms = now_ms - (TALLIES_KEPT - 1) * STEP_MS
        before: CounterSample | None = None
        for counter_sample in self._tallies:
            if counter_sample.at_ms > oldest_ms:
                yield between(before, counter_sample)
            before = counter_sample

    def last_minute(self, now_ms: int) -> Period | None:
        """Return the last minute, or less, of the present term; None if unknown."""
        if not self._tallies or now_ms - self._tallies[-1].at_ms > MINUTE_MS:
            return None
        after = self._tallies[-1]
        of_term = [counter_sample for counter_sample in list(self._tallies)[-7:] if counter_sample.term == after.term]
        if len(of_term) > 1:
            return between(of_term[0], after)
        return between(None, after) if after.at_ms - after.since_ms <= MINUTE_MS else None
