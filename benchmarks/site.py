"""Where all experiments take place: one real broker, one ZooKeeper, one coordinator process, one client."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import Consumer, TopicPartition

import rollbridge
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.topics import TopicAdmin, TopicSpec
from rollbridge.stream.epochs import EpochCause
from rollbridge.stream.names import StreamName
from rollbridge_devcluster.ephemeral import ProcessCluster
from rollbridge_devcluster.nodes import ProcessNode

RECORD_BYTES: Final = 100
SCOPE: Final = "bench"
_POOL: Final = 10_000
_PATIENCE_S: Final = 60.0

Pair = tuple[bytes, bytes]


def records(count: int, last: bytes, value_bytes: int = RECORD_BYTES) -> Iterator[Pair]:
    """Keys and values, made beforehand so that making them is not measured; the last value is ``last``, padded."""
    pool = _pool(value_bytes)
    usual = itertools.islice(itertools.cycle(pool), count - 1)
    return itertools.chain(usual, [(pool[0][0], last.ljust(value_bytes, b"."))])


def _pool(value_bytes: int) -> list[Pair]:
    if value_bytes not in _pools:
        _pools[value_bytes] = [(b"key-%05d" % n, (b"%d " % n).ljust(value_bytes, b"x")) for n in range(_POOL)]
    return _pools[value_bytes]


_pools: dict[int, list[Pair]] = {}


@dataclass(frozen=True)
class Site:
    """The servers, and a connected client."""

    cluster: ProcessCluster
    coordinator: ProcessNode
    bridge: rollbridge.Bridge
    topics: TopicAdmin
    cleanup: ExitStack
    """Closed at the end, before the servers stop."""
    scope: str = SCOPE
    """Of its streams; coordinators with different root paths must not share any."""

    @property
    def bootstrap_servers(self) -> str:
        """Kafka's address."""
        return self.cluster.bootstrap_servers

    def make_stream(self, name: str, segments: int = 1) -> str:
        """Create a stream and return its name."""
        stream = f"{self.scope}/{name}"
        self.bridge.admin.create_stream(stream, segments=segments)
        return stream

    def segment_topics(self, stream: str) -> list[str]:
        """The topics of a stream's active segments."""
        name = StreamName.parse(stream)
        active = self.bridge.admin.history(stream).active
        return [name.segment_topic(segment.id) for segment in active.segments]

    def stored(self, stream: str) -> list[tuple[str, int]]:
        """The partitions of all segments that a stream of our own has or had."""
        name = StreamName.parse(stream)
        return [(name.segment_topic(item), 0) for item in self.bridge.admin.history(stream).segments()]

    def make_topic(self, name: str, partitions: int = 1) -> str:
        """Create a plain topic with the broker's defaults and return its name."""
        topic = f"native.{name}"
        self.topics.create_topics([TopicSpec(name=topic, partitions=partitions)])
        return topic

    def reader(self, **settings: Any) -> Consumer:
        """A plain ``read_committed`` consumer, assigned by hand."""
        return Consumer({**reader_settings(self.bootstrap_servers), **settings})


def reader_settings(bootstrap_servers: str) -> dict[str, Any]:
    """Settings of a plain reader that wants to hear of a record soon."""
    return {
        "bootstrap.servers": bootstrap_servers,
        "group.id": "benchmark",
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
        "fetch.wait.max.ms": 50,
        "fetch.error.backoff.ms": 5,
    }


def stable_end(reader: Consumer, topic: str, partition: int = 0) -> int:
    """The last stable offset of a topic's partition: below it everything can be read."""
    _, end = reader.get_watermark_offsets(TopicPartition(topic, partition), timeout=30.0)
    return int(end)


Places = Callable[[], Sequence[tuple[str, int]]]
"""Gives the partitions in which records stand, or will stand, as of now."""


def readable_per_s(
    site: Site, places: Places, count: int, write: Callable[[], None], timeout_s: float = 300.0
) -> float:
    """How many of ``count`` records are written to some partitions in a second, until all of them can be read.

    Raises:
        TimeoutError: they cannot be read.
    """
    reader = site.reader()
    base = sum(stable_end(reader, *place) for place in places())
    started = time.perf_counter()
    write()
    present = places()  # a large transaction of ours has segments of its own
    while sum(stable_end(reader, *place) for place in present) < base + count:
        if time.perf_counter() > started + timeout_s:
            raise TimeoutError(f"{count} records cannot be read")
        time.sleep(0.001)
    elapsed_s = time.perf_counter() - started
    reader.close()
    return count / elapsed_s


def wait_readable(reader: Consumer, topic: str, base: int, count: int, last: bytes, timeout_s: float = 300.0) -> None:
    """Return once the reader has in its hands the last of ``count`` records that were appended at ``base``.

    Raises:
        AssertionError: the last record that can be read is another one.
        TimeoutError: it cannot be read.
    """
    deadline = time.monotonic() + timeout_s
    while stable_end(reader, topic) < base + count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{topic} cannot be read up to {base + count}")
        time.sleep(0.001)
    reader.assign([TopicPartition(topic, 0, base + count - 1)])
    message = reader.poll(timeout_s)
    if message is None:
        raise TimeoutError(f"nothing can be read from {topic} at {base + count - 1}")
    if not (message.value() or b"").startswith(last):
        raise AssertionError(f"{topic} at {message.offset()}: {message.value()!r:.60} instead of {last!r}")


def where_merged(site: Site, stream: str, base: int) -> tuple[str, int]:
    """Where the records of the transaction that a stream of one segment took last stand, and from which offset on.

    A large one has a segment of its own; others stand in the active one, from ``base``.
    """
    name, records = StreamName.parse(stream), site.bridge.admin.history(stream).records
    if records[-1].cause is EpochCause.ROLLING_ACTIVE:
        return name.segment_topic(records[-2].segments[0].id), 0
    return name.segment_topic(records[-1].segments[0].id), base


@contextmanager
def another_coordinator(
    site: Site, root: str, name: str, *arguments: str, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A coordinator on the same servers, below another ZooKeeper path."""
    command = [
        sys.executable,
        "-m",
        "rollbridge_coordinator",
        f"--bootstrap-servers={site.bootstrap_servers}",
        f"--zookeeper={site.cluster.zookeeper}",
        f"--zookeeper-root={root}",
        f"--name={name}",
        *arguments,
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, **environment})
    try:
        yield process
    finally:
        process.terminate()
        process.wait(_PATIENCE_S)


@contextmanager
def open_site() -> Iterator[Site]:
    """Start everything, and stop everything."""
    with ProcessCluster(short_lived=False, kafka_heap="1g") as cluster:
        coordinator = cluster.start_coordinator()
        with (
            ExitStack() as cleanup,
            rollbridge.connect(
                cluster.bootstrap_servers, zookeeper=cluster.zookeeper, client_name="benchmark"
            ) as connection,
        ):
            yield Site(cluster, coordinator, connection, KafkaClient(cluster.bootstrap_servers).topics, cleanup)


def answers_of(module: str, processes: int, *arguments: str) -> list[Any]:
    """Run a module in so many processes that all begin at once; return what each of them answers.

    Such a module prepares, calls :func:`await_start`, does its work, and prints its answer as JSON.
    """
    command = [sys.executable, "-m", module, *arguments]
    with ExitStack() as stack:
        children = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(processes)
        ]
        pipes = [(child.stdin, child.stdout) for child in children if child.stdin and child.stdout]
        for _, output in pipes:
            output.readline()  # it is ready
        for start, _ in pipes:
            start.close()
        return [json.loads(output.readline()) for _, output in pipes]


def await_start() -> None:
    """Tell whoever started this process that it is ready; return once all others are as well."""
    print("ready", flush=True)
    sys.stdin.read()
