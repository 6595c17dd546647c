"""The largest commit record that is not refused beforehand is taken by a real commit log, and read from it."""

from __future__ import annotations

import pytest

from integration_tests.backends.interface import AnyCluster
from integration_tests.patience import PATIENCE_S
from rollbridge.base.ids import TransactionId
from rollbridge.commitlog.control import CONTROL_RECORD_BYTES_MAX, ControlKind, ControlRecord
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.errors import AppendRefusedError
from rollbridge.kafka.topics import TopicSpec
from rollbridge.stream.names import GroupName
from rollbridge_coordinator.core.frame_reader import control_batches, read_commit_log, read_orders
from rollbridge_coordinator.core.stream_state import commit_log_topic_spec


def batch_of(counter: int, size: int) -> bytes:
    """A batch with a record; what a record of this size consists of is the same to Kafka."""
    order = ((7, 1), counter)
    record = ControlRecord(TransactionId.of(0, counter), ControlKind.COMMIT, "c", 1, 2, 3, "x" * size, order=order)
    (batch,), _ = control_batches([record])
    return batch


def test_a_commit_log_takes_what_is_counted_as_the_largest_record_and_no_more(
    cluster: AnyCluster, topic_prefix: str
) -> None:
    spec = commit_log_topic_spec(GroupName(topic_prefix), -1)
    KafkaClient(cluster.bootstrap_servers).topics.create_topics([TopicSpec(name=spec.name, config=spec.config)])
    spare = CONTROL_RECORD_BYTES_MAX - len(batch_of(1, CONTROL_RECORD_BYTES_MAX - 1_000))
    largest = batch_of(1, CONTROL_RECORD_BYTES_MAX - 1_000 + spare)
    assert len(largest) == CONTROL_RECORD_BYTES_MAX
    with KafkaClient(cluster.bootstrap_servers).appender(topic_prefix) as appender:
        appender.init()
        with pytest.raises(AppendRefusedError, match="MESSAGE_TOO_LARGE"):
            appender.append([(spec.name, batch_of(2, CONTROL_RECORD_BYTES_MAX))])
        appender.abort()
        appender.append([(spec.name, largest)])
        appender.commit()
        appender.init()  # as a leader does that takes over: the marker of what was committed is there then
    summary = read_commit_log(KafkaClient(cluster.bootstrap_servers), spec.name, timeout_s=PATIENCE_S)
    assert list(summary.terminated) == [TransactionId.of(0, 1).bytes]
    assert read_orders(KafkaClient(cluster.bootstrap_servers), spec.name, 10, timeout_s=PATIENCE_S) == {(7, 1): 1}
