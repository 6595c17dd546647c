"""``make demo-scaling``: a stream follows its load by itself: it splits while that rises, and merges once it falls.

A stream of one segment has a scaling policy that wants few records a second in each. More and more is written, some
keys more often than others, then less, and nothing in the end. The coordinator measures and scales; its
windows, minutes otherwise, are seconds here. A transaction is open all the while, and committed in the end, and a
reader counts. Everything runs on an ephemeral Kafka, ZooKeeper and coordinator, which are gone at the end.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import click

import rollbridge
from rollbridge.cli.common import counted
from rollbridge.cli.stream import history_table
from rollbridge.errors import RollbridgeError
from rollbridge.metadata.requests import WaitCause
from rollbridge_devcluster.ephemeral import ProcessCluster

STREAM: Final = "shop/clicks"
POLICY: Final = rollbridge.ScalingPolicy(events_per_second=100, max_segments=8)
SECONDS: Final = {
    "ROLLBRIDGE_COORDINATOR_SCALING_WINDOW_MS": "1000",
    "ROLLBRIDGE_COORDINATOR_SCALING_COOLDOWN_MS": "4000",
    "ROLLBRIDGE_COORDINATOR_SCALING_PER_HOUR_MAX": "100",
}
"""Seconds where there are minutes otherwise."""
Phases = Sequence[tuple[int, int]]

PHASES: Final[Phases] = ((60, 6), (250, 8), (700, 14), (150, 10))
"""Records per second, and for how many seconds."""
KEYS: Final = 300
BATCH_S: Final = 0.1
QUIET_S: Final = 60.0
PATIENCE_S: Final = 60.0


@dataclass
class Account:
    """What was written and acknowledged, and what was read."""

    written: Counter[bytes] = field(default_factory=Counter)
    read: Counter[bytes] = field(default_factory=Counter)
    disordered: list[bytes] = field(default_factory=list)
    """Keys of which a record came before an earlier one."""

    @property
    def is_exact(self) -> bool:
        """Whether each record was read once, in the order of its key."""
        return self.read == self.written and not self.disordered


class Watcher:
    """Tells what the stream does, when it does it."""

    def __init__(self, b: rollbridge.Bridge, stream: str) -> None:
        self._b = b
        self._stream = stream
        self._began = time.monotonic()
        self._epoch = 0
        self._wait = ""

    def tell(self, text: str) -> None:
        """Print a line, with the time since the beginning."""
        click.echo(f"{time.monotonic() - self._began:6.1f} s  {text}")

    def look(self) -> int:
        """Tell what is new of the stream; return how many segments it has."""
        history = self._b.admin.history(self._stream)
        for record in history.records:
            if record.epoch > self._epoch:
                self._epoch = record.epoch
                if record.reason:
                    self.tell(f"scaled to {counted(len(record.segments), 'segment')}: {record.reason}")
        waits = self._b.admin.waits(self._stream)
        wait = next((row.reasons[0] for row in waits if row.cause is WaitCause.SCALING), "")
        if wait not in ("", self._wait):
            self.tell(f"waits: {wait}")
        self._wait = wait
        return len(history.active.segments)


def write(b: rollbridge.Bridge, stream: str, phases: Phases, account: Account, watcher: Watcher) -> None:
    """Write with the rates of all phases, one after the other."""
    rng = random.Random(1)
    number = 0
    with b.writer(stream) as writer:
        for rate, seconds in phases:
            watcher.tell(f"load: {rate} records/s")
            end = time.monotonic() + seconds
            due = time.monotonic()
            while time.monotonic() < end:
                sent = []
                for _ in range(round(rate * BATCH_S)):
                    key = b"visitor-%d" % min(int(rng.expovariate(1 / (KEYS / 4))), KEYS)
                    sent.append((key, writer.write(key, b"%d" % number)))
                    number += 1
                for key, future in sent:
                    future.result(PATIENCE_S)
                    account.written[key] += 1
                watcher.look()
                due += BATCH_S
                time.sleep(max(due - time.monotonic(), 0))


def read(b: rollbridge.Bridge, stream: str, account: Account, ending: threading.Event) -> None:
    """Read along until everything that was written has come, or it takes too long."""
    last: dict[bytes, int] = {}
    deadline = float("inf")
    with b.reader(stream) as reader:
        while time.monotonic() < deadline:
            record = reader.poll(0.2)
            if ending.is_set():
                deadline = min(deadline, time.monotonic() + PATIENCE_S)
                if record is None and account.read == account.written:
                    return
            if record is None or record.key is None or record.value is None:
                continue
            number = int(record.value)
            if number < last.get(record.key, -1):
                account.disordered.append(record.key)
            last[record.key] = number
            account.read[record.key] += 1


def play(b: rollbridge.Bridge, stream: str = STREAM, phases: Phases = PHASES) -> bool:
    """Let load rise and fall, and tell what the stream makes of it; return whether all went well."""
    b.admin.create_stream(stream, scaling=POLICY)
    click.echo(f"{stream} is scaled {POLICY}; windows of 1 to 10 s stand for 2 to 20 min")
    account, ending, watcher = Account(), threading.Event(), Watcher(b, stream)
    reader = threading.Thread(target=read, args=(b, stream, account, ending), name="reader", daemon=True)
    reader.start()
    old = b.begin(stream, label="open all the while")
    old.write(stream, key=b"old", value=b"0")
    old.flush()
    write(b, stream, phases, account, watcher)
    watcher.tell("load: none")
    most = max(len(record.segments) for record in b.admin.history(stream).records)
    end = time.monotonic() + QUIET_S
    while watcher.look() > 1 and time.monotonic() < end:
        time.sleep(0.2)
    old.write(stream, key=b"old", value=b"1")
    old.commit()
    account.written[b"old"] += 2
    watcher.tell("the transaction that was open all the while is committed")
    ending.set()
    reader.join(2 * PATIENCE_S)
    history = b.admin.history(stream)
    click.echo(f"\n{history_table(history)}\n")
    whole = sum(account.written.values())
    counts = f"written {whole:,}, read {sum(account.read.values()):,}"
    click.echo(f"{counts}, once each and in order: {'yes' if account.is_exact else 'NO'}")
    now = len(history.active.segments)
    click.echo(f"from 1 segment to {most} and back to {now}")
    return account.is_exact and most > 2 and now == 1


@click.command()
def main() -> None:
    """Let a stream follow its load: it splits, and merges."""
    try:
        with ProcessCluster() as cluster:
            cluster.start_coordinator(env=SECONDS)
            with rollbridge.connect(cluster.bootstrap_servers, zookeeper=cluster.zookeeper, client_name="demo") as b:
                is_well = play(b)
    except RollbridgeError as fault:
        click.echo(f"demo-scaling: {fault}", err=True)
        sys.exit(fault.exit_code)
    if not is_well:
        sys.exit(1)


if __name__ == "__main__":
    main()
