"""``rollbridge verify`` of a stream, beside a confluent-kafka consumer that only reads the same topic.

The records lie in a few large batches for each transaction, as bulk loads write them: of each batch one record is
parsed. The row of small transactions tells what each commit costs: its record on the log is decoded, and its frame's
batch looked at by itself.
"""

from __future__ import annotations

import time
from typing import Final

from benchmarks.harness import OURS, Better, Experiment, Measured, Row
from benchmarks.reading import consumed
from benchmarks.site import Site, records, where_merged
from rollbridge.doctor.verify import verify
from rollbridge.kafka.client import KafkaClient

_BATCH: Final = 5_000
_SMALL: Final = 10
"""Records in each small transaction."""
_CONSUMER: Final = f"consume({_BATCH})"
_SMALL_OURS: Final = "rollbridge, small transactions"


def experiment(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """One million records of 100 bytes in one transaction, and 20,000 transactions of 10 (a tenth if ``quick``)."""
    count, transactions = (100_000, 2_000) if quick else (1_000_000, 20_000)
    stream, many = site.make_stream("verify"), site.make_stream("verify-small")
    with site.bridge.transaction(stream) as txn:
        txn.write_all(stream, records(count, b"last"))
    topic, _ = where_merged(site, stream, 0)
    futures = []
    for _ in range(transactions):
        small = site.bridge.begin(many)
        small.write_all(many, records(_SMALL, b"last"))
        futures.append(small.commit_async())
    for future in futures:
        future.result(300)
    return Experiment(
        name="verify",
        rounds=rounds,
        sides={
            OURS: lambda: _verified(site, stream, count),
            _CONSUMER: consumed(site, topic, count, _BATCH),
            _SMALL_OURS: lambda: _verified(site, many, transactions * _SMALL),
        },
        rows=[
            Row(
                name="verify",
                title=f"`rollbridge verify` of {count:,} records of 100 bytes in one transaction, against a "
                "confluent-kafka consumer that reads them",
                metric="read_per_s",
                unit="records/s",
                better=Better.MORE,
                bar=1.0,
                peers=(_CONSUMER,),
            ),
            Row(
                name="verify-rate",
                title="the same, records verified a second",
                metric="read_per_s",
                unit="records/s",
                better=Better.MORE,
                bar=500_000,
            ),
            Row(
                name="verify-small",
                title=f"the same of {transactions:,} transactions of {_SMALL} records",
                metric="read_per_s",
                unit="records/s",
                better=Better.MORE,
                ours=_SMALL_OURS,
            ),
        ],
    )


def _verified(site: Site, stream: str, count: int) -> Measured:
    config = site.bridge.admin.describe(stream).config
    history = site.bridge.admin.history(stream)
    began = time.perf_counter()
    found = verify(KafkaClient(site.bootstrap_servers), config, history)
    seconds = time.perf_counter() - began
    if found.findings.total or found.tally.matched != count:
        raise RuntimeError(f"{stream} was not verified as it should be: {found.findings.named[:3]}, {found.tally}")
    return {"read_per_s": count / seconds}
