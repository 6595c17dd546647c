"""Who is set aside when a round is refused: one transaction, one stream, or nobody; and how streams get well again."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

import pytest

from coordinator.tests.makers import Bench
from rollbridge.base.effects import AnyEffect, run
from rollbridge.buffer.state import BufferedTransaction
from rollbridge.buffer.table import State
from rollbridge.metadata.changes import SUSPENDED, TOPIC_DELETED, StreamFault
from rollbridge.stream.group_offsets import GroupOffsets
from rollbridge_coordinator.commit.merge import items_of, merge_direct
from rollbridge_coordinator.commit.plan import targets
from rollbridge_coordinator.commit.refusals import absorb, give_up_waiting
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.waits import LEFT_OUT_S, REST_FIRST_MS, REST_MAX_MS, BlockedStreams, Suspects

ORDERS, OTHER = "sales/orders", "sales/other"
NOW_MS = 10_000


class Kafka:
    """Answers what a round asks for; batches with a frame of a guilty transaction are refused."""

    def __init__(self, guilty: Container[bytes] = (), owners: Sequence[bytes] = (), items: fx.Items = ()) -> None:
        self.guilty = guilty
        self.owner = {id(frame): owner for (_, frame), owner in zip(items, owners, strict=True)}
        self.wrong: dict[str, str] = {}
        self.merges: list[int] = []
        self.written: list[str] = []

    def __call__(self, effect: AnyEffect) -> Any:
        match effect:
            case fx.CommitRound():
                return NOW_MS
            case fx.MergeFrames(items):
                self.merges.append(len(items))
                if any(self.owner[id(frame)] in self.guilty for _, frame in items):
                    raise refusal(effect, items[0][0][0], range(len(items)))
                return list(range(len(items)))
            case fx.MendTopics():
                return self.wrong
            case fx.ReadNodes(paths):
                return dict.fromkeys(paths)
            case fx.Write(operations):
                self.written += [item.path for item in operations]
                return True
            case fx.CommitRound():
                return NOW_MS
        return None


def refusal(
    effect: AnyEffect, topic: str | None, places: Sequence[int] = (), code: str = "INVALID_RECORD"
) -> fx.EffectRefusedError:
    return fx.EffectRefusedError(effect, "no", code=code, topic=topic, places=tuple(places))


class Round:
    """Transactions of one record each, all for the only segment of one stream."""

    def __init__(self, count: int) -> None:
        self.bench = Bench({ORDERS: 1, OTHER: 1})
        for _ in range(count):
            self.bench.one(ORDERS, 0)
        self.group = self.bench.group
        self.transactions: list[BufferedTransaction] = list(self.group.fold.decided.values())
        self.items, self.ends = items_of(self.transactions, targets(self.group))
        self.owners = [item.id for item in self.transactions]

    @property
    def topic(self) -> str:
        return self.items[0][0][0]

    def kafka(self, *guilty: int) -> Kafka:
        return Kafka({self.owners[place] for place in guilty}, self.owners, self.items)

    def absorb(self, kafka: Kafka, refused: fx.EffectRefusedError, *, may_wait: bool = True) -> bool:
        again = run(
            absorb(self.group, self.transactions, self.items, self.ends, refused, NOW_MS, may_wait=may_wait), kafka
        )
        assert isinstance(again, bool)
        return again

    def aborted(self) -> list[int]:
        return [place for place, item in enumerate(self.transactions) if item.state is State.ABORTING]


@pytest.mark.parametrize("guilty", [0, 1, 20, 38, 39])
def test_halving_finds_the_one_frame_at_fault_in_as_many_appends_as_their_number_has_bits(guilty: int) -> None:
    scene = Round(40)
    kafka = scene.kafka(guilty)
    topic = scene.topic
    assert scene.absorb(kafka, refusal(fx.MergeFrames(tuple(scene.items)), topic, range(40)))
    assert scene.aborted() == [guilty]
    assert "INVALID_RECORD" in scene.transactions[guilty].reason
    assert len(kafka.merges) <= (40).bit_length() + 1
    assert not scene.group.waits.faults


def test_of_two_frames_at_fault_each_is_found_in_its_turn() -> None:
    scene = Round(8)
    kafka = scene.kafka(2, 5)
    for _ in range(2):
        left = [place for place in range(8) if place not in scene.aborted()]
        refused = refusal(fx.MergeFrames(tuple(scene.items)), scene.topic, left)
        assert scene.absorb(kafka, refused)
    assert scene.aborted() == [2, 5]


def test_a_frame_that_kafka_names_is_not_looked_for() -> None:
    scene = Round(8)
    kafka = scene.kafka(3)
    assert scene.absorb(kafka, refusal(fx.MergeFrames(tuple(scene.items)), scene.topic, [3]))
    assert scene.aborted() == [3]
    assert not kafka.merges


def test_a_broker_that_stumbled_has_to_stumble_again_over_the_frame_alone() -> None:
    scene = Round(4)
    refused = refusal(fx.MergeFrames(tuple(scene.items)), scene.topic, [1], fx.STUMBLED)
    assert scene.absorb(scene.kafka(1), refused)
    assert scene.aborted() == [1]
    scene = Round(4)
    assert not scene.absorb(scene.kafka(), refused)
    assert not scene.aborted()
    assert "taken alone" in scene.group.waits.faults.items()[0][1].reason


def test_a_topic_that_was_reconfigured_is_at_fault_and_no_frame() -> None:
    scene = Round(4)
    kafka, topic = scene.kafka(), scene.topic
    kafka.wrong = {topic: "max.message.bytes is 1000"}
    assert not scene.absorb(kafka, refusal(fx.MergeFrames(tuple(scene.items)), topic, range(4)))
    assert not scene.aborted()
    ((name, fault),) = scene.group.waits.faults.items()
    assert name == ORDERS
    assert "max.message.bytes is 1000" in fault.reason
    assert kafka.written == ["/scopes/sales/streams/orders/fault"]


def test_where_nothing_can_wait_the_transactions_of_the_topic_are_refused() -> None:
    scene = Round(2)
    refused = refusal(fx.MergeFrames(tuple(scene.items)), scene.topic)
    assert scene.absorb(scene.kafka(), refused, may_wait=False)
    assert scene.aborted() == [0, 1]


def test_what_the_commit_log_refuses_ends_the_term() -> None:
    scene = Round(2)
    with pytest.raises(fx.EffectRefusedError):
        scene.absorb(scene.kafka(), refusal(fx.AppendControl("log", ()), "log"))
    with pytest.raises(fx.EffectRefusedError):
        scene.absorb(scene.kafka(), refusal(fx.Seal((("t", 0),)), "t"))
    assert not scene.aborted()


def test_a_native_transaction_that_is_refused_as_a_whole_is_done_one_by_one_and_then_given_up() -> None:
    scene = Round(2)
    refused = refusal(fx.CommitRound(), None)
    assert not scene.absorb(scene.kafka(), refused), "planned anew, one by one"
    assert not scene.aborted()
    single = scene.transactions[1]
    items, ends = items_of([single], targets(scene.group))
    steps = absorb(scene.group, [single], items, ends, refused, NOW_MS, may_wait=True)
    assert run(steps, scene.kafka())
    assert scene.aborted() == [1]
    assert "longer than a native transaction may" in single.reason


def test_the_innocents_of_a_refused_round_are_committed_by_it() -> None:
    scene = Round(5)
    kafka = scene.kafka(3)

    def answer(effect: AnyEffect) -> Any:
        if isinstance(effect, fx.AppendControl):
            logged.append([record.kind.name for record in effect.records])
            return list(range(len(effect.records)))
        return kafka(effect)

    logged: list[list[str]] = []
    run(merge_direct(scene.group, scene.transactions, NOW_MS), answer)
    assert logged == [["COMMIT", "COMMIT", "COMMIT", "ABORT", "COMMIT"]]
    assert scene.group.counts["transactions_committed"] == 4
    assert scene.group.counts["transactions_refused"] == 1
    assert not scene.group.fold.open


def test_where_offsets_were_refused_in_the_same_round_the_frame_at_fault_is_found_all_the_same() -> None:
    """Kafka's answer counts the frames that were sent, and those of a transaction that was refused before were not."""
    scene = Round(0)
    replaced = scene.bench.one(ORDERS, 0, offsets=[GroupOffsets("readers", {("t", 0): 1}, 0, "m")])
    scene.transactions = [replaced, *(scene.bench.one(ORDERS, 0) for _ in range(4))]
    scene.items, _ = items_of(scene.transactions, targets(scene.group))
    scene.owners = [item.id for item in scene.transactions]
    kafka = scene.kafka(4)

    def answer(effect: AnyEffect) -> Any:
        match effect:
            case fx.SendOffsets():
                return 0, "replaced by others"
            case fx.AppendControl(_, records):
                logged.extend((record.kind.name, record.reason.partition(":")[0]) for record in records)
                return range(len(records))
        return kafka(effect)

    logged: list[tuple[str, str]] = []
    run(merge_direct(scene.group, scene.transactions, NOW_MS), answer)
    assert logged == [("ABORT", "replaced by others"), *[("COMMIT", "")] * 3, ("ABORT", "refused by Kafka")]
    assert not scene.group.waits.faults


FAULT = StreamFault("no", "INVALID_RECORD", "t", 0)


def test_the_log_says_of_a_lost_topic_that_commits_end_as_aborted() -> None:
    faults = BlockedStreams()
    faults.note(ORDERS, FAULT, 0)
    faults.note(OTHER, StreamFault("topic e.gone was deleted", TOPIC_DELETED, "e.gone", 0), 0)
    assert faults.news == [
        f"stream {ORDERS} is in an error state, its transactions wait: no",
        f"stream {OTHER} is in an error state, its commits end as aborted: topic e.gone was deleted",
    ]


def test_a_stream_is_tried_ever_less_often_until_it_works() -> None:
    faults, now_ms, pauses = BlockedStreams(), 0, []
    assert faults.note(ORDERS, FAULT, now_ms)
    for _ in range(10):
        before = now_ms
        while not faults.due(now_ms):
            now_ms += REST_FIRST_MS
        pauses.append(now_ms - before)
        faults.lift(ORDERS)
        assert faults.first_of([OTHER, ORDERS]) is None
        assert faults.note(ORDERS, FAULT, now_ms)
    assert pauses[:4] == [REST_FIRST_MS * factor for factor in (1, 2, 4, 8)]
    assert pauses[-1] == REST_MAX_MS
    assert len(faults.news) == 1, "said once"
    faults.lift(ORDERS)
    faults.worked([OTHER])
    assert len(faults.news) == 1
    faults.worked([ORDERS])
    assert faults.news[1:] == [f"stream {ORDERS} has left its error state"]
    assert faults.note(ORDERS, FAULT, now_ms)
    assert not faults.due(now_ms + REST_FIRST_MS - 1)
    assert faults.due(now_ms + REST_FIRST_MS) == [ORDERS]
    assert faults.due(now_ms - 1) == [ORDERS], "the clock was set back"


def test_what_an_earlier_leader_noted_is_tried_at_once_and_what_is_deleted_never() -> None:
    faults = BlockedStreams()
    faults.restore(ORDERS, FAULT)
    assert faults.first_of([OTHER, ORDERS]) == ORDERS
    assert faults.due(0) == [ORDERS]
    assert not faults.note(ORDERS, FAULT, 0), "nothing new"
    assert not faults.due(0)
    faults.forget(ORDERS)
    assert not faults
    assert not faults.due(10 * REST_MAX_MS)


@pytest.mark.parametrize(("code", "state"), [("ANY_OTHER", State.ABORTING), (SUSPENDED, State.COMMITTING)])
def test_what_waits_for_a_stream_ends_with_its_lease_unless_native_transactions_are_in_the_way(
    code: str, state: State
) -> None:
    bench = Bench({ORDERS: 1})
    transaction = bench.one(ORDERS, 0)
    fault = replace(FAULT, code=code)
    bench.group.waits.faults.restore(ORDERS, fault)
    give_up_waiting(bench.group, transaction.deadline_ms + 1)
    assert transaction.state is State.COMMITTING, "it is tried again first"
    bench.group.waits.faults.note(ORDERS, fault, bench.clock_ms)
    give_up_waiting(bench.group, transaction.deadline_ms)
    assert transaction.state is State.COMMITTING
    give_up_waiting(bench.group, transaction.deadline_ms + 1)
    assert transaction.state is state


def test_a_buffer_that_two_takeovers_in_a_row_cannot_read_is_left_out_for_a_while() -> None:
    suspects = Suspects()
    suspects.note("a", "damaged", 0.0)
    suspects.note("b", "silent", 0.0)
    assert not suspects.left_out(0.0)
    suspects.all_read()
    suspects.note("a", "damaged", 1.0)
    assert not suspects.left_out(1.0), "it was read in between"
    suspects.note("a", "still damaged", 2.0)
    assert suspects.left_out(2.0) == {"a": "still damaged"}
    suspects.all_read()
    assert suspects.left_out(2.0 + LEFT_OUT_S - 1) == {"a": "still damaged"}
    assert not suspects.left_out(2.0 + LEFT_OUT_S), "tried again by the next takeover"
    suspects.note("a", "damaged", 2.0 + LEFT_OUT_S)
    assert not suspects.left_out(2.0 + LEFT_OUT_S)
