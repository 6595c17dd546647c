"""How a comparison is made: alternating measurements, ratios of neighbours, medians.

What a shared machine gives changes from one second to the next, so absolute figures of one run say little. An
experiment measures its sides in turn, round after round; a ratio is taken between two measurements of the same round,
and the median over the rounds decides. Of several native peers the fastest, by its median, is the one compared with.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

Measured = Mapping[str, float]
"""Metrics of one measurement, by name."""
Measure = Callable[[], Measured]
Report = Callable[[str], object]

OURS = "rollbridge"


class Better(Enum):
    """Which way a metric improves."""

    MORE = "more"
    LESS = "less"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table: a metric of ours, and what it must reach.

    With ``peers`` the bar is a ratio, ours to theirs; without, it is the metric itself.
    """

    name: str
    title: str
    metric: str
    unit: str
    better: Better
    bar: float | None = None
    """None: reported for information, nothing is demanded."""
    ours: str = OURS
    peers: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    """Sides that are shown beside ours, without being what the bar compares with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Sides that are measured in turn, and the rows that follow from them."""

    name: str
    rows: Sequence[Row]
    sides: Mapping[str, Measure]
    rounds: int
    warm_ups: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A row with what was measured; lists have one entry for each round."""

    row: Row
    ours: list[float]
    peer: str | None = None
    """The fastest of the peers, or the side shown beside ours."""
    theirs: list[float] = field(default_factory=list)
    others: Mapping[str, float] = field(default_factory=dict)
    """Medians of the slower peers."""

    @property
    def ours_median(self) -> float:
        """Median of our metric."""
        return statistics.median(self.ours)

    @property
    def theirs_median(self) -> float | None:
        """Median of the peer's metric."""
        return statistics.median(self.theirs) if self.theirs else None

    @property
    def ratios(self) -> list[float]:
        """Ours to theirs, round by round; empty if the row has no peer to be compared with."""
        if not self.row.peers:
            return []
        return [mine / other for mine, other in zip(self.ours, self.theirs, strict=True)]

    @property
    def ratio(self) -> float | None:
        """Median of the ratios."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def compared(self) -> float:
        """What the bar is held against."""
        return self.ours_median if self.ratio is None else self.ratio

    @property
    def reached(self) -> bool | None:
        """Whether the bar is reached; None if there is none."""
        if self.row.bar is None:
            return None
        return self.compared >= self.row.bar if self.row.better is Better.MORE else self.compared <= self.row.bar


def run(experiment: Experiment, report: Report) -> list[Result]:
    """Measure an experiment: warm up, then every side once in each round, beginning with another one each time."""
    for number in range(experiment.warm_ups):
        for name, measure in experiment.sides.items():
            report(f"{experiment.name}: warming up {number + 1}/{experiment.warm_ups}, {name}")
            _measure(measure)
    names = list(experiment.sides)
    samples: dict[str, list[Measured]] = {name: [] for name in names}
    for number in range(experiment.rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            report(f"{experiment.name}: round {number + 1}/{experiment.rounds}, {name}")
            samples[name].append(_measure(experiment.sides[name]))
    return [_result(row, samples) for row in experiment.rows]


def _measure(measure: Measure) -> Measured:
    # What one side leaves to the collector is not charged to the next.
    gc.collect()
    return measure()


def _result(row: Row, samples: Mapping[str, Sequence[Measured]]) -> Result:
    def values(side: str) -> list[float]:
        return [sample[row.metric] for sample in samples[side]]

    rivals = {side: values(side) for side in row.peers or row.beside}
    if not rivals:
        return Result(row=row, ours=values(row.ours))
    order = sorted(rivals, key=lambda side: statistics.median(rivals[side]), reverse=row.better is Better.MORE)
    return Result(
        row=row,
        ours=values(row.ours),
        peer=order[0],
        theirs=rivals[order[0]],
        others={side: statistics.median(rivals[side]) for side in order[1:]},
    )
