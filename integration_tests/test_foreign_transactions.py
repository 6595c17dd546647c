"""Native transactions of other Kafka clients that stay open on segments which are to be sealed.

Some are open before a leader looks for them. Others begin between its look and the moment in which it closes what they
write to: those tests stop a leader right there, or let it die there.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, Producer

import rollbridge
from bridge.tests.refusals import raises_code
from integration_tests.backends.interface import AnyCluster
from integration_tests.coordinators import coordinator
from integration_tests.crashing import STOP_AT
from integration_tests.patience import PATIENCE_S, eventually
from integration_tests.pauses import is_stopped
from rollbridge.doctor.checks import parts
from rollbridge.doctor.facts import gather
from rollbridge.errors import StreamNotFoundError, TransactionAbortedError
from rollbridge.metadata.changes import SUSPENDED
from rollbridge.stream.epochs import EpochRecord
from rollbridge.stream.keyspace import KeySpace
from rollbridge.stream.names import StreamName
from rollbridge.stream.segment_graph import Segment

KEY = b"k"
OPTIONS = rollbridge.ClientOptions(admin_timeout_s=PATIENCE_S)


class Stage:
    """Two streams of a group, ``orders``, which is going to be held, and ``payments``, which must not be."""

    def __init__(self, cluster: AnyCluster, scope: str, logs: Path) -> None:
        self.cluster, self.root, self.logs = cluster, f"/{scope}", logs
        self.orders, self.payments = StreamName(scope, "orders"), StreamName(scope, "payments")
        self.foreign_id = f"{scope}-foreign"
        self._stack = ExitStack()
        self._pool = self._stack.enter_context(ThreadPoolExecutor(2))
        self.b, self.other = (self._stack.enter_context(self._connect()) for _ in range(2))
        self.foreign = Producer({"bootstrap.servers": cluster.bootstrap_servers, "transactional.id": self.foreign_id})

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _connect(self) -> rollbridge.Bridge:
        return rollbridge.connect(
            self.cluster.bootstrap_servers,
            zookeeper=self.cluster.zookeeper,
            zookeeper_root=self.root,
            options=OPTIONS,
        )

    def create(self) -> None:
        for stream in (self.orders, self.payments):
            self.b.admin.create_stream(str(stream))
        self.foreign.init_transactions(PATIENCE_S)

    def begin_foreign(self, *streams: StreamName) -> None:
        """Open a native transaction on the active segment that all records of these tests go to."""
        self.foreign.begin_transaction()
        for stream in streams or (self.orders,):
            segment = self.segment(stream)
            self.foreign.produce(stream.segment_topic(segment.id), b"foreign", on_delivery=raise_error)
        self.foreign.flush(PATIENCE_S)

    def segment(self, stream: StreamName) -> Segment:
        """The active segment of ``KEY``."""
        return self.b.admin.history(str(stream)).active.segment_at(KeySpace().position(KEY))

    def scale(self, stream: StreamName, **options: bool) -> Future[EpochRecord]:
        """Ask for the active segment that all records of these tests go to to be split."""
        first = self.segment(stream)
        low, high = first.range.low, first.range.high
        ranges = [(low, (low + high) / 2), ((low + high) / 2, high)]

        def ask() -> EpochRecord:
            return self.b.admin.scale(str(stream), seal=[first.id.number], ranges=ranges, **options)

        return self._pool.submit(ask)

    def log_of(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def await_log(self, name: str, pattern: str) -> None:
        eventually(lambda: re.search(pattern, self.log_of(name)), f"{name} logs {pattern!r}")

    def fault(self, stream: StreamName) -> str:
        found = self.b.admin.describe(str(stream)).fault
        return "" if found is None or found.code != SUSPENDED else found.reason

    def await_suspended(self, what: str) -> None:
        eventually(lambda: self.fault(self.orders), f"{what} is left half done")
        assert what in self.fault(self.orders)
        eventually(
            lambda: f"transactional id {self.foreign_id}, open on" in self.fault(self.orders), "it says for whom"
        )

    def commit(self, stream: StreamName, *values: bytes) -> None:
        """Commit a transaction for each value, on a connection of its own, one after the other."""
        for value in values:
            with self.other.transaction(str(stream)) as txn:
                txn.write(str(stream), key=KEY, value=value)

    def commit_others(self) -> None:
        """Commits of the stream that nobody holds, and a scale and a rolling commit of it, go on while it is held."""
        before = self.fault(self.orders)
        assert before
        old = self.other.begin(str(self.payments))
        old.write(str(self.payments), key=KEY, value=b"old")
        self.commit(self.payments, *(b"%d" % number for number in range(20)))
        self.scale(self.payments).result(PATIENCE_S)
        old.commit(timeout=PATIENCE_S)
        self.commit(self.payments, b"after")
        causes = [record.cause.value for record in self.b.admin.history(str(self.payments)).records]
        assert causes[-2:] == ["rolling-transactions", "rolling-active"]
        assert self.fault(self.orders), "all of that happened while it was held"

    def values(self, stream: StreamName) -> list[bytes | None]:
        with self.b.reader(str(stream), follow=False) as reader:
            return [item.value for item in reader]

    @contextmanager
    def leader(self, name: str, **environment: str) -> Iterator[int]:
        with coordinator(self.cluster, self.root, name, self.logs, **environment) as process:
            self.process = process
            yield process.pid

    def await_stop(self) -> None:
        eventually(lambda: is_stopped(self.process), "it stands still before the seal")

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


def raise_error(error: object, _: object) -> None:
    """Fail the test if a record was not taken."""
    assert error is None, error


@pytest.fixture
def stage(cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path) -> Iterator[Stage]:
    with Stage(cluster, unique_name("between"), tmp_path) as made:
        yield made


def test_a_scale_waits_without_holding_up_others_and_is_refused_after_a_bound_or_ends_them(stage: Stage) -> None:
    orders = str(stage.orders)
    with stage.leader("first", CONSTANT_SCALE_WAIT_MS=str(int(PATIENCE_S * 1000))):
        stage.create()
        stage.begin_foreign()
        asked = stage.scale(stage.orders)
        stage.await_log("first", 'change="the scale of .*" for="native transactions of others')
        for number in range(20):
            for stream in (stage.orders, stage.payments):  # the segment that is to be sealed takes records, too
                stage.commit(stream, b"%d" % number)
        assert not asked.done()
        assert stage.log_of("first").count('for="native transactions of others') == 1, "one line a minute"
    with stage.leader("second", CONSTANT_SCALE_WAIT_MS="500"):
        who = rf"transactional id {stage.foreign_id}, open on .* since offset 0.*--abort-foreign"
        with raises_code("stream-busy", match=who):
            asked.result(PATIENCE_S)
        assert len(stage.b.admin.history(orders).records) == 1
        assert stage.scale(stage.orders, abort_foreign=True).result(PATIENCE_S).epoch == 1
        with pytest.raises(KafkaException):
            stage.foreign.commit_transaction(PATIENCE_S)
        assert b"foreign" not in stage.values(stage.orders)


def test_a_rolling_commit_waits_without_holding_up_others_unless_it_is_aborted(stage: Stage) -> None:
    orders, payments = str(stage.orders), str(stage.payments)
    with stage.leader("first"):
        stage.create()
        old, behind, unwanted = stage.b.begin(orders), stage.b.begin(payments), stage.b.begin(orders)
        old.write(orders, key=KEY, value=b"old")
        behind.write(payments, key=KEY, value=b"behind")
        unwanted.write(orders, key=KEY, value=b"unwanted")
        stage.scale(stage.orders).result(PATIENCE_S)
        stage.begin_foreign()
        answers = [txn.commit_async() for txn in (old, behind, unwanted)]  # in this order: it is one connection
        stage.await_log("first", f'change="a rolling commit of .*" for=".*transactional id {stage.foreign_id}, open on')
        for number in range(20):
            for stream in (stage.orders, stage.payments):
                stage.commit(stream, b"%d" % number)
        assert not any(answer.done() for answer in answers)
        assert [record.cause.value for record in stage.b.admin.history(orders).records] == ["create", "scale"]
        assert stage.log_of("first").count('for="native transactions of others') == 1, "one line a minute"
        eventually(lambda: len(stage.b.admin.transactions()) == 3, "those that wait are on record")
        stage.b.admin.abort_transaction(unwanted.id, reason="unwanted")
        with pytest.raises(TransactionAbortedError, match=r"unwanted; it waited for (native|transaction .* of its)"):
            answers[2].result(PATIENCE_S)

        stage.foreign.commit_transaction(PATIENCE_S)
        for answer in answers[:2]:
            answer.result(PATIENCE_S)
        causes = [record.cause.value for record in stage.b.admin.history(orders).records]
        assert causes == ["create", "scale", "rolling-transactions", "rolling-active"]
        values = stage.values(stage.orders)
        assert values.count(b"old") == 1
        assert values[-1] == b"old", "it became visible after what was committed while it waited"


def test_a_scale_that_meets_one_holds_its_stream_and_nobody_else(stage: Stage) -> None:
    point = {STOP_AT: "scale/Seal:before", "CONSTANT_SCALE_WAIT_MS": "4000"}
    orders = str(stage.orders)
    with stage.leader("first", **point):
        stage.create()
        stage.commit(stage.orders, b"before")
        asked = stage.scale(stage.orders)
        stage.await_stop()
        stage.begin_foreign()
        stage.go_on()
        stage.await_suspended("the scale of")
        stage.commit_others()

        waiting, unwanted = stage.b.begin(orders), stage.other.begin(orders)
        for txn, value in ((waiting, b"waited"), (unwanted, b"unwanted")):
            txn.write(orders, key=KEY, value=value)
        answers = [txn.commit_async() for txn in (waiting, unwanted)]
        plain = threading.Thread(target=write_plainly, args=(stage, b"plain"))
        plain.start()
        eventually(lambda: len(stage.b.admin.describe(orders).open_transactions) == 2, "their commits wait")
        stage.b.admin.abort_transaction(unwanted.id, reason="unwanted")
        with pytest.raises(TransactionAbortedError, match=r"unwanted; it waited for stream .* which is suspended"):
            answers[1].result(PATIENCE_S)

        with raises_code(
            "stream-busy", match=rf"has begun, .* it waits for .*transactional id {stage.foreign_id}.*finished"
        ):
            asked.result(PATIENCE_S)  # after the bound of a scale: it is not given up
        with raises_code("stream-busy", match=r"cannot be scaled: .* has begun, .* it waits"):
            stage.scale(stage.orders).result(PATIENCE_S)
        with raises_code("stream-busy", match=r"cannot be truncated now: .* has begun, .* it waits"):
            stage.b.admin.truncate(orders, "latest")
        found = [item for item in parts(gather(stage.b.settings, stage.b._kafka)) if item.check == "stream-error"]
        assert len(found) == 1
        assert stage.foreign_id in found[0].what
        assert not answers[0].done()
        assert len(stage.b.admin.history(orders).records) == 1

        stage.foreign.commit_transaction(PATIENCE_S)
        answers[0].result(PATIENCE_S)
        plain.join(PATIENCE_S)
        eventually(lambda: not stage.fault(stage.orders), "the stream is well again")
        assert [record.cause.value for record in stage.b.admin.history(orders).records][:2] == ["create", "scale"]
        assert sorted(map(bytes, filter(None, stage.values(stage.orders)))) == [
            b"before",
            b"foreign",
            b"plain",
            b"waited",
        ]


def write_plainly(stage: Stage, value: bytes) -> None:
    """Write one record outside of any transaction."""
    with stage.other.writer(str(stage.orders)) as writer:
        writer.write(key=KEY, value=value)


def test_a_rolling_commit_that_meets_one_is_resumed_by_the_next_leader_and_ended_on_request(stage: Stage) -> None:
    orders = str(stage.orders)
    with stage.leader("first", STOP_AT="roll/Seal:before"):
        stage.create()
        old, unwanted = (stage.b.begin(orders) for _ in range(2))
        for txn, value in ((old, b"old"), (unwanted, b"unwanted")):
            txn.write(orders, key=KEY, value=value)
        stage.scale(stage.orders).result(PATIENCE_S)
        later = stage.b.begin(str(stage.payments))  # of the same connection, whose commits keep their order
        later.write(str(stage.payments), key=KEY, value=b"later")
        answers = [txn.commit_async() for txn in (old, unwanted, later)]
        stage.await_stop()
        stage.begin_foreign()
        stage.go_on()
        stage.await_suspended("a rolling commit of")
        stage.commit_others()
        stage.process.kill()
        stage.process.wait()
    with stage.leader("second"):
        stage.await_log("second", "lead.won ")
        stage.commit_others()
        stage.b.admin.abort_transaction(unwanted.id, reason="unwanted")
        with pytest.raises(TransactionAbortedError, match="unwanted; it waited"):
            answers[1].result(PATIENCE_S)
        assert not answers[0].done()
        assert not answers[2].done(), "a later one of the same connection"
        record = stage.scale(stage.orders, abort_foreign=True).result(PATIENCE_S)
        for answer in (answers[0], answers[2]):
            answer.result(PATIENCE_S)
        history = stage.b.admin.history(orders)
        assert [item.cause.value for item in history.records] == [
            "create",
            "scale",
            "rolling-transactions",
            "rolling-active",
            "scale",
        ]
        assert record.epoch == 4
        assert stage.values(stage.orders) == [b"old"]
        assert stage.values(stage.payments).count(b"later") == 1
        eventually(lambda: not stage.fault(stage.orders), "the stream is well again")


@pytest.mark.parametrize("point", ["scale/CreateTopics:after", "scale/Seal:fenced"])
def test_a_takeover_that_meets_one_in_the_middle_of_a_scale_leads_all_others(stage: Stage, point: str) -> None:
    with stage.leader("first", CRASH_AT=point):
        stage.create()
        asked = stage.scale(stage.orders)
        stage.process.wait(PATIENCE_S)
        stage.begin_foreign()
    with stage.leader("second"):
        stage.await_suspended("the scale of")
        stage.commit_others()
        stage.process.kill()
        stage.process.wait()
    with stage.leader("third"):
        stage.commit_others()
        stage.foreign.abort_transaction(PATIENCE_S)
        assert asked.result(PATIENCE_S).epoch == 1
        stage.commit(stage.orders, b"goes on")
        assert stage.values(stage.orders) == [b"goes on"]


def test_a_takeover_that_meets_one_in_the_middle_of_a_rolling_commit_leads_all_others(stage: Stage) -> None:
    orders = str(stage.orders)
    with stage.leader("first", CRASH_AT="roll/Write:after"):
        stage.create()
        old = stage.b.begin(orders)
        old.write(orders, key=KEY, value=b"old")
        stage.scale(stage.orders).result(PATIENCE_S)
        answer = old.commit_async()
        stage.process.wait(PATIENCE_S)
        stage.begin_foreign()
    with stage.leader("second"):
        stage.await_suspended("a rolling commit of")
        stage.commit_others()
        stage.foreign.abort_transaction(PATIENCE_S)
        answer.result(PATIENCE_S)
        assert stage.values(stage.orders) == [b"old"]


def test_a_stream_without_transactions_is_deleted_though_a_scale_of_it_waits(stage: Stage) -> None:
    with stage.leader("first", STOP_AT="scale/Seal:before"):
        stage.create()
        asked = stage.scale(stage.orders)
        stage.await_stop()
        stage.begin_foreign()
        stage.go_on()
        stage.await_suspended("the scale of")
        stage.b.admin.delete_stream(str(stage.orders))
        with pytest.raises(StreamNotFoundError, match="was deleted before it could be scaled"):
            asked.result(PATIENCE_S)
        stage.b.admin.create_stream(str(stage.orders))
        stage.commit(stage.orders, b"another life")
        stage.commit(stage.payments, b"untouched")
        assert stage.values(stage.orders) == [b"another life"]
