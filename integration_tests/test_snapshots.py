"""Snapshots of buffers on real servers: a leader that is killed, damaged records, both formats, the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import patient_client
from integration_tests.command_line import Cli
from integration_tests.coordinators import coordinator
from integration_tests.patience import PATIENCE_S, eventually
from integration_tests.snapshot_tools import OFTEN, SINGLE, abort_many, found, garble, stream
from rollbridge.buffer.snapshot_topic import BufferSnapshot, SnapshotReader
from rollbridge.buffer.snapshots import index_keys
from rollbridge.cli.common import ExitCode
from rollbridge.kafka.client import KafkaClient
from rollbridge.stream.names import StreamName, snapshot_indexes_topic

__all__ = ["stream"]

ABORTS = 300


def faults(b: rollbridge.Bridge, stream: str) -> list[str]:
    """What comparing the snapshot with the logs finds."""
    reader = SnapshotReader(KafkaClient.of(b.settings), StreamName.parse(stream).scope)
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


def _generation(b: rollbridge.Bridge, stream: str) -> int:
    snapshot = found(b, stream).snapshot
    return 0 if snapshot is None else snapshot.generation


@pytest.mark.long
def test_a_leader_goes_on_from_snapshots_in_either_format_and_makes_damaged_ones_anew(
    cluster: AnyCluster, root: str, stream: str, tmp_path: Path
) -> None:
    scope = StreamName.parse(stream).scope
    with patient_client(cluster, root) as b:
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
            until = before.snapshot.generation
            eventually(lambda: _generation(b, stream) > until, "it goes on where the first one ended")
            after = await_snapshot(b, stream, ABORTS, "segmented", 1)
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
    with patient_client(cluster, root) as b:
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


def test_snapshots_on_the_command_line(cluster: AnyCluster, root: str, stream: str, tmp_path: Path) -> None:
    cli = Cli(cluster, root)
    scope = StreamName.parse(stream).scope
    with patient_client(cluster, root) as b, coordinator(cluster, root, "leader", tmp_path, **OFTEN):
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
        rebuilt = await_snapshot(b, stream, ABORTS, "segmented", 1)  # its marker follows the answer
        assert rebuilt.snapshot is not None
        assert (rebuilt.aborted, rebuilt.snapshot.generation) == (ABORTS, 1), "made anew, not gone on with"
        assert cli("snapshot", "verify", stream).code == ExitCode.OK
        assert cli("snapshot", "clear", stream).code == ExitCode.USAGE
        assert cli.json("snapshot", "clear", stream, "--yes") == {"stream": stream, "cleared": True}
        abort_many(b, stream, 1)
        await_snapshot(b, stream, ABORTS + 1, "segmented", 1)
        assert cli("snapshot", "verify", stream).code == ExitCode.OK
        assert cli("snapshot", "describe", f"{scope}/none").code == ExitCode.NOT_FOUND
