"""Checks of the doctor: facts in, findings out. Pure.

Each check states in its docstring what it expects, and yields a finding with a remedy for each deviation. Where an
alert goes with a finding, the remedy is a part of the alert's runbook (:mod:`rollbridge.monitoring`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final

from rollbridge.buffer.snapshots import partition_name
from rollbridge.buffer.table import State
from rollbridge.commitlog.control import CONTROL_RECORD_BYTES_MAX
from rollbridge.doctor.adopted import adopted_topics, retentions, topic_names
from rollbridge.doctor.facts import (
    DEFAULT_ENTITY,
    ClusterFacts,
    Finding,
    QuotaFacts,
    Severity,
    problem,
    warning,
    wrong_seal,
)
from rollbridge.doctor.gateways import gateways, producers
from rollbridge.errors import InvalidNameError
from rollbridge.kafka.connection import lacks
from rollbridge.metadata.access import ADOPTED_OPERATIONS, topic_operations
from rollbridge.metadata.changes import SUSPENDED, UNLED, WATCHED
from rollbridge.metadata.journal import LOG_BEGINS
from rollbridge.metadata.picture import PartFault
from rollbridge.metadata.records import Coordinator
from rollbridge.monitoring.runbook import remedy
from rollbridge.stream.config import StreamState
from rollbridge.stream.epochs import EpochCause, check_chain
from rollbridge.stream.names import (
    StreamName,
    is_compacted_topic,
    parse_segment_topic,
    show_partition,
    snapshot_indexes_topic,
    snapshot_segments_topic,
    snapshot_topic,
)

# Check of the number of topics and epochs of streams. Pure.


TOPICS_MANY: Final = 1_000
"""Topics of segments of one stream: a broker takes a few thousand partitions, and each of these has its replicas."""
EPOCHS_MANY: Final = 2_000
"""Epochs of one stream: clients read all of them when they begin."""


def growth(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect streams to have no more topics and epochs than brokers and clients carry easily."""
    for stream in facts.streams:
        history = stream.history
        if history is None:
            continue
        topics = sum(not stream.config.places.is_adopted(item) for item in history.stored())
        epochs = len(history.records)
        if topics < TOPICS_MANY and epochs < EPOCHS_MANY:
            continue
        causes = Counter(item.cause for item in history.records)
        rolled = causes[EpochCause.ROLLING_TRANSACTIONS]
        name = stream.config.name
        what = f"stream {name} has {topics} topics of segments and {epochs} epochs"
        if topics >= TOPICS_MANY:
            way_out = remedy("growth", "of topics", stream=name)
        else:
            way_out = remedy("growth", "of epochs", stream=name)
        if 2 * rolled > causes[EpochCause.SCALE]:
            large = sum(any(segment.id.is_prepared for segment in item.segments) for item in history.records)
            way_out += f"; {rolled} rolling commits made two epochs each: "
            if 2 * large > rolled:
                way_out += "most of large transactions, for which merge_beside_bytes of the coordinators can be raised"
            else:
                way_out += "commit open transactions before a scale"
        yield warning("growth", what, way_out)


# Snapshots and outcomes, from which a new leader starts


LATE: Final = timedelta(minutes=1)
"""Allowed delay of a snapshot beyond its settings."""
TAIL_MAX: Final = 500_000
"""Messages of a buffer that a new leader reads within a few seconds."""
DEFAULTS: Final = Coordinator(snapshot_transactions_max=1_000, snapshot_interval_ms=5_000)
"""Settings assumed for a leader that does not report its own."""


def check_compacted_topics(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect compaction as the only deletion in topics that hold state by key, and room for the records of leaders."""
    logs = {group.record.name.commit_log_topic for group in facts.groups}
    for topic in facts.topics.values():
        is_compacted = is_compacted_topic(topic.name)
        if not is_compacted and topic.name not in logs:
            continue
        policy = topic.config.get("cleanup.policy", "compact")
        if is_compacted and policy != "compact":
            yield problem(
                "compaction",
                f"topic {topic.name} has cleanup.policy={policy} instead of compact: Kafka deletes records that a new "
                "leader needs, or none at all",
                _configure(facts, topic.name, {"cleanup.policy": "compact"}),
            )
        limit = int(topic.config.get("max.message.bytes", CONTROL_RECORD_BYTES_MAX))
        if limit < CONTROL_RECORD_BYTES_MAX:
            yield warning(
                "message-size",
                f"topic {topic.name} takes records of {limit} bytes at most; a leader that has to write a larger one "
                "gives up the lead, again and again",
                _configure(facts, topic.name, {"max.message.bytes": str(CONTROL_RECORD_BYTES_MAX)}),
            )


def check_snapshots(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect usable snapshots that are not far behind the buffers."""
    settings = {group.name: group.coordinator or DEFAULTS for group in facts.groups}
    waiting = {item.config.name for item in facts.streams if item.error}
    for snapshot in facts.snapshots:
        found, since = snapshot.found, snapshot.since
        name, stream = partition_name(found.partition), found.stream.name
        for fault in found.faults:
            yield warning(
                "snapshot-damaged",
                f"a snapshot of {name} cannot be used: {fault}",
                f"nothing, if it goes away: the next one replaces it; else: rollbridge snapshot rebuild {stream}",
            )
        if not found.has_all_segments:
            yield problem(
                "snapshot-segments",
                f"the snapshot of {name} names segments, but their topic is gone",
                f"rollbridge snapshot rebuild {stream}: it is rebuilt from the buffer",
            )
        limits = settings.get(found.stream.group, DEFAULTS)
        late_ms = limits.snapshot_interval_ms + LATE / timedelta(milliseconds=1)
        # What waits in a stream in an error state has not ended, whatever its clients have asked for.
        if since.count and facts.now_ms - since.first_ms > late_ms and found.stream.name not in waiting:
            where = "there is none" if found.snapshot is None else f"it ends at offset {found.snapshot.position}"
            yield warning(
                "snapshot-lag",
                f"the snapshot of {name} lags: {where}, the buffer at {found.buffer_end}; behind it the ends of "
                f"{since.count} transactions or more were requested, the first of them "
                f"{(facts.now_ms - since.first_ms) // 1000} s ago. "
                f"A snapshot is due after {limits.snapshot_transactions_max} of them "
                "(transactionBufferSnapshotMaxTransactionCount), or after "
                f"{limits.snapshot_interval_ms} ms (transactionBufferSnapshotMinTimeInMillis)",
                remedy("snapshot-lag", group=found.stream.group),
            )
        elif found.snapshot is not None and found.tail > TAIL_MAX:
            yield warning(
                "long-replay",
                f"a new leader would read {found.tail} messages of {name}: a transaction that began at offset "
                f"{found.snapshot.max_read_position} or before is still open",
                remedy("long-replay", group=found.stream.group),
            )


def check_outcomes(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect the remembered outcomes of terminated transactions to exist and to be readable."""
    for group in facts.groups:
        topic_id = group.record.terminated_topic_id
        name = group.name.terminated_topic
        topic = facts.topics.get(name)
        if topic_id and (topic is None or str(topic.topic_id) != topic_id):
            yield problem(
                "outcomes-gone",
                f"topic {name} " + ("is gone" if topic is None else "was deleted and made again"),
                "restart the leader: it creates the topic again, and answers OutcomeExpiredError for transactions that "
                "were in it. Their outcomes are still on the commit log "
                f"{group.name.commit_log_topic}",
            )
        if group.outcome_faults:
            yield warning(
                "outcomes-damaged",
                f"{len(group.outcome_faults)} records of topic {name} cannot be read; {group.outcome_faults[0]}",
                "nothing: the next leader leaves them out, and answers OutcomeExpiredError for them; look who "
                "but coordinators may write there",
            )


def _configure(facts: ClusterFacts, topic: str, settings: Mapping[str, str]) -> str:
    """Return the command that gives a topic these settings."""
    return (
        f"kafka-configs.sh --bootstrap-server {facts.bootstrap_servers} --alter --entity-type topics "
        f"--entity-name {topic} --add-config {_listed(settings)}"
    )


def _listed(settings: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in settings.items())


ALIKE_MAX: Final = 3
"""Findings of one kind that are shown each; of more, the first one and how many there are."""
SLOW: Final = timedelta(minutes=1)
"""Duration beyond which a commit, scale or native transaction may be stuck."""
CLOCKS_DIFFER: Final = timedelta(minutes=1)
"""Clock difference beyond which leaders delete nothing by age."""
SCALING: Final = timedelta(minutes=30)
"""Time after which it is reported that a stream waits to be scaled by its load."""
OLD: Final = timedelta(hours=12)
"""Age from which on an open transaction is reported, by default: half of a lease."""
TIGHT_BYTES_PER_S: Final = 1 << 20
"""Quota below which it is reported: a single client writes more than that in bytes per second."""
TIGHT_PERCENTAGE: Final = 10.0
"""The same for a quota of request time, in percent of one thread of a broker."""
OUR_CLIENT_IDS: Final = frozenset({"rollbridge", "rollbridge-coordinator", "rollbridge-merge", DEFAULT_ENTITY})
"""Client ids of coordinators, as quotas name them."""
SHOWN_MAX: Final = 60
"""Characters of a foreign message that are shown."""
UNKNOWN_TOPIC: Final = "UNKNOWN_TOPIC_OR_PARTITION"
"""Code of a stream of which a topic was removed, as Kafka calls it."""
HANGING: Final = timedelta(minutes=16)
"""Age of a hanging native transaction: by default, brokers end them after at most 15 minutes."""
REPLICAS: Final = 3
CLUSTER_OPERATIONS: Final = frozenset({"DESCRIBE"})
_GRANT: Final = (
    "a coordinator's principal needs it: `rollbridge access kafka-acls coordinator SCOPE/STREAM` prints the commands "
    "that grant it; what a client needs is less (docs/security.md)"
)
_KEEP: Final = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}


def find(facts: ClusterFacts, old: timedelta = OLD) -> list[Finding]:
    """Return all findings, the worst first; transactions are reported that have been open for as long as ``old``."""
    orphaned = dict(_orphaned(facts))
    # The settings of orphaned topics do not matter.
    owned = replace(facts, topics={name: topic for name, topic in facts.topics.items() if name not in orphaned})
    found = [*cluster(facts), *orphans(facts), *(finding for check in CHECKS for finding in check(owned))]
    found += old_transactions(facts, old)
    return sorted(found, key=lambda finding: -finding.severity)


def cluster(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect brokers with the required features that belong to the cluster recorded in ZooKeeper."""
    if facts.recorded_cluster_id is None:
        if facts.topics:
            yield problem(
                "zookeeper-empty",
                f"ZooKeeper knows of no cluster under this path, but Kafka has {len(facts.topics)} topics of ours",
                "restore ZooKeeper from a backup, or use the right zookeeper_root; do not create streams over it",
            )
    elif facts.recorded_cluster_id != facts.kafka_cluster_id:
        yield problem(
            "wrong-cluster",
            f"ZooKeeper belongs to Kafka cluster {facts.recorded_cluster_id}, this one is {facts.kafka_cluster_id}",
            "use the right bootstrap_servers, or another zookeeper_root",
        )
    for broker in facts.brokers:
        lacking = lacks(broker.transaction_version, facts.bootstrap_servers, is_known=broker.knows_transactions_v2)
        if lacking is not None:
            what, remedy_ = lacking
            yield problem("transaction-version", f"broker {broker.id} {what}", remedy_)
        if broker.config.get("auto.create.topics.enable") == "true":
            yield warning(
                "auto-creation",
                f"broker {broker.id} creates topics that clients merely ask for",
                "set auto.create.topics.enable=false: a deleted topic would come back empty",
            )


def replication(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect every topic to survive the loss of a broker, if there are enough brokers."""
    thin, narrow = [], []
    for topic in (*facts.topics.values(), *facts.adopted.values()):
        # Brokers never wait for more than there are.
        needed = min(int(topic.config.get("min.insync.replicas", "1")), topic.replication_factor)
        if topic.in_sync < needed:
            yield problem(
                "below-min-isr",
                f"topic {topic.name} has {topic.in_sync} replicas in sync and needs {needed}: it takes no writes",
                "bring its brokers back",
            )
        elif topic.in_sync < topic.replication_factor:
            yield warning(
                "under-replicated",
                f"topic {topic.name} has {topic.in_sync} of {topic.replication_factor} replicas in sync",
                "bring its brokers back",
            )
        if len(facts.brokers) >= REPLICAS and topic.replication_factor < REPLICAS:
            thin.append(topic.name)
        elif topic.replication_factor >= REPLICAS and needed < 2:
            narrow.append(topic.name)
    if thin:
        yield warning(
            "replication-factor",
            f"{len(thin)} topics have fewer than {REPLICAS} replicas, such as {min(thin)}",
            "reassign them (kafka-reassign-partitions.sh), and set default.replication.factor=3",
        )
    if narrow:
        yield warning(
            "min-isr",
            f"{len(narrow)} topics acknowledge with one replica in sync, such as {min(narrow)}",
            "set min.insync.replicas=2 for the brokers, or for these topics",
        )


def parts(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect coordinators, groups and streams to work, as status and page do."""
    for fault in facts.faults():
        what = f"{fault.label}: {fault.what}"
        match fault.part, fault.code:
            case _, "no-coordinator":
                led = ", ".join(sorted({group.last_leader for group in facts.groups} - {""}))
                yield problem(
                    "no-coordinator", what + (f"; {led} led the groups last" if led else ""), remedy("no-coordinator")
                )
            case _, "broker-unreachable":
                led = ", ".join(sorted(str(group.name) for group in facts.groups if group.leader == fault.name))
                yield problem(
                    "broker-unreachable", what + (f"; it leads {led}" if led else ""), remedy("broker-unreachable")
                )
            case _, "topic-replaced":
                yield problem("topic-replaced", what, f"rollbridge repair --commit-log {fault.name}")
            case _, "zookeeper-outdated":
                yield problem("zookeeper-outdated", what, remedy("zookeeper-outdated"))
            case _, "taking-over":
                yield problem("taking-over", what, remedy("taking-over"))
            case _, "no-leader":
                if facts.coordinators:
                    yield problem("no-leader", what, remedy("no-leader"))
            case "group", _:
                way_out = "put the node right, as from a backup of ZooKeeper; if a newer release wrote it, run that one"
                yield problem(fault.code, what, way_out)
            case _ if fault.code in UNLED:
                yield problem(fault.code, what, remedy("unled"))
            case _ if fault.code not in WATCHED:  # see adopted_topics, which knows the topic
                yield problem("stream-error", what, _out_of_error(fault))


def _out_of_error(fault: PartFault) -> str:
    if fault.code == SUSPENDED:
        return remedy("stream-error", "which waits for native transactions of others")
    if fault.code == UNKNOWN_TOPIC:
        return (
            "a topic that was removed does not come back: copy what is needed from the stream, end its "
            f"transactions (rollbridge txn abort), and delete it (rollbridge stream delete {fault.name})"
        )
    return remedy("stream-error", what=f"topic {fault.topic}" if fault.topic else "what is refused")


def leadership(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect a standby, one release, and nothing stuck."""
    if len(facts.coordinators) == 1:
        yield warning("no-standby", "only one coordinator is running", remedy("no-standby"))
    if len(set(facts.releases.values())) > 1:
        told = ", ".join(f"{name} {release or 'before 0.2.0'}" for name, release in sorted(facts.releases.items()))
        yield warning(
            "releases",
            f"coordinators run different releases: {told}",
            "upgrade the others before clients use what the newest one brings (docs/upgrading.md)",
        )
    for group in facts.groups:
        for what, since_ms in (("rolling commit", group.committing_ms), ("scale", group.scaling_ms)):
            age_ms = 0 if since_ms is None else facts.now_ms - since_ms
            if age_ms > SLOW / timedelta(milliseconds=1):
                yield warning(
                    "stuck",
                    f"a {what} of group {group.name} has been under way for {age_ms // 1000} s",
                    remedy("stuck"),
                )
        for node in group.unreadable:
            yield warning(
                "change-unreadable",
                f"a change of group {group.name} cannot be read: {node}",
                "the next leader puts it aside and continues without it; find out who wrote it, then delete it",
            )
        overdue = [
            record
            for record in group.transactions
            if record.state == State.OPEN.value
            and record.begun_ms + record.lease_ms + SLOW / timedelta(milliseconds=1) < facts.now_ms
        ]
        if overdue:
            yield problem(
                "overdue",
                f"{len(overdue)} transactions of {group.name} have outlived their leases, such as {overdue[0].id}",
                remedy("overdue"),
            )


def reach(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect the doctor to reach every broker."""
    for node, why in facts.unreached.items():
        yield problem(
            "broker-unreachable",
            f"the doctor cannot reach broker {node}, which the cluster takes for alive: {why}",
            remedy("broker-unreachable"),
        )


def fold(findings: Sequence[Finding]) -> list[tuple[Finding, int]]:
    """Return the findings to show, each with how many more there are of its kind: of many alike, the first."""
    counts = Counter((item.severity, item.check) for item in findings)
    shown: dict[tuple[Severity, str], int] = Counter()
    found = []
    for item in findings:
        kind = item.severity, item.check
        shown[kind] += 1
        if counts[kind] <= ALIKE_MAX:
            found.append((item, 0))
        elif shown[kind] == 1:
            found.append((item, counts[kind] - 1))
    return found


def old_transactions(facts: ClusterFacts, old: timedelta) -> Iterator[Finding]:
    """Expect transactions to end within a time."""
    for group in facts.groups:
        before_ms = facts.now_ms - old / timedelta(milliseconds=1)
        found = [item for item in group.transactions if item.state == State.OPEN.value and item.begun_ms < before_ms]
        if not found:
            continue
        first = min(found, key=lambda item: item.begun_ms)
        left_ms = max(first.begun_ms + first.lease_ms - facts.now_ms, 0)
        label = f", labelled {first.label}," if first.label else ""
        others = f"; {len(found) - 1} more of its group are as old" if len(found) > 1 else ""
        yield warning(
            "old-transaction",
            f"transaction {first.id} of client {first.client_name}{label} has been open for "
            f"{_lasting(facts.now_ms - first.begun_ms)}, and may be for {_lasting(left_ms)} more; meanwhile it holds "
            f"the buffers of {', '.join(sorted(first.streams))}, with all that others write there{others}",
            remedy("old-transaction", client=first.client_name, id=first.id),
        )


def _lasting(milliseconds: float) -> str:
    """Return a length of time in one unit, rounded down."""
    seconds = int(milliseconds // 1000)
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def quotas(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect no quota of Kafka that is too tight for a coordinator."""
    for quota in facts.quotas:
        if quota.client_id is None and quota.user != DEFAULT_ENTITY:
            continue  # whose principal is a coordinator's is not known here
        if quota.client_id is not None and quota.client_id not in OUR_CLIENT_IDS:
            continue
        tight = {key: value for key, value in quota.limits.items() if value < _TIGHT.get(key, 0.0)}
        if tight:
            whom = " and ".join(
                f"{kind} {name}" for kind, name in (("user", quota.user), ("client id", quota.client_id)) if name
            )
            limits = ", ".join(f"{key}={value:g}" for key, value in sorted(tight.items()))
            yield warning(
                "quota",
                f"Kafka slows {whom} down ({limits}): a coordinator cannot read and merge faster than that, and "
                "commits wait for it",
                remedy(
                    "quota", servers=facts.bootstrap_servers, entity=_entity(quota), settings=",".join(sorted(tight))
                ),
            )


_TIGHT: Final[Mapping[str, float]] = {
    "producer_byte_rate": TIGHT_BYTES_PER_S,
    "consumer_byte_rate": TIGHT_BYTES_PER_S,
    "request_percentage": TIGHT_PERCENTAGE,
}


def _entity(quota: QuotaFacts) -> str:
    """Return how ``kafka-configs.sh`` is told whose quota it is."""
    words = []
    for kind, name in (("users", quota.user), ("clients", quota.client_id)):
        if name is not None:
            words.append(
                f"--entity-type {kind} " + ("--entity-default" if name == DEFAULT_ENTITY else f"--entity-name {name}")
            )
    return " ".join(words)


def foreign_messages(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect nothing but frames in buffers."""
    for snapshot in facts.snapshots:
        last = snapshot.since.last_foreign
        if last is None:
            continue
        where = show_partition(snapshot.found.partition)
        when = datetime.fromtimestamp(last.timestamp / 1000, UTC).strftime("%H:%M:%S")
        yield warning(
            "foreign-messages",
            f"a client other than rollbridge writes into buffer {where}: {snapshot.since.foreign} of its "
            f"newest messages are no frames; the last one, at offset {last.offset}, {when} UTC, has "
            f"{shown('key', last.key)} and {shown('value', last.value)}",
            remedy("foreign-messages", topic=snapshot.found.partition[0]),
        )


def shown(what: str, content: bytes | None) -> str:
    """Return the beginning of a foreign key or value, in visible characters."""
    if not content:
        return f"no {what}"
    return f"{what} {content[:SHOWN_MAX]!r}{'...' if len(content) > SHOWN_MAX else ''}"


def scaling_waits(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect streams to be scaled within ``SCALING`` after their policies have asked for it."""
    followed = {item.config.name for item in facts.streams if item.config.scaling is not None}
    for group in facts.groups:
        for wait in group.scaling_waits:
            if wait.stream in followed and wait.since_ms + SCALING / timedelta(milliseconds=1) < facts.now_ms:
                yield warning(
                    "scaling-waits",
                    f"stream {wait.stream} waits to be scaled by its load since "
                    f"{(facts.now_ms - wait.since_ms) // 60_000} min: {wait.reason}",
                    "end the transactions that it waits for (rollbridge txn list), raise --max-segments or the rate, "
                    "or spread the load of a hot key over several keys",
                )


def clocks(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect the clocks of leaders and of ZooKeeper to agree within ``CLOCKS_DIFFER``."""
    for group in facts.groups:
        if abs(group.clock_ms) > CLOCKS_DIFFER / timedelta(milliseconds=1):
            yield problem(
                "clock",
                f"the clock of {group.leader or 'the last leader'} was {abs(group.clock_ms) // 1000} s "
                f"{'ahead of' if group.clock_ms > 0 else 'behind'} ZooKeeper's when it took over group {group.name}: "
                "nothing is deleted for its age",
                remedy("clock"),
            )


def internal_topics(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect the original logs and buffers, without deletion by Kafka."""
    begun = {group.record.name for group in facts.groups if group.outdated == LOG_BEGINS.decode()}
    expected = {
        group.record.name.commit_log_topic: (
            group.record.commit_log_topic_id,
            f"none can lead: rollbridge repair --commit-log {group.record.name} restarts it, without what is open",
        )
        for group in facts.groups
        if group.record.commit_log_topic_id and group.record.name not in begun
    }
    expected |= {
        stream.config.buffer_topic: (
            stream.config.buffer_topic_id,
            f"what was open in it is lost: {stream.config.renewal}",
        )
        for stream in facts.streams
        if stream.config.state is StreamState.ACTIVE and (stream.error is None or stream.error.code not in UNLED)
        if stream.config.buffer_topic_id and stream.config.group not in begun
    }
    for name, (topic_id, to_do) in expected.items():
        topic = facts.topics.get(name)
        if name in facts.hidden:
            continue
        if topic is None or str(topic.topic_id) != topic_id:
            yield problem(
                "topic-replaced",
                f"topic {name} " + ("is gone" if topic is None else "was deleted and made again"),
                to_do,
            )
    for topic in facts.topics.values():
        if is_compacted_topic(topic.name):
            continue
        wrong = {key: topic.config[key] for key, value in _KEEP.items() if topic.config.get(key, value) != value}
        if wrong:
            yield problem(
                "retention",
                f"Kafka deletes records of topic {topic.name} by itself, after a change by hand: {_listed(wrong)}",
                remedy(
                    "retention",
                    servers=facts.bootstrap_servers,
                    topic=topic.name,
                    settings=_listed({key: _KEEP[key] for key in wrong}),
                ),
            )


def epochs(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect chained epochs, existing segments, and seals as the epochs say."""
    for stream in facts.streams:
        name = stream.config.name
        if stream.error is not None and stream.error.code in UNLED:
            continue
        if stream.config.state is not StreamState.ACTIVE:
            yield warning("deleting", f"stream {name} is being deleted", "a coordinator finishes that")
            continue
        if stream.history is None:
            yield problem(
                "epoch-history", f"the epochs of stream {name} cannot be read: {stream.unread}", "restore ZooKeeper"
            )
            continue
        for fault in check_chain(stream.history.records, stream.history.first, stream.history.born):
            yield problem("epoch-history", f"stream {name}: {fault}", "restore ZooKeeper from a backup")
        for segment in stream.history.segments():
            if stream.config.places.is_adopted(segment):
                continue  # see adopted_topics
            where = stream.config.place(segment)[0]
            topic = facts.topics.get(where)
            active = segment in stream.history.active.segment_ids
            if topic is None and (segment in stream.history.removed or where in facts.hidden):
                continue
            if topic is None:
                yield problem(
                    "segment-gone",
                    f"segment {segment} of stream {name} has no topic",
                    "its records are lost: restore the topic from a replica or a mirror",
                )
            else:
                if topic.partitions > 1:
                    yield problem(
                        "segment-grown",
                        f"topic {where} has {topic.partitions} partitions, and the first is the segment: what others "
                        "write to the rest is acknowledged, and no part of the stream",
                        f"write to stream {name} what is in the rest, and scale segment {segment.number} away "
                        f"(rollbridge stream scale {name}): Kafka takes no partitions away",
                    )
                if active == topic.sealed and not facts.is_busy:
                    yield wrong_seal(topic, active=active)


def late_records(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect records behind sealed ends to have reached readers."""
    for stream in facts.streams:
        name = stream.config.name
        for segment, known in stream.late.segments.items():
            what = f"{known.forwarded + known.refused} records came in behind the end of segment {segment} of {name}"
            if known.refused:
                place = show_partition(stream.config.place(segment))
                yield problem(
                    "late-records-refused",
                    f"{what}; {known.refused} of them are refused by what continues it ({known.reason}), so they reach "
                    "no reader",
                    remedy("late-records-refused", place=place, offset=known.looked_to),
                )
            else:
                yield warning(
                    "late-records",
                    f"{what}, were acknowledged, and were written to what continues it",
                    "nothing is lost; their writers compress with gzip and wrote to the segment while it was sealed: "
                    "another codec rules it out",
                )
        if stream.late.forwarding is not None and stream.config.state is StreamState.ACTIVE:
            yield warning(
                "late-records-under-way",
                f"records behind the end of segment {stream.late.forwarding.segment} of {name} are being forwarded",
                "a coordinator finishes that; if it does not, its log says what it waits for",
            )


def native_transactions(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect no native transaction that blocks readers for long."""
    for native in facts.open_natives:
        if native.age_s < SLOW.total_seconds():
            continue
        where = show_partition((native.topic, native.partition))
        who = f"producer {native.producer_id} has had a native transaction open on {where}"
        what = (
            f"{who} since offset {native.start_offset}, for {native.age_s:.0f} s: read_committed readers wait there, "
            "and so do scales and rolling commits of its stream"
        )
        if native.hangs or native.age_s > HANGING.total_seconds():
            if native.hangs:
                what += (
                    "; no coordinator names it as under way, so it never ends, as after an unclean election (ids that "
                    "this principal may not describe are not named)"
                )
            yield problem(
                "hanging-transaction",
                what,
                remedy(
                    "hanging-transaction",
                    partition=native.partition,
                    topic=native.topic,
                    offset=native.start_offset,
                ),
            )
        else:
            yield warning("long-transaction", what, remedy("long-transaction"))


def orphans(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect every topic of rollbridge to belong to an existing stream or group."""
    for topic, why in _orphaned(facts):
        yield warning(
            "orphan",
            f"topic {topic} {why}",
            "check whether another zookeeper_root has it; if it is not needed: kafka-topics.sh --bootstrap-server "
            f"{facts.bootstrap_servers} --delete --topic {topic}",
        )


def _orphaned(facts: ClusterFacts) -> Iterator[tuple[str, str]]:
    """Yield the topics that belong to no stream or group, each with the reason."""
    streams = {str(stream.config.name): stream for stream in facts.streams}
    known = {stream.config.buffer_topic for stream in facts.streams}
    # Which life of it is the present one cannot be read.
    unreadable = [StreamName.parse(name) for name in facts.unreadable]
    for group in facts.groups:
        scope = group.name.scope
        known |= {group.name.commit_log_topic, group.name.terminated_topic}
        known |= {snapshot_indexes_topic(scope), snapshot_segments_topic(scope), snapshot_topic(scope)}
    for topic in sorted(facts.topics.keys() - facts.upcoming):
        try:
            name, segment = parse_segment_topic(topic)
        except InvalidNameError:
            if topic not in known and not any(stream.owns_buffer(topic) for stream in unreadable):
                yield topic, "belongs to a stream, group or scope that does not exist"
            continue
        stream = streams.get(str(name))
        if stream is None:
            if str(name) not in facts.unreadable:
                yield topic, f"belongs to stream {name} that does not exist"
        elif stream.history is not None and segment not in stream.history.segments() and not facts.is_busy:
            yield topic, f"is a segment that no epoch of {name} has"


def permissions(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect that the doctor's principal has a coordinator's permissions."""
    if not facts.operations >= CLUSTER_OPERATIONS:
        yield warning(
            "permission",
            f"this principal may not {', '.join(sorted(CLUSTER_OPERATIONS - facts.operations))} the cluster",
            "a coordinator's principal needs it for retentions by size (docs/security.md); a client's does not",
        )
    needed = {name: (topic, topic_operations(name)) for name, topic in facts.topics.items()}
    needed |= {name: (topic, ADOPTED_OPERATIONS) for name, topic in facts.adopted.items()}
    for topic, operations in needed.values():
        missing = operations - topic.operations - (facts.operations & {"CREATE"})
        if topic.operations and missing:
            stream = "SCOPE/STREAM" + (f" --topic {topic.name}" if topic.name in facts.adopted else "")
            what = f"this principal may not {', '.join(sorted(missing))} topic {topic.name}"
            yield warning("permission", what, _GRANT.replace("SCOPE/STREAM", stream))
    if facts.hidden:
        yield warning(
            "permission",
            f"this principal may not look at {len(facts.hidden)} topics, or at their settings, such as "
            f"{min(facts.hidden)}: nothing can be said of these",
            _GRANT,
        )
    if facts.open_nodes and facts.is_guarded:
        yield warning(
            "zookeeper-open",
            f"anyone who reaches ZooKeeper may change {len(facts.open_nodes)} nodes, such as "
            f"{min(facts.open_nodes)}, and so ask leaders for anything",
            "give coordinators and clients an identity there (zookeeper_security), then run `rollbridge access secure` "
            "with the coordinators' (docs/security.md)",
        )


CHECKS: Final = (
    replication,
    parts,
    leadership,
    reach,
    scaling_waits,
    quotas,
    clocks,
    internal_topics,
    epochs,
    growth,
    adopted_topics,
    retentions,
    topic_names,
    late_records,
    native_transactions,
    permissions,
    check_compacted_topics,
    check_snapshots,
    foreign_messages,
    check_outcomes,
    gateways,
    producers,
)
