"""Clusters in trouble, each for a cause that operators meet: an exercise, and what its tests break.

``python -m integration_tests.troubles`` lists the troubles by number only, as the cause is yours to find. With a number
it makes a cluster of its own with some ordinary load, breaks it, and says where page, metrics, Prometheus (if that is
there), board and doctor are. ``--tell`` says the cause. Alerts are in a hurry: what is pending for minutes is so for
a second here, and a transaction is old after three.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from confluent_kafka import KafkaException, Producer
from kio.schema.alter_client_quotas.v1 import AlterClientQuotasRequest, AlterClientQuotasResponse
from kio.schema.alter_client_quotas.v1.request import EntityData, EntryData, OpData
from kio.static.primitive import f64

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.backends.local import LocalCluster
from integration_tests.gateways import GatewayProcess, Servers
from integration_tests.pages import paged_coordinator, read_page
from integration_tests.patience import end, eventually
from integration_tests.pauses import pause
from integration_tests.prometheus_server import Prometheus
from rollbridge.cli.doctor import BOARD_FILE
from rollbridge.errors import RollbridgeError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.metadata import Cluster
from rollbridge.monitoring.runbook import board
from rollbridge.stream.names import GroupName, StreamName
from rollbridge_devcluster.__main__ import write_tools
from rollbridge_devcluster.state import LOOPBACK, free_port

ROOT: Final = Path(__file__).resolve().parents[1]
PREFIX: Final = "ROLLBRIDGE_COORDINATOR_"
OLD_AFTER_S: Final = 3
PAUSE_S: Final = 0.05
JOB, LABEL = "night-import", "catalogue of 2026-11"
"""Client name and label of the job that dies."""
OUTSIDER: Final = "legacy-order-sync"
"""What the outsider calls itself in what it writes."""
GUEST: Final = "billing/7"
"""Transactional id of the producer at a gateway."""
_GUEST_S: Final = 20.0
"""Longest wait of that producer for one answer."""


class Load(threading.Thread):
    """Small transactions of a client that goes on whatever happens, some of their records without a key."""

    def __init__(self, b: rollbridge.Bridge, stream: str) -> None:
        """Prepare."""
        super().__init__(name="load", daemon=True)
        self._b = b
        self._stream = stream
        self._ended = threading.Event()
        self.committed = 0

    def run(self) -> None:
        """Commit one after the other."""
        while not self._ended.wait(PAUSE_S):
            try:
                with self._b.transaction(self._stream) as txn:
                    txn.write(self._stream, key=b"k", value=os.urandom(100))
                    txn.write(self._stream, value=b"no key")
                self.committed += 1
            except RollbridgeError:
                continue  # it is in trouble, as it should be

    def stop(self) -> None:
        """End after the transaction that is under way."""
        self._ended.set()
        self.join()


class GuestLoad(threading.Thread):
    """Transactions of a Kafka producer that knows a gateway only, and goes on whatever happens."""

    def __init__(self, gateway: GatewayProcess, topic: str) -> None:
        """Prepare."""
        super().__init__(name="guest load", daemon=True)
        self._settings = {
            "bootstrap.servers": gateway.address,
            "transactional.id": GUEST,
            "transaction.timeout.ms": 2 * 3_600_000,
            "socket.timeout.ms": 10_000,
            "log_level": 0,
        }
        self._topic = topic
        self._ended, self._go_on = threading.Event(), threading.Event()
        self._go_on.set()
        self.is_open = threading.Event()
        self.committed = 0

    def run(self) -> None:
        """Commit one after the other; begin with a new producer where the old one has given up."""
        producer: Producer | None = None
        while not self._ended.is_set():
            try:
                if producer is None:
                    producer = Producer(self._settings)
                    producer.init_transactions(_GUEST_S)
                producer.begin_transaction()
                producer.produce(self._topic, os.urandom(100), b"k")
                if producer.flush(_GUEST_S) == 0:
                    self.is_open.set()
                self._go_on.wait()
                self.is_open.clear()
                self._commit(producer)
            except KafkaException:
                producer = None

    def _commit(self, producer: Producer) -> None:
        while not self._ended.is_set():
            try:
                producer.commit_transaction(_GUEST_S)
            except KafkaException as fault:
                if not fault.args[0].retriable():
                    raise
            else:
                self.committed += 1
                self._ended.wait(PAUSE_S)
                return

    @contextmanager
    def with_one_open(self) -> Iterator[None]:
        """Keep it from committing in the block, in which it has a transaction open."""
        self._go_on.clear()
        try:
            eventually(self.is_open.is_set, "it has a transaction open")
            yield
        finally:
            self._go_on.set()

    def stop(self) -> None:
        """End, also in the middle of a transaction."""
        self._ended.set()
        self._go_on.set()
        self.join()


class Scene:
    """Coordinators with pages and metrics, and a stream with ordinary load, while it is entered.

    Attributes:
        stream, group: What the load writes to.
        gateways: Gateways by name; with any, there is a producer beside, which knows the first.
        pages, metrics: Addresses by the name of the coordinator.
        processes: The coordinators by name.
        environment: Where the command line finds all of it.
    """

    def __init__(
        self,
        cluster: AnyCluster,
        root: str,
        folder: Path,
        scope: str = "shop",
        names: Sequence[str] = ("one", "two"),
        gateways: Sequence[str] = (),
    ) -> None:
        """Prepare; ``folder`` is for logs."""
        self.cluster = cluster
        self.folder = folder
        self.stream, self.group = StreamName(scope, "orders"), GroupName(scope)
        self.pages: dict[str, str] = {}
        self.metrics: dict[str, str] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            "ROLLBRIDGE_BOOTSTRAP_SERVERS": cluster.bootstrap_servers,
            "ROLLBRIDGE_ZOOKEEPER": cluster.zookeeper,
            "ROLLBRIDGE_ZOOKEEPER_ROOT": root,
        }
        self._root = root
        self._names = names
        self._gateway_names = gateways
        self.gateways: dict[str, GatewayProcess] = {}
        self.guest: GuestLoad | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            taken: list[int] = []
            for name in self._names:
                taken.append(free_port(taken))
                self.metrics[name] = f"{LOOPBACK}:{taken[-1]}"
                settings = {
                    f"{PREFIX}METRICS_ADDRESS": self.metrics[name],
                    "CONSTANT_TRUNCATE_BUFFERS_MS": "1000",
                }
                self.pages[name], self.processes[name] = stack.enter_context(
                    paged_coordinator(self.cluster, self._root, name, self.folder, **settings)
                )
            b = stack.enter_context(self.connect("shop"))
            eventually(lambda: all(self._is_healthy(name) for name in self._names), "the coordinators are there")
            b.admin.create_stream(str(self.stream))
            [segment] = b.admin.history(str(self.stream)).active.segments
            self.segment_topic = self.stream.segment_topic(segment.id)
            self.load = Load(b, str(self.stream))
            self.load.start()
            stack.callback(self.load.stop)
            eventually(lambda: self.load.committed > 3, "the load commits")
            for name in self._gateway_names:
                self._add_gateway(name, free_port(taken), stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _add_gateway(self, name: str, port: int, stack: ExitStack) -> None:
        """Start a gateway, and a producer that knows it if it is the first."""
        self.metrics[name] = f"{LOOPBACK}:{port}"
        servers = Servers(self.cluster.bootstrap_servers, self.cluster.zookeeper, self._root)
        gateway = GatewayProcess(servers, name, self.folder, [f"--metrics={self.metrics[name]}"])
        self.gateways[name] = stack.enter_context(gateway)
        if self.guest is None:
            self.guest = guest = GuestLoad(gateway, str(self.stream).replace("/", "."))
            guest.start()
            stack.callback(guest.stop)
            eventually(lambda: guest.committed > 3, "the producer at the gateway commits")

    def _is_healthy(self, name: str) -> bool:
        return bool(read_page(self.pages[name], "overview")["coordinator"]["healthy"])

    def connect(self, name: str) -> rollbridge.Bridge:
        """Connect a client that does not wait for long."""
        return rollbridge.connect(
            self.cluster.bootstrap_servers,
            zookeeper=self.cluster.zookeeper,
            zookeeper_root=self._root,
            client_name=name,
            options=rollbridge.ClientOptions(commit_timeout_s=5, admin_timeout_s=60),
        )

    @property
    def buffer_topic(self) -> str:
        """Where clients write frames."""
        return self.stream.buffer_topic()

    def command(self, *arguments: str) -> list[str]:
        """A command line of ``rollbridge`` that finds this cluster with :attr:`environment`."""
        return [sys.executable, "-m", "rollbridge", *arguments]

    def part(self, name: str) -> list[str]:
        """A command line of another process of the exercise: see :data:`PARTS`."""
        return [sys.executable, "-m", "integration_tests.troubles", "--part", name, str(self.stream)]

    def start(self, command: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        """Start a process in this cluster's environment."""
        with output.open("ab") as file:
            return subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **self.environment}, cwd=ROOT)


@dataclass(frozen=True, slots=True)
class Trouble:
    """One way in which a cluster is broken.

    Attributes:
        name: What its test is called.
        said: What people complain of.
        cause: What it is.
        break_it: Breaks a scene, and puts right at its end what may still be broken.
        limits: Texts of the rules of alerts, and what stands in place of them.
        names: The coordinators.
        gateways: The gateways.
    """

    name: str
    said: str
    cause: str
    break_it: Callable[[Scene], AbstractContextManager[None]]
    limits: Mapping[str, str] = field(default_factory=dict)
    names: Sequence[str] = ("one", "two")
    gateways: Sequence[str] = ()


# A job that has died


def write_half_and_die(stream: str) -> None:
    """Write half of a transaction that may stay open for days, and die: the job."""
    with rollbridge.connect(client_name=JOB) as b:
        txn = b.begin(stream, label=LABEL, timeout=timedelta(days=2))
        for number in range(200):
            txn.write(stream, key=b"%d" % number, value=os.urandom(1000))
        txn.flush()
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def dead_job(scene: Scene) -> Iterator[None]:
    """A job that is killed in the middle of its transaction."""
    log = scene.folder / "job.log"
    with scene.start(scene.part("job"), log) as job:
        assert job.wait() == -signal.SIGKILL, log.read_text(errors="replace")
    yield


# A leader that Kafka holds back


BYTES_PER_S: Final = 20_000.0
CLIENT_ID: Final = "rollbridge"
READS, WRITES = "consumer_byte_rate", "producer_byte_rate"


@contextmanager
def slowed(
    cluster: AnyCluster, what: str = READS, client_id: str = CLIENT_ID, bytes_per_s: float = BYTES_PER_S
) -> Iterator[None]:
    """A broker that gives or takes little of coordinators: a quota for their client id, taken away at the end."""
    with Cluster(cluster.bootstrap_servers) as brokers:

        def change(*, remove: bool) -> None:
            operation = OpData(key=what, value=f64(bytes_per_s), remove=remove)
            entry = EntryData(entity=(EntityData(entity_type="client-id", entity_name=client_id),), ops=(operation,))
            request = AlterClientQuotasRequest(entries=(entry,), validate_only=False)
            answer = brokers.ask_any(request, AlterClientQuotasResponse)
            assert [item.error_code for item in answer.entries] == [0], answer

        change(remove=False)
        try:
            yield
        finally:
            change(remove=True)


class Loader(threading.Thread):
    """A client that writes on, whatever becomes of what it commits."""

    def __init__(self, b: rollbridge.Bridge, stream: str) -> None:
        """Prepare."""
        super().__init__(name="loader", daemon=True)
        self._b = b
        self._stream = stream
        self._ended = threading.Event()

    def run(self) -> None:
        """Write about 200 KB in a second, and commit every five."""
        while not self._ended.is_set():
            with suppress(RollbridgeError):
                txn = self._b.begin(self._stream, label="load")
                for _ in range(100):
                    txn.write(self._stream, key=b"k", value=os.urandom(10_000))
                    txn.flush()
                    if self._ended.wait(PAUSE_S):
                        break
                txn.commit_async()

    def stop(self) -> None:
        """End."""
        self._ended.set()
        self.join()


@contextmanager
def held_back(scene: Scene) -> Iterator[None]:
    """A quota for the client id of coordinators, which is less than what is written."""
    with slowed(scene.cluster), scene.connect("loader") as b:
        loader = Loader(b, str(scene.stream))
        loader.start()
        try:
            yield
        finally:
            loader.stop()


# A last coordinator that hangs


@contextmanager
def hanging(scene: Scene) -> Iterator[None]:
    """The only coordinator stands still: its process is there, and does nothing."""
    [process] = scene.processes.values()
    pause(process)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


# A topic that somebody has changed


@contextmanager
def compacted(scene: Scene) -> Iterator[None]:
    """The topic of a segment is made a compacted one, which takes no record without a key."""
    KafkaClient(scene.cluster.bootstrap_servers).topics.set_topic_config(
        scene.segment_topic, {"cleanup.policy": "compact"}
    )
    yield


# A program that writes where it has no business


def write_on(stream: str) -> None:
    """Write what is no frame into a buffer, again and again: the outsider."""
    producer = Producer({"bootstrap.servers": os.environ["ROLLBRIDGE_BOOTSTRAP_SERVERS"]})
    topic = StreamName.parse(stream).buffer_topic()
    number = 0
    while True:
        number += 1
        producer.produce(topic, f'{{"app": "{OUTSIDER}", "order": {number}}}'.encode(), b"order-%d" % number)
        producer.flush()
        print(number, flush=True)
        time.sleep(0.1)


@contextmanager
def outsider(scene: Scene) -> Iterator[None]:
    """A program of somebody else that takes a buffer for a topic of orders."""
    log = scene.folder / "outsider.log"
    process = scene.start(scene.part("outsider"), log)
    scene.processes[OUTSIDER] = process
    try:
        eventually(lambda: log.stat().st_size, "it has written")
        yield
    finally:
        end(process, log)
        del scene.processes[OUTSIDER]


# A last gateway that hangs


@contextmanager
def hanging_gateway(scene: Scene) -> Iterator[None]:
    """The only gateway stands still in the middle of a producer's transaction."""
    [gateway] = scene.gateways.values()
    assert scene.guest is not None
    with scene.guest.with_one_open():
        gateway.pause()
    yield  # at its end a gateway is woken up, if it is still there


PARTS: Final[Mapping[str, Callable[[str], None]]] = {"job": write_half_and_die, "outsider": write_on}
"""What other processes of the exercise do, given the stream."""

TROUBLES: Final = (
    Trouble(
        "dead job",
        "The disks of the brokers fill up.",
        "A job was killed in the middle of its transaction, which may stay open for two days. It holds the buffers.",
        dead_job,
        {"> 12 * 3600": f"> {OLD_AFTER_S}"},
    ),
    Trouble(
        "held back",
        "Commits take ever longer, and time out.",
        "Somebody has set a quota in Kafka for the client id of coordinators, so the leader reads buffers slowly.",
        held_back,
        {"> 30\n": "> 1\n"},
    ),
    Trouble(
        "hanging",
        "Nothing commits any more, and all processes are there.",
        "The last coordinator hangs: its process is there and stands still. There is no other one.",
        hanging,
        names=("one",),
    ),
    Trouble(
        "compacted",
        "What is written to one stream does not arrive; the others are well.",
        "Somebody has made the topic of a segment a compacted one. It takes no record without a key any more.",
        compacted,
    ),
    Trouble(
        "outsider",
        "Nobody complains, and an alert fires.",
        "A program that is no client of rollbridge writes into a buffer.",
        outsider,
        {'newer"}[15m]': 'newer"}[10s]'},
    ),
    Trouble(
        "hanging gateway",
        "Billing, which is written in another language, writes nothing any more; everybody else does.",
        "The only gateway hangs: its process is there, keeps its ports, and stands still. A producer's transaction is "
        "open.",
        hanging_gateway,
        gateways=("front",),
    ),
)


# The exercise


def exercise(trouble: Trouble) -> None:
    """Make a cluster, break it, say where to look, and wait until interrupted."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollbridge-exercise-")))
        print("Starting Kafka, ZooKeeper, coordinators and some load ...", flush=True)
        cluster = stack.enter_context(LocalCluster())
        scene = stack.enter_context(
            Scene(cluster, "/rollbridge", folder, names=trouble.names, gateways=trouble.gateways)
        )
        looks = [(f"page of {name}", url) for name, url in scene.pages.items()]
        looks += [(f"metrics of {name}", f"http://{address}/metrics") for name, address in scene.metrics.items()]
        if shutil.which("prometheus"):
            targets = list(scene.metrics.values())
            prometheus = stack.enter_context(Prometheus(folder / "prometheus", targets, trouble.limits))
            looks.append(("Prometheus", f"{prometheus.url}alerts"))
        else:
            looks.append(("Prometheus", "is not installed (Debian: prometheus)"))
        (folder / BOARD_FILE).write_text(board(), encoding="utf-8")
        looks.append(("board, for Grafana", str(folder / BOARD_FILE)))
        write_tools(folder / "kafka")
        looks.append(("Kafka's commands", str(folder / "kafka")))
        where = [f"--bootstrap-servers={cluster.bootstrap_servers}", f"--zookeeper={cluster.zookeeper}"]
        program = Path(sys.executable).with_name("rollbridge")
        looks.append(("doctor", shlex.join([str(program), *where, "doctor", f"--old={OLD_AFTER_S}s"])))
        stack.enter_context(trouble.break_it(scene))
        print(f"Now it is broken. What people say: {trouble.said}")
        for what, place in looks:
            print(f"  {what:<20}{place}")
        print("Find the cause. Ctrl-C ends it, and nothing is left.", flush=True)
        threading.Event().wait()


def main(arguments: Sequence[str]) -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(prog="python -m integration_tests.troubles", description=__doc__)
    parser.add_argument("number", nargs="?", type=int, choices=range(1, len(TROUBLES) + 1))
    parser.add_argument("--tell", action="store_true", help="say the cause, of all or of this one, and break nothing")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.part:
        name, stream = asked.part
        PARTS[name](stream)
        return 0
    chosen = range(1, len(TROUBLES) + 1) if asked.number is None else [asked.number]
    if asked.tell or asked.number is None:
        for number in chosen:
            print(f"{number}  {TROUBLES[number - 1].cause}" if asked.tell else number)
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell has what it starts in the background ignore interrupts
        signal.signal(number, signal.default_int_handler)
    try:
        exercise(TROUBLES[asked.number - 1])
    except KeyboardInterrupt:
        print("Done.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
