"""One run of the simulation: clients, owners and faults by a seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import partial

from coordinator.tests import sim_snapshots as snapshots
from coordinator.tests.sim_actors import Client, Leader, fold_of, scale_request
from coordinator.tests.sim_admin import Administrator, denying, make_old_stream
from coordinator.tests.sim_bursts import BurstingClient
from coordinator.tests.sim_checks import faults
from coordinator.tests.sim_clocks import RETENTION_MS, check_age
from coordinator.tests.sim_expiry import check_drop, spoiled, whole_history_of
from coordinator.tests.sim_log import (
    check_log,
    log_retention_request,
    read_log,
    say_again,
    spoil_list,
)
from coordinator.tests.sim_pipelines import PipeliningClient
from coordinator.tests.sim_refusals import POISONED, Refusals
from coordinator.tests.sim_sessions import RestartingClient
from coordinator.tests.sim_standby import Standby
from coordinator.tests.sim_truncation import (
    audit,
    check_buffer,
    check_deletion,
    history_of,
    retention_request,
    truncate_request,
)
from coordinator.tests.sim_world import WRITE_BYTES_MAX, Fenced, Gone, Inside, Record, World
from rollbridge.base.effects import AnyEffect
from rollbridge.base.ids import SegmentId
from rollbridge.metadata import paths
from rollbridge.metadata.records import Group, NodeOperation, Truncation
from rollbridge.metadata.requests import AdminRequest, RequestKind
from rollbridge.stream.keyspace import KeySpace
from rollbridge.stream.names import GroupName, StreamName, parse_segment_topic
from rollbridge.stream.scaling import ScalingPolicy
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.effects import EffectRefusedError
from rollbridge_coordinator.core.waits import StaleStateError

GROUP = GroupName("sales")


STREAMS = [StreamName("sales", "orders"), StreamName("sales", "payments")]


OLD_STREAMS = [StreamName("sales", "old-1"), StreamName("sales", "old-2")]


BUFFER_PARTITIONS = dict(zip(STREAMS, (2, 1), strict=True))


STEPS = 3_000


DRAIN_STEPS = 8_000
"""Several times what the longest run took to come to rest; a run with a defect may never do so, and takes them all."""


LATE_CRASHES = 5


FOREIGN_MS = 4_000
"""How long native transactions of others stay open."""


LASTING_MS = 2_500
"""A scale may not be caught by one that was open for so long when it was begun."""


GLANCES = (fx.ReadNodes, fx.ReadChildren, fx.EnsureNodes, fx.TopicIds, fx.Now)
"""Effects of which takeovers have dozens: mostly nothing happens before them, so that leaders come to other things."""


HELD_MS = 1_000
"""Far longer than a seal may wait for native transactions of others."""


APPEND_MS = 3_000
"""How long an append can be inside of a broker."""


POLICIES = [
    ScalingPolicy(events_per_second=10, max_segments=6),
    ScalingPolicy(bytes_per_second=1_000, min_segments=2, max_segments=5),
]
"""Of the streams that are scaled by their load."""


def policy_request(stream: StreamName, policy: ScalingPolicy) -> AdminRequest:
    """A stream gets a scaling policy."""
    return AdminRequest(kind=RequestKind.UPDATE_STREAM, stream=str(stream), created_ms=0, scaling=policy)


class Run:
    """One simulated history."""

    def __init__(
        self,
        seed: int,
        defects: frozenset[str] = frozenset(),
        fragility: float = 0.0,
        unseen: AbstractSet[str] = frozenset(),
        *,
        is_calm: bool = False,
        by_load: bool = False,
    ) -> None:
        """``fragility`` is how often leaders crash where they must; at ``unseen`` places they do the first time.

        In a ``calm`` world nothing is refused and nobody from outside interferes, so that late commits follow each
        other, and segments linger. With ``by_load`` streams have a scaling policy, and nobody asks for scales.
        """
        self.by_load = by_load
        self.is_calm = is_calm
        self.fragility = fragility
        self.unseen = unseen
        self.rng = random.Random(seed)
        self.world = World(defects)
        self.world.write_bytes_max = WRITE_BYTES_MAX
        self.world.spoil = lambda value: spoil_list(snapshots.spoil(value, defects), defects)
        self.clock_ms = 10_000_000_000
        self.forgetful = "forgetful" in defects
        self.crash_points: Counter[str] = Counter()
        self.late_crashes = 0
        self.appends = 0
        self.foreign: dict[int, int] = {}
        self.under_way = (b"", 0)
        self.sealing: tuple[AnyEffect | None, int] = (None, 0)
        self.pending_changes: set[str] = set()
        """Scales and rolling commits that have waited half done."""
        self.world.ensure(paths.GROUPS)
        self.world.ensure(paths.SCOPES)
        self.world.ensure(paths.requests(GROUP))
        self.world.ensure(paths.answers(GROUP))
        self.world.nodes[paths.group(GROUP)] = Group(GROUP, 0).to_json()
        for stream in STREAMS:
            body = AdminRequest(
                kind=RequestKind.CREATE_STREAM,
                stream=str(stream),
                segments=2,
                created_ms=0,
                buffer_partitions=BUFFER_PARTITIONS[stream],
            )
            self.world.request(GROUP, body.to_json())
        for stream in OLD_STREAMS:
            make_old_stream(self.world, GROUP, stream)
        self.administrators = [
            Administrator("a", self.world, GROUP, OLD_STREAMS, seed),
            Administrator("b", self.world, GROUP, [], seed),
        ]
        self.standby = Standby(self.world, GROUP, STREAMS, lambda terminated: fold_of(self.world, terminated))
        self.standby_rng = random.Random(seed)
        self.leaders = [Leader(self.world, GROUP, self.forgetful)]
        self._until(lambda: len(self.world.children(paths.streams("sales"))) == len(STREAMS) + len(OLD_STREAMS))
        self.clients = [Client(f"c{number}", self.world, STREAMS, self.rng) for number in range(3)]
        self.clients += [RestartingClient(f"c{number}", self.world, GROUP, STREAMS, self.rng) for number in (3, 4)]
        self.clients.append(PipeliningClient("c5", self.world, STREAMS, self.rng))
        for client in self.clients:
            client.poisons = POISONED
        self.bursting = [
            BurstingClient(f"c{number}", self.world, STREAMS, random.Random(f"{number}, {seed}")) for number in (6, 7)
        ]
        self.clients += self.bursting
        self.refusals = self.world.refuses = Refusals(self.world, STREAMS, seed)
        self.world.in_between = self._interrupt
        self.world.loses_preparations = 0.02
        self.world.may_delete = self._check_deletion
        self.world.may_drop = self._check_drop
        self.world.spoil_write = self._look_at_write
        self.world.may_remove = self._check_removal
        for stream, policy in zip(STREAMS, POLICIES, strict=True) if by_load else ():
            self.world.request(GROUP, policy_request(stream, policy).to_json())
        self.world.request(GROUP, retention_request(STREAMS[0], RETENTION_MS, -1).to_json())
        self.world.request(GROUP, retention_request(STREAMS[1], 2_000, 3_000).to_json())
        self.world.request(GROUP, log_retention_request().to_json())
        self.log_rng = random.Random(seed)
        self.world.loses_lists = seed % 3 == 0
        """For what happens to the commit log, drawn beside everything else."""

    @property
    def clock_ms(self) -> int:
        """The time that all clocks but those of leaders show."""
        return self.world.clock_ms

    @clock_ms.setter
    def clock_ms(self, value: int) -> None:
        self.world.clock_ms = value

    def go(self) -> list[str]:
        """Run with crashes, then let everything end; gives the broken promises."""
        self.run_on()
        for client in self.clients:
            client.stopping = True
        for administrator in self.administrators:
            administrator.is_patient = True
        self.refusals.end()
        self.fragility = 0.0
        self._until(self._quiet)
        if self.world.broken:
            return self.world.broken
        denied = [fault for administrator in self.administrators for fault in administrator.faults]
        return faults(self.world, GROUP, STREAMS, self.clients, self.refusals) + denied

    def run_on(self) -> None:
        """Run with crashes, until a promise is broken."""
        for _ in range(STEPS):
            self.clock_ms += self.rng.randint(1, 20)
            if self.is_calm:
                self._step_calmly()
                continue
            if self.standby_rng.random() < 0.2:
                self.standby.step(self.clock_ms, self.standby_rng)
            if self.world.broken:
                break
            self._land(0.003)
            if self.log_rng.random() < 0.05:
                read_log(self.world, GROUP, self.log_rng)
            if self.log_rng.random() < 0.02 and not self.world.loses_lists:
                say_again(self.world, self.clients, self.log_rng)
            for administrator in self.administrators:
                if administrator.rng.random() < 0.2:
                    administrator.step(self.clock_ms)
            self._let_foreign_end()
            self.refusals.step()
            chance = self.rng.random()
            if chance < 0.006:
                self._crash()
            elif chance < 0.010 and not self.world.is_early:
                self.leaders.append(self._next_leader())  # the old one is left behind, not dead
            elif chance < 0.020:
                body = scale_request(self.world, self.rng.choice(STREAMS), self.rng, self.clock_ms)
                if body is not None:
                    self.world.request(GROUP, body.to_json())
            elif chance < 0.024:
                body = truncate_request(self.world, self.rng.choice(STREAMS), self.rng, self.clock_ms)
                self.world.request(GROUP, body.to_json())
            elif chance < 0.06:
                audit(self.world, self.rng.choice(STREAMS), self.rng)
            elif chance < 0.063:
                self._meddle()
            elif chance < 0.075:
                self._begin_append()
            elif chance < 0.077:
                self._begin_foreign()
            elif chance < 0.079:
                self._abort_waiting()
            elif chance < 0.45:
                self.rng.choice(self.clients).step(self.clock_ms, GROUP.commit_log_topic)
            else:
                self._lead()

    def _step_calmly(self) -> None:
        chance = self.rng.random()
        if self.by_load and chance < 0.014:
            # It takes leaders a while to know a load, so few of them die at random, and nothing holds them up for long.
            self._let_foreign_end()
            if chance < 0.012:
                self._burst()
            elif chance < 0.0125:
                self._crash()
            else:
                self.leaders.append(self._next_leader())
        elif chance < 0.004:
            self._crash()
        elif chance < 0.006:
            self.leaders.append(self._next_leader())
        elif chance < 0.014:
            body = scale_request(self.world, self.rng.choice(STREAMS), self.rng, self.clock_ms)
            if body is not None:
                self.world.request(GROUP, body.to_json())
        elif chance < 0.016:
            self._begin_append()
        elif chance < 0.4:
            some = self.bursting if self.rng.random() < 0.98 else self.clients[:3]
            self.rng.choice(some).step(self.clock_ms, GROUP.commit_log_topic)
        else:
            self._land(0.003)
            self._lead()

    def _meddle(self) -> None:
        """Topics of snapshots are compacted, and now and then a record in one is damaged."""
        topic = self.rng.choice(snapshots.topics(GROUP.scope))
        if topic in self.world.topics:
            self.world.compact(topic)
            if self.rng.random() < 0.2:
                self.world.damage(topic, self.rng.random())

    def _begin_append(self) -> None:
        """Somebody's append is inside of a broker for a while, whatever happens to the segment meanwhile."""
        stream = self.rng.choice(STREAMS)
        segment = self.rng.choice(history_of(self.world, stream).active.segments).id
        self.appends += 1
        record = Record(f"y-{self.appends}", f"y-{self.appends}=1")
        again = self.rng.random() < 0.3
        acknowledge = partial(self.clients[0].plain.append, (stream, record))
        self.world.begin_append(Inside(stream.segment_topic(segment), record, again, self.clock_ms, acknowledge))

    def _begin_foreign(self) -> None:
        """A native transaction of somebody else is open on a segment for a while."""
        stream = self.rng.choice(STREAMS)
        segment = self.rng.choice(history_of(self.world, stream).active.segments).id
        owner = min(self.foreign, default=0) - 1
        self.foreign[owner] = self.clock_ms
        self.world.begin_foreign(stream.segment_topic(segment), owner)

    def _surprise(self, leader: Leader) -> None:
        """One begins right before a seal, after it has been looked for them."""
        if isinstance(leader.effect, fx.Seal) and leader.effect.partitions and self.rng.random() < 0.1:
            owner = min(self.foreign, default=0) - 1
            self.foreign[owner] = self.clock_ms
            self.world.begin_foreign(self.rng.choice(leader.effect.partitions)[0], owner)

    def _burst(self) -> None:
        """Somebody writes much at once, under many keys or under one, into one stream or the other."""
        stream = self.rng.choice(STREAMS)
        keys = self.rng.choice([1, 40])
        positions = KeySpace()
        for number in range(self.rng.choice([5, 80])):
            self.appends += 1
            key = f"b-{self.rng.randrange(keys)}"
            segment = history_of(self.world, stream).active.segment_at(positions.position(key.encode())).id
            record = Record(key, f"{key}={self.appends * 1_000 + number}")
            if self.world.produce(stream.segment_topic(segment), record) is not None:
                self.clients[0].plain.append((stream, record))

    def _abort_waiting(self) -> None:
        """An administrator wants transactions to be aborted whose commits take long."""
        for client in self.clients:
            attempt = client.current
            if attempt is not None and attempt.ended == "commit" and self.clock_ms - attempt.asked_ms > HELD_MS:
                attempt.aborted_by_admin = True
                body = AdminRequest(
                    kind=RequestKind.ABORT_TRANSACTION, transaction=str(attempt.id), created_ms=self.clock_ms
                )
                self.world.request(GROUP, body.to_json())
                return

    def _let_foreign_end(self, after_ms: int = FOREIGN_MS) -> None:
        for owner, began_ms in self.foreign.items():
            if owner in self.world.open and self.clock_ms - began_ms > after_ms:
                self.world.end_foreign(owner)

    def _note_wait(self, leader: Leader) -> None:
        """Who seals must not wait for what was open, and stayed open, before the scale or rolling commit began.

        Nor, for what has begun since, longer than the bound of a seal.
        """
        self.pending_changes.update(self.world.children(paths.pending_changes(GROUP)))
        if leader is self.leaders[-1] and isinstance(leader.effect, fx.Seal):
            if leader.effect is not self.sealing[0]:
                self.sealing = leader.effect, self.clock_ms
            elif self.clock_ms - self.sealing[1] > HELD_MS:
                self.world.broken.append(f"{leader.place()} holds everybody up since {self.sealing[1]}")
        raw = self.world.nodes.get(paths.scaling(GROUP)) or self.world.nodes.get(paths.committing(GROUP))
        if raw is None:
            return
        if raw != self.under_way[0]:
            self.under_way = raw, self.clock_ms
        if not isinstance(leader.effect, fx.Seal) or leader.place() not in ("scale/Seal", "roll/Seal"):
            return
        since_ms = self.under_way[1] - LASTING_MS
        for owner, native in self.world.open.items():
            sealed = {topic for topic, _ in leader.effect.partitions}
            if owner < 0 and self.foreign[owner] < since_ms and set(native.topics) & sealed:
                self.world.broken.append(
                    f"{leader.place()} waits for native transaction {owner}, which was open before"
                )

    def _land(self, share: float) -> None:
        for append in list(self.world.inside):
            if self.rng.random() < share or self.clock_ms - append.began_ms > APPEND_MS:
                self.world.land(append)

    def _quiet(self) -> bool:
        for client in self.clients:
            client.step(self.clock_ms, GROUP.commit_log_topic)
        self._land(0.1)
        self._let_foreign_end()
        nodes = self.world.nodes
        group = self.leaders[-1].group
        busy = [administrator for administrator in self.administrators if not administrator.idle]
        for administrator in busy:
            administrator.step(self.clock_ms)
        return (
            group is not None
            and not group.fold.open
            and not self.world.inside
            and ("timed-seal" in self.world.faults or group.watch.is_idle)
            and all(group.watch.known.get(name) == item.history.active.epoch for name, item in group.streams.items())
            and not busy
            and all(client.idle for client in self.clients)
            and not self.world.children(paths.requests(GROUP))
            and paths.committing(GROUP) not in nodes
            and paths.scaling(GROUP) not in nodes
            and not self.world.children(paths.pending_changes(GROUP))
            and not self.world.children(paths.merging(GROUP))
            and not any(self.world.children(f"{paths.transactions(GROUP)}/{item:02x}") for item in range(paths.BUCKETS))
            and self.leaders[-1].procedure is None
        )

    def _until(self, condition: object) -> None:
        assert callable(condition)
        for _ in range(DRAIN_STEPS):
            if condition() or self.world.broken:
                return
            self.clock_ms += 10
            self._lead()
        raise AssertionError("the system does not come to rest")

    def _check_deletion(self, topic: str, before: int) -> None:
        if topic == GROUP.commit_log_topic:
            check_log(self.world, GROUP, before)
        if not any(topic.startswith(f"{item.scope}.{item.stream}.") for item in STREAMS):
            return  # of a stream that is deleted as it is
        if ".transaction-buffer" in topic:
            check_buffer(self.world, GROUP, topic, before)
        else:
            stream, segment = parse_segment_topic(topic)
            if segment.is_prepared and segment not in whole_history_of(self.world, stream).graph.nodes:
                if before:
                    self.world.broken.append(f"{topic} is deleted, which holds records and was never read")
                return
            check_deletion(self.world, topic, before)
            if stream == STREAMS[0] and topic in self.world.topics and not self.world.acting.endswith("/DeleteTopics"):
                check_age(self.world, stream, segment, before)

    def _look_at_write(self, operations: Sequence[NodeOperation]) -> Sequence[NodeOperation]:
        self.refusals.check_faults(operations)
        return denying(self.world, spoiled(self.world, operations))

    def _check_removal(self, path: str, segments: set[SegmentId]) -> None:
        if path == paths.truncation(STREAMS[0]):
            history = whole_history_of(self.world, STREAMS[0])
            for segment in segments:  # what stands behind its end has been forwarded
                check_age(self.world, STREAMS[0], segment, history.sealed_end(segment))

    def _check_drop(self, path: str, value: bytes) -> None:
        stream = next(item for item in STREAMS if paths.truncation(item) == path)
        attempts = (attempt for client in self.clients for attempt in client.attempts)
        refused = {attempt.id.bytes for attempt in attempts if attempt.ended == "fenced"}
        check_drop(self.world, GROUP, stream, Truncation.from_json(value), refused)

    def _interrupt(self, topic: str) -> None:
        """Somebody writes plainly between two frames of a round."""
        stream, segment = parse_segment_topic(topic)
        if self.rng.random() < 0.1 and segment in history_of(self.world, stream).active.segment_ids:
            record = Record(f"x-{topic}", f"x-{topic}={len(self.world.topics[topic].entries)}")
            if self.world.produce(topic, record) is not None:
                self.clients[0].plain.append((stream, record))

    def _crash(self, leader: Leader | None = None) -> None:
        leader = leader or self.rng.choice(self.leaders)
        if self.world.is_early:
            return
        leader.crash(self.rng.random())
        self.crash_points[leader.place()] += 1
        self._replace(leader)

    def _next_leader(self) -> Leader:
        """It has been a standby; most of them have a tail, which may be far behind."""
        tail = self.standby.take() if self.standby_rng.random() < 0.8 else None
        return Leader(self.world, GROUP, self.forgetful, tail)

    def _replace(self, leader: Leader) -> None:
        self.leaders.remove(leader)
        self.world.expire_native(leader.epoch)
        if not self.leaders or leader.epoch == self.world.controller_epoch:
            self.leaders.append(self._next_leader())

    def _lead(self) -> None:
        leader = self.rng.choice(self.leaders) if self.rng.random() < 0.3 else self.leaders[-1]
        try:
            place = leader.place()
            # Some of it is rare before everything comes to its end; that must not take for ever.
            must_crash = BY_LOAD if self.by_load else CALM_CRASHES if self.is_calm else MUST_CRASH_AT
            is_wanted = place in self.unseen - self.crash_points.keys()
            is_wanted = is_wanted and bool(self.fragility or self.late_crashes < LATE_CRASHES)
            fragility = 1.0 if is_wanted else self.fragility
            if place in must_crash and self.rng.random() < fragility:
                self.late_crashes += not self.fragility
                self._crash(leader)
                return
            self._surprise(leader)
            leader.step(self.clock_ms, self.rng)
            self._note_wait(leader)
            while isinstance(leader.effect, GLANCES) and self.rng.random() < 0.9:
                leader.step(self.clock_ms, self.rng)
        except (Fenced, Gone, EffectRefusedError, StaleStateError):
            self._replace(leader)


MUST_CRASH_AT = {
    f"{procedure}/{effect}"
    for procedure, effects in {
        "merge_direct": (
            "SendOffsets",
            "MergeFrames",
            "Look",
            "AbortRound",
            "AppendControl",
            "AppendTogether",
            "AppendMessages",
            "CommitRound",
        ),
        "roll": (
            "Look",
            "Write",
            "CreateTopics",
            "SendOffsets",
            "MergeFrames",
            "TakeUp",
            "AppendControl",
            "Seal",
            "CommitRound",
        ),
        "prepare": ("Write", "Prepare"),
        "follow_preparations": ("LookAtPrepared",),
        "remove_leftovers": ("DeleteTopics", "Write"),
        "scale": ("Write", "CreateTopics", "Seal"),
        "go_on_with_scale": ("LookForObstacles", "CreateTopics", "Seal", "Write"),
        "go_on_with_roll": (
            "LookForObstacles",
            "Seal",
            "CreateTopics",
            "MergeFrames",
            "AppendControl",
            "Write",
            "CommitRound",
        ),
        "take_over": ("TakeIdentity", "ReadCompacted", "ReadCommitLog", "CreateTopics", "Seal", "Write"),
        "finish_pending": ("Look", "CreateTopics", "MergeFrames", "AppendControl", "Seal", "Write", "CommitRound"),
        "create_stream": ("CreateTopics", "Write"),
        "delete_stream": ("Write",),
        "delete_further": ("ReadChildren", "DeleteTopics", "Write"),
        "record_long": ("AppendControl", "CommitRound", "Write"),
        "remove_records": ("Write",),
        "truncate_buffers": ("DeleteRecords",),
        "truncate_stream": ("StableEnds", "GroupCommits", "Write", "DeleteRecords"),
        "drop_epochs": ("Write",),
        "expire_bookkeeping": ("Write",),
        "look_behind": ("StableEnds", "ReadLate", "Write", "AppendLate", "CommitRound"),
        "retain_streams": ("StableEnds", "DiskBytes", "GroupCommits", "Write", "DeleteRecords", "DeleteTopics"),
        "keep_ended": ("EndOffsets", "AppendMessages", "CommitRound"),
        "retain_log": ("EndOffsets", "Write", "GroupCommits", "AppendMessages", "CommitRound", "DeleteRecords"),
        "update_group": ("Write", "AppendMessages", "CommitRound"),
        "take_snapshots": ("CreateTopics", "EndOffsets", "AppendMessages", "CommitRound"),
    }.items()
    for effect in effects
}


CALM_CRASHES = {
    *(f"roll/{effect}" for effect in ("Write", "CreateTopics", "MergeFrames", "AppendControl", "Seal", "CommitRound")),
    *(
        f"merge_late/{effect}"
        for effect in ("EndOffsets", "MergeFrames", "AppendControl", "AppendTogether", "CommitRound")
    ),
    *(f"end_linger/{effect}" for effect in ("Seal", "Write")),
    "watch_linger/EndOffsets",
}
"""Where leaders must crash while late commits follow each other."""


BY_LOAD = {f"follow_load/{effect}" for effect in ("LogEnds", "SampleKeys", "LookForObstacles", "Write", "Seal")} | {
    "follow_load/CreateTopics",
    "follow_load/DiskBytes",
}
"""Where leaders must crash while they scale streams by their load."""
