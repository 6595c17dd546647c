"""``rollbridge doctor`` against real servers: it is content with a good cluster, and sees what is done to a bad one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic
from kio.schema.errors import ErrorCode
from kio.schema.produce.v11 import ProduceResponse

import rollbridge
from integration_tests.backends.choice import new_cluster
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site, until
from integration_tests.command_line import Cli
from rollbridge.base.ids import SegmentId
from rollbridge.buffer.snapshots import index_keys
from rollbridge.cli.common import ExitCode
from rollbridge.errors import CoordinatorUnavailableError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.dispatch import PRODUCE_KEY, produce_body, request_start
from rollbridge.kafka.metadata import Cluster
from rollbridge.kafka.records import BatchBuilder, stamped_header
from rollbridge.kafka.transactions import Coordination
from rollbridge.metadata import paths
from rollbridge.metadata.records import Coordinator
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import GroupName, StreamName, snapshot_indexes_topic

OLD_PRODUCE = 11
"""The last version with which a broker does not tell the coordinator that a partition takes part."""


class Patient:
    """A rollbridge of its own, and what the doctor says of it; other tests share the servers."""

    def __init__(self, site: Site, scope: str, cli: Cli) -> None:
        self.site = site
        self.scope = scope
        self.cli = cli

    def findings(self) -> dict[str, dict[str, Any]]:
        """What concerns this scope, by check."""
        answer = self.cli("doctor", "--json")
        assert answer.code in (ExitCode.OK, ExitCode.FINDINGS), answer
        document = json.loads(answer.out)
        return {item["check"]: item for item in document["findings"] if self.scope in item["what"] + item["remedy"]}


@pytest.fixture
def patient(
    cluster: AnyCluster,
    unique_name: Callable[[str], str],
    scope: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Iterator[Patient]:
    root = f"/{unique_name('patient')}"
    with Site(cluster, root, tmp_path, **getattr(request, "param", {})) as site:
        yield Patient(site, scope, Cli(cluster, root))


def test_a_good_cluster_has_no_findings_and_each_fault_gets_one(
    patient: Patient, cluster: AnyCluster, unique_name: Callable[[str], str]
) -> None:
    stream = StreamName(patient.scope, "orders")
    with patient.site.connect() as b:
        b.admin.create_stream(str(stream), segments=2)
        with b.transaction(str(stream)) as transaction:
            transaction.write(str(stream), key=b"k", value=b"v")
        b.admin.scale(str(stream), seal=[0], ranges=[(0.0, 0.25), (0.25, 0.5)])
        history = b.admin.history(str(stream))
    assert patient.findings() == {}
    assert "no-standby" in patient.cli("doctor").out

    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    [sealed] = [item for item in history.segments() if history.sealed_end(item) is not None]
    topics = KafkaClient(cluster.bootstrap_servers).topics
    topics.set_topic_config(stream.segment_topic(sealed), {"max.message.bytes": "1000000"})
    topics.set_topic_config(stream.buffer_topic(), {"retention.ms": "1000"})
    group = GroupName(patient.scope)
    admin.delete_topics([group.commit_log_topic])[group.commit_log_topic].result(120)
    until(lambda: {"seal", "retention", "topic-replaced"} <= patient.findings().keys())
    found = patient.findings()
    assert f"topic {stream.segment_topic(sealed)} takes records" in found["seal"]["what"]
    assert "retention.ms=-1" in found["retention"]["remedy"]
    assert f"topic {group.commit_log_topic} is gone" in found["topic-replaced"]["what"]
    assert patient.cli("doctor").code == ExitCode.FINDINGS


def test_a_group_that_cannot_be_read_hides_no_other(patient: Patient, cluster: AnyCluster, scope: str) -> None:
    lost, led = GroupName(f"{scope}-lost"), GroupName(scope)
    with patient.site.connect() as b:
        b.admin.create_stream(f"{scope}/orders")
    KafkaClient(cluster.bootstrap_servers).topics.set_topic_config(
        StreamName(scope, "orders").buffer_topic(), {"retention.ms": "1000"}
    )
    with ZooKeeperSession(cluster.zookeeper, root=patient.site.root) as session:
        metadata = Metadata(session)
        metadata.ensure_group(lost, 1)
        until(lambda: (lead := metadata.lead(lost)) is not None and lead.is_serving)
        for record in (b'{"version": 999}', b"{garbage}"):
            session.set(paths.group(lost), record)
            until(lambda: "retention" in patient.findings())
            found = patient.findings()
            assert f"group {lost}: its record (/groups/{lost.scope}.default)" in found["metadata-unreadable"]["what"]
            assert "orphan" not in found, "its topics are its own"
            assert patient.cli("doctor").code == ExitCode.FINDINGS
            listed = patient.cli("group", "list")
            assert (listed.code, str(led) in listed.out, str(lost) in listed.out) == (ExitCode.OK, True, False)
            assert f"group {lost} is left out, its record cannot be read" in listed.err
            assert f"group {lost} may have more" in patient.cli("txn", "list").err
            assert str(lost) not in patient.cli("txn", "list", "--group", str(led)).err


@pytest.mark.long
def test_an_adopted_topic_is_looked_at_and_remains_its_owners(patient: Patient, cluster: AnyCluster) -> None:
    topic = f"{patient.scope}.segment-less"  # almost as ours are called
    kafka = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    # A retention and one replica in sync are its owner's business.
    config = {"retention.ms": "3600000", "min.insync.replicas": "1"}
    kafka.create_topics([NewTopic(topic, 2, 1, config=config)])[topic].result(120)
    assert patient.findings() == {}, "it is no orphan"
    with patient.site.connect() as b:
        b.admin.adopt_topic(topic, stream=f"{patient.scope}/all")
        with b.transaction(topic) as transaction:
            transaction.write(topic, key=b"k", value=b"v")
    assert patient.findings() == {}
    patient.site.stop_coordinator()
    with ZooKeeperSession(cluster.zookeeper, root=patient.site.root) as session:
        session.delete(paths.adopted(topic))
    assert patient.findings()["topic-index"]["severity"] == "problem"
    kafka.create_partitions([NewPartitions(topic, 3)])[topic].result(120)
    until(lambda: "partitions-added" in patient.findings())
    assert patient.findings()["partitions-added"]["severity"] == "warning"
    patient.site.start_coordinator()
    until(lambda: patient.findings() == {})
    patient.site.stop_coordinator()
    kafka.delete_topics([topic])[topic].result(120)
    until(lambda: "topic-deleted" in patient.findings())
    until(lambda: topic not in KafkaClient(cluster.bootstrap_servers).topics.list_topics())
    kafka.create_topics([NewTopic(topic, 2, 1)])[topic].result(120)
    until(lambda: "topic-recreated" in patient.findings())
    patient.site.start_coordinator()
    with patient.site.connect() as b:
        b.admin.release_topic(f"{patient.scope}/all")
        b.admin.adopt_topic(topic, stream=f"{patient.scope}/all")
    assert patient.findings() == {}


RARE_SNAPSHOTS = {"CONSTANT_TRANSACTION_BUFFER_SNAPSHOT_MIN_TIME_IN_MILLIS": "3600000"}


@pytest.mark.long
@pytest.mark.parametrize("patient", [RARE_SNAPSHOTS], indirect=True)
def test_what_a_new_leader_needs_is_looked_at(
    patient: Patient, cluster: AnyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots and outcomes: as they should be, damaged, without compaction, lagging, and gone."""
    stream, group = StreamName(patient.scope, "orders"), GroupName(patient.scope)
    indexes = snapshot_indexes_topic(patient.scope)
    topics = KafkaClient(cluster.bootstrap_servers).topics
    with patient.site.connect() as b:
        b.admin.create_stream(str(stream))
        for _ in range(2):
            with b.transaction(str(stream)) as transaction:
                transaction.write(str(stream), key=b"k", value=b"v")
            until(lambda: indexes in topics.topic_ids([indexes]))  # the first is taken at once
    monkeypatch.setattr("rollbridge.doctor.checks.LATE", timedelta(0))
    assert patient.findings() == {}, "the leader says that its snapshots take an hour"
    # When nobody leads any more, nothing is put right, and the defaults are what is expected.
    patient.site.stop_coordinator()
    monkeypatch.setattr("rollbridge.doctor.checks.DEFAULTS", Coordinator(1_000, 0))
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers})
    producer.produce(group.terminated_topic, b"no record", b"somebody")
    producer.flush()
    producer.produce(indexes, b"no snapshot", index_keys((stream.buffer_topic(), 0))[0])
    producer.flush()
    topics.set_topic_config(indexes, {"cleanup.policy": "delete"})
    expected = {"outcomes-damaged", "compaction", "snapshot-damaged", "snapshot-lag"}
    until(lambda: expected <= patient.findings().keys())
    found = patient.findings()
    assert "client somebody" in found["outcomes-damaged"]["what"]
    assert "it ends at offset" in found["snapshot-lag"]["what"]
    assert f"--entity-name {indexes}" in found["compaction"]["remedy"]
    topics.delete_topics([group.terminated_topic])
    until(lambda: "outcomes-gone" in patient.findings())


@pytest.mark.long
def test_a_native_transaction_that_is_open_is_seen(
    patient: Patient, cluster: AnyCluster, unique_name: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = f"{patient.scope}/orders"
    with patient.site.connect() as b:
        b.admin.create_stream(stream)
        [segment] = b.admin.history(stream).segments()
    topic = StreamName.parse(stream).segment_topic(segment)
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "transactional.id": unique_name("open")})
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce(topic, b"held")
    producer.flush()
    monkeypatch.setattr("rollbridge.doctor.checks.SLOW", timedelta(0))
    assert f"on {topic} since offset 0" in patient.findings()["long-transaction"]["what"]
    producer.abort_transaction()
    until(lambda: "long-transaction" not in patient.findings())


@pytest.mark.long
def test_nobody_to_lead_and_a_zookeeper_that_was_wiped(
    patient: Patient, cluster: AnyCluster, unique_name: Callable[[str], str]
) -> None:
    with patient.site.connect() as b:
        b.admin.create_stream(f"{patient.scope}/orders")
    patient.site.stop_coordinator()
    answer = patient.cli("doctor")
    assert (answer.code, "no-coordinator" in answer.out) == (ExitCode.FINDINGS, True)
    wiped = f"/{unique_name('wiped')}"
    answer = Cli(cluster, wiped)("doctor")
    assert (answer.code, "PROBLEM zookeeper-empty" in answer.out) == (ExitCode.FINDINGS, True)
    assert "restore ZooKeeper" in answer.out


@pytest.mark.long
def test_a_wiped_zookeeper_is_not_begun_anew_over_old_data(
    patient: Patient, cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    """Ids of transactions would be given out a second time."""
    stream = f"{patient.scope}/orders"
    with patient.site.connect() as b:
        b.admin.create_stream(stream)
        with b.transaction(stream) as transaction:
            transaction.write(stream, key=b"k", value=b"v")
    options = rollbridge.ClientOptions(admin_timeout_s=3)
    (tmp_path / "wiped").mkdir()
    with Site(cluster, f"/{unique_name('wiped')}", tmp_path / "wiped") as wiped, wiped.connect(options=options) as b:
        with pytest.raises(CoordinatorUnavailableError):
            b.admin.create_stream(stream)
        log = tmp_path / "wiped" / "coordinator-1.log"
        until(lambda: "Restore ZooKeeper from a backup" in log.read_text())
    assert [message.value() for message in patient.site.committed(stream)] == [b"v"]


@pytest.mark.long
def test_a_native_transaction_whose_marker_was_lost_is_said_to_hang(
    unique_name: Callable[[str], str], scope: str, tmp_path: Path
) -> None:
    """An unclean election leaves one; here a broker takes a record of a transaction that no coordinator has begun."""
    settings = {"transaction.partition.verification.enable": "false"}
    stream, root = StreamName(scope, "orders"), f"/{unique_name('patient')}"
    with new_cluster(kafka_settings=settings) as own, Site(own, root, tmp_path) as site, site.connect() as client:
        client.admin.create_stream(str(stream))
        place = stream.segment_topic(SegmentId.of(0, 0)), 0
        name = unique_name("lost")
        with Cluster(own.bootstrap_servers) as cluster:
            coordination = Coordination(cluster, name, transaction_timeout_ms=60_000, retry_timeout_s=60)
            producer = coordination.take_over()
            builder = BatchBuilder(1 << 10)
            builder.append(int(time.time() * 1000) - 120_000, b"k", b"v")
            batch = builder.build()
            header = stamped_header(
                batch,
                producer_id=producer.producer_id,
                producer_epoch=producer.epoch,
                base_sequence=0,
                transactional=True,
            )
            connection = cluster.connection(cluster.leader(*place))
            body = produce_body(request_start(name, 5_000), [(place, header, batch)])
            connection.send_body(PRODUCE_KEY, OLD_PRODUCE, body)
            [answer] = connection.receive(ProduceResponse).responses
            assert answer.partition_responses[0].error_code is ErrorCode.none
        findings = Patient(site, scope, Cli(own, root)).findings()
        assert "no coordinator names it as under way" in findings["hanging-transaction"]["what"]
