"""A run whose writers know gateways only: some of these, producers of others, faults, a drain, and a verdict."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Final

from confluent_kafka import Consumer, TopicPartition

from integration_tests.backends.choice import new_cluster
from integration_tests.backends.interface import AnyCluster
from integration_tests.foreign.java import NEWEST, jars_of
from integration_tests.history.checks import find_faults
from integration_tests.history.events import History, Passing, Window
from integration_tests.history.final import commit_log
from integration_tests.history.gateways import COUNT, Gateways
from integration_tests.history.natives import PARTITIONS, topic_of, write_keys
from integration_tests.history.nemesis import COORDINATORS, Nemesis
from integration_tests.history.owner import Owner
from integration_tests.history.passers import group_of
from integration_tests.history.report import Report
from integration_tests.history.trial import (
    ADOPTED,
    ALL,
    BEGIN_S,
    GROUP,
    HEAL_S,
    KAFKA_SETTINGS,
    OWNED,
    STREAMS,
    WINDOWS,
    Trial,
)
from integration_tests.history.workers import AT_GATEWAYS, THROUGH, Workers
from integration_tests.patience import eventually
from rollbridge.errors import LocalEnvironmentError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.topics import TopicSpec
from rollbridge_devcluster.java import find_java

PASSERS: Final = 3
NAMED: Final = "history/named"
"""At times the brokers have a topic of this stream's name."""
KEYS: Final = [b"key-%d" % number for number in range(30)]
BROKEN_S: Final = 9.0
"""For so long something is broken: longer than a gateway's session."""
CALM: Final = 60
"""So many more things must be noted between two faults."""
BOUND_S: Final = 8.0
"""Within which time others' transactions are committed again and again, and read, while a gateway is in trouble."""
OTHERS: Final = (
    "quiet",
    "scale",
    "kill a coordinator",
    "pause a coordinator",
    "kill the broker",
    "bounce the broker",
    "pause the broker",
    "kill ZooKeeper",
    "pause ZooKeeper",
    "hold a native transaction",
    "release an adopted topic and adopt it again",
    "add partitions to an adopted topic",
)
"""Faults that concern everybody, and gateways with them, or an adopted topic that others do not write to."""


class GatewayRun(Trial):
    """One run; made by :func:`running`."""

    def __init__(self, cluster: AnyCluster, workers: Workers, gateways: Gateways, seed: int, folder: Path) -> None:
        self._gateways = gateways
        self._owner = Owner(cluster.bootstrap_servers, cluster.zookeeper, OWNED, seed)
        choice = random.Random(seed)
        nemesis = Nemesis(
            cluster,
            workers,
            choice,
            folder,
            streams=STREAMS,
            adopted=ADOPTED,
            copies="",
            passing="",
            pulse=ADOPTED,
            trimmed="",
            cut="",
            owner=self._owner,
        )
        self._clashes: list[str] = []
        client = {"kill a producer": self._kill_producer, "pause a producer": self._pause_producer}
        self.bounded: Final = frozenset({*gateways.faults, *client})
        """Faults that concern nobody but who writes through gateways."""
        self.faults: Final[dict[str, Callable[[], Iterator[None]]]] = {**gateways.faults, **client}
        self.faults.update((name, nemesis.faults[name]) for name in OTHERS)
        self.faults["make a topic with the name of a stream"] = self._make_named_topic
        self._has_java = has_java()
        where = f"1 + 1 + {COORDINATORS} processes and {COUNT} gateways"
        report = Report(seed, where if self._has_java else f"{where}, without Java")
        super().__init__(cluster, workers, choice, nemesis, report)

    def begin(self) -> None:
        """Make the streams, let clients begin."""
        with self._connect() as client:
            for stream in (*STREAMS, NAMED):
                client.admin.create_stream(stream, segments=2)
            self._owner.begin()
            with KafkaClient(self._cluster.bootstrap_servers) as kafka:
                admin = kafka.topics
                admin.create_topics([TopicSpec(name=topic_of(ADOPTED), partitions=PARTITIONS)])
            client.admin.adopt_topic(topic_of(ADOPTED), stream=ADOPTED)
        for _ in range(PASSERS):
            self._workers.start("passer", ALL)
        if self._has_java:
            self._workers.start("javan", ALL)
        for role in (*THROUGH, "guest"):
            self._workers.start(role, (OWNED,))
        self._workers.start("pulse", (ADOPTED,))
        self._workers.start("writer", ALL)
        for stream in ALL:
            self._workers.start("reader", (stream,))
        self._await_progress("clients begin", BEGIN_S)

    def window(self, fault: str, broken_s: float = BROKEN_S) -> None:
        """Break something for a while, perhaps while a stream is scaled, then see that it heals."""
        beside = self._choice.choice(("quiet", "quiet", "scale", "kill a coordinator"))
        beside = "quiet" if fault not in self.bounded else beside
        name = fault if beside == "quiet" else f"{fault}, and {beside}"
        is_bounded = fault in self.bounded and beside != "kill a coordinator"
        with self._broken(fault):
            began = time.monotonic_ns()
            with self._broken(beside):
                time.sleep(broken_s)
            ended = time.monotonic_ns()
        self._heal(Window(name, began, ended, BOUND_S if is_bounded else None))

    def random_fault(self) -> str:
        """The next fault of a deck that goes on from seed to seed."""
        names = sorted(self.faults.keys() - {"quiet"})
        random.Random(0).shuffle(names)
        return names[(self.report.seed * WINDOWS + sum(self.report.faults.values())) % len(names)]

    def end(self) -> Report:
        """Let everything come to rest, and compare what is there with what was asked for and told."""
        for role in (*AT_GATEWAYS, *THROUGH, "guest", "writer", "pulse"):
            self._workers.stop(role, 180)
        states = self._settled_states((*ALL, OWNED))
        owned = states.pop(OWNED)
        done = [item for role in (*THROUGH, "guest") for item in self._workers.operations(role)]
        rows = {stream: sum(map(len, state.rows.values())) for stream, state in states.items()}
        eventually(
            lambda: all(len(item.rows) >= rows[item.stream] for item in self._workers.readings()),
            "readers come to the end",
            HEAL_S,
        )
        self._workers.stop("reader", 60)
        foreign = [item for role in AT_GATEWAYS for item in self._workers.operations(role)]
        operations = [
            *foreign,
            *self._workers.operations("writer"),
            *self._workers.operations("pulse"),
            *self._probes,
        ]
        history = History(
            operations,
            states,
            commit_log(self._cluster.bootstrap_servers, GROUP),
            list(self._workers.readings()),
            self._windows,
            list(self._workers.calls()),
            [*self._workers.deaths(), *self._nemesis.deaths(), *self._gateways.deaths()],
            clashes=self._clashes,
            passing=[Passing(OWNED, done, owned, self._owner.since)],
            refusals=list(self._workers.refusals()),
            offsets=self._offsets(sorted({item.producer for item in foreign})),
            busy=(ADOPTED,),
        )
        self.report.seconds = time.monotonic() - self._began
        self.report.answers.update(
            f"{item.kind} {'fenced ' if item.fenced else ''}{item.wish}: {item.answer}" for item in (*operations, *done)
        )
        self.report.records = sum(rows.values())
        self.report.epochs = sum(len(state.history.records) for state in states.values())
        self.report.found = find_faults(history)
        return self.report

    def start_coordinators(self) -> None:
        """Before everything else."""
        self._nemesis.start_coordinators()

    def _broken(self, fault: str) -> AbstractContextManager[None]:
        return contextmanager(self.faults[fault])()

    def _kill_producer(self) -> Iterator[None]:
        """Its heir takes its transactional id."""
        role = self._choice.choice(AT_GATEWAYS if self._has_java else AT_GATEWAYS[:1])
        name = self._choice.choice(self._workers.alive(role))
        self._workers.kill(name)
        self._workers.start(role, ALL, name)
        yield

    def _pause_producer(self) -> Iterator[None]:
        name = self._choice.choice(self._workers.alive("passer"))
        self._workers.pause(name)
        yield
        self._workers.signal(name, signal.SIGCONT)

    def _make_named_topic(self) -> Iterator[None]:
        """The brokers have a topic with the name of a stream for a while, which plain producers write to."""
        topic = topic_of(NAMED)
        with KafkaClient(self._cluster.bootstrap_servers) as kafka:
            admin = kafka.topics
            admin.create_topics([TopicSpec(name=topic, partitions=PARTITIONS)])
            self._compare(topic)
            yield
            self._compare(topic)
            admin.delete_topics([topic])
            eventually(lambda: topic not in admin.list_topics(), f"topic {topic} is gone", HEAL_S)

    def _compare(self, topic: str) -> None:
        """See that producers find at each gateway what they find at the brokers."""
        wanted = write_keys(self._cluster.bootstrap_servers, topic, KEYS, "direct")
        for number in range(2 * COUNT):
            found = write_keys(self._gateways.addresses, topic, KEYS, f"through-{number}-{self._choice.random()}")
            if found != wanted:
                odd = {key: (found.get(key), wanted.get(key)) for key in KEYS if found.get(key) != wanted.get(key)}
                self._clashes.append(f"{topic}: {len(odd)} of {len(KEYS)} keys were not written where they are: {odd}")

    def _await_progress(self, what: str, timeout_s: float = HEAL_S) -> None:
        goals = {role: self._workers.noted([role]) + goal for role, goal in (("passer", CALM), ("javan", CALM // 4))}
        if not self._has_java:
            del goals["javan"]
        eventually(lambda: all(self._workers.noted([role]) >= goal for role, goal in goals.items()), what, timeout_s)

    def _offsets(self, producers: list[str]) -> dict[str, int | None]:
        """What the consumer groups of producers have committed."""
        found: dict[str, int | None] = {}
        for producer in producers:
            settings = {"bootstrap.servers": self._cluster.bootstrap_servers, "group.id": group_of(producer)}
            consumer = Consumer(settings)
            [place] = consumer.committed([TopicPartition(topic_of(ADOPTED), 0)], 60)
            consumer.close()
            found[producer] = place.offset if place.offset >= 0 else None
        return found


def has_java() -> bool:
    """Whether Kafka's producer in Java can be run here."""
    try:
        find_java()
        jars_of(NEWEST)
    except LocalEnvironmentError:
        return False
    return True


@contextmanager
def running(seed: int, folder: Path, cluster: AnyCluster | None = None) -> Iterator[GatewayRun]:
    """A run that has begun, with gateways, clients and coordinators that are gone afterwards.

    Its servers are ``cluster``, which runs, or its own, on the backend that was chosen.
    """
    with ExitStack() as ending:
        servers = cluster or ending.enter_context(new_cluster(kafka_settings=KAFKA_SETTINGS))
        workers = ending.enter_context(Workers(servers.bootstrap_servers, servers.zookeeper, folder, seed))
        gateways = Gateways(servers, folder, random.Random(~seed))
        run = GatewayRun(servers, workers, gateways, seed, folder)
        ending.callback(run.stop_coordinators)
        run.start_coordinators()
        ending.enter_context(gateways)
        workers.gateways = gateways.addresses
        run.begin()
        yield run
