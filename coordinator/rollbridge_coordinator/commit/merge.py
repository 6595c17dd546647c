"""Merge: make a round of decided transactions visible, with their outcomes, in one native Kafka transaction.

A transaction with conditions has a round of its own. Its frames are appended first, invisible, because their offsets
fix which records are earlier. Then the leader waits until all of these are committed or aborted, reads the last one in
the scope of each condition, and commits the round or aborts it. In a rolling commit the segments of the conditions are
sealed before, so nothing can come between.

A transaction may be larger than a batch, and another writer may append between two of its batches. As long as the round
is open, such records cannot be told from earlier ones. If one is in the scope of a condition, the round is aborted and
repeated, after it.

Source: PDP-24, ``mergeSegments`` (same primary, sealed source, open target); DistributedLog, commit log and CAS
proposal; DESIGN of conditional writes in docs/protocol.md.

Tour of a commit, stop 6 of 8: see docs/tour.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, overload

from rollbridge.base.effects import Steps
from rollbridge.base.ids import SegmentId
from rollbridge.base.sn import ANY
from rollbridge.buffer.state import BufferedTransaction, FrameRef
from rollbridge.buffer.table import AbortCause, State
from rollbridge.commitlog.control import ControlKind, ControlRecord, Run, add_run
from rollbridge.errors import InvalidRequestError
from rollbridge.metadata.changes import Roll
from rollbridge.stream.conditions import RefusedCondition, Scope, StreamCondition, holds, place_of, why_moved
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.names import Partition
from rollbridge.stream.reading import KeyLineage
from rollbridge_coordinator.commit.outcomes import Outcomes, adopt
from rollbridge_coordinator.commit.plan import Targets, conditions_of, targets
from rollbridge_coordinator.commit.refusals import absorb, probe
from rollbridge_coordinator.core.effects import (
    AbortRound,
    AppendTogether,
    CommitRound,
    EffectRefusedError,
    Found,
    Items,
    Look,
    MergeFrames,
    Query,
    SendOffsets,
    Span,
    TakeUp,
    Undecided,
)
from rollbridge_coordinator.core.metrics import CommitPath, volumes_of
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.history.snapshots import note_settled

# Conditions


TRIES = 5
"""Attempts of a conditional round whose records are interleaved with another writer's."""


class ConditionsVerdict(Enum):
    """Result of a check of conditions, unless one of them is not met."""

    HOLD = "hold"
    DISTURBED = "disturbed"


@dataclass(frozen=True, slots=True)
class NotMet:
    """Reason to abort a transaction; ``condition`` is the unmet one, if any."""

    reason: str
    condition: RefusedCondition | None = None


@dataclass(frozen=True, slots=True)
class Before:
    """Histories of a stream that is being rolled: for its conditions the lineage of a key ends at a sealed segment.

    Attributes:
        history: Epochs before the new ones.
        whole: All epochs, with the ends of the sealed segments.
    """

    history: EpochHistory
    whole: EpochHistory


Volumes = Mapping[str, Sequence[int]]
"""Records and bytes that a round commits, by stream."""

NOTHING_ROLLED: Mapping[str, Before] = {}
"""Value for a round that is no rolling commit."""


def check_conditions(
    group: GroupState,
    transaction: BufferedTransaction,
    items: Items,
    offsets: Sequence[int],
    rolled: Mapping[str, Before],
) -> Steps[ConditionsVerdict | NotMet]:
    """Decide whether the conditions of a transaction hold.

    Args:
        transaction: Transaction with conditions, alone in its round.
        items: Frames of the transaction with the partitions to which they were appended.
        offsets: Offset of the first record of each frame.
        rolled: Streams that are being rolled, by name.

    Returns:
        A verdict; or the reason to abort, if a condition does not hold, can never hold, or is undecided.
    """
    spans: dict[Partition, list[Span]] = {}
    for (place, frame), offset in zip(items, offsets, strict=True):
        spans.setdefault(place, []).append(Span(offset, offset + frame.records))
    queries: list[Query] = []
    for item in conditions_of(transaction):
        try:
            queries.append(_query(group, transaction, item, spans, rolled))
        except InvalidRequestError as fault:
            return NotMet(f"a condition can never hold: {fault}")
    answers = yield from Look(queries)
    for query, answer in zip(queries, answers, strict=True):
        if isinstance(answer, Undecided):
            return NotMet(f"undecided: {answer.why}; begin the transaction again")
        # A refusal rests on committed records, so records of other writers in between do not change it.
        if not holds(query.condition, answer.last, query.lineage.active_base + answer.end, query.lineage):
            return (yield from _not_met(query, answer))
    disturbed = any(isinstance(answer, Found) and answer.disturbed for answer in answers)
    return ConditionsVerdict.DISTURBED if disturbed else ConditionsVerdict.HOLD


def _not_met(query: Query, answer: Found) -> Steps[NotMet]:
    actual = answer.last
    if actual.empty and query.since is not None:
        # Only records behind the expected position were read; read again without a bound, for the message.
        (again,) = yield from Look([replace(query, since=None)])
        actual = again.last if isinstance(again, Found) else ANY
    found = RefusedCondition(str(query.places.stream), query.condition.key, query.condition.expected, actual)
    return NotMet(f"{found}{why_moved(found.expected, actual, query.lineage)}", found)


def _query(
    group: GroupState,
    transaction: BufferedTransaction,
    item: StreamCondition,
    spans: Mapping[Partition, Sequence[Span]],
    rolled: Mapping[str, Before],
) -> Query:
    """Translate a condition into a query.

    Raises:
        InvalidRequestError: the condition names no stream of the transaction, or lacks a key where one is needed.
    """
    names = list(transaction.begin.streams)
    stream = group.streams.get(names[item.stream]) if item.stream < len(names) else None
    if stream is None:
        raise InvalidRequestError(f"there is no stream at place {item.stream} of the transaction")
    name = stream.config.name
    before = rolled.get(str(name))
    history = stream.history if before is None else before.history
    condition = item.condition
    if condition.key is None and len(history.active.segments) > 1:
        raise InvalidRequestError(f"{name} has several segments, so a condition on it needs a key")
    lineage = KeyLineage.of(stream.config, history, condition.key)
    place = place_of(condition.expected, lineage)
    # An expected transaction id is compared with that of the record itself; else it is enough to find no later one.
    since = place if condition.scope is Scope.KEY and condition.expected.transaction_id is None else None
    end = None if before is None else before.whole.sealed_end(lineage.active)
    if end is not None:
        return Query(stream.config.places, lineage, condition, since, end, ())
    own = tuple(spans.get(stream.place_of(lineage.active), ()))
    return Query(stream.config.places, lineage, condition, since, own[0].start if own else None, own)


ITEMS_AT_ONCE: Final = 20_000
"""Frames of a round up to which its items are a list; those of a larger round are made on access."""


class RoundItems(Sequence[tuple[Partition, FrameRef]]):
    """Items of a large round, frames with their partitions, made on access instead of kept in a list."""

    def __init__(self, transactions: Sequence[tuple[BufferedTransaction, Sequence[FrameRef]]], aims: Targets) -> None:
        self._transactions = transactions
        self._places = aims.places
        self._ends: list[int] = []
        for _, frames in transactions:
            self._ends.append(len(frames) + (self._ends[-1] if self._ends else 0))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[tuple[Partition, FrameRef]]:
        for transaction, frames in self._transactions:
            for frame in frames:
                yield self._place(transaction, frame), frame

    @overload
    def __getitem__(self, index: int) -> tuple[Partition, FrameRef]: ...

    @overload
    def __getitem__(self, index: slice) -> Items: ...

    def __getitem__(self, index: int | slice) -> tuple[Partition, FrameRef] | Items:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        number = bisect_right(self._ends, place)
        transaction, frames = self._transactions[number]
        frame = frames[place - self._ends[number] + len(frames)]
        return self._place(transaction, frame), frame

    def _place(self, transaction: BufferedTransaction, frame: FrameRef) -> Partition:
        name, _ = transaction.begin.epochs[frame.piece.stream]
        return self._places[name, frame.piece.segment]


def merge_direct(
    group: GroupState, transactions: Sequence[BufferedTransaction], now_ms: int, rolls: tuple[Roll, ...] = ()
) -> Steps[bool]:
    """Commit a round of transactions into active segments, and log the outcomes of the aborted ones among them.

    Args:
        rolls: Rolling commits whose duplicates are open, and take what belongs to them.

    Returns:
        False if a refusal keeps them waiting.
    """
    aims = targets(group, rolls)
    while True:
        doubts = group.waits.unknown_outcomes
        if doubts and any(doubts.is_suspect(item.id) for item in transactions):
            items, _ = items_of(transactions, aims)
            yield from probe(group, sorted({place for place, _ in items}))
        group.waits.unknown_outcomes.begin(transactions)
        try:
            volumes = yield from append_round(group, transactions, aims, now_ms)
            committed_ms = yield from CommitRound()
        except EffectRefusedError as refused:
            # Computed again: transactions whose offsets were refused in the round have no items any more.
            items, ends = items_of(transactions, aims)
            if not (yield from absorb(group, transactions, items, ends, refused, now_ms, may_wait=True)):
                return False
        else:
            path = CommitPath.ROLLING if rolls else CommitPath.DIRECT
            if not rolls and any(map(conditions_of, transactions)):
                path = CommitPath.CONDITIONAL
            group.metrics.note_round(transactions, volumes, path, committed_ms)
            settle(group, transactions, rolled=bool(rolls))
            return True


def append_round(
    group: GroupState,
    transactions: Sequence[BufferedTransaction],
    aims: Targets,
    now_ms: int,
    rolled: Mapping[str, Before] = NOTHING_ROLLED,
) -> Steps[Volumes]:
    """Append a round's offsets, frames and control records; nothing is visible until the round is committed.

    Returns the records and bytes committed with it, by stream.

    A transaction whose offsets are refused, because its consumer was fenced by a newer generation, is logged as
    aborted. So is one whose conditions do not hold; it is alone in its round.
    """
    group.fold.chronicle.round += 1
    if any(map(conditions_of, transactions)):
        (transaction,) = transactions
        return (yield from _append_if(group, transaction, aims, now_ms, rolled))
    with_offsets = yield from _append_offsets(group, transactions, now_ms)
    items, spans = items_of(transactions, aims)

    def records(offsets: Sequence[int]) -> list[ControlRecord]:
        starts = [0, *spans[:-1]]
        return [
            _control_record(group, transaction, items, offsets, range(start, end), aims, now_ms)
            for transaction, start, end in zip(transactions, starts, spans, strict=True)
        ]

    # A wrong prediction aborts the round, and with it the offsets of consumer groups: no predictions with those.
    expected = None if with_offsets else group.predictor.offsets(items)
    outcomes = Outcomes(group, transactions)
    if expected is not None:
        control = records(expected)
        offsets, positions = yield from AppendTogether(
            items, expected, group.commit_log, control, outcomes.predict(control), aims.rooms, aims.stamped
        )
        group.predictor.note(items, offsets, expected)
        if list(offsets) == expected:
            yield from outcomes.settle(control, positions)
            return volumes_of(items, aims.segments)
        outcomes.drop(positions)
        group.counts["rounds_repeated"] += 1
    offsets = (yield from MergeFrames(items, aims.rooms, aims.stamped)) if items else ()
    group.predictor.note(items, offsets)
    yield from outcomes.append(records(offsets))
    return volumes_of(items, aims.segments)


def append_prepared(
    group: GroupState,
    transaction: BufferedTransaction,
    aims: Targets,
    now_ms: int,
    rolled: Mapping[str, Before],
) -> Steps[Volumes]:
    """Append the rest of a large transaction to its native transaction, which becomes the round.

    That is the offsets of consumer groups and its control record; only an ABORT record if a condition fails, or if
    offsets are refused. Returns the records and bytes committed with it, by stream.
    """
    preparation = group.large.preparations.pop(transaction.id)
    # If it commits, the record alone is to be removed.
    group.large.leftovers[preparation.node] = preparation.record
    group.fold.chronicle.round += 1
    outcomes = Outcomes(group, [transaction])
    items: Items = preparation.items
    offsets: Sequence[int] = preparation.offsets or ()
    yield from TakeUp(preparation.node)
    yield from _append_offsets(group, [transaction], now_ms)
    if transaction.state is State.COMMITTING and conditions_of(transaction):
        verdict = yield from check_conditions(group, transaction, items, offsets, rolled)
        if isinstance(verdict, NotMet):
            yield from AbortRound()
            _refuse_condition(group, transaction, verdict, now_ms)
    if transaction.state is not State.COMMITTING:
        items, offsets = (), ()
    record = _control_record(group, transaction, items, offsets, range(len(items)), aims, now_ms)
    yield from outcomes.append([record])
    return volumes_of(items, aims.segments)


def _append_if(
    group: GroupState,
    transaction: BufferedTransaction,
    aims: Targets,
    now_ms: int,
    rolled: Mapping[str, Before],
) -> Steps[Volumes]:
    """Append the round of a conditional transaction: all of it, or only an ABORT record if a condition fails."""
    outcomes = Outcomes(group, [transaction])
    for _ in range(TRIES):
        with_offsets = yield from _append_offsets(group, [transaction], now_ms)
        items, _ = items_of([transaction], aims)
        offsets = (yield from MergeFrames(items, aims.rooms, aims.stamped)) if items else ()
        group.predictor.note(items, offsets)
        if transaction.state is not State.COMMITTING:
            verdict: ConditionsVerdict | NotMet = (
                ConditionsVerdict.HOLD
            )  # aborted already, so its conditions do not matter
        else:
            verdict = yield from check_conditions(group, transaction, items, offsets, rolled)
        if verdict is ConditionsVerdict.HOLD:
            record = _control_record(group, transaction, items, offsets, range(len(items)), aims, now_ms)
            yield from outcomes.append([record])
            return volumes_of(items, aims.segments)
        if with_offsets or items:
            yield from AbortRound()
        if isinstance(verdict, NotMet):
            break
        group.counts["rounds_repeated"] += 1
    else:
        verdict = NotMet("disturbed: others kept writing between its records; begin the transaction again")
    _refuse_condition(group, transaction, verdict, now_ms)
    yield from outcomes.append([_control_record(group, transaction, (), (), range(0), aims, now_ms)])
    return {}


def _refuse_condition(group: GroupState, transaction: BufferedTransaction, verdict: NotMet, now_ms: int) -> None:
    transaction.refused = verdict.condition
    group.fold.refuse(transaction.id, verdict.reason, now_ms, AbortCause.CONDITION)
    group.counts["conditions_refused"] += 1


def items_of(transactions: Sequence[BufferedTransaction], aims: Targets) -> tuple[Items, list[int]]:
    """Return the frames of a round with their partitions, and the index at which those of each transaction end."""
    ends: list[int] = []
    merged: list[tuple[BufferedTransaction, Sequence[FrameRef]]] = []
    end = 0
    committing = State.COMMITTING
    for transaction in transactions:
        if transaction.state is committing:
            merged.append((transaction, transaction.merged_frames()))
            end += len(merged[-1][1])
        ends.append(end)
    if end > ITEMS_AT_ONCE:
        return RoundItems(merged, aims), ends
    items: list[tuple[Partition, FrameRef]] = []
    places = aims.places
    for transaction, frames in merged:
        epochs = transaction.begin.epochs
        for frame in frames:
            name, _ = epochs[frame.piece.stream]
            items.append((places[name, frame.piece.segment], frame))
    return items, ends


def _append_offsets(group: GroupState, transactions: Sequence[BufferedTransaction], now_ms: int) -> Steps[bool]:
    """Append the offsets of consumer groups; return True if the round has any."""
    while True:
        owners = [
            (transaction, item)
            for transaction in transactions
            if transaction.manifest is not None and transaction.manifest.offsets
            if transaction.state is State.COMMITTING
            for item in transaction.manifest.offsets
        ]
        if not owners:
            return False
        refused = yield from SendOffsets([item for _, item in owners])
        if refused is None:
            return True
        place, reason = refused
        group.fold.refuse(owners[place][0].id, reason, now_ms, AbortCause.OFFSETS)
        group.counts["offsets_refused"] += 1


def settle(group: GroupState, transactions: Sequence[BufferedTransaction], *, rolled: bool = False) -> None:
    """Drop transactions whose outcome has become durable; the preserver keeps outcomes."""
    adopt(group)
    unknown_outcomes, begun, recorded = group.waits.unknown_outcomes, group.records.begun, group.records.recorded
    unknown_outcomes.end()
    committing = State.COMMITTING
    committed = 0
    for transaction in transactions:
        identifier = transaction.id
        is_committed = transaction.state is committing
        note_settled(group, transaction, is_aborted=not is_committed)
        if is_committed:
            committed += 1
            group.waits.faults.worked(transaction.begin.streams)
        group.fold.settle(identifier, rolled=rolled)
        # Most transactions of a busy group are in none of these, which are mostly empty.
        if unknown_outcomes:
            unknown_outcomes.forget(identifier)
        if group.waits.failed_rounds:
            group.waits.failed_rounds.pop(identifier, None)
        if begun:
            begun.discard(identifier)
        if recorded and identifier in recorded:
            recorded.discard(identifier)
            group.records.finished.append(identifier)
    group.counts["transactions_committed"] += committed
    group.counts["transactions_aborted"] += len(transactions) - committed


def begin_record(group: GroupState, transaction: BufferedTransaction, now_ms: int) -> ControlRecord:
    """Return the BEGIN record of a transaction that stays open for more than a moment."""
    begin = transaction.begin
    return ControlRecord(
        transaction=transaction.transaction_id,
        kind=ControlKind.BEGIN,
        client_name=begin.client_name,
        label=begin.label,
        begun_ms=transaction.begun_ms,
        decided_ms=now_ms,
        controller_epoch=group.controller_epoch,
        placement={name: {} for name in begin.streams},
    )


def _control_record(
    group: GroupState,
    transaction: BufferedTransaction,
    items: Items,
    offsets: Sequence[int],
    own: range,
    aims: Targets,
    now_ms: int,
) -> ControlRecord:
    """Return the outcome record of a transaction whose frames are the ``own`` ones of ``items``."""
    committing = transaction.state is State.COMMITTING
    placement: dict[str, dict[SegmentId, list[Run]]] = {}
    prepared: dict[str, dict[SegmentId, int]] = {}
    records = size = 0
    if len(own) == 1:  # as in most small transactions
        place, frame = items[own.start]
        stream, segment = aims.segments[place]
        piece, records, size = frame.piece, frame.records, frame.size
        placement = {stream: {segment: [Run(piece.part, offsets[own.start], records)]}}
        if segment.number != piece.segment:
            prepared = {stream: {segment: piece.segment}}
        own = own[1:]
    for index in own:
        place, frame = items[index]
        stream, segment = aims.segments[place]
        segments = placement.setdefault(stream, {})
        runs = segments.get(segment)
        if runs is None:
            runs = segments[segment] = []
            if segment.number != frame.piece.segment:
                prepared.setdefault(stream, {})[segment] = frame.piece.segment
        add_run(runs, frame.piece.part, offsets[index], frame.records)
        records += frame.records
        size += frame.size
    begin, order = transaction.begin, transaction.order
    return ControlRecord(
        transaction=transaction.transaction_id,
        kind=ControlKind.COMMIT if committing else ControlKind.ABORT,
        client_name=begin.client_name,
        label=begin.label,
        reason=transaction.reason,
        records=records,
        size_bytes=size,
        begun_ms=transaction.begun_ms,
        decided_ms=now_ms,
        controller_epoch=group.controller_epoch,
        placement=placement,
        refused=transaction.refused,
        order=(order.line, order.number) if committing and order is not None else None,
        prepared=prepared,
    )
