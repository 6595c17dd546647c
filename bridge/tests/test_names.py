"""Names: topics and qualified names in both directions, Kafka's length limit, collisions, refusals."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bridge.tests.strategies import group_names, segment_ids, stream_names, transaction_ids
from rollbridge.base.ids import EPOCH_MAX, SEGMENT_NUMBER_MAX, SegmentId, TransactionId
from rollbridge.errors import InvalidNameError
from rollbridge.stream.names import (
    TOPIC_NAME_MAX,
    GroupName,
    Partition,
    PlaceIndex,
    SegmentPlaces,
    StreamName,
    check_client_name,
    check_name,
    is_group_topic,
    is_hidden,
    parse_qualified,
    parse_segment_topic,
    scope_of,
    segment_topic_pattern,
)

KAFKA_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
"""What Kafka accepts, org.apache.kafka.common.internals.Topic."""


def test_names_of_one_segment() -> None:
    stream, segment = StreamName.parse("sales/orders"), SegmentId.of(number=3, epoch=2)
    assert stream.segment_topic(segment) == "sales.orders.segment-3.epoch-2"
    assert stream.qualified(segment) == "sales/orders/3/#epoch.2"
    assert (
        stream.qualified(segment, TransactionId.of(1, 42))
        == "sales/orders/3/#epoch.2/#transaction.0001000000000000000000000000002a"
    )
    assert stream.buffer_topic() == "sales.orders.transaction-buffer"


def test_the_buffer_of_an_adopted_topic_has_nothing_of_the_names_that_people_write() -> None:
    stream = StreamName.of_topic("orders")
    topic = stream.internal_buffer_topic()
    assert topic == "__transaction_buffer_topics.1c168adb00d208e4"
    assert stream.internal_buffer_topic(7) == f"{topic}.epoch-7"
    assert "orders" not in topic
    assert scope_of(topic) == "topics"


@given(stream_names, stream_names, st.integers(0, 9), st.integers(0, 9))
def test_a_stream_owns_its_buffers_and_no_others(stream: StreamName, other: StreamName, epoch: int, moves: int) -> None:
    mine = [stream.buffer_topic(epoch, moves), stream.internal_buffer_topic(epoch)]
    assert all(stream.owns_buffer(topic) and is_hidden(topic) for topic in mine)
    assert any(other.owns_buffer(topic) for topic in mine) == (stream == other)
    assert not stream.owns_buffer(f"{mine[1]}.epoch-x")


def test_names_of_one_group() -> None:
    group = GroupName("sales")
    assert group == GroupName("sales", "default")
    assert group.commit_log_topic == "sales.default.commit-log"
    assert group.node == "sales.default"
    assert [group.transactional_id(index) for index in range(2)] == [
        "rollbridge.sales.default.0",
        "rollbridge.sales.default.1",
    ]


@given(stream_names, segment_ids)
def test_segment_topics_round_trip(stream: StreamName, segment: SegmentId) -> None:
    topic = stream.segment_topic(segment)
    assert parse_segment_topic(topic) == (stream, segment)
    assert KAFKA_TOPIC.fullmatch(topic)


@given(stream_names, segment_ids, transaction_ids | st.none())
def test_qualified_names_round_trip(stream: StreamName, segment: SegmentId, transaction: TransactionId | None) -> None:
    assert parse_qualified(stream.qualified(segment, transaction)) == (stream, segment, transaction)


@given(group_names)
def test_group_names_round_trip_as_text_and_as_node(group: GroupName) -> None:
    assert GroupName.parse(str(group)) == group
    assert GroupName.parse(group.node) == group


@given(stream_names, group_names)
def test_no_two_kinds_of_topic_have_the_same_name(stream: StreamName, group: GroupName) -> None:
    for topic in (stream.buffer_topic(), group.commit_log_topic):
        assert KAFKA_TOPIC.fullmatch(topic)
        with pytest.raises(InvalidNameError):
            parse_segment_topic(topic)
    assert stream.buffer_topic() != group.commit_log_topic


@given(stream_names, segment_ids, stream_names, segment_ids)
def test_the_subscription_pattern_finds_a_streams_segments_and_no_others(
    stream: StreamName, segment: SegmentId, other: StreamName, other_segment: SegmentId
) -> None:
    pattern = re.compile(segment_topic_pattern(stream))
    assert pattern.fullmatch(stream.segment_topic(segment))
    assert not pattern.fullmatch(stream.buffer_topic())
    if other != stream:
        assert not pattern.fullmatch(other.segment_topic(other_segment))


@given(stream_names, stream_names)
def test_streams_with_different_collision_keys_never_share_kafkas_metric_names(
    one: StreamName, other: StreamName
) -> None:
    assume(one.collision_key != other.collision_key)
    assert one.buffer_topic().replace(".", "_") != other.buffer_topic().replace(".", "_")


def test_streams_that_kafka_would_not_keep_apart_share_a_collision_key() -> None:
    assert StreamName("a_b", "c").collision_key == StreamName("a", "b_c").collision_key


LONGEST = TOPIC_NAME_MAX - len(f"..segment-{SEGMENT_NUMBER_MAX}.epoch-{EPOCH_MAX}")


def test_the_longest_stream_name_leaves_room_for_every_segment() -> None:
    stream = StreamName("s" * 100, "t" * (LONGEST - 100))
    assert len(stream.segment_topic(SegmentId.of(SEGMENT_NUMBER_MAX, EPOCH_MAX))) == TOPIC_NAME_MAX


def test_a_stream_name_one_longer_is_refused_with_the_limit() -> None:
    with pytest.raises(InvalidNameError, match=f"have {LONGEST + 1} characters; at most {LONGEST} fit"):
        StreamName("s" * 100, "t" * (LONGEST - 99))


def test_a_group_name_beyond_kafkas_limit_is_refused() -> None:
    fits = TOPIC_NAME_MAX - len("__terminated_txn_state_s.")
    assert len(GroupName("s", "g" * fits).terminated_topic) == TOPIC_NAME_MAX
    with pytest.raises(InvalidNameError, match="exceeds Kafka's 249 characters"):
        GroupName("s", "g" * (fits + 1))


BAD_NAMES = ["", "a.b", "a b", "a/b", "ä", "a\n", "a\x00", "__a", "a:b", "*", "a\u0663"]


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize(
    "make",
    [
        lambda name: check_name("scope", name),
        lambda name: StreamName(name, "t"),
        lambda name: StreamName("s", name),
        lambda name: GroupName(name, "g"),
        lambda name: GroupName("s", name),
    ],
)
def test_bad_names_are_refused_wherever_they_stand(name: str, make: Callable[[str], object]) -> None:
    with pytest.raises(InvalidNameError, match=r"is not a name for a .*nothing was written"):
        make(name)


@pytest.mark.parametrize("name", ["loader-1", "a", "x" * 128, "team:loader.1@host"])
def test_client_names(name: str) -> None:
    assert check_client_name(name) == name


@pytest.mark.parametrize(
    ("parse", "texts", "words"),
    [
        (StreamName.parse, ["", "orders", "a/b/c", "/", "a/", "/b"], "nothing was written"),
        (GroupName.parse, ["", "sales", "a/b/c", "a.b.c"], None),
        (check_client_name, ["", "x" * 129, "a b", "a/b", "a\n", ".", ".."], "is not a client name"),
        (
            parse_segment_topic,
            [
                "",
                "orders",
                "sales.orders",
                "sales.orders.transaction-buffer",
                "sales.orders.segment-1",
                "sales.orders.segment-01.epoch-0",
                "sales.orders.segment-1.epoch--1",
                "sales.orders.segment-1.epoch-0.x",
                "a.b.c.segment-1.epoch-0",
                "__sales.orders.segment-1.epoch-0",
                "sales.orders.segment-2147483648.epoch-0",
                "sales.orders.segment-1.epoch-9999999999",
                "sales.orders.segment-1" + "0" * 5000 + ".epoch-0",
                "sales.orders.segment-1\u0663.epoch-0",
                "s" * 240 + ".orders.segment-1.epoch-0",
            ],
            None,
        ),
        (
            parse_qualified,
            [
                "",
                "sales/orders",
                "sales/orders/1",
                "sales/orders/1/#epoch.2/",
                "sales/orders/1/#epoch.2/#transaction.",
                "sales/orders/1/#epoch.2/#transaction.00010000-0000-0000-0000-00000000002a",
                "sales/orders/1/#epoch.2/#transaction.0001ffff00000000000000000000002a",
                "sales/orders/4294967296/#epoch.2",
                "sales/orders/1\u0663/#epoch.2",
            ],
            None,
        ),
    ],
)
def test_text_that_does_not_follow_the_scheme_is_refused(
    parse: Callable[[str], object], texts: list[str], words: str | None
) -> None:
    for text in texts:
        with pytest.raises(InvalidNameError, match=words):
            parse(text)


def test_a_segment_of_the_first_epoch_is_a_partition_of_the_adopted_topic_and_later_ones_have_their_own() -> None:
    places = SegmentPlaces(StreamName.parse("sales/orders"), "orders", 7)
    assert places.of(SegmentId.of(3, 7)) == ("orders", 3)
    assert places.of(SegmentId.of(3, 8)) == ("sales.orders.segment-3.epoch-8", 0)
    assert places.segment_at(("orders", 3)) == SegmentId.of(3, 7)
    assert places.segment_at(("sales.orders.segment-3.epoch-7", 0)) is None, "it lies in the adopted topic"


@given(stream_names, segment_ids, st.sampled_from(["", "orders"]))
def test_the_segment_at_its_place_is_the_segment(stream: StreamName, segment: SegmentId, topic: str) -> None:
    for first_epoch in (0, segment.epoch):
        places = SegmentPlaces(stream, topic, first_epoch)
        assert places.segment_at(places.of(segment)) == segment


def test_an_index_of_streams_finds_adopted_partitions_and_by_their_names_those_of_our_own() -> None:
    orders, returns = StreamName.parse("sales/orders"), StreamName.parse("sales/returns")
    index = PlaceIndex([SegmentPlaces(orders, "orders", 7), SegmentPlaces(returns)])
    assert index.find(("orders", 3)) == (orders, SegmentId.of(3, 7))
    assert index.find(("sales.orders.segment-3.epoch-8", 0)) == (orders, SegmentId.of(3, 8))
    assert index.find(("sales.others.segment-0.epoch-0", 0)) == (StreamName.parse("sales/others"), SegmentId.of(0, 0))
    with pytest.raises(InvalidNameError):
        index.find(("others", 0))


@pytest.mark.parametrize(
    "partition",
    [
        ("orders", 0),
        ("sales.orders.segment-3.epoch-2", 1),
        ("sales.returns.segment-3.epoch-2", 0),
        ("sales.orders.segment-9999999999.epoch-0", 0),
        ("sales.orders.transaction-buffer", 0),
    ],
)
def test_what_is_no_place_of_a_stream_has_none_of_its_segments(partition: Partition) -> None:
    assert SegmentPlaces(StreamName.parse("sales/orders")).segment_at(partition) is None


def test_an_adopted_topic_is_not_ours_to_delete() -> None:
    places = SegmentPlaces(StreamName.parse("sales/orders"), "orders", 7)
    segments = [SegmentId.of(0, 9), SegmentId.of(3, 7), SegmentId.of(1, 8)]
    assert places.own_topics(segments) == ["sales.orders.segment-0.epoch-9", "sales.orders.segment-1.epoch-8"]


@pytest.mark.parametrize(
    ("topic", "is_shared"),
    [
        (GroupName("sales").commit_log_topic, True),
        (GroupName("sales").terminated_topic, True),
        ("sales.__transaction_buffer_snapshot_indexes", True),
        ("sales.orders.transaction-buffer.epoch-7", True),
        (StreamName("sales", "orders").internal_buffer_topic(7), True),
        ("sales.orders.segment-0.epoch-0", False),
        ("orders", False),
    ],
)
def test_topics_of_a_group_are_told_from_those_of_segments(topic: str, *, is_shared: bool) -> None:
    assert is_group_topic(topic) == is_shared
