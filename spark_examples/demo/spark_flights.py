"""A pipeline: every flight of 2013 through Spark into two streams, exactly once, although the driver is killed midway.

``make example NAME=spark_flights`` after ``make up``. The flights come as files, a few to each micro-batch; they
are cleaned, and joined with the names of airlines and airports and with the weather at take-off. Flights that took
place go to one stream, cancelled ones to another, and each micro-batch is one transaction over both.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

import rollbridge
from spark_examples.demo import flights
from spark_examples.demo.competing import check, connect, new_stream, play, start, until
from spark_examples.demo.on_spark import kill_driver, open_spark, options_of
from spark_examples.demo.plots import FOLDER, save_bars

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILES: Final = 24
FILES_PER_BATCH: Final = 2
_CARRIER, _DEPARTURE_DELAY = 9, 5
_MISSING: Final = (b"", b"NA")
_PATIENCE_S: Final = 250.0
"""Longest that a driver may take from its start to its third micro-batch."""

Delays = dict[str, tuple[int, int]]
"""By carrier: how many flights, and by how many minutes in sum they departed late."""


def drive(place: str, flown: str, cancelled: str) -> None:
    """A driver in a process of its own."""
    with open_spark("flights") as spark:
        run_pipeline(spark, place, flown, cancelled)


def run_pipeline(spark: SparkSession, place: str, flown: str, cancelled: str) -> None:
    """Take what files there are, from the checkpoint on."""
    folder = Path(place)
    lines = (
        spark.readStream.schema("line string").option("maxFilesPerTrigger", FILES_PER_BATCH).text(str(folder / "in"))
    )
    query = (
        enriched(spark, lines, flown, cancelled)
        .writeStream.format("rollbridge")
        .options(**options_of(f"{flown},{cancelled}"))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def enriched(spark: SparkSession, lines: DataFrame, flown: str, cancelled: str) -> DataFrame:
    """Key, value and stream of each flight, from lines ``row,flight``."""
    tables = flights.installed_file().parent

    def table(name: str, *columns: str) -> DataFrame:
        return spark.read.option("header", True).option("nullValue", "NA").csv(str(tables / name)).selectExpr(*columns)

    airlines = table("airlines.csv", "carrier", "name AS airline")
    airports = table("airports.csv", "faa AS dest", "name AS destination")
    weather = table("weather.csv", "origin", "time_hour", "double(wind_speed) AS wind_mph").dropDuplicates(
        ["origin", "time_hour"]
    )
    names = ("row", *flights.HEADER.decode().split(","))
    fields = [f"nullif(split(line, ',')[{place}], 'NA') AS {name}" for place, name in enumerate(names)]
    facts = ("row", "flight", "tailnum", "airline", "origin", "destination", "dep_delay", "wind_mph")
    return (
        lines.selectExpr(*fields)
        .join(airlines, "carrier", "left")
        .join(airports, "dest", "left")
        .join(weather, ["origin", "time_hour"], "left")
        .selectExpr(
            "carrier AS key",
            f"to_json(struct({', '.join(facts)})) AS value",
            f"if(dep_delay IS NULL, '{cancelled}', '{flown}') AS topic",
        )
    )


def show(spark: SparkSession, rows: int, plot: Path, files: int = FILES) -> bool:
    """Run the pipeline, kill it, run it again, count, and draw the delays."""
    with connect("flights") as b, tempfile.TemporaryDirectory(prefix="flights-") as place:
        flown, cancelled = (new_stream(b, f"flights-{name}") for name in ("flown", "cancelled"))
        lines = flights.load().lines[:rows]
        write_files(Path(place) / "in", lines, files)
        planned = -(-files // FILES_PER_BATCH)
        click.echo(f"{len(lines):,} flights in {files} files go to {flown} and {cancelled}")
        driver = start(drive, place, flown, cancelled)
        until(lambda: len(committed(b, flown)) >= 3, "three micro-batches are committed", [driver], _PATIENCE_S)
        assert driver.pid is not None, "it has been started"
        kill_driver(driver.pid)
        driver.join()
        before = len(committed(b, flown))
        click.echo(f"  the driver is killed after {before} of {planned} micro-batches, in the middle of the next one")
        run_pipeline(spark, place, flown, cancelled)
        transactions = committed(b, flown)
        delays, numbers = read_back(b, flown, cancelled)
        for carrier, (count, minutes) in sorted(delays.items(), key=lambda item: -item[1][1] / item[1][0])[:5]:
            click.echo(f"  {carrier}: {count:>6,} flights, {minutes / count:5.1f} minutes late on average")
        expected, batches = delays_of(lines), batches_of(place)
        save_bars(
            plot,
            f"Departure delays of {len(numbers):,} flights in 2013; the driver was killed in the middle",
            "minutes late on average",
            means_of(delays),
            means_of(expected),
        )
        return all(
            (
                check("every flight is there once", sorted(numbers) == list(range(len(lines)))),
                check("each micro-batch is one transaction over both streams", len(transactions) == batches),
                check("delays by carrier are those of the file", delays == expected),
            )
        )


def write_files(folder: Path, lines: Sequence[bytes], files: int) -> None:
    """The lines with their numbers, as files of the same size and of rising age."""
    folder.mkdir()
    size = -(-len(lines) // files)
    for number in range(files):
        rows = range(number * size, min((number + 1) * size, len(lines)))
        file = folder / f"part-{number:02}.csv"
        file.write_bytes(b"".join(b"%d,%s\n" % (row, lines[row]) for row in rows))
        os.utime(file, (1_000_000_000 + number, 1_000_000_000 + number))


def batches_of(place: str) -> int:
    """How many micro-batches Spark knows to be done.

    A driver that is killed while it plans one may have noted its files already; the next one has twice as many then.
    """
    return sum(file.name.isdigit() for file in (Path(place) / "checkpoint" / "commits").iterdir())


def committed(b: rollbridge.Bridge, stream: str) -> list[rollbridge.CommittedTransaction]:
    """The transactions that hold records of a stream."""
    scope = stream.partition("/")[0]
    with b.transactions(scope, follow=False) as transactions:
        return [transaction for transaction in transactions if stream in transaction.counts()]


def read_back(b: rollbridge.Bridge, flown: str, cancelled: str) -> tuple[Delays, list[int]]:
    """The delays by carrier, and the numbers of all flights, from the streams."""
    delays: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    numbers = []
    for stream in (flown, cancelled):
        with b.reader(stream, follow=False) as reader:
            for record in reader:
                fact = json.loads(record.value or b"{}")
                numbers.append(int(fact["row"]))
                if stream == flown:
                    carrier = (record.key or b"").decode()
                    count, minutes = delays[carrier]
                    delays[carrier] = (count + 1, minutes + int(fact["dep_delay"]))
    return dict(delays), numbers


def delays_of(lines: Sequence[bytes]) -> Delays:
    """The delays by carrier, from the file itself."""
    delays: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for line in lines:
        fields = line.split(b",")
        if fields[_DEPARTURE_DELAY] not in _MISSING:
            count, minutes = delays[fields[_CARRIER].decode()]
            delays[fields[_CARRIER].decode()] = (count + 1, minutes + int(fields[_DEPARTURE_DELAY]))
    return dict(delays)


def means_of(delays: Delays) -> dict[str, float]:
    """Minutes late on average, by carrier."""
    return {carrier: minutes / count for carrier, (count, minutes) in delays.items()}


@click.command()
@click.option("--rows", type=click.IntRange(1_000, flights.ROWS), default=flights.ROWS, show_default=True)
@click.option("--plot", type=click.Path(path_type=Path), default=FOLDER / "spark_flights.png", show_default=True)
def main(rows: int, plot: Path) -> None:
    """Every flight of 2013 through Spark into two streams, exactly once."""

    def run() -> bool:
        with open_spark("flights") as spark:
            return show(spark, rows, plot)

    play(run)


if __name__ == "__main__":
    main()
