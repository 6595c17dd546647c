"""A change-data feed: what two streams hold, in the one order in which it was committed.

``make example NAME=spark_change_feed`` after ``make up``. Each transfer takes an amount from one account and
gives it to another, in two streams that know nothing of each other, in one transaction. ``rollbridge-transactions`` has
a row for each transaction; joined with the data by the place in the commit log, it is a feed of changes like that of a
database: whoever applies it transaction by transaction never sees money that has left one account and is not yet on the
other.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING

import click

import rollbridge
from spark_examples.demo.common import check, connect, new_stream, play
from spark_examples.demo.session import open_spark, options_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def transfer(b: rollbridge.Bridge, debits: str, credits: str, transfers: int) -> Counter[str]:
    """Move amounts between accounts, some transfers aborted; both streams are scaled. Return the balances."""
    chance = random.Random(transfers)
    balances: Counter[str] = Counter()
    for number in range(transfers):
        payer, payee = (f"account-{account}" for account in chance.sample(range(8), 2))
        amount = chance.randint(1, 1000)
        txn = b.begin(debits, credits, label=f"transfer {number}")
        txn.write(debits, key=payer.encode(), value=b"%d" % -amount)
        txn.write(credits, key=payee.encode(), value=b"%d" % amount)
        if number % 7 == 6:
            txn.abort()
            continue
        txn.commit()
        balances[payer] -= amount
        balances[payee] += amount
        if number % 10 == 9:
            stream = (debits, credits)[number // 10 % 2]
            [segment] = b.admin.describe(stream).active.segments
            b.admin.scale(stream, seal=[segment.id.number], ranges=[(0.0, 1.0)])
    return balances


def feed(spark: SparkSession, debits: str, credits: str) -> DataFrame:
    """Return the changes of both streams with the transaction of each, in the order in which they were committed."""

    def data(stream: str) -> DataFrame:
        columns = "stream string, key binary, value binary, localSequence bigint, commitPosition bigint"
        return spark.read.format("rollbridge").options(**options_of(stream)).schema(columns).load()

    transactions = spark.read.format("rollbridge-transactions").options(**options_of(f"{debits},{credits}")).load()
    return (
        data(debits)
        .unionByName(data(credits))
        .join(transactions.selectExpr("commitPosition", "label", "records"), "commitPosition")
        .selectExpr("*", "string(key) account", "int(string(value)) amount")
        .orderBy("commitPosition", "localSequence")
    )


def show(spark: SparkSession, transfers: int) -> bool:
    """Run it; return whether the feed is what was done."""
    with connect("bank") as b:
        debits, credits = new_stream(b, "debits"), new_stream(b, "credits")
        balances = transfer(b, debits, credits, transfers)
    click.echo(f"{transfers} transfers went into {debits} and {credits}, some were aborted; both streams were scaled")
    changes = feed(spark, debits, credits).collect()
    for change in changes[:4]:
        click.echo(f"  {change.commitPosition:>4} {change.label:<12} {change.account:<10} {change.amount:>6}")
    click.echo("  ...")
    applied: Counter[str] = Counter()
    for change in changes:
        applied[change.account] += change.amount
    transactions = [(label, list(rows)) for label, rows in groupby(changes, lambda change: change.label)]
    numbers = [int(label.split()[1]) for label, _ in transactions]
    missing = sum(sum(change.amount for change in rows) != 0 for _, rows in transactions)
    return all(
        [
            check("after each transaction of the feed no money is missing", not missing),
            check("the transfers come in the order in which they were committed", numbers == sorted(numbers)),
            check("each has all of its changes", all(rows[0].records == len(rows) for _, rows in transactions)),
            check("and the balances are those of the bank", applied == balances),
        ]
    )


@click.command()
@click.option("--transfers", default=60, show_default=True, help="How many transfers.")
def main(transfers: int) -> None:
    """A change-data feed of two streams."""
    with open_spark("change feed") as spark:
        play(lambda: show(spark, transfers))


if __name__ == "__main__":
    main()
