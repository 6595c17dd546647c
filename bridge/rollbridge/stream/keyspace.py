"""Place keys of an adopted topic: in the partition that Kafka's partitioners choose, refined for later scales.

A topic's producers assign each key to one of its ``N`` partitions. The key space of an adopted topic follows their
rule, so that native producers and ours agree: partition ``i`` holds ``[i/N, (i+1)/N)``, and within that range a key is
placed by its XXH64 hash::

    0          1/N         2/N         3/N                     1
    |-----------|-----------|-----------|--- ... ---|-----------|
     partition 0 partition 1                         partition N-1
         ^ ((0 << 64) + XXH64) // N, as a 64-bit hash

librdkafka's functions compute murmur2 and FNV-1a. A call takes a quarter of a microsecond, so partitions of repeated
keys are cached.
"""

from __future__ import annotations

import ctypes
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import pairwise
from typing import Final

import xxhash
from confluent_kafka import cimpl
from xxhash import xxh64_intdigest

from rollbridge.base.errors import INVALID_RANGES, InvalidRequestError

# The key space [0, 1): positions of keys and the ranges that segments hold.
#
# A key's position in a stream of our own is its XXH64 hash with seed 42 (that of adopted topics is below), scaled by
# its upper 53 bits, so it is exactly representable and always below 1. Spark's ``xxhash64(key)`` on a binary column
# gives the same 64 bits (as a signed number).


HASH_SEED: Final = 42
_POSITION_SHIFT: Final = 11
_POSITION_SCALE: Final = 1.0 / (1 << 53)

SEGMENTS_MAX: Final = 10_000
"""Most segments that one epoch may hold; each is a Kafka topic."""


def key_hash(key: bytes) -> int:
    """Return the unsigned 64-bit hash of a key."""
    return xxhash.xxh64_intdigest(key, HASH_SEED)


def position_of_hash(value: int) -> float:
    """Return the position in [0, 1) of an unsigned 64-bit hash."""
    return (value >> _POSITION_SHIFT) * _POSITION_SCALE


@dataclass(frozen=True, slots=True, order=True)
class KeyRange:
    """A half-open range ``[low, high)`` of the key space."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.low < self.high <= 1.0:
            raise wrong_ranges(
                f"[{self.low}, {self.high}) is not a key range: 0 <= low < high <= 1 must hold; nothing was written"
            )

    def __contains__(self, position: float) -> bool:
        return self.low <= position < self.high

    def overlaps(self, other: KeyRange) -> bool:
        """Return True if some position lies in both."""
        return self.low < other.high and other.low < self.high

    def holds(self, other: KeyRange) -> bool:
        """Return True if every position of another range lies in this one."""
        return self.low <= other.low and other.high <= self.high

    def __str__(self) -> str:
        return f"[{_number(self.low)}, {_number(self.high)})"


def wrong_ranges(why: str) -> InvalidRequestError:
    """Return the error of key ranges, or of segments to seal, that cannot be."""
    return InvalidRequestError(why, code=INVALID_RANGES)


def even_ranges(count: int) -> list[KeyRange]:
    """Partition the key space into ``count`` ranges of the same size."""
    if not 1 <= count <= SEGMENTS_MAX:
        raise wrong_ranges(f"{count} segments asked for; 1 to {SEGMENTS_MAX} are possible; nothing was written")
    cuts = [number / count for number in range(count)] + [1.0]
    return [KeyRange(low, high) for low, high in pairwise(cuts)]


def cut_evenly(ranges: Iterable[KeyRange], count: int) -> list[KeyRange]:
    """Cut what ranges that lie side by side cover into even ranges.

    Raises:
        InvalidRequestError: there is a gap between them, they are too narrow, or there are none.
    """
    found = sorted(ranges)
    if not found or count < 1:
        raise wrong_ranges("no range is to be cut, or into none; nothing was written")
    whole = KeyRange(found[0].low, found[-1].high)
    if any(before.high != after.low for before, after in pairwise(found)):
        raise wrong_ranges(
            "the segments to seal do not lie side by side; name each new range with --range; nothing was written"
        )
    width = whole.high - whole.low
    # Ends are computed as in even_ranges, so they are the same from both sides and the outermost are exact.
    cuts = [whole.low, *(whole.low + width * item.low for item in even_ranges(count)[1:]), whole.high]
    if any(before >= after for before, after in pairwise(cuts)):
        raise wrong_ranges(f"{whole} is too narrow to be cut into {count} ranges; nothing was written")
    return [KeyRange(low, high) for low, high in pairwise(cuts)]


def ranges_of(pairs: Iterable[tuple[float, float] | KeyRange]) -> list[KeyRange]:
    """Turn pairs of numbers into ranges, in order of their lower ends."""
    return sorted(pair if isinstance(pair, KeyRange) else KeyRange(float(pair[0]), float(pair[1])) for pair in pairs)


def check_partition(ranges: Sequence[KeyRange], whole: Sequence[KeyRange] | None = None) -> None:
    """Check that sorted ``ranges`` cover exactly what ``whole`` covers (default [0, 1)), without overlap or gap.

    Raises:
        InvalidRequestError: names the first overlap, gap or surplus.
    """
    if not ranges:
        raise wrong_ranges("no key range was given; nothing was written")
    if len(ranges) > SEGMENTS_MAX:
        raise wrong_ranges(f"{len(ranges)} ranges given; at most {SEGMENTS_MAX} are possible")
    for before, after in pairwise(ranges):
        if before.high > after.low:
            raise wrong_ranges(f"ranges {before} and {after} overlap; nothing was written")
    given, wanted = _runs(ranges), _runs(whole or [KeyRange(0.0, 1.0)])
    if given != wanted:
        raise wrong_ranges(
            f"the ranges cover {_show(given)} but must cover exactly {_show(wanted)}; nothing was written"
        )


def _runs(ranges: Sequence[KeyRange]) -> list[tuple[float, float]]:
    """Join adjacent ranges."""
    runs: list[tuple[float, float]] = []
    for item in sorted(ranges):
        if runs and runs[-1][1] == item.low:
            runs[-1] = (runs[-1][0], item.high)
        else:
            runs.append((item.low, item.high))
    return runs


def _show(runs: Sequence[tuple[float, float]]) -> str:
    return " and ".join(f"[{_number(low)}, {_number(high)})" for low, high in runs)


def _number(value: float) -> str:
    """Return the shortest text that reads back as the same number, so no message shows two ends as equal."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


_MIDDLE: Final = 1 << 27
_WITHIN: Final = (1 << 64) - 2 * _MIDDLE
"""Bits of the hash that count within a partition. With the middle of the others no key is so near to an end of a
partition's range that rounding could put it into another, with up to 10,000 partitions."""


class Partitioner(StrEnum):
    """Rule by which producers choose the partition of a record with a key.

    Records without a key, and with librdkafka's ``..._random`` rules also those with an empty one, go anywhere.
    """

    MURMUR2 = "murmur2"
    """Java's default, and librdkafka's ``murmur2`` and ``murmur2_random``."""
    CONSISTENT = "consistent"
    """CRC32: the default of librdkafka (``consistent_random``), and so of its clients for Python, Go and .NET."""
    FNV1A = "fnv1a"
    """Sarama's default, and librdkafka's ``fnv1a`` and ``fnv1a_random``."""

    @classmethod
    def parse(cls, text: str) -> Partitioner:
        """Return the partitioner that Kafka's or librdkafka's settings call so.

        Raises:
            InvalidRequestError: No partitioner that depends on nothing but the key is called so.
        """
        try:
            return cls(text.lower().removesuffix("_random"))
        except ValueError:
            raise InvalidRequestError(
                f"{text!r} is no partitioner that depends on the key alone: {', '.join(cls)} are; nothing was written"
            ) from None


def native_partition(partitioner: Partitioner, key: bytes, partitions: int) -> int:
    """Return the partition, from 0 to ``partitions - 1``, that native producers choose for a key."""
    return _partition_of(partitioner, partitions)(key, 0)


@dataclass(frozen=True, slots=True)
class KeySpace:
    """Hashes of a stream's keys, and their positions in ``[0, 1)``.

    Attributes:
        partitioner: Rule of the adopted topic; None for a stream of our own, whose keys lie where XXH64 puts them.
        partitions: Number of partitions that the topic has, or had when it was left; 0 for a stream of our own.
    """

    partitioner: Partitioner | None = None
    partitions: int = 0

    def __post_init__(self) -> None:
        if (self.partitioner is None) != (self.partitions == 0) or not 0 <= self.partitions <= SEGMENTS_MAX:
            raise InvalidRequestError(
                f"a key space by {self.partitioner} of {self.partitions} partitions; at most {SEGMENTS_MAX} are "
                "possible, and both or none have to be given; nothing was written"
            )

    @property
    def hash_of(self) -> Callable[[bytes, int], int]:
        """Function of a key and ``HASH_SEED`` that returns the key's unsigned 64-bit hash, in the order of positions.

        Writers call it for each record; for streams of our own it is the hash function of the library itself.
        """
        return xxh64_intdigest if self.partitioner is None else self._refined

    @property
    def partition_of(self) -> Callable[[bytes, int], int]:
        """Function of a key, and anything, that returns the partition which the topic's native producers choose.

        While the segments are the partitions, this is enough to find a key's, in a quarter of the time.
        """
        assert self.partitioner is not None
        return _partition_of(self.partitioner, self.partitions)

    def known_keys(self) -> KnownKeys:
        """Return the partitions of keys that are remembered, which all writers of the topic in this process share."""
        assert self.partitioner is not None
        return _known_keys(self.partitioner, self.partitions)

    def position(self, key: bytes | None) -> float:
        """Return the position of a key; None means the only segment of a stream."""
        return 0.0 if key is None else position_of_hash(self.hash_of(key, HASH_SEED))

    def _refined(self, key: bytes, seed: int) -> int:
        assert self.partitioner is not None
        within = xxh64_intdigest(key, seed) & _WITHIN | _MIDDLE
        return ((self.partition_of(key, seed) << 64) + within) // self.partitions


@cache
def key_space(partitioner: str, partitions: int) -> KeySpace:
    """Return the key space that a stream's record names; an empty partitioner is that of streams of our own.

    Raises:
        InvalidRequestError: there is none.
    """
    return KeySpace(Partitioner.parse(partitioner), partitions) if partitioner else KeySpace()


@dataclass(frozen=True, slots=True)
class Fit:
    """Number of records that each partitioner explains.

    Attributes:
        keys: Number of different pairs of a key and a partition that were checked.
        matches: Number of them that each partitioner explains.
    """

    keys: int
    matches: Mapping[Partitioner, int]

    @property
    def best(self) -> Partitioner | None:
        """The partitioner that explains all keys; None if none does, or if several do."""
        whole = [item for item, count in self.matches.items() if count == self.keys]
        return whole[0] if len(whole) == 1 else None

    def __str__(self) -> str:
        counts = ", ".join(f"{item} {self.matches[item]}" for item in Partitioner)
        return f"of {self.keys} keys in the sample, so many are where a partitioner puts them: {counts}"


def fit(sample: Iterable[tuple[bytes, int]], partitions: int) -> Fit:
    """Compare a sample of keys and the partitions in which they were found with what each partitioner says."""
    seen = set(sample)
    matches = Counter(dict.fromkeys(Partitioner, 0))
    for key, partition in seen:
        for item in Partitioner:
            matches[item] += native_partition(item, key, partitions) == partition
    return Fit(len(seen), matches)


KEYS_MAX: Final = 1 << 16
KEY_BYTES_MAX: Final = 64
"""Limits on the keys whose partitions are remembered, together some 10 MB."""
_TRIED: Final = KEYS_MAX
_TERM: Final = 16 * KEYS_MAX
"""Number of keys for which caching is tried, and after which it is tried again."""


class KnownKeys(dict[bytes, int]):
    """Partitions of an adopted topic's keys, by key, of which some are remembered.

    May be used by several threads: what they count need not be exact.
    """

    def __init__(self, partitioner: Partitioner, partitions: int) -> None:
        super().__init__()
        self._partition_of = _partition_of(partitioner, partitions)
        self._looked_up = self._unknown = self._called = 0

    def __missing__(self, key: bytes) -> int:
        self._unknown += 1
        partition = self._partition_of(key, 0)
        if len(self) < KEYS_MAX and len(key) <= KEY_BYTES_MAX:
            self[key] = partition
        return partition

    def helps(self, count: int) -> bool:
        """Return whether so many keys are rather looked up than called for: most of those before came again."""
        if self._looked_up < _TRIED or 2 * self._unknown < self._looked_up:
            self._looked_up += count
            return True
        self._called += count
        if self._called > _TERM:
            self._looked_up = self._unknown = self._called = 0
            self.clear()
        return False


@cache
def _partition_of(partitioner: Partitioner, partitions: int) -> Callable[[bytes, int], int]:
    if partitioner is Partitioner.CONSISTENT:
        crc32 = zlib.crc32
        return lambda key, _: crc32(key) % partitions
    function, size = _function(partitioner), len
    return lambda key, _: function(None, key, size(key), partitions, None, None)


_known_keys = cache(KnownKeys)


@cache
def _function(partitioner: Partitioner) -> Callable[..., int]:
    # A PyDLL keeps the interpreter's lock: giving it back and forth would take longer than the function. No types of
    # arguments are given, which would double its time: all are pointers and small integers, as they go by default.
    function = getattr(ctypes.PyDLL(cimpl.__file__), f"rd_kafka_msg_partitioner_{partitioner}")
    function.restype = ctypes.c_int32
    result: Callable[..., int] = function
    return result
