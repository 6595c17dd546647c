"""Transactional ids that nobody uses are forgotten by gateways, and those that are needed are not."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer

from integration_tests.clients import Site
from integration_tests.foreign.java import CLIENTS, NEWEST, JavaError, JavaProducer
from integration_tests.gateway_clients import producer_of, topic_of, values
from integration_tests.gateways import GatewayProcess, Servers
from integration_tests.patience import eventually
from rollbridge.metadata import paths
from rollbridge.metadata.client_sessions import ClientSession, floor_of
from rollbridge.metadata.records import CreateNode
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.names import GroupName
from rollbridge_gateway.producer.expiration import ALL_BUCKETS
from rollbridge_gateway.producer.table import Entry, client_name, first_pair

logger = logging.getLogger(__name__)

SOON = "--expiration-days=0.00002"
"""Two seconds; a sweep takes as long."""


@pytest.fixture(scope="module")
def gateways(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[GatewayProcess]]:
    """Two gateways that forget what nobody uses for two seconds."""
    servers = Servers(site.cluster.bootstrap_servers, site.cluster.zookeeper, site.root)
    logs = tmp_path_factory.mktemp("gateways")
    with ExitStack() as stack:
        names = ("gateway-forgets-1", "gateway-forgets-2")
        yield [stack.enter_context(GatewayProcess(servers, name, logs, [SOON])) for name in names]


@pytest.fixture(scope="module")
def session(site: Site) -> Iterator[ZooKeeperSession]:
    """ZooKeeper, as it is."""
    with ZooKeeperSession(site.cluster.zookeeper, root=site.root) as found:
        yield found


def entry_of(session: ZooKeeperSession, transactional_id: str) -> Entry | None:
    """What is on record of an id."""
    node = session.get(paths.gateway_id(client_name(transactional_id)))
    return None if node is None else Entry.decode(node.value)


def commit(producer: Producer, stream: str, name: str, records: int = 10) -> None:
    """A transaction."""
    for number in range(records):
        producer.produce(topic_of(stream), key=f"{number}", value=f"{name}-{number}")
    producer.commit_transaction(120)


def is_forgotten(session: ZooKeeperSession, transactional_id: str) -> bool:
    """Do what leaders do a day after a client has begun something last; return whether gateways have done theirs."""
    name = client_name(transactional_id)
    for group in map(GroupName.parse, session.children(paths.GROUPS)):
        node = session.get(paths.session(group, name))
        floor = session.get(paths.sessions(group))
        if node is not None and floor is not None:
            raised = max(floor_of(floor.value), ClientSession.from_json(node.value).epoch)
            session.set(paths.sessions(group), str(raised).encode())
            session.delete(paths.session(group, name))
    return entry_of(session, transactional_id) is None


def begin(producer: Producer, stream: str, name: str) -> None:
    """The first record of a transaction, which has arrived."""
    faults: list[Any] = []
    producer.produce(topic_of(stream), key="0", value=f"{name}-0", on_delivery=lambda fault, _: faults.append(fault))
    assert producer.flush(120) == 0
    if faults[0] is not None:
        raise KafkaException(faults[0])


def insist(producer: Producer, work: Callable[[], None]) -> None:
    """Begin, and do something; again if that took so long that the id was forgotten meanwhile."""
    while True:
        try:
            producer.begin_transaction()
            work()
        except KafkaException as fault:
            if not fault.args[0].txn_requires_abort():
                raise
            producer.abort_transaction(120)
        else:
            return


def numbered(*names: str) -> Counter[bytes]:
    return Counter(f"{name}-{number}".encode() for name in names for number in range(10))


def test_an_id_that_nobody_uses_is_forgotten_and_what_is_open_or_remembered_stays(
    site: Site,
    gateways: list[GatewayProcess],
    session: ZooKeeperSession,
    ledger: str,
    unique_name: Callable[[str], str],
) -> None:
    idle, busy, done = unique_name("idle"), unique_name("busy"), unique_name("done")
    opened, ended, unused = (producer_of(gateways[0], name) for name in (busy, done, idle))
    opened.init_transactions(120)
    insist(opened, lambda: begin(opened, ledger, busy))
    ended.init_transactions(120)
    insist(ended, lambda: commit(ended, ledger, done))
    for _ in range(2):  # the second sweep begins when the first ones have ended
        unused.init_transactions(120)
        assert entry_of(session, idle) is not None
        eventually(lambda: is_forgotten(session, idle), "an id that nobody uses is forgotten")
        unused = producer_of(gateways[1], idle)
    assert entry_of(session, busy) is not None
    assert entry_of(session, done) is not None
    for number in range(1, 10):
        opened.produce(topic_of(ledger), key="k", value=f"{busy}-{number}")
    opened.commit_transaction(120)
    insist(ended, lambda: commit(ended, ledger, f"{done}-again"))
    assert values(site.committed(ledger)) == numbered(busy, done, f"{done}-again")


def test_a_producer_that_comes_back_gets_another_producer_id(
    site: Site,
    gateways: list[GatewayProcess],
    session: ZooKeeperSession,
    ledger: str,
    unique_name: Callable[[str], str],
) -> None:
    name = unique_name("sleeper")
    producer = producer_of(gateways[0], name)
    producer.init_transactions(120)
    known = entry_of(session, name)
    assert known is not None
    eventually(lambda: is_forgotten(session, name), "it is forgotten")
    producer.begin_transaction()
    with pytest.raises(KafkaException) as refused:
        commit(producer, ledger, "lost")
    assert refused.value.args[0].txn_requires_abort(), refused.value
    producer.abort_transaction(120)
    insist(producer, lambda: commit(producer, ledger, name))
    fresh = entry_of(session, name)
    assert fresh is not None
    assert fresh.pair.producer_id != known.pair.producer_id
    assert values(site.committed(ledger)) == numbered(name)


@pytest.mark.parametrize("version", CLIENTS)
def test_a_java_producer_that_comes_back_goes_on(
    site: Site,
    gateways: list[GatewayProcess],
    session: ZooKeeperSession,
    ledger: str,
    unique_name: Callable[[str], str],
    tmp_path: Path,
    version: str,
) -> None:
    name, refusals = unique_name("java"), 0
    with ExitStack() as stack:

        def started() -> JavaProducer:
            log = tmp_path / f"java-{refusals}.log"
            java = stack.enter_context(JavaProducer(gateways[0].address, name, log, client=version))
            java.do("init")
            return java

        java = started()
        eventually(lambda: is_forgotten(session, name), "it is forgotten")
        while True:  # a slow machine may have it forgotten again
            try:
                java.do("begin")
                java.do("send", topic_of(ledger), 0, 10)
                java.do("commit")
                break
            except JavaError as refused:
                refusals += 1
                logger.info("refused: %s", refused)
            if version == NEWEST:  # 4.x takes it for fatal (KIP-1050)
                java = started()
            else:
                java.do("abort")
    assert refusals > 0
    assert values(site.committed(ledger)) == numbered(name)


def test_a_hundred_thousand_ids_are_forgotten_and_hold_nobody_up(
    site: Site,
    gateways: list[GatewayProcess],
    session: ZooKeeperSession,
    ledger: str,
    unique_name: Callable[[str], str],
) -> None:
    names = [f"{unique_name('many')}-{number}" for number in range(100_000)]
    for at in ALL_BUCKETS:
        session.ensure(f"{paths.GATEWAY_IDS}/{at}")
    wanted = set(names)
    entries = [Entry(name, first_pair(name, at, is_known=False), 60_000) for at, name in enumerate(names)]
    nodes = [CreateNode(paths.gateway_id(client_name(entry.transactional_id)), entry.encode()) for entry in entries]
    batches = [nodes[first : first + 500] for first in range(0, len(nodes), 500)]
    assert not any(session.multi_pipelined(batches))
    gateways[0].revive()
    producer = producer_of(gateways[0], unique_name("beside"))
    producer.init_transactions(120)

    def commits(name: str) -> None:
        insist(producer, lambda: commit(producer, ledger, name))

    for at in ALL_BUCKETS:
        commits(f"beside-{at}")
        path = f"{paths.GATEWAY_IDS}/{at}"
        eventually(lambda path=path: not wanted & set(session.children(path)), "it is swept")  # type: ignore[misc]
    assert values(site.committed(ledger)) == numbered(*(f"beside-{at}" for at in ALL_BUCKETS))
