"""What a leader remembers of terminated transactions: appended, flushed, restored, forgotten."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.base.ids import COUNTER_MAX, TransactionId
from rollbridge.base.mapper import FRONT
from rollbridge.commitlog.outcomes import GONE, RETAIN_DEFAULT, Terminated, decode_terminated, encode_terminated
from rollbridge.errors import CorruptDataError
from rollbridge_coordinator.commit.outcome_store import (
    ITEMS_HARMLESS,
    RECORD_BYTES_MAX,
    Absence,
    Draft,
    OutcomeStore,
)
from rollbridge_schemas import codec

HOUR_MS = 3_600_000


def ended(counter: int, *, at_ms: int = 0, retain_ms: int = RETAIN_DEFAULT, label: str | None = None) -> Terminated:
    return Terminated(TransactionId.of(1, counter), counter % 3 != 0, -1, counter, at_ms, retain_ms, label, "")


class Topic:
    """The compacted topic, and a preserver that writes to it."""

    def __init__(self, count: int = 3, hours: int = 1, total: int = 1_000) -> None:
        self.limits = (count, hours, total)
        self.outcome_store = OutcomeStore(count, hours, total)
        self.records: dict[bytes, bytes] = {}
        self.position = 0

    def round(self, *appended: tuple[str, Terminated]) -> Draft:
        """Append, flush, write, adopt."""
        placed = [(client, item._replace(position=self.position + at)) for at, (client, item) in enumerate(appended)]
        self.position += len(appended) + 1
        draft = self.outcome_store.flush(placed)
        self.write(draft)
        return draft

    def write(self, draft: Draft) -> None:
        """Write and adopt."""
        for key, value in draft.records:
            self.records.pop(key, None)
            if value is not None:
                self.records[key] = value
        self.outcome_store.adopt(draft)

    def restored(self) -> OutcomeStore:
        """What the next leader remembers."""
        fresh = OutcomeStore(*self.limits)
        assert fresh.restore(self.records) == []
        return fresh


def test_a_round_writes_each_client_once_however_many_of_its_transactions_it_ends() -> None:
    topic = Topic()
    draft = topic.round(("a", ended(1)), ("b", ended(2)), ("a", ended(3)))
    assert [key for key, _ in draft.records] == [b"a", b"b"]
    assert draft.appended == 3
    assert [(item.transaction.counter, item.position) for item in topic.outcome_store.contents()["a"]] == [
        (1, 0),
        (3, 2),
    ]
    assert topic.outcome_store.find(ended(2).transaction) == ("b", topic.outcome_store.contents()["b"][0])


def test_a_draft_that_is_not_adopted_leaves_nothing_behind() -> None:
    topic = Topic()
    topic.outcome_store.flush([("a", ended(1))])
    assert topic.outcome_store.contents() == {}
    assert topic.outcome_store.find(ended(1).transaction) is Absence.UNKNOWN


def test_the_latest_ones_are_kept_and_what_is_dropped_raises_the_horizon_of_its_client_only() -> None:
    topic = Topic(count=2)
    for counter in (10, 20, 30):
        topic.round(("a", ended(counter)))
    topic.round(("b", ended(5)))
    assert [item.transaction.counter for item in topic.outcome_store.contents()["a"]] == [20, 30]
    for outcome_store in (topic.outcome_store, topic.restored()):
        assert outcome_store.find(TransactionId.of(1, 10)) is Absence.FORGOTTEN
        assert outcome_store.find(TransactionId.of(1, 10), "a") is Absence.FORGOTTEN
        assert outcome_store.find(TransactionId.of(1, 10), "b") is Absence.UNKNOWN
        assert outcome_store.find(TransactionId.of(1, 11), "a") is Absence.UNKNOWN
        assert outcome_store.find(TransactionId.of(1, COUNTER_MAX)) is Absence.UNKNOWN


def test_a_record_stays_small_enough_to_be_written_whatever_the_labels() -> None:
    topic = Topic(count=10_000)
    longest = "\N{HAMSTER FACE}" * 1_000
    topic.round(*(("a", ended(counter, label=longest)._replace(reason=longest)) for counter in range(1, 601)))
    kept = [item.transaction.counter for item in topic.outcome_store.contents()["a"]]
    assert ITEMS_HARMLESS < len(kept) < 600
    assert kept[-1] == 600
    assert len(topic.records[b"a"]) <= RECORD_BYTES_MAX + 100
    assert topic.restored().find(TransactionId.of(1, kept[0] - 1), "a") is Absence.FORGOTTEN


def test_a_retention_of_nothing_keeps_nothing_but_is_known_to_have_been() -> None:
    topic = Topic()
    topic.round(("a", ended(7, retain_ms=0)))
    assert topic.outcome_store.find(TransactionId.of(1, 7)) is Absence.FORGOTTEN
    assert topic.outcome_store.find(TransactionId.of(1, 8)) is Absence.UNKNOWN
    assert topic.restored().find(TransactionId.of(1, 7), "a") is Absence.FORGOTTEN


def test_the_latest_transaction_with_a_label_is_found() -> None:
    topic = Topic(count=3)
    topic.round(("a", ended(1, label="x")), ("a", ended(2, label="x")), ("a", ended(3, label="y")))
    found = topic.outcome_store.labelled("a", "x")
    assert isinstance(found, Terminated)
    assert found.transaction.counter == 2
    assert topic.outcome_store.labelled("a", "z") is Absence.UNKNOWN
    assert topic.outcome_store.labelled("b", "x") is Absence.UNKNOWN
    topic.round(("a", ended(4)))
    assert topic.outcome_store.labelled("a", "z") is Absence.FORGOTTEN


def test_what_is_due_is_forgotten_and_names_of_which_nothing_is_left_get_a_tombstone() -> None:
    topic = Topic(hours=1)
    topic.round(("a", ended(1, at_ms=0)), ("a", ended(2, at_ms=10)), ("b", ended(3, at_ms=0, retain_ms=5)))
    topic.round(("c", ended(4, at_ms=0, retain_ms=10 * HOUR_MS)))
    assert topic.outcome_store.expire(4) is None
    draft = topic.outcome_store.expire(5)
    assert draft is not None
    assert draft.records == [(GONE.encode(), encode_terminated((), 4)), (b"b", None)]
    topic.write(draft)
    last = topic.outcome_store.expire(HOUR_MS)
    assert last is not None
    topic.write(last)
    for outcome_store in (topic.outcome_store, topic.restored()):
        assert {client: len(items) for client, items in outcome_store.contents().items()} == {"a": 1, "c": 1}
        assert outcome_store.find(TransactionId.of(1, 1), "a") is Absence.FORGOTTEN
        assert outcome_store.find(TransactionId.of(1, 3)) is Absence.FORGOTTEN
        assert outcome_store.find(TransactionId.of(1, 3), "never-heard-of") is Absence.FORGOTTEN
        assert outcome_store.find(TransactionId.of(1, 4), "c") != Absence.FORGOTTEN
    assert topic.outcome_store.expire(HOUR_MS) is None, "nothing is written again"


def test_of_more_than_a_group_may_remember_the_oldest_go() -> None:
    topic = Topic(count=100, total=20)
    for number in range(20):
        topic.round((f"client-{number % 7}", ended(number + 1, at_ms=number)))
    assert topic.outcome_store.expire(20) is None
    topic.round(("late", ended(21, at_ms=20)))
    assert topic.outcome_store.is_crowded
    draft = topic.outcome_store.expire(21)
    assert draft is not None
    assert sorted(item.transaction.counter for item in draft.removed) == [1, 2, 3]
    topic.write(draft)
    assert topic.outcome_store.expire(21) is None
    for outcome_store in (topic.outcome_store, topic.restored()):
        assert outcome_store.find(ended(3).transaction) is Absence.FORGOTTEN
        assert outcome_store.find(ended(4).transaction) != Absence.FORGOTTEN
        assert outcome_store.find(ended(22).transaction) is Absence.UNKNOWN


def test_a_name_that_only_has_a_horizon_goes_with_the_next_check() -> None:
    topic = Topic()
    topic.round(("a", ended(7, retain_ms=0)))
    draft = topic.outcome_store.expire(0)
    assert draft is not None
    topic.write(draft)
    assert list(topic.records) == [GONE.encode()]
    assert topic.restored().find(TransactionId.of(1, 7), "a") is Absence.FORGOTTEN


def test_records_that_can_not_be_read_are_left_out_and_named() -> None:
    topic = Topic()
    topic.round(("a", ended(1)), ("b", ended(2)))
    fresh = OutcomeStore(3, 1, 1_000)
    faults = fresh.restore({**topic.records, b"b": b"\xff\xff", b"\xff": b"\0\0\0"})
    assert [fault.split(":")[0] for fault in faults] == ["client b'b'", "client b'\\xff'"]
    assert list(fresh.contents()) == ["a"]
    fresh.adopt(fresh.raise_horizon(100))
    assert fresh.find(TransactionId.of(1, 2)) is Absence.FORGOTTEN


transactions = st.builds(
    Terminated,
    transaction=st.builds(TransactionId.of, st.integers(0, 65_535), st.integers(0, COUNTER_MAX)),
    committed=st.booleans(),
    position=st.integers(0, 1 << 62),
    records=st.integers(0, 1 << 62),
    decided_ms=st.integers(0, 1 << 42),
    retain_ms=st.integers(-1, 1 << 42),
    label=st.none() | st.text(max_size=20),
    reason=st.text(max_size=20),
)


@given(st.lists(transactions, max_size=5), st.integers(0, COUNTER_MAX))
def test_a_clients_record_round_trips_and_is_what_the_schema_says(items: list[Terminated], horizon: int) -> None:
    raw = encode_terminated([item.encode() for item in items], horizon)
    assert decode_terminated(raw) == (tuple(items), horizon)
    assert raw[:1] == FRONT
    assert codec("terminated_transactions").encode(codec("terminated_transactions").decode(raw[1:])) == raw[1:]


@pytest.mark.parametrize(
    "raw", [b"", b"\0", b"\1\0\0", b"\0\1\0", b"\1\1\0\6\0\0", b"\3" + encode_terminated((), 3)[1:]]
)
def test_what_is_no_record_is_refused(raw: bytes) -> None:
    with pytest.raises(CorruptDataError):
        decode_terminated(raw)


steps = st.lists(
    st.one_of(
        st.lists(
            st.tuples(st.sampled_from("abc"), st.sampled_from([RETAIN_DEFAULT, 0, 50, 500])), min_size=1, max_size=4
        ),
        st.integers(1, 400),
    ),
    max_size=25,
)


@given(steps)
def test_whatever_happens_the_topic_says_what_the_leader_remembers_and_nothing_known_is_denied(
    story: list[list[tuple[str, int]] | int],
) -> None:
    topic = Topic(count=3)
    numbers = itertools.count(1)
    now_ms = 0
    ever: dict[int, str] = {}
    for event in story:
        if isinstance(event, int):
            now_ms += event
            draft = topic.outcome_store.expire(now_ms)
            if draft is not None:
                topic.write(draft)
        else:
            fresh = [(client, ended(next(numbers), at_ms=now_ms, retain_ms=retain)) for client, retain in event]
            ever.update((item.transaction.counter, client) for client, item in fresh)
            topic.round(*fresh)
        restored = topic.restored()
        assert restored.contents() == topic.outcome_store.contents()
        assert restored.gone_below == topic.outcome_store.gone_below
        for counter, client in ever.items():
            for asked in ("", client):
                found = restored.find(TransactionId.of(1, counter), asked)
                assert found == topic.outcome_store.find(TransactionId.of(1, counter), asked)
                assert found is not Absence.UNKNOWN, "it did end"
        assert restored.find(TransactionId.of(1, len(ever) + 1)) is Absence.UNKNOWN
        assert all(len(items) <= 3 for items in restored.contents().values())


def test_ids_that_nobody_gave_out_raise_no_horizon() -> None:
    outcome_store = OutcomeStore(1, 72, 100)
    outcome_store.believe(lambda transaction: TransactionId.from_bytes(transaction).counter < 1_000, 1_000)
    forged = (ended(5)._replace(transaction=TransactionId.of(1, COUNTER_MAX - number)) for number in range(2))
    for number, item in enumerate((ended(5), next(forged), ended(8), next(forged)._replace(retain_ms=0))):
        outcome_store.adopt(outcome_store.flush([("a", item._replace(position=number))]))
    assert outcome_store.find(TransactionId.of(1, 5), "a") is Absence.FORGOTTEN
    assert outcome_store.find(TransactionId.of(1, 900), "a") is Absence.UNKNOWN


def test_a_horizon_that_a_forged_id_has_raised_is_lowered_to_what_was_given_out() -> None:
    """As an earlier version may have written it."""
    outcome_store = OutcomeStore(1, 72, 100)
    huge = (1 << 96) - 1
    records = {key.encode(): encode_terminated((), huge) for key in (GONE, "a")}
    assert outcome_store.restore(records) == []
    assert outcome_store.find(TransactionId.of(1, 2_000)) is Absence.FORGOTTEN
    outcome_store.believe(lambda _: True, 1_000)
    assert outcome_store.find(TransactionId.of(1, 999)) is Absence.FORGOTTEN
    assert outcome_store.find(TransactionId.of(1, 2_000)) is Absence.UNKNOWN
    assert outcome_store.find(TransactionId.of(1, 2_000), "a") is Absence.UNKNOWN
