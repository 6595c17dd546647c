"""The board: what Grafana shows of a rollbridge, as the JSON that it imports.

Dashboards of Grafana are plain objects (schema version 39, Grafana 11 and newer). What is on the board is a table of
rows and panels in :mod:`rollbridge.monitoring.panels`; here these become objects and get their places.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from rollbridge.monitoring.panels import ROWS, Panel, PanelKind, PanelRow, worst

UID: Final = "rollbridge"
TITLE: Final = "rollbridge"
_SCHEMA: Final = 39
_COLUMNS: Final = 24
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_LEGEND: Final = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}


def board() -> str:
    """Return the board as JSON, with a line feed at its end."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def dashboard() -> dict[str, Any]:
    """Return the board as an object."""
    return {
        "uid": UID,
        "title": TITLE,
        "description": "Transactions on Kafka: coordinators, groups, streams. Written by `rollbridge monitoring`.",
        "tags": ["rollbridge", "kafka"],
        "schemaVersion": _SCHEMA,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": [_takeovers()]},
        "links": [],
        "templating": {"list": list(_variables())},
        "panels": list(_panels()),
    }


def _takeovers() -> dict[str, Any]:
    """Marks in all panels where a group has got a new leader, as Grafana looks once a minute for them."""
    return {
        "name": "New leaders",
        "enable": True,
        "iconColor": "purple",
        "datasource": _SOURCE,
        "expr": f"time() - {worst('rollbridge_leader_start_time_seconds', 'job, group')} < 60",
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "hide": 0,
        "multi": False,
        "includeAll": False,
    }
    yield _variable("job", "Installation", "label_values(rollbridge_coordinator_info, job)")
    yield _variable("group", "Group", 'label_values(rollbridge_controller_epoch{job=~"$job"}, group)')
    yield _variable("stream", "Stream", 'label_values(rollbridge_stream_topics{job=~"$job", group=~"$group"}, stream)')


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": query,
        "refresh": 2,  # whenever the time range changes: what was there then counts
        "sort": 1,
        "hide": 0,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panels() -> Iterator[dict[str, Any]]:
    number, y = 1, 0
    for row in ROWS:
        yield _row(row, number, y)
        number, y = number + 1, y + 1
        for x, below, panel in _places(row.panels):
            yield _panel(panel, number, {"x": x, "y": y + below, "w": panel.width, "h": panel.height})
            number += 1
        y += sum(max(panel.height for panel in line) for line in _lines(row.panels))


def _lines(panels: Sequence[Panel]) -> list[list[Panel]]:
    """Panels side by side, as many as there is room for."""
    lines: list[list[Panel]] = [[]]
    for panel in panels:
        if sum(other.width for other in lines[-1]) + panel.width > _COLUMNS:
            lines.append([])
        lines[-1].append(panel)
    return lines


def _places(panels: Sequence[Panel]) -> Iterator[tuple[int, int, Panel]]:
    """Each panel with its column, and how far below its row's title it stands."""
    below = 0
    for line in _lines(panels):
        x = 0
        for panel in line:
            yield x, below, panel
            x += panel.width
        below += max(panel.height for panel in line)


def _row(row: PanelRow, number: int, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": _COLUMNS, "h": 1}
    return {"id": number, "type": "row", "title": row.title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    shown = {
        "id": number,
        "type": _TYPES[panel.kind],
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": place,
        "targets": [_target(panel, index) for index in range(len(panel.queries))],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _OPTIONS[panel.kind],
    }
    if panel.kind is PanelKind.TABLE:
        hidden = dict.fromkeys(("Time", "Value", "__name__", "alertstate"), True)
        shown["transformations"] = [{"id": "organize", "options": {"excludeByName": hidden}}]
    return shown


def _target(panel: Panel, index: int) -> dict[str, Any]:
    expression, legend = panel.queries[index]
    target: dict[str, Any] = {
        "refId": chr(ord("A") + index),
        "datasource": _SOURCE,
        "editorMode": "code",
        "expr": expression,
        "legendFormat": legend or "__auto",
        "range": panel.kind in (PanelKind.LINES, PanelKind.HEAT),
        "instant": panel.kind in (PanelKind.NUMBER, PanelKind.TABLE),
    }
    if panel.kind is PanelKind.HEAT:
        target["format"] = "heatmap"
    if panel.kind is PanelKind.TABLE:
        target["format"] = "table"
    return target


def _defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.decimals is not None:
        defaults["decimals"] = panel.decimals
    if panel.steps:
        steps = [{"color": color, "value": value} for value, color in panel.steps]
        defaults["color"] = {"mode": "thresholds"}
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.nothing:
        defaults["noValue"] = panel.nothing
    if panel.words:
        words = {str(value): {"text": text, "index": place} for place, (value, text) in enumerate(panel.words.items())}
        defaults["mappings"] = [{"type": "value", "options": words}]
    if panel.kind is PanelKind.LINES:
        defaults["color"] = {"mode": "palette-classic"}
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never", "spanNulls": False}
        defaults["min"] = 0 if panel.from_zero else None
        defaults = {key: value for key, value in defaults.items() if value is not None}
    return defaults


_TYPES: Final = {
    PanelKind.NUMBER: "stat",
    PanelKind.LINES: "timeseries",
    PanelKind.HEAT: "heatmap",
    PanelKind.TABLE: "table",
}
_OPTIONS: Final[dict[PanelKind, dict[str, Any]]] = {
    PanelKind.NUMBER: {
        "colorMode": "background",
        "graphMode": "none",
        "justifyMode": "auto",
        "textMode": "value",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    },
    PanelKind.LINES: {"legend": _LEGEND, "tooltip": {"mode": "multi", "sort": "desc"}},
    PanelKind.HEAT: {
        "calculate": False,
        "cellGap": 1,
        "color": {
            "mode": "scheme",
            "scheme": "Oranges",
            "steps": 64,
            "exponent": 0.5,
            "fill": "dark-orange",
            "reverse": False,
            "scale": "exponential",
        },
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "yHistogram": False, "showColorScale": False},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": "s"},
    },
    PanelKind.TABLE: {"showHeader": True, "cellHeight": "sm"},
}
