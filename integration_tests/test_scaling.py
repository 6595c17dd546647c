"""Streams that follow their load, on real servers with short windows: what splits, merges and waits, and who dies."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site, adopt
from integration_tests.command_line import Cli
from integration_tests.coordinators import controller_epoch, coordinator
from integration_tests.crashing import CRASH_AT
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge import ScalingPolicy
from rollbridge.errors import InvalidRequestError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.topics import TopicSpec
from rollbridge.metadata.requests import WaitCause
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.epochs import EpochCause
from rollbridge.stream.names import GroupName

SHORT = {
    "ROLLBRIDGE_COORDINATOR_SCALING_WINDOW_MS": "600",
    "ROLLBRIDGE_COORDINATOR_SCALING_COOLDOWN_MS": "1000",
    "ROLLBRIDGE_COORDINATOR_SCALING_PER_HOUR_MAX": "100",
    "CONSTANT_SCALING_OPEN_MS": "500",
    "CONSTANT_SCALING_OPEN_MAX": "2",
}
"""Seconds where there are minutes otherwise."""
POLICY = ScalingPolicy(events_per_second=50, max_segments=6)


@pytest.fixture(scope="module")
def site(cluster: AnyCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(cluster, "/scaling", tmp_path_factory.mktemp("coordinators"), **SHORT) as site:
        yield site


class Load:
    """Somebody who writes plainly, as fast as it goes, under many keys or one, until told to end."""

    def __init__(self, b: rollbridge.Bridge, stream: str, keys: int = 500) -> None:
        self._b = b
        self._stream = stream
        self._keys = keys
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self._faults: list[BaseException] = []
        self.written: Counter[bytes] = Counter()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        assert not self._faults, self._faults

    def _run(self) -> None:
        number = 0
        try:
            with self._b.writer(self._stream) as writer:
                while not self._ending.wait(0.02):
                    written = []
                    for _ in range(20):
                        key = b"key-%d" % (number % self._keys)
                        written.append((key, writer.write(key, b"%d" % number)))
                        number += 1
                    for key, future in written:
                        future.result(PATIENCE_S)
                        self.written[key] += 1
        except BaseException as fault:
            self._faults.append(fault)


def read(b: rollbridge.Bridge, stream: str) -> Counter[bytes]:
    """How often each key comes, each key's records in order."""
    found: Counter[bytes] = Counter()
    last: dict[bytes, int] = {}
    with b.reader(stream, follow=False) as reader:
        for record in reader:
            assert record.key is not None
            assert record.value is not None
            number = int(record.value)
            assert last.get(record.key, -1) < number, "out of order"
            last[record.key] = number
            found[record.key] += 1
    return found


def segments(b: rollbridge.Bridge, stream: str) -> int:
    return len(b.admin.history(stream).active.segments)


def test_load_splits_a_stream_and_silence_merges_it(site: Site, client: rollbridge.Bridge, scope: str) -> None:
    """What is written meanwhile is read once, in order, and the history says why each epoch was made."""
    stream = f"{scope}/orders"
    config = client.admin.create_stream(stream, scaling=POLICY)
    assert config.scaling == POLICY
    with Load(client, stream) as load:
        eventually(lambda: segments(client, stream) >= 3, "load splits the stream")
    eventually(lambda: segments(client, stream) == 1, "silence merges it")
    assert read(client, stream) == load.written

    history = client.admin.history(stream)
    scales = [record for record in history.records if record.cause is EpochCause.SCALE]
    assert all(record.reason for record in scales)
    assert all(len(record.segments) <= 6 for record in scales)
    cli = Cli(site.cluster, site.root)
    told = cli("stream", "history", stream).out
    assert "scale, by load" in told
    assert "above" in told
    assert "below half the target of 50" in told
    epochs = cli.json("stream", "history", stream)["epochs"]
    assert [item["reason"] for item in epochs] == [record.reason or None for record in history.records]


def test_load_is_measured_in_bytes_as_well(client: rollbridge.Bridge, scope: str) -> None:
    stream = f"{scope}/orders"
    client.admin.create_stream(stream, scaling=ScalingPolicy(bytes_per_second=1_000, max_segments=2))
    with Load(client, stream) as load:
        eventually(lambda: segments(client, stream) == 2, "load splits the stream")
    assert "bytes/s" in client.admin.history(stream).record(1).reason
    assert read(client, stream) == load.written


def test_one_hot_key_and_open_transactions_are_told(site: Site, client: rollbridge.Bridge, scope: str) -> None:
    stream = f"{scope}/orders"
    client.admin.create_stream(stream)
    cli = Cli(site.cluster, site.root)
    said = cli.json("stream", "update", stream, "--scale-events-per-second", "50", "--max-segments", "4")
    assert said["scaling"]["max_segments"] == 4
    assert client.admin.describe(stream).config.scaling == ScalingPolicy(events_per_second=50, max_segments=4)

    def wait() -> str:
        waits = client.admin.waits(stream)
        return next((row.reasons[0] for row in waits if row.cause is WaitCause.SCALING), "")

    with Load(client, stream, keys=1):
        eventually(lambda: "one key makes 100% of its load" in wait(), "the hot key is told")
        assert "(scaling): " in (said := cli("stream", "describe", stream).out)
        assert "one key makes" in said
        assert segments(client, stream) == 1
    eventually(lambda: not wait(), "nothing is to be done")
    old = [client.begin(stream) for _ in range(3)]
    for transaction in old:
        transaction.write(stream, key=b"old", value=b"0")
        transaction.flush()
    eventually(lambda: len(client.admin.describe(stream).open_transactions) == 3, "they are open for half a second")
    with Load(client, stream):
        eventually(lambda: "3 transactions are open for more than 0.5 s" in wait(), "open transactions are told")
        assert segments(client, stream) == 1
        old[0].abort()
        eventually(lambda: segments(client, stream) > 1, "it is scaled then")
    for transaction in old[1:]:
        transaction.commit()
    assert cli("stream", "update", stream, "--no-scaling").code == 0
    assert client.admin.describe(stream).config.scaling is None
    assert not wait()


def test_nonsense_is_refused_with_all_its_faults(client: rollbridge.Bridge, orders: str) -> None:
    wrong = ScalingPolicy(events_per_second=-1, min_segments=0, max_segments=20_000)
    with pytest.raises(InvalidRequestError, match=r"events_per_second.*min_segments.*max_segments"):
        client.admin.update_stream(orders, scaling=wrong)
    assert client.admin.describe(orders).config.scaling is None


def test_an_adopted_topic_is_not_scaled_by_its_load(
    site: Site, client: rollbridge.Bridge, unique_name: Callable[[str], str]
) -> None:
    topic = unique_name("adopted")
    KafkaClient(site.cluster.bootstrap_servers).topics.create_topics([TopicSpec(name=topic, partitions=2)])
    adopt(client, topic)
    with pytest.raises(InvalidRequestError, match="owner's"):
        client.admin.update_stream(topic, scaling=POLICY)


def test_a_leader_that_dies_in_the_middle_of_a_scale_by_load_has_a_successor_that_finishes_it(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    root, scope = f"/{unique_name('scaling')}", unique_name("scope")
    stream, group = f"{scope}/orders", GroupName(scope)
    with (
        ZooKeeperSession(cluster.zookeeper, root=root) as session,
        coordinator(cluster, root, "first", tmp_path, **SHORT, **{CRASH_AT: "follow_load/Seal:after"}) as first,
        rollbridge.connect(cluster.bootstrap_servers, zookeeper=cluster.zookeeper, zookeeper_root=root) as b,
    ):
        b.admin.create_stream(stream, scaling=POLICY)
        with ExitStack() as second:
            with Load(b, stream) as load:
                first.wait(PATIENCE_S)
                terms = controller_epoch(session, group)
                assert segments(b, stream) == 1, "it died before the epoch was published"
                second.enter_context(coordinator(cluster, root, "second", tmp_path, **SHORT))
                eventually(lambda: controller_epoch(session, group) > terms, "another leads")
                eventually(lambda: segments(b, stream) > 1, "it finishes the scale")
            assert "above" in b.admin.history(stream).record(1).reason, "the reason outlives the leader that had it"
            assert read(b, stream) == load.written
