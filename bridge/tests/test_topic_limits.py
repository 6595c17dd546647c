"""What adopted topics take: batches that fit whatever codec a topic has, keys, and times of records."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import pytest
from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode, zstd_encode
from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.test_frame_writer import ORDERS, Frames, history_of, writer_for
from rollbridge.client.futures import FrameLimits
from rollbridge.errors import InvalidRequestError, RecordTooLargeError
from rollbridge.kafka.batches import HEADER_BYTES, BatchBuilder
from rollbridge.model.epochs import EpochHistory
from rollbridge.model.keyspace import even_ranges
from rollbridge.model.names import GroupName, StreamName
from rollbridge.model.records import StreamConfig, TopicLimits
from rollbridge.model.routing import Route

NOW_MS = 1_700_000_000_000
ENCODERS = (gzip_encode, snappy_encode, lz4_encode, zstd_encode)


def route_with(limits: TopicLimits) -> Route:
    config = StreamConfig(
        name=StreamName.parse(ORDERS),
        group=GroupName("sales"),
        created_ms=0,
        buffer_topic_id="",
        topic="orders",
        partitioner="murmur2",
        partitions=2,
        limits=limits,
    )
    return Route.of(config, history_of(2).active)


@given(st.integers(300, 2_000_000), st.integers())
def test_what_cannot_be_compressed_fits_after_any_codec(batch_bytes_max: int, seed: int) -> None:
    limits = TopicLimits(batch_bytes_max)
    noise = random.Random(seed).randbytes(max(limits.batch_room - HEADER_BYTES, 0))
    for encode in ENCODERS:
        assert HEADER_BYTES + len(encode(noise)) <= batch_bytes_max


@pytest.mark.parametrize("batch_bytes_max", [0, 100, 300, 1_000, 10_000, 1_048_588, 10_000_000])
def test_a_batch_of_one_record_of_the_largest_size_fits(batch_bytes_max: int) -> None:
    limits = TopicLimits(batch_bytes_max)
    value = bytes(max(limits.record_room - 20, 0))
    builder = BatchBuilder(1)
    builder.append(NOW_MS, b"k", value)
    assert limits.record_room == 1 or len(builder.build()) <= limits.batch_room <= batch_bytes_max


@given(st.integers(400, 50_000), st.lists(st.integers(0, 60_000), max_size=60), st.integers(0, 4))
def test_frames_keep_to_the_topics_limit(batch_bytes_max: int, sizes: list[int], codec: int) -> None:
    limits, frames = TopicLimits(batch_bytes_max), Frames()
    writer = writer_for(frames, route_with(limits), limits=FrameLimits(compression=codec))
    taken = 0
    for number, size in enumerate(sizes):
        value = random.Random(number).randbytes(size)
        with suppress(RecordTooLargeError):
            writer.write(ORDERS, b"%d" % (number % 3), value, (), None)
            taken += 1
    assert taken >= sum(size <= limits.record_room - 100 for size in sizes)
    writer.cut_all()
    assert all(len(value) <= batch_bytes_max for _, _, value in frames.taken)
    assert sum(map(len, frames.records(0).values())) == taken


def test_records_without_a_key_are_refused_where_the_topic_is_compacted() -> None:
    frames = Frames()
    writer = writer_for(frames, route_with(TopicLimits(1_048_588, is_compacted=True)))
    rows = [(b"a", b"1"), (b"b", None), (None, b"3"), (b"c", b"4")]
    with pytest.raises(InvalidRequestError, match="without a key"):
        writer.write_some(ORDERS, rows)
    with pytest.raises(InvalidRequestError, match="without a key"):
        writer.write(ORDERS, None, b"3", (), None)
    writer.write(ORDERS, b"c", b"4", (), None)
    writer.cut_all()
    found = sorted((record.key, record.value) for records in frames.records(0).values() for record in records)
    assert found == [(b"a", b"1"), (b"b", None), (b"c", b"4")]


def test_times_are_compared_with_the_clock_unless_brokers_give_their_own() -> None:
    limits = TopicLimits(1_048_588, before_ms=1_000, after_ms=500)
    for late in (-500, 0, 1_000):
        assert limits.fault_of(NOW_MS - late, NOW_MS) is None
    assert "before.max.ms" in (limits.fault_of(NOW_MS - 1_001, NOW_MS) or "")
    assert "after.max.ms" in (limits.fault_of(NOW_MS + 501, NOW_MS) or "")
    assert replace(limits, is_append_time=True).fault_of(0, NOW_MS) is None


def test_limits_are_those_of_the_topic_only_while_its_partitions_are_the_segments() -> None:
    config = StreamConfig(
        name=StreamName.parse(ORDERS),
        group=GroupName("sales"),
        created_ms=0,
        buffer_topic_id="",
        topic="orders",
        first_epoch=3,
        limits=TopicLimits(1_000),
    )
    adopted = EpochHistory.create(even_ranges(2), 0, 3)
    grown = adopted.with_records(adopted.plan_growth(3, 1))
    left = grown.plan_scale([0], even_ranges(3)[:1], 2)
    for record in grown.records:
        assert config.limits_in(record) == TopicLimits(1_000)
        assert replace(config, topic="").limits_in(record) is None
    assert config.limits_in(left) is None
