"""Actors of the simulation: clients that write plainly and in transactions, and leaders that crash."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from bridge.tests.sim_effects import Blocked, Driven, Turns
from coordinator.tests.makers import varied
from coordinator.tests.sim_conditions import expectation
from coordinator.tests.sim_expiry import whole_history_of
from coordinator.tests.sim_snapshots import restored_faults
from coordinator.tests.sim_truncation import history_of
from coordinator.tests.sim_world import WRITE_BYTES_MAX, Fenced, Gone, Record, World, shard
from rollbridge.base.effects import AnyEffect, Steps
from rollbridge.base.ids import ISSUED_MAX, TransactionId, counter_of, parse_number
from rollbridge.buffer.fold import BufferFold, BufferLimits
from rollbridge.buffer.frames import (
    BeginFrame,
    FrameHeader,
    FrameKind,
    Manifest,
    PieceKey,
    buffer_partition,
    encode_abort,
    encode_extend,
)
from rollbridge.buffer.owners import Fences
from rollbridge.buffer.state import Ages, BufferedTransaction
from rollbridge.buffer.table import State
from rollbridge.commitlog.commit_order import CommitOrder
from rollbridge.commitlog.control import ControlKind, ControlRecord
from rollbridge.commitlog.outcomes import EndedIds
from rollbridge.metadata import paths
from rollbridge.metadata.records import Group
from rollbridge.metadata.requests import AdminRequest, RequestKind
from rollbridge.stream.conditions import StreamCondition
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.epochs import EpochHistory, EpochRecord
from rollbridge.stream.group_offsets import GroupOffsets, OffsetDetails
from rollbridge.stream.keyspace import KeySpace
from rollbridge.stream.names import GroupName, Partition, StreamName
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.bookkeeping import LateWatch
from rollbridge_coordinator.core.invariants import violations
from rollbridge_coordinator.core.loop import work
from rollbridge_coordinator.core.metrics import Op
from rollbridge_coordinator.core.settings import LeaderSettings, ScalingSettings, SnapshotSettings
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.waits import StaleStateError
from rollbridge_coordinator.daemon.succession import Times
from rollbridge_coordinator.history.takeover import WarmTail, check_again, finish_pending, take_over

LEASE_MS = 4_000
NEVER_MS = 1 << 60
NEWS_TAKE_MS = 1_500
DAY_MS = 24 * 3_600_000
SKEWS_MS = (0, 0, 1_500, 0, -1_500, 40 * DAY_MS, -3 * DAY_MS)
"""By how much the clocks of leaders are ahead, one term after the other."""
PROCEDURES = (
    "clear_snapshots",
    "take_snapshots",
    "finish_pending",
    "take_over",
    "merge_direct",
    "prepare",
    "follow_preparations",
    "remove_leftovers",
    "must_wait",
    "roll",
    "merge_late",
    "watch_linger",
    "end_linger",
    "scale",
    "follow_load",
    "go_on_with_scale",
    "go_on_with_roll",
    "create_stream",
    "delete_stream",
    "delete_further",
    "record_long",
    "expire_overdue",
    "remove_records",
    "truncate_buffers",
    "keep_ended",
    "retain_log",
    "update_group",
    "truncate_stream",
    "retain_streams",
    "remove_emptied",
    "drop_epochs",
    "expire_bookkeeping",
    "look_behind",
)
LINGER_LOOKS = ("merge_late/EndOffsets", "watch_linger/EndOffsets")
REMEMBERED = 6
BLOCK = 16
"""Counters that a client reserves at once."""
BLOCK_MS = 1_000
"""For how long it uses them."""
COUNTERS_KEEP_MS = 3_000
"""After what time leaders may count all of them as ended."""


SCALING = varied(
    ScalingSettings(scaling_window_ms=400, scaling_cooldown_ms=600, scaling_per_hour_max=100),
    scaling_parts_max=3,
    scaling_open_ms=1_000,
    scaling_open_max=8,
)
"""Of streams that have a policy, which few have."""


def settings_of(epoch: int, defects: frozenset[str] = frozenset()) -> LeaderSettings:
    """The settings of a leader: now and then one that writes single snapshots is among them."""
    snapshots = varied(
        SnapshotSettings(transaction_buffer_segmented_snapshot_enabled=epoch % 4 != 0),
        transaction_buffer_snapshot_segment_size=300,
        transaction_buffer_snapshot_max_transaction_count=4,
        transaction_buffer_snapshot_min_time_in_millis=500,
        transaction_buffer_snapshot_replay_max=3,
        transaction_buffer_snapshot_cache_bytes_max=500,
    )
    settings = LeaderSettings(
        merge_beside_bytes=(0, 500, 900)[epoch % 3],
        late_commit_window_ms=400 if epoch % 3 else 0,
        transaction_meta_persist_count=REMEMBERED,
        snapshots=snapshots,
        scaling=SCALING,
    )
    return varied(
        settings,
        round_bytes_max=2_000,
        retention_check_ms=100,
        late_commit_batch_ms=100 if epoch % 2 else 0,
        round_transactions_max=5,
        commit_order_patience_ms=800,
        record_after_ms=50,
        write_bytes_max=1_000_000 if "unbounded-multi" in defects else WRITE_BYTES_MAX,
        requests_per_turn=4,
        forecast_patience=0,
        outcomes_again=1,
        outcomes_unlisted_max=5,
        ended_ranges_kept=5,
        counters_keep_ms=COUNTERS_KEEP_MS,
        truncate_buffers_ms=50,
        topic_check_ms=200,
        bookkeeping_ms=500,
        counter_check_ms=300,
        answers_keep_ms=2_000,
        epochs_keep_ms=3_000,
        late_watch_ms=4_000,
    )


@dataclass
class Attempt:
    """A transaction that a client made."""

    id: TransactionId
    begin: BeginFrame
    records: list[tuple[StreamName, Record]] = field(default_factory=list)
    pieces: dict[PieceKey, int] = field(default_factory=dict)
    offsets: tuple[GroupOffsets, ...] = ()
    conditions: tuple[StreamCondition, ...] = ()
    ended: str = ""
    part: int = 0
    sent: dict[PieceKey, list[tuple[StreamName, Record]]] = field(default_factory=dict)
    outcome: ControlRecord | None = None
    order: CommitOrder | None = None
    begun_ms: int = 0
    asked_ms: int = 0
    commits_ms: int | None = None
    """When its commit is asked for, if that has been decided."""
    poisoned: list[tuple[StreamName, Record]] = field(default_factory=list)
    """What of it no broker takes."""
    aborted_by_admin: bool = False
    """Whether an administrator has asked for its abort."""


class Client:
    """Writes ever higher numbers under its own keys, plainly or in transactions, one after the other."""

    lease_ms = LEASE_MS
    poisons = 0.0
    """How many of its frames hold what no broker takes."""

    def __init__(self, name: str, world: World, streams: list[StreamName], rng: random.Random) -> None:
        self.name = name
        self.world = world
        self.streams = streams
        self.rng = rng
        self.views: dict[StreamName, EpochHistory] = {}
        self.heard: dict[StreamName, tuple[int, int]] = {}
        self.clock_ms = 0
        self.counts: dict[tuple[StreamName, str], int] = {}
        self.current: Attempt | None = None
        self.pending: tuple[StreamName, Record] | None = None
        self.attempts: list[Attempt] = []
        self.plain: list[tuple[StreamName, Record]] = []
        self.log_position = 0
        self.outcomes: dict[TransactionId, ControlRecord] = {}
        self.serial = 0
        self.block: tuple[int, list[int]] = (0, [])
        """When counters were reserved, and those that are left."""
        self.read = 0
        self.stopping = False
        self.epoch = 0
        self.extends = random.Random(f"{name}, {rng.getstate()[1][0]}")
        """Whether a lease is extended, drawn beside everything else."""

    def step(self, clock_ms: int, log: str) -> None:
        """Do one thing."""
        self.clock_ms = clock_ms
        if self.pending is not None:
            self._plain(*self.pending)
        elif self.current is None:
            if not self.stopping:
                self._start()
        elif self.current.ended in ("commit", "abort", "silent"):
            self._await(log)
        else:
            self._go_on()

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return self.current is None and self.pending is None

    def _start(self) -> None:
        if self.rng.random() < 0.4:
            stream = self.rng.choice(self.streams)
            self._plain(stream, self._next(stream))
        else:
            self._start_transaction()

    def _start_transaction(self) -> None:
        chosen = self.rng.sample(self.streams, self.rng.randint(1, len(self.streams)))
        epochs = {str(item): self._reference(item) for item in chosen}
        counter = self._counter()
        begin = BeginFrame(self.name, self.epoch, None, self.lease_ms, epochs)
        self.current = self._begin(TransactionId.of(epochs[str(chosen[0])], counter), begin)

    def _counter(self) -> int:
        """One that nobody else has; they go to all partitions of a buffer in turn."""
        since_ms, left = self.block
        if not left or self.clock_ms - since_ms > BLOCK_MS:
            left = list(reserve(self.world, GroupName(self.streams[0].scope), BLOCK) or ())
            self.block = self.clock_ms, left
        if left:
            return left.pop(0)
        self.serial += 1
        return self.serial << 8 | int(self.name[1:]) << 3 | self.serial & 7

    def _reference(self, stream: StreamName) -> int:
        """The epoch against which this client begins; news of a later one take their time."""
        heard_ms, epoch = self.heard.get(stream, (0, 0))
        if self.clock_ms - heard_ms > NEWS_TAKE_MS or self.rng.random() < 0.7:
            epoch = int(history_of(self.world, stream).active.reference_epoch)
            self.heard[stream] = self.clock_ms, epoch
        return epoch

    def _begin(self, identifier: TransactionId, begin: BeginFrame) -> Attempt:
        attempt = Attempt(identifier, begin, begun_ms=self.world.clock_ms)
        self.attempts.append(attempt)
        for name in begin.streams:
            self._send(attempt, name, FrameHeader(FrameKind.BEGIN, identifier.bytes), begin.encode())
        return attempt

    def _go_on(self) -> None:
        assert self.current is not None
        if self.current.commits_ms is not None:
            if self.clock_ms >= self.current.commits_ms:
                self._ask_for_commit(self.current)
            return
        often = 0.5 if "stubborn-lease" in self.world.faults else 0.05
        if self.lease_ms == LEASE_MS and self.extends.random() < often:
            header = FrameHeader(FrameKind.EXTEND, self.current.id.bytes, self.current.part)
            lease_ms = self.extends.randint(0, 2 * LEASE_MS)
            self._send(self.current, self.current.begin.home, header, encode_extend(lease_ms))
        chance = self.rng.random()
        if chance < 0.75:
            self._write(self.current)
            late = 0.5 if "hasty-expiry" in self.world.faults else 0.05
            if self.lease_ms == LEASE_MS and self.rng.random() < late:  # it asks for its commit at the last moment
                self.current.commits_ms = self.current.begun_ms + LEASE_MS - self.rng.randint(0, 200)
        elif chance < 0.93:
            self._ask_for_commit(self.current)
        elif chance < 0.96:
            self.current.ended = "abort"
            header = FrameHeader(FrameKind.ABORT, self.current.id.bytes, self.current.part)
            self._send(self.current, self.current.begin.home, header, encode_abort("no"))
        elif chance < 0.98:
            self.current.ended = "silent"

    def _ask_for_commit(self, attempt: Attempt) -> None:
        attempt.ended, attempt.asked_ms = "commit", self.world.clock_ms
        if self.rng.random() < 0.4:
            attempt.offsets = (self._offsets(),)
        if self.rng.random() < 0.4:
            attempt.conditions = tuple(self._conditions(attempt.begin))
        self._send(attempt, attempt.begin.home, *commit_frame(attempt))

    def _offsets(self) -> GroupOffsets:
        """Of a group whose members share the partitions anew now and then, perhaps before the leader comes to it."""
        group = f"group-{self.rng.randint(0, 1)}"
        if self.rng.random() < 0.2:
            self.world.generations[group] = self.world.generations.get(group, 0) + 1
        return self._offsets_of(group)

    def _offsets_of(self, group: str) -> GroupOffsets:
        """The next offset of a group, some with a leader epoch, a text, or both."""
        self.read += 1
        where = self.name, self.read % 3
        details = {where: OffsetDetails(self.read % 4 - 1, f"{self.name} has read {self.read}" * (self.read % 2))}
        return GroupOffsets(group, {where: self.read}, self.world.generations.get(group, 0), self.name, details=details)

    def _conditions(self, begin: BeginFrame) -> Iterator[StreamCondition]:
        for _ in range(self.rng.randint(1, 2)):
            name = self.rng.choice(list(begin.streams))
            stream = StreamName.parse(name)
            keys = [f"{self.name}-{number}" for number in range(4)]
            history = whole_history_of(self.world, stream)
            found = expectation(self.world, begin.places[name], stream, history, keys, self.rng)
            if found is not None:
                yield found

    def _write(self, attempt: Attempt) -> None:
        """Send one frame of one to three records for one segment of the reference epoch."""
        stream = StreamName.parse(self.rng.choice(list(attempt.begin.streams)))
        epoch = whole_history_of(self.world, stream).record(attempt.begin.streams[str(stream)])
        first = self._next(stream)
        number = epoch.segment_at(KeySpace().position(first.key.encode())).id.number
        rows = [first]
        while len(rows) < self.rng.randint(1, 3):
            count = int(rows[-1].value.split("=")[1]) + 1
            self.counts[stream, first.key] = count
            rows.append(Record(first.key, f"{first.key}={count}"))
        place = attempt.begin.places[str(stream)]
        base = sum(len(rows) for rows in attempt.sent.values())
        made = [Record(row.key, row.value, str(attempt.id), base + place) for place, row in enumerate(rows)]
        attempt.records.extend((stream, record) for record in made)
        piece = PieceKey(attempt.part, place, number)
        attempt.pieces[piece] = attempt.pieces.get(piece, 0) + len(made)
        attempt.sent.setdefault(piece, []).extend((stream, record) for record in made)
        batch = json.dumps([[item.key, item.value, item.transaction, item.sequence] for item in made]).encode()
        if self.poisons and self.rng.random() < self.poisons:
            self.world.poison.add(batch)
            attempt.poisoned.extend((stream, record) for record in made)
        header = FrameHeader(FrameKind.DATA, attempt.id.bytes, attempt.part, number, base, len(made))
        self._send(attempt, str(stream), header, batch)
        if self.rng.random() < 0.1:
            self._send(attempt, str(stream), header, batch)  # a retry whose first try had arrived
        if self.rng.random() < 0.1:  # a zombie part of the transaction that no commit will name
            self._send(attempt, str(stream), header._replace(part=7), batch)

    def _await(self, log: str) -> None:
        assert self.current is not None
        topic = self.world.topics[log]
        for _, record in topic.visible(self.log_position):
            if record.kind is not ControlKind.BEGIN:
                self.outcomes[record.transaction] = record
        self.log_position = topic.stable_end(self.log_position)
        self.current.outcome = self.outcomes.get(self.current.id)
        if self.current.outcome is not None:
            if self.current.outcome.kind is ControlKind.COMMIT and self.current.records and self.rng.random() < 0.5:
                stream, last = self.current.records[-1]  # what is written after the answer comes after it for readers
                count = self.counts[stream, last.key] = self.counts[stream, last.key] + 1
                self.pending = stream, Record(last.key, f"{last.key}={count}")
            self.current = None

    def _plain(self, stream: StreamName, record: Record) -> None:
        """Write to the segment that this client believes to be active; look for the successor when it is refused."""
        view = self.views.setdefault(stream, history_of(self.world, stream))
        segment = view.active.segment_at(KeySpace().position(record.key.encode()))
        if self.world.produce(stream.segment_topic(segment.id), record) is None:
            self.views[stream] = history_of(self.world, stream)
            self.pending = (stream, record)
        else:
            self.pending = None
            self.plain.append((stream, record))

    def _keys(self) -> str:
        """What the keys begin with that nobody else writes to."""
        return self.name

    def _next(self, stream: StreamName) -> Record:
        key = f"{self._keys()}-{self.rng.randint(0, 3)}"
        count = self.counts[stream, key] = self.counts.get((stream, key), 0) + 1
        return Record(key, f"{key}={count}")

    def _send(self, attempt: Attempt, stream: str, header: FrameHeader, value: bytes) -> None:
        name = StreamName.parse(stream)
        number = buffer_partition(attempt.id, stream_config(self.world, name).buffer_partitions)
        self.world.produce(shard(name.buffer_topic(), number), (header.pack(), value))


class HastyFold(BufferFold):
    """A defect: what has been read counts as done."""

    def low_water(self) -> dict[Partition, int]:
        """Not what it promises."""
        return dict(self.positions)


class StubbornAges(Ages):
    """A defect: a lease that was extended still ends when it would have."""

    def next_deadline_ms(self) -> int | None:
        """Likewise."""
        return min((item.begun_ms + LEASE_MS for item in self._extended()), default=None)

    def overdue(self, now_ms: int) -> list[BufferedTransaction]:
        """Not what it promises."""
        return [item for item in self._extended() if item.begun_ms + LEASE_MS < now_ms]

    def _extended(self) -> list[BufferedTransaction]:
        first = [item for item in self._known.values() if item.state is State.OPEN]
        return [item for item in first if item.begin.lease_ms < 5 * LEASE_MS]


class StubbornFold(BufferFold):
    """The same."""

    def __init__(self, limits: BufferLimits, check: Callable[[bytes, int], str | None], terminated: Any = ()) -> None:
        super().__init__(limits, check, terminated)
        self.ages = StubbornAges(self.open)


class CarelessFold(BufferFold):
    """A defect: no transaction refers to any epoch."""

    def references(self) -> dict[str, int]:
        """Not what it promises."""
        return {}


class UnorderedFold(BufferFold):
    """A defect: a commit counts from when it is met, whatever was asked for before it."""

    def _commit(
        self,
        transaction: BufferedTransaction | None,
        header: FrameHeader,
        stream: str,
        value: bytes,
        appended_ms: int,
        order: CommitOrder | None,
    ) -> None:
        super()._commit(transaction, header, stream, value, appended_ms, order)
        release_all(self)


class ForgivingFold(BufferFold):
    """A defect: what waits in vain for earlier commits goes without them."""

    def forsake(self, now_ms: int, patience_ms: int) -> int:
        """Not what it promises."""
        if any(now_ms > item.decided_ms + patience_ms for item in self.lines.held()):
            release_all(self)
        return 0


def release_all(fold: BufferFold) -> None:
    """Decide on every commit that waits for earlier ones."""
    for item in list(fold.lines.held()):
        assert item.order is not None
        fold.lines.release(item.order, item)
        fold.decided[item.id] = item


def fold_of(world: World, terminated: Collection[bytes]) -> BufferFold:
    """An empty fold, of a leader or a standby."""
    limits = BufferLimits(cache_bytes_max=400, cache_bytes_per_transaction_max=200)
    kind: type[BufferFold] = HastyFold if "hasty-truncation" in world.faults else BufferFold
    kind = StubbornFold if "stubborn-lease" in world.faults else kind
    kind = CarelessFold if "careless-expiry" in world.faults else kind
    kind = UnorderedFold if "unordered-session" in world.faults else kind
    kind = ForgivingFold if "gaps-in-session" in world.faults else kind
    return kind(limits, lambda *_: None, terminated)


def commit_frame(attempt: Attempt) -> tuple[FrameHeader, bytes]:
    """The COMMIT frame of a transaction."""
    segment, count, records = (0, 0, 0) if attempt.order is None else attempt.order.fields()
    header = FrameHeader(FrameKind.COMMIT, attempt.id.bytes, attempt.part, segment, count, records)
    return header, Manifest(dict(attempt.pieces), attempt.offsets, attempt.conditions).encode()


class BlindWatch(LateWatch):
    """A defect: nobody looks behind the end of a sealed segment."""

    def take_up(self, stream: str, history: EpochHistory, now_ms: int, earliest_ms: int | None = None) -> None:
        """Not what it promises."""
        self.known[stream] = history.active.epoch


class Leader:
    """A leader that carries out one effect at each step, and can stop, or be left behind, before any of them."""

    def __init__(self, world: World, name: GroupName, forgetful: bool = False, tail: WarmTail | None = None) -> None:
        world.controller_epoch += 1
        self.world = world
        self.epoch = world.controller_epoch
        self.skew_ms = SKEWS_MS[self.epoch % len(SKEWS_MS)]
        self.alive = True
        self.group: GroupState | None = None
        self.barrier: dict[Partition, int] = {}
        self.pending_done = False
        self.returned = False
        """Whether its connection to ZooKeeper was away since it last did something."""
        self.fences = Fences()
        self.forgetful = forgetful
        times, now_ms = Times(), world.clock_ms + self.skew_ms
        if "trusts-its-clock" not in world.faults:
            times.witness(now_ms, world.clock_ms, now_ms)
        settings = settings_of(self.epoch, world.faults)
        self.under_way: Driven[Any] | None = None
        self._turns: Turns[Any]
        self._begin(take_over(name, self.epoch, self._fold, settings, tail=tail, times=times))

    @property
    def procedure(self) -> Steps[Any] | None:
        """What it is carrying out."""
        return None if self.under_way is None else self.under_way.procedure

    @property
    def effect(self) -> AnyEffect | None:
        """Which of its effects comes next."""
        return None if self.under_way is None else self.under_way.effect

    def _fold(self, terminated: Collection[bytes]) -> BufferFold:
        return fold_of(self.world, frozenset() if self.forgetful else terminated)

    def step(self, clock_ms: int, rng: random.Random) -> None:
        """Carry out the next effect, or fold some messages."""
        if self.under_way is None:
            assert self.group is not None
            self._read(clock_ms, rng)
            if not self.pending_done:
                if not self.group.is_folded(self.barrier):
                    return
                self._begin(finish_pending(self.group))
            elif self.returned:
                self.returned = False
                self._begin(check_again(self.group))
            else:
                now_ms = clock_ms + self.skew_ms
                if "trusts-its-clock" not in self.world.faults:
                    self.group.times.witness_append(self.group.fold.appended_ms, now_ms)
                is_calm = self.group.waits.lingering is None and not self.group.fold.decided
                asked = is_calm or bool(self.world.children(paths.requests(self.group.name)))
                self._begin(work(self.group, now_ms, requests=asked))
            return
        if self.returned and isinstance(self.effect, fx.Write):
            raise StaleStateError("the connection was away in the middle of the work")
        self._turn()

    def _begin(self, procedure: Steps[Any]) -> None:
        self.under_way = Driven(procedure)
        self._turns = self.under_way.turns(self._carry_out, refusals=(fx.EffectRefusedError,))
        self._turn()

    def _turn(self) -> None:
        """Carry out the next effect, and find out which comes then.

        Raises:
            EffectRefusedError: It was refused, and its procedure has no answer to that: the term ends.
        """
        try:
            next(self._turns)
        except StopIteration as end:
            self._done(end.value)

    def _carry_out(self, effect: AnyEffect) -> Any:
        self.world.acting = self.place()
        blind = "waiting-roll" in self.world.faults and self.world.acting == "must_wait/LookForObstacles"
        try:
            result: Any = [] if blind else self.world.execute(effect, self.epoch)
        except fx.EffectRefusedError as refused:
            raise self.world.hear(refused) from refused
        self.world.done[self.world.acting] += 1
        if "blind-linger" in self.world.faults and self.world.acting in LINGER_LOOKS:
            result = dict.fromkeys(result, 0)
        if "forgotten-outcomes" in self.world.faults and isinstance(effect, fx.ReadCompacted):
            result = {key: row for key, row in result.items() if not key.startswith(b"ended-")}
        if "forgotten-outcomes" in self.world.faults and isinstance(effect, fx.ReadEnded):
            result = EndedIds()
        if "hasty-expiry" in self.world.faults and self.world.acting == "expire_overdue/EndOffsets":
            result = dict.fromkeys(result, 0)
        return result + self.skew_ms if isinstance(effect, fx.Now) else result

    def _done(self, value: Any) -> None:
        self.under_way = None
        if self.group is None:
            self.group, self.barrier = value
            if "timed-seal" in self.world.faults:
                self.group.watch = BlindWatch(0)
            self.fences = deepcopy(self.group.fold.fences)
            self.world.takeovers.update(self.group.counts)
        elif self.pending_done:
            self.world.broken.extend(f"after {self.world.acting}: {what}" for what in violations(self.group))
        else:
            self.pending_done = True
            if not self.forgetful:
                self.world.broken.extend(restored_faults(self.world, self.group, self.fences))
                self.world.spared += self.group.snapshots.metrics.ongoing_ops[Op.READ]

    def crash(self, share: float) -> None:
        """Die, perhaps in the middle of an effect."""
        self.alive = False
        try:
            if self.effect is not None:
                self.world.acting = self.place()
                self.world.execute_partly(self.effect, self.epoch, share)
        except (Blocked, Fenced, fx.EffectRefusedError):
            return
        except Gone:
            if self.epoch == self.world.controller_epoch and not self.world.lost_buffers:
                raise  # else a newer leader, or somebody else, has deleted what this one was about to merge

    def place(self) -> str:
        """Which procedure, and which of its effects, comes next: where a crash now falls."""
        chain: list[str] = []
        generator: Any = self.procedure
        while generator is not None:
            chain.append(generator.__name__)
            generator = generator.gi_yieldfrom
        outer = next((name for name in chain if name in PROCEDURES), chain[0] if chain else "idle")
        return f"{outer}/{type(self.effect).__name__}"

    def _read(self, clock_ms: int, rng: random.Random) -> None:
        assert self.group is not None
        for (topic, number), stream in self.group.partitions().items():
            start = self.group.fold.positions.get((topic, number), 0)
            log = self.world.topics.get(shard(topic, number))
            if log is None and self.world.lost_buffers:
                continue  # somebody else has deleted it, and nothing comes from there
            if log is None:
                assert self.epoch < self.world.controller_epoch, f"{topic} is gone, and its leader reads on"
                raise Gone  # a newer leader has deleted the stream
            if start < log.start or (self.world.lost_buffers and start > len(log.entries)):
                raise Gone  # out of range: truncated by a newer leader, or made anew by somebody else
            if topic in self.world.unread or rng.random() < 0.25:
                continue  # what stands there is fetched later than what it does next
            entries = log.entries[start : start + rng.randint(0, 12)]
            for offset, entry in enumerate(entries, start):
                self.group.fold.now_ms = self.world.clock_ms
                self.group.fold.fold(stream, (topic, number), offset, entry.appended_ms, *entry.item)


def reserve(world: World, group: GroupName, count: int) -> range | None:
    """Reserve counters as :meth:`~rollbridge.metadata.store.Metadata.reserve_counters`; None if it has to wait."""
    known = Group.from_json(world.nodes[paths.group(group)])
    if not known.number:
        first = int(world.nodes.get(paths.TRANSACTION_COUNTER) or b"1")
        world.nodes[paths.TRANSACTION_COUNTER] = b"%d" % (first + count)
        return range(first, first + count)
    found = parse_number(world.nodes.get(paths.counter(group)), ISSUED_MAX, known.counter_floor)
    if found is None or found + count > known.counter_ceiling:
        return None
    world.nodes[paths.counter(group)] = b"%d" % (found + count)
    return range(counter_of(known.number, found), counter_of(known.number, found + count))


def scale_request(world: World, stream: StreamName, rng: random.Random, clock_ms: int) -> AdminRequest | None:
    """Split one active segment, or join two neighbours."""
    active: EpochRecord = history_of(world, stream).active
    place = rng.randrange(len(active.segments))
    chosen = active.segments[place]
    if rng.random() < 0.5 and place + 1 < len(active.segments):
        other = active.segments[place + 1]
        seal, ranges = (chosen.id.number, other.id.number), ((chosen.range.low, other.range.high),)
    elif len(active.segments) < 6:
        middle = (chosen.range.low + chosen.range.high) / 2
        seal, ranges = (chosen.id.number,), ((chosen.range.low, middle), (middle, chosen.range.high))  # type: ignore[assignment]
    else:
        return None
    return AdminRequest(
        kind=RequestKind.SCALE_STREAM, stream=str(stream), seal=seal, ranges=ranges, created_ms=clock_ms
    )


def stream_config(world: World, stream: StreamName) -> StreamConfig:
    """A stream's configuration as ZooKeeper has it."""
    return _config_of(world.nodes[paths.stream(stream)])


_config_of = lru_cache(maxsize=1 << 8)(StreamConfig.from_json)
