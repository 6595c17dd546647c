"""Which stream the name of a topic means: each name one thing, and the brokers' topic wins."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from rollbridge.model.names import GroupName, StreamName
from rollbridge.model.records import StreamConfig
from rollbridge.model.topic_names import TopicNames

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
