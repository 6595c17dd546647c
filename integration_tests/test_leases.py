"""Leases that are extended on real servers: by the owner, by whoever resumed the transaction, and from a terminal."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

import rollbridge
from bridge.tests.refusals import raises_code
from integration_tests.clients import Site, until
from integration_tests.command_line import Cli
from rollbridge.errors import TransactionClosedError, TransactionNotFoundError

SHORT = timedelta(seconds=3)
LONG = timedelta(hours=2)


def values(client: rollbridge.Bridge, stream: str) -> list[bytes | None]:
    with client.reader(stream, follow=False) as reader:
        return [record.value for record in reader]


def test_an_extended_transaction_outlives_its_first_lease(client: rollbridge.Bridge, orders: str) -> None:
    extended, other = client.begin(orders, timeout=SHORT), client.begin(orders, timeout=SHORT)
    extended.write(orders, b"k", b"extended")
    other.write(orders, b"k", b"other")
    other.flush()
    end = extended.extend(LONG)
    assert timedelta(hours=1) < end - datetime.now(UTC) <= LONG
    until(lambda: client.outcome(other.id).state == "aborted")
    extended.commit()
    assert values(client, orders) == [b"extended"]
    with pytest.raises(TransactionClosedError):
        extended.extend(LONG)
    with pytest.raises(TransactionClosedError):
        client.extend(other.id, LONG)


def test_a_leader_that_takes_over_knows_the_new_lease(site: Site, client: rollbridge.Bridge, orders: str) -> None:
    transaction = client.begin(orders, timeout=SHORT)
    transaction.write(orders, b"k", b"kept")
    end = transaction.extend(LONG)
    site.stop_coordinator()
    site.start_coordinator()
    assert abs(transaction.extend(timedelta(milliseconds=1)) - end) < timedelta(milliseconds=1)
    other = client.begin(orders, timeout=timedelta(milliseconds=1))
    other.write(orders, b"k", b"other")
    other.flush()
    until(lambda: client.outcome(other.id).state == "aborted")
    transaction.commit()
    assert values(client, orders) == [b"kept"]


def test_whoever_resumed_it_extends_it_and_its_former_owner_does_not(
    site: Site, client: rollbridge.Bridge, orders: str
) -> None:
    with site.connect("sleeper") as former:
        left = former.begin(orders, timeout=timedelta(minutes=10))
        left.write(orders, b"k", b"left")
        left.flush()
        resumed = client.resume(left.id)
        assert resumed.extend(LONG) > datetime.now(UTC) + timedelta(hours=1)
        assert left.extend(timedelta(days=6)) < datetime.now(UTC) + timedelta(hours=3)
        resumed.commit()


def test_a_lease_is_extended_from_a_terminal(site: Site, client: rollbridge.Bridge, orders: str) -> None:
    terminal = Cli(site.cluster, site.root)
    transaction = client.begin(orders)
    transaction.write(orders, b"k", b"job")
    transaction.flush()
    until(lambda: _is_recorded(client, transaction.id))
    answer = terminal.json("txn", "extend", str(transaction.id), "2d")
    wanted_ms = (datetime.now(UTC) + timedelta(days=2)).timestamp() * 1000
    assert abs(answer["lease_ends_ms"] - wanted_ms) < 600_000
    record = client.admin.find_transaction(transaction.id)
    until(
        lambda: client.admin.find_transaction(transaction.id).lease_ms > timedelta(hours=47) / timedelta(milliseconds=1)
    )
    assert record.id == transaction.id
    transaction.commit()


def test_impossible_leases_are_refused_before_anything_is_sent(client: rollbridge.Bridge, orders: str) -> None:
    transaction = client.begin(orders)
    for lease in (timedelta(0), timedelta(days=8)):
        with raises_code("invalid-timeout"):
            transaction.extend(lease)
        with raises_code("invalid-timeout"):
            client.extend(transaction.id, lease)
    transaction.abort()
    with pytest.raises(TransactionNotFoundError):
        client.extend("00000000-0000-0000-0000-00000fffffff", LONG)


def _is_recorded(client: rollbridge.Bridge, transaction: rollbridge.TransactionId) -> bool:
    return any(record.id == transaction for record in client.admin.transactions())
