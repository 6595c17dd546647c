"""The key space [0, 1): positions of keys and the ranges that segments hold.

A key's position in a stream of our own is its XXH64 hash with seed 42 (:mod:`rollbridge.model.partitioners` has that
of adopted topics), scaled by its upper 53 bits, so it is exactly representable and always below 1. Spark's
``xxhash64(key)`` on a binary column gives the same 64 bits (as a signed number).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import xxhash

from rollbridge.model.errors import InvalidRangesError

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
            raise InvalidRangesError(
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


def even_ranges(count: int) -> list[KeyRange]:
    """Partition the key space into ``count`` ranges of the same size."""
    if not 1 <= count <= SEGMENTS_MAX:
        raise InvalidRangesError(f"{count} segments asked for; 1 to {SEGMENTS_MAX} are possible; nothing was written")
    cuts = [number / count for number in range(count)] + [1.0]
    return [KeyRange(low, high) for low, high in pairwise(cuts)]


def cut_evenly(ranges: Iterable[KeyRange], count: int) -> list[KeyRange]:
    """Cut what ranges that lie side by side cover into even ranges.

    Raises:
        InvalidRangesError: there is a gap between them, they are too narrow, or there are none.
    """
    found = sorted(ranges)
    if not found or count < 1:
        raise InvalidRangesError("no range is to be cut, or into none; nothing was written")
    whole = KeyRange(found[0].low, found[-1].high)
    if any(before.high != after.low for before, after in pairwise(found)):
        raise InvalidRangesError(
            "the segments to seal do not lie side by side; name each new range with --range; nothing was written"
        )
    width = whole.high - whole.low
    # Ends are computed as in even_ranges, so they are the same from both sides and the outermost are exact.
    cuts = [whole.low, *(whole.low + width * item.low for item in even_ranges(count)[1:]), whole.high]
    if any(before >= after for before, after in pairwise(cuts)):
        raise InvalidRangesError(f"{whole} is too narrow to be cut into {count} ranges; nothing was written")
    return [KeyRange(low, high) for low, high in pairwise(cuts)]


def ranges_of(pairs: Iterable[tuple[float, float] | KeyRange]) -> list[KeyRange]:
    """Turn pairs of numbers into ranges, in order of their lower ends."""
    return sorted(pair if isinstance(pair, KeyRange) else KeyRange(float(pair[0]), float(pair[1])) for pair in pairs)


def check_partition(ranges: Sequence[KeyRange], whole: Sequence[KeyRange] | None = None) -> None:
    """Check that sorted ``ranges`` cover exactly what ``whole`` covers (default [0, 1)), without overlap or gap.

    Raises:
        InvalidRangesError: names the first overlap, gap or surplus.
    """
    if not ranges:
        raise InvalidRangesError("no key range was given; nothing was written")
    if len(ranges) > SEGMENTS_MAX:
        raise InvalidRangesError(f"{len(ranges)} ranges given; at most {SEGMENTS_MAX} are possible")
    for before, after in pairwise(ranges):
        if before.high > after.low:
            raise InvalidRangesError(f"ranges {before} and {after} overlap; nothing was written")
    given, wanted = _runs(ranges), _runs(whole or [KeyRange(0.0, 1.0)])
    if given != wanted:
        raise InvalidRangesError(
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
