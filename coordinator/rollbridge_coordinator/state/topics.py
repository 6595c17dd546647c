"""The Kafka topics of a stream and a group, with the settings that each needs. Pure."""

from __future__ import annotations

from typing import Final

from rollbridge.model.control import CONTROL_RECORD_BYTES_MAX
from rollbridge.model.frames import BUFFER_OVERHEAD_BYTES
from rollbridge.model.identifiers import SegmentId
from rollbridge.model.names import GroupName
from rollbridge.model.records import RECORD_BYTES_MAX_DEFAULT, StreamConfig
from rollbridge_coordinator.state.effects import TopicSpec

BATCH_OVERHEAD_BYTES: Final = 48_588
"""How much larger a segment's message limit is than its records: batch header, record framing and our header."""
BUFFER_FILE_BYTES: Final = 256 * 1024 * 1024
"""Kafka frees the disk of what was truncated file by file, and never the file that it writes to."""
COMPACTED_SEGMENT_BYTES: Final = 16 * 1024 * 1024
COMPACTED_SEGMENT_MS: Final = 10 * 60 * 1000
"""What is in the newest segment of a compacted topic is not compacted."""

ANY_TIME: Final = {
    "message.timestamp.before.max.ms": str(2**63 - 1),
    "message.timestamp.after.max.ms": str(2**63 - 1),
}
"""Users give event times, of the past and of the future. Kafka's default takes none that is over an hour ahead."""

_KEEP: Final = {"retention.ms": "-1", "retention.bytes": "-1", "cleanup.policy": "delete"}


def segment_bytes_max(config: StreamConfig) -> int:
    """``max.message.bytes`` of a stream's segments: a batch with one record of the largest size fits.

    However small the records are, it is not less than the broker's default: the limit holds for a whole batch, and
    both clients and leaders put many records into one.
    """
    return max(config.record_bytes_max, RECORD_BYTES_MAX_DEFAULT) + BATCH_OVERHEAD_BYTES


def segment_topic_spec(config: StreamConfig, segment: SegmentId) -> TopicSpec:
    """The topic of a segment: records keep the time that their writers gave, retention is the stream's matter."""
    return TopicSpec(
        config.name.segment_topic(segment),
        replication_factor=config.replication_factor,
        config={
            **_KEEP,
            **ANY_TIME,
            "max.message.bytes": str(segment_bytes_max(config)),
            "message.timestamp.type": "CreateTime",
        },
    )


def buffer_topic_spec(config: StreamConfig) -> TopicSpec:
    """The transaction buffer: leases run on the append time, which no client chooses; truncated only by us."""
    return TopicSpec(
        config.buffer_topic,
        partitions=config.buffer_partitions,
        replication_factor=config.replication_factor,
        config={
            **_KEEP,
            "max.message.bytes": str(segment_bytes_max(config) + BUFFER_OVERHEAD_BYTES),
            "message.timestamp.type": "LogAppendTime",
            "segment.bytes": str(BUFFER_FILE_BYTES),
        },
    )


def commit_log_topic_spec(group: GroupName, replication_factor: int) -> TopicSpec:
    """The commit log: never compacted, because its order is the commit order."""
    return TopicSpec(
        group.commit_log_topic,
        replication_factor=replication_factor,
        config={
            **_KEEP,
            "max.message.bytes": str(CONTROL_RECORD_BYTES_MAX),
            "message.timestamp.type": "LogAppendTime",
        },
    )


def terminated_topic_spec(group: GroupName, replication_factor: int) -> TopicSpec:
    """The topic of terminated transactions."""
    return _compacted_topic_spec(group.terminated_topic, replication_factor)


def snapshot_topic_spec(name: str, replication_factor: int) -> TopicSpec:
    """A topic of snapshots."""
    return _compacted_topic_spec(name, replication_factor)


def _compacted_topic_spec(name: str, replication_factor: int) -> TopicSpec:
    """Compacted often, so that what a new leader reads of it stays small."""
    return TopicSpec(
        name,
        replication_factor=replication_factor,
        config={
            "cleanup.policy": "compact",
            "segment.bytes": str(COMPACTED_SEGMENT_BYTES),
            "segment.ms": str(COMPACTED_SEGMENT_MS),
            "min.cleanable.dirty.ratio": "0.1",
            "max.message.bytes": str(CONTROL_RECORD_BYTES_MAX),
            "message.timestamp.type": "LogAppendTime",
        },
    )
