"""Checks of what lets a new leader begin quickly and answer for the old one: snapshots, and outcomes remembered."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from rollbridge.doctor.facts import ClusterFacts, Finding, problem, warning
from rollbridge.model.control import CONTROL_RECORD_BYTES_MAX
from rollbridge.model.names import is_compacted_topic
from rollbridge.model.records import Coordinator
from rollbridge.model.snapshots import partition_name

LATE: Final = timedelta(minutes=1)
"""So much later than its settings say a snapshot may be taken."""
TAIL_MAX: Final = 500_000
"""Messages of a buffer that a new leader reads in a few seconds."""
DEFAULTS: Final = Coordinator(snapshot_transactions_max=1_000, snapshot_interval_ms=5_000)
"""Of a leader that does not say."""


def check_compacted_topics(facts: ClusterFacts) -> Iterator[Finding]:
    """Of topics that hold a state by key nothing but replaced records goes, and what leaders write fits in."""
    for topic in facts.topics.values():
        if not is_compacted_topic(topic.name):
            continue
        policy = topic.config.get("cleanup.policy", "compact")
        if policy != "compact":
            yield problem(
                "compaction",
                f"topic {topic.name} has cleanup.policy={policy} instead of compact: Kafka deletes records that a new "
                "leader needs, or none at all",
                f"kafka-configs.sh --alter --entity-type topics --entity-name {topic.name} "
                "--add-config cleanup.policy=compact",
            )
        limit = int(topic.config.get("max.message.bytes", CONTROL_RECORD_BYTES_MAX))
        if limit < CONTROL_RECORD_BYTES_MAX:
            yield warning(
                "message-size",
                f"topic {topic.name} takes records of {limit} bytes at most; a leader that has to write a larger one "
                "gives up the lead, again and again",
                f"kafka-configs.sh --alter --entity-type topics --entity-name {topic.name} "
                f"--add-config max.message.bytes={CONTROL_RECORD_BYTES_MAX}",
            )


def check_snapshots(facts: ClusterFacts) -> Iterator[Finding]:
    """Snapshots can be used, and are not far behind the buffers."""
    settings = {group.name: group.coordinator or DEFAULTS for group in facts.groups}
    for snapshot in facts.snapshots:
        found, since = snapshot.found, snapshot.since
        name, stream = partition_name(found.partition), found.stream.name
        for fault in found.faults:
            yield warning(
                "snapshot-damaged",
                f"a snapshot of {name} can not be used: {fault}",
                f"nothing, if it goes away: the next one replaces it; else: rollbridge snapshot rebuild {stream}",
            )
        if not found.has_all_segments:
            yield problem(
                "snapshot-segments",
                f"the snapshot of {name} names segments, but their topic is gone",
                f"rollbridge snapshot rebuild {stream}: it is made anew from the buffer",
            )
        limits = settings.get(found.stream.group, DEFAULTS)
        late_ms = limits.snapshot_interval_ms + LATE / timedelta(milliseconds=1)
        if since.count and facts.now_ms - since.first_ms > late_ms:
            where = "there is none" if found.snapshot is None else f"it ends at offset {found.snapshot.position}"
            yield warning(
                "snapshot-lag",
                f"the snapshot of {name} lags: {where}, the buffer at {found.buffer_end}; behind it {since.count} "
                f"transactions or more have ended, the first of them {(facts.now_ms - since.first_ms) // 1000} s ago. "
                f"One is due after {limits.snapshot_transactions_max} of them "
                "(transactionBufferSnapshotMaxTransactionCount), or after "
                f"{limits.snapshot_interval_ms} ms (transactionBufferSnapshotMinTimeInMillis)",
                f"look into the log of the leader of {found.stream.group}: only it writes snapshots",
            )
        elif found.snapshot is not None and found.tail > TAIL_MAX:
            yield warning(
                "long-replay",
                f"a new leader would read {found.tail} messages of {name}: a transaction that began at offset "
                f"{found.snapshot.max_read_position} or before is still open",
                f"rollbridge txn list --group {found.stream.group}: commit or abort the oldest",
            )


def check_outcomes(facts: ClusterFacts) -> Iterator[Finding]:
    """What is remembered of terminated transactions is there, and can be read."""
    for group in facts.groups:
        topic_id = group.record.terminated_topic_id
        name = group.name.terminated_topic
        topic = facts.topics.get(name)
        if topic_id and (topic is None or topic.topic_id != topic_id):
            yield problem(
                "outcomes-gone",
                f"topic {name} " + ("is gone" if topic is None else "was deleted and made again"),
                "restart the leader: it makes the topic anew, and answers with OutcomeExpired to whoever asks for a "
                "transaction that was in it. Their outcomes still stand on the commit log "
                f"{group.name.commit_log_topic}",
            )
        if group.outcome_faults:
            yield warning(
                "outcomes-damaged",
                f"{len(group.outcome_faults)} records of topic {name} can not be read; {group.outcome_faults[0]}",
                "nothing: the next leader leaves them out, and answers with OutcomeExpired to whoever asks; look who "
                "but coordinators may write there",
            )
