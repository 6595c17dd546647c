"""Outcomes that are asked for again: from the same object, another process, after crashes; fences; resumed ones."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import rollbridge
from bridge.tests.refusals import raises_code
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site, read_committed, until
from integration_tests.coordinators import coordinator
from integration_tests.patience import PATIENCE_S
from rollbridge.base.ids import TransactionId
from rollbridge.base.logs import LIMITER
from rollbridge.commitlog.control import ControlRecord, decode_control
from rollbridge.errors import (
    ClientFencedError,
    CoordinatorUnavailableError,
    InvalidRequestError,
    NotFoundError,
    OutcomeExpiredError,
    OutcomeUnknownError,
    TransactionCommittedError,
    TransactionNotFoundError,
    TransactionPreserverClosedError,
)
from rollbridge.metadata import paths
from rollbridge.metadata.records import Group
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.names import GroupName

WORKER = """
import sys, rollbridge
servers, zookeeper, root, stream = sys.argv[1:]
b = rollbridge.connect(servers, zookeeper=zookeeper, zookeeper_root=root, client_name="worker")
txn = b.begin(stream, label="nightly")
for number in range(30):
    txn.write(stream, key=b"k%d" % number, value=b"early-%d" % number)
txn.flush()
print(txn.id, flush=True)
if sys.stdin.readline() == "commit\\n":
    future = txn.commit_async()
    assert b._sender.wait_until(lambda: b._sender.bytes == 0, 120)
print("sent", flush=True)
sys.stdin.readline()
"""


class Worker:
    """A process named ``worker`` with a transaction of 30 records, which is killed."""

    def __init__(self, site: Site, stream: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, site.cluster.bootstrap_servers, site.cluster.zookeeper, site.root, stream],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.transaction = self._line()

    def tell(self, word: str) -> None:
        """Have it commit, or not, and wait until the brokers have what it sent."""
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        assert self._line() == "sent"

    def kill(self) -> None:
        """Kill it."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=120)  # closes the pipes, too

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def work(site: Site, ledger: str) -> Iterator[Worker]:
    """A worker that has flushed what it wrote."""
    worker = Worker(site, ledger)
    yield worker
    if worker.process.poll() is None:
        worker.kill()


def write(txn: rollbridge.Transaction, stream: str, *values: str) -> None:
    for value in values:
        txn.write(stream, key=value.encode(), value=value.encode())


def values_of(site: Site, stream: str) -> list[str]:
    return [(message.value() or b"").decode() for message in site.committed(stream)]


def test_a_commit_gives_the_same_answer_from_wherever_it_is_asked_for(
    site: Site, client: rollbridge.Bridge, ledger: str
) -> None:
    txn = client.begin(ledger, label="a")
    write(txn, ledger, "one", "two")
    first = txn.commit()
    assert txn.commit() == first
    assert client.resume(txn.id).commit() == first
    with site.connect() as other:
        again = other.resume(str(txn.id)).commit()
        assert (again, again.records) == (first, 2)
        found = other.outcome(txn.id)
        assert (found.committed, found.position, found.records, found.label) == (True, first.position, 2, "a")
        assert found == other.outcome(label="a", client="tester") == client.outcome(label="a")
        assert found == other.outcome(txn.id, client="tester"), "and not that of another client with the same id"
        for ask in other.outcome, other.resume:
            with pytest.raises(OutcomeExpiredError, match="is one of client 'tester'"):
                ask(txn.id, client="somebody-else")
        with raises_code("already-committed"):
            other.resume(txn.id).abort()
    with raises_code("already-committed"):
        txn.abort()
    assert values_of(site, ledger) == ["one", "two"]


def test_an_abort_by_id_of_what_has_ended_is_answered_by_its_outcome(
    site: Site, client: rollbridge.Bridge, ledger: str
) -> None:
    kept, gone, young = (client.begin(ledger) for _ in range(3))
    for txn in kept, gone, young:
        write(txn, ledger, "value")
    kept.commit()
    gone.abort("a change of mind")
    with site.connect() as other:
        for group in None, other.admin.describe(ledger).config.group:
            with raises_code("already-committed") as refused:
                other.admin.abort_transaction(kept.id, group=group)
            assert isinstance(refused.value, TransactionCommittedError)
            assert refused.value.transaction == str(kept.id)
            for _ in range(2):
                assert other.admin.abort_transaction(gone.id, reason="again", group=group) == "a change of mind"
            with pytest.raises(TransactionNotFoundError):
                other.admin.abort_transaction(TransactionId.of(0, 1 << 90), group=group)
        # It has no record yet, and its leader may not have read of it.
        assert other.admin.abort_transaction(young.id, reason="too young") == "too young"
    with raises_code("already-aborted", match="too young"):
        young.commit()


def test_an_abort_gives_the_same_answer_and_a_commit_is_refused(
    site: Site, client: rollbridge.Bridge, ledger: str
) -> None:
    txn = client.begin(ledger)
    write(txn, ledger, "gone")
    txn.abort("a change of mind")
    txn.abort()
    with raises_code("already-aborted", match="a change of mind"):
        txn.commit()
    with site.connect() as other:
        found = other.outcome(txn.id)
        assert (found.aborted, found.reason) == (True, "a change of mind")
        assert found.position is not None
        other.resume(txn.id).abort()
        with raises_code("already-aborted", match="a change of mind"):
            other.resume(txn.id).commit()
        late = client.begin(ledger, timeout=timedelta(milliseconds=1))
        late.flush()
        until(lambda: other.outcome(late.id).aborted)
        with raises_code("transaction-expired"):
            late.commit()
        with raises_code("transaction-expired"):
            other.resume(late.id).commit()
    assert values_of(site, ledger) == []


def test_what_is_unknown_forgotten_or_badly_asked_for_is_told_apart(client: rollbridge.Bridge, ledger: str) -> None:
    group = GroupName(ledger.split("/")[0])
    unknown = TransactionId.of(0, 1 << 90)
    with pytest.raises(TransactionNotFoundError):
        client.outcome(unknown)
    with pytest.raises(TransactionNotFoundError):
        client.outcome(label="no such thing", group=group)
    with pytest.raises(TransactionNotFoundError):
        client.resume(unknown)
    with pytest.raises(NotFoundError, match="no transaction group"):
        client.outcome(unknown, group="no-such/group")
    unkept = client.begin(ledger, label="unkept", retain=timedelta(0))
    unkept.commit()
    with pytest.raises(OutcomeExpiredError):
        client.outcome(unkept.id)
    with pytest.raises(OutcomeExpiredError):
        client.outcome(label="unkept", group=group)
    with pytest.raises(TransactionNotFoundError):
        client.outcome(unkept.id, client="somebody-else", group=group)
    for wrong in ({}, {"transaction": unkept.id, "label": "x"}, {"transaction": "nonsense"}):
        with pytest.raises(InvalidRequestError):
            client.outcome(**wrong)
    with raises_code("invalid-timeout"):
        client.begin(ledger, retain=timedelta(seconds=-1))
    open_one = client.begin(ledger, label="open")
    open_one.flush()
    found = client.outcome(open_one.id)
    assert (found.state, found.position) == ("open", None)
    assert open_one.id in [item.transaction for item in client.unfinished(group=group)]
    open_one.abort()
    assert client.unfinished(group=group) == []


def test_a_process_that_was_killed_after_its_commit_was_sent_learns_the_outcome(
    site: Site, work: Worker, ledger: str
) -> None:
    work.tell("commit")
    work.kill()
    with site.connect("worker") as again:
        assert again.unfinished() == []
        found = again.outcome(label="nightly")
        assert (str(found.transaction), found.committed, found.records) == (work.transaction, True, 30)
        assert again.resume(work.transaction).commit().position == found.position
    assert len(values_of(site, ledger)) == 30


def test_the_next_process_goes_on_with_what_a_killed_one_had_flushed(site: Site, work: Worker, ledger: str) -> None:
    work.kill()
    with site.connect("worker") as again:
        [left] = again.unfinished()
        assert (str(left.transaction), left.records, left.label) == (work.transaction, 30, "nightly")
        txn = again.resume(left.transaction)
        assert txn.earlier_records == {ledger: 30}
        write(txn, ledger, "late-1", "late-2")
        txn.flush()
        with site.connect("worker") as third:  # it begins nothing, so it fences nobody
            assert third.outcome(txn.id).records == 32
        result = txn.commit()
        assert result.records == 32
        assert again.outcome(txn.id).position == result.position
    assert values_of(site, ledger) == [f"early-{number}" for number in range(30)] + ["late-1", "late-2"]


def test_a_newer_session_fences_the_older_one_and_only_it(site: Site, orders: str, ledger: str) -> None:
    with site.connect("twin") as old, site.connect("other") as bystander, site.connect("twin") as new:
        kept, lost = old.begin(orders, ledger), old.begin(ledger)
        write(kept, orders, "kept")
        write(kept, ledger, "kept")
        write(lost, ledger, "lost")
        kept.flush()
        lost.flush()
        beside = bystander.begin(ledger)
        write(beside, ledger, "beside")
        assert {item.transaction for item in new.unfinished()} == {kept.id, lost.id}
        with pytest.raises(ClientFencedError):
            lost.commit()
        until(lambda: old._sessions.fenced)
        with pytest.raises(ClientFencedError):
            old.begin(ledger)
        resumed = new.resume(kept.id)
        with pytest.raises(ClientFencedError):
            kept.commit()
        write(resumed, ledger, "more")
        assert resumed.commit().records == 3
        with pytest.raises(ClientFencedError):
            kept.abort()
        assert beside.commit().records == 1
        assert new.outcome(lost.id).state == "open"
        new.resume(lost.id).abort()
    assert sorted(values_of(site, ledger)) == ["beside", "kept", "more"]
    assert values_of(site, orders) == ["kept"]


def test_connections_without_a_name_of_their_own_do_not_fence_each_other(site: Site, ledger: str) -> None:
    with site.connect() as one, site.connect() as two:
        first, second = one.begin(ledger), two.begin(ledger)
        third = one.begin(ledger)
        for txn in (first, second, third):
            write(txn, ledger, "x")
            txn.commit()
    with ZooKeeperSession(site.cluster.zookeeper, root=site.root) as session:
        assert session.children(paths.sessions(GroupName(ledger.split("/")[0]))) == [], "and cost no write"


def test_whoever_resumes_a_transaction_has_the_say_whatever_its_name(
    site: Site, client: rollbridge.Bridge, ledger: str
) -> None:
    txn = client.begin(ledger)
    write(txn, ledger, "early")
    txn.flush()
    with site.connect("heir") as heir:
        resumed = heir.resume(txn.id)
        write(txn, ledger, "too late")
        pending = txn.commit_async()
        write(resumed, ledger, "late")
        assert resumed.commit().records == 2
        with pytest.raises(ClientFencedError):
            pending.result(120)
        assert heir.outcome(txn.id).client_name == "tester"
    with client.transaction(ledger) as after:
        write(after, ledger, "after")
    assert values_of(site, ledger) == ["early", "late", "after"]


@pytest.mark.long
def test_a_commit_that_nobody_carries_out_is_unknown_and_another_process_asks_by_its_label(
    cluster: AnyCluster,
    unique_name: Callable[[str], str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LIMITER, "_causes", {})  # another test may have had the same told a moment ago
    root, stream = f"/{unique_name('outcome')}", f"{unique_name('scope')}/orders"
    with Site(cluster, root, tmp_path) as site, site.connect("asker") as asker, site.connect("reader") as reader:
        asker.admin.create_stream(stream)
        with asker.transaction(stream) as before:
            write(before, stream, "before")
        site.stop_coordinator()
        txn = asker.begin(stream, label="orphan")
        write(txn, stream, "orphan")

        def is_told() -> bool:
            with pytest.raises(OutcomeUnknownError) as caught:
                txn.commit(timeout=3)
            assert caught.value.transaction == str(txn.id)
            return "no coordinator" in str(caught.value) and "no coordinator is running" in caplog.text

        until(is_told)
        assert "transaction.waits end=commit: " in caplog.text
        with pytest.raises(CoordinatorUnavailableError):
            reader.outcome(txn.id, timeout=3)
        answers: list[rollbridge.Outcome] = []
        asking = threading.Thread(target=lambda: answers.append(reader.outcome(label="orphan", client="asker")))
        asking.start()
        site.start_coordinator()
        asking.join(PATIENCE_S)
        assert [(item.transaction, item.committed) for item in answers] == [(txn.id, True)]
        assert txn.commit().position == answers[0].position
        site.stop_coordinator()
        with coordinator(cluster, root, "closed", tmp_path, ROLLBRIDGE_COORDINATOR_TRANSACTION_META_PERSIST_COUNT="0"):
            with pytest.raises(TransactionPreserverClosedError) as closed:
                reader.outcome(txn.id)
            assert closed.value.status_code == 26
            meanwhile = asker.begin(stream)
            assert meanwhile.commit().records == 0
        site.start_coordinator()
        assert reader.outcome(txn.id).position == answers[0].position
        with pytest.raises(OutcomeExpiredError):
            reader.outcome(meanwhile.id)
        assert Group.from_json(site_group(site, stream)).terminated_topic_id


def log_of(site: Site, stream: str) -> list[ControlRecord]:
    """The commit log of a stream's group."""
    topic = GroupName(stream.split("/")[0]).commit_log_topic
    messages = read_committed(site.cluster.bootstrap_servers, [topic])
    return [decode_control(message.key(), message.value()) for message in messages]


def site_group(site: Site, stream: str) -> bytes:
    """The group's record."""
    with ZooKeeperSession(site.cluster.zookeeper, root=site.root) as session:
        node = session.get(paths.group(GroupName(stream.split("/")[0])))
    assert node is not None
    return node.value
