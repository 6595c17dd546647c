"""Segments of which Kafka itself has left nothing are removed without a retention of the stream, and their epochs."""

from __future__ import annotations

from coordinator.tests.benches import STREAMS, Bench
from coordinator.tests.sim_world import Record
from rollbridge.base.ids import SegmentId
from rollbridge.metadata.requests import AdminRequest, RequestKind
from rollbridge.stream.config import Retention
from rollbridge.stream.names import StreamName
from rollbridge_coordinator.core import effects as fx

ORDERS = STREAMS[0]


def scaled(bench: Bench, number: int, stream: StreamName = ORDERS) -> None:
    """The stream's only segment gives way to the next one."""
    body = AdminRequest(
        kind=RequestKind.SCALE_STREAM, stream=str(stream), seal=(number,), ranges=((0.0, 1.0),), created_ms=0
    )
    bench.world.request(bench.leader.group.name, body.to_json())  # type: ignore[union-attr]
    bench.rest()


def history(bench: Bench) -> tuple[int, list[SegmentId]]:
    """The first epoch that is kept, and the segments that are removed or dropped."""
    group = bench.leader.group
    assert group is not None
    found = group.streams[str(ORDERS)].history
    return found.first, sorted(found.removed)


def test_what_kafka_has_emptied_goes_from_the_oldest_on_and_what_holds_a_record_stays() -> None:
    bench = Bench.fresh()
    bench.world.deletes = True
    topics = [ORDERS.segment_topic(SegmentId.of(number, number)) for number in range(6)]
    for number in range(5):
        bench.world.produce(topics[number], Record("k", f"k={number}"))
        scaled(bench, number)
    assert history(bench) == (0, [])
    for number in (0, 1, 3):  # in 2 a record is left, and 3 continues it
        bench.world.topics[topics[number]].start = len(bench.world.topics[topics[number]].entries)
    bench.rest()
    assert history(bench)[1][-1:] == [SegmentId.of(1, 1)]
    assert [name in bench.world.topics for name in topics] == [False, False, True, True, True, True]
    bench.world.topics[topics[2]].start = len(bench.world.topics[topics[2]].entries)
    bench.rest()
    assert [name in bench.world.topics for name in topics] == [False, False, False, False, True, True]
    bench.take_over()
    bench.rest()
    assert [name in bench.world.topics for name in topics] == [False, False, False, False, True, True]


def test_a_segment_that_never_held_a_record_stays_for_readers_that_stand_in_it() -> None:
    bench = Bench.fresh()
    bench.world.deletes = True
    scaled(bench, 0)
    scaled(bench, 1)
    assert history(bench) == (0, [])
    assert ORDERS.segment_topic(SegmentId.of(0, 0)) in bench.world.topics


def test_a_segment_that_has_no_leader_keeps_nothing_waiting_and_is_looked_at_later() -> None:
    bench = Bench.fresh()
    bench.world.deletes = True
    topic = ORDERS.segment_topic(SegmentId.of(0, 0))
    bench.world.produce(topic, Record("k", "k=0"))
    scaled(bench, 0)
    bench.world.topics[topic].start = len(bench.world.topics[topic].entries)
    bench.world.away = topic
    bench.rest()
    assert topic in bench.world.topics
    bench.world.away = ""
    bench.rest()
    assert topic not in bench.world.topics


def test_a_topic_that_may_not_be_described_keeps_no_segment_of_another_stream() -> None:
    bench = Bench.fresh()
    bench.world.deletes = True
    topics = [stream.segment_topic(SegmentId.of(0, 0)) for stream in STREAMS]
    for stream, topic in zip(STREAMS, topics, strict=True):
        bench.world.produce(topic, Record("k", "k=0"))
        scaled(bench, 0, stream)
    for topic in topics:
        bench.world.topics[topic].start = len(bench.world.topics[topic].entries)
    bench.world.refuses = lambda effect, _: (
        fx.EffectRefusedError(effect, "no right", code="not-authorized", topic=topics[0])
        if isinstance(effect, fx.TopicIds) and topics[0] in effect.topics
        else None
    )
    bench.rest()
    assert [topic in bench.world.topics for topic in topics] == [True, False]


def test_of_an_emptied_segment_that_is_waited_for_nothing_goes() -> None:
    bench = Bench.fresh()
    bench.world.deletes = True
    group = bench.leader.group
    assert group is not None
    body = AdminRequest(
        kind=RequestKind.UPDATE_STREAM, stream=str(ORDERS), retention=Retention(groups=("auditor",)), created_ms=0
    )
    bench.world.request(group.name, body.to_json())
    topic = ORDERS.segment_topic(SegmentId.of(0, 0))
    bench.world.produce(topic, Record("k", "k=0"))
    scaled(bench, 0)
    bench.world.topics[topic].start = len(bench.world.topics[topic].entries)
    bench.rest()
    assert topic in bench.world.topics
