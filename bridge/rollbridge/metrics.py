"""Metrics for Prometheus: samples of ours as its client's families, for daemons, and in a registry of an application.

An application that serves metrics of its own adds those of a connection to them::

    from prometheus_client import REGISTRY
    from rollbridge.metrics import collector

    REGISTRY.register(collector(b))

This module needs ``rollbridge[metrics]``, the official ``prometheus_client``; ``b.metrics`` needs nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import Final, Protocol

from prometheus_client import ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from rollbridge.base.metrics import (
    FAMILIES,
    ClientMetrics,
    Family,
    FamilyKind,
    Histogram,
    Sample,
    Spent,
    client_samples,
)


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
        """Return the value of the label ``client``."""

    @property
    def metrics(self) -> ClientMetrics:
        """Return its counters."""


def collector(*connections: Counting) -> Collector:
    """Return a collector of the metrics of connections, to be registered once for all of them.

    Connections of one client name are told apart by nothing, so give each a name, or register only one.
    """
    return SampleCollector(
        lambda: [sample for item in connections for sample in client_samples(item.client_name, item.metrics)],
        FAMILIES,
    )


FRESH_S: Final = 1.0
"""Seconds for which a page of metrics is answered again, so that frequent scrapes do not keep the daemon busy."""


_KINDS_MAX: Final = 10
"""Formats in which metrics are kept, a bound on memory."""


class MetricsPage:
    """Metrics in the formats that clients ask for, collected once a second at most, by one thread at a time."""

    def __init__(self, metrics: Collector, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare; nothing is collected before it is asked for."""
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._made: dict[str, tuple[float, bytes]] = {}

    def read(self, accept: str) -> tuple[bytes, str]:
        """Return the text and its type, for this header ``Accept``; raises what collecting them raises."""
        encode, kind = choose_encoder(accept)
        with self._lock:
            made_s, body = self._made.get(kind, (float("-inf"), b""))
            if self._clock() - made_s >= FRESH_S:
                body = encode(self._metrics)
                if len(self._made) >= _KINDS_MAX:
                    self._made.clear()
                self._made[kind] = self._clock(), body
        return body, kind


class ProcessSamples(Collector):
    """Metrics of a daemon: those of the process by the names of Prometheus' own clients, and ours."""

    def __init__(self, samples: Callable[[], Iterable[Sample]], families: Sequence[Family]) -> None:
        """Prepare; ``samples`` is called from the threads that scrape."""
        self._collectors = (ProcessCollector(registry=None), SampleCollector(samples, families))

    def collect(self) -> Iterator[Metric]:
        """Yield the families as they are now."""
        for collector in self._collectors:
            yield from collector.collect()
