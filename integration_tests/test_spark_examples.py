"""The examples on Spark, as whoever has typed ``make up`` runs them, on fewer flights and in the tests' own JVM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from integration_tests.clients import Site
from spark_examples.demo import spark_backfill, spark_change_feed, spark_flights, spark_pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 6_000


@pytest.fixture(autouse=True)
def environment(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in site.environment().items():
        monkeypatch.setenv(name, value)


def test_a_backfill_is_one_transaction_beside_live_traffic(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    assert spark_backfill.show(spark, ROWS), capsys.readouterr().out
    assert capsys.readouterr().out.count("  ok: ") == 2


def test_flights_are_there_once_although_the_driver_is_killed(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    assert spark_flights.show(spark, ROWS, files=12), capsys.readouterr().out
    assert capsys.readouterr().out.count("  ok: ") == 3


def test_consume_transform_produce_is_exactly_once_across_scales(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    assert spark_pipeline.show(spark, 6), capsys.readouterr().out
    assert capsys.readouterr().out.count("  ok: ") == 2


def test_a_change_feed_has_every_transaction_whole_and_in_the_order_of_commits(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    assert spark_change_feed.show(spark, 25), capsys.readouterr().out
    assert capsys.readouterr().out.count("  ok: ") == 4
