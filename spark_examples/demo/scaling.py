"""``make demo-scaling``: a stream follows its load by itself: it splits while that rises, and merges once it falls.

A stream of one segment has a scaling policy that wants few records a second in each. More and more is written, some
keys more often than others, then less, and nothing in the end. The coordinator measures and scales; its
windows, minutes otherwise, are seconds here. A transaction is open all the while, and committed in the end, and a
reader counts. Everything runs on an ephemeral Kafka, ZooKeeper and coordinator, which are gone at the end.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import click

import rollbridge
from rollbridge.cli.common import counted
from rollbridge.cli.stream import history_table
from rollbridge.metadata.requests import WaitCause
from rollbridge_devcluster.ephemeral import ProcessCluster
from spark_examples.demo.common import Story
from spark_examples.demo.common import play as play_example

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

Values = dict[bytes, list[int]]
"""The numbers of the records of each key, in order."""


class Watcher:
    """Tells what the stream does, when it does it."""

    def __init__(self, b: rollbridge.Bridge, stream: str) -> None:
        self._admin, self._stream = b.admin, stream
        self.tell = Story().say
        self._epoch = 0
        self._wait = ""

    def look(self) -> int:
        """Tell what is new of the stream; return how many segments it has."""
        history = self._admin.history(self._stream)
        for record in history.records:
            if record.epoch > self._epoch:
                self._epoch = record.epoch
                if record.reason:
                    self.tell(f"scaled to {counted(len(record.segments), 'segment')}: {record.reason}")
        waits = self._admin.waits(self._stream)
        wait = next((row.reasons[0] for row in waits if row.cause is WaitCause.SCALING), "")
        if wait not in ("", self._wait):
            self.tell(f"waits: {wait}")
        self._wait = wait
        return len(history.active.segments)


def write(b: rollbridge.Bridge, stream: str, phases: Phases, watcher: Watcher) -> Values:
    """Write with the rates of all phases, one after the other; return what was acknowledged."""
    rng = random.Random(1)
    number = 0
    written: Values = defaultdict(list)
    with b.writer(stream) as writer:
        for rate, seconds in phases:
            watcher.tell(f"load: {rate} records/s")
            due = time.monotonic()
            end = due + seconds
            while time.monotonic() < end:
                sent = []
                for _ in range(round(rate * BATCH_S)):
                    key = b"visitor-%d" % min(int(rng.expovariate(1 / (KEYS / 4))), KEYS)
                    sent.append(writer.write(key, b"%d" % number))
                    written[key].append(number)
                    number += 1
                for future in sent:
                    future.result(PATIENCE_S)
                watcher.look()
                due += BATCH_S
                time.sleep(max(due - time.monotonic(), 0))
    return written


def read(b: rollbridge.Bridge, stream: str, total: Future[int]) -> Values:
    """Read along until as many records have come as there are in all, or none comes any more."""
    found: Values = defaultdict(list)
    count = 0
    with b.reader(stream) as reader:
        while not (is_last := total.done()) or count < total.result():
            record = reader.poll(PATIENCE_S if is_last else 0.2)
            if record is not None:
                found[record.key or b""].append(int(record.value or b"-1"))
                count += 1
            elif is_last:
                break
    return found


def play(b: rollbridge.Bridge, stream: str = STREAM, phases: Phases = PHASES) -> bool:
    """Let load rise and fall, and tell what the stream makes of it; return whether all went well."""
    b.admin.create_stream(stream, scaling=POLICY)
    click.echo(f"{stream} is scaled {POLICY}; windows of 1 to 10 s stand for 2 to 20 min")
    watcher = Watcher(b, stream)
    total: Future[int] = Future()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, b, stream, total)
        old = b.begin(stream, label="open all the while")
        old.write(stream, key=b"old", value=b"0")
        old.flush()
        written = write(b, stream, phases, watcher)
        watcher.tell("load: none")
        most = max(len(record.segments) for record in b.admin.history(stream).records)
        end = time.monotonic() + QUIET_S
        while watcher.look() > 1 and time.monotonic() < end:
            time.sleep(0.2)
        old.write(stream, key=b"old", value=b"1")
        old.commit()
        written[b"old"] = [0, 1]
        watcher.tell("the transaction that was open all the while is committed")
        total.set_result(sum(map(len, written.values())))
        found = reading.result()
    history = b.admin.history(stream)
    click.echo(f"\n{history_table(history)}\n")
    counts = f"written {total.result():,}, read {sum(map(len, found.values())):,}"
    click.echo(f"{counts}, once each and in order: {'yes' if found == written else 'NO'}")
    now = len(history.active.segments)
    click.echo(f"from 1 segment to {most} and back to {now}")
    return found == written and most > 2 and now == 1


def run() -> bool:
    """Start servers, and play."""
    with ProcessCluster() as cluster:
        cluster.start_coordinator(env=SECONDS)
        with rollbridge.connect(cluster.bootstrap_servers, zookeeper=cluster.zookeeper, client_name="demo") as b:
            return play(b)


@click.command()
def main() -> None:
    """Let a stream follow its load: it splits, and merges."""
    play_example(run)


if __name__ == "__main__":
    main()
