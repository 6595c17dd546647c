"""Truncation on real topics: of buffers, and of streams by position, time and retention, and those who read them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site, consumer_of, read_and_commit, truncate_all
from integration_tests.kafka_tools import produce
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.base.deadlines import Deadline
from rollbridge.base.ids import SegmentId
from rollbridge.base.sn import ANY, DLSN, EMPTY, SN
from rollbridge.buffer.frames import PieceKey
from rollbridge.buffer.state import FrameRef
from rollbridge.consumer import group as membership
from rollbridge.errors import (
    CasOutcomeUnknownError,
    CasWriteError,
    ConflictError,
    CorruptDataError,
    InvalidRequestError,
    KafkaUnavailableError,
    StreamNotFoundError,
    TransactionRefusedError,
    TruncatedError,
    UnavailableError,
)
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.segment_tail import LineageTails, ask
from rollbridge.kafka.topics import TopicSpec
from rollbridge.stream.names import SegmentPlaces, StreamName
from rollbridge.stream.positions import ReadPosition
from rollbridge.stream.reading import KeyLineage
from rollbridge_coordinator.core.frame_reader import FrameReader

SETTINGS = {
    "CONSTANT_TRUNCATE_BUFFERS_MS": "100",
    "CONSTANT_RETENTION_CHECK_MS": "100",
}


@pytest.fixture(scope="module")
def site(cluster: AnyCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A rollbridge whose coordinator does its housekeeping all the time."""
    root = f"/truncation-{time.monotonic_ns()}"
    with Site(cluster, root, tmp_path_factory.mktemp("coordinators"), **SETTINGS) as site:
        yield site


@pytest.fixture(scope="module")
def kafka(cluster: AnyCluster) -> KafkaClient:
    return KafkaClient(cluster.bootstrap_servers)


def write(client: rollbridge.Bridge, stream: str, values: list[bytes], key: bytes = b"k") -> None:
    writer = client.writer(stream)
    for value in values:
        writer.write(key, value)
    writer.flush()


def values(client: rollbridge.Bridge, stream: str, start: str | ReadPosition = "earliest") -> list[bytes | None]:
    with client.reader(stream, start=start, follow=False) as reader:
        return [record.value for record in reader]


def topic(stream: str, number: int, epoch: int) -> str:
    return StreamName.parse(stream).segment_topic(SegmentId.of(number, epoch))


def grown(client: rollbridge.Bridge, stream: str) -> None:
    """Segments 0, then 1, then 2, one after the other, with three records each."""
    write(client, stream, [b"0", b"1", b"2"])
    for number in (0, 1):
        client.admin.scale(stream, seal=[number], ranges=[(0.0, 1.0)])
        write(client, stream, [b"%d" % (3 * number + value) for value in (3, 4, 5)])


def test_a_buffer_is_truncated_up_to_what_is_open_and_a_new_leader_goes_on_there(
    site: Site, client: rollbridge.Bridge, ledger: str, kafka: KafkaClient
) -> None:
    buffer = StreamName.parse(ledger).buffer_topic()

    def start() -> int:
        return kafka.offsets.first([buffer])[buffer]

    for number in range(5):
        with client.transaction(ledger) as txn:
            txn.write(ledger, key=b"k", value=b"%d" % number)
    eventually(lambda: start() == kafka.offsets.end([buffer])[buffer], "an idle buffer is empty")
    settled = start()
    assert settled > 0
    still_open = client.begin(ledger)
    still_open.write(ledger, key=b"k", value=b"kept")
    still_open.flush()
    for number in range(5, 8):
        with client.transaction(ledger) as txn:
            txn.write(ledger, key=b"k", value=b"%d" % number)
    with client.reader(ledger, isolation="read_uncommitted", follow=False) as reader:
        assert [record.value for record in reader if not record.committed] == [b"kept"]
    site.stop_coordinator()
    site.start_coordinator()
    with client.transaction(ledger) as txn:
        txn.write(ledger, key=b"k", value=b"8")
    assert start() == settled, "what is open is kept, whatever comes after it"
    still_open.commit()
    assert values(client, ledger) == [*(b"%d" % number for number in range(9)), b"kept"]
    eventually(lambda: start() == kafka.offsets.end([buffer])[buffer], "it is truncated once nothing is open")


def test_a_stream_is_truncated_along_the_lineage_of_its_keys(
    client: rollbridge.Bridge, ledger: str, kafka: KafkaClient
) -> None:
    grown(client, ledger)
    with client.reader(ledger, follow=False) as reader:
        read = [record for _, record in zip(range(4), reader, strict=False)]
        position = reader.position
    before = [record.dlsn for record in read]
    begin = client.admin.truncate(ledger, str(position))
    assert begin == position
    assert values(client, ledger) == [b"4", b"5", b"6", b"7", b"8"]
    eventually(lambda: not kafka.topics.topic_ids([topic(ledger, 0, 0)]), "the segment is removed")
    assert client.admin.history(ledger).removed == {SegmentId.of(0, 0)}
    assert client.admin.truncate(ledger, position) == begin, "asking again changes nothing"
    assert client.admin.truncate(ledger, str(before[1])) == begin, "neither does asking for less"
    for gone in (before[1], before[3]):
        assert gone is not None
        with pytest.raises(TruncatedError):
            client.reader(ledger, start=gone)
    with pytest.raises(TruncatedError, match="begins at offset 4"):
        values(client, ledger, ReadPosition(StreamName.parse(ledger), {SegmentId.of(0, 0): 3}))
    assert values(client, ledger, position) == [b"4", b"5", b"6", b"7", b"8"]
    # Sequence ids and conditions know of what is gone.
    with client.reader(ledger, follow=False) as reader:
        first = next(iter(reader))
        assert first.sn is not None
        assert first.sn.sequence_id == 5, "three records and the marker of the seal, and one more"


def test_conditions_and_whole_transactions_meet_removed_segments(
    client: rollbridge.Bridge, scope: str, kafka: KafkaClient
) -> None:
    stream = f"{scope}/removed"
    client.admin.create_stream(stream)
    with client.transaction(stream) as txn:
        txn.write(stream, key=b"a", value=b"0")
    writer = client.cas_writer(stream)
    tail = writer.tail(key=b"a")
    client.admin.scale(stream, seal=[0], ranges=[(0.0, 1.0)])
    truncate_all(client, stream)
    eventually(lambda: not kafka.topics.topic_ids([topic(stream, 0, 0)]), "the segment is removed")
    fresh = client.cas_writer(stream)
    for one in (writer, fresh):
        with pytest.raises(CasWriteError) as caught:
            one.write(key=b"b", value=b"1", expected=EMPTY)
        assert caught.value.actual in (ANY, tail), "what the writer has seen itself it still knows"
    sn = fresh.write(key=b"a", value=b"1", expected=ANY)
    assert fresh.write(key=b"a", value=b"2", expected=sn, scope="key").sequence_id is not None
    with client.transactions(scope, follow=False) as reader:
        [whole] = list(reader)
        with pytest.raises(TruncatedError):
            list(whole.records())


@pytest.mark.parametrize("within", ["segment", "key"])
def test_what_was_known_before_a_gap_is_no_knowledge(
    site: Site, client: rollbridge.Bridge, ledger: str, within: str
) -> None:
    """Somebody has overwritten it, and that was truncated before an idle writer, or the leader, could see it."""

    def write_if(known: SN) -> DLSN:
        transaction = client.begin(ledger)
        transaction.expect(ledger, key=b"a", sn=known, scope=within)
        written = transaction.write(ledger, key=b"a", value=b"if")
        transaction.commit()
        return written.result()

    with client.cas_writer(ledger) as idle, site.connect() as somebody, somebody.cas_writer(ledger) as other:
        first = idle.write(b"a", b"first", expected=EMPTY, scope=within)
        seen_by_both = idle.write(b"a", b"seen by both", expected=first, scope=within)
        with pytest.raises(TransactionRefusedError):
            write_if(first)
        other.write(b"a", b"overwritten", expected=ANY)
        truncate_all(client, ledger)
        if within == "key":
            other.write(b"b", b"of another key", expected=ANY)
        with pytest.raises(CasWriteError):
            idle.write(b"a", b"over it", expected=seen_by_both, scope=within)
        with pytest.raises(TransactionRefusedError):
            write_if(seen_by_both)


@pytest.mark.parametrize("within", ["segment", "key"])
def test_where_all_was_truncated_nobody_says_that_nothing_was_written(
    client: rollbridge.Bridge, ledger: str, within: str
) -> None:
    with client.cas_writer(ledger) as writer:
        writer.write(b"a", b"first", expected=EMPTY)
        truncate_all(client, ledger)
    with client.cas_writer(ledger) as fresh:
        assert fresh.tail(b"a", scope=within) == ANY
        with pytest.raises(CasWriteError) as caught:
            fresh.write(b"a", b"first of all", expected=EMPTY, scope=within)
        assert caught.value.actual == ANY
    transaction = client.begin(ledger)
    transaction.expect(ledger, key=b"a", sn=EMPTY, scope=within)
    transaction.write(ledger, key=b"a", value=b"first of all")
    with pytest.raises(TransactionRefusedError, match="the log has any"):
        transaction.commit()
    assert values(client, ledger) == []


def test_who_has_not_heard_that_a_segment_was_removed_does_not_say_that_nothing_stood_there(
    site: Site, client: rollbridge.Bridge, ledger: str, kafka: KafkaClient
) -> None:
    write(client, ledger, [b"0", b"1"])
    client.admin.scale(ledger, seal=[0], ranges=[(0.0, 1.0)])
    old = client.admin.history(ledger)
    truncate_all(client, ledger)
    eventually(lambda: not kafka.topics.topic_ids([topic(ledger, 0, 0)]), "the topic is deleted")
    end = old.sealed_end(SegmentId.of(0, 0))
    assert end is not None
    assert not old.removed, "that is not known yet"
    tails, lineage = LineageTails(SegmentPlaces(StreamName.parse(ledger)).of), KeyLineage(old, 0.5)
    deadline = Deadline(PATIENCE_S)
    with KafkaClient(site.cluster.bootstrap_servers) as kafka:
        reader = kafka.log(unknown_topic_timeout_s=0.5)
        assert ask(tails.last(lineage, None, 0), reader, deadline) == ANY
        for known in (tails, LineageTails(SegmentPlaces(StreamName.parse(ledger)).of)):
            assert ask(known.last(lineage, b"k", 0), reader, deadline) == ANY
            behind = ask(known.last(lineage, b"k", 0, end - 1), reader, deadline)
            assert behind == EMPTY, "nothing stood behind that"


def test_of_a_write_that_was_truncated_nobody_says_that_it_was_not_written(
    client: rollbridge.Bridge, ledger: str
) -> None:
    with client.cas_writer(ledger) as writer:
        first = writer.write(b"a", b"first", expected=EMPTY)
        token = writer.token(b"a", expected=first)
        second = writer.write(b"a", b"second", expected=first, token=token)
        assert writer.outcome(token) == second
        truncate_all(client, ledger)
        for asking in (writer, client.cas_writer(ledger)):
            with pytest.raises(TruncatedError, match="is unknown"):
                asking.outcome(token)
            with pytest.raises(CasOutcomeUnknownError, match="unknown, and cannot be determined"):
                asking.write(b"a", b"second", expected=first, token=token)
        third = writer.write(b"a", b"third", expected=ANY)
        later = writer.token(b"a", expected=third)
        assert writer.outcome(later) is None, "nothing was truncated since"
        assert writer.write(b"a", b"fourth", expected=third, token=later) == writer.outcome(later)


def test_a_group_that_the_stream_waits_for_keeps_what_it_has_not_read_and_others_go_on(
    site: Site,
    client: rollbridge.Bridge,
    ledger: str,
    kafka: KafkaClient,
    unique_name: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "_AT_ONCE_S", 0.0)  # epochs are never read at once, as where all are busy
    grown(client, ledger)
    named, other = unique_name("named"), unique_name("other")

    def consumer(group: str) -> rollbridge.Consumer:
        return consumer_of(site.cluster, site.root, group, ledger)

    begun = consumer(other)
    assert read_and_commit(begun, b"0") == [b"0"]
    client.admin.update_stream(ledger, retention_groups=[named])
    with pytest.raises(ConflictError, match=f"waits for consumer group {named}"):
        truncate_all(client, ledger)
    reader = consumer(named)
    assert read_and_commit(reader, b"6") == [b"%d" % number for number in range(7)]
    reader.close()
    with pytest.raises(ConflictError, match="up to offset 1 and not up to 3"):
        truncate_all(client, ledger)
    client.admin.truncate(ledger, "2-2:1:0")
    assert values(client, ledger) == [b"7", b"8"]
    removed = [topic(ledger, 0, 0), topic(ledger, 1, 1)]
    eventually(lambda: not kafka.topics.topic_ids(removed), "two segments are removed")
    # A member that has lost records goes on at what is left, after what it had fetched before.
    assert read_and_commit(begun, b"8")[-2:] == [b"7", b"8"]
    begun.close()
    late = consumer(unique_name("late"))
    assert read_and_commit(late, b"8") == [b"7", b"8"]
    late.close()


def test_retention_by_time_and_by_size(client: rollbridge.Bridge, scope: str, kafka: KafkaClient) -> None:
    by_time, by_size = f"{scope}/by-time", f"{scope}/by-size"
    client.admin.create_stream(by_time, retention_time=timedelta(milliseconds=300))
    client.admin.create_stream(by_size)
    config = client.admin.update_stream(by_size, retention_bytes=3_000)
    assert (config.retention.bytes, config.retention.ms) == (3_000, -1)
    for stream in (by_time, by_size):
        write(client, stream, [b"old"])
    client.admin.scale(by_time, seal=[0], ranges=[(0.0, 0.5), (0.5, 1.0)])
    eventually(lambda: not kafka.topics.topic_ids([topic(by_time, 0, 0)]), "what is older than the limit is removed")
    assert values(client, by_time) == []
    numbers = iter(range(10_000))

    segment = topic(by_size, 0, 0)

    def old_is_gone() -> bool:
        write(client, by_size, [b"%0500d" % next(numbers)])
        return kafka.offsets.first([segment])[segment] > 0

    eventually(old_is_gone, "what is beyond the limit is deleted")
    client.admin.update_stream(by_size, retention_bytes=None)
    assert not client.admin.describe(by_size).config.retention.is_limited
    kept = values(client, by_size)
    assert b"old" not in kept
    assert sum(map(len, filter(None, kept))) >= 2_000


def test_a_truncation_is_told_although_the_new_beginning_cannot_be_read(
    client: rollbridge.Bridge, orders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(client, orders, [b"gone"])

    def unreadable(*_: object) -> ReadPosition:
        raise KafkaUnavailableError("no broker answers")

    with monkeypatch.context() as patch:
        patch.setattr(type(client.admin), "beginning", unreadable)
        with pytest.raises(UnavailableError, match="was truncated; its beginning cannot be read now: no bro"):
            truncate_all(client, orders)
    assert values(client, orders) == []


def test_bad_input(client: rollbridge.Bridge, orders: str, payments: str, scope: str) -> None:
    write(client, orders, [b"0"])
    for before, what in (
        (f"{payments}@0-0:0", "belongs to"),
        (f"{orders}@0-7:0", "no segment"),
        (f"{orders}@0-0:9,0-1:9", "beyond its last stable offset"),
        ("earliest", "nothing before the earliest"),
        ("yesterday", "not a place to begin at"),
    ):
        with pytest.raises(InvalidRequestError, match=what):
            client.admin.truncate(orders, before)
    with pytest.raises(StreamNotFoundError):
        client.admin.truncate(f"{scope}/nothing", "latest")
    with pytest.raises(StreamNotFoundError):
        client.admin.update_stream(f"{scope}/nothing", retention_bytes=1)
    for wrong in (timedelta(0), timedelta(days=-1)):
        with pytest.raises(InvalidRequestError, match="retention time is positive"):
            client.admin.update_stream(orders, retention_time=wrong)
    with pytest.raises(InvalidRequestError, match="named twice"):
        client.admin.create_stream(f"{scope}/new", retention_groups=["a", "a"])
    assert values(client, orders) == [b"0"]
    client.admin.truncate(orders, 0)
    assert values(client, orders) == [b"0"], "nothing is older than 1970"
    client.admin.truncate(orders, "2200-01-01")
    assert values(client, orders) == []


def test_frames_are_read_again_although_what_lies_between_them_was_truncated_meanwhile(
    site: Site, kafka: KafkaClient, topic_prefix: str
) -> None:
    size, count = 300_000, 100
    kafka.topics.create_topics([TopicSpec(name=topic_prefix)])
    produce(site.cluster.bootstrap_servers, topic_prefix, [b"%06d" % number * (size // 6) for number in range(count)])
    reader = FrameReader(KafkaClient(site.cluster.bootstrap_servers).log())

    def read(offset: int) -> bytes:
        return reader.read(FrameRef((topic_prefix, 0), offset, PieceKey(0, 0, 0), 0, 1, size, None))

    assert read(0)[:6] == b"000000"
    kafka.topics.delete_records({topic_prefix: count - 5})  # the library reads ahead, but not as far
    assert read(count - 3)[:6] == b"000097"
    with pytest.raises(CorruptDataError):
        read(1)
