"""Leases: the table, and a simulation in which nobody acts under a lease that another one has taken; mutants do."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import product

import pytest

from bridge.tests.sim_lease import HELD, TOKEN, WORK, Holder, ZooKeeper, simulate
from rollbridge import lease as leases
from rollbridge.lease import MARGIN, MOVES, Lease, LeaseEvent, LeaseState, Link, Tenure, Witness
from rollbridge.metadata.errors import NodeConflictError, NodeMissingError
from rollbridge.metadata.records import CheckNode, CreateNode, DeleteNode, SetNode
from rollbridge.metadata.session import Znode
from rollbridge_gateway.producer.ids import SURE_SHARE

SEEDS = 130
SURE_S = 3.0


def keep(token: bytes | None) -> bytes | None:
    return token


def test_each_event_has_a_row_for_each_state() -> None:
    assert set(MOVES) == set(product(LeaseState, LeaseEvent))
    ours = {LeaseState.HELD, LeaseState.SUSPENDED}
    for (state, event), after in MOVES.items():
        if after in ours and state not in ours:
            assert event is LeaseEvent.TAKEN, "what is not held is held only once it was taken"
        if state in ours and after not in ours:
            assert (after is LeaseState.VACANT) == (event is LeaseEvent.GIVEN_UP)
        if state is LeaseState.SUSPENDED and after is LeaseState.HELD:
            assert event in {LeaseEvent.SEEN, LeaseEvent.TAKEN}


def test_a_connection_tells_what_has_become_of_a_lease() -> None:
    held = Tenure(LeaseState.HELD, Link(7, 2), None, LeaseEvent.TAKEN)
    assert held.over(Link(7, 2)) is held
    assert held.over(Link(None, 2)).state is LeaseState.SUSPENDED
    assert held.over(Link(7, 3)).state is LeaseState.SUSPENDED, "it may have been set back in between"
    assert held.over(Link(8, 3)).cause is LeaseEvent.EXPIRED
    assert held.after(LeaseEvent.GONE).after(LeaseEvent.SEEN).state is LeaseState.LOST
    assert Tenure().over(Link(8, 3)) == Tenure()


def test_a_witness_waits_longer_than_anyone_is_sure() -> None:
    witness = Witness(SURE_S)
    assert not witness.is_over(7, 10.0)
    assert not witness.is_over(7, 9.999 + SURE_S * (1 + MARGIN))
    assert witness.is_over(7, 10.001 + SURE_S * (1 + MARGIN))
    assert not witness.is_over(8, 99.0)
    assert SURE_SHARE <= 0.5, "a session that has ended is over for sure"


def test_nobody_acts_under_a_lease_that_another_one_has_taken() -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        found = simulate(seed)
        assert not found.faults, f"seed {seed}: {found.faults}"
        counts.update(found.counts, setbacks=found.setbacks)
    assert min(counts.values()) > SEEDS, counts


class Hasty(Witness):
    """Waits for less than others are sure."""

    def __init__(self, sure_s: float) -> None:
        super().__init__(sure_s / 2)


class Forgetful(Witness):
    """Continues to count when the version has changed."""

    def is_over(self, version: int, now_s: float) -> bool:
        self._version = version if self._version is None else self._version
        return super().is_over(self._version, now_s)


class Careless(Holder):
    """Removes a life whatever its version."""

    def remove(self, path: str, node: Znode) -> None:
        super().remove(path, Znode(-1, 0, 0, None, b""))


class Remembering(Holder):
    """Believes after an interruption that it sees what it saw before, as gateways did."""

    forgets = False


class Late(Lease):
    """Is sure from the answer on."""

    def renew(self, value: bytes) -> bool:
        is_ours = super().renew(value)
        self.renewed_s = self._clock()
        return is_ours


class Unmarked(Lease):
    """Takes without writing the token."""

    def take(
        self,
        value: bytes,
        succeed: Callable[[bytes | None], bytes | None] = lambda token: token,
        over: Znode | None = None,
    ) -> Znode | None:
        return super().take(value, lambda _: None, over)


class Unguarded(Lease):
    """Writes under no condition."""

    def guard(self) -> list[CheckNode]:
        return [CheckNode(TOKEN)] if super().guard() else []


class Sweeping(Lease):
    """Gives up without a look at whose the node is."""

    def _is_removed(self) -> bool:
        self._change(DeleteNode(self.path))
        return True


class Stepwise(Lease):
    """Removes the node of a holder that is over before it takes the lease, in a step of its own."""

    def take(
        self,
        value: bytes,
        succeed: Callable[[bytes | None], bytes | None] = lambda token: token,
        over: Znode | None = None,
    ) -> Znode | None:
        if over is not None:
            try:
                self._session.multi([DeleteNode(self.path, over.version)])
            except (NodeMissingError, NodeConflictError):
                return over
        return super().take(value, succeed)


class Belated(Lease):
    """Writes the token after it has taken the lease, as leaders did."""

    def take(
        self,
        value: bytes,
        succeed: Callable[[bytes | None], bytes | None] = lambda token: token,
        over: Znode | None = None,
    ) -> Znode | None:
        found = super().take(value, lambda _: None, over)
        if found is None and self._token:
            (token,) = self._session.get_many([self._token])
            try:
                self._session.multi([CreateNode(TOKEN, b"") if token is None else SetNode(TOKEN, b"", token.version)])
            except (NodeConflictError, NodeMissingError):
                return Znode(0, 0, 0, None, b"")
        return found


class Blind(Lease):
    """Writes to a holder's node whoever's it is by now, as gateways did."""

    def ask(self, found: Znode, value: bytes) -> None:
        self._others = None
        super().ask(found, value)


class Disorderly(Lease):
    """Reads the node before the token."""

    def _nodes(self) -> tuple[Znode | None, Znode | None]:
        found, token = self._session.get_many([self.path, self._token or self.path])
        return token if self._token else None, found


MUTANTS: Mapping[str, type[Holder] | type[Lease] | type[Witness]] = {
    kind.__name__: kind
    for kind in (*(Hasty, Forgetful, Careless, Remembering, Late, Unguarded, Sweeping, Stepwise, Belated, Disorderly),)
}


@pytest.mark.long_cases("Belated", "Careless")
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_do(name: str) -> None:
    assert find(MUTANTS[name]) is not None


def test_a_table_that_ignores_interruptions_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MOVES", {**MOVES, (LeaseState.HELD, LeaseEvent.INTERRUPTED): LeaseState.HELD})
    assert find(Holder) is not None


class Still(Holder):
    """Asks while nobody else does."""

    def step(self, pause_s: float | None = None, *, halts: float = 0.0) -> None:
        """Let nobody run."""
        self.zookeeper.now_s += 0.1
        self.session.notice()


def test_a_lease_that_is_seen_as_it_was_once_is_lost() -> None:
    """ZooKeeper was set back to when the same session had it before, so its guard may become true for another one."""
    zookeeper = ZooKeeper(random.Random(0))
    holder = Still(zookeeper, "a", is_timed=False)
    lease = Lease(holder.session, HELD, TOKEN)  # type: ignore[arg-type]
    assert lease.take(b"a", lambda _: b"raised") is None
    before = zookeeper.nodes
    lease.give_up()
    assert not lease.is_kept
    assert lease.take(b"a", lambda _: b"raised") is None
    zookeeper.nodes, zookeeper.setbacks, zookeeper.back_s = before, 1, 1.0
    holder.session.notice()
    assert lease.tenure.state is LeaseState.SUSPENDED
    zookeeper.now_s = 2.0
    holder.session.notice()
    assert not lease.is_held
    assert lease.look() == before[HELD]
    assert (lease.tenure.state, lease.tenure.cause) == (LeaseState.LOST, LeaseEvent.REPLACED)


def test_what_is_given_up_while_the_connection_is_away_is_removed() -> None:
    """Its session lives, so the node would keep all others from the lease."""
    zookeeper = ZooKeeper(random.Random(0))
    holder = Still(zookeeper, "a", is_timed=False)
    lease = Lease(holder.session, HELD, TOKEN)  # type: ignore[arg-type]
    assert lease.take(b"a", lambda _: b"raised") is None
    holder.session.lose(1.0)
    lease.give_up()
    assert holder.session.session_id is not None
    assert HELD not in zookeeper.nodes


def former_may_write(kind: type[Lease]) -> bool:
    """Return True if who has given a lease up may still write under it, after another one has taken it."""
    zookeeper = ZooKeeper(random.Random(0))
    zookeeper.nodes[TOKEN] = Znode(0, 0, 0, None, b"")
    one, other = (Still(zookeeper, name, is_timed=False) for name in "ab")
    first = kind(one.session, HELD, TOKEN)  # type: ignore[arg-type]
    assert first.take(b"a") is None
    first.give_up()
    assert kind(other.session, HELD, TOKEN).take(b"b") is None  # type: ignore[arg-type]
    try:
        one.session.multi([*first.guard(), SetNode(WORK, b"")])
    except NodeConflictError:
        return False
    return True


def asks_another(kind: type[Lease]) -> bool:
    """Return True if who asks a holder writes to the node of the next one, whose version is the same."""
    zookeeper = ZooKeeper(random.Random(0))
    zookeeper.nodes[TOKEN] = Znode(0, 0, 0, None, b"")
    holders = [Still(zookeeper, name, is_timed=False) for name in "abc"]
    first, asking, second = (kind(item.session, HELD, TOKEN) for item in holders)  # type: ignore[arg-type]
    assert first.take(b"a") is None
    found = asking.take(b"b")
    assert found is not None
    first.give_up()
    assert second.take(b"c") is None
    asking.ask(found, b"a, wanted by b")
    return zookeeper.nodes[HELD].value != b"c"


def test_the_token_tells_holders_apart() -> None:
    assert not former_may_write(Lease)
    assert former_may_write(Unmarked)
    assert not asks_another(Lease)
    assert asks_another(Blind)


def find(mutant: type[Holder] | type[Lease] | type[Witness]) -> int | None:
    """Return the first seed that shows a mutant."""
    if issubclass(mutant, Holder):
        kind = mutant
    else:
        part = "lease_type" if issubclass(mutant, Lease) else "witness_type"
        kind = type("Mutant", (Holder,), {part: mutant})
    return next((seed for seed in range(SEEDS) if simulate(seed, kind).faults), None)


def test_a_session_that_ends_while_its_node_is_read_is_told_from_a_node_that_was_removed() -> None:
    zookeeper = ZooKeeper(random.Random(0))
    holder = Still(zookeeper, "a", is_timed=False)
    lease = Lease(holder.session, HELD, TOKEN)  # type: ignore[arg-type]
    assert lease.take(b"a", lambda _: b"raised") is None
    own = lease._link()
    links = iter((own, Link(None, 1), Link(None, 1), Link(8, 1), *[Link(8, 1)] * 9))
    zookeeper.nodes = {path: node for path, node in zookeeper.nodes.items() if path != HELD}
    lease._link = lambda: next(links)  # type: ignore[method-assign]
    assert lease.look() is None
    assert lease._tenure.cause is LeaseEvent.EXPIRED
