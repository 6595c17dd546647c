"""What it costs that outcomes are remembered: the same transactions with a coordinator that remembers none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import rollbridge
from benchmarks.harness import Better, Experiment, Row
from benchmarks.site import Site, another_coordinator, records
from benchmarks.small import RECORDS, ours_in_flight, ours_one_at_a_time

ON, OFF = "remembered", "not remembered"
_ROOT: Final = "/forgetful"
_VARIABLE: Final = "ROLLBRIDGE_COORDINATOR_TRANSACTION_META_PERSIST_COUNT"


def experiment(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """Ten records, one transaction at a time and 64 at once, with the preserver and without."""
    count, seconds = (100, 1.0) if quick else (400, 2.0)
    pairs = list(records(RECORDS, b"ten"))
    sides = {ON: site, OFF: site.cleanup.enter_context(_forgetful(site))}
    streams = {name: side.make_stream("outcomes") for name, side in sides.items()}
    what = f"{RECORDS}-record transactions with their outcomes remembered, against not"
    return Experiment(
        name="outcomes",
        rounds=rounds,
        warm_ups=1 if quick else 3,
        sides={
            **{name: ours_one_at_a_time(side, streams[name], pairs, count) for name, side in sides.items()},
            **{
                f"{name}, 64 in flight": ours_in_flight(side, streams[name], pairs, 64, seconds)
                for name, side in sides.items()
            },
        },
        rows=[
            Row(
                name="outcomes",
                title=f"{what}, one at a time",
                metric="per_s",
                unit="transactions/s",
                better=Better.MORE,
                bar=0.9,
                ours=ON,
                peers=(OFF,),
            ),
            Row(
                name="outcomes-in-flight-64",
                title="the same, 64 in flight",
                metric="per_s",
                unit="transactions/s",
                better=Better.MORE,
                ours=f"{ON}, 64 in flight",
                peers=(f"{OFF}, 64 in flight",),
            ),
        ],
    )


@contextmanager
def _forgetful(site: Site) -> Iterator[Site]:
    """The same servers with a coordinator and a client of their own, below another root path."""
    with (
        another_coordinator(site, _ROOT, "forgetful", **{_VARIABLE: "0"}),
        rollbridge.connect(
            site.cluster.bootstrap_servers,
            zookeeper=site.cluster.zookeeper,
            zookeeper_root=_ROOT,
            client_name="benchmark",
        ) as connection,
    ):
        yield replace(site, bridge=connection, scope="forgetful")
