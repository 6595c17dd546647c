"""Makers of commits that are counted."""

from __future__ import annotations

from typing import Any

from coordinator.tests.makers import Bench
from rollbridge.base.effects import AnyEffect, run
from rollbridge_coordinator.commit.merge import merge_direct
from rollbridge_coordinator.core import effects as fx


def commit(bench: Bench, *transactions: Any, committed_ms: int = 5_000) -> list[str]:
    """Merge a round on brokers that do as they are told; gives the effects."""
    done: list[str] = []

    def answer(effect: AnyEffect) -> Any:
        done.append(type(effect).__name__)
        match effect:
            case fx.MergeFrames(items) | fx.AppendTogether(items):
                offsets = list(range(len(items)))
                return offsets if isinstance(effect, fx.MergeFrames) else (offsets, [0])
            case fx.AppendControl(_, records):
                return list(range(len(records)))
            case fx.CommitRound():
                return committed_ms
        return None

    run(merge_direct(bench.group, transactions, bench.clock_ms), answer)
    return done
