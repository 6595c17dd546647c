"""Preparing: merge large transactions beside the line, into segments that nobody reads yet.

A preparation has a record in ZooKeeper before its topics are created, so that a new leader finds these. It uses none of
them: what a dead leader has appended is aborted when its transactional ids are taken, and readers would have to pass
it. It deletes them, and begins anew.

What cannot be appended is set aside as in any other round (:mod:`rollbridge_coordinator.procedures.refusals`).

See :mod:`rollbridge_coordinator.state.preparing`.
"""

from __future__ import annotations

import logging
from typing import Final

from rollbridge.model import paths
from rollbridge.model.changes import Merging
from rollbridge.model.ids import SegmentId
from rollbridge.model.names import StreamName
from rollbridge.model.pieces import BufferedTransaction
from rollbridge.model.records import CreateNode, DeleteNode, SetNode
from rollbridge.model.transaction import State
from rollbridge_coordinator.procedures.merge import items_of
from rollbridge_coordinator.procedures.refusals import absorb
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
from rollbridge_coordinator.state.group import GroupState, Preparation
from rollbridge_coordinator.state.planning import Targets
from rollbridge_coordinator.state.preparing import plan_preparation, prepared_topics, segments_in_use
from rollbridge_coordinator.state.streams import segment_topic_spec
from rollbridge_coordinator.state.upkeep import Rest

logger = logging.getLogger(__name__)

REMOVE_EVERY_MS: Final = 1_000
"""Interval at which what is left of preparations is removed: brokers take some time to delete topics."""


def prepare(group: GroupState, transaction: BufferedTransaction, now_ms: int) -> Steps[None]:
    """Begin to merge a large transaction beside the line."""
    record, configs = plan_preparation(group, transaction, now_ms)
    first = min(min(item.segments.values()) for item in record.streams)
    node = f"{paths.merging(group.name)}/{record.transaction}-{first.number}-{group.controller_epoch}"
    settings = [SetNode(paths.stream(config.name), config.to_json()) for config in configs]
    if not (yield from Write([*settings, CreateNode(node, record.to_json())])):
        raise StaleStateError(f"transaction {record.transaction} is merged by someone else")
    aims, topics = Targets(), []
    for config, prepared in zip(configs, record.streams, strict=True):
        group.streams[prepared.stream].config = config
        for number, segment in prepared.segments.items():
            aims.add(prepared.stream, number, segment, config.place(segment))
            topics.append(segment_topic_spec(config, segment))
    items, _ = items_of([transaction], aims)
    yield from Prepare(node, topics, items)
    group.preparations[transaction.id] = Preparation(node, record, items)
    group.counts["merges_beside_begun"] += 1


def follow_preparations(group: GroupState, now_ms: int) -> Steps[None]:
    """Take note of what has been appended beside the line, and of what could not be."""
    progress = yield from LookAtPrepared()
    for identifier in group.beside_rests.keys() - group.preparations.keys() - group.fold.open.keys():
        del group.beside_rests[identifier]
    for identifier, item in list(group.preparations.items()):
        transaction = group.fold.open.get(identifier)
        if transaction is None or transaction.state is not State.COMMITTING:
            yield from give_up(group, identifier)
            continue
        if item.rest is not None:
            if item.rest.is_over(now_ms):
                yield from give_up(group, identifier)  # and begin anew
            continue
        found = progress.get(item.node)
        if found is None or found.lost:
            why = "it was given up" if found is None else found.lost
            logger.info("%s: the merge of %s begins anew: %s", group.name, transaction.transaction_id, why)
            group.counts["merges_beside_lost"] += 1
            item.offsets, item.rest = None, Rest.after(group.beside_rests.get(identifier), now_ms)
            group.beside_rests[identifier] = item.rest
        elif found.refused is not None:
            yield from give_up(group, identifier)
            yield from absorb(group, [transaction], item.items, [len(item.items)], found.refused, now_ms, may_wait=True)
        else:
            item.offsets = found.offsets


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
        if raw is not None:
            group.leftovers[node] = Merging.from_json(raw)


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
