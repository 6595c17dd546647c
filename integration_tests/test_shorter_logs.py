"""Logs that lose their end, as where a topic has one replica and the power fails: nobody goes on as if nothing were."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from integration_tests.backends.choice import demand, new_cluster
from integration_tests.backends.interface import Ability, AnyCluster
from integration_tests.clients import Site
from integration_tests.patience import PATIENCE_S, eventually
from integration_tests.spark_tools import options_of
from rollbridge import EMPTY, SN
from rollbridge.base.deadlines import Deadline
from rollbridge.base.ids import SegmentId
from rollbridge.errors import CasWriteError, TransactionRefusedError, TruncatedError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.fetch import FETCH_BYTES, LogDivergedError
from rollbridge.kafka.metadata import Cluster, Isolation
from rollbridge.kafka.records import FetchedBatches
from rollbridge.kafka.segment_tail import SegmentTail, ask
from rollbridge.spark import source, transactions
from rollbridge.spark.planning import LogOffset, StreamOffset
from rollbridge.spark.settings import schema_of
from rollbridge.stream.conditions import Condition, Scope
from rollbridge.stream.keyspace import KeySpace
from rollbridge.stream.names import GroupName, SegmentPlaces, StreamName
from rollbridge.stream.reading import KeyLineage
from rollbridge.writer.sender import OwnBatches
from rollbridge_coordinator.core import frame_reader
from rollbridge_coordinator.core.condition_reader import ConditionReader
from rollbridge_coordinator.core.effects import Found, Query

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
    return source.StreamReader(wanted, schema_of(()))


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
    query = transactions.TransactionsStreamReader(options, transactions.schema(options))
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
            with pytest.raises(TransactionRefusedError):
                write_if(first)  # from here on the leader knows the end, too
            assert places[1].dlsn is not None
            cluster.cut_log(TOPIC, places[1].dlsn.offset)
            with pytest.raises(CasWriteError):
                idle.write(b"k", b"over it", expected=places[-1], scope=within)
            with pytest.raises(TransactionRefusedError):
                write_if(places[-1])
            idle.write(b"k", b"second", expected=first, scope=within)
        with client.reader(STREAM, follow=False) as reader:
            assert [record.value for record in reader] == [b"first", b"second"]


def grow(site: Site, records: Sequence[tuple[bytes, bytes]]) -> None:
    """Write as somebody who knows nothing of what was there before, each record in a batch of its own."""
    with site.connect() as client, client.writer(STREAM) as writer:
        for key, value in records:
            writer.write(key, value).result(PATIENCE_S)


@pytest.mark.parametrize("end", [16, 30], ids=["just as far", "farther"])
def test_what_was_known_of_a_log_that_has_lost_its_end_and_grown_again_is_forgotten(
    site: Site, cluster: AnyCluster, end: int
) -> None:
    """Leader epochs tell it: nobody else has written under that which is known."""
    with site.connect() as client, ExitStack() as stack:
        client.admin.create_stream(STREAM)
        idle = stack.enter_context(client.cas_writer(STREAM))

        def write_if(known: SN) -> None:
            """It is refused."""
            transaction = client.begin(STREAM)
            transaction.expect(STREAM, key=b"k", sn=known, scope="key")
            transaction.write(STREAM, key=b"k", value=b"if")
            with pytest.raises(TransactionRefusedError):
                transaction.commit()

        first = idle.write(b"k", b"first", expected=EMPTY, scope="key")
        grow(site, [(b"other", b"lost")] * 10)
        write_if(EMPTY)  # from here on the leader knows the log, too
        for _ in range(2):  # the second one is refused without an append, by what is known then
            with pytest.raises(CasWriteError):
                idle.write(b"k", b"no", expected=EMPTY, scope="key")
        assert idle.tail(b"k", scope="key") == first
        assert idle.tail() != first
        kafka = KafkaClient(cluster.bootstrap_servers)
        log = kafka.offsets
        assert log.end([TOPIC], Isolation.READ_UNCOMMITTED) == {TOPIC: 16}, "so far they know it"
        cluster.cut_log(TOPIC, 4)
        grow(site, [(b"k", b"theirs"), *[(b"other", b"new")] * (end - 5)])
        assert log.end([TOPIC], Isolation.READ_UNCOMMITTED) == {TOPIC: end}
        kafka.close()
        theirs = idle.tail(b"k", scope="key")
        assert theirs.dlsn is not None
        assert theirs.dlsn.offset == 4
        with pytest.raises(CasWriteError) as refused:
            idle.write(b"k", b"over it", expected=first, scope="key")
        assert refused.value.actual == theirs
        write_if(first)
        idle.write(b"k", b"second", expected=theirs, scope="key")
        with client.reader(STREAM, follow=False) as reader:
            values = [record.value for record in reader if record.key == b"k"]
        assert values == [b"first", b"theirs", b"second"]


def test_a_leader_forgets_what_a_log_has_lost_although_it_is_as_long_again(site: Site, cluster: AnyCluster) -> None:
    """One whose term goes on: with several brokers, the one that has lost records need not be in its way."""
    with site.connect() as client:
        client.admin.create_stream(STREAM)
        with client.cas_writer(STREAM) as writer:
            first = writer.write(b"k", b"first", expected=EMPTY, scope="key")
        lineage = KeyLineage(client.admin.history(STREAM), KeySpace().position(b"k"))
    grow(site, [(b"other", b"lost")] * 10)
    log = KafkaClient(cluster.bootstrap_servers).log()
    outlook = ConditionReader(log)
    condition = Condition(first, Scope.KEY, b"k")
    query = Query(SegmentPlaces(StreamName.parse(STREAM)), lineage, condition, since=None, end=None, own=())
    assert outlook.look([query]) == [Found(first, 12)]
    cluster.cut_log(TOPIC, 4)
    grow(site, [(b"k", b"theirs"), *[(b"other", b"new")] * 7])
    [found] = outlook.look([query])
    assert isinstance(found, Found)
    assert (found.last.sequence_id, found.end) == (4, 12)
    log.close()


def later() -> Deadline:
    return Deadline(PATIENCE_S)


def test_what_is_read_for_something_else_confirms_nothing_that_is_known(site: Site, cluster: AnyCluster) -> None:
    """As where a lost answer is looked up in the log, under the leader epoch of those who have written since."""
    with site.connect() as client:
        client.admin.create_stream(STREAM)
    grow(site, [(b"k", b"lost")] * 12)
    with KafkaClient(cluster.bootstrap_servers) as kafka:
        reader, log = kafka.log(), SegmentTail((TOPIC, 0), SEGMENT, 0)
        lost = ask(log.last_of(b"k", 0, 12), reader, later())
        assert lost is not None
        assert lost.sequence_id == 11
        cluster.cut_log(TOPIC, 4)
        grow(site, [(b"k", b"theirs"), *[(b"other", b"new")] * 7])
        assert len(list(log.records(reader, 10, 12, later()))) == 2
        ask(log.confirm(12), reader, later())
        theirs = ask(log.last_of(b"k", 0, 12), reader, later())
    assert theirs is not None
    assert theirs.sequence_id == 4


def test_what_others_append_under_later_leaders_is_read_on_from_what_is_known(site: Site, cluster: AnyCluster) -> None:
    """Also where it takes several answers: each is compared with the one before."""
    with site.connect() as client:
        client.admin.create_stream(STREAM)
    grow(site, [(b"k", b"known")] * 3)
    with KafkaClient(cluster.bootstrap_servers) as kafka:
        reader, log = kafka.log(), SegmentTail((TOPIC, 0), SEGMENT, 0)
        ask(log.last_of(b"k", 0, 3), reader, later())
        epoch = log.epoch
        cluster.cut_log(TOPIC, 3)  # it loses nothing, and has another leader epoch from here on
        grow(site, [(b"other", bytes(FETCH_BYTES // 2))] * 5)
        assert len(list(log.records(reader, 3, 8, later(), epoch))) == 5
        assert log.read_epoch > epoch
        known = ask(log.last_of(b"k", 0, 8), reader, later())
    assert log.met == 8, "what was known was forgotten, and read again"
    assert known is not None
    assert known.sequence_id == 2


def test_who_follows_a_log_notices_that_it_has_lost_its_end_and_grown_again(site: Site, cluster: AnyCluster) -> None:
    with site.connect() as client:
        client.admin.create_stream(STREAM)
    grow(site, [(b"k", b"%d" % number) for number in range(6)])
    with closing(frame_reader.Tail(KafkaClient(cluster.bootstrap_servers))) as follower:
        follower.assign({(TOPIC, 0): 0})
        found: list[int] = []

        def refused() -> bool:
            try:
                found.extend(message.offset for message in follower.poll(0.1))
            except LogDivergedError:
                return True
            return False

        eventually(lambda: refused() or len(found) == 6, "all is read")
        assert follower.ends() == {(TOPIC, 0): 6}
        cluster.cut_log(TOPIC, 3)
        grow(site, [(b"k", b"other")] * 9)
        eventually(refused, "it is said that the log has lost what was handed out")
    assert found == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("grown", [1, 9])
def test_a_reader_notices_that_a_log_has_lost_what_was_handed_out(site: Site, cluster: AnyCluster, grown: int) -> None:
    """However long the log is by then; and who begins anew is given what is there."""
    with site.connect() as client:
        client.admin.create_stream(STREAM)
    grow(site, [(b"k", b"%d" % number) for number in range(6)])
    with site.connect() as client, client.reader(STREAM) as reader:
        found: list[bytes | None] = []

        def refused() -> bool:
            try:
                found.extend(record.value for record in reader.consume(100, 0.1))
            except LogDivergedError:
                return True
            return False

        eventually(lambda: refused() or len(found) == 6, "all is read")
        cluster.cut_log(TOPIC, 3)
        grow(site, [(b"k", b"other")] * grown)
        eventually(refused, "it is said that the log has lost what was handed out")
        assert found == [b"%d" % number for number in range(6)]
        with client.reader(STREAM, follow=False) as other:
            assert [record.value for record in other] == [b"0", b"1", b"2", *[b"other"] * grown]


def test_who_goes_on_for_another_notices_that_a_log_has_lost_what_that_one_had_read(
    site: Site, cluster: AnyCluster
) -> None:
    """As a leader goes on from where its standby had read to."""
    partition = (TOPIC, 0)
    with site.connect() as client:
        client.admin.create_stream(STREAM)
    grow(site, [(b"k", b"%d" % number) for number in range(6)])
    with closing(frame_reader.Tail(KafkaClient(cluster.bootstrap_servers))) as standby:
        standby.assign({partition: 0})
        read: list[int] = []

        def has_read() -> bool:
            read.extend(message.offset for message in standby.poll(0.1))
            return read == [0, 1, 2, 3, 4, 5]

        eventually(has_read, "all is read")
        known = dict(standby.epochs)
    cluster.cut_log(TOPIC, 3)
    grow(site, [(b"k", b"other")] * 9)
    with closing(frame_reader.Tail(KafkaClient(cluster.bootstrap_servers))) as leader:
        leader.assign({partition: 6}, known)
        with pytest.raises(LogDivergedError):
            eventually(lambda: list(leader.poll(0.1)), "something is handed out, or refused")


def concatenate(state: bytes, update: bytes) -> bytes:
    return state + update


@pytest.mark.parametrize("end", [4, 10, 30], ids=["shorter", "just as far", "farther"])
def test_a_synchronizer_takes_back_what_a_log_has_lost(site: Site, cluster: AnyCluster, end: int) -> None:
    with site.connect() as client, ExitStack() as stack:
        client.admin.create_stream(STREAM)
        one = stack.enter_context(client.synchronizer(STREAM, b"k", b"", concatenate))
        for digit in (b"0", b"1", b"2", b"3"):
            one.update_unconditionally([digit])
        assert one.fetch() == b"0123"
        cluster.cut_log(TOPIC, 4)
        grow(site, [(b"other", b"new")] * (end - 4))
        assert one.fetch() == b"0"
        one.update(lambda state: [b"+" + state])
        another = stack.enter_context(client.synchronizer(STREAM, b"k", b"", concatenate))
        assert another.state == one.fetch() == b"0+0"


def test_a_synchronizer_of_nothing_yet_finds_a_state_that_was_begun_below_where_it_has_looked(
    site: Site, cluster: AnyCluster
) -> None:
    with site.connect() as client, ExitStack() as stack:
        client.admin.create_stream(STREAM)
        grow(site, [(b"other", b"lost")] * 9)
        one = stack.enter_context(client.synchronizer(STREAM, b"k", b"", concatenate))
        cluster.cut_log(TOPIC, 4)
        with site.connect() as elsewhere, elsewhere.synchronizer(STREAM, b"k", b"", concatenate) as another:
            for digit in (b"0", b"1", b"2", b"3"):
                another.update_unconditionally([digit])
        assert one.fetch() == b"0123"


def test_a_plain_writer_goes_on_behind_the_end_of_a_log_that_has_become_shorter(
    site: Site, cluster: AnyCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rollbridge.kafka.dispatch")
    with site.connect() as client:
        client.admin.create_stream(STREAM)
        with client.writer(STREAM) as writer:
            for number in range(10):
                writer.write(b"k", b"%d" % number).result(PATIENCE_S)
            cluster.cut_log(TOPIC, 5)
            places = [writer.write(b"k", b"later %d" % number).result(PATIENCE_S).dlsn for number in range(3)]
    assert [place and place.offset for place in places] == [5, 6, 7]
    assert 1 <= sum("OUT_OF_ORDER" in line for line in caplog.messages) <= 10, "it was sent again and again"
    with Cluster(cluster.bootstrap_servers) as brokers:
        raw = KafkaClient(cluster.bootstrap_servers).log().fetch_raw(TOPIC, 5).batches
        headers = (header for header, _ in FetchedBatches(raw))
        (producer,) = {(header.producer_id, header.producer_epoch) for header in headers}
        # It knew the log up to offset 6 under the first leader epoch, which has ended at 5.
        look = OwnBatches((TOPIC, 0), 7, 8, producer, epoch=0)
        while not look.read_on(brokers):
            pass
    assert sorted(look.found.values()) == [5, 6, 7], "what is looked for may stand where the log was cut off"
