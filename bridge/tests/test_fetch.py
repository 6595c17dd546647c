"""The request of a fetch as it is sent often: byte for byte what the usual encoder makes of it."""

from __future__ import annotations

import io
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st
from kio.schema.fetch.v12 import FetchRequest
from kio.schema.fetch.v12.request import FetchPartition, FetchTopic
from kio.schema.types import TopicName
from kio.serial import entity_writer
from kio.static.primitive import i8, i32, i32Timedelta, i64

from rollbridge.kafka.fetch import Wanted, encode_fetch
from rollbridge.kafka.metadata import Isolation

WANTED = st.builds(
    Wanted,
    st.text("abc.-_", min_size=1, max_size=200),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**63 - 1),
    st.integers(-1, 2**31 - 1),
)


@given(st.lists(WANTED, max_size=200), st.integers(0, 600_000), st.sampled_from(Isolation), st.integers(1, 1 << 26))
def test_a_request_encoded_by_hand_is_what_the_usual_encoder_makes(
    wanted: list[Wanted], wait_ms: int, isolation: Isolation, max_bytes: int
) -> None:
    topics: dict[str, list[FetchPartition]] = {}
    for topic, partition, offset, last_epoch in wanted:
        topics.setdefault(topic, []).append(
            FetchPartition(
                partition=i32(partition),
                fetch_offset=i64(offset),
                partition_max_bytes=i32(max_bytes),
                last_fetched_epoch=i32(last_epoch),
            )
        )
    request = FetchRequest(
        max_wait=i32Timedelta.parse(timedelta(milliseconds=wait_ms)),
        min_bytes=i32(1),
        max_bytes=i32(max_bytes),
        isolation_level=i8(isolation.value),
        topics=tuple(FetchTopic(topic=TopicName(topic), partitions=tuple(found)) for topic, found in topics.items()),
        forgotten_topics_data=(),
    )
    usual = io.BytesIO()
    entity_writer(FetchRequest)(usual, request)
    assert encode_fetch(wanted, wait_ms, isolation, max_bytes) == usual.getvalue()
