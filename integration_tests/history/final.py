"""What stands in a cluster in the end, as a plain ``read_committed`` consumer and ZooKeeper tell it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from confluent_kafka import Message

from integration_tests.clients import read_committed
from integration_tests.history.events import Row, StreamState
from rollbridge.base.ids import SegmentId
from rollbridge.commitlog.control import ControlRecord, decode_control
from rollbridge.consumer.records import Origin, source_of
from rollbridge.kafka.client import KafkaClient
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import GroupName, Partition, StreamName


def stream_states(
    bootstrap_servers: str, zookeeper: str, streams: Sequence[str], security: Mapping[str, str] | None = None
) -> dict[str, StreamState]:
    """All epochs and all committed records of streams; ``security`` is how to get into ZooKeeper."""
    found: dict[str, StreamState] = {}
    for stream in streams:
        name = StreamName.parse(stream)
        with ZooKeeperSession(zookeeper, security=security) as session:
            metadata = Metadata(session)
            config, history = metadata.stream(name), metadata.history(name)
        assert config is not None, f"{stream} is gone"
        assert history is not None, f"{stream} is gone"
        segments = [segment for segment in history.segments() if not history.is_removed(segment)]
        places = {segment: config.place(segment) for segment in segments}
        segment_at = {place: segment for segment, place in places.items()}
        rows: dict[SegmentId, list[Row]] = {segment: [] for segment in segments}
        for message in _records(bootstrap_servers, places.values(), "read_committed"):
            rows[segment_at[_place(message)]].append(_row(message))
        ends = dict.fromkeys(segments, 0)
        for message in _records(bootstrap_servers, places.values(), "read_uncommitted"):
            segment = segment_at[_place(message)]
            ends[segment] = max(ends[segment], (message.offset() or 0) + 1)
        found[stream] = StreamState(history, rows, ends, config.keys, places)
    return found


def starts(bootstrap_servers: str, state: StreamState) -> dict[SegmentId, int]:
    """Where the segments that are left of a stream begin."""
    with KafkaClient(bootstrap_servers) as kafka:
        found = kafka.offsets.first([state.places[segment] for segment in state.rows])
    return {segment: found[state.places[segment]] for segment in state.rows}


def commit_log(bootstrap_servers: str, group: GroupName) -> list[tuple[int, ControlRecord]]:
    """The commit log of a group."""
    return [
        (message.offset() or 0, decode_control(message.key(), message.value()))
        for message in read_committed(bootstrap_servers, [group.commit_log_topic])
    ]


def _records(bootstrap_servers: str, places: Collection[Partition], isolation: str) -> list[Message]:
    """The records of partitions; all partitions of a topic are among them."""
    numbers = Counter(topic for topic, _ in places)
    return [
        message
        for count in sorted(set(numbers.values()))
        for message in read_committed(
            bootstrap_servers,
            [topic for topic, number in numbers.items() if number == count],
            isolation=isolation,
            partitions=count,
        )
    ]


def _place(message: Message) -> Partition:
    return message.topic() or "", message.partition() or 0


def _row(message: Message) -> Row:
    # Strangers write any bytes.
    key, value = ((item or b"").decode(errors="backslashreplace") for item in (message.key(), message.value()))
    transaction, local_sequence = source_of(message, Origin(lambda _: None))
    if transaction is None or local_sequence is None:
        return Row(message.offset() or 0, key, value)
    return Row(message.offset() or 0, key, value, str(transaction), local_sequence)
