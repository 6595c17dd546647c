"""Who serves a transactional id, on a real ZooKeeper: handed over, taken from who stands still, and never by two."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from bridge.tests.refusals import raises_code
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import expire
from integration_tests.links import Link
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.errors import ZooKeeperUnavailableError
from rollbridge.metadata import paths
from rollbridge.metadata.gateways import GatewayRecord, Holder
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge_gateway.producer import ids
from rollbridge_gateway.producer.ids import NOT_HELD, Register
from rollbridge_gateway.producer.table import Entry, Pair

ID = "billing"
SESSION_S = 30.0
ENTRY = Entry(ID, Pair(1 << 62, 0), 60_000)


class Member:
    """A gateway's side of the register, and what it was told to let go of."""

    def __init__(self, cluster: AnyCluster, root: str, name: str, sure_s: float, zookeeper: str = "") -> None:
        self.session, self.lease = (
            ZooKeeperSession(servers, root=root, session_timeout_s=SESSION_S, name=name)
            for servers in (zookeeper or cluster.zookeeper, cluster.zookeeper)
        )
        self.session.start(PATIENCE_S)
        self.lease.start(PATIENCE_S)
        self.lost: list[str] = []
        self.register = Register(self.session, self.lease, name, 2 * sure_s, self.lost.append)
        self.register.turn()
        self.register.announce(GatewayRecord(name=name, host="host", port=1))
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def go_on(self) -> None:
        """Live on a thread, as gateways do."""
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def stand_still(self) -> None:
        """Stop that."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        self.stand_still()
        self.session.close()
        self.lease.close()

    def _live(self) -> None:
        while not self._ending.wait(self.register.turn_s):
            self.register.turn()


Make = Callable[..., Member]


@pytest.fixture
def member(cluster: AnyCluster, unique_name: Callable[[str], str]) -> Iterator[Make]:
    """Makes gateways of one root path."""
    root = f"/{unique_name('register')}"
    with ExitStack() as stack:

        def make(name: str, sure_s: float = 60.0, zookeeper: str = "") -> Member:
            made = Member(cluster, root, name, sure_s, zookeeper)
            stack.callback(made.close)
            return made

        yield make


def test_an_id_is_handed_over_with_what_is_on_record(member: Make) -> None:
    first, second = member("first"), member("second")
    assert first.register.hold(ID) is None
    first.register.write(ID, ENTRY)
    assert first.register.is_sure(ID)
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(second.register.hold, ID)
        eventually(lambda: first.lost == [ID], "the holder is asked")
        assert not taking.done()
        first.register.release(ID)
        assert taking.result(PATIENCE_S) == ENTRY
    assert second.register.is_sure(ID)
    assert not first.register.is_sure(ID)
    with raises_code(NOT_HELD, match="nothing was written"):
        first.register.write(ID, ENTRY)


def test_what_stands_still_is_taken_and_it_knows(member: Make) -> None:
    still, other = member("still", sure_s=2.0), member("other", sure_s=2.0)
    still.register.hold(ID)
    still.register.write(ID, ENTRY)
    other.go_on()
    assert other.register.hold(ID) == ENTRY
    assert not still.register.is_sure(ID), "whoever took it has waited for that"
    assert not still.register.is_alive()
    assert [item.name for item in other.register.gateways()] == ["other"]
    still.register.turn()
    assert set(still.lost) == {ID}
    assert not still.register.is_sure(ID)
    with raises_code(NOT_HELD, match="nothing was written"):
        still.register.write(ID, ENTRY)
    assert {item.name for item in other.register.gateways()} == {"other", "still"}, "in another life"
    still.register.release(ID)
    assert other.lost == [], "what it released was not its own any more"


def test_a_gateway_that_lives_keeps_what_it_does_not_let_go_of(member: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, other = member("holder", sure_s=2.0), member("other", sure_s=0.2)
    monkeypatch.setattr(ids, "HANDOVER_S", 1.0)
    holder.register.hold(ID)
    holder.go_on()
    with raises_code(NOT_HELD, match="has not let go"):
        other.register.hold(ID)
    assert holder.lost == [ID]


def test_a_lease_is_renewed_whatever_the_other_session_waits_for(cluster: AnyCluster, member: Make) -> None:
    with Link(cluster.zookeeper) as link:
        one, other = member("one", zookeeper=link.address), member("other")
        one.register.hold(ID)
        [path] = [
            f"{paths.GATEWAY_LEASES}/{life}"
            for life in other.lease.children(paths.GATEWAY_LEASES)
            if other.lease.get(f"{paths.GATEWAY_LEASES}/{life}").value == b"one"  # type: ignore[union-attr]
        ]
        link.cut()
        before = other.lease.get(path)
        one.register.confirm()
        after = other.lease.get(path)
        assert before is not None
        assert after is not None
        assert after.version == before.version + 1
        assert one.register.is_sure(ID)
        link.heal()


def test_an_id_is_kept_as_long_as_its_lease_whatever_becomes_of_the_other_session(
    cluster: AnyCluster, member: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZooKeeper may have ended it, which a client hears of late: at a server that has lost its leader, for example."""
    monkeypatch.setattr(ids, "HANDOVER_S", 1.0)
    with Link(cluster.zookeeper) as link:
        one, other = member("one", zookeeper=link.address), member("other")
        one.register.hold(ID)
        link.cut()
        expire(cluster, one.session)
        with raises_code(NOT_HELD, match="has not let go"):
            other.register.hold(ID)
        assert one.lost == [ID], "it is asked"
        assert one.register.is_sure(ID)
        assert [item.name for item in other.register.gateways()] == ["one", "other"]
        link.heal()


def test_ids_of_a_session_that_has_ended_are_free_at_once(member: Make) -> None:
    ended, other = member("ended"), member("other")
    ended.register.hold(ID)
    ended.register.write(ID, ENTRY)
    ended.lease.close()
    assert not ended.register.is_sure(ID)
    assert other.register.hold(ID) == ENTRY


STRANGE = [b"", b".", b"..", b"/", b"a/../b", b"a\0b", b"\xff", b"x" * 5_000]


@pytest.mark.parametrize("value", STRANGE, ids=lambda value: repr(value[:6]))
def test_a_lease_that_somebody_else_has_made_up_is_deleted_and_stops_nobody(member: Make, value: bytes) -> None:
    one = member("one", sure_s=0.2)
    made_up, kept = f"{paths.GATEWAY_LEASES}/made-up", f"{paths.GATEWAY_LEASES}/kept"
    one.session.create(f"{kept}/below", b"", parents=True)
    one.session.create(made_up, value)

    def is_gone() -> bool:
        one.register.turn()
        return one.session.get(made_up) is None

    eventually(is_gone, "it was not written for long enough")
    assert [item.name for item in one.register.gateways()] == ["one"]
    assert one.session.get(kept) is not None, "what has nodes below it is no lease"


@pytest.mark.parametrize("life", ["", ".", "..", "/", "../live", "made-up"])
def test_an_id_is_not_held_by_who_has_no_life(member: Make, life: str) -> None:
    one = member("one")
    path = paths.gateway_holder(ID)
    one.session.ensure(path.rpartition("/")[0])
    one.session.create(path, Holder("somebody", life).encode())
    assert one.register.hold(ID) is None
    assert one.register.is_sure(ID)


def test_a_node_that_says_nothing_is_that_of_nobody(member: Make) -> None:
    one = member("one")
    one.session.ensure(paths.gateway_holder(ID), b"not ours")
    assert one.register.hold(ID) is None
    assert one.register.is_sure(ID)


def test_two_that_want_the_same_take_turns(member: Make) -> None:
    """Each is told that the other one wants it, lets go, and asks again; neither believes that it has what it lacks."""
    members = [member(name) for name in ("one", "two", "three")]
    overlaps: list[str] = []
    turns = 10

    def serve(mine: Member) -> None:
        for _ in range(turns):
            while True:
                try:
                    mine.register.hold(ID)
                    break
                except ZooKeeperUnavailableError:
                    continue
            sure = [item for item in members if item.register.is_sure(ID)]
            if len(sure) > 1:
                overlaps.append(str(sure))
            mine.register.release(ID)

    with ThreadPoolExecutor(len(members)) as pool:
        for done in [pool.submit(serve, item) for item in members]:
            done.result(PATIENCE_S * 2)
    assert not overlaps


def test_a_gateway_announces_itself_once_whoever_does_it(member: Make) -> None:
    """After its session was lost, whoever takes an id begins its new life while its loop looks around."""
    one, name = member("one"), "one"
    me = GatewayRecord(name=name, host="host", port=1)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(50):
            one.register.withdraw()
            for done in [pool.submit(one.register.announce, me) for _ in range(4)]:
                done.result()
            assert [item.name for item in one.register.gateways()].count(name) == 1


def test_a_gateway_whose_name_is_taken_is_not_registered_until_the_other_one_ends(member: Make) -> None:
    first, second = member("one"), member("one")  # the same address: the same gateway, started again
    assert second.register.namesake == ""
    first.register.announce(GatewayRecord(name="one", host="elsewhere", port=1))
    assert first.register.namesake == "host:1"
    assert [item.host for item in first.register.gateways()] == ["host"]
    second.close()
    eventually(lambda: not first.register.gateways(), "the node of a gateway that has ended is gone")
    first.register.announce(GatewayRecord(name="one", host="elsewhere", port=1))
    assert first.register.namesake == ""
    assert [item.host for item in first.register.gateways()] == ["elsewhere"]
