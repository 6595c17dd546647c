"""XXH64 of whole Arrow columns: the hash by which keys choose their segments, and of which digests are made.

Values of one length are hashed together, a step of the algorithm for all of them at a time, in NumPy: for keys of 11
bytes a seventh of what calls of the library take, for values of 100 bytes two thirds. Each step costs a microsecond
even for a single value, so lengths that few values have, and long values, are left to the library.

Source: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, "XXH64 algorithm description".
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any, Final

import numpy as np
import pyarrow as pa
from xxhash import xxh64_intdigest

from rollbridge.model.keyspace import HASH_SEED

Numbers = Any
"""NumPy array of 64-bit integers; types are checked without NumPy and Arrow."""

NULL: Final = np.uint64(0x6E75_6C6C_6E75_6C6C)
"""Hash of a null."""
LENGTH_MAX: Final = 160
"""Maximum length of values that are hashed together."""
_CALLED: Final = 1024
"""Values that the library is called for at a time: so many objects at once still find room in memory just freed."""


def worth(length: int) -> int:
    """Return from how many values of a length on it pays to hash them together."""
    return 200 + 25 * length


def hashes_of(
    column: pa.BinaryArray,
    hash_of: Callable[[bytes, int], int] = xxh64_intdigest,
    *,
    worth: Callable[[int], int] = worth,
) -> Numbers:
    """Return the hash of each value, by default its xxHash64, with the seed by which keys choose their segments."""
    count = len(column)
    if column.null_count == count:
        return np.full(count, NULL)
    present = column.fill_null(b"") if column.null_count else column
    found = _called(present, hash_of) if hash_of is not xxh64_intdigest else _hashed(present, worth)
    if column.null_count:
        found[column.is_null().to_numpy(zero_copy_only=False)] = NULL
    return found


def _hashed(column: pa.BinaryArray, worth: Callable[[int], int]) -> Numbers:
    count = len(column)
    lengths = np.diff(ends_of(column))
    numbers = np.bincount(np.minimum(lengths, LENGTH_MAX + 1), minlength=LENGTH_MAX + 2)[: LENGTH_MAX + 1]
    together = [length for length in np.flatnonzero(numbers).tolist() if numbers[length] >= worth(length)]
    if len(together) == 1 and numbers[together[0]] == count:
        return _together(column, together[0])
    if not together:
        return _called(column, xxh64_intdigest)
    found: Numbers = np.empty(count, np.uint64)
    rest: Numbers = np.ones(count, np.bool_)
    for length in together:
        same = lengths == length
        found[same] = _together(column.filter(pa.array(same)), length)
        rest &= ~same
    if rest.any():
        found[rest] = _called(column.filter(pa.array(rest)), xxh64_intdigest)
    return found


def _called(column: pa.BinaryArray, hash_of: Callable[[bytes, int], int]) -> Numbers:
    """Return the hashes as a function gives them, one by one."""
    found: Numbers = np.empty(len(column), np.uint64)
    for start in range(0, len(column), _CALLED):
        values = column[start : start + _CALLED].to_numpy(zero_copy_only=False).tolist()
        found[start : start + _CALLED] = np.fromiter(map(hash_of, values, repeat(HASH_SEED)), np.uint64, len(values))
    return found


def ends_of(column: pa.BinaryArray) -> Numbers:
    """Return the offsets at which the values begin, and at which the last one ends."""
    return np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]


_P1, _P2, _P3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
_P4, _P5 = np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)
_SEED: Final = np.uint64(HASH_SEED)
_STRIPE: Final = 32


def _together(column: pa.BinaryArray, length: int) -> Numbers:
    """Return the XXH64 of values that all have one length."""
    count, data, start = len(column), column.buffers()[2] or b"", int(ends_of(column)[0])
    spare: Numbers = np.empty(count, np.uint64)
    word: Numbers = np.empty(count, np.uint64)
    at = 0

    def load(kind: str, size: int) -> Numbers:
        nonlocal at
        word[:] = np.ndarray((count,), kind, data, start + at, (length,))
        at += size
        return word

    def rotate(numbers: Numbers, bits: int) -> None:
        np.right_shift(numbers, np.uint64(64 - bits), out=spare)
        np.left_shift(numbers, np.uint64(bits), out=numbers)
        np.bitwise_or(numbers, spare, out=numbers)

    def mix(numbers: Numbers, bits: int) -> None:
        np.right_shift(numbers, np.uint64(bits), out=spare)
        np.bitwise_xor(numbers, spare, out=numbers)

    with np.errstate(over="ignore"):
        if length < _STRIPE:
            found: Numbers = np.full(count, _SEED + _P5)
        else:
            lanes = [np.full(count, first) for first in (_SEED + _P1 + _P2, _SEED + _P2, _SEED, _SEED - _P1)]
            while length - at >= _STRIPE:
                for lane in lanes:
                    lane += np.multiply(load("<u8", 8), _P2, out=word)
                    rotate(lane, 31)
                    lane *= _P1
            found = np.zeros(count, np.uint64)
            for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True):
                word[:] = lane
                rotate(word, bits)
                found += word
            for lane in lanes:
                lane *= _P2
                rotate(lane, 31)
                lane *= _P1
                found ^= lane
                found *= _P1
                found += _P4
        found += np.uint64(length)
        while length - at >= 8:
            np.multiply(load("<u8", 8), _P2, out=word)
            rotate(word, 31)
            word *= _P1
            found ^= word
            rotate(found, 27)
            found *= _P1
            found += _P4
        if length - at >= 4:
            found ^= np.multiply(load("<u4", 4), _P1, out=word)
            rotate(found, 23)
            found *= _P2
            found += _P3
        while at < length:
            found ^= np.multiply(load("u1", 1), _P5, out=word)
            rotate(found, 11)
            found *= _P1
        mix(found, 33)
        found *= _P2
        mix(found, 29)
        found *= _P3
        mix(found, 32)
    return found
