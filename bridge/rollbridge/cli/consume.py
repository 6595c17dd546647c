"""``rollbridge consume``: records in the order of their epochs, alone or in a group, or whole transactions."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import islice
from typing import Any, cast

import click
from confluent_kafka import KafkaException

from rollbridge.base.ids import SegmentId, TransactionId
from rollbridge.cli import records as values
from rollbridge.cli.common import CliContext, connected, counted
from rollbridge.cli.records import FIELDS, LineFormat, json_line, line_of, record_document
from rollbridge.client.connection import Bridge
from rollbridge.consumer.consumer import Consumer
from rollbridge.consumer.reader import IsolationLevel, Reader
from rollbridge.consumer.records import Record
from rollbridge.consumer.transactions import CommittedTransaction, TransactionReader
from rollbridge.errors import NotFoundError
from rollbridge.kafka.errors import translate
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.names import DEFAULT_GROUP, GroupName, StreamName, check_stream_or_topic, parse_qualified

_POLL_S = 0.2
_BATCH = 500


@click.command(epilog=f"Fields of a format: {', '.join(FIELDS)}.")
@click.argument("name", metavar="SCOPE/STREAM|TOPIC")
@click.option(
    "--from",
    "start",
    metavar="START",
    help="Start: earliest, latest, a time such as 2026-01-31T12:00:00Z, a DLSN, an SN, or the position that "
    "an earlier run printed.  [default: earliest]",
)
@click.option("--from-beginning/--from-end", default=None, hidden=True, deprecated="--from does it")
@click.option("--follow", is_flag=True, help="Continue with later commits, until Ctrl-C.")
@click.option(
    "--max-records", type=click.IntRange(1), metavar="N", help="Stop after this many records, or transactions."
)
@click.option(
    "--isolation",
    type=click.Choice(["read_committed", "read_uncommitted"]),
    default="read_committed",
    show_default=True,
    help="read_uncommitted also previews records of open transactions; the field {committed} tells them apart.",
)
@click.option("--group", metavar="GROUP", help="Read as a member of a consumer group, which shares the segments.")
@click.option(
    "--transactions",
    is_flag=True,
    help="Print whole transactions in commit order; the argument is SCOPE, or SCOPE/GROUP of a transaction group.",
)
@click.option(
    "--segment",
    "one_segment",
    is_flag=True,
    help="Print one segment; the argument is its full name, SCOPE/STREAM/N/#epoch.E, or with /#transaction.ID behind "
    "it what a transaction has written to it.",
)
@click.option(
    "--format",
    "template",
    type=values.escaped,
    default="{value}",
    show_default=True,
    metavar="TEXT",
    help=r"Format of a record, such as '{key}\t{value}'.",
)
@click.option(
    "--null", default="null", show_default=True, metavar="TEXT", help="Text to print for a null key or value."
)
@click.option(
    "--wait",
    type=values.duration,
    default="30s",
    show_default=True,
    metavar="DURATION",
    help="Give up if nothing becomes readable for this long although more was written.",
)
@click.pass_obj
def consume(
    context: CliContext,
    name: str,
    start: str | None,
    from_beginning: bool | None,
    follow: bool,
    max_records: int | None,
    isolation: str,
    group: str | None,
    transactions: bool,
    one_segment: bool,
    template: str,
    null: str,
    wait: timedelta,
) -> None:
    """Print the committed records of a stream, one per line.

    Segments are read to their ends before their successors, so the records of a key come in the order in which they
    became visible, across scales and rolling commits. With --json each line is an object. At the end the position is
    printed to standard error, in the form that --from takes.

    --segment reads the whole stream and leaves out records of other segments. After a rolling commit, what the
    transaction wrote to a segment is found in the segment of the same number that the commit created.

    A member of a group begins at the group's committed offsets, or at --from earliest or latest if there are none, and
    commits what it has printed.
    """
    if start is not None and from_beginning is not None:
        raise click.UsageError("give --from, or --from-beginning or --from-end, not both")
    if from_beginning is not None:
        start = "earliest" if from_beginning else "latest"
    start = start or "earliest"
    if start == "latest" and not follow and group is None:
        raise click.UsageError("--from latest (--from-end) without --follow would print nothing")
    if group == "":
        raise click.UsageError("the name of a --group is not empty")
    if transactions and group is not None:
        raise click.UsageError("--transactions are read without a consumer --group")
    if one_segment and (transactions or group is not None):
        raise click.UsageError("--segment goes with neither --group nor --transactions")
    if isolation == "read_uncommitted" and (transactions or group is not None):
        raise click.UsageError("--isolation read_uncommitted goes with neither --group nor --transactions")
    if group is not None and not follow and max_records is None:
        raise click.UsageError("a member of a --group reads for ever: give --follow, or --max-records")
    if group is not None and start not in ("earliest", "latest"):
        raise click.UsageError("with --group, --from is earliest or latest")
    owner = _owner(name) if transactions else None
    part = parse_qualified(name) if one_segment else None
    if part is not None:
        name = str(part[0])
    elif owner is None:
        check_stream_or_topic(name)
    line: LineFormat = json_line if context.json else line_of(template, null)
    show = _Printer(max_records)
    reading: dict[str, Any] = {"start": start, "follow": follow, "stalled_s": wait.total_seconds()}
    with connected(context) as b:
        if owner is not None:
            _transactions(context, b.transactions(owner.scope, group=owner.group, **reading), owner, line, show)
        elif group is not None:
            _member(context, b, name, start, group, line, show)
        else:
            wanted = None if part is None else _part_of(b.admin.history(name), *part)
            reader = b.reader(name, isolation=cast("IsolationLevel", isolation), **reading)
            _records(context, reader, name, line, show, wanted)


def _owner(name: str) -> GroupName:
    return GroupName.parse(name) if "/" in name else GroupName(name, DEFAULT_GROUP)


def _part_of(
    history: EpochHistory, stream: StreamName, segment: SegmentId, transaction: TransactionId | None
) -> Callable[[Record], bool]:
    """Return a filter for the records of a segment, or for those that a transaction has written to that segment.

    A rolling commit creates a segment with the number of the one written to, so the number decides.

    Raises:
        NotFoundError: there is no such segment, or for a transaction none of that number.
    """
    known = history.segments()
    if segment not in known and (transaction is None or all(item.number != segment.number for item in known)):
        dropped = f", or it ended before epoch {history.first}, the first that is kept" if history.first else ""
        raise NotFoundError(
            f"there is no segment {stream.qualified(segment, transaction)}{dropped}; `rollbridge stream history "
            f"{stream}` lists all"
        )
    if transaction is None:
        return lambda record: record.segment == segment
    return lambda record: record.transaction_id == transaction and record.segment.number == segment.number


class _Printer:
    """Printer of lines, up to a limit."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._out = None if sys.stdout is None else sys.stdout.buffer  # None if it was closed
        self.printed = 0

    @property
    def left(self) -> int | None:
        """Number of lines that may still be printed; None without a limit."""
        return None if self._most is None else self._most - self.printed

    def most(self, count: int) -> int:
        """Return how many of so many lines may still be printed."""
        return count if self.left is None else min(count, self.left)

    def lines(self, lines: Iterable[bytes], count: int) -> None:
        left = memoryview(b"".join(lines))
        if self._out is not None:
            while left:  # with PYTHONUNBUFFERED it may take a part, as where a disk is full
                left = left[self._out.write(left) :]
            self._out.flush()
        self.printed += count


def _records(
    context: CliContext,
    reader: Reader,
    stream: str,
    line: LineFormat,
    show: _Printer,
    wanted: Callable[[Record], bool] | None,
) -> None:
    with reader:
        position = reader.position
        try:
            while show.left != 0 and not reader.is_finished():
                records = reader.consume(show.most(_BATCH), _POLL_S)
                if wanted is not None:
                    records = list(filter(wanted, records))
                if records:
                    show.lines(map(line, records), len(records))
                position = reader.position  # behind what was printed, and not what was to be
        finally:
            _close(context, show, f"of {stream}", f"position {position}")


def _transactions(
    context: CliContext,
    reader: TransactionReader,
    owner: GroupName,
    line: LineFormat,
    show: _Printer,
) -> None:
    with reader:
        position = reader.position
        try:
            for transaction in islice(reader, show.left):
                show.lines(_documents(transaction) if context.json else _lines(transaction, line), 1)
                position = transaction.position
        finally:
            if not context.json:
                context.tell(f"{counted(show.printed, 'transaction')} of {owner}; position {position}")


def _lines(transaction: CommittedTransaction, line: LineFormat) -> Iterator[bytes]:
    control = transaction.control
    label = "" if control.label is None else f" {json.dumps(control.label, ensure_ascii=False)}"
    yield f"# {transaction.order} {control.transaction} of {control.client_name}{label}, ".encode()
    yield f"{counted(control.records, 'record')}\n".encode()
    yield from map(line, transaction.records())


def _documents(transaction: CommittedTransaction) -> Iterator[bytes]:
    """Yield one object for the transaction and one for each of its records, which may be many."""
    control = transaction.control

    def encoded(document: dict[str, Any]) -> bytes:
        return json.dumps(document, ensure_ascii=False).encode() + b"\n"

    yield encoded(
        {
            "type": "transaction",
            "transaction": str(control.transaction),
            "order": transaction.order,
            "position": str(transaction.position),
            "label": control.label,
            "client_name": control.client_name,
            "begun_ms": control.begun_ms,
            "decided_ms": control.decided_ms,
            "records": control.records,
            "streams": transaction.counts(),
        }
    )
    for number, record in enumerate(transaction.records(), 1):
        yield encoded({"type": "record", "stream": record.stream, "total_order": number, **record_document(record)})


def _member(
    context: CliContext, b: Bridge, stream: str, start: str, group: str, line: LineFormat, show: _Printer
) -> None:
    settings = b.settings
    config = {
        "bootstrap.servers": settings.bootstrap_servers,
        "zookeeper": settings.zookeeper,
        "zookeeper.root": settings.zookeeper_root,
        "client.id": settings.client_name,
        "group.id": group,
        "auto.offset.reset": start,
        "auto.commit.interval.ms": 1_000,
        "enable.auto.offset.store": False,  # or closing would commit what could not be printed
        **settings.kafka,
    }
    with Consumer(config) as consumer:
        consumer.subscribe([stream])
        try:
            while show.left != 0:
                messages = consumer.consume(show.most(_BATCH), _POLL_S)
                for message in messages:
                    error = message.error()
                    if error is not None:
                        raise translate(error, f"read {stream} in group {group}", f"group {group}")
                show.lines((line(message.record()) for message in messages), len(messages))
                for message in {(message.topic(), message.partition()): message for message in messages}.values():
                    consumer.store_offsets(message=message)
        except KafkaException as exc:
            raise translate(exc, f"read {stream} in group {group}", f"group {group}") from exc
        finally:
            _close(context, show, f"of {stream}", f"by a member of group {group}")


def _close(context: CliContext, show: _Printer, what: str, where: str) -> None:
    if not context.json:
        context.tell(f"{counted(show.printed, 'record')} {what}; {where}")
