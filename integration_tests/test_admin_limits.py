"""Admin requests that Kafka refuses, whose clients are gone, or that are about more than ZooKeeper takes at once."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site, until
from integration_tests.coordinators import controller_epoch
from rollbridge.base.ids import Epoch, SegmentId
from rollbridge.errors import InvalidRequestError, StreamNotFoundError
from rollbridge.metadata import paths
from rollbridge.metadata.records import CreateNode
from rollbridge.metadata.requests import AdminRequest, RequestKind
from rollbridge.metadata.store import Metadata
from rollbridge.stream.config import StreamState
from rollbridge.stream.epochs import EpochCause, EpochRecord
from rollbridge.stream.keyspace import even_ranges
from rollbridge.stream.names import GroupName, StreamName
from rollbridge.stream.segment_graph import Segment

EPOCHS = 9_000
ASKER = """
import sys, rollbridge
from rollbridge.errors import InvalidRequestError
b = rollbridge.connect(sys.argv[1], zookeeper=sys.argv[2], zookeeper_root=sys.argv[3])
print("asks", flush=True)
while True:
    try:
        b.admin.create_stream(sys.argv[4], replication_factor=5)
    except InvalidRequestError:
        pass
"""


def test_what_kafka_refuses_is_answered_and_stops_nobody(site: Site, client: rollbridge.Bridge, scope: str) -> None:
    client.admin.create_stream(f"{scope}/orders")
    before = controller_epoch(client._metadata.session, GroupName(scope))
    with pytest.raises(InvalidRequestError, match=r"(?i)replication.factor"):
        client.admin.create_stream(f"{scope}/refused", replication_factor=5, segments=3, timeout_s=60)
    with pytest.raises(StreamNotFoundError):
        client.admin.describe(f"{scope}/refused")
    # The same from a process that is killed as soon as it has asked.
    asker = subprocess.Popen(
        [
            sys.executable,
            "-c",
            ASKER,
            site.cluster.bootstrap_servers,
            site.cluster.zookeeper,
            site.root,
            f"{scope}/refused",
        ],
        stdout=subprocess.PIPE,
    )
    assert asker.stdout is not None
    asker.stdout.readline()
    for number in range(20):
        with client.transaction(f"{scope}/orders") as transaction:
            transaction.write(f"{scope}/orders", key=b"k", value=b"%d" % number)
    asker.kill()
    asker.wait()
    asker.stdout.close()
    client.admin.create_stream(f"{scope}/payments", segments=2)
    until(lambda: not client._metadata.session.children(paths.requests(GroupName(scope))))
    assert controller_epoch(client._metadata.session, GroupName(scope)) == before, "the lead has changed"
    client.admin.create_stream(f"{scope}/refused", segments=3)


def test_a_request_goes_with_the_process_that_asked(client: rollbridge.Bridge, scope: str) -> None:
    client._metadata.ensure_group(GroupName(scope), 1)
    request = AdminRequest(kind=RequestKind.CREATE_STREAM, stream=f"{scope}/orders", created_ms=1)
    name = client._metadata.put_request(GroupName(scope), request)
    found = client._metadata.session.exists(f"{paths.requests(GroupName(scope))}/{name}")
    assert found is not None
    assert found.owner_session_id == client._metadata.session.session_id


def test_a_stream_with_thousands_of_epochs_is_deleted(site: Site, client: rollbridge.Bridge, scope: str) -> None:
    client.admin.create_stream(f"{scope}/orders")
    client.admin.create_stream(f"{scope}/old")
    name = StreamName.parse(f"{scope}/old")
    grow(client._metadata, name)
    before = controller_epoch(client._metadata.session, GroupName(scope))
    client.admin.delete_stream(f"{scope}/old", timeout_s=300)
    assert client._metadata.session.exists(paths.stream(name)) is None
    with client.transaction(f"{scope}/orders") as transaction:
        transaction.write(f"{scope}/orders", key=b"k", value=b"goes on")
    has_led_on = controller_epoch(client._metadata.session, GroupName(scope)) == before
    assert has_led_on or site.lost_its_session(), f"the lead has changed: {site.said()[-6_000:]}"


def test_a_deletion_that_was_begun_is_answered_by_who_ends_it(
    cluster: AnyCluster, unique_name: Callable[[str], str], scope: str, tmp_path: Path
) -> None:
    name = StreamName.parse(f"{scope}/orders")
    answer = f"{paths.answers(GroupName(scope))}/request-0000009999"
    with Site(cluster, f"/{unique_name('limits')}", tmp_path) as site, site.connect() as client:
        client.admin.create_stream(str(name))
        config = client._metadata.stream(name)
        assert config is not None
        site.stop_coordinator()
        # As a leader leaves it that dies after the mark; the next one finds it so.
        marked = replace(config, state=StreamState.DELETING, deletion_requests=("request-0000009999",))
        client._metadata.session.set(paths.stream(name), marked.to_json())
        site.start_coordinator()
        until(lambda: client._metadata.session.exists(answer) is not None)
        node = client._metadata.session.get(answer)
        assert node is not None
        assert b'"ok": true' in node.value
        assert client._metadata.stream(name) is None


def grow(metadata: Metadata, name: StreamName) -> None:
    """Give a stream so many epochs as if it had been scaled all the time; topics but the first have gone."""
    segment = SegmentId.of(0, 0)
    batches = []
    for epoch in range(1, EPOCHS):
        fresh = SegmentId.of(epoch, epoch)
        record = EpochRecord(
            epoch=Epoch(epoch),
            reference_epoch=Epoch(epoch),
            segments=(Segment(fresh, even_ranges(1)[0]),),
            cause=EpochCause.SCALE,
            created_ms=int(time.time() * 1000),
            sealed_ends={segment: 0},
        )
        batches.append([CreateNode(paths.epoch(name, epoch), record.to_json())])
        segment = fresh
    assert not [fault for fault in metadata.session.multi_pipelined(batches) if fault is not None]
