"""Debian's ``promtool``, which reads rules and expressions as Prometheus does, and what expressions name.

Tests that need it are skipped where it is missing; ``.ci/run`` installs it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from kio.schema.errors import ErrorCode

from rollbridge.base.metrics import Family, FamilyKind
from rollbridge.buffer.table import AbortCause, Rejection, State
from rollbridge.metadata.requests import RequestKind
from rollbridge.monitoring.runbook import rules
from rollbridge_coordinator.core.metric_samples import FAMILIES, OPEN_STATES
from rollbridge_coordinator.core.metrics import Answered, CommitPath, Op, Warmth
from rollbridge_gateway.server.metrics import FAMILIES as GATEWAY_FAMILIES
from rollbridge_gateway.server.metrics import HANDOVERS

ANNOTATIONS: Final[Mapping[str, Mapping[str, str]]] = {
    rule["alert"]: rule["annotations"] for group in yaml.safe_load(rules())["groups"] for rule in group["rules"]
}
"""Annotations of the alerts by their full names."""
PROMTOOL: Final = shutil.which("promtool")
needs_promtool: Final = pytest.mark.skipif(PROMTOOL is None, reason="no promtool is installed (Debian: prometheus)")

_ENDINGS: Final = {
    FamilyKind.COUNTER: ("",),
    FamilyKind.GAUGE: ("",),
    FamilyKind.HISTOGRAM: ("_bucket", "_count", "_sum"),
    FamilyKind.SUMMARY: ("_count", "_sum"),
}
SERIES: Final[Mapping[str, Family]] = {
    family.name + ending: family for family in (*FAMILIES, *GATEWAY_FAMILIES) for ending in _ENDINGS[family.kind]
}
"""Every series that a coordinator or a gateway exposes, by name."""
OF_PROMETHEUS: Final = frozenset({"up"})
"""Series that Prometheus makes."""
OF_ITS_CLIENT: Final = frozenset(
    {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds", "process_max_fds"}
)
"""Series of :class:`prometheus_client.ProcessCollector` that are used."""
CLOSED: Final[Mapping[str, Iterable[str]]] = {
    "state": OPEN_STATES,
    "path": CommitPath,
    "result": Answered,
    "kind": RequestKind,
    "op": Op,
    "start": Warmth,
    "way": HANDOVERS,
    "code": [item.name.upper() for item in ErrorCode],
}
"""Values of labels that have only so many; ``reason`` has those of its family."""
REASONS: Final[Mapping[str, type[StrEnum]]] = {
    "rollbridge_transactions_aborted_total": AbortCause,
    "rollbridge_frames_rejected_total": Rejection,
}

_SELECTOR: Final = re.compile(r"\b(rollbridge_\w+|process_\w+|up)\b(?!\s*\()(?:\{([^}]*)\})?")
_MATCHER: Final = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*["\']([^"\']*)["\']')
_CLAUSE: Final = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)")

assert set(OPEN_STATES) <= set(State)


def faults(expression: str, variables: Iterable[str] = ()) -> Iterator[str]:
    """What an expression names that is not there: series, labels, and values of labels that have only so many.

    ``variables`` are those of a board, which stand for any value.
    """
    known = {"job", "instance"}
    found = list(_SELECTOR.finditer(expression))
    if not found:
        yield f"names no series: {expression}"
    shown = {f"${name}" for name in variables}
    for name, matchers in (item.groups() for item in found):
        if name in OF_PROMETHEUS | OF_ITS_CLIENT:
            labels: set[str] = set()
        elif name in SERIES:
            labels = set(SERIES[name].labels)
        else:
            yield f"there is no series {name}: {expression}"
            continue
        known |= labels | ({"le"} if name.endswith("_bucket") else set())
        for label, _, value in _MATCHER.findall(matchers or ""):
            if label not in labels | {"job", "instance"}:
                yield f"{name} has no label {label}"
            elif value in shown:
                continue
            elif label not in {"job", "instance", "group", "stream"}:
                values = REASONS[name] if label == "reason" else CLOSED[label]
                yield from (
                    f"{name} has no {label} {one}" for one in value.split("|") if one not in {str(v) for v in values}
                )
    for clause in _CLAUSE.findall(expression):
        yield from (
            f"no series has a label {label}: {expression}"
            for label in filter(None, re.split(r"[\s,]+", clause))
            if label not in known
        )


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run ``promtool`` to its end, with what it prints."""
    assert PROMTOOL is not None
    return subprocess.run(
        [PROMTOOL, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


def check_alerts(rules: str, tests: Iterable[Mapping[str, Any]], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run tests of rules, evaluated each minute; each test is as ``promtool`` documents it."""
    (folder / "rules.yaml").write_text(rules, encoding="utf-8")
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": list(tests)}
    file = folder / "tests.yaml"
    file.write_text(json.dumps(document, indent=1), encoding="utf-8")  # JSON is YAML
    return run("test", "rules", file)
