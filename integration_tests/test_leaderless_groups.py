"""A group that nobody leads: others are served, clients are told who did not answer, and only its own ids wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import Producer

import rollbridge
from integration_tests.clients import Site, until
from integration_tests.gateways import GatewayProcess
from integration_tests.patience import PATIENCE_S
from rollbridge.errors import CoordinatorUnavailableError, UnavailableError, UnknownWriteError
from rollbridge.metadata import paths
from rollbridge.metadata.client_sessions import ClientSession
from rollbridge.metadata.errors import NodeConflictError
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import GroupName

SHORT_S = 3.0
"""For those who wait for a group that never answers."""
HUNG_S = 24.0
"""The same, where others have to answer within a share of it."""


@pytest.fixture(scope="module")
def session(site: Site) -> Iterator[ZooKeeperSession]:
    with ZooKeeperSession(site.cluster.zookeeper, root=site.root) as session:
        yield session


@pytest.fixture
def lost(site: Site, client: rollbridge.Bridge, session: ZooKeeperSession, scope: str) -> GroupName:
    """A group whose record is of a later version, so that no coordinator can lead it."""
    group, metadata = GroupName(f"{scope}-lost"), Metadata(session)

    def is_led(name: GroupName) -> bool:
        lead = metadata.lead(name)
        return lead is not None and lead.is_serving

    metadata.ensure_group(group, 1)
    until(lambda: is_led(group))
    session.set(paths.group(group), b'{"version": 999}')
    site.stop_coordinator()
    site.start_coordinator()
    until(lambda: all(is_led(item) for item in metadata.groups() if not item.scope.endswith("-lost")))
    return group


def written(b: rollbridge.Bridge, stream: str, label: str, *, commits: bool) -> rollbridge.TransactionId:
    """A transaction with a record."""
    txn = b.begin(stream, label=label)
    txn.write(stream, b"k", label.encode())
    if commits:
        txn.commit()
    else:
        txn.flush()
    return txn.id


def test_clients_are_answered_by_the_groups_that_have_leaders(
    site: Site, orders: str, lost: GroupName, session: ZooKeeperSession, caplog: pytest.LogCaptureFixture
) -> None:
    worker = f"{lost.scope}-worker"
    with site.connect(worker) as b:
        done, left = written(b, orders, "done", commits=True), written(b, orders, "left", commits=False)
    with site.connect(worker) as b:
        found = b.outcome(label="done")
        assert (found.transaction, found.unanswered) == (done, {}), "it has no session there, so it is not asked"
        unfinished = b.unfinished()
        assert ([item.transaction for item in unfinished], unfinished.unanswered) == ([left], {})

    session.create(paths.session(lost, worker), ClientSession(worker, 1, 1).to_json(), parents=True)
    caplog.set_level("INFO")
    with site.connect(worker) as b:
        found = b.outcome(label="done", timeout=SHORT_S)
        assert (found.transaction, set(found.unanswered)) == (done, {lost})
        unfinished = b.unfinished(timeout=SHORT_S)
        assert ([item.transaction for item in unfinished], set(unfinished.unanswered)) == ([left], {lost})
        assert f"group {lost} did not answer" in caplog.text
        assert f"request.waiting group={lost} " in caplog.text, "nobody waits without a word"
        with pytest.raises((UnavailableError, UnknownWriteError)):
            b.outcome(label="never", timeout=SHORT_S)
        with pytest.raises((CoordinatorUnavailableError, UnknownWriteError)):
            b.unfinished(group=lost, timeout=SHORT_S)


def test_a_client_without_a_name_of_its_own_is_answered_too(site: Site, orders: str, lost: GroupName) -> None:
    with site.connect() as b:
        left = written(b, orders, "left", commits=False)
        unfinished = b.unfinished(timeout=SHORT_S)
        assert [item.transaction for item in unfinished] == [left]
        assert lost in unfinished.unanswered
        found = b.outcome(label="left", timeout=SHORT_S)
        assert (found.transaction, found.unanswered) == (left, {}), "nothing is later than one that is open"


def test_a_leader_that_hangs_takes_no_time_of_the_groups_behind_it(
    site: Site, orders: str, lost: GroupName, session: ZooKeeperSession
) -> None:
    worker = f"{lost.scope}-worker"
    with site.connect(worker) as b:
        done, left = written(b, orders, "done", commits=True), written(b, orders, "left", commits=False)
    session.create(paths.session(lost, worker), ClientSession(worker, 1, 1).to_json(), parents=True)

    def is_taken() -> bool:
        try:
            session.create(paths.leader(lost), b"hung", ephemeral=True)
        except NodeConflictError:  # the coordinator's, which gives it up again
            return False
        return True

    until(is_taken)
    session.set(paths.leader(lost), b"hung", 0)  # as one that serves
    try:
        with site.connect(worker) as b:
            unfinished = b.unfinished(timeout=HUNG_S)
            assert ([item.transaction for item in unfinished], set(unfinished.unanswered)) == ([left], {lost})
        with site.connect(worker) as b:
            found = b.outcome(label="done", timeout=HUNG_S)
            assert (found.transaction, set(found.unanswered)) == (done, {lost})
    finally:
        session.delete(paths.leader(lost))


def test_a_gateway_starts_producers_that_have_nothing_in_a_group_without_a_leader(
    gateway: GatewayProcess, lost: GroupName, session: ZooKeeperSession
) -> None:
    name = f"{lost.scope}-producer"
    for _ in range(2):
        producer = Producer({"bootstrap.servers": gateway.address, "transactional.id": name})
        producer.init_transactions(PATIENCE_S)
    assert session.exists(paths.session(lost, name)) is None
