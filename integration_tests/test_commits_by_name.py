"""Members of groups that commit by stream and partition number: early, late, twice, and what nobody has read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import TopicPartition

import rollbridge
from integration_tests.clients import Site, consumer_raises, until
from integration_tests.consumer_groups import GROWN, Group, take, values
from integration_tests.grown_streams import KEYS, grow, write
from rollbridge.consumer.records import Message
from rollbridge.errors import InvalidRequestError
from rollbridge.stream.names import StreamName


@pytest.fixture
def group(site: Site, unique_name: Callable[[str], str]) -> Group:
    return Group(site, unique_name("group"))


def place_of(message: Message) -> tuple[str, int]:
    return message.topic() or "", message.partition() or 0


def test_a_partition_number_names_one_segment(client: rollbridge.Bridge, orders: str, group: Group) -> None:
    grow(client, orders)
    numbers = client.admin.history(orders).graph.partitions
    with group.member(orders) as consumer:
        found = take(consumer, GROWN)
        assert {(message.partition(), message.segment) for message in found} <= {
            (number, segment) for segment, number in numbers.items()
        }
        consumer.unsubscribe()
        assert {message.partition() for message in found} <= set(numbers.values()), "also later"
    active = client.admin.describe(orders).partitions
    assert active == {item.id: numbers[item.id] for item in client.admin.history(orders).active.segments}
    # As a reader by hand names them.
    with client.writer(orders) as writer:
        dlsn = writer.write(KEYS[0], b"one more").result(60).dlsn
    assert dlsn is not None
    partition = active[dlsn.segment]
    with group.member(group_id=group.name + "-by-hand") as consumer:
        assert set(consumer.list_topics(orders).topics[orders].partitions) == set(active.values())
        consumer.assign([TopicPartition(orders, partition, dlsn.offset)])
        [message] = take(consumer, 1)
        assert (message.value(), place_of(message)) == (b"one more", (orders, partition))


def test_offsets_by_name_that_are_committed_now_and_then_skip_nothing(
    client: rollbridge.Bridge, orders: str, group: Group
) -> None:
    """What most applications do: a dictionary of all that was processed, committed every so many messages."""
    expected = grow(client, orders)
    done: dict[tuple[str, int], int] = {}
    found: list[Message] = []
    with group.member(orders, enable_auto_commit=False) as consumer:

        def enough() -> bool:
            for message in consumer.consume(3, 0.5):
                assert message.error() is None
                found.append(message)
                done[place_of(message)] = (message.offset() or 0) + 1
            if done:
                consumer.commit(offsets=[TopicPartition(*place, offset) for place, offset in done.items()])
            return len(found) >= GROWN

        until(enough)
        assert values(found) == dict.fromkeys(KEYS, expected)
        consumer.commit(offsets=[TopicPartition(*place, offset) for place, offset in done.items()], asynchronous=False)
    write(client, orders, b"later")
    with group.member(orders) as consumer:
        assert values(take(consumer, len(KEYS))) == {key: [b"later"] for key in KEYS}


def test_a_commit_of_what_was_not_handed_out_is_refused(client: rollbridge.Bridge, orders: str, group: Group) -> None:
    write(client, orders, b"before")
    client.admin.scale(orders, seal=[0, 1], ranges=[(0.0, 1.0)])
    write(client, orders, b"after")
    with group.member(orders, enable_auto_commit=False) as consumer:
        found = take(consumer, len(KEYS))
        of_first = [message for message in found if message.partition() == 0]
        before = consumer.committed([TopicPartition(orders, number) for number in range(3)], timeout=60)
        name = StreamName.parse(orders)
        waiting = name.segment_topic(rollbridge.SegmentId.of(2, 1))
        for place, why in (
            (TopicPartition(orders, 2, 3), "nothing of it was handed out"),
            (TopicPartition(waiting, 0, 0), "nothing of it was handed out"),
            (TopicPartition(orders, 0, 1_000), "behind what was handed out"),
        ):
            for asynchronous in (True, False):
                with consumer_raises(InvalidRequestError, match=f"{why}.*nothing was committed"):
                    consumer.commit(offsets=[TopicPartition(orders, 1, 1), place], asynchronous=asynchronous)
        with consumer_raises(InvalidRequestError, match="no partition 3 so far"):
            consumer.commit(offsets=[TopicPartition(orders, 3, 0)], asynchronous=False)
        for number, offset in ((2, 0), (0, 1_000)):
            with client.begin(orders) as txn, pytest.raises(InvalidRequestError, match="nothing was committed"):
                txn.send_offsets({(orders, number): offset}, consumer.consumer_group_metadata())
        after = consumer.committed([TopicPartition(orders, number) for number in range(3)], timeout=60)
        assert [place.offset for place in after] == [place.offset for place in before]
        # What has no position yet is left out, as confluent-kafka's consumer does.
        assert consumer.commit(offsets=consumer.position(consumer.assignment()), asynchronous=False)
        take(consumer, len(KEYS))
        # What is over is over, however late a commit comes.
        consumer.commit(message=of_first[0], asynchronous=False)
        [end] = consumer.committed([TopicPartition(orders, 0)], timeout=60)
        assert end.offset == client.admin.history(orders).sealed_end(rollbridge.SegmentId.of(0, 0))
    with group.member(orders, enable_auto_commit=False, enable_auto_offset_store=False) as consumer:
        until(lambda: consumer.poll(0.2) or consumer.assignment())
        with consumer_raises(InvalidRequestError, match="behind what was handed out"):
            consumer.store_offsets(offsets=[TopicPartition(orders, 2, 1_000)])


def test_a_commit_in_what_was_given_up_counts_nothing_as_read_that_was_not(
    client: rollbridge.Bridge, orders: str, group: Group
) -> None:
    """As after a session that has timed out: brokers may not know of that yet, and take commits of that member."""
    write(client, orders, b"before")
    with group.member(orders, enable_auto_commit=False) as one:
        found = take(one, len(KEYS))
        ends = dict.fromkeys((0, 1), 0)
        for message in found:
            ends[message.partition() or 0] = (message.offset() or 0) + 1
        with group.member(orders, enable_auto_commit=False) as other:
            handed: list[Message] = []

            def shared() -> bool:
                for member in (one, other):
                    handed.extend(member.consume(100, 0.1))
                return len(one.assignment()) == len(other.assignment()) == 1

            until(shared)
            [kept] = one.assignment()
            [lost] = {0, 1} - {one_of(client, orders, kept.topic)}
            before = other.committed([TopicPartition(orders, lost)], timeout=60)
            for beyond in (ends[lost] + 2, 1_000):  # a marker stands between
                for asynchronous in (True, False):
                    with consumer_raises(InvalidRequestError, match=r"handed out.*nothing was committed"):
                        one.commit(offsets=[TopicPartition(orders, lost, beyond)], asynchronous=asynchronous)
                with client.begin(orders) as txn, pytest.raises(InvalidRequestError, match="nothing was committed"):
                    txn.send_offsets({(orders, lost): beyond}, one.consumer_group_metadata())
            after = other.committed([TopicPartition(orders, lost)], timeout=60)
            assert [place.offset for place in after] == [place.offset for place in before]
            # What it was handed before, it may have processed only now.
            one.commit(offsets=[TopicPartition(orders, lost, ends[lost])], asynchronous=False)
            [place] = other.committed([TopicPartition(orders, lost)], timeout=60)
            assert place.offset == ends[lost]


def one_of(client: rollbridge.Bridge, stream: str, topic: str) -> int:
    """The partition number of a segment, by its topic."""
    partitions = client.admin.describe(stream).partitions
    [number] = [number for item, number in partitions.items() if StreamName.parse(stream).segment_topic(item) == topic]
    return number


def test_a_transaction_that_commits_less_than_was_read_does_not_stop_what_follows(
    client: rollbridge.Bridge, orders: str, payments: str, group: Group
) -> None:
    """It names finished segments again, by the names of the last messages, while another one is still being read."""
    write(client, orders, b"before")
    client.admin.scale(orders, seal=[0, 1], ranges=[(0.0, 1.0)])
    write(client, orders, b"after")
    with group.member(orders, enable_auto_commit=False) as consumer:
        until(lambda: len(consumer.assignment()) == 3 or consumer.poll(0.1))
        consumer.pause([TopicPartition(orders, 1)])
        end = client.admin.history(orders).sealed_end(rollbridge.SegmentId.of(0, 0))
        with client.reader(orders, follow=False) as reader:
            records = sum(record.segment == rollbridge.SegmentId.of(0, 0) for record in reader)
        found = take(consumer, records)
        assert {message.partition() for message in found} == {0}
        first = {place_of(message): (message.offset() or 0) + 1 for message in found}
        consumer.commit(asynchronous=False)

        def committed() -> int:
            consumer.poll(0.1)
            [place] = consumer.committed([TopicPartition(orders, 0)], timeout=60)
            return int(place.offset)

        until(lambda: committed() == end)
        [position] = consumer.position([TopicPartition(orders, 0)])
        assert position.offset == end, "or a transaction that commits positions would take the end back"
        with client.begin(payments) as txn:
            txn.write(payments, key=b"k", value=b"v")
            txn.send_offsets({place: offset - 1 for place, offset in first.items()}, consumer.consumer_group_metadata())
        consumer.resume([TopicPartition(orders, 1)])

        def enough() -> bool:
            fresh = consumer.consume(100, 0.2)
            found.extend(fresh)
            if fresh:
                consumer.commit(asynchronous=False)
            return len(found) >= 2 * len(KEYS)

        until(enough)
        assert values(found) == {key: [b"before", b"after"] for key in KEYS}


def test_offsets_by_name_of_a_former_life_reach_nothing_of_the_next(
    client: rollbridge.Bridge, orders: str, payments: str, group: Group
) -> None:
    write(client, orders, b"of the first")
    done: dict[tuple[str, int], int] = {}
    with group.member(orders, enable_auto_commit=False) as consumer:
        for message in take(consumer, len(KEYS)):
            done[place_of(message)] = (message.offset() or 0) + 1
    client.admin.delete_stream(orders)
    client.admin.create_stream(orders, segments=2)
    write(client, orders, b"of the second")
    with client.begin(payments) as txn:
        with pytest.raises(rollbridge.errors.StreamRecreatedError):
            txn.send_offsets(done, group.name)
        txn.write(payments, key=b"k", value=b"v")
    with group.member(orders, enable_auto_commit=False) as consumer:
        found = take(consumer, len(KEYS))
        assert values(found) == {key: [b"of the second"] for key in KEYS}
        assert not {place_of(message) for message in found} & done.keys()
        with consumer_raises(rollbridge.errors.StreamRecreatedError):
            consumer.commit(offsets=[TopicPartition(*place, offset) for place, offset in done.items()])
