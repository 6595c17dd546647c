"""What stands in a cluster in the end, as a plain ``read_committed`` consumer and ZooKeeper tell it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing

from confluent_kafka import Message

from integration_tests.clients import read_committed
from integration_tests.history.events import Row, StreamState
from rollbridge.consumer.records import source_of
from rollbridge.kafka.topics import TopicAdmin
from rollbridge.model.control import ControlRecord, decode_control
from rollbridge.model.ids import SegmentId
from rollbridge.model.names import GroupName, StreamName, parse_segment_topic
from rollbridge.zookeeper.metadata import Metadata
from rollbridge.zookeeper.session import ZooKeeperSession


def stream_states(
    bootstrap_servers: str, zookeeper: str, streams: Sequence[str], security: Mapping[str, str] | None = None
) -> dict[str, StreamState]:
    """All epochs and all committed records of streams; ``security`` is how to get into ZooKeeper."""
    found: dict[str, StreamState] = {}
    for stream in streams:
        name = StreamName.parse(stream)
        with ZooKeeperSession(zookeeper, security=security) as session:
            history = Metadata(session).history(name)
        assert history is not None, f"{stream} is gone"
        segments = [segment for segment in history.segments() if not history.is_removed(segment)]
        topics = {name.segment_topic(segment): segment for segment in segments}
        rows: dict[SegmentId, list[Row]] = {segment: [] for segment in segments}
        for message in read_committed(bootstrap_servers, list(topics)):
            rows[parse_segment_topic(message.topic() or "")[1]].append(_row(message))
        ends = dict.fromkeys(segments, 0)
        for message in read_committed(bootstrap_servers, list(topics), isolation="read_uncommitted"):
            segment = parse_segment_topic(message.topic() or "")[1]
            ends[segment] = max(ends[segment], (message.offset() or 0) + 1)
        found[stream] = StreamState(history, rows, ends)
    return found


def starts(bootstrap_servers: str, stream: str, state: StreamState) -> dict[SegmentId, int]:
    """Where the segments that are left of a stream begin."""
    name = StreamName.parse(stream)
    topics = {name.segment_topic(segment): segment for segment in state.rows}
    with closing(TopicAdmin(bootstrap_servers)) as admin:
        found = admin.start_offsets(topics)
    return {topics[topic if isinstance(topic, str) else topic[0]]: offset for topic, offset in found.items()}


def commit_log(bootstrap_servers: str, group: GroupName) -> list[tuple[int, ControlRecord]]:
    """The commit log of a group."""
    return [
        (message.offset() or 0, decode_control(message.key(), message.value()))
        for message in read_committed(bootstrap_servers, [group.commit_log_topic])
    ]


def _row(message: Message) -> Row:
    # Strangers write any bytes.
    key, value = ((item or b"").decode(errors="backslashreplace") for item in (message.key(), message.value()))
    transaction, local_sequence = source_of(message)
    if transaction is None or local_sequence is None:
        return Row(message.offset() or 0, key, value)
    return Row(message.offset() or 0, key, value, str(transaction), local_sequence)
