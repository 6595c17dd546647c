"""Read, transform, write: two processes copy the same file into a stream, and each line gets there exactly once.

``make example NAME=copy_file`` after ``make up``. The number of a line is the transaction id of its record, and
each line is written on condition that the one before it is the last record. So the log itself says how far the copy has
come: a copier keeps no progress of its own, and one that is killed, at whatever point, is replaced by one that asks.

Source: DistributedLog CAS proposal, "'read-transform-write' tasks".
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from rollbridge import EMPTY, SN
from rollbridge.errors import CasOutcomeUnknownError, CasWriteError
from spark_examples.demo.common import (
    TRANSACTION_TIMEOUT_S,
    check,
    connect,
    finish,
    kill,
    new_stream,
    play,
    start,
    until,
)

KEY = b"file"


def lines_copied(last: SN) -> int:
    """Return how many lines are in the log, of which this is the last record."""
    return 0 if last.transaction_id is None else last.transaction_id + 1


def copy(stream: str, path: Path, name: str) -> None:
    """Write the line that comes next, whoever has written those before, until all are there."""
    lines = path.read_bytes().splitlines()
    with connect(name) as b, b.cas_writer(stream, transaction_timeout=TRANSACTION_TIMEOUT_S) as writer:
        last = writer.tail(KEY)
        while (number := lines_copied(last)) < len(lines):
            expected = EMPTY if number == 0 else SN(transaction_id=number - 1)
            try:
                last = writer.write(KEY, lines[number].upper(), expected=expected, transaction_id=number)
            except CasWriteError as refusal:
                last = refusal.actual
            except CasOutcomeUnknownError:
                last = writer.tail(KEY)


def show(lines: int) -> bool:
    """Copy a file; return whether the copy is what it should be."""
    with tempfile.TemporaryDirectory() as folder, connect("archivist") as b:
        path = Path(folder) / "file.txt"
        path.write_text("".join(f"line {number} of the file\n" for number in range(lines)))
        stream = new_stream(b, "copy")
        click.echo(f"two processes copy {lines} lines to {stream}")
        copiers = [start(copy, stream, path, name) for name in ("anna", "bert")]
        with b.cas_writer(stream) as onlooker:
            for turn, copier in enumerate(copiers[:], 1):
                goal = lines * turn // 3
                until(lambda goal=goal: lines_copied(onlooker.tail(KEY)) >= goal, "the copy goes on", copiers)  # type: ignore[misc]
                kill(copier)
                copiers.append(start(copy, stream, path, f"another-{turn}"))
                click.echo(f"  a copier is killed after line {lines_copied(onlooker.tail(KEY))}; another one starts")
        finish(copiers)
        with b.reader(stream, follow=False) as reader:
            found = [record.value for record in reader]
    wanted = [f"LINE {number} OF THE FILE".encode() for number in range(lines)]
    return check("each line is there once, transformed, in its order", found == wanted)


@click.command()
@click.option("--lines", default=1000, show_default=True, type=click.IntRange(100))
def main(lines: int) -> None:
    """Two processes copy the same file into a stream, and each line gets there exactly once."""
    play(lambda: show(lines))


if __name__ == "__main__":
    main()
