"""``make demo-gateway``: a Flink job is left for dead with a transaction open, and nobody who reads its topic notices.

The same job, with Flink's exactly-once sink, writes into two ordinary topics: into one through a gateway, which is a
matter of ``bootstrap.servers``, into the other straight at Kafka. Somebody else writes into both, without transactions,
and a plain ``read_committed`` consumer reads each. Both jobs are killed in the middle of a checkpoint. At Kafka the
reader stands still, as it may not read past what the job has left open; behind the gateway it reads on. Then both jobs
go on from their latest checkpoints, and each number is there once. Kafka, ZooKeeper, the coordinator and the gateway
are gone at the end.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple, Self

import click
from confluent_kafka import Consumer, Producer, TopicPartition

import rollbridge
from rollbridge.cli.common import counted
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.topics import TopicSpec
from rollbridge_devcluster.ephemeral import ProcessCluster
from spark_examples.demo.common import Story, longest_silence, until
from spark_examples.demo.common import play as play_example
from spark_examples.demo.flink_job import FlinkJob, latest_checkpoint

BEHIND, STRAIGHT = TOPICS = ("payments", "payments-at-kafka")
RECORDS: Final = 8_000
RATE: Final = 500
DEAD_S: Final = 20.0
INTERVAL_MS: Final = 1_000
BEAT_S: Final = 0.05
PATIENCE_S: Final = 120.0
_BEAT: Final = b"beat"


class Told(NamedTuple):
    """Findings of the demonstration, by topic."""

    exact: dict[str, bool]
    """True if each number is there once."""
    waits_s: dict[str, float]
    """The longest time between two records while the jobs were dead."""


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
        self.times_s: list[float] = []
        """When records came, monotonic."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._read, name=f"reader of {topic}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()
        self._consumer.close()

    def _read(self) -> None:
        while not self._ending.is_set():
            message = self._consumer.poll(0.1)
            if message is None or message.error() is not None:
                continue
            self.times_s.append(time.monotonic())
            if message.key() != _BEAT:
                self.numbers[message.value() or b""] += 1


@contextmanager
def beating(servers: str) -> Iterator[None]:
    """Have somebody else write into the topics all the while, without transactions."""
    ending = threading.Event()
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 0})

    def beat() -> None:
        while not ending.wait(BEAT_S):
            for topic in TOPICS:
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


def play(b: rollbridge.Bridge, gateway: str, folder: Path, *, records: int = RECORDS, dead_s: float = DEAD_S) -> Told:
    """Run both jobs, kill them, look at the readers, and let the jobs go on; return what was found."""
    servers = b.settings.bootstrap_servers
    with KafkaClient(servers) as kafka:
        admin = kafka.topics
        admin.create_topics(TopicSpec(name=topic) for topic in TOPICS)
    b.admin.adopt_topic(BEHIND)
    tell = Story().say
    told = Told({}, {})

    def start_job(topic: str, **more: object) -> FlinkJob:
        given = {"topic": topic, "prefix": topic, "records": records, "rate": RATE, "interval_ms": INTERVAL_MS, **more}
        return FlinkJob(folder / topic, bootstrap=gateway if topic == BEHIND else servers, **given)

    tell(f"two topics that exist; {BEHIND} is adopted, {STRAIGHT} is not")
    with beating(servers), Reader(servers, BEHIND) as behind, Reader(servers, STRAIGHT) as straight:
        readers = {BEHIND: behind, STRAIGHT: straight}
        with ExitStack() as stack:
            jobs = [stack.enter_context(start_job(topic)) for topic in TOPICS]
            tell(f"one Flink job for each: {BEHIND} through the gateway, {STRAIGHT} straight at Kafka")
            until(
                lambda: min(job.checkpoints for job in jobs) >= 3 or not all(job.alive for job in jobs),
                "the jobs have checkpoints",
                patience_s=PATIENCE_S,
            )
        dead = time.monotonic()
        tell("both jobs are killed, with a transaction open each")
        time.sleep(dead_s)
        for record in b.admin.transactions():
            left = (record.begun_ms + record.lease_ms) / 1000 - time.time()
            tell(f"rollbridge txn list: {record.id} of {record.client_name}, open, {left / 60:.0f} min left")
        for topic, reader in readers.items():
            told.waits_s[topic] = longest_silence(list(reader.times_s), dead, dead + dead_s)
        tell(f"in {dead_s:.0f} s the reader of {BEHIND} has waited {told.waits_s[BEHIND] * 1000:,.0f} ms at most")
        tell(f"that of {STRAIGHT} {told.waits_s[STRAIGHT]:,.1f} s: it stands still behind what is open")
        with ExitStack() as stack:
            origins = {topic: {"from": latest_checkpoint(folder / topic)} for topic in TOPICS}
            jobs = [stack.enter_context(start_job(topic, **origins[topic])) for topic in TOPICS]
            tell("both go on from their latest checkpoints")
            for job in jobs:
                job.finish(PATIENCE_S)
        for topic, reader in readers.items():
            until(lambda reader=reader: reader.numbers.total() >= records, f"{topic} is read", patience_s=PATIENCE_S)  # type: ignore[misc]
            told.exact[topic] = reader.numbers == Counter(f"{topic}-{number}".encode() for number in range(records))
            once = "each once" if told.exact[topic] else "NOT each once"
            tell(f"{topic}: {counted(reader.numbers.total(), 'number')} of {records:,} read, {once}")
    return told


def run() -> bool:
    """Start servers and a gateway, and play; return whether each number was read once."""
    with (
        ProcessCluster(coordinators=1, has_gateway=True) as cluster,
        tempfile.TemporaryDirectory(prefix="rollbridge-demo-") as folder,
        rollbridge.connect(cluster.bootstrap_servers, zookeeper=cluster.zookeeper, client_name="demo") as b,
    ):
        return all(play(b, cluster.gateway, Path(folder)).exact.values())


@click.command()
def main() -> None:
    """Kill a Flink job behind a gateway, and one beside it, and see who stands still."""
    play_example(run)


if __name__ == "__main__":
    main()
