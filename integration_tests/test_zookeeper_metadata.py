"""Typed reads and writes of what stands in ZooKeeper, on a real one."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from bridge.tests.refusals import raises_code
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import until
from integration_tests.patience import PATIENCE_S
from rollbridge.base import deadlines
from rollbridge.base.deadlines import answers_within
from rollbridge.base.ids import Epoch, SegmentId, TransactionId, counter_of
from rollbridge.errors import CoordinatorUnavailableError, CorruptDataError, UnknownWriteError
from rollbridge.metadata import paths, store
from rollbridge.metadata.records import (
    ClusterIdentity,
    CreateNode,
    DeleteNode,
    Group,
    SetNode,
    TransactionRecord,
    Truncation,
)
from rollbridge.metadata.requests import AdminRequest, RequestKind
from rollbridge.metadata.session import Watch, ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.epochs import EpochHistory, TruncatedHistory, without_epochs
from rollbridge.stream.keyspace import even_ranges
from rollbridge.stream.names import GroupName, StreamName

GROUP = GroupName("sales")
ORDERS = StreamName("sales", "orders")
CREATE = AdminRequest(kind=RequestKind.CREATE_STREAM, stream=str(ORDERS), created_ms=1)


@pytest.fixture
def withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests be withdrawn however slow the machine is."""
    monkeypatch.setattr(deadlines, "GRACE_S", PATIENCE_S)


@pytest.fixture
def metadata(cluster: AnyCluster, unique_name: Callable[[str], str]) -> Iterator[Metadata]:
    with ZooKeeperSession(cluster.zookeeper, root="/" + unique_name("metadata")) as session:
        yield Metadata(session)


def config_of(name: StreamName) -> StreamConfig:
    return StreamConfig(name=name, group=GroupName(name.scope), created_ms=5, buffer_topic_id="t")


def put_stream(metadata: Metadata, name: StreamName, history: EpochHistory) -> None:
    metadata.session.ensure(paths.streams(name.scope))
    metadata.session.create(paths.stream(name), config_of(name).to_json())
    metadata.session.create(paths.epochs(name))
    for record in history.records:
        metadata.session.create(paths.epoch(name, record.epoch), record.to_json())


def transaction(number: int, group: GroupName = GROUP) -> TransactionRecord:
    return TransactionRecord(
        id=TransactionId.of(0, number),
        group=group,
        state="open",
        client_name="c",
        begun_ms=1_000 - number,
        lease_ms=10,
        streams={str(ORDERS): 0},
        controller_epoch=1,
    )


def test_streams_and_their_histories(metadata: Metadata) -> None:
    assert metadata.stream(ORDERS) is None
    assert metadata.history(ORDERS) is None
    assert metadata.streams() == []
    created = EpochHistory.create(even_ranges(3), 7)
    history = created
    for number in range(12):
        segment = history.active.segment_numbered(number)
        history = history.with_records(history.plan_scale([number], [segment.range], 8))
    put_stream(metadata, ORDERS, history)
    other = StreamName("another", "stream")
    put_stream(metadata, other, created)
    assert metadata.history(ORDERS) == history
    assert metadata.stream(ORDERS) == config_of(ORDERS)
    assert [config.name for config in metadata.streams()] == [other, ORDERS]
    assert [config.name for config in metadata.streams("sales")] == [ORDERS]
    assert metadata.streams("nowhere") == []
    assert metadata.scopes() == ["another", "sales"]


def test_a_history_is_whole_while_its_first_epochs_are_dropped(metadata: Metadata) -> None:
    history = EpochHistory.create(even_ranges(1), 7)
    for epoch in range(1, 40):
        last = SegmentId.of(epoch - 1, epoch - 1)
        history = history.with_records(history.plan_scale([epoch - 1], even_ranges(1), 8))
        history = history.with_sealed_ends(epoch, {last: 3}).with_removed([last])
    put_stream(metadata, ORDERS, history)
    metadata.session.create(paths.truncation(ORDERS), Truncation(history.removed).to_json())
    dropped = threading.Event()

    def drop() -> None:
        kept = history
        try:
            for first in range(1, 38):
                kept = without_epochs(kept, first)
                value = Truncation(kept.removed, frozenset(), kept.foundation).to_json()
                metadata.session.multi(
                    [SetNode(paths.truncation(ORDERS), value), DeleteNode(paths.epoch(ORDERS, first - 1))]
                )
        finally:
            dropped.set()

    dropping = threading.Thread(target=drop)
    dropping.start()
    known: EpochHistory | None = None
    while not dropped.is_set():
        for before in (None, known):
            found = metadata.history(ORDERS, None, before)
            assert found is not None
            assert found == without_epochs(history, found.first)
            known = found
    dropping.join()
    assert metadata.history(ORDERS, None, history) == without_epochs(history, 37)
    broken = TruncatedHistory(Epoch(99), 7, (0,))
    metadata.session.set(paths.truncation(ORDERS), Truncation(foundation=broken).to_json())
    with pytest.raises(CorruptDataError, match="end before the first one"):
        metadata.history(ORDERS)


def test_a_corrupt_node_is_said_to_be_corrupt(metadata: Metadata) -> None:
    metadata.session.create(paths.stream(ORDERS), b"{", parents=True)
    with pytest.raises(CorruptDataError):
        metadata.stream(ORDERS)
    metadata.session.create(paths.TRANSACTION_COUNTER, b"many", parents=True)
    with pytest.raises(CorruptDataError, match="counters"):
        metadata.reserve_counters(GROUP, 1)


def test_a_path_belongs_to_the_cluster_that_used_it_first(metadata: Metadata) -> None:
    assert metadata.cluster() is None
    first = metadata.claim_cluster("cluster-a", 5)
    assert first == ClusterIdentity("cluster-a", 5)
    assert metadata.claim_cluster("cluster-a", 6) == first
    with raises_code("wrong-cluster") as refused:
        metadata.claim_cluster("cluster-b")
    for named in ("cluster-a", "cluster-b", metadata.session.root):
        assert named in str(refused.value)
    assert metadata.cluster() == first


def test_a_newer_layout_is_refused(metadata: Metadata) -> None:
    metadata.session.create("/", replace(ClusterIdentity("cluster-a", 1), format=99).to_json(), parents=True)
    with raises_code("wrong-cluster", match="99"):
        metadata.claim_cluster("cluster-a")


def test_counters_are_never_given_out_twice(metadata: Metadata) -> None:
    assert metadata.reserve_counters(GROUP, 10) == range(1, 11), "of a group without a number"
    start = numbered(metadata)
    assert metadata.reserve_counters(GROUP, 10) == range(start + 1, start + 11)
    blocks: list[range] = []
    threads = [
        threading.Thread(target=lambda: blocks.extend(metadata.reserve_counters(GROUP, 7) for _ in range(10)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    numbers = list(itertools.chain.from_iterable(blocks))
    assert sorted(numbers) == list(range(start + 11, start + 11 + 280))


def numbered(metadata: Metadata) -> int:
    """Number a group as its leader does; gives where its ids begin."""
    known = Group(GROUP, 0, "log", number=7, counter_floor=1, counter_ceiling=1_000)
    metadata.session.ensure(paths.group(GROUP), known.to_json())
    metadata.session.ensure(paths.counter(GROUP), b"1")
    return counter_of(7, 0)


@pytest.mark.parametrize("raw", [b"", b"x", b"0", b"-3", b"996", b"9" * 5_000, str(1 << 96).encode()])
def test_of_a_damaged_counter_nothing_is_reserved_until_it_is_set_right(metadata: Metadata, raw: bytes) -> None:
    start = numbered(metadata)
    metadata.session.set(paths.counter(GROUP), raw)
    with (
        answers_within(1.0),
        pytest.raises(CoordinatorUnavailableError, match=r"counter holds .*sets it right") as raised,
    ):
        metadata.reserve_counters(GROUP, 5)
    assert len(str(raised.value)) < 700
    found: list[range] = []
    waiting = threading.Thread(target=lambda: found.append(metadata.reserve_counters(GROUP, 5)))
    waiting.start()
    metadata.session.set(paths.counter(GROUP), b"50")
    waiting.join(PATIENCE_S)
    assert found == [range(start + 50, start + 55)]


def test_a_group_is_created_whole_whatever_was_there(metadata: Metadata) -> None:
    skeleton = paths.group_skeleton(GROUP)
    metadata.session.ensure(skeleton[0])
    metadata.ensure_group(GROUP, 5)
    metadata.ensure_group(GROUP, 6)
    assert all(metadata.session.exists(path) for path in skeleton)
    assert metadata.groups() == [GROUP]
    other = GroupName("sales", "bulk")
    metadata.ensure_group(other, 7)
    group = metadata.group(other)
    assert group is not None
    assert (group.name, group.created_ms, group.commit_log_topic_id) == (other, 7, "")
    assert metadata.group(GroupName("sales", "none")) is None


def test_open_transactions_are_listed_and_found(metadata: Metadata) -> None:
    other = GroupName("sales", "bulk")
    for group in (GROUP, other):
        metadata.ensure_group(group, 5)
    records = [transaction(number) for number in range(1, 200)]
    elsewhere = transaction(500, other)
    outcomes = metadata.session.multi_pipelined(
        [CreateNode(paths.transaction(record.group, record.id), record.to_json())] for record in [*records, elsewhere]
    )
    assert set(outcomes) == {None}
    assert metadata.transactions(GROUP) == records[::-1], "oldest first"
    assert metadata.find_transaction(elsewhere.id) == elsewhere
    appeared = threading.Event()
    late = transaction(600)
    assert metadata.find_transaction(late.id, appeared.set) is None
    metadata.session.create(paths.transaction(GROUP, late.id), late.to_json())
    assert appeared.wait(PATIENCE_S)
    assert metadata.find_transaction(late.id) == late


def test_a_part_is_numbered_in_the_moment_in_which_its_transaction_ends(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata.ensure_group(GROUP, 5)
    identifier = TransactionId.of(0, 3)
    ensure = metadata.session.ensure

    def ensured_and_removed(path: str, value: bytes) -> bool:
        monkeypatch.setattr(metadata.session, "ensure", ensure)
        made = ensure(path, value)
        metadata.session.delete(path)
        return made

    monkeypatch.setattr(metadata.session, "ensure", ensured_and_removed)
    assert metadata.claim_part(GROUP, identifier) == 1


@pytest.mark.usefixtures("withdrawn")
def test_a_request_that_nobody_takes_is_withdrawn(metadata: Metadata) -> None:
    metadata.ensure_group(GROUP, 5)
    with pytest.raises(CoordinatorUnavailableError, match=r"no coordinator is running.*nothing was done"):
        metadata.ask(GROUP, CREATE, 0.2)
    assert metadata.session.children(paths.requests(GROUP)) == []
    metadata.session.create(paths.coordinator("idle"), ephemeral=True, parents=True)
    with pytest.raises(CoordinatorUnavailableError, match="no coordinator leads group sales/default"):
        metadata.ask(GROUP, CREATE, 0.2)
    metadata.session.create(paths.leader(GROUP), b"busy", ephemeral=True)
    with pytest.raises(CoordinatorUnavailableError, match=r"coordinator busy has been taking over .* for \d+ s"):
        metadata.ask(GROUP, CREATE, 0.2)
    metadata.session.set(paths.leader(GROUP), b"busy", 0)
    with pytest.raises(CoordinatorUnavailableError, match="coordinator busy leads"):
        metadata.ask(GROUP, CREATE, 0.2)


def test_a_request_that_was_taken_but_not_answered_is_unknown(metadata: Metadata) -> None:
    metadata.ensure_group(GROUP, 5)
    parent = paths.requests(GROUP)

    def take() -> None:
        until(lambda: bool(metadata.session.children(parent)))
        metadata.session.delete(f"{parent}/{metadata.session.children(parent)[0]}")

    taker = threading.Thread(target=take)
    taker.start()
    with pytest.raises(UnknownWriteError, match="may still be carried out"):
        metadata.ask(GROUP, CREATE, 2)
    taker.join(PATIENCE_S)


@pytest.mark.usefixtures("withdrawn")
def test_a_deletion_that_has_begun_is_not_called_withdrawn(metadata: Metadata) -> None:
    metadata.ensure_group(GROUP, 5)
    put_stream(metadata, ORDERS, EpochHistory.create(even_ranges(1), 1))
    delete = AdminRequest(kind=RequestKind.DELETE_STREAM, stream=str(ORDERS), created_ms=1)
    with pytest.raises(CoordinatorUnavailableError):
        metadata.ask(GROUP, delete, 0.2)
    parent = paths.requests(GROUP)

    def take() -> None:
        """Do what a leader does when it marks the stream."""
        until(lambda: bool(metadata.session.children(parent)))
        metadata.session.delete(f"{parent}/{metadata.session.children(parent)[0]}")

    taker = threading.Thread(target=take)
    taker.start()
    with pytest.raises(UnknownWriteError):
        metadata.ask(GROUP, delete, 2)
    taker.join(20)


@pytest.mark.usefixtures("withdrawn")
def test_a_scale_that_may_have_aborted_native_transactions_is_not_called_undone(metadata: Metadata) -> None:
    """Its leader aborts them before it takes the request."""
    metadata.ensure_group(GROUP, 5)
    put_stream(metadata, ORDERS, EpochHistory.create(even_ranges(1), 1))
    scale = AdminRequest(kind=RequestKind.SCALE_STREAM, stream=str(ORDERS), created_ms=1, abort_foreign=True)
    with pytest.raises(CoordinatorUnavailableError, match="nothing was done"):
        metadata.ask(GROUP, scale, 0.2)
    metadata.session.create(paths.leader(GROUP), b"busy", ephemeral=True, parents=True)
    with pytest.raises(UnknownWriteError, match="may still be carried out"):
        metadata.ask(GROUP, scale, 0.2)
    with pytest.raises(CoordinatorUnavailableError, match="nothing was done"):
        metadata.ask(GROUP, replace(scale, abort_foreign=False), 0.2)


@pytest.mark.parametrize("look_s", [0.2, 10 * PATIENCE_S], ids=["looks", "is-woken"])
def test_whoever_waits_for_an_answer_is_told_when_the_session_is_closed(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch, look_s: float
) -> None:
    monkeypatch.setattr(store, "_CLOSED_LOOK_S", look_s)
    metadata.lay_out()
    metadata.ensure_group(GROUP)
    read, waits = metadata.session.get, threading.Event()
    told: list[Exception] = []
    watches: list[Watch] = []

    def get(path: str, watch: Watch | None = None) -> object:
        node = read(path, watch)
        if watch is not None:
            watches.append(watch)
            waits.set()
        return node

    def ask() -> None:
        try:
            metadata.ask(GROUP, CREATE, 10 * PATIENCE_S)
        except UnknownWriteError as fault:
            told.append(fault)

    monkeypatch.setattr(metadata.session, "get", get)
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    assert waits.wait(PATIENCE_S)
    metadata.session.close()
    if look_s > PATIENCE_S:
        watches[0]()  # as kazoo does with the watches of a session that ends, at times
    asking.join(PATIENCE_S)
    assert "was closed" in str(told[0])
