"""Snapshots of buffers on real servers: a leader that is killed, damaged records, both formats, the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Producer

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.command_line import Cli
from integration_tests.coordinators import coordinator
from integration_tests.kafka_tools import producer_config
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.cli.common import ExitCode
from rollbridge.config import ConnectionSettings
from rollbridge.kafka.snapshots import BufferSnapshot, SnapshotReader
from rollbridge.model.names import StreamName, snapshot_indexes_topic
from rollbridge.model.snapshots import index_keys

ABORTS = 300
PREFIX = "ROLLBRIDGE_COORDINATOR_TRANSACTION_BUFFER_"
OFTEN = {
    f"{PREFIX}SNAPSHOT_SEGMENT_SIZE": "1024",
    f"{PREFIX}SNAPSHOT_MAX_TRANSACTION_COUNT": "50",
    f"{PREFIX}SNAPSHOT_MIN_TIME_IN_MILLIS": "200",
    f"{PREFIX}SNAPSHOT_REPLAY_MAX": "100",
    # Snapshots are about what stands in the buffers, which these tests therefore keep.
    "ROLLBRIDGE_COORDINATOR_TRUNCATE_BUFFERS_MS": str(24 * 3600 * 1000),
}
SINGLE = {**OFTEN, f"{PREFIX}SEGMENTED_SNAPSHOT_ENABLED": "false"}


@pytest.fixture
def root(unique_name: Callable[[str], str]) -> str:
    """A ZooKeeper root path of this test's own."""
    return f"/{unique_name('snapshots')}"


@pytest.fixture
def stream(unique_name: Callable[[str], str]) -> str:
    """The name of a stream in a scope of its own."""
    return f"{unique_name('snapshots')}/orders"


def connected(cluster: AnyCluster, root: str) -> rollbridge.Bridge:
    options = rollbridge.ClientOptions(admin_timeout_s=60)
    return rollbridge.connect(
        cluster.bootstrap_servers, zookeeper=cluster.zookeeper, zookeeper_root=root, options=options
    )


def abort_many(b: rollbridge.Bridge, stream: str, count: int) -> None:
    """Abort transactions, and return when all of them have ended."""
    for number in range(count):
        txn = b.begin(stream)
        txn.write(stream, key=b"%d" % number, value=b"never seen")
        txn.abort()


def found(b: rollbridge.Bridge, stream: str) -> BufferSnapshot:
    """The snapshot of a stream's only buffer partition."""
    settings: ConnectionSettings = b.settings
    [only] = SnapshotReader(settings.bootstrap_servers, settings.kafka, StreamName.parse(stream).scope).of(
        b.admin.describe(stream).config
    )
    return only


def faults(b: rollbridge.Bridge, stream: str) -> list[str]:
    """What comparing the snapshot with the logs finds."""
    reader = SnapshotReader(b.settings.bootstrap_servers, b.settings.kafka, StreamName.parse(stream).scope)
    [only] = reader.of(b.admin.describe(stream).config)
    return reader.verify(only).faults


def await_snapshot(
    b: rollbridge.Bridge, stream: str, aborted: int, kind: str, fewest_segments: int = 0
) -> BufferSnapshot:
    """Wait until everything that was aborted is in a snapshot of a format."""

    def is_there() -> bool:
        item = found(b, stream)
        return item.format == kind and item.aborted == aborted and len(_segments(item)) >= fewest_segments

    eventually(is_there, f"a {kind} snapshot with {aborted} aborted transactions")
    return found(b, stream)


def _segments(item: BufferSnapshot) -> tuple[int, ...]:
    return () if item.snapshot is None else tuple(index.sequence_id for index in item.snapshot.indexes)


@pytest.mark.long
def test_a_leader_goes_on_from_snapshots_in_either_format_and_makes_damaged_ones_anew(
    cluster: AnyCluster, root: str, stream: str, tmp_path: Path
) -> None:
    scope = StreamName.parse(stream).scope
    with connected(cluster, root) as b:
        with coordinator(cluster, root, "first", tmp_path, **OFTEN) as first:
            b.admin.create_stream(stream)
            long = b.begin(stream)
            written = long.write(stream, key=b"long", value=b"long")
            long.flush()
            abort_many(b, stream, ABORTS)
            before = await_snapshot(b, stream, ABORTS, "segmented", 1)
            assert before.snapshot is not None
            assert before.snapshot.max_read_position == 0, "the open transaction began first"
            assert faults(b, stream) == []
            assert before.ongoing is not None
            assert [item.id for item in before.ongoing.transactions] == [long.id.bytes]
            assert before.tail < ABORTS, "it is written down, so that not everything since is read again"
            first.kill()
            first.wait(PATIENCE_S)
        with coordinator(cluster, root, "second", tmp_path, **OFTEN):
            more = long.write(stream, key=b"long", value=b"longer")
            long.commit()
            assert (written.result(120).offset, more.result(120).offset) == (0, 1)
            after = await_snapshot(b, stream, ABORTS, "segmented", 1)
            assert after.snapshot is not None
            assert after.snapshot.generation > before.snapshot.generation, "it went on where the first one ended"
            assert _segments(after) == _segments(before)
            eventually(lambda: found(b, stream).tail == 0, "the end of the long transaction is in the snapshot")
            assert found(b, stream).ongoing is None
        garble(cluster, snapshot_indexes_topic(scope), index_keys((StreamName.parse(stream).buffer_topic(), 0)))
        with coordinator(cluster, root, "third", tmp_path, **OFTEN):
            await_snapshot(b, stream, ABORTS, "segmented", 1)
            log = (tmp_path / "third.log").read_text()
            assert "WARNING" in log
            assert "is not usable" in log
            assert faults(b, stream) == []


@pytest.mark.long
def test_the_format_is_changed_there_and_back_without_loss(
    cluster: AnyCluster, root: str, stream: str, tmp_path: Path
) -> None:
    with connected(cluster, root) as b:
        with coordinator(cluster, root, "segmented", tmp_path, **OFTEN):
            b.admin.create_stream(stream)
            abort_many(b, stream, ABORTS)
            await_snapshot(b, stream, ABORTS, "segmented", 1)
        with coordinator(cluster, root, "single", tmp_path, **SINGLE):
            abort_many(b, stream, 1)
            assert _segments(await_snapshot(b, stream, ABORTS + 1, "single")) == ()
            assert faults(b, stream) == []
        with coordinator(cluster, root, "again", tmp_path, **OFTEN):
            await_snapshot(b, stream, ABORTS + 1, "segmented", 1)
            assert faults(b, stream) == []


def garble(cluster: AnyCluster, topic: str, keys: tuple[bytes, ...]) -> None:
    """Write what is no snapshot under some keys, as nobody should."""
    lost: list[object] = []
    producer = Producer(producer_config(cluster.bootstrap_servers))
    for key in keys:
        producer.produce(
            topic, key=key, value=b"\1garbage", on_delivery=lambda error, _: lost.append(error) if error else None
        )
    assert producer.flush(120) == 0
    assert not lost


@pytest.mark.long
def test_snapshots_on_the_command_line(cluster: AnyCluster, root: str, stream: str, tmp_path: Path) -> None:
    cli = Cli(cluster, root)
    scope = StreamName.parse(stream).scope
    with connected(cluster, root) as b, coordinator(cluster, root, "leader", tmp_path, **OFTEN):
        b.admin.create_stream(stream)
        assert [item["format"] for item in cli.json("snapshot", "list", "--scope", scope)] == ["none"]
        missing = cli("snapshot", "verify", stream)
        assert (missing.code, "there is no snapshot" in missing.out) == (ExitCode.UNEXPECTED, True)
        abort_many(b, stream, ABORTS)
        before = await_snapshot(b, stream, ABORTS, "segmented", 1).snapshot
        assert before is not None
        [listed] = cli.json("snapshot", "list", "--scope", scope)
        assert (listed["aborted"], listed["faults"]) == (ABORTS, [])
        [described] = cli.json("snapshot", "describe", stream)
        assert described["segments"][0]["sequence_id"] == 0
        assert "SEGMENT" in cli("snapshot", "describe", stream).out
        assert [item["checked"] for item in cli.json("snapshot", "verify", stream)] == [ABORTS]
        assert cli.json("snapshot", "rebuild", stream) == {"stream": stream, "rebuilt": True}
        rebuilt = found(b, stream)
        assert rebuilt.snapshot is not None
        assert (rebuilt.aborted, rebuilt.snapshot.generation) == (ABORTS, 1), "made anew, not gone on with"
        assert cli("snapshot", "verify", stream).code == ExitCode.OK
        assert cli("snapshot", "clear", stream).code == ExitCode.USAGE
        assert cli.json("snapshot", "clear", stream, "--yes") == {"stream": stream, "cleared": True}
        abort_many(b, stream, 1)
        await_snapshot(b, stream, ABORTS + 1, "segmented", 1)
        assert cli("snapshot", "verify", stream).code == ExitCode.OK
        assert cli("snapshot", "describe", f"{scope}/none").code == ExitCode.NOT_FOUND
