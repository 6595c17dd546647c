"""What is closed or dropped leaves no thread, no descriptor and nobody who waits for ever."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import rollbridge
from integration_tests.clients import Site
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.consumer.reader import IsolationLevel
from rollbridge.errors import InvalidRequestError


def held() -> tuple[int, int]:
    """Threads of this process, librdkafka's included, and descriptors that are open."""
    return len(list(Path("/proc/self/task").iterdir())), len(os.listdir("/proc/self/fd"))


def gone(before: tuple[int, int]) -> Callable[[], bool]:
    def are_gone() -> bool:
        gc.collect()
        now = held()
        return now[0] <= before[0] and now[1] <= before[1]

    return are_gone


def below(before: tuple[int, int], during: tuple[int, int]) -> tuple[int, int]:
    """Return what is held once some of ``during`` is gone: what there was ``before``, or less if that goes, too."""
    return min(before[0], during[0] - 1), min(before[1], during[1] - 1)


def use(client: rollbridge.Bridge, stream: str) -> None:
    """Make it start all that it has."""
    with client.transaction(stream) as txn:
        txn.write(stream, key=b"k", value=b"transactional")
    with client.writer(stream) as writer:
        writer.write(b"k", b"plain")
    with client.cas_writer(stream) as cas:
        cas.write(b"k", b"conditional", expected=rollbridge.ANY)
    client.client("another-name").begin(stream).abort()
    assert client.reader(stream).poll(PATIENCE_S) is not None
    assert next(iter(client.transactions(stream.partition("/")[0]))) is not None


def test_a_dropped_connection_leaves_nothing(
    site: Site, client: rollbridge.Bridge, orders: str, caplog: pytest.LogCaptureFixture
) -> None:
    use(client, orders)
    with site.connect("warm") as warm:  # what a process makes once
        use(warm, orders)
    eventually(lambda: gc.collect() == 0, "there is no garbage")
    before = held()
    dropped = site.connect("dropped")
    use(dropped, orders)
    during = held()
    del dropped
    eventually(gone(below(before, during)), "its threads and descriptors are gone")
    assert "connection.dropped client=dropped" in caplog.text


def test_a_connection_that_is_dropped_with_a_transaction_open_goes_once_that_has_ended(
    site: Site, client: rollbridge.Bridge, orders: str
) -> None:
    use(client, orders)
    with site.connect("warm") as warm:
        use(warm, orders)
    eventually(lambda: gc.collect() == 0, "there is no garbage")
    before = held()
    dropped = site.connect("dropped")
    txn = dropped.begin(orders)
    txn.write(orders, key=b"k", value=b"v")
    txn.flush()
    name = txn.id
    eventually(lambda: any(item.id == name for item in client.admin.transactions()), "it is on record")
    del dropped, txn
    client.admin.abort_transaction(name)
    eventually(gone(before), "its threads and descriptors are gone")


def test_what_a_connection_has_made_keeps_it(site: Site, orders: str) -> None:
    writer, cas = site.connect("a").writer(orders), site.connect("b").cas_writer(orders)
    txn, admin = site.connect("c").begin(orders), site.connect("d").admin
    gc.collect()
    assert writer.write(b"k", b"v").result(PATIENCE_S) is not None
    assert cas.write(b"k", b"v", expected=rollbridge.ANY) is not None
    txn.write(orders, key=b"k", value=b"v")
    assert txn.commit(timeout=PATIENCE_S).records == 1
    assert admin.describe(orders).partitions


def test_who_administers_by_a_closed_connection_is_told_so(site: Site, orders: str) -> None:
    """And not that ZooKeeper does not answer, which would be worth another try."""
    b = site.connect("closed")
    admin = b.admin
    b.close()
    calls: list[Callable[[], object]] = [
        admin.list_streams,
        admin.transactions,
        lambda: admin.describe(orders),
        lambda: admin.history(orders),
        lambda: admin.create_stream(orders, exist_ok=True),
        lambda: admin.adopt_topic("orders"),
    ]
    for call in calls:
        with pytest.raises(InvalidRequestError, match="this connection is closed; connect again"):
            call()


def test_a_dropped_consumer_leaves_nothing(
    site: Site, client: rollbridge.Bridge, orders: str, unique_name: Callable[[str], str]
) -> None:
    use(client, orders)
    config = {
        "bootstrap.servers": site.cluster.bootstrap_servers,
        "zookeeper": site.cluster.zookeeper,
        "zookeeper.root": site.root,
        "auto.offset.reset": "earliest",
    }

    def consumer() -> rollbridge.Consumer:
        made = rollbridge.Consumer({**config, "group.id": unique_name("group")})
        made.subscribe([orders])
        eventually(lambda: made.poll(0.5), "it reads")
        return made

    consumer().close()
    eventually(lambda: gc.collect() == 0, "there is no garbage")
    before = held()
    dropped = consumer()
    during = held()
    del dropped
    eventually(gone(below(before, during)), "its threads and descriptors are gone")


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_readers_end_with_their_connection(site: Site, orders: str, isolation: IsolationLevel) -> None:
    """They hand out what they have, and then say so, on whatever thread."""
    b = site.connect("closing")
    with b.transaction(orders) as txn:
        for number in range(10):
            txn.write(orders, key=b"k", value=b"%d" % number)
    raised: list[InvalidRequestError] = []
    seen: list[object] = []

    def read(reader: rollbridge.Reader | rollbridge.TransactionReader) -> None:
        try:
            for item in reader:
                seen.append(item)
        except InvalidRequestError as fault:
            raised.append(fault)

    reader = b.reader(orders, isolation=isolation)
    transactions = b.transactions(orders.partition("/")[0])
    threads = [threading.Thread(target=read, args=(item,)) for item in (reader, transactions)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(seen) == 11, "all was read")
    b.close()
    eventually(lambda: not any(thread.is_alive() for thread in threads), "the readers have ended")
    assert all("its connection, was closed" in str(fault) for fault in raised)
    assert len(raised) == 2
    with pytest.raises(InvalidRequestError, match="closed"):
        reader.poll(1.0)
    reader.close()
    transactions.close()
