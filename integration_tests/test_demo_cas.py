"""The race of ``make demo-cas``, with few deposits: nothing is lost, and nobody writes what was not there."""

from __future__ import annotations

import pytest

import rollbridge
from integration_tests.clients import Site
from spark_examples.demo.cas import ACCOUNT, Ledger, Place, balances, race


@pytest.fixture
def place(site: Site, client: rollbridge.Bridge, orders: str) -> Place:
    return Place(site.cluster.bootstrap_servers, site.cluster.zookeeper, orders, site.root)


def test_conditional_deposits_of_two_processes_are_all_there(place: Place) -> None:
    race(place, 25, conditional=True)
    assert balances(place) == list(range(1, 51))


def test_blind_deposits_all_stand_in_the_log_whatever_they_overwrite(place: Place) -> None:
    race(place, 25, conditional=False)
    found = balances(place)
    assert len(found) == 50
    assert max(found) <= 50


def test_a_ledger_reads_on_to_the_entry_that_is_asked_for(client: rollbridge.Bridge, orders: str) -> None:
    with client.cas_writer(orders) as writer, client.reader(orders) as reader:
        ledger = Ledger(reader)
        first = writer.write(ACCOUNT, b"1 anna", expected=rollbridge.EMPTY)
        writer.write(b"other", b"99", expected=rollbridge.ANY)
        second = writer.write(ACCOUNT, b"2 anna", expected=first, scope="key")
        ledger.read_to(second)
        assert (ledger.balance, ledger.sn) == (2, second)
