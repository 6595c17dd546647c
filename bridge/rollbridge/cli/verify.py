"""``rollbridge verify``: prove that each committed record of a stream is where the commit log says, once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rollbridge.cli.common import CliContext, ExitCode, connected, counted
from rollbridge.doctor import verify as checks
from rollbridge.doctor.verification import VerificationTally
from rollbridge.stream.names import check_stream_or_topic

_UNCHECKED = {
    "deleted": "deleted from their segments since",
    "forgotten": "of commits that the commit log does not tell of any more, or of former lives of the stream",
    "elsewhere": "named by the log in segments that were removed, or in former lives of the stream",
    "compacted": "compacted away",
    "later": "committed since this began",
}


@click.command()
@click.argument("stream_name", metavar="SCOPE/STREAM|TOPIC")
@click.option("--no-progress", is_flag=True, help="Show no progress bar.")
@click.pass_obj
def verify(context: CliContext, stream_name: str, no_progress: bool) -> int:
    """Prove that each committed record of a stream is where the commit log says, once; nothing is changed.

    Reads commit log, buffers and segments from end to end, and may run while the stream is used. Exit code 1 names each
    finding: records that are missing, misplaced, doubled, or that no commit names. What retention has deleted cannot be
    checked, and is counted.
    """
    check_stream_or_topic(stream_name)
    with connected(context) as b:
        config = b.admin.describe(stream_name).config
        history = b.admin.history(stream_name)
    began = time.monotonic()
    shown = not no_progress and not context.json and Console(stderr=True).is_terminal
    with _bar(shown) as (planned, tell):
        found = checks.verify(context.kafka(), config, history, planned=planned, tell=tell)
    seconds = time.monotonic() - began
    document = {
        "stream": str(config.name),
        "findings": [item._asdict() for item in found.findings.named],
        "counts": {str(kind): count for kind, count in found.findings.counts.items()},
        "transactions": found.transactions,
        "compared_with_buffers": found.arrived,
        "segments": found.segments,
        "records": asdict(found.tally),
        "log_start": found.log_start,
        "seconds": round(seconds, 3),
    }
    lines = [*map(str, found.findings.named)]
    if (more := found.findings.total - len(found.findings.named)) > 0:
        lines.append(f"and {more:,} more")
    lines += list(_summary(found, seconds))
    context.answer(document, "\n".join(lines))
    return ExitCode.UNEXPECTED if found.findings.total else ExitCode.OK


def _summary(found: checks.StreamVerification, seconds: float) -> Iterator[str]:
    tally: VerificationTally = found.tally
    yield (
        f"{counted(tally.matched, 'record')} of {counted(found.transactions, 'transaction')} in "
        f"{counted(found.segments, 'segment')} are where the commit log says, once; {tally.plain:,} are of plain "
        f"writers, {tally.conditional:,} of conditional ones; {counted(found.arrived, 'transaction')} compared with "
        f"the buffers, in {seconds:.1f} s."
    )
    for name, why in _UNCHECKED.items():
        if count := getattr(tally, name):
            yield f"Not checked: {counted(count, 'record')} {why}."
    if found.findings.total:
        yield f"Found: {counted(found.findings.total, 'finding')}; nothing was changed."


@contextmanager
def _bar(shown: bool) -> Iterator[tuple[Callable[[checks.Plan], object] | None, checks.Tell | None]]:
    """Yield what is to be told of the progress; nothing where no bar is shown."""
    if not shown:
        yield None, None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)
        yield (
            lambda plan: bar.update(task, total=plan.offsets),
            lambda what, offsets: bar.update(task, advance=offsets, description=what),
        )
