"""Exclusion: a writer that was deposed finds out when it writes.

``make example NAME=one_writer`` after ``make up``. No lock is held and none can expire: each write says what its
writer believes to be the last record, and the log refuses whoever is wrong. A writer that stood still for a long while,
and still takes itself for the only one, does no harm. ``make demo-cas`` has two that write at the same time.

Source: DistributedLog CAS proposal, "avoiding two concurrent writes to a log stream at the same time".
"""

from __future__ import annotations

import os
import signal
import sys

import click
import psutil

from rollbridge import EMPTY
from rollbridge.errors import CasWriteError
from spark_examples.demo.common import TRANSACTION_TIMEOUT_S, check, connect, new_stream, play, start, until

KEY = b"journal"
BEFORE_PAUSE = 5
DEPOSED = 40
"""Exit code of a writer that has found out."""


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


def show() -> bool:
    """A writer stands still, another one takes over, and the first one wakes up."""
    with connect("bert") as b:
        stream = new_stream(b, "journal")
        click.echo(f"anna keeps the journal {stream}")
        anna = start(keep_journal, stream, "anna")
        seen = psutil.Process(anna.pid)
        until(lambda: seen.status() == psutil.STATUS_STOPPED, "anna stands still", [anna])
        with b.cas_writer(stream) as writer:
            last = writer.write(KEY, b"bert 0", expected=writer.tail())
            click.echo(f"  anna stands still, bert takes over at {last}")
            seen.resume()
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


if __name__ == "__main__":
    play(show)
