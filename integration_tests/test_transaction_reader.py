"""``b.transactions``: whole transactions in commit order, with their records of every stream."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice

import pytest

import rollbridge
from integration_tests.clients import Site
from integration_tests.grown_streams import KEYS, grow
from integration_tests.kafka_tools import produce
from rollbridge.errors import InvalidNameError, InvalidRequestError, NotFoundError, TruncatedError
from rollbridge.kafka.client import KafkaClient
from rollbridge.stream.names import StreamName


def scope_of(stream: str) -> str:
    return StreamName.parse(stream).scope


def test_every_transaction_once_in_the_order_of_commits_over_all_streams(
    client: rollbridge.Bridge, orders: str, payments: str, site: Site
) -> None:
    ids = []
    for number in range(5):
        with client.transaction(orders, payments, label=f"t{number}") as txn:
            for place, key in enumerate(KEYS):
                txn.write((orders, payments)[place % 2], key=key, value=b"%d-%d" % (number, place))
        ids.append(txn.id)
        topic = StreamName.parse(orders).segment_topic(rollbridge.SegmentId.of(0, 0))
        produce(site.cluster.bootstrap_servers, topic, [b"plain"] * 3)
    client.begin(orders).abort()
    grow(client, orders)
    with client.transactions(scope_of(orders), follow=False) as reader:
        found = [(transaction, list(transaction.records())) for transaction in reader]
    assert [transaction.id for transaction, _ in found[:5]] == ids
    assert [transaction.label for transaction, _ in found[:5]] == [f"t{number}" for number in range(5)]
    orders_of = [transaction.order for transaction, _ in found]
    assert orders_of == sorted(set(orders_of))
    for number, (transaction, records) in enumerate(found[:5]):
        assert transaction.counts() == {orders: 4, payments: 4}
        assert [record.value for record in records] == [b"%d-%d" % (number, place) for place in range(len(KEYS))]
        assert [record.local_sequence for record in records] == list(range(len(KEYS)))
        assert {record.commit_position for record in records} == {transaction.order}
        assert {record.transaction_id for record in records} == {transaction.id}
        assert {record.stream for record in records} == {orders, payments}
        assert all(record.sn is not None and record.sn.sequence_id is not None for record in records)
    assert [record.value for _, records in found[5:] for record in records] == [
        value for value in (b"before", b"scaled", b"rolled", b"after") for _ in KEYS
    ]


def test_positions_following_and_records_that_are_left_out(client: rollbridge.Bridge, orders: str) -> None:
    scope = scope_of(orders)
    grow(client, orders)
    with client.transactions(scope, follow=False) as reader:
        first = list(islice(reader, 2))
        position = reader.position
    assert position == first[-1].position
    with client.transactions(scope, start=str(position), follow=False) as reader:
        rest = list(reader)
        assert [record.value for record in rest[-1].records()] == [b"after"] * len(KEYS)  # those between are left out
        assert [record.value for record in rest[0].records()] == [b"rolled"] * len(KEYS)  # and gone back to
    assert len(rest) == 2
    with client.transactions(scope, start="latest") as reader:
        with client.transaction(orders) as txn:
            txn.write(orders, key=b"k", value=b"followed")
        transaction = next(iter(reader))
        assert transaction.id == txn.id
        assert [record.value for record in transaction.records()] == [b"followed"]
    with client.transactions(scope, start=datetime(2100, 1, 1, tzinfo=UTC), follow=False) as reader:
        assert list(reader) == []


@pytest.mark.parametrize("follow", [True, False])
def test_a_loop_that_is_left_and_entered_again_skips_nothing(
    client: rollbridge.Bridge, orders: str, follow: bool
) -> None:
    ids = []
    for number in range(30):
        with client.transaction(orders) as transaction:
            transaction.write(orders, key=b"k", value=b"%d" % number)
        ids.append(transaction.id)
    found: list[rollbridge.TransactionId] = []
    positions = []
    with client.transactions(scope_of(orders), follow=follow) as reader:
        while len(found) < len(ids):
            for committed in reader:
                assert committed.id == ids[len(found)]
                found.append(committed.id)
                positions.append(reader.position)
                if len(found) % 7 == 0 or len(found) == len(ids):
                    break
    assert found == ids
    with client.transactions(scope_of(orders), start=positions[6], follow=False) as later:
        assert [transaction.id for transaction in later] == ids[7:]


def test_a_large_transaction_is_read_in_small_pieces(client: rollbridge.Bridge, orders: str, payments: str) -> None:
    count = 30_000
    with client.transaction(orders, payments) as txn:
        for number in range(count):
            # All of one stream, then all of the other: what is not needed yet has to wait at the broker.
            txn.write((orders, payments)[number >= count // 2], key=b"%d" % number, value=b"x" * 50)
    with client.transactions(scope_of(orders), follow=False) as reader:
        [transaction] = reader
        held = 0
        for number, record in enumerate(transaction.records()):
            assert record.local_sequence == number
            if number % 1000 == 0:
                held = max(held, transaction.held)
    assert number == count - 1
    assert 0 < held < count // 2


def test_places_that_can_not_be_begun_at(client: rollbridge.Bridge, orders: str, site: Site) -> None:
    scope = scope_of(orders)
    with client.transaction(orders) as txn:
        txn.write(orders, key=b"k", value=b"x")
    for wrong in ("soon", f"{scope}/default@", "other/default@0", f"{scope}/default@99999", -1):
        with pytest.raises(InvalidRequestError):
            client.transactions(scope, start=wrong)
    with pytest.raises(InvalidNameError):
        client.transactions("a.b")
    with pytest.raises(NotFoundError, match="no transaction group"):
        client.transactions(scope, group="nothing")
    with client.transactions(scope, follow=False) as reader:
        [transaction] = reader
        segment = next(transaction.control.segments())[1]
        topic = StreamName.parse(orders).segment_topic(segment)
        KafkaClient(site.cluster.bootstrap_servers).topics.delete_records({topic: 1})
        with pytest.raises(TruncatedError):
            list(transaction.records())
