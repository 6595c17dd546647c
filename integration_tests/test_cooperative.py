"""Cooperative transactions: processes that know only a number of a series write one, whatever some of them do."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest

import rollbridge
from integration_tests.clients import Site, header_of
from rollbridge.base.ids import split_local_sequence
from rollbridge.client.transaction import Transaction
from rollbridge.errors import (
    ClientFencedError,
    ConflictError,
    InvalidRequestError,
    OutcomeExpiredError,
    TransactionAbortedError,
    TransactionClosedError,
    TransactionNotFoundError,
)
from rollbridge.metadata import paths
from rollbridge.metadata.client_sessions import SERIES_KEPT_MS, CooperativeContent
from rollbridge.metadata.session import ZooKeeperSession


@pytest.fixture
def name(unique_name: Callable[[str], str]) -> str:
    """A client name of the test's own."""
    return unique_name("query")


def values(site: Site, stream: str) -> list[bytes]:
    return sorted(message.value() or b"" for message in site.committed(stream))


def write(
    client: rollbridge.SharedClient, number: int, *streams: str, what: bytes, series: str = "q", once: bool = False
) -> tuple[rollbridge.CooperativeTicket, rollbridge.PartHandle]:
    cooperative = client.cooperative(*streams, series=series, number=number, once=once)
    part = cooperative.part()
    for stream in streams:
        part.write(stream, key=what, value=what)
    return cooperative.ticket, part.finish()


def test_parts_of_two_processes_and_a_commit_in_a_third(
    site: Site, client: rollbridge.Bridge, orders: str, payments: str, name: str
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
        with pytest.raises(TransactionClosedError, match="is over"):
            first.cooperative(orders, payments, series="q", number=0)
        with pytest.raises(TransactionClosedError, match="committed"):
            owner.commit(ticket, [handle])
        write(first, 1, orders, payments, what=b"next")
        with pytest.raises(ConflictError, match="begun already"):
            write(first, 0, orders, payments, what=b"late")
    assert client.outcome(ticket.transaction).label == "q/0"


def test_a_later_session_skips_what_is_committed_and_writes_anew_what_is_not(
    site: Site, client: rollbridge.Bridge, orders: str, name: str
) -> None:
    old = client.share(name, "run-1")
    ticket, handle = write(old, 0, orders, what=b"0")
    old.commit(ticket, [handle])  # and dies before it is put on record
    with site.connect() as restarted:
        new = restarted.share(name, "run-2")
        skipped = new.cooperative(orders, series="q", number=0)
        assert skipped.committed
        assert skipped.id == ticket.transaction
        with pytest.raises(TransactionClosedError, match="has been committed"):
            skipped.part()
        left, _ = write(new, 1, orders, what=b"1, left open")
        with pytest.raises(ClientFencedError):
            old.cooperative(orders, series="q", number=1)
    with site.connect() as restarted:
        newest = restarted.share(name, "run-3")
        ticket, handle = write(newest, 1, orders, what=b"1")
        assert ticket.transaction != left.transaction
        assert client.outcome(left.transaction).aborted
        newest.commit(ticket, [handle])
        newest.note_committed(ticket)
        for gone in ("run-1", "run-2"):
            with site.connect() as late, pytest.raises(ClientFencedError):
                late.share(name, gone).cooperative(orders, series="q", number=2)
    assert values(site, orders) == [b"0", b"1"]


def test_an_older_session_of_the_same_connection_lets_go_of_its_own_transactions_only(
    site: Site, client: rollbridge.Bridge, orders: str, name: str
) -> None:
    """Worker processes of Spark keep connections, and a query that is started again may meet its former run there."""
    older, newer = client.share(name, "run-1"), client.share(name, "run-2")
    lost = older.cooperative(orders, series="q", number=0).part()
    lost.write(orders, value=b"left open")
    lost.flush()
    cooperative = newer.cooperative(orders, series="q", number=1)
    part = cooperative.part()
    part.write(orders, value=b"1")
    part.flush()
    with pytest.raises(ClientFencedError):
        older.cooperative(orders, series="q", number=1)
    older.look()
    part.write(orders, value=b"2")
    assert newer.commit(cooperative.ticket, [part.finish()]).records == 2
    with pytest.raises((ClientFencedError, TransactionClosedError, TransactionAbortedError)):
        lost.write(orders, value=b"late")
    assert values(site, orders) == [b"1", b"2"]


def test_what_was_agreed_on_but_never_begun_is_written_anew(
    site: Site, client: rollbridge.Bridge, orders: str, name: str
) -> None:
    never = client.share(name, "run-1").cooperative(orders, series="q", number=5).ticket
    with pytest.raises(TransactionNotFoundError):
        client.outcome(never.transaction)
    with site.connect() as restarted:
        new = restarted.share(name, "run-2")
        ticket, handle = write(new, 5, orders, what=b"5")
        assert ticket.transaction != never.transaction
        assert new.commit(ticket, [handle]).records == 1


def test_an_abort_and_a_label_of_a_series_that_is_not_the_latest(
    site: Site, client: rollbridge.Bridge, orders: str, name: str
) -> None:
    shared = client.share(name, "run-1")
    ticket, handle = write(shared, 0, orders, what=b"aborted")
    assert shared.abort(ticket, "no more")
    assert shared.abort(ticket)
    with pytest.raises((TransactionClosedError, TransactionAbortedError)):
        shared.commit(ticket, [handle])
    for series in ("a", "b"):
        cooperative = shared.cooperative(orders, series=series, number=0)
        part = cooperative.part()
        part.write(orders, value=series.encode())
        shared.commit(cooperative.ticket, [part.finish()])
        assert not shared.abort(cooperative.ticket)
    with site.connect() as other:
        assert other.share(name, "run-2").cooperative(orders, series="a", number=0).committed
    assert values(site, orders) == [b"a", b"b"]


def load(site: Site, name: str, stream: str, *labels: str, once: bool = False) -> None:
    """What a job does for each label, a session for all of them."""
    with site.connect() as job:
        client = job.share(name, f"job of {labels[0]}")
        for label in labels:
            ticket, handle = write(client, 0, stream, what=label.encode(), series=label, once=once)
            client.commit(ticket, [handle], content=CooperativeContent(1, len(label)))
            client.note_committed(ticket)


def edit(
    client: rollbridge.Bridge, site: Site, stream: str, name: str, change: Callable[[dict[str, Any]], None]
) -> None:
    """Change what is on record of a client's shared session."""
    path = paths.session(client.admin.describe(stream).config.group, name)
    with ZooKeeperSession(site.cluster.zookeeper, root=site.root) as session:
        node = session.get(path)
        assert node is not None
        datum = json.loads(node.value)
        change(datum["shared"])
        session.set(path, json.dumps(datum).encode(), node.version)


def again(site: Site, name: str, stream: str, label: str) -> rollbridge.CooperativeTransaction:
    with site.connect() as job:
        return job.share(name, str(uuid.uuid4())).cooperative(stream, series=label, number=0)


def test_a_label_is_remembered_whatever_a_client_has_written_since(
    site: Site, client: rollbridge.Bridge, orders: str, name: str
) -> None:
    load(site, name, orders, *(f"day-{number}" for number in range(120)))
    for label in ("day-0", "day-60", "day-119"):
        found = again(site, name, orders, label)
        assert found.committed
        assert found.content == CooperativeContent(1, len(label))
    with pytest.raises(OutcomeExpiredError):
        client.outcome(label="day-0/0", client=name)  # the leader remembers a hundred
    assert not again(site, name, orders, "day-120").committed
    assert len(values(site, orders)) == 120


def test_a_label_that_may_have_been_forgotten_is_refused(
    site: Site, client: rollbridge.Bridge, orders: str, name: str
) -> None:
    load(site, name, orders, "first", "second", "third")

    def age(shared: dict[str, Any]) -> None:
        for item in shared["series"]:
            item["since_ms"] -= SERIES_KEPT_MS

    edit(client, site, orders, name, age)
    load(site, name, orders, "fourth")
    for label in ("first", "second"):
        with pytest.raises(OutcomeExpiredError, match="another label or a new client name"):
            again(site, name, orders, label)
    assert again(site, name, orders, "third").committed
    assert again(site, name, orders, "fourth").committed
    assert not again(site, name, orders, "fifth").committed


def test_a_label_that_could_not_be_remembered_is_refused(
    site: Site, client: rollbridge.Bridge, orders: str, name: str
) -> None:
    load(site, name, orders, "first")
    edit(client, site, orders, name, lambda shared: shared.update(forgotten="0123456789abcdef" * 33_000))
    with pytest.raises(InvalidRequestError, match="use several client names"):
        again(site, name, orders, "second")
    assert again(site, name, orders, "first").committed
    assert values(site, orders) == [b"first"]


def test_labels_of_an_older_version_are_asked_for_and_refused_if_they_may_be_forgotten(
    site: Site, client: rollbridge.Bridge, orders: str, name: str
) -> None:
    def outdate(shared: dict[str, Any]) -> None:
        for field in ("series", "forgotten", "complete"):
            del shared[field]
        del shared["work"]["content"]

    load(site, name, orders, "old-1", "old-2")
    edit(client, site, orders, name, outdate)
    found = again(site, name, orders, "old-1")
    assert (found.committed, found.content) == (True, None)
    assert not again(site, name, orders, "new").committed, "it is certain that there is none"
    load(site, name, orders, *(f"more-{number}" for number in range(100)), once=True)
    for label in ("old-1", "unheard of"):
        with pytest.raises(OutcomeExpiredError, match="is not remembered any more"):
            again(site, name, orders, label)
    assert again(site, name, orders, "old-2").committed


def test_what_is_committed_is_found_by_who_has_nothing_to_write(
    site: Site, client: rollbridge.Bridge, orders: str, name: str
) -> None:
    old = client.share(name, "run-1")
    ticket, handle = write(old, 0, orders, what=b"0")
    assert old.committed(orders, series="q", number=0) is None, "it is open, and of this session"
    old.commit(ticket, [handle], content=CooperativeContent(1, 9))  # and dies before it is put on record
    with site.connect() as restarted:
        new = restarted.share(name, "run-2")
        found = new.committed(orders, series="q", number=0)
        assert found is not None
        assert (found.id, found.content) == (ticket.transaction, CooperativeContent(1, 9))
        assert new.committed(orders, series="q", number=1) is None
        assert new.committed(orders, series="other", number=0) is None
        assert new.cooperative(orders, series="q", number=0).committed, "nothing was begun"
    with site.connect() as another:
        assert another.share("nobody-else", "run").committed(orders, series="q", number=0) is None


def test_the_content_is_on_record_before_the_commit_is_asked_for(
    site: Site, client: rollbridge.Bridge, orders: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = client.share(name, "run-1")
    ticket, handle = write(old, 0, orders, what=b"0")

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Transaction, "commit", die)
    with pytest.raises(KeyboardInterrupt):
        old.commit(ticket, [handle], content=CooperativeContent(1, 9))
    monkeypatch.undo()
    found: list[dict[str, Any]] = []
    edit(client, site, orders, name, found.append)
    assert found[0]["work"]["state"] == "open"
    assert found[0]["work"]["content"] == {"records": 1, "digest": "0000000000000009"}
    with site.connect() as restarted:
        assert not restarted.share(name, "run-2").cooperative(orders, series="q", number=0).committed
