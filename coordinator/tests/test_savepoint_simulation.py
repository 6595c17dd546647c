"""Seeded histories in which streams join late, and owners go back to savepoints, also after they were killed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from coordinator.tests.sim_run import GROUP, STREAMS, Run
from coordinator.tests.sim_savepoints import SavingClient
from rollbridge.buffer import joins
from rollbridge.buffer.fold import BufferFold
from rollbridge.buffer.frames import Manifest
from rollbridge.buffer.savepoints import SavepointFrame
from rollbridge.buffer.state import BufferedTransaction

SEEDS = 36
MORE = 60


class SavingRun(Run):
    """A history in which clients that make savepoints do more than all others."""

    def __init__(self, seed: int) -> None:
        self.saving_rng = random.Random(f"saving, {seed}")
        self.saving: list[SavingClient] = []
        super().__init__(seed)
        self.saving = [
            SavingClient(f"c{number}", self.world, GROUP, STREAMS, random.Random(f"{number}, {seed}"))
            for number in (8, 9)
        ]
        self.clients += self.saving

    def _lead(self) -> None:
        busy = [client for client in self.saving if client.is_writing]
        if busy and self.saving_rng.random() < 0.3:
            self.saving_rng.choice(busy).step(self.clock_ms, GROUP.commit_log_topic)
        else:
            super()._lead()


def run(seed: int) -> tuple[list[str], Counter[str]]:
    """The broken promises of a history, and what happened in it."""
    history = SavingRun(seed)
    found = history.go()
    seen: Counter[str] = Counter()
    for client in history.saving:
        found = found + client.broken
        for what in ("joined", "saved", "rolled_back", "resumed_at", "restarts"):
            seen[what] += getattr(client, what)
    return found, seen


def go(seeds: range) -> Counter[str]:
    """Run histories; returns what happened in all of them."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        found, happened = run(seed)
        assert not found, f"seed {seed}: {found[:5]}"
        seen += happened
    return seen


@pytest.mark.long
def test_what_counts_is_merged_once_and_in_order_whatever_crashes_where() -> None:
    seen = go(range(SEEDS))
    assert min(seen[what] for what in ("joined", "saved", "rolled_back")) > 20, seen
    assert seen["resumed_at"] > 10, seen


def test_a_begin_that_comes_when_its_transaction_has_ended_is_known_to_be_over() -> None:
    go(range(144, 145))  # its end was noted in a part of the buffer that is truncated by then


@pytest.mark.long
@pytest.mark.parametrize("block", range(4))
def test_so_it_is_in_many_histories(block: int) -> None:
    go(range(100 + block * MORE, 100 + (block + 1) * MORE))


def forgets_joins(patch: pytest.MonkeyPatch) -> None:
    """Streams that join late are not kept with the transaction."""
    patch.setattr(joins, "learn", lambda *_, **__: False)


def hears_former_owners(patch: pytest.MonkeyPatch) -> None:
    """Who goes back to a savepoint does not fence what it had written."""
    patch.setattr("rollbridge.buffer.owners.Owners.is_former", lambda *_: False)
    patch.setattr(BufferedTransaction, "arrived", _all_arrived)


def _all_arrived(item: BufferedTransaction) -> dict[object, int]:
    found: Counter[object] = Counter()
    for piece, records in item.frames.counts():
        if piece.part in item.owners.parts:
            found[piece] += records
    return dict(found)


def forgets_savepoints(patch: pytest.MonkeyPatch) -> None:
    """Snapshots do not hold savepoints."""
    patch.setattr("rollbridge.buffer.replay.OngoingTransaction.has_more", property(lambda _: False))


def misses_savepoints(patch: pytest.MonkeyPatch) -> None:
    """Every other savepoint is passed over."""
    hear = BufferFold._savepoint

    def deaf(fold: BufferFold, *arguments: object) -> None:
        if fold.positions and sum(fold.positions.values()) % 2:
            hear(fold, *arguments)  # type: ignore[arg-type]

    patch.setattr(BufferFold, "_savepoint", deaf)


def drops_details(patch: pytest.MonkeyPatch) -> None:
    """Savepoints tell nothing of offsets but the numbers."""
    real = SavepointFrame.encode
    patch.setattr(SavepointFrame, "encode", lambda frame: real(replace(frame, manifest=_bare(frame.manifest))))


def _bare(manifest: Manifest) -> Manifest:
    return replace(manifest, offsets=tuple(replace(item, details={}) for item in manifest.offsets))


@pytest.mark.long_cases("hears_former_owners", "forgets_savepoints")
@pytest.mark.parametrize(
    "defect", [forgets_joins, hears_former_owners, forgets_savepoints, misses_savepoints, drops_details]
)
def test_the_checks_catch_a_defect(defect: object, monkeypatch: pytest.MonkeyPatch) -> None:
    defect(monkeypatch)  # type: ignore[operator]
    assert any(_breaks(seed) for seed in range(SEEDS))


def _breaks(seed: int) -> bool:
    try:
        return bool(run(seed)[0])
    except Exception:
        return True
