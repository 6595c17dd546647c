"""Streams that move from one transaction group into another, on real servers, with clients that use them meanwhile."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Producer

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import adopt, consumer_of
from integration_tests.command_line import Cli
from integration_tests.coordinators import Relay, coordinator
from integration_tests.patience import eventually
from integration_tests.test_previews import write_on
from integration_tests.test_snapshots import OFTEN, abort_many, connected
from rollbridge.cli.common import ExitCode
from rollbridge.consumer.records import Message
from rollbridge.errors import RollbridgeError, StreamBusyError
from rollbridge.kafka.clients import producer_config
from rollbridge.kafka.topics import TopicAdmin, TopicSpec
from rollbridge.model.names import StreamName

OPEN = "open transactions|have just come in"
"""Why a stream is not moved while something is open: the leader has read it, or knows that there is more to read."""


@pytest.fixture
def root(unique_name: Callable[[str], str]) -> str:
    """A ZooKeeper root path of this test's own."""
    return f"/{unique_name('moves')}"


@pytest.fixture
def stream(unique_name: Callable[[str], str]) -> str:
    """The name of a stream in a scope of its own."""
    return f"{unique_name('moves')}/orders"


def commit(b: rollbridge.Bridge, stream: str, value: bytes) -> rollbridge.TransactionId:
    """Commit a transaction of one record."""
    transaction = b.begin(stream)
    transaction.write(stream, key=b"k", value=value)
    transaction.commit(timeout=120)
    return transaction.id


def values(b: rollbridge.Bridge, stream: str) -> list[bytes | None]:
    """All committed records."""
    with b.reader(stream, follow=False) as reader:
        return [record.value for record in reader]


def test_a_stream_moves_while_clients_use_it_and_back(
    cluster: AnyCluster, root: str, stream: str, tmp_path: Path
) -> None:
    name = StreamName.parse(stream)
    topics = TopicAdmin(cluster.bootstrap_servers)
    with (
        connected(cluster, root) as b,
        connected(cluster, root) as other,
        coordinator(cluster, root, "leader", tmp_path, **OFTEN),
    ):
        b.admin.create_stream(stream)
        commit(other, stream, b"1")
        abort_many(b, stream, 60)
        open_one = b.begin(stream)
        write_on(open_one, stream, b"2")
        with pytest.raises(StreamBusyError, match=OPEN):
            b.admin.move_stream(stream, "audit")
        open_one.commit(timeout=120)
        with b.reader(stream) as reader, b.writer(stream) as plain, b.cas_writer(stream) as conditional:
            plain.write(b"k", b"3").result(120)
            moved = b.admin.move_stream(stream, "audit")
            assert (moved.group.group, moved.moves, moved.moving_to) == ("audit", 1, "")
            assert b.admin.move_stream(stream, "audit") == moved, "asking again changes nothing"
            plain.write(b"k", b"4").result(120)
            conditional.write(b"k", b"5", expected=rollbridge.ANY)
            commit(b, stream, b"6")
            seen: list[bytes | None] = []
            while len(seen) < 6:
                seen.extend(record.value for record in reader.consume(10, 60))
            assert seen == [b"1", b"2", b"3", b"4", b"5", b"6"]

        # A client that was connected all the time, and knew the stream in its old group.
        def commits() -> bool:
            try:
                commit(other, stream, b"7")
            except RollbridgeError:
                return False
            return True

        eventually(commits, "a client that has used the stream in its old group uses it in the new one")
        preview = b.begin(stream)
        write_on(preview, stream, b"open")
        with b.reader(stream, start="latest", isolation="read_uncommitted", follow=False) as reader:
            assert [record.value for record in reader] == [b"open"]
        preview.abort()
        with b.transactions(name.scope, group="audit", follow=False) as transactions:
            assert [[record.value for record in item.records()] for item in transactions] == [[b"6"], [b"7"]]
        with b.transactions(name.scope, follow=False) as transactions:
            assert [[record.value for record in item.records()] for item in transactions] == [[b"1"], [b"2"]]
        former = name.buffer_topic()
        eventually(lambda: not topics.topic_ids([former]), "the old buffer is deleted")
        b.admin.scale(stream, seal=[0], ranges=[(0.0, 0.5), (0.5, 1.0)])
        back = b.admin.move_stream(stream, "default")
        assert (back.moves, back.buffer_topic) == (2, f"{former}.move-2")
        commit(b, stream, b"8")
        assert values(b, stream) == [b"%d" % number for number in range(1, 9)]
        b.admin.delete_stream(stream)
        assert not [topic for topic in topics.list_topics() if topic.startswith(f"{name.scope}.orders.")]


def _take(consumer: rollbridge.Consumer) -> bytes | None:
    found: list[Message] = []

    def comes() -> bool:
        found.extend(consumer.consume(1, 0.5))
        return bool(found)

    eventually(comes, "a record comes")
    return found[0].value()


def test_a_consumer_group_goes_on_where_it_was_in_a_stream_that_has_moved(
    cluster: AnyCluster, root: str, stream: str, tmp_path: Path, unique_name: Callable[[str], str]
) -> None:
    readers = unique_name("readers")
    with connected(cluster, root) as b, coordinator(cluster, root, "leader", tmp_path, **OFTEN):
        b.admin.create_stream(stream)
        for value in (b"1", b"2"):
            commit(b, stream, value)
        with consumer_of(cluster, root, readers, stream) as consumer:
            assert _take(consumer) == b"1"
            consumer.commit(asynchronous=False)
            b.admin.move_stream(stream, "audit")
            commit(b, stream, b"3")
            assert [_take(consumer), _take(consumer)] == [b"2", b"3"]
            with b.transaction(stream) as transaction:  # the new group's leader commits the offsets
                transaction.write(stream, key=b"k", value=b"4")
                places = consumer.position(consumer.assignment())
                transaction.send_offsets(places, consumer.consumer_group_metadata())
        with consumer_of(cluster, root, readers, stream) as consumer:
            assert _take(consumer) == b"4"


def test_a_stream_over_an_adopted_topic_moves_and_the_topic_notices_nothing(
    cluster: AnyCluster, root: str, tmp_path: Path, unique_name: Callable[[str], str]
) -> None:
    topic = unique_name("adopted")
    topics = TopicAdmin(cluster.bootstrap_servers)
    topics.create_topics([TopicSpec(name=topic)])
    before = topics.describe([topic])
    native = Producer(producer_config(cluster.bootstrap_servers))
    with connected(cluster, root) as b, coordinator(cluster, root, "leader", tmp_path, **OFTEN):
        adopt(b, topic)
        commit(b, topic, b"1")
        b.admin.move_stream(topic, "audit")
        native.produce(topic, b"2", b"k")
        native.flush()
        commit(b, topic, b"3")
        assert values(b, topic) == [b"1", b"2", b"3"]
        assert topics.describe([topic]) == before


def _finish(transaction: rollbridge.Transaction, stream: str) -> None:
    """Write and commit; the write is refused already if the buffer is known to be closed by then."""
    transaction.write(stream, key=b"k", value=b"late")
    transaction.commit(timeout=120)


def test_a_transaction_that_begins_in_the_old_group_is_not_lost_silently(
    cluster: AnyCluster, root: str, stream: str, tmp_path: Path
) -> None:
    with (
        connected(cluster, root) as b,
        connected(cluster, root) as other,
        coordinator(cluster, root, "leader", tmp_path, **OFTEN),
    ):
        b.admin.create_stream(stream)
        commit(other, stream, b"1")
        late = other.begin(stream)  # nothing is sent before a record is written, or a moment has passed
        b.admin.create_stream(f"{StreamName.parse(stream).scope}/elsewhere", group="audit")
        try:
            b.admin.move_stream(stream, "audit")
        except StreamBusyError:
            late.abort()
            b.admin.move_stream(stream, "audit")
        else:
            with pytest.raises(RollbridgeError) as refused:
                _finish(late, stream)
            assert "moved into another group" in str(refused.value)
        eventually(lambda: commit(b, stream, b"2") is not None, "the new group commits")
        assert values(b, stream) == [b"1", b"2"]


def test_streams_are_moved_on_the_command_line(cluster: AnyCluster, root: str, stream: str, tmp_path: Path) -> None:
    cli = Cli(cluster, root)
    with connected(cluster, root) as b, coordinator(cluster, root, "leader", tmp_path, **OFTEN):
        b.admin.create_stream(stream)
        open_one = b.begin(stream)
        write_on(open_one, stream, b"1")
        refused = cli("stream", "move", stream, "audit")
        assert refused.code == ExitCode.CONFLICT
        assert re.search(OPEN, refused.err)
        open_one.abort()
        assert cli.json("stream", "move", stream, "audit") == {"stream": stream, "group": "audit"}
        assert cli.json("stream", "describe", stream)["group"].endswith("/audit")
        assert cli("stream", "move", f"{stream}-not", "audit").code == ExitCode.NOT_FOUND


@pytest.mark.long
@pytest.mark.parametrize(
    "point",
    [
        "move_stream/Write:after",
        "_step/Seal:after",
        "_step/CreateTopics:after",
        "_step/Write:before",
        "_step/Write:after",
        "take_stream/DeleteTopics:after",
        "take_stream/Write:before",
    ],
)
def test_the_next_leaders_finish_a_move_that_a_killed_one_began(
    cluster: AnyCluster, root: str, stream: str, tmp_path: Path, point: str
) -> None:
    name = StreamName.parse(stream)
    topics = TopicAdmin(cluster.bootstrap_servers)
    with Relay(cluster, root, tmp_path, [point], OFTEN) as relay, connected(cluster, root) as b:
        b.admin.create_stream(stream)
        commit(b, stream, b"1")
        assert b.admin.move_stream(stream, "audit", timeout_s=120).group.group == "audit"
        commit(b, stream, b"2")
        assert values(b, stream) == [b"1", b"2"]
        eventually(lambda: not topics.topic_ids([name.buffer_topic()]), "the old buffer is deleted")
        eventually(lambda: relay.deaths == 1, "the coordinator has died where it should")
