"""A simulated world: Kafka topics with native transactions, and ZooKeeper, in memory, carrying out a leader's effects.

It holds what the protocol relies on and no more: a native transaction is visible all at once or never, markers take
offsets, a transactional identity fences its older user, a multi is atomic and checks the controller epoch, a sealed
topic takes nothing. A crash in the middle of an effect may leave any part of it done, where the real one could.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from bridge.tests.sim_effects import Blocked
from rollbridge.base.effects import AnyEffect
from rollbridge.base.ids import SegmentId
from rollbridge.base.sn import ANY, DLSN, EMPTY, SN
from rollbridge.buffer.state import FrameRef
from rollbridge.commitlog.commit_order import LineKey
from rollbridge.commitlog.control import ControlKind, ControlRecord
from rollbridge.commitlog.outcomes import EndedIds
from rollbridge.metadata import paths
from rollbridge.metadata.records import CheckNode, CreateNode, DeleteNode, NodeOperation, SetNode, Truncation
from rollbridge.stream.conditions import ForeignTransaction, Leaderless, Scope
from rollbridge.stream.group_offsets import GroupOffsets
from rollbridge.stream.late import LateRecord
from rollbridge.stream.names import GroupName, Partition
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.waits import LEADERLESS

SHARDS_MAX = 64
"""Most partitions of a topic."""
TOPIC_SETTINGS: dict[str, str | None] = {"max.message.bytes": None, "compression.type": "zstd"}
"""What an adopted topic has of its own before it is sealed."""
SEALED = {"max.message.bytes": "78", "compression.type": "gzip"}
"""And afterwards."""
TOPIC_CONFIG = {"max.message.bytes": "1048588", "cleanup.policy": "delete", "message.timestamp.type": "CreateTime"}


class Fenced(Exception):
    """A newer leader exists."""


class Gone(Exception):
    """What was to be read has been truncated."""


class Missing(Exception):
    """A topic was deleted by its owner."""


BROKERS = 3
SEAL_FOREIGN_MS = 150
"""How long a seal waits for native transactions of others."""
WRITE_BYTES_MAX = 5_000
"""What ZooKeeper takes in one multi, where that is to be met; the real one takes 1 MiB."""


@dataclass(frozen=True)
class Record:
    """A record of a segment: unique value, key, and where it was written."""

    key: str
    value: str
    transaction: str | None = None
    sequence: int = -1
    origin: tuple[str, int] | None = None
    """Of a copy: where the late record stands."""


@dataclass
class Inside:
    """An append that has passed all checks of the broker and is not in the log yet.

    One that is not looked at ``again``, once it has the log's lock, may wait for that in front of or behind a barrier.
    """

    topic: str
    item: Record
    again: bool
    began_ms: int
    landed: Callable[[], None]


@dataclass
class Native:
    """A native Kafka transaction."""

    owner: int
    state: str = "open"
    topics: list[str] = field(default_factory=list)
    offsets: list[GroupOffsets] = field(default_factory=list)


@dataclass
class Preparing:
    """A merge beside the line, of one leader."""

    leader: int
    effect: fx.Prepare
    native: Native
    offsets: list[int] = field(default_factory=list)
    refused: fx.EffectRefusedError | None = None
    lost: str = ""


@dataclass
class Entry:
    """What stands at an offset of a topic; a marker has neither record nor value."""

    item: Any
    native: Native | None = None
    appended_ms: int = 0


def shard(topic: str, partition: int) -> str:
    """The name under which a partition of a topic stands: the first one of each has the topic's own."""
    return f"{topic}#{partition}" if partition else topic


def unshard(name: str) -> Partition:
    """The inverse."""
    topic, _, number = name.partition("#")
    return topic, int(number or 0)


@dataclass
class Topic:
    """A topic of one partition, or one partition of a topic."""

    id: str
    entries: list[Entry] = field(default_factory=list)
    sealed: bool = False
    start: int = 0
    """Where it begins since it was truncated; checks still see what stood before."""

    def stable_end(self, start: int = 0) -> int:
        """The last stable offset; it is not below ``start``."""
        for offset, entry in enumerate(self.entries[start:], start):
            if entry.native is not None and entry.native.state == "open":
                return offset
        return len(self.entries)

    def visible(self, start: int = 0) -> list[tuple[int, Any]]:
        """What a ``read_committed`` reader sees from a stable offset on."""
        return [
            (offset, entry.item)
            for offset, entry in enumerate(self.entries[start : self.stable_end(start)], start)
            if entry.item is not None and (entry.native is None or entry.native.state == "committed")
        ]


class Nodes(dict[str, bytes]):
    """ZooKeeper's nodes by path; knows which children each has. Changed item by item only, or by ``pop``."""

    def __init__(self) -> None:
        super().__init__()
        self._children: dict[str, set[str]] = {}
        self.versions: dict[str, int] = {}
        self.written: dict[str, int] = {}
        self.clock_ms: Callable[[], int] = lambda: 0

    def __setitem__(self, path: str, value: bytes) -> None:
        self.written[path] = self.clock_ms()
        self.versions[path] = self.versions[path] + 1 if path in self else 0
        if path not in self:
            parent, _, name = path.rpartition("/")
            self._children.setdefault(parent, set()).add(name)
        super().__setitem__(path, value)

    def __deepcopy__(self, _: object) -> Nodes:
        fresh = Nodes()
        for path, value in self.items():
            fresh[path] = value
        fresh.versions, fresh.written, fresh.clock_ms = dict(self.versions), dict(self.written), self.clock_ms
        return fresh

    def __delitem__(self, path: str) -> None:
        super().__delitem__(path)
        parent, _, name = path.rpartition("/")
        self._children[parent].discard(name)

    def pop(self, path: str, *default: Any) -> Any:
        value = self.get(path, *default)
        if path in self:
            del self[path]
        return value

    def children(self, path: str) -> list[str]:
        """Names of the children of a node, in order."""
        return sorted(self._children.get(path.rstrip("/"), ()))


def _records_of(batch: bytes) -> Sequence[Record]:
    """What is in the batch of a frame of our clients."""
    return [Record(*item) for item in json.loads(batch)]


class World:
    """Kafka and ZooKeeper.

    ``faults`` names defects for testing the checks: ``no-fencing`` (an old leader may append), ``torn-round`` (records
    become visible before the outcome), ``lossy-multi`` (a multi may be carried out in part), ``open-seal`` (sealing
    does not keep writers out), ``blind-forecast`` (offsets are believed, not looked at), ``blind-look`` (conditions
    hold whatever stands there), ``unwatched`` (nobody looks at what others wrote between own records),
    ``greedy-truncation`` (more is truncated than was asked for), ``hasty-truncation`` (it is asked for what was read),
    ``deaf-retention`` (what a group has read is not asked), ``greedy-expiry`` (more epochs are dropped than nobody
    needs), ``careless-expiry`` (open transactions are not asked for), ``baseless-expiry`` (where sequence ids begin is
    not kept), ``forgetful-expiry`` (nor where records were), ``stubborn-lease`` (an extended lease ends
    as before),
    ``visible-before-sealed`` (PDP-24's order of a rolling commit: its records can be read before it has sealed),
    ``trusts-its-clock`` (a leader asks nobody else for the time),
    ``untied-outcomes`` (what is remembered of outcomes is written outside of the round), ``first-guess`` (positions
    that were foretold wrongly are not put right), ``forgotten-sessions`` (a new leader does not know of the sessions of
    clients), ``timed-seal`` (where a segment ends is inferred, and nobody looks again), ``forgotten-late`` (what was
    forwarded is not remembered), ``denying-successor`` (who ends the deletion of another leader does not answer it),
    ``unbounded-multi`` (leaders write as much at once as there is), ``stubborn-request`` (what is refused for good is
    tried again), ``waiting-seal`` (who seals does not look for native transactions of others first), ``waiting-roll``
    (rolling commits do not), ``deaf-refusal`` (what is refused for good is taken for an unknown outcome),
    ``broad-refusal`` (what is refused for one frame is held against its stream), ``hasty-expiry`` (that a lease has run
    out is decided without reading the buffers to their ends), ``boundless-seal`` (a seal waits for native transactions
    of others for as long as it takes), ``forgotten-suspension`` (a new leader does not know what others have left half
    done), ``blames-all`` (what cannot be made or sealed for one stream of a rolling commit is held against all),
    ``blind-reopening`` (what was closed in vain is not looked for), ``hasty-merge`` (what is merged beside the line
    is committed before its outcome is), ``uncounted-preparations`` (two of them may have the same names),
    ``bare-offsets`` (what is to be committed beside offsets is dropped),
    ``blind-linger`` (late commits go into segments behind which something was written). Those of adopted topics are
    named in ``sim_topics.py``.
    """

    def __init__(self, faults: frozenset[str] = frozenset()) -> None:
        self.faults = faults
        self.write_bytes_max = 1_000_000
        """What ZooKeeper takes in one multi."""
        self.topics: dict[str, Topic] = {}
        self.settings: dict[str, dict[str, str | None]] = {}
        """What adopted topics have of their own, where that was changed."""
        self.nodes = Nodes()
        self.nodes.clock_ms = lambda: self.clock_ms
        self.clock_ms = 0
        """What the clocks of brokers and ZooKeeper show; each leader has another one."""
        self.acting = ""
        """Procedure and effect that are being carried out."""
        self.controller_epoch = 0
        self.identity = 0
        self.unread: set[str] = set()
        """Topics of buffers that leaders do not come to read."""
        self.open: dict[int, Native] = {}
        self.preparing: dict[str, Preparing] = {}
        """What leaders merge beside the line, by key."""
        self.loses_preparations = 0.0
        """How often the outcome of a part of one is unknown."""
        self.preparing_rng = random.Random(0)
        self.made = 0
        self.sealing_since: dict[tuple[int, tuple[str, ...]], int] = {}
        """Since when a leader's seal of topics waits for native transactions of others."""
        self.seal_waits = 0
        """For how many more tries nothing is sealed, if that comes too late anyway."""
        self.is_early = False
        """Whether a rolling commit is visible whose epochs are not published: leaders do not die then, for whoever
        takes over would stumble, and it is for readers to notice."""
        self.ended = 0
        self.late_markers: set[str] = set()
        self.loses_lists = False
        """Whether lists of what has ended are damaged, too; nothing is said again then, for leaders may believe it."""
        self.said_again: set[bytes] = set()
        """Transactions of which a BEGIN frame came once more, long after their ends."""
        self.generations: dict[str, int] = {}
        self.group_offsets: list[GroupOffsets] = []
        self.commits: dict[str, dict[str, int]] = {}
        self.removed: dict[str, Topic] = {}
        self.inside: list[Inside] = []
        self.late: dict[str, tuple[str, int]] = {}
        self.lost_blocks: list[range] = []
        """Counters that ZooKeeper has forgotten to have given out, before any leader had seen them used."""
        """Where records landed that had been inside, by value."""
        self.past: dict[str, bytes] = {}
        """The latest value of every epoch record that there ever was."""
        self.lost: dict[str, set[SegmentId]] = {}
        """All that ever stood in each list of removed segments."""
        self.refuses: Callable[[AnyEffect, int], fx.EffectRefusedError | None] = lambda *_: None
        """Called with each effect and its leader; what it gives is the answer, and nothing of the effect is done."""
        self.poison: set[bytes] = set()
        """What frames hold that no broker takes."""
        self.records_of: Callable[[bytes], Sequence[Record]] = _records_of
        self.wrong: dict[str, str] = {}
        """Topics that were reconfigured, and what is wrong with them."""
        self.lost_buffers = False
        """Whether buffers were deleted, or emptied, by somebody else."""
        self.unseen: set[str] = set()
        """Topics that the broker which is asked does not know yet."""
        self.unreadable: dict[str, str] = {}
        self.unreplicated: dict[str, str] = {}
        """Topics that may not be read, with the reasons."""
        self.away = ""
        """A topic that nobody leads."""
        self.in_between: Callable[[str], None] = lambda _: None
        """Called with a topic between two frames that are appended to it."""
        self.deletes = True
        """Whether brokers let leaders delete records."""
        self.may_delete: Callable[[str, int], None] = lambda *_: None
        """Called with a topic and an offset before what is below it is deleted; raises if that must not be."""
        self.may_drop: Callable[[str, bytes], None] = lambda *_: None
        """Called with path and value of what a stream has lost before epochs of it are dropped; raises likewise."""
        self.may_remove: Callable[[str, set[SegmentId]], None] = lambda *_: None
        """Called with the path of what a stream has lost and segments before these are noted there; raises likewise."""
        self.spoil_write: Callable[[Sequence[NodeOperation]], Sequence[NodeOperation]] = list
        """Changes what is written."""
        self.done: Counter[str] = Counter()
        """Effects that were carried out, by procedure and effect."""
        self.takeovers: Counter[str] = Counter()
        """What leaders counted while they took over."""
        self.broken: list[str] = []
        self.spared = 0
        """Records of ongoing transactions that were used at takeovers."""
        self.spoil: Callable[[bytes | None], bytes | None] = lambda value: value

    # What clients do.

    def produce(self, topic: str, item: Any) -> int | None:
        """Append outside of any transaction; None if the topic is sealed."""
        log = self.topics.get(topic)
        if log is None or (log.sealed and "open-seal" not in self.faults):
            return None
        log.entries.append(Entry(item, None, self.clock_ms))
        return len(log.entries) - 1

    def begin_foreign(self, topic: str, owner: int) -> None:
        """Somebody else opens a native transaction on a topic, and leaves it open."""
        if topic in self.topics and not self.topics[topic].sealed:
            self.open[owner] = Native(owner, topics=[topic])

    def append_foreign(self, name: str, owner: int, item: Any) -> bool:
        """Somebody else appends in a native transaction, which begins with that; False if the topic takes nothing."""
        log = self.topics.get(name)
        if log is None or log.sealed:
            return False
        native = self.open.setdefault(owner, Native(owner))
        if name not in native.topics:
            native.topics.append(name)
        log.entries.append(Entry(item, native, self.clock_ms))
        return True

    def end_foreign(self, owner: int, state: str = "aborted") -> None:
        """It ends, in whatever way."""
        native = self.open.pop(owner, None)
        if native is not None:
            native.topics = [name for name in native.topics if name in self.topics]
            self._finish(native, state)

    # What the owner of an adopted topic does.

    def grow(self, name: str) -> None:
        """Partitions are added to a topic: one."""
        self.topics[shard(name, self.count(name))] = Topic(self.topics[name].id, sealed=self.topics[name].sealed)

    def lose(self, name: str) -> list[Topic]:
        """A topic is deleted; gives what its partitions held."""
        parts = [item for item in self.topics if item.split("#")[0] == name]
        for native in self.open.values():
            native.topics = [item for item in native.topics if item not in parts]
        self.settings.pop(name, None)
        return [self.topics.pop(item) for item in parts]

    def configure(self, name: str, settings: Mapping[str, str | None]) -> None:
        """A topic gets settings; one that was sealed is open again."""
        self.settings[name] = {**self.settings_of(name), **settings}
        for number in range(self.count(name)):
            self.topics[shard(name, number)].sealed = False

    def settings_of(self, name: str) -> dict[str, str | None]:
        """What a topic has of its own, as if nobody had sealed it."""
        return self.settings.get(name, TOPIC_SETTINGS)

    def begin_append(self, append: Inside) -> bool:
        """Pass a broker's checks; False if the topic is sealed."""
        log = self.topics.get(append.topic)
        if log is None or log.sealed:
            return False
        self.inside.append(append)
        return True

    def land(self, append: Inside) -> None:
        """An append is in the log, and acknowledged, unless the topic is gone."""
        self.inside.remove(append)
        log = self.topics.get(append.topic)
        if log is not None:
            log.entries.append(Entry(append.item, None, self.clock_ms))
            self.late[append.item.value] = append.topic, len(log.entries) - 1
            append.landed()

    # What leaders do.

    def execute(self, effect: AnyEffect, leader: int) -> Any:
        """Carry out an effect for the leader with a controller epoch.

        Raises:
            Refused: It is refused for good; the leader's round is empty again if it was part of that.
        """
        refused = self.refuses(effect, leader)
        if refused is not None:
            if isinstance(effect, fx.ROUND) and leader in self.open:
                self._finish(self.open.pop(leader), "aborted")
            raise refused
        try:
            return self._execute(effect, leader)
        except Missing as gone:
            if leader in self.open:
                self._finish(self.open.pop(leader), "aborted")
            raise fx.EffectRefusedError(effect, "gone", code="UNKNOWN_TOPIC_OR_PARTITION", topic=str(gone)) from gone

    def _execute(self, effect: AnyEffect, leader: int) -> Any:
        match effect:
            case fx.ReadNodes(names):
                return {path: self.nodes.get(path) for path in names}
            case fx.ReadDated(names):
                return {path: self.dated(path) for path in names}
            case fx.ReadCounter(path):
                return (self.nodes[path], self.nodes.versions[path]) if path in self.nodes else None
            case fx.ReadChildren(names):
                unseen = "/sessions" if "forgotten-sessions" in self.faults else "/nowhere"
                unseen = "/suspended" if "forgotten-suspension" in self.faults else unseen
                return {path: [] if path.endswith(unseen) else self.children(path) for path in names}
            case fx.EnsureNodes(names):
                for path in names:
                    self.ensure(path)
            case fx.Write(operations):
                return self.write(operations, leader)
            case fx.CreateTopics(topics) if any(abs(spec.replication_factor) >= 1 << 15 for spec in topics):
                raise TypeError("a request to Kafka has 16 bits for it")
            case fx.CreateTopics(topics) if any(spec.replication_factor > BROKERS for spec in topics):
                if "stubborn-request" in self.faults:
                    raise Gone
                raise fx.EffectRefusedError(effect, f"there are {BROKERS} brokers", code="invalid-request")
            case fx.CreateTopics(topics):
                return {spec.name: self.create(spec.name, spec.partitions) for spec in topics}
            case fx.DeleteTopics(names):
                for name in names:
                    if name in self.topics:
                        self.may_delete(
                            name, 1 + max((offset for offset, _ in self.topics[name].visible()), default=-1)
                        )
                        for part in [item for item in self.topics if item.split("#")[0] == name]:
                            self.removed[part] = self.topics.pop(part)
                return True
            case fx.TopicIds(names):
                return {name: self.topics[name].id for name in names if name in self.topics}
            case fx.LookAtTopics(names):
                return {name: self.look_at_topic(name) for name in names}
            case fx.DescribeTopics(names):
                return {name: self.state_of(name) for name in names if name in self.topics}
            case fx.SetTopicConfig(name, config):
                if name not in self.topics:
                    raise fx.EffectRefusedError(effect, "it does not exist", code="topic-not-found", topic=name)
                if "settings-lost" not in self.faults:
                    self.configure(name, config)
                return None
            case fx.Seal() if "visible-before-sealed" in self.faults and (leader in self.open or self.seal_waits):
                if leader in self.open:
                    self.end(leader, "committed")
                    self.seal_waits, self.is_early = 30, True
                self.seal_waits -= 1
                raise Blocked
            case fx.Seal(_, ids) if another := [name for name, own in ids.items() if self._id_of(name) != own]:
                raise fx.EffectRefusedError(effect, "it is another topic", code="conflict", topic=another[0])
            case fx.Seal(places) if wrong := self._unfit(places):
                raise fx.EffectRefusedError(effect, "not all partitions are there, or given", code="x", topic=wrong)
            case fx.Seal(places):
                ends = self.seal([shard(*item) for item in places], leader)
                return {item: ends[shard(*item)] for item in places if shard(*item) in ends}
            case fx.MergeFrames(items):
                return self.merge(items, leader)
            case fx.AppendControl(topic, records, beside):
                offsets = self.append_control(topic, records, leader)
                self.append_messages(beside, leader)
                return offsets
            case fx.AppendTogether():
                return self.append_together(effect, leader)
            case fx.AppendMessages(messages) if messages.topic.startswith("__terminated"):
                if "first-guess" not in self.faults:
                    self.append_messages(messages, leader)
            case fx.Prepare(key):
                self.preparing[key] = Preparing(leader, effect, Native(leader))
            case fx.LookAtPrepared():
                return self.look_at_prepared(leader)
            case fx.TakeUp(key):
                taken = self.preparing.pop(key)
                assert leader not in self.open, "the round is not empty"
                if taken.native.state == "open":
                    self.open[leader] = taken.native
            case fx.GiveUp(key):
                given_up = self.preparing.pop(key, None)
                if given_up is not None and given_up.native.state == "open":
                    self._finish(given_up.native, "aborted")
            case fx.SendOffsets(offsets):
                return self.send_offsets(offsets, leader)
            case fx.Look(queries) if gone := [item for item in queries if self._has_lost(item)]:
                raise Missing(gone[0].places.topic)
            case fx.Look(queries):
                return [self.look(query) for query in queries]
            case fx.AbortRound():
                if leader in self.open or leader != self.identity:
                    self.end(leader, "aborted")
            case fx.MendTopics(topics):
                return self.mend(topics)
            case fx.AppendMessages(fx.Messages(topic, rows, number)):
                return self.append_rows(shard(topic, number), rows, leader)
            case fx.CommitRound():
                self.end(leader, "committed")
                return self.clock_ms
            case fx.EndOffsets(partitions) if lost := {name for name, _ in partitions} - self.ever():
                raise Missing(min(lost))
            case fx.EndOffsets(partitions):
                return {item: len(self.topics[shard(*item)].entries) for item in partitions if item[0] in self.topics}
            case fx.StartOffsets(partitions, is_patient):
                unled = [item for item in partitions if item[0] == self.away]
                assert not unled or not is_patient, f"all wait for {unled}, which have no leader"
                return {item: self._present(shard(*item)).start for item in partitions if item not in unled}
            case fx.DeleteRecords(before) if not self.deletes:
                return frozenset(before)
            case fx.DeleteRecords(before):
                refused = {item for item, offset in before.items() if self._is_beyond(shard(*item), offset)}
                for item, offset in before.items():
                    if item not in refused:
                        self.delete_records(shard(*item), offset)
                return frozenset(refused)
            case fx.StableEnds(places):
                there = [item for item in places if shard(*item) in self.topics and item[0] != self.away]
                return {item: self.topics[shard(*item)].stable_end() for item in there}
            case fx.LookForObstacles(places):
                names = [shard(*item) for item in places]
                foreign = [(owner, native) for owner, native in self.open.items() if owner < 0]
                known = [ForeignTransaction(name, owner, 0, 0) for owner, native in foreign for name in native.topics]
                away = [Leaderless(*item) for item in places if item[0] == self.away]
                return (
                    away
                    if "waiting-seal" in self.faults
                    else [
                        *away,
                        *(item for item in known if item.topic in names),
                    ]
                )
            case fx.Closed(names):
                return frozenset() if "blind-reopening" in self.faults else frozenset(filter(self._is_closed, names))
            case fx.EndForeign(transactions):
                for one in transactions:
                    self.end_foreign(one.producer_id)
            case fx.ReadLate(place) if shard(*place) not in self.topics:
                raise Missing(place[0])
            case fx.ReadLate(place, start, end, most):
                late_rows = [item for item in self.topics[shard(*place)].visible(start) if item[0] < end][:most]
                found = [LateRecord(offset, 0, row.key.encode(), row.value.encode()) for offset, row in late_rows]
                return found, found[-1].offset + 1 if len(found) == most else end
            case fx.AppendLate(source, copies):
                if leader == self.identity and any(self._present(shard(*place)).sealed for place, _ in copies):
                    return "MESSAGE_TOO_LARGE"
                for place, late in copies:
                    key, value = (late.key or b"").decode(), (late.value or b"").decode()
                    self._append(shard(*place), Record(key, value, origin=(shard(*source), late.offset)), leader)
            case fx.FindLate(source, offset, targets):
                logs = [self.log(shard(*item)) for item in targets]
                if any(row.origin == (shard(*source), offset) for log in logs for _, row in log.visible()):
                    return True
                return None if any(log.stable_end() < len(log.entries) for log in logs) else False
            case fx.Now():
                return self.clock_ms
            case fx.DiskBytes(places):
                there = [item for item in places if shard(*item) in self.topics]
                return {item: 100 * len(self.topics[shard(*item)].entries) for item in there}
            case fx.LogEnds(places):
                there = [item for item in places if shard(*item) in self.topics and item[0] != self.away]
                return {item: len(self.topics[shard(*item)].entries) for item in there}
            case fx.SampleKeys(place, records):
                latest = self.topics[shard(*place)].entries[-records:] if shard(*place) in self.topics else []
                sampled = [entry.item for entry in latest if isinstance(entry.item, Record)]
                return [(row.key.encode(), len(row.value)) for row in sampled]
            case fx.GroupCommits(groups):
                if "deaf-retention" in self.faults or ("deaf-log" in self.faults and "historian" in groups):
                    read = {unshard(name): len(log.entries) for name, log in self.topics.items()}
                    return dict.fromkeys(groups, read)
                return {
                    name: {unshard(topic): offset for topic, offset in self.commits.get(name, {}).items()}
                    for name in groups
                }
            case fx.TakeIdentity(_):
                if self.identity in self.open:
                    self._finish(self.open.pop(self.identity), "aborted")
                self.expire_prepared()
                self.identity = leader
            case fx.ReadCommitLog(topic, start):
                if start < self.topics[topic].start:
                    raise Gone
                return self.summary(topic, start)
            case fx.ReadEnded(topic, start, end):
                if start < self.topics[topic].start:
                    raise Gone
                ended = EndedIds()
                for offset, record in self.topics[topic].visible(start):
                    if offset < end and record.kind is not ControlKind.BEGIN:
                        ended.add(record.transaction.bytes)
                return ended
            case fx.ReadOrders(topic, records):
                return self.orders(topic, records)
            case fx.ReadCompacted(topic):
                return self.latest(topic)
            case fx.ReadRecords(topic, offsets):
                visible = dict(self.topics[topic].visible())
                return {offset: visible[offset][1] if offset in visible else None for offset in offsets}
            case _:
                raise NotImplementedError(f"this world does not know {type(effect).__name__}")
        return None

    def hear(self, refused: fx.EffectRefusedError) -> fx.EffectRefusedError:
        """What a leader makes of a refusal; one with a defect makes something else of it.

        Raises:
            Gone: It takes it for an unknown outcome, so that its term ends.
        """
        if "deaf-refusal" in self.faults and isinstance(refused.effect, fx.ROUND):
            raise Gone
        if "blames-all" in self.faults and isinstance(refused.effect, fx.CreateTopics | fx.Seal):
            return fx.EffectRefusedError(refused.effect, refused.reason, code=refused.code)
        if "broad-refusal" in self.faults and refused.places:
            return fx.EffectRefusedError(refused.effect, refused.reason, code=refused.code, topic=refused.topic)
        return refused

    def execute_partly(self, effect: AnyEffect, leader: int, share: float) -> None:
        """Carry out a part of an effect, as a crash in its middle may leave it."""
        match effect:
            case fx.CreateTopics(topics):
                self.execute(fx.CreateTopics(topics[: int(len(topics) * share)]), leader)
            case fx.DeleteTopics(topics):
                self.execute(fx.DeleteTopics(topics[: int(len(topics) * share)]), leader)
            case fx.Seal(places, ids):
                topics = list(dict.fromkeys(topic for topic, _ in places))
                kept = topics[: int(len(topics) * share)]  # a topic is closed as a whole
                self.execute(fx.Seal([item for item in places if item[0] in kept], ids), leader)
            case fx.MergeFrames(items):
                self.execute(fx.MergeFrames(items[: int(len(items) * share)]), leader)
            case fx.AppendTogether(items, _, topic, records, beside):
                # Partitions do not wait for each other: any part of each may have arrived.
                self.execute(fx.MergeFrames(items[: int(len(items) * share)]), leader)
                self.execute(fx.AppendControl(topic, records[: int(len(records) * (1 - share))], beside), leader)
            case fx.DeleteRecords(before):
                self.execute(fx.DeleteRecords(dict(list(before.items())[: int(len(before) * share)])), leader)
            case fx.SendOffsets(offsets):
                self.execute(fx.SendOffsets(offsets[: int(len(offsets) * share)]), leader)
            case fx.AppendLate(source, copies):
                self.execute(fx.AppendLate(source, copies[: int(len(copies) * share)]), leader)
            case fx.AppendMessages(fx.Messages(topic, rows, number)):
                self.execute(fx.AppendMessages(fx.Messages(topic, rows[: int(len(rows) * share)], number)), leader)
            case fx.Write(operations) if "lossy-multi" in self.faults:
                self.execute(fx.Write(operations[: int(len(operations) * share)]), leader)
            case _:
                return

    def create(self, name: str, partitions: int = 1) -> str:
        """Create a topic unless it exists; gives its id."""
        if name not in self.topics:
            self.made += 1
            for number in range(partitions):
                self.topics[shard(name, number)] = Topic(f"id-{self.made}")
        return self.topics[name].id

    def ever(self) -> set[str]:
        """The topics that are there, and those that leaders have deleted."""
        return self.topics.keys() | self.removed.keys()

    def _id_of(self, name: str) -> str:
        return self.topics[name].id if name in self.topics else ""

    def count(self, name: str) -> int:
        """How many partitions a topic has."""
        return sum(shard(name, number) in self.topics for number in range(SHARDS_MAX))

    def state_of(self, name: str) -> fx.TopicState:
        """What a leader is told of a topic."""
        log = self.topics[name]
        own = SEALED if log.sealed else self.settings_of(name)
        config = TOPIC_CONFIG | {key: value for key, value in own.items() if value is not None}
        return fx.TopicState(log.id, self.count(name), config, frozenset(), log.sealed, own)

    def mend(self, specs: Sequence[fx.TopicCreation]) -> dict[str, str]:
        """What of topics is not as specified."""
        closed = {spec.name: "it is closed" for spec in specs if self._is_closed(spec.name)}
        return closed | {spec.name: self.wrong[spec.name] for spec in specs if spec.name in self.wrong}

    def _is_closed(self, topic: str) -> bool:
        return topic in self.topics and self.topics[topic].sealed

    def log(self, name: str) -> Topic:
        """A topic, or what is known of it after it was removed; all that ever stood in it."""
        return self.topics[name] if name in self.topics else self.removed[name]

    def _is_beyond(self, name: str, before: int) -> bool:
        """Whether somebody has made a buffer anew, which ends before what a leader would delete."""
        return self.lost_buffers and name in self.topics and before > len(self.topics[name].entries)

    def delete_records(self, name: str, before: int) -> None:
        """Truncate a topic; one that is gone has nothing left anyway."""
        if name not in self.topics:
            return
        log = self.topics[name]
        if "greedy-truncation" in self.faults or ("greedy-log" in self.faults and name.endswith(".commit-log")):
            before = log.stable_end()
        assert before <= log.stable_end(), f"{name} is truncated where it is not decided"
        self.may_delete(name, before)
        log.start = max(log.start, before)

    def children(self, path: str) -> list[str]:
        """Names of the children of a node."""
        return self.nodes.children(path)

    def dated(self, path: str) -> fx.DatedNode | None:
        """A node with its version and time."""
        if path not in self.nodes:
            return None
        return fx.DatedNode(self.nodes[path], self.nodes.versions[path], self.nodes.written[path])

    def ensure(self, path: str) -> None:
        """Create a node and its parents."""
        if path in self.nodes:
            return
        parts = path.strip("/").split("/")
        for depth in range(len(parts)):
            node = "/" + "/".join(parts[: depth + 1])
            if node not in self.nodes:
                self.nodes[node] = b""

    def write(self, operations: Sequence[NodeOperation], leader: int) -> bool:
        """A multi with a check of the controller epoch."""
        if leader != self.controller_epoch:
            raise Fenced
        operations = self.spoil_write(operations)
        if "uncounted-preparations" in self.faults:
            operations = [
                SetNode(item.path, json.dumps({**json.loads(item.value), "prepared": 0}).encode())
                if isinstance(item, SetNode) and b'"prepared"' in item.value and "/streams/" in item.path
                else item
                for item in operations
            ]
        if "forgotten-late" in self.faults:
            operations = [item for item in operations if not item.path.endswith("/late")]
        if sum(len(item.path) + 64 + len(getattr(item, "value", b"")) for item in operations) > self.write_bytes_max:
            raise fx.EffectRefusedError(
                fx.Write(tuple(operations)), "ZooKeeper takes less at once", code="zookeeper-refused"
            )
        draft = self._draft(operations)
        if draft is None:
            return False
        self._remember(operations)
        self._adopt(draft)
        return True

    def multi(self, operations: Sequence[NodeOperation]) -> bool:
        """A multi of somebody who is no leader; whether it was carried out."""
        draft = self._draft(operations)
        if draft is not None:
            self._adopt(draft)
        return draft is not None

    def _draft(self, operations: Sequence[NodeOperation]) -> dict[str, bytes | None] | None:
        """What nodes a multi would leave, None for those that it deletes; None if it cannot be carried out."""
        draft: dict[str, bytes | None] = {}

        def value_of(path: str) -> bytes | None:
            return draft[path] if path in draft else self.nodes.get(path)

        def is_of(path: str, version: int) -> bool:
            return version in (-1, self.nodes.versions.get(path))

        def has_children(path: str) -> bool:
            names = {*self.nodes.children(path), *(item.rpartition("/")[2] for item in draft)}
            return any(value_of(f"{path}/{name}") is not None for name in names)

        for operation in operations:
            match operation:
                case CreateNode(path, value):
                    if value_of(path) is not None or value_of(path.rsplit("/", 1)[0]) is None:
                        return None
                    draft[path] = value
                case SetNode(path, value, version):
                    if value_of(path) is None or not is_of(path, version):
                        return None
                    draft[path] = value
                case DeleteNode(path, version):
                    if value_of(path) is None or has_children(path) or not is_of(path, version):
                        return None
                    draft[path] = None
                case CheckNode(path, version):
                    if value_of(path) is None or not is_of(path, version):
                        return None
        return draft

    def _adopt(self, draft: Mapping[str, bytes | None]) -> None:
        for path, new in draft.items():
            if new is None:
                self.nodes.pop(path, None)
            else:
                self.nodes[path] = new

    def _remember(self, operations: Sequence[NodeOperation]) -> None:
        drops = any(isinstance(item, DeleteNode) and "/epochs/" in item.path for item in operations)
        for operation in operations:
            if not isinstance(operation, CreateNode | SetNode):
                continue
            if "/epochs/" in operation.path:
                self.past[operation.path] = operation.value
            elif operation.path.endswith("/truncation"):
                lost = self.lost.setdefault(operation.path, set())
                removed = set(Truncation.from_json(operation.value).removed)
                self.may_remove(operation.path, removed - lost)
                lost.update(removed)
                if drops:
                    self.may_drop(operation.path, operation.value)

    def seal(self, names: Sequence[str], leader: int = 0) -> Mapping[str, int]:
        """Seal topics; of those on which somebody else's native transaction stays open, no end is told."""
        ours = {name for owner, native in self.open.items() if owner >= 0 for name in native.topics}
        held = {name for owner, native in self.open.items() if owner < 0 for name in native.topics}
        if not ours.isdisjoint(names):
            raise Blocked
        self.close(names)
        if not held.isdisjoint(names):
            since_ms = self.sealing_since.setdefault((leader, tuple(names)), self.clock_ms)
            if "boundless-seal" in self.faults or self.clock_ms < since_ms + SEAL_FOREIGN_MS:
                raise Blocked
        self.sealing_since.pop((leader, tuple(names)), None)
        return {name: len(self.topics[name].entries) for name in names if name not in held}

    def close(self, names: Sequence[str]) -> None:
        """The first half of a seal: nothing new comes in."""
        for name in names:
            for append in [item for item in self.inside if item.topic == name and item.again]:
                if "timed-seal" not in self.faults:
                    self.land(append)  # it has the lock before the marker of the barrier, or is refused
            topic, number = unshard(name)
            if "partial-seal" in self.faults:
                self.topics[name].sealed = number == 0
                continue
            for number in range(self.count(topic)):  # the settings are those of all
                self.topics[shard(topic, number)].sealed = True

    def _unfit(self, places: Sequence[Partition]) -> str:
        """A topic that is gone, or of which not all partitions are given."""
        given = Counter(topic for topic, _ in places)
        return next((topic for topic, count in given.items() if self.count(topic) != count), "")

    def look_at_prepared(self, leader: int) -> dict[str, fx.PreparationProgress]:
        """How far a leader's merges beside the line are; each does a little meanwhile."""
        own = {key: item for key, item in self.preparing.items() if item.leader == leader}
        if own and leader != self.identity:
            raise Fenced
        for item in own.values():
            self._go_on(item)
        return {
            key: fx.PreparationProgress(
                item.offsets if len(item.offsets) == len(item.effect.items) and not item.lost else None,
                item.refused,
                item.lost,
            )
            for key, item in own.items()
        }

    def _go_on(self, item: Preparing) -> None:
        """A merge beside the line appends its next frames."""
        place = len(item.offsets)
        if item.refused is not None or item.lost or self.preparing_rng.random() < 0.1:
            return
        if self.preparing_rng.random() < self.loses_preparations:
            self._finish(item.native, "aborted")
            item.lost = "a connection was lost"
            return
        if place == 0:
            for spec in item.effect.topics:
                self.create(spec.name, spec.partitions)
        chunk = item.effect.items[place : place + self.preparing_rng.randint(1, 8)]
        if not chunk:
            return
        refused = self.refuses(fx.MergeFrames(chunk), item.leader)
        if refused is not None:
            self._finish(item.native, "aborted")
            places = [place + one for one in refused.places]
            item.refused = fx.EffectRefusedError(
                item.effect, refused.reason, code=refused.code, topic=refused.topic, places=places
            )
            return
        if "hasty-merge" in self.faults:
            item.native.state = "committed"
        before, self.open[item.leader] = self.open.get(item.leader), item.native
        item.offsets += self.merge(chunk, item.leader)
        del self.open[item.leader]
        if before is not None:
            self.open[item.leader] = before

    def expire_prepared(self) -> None:
        """Abort what dead or deposed leaders were merging beside the line."""
        for item in self.preparing.values():
            if item.native.state == "open":
                self._finish(item.native, "aborted")

    def merge(self, items: fx.Items, leader: int) -> list[int]:
        """Append the records of frames inside the leader's native transaction."""
        offsets: list[int] = []
        for place, frame in items:
            topic = shard(*place)
            batch = self.batch_of(frame)
            if offsets:
                self.in_between(topic)
            offsets.append(len(self._present(topic).entries))
            for record in self.records_of(batch):
                self._append(topic, record, leader)
        return offsets

    def batch_of(self, frame: FrameRef) -> bytes:
        """What is in a frame."""
        if frame.batch is not None:
            return frame.batch
        buffer = self._present(shard(*frame.partition))
        if frame.offset < buffer.start or frame.offset >= len(buffer.entries):
            raise Gone
        return bytes(buffer.entries[frame.offset].item[1])

    def append_control(self, topic: str, records: Sequence[ControlRecord], leader: int) -> list[int]:
        """Append control records inside the leader's native transaction."""
        if "torn-round" in self.faults and leader in self.open:
            self._finish(self.open.pop(leader), "committed")
        offsets = []
        for record in records:
            offsets.append(len(self._present(topic).entries))
            self._append(topic, record, leader)
        return offsets

    def append_together(self, effect: fx.AppendTogether, leader: int) -> tuple[list[int], list[int]]:
        """Append frames and control records; abort unless the frames stand where they were expected."""
        offsets = self.merge(effect.items, leader)
        positions = self.append_control(effect.topic, effect.records, leader)
        self.append_messages(effect.beside, leader)
        expected = list(effect.expected)
        if offsets != expected and "blind-forecast" not in self.faults:
            self.end(leader, "aborted")
        return offsets if "blind-forecast" not in self.faults else expected, positions

    def append_messages(self, messages: fx.Messages | None, leader: int) -> None:
        """Append keys and values inside the leader's native transaction."""
        for item in messages.items if messages is not None else ():
            if "untied-outcomes" in self.faults:
                self.topics[messages.topic].entries.append(Entry(item))  # type: ignore[union-attr]
            else:
                self._append(messages.topic, item, leader)  # type: ignore[union-attr]

    def holds_records(self, leader: int) -> bool:
        """Whether records stand in the leader's native transaction."""
        return leader in self.open and bool(self.open[leader].topics)

    def send_offsets(self, items: Sequence[GroupOffsets], leader: int) -> tuple[int, str] | None:
        """Offsets become part of the leader's native transaction, unless a group has moved on, which empties it."""
        if leader != self.identity and "no-fencing" not in self.faults:
            raise Fenced
        if "emptied-round" in self.faults and self.holds_records(leader):
            self._finish(self.open.pop(leader), "aborted")  # as where there was no answer, and it goes on with the rest
        for place, item in enumerate(items):
            if item.generation != self.generations.get(item.group_id, 0):
                if leader in self.open:
                    self._finish(self.open.pop(leader), "aborted")
                return place, "offsets refused"
            taken = replace(item, details={}) if "bare-offsets" in self.faults else item
            self.open.setdefault(leader, Native(leader)).offsets.append(taken)
        return None

    def _has_lost(self, query: fx.Query) -> bool:
        """Whether what is looked at first is a partition that its owner has deleted."""
        place = query.places.of(query.lineage.stages[0].segment)
        return place[0] == query.places.topic and shard(*place) not in self.topics

    def look(self, query: fx.Query) -> fx.Found:
        """Look at what stands in the lineage of a key; blocked while something before is undecided."""
        stages = query.lineage.stages
        active = self.topics[shard(*query.places.of(stages[0].segment))]
        end = len(active.entries) if query.end is None else query.end
        if active.stable_end() < end:
            raise Blocked
        if "blind-look" in self.faults:
            return fx.Found(query.condition.expected if query.since is None else EMPTY, end)
        key = query.condition.key.decode() if query.condition.scope is Scope.KEY and query.condition.key else None
        last = EMPTY
        for stage in stages:
            name = shard(*query.places.of(stage.segment))
            start = self.topics[name].start if name in self.topics else stage.end or 0
            rows = self.log(name).visible()
            below = end if stage is stages[0] else stage.end or 0
            found = [offset for offset, row in rows if start <= offset < below and key in (None, row.key)]
            found = [offset for offset in found if query.since is None or stage.base + offset > query.since]
            if found:
                last = SN(DLSN.of(stage.segment, found[-1]), None, stage.base + found[-1])
                break
            if start > (0 if query.since is None else max(query.since + 1 - stage.base, 0)):
                last = ANY
                break
        else:
            if query.lineage.dropped_end > (0 if query.since is None else query.since + 1):
                last = ANY
        foreign = [
            entry.item
            for before, after in pairwise(query.own)
            for entry in active.entries[before.end : after.start]
            if entry.item is not None and key in (None, entry.item.key)
        ]
        return fx.Found(last, end, bool(foreign) and "unwatched" not in self.faults)

    def end(self, leader: int, state: str) -> None:
        """End the leader's native transaction."""
        if "visible-before-sealed" in self.faults and leader == self.identity and leader not in self.open:
            self.is_early = False
            return
        if leader != self.identity and "no-fencing" not in self.faults:
            raise Fenced
        self._finish(self.open.pop(leader), state)

    def expire_native(self, leader: int) -> None:
        """Abort what a dead leader left open, as the broker does after the transaction time-out."""
        if leader in self.open:
            self._finish(self.open.pop(leader), "aborted")
        for key, item in list(self.preparing.items()):
            if item.leader == leader:
                del self.preparing[key]
                if item.native.state == "open":
                    self._finish(item.native, "aborted")

    def append_rows(self, topic: str, rows: Sequence[tuple[bytes, bytes | None]], leader: int) -> list[int]:
        """Append records with keys inside the leader's native transaction."""
        offsets = []
        for key, value in rows:
            offsets.append(len(self._present(topic).entries))
            self._append(topic, (key, self.spoil(value)), leader)
        return offsets

    def latest(self, topic: str) -> dict[bytes, bytes]:
        """The latest committed value of each key, in the order of offsets."""
        rows: dict[bytes, bytes | None] = {}
        for _, (key, value) in self.topics[topic].visible():
            rows.pop(key, None)
            rows[key] = value
        return {key: value for key, value in rows.items() if value is not None}

    def compact(self, topic: str) -> None:
        """Remove what a later record of the same key replaces, as brokers do at some time."""
        log = self.topics[topic]
        last = {row[0]: offset for offset, row in log.visible()}
        for offset, row in log.visible():
            if last[row[0]] != offset:
                log.entries[offset].item = None

    def damage(self, topic: str, place: float) -> None:
        """Change a record of a topic behind everybody's back."""
        rows = self.topics[topic].visible()
        if rows:
            offset, row = rows[int(place * len(rows))]
            if row[1] is not None and (self.loses_lists or not row[0].startswith(b"ended-")):
                self.topics[topic].entries[offset].item = (row[0], row[1][:-1] + bytes([row[1][-1] ^ 1]))

    def summary(self, topic: str, start: int = 0) -> fx.LogSummary:
        """What the commit log says."""
        begun: set[bytes] = set()
        ended: dict[bytes, int] = {}
        aborted: set[bytes] = set()
        for offset, record in self.topics[topic].visible():
            if offset < start:
                continue
            if record.kind is ControlKind.BEGIN:
                begun.add(record.transaction.bytes)
            else:
                ended[record.transaction.bytes] = offset
                if record.kind is ControlKind.ABORT:
                    aborted.add(record.transaction.bytes)
        end = self.topics[topic].stable_end()
        return fx.LogSummary(ended, frozenset(begun.difference(ended)), frozenset(aborted), end)

    def orders(self, topic: str, records: int) -> dict[LineKey, int]:
        """The highest numbers that the end of the commit log commits."""
        found: dict[LineKey, int] = {}
        for _, record in self.topics[topic].visible()[-records:]:
            if record.order is not None:
                key, number = record.order
                found[key] = max(number, found.get(key, 0))
        return found

    def look_at_topic(self, name: str) -> fx.TopicLook:
        """Whether a topic is there, and can be read."""
        topic = self.topics.get(name)
        refused = self.unreadable.get(name, "")
        lacks = refused if refused == LEADERLESS else self.unreplicated.get(name, "")
        return fx.TopicLook("" if topic is None or name in self.unseen else topic.id, refused, lacks)

    def _present(self, topic: str) -> Topic:
        """A topic; raises if its owner has deleted it, or another leader."""
        if topic not in self.topics:
            raise Missing(unshard(topic)[0])
        return self.topics[topic]

    def _append(self, topic: str, item: Any, leader: int) -> None:
        if leader != self.identity and "no-fencing" not in self.faults:
            raise Fenced
        log = self._present(topic)
        if log.sealed:
            raise Fenced  # refused by the broker; a leader that meets it has an old view and gives up
        native = self.open.setdefault(leader, Native(leader))
        if topic not in native.topics:
            native.topics.append(topic)
        log.entries.append(Entry(item, native, self.clock_ms))
        if topic in self.late_markers:
            self.late_markers.discard(topic)
            log.entries.append(Entry(None))

    def _finish(self, native: Native, state: str) -> None:
        native.state = state
        if state == "committed":
            self.group_offsets.extend(native.offsets)
        self.ended += 1
        for topic in native.topics:
            if topic.endswith(".commit-log") and self.ended % 5 == 0:
                self.late_markers.add(topic)  # brokers write markers after they have answered
            elif topic in self.topics:
                self.topics[topic].entries.append(Entry(None))

    def request(self, group: GroupName, body: bytes) -> str:
        """A client asks for something; gives the path where it finds the answer."""
        self.made += 1
        name = f"{paths.REQUEST_PREFIX}{self.made:010d}"
        self.nodes[f"{paths.requests(group)}/{name}"] = body
        return f"{paths.answers(group)}/{name}"
