"""Sessions that nobody needs are forgotten early, and neither let a zombie in nor keep anybody out."""

from __future__ import annotations

import pytest

from coordinator.tests.sim_forgetting import DEFECTS, Group, Wrong
from rollbridge.model.sessions import HOUR_MS
from rollbridge_coordinator.procedures import sessions

SEEDS = 150
STEPS = 2_000
TRIES = 1_000
"""Seeds of which one finds a defect; mostly the first few do."""
FROM = {"blind-to-others": 240, "floor-read-last": 90, "no-mark": 165, "no-version": 70}
"""Seeds to begin with where it takes longer."""


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whoever_is_forgotten_is_over_and_whoever_is_not_goes_on(seed: int) -> None:
    Group(seed).run(STEPS)


def test_the_histories_are_about_something() -> None:
    groups = [Group(seed) for seed in range(20)]
    for group in groups:
        group.run(STEPS)
    assert sum(group.removed for group in groups) > 30
    assert sum(len(found) for group in groups for found in group.sessions.values()) > 300
    ended = [item.ended for group in groups for item in group.transactions.values()]
    assert ended.count("committed") > 100
    assert ended.count("aborted") > 10


@pytest.mark.parametrize("defect", sorted(DEFECTS))
def test_the_histories_find_a_defect(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if defect == "busy-forgotten":
        monkeypatch.setattr(sessions, "_needed", lambda group: set())
    if defect == "no-margin":
        monkeypatch.setattr(sessions, "KEPT_MS", HOUR_MS)
    first = FROM.get(defect, 0)
    for seed in range(first, first + TRIES):
        try:
            Group(seed, frozenset({defect})).run(STEPS)
        except Wrong:
            return
    pytest.fail(f"nobody notices if {DEFECTS[defect]}")
