"""Avro's binary form of single values, for records that are written thousands of times a second.

A general Avro encoder walks schema and datum for every record. Where most of a record is the same each time, putting
it together from remembered pieces takes a fraction of that. What is made here is, byte for byte, what the general
encoder makes; tests hold them side by side.

Source: Apache Avro specification, "Binary Encoding".
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from rollbridge.base.errors import InvalidRequestError

_ONE_BYTE: Final = tuple(bytes([number]) for number in range(0x80))
_LONG_MIN: Final = -(1 << 63)
_LONG_MAX: Final = (1 << 63) - 1


def encode_unsigned(number: int) -> bytes:
    """Encode a number of 0 or more in LEB128, as Avro and Kafka's flexible requests have it."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def encode_long(value: int) -> bytes:
    """Encode an int or a long: zigzag, then seven bits a byte, the lowest first.

    Raises:
        InvalidRequestError: it does not fit into 64 bits.
    """
    zigzag = value << 1 if value >= 0 else ~(value << 1)
    if zigzag < 0x80:
        return _ONE_BYTE[zigzag]
    if zigzag < 0x4000:
        return bytes((zigzag & 0x7F | 0x80, zigzag >> 7))
    if zigzag < 0x200000:
        return bytes((zigzag & 0x7F | 0x80, zigzag >> 7 & 0x7F | 0x80, zigzag >> 14))
    if zigzag < 0x10000000:
        return bytes((zigzag & 0x7F | 0x80, zigzag >> 7 & 0x7F | 0x80, zigzag >> 14 & 0x7F | 0x80, zigzag >> 21))
    if not _LONG_MIN <= value <= _LONG_MAX:
        raise InvalidRequestError(f"{value} has more than 64 bits; nothing was written")
    return encode_unsigned(zigzag)


def decode_long(data: bytes | bytearray | memoryview, place: int) -> tuple[int, int]:
    """Decode an int or a long; return it and the place behind it.

    Raises:
        InvalidRequestError: it does not fit into 64 bits.
        IndexError: the data ends within it.
    """
    found = shift = 0
    while True:
        byte = data[place]
        place += 1
        found |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (found >> 1) ^ -(found & 1), place
        shift += 7
        if shift > 56 and (shift > 63 or data[place] > 1):
            raise InvalidRequestError("a number has more than 64 bits")


def encode_string(value: str) -> bytes:
    """Encode a string: its length in bytes, then UTF-8."""
    raw = value.encode()
    return encode_long(len(raw)) + raw


@lru_cache(maxsize=4096)
def encode_text(value: str) -> bytes:
    """Encode a string and remember the result; for names, not for what differs each time."""
    return encode_string(value)
