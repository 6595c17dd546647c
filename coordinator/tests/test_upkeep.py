"""Records of long transactions: every one is written, in writes that ZooKeeper accepts."""

from __future__ import annotations

import pytest

from coordinator.tests.makers import Bench
from rollbridge.model.commit_order import CommitOrder
from rollbridge.model.frames import LABEL_CHARACTERS_MAX, STREAMS_MAX, BeginFrame, FrameHeader, FrameKind, Manifest
from rollbridge.model.ids import TransactionId
from rollbridge.model.records import CreateNode, SetNode, TransactionRecord
from rollbridge.model.requests import AdminRequest, RequestKind
from rollbridge.model.transaction import State
from rollbridge.zookeeper.session import REQUEST_BYTES_MAX
from rollbridge_coordinator.procedures.requests import _abort, waits_for
from rollbridge_coordinator.procedures.upkeep import RECORDS_PER_WRITE, record_extended, record_long
from rollbridge_coordinator.state.effects import AppendControl, CommitRound, Write

DAY_MS = 86_400_000


def written(bench: Bench, ahead_ms: int = 0) -> list[list[CreateNode]]:
    """Carry out ``record_long`` with a clock that is wrong; gives what each write creates."""
    writes: list[list[CreateNode]] = []
    steps = record_long(bench.group, bench.clock_ms + 10_000 + ahead_ms)
    answer: object = None
    while True:
        try:
            effect = steps.send(answer)
        except StopIteration:
            return writes
        match effect:
            case AppendControl(_, records):
                answer = list(range(len(records)))
            case CommitRound():
                answer = None
            case Write(operations):
                writes.append([item for item in operations if isinstance(item, CreateNode)])
                answer = True
            case _:
                raise AssertionError(effect)


def begin(bench: Bench, counter: int, label: str, streams: dict[str, int]) -> TransactionId:
    identifier = TransactionId.of(0, counter)
    frame = BeginFrame("c", 0, label, 60_000, streams)
    bench.feed("sales/orders", FrameHeader(FrameKind.BEGIN, identifier.bytes), frame.encode())
    return identifier


def check(bench: Bench, begun: list[TransactionId]) -> list[list[CreateNode]]:
    writes = written(bench)
    assert [node.path.rsplit("/", 1)[1] for write in writes for node in write] == [str(item) for item in begun]
    assert bench.group.recorded == {item.bytes for item in begun}
    for write in writes:
        assert write
        assert len(write) <= RECORDS_PER_WRITE
        assert sum(len(node.path) + len(node.value) for node in write) <= REQUEST_BYTES_MAX
    return writes


def test_many_small_records_share_a_write() -> None:
    bench = Bench({"sales/orders": 1})
    begun = [begin(bench, counter, "", {"sales/orders": 0}) for counter in range(2 * RECORDS_PER_WRITE + 1)]
    assert [len(write) for write in check(bench, begun)] == [RECORDS_PER_WRITE, RECORDS_PER_WRITE, 1]
    assert written(bench) == []


def test_long_labels_do_not_exceed_what_zookeeper_takes() -> None:
    bench = Bench({"sales/orders": 1})
    label = "東" * LABEL_CHARACTERS_MAX
    begun = [begin(bench, counter, label, {"sales/orders": 0}) for counter in range(RECORDS_PER_WRITE)]
    assert len(check(bench, begun)) > 1


def test_the_largest_record_fits_into_a_write() -> None:
    bench = Bench({"sales/orders": 1})
    others = {f"s/{'t' * 200}{number}": 0 for number in range(STREAMS_MAX - 1)}
    begun = [begin(bench, counter, "\\" * LABEL_CHARACTERS_MAX, {"sales/orders": 0, **others}) for counter in range(3)]
    check(bench, begun)


def test_nothing_is_due_before_its_time() -> None:
    bench = Bench({"sales/orders": 1})
    begin(bench, 1, "", {"sales/orders": 0})
    assert list(record_long(bench.group, bench.clock_ms)) == []


def test_a_leader_whose_clock_is_a_day_behind_records_them_all_the_same() -> None:
    """Without its record nobody can resume a transaction."""
    bench = Bench({"sales/orders": 1})
    begin(bench, 1, "", {"sales/orders": 0})
    assert written(bench, -DAY_MS) == [], "no other clock is known yet"
    bench.group.times.low_ms = bench.group.times.high_ms = bench.group.times.append_ms = DAY_MS
    assert len(written(bench, -DAY_MS)) == 1


def test_a_commit_that_waits_for_an_earlier_one_that_never_comes_can_be_seen_and_aborted() -> None:
    bench = Bench({"sales/orders": 1})
    identifier = begin(bench, 1, "", {"sales/orders": 0})
    commit_behind(bench, identifier)
    item = bench.group.fold.open[identifier.bytes]
    assert [item.state] == [State.COMMITTING]
    assert waits_for(bench.group, item) == "waits for earlier commits of its connection"
    assert list(record_long(bench.group, bench.clock_ms)) == [], "it has only just been asked for"
    check(bench, [identifier])
    request = AdminRequest(kind=RequestKind.ABORT_TRANSACTION, transaction=str(identifier), created_ms=0)
    assert list(_abort(bench.group, "request-1", request, bench.clock_ms)) == []
    assert [item.state] == [State.ABORTING]


def test_the_record_of_a_transaction_whose_commit_waits_since_says_so_once() -> None:
    bench = Bench({"sales/orders": 1})
    identifier = begin(bench, 1, "", {"sales/orders": 0})
    check(bench, [identifier])
    commit_behind(bench, identifier)
    assert written(bench) == []
    steps = record_extended(bench.group, 0)
    effect = next(steps)
    assert isinstance(effect, Write)
    (node,) = effect.operations
    assert isinstance(node, SetNode)
    assert TransactionRecord.from_json(node.value).state == State.COMMITTING.value
    with pytest.raises(StopIteration):
        steps.send(True)
    assert written(bench) == []
    assert list(record_extended(bench.group, 0)) == []


def commit_behind(bench: Bench, identifier: TransactionId) -> None:
    """Ask for its commit behind an earlier one, of which nothing has come."""
    order = CommitOrder(connection=7, epoch=0, number=2, behind=1)
    header = FrameHeader(FrameKind.COMMIT, identifier.bytes, 0, *order.fields())
    bench.feed("sales/orders", header, Manifest({}, (), ()).encode())
