"""All metrics of a gateway: what each means, and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from rollbridge.model.metrics import PREFIX, REQUEST_BOUNDS_S, Family, FamilyKind, Histogram, Sample

CONNECTIONS: Final = Family(
    f"{PREFIX}_gateway_connections",
    FamilyKind.GAUGE,
    "Connections of clients.",
    advice="Raise `--connections-max`, or add a gateway.",
)
REFUSED_CONNECTIONS: Final = Family(
    f"{PREFIX}_gateway_refused_connections_total",
    FamilyKind.COUNTER,
    "Connections closed at once, since there were too many.",
)
REQUESTS: Final = Family(
    f"{PREFIX}_gateway_request_seconds",
    FamilyKind.HISTOGRAM,
    "Requests of clients, from their arrival to their answer.",
    ("api",),
)
ERRORS: Final = Family(
    f"{PREFIX}_gateway_errors_total",
    FamilyKind.COUNTER,
    "Errors told to transactional producers, by Kafka's code.",
    ("code",),
    "`UNKNOWN_SERVER_ERROR` is one that nobody foresaw: the log has it.",
)
UNDER_WAY: Final = Family(
    f"{PREFIX}_gateway_under_way_bytes",
    FamilyKind.GAUGE,
    "Bytes of requests under way.",
    advice="At its limit, clients wait: add a gateway.",
)
IDS: Final = Family(f"{PREFIX}_gateway_transactional_ids", FamilyKind.GAUGE, "Transactional ids that are served here.")
OPEN: Final = Family(
    f"{PREFIX}_gateway_open_transactions", FamilyKind.GAUGE, "Of these, how many have a transaction open."
)
TAKEN_OVER: Final = Family(
    f"{PREFIX}_gateway_taken_over_total",
    FamilyKind.COUNTER,
    "Open transactions that were taken over at their last savepoint.",
    advice="More than ends of gateways explain: producers go to two of them; look at `client.id`.",
)
ENDED: Final = Family(
    f"{PREFIX}_gateway_ended_transactions_total",
    FamilyKind.COUNTER,
    "Transactions that producers have ended here.",
    ("outcome",),
)
RECORDS: Final = Family(
    f"{PREFIX}_gateway_records_total", FamilyKind.COUNTER, "Records of transactional producers that were taken."
)
BYTES: Final = Family(f"{PREFIX}_gateway_bytes_total", FamilyKind.COUNTER, "Bytes of their batches, as they came.")

FAMILIES: Final = (
    CONNECTIONS, REFUSED_CONNECTIONS, REQUESTS, ERRORS, UNDER_WAY, IDS, OPEN, TAKEN_OVER, ENDED, RECORDS, BYTES
)  # fmt: skip


@dataclass(slots=True)
class Counts:
    """What one gateway counts. Belongs to its event loop; samples do not change any more."""

    connections: int = 0
    refused_connections: int = 0
    records: int = 0
    bytes: int = 0
    requests: dict[str, Histogram] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)

    def note(self, api: str, seconds: float) -> None:
        """Count a request that was answered."""
        known = self.requests.get(api)
        if known is None:
            known = self.requests[api] = Histogram(REQUEST_BOUNDS_S)
        known.note(seconds)

    def samples(
        self, *, under_way: int, ids: int, is_open: int, taken_over: int, ended: dict[str, int]
    ) -> Iterator[Sample]:
        """Yield all samples."""
        yield Sample(CONNECTIONS, (), self.connections)
        yield Sample(REFUSED_CONNECTIONS, (), self.refused_connections)
        for api, histogram in sorted(self.requests.items()):
            yield Sample(REQUESTS, (api,), histogram.copy())
        for code, times in sorted(self.errors.items()):
            yield Sample(ERRORS, (code,), times)
        yield Sample(UNDER_WAY, (), under_way)
        yield Sample(IDS, (), ids)
        yield Sample(OPEN, (), is_open)
        yield Sample(TAKEN_OVER, (), taken_over)
        for outcome, times in sorted(ended.items()):
            yield Sample(ENDED, (outcome,), times)
        yield Sample(RECORDS, (), self.records)
        yield Sample(BYTES, (), self.bytes)
