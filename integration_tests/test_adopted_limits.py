"""What adopted topics take: their owners' limits are honoured when records are written, and when limits are changed."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

import rollbridge
from integration_tests.adopted_limits import Make, adopted, committed, kafka, messages, values
from integration_tests.clients import Site
from integration_tests.patience import eventually
from rollbridge.base.sn import EMPTY
from rollbridge.errors import InvalidRequestError, RecordTooLargeError, TransactionAbortedError

__all__ = ["adopted", "kafka"]

SMALL = 10_000
"""``max.message.bytes`` of a topic for small records."""
HOUR_MS = 3_600_000


def alter(kafka: AdminClient, topic: str, **settings: object) -> None:
    """Change settings as the topic's owner does."""
    entries = [
        ConfigEntry(key.replace("_", "."), str(value), incremental_operation=AlterConfigOpType.SET)
        for key, value in settings.items()
    ]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    for done in kafka.incremental_alter_configs([resource]).values():
        done.result()


def keys(count: int) -> list[bytes]:
    return [b"key-%d" % number for number in range(count)]


# Sizes


@pytest.mark.parametrize("codec", ["producer", "gzip", "snappy", "lz4", "zstd", "uncompressed"])
def test_batches_of_every_writer_fit_into_a_topic_that_takes_small_ones(
    site: Site, client: rollbridge.Bridge, adopted: Make, codec: str
) -> None:
    topic = adopted(max_message_bytes=SMALL, compression_type=codec)
    limit = client.admin.describe(topic).config.record_bytes_max
    assert SMALL * 0.9 < limit < SMALL
    noise = random.Random(7).randbytes
    big = [noise(limit - 80) for _ in range(3)]
    with client.transaction(topic) as transaction:
        for number in range(1_000):
            transaction.write(topic, b"%d" % (number % 5), b"transaction-%d" % number + bytes(100))
        for value in big:
            transaction.write(topic, b"big", value)
        with pytest.raises(RecordTooLargeError):
            transaction.write(topic, b"big", bytes(limit))
        transaction.write_all(topic, [(b"%d" % (number % 5), noise(700)) for number in range(100)])
    with client.writer(topic) as writer:
        futures = [writer.write(b"%d" % (number % 5), noise(500)) for number in range(200)]
        futures += [writer.write(b"big", value) for value in big]
        with pytest.raises(RecordTooLargeError):
            writer.write(b"big", bytes(limit))
    for future in futures:
        future.result(30)
    cas = client.cas_writer(topic)
    sn = cas.tail(b"cas")
    chain: list[rollbridge.CasFuture] = []
    for _ in range(60):
        chain.append(cas.write_async(b"cas", noise(1_000), expected=chain[-1] if chain else sn))
    for link in chain:
        link.result(30)
    with pytest.raises(RecordTooLargeError):
        cas.write(b"cas", bytes(limit), expected=chain[-1].result())
    with pytest.raises(InvalidRequestError, match="exceeds"):
        cas.write_all([(b"cas", noise(2_000))] * 6, expected=chain[-1].result())
    assert len(messages(site, topic)) == 1_000 + 3 + 100 + 203 + 60


def test_small_transactions_that_are_merged_together_stay_below_the_limit(
    site: Site, client: rollbridge.Bridge, adopted: Make
) -> None:
    topic = adopted(max_message_bytes=SMALL)
    waiting = []
    for number in range(200):
        transaction = client.begin(topic)
        transaction.write(topic, b"one", b"%d-" % number + bytes(900))
        waiting.append(transaction.commit_async())
    for outcome in waiting:
        outcome.result(60)
    assert len(messages(site, topic)) == 200
    assert client.admin.describe(topic).fault is None


def test_a_lowered_limit_aborts_what_does_not_fit_any_more_and_nothing_else(
    site: Site, client: rollbridge.Bridge, kafka: AdminClient, adopted: Make, ledger: str
) -> None:
    topic = adopted()
    large, small = client.begin(topic), client.begin(topic)
    large.write_all(topic, [(b"one", bytes(1_000)) for _ in range(500)])
    small.write(topic, b"one", b"small")
    for open_one in (large, small):
        open_one.flush()
    alter(kafka, topic, max_message_bytes=SMALL)
    with pytest.raises(TransactionAbortedError, match="TOO_LARGE"):
        large.commit()
    small.commit()
    with client.transaction(ledger) as other:
        other.write(ledger, b"k", b"goes on")
    # Writers honour the new limit by themselves.
    eventually(lambda: client.admin.describe(topic).config.record_bytes_max < SMALL, "the new limit")

    def refused() -> bool:
        transaction = client.begin(topic)
        try:
            transaction.write(topic, b"one", bytes(SMALL))
        except RecordTooLargeError:
            return True
        finally:
            transaction.abort()
        return False

    eventually(refused, "a refusal by the new limit")
    with client.transaction(topic) as transaction:
        transaction.write_all(topic, [(b"one", bytes(1_000)) for _ in range(100)])
    assert len(messages(site, topic)) == 101


def test_plain_batches_are_divided_when_the_limit_was_lowered_under_them(
    site: Site, client: rollbridge.Bridge, kafka: AdminClient, adopted: Make
) -> None:
    topic = adopted()
    with client.writer(topic) as writer:
        writer.write(b"one", b"before").result(30)
        alter(kafka, topic, max_message_bytes=SMALL)
        futures = [writer.write(b"one", b"%d-" % number + bytes(900)) for number in range(200)]
        over = writer.write(b"one", bytes(SMALL * 2))
        places = [future.result(60).dlsn for future in futures]
        with pytest.raises(RecordTooLargeError, match="not written"):
            over.result(60)
        with pytest.raises(RecordTooLargeError):
            writer.flush()
    offsets = [place.offset for place in places if place is not None]
    assert offsets == sorted(offsets)
    assert len(messages(site, topic)) == 201


def test_conditional_writes_wait_for_the_lowered_limit_and_keep_to_it(
    site: Site, client: rollbridge.Bridge, kafka: AdminClient, adopted: Make
) -> None:
    topic = adopted()
    with client.cas_writer(topic, timeout=60) as cas:
        sn = cas.write(b"one", b"before", expected=EMPTY)
        alter(kafka, topic, max_message_bytes=SMALL)
        with pytest.raises(RecordTooLargeError, match="by now"):
            cas.write(b"one", bytes(SMALL * 2), expected=sn)
        chain: list[rollbridge.CasFuture] = []
        for number in range(30):
            chain.append(cas.write_async(b"one", b"%d-" % number + bytes(900), expected=chain[-1] if chain else sn))
        chain[-1].result(60)
    assert len(messages(site, topic)) == 31


# Keys


def test_a_compacted_topic_takes_no_record_without_a_key_and_says_so_at_once(
    site: Site, client: rollbridge.Bridge, adopted: Make
) -> None:
    topic = adopted(cleanup_policy="compact")
    said = "without a key is not possible in a compacted topic"
    with client.transaction(topic) as transaction:
        with pytest.raises(InvalidRequestError, match=said):
            transaction.write(topic, None, b"keyless")
        transaction.write(topic, b"key", b"value")
        with pytest.raises(InvalidRequestError, match=said):
            transaction.write(topic, None, b"keyless")
        with pytest.raises(InvalidRequestError, match=said):
            transaction.write_all(topic, [(b"before", b"value"), (None, b"keyless")])
        transaction.write(topic, b"key", None)
    with client.writer(topic) as writer:
        with pytest.raises(InvalidRequestError, match=said):
            writer.write(None, b"keyless")
        writer.write(b"key", b"plain")
        with pytest.raises(InvalidRequestError, match=said):
            writer.write(None, b"keyless")
        with pytest.raises(InvalidRequestError, match=said):
            writer.write_all([(b"key", None), (None, b"keyless")])
    cas = client.cas_writer(topic)
    cas.write(b"cas", None, expected=EMPTY, scope="key")
    with pytest.raises(InvalidRequestError, match=said):
        cas.write_all([(b"cas", b"1"), (None, b"2")], expected=cas.tail(b"cas"))
    found = sorted((message.key() or b"", message.value() or b"") for message in messages(site, topic))
    assert found == [
        (b"before", b"value"),
        (b"cas", b""),
        (b"key", b""),
        (b"key", b""),
        (b"key", b"plain"),
        (b"key", b"value"),
    ]


def test_a_topic_that_becomes_compacted_refuses_the_keyless_transaction_and_no_other(
    site: Site, client: rollbridge.Bridge, kafka: AdminClient, adopted: Make
) -> None:
    topic = adopted()
    keyless, keyed = client.begin(topic), client.begin(topic)
    keyless.write(topic, None, b"keyless")
    keyed.write(topic, b"key", b"keyed")
    keyless.flush()
    keyed.flush()
    alter(kafka, topic, cleanup_policy="compact")
    with pytest.raises(TransactionAbortedError, match="INVALID_RECORD"):
        keyless.commit()
    keyed.commit()
    assert values(site, topic) == [b"keyed"]


# Times


def test_times_that_the_topic_does_not_take_are_refused_when_they_are_written(
    site: Site, client: rollbridge.Bridge, adopted: Make
) -> None:
    topic = adopted(message_timestamp_before_max_ms=HOUR_MS)  # and an hour ahead is Kafka's default
    now_ms = int(time.time() * 1000)
    times: Sequence[tuple[int, str]] = (
        (now_ms - 2 * HOUR_MS, "message.timestamp.before.max.ms"),
        (now_ms + 2 * HOUR_MS, "message.timestamp.after.max.ms"),
    )
    cas = client.cas_writer(topic)
    with client.transaction(topic) as transaction, client.writer(topic) as writer:
        for ms, setting in times:
            with pytest.raises(InvalidRequestError, match=setting):
                transaction.write(topic, b"k", b"transaction", timestamp=ms)
            with pytest.raises(InvalidRequestError, match=setting):
                writer.write(b"k", b"plain", timestamp=ms)
            with pytest.raises(InvalidRequestError, match=setting):
                cas.write(b"k", b"cas", expected=EMPTY, timestamp=ms)
        transaction.write(topic, b"k", b"1", timestamp=now_ms - HOUR_MS // 2)
        writer.write(b"k", b"2", timestamp=now_ms + HOUR_MS // 2)
    assert values(site, topic) == [b"1", b"2"]


def test_records_that_became_too_old_end_their_commit_and_no_other(
    site: Site, client: rollbridge.Bridge, kafka: AdminClient, adopted: Make
) -> None:
    topic = adopted()
    past_ms = int(time.time() * 1000) - 2 * HOUR_MS
    old, fresh = client.begin(topic), client.begin(topic)
    old.write(topic, b"k", b"old", timestamp=past_ms)
    fresh.write(topic, b"k", b"fresh")
    old.flush()
    fresh.flush()
    alter(kafka, topic, message_timestamp_before_max_ms=HOUR_MS)
    commits = [old.commit_async(), fresh.commit_async()]
    with pytest.raises(TransactionAbortedError, match="INVALID_TIMESTAMP"):
        commits[0].result(60)
    commits[1].result(60)
    assert values(site, topic) == [b"fresh"]


def test_a_topic_that_takes_its_own_time_replaces_that_of_records(
    site: Site, client: rollbridge.Bridge, adopted: Make
) -> None:
    topic = adopted(message_timestamp_type="LogAppendTime", message_timestamp_before_max_ms=HOUR_MS)
    before_ms = int(time.time() * 1000)
    with client.transaction(topic) as transaction:
        for key in keys(6):
            transaction.write(topic, key, b"old-" + key, timestamp=1)
    with client.writer(topic) as writer:
        writer.write(b"k", b"plain", timestamp=2).result(30)
    cas = client.cas_writer(topic)
    cas.write(b"k", b"cas", expected=cas.tail(b"k"), timestamp=3)
    late_ms = int(time.time() * 1000) + 1
    eventually(lambda: int(time.time() * 1000) > late_ms, "a later time")
    with client.writer(topic) as writer:
        writer.write(b"k", b"late", timestamp=4).result(30)
    records = list(client.reader(topic, follow=False))
    assert len(records) == 9
    assert all(record.timestamp_ms >= before_ms for record in records)
    assert [record.value for record in client.reader(topic, start=late_ms, follow=False)] == [b"late"]
    [found] = committed(client, topic)
    assert all(record.timestamp_ms >= before_ms for record in found)


# Kafka's own limits, for comparison
