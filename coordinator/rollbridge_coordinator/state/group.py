"""The state of a transaction group's leader: its streams with their histories, and the fold of their buffers. Pure.

**Offset prediction.** A control record names the offsets of a transaction's records, so it would have to wait for the
answer to the request that appends them. A leader that predicts the offsets sends both at once: the next record of a
segment stands at its end as long as nobody else writes there. The answers tell whether that was right. If not, the
round is aborted and done again in two requests, and the topic is not predicted for a while, longer each time.

**Records of open transactions** keep a takeover short. A record costs as much as its transactions have frames, so one
is written only after as much has arrived since the last; all of them together stay in proportion to what was written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rollbridge.model.buffer import BufferFold
from rollbridge.model.changes import CommittingTransactions, Merging, StreamChange
from rollbridge.model.conditions import Obstacle
from rollbridge.model.ids import GroupCounter, SegmentId, TransactionId
from rollbridge.model.names import GroupName, Partition, is_segment_topic, parse_segment_topic
from rollbridge.model.ongoing import FRAME_BYTES, TRANSACTION_BYTES, OngoingTransaction, OngoingTransactions
from rollbridge.model.options import MIB, option
from rollbridge.model.pieces import BufferedTransaction, savepoint_price
from rollbridge.model.records import LOG_RETENTION_MS_DEFAULT
from rollbridge.model.requests import AdminRequest
from rollbridge.model.scaling import ScalingWait
from rollbridge.model.transaction import State
from rollbridge_coordinator.state.effects import Items
from rollbridge_coordinator.state.faults import Doubts, Faults
from rollbridge_coordinator.state.linger import LOOK_MS, LateCommits, Lingering
from rollbridge_coordinator.state.metrics import GroupMetrics
from rollbridge_coordinator.state.preserver import Draft, TransactionMetadataPreserver
from rollbridge_coordinator.state.scaling import ScalingSettings
from rollbridge_coordinator.state.sessions import SessionSearch
from rollbridge_coordinator.state.snapshots import Needed, PartitionSnapshots, SnapshotPlan, Snapshots, SnapshotSettings
from rollbridge_coordinator.state.streams import Doomed, JournalState, LedStream, Unled
from rollbridge_coordinator.state.succession import Times
from rollbridge_coordinator.state.upkeep import CommitLog, Housekeeping, LateWatch, Rest

# Offset prediction


BESIDE_IDENTITIES: Final = 4
"""Transactional ids for merges beside the line. Every leader takes all of them, however many it uses, or one that was
replaced might still commit with one that its successor does not know."""

BYTES_MAX: Final = 1024 * 1024
"""Rounds larger than this do not fit into one request, so they gain nothing, and lose more if the forecast is wrong."""
PATIENCE_MAX: Final = 1024


@dataclass(slots=True)
class _Log:
    """What is known of a partition: its next offset, and for how many rounds it is not to be relied on."""

    next: int
    patience: int
    resting: int = 0


class Forecast:
    """Remembers where rounds have ended. Not thread-safe."""

    __slots__ = ("_logs", "_patience")

    def __init__(self, patience: int) -> None:
        """Start without knowledge; where a forecast was wrong, a partition rests for ``patience`` rounds at least."""
        self._patience = patience
        self._logs: dict[Partition, _Log] = {}

    def offsets(self, items: Items) -> list[int] | None:
        """Predict the offset of each frame's first record; None if that is unknown or not worth it."""
        ends: dict[Partition, int] = {}
        size = 0
        expected = []
        for place, frame in items:
            end = ends.get(place)
            if end is None:
                known = self._logs.get(place)
                if known is None or known.resting:
                    return None
                end = known.next
            expected.append(end)
            ends[place] = end + frame.records
            size += frame.size
        return expected if expected and size <= BYTES_MAX else None

    def note(self, items: Items, offsets: Sequence[int], expected: Sequence[int] | None = None) -> None:
        """Take note of where a round's frames stand, which ends now: a marker follows in each partition.

        ``expected`` is what :meth:`offsets` said of them, if the round relied on it.
        """
        ends: dict[Partition, int] = {}
        missed: set[Partition] = set()
        for index, ((place, frame), offset) in enumerate(zip(items, offsets, strict=True)):
            ends[place] = offset + frame.records + 1
            if expected is not None and expected[index] != offset:
                missed.add(place)
        for place, end in ends.items():
            known = self._logs.get(place)
            if known is None:
                self._logs[place] = _Log(end, self._patience)
            elif place in missed:
                known.next, known.resting = end, known.patience
                known.patience = min(2 * known.patience, PATIENCE_MAX)
            else:
                known.next, known.resting = end, max(known.resting - 1, 0)
                if expected is not None:
                    known.patience = max(known.patience - 1, self._patience)

    def forget(self, partitions: Iterable[Partition]) -> None:
        """Forget segments that are sealed, so never written to again."""
        for place in partitions:
            self._logs.pop(place, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderSettings:
    """Bounds and delays of a leader."""

    round_bytes_max: int = 64 * MIB
    """Bytes of frames in one native transaction, unless one of ours alone is larger; bounds how long readers wait."""
    round_transactions_max: int = 5_000
    """Transactions in one native transaction."""
    rolling_transactions_max: int = 10_000
    """Transactions in one rolling commit; their ids must fit into a ZooKeeper node of 1 MiB."""
    commit_order_patience_ms: int = 60_000
    """How long a commit waits for earlier ones of its connection at least, once its lease has run out."""
    record_after_ms: int = 500
    """How long a transaction is open before it gets a ZooKeeper record."""
    forecast_patience: int = 8
    """For how many rounds a segment in which others write is left out of forecasts, the first time."""
    requests_per_turn: int = 16
    """Admin requests handled before the buffers are looked at again."""
    write_bytes_max: int = 900_000
    """Bytes of one ZooKeeper multi that is built bit by bit; ZooKeeper takes up to 1 MiB."""
    truncate_buffers_ms: int = 10_000
    """How often buffers are truncated, at most, and only where something was settled."""
    retention_check_ms: int = 30_000
    """How often it is looked whether streams with a retention hold what may be deleted."""
    topic_check_ms: int = 10_000
    """How often adopted topics are looked at for what their owners have changed."""
    bookkeeping_ms: int = 60_000
    """How often it is looked for bookkeeping in ZooKeeper that is of no use any more."""
    counter_check_ms: int = 5_000
    """How often it is looked whether the counter of the group's transactions says what can be."""
    answers_keep_ms: int = 60 * 60 * 1000
    """How long the answer to an admin request waits for whoever asked."""
    epochs_keep_ms: int = 24 * 60 * 60 * 1000
    """How long clients may go on to begin transactions against an epoch that was replaced, because they have not heard
    of it."""
    transaction_meta_persist_count: int = option(100, low=0)
    """Terminated transactions remembered of each client name; 0 remembers none. PIP-255's
    ``TransactionMetaPersistCount``, which is 0 there."""
    transaction_meta_persist_total: int = 500_000
    """Terminated transactions remembered of all clients of a group together; of more, the oldest tenth is forgotten.
    Each takes 0.5 KB of memory (0.7 KB where each client name has one)."""
    transaction_meta_persist_time_in_hour: int = 72
    """For how long they are remembered, unless a transaction says otherwise. PIP-255's name."""
    transaction_meta_expire_check_interval_in_second: int = 300
    """How often those are looked for that are due to be forgotten. PIP-255's name."""
    merge_beside_bytes: int = option(16 * MIB, low=0)
    """Bytes of frames from which on a transaction is merged beside the line: into segments of its own that nobody reads
    yet, while others commit. Smaller ones take less time than the two epochs that such a merge makes. 0: none is."""
    merges_beside_max: int = option(BESIDE_IDENTITIES, low=1, high=BESIDE_IDENTITIES)
    """How many transactions are merged beside the line at a time; further ones wait."""
    scale_wait_ms: int = 20_000
    """How long a scale waits for native transactions of other Kafka clients before it is refused; keep it below the
    clients' ``admin_timeout_s``, so that they are told who holds it up."""
    late_watch_ms: int = 20 * 60 * 1000
    """For how long leaders look behind the end of a segment that was sealed: longer than any native transaction may be
    open (``transaction.max.timeout.ms``, 15 minutes), and than any request lives in a broker."""
    linger_ms_max: int = option(200, low=0)
    """How long the segments that took a rolling commit stay open for the next late commit, at most, where these come
    one after the other; a lone one never waits for that. 0: never."""
    gather_ms_max: int = option(100, low=0)
    """How long a rolling commit waits for more late commits, at most, where several clients make them. 0: never."""
    outcomes_again: int = 20_000
    """How far before the position in a snapshot the commit log is read, for BEGIN frames that a writer has doubled."""
    outcomes_unlisted_max: int = 10_000
    """Outcomes after which it is written down anew which transactions have ended. A takeover reads at most about so
    much more of the commit log."""
    ended_ranges_kept: int = 10_000
    """Ranges of ended transactions beyond which the gaps between them are closed, if no client can use them any more; a
    record of so many takes about 40 KB."""
    counters_keep_ms: int = 2 * 24 * 60 * 60 * 1000
    """How long ago an id was given out that no client uses any more. Clients give up a block of ids after a day."""
    commit_log_retention_ms: int = option(LOG_RETENTION_MS_DEFAULT, low=-1)
    """How long the commit log is kept at least, in groups that do not say it themselves; -1 is for ever."""
    commit_log_retention_bytes: int = option(-1, low=-1)
    """How many bytes of it are kept at least, likewise; -1 is all."""
    snapshots: SnapshotSettings = field(default_factory=SnapshotSettings)
    scaling: ScalingSettings = field(default_factory=ScalingSettings)


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request whose answer waits until everything that was in the buffers has been folded."""

    request: AdminRequest
    barrier: Mapping[Partition, int]


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait for native transactions of others, or for leaders that are away; everything else goes on.

    Attributes:
        since_ms: Since when, by this leader's clock.
        due_ms: When to look again.
        seen: What was there at the last look.
        lasting: What was there at the last two, which is what is waited for: others end soon.
        told_ms: When a log said for whom it waits; None if that has not been said.
        places: Where the last look was; what waits may have been planned otherwise since.
    """

    since_ms: int
    due_ms: int
    seen: frozenset[Obstacle]
    lasting: frozenset[Obstacle] = frozenset()
    told_ms: int | None = None
    places: frozenset[Partition] = frozenset()


@dataclass(slots=True)
class HeldRoll:
    """A rolling commit that waits before anything of it is done.

    Attributes:
        wait: For what.
        is_due: Whether it may be planned again, so that it is looked again.
    """

    wait: Wait
    is_due: bool = False


@dataclass(slots=True)
class Suspended:
    """A scale or rolling commit that waits half done: its streams are closed, and take no transactions.

    Attributes:
        work: What is half done.
        wait: For what.
        rest: How long it is left alone, since something of it was refused.
        refused: Why that was; empty if nothing was.
    """

    work: StreamChange
    wait: Wait
    rest: Rest | None = None
    refused: str = ""


@dataclass(slots=True)
class Preparation:
    """A large transaction that is merged beside the line.

    Attributes:
        node: Path of its record, which names it for effects, too.
        record: What is prepared.
        items: Its frames, with the partitions that take them.
        offsets: Offset of the first record of each frame, once all are appended.
    """

    node: str
    record: Merging
    items: Items
    offsets: Sequence[int] | None = None


@dataclass(slots=True)
class MergeRetry:
    """A large transaction whose merge beside the line was in vain; it has no place there until it begins again.

    Attributes:
        rest: How often that was so, and how long it is left alone now.
        why: Reason of the last time.
        is_due: Whether it may begin again.
    """

    rest: Rest
    why: str
    is_due: bool = False


@dataclass(slots=True)
class GroupState:
    """A transaction group as its leader knows it.

    Attributes:
        name: The group.
        controller_epoch: Epoch of this leader; stands in every control record.
        serves_since_ms: When this leader had taken over, by its clock; 0 before.
        fold: State of its transaction buffers.
        streams: Its streams by ``scope/stream``.
        unled: Those that cannot be read, which are none of its streams for now.
        doomed: Those that are being deleted, which are none of its streams any more.
        recorded: Open transactions that have a ZooKeeper record.
        shown: Those of them whose record says that their commit was asked for, as it did not when it was made.
        unrecorded: Open transactions that are to get both, and of which that was refused.
        begun: Open transactions that have a BEGIN record on the commit log.
        unmended: Segments that may have Kafka's limits of timestamps; None until a leader begins to look.
        finished: Transactions whose ZooKeeper record is still to be removed.
        answers: Admin requests that wait for the end of a transaction.
        held: Requests to scale that wait for native transactions of others before anything is done.
        held_rolls: Rolling commits that do, by the names of their streams.
        suspended: Scales and rolling commits that wait for them half done, by their nodes.
        preparations: Large transactions that are merged beside the line, by the 16 bytes of their ids.
        merge_retries: Large transactions whose merge beside the line begins again, by the 16 bytes of their ids.
        leftovers: What was prepared and is of no use any more, or in use: records by their nodes, to be removed.
        lingering: The rolling commit whose segments for transactions are still open for more; None if there is none.
        late_commits: How late commits have come so far.
        unanswered: Requests of which ZooKeeper refuses both the answer and the removal; they are left alone.
        questions: Requests that are answered once the buffers have been folded up to where they ended.
        preserver: What is remembered of terminated transactions; None if that is switched off.
        buffer_epochs: Leader epochs of the last frames that the standby had read whose tail was taken over.
        log_end: Where the next control record will stand, if that can be foretold.
        draft: What is remembered of the round under way once it is committed.
        expiry_checked_ms: When outcomes that are due to be forgotten were looked for.
        sessions: How far the search for sessions that nobody needs has come.
        forecast: Where its segments end, as far as that is known.
        housekeeping: When it was done last, and what is known from it.
        snapshots: The snapshots of its buffers.
        watch: Which sealed segments are still looked behind.
        faults: Streams whose transactions wait because a broker refuses them.
        doubts: Whose rounds had no known outcome; outlives terms.
        failed_rounds: How many rounds of a transaction were refused as a whole; it is merged alone since.
        counter: What is known of the counter of its transactions.
        journal: What of its nodes in ZooKeeper stands in Kafka once more.
        times: By how much clocks differ.
        log: What is kept of its commit log.
        scaling_waits: What ZooKeeper says of the streams that wait to be scaled by their load; None before it was read.
        has_scaling_waits: Whether there is a node for that.
        counts: What happened, by the names of :data:`rollbridge_coordinator.state.families.COUNTS`.
        metrics: What was measured besides.
    """

    name: GroupName
    controller_epoch: int
    fold: BufferFold
    settings: LeaderSettings = field(default_factory=LeaderSettings)
    serves_since_ms: int = 0
    streams: dict[str, LedStream] = field(default_factory=dict)
    unled: dict[str, Unled] = field(default_factory=dict)
    doomed: dict[str, Doomed] = field(default_factory=dict)
    recorded: set[bytes] = field(default_factory=set)
    shown: set[bytes] = field(default_factory=set)
    unrecorded: list[BufferedTransaction] = field(default_factory=list)
    begun: set[bytes] = field(default_factory=set)
    unmended: list[tuple[str, SegmentId]] | None = None
    finished: list[bytes] = field(default_factory=list)
    answers: dict[bytes, list[str]] = field(default_factory=dict)
    questions: dict[str, WaitingRequest] = field(default_factory=dict)
    held: dict[str, Wait] = field(default_factory=dict)
    unanswered: set[str] = field(default_factory=set)
    held_rolls: dict[tuple[str, ...], HeldRoll] = field(default_factory=dict)
    suspended: dict[str, Suspended] = field(default_factory=dict)
    preparations: dict[bytes, Preparation] = field(default_factory=dict)
    merge_retries: dict[bytes, MergeRetry] = field(default_factory=dict)
    leftovers: dict[str, Merging] = field(default_factory=dict)
    lingering: Lingering | None = None
    late_commits: LateCommits = field(init=False)
    preserver: TransactionMetadataPreserver | None = None
    buffer_epochs: dict[Partition, int] = field(default_factory=dict)
    log_end: int | None = None
    draft: Draft | None = None
    expiry_checked_ms: int = 0
    sessions: SessionSearch = field(default_factory=SessionSearch)
    forecast: Forecast = field(init=False)
    housekeeping: Housekeeping = field(default_factory=Housekeeping)
    snapshots: Snapshots = field(init=False)
    watch: LateWatch = field(init=False)
    faults: Faults = field(default_factory=Faults)
    doubts: Doubts = field(default_factory=Doubts)
    failed_rounds: Counter[bytes] = field(default_factory=Counter)
    counter: GroupCounter = field(default_factory=GroupCounter)
    journal: JournalState = field(default_factory=JournalState)
    times: Times = field(default_factory=Times)
    log: CommitLog = field(default_factory=CommitLog)
    scaling_waits: tuple[ScalingWait, ...] | None = None
    has_scaling_waits: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    metrics: GroupMetrics = field(default_factory=GroupMetrics)

    def __post_init__(self) -> None:
        self.forecast = Forecast(self.settings.forecast_patience)
        self.snapshots = Snapshots(self.name.scope, self.settings.snapshots)
        self.watch = LateWatch(self.settings.late_watch_ms)
        self.late_commits = LateCommits(self.settings.linger_ms_max, self.settings.gather_ms_max)

    @property
    def commit_log(self) -> str:
        """Topic of the commit log."""
        return self.name.commit_log_topic

    def add_stream(self, stream: LedStream) -> None:
        """Take up a stream that nothing has been written to yet."""
        self.streams[str(stream.config.name)] = stream
        for partition in stream.partitions():
            self.snapshots.of(partition, stream.config.buffer_topic_id)

    def partitions(self) -> dict[Partition, str]:
        """Return all buffer partitions of the group, with the stream each belongs to."""
        return {partition: name for name, stream in self.streams.items() for partition in stream.partitions()}

    def buffers_of(self, transaction: TransactionId, streams: Iterable[str]) -> list[Partition]:
        """Return the buffer partitions of a transaction in those of these streams whose buffers the group reads."""
        found = (self.streams.get(name) for name in streams)
        return [stream.partition_for(transaction) for stream in found if stream is not None]

    def waits_for(self, transaction: BufferedTransaction) -> str | None:
        """Return a stream in an error state that a transaction waits for, if its commit was asked for.

        A stream that is half done changes its segments, so what is expected of it waits as well; so does what is
        expected of an adopted topic that is gone, or another one by now.
        """
        if not self.faults or transaction.state is not State.COMMITTING or transaction.manifest is None:
            return None
        if self.unled and (unled := self.unled_of(transaction)) is not None:
            return unled  # whatever it has written there, not all of its frames are known
        written = transaction.written_streams()
        found = self.faults.first_of([name for name in transaction.begin.streams if name in written])
        if found is not None:
            return found
        expected = sorted(transaction.expected_streams() & self.streams.keys())
        return next((name for name in expected if self.is_half_done(name) or self.faults.is_lost(name)), None)

    def unled_of(self, transaction: BufferedTransaction) -> str | None:
        """Return a stream of a transaction that is not led, None if all are."""
        return next((name for name in transaction.all_streams() if name in self.unled), None)

    def suspended_on(self, stream: str, but: str = "") -> Suspended | None:
        """Return the scale or rolling commit of a stream that waits half done, ``but`` for the one with that node."""
        works = self.suspended.items()
        return next((item for node, item in works if node != but and stream in item.work.streams), None)

    def is_suspended(self, stream: str) -> bool:
        """Return True if a scale or rolling commit of a stream waits half done."""
        return bool(self.suspended) and self.suspended_on(stream) is not None

    def is_half_done(self, stream: str, but: str = "") -> bool:
        """Return True if one waits, or was refused in the middle, so that some ends of segments are unknown.

        ``but`` is the node of one that does not count.
        """
        waits = self.suspended_on(stream, but) is not None
        return waits or bool(self.streams[stream].history.unsealed())

    def is_rolling(self, transaction: BufferedTransaction) -> bool:
        """Return True if a rolling commit that waits half done names a transaction."""
        works = (item.work for item in self.suspended.values())
        return any(
            isinstance(work, CommittingTransactions) and transaction.transaction_id in work.transactions
            for work in works
        )

    def stream_of(self, topic: str) -> str | None:
        """Return the stream whose segments lie in a topic, by name; None if it is none of this group's."""
        for name, stream in self.streams.items():
            if stream.config.topic == topic:
                return name
        name = str(parse_segment_topic(topic)[0]) if is_segment_topic(topic) else ""
        return name if name in self.streams else None

    def pause_ms(self, now_ms: int, most_ms: int) -> int:
        """Return how long may be waited for frames before there is other work to do."""
        if self.lingering is not None:
            return min(LOOK_MS, most_ms)
        gathering = [item.wait.due_ms - now_ms for item in self.held_rolls.values() if not item.wait.seen]
        return max(min([most_ms, *gathering]), 0)

    def forget_places(self, places: Iterable[Partition]) -> None:
        """Forget partitions of segments that are gone."""
        for place in places:
            self.forecast.forget([place])
            self.housekeeping.starts.pop(place, None)

    def holds_roll(self, streams: Iterable[str]) -> bool:
        """Return True if a rolling commit of these streams waits for native transactions of others."""
        item = self.held_rolls.get(tuple(sorted(streams)))
        return item is not None and not item.is_due

    def is_folded(self, barrier: Mapping[Partition, int]) -> bool:
        """Return True if everything below a barrier has been folded, in buffers that the group still reads.

        A stream may be deleted while something waits for its buffer.
        """
        positions = self.fold.positions
        behind = [partition for partition, offset in barrier.items() if positions.get(partition, 0) < offset]
        return not behind or self.partitions().keys().isdisjoint(behind)


# Records of open transactions


ONGOING_BYTES_MAX: Final = 8 * 1024 * 1024
"""Of one record: about half a million frames. What does not fit is read again, as everything after it."""


_TRANSACTIONS_FREE: Final = 50
"""So many open transactions may be written down each time that the bound is exceeded; if there are more, less often."""


def plan_ongoing(group: GroupState, plan: SnapshotPlan) -> OngoingTransactions | None:
    """Return the record to write with a snapshot; None if it is not worth it, or not now."""
    partition, draft = plan.partition, plan.draft
    known = group.snapshots.partitions[partition]
    lag = known.lag(draft.position, draft.commit_log_end)
    known.frames = 0
    replay_max = group.settings.snapshots.transaction_buffer_snapshot_replay_max
    if lag <= replay_max:
        return None
    found = [item for item in group.fold.open.values() if partition in item.first_offsets]
    each = replay_max // _TRANSACTIONS_FREE
    known.frames = sum(len(item.frames) + each for item in found)
    if lag <= known.frames:
        return None
    needed = needed_with(known, plan) or Needed(draft.max_read_position, draft.commit_log_position)
    found.sort(key=lambda item: item.first_offsets[partition])
    if any(item.state is not State.OPEN and item.first_offsets[partition] < needed.position for item in found):
        return None  # it is about to go
    known.tried = Needed(draft.position, draft.commit_log_end)
    stream = group.partitions()[partition]
    listed: list[OngoingTransaction] = []
    room = ONGOING_BYTES_MAX
    for item in found:
        room -= TRANSACTION_BYTES + FRAME_BYTES * len(item.frames) + 2 * savepoint_price(item.savepoint)
        if item.state is not State.OPEN or item.id not in group.recorded or room < 0 or not item.is_settled_whose():
            break
        listed.append(OngoingTransaction.of(item, stream, partition))
    rest = found[len(listed) :]
    record = OngoingTransactions(
        partition=partition,
        topic_id=draft.topic_id,
        generation=draft.generation,
        controller_epoch=draft.controller_epoch,
        position=draft.position,
        replay_position=min([item.first_offsets[partition] for item in rest], default=draft.position),
        commit_log_position=min([item.log_position for item in rest], default=draft.commit_log_end),
        transactions=tuple(listed),
    )
    saved = record.replay_position - needed.position, record.commit_log_position - needed.log_position
    return record if listed and min(saved) >= 0 and max(saved) > 0 else None


def needed_with(known: PartitionSnapshots, plan: SnapshotPlan) -> Needed | None:
    """Return what a new leader needs of the last record once a snapshot is taken; None if it is of no use."""
    spared = known.spared
    return spared if spared is not None and spared.position > plan.draft.max_read_position else None
