"""Checks of the doctor on gateways. Pure. Where no gateway is registered and none is missed, nothing is found."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from rollbridge.base.security import WARNED_BEFORE
from rollbridge.buffer.table import State
from rollbridge.doctor.facts import ClusterFacts, Finding, problem, warning
from rollbridge.doctor.gateway_facts import GatewayFacts, Reach
from rollbridge.metadata.gateways import is_gateway_label
from rollbridge.metadata.records import TransactionRecord
from rollbridge.monitoring.runbook import remedy

HANDOVER: Final = timedelta(seconds=30)
"""Time after which a gateway should have let go of an id that another one wants: it waits for half of that."""
IDLE: Final = timedelta(days=30)
"""An id with which no producer has begun for so long is not in use: outcomes are remembered for less."""
IDLE_MANY: Final = 10_000
"""Idle ids that are reported."""
IDS_MANY: Final = 200_000
"""Ids on record that are reported: ZooKeeper has all of them in memory."""
LONG_LEASE: Final = timedelta(hours=1)
"""Leases of which it is reported that they end soon; producers with shorter ones begin again by themselves."""
LEASE_SHARE: Final = 0.1
"""Share that is left of a lease that ends soon."""
_MS: Final = timedelta(milliseconds=1)
_WHICH_SHOWN: Final = 3


def gateways(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect gateways to answer where they say that they are, to know all brokers, and to lack no right."""
    for gateway in facts.gateways:
        yield from _reach(gateway)
        yield from _brokers(facts, gateway)
        yield from _rights(gateway)
        yield from _certificate(facts, gateway)
    yield from _addresses(facts)
    yield from _releases(facts)


def producers(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect transactional ids to be served, their transactions to end before their leases, and none to pile up."""
    yield from _missed(facts)
    yield from _holders(facts)
    yield from _leases(facts)
    yield from _piled_up(facts)


# Gateways


def _reach(gateway: GatewayFacts) -> Iterator[Finding]:
    record, answer = gateway.record, gateway.answer
    who = f"gateway {record.name} is registered at {record.address}, and"
    serves = f"; it serves {gateway.held} transactional ids" if gateway.held else ""
    match answer.reach:
        case Reach.NOTHING_LISTENS:
            what = f"{who} nothing listens there, as seen from this machine: clients that are sent there do not get in"
            yield problem(
                "gateway-unreachable", what + serves, remedy("gateway-unreachable", name=record.name, host=record.host)
            )
        case Reach.SILENT:
            what = f"{who} takes connections there without answering: it hangs, or that is no gateway{serves}"
            yield problem("gateway-hangs", f"{what} ({answer.detail})", remedy("gateway-hangs", name=record.name))
        case Reach.DENIED:
            yield warning(
                "gateway-trust",
                f"{who} this principal and it do not trust each other: {answer.detail}; nothing more is known of it",
                "clients need the authority of its certificate, and one of their own with --client-ca: give the doctor "
                "the same (ssl.ca.location, ssl.certificate.location), or renew the certificate if that has run out",
            )
        case Reach.NO_BROKER:
            yield problem(
                "gateway-brokers",
                f"{who} gets no answer from the brokers for its clients: {answer.detail}",
                remedy("gateway-brokers", "without an answer", name=record.name),
            )
        case Reach.ANSWERS:
            pass
    if record.faults:
        yield problem(
            "gateway-unhealthy",
            f"{who} it says that it cannot serve: {'; '.join(record.faults)}",
            f"look into the log of gateway {record.name}; if that does not help, restart it: others serve its ids "
            "meanwhile",
        )
    if answer.closed:
        ports = dict(record.ports)
        named = ", ".join(f"{ports[broker]} for broker {broker}" for broker in answer.closed[:_WHICH_SHOWN])
        yield problem(
            "gateway-port",
            f"{who} at {len(answer.closed)} of its other ports or more nothing listens, as seen from here: {named}",
            f"open the ports {min(ports.values())} to {max(ports.values())} of {record.host} in the firewall, and one "
            "for each broker to come",
        )


def _brokers(facts: ClusterFacts, gateway: GatewayFacts) -> Iterator[Finding]:
    record, answer = gateway.record, gateway.answer
    if record.cluster_id and record.cluster_id != facts.kafka_cluster_id:
        yield problem(
            "gateway-cluster",
            f"gateway {record.name} relays to Kafka cluster {record.cluster_id}, this one is {facts.kafka_cluster_id}",
            f"start gateway {record.name} with --bootstrap-servers {facts.bootstrap_servers}, or with another "
            "--zookeeper-root",
        )
        return
    known, ports = {broker.id for broker in facts.brokers}, {broker for broker, _ in record.ports}
    told = ports if answer.brokers is None else ports & answer.brokers
    missing = sorted(known - told)
    if missing and answer.reach is not Reach.SILENT:
        yield warning(
            "gateway-brokers",
            f"gateway {record.name} at {record.address} has no port for broker {', '.join(map(str, missing))}: its "
            "clients reach that one by luck only",
            remedy("gateway-brokers", "without a port", name=record.name),
        )


def _rights(gateway: GatewayFacts) -> Iterator[Finding]:
    record = gateway.record
    for stream in sorted({item.stream for item in record.lacking}):
        rights = ", ".join(f"{item.operation} on {item.topic}" for item in record.lacking if item.stream == stream)
        yield problem(
            "gateway-rights",
            f"gateway {record.name} lacks {rights}: producers of its clients cannot write to stream {stream}",
            remedy("gateway-rights", stream=stream, name=record.name),
        )


def _certificate(facts: ClusterFacts, gateway: GatewayFacts) -> Iterator[Finding]:
    record, now_ms = gateway.record, facts.now_ms
    until_ms = record.certificate_until_ms
    if not until_ms or until_ms - now_ms > WARNED_BEFORE / _MS:
        return
    day = datetime.fromtimestamp(until_ms / 1000, UTC).strftime("%Y-%m-%d")
    cure = remedy("gateway-certificate", name=record.name)
    if until_ms > now_ms:
        yield warning("gateway-certificate", f"the certificate of gateway {record.name} runs out on {day}", cure)
    else:
        what = f"the certificate of gateway {record.name} has run out on {day}: clients do not trust it any more"
        yield problem("gateway-certificate", what, cure)


def _addresses(facts: ClusterFacts) -> Iterator[Finding]:
    shared = defaultdict(list)
    for gateway in facts.gateways:
        shared[gateway.record.address].append(gateway.record.name)
    for address, names in shared.items():
        if len(names) > 1:
            yield problem(
                "gateway-address",
                f"gateways {', '.join(sorted(names))} advertise the same address {address}: clients that are sent to "
                "one come to another, and transactional ids go to and fro between them",
                "give each of them its own host with --advertise, or its own ports with --listen",
            )
    kinds = {gateway.record.name: _kind(gateway.record.host) for gateway in facts.gateways}
    for gateway in facts.gateways:
        record = gateway.record
        if kinds[record.name] == _ANY:
            yield problem(
                "gateway-address",
                f"gateway {record.name} advertises {record.host}, which is an address to listen at, and none to go to",
                f"start gateway {record.name} with --advertise and the name of its host",
            )
        elif kinds[record.name] == _LOOPBACK and _REMOTE in kinds.values():
            yield problem(
                "gateway-address",
                f"gateway {record.name} advertises {record.address}, which only its own machine reaches, while others "
                "are on other machines: clients that are sent there do not get in",
                f"start gateway {record.name} with --advertise and the name of its host",
            )


_ANY, _LOOPBACK, _REMOTE = "any", "loopback", "remote"


def _kind(host: str) -> str:
    if host.casefold() in ("localhost", "localhost.localdomain"):
        return _LOOPBACK
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return _REMOTE
    return _ANY if address.is_unspecified else _LOOPBACK if address.is_loopback else _REMOTE


def _releases(facts: ClusterFacts) -> Iterator[Finding]:
    ours = {release for release in facts.releases.values() if release}
    others = {item.record.name: item.record.release for item in facts.gateways if item.record.release not in ours}
    if ours and others:
        told = ", ".join(f"{name} {release or 'that does not say'}" for name, release in sorted(others.items()))
        yield warning(
            "gateway-releases",
            f"gateways run another release than the coordinators ({', '.join(sorted(ours))}): {told}",
            "upgrade coordinators first, then gateways one after the other: each that ends is replaced by the others "
            "at once, and no transaction is lost (docs/upgrading.md)",
        )


# Producers


def _begun_at_gateways(facts: ClusterFacts) -> list[TransactionRecord]:
    return [
        item
        for group in facts.groups
        for item in group.transactions
        if item.state == State.OPEN.value and is_gateway_label(item.label)
    ]


def _missed(facts: ClusterFacts) -> Iterator[Finding]:
    found = _begun_at_gateways(facts)
    if facts.gateways or not found:
        return
    first = min(found, key=lambda item: item.begun_ms)
    known = facts.ids.of_open.get(first.client_name)
    name = first.client_name if known is None else known.transactional_id
    last = f", last begun with at gateway {known.gateway}" if known is not None and known.gateway else ""
    yield problem(
        "no-gateway",
        f"no gateway is registered, and {len(found)} transactions that producers began through gateways are open: "
        f"{first.id} of transactional id {name}{last}; only an operator can end them",
        remedy("no-gateway", name=known.gateway if known is not None and known.gateway else "the last gateway"),
    )


def _holders(facts: ClusterFacts) -> Iterator[Finding]:
    before_ms = facts.now_ms - HANDOVER / _MS
    stuck = [item for item in facts.ids.held.values() if item.gateway and item.wanted_by and item.since_ms < before_ms]
    for gateway in sorted({item.gateway for item in stuck}):
        theirs = sorted((item for item in stuck if item.gateway == gateway), key=lambda item: item.since_ms)
        first = theirs[0]
        yield problem(
            "gateway-holds",
            f"gateway {gateway} does not let go of {len(theirs)} transactional ids that other gateways are asked for: "
            f"client {first.client} is wanted by {first.wanted_by} since {(facts.now_ms - first.since_ms) // 1000} s",
            remedy("gateway-holds", name=gateway),
        )
    gone = [item for item in facts.ids.held.values() if not item.gateway and item.since_ms < before_ms]
    if gone:
        names = ", ".join(sorted({item.said or "one that cannot be read" for item in gone})[:_WHICH_SHOWN])
        yield warning(
            "gateway-gone",
            f"{len(gone)} transactional ids, such as that of client {min(item.client for item in gone)}, are held by "
            f"gateways that are not registered: {names}",
            "nothing, if it goes away within a session's time-out: a gateway that ends lets go of them. If it stays, "
            "end that process; if there is none, look who but gateways may write below /gateways/held",
        )


def _leases(facts: ClusterFacts) -> Iterator[Finding]:
    ending = [
        item
        for item in _begun_at_gateways(facts)
        if item.lease_ms >= LONG_LEASE / _MS
        and facts.now_ms <= item.begun_ms + item.lease_ms < facts.now_ms + LEASE_SHARE * item.lease_ms
    ]
    for item in sorted(ending, key=lambda item: item.begun_ms + item.lease_ms)[:_WHICH_SHOWN]:
        known, held = facts.ids.of_open.get(item.client_name), facts.ids.held.get(item.client_name)
        name = item.client_name if known is None else known.transactional_id
        served = "no gateway serves it now" if held is None else f"gateway {held.gateway or held.said} serves it"
        left_s = (item.begun_ms + item.lease_ms - facts.now_ms) // 1000
        yield warning(
            "gateway-lease",
            f"transaction {item.id} of transactional id {name} is aborted in {left_s} s, when its "
            f"transaction.timeout.ms is over, and what it wrote is lost then ({served}; {len(ending)} such in all)",
            remedy("gateway-lease", id=item.id),
        )


def _piled_up(facts: ClusterFacts) -> Iterator[Finding]:
    ids, before_ms = facts.ids, facts.now_ms - IDLE / _MS
    if not ids.records:
        return
    idle = [
        client
        for client, item in ids.records.items()
        if item.written_ms < before_ms and client not in ids.held and client not in ids.of_open
    ]
    estimate = len(idle) * ids.count // len(ids.records)
    if estimate >= IDLE_MANY or ids.count >= IDS_MANY:
        yield warning(
            "gateway-ids",
            f"{ids.count} transactional ids are on record in ZooKeeper, of which some {estimate} have not been begun "
            f"with for {IDLE.days} days" + (f", such as {ids.records[idle[0]].transactional_id}" if idle else ""),
            f"rollbridge ids forget --idle {IDLE.days}d removes those that are not in use; have producers use names "
            "again (Flink: the naming strategy POOLING) instead of a new one for each transaction",
        )
