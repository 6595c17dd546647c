"""Requests that claim more than they hold: counts, lengths, deltas and sizes of lists, nested ones as well."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

from aiokafka.codec import gzip_encode, lz4_encode, zstd_encode

from gateway.tests.mutations import captures
from rollbridge.base.avro import encode_long
from rollbridge.kafka.batches import crc32c
from rollbridge_gateway.producer.table import Pair
from rollbridge_gateway.protocol import wire
from rollbridge_gateway.protocol.versions import Api

INT_MAX: Final = (1 << 31) - 1
LONG_MAX: Final = (1 << 63) - 1
_TAIL: Final = struct.Struct(">hiqqqhii")
_HEAD: Final = struct.Struct(">qiibI")
TRANSACTIONAL: Final = 0x10
_CODECS: Final = {1: gzip_encode, 3: lz4_encode, 4: zstd_encode}
SMALLEST: Final = bytes((12, 0, 0, 0, 1, 1, 0))
"""A record of seven bytes: neither key nor value, and no headers."""


def record(
    number: int,
    value: bytes = b"v",
    *,
    after_ms: int = 0,
    key: bytes | None = None,
    size: int | None = None,
    headers: int = 0,
    tail: bytes = b"",
) -> bytes:
    """A record, so long after its batch's first time, which may claim another size, and more headers than it has."""
    named = b"\1" if key is None else encode_long(len(key)) + key
    head = b"".join((b"\0", encode_long(after_ms), encode_long(number), named))
    body = b"".join((head, encode_long(len(value)), value, encode_long(headers), tail))
    return encode_long(len(body) if size is None else size) + body


def batch(
    pair: Pair,
    records: bytes,
    count: int,
    *,
    last: int | None = None,
    attributes: int = TRANSACTIONAL,
    codec: int = 0,
    sequence: int = 1,
    times: tuple[int, int] = (0, 0),
    magic: int = 2,
    length: int | None = None,
    crc: int | None = None,
    base_offset: int = 0,
) -> bytes:
    """A batch of a transactional producer, right or wrong."""
    if codec:
        records = _CODECS[codec](records)
    delta = max(min((count if last is None else last + 1) - 1, INT_MAX), -INT_MAX)
    tail = _TAIL.pack(attributes | codec, delta, *times, *pair, sequence, count) + records
    size = len(tail) + _HEAD.size - 12 if length is None else length
    return _HEAD.pack(base_offset, size, -1, magic, crc32c(tail) if crc is None else crc) + tail


def produce(name: str, topic: str, records: bytes | None, *, partition: int = 0, acks: int = -1) -> bytes:
    """A Produce of one batch, with its length."""
    values: dict[str, Any] = {
        "transactional_id": name,
        "acks": acks,
        "topic_data": [{"name": topic, "partition_data": [{"index": partition, "records": records}]}],
    }
    return wire.framed(wire.write_request(Api.PRODUCE, 12, 7, "claims", values))


def batches(pair: Pair) -> Iterator[bytes]:
    """Batches that claim what they do not hold, or that hold far more than their bytes."""
    one = record(0)
    for codec in (0, *_CODECS):
        for count in (INT_MAX, 1 << 24, 9, 2):
            yield batch(pair, one, count, codec=codec)
            yield batch(pair, one, 1, last=count - 1, codec=codec)
        for claim in (INT_MAX, LONG_MAX, -1, -LONG_MAX):
            yield batch(pair, record(0, size=claim), 1, codec=codec)
            yield batch(pair, record(0, headers=claim), 1, codec=codec)
            yield batch(pair, record(0, headers=1, tail=encode_long(claim)), 1, codec=codec)
            if claim > 0:  # or else there is no value
                yield batch(pair, record(0, headers=1, tail=b"\2x" + encode_long(claim)), 1, codec=codec)
            yield batch(pair, b"\2\0\0\0" + encode_long(claim), 1, codec=codec)
            yield batch(pair, encode_long(8) + b"\0\0\0\1" + encode_long(claim), 1, codec=codec)
    yield batch(pair, bytes(60_000), 1)
    yield batch(pair, record(0, headers=30_000, tail=bytes(59_000)), 1)
    for codec in _CODECS:
        yield batch(pair, SMALLEST * (8 << 20), 8 << 20, codec=codec)  # all records are numbered 0
        yield batch(pair, bytes(64 << 20), 1, codec=codec)
        yield batch(pair, bytes(512 << 20), 1, codec=codec)


def lists(topic: str) -> Iterator[bytes]:
    """Requests with lists that are claimed to be long, or are long, of items that hold nothing."""
    for data in captures(topic)[::4]:
        for place in range(14, len(data) - 3):
            yield data[:place] + b"\x7f\xff\xff\xff" + data[place + 4 :]
            yield data[:place] + b"\xff\xff\xff\xff\x07" + data[place + 5 :]
    for size in (1 << 20, 16 << 20):
        for api, version in ((Api.METADATA, 12), (Api.FIND_COORDINATOR, 4), (Api.DESCRIBE_TRANSACTIONS, 0)):
            head = wire.write_request(api, version, 7, "claims", {"topics": (), "coordinator_keys": ()})
            many = b"\0" if api == Api.FIND_COORDINATOR else b""  # its type of key stands before its list
            place = len(wire.write_request(Api.METADATA, 12, 7, "claims", {"topics": ()})) - 5
            yield wire.framed(head[:place] + many + _unsigned(size) + bytes(size))
        # Tagged fields without end, of a head and of a body.
        yield wire.framed(struct.pack(">hhih", Api.METADATA, 12, 7, -1) + _unsigned(size) + bytes(2 * size))
        ended = wire.write_request(Api.END_TXN, 3, 7, "claims", {"transactional_id": "claims"})
        yield wire.framed(ended[:-1] + _unsigned(size) + bytes(2 * size))
        yield wire.framed(
            wire.write_request(Api.TXN_OFFSET_COMMIT, 3, 7, "claims", {"transactional_id": "x", "topics": ()})[:-2]
            + _unsigned(size) + bytes(size)
        )  # fmt: skip


def _unsigned(number: int) -> bytes:
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
