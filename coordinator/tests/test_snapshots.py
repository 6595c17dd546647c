"""State from a snapshot and what came after it is state from a replay of everything, on any history, at every point."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given

from coordinator.tests.benches import GROUP, INDEXES, OPERATIONS, SEGMENTS, SINGLE, STREAMS, Bench
from coordinator.tests.makers import text_of, view_of
from rollbridge.buffer.replay import is_ongoing
from rollbridge.buffer.snapshots import decode_snapshot
from rollbridge.commitlog.outcomes import ended_key
from rollbridge.metadata.requests import AdminRequest, RequestKind
from rollbridge.stream.names import StreamName
from rollbridge_coordinator.commit import expiry
from rollbridge_coordinator.core.metric_samples import leader_samples
from rollbridge_coordinator.core.metrics import Op
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.history import takeover as restore

UNLISTED = frozenset({"forgotten-outcomes"})
"""Leaders that take over do not know from elsewhere which transactions have ended."""


def aborts(bench: Bench, count: int) -> None:
    """Transactions that are aborted, one after another."""
    for number in range(count):
        bench.do("aborted", number, STREAMS[0])
        bench.rest()


def led(bench: Bench) -> GroupState:
    assert bench.leader.group is not None
    return bench.leader.group


@given(OPERATIONS)
def test_a_takeover_at_any_point_finds_what_a_full_replay_finds(
    operations: list[tuple[str, int, StreamName]],
) -> None:
    bench = Bench.fresh()
    for operation in operations:
        bench.do(*operation)
        after = Bench(copy.deepcopy(bench.world), bench.clock_ms)
        after.take_over()
        assert not after.world.broken, after.world.broken[:3]


def test_a_begin_frame_that_comes_after_the_abort_opens_nothing() -> None:
    bench = Bench.fresh()
    assert len(_late_begins(bench)) == 0
    assert not bench.world.broken


def test_the_comparison_notices_that_a_late_begin_frame_opens_a_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (restore, expiry):
        monkeypatch.setattr(module, "drop_aborted", lambda _group, _transactions: iter(()))
    bench = Bench.fresh(UNLISTED)
    assert len(_late_begins(bench)) > 0
    assert bench.world.broken


def test_a_begin_frame_that_comes_long_after_the_abort_and_a_takeover_opens_nothing_for_long() -> None:
    bench = Bench.fresh(UNLISTED)
    aborts(bench, 12)
    bench.take_over()
    for number in range(12):
        bench.do("late", number, STREAMS[1])
    bench.rest()
    group = led(bench)
    assert not group.fold.open
    assert not group.records.recorded
    assert group.fold.rejected["late"] == 12
    indexes = group.snapshots.partitions[STREAMS[1].buffer_topic(), 0].aborted.indexes
    assert group.snapshots.metrics.segment_ops[Op.READ] == len(indexes) > 2, "each is read once, when it is needed"


def _late_begins(bench: Bench) -> set[bytes]:
    """Abort so many transactions that segments are sealed; then other BEGIN frames of them arrive. Gives the open."""
    aborts(bench, 12)
    for number in range(12):
        bench.do("late", number, STREAMS[1])
    bench.take_over()
    return set(led(bench).fold.open)


def _current(bench: Bench, topic: str) -> dict[bytes, bytes]:
    """The snapshots in a topic, without what is written down of ended transactions."""
    found = bench.world.latest(topic) if topic in bench.world.topics else {}
    return {key: value for key, value in found.items() if key != ended_key(GROUP)}


def test_segments_are_sealed_and_named_by_sequence_id_and_topic() -> None:
    bench = Bench.fresh()
    aborts(bench, 12)
    keys = sorted(_current(bench, SEGMENTS))
    assert b"0-sales.orders.transaction-buffer-partition-0" in keys
    assert len(keys) >= 4
    newest = max((decode_snapshot(value) for value in _current(bench, INDEXES).values()), key=lambda s: s.generation)
    assert [item.sequence_id for item in newest.indexes] == list(range(len(newest.indexes)))


def test_the_format_changes_without_loss_both_ways() -> None:
    bench = Bench.fresh()
    for number in range(8):
        bench.do("aborted", number, STREAMS[0])
    bench.rest()
    before = bench.world.summary(GROUP.commit_log_topic).aborted
    while bench.world.controller_epoch % 4 != 3:
        bench.take_over()
    bench.take_over()  # this one writes single snapshots
    bench.rest()
    assert not _current(bench, INDEXES)
    assert not _current(bench, SEGMENTS)
    single = [decode_snapshot(value) for value in _current(bench, SINGLE).values()]
    assert {item.partition[0] for item in single} == {stream.buffer_topic() for stream in STREAMS}
    assert all(set(item.aborts) == before and not item.indexes for item in single)
    bench.take_over()
    bench.rest()
    assert not _current(bench, SINGLE)
    assert _current(bench, SEGMENTS)
    assert not bench.world.broken


@pytest.mark.parametrize("topic", [INDEXES, SEGMENTS])
@pytest.mark.parametrize("damage", ["changed", "missing", "foreign"])
def test_what_is_damaged_is_made_anew_from_the_buffer(topic: str, damage: str) -> None:
    bench = Bench.fresh()
    aborts(bench, 12)
    for number in range(12):  # so that the next leader has to look into every segment
        bench.do("late", number, STREAMS[1])
    log = bench.world.topics[topic]
    for offset, (key, value) in log.visible():
        match damage:
            case "changed":
                log.entries[offset].item = (key, value[:-1] + bytes([value[-1] ^ 1]))
            case "missing":
                log.entries[offset].item = None
            case _:
                log.entries[offset].item = (key, b"what somebody else has written")
    bench.take_over()
    assert not led(bench).fold.open
    assert not bench.world.broken
    bench.rest()
    bench.take_over()
    assert not led(bench).snapshots.warnings
    assert not bench.world.broken


def test_the_generation_before_is_used_when_the_newest_is_damaged() -> None:
    bench = Bench.fresh()
    aborts(bench, 3)
    log = bench.world.topics[INDEXES]
    rows = [(offset, key, decode_snapshot(value)) for offset, (key, value) in log.visible()]
    offset, key, newest = max(rows, key=lambda row: (row[2].partition, row[2].generation))
    log.entries[offset].item = (key, b"\1damaged")
    bench.take_over()
    group = led(bench)
    assert len(group.snapshots.warnings) == 1
    known = group.snapshots.partitions[newest.partition]
    assert known.is_restored
    assert known.generation == newest.generation - 1
    assert not bench.world.broken


def test_a_snapshot_of_an_earlier_topic_of_the_same_name_is_not_used() -> None:
    bench = Bench.fresh()
    bench.do("aborted", 0, STREAMS[0])
    bench.rest()
    for path, value in bench.world.nodes.items():
        earlier = bench.world.topics[STREAMS[0].buffer_topic()].id.encode()
        bench.world.nodes[path] = value.replace(earlier, b"id-other")
    bench.world.topics[STREAMS[0].buffer_topic()].id = "id-other"
    bench.take_over()
    group = led(bench)
    assert not group.snapshots.partitions[STREAMS[0].buffer_topic(), 0].is_restored
    assert "another topic" in group.snapshots.warnings[0]
    assert not bench.world.broken


def test_a_deleted_stream_leaves_no_snapshots() -> None:
    bench = Bench.fresh()
    aborts(bench, 6)
    request = AdminRequest(kind=RequestKind.DELETE_STREAM, stream=str(STREAMS[0]), created_ms=0)
    bench.world.request(GROUP, request.to_json())
    bench.rest()
    assert StreamName("sales", "orders").buffer_topic() not in bench.world.topics
    for topic in (INDEXES, SEGMENTS):
        left = _current(bench, topic)
        assert left
        assert not [key for key in left if b"orders" in key]


def test_the_operations_that_are_counted_are_those_that_the_topics_hold() -> None:
    bench = Bench.fresh()
    bench.world.deletes = True
    bench.do("begin", 9, STREAMS[0])
    bench.do("data", 9, STREAMS[0])
    for number in range(24):
        bench.do("aborted", number % 3, STREAMS[0])
        bench.rest()
        if number == 16:
            bench.do("commit", 9, STREAMS[0])
    group = led(bench)
    found: dict[str, Counter[Op]] = {"segment": Counter(), "index": Counter(), "ongoing": Counter()}
    for topic, kind in ((SEGMENTS, "segment"), (INDEXES, "index")):
        for _, (key, value) in bench.world.topics[topic].visible():
            if key == ended_key(GROUP):
                continue
            found["ongoing" if is_ongoing(key) else kind][Op.DEL if value is None else Op.ADD] += 1
    metrics = group.snapshots.metrics
    for kind, counted in (
        ("segment", metrics.segment_ops),
        ("index", metrics.index_ops),
        ("ongoing", metrics.ongoing_ops),
    ):
        assert {op: counted[op] for op in (Op.ADD, Op.DEL)} == {op: found[kind][op] for op in (Op.ADD, Op.DEL)}, kind
    assert min(found["segment"][Op.ADD], found["segment"][Op.DEL], found["index"][Op.ADD]) > 0, found
    assert min(found["ongoing"][Op.ADD], found["ongoing"][Op.DEL]) > 0, found


def test_the_metrics_are_those_of_the_proposal() -> None:
    bench = Bench.fresh()
    aborts(bench, 12)
    bench.take_over()
    bench.rest()
    group = led(bench)
    group.snapshots.metrics.note_entry(1 << 30)
    lines = text_of(leader_samples(group, view_of(group)))
    label = f'group="{group.name}"'
    assert f'rollbridge_txn_tb_snapshot_segment_op_total{{{label},op="add"}} 0.0' in lines
    assert f'rollbridge_txn_tb_snapshot_index_op_total{{{label},op="read"}} 4.0' in lines
    assert f"rollbridge_txn_tb_snapshot_segment_total{{{label}}} {len(_current(bench, SEGMENTS))}.0" in lines
    assert f'rollbridge_txn_tb_snapshot_index_entry_bytes_bucket{{{label},le="16777216.0"}} 0.0' in lines
    assert f'rollbridge_txn_tb_snapshot_index_entry_bytes_bucket{{{label},le="+Inf"}} 1.0' in lines


def test_metrics_of_a_stream_name_its_topic_if_it_is_adopted() -> None:
    group = led(Bench.fresh())
    stream = next(iter(group.streams.values()))
    label = f'group="{group.name}",stream="{stream.config.name}"'
    lines = text_of(leader_samples(group, view_of(group)))
    assert f"rollbridge_stream_topics{{{label}}} {len(stream.history.segments())}.0" in lines
    assert f"rollbridge_stream_epochs{{{label}}} 1.0" in lines
    assert not any(line.startswith("rollbridge_adopted_topic{") for line in lines)
    stream.config = replace(stream.config, topic="shop.orders")
    lines = text_of(leader_samples(group, view_of(group)))
    assert any(line.endswith(f'stream="{stream.config.name}",topic="shop.orders"}} 1.0') for line in lines)
