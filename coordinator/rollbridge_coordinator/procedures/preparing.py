"""Preparing: merge large transactions beside the line, into segments that nobody reads yet.

A preparation has a record in ZooKeeper before its topics are created, so that a new leader finds these. It uses none of
them: what a dead leader has appended is aborted when its transactional ids are taken, and readers would have to pass
it. It deletes them, and begins anew.

What cannot be appended is set aside as in any other round (:mod:`rollbridge_coordinator.procedures.refusals`). A merge
that was in vain for another reason begins again: each time after a longer rest, and :data:`TIMES_MAX` times at most.

See :mod:`rollbridge_coordinator.state.preparing`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from rollbridge.errors import CorruptDataError
from rollbridge.model import paths
from rollbridge.model.changes import Merging
from rollbridge.model.ids import SegmentId
from rollbridge.model.names import StreamName
from rollbridge.model.pieces import BufferedTransaction
from rollbridge.model.records import CreateNode, DeleteNode, SetNode, StreamConfig
from rollbridge.model.transaction import State
from rollbridge_coordinator.procedures.merge import items_of
from rollbridge_coordinator.procedures.refusals import absorb, refuse
from rollbridge_coordinator.state.effects import (
    Closed,
    DeleteTopics,
    GiveUp,
    LookAtPrepared,
    Prepare,
    ReadNodes,
    Steps,
    Write,
    read_children,
)
from rollbridge_coordinator.state.faults import StaleStateError
from rollbridge_coordinator.state.group import GroupState, MergeRetry, Preparation
from rollbridge_coordinator.state.planning import Targets, why_waits
from rollbridge_coordinator.state.preparing import prepared_topics, segments_in_use
from rollbridge_coordinator.state.streams import segment_topic_spec
from rollbridge_coordinator.state.upkeep import Rest

logger = logging.getLogger(__name__)

REMOVE_EVERY_MS: Final = 1_000
"""Interval at which what is left of preparations is removed: brokers take some time to delete topics."""


TIMES_MAX: Final = 20
"""Merges in vain after which a transaction is aborted; with the rests between them a quarter of an hour at least."""


def prepare(
    group: GroupState,
    transaction: BufferedTransaction,
    record: Merging,
    configs: Sequence[StreamConfig],
    instead_of: bytes | None,
    now_ms: int,
) -> Steps[None]:
    """Begin to merge a large transaction beside the line, as planned."""
    if instead_of is not None:
        yield from _give_place(group, instead_of, transaction, now_ms)
    first = min(min(item.segments.values()) for item in record.streams)
    node = f"{paths.merging(group.name)}/{record.transaction}-{first.number}-{group.controller_epoch}"
    settings = [SetNode(paths.stream(config.name), config.to_json()) for config in configs]
    if not (yield from Write([*settings, CreateNode(node, record.to_json())])):
        raise StaleStateError(f"transaction {record.transaction} is merged by someone else")
    aims, topics = Targets(), []
    for config, prepared in zip(configs, record.streams, strict=True):
        group.streams[prepared.stream].config = config
        for number, segment in prepared.segments.items():
            aims.add(config, number, segment)
            topics.append(segment_topic_spec(config, segment))
    items, _ = items_of([transaction], aims)
    yield from Prepare(node, topics, items, aims.stamped)
    group.preparations[transaction.id] = Preparation(node, record, items)
    group.counts["merges_beside_begun"] += 1


def follow_preparations(group: GroupState, now_ms: int) -> Steps[None]:
    """Take note of what has been appended beside the line, and of what could not be."""
    progress = yield from LookAtPrepared()
    for identifier, retry in list(group.merge_retries.items()):
        if identifier not in group.fold.open:
            del group.merge_retries[identifier]
        elif retry.rest.is_over(now_ms):
            retry.is_due = True
    for identifier, item in list(group.preparations.items()):
        transaction = group.fold.open.get(identifier)
        if transaction is None or transaction.state is not State.COMMITTING:
            yield from give_up(group, identifier)
            continue
        found = progress.get(item.node)
        if found is None or found.lost:
            yield from _begin_again(group, transaction, "it was given up" if found is None else found.lost, now_ms)
        elif found.refused is not None:
            logger.info(
                "%s: the merge of transaction %s beside those of others was refused: %s",
                group.name,
                transaction.transaction_id,
                found.refused,
            )
            yield from give_up(group, identifier)
            yield from absorb(group, [transaction], item.items, [len(item.items)], found.refused, now_ms, may_wait=True)
        else:
            item.offsets = found.offsets


def _give_place(group: GroupState, identifier: bytes, other: BufferedTransaction, now_ms: int) -> Steps[None]:
    """Give the place of a preparation that waits for something else to another large transaction."""
    transaction = group.fold.open.get(identifier)
    if transaction is None or transaction.state is not State.COMMITTING:
        yield from give_up(group, identifier)
        return
    waits = why_waits(group, transaction) or "others"
    why = f"it gave its place to transaction {other.transaction_id} while it waited for {waits}"
    yield from _begin_again(group, transaction, why, now_ms)


def _begin_again(group: GroupState, transaction: BufferedTransaction, why: str, now_ms: int) -> Steps[None]:
    """Give up a merge that was in vain, to begin again after a rest; abort the transaction if that was so too often."""
    yield from give_up(group, transaction.id)
    group.counts["merges_beside_lost"] += 1
    last = group.merge_retries.get(transaction.id)
    rest = Rest.after(None if last is None else last.rest, now_ms)
    if rest.times >= TIMES_MAX:
        refuse(group, transaction, f"its records were merged {rest.times} times, each time in vain: {why}", now_ms)
        return
    group.merge_retries[transaction.id] = MergeRetry(rest, why)
    logger.info(
        "%s: the merge of transaction %s begins again in %g s at the earliest, after %d of %d times at most: %s",
        group.name,
        transaction.transaction_id,
        rest.length_ms / 1000,
        rest.times,
        TIMES_MAX,
        why,
    )


def give_up(group: GroupState, identifier: bytes) -> Steps[None]:
    """End a preparation; what is left of it is removed later."""
    item = group.preparations.pop(identifier)
    yield from GiveUp(item.node)
    group.leftovers[item.node] = item.record


def give_up_stream(group: GroupState, stream: StreamName) -> Steps[list[str] | None]:
    """End all preparations for a stream that is being deleted; return their topics, None while some are still made."""
    for identifier, item in list(group.preparations.items()):
        if any(prepared.stream == str(stream) for prepared in item.record.streams):
            yield from give_up(group, identifier)
    topics = prepared_topics(group, stream)
    if topics and not topics.keys().isdisjoint((yield from LookAtPrepared())):
        return None
    return [topic for own in topics.values() for topic in own]


def load_merging(group: GroupState) -> Steps[None]:
    """Load what earlier leaders were preparing, to be removed."""
    parent = paths.merging(group.name)
    nodes = [f"{parent}/{name}" for name in (yield from read_children(parent))]
    for node, raw in (yield from ReadNodes(nodes)).items():
        try:
            if raw is not None:
                group.leftovers[node] = Merging.from_json(raw)
        except CorruptDataError as fault:
            logger.warning("%s: the topics that %s names are left alone: %s", group.name, node, fault)


def remove_leftovers(group: GroupState, now_ms: int) -> Steps[None]:
    """Remove topics and records of preparations that have ended, but for segments that are in use by now."""
    if not group.leftovers or not group.housekeeping.is_due("leftovers of merges", now_ms, REMOVE_EVERY_MS):
        return
    busy = yield from LookAtPrepared()
    used = segments_in_use(group)
    for node, record in list(group.leftovers.items()):
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
            raise StaleStateError(f"{node} was removed by someone else")
        del group.leftovers[node]


def _topic(stream: str, segment: SegmentId) -> str:
    return StreamName.parse(stream).segment_topic(segment)


def _is_read(group: GroupState, stream: str, segment: SegmentId) -> bool:
    """Return True if a segment is part of its stream; the topic of one that was, and was dropped since, is gone."""
    led = group.streams.get(stream)
    return led is not None and segment in led.history.graph.nodes
