"""Hashes of columns are those of the library, whatever lengths, nulls and slices a column has."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh64_intdigest

from rollbridge.stream.keyspace import HASH_SEED

pa = pytest.importorskip("pyarrow")

from rollbridge.spark.sink_records import (  # noqa: E402
    LENGTH_MAX,
    NULL,
    hashes_of,
    worth,
)


def expected(values: Sequence[bytes | None]) -> list[int]:
    return [int(NULL) if value is None else xxh64_intdigest(value, HASH_SEED) for value in values]


def always(_: int) -> int:
    return 1


def from_two(_: int) -> int:
    return 2


@pytest.mark.parametrize("length", range(LENGTH_MAX + 2))
def test_values_of_each_length_have_the_hash_of_the_library(length: int) -> None:
    values = [bytes((7 * place + 31 * row + length) % 256 for place in range(length)) for row in range(5)]
    assert hashes_of(pa.array(values, pa.binary()), worth=always).tolist() == expected(values)


@given(st.integers(0, 70), st.integers(1, 9), st.integers(0, 8))
def test_a_slice_of_values_of_one_length_is_hashed_as_it_stands(length: int, count: int, start: int) -> None:
    values = [bytes((5 * place + row) % 256 for place in range(length)) for row in range(count + start)]
    assert hashes_of(pa.array(values, pa.binary())[start:], worth=always).tolist() == expected(values[start:])


@given(
    st.lists(st.none() | st.binary(max_size=12) | st.binary(min_size=30, max_size=70), max_size=40),
    st.integers(0, 40),
    st.sampled_from((always, from_two, worth)),
)
def test_lengths_nulls_and_slices_make_no_difference(values: list[bytes | None], start: int, threshold: object) -> None:
    column = pa.array(values, pa.binary())[start:]
    assert hashes_of(column, worth=threshold).tolist() == expected(values[start:])  # type: ignore[arg-type]


def test_a_large_column_is_hashed_together_where_that_pays_and_has_the_same_hashes() -> None:
    values = [b"key-%d" % (number % 1_500) for number in range(5_000)] + [b"x" * 100] * 3_000 + [b"once", b"y" * 1_000]
    assert hashes_of(pa.array(values, pa.binary())).tolist() == expected(values)


def test_another_function_is_called_for_each_value() -> None:
    values = [b"a", None, b"bcd"] * 700
    found = hashes_of(pa.array(values, pa.binary()), lambda value, seed: len(value) + seed).tolist()
    assert found == [int(NULL) if value is None else len(value) + HASH_SEED for value in values]
