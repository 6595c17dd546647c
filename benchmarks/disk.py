"""What records of a transaction take on disk, in the segment, beyond what native ones do in a topic.

Uncompressed on both sides, as both write by default. What is left of a transaction is its segment: the buffer is
truncated. Native records stand in batches of whatever size the producer's settings make, and each batch has a header,
so the smallest peer is the one compared with.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any, Final

from benchmarks.harness import OURS, Better, Experiment, Measured, Row
from benchmarks.native import DEFAULTS, LARGE_BATCHES, NativeProducer
from benchmarks.site import Site, records, stable_end, wait_readable, where_merged
from rollbridge.kafka.metadata import Cluster
from rollbridge.kafka.offsets import leader_bytes
from rollbridge.stream.names import Partition

NATIVES: Final[Mapping[str, Mapping[str, Any]]] = {
    "native, defaults": DEFAULTS,
    "native, large batches": LARGE_BATCHES,
}
_PATIENCE_S: Final = 60.0
_numbers = itertools.count()


def experiment(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """One million records of 100 bytes in one transaction (a tenth of that if ``quick``)."""
    count = 100_000 if quick else 1_000_000
    what = f"{count:,} records of 100 bytes in one transaction"
    return Experiment(
        name="disk",
        rounds=rounds,
        warm_ups=0,
        sides={OURS: lambda: _measure(site, count)},
        rows=[
            Row(
                name="disk-beyond",
                title=f"{what}: bytes on disk for each record beyond native's, in the segment",
                metric="beyond",
                unit="bytes",
                better=Better.LESS,
                bar=4.0,
            ),
            Row(
                name="disk-small-beyond",
                title=f"the same, of {count // 10:,} records in transactions of 10, against native ones",
                metric="small_beyond",
                unit="bytes",
                better=Better.LESS,
            ),
            Row(
                name="disk",
                title=f"{what}: bytes on disk for each record, in the segment",
                metric="bytes",
                unit="bytes",
                better=Better.LESS,
            ),
        ],
    )


def _measure(site: Site, count: int) -> Measured:
    ours = _ours(site, count)
    natives = [_native(site, count, settings) for settings in NATIVES.values()]
    small = count // 10
    return {
        "bytes": ours,
        "beyond": ours - min(natives),
        "small_beyond": _ours_small(site, small) - _native_small(site, small),
    }


def _ours(site: Site, count: int) -> float:
    """Bytes a record of one large transaction."""
    stream = site.make_stream(f"disk-{next(_numbers)}")
    [segment] = site.segment_topics(stream)
    with closing(site.reader()) as reader:
        base = stable_end(reader, segment)
        with site.bridge.transaction(stream) as transaction:
            transaction.write_all(stream, records(count, b"last"))
        topic, start = where_merged(site, stream, base)
        wait_readable(reader, topic, start, count, b"last")
    return settled_bytes(site, (topic, 0)) / count


def _ours_small(site: Site, count: int) -> float:
    """The same of many small ones, as many at once as a queue of 512 takes."""
    stream = site.make_stream(f"disk-{next(_numbers)}")
    [segment] = site.segment_topics(stream)
    pairs = list(records(10, b"ten"))
    answers = []
    for _ in range(count // 10):
        transaction = site.bridge.begin(stream)
        transaction.write_all(stream, pairs)
        answers.append(transaction.commit_async())
        if len(answers) >= 512:
            answers.pop(0).result(_PATIENCE_S)
    for answer in answers:
        answer.result(_PATIENCE_S)
    return settled_bytes(site, (segment, 0)) / count


def _native(site: Site, count: int, settings: Mapping[str, Any]) -> float:
    topic = site.make_topic(f"disk-{next(_numbers)}")
    producer = NativeProducer(site.bootstrap_servers, settings)
    producer.begin()
    producer.write(topic, records(count, b"last"))
    producer.flush()
    producer.commit()
    producer.close()
    return settled_bytes(site, (topic, 0)) / count


def _native_small(site: Site, count: int) -> float:
    topic = site.make_topic(f"disk-{next(_numbers)}")
    producer = NativeProducer(site.bootstrap_servers, DEFAULTS)
    pairs = list(records(10, b"ten"))
    for _ in range(count // 10):
        producer.begin()
        producer.write(topic, pairs)
        producer.commit()
    producer.close()
    return settled_bytes(site, (topic, 0)) / count


def settled_bytes(site: Site, partition: Partition) -> int:
    """Bytes of a partition's log files, once they do not grow any more: markers come a moment later."""
    with Cluster(site.bootstrap_servers, client_id="benchmark") as cluster:
        known, since = -1, time.monotonic()
        while time.monotonic() < since + 0.5:
            found = leader_bytes(cluster, [partition])[partition]
            if found != known:
                known, since = found, time.monotonic()
            time.sleep(0.05)
        return known
