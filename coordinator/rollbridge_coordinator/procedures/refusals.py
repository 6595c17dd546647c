"""Refusals of a round: the transaction or the stream at fault is found and set aside, and all others go on.

Three things can be at fault, and Kafka's answer, or a closer look, tells which:

- what is in the frames of one transaction: it ends as aborted, with Kafka's reason;
- a topic: its stream is put into an error state, in which its transactions wait until it works again;
- the native transaction as a whole, which a broker has aborted because it was open too long: it is done again for one
  transaction at a time, and the one for which that happens again ends as aborted.

What the commit log refuses stops the group, because nothing can be decided without it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from rollbridge.model import paths
from rollbridge.model.changes import SUSPENDED, StreamFault
from rollbridge.model.frames import REASON_CHARACTERS_MAX
from rollbridge.model.names import StreamName, parse_segment_topic
from rollbridge.model.pieces import BufferedTransaction, FrameRef
from rollbridge.model.records import CreateNode, DeleteNode, SetNode
from rollbridge.model.transaction import State
from rollbridge_coordinator.state.effects import (
    ROUND,
    STUMBLED,
    AbortRound,
    AppendMessages,
    Look,
    MendTopics,
    MergeFrames,
    Messages,
    Refused,
    Seal,
    Steps,
    TopicIds,
    Write,
    read_node,
)
from rollbridge_coordinator.state.faults import LEADERLESS, StaleStateError
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.streams import StreamState, segment_topic_spec

# --------------------------------------------------------------------------------------------------------------------
# Sealing what a rolling commit has left open, because Kafka refused to seal it.
# By then the commit is visible, so there is no way back: its stream is in an error state, and readers wait at what is
# not sealed, until it can be. The history says what that is: an epoch without ends though segments ended with it.


def unsealed_fault(since_ms: int) -> StreamFault:
    """The error state of a stream of which something is left open."""
    return StreamFault("segments of a rolling commit are not sealed yet", "", "", since_ms)


def seal_left(group: GroupState, stream: StreamState) -> Steps[None]:
    """Seal what is left open of a stream, and publish where it ends.

    Raises:
        Refused: It is refused still.
    """
    for record in stream.history.unsealed():
        closed = {item.id: stream.topic_of(item.id) for item in stream.history.ended_with(record.epoch)}
        ends = yield from Seal(list(closed.values()))
        held = sorted(set(closed.values()) - ends.keys())
        if held:
            why = "native transactions of others are open on what is to be sealed"
            raise Refused(Seal(tuple(held)), why, code=SUSPENDED, topic=held[0])
        group.forecast.forget(closed.values())
        history = stream.history.with_sealed_ends(record.epoch, {item: ends[topic] for item, topic in closed.items()})
        complete = history.record(record.epoch)
        if not (yield from Write([SetNode(paths.epoch(stream.config.name, record.epoch), complete.to_json())])):
            raise StaleStateError(f"epoch {record.epoch} of {stream.config.name} is gone")
        stream.history = history


Items = Sequence[tuple[str, FrameRef]]

FAULT_CHARACTERS_MAX: Final = 10_000
"""Of what is said of a stream in an error state."""
ROUNDS_MAX: Final = 2
"""How often the round of one transaction may be refused as a whole before the transaction is."""


def absorb(
    group: GroupState,
    transactions: Sequence[BufferedTransaction],
    items: Items,
    ends: Sequence[int],
    refused: Refused,
    now_ms: int,
    *,
    may_wait: bool,
) -> Steps[bool]:
    """Set aside who is at fault for the refusal of a round; whether it is to be done again now, with the others.

    Args:
        group: State of the group.
        transactions: Those of the round.
        items: Their frames, with their topics.
        ends: Where among the items those of each transaction end.
        refused: What was refused.
        now_ms: Clock of the leader.
        may_wait: Whether the round can be given up, so that what it holds is planned anew. If not, the transactions
            of a stream at fault are refused.

    Raises:
        Refused: Nobody can be set aside: the group's own topics are refused.
    """
    group.counts["rounds_refused"] += 1
    group.doubts.end()
    group.log_end = group.draft = None
    group.forecast.forget({topic for topic, _ in items})
    if isinstance(refused.effect, Look):
        yield from AbortRound()  # what was appended is still there
        (transaction,) = transactions
        if refused.code == LEADERLESS and refused.topic is not None and may_wait:
            stream, _ = parse_segment_topic(refused.topic)
            yield from note_fault(
                group, str(stream), f"its segments can not be looked at: {refused.reason}", refused, now_ms
            )
            return False
        refuse(group, transaction, f"its conditions can not be looked at: {refused.reason}", now_ms)
        return True
    if not isinstance(refused.effect, ROUND):
        raise refused
    if refused.topic is None:
        return _whole(group, transactions, refused, now_ms, may_wait=may_wait)
    if refused.topic not in {topic for topic, _ in items}:
        raise refused
    stream, _ = parse_segment_topic(refused.topic)
    name = str(stream)
    reason = f"refused by Kafka: {refused.code}: {refused.reason}"
    if refused.places:
        place, wrong = yield from _single_out(group, items, refused)
        if place is not None:
            refuse(group, transactions[bisect_right(ends, place)], reason, now_ms)
            return True
        reason = f"{reason}; {wrong}" if wrong else reason
    if may_wait:
        yield from note_fault(group, name, reason, refused, now_ms)
        return False
    start = 0
    for transaction, end in zip(transactions, ends, strict=True):
        if any(items[place][0] == refused.topic for place in range(start, end)):
            refuse(group, transaction, reason, now_ms)
        start = end
    return True


def refuse(group: GroupState, transaction: BufferedTransaction, reason: str, now_ms: int) -> None:
    """End a transaction as aborted, because something of it is refused."""
    group.fold.refuse(transaction.id, reason[:REASON_CHARACTERS_MAX], now_ms)
    group.counts["transactions_refused"] += 1


def _whole(
    group: GroupState, transactions: Sequence[BufferedTransaction], refused: Refused, now_ms: int, *, may_wait: bool
) -> bool:
    """The native transaction was refused, and no part of it in particular."""
    group.failed_rounds.update(item.id for item in transactions)
    merging = [item for item in transactions if item.state is State.COMMITTING]
    often = max((group.failed_rounds[item.id] for item in transactions), default=0)
    if len(merging) == 1 and often >= ROUNDS_MAX:
        reason = f"its merge was refused {often} times, it may take longer than a native transaction may: "
        refuse(group, merging[0], reason + refused.reason, now_ms)
        return True
    if not may_wait and often >= ROUNDS_MAX and merging:  # they cannot be merged one by one: the largest has to go
        reason = f"a rolling commit of {len(merging)} transactions was refused {often} times, and this is the largest: "
        refuse(group, max(merging, key=lambda item: item.bytes), reason + refused.reason, now_ms)
        return True
    if often > ROUNDS_MAX:
        raise refused
    return len(transactions) == 1 or not may_wait


def _single_out(group: GroupState, items: Items, refused: Refused) -> Steps[tuple[int | None, str]]:
    """The place of one item that is at fault for what is in it; None, and why, if it is the topic.

    Small frames of many transactions are joined in one batch, and Kafka refuses that. Halves of it are appended, and
    aborted, until one frame is left: about as many appends as the number of frames has bits.
    """
    topic = refused.topic or ""
    wrong = yield from _wrong_with(group, topic)
    if wrong:
        return None, wrong
    places = list(refused.places)
    known = len(places) == 1 and refused.code != STUMBLED
    while len(places) > 1:
        half = places[: len(places) // 2]
        answer = yield from _try([items[place] for place in half])
        if answer is None:
            places, known = places[len(half) :], False
        elif answer.places:
            places = [half[place] for place in answer.places]
            known = len(places) == 1 and answer.code != STUMBLED
        else:
            return None, answer.reason
    if not known and (yield from _try([items[places[0]]])) is None:
        return None, "each of its frames is taken alone"
    return places[0], ""


def _try(items: Items) -> Steps[Refused | None]:
    """Append frames and abort; how they were refused, if they were."""
    try:
        yield from MergeFrames(items)
    except Refused as refused:
        return refused
    yield from AbortRound()
    return None


def probe(group: GroupState, topics: Sequence[str]) -> Steps[None]:
    """See that brokers take records of the topics and the commit log; what is appended is taken back.

    If one of them leaves a doubt, the term ends before anybody is suspected; a refusal is left to the round itself.
    """
    group.log_end = None
    group.forecast.forget(topics)
    try:
        for topic in (*topics, group.commit_log):
            yield from AppendMessages(Messages(topic, [(b"rollbridge", b"")]))
    except Refused:
        return
    yield from AbortRound()


def _wrong_with(group: GroupState, topic: str) -> Steps[str]:
    """What of a segment's topic is not as this version makes it; empty if it is right, or gone."""
    name, segment = parse_segment_topic(topic)
    stream = group.streams[str(name)]
    try:
        wrong = yield from MendTopics([segment_topic_spec(stream.config, segment)])
    except Refused:
        return ""  # it may not be looked at; what was refused before says more
    return f"topic {topic}: {wrong[topic]}" if wrong and topic in wrong else ""


def note_fault(group: GroupState, stream: str, reason: str, refused: Refused, now_ms: int) -> Steps[None]:
    """Put a stream into its error state, for all to see."""
    fault = StreamFault(reason[:FAULT_CHARACTERS_MAX], refused.code, refused.topic or "", now_ms)
    if stream not in group.streams or not group.faults.note(stream, fault, now_ms):
        return
    group.counts["stream_faults"] += 1
    yield from show_fault(group, stream, fault)


def show_fault(group: GroupState, stream: str, fault: StreamFault) -> Steps[None]:
    """Have a stream's error state stand in ZooKeeper, where ``stream describe`` and the doctor find it."""
    path = paths.stream_fault(group.streams[stream].config.name)
    # Where it does not apply, or is refused, the stream goes on waiting, and only those who look do not see it.
    with suppress(Refused):
        present = yield from read_node(path)
        yield from Write([CreateNode(path, fault.to_json()) if present is None else SetNode(path, fault.to_json())])


def try_again(group: GroupState, now_ms: int) -> Steps[list[str]]:
    """Let streams out of their error state, now and then, if a record can be appended to the topic that was refused.

    Gives those of which an active segment still takes nothing.
    """
    stuck: list[str] = []
    for name in group.faults.due(now_ms) if group.faults else ():
        fault = group.faults.get(name)
        stream = group.streams.get(name)
        if fault is None or stream is None:
            group.faults.forget(name)
            continue
        if stream.history.unsealed():
            try:
                yield from seal_left(group, stream)
            except Refused as refused:
                group.faults.note(name, fault, now_ms)
                if refused.code != fault.code:
                    fault = replace(fault, reason=refused.reason[:FAULT_CHARACTERS_MAX], code=refused.code)
                    group.faults.restore(name, fault)
                    yield from show_fault(group, name, fault)
                continue
        active = {stream.topic_of(item.id) for item in stream.history.active.segments}
        if fault.topic in active and not (yield from _takes_records(group, fault.topic)):
            group.faults.note(name, fault, now_ms)
            stuck.append(name)
            continue
        group.faults.lift(name)
        yield from hide_fault(stream.config.name)
    return stuck


def hide_fault(stream: StreamName) -> Steps[None]:
    """Remove what stands in ZooKeeper of a stream's error state."""
    path = paths.stream_fault(stream)
    with suppress(Refused):
        if (yield from read_node(path)) is not None:
            yield from Write([DeleteNode(path)])


def _takes_records(group: GroupState, topic: str) -> Steps[bool]:
    group.forecast.forget([topic])
    try:
        if topic not in (yield from TopicIds([topic])) or (yield from _wrong_with(group, topic)):
            return False
        yield from AppendMessages(Messages(topic, [(b"rollbridge", b"")]))
    except Refused:
        return False
    yield from AbortRound()
    return True


def give_up_waiting(group: GroupState, now_ms: int) -> None:
    """End the transactions that wait for a stream in an error state and whose leases have run out.

    Not those of a stream that waits for native transactions of others, in the middle of a change or because an earlier
    leader left one half done: these end, and then it can be committed as was asked for.
    """
    if not group.faults:
        return
    for transaction in list(group.fold.decided.values()):
        if group.is_rolling(transaction):
            continue  # it is named by what waits, and is taken out of that first
        name = group.waits_for(transaction)
        fault = None if name is None else group.faults.get(name)
        if fault is None or name is None or group.is_suspended(name) or fault.code == SUSPENDED:
            continue
        if transaction.deadline_ms < now_ms:
            refuse(group, transaction, f"expired while stream {name} was in an error state: {fault.reason}", now_ms)
