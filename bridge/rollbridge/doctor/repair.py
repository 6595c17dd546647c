"""Carry out ``rollbridge repair``: read ZooKeeper and Kafka, and do what :mod:`rollbridge.metadata.journal` plans."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from rollbridge.base.ids import TransactionId, shared_count
from rollbridge.buffer.frames import FrameKind, decode_begin, unpack_bundle, unpack_header
from rollbridge.buffer.snapshot_topic import read_all, read_latest
from rollbridge.commitlog.control import ControlKind, peek_kind
from rollbridge.errors import CorruptDataError, InvalidRequestError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.metadata import Isolation
from rollbridge.metadata import paths
from rollbridge.metadata.journal import GroupEvidence, Journal, RepairStep, is_deleted, split, streams_of
from rollbridge.metadata.session import Znode, ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.names import GroupName, group_of_terminated

logger = logging.getLogger(__name__)


def outdated_groups(session: ZooKeeperSession) -> list[GroupName]:
    """Return the groups for which a leader or an earlier repair has recorded that ZooKeeper was restored."""
    return [name for name in Metadata(session).groups() if session.exists(paths.outdated(name)) is not None]


def read_nodes(session: ZooKeeperSession) -> dict[str, bytes]:
    """Return all znodes about streams, adopted topics and groups, by path."""
    root = session.get(paths.CLUSTER)
    found = _read_below(
        session, [paths.SCOPES, paths.TOPICS, paths.GROUPS, paths.TRANSACTION_COUNTER, paths.GROUP_NUMBERS]
    )
    return found if root is None else {paths.CLUSTER: root.value, **found}


def read_group_nodes(session: ZooKeeperSession, name: GroupName) -> dict[str, bytes]:
    """Return the znodes of a group, and of the streams of its scope; of one that may not be read, nothing but its path.

    Faults of streams of other scopes do not keep the group from being repaired.
    """
    streams = [f"{paths.streams(name.scope)}/{item}" for item in session.children(paths.streams(name.scope))]
    nodes = zip(streams, Metadata(session).get_each(streams), strict=True)
    found = {path: node.value if isinstance(node, Znode) else b"" for path, node in nodes if node is not None}
    return {**found, **_read_below(session, [paths.group(name)])}


def _read_below(session: ZooKeeperSession, roots: list[str]) -> dict[str, bytes]:
    waiting, found = roots, dict[str, bytes]()
    while waiting:
        values = session.get_many(waiting)
        there = [(path, node) for path, node in zip(waiting, values, strict=True) if node is not None]
        found.update((path, node.value) for path, node in there if node.owner_session_id is None)
        children = session.children_many([path for path, _ in there])
        waiting = [f"{path}/{name}" for (path, _), names in zip(there, children, strict=True) for name in names]
    return found


def lost_groups(
    kafka: KafkaClient, nodes: Mapping[str, bytes], known: Sequence[GroupName], topics: Iterable[str]
) -> list[GroupName]:
    """Return groups unknown to ZooKeeper that, by their journals, were led under this ZooKeeper path.

    Raises:
        KafkaUnavailableError, NotAuthorizedError
    """
    cluster = nodes.get(paths.CLUSTER)
    found = []
    for topic in sorted(topics):
        name = group_of_terminated(topic)
        if cluster and name is not None and name not in known:
            journal = read_journal(kafka, name)
            if journal.get(paths.CLUSTER) == cluster and paths.group(name) in journal:
                found.append(name)
    return found


def read_topics(kafka: KafkaClient) -> dict[str, str]:
    """Return the ids of all topics there are.

    To be called before :func:`read_nodes`: ZooKeeper records what belongs to the topics of a change before they are
    created, so no topic of a working leader looks orphaned.
    Raises:
        KafkaUnavailableError, NotAuthorizedError
    """
    return {name: str(identity) for name, identity in kafka.topics.topic_ids(kafka.topics.list_topics()).items()}


def gather_evidence(kafka: KafkaClient, names: Sequence[GroupName], topics: Mapping[str, str]) -> list[GroupEvidence]:
    """Return Kafka's evidence about groups; reads their commit logs and buffers from end to end.

    Args:
        kafka: Where it is read.
        names: The groups.
        topics: All topics, with their ids.

    Raises:
        KafkaUnavailableError, NotAuthorizedError
        CorruptDataError: A group has no journal.
    """
    return [_evidence(kafka, name, topics) for name in names]


def read_journal(kafka: KafkaClient, name: GroupName) -> Journal:
    """Return the journal of a group, whose topic exists.

    Raises:
        KafkaUnavailableError, NotAuthorizedError
    """
    latest = read_latest(kafka, name.terminated_topic)
    return split({key: item.value for key, item in latest.items()})[1]


def carry_out(
    kafka: KafkaClient, session: ZooKeeperSession, steps: Sequence[RepairStep], tell: Callable[[str], None]
) -> None:
    """Carry out the planned steps, one after the other."""
    for step in steps:
        tell(step.what)
        kafka.topics.delete_topics({topic: uuid.UUID(identity) for topic, identity in step.topics.items()})
        for batch in step.batches:
            session.multi(batch)


def _evidence(kafka: KafkaClient, name: GroupName, topics: Mapping[str, str]) -> GroupEvidence:
    if name.terminated_topic not in topics:
        raise CorruptDataError(
            f"group {name} has no journal: topic {name.terminated_topic} does not exist; nothing was changed; restore "
            "ZooKeeper from a later backup"
        )
    journal, counter = read_journal(kafka, name), -1
    # Buffers first: a transaction that has an outcome by now had it when the log is read.
    highest, sessions, ongoing = _read_buffers(kafka, journal, topics)
    if name.commit_log_topic in topics:
        for message in read_all(kafka, name.commit_log_topic):
            key = message.key or b""
            if len(key) != 16:
                continue
            transaction = TransactionId.from_bytes(key)
            counter = max(counter, shared_count(transaction.bytes))
            kind = peek_kind(message.value)
            if kind is ControlKind.BEGIN:
                ongoing.add(transaction)
            else:
                ongoing.discard(transaction)
    evidence = GroupEvidence(
        name=name,
        journal=journal,
        counter=max(counter, highest),
        ongoing=ongoing,
        sessions=sessions,
        topics=topics,
    )
    return replace(evidence, unwritten=_unwritten(kafka, [topic for topic, _, _ in evidence.undescribed()]))


def _unwritten(kafka: KafkaClient, topics: Sequence[str]) -> list[str]:
    """Return the topics that hold no record and no open native transaction; aborted records are none."""
    ends = kafka.offsets.end(topics)
    stable = kafka.offsets.end(topics, Isolation.READ_COMMITTED)
    return [topic for topic in topics if ends[topic] == stable[topic] and next(read_all(kafka, topic), None) is None]


def _read_buffers(
    kafka: KafkaClient, journal: Journal, topics: Mapping[str, str]
) -> tuple[int, dict[str, int], set[TransactionId]]:
    """Return the highest counter in the buffers, the newest session of each client, and which transactions began there.

    The commit log may have been truncated since those that are open got their BEGIN records.
    """
    counter, sessions, begun = -1, dict[str, int](), set[TransactionId]()
    for raw in streams_of(journal).values():
        if is_deleted(raw) or (config := StreamConfig.from_json(raw)).buffer_topic not in topics:
            continue
        for partition in range(config.buffer_partitions):
            for message in read_all(kafka, config.buffer_topic, partition):
                header, value = unpack_header(message.key), message.value
                if header is None or value is None:
                    continue
                try:
                    is_bundle = header.kind is FrameKind.BUNDLE
                    frames = unpack_bundle(header, value) if is_bundle else [(header, 0, value)]
                    for inner, _, content in frames:
                        counter = max(counter, shared_count(inner.transaction))
                        if inner.kind is FrameKind.BEGIN:
                            begin = decode_begin(content)
                            begun.add(TransactionId.from_bytes(inner.transaction))
                            sessions[begin.client_name] = max(sessions.get(begin.client_name, 0), begin.client_epoch)
                except (CorruptDataError, InvalidRequestError) as fault:
                    logger.info("repair.frame_skipped topic=%s: %s", config.buffer_topic, fault)
    return counter, sessions, begun
