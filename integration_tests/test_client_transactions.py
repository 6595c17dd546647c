"""Transactions end to end: a client, a coordinator, and what a plain Kafka consumer sees."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site, header_of, headers_of, place_of, read_committed, until
from integration_tests.patience import PATIENCE_S
from rollbridge.base.ids import TransactionId
from rollbridge.errors import (
    CoordinatorUnavailableError,
    InvalidRequestError,
    OutcomeUnknownError,
    TransactionAbortedError,
    TransactionClosedError,
    TransactionNotFoundError,
)
from rollbridge.stream.names import StreamName


def test_a_commit_makes_everything_visible_where_the_futures_say(
    site: Site, client: rollbridge.Bridge, orders: str, payments: str
) -> None:
    transaction = client.begin(orders, payments, timeout=timedelta(days=2), label="2013-01")
    written = {}
    for number in range(300):
        stream = orders if number % 3 else payments
        key = None if number % 7 == 0 else b"key-%d" % (number % 11)
        value = None if number % 13 == 0 else b"value-%d" % number
        headers = [("n", b"%d" % number), ("none", None)] if number % 2 else []
        future = transaction.write(stream, key=key, value=value, headers=headers, timestamp=1_000_000 + number)
        written[number] = (stream, key, value, headers, future)
    assert transaction.label == "2013-01"
    assert site.committed(orders) == site.committed(payments) == []
    assert not any(future.done() for *_, future in written.values())

    result = transaction.commit()

    messages = [*site.committed(orders), *site.committed(payments)]
    assert len(messages) == 300
    by_place = {place_of(message): message for message in messages}
    for number, (stream, key, value, headers, future) in written.items():
        dlsn = future.result(0)
        message = by_place[dlsn]
        assert message.topic() == StreamName.parse(stream).segment_topic(dlsn.segment)
        assert (message.key(), message.value()) == (key, value)
        assert headers_of(message)[:-1] == headers
        assert message.timestamp()[1] == 1_000_000 + number
        assert header_of(message) == (transaction.id, number)
        assert dlsn.local_sequence == number == future.local_sequence
    assert (result.transaction, result.records) == (transaction.id, 300)
    assert (result.first, result.last) == (min(by_place), max(by_place))
    assert transaction.commit() == result


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_frames_keep_their_compression_all_the_way(
    site: Site, client: rollbridge.Bridge, orders: str, compression: str
) -> None:
    options = rollbridge.ClientOptions(compression=compression, frame_bytes=64 * 1024)
    with site.connect(options=options) as other, other.transaction(orders) as transaction:
        count = transaction.write_all(orders, ((b"k%d" % number, b"v" * 500) for number in range(1_000)))
    assert count == 1_000
    messages = site.committed(orders)
    assert sorted(header_of(message)[1] for message in messages) == list(range(1_000))
    assert {message.value() for message in messages} == {b"v" * 500}


def test_an_abort_leaves_nothing_and_all_futures_fail(site: Site, client: rollbridge.Bridge, orders: str) -> None:
    transaction = client.begin(orders)
    futures = [transaction.write(orders, key=b"k", value=b"v") for _ in range(50)]
    transaction.flush()
    transaction.abort("not wanted")
    assert site.committed(orders) == []
    for future in futures:
        with pytest.raises(TransactionAbortedError, match="not wanted"):
            future.result(0)
    with pytest.raises(TransactionAbortedError, match="not wanted"):
        transaction.commit()
    with pytest.raises(TransactionAbortedError):
        transaction.write(orders, value=b"late")
    transaction.abort()


def test_an_empty_transaction_commits(client: rollbridge.Bridge, orders: str, payments: str) -> None:
    for streams in ((orders,), (orders, payments)):
        result = client.begin(*streams).commit()
        assert (result.records, result.first, result.last) == (0, None, None)
        assert result.position >= 0


def test_a_transaction_aborted_by_an_admin_learns_why(client: rollbridge.Bridge, site: Site, orders: str) -> None:
    transaction = client.begin(orders, label="stuck")
    future = transaction.write(orders, key=b"k", value=b"v")
    with site.connect("admin") as admin:
        until(lambda: [record.label for record in admin.admin.describe(orders).open_transactions] == ["stuck"])
        found = admin.admin.find_transaction(transaction.id)
        assert (found.client_name, found.state, found.streams) == ("tester", "open", {orders: 0})
        assert transaction.id in [record.id for record in admin.admin.transactions()]
        admin.admin.abort_transaction(transaction.id, reason="stuck for days")
        with pytest.raises(TransactionNotFoundError):
            admin.admin.abort_transaction(TransactionId.of(0, 1 << 90))
    assert isinstance(future.exception(120), TransactionAbortedError)
    with pytest.raises(TransactionAbortedError, match="stuck for days"):
        transaction.write(orders, value=b"late")
    with pytest.raises(TransactionAbortedError, match="stuck for days"):
        transaction.commit()


def test_a_block_commits_and_an_exception_aborts(site: Site, client: rollbridge.Bridge, orders: str) -> None:
    with client.transaction(orders) as transaction:
        transaction.write(orders, key=b"k", value=b"kept")
    with pytest.raises(ZeroDivisionError), client.transaction(orders) as failing:
        failing.write(orders, key=b"k", value=b"%d" % (1 // 0))
    with pytest.raises(TransactionAbortedError, match="ZeroDivisionError"):
        failing.commit()
    assert [message.value() for message in site.committed(orders)] == [b"kept"]


def test_threads_share_a_client_and_a_transaction(site: Site, client: rollbridge.Bridge, orders: str) -> None:
    shared = client.begin(orders)
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def work(name: int) -> None:
        try:
            start.wait(PATIENCE_S)
            for number in range(25):
                with client.transaction(orders) as own:
                    for place in range(4):
                        own.write(orders, key=b"%d" % place, value=b"own-%d-%d" % (name, number))
                for place in range(40):
                    shared.write(orders, key=b"%d" % place, value=b"shared-%d-%d-%d" % (name, number, place))
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert failures == []
    assert shared.commit().records == shared.records == 4 * 25 * 40
    messages = site.committed(orders)
    values = [message.value() for message in messages]
    assert len(values) == 4 * 25 * (40 + 4)
    assert len(set(values)) == 4 * 25 * (40 + 1)
    counts = [local for txn, local in map(header_of, messages) if txn == shared.id]
    assert sorted(counts) == list(range(4_000)), "every local sequence number once"


def test_idle_records_become_durable_by_themselves(site: Site, orders: str) -> None:
    buffer = StreamName.parse(orders).buffer_topic()
    with site.connect(options=rollbridge.ClientOptions(linger_s=0.2)) as client:
        transaction = client.begin(orders)
        transaction.write(orders, key=b"k", value=b"idle")
        until(lambda: len(read_committed(site.cluster.bootstrap_servers, [buffer])) == 2)  # BEGIN and DATA
        transaction.abort()


def test_closing_leaves_open_transactions_open_and_says_so(
    site: Site, client: rollbridge.Bridge, orders: str, caplog: pytest.LogCaptureFixture
) -> None:
    with site.connect("gone") as other:
        transaction = other.begin(orders)
        future = transaction.write(orders, key=b"k", value=b"v")
        transaction.flush()
        until(lambda: transaction.id in [record.id for record in client.admin.transactions()])
    assert f"transaction.left_open txn={transaction.id}" in caplog.text
    assert isinstance(future.exception(0), OutcomeUnknownError)
    with pytest.raises(OutcomeUnknownError):
        transaction.commit()
    with pytest.raises(InvalidRequestError, match="closed"):
        other.begin(orders)
    other.close()
    assert transaction.id in [record.id for record in client.admin.transactions()]
    client.admin.abort_transaction(transaction.id)


@pytest.mark.long
def test_without_a_coordinator_requests_fail_and_commits_wait(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    site = Site(cluster, "/" + unique_name("lonely"), tmp_path)
    orders = unique_name("scope") + "/orders"
    options = rollbridge.ClientOptions(commit_timeout_s=3, admin_timeout_s=3)
    with site.connect(options=options) as client:
        with pytest.raises(CoordinatorUnavailableError, match="no coordinator is running"):
            client.admin.create_stream(orders)
        with site:
            client.admin.create_stream(orders, timeout_s=120)
            first = client.begin(orders)
            first.write(orders, key=b"k", value=b"v1")
            first.commit(timeout=120)
        transaction = client.begin(orders)
        future = transaction.write(orders, key=b"k", value=b"v2")
        with pytest.raises(OutcomeUnknownError, match="no coordinator is running") as unknown:
            transaction.commit()
        assert unknown.value.transaction == str(transaction.id)
        assert unknown.value.exit_code == 6
        with pytest.raises(TransactionNotFoundError):
            client.join(transaction.id, timeout=5)
        with pytest.raises(TransactionClosedError):
            transaction.write(orders, value=b"late")
        with site:
            assert transaction.commit(timeout=120).records == 1
        assert future.result(0).offset > 0
        assert [message.value() for message in site.committed(orders)] == [b"v1", b"v2"]
