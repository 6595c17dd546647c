"""A client that means harm, as a process: does at random whatever a member of a transaction group may, and tries more.

It is told on its input, as JSON, how to get in, which stream is its own, whom to disturb, a seed and how long.
In the end it prints how often it did what, and which of the things that it must not do it could do.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

import rollbridge
from integration_tests.hostile_content import Content
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import FrameHeader, FrameKind, Manifest, PieceKey, unpack_header
from rollbridge.commitlog.control import decode_control
from rollbridge.config import ConnectionSettings
from rollbridge.errors import RollbridgeError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.records import batch_of_one
from rollbridge.metadata import paths
from rollbridge.metadata.errors import ZooKeeperDeniedError
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.names import GroupName, StreamName

PAUSE_S: Final = 0.05
"""Between two things: other tests need the machine as well."""
INVENTED: Final = "ids that nobody has given out"
WAYS: Final = (
    "frames",
    "frames of open transactions",
    "a forged commit",
    "many tiny frames",
    "records in segments",
    "records of native transactions",
    "requests",
    "nodes among the requests",
    "sessions",
    "parts",
    "slots",
    "nodes of others",
    "streams",
    "what is not allowed",
    "counter",
    INVENTED,
)
"""What it can do."""
STREAMS_MAX: Final = 6
"""So many streams it makes: each costs brokers a few files for good."""


@dataclass(frozen=True)
class Plan:
    """What a hostile client is told.

    Attributes:
        bootstrap_servers, zookeeper, root, kafka, security: How to get in.
        group: SCOPE/GROUP in which it may do what members may.
        own: Stream on which it has a writer's rights.
        beside: Streams of others in its group, on which it has none.
        elsewhere: Streams of other groups, which are SCOPE/GROUP.
        clients: Names of others.
        seed: Of its choices.
        seconds: For so long.
        ways: What it does; everything if empty.
    """

    bootstrap_servers: str
    zookeeper: str
    root: str
    kafka: Mapping[str, str]
    security: Mapping[str, str]
    group: str
    own: str
    beside: tuple[str, ...]
    elsewhere: Mapping[str, str]
    clients: tuple[str, ...]
    seed: int
    seconds: float
    ways: tuple[str, ...] = ()

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, raw: str) -> Plan:
        """The inverse of :meth:`to_json`."""
        fields = json.loads(raw)
        return cls(**{**fields, **{name: tuple(fields[name]) for name in ("beside", "clients", "ways")}})


class Hostile:
    """The client, with connections of its own and one of ours."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._choice = random.Random(plan.seed)
        self._group = _group(plan.group)
        self._own = StreamName.parse(plan.own)
        self._buffer = self._own.buffer_topic(0)
        others = (*plan.beside, *plan.elsewhere)
        invents = not plan.ways or INVENTED in plan.ways
        self._content = Content(self._choice, plan.own, others, plan.clients, invents=invents)
        servers = {"bootstrap.servers": plan.bootstrap_servers, **plan.kafka}
        self._producer = Producer({**servers, "linger.ms": 2, "message.timeout.ms": 20_000, "retries": 3})
        self._consumer = Consumer(
            {**servers, "group.id": "rollbridge-hostile", "enable.auto.commit": False, "auto.offset.reset": "earliest"}
        )
        topics = (self._buffer, self._group.commit_log_topic)
        self._consumer.assign([TopicPartition(topic, 0, 0) for topic in topics])
        self._session = ZooKeeperSession(plan.zookeeper, root=plan.root, security=plan.security)
        self._session.start(60)
        self._client = rollbridge.Bridge(
            ConnectionSettings(
                bootstrap_servers=plan.bootstrap_servers,
                zookeeper=plan.zookeeper,
                zookeeper_root=plan.root,
                client_name="mallory",
                kafka=plan.kafka,
                zookeeper_security=plan.security,
            ),
            rollbridge.ClientOptions(commit_timeout_s=2, admin_timeout_s=2),
        )
        self._open: list[rollbridge.Transaction] = []
        self._streams = 0
        self.done: Counter[str] = Counter()
        self.broken_in: list[str] = []
        """What it did that it must not be able to do."""
        self.ways: Final[dict[str, Callable[[], None]]] = dict(
            zip(
                WAYS,
                (
                    self._frames,
                    self._frames_of_open_ones,
                    self._forge_a_commit,
                    self._tiny,
                    self._records,
                    self._native,
                    self._requests,
                    self._request_nodes,
                    self._sessions,
                    self._parts,
                    self._slots,
                    self._delete,
                    self._make_a_stream,
                    self._break_in,
                    self._counter,
                    self._forge_a_commit,
                ),
                strict=True,
            )
        )

    def run(self) -> None:
        """Do one thing after the other until the time is over."""
        deadline = time.monotonic() + self._plan.seconds
        ways = self._plan.ways or tuple(self.ways)
        while time.monotonic() < deadline:
            self._listen()
            way = self._choice.choice(ways)
            with suppress(RollbridgeError, KafkaException, TimeoutError):
                self.ways[way]()
            self.done[way] += 1
            time.sleep(PAUSE_S)
        self._producer.flush(20)

    def close(self) -> None:
        """Leave what is open as it is."""
        self._consumer.close()
        self._session.close()
        with suppress(RollbridgeError):
            self._client.close()

    # -- Kafka ----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Learn what frames look like, and which transactions there are."""
        for message in self._consumer.consume(200, 0.01):
            key = message.key()
            if message.error() is not None or not isinstance(key, bytes):
                continue
            if message.topic() == self._buffer:
                header = unpack_header(key)
                if header is not None and len(self._content.seen) < 300:
                    self._content.seen.append((key, message.value()))
            else:
                with suppress(RollbridgeError):
                    self._content.ids.append(decode_control(key, message.value()).transaction.bytes)

    def _send(self, topic: str, key: bytes | None, value: bytes | None, *, forbidden: bool = False) -> None:
        def arrived(error: Any, _: Any) -> None:
            if error is None and forbidden:
                self.broken_in.append(f"a record in {topic}")

        for _ in range(3):
            try:
                self._producer.produce(topic, value, key=key, on_delivery=arrived)
            except BufferError:
                self._producer.flush(5)
            else:
                break
        self._producer.poll(0)

    def _frames(self) -> None:
        for _ in range(self._choice.choice((1, 5, 30))):
            self._send(self._buffer, *self._content.frame())

    def _frames_of_open_ones(self) -> None:
        """Among the frames of a transaction that a client of ours has begun and commits."""
        own = str(self._own)
        transaction = self._client.begin(own)
        self._content.ids.append(transaction.id.bytes)
        for _ in range(self._choice.randrange(1, 4)):
            transaction.write(own, key=b"k", value=b"hostile")
        transaction.flush(2)
        for _ in range(self._choice.randrange(1, 4)):
            key, value = self._content.frame()
            if key is not None and len(key) == 44:
                key = key[:4] + transaction.id.bytes + key[20:]
            self._send(self._buffer, key, value)
        self._producer.flush(5)
        if self._choice.random() < 0.2:
            self._open.append(transaction)
        else:
            transaction.commit_async()

    def _forge_a_commit(self) -> None:
        """A transaction all of whose frames are forged, with a manifest that fits."""
        identifier = self._content.fresh_id()
        key, value = self._content.begin()
        self._send(self._buffer, FrameHeader(FrameKind.BEGIN, identifier).pack(), value)
        key, value = self._content.data(identifier)
        self._send(self._buffer, key, value)
        header = unpack_header(key)
        count = header.records if header else 1
        if self._choice.random() < 0.5 or not count > 0:
            self._send(self._buffer, *self._content.commit(identifier))
        else:
            manifest = Manifest({PieceKey(0, 0, 0): count}).encode()
            self._send(self._buffer, FrameHeader(FrameKind.COMMIT, identifier).pack(), manifest)

    def _tiny(self) -> None:
        for key, value in self._content.tiny(3_000):
            self._send(self._buffer, key, value)

    def _segment_topics(self) -> list[str]:
        history = self._client.admin.history(str(self._own))
        return [self._own.segment_topic(item) for item in history.segments()]

    def _records(self) -> None:
        topics = self._segment_topics()
        for _ in range(20):
            key, value, headers = self._content.record()
            plain: list[tuple[str, str | bytes | None]] = [(name, item) for name, item in headers if name.isascii()]
            with suppress(BufferError, TypeError, ValueError):
                self._producer.produce(self._choice.choice(topics), value, key=key, headers=plain)
        self._producer.poll(0)

    def _native(self) -> None:
        """Native transactions, which stay open for a moment and end this way or that."""
        name = f"{self._own.scope}.{self._own.stream}.{self._choice.randrange(3)}"
        with KafkaClient(self._plan.bootstrap_servers, security=self._plan.kafka).appender(
            name, transaction_timeout_ms=5_000, retry_timeout_ms=3_000
        ) as appender:
            appender.init()
            topic = self._choice.choice(self._segment_topics())
            key, value, headers = self._content.record()
            appender.append([(topic, batch_of_one(int(time.time() * 1000), key, value, headers))])
            chance = self._choice.random()
            if chance < 0.5:
                appender.commit()
            elif chance < 0.8:
                appender.abort()

    # -- ZooKeeper ------------------------------------------------------------------------------------------------

    def _node(self, path: str, value: bytes, *, ephemeral: bool = True, sequential: bool = False) -> str | None:
        with suppress(RollbridgeError):
            return self._session.create(path, value, ephemeral=ephemeral, sequential=sequential)
        return None

    def _requests(self) -> None:
        parent = paths.requests(self._group)
        streams = (str(self._own), *self._plan.beside, *self._plan.elsewhere)
        for _ in range(self._choice.choice((1, 3, 40))):
            request = self._content.request(streams)
            if len(request) < 1_000_000:
                self._node(f"{parent}/{paths.REQUEST_PREFIX}", request, sequential=True)

    def _request_nodes(self) -> None:
        """Nodes that are no requests, stay, and have children."""
        parent = paths.requests(self._group)
        sequential = self._choice.random() < 0.5
        name = paths.REQUEST_PREFIX if sequential else self._content.name()
        stays = self._choice.random() < 0.3
        value = self._content.garbage()
        path = self._node(f"{parent}/{name}", value, ephemeral=not stays, sequential=sequential)
        if stays and path is not None:
            self._node(f"{path}/child", b"", ephemeral=False)
            request = self._content.request(())
            path = self._node(f"{parent}/{paths.REQUEST_PREFIX}", request, ephemeral=False, sequential=True)
            if path is not None:
                self._node(f"{path}/child", b"", ephemeral=False)

    def _sessions(self) -> None:
        names = [*self._plan.clients, self._content.name(), "mallory"]
        path = paths.session(self._group, self._choice.choice(names))
        with suppress(RollbridgeError):
            if self._session.exists(path) is None:
                self._session.create(path, self._content.garbage())
            else:
                self._session.set(path, self._content.garbage())
            if self._choice.random() < 0.2:
                self._session.create(f"{path}/child")

    def _parts(self) -> None:
        identifier = self._choice.choice(
            (self._content.name(), str(TransactionId.of(0, self._choice.randrange(9_999))))
        )
        path = self._node(f"{paths.parts_of(self._group)}/{identifier}", self._content.garbage(), ephemeral=False)
        if path is not None and self._choice.random() < 0.5:
            self._node(f"{path}/child", b"", ephemeral=False)

    def _slots(self) -> None:
        stream = self._choice.choice((str(self._own), *self._plan.beside))
        parent = paths.cas_slots(StreamName.parse(stream))
        name = self._choice.choice((str(self._choice.randrange(20)), "-1", "1" * 200, self._content.name()))
        path = self._node(f"{parent}/{name}", self._content.garbage(), ephemeral=self._choice.random() < 0.7)
        if path is not None:
            self._node(f"{path}/child", b"", ephemeral=False)

    def _delete(self) -> None:
        """Requests, answers, sessions, counters of parts and slots of others, as far as a member may."""
        beside = [paths.cas_slots(StreamName.parse(stream)) for stream in self._plan.beside]
        parents = [paths.requests(self._group), paths.answers(self._group), paths.sessions(self._group)]
        parent = self._choice.choice([*parents, paths.parts_of(self._group), *beside])
        for name in self._session.children(parent)[:5]:
            with suppress(RollbridgeError):
                self._session.delete(f"{parent}/{name}")

    def _make_a_stream(self) -> None:
        """And delete it again, now and then without waiting."""
        name = f"{self._own.scope}/made-{self._streams % STREAMS_MAX}"
        self._streams += 1
        if self._streams > 2 * STREAMS_MAX:
            return
        with suppress(RollbridgeError):
            self._client.admin.create_stream(name, group=self._group.group)
        if self._choice.random() < 0.5:
            with suppress(RollbridgeError):
                self._client.admin.delete_stream(name)

    def _counter(self) -> None:
        self._session.set(paths.counter(self._group), self._choice.choice((b"x", b"", b"-5", b"9" * 40, b"1" * 5_000)))

    def _break_in(self) -> None:
        """Whatever it may not: topics of the leader and of others, nodes of the leader and of other groups."""
        topics = [self._group.commit_log_topic, f"{self._own.scope}.__transaction_buffer_snapshot_indexes"]
        nodes = [
            paths.controller(self._group),
            paths.leader(self._group),
            paths.committing(self._group),
            paths.scaling(self._group),
            paths.outdated(self._group),
            f"{paths.pending_changes(self._group)}/x",
            paths.stream(self._own),
            paths.truncation(self._own),
            paths.epoch(self._own, 1),
            f"{paths.answers(self._group)}/{paths.REQUEST_PREFIX}0000000001",
            f"{paths.COORDINATORS}/x",
        ]
        for text in (*self._plan.beside, *self._plan.elsewhere):
            stream = StreamName.parse(text)
            topics.append(stream.buffer_topic(0))
            nodes.append(paths.stream(stream))
        for text in self._plan.elsewhere.values():
            other = _group(text)
            topics.append(other.commit_log_topic)
            nodes += [f"{paths.requests(other)}/{paths.REQUEST_PREFIX}x", f"{paths.sessions(other)}/x"]
            nodes += [f"{paths.parts_of(other)}/x", paths.controller(other)]
        for topic in self._choice.sample(topics, 2):
            self._send(topic, *self._content.changed(), forbidden=True)
        for path in self._choice.sample(nodes, 3):
            for write in (self._session.create, self._session.set):
                try:
                    write(path, self._content.garbage())
                except ZooKeeperDeniedError:
                    continue
                except RollbridgeError:
                    continue  # it is there already, or is not
                self.broken_in.append(f"{write.__name__} {path}")


def _group(text: str) -> GroupName:
    scope, _, name = text.partition("/")
    return GroupName(scope, name)


def main() -> None:
    """Do what a line of JSON on the input says, and print what was done.

    Everybody may see command lines, and there are passwords in it.
    """
    raw = sys.stdin.readline()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    hostile = Hostile(Plan.from_json(raw))
    try:
        hostile.run()
    finally:
        hostile.close()
    print(json.dumps({"done": hostile.done, "broken_in": hostile.broken_in}), flush=True)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
