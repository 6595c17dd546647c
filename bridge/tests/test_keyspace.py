"""Key space: hashes as Spark computes them, positions, ranges and what partitions the space."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh64_intdigest

from bridge.tests.refusals import raises_code
from bridge.tests.strategies import partitions
from rollbridge.errors import InvalidRequestError
from rollbridge.stream import keyspace
from rollbridge.stream.keyspace import (
    HASH_SEED,
    KEY_BYTES_MAX,
    SEGMENTS_MAX,
    KeyRange,
    KeySpace,
    KnownKeys,
    Partitioner,
    check_partition,
    even_ranges,
    fit,
    key_hash,
    native_partition,
    position_of_hash,
    ranges_of,
)
from rollbridge.stream.routing import locator

# Computed once with pyspark 4.2.0, not with this package:
#   spark.sql("select xxhash64(unhex('616263'))")       (unhex gives a binary column; seed 42 is Spark's own)
# They cover every branch of XXH64: 0 to 3, 4 to 7, 8 to 31 and 32 or more bytes, and remainders of each kind.
SPARK_XXHASH64 = [
    (b"", -7444071767201028348),
    (b"a", -8582455328737087284),
    (b"\x00", -8959994473701255385),
    (b"UA", -536276471978638185),
    (b"abc", 1423657621850124518),
    (b"\xff\x00\xfe", 5999420298635320949),
    (b"Spark", -4294468057691064905),
    (b"1234567", -3188848029947885567),
    (b"12345678", 6863040065134489090),
    (b"123456789012", 1549582498302756521),
    ("Zürich/東京".encode(), 91872966571029313),
    (b"2013-01-01/EWR", 1738718309499918473),
    (bytes(range(31)), -8988936099728967847),
    (bytes(range(32)), -8644129751861931918),
    (bytes(range(33)), 2046936095001747419),
    (bytes(range(256)), -2156533592262354883),
    (b"x" * 1000, -8448076897081045321),
]


@pytest.mark.parametrize(("key", "signed"), SPARK_XXHASH64)
def test_hash_of_a_key_is_sparks_xxhash64_and_its_position_that_scaled_by_its_upper_53_bits(
    key: bytes, signed: int
) -> None:
    assert key_hash(key) == signed % (1 << 64)
    exact = Fraction((signed % (1 << 64)) >> 11, 1 << 53)
    assert Fraction(KeySpace().position(key)) == exact
    assert KeySpace().position(key) == position_of_hash(signed % (1 << 64))


@given(st.integers(0, (1 << 64) - 1))
def test_positions_are_exact_and_below_one(value: int) -> None:
    position = position_of_hash(value)
    assert 0.0 <= position < 1.0
    assert Fraction(position) == Fraction(value >> 11, 1 << 53)


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.5, 0.5), (0.6, 0.5), (-0.1, 0.5), (0.5, 1.1), (math.nan, 0.5), (0.0, math.nan), (0.0, math.inf)],
)
def test_what_is_no_range_is_refused(low: float, high: float) -> None:
    with raises_code("invalid-ranges", match="0 <= low < high <= 1 must hold; nothing was written"):
        KeyRange(low, high)


@given(partitions(), partitions(), st.floats(0.0, 1.0, exclude_max=True))
def test_ranges_overlap_exactly_if_a_position_lies_in_both(
    some: list[KeyRange], others: list[KeyRange], position: float
) -> None:
    for one in some:
        for other in others:
            inside = max(one.low, other.low)
            assert one.overlaps(other) == (inside in one and inside in other)
            assert one.overlaps(other) == other.overlaps(one)
            if position in one and position in other:
                assert one.overlaps(other)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 4096, SEGMENTS_MAX])
def test_even_ranges_partition_the_key_space(count: int) -> None:
    ranges = even_ranges(count)
    assert len(ranges) == count
    check_partition(ranges)


@pytest.mark.parametrize("count", [0, -1, SEGMENTS_MAX + 1])
def test_a_number_of_segments_out_of_bounds_is_refused(count: int) -> None:
    with raises_code("invalid-ranges", match=f"1 to {SEGMENTS_MAX} are possible"):
        even_ranges(count)


@given(partitions())
def test_a_partition_is_accepted_and_one_without_a_range_is_not(ranges: list[KeyRange]) -> None:
    check_partition(ranges)
    for place in range(len(ranges)):
        with raises_code("invalid-ranges"):
            check_partition(ranges[:place] + ranges[place + 1 :])


@pytest.mark.parametrize(
    ("pairs", "whole", "words"),
    [
        ([(0.0, 0.5), (0.4, 1.0)], None, r"ranges \[0, 0.5\) and \[0.4, 1\) overlap"),
        ([(0.0, 0.4), (0.5, 1.0)], None, r"cover \[0, 0.4\) and \[0.5, 1\) but must cover exactly \[0, 1\)"),
        ([(0.0, 0.5)], None, r"cover \[0, 0.5\) but must cover exactly \[0, 1\)"),
        ([(0.0, 0.5)], [(0.0, 0.25), (0.5, 1.0)], r"must cover exactly \[0, 0.25\) and \[0.5, 1\)"),
        ([], None, "no key range was given"),
        # Both ends print as 0.333333 with six digits; the message must show the gap.
        ([(0.0, 0.333333), (0.3333333, 1.0)], None, r"\[0, 0.333333\) and \[0.3333333, 1\)"),
    ],
)
def test_what_does_not_cover_exactly_the_whole_is_refused_and_named(
    pairs: list[tuple[float, float]], whole: list[tuple[float, float]] | None, words: str
) -> None:
    with raises_code("invalid-ranges", match=words):
        check_partition(ranges_of(pairs), None if whole is None else ranges_of(whole))


def test_too_many_ranges_are_refused_before_they_are_looked_at() -> None:
    with raises_code("invalid-ranges", match="at most"):
        check_partition([KeyRange(0.0, 1.0)] * (SEGMENTS_MAX + 1))


def test_ranges_are_taken_from_pairs_in_any_order() -> None:
    assert ranges_of([(0.5, 1), KeyRange(0.0, 0.5)]) == [KeyRange(0.0, 0.5), KeyRange(0.5, 1.0)]


@given(partitions())
def test_the_text_of_a_range_reads_back_as_the_same_numbers(ranges: list[KeyRange]) -> None:
    for item in ranges:
        low, high = str(item).strip("[)").split(", ")
        assert (float(low), float(high)) == (item.low, item.high)


# Keys of adopted topics lie where native producers put them, and within a partition where XXH64 does.


# Expectations of Kafka's UtilsTest.testMurmur2.
JAVA = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize(("key", "murmur2"), JAVA.items())
@pytest.mark.parametrize("partitions", [1, 3, 12, 1000])
def test_java_puts_a_key_there(key: bytes, murmur2: int, partitions: int) -> None:
    assert native_partition(Partitioner.MURMUR2, key, partitions) == (murmur2 & 0x7FFFFFFF) % partitions


def fnv1a(key: bytes) -> int:
    value = 0x811C9DC5
    for byte in key:
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    signed = value - (1 << 32) if value >> 31 else value
    return abs(signed)


@given(st.binary(max_size=40), st.integers(1, SEGMENTS_MAX))
def test_sarama_puts_a_key_there(key: bytes, partitions: int) -> None:
    assert native_partition(Partitioner.FNV1A, key, partitions) == fnv1a(key) % partitions


@given(st.sampled_from(Partitioner), st.binary(max_size=40), st.integers(1, SEGMENTS_MAX))
def test_a_position_lies_in_the_range_of_the_native_partition(
    partitioner: Partitioner, key: bytes, partitions: int
) -> None:
    space = KeySpace(partitioner, partitions)
    assert space.position(key) in even_ranges(partitions)[native_partition(partitioner, key, partitions)]


@pytest.mark.parametrize("edge", [0, (1 << 64) - 1])
@pytest.mark.parametrize("partitions", [1, 3, 7, 4096, SEGMENTS_MAX])
def test_the_lowest_and_the_highest_hash_stay_within_their_partition(
    partitions: int, edge: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollbridge.stream.keyspace.xxh64_intdigest", lambda key, seed: edge)
    space, ranges = KeySpace(Partitioner.CONSISTENT, partitions), even_ranges(partitions)
    for number in range(1000):
        key = b"%d" % number
        assert space.position(key) in ranges[native_partition(Partitioner.CONSISTENT, key, partitions)]


@given(st.sampled_from(Partitioner), st.binary(max_size=40), st.integers(1, 200), st.booleans())
def test_writers_find_the_native_partition_and_after_a_scale_what_was_split_off_it(
    partitioner: Partitioner, key: bytes, partitions: int, is_split: bool
) -> None:
    space, ranges = KeySpace(partitioner, partitions), even_ranges(partitions)
    ends = [item.low for item in ranges]
    if is_split:
        ends = sorted({*ends, (ranges[-1].low + 1.0) / 2})
    bounds, hash_of = locator(space, ends)
    place = bisect_right(bounds, hash_of(key, HASH_SEED))
    assert ends[place] <= space.position(key) < [*ends, 1.0][place + 1]
    if not is_split:
        assert place == native_partition(partitioner, key, partitions)


@given(st.binary(max_size=40))
def test_keys_of_own_streams_lie_where_they_did(key: bytes) -> None:
    assert KeySpace().hash_of(key, HASH_SEED) == xxh64_intdigest(key, 42)
    assert KeySpace().position(key) == position_of_hash(xxh64_intdigest(key, 42))
    assert KeySpace().position(None) == KeySpace(Partitioner.MURMUR2, 3).position(None) == 0.0


def test_partitions_that_are_remembered_are_those_of_native_producers_and_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keyspace, "KEYS_MAX", 50)
    known = KnownKeys(Partitioner.MURMUR2, 7)
    long = bytes(KEY_BYTES_MAX + 1)
    for key in [*(b"key-%d" % (number % 70) for number in range(500)), long]:
        expected = native_partition(Partitioner.MURMUR2, key, 7)
        assert (known[key], known[key]) == (expected, expected)
        assert len(known) <= 50
    assert long not in known


def test_keys_are_looked_up_only_where_they_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyspace, "KEYS_MAX", 100)
    monkeypatch.setattr(keyspace, "_TRIED", 100)
    monkeypatch.setattr(keyspace, "_TERM", 1_000)
    known = KnownKeys(Partitioner.CONSISTENT, 7)

    def looked_up(keys: Iterable[int]) -> list[bool]:
        found = []
        for number in keys:
            found.append(known.helps(1))
            if found[-1]:
                _ = known[b"%d" % number]
        return found

    assert all(looked_up(number % 10 for number in range(500)))
    others = looked_up(range(1_000, 2_600))
    assert not all(others), "none of them came again"
    assert others.index(False) < 600
    assert True in others[others.index(False) :], "but it is tried anew"
    assert len(known) <= 100


def test_keys_of_a_partition_are_spread_over_its_range() -> None:
    space = KeySpace(Partitioner.MURMUR2, 2)
    places = sorted(space.position(b"%d" % number) for number in range(4000))
    for quarter in range(4):
        assert 800 < sum(quarter / 4 <= place < (quarter + 1) / 4 for place in places) < 1200


@pytest.mark.parametrize("rule", Partitioner)
def test_a_sample_tells_by_which_rule_it_was_written(rule: Partitioner) -> None:
    sample = [(b"%d" % number, native_partition(rule, b"%d" % number, 5)) for number in range(50)]
    found = fit(sample + sample, 5)
    assert (found.best, found.keys, found.matches[rule]) == (rule, 50, 50)
    assert fit([*sample, (b"0", (sample[0][1] + 1) % 5)], 5).best is None, "a key in two partitions fits no rule"


def test_a_sample_that_tells_nothing_names_no_rule() -> None:
    assert fit([], 5).best is None
    assert fit([(b"k", 0)], 1).best is None


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("murmur2_random", Partitioner.MURMUR2),
        ("consistent_random", Partitioner.CONSISTENT),
        ("FNV1A", Partitioner.FNV1A),
    ],
)
def test_partitioners_are_named_as_in_settings(name: str, rule: Partitioner) -> None:
    assert Partitioner.parse(name) is rule


@pytest.mark.parametrize("name", ["random", "", "sticky", "round_robin"])
def test_a_rule_that_does_not_depend_on_the_key_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="nothing was written"):
        Partitioner.parse(name)


@pytest.mark.parametrize(("rule", "partitions"), [(Partitioner.MURMUR2, 0), (None, 3), (Partitioner.MURMUR2, 10_001)])
def test_half_a_key_space_is_refused(rule: Partitioner | None, partitions: int) -> None:
    with pytest.raises(InvalidRequestError):
        KeySpace(rule, partitions)
