"""Batches that a broker takes and nobody should open: small ones that decompress to very much, and wrong numbers."""

from __future__ import annotations

import gzip
import time

import cramjam

from bridge.tests.batch_makers import forged, record
from rollbridge.kafka.records import Compression

BOMB_BYTES = 300_000_000
"""Decompressed; far above what a reader may take."""


def bomb(kind: str) -> tuple[bytes, int]:
    """A batch of less than a megabyte, and how many records it holds.

    Args:
        kind: ``gzip`` or ``zstd``: one record of 300 MB; ``records``: a quarter of a million of 300 bytes.
    """
    if kind == "records":
        count = 250_000
        body = b"".join(record(delta, b"x" * 300) for delta in range(count))
        return _dated(bytes(cramjam.zstd.compress(body)), count, Compression.ZSTD), count
    whole = record(0, bytes(BOMB_BYTES))
    if kind == "gzip":
        return _dated(gzip.compress(whole, 9), 1, Compression.GZIP), 1
    return _dated(bytes(cramjam.zstd.compress(whole)), 1, Compression.ZSTD), 1


def misnumbered() -> bytes:
    """A batch of three records the second of which claims an offset a million later; brokers do not look."""
    return _dated(b"".join(record(delta, b"x") for delta in (1_000_000, 1, 2)), 3)


def _dated(body: bytes, count: int, codec: int = 0) -> bytes:
    return forged(body, count, attributes=codec, times=(round(time.time() * 1000),) * 2)
