"""A broker of three that is cut off from the others, or from us, stops nobody for as long as the cut lasts."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import rollbridge
from integration_tests.clients import Site
from integration_tests.coordinators import coordinator
from integration_tests.patience import eventually
from integration_tests.three_brokers import NODES, US, ThreeBrokers
from rollbridge import ANY, EMPTY, SN
from rollbridge.base.ids import SegmentId
from rollbridge.errors import CasOutcomeUnknownError, CasWriteError, RollbridgeError, UnavailableError
from rollbridge.kafka.metadata import Cluster
from rollbridge.metadata import paths
from rollbridge.metadata.records import Coordinator
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import GroupName, StreamName
from rollbridge_coordinator.daemon.succession import first_choice

TIMEOUT_S = 30.0
SLOW_MACHINE_S = 10.0
HEALED_S = 120.0
"""Within this time of a cut, and while it lasts, everything goes on."""
ASTRAY = "54321"
"""Number of a Unix group of processes that can be cut off from a broker."""
OPTIONS = rollbridge.ClientOptions(commit_timeout_s=20, admin_timeout_s=60)


@pytest.fixture(scope="module")
def brokers() -> Iterator[ThreeBrokers]:
    with ThreeBrokers() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cut_site(brokers: ThreeBrokers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(brokers, "/cut", tmp_path_factory.mktemp("coordinators")) as site:
        yield site


def commits(client: rollbridge.Bridge, stream: str, value: bytes) -> bool:
    """Commit a record in each segment; return whether that is acknowledged."""
    try:
        with client.begin(stream) as transaction:
            for number in range(8):
                transaction.write(stream, key=b"%d" % number, value=value)
    except RollbridgeError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cut_from", "victim"),
    [
        ("brokers", 1),  # whom all ask first
        *itertools.product(["brokers", "all"], NODES[1:]),
        ("all", 1),
    ],
)
def test_a_group_goes_on_while_a_broker_is_cut_off(
    brokers: ThreeBrokers, cut_site: Site, unique_name: Callable[[str], str], victim: int, cut_from: str
) -> None:
    """Whatever the broker led, and whoever asks it: it does not know that others have taken over."""
    stream = f"{unique_name('cut')}/orders"
    others = {*NODES, *([US] if cut_from == "all" else [])} - {victim}
    acknowledged: list[bytes] = []

    def goes_on(client: rollbridge.Bridge, name: str) -> None:
        for number in range(3):
            attempts = itertools.count()

            def committed(number: int = number, attempts: Iterator[int] = attempts) -> bool:
                value = f"{name}-{number}-{next(attempts)}".encode()
                if commits(client, stream, value):
                    acknowledged.append(value)
                    return True
                return False

            eventually(committed, f"{name} commits", HEALED_S)

    with cut_site.connect(options=OPTIONS) as client:
        client.admin.create_stream(stream, segments=3)
        writer = client.writer(stream)
        goes_on(client, "before")
        with brokers.cut(victim, others):
            plain = [writer.write(b"%d" % number, b"plain") for number in range(8)]
            goes_on(client, "who was there before")
            with cut_site.connect(options=OPTIONS) as late:
                goes_on(late, "who comes later")
            for future in plain:
                future.result(HEALED_S)
        goes_on(client, "after")
    brokers.await_one_view()
    found = Counter(message.value() for message in cut_site.committed(stream))
    assert {value: found[value] for value in acknowledged} == dict.fromkeys(acknowledged, 8)
    assert set(found.values()) == {8}, "torn or doubled"


@pytest.mark.slow
def test_what_a_refusal_has_told_is_known_from_then_on(
    brokers: ThreeBrokers, cut_site: Site, unique_name: Callable[[str], str]
) -> None:
    """A broker that is cut off goes on saying what was the last record, and keeps who asks it waiting."""
    stream = f"{unique_name('cut')}/ledger"
    topic = StreamName.parse(stream).segment_topic(SegmentId.of(0, 0))

    def outlives(ask: Callable[[], SN], began: float) -> SN | None:
        """Return the answer, if there is one in time."""
        try:
            return ask()
        except (UnavailableError, CasOutcomeUnknownError):
            return None
        finally:
            assert time.monotonic() - began < TIMEOUT_S + SLOW_MACHINE_S, "a call has outlived its time-out"

    with (
        cut_site.connect(options=OPTIONS) as here,
        cut_site.connect(options=OPTIONS) as there,
        Cluster(brokers.bootstrap_servers) as cluster,
    ):
        here.admin.create_stream(stream)
        with here.cas_writer(stream, timeout=TIMEOUT_S) as one, there.cas_writer(stream, timeout=TIMEOUT_S) as other:
            first = one.write(b"k", b"first", expected=EMPTY)
            assert (one.tail(), other.tail()) == (first, first)
            victim = cluster.leader(topic, 0)
            with brokers.cut(victim, {*NODES} - {victim}):
                written: list[SN] = []

                def has_written() -> bool:
                    if (
                        found := outlives(partial(other.write, b"k", b"second", expected=ANY), time.monotonic())
                    ) is None:
                        return False
                    written.append(found)
                    return True

                eventually(has_written, "another one writes", HEALED_S)
                refused: list[SN] = []

                def is_refused() -> bool:
                    try:
                        outlives(partial(one.write, b"k", b"third", expected=first), time.monotonic())
                    except CasWriteError as fault:
                        refused.append(fault.actual)
                    return bool(refused)

                eventually(is_refused, "a write is refused", HEALED_S)
                assert refused == written
                told: list[SN] = []

                def is_told() -> bool:
                    if (found := outlives(one.tail, time.monotonic())) is not None:
                        told.append(found)
                    return bool(told)

                eventually(is_told, "the last record is told", HEALED_S)
                assert told == written


@pytest.mark.slow
def test_a_leader_that_does_not_reach_a_broker_hands_over(
    brokers: ThreeBrokers, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    """The broker is well, and clients and the other coordinator reach it; the way of the leader's machine is not."""
    scope = unique_name("astray")
    streams = [StreamName(scope, f"orders-{number}") for number in range(4)]
    group, root = GroupName(scope), f"/{scope}"
    leader = first_choice(group, ["one", "two"]) or ""
    other = "two" if leader == "one" else "one"
    with (
        coordinator(brokers, root, leader, tmp_path, unix_group=ASTRAY),
        ZooKeeperSession(brokers.zookeeper, root=root) as session,
        Site(brokers, root, tmp_path).connect(options=OPTIONS) as client,
        Cluster(brokers.bootstrap_servers) as cluster,
    ):
        metadata = Metadata(session)
        for stream in streams:
            client.admin.create_stream(str(stream))
            assert commits(client, str(stream), b"before")
        assert metadata.leader(group) == leader
        with coordinator(brokers, root, other, tmp_path):

            def holds_log(node: int) -> bool:
                return node == cluster.leader(group.commit_log_topic, 0)

            def is_ready() -> bool:
                node = session.get(paths.coordinator(other))
                return node is not None and group in Coordinator.from_json(node.value).ready

            eventually(is_ready, "the other one follows")
            # Without the commit log, which would be missed first, if the brokers have spread the topics so.
            places = {cluster.leader(stream.buffer_topic(), 0): stream for stream in streams}
            places = {node: stream for node, stream in places.items() if not holds_log(node)} or places
            victim, stream = next(iter(places.items()))
            with brokers.cut_from_processes(victim, ASTRAY):
                # The leader has nothing to do: all that it can notice is that it hears nothing.
                eventually(lambda: metadata.leader(group) == other, "the other one leads", HEALED_S)
                eventually(lambda: commits(client, str(stream), b"after"), "a commit", HEALED_S)
                assert metadata.leader(group) == other
            log = (tmp_path / f"{leader}.log").read_text()
            assert "lead.given-up " in log
            assert log.count("lead.won ") == 1, "it comes back although it rests"
