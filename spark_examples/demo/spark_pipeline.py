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
from typing import TYPE_CHECKING, Final

import click

import rollbridge
from spark_examples.demo.competing import check, connect, new_stream, play
from spark_examples.demo.on_spark import open_spark, options_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

_ACCOUNTS: Final = 20
_PER_TRANSACTION: Final = 25
_ABORTED_EVERY: Final = 5
_FIELDS: Final = ("key", "split(string(value), ' ') AS fields")
_EUROS: Final = ("key", "to_json(named_struct('number', int(fields[0]), 'euros', int(fields[1]) / 100)) AS value")

Payments = dict[bytes, list[int]]
"""The numbers of the payments of each account, in their order."""


class Payers:
    """Writes payments, twenty-five to a transaction."""

    def __init__(self, b: rollbridge.Bridge, stream: str) -> None:
        self._b, self._stream = b, stream
        self._number = self._transactions = 0
        self.paid: Payments = defaultdict(list)

    def pay(self, transactions: int) -> None:
        """So many transactions; every fifth is aborted."""
        for _ in range(transactions):
            self._transactions += 1
            numbers = range(self._number, self._number + _PER_TRANSACTION)
            self._number = numbers.stop
            txn = self._b.begin(self._stream)
            for number in numbers:
                txn.write(self._stream, key=b"account-%d" % (number % _ACCOUNTS), value=b"%d %d" % (number, number * 7))
            if self._transactions % _ABORTED_EVERY == 0:
                txn.abort()
                continue
            txn.commit()
            for number in numbers:
                self.paid[b"account-%d" % (number % _ACCOUNTS)].append(number)

    @property
    def committed(self) -> int:
        """How many payments are committed."""
        return sum(map(len, self.paid.values()))


def read(b: rollbridge.Bridge, stream: str) -> tuple[Payments, set[int]]:
    """What stands in the stream that the query writes: payments, and those that are wrong."""
    found: Payments = defaultdict(list)
    wrong = set()
    with b.reader(stream, follow=False) as reader:
        for record in reader:
            payment = json.loads(record.value or b"{}")
            found[record.key or b""].append(payment["number"])
            if payment["euros"] != payment["number"] * 7 / 100:
                wrong.add(payment["number"])
    return found, wrong


def show(spark: SparkSession, transactions: int) -> bool:
    """Run it; whether everything is where it should be."""
    with connect("payers") as b, tempfile.TemporaryDirectory() as checkpoint:
        cents, euros = new_stream(b, "cents"), new_stream(b, "euros")
        payers = Payers(b, cents)

        def query(**trigger: object) -> StreamingQuery:
            source = options_of(cents, startingOffsets="earliest", maxRecordsPerTrigger="500")
            return (
                spark.readStream.format("rollbridge")
                .options(**source)
                .load()
                .selectExpr(*_FIELDS)
                .selectExpr(*_EUROS)
                .writeStream.format("rollbridge")
                .options(**options_of(euros))
                .option("checkpointLocation", checkpoint)
                .trigger(**trigger)
                .start()
            )

        click.echo(f"payments go into {cents}, a query turns them into {euros}")
        payers.pay(transactions)
        running = query(processingTime="50 milliseconds")
        running.processAllAvailable()
        b.admin.scale(cents, seal=[0], ranges=[(0.0, 0.4), (0.4, 1.0)])
        payers.pay(transactions)
        click.echo("  the stream of cents is split, while the query reads it")
        running.stop()
        click.echo(f"  the query is stopped after {sum(map(len, read(b, euros)[0].values()))} payments")
        b.admin.scale(euros, seal=[0], ranges=[(0.0, 0.5), (0.5, 1.0)])
        b.admin.scale(cents, seal=[1, 2], ranges=[(0.0, 1.0)])
        payers.pay(transactions)
        click.echo("  the stream of euros is split, that of cents is merged; the query goes on from its checkpoint")
        query(availableNow=True).awaitTermination()
        found, wrong = read(b, euros)
        total = sum(map(len, found.values()))
        click.echo(f"  {payers.committed} payments were committed, {total} stand in {euros}")
        return all(
            [
                check(
                    "each committed payment was turned into euros exactly once", _sorted(found) == _sorted(payers.paid)
                ),
                check("the payments of each account are in their order", found == payers.paid),
                check("every amount is right", not wrong),
            ]
        )


def _sorted(payments: Payments) -> dict[bytes, list[int]]:
    return {account: sorted(numbers) for account, numbers in payments.items()}


@click.command()
@click.option("--transactions", default=20, show_default=True, help="Transactions between two changes.")
def main(transactions: int) -> None:
    """A query from one stream into another, exactly once, across scales of both."""

    def run() -> bool:
        with open_spark("consume, transform, produce") as spark:
            return show(spark, transactions)

    play(run)


if __name__ == "__main__":
    main()
