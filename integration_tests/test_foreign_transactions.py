"""Native transactions of other Kafka clients that stay open on a segment which is to be sealed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, Producer

import bridge
from bridge.errors import StreamBusy
from bridge.model.epochs import EpochRecord
from bridge.model.names import StreamName
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site, until

WAIT = {"ROLLBRIDGE_COORDINATOR_SCALE_WAIT_MS": "3000"}


def test_a_scale_waits_for_a_foreign_transaction_without_holding_up_others_and_can_abort_it(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    scope = unique_name("foreign")
    orders, payments = StreamName(scope, "orders"), StreamName(scope, "payments")
    with (
        Site(cluster, f"/{scope}", tmp_path, **WAIT) as site,
        site.connect(options=bridge.ClientOptions(admin_timeout_s=60)) as b,
        ThreadPoolExecutor(1) as pool,
    ):
        for stream in (orders, payments):
            b.admin.create_stream(str(stream))
        [segment] = b.admin.history(str(orders)).active.segments
        name = f"{scope}-foreign"
        foreign = Producer({"bootstrap.servers": cluster.bootstrap_servers, "transactional.id": name})
        foreign.init_transactions(60)
        foreign.begin_transaction()
        foreign.produce(orders.segment_topic(segment.id), b"foreign")
        foreign.flush(60)

        done = threading.Event()

        def scale(**options: bool) -> EpochRecord:
            try:
                return b.admin.scale(str(orders), seal=[0], ranges=[(0.0, 0.5), (0.5, 1.0)], **options)
            finally:
                done.set()

        asked = pool.submit(scale)
        commits = 0
        while not done.is_set():
            for stream in (orders, payments):  # the segment that is to be sealed takes records, too
                with b.transaction(str(stream)) as txn:
                    txn.write(str(stream), key=b"k", value=b"v")
            commits += 1
        assert commits > 2, "others went on while the scale waited; held up, it would be one"
        with pytest.raises(StreamBusy, match=rf"transactional id {name}, open on .* since offset 0.*--abort-foreign"):
            asked.result()
        assert len(b.admin.history(str(orders)).records) == 1

        record = scale(abort_foreign=True)
        assert record.epoch == 1
        with pytest.raises(KafkaException):
            foreign.commit_transaction(60)
        with b.reader(str(orders), follow=False) as reader:
            assert b"foreign" not in [item.value for item in reader]


def test_a_rolling_commit_waits_for_a_foreign_transaction_without_holding_up_others(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    scope = unique_name("foreign")
    orders, payments = StreamName(scope, "orders"), StreamName(scope, "payments")
    with Site(cluster, f"/{scope}", tmp_path) as site, site.connect() as b, site.connect() as other:
        for stream in (orders, payments):
            b.admin.create_stream(str(stream))
        old = b.begin(str(orders))
        old.write(str(orders), key=b"k", value=b"old")
        active = b.admin.scale(str(orders), seal=[0], ranges=[(0.0, 0.5), (0.5, 1.0)])
        name = f"{scope}-foreign"
        foreign = Producer({"bootstrap.servers": cluster.bootstrap_servers, "transactional.id": name})
        foreign.init_transactions(60)
        foreign.begin_transaction()
        foreign.produce(orders.segment_topic(active.segments[0].id), b"foreign")
        foreign.flush(60)

        waiting = old.commit_async()
        log = tmp_path / "coordinator-1.log"
        until(lambda: f"transactional id {name}, open on" in log.read_text())
        later = b.begin(str(payments))  # of the same connection, whose commits keep their order
        later.write(str(payments), key=b"k", value=b"later")
        behind = later.commit_async()
        for number in range(20):
            for stream in (orders, payments):
                with other.transaction(str(stream)) as txn:
                    txn.write(str(stream), key=b"k", value=b"%d" % number)
        assert not waiting.done()
        assert not behind.done()
        assert [record.cause.value for record in b.admin.history(str(orders)).records] == ["create", "scale"]
        assert log.read_text().count("waits for native transactions of others") == 1, "one line a minute"

        foreign.commit_transaction(60)
        waiting.result(60)
        behind.result(60)
        causes = [record.cause.value for record in b.admin.history(str(orders)).records]
        assert causes == ["create", "scale", "rolling-transactions", "rolling-active"]
        with b.reader(str(orders), follow=False) as reader:
            values = [item.value for item in reader]
        assert values.count(b"old") == 1
        assert values[-1] == b"old", "it became visible after what was committed while it waited"
