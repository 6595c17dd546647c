"""``rollbridge txn``: list, describe, extend, commit and abort open transactions, and show outcomes.

Like Kafka's own ``kafka-transactions.sh``, but for transactions that may rightly stay open for days: the client that
has one open, its age, and the end of its lease are what matters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import click

from rollbridge.base.deadlines import wall_ms
from rollbridge.base.ids import TransactionId
from rollbridge.base.text import printable
from rollbridge.buffer.table import State
from rollbridge.cli import records as values
from rollbridge.cli.common import CliContext, connected, counted, duration, is_terminal, moment, table
from rollbridge.client.connection import Bridge
from rollbridge.client.outcomes import ArrivedTransaction, Outcome, TransactionStory
from rollbridge.client.recovery import check_commit
from rollbridge.errors import (
    CorruptDataError,
    InvalidRequestError,
    NotFoundError,
    RollbridgeError,
    StreamRecreatedError,
    TransactionNotFoundError,
)
from rollbridge.metadata.records import TransactionRecord
from rollbridge.stream.config import outlived
from rollbridge.stream.names import GroupName, StreamName

_STATES = [State.OPEN.value, State.COMMITTING.value, State.ABORTING.value]
STORY_S = 5.0
"""Timeout in s of asking the leader for events; without them the record is still shown."""
_NAMES_MAX = 20
"""Most segment names shown; streams may have thousands."""
_ID = click.argument("transaction", metavar="ID")


@click.group()
def txn() -> None:
    """List, describe, extend, commit and abort open transactions, and show the outcomes of others.

    A transaction is listed once it has been open for about half a second, and until its end is logged.
    """


@txn.command("list")
@click.option("--group", metavar="SCOPE/GROUP", help="Show only transactions of this group.")
@click.option("--stream", "stream_name", metavar="SCOPE/STREAM", help="Show only those that may write to this stream.")
@click.option("--client", help="Show only those of the client of this name.")
@click.option("--label", help="Show only those whose label contains this.")
@click.option("--state", type=click.Choice(_STATES), help="Show only those in this state.")
@click.option(
    "--min-age", type=values.duration, metavar="DURATION", help="Show only those open for at least this long."
)
@click.option(
    "--max-lease", type=values.duration, metavar="DURATION", help="Show only those whose lease ends within this time."
)
@click.pass_obj
def list_transactions(
    context: CliContext,
    group: str | None,
    stream_name: str | None,
    client: str | None,
    label: str | None,
    state: str | None,
    min_age: timedelta | None,
    max_lease: timedelta | None,
) -> None:
    """List open transactions, oldest first."""
    wanted = None if group is None else GroupName.parse(group)
    now_ms = wall_ms()
    keep: list[Callable[[TransactionRecord], bool]] = []
    if client is not None:
        keep.append(lambda record: record.client_name == client)
    if label is not None:
        keep.append(lambda record: label in (record.label or ""))
    if state is not None:
        keep.append(lambda record: record.state == state)
    if min_age is not None:
        keep.append(lambda record: now_ms - record.begun_ms >= min_age / timedelta(milliseconds=1))
    if max_lease is not None:
        keep.append(lambda record: record.begun_ms + record.lease_ms - now_ms <= max_lease / timedelta(milliseconds=1))
    with connected(context) as b:
        if stream_name is not None:
            own = str(b.admin.name_of(stream_name))
            keep.append(lambda record: own in record.streams)
        found = [record for record in b.admin.transactions(wanted) if all(check(record) for check in keep)]
        unreadable = b.admin.unreadable_groups()
        if not found:  # it may be of a mistaken name, which is not answered as if there were nothing
            if wanted is not None and wanted not in unreadable:
                b.admin.group(str(wanted))
            if stream_name is not None:
                with suppress(CorruptDataError):
                    b.admin.places(stream_name)
    for name, why in unreadable.items():
        if wanted in (None, name):
            context.tell(f"group {name} may have more open transactions, its record cannot be read: {why}")
    context.answer(
        [transaction_document(record, now_ms) for record in found],
        transaction_table(found, now_ms) if found else "No open transaction is recorded that fits.",
    )


@txn.command()
@_ID
@click.pass_obj
def describe(context: CliContext, transaction: str) -> None:
    """Show one transaction, and its latest events.

    Does not wait for a commit or abort in progress. Events are those that the group's leader has seen since it took
    over; older ones are in the leaders' logs. Events of an ended transaction are kept for a while.
    """
    identifier = TransactionId.parse(transaction)
    now_ms = wall_ms()
    with connected(context) as b:
        try:
            record = b.admin.find_transaction(identifier)
        except TransactionNotFoundError:
            record = None
        story, why = _story(b, identifier, record)
        names = {} if record is None else _segment_names(b, record)
        old = [] if record is None else _older_than_kept(b, record, now_ms)
    document = (
        {} if record is None else {**transaction_document(record, now_ms), "segments": names, "older_than_kept": old}
    )
    about = [("id", str(identifier))]
    if record is not None:
        about += [
            ("state", record.state if story is None else story.state.value),
            ("group", str(record.group)),
            ("client", printable(record.client_name)),
            ("label", printable(record.label or "-")),
            ("begun", f"{moment(record.begun_ms)}, {duration(now_ms - record.begun_ms)} ago"),
            ("lease", f"{duration(record.lease_ms)}, {_lease_left(record, now_ms)}"),
        ]
    elif story is not None:
        about += [
            ("state", story.state.value),
            ("group", str(story.group)),
            ("client", printable(story.client_name or "-")),
            ("label", printable(story.label or "-")),
            ("since", f"{moment(story.since_ms)}, {duration(now_ms - story.since_ms)} ago"),
        ]
    if story is not None:
        about.append(("reason", printable(story.reason or "-")))
        document = {**story_document(story), **document, "state": story.state.value}
    lines = [f"{name:<8}{value}" for name, value in about]
    if record is not None:
        rows = [(name, str(epoch)) for name, epoch in record.streams.items()]
        lines += ["", table(("STREAM", "EPOCH"), rows, right=("EPOCH",)), ""]
        listed = [name for found in names.values() for name in found]
        lines += [
            "It writes to these segments; `consume --segment` shows what is committed of them.",
            *listed[:_NAMES_MAX],
        ]
        if len(listed) > _NAMES_MAX:
            lines.append(f"and {len(listed) - _NAMES_MAX} more, which --json names")
        lines += [f"Now {item}" for item in old]
    lines += ["", *([f"Its events are not known: {why}"] if story is None else _event_lines(story))]
    context.answer({**document, "events_unknown": why}, "\n".join(lines))


def _segment_names(b: Bridge, record: TransactionRecord) -> dict[str, list[str]]:
    """Return the full names of the segments that a transaction can write to, by stream, without deleted streams.

    Source: PDP-24, "Fully qualified segment name".
    """
    found = {}
    for name, epoch in record.streams.items():
        with suppress(NotFoundError, InvalidRequestError, StreamRecreatedError):
            segments = b.admin.history(name).grown_from(epoch).segments
            found[name] = [StreamName.parse(name).qualified(item.id, record.id) for item in segments]
    return found


def _older_than_kept(b: Bridge, record: TransactionRecord, now_ms: int) -> list[str]:
    """Return what of an open transaction is older than its topics keep records, a sentence for each topic."""
    found = []
    for name, epoch in record.streams.items():
        with suppress(NotFoundError, InvalidRequestError, StreamRecreatedError):
            config, written = b.admin.describe(name).config, b.admin.history(name).record(epoch)
            found.append(outlived(config.topic, config.kept_in(written), record.begun_ms, now_ms))
    return [item for item in found if item is not None]


def _story(
    b: Bridge, identifier: TransactionId, record: TransactionRecord | None
) -> tuple[TransactionStory | None, str | None]:
    """Return the leader's events, or the reason why there are none; raise it if there is no record either."""
    try:
        return b.story(identifier, group=None if record is None else record.group, timeout=STORY_S), None
    except CorruptDataError as fault:
        if record is None:
            raise TransactionNotFoundError(
                f"no open transaction {identifier} is recorded; its leader tells no more"
            ) from fault
        return None, "the leader is of an older version, which does not tell them"
    except RollbridgeError as fault:
        if record is None:
            raise
        return None, str(fault)


def _event_lines(story: TransactionStory) -> list[str]:
    since = f"since the leader of controller epoch {story.controller_epoch} took over, {moment(story.events_since_ms)}"
    if not story.events:
        return [f"Nothing has happened to it {since}; what was before is in the log of the leader before."]
    return [f"Events {since}:", *(f"  {printable(event.line())}" for event in story.events)]


def story_document(story: TransactionStory) -> dict[str, Any]:
    """Return a leader's events of a transaction as JSON."""
    return {
        **outcome_document(story),
        "events_since_ms": story.events_since_ms,
        "controller_epoch": story.controller_epoch,
        "events": [
            {
                "at_ms": event.at_ms,
                "before": event.before.value,
                "after": event.after.value,
                "event": event.event,
                "cause": event.cause,
                "round": event.round,
            }
            for event in story.events
        ],
    }


@txn.command()
@_ID
@click.option(
    "--reason",
    default="admin",
    show_default=True,
    help="Reason, which is reported to waiters for the transaction.",
)
@click.pass_obj
def abort(context: CliContext, transaction: str, reason: str) -> None:
    """Abort an open transaction of any client; nothing of it will ever be visible.

    One that is aborted already stays so, and has the reason of that abort. One that is committed is refused.
    """
    identifier = TransactionId.parse(transaction)
    with connected(context) as b:
        reason = b.admin.abort_transaction(identifier, reason=reason)
    context.answer({"transaction": str(identifier), "aborted": True, "reason": reason}, f"Aborted {identifier}.")


@txn.command()
@_ID
@click.option("--yes", is_flag=True, help="Do not ask; needed where standard input is no terminal.")
@click.option(
    "--records", type=click.IntRange(0), metavar="N", help="Do nothing if it holds another number of records than N."
)
@click.option("--savepoint", is_flag=True, help="Leave out what came after its last savepoint.")
@click.pass_obj
def commit(context: CliContext, transaction: str, yes: bool, records: int | None, savepoint: bool) -> None:
    """Commit an open transaction in the place of its owner, which is gone, with all that has arrived of it.

    Shows what that is, and asks. What its owner had not sent yet is lost. Conditions and consumer offsets are those of
    its last savepoint; without one they are lost, too. An owner that comes back can neither write nor end it. Refused
    if other processes have written parts of it, or if it is a cooperative transaction, such as a Spark job's: what to
    commit is not known then.
    """
    identifier = TransactionId.parse(transaction)
    with connected(context) as b:
        found = b.arrived(identifier)
        if found.state is State.OPEN:
            check_commit(found, records, at_savepoint=savepoint)
            if not yes:
                _confirm(context, found, at_savepoint=savepoint)
            point = found.savepoint if savepoint else None
            records = found.records if point is None else sum(point.records.values())
        done = b.commit_arrived(identifier, records=records, at_savepoint=savepoint)
    again = "was committed before" if found.committed else "is committed"
    context.answer(
        {"transaction": str(identifier), "committed": True, "records": done.records, "position": done.position},
        f"Transaction {identifier} {again}, with {counted(done.records, 'record')}, at {found.group}@{done.position}.",
    )


def _confirm(context: CliContext, found: ArrivedTransaction, *, at_savepoint: bool) -> None:
    """Show what would be committed, and ask; raise an error if stdin is not a terminal, or the answer is no."""
    if not is_terminal(sys.stdin):
        raise click.UsageError("stdin is not a terminal: use --yes; nothing was done")
    now_ms = wall_ms()
    left = found.lease_ends_ms - now_ms
    rows = [
        ("id", str(found.transaction)),
        ("group", str(found.group)),
        ("client", printable(found.client_name)),
        ("label", printable(found.label or "-")),
        ("begun", f"{moment(found.since_ms)}, {duration(now_ms - found.since_ms)} ago"),
        ("lease", f"{duration(left)} left" if left > 0 else f"over for {duration(-left)}"),
        ("records", f"{found.records:,}"),
        ("bytes", f"{found.bytes:,}"),
    ]
    for line in [f"{name:<9}{value}" for name, value in rows]:
        context.tell(line)
    point = found.savepoint
    counted_of = found.streams if point is None or not at_savepoint else point.records
    streams = [(name, f"{records:,}") for name, records in counted_of.items()]
    context.tell(table(("STREAM", "RECORDS"), streams, right=("RECORDS",)))
    if point is None:
        told = (
            "Conditions and consumer offsets that its owner would have committed are not known, as it made no "
            "savepoint, and are left out"
        )
    else:
        offsets = sum(len(item.offsets) for item in point.offsets)
        groups = ", ".join(printable(item.group_id) for item in point.offsets)
        told = (
            f"With them go {counted(offsets, 'consumer offset')}{f' of {groups}' if groups else ''} and "
            f"{counted(len(point.conditions), 'condition')} of its last savepoint, number {point.number}"
        )
    context.tell(f"These records become visible for good. {told}; if its owner is still at work, it is kept out.")
    click.confirm("Commit this transaction?", abort=True, err=True)


@txn.command()
@_ID
@click.argument("lease", type=values.duration, metavar="DURATION")
@click.pass_obj
def extend(context: CliContext, transaction: str, lease: timedelta) -> None:
    """Extend the lease of an open transaction of any client: DURATION from now on, such as 2d.

    Its owner continues undisturbed. A lease is never made shorter, and the limit of the coordinators counts.
    """
    identifier = TransactionId.parse(transaction)
    with connected(context) as b:
        end = b.extend(identifier, lease)
    ends_ms = int(end.timestamp() * 1000)
    context.answer(
        {"transaction": str(identifier), "lease_ends_ms": ends_ms},
        f"Transaction {identifier} may stay open until {moment(ends_ms)}.",
    )


@txn.command()
@click.argument("transaction", metavar="[ID]", required=False)
@click.option("--label", help="Instead of the id: the latest transaction of the client with this label.")
@click.option("--client", help="Name of the client that began it; needed with --label.")
@click.option("--group", metavar="SCOPE/GROUP", help="Ask only this group.")
@click.pass_obj
def outcome(
    context: CliContext, transaction: str | None, label: str | None, client: str | None, group: str | None
) -> None:
    """Show the outcome of a transaction, for as long as it is remembered.

    Waits for a requested commit; so a transaction that is shown as open has no requested end.
    """
    if label is not None and client is None:
        raise click.UsageError("--label needs --client: labels are those of a client")
    identifier = None if transaction is None else TransactionId.parse(transaction)
    with connected(context) as b:
        found = b.outcome(identifier, label=label, client=client, group=group)
    silent = {str(item): str(fault) for item, fault in found.unanswered.items()}
    rows = (
        ("id", str(found.transaction)),
        ("state", found.state.value),
        ("position", "-" if found.position is None else f"{found.group}@{found.position}"),
        ("records", f"{found.records:,}"),
        ("client", printable(found.client_name)),
        ("label", printable(found.label or "-")),
        ("since", f"{moment(found.since_ms)}, {duration(wall_ms() - found.since_ms)} ago"),
        ("reason", printable(found.reason or "-")),
        *(("no answer", printable(f"{item}, which may know a later one: {why}")) for item, why in silent.items()),
    )
    text = "\n".join(f"{name:<10}{value}" for name, value in rows)
    context.answer({**outcome_document(found), "unanswered": silent}, text)


def outcome_document(found: Outcome) -> dict[str, Any]:
    """Return an outcome as JSON."""
    return {
        "transaction": str(found.transaction),
        "state": found.state.value,
        "group": str(found.group),
        "position": found.position,
        "records": found.records,
        "client": found.client_name,
        "label": found.label,
        "since_ms": found.since_ms,
        "reason": found.reason,
    }


def transaction_table(records: Iterable[TransactionRecord], now_ms: int | None = None) -> str:
    """Return a table of open transactions."""
    now_ms = wall_ms() if now_ms is None else now_ms
    rows = [
        (
            str(record.id),
            record.state,
            duration(now_ms - record.begun_ms),
            _lease_left(record, now_ms),
            record.client_name,
            record.label or "-",
            " ".join(record.streams),
        )
        for record in records
    ]
    return table(("TRANSACTION", "STATE", "AGE", "LEASE", "CLIENT", "LABEL", "STREAMS"), rows, right=("AGE",))


def transaction_document(record: TransactionRecord, now_ms: int | None = None) -> dict[str, Any]:
    """Return an open transaction as JSON."""
    now_ms = wall_ms() if now_ms is None else now_ms
    return {
        "transaction": str(record.id),
        "state": record.state,
        "group": str(record.group),
        "client": record.client_name,
        "label": record.label,
        "begun_ms": record.begun_ms,
        "age_ms": now_ms - record.begun_ms,
        "lease_ms": record.lease_ms,
        "lease_left_ms": record.begun_ms + record.lease_ms - now_ms,
        "streams": dict(record.streams),
    }


def _lease_left(record: TransactionRecord, now_ms: int) -> str:
    left = record.begun_ms + record.lease_ms - now_ms
    return f"{duration(left)} left" if left > 0 else f"over for {duration(-left)}"
