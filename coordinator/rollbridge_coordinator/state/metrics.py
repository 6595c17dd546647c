"""What a coordinator counts and measures, and whether it is ready to lead a group. Pure, and without a clock.

Procedures count what they have done: commits with the time that they took, aborts with their causes, answers to admin
requests. The leader's clock reaches them in results of effects (:class:`.CommitRound`). The interpreter measures how
long effects take. What can be seen in a leader's state is looked at when somebody asks:
:mod:`rollbridge_coordinator.state.families` makes samples of all of it.

Nothing is counted for each record, and for each transaction only what a round adds up: see :func:`volumes_of`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from rollbridge.model.ids import SegmentId
from rollbridge.model.metrics import LATENCY_BOUNDS_S, Histogram, Spent
from rollbridge.model.names import Partition
from rollbridge.model.pieces import BufferedTransaction, FrameRef
from rollbridge.model.requests import RequestKind
from rollbridge.model.transaction import AbortCause, State

ENTRY_BYTES_BOUNDS: Final = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 24)
ROUND_TRANSACTIONS_BOUNDS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000)
ROUND_BYTES_BOUNDS: Final = tuple(1 << power for power in range(10, 31, 2))
SEAL_BOUNDS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TAKEOVER_BOUNDS_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


# Transactions and rounds


class CommitPath(StrEnum):
    """How a transaction becomes visible."""

    DIRECT = "direct"
    """Into active segments, with others."""
    CONDITIONAL = "conditional"
    """Into active segments, alone in its round, because it expects something of them."""
    ROLLING = "rolling"
    """With a rolling commit, or into the segments that one has left open, because its epoch is not active any more."""
    LARGE = "large"
    """Merged beside the line, and then put into the history by a rolling commit."""


class Answered(StrEnum):
    """How an admin request was answered."""

    DONE = "done"
    REFUSED = "refused"


ROUNDS_KEPT: Final = 50


class PastRound(NamedTuple):
    """A round that was committed.

    Attributes:
        at_ms: When, by the leader's clock.
        path: How.
        transactions: How many it had, the aborted ones among them.
        aborted: How many of them were aborted.
        waited_ms: How long the first of the others had waited since its COMMIT frame had come; 0 without one.
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
    """What has happened in a group in this term of a leader.

    Attributes:
        since_ms: When the term began, by the leader's clock; commits that were asked for earlier count from then.
        latencies: Seconds from a COMMIT frame's arrival at the leader to its commit.
        aborted: Transactions that have ended as aborted.
        records, bytes: What has been committed, by stream; bytes are those of the frames.
        round_transactions, round_bytes: How large rounds were.
        rounds: The last ones, oldest first.
        answered: Admin requests.
        log_bytes: What partitions took on disk when that was looked at last.
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
        """Count a round that is committed, before its transactions are forgotten.

        Args:
            transactions: All of it, the aborted ones as well.
            volumes: Records and bytes that it has committed, by stream: :func:`volumes_of`.
            path: How those of them were committed that were.
            committed_ms: When, by the leader's clock.
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
        """Count the answer to an admin request; None for one that cannot be read, which is not counted by its kind."""
        if kind is not None:
            self.answered[kind, Answered.DONE if ok else Answered.REFUSED] += 1


def volumes_of(
    items: Iterable[tuple[Partition, FrameRef]], segments: Mapping[Partition, tuple[str, SegmentId]]
) -> dict[str, list[int]]:
    """Return records and bytes of a round's frames by stream, given whose segments lie in which partitions."""
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
    """How long effects took in this term.

    Attributes:
        spent: Number and seconds, by the name of the kind.
        merges: Seconds from the first append of a round of transactions to its commit.
        seals: Seconds that seals took, waiting for native transactions of others included.
    """

    spent: dict[str, list[float]] = field(default_factory=dict)
    merges: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_S))
    seals: Histogram = field(default_factory=lambda: Histogram(SEAL_BOUNDS_S))

    def of(self, kind: str) -> Spent:
        """Return how often a kind of effect was carried out, and how long that took, in seconds."""
        times, total = self.spent.get(kind, (0.0, 0.0))
        return Spent(int(times), total)


class Warmth(StrEnum):
    """How much a new leader had to read."""

    WARM = "warm"
    """What had come since its standby had read the buffers."""
    COLD = "cold"
    """Everything since the last snapshots."""


@dataclass(slots=True)
class Takeovers:
    """Takeovers of a group by this coordinator, in all of its terms.

    Attributes:
        took: Seconds that they took.
        last_s: Seconds that the last one took; not a number before the first.
    """

    took: dict[Warmth, Histogram] = field(
        default_factory=lambda: {warmth: Histogram(TAKEOVER_BOUNDS_S) for warmth in Warmth}
    )
    last_s: float = float("nan")

    def note(self, warmth: Warmth, seconds: float) -> None:
        """Count a takeover."""
        self.took[warmth].note(seconds)
        self.last_s = seconds


# What is open

SURVEYED_PER_S: Final = 10_000
"""Open transactions that are looked at in a second: each takes about a microsecond, of the leader's only thread."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What was open at one moment.

    Attributes:
        at_ms: When, by the leader's clock.
        states: Number of transactions whose outcome is not in the commit log yet, by state.
        size: Bytes of their frames.
        of_streams: How many of them each stream has; one that writes to several counts in each.
        bytes_of_streams: Bytes of their frames by stream.
        oldest: The one that began first.
        deadline_ms: When the first lease of an open one ends; None if none is open.
        needed: Offset of each buffer partition below which nothing is needed any more.
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
        """When to look again: at once, unless there are so many that it would take the leader's time."""
        return self.at_ms + sum(self.states.values()) * 1000 // SURVEYED_PER_S


def survey(transactions: Iterable[BufferedTransaction], positions: Mapping[Partition, int], now_ms: int) -> Survey:
    """Look at all transactions of a group, and at up to where its buffers are folded."""
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
    """About how many bytes a buffer partition has behind an offset, from what has been read of it so far.

    A new leader has not read what its standby had, and assumes that it was like the rest.
    """

    def __init__(self) -> None:
        """Start without knowledge."""
        self._marks: dict[Partition, list[tuple[int, int]]] = {}

    def note(self, partition: Partition, offset: int, read_bytes: int) -> None:
        """Note that so many bytes in all had been read of a partition when its next offset was this."""
        marks = self._marks.setdefault(partition, [])
        if not marks or offset > marks[-1][0]:
            marks.append((offset, read_bytes))
            if len(marks) > MARKS_MAX:
                del marks[1:-1:2]

    def behind(self, partition: Partition, offset: int) -> int:
        """Return about how many bytes there are from an offset on; 0 while nothing is known."""
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
        """Forget all other partitions."""
        known = set(partitions)
        for partition in self._marks.keys() - known:
            del self._marks[partition]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderView:
    """What a leader's shell knows at one moment, and its state does not.

    Attributes:
        now_ms: The leader's clock.
        survey: What was open a moment ago.
        ends: End of each buffer partition at its last fetch, as far as it is known.
        appended_ms: Append time of the last message that was read of each.
        unheard_ms: For how long nothing has been heard of those whose broker gives nothing, not even their ends.
        held_bytes: About how many bytes of each cannot be truncated.
        times: How long effects took.
        takeovers: How long takeovers took.
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
    """Return how far a leader is behind a buffer partition: in messages, as of its last fetch, and in ms.

    While its broker gives nothing of it, as one does that slows the leader down, how many messages there are is not
    known, and the time is that of the silence.

    Args:
        view: What its shell knows.
        partition: The partition.
        position: Its next offset to fold.
        since_ms: When the term began, for what was never read in it.
    """
    messages = max(view.ends.get(partition, 0) - position, 0)
    behind_ms = view.now_ms - view.appended_ms.get(partition, since_ms) if messages else 0
    return messages, max(behind_ms, view.unheard_ms.get(partition, 0), 0)


# Snapshots


class Op(StrEnum):
    """What is done to a record of a snapshot."""

    ADD = "add"
    DEL = "del"
    READ = "read"


@dataclass(slots=True)
class SnapshotMetrics:
    """What has happened to snapshots in this term of a leader.

    Attributes:
        segment_ops: Operations on sealed segments.
        index_ops: Operations on indexes, those of single snapshots included.
        ongoing_ops: Operations on records of ongoing transactions.
        faults: Records that could not be used, and snapshots that could not be taken.
        entry_bytes: Sizes of the indexes that were written.
    """

    segment_ops: Counter[Op] = field(default_factory=Counter)
    index_ops: Counter[Op] = field(default_factory=Counter)
    ongoing_ops: Counter[Op] = field(default_factory=Counter)
    faults: int = 0
    entry_bytes: Histogram = field(default_factory=lambda: Histogram(ENTRY_BYTES_BOUNDS))

    def note_entry(self, size: int) -> None:
        """Note that an index was written."""
        self.index_ops[Op.ADD] += 1
        self.entry_bytes.note(size)


# Readiness


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """What a coordinator knows of itself at one moment."""

    connected: bool
    """Its ZooKeeper session is known to live."""
    registered: bool
    """It stands among the coordinators, in this session."""
    answered: bool
    """Kafka answers, as far as is known."""
    unreachable: Sequence[str] = ()
    """Brokers that do not answer it although the cluster takes them for alive."""
    ended: Sequence[str] = ()
    """Groups whose thread has ended although the coordinator goes on."""


def faults(vitals: Vitals) -> Iterator[str]:
    """Return what keeps it from leading; nothing if it is healthy, whether or not it has a group to lead."""
    if not vitals.connected:
        yield "not connected to ZooKeeper"
    elif not vitals.registered:
        yield "not registered among the coordinators"
    if not vitals.answered:
        yield "Kafka does not answer"
    for broker in vitals.unreachable:
        yield f"cannot reach {broker}"
    for group in vitals.ended:
        yield f"the thread of group {group} has ended"
