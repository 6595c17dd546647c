"""A backfill: a Spark job of many tasks loads history as ONE transaction, while live traffic goes on beside it.

``make example NAME=spark_backfill`` after ``make up``. A writer and a reader of the stream work all the while;
the reader sees nothing of the backfill until the job is done, is never held up, and then has all of it at once.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

import rollbridge
from spark_examples.demo import flights
from spark_examples.demo.common import check, connect, longest_silence, new_stream, play, until
from spark_examples.demo.session import open_spark, options_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASKS: Final = 16
_LIVE_KEY: Final = b"live"
_LIVE_EVERY_S: Final = 0.02


class Live:
    """Traffic in a stream: a record is committed every now and then, and a reader notes when each record comes."""

    def __init__(self, b: rollbridge.Bridge, stream: str) -> None:
        self.written = 0
        self.live_s: list[float] = []
        """When live records came, monotonic."""
        self.loaded_s: list[float] = []
        """When others came."""
        self._bridge, self._stream = b, stream
        self._stopping = threading.Event()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, args=(b.reader(stream),), daemon=True).start()

    def stop(self) -> None:
        """Stop writing."""
        self._stopping.set()
        self._writer.join()

    def _write(self) -> None:
        while not self._stopping.wait(_LIVE_EVERY_S):
            with self._bridge.transaction(self._stream) as txn:
                txn.write(self._stream, key=_LIVE_KEY, value=b"%d" % self.written)
            self.written += 1

    def _read(self, reader: rollbridge.Reader) -> None:
        with reader:
            while not self._stopping.is_set() or len(self.live_s) < self.written:
                if (record := reader.poll(0.1)) is not None:
                    (self.live_s if record.key == _LIVE_KEY else self.loaded_s).append(time.monotonic())


def show(spark: SparkSession, rows: int) -> bool:
    """Load while live traffic goes on."""
    with connect("backfill") as b, tempfile.TemporaryDirectory(prefix="backfill-") as place:
        stream = new_stream(b, "backfill")
        lines = flights.load()[:rows]
        Path(place, "flights.csv").write_bytes(b"".join(b"%d,%s\n" % (row, line) for row, line in enumerate(lines)))
        live = Live(b, stream)
        until(lambda: len(live.live_s) > 0, "the live reader sees the live writer")
        click.echo(f"{rows:,} flights go into {stream} by {TASKS} tasks as one transaction, beside live traffic")
        name, label = f"backfill-{stream.rpartition('-')[2]}", "flights of 2013"
        text = spark.read.text(place).repartition(TASKS)
        frame = text.selectExpr("nullif(split(value, ',')[12], 'NA') AS key", "value")
        options = options_of(stream, **{"client.name": name, "label": label})
        frame.write.format("rollbridge").options(**options).mode("append").save()
        until(lambda: len(live.loaded_s) >= rows, "the reader has all of it")
        live.stop()
        until(lambda: len(live.live_s) >= live.written, "the reader has the rest")
        before_s = [at for at in live.live_s if at < live.loaded_s[0]]
        silence_s = longest_silence(before_s, before_s[0], before_s[-1])
        click.echo(f"  meanwhile the reader saw {len(before_s):,} live records, longest wait {silence_s:.2f} s")
        load = b.outcome(label=f"{label}/0", client=name)
        click.echo(f"  then all {load.records:,} records at once, as transaction {load.transaction}")
        return all(
            [
                check("the backfill is one transaction of all rows", load.records == rows == len(live.loaded_s)),
                check("live records came through all the while", 1 < len(before_s) < len(live.live_s) == live.written),
            ]
        )


@click.command()
@click.option("--rows", type=click.IntRange(1_000, flights.ROWS), default=flights.ROWS, show_default=True)
def main(rows: int) -> None:
    """Load history as one transaction, while live traffic goes on."""
    with open_spark("backfill") as spark:
        play(lambda: show(spark, rows))


if __name__ == "__main__":
    main()
