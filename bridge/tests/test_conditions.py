"""Conditions of transactions: what they say survives encoding, and impossible ones are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollbridge_schemas
from bridge.tests.strategies import sns
from rollbridge.base.mapper import Mapper
from rollbridge.base.sn import ANY, EMPTY
from rollbridge.buffer.frames import Manifest, PieceKey, decode_manifest
from rollbridge.client.writing import with_condition
from rollbridge.errors import CorruptDataError, InvalidRequestError
from rollbridge.stream.conditions import (
    CONDITIONS_MAX,
    KEY_BYTES_MAX,
    Condition,
    RefusedCondition,
    Scope,
    StreamCondition,
)

keys = st.binary(max_size=20)
conditions = st.builds(
    StreamCondition,
    st.integers(0, 31),
    st.builds(Condition, sns, st.sampled_from(Scope), keys) | st.builds(Condition, sns, st.just(Scope.SEGMENT)),
)


@given(st.lists(conditions, max_size=5))
def test_conditions_travel_in_the_manifest(found: list[StreamCondition]) -> None:
    manifest = Manifest({PieceKey(0, 0, 0): 1}, (), tuple(found))
    assert decode_manifest(manifest.encode()) == manifest


@given(st.text(), st.none() | keys, sns, sns)
def test_refusals_round_trip(stream: str, key: bytes | None, expected: object, actual: object) -> None:
    refused = RefusedCondition(stream, key, expected, actual)  # type: ignore[arg-type]
    refusals = Mapper(RefusedCondition, "control_record.refused")
    assert refusals.of_datum(refusals.to_datum(refused)) == refused


GOOD = {"stream": 0, "key": "6b", "scope": "key", "expected": "empty"}


@pytest.mark.parametrize(
    "change",
    [{"stream": -1}, {"key": "6"}, {"key": "xx"}, {"key": None}, {"expected": ""}, {"expected": "seq=-1"}],
)
def test_a_commit_frame_with_an_impossible_condition_is_corrupt(change: dict[str, object]) -> None:
    raw = rollbridge_schemas.codec("commit_frame").encode({"entries": [], "conditions": [{**GOOD, **change}]})
    with pytest.raises(CorruptDataError, match="a COMMIT frame holds"):
        decode_manifest(raw)


def test_there_is_a_limit_to_conditions() -> None:
    one = StreamCondition(0, Condition(ANY))
    raw = rollbridge_schemas.codec("commit_frame").encode({"entries": [], "conditions": [GOOD] * (CONDITIONS_MAX + 1)})
    with pytest.raises(CorruptDataError, match=f"{CONDITIONS_MAX} conditions"):
        decode_manifest(raw)
    with pytest.raises(InvalidRequestError, match=f"at most {CONDITIONS_MAX} conditions"):
        with_condition((one,) * CONDITIONS_MAX, one)
    large = StreamCondition(0, Condition(EMPTY, Scope.KEY, bytes(KEY_BYTES_MAX)))
    assert with_condition((one,), large) == (one, large)
    with pytest.raises(InvalidRequestError, match=f"{KEY_BYTES_MAX} bytes of keys"):
        with_condition((large,), StreamCondition(0, Condition(EMPTY, Scope.KEY, b"k")))
