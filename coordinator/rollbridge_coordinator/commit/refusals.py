"""Refusals of a round: find the transaction or the stream at fault and set it aside, so that all others continue.

Three things can be at fault, and Kafka's answer, or a probe, tells which:

- the frames of one transaction: it ends as aborted, with Kafka's reason;
- a topic: its stream is put into an error state, in which its transactions wait until the topic works again;
- the native transaction as a whole, which a broker has aborted because it was open too long: the round is repeated for
  one transaction at a time, and the one for which that happens again ends as aborted.

A refusal by the commit log stops the group, because nothing can be decided without it.

Kafka may also refuse to seal what a rolling commit has left open. By then the commit is visible, so there is no way
back: the stream is in an error state, and readers wait at the unsealed segments, until they can be sealed. The history
shows them: an epoch without sealed ends though segments ended with it.

So it is with housekeeping: what is refused about one stream is postponed for that stream alone.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeVar

from rollbridge.base.effects import Steps
from rollbridge.buffer.frames import REASON_CHARACTERS_MAX
from rollbridge.buffer.state import BufferedTransaction
from rollbridge.buffer.table import AbortCause, State
from rollbridge.metadata import paths
from rollbridge.metadata.changes import SUSPENDED, StreamFault
from rollbridge.metadata.records import CreateNode, DeleteNode, SetNode
from rollbridge.stream.names import Partition, StreamName
from rollbridge_coordinator.commit.plan import targets
from rollbridge_coordinator.core.effects import (
    ROUND,
    STUMBLED,
    AbortRound,
    AppendMessages,
    EffectRefusedError,
    Items,
    Look,
    LookAtTopics,
    MendTopics,
    MergeFrames,
    Messages,
    Seal,
    TopicIds,
    Write,
    read_node,
)
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.stream_state import LedStream, segment_topic_spec
from rollbridge_coordinator.core.waits import LEADERLESS, StaleStateError

logger = logging.getLogger(__name__)

T = TypeVar("T")


def apart(group: GroupState, stream: str, task: str, part: Steps[T]) -> Steps[T | None]:
    """Do what a chore does for one stream; return None after a refusal, which holds up no other stream."""
    try:
        return (yield from part)
    except EffectRefusedError as refused:
        yield from clear_away(group)
        logger.warning('housekeeping.refused group=%s stream=%s task="%s": %s', group.name, stream, task, refused)
        return None


def clear_away(group: GroupState) -> Steps[None]:
    """Leave nothing of a refused chore in the round."""
    yield from AbortRound()
    group.forget_round()
    group.counts["chores_refused"] += 1


def unsealed_fault(since_ms: int) -> StreamFault:
    """Return the error state of a stream with segments left to seal."""
    return StreamFault("segments of a rolling commit are not sealed yet", "", "", since_ms)


def seal_left(group: GroupState, stream: LedStream) -> Steps[None]:
    """Seal the segments that a rolling commit has left open, and publish their ends.

    Raises:
        Refused: Kafka still refuses, or native transactions of others are open on them.
    """
    for record in stream.history.unsealed():
        closed = stream.places_of(stream.history.ended_with(record.epoch))
        ends = yield from Seal(list(closed.values()))
        held = sorted(set(closed.values()) - ends.keys())
        if held:
            why = "native transactions of others are open on what is to be sealed"
            raise EffectRefusedError(Seal(tuple(held)), why, code=SUSPENDED, topic=held[0][0])
        group.predictor.forget(closed.values())
        history = stream.history.with_sealed_ends(record.epoch, {item: ends[place] for item, place in closed.items()})
        complete = history.record(record.epoch)
        if not (yield from Write([SetNode(paths.epoch(stream.config.name, record.epoch), complete.to_json())])):
            raise StaleStateError(f"epoch {record.epoch} of {stream.config.name} is gone")
        stream.history = history


FAULT_CHARACTERS_MAX: Final = 10_000
"""Longest reason of a stream's error state, in characters."""
PROBE: Final = ((b"rollbridge", None),)
"""Record of a probe, always aborted. It has a key, because compacted topics take no record without one; and its value
is empty, because readers that ask for aborted records, of adopted topics too, decode no value of ours.
"""
ROUNDS_MAX: Final = 2
"""Refusals of a round as a whole after which its transaction is refused."""


def absorb(
    group: GroupState,
    transactions: Sequence[BufferedTransaction],
    items: Items,
    ends: Sequence[int],
    refused: EffectRefusedError,
    now_ms: int,
    *,
    may_wait: bool,
) -> Steps[bool]:
    """Set aside the transaction or stream at fault for the refusal of a round.

    Args:
        items: Frames of the transactions, with their partitions.
        ends: For each transaction the index at which its items end.
        may_wait: True if the round can be given up, so that its transactions are planned again. If not, the
            transactions of a stream at fault are refused.

    Returns:
        True if the rest of the round is to be repeated now.

    Raises:
        Refused: nothing can be set aside: the group's own topics are refused.
    """
    group.counts["rounds_refused"] += 1
    group.forget_round()
    group.predictor.forget({place for place, _ in items})
    if isinstance(refused.effect, Look):
        yield from AbortRound()  # a refused look leaves the round open
        (transaction,) = transactions
        name = group.stream_of(refused.topic) if refused.topic is not None else None
        if refused.code == LEADERLESS and name is not None and may_wait:
            yield from note_fault(group, name, f"its segments cannot be read: {refused.reason}", refused, now_ms)
            return False
        refuse(group, transaction, f"its conditions cannot be checked: {refused.reason}", now_ms)
        return True
    if not isinstance(refused.effect, ROUND):
        raise refused
    if refused.topic is None:
        return _whole(group, transactions, refused, now_ms, may_wait=may_wait)
    name = group.stream_of(refused.topic)
    if name is None or refused.topic not in {topic for (topic, _), _ in items}:
        raise refused
    if group.streams[name].config.topic == refused.topic:
        group.housekeeping.done_ms.pop("topics", None)  # its owner may have changed what it takes: look now
    reason = f"refused by Kafka: {refused.code}: {refused.reason}"
    if refused.places:
        place, wrong = yield from _single_out(group, items, refused)
        if place is not None:
            refuse(group, transactions[bisect_right(ends, place)], reason, now_ms)
            return True
        if isinstance(wrong, EffectRefusedError):
            refused, reason = wrong, f"refused by Kafka: {wrong.code}: {wrong.reason}"
        elif wrong:
            reason = f"{reason}; {wrong}"
    if may_wait:
        yield from note_fault(group, name, reason, refused, now_ms)
        return False
    start = 0
    for transaction, end in zip(transactions, ends, strict=True):
        if any(items[place][0][0] == refused.topic for place in range(start, end)):
            refuse(group, transaction, reason, now_ms)
        start = end
    return True


def refuse(group: GroupState, transaction: BufferedTransaction, reason: str, now_ms: int) -> None:
    group.fold.refuse(transaction.id, reason[:REASON_CHARACTERS_MAX], now_ms, AbortCause.REFUSED)
    group.counts["transactions_refused"] += 1


def _whole(
    group: GroupState,
    transactions: Sequence[BufferedTransaction],
    refused: EffectRefusedError,
    now_ms: int,
    *,
    may_wait: bool,
) -> bool:
    """Handle the refusal of a native transaction as a whole; return True if the round is to be repeated now."""
    group.waits.failed_rounds.update(item.id for item in transactions)
    merging = [item for item in transactions if item.state is State.COMMITTING]
    often = max((group.waits.failed_rounds[item.id] for item in transactions), default=0)
    if len(merging) == 1 and often >= ROUNDS_MAX:
        reason = f"its merge was refused {often} times, it may take longer than a native transaction may: "
        refuse(group, merging[0], reason + refused.reason, now_ms)
        return True
    if not may_wait and often >= ROUNDS_MAX and merging:  # they cannot be merged one by one, so refuse the largest
        reason = f"a rolling commit of {len(merging)} transactions was refused {often} times, and this is the largest: "
        refuse(group, max(merging, key=lambda item: item.bytes), reason + refused.reason, now_ms)
        return True
    if often > ROUNDS_MAX:
        raise refused
    return len(transactions) == 1 or not may_wait


def _single_out(
    group: GroupState, items: Items, refused: EffectRefusedError
) -> Steps[tuple[int | None, str | EffectRefusedError]]:
    """Find the item at fault for its content; return its index, or None and why the topic is at fault.

    Small frames of many transactions are joined in one batch, and Kafka refuses the batch. Halves of it are appended,
    and aborted, until one frame is left: about log2(frames) appends.
    """
    topic = refused.topic or ""
    wrong = yield from _wrong_with(group, topic)
    if wrong:
        return None, wrong
    places = list(refused.places)
    known = len(places) == 1 and refused.code != STUMBLED
    while len(places) > 1:
        half = places[: len(places) // 2]
        answer = yield from _try(group, [items[place] for place in half])
        if answer is None:
            places, known = places[len(half) :], False
        elif answer.places:
            places = [half[place] for place in answer.places]
            known = len(places) == 1 and answer.code != STUMBLED
        else:
            return None, answer if answer.topic == refused.topic else answer.reason
    if not known and (yield from _try(group, [items[places[0]]])) is None:
        return None, "each of its frames is taken alone"
    return places[0], ""


def _try(group: GroupState, items: Items) -> Steps[EffectRefusedError | None]:
    """Append frames and abort them; return their refusal, None if they were taken."""
    try:
        aims = targets(group)
        yield from MergeFrames(items, aims.rooms, aims.stamped)
    except EffectRefusedError as refused:
        return refused
    yield from AbortRound()
    return None


def probe(group: GroupState, places: Sequence[Partition]) -> Steps[None]:
    """Check that the partitions and the commit log take records; the records of the probe are aborted.

    If the outcome of an append is unknown, the term ends before any transaction is suspected; the round handles a
    refusal.
    """
    group.predictor.log_end = None
    group.predictor.forget(places)
    try:
        for topic, number in (*places, (group.commit_log, 0)):
            yield from AppendMessages(Messages(topic, PROBE, number))
    except EffectRefusedError:
        return
    yield from AbortRound()


def _wrong_with(group: GroupState, topic: str) -> Steps[str]:
    """Return how a segment's topic differs from this version's specification; empty if not, or if deleted."""
    stream = group.streams[group.stream_of(topic) or ""]
    places = stream.config.places
    segment = places.segment_at((topic, 0))
    if segment is None or places.is_adopted(segment):
        return ""  # an adopted topic is as its owner wants it
    try:
        wrong = yield from MendTopics([segment_topic_spec(stream.config, segment)])
    except EffectRefusedError:
        return ""  # the topic may not be described; the earlier refusal says more
    return f"topic {topic}: {wrong[topic]}" if wrong and topic in wrong else ""


def note_fault(group: GroupState, stream: str, reason: str, refused: EffectRefusedError, now_ms: int) -> Steps[None]:
    """Put a stream into an error state, and publish that in ZooKeeper."""
    fault = StreamFault(reason[:FAULT_CHARACTERS_MAX], refused.code, refused.topic or "", now_ms)
    if stream not in group.streams or not group.waits.faults.note(stream, fault, now_ms):
        return
    group.counts["stream_faults"] += 1
    yield from show_fault(group, stream, fault)


def show_fault(group: GroupState, stream: str, fault: StreamFault) -> Steps[None]:
    """Write a stream's error state to ZooKeeper, where ``stream describe`` and the doctor find it."""
    path = paths.stream_fault(StreamName.parse(stream))
    # If the write does not apply, or is refused, the stream waits all the same, only without being shown.
    with suppress(EffectRefusedError):
        present = yield from read_node(path)
        yield from Write([CreateNode(path, fault.to_json()) if present is None else SetNode(path, fault.to_json())])


def try_again(group: GroupState, now_ms: int) -> Steps[list[str]]:
    """Lift the error states that are due for a retry, if the topic at fault takes records again.

    Returns:
        Names of streams with an active segment that still takes no records.
    """
    stuck: list[str] = []
    for name in group.waits.faults.due(now_ms) if group.waits.faults else ():
        if name in group.unled:
            continue
        fault = group.waits.faults.get(name)
        stream = group.streams.get(name)
        if fault is None or stream is None:
            group.waits.faults.forget(name)
            continue
        unsealed = [stream.history.ended_with(record.epoch) for record in stream.history.unsealed()]
        if unsealed:
            closed = {place[0] for ends in unsealed for place in stream.places_of(ends).values()}
            if (yield from _lacks_brokers(closed)):
                group.waits.faults.note(name, fault, now_ms)
                continue
            try:
                yield from seal_left(group, stream)
            except EffectRefusedError as refused:
                group.waits.faults.note(name, fault, now_ms)
                if refused.code != fault.code:
                    fault = replace(fault, reason=refused.reason[:FAULT_CHARACTERS_MAX], code=refused.code)
                    group.waits.faults.restore(name, fault)
                    yield from show_fault(group, name, fault)
                continue
        active = stream.places_of(stream.history.active.segments).values()
        at_fault = [place for place in active if place[0] == fault.topic]
        if at_fault and not (yield from _takes_records(group, at_fault)):
            group.waits.faults.note(name, fault, now_ms)
            stuck.append(name)
            continue
        group.waits.faults.lift(name)
        yield from hide_fault(stream.config.name)
    return stuck


def hide_fault(stream: StreamName) -> Steps[None]:
    """Remove a stream's error state from ZooKeeper."""
    path = paths.stream_fault(stream)
    with suppress(EffectRefusedError):
        if (yield from read_node(path)) is not None:
            yield from Write([DeleteNode(path)])


def _lacks_brokers(topics: Collection[str]) -> Steps[bool]:
    """Return True if a topic has a partition without a leader, or with too few in-sync replicas.

    A request to the first delays the group for seconds, one to the second locks a transactional id.
    """
    looks = yield from LookAtTopics(sorted(topics), is_patient=False)
    return any(look.lacks for look in looks.values())


def _takes_records(group: GroupState, places: Sequence[Partition]) -> Steps[bool]:
    group.predictor.forget(places)
    topic = places[0][0]
    try:
        if topic not in (yield from TopicIds([topic])) or (yield from _wrong_with(group, topic)):
            return False
        if (yield from _lacks_brokers([topic])):
            return False
        for _, number in places:
            yield from AppendMessages(Messages(topic, PROBE, number))
    except EffectRefusedError:
        return False
    yield from AbortRound()
    return True


def give_up_waiting(group: GroupState, now_ms: int) -> None:
    """Abort the transactions that wait for a stream in an error state and whose leases have run out.

    Transactions of a suspended stream are spared: native transactions of others end without help, and then these can be
    committed as requested. So are those of a stream not retried yet, as when the change that suspended it is done, and
    an earlier rolling commit has left segments to seal.
    """
    if not group.waits.faults:
        return
    for transaction in list(group.fold.decided.values()):
        if group.is_rolling(transaction):
            continue  # a suspended rolling commit names it, and must release it first
        name = group.waits_for(transaction)
        fault = None if name is None else group.waits.faults.get(name)
        if fault is None or name is None or group.is_suspended(name) or fault.code == SUSPENDED:
            continue
        if not group.waits.faults.is_tried(name):
            continue
        if transaction.deadline_ms < now_ms:
            refuse_waiting(group, transaction, name, now_ms)


def refuse_lost(group: GroupState, stream: str, reason: str, now_ms: int) -> None:
    """Decide that transactions end as aborted whose commits wait for a stream that has lost its topic for good.

    Call it only right after a check: an earlier leader may have asked a broker that did not know the topic yet.
    """
    for transaction in list(group.fold.decided.values()):
        if group.waits_for(transaction) == stream and not group.is_rolling(transaction):
            refuse(group, transaction, f"stream {stream} has lost its topic: {reason}", now_ms)


def refuse_waiting(group: GroupState, transaction: BufferedTransaction, stream: str, now_ms: int) -> None:
    """Decide that a transaction ends as aborted whose lease has run out while a stream was in an error state."""
    fault = group.waits.faults.get(stream)
    why = "" if fault is None else fault.reason
    refuse(group, transaction, f"expired while stream {stream} was in an error state: {why}", now_ms)
