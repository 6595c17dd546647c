"""Waits of a group, which keep nothing else from its work (:class:`Waits`), and faults that must not stop it. Pure.

**Streams in an error state.** A broker may refuse a topic for good: a permission is missing, or the topic was removed
or reconfigured. The stream's transactions wait while those of all others continue, and are tried again at growing
intervals, so the stream leaves this state without help.

A leader cannot read the description or the buffer of some streams (:data:`UNLED`). These are not led: see
:mod:`rollbridge_coordinator.streams.unled`.

**Rounds with an unknown outcome.** A lost connection or a time-out in the middle of a round ends a leader's term. The
next one takes the transactional ids over, which ends what was open, reads the outcome in the commit log, and repeats
the round if it was not committed. If the content of one transaction provokes this each time, no term would get past it.
So:

1. The transactions of such a round are merged one by one.
2. Before each, a harmless record is appended to the same topics and aborted, which shows that the brokers work.
3. A transaction whose own rounds had unknown outcomes several times in a row is refused, by a leader that has read in
   the commit log that it was not committed.

This memory outlives the terms of one process, and ends with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, Self

from rollbridge.buffer.state import BufferedTransaction
from rollbridge.metadata.changes import (
    UNLED,
    WATCHED,
    CommittingTransactions,
    StreamChange,
    StreamFault,
)
from rollbridge.metadata.requests import AdminRequest
from rollbridge.stream.conditions import Obstacle
from rollbridge.stream.names import Partition
from rollbridge.stream.scaling import ScalingWait

LEADERLESS: Final = "LEADER_NOT_AVAILABLE"
"""Kafka's name of the fault of a topic all of whose brokers are down."""
UNREPLICATED: Final = "NOT_ENOUGH_REPLICAS"
"""Kafka's name of the fault of a topic that demands more in-sync replicas than it has."""
OF_BROKERS: Final = frozenset({LEADERLESS, UNREPLICATED, "NOT_ENOUGH_REPLICAS_AFTER_APPEND"})
"""Faults of a topic that end with those of its brokers."""
LEADERLESS_S: Final = 3.0
"""Time that a segment may be without a leader, or enough replicas, before its stream waits, and all others continue."""
SEAL_TIMEOUT: Final = "seal-timeout"
"""Code of a seal that took too long; it may work the next time."""
REST_FIRST_MS: Final = 1_000
REST_MAX_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """Back-off of refused work, doubled each time.

    Attributes:
        length_ms, until_ms: Its length, and its end.
        times: Number of refusals so far.
    """

    length_ms: int
    until_ms: int
    times: int = 1

    @classmethod
    def after(cls, last: RetryAfter | None, now_ms: int) -> Self:
        """Return the back-off that follows the last one, if any."""
        if last is None:
            return cls(REST_FIRST_MS, now_ms + REST_FIRST_MS)
        length_ms = min(2 * last.length_ms, REST_MAX_MS)
        return cls(length_ms, now_ms + length_ms, last.times + 1)

    def is_over(self, now_ms: int) -> bool:
        """Return True if the work is to be tried again; also if the clock was set back."""
        return not self.until_ms - self.length_ms <= now_ms < self.until_ms


class BlockedStreams:
    """The streams of a group that are in an error state, by ``scope/stream``."""

    def __init__(self) -> None:
        self._present: dict[str, StreamFault] = {}
        self._rests: dict[str, RetryAfter] = {}
        self._suspended: set[str] = set()
        self.news: list[str] = []
        """Changes that are not logged yet."""

    def __len__(self) -> int:
        return len(self._present)

    def items(self) -> list[tuple[str, StreamFault]]:
        return sorted(self._present.items())

    def get(self, stream: str) -> StreamFault | None:
        return self._present.get(stream)

    def first_of(self, streams: Collection[str]) -> str | None:
        """Return one of these streams that is in an error state, or None."""
        if not self._present:
            return None
        return next((name for name in streams if name in self._present), None)

    def is_lost(self, stream: str) -> bool:
        """Return True if the topic that a stream has adopted was deleted or replaced."""
        fault = self._present.get(stream)
        return fault is not None and fault.is_lost

    def note(self, stream: str, fault: StreamFault, now_ms: int) -> bool:
        """Note that a stream was refused, and return True if that is new; each retry is twice as far away.

        A stream that only waits for a broker is retried at a steady interval: that costs almost nothing.
        """
        if stream in self._suspended:
            return False
        last = self._rests.get(stream)
        self._rests[stream] = RetryAfter.after(None if fault.code in OF_BROKERS | {SEAL_TIMEOUT} else last, now_ms)
        if stream in self._present:
            return False
        self._present[stream] = fault
        if last is None:
            self.news.append(f"stream {stream} is in an error state, {fault.effect}: {fault.reason}")
        return True

    def restore(self, stream: str, fault: StreamFault) -> None:
        """Take over a fault of an earlier leader; the stream is retried at once."""
        self._present[stream] = fault

    def exclude(self, stream: str, fault: StreamFault) -> None:
        """Note the reason why a stream is not led."""
        known = self._present.get(stream)
        if known is None or (known.code, known.reason) != (fault.code, fault.reason):
            self.news.append(
                f"stream {stream} is not led, its group continues without it ({fault.code}): {fault.reason}"
            )
        self._present[stream] = fault

    def suspend(self, stream: str, fault: StreamFault) -> None:
        """Note that a stream waits in the middle of a change; it is not retried meanwhile."""
        if stream not in self._suspended:
            self.news.append(f"stream {stream} is suspended, its transactions wait: {fault.reason}")
        self._suspended.add(stream)
        self._rests.pop(stream, None)
        self._present[stream] = fault

    def resume(self, stream: str) -> None:
        """Note that the change is done, or given up."""
        if stream in self._suspended:
            self.news.append(f"stream {stream} is not suspended any more")
        self._suspended.discard(stream)
        self._present.pop(stream, None)

    def retry_ms(self, stream: str) -> int:
        """Return the end of the back-off of a stream; 0 if it has none."""
        return self._rests[stream].until_ms if stream in self._rests else 0

    def due(self, now_ms: int) -> list[str]:
        """Return the streams to retry."""
        return [
            name
            for name in self._present
            if name not in self._suspended
            and self._present[name].code not in WATCHED
            and (name not in self._rests or self._rests[name].is_over(now_ms))
        ]

    def is_tried(self, stream: str) -> bool:
        """Return True if it was refused, or checked, in this term, even if its back-off is over."""
        return stream in self._rests or self._present[stream].code in WATCHED | UNLED

    def lift(self, stream: str) -> None:
        """Retry the transactions of a stream that seems to work again."""
        self._present.pop(stream, None)

    def worked(self, streams: Iterable[str]) -> None:
        """Note that transactions of these streams have been merged."""
        if self._rests:
            for name in streams:
                if self._rests.pop(name, None) is not None:
                    self.news.append(f"stream {name} has left its error state")

    def forget(self, stream: str) -> None:
        """Drop a deleted stream."""
        self._suspended.discard(stream)
        self._present.pop(stream, None)
        self._rests.pop(stream, None)


# Rounds with an unknown outcome


UNKNOWN_MAX: Final = 3
"""Rounds in a row of its own with unknown outcome after which a transaction is refused."""


class UnknownOutcomes:
    """Transactions in rounds with unknown outcome. Not thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}
        self._round: tuple[bytes, ...] = ()
        self._suspect: bytes | None = None

    def begin(self, transactions: Sequence[BufferedTransaction], *, together: bool = False) -> None:
        """Begin a round.

        Args:
            together: True if they cannot be merged one by one; the largest is suspected then.
        """
        self._round = tuple(item.id for item in transactions)
        self._suspect = None
        if len(transactions) == 1:
            self._suspect = transactions[0].id
        elif transactions and together:
            self._suspect = max(transactions, key=lambda item: item.bytes).id

    def end(self) -> None:
        """End the round: its outcome is known, or it never began."""
        self._round, self._suspect = (), None

    def note_unknown(self) -> None:
        """Note that the term has ended; the outcome of a round under way is unknown."""
        for transaction in self._round:
            self._counts.setdefault(transaction, 0)
        if self._suspect is not None:
            self._counts[self._suspect] += 1
        self.end()

    def keep(self, known: Container[bytes]) -> None:
        """Drop all others: they have an outcome."""
        self._counts = {item: count for item, count in self._counts.items() if item in known}

    def forget(self, transaction: bytes) -> None:
        self._counts.pop(transaction, None)

    def __bool__(self) -> bool:
        return bool(self._counts)

    def is_suspect(self, transaction: bytes) -> bool:
        """Return True if it was in a round with an unknown outcome, so it is merged alone."""
        return transaction in self._counts

    def fault_of(self, transaction: BufferedTransaction) -> str | None:
        """Return the reason to refuse it now; None if there is none."""
        count = self._counts.get(transaction.id, 0)
        if count < UNKNOWN_MAX:
            return None
        return (
            f"its merge had no known outcome {count} times in a row, while the brokers took other records, and it was "
            "not committed"
        )


# Late commits one after another: how long a rolling commit stays open for the next, or waits for it. Pure.
#
# A client that commits transactions of a former epoch one after the other waits for each answer, so no wait before a
# rolling commit can bring two of them together. Instead the segments that took the first stay open for a moment, they
# *linger*, and the next is merged into them as into active segments. That is right as long as nothing at all has been
# written to the segments that continue them: whatever is written there comes after it, in time and in the order of
# keys.
# See docs/protocol.md, "Late commits one after another".
#
# Where clients commit late concurrently, those that come while a rolling commit is under way go into the next one.
# Where that takes several as well, it waits a moment for more.
#
# How long both take follows from what has happened: a lone late commit finds nothing open and waits for nothing.


LOOK_MS: Final = 10
"""Interval of checks of what continues lingering segments: readers may wait for them that much longer."""
SEGMENTS_MAX: Final = 16
"""Most segments that continue lingering ones: each check asks for the end of each."""
TOTAL: Final = 5
"""Longest time that segments stay open, in multiples of the longest linger, for any number of commits in succession."""
PATIENCE: Final = 10
"""Longest time between late commits in succession, in multiples of the longest linger."""

Numbers = Mapping[str, AbstractSet[int]]
"""Segments by the names of their streams, as numbers."""


@dataclass(slots=True)
class Lingering:
    """A visible rolling commit whose segments for transactions take more of them before they are sealed.

    Attributes:
        committing: Its record, in ZooKeeper until they are sealed.
        duplicates: Numbers of these segments, by stream.
        behind: Numbers of the segments that continue them, by stream.
        places: Partitions of those.
        since_ms: Begin of the linger.
        until_ms: Its end, unless something ends it earlier.
        is_used: True if a further commit was merged into them.
    """

    committing: CommittingTransactions
    duplicates: Numbers
    behind: Numbers
    places: tuple[Partition, ...]
    since_ms: int
    until_ms: int
    is_used: bool = False

    def takes(self, replaced: Numbers) -> bool:
        """Return True if these include all segments that were written to and are no longer active."""
        return bool(replaced) and all(
            name in self.duplicates and self.duplicates[name] >= numbers for name, numbers in replaced.items()
        )

    def is_before(self, written: Numbers) -> bool:
        """Return True if one of the segments that are written to continues them."""
        return any(not numbers.isdisjoint(self.behind.get(name, ())) for name, numbers in written.items())

    def prolong(self, now_ms: int, most_ms: int) -> None:
        self.is_used = True
        self.until_ms = min(now_ms + most_ms, self.since_ms + TOTAL * most_ms)

    def is_over(self, now_ms: int) -> bool:
        """Return True if the time is up; also if the clock was set back."""
        return not self.since_ms <= now_ms < self.until_ms


@dataclass(frozen=True, slots=True)
class _Last:
    """The last late commits of a stream.

    Attributes:
        at_ms: Time at which they became visible.
        took_ms: Duration of their rolling commit.
        lines: Number of their connections.
        patience_ms: Time within which the next must come for the segments to linger.
    """

    at_ms: int
    took_ms: int
    lines: int
    patience_ms: int


@dataclass(slots=True)
class LateCommits:
    """Late commits so far, by stream.

    Attributes:
        late_commit_window_ms: Longest linger of segments after each; 0: none.
        late_commit_batch_ms: Longest wait of a rolling commit for more; 0: none.
    """

    late_commit_window_ms: int
    late_commit_batch_ms: int
    _last: dict[str, _Last] = field(default_factory=dict)

    def note(self, streams: Iterable[str], began_ms: int, now_ms: int, lines: int) -> int:
        """Note late commits that have become visible; return the linger of their segments, ms."""
        names = list(streams)
        waits = [self._since_last(name, now_ms) for name in names]
        known = [item for item in waits if item is not None]
        took_ms = max(now_ms - began_ms, 0)
        patience_ms = PATIENCE * self.late_commit_window_ms
        self._last |= dict.fromkeys(names, _Last(now_ms, took_ms, lines, patience_ms))
        return min(max(known), self.late_commit_window_ms) if len(known) == len(waits) else 0

    def was_in_vain(self, streams: Iterable[str]) -> None:
        """Note that nothing came while segments lingered: the next must come sooner for them to linger again."""
        for name in streams:
            last = self._last.get(name)
            if last is not None:
                self._last[name] = _Last(last.at_ms, last.took_ms, last.lines, self.late_commit_window_ms)

    def gather_ms(self, streams: Iterable[str], now_ms: int) -> int:
        """Return the time that a rolling commit of streams waits for more, ms.

        It waits if the last one took commits of several connections and was no longer ago than its duration: for half
        of that time, so that rolling commits follow each other slightly slower, and each takes more.
        """
        found = [self._last.get(name) for name in streams]
        last = [
            item for item in found if item is not None and item.lines > 1 and 0 <= now_ms - item.at_ms <= item.took_ms
        ]
        return min([self.late_commit_batch_ms, *(item.took_ms // 2 for item in last)]) if len(last) == len(found) else 0

    def _since_last(self, name: str, now_ms: int) -> int | None:
        """Return the time since the last late commits of a stream; None if that is too long."""
        last = self._last.get(name)
        if last is None or not 0 <= now_ms - last.at_ms <= last.patience_ms:
            return None
        return now_ms - last.at_ms


# Waits


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """Request whose answer waits until everything that was in the buffers has been folded."""

    request: AdminRequest
    barrier: Mapping[Partition, int]


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for native transactions of others, or for missing leaders; all other work continues.

    Attributes:
        since_ms: Begin of the wait, by this leader's clock.
        due_ms: Time of the next check.
        seen: Obstacles at the last check.
        lasting: Obstacles at the last two, which are waited for: others end soon.
        told_ms: Time at which the log named them; None if not yet.
        places: Partitions of the last check; the waiting change may have been replanned since.
        streams: Streams that a scale waits with; a rolling commit's are kept with it.
    """

    since_ms: int
    due_ms: int
    seen: frozenset[Obstacle]
    lasting: frozenset[Obstacle] = frozenset()
    told_ms: int | None = None
    places: frozenset[Partition] = frozenset()
    streams: tuple[str, ...] = ()


@dataclass(slots=True)
class PendingRoll:
    """Rolling commit that waits before anything of it is done.

    Attributes:
        is_due: True if it may be planned again, which checks again.
    """

    wait: Wait
    is_due: bool = False


@dataclass(slots=True)
class PendingChange:
    """Scale or rolling commit that waits half done: its streams are closed, and take no transactions.

    Attributes:
        rest: Back-off, since a part of it was refused.
        refused: Reason of that; empty if nothing was.
    """

    work: StreamChange
    wait: Wait
    rest: RetryAfter | None = None
    refused: str = ""


MERGES_MAX: Final = 20
"""Failed merges after which a transaction is aborted; with their back-offs that takes a quarter of an hour at least."""


@dataclass(slots=True)
class MergeRetry:
    """Large transaction whose background merge failed; it holds no id until it begins again.

    Attributes:
        rest: Number of failures, and the back-off.
        why: Reason of the last one.
        is_due: True if it may begin again.
    """

    rest: RetryAfter
    why: str
    is_due: bool = False


@dataclass(slots=True)
class Waits:
    """Everything in a group that waits.

    Attributes:
        late_commits: Late commits, which may wait for each other.
        lingering: The rolling commit whose segments for transactions are still open for more; None if there is none.
        faults: Streams whose transactions wait because a broker refuses them.
        unknown_outcomes: Transactions whose rounds had an unknown outcome; outlives terms.
        failed_rounds: Number of refused rounds of a transaction; it is merged alone since.
        held: Requests to scale that wait for native transactions of others before anything is done.
        held_rolls: Rolling commits that do, by the names of their streams.
        pending_changes: Scales and rolling commits that wait for them half done, by their nodes.
        answers: Admin requests that wait for the end of a transaction.
        questions: Requests answered once the buffers have been folded up to their ends at that time.
        unanswered: Requests of which ZooKeeper refuses both the answer and the removal; they are skipped.
        lost_races: How often the write that carries out a request did not match what ZooKeeper has, by its name.
        is_race_lost: True if that happened in this turn: the next one handles the request again, and follows at once.
        scaling: ZooKeeper's list of the streams that wait to be scaled by their load; None before it was read.
        has_scaling_node: True if there is a node for that.
    """

    late_commits: LateCommits
    lingering: Lingering | None = None
    faults: BlockedStreams = field(default_factory=BlockedStreams)
    unknown_outcomes: UnknownOutcomes = field(default_factory=UnknownOutcomes)
    failed_rounds: Counter[bytes] = field(default_factory=Counter)
    held: dict[str, Wait] = field(default_factory=dict)
    held_rolls: dict[tuple[str, ...], PendingRoll] = field(default_factory=dict)
    pending_changes: dict[str, PendingChange] = field(default_factory=dict)
    answers: dict[bytes, list[str]] = field(default_factory=dict)
    questions: dict[str, WaitingRequest] = field(default_factory=dict)
    unanswered: set[str] = field(default_factory=set)
    lost_races: Counter[str] = field(default_factory=Counter)
    is_race_lost: bool = False
    scaling: tuple[ScalingWait, ...] | None = None
    has_scaling_node: bool = False

    def keep_requests(self, names: Collection[str]) -> None:
        """Drop all requests but these: who has withdrawn one may ask again under another name, and again."""
        present = frozenset(names)
        for gone in self.questions.keys() - present:
            del self.questions[gone]
        for asked in self.answers.values():
            asked[:] = [name for name in asked if name in present]
        self.unanswered &= present
        for gone in self.lost_races.keys() - present:
            del self.lost_races[gone]

    def take_lost_race(self) -> bool:
        """Return True, once, if a request lost a race in this turn."""
        lost, self.is_race_lost = self.is_race_lost, False
        return lost


# Takeovers


LEFT_OUT_S: Final = 600.0


class Suspects:
    """Buffers that seem to exist but that takeovers of a process could not read.

    After two such takeovers in a row, the process's takeovers of the next ten minutes leave the stream out.
    """

    def __init__(self) -> None:
        self._once: set[str] = set()
        self._left_out: dict[str, tuple[float, str]] = {}

    def note(self, topic: str, reason: str, now_s: float) -> None:
        """Note that a takeover could not read a buffer, and why."""
        if topic in self._once:
            self._left_out[topic] = now_s + LEFT_OUT_S, reason
        self._once.add(topic)

    def all_read(self) -> None:
        """Note that a takeover has read all buffers that it included."""
        self._once.clear()

    def left_out(self, now_s: float) -> dict[str, str]:
        return {topic: reason for topic, (until_s, reason) in self._left_out.items() if now_s < until_s}


# Errors of the coordinator that never reach a client


class StaleStateError(Exception):
    """ZooKeeper or Kafka differ from what this leader last wrote: it must drop its state and take over again."""


class LostRaceError(Exception):
    """The write that carries out a request did not apply: the request was withdrawn, or others have come between.

    Nothing of it was written, and the request is handled again, from the start.
    """
