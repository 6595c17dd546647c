"""What a stream leaves behind on real servers does not grow with the number of its commits, if it has a retention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import patient_client
from integration_tests.coordinators import Relay, until
from rollbridge.kafka.client import KafkaClient
from rollbridge.metadata import paths
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.epochs import check_chain
from rollbridge.stream.names import GroupName, StreamName, is_segment_topic, parse_segment_topic

SETTINGS = {
    "ROLLBRIDGE_COORDINATOR_MERGE_BESIDE_BYTES": "10000",
    "CONSTANT_TRUNCATE_BUFFERS_MS": "100",
    "CONSTANT_RETENTION_CHECK_MS": "100",
    "CONSTANT_BOOKKEEPING_MS": "100",
    "CONSTANT_EPOCHS_KEEP_MS": "500",
}
ROUNDS = 4
COMMITS = 8
"""Large commits in one round; each is a rolling commit, which makes two epochs and two topics."""


def test_large_commits_leave_as_many_topics_and_nodes_however_many_there_were(
    cluster: AnyCluster, scope: str, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    root, stream = f"/{unique_name('flat')}", f"{scope}/orders"
    topics = KafkaClient(cluster.bootstrap_servers).topics
    with (
        Relay(cluster, root, tmp_path, environment=SETTINGS),
        patient_client(cluster, root) as b,
        ZooKeeperSession(cluster.zookeeper, root=root) as session,
    ):
        b.admin.create_stream(stream, segments=2, retention_time=timedelta(seconds=1))

        def is_flat() -> bool:
            """Tell whether what is left is little: the active segments, what they continue, and nothing half done."""
            segments = [name for name in topics.list_topics() if is_segment_topic(name)]
            mine = [name for name in segments if str(parse_segment_topic(name)[0]) == stream]
            epochs = session.children(paths.epochs(StreamName.parse(stream)))
            return len(mine) <= 6 and len(epochs) <= 6

        sizes = []
        for number in range(ROUNDS * COMMITS):
            with b.transaction(stream) as txn:
                for item in range(20):
                    txn.write(stream, key=b"%d" % item, value=b"%d-%d:" % (number, item) + bytes(1_000))
            if number % COMMITS == COMMITS - 1:
                until(is_flat)
                sizes.append(sum(1 for _ in nodes_below(session, paths.group(GroupName(scope)))))
        history = b.admin.history(stream)
        assert history.active.epoch >= 2 * ROUNDS * COMMITS
        assert check_chain(history.records, history.first) == []
        assert max(sizes) - min(sizes) <= 5, sizes


def nodes_below(session: ZooKeeperSession, path: str) -> Iterator[str]:
    """Every node of a subtree."""
    yield path
    for name in session.children(path):
        yield from nodes_below(session, f"{path}/{name}")
