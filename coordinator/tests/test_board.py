"""The board: it is what Grafana imports, each query is PromQL and names what exists, and the first row says if all is
well."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from coordinator.tests.promtool import SERIES, check_alerts, faults, needs_promtool, run
from rollbridge.monitoring.runbook import alerts, board
from rollbridge_coordinator.core.metric_samples import OF_COUNTS

BOARD: dict[str, Any] = json.loads(board())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
FIRST_NUMBERS = [panel for panel in PANELS if panel["type"] == "stat"]
VARIABLES = ("job", "group", "stream")
QUERIES = [
    (f"{panel['title']}-{place}", target["expr"]) for panel in PANELS for place, target in enumerate(panel["targets"])
]
ANY = {"$__rate_interval": "5m", "$job": ".*", "$group": ".*", "$stream": ".*"}
"""What Grafana puts in place of variables."""


def filled_in(query: str) -> str:
    for name, value in ANY.items():
        query = query.replace(name, value)
    return query


# Grafana's schema, as its own library for Python has it: what that does not know it drops, and types are said only


def lost(given: object, kept: object, where: str = "board") -> Iterator[str]:
    """What of a document is not in another one that may have more."""
    match given, kept:
        case dict(), dict():
            for key, value in given.items():
                if key in kept:
                    yield from lost(value, kept[key], f"{where}.{key}")
                elif value is not None:
                    yield f"{where}.{key}"
        case list(), list() if len(given) == len(kept):
            for place, (one, other) in enumerate(zip(given, kept, strict=True)):
                yield from lost(one, other, f"{where}[{place}]")
        case _ if given != kept:
            yield f"{where}: {given!r} is {kept!r}"


def plain(known: object) -> Any:
    """An object of Grafana's library as what JSON has."""
    return json.loads(json.dumps(known, cls=JSONEncoder))


def misfits(value: object, hint: Any, where: str = "board") -> Iterator[str]:
    """Where a value is not of the type that it is said to have."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        if type(value).__module__.startswith("grafana_foundation_sdk"):
            yield from members(value, where)
    elif origin in (Union, types.UnionType):
        found = [list(misfits(value, one, where)) for one in arguments]
        if all(found):  # of the alternatives the one that fits as a whole, or any
            yield from min(found, key=lambda said: any(line.startswith(f"{where}:") for line in said))
    elif origin is Literal:
        if value not in arguments:
            yield f"{where}: {value!r} is none of {arguments}"
    elif origin in (list, Sequence):
        if not isinstance(value, list):
            yield f"{where}: {value!r} is no list"
        else:
            for place, item in enumerate(value):
                yield from misfits(item, arguments[0], f"{where}[{place}]")
    elif origin in (dict, Mapping):
        if not isinstance(value, dict):
            yield f"{where}: {value!r} is no object"
        else:
            for key, item in value.items():
                yield from misfits(item, arguments[1], f"{where}.{key}")
    elif isinstance(hint, type) and issubclass(hint, Enum):
        if value not in [member.value for member in hint]:
            yield f"{where}: {value!r} is none of {[member.value for member in hint]}"
    elif hint is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            yield f"{where}: {value!r} is no number"
    elif hint is int:
        if isinstance(value, bool) or not isinstance(value, int):
            yield f"{where}: {value!r} is no whole number"
    elif isinstance(value, dict) and getattr(hint, "__module__", "").startswith("grafana_foundation_sdk"):
        known = hint.from_json(value)  # the library leaves some objects as they are
        yield from lost(value, plain(known), where)
        yield from members(known, where)
    elif isinstance(hint, type) and not isinstance(value, hint):
        yield f"{where}: {value!r} is no {hint.__name__}"
    elif type(value).__module__.startswith("grafana_foundation_sdk"):
        yield from members(value, where)


def members(item: object, where: str) -> Iterator[str]:
    """The same for all that an object of Grafana's library has; what is not typed there is looked into as well."""
    hints = get_type_hints(type(item))
    for name, value in vars(item).items():
        yield from misfits(value, hints.get(name, Any), f"{where}.{name}")


def against_schema(document: dict[str, Any]) -> list[str]:
    """What Grafana's schema says against a board."""
    register_default_plugins()
    known = Dashboard.from_json(document)
    return [*lost(document, plain(known)), *members(known, "board")]


def test_the_board_is_what_grafana_imports() -> None:
    assert against_schema(BOARD) == []


@pytest.mark.parametrize(
    ("path", "value", "found"),
    [
        (("panels", 1, "titel"), "x", "board.panels[1].titel"),
        (("panels", 1, "title"), 7, "7 is"),
        (("panels", 1, "gridPos", "w"), "3", "'3' is"),
        (("panels", 1, "options", "colorMode"), "pink", "'pink' is"),
        (("panels", 1, "options", "colour"), "pink", "board.panels[1].options.colour"),
        (("panels", 1, "targets", 0, "expression"), "up", "board.panels[1].targets[0].expression"),
        (("panels", 1, "fieldConfig", "defaults", "thresholds", "mode"), "relative", "'relative' is"),
        (("templating", "list", 0, "type"), "source", "'source' is"),
        (("panels", 9, "transformations", 0, "excluded"), {}, "board.panels[9].transformations[0].excluded"),
        (("refresh",), 30, "30 is"),
    ],
)
def test_what_grafana_does_not_import_is_noticed(path: tuple[str | int, ...], value: object, found: str) -> None:
    document = json.loads(board())
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert found in "; ".join(against_schema(document))


# Queries


@pytest.mark.parametrize(("label", "query"), QUERIES, ids=[label for label, _ in QUERIES])
def test_a_query_names_what_exists(label: str, query: str) -> None:
    if not query.startswith("ALERTS"):
        assert list(faults(query, VARIABLES)) == []


@needs_promtool
def test_each_query_is_read_by_prometheus(tmp_path: Path) -> None:
    annotations = [item["expr"] for item in BOARD["annotations"]["list"]]
    names = {
        f"panel:{number}": filled_in(query) for number, query in enumerate([*annotations, *(q for _, q in QUERIES)])
    }
    file = tmp_path / "queries.yaml"
    rules = [{"record": name, "expr": query} for name, query in names.items()]
    file.write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}), encoding="utf-8")
    done = run("check", "rules", "--lint-fatal", file)
    assert done.returncode == 0, done.stdout
    assert f"{len(names)} rules found" in done.stdout


def test_variables_name_what_exists() -> None:
    queries = [item["query"] for item in BOARD["templating"]["list"] if item["type"] == "query"]
    for query in queries:
        (selector, label) = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert list(faults(selector, VARIABLES)) == []
        assert label in {"job", *SERIES[selector.partition("{")[0]].labels}
    used = {name for _, query in QUERIES for name in re.findall(r"\$(\w+)", query)}
    assert used == {*VARIABLES, "__rate_interval"}


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["title"]))
def test_legends_name_labels_that_the_query_keeps(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        query, legend = target["expr"], target["legendFormat"]
        kept = re.findall(r"\b(?:by|group_left) \(([^)]*)\)", query)
        labels = {label.strip() for clause in kept for label in clause.split(",")}
        labels |= set() if "sum by" in query or "max by" in query else {"instance", "group"}
        assert set(re.findall(r"{{(\w+)}}", legend)) <= labels, panel["title"]


def test_what_is_measured_is_shown() -> None:
    """All but what is only counted, where a choice is shown."""
    shown = set(re.findall(r"\b(rollbridge_\w+)", board()))
    counted = {family.name for family in OF_COUNTS}
    hidden = {family.name for name, family in SERIES.items() if family.name not in counted} - {
        family.name for name, family in SERIES.items() if name in shown
    }
    assert hidden == {
        "rollbridge_open_transactions_bytes",
        "rollbridge_transactions_committed_total",
        "rollbridge_round_bytes",
        "rollbridge_waiting_changes",
        "rollbridge_frames_dropped_total",
        "rollbridge_merges_beside",
        "rollbridge_adopted_topic",
        "rollbridge_takeover_duration_seconds",
        "rollbridge_clocks_differ",
        "rollbridge_gateway_info",
    }


def test_panels_name_alerts_that_exist_and_all_that_have_a_panel_are_named() -> None:
    named = {name for panel in PANELS for name in re.findall(r"Rollbridge[A-Z]\w+", panel["description"])}
    assert named == alerts().keys() - {"RollbridgeTransactionsExpire", "RollbridgeLateRecordsRefused"}


# The first row


def test_what_says_if_all_is_well_is_one_line_at_the_top() -> None:
    assert {panel["gridPos"]["y"] for panel in FIRST_NUMBERS} == {1}
    assert sum(panel["gridPos"]["w"] for panel in FIRST_NUMBERS) == 24
    assert all(panel["fieldConfig"]["defaults"]["thresholds"]["steps"] for panel in FIRST_NUMBERS)


def test_panels_lie_beside_each_other() -> None:
    def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
        place = panel["gridPos"]
        across = range(place["x"], place["x"] + place["w"])
        return {(x, y) for x in across for y in range(place["y"], place["y"] + place["h"])}

    panels = BOARD["panels"]
    assert max(x for panel in panels for x, _ in cells(panel)) == 23
    assert [(a["title"], b["title"]) for a, b in combinations(panels, 2) if cells(a) & cells(b)] == []
    assert len({panel["id"] for panel in panels}) == len(panels)


J, G = 'job="rollbridge", instance="one:9464"', 'group="sales/default"'
FIRST_ROW: list[tuple[str, dict[str, str], float | None]] = [
    ("Groups without leader", {}, -1),
    (
        "Groups without leader",
        {f"rollbridge_coordinator_groups{{{J}}}": "3x9", f"rollbridge_coordinator_groups_led{{{J}}}": "1x9"},
        2,
    ),
    ("Unhealthy coordinators", {f"rollbridge_coordinator_healthy{{{J}}}": "1x9"}, 0),
    (
        "Unhealthy coordinators",
        {
            f"rollbridge_coordinator_healthy{{{J}}}": "0x9",
            f"rollbridge_coordinator_info{{{J.replace('one', 'two')}}}": "1x2 stale",
            f"up{{{J.replace('one', 'two')}}}": "0x9",
        },
        2,
    ),
    ("Streams in error", {f"rollbridge_streams_in_error{{{J}, {G}}}": "2x9"}, 2),
    ("Oldest transaction", {f"rollbridge_oldest_transaction_age_seconds{{{J}, {G}}}": "70x9"}, 70),
    ("Shortest lease", {}, None),
    ("Shortest lease", {f"rollbridge_least_lease_left_seconds{{{J}, {G}}}": "-5x9"}, -5),
    ("Fold lag", {f'rollbridge_stream_fold_lag_seconds{{{J}, {G}, stream="sales/orders"}}': "9x9"}, 9),
    ("Commit p99", {f'rollbridge_commit_latency_seconds_bucket{{{J}, {G}, path="direct", le="1.0"}}': "0x9"}, None),
    (
        "Commit p99",
        {
            f'rollbridge_commit_latency_seconds_bucket{{{J}, {G}, path="direct", le="{bound}"}}': f"0+{by}x9"
            for bound, by in (("1.0", 0), ("2.0", 10), ("+Inf", 10))
        },
        1.99,
    ),
    ("Groups without standby", {f"rollbridge_controller_epoch{{{J}, {G}}}": "4x9"}, 1),
    (
        "Groups without standby",
        {
            f"rollbridge_controller_epoch{{{J}, {G}}}": "4x9",
            f"rollbridge_standby_lag_messages{{{J.replace('one', 'two')}, {G}}}": "0x9",
        },
        0,
    ),
]


@needs_promtool
@pytest.mark.parametrize(
    ("title", "series", "value"), FIRST_ROW, ids=[f"{title}-{value}" for title, _, value in FIRST_ROW]
)
def test_a_number_of_the_first_row_is_what_it_says(
    title: str, series: dict[str, str], value: float | None, tmp_path: Path
) -> None:
    query = filled_in(next(panel["targets"][0]["expr"] for panel in FIRST_NUMBERS if panel["title"] == title))
    samples = [] if value is None else [{"labels": "{}", "value": value}]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": query, "eval_time": "6m", "exp_samples": samples}],
    }
    unknown = [  # no number, as where no transaction is open
        {
            "record": "rollbridge_least_lease_left_seconds",
            "expr": "vector(0) / 0",
            "labels": {"job": "rollbridge", "group": "sales/other"},
        }
    ]
    rules = json.dumps({"groups": [{"name": "unknown", "rules": unknown}]})
    done = check_alerts(rules, [test], tmp_path)
    assert done.returncode == 0, done.stdout
