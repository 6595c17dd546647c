"""A leader's state that contradicts itself is found; simulations show that no sound one is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.tests.makers import Bench
from rollbridge.buffer.table import State
from rollbridge.stream.epochs import EpochCause
from rollbridge_coordinator.commit.outcome_store import Draft
from rollbridge_coordinator.core.invariants import BrokenInvariantError, check
from rollbridge_coordinator.core.waits import PendingChange, Wait

ORDERS = "sales/orders"


def lead_twice(bench: Bench) -> None:
    bench.group.unled[ORDERS] = cast("Any", None)


def break_chain(bench: Bench) -> None:
    history = bench.group.streams[ORDERS].history
    wrong = tuple(replace(item, cause=EpochCause.SCALE) for item in history.records)
    bench.group.streams[ORDERS].history = replace(history, records=wrong)


def leave_unsealed(bench: Bench) -> None:
    bench.scale(ORDERS, [0], [(0.0, 0.5), (0.5, 1.0)])


def change_unnoticed(bench: Bench) -> None:
    work = SimpleNamespace(streams=(ORDERS,))
    bench.group.waits.pending_changes["/node"] = PendingChange(cast("Any", work), Wait(0, 0, frozenset()))


def lose_snapshots(bench: Bench) -> None:
    bench.group.snapshots.partitions.clear()


def decide_nothing(bench: Bench) -> None:
    next(iter(bench.group.fold.open.values())).state = State.COMMITTING


def end_decided(bench: Bench) -> None:
    bench.group.fold.decided.update(bench.group.fold.open)
    bench.group.fold.open.clear()


def read_ahead(bench: Bench) -> None:
    bench.group.fold.positions.update(dict.fromkeys(bench.group.partitions(), 0))


def miscount(bench: Bench) -> None:
    bench.group.fold.held_bytes += 1


def keep_what_goes(bench: Bench) -> None:
    bench.group.records.recorded.add(b"x")
    bench.group.records.finished.append(b"x")


def keep_draft(bench: Bench) -> None:
    bench.group.draft = Draft((), {}, 0)


def take_too_many(bench: Bench) -> None:
    many = range(bench.group.settings.merges_beside_max + 1)
    bench.group.large.preparations.update({bytes([number]): cast("Any", None) for number in many})


def wait_for_ended(bench: Bench) -> None:
    bench.group.waits.answers[b"x"] = ["request-1"]


BREAKS: dict[Callable[[Bench], None], str] = {
    lead_twice: "is led, and is not",
    break_chain: "has the cause",
    leave_unsealed: "nothing will seal them",
    change_unnoticed: "takes transactions meanwhile",
    lose_snapshots: "nothing is known of the snapshots",
    decide_nothing: "and decided: False",
    end_decided: "is decided, and not open",
    read_ahead: "which was not read yet",
    miscount: "bytes are held",
    keep_what_goes: "is kept, and to be removed",
    keep_draft: "no round is under way",
    take_too_many: "merges in the background",
    wait_for_ended: "which is over",
}


@pytest.mark.parametrize("defect", BREAKS, ids=lambda defect: defect.__name__)
def test_a_contradiction_is_named(defect: Callable[[Bench], None]) -> None:
    bench = Bench({ORDERS: 1})
    bench.begin(ORDERS)
    check(bench.group)
    defect(bench)
    with pytest.raises(BrokenInvariantError, match=BREAKS[defect]):
        check(bench.group)
