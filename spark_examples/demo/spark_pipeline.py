"""Consume, transform, produce: a query from one stream into another, exactly once, across scales of both.

``make example NAME=spark_pipeline`` after ``make up``. Payments in cents are written by transactions,
some of which are aborted; a Spark query turns them into euros. Meanwhile the stream that it reads is split and merged,
the stream that it writes is split, and the query is stopped in the middle of its work and started again.

What a micro-batch is to read stands in the checkpoint before it runs, and what it writes is one transaction that
carries its number. So one that is run again reads the same, and what it had committed before is found.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from itertools import count
from typing import TYPE_CHECKING, Final

import click

import rollbridge
from spark_examples.demo.common import check, connect, new_stream, play
from spark_examples.demo.session import open_spark, options_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

_ACCOUNTS: Final = 20
_PER_TRANSACTION: Final = 25
_ABORTED_EVERY: Final = 5
_EUROS: Final = (
    "key",
    "split(string(value), ' ') AS fields",
    "to_json(named_struct('number', int(fields[0]), 'euros', int(fields[1]) / 100)) AS value",
)

Payments = dict[bytes, list[tuple[int, float]]]
"""Number and euros of the payments of each account, in their order."""


def pay(b: rollbridge.Bridge, stream: str, transactions: range, paid: Payments) -> None:
    """Write payments, twenty-five to a transaction; every fifth is aborted, the others are noted."""
    for transaction in transactions:
        txn = b.begin(stream)
        first = transaction * _PER_TRANSACTION
        payments = [(b"account-%d" % (n % _ACCOUNTS), n) for n in range(first, first + _PER_TRANSACTION)]
        for account, number in payments:
            txn.write(stream, key=account, value=b"%d %d" % (number, number * 7))
        if transaction % _ABORTED_EVERY == 0:
            txn.abort()
            continue
        txn.commit()
        for account, number in payments:
            paid[account].append((number, number * 7 / 100))


def read(b: rollbridge.Bridge, stream: str) -> Payments:
    """Return the payments in the stream that the query writes."""
    found: Payments = defaultdict(list)
    with b.reader(stream, follow=False) as reader:
        for record in reader:
            payment = json.loads(record.value or b"{}")
            found[record.key or b""].append((payment["number"], payment["euros"]))
    return found


def number_of(payments: Payments) -> int:
    """Return how many payments there are."""
    return sum(map(len, payments.values()))


def show(spark: SparkSession, transactions: int) -> bool:
    """Run it; return whether everything is where it should be."""
    with connect("payers") as b, tempfile.TemporaryDirectory() as checkpoint:
        cents, euros = new_stream(b, "cents"), new_stream(b, "euros")
        paid: Payments = defaultdict(list)
        turns = (range(turn * transactions, (turn + 1) * transactions) for turn in count())

        def query(**trigger: object) -> StreamingQuery:
            source = options_of(cents, startingOffsets="earliest", maxRecordsPerTrigger="500")
            frame = spark.readStream.format("rollbridge").options(**source).load()
            return (
                frame.selectExpr(*_EUROS)
                .select("key", "value")
                .writeStream.format("rollbridge")
                .options(**options_of(euros))
                .option("checkpointLocation", checkpoint)
                .trigger(**trigger)
                .start()
            )

        click.echo(f"payments go into {cents}, a query turns them into {euros}")
        pay(b, cents, next(turns), paid)
        running = query(processingTime="50 milliseconds")
        running.processAllAvailable()
        b.admin.scale(cents, seal=[0], ranges=[(0.0, 0.4), (0.4, 1.0)])
        pay(b, cents, next(turns), paid)
        click.echo("  the stream of cents is split, while the query reads it")
        running.stop()
        click.echo(f"  the query is stopped after {number_of(read(b, euros))} payments")
        b.admin.scale(euros, seal=[0], ranges=[(0.0, 0.5), (0.5, 1.0)])
        b.admin.scale(cents, seal=[1, 2], ranges=[(0.0, 1.0)])
        pay(b, cents, next(turns), paid)
        click.echo("  the stream of euros is split, that of cents is merged; the query goes on from its checkpoint")
        query(availableNow=True).awaitTermination()
        found = read(b, euros)
        click.echo(f"  {number_of(paid)} payments were committed, {number_of(found)} stand in {euros}")
        once = {account: sorted(payments) for account, payments in found.items()} == paid
        return all(
            [
                check("each committed payment was turned into euros exactly once", once),
                check("the payments of each account are in their order", found == paid),
            ]
        )


@click.command()
@click.option("--transactions", default=20, show_default=True, help="Transactions between two changes.")
def main(transactions: int) -> None:
    """A query from one stream into another, exactly once, across scales of both."""
    with open_spark("consume, transform, produce") as spark:
        play(lambda: show(spark, transactions))


if __name__ == "__main__":
    main()
