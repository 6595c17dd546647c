"""Client names of transactional ids, pairs and labels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.model.errors import InvalidNameError
from rollbridge.model.names import check_client_name
from rollbridge_gateway.identity import (
    EPOCH_MAX,
    TRANSACTIONAL_ID_BYTES_MAX,
    Pair,
    client_name,
    first_pair,
    is_of,
    is_ours,
    next_pair,
    pair_of,
    transactional_id,
)

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


@pytest.mark.parametrize("text", ["billing-7", "a.b_c:d", "A" * 128])
def test_a_plain_id_is_its_own_name(text: str) -> None:
    assert client_name(text) == text


@pytest.mark.parametrize(
    ("text", "name"), [("a b", "a@20b"), ("@", "@40"), (".", "@2e"), ("..", "@2e@2e"), ("é", "@c3@a9")]
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
