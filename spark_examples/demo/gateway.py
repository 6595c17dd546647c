"""``make demo-gateway``: a Flink job is left for dead with a transaction open, and nobody who reads its topic notices.

The same job, with Flink's exactly-once sink, writes into two ordinary topics: into one through a gateway, which is a
matter of ``bootstrap.servers``, into the other straight at Kafka. Somebody else writes into both, without transactions,
and a plain ``read_committed`` consumer reads each. Both jobs are killed in the middle of a checkpoint. At Kafka the
reader stands still, as it may not read past what the job has left open; behind the gateway it reads on. Then both jobs
go on from their latest checkpoints, and each number is there once. Kafka, ZooKeeper, the coordinator and the gateway
are gone at the end.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final, Self

import click
from confluent_kafka import Consumer, Producer, TopicPartition

import rollbridge
from rollbridge.cli.common import counted
from rollbridge.errors import LocalEnvironmentError, RollbridgeError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.topics import TopicSpec
from rollbridge_devcluster.ephemeral import ProcessCluster
from rollbridge_devcluster.services import gateway_command
from spark_examples.demo.flink_job import FlinkJob

BEHIND, STRAIGHT = "payments", "payments-at-kafka"
RECORDS: Final = 8_000
RATE: Final = 500
DEAD_S: Final = 20.0
INTERVAL_MS: Final = 1_000
BEAT_S: Final = 0.05
PATIENCE_S: Final = 120.0
_BEAT: Final = b"beat"


@dataclass
class Told:
    """What the demonstration has found."""

    exact: dict[str, bool] = field(default_factory=dict)
    """By topic, whether each number is there once."""
    waits_s: dict[str, float] = field(default_factory=dict)
    """By topic, the longest time between two records while the jobs were dead."""


class Reader:
    """A plain ``read_committed`` consumer of a topic of one partition, and what it has got. Ends with its block."""

    def __init__(self, servers: str, topic: str) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": servers,
                "group.id": f"reader-of-{topic}",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 10,
            }
        )
        self._consumer.assign([TopicPartition(topic, 0, 0)])
        self.numbers: Counter[bytes] = Counter()
        self.times: list[float] = []
        """When records came, monotonic seconds."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._read, name=f"reader of {topic}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()
        self._consumer.close()

    def longest_wait_s(self, begin: float, end: float) -> float:
        """Return the longest time without a record between two moments, both of which count as records."""
        inside = [begin, *(at for at in list(self.times) if begin < at < end), end]
        return max(later - before for before, later in pairwise(inside))

    def _read(self) -> None:
        while not self._ending.is_set():
            message = self._consumer.poll(0.1)
            if message is None or message.error() is not None:
                continue
            self.times.append(time.monotonic())
            if message.key() != _BEAT:
                self.numbers[message.value() or b""] += 1


@contextmanager
def beating(servers: str, *topics: str) -> Iterator[None]:
    """Have somebody else write into the topics all the while, without transactions."""
    ending = threading.Event()
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 0})

    def beat() -> None:
        while not ending.wait(BEAT_S):
            for topic in topics:
                producer.produce(topic, b"somebody else's", _BEAT, partition=0)
            producer.poll(0)

    thread = threading.Thread(target=beat, name="somebody else", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()
        producer.flush(PATIENCE_S)


@contextmanager
def gateway_of(servers: str, zookeeper: str, root: str, log: Path) -> Iterator[str]:
    """A gateway in a process of its own; gives its address."""
    command = gateway_command(servers, zookeeper, "--listen=127.0.0.1:0", "--name=demo", root=root)
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield address_in(log, process)
    finally:
        process.terminate()
        process.wait()


def address_in(log: Path, process: subprocess.Popen[bytes]) -> str:
    """Return the address at which a gateway says that it listens."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text(errors="replace").splitlines():
            if "listens at " in line:
                return line.partition("listens at ")[2].split()[0].rstrip(",;")
        time.sleep(0.1)
    raise LocalEnvironmentError(f"the gateway does not start: {log.read_text(errors='replace')[-2_000:]}")


def await_that(condition: Callable[[], bool], *jobs: FlinkJob) -> None:
    """Wait until something holds, while jobs run."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        for job in jobs:
            if not job.alive:
                raise RuntimeError(f"a job has ended: {job.said()}")
        if time.monotonic() > deadline:
            raise RuntimeError("it takes too long")
        time.sleep(0.05)


def play(b: rollbridge.Bridge, gateway: str, folder: Path, *, records: int = RECORDS, dead_s: float = DEAD_S) -> Told:
    """Run both jobs, kill them, look at the readers, and let the jobs go on; return what was found."""
    servers = b.settings.bootstrap_servers
    with KafkaClient(servers) as kafka:
        admin = kafka.topics
        admin.create_topics(TopicSpec(name=topic) for topic in (BEHIND, STRAIGHT))
    b.admin.adopt_topic(BEHIND)
    began = time.monotonic()
    told = Told()

    def tell(text: str) -> None:
        click.echo(f"{time.monotonic() - began:6.1f} s  {text}")

    def job(topic: str, **more: object) -> FlinkJob:
        where = gateway if topic == BEHIND else servers
        given = {"bootstrap": where, "topic": topic, "prefix": topic, "records": records, "rate": RATE, **more}
        return FlinkJob(folder / topic, **given, interval_ms=INTERVAL_MS)

    tell(f"two topics that exist; {BEHIND} is adopted, {STRAIGHT} is not")
    with beating(servers, BEHIND, STRAIGHT), Reader(servers, BEHIND) as behind, Reader(servers, STRAIGHT) as straight:
        with job(BEHIND) as first, job(STRAIGHT) as second:
            tell(f"one Flink job for each: {BEHIND} through the gateway, {STRAIGHT} straight at Kafka")
            await_that(lambda: min(first.checkpoints, second.checkpoints) >= 3, first, second)
        dead = time.monotonic()
        tell("both jobs are killed, with a transaction open each")
        while time.monotonic() < dead + dead_s:
            time.sleep(0.1)
        for record in b.admin.transactions():
            left = (record.begun_ms + record.lease_ms) / 1000 - time.time()
            tell(f"rollbridge txn list: {record.id} of {record.client_name}, open, {left / 60:.0f} min left")
        for topic, reader in ((BEHIND, behind), (STRAIGHT, straight)):
            told.waits_s[topic] = reader.longest_wait_s(dead, dead + dead_s)
        tell(f"in {dead_s:.0f} s the reader of {BEHIND} has waited {told.waits_s[BEHIND] * 1000:,.0f} ms at most")
        tell(f"that of {STRAIGHT} {told.waits_s[STRAIGHT]:,.1f} s: it stands still behind what is open")
        origins = {topic: FlinkJob.latest(folder / topic) for topic in (BEHIND, STRAIGHT)}
        with (
            job(BEHIND, **{"from": origins[BEHIND]}) as first,
            job(STRAIGHT, **{"from": origins[STRAIGHT]}) as second,
        ):
            tell("both go on from their latest checkpoints")
            for one in (first, second):
                one.finish(PATIENCE_S)
        for topic, reader in ((BEHIND, behind), (STRAIGHT, straight)):
            wanted = Counter(f"{topic}-{number}".encode() for number in range(records))
            deadline = time.monotonic() + PATIENCE_S
            while reader.numbers.total() < records and time.monotonic() < deadline:
                time.sleep(0.1)
            told.exact[topic] = reader.numbers == wanted
            once = "each once" if told.exact[topic] else "NOT each once"
            tell(f"{topic}: {counted(reader.numbers.total(), 'number')} of {records:,} read, {once}")
    return told


@click.command()
def main() -> None:
    """Kill a Flink job behind a gateway, and one beside it, and see who stands still."""
    try:
        with ProcessCluster() as cluster, tempfile.TemporaryDirectory(prefix="rollbridge-demo-") as folder:
            cluster.start_coordinator()
            with (
                rollbridge.connect(cluster.bootstrap_servers, zookeeper=cluster.zookeeper, client_name="demo") as b,
                gateway_of(
                    cluster.bootstrap_servers, cluster.zookeeper, b.settings.zookeeper_root, Path(folder, "gateway.log")
                ) as gateway,
            ):
                told = play(b, gateway, Path(folder))
    except RollbridgeError as fault:
        click.echo(f"demo-gateway: {fault}", err=True)
        sys.exit(fault.exit_code)
    if not all(told.exact.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
