"""What the doctor finds about gateways: nothing where they are well or nobody has any, and each way to be unwell."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest

from bridge.tests.doctor_makers import GOOD, GROUP, HOUR_MS, NOW_MS, STREAM
from rollbridge.base.ids import TransactionId
from rollbridge.base.security import Security
from rollbridge.doctor.checks import find
from rollbridge.doctor.facts import ClusterFacts, Severity
from rollbridge.doctor.gateway_facts import GatewayAnswer, GatewayFacts, IdFacts, Reach, ask_gateway
from rollbridge.doctor.gateways import IDLE, IDLE_MANY, IDS_MANY
from rollbridge.metadata.gateway_store import HeldId
from rollbridge.metadata.gateways import FIRST_PRODUCER_ID, GatewayRecord, IdRecord, LackingRight
from rollbridge.metadata.records import Coordinator, TransactionRecord

BROKERS = frozenset(broker.id for broker in GOOD.brokers)
PORTS = tuple((broker, 9193 + broker) for broker in sorted(BROKERS))
DAY_MS = 24 * HOUR_MS
LATER_MS = NOW_MS + 100 * DAY_MS
"""Long after the first records were written."""


def gateway(
    name: str = "gw-1", host: str = "", answer: GatewayAnswer | None = None, held: int = 0, **said: Any
) -> GatewayFacts:
    """A gateway that is well."""
    given = {"ports": PORTS, "cluster_id": GOOD.kafka_cluster_id, "release": "1.0", **said}
    record = GatewayRecord(name=name, host=host or f"{name}.example", port=9192, **given)
    return GatewayFacts(record, answer or GatewayAnswer(Reach.ANSWERS, "", BROKERS), held)


def seen(*gateways: GatewayFacts, ids: IdFacts | None = None, **changes: Any) -> ClusterFacts:
    """A good cluster with these gateways."""
    known = {name: Coordinator(1, 1, release="1.0") for name in GOOD.coordinators}
    return replace(GOOD, **{"records": known, "gateways": gateways, "ids": ids or IdFacts(), **changes})


def at_gateway(begun_ms: int, lease_ms: int, client: str = "billing-7") -> TransactionRecord:
    """An open transaction that a producer began through a gateway."""
    return TransactionRecord(
        id=TransactionId.of(0, 7),
        group=GROUP,
        state="open",
        client_name=client,
        label=f"{FIRST_PRODUCER_ID}.4",
        begun_ms=begun_ms,
        lease_ms=lease_ms,
        streams={str(STREAM): 0},
        controller_epoch=1,
    )


def with_open(facts: ClusterFacts, *records: TransactionRecord) -> ClusterFacts:
    return replace(facts, groups=[replace(facts.groups[0], transactions=records)])


RECORD = IdRecord("billing/7", 2 * DAY_MS, NOW_MS, "gw-9")
OF_OPEN = IdFacts(1, {"billing-7": RECORD}, {}, {"billing-7": RECORD})


def test_gateways_that_are_well_give_no_findings() -> None:
    held = {"billing-7": HeldId("billing-7", "gw-1", "gw-1", "", 0)}
    wanted = {"billing-8": HeldId("billing-8", "gw-1", "", "gw-2", NOW_MS - 5_000)}
    facts = seen(gateway("gw-1", held=1), gateway("gw-2"), ids=replace(OF_OPEN, held={**held, **wanted}))
    assert find(with_open(facts, at_gateway(NOW_MS - 1_000, 2 * DAY_MS))) == []
    assert find(seen(gateway("gw-1", host="localhost"), gateway("gw-2", host="127.0.0.1"))) == [], "all on one machine"
    assert find(seen(gateway(answer=GatewayAnswer(Reach.ANSWERS)))) == [], "one that tells nothing before a login"
    assert find(seen(gateway(certificate_until_ms=NOW_MS + 15 * DAY_MS))) == []


def test_where_there_is_no_gateway_and_none_is_missed_nothing_is_found() -> None:
    native = replace(at_gateway(NOW_MS - 1_000, DAY_MS), label="nightly")
    assert find(with_open(seen(ids=OF_OPEN), native)) == []


def test_a_gateway_that_does_not_answer_is_missing_or_hangs() -> None:
    [found] = find(seen(gateway(answer=GatewayAnswer(Reach.NOTHING_LISTENS), held=3), gateway("gw-2")))
    assert (found.check, found.severity.name) == ("gateway-unreachable", "PROBLEM")
    assert "gw-1 is registered at gw-1.example:9192, and nothing listens there" in found.what
    assert found.what.endswith("it serves 3 transactional ids")
    assert "gw-1.example is not where clients find it: --advertise" in found.remedy
    [found] = find(seen(gateway(answer=GatewayAnswer(Reach.SILENT, "no answer"), held=3)))
    assert (found.check, found.severity.name) == ("gateway-hangs", "PROBLEM")
    assert "it hangs" in found.what
    assert found.remedy.startswith("end the process of gateway gw-1 with kill -9")


@pytest.mark.parametrize(
    ("facts", "check", "what", "remedy"),
    [
        (
            seen(gateway(answer=GatewayAnswer(Reach.DENIED, "cannot trust the certificate"))),
            "gateway-trust",
            "cannot trust the certificate",
            "ssl.ca.location",
        ),
        (
            seen(gateway(faults=("it has not been able to send frames for 99 s",))),
            "gateway-unhealthy",
            "it says that it cannot serve: it has not been able to send frames",
            "the log of gateway gw-1",
        ),
        (
            seen(gateway(answer=GatewayAnswer(Reach.NO_BROKER, "connection lost"))),
            "gateway-brokers",
            "gets no answer from the brokers",
            "machine of gateway gw-1 reaches every broker",
        ),
        (
            seen(gateway(answer=GatewayAnswer(Reach.ANSWERS, "", BROKERS, (1, 2)))),
            "gateway-port",
            "at 2 of its other ports or more nothing listens, as seen from here: 9194 for broker 1, 9195 for broker 2",
            "open the ports 9193 to 9195 of gw-1.example",
        ),
        (
            seen(gateway(certificate_until_ms=NOW_MS + 13 * DAY_MS)),
            "gateway-certificate",
            "the certificate of gateway gw-1 runs out on",
            "--certificate of gateway gw-1",
        ),
        (
            seen(gateway(certificate_until_ms=NOW_MS - 1)),
            "gateway-certificate",
            "has run out on",
            "restart it",
        ),
        (
            seen(gateway(cluster_id="another")),
            "gateway-cluster",
            "relays to Kafka cluster another, this one is kafka-1",
            "--bootstrap-servers ...",
        ),
        (
            seen(gateway(ports=PORTS[:-1])),
            "gateway-brokers",
            "has no port for broker 2",
            "why it cannot listen at one more port",
        ),
        (
            seen(gateway(answer=GatewayAnswer(Reach.ANSWERS, "", frozenset({0, 1})))),
            "gateway-brokers",
            "has no port for broker 2",
            "the log of gateway gw-1",
        ),
        (
            seen(
                gateway(
                    lacking=(
                        LackingRight("Write", STREAM.buffer_topic(), str(STREAM)),
                        LackingRight("Read", GROUP.commit_log_topic, str(STREAM)),
                    )
                )
            ),
            "gateway-rights",
            f"gw-1 lacks Write on {STREAM.buffer_topic()}, Read on {GROUP.commit_log_topic}",
            f"rollbridge access kafka-acls gateway {STREAM} prints",
        ),
        (
            seen(gateway("gw-1", host="same"), gateway("gw-2", host="same")),
            "gateway-address",
            "gateways gw-1, gw-2 advertise the same address same:9192",
            "--advertise",
        ),
        (
            seen(gateway("gw-1", host="localhost"), gateway("gw-2", host="10.0.0.7")),
            "gateway-address",
            "gw-1 advertises localhost:9192, which only its own machine reaches",
            "start gateway gw-1 with --advertise",
        ),
        (seen(gateway(host="0.0.0.0")), "gateway-address", "none to go to", "--advertise"),
        (seen(gateway(host="::")), "gateway-address", "none to go to", "--advertise"),
        (
            seen(gateway("gw-1"), gateway("gw-2", release="0.9")),
            "gateway-releases",
            "another release than the coordinators (1.0): gw-2 0.9",
            "upgrade coordinators first",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("gateway-") else "",
)
def test_what_is_wrong_with_a_gateway_is_named_with_what_to_do(
    facts: ClusterFacts, check: str, what: str, remedy: str
) -> None:
    [found] = find(facts)
    assert found.check == check
    assert what in found.what
    assert remedy in found.remedy


def test_a_gateway_of_another_cluster_is_not_blamed_for_its_brokers() -> None:
    assert [item.check for item in find(seen(gateway(cluster_id="another", ports=())))] == ["gateway-cluster"]


# Producers


def test_open_transactions_without_any_gateway_are_a_problem() -> None:
    facts = with_open(seen(ids=OF_OPEN), at_gateway(NOW_MS - 1_000, 2 * DAY_MS))
    [found] = find(facts)
    assert (found.check, found.severity.name) == ("no-gateway", "PROBLEM")
    assert "of transactional id billing/7, last begun with at gateway gw-9" in found.what
    assert "if the process of gw-9 is still there, it hangs" in found.remedy
    assert found.remedy.endswith("rollbridge gateway")
    [found] = find(with_open(seen(), at_gateway(NOW_MS - 1_000, 2 * DAY_MS)))
    assert "of transactional id billing-7;" in found.what, "its record is gone"


def test_a_gateway_that_does_not_let_go_is_named() -> None:
    held = {
        name: HeldId(name, "gw-1", "", "gw-2", NOW_MS - since_ms)
        for name, since_ms in (("a", 40_000), ("b", 90_000), ("c", 20_000))
    }
    [found] = find(seen(gateway("gw-1"), gateway("gw-2"), ids=IdFacts(3, {}, held)))
    assert found.check == "gateway-holds"
    assert "gateway gw-1 does not let go of 2 transactional ids" in found.what
    assert "client b is wanted by gw-2 since 90 s" in found.what
    assert "end the process of gateway gw-1 with kill -9" in found.remedy


def test_ids_of_gateways_that_are_not_registered_are_told() -> None:
    held = {name: HeldId(name, "", "gw-9", "", NOW_MS - 60_000) for name in ("a", "b")}
    [found] = find(seen(gateway(), ids=IdFacts(2, {}, held)))
    assert found.check == "gateway-gone"
    assert "2 transactional ids, such as that of client a, are held by gateways that are not registered: gw-9" in (
        found.what
    )
    fresh = {"a": HeldId("a", "", "gw-9", "", NOW_MS)}
    assert find(seen(gateway(), ids=IdFacts(2, {}, fresh))) == [], "one that ends lets go of them within moments"


@pytest.mark.parametrize(
    ("begun_ms", "lease_ms", "is_found"),
    [
        (NOW_MS - 1_900_000, 2_000_000, False),
        (NOW_MS - 95 * HOUR_MS // 10, 10 * HOUR_MS, True),
        (NOW_MS - 8 * HOUR_MS, 10 * HOUR_MS, False),
        (NOW_MS - 11 * HOUR_MS, 10 * HOUR_MS, False),
    ],
    ids=["short", "near its end", "in good time", "over"],
)
def test_a_long_lease_that_ends_soon_is_told(begun_ms: int, lease_ms: int, is_found: bool) -> None:
    facts = with_open(seen(gateway(), ids=OF_OPEN), at_gateway(begun_ms, lease_ms))
    found = [item for item in find(facts) if item.check == "gateway-lease"]
    assert len(found) == is_found
    if found:
        assert "of transactional id billing/7 is aborted in 1800 s" in found[0].what
        assert "no gateway serves it now" in found[0].what
        assert f"rollbridge txn commit {TransactionId.of(0, 7)}" in found[0].remedy


@pytest.mark.parametrize(("count", "is_found"), [(IDLE_MANY - 1, False), (IDLE_MANY, True)])
def test_ids_that_nobody_uses_are_told_when_there_are_many(count: int, is_found: bool) -> None:
    """Of many ids a part is read."""
    old = {f"c{number}": IdRecord(f"id-{number}", 1, 5) for number in range(100)}
    facts = seen(gateway(), ids=IdFacts(count, old), now_ms=LATER_MS, snapshots=())
    found = [item for item in find(facts) if item.check == "gateway-ids"]
    assert len(found) == is_found
    if found:
        assert f"of which some {count} have not been begun with for {IDLE.days} days, such as id-0" in found[0].what
        assert f"rollbridge ids forget --idle {IDLE.days}d" in found[0].remedy


def test_ids_in_use_are_no_waste_until_they_are_too_many() -> None:
    used = {f"c{number}": IdRecord(f"id-{number}", 1, LATER_MS) for number in range(10)}
    checks = [
        item.check for item in find(seen(gateway(), ids=IdFacts(IDS_MANY - 1, used), now_ms=LATER_MS, snapshots=()))
    ]
    assert "gateway-ids" not in checks
    [found] = [
        item
        for item in find(seen(gateway(), ids=IdFacts(IDS_MANY, used), now_ms=LATER_MS, snapshots=()))
        if item.check == "gateway-ids"
    ]
    assert "of which some 0 have" in found.what


# What is asked


def test_a_port_that_nobody_listens_at_and_one_that_nobody_serves_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollbridge.doctor.gateway_facts.ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        record = GatewayRecord(name="gw", host="127.0.0.1", port=int(server.getsockname()[1]))
        assert ask_gateway(record, Security()).reach is Reach.SILENT
    assert ask_gateway(record, Security()).reach is Reach.NOTHING_LISTENS


@pytest.mark.parametrize("host", ["", "\0", "a..b", "x" * 200, "\ud800", "::::", "rollbridge.invalid"])
def test_a_host_that_is_none_is_one_where_nothing_listens(host: str) -> None:
    assert ask_gateway(GatewayRecord(name="gw", host=host, port=1), Security()).reach is Reach.NOTHING_LISTENS


def test_a_gateway_never_gets_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is stands in a node that others than coordinators write."""
    monkeypatch.setattr("rollbridge.doctor.gateway_facts.ANSWER_S", 0.2)
    asked: list[Security] = []
    monkeypatch.setattr("rollbridge.doctor.gateway_facts.accepts", lambda _: True)

    def connect(host: str, port: int, *, security: Security, **_: object) -> object:
        asked.append(security)
        raise OSError

    monkeypatch.setattr("rollbridge.doctor.gateway_facts.Connection", connect)
    secret = Security(protocol="SASL_SSL", mechanism="PLAIN", username="admin", password="secret")
    for encrypted in (False, True):
        with pytest.raises(OSError):  # noqa: PT011 - ours
            ask_gateway(GatewayRecord(name="gw", host="evil", port=1, encrypted=encrypted), secret)
    assert [(item.protocol, item.uses_sasl, item.username, item.password) for item in asked] == [
        ("PLAINTEXT", False, None, None),
        ("SSL", False, None, None),
    ]


def test_a_topic_with_the_name_of_a_stream_is_a_problem_where_there_is_a_gateway() -> None:
    (finding,) = find(seen(gateway(), named=frozenset({STREAM.virtual_topic})))
    assert (finding.check, finding.severity) == ("name-clash", Severity.PROBLEM)
