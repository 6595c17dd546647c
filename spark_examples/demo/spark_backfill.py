"""A backfill: a Spark job of many tasks loads history as ONE transaction, while live traffic goes on beside it.

``make example NAME=spark_backfill`` after ``make up``. A writer and a reader of the stream work all the while;
the reader sees nothing of the backfill until the job is done, is never held up, and then has all of it at once.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

import rollbridge
from spark_examples.demo import flights
from spark_examples.demo.competing import check, connect, new_stream, play, until
from spark_examples.demo.on_spark import open_spark, options_of
from spark_examples.demo.plots import FOLDER, save_curves
from spark_examples.demo.spark_flights import committed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASKS: Final = 16
_LIVE_KEY: Final = b"live"
_LIVE_EVERY_S: Final = 0.02
_LAST: Final = b"the last one"
_LIVE: Final = "live records"
_LOADED: Final = "records of the backfill"
_DRAWN_EVERY: Final = 1_000


class LiveReader:
    """Reads the stream as it grows, up to the last live record, and notes what it sees, and when.

    Attributes:
        live, loaded: How many live records and records of the backfill it has read.
        live_before: How many live ones came while nothing of the backfill was there.
        silence_s: Its longest wait for a live record while nothing of the backfill was there.
        seen: Records of each kind over time, for a plot.
    """

    def __init__(self, b: rollbridge.Bridge, stream: str) -> None:
        self.live = self.loaded = self.live_before = 0
        self.silence_s = 0.0
        self.seen: dict[str, list[tuple[float, float]]] = {_LIVE: [], _LOADED: []}
        self._reader = b.reader(stream)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began_s = last_s = time.monotonic()
        with self._reader as reader:
            for record in reader:
                now_s = time.monotonic()
                if record.key != _LIVE_KEY:
                    self.loaded += 1
                    if self.loaded % _DRAWN_EVERY == 1:
                        self.seen[_LOADED].append((now_s - began_s, self.loaded))
                    continue
                if not self.loaded:
                    if self.live:
                        self.silence_s = max(self.silence_s, now_s - last_s)
                    self.live_before += 1
                self.live += 1
                self.seen[_LIVE].append((now_s - began_s, self.live))
                last_s = now_s
                if record.value == _LAST:
                    return


class LiveWriter:
    """Commits a record every now and then."""

    def __init__(self, b: rollbridge.Bridge, stream: str) -> None:
        self.written = 0
        self._bridge = b
        self._stream = stream
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Write the last one."""
        self._stopping.set()
        self._thread.join()
        self._write(_LAST)

    def _run(self) -> None:
        while not self._stopping.wait(_LIVE_EVERY_S):
            self._write(b"%d" % self.written)

    def _write(self, value: bytes) -> None:
        with self._bridge.transaction(self._stream) as txn:
            txn.write(self._stream, key=_LIVE_KEY, value=value)
        self.written += 1


def backfill(spark: SparkSession, folder: Path, options: Mapping[str, str]) -> None:
    """The job: read the flights in many tasks, and write them as one transaction."""
    lines = spark.read.text(str(folder)).repartition(TASKS)
    frame = lines.selectExpr("nullif(split(value, ',')[12], 'NA') AS key", "value")
    frame.write.format("rollbridge").options(**options).mode("append").save()


def show(spark: SparkSession, rows: int, plot: Path) -> bool:
    """Load while live traffic goes on, and draw what a reader saw of both."""
    with connect("backfill") as b, tempfile.TemporaryDirectory(prefix="backfill-") as place:
        stream = new_stream(b, "backfill")
        folder = Path(place) / "in"
        folder.mkdir()
        lines = flights.load().lines[:rows]
        (folder / "flights.csv").write_bytes(b"".join(b"%d,%s\n" % (row, line) for row, line in enumerate(lines)))
        reader, writer = LiveReader(b, stream), LiveWriter(b, stream)
        until(lambda: reader.live > 0, "the live reader sees the live writer")
        click.echo(
            f"{rows:,} flights are loaded into {stream} by {TASKS} tasks as one transaction, beside live traffic"
        )
        name, label = f"backfill-{stream.rpartition('-')[2]}", "flights of 2013"
        backfill(spark, folder, options_of(stream, **{"client.name": name, "label": label}))
        until(lambda: reader.loaded >= rows, "the reader has all of it")
        click.echo(
            f"  meanwhile the reader saw {reader.live_before:,} live records, longest wait {reader.silence_s:.2f} s"
        )
        writer.stop()
        until(lambda: reader.live >= writer.written, "the reader has the rest")
        [load] = [item for item in committed(b, stream) if item.count > 1]
        click.echo(f"  then all {load.count:,} records at once, as transaction {load.id}")
        save_curves(plot, "What a live reader has seen of one stream", "records", reader.seen)
        held = (
            check("the backfill is one transaction of all rows", load.count == rows and reader.loaded == rows),
            check("live records came through all the while", reader.live_before > 1 and reader.live == writer.written),
            check(
                "its outcome can be asked for by its label",
                b.outcome(label=f"{label}/0", client=name).transaction == load.id,
            ),
        )
        return all(held)


@click.command()
@click.option("--rows", type=click.IntRange(1_000, flights.ROWS), default=flights.ROWS, show_default=True)
@click.option("--plot", type=click.Path(path_type=Path), default=FOLDER / "spark_backfill.png", show_default=True)
def main(rows: int, plot: Path) -> None:
    """Load history as one transaction, while live traffic goes on."""

    def run() -> bool:
        with open_spark("backfill") as spark:
            return show(spark, rows, plot)

    play(run)


if __name__ == "__main__":
    main()
