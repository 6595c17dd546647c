"""Read, transform, write: two processes copy the same file into a stream, and each line gets there exactly once.

``make example NAME=copy_file`` after ``make up``. The number of a line is the transaction id of its record, and
each line is written on condition that the one before it is the last record. So the log itself says how far the copy has
come: a copier keeps no progress of its own, and one that is killed, at whatever point, is replaced by one that asks.

Source: DistributedLog CAS proposal, "'read-transform-write' tasks".
"""

from __future__ import annotations

import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import click

from rollbridge import EMPTY, SN, CasWriter
from rollbridge.errors import CasOutcomeUnknownError, CasWriteError
from spark_examples.demo.competing import (
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
COPIERS = ("anna", "bert")


def transform(line: bytes) -> bytes:
    """What is done to each line on its way."""
    return line.strip().upper()


def lines_copied(last: SN) -> int:
    """How many lines are in the log, of which this is the last record."""
    return 0 if last.transaction_id is None else last.transaction_id + 1


def copy(stream: str, path: Path, name: str) -> None:
    """What a copier does: write the line that comes next, whoever has written those before."""
    lines = path.read_bytes().splitlines()
    with connect(name) as b, b.cas_writer(stream, transaction_timeout=TRANSACTION_TIMEOUT_S) as writer:
        number = lines_copied(writer.tail(KEY))
        while number < len(lines):
            number = copy_line(writer, name, number, transform(lines[number]))


def copy_line(writer: CasWriter, name: str, number: int, line: bytes) -> int:
    """Write a line unless somebody else has; return the number of the line that comes next."""
    try:
        written = writer.write(
            KEY,
            line,
            expected=EMPTY if number == 0 else SN(transaction_id=number - 1),
            transaction_id=number,
            headers=[("copier", name.encode())],
        )
    except CasWriteError as refusal:
        return lines_copied(refusal.actual)
    except CasOutcomeUnknownError:
        return lines_copied(writer.tail(KEY))
    return lines_copied(written)


def has_copied(onlooker: CasWriter, lines: int) -> bool:
    """Whether the copy has come so far."""
    return lines_copied(onlooker.tail(KEY)) >= lines


def show(lines: int) -> bool:
    """Copy a file; whether the copy is what it should be."""
    with tempfile.TemporaryDirectory() as folder, connect("archivist") as b:
        path = Path(folder) / "file.txt"
        path.write_text("".join(f"line {number} of the file\n" for number in range(lines)))
        stream = new_stream(b, "copy")
        click.echo(f"two processes copy {lines} lines to {stream}")
        copiers = [start(copy, stream, path, name) for name in COPIERS]
        with b.cas_writer(stream) as onlooker:
            for turn, name in enumerate(COPIERS):
                goal = lines * (turn + 1) // (len(COPIERS) + 1)
                until(partial(has_copied, onlooker, goal), "the copy goes on", copiers)
                kill(copiers[turn])
                copiers.append(start(copy, stream, path, f"{name}-again"))
                click.echo(f"  {name} is killed after line {lines_copied(onlooker.tail(KEY))}; another one starts")
        finish(copiers)
        with b.reader(stream, follow=False) as reader:
            records = list(reader)
        for copier, count in Counter(dict(record.headers)["copier"] for record in records).items():
            click.echo(f"  {(copier or b'').decode()} copied {count}")
        wanted = [transform(line) for line in path.read_bytes().splitlines()]
    return check("each line is there once, transformed, in its order", [record.value for record in records] == wanted)


@click.command()
@click.option("--lines", default=1000, show_default=True, type=click.IntRange(100))
def main(lines: int) -> None:
    """Two processes copy the same file into a stream, and each line gets there exactly once."""
    play(lambda: show(lines))


if __name__ == "__main__":
    main()
