"""Makers of what the doctor has found out."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

from rollbridge.buffer.snapshot_topic import BufferSnapshot, EndedSince
from rollbridge.buffer.snapshots import Snapshot
from rollbridge.doctor.checks import CLUSTER_OPERATIONS
from rollbridge.doctor.facts import (
    BrokerFacts,
    ClusterFacts,
    GroupFacts,
    SnapshotFacts,
    StreamFacts,
)
from rollbridge.kafka.seal import SEALED
from rollbridge.kafka.topics import TopicDescription
from rollbridge.metadata.access import topic_operations
from rollbridge.metadata.records import Coordinator, Group, Lead
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import even_ranges
from rollbridge.stream.names import GroupName, StreamName, snapshot_indexes_topic

GROUP, STREAM = GroupName("sales"), StreamName("sales", "orders")


NOW_MS = 10_000_000


HOUR_MS = 3_600_000


KEEP = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1", "min.insync.replicas": "2"}


FIRST = EpochHistory.create(even_ranges(1), 0)


SCALED = FIRST.with_records(
    replace(FIRST.plan_scale([0], even_ranges(2), 1), sealed_ends={item.id: 9 for item in FIRST.active.segments})
)


SEGMENTS = {STREAM.segment_topic(segment): segment for segment in SCALED.segments()}


OLD, ACTIVE = next(iter(SEGMENTS)), list(SEGMENTS)[1]


def id_of(name: str) -> uuid.UUID:
    return uuid.uuid5(uuid.NAMESPACE_DNS, name)


def topic(name: str, *, sealed: bool | None = None, **changes: Any) -> TopicDescription:
    is_sealed = name == OLD if sealed is None else sealed
    known = TopicDescription(name, id_of(name), 1, 3, 3, True, topic_operations(name))
    config = {**changes.pop("config", KEEP), **(SEALED if is_sealed else {})}
    return replace(known, config=config, **changes)


LOG, BUFFER, OUTCOMES = GROUP.commit_log_topic, STREAM.buffer_topic(), GROUP.terminated_topic


INDEXES = snapshot_indexes_topic(GROUP.scope)


COMPACT = {"cleanup.policy": "compact", "min.insync.replicas": "2", "max.message.bytes": str(16 * 1024 * 1024)}


CONFIG = StreamConfig(name=STREAM, group=GROUP, created_ms=0, buffer_topic_id=str(id_of(BUFFER)))


SNAPSHOT = Snapshot(
    partition=(BUFFER, 0),
    topic_id=CONFIG.buffer_topic_id,
    generation=3,
    controller_epoch=1,
    taken_ms=NOW_MS - 100_000,
    position=70,
    max_read_position=60,
    commit_log_position=5,
    commit_log_end=9,
    sequence_id=0,
    indexes=(),
    first_position=0,
    aborts=(),
)


FOUND = BufferSnapshot(
    stream=CONFIG, partition=(BUFFER, 0), format="segmented", snapshot=SNAPSHOT, index_bytes=99, buffer_end=80
)


GOOD = ClusterFacts(
    kafka_cluster_id="kafka-1",
    recorded_cluster_id="kafka-1",
    now_ms=NOW_MS,
    brokers=[BrokerFacts(number, 2, {"auto.create.topics.enable": "false"}) for number in range(3)],
    coordinators=["one", "two"],
    groups=[
        GroupFacts(
            Group(GROUP, 0, str(id_of(LOG)), str(id_of(OUTCOMES))),
            Lead("one", 0, is_serving=True),
            coordinator=Coordinator(500, 2_000),
        )
    ],
    streams=[StreamFacts(CONFIG, SCALED)],
    topics={
        **{name: topic(name) for name in (*SEGMENTS, LOG, BUFFER)},
        **{name: topic(name, config=COMPACT) for name in (OUTCOMES, INDEXES)},
    },
    snapshots=[SnapshotFacts(FOUND, EndedSince(4, NOW_MS - 50_000))],
    operations=CLUSTER_OPERATIONS,
)
