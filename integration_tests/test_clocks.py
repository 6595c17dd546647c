"""Clocks that differ between the terms of a group: nothing is deleted, and no lease ends, by a clock that is ahead."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site, until
from rollbridge.base.ids import SegmentId
from rollbridge.config import load_settings
from rollbridge.doctor.checks import find
from rollbridge.doctor.facts import gather
from rollbridge.kafka.client import KafkaClient
from rollbridge.metadata import paths
from rollbridge.metadata.records import RetentionMarks
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.names import GroupName, StreamName

DAY_S = 86_400
RECORDS = 100


def test_a_leader_whose_clock_is_a_day_ahead_deletes_nothing_that_is_young(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    stream, root, late = StreamName(unique_name("ahead"), "s"), f"/{unique_name('ahead')}", unique_name("clocked")
    kafka = KafkaClient(cluster.bootstrap_servers)
    with (
        Site(cluster, root, tmp_path, CONSTANT_RETENTION_CHECK_MS="100") as site,
        site.connect("tester", rollbridge.ClientOptions(admin_timeout_s=120)) as b,
        cluster.clocked_coordinator(root, late, tmp_path) as clock,
    ):
        b.admin.create_stream(str(stream))
        with b.transaction(str(stream)) as transaction:
            for number in range(RECORDS):
                transaction.write(str(stream), key=b"k", value=b"%d" % number)
        long = b.begin(str(stream), timeout=timedelta(hours=1))
        long.write(str(stream), key=b"k", value=b"long")
        long.flush()
        b.admin.update_stream(str(stream), retention_time=timedelta(hours=1))
        with ZooKeeperSession(cluster.zookeeper, root=root) as session:
            until(lambda: (node := session.get(paths.retention(stream))) and RetentionMarks.from_json(node.value).marks)
            clock.set(DAY_S)
            site.stop_coordinator()
            leads = paths.leader(GroupName(stream.scope))
            until(lambda: (node := session.get(leads)) and node.value == late.encode())
            session.delete(leads)  # it may have led before its clock was set; what the doctor sees is a takeover
        until(lambda: "clocks.differ " in (tmp_path / f"{late}.log").read_text() or _start(kafka, stream))
        assert _start(kafka, stream) == 0, "what is minutes old was deleted with an hour of retention"
        assert long.commit().position, "a lease of an hour has ended within minutes"
        settings = load_settings(environ=site.environment())
        until(lambda: "clock" in [item.check for item in find(gather(settings, KafkaClient.of(settings)))])


def _start(kafka: KafkaClient, stream: StreamName) -> int:
    topic = stream.segment_topic(SegmentId.of(0, 0))
    return kafka.offsets.first([topic])[topic]
