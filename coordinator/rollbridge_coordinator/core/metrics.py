"""Counters and measurements of a coordinator, and its readiness to lead a group. Pure, and without a clock.

Procedures count what they have done: commits with their latency, aborts with their causes, answers to admin requests.
The leader's clock reaches them in results of effects (:class:`.CommitRound`). The interpreter measures the duration of
effects. What a leader's state shows is read on demand: :mod:`rollbridge_coordinator.core.metric_samples` makes samples
of all of it.

Nothing is counted for each record, and for each transaction only what a round adds up: see :func:`volumes_of`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from rollbridge.base.ids import SegmentId
from rollbridge.base.metrics import LATENCY_BOUNDS_S, Histogram, Spent
from rollbridge.buffer.state import BufferedTransaction, FrameRef
from rollbridge.buffer.table import AbortCause, State
from rollbridge.metadata.requests import RequestKind
from rollbridge.stream.names import Partition

ENTRY_BYTES_BOUNDS: Final = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 24)
ROUND_TRANSACTIONS_BOUNDS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000)
ROUND_BYTES_BOUNDS: Final = tuple(1 << power for power in range(10, 31, 2))
SEAL_BOUNDS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TAKEOVER_BOUNDS_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


# Transactions and rounds


class CommitPath(StrEnum):
    """Way in which a transaction becomes visible."""

    DIRECT = "direct"
    """Into active segments, with others."""
    CONDITIONAL = "conditional"
    """Into active segments, alone in its round, because it has conditions on them."""
    ROLLING = "rolling"
    """With a rolling commit, or into the segments that one has left open, because its epoch is no longer active."""
    LARGE = "large"
    """Merged in the background, and then put into the history by a rolling commit."""


class Answered(StrEnum):
    """Result of an admin request."""

    DONE = "done"
    REFUSED = "refused"


ROUNDS_KEPT: Final = 50


class PastRound(NamedTuple):
    """A committed round.

    Attributes:
        at_ms: Time of the commit, by the leader's clock.
        path: Way of the commit.
        transactions: Number of transactions, the aborted ones included.
        aborted: Number of aborted ones.
        waited_ms: Wait of the first of the others since its COMMIT frame arrived; 0 without one.
        volumes: Records and bytes by stream: :func:`volumes_of`.
    """

    at_ms: int
    path: CommitPath
    transactions: int
    aborted: int
    waited_ms: int
    volumes: Mapping[str, Sequence[int]]


@dataclass(slots=True)
class GroupMetrics:
    """Counters of a group in this term of a leader.

    Attributes:
        since_ms: Begin of the term, by the leader's clock; commits requested earlier count from then.
        latencies: Seconds from a COMMIT frame's arrival at the leader to its commit.
        records, bytes: Committed records, and bytes of their frames, by stream.
        round_transactions, round_bytes: Sizes of rounds.
        log_bytes: Bytes of partitions on disk when last measured.
    """

    since_ms: int = 0
    latencies: dict[CommitPath, Histogram] = field(
        default_factory=lambda: {path: Histogram(LATENCY_BOUNDS_S) for path in CommitPath}
    )
    aborted: Counter[AbortCause] = field(default_factory=Counter)
    records: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    round_transactions: Histogram = field(default_factory=lambda: Histogram(ROUND_TRANSACTIONS_BOUNDS))
    round_bytes: Histogram = field(default_factory=lambda: Histogram(ROUND_BYTES_BOUNDS))
    rounds: deque[PastRound] = field(default_factory=lambda: deque(maxlen=ROUNDS_KEPT))
    answered: Counter[tuple[RequestKind, Answered]] = field(default_factory=Counter)
    log_bytes: dict[Partition, int] = field(default_factory=dict)

    def note_round(
        self,
        transactions: Sequence[BufferedTransaction],
        volumes: Mapping[str, Sequence[int]],
        path: CommitPath,
        committed_ms: int,
    ) -> None:
        """Count a committed round, before its transactions are dropped.

        Args:
            transactions: All of it, the aborted ones included.
            volumes: Records and bytes that it has committed, by stream: :func:`volumes_of`.
            committed_ms: Time of the commit, by the leader's clock.
        """
        latency, committing = self.latencies[path], State.COMMITTING
        met_ms, alike = 0, 0
        first_ms, aborted = 0, 0
        for item in transactions:
            if item.state is not committing:
                self.aborted[item.cause] += 1
                aborted += 1
            elif item.met_ms == met_ms:
                alike += 1  # most have come in one answer to a fetch
            else:
                self._note_latency(latency, met_ms, alike, committed_ms)
                met_ms, alike = item.met_ms, 1
                first_ms = first_ms or met_ms
        self._note_latency(latency, met_ms, alike, committed_ms)
        size = 0
        for stream, (records, size_of) in volumes.items():
            self.records[stream] += records
            self.bytes[stream] += size_of
            size += size_of
        self.round_transactions.note(len(transactions))
        self.round_bytes.note(size)
        waited_ms = 0 if aborted == len(transactions) else max(committed_ms - max(first_ms, self.since_ms), 0)
        self.rounds.append(PastRound(committed_ms, path, len(transactions), aborted, waited_ms, volumes))

    def _note_latency(self, latency: Histogram, met_ms: int, times: int, committed_ms: int) -> None:
        # Of those that a standby had folded it is not known when they came: the leader has them since it leads.
        if times:
            latency.note(max(committed_ms - max(met_ms, self.since_ms), 0) / 1000, times)

    def note_answer(self, kind: RequestKind | None, *, ok: bool) -> None:
        """Count the answer to an admin request; None for an unreadable one, which has no kind."""
        if kind is not None:
            self.answered[kind, Answered.DONE if ok else Answered.REFUSED] += 1


def volumes_of(
    items: Iterable[tuple[Partition, FrameRef]], segments: Mapping[Partition, tuple[str, SegmentId]]
) -> dict[str, list[int]]:
    """Return records and bytes of a round's frames by stream, given the segments of partitions."""
    found: dict[Partition, list[int]] = {}
    for place, frame in items:
        known = found.get(place)
        if known is None:
            found[place] = [frame.records, frame.size]
        else:
            known[0] += frame.records
            known[1] += frame.size
    volumes: dict[str, list[int]] = {}
    for place, (records, size) in found.items():
        volume = volumes.setdefault(segments[place][0], [0, 0])
        volume[0] += records
        volume[1] += size
    return volumes


# What a leader's shell measures


@dataclass(slots=True)
class EffectTimes:
    """Durations of effects in this term.

    Attributes:
        spent: Number and seconds, by the name of the kind.
        merges: Seconds from the first append of a round of transactions to its commit.
        seals: Seconds of seals, waits for native transactions of others included.
        present: The effect under way, and the time of ``perf_counter`` at which it began; None between effects.
    """

    present: tuple[str, float] | None = None
    spent: dict[str, list[float]] = field(default_factory=dict)
    merges: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_S))
    seals: Histogram = field(default_factory=lambda: Histogram(SEAL_BOUNDS_S))

    def of(self, kind: str) -> Spent:
        times, total = self.spent.get(kind, (0.0, 0.0))
        return Spent(int(times), total)


class Warmth(StrEnum):
    """Amount that a new leader had to read."""

    WARM = "warm"
    """Only what arrived since its standby had read the buffers."""
    COLD = "cold"
    """Everything since the last snapshots."""


@dataclass(slots=True)
class Takeovers:
    """Takeovers of a group by this coordinator, in all of its terms.

    Attributes:
        last_s: Duration of the last one; not a number before the first.
    """

    took: dict[Warmth, Histogram] = field(
        default_factory=lambda: {warmth: Histogram(TAKEOVER_BOUNDS_S) for warmth in Warmth}
    )
    last_s: float = float("nan")

    def note(self, warmth: Warmth, seconds: float) -> None:
        self.took[warmth].note(seconds)
        self.last_s = seconds


# What is open

SURVEYED_PER_S: Final = 10_000
"""Open transactions surveyed in a second: each takes about a microsecond of the leader's only thread."""


@dataclass(frozen=True, slots=True)
class Survey:
    """Open transactions at one moment.

    Attributes:
        at_ms: Time, by the leader's clock.
        states: Number of transactions whose outcome is not in the commit log yet, by state.
        size: Bytes of their frames.
        of_streams: Number of them by stream; one that writes to several counts in each.
        bytes_of_streams: Bytes of their frames by stream.
        oldest: The one that began first.
        deadline_ms: End of the first lease of an open one; None if none is open.
        needed: Offset of each buffer partition below which nothing is needed.
    """

    at_ms: int
    states: Mapping[State, int]
    size: int
    of_streams: Mapping[str, int]
    bytes_of_streams: Mapping[str, int]
    oldest: BufferedTransaction | None
    deadline_ms: int | None
    needed: Mapping[Partition, int]

    @property
    def due_ms(self) -> int:
        """Return the time of the next survey: at once, unless there are so many that it would delay the leader."""
        return self.at_ms + sum(self.states.values()) * 1000 // SURVEYED_PER_S


def survey(transactions: Iterable[BufferedTransaction], positions: Mapping[Partition, int], now_ms: int) -> Survey:
    """Survey all transactions of a group, and the positions up to which its buffers are folded."""
    states: Counter[State] = Counter()
    of_streams: Counter[str] = Counter()
    bytes_of_streams: Counter[str] = Counter()
    needed = dict(positions)
    size = 0
    oldest: BufferedTransaction | None = None
    deadline_ms: int | None = None
    for item in transactions:
        states[item.state] += 1
        size += item.bytes
        of_streams.update(item.begin.streams.keys())  # its values are epochs
        for stream, part in item.bytes_by_stream():
            bytes_of_streams[stream] += part
        if oldest is None or item.begun_ms < oldest.begun_ms:
            oldest = item
        if item.state is State.OPEN and (deadline_ms is None or item.deadline_ms < deadline_ms):
            deadline_ms = item.deadline_ms
        for partition, offset in item.first_offsets.items():
            if offset < needed.get(partition, 0):
                needed[partition] = offset
    return Survey(now_ms, states, size, of_streams, bytes_of_streams, oldest, deadline_ms, needed)


MARKS_MAX: Final = 256


class BufferSizes:
    """Estimate of the bytes that a buffer partition has behind an offset, from what has been read of it.

    A new leader has not read what its standby had, and assumes the same density for the rest.
    """

    def __init__(self) -> None:
        self._marks: dict[Partition, list[tuple[int, int]]] = {}

    def note(self, partition: Partition, offset: int, read_bytes: int) -> None:
        """Note the bytes read of a partition up to its next offset."""
        marks = self._marks.setdefault(partition, [])
        if not marks or offset > marks[-1][0]:
            marks.append((offset, read_bytes))
            if len(marks) > MARKS_MAX:
                del marks[1:-1:2]

    def behind(self, partition: Partition, offset: int) -> int:
        """Return about how many bytes there are from an offset on; 0 while unknown."""
        marks = self._marks.get(partition, ())
        if len(marks) < 2 or offset >= marks[-1][0]:
            return 0
        (first, before), (last, after) = marks[0], marks[-1]
        if offset < first:
            return round((after - before) * (last - offset) / (last - first))
        place = bisect_right(marks, offset, key=lambda mark: mark[0])
        (low, below), (high, above) = marks[place - 1], marks[place]
        return after - round(below + (above - below) * (offset - low) / (high - low))

    def keep(self, partitions: Iterable[Partition]) -> None:
        """Drop all other partitions."""
        known = set(partitions)
        for partition in self._marks.keys() - known:
            del self._marks[partition]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderView:
    """View of a leader's shell at one moment, in addition to its state.

    Attributes:
        survey: Open transactions a moment ago.
        ends: End of each buffer partition at its last fetch, as far as known.
        appended_ms: Append time of the last message read of each.
        unheard_ms: Silence of those whose broker does not answer, not even with their ends.
        held_bytes: About how many bytes of each cannot be truncated.
    """

    now_ms: int
    survey: Survey
    ends: Mapping[Partition, int] = field(default_factory=dict)
    appended_ms: Mapping[Partition, int] = field(default_factory=dict)
    unheard_ms: Mapping[Partition, int] = field(default_factory=dict)
    held_bytes: Mapping[Partition, int] = field(default_factory=dict)
    times: EffectTimes = field(default_factory=EffectTimes)
    takeovers: Takeovers = field(default_factory=Takeovers)


def lag_of(view: LeaderView, partition: Partition, position: int, since_ms: int) -> tuple[int, int]:
    """Return the lag of a leader behind a buffer partition: in messages, as of its last fetch, and in ms.

    While its broker does not answer, as one does that throttles the leader, the number of messages is unknown, and the
    time is that of the silence.

    Args:
        since_ms: Begin of the term, for partitions never read in it.
    """
    messages = max(view.ends.get(partition, 0) - position, 0)
    behind_ms = view.now_ms - view.appended_ms.get(partition, since_ms) if messages else 0
    return messages, max(behind_ms, view.unheard_ms.get(partition, 0), 0)


# Snapshots


class Op(StrEnum):
    """Operation on a record of a snapshot."""

    ADD = "add"
    DEL = "del"
    READ = "read"


@dataclass(slots=True)
class SnapshotMetrics:
    """Counters of snapshots in this term of a leader.

    Attributes:
        faults: Unusable records, and snapshots that failed.
        entry_bytes: Sizes of the indexes written.
    """

    segment_ops: Counter[Op] = field(default_factory=Counter)
    index_ops: Counter[Op] = field(default_factory=Counter)
    ongoing_ops: Counter[Op] = field(default_factory=Counter)
    faults: int = 0
    entry_bytes: Histogram = field(default_factory=lambda: Histogram(ENTRY_BYTES_BOUNDS))

    def note_entry(self, size: int) -> None:
        self.index_ops[Op.ADD] += 1
        self.entry_bytes.note(size)


# Readiness


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHealth:
    """Health of a coordinator at one moment."""

    connected: bool
    """True if its ZooKeeper session is known to live."""
    registered: bool
    """True if it is registered as a coordinator, in this session."""
    answered: bool
    """True if Kafka answers, as far as known."""
    unreachable: Sequence[str] = ()
    """Brokers that do not answer it although the cluster lists them as alive."""
    ended: Sequence[str] = ()
    """Groups whose thread has ended while the coordinator runs."""


def faults(process_health: ProcessHealth) -> Iterator[str]:
    """Return the reasons that keep it from leading; none if it is healthy, with or without a group to lead."""
    if not process_health.connected:
        yield "not connected to ZooKeeper"
    elif not process_health.registered:
        yield "not registered among the coordinators"
    if not process_health.answered:
        yield "Kafka does not answer"
    for broker in process_health.unreachable:
        yield f"cannot reach {broker}"
    for group in process_health.ended:
        yield f"the thread of group {group} has ended"
