"""Avro by hand: the same bytes as the general encoder's."""

from __future__ import annotations

import io

import fastavro
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollbridge.base.avro import decode_long, encode_long, encode_text
from rollbridge.errors import InvalidRequestError

LONG_MIN, LONG_MAX = -(1 << 63), (1 << 63) - 1


def general(schema: str, value: object) -> bytes:
    """What fastavro makes of it."""
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema({"type": schema}), value)
    return out.getvalue()


@given(st.integers(LONG_MIN, LONG_MAX))
@example(LONG_MIN)
@example(LONG_MAX)
@example(63)
@example(64)
@example(-64)
@example(-65)
@example(8191)
@example(8192)
def test_longs(value: int) -> None:
    assert encode_long(value) == general("long", value)
    assert decode_long(encode_long(value) + b"\0", 0) == (value, len(encode_long(value)))


@pytest.mark.parametrize("value", [LONG_MIN - 1, LONG_MAX + 1, 1 << 80])
def test_what_does_not_fit_is_refused(value: int) -> None:
    with pytest.raises(InvalidRequestError, match="more than 64 bits"):
        encode_long(value)
    with pytest.raises(InvalidRequestError, match="more than 64 bits"):
        decode_long(b"\x80" * 9 + b"\2", 0)


@given(st.text())
def test_texts(value: str) -> None:
    assert encode_text(value) == general("string", value)
