"""Metrics of a gateway: what there is, from the first scrape on, and what moves when something happens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kio.schema.errors import ErrorCode
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families as parsed
from prometheus_client.registry import CollectorRegistry

from rollbridge.base.metrics import Family, FamilyKind, Histogram, Sample
from rollbridge.metrics import SampleCollector
from rollbridge_gateway.protocol.versions import Api
from rollbridge_gateway.server import metrics
from rollbridge_gateway.server.metrics import FAMILIES, HANDOVERS, WATCHED, Counts

UNITS = ("seconds", "bytes", "info", "total")
NUMBERS = (
    "healthy", "known_gateways", "known_brokers", "lacking_rights", "connections", "connections_limit",
    "transactional_ids", "transactional_ids_limit", "open_transactions",
)  # fmt: skip
"""Metrics that are numbers of what they name."""


COUNTED = {family for family in FAMILIES for sample in Counts().samples() if sample.family == family}


def samples(counts: Counts, changes: Mapping[Family, Any] | None = None) -> list[Sample]:
    """Those of a gateway that is well and does nothing, but for the changes."""
    given: dict[Family, Any] = {
        metrics.LEASE_AGE: 5.0, metrics.LEASE_SILENCE: 0.5, metrics.HANDED_OVER: dict.fromkeys(HANDOVERS, 0),
        metrics.ENDED: {"committed": 0, "aborted": 0}, metrics.SAVEPOINTS: Histogram((1.0,)),
    }  # fmt: skip
    others = dict.fromkeys(set(FAMILIES) - COUNTED - {metrics.INFO, metrics.REQUESTS}, 1)
    return [
        *counts.samples(),
        Sample(metrics.INFO, ("one", "1"), 1),
        *metrics.present({**others, **given, **(changes or {})}),
    ]


def test_each_family_has_a_name_of_its_own_with_a_unit_and_says_what_it_means() -> None:
    names = [family.name for family in FAMILIES]
    assert len({name.removesuffix("_total") for name in names}) == len(names), "OpenMetrics takes the end away"
    for family in FAMILIES:
        assert family.about.endswith("."), family
        short = family.name.removeprefix("rollbridge_gateway_")
        assert short != family.name
        assert (family.kind is FamilyKind.COUNTER) == short.endswith("_total")
        assert short.endswith(UNITS) or short in NUMBERS, family
    declared = {item for item in vars(metrics).values() if isinstance(item, Family)}
    assert declared == set(FAMILIES), "each is served, and in the table of the docs"


def test_all_but_those_of_requests_are_there_before_anything_happens() -> None:
    found = samples(Counts())
    missing = {family.name for family in FAMILIES} - {sample.family.name for sample in found}
    assert missing == {"rollbridge_gateway_request_seconds"}
    assert {api for api, _ in WATCHED} <= {item.name for item in Api}
    assert {code for _, code in WATCHED} <= {item.name.upper() for item in ErrorCode}
    keys = [(sample.family.name, sample.labels) for sample in found]
    assert len(set(keys)) == len(keys)
    assert all(len(sample.labels) == len(sample.family.labels) for sample in found)


def test_what_is_counted_is_what_prometheus_reads() -> None:
    counts = Counts(connections=2, refused_connections=1, malformed=4, relay_errors=5, received=60, sent=70)
    counts.note("PRODUCE", 0.003)
    counts.note("PRODUCE", 99.0)
    counts.errors["END_TXN", "INVALID_TXN_STATE"] += 3
    counts.loop_lag.note(0.2)
    now = {
        metrics.IDS: 7, metrics.OPEN: 3, metrics.HANDED_OVER: {"taken": 1, "given": 2, "refused": 3},
        metrics.LEASE_SILENCE: float("inf"), metrics.CERTIFICATE_UNTIL: None,
    }  # fmt: skip
    registry = CollectorRegistry()
    registry.register(SampleCollector(lambda: samples(counts, now), FAMILIES))
    read = {
        (sample.name.removeprefix("rollbridge_gateway_"), *sample.labels.values()): sample.value
        for family in parsed(generate_latest(registry).decode())
        for sample in family.samples
    }
    expected = {
        ("info", "one", "1"): 1,
        ("connections",): 2,
        ("refused_connections_total",): 1,
        ("malformed_requests_total",): 4,
        ("relay_errors_total",): 5,
        ("received_bytes_total",): 60,
        ("sent_bytes_total",): 70,
        ("request_seconds_count", "PRODUCE"): 2,
        ("request_seconds_bucket", "PRODUCE", "0.005"): 1,
        ("errors_total", "END_TXN", "INVALID_TXN_STATE"): 3,
        ("loop_lag_seconds_count",): 1,
        ("transactional_ids",): 7,
        ("open_transactions",): 3,
        ("handovers_total", "given"): 2,
        ("lease_unwritten_seconds",): float("inf"),
    }
    assert {key: read[key] for key in expected} == expected
    assert ("certificate_expiry_timestamp_seconds",) not in read, "without TLS"
