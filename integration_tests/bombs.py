"""Batches that a broker takes and nobody should open: small ones that decompress to very much, and wrong numbers."""

from __future__ import annotations

import gzip
import time

import cramjam

from bridge.tests.batch_makers import record
from rollbridge.kafka.records import Compression, framed

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
        return _framed(bytes(cramjam.zstd.compress(body)), Compression.ZSTD, count), count
    whole = record(0, bytes(BOMB_BYTES))
    if kind == "gzip":
        return _framed(gzip.compress(whole, 9), Compression.GZIP, 1), 1
    return _framed(bytes(cramjam.zstd.compress(whole)), Compression.ZSTD, 1), 1


def misnumbered() -> bytes:
    """A batch of three records the second of which claims an offset a million later; brokers do not look."""
    return _framed(b"".join(record(delta, b"x") for delta in (1_000_000, 1, 2)), Compression.NONE, 3)


def _framed(body: bytes, codec: Compression, count: int) -> bytes:
    now_ms = round(time.time() * 1000)
    return framed(body, codec=codec, count=count, base_timestamp=now_ms, max_timestamp=now_ms)
