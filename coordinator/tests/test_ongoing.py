"""When open transactions are written down: often enough for a short takeover, and no oftener than it pays."""

from __future__ import annotations

import pytest

from coordinator.tests.benches import INDEXES, STREAMS, Bench
from coordinator.tests.sim_actors import settings_of
from rollbridge.buffer.replay import TRANSACTION_BYTES, decode_ongoing, is_ongoing, ongoing_keys
from rollbridge_coordinator.core import state as ongoing
from rollbridge_coordinator.core.metrics import Op
from rollbridge_coordinator.history.snapshot_plan import PartitionSnapshots

LONG = 9
PARTITION = (STREAMS[0].buffer_topic(), 0)
REPLAY_MAX = settings_of(1).snapshots.transaction_buffer_snapshot_replay_max


def known(bench: Bench) -> PartitionSnapshots:
    assert bench.leader.group is not None
    return bench.leader.group.snapshots.partitions[PARTITION]


def written(bench: Bench) -> int:
    assert bench.leader.group is not None
    return bench.leader.group.snapshots.metrics.ongoing_ops[Op.ADD]


def busy(bench: Bench, transactions: int) -> None:
    """Let transactions be aborted, one after the other."""
    for number in range(transactions):
        bench.do("aborted", number % 3, STREAMS[0])
        bench.rest()


def test_a_takeover_reads_little_however_long_a_transaction_is_open() -> None:
    bench = Bench.fresh()
    bench.do("begin", LONG, STREAMS[0])
    bench.do("late", LONG, STREAMS[0])
    for _ in range(3):
        bench.do("data", LONG, STREAMS[0])
    busy(bench, 20)
    end = len(bench.world.topics[PARTITION[0]].entries)
    assert known(bench).needed.position == 0, "where the open transaction began"
    spared = known(bench).spared
    assert spared is not None
    assert end - spared.position <= 2 * REPLAY_MAX + 2
    assert len(bench.world.topics[bench.leader.group.commit_log].entries) - spared.log_position < end  # type: ignore[union-attr]
    bench.take_over()
    assert not bench.world.broken
    assert known(bench).spared == spared
    bench.do("commit", LONG, STREAMS[0])
    busy(bench, 1)
    assert known(bench).spared is None
    assert not any(is_ongoing(key) for key in bench.world.latest(INDEXES)), "of no use any more"


def test_records_are_written_in_proportion_to_what_is_read() -> None:
    bench = Bench.fresh()
    bench.do("begin", LONG, STREAMS[0])
    for _ in range(30):
        bench.do("data", LONG, STREAMS[0])
        bench.rest()
    few = written(bench)
    assert few <= 30 // REPLAY_MAX
    busy(bench, 20)
    assert written(bench) - few <= 3, "each would repeat the thirty frames"


def test_a_quiet_partition_does_not_make_leaders_read_the_commit_log_from_long_ago() -> None:
    bench = Bench.fresh()
    for number, stream in enumerate((STREAMS[1], STREAMS[0])):
        bench.do("begin", LONG + number, stream)
    assert bench.leader.group is not None
    quiet = (STREAMS[1].buffer_topic(), 0)
    busy(bench, 20)
    found = bench.leader.group.snapshots.partitions[quiet]
    log_end = len(bench.world.topics[bench.leader.group.commit_log].entries)
    needed = found.spared or found.needed
    assert log_end - needed.log_position < log_end // 2


def test_a_transaction_that_does_not_fit_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ongoing, "ONGOING_BYTES_MAX", 2 * TRANSACTION_BYTES + 100)
    bench = Bench.fresh()
    for number in range(3):
        bench.do("begin", LONG + number, STREAMS[0])
    bench.do("data", LONG, STREAMS[0])
    busy(bench, 20)
    records = [bench.world.latest(INDEXES).get(key) for key in ongoing_keys(PARTITION)]
    decoded = [decode_ongoing(value) for value in records if value is not None]
    assert {len(item.transactions) for item in decoded} == {2}
    assert {item.replay_position for item in decoded} == {2}, "where the third one began"
    bench.take_over()
    assert not bench.world.broken
    assert bench.leader.group is not None
    assert len(bench.leader.group.fold.open) == 3
