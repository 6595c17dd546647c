"""Scales and rolling commits that wait half done, mostly for native transactions of others; other streams go on.

A native transaction may begin after it was looked for them and before the segments are closed. Then a seal finds it,
and it cannot be taken back: writers have been refused, and look for successors. So after some seconds the seal returns,
and what was begun is moved from its own node, where there can be only one, to one of the group's ``suspended`` nodes.
From then on

- the streams that it changes take no transactions: they are in an error state that says for whom they wait, and plain
  writers wait for successors. Nobody else waits;
- nothing else changes these streams: scales wait, or are refused after a bound, and nothing of them is deleted for its
  age. A stream that has no open transactions can be deleted as a whole;
- it is looked at the native transactions again and again, and when none is open any more, which no new one can be as
  the topics are closed, what was begun is finished;
- a new leader goes on in the same way: it finds the nodes, and finishes what they say while it leads, not before.

A transaction that waits in a rolling commit may be aborted by an administrator, or may turn out to need another rolling
commit, because other streams were scaled meanwhile. It is taken out of the node first, before anything else is decided
about it: of the transactions that a node names either all have an outcome, or none.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from rollbridge.errors import CorruptDataError, StreamBusy
from rollbridge.model import paths
from rollbridge.model.changes import SUSPENDED, Committing, Roll, Scaling, StreamFault, Work, work_from_json
from rollbridge.model.conditions import ForeignTransaction, Obstacle, name_some
from rollbridge.model.names import parse_segment_topic
from rollbridge.model.pieces import BufferedTransaction
from rollbridge.model.records import CreateNode, DeleteNode, NodeOperation, SetNode
from rollbridge.model.requests import Answer, refusing
from rollbridge.model.transaction import State
from rollbridge_coordinator.procedures.refusals import hide_fault, show_fault, unsealed_fault
from rollbridge_coordinator.state.effects import (
    Closed,
    EndForeign,
    LookForObstacles,
    MendTopics,
    Now,
    ReadNodes,
    Refused,
    Steps,
    TopicSpec,
    Write,
    read_children,
)
from rollbridge_coordinator.state.faults import StaleStateError
from rollbridge_coordinator.state.group import GroupState, HeldRoll, Suspended, Wait
from rollbridge_coordinator.state.streams import segment_topic_spec
from rollbridge_coordinator.state.upkeep import Rest

# --------------------------------------------------------------------------------------------------------------------
# Waiting for native transactions of others, and for leaders that are away, without holding anybody up.
# No segment can be sealed while a native transaction is open on it, or while nobody leads it. So it is looked before
# a scale or rolling commit is begun: what needs it waits then, with later commits of its connections, and all others
# go on. There is no bound but the one of Kafka: these transactions end by themselves (``transaction.max.timeout.ms``,
# 15 minutes). What comes up between the look and the seal is waited for in
# :mod:`rollbridge_coordinator.procedures.suspended`.
# What is open at two looks is waited for. Others are of the kind that conditional writers make, which end within
# milliseconds; there may always be one of these.


logger = logging.getLogger(__name__)

LOOK_SOON_MS: Final = 20
"""How soon it is looked a second time: most native transactions, our own among them, end within milliseconds."""
LOOK_AGAIN_MS: Final = 200
"""How soon it is looked again after that."""
TELL_MS: Final = 60_000
"""How often a log says for whom something waits."""


def look_again(topics: Sequence[str], before: Wait | None, now_ms: int) -> Steps[Wait | None]:
    """Return how it is waited for what keeps topics from being sealed, after an earlier wait; None if that is over.

    An earlier wait in which nothing was seen was for something else: what is found now is looked at twice all the same.
    """
    found = frozenset((yield from LookForObstacles(topics)))
    if before is None or not before.seen:
        since_ms = now_ms if before is None else before.since_ms
        return Wait(since_ms, now_ms + LOOK_SOON_MS, found) if found else None
    lasting = found & before.seen
    if not lasting:
        return None
    return replace(before, due_ms=now_ms + LOOK_AGAIN_MS, seen=found, lasting=lasting)


def is_due(wait: Wait, now_ms: int, most_ms: int = LOOK_AGAIN_MS) -> bool:
    """Return whether it is to be looked again, ``most_ms`` after the last look: the clock may have been set back."""
    return not now_ms < wait.due_ms <= now_ms + most_ms


def tell(group: GroupState, what: str, wait: Wait, now_ms: int) -> Wait:
    """Say in the log, once a minute, for whom something waits."""
    if not wait.lasting or (wait.told_ms is not None and 0 <= now_ms - wait.told_ms < TELL_MS):
        return wait
    named = name_some(wait.lasting)
    logger.info("%s: %s waits for %s", group.name, what, named)
    return replace(wait, told_ms=now_ms)


def abort_lasting(group: GroupState, found: Collection[Obstacle]) -> Steps[str | None]:
    """Abort native transactions of others, as was asked for; why that could not be done, None if it was."""
    foreign = sorted((item for item in found if isinstance(item, ForeignTransaction)), key=str)
    if not foreign:
        return None
    failed = yield from EndForeign(foreign)
    if failed is None:
        group.counts["foreign_aborted"] += len(foreign)
    return failed


def must_wait(group: GroupState, rolls: Collection[Roll], now_ms: int) -> Steps[bool]:
    """Return whether something keeps what a rolling commit would seal from being sealed; nothing is written."""
    key = tuple(sorted(roll.stream for roll in rolls))
    streams = [group.streams[name] for name in key]
    topics = [stream.topic_of(item.id) for stream in streams for item in stream.history.active.segments]
    before = group.held_rolls.pop(key, None)
    wait = yield from look_again(topics, None if before is None else before.wait, now_ms)
    if wait is None:
        return False
    told = tell(group, f"a rolling commit of {', '.join(key)}", wait, now_ms)
    group.counts["rolling_commits_held"] += wait.told_ms is None and told.told_ms is not None
    group.held_rolls[key] = HeldRoll(told)
    return True


def release_due(group: GroupState, now_ms: int) -> None:
    """Let rolling commits that wait be planned again, so that it is looked again; forget those that nobody needs."""
    for key, item in list(group.held_rolls.items()):
        if not is_due(item.wait, now_ms):
            continue
        if not item.is_due:
            item.is_due = True
        else:
            del group.held_rolls[key]  # it was free to be planned for a whole turn, and was not


BLIND_MS: Final = 10_000
"""How soon it is tried again where brokers do not tell of the transactions that a seal has met: only another seal tells
whether they have ended, for which everybody waits some seconds."""


def describe(work: Work) -> str:
    """Return what is half done, for people."""
    streams = ", ".join(work.streams)
    if isinstance(work, Scaling):
        return f"the scale of {streams} to epoch {work.epoch}"
    return f"a rolling commit of {streams}"


def suspend(group: GroupState, node: str, work: Work, topics: Sequence[str]) -> Steps[None]:
    """Leave half done what waits for native transactions on topics, which have been closed.

    Args:
        group: State of the group.
        node: Where it stands: that of what is under way, or one of those that are suspended.
        work: What is half done, and is to be finished later.
        topics: What is closed and could not be sealed.
    """
    found = frozenset((yield from LookForObstacles(topics)))
    now_ms = group.times.stamp((yield from Now()))
    known = group.suspended.get(node)
    is_untold = known is not None and not known.wait.seen
    if known is None:
        known = group.suspended[(yield from put_aside(group, node, work))]
        known.wait = Wait(now_ms, now_ms, found, found)
    elif work != known.work:
        yield from change(group, node, work)
    pause_ms = LOOK_AGAIN_MS if found or not is_untold else BLIND_MS
    known.wait = replace(known.wait, due_ms=now_ms + pause_ms, seen=found, lasting=found)
    yield from _show(group, known, now_ms)


def put_aside(group: GroupState, node: str, work: Work) -> Steps[str]:
    """Move what is under way to a node of its own among those that are suspended, which is returned.

    The caller says for what it waits, with :func:`postpone` or in :func:`suspend`.
    """
    target = f"{paths.suspended(group.name)}/{work.title}"
    if not (yield from Write([DeleteNode(node), CreateNode(target, work.to_json())])):
        raise StaleStateError(f"{describe(work)} was finished by someone else")
    group.suspended[target] = Suspended(work, Wait(0, 0, frozenset()))
    group.counts["changes_suspended"] += 1
    return target


def postpone(group: GroupState, node: str, reason: str) -> Steps[None]:
    """Have what is half done tried again later, less and less often: something of it is refused."""
    item = group.suspended[node]
    now_ms = group.times.stamp((yield from Now()))
    item.rest = Rest.after(item.rest, now_ms)
    item.wait = replace(item.wait, due_ms=item.rest.until_ms, lasting=frozenset())
    if reason != item.refused:
        item.refused = reason
        yield from _show(group, item, now_ms)


def load_suspended(group: GroupState) -> Steps[None]:
    """Know what earlier leaders have left half done; it is looked at on the first turn."""
    parent = paths.suspended(group.name)
    nodes = [f"{parent}/{name}" for name in (yield from read_children(parent))]
    for node, raw in (yield from ReadNodes(nodes)).items():
        if raw is None:
            continue
        take_up(group, node, work_from_json(node.rpartition("/")[2], raw))


def take_up(group: GroupState, node: str, work: Work) -> None:
    """Know of something that is half done; it is looked at on the next turn."""
    group.suspended[node] = Suspended(work, Wait(0, 0, frozenset()))
    for name in work.streams:
        fault = group.faults.get(name) or StreamFault(f"{describe(work)} is half done", SUSPENDED, "", work.created_ms)
        group.faults.suspend(name, fault)


def still_held(group: GroupState, node: str, topics: Sequence[str], now_ms: int) -> Steps[bool]:
    """Return whether native transactions are open on closed topics; says so, and aborts them where that was asked for.

    The client that has asked for a scale is answered after the bound that scales have; the scale goes on.
    """
    item = group.suspended[node]
    found = frozenset((yield from LookForObstacles(topics))) if topics else frozenset()
    if not found:
        return False
    since_ms = item.wait.since_ms or now_ms
    item.wait = replace(item.wait, since_ms=since_ms, due_ms=now_ms + LOOK_AGAIN_MS, seen=found, lasting=found)
    before = item.wait.told_ms
    item.wait = tell(group, describe(item.work), item.wait, now_ms)
    if item.wait.told_ms != before:
        yield from _show(group, item, now_ms)
    if isinstance(item.work, Scaling):
        if item.work.abort_foreign:
            yield from abort_lasting(group, found)
        if item.work.request and now_ms - since_ms >= group.settings.scale_wait_ms:
            yield from _answer(group, node, item.work, now_ms)
    return True


def hold_request(group: GroupState, stream: str, *, abort_foreign: bool) -> Steps[str]:
    """Return why a request about a suspended stream can not be carried out; aborts who it waits for if asked to."""
    item = group.suspended_on(stream)
    if item is None:
        return ""
    if abort_foreign:
        failed = yield from abort_lasting(group, item.wait.lasting)
        if failed is not None:
            raise StreamBusy(f"{_why(item)}, which could not all be aborted: {failed}; the stream was not changed")
    return _why(item)


def _why(item: Suspended) -> str:
    if item.refused and not item.wait.lasting:
        return f"{describe(item.work)} has begun, what it replaces is closed, and it is refused: {item.refused}"
    named = name_some(item.wait.lasting) or "native transactions of others, which are asked for"
    return f"{describe(item.work)} has begun, what it replaces is closed, and it waits for {named}"


def open_of(group: GroupState, committing: Committing) -> list[BufferedTransaction] | None:
    """The transactions of a rolling commit in their order; None if their outcome stands in the commit log already.

    Raises:
        CorruptDataError: Of some it does, and of others it does not.
    """
    known = [group.fold.open.get(item.bytes) for item in committing.transactions]
    transactions = [item for item in known if item is not None]
    if transactions and len(transactions) < len(known):
        raise CorruptDataError(
            f"the rolling commit of {group.name} names {len(known)} transactions, but only {len(transactions)} of "
            "them are open: some have an outcome and some have not, which one native transaction rules out"
        )
    return transactions if transactions or not known else None


def change(group: GroupState, node: str, work: Work) -> Steps[None]:
    """Write down what is still to be done of it."""
    if not (yield from Write([SetNode(node, work.to_json())])):
        raise StaleStateError(f"{describe(work)} was finished by someone else")
    group.suspended[node].work = work


def take_out(group: GroupState, transaction: BufferedTransaction) -> Steps[None]:
    """Have no rolling commit that waits name a transaction, so that it can be decided on in another way."""
    for node, item in list(group.suspended.items()):
        work = item.work
        if isinstance(work, Committing) and transaction.transaction_id in work.transactions:
            left = {other.bytes for other in work.transactions} - {transaction.id}
            yield from change(group, node, work.with_only(left))


def end_suspension(group: GroupState, node: str) -> Steps[None]:
    """Let the streams go on, once what was half done is not any more."""
    item = group.suspended.pop(node, None)
    if item is None:
        return
    for name in item.work.streams:
        if name in group.streams and not group.is_suspended(name):
            group.faults.resume(name)
            if group.streams[name].history.unsealed():  # that was refused, and is tried again
                fault = unsealed_fault(item.work.created_ms)
                group.faults.restore(name, fault)
                yield from show_fault(group, name, fault)
            else:
                yield from hide_fault(group.streams[name].config.name)


def without_stream(group: GroupState, stream: str, now_ms: int) -> tuple[list[NodeOperation], dict[str, Work | None]]:
    """What becomes of what is half done when a stream is deleted: the writes, and what is left by node.

    Nothing is, if it was about that stream alone.
    """
    operations: list[NodeOperation] = []
    left: dict[str, Work | None] = {}
    for node, item in group.suspended.items():
        work = item.work
        if stream not in work.streams:
            continue
        if isinstance(work, Committing) and len(work.rolls) > 1:
            left[node] = rest = work.without(stream)
            operations.append(SetNode(node, rest.to_json()))
            continue
        left[node] = None
        operations.append(DeleteNode(node))
        if isinstance(work, Scaling) and work.request:
            why = f"stream {stream} was deleted before it could be scaled"
            answer = refusing("stream-not-found", why, now_ms).to_json()
            operations.append(CreateNode(f"{paths.answers(group.name)}/{work.request}", answer))
    return operations, left


def kept_of(transactions: Sequence[BufferedTransaction]) -> set[bytes]:
    """Those of a rolling commit that are still to be committed, by the 16 bytes of their ids."""
    return {item.id for item in transactions if item.state is State.COMMITTING}


def refuse_request(group: GroupState, node: str, scaling: Scaling, answer: Answer) -> Steps[None]:
    """Answer who has asked for a scale that it is not done; it is all the same, as soon as that is possible."""
    if not scaling.request:
        return
    answered = replace(scaling, request="")
    answering = CreateNode(f"{paths.answers(group.name)}/{scaling.request}", answer.to_json())
    if not (yield from Write([SetNode(node, answered.to_json()), answering])):
        raise StaleStateError(f"{describe(scaling)} was finished by someone else")
    group.suspended[node].work = answered
    group.counts["requests_refused"] += 1


def _answer(group: GroupState, node: str, scaling: Scaling, now_ms: int) -> Steps[None]:
    why = (
        f"{_why(group.suspended[node])}; it will be finished as soon as they have ended, and the stream takes nothing "
        "until then: end them, or ask for a scale that aborts them (--abort-foreign, abort_foreign=True)"
    )
    yield from refuse_request(group, node, scaling, refusing(StreamBusy.code, why, now_ms))


def _show(group: GroupState, item: Suspended, now_ms: int) -> Steps[None]:
    """Put the streams into an error state that says for whom they wait."""
    topic = min((one.topic for one in item.wait.lasting), default="")
    for name in item.work.streams:
        if name in group.streams:
            fault = StreamFault(_why(item), SUSPENDED, topic, item.wait.since_ms or now_ms)
            group.faults.suspend(name, fault)
            yield from show_fault(group, name, fault)


# --------------------------------------------------------------------------------------------------------------------
# Successors for segments that have been closed in vain.
# A seal closes topics first, and may be refused, or come to nothing, after that; a change that began with it may then
# be given up, or may not be on record any more because ZooKeeper was set back. Nobody can open a topic again without
# breaking what others have inferred from its end. So a scale gives the same key ranges new segments, as soon as that
# is possible; it waits among the group's ``suspended`` works until then, with its stream, and nobody else waits.


def reopen(group: GroupState, streams: Collection[str], now_ms: int) -> Steps[None]:
    """Have the active segments of streams replaced that are closed, unless that is under way."""
    for name in streams:
        stream = group.streams.get(name)
        if stream is None or group.is_half_done(name):
            continue
        topics = {stream.topic_of(item.id): item for item in stream.history.active.segments}
        closed = yield from find_closed(list(topics))
        segments = [item for topic, item in topics.items() if topic in closed]
        if not segments:
            continue
        scaling = Scaling(
            stream.config.name,
            "",
            int(stream.history.next_epoch),
            tuple(int(item.id.number) for item in segments),
            tuple(item.range for item in segments),
            now_ms,
            group.controller_epoch,
        )
        node = f"{paths.suspended(group.name)}/{scaling.title}"
        if not (yield from Write([CreateNode(node, scaling.to_json())])):
            raise StaleStateError(f"stream {name} is scaled by someone else")
        take_up(group, node, scaling)
        group.counts["segments_reopened"] += len(segments)


def find_closed(topics: Sequence[str]) -> Steps[frozenset[str]]:
    """Return which topics are closed; none if we are not told: what is appended is refused then."""
    try:
        return (yield from Closed(topics))
    except Refused:
        return frozenset()


# --------------------------------------------------------------------------------------------------------------------
# Settings of active segments: a new leader looks through them once, some at a time, beside its other work.
# Event times of any past and future are valid on every stream. Kafka's own limit, an hour ahead, stands on segments
# that were made before that was set; plain and conditional writers, which may not change settings, would be refused
# there. So these get the limits that this version gives to new segments.
# One that is closed although nothing is under way with it was closed for a change that is not on record any more: its
# leader died when it had just given that up, or ZooKeeper was set back since. It gets a successor.


TOPICS_AT_ONCE: Final = 50
EVERY_MS: Final = 1_000
"""How often so many topics are looked at: brokers take a few milliseconds for them, in which transactions wait."""


def mend_active(group: GroupState, now_ms: int) -> Steps[None]:
    """Look at the next of the segments that have not been looked at in this term."""
    if group.unmended is None:
        group.unmended = [
            (name, item.id) for name, stream in group.streams.items() for item in stream.history.active.segments
        ]
    if not group.unmended or not group.housekeeping.is_due("active segments", now_ms, EVERY_MS):
        return
    chosen = group.unmended[-TOPICS_AT_ONCE:]
    specs = [
        segment_topic_spec(group.streams[name].config, segment)
        for name, segment in chosen
        if name in group.streams and segment in group.streams[name].history.active.segment_ids
    ]
    wrong = (yield from _mend(group, specs)) if specs else []
    if wrong is None:
        return
    del group.unmended[-TOPICS_AT_ONCE:]
    yield from reopen(group, sorted({str(parse_segment_topic(topic)[0]) for topic in wrong}), now_ms)


def _mend(group: GroupState, specs: list[TopicSpec]) -> Steps[list[str] | None]:
    """Mend topics, but for those of which that is refused; gives those that are not as they should be.

    Gives None if it is to be tried again.
    """
    try:
        found = yield from MendTopics(specs, optional=True)
    except Refused as refused:
        if len(specs) == 1:
            logger.warning("%s: %s stays as it is: %s", group.name, specs[0].name, refused.reason)
            return []
    else:
        return None if found is None else list(found)
    wrong: list[str] = []
    for spec in specs:
        more = yield from _mend(group, [spec])
        if more is None:
            return None
        wrong += more
    return wrong
