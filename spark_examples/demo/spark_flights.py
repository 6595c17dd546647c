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
from spark_examples.demo.common import check, connect, new_stream, play, start, until
from spark_examples.demo.session import kill_driver, open_spark, options_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILES: Final = 24
FILES_PER_BATCH: Final = 2
_DEPARTURE_DELAY: Final = 5
_PATIENCE_S: Final = 250.0
"""Longest that a driver may take from its start to its third micro-batch."""

Delays = dict[str, list[int]]
"""By carrier: by how many minutes each flight departed late, sorted."""


def drive(place: str, flown: str, cancelled: str) -> None:
    """Run the pipeline in a process of its own."""
    with open_spark("flights") as spark:
        run_pipeline(spark, place, flown, cancelled)


def run_pipeline(spark: SparkSession, place: str, flown: str, cancelled: str) -> None:
    """Take what files there are, from the checkpoint on."""
    lines = spark.readStream.schema("line string").option("maxFilesPerTrigger", FILES_PER_BATCH).text(f"{place}/in")
    query = (
        enriched(spark, lines, flown, cancelled)
        .writeStream.format("rollbridge")
        .options(**options_of(f"{flown},{cancelled}"))
        .option("checkpointLocation", f"{place}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def enriched(spark: SparkSession, lines: DataFrame, flown: str, cancelled: str) -> DataFrame:
    """Return key, value and stream of each flight, from lines ``row,flight``."""

    def table(name: str, *columns: str) -> DataFrame:
        tables = spark.read.option("header", True).option("nullValue", "NA")
        return tables.csv(str(flights.folder() / name)).selectExpr(*columns)

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


def show(spark: SparkSession, rows: int, files: int = FILES) -> bool:
    """Run the pipeline, kill it, run it again, and count."""
    with connect("flights") as b, tempfile.TemporaryDirectory(prefix="flights-") as place:
        flown, cancelled = (new_stream(b, f"flights-{name}") for name in ("flown", "cancelled"))
        lines = flights.load()[:rows]
        write_files(Path(place, "in"), lines, files)
        click.echo(f"{len(lines):,} flights in {files} files go to {flown} and {cancelled}")
        driver = start(drive, place, flown, cancelled)
        until(lambda: committed(b, flown) >= 3, "three micro-batches are committed", [driver], _PATIENCE_S)
        assert driver.pid is not None, "it has been started"
        kill_driver(driver.pid)
        driver.join()
        batches = -(-files // FILES_PER_BATCH)
        click.echo(
            f"  the driver is killed after {committed(b, flown)} of {batches} micro-batches, inside the next one"
        )
        run_pipeline(spark, place, flown, cancelled)
        delays, numbers = read_back(b, flown, cancelled)
        for carrier, minutes in sorted(delays.items(), key=lambda item: -sum(item[1]) / len(item[1]))[:5]:
            late = sum(minutes) / len(minutes)
            click.echo(f"  {carrier}: {len(minutes):>6,} flights, {late:5.1f} minutes late on average")
        # A driver that is killed while it plans a micro-batch may have noted its files already; the next one has twice
        # as many then.
        done = sum(file.name.isdigit() for file in Path(place, "checkpoint", "commits").iterdir())
        return all(
            [
                check("every flight is there once", sorted(numbers) == list(range(len(lines)))),
                check("each micro-batch is one transaction over both streams", committed(b, flown) == done),
                check("delays by carrier are those of the file", delays == delays_of(lines)),
            ]
        )


def write_files(folder: Path, lines: Sequence[bytes], files: int) -> None:
    """Write the lines with their numbers, as files of the same size and of rising age."""
    folder.mkdir()
    size = -(-len(lines) // files)
    for number in range(files):
        rows = range(number * size, min((number + 1) * size, len(lines)))
        file = folder / f"part-{number:02}.csv"
        file.write_bytes(b"".join(b"%d,%s\n" % (row, lines[row]) for row in rows))
        os.utime(file, (1_000_000_000 + number, 1_000_000_000 + number))


def committed(b: rollbridge.Bridge, stream: str) -> int:
    """Return how many transactions hold records of a stream."""
    with b.transactions(stream.partition("/")[0], follow=False) as transactions:
        return sum(stream in transaction.counts() for transaction in transactions)


def read_back(b: rollbridge.Bridge, flown: str, cancelled: str) -> tuple[Delays, list[int]]:
    """Return the delays, and the numbers of all flights, from the streams."""
    delays: defaultdict[str, list[int]] = defaultdict(list)
    numbers = []
    for stream in (flown, cancelled):
        with b.reader(stream, follow=False) as reader:
            for record in reader:
                fact = json.loads(record.value or b"{}")
                numbers.append(int(fact["row"]))
                if stream == flown:
                    delays[(record.key or b"").decode()].append(int(fact["dep_delay"]))
    return {carrier: sorted(minutes) for carrier, minutes in delays.items()}, numbers


def delays_of(lines: Sequence[bytes]) -> Delays:
    """Return the delays, from the file itself."""
    delays: defaultdict[str, list[int]] = defaultdict(list)
    for fields in (line.split(b",") for line in lines):
        if fields[_DEPARTURE_DELAY] not in flights.MISSING:
            delays[fields[flights.CARRIER].decode()].append(int(fields[_DEPARTURE_DELAY]))
    return {carrier: sorted(minutes) for carrier, minutes in delays.items()}


@click.command()
@click.option("--rows", type=click.IntRange(1_000, flights.ROWS), default=flights.ROWS, show_default=True)
def main(rows: int) -> None:
    """Every flight of 2013 through Spark into two streams, exactly once."""
    with open_spark("flights") as spark:
        play(lambda: show(spark, rows))


if __name__ == "__main__":
    main()
