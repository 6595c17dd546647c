"""Metrics for Prometheus: samples of ours as its client's families, and those of a connection in a registry.

An application that serves metrics of its own adds those of a connection to them::

    from prometheus_client import REGISTRY
    from rollbridge.metrics import collector

    REGISTRY.register(collector(b))

This module needs ``rollbridge[metrics]``, the official ``prometheus_client``; ``b.metrics`` needs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from rollbridge.model.client_metrics import FAMILIES, ClientMetrics, client_samples
from rollbridge.model.metrics import Family, FamilyKind, Histogram, Sample, Spent


def exposed(samples: Iterable[Sample], families: Sequence[Family] = ()) -> list[Metric]:
    """Return what Prometheus reads, each family once with all of its samples.

    Args:
        samples: What there is, in any order; of several groups, say.
        families: Families that are there even without a sample, first and in this order.
    """
    found: dict[str, Metric] = {family.name: _metric(family) for family in families}
    for sample in samples:
        metric = found.get(sample.family.name)
        if metric is None:
            metric = found[sample.family.name] = _metric(sample.family)
        _add(metric, sample)
    return list(found.values())


def _metric(family: Family) -> Metric:
    match family.kind:
        case FamilyKind.COUNTER:
            return CounterMetricFamily(family.name, family.about, labels=family.labels)
        case FamilyKind.GAUGE:
            return GaugeMetricFamily(family.name, family.about, labels=family.labels)
        case FamilyKind.HISTOGRAM:
            return HistogramMetricFamily(family.name, family.about, labels=family.labels)
        case FamilyKind.SUMMARY:
            return SummaryMetricFamily(family.name, family.about, labels=family.labels)


def _add(metric: Metric, sample: Sample) -> None:
    match metric, sample.value:
        case HistogramMetricFamily(), Histogram() as value:
            shown = [("+Inf" if bound == inf else str(float(bound)), count) for bound, count in value.buckets()]
            metric.add_metric(sample.labels, shown, value.total)
        case SummaryMetricFamily(), Spent() as value:
            metric.add_metric(sample.labels, value.times, value.total)
        case ((CounterMetricFamily() | GaugeMetricFamily()), (int() | float()) as value):
            metric.add_metric(sample.labels, value)
        case _:
            raise TypeError(f"{sample.family.name} is a {sample.family.kind}, and cannot be {sample.value!r}")


class SampleCollector(Collector):
    """Collector of samples that are asked for at each scrape."""

    def __init__(self, samples: Callable[[], Iterable[Sample]], families: Sequence[Family] = ()) -> None:
        """Prepare; ``samples`` is called from the threads that scrape."""
        self._samples = samples
        self._families = families

    def describe(self) -> Iterable[Metric]:
        """Return the families without samples, so that a registry notices names that are taken."""
        return exposed((), self._families)

    def collect(self) -> Iterable[Metric]:
        """Return the families as they are now."""
        return exposed(self._samples(), self._families)


class Counting(Protocol):
    """A connection, as far as its metrics are concerned."""

    @property
    def client_name(self) -> str:
        """Name that stands in the label ``client``."""

    @property
    def metrics(self) -> ClientMetrics:
        """What it has done so far."""


def collector(*connections: Counting) -> Collector:
    """Return a collector of the metrics of connections, to be registered once for all of them.

    Connections of one client name are told apart by nothing, so give each a name, or register only one.
    """
    return SampleCollector(
        lambda: [sample for item in connections for sample in client_samples(item.client_name, item.metrics)],
        FAMILIES,
    )
