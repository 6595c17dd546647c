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
from typing import TYPE_CHECKING, Final

import click

import rollbridge
from spark_examples.demo.competing import check, connect, new_stream, play
from spark_examples.demo.on_spark import open_spark, options_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

_ACCOUNTS: Final = 8
_SCALE_EVERY: Final = 10


def transfer(b: rollbridge.Bridge, debits: str, credits: str, transfers: int) -> Counter[str]:
    """Move amounts between accounts, while both streams are scaled and some transfers are aborted; the balances."""
    chance = random.Random(transfers)
    balances: Counter[str] = Counter()
    segment = {debits: 0, credits: 0}
    for number in range(transfers):
        payer, payee = chance.sample(range(_ACCOUNTS), 2)
        amount = chance.randint(1, 1000)
        txn = b.begin(debits, credits, label=f"transfer {number}")
        txn.write(debits, key=b"account-%d" % payer, value=b"%d" % -amount)
        txn.write(credits, key=b"account-%d" % payee, value=b"%d" % amount)
        if number % 7 == 6:
            txn.abort()
            continue
        txn.commit()
        balances[f"account-{payer}"] -= amount
        balances[f"account-{payee}"] += amount
        if number % _SCALE_EVERY == _SCALE_EVERY - 1:
            stream = (debits, credits)[number // _SCALE_EVERY % 2]
            b.admin.scale(stream, seal=[segment[stream]], ranges=[(0.0, 1.0)])
            segment[stream] += 1
    return balances


def feed(spark: SparkSession, debits: str, credits: str) -> DataFrame:
    """The changes of both streams with the transaction of each, in the order in which they were committed."""

    def data(stream: str) -> DataFrame:
        columns = "stream string, key binary, value binary, localSequence bigint, commitPosition bigint"
        return spark.read.format("rollbridge").options(**options_of(stream)).schema(columns).load()

    transactions = spark.read.format("rollbridge-transactions").options(**options_of(f"{debits},{credits}")).load()
    return (
        data(debits)
        .unionByName(data(credits))
        .join(transactions.selectExpr("commitPosition", "label", "records"), "commitPosition")
        .selectExpr(
            "commitPosition",
            "localSequence",
            "label",
            "records",
            "stream",
            "string(key) account",
            "int(string(value)) amount",
        )
        .orderBy("commitPosition", "localSequence")
    )


def show(spark: SparkSession, transfers: int) -> bool:
    """Run it; whether the feed is what was done."""
    with connect("bank") as b:
        debits, credits = new_stream(b, "debits"), new_stream(b, "credits")
        balances = transfer(b, debits, credits, transfers)
    click.echo(f"{transfers} transfers went into {debits} and {credits}, some were aborted; both streams were scaled")
    changes: list[Row] = feed(spark, debits, credits).collect()
    for change in changes[:4]:
        click.echo(f"  {change.commitPosition:>4} {change.label:<12} {change.account:<10} {change.amount:>6}")
    click.echo("  ...")
    applied: Counter[str] = Counter()
    open_money = most = 0
    order: list[str] = []
    for change in changes:
        if not order or order[-1] != change.label:
            most = max(most, abs(open_money))
            order.append(change.label)
        applied[change.account] += change.amount
        open_money += change.amount
    sizes = Counter(change.label for change in changes)
    numbers = [int(label.split()[1]) for label in order]
    return all(
        [
            check("after each transaction of the feed no money is missing", most == open_money == 0),
            check("the transfers come in the order in which they were committed", numbers == sorted(numbers)),
            check("each has all of its changes", all(sizes[change.label] == change.records for change in changes)),
            check("and the balances are those of the bank", applied == balances),
        ]
    )


@click.command()
@click.option("--transfers", default=60, show_default=True, help="How many transfers.")
def main(transfers: int) -> None:
    """A change-data feed of two streams."""

    def run() -> bool:
        with open_spark("change feed") as spark:
            return show(spark, transfers)

    play(run)


if __name__ == "__main__":
    main()
