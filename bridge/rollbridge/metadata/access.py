"""Kafka permissions of each role: one table for the command line, the documentation and the tests.

Read, Write and Delete imply Describe, and AlterConfigs implies DescribeConfigs, as in Kafka's authorizer.

A stream that has adopted a topic has its records there, and a buffer, and topics of its own once it has left, under its
own name: its roles need rights on both.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rollbridge.stream.names import GroupName, StreamName, internal_buffers, scope_of, snapshot_topic, terminated_topics


class Resource(StrEnum):
    """Kinds of resources, as confluent-kafka and Kafka's tools spell them in capital letters."""

    TOPIC = "TOPIC"
    GROUP = "GROUP"
    TRANSACTIONAL_ID = "TRANSACTIONAL_ID"
    CLUSTER = "CLUSTER"


@dataclass(frozen=True, slots=True)
class Right:
    """Some operations on a resource, or on all whose names begin so.

    Attributes:
        operations: As Kafka's tools spell them, such as ``DescribeConfigs``.
        why: What they are needed for.
    """

    resource: Resource
    name: str
    operations: tuple[str, ...]
    why: str
    prefixed: bool = False

    def command(self, principal: str, bootstrap_servers: str = "...") -> str:
        """Return the command of Kafka's that grants it."""
        words = ["kafka-acls.sh", "--bootstrap-server", bootstrap_servers, "--add", "--allow-principal", principal]
        for operation in self.operations:
            words += ["--operation", operation]
        match self.resource:
            case Resource.CLUSTER:
                words.append("--cluster")
            case Resource.TOPIC | Resource.GROUP | Resource.TRANSACTIONAL_ID:
                words += [f"--{self.resource.value.lower().replace('_', '-')}", self.name]
        if self.prefixed:
            words += ["--resource-pattern-type", "prefixed"]
        return shlex.join(words)


CLUSTER: Final = "kafka-cluster"
"""Kafka's name of the one resource of this kind."""
ON_ADOPTED: Final = ("Read", "Write", "DescribeConfigs")
"""Rights of a coordinator on an adopted topic that is neither truncated nor left."""


def reader(stream: StreamName, consumer_groups: Iterable[str] = (), topic: str = "") -> Iterator[Right]:
    """Yield the rights to read committed records, with any Kafka client, ``Bridge.reader`` or Spark's source.

    ``topic`` is the one that the stream has adopted, here and below.
    """
    yield from _on(topic, "Read", why="read committed records")
    yield Right(Resource.TOPIC, f"{_prefix(stream)}segment-", ("Read",), "read committed records", prefixed=True)
    yield _client()
    yield from _members(consumer_groups)


def previewer(
    stream: StreamName, group: GroupName, consumer_groups: Iterable[str] = (), topic: str = ""
) -> Iterator[Right]:
    """Yield the rights to read open transactions too, or committed ones one by one in commit order."""
    yield from _on(topic, "Read", why="read committed records")
    yield Right(Resource.TOPIC, _prefix(stream), ("Read",), "read segments, and the buffer for previews", prefixed=True)
    yield from _on_buffer(stream, topic, "Read", why="read the buffer for previews")
    yield _outcomes(group)
    yield Right(
        Resource.TOPIC,
        snapshot_topic(stream.scope),
        ("Read",),
        "begin previews at the snapshots; without it the whole buffer is read",
        prefixed=True,
    )
    yield _client()
    yield from _members(consumer_groups)


def writer(
    stream: StreamName, group: GroupName, consumer_groups: Iterable[str] = (), topic: str = ""
) -> Iterator[Right]:
    """Yield the rights to do everything with a stream: write in each way, read and preview."""
    yield from _on(
        topic,
        "Read",
        "Write",
        why="plain and conditional writes; read, also the sample of keys for `stream adopt`",
    )
    yield Right(
        Resource.TOPIC,
        _prefix(stream),
        ("Read", "Write"),
        "write to segments and buffer; read, also to learn after a lost answer what was written",
        prefixed=True,
    )
    yield from _on_buffer(stream, topic, "Read", "Write", why="write transactions, and preview them")
    yield Right(
        Resource.TRANSACTIONAL_ID, _prefix(stream), ("Write",), "conditional writes and synchronizers", prefixed=True
    )
    yield _outcomes(group)
    yield _client()
    yield from _members(consumer_groups)


def compactor(stream: StreamName, topic: str = "") -> Iterator[Right]:
    """Yield the rights to truncate by ``Synchronizer.compact``, in addition to a writer's."""
    yield from _on(topic, "Delete", why="delete records before a snapshot; it also allows to delete the topic")
    yield Right(
        Resource.TOPIC, f"{_prefix(stream)}segment-", ("Delete",), "delete records before a snapshot", prefixed=True
    )


def gateway(stream: StreamName, group: GroupName, topic: str = "") -> Iterator[Right]:
    """Yield the rights of a gateway whose clients write to a stream; what they may write is decided by their own.

    It needs none on an adopted topic, nor on consumer groups.
    """
    yield Right(Resource.TOPIC, stream.buffer_topic(), ("Write",), "write transactions", prefixed=True)
    yield from _on_buffer(stream, topic, "Write", why="write transactions")
    if not topic:
        yield Right(Resource.TOPIC, stream.virtual_topic, ("Describe",), "see whether brokers have a topic of its name")
    yield _outcomes(group)
    yield _client()


def coordinator(scope: str, consumer_groups: Iterable[str] = (), topic: str = "") -> Iterator[Right]:
    """Yield the rights to lead the groups of a scope, and to merge into an adopted topic."""
    yield from _on(topic, *ON_ADOPTED, why="merge into an adopted topic, and watch what its owner changes")
    yield from _on(topic, "Delete", why="only for `stream truncate` and retentions of an adopted topic")
    yield from _on(topic, "AlterConfigs", why="only to leave an adopted topic: `stream scale --leave-topic` seals it")
    yield Right(
        Resource.TOPIC,
        f"{scope}.",
        ("Create", "Delete", "Read", "Write", "AlterConfigs", "DescribeConfigs"),
        "make, read, merge, seal, truncate and delete topics",
        prefixed=True,
    )
    yield Right(
        Resource.TOPIC,
        internal_buffers(scope),
        ("Create", "Delete", "Read", "Write", "AlterConfigs", "DescribeConfigs"),
        "make, read, truncate and delete the buffers of adopted topics",
        prefixed=True,
    )
    yield Right(
        Resource.TOPIC,
        terminated_topics(scope),
        ("Create", "Read", "Write", "DescribeConfigs"),
        "remember outcomes",
        prefixed=True,
    )
    yield Right(
        Resource.TRANSACTIONAL_ID, f"rollbridge.{scope}.", ("Write",), "merge in native transactions", prefixed=True
    )
    yield _client()
    yield Right(
        Resource.CLUSTER, CLUSTER, ("Describe",), "ask for the sizes of logs, for retentions by size and for metrics"
    )
    for name in consumer_groups:
        yield Right(
            Resource.GROUP, name, ("Read",), "commit offsets that transactions carry; wait for groups of retentions"
        )


def coordinator_operations(topic: str) -> frozenset[str]:
    """Return the operations that a coordinator needs on a topic of ours."""
    return frozenset(
        operation
        for right in coordinator(scope_of(topic))
        if right.resource is Resource.TOPIC and topic.startswith(right.name)
        for operation in right.operations
    )


def _on(topic: str, *operations: str, why: str) -> Iterator[Right]:
    if topic:
        yield Right(Resource.TOPIC, topic, operations, why)


def _on_buffer(stream: StreamName, topic: str, *operations: str, why: str) -> Iterator[Right]:
    if topic:
        yield Right(Resource.TOPIC, stream.internal_buffer_topic(), operations, why, prefixed=True)


def _prefix(stream: StreamName) -> str:
    return f"{stream.scope}.{stream.stream}."


def _outcomes(group: GroupName) -> Right:
    return Right(Resource.TOPIC, group.commit_log_topic, ("Read",), "learn what became of transactions")


def _members(consumer_groups: Iterable[str]) -> Iterator[Right]:
    for name in consumer_groups:
        yield Right(Resource.GROUP, name, ("Read",), "be a member of the consumer group, and commit offsets")


def _client() -> Right:
    return Right(
        Resource.GROUP,
        "rollbridge",
        ("Describe",),
        "librdkafka looks for the coordinator of a group in whose name nothing is ever committed",
        prefixed=True,
    )


_CAPITAL: Final = re.compile("(?<!^)(?=[A-Z])")


def topic_operations(topic: str) -> frozenset[str]:
    """Return a coordinator's operations on a topic, by Kafka's names; Read and Write imply Describe."""
    return _by_kafkas_names(coordinator_operations(topic))


def _by_kafkas_names(operations: Iterable[str]) -> frozenset[str]:
    return frozenset(_CAPITAL.sub("_", item).upper() for item in operations) | {"DESCRIBE"}


ADOPTED_OPERATIONS: Final = _by_kafkas_names(ON_ADOPTED)
"""A coordinator's operations on an adopted topic; Delete and AlterConfigs are for requests that may never come."""
