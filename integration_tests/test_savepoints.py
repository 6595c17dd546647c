"""Savepoints and streams that join late, on real servers: killed writers, rollbacks, and new leaders."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition

import rollbridge
from bridge.tests.refusals import raises_code
from integration_tests.adapter_tools import stored_offsets
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site, patient_client
from integration_tests.coordinators import coordinator
from integration_tests.kafka_tools import create_topic
from integration_tests.patience import eventually
from rollbridge.errors import (
    ClientFencedError,
    InvalidRequestError,
    StreamNotFoundError,
    TransactionRefusedError,
)
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import GroupName

WORKER = Path(__file__).with_name("savepoint_worker.py")


def values_of(site: Site, stream: str) -> list[bytes]:
    """All committed values of a stream, in the order of the reader."""
    return [message.value() or b"" for message in site.committed(stream)]


def numbers_by_key(site: Site, stream: str) -> dict[bytes, list[int]]:
    """The committed numbers of each key, in order."""
    found: dict[bytes, list[int]] = {}
    for message in site.committed(stream):
        found.setdefault(message.key() or b"", []).append(int(message.value() or b"-1"))
    return found


class Worker:
    """A writer in a process of its own."""

    def __init__(self, site: Site, label: str, first: str, second: str, count: int) -> None:
        where = (site.cluster.bootstrap_servers, site.cluster.zookeeper, site.root)
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), *where, label, first, second, str(count)], stdout=subprocess.PIPE, text=True
        )

    def line(self) -> list[str]:
        """What it says next, by words."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def kill(self) -> None:
        """Kill it."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=120)


def test_a_killed_writers_successor_goes_on_from_its_last_savepoint(
    site: Site, orders: str, payments: str, unique_name: Callable[[str], str]
) -> None:
    label, count = unique_name("writer"), 3_000
    saved = 0
    for _ in range(4):
        worker = Worker(site, label, orders, payments, count)
        try:
            for _ in range(5):
                word, reached, _ = worker.line()
                assert (word, int(reached) > saved) == ("saved", True)
                saved = int(reached)
        finally:
            worker.kill()
    last = Worker(site, label, orders, payments, count)
    while (said := last.line())[0] == "saved":
        pass
    last.process.communicate(timeout=120)
    assert said == ["committed", str(count)]
    found = {stream: numbers_by_key(site, stream) for stream in (orders, payments)}
    for stream, wanted in ((orders, lambda number: number % 3), (payments, lambda number: not number % 3)):
        for key in range(5):
            expected = [number for number in range(count) if number % 5 == key and wanted(number)]
            assert found[stream][b"k%d" % key] == expected, "each once, in order"


def test_rolling_back_leaves_out_what_came_after(
    site: Site, client: rollbridge.Bridge, orders: str, payments: str
) -> None:
    txn = client.begin(orders)
    kept = txn.write(orders, key=b"a", value=b"kept")
    first = txn.savepoint(notes={"n": b"1"})
    gone = [txn.write(orders, key=b"a", value=b"gone"), txn.write(payments, key=b"b", value=b"gone, too")]
    second = txn.savepoint(notes={"m": b"2"})
    assert (first.number, dict(first.notes), dict(first.records)) == (1, {"n": b"1"}, {orders: 1})
    assert (second.number, dict(second.notes)) == (2, {"n": b"1", "m": b"2"})
    assert dict(second.records) == {orders: 2, payments: 1}
    assert txn.streams == (orders, payments)
    txn.send_offsets({(orders.replace("/", "."), 0): 7}, "some-group")
    txn.expect(payments, key=b"b", sn=rollbridge.EMPTY)
    txn.rollback_to(first)
    assert txn.records == 1
    for future in gone:
        assert future.done()
        with raises_code("rolled-back", match="visible nowhere"):
            future.result()
    with pytest.raises(InvalidRequestError, match="rolled back to a savepoint before number 2"):
        txn.rollback_to(second)
    again = [txn.write(orders, key=b"a", value=b"again"), txn.write(payments, key=b"b", value=b"new")]
    third = txn.savepoint()
    assert (third.number, dict(third.notes)) == (4, {"n": b"1"}), "going back made one, too"
    assert pickle.loads(pickle.dumps(third)) == third
    txn.write(payments, key=b"b", value=b"gone again")
    txn.rollback_to(third)
    txn.rollback_to(third)
    last = txn.write(payments, key=b"b", value=b"last")
    result = txn.commit()
    assert result.records == 4
    assert values_of(site, orders) == [b"kept", b"again"]
    assert values_of(site, payments) == [b"new", b"last"]
    places = [kept.result(), again[0].result()]
    assert places[0].offset + 1 == places[1].offset
    assert again[1].result().offset + 1 == last.result().offset
    assert [future.exception() is not None for future in gone] == [True, True]


def test_going_back_without_anything_new_takes_back_offsets_and_conditions(
    site: Site, client: rollbridge.Bridge, ledger: str
) -> None:
    with client.begin(ledger) as first:
        first.write(ledger, key=b"a", value=b"1")
    txn = client.begin(ledger)
    txn.write(ledger, key=b"a", value=b"2")
    point = txn.savepoint()
    txn.expect(ledger, key=b"a", sn=rollbridge.EMPTY)
    txn.rollback_to(point)
    assert txn.commit().records == 1, "the condition would not have held"


def test_offsets_and_conditions_of_the_last_savepoint_hold_for_who_resumes(
    site: Site, orders: str, ledger: str
) -> None:
    with site.connect("held-1") as b:
        txn = b.begin(orders)
        txn.write(orders, key=b"a", value=b"1")
        txn.expect(ledger, key=b"x", sn=rollbridge.EMPTY)
        txn.savepoint()
    with site.connect("held-2") as b:
        with b.begin(ledger) as other:
            other.write(ledger, key=b"x", value=b"now there is one")
        resumed = b.resume(txn.id)
        assert resumed.streams == (orders, ledger), "a stream joins with a condition"
        assert resumed.last_savepoint is not None
        with pytest.raises(TransactionRefusedError):
            resumed.commit()


def test_what_is_committed_beside_offsets_is_that_of_the_savepoint_that_counts(
    site: Site, orders: str, unique_name: Callable[[str], str]
) -> None:
    """Rolled back, killed, resumed, and led by another leader: the group gets what the last savepoint has."""
    servers, source, group = site.cluster.bootstrap_servers, unique_name("source"), unique_name("group")
    create_topic(servers, source, 3)
    with site.connect("details-1") as b:
        txn = b.begin(orders)
        txn.write(orders, key=b"a", value=b"1")
        txn.send_offsets([TopicPartition(source, 0, 5, metadata="kept", leader_epoch=3)], group)
        first = txn.savepoint()
        txn.send_offsets([TopicPartition(source, 0, 6, metadata="gone"), TopicPartition(source, 1, 6)], group)
        txn.savepoint()
        txn.rollback_to(first)
        txn.send_offsets([TopicPartition(source, 2, 7, leader_epoch=0)], group)
        txn.savepoint()
        txn.send_offsets([TopicPartition(source, 0, 8, metadata="in no savepoint")], group)
    site.stop_coordinator()
    site.start_coordinator()
    with site.connect("details-2") as b:
        resumed = b.resume(txn.id)
        assert resumed.last_savepoint is not None
        assert pickle.loads(pickle.dumps(resumed.last_savepoint)).offsets == resumed.last_savepoint.offsets
        resumed.commit()
    assert stored_offsets(servers, group, source, 3) == {0: (5, 3, "kept\0"), 2: (7, 0, "")}


def test_a_former_owner_cannot_go_back_and_nothing_of_it_counts(site: Site, orders: str, payments: str) -> None:
    with site.connect("former") as former, site.connect("successor") as successor:
        txn = former.begin(orders)
        txn.write(orders, key=b"a", value=b"1")
        point = txn.savepoint(notes={"by": b"former"})
        txn.write(orders, key=b"a", value=b"2")
        txn.flush()
        resumed = successor.resume(txn.id)
        assert dict(resumed.earlier_records) == {orders: 2}, "what has arrived counts"
        assert resumed.last_savepoint == point
        txn.write(payments, key=b"p", value=b"joined too late")
        txn.rollback_to(point)
        txn.write(orders, key=b"a", value=b"zombie")
        txn.savepoint(notes={"by": b"zombie"})
        resumed.rollback_to(resumed.last_savepoint)
        assert dict(resumed.earlier_records) == {orders: 1}
        resumed.write(payments, key=b"q", value=b"mine")
        with site.connect("third") as third:
            again = third.resume(txn.id)
            assert again.last_savepoint is not None
            assert dict(again.last_savepoint.notes) == {"by": b"former"}
            assert dict(again.earlier_records) == {orders: 1, payments: 0}, "what was gone back behind stays out"
            again.write(payments, key=b"q", value=b"third")
            assert again.commit().records == 2
        with pytest.raises(ClientFencedError):
            txn.commit()
    assert values_of(site, orders) == [b"1"]
    assert values_of(site, payments) == [b"third"]


SNAPSHOTS = {
    "CONSTANT_TRANSACTION_BUFFER_SNAPSHOT_MAX_TRANSACTION_COUNT": "2",
    "CONSTANT_TRANSACTION_BUFFER_SNAPSHOT_MIN_TIME_IN_MILLIS": "100",
    "CONSTANT_TRANSACTION_BUFFER_SNAPSHOT_REPLAY_MAX": "1",
}
"""Records of ongoing transactions are written at once, so that takeovers read them."""


@pytest.mark.parametrize("standby", [True, False])
def test_savepoints_and_joined_streams_survive_killed_leaders(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path, standby: bool
) -> None:
    root, scope = f"/{unique_name('savepoints')}", unique_name("over")
    orders, payments, others = (f"{scope}/{name}" for name in ("orders", "payments", "others"))
    settings = {**SNAPSHOTS, **({} if standby else {"ROLLBRIDGE_COORDINATOR_STANDBY_TRANSACTIONS_MAX": "0"})}
    with ExitStack() as stack:
        left = {
            name: stack.enter_context(coordinator(cluster, root, name, tmp_path, **settings))
            for name in ("one", "two", "three")
        }
        b = stack.enter_context(patient_client(cluster, root, "over-leaders"))
        session = stack.enter_context(ZooKeeperSession(cluster.zookeeper, root=root))
        group = GroupName(scope)

        def kill_leader() -> None:
            name = Metadata(session).leader(group)
            assert name is not None
            process = left.pop(name)
            process.kill()
            process.wait()
            eventually(lambda: Metadata(session).leader(group) not in (None, name), "another one leads")

        for stream in (orders, payments, others):
            b.admin.create_stream(stream)
        txn = b.begin(orders)
        point = txn.savepoint()
        for number in range(20):
            txn.write(orders, key=b"k", value=b"%d" % number)
            point = txn.savepoint(notes={f"n{number}": b"%d" % number})
            with b.begin(others) as small:  # snapshots come with transactions that end
                small.write(others, key=b"k", value=b"%d" % number)
        txn.write(orders, key=b"k", value=b"beyond")
        txn.write(payments, key=b"k", value=b"beyond")
        txn.flush()
        kill_leader()
        later = b.resume(txn.id)
        assert later.streams == (orders, payments)
        assert later.last_savepoint == replace(point, records={orders: 20, payments: 0})
        assert len(later.last_savepoint.notes) == 20
        later.rollback_to(later.last_savepoint)
        later.write(payments, key=b"k", value=b"after")
        later.flush()
        for _ in range(5):
            with b.begin(others, payments) as small:
                small.write(others, key=b"k", value=b"more")
        kill_leader()
        assert later.commit().records == 21
        place = b.reader(orders, follow=False)
        assert [record.value for record in place] == [b"%d" % number for number in range(20)]
        assert [record.value for record in b.reader(payments, follow=False)] == [b"after"]


def test_a_stream_joins_only_if_it_could_have_been_named_at_the_begin(
    site: Site, client: rollbridge.Bridge, scope: str, orders: str
) -> None:
    elsewhere = f"{scope}/elsewhere"
    client.admin.create_stream(elsewhere, group="other")
    txn = client.begin(orders)
    with raises_code("group-mismatch", match="nothing was written"):
        txn.write(elsewhere, key=b"a", value=b"1")
    with pytest.raises(StreamNotFoundError):
        txn.write_all(f"{scope}/nowhere", [(b"a", b"1")])
    with pytest.raises(StreamNotFoundError):
        txn.expect(f"{scope}/nowhere", key=b"a", sn=rollbridge.EMPTY)
    assert txn.streams == (orders,)
    txn.write(orders, key=b"a", value=b"1")
    assert txn.commit().records == 1


def test_a_joined_stream_is_scaled_and_takes_parts_of_other_processes(
    site: Site, client: rollbridge.Bridge, orders: str, ledger: str
) -> None:
    txn = client.begin(orders)
    txn.write(orders, key=b"a", value=b"1")
    assert txn.write_all(ledger, [(b"a", b"own"), (b"b", b"own")]) == 2
    txn.flush()
    eventually(lambda: client.join(txn.id).streams == (orders, ledger), "it is on record that the stream has joined")
    other = client.join(txn.id)
    other.write(ledger, key=b"c", value=b"a part's")
    handle = other.finish()
    client.admin.scale(ledger, seal=[0], ranges=[(0.0, 0.5), (0.5, 1.0)])
    with client.begin(ledger) as plain:
        plain.write(ledger, key=b"d", value=b"new epoch")
    assert txn.commit(parts=[handle]).records == 4
    assert sorted(values_of(site, ledger)) == [b"a part's", b"new epoch", b"own", b"own"]


def test_a_stream_that_joined_is_not_deleted_before_the_end(
    client: rollbridge.Bridge, orders: str, ledger: str
) -> None:
    for _ in range(30):  # the leader may not have read yet that it has joined
        txn = client.begin(orders)
        txn.write(ledger, key=b"a", value=b"1")
        txn.flush()
        with raises_code("stream-busy"):
            client.admin.delete_stream(ledger)
        txn.abort()
    client.admin.delete_stream(ledger)


def test_many_savepoints_in_the_air_hold_in_their_order(client: rollbridge.Bridge, orders: str, ledger: str) -> None:
    txn = client.begin(orders, ledger)
    futures = []
    heard: list[int] = []
    for number in range(100):
        txn.write(orders if number % 2 else ledger, key=b"k", value=b"%d" % number)
        future = txn.savepoint_async(notes={"n": b"%d" % number})
        future.add_done_callback(lambda done: heard.append(done.result(0).number))
        futures.append(future)
    assert [future.result(60).number for future in futures] == list(range(1, 101))
    assert heard == list(range(1, 101))
    txn.rollback_to(futures[49].result())
    assert txn.commit().records == 50
