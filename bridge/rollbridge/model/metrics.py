"""Metrics as values: what is declared once of each, and what is counted. Pure, and without a client of Prometheus.

A :class:`Family` says once, for exposition and for docs, what a metric is called, what it means and what to do about
it. Whoever counts keeps numbers and :class:`Histogram`, and makes a list of :class:`Sample` of them when somebody asks.
:mod:`rollbridge.metrics` turns those into what Prometheus reads; only that needs its client.

A name ends with its unit, and a counter's with ``_total`` (Prometheus, "Metric and label naming").
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple, Self

PREFIX: Final = "rollbridge"

LATENCY_BOUNDS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0
)  # fmt: skip
"""Bounds of what clients wait for, in seconds: up to the 15 minutes that a merge may take."""
REQUEST_BOUNDS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bounds of single requests, in seconds."""


class FamilyKind(StrEnum):
    """What kind of metric a family is, as Prometheus calls it."""

    COUNTER = "counter"
    """It only grows, from 0 with each term of a leader, or each process."""
    GAUGE = "gauge"
    """It is as it is now; not a number (NaN) while that is unknown."""
    HISTOGRAM = "histogram"
    """How many were at most so large, their number and their sum."""
    SUMMARY = "summary"
    """The number of them and their sum."""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric that is exposed.

    Attributes:
        name: As it is scraped, with the unit at its end, and ``_total`` where it is a counter.
        kind: What kind of metric it is.
        about: What it means, in one sentence; Prometheus shows it as HELP.
        labels: Names of its labels, in order.
        advice: What an operator does about it; empty if nothing follows from it alone.
    """

    name: str
    kind: FamilyKind
    about: str
    labels: tuple[str, ...] = ()
    advice: str = ""


@dataclass(slots=True)
class Histogram:
    """How values were distributed. Not thread-safe.

    Attributes:
        bounds: Upper bounds of the buckets, ascending; values beyond the last are in one more.
        counts: Of each bucket alone.
        total: The sum of all values.
    """

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def note(self, value: float, times: int = 1) -> None:
        """Count a value, so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def buckets(self) -> Iterator[tuple[float, int]]:
        """Iterate over the bounds, infinity last, each with the number of values that do not exceed it."""
        below = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            below += count
            yield bound, below

    def copy(self) -> Self:
        """Return the same values, which go on changing here only."""
        return type(self)(self.bounds, list(self.counts), self.total)


class Spent(NamedTuple):
    """Number and sum: what a summary counts."""

    times: int = 0
    total: float = 0.0


class Sample(NamedTuple):
    """What a family says of one combination of label values."""

    family: Family
    labels: tuple[str, ...]
    value: float | Histogram | Spent
