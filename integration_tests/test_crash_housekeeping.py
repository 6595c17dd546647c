"""Coordinators die by SIGKILL inside their housekeeping: snapshots, truncation, what is forgotten, conditional rounds.

One story for all points, each of which a leader of its own meets: nearly all of its time goes into sessions that run
out. Beside it: ``test_crash_points.py``, with the points of commits, rolling commits, scales and takeovers.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import patient_client, read_committed, truncate_all
from integration_tests.coordinators import Relay, until
from rollbridge.buffer.snapshot_topic import SnapshotReader
from rollbridge.errors import OutcomeExpiredError, TransactionRefusedError
from rollbridge.kafka.client import KafkaClient
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.names import StreamName

POINTS = [
    "take_snapshots/CreateTopics:after",
    "take_snapshots/AppendMessages:after",  # segments without the index that names them
    "truncate_buffers/DeleteRecords:after",
    "truncate_stream/DeleteRecords:before",  # what is removed is on record
    "merge_direct/AbortRound:after",  # a condition does not hold
    "forget_expired/AppendMessages:after",
]
BUSY = {
    "CONSTANT_TRANSACTION_BUFFER_SNAPSHOT_SEGMENT_SIZE": "1024",
    "CONSTANT_TRANSACTION_BUFFER_SNAPSHOT_MIN_TIME_IN_MILLIS": "200",
    "CONSTANT_TRANSACTION_META_EXPIRE_CHECK_INTERVAL_IN_SECOND": "1",
    "CONSTANT_TRUNCATE_BUFFERS_MS": "200",
    "CONSTANT_RETENTION_CHECK_MS": "200",
}
ABORTS = 400
"""Their ids fill a segment of a snapshot."""


def test_the_next_leader_goes_on_wherever_housekeeping_was_cut_off(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    scope = unique_name("crash")
    stream = StreamName(scope, "orders")
    name = str(stream)
    with (
        Relay(cluster, f"/{scope}", tmp_path, POINTS, BUSY) as relay,
        patient_client(cluster, f"/{scope}", "teller") as b,
    ):
        topics = KafkaClient(cluster.bootstrap_servers).topics
        b.admin.create_stream(name)
        config = b.admin.describe(name).config
        holder = b.begin(name)
        holder.write(name, key=b"0", value=b"never seen")
        holder.flush()  # and while it is open nothing behind it is truncated, so its neighbours' ids are listed
        aborted = []
        for number in range(ABORTS):
            txn = b.begin(name)
            txn.write(name, key=b"%d" % number, value=b"never seen")
            aborted.append((txn.id, txn.abort_async()))
        for _, ended in aborted:
            ended.result(60)
        until(lambda: _has_sealed(SnapshotReader(KafkaClient.of(b.settings), scope), config))
        holder.abort()
        before, _ = _written(b, name, b"before")
        until(lambda: relay.deaths == 3)

        b.admin.scale(name, seal=[0], ranges=[(0.0, 0.5), (0.5, 1.0)])
        [sealed] = [item for item in b.admin.history(name).segments() if item.epoch == 0]
        _written(b, name, b"after")
        position = truncate_all(b, name)
        assert b.admin.truncate(name, position) == position
        until(lambda: stream.segment_topic(sealed) not in topics.topic_ids([stream.segment_topic(sealed)]))
        assert relay.deaths == 4

        kept, sn = _written(b, name, b"kept")
        _written(b, name, b"if", sn)
        refused = b.begin(name)
        refused.expect(name, key=b"key", sn=sn)
        refused.write(name, key=b"key", value=b"never seen")
        with pytest.raises(TransactionRefusedError):
            refused.commit()
        assert b.outcome(refused.id).aborted
        assert relay.deaths == 5

        brief = b.begin(name, retain=timedelta(milliseconds=100))
        brief.write(name, key=b"key", value=b"brief")
        brief.commit()
        until(lambda: relay.deaths == len(POINTS))
        until(lambda: _is_forgotten(b, brief.id))
        for transaction in (before, kept):
            assert b.outcome(transaction).committed
        assert all(b.outcome(transaction).aborted for transaction, _ in aborted[-10:])

        history = b.admin.history(name)
        assert history.removed == {sealed}
        segments = [stream.segment_topic(item) for item in history.segments() if item != sealed]
        seen = [item.value() for item in read_committed(cluster.bootstrap_servers, segments)]
        assert seen == [b"kept", b"if", b"brief"]
        reader = SnapshotReader(KafkaClient.of(b.settings), scope)
        [snapshot] = reader.of(config)
        assert reader.verify(snapshot).faults == []
        assert snapshot.snapshot is not None
        assert snapshot.snapshot.sequence_id > 0, "a segment was sealed"


def _has_sealed(reader: SnapshotReader, config: StreamConfig) -> bool:
    return any(item.snapshot is not None and item.snapshot.sequence_id > 0 for item in reader.of(config))


def _written(
    b: rollbridge.Bridge, stream: str, value: bytes, expected: rollbridge.SN | None = None
) -> tuple[rollbridge.TransactionId, rollbridge.SN]:
    txn = b.begin(stream)
    if expected is not None:
        txn.expect(stream, key=b"key", sn=expected)
    written = txn.write(stream, key=b"key", value=value)
    txn.commit()
    return txn.id, rollbridge.SN(dlsn=written.result(60))


def _is_forgotten(b: rollbridge.Bridge, transaction: rollbridge.TransactionId) -> bool:
    try:
        b.outcome(transaction)
    except OutcomeExpiredError:
        return True
    return False
