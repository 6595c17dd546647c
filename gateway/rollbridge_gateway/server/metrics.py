"""All metrics of a gateway: what each means, and what to do about it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from rollbridge.base.metrics import PREFIX, REQUEST_BOUNDS_S, Family, FamilyKind, Histogram, Sample
from rollbridge_gateway.server.framing import Closing

HANDOVERS: Final = ("taken", "given", "refused")
"""Ways of a transactional id between gateways."""
WATCHED: Final = tuple(
    itertools.product(
        ("ADD_OFFSETS_TO_TXN", "ADD_PARTITIONS_TO_TXN", "END_TXN", "INIT_PRODUCER_ID", "PRODUCE", "TXN_OFFSET_COMMIT"),
        (
            "GROUP_AUTHORIZATION_FAILED",
            "INVALID_TOPIC_EXCEPTION",
            "TOPIC_AUTHORIZATION_FAILED",
            "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
            "UNKNOWN_SERVER_ERROR",
        ),
    )
)
"""Errors of which alerts are made: they are there from the beginning, as Prometheus sees no rise to a first value."""


def _family(kind: FamilyKind, name: str, about: str, labels: str = "", advice: str = "") -> Family:
    return Family(f"{PREFIX}_gateway_{name}", kind, about, tuple(labels.split()), advice)


def _gauge(name: str, about: str, labels: str = "", advice: str = "") -> Family:
    return _family(FamilyKind.GAUGE, name, about, labels, advice)


def _counter(name: str, about: str, labels: str = "", advice: str = "") -> Family:
    return _family(FamilyKind.COUNTER, f"{name}_total", about, labels, advice)


def _histogram(name: str, about: str, labels: str = "", advice: str = "") -> Family:
    return _family(FamilyKind.HISTOGRAM, name, about, labels, advice)


# Whether it can serve

INFO: Final = _gauge("info", "Always 1; names the gateway and its version.", "name version")
HEALTHY: Final = _gauge(
    "healthy",
    "1 if it serves, has its lease in ZooKeeper, and can send.",
    advice="`/healthz` at the same address says why",
)
LEASE_AGE: Final = _gauge(
    "lease_age_seconds",
    "Since when it has had its lease in ZooKeeper, under which it serves transactional ids.",
    advice="young ones of an old process: it loses leases, and with each all transactional ids that it serves",
)
LEASE_SILENCE: Final = _gauge(
    "lease_unwritten_seconds",
    "Time since it has last written its lease.",
    advice="beyond half of the session's time-out it acknowledges nothing",
)
LEASES_LOST: Final = _counter("leases_lost", "Leases that have ended under it, with its session or by another gateway.")
LOOP_LAG: Final = _histogram(
    "loop_lag_seconds",
    "By how much its event loop comes late to what is due, looked at four times a second.",
    advice="all requests wait so long: it has more to do than one processor does; add a gateway",
)
GATEWAYS: Final = _gauge(
    "known_gateways", "Gateways that it tells its clients of, itself included.", advice="the same number at all of them"
)
BROKERS: Final = _gauge(
    "known_brokers",
    "Brokers that it has a port for.",
    advice="the same number everywhere; its log says why one has none",
)
LACKING: Final = _gauge(
    "lacking_rights",
    "Rights in Kafka that it has found missing.",
    advice="`rollbridge doctor` names them, and what grants them",
)

CERTIFICATE_UNTIL: Final = _gauge(
    "certificate_expiry_timestamp_seconds",
    "When the certificate that clients are shown runs out, in seconds since 1970; absent without TLS.",
    advice="renew it, and restart the gateway: it reads the file at its start",
)

# What clients ask for

CONNECTIONS: Final = _gauge(
    "connections", "Connections of clients.", advice="Raise `--connections-max`, or add a gateway."
)
CONNECTIONS_LIMIT: Final = _gauge("connections_limit", "Most connections of clients: `--connections-max`.")
REFUSED_CONNECTIONS: Final = _counter("refused_connections", "Connections closed at once, since there were too many.")
CLOSED_CONNECTIONS: Final = _counter(
    "closed_connections",
    "Connections closed for what their clients did not do, by reason.",
    "reason",
    "`mute`, `unfinished` and `untaken` in numbers are attempts to hold the gateway up, or a bad network; `login` and "
    "`session` are clients without valid credentials.",
)
MALFORMED: Final = _counter(
    "malformed_requests",
    "Connections closed since their client sent what is no request, asked for something before it logged in, or failed "
    "to agree on TLS.",
    advice="a few are port scanners; many, a client that speaks TLS to a plain port, the other way round, or without a "
    "certificate that `--client-ca` demands: the log says `tls.refused`",
)
REQUESTS: Final = _histogram("request_seconds", "Requests of clients, from their arrival to their answer.", "api")
ERRORS: Final = _counter(
    "errors",
    "Errors told to transactional producers, by request and Kafka's code.",
    "api code",
    "`UNKNOWN_SERVER_ERROR` is an internal error: the log has it.",
)
RECEIVED: Final = _counter("received_bytes", "Bytes of requests that came from clients.")
SENT: Final = _counter("sent_bytes", "Bytes of answers that went to clients.")
UNDER_WAY: Final = _gauge(
    "under_way_bytes", "Bytes of requests under way.", advice="At its limit, clients wait: add a gateway."
)
UNDER_WAY_LIMIT: Final = _gauge("under_way_limit_bytes", "Most bytes of requests under way.")
RELAY_ERRORS: Final = _counter(
    "relay_errors",
    "Connections of clients that were closed since their broker could not be reached, or had closed its own.",
    advice="a broker that was restarted, or that closes connections which were idle; else look at the brokers",
)

# What producers write

IDS: Final = _gauge("transactional_ids", "Transactional ids that are served here.")
IDS_LIMIT: Final = _gauge(
    "transactional_ids_limit", "Most transactional ids that are served at once: `--ids-max`.", "",
    "those without a transaction open make room for others",
)  # fmt: skip
OPEN: Final = _gauge("open_transactions", "Of these, how many have a transaction open.")
HANDED_OVER: Final = _counter(
    "handovers",
    "Transactional ids that were taken from another gateway, given to another one, or that another one did not let go "
    "of in time.",
    "way",
    "`refused`: a gateway hangs, `rollbridge doctor` names it; many of the others: producers go to two of them at once",
)
TAKEN_OVER: Final = _counter(
    "taken_over",
    "Open transactions that were taken over at their last savepoint.",
    advice="More than ends of gateways explain: producers go to two of them; look at `client.id`.",
)
ENDED: Final = _counter("ended_transactions", "Transactions that producers have ended here.", "outcome")
RECORDS: Final = _counter("records", "Records of transactional producers that were taken.")
BYTES: Final = _counter("bytes", "Bytes of their batches, as they came.")
SAVEPOINTS: Final = _histogram(
    "savepoint_seconds",
    "Time that requests waited for brokers to have what was written, savepoint and all.",
    advice="it is the brokers' time, mostly: producers wait for it with each request",
)
SAVEPOINT_FAILURES: Final = _counter(
    "savepoint_failures",
    "Savepoints that did not reach the brokers, or not in time; producers send the same again.",
    advice="the brokers refuse or are slow; the log says what",
)

FORGOTTEN: Final = _counter("forgotten_ids", "Transactional ids that were unused for long, whose entries were removed.")

FAMILIES: Final = (
    INFO, HEALTHY, LEASE_AGE, LEASE_SILENCE, LEASES_LOST, LOOP_LAG, GATEWAYS, BROKERS, LACKING,
    CERTIFICATE_UNTIL,
    CONNECTIONS, CONNECTIONS_LIMIT, REFUSED_CONNECTIONS, CLOSED_CONNECTIONS, MALFORMED,
    REQUESTS, ERRORS, RECEIVED, SENT, UNDER_WAY, UNDER_WAY_LIMIT, RELAY_ERRORS,
    IDS, IDS_LIMIT, OPEN, HANDED_OVER, TAKEN_OVER, ENDED, RECORDS, BYTES, SAVEPOINTS, SAVEPOINT_FAILURES,
    FORGOTTEN,
)  # fmt: skip


@dataclass(slots=True)
class Counts:
    """Counters of one gateway. Belongs to its event loop; samples do not change any more."""

    connections: int = 0
    refused_connections: int = 0
    malformed: int = 0
    relay_errors: int = 0
    received: int = 0
    sent: int = 0
    forgotten: int = 0
    closed: Counter[str] = field(default_factory=Counter)
    records: int = 0
    bytes: int = 0
    requests: dict[str, Histogram] = field(default_factory=dict)
    errors: Counter[tuple[str, str]] = field(default_factory=lambda: Counter(dict.fromkeys(WATCHED, 0)))
    loop_lag: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS_S))

    def note(self, api: str, seconds: float) -> None:
        """Count a request that was answered."""
        known = self.requests.get(api)
        if known is None:
            known = self.requests[api] = Histogram(REQUEST_BOUNDS_S)
        known.note(seconds)

    def samples(self) -> Iterator[Sample]:
        """Yield the samples of all that is counted here."""
        yield Sample(CONNECTIONS, (), self.connections)
        yield Sample(REFUSED_CONNECTIONS, (), self.refused_connections)
        for reason in Closing:
            yield Sample(CLOSED_CONNECTIONS, (reason.value,), self.closed[reason.value])
        yield Sample(MALFORMED, (), self.malformed)
        for api, histogram in sorted(dict(self.requests).items()):
            yield Sample(REQUESTS, (api,), histogram.copy())
        for (api, code), times in sorted(dict(self.errors).items()):
            yield Sample(ERRORS, (api, code), times)
        yield Sample(RECEIVED, (), self.received)
        yield Sample(SENT, (), self.sent)
        yield Sample(RELAY_ERRORS, (), self.relay_errors)
        yield Sample(RECORDS, (), self.records)
        yield Sample(BYTES, (), self.bytes)
        yield Sample(FORGOTTEN, (), self.forgotten)
        yield Sample(LOOP_LAG, (), self.loop_lag.copy())


def present(values: Mapping[Family, float | Histogram | Mapping[str, int] | None]) -> Iterator[Sample]:
    """Yield the samples of what is not counted here: a value of each family, or one for each of its labels.

    None has no sample.
    """
    for family, value in values.items():
        if isinstance(value, Mapping):
            for label, times in sorted(value.items()):
                yield Sample(family, (label,), times)
        elif value is not None:
            yield Sample(family, (), value)
