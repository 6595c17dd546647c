"""``rollbridge.Consumer``: groups over streams whose segments change, with confluent-kafka's names."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)

import rollbridge
from integration_tests.clients import Site, adopt, consumer_raises, until
from integration_tests.consumer_groups import GROWN, Group, take, values
from integration_tests.grown_streams import KEYS, grow, grow_narrowly, write
from integration_tests.kafka_tools import create_topic
from rollbridge.consumer.records import Message
from rollbridge.errors import (
    ConflictError,
    InvalidRequestError,
    RollbridgeError,
    StreamNotFoundError,
    StreamRecreatedError,
    TruncatedError,
)
from rollbridge.kafka.client import KafkaClient
from rollbridge.stream.names import StreamName


@pytest.fixture
def group(site: Site, unique_name: Callable[[str], str]) -> Group:
    return Group(site, unique_name("group"))


def nothing_comes(consumer: rollbridge.Consumer, polls: int = 6) -> None:
    for _ in range(polls):
        assert consumer.poll(0.25) is None


def test_a_single_member_reads_every_key_in_its_order_and_goes_on_after_a_restart(
    client: rollbridge.Bridge, orders: str, group: Group
) -> None:
    expected = grow(client, orders)
    with group.member(orders) as consumer:
        found = take(consumer, GROWN)
    assert values(found) == dict.fromkeys(KEYS, expected)
    first = found[0]
    assert (first.topic(), first.partition(), first.epoch) == (orders, first.segment.number, 0)
    assert first.sn is not None
    assert (first.sn.dlsn, first.headers(), first.committed) == (first.dlsn, None, True)
    assert first.transaction_id is not None
    assert first.local_sequence == KEYS.index(first.key() or b"")
    write(client, orders, b"later")
    with group.member(orders) as consumer:
        assert values(take(consumer, len(KEYS))) == {key: [b"later"] for key in KEYS}
        nothing_comes(consumer)


class PutOut:
    """A native consumer that says that its member has no id, as when it is put out of its group and joins anew."""

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self.is_out = True
        self.subscribed: list[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def memberid(self) -> str:
        return "" if self.is_out else str(self._consumer.memberid())

    def subscribe(self, topics: list[str], **callbacks: Any) -> None:
        self.subscribed.append(topics)
        self._consumer.subscribe(topics, **callbacks)


@pytest.mark.long
def test_a_subscription_that_changes_while_a_member_has_no_id_waits_for_one(
    client: rollbridge.Bridge, orders: str, group: Group
) -> None:
    with group.member(orders) as consumer:
        write(client, orders, b"first")
        found = take(consumer, len(KEYS))
        native = PutOut(consumer._consumer)
        consumer._consumer = native  # type: ignore[assignment]
        expected = grow(client, orders)

        def is_put_off() -> bool:
            found.extend(consumer.consume(100, 0.5))
            return consumer._to_subscribe is not None

        until(is_put_off)
        assert native.subscribed == [], "librdkafka would abort the process"
        native.is_out = False
        take(consumer, GROWN + len(KEYS), found)
        assert native.subscribed
        assert values(found) == {key: [b"first", *expected] for key in KEYS}


@pytest.mark.long
def test_late_commits_that_roll_a_part_of_a_stream_are_followed_by_a_group(
    client: rollbridge.Bridge, orders: str, group: Group
) -> None:
    with group.member(orders) as one, group.member(orders) as other:
        write(client, orders, b"first")
        expected = [b"first", *grow_narrowly(client, orders)]
        found: list[Message] = []

        def read_by_both() -> bool:
            for member in (one, other):
                found.extend(member.consume(100, 0.2))
            return len(found) >= len(KEYS) * len(expected)

        until(read_by_both)
    assert values(found) == dict.fromkeys(KEYS, expected)


@pytest.mark.long
def test_a_successor_waits_until_what_it_continues_was_committed_by_whoever_owns_it(
    client: rollbridge.Bridge, orders: str, group: Group
) -> None:
    write(client, orders, b"before")
    client.admin.scale(orders, seal=[0, 1], ranges=[(0.0, 0.2), (0.2, 0.4), (0.4, 0.6), (0.6, 0.8), (0.8, 1.0)])
    write(client, orders, b"after")
    settings = {"enable_auto_commit": False}
    with group.member(orders, **settings) as one, group.member(orders, **settings) as other:
        members = (one, other)
        found: list[Message] = []

        def read() -> bool:
            for member in members:
                found.extend(member.consume(100, 0.25))
            return len(found) >= len(KEYS) and all(member.assignment() for member in members)

        until(read)
        for _ in range(10):
            read()
        assert {message.value() for message in found} == {b"before"}
        for member in members:
            own = {place.topic for place in member.assignment()}
            ends = {m.segment_topic: (m.offset() or 0) + 1 for m in sorted(found, key=lambda m: m.offset() or 0)}
            places = [TopicPartition(topic, 0, end) for topic, end in ends.items() if topic in own]
            if places:
                member.commit(offsets=places, asynchronous=False)

        def read_all() -> bool:
            read()
            return all(b"after" in order for order in values(found).values())

        until(read_all)
    for key, order in values(found).items():
        assert list(dict.fromkeys(order)) == [b"before", b"after"], key


def test_a_commit_that_a_rebalance_has_refused_keeps_no_successor_waiting(
    client: rollbridge.Bridge, orders: str, group: Group
) -> None:
    expected = grow(client, orders)
    with group.member(orders, enable_auto_commit=False) as consumer:
        found = take(consumer, len(KEYS))
        for place in consumer.position(consumer.assignment()):
            if place.offset >= 0:  # as librdkafka tells the outcome of an asynchronous commit
                consumer._committed(KafkaError(KafkaError.REBALANCE_IN_PROGRESS), [place])
        while len(found) < GROWN:
            take(consumer, len(found) + 1, found)
            consumer.commit(asynchronous=False)
    assert values(found) == dict.fromkeys(KEYS, expected)


@pytest.mark.parametrize("strategy", ["cooperative-sticky", pytest.param("roundrobin", marks=pytest.mark.long)])
def test_members_share_and_take_over_from_each_other(
    client: rollbridge.Bridge, orders: str, group: Group, strategy: str
) -> None:
    expected = grow(client, orders)
    found: list[Message] = []
    settings = {"auto_commit_interval_ms": 100, "partition_assignment_strategy": strategy}
    with group.member(orders, **settings) as stays:
        with group.member(orders, **settings) as leaves:

            def both() -> bool:
                for member in (stays, leaves):
                    found.extend(member.consume(3, 0.2))
                return bool(stays.assignment() and leaves.assignment())

            until(both)
            assert {p.topic for p in stays.assignment()}.isdisjoint({p.topic for p in leaves.assignment()})
        write(client, orders, b"more")

        def all_seen() -> bool:
            found.extend(stays.consume(100, 0.3))
            return len({message.dlsn for message in found}) >= GROWN + len(KEYS)

        until(all_seen)
    for key in KEYS:
        order = [message for message in found if message.key() == key]
        seen: list[rollbridge.DLSN] = []
        for message in order:
            assert message.dlsn is not None
            if message.dlsn not in seen:
                assert not seen or message.dlsn > seen[-1], "something came before what it continues"
                seen.append(message.dlsn)
        assert len(seen) == len(expected) + 1


def test_a_group_that_begins_at_the_latest_records_misses_none_of_later_epochs(
    client: rollbridge.Bridge, orders: str, group: Group
) -> None:
    grow(client, orders)
    with group.member(orders, auto_offset_reset="latest") as consumer:
        until(lambda: consumer.poll(0.2) is None and _positions_known(consumer, 2))
        client.admin.scale(orders, seal=[5], ranges=[(0.0, 0.5)])
        write(client, orders, b"new")
        assert values(take(consumer, len(KEYS))) == {key: [b"new"] for key in KEYS}


def _positions_known(consumer: rollbridge.Consumer, count: int) -> bool:
    places = consumer.position(consumer.assignment())
    return sum(place.offset != OFFSET_INVALID for place in places) >= count


def test_a_group_without_commits_can_be_an_error(client: rollbridge.Bridge, orders: str, group: Group) -> None:
    with (
        group.member(orders, auto_offset_reset="error") as consumer,
        pytest.raises(KafkaException, match="no committed offset"),
    ):
        take(consumer, 1)


def test_the_names_of_confluent_kafka(client: rollbridge.Bridge, orders: str, group: Group) -> None:
    write(client, orders, b"0")
    name = StreamName.parse(orders)
    topics = [name.segment_topic(rollbridge.SegmentId.of(number, 0)) for number in (0, 1)]
    events: list[tuple[str, list[str]]] = []
    with group.member(enable_auto_commit=False) as consumer:
        consumer.subscribe(
            [orders],
            on_assign=lambda _, places: events.append(("assign", sorted(place.topic for place in places))),
            on_revoke=lambda _, places: events.append(("revoke", sorted(place.topic for place in places))),
        )
        found = take(consumer, len(KEYS))
        assert [place.topic for place in consumer.assignment()] == topics
        assert events == [("assign", topics)]
        by_number = {number: [m for m in found if m.partition() == number] for number in (0, 1)}
        places = [TopicPartition(orders, number) for number in (0, 1)]
        ends = [len(by_number[number]) for number in (0, 1)]
        assert [place.offset for place in consumer.position(places)] == ends
        assert [place.offset for place in consumer.committed(places, timeout=120)] == [0, 0]
        consumer.commit(message=by_number[0][-1], asynchronous=False)
        consumer.commit(offsets=[TopicPartition(orders, 1, 1)], asynchronous=False)
        assert [place.offset for place in consumer.committed(places, timeout=120)] == [ends[0], 1]
        consumer.seek(TopicPartition(orders, 1, 0))
        again = take(consumer, ends[1])
        assert [m.dlsn for m in again] == [m.dlsn for m in by_number[1]]
        consumer.pause([TopicPartition(orders, 0)])
        write(client, orders, b"1")
        assert {m.partition() for m in take(consumer, ends[1])} == {1}
        nothing_comes(consumer, 2)
        consumer.resume([TopicPartition(orders, 0)])
        assert {m.partition() for m in take(consumer, ends[0])} == {0}
        consumer.commit(asynchronous=False)
        low, high = consumer.get_watermark_offsets(TopicPartition(orders, 0), timeout=120)
        assert (low, high) == (0, ends[0] * 2 + 2)
        assert consumer.memberid()
        assert consumer.consumer_group_metadata() is not None
        with pytest.raises(KafkaException):
            consumer.seek(TopicPartition("a.b.segment-0.epoch-0", 0, 0))
    assert events[-1] == ("revoke", topics)
    with pytest.raises(RuntimeError, match="closed"):
        consumer.poll(0)


def test_what_is_given_up_can_be_committed_at_the_last_moment(
    client: rollbridge.Bridge, orders: str, group: Group
) -> None:
    write(client, orders, b"0")
    given_up: list[TopicPartition] = []

    def commit(consumer: rollbridge.Consumer, places: list[TopicPartition]) -> None:
        given_up.extend(consumer.commit(offsets=consumer.position(places), asynchronous=False) or [])

    with group.member(enable_auto_commit=False) as consumer:
        consumer.subscribe([orders], on_revoke=commit)
        take(consumer, len(KEYS))
    assert sum(place.offset for place in given_up) == len(KEYS)
    with group.member(orders) as consumer:
        nothing_comes(consumer, 2)


def test_a_member_reads_on_after_a_refused_assignment_or_subscription(
    client: rollbridge.Bridge, orders: str, group: Group
) -> None:
    write(client, orders, b"0")
    with group.member(orders) as consumer:
        found = take(consumer, len(KEYS))
        for refused in (
            [TopicPartition(orders, 0), TopicPartition(orders, 17, 0)],
            [TopicPartition(orders, 0, 0), TopicPartition(orders, 1, -17)],
            [TopicPartition(orders, 1, 0), TopicPartition("no/such-stream", 0, 0)],
        ):
            with pytest.raises(KafkaException):
                consumer.assign(refused)
        with pytest.raises(KafkaException):
            consumer.subscribe([orders, f"{orders}-that-is-not-there"])
        assert len(consumer.assignment()) == 2
        write(client, orders, b"1")
        take(consumer, 2 * len(KEYS), found)
        assert values(found) == {key: [b"0", b"1"] for key in KEYS}
    with group.member(group_id=group.name + "-by-hand") as consumer:
        consumer.incremental_assign([TopicPartition(orders, 0, 0)])
        first = take(consumer, 1)
        for refused in ([TopicPartition(orders, 0, 1)], [TopicPartition(orders, 1, 0), TopicPartition(orders, 17, 0)]):
            with pytest.raises(KafkaException):
                consumer.incremental_assign(refused)
        ours = sum(message.partition() == 0 for message in found)
        assert len(take(consumer, ours, first)) == ours
        assert consumer.position([TopicPartition(orders, 0)])[0].offset == (first[-1].offset() or 0) + 1


def test_a_callback_that_raises_keeps_no_segment_from_others(
    client: rollbridge.Bridge, orders: str, group: Group
) -> None:
    write(client, orders, b"0")

    def fail(_: rollbridge.Consumer, places: list[TopicPartition]) -> None:
        raise ValueError(f"cannot give up {len(places)}")

    with group.member(enable_auto_commit=False) as one:
        one.subscribe([orders], on_revoke=fail)
        take(one, len(KEYS))
        one.commit(asynchronous=False)
        with group.member(orders) as other:
            raised: list[ValueError] = []

            def shared() -> bool:
                try:
                    one.poll(0.2)
                except ValueError as fault:
                    raised.append(fault)
                other.poll(0.2)
                return bool(raised) and len(one.assignment()) == len(other.assignment()) == 1

            until(shared)
            assert "cannot give up 1" in str(raised[0])
            write(client, orders, b"1")
            found: list[Message] = []

            def everything() -> bool:
                for member in (one, other):
                    found.extend(member.consume(10, 0.2))
                return len(found) >= len(KEYS)

            until(everything)
            assert values(found) == {key: [b"1"] for key in KEYS}
        with pytest.raises(ValueError, match="cannot give up"):
            one.close()


class Answered:
    """A native consumer to which the outcome of a commit is told while it fetches several messages."""

    def __init__(self, consumer: Any, place: TopicPartition) -> None:
        self._consumer = consumer
        self._place = place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def consume(self, number: int, _timeout: float) -> Any:
        self._consumer.commit(offsets=[self._place], asynchronous=True)
        return self._consumer.consume(number, 60)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_callback_that_raises_while_messages_are_fetched_loses_none(
    client: rollbridge.Bridge, orders: str, group: Group, *, by_hand: bool
) -> None:
    told: list[Any] = []

    def fail(*outcome: Any) -> None:
        told.append(outcome)
        raise ValueError("no more of this")

    with group.member(enable_auto_commit=False, on_commit=fail) as consumer:
        if by_hand:
            consumer.assign([TopicPartition(orders, number, OFFSET_BEGINNING) for number in (0, 1)])
        else:
            consumer.subscribe([orders])
            until(lambda: consumer.poll(0.2) is None and _positions_known(consumer, 2))
        native, first = consumer._consumer, StreamName.parse(orders).segment_topic(rollbridge.SegmentId.of(0, 0))
        consumer._consumer = Answered(native, TopicPartition(first, 0, 0))  # type: ignore[assignment]
        write(client, orders, b"0")

        def is_interrupted() -> bool:
            try:
                assert consumer.consume(100, 0.5) == []
            except ValueError:
                return True
            return False

        until(is_interrupted)
        assert told
        consumer._consumer = native
        assert values(take(consumer, len(KEYS))) == {key: [b"0"] for key in KEYS}
        nothing_comes(consumer, 2)


def test_a_commit_of_somebody_else_s_generation_is_refused(
    client: rollbridge.Bridge, orders: str, group: Group
) -> None:
    write(client, orders, b"0")
    with group.member(orders, enable_auto_commit=False) as consumer, group.member() as stranger:
        take(consumer, len(KEYS))
        stranger.assign([TopicPartition(orders, 0, 0)])
        with pytest.raises(KafkaException, match=f"commit of group {group.name} is refused") as refused:
            stranger.commit(offsets=[TopicPartition(orders, 0, 1)], asynchronous=False)
        assert refused.value.args[0].code() == KafkaError.UNKNOWN_MEMBER_ID
        assert consumer.commit(asynchronous=False)


def test_a_group_may_begin_elsewhere_and_a_member_may_assign_by_hand(
    client: rollbridge.Bridge, orders: str, group: Group
) -> None:
    write(client, orders, b"0")

    def at_the_end(consumer: rollbridge.Consumer, places: list[TopicPartition]) -> None:
        for place in places:
            place.offset = OFFSET_END
        consumer.assign(places)

    with group.member() as consumer:
        consumer.subscribe([orders], on_assign=at_the_end)
        until(lambda: consumer.poll(0.2) is None and _positions_known(consumer, 2))
        write(client, orders, b"1")
        assert values(take(consumer, len(KEYS))) == {key: [b"1"] for key in KEYS}
    with group.member(group_id=group.name + "-by-hand") as consumer:
        consumer.assign([TopicPartition(orders, 1, OFFSET_BEGINNING)])
        assert {message.partition() for message in take(consumer, 1)} == {1}


@pytest.mark.long
@pytest.mark.parametrize("ours", [False, True], ids=["a native transaction", "a transaction of ours"])
def test_offsets_that_a_transaction_commits_let_successors_go_on(
    site: Site, client: rollbridge.Bridge, orders: str, payments: str, group: Group, ours: bool
) -> None:
    expected = grow(client, orders)
    producer = Producer({"bootstrap.servers": site.cluster.bootstrap_servers, "transactional.id": group.name})
    producer.init_transactions(30)
    found: list[Message] = []
    with group.member(orders, enable_auto_commit=False) as consumer:

        def commit(fresh: list[Message]) -> None:
            places = [place for place in consumer.position(consumer.assignment()) if place.offset >= 0]
            if ours:
                with client.transaction(payments) as txn:
                    for message in fresh:
                        txn.write(payments, message.key(), message.value())
                    txn.send_offsets(places, consumer.consumer_group_metadata())
            else:
                producer.begin_transaction()
                producer.send_offsets_to_transaction(places, consumer.consumer_group_metadata())
                producer.commit_transaction(30)

        def consume_and_commit() -> bool:
            fresh = consumer.consume(100, 0.5)
            found.extend(fresh)
            if fresh:
                commit(fresh)
            return len(found) >= GROWN

        until(consume_and_commit)
    assert values(found) == dict.fromkeys(KEYS, expected)
    if ours:
        with client.reader(payments, follow=False) as reader:
            assert sorted((record.key, record.value) for record in reader) == sorted(
                (message.key(), message.value()) for message in found
            )


MEMBER = """
import sys, rollbridge
consumer = rollbridge.Consumer(dict(zip(sys.argv[2::2], sys.argv[3::2])))
consumer.subscribe([sys.argv[1]])
while True:
    for message in consumer.consume(2, 1.0):
        print(f"{message.key().decode()} {message.dlsn}", flush=True)
"""


@pytest.mark.long
def test_a_member_that_is_killed_loses_nothing_and_no_order(
    client: rollbridge.Bridge, orders: str, group: Group
) -> None:
    """It has printed records without having committed them; the one that takes over is handed these again."""
    expected = grow(client, orders)
    config = group.config(session_timeout_ms=6000, auto_commit_interval_ms=200)
    arguments = [str(item) for pair in config.items() for item in pair]
    lines: list[str] = []
    for most in (11, 17, 10 * GROWN):
        with subprocess.Popen(
            [sys.executable, "-c", MEMBER, orders, *arguments], stdout=subprocess.PIPE, text=True
        ) as member:
            assert member.stdout is not None
            try:
                for _ in range(most):
                    lines.append(member.stdout.readline().strip())
                    if len(set(lines)) == GROWN:
                        break
            finally:
                member.kill()
            # It has gone on meanwhile, and may have committed that, too, but for a line that it was in the middle of.
            lines += [line.strip() for line in member.stdout if line.endswith("\n")]
    for key in KEYS:
        seen: list[rollbridge.DLSN] = []
        for line in lines:
            name, _, place = line.partition(" ")
            if name == key.decode() and rollbridge.DLSN.parse(place) not in seen:
                seen.append(rollbridge.DLSN.parse(place))
        assert seen == sorted(seen)
        assert len(seen) == len(expected)


def test_what_counts_as_processed_can_be_said(client: rollbridge.Bridge, orders: str, group: Group) -> None:
    write(client, orders, b"0")
    with group.member(orders, enable_auto_offset_store=False) as consumer:
        found = take(consumer, len(KEYS))
        first = next(message for message in found if message.partition() == 0)
        consumer.store_offsets(message=first)
        consumer.store_offsets(offsets=[TopicPartition(orders, 1, 2)])
        with pytest.raises(KafkaException):
            consumer.store_offsets(offsets=[TopicPartition("a.b.segment-0.epoch-0", 0, 2)])
    with group.member(orders) as consumer:
        again = take(consumer, len(KEYS) - 3)
        nothing_comes(consumer, 2)
        assert {message.dlsn for message in found} - {message.dlsn for message in again} == {
            first.dlsn,
            *(message.dlsn for message in found if message.partition() == 1 and (message.offset() or 0) < 2),
        }
        with consumer_raises(InvalidRequestError, match=r"enable\.auto\.offset\.store"):
            consumer.store_offsets(message=first)


def test_what_is_stored_is_all_that_is_committed_and_a_refused_store_stores_nothing(
    client: rollbridge.Bridge, orders: str, group: Group
) -> None:
    write(client, orders, b"0")
    settings = {"enable_auto_commit": False, "enable_auto_offset_store": False}
    with group.member(orders, **settings) as consumer:
        take(consumer, len(KEYS))
        places = [TopicPartition(orders, 0), TopicPartition(orders, 1)]
        for refused in (TopicPartition(orders, 1, 1_000), TopicPartition(orders, 7, 1)):
            with pytest.raises(KafkaException):
                consumer.store_offsets(offsets=[TopicPartition(orders, 0, 1), refused])
        consumer.commit(asynchronous=False)
        assert [place.offset for place in consumer.committed(places, timeout=120)] == [0, 0]
        consumer.store_offsets(offsets=[TopicPartition(orders, 0, 1)])
        consumer.commit(asynchronous=False)
        assert [place.offset for place in consumer.committed(places, timeout=120)] == [1, 0]
    with group.member(orders) as consumer:
        take(consumer, len(KEYS) - 1)
        nothing_comes(consumer, 2)


def test_a_segment_that_is_paused_while_it_waits_stays_so_once_it_may_be_read(
    client: rollbridge.Bridge, orders: str, group: Group
) -> None:
    write(client, orders, b"before")
    client.admin.scale(orders, seal=[0], ranges=[(0.0, 0.25), (0.25, 0.5)])
    write(client, orders, b"after")
    with group.member(orders, enable_auto_commit=False) as consumer:
        found: list[Message] = []
        until(lambda: take(consumer, 1, found) and all(key in values(found) for key in KEYS))
        waiting = [place for place in consumer.position(consumer.assignment()) if place.offset == OFFSET_INVALID]
        assert len(waiting) == 2
        consumer.pause(waiting)
        consumer.commit(asynchronous=False)
        until(lambda: consumer.poll(0.2) is None and all(at.offset >= 0 for at in consumer.position(waiting)))
        nothing_comes(consumer, 2)
        consumer.resume(waiting)
        take(consumer, 2 * len(KEYS), found)
    assert values(found) == {key: [b"before", b"after"] for key in KEYS}


def test_what_was_read_to_its_end_can_be_read_once_more_and_its_end_stays_committed(
    client: rollbridge.Bridge, orders: str, group: Group
) -> None:
    write(client, orders, b"before")
    client.admin.scale(orders, seal=[0, 1], ranges=[(0.0, 1.0)])
    write(client, orders, b"after")
    sealed = client.admin.history(orders).sealed_end(rollbridge.SegmentId.of(0, 0))
    place = TopicPartition(orders, 0)
    with group.member(orders, enable_auto_commit=False) as consumer:
        found = take(consumer, len(KEYS))
        consumer.commit(asynchronous=False)
        take(consumer, 2 * len(KEYS), found)
        consumer.commit(asynchronous=False)
        first = [message.dlsn for message in found if message.partition() == 0]
        for offset in (0, 1):
            consumer.seek(TopicPartition(orders, 0, offset))
            assert consumer.position([place])[0].offset == offset
            again = take(consumer, len(first) - offset)
            assert [message.dlsn for message in again] == first[offset:]
            consumer.commit(message=again[0], asynchronous=False)
            consumer.commit(asynchronous=False)
            until(lambda: not consumer.poll(0.1) and consumer.committed([place], timeout=120)[0].offset == sealed)
    with group.member(orders) as consumer:
        nothing_comes(consumer, 2)


def test_a_group_that_has_begun_reads_what_truncation_has_left_whatever_new_ones_begin_with(
    client: rollbridge.Bridge, orders: str, group: Group
) -> None:
    settings = {"auto_offset_reset": "latest", "enable_auto_commit": False}
    with group.member(orders, **settings) as consumer:
        until(lambda: consumer.poll(0.2) is None and _positions_known(consumer, 2))
        write(client, orders, b"read")
        take(consumer, len(KEYS))
        consumer.commit(asynchronous=False)
    write(client, orders, b"deleted")
    with client.reader(orders, follow=False) as reader:
        assert len(list(reader)) == 2 * len(KEYS)
        behind = reader.position
    write(client, orders, b"left")
    client.admin.truncate(orders, behind)
    with group.member(orders, **settings) as consumer:
        assert values(take(consumer, len(KEYS))) == {key: [b"left"] for key in KEYS}


def test_a_group_that_reads_other_streams_is_refused(
    client: rollbridge.Bridge, orders: str, payments: str, group: Group
) -> None:
    write(client, orders, b"x")
    with group.member(orders) as consumer:
        take(consumer, len(KEYS))
        for streams in ([payments], [orders, payments]):
            with group.member() as stranger, consumer_raises(ConflictError, match=f"{group.name} reads .*{orders}"):
                stranger.subscribe(streams)
                while True:  # if brokers were slow to say what the group has committed
                    stranger.poll(1.0)
        write(client, orders, b"y")
        take(consumer, len(KEYS))


@pytest.fixture
def topic(site: Site, client: rollbridge.Bridge, unique_name: Callable[[str], str]) -> str:
    """An adopted topic of two partitions."""
    name = unique_name("shop.invoices")
    create_topic(site.cluster.bootstrap_servers, name, partitions=2)
    adopt(client, name, partitioner="murmur2")
    return name


@pytest.mark.parametrize("left", [False, True], ids=["topic", "segments"])
def test_adopted_topics_that_a_group_reads_beside_a_stream_may_differ(
    client: rollbridge.Bridge, orders: str, topic: str, group: Group, left: bool
) -> None:
    if left:  # what follows lies in topics of our own
        client.admin.scale(topic, seal=[0], ranges=[(0.0, 0.25), (0.25, 0.5)], leave_topic=True)
    for name in (orders, topic):
        write(client, name, b"both")
    with group.member(orders, topic) as consumer:
        take(consumer, 2 * len(KEYS))
        for _ in range(2):
            consumer.subscribe([orders])
            write(client, orders, b"one")
            take(consumer, len(KEYS))
            consumer.unsubscribe()
    with group.member(topic) as consumer:
        write(client, topic, b"other")
        take(consumer, len(KEYS))
    with group.member(orders) as consumer:
        write(client, orders, b"fresh")
        take(consumer, len(KEYS))
        assert consumer.committed([TopicPartition(topic, 1)])[0].offset > 0
        client.admin.scale(orders, seal=[0], ranges=[(0.0, 0.25), (0.25, 0.5)])
        write(client, orders, b"scaled")
        take(consumer, len(KEYS))


@pytest.mark.long
def test_a_topic_that_was_created_and_adopted_again_is_begun_at_its_first_record(
    site: Site, client: rollbridge.Bridge, topic: str, group: Group
) -> None:
    """A member that subscribes again keeps its partitions, and nothing of where it was, nor what it had processed."""
    for number in range(3):
        write(client, topic, b"former-%d" % number)
    with group.member(topic, auto_commit_interval_ms=86_400_000) as consumer:
        former = take(consumer, 3 * len(KEYS))
        with KafkaClient(site.cluster.bootstrap_servers) as kafka:
            admin = kafka.topics
            admin.delete_topics([topic])
            until(lambda: topic not in admin.list_topics())
        create_topic(site.cluster.bootstrap_servers, topic, partitions=2)

        def is_refused() -> bool:
            try:
                assert consumer.poll(0.5) is None
            except KafkaException as fault:
                return isinstance(fault.__cause__, StreamRecreatedError | TruncatedError)
            return False

        until(is_refused)
        for asynchronous in (True, False):
            with consumer_raises(StreamRecreatedError, TruncatedError):
                consumer.commit(message=former[-1], asynchronous=asynchronous)
        client.admin.release_topic(topic)
        adopt(client, topic, partitioner="murmur2")
        fresh = [b"fresh-%d" % number for number in range(4)]
        for value in fresh:
            write(client, topic, value)
        consumer.subscribe([topic])
        with consumer_raises(InvalidRequestError, match="handed out"):
            consumer.commit(message=former[-1], asynchronous=False)
        assert values(take(consumer, len(fresh) * len(KEYS))) == dict.fromkeys(KEYS, fresh)


@pytest.mark.long
def test_a_member_that_closes_commits_nothing_in_a_topic_that_was_created_again(
    site: Site, client: rollbridge.Bridge, topic: str, group: Group
) -> None:
    write(client, topic, b"former")
    with group.member(topic, auto_commit_interval_ms=86_400_000) as consumer:
        take(consumer, len(KEYS))
        with KafkaClient(site.cluster.bootstrap_servers) as kafka:
            admin = kafka.topics
            admin.delete_topics([topic])
            until(lambda: topic not in admin.list_topics())
        create_topic(site.cluster.bootstrap_servers, topic, partitions=2)
        with consumer_raises(StreamRecreatedError, TruncatedError):
            take(consumer, 1)
    client.admin.release_topic(topic)
    adopt(client, topic, partitioner="murmur2")
    write(client, topic, b"fresh")
    with group.member(topic) as consumer:
        assert values(take(consumer, len(KEYS))) == {key: [b"fresh"] for key in KEYS}


def test_streams_and_partitions_that_do_not_exist(client: rollbridge.Bridge, orders: str, group: Group) -> None:
    with group.member() as consumer:
        with consumer_raises(StreamNotFoundError):
            consumer.subscribe([orders + "-x"])
        for streams in ([], ["no name"], ["a/b/c"]):
            with consumer_raises(InvalidRequestError):
                consumer.subscribe(streams)
        consumer.subscribe(orders)
        with consumer_raises(InvalidRequestError, match="has had no partition 7 so far"):
            consumer.pause([TopicPartition(orders, 7)])
        with consumer_raises(InvalidRequestError, match="names no segment"):
            consumer.seek(TopicPartition("a/b/c", 0, 0))
        with pytest.raises(KafkaException, match="is not being read"):
            consumer.seek(TopicPartition("foreign", 0, 0))
        with consumer_raises(InvalidRequestError, match="cannot be committed"):
            consumer.commit(offsets=[TopicPartition(orders, 0, -5)])


def test_a_stream_that_is_deleted_ends_the_reading(client: rollbridge.Bridge, orders: str, group: Group) -> None:
    write(client, orders, b"x")
    with group.member(orders) as consumer:
        take(consumer, len(KEYS))
        client.admin.delete_stream(orders)
        with consumer_raises(StreamNotFoundError):
            take(consumer, 1)


def test_settings_that_are_wrong_are_all_named() -> None:
    with pytest.raises(ValueError, match=r"group\.id must be set"):
        rollbridge.Consumer({"bootstrap.servers": "localhost:1", "zookeeper": "localhost:1"})
    with pytest.raises(KafkaException) as caught:
        rollbridge.Consumer(
            {
                "bootstrap.servers": "localhost:1",
                "zookeeper": "localhost:1",
                "group.id": "g",
                "plugin.library.paths": "evil",
                "isolation.level": "read_uncommitted",
                "auto.offset.reset": "middle",
                "partition.assignment.strategy": "range",
                "enable.auto.commit": "perhaps",
                "auto.commit.interval.ms": 0,
            }
        )
    for key in ("plugin.library.paths", "isolation.level", "auto.offset.reset", "strategy", "perhaps"):
        assert key in str(caught.value)
    assert caught.value.args[0].code() == KafkaError._INVALID_ARG


@pytest.mark.parametrize("reset", ["earliest", "latest"])
def test_a_member_takes_nothing_of_a_stream_that_was_created_again_for_the_former_one(
    client: rollbridge.Bridge, orders: str, group: Group, reset: str
) -> None:
    with group.member(orders, auto_offset_reset=reset, enable_auto_commit=False) as consumer:

        def has_begun() -> bool:
            write(client, orders, b"former")
            return bool(consumer.consume(100, 0.5))

        until(has_begun)
        consumer.commit(asynchronous=False)
        [former, *_] = consumer.position(consumer.assignment())
        write(client, orders, b"never read")
        client.admin.delete_stream(orders)
        client.admin.create_stream(orders, segments=2)
        write(client, orders, b"fresh")
        found: list[Message] = []

        def is_refused() -> bool:
            try:
                found.extend(consumer.consume(100, 0.5))
            except KafkaException as fault:
                if not isinstance(fault.__cause__, StreamRecreatedError | StreamNotFoundError):
                    raise
                return isinstance(fault.__cause__, StreamRecreatedError)  # or else it was looked at in between
            return False

        until(is_refused)
        with consumer_raises(StreamRecreatedError, match="subscribe again"):
            consumer.poll(30)
        assert {message.value() for message in found} <= {b"never read", b"former"}
        with consumer_raises(StreamRecreatedError):
            consumer.commit(offsets=[former], asynchronous=False)
        consumer.subscribe([orders])
        if reset == "earliest":
            assert values(take(consumer, len(KEYS))) == {key: [b"fresh"] for key in KEYS}
            nothing_comes(consumer)
        else:
            later: list[Message] = []

            def comes() -> bool:
                write(client, orders, b"later")
                later.extend(consumer.consume(100, 0.5))
                return bool(later)

            until(comes)
            assert {message.value() for message in later} == {b"later"}


def test_offsets_of_a_former_life_commit_no_transaction(client: rollbridge.Bridge, orders: str, group: Group) -> None:
    """A transaction that carries a place in a stream that is gone does not tell the group that it has read anything."""
    with group.member(orders, enable_auto_commit=False) as consumer:
        write(client, orders, b"former")
        take(consumer, len(KEYS))
        places, metadata = consumer.position(consumer.assignment()), consumer.consumer_group_metadata()
        client.admin.delete_stream(orders)
        client.admin.create_stream(orders, segments=2)
        write(client, orders, b"fresh")
        transaction = client.begin(orders)
        transaction.write(orders, key=b"k", value=b"what came of it")

        def send() -> None:
            transaction.send_offsets(places, metadata)
            transaction.commit()

        with pytest.raises((RollbridgeError, KafkaException)):
            send()
    with group.member(orders) as fresh:
        assert values(take(fresh, len(KEYS))) == {key: [b"fresh"] for key in KEYS}
        nothing_comes(fresh)
