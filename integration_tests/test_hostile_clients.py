"""A client that means harm in a group: everybody else's promises hold, and its own group works again after it.

The cluster denies what is not allowed (``integration_tests/secured.py``). Mallory has a writer's rights on a stream
of ``hostile/default``; harriet has them on another stream of that group; bob has a group of his own. One coordinator
leads both groups.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka import Producer

import rollbridge
from integration_tests import coordinators
from integration_tests.adapter_tools import await_settled
from integration_tests.backends.choice import Backend
from integration_tests.command_line import run_cli
from integration_tests.coordinators import controller_epoch, until
from integration_tests.history.checks import find_faults
from integration_tests.history.clients import Writer
from integration_tests.history.events import Fault, History, Operation, Row, Window, read_operations
from integration_tests.history.final import commit_log, stream_states
from integration_tests.history.notebook import Notebook
from integration_tests.history.tasks import Task
from integration_tests.hostile import WAYS, Plan
from integration_tests.patience import PATIENCE_S, await_exit, eventually
from integration_tests.secured import Secured, kafka_security, password, secured_cluster, zookeeper_security
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind, Manifest, PieceKey
from rollbridge.errors import RollbridgeError
from rollbridge.kafka.records import BatchBuilder
from rollbridge.metadata import paths
from rollbridge.metadata.access import coordinator as coordinators_rights
from rollbridge.metadata.access import writer
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.names import GroupName, StreamName

ATTACK_S: Final = 120.0
SESSION: Final = "--session-timeout=10"
"""On a machine that is busy with other tests, the usual one is too short to tell whose fault it is when it ends."""
UNNAMED: Final = "rollbridge"
"""What those call themselves who have no client name."""
OWN, BESIDE, ELSEWHERE = "hostile/shared", "hostile/honest", "hostile/others"
GROUP, OTHERS = GroupName("hostile"), GroupName("hostile", "bobs")
MEMORY_BYTES: Final = 448 << 20
"""Most memory that a coordinator may ever need: 256 MiB of frames, as its settings say, and what it needs anyway."""
AWAY: Final = "the connection to ZooKeeper"
"""What leaders say who have lost it in the middle of something."""
STANDSTILL_S: Final = 20.0
"""Within which time somebody in another group must commit meanwhile, again and again, on a machine that is busy."""


@dataclass
class Honest:
    """Somebody who writes in every way, until asked to end, and what became of it."""

    connect: Callable[[], rollbridge.Bridge]
    stream: str
    folder: Path
    seed: int
    outs: list[Path] = field(default_factory=list)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Write in a thread."""
        stopping = threading.Event()
        thread = threading.Thread(target=self._work, args=(stopping,))
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join(2 * PATIENCE_S)
            assert not thread.is_alive(), f"{self.stream}: who writes there stands still"

    def operations(self) -> list[Operation]:
        """What was done; a line that is being written is not looked at."""
        whole = (out.read_text().rpartition("\n")[0].splitlines() for out in self.outs if out.exists())
        return [item for lines in whole for item in read_operations(map(json.loads, lines))]

    def _work(self, stopping: threading.Event) -> None:
        """Connect anew again and again, as after each refusal that does not go away."""
        while not stopping.is_set():
            name = f"{self.stream.rpartition('/')[2]}-{len(self.outs)}"
            self.outs.append(self.folder / f"{name}.jsonl")
            task = Task(name, "writer", "", "", (self.stream,), self.seed + len(self.outs), str(self.outs[-1]))
            with (
                self.outs[-1].open("w", buffering=1) as out,
                suppress(RollbridgeError, TimeoutError),
                self.connect() as client,
            ):
                writer = Writer(client, task, Notebook(name, out))
                for _ in range(100):
                    if not stopping.is_set():
                        writer.step()
                writer.finish()


@dataclass
class Place:
    """The cluster, its coordinators one after the other, and what is known of them."""

    secured: Secured
    logs: Path
    started: int = 0
    process: subprocess.Popen[bytes] | None = None
    _running: ExitStack = field(default_factory=ExitStack)

    def start_coordinator(self) -> None:
        """The next one."""
        self.started += 1
        name = f"coordinator-{self.started}"
        environment = self.secured.environment("coordinator")
        self.process = self._running.enter_context(
            coordinators.coordinator(
                self.secured, self.secured.root, name, self.logs, arguments=[SESSION], **environment
            )
        )

    def stop_coordinator(self, *, kill: bool = False) -> None:
        """End it."""
        if kill and self.process is not None:
            self.process.kill()
            self.process.wait(PATIENCE_S)
        self._running.close()

    def said(self) -> str:
        """What coordinators have told."""
        return "".join(log.read_text(errors="replace") for log in sorted(self.logs.glob("coordinator-*.log")))

    def thrown_out(self) -> list[str]:
        """Why terms ended, unless somebody has asked for it or ZooKeeper was away."""
        ends = [line for line in self.said().splitlines() if "lead.given-up " in line or "a defect" in line]
        return [line for line in ends if "the buffer is read again" not in line and AWAY not in line]

    def lost_zookeeper(self) -> bool:
        """Whether a term may have ended because ZooKeeper was away, as on a machine that is very busy."""
        return any(why in self.said() for why in (AWAY, "the ZooKeeper session was lost"))

    def peak_bytes(self) -> int:
        """Most memory that the present coordinator has ever needed."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024

    def session(self, user: str = "coordinator") -> ZooKeeperSession:
        """A look at ZooKeeper."""
        return ZooKeeperSession(self.secured.zookeeper, root=self.secured.root, security=zookeeper_security(user))

    def term(self, group: GroupName) -> int:
        """How many terms the group has had."""
        with self.session() as session:
            return controller_epoch(session, group)

    def connect(self, user: str, name: str = UNNAMED) -> rollbridge.Bridge:
        """A client of a user, perhaps under a name that sessions are kept for."""
        options = rollbridge.ClientOptions(commit_timeout_s=20, admin_timeout_s=20, connect_timeout_s=60)
        return rollbridge.Bridge(replace(self.secured.settings(user), client_name=name), options)

    def commits(self, user: str, stream: str) -> bool:
        """Whether somebody who comes now can commit."""
        try:
            with self.connect(user) as client, client.transaction(stream) as transaction:
                transaction.write(stream, key=b"probe", value=f"probe {time.monotonic_ns()}".encode())
        except RollbridgeError:
            return False
        return True

    def attack(self, seed: int, seconds: float, *ways: str) -> dict[str, Any]:
        """Let mallory do what she can; gives what she says of it."""
        plan = Plan(
            self.secured.bootstrap_servers,
            self.secured.zookeeper,
            self.secured.root,
            kafka_security("mallory"),
            zookeeper_security("mallory"),
            str(GROUP),
            OWN,
            (BESIDE,),
            {ELSEWHERE: str(OTHERS)},
            ("harriet", "bob"),
            seed,
            seconds,
            ways,
        )
        command = [sys.executable, "-m", "integration_tests.hostile"]
        env = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        with (self.logs / "mallory.log").open("wb") as log, (self.logs / "mallory.json").open("wb") as out:
            mallory = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=log, env=env)
        assert mallory.stdin is not None
        with mallory.stdin:  # she ends when it does
            mallory.stdin.write(plan.to_json().encode() + b"\n")
            mallory.stdin.flush()
            code = await_exit(mallory, self.logs / "mallory.log", seconds + PATIENCE_S)
        assert code == 0, (self.logs / "mallory.log").read_text()
        report: dict[str, Any] = json.loads((self.logs / "mallory.json").read_text())
        return report


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        secured = stack.enter_context(secured_cluster(Backend.LOCAL, tmp_path))
        place = Place(secured, tmp_path)
        secured.add_users("coordinator", "mallory", "harriet", "bob")
        secured.allow("coordinator", coordinators_rights("hostile"))
        secured.allow("mallory", writer(StreamName.parse(OWN), GROUP))
        secured.allow("harriet", writer(StreamName.parse(BESIDE), GROUP))
        secured.allow("bob", writer(StreamName.parse(ELSEWHERE), OTHERS))
        place.start_coordinator()
        stack.callback(place.stop_coordinator)
        with place.session() as session:
            until(lambda: session.children(paths.COORDINATORS))
        for group, user in ((GROUP, "mallory"), (GROUP, "harriet"), (OTHERS, "bob")):
            made = run_cli(secured.environment(user), "access", "identity", user, stdin=password(user).encode())
            done = run_cli(secured.environment("coordinator"), "access", "grant", str(group), made.out.strip())
            assert done.code == 0, done
        for user, stream, group in (("mallory", OWN, GROUP), ("harriet", BESIDE, GROUP), ("bob", ELSEWHERE, OTHERS)):
            with place.connect(user) as client:
                client.admin.create_stream(stream, segments=2, group=group.group)
        yield place


def faults_of(place: Place, honest: Honest, group: GroupName, windows: list[Window]) -> list[Fault]:
    """What is wrong with a history of a stream; whoever only looked whether it can commit is no part of it."""
    servers, zookeeper = place.secured.inner, place.secured.zookeeper
    security = zookeeper_security("coordinator")
    state = stream_states(servers, zookeeper, [honest.stream], security)[honest.stream]
    topics = [StreamName.parse(honest.stream).segment_topic(segment) for segment in state.rows]
    await_settled(servers, [(topic, 0) for topic in [*topics, group.commit_log_topic]])
    state = stream_states(servers, zookeeper, [honest.stream], security)[honest.stream]
    rows = {segment: [row for row in found if row.key != "probe"] for segment, found in state.rows.items()}
    return find_faults(
        History(
            honest.operations(),
            {honest.stream: replace(state, rows=rows)},
            commit_log(servers, group),
            windows=windows,
        )
    )


def test_a_hostile_client_stops_nobody_and_nothing_of_it_is_taken_for_true(place: Place) -> None:
    seed = random.randrange(1_000_000) if "HOSTILE_SEED" not in os.environ else int(os.environ["HOSTILE_SEED"])
    print(f"HOSTILE_SEED={seed}")
    bob = Honest(lambda: place.connect("bob"), ELSEWHERE, place.logs, seed)
    harriet = Honest(lambda: place.connect("harriet", "harriet"), BESIDE, place.logs, seed + 500)
    term = place.term(OTHERS)
    with bob.at_work(), harriet.at_work():
        until(lambda: len(bob.operations()) > 20 and len(harriet.operations()) > 20)
        began = time.monotonic_ns()
        report = place.attack(seed, ATTACK_S, *WAYS)
        window = Window("a hostile client", began, time.monotonic_ns(), STANDSTILL_S)
    print(report["done"], f"peak {place.peak_bytes() >> 20} MiB")
    assert report["broken_in"] == []
    # Whoever led goes on. Members may ask that a buffer is read again, which begins a term of their own group.
    assert place.process is not None
    assert place.process.poll() is None, place.said()[-5_000:]
    assert place.thrown_out() == []
    assert place.term(OTHERS) == term or place.lost_zookeeper()
    assert place.peak_bytes() < MEMORY_BYTES
    # The next leader finds what was left behind, and serves both groups with it.
    place.stop_coordinator(kill=True)
    place.start_coordinator()
    for user, stream in (("bob", ELSEWHERE), ("harriet", BESIDE)):
        eventually(lambda user=user, stream=stream: place.commits(user, stream), f"a commit of {user}")  # type: ignore[misc]
    assert place.thrown_out() == []
    assert place.peak_bytes() < MEMORY_BYTES
    assert faults_of(place, bob, OTHERS, [window]) == []
    assert faults_of(place, harriet, GROUP, []) == []


def set_back_the_counter(place: Place) -> None:
    with place.session("mallory") as session:
        session.set(paths.counter(GROUP), b"-5")


def invent_an_id(place: Place) -> None:
    """A transaction with one record, all of it forged."""
    identifier = TransactionId.of(0, 1 << 80).bytes
    builder = BatchBuilder(1 << 16)
    builder.append(1, b"k", b"forged")
    frames = [
        (FrameKind.BEGIN, BeginFrame("mallory", 0, None, 60_000, {OWN: 0}).encode(), 0),
        (FrameKind.DATA, builder.build(), 1),
        (FrameKind.COMMIT, Manifest({PieceKey(0, 0, 0): 1}).encode(), 0),
    ]
    servers = {"bootstrap.servers": place.secured.bootstrap_servers, **kafka_security("mallory")}
    producer = Producer(servers)
    for kind, value, count in frames:
        header = FrameHeader(kind, identifier, records=count)
        producer.produce(StreamName.parse(OWN).buffer_topic(0), value, key=header.pack())
    assert producer.flush(PATIENCE_S) == 0
    assert place.commits("mallory", OWN)  # behind it, so that the leader has seen it
    assert [row for row in rows_of(place, OWN) if row.value == "forged"] == []


def rows_of(place: Place, stream: str) -> list[Row]:
    state = stream_states(place.secured.inner, place.secured.zookeeper, [stream], zookeeper_security("coordinator"))
    return [row for rows in state[stream].rows.values() for row in rows]


@pytest.mark.parametrize(
    ("way", "user", "stream"),
    [
        (set_back_the_counter, "harriet", BESIDE),
        (set_back_the_counter, "bob", ELSEWHERE),
        (invent_an_id, "harriet", BESIDE),
    ],
)
def test_the_next_leader_takes_numbers_of_a_hostile_client_for_nothing(
    place: Place, way: Callable[[Place], None], user: str, stream: str
) -> None:
    for who, own in (("bob", ELSEWHERE), ("harriet", BESIDE)):
        assert place.commits(who, own)
    way(place)
    place.stop_coordinator(kill=True)
    place.start_coordinator()
    until(lambda: "holds less" in place.said() or place.commits(user, stream))
    assert "holds less" not in place.said()
