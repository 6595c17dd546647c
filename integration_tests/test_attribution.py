"""Every public reader says of every record who wrote it, from any start: as it was written, and all alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from confluent_kafka import TopicPartition

import rollbridge
from integration_tests.clients import Site, consumer_of, headers_of, own_headers, read_committed
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.base.attribution import RECORD_HEADER
from rollbridge.base.ids import TransactionId
from rollbridge.base.sn import DLSN
from rollbridge.stream.config import HeaderForm
from rollbridge.stream.names import StreamName
from rollbridge.stream.positions import ReadPosition

Written = dict[bytes, tuple[DLSN | None, TransactionId | None, int | None]]
"""Of each value: its place, and who wrote it."""


def write_of_all_kinds(client: rollbridge.Bridge, orders: str, payments: str) -> Written:
    """Transactions large and small, over several segments and streams, one with parts, and plain writes in between."""
    written: Written = {}
    numbers = itertools.count()

    def note(futures: dict[bytes, rollbridge.WriteFuture], transaction: TransactionId) -> None:
        for value, future in futures.items():
            written[value] = future.result(PATIENCE_S), transaction, future.local_sequence

    def write(transaction: rollbridge.Transaction, records: int) -> dict[bytes, rollbridge.WriteFuture]:
        futures = {}
        for place in range(records):
            value = b"value-%d" % next(numbers)
            futures[value] = transaction.write(orders, key=b"key-%d" % (place % 7), value=value, headers=[("n", b"1")])
            if place % 3 == 0:
                transaction.write(payments, key=b"k", value=b"elsewhere")
        return futures

    with client.writer(orders) as plain:
        for size in (1, 2, 300, 10, 5_000):
            with client.transaction(orders, payments) as transaction:
                futures = write(transaction, size)
            note(futures, transaction.id)
            for place in range(3):
                value = b"plain-%d-%d" % (size, place)
                written[value] = plain.write(b"key-%d" % place, value).result(PATIENCE_S).dlsn, None, None
        # Small ones that the leader joins.
        several = [client.begin(orders, payments) for _ in range(20)]
        noted = [write(transaction, 4) for transaction in several]
        for answer in [transaction.commit_async() for transaction in several]:
            answer.result(PATIENCE_S)
        for futures, transaction in zip(noted, several, strict=True):
            note(futures, transaction.id)
    with client.begin(orders) as transaction:
        part = client.join(transaction.id)
        futures = {b"part-%d" % place: part.write(orders, key=b"key-1", value=b"part-%d" % place) for place in range(9)}
        transaction.commit(parts=[part.finish()])
    note(futures, transaction.id)
    return written


def check(records: Iterable[rollbridge.Record | rollbridge.Message], written: Written) -> int:
    """Compare; gives how many there were."""
    count = 0
    for record in records:
        value = record.value() if isinstance(record, rollbridge.Message) else record.value
        assert value is not None
        dlsn, transaction, local = written[value]
        assert (record.transaction_id, record.local_sequence) == (transaction, local), value
        assert record.dlsn == dlsn, value
        assert record.sn is not None
        assert record.sn.dlsn == dlsn, value
        count += 1
    return count


def starts(written: Written) -> list[DLSN]:
    """Places in the middle of frames, and at their ends."""
    places = sorted(dlsn for dlsn, _, _ in written.values() if dlsn is not None)
    return [places[number * (len(places) - 1) // 11] for number in range(12)]


@pytest.mark.parametrize("form", list(HeaderForm))
def test_readers_from_any_start(site: Site, client: rollbridge.Bridge, orders: str, form: HeaderForm) -> None:
    scope = orders.partition("/")[0]
    stream, payments = f"{scope}/attributed-{form.value}", f"{scope}/beside-{form.value}"
    assert client.admin.create_stream(stream, segments=2, headers=form).headers is form
    client.admin.create_stream(payments, headers=form)
    written = write_of_all_kinds(client, stream, payments)

    with client.reader(stream, follow=False) as reader:
        assert check(reader, written) == len(written)
    with client.reader(stream, follow=False) as reader:
        assert sum(check(batch, written) for batch in reader.batches()) == len(written)
    with client.reader(stream, follow=False) as reader:
        everything = list(reader)
    assert check(reversed(everything), written) == len(written), "long after they were handed out"
    for start in starts(written):
        with client.reader(stream, start=start, follow=False) as reader:
            assert check(reader, written) >= 1
        # Also if nobody has asked at first.
        with client.reader(stream, start=start, follow=False) as reader:
            some = reader.consume(3, PATIENCE_S)
            assert check([*some, *reader], written) >= 1
    segments = client.admin.history(stream).active.segment_ids
    places = [dlsn for dlsn, _, _ in written.values() if dlsn is not None]
    ends = {item: max(dlsn.offset for dlsn in places if dlsn.segment == item) for item in segments}
    for share in range(1, 8):
        position = ReadPosition(StreamName.parse(stream), {item: end * share // 8 for item, end in ends.items()})
        with client.reader(stream, start=position, follow=False) as reader:
            assert check(reader, written) >= 1

    with client.transactions(scope, follow=False) as transactions:
        found = [record for item in transactions for record in item.records() if record.stream == stream]
    assert check(found, written) == sum(transaction is not None for _, transaction, _ in written.values())
    for start in starts(written)[::3]:
        with client.cas_writer(stream) as cas:
            key = b"key-1"
            assert cas.tail(key) == last_of(client, stream, key).sn
        with client.reader(stream, start=start, follow=False) as reader:
            assert check([record for record in reader if record.dlsn == start], written) == 1


def last_of(client: rollbridge.Bridge, stream: str, key: bytes) -> rollbridge.Record:
    """The last record of a key."""
    with client.reader(stream, follow=False) as reader:
        return [record for record in reader if record.key == key][-1]


def test_consumers_that_begin_and_seek_in_the_middle_of_frames(
    site: Site, client: rollbridge.Bridge, orders: str
) -> None:
    scope = orders.partition("/")[0]
    stream, payments = f"{scope}/sought", f"{scope}/beside-sought"
    client.admin.create_stream(stream, segments=2)
    client.admin.create_stream(payments)
    written = write_of_all_kinds(client, stream, payments)
    ends = [
        max(dlsn.offset for dlsn, _, _ in written.values() if dlsn is not None and dlsn.number == number)
        for number in range(2)
    ]
    held: list[rollbridge.Message] = []
    with consumer_of(site.cluster, site.root, f"{scope}-sought", stream) as consumer:
        for share in (3, 5, 1, 4):
            for number, end in enumerate(ends):
                place = TopicPartition(stream, number, end * share // 8)
                if consumer.assignment():
                    eventually(lambda place=place: seek(consumer, place), "the segment is read")  # type: ignore[misc]
            more = len(held) + 1_000
            while len(held) < more:
                held += consumer.consume(700, PATIENCE_S)
        assert check(held, written) == len(held)
        for message in held[::100]:
            consumer.seek(TopicPartition(stream, message.partition() or 0, message.offset() or 0))
            assert check(consumer.consume(3, PATIENCE_S), written) >= 1


def seek(consumer: rollbridge.Consumer, place: TopicPartition) -> bool:
    """Go on elsewhere, once the segment is assigned."""
    try:
        consumer.seek(place)
    except Exception:  # it is not read yet
        consumer.consume(1, 0.1)
        return False
    return True


def test_a_log_that_begins_in_the_middle_of_a_frame(site: Site, client: rollbridge.Bridge, orders: str) -> None:
    scope = orders.partition("/")[0]
    stream = f"{scope}/cut"
    client.admin.create_stream(stream)
    with client.transaction(stream) as transaction:
        futures = [transaction.write(stream, key=b"k", value=b"%d" % number) for number in range(100)]
    client.admin.truncate(stream, futures[40].result(PATIENCE_S))
    with client.reader(stream, follow=False) as reader:
        found = [(record.value, record.transaction_id, record.local_sequence) for record in reader]
    assert found == [(b"%d" % number, transaction.id, number) for number in range(40, 100)]


def test_the_form_is_changed_for_later_transactions_and_plain_readers_see_it(
    site: Site, client: rollbridge.Bridge, orders: str
) -> None:
    stream = f"{orders.partition('/')[0]}/changed"
    client.admin.create_stream(stream)
    for form in (HeaderForm.FIRST, HeaderForm.EACH):
        assert client.admin.update_stream(stream, headers=form).headers is form
        with site.connect() as later, later.transaction(stream) as transaction:
            for number in range(3):
                transaction.write(stream, key=b"k", value=b"%d" % number, headers=[("user", b"x")])
    with client.reader(stream, follow=False) as reader:
        records = list(reader)
    assert [record.local_sequence for record in records] == [0, 1, 2] * 2
    assert [record.headers for record in records] == [[("user", b"x")]] * 6
    raw = [record.raw for record in records]
    names = [[name for name, _ in headers_of(message)] for message in raw]  # type: ignore[arg-type]
    assert names == [["user", RECORD_HEADER], ["user"], ["user"], *[["user", RECORD_HEADER]] * 3]
    assert all(own_headers(message) for message in read_committed(site.cluster.bootstrap_servers, [records[0].topic]))
