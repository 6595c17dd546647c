"""Keys of adopted topics lie where native producers put them, and within a partition where XXH64 does."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh64_intdigest

from rollbridge.model import partitioners
from rollbridge.model.errors import InvalidRequestError
from rollbridge.model.keyspace import HASH_SEED, SEGMENTS_MAX, even_ranges, position_of_hash
from rollbridge.model.partitioners import KEY_BYTES_MAX, KeySpace, KnownKeys, Partitioner, fit, native_partition
from rollbridge.model.routing import hash_bounds, locator

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
    monkeypatch.setattr("rollbridge.model.partitioners.xxh64_intdigest", lambda key, seed: edge)
    space = KeySpace(Partitioner.CONSISTENT, partitions)
    for number in range(1000):
        key = b"%d" % number
        assert space.position(key) in even_ranges(partitions)[native_partition(Partitioner.CONSISTENT, key, partitions)]


@given(st.sampled_from(Partitioner), st.binary(max_size=40), st.integers(1, 200))
def test_hashes_choose_the_native_partition(partitioner: Partitioner, key: bytes, partitions: int) -> None:
    """As writers do, without positions."""
    space, bounds = KeySpace(partitioner, partitions), hash_bounds([item.low for item in even_ranges(partitions)])
    assert bisect_right(bounds, space.hash_of(key, HASH_SEED)) == native_partition(partitioner, key, partitions)


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
    monkeypatch.setattr(partitioners, "KEYS_MAX", 50)
    known = KnownKeys(Partitioner.MURMUR2, 7)
    long = bytes(KEY_BYTES_MAX + 1)
    for key in [*(b"key-%d" % (number % 70) for number in range(500)), long]:
        expected = native_partition(Partitioner.MURMUR2, key, 7)
        assert (known[key], known[key]) == (expected, expected)
        assert len(known) <= 50
    assert long not in known


def test_keys_are_looked_up_only_where_they_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioners, "KEYS_MAX", 100)
    monkeypatch.setattr(partitioners, "_TRIED", 100)
    monkeypatch.setattr(partitioners, "_TERM", 1_000)
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
