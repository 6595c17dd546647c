"""The memory of a group across leaders, and the answers that its leader gives, against the simulated world."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest

from coordinator.tests.makers import GROUP
from coordinator.tests.outcome_makers import ORDERS, House
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import FrameHeader, FrameKind
from rollbridge.buffer.table import State
from rollbridge.commitlog.outcomes import GONE
from rollbridge.errors import (
    InvalidRequestError,
    OutcomeExpiredError,
    TransactionNotFoundError,
    TransactionPreserverClosedError,
)
from rollbridge.metadata import paths
from rollbridge.metadata.client_sessions import HOUR_MS as LOOK_AGAIN_MS
from rollbridge.metadata.client_sessions import (
    KEPT_OF_OTHERS_MS,
    ClientSession,
    CooperativeState,
    CooperativeWork,
    SharedSession,
)
from rollbridge.metadata.records import Group
from rollbridge.metadata.requests import AdminAnswer, AdminRequest, RequestKind
from rollbridge_coordinator.commit.outcome_store import Absence
from rollbridge_coordinator.commit.outcomes import coalescing, forget_expired
from rollbridge_coordinator.core.effects import ReadChildren, ReadNodes
from rollbridge_coordinator.core.requests import answer_questions, handle_requests
from rollbridge_coordinator.history.sessions import load_sessions

HOUR_MS = 3_600_000


@pytest.fixture
def house() -> House:
    house = House()
    house.open()
    return house


def topic_id(house: House) -> str:
    return Group.from_json(house.world.nodes[paths.group(GROUP)]).terminated_topic_id


def test_a_new_group_has_forgotten_nothing_and_notes_its_topic(house: House) -> None:
    assert house.group.outcome_store is not None
    assert house.group.outcome_store.gone_below == 0
    assert topic_id(house) == house.world.topics[GROUP.terminated_topic].id


def test_the_next_leader_remembers_what_the_one_before_did(house: House) -> None:
    first, second = house.bench.one(ORDERS, 0), house.bench.abort(house.bench.begin(ORDERS, client="d"))
    house.end(first, second)
    third = house.bench.one(ORDERS, 0)
    house.end(third)
    assert coalescing(house.group) == 1.0
    before = house.group.outcome_store
    house.open()
    assert before is not None
    assert house.group.outcome_store is not None
    assert house.group.outcome_store.contents() == before.contents()
    positions = [item.position for items in before.contents().values() for item in items]
    assert sorted(positions) == [0, 1, 3], "a marker stands between the rounds"


def test_a_round_counts_what_it_appends_and_what_it_writes(house: House) -> None:
    house.end(*(house.bench.one(ORDERS, 0) for _ in range(4)))
    assert (house.group.counts["preserver_appended"], house.group.counts["preserver_flushed"]) == (4, 1)
    assert coalescing(house.group) == 0.25


def test_a_position_that_was_foretold_wrongly_is_put_right_in_the_same_round(house: House) -> None:
    house.end(house.bench.one(ORDERS, 0))
    house.group.predictor.log_end = 77
    item = house.bench.one(ORDERS, 0)
    house.end(item)
    house.open()
    assert house.group.counts["preserver_repeated"] == 1
    assert house.group.outcome_store is not None
    found = house.group.outcome_store.find(item.transaction_id)
    assert not isinstance(found, Absence)
    assert found[1].position == 2


def test_switched_off_nobody_tells_and_what_ended_meanwhile_is_forgotten_and_not_denied(house: House) -> None:
    before = house.bench.one(ORDERS, 0)
    house.end(before)
    house.open(transaction_meta_persist_count=0)
    assert house.group.outcome_store is None
    assert topic_id(house) == ""
    meanwhile = house.bench.one(ORDERS, 0)
    house.end(meanwhile)
    closed = house.ask(transaction=str(meanwhile.transaction_id))
    assert closed is not None
    assert closed.code == TransactionPreserverClosedError.code
    house.open()
    assert topic_id(house)
    for item, code in ((before, ""), (meanwhile, OutcomeExpiredError.code)):
        answer = house.ask(transaction=str(item.transaction_id))
        assert answer is not None
        assert answer.code == code
    later = house.ask(transaction=str(TransactionId.of(0, 5001)))
    assert later is not None
    assert later.code == TransactionNotFoundError.code, "its counter had not been given out"


@pytest.mark.parametrize("damage", ["deleted", "made again", "corrupt", "newer"])
def test_memory_that_is_lost_is_forgotten_and_not_denied(
    house: House, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    house.end(house.bench.one(ORDERS, 0))
    topic = GROUP.terminated_topic
    if damage in ("corrupt", "newer"):
        value = b"\xff\xff" if damage == "corrupt" else b"\3\0"
        house.world.topics[topic].entries[0].item = (b"c", value)
    else:
        del house.world.topics[topic]
    if damage == "made again":
        house.world.create(topic)
    house.open()
    assert house.group.outcome_store is not None
    assert house.group.outcome_store.gone_below == 5001
    assert {"corrupt": "cannot be read", "newer": "has version 2"}.get(damage, "forgotten") in caplog.text
    assert topic_id(house) == house.world.topics[topic].id
    house.open()
    assert house.group.outcome_store is not None
    assert house.group.outcome_store.gone_below == 5001


def test_what_is_due_is_forgotten_at_intervals(house: House) -> None:
    house.end(house.bench.one(ORDERS, 0), at_ms=0)
    group = house.group
    house.do(forget_expired(group, 300_000))
    assert group.outcome_store is not None
    assert len(group.outcome_store) == 1
    house.do(forget_expired(group, 72 * HOUR_MS))
    assert len(group.outcome_store) == 0
    assert group.counts["preserver_expired"] == 1
    assert list(house.world.latest(GROUP.terminated_topic)) == [GONE.encode()]
    house.end(house.bench.one(ORDERS, 0), at_ms=0)
    house.do(forget_expired(group, 72 * HOUR_MS + 299_999))
    assert len(group.outcome_store) == 1, "it is not looked again so soon"


def test_an_answer_waits_for_what_was_in_the_buffers(house: House) -> None:
    house.world.produce("sales.orders.transaction-buffer", ("key", "value"))
    house.world.produce("sales.orders.transaction-buffer", ("key", "value"))
    assert house.ask(transaction=str(TransactionId.of(0, 99))) is None
    house.bench.begin(ORDERS)
    assert house.answer() is None
    item = house.bench.begin(ORDERS)
    unknown = house.answer()
    assert unknown is not None
    assert unknown.code == TransactionNotFoundError.code
    known = house.ask(transaction=str(item))
    assert known is not None
    assert [found.state for found in known.transactions] == [State.OPEN]


def test_an_answer_waits_for_the_outcome_of_what_is_decided(house: House) -> None:
    item = house.bench.one(ORDERS, 0)
    assert house.ask(transaction=str(item.transaction_id)) is None
    assert house.ask(owner="c") is None
    assert house.ask(kind=RequestKind.FENCE, owner="c", owner_epoch=5) is None
    assert house.group.fold.fences.epoch_of("c") == 5
    house.end(item)
    house.do(answer_questions(house.group, 0))
    answers = [
        AdminAnswer.from_json(house.world.nodes[f"{paths.answers(GROUP)}/{name}"])
        for name in house.world.children(paths.answers(GROUP))
    ]
    assert [answer.ok for answer in answers] == [True] * 3
    assert [[found.state for found in answer.transactions] for answer in answers] == [[State.COMMITTED], [], []]
    assert not house.group.waits.questions


def test_an_answer_that_fits_into_no_node_is_refused_and_does_no_harm(house: House) -> None:
    identifier = house.bench.begin(ORDERS)
    for segment in range(20_000):
        house.bench.data(identifier, ORDERS, segment)
    answer = house.ask(transaction=str(identifier))
    assert answer is not None
    assert answer.code == InvalidRequestError.code
    listed = house.ask(owner="c")
    assert listed is not None
    assert [item.records for item in listed.transactions] == [20_000]


def test_a_request_that_can_not_be_removed_is_looked_at_once_and_others_are_answered(house: House) -> None:
    """Somebody has made a node below it."""
    name = house.world.request(GROUP, b"nonsense").rpartition("/")[2]
    stuck = f"{paths.requests(GROUP)}/{name}"
    house.world.ensure(f"{stuck}/child")
    for _ in range(3):
        house.do(handle_requests(house.group, 0))
        assert house.group.counts["requests_refused"] == 1
        assert house.group.waits.unanswered == {name}
        assert house.ask(owner="c") is not None
    house.world.nodes.pop(f"{stuck}/child")
    house.world.nodes.pop(stuck)
    house.do(handle_requests(house.group, 0))
    assert not house.group.waits.unanswered


def test_sessions_are_known_to_the_next_leader_and_forgotten_in_the_end(house: House) -> None:
    for name, registered_ms in (("old", 0), ("busy", 0), ("new", KEPT_OF_OTHERS_MS)):
        house.world.ensure(paths.session(GROUP, name))
        house.world.nodes[paths.session(GROUP, name)] = ClientSession(name, 7, registered_ms).to_json()
    work = CooperativeWork(
        series="q", number=1, transaction=TransactionId.of(0, 1), epoch=7, streams={ORDERS: 0}, lease_ms=1
    )
    joint = ClientSession("joint", 7, 2, SharedSession("run", (), work))
    house.world.ensure(paths.session(GROUP, "joint"))
    house.world.nodes[paths.session(GROUP, "joint")] = joint.to_json()
    loader = joint.with_work(replace(work, series="day-1", state=CooperativeState.COMMITTED), 0)
    loader = replace(loader.with_work(replace(work, series="day-2"), 0), client_name="loader")
    house.world.ensure(paths.session(GROUP, "loader"))
    house.world.nodes[paths.session(GROUP, "loader")] = loader.to_json()
    house.world.ensure(paths.session(GROUP, "damaged"))
    house.world.nodes[paths.session(GROUP, "damaged")] = b"{"
    house.do(load_sessions(house.group))
    fences = house.group.fold.fences
    assert [fences.epoch_of(name) for name in ("old", "busy", "new", "damaged")] == [7, 7, 7, 0]
    assert fences.replaying
    house.bench.begin(ORDERS, client="busy")
    house.search(KEPT_OF_OTHERS_MS + 1)
    assert house.world.children(paths.sessions(GROUP)) == ["busy", "damaged", "joint", "loader", "new"]
    assert fences.epoch_of("old") == 0
    house.world.nodes[paths.session(GROUP, "new")] = ClientSession("new", 8, 2 * KEPT_OF_OTHERS_MS).to_json()
    house.world.nodes[paths.session(GROUP, "joint")] = replace(joint, registered_ms=1).to_json()
    house.search(KEPT_OF_OTHERS_MS + 2 * LOOK_AGAIN_MS)
    assert house.world.children(paths.sessions(GROUP)) == ["busy", "damaged", "loader", "new"]


def test_a_session_under_the_name_of_another_client_fences_nobody(house: House) -> None:
    for name, session in (
        ("harriet", ClientSession("harriet", 7, 0)),
        ("mallory", ClientSession("harriet", 2**31 - 1, 0)),
    ):
        house.world.ensure(paths.session(GROUP, name))
        house.world.nodes[paths.session(GROUP, name)] = session.to_json()
    house.do(load_sessions(house.group))
    assert house.group.fold.fences.epoch_of("harriet") == 7


def test_records_of_sessions_fill_no_leader_however_large_they_are(house: House) -> None:
    count, filler = 1_000, "f" * 100_000
    path = paths.sessions(GROUP)

    def record(name: str) -> bytes:
        return ClientSession(name, 7, 0, SharedSession("run", forgotten=filler)).to_json()

    steps = load_sessions(house.group)
    assert next(steps) == ReadNodes((path,))
    assert steps.send({path: b""}) == ReadChildren((path,))
    tracemalloc.start()
    try:
        asked = steps.send({path: [f"client-{number}" for number in range(count)]})
        while isinstance(asked, ReadNodes) and asked.paths[0].startswith(path):
            asked = steps.send({item: record(item.rpartition("/")[2]) for item in asked.paths})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert house.group.fold.fences.epoch_of(f"client-{count - 1}") == 7
    assert peak < count * len(filler) / 5


def test_an_abort_that_an_earlier_leader_has_carried_out_is_not_denied(house: House) -> None:
    aborted, other, committed = (house.bench.begin(ORDERS) for _ in range(3))
    house.group.fold.request_abort(aborted.bytes, "in the way", 0)
    house.group.fold.request_abort(other.bytes, "client", 0)
    merged = house.bench.commit(committed, {})
    house.end(*(house.group.fold.open[item.bytes] for item in (aborted, other)), merged)

    def abort(identifier: TransactionId) -> AdminAnswer:
        body = AdminRequest(
            kind=RequestKind.ABORT_TRANSACTION, transaction=str(identifier), reason="in the way", created_ms=0
        )
        path = house.world.request(GROUP, body.to_json())
        house.do(handle_requests(house.group, 0))
        house.do(answer_questions(house.group, 0))
        return AdminAnswer.from_json(house.world.nodes[path])

    for identifier, reason in ((aborted, "in the way"), (other, "client")):
        answer = abort(identifier)
        assert (answer.ok, answer.transactions[0].reason) == (True, reason)
    assert abort(committed).code == "already-committed"
    assert abort(TransactionId.of(0, 1 << 90)).code == "transaction-not-found"
    assert house.group.outcome_store is not None
    house.group.outcome_store.gone_below = 1 << 91
    assert abort(TransactionId.of(0, 1 << 90)).code == "outcome-expired"
    house.group.outcome_store = None
    assert abort(aborted).code == "transaction-preserver-closed"


def test_what_has_arrived_of_an_open_transaction_is_told_with_its_look_up(house: House) -> None:
    bench = house.bench
    identifier = bench.begin(ORDERS)
    bench.data(identifier, ORDERS, 0, records=2, size=100)
    part = FrameHeader(FrameKind.DATA, identifier.bytes, 3, 0, 0, 5)
    bench.feed(ORDERS, part, b"x" * 70)
    answer = house.ask(transaction=str(identifier))
    assert answer is not None
    [known] = answer.transactions
    assert answer.arrived is not None
    assert (known.records, answer.arrived.others) == (2, 5), "parts of other processes are not its owner's"
    assert answer.arrived.bytes == 100
    everybody = house.ask(owner=known.client_name)
    assert everybody is not None
    assert everybody.arrived is None
