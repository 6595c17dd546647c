"""Makers of record batches."""

from __future__ import annotations

from hypothesis import strategies as st

from rollbridge.kafka.batches import (
    BatchBuilder,
    Compression,
)

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
