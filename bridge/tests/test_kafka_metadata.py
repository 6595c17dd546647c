"""What stands in ZooKeeper is read although a part of it, or who could explain something, cannot be."""

from __future__ import annotations

import gc
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from kio.schema.find_coordinator.v4 import FindCoordinatorRequest, FindCoordinatorResponse
from kio.static.primitive import i8

from rollbridge.base import deadlines
from rollbridge.base.deadlines import Deadline
from rollbridge.errors import AuthenticationError, KafkaUnavailableError, ZooKeeperUnavailableError
from rollbridge.kafka import connection, metadata, transactions
from rollbridge.kafka.dispatch import Dispatcher
from rollbridge.kafka.errors import ConnectionLostError
from rollbridge.kafka.metadata import (
    Broker,
    Cluster,
    Clusters,
    CodeError,
    CoordinatorType,
    LeaderAnswers,
    MetadataCache,
    ask_leaders,
)
from rollbridge.kafka.offsets import read_patiently
from rollbridge.kafka.queues import Lane, PartitionQueue, QueuedBatch
from rollbridge.kafka.topics import view_each, view_topics
from rollbridge.kafka.transactions import ProducerFields, ProduceSession
from rollbridge.metadata import store
from rollbridge.metadata.errors import ZooKeeperDeniedError
from rollbridge.metadata.requests import AdminAnswer, AdminRequest, RequestKind
from rollbridge.metadata.session import Watch, Znode
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import GroupName

GROUP = GroupName("s", "default")
ANSWER = AdminAnswer(ok=True, answered_ms=1)


def node(value: bytes) -> Znode:
    return Znode(0, 0, 0, 0, value)


class Session:
    """Stands for a session of which some nodes are refused, and others not answered for."""

    is_closed = False

    def __init__(self, denied: str = "") -> None:
        self.denied, self.requests = denied, 0
        self.answer: Znode | None = None
        self.watches: list[Watch] = []

    def get(self, path: str, watch: Watch | None = None) -> Znode | None:
        if watch is not None and self.answer is None:
            self.watches.append(watch)
        return self.answer

    def children(self, path: str) -> list[str]:
        self.answer = node(ANSWER.to_json())
        for watch in self.watches:
            watch()
        raise ZooKeeperUnavailableError(f"ZooKeeper did not answer for {path} in time")

    def get_many(self, paths: Sequence[str]) -> list[Znode | None]:
        self.requests += 1
        if self.denied in paths:
            raise ZooKeeperDeniedError(f"{self.denied} is not yours", path=self.denied, identity="me")
        return [node(path.encode()) for path in paths]

    def delete_soon(self, path: str) -> None:
        pass


def metadata_of(session: Session) -> Metadata:
    stand_in: Any = session
    return Metadata(stand_in)


def test_an_answer_is_taken_although_nobody_can_tell_why_it_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_TELL_S", 0.0)
    monkeypatch.setattr(store, "_CLOSED_LOOK_S", 0.001)
    request = AdminRequest(kind=RequestKind.DELETE_STREAM, stream="s/t", client_name="c", created_ms=1)
    assert metadata_of(Session()).answer_to(GROUP, request, "request-1", 10.0) == ANSWER


def test_of_many_nodes_one_that_is_refused_takes_few_requests() -> None:
    session = Session("/700")
    found = metadata_of(session).get_each([f"/{number}" for number in range(1_000)])
    assert [place for place, item in enumerate(found) if isinstance(item, ZooKeeperDeniedError)] == [700]
    assert [item.value for item in found if isinstance(item, Znode)] == [b"/%d" % n for n in range(1_000) if n != 700]
    assert session.requests < 25


# Which broker is asked and believed; connections that are kept are closed with the object that keeps them.


class Kept:
    """Stands for a cluster with a connection."""

    def __init__(self, near: socket.socket) -> None:
        self.near = near

    def close(self) -> None:
        self.near.close()


def test_sockets_are_closed_although_the_keeper_is_part_of_a_cycle() -> None:
    near, far = socket.socketpair()
    clusters = Clusters(lambda: Cluster("127.0.0.1:1"))
    clusters._idle[0][0]._connections[None] = Kept(near)  # type: ignore[assignment]
    clusters.itself = clusters  # type: ignore[attr-defined]
    del clusters, near
    gc.collect()  # a socket that nobody has closed is a warning, and with that this test's failure
    with far:
        assert far.recv(1) == b""


def test_nobody_there_is_told_and_not_dialled_again_at_once() -> None:
    clusters = Clusters(lambda: Cluster("127.0.0.1:1"))
    deadline = Deadline(5.0)
    with clusters.borrow(deadline) as cluster:
        for said in ("cannot connect", "not tried again at once"):
            with pytest.raises(KafkaUnavailableError, match=said):
                cluster.leader("t", 0)


def test_what_is_borrowed_is_given_back_and_closed_when_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    now, closed = [0.0], list[Cluster]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Cluster, "close", lambda cluster: closed.append(cluster))
    clusters = Clusters(lambda: Cluster("127.0.0.1:1"))
    with clusters.borrow() as one, clusters.borrow() as other:
        assert one is not other
    now[0] = 9.0
    with clusters.borrow(Deadline(5.0), request_timeout_s=1.0) as again:
        assert again is one, "the one that was used last"
        assert again.request_timeout_s == 1.0
    with clusters.borrow() as again:
        assert (again.request_timeout_s, again.deadline) == (30.0, None), "time-outs are those of one user alone"
    now[0] = 11.0
    clusters.trim()
    assert closed == [other]
    with clusters.borrow() as again:
        assert again is one
        now[0] = 25.0
    clusters.trim()
    assert closed == [other], "it was used until now"
    now[0] = 36.0
    clusters.trim()
    assert closed == [other, one]


class Told:
    """Stands for the connection to a broker: what it says about the cluster is its own view."""

    def __init__(self, view: View) -> None:
        self._view = view

    def usable(self) -> bool:
        return True

    def require(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def call(self, request: Any, _kind: object) -> Any:
        self._view.asked += 1
        if isinstance(request, FindCoordinatorRequest):
            return SimpleNamespace(
                coordinators=[
                    SimpleNamespace(error_code=ErrorCode.none, node_id=self._view.leader, host="1.0.0.1", port=1)
                ]
            )
        return SimpleNamespace(
            brokers=[SimpleNamespace(node_id=node, host=f"1.0.0.{node}", port=1) for node in NODES],
            topics=[
                SimpleNamespace(
                    name=topic.name,
                    topic_id=self._view.topic_id,
                    error_code=ErrorCode.none if self._view.topic_id else ErrorCode.unknown_topic_or_partition,
                    topic_authorized_operations=0,
                    partitions=[
                        SimpleNamespace(
                            partition_index=number,
                            leader_id=self._view.leader,
                            leader_epoch=self._view.epoch,
                            replica_nodes=NODES,
                            isr_nodes=NODES,
                        )
                        for number in range(self._view.partitions)
                    ],
                )
                for topic in request.topics
            ],
        )


@dataclass
class View:
    """What a broker believes."""

    leader: int
    epoch: int
    topic_id: str = "id"
    partitions: int = 1
    asked: int = 0


NODES = (1, 2, 3)
SERVERS = ",".join(f"1.0.0.{node}:1" for node in NODES)


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> dict[int, View]:
    """All brokers believe that the first leads."""
    found = {node: View(1, 1) for node in NODES}
    monkeypatch.setattr(Cluster, "_connect", lambda _self, broker, _deadline: Told(found[int(broker.host[-1])]))
    return found


def test_once_an_answer_was_wrong_another_broker_is_asked(views: dict[int, View]) -> None:
    """The first one is cut off from the others: it goes on believing that it leads."""
    cluster = Cluster(SERVERS)
    assert cluster.leader("t", 0) == 1
    assert cluster.coordinator(CoordinatorType.TRANSACTION, "id") == 1
    for node in (2, 3):
        views[node] = View(2, 2)
    cluster.forget_leader("t", 0)
    assert cluster.leader("t", 0) == 2
    cluster.forget_coordinator(CoordinatorType.TRANSACTION, "id")
    assert cluster.coordinator(CoordinatorType.TRANSACTION, "id") == 2


def test_a_coordinator_that_two_brokers_name_wrongly_is_found_at_the_third(views: dict[int, View]) -> None:
    cluster = Cluster(SERVERS)
    views[3] = View(3, 2)
    found = []
    for _ in NODES:
        found.append(cluster.coordinator(CoordinatorType.GROUP, "g"))
        cluster.forget_coordinator(CoordinatorType.GROUP, "g")
    assert found == [1, 1, 3]
    assert {node: view.asked for node, view in views.items()} == {1: 1, 2: 1, 3: 1}


def test_an_older_view_is_not_believed(views: dict[int, View]) -> None:
    cluster = Cluster(SERVERS)
    for view in views.values():
        view.leader, view.epoch = 2, 5
    assert cluster.leader("t", 0) == 2
    views[2] = View(1, 4)
    cluster.forget_leader("t", 0)
    with pytest.raises(CodeError, match="LEADER_NOT_AVAILABLE"):
        cluster.leader("t", 0)
    assert cluster.leader("t", 0) == 2, "of the next broker"


def test_a_leader_without_an_address_is_looked_up_elsewhere(views: dict[int, View]) -> None:
    cluster = Cluster(SERVERS)
    views[1] = View(4, 1)
    with pytest.raises(CodeError, match="LEADER_NOT_AVAILABLE"):
        cluster.leader("t", 0)
    assert cluster.leader("t", 0) == 1, "of the next broker"


def test_of_a_topic_that_was_made_again_everything_is_new(views: dict[int, View]) -> None:
    cluster = Cluster(SERVERS)
    for view in views.values():
        view.epoch = 5
    assert cluster.leader("t", 0) == 1
    for node in NODES:
        views[node] = View(3, 0, "another")
    cluster.forget_leader("t")
    assert cluster.leader("t", 0) == 3


@pytest.mark.parametrize("view", [view_each, view_topics])
@pytest.mark.parametrize("servers", [SERVERS, "1.0.0.1:1"])
def test_a_topic_that_one_broker_does_not_know_is_there_if_another_knows_it(
    views: dict[int, View], servers: str, view: Callable[..., Mapping[str, Any]]
) -> None:
    """The first one is cut off from the others since before the topic was made."""
    views[1].topic_id = ""
    assert view(Cluster(servers), ["t"], 5.0).keys() == {"t"}
    views[2].topic_id = views[3].topic_id = ""
    assert not view(Cluster(servers), ["t"], 5.0)


def moved_leader(views: dict[int, View]) -> tuple[Cluster, Cluster]:
    """Two that share a cache; the leader has moved since both asked the first broker, and one has noticed."""
    shared = MetadataCache()
    one, other = Cluster(SERVERS, cache=shared), Cluster(SERVERS, cache=shared)
    assert (one.leader("t", 0), other.leader("t", 0)) == (1, 1)
    for node in (2, 3):
        views[node] = View(2, 2)
    one.forget_leader("t", 0)
    return one, other


def test_what_one_cluster_learns_the_others_that_share_it_know(views: dict[int, View]) -> None:
    one, other = moved_leader(views)
    assert one.leader("t", 0) == other.known_leader("t", 0) == 2
    one.close()
    assert other.known_leader("t", 0) == 2, "what closes takes nothing from the others"
    other.forget_leader("t")
    assert one.known_leader("t", 0) is None


def test_an_old_answer_is_not_believed_by_those_who_share_a_newer_one(views: dict[int, View]) -> None:
    one, other = moved_leader(views)
    assert one.leader("t", 0) == 2
    one.forget_leader("t")
    with pytest.raises(CodeError):
        other.leader("t", 0)  # it has asked the first broker
    assert other.leader("t", 0) == 2


def test_the_leader_of_a_partition_that_was_added_is_looked_up(views: dict[int, View]) -> None:
    cluster = Cluster(SERVERS)
    assert cluster.leader("t", 0) == 1
    for view in views.values():
        view.leader, view.partitions = 2, 2
    queue = PartitionQueue[QueuedBatch](("t", 1), Lane())
    queue.pending.append(QueuedBatch())
    owner: Any = None  # it has nothing to decide
    dispatch = Dispatcher[QueuedBatch](cluster, owner, (1, 0), in_flight_max=1)
    dispatch.note(queue)
    dispatch.pump()
    dispatch.reach(nullcontext())
    assert set(dispatch.links) == {2}


def test_a_sender_that_ends_waits_for_one_broker_and_not_for_all(views: dict[int, View]) -> None:
    dialled: list[int] = []

    def dial(node: int) -> Any:
        dialled.append(node)
        dispatch.close()  # as its thread does, while this one waits for a broker
        return Told(views[node])

    owner: Any = None
    dispatch = Dispatcher[QueuedBatch](Cluster(SERVERS), owner, (1, 0), in_flight_max=1, dial=dial)
    dispatch._unreached = {1, 2, 3}
    dispatch.reach(nullcontext())
    assert (dialled, dispatch.links) == ([1], {})


def test_a_partition_that_was_added_is_found_at_a_broker_that_has_heard_of_it(views: dict[int, View]) -> None:
    """The first one is cut off from the others."""
    cluster = Cluster(SERVERS)
    assert cluster.leader("t", 0) == 1
    views[2].partitions = views[3].partitions = 2
    with pytest.raises(CodeError, match="UNKNOWN_TOPIC_OR_PARTITION"):
        cluster.leader("t", 1)
    assert cluster.leader("t", 1) == 1
    views[3].partitions = 3
    cluster.forget_leader("t", 2)
    assert not cluster.learn(["t"])
    assert cluster.known_leader("t", 2) == 1


def test_a_broker_that_refuses_us_keeps_us_from_no_other(
    views: dict[int, View], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its certificate has run out; it comes next once an answer of the first one was wrong."""
    believed = Cluster._connect

    def connect(self: Cluster, broker: Broker, deadline: Deadline | None) -> Any:
        if broker.host[-1] in refusing:
            raise AuthenticationError(f"cannot trust the certificate of {broker.host}")
        return believed(self, broker, deadline)

    monkeypatch.setattr(Cluster, "_connect", connect)
    refusing = {"2"}
    cluster = Cluster(SERVERS)
    assert cluster.leader("t", 0) == 1
    views[1] = views[3] = View(3, 2)
    for _ in range(2):
        cluster.forget_leader("t", 0)
        assert cluster.leader("t", 0) == 3
    refusing = {"1", "2", "3"}
    cluster.forget_leader("t", 0)
    with pytest.raises(AuthenticationError):
        cluster.leader("t", 0)


def test_a_broker_that_let_us_wait_in_vain_is_asked_last_by_all(
    views: dict[int, View], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be cut off from the others: then it cannot write what it is to answer, and its view is old."""
    monkeypatch.setattr(metadata, "_SILENT", {})
    views[2] = views[3] = View(2, 2)
    known = Cluster(SERVERS)
    assert known.leader("t", 0) == 1
    metadata._note_silence(Broker("1.0.0.1", 1))
    assert known.coordinator(CoordinatorType.TRANSACTION, "id") == 2, "it has a connection to the silent one"
    assert Cluster(SERVERS).leader("t", 0) == 2


def test_silence_is_told_and_a_short_time_out_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    silent: list[str] = []
    monkeypatch.setattr(connection, "_SILENCE_S", 0.2)
    monkeypatch.setattr(connection.Connection, "_introduce", lambda _: None)
    for patience_s in (0.01, 0.3):
        near, far = socket.socketpair()
        monkeypatch.setattr(connection.Connection, "_connect", lambda *_, near=near: near)
        asked = connection.Connection("broker", 1, on_silence=lambda: silent.append("told"))
        asked.deadline = Deadline(patience_s)
        with far, pytest.raises(ConnectionLostError, match="no answer in time"):
            asked.call(FindCoordinatorRequest(key_type=i8(0), coordinator_keys=("k",)), FindCoordinatorResponse)
        assert bool(silent) == (patience_s > 0.2)


@pytest.mark.parametrize("step", ["_send_all", "_read_frame"])
def test_a_connection_on_which_a_request_was_interrupted_is_used_no_more(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Its answer would be taken for that of the next request, whoever sends that."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(connection.Connection, "_introduce", lambda _: None)
    near, far = socket.socketpair()
    monkeypatch.setattr(connection.Connection, "_connect", lambda *_: near)
    asked = connection.Connection("broker", 1)
    monkeypatch.setattr(asked, step, interrupted)
    with far, closing(asked):
        with pytest.raises(KeyboardInterrupt):
            asked.call(FindCoordinatorRequest(key_type=i8(0), coordinator_keys=("k",)), FindCoordinatorResponse)
        assert not asked.usable()


def test_a_transaction_whose_connection_was_lost_sends_nothing_more_whoever_leads_by_now() -> None:
    """What another thread has learned must not lead the rest of it elsewhere without a word."""
    lost: Any = SimpleNamespace(alive=lambda: False, close=lambda: None, address="broker:1")
    session = ProduceSession(connections={1: lost})
    sender = transactions.SessionSender(
        Cluster("127.0.0.1:1"),
        session,
        ProducerFields("id", 1, 0),
        retry_timeout_ms=1_000,
        unknown_topic_timeout_ms=1_000,
        topic_timeout_ms=lambda _: 1_000,
        locked_timeout_s=1.0,
    )
    with pytest.raises(ConnectionLostError, match="was lost during a transaction"):
        sender.run(iter([("t", 0, b"")]))


def test_who_takes_a_transactional_id_over_waits_a_little_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    waits: list[float] = []
    taken = ProducerFields("id", 1, 0)

    def attempt(asked: Any) -> Any:
        waits.append(asked.deadline.timeout_s)
        if len(waits) < 4:
            raise KafkaUnavailableError("no answer in time")
        return ErrorCode.none, taken

    stand_in: Any = SimpleNamespace(
        coordinator=lambda *_: 1,
        connection=lambda _: SimpleNamespace(deadline=None, in_flight=0),
        deadline=None,
        bounded_s=lambda most_s: most_s,
        forget=lambda: None,
    )
    asking = transactions.Coordination(stand_in, "id", transaction_timeout_ms=1, retry_timeout_s=60.0)
    assert asking._patiently(lambda: asking._ask("init", {}, attempt, ProduceSession())) is taken
    assert waits == [5, 10, 20, 40]


def test_a_leader_that_takes_its_time_to_refuse_is_looked_up_again_at_once() -> None:
    """A broker that is cut off asks a coordinator for half a minute before it says NOT_ENOUGH_REPLICAS."""
    owner: Any = None
    dispatch = Dispatcher[QueuedBatch](Cluster(SERVERS), owner, (1, 0), in_flight_max=1)
    queue: Any = SimpleNamespace(target=("t", 0))
    now, passing = time.monotonic(), ErrorCode.not_enough_replicas
    assert not dispatch._keeps_failing(queue, passing, now)
    assert not dispatch._keeps_failing(queue, passing, now)
    assert dispatch._keeps_failing(queue, ErrorCode.concurrent_transactions, now - 30.0)
    assert not dispatch._keeps_failing(queue, ErrorCode.concurrent_transactions, now)


def test_nobody_asks_leaders_again_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deadlines, "TELL_S", 0.0)
    caplog.set_level(logging.INFO)
    code, place = ErrorCode.leader_not_available, ("t", 0)
    answers = iter([LeaderAnswers({}, {place: (code, False)}, {}), LeaderAnswers({place: 7}, {}, {})])
    monkeypatch.setattr(metadata, "ask_once", lambda *_: next(answers))
    question: Any = None
    assert ask_leaders(Cluster(SERVERS), [place], question, "read the end", Deadline(9.0)) == {place: 7}
    assert "retry.waiting action='read the end' waited_s=0 reason=topic t: LEADER_NOT_AVAILABLE" in caplog.text
    caplog.clear()

    limits = {"retry_timeout_s": 9.0, "unknown_topic_timeout_s": 9.0}
    for fault, why in (
        (CodeError(code, "topic t"), "LEADER_NOT_AVAILABLE"),
        (ConnectionLostError("hung up"), "hung up"),
    ):
        both: list[Exception | int] = [fault, 7]
        ends = iter(both)

        def ask(ends: Iterator[Exception | int] = ends) -> int:
            end = next(ends)
            if isinstance(end, int):
                return end
            raise end

        assert read_patiently(Cluster(SERVERS), "t", ask, "the end of topic", **limits) == 7
        assert f"retry.waiting action='read the end of topic t' waited_s=0 reason={why}" in caplog.text


def test_what_lasts_is_told_after_two_seconds_and_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    patience = deadlines.Patience(logging.getLogger("test"))
    for _ in range(60):
        patience.tell("do it", "nobody is there")
        now_s += 1.0
    assert [record.args[1] for record in caplog.records if isinstance(record.args, tuple)] == [
        2.0,
        4.0,
        8.0,
        16.0,
        32.0,
    ]


def test_who_forgets_looks_up_again_and_takes_nothing_from_the_others(views: dict[int, View]) -> None:
    shared = MetadataCache()
    one, other = Cluster(SERVERS, cache=shared), Cluster(SERVERS, cache=shared)
    assert one.leader("t", 0) == one.coordinator(CoordinatorType.TRANSACTION, "id") == 1
    for node in NODES:
        views[node] = View(2, 2)
    one.forget()
    assert one.known_leader("t", 0) is None
    assert other.known_leader("t", 0) == other.coordinator(CoordinatorType.TRANSACTION, "id") == 1
    assert one.leader("t", 0) == one.coordinator(CoordinatorType.TRANSACTION, "id") == 2
    assert other.known_leader("t", 0) == other.coordinator(CoordinatorType.TRANSACTION, "id") == 2


def test_partitions_that_were_added_are_counted_although_the_leaders_are_known(views: dict[int, View]) -> None:
    cluster = Cluster(SERVERS)
    assert cluster.leader("t", 0) == 1
    before = cluster.partition_count("t")
    for view in views.values():
        view.partitions = before + 1
    cluster.learn(["t"])
    assert cluster.partition_count("t") == before
    cluster.expire(["t"])
    cluster.learn(["t"])
    assert cluster.partition_count("t") == before + 1


def test_what_a_closed_pool_had_lent_is_closed_when_it_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = list[Cluster]()
    monkeypatch.setattr(Cluster, "close", lambda cluster: closed.append(cluster))
    clusters = Clusters(lambda: Cluster("127.0.0.1:1"))
    with clusters.borrow() as one:
        clusters.close()
    assert closed == [one]
    with clusters.borrow() as other:
        assert other is not one
    assert closed == [one]
