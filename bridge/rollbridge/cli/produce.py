"""``rollbridge produce``, ``cas`` and ``tail``: write lines as one transaction, or a record on a condition."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, BinaryIO, Final

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rollbridge.base.sn import SN
from rollbridge.cli import records as values
from rollbridge.cli.common import CliContext, connected, counted, is_terminal
from rollbridge.client.transaction import Transaction
from rollbridge.config import ClientOptions
from rollbridge.errors import InvalidRequestError, RecordTooLargeError, RollbridgeError
from rollbridge.kafka.records import Compression
from rollbridge.stream.conditions import Scope
from rollbridge.stream.names import check_stream_or_topic

LINE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Longest line read, in bytes: far above any record limit, so that a file without line ends cannot fill memory."""

ABORT_TIMEOUT_S: Final = 10.0

HeaderPair = tuple[str, bytes]


class _Source(click.File):
    """File of lines; standard input may be closed."""

    name = click.File.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-" and sys.stdin is None:
            self.fail("standard input is closed; name a file", param, ctx)
        return super().convert(value, param, ctx)


@click.command()
@click.argument("stream_name", metavar="SCOPE/STREAM|TOPIC")
@click.argument("file", type=_Source("rb"), default="-")
@click.option(
    "--key-separator", type=values.escaped, metavar="TEXT", help="Separator between the key and the value of a line."
)
@click.option(
    "--header", "headers", type=values.header, multiple=True, metavar="NAME=VALUE", help="Header of every record."
)
@click.option("--label", help="Free text to find the transaction again.")
@click.option("--timeout", type=values.duration, metavar="DURATION", help="Lease of the transaction.  [default: 1d]")
@click.option(
    "--compression",
    type=click.Choice([codec.name.lower() for codec in Compression]),
    default="none",
    show_default=True,
    help="Codec of the records, from here to the readers.",
)
@click.option("--progress/--no-progress", default=None, help="Show progress.  [default: on a terminal]")
@click.pass_obj
def produce(
    context: CliContext,
    stream_name: str,
    file: BinaryIO,
    key_separator: str | None,
    headers: tuple[HeaderPair, ...],
    label: str | None,
    timeout: timedelta | None,
    compression: str,
    progress: bool | None,
) -> None:
    """Write the lines of FILE, or of standard input, as one transaction.

    Readers see all of them at once, or none if anything fails.
    """
    check_stream_or_topic(stream_name)
    if key_separator == "":
        raise click.UsageError("--key-separator is empty")
    separator = None if key_separator is None else key_separator.encode("utf-8", "surrogateescape")
    shown = is_terminal(sys.stderr) and not context.json if progress is None else progress
    began = time.monotonic()
    with connected(context, ClientOptions(compression=compression)) as b:
        txn = b.begin(stream_name, timeout=timeout, label=label)
        with _progress(file, shown) as source:
            try:
                _write(txn, stream_name, split(source, separator), list(headers))
            except BaseException as exc:
                if not context.json:
                    context.tell(f"aborting transaction {txn.id}: nothing of it will be visible")
                with suppress(RollbridgeError):  # its lease aborts it at the latest; the first error is reported
                    txn.abort(reason=f"{type(exc).__name__}: {exc}", timeout=ABORT_TIMEOUT_S)
                raise
            result = txn.commit()
    seconds = time.monotonic() - began
    ends = f", from {result.first} to {result.last}" if result.first is not None else ""
    context.answer(
        {
            "transaction": str(result.transaction),
            "stream": stream_name,
            "label": label,
            "records": result.records,
            "first": None if result.first is None else str(result.first),
            "last": None if result.last is None else str(result.last),
            "position": result.position,
            "seconds": round(seconds, 3),
        },
        f"Committed {counted(result.records, 'record')} in {seconds:.1f} s as {result.transaction}{ends}.",
    )


def lines(source: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file without their line feeds; a last line without one counts too.

    Raises:
        RecordTooLargeError: A line is longer than 16 MiB.
    """
    number = 0
    while line := source.readline(LINE_BYTES_MAX + 1):
        number += 1
        if line.endswith(b"\n"):
            yield line[:-1]
        elif len(line) > LINE_BYTES_MAX:
            raise RecordTooLargeError(
                f"line {number} is longer than {LINE_BYTES_MAX} bytes; is this a file of lines? No line of it was "
                "committed",
                size_bytes=len(line),
                limit_bytes=LINE_BYTES_MAX,
            )
        else:
            yield line


def split(source: BinaryIO, separator: bytes | None) -> Iterator[tuple[bytes | None, bytes]]:
    """Yield key and value of each line; the key is None without a separator.

    Raises:
        InvalidRequestError: A line lacks the separator.
    """
    if separator is None:
        for line in lines(source):
            yield None, line
        return
    for number, line in enumerate(lines(source), start=1):
        key, found, value = line.partition(separator)
        if not found:
            raise InvalidRequestError(f"line {number} has no {separator!r}: {line[:60]!r}; no line was committed")
        yield key, value


def _write(
    txn: Transaction, stream: str, records: Iterator[tuple[bytes | None, bytes]], headers: list[HeaderPair]
) -> None:
    if not headers:
        txn.write_all(stream, records)
        return
    for key, value in records:
        txn.write(stream, key=key, value=value, headers=headers)


class _Counting:
    """File that reports to a progress bar how much of it was read."""

    def __init__(self, file: BinaryIO, bar: Progress, size: int | None) -> None:
        self._file = file
        self._bar = bar
        self._task = bar.add_task("writing", total=size)
        self._read = 0
        self._told = 0

    def readline(self, limit: int) -> bytes:
        line = self._file.readline(limit)
        self._read += len(line)
        if not line:
            self._bar.update(self._task, completed=self._read, total=self._read, description="committing")
        elif self._read - self._told >= 1 << 16:
            self._bar.update(self._task, completed=self._read)
            self._told = self._read
        return line


@contextmanager
def _progress(file: BinaryIO, shown: bool) -> Iterator[BinaryIO]:
    """Yield the file itself, or one that moves a progress bar on standard error."""
    if not shown:
        yield file
        return
    try:
        size: int | None = os.fstat(file.fileno()).st_size or None
    except OSError:
        size = None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        *([TimeRemainingColumn()] if size else []),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _Counting(file, bar, size)  # type: ignore[misc]  # readline is all that is used


# ``rollbridge cas`` and ``rollbridge tail``


_STREAM = click.argument("stream_name", metavar="SCOPE/STREAM|TOPIC")
_KEY = click.option(
    "--key", metavar="TEXT", help="Key, which chooses the segment; may be left out if there is only one."
)
_SCOPE = click.option(
    "--scope",
    type=click.Choice([item.value for item in Scope]),
    default=Scope.SEGMENT.value,
    show_default=True,
    help="Compare with the last record of the key's segment, or with the last one of this key.",
)


@click.command()
@_STREAM
@_KEY
@_SCOPE
@click.pass_obj
def tail(context: CliContext, stream_name: str, key: str | None, scope: str) -> None:
    """Print the SN of the last committed record, as `rollbridge cas --expected` takes it.

    Prints `empty` if nothing was written yet.
    """
    with connected(context) as b, b.cas_writer(stream_name) as writer:
        found = writer.tail(_bytes(key), scope=scope)
    context.answer(sn_document(found), str(found))


@click.command()
@_STREAM
@click.argument("value", required=False)
@_KEY
@click.option(
    "--expected",
    metavar="SN",
    help="SN of the last record, or one of its members (`seq=N`, `txid=N`); `empty`: there must be none; `any`.",
)
@_SCOPE
@click.option("--transaction-id", type=int, metavar="N", help="Number of your own that becomes part of the SN.")
@click.option(
    "--monotonic-ids",
    "monotonic_ids",
    is_flag=True,
    help="Refuse a --transaction-id that is lower than the last one.",
)
@click.option("--rising-ids", is_flag=True, hidden=True, help="The former name of --monotonic-ids.")
@click.option(
    "--header", "headers", type=values.header, multiple=True, metavar="NAME=VALUE", help="Header of the record."
)
@click.option("--outcome", metavar="TOKEN", help="Write nothing, but ask what became of the write with this token.")
@click.pass_obj
def cas(
    context: CliContext,
    stream_name: str,
    value: str | None,
    key: str | None,
    expected: str | None,
    scope: str,
    transaction_id: int | None,
    monotonic_ids: bool,
    rising_ids: bool,
    headers: tuple[tuple[str, bytes], ...],
    outcome: str | None,
) -> None:
    """Write VALUE if the last record is the expected one, and print the SN of the new record.

    Otherwise nothing is written, the exit code is 5, and the error names the actual SN. If the outcome is unknown, the
    exit code is 6, and the error holds the token to ask again with.
    """
    if rising_ids:
        click.echo("--rising-ids is called --monotonic-ids now; the next release does not take it", err=True)
    if outcome is not None:
        if value is not None or expected is not None:
            raise click.UsageError("--outcome asks about a write; it goes with neither VALUE nor --expected")
        with connected(context) as b, b.cas_writer(stream_name) as writer:
            found = writer.outcome(outcome)
        context.answer(
            {"written": found is not None, **({} if found is None else sn_document(found))},
            "It was not written." if found is None else str(found),
        )
        return
    if value is None or expected is None:
        raise click.UsageError("VALUE and --expected are needed; `rollbridge tail` says what to expect")
    try:
        wanted = SN.parse(expected)
    except InvalidRequestError as fault:
        raise click.BadParameter(str(fault)) from None
    with connected(context) as b, b.cas_writer(stream_name, monotonic_ids=monotonic_ids or rising_ids) as writer:
        sn = writer.write(
            _bytes(key),
            _bytes(value),
            expected=wanted,
            scope=scope,
            headers=headers,
            transaction_id=transaction_id,
        )
    context.answer(sn_document(sn), str(sn))


def sn_document(sn: SN) -> dict[str, object]:
    """Return an SN as JSON: its text, and its members."""
    return {
        "sn": str(sn),
        "empty": sn.empty,
        "dlsn": None if sn.dlsn is None else str(sn.dlsn),
        "transaction_id": sn.transaction_id,
        "sequence_id": sn.sequence_id,
    }


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogateescape")
