"""``make demo``: one transaction with 336,776 real flights outlives two scales and the death of its coordinator.

Everything runs on an ephemeral Kafka, ZooKeeper and coordinators of its own, which are gone at the end. The story is
told in :meth:`Demo.run`, from top to bottom; every claim in it is counted, and a wrong count is a non-zero exit.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import click

import bridge
from bridge.cli.lineage_svg import lineage_svg
from bridge.embedded import CoordinatorHandle, EmbeddedCluster
from bridge.embedded.jars import JarCache
from bridge.embedded.java import find_java
from bridge.errors import EnvironmentProblem, RollbridgeError
from bridge.model.epochs import EpochHistory
from bridge.model.keyspace import key_hash, position_of_key
from bridge.model.names import StreamName, parse_segment_topic, segment_topic_pattern
from spark_examples import flights, native_rival, plain_reader, small_writer, stock_spark
from spark_examples.helper import Helper, HelperFailed, poll_until
from spark_examples.measure import PeakMemory, first_answer_after, longest_silence, waits
from spark_examples.narrate import Story, duration
from spark_examples.native_rival import RivalReport
from spark_examples.plain_reader import Counts, Seen
from spark_examples.small_writer import RECORDS, Commit
from spark_examples.stock_spark import Routed, SparkCount

STREAM: Final = StreamName("nyc", "flights")
NATIVE_TOPIC: Final = "native-flights"
OUT: Final = Path("build") / "demo"
_PATIENCE_SECONDS: Final = 60.0
_BESIDE: Final = 400
"""Aircraft that the other writer writes about."""


class Demo:
    """The cast and the story."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._story = Story()
        self._cast = ExitStack()
        self._flights = flights.load()
        self._pattern = segment_topic_pattern(STREAM)
        self._memory = PeakMemory()

    def run(self) -> bool:
        """Tell the story; returns whether all counts agreed."""
        with self._cast:
            self._raise_the_curtain()
            begun_s = self._begin()
            quarter = len(self._flights) // 4
            self._load(0, quarter)
            self._scale("split", seal=[0], ranges=[(0.0, 0.25), (0.25, 0.5)])
            self._load(quarter, 2 * quarter)
            self._scale("merge", seal=[3, 1], ranges=[(0.25, 1.0)])
            self._load(2 * quarter, 3 * quarter)
            takeover_s, killed_s = self._kill_the_leader(3 * quarter)
            self._nothing_is_visible()
            committed_s = self._commit(begun_s)
            rival: RivalReport = self._rival.ask("commit")
            self._story.say(
                f"the native transaction is committed, too; its reader had stood still for {rival.longest_wait_s:.1f} s"
            )
            seen, commits = self._everything_is_visible()
            history = self._b.admin.history(str(STREAM))
            self._spark_agrees(history, len(commits) * RECORDS)
            picture = self._draw(history)
            self._rival_counts(rival)
        self._story.say("everything is stopped and removed again")
        before = [commit for commit in commits if begun_s < commit.asked_s < committed_s]
        seen_waits = waits(before, seen.arrived_s)
        silence_s = longest_silence(seen.arrivals_s, begun_s, killed_s)
        self._story.table(
            ["while a transaction with 336,776 flights is open", "rollbridge", "native Kafka"],
            [
                ["it stays open for", duration(committed_s - begun_s), duration(rival.open_s)],
                [
                    "longest wait of a plain reader for records committed beside it",
                    duration(seen_waits.longest_s),
                    duration(rival.longest_wait_s),
                ],
                ["  half of the time at most", duration(seen_waits.median_s), ""],
                ["longest silence at the reader until the kill", duration(silence_s), duration(rival.longest_wait_s)],
                ["re-partitioned meanwhile, per-key order kept", "twice", "not possible"],
                ["coordinator killed; small commits go on after", duration(takeover_s), "not tried"],
                ["small transactions committed meanwhile", f"{len(before):,}", ""],
            ],
        )
        for handle in (self._leader, self._second):
            self._story.note(f"peak memory of {handle.name}: {self._memory.mib(handle.pid):.0f} MiB")
        self._story.note(f"picture of the epochs: {picture}")
        return self._story.conclude()

    # -- one scene each -----------------------------------------------------------------------------

    def _raise_the_curtain(self) -> None:
        """Start servers and everybody in the story."""
        self._story.say(f"{len(self._flights):,} flights of 2013 read; starting Kafka, ZooKeeper and two coordinators")
        cluster = self._cast.enter_context(EmbeddedCluster(short_lived=False))
        self._cluster = cluster
        self._cast.enter_context(self._memory)
        handles = [cluster.start_coordinator() for _ in range(2)]
        for handle in handles:
            self._memory.watch(handle.process)
        self._b = self._cast.enter_context(
            bridge.connect(cluster.bootstrap_servers, zookeeper=cluster.zookeeper, client_name="loader")
        )
        self._b.admin.create_stream(str(STREAM), segments=2)
        self._leader, self._second = self._by_leadership(handles)
        self._story.say(f"stream {STREAM} has two segments; {self._leader.name} leads its group")
        servers = cluster.bootstrap_servers
        self._reader = self._helper("plain reader", plain_reader.main, servers, self._pattern, "plain-reader")
        keys = self._flights.tail_numbers()[:_BESIDE]
        self._writer = self._helper(
            "small writer", small_writer.main, servers, cluster.zookeeper, "tower", str(STREAM), keys
        )
        self._rival = self._helper("native rival", native_rival.main, servers, NATIVE_TOPIC)
        self._reader.ask("counts")
        self._writer.ask("resume")
        self._rival.ask("ready")
        if not poll_until(lambda: self._counts().small_records > 0, _PATIENCE_SECONDS):
            raise HelperFailed("the plain reader got nothing of the small transactions")
        self._story.say(
            f"running beside: a writer of transactions of {RECORDS} records, a plain confluent-kafka consumer "
            f"(read_committed), and the same flights in a native Kafka transaction"
        )
        self._spark = self._helper(
            "Spark",
            stock_spark.main,
            str(Path(find_java().executable).resolve().parent.parent),
            JarCache.default().ensure("spark"),
            cluster.home / "spark",
            self._out / "spark.log",
            servers,
            self._pattern,
        )
        self._spark.request("ready")

    def _begin(self) -> float:
        """Open both transactions; returns when ours was."""
        self._rival.ask("begin")
        begun_s = time.monotonic()
        self._txn = self._b.begin(str(STREAM), label="flights of 2013")
        self._story.say(f"ONE transaction begins: {self._txn.id}")
        return begun_s

    def _load(self, start: int, stop: int) -> None:
        """Write some of the flights and wait until the brokers have them."""
        began_s = time.monotonic()
        written = self._txn.write_all(str(STREAM), self._flights.records(start, stop))
        self._txn.flush()
        self._story.say(
            f"{written:,} flights written to the transaction and acknowledged in "
            f"{duration(time.monotonic() - began_s)}, {self._txn.records:,} so far"
        )

    def _scale(self, what: str, seal: Sequence[int], ranges: Sequence[tuple[float, float]]) -> None:
        """Re-partition the stream under the open transaction."""
        began_s = time.monotonic()
        epoch = self._b.admin.scale(str(STREAM), seal=seal, ranges=ranges)
        self._story.say(
            f"scaled ({what} of {', '.join(f'segment {number}' for number in seal)}) in "
            f"{duration(time.monotonic() - began_s)}: epoch {epoch.epoch} with "
            f"{', '.join(f'{item.id.number} {item.range}' for item in epoch.segments)}"
        )

    def _kill_the_leader(self, start: int) -> tuple[float, float]:
        """SIGKILL the leader, go on writing, see the other take over; returns how long that took, and when it was."""
        leader, second = self._leader, self._second
        killed_s = time.monotonic()
        self._cluster.kill_coordinator(leader)
        self._story.say(f"SIGKILL to {leader.name}, which leads the group")
        self._load(start, len(self._flights))
        led = poll_until(lambda: self._leads(second), _PATIENCE_SECONDS)
        if not led:
            raise EnvironmentProblem(f"{second.name} does not take over; see {second.log}")
        if not poll_until(lambda: self._answered_after(killed_s), _PATIENCE_SECONDS):
            raise EnvironmentProblem(f"{second.name} leads, but small transactions are not answered; see {second.log}")
        commits: list[Commit] = self._writer.ask("commits")
        first = first_answer_after(commits, killed_s + 0.5)
        takeover_s = (first.answered_s if first else time.monotonic()) - killed_s
        self._story.say(f"{second.name} has taken over; small commits are answered again {duration(takeover_s)} after")
        return takeover_s, killed_s

    def _nothing_is_visible(self) -> None:
        """Before the commit: readers see the small transactions and none of the flights."""
        small = self._pause_small_writer()
        counts = self._counts()
        self._writer.ask("resume")
        self._story.check_equal("plain reader, flights before the commit", counts.flights, 0)
        self._story.check_equal("plain reader, small records before the commit", counts.small_records, small)
        self._story.say(
            f"before the commit the plain reader has {counts.flights} flights and {counts.small_records:,} records of "
            f"{small // RECORDS:,} small transactions"
        )
        version = self._spark.answer()
        low = self._committed() * RECORDS
        spark: SparkCount = self._spark.ask("count")
        high = (self._committed() + 1) * RECORDS
        self._story.check_equal("Spark, flights before the commit", spark.flights, 0)
        if not low <= spark.small_records <= high:
            self._story.differences.append(
                f"Spark, small records before the commit: {spark.small_records} instead of {low} to {high}"
            )
        self._story.say(
            f"a stock Spark {version} Kafka source (read_committed) counts {spark.flights} flights and "
            f"{spark.small_records:,} small records"
        )

    def _commit(self, begun_s: float) -> float:
        """Commit; returns when that was asked for."""
        committed_s = time.monotonic()
        result = self._txn.commit()
        answered_s = time.monotonic()
        self._story.check_equal("records in the commit's answer", result.records, len(self._flights))
        epochs = self._b.admin.history(str(STREAM)).records
        self._story.say(
            f"committed after {duration(committed_s - begun_s)} open: a rolling commit, answered in "
            f"{duration(answered_s - committed_s)}; the stream is in epoch {epochs[-1].epoch} now"
        )
        self._story.say(
            f"the answer: {result.records:,} records from {result.first} to {result.last}, "
            f"position {result.position} on the commit log"
        )
        total = len(self._flights)
        poll_until(lambda: self._counts().flights >= total, _PATIENCE_SECONDS)
        self._story.say(
            f"the plain reader has {self._counts().flights:,} flights {duration(time.monotonic() - answered_s)} after "
            "the answer"
        )
        return committed_s

    def _everything_is_visible(self) -> tuple[Seen, list[Commit]]:
        """After the commit: the plain reader has everything, once, in order."""
        small = self._pause_small_writer()
        commits: list[Commit] = self._writer.ask("commits")
        seen: Seen = self._reader.ask("seen")
        check = self._story.check_equal
        check("plain reader, flights", len(seen.rows), len(self._flights))
        check("plain reader, small records", seen.notes.total(), small)
        check("plain reader, small transactions in part", sum(n != RECORDS for n in seen.notes.values()), 0)
        check("plain reader, records that came twice", seen.doubled, 0)
        check("plain reader, flights out of order per aircraft", seen.out_of_order, 0)
        self._story.check_same_counts("plain reader, flights per carrier", seen.carriers, self._flights.carriers())
        self._story.say(
            f"the plain reader counts {len(seen.rows):,} flights of {len(seen.carriers)} carriers and "
            f"{seen.notes.total():,} small records ({len(commits):,} transactions) in {len(seen.topics)} topics; "
            f"{seen.doubled} twice, {seen.out_of_order} out of order"
        )
        return seen, commits

    def _spark_agrees(self, history: EpochHistory, small: int) -> None:
        """The same counts from Spark, and its hash of every key."""
        spark: SparkCount = self._spark.ask("count")
        self._story.check_equal("Spark, flights", spark.flights, len(self._flights))
        self._story.check_equal("Spark, different rows", spark.different_rows, len(self._flights))
        self._story.check_equal("Spark, small records", spark.small_records, small)
        self._story.check_same_counts("Spark, flights per carrier", spark.carriers, self._flights.carriers())
        self._story.say(
            f"Spark counts {spark.flights:,} flights of {len(spark.carriers)} carriers and "
            f"{spark.small_records:,} small records"
        )
        wrong = [item for item in spark.keys if not _agrees(item, history)]
        self._story.check_equal("keys that Spark hashes or finds elsewhere", len(wrong), 0)
        keys = {item.key for item in spark.keys}
        self._story.check_equal("aircraft that Spark has found", len(keys), len(self._flights.tail_numbers()))
        self._story.say(
            f"Spark's xxhash64(key) is rollbridge's for all {len(keys):,} aircraft, and each stands in the segment "
            "that holds its hash"
        )

    def _draw(self, history: EpochHistory) -> Path:
        """The epochs as a picture; returns its path."""
        picture = self._out / "epochs.svg"
        picture.write_text(lineage_svg(history, f"{STREAM}, {len(self._flights):,} flights in one transaction"))
        epochs = ", ".join(f"{item.epoch} {item.cause}" for item in history.records)
        self._story.say(f"epochs: {epochs}")
        return picture

    def _rival_counts(self, rival: RivalReport) -> None:
        self._story.check_equal("native reader, flights", rival.flights, len(self._flights))
        self._story.check_equal("native reader, small writes", rival.small_read, rival.small_written)

    # -- asking around ------------------------------------------------------------------------------

    def _helper(self, name: str, main: Callable[..., None], *arguments: object) -> Helper:
        return self._cast.enter_context(Helper(name, main, *arguments))

    def _counts(self) -> Counts:
        counts: Counts = self._reader.ask("counts")
        return counts

    def _committed(self) -> int:
        """How many small transactions have been committed."""
        last: Commit | None = self._writer.ask("progress")
        return 0 if last is None else last.number + 1

    def _pause_small_writer(self) -> int:
        """Pause it, and wait until the reader has what it committed; returns how many records that is."""
        small = int(self._writer.ask("pause")) * RECORDS
        poll_until(lambda: self._counts().small_records >= small, _PATIENCE_SECONDS)
        return small

    def _answered_after(self, moment_s: float) -> bool:
        last: Commit | None = self._writer.ask("progress")
        return last is not None and last.asked_s > moment_s

    def _leads(self, handle: CoordinatorHandle) -> bool:
        leader = self._b.admin.describe(str(STREAM)).leader
        # A coordinator's name is that of its host and its process id.
        return leader is not None and leader.endswith(f"-{handle.pid}")

    def _by_leadership(self, handles: Sequence[CoordinatorHandle]) -> tuple[CoordinatorHandle, CoordinatorHandle]:
        """The leader first."""
        first, second = handles
        return (first, second) if self._leads(first) else (second, first)


def _agrees(item: Routed, history: EpochHistory) -> bool:
    """Whether Spark's hash of a key is ours, and the key's records stand in the segment that holds its position."""
    _, segment = parse_segment_topic(item.topic)
    holds = history.segments()[segment].range
    return item.hash % (1 << 64) == key_hash(item.key) and position_of_key(item.key) in holds


@click.command(name="demo")
@click.option("--out", type=click.Path(path_type=Path), default=OUT, show_default=True, help="Where files are left.")
def main(out: Path) -> None:
    """Load the flights of 2013 as one transaction while everything around it changes."""
    out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=out / "demo.log", filemode="w", level=logging.INFO)
    # As after Ctrl-C: whatever was started is stopped.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        agreed = Demo(out).run()
    except RollbridgeError as exc:
        click.echo(f"demo: {exc}", err=True)
        sys.exit(exc.exit_code)
    except KeyboardInterrupt:
        click.echo("demo: interrupted; everything is stopped", err=True)
        sys.exit(130)
    sys.exit(0 if agreed else 1)


if __name__ == "__main__":
    main()
