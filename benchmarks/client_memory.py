"""What a client's memory grows by while it writes one record after the other in one transaction.

Each measurement is a process of its own, whose highest resident memory is looked at: after a tenth of the records, when
the buffer has been as full as it gets and every library is loaded, and after all the others, the commit, and results of
futures. What it has grown by is what records cost that are sent already; the buffer itself is in what it had before.
Where futures are kept they are in a list, which takes 8 bytes of each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Final

import rollbridge
from benchmarks.harness import Better, Experiment, Measure, Measured, Row
from benchmarks.memory import peak_bytes
from benchmarks.site import Site, records

KEPT, DROPPED = "futures kept", "futures not kept"
_WARM: Final = 10
"""The part of the records after which memory is looked at first."""
_PATIENCE_S: Final = 1_800.0


def experiment(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """Ten million records of 100 bytes (half a million if ``quick``)."""
    count = 500_000 if quick else 10_000_000
    what = f"client's memory for {count:,} `write()` of 100 bytes in one transaction, a record beyond the buffer"
    return Experiment(
        name="client-memory",
        rounds=rounds,
        warm_ups=0,
        sides={KEPT: _side(site, count, KEPT), DROPPED: _side(site, count, DROPPED)},
        rows=[
            Row(
                name=f"client-memory-{name}",
                title=f"{what}, {side}",
                metric="grown",
                unit="bytes",
                better=Better.LESS,
                bar=bar,
                ours=side,
            )
            for name, side, bar in (("kept", KEPT, 1024.0), ("dropped", DROPPED, 64.0))
        ],
    )


def _side(site: Site, count: int, side: str) -> Measure:
    def measure() -> Measured:
        stream = site.make_stream(f"client-memory-{side.replace(' ', '-')}-{count}")
        command = [sys.executable, "-m", "benchmarks.client_memory", site.bootstrap_servers, site.cluster.zookeeper]
        command += [stream, str(count), side]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=_PATIENCE_S)
        finally:
            site.bridge.admin.delete_stream(stream)
        before, after = json.loads(done.stdout)
        return {"grown": (after - before) / (count - count // _WARM)}

    return measure


def main(bootstrap_servers: str, zookeeper: str, stream: str, records_all: str, side: str) -> None:
    """Write, and print the highest memory after the first records and at the end."""
    count, before = int(records_all), 0
    with rollbridge.connect(bootstrap_servers, zookeeper=zookeeper) as b:
        kept: list[rollbridge.WriteFuture] = []
        transaction = b.begin(stream)
        write, pairs = transaction.write, records(count, b"last")
        for number, (key, value) in enumerate(pairs):
            future = write(stream, key=key, value=value)
            if side == KEPT:
                kept.append(future)
            if number + 1 == count // _WARM:
                transaction.flush()
                before = peak_bytes(os.getpid())
        transaction.commit(timeout=_PATIENCE_S)
        if side == KEPT:
            last = [kept[place].result(_PATIENCE_S).offset for place in range(0, len(kept), len(kept) // 1000)]
            if last != sorted(set(last)):
                raise AssertionError("futures do not say where their records stand")
        print(json.dumps([before, peak_bytes(os.getpid())]))


if __name__ == "__main__":
    main(*sys.argv[1:])
