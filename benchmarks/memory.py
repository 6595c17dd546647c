"""A transaction larger than what the coordinator may hold: its memory must not grow with it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from benchmarks.harness import OURS, Better, Experiment, Measured, Row
from benchmarks.site import Site, records, stable_end, wait_readable, where_merged

GIB: Final = 1024**3
MIB: Final = 1024**2
_VALUE_BYTES: Final = 1000


def experiment(site: Site, *, quick: bool) -> Experiment:
    """2 GiB in one transaction (a quarter if ``quick``)."""
    size = GIB // 2 if quick else 2 * GIB
    return Experiment(
        name="memory",
        rounds=1,
        warm_ups=0,
        sides={OURS: lambda: _measure(site, size)},
        rows=[
            Row(
                name="coordinator-memory",
                title=f"coordinator's peak memory (VmHWM) while {size / GIB:g} GiB are open in one transaction and "
                "committed",
                metric="peak_mib",
                unit="MiB",
                better=Better.LESS,
                bar=512.0,
            ),
            Row(
                name="large-merge",
                title="the same transaction: commit of it, from the request until it can be read",
                metric="merge_s",
                unit="s",
                better=Better.LESS,
            ),
        ],
    )


def _measure(site: Site, size: int) -> Measured:
    stream = site.make_stream("memory")
    [segment] = site.segment_topics(stream)
    count = size // _VALUE_BYTES
    reader = site.reader()
    base = stable_end(reader, segment)
    transaction = site.bridge.begin(stream)
    transaction.write_all(stream, records(count, b"last of many", _VALUE_BYTES))
    transaction.flush()
    start = time.perf_counter()
    transaction.commit(timeout=600)
    wait_readable(reader, *where_merged(site, stream, base), count, b"last of many")
    merge_s = time.perf_counter() - start
    reader.close()
    return {"peak_mib": peak_bytes(site.coordinator.pid) / MIB, "merge_s": merge_s}


def peak_bytes(pid: int) -> int:
    """The most memory that a process has ever had resident."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"no VmHWM of process {pid}")
