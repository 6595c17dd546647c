"""Exclusion: of two writers at the same time at least one fails, and one that was deposed finds out when it writes.

``make example NAME=one_writer`` after ``make up``. No lock is held and none can expire: each write says what its
writer believes to be the last record, and the log refuses whoever is wrong. A writer that stood still for a long while,
and still takes itself for the only one, does no harm.

Source: DistributedLog CAS proposal, "avoiding two concurrent writes to a log stream at the same time".
"""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import click
import psutil

from rollbridge import EMPTY, SN, CasWriter
from rollbridge.errors import CasWriteError
from spark_examples.demo.competing import TRANSACTION_TIMEOUT_S, check, connect, new_stream, play, start, until

KEY = b"journal"
BEFORE_PAUSE = 5
DEPOSED = 40
"""Exit code of a writer that has found out."""


def write_at_once(writers: list[CasWriter], name: str, expected: SN) -> list[SN | CasWriteError]:
    """All write at the same time, on the same condition; what became of each write."""
    barrier = Barrier(len(writers))

    def attempt(writer: CasWriter) -> SN | CasWriteError:
        barrier.wait()
        try:
            return writer.write(KEY, name.encode(), expected=expected)
        except CasWriteError as refusal:
            return refusal

    with ThreadPoolExecutor(len(writers)) as pool:
        return list(pool.map(attempt, writers))


def show_contest(rounds: int) -> bool:
    """Two writers, again and again on the same condition."""
    with connect("anna") as one, connect("bert") as other:
        stream = new_stream(one, "contest")
        click.echo(f"two writers write to {stream} at the same time, {rounds} times")
        last, both, neither = EMPTY, 0, 0
        with one.cas_writer(stream) as first, other.cas_writer(stream) as second:
            for number in range(rounds):
                won = [item for item in write_at_once([first, second], f"{number}", last) if isinstance(item, SN)]
                both += len(won) == 2
                neither += not won
                last = won[0] if won else first.tail()
        click.echo(f"  both won {both} times, one won {rounds - both - neither} times, neither {neither} times")
        with one.reader(stream, follow=False) as reader:
            found = len(list(reader))
    return all(
        [
            check("at least one of two failed, each time", both == 0),
            check("what was refused is not in the log", found == rounds - neither),
        ]
    )


def keep_journal(stream: str, name: str) -> None:
    """Write a journal, and stand still in the middle, as processes do; leave when somebody else has taken it over."""
    with connect(name) as b, b.cas_writer(stream, transaction_timeout=TRANSACTION_TIMEOUT_S) as writer:
        last = EMPTY
        for number in range(2 * BEFORE_PAUSE):
            if number == BEFORE_PAUSE:
                os.kill(os.getpid(), signal.SIGSTOP)
            try:
                last = writer.write(KEY, f"{name} {number}".encode(), expected=last)
            except CasWriteError as refusal:
                click.echo(f"  {name}: {refusal}")
                sys.exit(DEPOSED)


def show_takeover() -> bool:
    """A writer stands still, another one takes over, and the first one wakes up."""
    with connect("bert") as b:
        stream = new_stream(b, "journal")
        click.echo(f"anna keeps the journal {stream}")
        anna = start(keep_journal, stream, "anna")
        assert anna.pid is not None
        seen = psutil.Process(anna.pid)
        until(lambda: seen.status() == psutil.STATUS_STOPPED, "anna stands still", [anna])
        with b.cas_writer(stream) as writer:
            last = writer.write(KEY, b"bert 0", expected=writer.tail())
            click.echo(f"  anna stands still, bert takes over at {last}")
            os.kill(anna.pid, signal.SIGCONT)
            anna.join()
            writer.write(KEY, b"bert 1", expected=last)
        with b.reader(stream, follow=False) as reader:
            found = [record.value for record in reader]
    wanted = [b"anna %d" % number for number in range(BEFORE_PAUSE)] + [b"bert 0", b"bert 1"]
    return all(
        [
            check("anna was refused, and left", anna.exitcode == DEPOSED),
            check("the journal is anna's up to the takeover, and bert's from there", found == wanted),
        ]
    )


@click.command()
@click.option("--rounds", default=50, show_default=True, type=click.IntRange(1))
def main(rounds: int) -> None:
    """Of two writers at the same time at least one fails, and one that was deposed finds out."""
    play(lambda: all([show_contest(rounds), show_takeover()]))


if __name__ == "__main__":
    main()
