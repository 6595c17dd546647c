"""Streams that are not led: their data cannot be read, and their group is led without them.

A buffer may be deleted, or recreated by others; a right to read it, its partition leader or a valid batch may be
missing; a ZooKeeper node of the stream may be damaged, or of a newer release. That is the fault of one stream. So a
takeover loads each stream separately and leaves out unreadable ones, with a fault that gives the reason
(:data:`rollbridge.metadata.changes.UNLED`). A leader checks them at intervals, and the buffers of all others: after a
change it takes over again, so there is only one way in which a stream is included, or left out.

Nothing about a stream that is not led is changed: changes that name it are suspended, transactions that name it wait,
and its nodes, topics and journal are kept. There are two ways out:

- It can be read again. Then it is as if its leader had paused.
- It is deleted, or it is certain that its buffer is lost. Then its transactions end as aborted, as far as they are
  recorded: in other buffers, or in a node in ZooKeeper.

A missing buffer is certainly lost once that was seen twice: a broker may be behind.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from rollbridge.base.effects import Steps
from rollbridge.base.ids import TransactionId
from rollbridge.base.mapper import NodeRecord
from rollbridge.buffer.frames import REASON_CHARACTERS_MAX, BeginFrame
from rollbridge.buffer.table import State
from rollbridge.errors import CorruptDataError, InvalidNameError, NewerFormatError
from rollbridge.metadata import paths
from rollbridge.metadata.changes import (
    BUFFER_LOST,
    BUFFER_UNREADABLE,
    FORMAT_NEWER,
    METADATA_UNREADABLE,
    StreamFault,
    moved_fault,
)
from rollbridge.metadata.journal import is_deleted
from rollbridge.metadata.records import CreateNode, DeleteNode, NodeOperation, SetNode, TransactionRecord, Truncation
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.config import StreamState as Lifecycle
from rollbridge.stream.epochs import EpochRecord
from rollbridge.stream.late import LateNotes
from rollbridge.stream.names import StreamName
from rollbridge_coordinator.commit.refusals import FAULT_CHARACTERS_MAX, show_fault
from rollbridge_coordinator.core.effects import (
    CreateTopics,
    EffectRefusedError,
    EnsureNodes,
    LookAtTopics,
    Now,
    ReadNodes,
    TopicLook,
    Write,
    read_children,
)
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.stream_state import Doomed, LedStream, Unled, buffer_topic_spec, load_stream
from rollbridge_coordinator.core.waits import LEADERLESS, StaleStateError
from rollbridge_coordinator.history.commit_log import keep_emptied, may_have_ended
from rollbridge_coordinator.streams.pending_changes import take_out

logger = logging.getLogger(__name__)

LOOK_MS: Final = 5_000
"""Interval between checks of the streams that are not led, and of the buffers of the others."""
RECORDS_AT_ONCE: Final = 500

Reading = bytes | EffectRefusedError | None
"""Value of a node, None if it does not exist, or ZooKeeper's refusal."""


def load_streams(group: GroupState, unreadable: Mapping[str, str]) -> Steps[None]:
    """Load the streams of a group; unreadable ones are not led.

    Args:
        group: State of a group of which only the journal has been read.
        unreadable: Buffers that this process has failed to read, with the reasons.
    """
    now_ms = yield from Now()
    names = _valid(group, (yield from read_children(paths.streams(group.name.scope))))
    values = yield from _read_each([path for name in names for path in (paths.stream(name), paths.stream_fault(name))])
    for name in names:
        own, before = str(name), _fault_in(values[paths.stream_fault(name)])
        found = yield from _load(group, name, values[paths.stream(name)], now_ms)
        if isinstance(found, Doomed):
            group.doomed[own] = found
        elif isinstance(found, LedStream):
            group.streams[own] = found
            if before is not None:
                group.waits.faults.restore(own, before)
        elif found is not None:
            _exclude(group, Unled(found[0]), found[1], before)
    yield from _make_buffers(group, now_ms)
    looks = yield from LookAtTopics([item.config.buffer_topic for item in group.streams.values()], is_patient=True)
    for own, stream in list(group.streams.items()):
        topic, before = stream.config.buffer_topic, group.waits.faults.get(own)
        fault, is_watched = buffer_fault(stream.config, looks[topic], now_ms), True
        if fault is None and topic in unreadable:
            why = f"its transaction buffer, topic {topic}, cannot be read; the next leader tries: {unreadable[topic]}"
            fault, is_watched = StreamFault(why[:FAULT_CHARACTERS_MAX], BUFFER_UNREADABLE, topic, now_ms), False
        if fault is not None:
            del group.streams[own]
            is_lost = fault.code == BUFFER_LOST and bool(looks[topic].topic_id)  # another topic has its name
            _exclude(group, Unled(stream.config, is_lost, is_watched), fault, before)


def _make_buffers(group: GroupState, now_ms: int) -> Steps[None]:
    """Create the buffers that ``repair --commit-log`` has deleted; a stream whose buffer is refused is not led."""
    for own, stream in list(group.streams.items()):
        if stream.config.buffer_topic_id:
            continue
        topic = stream.config.buffer_topic
        try:
            ids = yield from CreateTopics([buffer_topic_spec(stream.config)])
        except EffectRefusedError as refused:
            del group.streams[own]
            why = f"its transaction buffer, topic {topic}, cannot be made; the next leader tries: {refused.reason}"
            fault = StreamFault(why[:FAULT_CHARACTERS_MAX], BUFFER_UNREADABLE, topic, now_ms)
            _exclude(group, Unled(stream.config, is_watched=False), fault, None)
            continue
        stream.config = replace(stream.config, buffer_topic_id=ids[topic])
        if not (yield from Write([SetNode(paths.stream(stream.config.name), stream.config.to_json())])):
            raise StaleStateError(f"stream {own} is gone")


def ensure_slots(group: GroupState) -> Steps[None]:
    """Create the missing parents of the slots of conditional writers.

    A restored stream lacks it, and where ACLs are in force conditional writers may not create it.
    """
    values = yield from _read_each([paths.cas_slots(item.config.name) for item in group.streams.values()])
    for path, value in values.items():
        if value is None:
            try:
                yield from EnsureNodes([path])
            except EffectRefusedError as refused:
                value = refused
        if isinstance(value, EffectRefusedError):
            logger.warning(
                'cas-slots.missing group=%s node=%s reason="%s": conditional writers may fail',
                group.name,
                path,
                value.reason,
            )


def show_unled(group: GroupState) -> Steps[None]:
    """Publish in ZooKeeper which streams are not led, and why."""
    for own in group.unled:
        fault = group.waits.faults.get(own)
        assert fault is not None
        yield from show_fault(group, own, fault)


def look_at_streams(group: GroupState, now_ms: int) -> Steps[None]:
    """Check at intervals what keeps streams from being led, and that the buffers of the others exist.

    The commit log, too: a takeover reports what has become of it.

    Raises:
        StaleStateError: a stream can be led again, or it or the group cannot be led any more.
    """
    if not group.housekeeping.is_due("streams that are not led", now_ms, LOOK_MS, at_once=False):
        return
    configs = [item.config for item in group.streams.values()] + [item.config for item in group.unled.values()]
    looks = yield from LookAtTopics([group.commit_log, *(config.buffer_topic for config in configs)])
    log = looks[group.commit_log]
    if not log.refused and log.topic_id != group.log.topic_id:
        raise StaleStateError(f"commit log {group.commit_log} was deleted, or created again")
    if not log.refused:
        yield from keep_emptied(group)
    for own, stream in group.streams.items():
        fault = buffer_fault(stream.config, looks[stream.config.buffer_topic], now_ms)
        if fault is not None and looks[stream.config.buffer_topic].refused != LEADERLESS:  # that passes by itself
            raise StaleStateError(f"stream {own} cannot be led any more: {fault.reason}")
    for own, item in list(group.unled.items()):
        name, before = item.config.name, group.waits.faults.get(own)
        if not item.is_watched or before is None:
            continue
        values = yield from _read_each([paths.stream(name)])
        found = yield from _load(group, name, values[paths.stream(name)], now_ms)
        look = looks[item.config.buffer_topic]
        fault = found[1] if isinstance(found, tuple) else buffer_fault(item.config, look, now_ms)
        if fault is None:
            raise StaleStateError(f"stream {own} can be led again")
        item.is_lost = item.is_lost or fault.code == before.code == BUFFER_LOST
        if (fault.code, fault.reason) != (before.code, before.reason):
            _exclude(group, item, fault, before)
            yield from show_fault(group, own, fault)
    yield from end_lost(group, now_ms)


def buffer_fault(config: StreamConfig, look: TopicLook, now_ms: int) -> StreamFault | None:
    """Return the fault of a stream's buffer; None if it exists and can be read."""
    topic = config.buffer_topic
    if look.refused:
        why = f"its transaction buffer, topic {topic}, cannot be read: {look.refused}; its transactions wait"
        return StreamFault(why, BUFFER_UNREADABLE, topic, now_ms)
    if look.topic_id == config.buffer_topic_id:
        return None
    is_what = "does not exist" if not look.topic_id else f"has id {look.topic_id} and not {config.buffer_topic_id}"
    why = (
        f"its transaction buffer, topic {topic}, {is_what}: it was deleted. What was committed is in its segments, "
        f"what was open is lost; {config.renewal}"
    )
    return StreamFault(why, BUFFER_LOST, topic, now_ms)


# Transactions


def end_lost(group: GroupState, now_ms: int) -> Steps[frozenset[bytes]]:
    """Decide that transactions end as aborted that are known to have lost frames.

    They are those that name a stream whose buffer is lost, and those that have a record in ZooKeeper and no outcome,
    though everything in the buffers has been folded.

    Returns:
        Recorded transactions that may be in a buffer which cannot be read now.
    """
    for transaction in list(group.fold.open.values()):
        lost = next((name for name in transaction.all_streams() if _is_lost(group, name)), None)
        if lost is not None and transaction.state is not State.ABORTING:
            yield from take_out(group, transaction)
            group.fold.refuse(transaction.id, _reason(group, lost), now_ms)
    return (yield from _end_unread(group, now_ms))


def end_of_stream(group: GroupState, own: str, now_ms: int) -> Steps[None]:
    """Decide that the transactions of a stream that is not led end as aborted, since it is being deleted."""
    group.unled[own].is_lost = True
    yield from end_lost(group, now_ms)


def _end_unread(group: GroupState, now_ms: int) -> Steps[frozenset[bytes]]:
    """Decide on those known only from a record in ZooKeeper; return those that must wait."""
    ended, waiting = group.fold.ended, set[bytes]()
    assert ended is not None
    missing = [item for item in group.records.recorded if item not in group.fold.open and item not in ended]
    for first in range(0, len(missing), RECORDS_AT_ONCE):
        part = [TransactionId.from_bytes(item) for item in missing[first : first + RECORDS_AT_ONCE]]
        values = yield from ReadNodes([paths.transaction(group.name, item) for item in part])
        for identifier, raw in zip(part, values.values(), strict=True):
            record = _record_in(raw)
            if record is None or ended.is_lost(identifier.bytes, record.begun_ms):
                continue
            if may_have_ended(group, identifier.bytes, record.client_name, is_open=False):
                continue
            if any(name in group.unled and not _is_lost(group, name) for name in record.streams):
                waiting.add(identifier.bytes)
                continue
            lost = next((name for name in record.streams if _is_lost(group, name)), None)
            begin = BeginFrame(record.client_name, record.client_epoch, record.label, record.lease_ms, record.streams)
            group.fold.bring_back(identifier.bytes, begin, record.begun_ms, _reason(group, lost), now_ms)
    return frozenset(waiting)


def _is_lost(group: GroupState, own: str) -> bool:
    item = group.unled.get(own)
    return item is not None and item.is_lost


def _reason(group: GroupState, lost: str | None) -> str:
    if lost is None:
        return "lost: its frames are no longer in the buffers of its streams, which others have emptied"
    fault = group.waits.faults.get(lost)
    why = f"lost with stream {lost}: {'' if fault is None else fault.reason}"
    return why[:REASON_CHARACTERS_MAX]


def _record_in(raw: bytes | None) -> TransactionRecord | None:
    with suppress(CorruptDataError):
        return None if raw is None else TransactionRecord.from_json(raw)
    return None


# Deletion


def mended_nodes(group: GroupState, name: StreamName) -> Steps[list[NodeOperation]]:
    """Return the writes that restore the nodes of an unreadable stream to their last journaled values, if any.

    Without these a stream with damaged nodes could not be deleted: they name its topics.
    """
    journaled = group.journal.nodes
    kinds: dict[str, type[NodeRecord]] = {path: EpochRecord for path in journaled if _is_epoch(name, path)}
    kinds |= {paths.truncation(name): Truncation, paths.late(name): LateNotes}
    operations: list[NodeOperation] = []
    for path, value in (yield from ReadNodes(sorted(kinds))).items():
        known = journaled.get(path)
        if known is not None and value is None:
            operations.append(CreateNode(path, known))
        elif value is not None and not _can_be_read(kinds[path], path, value):
            operations.append(DeleteNode(path) if known is None else SetNode(path, known))
    return operations


def _is_epoch(name: StreamName, path: str) -> bool:
    return path.startswith(f"{paths.epochs(name)}/")


def _can_be_read(kind: type[NodeRecord], path: str, value: bytes) -> bool:
    try:
        found = kind.from_json(value)
    except CorruptDataError:
        return False
    return not isinstance(found, EpochRecord) or path.endswith(f"/{found.epoch:010d}")


# Reading


def _valid(group: GroupState, names: Iterable[str]) -> list[StreamName]:
    found = []
    for item in names:
        try:
            found.append(StreamName(group.name.scope, item))
        except InvalidNameError as fault:
            logger.warning('node.ignored group=%s reason="%s"', group.name, fault)
    return found


def _read_each(nodes: Sequence[str]) -> Steps[dict[str, Reading]]:
    try:
        return dict((yield from ReadNodes(nodes)))
    except EffectRefusedError as refused:
        if len(nodes) == 1:
            return {nodes[0]: refused}
    found: dict[str, Reading] = {}
    for node in nodes:
        found |= yield from _read_each([node])
    return found


def _load(
    group: GroupState, name: StreamName, raw: Reading, now_ms: int
) -> Steps[LedStream | Doomed | tuple[StreamConfig, StreamFault] | None]:
    """Return a stream; or its settings, and why it cannot be read; None if it is not this group's."""
    config = _journaled(group, name)
    try:
        if raw is None:
            return None
        if isinstance(raw, EffectRefusedError):
            raise raw
        found = StreamConfig.from_json(raw)
        if found.name != name:
            raise CorruptDataError(f"{paths.stream(name)} holds the settings of stream {found.name}")
        config = found
        if config.group != group.name:
            return None
        if config.state is Lifecycle.DELETING:
            return Doomed(config)
        if config.was_moved:
            return config, moved_fault(name, now_ms)
        return (yield from load_stream(config))
    except NewerFormatError as fault:
        code, why = FORMAT_NEWER, f"{fault}; upgrade all coordinators"
    except CorruptDataError as fault:
        code, why = METADATA_UNREADABLE, str(fault)
    except EffectRefusedError as refused:
        code, why = METADATA_UNREADABLE, refused.reason
    if config is None:
        logger.warning('stream.ignored group=%s stream=%s reason="%s"', group.name, name, why)
        return None
    why = f"what ZooKeeper holds of it cannot be read: {why}"
    return config, StreamFault(why[:FAULT_CHARACTERS_MAX], code, "", now_ms)


def _journaled(group: GroupState, name: StreamName) -> StreamConfig | None:
    """Return the settings of a stream from the journal of its group; None if it has none."""
    raw = group.journal.nodes.get(paths.stream(name))
    with suppress(CorruptDataError):
        return None if raw is None or is_deleted(raw) else StreamConfig.from_json(raw)
    return None


def _fault_in(raw: Reading) -> StreamFault | None:
    with suppress(CorruptDataError):  # the next one is written over a damaged one
        return StreamFault.from_json(raw) if isinstance(raw, bytes) else None
    return None


def _exclude(group: GroupState, item: Unled, fault: StreamFault, before: StreamFault | None) -> None:
    """Record that a stream is not led; if the reason is the same as before, with its first time."""
    own = str(item.config.name)
    if before is not None and before.code == fault.code:
        fault = replace(fault, since_ms=before.since_ms)
    group.unled[own] = item
    group.waits.faults.exclude(own, fault)
