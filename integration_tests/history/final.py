"""What stands in a cluster in the end, as a plain ``read_committed`` consumer and ZooKeeper tell it."""

from __future__ import annotations

from collections.abc import Sequence

from confluent_kafka import Message

from bridge.model.control import ControlRecord, decode_control
from bridge.model.identifiers import SegmentId
from bridge.model.names import GroupName, StreamName, parse_segment_topic
from bridge.model.sequence import RECORD_HEADER, unpack_record_header
from bridge.zookeeper.metadata import Metadata
from bridge.zookeeper.session import ZooKeeperSession
from integration_tests.clients import read_committed
from integration_tests.history.events import Row, StreamState


def stream_states(bootstrap_servers: str, zookeeper: str, streams: Sequence[str]) -> dict[str, StreamState]:
    """All epochs and all committed records of streams."""
    found: dict[str, StreamState] = {}
    for stream in streams:
        name = StreamName.parse(stream)
        with ZooKeeperSession(zookeeper) as session:
            history = Metadata(session).history(name)
        assert history is not None, f"{stream} is gone"
        segments = list(history.segments())
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


def commit_log(bootstrap_servers: str, group: GroupName) -> list[tuple[int, ControlRecord]]:
    """The commit log of a group."""
    return [
        (message.offset() or 0, decode_control(message.key(), message.value()))
        for message in read_committed(bootstrap_servers, [group.commit_log_topic])
    ]


def _row(message: Message) -> Row:
    headers = dict(message.headers() or [])
    raw = headers.get(RECORD_HEADER)
    key, value = (message.key() or b"").decode(), (message.value() or b"").decode()
    if not isinstance(raw, bytes):
        return Row(message.offset() or 0, key, value)
    transaction, local_sequence = unpack_record_header(raw)
    return Row(message.offset() or 0, key, value, str(transaction), local_sequence)
