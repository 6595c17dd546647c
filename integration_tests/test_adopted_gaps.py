"""What readers and conditional writers find on adopted topics: gaps of compaction, moving starts, others' headers."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

import rollbridge
from integration_tests.adopted_limits import PARTITIONS, Make, adopted, committed, kafka, messages, values
from integration_tests.clients import Site, consumer_of, read_and_commit
from integration_tests.patience import eventually
from rollbridge.base.attribution import HEADER_VALUE, RECORD_HEADER
from rollbridge.base.ids import TransactionId
from rollbridge.base.sn import ANY, EMPTY, OPERATION_HEADER, TRANSACTION_ID_HEADER, pack_transaction_id
from rollbridge.errors import CasWriteError, TransactionAbortedError, TruncatedError, UnavailableError

__all__ = ["adopted", "kafka"]

COMPACTED = {
    "cleanup_policy": "compact",
    "min_cleanable_dirty_ratio": "0.0",
    "segment_ms": "500",
    "max_compaction_lag_ms": "500",
    "delete_retention_ms": "0",
}
KEYS = [b"key-%d" % number for number in range(6)]


def native(site: Site, topic: str, **settings: object) -> Producer:
    config = {"bootstrap.servers": site.cluster.bootstrap_servers, "partitioner": "murmur2_random", **settings}
    return Producer(config)


def compact(site: Site, topic: str, until: Callable[[], bool]) -> None:
    """Roll the newest segments, by records of other keys, until Kafka has compacted what stood before them."""
    producer = native(site, topic)

    def done() -> bool:
        for partition in range(PARTITIONS):
            producer.produce(topic, b"roll", b"roll-%d" % partition, partition=partition)
        assert producer.flush(30) == 0
        time.sleep(0.6)  # the age at which a segment is rolled: the next record begins another
        return until()

    eventually(done, "compaction")


def test_readers_and_conditions_live_with_what_compaction_has_left(
    site: Site, client: rollbridge.Bridge, adopted: Make
) -> None:
    topic = adopted(**COMPACTED)
    with client.transaction(topic) as first:
        for number in range(300):
            first.write(topic, KEYS[number % len(KEYS)], b"first-%d" % number)
        kept = first.write(topic, b"kept", b"first")
    with client.transaction(topic) as second:
        for number in range(300):
            second.write(topic, KEYS[number % len(KEYS)], b"second-%d" % number)
    cas = client.cas_writer(topic)
    token = cas.token(b"cas", expected=EMPTY)
    sn = cas.write(b"cas", b"1", expected=EMPTY, scope="key", token=token)
    assert cas.outcome(token) == sn
    sn = cas.write(b"cas", b"2", expected=sn, scope="key")
    compact(site, topic, lambda: sum(value != b"roll" for value in values(site, topic)) == len(KEYS) + 2)
    left = [message for message in messages(site, topic) if message.value() != b"roll"]
    assert {message.key(): message.value() for message in left} == {
        **{key: b"second-%d" % (294 + number) for number, key in enumerate(KEYS)},
        b"kept": b"first",
        b"cas": b"2",
    }
    # Readers come to the end, in order; whole transactions are what is left of them.
    records = [record for record in client.reader(topic, follow=False) if record.value != b"roll"]
    assert len(records) == len(left)
    assert [[record.value for record in found] for found in committed(client, topic)] == [
        [b"first"],
        [b"second-%d" % number for number in range(294, 300)],
    ]
    assert kept.result(30) == next(record.dlsn for record in records if record.key == b"kept")
    with consumer_of(site.cluster, site.root, "gaps-of-" + topic, topic) as consumer:
        found = read_and_commit(consumer, b"roll") + read_and_commit(consumer, b"roll")
    assert {item for item in found if item != b"roll"} <= {message.value() for message in left}
    # Nobody says of a write that is gone that it was not written.
    with pytest.raises(TruncatedError):
        cas.outcome(token)
    assert cas.tail(b"cas", scope="key") == sn
    sn = cas.write(b"cas", b"3", expected=sn, scope="key")
    with pytest.raises(CasWriteError):
        cas.write(b"cas", b"4", expected=EMPTY, scope="key")
    cas.write(b"other", b"4", expected=cas.tail(b"other"))
    with client.transaction(topic) as transaction:
        transaction.expect(topic, key=b"cas", sn=sn, scope="key")
        transaction.write(topic, b"cas", b"5")
    # A fresh writer knows nothing of before.
    with site.connect("fresh") as other, other.cas_writer(topic) as fresh:
        assert fresh.tail(b"never", scope="key") == EMPTY
        fresh.write(b"never", b"6", expected=EMPTY, scope="key")
        fresh.write(b"cas", None, expected=fresh.tail(b"cas", scope="key"), scope="key")


def test_records_that_the_owner_deletes_end_readers_that_wanted_them_and_nothing_else(
    site: Site, client: rollbridge.Bridge, kafka: AdminClient, adopted: Make
) -> None:
    topic = adopted()
    with client.transaction(topic) as transaction:
        for number in range(100):
            transaction.write(topic, KEYS[number % len(KEYS)], b"old-%d" % number)
    cas = client.cas_writer(topic)
    token = cas.token(KEYS[0], expected=EMPTY)
    tail = cas.tail(KEYS[0])
    with client.reader(topic) as reader:
        assert len(reader.consume(10, 30)) == 10
        behind = reader.position
    open_one = client.begin(topic)
    open_one.write(topic, KEYS[0], b"new")
    open_one.flush()
    for deleted in kafka.delete_records([TopicPartition(topic, number, -1) for number in range(PARTITIONS)]).values():
        deleted.result()
    with pytest.raises(TruncatedError):
        client.reader(topic, start=behind, follow=False)
    assert [record.value for record in client.reader(topic, follow=False)] == []
    with pytest.raises(TruncatedError):
        committed(client, topic)
    # Who has seen the last record knows it; who has not is told that nobody knows what it was, and may not insist.
    assert cas.tail(KEYS[0]) == tail
    with site.connect("fresh") as other, other.cas_writer(topic) as fresh:
        assert fresh.tail(KEYS[0]) == ANY
        with pytest.raises(CasWriteError) as refused:
            fresh.write(KEYS[0], b"no", expected=tail)
        assert refused.value.actual == ANY
        with pytest.raises(CasWriteError):
            fresh.write(KEYS[0], b"no", expected=EMPTY)
        with pytest.raises(TruncatedError):
            fresh.outcome(token)
    open_one.commit()
    assert values(site, topic) == [b"new"]
    cas.write(KEYS[0], b"yes", expected=cas.tail(KEYS[0]))
    with consumer_of(site.cluster, site.root, "start-of-" + topic, topic) as consumer:
        assert read_and_commit(consumer, b"yes")[-1] == b"yes"


def test_a_group_that_is_behind_goes_on_at_what_the_owner_has_left(
    site: Site, client: rollbridge.Bridge, kafka: AdminClient, adopted: Make
) -> None:
    topic = adopted()
    group = "behind-" + topic
    with client.writer(topic) as writer:
        for number in range(10):
            writer.write(b"one", b"%d" % number)
    with consumer_of(site.cluster, site.root, group, topic) as consumer:
        read_and_commit(consumer, b"9")
    with client.writer(topic) as writer:
        for number in range(10, 20):
            writer.write(b"one", b"%d" % number)
        last = writer.write(b"one", b"last").result(30).dlsn
    assert last is not None
    place = TopicPartition(topic, last.segment.number, last.offset)
    kafka.delete_records([place])[place].result()
    with consumer_of(site.cluster, site.root, group, topic) as consumer:
        assert read_and_commit(consumer, b"last") == [b"last"]


def test_a_foreign_transaction_that_stays_open_stops_conditions_and_nothing_else(
    site: Site, client: rollbridge.Bridge, adopted: Make, unique_name: Callable[[str], str]
) -> None:
    topic = adopted()
    key = KEYS[0]
    with client.cas_writer(topic, timeout=10, transaction_timeout=2) as cas:
        sn = cas.write(key, b"first", expected=EMPTY)
        foreign = native(site, topic, **{"transactional.id": unique_name("foreign")})
        foreign.init_transactions(30)
        foreign.begin_transaction()
        foreign.produce(topic, b"foreign", key)
        assert foreign.flush(30) == 0
        with pytest.raises(UnavailableError, match="earlier native transaction"):
            cas.write(key, b"second", expected=sn)
        with pytest.raises(UnavailableError, match="stays open"):
            cas.tail(key)
        with client.writer(topic) as writer:
            writer.write(key, b"plain").result(30)
        with client.transaction(topic) as transaction:
            transaction.write(topic, key, b"unconditional")
        conditional = client.begin(topic)
        conditional.expect(topic, key=key, sn=sn)
        conditional.write(topic, key, b"conditional")
        with pytest.raises(TransactionAbortedError, match="undecided"):
            conditional.commit()
        with client.transaction(topic) as transaction:
            transaction.write(topic, key, b"goes on")
        foreign.abort_transaction(30)
        cas.write(key, b"third", expected=cas.tail(key))
    found = [record.value for record in client.reader(topic, follow=False)]
    assert found == [b"first", b"plain", b"unconditional", b"goes on", b"third"]
    # Markers, and what was aborted, take offsets between the records of transactions.
    assert [[record.value for record in records] for records in committed(client, topic)] == [
        [b"unconditional"],
        [b"goes on"],
    ]


def test_headers_that_were_copied_with_records_decide_nothing(
    site: Site, client: rollbridge.Bridge, adopted: Make
) -> None:
    topic = adopted()
    key = KEYS[0]
    with client.transaction(topic) as transaction:
        transaction.write(topic, key, b"ours")
    cas = client.cas_writer(topic)
    token = cas.token(key, expected=cas.tail(key))
    mirrored: list[tuple[str, str | bytes | None]] = [
        (RECORD_HEADER, HEADER_VALUE.pack(transaction.id.bytes, 0)),
        (RECORD_HEADER, HEADER_VALUE.pack(TransactionId.of(1, 99).bytes, 7)),
        (RECORD_HEADER, b"not one"),
        (TRANSACTION_ID_HEADER, pack_transaction_id(9)),
        (TRANSACTION_ID_HEADER, b"?"),
        (OPERATION_HEADER, b"0123456789abcdef"),
        ("rollbridge-late", b"limits/0:1"),
        ("rollbridge", None),
    ]
    producer = native(site, topic)
    for header in mirrored:
        producer.produce(topic, b"copy", key, headers=[header])
    producer.produce(topic, b"copy", key, headers=mirrored)
    assert producer.flush(30) == 0
    [found] = committed(client, topic)
    assert [record.value for record in found] == [b"ours"]
    assert cas.outcome(token) is None
    with pytest.raises(CasWriteError):
        cas.write(key, b"no", expected=token.since, token=token)
    tail = cas.tail(key)
    assert tail.dlsn is not None
    assert tail.dlsn.offset == messages(site, topic)[-1].offset()
    cas.write(key, b"yes", expected=tail)
    with client.cas_writer(topic, monotonic_ids=True) as rising:
        rising.write(key, b"10", expected=rising.tail(key), transaction_id=10)
    records = list(client.reader(topic, follow=False))
    assert [record.value for record in records] == [b"ours", *[b"copy"] * 9, b"yes", b"10"]
    assert [record.dlsn.offset for record in records if record.dlsn] == sorted(
        record.dlsn.offset for record in records if record.dlsn
    )
