"""Table of waits: for each cause its retry, who is told and its bound; and everything that waits in a group now. Pure.

A :class:`.WaitRow` is made from the one place that holds the wait, :mod:`rollbridge_coordinator.core.waits` or the
group's large merges. Page, metrics and ``stream describe`` show these rows, and keep none of their own. Nothing that is
bounded, such as a round or an id for background merges, is held by a row that waits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

from rollbridge.base.ids import TransactionId
from rollbridge.buffer.state import BufferedTransaction
from rollbridge.buffer.table import State
from rollbridge.metadata.changes import SUSPENDED, WATCHED, EpochTransition
from rollbridge.metadata.requests import WaitCause, WaitKind, WaitRow
from rollbridge.stream.conditions import name_some
from rollbridge_coordinator.commit.plan import OrderKey, is_large, line_of, merge_fault, rolls_of
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.waits import MERGES_MAX, UNKNOWN_MAX


class WaitRule(NamedTuple):
    """Rule of all waits of one cause.

    Attributes:
        meaning: What waits, and for what.
        retry: When it is tried again.
        told: Who is told, besides page and metrics.
        bound: What ends the wait at the latest.
    """

    meaning: str
    retry: str
    told: str
    bound: str


CAUSES: Final[Mapping[WaitCause, WaitRule]] = {
    WaitCause.OBSTACLES: WaitRule(
        "a scale or rolling commit of which nothing is done, for native transactions of others or for missing leaders",
        "at checks, every 0.2 s",
        "the log, each minute; the client of a scale, when it is refused",
        "20 s for a scale; Kafka's `transaction.max.timeout.ms` for a rolling commit",
    ),
    WaitCause.HALF_DONE: WaitRule(
        "a scale or rolling commit that has closed its segments, for the same; its streams take no transactions",
        "at checks, every 0.2 s; after a refusal with a back-off of up to a minute",
        "clients of its streams, which are in an error state; the log",
        "Kafka's `transaction.max.timeout.ms`; a refusal of a broker has none",
    ),
    WaitCause.LATE_COMMITS: WaitRule(
        "a rolling commit, or its segments that are still open, for more late commits",
        "at its end",
        "none: it is short",
        "100 ms before it, five times `LATE_COMMIT_WINDOW_MS` after it",
    ),
    WaitCause.ERROR_STATE: WaitRule(
        "transactions of a stream, for a broker that refuses one of its topics",
        "with a back-off of up to a minute, or when the topic has changed",
        "clients of the stream (`rollbridge stream describe`); the log",
        "the leases of its transactions",
    ),
    WaitCause.LARGE_MERGE: WaitRule(
        "a large transaction, for its merge in the background, or for a place to begin it",
        f"with a back-off of up to a minute, {MERGES_MAX} times",
        "its client (`rollbridge txn describe`); the log",
        f"{MERGES_MAX} merges that fail, after which it is aborted",
    ),
    WaitCause.UNKNOWN_OUTCOME: WaitRule(
        "a transaction whose round had no known outcome: it is merged alone, after a probe of the brokers",
        "in the next round",
        "its client, when it is refused; the log",
        f"{UNKNOWN_MAX} such rounds of its own",
    ),
    WaitCause.REQUEST: WaitRule(
        "a request of a client, for the end of a transaction or for everything that was in the buffers",
        "when those have been folded",
        "its client, which waits for the answer",
        "the client's time-out, after which it withdraws the request",
    ),
    WaitCause.SCALING: WaitRule(
        "a stream that its policy asks to scale, for what holds the scale up",
        "at the next measurement",
        "`rollbridge stream describe`; the log",
        "none: a scale is no promise",
    ),
    WaitCause.LATE_RECORDS: WaitRule(
        "whatever deletes records of a stream (retention, emptied segments, `stream truncate`), for copies of late "
        "records that may be there or not",
        "with a back-off of up to a minute",
        "who truncates the stream, when it is refused; the doctor; the log",
        "40 minutes if the segment's topic is gone; a refusal of a broker has none",
    ),
}


def waits_of(group: GroupState) -> list[WaitRow]:
    """Return all that waits in a group at present, the longest wait first; those of unknown age come last."""
    rows = (*_changes(group), *_streams(group), *_transactions(group), *_requests(group))
    return sorted(rows, key=lambda row: (not row.since_ms, row.since_ms, row.cause, row.name, row.streams))


def _changes(group: GroupState) -> Iterator[WaitRow]:
    waits = group.waits
    for name, wait in waits.held.items():
        reasons = _texts(wait.lasting or wait.seen)
        yield WaitRow(WaitCause.OBSTACLES, WaitKind.SCALE, name, wait.streams, wait.since_ms, wait.due_ms, reasons)
    for streams, roll in waits.held_rolls.items():
        wait = roll.wait
        cause = WaitCause.OBSTACLES if wait.seen else WaitCause.LATE_COMMITS
        yield WaitRow(
            cause, WaitKind.ROLLING_COMMIT, "", streams, wait.since_ms, wait.due_ms, _texts(wait.lasting or wait.seen)
        )
    for item in waits.pending_changes.values():
        kind = WaitKind.SCALE if isinstance(item.work, EpochTransition) else WaitKind.ROLLING_COMMIT
        wait = item.wait
        reasons = (item.refused,) if item.refused else _texts(wait.lasting)
        # Its own age: the wait begins again with each leader.
        yield WaitRow(
            WaitCause.HALF_DONE, kind, "", tuple(item.work.streams), item.work.created_ms, wait.due_ms, reasons
        )
    open_for = waits.lingering
    if open_for is not None:
        streams = tuple(open_for.committing.streams)
        yield WaitRow(
            WaitCause.LATE_COMMITS, WaitKind.ROLLING_COMMIT, "", streams, open_for.since_ms, open_for.until_ms, ()
        )


def _streams(group: GroupState) -> Iterator[WaitRow]:
    for name, fault in group.waits.faults.items():
        if fault.code != SUSPENDED:  # the change itself has a row
            retry_ms = 0 if fault.code in WATCHED else group.waits.faults.retry_ms(name)
            yield WaitRow(
                WaitCause.ERROR_STATE, WaitKind.STREAM, name, (name,), fault.since_ms, retry_ms, (fault.reason,)
            )
    for stream in group.streams.values():
        held = stream.scaling.wait
        if held is not None:
            name = str(held.stream)
            yield WaitRow(WaitCause.SCALING, WaitKind.STREAM, name, (name,), held.since_ms, 0, (held.reason,))
        forwarding = stream.late.forwarding
        if forwarding is not None:
            name = str(stream.config.name)
            why = f"copies of late records of segment {forwarding.segment}"
            yield WaitRow(WaitCause.LATE_RECORDS, WaitKind.STREAM, name, (name,), 0, 0, (why,))


def _transactions(group: GroupState) -> Iterator[WaitRow]:
    for identifier, transaction in group.fold.decided.items():
        if group.waits.unknown_outcomes.is_suspect(identifier):
            yield _of_transaction(WaitCause.UNKNOWN_OUTCOME, transaction, 0, ("the outcome of its round is unknown",))
        elif is_large(group, transaction) and merge_fault(group, transaction) is None:
            why = _large_wait(group, transaction)
            if why is not None:
                retry = group.large.retries.get(identifier)
                is_resting = retry is not None and not retry.is_due
                retry_ms = retry.rest.until_ms if retry is not None and is_resting else 0
                yield _of_transaction(WaitCause.LARGE_MERGE, transaction, retry_ms, (why,))


def _of_transaction(
    cause: WaitCause, transaction: BufferedTransaction, retry_ms: int, reasons: tuple[str, ...]
) -> WaitRow:
    streams = tuple(sorted(transaction.written_streams()))
    name = str(transaction.transaction_id)
    return WaitRow(cause, WaitKind.TRANSACTION, name, streams, transaction.decided_ms, retry_ms, reasons)


def _requests(group: GroupState) -> Iterator[WaitRow]:
    for name, question in group.waits.questions.items():
        request = question.request
        streams = (request.stream,) if request.stream else ()
        why = "everything that was in the buffers when it came"
        yield WaitRow(WaitCause.REQUEST, WaitKind.REQUEST, name, streams, request.created_ms, 0, (why,))
    for identifier, names in group.waits.answers.items():
        why = f"the end of transaction {TransactionId.from_bytes(identifier)}"
        for name in names:
            yield WaitRow(WaitCause.REQUEST, WaitKind.REQUEST, name, (), 0, 0, (why,))
    for name in group.waits.unanswered:
        why = "ZooKeeper, which refuses its answer and its removal"
        yield WaitRow(WaitCause.REQUEST, WaitKind.REQUEST, name, (), 0, 0, (why,))


def _texts(found: Collection[object]) -> tuple[str, ...]:
    return tuple(sorted(map(str, found)))


# Transactions that wait with something, in words


def waiting(group: GroupState) -> Iterator[tuple[BufferedTransaction, str]]:
    """Yield the transactions whose commits wait for something that may take long, with the reason, in their order.

    Nothing of them is appended for good before that is over, so they may still be aborted.
    """
    held: dict[OrderKey, BufferedTransaction] = {}
    for transaction in list(group.fold.decided.values()):
        if transaction.state is not State.COMMITTING:
            continue
        line = line_of(transaction)
        why = _own_wait(group, transaction) if transaction.is_complete() else UNREAD
        if why is None and line in held:
            why = f"transaction {held[line].transaction_id} of its connection"
        if why is not None:
            held.setdefault(line, transaction)
            yield transaction, why
    for transaction in group.fold.lines.held():
        yield transaction, EARLIER


EARLIER: Final = "earlier commits of its connection"
UNREAD: Final = "frames that its commit names had not been read from the buffers"


def why_waits(group: GroupState, wanted: BufferedTransaction) -> str | None:
    """Return what a transaction waits for, to follow that verb; None if it does not."""
    return next((why for transaction, why in waiting(group) if transaction is wanted), None)


def _own_wait(group: GroupState, transaction: BufferedTransaction) -> str | None:
    name = group.waits_for(transaction)
    if name is not None:
        return f"stream {name}, which is {'suspended' if group.is_suspended(name) else 'in an error state'}"
    if merge_fault(group, transaction) is not None:
        return None
    large = is_large(group, transaction)
    if group.waits.held_rolls:
        rolls = transaction.written_streams() if large else rolls_of(group, transaction).keys()
        held = group.waits.held_rolls.get(tuple(sorted(rolls))) if rolls else None
        if held is not None:
            why = name_some(held.wait.seen) or "further late commits"
            return f"{why}, before a rolling commit of {', '.join(sorted(rolls))}"
    return _large_wait(group, transaction) if large else None


def _large_wait(group: GroupState, transaction: BufferedTransaction) -> str | None:
    retry = group.large.retries.get(transaction.id)
    again = "" if retry is None else f", which begins again (time {retry.rest.times + 1}): {retry.why}"
    preparation = group.large.preparations.get(transaction.id)
    if preparation is not None:
        if preparation.offsets is not None:
            return None
        return f"the background merge of its records, which takes a while for so many{again}"
    if retry is not None and not retry.is_due:
        return f"the merge of its records{again}"
    if len(group.large.preparations) >= group.settings.merges_beside_max:
        others = ", ".join(str(item.record.transaction) for item in group.large.preparations.values())
        return f"one of the places for merges of large transactions, which are taken by {others}"
    return None
