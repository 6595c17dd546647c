"""``make demo``: one transaction with 336,776 real flights outlives two scales and the death of its coordinator.

Everything runs on an ephemeral Kafka, ZooKeeper and coordinators of its own, which are gone at the end. The story is
told in :meth:`Demo.run`, from top to bottom; every claim in it is counted, and a wrong count is a non-zero exit.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Final, TypeVar

import click
from rich.console import Console
from rich.table import Table

import rollbridge
from rollbridge.client.transaction import Transaction
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import KeySpace, key_hash
from rollbridge.stream.names import StreamName, parse_segment_topic, segment_topic_pattern
from rollbridge.stream.picture import lineage_svg
from rollbridge_devcluster.ephemeral import ProcessCluster
from rollbridge_devcluster.jars import JarCache
from rollbridge_devcluster.nodes import ProcessNode
from spark_examples.demo import flights
from spark_examples.demo.common import Story, longest_silence, play, until
from spark_examples.demo.native_rival import NativeRival, RivalReport
from spark_examples.demo.plain_reader import PlainReader, Seen
from spark_examples.demo.small_writer import RECORDS, Commit, SmallWriter
from spark_examples.demo.stock_spark import Routed, StockSpark

STREAM: Final = StreamName("nyc", "flights")
NATIVE_TOPIC: Final = "native-flights"
OUT: Final = Path("build") / "demo"
Actor = TypeVar("Actor")
_BESIDE: Final = 400
"""Aircraft that the writer of small transactions writes about."""
_SHOWN_MAX: Final = 500
"""Characters of a difference."""


class Actors(BaseManager):
    """A process with one object in it: as in real life, nobody waits for another one's Python interpreter."""


for _kind in (PlainReader, SmallWriter, NativeRival, StockSpark):
    Actors.register(_kind.__name__, _kind)


def start_actor(stack: ExitStack, log: Path, kind: Callable[..., Actor], *arguments: object) -> Actor:
    """Make an object in a process of its own, which writes to the end of a file; its methods can be called here."""
    manager = Actors(ctx=multiprocessing.get_context("spawn"))
    manager.start(_begin_actor, (log,))
    stack.callback(manager.shutdown)
    actor: Actor = getattr(manager, kind.__name__)(*arguments)
    return actor


def _begin_actor(log: Path) -> None:
    with log.open("ab") as file:
        for standard in (1, 2):  # of the JVM, too
            os.dup2(file.fileno(), standard)
    log_to(log)

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def log_to(file: Path) -> None:
    """Let this process log to the end of a file, which several may do at once."""
    form = "%(asctime)s %(levelname)-7s %(processName)s %(name)s: %(message)s"
    logging.basicConfig(filename=file, level=logging.INFO, format=form)


class Demo:
    """The story, one method for each scene."""

    def __init__(self, stack: ExitStack, out: Path) -> None:
        """Start servers, create the stream with two segments, and start everybody; the stack stops all of them."""
        self._story = Story()
        self._stream = str(STREAM)
        self._out = out
        self.differences: list[str] = []
        jars = JarCache.default().ensure("spark")  # first, so that what is missing is said before anything starts
        self._flights = flights.load()
        self._say(f"{len(self._flights):,} flights of 2013 are read; starting Kafka, ZooKeeper and two coordinators")
        self._cluster = cluster = stack.enter_context(ProcessCluster())
        stack.callback(lambda: shutil.copytree(cluster.logs, out / "logs", dirs_exist_ok=True))
        coordinators = [cluster.start_coordinator() for _ in range(2)]
        servers, zookeeper = cluster.bootstrap_servers, cluster.zookeeper
        self._bridge = stack.enter_context(rollbridge.connect(servers, zookeeper=zookeeper, client_name="loader"))
        self._bridge.admin.create_stream(self._stream, segments=2)
        self._leader, self._second = sorted(coordinators, key=lambda node: not self._leads(node))

        def start(kind: Callable[..., Actor], *arguments: object) -> Actor:
            return start_actor(stack, out / "demo.log", kind, *arguments)

        pattern = segment_topic_pattern(STREAM)
        starting = stack.enter_context(ThreadPoolExecutor(1))
        self._spark = starting.submit(start, StockSpark, jars, cluster.home / "spark", servers, pattern)
        self._reader = start(PlainReader, servers, pattern, "plain-reader")
        aircraft = flights.tail_numbers_of(self._flights)[:_BESIDE]
        self._writer = start(SmallWriter, servers, zookeeper, self._stream, aircraft)
        self._rival = start(NativeRival, servers, NATIVE_TOPIC, self._flights)
        until(lambda: self._reader.counts()[1] > 0, "the plain reader gets records of small transactions")
        self._say(f"stream {STREAM} has two segments; {self._leader.name} leads its group, the other one waits")
        self._say(
            f"beside the loader run a writer of {RECORDS}-record transactions, a plain read_committed consumer, and a "
            "native Kafka transaction"
        )

    def run(self) -> None:
        """Tell the story; what is wrong is noted."""
        quarter = len(self._flights) // 4
        self._rival.begin()
        begun_s = time.monotonic()
        txn = self._bridge.begin(self._stream, label="flights of 2013")
        self._say(f"ONE transaction begins: {txn.id}")
        self._load(txn, 0, quarter)
        self._scale("split", seal=[0], ranges=[(0.0, 0.25), (0.25, 0.5)])
        self._load(txn, quarter, 2 * quarter)
        self._scale("merge", seal=[3, 1], ranges=[(0.25, 1.0)])
        self._load(txn, 2 * quarter, 3 * quarter)
        killed_s = time.monotonic()
        self._cluster.kill_coordinator(self._leader)
        self._say(f"SIGKILL to {self._leader.name}, which leads; the loader goes on")
        self._load(txn, 3 * quarter, len(self._flights))
        takeover_s = self._see_the_takeover(killed_s)
        self._nothing_is_visible()
        committed_s, answered_s = self._commit(txn, begun_s)
        rival = self._end_the_rival()
        seen, commits = self._everything_is_visible()
        history = self._bridge.admin.history(self._stream)
        self._spark_agrees(history, len(commits) * RECORDS)
        picture = self._out / "epochs.svg"
        picture.write_text(lineage_svg(history, f"{STREAM}: {len(self._flights):,} flights in one transaction"))
        self._say(f"the epochs as a picture: {picture}")
        meanwhile = [commit for commit in commits if begun_s < commit.asked_s < committed_s]
        during = [commit for commit in commits if committed_s < commit.answered_s < answered_s]
        self._compare(seen, meanwhile, during, committed_s - begun_s, takeover_s, rival)

    # -- one scene each -----------------------------------------------------------------------------

    def _load(self, txn: Transaction, start: int, stop: int) -> None:
        """Write some of the flights and wait until the brokers have them."""
        began_s = time.monotonic()
        rows = range(start, stop)
        written = txn.write_all(self._stream, (flights.record(row, self._flights[row]) for row in rows))
        txn.flush()
        took = duration(time.monotonic() - began_s)
        self._say(f"{written:,} flights written and acknowledged in {took}; {txn.records:,} so far")

    def _scale(self, what: str, seal: Sequence[int], ranges: Sequence[tuple[float, float]]) -> None:
        """Re-partition the stream under the open transaction."""
        began_s = time.monotonic()
        epoch = self._bridge.admin.scale(self._stream, seal=seal, ranges=ranges)
        took = duration(time.monotonic() - began_s)
        segments = " and ".join(str(number) for number in seal)
        active = ", ".join(f"{item.id.number} {item.range}" for item in epoch.segments)
        self._say(f"the stream is scaled in {took}: {what} of segment {segments}; active now: {active}")

    def _see_the_takeover(self, killed_s: float) -> float:
        """Wait until the other coordinator leads and commits; returns how long that took."""
        until(lambda: self._leads(self._second), f"{self._second.name} takes over")
        until(lambda: takeover(self._writer.commits(), killed_s) is not None, f"{self._second.name} commits")
        took_s = takeover(self._writer.commits(), killed_s) or 0.0
        self._say(f"{self._second.name} has taken over; small commits go on {duration(took_s)} after the kill")
        return took_s

    def _nothing_is_visible(self) -> None:
        """Before the commit: readers have the small transactions and none of the flights."""
        transactions = self._writer.pause()
        small = transactions * RECORDS
        until(lambda: self._reader.counts()[1] >= small, "the plain reader has the small transactions")
        counts = self._reader.counts()
        self._writer.resume()
        self._check("plain reader, flights and small records before the commit", counts, (0, small))
        self._say(
            f"before the commit the plain reader has {counts[0]} flights, and all {counts[1]:,} records of the "
            f"{transactions:,} small transactions"
        )
        spark = self._spark.result()
        low = len(self._writer.commits()) * RECORDS
        found = spark.count()
        # The writer goes on meanwhile, and what is being committed may count as well.
        high = (len(self._writer.commits()) + 1) * RECORDS
        self._check("Spark, flights before the commit", found.carriers.total(), 0)
        self._check(f"Spark, {low} to {high} small records before the commit", low <= found.small_records <= high, True)
        self._say(
            f"before the commit the Kafka source of a stock Spark {spark.version()} has {found.carriers.total()} "
            f"flights, and {found.small_records:,} small records"
        )

    def _commit(self, txn: Transaction, begun_s: float) -> tuple[float, float]:
        """Commit; returns when that was asked for, and when it was answered."""
        committed_s = time.monotonic()
        result = txn.commit()
        answered_s = time.monotonic()
        total = len(self._flights)
        self._check("records in the commit's answer", result.records, total)
        self._say(
            f"COMMIT after {duration(committed_s - begun_s)}, a rolling one, answered in "
            f"{duration(answered_s - committed_s)}: {result.records:,} records from {result.first} to {result.last}"
        )
        epochs = ", ".join(f"{item.epoch} {item.cause}" for item in self._bridge.admin.history(self._stream).records)
        self._say(f"epochs now: {epochs}")
        until(lambda: self._reader.counts()[0] >= total, "the plain reader has the flights")
        self._say(f"the plain reader has read the flights {duration(time.monotonic() - answered_s)} later")
        return committed_s, answered_s

    def _end_the_rival(self) -> RivalReport:
        """Commit the native transaction as well."""
        rival = self._rival.commit()
        self._check("native reader, flights", rival.flights, len(self._flights))
        self._check("native reader, small writes", rival.small_read, rival.small_written)
        waited = duration(rival.longest_wait_s)
        self._say(f"the native transaction is committed, too; its reader had stood still for {waited}")
        return rival

    def _everything_is_visible(self) -> tuple[Seen, list[Commit]]:
        """After the commit: the plain reader has everything, once, in order."""
        small = self._writer.pause() * RECORDS
        until(lambda: self._reader.counts()[1] >= small, "the plain reader has the small transactions")
        seen, commits = self._reader.seen(), self._writer.commits()
        self._check("plain reader, flights", len(seen.rows), len(self._flights))
        self._check("plain reader, small records", seen.notes.total(), small)
        self._check("plain reader, small transactions in part", sum(n != RECORDS for n in seen.notes.values()), 0)
        self._check("plain reader, records that came twice", seen.doubled, 0)
        self._check("plain reader, flights out of order per aircraft", seen.out_of_order, 0)
        self._check("plain reader, flights per carrier", seen.carriers, flights.carriers_of(self._flights))
        self._say(
            f"the plain reader counts {len(seen.rows):,} flights of {len(seen.carriers)} carriers and "
            f"{seen.notes.total():,} small records; {seen.doubled} twice, {seen.out_of_order} out of order"
        )
        return seen, commits

    def _spark_agrees(self, history: EpochHistory, small: int) -> None:
        """The same counts from Spark, and its hash of every key."""
        spark = self._spark.result().count()
        self._check("Spark, different rows", spark.different_rows, len(self._flights))
        self._check("Spark, small records", spark.small_records, small)
        self._check("Spark, flights per carrier", spark.carriers, flights.carriers_of(self._flights))
        self._say(
            f"Spark counts            {spark.carriers.total():,} flights of {len(spark.carriers)} carriers and "
            f"{spark.small_records:,} small records"
        )
        keys = {item.key for item in spark.keys}
        self._check("aircraft that Spark has found", keys, set(flights.tail_numbers_of(self._flights)))
        strangers = sum(not _agrees(item, history) for item in spark.keys)
        self._check("keys that Spark hashes or finds elsewhere", strangers, 0)
        self._say(
            f"Spark's xxhash64(key) is rollbridge's for all {len(keys):,} aircraft, and their records stand in the "
            "segments that it names"
        )

    def _compare(
        self,
        seen: Seen,
        commits: Sequence[Commit],
        during: Sequence[Commit],
        open_s: float,
        takeover_s: float,
        rival: RivalReport,
    ) -> None:
        """The table; ``commits`` are the small transactions while the large one was open, ``during`` its commit."""
        known, beside = (
            waits((commit for commit in some if seen.found_s[commit.number] < commit.answered_s), seen.arrived_s)
            for some in (commits, during)
        )
        held_up = duration(beside[-1]) if beside else "nothing to read"
        silence_s = longest_silence(seen.arrivals_s, commits[0].asked_s, commits[-1].answered_s)
        stood_still = duration(rival.longest_wait_s)
        table = Table(f"while one transaction holds {len(self._flights):,} flights", "rollbridge", "native Kafka")
        for row in (
            ("it is open for", duration(open_s), duration(rival.open_s)),
            ("small writes committed beside it", f"{len(commits):,}", f"{rival.small_written:,}"),
            ("a plain reader's longest wait for one of them", duration(known[-1]), stood_still),
            ("  for half of them at most", duration(known[len(known) // 2]), ""),
            ("  while the flights are being committed", held_up, stood_still),
            ("  where a new topic had to be found first", duration(waits(commits, seen.arrived_s)[-1]), ""),
            ("its longest silence, the takeover included", duration(silence_s), stood_still),
            ("stream split and merged, order per key kept", "yes", "not possible"),
            ("coordinator killed; small commits go on after", duration(takeover_s), ""),
        ):
            table.add_row(*row)
        click.echo()
        Console(highlight=False).print(table)

    def _leads(self, node: ProcessNode) -> bool:
        leader = self._bridge.admin.describe(self._stream).leader
        # A coordinator's name is made of its host's and its process id.
        return leader is not None and leader.endswith(f"-{node.pid}")

    def _say(self, text: str) -> None:
        self._story.say(text)

    def _check(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            self.differences.append(f"{what}: {found} instead of {expected}"[:_SHOWN_MAX])


def waits(commits: Iterable[Commit], arrived_s: Mapping[int, float]) -> list[float]:
    """Return how long a reader waited for records whose commit was answered already, in seconds, sorted.

    0 where the reader had it before the writer had its answer.
    """
    return sorted(max(arrived_s[commit.number] - commit.answered_s, 0.0) for commit in commits)


def takeover(commits: Sequence[Commit], killed_s: float) -> float | None:
    """Return the time from a kill to the answer to the first commit that was asked for after it; None without one.

    One that was asked for before the kill may have been decided before it.
    """
    return next((commit.answered_s - killed_s for commit in commits if commit.asked_s > killed_s), None)


def duration(seconds: float) -> str:
    """Return a duration with the unit that suits it."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _agrees(item: Routed, history: EpochHistory) -> bool:
    """Return True if Spark's hash of a key is ours, and its topic is a segment that holds the key's position."""
    _, segment = parse_segment_topic(item.topic)
    holds = history.segments()[segment].range
    return item.hash % (1 << 64) == key_hash(item.key) and KeySpace().position(item.key) in holds


def tell(out: Path) -> bool:
    """Tell the story; returns whether all counts agreed."""
    with ExitStack() as stack:
        demo = Demo(stack, out)
        demo.run()
    click.echo(f"everything is stopped and removed again; what the servers said: {out / 'logs'}\n")
    if demo.differences:
        click.echo("DIFFERENT:")
    for difference in demo.differences:
        click.echo(f"  - {difference}")
    if not demo.differences:
        click.echo("all counts agree")
    return not demo.differences


@click.command(name="demo")
@click.option("--out", type=click.Path(path_type=Path), default=OUT, show_default=True, help="Where files are left.")
def main(out: Path) -> None:
    """Load the flights of 2013 as one transaction while everything around it changes."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "demo.log").unlink(missing_ok=True)
    log_to(out / "demo.log")
    # As after Ctrl-C: whatever was started is stopped.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        play(lambda: tell(out))
    except KeyboardInterrupt:
        click.echo("demo: interrupted; everything is stopped and removed again", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
