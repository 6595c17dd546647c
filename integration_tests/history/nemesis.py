"""Faults, by name: what breaks, for how long, and how it heals."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from confluent_kafka import Producer

import rollbridge
from integration_tests.backends import faults
from integration_tests.backends.interface import Ability, AnyCluster
from integration_tests.backends.local import LocalCluster
from integration_tests.coordinators import VALIDATING
from integration_tests.defects import defects_in
from integration_tests.history.events import FOREIGN
from integration_tests.history.owner import Owner
from integration_tests.history.repairs import Restoration
from integration_tests.history.workers import Workers
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.base.ids import SegmentId
from rollbridge.errors import ConflictError, RollbridgeError, StreamExistsError, StreamNotFoundError, UnavailableError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.records import batch_of_one
from rollbridge.stream.names import StreamName
from rollbridge_devcluster.nodes import Node

COORDINATORS: Final = 2
SESSION_S: Final = 2.0
"""ZooKeeper session of the coordinators; whoever is paused for longer has been replaced."""
LARGE_FROM: Final = ("0", "3000", "3000")
"""Bytes from which on transactions are merged beside the line, which is those that writers make large, or none."""
LOSS: Final = 0.1
"""Share of the packets that is lost."""
BOUNDS_S: Final = {
    "quiet": 10.0,
    "kill a client": 10.0,
    "pause a client": 10.0,
    "hold a native transaction": 10.0,
    "ask for what Kafka refuses": 10.0,
    "kill a member of a group": 10.0,
    "kill a transformer": 10.0,
    "truncate a stream": 10.0,
    "keep a stream for a second": 10.0,
    "strangers write any bytes": 10.0,
    "release an adopted topic and adopt it again": 10.0,
    "add partitions to an adopted topic": 10.0,
    "make an adopted topic anew": 10.0,
    "make an adopted topic anew while a client of it stands still": 10.0,
    "lose a buffer": 20.0,  # for once, whoever leads takes over from itself
    "lose a segment": 10.0,
    "make a stream anew": 10.0,
    "make a stream anew while a client of it stands still": 10.0,
}
"""Faults that concern one client or stream, and within which time somebody's transaction must be committed meanwhile,
again and again, on a machine that is busy. They last a little longer than that, so that standing still shows."""


CUT_S: Final = 20.0
"""For so long a cut lasts at least: twice a broker's session, so that others have led for a while what it led."""
WITH_NUMBERS: Final = ("writer", "guest", "pulse", "transformer", "odd", "trimmed", "loser")
"""Clients that hold numbers out of ZooKeeper, and so have to be restarted when it was set back."""


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Do something beside a block, and wait for it at its end."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


class Nemesis:
    """Breaks one thing at a time. What is broken stays so for the length of a ``with`` block."""

    def __init__(
        self,
        cluster: AnyCluster,
        workers: Workers,
        choice: random.Random,
        folder: Path,
        *,
        streams: tuple[str, ...],
        adopted: str,
        copies: str,
        passing: str,
        pulse: str,
        trimmed: str,
        cut: str,
        owner: Owner,
    ) -> None:
        """``copies`` has what is in the first of ``streams``, ``passing`` comes and goes, ``pulse`` is left alone.

        Writers write ``streams``, which are scaled, and ``adopted``, which is not.

        The oldest records of ``trimmed`` are deleted, and the newest of ``cut`` are lost. ``owner`` has a topic that a
        stream of its own has adopted.
        """
        self._trimmed, self._cut = trimmed, cut
        self._passing = passing
        self._cluster = cluster
        self.paused: str | None = None
        """The client that stood still in the latest block, if one did."""
        self.led_outdated: list[str] = []
        """Times at which nobody noticed that ZooKeeper had been set back, a sentence each."""
        self._workers = workers
        self._streams = streams
        self._written = (*streams, adopted)
        self._choice = choice
        self.coordinators: list[str] = []
        self._handles: list[Node] = []
        broker, server = "the broker", "ZooKeeper"
        if len(cluster.brokers) > 1:
            broker, server = "a broker", "a ZooKeeper server"
        self.faults: Final[dict[str, Callable[[], Iterator[None]]]] = {
            "quiet": self._quiet,
            "kill a coordinator": lambda: self._kill(self.coordinators),
            "pause a coordinator": lambda: self._pause(self.coordinators),
            f"kill {broker}": lambda: self._kill(cluster.brokers),
            f"bounce {broker}": lambda: self._bounce(cluster.brokers),
            f"pause {broker}": lambda: self._pause(cluster.brokers),
            f"kill {server}": lambda: self._kill(cluster.zookeepers),
            f"pause {server}": lambda: self._pause(cluster.zookeepers),
            "kill a client": self._kill_client,
            "pause a client": self._pause_client,
            "scale": self._scale,
            "hold a native transaction": self._hold_a_native_transaction,
            "ask for what Kafka refuses": self._ask_for_too_much,
            "kill a member of a group": lambda: self._kill_member("member", (*self._written, pulse)),
            "kill a transformer": lambda: self._kill_member("transformer", (streams[0], copies)),
            "lose a buffer": lambda: self._lose(lambda stream, _: stream.buffer_topic()),
            "lose a segment": lambda: self._lose(lambda stream, segment: stream.segment_topic(segment)),
            "make a stream anew": lambda: self._meanwhile(self._come_and_go),
            "make a stream anew while a client of it stands still": lambda: self._beside_a_paused_guest(
                passing, self._come_and_go
            ),
            "make a stream anew while a coordinator stands still": lambda: self._beside_a_paused_coordinator(
                self._come_and_go
            ),
            "set ZooKeeper back": self._set_zookeeper_back,
            "truncate a stream": lambda: self._over_and_over(self._truncate),
            "keep a stream for a second": self._retain,
            "strangers write any bytes": lambda: self._over_and_over(self._write_any_bytes),
            "release an adopted topic and adopt it again": lambda: self._meanwhile(owner.take_back),
            "add partitions to an adopted topic": lambda: self._meanwhile(owner.grow),
            "make an adopted topic anew": lambda: self._meanwhile(owner.make_anew),
            "make an adopted topic anew while a client of it stands still": lambda: self._beside_a_paused_guest(
                owner.stream, owner.make_anew
            ),
            "make an adopted topic anew while a coordinator stands still": lambda: self._beside_a_paused_coordinator(
                owner.make_anew
            ),
        }
        if Ability.LOG_CUT in cluster.can:
            self.faults["a log loses its end"] = self._cut_log
        if Ability.DISK_STALL in cluster.can:
            self.faults[f"the disk of {broker} stands still"] = self._stall_disk
        if Ability.PARTITION in cluster.can:
            self.faults[f"cut {broker} off from the others"] = lambda: self._cut_off(cluster.brokers)
        if Ability.PARTITION in cluster.can and Ability.CONTAINERS not in cluster.can:
            # Coordinators and clients share this machine.
            self.faults.update(
                {
                    f"cut {broker} off from clients": self._cut_off_from_us,
                    f"cut {broker} off from the others and clients": lambda: self._cut_off(
                        cluster.brokers, [faults.HOST]
                    ),
                }
            )
        elif Ability.PARTITION in cluster.can:
            cuts: dict[str, Callable[[], Iterator[None]]] = {
                f"cut {broker} off from the others and coordinators": lambda: self._cut_off(
                    cluster.brokers, self.coordinators
                ),
                f"cut {broker} off from coordinators": lambda: self._cut_off(cluster.brokers[:1], self.coordinators),
                f"cut {server} off from the others": lambda: self._cut_off(cluster.zookeepers),
                "cut a coordinator off from ZooKeeper": lambda: self._cut_coordinator(cluster.zookeepers),
                "cut a coordinator off from Kafka": lambda: self._cut_coordinator(cluster.brokers),
                f"nobody hears {broker}": self._silence_broker,
            }
            self.faults.update(cuts)
        if Ability.LOSS in cluster.can:
            self.faults[f"{broker} loses packets"] = self._lose_packets

    def broken(self, name: str) -> AbstractContextManager[None]:
        """Break it for the length of a block."""
        self.paused = None
        return contextmanager(self.faults[name])()

    def start_coordinators(self) -> None:
        """Two, of which one leads and the other stands by; the clock of the second is wrong by about a day."""
        wrong_s = self._choice.choice([-1, 1]) * self._choice.uniform(0.5, 1.5) * 86_400
        env = {
            "ROLLBRIDGE_COORDINATOR_SESSION_TIMEOUT_S": str(SESSION_S),
            **VALIDATING,
            "CONSTANT_RETENTION_CHECK_MS": "200",
            # Or the commit log would be kept as far back as a takeover may read, which is further than a history goes.
            "CONSTANT_TRANSACTION_BUFFER_SNAPSHOT_REPLAY_MAX": "500",
            "CONSTANT_OUTCOMES_UNLISTED_MAX": "200",
            "ROLLBRIDGE_COORDINATOR_MERGE_BESIDE_BYTES": self._choice.choice(LARGE_FROM),
        }
        for number in range(COORDINATORS):
            self._handles.append(self._cluster.start_coordinator(env=env, ahead_s=wrong_s if number else 0.0))
        self.coordinators = [handle.name for handle in self._handles]

    def stop_coordinators(self) -> None:
        """All of them, as far as they run."""
        while self._handles:
            self._cluster.stop_coordinator(self._handles.pop())

    def deaths(self) -> Iterator[str]:
        """Coordinators that do not run any more, and defects that they have logged.

        Who was killed has been started again.
        """
        for name in self.coordinators:
            if not self._cluster.runs(name):
                yield f"{name} has ended by itself"
        if isinstance(self._cluster, LocalCluster):
            yield from defects_in(self._cluster.logs)

    def _quiet(self) -> Iterator[None]:
        yield

    def _one_of(self, parts: Sequence[str]) -> str:
        """One of several, without a throw of the dice where there is no choice."""
        return parts[0] if len(parts) == 1 else self._choice.choice(parts)

    def _kill(self, parts: Sequence[str]) -> Iterator[None]:
        with faults.killed(self._cluster, self._one_of(parts)):
            yield

    def _bounce(self, parts: Sequence[str]) -> Iterator[None]:
        yield
        self._cluster.restart(self._one_of(parts))

    def _pause(self, parts: Sequence[str]) -> Iterator[None]:
        with self._cluster.paused(self._one_of(parts)):
            yield

    def _cut_off(self, parts: Sequence[str], more: Sequence[str] = ()) -> Iterator[None]:
        """Nothing goes between one of them and the others, or ``more``; clients of this machine still reach it."""
        part = self._one_of(parts)
        with faults.partitioned(self._cluster, part, [*(other for other in parts if other != part), *more]):
            yield

    def _cut_off_from_us(self) -> Iterator[None]:
        """The other brokers reach it, and nobody else does."""
        with faults.partitioned(self._cluster, self._one_of(self._cluster.brokers), faults.HOST):
            yield

    def _cut_coordinator(self, servers: Sequence[str]) -> Iterator[None]:
        with faults.partitioned(self._cluster, self._one_of(self.coordinators), servers):
            yield

    def _silence_broker(self) -> Iterator[None]:
        """It hears the other brokers and the coordinators, and they do not hear it."""
        part = self._one_of(self._cluster.brokers)
        others = [other for other in self._cluster.brokers if other != part]
        with faults.silenced(self._cluster, part, [*others, *self.coordinators]):
            yield

    def _lose_packets(self) -> Iterator[None]:
        with faults.lossy(self._cluster, self._one_of(self._cluster.brokers), LOSS):
            yield

    def _stall_disk(self) -> Iterator[None]:
        """Writes to the logs of a broker do not end, now and then, while a stream is scaled."""
        part, stream = self._one_of(self._cluster.brokers), self._choice.choice(self._streams)
        lengths_s = [self._choice.uniform(0.3, 2.0) for _ in range(1_000)]
        over = threading.Event()

        def stall() -> None:
            for length_s in lengths_s:
                if over.wait(length_s / 2):
                    return
                self._cluster.stall_disk(part, length_s)

        def rescale() -> None:
            while not over.is_set():
                self._rescale(stream)

        with beside(stall), beside(rescale):
            yield
            over.set()

    def _set_zookeeper_back(self) -> Iterator[None]:
        """ZooKeeper is restored from a backup, and repaired, as docs/backup-and-repair.md says."""
        restoration = Restoration(self._cluster, self._streams[0])
        restoration.back_up()
        restoration.await_change(lambda: self._rescale(self._streams[0]))
        heirs = [self._workers.kill_all(role) for role in WITH_NUMBERS]
        for handle in self._handles:
            self._cluster.stop_coordinator(handle)
        self._cluster.restore_zookeeper()
        for name in self.coordinators:
            self._cluster.restart(name)
        if not restoration.is_refused():
            self.led_outdated.append("a leader has not noticed that ZooKeeper was set back")
        yield
        restoration.repair()
        for task in (task for tasks in heirs for task in tasks):
            leaves = task.role == "writer" and self._choice.random() < 0.5
            self._workers.start(task.role, task.streams, task.name if leaves else None)

    def _kill_client(self) -> Iterator[None]:
        """Half of them have an heir, which takes the name and ends what was left open."""
        name = self._choice.choice(self._workers.alive())
        self._workers.kill(name)
        self._workers.start("writer", self._written, name if self._choice.random() < 0.5 else None)
        yield

    def _pause_client(self) -> Iterator[None]:
        self.paused = self._choice.choice(self._workers.alive())
        self._workers.pause(self.paused)
        yield
        self._workers.signal(self.paused, signal.SIGCONT)

    def _kill_member(self, role: str, streams: tuple[str, ...]) -> Iterator[None]:
        """One of a consumer group; another one comes in its place."""
        self._workers.kill(self._choice.choice(self._workers.alive(role)))
        self._workers.start(role, streams)
        yield

    def _meanwhile(self, does: Callable[[threading.Event], None]) -> Iterator[None]:
        """Somebody does something to a stream, again and again, while clients write to it."""
        over = threading.Event()
        with beside(lambda: does(over)):
            yield
            over.set()

    def _beside_a_paused_guest(self, stream: str, does: Callable[[threading.Event], None]) -> Iterator[None]:
        self.paused = self._choice.choice(self._workers.alive("guest", stream))
        self._workers.pause(self.paused)
        yield from self._meanwhile(does)
        self._workers.signal(self.paused, signal.SIGCONT)

    def _beside_a_paused_coordinator(self, does: Callable[[threading.Event], None]) -> Iterator[None]:
        with self._cluster.paused(self._one_of(self.coordinators)):
            yield from self._meanwhile(does)

    def _come_and_go(self, over: threading.Event) -> None:
        """A stream is deleted and made anew under its name."""
        with rollbridge.connect(self._cluster.bootstrap_servers, zookeeper=self._cluster.zookeeper) as client:
            while True:
                with suppress(ConflictError, StreamNotFoundError, UnavailableError):
                    client.admin.delete_stream(self._passing)
                # It is not deleted while transactions of it are open, and there may always be some.
                with suppress(UnavailableError):
                    with suppress(StreamExistsError):
                        client.admin.create_stream(self._passing, segments=2)
                    if over.wait(1.0):
                        return

    def _lose(self, topic: Callable[[StreamName, SegmentId], str]) -> Iterator[None]:
        """Somebody deletes a topic of a stream of its own, which is in an error state then, and can be deleted."""
        stream = f"{StreamName.parse(self._streams[0]).scope}/lost-{self._choice.randrange(1 << 30)}"
        with (
            rollbridge.connect(self._cluster.bootstrap_servers, zookeeper=self._cluster.zookeeper) as client,
            KafkaClient(self._cluster.bootstrap_servers) as kafka,
        ):
            client.admin.create_stream(stream)
            [segment] = client.admin.history(stream).active.segments
            transaction = client.begin(stream)
            transaction.write(stream, key=b"k", value=b"lost")
            transaction.flush()
            eventually(
                lambda: any(item.id == transaction.id for item in client.admin.transactions()), "it is on record"
            )
            kafka.topics.delete_topics([topic(StreamName.parse(stream), segment.id)])
            with suppress(RollbridgeError):
                transaction.commit_async()  # what becomes of it, whoever leads says
            yield
            eventually(lambda: client.admin.describe(stream).fault is not None, "the stream is in an error state")
            with suppress(RollbridgeError):  # of a lost buffer, it has ended already
                client.admin.abort_transaction(transaction.id)
            found = client.outcome(transaction=transaction.id, timeout=PATIENCE_S)
            assert found.state == "aborted", f"{transaction.id} of {stream}, which has lost a topic, is {found.state}"
            client.admin.delete_stream(stream, timeout_s=PATIENCE_S)

    def _hold_a_native_transaction(self) -> Iterator[None]:
        """Somebody else's native transaction is open on an active segment while its stream is to be scaled."""
        stream = self._choice.choice(self._streams)
        with rollbridge.connect(self._cluster.bootstrap_servers, zookeeper=self._cluster.zookeeper) as client:
            segment = self._choice.choice(client.admin.history(stream).active.segments)
        producer = Producer(
            {
                "bootstrap.servers": self._cluster.bootstrap_servers,
                "transactional.id": f"stranger-{self._choice.random()}",
                "transaction.timeout.ms": 120_000,
            }
        )
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce(StreamName.parse(stream).segment_topic(segment.id), b"never to be seen", b"stranger")
        producer.flush(60)
        with beside(lambda: self._rescale(stream)):
            yield
            producer.abort_transaction(60)

    def _ask_for_too_much(self) -> Iterator[None]:
        """A stream with more copies than there are brokers, asked for by somebody who does not wait for the answer."""
        options = rollbridge.ClientOptions(admin_timeout_s=0.5)
        with (
            rollbridge.connect(
                self._cluster.bootstrap_servers, zookeeper=self._cluster.zookeeper, options=options
            ) as client,
            suppress(RollbridgeError),
        ):
            scope = StreamName.parse(self._streams[0]).scope
            client.admin.create_stream(f"{scope}/copies-{self._choice.randrange(1_000)}", replication_factor=9)
        yield

    def _over_and_over(self, work: Callable[[rollbridge.Bridge], None]) -> Iterator[None]:
        """Do something to the stream that is truncated, and scale it meanwhile."""
        over = threading.Event()

        def go_on() -> None:
            with rollbridge.connect(self._cluster.bootstrap_servers, zookeeper=self._cluster.zookeeper) as client:
                while not over.wait(0.3):
                    with suppress(RollbridgeError):
                        work(client)

        with beside(go_on), beside(lambda: self._rescale(self._trimmed)):
            yield
            over.set()

    def _truncate(self, client: rollbridge.Bridge) -> None:
        """Before the end, a moment, or a record in the middle of what is there."""
        chance = self._choice.random()
        if chance < 0.2:
            client.admin.truncate(self._trimmed, "latest")
        elif chance < 0.5:
            client.admin.truncate(self._trimmed, int(time.time() * 1000 - self._choice.uniform(0, 5_000)))
        else:
            with client.reader(self._trimmed, follow=False) as reader:
                for _ in range(self._choice.randint(1, 200)):
                    if reader.poll(0.2) is None:
                        break
                position = reader.position
            client.admin.truncate(self._trimmed, position)

    def _retain(self) -> Iterator[None]:
        """Records of a stream are kept for a second, or two kilobytes of them."""
        limit: dict[str, Any] = {"retention_time": timedelta(seconds=1)}
        if self._choice.random() < 0.5:
            limit = {"retention_bytes": 2_000}
        with rollbridge.connect(self._cluster.bootstrap_servers, zookeeper=self._cluster.zookeeper) as client:
            client.admin.update_stream(self._trimmed, **limit)
            with beside(lambda: self._rescale(self._trimmed)):
                yield
            eventually(lambda: self._keeps_all(client), "no retention any more")

    def _keeps_all(self, client: rollbridge.Bridge) -> bool:
        try:
            client.admin.update_stream(self._trimmed, retention_time=None, retention_bytes=None)
        except RollbridgeError:
            return False
        return True

    def _write_any_bytes(self, client: rollbridge.Bridge) -> None:
        """A record of somebody who knows nothing of us, under a key of others perhaps; its headers need be no text."""
        segment = self._choice.choice(client.admin.history(self._trimmed).active.segments)
        key = self._choice.choice((b"register-0", b"register-1", None, b"", self._choice.randbytes(20)))
        names = ("\udcff\udcfe", "", "rollbridge", "rollbridge-late", "h" * 300)
        headers = [(self._choice.choice(names), self._choice.randbytes(self._choice.choice((0, 24)))) for _ in range(3)]
        value = FOREIGN.encode() + self._choice.randbytes(30)
        batch = batch_of_one(int(time.time() * 1000), key, value, headers)
        topic = StreamName.parse(self._trimmed).segment_topic(segment.id)
        with KafkaClient(self._cluster.bootstrap_servers).appender(
            "history-stranger", transaction_timeout_ms=5_000, retry_timeout_ms=5_000
        ) as stranger:
            stranger.init()
            stranger.append([(topic, batch)])
            if self._choice.random() < 0.7:
                stranger.commit()
            else:
                stranger.abort()

    def _cut_log(self) -> Iterator[None]:
        """The power fails, and a segment that has one replica has lost its end: some batches, no transaction half."""
        with rollbridge.connect(self._cluster.bootstrap_servers, zookeeper=self._cluster.zookeeper) as client:
            segment = self._choice.choice(client.admin.history(self._cut).active.segments)
        topic = StreamName.parse(self._cut).segment_topic(segment.id)
        yield
        ends = self._cluster.log_ends(topic)
        self._cluster.cut_log(topic, self._choice.choice(ends[-30:]))

    def _scale(self) -> Iterator[None]:
        stream = self._choice.choice(self._streams)
        with beside(lambda: self._rescale(stream)):
            yield

    def _rescale(self, stream: str) -> None:
        """Split a segment or join two; without an answer it may still come."""
        try:
            with rollbridge.connect(self._cluster.bootstrap_servers, zookeeper=self._cluster.zookeeper) as client:
                active = sorted(client.admin.history(stream).active.segments, key=lambda item: item.range.low)
                place = self._choice.randrange(len(active))
                low, high = active[place].range.low, active[place].range.high
                if len(active) < 4:
                    middle = (low + high) / 2
                    client.admin.scale(stream, seal=[active[place].id.number], ranges=[(low, middle), (middle, high)])
                else:
                    first, second = active[max(place - 1, 0)], active[max(place, 1)]
                    numbers = [first.id.number, second.id.number]
                    client.admin.scale(stream, seal=numbers, ranges=[(first.range.low, second.range.high)])
        except RollbridgeError:
            return
