"""Merges beside the line against a real broker: when one is lost, when it is refused, and when its place is free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from integration_tests.adapter_tools import batch_of, read_values
from integration_tests.backends.interface import AnyCluster
from integration_tests.patience import eventually
from rollbridge.buffer.frames import PieceKey
from rollbridge.buffer.state import FrameRef
from rollbridge.config import ConnectionSettings
from rollbridge.kafka.appender import AppenderState, TransactionalAppender
from rollbridge.kafka.client import KafkaClient
from rollbridge_coordinator.config import CoordinatorSettings
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.interpreter import refusal
from rollbridge_coordinator.core.merge_pool import TOO_SLOW, MergePool

KEY = "merge"


class Place:
    """A workshop with one place."""

    def __init__(self, cluster: AnyCluster, appender: TransactionalAppender, topic: str, timeout_s: float) -> None:
        servers, zookeeper = cluster.bootstrap_servers, cluster.zookeeper
        settings = CoordinatorSettings(
            connection=ConnectionSettings(bootstrap_servers=servers, zookeeper=zookeeper), merge_timeout_s=timeout_s
        )
        self.appender, self.topic = appender, topic
        self.merge_pool = MergePool(settings, KafkaClient(servers), [appender], refusal)

    def start(self, value: bytes) -> None:
        """Begin to merge a record."""
        batch = batch_of([value])
        frame = FrameRef(("buffer", 0), 0, PieceKey(0, 0, 0), 1, 1, len(batch), batch)
        self.merge_pool.start(fx.Prepare(KEY, [fx.TopicCreation(self.topic)], [((self.topic, 0), frame)]))

    def progress(self) -> fx.PreparationProgress:
        """How far the merge is."""
        return self.merge_pool.look()[KEY]

    def give_up(self) -> None:
        """Give the merge up, and wait for its end."""
        self.merge_pool.give_up(KEY)
        eventually(lambda: KEY not in self.merge_pool.look(), "its place is free")


@contextmanager
def place(cluster: AnyCluster, topic: str, *, timeout_s: float) -> Iterator[Place]:
    """Make one; the native transaction itself has time, whatever the workshop is told."""
    appender = KafkaClient(cluster.bootstrap_servers).appender(topic)
    appender.init()
    found = Place(cluster, appender, topic, timeout_s)
    try:
        yield found
    finally:
        found.merge_pool.close()


@pytest.mark.parametrize("timeout_s", [4.0, 16.0])  # the margin of both was all the time that there is, or all but 1 s
def test_a_merge_waits_for_its_leader_until_its_native_transaction_is_about_to_time_out(
    cluster: AnyCluster, topic_prefix: str, timeout_s: float
) -> None:
    with place(cluster, topic_prefix, timeout_s=timeout_s) as found:
        found.start(b"late")
        eventually(lambda: found.progress().offsets == [0], "everything is appended, and waits for the leader")
        eventually(lambda: found.progress().lost, "it is not taken up any more")
        assert found.progress() == fx.PreparationProgress(None, None, "its native transaction was about to time out")
        found.give_up()
        assert found.appender.state is AppenderState.READY

        found.start(b"in time")
        eventually(lambda: found.progress().offsets is not None, "the place is used again")
        found.merge_pool.take_up(KEY).commit()
        assert read_values(cluster.bootstrap_servers, topic_prefix) == [b"in time"]
        found.merge_pool.give_back(found.appender)


def test_a_merge_that_takes_all_the_time_that_it_has_is_refused_and_not_only_lost(
    cluster: AnyCluster, topic_prefix: str
) -> None:
    with place(cluster, topic_prefix, timeout_s=1e-6) as found:
        found.start(b"slow")
        eventually(lambda: found.progress() != fx.PreparationProgress(), "it has ended")
        refused = found.progress().refused
        assert refused is not None
        assert (refused.code, refused.topic, found.progress().offsets) == (TOO_SLOW, None, None)
        assert "a native transaction is open for 1e-06 s at most" in refused.reason
        found.give_up()
        assert found.appender.state is AppenderState.READY
