"""What the client's tests share: a rollbridge of their own on the shared servers, and a plain client's view of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from confluent_kafka import OFFSET_BEGINNING, Consumer, Message, TopicPartition
from confluent_kafka.admin import AdminClient

import bridge
from bridge.embedded import EmbeddedCluster
from bridge.model.names import StreamName
from integration_tests.coordinators import Relay

PATIENCE_S = 30.0


def until(reached: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Return once a condition holds; AssertionError if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.02)


class Site:
    """A ZooKeeper root path of its own with a coordinator that can be stopped and started."""

    def __init__(self, cluster: EmbeddedCluster, root: str, logs: Path) -> None:
        self.cluster = cluster
        self.root = root
        self._logs = logs
        self._coordinators = ExitStack()
        self._started = 0

    def __enter__(self) -> Self:
        self.start_coordinator()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_coordinator()

    def start_coordinator(self) -> None:
        """Start a coordinator, in the background."""
        self._started += 1
        logs = self._logs / str(self._started)
        logs.mkdir(parents=True)
        self._coordinators.enter_context(Relay(self.cluster.bootstrap_servers, self.cluster.zookeeper, self.root, logs))

    def stop_coordinator(self) -> None:
        """Stop it, and return when it is gone."""
        self._coordinators.close()

    def connect(
        self, name: str | None = None, options: bridge.ClientOptions | None = None, bootstrap_servers: str | None = None
    ) -> bridge.Bridge:
        """A client."""
        return bridge.connect(
            bootstrap_servers or self.cluster.bootstrap_servers,
            zookeeper=self.cluster.zookeeper,
            zookeeper_root=self.root,
            client_name=name,
            options=options,
        )

    def topics(self, stream: str) -> list[str]:
        """The segments' topics of a stream, in order of their epochs."""
        name = StreamName.parse(stream)
        with self.connect() as client:
            return [name.segment_topic(segment) for segment in client.admin.history(stream).segments()]

    def committed(self, stream: str) -> list[Message]:
        """Everything that a plain ``read_committed`` consumer finds in a stream's segments."""
        return read_committed(self.cluster.bootstrap_servers, self.topics(stream))


def read_committed(bootstrap_servers: str, topics: Iterable[str]) -> list[Message]:
    """All committed records of single-partition topics, topic by topic."""
    found: list[Message] = []
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "plain-reader",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    try:
        for topic in topics:
            consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
            deadline = time.monotonic() + PATIENCE_S
            while True:
                message = consumer.poll(1.0)
                assert time.monotonic() < deadline, f"the end of {topic} was not reached"
                if message is None:
                    continue
                error = message.error()
                if error is None:
                    found.append(message)
                elif error.name() == "_PARTITION_EOF":
                    break
    finally:
        consumer.close()
    return found


def topic_names(bootstrap_servers: str) -> set[str]:
    """All topics of the cluster."""
    return set(AdminClient({"bootstrap.servers": bootstrap_servers}).list_topics(timeout=10).topics)
