"""Records of long transactions: every one is written, in writes that ZooKeeper accepts."""

from __future__ import annotations

import pytest

from coordinator.tests.makers import Bench, run
from rollbridge.base import effects
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import (
    LABEL_CHARACTERS_MAX,
    STREAMS_MAX,
    BeginFrame,
    FrameHeader,
    FrameKind,
    Manifest,
    encode_extend,
)
from rollbridge.buffer.table import State
from rollbridge.commitlog.commit_order import CommitOrder
from rollbridge.metadata.records import CreateNode, SetNode, TransactionRecord
from rollbridge.metadata.requests import AdminRequest, RequestKind
from rollbridge.metadata.session import REQUEST_BYTES_MAX
from rollbridge_coordinator.commit.expiry import (
    RECORDS_PER_WRITE,
    await_frames,
    expire_overdue,
    record_extended,
    record_long,
)
from rollbridge_coordinator.core.effects import AppendControl, CommitRound, EndOffsets, Write
from rollbridge_coordinator.core.requests import _abort, waits_for

DAY_MS = 86_400_000


def written(bench: Bench, ahead_ms: int = 0) -> list[list[CreateNode]]:
    """Carry out ``record_long`` with a clock that is wrong; gives what each write creates."""
    writes: list[list[CreateNode]] = []

    def answer(effect: object) -> object:
        match effect:
            case AppendControl(_, records):
                return list(range(len(records)))
            case CommitRound():
                return None
            case Write(operations):
                writes.append([item for item in operations if isinstance(item, CreateNode)])
                return True
            case _:
                raise AssertionError(effect)

    effects.run(record_long(bench.group, bench.clock_ms + 10_000 + ahead_ms), answer)
    return writes


def begin(bench: Bench, counter: int, label: str, streams: dict[str, int]) -> TransactionId:
    identifier = TransactionId.of(0, counter)
    frame = BeginFrame("c", 0, label, 60_000, streams)
    bench.feed("sales/orders", FrameHeader(FrameKind.BEGIN, identifier.bytes), frame.encode())
    return identifier


def check(bench: Bench, begun: list[TransactionId]) -> list[list[CreateNode]]:
    writes = written(bench)
    assert [node.path.rsplit("/", 1)[1] for write in writes for node in write] == [str(item) for item in begun]
    assert bench.group.records.recorded == {item.bytes for item in begun}
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


# Leases that are extended: what a leader has looked up for the former deadline counts no more.


ORDERS, PAYMENTS = "sales/orders", "sales/payments"


def extend(bench: Bench, transaction: TransactionId, lease_ms: int) -> None:
    bench.feed(ORDERS, FrameHeader(FrameKind.EXTEND, transaction.bytes), encode_extend(lease_ms))


def test_the_ends_of_buffers_are_looked_up_again_for_the_new_deadline() -> None:
    bench = Bench({ORDERS: 1})
    transaction = bench.begin(ORDERS, lease_ms=1_000)
    item = bench.group.fold.open[transaction.bytes]
    assert [type(effect) for effect in run(bench, expire_overdue(bench.group, 2_001), unread=1)] == [EndOffsets]
    bench.clock_ms = 1_900
    extend(bench, transaction, 1_000)  # what was unread
    run(bench, expire_overdue(bench.group, 2_002))
    assert item.state is State.OPEN
    # Another frame is on its way when the new deadline is over: the commit, in time.
    assert [type(effect) for effect in run(bench, expire_overdue(bench.group, 2_901), unread=1)] == [EndOffsets]
    assert item.state is State.OPEN
    bench.clock_ms = 2_899
    bench.commit(transaction, {})
    run(bench, expire_overdue(bench.group, 2_902))
    assert bench.group.fold.open[transaction.bytes].state is State.COMMITTING


@pytest.mark.parametrize("is_extended", [False, True])
def test_a_commit_waits_for_its_frames_and_not_for_what_its_lease_had_waited_for(is_extended: bool) -> None:
    bench = Bench({ORDERS: 1, PAYMENTS: 1})
    transaction = bench.begin(ORDERS, PAYMENTS, lease_ms=1_000)
    run(bench, expire_overdue(bench.group, 2_001), unread=1)  # of each buffer one frame is unread
    bench.clock_ms = 1_900
    if is_extended:
        extend(bench, transaction, 1_000)
    else:
        bench.data(transaction, ORDERS, 0)
    bench.data(transaction, PAYMENTS, 0)
    item = bench.commit(transaction, {(1, 0): 2} if is_extended else {(0, 0): 1, (1, 0): 2})  # one is still unread
    assert not item.is_complete()
    assert [type(effect) for effect in run(bench, await_frames(bench.group, [item], 2_002), unread=1)] == [EndOffsets]
    assert item.state is State.COMMITTING, item.reason
    bench.data(transaction, PAYMENTS, 0)
    assert item.is_complete()


def test_the_record_of_the_transaction_says_the_new_lease() -> None:
    bench = Bench({ORDERS: 1})
    known, young = bench.begin(ORDERS), bench.begin(ORDERS)
    bench.group.records.recorded.add(known.bytes)
    for transaction in (known, young):
        extend(bench, transaction, 200_000)
    [written] = run(bench, record_extended(bench.group, 0))
    assert isinstance(written, Write)
    [node] = written.operations
    assert isinstance(node, SetNode)
    record = TransactionRecord.from_json(node.value)
    assert (record.id, record.lease_ms) == (known, 200_000)
    assert not bench.group.fold.extended
    assert run(bench, record_extended(bench.group, 0)) == []
