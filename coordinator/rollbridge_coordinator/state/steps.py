"""Steps: each effect as a function for procedures to ``yield from``, which gives its result the right type."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeVar

from rollbridge.model.commit_order import LineKey
from rollbridge.model.conditions import ForeignTransaction, Obstacle
from rollbridge.model.control import ControlRecord
from rollbridge.model.group_offsets import GroupOffsets
from rollbridge.model.late import LateRecord
from rollbridge.model.names import GroupName
from rollbridge.model.pieces import FrameRef, Partition
from rollbridge.model.records import NodeOperation
from rollbridge_coordinator.state.effects import (
    AbortRound,
    AppendControl,
    AppendLate,
    AppendMessages,
    AppendTogether,
    Closed,
    CommitRound,
    CreateTopics,
    DeleteRecords,
    DeleteTopics,
    DiskBytes,
    Effect,
    EndForeign,
    EndOffsets,
    EnsureNodes,
    FindLate,
    Found,
    GroupCommits,
    LogSummary,
    Look,
    LookForObstacles,
    MendTopics,
    MergeFrames,
    Messages,
    Now,
    Query,
    ReadChildren,
    ReadCommitLog,
    ReadCompacted,
    ReadCounter,
    ReadLate,
    ReadNodes,
    ReadOrders,
    ReadRecords,
    Seal,
    SendOffsets,
    StableEnds,
    StartOffsets,
    TakeIdentity,
    TopicIds,
    TopicSpec,
    Undecided,
    Write,
)

T = TypeVar("T")

Steps = Generator[Effect, Any, T]
"""A procedure that ends with a ``T``."""


def read_nodes(paths: Sequence[str]) -> Steps[Mapping[str, bytes | None]]:
    """See :class:`ReadNodes`."""
    values: Mapping[str, bytes | None] = yield ReadNodes(tuple(paths))
    return values


def read_node(path: str) -> Steps[bytes | None]:
    """The value of one node; see :class:`ReadNodes`."""
    values = yield from read_nodes([path])
    return values[path]


def read_counter(path: str) -> Steps[tuple[bytes, int] | None]:
    """See :class:`ReadCounter`."""
    found: tuple[bytes, int] | None = yield ReadCounter(path)
    return found


def read_children(path: str) -> Steps[list[str]]:
    """Names of the children of one node; see :class:`ReadChildren`."""
    names = yield from read_all_children([path])
    return names[path]


def read_all_children(paths: Sequence[str]) -> Steps[Mapping[str, list[str]]]:
    """See :class:`ReadChildren`."""
    names: Mapping[str, list[str]] = yield ReadChildren(tuple(paths))
    return names


def ensure_nodes(paths: Sequence[str]) -> Steps[None]:
    """See :class:`EnsureNodes`."""
    yield EnsureNodes(tuple(paths))


def write(*operations: NodeOperation) -> Steps[bool]:
    """See :class:`Write`."""
    applied: bool = yield Write(operations)
    return applied


def confirm_leadership() -> Steps[None]:
    """No newer leader existed until now, so what was read before is not a newer leader's work."""
    yield Write(())


def create_topics(topics: Sequence[TopicSpec]) -> Steps[Mapping[str, str]]:
    """See :class:`CreateTopics`."""
    ids: Mapping[str, str] = yield CreateTopics(tuple(topics))
    return ids


def mend_topics(topics: Sequence[TopicSpec]) -> Steps[Mapping[str, str]]:
    """See :class:`MendTopics`."""
    wrong: Mapping[str, str] = yield MendTopics(tuple(topics))
    return wrong


def try_to_mend_topics(topics: Sequence[TopicSpec]) -> Steps[Mapping[str, str] | None]:
    """See :class:`MendTopics`; None where that cannot be told now."""
    wrong: Mapping[str, str] | None = yield MendTopics(tuple(topics), optional=True)
    return wrong


def delete_topics(topics: Sequence[str]) -> Steps[None]:
    """See :class:`DeleteTopics`."""
    yield DeleteTopics(tuple(topics))


def try_to_delete_topics(topics: Sequence[str]) -> Steps[bool]:
    """See :class:`DeleteTopics`; whether it could be done."""
    done: bool = yield DeleteTopics(tuple(topics), optional=True)
    return done


def topic_ids(topics: Sequence[str]) -> Steps[Mapping[str, str]]:
    """See :class:`TopicIds`."""
    ids: Mapping[str, str] = yield TopicIds(tuple(topics))
    return ids


def seal(topics: Sequence[str]) -> Steps[Mapping[str, int]]:
    """See :class:`Seal`."""
    ends: Mapping[str, int] = yield Seal(tuple(topics))
    return ends


def look_for_obstacles(topics: Sequence[str]) -> Steps[Sequence[Obstacle]]:
    """See :class:`LookForObstacles`."""
    found: Sequence[Obstacle] = yield LookForObstacles(tuple(topics))
    return found


def closed_of(topics: Sequence[str]) -> Steps[frozenset[str]]:
    """See :class:`Closed`."""
    found: frozenset[str] = yield Closed(tuple(topics))
    return found


def end_foreign(transactions: Sequence[ForeignTransaction]) -> Steps[str | None]:
    """See :class:`EndForeign`."""
    failed: str | None = yield EndForeign(tuple(transactions))
    return failed


def merge_frames(items: Sequence[tuple[str, FrameRef]]) -> Steps[Sequence[int]]:
    """See :class:`MergeFrames`."""
    offsets: Sequence[int] = yield MergeFrames(items)
    return offsets


def append_control(
    topic: str, records: Sequence[ControlRecord], beside: Messages | None = None
) -> Steps[Sequence[int]]:
    """See :class:`AppendControl`."""
    offsets: Sequence[int] = yield AppendControl(topic, records, beside)
    return offsets


def append_together(
    items: Sequence[tuple[str, FrameRef]],
    expected: Sequence[int],
    topic: str,
    records: Sequence[ControlRecord],
    beside: Messages | None = None,
) -> Steps[tuple[Sequence[int], Sequence[int]]]:
    """See :class:`AppendTogether`."""
    offsets: tuple[Sequence[int], Sequence[int]] = yield AppendTogether(items, expected, topic, records, beside)
    return offsets


def send_offsets(items: Sequence[GroupOffsets]) -> Steps[tuple[int, str] | None]:
    """See :class:`SendOffsets`."""
    refused: tuple[int, str] | None = yield SendOffsets(tuple(items))
    return refused


def look(queries: Sequence[Query]) -> Steps[Sequence[Found | Undecided]]:
    """See :class:`Look`."""
    answers: Sequence[Found | Undecided] = yield Look(tuple(queries))
    return answers


def abort_round() -> Steps[None]:
    """See :class:`AbortRound`."""
    yield AbortRound()


def append_messages(messages: Messages) -> Steps[Sequence[int]]:
    """See :class:`AppendMessages`."""
    offsets: Sequence[int] = yield AppendMessages(messages)
    return offsets


def commit_round() -> Steps[None]:
    """See :class:`CommitRound`."""
    yield CommitRound()


def end_offsets(partitions: Sequence[Partition]) -> Steps[Mapping[Partition, int]]:
    """See :class:`EndOffsets`."""
    ends: Mapping[Partition, int] = yield EndOffsets(tuple(partitions))
    return ends


def start_offsets(partitions: Sequence[Partition]) -> Steps[Mapping[Partition, int]]:
    """See :class:`StartOffsets`."""
    starts: Mapping[Partition, int] = yield StartOffsets(tuple(partitions))
    return starts


def delete_records(before: Mapping[Partition, int]) -> Steps[frozenset[Partition]]:
    """See :class:`DeleteRecords`."""
    refused: frozenset[Partition] = yield DeleteRecords(dict(before))
    return refused


def stable_ends(topics: Sequence[str]) -> Steps[Mapping[str, int]]:
    """See :class:`StableEnds`."""
    ends: Mapping[str, int] = yield StableEnds(tuple(topics))
    return ends


def read_late(topic: str, start: int, end: int, records_max: int) -> Steps[tuple[Sequence[LateRecord], int]]:
    """See :class:`ReadLate`."""
    found: tuple[Sequence[LateRecord], int] = yield ReadLate(topic, start, end, records_max)
    return found


def append_late(source: str, items: Sequence[tuple[str, LateRecord]]) -> Steps[str | None]:
    """See :class:`AppendLate`."""
    refused: str | None = yield AppendLate(source, items)
    return refused


def find_late(source: str, offset: int, targets: Mapping[str, int]) -> Steps[bool | None]:
    """See :class:`FindLate`."""
    found: bool | None = yield FindLate(source, offset, dict(targets))
    return found


def now() -> Steps[int]:
    """See :class:`Now`."""
    found: int = yield Now()
    return found


def disk_bytes(topics: Sequence[str]) -> Steps[Mapping[str, int]]:
    """See :class:`DiskBytes`."""
    sizes: Mapping[str, int] = yield DiskBytes(tuple(topics))
    return sizes


def group_commits(groups: Sequence[str]) -> Steps[Mapping[str, Mapping[str, int]]]:
    """See :class:`GroupCommits`."""
    found: Mapping[str, Mapping[str, int]] = yield GroupCommits(tuple(groups))
    return found


def read_compacted(topic: str) -> Steps[Mapping[bytes, bytes]]:
    """See :class:`ReadCompacted`."""
    records: Mapping[bytes, bytes] = yield ReadCompacted(topic)
    return records


def read_records(topic: str, offsets: Sequence[int]) -> Steps[Mapping[int, bytes | None]]:
    """See :class:`ReadRecords`."""
    values: Mapping[int, bytes | None] = yield ReadRecords(topic, tuple(offsets))
    return values


def take_identity(group: GroupName) -> Steps[None]:
    """See :class:`TakeIdentity`."""
    yield TakeIdentity(group)


def read_commit_log(topic: str, start: int = 0) -> Steps[LogSummary]:
    """See :class:`ReadCommitLog`."""
    summary: LogSummary = yield ReadCommitLog(topic, start)
    return summary


def read_orders(topic: str, records: int) -> Steps[Mapping[LineKey, int]]:
    """See :class:`ReadOrders`."""
    numbers: Mapping[LineKey, int] = yield ReadOrders(topic, records)
    return numbers
