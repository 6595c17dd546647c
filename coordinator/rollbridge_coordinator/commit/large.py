"""Preparing: merge large transactions in the background, into segments that are not read yet.

A preparation has a record in ZooKeeper before its topics are created, so that a new leader finds these. It uses none of
them: the appends of a dead leader are aborted when its transactional ids are taken, and readers would have to skip
them. It deletes them, and begins again.

Refused content is set aside as in any other round (:mod:`rollbridge_coordinator.commit.refusals`). A merge that failed
for another reason begins again: each time after a longer back-off, and :data:`MERGES_MAX` times at most.

See :mod:`rollbridge_coordinator.commit.plan`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rollbridge.base.effects import Steps
from rollbridge.base.ids import PREPARED_FIRST, SegmentId
from rollbridge.buffer.state import BufferedTransaction
from rollbridge.buffer.table import State
from rollbridge.errors import CorruptDataError
from rollbridge.metadata import paths
from rollbridge.metadata.changes import Merging, PreparedStream
from rollbridge.metadata.records import CreateNode, DeleteNode, SetNode
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.names import StreamName
from rollbridge_coordinator.commit.merge import items_of
from rollbridge_coordinator.commit.plan import Targets, prepared_topics, segments_in_use
from rollbridge_coordinator.commit.refusals import absorb, refuse
from rollbridge_coordinator.commit.waiting import why_waits
from rollbridge_coordinator.core.effects import (
    Closed,
    DeleteTopics,
    GiveUp,
    LookAtPrepared,
    Prepare,
    ReadNodes,
    Write,
    read_children,
)
from rollbridge_coordinator.core.state import GroupState, Preparation
from rollbridge_coordinator.core.stream_state import segment_topic_spec
from rollbridge_coordinator.core.waits import MERGES_MAX, MergeRetry, RetryAfter, StaleStateError

logger = logging.getLogger(__name__)

REMOVE_EVERY_MS: Final = 1_000
"""Interval between removals of leftovers: brokers take some time to delete topics."""


def plan_preparation(
    group: GroupState, transaction: BufferedTransaction, now_ms: int
) -> tuple[Merging, list[StreamConfig]]:
    """Return the segments into which a transaction is merged, and the streams with their new counts."""
    streams: list[PreparedStream] = []
    configs: list[StreamConfig] = []
    for name, numbers in sorted(transaction.written_segments().items()):
        stream = group.streams[name]
        first = stream.history.next_prepared(stream.config.prepared)
        epoch = stream.history.active.epoch
        segments = {number: SegmentId.of(first + place, epoch) for place, number in enumerate(sorted(numbers))}
        streams.append(PreparedStream(name, segments))
        configs.append(replace(stream.config, prepared=first + len(numbers) - PREPARED_FIRST))
    record = Merging(transaction.transaction_id, tuple(streams), now_ms, group.controller_epoch)
    return record, configs


def prepare(
    group: GroupState,
    transaction: BufferedTransaction,
    record: Merging,
    configs: Sequence[StreamConfig],
    instead_of: bytes | None,
    now_ms: int,
) -> Steps[None]:
    """Begin to merge a large transaction in the background, as planned."""
    if instead_of is not None:
        yield from _give_place(group, instead_of, transaction, now_ms)
    first = min(min(item.segments.values()) for item in record.streams)
    node = f"{paths.merging(group.name)}/{record.transaction}-{first.number}-{group.controller_epoch}"
    settings = [SetNode(paths.stream(config.name), config.to_json()) for config in configs]
    if not (yield from Write([*settings, CreateNode(node, record.to_json())])):
        raise StaleStateError(f"transaction {record.transaction} is merged by another leader")
    aims, topics = Targets(), []
    for config, prepared in zip(configs, record.streams, strict=True):
        group.streams[prepared.stream].config = config
        for number, segment in prepared.segments.items():
            aims.add(config, number, segment)
            topics.append(segment_topic_spec(config, segment))
    items, _ = items_of([transaction], aims)
    yield from Prepare(node, topics, items, aims.stamped)
    group.large.preparations[transaction.id] = Preparation(node, record, items)
    group.counts["merges_beside_begun"] += 1


def follow_preparations(group: GroupState, now_ms: int) -> Steps[None]:
    """Handle the progress and the refusals of background merges."""
    progress = yield from LookAtPrepared()
    for identifier, retry in list(group.large.retries.items()):
        if identifier not in group.fold.open:
            del group.large.retries[identifier]
        elif retry.rest.is_over(now_ms):
            retry.is_due = True
    for identifier, item in list(group.large.preparations.items()):
        transaction = group.fold.open.get(identifier)
        if transaction is None or transaction.state is not State.COMMITTING:
            yield from give_up(group, identifier)
            continue
        found = progress.get(item.node)
        if found is None or found.lost:
            yield from _begin_again(group, transaction, "it was given up" if found is None else found.lost, now_ms)
        elif found.refused is not None:
            logger.info("merge.refused group=%s txn=%s: %s", group.name, transaction.transaction_id, found.refused)
            yield from give_up(group, identifier)
            yield from absorb(group, [transaction], item.items, [len(item.items)], found.refused, now_ms, may_wait=True)
        else:
            item.offsets = found.offsets


def _give_place(group: GroupState, identifier: bytes, other: BufferedTransaction, now_ms: int) -> Steps[None]:
    """Give the id of a preparation that waits for something else to another large transaction."""
    transaction = group.fold.open.get(identifier)
    if transaction is None or transaction.state is not State.COMMITTING:
        yield from give_up(group, identifier)
        return
    waits = why_waits(group, transaction) or "others"
    why = f"it gave its id to transaction {other.transaction_id} while it waited for {waits}"
    yield from _begin_again(group, transaction, why, now_ms)


def _begin_again(group: GroupState, transaction: BufferedTransaction, why: str, now_ms: int) -> Steps[None]:
    """Give up a failed merge, to begin again after a back-off; abort the transaction after too many failures."""
    yield from give_up(group, transaction.id)
    group.counts["merges_beside_lost"] += 1
    last = group.large.retries.get(transaction.id)
    rest = RetryAfter.after(None if last is None else last.rest, now_ms)
    if rest.times >= MERGES_MAX:
        refuse(group, transaction, f"its records were merged {rest.times} times, each time in vain: {why}", now_ms)
        return
    group.large.retries[transaction.id] = MergeRetry(rest, why)
    logger.info(
        'merge.retry group=%s txn=%s pause_s=%g attempt=%d attempts_max=%d reason="%s"',
        group.name,
        transaction.transaction_id,
        rest.length_ms / 1000,
        rest.times,
        MERGES_MAX,
        why,
    )


def give_up(group: GroupState, identifier: bytes) -> Steps[None]:
    """End a preparation; its leftovers are removed later."""
    item = group.large.preparations.pop(identifier)
    yield from GiveUp(item.node)
    group.large.leftovers[item.node] = item.record


def give_up_stream(group: GroupState, stream: StreamName) -> Steps[list[str] | None]:
    """End all preparations for a stream that is being deleted; return their topics, None while some are still made."""
    for identifier, item in list(group.large.preparations.items()):
        if any(prepared.stream == str(stream) for prepared in item.record.streams):
            yield from give_up(group, identifier)
    topics = prepared_topics(group, stream)
    if topics and not topics.keys().isdisjoint((yield from LookAtPrepared())):
        return None
    return [topic for own in topics.values() for topic in own]


def load_merging(group: GroupState) -> Steps[None]:
    """Load the preparations of earlier leaders, to be removed."""
    parent = paths.merging(group.name)
    nodes = [f"{parent}/{name}" for name in (yield from read_children(parent))]
    for node, raw in (yield from ReadNodes(nodes)).items():
        try:
            if raw is not None:
                group.large.leftovers[node] = Merging.from_json(raw)
        except CorruptDataError as fault:
            logger.warning('merge.leftovers-kept group=%s node=%s reason="%s"', group.name, node, fault)


def remove_leftovers(group: GroupState, now_ms: int) -> Steps[None]:
    """Remove topics and records of ended preparations, except segments in use."""
    if not group.large.leftovers or not group.housekeeping.is_due("leftovers of merges", now_ms, REMOVE_EVERY_MS):
        return
    busy = yield from LookAtPrepared()
    used = segments_in_use(group)
    for node, record in list(group.large.leftovers.items()):
        segments = [(item.stream, segment) for item in record.streams for segment in item.segments.values()]
        if node in busy or not used.isdisjoint(segments):
            continue
        if any(item.stream in group.unled for item in record.streams):
            continue  # which of them are in use cannot be told
        topics = [_topic(name, segment) for name, segment in segments if not _is_read(group, name, segment)]
        # One that is closed was in use: ZooKeeper may have been set back to before that.
        topics = sorted(set(topics) - (yield from Closed(topics))) if topics else []
        if topics and not (yield from DeleteTopics(topics)):
            return
        if not (yield from Write([DeleteNode(node)])):
            raise StaleStateError(f"{node} was removed by another leader")
        del group.large.leftovers[node]


def _topic(stream: str, segment: SegmentId) -> str:
    return StreamName.parse(stream).segment_topic(segment)


def _is_read(group: GroupState, stream: str, segment: SegmentId) -> bool:
    led = group.streams.get(stream)
    return led is not None and segment in led.history.graph.nodes
