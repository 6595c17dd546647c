"""The state machine of one transactional id: complete, and as Kafka's coordinator has it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.base.errors import InvalidNameError
from rollbridge.stream.names import check_client_name
from rollbridge_gateway.producer.table import (
    ABORTED_BY_PRODUCER,
    EPOCH_MAX,
    TABLE,
    TRANSACTIONAL_ID_BYTES_MAX,
    UNACKNOWLEDGED,
    KnownEnd,
    Pair,
    PairEnd,
    Previous,
    ProducerPhase,
    ProducerState,
    Request,
    Step,
    client_name,
    first_pair,
    found,
    is_of,
    is_ours,
    next_pair,
    pair_of,
    transactional_id,
)

PID = (1 << 62) + 5
PAIR, BEFORE, OLDER = Pair(PID, 7), Pair(PID, 6), Pair(PID, 5)


def test_every_state_knows_every_request() -> None:
    assert set(TABLE) == set(itertools.product(ProducerPhase, Request))


@pytest.mark.parametrize("state", ProducerPhase)
def test_an_end_the_other_way_is_never_carried_out(state: ProducerPhase) -> None:
    """Whatever was decided stands: no request undoes it, and none has both answers."""
    if state in (ProducerPhase.COMMITTED, ProducerPhase.COMMITTING):
        steps = {TABLE[state, Request.ABORT_V1], TABLE[state, Request.ABORT_V2]}
    elif state in (ProducerPhase.ABORTED, ProducerPhase.ABORTING):
        steps = {TABLE[state, Request.COMMIT_V1], TABLE[state, Request.COMMIT_V2]}
    else:
        return
    assert steps == {Step.INVALID}


def test_after_a_loss_the_producer_aborts_and_goes_on() -> None:
    lost = {request: TABLE[ProducerPhase.LOST, request] for request in Request}
    assert {lost[Request.ABORT_V1], lost[Request.ABORT_V2], lost[Request.RENEW]} == {Step.DONE, Step.RENEW}
    assert {step for request, step in lost.items() if step not in (Step.DONE, Step.RENEW)} == {Step.ABORTABLE}


@pytest.mark.parametrize("state", [state for state in ProducerPhase if state is not ProducerPhase.OPEN])
def test_nothing_is_written_but_into_an_open_transaction(state: ProducerPhase) -> None:
    for request in (Request.ADD, Request.WRITE_V1, Request.WRITE_V2):
        assert TABLE[state, request] is not Step.GO


@pytest.mark.parametrize("state", [ProducerPhase.COMMITTED, ProducerPhase.ABORTED])
def test_with_v2_a_pair_is_over_with_its_transaction(state: ProducerPhase) -> None:
    assert TABLE[state, Request.WRITE_V2] is Step.STALE
    assert TABLE[state, Request.ADD] is Step.BEGIN  # with v1 it is not


@pytest.mark.parametrize(
    ("end", "request_", "step"),
    [
        (PairEnd.COMMIT, Request.COMMIT_V2, Step.DONE),
        (PairEnd.COMMIT, Request.ABORT_V2, Step.INVALID),
        (PairEnd.ABORT, Request.ABORT_V2, Step.DONE),
        (PairEnd.ABORT, Request.COMMIT_V2, Step.INVALID),
        (PairEnd.RENEWED, Request.RENEW, Step.DONE),
        (PairEnd.RENEWED, Request.COMMIT_V2, Step.STALE),
        (PairEnd.COMMIT, Request.COMMIT_V1, Step.STALE),
        (PairEnd.COMMIT, Request.WRITE_V2, Step.STALE),
        (PairEnd.COMMIT, Request.RENEW, Step.DONE),
        (PairEnd.ABORT, Request.RENEW, Step.DONE),
    ],
)
@pytest.mark.parametrize("state", [ProducerPhase.EMPTY, ProducerPhase.OPEN, ProducerPhase.COMMITTED])
def test_a_lost_answer_is_given_again_for_the_pair_before(
    end: PairEnd, request_: Request, step: Step, state: ProducerPhase
) -> None:
    producer = ProducerState(PAIR, state, Previous(BEFORE, end))
    assert producer.decide(request_, BEFORE) is step
    assert producer.decide(request_, OLDER) is Step.STALE


@pytest.mark.parametrize("request_", Request)
@pytest.mark.parametrize("pair", [OLDER, BEFORE, Pair(PID, 8), Pair(PID + 1, 7), Pair(1, 7)])
def test_another_pair_is_stale(pair: Pair, request_: Request) -> None:
    assert ProducerState(PAIR, ProducerPhase.OPEN).decide(request_, pair) is Step.STALE


def test_a_life_with_v1() -> None:
    producer = ProducerState(PAIR)
    for commit in (True, False):
        assert producer.decide(Request.ADD, PAIR) is Step.BEGIN
        producer = producer.begun()
        assert producer.decide(Request.WRITE_V1, PAIR) is Step.GO
        producer = producer.asked(commit=commit)
        again = Request.COMMIT_V1 if commit else Request.ABORT_V1
        assert producer.decide(again, PAIR) is (Step.COMMIT if commit else Step.ABORT)
        producer = producer.ended(commit=commit)
        assert producer.decide(again, PAIR) is Step.DONE
        assert producer.pair == PAIR


def test_a_life_with_v2_uses_a_pair_for_each_transaction() -> None:
    producer, pairs = ProducerState(Pair(PID, EPOCH_MAX - 1)), []
    for number in range(3):
        pairs.append(producer.pair)
        assert producer.decide(Request.WRITE_V2, producer.pair) is Step.BEGIN
        producer = producer.begun().ended(commit=True).renewed(PairEnd.COMMIT, number << 16)
        assert producer.decide(Request.COMMIT_V2, pairs[-1]) is Step.DONE
    assert pairs == [(PID, EPOCH_MAX - 1), (PID, EPOCH_MAX), (PID + (1 << 16), 1)]


@pytest.mark.parametrize(
    ("known", "reason", "state"),
    [
        (KnownEnd.NONE, "", ProducerPhase.EMPTY),
        (KnownEnd.OPEN, "", ProducerPhase.OPEN),
        (KnownEnd.COMMITTED, "part 2", ProducerPhase.COMMITTED),
        (KnownEnd.ABORTED, ABORTED_BY_PRODUCER, ProducerPhase.ABORTED),
        (KnownEnd.ABORTED, "expired", ProducerPhase.LOST),
        (KnownEnd.ABORTED, UNACKNOWLEDGED, ProducerPhase.EMPTY),
    ],
)
def test_what_a_label_says_is_all_that_a_gateway_needs(known: KnownEnd, reason: str, state: ProducerPhase) -> None:
    assert found(PAIR, known, reason) == ProducerState(PAIR, state)


def test_what_was_prepared_keeps_its_label() -> None:
    producer = found(PAIR, KnownEnd.OPEN, "", kept=OLDER)
    assert producer.label == OLDER.label
    assert producer.ended(commit=True).label == OLDER.label
    assert producer.ended(commit=True).begun().label == PAIR.label


# Client names of transactional ids, pairs and labels.


IDS = st.text(min_size=1, max_size=300)
RANDOM = st.integers(0, (1 << 62) - 1)


@given(IDS)
def test_an_id_has_a_name_that_may_stand_anywhere(text: str) -> None:
    name = client_name(text)
    assert check_client_name(name) == name
    assert name not in (".", "..")
    assert transactional_id(name) in (text, None)


@given(IDS, IDS)
def test_two_ids_never_share_a_name(one: str, other: str) -> None:
    assert (client_name(one) == client_name(other)) == (one == other)


@given(st.text("@abcdef0123456789.h", min_size=1, max_size=10))
def test_names_that_look_like_escapes_are_escaped(text: str) -> None:
    assert transactional_id(client_name(text)) == text


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *((plain, plain) for plain in ("billing-7", "a.b_c:d", "A" * 128)),
        *(("a b", "a@20b"), ("@", "@40"), (".", "@2e"), ("..", "@2e@2e"), ("é", "@c3@a9")),
    ],
)
def test_other_letters_are_escaped(text: str, name: str) -> None:
    assert client_name(text) == name


def test_a_long_id_is_hashed_and_not_read_back() -> None:
    name = client_name("x" * 129)
    assert name.startswith("@h.")
    assert len(name) == 67
    assert transactional_id(name) is None


@pytest.mark.parametrize("text", ["", "x" * (TRANSACTIONAL_ID_BYTES_MAX + 1)])
def test_no_id_is_empty_or_longer_than_kafkas_strings(text: str) -> None:
    with pytest.raises(InvalidNameError, match="transactional id"):
        client_name(text)


@given(st.text("ABab@0129._:-f", max_size=20))
def test_a_name_is_read_back_only_if_it_is_that_of_an_id(name: str) -> None:
    found = transactional_id(name)
    assert found is None or client_name(found) == name


@given(RANDOM, st.booleans())
def test_producer_ids_never_meet_a_brokers(random: int, is_known: bool) -> None:
    pair = first_pair("id", random, is_known=is_known)
    assert is_ours(pair.producer_id)
    assert is_of(pair.producer_id, "id")
    assert not is_of(pair.producer_id, "another id")
    assert not is_of(pair.producer_id + 1, "id")
    assert 1 << 62 <= pair.producer_id < 1 << 63
    assert pair.epoch == int(is_known)
    assert pair_of(pair.label) == pair
    assert not is_ours(random)


@given(RANDOM, st.integers(0, EPOCH_MAX), RANDOM)
def test_the_next_pair_is_another_one_and_a_valid_one(random: int, epoch: int, more: int) -> None:
    pair = Pair(first_pair("id", random, is_known=True).producer_id, epoch)
    following = next_pair(pair, more)
    assert 0 <= following.epoch <= EPOCH_MAX
    if epoch < EPOCH_MAX:
        assert following == (pair.producer_id, epoch + 1)
    else:
        assert following == first_pair("id", more, is_known=True)


@pytest.mark.parametrize("label", [None, "", "1.2", "x.1", f"{1 << 62}", f"{1 << 62}.32767", f"{1 << 63}.0", " 1.1"])
def test_other_labels_name_no_pair(label: str | None) -> None:
    assert pair_of(label) is None
