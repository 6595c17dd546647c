"""State of a transaction group's leader: its streams with their histories, and the fold of their buffers. Pure.

**Offset prediction.** A control record names the offsets of a transaction's records, so it would have to wait for the
answer to the request that appends them. A leader that predicts the offsets sends both at once: the next record of a
segment is appended at its end, unless another writer appends there. The answers show whether the prediction was right.
If not, the round is aborted and repeated in two requests, and the topic is not predicted for a while, longer each time.

**Records of open transactions** keep a takeover short. A record costs as much as its transactions have frames, so one
is written only after as much has arrived since the last; all together stay in proportion to what was written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from rollbridge.base.ids import GroupCounter, TransactionId
from rollbridge.buffer.fold import BufferFold
from rollbridge.buffer.replay import FRAME_BYTES, TRANSACTION_BYTES, OngoingTransaction, OngoingTransactions
from rollbridge.buffer.state import BufferedTransaction, savepoint_price
from rollbridge.buffer.table import State
from rollbridge.metadata.changes import CommittingTransactions, Merging
from rollbridge.stream.names import GroupName, Partition, is_segment_topic, parse_segment_topic
from rollbridge_coordinator.commit.outcome_store import Draft, OutcomeStore
from rollbridge_coordinator.core.bookkeeping import CommitLog, Housekeeping, LateWatch
from rollbridge_coordinator.core.effects import Items
from rollbridge_coordinator.core.metrics import GroupMetrics
from rollbridge_coordinator.core.settings import LeaderSettings
from rollbridge_coordinator.core.stream_state import Doomed, JournalState, LedStream, Unled
from rollbridge_coordinator.core.waits import LOOK_MS, LateCommits, MergeRetry, PendingChange, Waits
from rollbridge_coordinator.daemon.succession import Times
from rollbridge_coordinator.history.snapshot_plan import Needed, PartitionSnapshots, SnapshotPlan, Snapshots

# Progress of the search for obsolete sessions of clients. Pure.
#
# There may be a million of them, so each turn of the leader does a little. Results of earlier stages are kept here; a
# new leader begins again.


READ_AT_ONCE: Final = 100
"""Records read in one request; each may take up to 1 MiB."""
NAMES_AT_ONCE: Final = 5_000
"""Names looked up in memory in one turn."""


class SearchStage(Enum):
    """Next step of the search."""

    REST = "nothing, until the next search is due"
    EXAMINE = "find the records that may go"
    LEARN = "know those that stay, before the floor ends what is not known"
    DELETE = "delete those that may go"


@dataclass(slots=True)
class SessionSearch:
    """State of the search.

    Attributes:
        names: Clients to check in this stage.
        due: Clients whose records may be removed.
        highest: Highest epoch of these.
        floor: Floor on record, below which all unknown epochs will be over.
        began_ms: Begin of the search, by the lowest clock.
        learned: Sessions on record that were new to this leader, by client.
        barrier: Ends of the buffers after these were read.
        strangers: Clients with frames but no record when the search began.
        count: Records at the last listing, less those removed since; -1 if unknown.
    """

    stage: SearchStage = SearchStage.REST
    names: list[str] = field(default_factory=list)
    due: list[str] = field(default_factory=list)
    highest: int = 0
    floor: int = 0
    began_ms: int = 0
    learned: dict[str, int] = field(default_factory=dict)
    barrier: Mapping[Partition, int] | None = None
    strangers: list[str] = field(default_factory=list)
    count: int = -1

    def begin(self, names: list[str], strangers: list[str], now_ms: int) -> None:
        """Begin a search in all records."""
        self.rest()
        self.stage, self.names, self.count = SearchStage.EXAMINE, names, len(names)
        self.strangers, self.began_ms = strangers, now_ms

    def find(self, client: str, epoch: int) -> None:
        """Note a record that may be removed."""
        self.due.append(client)
        self.highest = max(self.highest, epoch)

    def take(self, is_wanted: Callable[[str], bool]) -> list[str]:
        """Take as many names as one turn can do; return those whose records are needed."""
        wanted: list[str] = []
        for _ in range(min(NAMES_AT_ONCE, len(self.names))):
            name = self.names.pop()
            if is_wanted(name):
                wanted.append(name)
                if len(wanted) >= READ_AT_ONCE:
                    break
        return wanted

    def rest(self) -> None:
        self.stage, self.names, self.due, self.highest = SearchStage.REST, [], [], 0
        self.learned, self.barrier, self.strangers = {}, None, []


# Offset prediction


BYTES_MAX: Final = 1024 * 1024
"""Size of a round beyond which it does not fit into one request, so prediction gains nothing, and a wrong one costs
more.
"""
PATIENCE_MAX: Final = 1024


@dataclass(slots=True)
class _Log:
    """Known state of a partition: its next offset, and the number of rounds without prediction."""

    next: int
    patience: int
    resting: int = 0


class OffsetPredictor:
    """Predictor of offsets, from the ends of past rounds. Not thread-safe.

    Attributes:
        log_end: Predicted offset of the next control record, if any.
    """

    __slots__ = ("_logs", "_patience", "log_end")

    def __init__(self, patience: int) -> None:
        """Begin without knowledge; a wrong prediction suspends a partition for at least ``patience`` rounds."""
        self._patience = patience
        self._logs: dict[Partition, _Log] = {}
        self.log_end: int | None = None

    def offsets(self, items: Items) -> list[int] | None:
        """Predict the offset of each frame's first record; None if unknown or not worth it."""
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
        """Note the offsets of a round's frames as the round ends: a marker follows in each partition.

        ``expected`` is the prediction of :meth:`offsets`, if the round relied on it.
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
        """Drop segments that are sealed: they are never written to again."""
        for place in partitions:
            self._logs.pop(place, None)


@dataclass(slots=True)
class Preparation:
    """Large transaction that is merged in the background.

    Attributes:
        node: Path of its record, its name in effects, too.
        items: Its frames, with their target partitions.
        offsets: Offset of the first record of each frame, once all are appended.
    """

    node: str
    record: Merging
    items: Items
    offsets: Sequence[int] | None = None


@dataclass(slots=True)
class LargeMerges:
    """Large transactions that are merged in the background, by the 16 bytes of their ids.

    Attributes:
        preparations: Those under way, or done and not in a history yet.
        retries: Those that begin again.
        leftovers: Preparations that are obsolete or in use: records by their nodes, to be removed.
    """

    preparations: dict[bytes, Preparation] = field(default_factory=dict)
    retries: dict[bytes, MergeRetry] = field(default_factory=dict)
    leftovers: dict[str, Merging] = field(default_factory=dict)


@dataclass(slots=True)
class OpenRecords:
    """Which transactions have records, in ZooKeeper and on the commit log.

    Attributes:
        recorded: Open transactions that have a ZooKeeper record.
        shown: Those of them whose record says that their commit was requested after it was made.
        unrecorded: Open transactions whose ZooKeeper and BEGIN records were refused.
        begun: Open transactions that have a BEGIN record on the commit log.
        finished: Transactions whose ZooKeeper record is still to be removed.
    """

    recorded: set[bytes] = field(default_factory=set)
    shown: set[bytes] = field(default_factory=set)
    unrecorded: list[BufferedTransaction] = field(default_factory=list)
    begun: set[bytes] = field(default_factory=set)
    finished: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class GroupState:
    """A transaction group as its leader knows it.

    Attributes:
        controller_epoch: Epoch of this leader, in every control record.
        serves_since_ms: End of its takeover, by its clock; 0 before.
        fold: State of its transaction buffers.
        streams: Its streams by ``scope/stream``.
        unled: Unreadable streams, not in ``streams`` for now.
        doomed: Streams being deleted, no longer in ``streams``.
        records: Records of open transactions.
        waits: Everything that waits.
        large: Large transactions that are merged in the background.
        outcome_store: Remembered outcomes of transactions; None if switched off.
        buffer_epochs: Leader epochs of the last frames of the standby whose tail was taken over.
        draft: Outcomes to remember once the round under way is committed.
        sessions: Progress of the search for obsolete sessions.
        predictor: Ends of its segments, as far as known.
        housekeeping: Times and results of housekeeping.
        watch: Sealed segments that are checked for late records.
        counter: State of the counter of its transactions.
        journal: Copy in Kafka of its ZooKeeper nodes.
        times: Differences of clocks.
        counts: Counters, by the names of :data:`rollbridge_coordinator.core.metric_samples.COUNTS`.
    """

    name: GroupName
    controller_epoch: int
    fold: BufferFold
    settings: LeaderSettings = field(default_factory=LeaderSettings)
    serves_since_ms: int = 0
    streams: dict[str, LedStream] = field(default_factory=dict)
    unled: dict[str, Unled] = field(default_factory=dict)
    doomed: dict[str, Doomed] = field(default_factory=dict)
    records: OpenRecords = field(default_factory=OpenRecords)
    waits: Waits = field(init=False)
    large: LargeMerges = field(default_factory=LargeMerges)
    outcome_store: OutcomeStore | None = None
    buffer_epochs: dict[Partition, int] = field(default_factory=dict)
    draft: Draft | None = None
    sessions: SessionSearch = field(default_factory=SessionSearch)
    predictor: OffsetPredictor = field(init=False)
    housekeeping: Housekeeping = field(default_factory=Housekeeping)
    snapshots: Snapshots = field(init=False)
    watch: LateWatch = field(init=False)
    counter: GroupCounter = field(default_factory=GroupCounter)
    journal: JournalState = field(default_factory=JournalState)
    times: Times = field(default_factory=Times)
    log: CommitLog = field(default_factory=CommitLog)
    counts: Counter[str] = field(default_factory=Counter)
    metrics: GroupMetrics = field(default_factory=GroupMetrics)

    def __post_init__(self) -> None:
        self.predictor = OffsetPredictor(self.settings.forecast_patience)
        self.snapshots = Snapshots(self.name.scope, self.settings.snapshots)
        self.watch = LateWatch(self.settings.late_watch_ms)
        late_commits = LateCommits(self.settings.late_commit_window_ms, self.settings.late_commit_batch_ms)
        self.waits = Waits(late_commits)

    @property
    def commit_log(self) -> str:
        return self.name.commit_log_topic

    def add_stream(self, stream: LedStream) -> None:
        """Add a stream that nothing has been written to yet."""
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
        """Return a stream in an error state that a transaction waits for, if its commit was requested.

        The segments of a half-done stream change, so conditions on it wait as well; so do conditions on an adopted
        topic that was deleted or replaced.
        """
        if not self.waits.faults or transaction.state is not State.COMMITTING or transaction.manifest is None:
            return None
        if self.unled and (unled := self.unled_of(transaction)) is not None:
            return unled  # whatever it has written there, not all of its frames are known
        written = transaction.written_streams()
        found = self.waits.faults.first_of([name for name in transaction.begin.streams if name in written])
        if found is not None:
            return found
        expected = sorted(transaction.expected_streams() & self.streams.keys())
        return next((name for name in expected if self.is_half_done(name) or self.waits.faults.is_lost(name)), None)

    def unled_of(self, transaction: BufferedTransaction) -> str | None:
        """Return a stream of a transaction that is not led, None if all are."""
        return next((name for name in transaction.all_streams() if name in self.unled), None)

    def suspended_on(self, stream: str, but: str = "") -> PendingChange | None:
        """Return the scale or rolling commit of a stream that waits half done, ``but`` for the one with that node."""
        works = self.waits.pending_changes.items()
        return next((item for node, item in works if node != but and stream in item.work.streams), None)

    def is_suspended(self, stream: str) -> bool:
        return bool(self.waits.pending_changes) and self.suspended_on(stream) is not None

    def is_half_done(self, stream: str, but: str = "") -> bool:
        """Return True if one waits, or was refused in the middle, so that some ends of segments are unknown.

        ``but`` is the node of a change to ignore.
        """
        waits = self.suspended_on(stream, but) is not None
        return waits or bool(self.streams[stream].history.unsealed())

    def is_rolling(self, transaction: BufferedTransaction) -> bool:
        """Return True if a rolling commit that waits half done names a transaction."""
        works = (item.work for item in self.waits.pending_changes.values())
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
        """Return the time that may be waited for frames before other work is due."""
        if self.waits.lingering is not None:
            return min(LOOK_MS, most_ms)
        gathering = [item.wait.due_ms - now_ms for item in self.waits.held_rolls.values() if not item.wait.seen]
        return max(min([most_ms, *gathering]), 0)

    def forget_round(self) -> None:
        """Forget what was drafted for the round, and predicted of its end; that it was not committed is known."""
        self.predictor.log_end = self.draft = None
        self.waits.unknown_outcomes.end()

    def forget_places(self, places: Iterable[Partition]) -> None:
        """Drop partitions of deleted segments."""
        for place in places:
            self.predictor.forget([place])
            self.housekeeping.starts.pop(place, None)

    def holds_roll(self, streams: Iterable[str]) -> bool:
        """Return True if a rolling commit of these streams waits for native transactions of others."""
        item = self.waits.held_rolls.get(tuple(sorted(streams)))
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
"""Limit of one record: about half a million frames. The rest is read again, as is everything after it."""


_TRANSACTIONS_FREE: Final = 50
"""Open transactions that may be recorded each time, even above the bound; more are recorded less often."""


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
        if (
            item.state is not State.OPEN
            or item.id not in group.records.recorded
            or room < 0
            or not item.is_settled_whose()
        ):
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
    """Return what a new leader needs of the last record after a snapshot; None if nothing."""
    spared = known.spared
    return spared if spared is not None and spared.position > plan.draft.max_read_position else None
