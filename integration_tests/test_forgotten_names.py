"""Client names that are forgotten early: on real servers, with processes that sleep through it and leaders that die."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import patient_client, read_committed
from integration_tests.coordinators import Relay, coordinator
from integration_tests.crashing import FORGET_AFTER_MS
from integration_tests.patience import end, eventually
from integration_tests.pauses import pause
from rollbridge.client import sessions as client_sessions
from rollbridge.metadata import paths
from rollbridge.metadata.client_sessions import ClientSession, floor_of
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.names import GroupName, StreamName

EARLY = {
    FORGET_AFTER_MS: "1000",
    "CONSTANT_TRANSACTION_META_EXPIRE_CHECK_INTERVAL_IN_SECOND": "1",
}
KEPT_NOWHERE = timedelta(0)

WORKER = """
import json, sys, datetime, rollbridge
from rollbridge.errors import RollbridgeError
servers, zookeeper, root, stream = sys.argv[1:]
with rollbridge.connect(servers, zookeeper=zookeeper, zookeeper_root=root) as b:
    client = b.client("flink-7")
    for line in sys.stdin:
        try:
            with client.transaction(stream, retain=datetime.timedelta(0)) as txn:
                txn.write(stream, value=line.strip().encode())
            print(json.dumps("committed"), flush=True)
        except RollbridgeError as fault:
            print(json.dumps(type(fault).__name__), flush=True)
"""


class Group:
    """A root path with a stream; coordinators are the test's."""

    def __init__(self, cluster: AnyCluster, root: str, scope: str, logs: Path) -> None:
        self.cluster, self.root, self.logs = cluster, root, logs
        self.name = GroupName(scope)
        self.stream = f"{scope}/orders"

    def connect(self) -> rollbridge.Bridge:
        return patient_client(self.cluster, self.root)

    def values(self) -> list[bytes]:
        """What is committed, in order."""
        topic = StreamName.parse(self.stream).segment_topic(rollbridge.SegmentId.of(0, 0))
        return [message.value() or b"" for message in read_committed(self.cluster.bootstrap_servers, [topic])]

    def records(self) -> dict[str, ClientSession]:
        """The sessions on record."""
        with ZooKeeperSession(self.cluster.zookeeper, root=self.root) as session:
            names = session.children(paths.sessions(self.name))
            nodes = session.get_many([paths.session(self.name, name) for name in names])
        return {name: ClientSession.from_json(node.value) for name, node in zip(names, nodes, strict=True) if node}

    def floor(self) -> int:
        with ZooKeeperSession(self.cluster.zookeeper, root=self.root) as session:
            node = session.get(paths.sessions(self.name))
        assert node is not None
        return floor_of(node.value)

    def await_forgotten(self) -> None:
        eventually(lambda: not self.records(), "nothing is on record")

    @contextmanager
    def coordinator(self, name: str) -> Iterator[None]:
        with coordinator(self.cluster, self.root, name, self.logs, **EARLY):
            yield


class Worker:
    """A process that commits what it is told, under a name."""

    def __init__(self, group: Group) -> None:
        cluster = group.cluster
        command = [sys.executable, "-c", WORKER, cluster.bootstrap_servers, cluster.zookeeper, group.root, group.stream]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def commit(self, value: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(value + "\n")
        self.process.stdin.flush()
        answer: str = json.loads(self.process.stdout.readline())
        return answer


@pytest.fixture
def group(cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path) -> Group:
    return Group(cluster, f"/{unique_name('forgotten')}", unique_name("forgotten"), tmp_path)


@pytest.fixture
def worker(group: Group) -> Iterator[Worker]:
    found = Worker(group)
    yield found
    found.process.send_signal(signal.SIGCONT)
    for pipe in (found.process.stdin, found.process.stdout):
        assert pipe is not None
        pipe.close()
    end(found.process)


@pytest.mark.parametrize("taken_up", [True, False], ids=["taken-up", "forgotten"])
def test_a_process_that_slept_while_its_name_was_forgotten_is_over(
    group: Group, worker: Worker, taken_up: bool
) -> None:
    with group.connect() as b:
        with group.coordinator("first"):
            b.admin.create_stream(group.stream)
            assert worker.commit("early") == "committed"
            known = group.records()["flink-7"]
            pause(worker.process)
            group.await_forgotten()
            assert group.floor() >= known.epoch
            if taken_up:
                epoch = b.client("flink-7").new_session(group.name)
                assert epoch > group.floor() or group.records() == {}
                assert epoch > known.epoch
                with b.client("flink-7").transaction(group.stream, retain=KEPT_NOWHERE) as txn:
                    txn.write(group.stream, value=b"newer")
        with group.coordinator("second"):  # it has heard of none of them
            worker.process.send_signal(signal.SIGCONT)
            assert worker.commit("zombie") == "ClientFencedError"
            with b.client("another").transaction(group.stream) as txn:
                txn.write(group.stream, value=b"last")
    assert group.values() == [b"early", *([b"newer"] if taken_up else []), b"last"]


def test_a_client_that_looks_at_its_record_goes_on_whatever_was_forgotten(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_sessions, "RENEW_MS", 1)
    with group.connect() as b, group.coordinator("only"):
        b.admin.create_stream(group.stream)
        name, bystander = b.client("idle"), b.client("bystander")
        epochs = []
        for number in range(3):
            with name.transaction(group.stream, retain=KEPT_NOWHERE) as txn:
                txn.write(group.stream, value=b"%d" % number)
            epochs.append(txn._writing.plan.begin.client_epoch)
            if number < 2:
                with bystander.transaction(group.stream, retain=KEPT_NOWHERE) as txn:
                    txn.write(group.stream, value=b"beside")
                group.await_forgotten()
        assert epochs == sorted(set(epochs))
    assert group.values() == [b"0", b"beside", b"1", b"beside", b"2"]


def test_what_is_open_or_remembered_keeps_its_session(group: Group) -> None:
    with group.connect() as b, group.coordinator("only"):
        b.admin.create_stream(group.stream)
        open_one, remembered, gone = b.client("open"), b.client("remembered"), b.client("gone")
        txn = open_one.begin(group.stream)
        txn.write(group.stream, value=b"open")
        txn.flush()
        with remembered.transaction(group.stream) as kept:
            kept.write(group.stream, value=b"remembered")
        with gone.transaction(group.stream, retain=KEPT_NOWHERE) as unkept:
            unkept.write(group.stream, value=b"gone")
        eventually(lambda: "gone" not in group.records(), "what nobody needs is forgotten")
        assert group.records().keys() == {"open", "remembered"}
        assert txn.commit().records == 1
        assert b.outcome(kept.id).committed


@pytest.mark.parametrize(
    "point",
    ["forget_sessions/Write:before", "forget_sessions/Write:after", "forget_sessions/Write:before:2"],
    ids=["before-the-floor", "after-the-floor", "before-the-deletion"],
)
def test_a_leader_that_dies_in_the_middle_leaves_nobody_in_and_nobody_out(
    group: Group, worker: Worker, point: str
) -> None:
    with Relay(group.cluster, group.root, group.logs, [point], EARLY) as relay, group.connect() as b:
        b.admin.create_stream(group.stream)
        assert worker.commit("early") == "committed"
        pause(worker.process)
        group.await_forgotten()
        assert relay.deaths == 1
        with b.client("flink-7").transaction(group.stream, retain=KEPT_NOWHERE) as txn:
            txn.write(group.stream, value=b"newer")
        worker.process.send_signal(signal.SIGCONT)
        assert worker.commit("zombie") == "ClientFencedError"
    assert group.values() == [b"early", b"newer"]
