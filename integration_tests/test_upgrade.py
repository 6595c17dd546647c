"""Releases beside each other: coordinators and clients of the last release work with those of this checkout.

The release is a wheel in ``integration_tests/releases``, installed into a folder of its own. Which rules make that work
is in docs/protocol.md, "Versions and compatibility"; how a cluster is upgraded, in docs/upgrading.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copy
from typing import Any, Final

import pytest

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import patient_client
from integration_tests.coordinators import controller_epoch
from integration_tests.crashing import CONSTANT, program
from integration_tests.kafka_tools import create_topic
from integration_tests.patience import PATIENCE_S, end, eventually
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import Manifest, PieceKey
from rollbridge.errors import ClientFencedError, InvalidRequestError, NewerFormatError, TransactionAbortedError
from rollbridge.kafka.client import KafkaClient
from rollbridge.metadata import paths
from rollbridge.metadata.changes import FORMAT_NEWER
from rollbridge.metadata.client_sessions import KEPT_MS, ClientSession
from rollbridge.metadata.requests import AdminAnswer
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.config import MINUTE_MS
from rollbridge.stream.group_offsets import GroupOffsets, OffsetDetails
from rollbridge.stream.names import GroupName, StreamName, snapshot_indexes_topic
from rollbridge.version import __version__

RELEASES: Final = Path(__file__).parent / "releases"
RELEASE: Final = "0.2.0"
ROOT: Final = Path(__file__).parents[1]
HEAD: Final = os.pathsep.join(
    str(ROOT / name) for name in ("bridge", "coordinator", "devcluster", "gateway", "schemas")
)
SNAPSHOTS: Final = {
    "TRANSACTION_BUFFER_SNAPSHOT_MAX_TRANSACTION_COUNT": "2",
    "TRANSACTION_BUFFER_SNAPSHOT_MIN_TIME_IN_MILLIS": "100",
    "TRANSACTION_BUFFER_SNAPSHOT_REPLAY_MAX": "1",
    "TRANSACTION_BUFFER_SNAPSHOT_SEGMENT_SIZE": "1024",
}
"""Snapshots, sealed segments and records of ongoing transactions come at once, so that takeovers read them."""
KEYS: Final = 7


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path to an installation of the last release."""
    place = tmp_path_factory.mktemp("release")
    [wheel] = (RELEASES / RELEASE).glob("*.whl")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-index", "--no-compile", "--target", str(place), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return str(place)


def environment(path: str) -> dict[str, str]:
    """Only the release on this path; what it needs comes from where this checkout has it from."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ROLLBRIDGE"))}
    prefix = CONSTANT if path == HEAD else "ROLLBRIDGE_COORDINATOR_"
    return {**kept, **{prefix + name: value for name, value in SNAPSHOTS.items()}, "PYTHONPATH": path}


def test_the_last_release_reads_offsets_without_what_is_committed_beside_them(released: str) -> None:
    """An old leader commits them so; it refuses nothing for it."""
    given = GroupOffsets("g", {("t", 0): 5, ("t", 1): 6}, details={("t", 1): OffsetDetails(3, "note")})
    frame = Manifest({PieceKey(0, 0, 1): 2}, (given,)).encode()
    program = (
        "import sys; from rollbridge.model.frames import decode_manifest; "  # as that release names it
        "found = decode_manifest(bytes.fromhex(sys.argv[1])); "
        "print(dict(found.pieces), [(item.group_id, dict(item.offsets)) for item in found.offsets])"
    )
    command = [sys.executable, "-c", program, frame.hex()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(released))
    assert done.returncode == 0, done.stderr
    pieces = {PieceKey(0, 0, 1): 2}
    assert done.stdout == f"{pieces} {[('g', dict(given.offsets))]}\n"


class Client:
    """A worker in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log

    def ask(self, command: str, *arguments: object) -> Any:
        """What a command gives."""
        answer = self.try_to(command, *arguments)
        assert "ok" in answer, f"{command}{arguments}: {answer}"
        return answer["ok"]

    def try_to(self, command: str, *arguments: object) -> dict[str, Any]:
        """What a command gives, or which error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([command, arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"{command}{arguments}: the client has ended\n{self._log.read_text(errors='replace')[-4000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass
class Party:
    """Servers, with coordinators and clients of several releases."""

    cluster: AnyCluster
    root: str
    scope: str
    folder: Path
    stack: ExitStack
    coordinators: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def group(self) -> GroupName:
        """The group of all streams."""
        return GroupName(self.scope)

    def client(self, name: str, path: str) -> Client:
        """Start a client of the release on a path, and check that it is of it."""
        worker = self.folder / "upgrade_worker.py"
        copy(Path(__file__).with_name(worker.name), worker)
        log = self.folder / f"{name}.log"
        arguments = [self.cluster.bootstrap_servers, self.cluster.zookeeper, self.root, name]
        process = self.stack.enter_context(_ended_by_its_input([sys.executable, str(worker), *arguments], path, log))
        client = Client(process, log)
        version, place = client.ask("release")
        assert version == (__version__ if path == HEAD else RELEASE)
        assert any(place.startswith(item) for item in path.split(os.pathsep)), place
        return client

    def start(self, name: str, path: str) -> None:
        """Start a coordinator of the release on a path."""
        variables = environment(path)
        command = [
            sys.executable,
            *program(variables),
            f"--bootstrap-servers={self.cluster.bootstrap_servers}",
            f"--zookeeper={self.cluster.zookeeper}",
            f"--zookeeper-root={self.root}",
            f"--name={name}",
        ]
        with (self.folder / f"{name}.log").open("ab") as out:
            process = subprocess.Popen(command, env=variables, stdout=out, stderr=out, cwd=self.folder)
        self.coordinators[name] = process
        self.stack.callback(end, process, self.folder / f"{name}.log")

    def stop(self, name: str) -> None:
        """Stop a coordinator as an operator does."""
        end(self.coordinators[name], self.folder / f"{name}.log")

    def kill(self, name: str) -> None:
        """End a coordinator without a word."""
        self.coordinators[name].kill()
        self.coordinators[name].wait()

    def log(self, name: str) -> str:
        """What a coordinator has said."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def check_log(self, name: str) -> None:
        """Nothing was met that could not be read, whoever wrote it."""
        log = self.log(name)
        unread = ("cannot be read", "has version", "unreadable", "damaged", "batch-skipped")
        for words in (*unread, "frames.newer", "version that this release does not know", "defect"):
            assert words not in log, log[-4000:]

    @contextmanager
    def metadata(self) -> Iterator[Metadata]:
        """A look into ZooKeeper."""
        with ZooKeeperSession(self.cluster.zookeeper, root=self.root) as session:
            yield Metadata(session)

    def await_leader(self, name: str) -> None:
        """Wait until a coordinator serves."""
        with self.metadata() as metadata:

            def serves() -> bool:
                known = metadata.session.get(paths.controller(self.group))
                taken = metadata.session.exists(paths.leader(self.group))
                return metadata.leader(self.group) == name and bool(known and taken and taken.version)

            eventually(serves, f"{name} leads")

    def await_ready(self, name: str) -> None:
        """Wait until a coordinator follows the group closely enough to lead it."""
        with self.metadata() as metadata:

            def ready() -> bool:
                known = metadata.coordinator(name)
                return known is not None and self.group in known.ready

            eventually(ready, f"{name} is ready")

    def terms(self) -> int:
        """How many leaders there have been."""
        with self.metadata() as metadata:
            return controller_epoch(metadata.session, self.group)

    def snapshots(self) -> int:
        """How many records of snapshots were written."""
        return sum(
            KafkaClient(self.cluster.bootstrap_servers).offsets.end([snapshot_indexes_topic(self.scope)]).values()
        )


@contextmanager
def _ended_by_its_input(command: Sequence[str], path: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            env=environment(path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=log.parent,
        )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        end(process, log)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def party(cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path) -> Iterator[Party]:
    with ExitStack() as stack:
        yield Party(cluster, f"/{unique_name('upgrade')}", unique_name("upgrade"), tmp_path, stack)


@dataclass
class Expected:
    """What was committed to the streams: by value, the transaction that wrote it, and its number there."""

    orders: str
    payments: str
    values: dict[str, dict[str, tuple[str | None, int | None]]] = field(default_factory=dict)
    commits: list[tuple[str, str, list[str]]] = field(default_factory=list)
    """Id, label and values of each transaction in the order of the answers."""

    def plain(self, stream: str, values: Sequence[str]) -> None:
        """Note records without a transaction."""
        self.values.setdefault(stream, {}).update(dict.fromkeys(values, (None, None)))

    def committed(self, transaction: str, name: str, records: Sequence[tuple[str, str]], part: int = 0) -> None:
        """Note a transaction with its records, stream and value, in the order in which they were written."""
        for number, (stream, value) in enumerate(records):
            self.values.setdefault(stream, {})[value] = transaction, part << 40 | number
        self.commits.append((transaction, name, sorted(value for _, value in records)))

    def check(self, clients: Sequence[Client], scope: str) -> None:
        """Compare with what each client reads: all of it, once, by whom it was written, in the order of each key."""
        for stream in (self.orders, self.payments):
            views = [client.ask("read", stream) for client in clients]
            assert all(view == views[0] or _by_key(view) == _by_key(views[0]) for view in views)
            for view in views:
                found = {value: (transaction, local) for _, value, transaction, local, _, _ in view}
                assert found == self.values.get(stream, {})
                assert max(Counter(value for _, value, *_ in view).values(), default=1) == 1
                for key, rows in _by_key(view).items():
                    self._check_order(key, [value for _, value, *_ in rows])
        for client in clients:
            assert [tuple(item) for item in client.ask("transactions", scope)] == self.commits

    def _check_order(self, key: str, values: Sequence[str]) -> None:
        """Records of one transaction, or of one plain writer, stand in the order in which they were written."""
        numbers: dict[str, int] = {}
        for value in values:
            name, _, number = value.rpartition(" ")
            assert numbers.get(name, -1) < int(number), (key, values)
            numbers[name] = int(number)


def _by_key(view: Sequence[Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for row in view:
        found.setdefault(row[0], []).append(row)
    return found


def values_of(name: str, first: int, count: int) -> list[str]:
    return [f"{name} {number}" for number in range(first, first + count)]


def write_all_kinds(party: Party, expected: Expected, one: Client, other: Client, tag: str) -> None:
    """What both clients do, with the coordinator that leads: everything ends within."""
    orders, payments = expected.orders, expected.payments
    for client, name in ((one, f"one-{tag}"), (other, f"other-{tag}")):
        # A transaction over both streams, whose outcome the other client is asked for.
        transaction = client.ask("begin", name, orders, payments)
        client.ask("write", name, orders, 0, 30)
        client.ask("write", name, payments, 30, 10)
        client.ask("commit", name)
        records = [(orders, value) for value in values_of(name, 0, 30)]
        records += [(payments, value) for value in values_of(name, 30, 10)]
        expected.committed(transaction, name, records)
        for asked in (one, other):
            assert asked.ask("outcome", transaction) == "committed"
        # One that is aborted.
        aborted = client.ask("begin", f"{name}-aborted", orders)
        client.ask("write", f"{name}-aborted", orders, 0, 5)
        client.ask("abort", f"{name}-aborted")
        assert (other if client is one else one).ask("outcome", aborted) == "aborted"
        # Plain records.
        client.ask("plain", orders, f"{name}-plain", 20)
        expected.plain(orders, values_of(f"{name}-plain", 0, 20))
    # Conditional writes, each expecting what the other client has written last.
    token = one.ask("cas", payments, f"account-{tag}", f"cas-{tag} 0", "empty")
    token = other.ask("cas", payments, f"account-{tag}", f"cas-{tag} 1", token)
    refused = one.try_to("cas", payments, f"account-{tag}", f"cas-{tag} 2", "empty")
    assert refused["error"] == "cas-write", refused
    last = one.ask("cas", payments, f"account-{tag}", f"cas-{tag} 2", token)
    expected.plain(payments, values_of(f"cas-{tag}", 0, 3))
    # A transaction with a condition on them, once as it is, and once as it was.
    for client, name, condition, holds in ((other, f"held-{tag}", last, True), (one, f"refused-{tag}", token, False)):
        client.ask("know", condition)
        transaction = client.ask("begin", name, payments)
        client.ask("expect", name, payments, f"account-{tag}", condition)
        client.ask("write", name, payments, 0, 3)
        answer = client.try_to("commit", name)
        assert ("ok" in answer) == holds, answer
        if holds:
            expected.committed(transaction, name, [(payments, value) for value in values_of(name, 0, 3)])
        else:
            assert answer["error"] == "transaction-refused", answer
    # One client goes on with what the other has begun.
    for client, name, heir in ((one, f"left-by-one-{tag}", other), (other, f"left-by-other-{tag}", one)):
        transaction = client.ask("begin", name, orders)
        client.ask("write", name, orders, 0, 4)
        heir.ask("resume", name, transaction)
        heir.ask("commit", name)
        expected.committed(transaction, name, [(orders, value) for value in values_of(name, 0, 4)])
        late = client.try_to("commit", name)
        assert late["error"] == "client-fenced", late


@pytest.mark.parametrize("leader", ["released", "head"])
def test_a_coordinator_serves_clients_of_both_releases(party: Party, released: str, leader: str) -> None:
    party.start("one", released if leader == "released" else HEAD)
    head, old = party.client("head", HEAD), party.client("old", released)
    expected = Expected(f"{party.scope}/orders", f"{party.scope}/payments")
    # Each client makes a stream, and the other one uses it.
    head.ask("create", expected.orders, 2)
    old.ask("create", expected.payments, 1)
    write_all_kinds(party, expected, head, old, "before")
    # A transaction of each is open across a scale, and is committed as a late one then.
    late = {name: client.ask("begin", name, expected.orders) for client, name in ((head, "late-1"), (old, "late-2"))}
    for client, name in ((head, "late-1"), (old, "late-2")):
        client.ask("write", name, expected.orders, 0, 50)
    old.ask("scale", expected.orders, 3)
    for client, name in ((old, "late-2"), (head, "late-1")):
        client.ask("write", name, expected.orders, 50, 10)
        client.ask("commit", name)
        expected.committed(late[name], name, [(expected.orders, value) for value in values_of(name, 0, 60)])
    write_all_kinds(party, expected, old, head, "after")
    expected.check([head, old], party.scope)
    party.check_log("one")


def test_the_lead_goes_from_one_release_to_the_other_and_back_while_transactions_are_open(
    party: Party, released: str
) -> None:
    party.start("one", released)
    head, old = party.client("head", HEAD), party.client("old", released)
    expected = Expected(f"{party.scope}/orders", f"{party.scope}/payments")
    old.ask("create", expected.orders, 2)
    head.ask("create", expected.payments, 1)
    party.await_leader("one")
    write_all_kinds(party, expected, head, old, "first")
    ids: dict[str, str] = {}
    clients = {"head-1": head, "head-2": head, "head-3": head, "old-1": old, "old-2": old, "old-3": old}
    for name, client in clients.items():
        ids[name] = client.ask("begin", name, expected.orders, expected.payments)
        client.ask("write", name, expected.orders, 0, 20)
    # To the head: the released coordinator is stopped, as in an upgrade.
    party.start("two", HEAD)
    party.await_ready("two")
    before = party.snapshots()
    assert before, "snapshots are there for the next leader"
    party.stop("one")
    party.await_leader("two")
    for name in ("head-1", "old-1"):
        clients[name].ask("write", name, expected.payments, 20, 20)
        clients[name].ask("commit", name)
        records = [(expected.orders, value) for value in values_of(name, 0, 20)]
        expected.committed(ids[name], name, records + [(expected.payments, value) for value in values_of(name, 20, 20)])
    for name in ("head-3", "old-3"):
        clients[name].ask("abort", name)
    write_all_kinds(party, expected, old, head, "second")
    head.ask("scale", expected.orders, 4)
    eventually(lambda: party.snapshots() > before, "the head writes snapshots")
    # And back, without a word: nothing that the head has written keeps the release from leading.
    terms = party.terms()
    party.start("three", released)
    party.await_ready("three")
    party.kill("two")
    party.await_leader("three")
    assert party.terms() > terms
    for name in ("head-2", "old-2"):
        clients[name].ask("write", name, expected.orders, 20, 20)
        clients[name].ask("commit", name)
        expected.committed(ids[name], name, [(expected.orders, value) for value in values_of(name, 0, 40)])
    write_all_kinds(party, expected, head, old, "third")
    for client in (head, old):
        for name, transaction in ids.items():
            assert client.ask("outcome", transaction) == ("aborted" if name.endswith("-3") else "committed")
    expected.check([head, old], party.scope)
    for name in ("one", "two", "three"):
        party.check_log(name)


def test_a_coordinator_says_what_only_a_newer_release_can_read(party: Party) -> None:
    party.start("one", HEAD)
    client = party.client("client", HEAD)
    stream = f"{party.scope}/orders"
    client.ask("create", stream, 1)
    with party.metadata() as metadata:
        session, node = metadata.session, paths.stream(StreamName.parse(stream))
        # A request is answered.
        request = session.create(
            f"{paths.requests(party.group)}/{paths.REQUEST_PREFIX}",
            b'{"version": 2, "kind": "teleport"}',
            ephemeral=True,
            sequential=True,
        )
        answer = f"{paths.answers(party.group)}/{request.rpartition('/')[2]}"
        eventually(lambda: session.exists(answer), "the request is answered")
        answered = session.get(answer)
        assert answered is not None
        said = AdminAnswer.from_json(answered.value)
        assert (said.ok, said.code) == (False, NewerFormatError.code)
        assert "has version 2" in said.message
        # A stream that is described otherwise is left alone, and the rest of its group is led.
        other = f"{party.scope}/payments"
        client.ask("create", other, 1)
        transaction = client.ask("begin", "open", stream)
        client.ask("write", "open", stream, 0, 10)
        record = paths.transaction(party.group, TransactionId.parse(transaction))
        eventually(lambda: session.exists(record), "it is on record")
        party.stop("one")
        known = session.get(node)
        assert known is not None
        newer = known.value.replace(b'{"version": 1', b'{"version": 3', 1)
        assert newer != known.value
        session.set(node, newer)
        buffer = KafkaClient(party.cluster.bootstrap_servers).offsets
        written = buffer.end([StreamName.parse(stream).buffer_topic()])
        party.start("two", HEAD)
        party.await_leader("two")
        fault = metadata.stream_fault(StreamName.parse(stream))
        assert fault is not None
        assert fault.code == FORMAT_NEWER
        assert "has version 3, and this release knows 2" in fault.reason
        innocent = client.ask("begin", "innocent", other)
        client.ask("write", "innocent", other, 0, 3)
        client.ask("commit", "innocent")
        assert client.ask("outcome", innocent) == "committed"
        # Nothing of it was changed, and of what is open in it nothing was decided.
        after = session.get(node)
        assert after is not None
        assert after.value == newer
        assert session.exists(record)
        assert buffer.end([StreamName.parse(stream).buffer_topic()]) == written
        undecided = client.try_to("outcome", transaction)
        assert undecided["error"] == "coordinator-unavailable"
        assert "cannot be told while stream" in undecided["says"]
        # Once its node can be read again, the leader takes it up.
        session.set(node, known.value)
        eventually(lambda: metadata.stream_fault(StreamName.parse(stream)) is None, "the stream is led again")
    client.ask("commit", "open")
    assert client.ask("outcome", transaction) == "committed"
    assert [value for _, value, *_ in client.ask("read", stream)] == values_of("open", 0, 10)


def test_a_name_goes_from_release_to_release_and_each_fences_the_other(party: Party, released: str) -> None:
    """The earlier release knows of no floor: it begins above it, since that is behind the minutes since 1970."""
    party.start("head", HEAD)
    new = party.client("loader", HEAD)
    stream = f"{party.scope}/orders"
    new.ask("create", stream, 1)
    party.await_leader("head")
    with party.metadata() as metadata:
        floor = int(time.time() * 1000) // MINUTE_MS - KEPT_MS // MINUTE_MS
        metadata.session.set(paths.sessions(party.group), str(floor).encode())
    before: Client | None = None
    for number, path in enumerate((released, HEAD, released, HEAD)):
        name = f"turn-{number}"
        client = party.client("loader", path)
        transaction = client.ask("begin", name, stream)
        client.ask("write", name, stream, 0, 3)
        if before is not None:
            assert before.try_to("begin", f"late-{number}", stream).get("error") == "client-fenced"
        with party.metadata() as metadata:
            node = metadata.session.get(paths.session(party.group, "loader"))
        assert node is not None
        record = ClientSession.from_json(node.value)
        assert record.epoch > floor
        assert record.renews is (path == HEAD), "the records of the earlier release stay for a year"
        client.ask("commit", name)
        assert new.ask("outcome", transaction) == "committed"
        before = client
    party.check_log("head")


def test_a_leader_of_the_release_before_fences_sessions_and_lists_what_they_left(party: Party, released: str) -> None:
    """It answers a fence without that list, so it is asked for."""
    party.start("earlier", released)
    stream = f"{party.scope}/orders"
    with patient_client(party.cluster, party.root) as b:
        b.admin.create_stream(stream)
        name = b.client("flink-7")
        left = name.begin(stream)
        left.write(stream, value=b"left")
        left.flush()
        name.new_session(party.group)
        with pytest.raises(ClientFencedError):
            left.commit()
        [found] = name.unfinished(group=party.group)
        assert found.transaction == left.id
        assert name.resume(left.id).commit().records == 1


def test_an_earlier_coordinator_commits_nothing_in_part_that_it_does_not_understand(
    party: Party, released: str
) -> None:
    party.start("old", released)
    options = rollbridge.ClientOptions(admin_timeout_s=PATIENCE_S, commit_timeout_s=PATIENCE_S)
    eventually(lambda: _coordinators(party), "the coordinator is there")
    with rollbridge.connect(
        party.cluster.bootstrap_servers,
        zookeeper=party.cluster.zookeeper,
        zookeeper_root=party.root,
        client_name="new",
        options=options,
    ) as b:
        first, second = f"{party.scope}/first", f"{party.scope}/second"
        for stream in (first, second):
            b.admin.create_stream(stream)
        party.await_leader("old")
        txn = b.begin(first)
        txn.write(first, key=b"k", value=b"one")
        with pytest.raises(InvalidRequestError, match=r"old, of release 0\.2\.0, does not know savepoints"):
            txn.savepoint()
        assert txn.commit().records == 1, "it is as it was"
        joined = b.begin(first)
        joined.write(first, key=b"k", value=b"two")
        joined.flush()
        eventually(lambda: b.outcome(joined.id).state == "open", "its leader knows it")
        joined.write(second, key=b"k", value=b"three")
        with pytest.raises(TransactionAbortedError, match=r"the transaction has 1 streams|incomplete"):
            joined.commit()
        # If one led that does not know them, after all: by a later version of the frame.
        b._runtime.leaders._knows_savepoints = True
        saved = b.begin(first)
        saved.write(first, key=b"k", value=b"four")
        saved.flush()
        saved.savepoint()
        with pytest.raises(TransactionAbortedError, match="upgrade all coordinators first"):
            saved.commit()
        values = {stream: [item.value for item in b.reader(stream, follow=False)] for stream in (first, second)}
        assert values == {first: [b"one"], second: []}
        party.start("new", HEAD)
        party.stop("old")
        party.await_leader("new")
        again = b.begin(first)
        again.write(second, key=b"k", value=b"five")
        point = again.savepoint()
        again.write(second, key=b"k", value=b"six")
        again.rollback_to(point)
        assert again.commit().records == 1


def test_buffers_of_adopted_topics_get_internal_names_once_all_coordinators_know_them(
    party: Party, released: str
) -> None:
    party.start("new", HEAD)
    old, head = party.client("old-client", released), party.client("client", HEAD)
    head.ask("create", f"{party.scope}/orders", 1)
    party.await_leader("new")
    party.start("old", released)
    eventually(lambda: len(_coordinators(party)) == 2, "both are there")
    topics = {name: f"{party.scope}.{name}" for name in ("before", "after")}
    for topic in topics.values():
        create_topic(party.cluster.bootstrap_servers, topic)
    streams = {name: StreamName(party.scope, name) for name in topics}
    head.ask("adopt", topics["before"], str(streams["before"]))
    party.stop("old")
    eventually(lambda: _coordinators(party) == ["new"], "the old one is gone")
    head.ask("adopt", topics["after"], str(streams["after"]))
    with party.metadata() as metadata:
        found = {name: metadata.stream(stream) for name, stream in streams.items()}
    buffers = {name: config and config.buffer_topic for name, config in found.items()}
    assert buffers == {
        "before": streams["before"].buffer_topic(),
        "after": streams["after"].internal_buffer_topic(),
    }
    for name, client in (("before", old), ("before", head), ("after", head)):
        client.ask("begin", name, str(streams[name]))
        client.ask("write", name, str(streams[name]), 0, 3)
        client.ask("commit", name)
    refused = old.try_to("begin", "refused", str(streams["after"]))
    assert refused["error"] == NewerFormatError.code
    assert "has version 2, and this release knows 1 at most: upgrade it" in refused["says"]


def _coordinators(party: Party) -> list[str]:
    with party.metadata() as metadata:
        return metadata.coordinators()
