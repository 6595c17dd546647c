"""Logs that lose their end, as where a topic has one replica and the power fails: nobody goes on as if nothing were."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from bridge import EMPTY, SN
from bridge.errors import CasWriteError, TransactionRefused, TruncatedError
from bridge.model.identifiers import SegmentId
from bridge.model.names import GroupName, StreamName
from bridge.spark import source, transactions
from bridge.spark.columns import schema_of
from bridge.spark.offsets import LogOffset, StreamOffset
from integration_tests.backends.choice import demand, new_cluster
from integration_tests.backends.interface import Ability, AnyCluster
from integration_tests.clients import Site
from integration_tests.patience import PATIENCE_S
from integration_tests.spark_tools import options_of

pytestmark = pytest.mark.long
EVERYTHING = ReadAllAvailable()
STREAM = "shorter/orders"
SEGMENT = SegmentId.of(0, 0)
TOPIC = StreamName.parse(STREAM).segment_topic(SEGMENT)
GROUP = GroupName("shorter")


@pytest.fixture
def cluster() -> Iterator[AnyCluster]:
    """A broker of its own: what it loses is nobody else's."""
    with new_cluster() as own:
        demand(own, [Ability.LOG_CUT])
        yield own


@pytest.fixture
def site(cluster: AnyCluster, tmp_path: Path) -> Iterator[Site]:
    with Site(cluster, "/shorter", tmp_path) as site:
        yield site


def offset_of(found: dict[str, Any]) -> int:
    """How far a query has read the only segment."""
    return dict(StreamOffset.of_json(found).position.offsets)[SEGMENT]


def write(site: Site, count: int) -> None:
    """Each in a batch of its own."""
    with site.connect() as client, client.writer(STREAM) as writer:
        for number in range(count):
            writer.write(b"k", b"%d" % number)
            writer.flush()


def reader_of(site: Site, **options: str) -> source.StreamReader:
    """What the driver of a query holds."""
    wanted = {**options_of(site, STREAM), "startingoffsets": "earliest", **options}
    return source.stream_reader(wanted, schema_of(()))


@pytest.mark.parametrize("fail", [True, False])
def test_a_query_notices_that_a_segment_has_become_shorter(site: Site, cluster: AnyCluster, fail: bool) -> None:
    with site.connect() as client:
        client.admin.create_stream(STREAM)
    write(site, 10)
    query, rerun = (reader_of(site, failondataloss=str(fail).lower()) for _ in range(2))
    begin = query.initialOffset()
    end = query.latestOffset(begin, EVERYTHING)
    assert offset_of(end) == 10
    cluster.cut_log(TOPIC, 6)
    if fail:
        with pytest.raises(TruncatedError, match="ends at 6, and was read or to be read up to 10; nothing was read"):
            query.latestOffset(end, EVERYTHING)
        with pytest.raises(TruncatedError, match="ends at 6, and was read or to be read up to 10; nothing was read"):
            rerun.partitions(begin, end)  # what an earlier run of the query has planned
    else:
        assert len(rerun.partitions(begin, end)) == 1
        left = query.latestOffset(end, EVERYTHING)
        assert offset_of(left) == 6
        write(site, 3)
        assert offset_of(query.latestOffset(left, EVERYTHING)) == 9
    query.stop()
    rerun.stop()


@pytest.mark.parametrize("fail", [True, False])
def test_a_query_notices_that_the_commit_log_has_become_shorter(site: Site, cluster: AnyCluster, fail: bool) -> None:
    with site.connect() as client:
        client.admin.create_stream(STREAM)
        for number in range(3):
            with client.transaction(STREAM) as transaction:
                transaction.write(STREAM, key=b"k", value=b"%d" % number)
    site.stop_coordinator()
    options = {**options_of(site, STREAM), "startingoffsets": "earliest", "failondataloss": str(fail).lower()}
    query = transactions.stream_reader(options, transactions.schema(options))
    begin = query.initialOffset()
    end = query.latestOffset(begin, EVERYTHING)
    cluster.cut_log(GROUP.commit_log_topic, LogOffset.of_json(end).position.offset - 2)
    if fail:
        with pytest.raises(TruncatedError, match="has become shorter"):
            query.latestOffset(end, EVERYTHING)
        with pytest.raises(TruncatedError, match="has become shorter"):
            query.partitions(begin, end)
    else:
        left = LogOffset.of_json(query.latestOffset(end, EVERYTHING))
        assert left.position.offset < LogOffset.of_json(end).position.offset
        assert len(query.partitions(begin, end)) == 1
    query.stop()


@pytest.mark.parametrize("within", ["segment", "key"])
def test_a_condition_on_a_record_that_a_log_has_lost_does_not_hold(
    site: Site, cluster: AnyCluster, within: str
) -> None:
    """Unless the log has grown again beyond what was known of it: an SN names a place, not what stands there."""
    with site.connect() as client:
        client.admin.create_stream(STREAM)

        def write_if(known: SN) -> None:
            transaction = client.begin(STREAM)
            transaction.expect(STREAM, key=b"k", sn=known, scope=within)
            transaction.write(STREAM, key=b"k", value=b"if")
            transaction.commit()

        with client.cas_writer(STREAM) as idle:
            first = idle.write(b"k", b"first", expected=EMPTY, scope=within)
            places = [first]
            for number in range(5):
                places.append(idle.write(b"k", b"lost %d" % number, expected=places[-1], scope=within))
            with pytest.raises(TransactionRefused):
                write_if(first)  # from here on the leader knows the end, too
            assert places[1].dlsn is not None
            cluster.cut_log(TOPIC, places[1].dlsn.offset)
            with pytest.raises(CasWriteError):
                idle.write(b"k", b"over it", expected=places[-1], scope=within)
            with pytest.raises(TransactionRefused):
                write_if(places[-1])
            idle.write(b"k", b"second", expected=first, scope=within)
        with client.reader(STREAM, follow=False) as reader:
            assert [record.value for record in reader] == [b"first", b"second"]


def test_a_plain_writer_goes_on_behind_the_end_of_a_log_that_has_become_shorter(
    site: Site, cluster: AnyCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bridge.writer.dispatch")
    with site.connect() as client:
        client.admin.create_stream(STREAM)
        with client.writer(STREAM) as writer:
            for number in range(10):
                writer.write(b"k", b"%d" % number).result(PATIENCE_S)
            cluster.cut_log(TOPIC, 5)
            later = [writer.write(b"k", b"later %d" % number) for number in range(3)]
            places = [future.result(PATIENCE_S).dlsn for future in later]
    assert [place and place.offset for place in places] == [5, 6, 7]
    assert 1 <= sum("OUT_OF_ORDER" in line for line in caplog.messages) <= 10, "it was sent again and again"
