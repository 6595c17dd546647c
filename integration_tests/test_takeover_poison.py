"""A poison corpus for takeovers: what belongs to one stream is gone, damaged or denied when a new leader comes.

All streams are of one group: one is innocent, and each of the others is poisoned between two leaders. The innocent one
commits whatever has become of the others, which are in an error state if their leader cannot lead them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from confluent_kafka import Producer
from kazoo.client import KazooClient
from kazoo.security import make_digest_acl

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site
from integration_tests.command_line import run_cli
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.errors import RollbridgeError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.topics import TopicSpec
from rollbridge.metadata import paths
from rollbridge.metadata.changes import BUFFER_LOST, FORMAT_NEWER, METADATA_UNREADABLE
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import GroupName, StreamName


class Place:
    """A stream between two leaders."""

    def __init__(
        self, name: StreamName, brokers: str, session: ZooKeeperSession, zookeeper: KazooClient, kafka: KafkaClient
    ) -> None:
        self.name, self._brokers = name, brokers
        self.session, self._zookeeper, self.kafka = session, zookeeper, kafka

    @property
    def buffer(self) -> str:
        return self.name.buffer_topic()

    @property
    def segment(self) -> str:
        history = Metadata(self.session).history(self.name)
        assert history is not None
        return self.name.segment_topic(history.active.segments[0].id)

    def replace(self, topic: str) -> None:
        described = self.kafka.topics.describe([topic])[topic]
        own = {key: described.config[key] for key in described.own}
        self.kafka.topics.delete_topics([topic])
        self.kafka.topics.create_topics([TopicSpec(name=topic, partitions=described.partitions, config=own)])

    def empty(self, topic: str) -> None:
        self.kafka.topics.delete_records(self.kafka.offsets.end([(topic, 0)]))

    def garbage(self, topic: str) -> None:
        """Write what is no frame, and no record of ours."""
        producer = Producer({"bootstrap.servers": self._brokers})
        for key in (None, b"", b"RB", bytes(200)):
            producer.produce(topic, key=key, value=b"garbage")
        assert producer.flush(PATIENCE_S) == 0

    def write(self, path: str, value: bytes) -> None:
        self.session.ensure(path)
        self.session.set(path, value)

    def newer(self, path: str) -> None:
        node = self.session.get(path)
        assert node is not None
        self.session.set(path, json.dumps({**json.loads(node.value), "version": 1_000}).encode())

    def delete(self, path: str) -> None:
        for child in self.session.children(path):
            self.delete(f"{path}/{child}")
        if self.session.exists(path) is not None:
            self.session.delete(path)

    def deny(self, path: str) -> None:
        self.session.ensure(path)
        nobody = make_digest_acl("nobody", "else", all=True)
        self._zookeeper.set_acls(f"{self.session.root}{path}", [nobody])


@dataclass(frozen=True)
class Poison:
    """What is done to a stream, and the code of the error state that it is in under the next leader, if any."""

    spoil: Callable[[Place], object]
    code: str = ""
    deletable: bool = True
    """Whether who may not read it may delete it."""


def _node(make: Callable[[StreamName], str], how: str, code: str = METADATA_UNREADABLE, **more: bool) -> Poison:
    def spoil(place: Place) -> None:
        path = make(place.name)
        match how:
            case "garbage" | "empty":
                place.write(path, b"garbage" if how == "garbage" else b"")
            case "newer":
                place.newer(path)
            case "missing":
                place.delete(path)
            case "denied":
                place.deny(path)

    return Poison(spoil, code, **more)


NODES: dict[str, Callable[[StreamName], str]] = {
    "settings": paths.stream,
    "epoch": lambda name: paths.epoch(name, 0),
    "truncation": paths.truncation,
    "late notes": paths.late,
}
MINOR: dict[str, Callable[[StreamName], str]] = {
    "marks": paths.retention,
    "fault": paths.stream_fault,
    "slots": paths.cas_slots,
}
"""Nodes without which a stream can be led."""

POISONS: dict[str, Poison] = {
    "buffer missing": Poison(lambda place: place.kafka.topics.delete_topics([place.buffer]), BUFFER_LOST),
    "buffer replaced": Poison(lambda place: place.replace(place.buffer), BUFFER_LOST),
    "buffer empty": Poison(lambda place: place.empty(place.buffer)),
    "buffer garbage": Poison(lambda place: place.garbage(place.buffer)),
    "segment missing": Poison(lambda place: place.kafka.topics.delete_topics([place.segment])),
    "segment replaced": Poison(lambda place: place.replace(place.segment)),
    "segment empty": Poison(lambda place: place.empty(place.segment)),
    "segment garbage": Poison(lambda place: place.garbage(place.segment)),
    **{f"{name} garbage": _node(make, "garbage") for name, make in NODES.items()},
    **{f"{name} empty": _node(NODES[name], "empty") for name in ("settings", "epoch")},
    **{f"{name} denied": _node(make, "denied", deletable=False) for name, make in NODES.items()},
    **{f"{name} missing": _node(NODES[name], "missing", "") for name in ("settings", "truncation", "late notes")},
    **{f"{name} newer": _node(NODES[name], "newer", FORMAT_NEWER, deletable=False) for name in ("settings", "epoch")},
    "epochs denied": _node(paths.epochs, "denied", deletable=False),
    "epoch missing": _node(NODES["epoch"], "missing"),
    **{
        f"{name} {how}": _node(make, how, "")
        for name, make in MINOR.items()
        for how in ("garbage", "missing", "denied")
    },
    "marks denied": _node(MINOR["marks"], "denied", deletable=False),
}


@dataclass
class Corpus:
    """The group, under its second leader."""

    site: Site
    client: rollbridge.Bridge
    innocent: StreamName
    places: dict[str, Place]
    left_open: dict[str, str]
    """Transactions of the poisoned streams that were open at the change, by poison."""

    def fault(self, name: str) -> str:
        """Return the code of what ZooKeeper shows to be wrong with the poisoned stream."""
        try:
            found = Metadata(self.places[name].session).stream_fault(self.places[name].name)
        except RollbridgeError:
            return "hidden"
        return "" if found is None else found.code


def commit(client: rollbridge.Bridge, stream: StreamName) -> None:
    with client.transaction(str(stream)) as txn:
        txn.write(str(stream), key=b"k", value=b"v")


@pytest.fixture(scope="module")
def corpus(cluster: AnyCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Corpus]:
    root = f"/takeover-poison-{time.time_ns()}"
    site = Site(cluster, root, tmp_path_factory.mktemp("logs"))
    zookeeper = KazooClient(cluster.zookeeper)
    zookeeper.start()
    with (
        site,
        site.connect("tester", rollbridge.ClientOptions(admin_timeout_s=PATIENCE_S)) as client,
        ZooKeeperSession(cluster.zookeeper, root=root) as session,
        KafkaClient(cluster.bootstrap_servers) as kafka,
    ):
        scope = f"poison{root[-8:]}"
        innocent = StreamName(scope, "innocent")
        names = {name: StreamName(scope, name.replace(" ", "-")) for name in POISONS}
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(client.admin.create_stream, map(str, (innocent, *names.values()))))
        places, left_open = {}, {}
        for name, stream in names.items():
            places[name] = Place(stream, cluster.bootstrap_servers, session, zookeeper, kafka)
            txn = client.begin(str(stream))
            txn.write(str(stream), key=b"k", value=b"open")
            txn.flush()
            left_open[name] = str(txn.id)
        commit(client, innocent)
        eventually(lambda: len(client.admin.transactions()) == len(POISONS), "all are on record")
        site.stop_coordinator()
        site.start_coordinator()  # what stood in ZooKeeper when it comes, no backup may have lacked
        commit(client, innocent)
        site.stop_coordinator()
        for name, poison in POISONS.items():
            poison.spoil(places[name])
        site.start_coordinator()
        yield Corpus(site, client, innocent, places, left_open)
    zookeeper.stop()
    zookeeper.close()


@pytest.mark.parametrize("name", POISONS)
def test_an_innocent_stream_of_the_group_commits_under_the_next_leader(corpus: Corpus, name: str) -> None:
    poison = POISONS[name]
    commit(corpus.client, corpus.innocent)
    if poison.code and name != "settings denied":  # below which nobody may show it
        eventually(lambda: corpus.fault(name) in (poison.code, "hidden"), f"it is {poison.code}")
    else:
        assert corpus.fault(name) in ("", "hidden")


def test_a_stream_that_somebody_has_deleted_in_zookeeper_is_there_again_with_what_was_open(corpus: Corpus) -> None:
    stream = corpus.places["settings missing"].name
    assert str(stream) in [str(item.name) for item in corpus.client.admin.list_streams(stream.scope)]
    commit(corpus.client, stream)
    open_ones = [str(item.id) for item in corpus.client.admin.transactions(GroupName(stream.scope))]
    assert corpus.left_open["settings missing"] in open_ones


def test_the_doctor_names_what_is_wrong(corpus: Corpus) -> None:
    found = run_cli(corpus.site.environment(), "doctor").out
    for code in {poison.code for poison in POISONS.values()} - {""}:
        assert code in found, "findings of a kind are one"


def test_the_commit_log_of_a_group_elsewhere_can_be_repaired(corpus: Corpus) -> None:
    elsewhere = StreamName(f"{corpus.innocent.scope}-elsewhere", "orders")
    corpus.client.admin.create_stream(str(elsewhere))
    said = run_cli(corpus.site.environment(), "repair", "--commit-log", elsewhere.scope)
    assert "is the one that ZooKeeper names" in said.err


@pytest.mark.parametrize("name", [name for name, poison in POISONS.items() if poison.code == BUFFER_LOST])
def test_what_was_open_in_a_lost_buffer_is_aborted_and_said_so(corpus: Corpus, name: str) -> None:
    group = GroupName(corpus.places[name].name.scope)
    with corpus.site.connect() as client:

        def is_open() -> bool:
            return corpus.left_open[name] in [str(item.id) for item in client.admin.transactions(group)]

        eventually(lambda: not is_open(), "it has ended")
        found = client.outcome(transaction=corpus.left_open[name], group=group, client="tester", timeout=PATIENCE_S)
    assert found.state == "aborted"
    assert "lost with stream" in found.reason


@pytest.mark.parametrize("name", [name for name, poison in POISONS.items() if poison.code])
def test_a_stream_in_such_an_error_state_can_be_deleted(corpus: Corpus, name: str) -> None:
    place, poison = corpus.places[name], POISONS[name]
    if not poison.deletable:
        with pytest.raises(RollbridgeError):
            corpus.client.admin.delete_stream(str(place.name), timeout_s=PATIENCE_S)
        return
    corpus.client.admin.delete_stream(str(place.name), timeout_s=PATIENCE_S)
    assert str(place.name) not in [str(item.name) for item in corpus.client.admin.list_streams(place.name.scope)]
    commit(corpus.client, corpus.innocent)
    corpus.client.admin.create_stream(str(place.name))
    commit(corpus.client, place.name)
