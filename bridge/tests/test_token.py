"""Tokens: text that reads back, and refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.strategies import dlsns, sns
from rollbridge.errors import InvalidRequestError
from rollbridge.model.sn import DLSN, SN, Token

tokens = st.builds(
    Token, st.binary(min_size=16, max_size=16), st.none() | st.binary(max_size=20), sns, st.none() | dlsns
)


@given(tokens)
def test_a_token_reads_back_from_its_text(token: Token) -> None:
    assert Token.parse(str(token)) == token


def test_text_of_a_token() -> None:
    token = Token(bytes(16), b"acct-7", SN(sequence_id=3), DLSN(0, 1, 4))
    assert str(token) == "00000000000000000000000000000000/616363742d37/seq=3/0-1:4:0"


@pytest.mark.parametrize("text", ["", "//", "00/-/empty/-", f"{'0' * 32}/x/empty/-", f"{'0' * 32}/-/empty/-/-"])
def test_text_that_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        Token.parse(text)


def test_a_token_of_another_length_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="16 bytes, not 3"):
        Token(b"abc", None, SN())
