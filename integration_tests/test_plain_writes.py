"""Plain writes against a real cluster: scales and rolling commits under them, lost connections, refusals, deletion."""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import suppress
from typing import Any, cast

import pytest

import rollbridge
from integration_tests.clients import Site, headers_of, until
from integration_tests.patience import PATIENCE_S
from integration_tests.plain_tools import KEYS, Load, check, join_all, read_in_order, split_first, values_by_key
from rollbridge.base.sn import DLSN, SN, TRANSACTION_ID_HEADER, pack_transaction_id
from rollbridge.errors import (
    InvalidRequestError,
    RecordTooLargeError,
    RollbridgeError,
    StreamNotFoundError,
    TransactionIdOutOfOrderError,
)
from rollbridge.kafka.client import KafkaClient
from rollbridge.stream.names import StreamName
from rollbridge.writer import WriterOptions


def test_a_record_is_where_its_future_says(site: Site, client: rollbridge.Bridge, orders: str) -> None:
    with client.writer(orders) as writer:
        plain = writer.write(b"k", b"v")
        full = writer.write(
            b"k", b"w", headers=[("h", b"1"), ("h", None)], timestamp=1_700_000_000_123, transaction_id=17
        )
        empty = writer.write(b"k", None)
        keyless = writer.write(value=b"keyless")
        writer.flush()
        assert all(future.done() and not future.running() for future in (plain, full, empty, keyless))
    found = dict(read_in_order(client, orders))
    first = plain.result()
    assert first == SN(first.dlsn, None, first.dlsn.offset if first.dlsn else None)
    assert full.result().transaction_id == 17
    message = found[cast("DLSN", full.result().dlsn)]
    assert (message.key(), message.value(), message.timestamp()[1]) == (b"k", b"w", 1_700_000_000_123)
    assert headers_of(message) == [("h", b"1"), ("h", None), (TRANSACTION_ID_HEADER, pack_transaction_id(17))]
    assert found[cast("DLSN", empty.result().dlsn)].value() is None
    assert found[cast("DLSN", keyless.result().dlsn)].key() is None
    assert len(found) == 4


def test_writers_never_notice_scales_and_rolling_commits(client: rollbridge.Bridge, orders: str) -> None:
    writer = client.writer(orders)
    old = client.begin(orders, label="older than every epoch to come")
    expected = [old.write(orders, key=b"transaction", value=b"%d" % number) for number in range(20)]
    with Load(writer.write, threads=3) as load:
        for number in range(6):
            load.grow()
            if number % 2:
                join_all(client, orders)
            else:
                split_first(client, orders)
            if number == 3:
                load.grow()
                old.commit()
                between = client.begin(orders)
                between.write(orders, key=b"transaction", value=b"20")
                split_first(client, orders)
                load.grow()
                between.commit()
        load.grow()
    writer.close()
    found = read_in_order(client, orders)
    check(load, found, others=frozenset({b"transaction"}))
    assert values_by_key(found)[b"transaction"] == [b"%d" % number for number in range(21)]
    assert all(future.done() for future in expected)
    assert len(client.admin.history(orders).records) == 12


def test_a_batch_that_is_taken_apart_keeps_its_futures(client: rollbridge.Bridge, orders: str) -> None:
    """One batch, refused by a sealed segment whose keys two others hold now: most records move to another batch."""
    join_all(client, orders)
    writer = client.writer(orders, options=WriterOptions(linger_s=900.0))
    seen: list[SN] = []
    futures = [writer.write(key, b"%d" % number) for number, key in enumerate(KEYS)]
    nobody = writer.write(None, b"without a key", transaction_id=5)
    futures[0].add_done_callback(lambda future: seen.append(future.result()))
    waiting = threading.Thread(target=lambda: futures[-1].result(60))
    waiting.start()
    split_first(client, orders)
    writer.flush(60)
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    found = dict(read_in_order(client, orders))
    numbers = [cast("DLSN", future.result().dlsn) for future in futures]
    assert [found[place].key() for place in numbers] == KEYS
    assert {place.epoch for place in numbers} == {2}
    assert len({place.number for place in numbers}) == 2
    assert nobody.result().transaction_id == 5
    until(lambda: seen == [futures[0].result()])


# Refusals and ends --------------------------------------------------------------------------------------------------


def test_a_record_that_is_too_large_is_refused_at_once(client: rollbridge.Bridge, scope: str) -> None:
    stream = f"{scope}/small-records"
    client.admin.create_stream(stream, record_bytes_max=1_000)
    with client.writer(stream) as writer:
        fits = writer.write(b"k", b"v" * 900)
        with pytest.raises(RecordTooLargeError) as refused:
            writer.write(b"k", b"v" * 1_000)
        assert refused.value.limit_bytes == 1_000
        with pytest.raises(RecordTooLargeError):
            writer.write_all([(b"k", b"w" * 900), (b"k", b"v" * 1_000), (b"k", b"never")])
    assert fits.exception() is None
    assert [message.value() for _, message in read_in_order(client, stream)] == [b"v" * 900, b"w" * 900]


def test_the_largest_record_that_a_stream_takes_is_written(client: rollbridge.Bridge, orders: str) -> None:
    with client.writer(orders) as writer:
        future = writer.write(None, b"v" * 999_000)
    assert future.result().dlsn is not None


def test_a_falling_transaction_id_is_refused_where_that_was_asked_for(client: rollbridge.Bridge, orders: str) -> None:
    with pytest.warns(FutureWarning, match="rising_ids is called monotonic_ids now"):
        strict = client.writer(orders, rising_ids=True)
    free = client.writer(orders)
    strict.write(b"k", b"1", transaction_id=7)
    strict.write(b"k", b"2", transaction_id=7)
    with pytest.raises(TransactionIdOutOfOrderError) as refused:
        strict.write(b"k", b"no", transaction_id=6)
    assert (refused.value.transaction_id, refused.value.last) == (6, 7)
    free.write(b"k", b"3", transaction_id=6)
    strict.write(b"k", b"4", transaction_id=8)
    strict.flush()
    assert [message.value() for _, message in read_in_order(client, orders)] == [b"1", b"2", b"3", b"4"]


def test_bad_input_is_refused(client: rollbridge.Bridge, orders: str) -> None:
    wrong: list[tuple[str | None, dict[str, Any]]] = [
        (None, {"transaction_id": -1}),
        (None, {"transaction_id": 1 << 63}),
        ("own", {"headers": [("rollbridge", b"")]}),
        ("own", {"headers": [(TRANSACTION_ID_HEADER, b"")]}),
        ("1970", {"timestamp": -1}),
    ]
    with client.writer(orders) as writer:
        for words, more in wrong:
            with pytest.raises(InvalidRequestError, match=words):
                writer.write(b"k", b"v", **more)


def test_a_stream_that_does_not_exist_is_refused(client: rollbridge.Bridge, scope: str, orders: str) -> None:
    with pytest.raises(StreamNotFoundError):
        client.writer(f"{scope}/nothing")


def test_a_stream_that_is_deleted_fails_what_is_under_way_and_what_comes(
    site: Site, client: rollbridge.Bridge, orders: str
) -> None:
    writer = client.writer(orders)
    kept = writer.write(b"k", b"v").result(120)
    with site.connect("another") as other:
        other.admin.delete_stream(orders)

    def refused() -> bool:
        try:
            writer.write(b"k", b"w").result(120)
        except StreamNotFoundError:
            return True
        return False

    until(refused)
    with suppress(StreamNotFoundError):  # raised if a record was under way at that moment
        writer.close()
    assert kept.dlsn is not None
    client.admin.create_stream(orders)
    with client.writer(orders) as again:
        assert again.write(b"k", b"x").result(120).dlsn == DLSN(1, 0, 0), "its epochs go on above the former life's"


def test_a_closed_writer_takes_nothing(client: rollbridge.Bridge, orders: str) -> None:
    writer = client.writer(orders)
    writer.write(b"k", b"v")
    writer.close()
    writer.close()
    with pytest.raises(InvalidRequestError, match="closed"):
        writer.write(b"k", b"v")
    assert len(read_in_order(client, orders)) == 1


def test_many_at_once_are_written_in_order(client: rollbridge.Bridge, payments: str) -> None:
    with client.writer(payments) as writer:
        rows = [(KEYS[number % 24], b"%d" % number) for number in range(30_000)]
        assert writer.write_all(iter(rows)) == 30_000
        assert writer.write_all([(None, b"a"), (None, b"b")]) == 2
    expected: dict[bytes | None, list[bytes]] = defaultdict(list)
    for key, value in [*rows, (None, b"a"), (None, b"b")]:
        expected[key].append(value)
    assert values_by_key(read_in_order(client, payments)) == expected


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_compressed_batches_follow_a_seal_too(client: rollbridge.Bridge, orders: str, codec: str) -> None:
    writer = client.writer(orders, options=WriterOptions(compression=codec))
    with Load(writer.write, threads=2) as load:
        load.grow(1_000)
        split_first(client, orders)
        load.grow(1_000)
    writer.close()
    check(load, read_in_order(client, orders))


def test_a_connection_that_is_closed_writes_what_it_has(site: Site, client: rollbridge.Bridge, orders: str) -> None:
    with site.connect("brief") as brief:
        futures = [brief.writer(orders).write(b"k", b"%d" % number) for number in range(100)]
    assert all(future.exception() is None for future in futures)
    assert len(read_in_order(client, orders)) == 100


def test_a_record_that_is_refused_is_refused_alone_and_told_to_who_wrote_it(
    site: Site, client: rollbridge.Bridge, ledger: str
) -> None:
    topics = KafkaClient(site.cluster.bootstrap_servers).topics
    topic = StreamName.parse(ledger).segment_topic(rollbridge.SegmentId.of(0, 0))
    topics.set_topic_config(topic, {"cleanup.policy": "compact"})
    until(lambda: topics.describe([topic])[topic].config["cleanup.policy"] == "compact")  # as the broker has it by then
    options = WriterOptions(linger_s=1.0)  # all of it goes in one batch
    one, other = client.writer(ledger, options=options), client.writer(ledger, options=options)
    kept, refused = [], []
    for number in range(20):
        kept.append(one.write(b"k%d" % number, b"%d" % number))
        if number % 7 == 0:
            refused.append(other.write(None, b"without a key"))
    kept.append(other.write(b"last", b"20"))
    one.flush()
    with pytest.raises(RollbridgeError, match=r"INVALID_RECORD.*not written") as caught:
        other.flush()
    assert "key" in str(caught.value), "what Kafka says of the record"
    other.flush()  # it has been told
    places = [cast("DLSN", future.result().dlsn) for future in kept]
    assert places == sorted(places)
    assert all(isinstance(future.exception(), RollbridgeError) for future in refused)
    assert [message.value() for _, message in read_in_order(client, ledger)] == [b"%d" % number for number in range(21)]
    one.write(b"k", b"goes on").result(PATIENCE_S)
