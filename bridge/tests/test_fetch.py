"""The request of a fetch as it is sent often: byte for byte what the usual encoder makes of it."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from kio.schema.fetch.v12 import FetchRequest
from kio.serial import entity_writer

from rollbridge.kafka.fetch import Wanted, encode_fetch, fetch_request
from rollbridge.kafka.metadata import Isolation

WANTED = st.builds(
    Wanted,
    st.text("abc.-_", min_size=1, max_size=200),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**63 - 1),
    st.integers(-1, 2**31 - 1),
)


@given(st.lists(WANTED, max_size=200), st.integers(0, 600_000), st.sampled_from(Isolation), st.integers(1, 1 << 26))
def test_both_encoders_say_the_same(wanted: list[Wanted], wait_ms: int, isolation: Isolation, max_bytes: int) -> None:
    usual = io.BytesIO()
    entity_writer(FetchRequest)(usual, fetch_request(wanted, wait_ms, isolation, max_bytes))
    assert encode_fetch(wanted, wait_ms, isolation, max_bytes) == usual.getvalue()
