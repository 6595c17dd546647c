"""``make demo``: one transaction with 336,776 real flights outlives two scales and the death of its coordinator.

Everything runs on an ephemeral Kafka, ZooKeeper and coordinators of its own, which are gone at the end. The story is
told in :meth:`Demo.run`, from top to bottom; every claim in it is counted, and a wrong count is a non-zero exit.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import click

from rollbridge.client.transaction import Transaction
from rollbridge.errors import RollbridgeError
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import KeySpace, key_hash
from rollbridge.stream.names import StreamName, parse_segment_topic
from rollbridge.stream.picture import lineage_svg
from spark_examples.demo import flights
from spark_examples.demo.cast import Cast, assemble, happens, require
from spark_examples.demo.flights import Flights
from spark_examples.demo.helper import log_to
from spark_examples.demo.measure import longest_silence, takeover, waits
from spark_examples.demo.narrate import Story, duration
from spark_examples.demo.native_rival import RivalReport
from spark_examples.demo.plain_reader import Seen
from spark_examples.demo.small_writer import RECORDS, Commit
from spark_examples.demo.stock_spark import Routed

STREAM: Final = StreamName("nyc", "flights")
OUT: Final = Path("build") / "demo"
_BESIDE: Final = 400
"""Aircraft that the writer of small transactions writes about."""


class Demo:
    """The story, one method for each scene."""

    def __init__(self, story: Story, cast: Cast, flights_of_2013: Flights) -> None:
        self._story = story
        self._cast = cast
        self._flights = flights_of_2013
        self._stream = str(STREAM)

    def run(self, out: Path) -> None:
        """Tell the story; what is wrong is noted in it."""
        quarter = len(self._flights) // 4
        self._cast.rival_begins()
        begun_s = time.monotonic()
        txn = self._cast.bridge.begin(self._stream, label="flights of 2013")
        self._story.say(f"ONE transaction begins: {txn.id}")
        self._load(txn, 0, quarter)
        self._scale("split", seal=[0], ranges=[(0.0, 0.25), (0.25, 0.5)])
        self._load(txn, quarter, 2 * quarter)
        self._scale("merge", seal=[3, 1], ranges=[(0.25, 1.0)])
        self._load(txn, 2 * quarter, 3 * quarter)
        killed_s = self._kill_the_leader()
        self._load(txn, 3 * quarter, len(self._flights))
        takeover_s = self._see_the_takeover(killed_s)
        self._nothing_is_visible()
        committed_s, answered_s = self._commit(txn, begun_s)
        rival = self._end_the_rival()
        seen, commits = self._everything_is_visible()
        history = self._cast.bridge.admin.history(self._stream)
        self._spark_agrees(history, len(commits) * RECORDS)
        picture = out / "epochs.svg"
        picture.write_text(lineage_svg(history, f"{STREAM}: {len(self._flights):,} flights in one transaction"))
        self._story.say(f"the epochs as a picture: {picture}")
        meanwhile = [commit for commit in commits if begun_s < commit.asked_s < committed_s]
        during = [commit for commit in commits if committed_s < commit.answered_s < answered_s]
        self._compare(seen, meanwhile, during, committed_s - begun_s, takeover_s, rival)

    # -- one scene each -----------------------------------------------------------------------------

    def _load(self, txn: Transaction, start: int, stop: int) -> None:
        """Write some of the flights and wait until the brokers have them."""
        began_s = time.monotonic()
        written = txn.write_all(self._stream, self._flights.records(start, stop))
        txn.flush()
        took = duration(time.monotonic() - began_s)
        self._story.say(f"{written:,} flights written and acknowledged in {took}; {txn.records:,} so far")

    def _scale(self, what: str, seal: Sequence[int], ranges: Sequence[tuple[float, float]]) -> None:
        """Re-partition the stream under the open transaction."""
        began_s = time.monotonic()
        epoch = self._cast.bridge.admin.scale(self._stream, seal=seal, ranges=ranges)
        took = duration(time.monotonic() - began_s)
        segments = " and ".join(str(number) for number in seal)
        active = ", ".join(f"{item.id.number} {item.range}" for item in epoch.segments)
        self._story.say(f"the stream is scaled in {took}: {what} of segment {segments}; active now: {active}")

    def _kill_the_leader(self) -> float:
        """SIGKILL the leading coordinator; returns when."""
        killed_s = time.monotonic()
        self._cast.cluster.kill_coordinator(self._cast.leader)
        self._story.say(f"SIGKILL to {self._cast.leader.name}, which leads; the loader goes on")
        return killed_s

    def _see_the_takeover(self, killed_s: float) -> float:
        """Wait until the other coordinator leads and commits; returns how long that took."""
        second = self._cast.second
        require(lambda: self._cast.leads(second), f"{second.name} does not take over")

        def answers() -> bool:
            last = self._cast.last_commit()
            return last is not None and last.asked_s > killed_s

        require(answers, f"{second.name} leads, but commits nothing")
        took_s = takeover(self._cast.commits(), killed_s) or 0.0
        self._story.say(f"{second.name} has taken over; small commits go on {duration(took_s)} after the kill")
        return took_s

    def _nothing_is_visible(self) -> None:
        """Before the commit: readers have the small transactions and none of the flights."""
        small = self._cast.pause_writer()
        counts = self._cast.counts()
        self._cast.resume_writer()
        self._story.check_equal("plain reader, flights before the commit", counts.flights, 0)
        self._story.check_equal("plain reader, small records before the commit", counts.small_records, small)
        self._story.say(
            f"before the commit the plain reader has {counts.flights} flights, and all {counts.small_records:,} "
            f"records of the {small // RECORDS:,} small transactions"
        )
        version = self._cast.spark_version()
        low = self._cast.committed() * RECORDS
        spark = self._cast.spark_counts()
        # The writer goes on meanwhile, and what is being committed may count as well.
        high = (self._cast.committed() + 1) * RECORDS
        self._story.check_equal("Spark, flights before the commit", spark.flights, 0)
        self._story.check_within("Spark, small records before the commit", spark.small_records, low, high)
        self._story.say(
            f"before the commit the Kafka source of a stock Spark {version} has {spark.flights} flights, and "
            f"{spark.small_records:,} small records"
        )

    def _commit(self, txn: Transaction, begun_s: float) -> tuple[float, float]:
        """Commit; returns when that was asked for, and when it was answered."""
        committed_s = time.monotonic()
        result = txn.commit()
        answered_s = time.monotonic()
        total = len(self._flights)
        self._story.check_equal("records in the commit's answer", result.records, total)
        history = self._cast.bridge.admin.history(self._stream)
        self._story.say(
            f"COMMIT after {duration(committed_s - begun_s)}, a rolling one, answered in "
            f"{duration(answered_s - committed_s)}: {result.records:,} records from {result.first} to {result.last}"
        )
        epochs = ", ".join(f"{item.epoch} {item.cause}" for item in history.records)
        self._story.say(f"epochs now: {epochs}")
        # If they do not come, the counts at the end will show it.
        happens(lambda: self._cast.counts().flights >= total)
        self._story.say(f"the plain reader has read the flights {duration(time.monotonic() - answered_s)} later")
        return committed_s, answered_s

    def _end_the_rival(self) -> RivalReport:
        """Commit the native transaction as well."""
        rival = self._cast.rival_commits()
        self._story.check_equal("native reader, flights", rival.flights, len(self._flights))
        self._story.check_equal("native reader, small writes", rival.small_read, rival.small_written)
        self._story.say(
            f"the native transaction is committed, too; its reader had stood still for {duration(rival.longest_wait_s)}"
        )
        return rival

    def _everything_is_visible(self) -> tuple[Seen, list[Commit]]:
        """After the commit: the plain reader has everything, once, in order."""
        small = self._cast.pause_writer()
        seen, commits = self._cast.seen(), self._cast.commits()
        check = self._story.check_equal
        check("plain reader, flights", len(seen.rows), len(self._flights))
        check("plain reader, small records", seen.notes.total(), small)
        check("plain reader, small transactions in part", sum(n != RECORDS for n in seen.notes.values()), 0)
        check("plain reader, records that came twice", seen.doubled, 0)
        check("plain reader, flights out of order per aircraft", seen.out_of_order, 0)
        self._story.check_same_counts("plain reader, flights per carrier", seen.carriers, self._flights.carriers())
        self._story.say(
            f"the plain reader counts {len(seen.rows):,} flights of {len(seen.carriers)} carriers and "
            f"{seen.notes.total():,} small records; {seen.doubled} twice, {seen.out_of_order} out of order"
        )
        return seen, commits

    def _spark_agrees(self, history: EpochHistory, small: int) -> None:
        """The same counts from Spark, and its hash of every key."""
        spark = self._cast.spark_counts()
        check = self._story.check_equal
        check("Spark, flights", spark.flights, len(self._flights))
        check("Spark, different rows", spark.different_rows, len(self._flights))
        check("Spark, small records", spark.small_records, small)
        self._story.check_same_counts("Spark, flights per carrier", spark.carriers, self._flights.carriers())
        self._story.say(
            f"Spark counts            {spark.flights:,} flights of {len(spark.carriers)} carriers and "
            f"{spark.small_records:,} small records"
        )
        keys = {item.key for item in spark.keys}
        check("aircraft that Spark has found", len(keys), len(self._flights.tail_numbers()))
        check("keys that Spark hashes or finds elsewhere", sum(not _agrees(item, history) for item in spark.keys), 0)
        self._story.say(
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
            [commit for commit in some if seen.found_s.get(commit.number, 0.0) < commit.answered_s]
            for some in (commits, during)
        )
        held_up = duration(waits(beside, seen.arrived_s)[-1]) if beside else "nothing to read"
        for_known, for_all = waits(known, seen.arrived_s), waits(commits, seen.arrived_s)
        silence_s = longest_silence(seen.arrivals_s, commits[0].asked_s, commits[-1].answered_s)
        stood_still = duration(rival.longest_wait_s)
        self._story.table(
            [f"while one transaction holds {len(self._flights):,} flights", "rollbridge", "native Kafka"],
            [
                ["it is open for", duration(open_s), duration(rival.open_s)],
                ["small writes committed beside it", f"{len(commits):,}", f"{rival.small_written:,}"],
                ["a plain reader's longest wait for one of them", duration(for_known[-1]), stood_still],
                ["  for half of them at most", duration(for_known[len(for_known) // 2]), ""],
                ["  while the flights are being committed", held_up, stood_still],
                ["  where a new topic had to be found first", duration(for_all[-1]), ""],
                ["its longest silence, the takeover included", duration(silence_s), stood_still],
                ["stream split and merged, order per key kept", "yes", "not possible"],
                ["coordinator killed; small commits go on after", duration(takeover_s), ""],
            ],
        )
        for handle in (self._cast.leader, self._cast.second):
            self._story.note(f"peak memory of {handle.name}: {self._cast.memory.mib(handle.pid):.0f} MiB")


def _agrees(item: Routed, history: EpochHistory) -> bool:
    """Whether Spark's hash of a key is ours, and its topic is a segment that holds the key's position."""
    _, segment = parse_segment_topic(item.topic)
    holds = history.segments()[segment].range
    return item.hash % (1 << 64) == key_hash(item.key) and KeySpace().position(item.key) in holds


def tell(out: Path) -> bool:
    """Raise the curtain, tell the story, and clear the stage; returns whether all counts agreed."""
    story = Story()
    rows = flights.load()
    story.say(f"{len(rows):,} flights of 2013 are read; starting Kafka, ZooKeeper and two coordinators")
    with ExitStack() as stack:
        cast = assemble(stack, out, STREAM, rows.tail_numbers()[:_BESIDE])
        story.say(f"stream {STREAM} has two segments; {cast.leader.name} leads its group, the other one waits")
        story.say(
            f"beside the loader run a writer of {RECORDS}-record transactions, a plain read_committed consumer, and a "
            "native Kafka transaction"
        )
        Demo(story, cast, rows).run(out)
    story.note(f"everything is stopped and removed again; what the servers said: {out / 'logs'}")
    return story.conclude()


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
        agreed = tell(out)
    except RollbridgeError as exc:
        click.echo(f"demo: {exc}; logs are in {out}", err=True)
        sys.exit(exc.exit_code)
    except KeyboardInterrupt:
        click.echo("demo: interrupted; everything is stopped and removed again", err=True)
        sys.exit(130)
    sys.exit(0 if agreed else 1)


if __name__ == "__main__":
    main()
