"""Segments that nobody leads, or that have too few replicas: what needs them waits, and all others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import rollbridge
from bridge.tests.refusals import raises_code
from integration_tests.backends.containers import ContainerCluster
from integration_tests.containers.partitions import in_sync, partitions_of
from integration_tests.patience import eventually
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import StreamName

pytestmark = [pytest.mark.containers, pytest.mark.long]

TRIES = 30
"""Kafka chooses where topics are; the broker of one of a stream's segments must not be that of its buffer."""
HALVES = [(0.0, 0.5), (0.5, 1.0)]
COMMITS = 5
COMMIT_S = 60.0
"""Far longer than one takes, and far shorter than the wait of a seal without a bound."""


@dataclass
class Alone:
    """A stream whose topics have one replica each, and an open transaction that needs a rolling commit."""

    name: str
    transaction: rollbridge.Transaction
    broker: str
    """It leads the lowest active segment, and not the buffer."""


@pytest.fixture
def root(ensemble: ContainerCluster, unique_name: Callable[[str], str], tmp_path: Path) -> Iterator[str]:
    """Where there is a coordinator."""
    root = f"/{unique_name('leaderless')}"
    with ensemble.coordinator(root, "one", tmp_path, {}):
        yield root


@pytest.fixture
def client(ensemble: ContainerCluster, root: str) -> Iterator[rollbridge.Bridge]:
    with rollbridge.connect(ensemble.bootstrap_servers, zookeeper=ensemble.zookeeper, zookeeper_root=root) as connected:
        yield connected


innocent = client
"""A connection of its own."""


def leader_of(ensemble: ContainerCluster, topic: str) -> str:
    return ensemble.brokers[partitions_of(ensemble, topic)[0].leader - 1]


@pytest.fixture
def alone(ensemble: ContainerCluster, root: str, client: rollbridge.Bridge, unique_name: Callable[[str], str]) -> Alone:
    scope = unique_name("scope")
    client.admin.create_stream(f"{scope}/other")
    with ZooKeeperSession(ensemble.zookeeper, root=root) as session:
        metadata = Metadata(session)
        for number in range(TRIES):
            name = f"{scope}/alone-{number}"
            client.admin.create_stream(name, replication_factor=1)
            transaction = client.begin(name)
            transaction.write(name, key=b"k", value=b"old")
            transaction.flush()
            client.admin.scale(name, seal=[0], ranges=HALVES)
            stream = StreamName.parse(name)
            buffer = leader_of(ensemble, stream.buffer_topic())
            history = metadata.history(stream)
            assert history is not None
            # That of the segment which the test wants to seal as well; the other's may be another broker.
            lowest = min(history.active.segments, key=lambda item: item.range.low)
            broker = leader_of(ensemble, stream.segment_topic(lowest.id))
            if broker != buffer:
                return Alone(name, transaction, broker)
            transaction.abort()
    raise AssertionError(f"the topics of {TRIES} streams are all where their buffers are")


def test_a_rolling_commit_over_a_segment_that_nobody_leads_holds_up_nobody_else(
    ensemble: ContainerCluster, client: rollbridge.Bridge, innocent: rollbridge.Bridge, alone: Alone
) -> None:
    other = alone.name.partition("/")[0] + "/other"
    node = ensemble.node(alone.broker)
    node.kill()
    try:
        future = alone.transaction.commit_async()
        for number in range(COMMITS):  # of another connection: those of one are carried out in their order
            transaction = innocent.begin(other)
            transaction.write(other, key=b"k", value=b"%d" % number)
            transaction.commit(timeout=COMMIT_S)
        with raises_code("stream-busy", match=r"the leader of topic .*alone.*, which cannot be reached"):
            client.admin.scale(alone.name, seal=[1], ranges=[(0.0, 0.25), (0.25, 0.5)])
        assert not future.done()
    finally:
        node.restart()
    future.result(180)
    eventually(lambda: in_sync(ensemble, StreamName.parse(other).buffer_topic()), "the broker has caught up")
    with client.reader(alone.name, follow=False) as reader:
        assert [record.value for record in reader] == [b"old"]
