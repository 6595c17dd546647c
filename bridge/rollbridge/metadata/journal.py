"""Journal of a group: a copy in Kafka of its leader's last writes to ZooKeeper, and the repair from it.

If ZooKeeper is restored from a backup, Kafka still has the later state. So a leader copies the nodes that define the
group: its streams with their epochs and removed segments, its controller epoch, and the values and znode versions of
the transaction counters. The copy is never ahead of ZooKeeper, so anything that only the journal has was lost in
ZooKeeper. Values of the counters are not compared, since clients may lower them, see :mod:`rollbridge.base.ids`.

The journal shares the compacted topic of terminated transactions: the key of a record is a zero byte and the path of
the node. The value for a deleted stream is the name of the node that keeps its used numbers
(:mod:`rollbridge.stream.positions`), or empty.

:func:`plan` repairs a ZooKeeper that was restored, from the journal of each group, the ids in its commit log and its
buffers, and the existing topics. Counters are raised beyond all possibly issued values, and lost nodes are written
again. Changes in progress at the backup that have finished since are removed, so that they are not carried out twice. A
repair begins with a mark that keeps every leader away and ends with its removal; each step may be repeated.

:func:`begin_log` repairs a group whose commit log was deleted. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Final

from rollbridge.base.errors import (
    CorruptDataError,
    InvalidNameError,
    InvalidRequestError,
    NewerFormatError,
    NotFoundError,
)
from rollbridge.base.ids import NUMBER_MAX, SHARED_MAX, Epoch, TransactionId, parse_number
from rollbridge.metadata import paths
from rollbridge.metadata.changes import EpochTransition, works_of
from rollbridge.metadata.client_sessions import ClientSession, floor_of, highest_floor
from rollbridge.metadata.records import (
    ControllerEpoch,
    CreateNode,
    DeleteNode,
    Group,
    NodeOperation,
    SetNode,
    Truncation,
    leading,
)
from rollbridge.stream.config import StreamConfig, StreamState
from rollbridge.stream.epochs import EpochRecord
from rollbridge.stream.late import LateNotes
from rollbridge.stream.names import GroupName, StreamName, parse_segment_topic
from rollbridge.stream.positions import former_among, parse_former

_MARK: Final = b"\0"
DELETED: Final = b""
"""Value for a deleted stream of which no numbers are known."""

LOG_BEGINS: Final = b"its commit log is being begun anew; run rollbridge repair --commit-log again"
"""Mark of a group while :func:`begin_log` is carried out."""

Journal = Mapping[str, bytes]
"""Values of nodes by their paths, in the order in which they were appended last."""


def key_of(path: str) -> bytes:
    """Return the key of a node's record."""
    return _MARK + path.encode()


def is_deleted(value: bytes) -> bool:
    """Return whether a value means a deleted stream; others have a configuration, which is JSON."""
    return not value.startswith(b"{")


def split(records: Mapping[bytes, bytes]) -> tuple[dict[bytes, bytes], dict[str, bytes]]:
    """Split the records of the topic into those of client names and the journal."""
    clients = {key: value for key, value in records.items() if not key.startswith(_MARK)}
    journal = {key[1:].decode("utf-8", "replace"): value for key, value in records.items() if key.startswith(_MARK)}
    return clients, journal


def streams_of(journal: Journal) -> dict[StreamName, bytes]:
    """Return the values of all streams in the journal, deleted ones included."""
    found = {}
    for path, value in journal.items():
        parts = path.split("/")
        if len(parts) == 5 and parts[1] == "scopes" and parts[3] == "streams":
            found[StreamName(parts[2], parts[4])] = value
    return found


def epochs_of(journal: Journal, stream: StreamName) -> dict[int, bytes]:
    """Return the values of a stream's epochs, by their numbers, in order."""
    prefix = f"{paths.epochs(stream)}/"
    found = {int(path.removeprefix(prefix)): value for path, value in journal.items() if path.startswith(prefix)}
    return dict(sorted(found.items()))


def lost(
    journal: Journal,
    nodes: Mapping[str, bytes | None],
    deleted_streams: Collection[str],
    name: GroupName,
    next_epoch: int,
) -> list[str]:
    """Describe what the journal knows and ZooKeeper does not, as sentences; empty unless ZooKeeper was restored.

    Args:
        journal: Of the group.
        nodes: The nodes of the group's streams as ZooKeeper has them, and its own.
        deleted_streams: The nodes of the scope's deleted streams there.
        name: The group.
        next_epoch: The controller epoch of a new leader, or the one after that of who leads.
    """
    found = []
    raised = journal.get(paths.controller(name))
    if raised is not None and (epoch := ControllerEpoch.from_json(raised).epoch) >= next_epoch:
        found.append(f"the group was led with controller epoch {epoch}, ZooKeeper gives out {next_epoch}")
    number, known = (highest_number(item.get(paths.group(name))) for item in (journal, nodes))
    if number > known:
        found.append(f"transactions of the group had ids of number {number}, ZooKeeper knows {known}")
    for stream, value in streams_of(journal).items():
        there = nodes.get(paths.stream(stream))
        if is_deleted(value):
            found += _lost_deletion(
                stream, value, None if there is None else StreamConfig.from_json(there), deleted_streams
            )
            continue
        if there is None:
            found.append(f"ZooKeeper does not know stream {stream}")
            continue
        if _age(value) > _age(there):
            found.append(f"the settings of stream {stream} were changed, or segments prepared, or it was created again")
        prefix = f"{paths.epochs(stream)}/"
        last = max((int(path.removeprefix(prefix)) for path in nodes if path.startswith(prefix)), default=-1)
        newest = max(epochs_of(journal, stream), default=-1)
        if newest > last:
            found.append(f"stream {stream} has epoch {newest}, ZooKeeper knows {last} at most")
        gone, here = (_truncation(item.get(paths.truncation(stream))) for item in (journal, nodes))
        missing = here.missing(gone)
        if missing:
            found.append(f"{len(missing)} segments of stream {stream} were removed, such as {min(missing)}")
        elif here.is_behind(gone):
            found.append(f"epochs of stream {stream} were dropped, which ZooKeeper has")
        noted, notes = _late(journal.get(paths.late(stream))), _late(nodes.get(paths.late(stream)))
        kept = {item: to for item, to in noted.segments.items() if here.keeps(item.epoch) and item not in here.removed}
        if notes.is_behind(replace(noted, segments=kept)):
            found.append(f"late records of stream {stream} were forwarded, of which ZooKeeper knows nothing")
    return found


def deleted_by_hand(
    journal: Journal, nodes: Mapping[str, bytes | None], name: GroupName, next_epoch: int
) -> dict[str, bytes]:
    """Return nodes of streams deleted by hand in a ZooKeeper that was not set back, with their values.

    Entries of the journal that ZooKeeper lacks, at a controller epoch that ZooKeeper still has, existed when that
    leader took over. The journal records deletions before leaders carry them out. For the arguments see :func:`lost`.
    """
    controller = paths.controller(name)
    raised = journal.get(controller)
    if raised is None or ControllerEpoch.from_json(raised).epoch >= next_epoch:
        return {}
    before = set(takewhile(lambda path: path != controller, journal))
    found: dict[str, bytes] = {}
    for stream, value in streams_of(journal).items():
        own = paths.stream(stream)
        if is_deleted(value):
            continue
        if nodes.get(own) is not None:
            minor = before.intersection((paths.truncation(stream), paths.late(stream)))
            found |= {path: journal[path] for path in minor if nodes.get(path) is None}
            continue
        first = StreamConfig.from_json(value).first_epoch  # of this life
        if own in before or any(
            number >= first and paths.epoch(stream, number) in before for number in epochs_of(journal, stream)
        ):
            found |= {path: item for path, item in journal.items() if path == own or path.startswith(f"{own}/")}
            found[paths.epochs(stream)] = b""
    return found


def highest_number(group: bytes | None) -> int:
    """Return the highest number that a group ever had, from its node; 0 if it has none."""
    if not group:
        return 0
    record = Group.from_json(group)
    return max([record.number, *record.former_numbers])


def _age(config: bytes) -> tuple[int, int, int]:
    """Return the sort key of a stream's configurations, from older to newer.

    Without the count of prepared segments, a number would be given out again after a repair.
    """
    known = StreamConfig.from_json(config)
    return known.first_epoch, known.revision, known.prepared


def _lost_deletion(
    stream: StreamName, value: bytes, there: StreamConfig | None, deleted_streams: Collection[str]
) -> Iterator[str]:
    """Describe what was lost of a deletion: the deletion itself, or the numbers that the stream has used."""
    _, former = parse_former(value.decode("utf-8", "replace"))
    if there is not None and there.state is StreamState.ACTIVE and there.first_epoch < former.epoch:
        yield f"stream {stream} was deleted, ZooKeeper has it"
    elif former_among(deleted_streams, stream).epoch < former.epoch:
        yield f"ZooKeeper does not know which numbers deleted stream {stream} has used"


def _late(raw: bytes | None) -> LateNotes:
    return LateNotes() if raw is None else LateNotes.from_json(raw)


def _truncation(raw: bytes | None) -> Truncation:
    return Truncation() if raw is None else Truncation.from_json(raw)


# Repair of a restored ZooKeeper.

COUNTER_JUMP: Final = 1 << 48
"""Distance by which counters are raised: clients reserve them in blocks, of which the unused part is unknown."""
VERSION_JUMP: Final = 2_000
"""Number of writes to a node whose version counts: more than may have happened since the backup."""
BATCH_BYTES_MAX: Final = 900_000
"""Size limit of one ZooKeeper multi; ZooKeeper accepts 1 MiB."""

Nodes = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class RepairStep:
    """Step of a repair: its purpose, its multis, each of which is atomic, and the topics to delete, with their ids."""

    what: str
    batches: tuple[tuple[NodeOperation, ...], ...] = ()
    topics: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEvidence:
    """Evidence about a group in Kafka.

    Attributes:
        journal: Its journal.
        counter: The highest counter of earlier versions that was seen in use; -1 if none was.
        ongoing: Transactions that have begun and have no outcome.
        sessions: The newest session of each client name that has written to its buffers.
        topics: All topics there are, with their ids.
        unwritten: Those of :meth:`undescribed` that hold no record and no open native transaction.
    """

    name: GroupName
    journal: Journal
    counter: int = -1
    ongoing: Collection[TransactionId] = ()
    sessions: Mapping[str, int] = field(default_factory=dict)
    topics: Mapping[str, str] = field(default_factory=dict)
    unwritten: Collection[str] = ()

    def undescribed(self) -> list[tuple[str, StreamName, Epoch]]:
        """Return the topics of epochs beyond the newest that the journal knows, each with its stream and epoch.

        None of them is a topic that a stream has adopted, whatever its name: that is its owner's.
        """
        streams = {name: value for name, value in streams_of(self.journal).items() if not is_deleted(value)}
        adopted = {StreamConfig.from_json(value).topic for value in streams.values()}
        found = []
        for topic in sorted(self.topics.keys() - adopted):
            try:
                stream, segment = parse_segment_topic(topic)
            except InvalidNameError:
                continue
            if stream in streams and segment.epoch > _newest(self.journal, stream):
                found.append((topic, stream, segment.epoch))
        return found


def plan(nodes: Nodes, groups: Sequence[GroupEvidence], now_ms: int) -> list[RepairStep]:
    """Return the steps of a repair, in order.

    Args:
        nodes: All of ZooKeeper below the root path, by path.
        groups: The groups that ZooKeeper knows.
        now_ms: The time.

    Raises:
        CorruptDataError: A loss cannot be reconstructed; nothing can be repaired.
    """
    for group in groups:
        if nodes.get(paths.outdated(group.name)) == LOG_BEGINS:
            raise InvalidRequestError(
                f"first run `rollbridge repair --commit-log {group.name}` again, which was interrupted"
            )
    cleared = [step for group in groups for step in _clear_epochs(nodes, group)]
    steps = list(_parents(nodes, groups))
    steps += [step for group in groups for step in _mark(nodes, group, now_ms)]
    steps += cleared
    for group in groups:
        steps += _group(nodes, group, now_ms)
    steps += _index(nodes, groups)
    steps += [_shared_counter(nodes, groups), _numbers(nodes, groups)]
    unmarked = tuple(DeleteNode(paths.outdated(group.name)) for group in groups)
    steps.append(RepairStep("let coordinators lead again", (unmarked,)))
    return steps


def begin_log(
    nodes: Nodes, name: GroupName, journal: Journal, topics: Mapping[str, str], now_ms: int
) -> list[RepairStep]:
    """Return the steps that restart the commit log of a group, in order.

    Committed records are in the segments, and stay. Which transactions of the buffers have ended is unknown, and none
    may be committed twice: the buffers are deleted as well, and the next leader creates them.

    Args:
        nodes: All of ZooKeeper below the root path, by path.
        name: The group.
        journal: Its journal.
        topics: All topics there are, with their ids.
        now_ms: The time.

    Raises:
        NotFoundError: The group does not exist.
        InvalidRequestError: Its log exists, or ZooKeeper was set back.
        CorruptDataError: The settings of a stream cannot be read, and are not in the journal.
    """
    raw, log, mark = nodes.get(paths.group(name)), name.commit_log_topic, paths.outdated(name)
    if raw is None:
        raise NotFoundError(f"there is no transaction group {name}; nothing was changed")
    group = Group.from_json(raw)
    journaled = journal.get(paths.group(name))
    known = "" if journaled is None else Group.from_json(journaled).commit_log_topic_id
    if nodes.get(mark, LOG_BEGINS) != LOG_BEGINS or (known == topics.get(log) and known != group.commit_log_topic_id):
        raise InvalidRequestError(
            "ZooKeeper was set back: `rollbridge repair --force` restores it; nothing was changed"
        )
    if mark not in nodes and topics.get(log) == group.commit_log_topic_id:
        raise InvalidRequestError(f"commit log {log} is the one that ZooKeeper names; nothing was changed")
    marked = () if mark in nodes else ((CreateNode(mark, LOG_BEGINS),),)
    steps = [RepairStep(f"keep coordinators from leading {name}", marked)]
    steps.append(_controller(nodes, GroupEvidence(name=name, journal=journal), now_ms))
    for stream, config in _streams_in(nodes, journal, name):
        buffer = config.buffer_topic
        fresh = replace(config, buffer_topic_id="", life_id=config.identity, revision=config.revision + 1)
        what = f"delete transaction buffer {buffer}, which the next leader recreates; its open transactions are lost"
        gone = {buffer: topics[buffer]} if buffer in topics else {}
        steps.append(RepairStep(what, ((_put(nodes, paths.stream(stream), fresh.to_json()),),), gone))
    for number in range(paths.BUCKETS):
        bucket = f"{paths.transactions(name)}/{number:02x}"
        steps += _delete(nodes, f"drop records of transactions of {name}, whose outcomes are unknown", bucket)
    marks = (DeleteNode(paths.log_marks(name)),) if paths.log_marks(name) in nodes else ()
    fresh_group = replace(group, commit_log_topic_id="", terminated_topic_id="").to_json()
    what = f"have the next leader restart {log}; outcomes that only it held are unknown"
    gone = {log: topics[log]} if log in topics else {}
    steps.append(RepairStep(what, ((*marks, SetNode(paths.group(name), fresh_group)),), gone))
    steps.append(RepairStep("let coordinators lead again", ((DeleteNode(mark),),)))
    return steps


def _streams_in(nodes: Nodes, journal: Journal, name: GroupName) -> Iterator[tuple[StreamName, StreamConfig]]:
    """Give the streams of a group that are not being deleted; those that cannot be read as the journal has them."""
    parent = paths.streams(name.scope)
    for path in _children(nodes, parent):
        stream = StreamName(name.scope, path.rpartition("/")[2])
        try:
            config = StreamConfig.from_json(nodes[path])
        except CorruptDataError as fault:
            if isinstance(fault, NewerFormatError) or is_deleted(journal.get(path, DELETED)):
                raise
            config = StreamConfig.from_json(journal[path])
        if config.group == name and config.state is StreamState.ACTIVE:
            yield stream, config


def _shared_counter(nodes: Nodes, groups: Sequence[GroupEvidence]) -> RepairStep:
    """Raise the shared counter of earlier versions. Whatever value it holds, none beyond the bound was issued."""
    known = parse_number(nodes.get(paths.TRANSACTION_COUNTER), SHARED_MAX) or 0
    journaled = [parse_number(group.journal.get(paths.TRANSACTION_COUNTER), SHARED_MAX) or 0 for group in groups]
    used = [group.counter + 1 for group in groups if group.counter < SHARED_MAX]
    counter = max([known, *journaled, *used]) + COUNTER_JUMP
    if counter > SHARED_MAX:  # a forged id, or nonsense: those that were given out follow what a leader has seen
        counter = max(journaled) + COUNTER_JUMP
    raised = _put(nodes, paths.TRANSACTION_COUNTER, b"%d" % counter)
    return RepairStep(f"raise the shared transaction counter from {known} to {counter}", ((raised,),))


def _numbers(nodes: Nodes, groups: Sequence[GroupEvidence]) -> RepairStep:
    """Renumber every group, so that ids issued by its counter since the backup do not matter."""
    operations: list[NodeOperation] = []
    highest = (parse_number(nodes.get(paths.GROUP_NUMBERS), NUMBER_MAX) or 1) - 1
    for group in groups:
        path = paths.group(group.name)
        raws = [raw for raw in (nodes.get(path), group.journal.get(path)) if raw]
        records = [Group.from_json(raw) for raw in raws]
        deleted_streams = {number for item in records for number in (item.number, *item.former_numbers)} - {0}
        if deleted_streams:
            highest = max(highest, *deleted_streams)
            floor = max(item.counter_floor for item in records)
            newest = records[-1] if _is_log_newer(group, records[-1], records[0]) else records[0]
            fresh = replace(newest, number=0, former_numbers=tuple(sorted(deleted_streams)), counter_floor=floor)
            operations.append(SetNode(path, fresh.to_json()))
    put = _put(nodes, paths.GROUP_NUMBERS, b"%d" % (highest + 1))
    what = f"have {len(operations)} groups renumbered, from {highest + 1} on"
    return RepairStep(what, batches([put, *operations]))


def _is_log_newer(group: GroupEvidence, journaled: Group, there: Group) -> bool:
    """Return whether the journal knows the commit log and ZooKeeper does not, or one that was there before."""
    known = there.commit_log_topic_id
    return not known or (journaled.commit_log_topic_id == group.topics.get(group.name.commit_log_topic) != known)


def _parents(nodes: Nodes, groups: Sequence[GroupEvidence]) -> Iterator[RepairStep]:
    """Create the parent nodes of groups and streams, for scopes created after the backup."""
    scopes = sorted({group.name.scope for group in groups})
    wanted = [path for scope in scopes for path in (f"{paths.SCOPES}/{scope}", paths.streams(scope))]
    missing = [path for path in (paths.SCOPES, *wanted, paths.GROUPS) if path not in nodes]
    if missing:
        yield RepairStep("make room for what was created since", batches([CreateNode(path, b"") for path in missing]))


def _mark(nodes: Nodes, group: GroupEvidence, now_ms: int) -> Iterator[RepairStep]:
    """Keep every coordinator from leading a group, and restore one that was created after the backup.

    A restored group gets its mark, and all nodes that a coordinator would create for it, in one multi.
    """
    name = group.name
    path, outdated = paths.group(name), paths.outdated(name)
    value = group.journal.get(path)
    why = b"a repair has begun and has not ended; run it again"
    batch = [] if outdated in nodes else [CreateNode(outdated, why)]
    if batch and path in nodes:
        yield RepairStep(f"keep coordinators from leading {name}", (tuple(batch),))
    elif value is not None and path not in nodes:
        first = CreateNode(paths.controller(name), ControllerEpoch(0, "repair", now_ms).to_json())
        whole = (
            CreateNode(path, value),
            *batch,
            first,
            *(CreateNode(item, b"") for item in paths.group_skeleton(name)),
        )
        yield RepairStep(f"restore group {name}, which was created since", (whole,))
    if (
        value is not None
        and path in nodes
        and _is_log_newer(group, Group.from_json(value), Group.from_json(nodes[path]))
    ):
        yield RepairStep(f"restore what group {name} consists of", ((SetNode(path, value),),))


def _group(nodes: Nodes, group: GroupEvidence, now_ms: int) -> Iterator[RepairStep]:
    name = group.name
    yield _controller(nodes, group, now_ms)
    for stream, value in streams_of(group.journal).items():
        if is_deleted(value):
            yield from _forget_stream(nodes, group, stream, value.decode())
        else:
            yield from _restore_stream(nodes, group, stream)
    yield from _under_way(nodes, group)
    yield from _delete(nodes, f"drop admin requests of {name}, which would be carried out again", paths.requests(name))
    for number in range(paths.BUCKETS):
        bucket = f"{paths.transactions(name)}/{number:02x}"
        yield from _delete(nodes, f"drop records of transactions of {name}; its leader recreates them", bucket)
    yield from _sessions(nodes, group, now_ms)
    wanted = {paths.parts(name, item) for item in group.ongoing} | set(_children(nodes, paths.parts_of(name)))
    for path in sorted(wanted):
        created = () if path in nodes else (CreateNode(path, b""),)
        again = (SetNode(path, nodes.get(path) or b""),) * VERSION_JUMP
        what = f"raise the part numbers of {path.rpartition('/')[2]} by {VERSION_JUMP}"
        yield RepairStep(what, batches([*created, *again]))


def _controller(nodes: Nodes, group: GroupEvidence, now_ms: int) -> RepairStep:
    """Raise the controller epoch, and the node's version with it: an old leader must not find the version it knew."""
    path = paths.controller(group.name)
    raw, journaled = nodes.get(path), group.journal.get(path)
    known = ControllerEpoch.from_json(raw).epoch if raw else 0
    last = ControllerEpoch.from_json(journaled).epoch if journaled else 0
    epoch = max(known, last) + VERSION_JUMP
    value = ControllerEpoch(epoch, "repair", now_ms).to_json()
    created = () if path in nodes or paths.group(group.name) not in nodes else (CreateNode(path, value),)
    what = f"raise the controller epoch of {group.name} from {known} to {epoch}"
    return RepairStep(what, batches([*created, *(SetNode(path, value),) * (epoch - known)]))


def _restore_stream(nodes: Nodes, group: GroupEvidence, stream: StreamName) -> Iterator[RepairStep]:
    """Write what the journal knows of a stream and ZooKeeper has lost.

    The journal may be behind: its leader died after a write to ZooKeeper, and only counters were set back since. What
    ZooKeeper has newer is left as it is.
    """
    journal = group.journal
    wanted = _lost_nodes(nodes, journal, stream)
    foundation = _truncation(journal.get(paths.truncation(stream))).foundation
    life = StreamConfig.from_json(journal[paths.stream(stream)]).first_epoch
    first = life if foundation is None else foundation.first
    parents = () if paths.epochs(stream) in nodes else (CreateNode(paths.epochs(stream), b""),)
    changed = [_put(nodes, path, value) for path, value in sorted(wanted.items()) if nodes.get(path) != value]
    dropped = [
        DeleteNode(path) for path in _children(nodes, paths.epochs(stream)) if int(path.rpartition("/")[2]) < first
    ]
    operations = [*changed[:1], *parents, *changed[1:]] if paths.stream(stream) not in nodes else [*parents, *changed]
    operations = [*_former_life(nodes, journal, stream), *operations, *dropped]
    if operations:
        known = sum(isinstance(item, CreateNode) and "/epochs/" in item.path for item in changed)
        what = f"restore stream {stream}: {known} epochs, {len(changed) - known} other nodes, {len(dropped)} go"
        yield RepairStep(what, batches(operations))


def _lost_nodes(nodes: Nodes, journal: Journal, stream: StreamName) -> Journal:
    """Return the nodes of a stream of which the journal has a newer value than ZooKeeper, or ZooKeeper none."""
    path = paths.stream(stream)
    whole = {item: value for item, value in journal.items() if item == path or item.startswith(f"{path}/")}
    raw = nodes.get(path)
    if raw is None:
        return whole
    there, life = (StreamConfig.from_json(item).first_epoch for item in (raw, journal[path]))
    if there != life:
        return whole if there < life else {}
    # Where ZooKeeper has the newest epoch, those that it lacks are old ones that have been dropped since.
    has_newest = _newest(nodes, stream) >= _newest(journal, stream)
    missing = {item for item in whole.keys() - nodes.keys() if not (has_newest and _is_epoch(stream, item))}
    newer = {item for item in whole.keys() & nodes.keys() if _is_newer(stream, item, whole[item], nodes)}
    return {item: whole[item] for item in missing | newer}


def _is_epoch(stream: StreamName, path: str) -> bool:
    return path.startswith(f"{paths.epochs(stream)}/")


def _is_newer(stream: StreamName, path: str, value: bytes, nodes: Nodes) -> bool:
    """Return whether a value of a node of a stream is newer than the one in ZooKeeper, in the same life."""
    there = nodes[path]
    if path == paths.stream(stream):
        return _age(value) > _age(there)
    if path == paths.truncation(stream):
        return _truncation(there).is_behind(_truncation(value))
    if path == paths.late(stream):
        return _late(there).is_behind(_late(value))
    if _is_epoch(stream, path):  # its ends are known later
        return EpochRecord.from_json(there).sealed_ends is None
    return True


def _former_life(nodes: Nodes, journal: Journal, stream: StreamName) -> list[NodeOperation]:
    """Delete nodes of a life that ended since the backup; comes first, since the configuration identifies that life."""
    raw = nodes.get(paths.stream(stream))
    if raw is None:
        return []
    fresh, old = StreamConfig.from_json(journal[paths.stream(stream)]), StreamConfig.from_json(raw)
    if fresh.first_epoch <= old.first_epoch:
        return []
    found = _children(nodes, paths.stream(stream))
    return [DeleteNode(path) for path in found if path != paths.epochs(stream) and path not in journal]


def _forget_stream(nodes: Nodes, group: GroupEvidence, stream: StreamName, former: str) -> Iterator[RepairStep]:
    parent = paths.deleted_streams(stream.scope)
    if former and f"{parent}/{former}" not in nodes:
        created = [CreateNode(path, b"") for path in (parent, f"{parent}/{former}") if path not in nodes]
        yield RepairStep(f"keep the numbers that stream {stream} has used, which was deleted", (tuple(created),))
    if not _is_gone(nodes, group, stream):
        return
    below = [path for path in nodes if path.startswith(f"{paths.stream(stream)}/")]
    doomed = sorted([paths.stream(stream), *below], key=lambda path: (-path.count("/"), path))
    yield RepairStep(f"delete stream {stream}, which has been deleted since", batches([*map(DeleteNode, doomed)]))


def _is_gone(nodes: Nodes, group: GroupEvidence, stream: StreamName) -> bool:
    """Return whether a stream that the journal calls deleted is still in ZooKeeper, and all of it is done."""
    raw = nodes.get(paths.stream(stream))
    config = None if raw is None else StreamConfig.from_json(raw)
    return config is not None and group.topics.get(config.buffer_topic) != config.buffer_topic_id


def _index(nodes: Nodes, groups: Sequence[GroupEvidence]) -> Iterator[RepairStep]:
    """Have the index of topics name the streams that have adopted them when all else is repaired; once for all groups.

    Nothing of the topics is touched: what an owner has done to them since, the leader finds when it looks.
    """
    configs = {name: StreamConfig.from_json(value) for name, value in streams_of(nodes).items()}
    for group in groups:
        for stream, value in streams_of(group.journal).items():
            if not is_deleted(value):
                configs[stream] = StreamConfig.from_json(value)
            elif _is_gone(nodes, group, stream):
                del configs[stream]
    existing = {topic: identity for group in groups for topic, identity in group.topics.items()}
    # The stream that knows the topic as it is comes last; there is but one, unless a journal is behind.
    adopted = sorted(
        (config.topic, existing.get(config.topic) == config.topic_id, str(config.name)) for config in configs.values()
    )
    wanted = {paths.adopted(topic): name.encode() for topic, _, name in adopted if topic}
    gone = [DeleteNode(path) for path in _children(nodes, paths.TOPICS) if path not in wanted]
    wrong = [_put(nodes, path, name) for path, name in wanted.items() if nodes.get(path) != name]
    if gone or wrong:
        parent = [] if paths.TOPICS in nodes else [CreateNode(paths.TOPICS, b"")]
        what = f"have the index name the streams of {len(wrong)} adopted topics, and of {len(gone)} others none"
        yield RepairStep(what, batches([*parent, *gone, *wrong]))


def _under_way(nodes: Nodes, group: GroupEvidence) -> Iterator[RepairStep]:
    """Remove changes that were finished since the backup, so that they are not carried out again."""
    deleted = {str(name) for name, value in streams_of(group.journal).items() if is_deleted(value)}
    for path, work in works_of(nodes, group.name):
        gone = sorted(deleted.intersection(work.streams))
        if isinstance(work, EpochTransition):
            if gone or work.epoch <= _newest(group.journal, work.stream):
                why = "the stream was deleted" if gone else "it is done"
                yield RepairStep(
                    f"drop the scale of {work.stream} to epoch {work.epoch}: {why}", ((DeleteNode(path),),)
                )
            continue
        left = [item for item in work.rolls if item.stream not in deleted]
        count = len(work.transactions)
        if all(_is_rolled(group.journal, item.stream, item.new_active_epoch) for item in left):
            yield RepairStep(f"drop the rolling commit of {count} transactions: it is done", ((DeleteNode(path),),))
        elif gone:
            rest = replace(work, rolls=tuple(left)).to_json()
            what = f"take {', '.join(gone)} out of the rolling commit of {count} transactions: deleted since"
            yield RepairStep(what, ((SetNode(path, rest),),))


def _is_rolled(journal: Journal, stream: str, epoch: int) -> bool:
    """Return whether the duplicates that ended with this epoch have their ends, which is the last write of a roll."""
    known = epochs_of(journal, StreamName.parse(stream))
    raw = known.get(epoch)
    if raw is None:
        return bool(known) and min(known) > epoch
    return bool(EpochRecord.from_json(raw).sealed_ends)


def _sessions(nodes: Nodes, group: GroupEvidence, now_ms: int) -> Iterator[RepairStep]:
    """End every session, since the newest one is unknown: a client that continues begins a new one.

    The floor is raised to what it may have been: records that had been removed since the backup have come back, and
    others were never in it.
    """
    operations = []
    parent = paths.sessions(group.name)
    floor = max(floor_of(nodes.get(parent, b"")), highest_floor(now_ms))
    if parent in nodes and floor > floor_of(nodes[parent]):
        operations.append(_put(nodes, parent, str(floor).encode()))
    known = {path: ClientSession.from_json(nodes[path]) for path in _children(nodes, parent) if nodes[path]}
    names = {item.client_name for item in known.values()} | {item for item, epoch in group.sessions.items() if epoch}
    for client in sorted(names):
        path = paths.session(group.name, client)
        session = known.get(path, ClientSession(client, 0, now_ms))
        epoch = max(session.epoch, group.sessions.get(client, 0), now_ms // 60_000) + 1
        value = ClientSession(client, epoch, now_ms, session.shared, renews=session.shared is None).to_json()
        operations.append(_put(nodes, path, value))
    if operations:
        yield RepairStep(f"end all sessions of the {len(names)} named clients of {group.name}", batches(operations))


def _clear_epochs(nodes: Nodes, group: GroupEvidence) -> Iterator[RepairStep]:
    """Delete empty topics of an epoch that no record describes: its scale or rolling commit was interrupted.

    Raises:
        CorruptDataError: There are such topics that are not empty.
    """
    begun: dict[StreamName, int] = {}
    for _, work in works_of(nodes, group.name):
        if isinstance(work, EpochTransition):
            begun[work.stream] = work.epoch
        else:
            begun.update({StreamName.parse(item.stream): item.new_active_epoch for item in work.rolls})
    doomed = [
        (topic, stream)
        for topic, stream, epoch in group.undescribed()
        if epoch > max(begun.get(stream, -1), _newest(nodes, stream))  # a leader may have published it a moment ago
    ]
    for topic, stream in doomed:
        if topic not in group.unwritten:
            raise CorruptDataError(
                f"topic {topic} holds records, or an open native transaction, of an epoch whose key ranges are not on "
                f"record: the journal of {group.name} ends at epoch {_newest(group.journal, stream)} of "
                f"{stream}; nothing was changed; restore ZooKeeper from a later backup"
            )
    for topic, stream in doomed:
        what = f"delete topic {topic}, which is empty: a scale or rolling commit of {stream} was interrupted"
        yield RepairStep(what, topics={topic: group.topics[topic]})


def _newest(journal: Journal, stream: StreamName) -> int:
    return max(epochs_of(journal, stream), default=-1)


def _delete(nodes: Nodes, what: str, parent: str) -> Iterator[RepairStep]:
    doomed = _children(nodes, parent)
    if doomed:
        yield RepairStep(f"{what} ({len(doomed)})", batches([*map(DeleteNode, doomed)]))


def _children(nodes: Nodes, parent: str) -> list[str]:
    return sorted(path for path in nodes if path.rpartition("/")[0] == parent)


def _put(nodes: Nodes, path: str, value: bytes) -> NodeOperation:
    return SetNode(path, value) if path in nodes else CreateNode(path, value)


def batches(operations: Sequence[NodeOperation]) -> tuple[tuple[NodeOperation, ...], ...]:
    """Split operations into multis that ZooKeeper accepts."""
    left, found = list(operations), []
    while left:
        count = leading(left, BATCH_BYTES_MAX)
        found.append(tuple(left[:count]))
        left = left[count:]
    return tuple(found)
