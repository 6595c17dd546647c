"""Makers of record batches, right ones and such as lie."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode, zstd_encode
from hypothesis import strategies as st

from rollbridge.base.avro import encode_long
from rollbridge.kafka.records import DECOMPRESSED_BYTES_MAX, BatchBuilder, Compression, crc32c

# timestamp, key, value, headers
Input = tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]
inputs = st.tuples(
    st.integers(0, 1 << 45),
    st.none() | st.binary(max_size=40),
    st.none() | st.binary(max_size=200),
    st.lists(st.tuples(st.text(max_size=8), st.none() | st.binary(max_size=20)), max_size=3),
)
runs = st.lists(inputs, min_size=1, max_size=12)
codecs = st.sampled_from(list(Compression))


def build(records: list[Input], compression: Compression = Compression.NONE) -> bytes:
    builder = BatchBuilder(1 << 20, compression)
    for timestamp, key, value, headers in records:
        assert builder.append(timestamp, key, value, headers)
    assert builder.count == len(records)
    return builder.build()


# Written out by hand after Kafka's documentation, so that reader and builder cannot be wrong together.

INT_MAX: Final = (1 << 31) - 1
LONG_MAX: Final = (1 << 63) - 1
_TAIL: Final = struct.Struct(">hiqqqhii")
_HEAD: Final = struct.Struct(">qiibI")
_ENCODERS: Final = {1: gzip_encode, 2: snappy_encode, 3: lz4_encode, 4: zstd_encode}


def record(
    number: int,
    value: bytes = b"v",
    *,
    after_ms: int = 0,
    key: bytes | None = None,
    size: int | None = None,
    key_size: int | None = None,
    value_size: int | None = None,
    headers: int = 0,
    tail: bytes = b"",
) -> bytes:
    """A record, so long after its batch's first time, which may claim other sizes, and more headers than it has."""
    if key_size is None:
        key_size = -1 if key is None else len(key)
    parts = b"\0", encode_long(after_ms), encode_long(number), encode_long(key_size), key or b""
    body = b"".join((*parts, encode_long(len(value) if value_size is None else value_size), value))
    body += encode_long(headers) + tail
    return encode_long(len(body) if size is None else size) + body


def forged(
    records: bytes,
    count: int,
    *,
    pair: tuple[int, int] = (-1, -1),
    last: int | None = None,
    attributes: int = 0,
    codec: int = 0,
    sequence: int = -1,
    times: tuple[int, int] = (0, 0),
    magic: int = 2,
    length: int | None = None,
    crc: int | None = None,
    base_offset: int = 0,
) -> bytes:
    """A batch, right or wrong; ``pair`` is its producer."""
    if codec:
        records = _ENCODERS[codec](records)
    delta = max(min((count if last is None else last + 1) - 1, INT_MAX), -INT_MAX)
    tail = _TAIL.pack(attributes | codec, delta, *times, *pair, sequence, count) + records
    size = len(tail) + _HEAD.size - 12 if length is None else length
    return _HEAD.pack(base_offset, size, -1, magic, crc32c(tail) if crc is None else crc) + tail


@dataclass(frozen=True, eq=False)
class Lie:
    """Records behind a sound one, of which something is not as claimed.

    Attributes:
        records: Of the first of their numbers.
        count: Number of records claimed.
        header: Other claims of the batch's header.
    """

    records: Callable[[int], bytes] = record
    count: int = 1
    last: int | None = None
    header: Mapping[str, Any] = field(default_factory=dict)

    def batch(self, before: bytes, codec: int = 0, **header: Any) -> bytes:
        """The batch, behind a sound record numbered 0."""
        claims = {"codec": codec, **header, **self.header}
        if self.last is not None:
            claims["last"] = self.last + 1
        return forged(before + self.records(1), self.count + 1, **claims)


LIES: Final[Mapping[str, Lie]] = {
    # Of the header.
    "magic": Lie(header={"magic": 1}),
    "no room for the header": Lie(header={"length": 40}),
    "fewer than no records": Lie(count=-2),
    "more records": Lie(count=2),
    "many records": Lie(count=INT_MAX - 1),
    "many offsets and records": Lie(count=1 << 24),
    "fewer records": Lie(lambda n: record(n) + record(n + 1)),
    "fewer offsets than records": Lie(last=-1),
    "offsets below 0": Lie(last=-3),
    # Of the compression.
    "unknown compression": Lie(header={"attributes": 7, "codec": 0}),
    "no compression": Lie(header={"attributes": 4, "codec": 0}),
    "decompresses to too much": Lie(lambda n: record(n, bytes(DECOMPRESSED_BYTES_MAX)), header={"codec": 4}),
    # Of a record.
    "size below 0": Lie(lambda n: record(n, size=-1)),
    "size 0": Lie(lambda n: record(n, size=0)),
    "size too small": Lie(lambda n: record(n, size=6)),
    "size too large": Lie(lambda n: record(n, size=9)),
    "size beyond all": Lie(lambda n: record(n, size=LONG_MAX)),
    "size covers the next": Lie(lambda n: record(n, size=15) + record(n + 1), count=2),
    "size without end": Lie(lambda n: b"\xff" * 60_000),
    "key of the batch behind": Lie(lambda n: record(n, key=b"k", key_size=12) + record(n + 1, bytes(30)), count=2),
    "key beyond all": Lie(lambda n: record(n, key=b"k", key_size=LONG_MAX)),
    "value longer": Lie(lambda n: record(n, value_size=2)),
    "value shorter": Lie(lambda n: record(n, b"vv", value_size=1)),
    "value of the record behind": Lie(lambda n: record(n, value_size=9) + record(n + 1, bytes(30)), count=2),
    "value beyond all": Lie(lambda n: record(n, value_size=LONG_MAX)),
    "headers below 0": Lie(lambda n: record(n, headers=-1)),
    "a header that is not there": Lie(lambda n: record(n, headers=1)),
    "headers without end": Lie(lambda n: record(n, headers=LONG_MAX)),
    "headers of the record behind": Lie(lambda n: record(n, headers=3) + record(n + 1, bytes(30)), count=2),
    "a header too many": Lie(lambda n: record(n, tail=b"\2x\2y")),
    "a header without a name": Lie(lambda n: record(n, headers=1, tail=b"\1\2y")),
    "name longer": Lie(lambda n: record(n, headers=1, tail=b"\6x\2y")),
    "name beyond all": Lie(lambda n: record(n, headers=1, tail=encode_long(LONG_MAX) + b"x\2y")),
    "content longer": Lie(lambda n: record(n, headers=1, tail=b"\2x\4y")),
    "content beyond all": Lie(lambda n: record(n, headers=1, tail=b"\2x" + encode_long(LONG_MAX))),
    "content shorter": Lie(lambda n: record(n, headers=1, tail=b"\2x\2yy")),
    "more than 64 bits": Lie(lambda n: record(n, size=17)[:3] + b"\x80" * 10 + record(n)[3:]),
    "bytes behind the records": Lie(lambda n: record(n) + b"\0"),
    # Of the numbers.
    "number below 0": Lie(lambda n: record(-1)),
    "number twice": Lie(lambda n: record(n - 1)),
    "number behind the batch": Lie(lambda n: record(n + 1)),
    "numbers falling": Lie(lambda n: record(n + 1) + record(n), count=2),
    "number far away, inside": Lie(lambda n: record(1 << 40) + record(n + 1), count=2),
    "number twice, inside": Lie(lambda n: record(n - 1) + record(n + 1), count=2),
    "number falling where some are missing": Lie(lambda n: record(n + 3) + record(n + 1), count=2, last=5),
    "number behind a batch where some are missing": Lie(lambda n: record(n + 7), last=5),
}
"""All claims that a batch makes, each of them wrong once."""
