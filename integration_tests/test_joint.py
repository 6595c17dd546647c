"""Joint transactions: processes that know only a number of a series write one, whatever becomes of some of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import bridge
from bridge.errors import AlreadyAborted, ConflictError, Fenced, TransactionClosed, TransactionNotFound
from bridge.model.identifiers import split_local_sequence
from integration_tests.clients import Site, header_of


@pytest.fixture
def name(unique_name: Callable[[str], str]) -> str:
    """A client name of the test's own."""
    return unique_name("query")


def values(site: Site, stream: str) -> list[bytes]:
    return sorted(message.value() or b"" for message in site.committed(stream))


def write(
    client: bridge.SharedClient, number: int, *streams: str, what: bytes
) -> tuple[bridge.JointTicket, bridge.PartHandle]:
    joint = client.joint(*streams, series="q", number=number)
    part = joint.part()
    for stream in streams:
        part.write(stream, key=what, value=what)
    return joint.ticket, part.finish()


def test_parts_of_two_processes_and_a_commit_in_a_third(
    site: Site, client: bridge.Bridge, orders: str, payments: str, name: str
) -> None:
    with site.connect() as one, site.connect() as two:
        first = one.share(name, "run")
        ticket, handle = write(first, 0, orders, payments, what=b"first")
        _, lost = write(two.share(name, "run"), 0, orders, payments, what=b"lost")
        client.admin.scale(orders, seal=[0, 1], ranges=[(0.0, 1.0)])
        joined, late = write(two.share(name, "run"), 0, orders, payments, what=b"after the scale")
        assert joined == ticket
        assert len({handle.part, lost.part, late.part}) == 3
        owner = client.share(name, "run")
        assert owner.commit(ticket, [handle, late]).records == 4
        owner.note_committed(ticket)
        assert values(site, orders) == values(site, payments) == [b"after the scale", b"first"]
        parts = {split_local_sequence(header_of(message)[1])[0] for message in site.committed(orders)}
        assert parts == {handle.part, late.part}
        with pytest.raises(TransactionClosed, match="is over"):
            first.joint(orders, payments, series="q", number=0)
        with pytest.raises(TransactionClosed, match="committed"):
            owner.commit(ticket, [handle])
        write(first, 1, orders, payments, what=b"next")
        with pytest.raises(ConflictError, match="begun already"):
            write(first, 0, orders, payments, what=b"late")
    assert client.outcome(ticket.transaction).label == "q/0"


def test_a_later_session_skips_what_is_committed_and_writes_anew_what_is_not(
    site: Site, client: bridge.Bridge, orders: str, name: str
) -> None:
    old = client.share(name, "run-1")
    ticket, handle = write(old, 0, orders, what=b"0")
    old.commit(ticket, [handle])  # and dies before it is put on record
    with site.connect() as restarted:
        new = restarted.share(name, "run-2")
        skipped = new.joint(orders, series="q", number=0)
        assert skipped.committed
        assert skipped.id == ticket.transaction
        with pytest.raises(TransactionClosed, match="has been committed"):
            skipped.part()
        left, _ = write(new, 1, orders, what=b"1, left open")
        with pytest.raises(Fenced):
            old.joint(orders, series="q", number=1)
    with site.connect() as restarted:
        newest = restarted.share(name, "run-3")
        ticket, handle = write(newest, 1, orders, what=b"1")
        assert ticket.transaction != left.transaction
        assert client.outcome(left.transaction).aborted
        newest.commit(ticket, [handle])
        newest.note_committed(ticket)
        for gone in ("run-1", "run-2"):
            with site.connect() as late, pytest.raises(Fenced):
                late.share(name, gone).joint(orders, series="q", number=2)
    assert values(site, orders) == [b"0", b"1"]


def test_what_was_agreed_on_but_never_begun_is_written_anew(
    site: Site, client: bridge.Bridge, orders: str, name: str
) -> None:
    never = client.share(name, "run-1").joint(orders, series="q", number=5).ticket
    with pytest.raises(TransactionNotFound):
        client.outcome(never.transaction)
    with site.connect() as restarted:
        new = restarted.share(name, "run-2")
        ticket, handle = write(new, 5, orders, what=b"5")
        assert ticket.transaction != never.transaction
        assert new.commit(ticket, [handle]).records == 1


def test_an_abort_and_a_label_of_a_series_that_is_not_the_latest(
    site: Site, client: bridge.Bridge, orders: str, name: str
) -> None:
    shared = client.share(name, "run-1")
    ticket, handle = write(shared, 0, orders, what=b"aborted")
    assert shared.abort(ticket, "no more")
    assert shared.abort(ticket)
    with pytest.raises((TransactionClosed, AlreadyAborted)):
        shared.commit(ticket, [handle])
    for series in ("a", "b"):
        joint = shared.joint(orders, series=series, number=0)
        part = joint.part()
        part.write(orders, value=series.encode())
        shared.commit(joint.ticket, [part.finish()])
        assert not shared.abort(joint.ticket)
    with site.connect() as other:
        assert other.share(name, "run-2").joint(orders, series="a", number=0).committed
    assert values(site, orders) == [b"a", b"b"]
