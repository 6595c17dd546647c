"""What adopted topics take: batches that fit whatever codec a topic has, keys, and times of records."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from itertools import permutations

import pytest
from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode, zstd_encode
from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.frame_makers import ORDERS, Frames, history_of, writer_for
from rollbridge.client.admin import _obeyed
from rollbridge.client.futures import FrameLimits
from rollbridge.errors import InvalidRequestError, RecordTooLargeError
from rollbridge.kafka.records import HEADER_BYTES, BatchBuilder
from rollbridge.metadata.records import TopicNames
from rollbridge.metadata.requests import WantedStream
from rollbridge.stream.config import FOREVER, HeaderForm, RecordTimes, Retention, StreamConfig, TopicLimits
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import even_ranges
from rollbridge.stream.names import GroupName, StreamName
from rollbridge.stream.routing import Route
from rollbridge.stream.scaling import ScalingPolicy

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


# Which stream the name of a topic means: each name one thing, and the brokers' topic wins.


PARTS = st.sampled_from(("a", "b", "a_b", "topics"))
NAMES = st.builds(StreamName, PARTS, PARTS)
TOPICS = st.sampled_from(("a", "a.b", "a_b.b", "topics.a_b", "a.b.a"))


def stream(name: StreamName | str, topic: str = "") -> StreamConfig:
    known = name if isinstance(name, StreamName) else StreamName.parse(name)
    return StreamConfig(name=known, group=GroupName(known.scope), created_ms=0, buffer_topic_id="b", topic=topic)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[StreamConfig], set[str]]:
    """Streams, of which no two have adopted one topic, and topics of the brokers, adopted ones among them."""
    names = draw(st.lists(NAMES, unique=True, max_size=6))
    topics = draw(st.lists(TOPICS, unique=True, max_size=3))
    adopted = [*topics, *[""] * len(names)]
    streams = [
        stream(name, topic) for name, topic in zip(names, draw(st.permutations(adopted[: len(names)])), strict=False)
    ]
    return streams, {*draw(st.sets(TOPICS | NAMES.map(lambda name: name.virtual_topic))), *topics}


@given(clusters())
def test_each_stream_has_its_name_or_is_in_a_clash_and_the_brokers_topic_wins(
    cluster: tuple[list[StreamConfig], set[str]],
) -> None:
    streams, at_brokers = cluster
    names = TopicNames.of(streams, at_brokers)
    for config in streams:
        virtual = config.name.virtual_topic
        if config.topic:
            assert names.streams[config.topic] is config
        elif virtual in at_brokers:
            assert names.clashes[virtual] is config
            assert names.streams.get(virtual) is not config
        else:
            assert names.streams[virtual] is config
            assert virtual not in names.clashes
    assert len(names.streams) + len(names.clashes) == len(streams)
    for topic in at_brokers & names.streams.keys():
        assert names.streams[topic].topic == topic, "a stream's virtual topic is none of the brokers'"


def test_an_adopted_topic_wins_over_a_stream_of_its_name_in_whatever_order_they_are_listed() -> None:
    owner, named = stream("topics/a_b", "a.b"), stream("a/b")
    for order in permutations((owner, named)):
        names = TopicNames.of(order, ())  # that it is one of the brokers' goes without saying
        assert (names.streams, names.clashes) == ({"a.b": owner}, {"a.b": named})


def test_a_stream_may_have_adopted_the_topic_of_its_own_name() -> None:
    config = stream("a/b", "a.b")
    assert TopicNames.of([config], {"a.b"}) == TopicNames({"a.b": config}, {})


@given(NAMES)
def test_the_stream_of_a_virtual_topic_is_found_by_its_name(name: StreamName) -> None:
    assert StreamName.of_virtual_topic(name.virtual_topic) == name


def test_other_topics_are_no_streams_virtual_ones() -> None:
    for topic in ("a", "a.b.c", "a.", ".b", "__a.b", "a..b", ""):
        assert StreamName.of_virtual_topic(topic) is None


# A stream that exists is what was asked for, or the error names each difference.


KNOWN = StreamConfig(
    name=StreamName("sales", "orders"),
    group=GroupName("sales", "eu"),
    buffer_partitions=2,
    replication_factor=3,
    record_bytes_max=5_000,
    created_ms=0,
    buffer_topic_id="b",
    retention=Retention(1_000, 2_000, ("audit", "billing")),
    headers=HeaderForm.EACH,
    partitioner="murmur2",
)
FIRST = tuple(even_ranges(2))
SAME = WantedStream(
    group="eu",
    ranges=FIRST,
    buffer_partitions=2,
    replication_factor=3,
    record_bytes_max=5_000,
    headers=HeaderForm.EACH,
    retention=Retention(1_000, 2_000, ("billing", "audit")),
    partitioner="murmur2",
)


def test_what_is_the_same_or_not_said_is_no_difference() -> None:
    assert SAME.differences(KNOWN, FIRST) == []
    assert WantedStream().differences(KNOWN, FIRST) == []
    assert replace(SAME, ranges=tuple(even_ranges(7))).differences(KNOWN, None) == [], "its first epoch is forgotten"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"group": "us"}, "group: it is eu, and us was asked for"),
        ({"buffer_partitions": 1}, "buffer partitions: it is 2, and 1 was asked for"),
        ({"replication_factor": -1}, "replication factor: it is 3, and the broker's default was asked for"),
        ({"record_bytes_max": 7}, "largest record: it is 5000, and 7 was asked for"),
        ({"headers": HeaderForm.FIRST}, "headers: it is each, and first was asked for"),
        ({"timestamps": RecordTimes.COMMIT}, "timestamps: it is writer, and commit was asked for"),
        ({"partitioner": "fnv1a"}, "partitioner: it is murmur2, and fnv1a was asked for"),
        (
            {"scaling": ScalingPolicy(events_per_second=100)},
            "scaling: it is by request only, and at 100 events/s a segment, from 1 to 32 segments was asked for",
        ),
        ({"retention": Retention(5)}, "retention time: it is 1000 ms, and 5 ms was asked for"),
        ({"retention": Retention(FOREVER, 5)}, "retention size: it is 2000 bytes, and 5 bytes was asked for"),
        (
            {"retention": Retention(groups=("audit",))},
            "retention groups: they are audit, billing, and audit was asked for",
        ),
        (
            {"ranges": tuple(even_ranges(1))},
            "segments: it began with 2 ([0, 0.5), [0.5, 1)), and 1 ([0, 1)) were asked for",
        ),
    ],
)
def test_each_difference_is_named(other: dict[str, object], said: str) -> None:
    assert replace(SAME, **other).differences(KNOWN, FIRST) == [said]  # type: ignore[arg-type]


def test_what_an_earlier_coordinator_has_passed_over_is_an_error() -> None:
    policy = ScalingPolicy(events_per_second=100)
    for asked, config in (
        ((None, None), KNOWN),
        ((None, "writer"), KNOWN),
        ((policy, RecordTimes.COMMIT), replace(KNOWN, scaling=policy, timestamps=RecordTimes.COMMIT)),
    ):
        assert _obeyed(config, *asked) is config
    with pytest.raises(InvalidRequestError, match=r"does not know --timestamps commit: .*upgrade the coordinators"):
        _obeyed(KNOWN, None, "commit")
    with pytest.raises(InvalidRequestError, match="does not scale by load and does not know --timestamps commit"):
        _obeyed(KNOWN, policy, "commit")


def test_all_differences_are_named_at_once() -> None:
    other = replace(SAME, group="us", headers=HeaderForm.FIRST, ranges=tuple(even_ranges(9)))
    assert len(other.differences(KNOWN, FIRST)) == 3
