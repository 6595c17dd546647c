"""Expiry of part counters: those of transactions that ended go, and no other's does."""

from __future__ import annotations

import pytest

from coordinator.tests.makers import GROUP
from coordinator.tests.scenes import Scene
from rollbridge.base.ids import TransactionId
from rollbridge.metadata import paths
from rollbridge.metadata.client_sessions import ClientSession, CooperativeState, CooperativeWork, SharedSession

UNKNOWN, OTHER = TransactionId.of(0, 1 << 40), TransactionId.of(0, 1 << 41)


def session(transaction: TransactionId, state: CooperativeState = CooperativeState.OPEN) -> bytes:
    work = CooperativeWork(
        series="q", number=3, transaction=transaction, epoch=0, streams={}, lease_ms=1_000, state=state
    )
    return ClientSession("query", 0, 0, SharedSession("run", (), work)).to_json()


@pytest.mark.parametrize(
    ("counter", "client", "stays"),
    [
        (b"query", session(UNKNOWN), True),
        (b"query", session(UNKNOWN, CooperativeState.ENDING), True),
        (b"query", b"unreadable", True),
        (b"query", session(UNKNOWN, CooperativeState.ABORTED), False),
        (b"query", session(UNKNOWN, CooperativeState.COMMITTED), False),
        (b"query", session(OTHER), False),
        (b"query", ClientSession("query", 0, 0).to_json(), False),
        (b"query", None, False),
        (b"", session(UNKNOWN), False),
        (b"a/../name\xff", session(UNKNOWN), False),
    ],
)
def test_a_counter_of_which_nothing_is_known_stays_while_its_client_may_write_parts(
    counter: bytes, client: bytes | None, *, stays: bool
) -> None:
    """A task that has claimed part 1 and not written yet, or is paused there, shares it with nobody."""
    scene = Scene()
    path, gone = paths.parts(GROUP, UNKNOWN), paths.parts(GROUP, TransactionId.of(0, 1 << 42))
    scene.world.ensure(gone)
    scene.world.ensure(path)
    scene.world.nodes[path] = counter
    if client is not None:
        scene.world.ensure(paths.session(GROUP, "query"))
        scene.world.nodes[paths.session(GROUP, "query")] = client
    scene.until(lambda: gone not in scene.world.nodes)
    assert (path in scene.world.nodes) == stays
    assert scene.terms_ended == 0
