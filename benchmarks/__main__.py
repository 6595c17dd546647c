"""``python -m benchmarks``: measure, print the table, store it, and fail if a bar is missed."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final

import click
from rich.console import Console

from benchmarks import (
    adopted,
    bulk,
    client_memory,
    client_names,
    conditional,
    dead_broker,
    disk,
    failover,
    gateway,
    groups,
    imports,
    jetstream,
    large,
    late_commits,
    machine,
    memory,
    outcomes,
    plain,
    previews,
    reader,
    reading,
    recovery,
    report,
    small,
    spark_sink,
    spark_source,
    standby,
    verify,
)
from benchmarks.harness import Experiment, Result, run
from benchmarks.site import Site, open_site
from rollbridge.errors import LocalEnvironmentError, RollbridgeError

MISSED: Final = 1

Make = Callable[[Site, int | None, bool], Experiment]
"""Takes the site, the number of rounds if one is asked for, and whether to be quick."""

# The first ones also warm the broker up: a Java server that has just been started spends half of its time compiling.
EXPERIMENTS: Final[Mapping[str, Make]] = {
    "throughput": lambda site, rounds, quick: small.throughput(site, rounds=rounds or (2 if quick else 7), quick=quick),
    "latency": lambda site, rounds, quick: small.latency(site, rounds=rounds or (2 if quick else 9), quick=quick),
    "bulk": lambda site, rounds, quick: bulk.experiment(site, rounds=rounds or (2 if quick else 7), quick=quick),
    "disk": lambda site, rounds, quick: disk.experiment(site, rounds=rounds or (1 if quick else 3), quick=quick),
    "groups": lambda site, rounds, quick: groups.experiment(site, rounds=rounds or (1 if quick else 7), quick=quick),
    "reader": lambda site, rounds, quick: reader.experiment(site, rounds=rounds or (1 if quick else 3), quick=quick),
    "reading": lambda site, rounds, quick: reading.experiment(site, rounds=rounds or (2 if quick else 7), quick=quick),
    "verify": lambda site, rounds, quick: verify.experiment(site, rounds=rounds or (2 if quick else 7), quick=quick),
    "previews": lambda site, rounds, quick: previews.experiment(
        site, rounds=rounds or (3 if quick else 15), quick=quick
    ),
    "conditional": lambda site, rounds, quick: conditional.experiment(
        site, rounds=rounds or (2 if quick else 7), quick=quick
    ),
    "jetstream": lambda site, rounds, quick: jetstream.experiment(
        site, rounds=rounds or (2 if quick else 7), quick=quick
    ),
    "plain": lambda site, rounds, quick: plain.experiment(site, rounds=rounds or (2 if quick else 7), quick=quick),
    "pause": lambda site, rounds, quick: plain.pause(site, rounds=rounds or (1 if quick else 5)),
    "late-commits": lambda site, rounds, quick: late_commits.experiment(site, rounds=rounds or (2 if quick else 7)),
    "outcomes": lambda site, rounds, quick: outcomes.experiment(
        site, rounds=rounds or (2 if quick else 9), quick=quick
    ),
    "spark-batch-1": lambda site, rounds, quick: spark_source.batch(
        site, 1, rounds=rounds or (1 if quick else 5), quick=quick
    ),
    "spark-batch-4": lambda site, rounds, quick: spark_source.batch(
        site, 4, rounds=rounds or (1 if quick else 5), quick=quick
    ),
    "spark-streaming": lambda site, rounds, quick: spark_source.streaming(
        site, rounds=rounds or (1 if quick else 5), quick=quick
    ),
    "spark-sink-1": lambda site, rounds, quick: spark_sink.batch(
        site, 1, rounds=rounds or (1 if quick else 7), quick=quick
    ),
    "spark-sink-4": lambda site, rounds, quick: spark_sink.batch(
        site, 4, rounds=rounds or (1 if quick else 5), quick=quick
    ),
    "spark-micro-batches": lambda site, rounds, quick: spark_sink.micro_batches(
        site, rounds=rounds or (1 if quick else 5), quick=quick
    ),
    "gateway": lambda site, rounds, quick: gateway.throughput(site, rounds=rounds or (1 if quick else 5), quick=quick),
    "gateway-requests": lambda site, rounds, quick: gateway.requests(
        site, rounds=rounds or (1 if quick else 5), quick=quick
    ),
    "gateway-latency": lambda site, rounds, quick: gateway.latency(
        site, rounds=rounds or (1 if quick else 5), quick=quick
    ),
    "gateway-fetches": lambda site, rounds, quick: gateway.fetching(
        site, rounds=rounds or (1 if quick else 5), quick=quick
    ),
    "gateway-takeover": lambda site, rounds, quick: gateway.takeover(site, rounds=rounds or (1 if quick else 5)),
    "gateway-dead-job": lambda site, _rounds, quick: gateway.dead_job(site, rounds=1, quick=quick),
    "adopted-bulk": lambda site, rounds, quick: adopted.bulk(site, rounds=rounds or (2 if quick else 7), quick=quick),
    "adopted-small": lambda site, rounds, quick: adopted.small(site, rounds=rounds or (2 if quick else 7), quick=quick),
    "adopted-conditional": lambda site, rounds, quick: adopted.conditional(
        site, rounds=rounds or (2 if quick else 7), quick=quick
    ),
    "adopted-natives": lambda site, rounds, quick: adopted.natives(
        site, rounds=rounds or (2 if quick else 7), quick=quick
    ),
    "adopted-spark": lambda site, rounds, quick: adopted.spark(site, rounds=rounds or (1 if quick else 5), quick=quick),
    "adoption": lambda site, rounds, quick: adopted.adoption(site, rounds=rounds or (1 if quick else 5), quick=quick),
    "recovery": lambda site, rounds, quick: recovery.experiment(
        site, rounds=rounds or (1 if quick else 3), quick=quick
    ),
    "recovery-many": lambda site, _rounds, quick: recovery.many(site, quick=quick),
    "snapshot-growth": lambda _site, _rounds, quick: recovery.growth(quick=quick),
    "standby": lambda site, rounds, quick: standby.experiment(site, rounds=rounds or (1 if quick else 3), quick=quick),
    "failover": lambda site, rounds, quick: failover.experiment(site, rounds=rounds or (1 if quick else 5)),
    "large": lambda site, rounds, quick: large.experiment(site, rounds=rounds or (1 if quick else 3), quick=quick),
    "dead-broker": lambda _site, rounds, quick: dead_broker.experiment(rounds=rounds or 1, quick=quick),
    "imports": lambda _site, rounds, quick: imports.experiment(rounds=rounds or (1 if quick else 5)),
    "client-names": lambda site, rounds, quick: client_names.experiment(site, rounds=rounds or 1, quick=quick),
    "client-memory": lambda site, rounds, quick: client_memory.experiment(site, rounds=rounds or 1, quick=quick),
    "memory": lambda site, _rounds, quick: memory.experiment(site, quick=quick),
}


@click.command(name="benchmarks")
@click.option("--only", multiple=True, type=click.Choice(list(EXPERIMENTS)), help="Only this one; may be repeated.")
@click.option("--rounds", type=click.IntRange(1), help="Measure each side so many times.")
@click.option("--quick", is_flag=True, help="Small and few, to see that it works; the figures mean little.")
@click.option("--publish", is_flag=True, help="Write the results, or with --only these rows, into docs/benchmarks.md.")
def main(only: tuple[str, ...], rounds: int | None, quick: bool, publish: bool) -> None:
    """Compare rollbridge with native Kafka transactions on a broker started for it.

    Exit code 0 if every bar is reached, 1 if one is missed or could not be measured, others for errors.
    """
    if publish and quick:
        raise click.UsageError("--publish needs a real run: not --quick")
    logging.basicConfig(level=logging.WARNING)
    console = Console()
    results: list[Result] = []
    failed: list[str] = []
    try:
        with open_site() as site:
            before = machine.Busy.now(site.cluster.home)
            for name, make in EXPERIMENTS.items():
                if only and name not in only:
                    continue
                try:
                    experiment = make(site, rounds, quick)
                except LocalEnvironmentError as lack:
                    console.print(f"{name}: skipped, {lack}")
                    continue
                try:
                    results += run(experiment, lambda line: console.print(line, style="dim"))
                except TimeoutError as fault:  # what the others have measured is kept
                    console.print(f"{name}: failed, {fault}")
                    failed.append(name)
            others = machine.Busy.now(site.cluster.home).share_of_others(before)
    except RollbridgeError as fault:
        click.echo(f"benchmarks: {fault}", err=True)
        sys.exit(fault.exit_code)
    facts = {"CPU time used by other processes during the run": f"{others:.0%}"}
    data = report.as_json(results, machine.describe(), facts)
    path = report.RESULTS / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    report.store(data, path)
    if publish and only:
        report.publish_again(results, data)
    elif publish:
        report.publish(results, data)
    report.show(results, Console(width=None if console.is_terminal else 160))
    console.print(f"{facts} - stored in {os.path.relpath(path)}", style="dim")
    if failed or any(result.reached is False for result in results):
        sys.exit(MISSED)


if __name__ == "__main__":
    main()
