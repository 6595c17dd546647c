"""Decompression with a bound: a batch of one megabyte can claim to hold a thousand, and must not get the memory."""

from __future__ import annotations

import struct
import zlib
from typing import Final

import cramjam

from rollbridge.errors import CorruptDataError

# xerial's framing of snappy, which Kafka's clients in Java use: a header of 16 bytes, then blocks with their lengths.
_XERIAL: Final = b"\x82SNAPPY\0"
_XERIAL_HEADER_BYTES: Final = 16
_GZIP_WINDOW: Final = 31
_FIRST_TRY_BYTES: Final = 1 << 16
_EXPECTED_RATIO: Final = 4


def decompress(codec: str, data: memoryview, limit_bytes: int) -> bytes | bytearray | memoryview:
    """Decompress what Kafka's codec of this name (``gzip``, ``snappy``, ``lz4``, ``zstd``) made.

    Raises:
        CorruptDataError: It does not decompress, or not to at most ``limit_bytes``.
    """
    try:
        match codec:
            case "gzip":
                return _gunzip(data, limit_bytes)
            case "snappy":
                return _unsnap(data, limit_bytes)
            case "lz4" | "zstd":
                return _grow(codec, data, limit_bytes)
            case _:
                raise CorruptDataError(f"compression {codec} is not known")
    except (cramjam.DecompressionError, zlib.error, struct.error) as exc:
        raise CorruptDataError(f"records do not decompress with {codec} to at most {limit_bytes} bytes: {exc}") from exc


def _gunzip(data: memoryview, limit_bytes: int) -> bytes:
    out = bytearray()
    rest = bytes(data)
    while rest:
        member = zlib.decompressobj(_GZIP_WINDOW)
        out += member.decompress(rest, limit_bytes - len(out) + 1)
        if len(out) > limit_bytes:
            raise CorruptDataError(f"records decompress with gzip to more than {limit_bytes} bytes")
        if not member.eof:
            raise CorruptDataError("records compressed with gzip are cut short")
        rest = member.unused_data
    return bytes(out)


def _unsnap(data: memoryview, limit_bytes: int) -> bytes:
    if bytes(data[: len(_XERIAL)]) != _XERIAL:
        return _unsnap_block(data, limit_bytes)
    out = bytearray()
    position = _XERIAL_HEADER_BYTES
    while position < len(data):
        (size,) = struct.unpack_from(">i", data, position)
        position += 4
        if not 0 < size <= len(data) - position:
            raise CorruptDataError(f"snappy block of {size} bytes, where {len(data) - position} are left")
        out += _unsnap_block(data[position : position + size], limit_bytes - len(out))
        position += size
    return bytes(out)


def _unsnap_block(block: memoryview, limit_bytes: int) -> bytes:
    size = cramjam.snappy.decompress_raw_len(block)
    if size > limit_bytes:
        raise CorruptDataError(f"snappy block decompresses to {size} bytes, more than {limit_bytes}")
    return bytes(cramjam.snappy.decompress_raw(block))


def _grow(codec: str, data: memoryview, limit_bytes: int) -> memoryview:
    """Neither format has to say how much it holds, so try with more and more room."""
    into = cramjam.lz4.decompress_into if codec == "lz4" else cramjam.zstd.decompress_into
    room = min(limit_bytes, max(_FIRST_TRY_BYTES, len(data) * _EXPECTED_RATIO))
    while True:
        out = bytearray(room)
        try:
            return memoryview(out)[: into(data, out)]
        except cramjam.DecompressionError:
            if room >= limit_bytes:
                raise
            room = min(limit_bytes, room * 4)
