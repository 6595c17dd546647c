"""``rollbridge consume``: committed records, in the order of their epochs."""

from __future__ import annotations

import sys
from datetime import timedelta
from itertools import islice

import click

from bridge.cli import values
from bridge.cli.connecting import connected
from bridge.cli.context import CliContext
from bridge.cli.records import FIELDS, Line, json_line, line_of
from bridge.cli.tables import counted


@click.command(epilog=f"Fields of a format: {', '.join(FIELDS)}.")
@click.argument("stream_name", metavar="SCOPE/STREAM")
@click.option("--from-beginning/--from-end", default=True, help="Where to begin.  [default: --from-beginning]")
@click.option("--follow", is_flag=True, help="Go on with what is committed later, until Ctrl-C.")
@click.option("--max-records", type=click.IntRange(1), metavar="N", help="Stop after this many.")
@click.option(
    "--format",
    "template",
    type=values.escaped,
    default="{value}",
    show_default=True,
    metavar="TEXT",
    help=r"How to print a record, such as '{key}\t{value}'.",
)
@click.option("--null", default="null", show_default=True, metavar="TEXT", help="What stands for a null key or value.")
@click.option(
    "--wait",
    type=values.duration,
    default="30s",
    show_default=True,
    metavar="DURATION",
    help="Give up when nothing becomes readable for so long, although more was written.",
)
@click.pass_obj
def consume(
    context: CliContext,
    stream_name: str,
    from_beginning: bool,
    follow: bool,
    max_records: int | None,
    template: str,
    null: str,
    wait: timedelta,
) -> None:
    """Print the committed records of a stream, one in each line.

    Segments are read to their ends before those that continue them, so the records of a key come in the order in which
    they became visible, across scales and rolling commits. With --json each line is an object.
    """
    if not from_beginning and not follow:
        raise click.UsageError("--from-end without --follow would print nothing")
    line: Line = line_of(template, null)
    if context.json:
        line = json_line
    out = sys.stdout.buffer
    printed = 0
    with (
        connected(context) as b,
        b.reader(
            stream_name,
            start="earliest" if from_beginning else "latest",
            follow=follow,
            stalled_s=wait.total_seconds(),
        ) as reader,
    ):
        try:
            for records in reader.batches():
                left = None if max_records is None else max_records - printed
                chosen = list(islice(records, left))
                out.write(b"".join(map(line, chosen)))
                out.flush()
                printed += len(chosen)
                if printed == max_records:
                    break
        finally:
            if not context.json:
                context.tell(f"{counted(printed, 'record')} of {stream_name}")
