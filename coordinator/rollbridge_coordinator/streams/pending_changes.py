"""Waiting and suspended changes: scales and rolling commits delayed by native transactions of others.

No segment can be sealed while a native transaction is open on it, or while it has no partition leader. So the leader
checks before it begins a scale or rolling commit: transactions that need the change wait then, with later commits of
their connections, and all others continue. The only bound is Kafka's: native transactions time out
(``transaction.max.timeout.ms``, 15 minutes). A change waits for those open at two checks. Others are short, like those
of conditional writers, which end within milliseconds; there may always be one of these.

A native transaction may begin after the check and before the segments are closed. Then the seal meets it, and cannot be
undone: writers have been refused, and search for successors. So after some seconds the seal returns, and the change is
moved from its own node, of which there is only one, to one of the group's ``suspended`` nodes. From then on

- the streams that it changes take no transactions: they are in an error state that names the obstacles, and plain
  writers wait for successors. All other streams continue;
- nothing else changes these streams: scales wait, or are refused after a bound, and nothing of them is deleted by age.
  A stream that has no open transactions can be deleted as a whole;
- the leader checks the native transactions at intervals; no new one can begin as the topics are closed, and when none
  is open any more the change is finished;
- a new leader does the same: it finds the nodes, and finishes the changes while it leads, not before.

A transaction that waits in a rolling commit may be aborted by an administrator, or may need another rolling commit,
because other streams were scaled meanwhile. It is removed from the node before anything else is decided about it: of
the transactions that a node names either all have an outcome, or none.

A seal closes topics first, and may be refused, or fail, after that; its change may then be given up, or be lost from
the record because ZooKeeper was set back. No topic can be opened again without breaking what others have inferred from
its end. So :func:`reopen` plans a scale that gives the same key ranges new segments; it waits among the suspended
changes, with its stream only. A new leader checks all active segments for such topics once, and corrects their settings
(:func:`mend_active`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from rollbridge.base.effects import Steps
from rollbridge.buffer.state import BufferedTransaction
from rollbridge.buffer.table import State
from rollbridge.errors import ConflictError, CorruptDataError
from rollbridge.metadata import paths
from rollbridge.metadata.changes import (
    SUSPENDED,
    WATCHED,
    CommittingTransactions,
    EpochTransition,
    Roll,
    StreamChange,
    StreamFault,
    work_from_json,
)
from rollbridge.metadata.records import CreateNode, DeleteNode, NodeOperation, SetNode
from rollbridge.metadata.requests import AdminAnswer, RequestKind, refusing
from rollbridge.stream.conditions import ForeignTransaction, Obstacle, name_some
from rollbridge.stream.names import Partition
from rollbridge_coordinator.commit.plan import replaced_by
from rollbridge_coordinator.commit.refusals import hide_fault, show_fault, unsealed_fault
from rollbridge_coordinator.core.effects import (
    AbortRound,
    Closed,
    EffectRefusedError,
    EndForeign,
    EnsureNodes,
    LookForObstacles,
    MendTopics,
    Now,
    ReadNodes,
    TopicCreation,
    Write,
    read_children,
)
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.stream_state import segment_topic_spec
from rollbridge_coordinator.core.waits import PendingChange, PendingRoll, RetryAfter, StaleStateError, Wait

# Waiting before a change


logger = logging.getLogger(__name__)

LOOK_SOON_MS: Final = 20
"""Delay of the second check: most native transactions, our own among them, end within milliseconds."""
LOOK_AGAIN_MS: Final = 200
"""Interval of the checks after that."""
FAR_MS: Final = 1_000
"""Interval of checks above which a long transaction may have begun in between, so that a third one is made."""
TELL_MS: Final = 60_000
"""Interval of log lines that name the obstacles of a change."""


def look_again(places: Sequence[Partition], before: Wait | None, now_ms: int) -> Steps[Wait | None]:
    """Check for obstacles to a seal; return the next state of the wait, None if nothing lasts over two checks.

    A wait without obstacles so far, or at other places, was for something else, so this counts as the first check. A
    leader whose second check is late, because it was busy, checks twice.
    """
    found, where = frozenset((yield from LookForObstacles(places))), frozenset(places)
    if before is None or not before.seen or (before.places and before.places != where):
        since_ms = now_ms if before is None else before.since_ms
        return Wait(since_ms, now_ms + LOOK_SOON_MS, found, places=where) if found else None
    seen = before.seen
    if found and now_ms - before.due_ms >= FAR_MS:
        seen |= found
        found = frozenset((yield from LookForObstacles(places)))
    lasting = found & seen
    if not lasting:
        return None
    return replace(before, due_ms=now_ms + LOOK_AGAIN_MS, seen=found, lasting=lasting, places=where)


def is_due(wait: Wait, now_ms: int, most_ms: int = LOOK_AGAIN_MS) -> bool:
    """Return True if the next check is due; also if it is more than ``most_ms`` off, as the clock was set back then."""
    return not now_ms < wait.due_ms <= now_ms + most_ms


def tell(group: GroupState, what: str, wait: Wait, now_ms: int) -> Wait:
    """Log the obstacles of a change, at most once a minute; return the wait with the time of the line."""
    if not wait.lasting or (wait.told_ms is not None and 0 <= now_ms - wait.told_ms < TELL_MS):
        return wait
    named = name_some(wait.lasting)
    logger.info('change.waiting group=%s change="%s" for="%s"', group.name, what, named)
    return replace(wait, told_ms=now_ms)


def abort_lasting(group: GroupState, found: Collection[Obstacle]) -> Steps[str | None]:
    """Abort native transactions of others, as requested; return the reason of a failure, None if all were aborted."""
    foreign = sorted((item for item in found if isinstance(item, ForeignTransaction)), key=str)
    if not foreign:
        return None
    failed = yield from EndForeign(foreign)
    if failed is None:
        group.counts["foreign_aborted"] += len(foreign)
    return failed


def must_wait(group: GroupState, rolls: Collection[Roll], now_ms: int) -> Steps[bool]:
    """Return True if obstacles keep a rolling commit from sealing its segments; nothing is written."""
    key = tuple(sorted(roll.stream for roll in rolls))
    places = [
        place
        for roll in rolls
        for stream in [group.streams[roll.stream]]
        for place in stream.places_of(replaced_by(stream.history, roll)).values()
    ]
    before = group.waits.held_rolls.pop(key, None)
    wait = yield from look_again(places, None if before is None else before.wait, now_ms)
    if wait is None:
        return False
    told = tell(group, f"a rolling commit of {', '.join(key)}", wait, now_ms)
    group.counts["rolling_commits_held"] += wait.told_ms is None and told.told_ms is not None
    group.waits.held_rolls[key] = PendingRoll(told)
    return True


def gather(group: GroupState, rolls: Collection[Roll]) -> Steps[bool]:
    """Return True if a rolling commit waits for more late commits first, because several clients make them."""
    key = tuple(sorted(roll.stream for roll in rolls))
    if key in group.waits.held_rolls or any(roll.prepared for roll in rolls):
        return False  # it has waited already, or takes no other
    now_ms = group.times.stamp((yield from Now()))
    gather_ms = group.waits.late_commits.gather_ms(key, now_ms)
    if not gather_ms:
        return False
    group.waits.held_rolls[key] = PendingRoll(Wait(now_ms, now_ms + gather_ms, frozenset()))
    group.counts["rolling_commits_gathered"] += 1
    return True


def release_due(group: GroupState, now_ms: int) -> None:
    """Let due rolling commits be planned again, which checks again; drop obsolete ones."""
    for key, item in list(group.waits.held_rolls.items()):
        if not is_due(item.wait, now_ms):
            continue
        if not item.is_due:
            item.is_due = True
        else:
            del group.waits.held_rolls[key]  # could be planned for a whole turn, and was not: no transaction needs it


BLIND_MS: Final = 10_000
"""Delay of the next seal where brokers do not report the transactions that a seal has met: only another seal tells if
they have ended, and the whole group waits some seconds for it.
"""


def describe(work: StreamChange) -> str:
    """Return a description of a suspended change for messages."""
    streams = ", ".join(work.streams)
    if isinstance(work, EpochTransition):
        return f"the scale of {streams} to epoch {work.epoch}"
    return f"a rolling commit of {streams}"


def suspend(group: GroupState, node: str, work: StreamChange, places: Sequence[Partition]) -> Steps[None]:
    """Suspend a change that waits for native transactions on partitions, which have been closed.

    Args:
        node: Path of its record: the node of the change in progress, or one of the suspended ones.
        places: Closed partitions that could not be sealed.
    """
    found = frozenset((yield from LookForObstacles(places)))
    now_ms = group.times.stamp((yield from Now()))
    known = group.waits.pending_changes.get(node)
    is_untold = known is not None and not known.wait.seen
    if known is None:
        known = group.waits.pending_changes[(yield from put_aside(group, node, work))]
        known.wait = Wait(now_ms, now_ms, found, found)
    elif work != known.work:
        yield from change(group, node, work)
    pause_ms = LOOK_AGAIN_MS if found or not is_untold else BLIND_MS
    known.wait = replace(known.wait, due_ms=now_ms + pause_ms, seen=found, lasting=found)
    yield from _show(group, known, now_ms)


def put_aside(group: GroupState, node: str, work: StreamChange) -> Steps[str]:
    """Move a change in progress to a suspended node, and return the path of that.

    The caller sets the wait of the change, with :func:`postpone` or in :func:`suspend`.
    """
    target = f"{paths.pending_changes(group.name)}/{work.title}"
    if not (yield from Write([DeleteNode(node), CreateNode(target, work.to_json())])):
        raise StaleStateError(f"{describe(work)} was finished by another leader")
    group.waits.pending_changes[target] = PendingChange(work, Wait(0, 0, frozenset()))
    group.counts["changes_suspended"] += 1
    return target


def postpone(group: GroupState, node: str, reason: str) -> Steps[None]:
    """Retry a suspended change later, with a growing back-off, because part of it is refused."""
    item = group.waits.pending_changes[node]
    now_ms = group.times.stamp((yield from Now()))
    item.rest = RetryAfter.after(item.rest, now_ms)
    item.wait = replace(item.wait, due_ms=item.rest.until_ms, lasting=frozenset())
    if reason != item.refused:
        item.refused = reason
        yield from _show(group, item, now_ms)


def halt(group: GroupState, node: str, work: StreamChange, fault: EffectRefusedError | CorruptDataError) -> Steps[None]:
    """Postpone a change that fails unexpectedly, so that all others continue.

    Raises:
        EffectRefusedError: the commit log is refused, without which nothing can be decided.
    """
    if isinstance(fault, EffectRefusedError) and fault.topic == group.commit_log:
        raise fault
    reason = fault.reason if isinstance(fault, EffectRefusedError) else str(fault)
    logger.warning('change.postponed group=%s change="%s" reason="%s"', group.name, describe(work), reason)
    yield from AbortRound()
    group.forget_round()
    if node not in group.waits.pending_changes:
        node = yield from put_aside(group, node, work)
    yield from postpone(group, node, reason)


def load_suspended(group: GroupState) -> Steps[None]:
    """Load the changes that earlier leaders have suspended; they are due on the first turn.

    Those in progress are only moved aside if they cannot be read.
    """
    for node, raw in (yield from ReadNodes([paths.scaling(group.name), paths.committing(group.name)])).items():
        if raw is not None:
            yield from read_change(group, node, raw)
    parent = paths.pending_changes(group.name)
    nodes = [f"{parent}/{name}" for name in (yield from read_children(parent))]
    for node, raw in (yield from ReadNodes(nodes)).items():
        work = None if raw is None else (yield from read_change(group, node, raw))
        if work is not None:
            take_up(group, node, work)


def read_change(group: GroupState, node: str, raw: bytes) -> Steps[StreamChange | None]:
    """Return the change that a node holds; None if unreadable: it is moved aside, and the group is led.

    The effect is as if ZooKeeper had been set back to before it: closed segments get successors, published ones are
    sealed, and its transactions, of which none or all are committed, are planned again.
    """
    title = node.rpartition("/")[2]
    try:
        work = EpochTransition.from_json(raw) if node == paths.scaling(group.name) else work_from_json(title, raw)
        strange = [name for name in work.streams if name not in group.streams and name not in group.unled]
        if strange or not work.streams:
            raise CorruptDataError(f"it changes {', '.join(strange) or 'no stream'}, which the group does not have")
    except CorruptDataError as fault:
        target = f"{paths.unreadable(group.name)}/{title}-{group.controller_epoch}"
        kept = raw[: group.settings.write_bytes_max]
        yield from EnsureNodes([paths.unreadable(group.name)])
        if not (yield from Write([DeleteNode(node), CreateNode(target, kept)])):
            raise StaleStateError(f"{node} was changed by another leader") from fault
        logger.error('change.unreadable group=%s node=%s kept_as=%s reason="%s"', group.name, node, target, fault)
        return None
    return work


def take_up(group: GroupState, node: str, work: StreamChange) -> None:
    """Add a suspended change to the group's state, due on the next turn, and suspend its streams."""
    group.waits.pending_changes[node] = PendingChange(work, Wait(0, 0, frozenset()))
    for name in work.streams:
        if name in group.unled:
            continue  # the fault that keeps it from being led is worse, and delays the change
        fault = group.waits.faults.get(name)
        if fault is None or fault.code in WATCHED:  # the leader has died before it could show the obstacles
            fault = StreamFault(f"{describe(work)} is half done", SUSPENDED, "", work.created_ms)
        group.waits.faults.suspend(name, fault)


def still_held(group: GroupState, node: str, places: Sequence[Partition], now_ms: int) -> Steps[bool]:
    """Return True if native transactions are open on closed partitions; they are aborted if the request says so.

    The client that has requested a scale is answered after the bound of scales; the scale continues.
    """
    item = group.waits.pending_changes[node]
    found = frozenset((yield from LookForObstacles(places))) if places else frozenset()
    if not found:
        return False
    since_ms = item.wait.since_ms or now_ms
    item.wait = replace(item.wait, since_ms=since_ms, due_ms=now_ms + LOOK_AGAIN_MS, seen=found, lasting=found)
    before = item.wait.told_ms
    item.wait = tell(group, describe(item.work), item.wait, now_ms)
    if item.wait.told_ms != before:
        yield from _show(group, item, now_ms)
    if isinstance(item.work, EpochTransition):
        if item.work.abort_foreign:
            yield from abort_lasting(group, found)
        if item.work.request and now_ms - since_ms >= group.settings.scale_wait_ms:
            yield from _answer(group, node, item.work, now_ms)
    return True


def hold_request(group: GroupState, stream: str, *, abort_foreign: bool) -> Steps[str]:
    """Return why a request about a stream has to wait, empty if the stream is not suspended.

    With ``abort_foreign`` the native transactions that the suspended change waits for are aborted.

    Raises:
        ConflictError: not all of them could be aborted.
    """
    item = group.suspended_on(stream)
    if item is None:
        return ""
    if abort_foreign:
        failed = yield from abort_lasting(group, item.wait.lasting)
        if failed is not None:
            raise ConflictError(
                f"{_why(item)}, which could not all be aborted: {failed}; the stream was not changed",
                code="stream-busy",
            )
    return _why(item)


def _why(item: PendingChange) -> str:
    if item.refused and not item.wait.lasting:
        return f"{describe(item.work)} has begun, what it replaces is closed, and it is refused: {item.refused}"
    named = name_some(item.wait.lasting) or "native transactions of others, which brokers are asked for"
    return f"{describe(item.work)} has begun, what it replaces is closed, and it waits for {named}"


def open_of(group: GroupState, committing: CommittingTransactions) -> list[BufferedTransaction] | None:
    """Return the transactions of a rolling commit in their order; None if the commit log has their outcomes already.

    Raises:
        CorruptDataError: only some of them are open.
    """
    known = [group.fold.open.get(item.bytes) for item in committing.transactions]
    transactions = [item for item in known if item is not None]
    if transactions and len(transactions) < len(known):
        raise CorruptDataError(
            f"the rolling commit of {group.name} names {len(known)} transactions, but only {len(transactions)} of "
            "them are open: some have an outcome and some have not, which one native transaction rules out"
        )
    return transactions if transactions or not known else None


def change(group: GroupState, node: str, work: StreamChange) -> Steps[None]:
    """Replace the record of a suspended change by the rest of the change."""
    if not (yield from Write([SetNode(node, work.to_json())])):
        raise StaleStateError(f"{describe(work)} was finished by another leader")
    group.waits.pending_changes[node].work = work


def take_out(group: GroupState, transaction: BufferedTransaction) -> Steps[None]:
    """Remove a transaction from all suspended rolling commits, so that it can be decided in another way."""
    for node, item in list(group.waits.pending_changes.items()):
        work = item.work
        if isinstance(work, CommittingTransactions) and transaction.transaction_id in work.transactions:
            left = {other.bytes for other in work.transactions} - {transaction.id}
            yield from change(group, node, work.with_only(left))


def take_apart(group: GroupState, node: str) -> Steps[bool]:
    """Continue a suspended change without the streams that are not led; return False if it has no others.

    Its part for those becomes a change of its own, which names the transactions that are unknown here. One that wrote
    to both kinds of streams is planned again once all are led.
    """
    work = group.waits.pending_changes[node].work
    if group.unled.keys().isdisjoint(work.streams):
        return True
    led = [name for name in work.streams if name not in group.unled]
    if isinstance(work, EpochTransition) or not led:
        return False
    opened = [group.fold.open.get(item.bytes) for item in work.transactions]
    known = {item.id for item in opened if item is not None}
    ready = work.without(group.unled).with_only({item for item in known if not group.unled_of(group.fold.open[item])})
    waiting = work.without(led).with_only({item.bytes for item in work.transactions} - known)
    stays, other = (ready, waiting) if ready.streams[0] == work.streams[0] else (waiting, ready)
    target = f"{paths.pending_changes(group.name)}/{other.title}"
    if not (yield from Write([SetNode(node, stays.to_json()), CreateNode(target, other.to_json())])):
        raise StaleStateError(f"{describe(work)} was finished by another leader")
    group.waits.pending_changes[node].work = stays
    take_up(group, target, other)
    return stays is ready


def end_suspension(group: GroupState, node: str) -> Steps[None]:
    """Lift the suspension of the streams of a change that was finished or given up."""
    item = group.waits.pending_changes.pop(node, None)
    if item is None:
        return
    for name in item.work.streams:
        if name in group.streams and not group.is_suspended(name):
            group.waits.faults.resume(name)
            if group.streams[name].history.unsealed():  # sealing the duplicates was refused, and is tried again
                fault = unsealed_fault(item.work.created_ms)
                group.waits.faults.restore(name, fault)
                yield from show_fault(group, name, fault)
            else:
                yield from hide_fault(group.streams[name].config.name)


def without_stream(
    group: GroupState, stream: str, now_ms: int
) -> tuple[list[NodeOperation], dict[str, StreamChange | None]]:
    """Return the writes that take a deleted stream out of suspended changes, and the rest of each change by node.

    The rest is None for a change of that stream alone.
    """
    operations: list[NodeOperation] = []
    left: dict[str, StreamChange | None] = {}
    for node, item in group.waits.pending_changes.items():
        work = item.work
        if stream not in work.streams:
            continue
        if isinstance(work, CommittingTransactions) and len(work.rolls) > 1:
            left[node] = rest = work.without((stream,))
            operations.append(SetNode(node, rest.to_json()))
            continue
        left[node] = None
        operations.append(DeleteNode(node))
        if isinstance(work, EpochTransition) and work.request:
            why = f"stream {stream} was deleted before it could be scaled"
            answer = refusing("stream-not-found", why, now_ms).to_json()
            operations.append(CreateNode(f"{paths.answers(group.name)}/{work.request}", answer))
    return operations, left


def kept_of(transactions: Sequence[BufferedTransaction]) -> set[bytes]:
    return {item.id for item in transactions if item.state is State.COMMITTING}


def refuse_request(group: GroupState, node: str, scaling: EpochTransition, answer: AdminAnswer) -> Steps[None]:
    """Answer a request for a scale with a refusal; the scale itself is still finished once possible."""
    if not scaling.request:
        return
    answered = replace(scaling, request="")
    answering = CreateNode(f"{paths.answers(group.name)}/{scaling.request}", answer.to_json())
    if not (yield from Write([SetNode(node, answered.to_json()), answering])):
        raise StaleStateError(f"{describe(scaling)} was finished by another leader")
    group.waits.pending_changes[node].work = answered
    group.counts["requests_refused"] += 1
    group.metrics.note_answer(RequestKind.SCALE_STREAM, ok=False)


def _answer(group: GroupState, node: str, scaling: EpochTransition, now_ms: int) -> Steps[None]:
    why = (
        f"{_why(group.waits.pending_changes[node])}; it will be finished as soon as they have ended, and the stream "
        "takes no records until then: end them, or request a scale that aborts them (--abort-foreign, "
        "abort_foreign=True)"
    )
    yield from refuse_request(group, node, scaling, refusing("stream-busy", why, now_ms))


def _show(group: GroupState, item: PendingChange, now_ms: int) -> Steps[None]:
    """Put the streams of a suspended change into an error state that names its obstacles."""
    topic = min((one.topic for one in item.wait.lasting), default="")
    for name in item.work.streams:
        if name in group.streams:
            fault = StreamFault(_why(item), SUSPENDED, topic, item.work.created_ms or now_ms)
            group.waits.faults.suspend(name, fault)
            yield from show_fault(group, name, fault)


# Successors of segments that were closed in vain


def reopen(group: GroupState, streams: Collection[str], now_ms: int) -> Steps[None]:
    """Begin scales that replace the closed active segments of streams, unless a change of the stream is in progress."""
    planned = yield from plan_reopening(group, streams, now_ms)
    for node, scaling in planned.items():
        if not (yield from Write([CreateNode(node, scaling.to_json())])):
            raise StaleStateError(f"stream {scaling.stream} is scaled by another leader")
        take_up_scale(group, node, scaling)


def plan_reopening(
    group: GroupState, streams: Collection[str], now_ms: int, ending: str = ""
) -> Steps[dict[str, EpochTransition]]:
    """Return the scales that :func:`reopen` begins, by the nodes of their records.

    Args:
        ending: Node of a change of these streams that is being ended. Its end must be written together with these
            records: a leader that died in between would leave active segments closed for good.
    """
    planned: dict[str, EpochTransition] = {}
    for name in streams:
        stream = group.streams.get(name)
        if stream is None or group.is_half_done(name, but=ending) or stream.is_on_topic:
            continue  # an adopted topic that its owner has closed is the owner's to open
        places = stream.places_of(stream.history.active.segments)
        closed = yield from find_closed(list(places.values()))
        segments = [item for item in stream.history.active.segments if places[item.id] in closed]
        if not segments:
            continue
        scaling = EpochTransition(
            stream.config.name,
            "",
            int(stream.history.next_epoch),
            tuple(int(item.id.number) for item in segments),
            tuple(item.range for item in segments),
            now_ms,
            group.controller_epoch,
        )
        planned[f"{paths.pending_changes(group.name)}/{scaling.title}"] = scaling
    return planned


def take_up_scale(group: GroupState, node: str, scaling: EpochTransition) -> None:
    """Add a scale that replaces closed segments and whose record is written."""
    take_up(group, node, scaling)
    group.counts["segments_reopened"] += len(scaling.seal)


def find_closed(places: Sequence[Partition]) -> Steps[frozenset[Partition]]:
    """Return the closed ones; none if Kafka refuses to say, as appends to them are refused then anyway."""
    try:
        closed = yield from Closed(list(dict.fromkeys(topic for topic, _ in places)))
    except EffectRefusedError:
        return frozenset()
    return frozenset(place for place in places if place[0] in closed)


# Settings of active segments


TOPICS_AT_ONCE: Final = 50
EVERY_MS: Final = 1_000
"""Interval between checks of so many topics: brokers take a few milliseconds for them, in which transactions wait."""


def mend_active(group: GroupState, now_ms: int) -> Steps[None]:
    """Check the next active segments not checked in this term, correct their settings and replace closed ones.

    Event times of any past and future are valid on every stream. Segments of earlier versions still have Kafka's limit
    of an hour ahead, at which plain and conditional writers, which may not change settings, would be refused. So they
    get the limits that this version gives to new segments.

    A segment that is closed without a change in progress was closed for one that is no longer on record: its leader
    died when it had just given that up, or ZooKeeper was set back since. It gets a successor.
    """
    if group.housekeeping.unmended is None:
        group.housekeeping.unmended = [
            (name, item.id) for name, stream in group.streams.items() for item in stream.history.active.segments
        ]
    if not group.housekeeping.unmended or not group.housekeeping.is_due("active segments", now_ms, EVERY_MS):
        return
    chosen = group.housekeeping.unmended[-TOPICS_AT_ONCE:]
    specs = [
        segment_topic_spec(group.streams[name].config, segment)
        for name, segment in chosen
        if name in group.streams
        and segment in group.streams[name].history.active.segment_ids
        and not group.streams[name].config.places.is_adopted(segment)
    ]
    wrong = (yield from _mend(group, specs)) if specs else []
    if wrong is None:
        return
    del group.housekeeping.unmended[-TOPICS_AT_ONCE:]
    yield from reopen(group, sorted({group.stream_of(topic) or "" for topic in wrong}), now_ms)


def _mend(group: GroupState, specs: list[TopicCreation]) -> Steps[list[str] | None]:
    """Correct the settings of topics, leaving out those for which that is refused.

    Returns:
        Topics that still differ from their specification; None if the attempt is to be repeated.
    """
    try:
        found = yield from MendTopics(specs, optional=True)
    except EffectRefusedError as refused:
        if len(specs) == 1:
            logger.warning('topic.unmended group=%s topic=%s reason="%s"', group.name, specs[0].name, refused.reason)
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
