"""Requests that claim more than they hold: counts, lengths, deltas and sizes of lists, nested ones as well."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Final

from bridge.tests.batch_makers import LIES, Lie, forged, record
from gateway.tests.mutations import captures
from rollbridge_gateway.producer.table import Pair
from rollbridge_gateway.protocol import wire
from rollbridge_gateway.protocol.versions import Api

TRANSACTIONAL: Final = 0x10
SMALLEST: Final = bytes((12, 0, 0, 0, 1, 1, 0))
"""A record of seven bytes: neither key nor value, and no headers."""
_CODECS: Final = (1, 3, 4)


def batch(pair: Pair, records: bytes, count: int, *, attributes: int = TRANSACTIONAL, **claims: Any) -> bytes:
    """A batch of a transactional producer, right or wrong."""
    return forged(records, count, pair=pair, attributes=attributes, **{"sequence": 1, **claims})


def produce(name: str, topic: str, records: bytes | None, *, partition: int = 0, acks: int = -1) -> bytes:
    """A Produce of one batch, with its length."""
    values: dict[str, Any] = {
        "transactional_id": name,
        "acks": acks,
        "topic_data": [{"name": topic, "partition_data": [{"index": partition, "records": records}]}],
    }
    return wire.framed(wire.write_request(Api.PRODUCE, 12, 7, "claims", values))


def lying(pair: Pair, lie: Lie, codec: int = 0) -> bytes:
    """A batch of a transactional producer of which one claim is wrong."""
    claimed: dict[str, Any] = {"pair": pair, "sequence": 1, "codec": codec, **lie.header}
    attributes = TRANSACTIONAL | claimed.get("attributes", 0)
    return replace(lie, header=claimed | {"attributes": attributes}).batch(record(0))


def batches(pair: Pair) -> Iterator[bytes]:
    """Batches that claim what they do not hold, or that hold far more than their bytes."""
    for codec, lie in product((0, *_CODECS), LIES.values()):
        yield lying(pair, lie, codec)
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
