"""Alerts: each fires when it should, after as long as it should, and not otherwise; each names what exists."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from coordinator.tests.promtool import ANNOTATIONS, check_alerts, faults, needs_promtool, run
from rollbridge.doctor.checks import CLOCKS_DIFFER, EPOCHS_MANY, SLOW, TOPICS_MANY
from rollbridge.monitoring.runbook import Alert, alerts, rules, runbook
from rollbridge_coordinator.history.standby import COLD_MESSAGES

ALERTS = alerts()
GROUP, STREAM, JOB = "sales/default", "sales/orders", "rollbridge"
ONE, TWO = "one:9464", "two:9464"
GIB = 2**30


class Case(NamedTuple):
    """What Prometheus scrapes once a minute: values of series, in its notation."""

    bad: dict[str, str]
    good: dict[str, str]
    labels: dict[str, str]
    since: int = 0
    """The minute from which on the expression holds."""
    summary: str = ""
    """A part of what a pager shows."""
    also: tuple[dict[str, str], ...] = ()
    """What it fires for as well, with the same labels."""
    calm: tuple[dict[str, str], ...] = ()
    """What it does not fire for either."""


def of(name: str, instance: str = ONE, /, **labels: str) -> str:
    """The name of a series that one coordinator exposes."""
    shown = {"job": JOB, "instance": instance, **labels}
    return name + "{" + ", ".join(f'{key}="{value}"' for key, value in shown.items()) + "}"


def led(name: str, instance: str = ONE, /, **labels: str) -> str:
    """One that the leader of the group exposes."""
    return of(f"rollbridge_{name}", instance, group=GROUP, **labels)


def info(instance: str = ONE) -> str:
    return of("rollbridge_coordinator_info", instance, name=instance.partition(":")[0], version="0.3.0")


def steady(value: float, minutes: int = 180) -> str:
    return f"{value:g}x{minutes}"


def rising(by: float, minutes: int = 180, start: float = 0) -> str:
    return f"{start:g}+{by:g}x{minutes}"


def once(by: float, before: int = 10, after: int = 170, start: float = 0) -> str:
    """A counter that rises by so much, once."""
    return f"{start:g}x{before} {start + by:g}x{after}"


def buckets(name: str, bounds: str, seconds: str, below: int = 98, **labels: str) -> dict[str, str]:
    """A histogram of a hundred a minute; all but so many are in the bucket of this bound."""
    known = [*bounds.split(), "+Inf"]
    return {
        of(f"rollbridge_{name}_bucket", **labels, le=bound): rising(100 if at >= known.index(seconds) else below)
        for at, bound in enumerate(known)
    }


def latencies(path: str, seconds: str) -> dict[str, str]:
    """A hundred commits a minute, two of which take as long as this bucket says."""
    return buckets("commit_latency_seconds", "0.01 0.1 1.0 2.5 5.0 10.0", seconds, group=GROUP, path=path)


def requests(seconds: str) -> dict[str, str]:
    name = "zookeeper_request_duration_seconds"
    return buckets(name, "0.001 0.01 0.1 1.0 2.5", seconds, below=0, operation="write")


def gateway(instance: str = ONE) -> str:
    return of("rollbridge_gateway_info", instance, name=instance.partition(":")[0], version="0.3.0")


def told(api: str, code: str) -> str:
    return of("rollbridge_gateway_errors_total", api=api, code=code)


def handed(way: str, instance: str = ONE) -> str:
    return of("rollbridge_gateway_handovers_total", instance, way=way)


LIMITS = {
    "connections": "connections_limit",
    "open_transactions": "transactional_ids_limit",
    "under_way_bytes": "under_way_limit_bytes",
}


def room(**taken: tuple[float, float]) -> dict[str, str]:
    """What a gateway has of what it may have."""
    return {
        of(f"rollbridge_gateway_{name}"): steady(value)
        for what, pair in taken.items()
        for name, value in zip((what, LIMITS[what]), pair, strict=True)
    }


def lags(seconds: str) -> dict[str, str]:
    """Looks at a gateway's event loop, two of a hundred of which are as late as this bucket says."""
    return buckets("gateway_loop_lag_seconds", "0.001 0.1 0.25 0.5", seconds)


OLDEST = {led("oldest_transaction_info", transaction="0001-7", client="loader", label="nightly"): steady(1)}
IN_GROUP = {"job": JOB, "group": GROUP}
IN_STREAM = {**IN_GROUP, "stream": STREAM}
AT_ONE = {"job": JOB, "instance": ONE}

CASES = {
    "NoCoordinator": Case(
        {info(): "1x10 stale", info(TWO): "1x10 stale"},
        {info(): "1x10 stale", info(TWO): steady(1)},
        {"job": JOB},
        since=11,
        summary="No coordinator is running (rollbridge)",
    ),
    "CoordinatorDown": Case(
        {of("up"): "1x10 0x170", info(): "1x10 stale"},
        {of("up"): steady(1), info(): steady(1), of("up", "node:9100"): steady(0)},
        AT_ONE,
        since=11,
        summary="one:9464 does not answer",
    ),
    "CoordinatorUnhealthy": Case(
        {of("rollbridge_coordinator_healthy"): steady(0)},
        {of("rollbridge_coordinator_healthy"): steady(1)},
        AT_ONE,
        summary="one:9464 cannot lead a group",
    ),
    "NoLeader": Case(
        {
            of("rollbridge_coordinator_groups"): steady(3),
            of("rollbridge_coordinator_groups", TWO): steady(2),  # it has not heard of the newest yet
            of("rollbridge_coordinator_groups_led"): steady(1),
            of("rollbridge_coordinator_groups_led", TWO): steady(1),
        },
        {
            of("rollbridge_coordinator_groups"): steady(3),
            of("rollbridge_coordinator_groups", TWO): steady(3),
            of("rollbridge_coordinator_groups_led"): steady(1),
            of("rollbridge_coordinator_groups_led", TWO): steady(2),
        },
        {"job": JOB},
        summary="1 groups have no leader",
    ),
    "LeaderStandsStill": Case(
        {led("readings_age_seconds"): rising(60)},
        {led("readings_age_seconds"): "0+60x5 1+0x170"},
        IN_GROUP,
        since=6,
        summary="Leader of group sales/default has made no progress for 11m 0s",
        calm=({led("readings_age_seconds"): rising(60), led("readings_age_seconds", TWO): steady(1)},),
    ),
    "NoStandby": Case(
        {led("controller_epoch"): steady(4), led("standby_lag_messages", TWO): steady(-1)},
        {led("controller_epoch"): steady(4), led("standby_lag_messages", TWO): steady(0)},
        IN_GROUP,
        summary="Group sales/default has no standby",
    ),
    "StandbyLags": Case(
        {led("standby_lag_messages"): steady(COLD_MESSAGES + 1), led("standby_lag_messages", TWO): steady(-1)},
        {led("standby_lag_messages"): steady(10 * COLD_MESSAGES), led("standby_lag_messages", TWO): steady(7)},
        IN_GROUP,
        summary="lags by 40k messages",
    ),
    "TakeoversFlap": Case(
        {led("controller_epoch"): steady(3), led("controller_epoch", TWO): "_x11 7x170"},
        {led("controller_epoch"): "3x10 stale", led("controller_epoch", TWO): "_x11 6x170"},
        IN_GROUP,
        since=11,
        summary="has changed leaders 4 times",
    ),
    "ClocksDiffer": Case(
        {led("clocks_differ"): steady(1)}, {led("clocks_differ"): steady(0)}, IN_GROUP, summary="Clocks differ"
    ),
    "ZooKeeperDisconnected": Case(
        {of("rollbridge_zookeeper_connected"): steady(0)},
        {of("rollbridge_zookeeper_connected"): steady(1)},
        AT_ONE,
        summary="one:9464 has no ZooKeeper session",
    ),
    "ZooKeeperInterrupted": Case(
        {of("rollbridge_zookeeper_interruptions_total"): once(5)},
        {of("rollbridge_zookeeper_interruptions_total"): once(2)},
        AT_ONE,
        since=11,
        summary="one:9464 keeps losing its ZooKeeper connection",
    ),
    "ZooKeeperSlow": Case(requests("1.0"), requests("0.1"), AT_ONE, since=1, summary="answers one:9464 slowly"),
    "OldTransaction": Case(
        {led("oldest_transaction_age_seconds"): steady(13 * 3600), **OLDEST},
        {led("oldest_transaction_age_seconds"): steady(11 * 3600), **OLDEST},
        IN_GROUP,
        summary="has been open for 13h 0m 0s",
    ),
    "LeaseEnds": Case(
        {
            led("least_lease_left_seconds"): steady(1_200),
            led("oldest_transaction_age_seconds"): steady(23 * 3600),
            **OLDEST,
        },
        {led("least_lease_left_seconds"): steady(20), led("oldest_transaction_age_seconds"): steady(300), **OLDEST},
        IN_GROUP,
        summary="ends in 20m 0s",
        calm=(
            {led("least_lease_left_seconds"): steady(7_200), led("oldest_transaction_age_seconds"): steady(23 * 3600)},
        ),
    ),
    "LeaseOverdue": Case(
        {led("least_lease_left_seconds"): steady(-90)},
        {led("least_lease_left_seconds"): steady(-30)},
        IN_GROUP,
        summary="does not end expired transactions",
    ),
    "BufferHeld": Case(
        {led("stream_buffer_held_bytes", stream=STREAM): steady(11 * GIB), **OLDEST},
        {led("stream_buffer_held_bytes", stream=STREAM): steady(9 * GIB), **OLDEST},
        IN_STREAM,
        summary="hold 11GiB of the buffer of sales/orders",
    ),
    "CommitLogGrows": Case(
        {led("commit_log_disk_bytes"): f"{10 * GIB}x1440 {13 * GIB}x200"},
        {led("commit_log_disk_bytes"): f"{20 * GIB}x1440 {21 * GIB}x200", led("open_transactions"): steady(1)},
        IN_GROUP,
        since=1441,
        summary="has grown to 13GiB",
        calm=({led("commit_log_disk_bytes"): f"{GIB}x1440 {9 * GIB}x200"},),
    ),
    "FoldLag": Case(
        {led("stream_fold_lag_seconds", stream=STREAM): steady(45)},
        {led("stream_fold_lag_seconds", stream=STREAM): "45x3 0x3 45x3 0x170"},
        IN_STREAM,
        summary="lags 45s behind stream sales/orders",
    ),
    "SlowCommits": Case(
        latencies("direct", "5.0"),
        {**latencies("direct", "2.5"), **latencies("large", "10.0"), **latencies("rolling", "10.0")},
        {**IN_GROUP, "path": "direct"},
        since=1,
        summary="(p99, direct)",
    ),
    "ChangeWaits": Case(
        {led("longest_wait_seconds"): steady(400)},
        {led("longest_wait_seconds"): steady(200)},
        IN_GROUP,
        summary="group sales/default is waiting",
    ),
    "TransactionsRefused": Case(
        {led("transactions_aborted_total", reason="refused"): once(1)},
        {led("transactions_aborted_total", reason=reason): rising(5) for reason in ("client", "condition", "offsets")},
        {**IN_GROUP, "reason": "refused"},
        since=11,
        summary="were aborted: refused",
    ),
    "TransactionsExpire": Case(
        {led("transactions_aborted_total", reason="expired"): once(5)},
        {led("transactions_aborted_total", reason="expired"): once(2)},
        IN_GROUP,
        since=11,
        summary="outlive their leases",
    ),
    "StreamInError": Case(
        {led("stream_error", stream=STREAM, code="refused-topic"): steady(1)},
        {led("streams_in_error"): steady(0)},
        {**IN_STREAM, "code": "refused-topic"},
        summary="sales/orders is in an error state: refused-topic",
    ),
    "RequestsRefused": Case(
        {led("admin_requests_total", kind="scale-stream", result="refused"): once(9)},
        {
            led("admin_requests_total", kind="scale-stream", result="refused"): once(4),
            led("admin_requests_total", kind="scale-stream", result="done"): rising(9),
            led("admin_requests_total", kind="describe-transaction", result="refused"): rising(9),
        },
        {**IN_GROUP, "kind": "scale-stream"},
        since=11,
        summary="are refused: scale-stream",
    ),
    "ChoresRefused": Case(
        {led("chores_refused_total"): rising(1)},
        {led("chores_refused_total"): once(3)},
        IN_GROUP,
        since=1,
        summary="is refused",
    ),
    "LateRecordsRefused": Case(
        {led("late_records_refused_total"): once(1)},
        {led("late_records_refused_total"): steady(3), led("late_records_total"): rising(1)},
        IN_GROUP,
        since=11,
        summary="Readers miss acknowledged records of group sales/default",
    ),
    "FramesDropped": Case(
        {led("frames_rejected_total", reason="corrupt"): once(1)},
        {led("frames_rejected_total", reason=reason): rising(1) for reason in ("late", "zombie", "duplicate")},
        {**IN_GROUP, "reason": "corrupt"},
        since=11,
        summary="are dropped: corrupt",
    ),
    "StreamGrows": Case(
        {led("stream_epochs", stream=STREAM): steady(EPOCHS_MANY), led("stream_topics", stream=STREAM): steady(3)},
        {
            led("stream_epochs", stream=STREAM): steady(EPOCHS_MANY - 1),
            led("stream_topics", stream=STREAM): steady(TOPICS_MANY - 1),
        },
        IN_STREAM,
        summary="sales/orders has 2000 topics or epochs",
        also=({led("stream_topics", stream=STREAM): steady(TOPICS_MANY)},),
    ),
    "NoGateway": Case(
        {gateway(): "1x10 stale", gateway(TWO): "1x10 stale", info(): steady(1)},
        {gateway(): "1x10 stale", gateway(TWO): steady(1)},
        {"job": JOB},
        since=11,
        summary="No gateway is running (rollbridge)",
        calm=({info(): steady(1)},),
    ),
    "GatewayDown": Case(
        {of("up"): "1x10 0x170", gateway(): "1x10 stale"},
        {of("up"): steady(1), gateway(): steady(1), of("up", "node:9100"): steady(0)},
        AT_ONE,
        since=11,
        summary="Gateway at one:9464 does not answer",
    ),
    "GatewayUnhealthy": Case(
        {of("rollbridge_gateway_healthy"): steady(0)},
        {of("rollbridge_gateway_healthy"): steady(1)},
        AT_ONE,
        summary="one:9464 does not serve",
    ),
    "GatewayCertificateExpires": Case(
        {of("rollbridge_gateway_certificate_expiry_timestamp_seconds"): steady(10 * 86_400)},
        {of("rollbridge_gateway_certificate_expiry_timestamp_seconds"): steady(30 * 86_400)},
        AT_ONE,
        summary="certificate of the gateway at one:9464 expires soon",
    ),
    "GatewaysDisagree": Case(
        {of("rollbridge_gateway_known_gateways"): steady(2), of("rollbridge_gateway_known_gateways", TWO): steady(1)},
        {
            of(f"rollbridge_gateway_known_{what}", instance): steady(2)
            for what in ("gateways", "brokers")
            for instance in (ONE, TWO)
        },
        {"job": JOB},
        summary="different answers",
        also=(
            {of("rollbridge_gateway_known_brokers"): steady(3), of("rollbridge_gateway_known_brokers", TWO): "2x99"},
        ),
    ),
    "GatewayFull": Case(
        room(connections=(1_900, 2_000)),
        room(connections=(1_700, 2_000), open_transactions=(5, 10), under_way_bytes=(0, 9)),
        AT_ONE,
        summary="one:9464 is full",
        also=(
            room(open_transactions=(46_000, 50_000)),
            room(under_way_bytes=(250, 256)),
        ),
        calm=({of("rollbridge_gateway_refused_connections_total"): steady(7)},),
    ),
    "GatewayLate": Case(lags("0.5"), lags("0.1"), AT_ONE, since=1, summary="one:9464 is overloaded"),
    "GatewaySavepointsFail": Case(
        {of("rollbridge_gateway_savepoint_failures_total"): once(9)},
        {of("rollbridge_gateway_savepoint_failures_total"): once(3)},
        AT_ONE,
        since=11,
        summary="cannot write for its producers",
    ),
    "GatewayRelayFails": Case(
        {of("rollbridge_gateway_relay_errors_total"): rising(5)},
        {of("rollbridge_gateway_relay_errors_total"): once(12)},
        AT_ONE,
        since=5,
        summary="loses broker connections of its clients",
    ),
    "GatewayRefuses": Case(
        {told("PRODUCE", "INVALID_TOPIC_EXCEPTION"): once(9)},
        {
            told("PRODUCE", "INVALID_TOPIC_EXCEPTION"): once(4),
            told("PRODUCE", "CONCURRENT_TRANSACTIONS"): rising(9),
            told("END_TXN", "INVALID_TXN_STATE"): rising(9),
        },
        {"job": JOB, "code": "INVALID_TOPIC_EXCEPTION"},
        since=11,
        summary="are refused: INVALID_TOPIC_EXCEPTION",
    ),
    "GatewayHolds": Case(
        {handed("refused"): once(1)},
        {handed("refused"): steady(3), handed("given"): rising(9), handed("taken"): rising(9)},
        {"job": JOB},
        since=11,
        summary="does not release transactional ids",
    ),
    "GatewayHandovers": Case(
        {handed("given"): rising(5), handed("taken", TWO): rising(5)},
        {handed("given"): once(5_000)},
        {"job": JOB},
        since=5,
        summary="move back and forth",
        calm=({handed("given"): rising(1)},),
    ),
    "GatewayDefect": Case(
        {told("END_TXN", "UNKNOWN_SERVER_ERROR"): once(1)},
        {told("END_TXN", "UNKNOWN_SERVER_ERROR"): steady(0)},
        {**AT_ONE, "api": "END_TXN"},
        since=11,
        summary="answered END_TXN with an unexpected error",
    ),
}


def minutes(pending: str) -> int:
    """For how many evaluations an alert is pending at least."""
    number, unit = re.fullmatch(r"(\d+)([smh])", pending).groups()  # type: ignore[union-attr]
    return {"s": 1, "m": int(number), "h": 60 * int(number)}[unit]


def scraped(series: dict[str, str]) -> list[dict[str, str]]:
    return [{"series": name, "values": values} for name, values in series.items()]


def states(alert: Alert, at: int, *expected: dict[str, str]) -> dict[str, Any]:
    """A test of which alerts of this name there are at a minute: their labels, the state among them."""
    samples = []
    for labels in expected:
        whole = {"alertname": alert.full_name, "severity": alert.severity, **labels}
        shown = ", ".join(f'{key}="{value}"' for key, value in whole.items())
        samples.append({"labels": f"ALERTS{{{shown}}}", "value": 1})
    return {"expr": f'ALERTS{{alertname="{alert.full_name}"}}', "eval_time": f"{at}m", "exp_samples": samples}


def calm(alert: Alert, until: int) -> dict[str, Any]:
    """A test that no alert of this name has fired up to a minute; it may have been pending."""
    fired = f'max_over_time(ALERTS{{alertname="{alert.full_name}", alertstate="firing"}}[{until}m])'
    return {"expr": fired, "eval_time": f"{until}m", "exp_samples": []}


def both(alert: Alert, case: Case) -> Iterator[dict[str, Any]]:
    """The tests that a case fires, and no sooner, and that its opposite does not."""
    fires = case.since + minutes(alert.pending)
    pending, firing = ({**case.labels, "alertstate": state} for state in ("pending", "firing"))
    before = [states(alert, case.since - 1)] if case.since else []
    for series in (case.bad, *case.also):
        yield from scraped_so(series, *before, states(alert, fires - 1, pending), states(alert, fires, firing))
    for series in (case.good, *case.calm):
        yield from scraped_so(series, calm(alert, fires + 30))


def hold(tests: Iterable[dict[str, Any]], tmp_path: Path) -> None:
    done = check_alerts(rules(), tests, tmp_path)
    assert done.returncode == 0, done.stdout


def scraped_so(series: dict[str, str], *expected: dict[str, Any]) -> list[dict[str, Any]]:
    """What is expected where this is scraped."""
    return [{"interval": "1m", "input_series": scraped(series), "promql_expr_test": list(expected)}]


def test_each_alert_has_a_case() -> None:
    assert {f"Rollbridge{name}" for name in CASES} == ALERTS.keys()


@pytest.mark.long_cases("CommitLogGrows")
@needs_promtool
@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_when_it_should_and_not_otherwise(name: str, tmp_path: Path) -> None:
    alert = ALERTS[f"Rollbridge{name}"]
    hold(both(alert, CASES[name]), tmp_path)


ALL_IS_WELL = {"LeaseOverdue": 9_000, "LeaseEnds": 90_000}
"""What a coordinator with nothing to tell shows, where that is not 0."""
ABOUT_GROUPS = [
    "BufferHeld",
    "CommitLogGrows",
    "ChangeWaits",
    "ChoresRefused",
    "ClocksDiffer",
    "FoldLag",
    "FramesDropped",
    "LateRecordsRefused",
    "LeaseEnds",
    "LeaseOverdue",
    "OldTransaction",
    "RequestsRefused",
    "SlowCommits",
    "StreamGrows",
    "StreamInError",
    "TransactionsExpire",
    "TransactionsRefused",
]


@pytest.mark.long_cases("CommitLogGrows")
@needs_promtool
@pytest.mark.parametrize("name", ABOUT_GROUPS)
def test_what_another_coordinator_says_of_the_group_calms_nothing(name: str, tmp_path: Path) -> None:
    """At a change of leaders Prometheus has numbers of both for a while."""
    alert, case = ALERTS[f"Rollbridge{name}"], CASES[name]
    other = {series.replace(ONE, TWO): steady(ALL_IS_WELL.get(name, 0)) for series in case.bad}
    firing = states(alert, case.since + minutes(alert.pending), {**case.labels, "alertstate": "firing"})
    hold(scraped_so({**case.bad, **other}, firing), tmp_path)


@pytest.mark.long_cases("CommitLogGrows")
@needs_promtool
@pytest.mark.parametrize("name", CASES)
def test_what_an_alert_says_is_filled_in(name: str, tmp_path: Path) -> None:
    alert, case = ALERTS[f"Rollbridge{name}"], CASES[name]
    at = case.since + minutes(alert.pending)
    nothing = {"eval_time": f"{at}m", "alertname": alert.full_name, "exp_alerts": []}
    test = {"interval": "1m", "input_series": scraped(case.bad), "alert_rule_test": [nothing]}
    said = check_alerts(rules(), [test], tmp_path).stdout  # it prints the alert that it was not told to expect
    assert case.summary
    assert case.summary in said
    assert f".md#{alert.anchor}" in said
    for unfilled in ("{{", "error expanding", "no value", "%!"):
        assert unfilled not in said
    if led("oldest_transaction_info", transaction="0001-7", client="loader", label="nightly") in case.bad:
        assert "The oldest open transaction is 0001-7 of client loader, labelled nightly. " in said


@needs_promtool
def test_no_coordinator_fires_where_none_was_ever_scraped(tmp_path: Path) -> None:
    firing = states(ALERTS["RollbridgeNoCoordinator"], 1, {"alertstate": "firing"})
    hold(scraped_so({of("up", "node:9100"): steady(1)}, firing), tmp_path)


@needs_promtool
def test_another_installation_neither_fires_nor_calms_an_alert(tmp_path: Path) -> None:
    other = {series.replace(JOB + '"', 'elsewhere"', 1): values for series, values in CASES["NoLeader"].good.items()}
    firing = states(ALERTS["RollbridgeNoLeader"], 5, {"job": JOB, "alertstate": "firing"})
    hold(scraped_so({**CASES["NoLeader"].bad, **other}, firing), tmp_path)


@needs_promtool
def test_a_change_of_leaders_does_not_begin_an_alert_anew(tmp_path: Path) -> None:
    """The age goes on, at another coordinator."""
    age = {
        led("oldest_transaction_age_seconds"): f"{13 * 3600}x6 stale",
        led("oldest_transaction_age_seconds", TWO): f"_x6 {13 * 3600}x60",
    }
    firing = states(ALERTS["RollbridgeOldTransaction"], 10, {**IN_GROUP, "alertstate": "firing"})
    hold(scraped_so(age, firing), tmp_path)


@needs_promtool
@pytest.mark.parametrize("docs", ["docs", "https://docs.example.com/rollbridge/"])
def test_the_rules_are_what_prometheus_reads(docs: str, tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(rules(docs), encoding="utf-8")
    done = run("check", "rules", "--lint-fatal", file)
    assert done.returncode == 0, done.stdout
    assert f"{len(ALERTS)} rules found" in done.stdout
    assert ("https://docs.example.com/rollbridge/runbook.html#" in rules(docs)) == docs.startswith("https")


@pytest.mark.parametrize("alert", ALERTS.values(), ids=lambda alert: alert.name)
def test_an_alert_names_what_exists(alert: Alert) -> None:
    assert list(faults(alert.expression)) == []
    queried = re.findall(r'printf "(.*?)" \$', ANNOTATIONS[alert.full_name]["description"])
    assert [fault for query in queried for fault in faults(query.replace("%s", "$any"), ["any"])] == []
    named = set(re.findall(r"`(rollbridge_\w+)`", runbook(alert)))
    assert [
        name for name in named if list(faults(name)) and list(faults(f"{name}_bucket")) and list(faults(f"{name}_sum"))
    ] == []


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("sum(rollbridge_coordinator_group)", "there is no series rollbridge_coordinator_group"),
        ("rollbridge_commit_latency_seconds > 1", "there is no series rollbridge_commit_latency_seconds"),
        ("sum by (stream) (rollbridge_clocks_differ)", "no series has a label stream"),
        ('rollbridge_clocks_differ{stream="a"}', "rollbridge_clocks_differ has no label stream"),
        ('rollbridge_transactions_aborted_total{reason=~"limit|corrupt"}', "has no reason corrupt"),
        ('rollbridge_open_transactions{state="committed"}', "has no state committed"),
        ("vector(1)", "names no series"),
    ],
)
def test_what_does_not_exist_is_noticed(expression: str, found: str) -> None:
    assert found in "; ".join(faults(expression))


def test_limits_that_others_have_as_well_are_theirs() -> None:
    assert f"> {COLD_MESSAGES}" in ALERTS["RollbridgeStandbyLags"].expression
    assert f"< -{SLOW.total_seconds():.0f}" in ALERTS["RollbridgeLeaseOverdue"].expression
    assert CLOCKS_DIFFER.total_seconds() == 60
    assert "more than a minute apart" in ANNOTATIONS["RollbridgeClocksDiffer"]["description"]
    assert f"{TOPICS_MANY:,} topics and {EPOCHS_MANY:,} epochs" in ALERTS["RollbridgeStreamGrows"].limits


def sentences(alert: Alert) -> Sequence[str]:
    return [alert.means, alert.limits, alert.do_not, *alert.look, *alert.do, *(item.do for item in alert.findings)]


@pytest.mark.parametrize("alert", ALERTS.values(), ids=lambda alert: alert.name)
def test_a_runbook_says_all_that_is_asked_of_it(alert: Alert) -> None:
    assert all(text.strip() == text and text for text in sentences(alert))
    assert alert.look
    assert alert.do or alert.findings
    assert alert.do_not[0].islower(), "it goes on after `Do not`"
    others = re.findall(r"\bRollbridge[A-Z]\w+", runbook(alert))
    assert [name for name in others if name not in ALERTS] == []
    assert len(ANNOTATIONS[alert.full_name]["summary"]) < 100
    assert ANNOTATIONS[alert.full_name]["description"]
