"""A follower of partitions on a real broker: all that there is comes once and in order, and nobody waits for others."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from integration_tests.backends.containers import ContainerCluster
from integration_tests.clients import Site
from integration_tests.containers.partitions import in_sync
from integration_tests.faults import Api, FaultProxy, Point
from integration_tests.kafka_tools import produce
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.errors import CorruptDataError
from rollbridge.kafka import fetch_plan, follower
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.connection import Connection
from rollbridge.kafka.errors import TopicNotFoundError
from rollbridge.kafka.fetch_plan import Fetched, FetchError
from rollbridge.kafka.follower import Follower
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.topics import TopicSpec
from rollbridge.stream.names import Partition

Found = list[tuple[Partition, int, bytes | None]]


@pytest.fixture
def servers(site: Site) -> str:
    return site.cluster.bootstrap_servers


@pytest.fixture
def topic(servers: str, topic_prefix: str) -> str:
    KafkaClient(servers).topics.create_topics([TopicSpec(name=topic_prefix, partitions=2)])
    return topic_prefix


class Collector:
    """Polls a follower and keeps what comes."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self.found: Found = []
        self.troubles: list[FetchError] = []
        self.last: dict[Partition, Fetched] = {}

    def poll(self, timeout_s: float = 0.05) -> None:
        for item in self.follower.poll(timeout_s):
            if isinstance(item, FetchError):
                self.troubles.append(item)
                continue
            self.last[item.partition] = item
            self.found += [(item.partition, record.offset, record.value) for record in item.records()]

    def has(self, count: int) -> Callable[[], bool]:
        """Whether so many records have come by now."""

        def poll() -> bool:
            self.poll()
            return len(self.found) >= count

        return poll

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Poll until something holds."""

        def poll() -> object:
            self.poll()
            return condition()

        eventually(poll, what)

    @property
    def values(self) -> list[bytes | None]:
        return [value for _, _, value in self.found]


@pytest.fixture
def collector(servers: str) -> Iterator[Collector]:
    with closing(KafkaClient(servers).follow(Isolation.READ_COMMITTED, name="test", check_epochs=True)) as made:
        yield Collector(made)


def test_partitions_are_read_from_their_offsets_on_as_they_come_move_and_go(
    servers: str, topic: str, collector: Collector
) -> None:
    one, other = (topic, 0), (topic, 1)
    produce(servers, topic, [b"1", b"2"])
    collector.follower.follow(one, 1)
    eventually(collector.has(1), "what was there has come")
    produce(servers, topic, [b"3"])
    eventually(collector.has(2), "what came later has come")
    assert (collector.last[one].end, collector.last[one].high_watermark) == (3, 3)
    collector.follower.follow(other, 0)
    collector.follower.leave(one)
    produce(servers, topic, [b"4"])
    collector.poll()
    collector.follower.follow(one, 0)
    eventually(collector.has(6), "it is read from elsewhere")
    assert collector.found == [(one, offset, b"%d" % (offset + 1)) for offset in (1, 2, 0, 1, 2, 3)]
    assert collector.troubles == []


def test_who_waits_is_woken_by_a_partition_that_is_added_and_by_the_end(
    servers: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "_REQUEST_S", 4 * PATIENCE_S)
    monkeypatch.setattr(follower, "_LOOK_S", 4 * PATIENCE_S)
    produce(servers, topic, [b"1"])
    wait_ms = int(2 * PATIENCE_S * 1000)  # whoever waits for the request that is under way waits in vain
    collector = Collector(KafkaClient(servers).follow(Isolation.READ_COMMITTED, name="test", wait_ms=wait_ms))

    def run() -> None:
        with closing(collector.follower):
            while not collector.follower.stopped:
                collector.poll(4 * PATIENCE_S)

    thread = threading.Thread(target=run)
    thread.start()
    collector.follower.follow((topic, 1), 0)
    eventually(lambda: collector.follower._asked, "the empty partition is asked for")
    collector.follower.follow((topic, 0), 0)
    eventually(lambda: collector.values == [b"1"], "the other one does not wait for it")
    collector.follower.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert collector.follower.poll(PATIENCE_S) == []
    collector.follower.follow((topic, 0), 0)
    collector.follower.close()


def test_a_lost_connection_loses_and_doubles_nothing(servers: str, topic: str, collector: Collector) -> None:
    collector.follower.follow((topic, 0), 0)
    for number in range(5):
        produce(servers, topic, [b"%d" % number])
        eventually(collector.has(number + 1), "it goes on")
        for line in collector.follower._connections.values():
            line.connection._socket.shutdown(2)
    assert collector.values == [b"%d" % number for number in range(5)]
    assert collector.troubles == []


def test_a_broker_that_is_silent_is_dialled_anew_and_not_waited_for_at_the_end(
    servers: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "_REQUEST_S", 2.0)
    monkeypatch.setattr(follower, "_LOOK_S", 0.05)
    with FaultProxy(servers) as proxy, proxy.in_between(monkeypatch):
        collector = Collector(KafkaClient(servers).follow(Isolation.READ_COMMITTED, name="test", wait_ms=50))
        with closing(collector.follower):
            collector.follower.follow((topic, 0), 0)
            collector.until(lambda: collector.follower._asked, "it is asked for")
            proxy.strike(Api.FETCH, Point.SILENT)
            produce(servers, topic, [b"1"])
            eventually(collector.has(1), "another connection has brought it")
            proxy.strike(Api.FETCH, Point.SILENT, times=1_000_000)
            collector.until(lambda: proxy._struck.is_set(), "it is silent again")
        assert collector.follower.poll(PATIENCE_S) == []


def test_one_that_nobody_closes_leaves_no_connection(servers: str, topic: str) -> None:
    produce(servers, topic, [b"0"])

    def read_and_forget() -> tuple[Connection, weakref.ref[Follower]]:
        forgotten = KafkaClient(servers).follow(Isolation.READ_COMMITTED, name="forgotten")
        forgotten.follow((topic, 0), 0)
        eventually(lambda: bool(forgotten.poll(0.05)), "it has read")
        forgotten.ask()
        [line] = forgotten._connections.values()
        return line.connection, weakref.ref(forgotten)

    connection, forgotten = read_and_forget()

    def is_collected() -> bool:
        gc.collect()
        return forgotten() is None

    eventually(is_collected, "its threads have let go of it")
    assert "closed" in repr(connection)


def test_a_topic_that_comes_later_is_told_of_and_read_and_others_do_not_wait(
    servers: str, topic: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_plan, "UNHEARD_OF_S", 0.2)
    later = f"{topic}-later"
    collector.follower.follow((later, 0), 0)
    collector.follower.follow((topic, 0), 0)
    produce(servers, topic, [b"1"])
    collector.until(lambda: collector.troubles, "it is told that there is no such topic")
    eventually(collector.has(1), "the other one is read")
    assert {(item.partition, type(item.fault)) for item in collector.troubles} == {((later, 0), TopicNotFoundError)}
    KafkaClient(servers).topics.create_topics([TopicSpec(name=later)])
    produce(servers, later, [b"2"])
    eventually(collector.has(2), "the new one is read")
    assert collector.values == [b"1", b"2"]


def test_what_was_truncated_is_told_with_where_to_go_on(servers: str, topic: str, collector: Collector) -> None:
    produce(servers, topic, [b"1", b"2", b"3"])
    KafkaClient(servers).topics.delete_records({(topic, 0): 2})
    collector.follower.follow((topic, 0), 1)
    collector.until(lambda: collector.troubles, "it is told that something is gone")
    trouble = collector.troubles[0]
    assert (trouble.partition, trouble.offset, trouble.resume) == ((topic, 0), 1, 2)
    assert type(trouble.fault) is CorruptDataError
    collector.follower.follow(trouble.partition, trouble.resume or 0)
    eventually(collector.has(1), "it is read on from there")
    assert collector.values == [b"3"]


def test_a_log_that_ends_earlier_is_told_with_where_it_ends(servers: str, topic: str, collector: Collector) -> None:
    produce(servers, topic, [b"1"])
    collector.follower.follow((topic, 0), 7)
    collector.until(lambda: collector.troubles, "it is told that it ends earlier")
    assert (collector.troubles[0].offset, collector.troubles[0].resume) == (7, 1)


@pytest.mark.containers
def test_a_leader_that_moves_is_followed(ensemble: ContainerCluster, topic_prefix: str) -> None:
    servers = ensemble.bootstrap_servers
    KafkaClient(servers).topics.create_topics([TopicSpec(name=topic_prefix, partitions=3, replication_factor=3)])
    partitions = [(topic_prefix, number) for number in range(3)]
    collector = Collector(KafkaClient(servers).follow(Isolation.READ_COMMITTED, name="test", check_epochs=True))
    count = 0

    def write() -> None:
        nonlocal count
        produce(servers, topic_prefix, [b"%d" % count])
        count += 1
        eventually(collector.has(count), "it has come")

    with closing(collector.follower):
        for partition in partitions:
            collector.follower.follow(partition, 0)
        for broker in ensemble.brokers:
            write()
            with ensemble.paused(broker):
                write()
            ensemble.restart(broker, gracefully=False)
            write()
            eventually(lambda: in_sync(ensemble, topic_prefix), "all replicas are in sync again")
    assert collector.values == [b"%d" % number for number in range(count)]
    assert collector.troubles == []
