"""A preview that begins at the snapshots shows what one shows that reads everything, on any history, at every point."""

from __future__ import annotations

import random

import pytest
from hypothesis import given

from coordinator.tests.benches import OPERATIONS, Bench
from coordinator.tests.sim_log import listed
from coordinator.tests.sim_preview import PREVIEW_DEFECTS, Previewer
from coordinator.tests.sim_run import FOREIGN_MS, GROUP, STREAMS, Run
from rollbridge.errors import TruncatedError
from rollbridge.stream.names import StreamName


def difference(run: Run | Bench, stream: StreamName, defect: str = "") -> str:
    """What the two previews of a stream show differently; empty if nothing."""
    everything = Previewer(run.world, GROUP, stream).shown_from_everything()
    try:
        spared = Previewer(run.world, GROUP, stream, defect).shown_from_snapshots()
    except TruncatedError:
        return ""  # nothing is shown where nobody can know
    if everything == spared:
        return ""
    return f"{stream}: only from everything {everything - spared}, only from the snapshots {spared - everything}"


@given(OPERATIONS)
def test_a_preview_at_any_point_shows_what_reading_everything_shows(
    operations: list[tuple[str, int, StreamName]],
) -> None:
    bench = Bench.fresh()
    for operation in operations:
        bench.do(*operation)
        for stream in STREAMS:
            assert not difference(bench, stream)


class Watched(Run):
    """A simulated history in which previews are opened all the time."""

    def __init__(self, seed: int, defect: str = "") -> None:
        super().__init__(seed)
        self.defect = defect
        self.viewer = random.Random(seed)
        self.compared = 0
        self.different: list[str] = []

    def _let_foreign_end(self, after_ms: int = FOREIGN_MS) -> None:
        """Each step comes by here."""
        super()._let_foreign_end(after_ms)
        if self.viewer.random() < 0.03:
            self.compared += 1
            found = difference(self, self.viewer.choice(STREAMS), self.defect)
            if found:
                self.different.append(found)


@pytest.mark.parametrize("seed", range(4))
def test_previews_are_right_whatever_crashes_where(seed: int) -> None:
    run = Watched(seed)
    run.go()
    assert not run.different, f"seed {seed}: {run.different[0]}"
    assert run.compared > 50


@pytest.mark.parametrize("defect", PREVIEW_DEFECTS)
def test_the_comparison_catches_a_defect(defect: str) -> None:
    bench = Bench.fresh()
    _double_a_begin(bench)
    if defect == "sure":
        assert difference(bench, STREAMS[0], defect)
        return
    if defect == "no-list":
        for _ in range(6):
            bench.do("aborted", 1, STREAMS[0])
        bench.rest()
        assert _truncate(bench)
        again = bench.world.topics[STREAMS[0].buffer_topic()].entries[0].item
        bench.world.produce(STREAMS[0].buffer_topic(), again)
        assert difference(bench, STREAMS[0], defect)
    assert not difference(bench, STREAMS[0])
    if defect == "no-list":
        return
    rng = random.Random(defect)
    names = ["begin", "data", "data", "commit", "abort", "aborted", "late", "lead", "rest"]
    for _ in range(3_000):
        bench.do(rng.choice(names), rng.randint(0, 3), rng.choice(STREAMS))
        if defect == "no-look-up":
            _truncate(bench)
        if any(difference(bench, stream, defect) for stream in STREAMS):
            return
    raise AssertionError(f"nothing has noticed the defect {defect}")


def _truncate(bench: Bench) -> int:
    """Delete from the commit log what is written down of it."""
    log = bench.world.topics[GROUP.commit_log_topic]
    log.start = max(log.start, listed(bench.world, GROUP).log_end)
    return log.start


def _double_a_begin(bench: Bench) -> None:
    """A writer that is not idempotent sends a BEGIN frame again when the transaction has been committed."""
    bench.do("begin", 0, STREAMS[0])
    sent = [entry.item for entry in bench.world.topics[STREAMS[0].buffer_topic()].entries]
    bench.do("late", 0, STREAMS[0])  # its BEGIN frame in the other stream
    bench.do("commit", 0, STREAMS[0])
    bench.rest()
    for item in sent:
        bench.world.produce(STREAMS[0].buffer_topic(), item)
