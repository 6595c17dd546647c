"""Expiry of epochs in the simulation: the history as it would be without it, and what may not be dropped."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from coordinator.tests.sim_world import World
from rollbridge.buffer.frames import FrameKind, decode_begin, unpack_header
from rollbridge.metadata import paths
from rollbridge.metadata.changes import work_from_json
from rollbridge.metadata.records import DeleteNode, NodeOperation, SetNode, Truncation
from rollbridge.stream.epochs import EpochHistory, EpochRecord, without_epochs
from rollbridge.stream.names import GroupName, StreamName
from rollbridge.stream.reading import KeyLineage

epoch_of: Final = lru_cache(maxsize=1 << 12)(EpochRecord.from_json)
"""The record of an epoch, parsed once: everybody asks for the same ones again and again."""


def whole_history_of(world: World, stream: StreamName) -> EpochHistory:
    """A stream's epochs as they would be if none had ever been dropped."""
    prefix = f"{paths.epochs(stream)}/"
    records = tuple(epoch_of(value) for path, value in sorted(world.past.items()) if path.startswith(prefix))
    return EpochHistory(records, frozenset(world.lost.get(paths.truncation(stream), ())))


def check_drop(
    world: World, group: GroupName, stream: StreamName, truncation: Truncation, refused: Container[bytes]
) -> None:
    """Raise AssertionError if these epochs may not be dropped, or if something that lives gets another number.

    ``refused`` are transactions that sessions began which had been fenced before; nobody needs to open them.
    """
    whole = whole_history_of(world, stream)
    kept = truncation.history_of(whole.records)
    assert kept is not None, f"all epochs of {stream} are dropped"
    assert kept.active.reference_epoch >= kept.first, f"{stream} loses the epoch against which transactions begin"
    assert not {paths.committing(group), paths.scaling(group)} & world.nodes.keys(), (
        "epochs go in the middle of a change"
    )
    for title in world.children(paths.pending_changes(group)):
        work = work_from_json(title, world.nodes[f"{paths.pending_changes(group)}/{title}"])
        assert str(stream) not in work.streams, f"epochs of {stream} go in the middle of {title}"
    for segment in whole.segments().keys() - kept.segments().keys():
        assert segment in whole.removed, f"{segment} of {stream} is dropped with its records"
        assert stream.segment_topic(segment) not in world.topics, f"the topic of {segment} of {stream} is forgotten"
    for name, epoch in _undecided(world, group, refused):
        assert name != str(stream) or epoch >= kept.first, f"epoch {epoch} of {stream} has an open transaction"
    bases = whole.graph.sequence_bases
    same = {item: base for item, base in bases.items() if item in kept.segments()}  # not of what is not sealed yet
    assert kept.graph.sequence_bases == same, f"sequence ids of {stream} change"
    for position in {item.range.low for record in whole.records for item in record.segments}:
        lost = [item for item in KeyLineage(whole, position).stages if kept.is_dropped(item.segment) and item.end]
        end = lost[0].base + (lost[0].end or 0) if lost else 0
        assert KeyLineage(kept, position).dropped_end == end, f"{stream} forgets where at {position} records have been"


def spoiled(world: World, operations: Sequence[NodeOperation]) -> list[NodeOperation]:
    """What is written instead, if the world has a defect of that kind."""
    found = list(operations)
    for place, operation in enumerate(operations):
        if not isinstance(operation, SetNode) or not operation.path.endswith("/truncation"):
            continue
        truncation = Truncation.from_json(operation.value)
        if truncation.foundation is None or not any(isinstance(item, DeleteNode) for item in operations):
            continue
        scope, name = operation.path.split("/")[2:5:2]
        stream = StreamName(scope, name)
        if "baseless-expiry" in world.faults:
            zeros = replace(truncation.foundation, bases=(0,) * len(truncation.foundation.bases))
            found[place] = replace(operation, value=replace(truncation, foundation=zeros).to_json())
        if "forgetful-expiry" in world.faults:
            empty = replace(truncation.foundation, lows=(0.0,), ends=(0,))
            found[place] = replace(operation, value=replace(truncation, foundation=empty).to_json())
        if "greedy-expiry" in world.faults:
            whole = whole_history_of(world, stream)
            first = min(truncation.foundation.first + 3, whole.active.epoch)
            kept = without_epochs(whole, first)
            found[place] = replace(
                operation, value=Truncation(kept.removed, truncation.removing, kept.foundation).to_json()
            )
            found += [DeleteNode(paths.epoch(stream, item)) for item in range(truncation.foundation.first, first)]
    return found


def _undecided(world: World, group: GroupName, refused: Container[bytes]) -> Iterator[tuple[str, int]]:
    """Stream and reference epoch of what has a BEGIN frame in a buffer and no outcome on the commit log."""
    terminated = world.summary(group.commit_log_topic).terminated
    for name, log in world.topics.items():
        if not name.endswith(".transaction-buffer"):
            continue
        for entry in log.entries[log.start :]:
            header = unpack_header(entry.item[0])
            if header is None or header.kind is not FrameKind.BEGIN:
                continue
            if header.transaction not in terminated and header.transaction not in refused:
                yield from decode_begin(entry.item[1]).streams.items()
