"""What the doctor finds: nothing in a good cluster, and each way in which one can be bad, with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from bridge.tests.doctor_makers import (
    ACTIVE,
    BUFFER,
    COMPACT,
    CONFIG,
    FIRST,
    FOUND,
    GOOD,
    GROUP,
    HOUR_MS,
    INDEXES,
    KEEP,
    LOG,
    NOW_MS,
    OLD,
    OUTCOMES,
    SCALED,
    SEGMENTS,
    SNAPSHOT,
    STREAM,
    id_of,
    topic,
)
from rollbridge.base.ids import Epoch, SegmentId, TransactionId
from rollbridge.buffer.snapshot_topic import EndedSince
from rollbridge.buffer.snapshots import SegmentIndex
from rollbridge.doctor.checks import ALIKE_MAX, find, fold
from rollbridge.doctor.facts import (
    DEFAULT_ENTITY,
    ClusterFacts,
    OpenNative,
    QuotaFacts,
    Severity,
    SnapshotFacts,
    StreamFacts,
)
from rollbridge.kafka.records import LogRecord
from rollbridge.metadata.access import ADOPTED_OPERATIONS, topic_operations
from rollbridge.metadata.changes import TOPIC_DELETED, TOPIC_RECREATED, StreamFault
from rollbridge.metadata.journal import LOG_BEGINS
from rollbridge.metadata.records import SEGMENTS_MAX, Coordinator, Group, Lead, TransactionRecord
from rollbridge.stream.config import FOREVER, RecordTimes, StreamConfig, StreamState, TopicLimits
from rollbridge.stream.epochs import EpochCause, EpochHistory
from rollbridge.stream.keyspace import KeyRange, even_ranges
from rollbridge.stream.names import StreamName, snapshot_indexes_topic
from rollbridge.stream.segment_graph import Segment

SAID = Coordinator(500, 2_000)


def test_a_good_cluster_gives_no_findings() -> None:
    assert find(GOOD) == []


def with_topic(name: str, **changes: Any) -> ClusterFacts:
    return replace(GOOD, topics={**GOOD.topics, name: topic(name, **changes)})


def without(*names: str) -> ClusterFacts:
    return replace(GOOD, topics={name: facts for name, facts in GOOD.topics.items() if name not in names})


def with_group(**changes: Any) -> ClusterFacts:
    return replace(GOOD, groups=[replace(GOOD.groups[0], **changes)])


def with_stream(**changes: Any) -> ClusterFacts:
    return replace(GOOD, streams=[replace(GOOD.streams[0], **changes)])


def with_broker(**changes: Any) -> ClusterFacts:
    return replace(GOOD, brokers=[replace(GOOD.brokers[0], **changes), *GOOD.brokers[1:]])


def with_snapshot(*, since: EndedSince = EndedSince(0, 0), **changes: Any) -> ClusterFacts:  # noqa: B008
    return replace(GOOD, snapshots=[SnapshotFacts(replace(FOUND, **changes), since)])


def native(age_s: float, *, hangs: bool = False) -> ClusterFacts:
    return replace(GOOD, open_natives=[OpenNative(ACTIVE, 17, 4, age_s, hangs=hangs)])


def overdue(begun_ms: int) -> ClusterFacts:
    record = TransactionRecord(
        id=TransactionId.of(0, 1),
        group=GROUP,
        state="open",
        client_name="c",
        begun_ms=begun_ms,
        lease_ms=1_000,
        streams={str(STREAM): 0},
        controller_epoch=1,
    )
    return with_group(transactions=[record])


def idle(begun_ms: int, number: int = 1) -> TransactionRecord:
    return TransactionRecord(
        id=TransactionId.of(0, number),
        group=GROUP,
        state="open",
        client_name="loader",
        label="nightly",
        begun_ms=begun_ms,
        lease_ms=48 * HOUR_MS,
        streams={str(STREAM): 0},
        controller_epoch=1,
    )


def late_in_the_day(*transactions: TransactionRecord) -> ClusterFacts:
    return replace(GOOD, now_ms=20 * HOUR_MS, snapshots=[], groups=with_group(transactions=transactions).groups)


def with_quota(user: str | None, client_id: str | None, **limits: float) -> ClusterFacts:
    return replace(GOOD, quotas=[QuotaFacts(user, client_id, limits)], bootstrap_servers="kafka:9092")


STRANGE = LogRecord(78, NOW_MS - 1_000, b"order-7", b'{"app": "legacy-sync", \x1b[31m' + b"x" * 100, [])
BROKEN_CHAIN = EpochHistory((FIRST.records[0], replace(SCALED.records[1], reference_epoch=Epoch(0))))

CASES: dict[str, tuple[Callable[[], ClusterFacts], str, Severity, str]] = {
    "a transaction that a dead job has left": (
        lambda: late_in_the_day(idle(6 * HOUR_MS)),
        "old-transaction",
        Severity.WARNING,
        f"rollbridge txn abort {TransactionId.of(0, 1)}",
    ),
    "a quota of coordinators": (
        lambda: with_quota(None, "rollbridge", consumer_byte_rate=20_000, producer_byte_rate=1e9),
        "quota",
        Severity.WARNING,
        "--bootstrap-server kafka:9092 --alter --entity-type clients --entity-name rollbridge --delete-config consumer",
    ),
    "a quota of everybody": (
        lambda: with_quota(DEFAULT_ENTITY, None, request_percentage=1),
        "quota",
        Severity.WARNING,
        "--alter --entity-type users --entity-default --delete-config request_percentage",
    ),
    "somebody else's messages in a buffer": (
        lambda: with_snapshot(since=EndedSince(0, 0, 3, STRANGE)),
        "foreign-messages",
        Severity.WARNING,
        f"Write on topic {BUFFER}",
    ),
    "a wiped ZooKeeper": (
        lambda: replace(GOOD, recorded_cluster_id=None, groups=[], streams=[]),
        "zookeeper-empty",
        Severity.PROBLEM,
        "restore ZooKeeper",
    ),
    "another Kafka": (
        lambda: replace(GOOD, recorded_cluster_id="kafka-0"),
        "wrong-cluster",
        Severity.PROBLEM,
        "bootstrap_servers",
    ),
    "old transactions": (
        lambda: with_broker(transaction_version=1),
        "transaction-version",
        Severity.PROBLEM,
        "upgrade",
    ),
    "auto-creation": (
        lambda: with_broker(config={"auto.create.topics.enable": "true"}),
        "auto-creation",
        Severity.WARNING,
        "auto.create.topics.enable=false",
    ),
    "too few in sync": (lambda: with_topic(ACTIVE, in_sync=1), "below-min-isr", Severity.PROBLEM, "brokers back"),
    "not all in sync": (lambda: with_topic(ACTIVE, in_sync=2), "under-replicated", Severity.WARNING, "brokers back"),
    "few replicas": (
        lambda: with_topic(ACTIVE, replication_factor=2, in_sync=2),
        "replication-factor",
        Severity.WARNING,
        "reassign",
    ),
    "one acknowledgement": (
        lambda: with_topic(ACTIVE, config={**KEEP, "min.insync.replicas": "1"}),
        "min-isr",
        Severity.WARNING,
        "min.insync.replicas=2",
    ),
    "no coordinator": (lambda: replace(GOOD, coordinators=[]), "no-coordinator", Severity.PROBLEM, "start one"),
    "coordinators of different releases": (
        lambda: replace(GOOD, records={"one": replace(SAID, release="0.2.0"), "two": replace(SAID, release="0.3.0")}),
        "releases",
        Severity.WARNING,
        "upgrade the others",
    ),
    "a coordinator that does not reach a broker": (
        lambda: replace(GOOD, records={"one": replace(SAID, unreachable=("broker 2 at kafka-2:9092: no answer",))}),
        "broker-unreachable",
        Severity.PROBLEM,
        "the network between it and the coordinator",
    ),
    "a broker that the doctor does not reach": (
        lambda: replace(GOOD, unreached={2: "no answer"}),
        "broker-unreachable",
        Severity.PROBLEM,
        "look at that broker",
    ),
    "one coordinator": (lambda: replace(GOOD, coordinators=["one"]), "no-standby", Severity.WARNING, "another"),
    "no leader": (lambda: with_group(lead=None), "no-leader", Severity.PROBLEM, "logs"),
    "a long takeover": (
        lambda: with_group(lead=Lead("one", NOW_MS - 36_000, is_serving=False)),
        "taking-over",
        Severity.PROBLEM,
        "standby",
    ),
    "a stuck rolling commit": (lambda: with_group(committing_ms=NOW_MS - 90_000), "stuck", Severity.WARNING, "sealing"),
    "a stuck scale": (lambda: with_group(scaling_ms=NOW_MS - 90_000), "stuck", Severity.WARNING, "sealing"),
    "a group that cannot be read": (
        lambda: with_group(record_fault="of version 999", lead=None, record=Group(GROUP, 0)),
        "metadata-unreadable",
        Severity.PROBLEM,
        "put the node right",
    ),
    "a change that cannot be read": (
        lambda: with_group(unreadable=("/groups/g/unreadable/committing-7",)),
        "change-unreadable",
        Severity.WARNING,
        "then delete it",
    ),
    "an overdue transaction": (lambda: overdue(NOW_MS - 100_000), "overdue", Severity.PROBLEM, "leader"),
    "a log that is half begun": (
        lambda: with_group(outdated=LOG_BEGINS.decode()),
        "topic-replaced",
        Severity.PROBLEM,
        "repair --commit-log",
    ),
    "a log that is gone": (lambda: without(LOG), "topic-replaced", Severity.PROBLEM, "repair --commit-log"),
    "a buffer made again": (
        lambda: with_topic(BUFFER, topic_id="another"),
        "topic-replaced",
        Severity.PROBLEM,
        "delete the stream",
    ),
    "retention by Kafka": (
        lambda: with_topic(ACTIVE, config={**KEEP, "retention.ms": "604800000"}),
        "retention",
        Severity.PROBLEM,
        "--add-config retention.ms=-1",
    ),
    "a compacted buffer": (
        lambda: with_topic(BUFFER, config={**KEEP, "cleanup.policy": "compact"}),
        "retention",
        Severity.PROBLEM,
        "cleanup.policy=delete",
    ),
    "a broken chain": (lambda: with_stream(history=BROKEN_CHAIN), "epoch-history", Severity.PROBLEM, "restore"),
    "no epochs": (lambda: with_stream(history=None), "epoch-history", Severity.PROBLEM, "restore"),
    "a stream of which a topic was removed": (
        lambda: with_stream(error=StreamFault("refused", "UNKNOWN_TOPIC_OR_PARTITION", ACTIVE, 1)),
        "stream-error",
        Severity.PROBLEM,
        "rollbridge stream delete sales/orders",
    ),
    "a stream that may not write": (
        lambda: with_stream(error=StreamFault("refused", "TOPIC_AUTHORIZATION_FAILED", ACTIVE, 1)),
        "stream-error",
        Severity.PROBLEM,
        f"put topic {ACTIVE} right",
    ),
    "a stream half deleted": (
        lambda: with_stream(config=replace(GOOD.streams[0].config, state=StreamState.DELETING)),
        "deleting",
        Severity.WARNING,
        "coordinator",
    ),
    "a segment that is gone": (lambda: without(OLD), "segment-gone", Severity.PROBLEM, "restore"),
    "a segment that has got partitions": (
        lambda: with_topic(ACTIVE, partitions=3),
        "segment-grown",
        Severity.PROBLEM,
        "scale segment",
    ),
    "an open old segment": (lambda: with_topic(OLD, sealed=False), "seal", Severity.PROBLEM, "takeover"),
    "a sealed active segment": (lambda: with_topic(ACTIVE, sealed=True), "seal", Severity.PROBLEM, "takeover"),
    "a long native transaction": (lambda: native(120), "long-transaction", Severity.WARNING, "time-out"),
    "a hanging native transaction": (
        lambda: native(2_000),
        "hanging-transaction",
        Severity.PROBLEM,
        f"--topic {ACTIVE} --start-offset 4",
    ),
    "a native transaction that no coordinator knows": (
        lambda: native(120, hangs=True),
        "hanging-transaction",
        Severity.PROBLEM,
        f"--topic {ACTIVE} --start-offset 4",
    ),
    "a topic of nobody": (
        lambda: with_topic("sales.gone.segment-0.epoch-0"),
        "orphan",
        Severity.WARNING,
        "--delete --topic sales.gone.segment-0.epoch-0",
    ),
    "a segment of no epoch": (
        lambda: with_topic("sales.orders.segment-9.epoch-9"),
        "orphan",
        Severity.WARNING,
        "--delete",
    ),
    "a buffer of nobody": (
        lambda: with_topic("sales.gone.transaction-buffer"),
        "orphan",
        Severity.WARNING,
        "--delete --topic sales.gone.transaction-buffer",
    ),
    "snapshots of nobody": (
        lambda: with_topic(snapshot_indexes_topic("gone"), config=COMPACT),
        "orphan",
        Severity.WARNING,
        "--delete --topic gone.__transaction_buffer_snapshot_indexes",
    ),
    "snapshots that Kafka deletes": (
        lambda: with_topic(INDEXES, config={**COMPACT, "cleanup.policy": "compact,delete"}),
        "compaction",
        Severity.PROBLEM,
        f"--entity-name {INDEXES} --add-config cleanup.policy=compact",
    ),
    "outcomes that do not fit": (
        lambda: with_topic(OUTCOMES, config={**COMPACT, "max.message.bytes": "1048588"}),
        "message-size",
        Severity.WARNING,
        "max.message.bytes=16777216",
    ),
    "a commit log for small records": (
        lambda: with_topic(LOG, config={**KEEP, "max.message.bytes": "1048588"}),
        "message-size",
        Severity.WARNING,
        "max.message.bytes=16777216",
    ),
    "a snapshot that lags": (
        lambda: with_snapshot(since=EndedSince(4, NOW_MS - 70_000)),
        "snapshot-lag",
        Severity.WARNING,
        "log of the leader of sales/default",
    ),
    "no snapshot at all": (
        lambda: with_snapshot(since=EndedSince(1, NOW_MS - 70_000), snapshot=None),
        "snapshot-lag",
        Severity.WARNING,
        "only it writes snapshots",
    ),
    "a damaged snapshot": (
        lambda: with_snapshot(faults=("its checksum does not fit",)),
        "snapshot-damaged",
        Severity.WARNING,
        "rollbridge snapshot rebuild sales/orders",
    ),
    "segments that are gone": (
        lambda: with_snapshot(
            snapshot=replace(SNAPSHOT, indexes=(SegmentIndex(0, 1, 0, 9, 2, 1, 2),), sequence_id=1),
            segments_exist=False,
        ),
        "snapshot-segments",
        Severity.PROBLEM,
        "rollbridge snapshot rebuild sales/orders",
    ),
    "a transaction that is open for long": (
        lambda: with_snapshot(buffer_end=600_000),
        "long-replay",
        Severity.WARNING,
        "rollbridge txn list --group sales/default",
    ),
    "outcomes that are gone": (lambda: without(OUTCOMES), "outcomes-gone", Severity.PROBLEM, "OutcomeExpiredError"),
    "outcomes of another topic": (
        lambda: with_topic(OUTCOMES, config=COMPACT, topic_id="another"),
        "outcomes-gone",
        Severity.PROBLEM,
        f"commit log {LOG}",
    ),
    "outcomes that cannot be read": (
        lambda: with_group(outcome_faults=["client c: not a record"]),
        "outcomes-damaged",
        Severity.WARNING,
        "OutcomeExpiredError",
    ),
    "no right to look at the cluster": (
        lambda: replace(GOOD, operations=frozenset({"CREATE"})),
        "permission",
        Severity.WARNING,
        "coordinator's principal",
    ),
    "no rights to a topic but a client's": (
        lambda: with_topic(ACTIVE, operations=frozenset({"READ", "WRITE", "DESCRIBE"})),
        "permission",
        Severity.WARNING,
        "rollbridge access kafka-acls coordinator",
    ),
    "nodes that are open to everybody": (
        lambda: replace(GOOD, open_nodes=["/groups"]),
        "zookeeper-open",
        Severity.WARNING,
        "rollbridge access secure",
    ),
}


def test_an_old_transaction_is_named_with_its_client_and_how_long_it_may_still_hold_its_buffers() -> None:
    [found] = find(late_in_the_day(idle(6 * HOUR_MS), idle(7 * HOUR_MS, 2), idle(9 * HOUR_MS, 3)))
    assert found.what == (
        f"transaction {TransactionId.of(0, 1)} of client loader, labelled nightly, has been open for 14 h, "
        "and may be for 34 h more; meanwhile it holds the buffers of sales/orders, with all that others write there; "
        "1 more of its group are as old"
    )
    assert find(late_in_the_day(idle(9 * HOUR_MS))) == [], "it is no fault of itself"
    assert [item.check for item in find(late_in_the_day(idle(9 * HOUR_MS)), timedelta(hours=10))] == ["old-transaction"]


def test_where_nothing_is_secured_open_nodes_are_no_finding() -> None:
    assert find(replace(GOOD, open_nodes=["/groups"], is_guarded=False)) == []


def test_a_quota_that_slows_no_coordinator_down_is_no_finding() -> None:
    assert find(with_quota(None, "rollbridge", consumer_byte_rate=1e9)) == []
    assert find(with_quota(None, "loader", consumer_byte_rate=1)) == []
    assert find(with_quota("loader", None, consumer_byte_rate=1)) == []
    assert find(with_quota(None, "rollbridge", controller_mutation_rate=1)) == []


def test_more_replicas_in_sync_than_there_are_is_no_problem_of_theirs() -> None:
    """Kafka 4 waits for as many as a partition has."""
    checks = [item.check for item in find(with_topic(LOG, replication_factor=1, in_sync=1))]
    assert checks == ["replication-factor"]


def test_a_foreign_message_is_shown_as_far_as_it_says_whose_it_is() -> None:
    [found] = find(with_snapshot(since=EndedSince(0, 0, 3, STRANGE)))
    assert f"buffer {BUFFER}: 3 of its newest messages are no frames; the last one, at offset 78," in found.what
    assert 'has key b\'order-7\' and value b\'{"app": "legacy-sync",' in found.what
    assert found.what.isprintable()
    assert len(found.what) < 400


def test_without_a_coordinator_it_says_who_led_last() -> None:
    groups = with_group(lead=None, last_leader="one").groups
    found = {item.check: item.what for item in find(replace(GOOD, coordinators=[], groups=groups))}
    assert found["no-coordinator"] == "coordinator: none is registered; one led the groups last"


ADOPTED = "shop.orders"
ADOPTED_STREAM = StreamName.of_topic(ADOPTED, "sales")
ADOPTED_BUFFER = ADOPTED_STREAM.buffer_topic()
ADOPTED_CONFIG = StreamConfig(
    name=ADOPTED_STREAM,
    group=GROUP,
    created_ms=0,
    buffer_topic_id=str(id_of(ADOPTED_BUFFER)),
    topic=ADOPTED,
    topic_id=str(id_of(ADOPTED)),
    partitioner="murmur2",
    partitions=4,
)
ON_TOPIC = EpochHistory.create(even_ranges(4), 0)
LEFT = ON_TOPIC.with_records(
    replace(
        ON_TOPIC.plan_scale([0, 1, 2, 3], even_ranges(1), 1),
        sealed_ends={item.id: 9 for item in ON_TOPIC.active.segments},
    )
)
NEXT = ADOPTED_STREAM.segment_topic(LEFT.active.segments[0].id)


def adopted(
    history: EpochHistory = ON_TOPIC, claims: dict[str, str] | None = None, error: str | None = None, **changes: Any
) -> ClusterFacts:
    """A good cluster with an adopted topic, whose owner lets it have one replica in sync and a retention."""
    owners = {"config": {"retention.ms": "1000", "min.insync.replicas": "2"}, "operations": ADOPTED_OPERATIONS}
    known = topic(ADOPTED, **{"partitions": 4, **owners, **changes})
    fault = None if error is None else StreamFault("the owner did it", error, ADOPTED, 0)
    names = [ADOPTED_BUFFER, *([NEXT] if history is LEFT else [])]
    return replace(
        GOOD,
        streams=[*GOOD.streams, StreamFacts(ADOPTED_CONFIG, history, error=fault)],
        topics={**GOOD.topics, **{name: topic(name) for name in names}},
        adopted={ADOPTED: known},
        claims={ADOPTED: str(ADOPTED_STREAM)} if claims is None else claims,
    )


def test_an_adopted_topic_is_its_owners() -> None:
    assert find(adopted()) == []
    assert find(adopted(history=LEFT, sealed=True)) == []
    gone = LEFT.with_removed(item.id for item in ON_TOPIC.active.segments)
    assert find(replace(adopted(history=gone), adopted={}, topics=adopted(LEFT).topics)) == [], "all of it is read"
    assert find(adopted(error=TOPIC_RECREATED)) == [], "the leader is about to see that it is well again"


def with_retention(kept_ms: int, begun_ms: int, **changes: Any) -> ClusterFacts:
    """A cluster at 20 h, with a transaction of up to 48 hours on an adopted topic."""
    config = replace(ADOPTED_CONFIG, **{"limits": TopicLimits(1_000_000), "kept_ms": kept_ms, **changes})
    known = replace(idle(begun_ms), streams={str(ADOPTED_STREAM): 0})
    facts = adopted()
    return replace(
        facts,
        now_ms=20 * HOUR_MS,
        snapshots=[],
        streams=[*GOOD.streams, StreamFacts(config, ON_TOPIC)],
        groups=with_group(transactions=[known]).groups,
    )


def test_a_retention_below_a_lease_is_found_and_says_what_is_too_old_by_now() -> None:
    [found] = find(with_retention(10 * HOUR_MS, 15 * HOUR_MS))
    assert (found.check, found.severity) == ("short-retention", Severity.WARNING)
    assert "may be open for 172800 s, and topic shop.orders keeps records for 36000 s" in found.what
    assert "nothing of it is that old yet" in found.what
    assert "rollbridge stream update shop.orders --timestamps commit" in found.remedy
    [found] = find(with_retention(2 * HOUR_MS, 15 * HOUR_MS))
    assert found.severity is Severity.PROBLEM
    assert "what it wrote to topic shop.orders before 1970-01-01 18:00:00Z is older" in found.what
    for kept_ms, changes in ((FOREVER, {}), (48 * HOUR_MS, {}), (HOUR_MS, {"timestamps": RecordTimes.COMMIT})):
        assert find(with_retention(kept_ms, 15 * HOUR_MS, **changes)) == []
    brokers = TopicLimits(1_000_000, is_append_time=True)
    assert find(with_retention(HOUR_MS, 15 * HOUR_MS, limits=brokers)) == [], "brokers stamp what is committed"


ADOPTED_CASES: dict[str, tuple[Callable[[], ClusterFacts], str, Severity, str]] = {
    "deleted": (
        lambda: replace(adopted(error=TOPIC_DELETED), adopted={}),
        "topic-deleted",
        Severity.PROBLEM,
        f"rollbridge stream release {ADOPTED}",
    ),
    "created again": (
        lambda: adopted(topic_id="another", error=TOPIC_RECREATED),
        "topic-recreated",
        Severity.PROBLEM,
        f"rollbridge stream release {ADOPTED}, and rollbridge stream adopt {ADOPTED}",
    ),
    "grown": (
        lambda: adopted(partitions=6),
        "partitions-added",
        Severity.WARNING,
        "takes the others in at its next look",
    ),
    "grown too large": (
        lambda: adopted(partitions=SEGMENTS_MAX + 1),
        "topic-size",
        Severity.PROBLEM,
        "among several topics",
    ),
    "not to be looked at, but by the leader": (
        lambda: replace(adopted(error=TOPIC_RECREATED), adopted={}, hidden=frozenset({ADOPTED})),
        "topic-recreated",
        Severity.PROBLEM,
        "release",
    ),
    "gone after it was left": (
        lambda: replace(adopted(history=LEFT), adopted={}),
        "segment-gone",
        Severity.PROBLEM,
        "readers continue behind them",
    ),
    "sealed": (lambda: adopted(sealed=True), "seal", Severity.PROBLEM, "takeover"),
    "open after it was left": (lambda: adopted(history=LEFT), "seal", Severity.PROBLEM, "takeover"),
    "not in the index": (lambda: adopted(claims={}), "topic-index", Severity.PROBLEM, "writes a missing entry"),
    "in the index for another": (
        lambda: adopted(claims={ADOPTED: "sales/else"}),
        "topic-index",
        Severity.PROBLEM,
        "rollbridge repair",
    ),
    "of two streams": (
        lambda: replace(
            adopted(),
            streams=[*adopted().streams, StreamFacts(replace(ADOPTED_CONFIG, name=StreamName("b", "c")), ON_TOPIC)],
        ),
        "topic-index",
        Severity.PROBLEM,
        "leaves the topic as it is",
    ),
    "in the index, and not adopted": (
        lambda: replace(GOOD, claims={"lost": "sales/lost"}),
        "topic-index",
        Severity.WARNING,
        "rollbridge stream adopt lost",
    ),
    "without rights": (
        lambda: adopted(operations=ADOPTED_OPERATIONS - {"WRITE"}),
        "permission",
        Severity.WARNING,
        f"kafka-acls coordinator SCOPE/STREAM --topic {ADOPTED}",
    ),
    "without replicas": (lambda: adopted(in_sync=1), "below-min-isr", Severity.PROBLEM, "brokers back"),
    "with a transaction that hangs": (
        lambda: replace(adopted(), open_natives=[OpenNative(ADOPTED, 17, 4, 2_000, 3)]),
        "hanging-transaction",
        Severity.PROBLEM,
        f"--partition 3 --topic {ADOPTED} --start-offset 4",
    ),
}
CASES |= {f"an adopted topic, {case}": values for case, values in ADOPTED_CASES.items()}
NAMED = CONFIG.name.virtual_topic
CASES["a topic with the name of a stream"] = (
    lambda: replace(GOOD, named=frozenset({NAMED})),
    "name-clash",
    Severity.WARNING,
    f"--delete --topic {NAMED}; else create a stream of another name",
)


@pytest.mark.parametrize("case", CASES)
def test_each_fault_is_found_with_a_remedy(case: str) -> None:
    spoil, check, severity, remedy = CASES[case]
    found = [finding for finding in find(spoil()) if finding.check == check]
    assert found, find(spoil())
    assert found[0].severity is severity
    assert remedy in found[0].remedy


@pytest.mark.parametrize("topic", [ACTIVE, BUFFER, LOG])
def test_a_topic_that_may_not_be_looked_at_is_not_said_to_be_gone(topic: str) -> None:
    (finding,) = find(replace(without(topic), hidden=frozenset({topic})))
    assert finding.check == "permission"
    assert f"such as {topic}: nothing can be said" in finding.what


def test_a_right_to_create_may_be_given_for_the_cluster() -> None:
    operations = topic_operations(ACTIVE) - {"CREATE"}
    assert find(with_topic(ACTIVE, operations=operations)) != []
    assert find(replace(with_topic(ACTIVE, operations=operations), operations=frozenset({"CREATE", "DESCRIBE"}))) == []


def test_a_segment_that_was_truncated_away_is_not_missed() -> None:
    gone = replace(without(OLD), streams=with_stream(history=SCALED.with_removed([SEGMENTS[OLD]])).streams)
    assert find(gone) == []


@pytest.mark.parametrize(
    ("segments", "epochs", "remedy"),
    [
        (1_000, 1, "rollbridge stream update sales/orders --retention-time"),
        (999, 1, ""),
        (1, 2_000, "rollbridge stream history sales/orders"),
        (1, 1_999, ""),
    ],
)
def test_streams_with_many_topics_or_epochs_are_named(segments: int, epochs: int, remedy: str) -> None:
    records = [*EpochHistory.create(even_ranges(segments), 0).records]
    removed: set[SegmentId] = set()
    for number in range(1, epochs):  # not planned one after the other, which takes seconds for so many
        ended = {item.id: 0 for item in records[-1].segments}
        removed |= ended.keys()
        [keys] = even_ranges(1)
        successor = Segment(SegmentId.of(number, number), keys)
        epoch = successor.id.epoch
        record = replace(records[-1], epoch=epoch, reference_epoch=epoch, segments=(successor,), sealed_ends=ended)
        records.append(replace(record, cause=EpochCause.SCALE, created_ms=1))
    history = EpochHistory(tuple(records), frozenset(removed))
    names = {STREAM.segment_topic(item.id) for item in history.active.segments}
    facts = replace(with_stream(history=history), topics={**GOOD.topics, **{name: topic(name) for name in names}})
    found = [finding for finding in find(facts) if finding.check == "growth"]
    assert len(found) == bool(remedy)
    for finding in found:
        assert finding.severity is Severity.WARNING
        assert remedy in finding.remedy
        assert "rolling" not in finding.remedy


def test_where_rolling_commits_made_the_epochs_it_is_said_how_there_will_be_fewer() -> None:
    scaled = EpochHistory.create(even_ranges(500), 0)
    history = scaled.with_records(replace(scaled.plan_scale([0], [KeyRange(0.0, 0.002)], 1), sealed_ends={}))
    for _ in range(2):
        history = history.with_records(*history.plan_rolling(0, 1))
    [finding] = [item for item in find(with_stream(history=history)) if item.check == "growth"]
    assert "stream sales/orders has 2501 topics of segments and 6 epochs" in finding.what
    assert "2 rolling commits made two epochs each: commit open transactions before" in finding.remedy
    for _ in range(3):
        prepared = {0: SegmentId.of(history.next_prepared(0), history.active.epoch)}
        history = history.with_records(*history.plan_rolling(0, 1, prepared=prepared))
    [finding] = [item for item in find(with_stream(history=history)) if item.check == "growth"]
    assert "5 rolling commits made two epochs each: most of large transactions" in finding.remedy


def test_the_topics_of_a_stream_that_cannot_be_read_are_no_orphans() -> None:
    later = STREAM.buffer_topic(7)
    facts = replace(with_topic(later), streams=[], snapshots=[], unreadable={str(STREAM): "no record"})
    assert [item.check for item in find(facts)] == ["metadata-unreadable"]


@pytest.mark.parametrize(
    "name",
    ["sales.gone.segment-0.epoch-0", "sales.orders.segment-9.epoch-9", "gone.__transaction_buffer_snapshot_indexes"],
)
def test_of_a_topic_of_nobody_nothing_else_is_said(name: str) -> None:
    spoilt = with_topic(name, config={"cleanup.policy": "compact,delete"}, in_sync=1, operations=frozenset({"READ"}))
    [finding] = find(replace(spoilt, bootstrap_servers="kafka:9092"))
    assert finding.check == "orphan"
    assert f"kafka-topics.sh --bootstrap-server kafka:9092 --delete --topic {name}" in finding.remedy


def test_what_is_under_way_is_not_taken_for_broken() -> None:
    busy = replace(with_group(scaling_ms=NOW_MS - 5_000), topics=with_topic(ACTIVE, sealed=True).topics)
    busy = replace(
        busy, topics={**busy.topics, "sales.orders.segment-9.epoch-9": topic("sales.orders.segment-9.epoch-9")}
    )
    assert find(busy) == []
    prepared = with_topic("sales.orders.segment-1073741824.epoch-1")
    assert [item.check for item in find(prepared)] == ["orphan"]
    assert find(replace(prepared, upcoming=frozenset(prepared.topics))) == []
    assert find(native(5)) == []
    assert find(overdue(NOW_MS - 500)) == []
    assert find(with_snapshot(since=EndedSince(4, NOW_MS - 61_000))) == [], "an interval of 2 s has just run out"


def test_of_a_native_transaction_that_hangs_it_is_said_whether_a_coordinator_knows_it() -> None:
    said = "no coordinator names it as under way"
    assert [[said in item.what for item in find(facts)] for facts in (native(120, hangs=True), native(2_000))] == [
        [True],
        [False],
    ]


def test_of_a_coordinator_that_does_not_reach_a_broker_it_is_said_what_it_leads() -> None:
    mute = replace(SAID, unreachable=("broker 2 at kafka-2:9092: no answer",))
    said = [item.what for item in find(replace(GOOD, records={"one": mute, "two": mute}))]
    assert [text.partition("; it leads ")[2] for text in said if "cannot reach" in text] == ["sales/default", ""]


def test_the_settings_of_the_leader_say_what_is_late() -> None:
    late = with_snapshot(since=EndedSince(4, NOW_MS - 64_000))
    [finding] = find(late)
    assert "after 500 of them" in finding.what
    assert "2000 ms" in finding.what
    slow = replace(GOOD.groups[0], coordinator=Coordinator(1_000_000, 600_000))
    assert find(replace(late, groups=[slow])) == []
    old = replace(GOOD.groups[0], coordinator=None)
    assert find(replace(late, groups=[old])) == [], "of an older coordinator the defaults are taken"


def test_what_waits_in_a_stream_in_an_error_state_has_not_ended() -> None:
    late = with_snapshot(since=EndedSince(4, NOW_MS - 70_000))
    [finding] = find(late)
    assert "behind it the ends of 4 transactions or more were requested, the first of them 70 s ago" in finding.what
    error = StreamFault("refused", "TOPIC_AUTHORIZATION_FAILED", ACTIVE, 1)
    found = [item.check for item in find(replace(late, streams=with_stream(error=error).streams))]
    assert "snapshot-lag" not in found


@pytest.mark.parametrize("case", ADOPTED_CASES)
def test_what_a_leader_has_found_is_not_told_a_second_time(case: str) -> None:
    spoil, check, _, _ = ADOPTED_CASES[case]
    found = [finding.check for finding in find(spoil())]
    assert found.count(check) == 1
    assert "stream-error" not in found


def test_the_worst_comes_first() -> None:
    found = find(replace(GOOD, coordinators=["one"], recorded_cluster_id="kafka-0"))
    assert [finding.severity for finding in found] == sorted((finding.severity for finding in found), reverse=True)


def test_many_findings_of_a_kind_are_one_and_problems_come_first() -> None:
    names = [name for name in GOOD.topics if name not in (OUTCOMES, INDEXES)]
    more = {f"{STREAM.segment_topic(next(iter(SEGMENTS.values())))}.{number}" for number in range(30)}
    facts = replace(
        GOOD,
        topics={name: topic(name, in_sync=2) for name in (*names, *more)},
        coordinators=[],
        upcoming=frozenset(more),
    )
    found = find(facts)
    alike = [item for item in found if item.check == "under-replicated"]
    assert len(alike) > 30
    shown = fold(found)
    assert shown[0][0].severity is Severity.PROBLEM
    assert [(item, count) for item, count in shown if item.check == "under-replicated"] == [(alike[0], len(alike) - 1)]
    assert sum(1 + count for _, count in shown) == len(found)
    few = [item for item in found if item.check != "under-replicated"] + alike[:ALIKE_MAX]
    assert fold(few) == [(item, 0) for item in few]
