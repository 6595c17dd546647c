"""Many client names on one connection: sessions, fences, order and outcomes of each, as of connections of their own."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

import rollbridge
from integration_tests.clients import Site, until
from integration_tests.patience import PATIENCE_S
from rollbridge.errors import ClientFencedError, InvalidNameError, InvalidRequestError, OutcomeUnknownError
from rollbridge.metadata import paths
from rollbridge.metadata.records import CheckNode
from rollbridge.metadata.requests import AdminRequest, RequestKind
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.names import GroupName


def write(txn: rollbridge.Transaction, stream: str, *values: str) -> None:
    for value in values:
        txn.write(stream, key=value.encode(), value=value.encode())


def values_of(site: Site, stream: str) -> list[str]:
    return [(message.value() or b"").decode() for message in site.committed(stream)]


def group_of(stream: str) -> GroupName:
    return GroupName(stream.partition("/")[0])


def test_names_of_one_connection_begin_and_end_transactions_without_disturbing_each_other(
    site: Site, client: rollbridge.Bridge, ledger: str
) -> None:
    one, two = client.client("one"), client.client("two")
    assert client.client("one") is one
    first, second = one.begin(ledger, label="a"), two.begin(ledger, label="a")
    write(first, ledger, "first")
    write(second, ledger, "second")
    first.flush()
    assert second.commit().records == 1
    assert [item.transaction for item in one.unfinished()] == [first.id]
    assert two.unfinished() == client.unfinished() == []
    assert one.new_session(str(group_of(ledger))) > 0
    third = two.begin(ledger)
    write(third, ledger, "third")
    assert third.commit().records == 1, "the other name goes on"
    with pytest.raises(ClientFencedError):
        first.commit()
    [left] = one.unfinished()
    assert left.transaction == first.id
    assert one.resume(first.id).commit().records == 1
    assert two.outcome(label="a").transaction == second.id
    assert one.outcome(label="a").transaction == first.id
    assert two.outcome(first.id, client="one").client_name == "one"
    assert values_of(site, ledger) == ["second", "third", "first"]


def test_a_session_that_begins_is_not_fenced_by_its_own_record(
    client: rollbridge.Bridge, ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks at the records meanwhile may find it before the leader has answered."""
    anew, group = client.client("anew"), group_of(ledger)
    write(anew.begin(ledger), ledger, "left")
    metadata, sessions = client._metadata, anew._sessions
    answer_to = metadata.answer_to
    looked: list[dict[GroupName, int]] = []

    def look_before(*args: Any) -> Any:
        sessions.note(group, metadata.session.get(paths.session(group, "anew")))
        looked.append(dict(sessions.fenced))
        return answer_to(*args)

    monkeypatch.setattr(metadata, "answer_to", look_before)
    epoch = anew.new_session(str(group))
    assert looked == [{}]
    sessions.fenced[group] = epoch - 1  # by a look that took its time
    assert anew.begin(ledger).commit().records == 0
    sessions.fenced[group] = epoch + 1
    with pytest.raises(ClientFencedError):
        anew.begin(ledger)


def test_a_held_commit_of_one_name_holds_up_no_other(client: rollbridge.Bridge, orders: str, ledger: str) -> None:
    """Both sessions have the same epoch, the minutes since 1970, which is part of what commits are ordered by."""
    slow, quick = client.client("slow"), client.client("quick")
    held, later = slow.begin(ledger), slow.begin(ledger)
    write(later, ledger, "later")
    number = slow._runtime.commits.of(group_of(ledger), held._writing.plan.begin.client_epoch)
    number.ask(held._writing)  # its frame is never sent
    waiting = later.commit_async()
    other = quick.begin(ledger)
    write(other, ledger, "other")
    assert other.commit(timeout=PATIENCE_S).records == 1
    assert not waiting.done(), "what the first commit held up is of the same name"
    held.abort()
    assert waiting.result(PATIENCE_S).records == 1


def test_names_have_no_threads_and_the_same_ones_serve_them_all(client: rollbridge.Bridge, ledger: str) -> None:
    with client.transaction(ledger) as txn:
        write(txn, ledger, "before")
    client.client("warm").new_session(group_of(ledger))
    before = set(threading.enumerate())
    names = [client.client(f"name-{number}") for number in range(100)]
    for name in names[:20]:
        with name.transaction(ledger) as txn:
            write(txn, ledger, name.client_name)
    assert len(set(threading.enumerate()) - before) < 5, "none for each"
    for name in names:
        name.close()
    assert not [name for name in client._clients if name.startswith("name-")]


def test_a_name_in_two_processes_belongs_to_the_latest(site: Site, client: rollbridge.Bridge, ledger: str) -> None:
    with site.connect("elsewhere") as there:
        here, successor = client.client("flink-7"), there.client("flink-7")
        txn = here.begin(ledger, label="7.1")
        write(txn, ledger, "early")
        txn.flush()
        successor.new_session(group_of(ledger))
        [left] = successor.unfinished(group=group_of(ledger))
        assert (left.transaction, left.records) == (txn.id, 1)
        until(lambda: txn._writing.completion.settled)  # found out without asking for an end
        with pytest.raises(ClientFencedError):
            txn.commit()
        with pytest.raises(ClientFencedError, match=rf"flink-7 \(epoch \d+, of process .+:{os.getpid()}, 2.*Z\)"):
            here.begin(ledger)
        again = successor.resume(left.transaction)
        write(again, ledger, "late")
        assert again.commit().records == 2
        epoch = here.new_session(group_of(ledger))  # takes the name back
        with pytest.raises(ClientFencedError), successor.transaction(ledger) as lost:
            write(lost, ledger, "lost")
        with here.transaction(ledger) as final:
            write(final, ledger, "final")
        with ZooKeeperSession(site.cluster.zookeeper, root=site.root) as session:
            node = session.get(paths.session(group_of(ledger), "flink-7"))
        assert node is not None
        assert f'"epoch": {epoch},'.encode() in node.value
    assert values_of(site, ledger) == ["early", "late", "final"]


def test_a_name_and_a_connection_of_this_name_fence_each_other(
    site: Site, client: rollbridge.Bridge, ledger: str
) -> None:
    name = client.client("shared-name")
    txn = name.begin(ledger)
    write(txn, ledger, "x")
    txn.flush()
    with site.connect("shared-name") as connection:
        [left] = connection.unfinished()
        resumed = connection.resume(left.transaction)
        with pytest.raises(ClientFencedError):
            txn.commit()
        resumed.abort()


def test_a_closed_name_lets_go_of_its_own_only(client: rollbridge.Bridge, ledger: str) -> None:
    one, two = client.client("one"), client.client("two")
    first, second = one.begin(ledger), two.begin(ledger)
    write(first, ledger, "first")
    write(second, ledger, "second")
    first.flush()
    one.close()
    assert one.closed
    with pytest.raises(InvalidRequestError, match="closed"):
        one.begin(ledger)
    with pytest.raises(OutcomeUnknownError, match="client was closed"):
        write(first, ledger, "more")
    assert second.commit().records == 1
    again = client.client("one")
    [left] = again.unfinished()
    assert again.resume(left.transaction).commit().records == 1


def test_what_is_no_name_is_refused(client: rollbridge.Bridge) -> None:
    with pytest.raises(InvalidNameError):
        client.client("no name")
    with pytest.raises(InvalidRequestError, match="itself"):
        client.client(client.client_name)


def test_a_new_session_needs_a_name_that_was_given(site: Site) -> None:
    with site.connect() as unnamed, pytest.raises(InvalidRequestError, match="no name"):
        unnamed.new_session()


def test_unfinished_after_a_new_session_asks_the_leader_once(
    client: rollbridge.Bridge, ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = client.client("asks-once")
    with name.transaction(ledger) as txn:
        write(txn, ledger, "x")
    asked: list[RequestKind] = []
    put = client._metadata.put_request

    def note(group: GroupName, request: AdminRequest, *others: Any) -> str:
        asked.append(request.kind)
        return put(group, request, *others)

    monkeypatch.setattr(client._metadata, "put_request", note)
    name.new_session(group_of(ledger))
    assert name.unfinished(group=group_of(ledger)) == []
    assert asked == [RequestKind.FENCE]
    assert name.unfinished(group=group_of(ledger)) == []
    assert len(asked) == 2, "the next time it is asked again"


def test_the_latest_transaction_with_a_label_is_found_in_whichever_group(
    client: rollbridge.Bridge, ledger: str, scope: str
) -> None:
    other = f"{scope}/other"
    client.admin.create_stream(other, group="others")
    one = client.client(f"{scope}-groups")
    for stream in (ledger, other) * 3:
        with one.transaction(stream, label="same") as ended:
            write(ended, stream, "committed")
        open_one = one.begin(stream, label="same")
        write(open_one, stream, "open")
        open_one.flush()
        for _ in range(5):  # whoever of the leaders answers first
            found = one.outcome(label="same")
            assert (found.transaction, found.committed) == (open_one.id, False)
        open_one.commit()
        assert one.outcome(label="same").transaction == open_one.id


def test_who_has_lost_a_name_begins_no_session_of_it(site: Site, client: rollbridge.Bridge, ledger: str) -> None:
    """A node says whose the name is. Who has not heard that it has changed fences nobody."""
    node = f"/{ledger.replace('/', '-')}"
    other = client.client("holder")
    with (
        ZooKeeperSession(site.cluster.zookeeper, root=site.root) as session,
        site.connect("another-process") as late,
    ):
        session.create(node, b"")
        former = late.client("holder")
        former.only_while(lambda: CheckNode(node, 0))
        left = former.begin(ledger)
        write(left, ledger, "left")
        left.flush()
        version = session.set(node, b"")
        other.only_while(lambda: CheckNode(node, version))
        resumed = other.resume(left.id)
        with pytest.raises(ClientFencedError):
            former.new_session()
        write(resumed, ledger, "resumed")
        assert resumed.commit().records == 2
        with pytest.raises(ClientFencedError):
            left.commit()
