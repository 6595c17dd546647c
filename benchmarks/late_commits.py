"""What commits cost that come after a scale: topics and epochs, and how long the answer takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import rollbridge
from benchmarks.harness import OURS, Better, Experiment, Measure, Measured, Row
from benchmarks.site import Site, another_coordinator
from rollbridge.kafka.client import KafkaClient
from rollbridge.stream.keyspace import KeySpace

SEGMENTS: Final = 64
SPLIT: Final = 5
"""The segment that is split, and written to before."""
LATE: Final = 20
APART = "each by itself"
"""The same, where segments never linger."""
_ROOT: Final = "/late"
_VARIABLE: Final = "ROLLBRIDGE_COORDINATOR_LINGER_MS_MAX"


def experiment(site: Site, *, rounds: int) -> Experiment:
    """One late commit of one record, and twenty of them, each after the answer to the one before."""
    alone = site.cleanup.enter_context(_without_lingering(site))
    many = f"{LATE} of them, each after the answer to the one before"
    return Experiment(
        name="late-commits",
        rounds=rounds,
        sides={OURS: _late(site, 1), many: _late(site, LATE), APART: _late(alone, LATE)},
        rows=[
            Row(
                name="late-topics",
                title=f"late commit of one record on {SEGMENTS} segments, one split since: new topics",
                metric="topics",
                unit="topics",
                better=Better.LESS,
                bar=4,
            ),
            Row(
                name="late-ms",
                title="the same, until the answer",
                metric="first_ms",
                unit="ms",
                better=Better.LESS,
                bar=300,
            ),
            Row(
                name="late-many",
                title=f"{many}: epochs",
                metric="epochs",
                unit="epochs",
                better=Better.LESS,
                bar=8,
                ours=many,
                beside=(APART,),
            ),
            Row(
                name="late-many-ms",
                title="the same, until the last answer",
                metric="all_ms",
                unit="ms",
                better=Better.LESS,
                ours=many,
                beside=(APART,),
            ),
        ],
    )


def _late(site: Site, count: int) -> Measure:
    topics, admin = KafkaClient(site.bootstrap_servers).topics, site.bridge.admin

    def measure() -> Measured:
        stream = site.make_stream(f"late-{time.monotonic_ns()}", SEGMENTS)
        held = admin.history(stream).active.segment_numbered(SPLIT).range
        key = next(key for key in (b"%d" % number for number in range(100_000)) if KeySpace().position(key) in held)
        begun = [site.bridge.begin(stream) for _ in range(count)]
        for txn in begun:
            txn.write(stream, key=key, value=b"late")
            txn.flush()
        middle = (held.low + held.high) / 2
        admin.scale(stream, seal=[SPLIT], ranges=[(held.low, middle), (middle, held.high)])
        before, epochs = topics.list_topics(), len(admin.history(stream).records)
        start = time.monotonic()
        begun[0].commit()
        first_ms = (time.monotonic() - start) * 1000
        for txn in begun[1:]:
            txn.commit()
        all_ms = (time.monotonic() - start) * 1000
        return {
            "topics": len(topics.list_topics() - before),
            "epochs": len(admin.history(stream).records) - epochs,
            "first_ms": first_ms,
            "all_ms": all_ms,
        }

    return measure


@contextmanager
def _without_lingering(site: Site) -> Iterator[Site]:
    """The same servers with a coordinator and a client of their own, below another root path."""
    with (
        another_coordinator(site, _ROOT, "hasty", **{_VARIABLE: "0"}),
        rollbridge.connect(
            site.cluster.bootstrap_servers,
            zookeeper=site.cluster.zookeeper,
            zookeeper_root=_ROOT,
            client_name="benchmark",
        ) as connection,
    ):
        yield replace(site, bridge=connection, scope="hasty")
