"""Defects are logged in one way, and a test during which one is logged fails."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest

from rollbridge.defects import MARK, log_defect

logger = logging.getLogger(__name__)
ROOT = Path(__file__).parents[2]
WITH_STACK = {
    "bridge/rollbridge/calls.py": "callbacks of the application",
    "bridge/rollbridge/defects.py": "defects",
    "bridge/rollbridge/serving/http_service.py": "connections, at the lowest level",
}
"""Modules that log stacks, and of what."""


def logs_stacks(tree: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (
            (node.func.attr == "exception" and ast.unparse(node.func.value) == "logger")
            or any(keyword.arg == "exc_info" for keyword in node.keywords)
        )
        for node in ast.walk(tree)
    )


def test_there_is_one_way_to_log_a_defect() -> None:
    packages = ("bridge/rollbridge", "coordinator/rollbridge_coordinator", "gateway/rollbridge_gateway")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if logs_stacks(ast.parse(path.read_text(encoding="utf-8")))}
    assert found == set(WITH_STACK)


@pytest.mark.logs_defects
def test_a_defect_is_logged_with_its_stack_and_fails_other_tests(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise RuntimeError("100 % ours")
    except RuntimeError:
        log_defect(logger, "it is at 100 %")
    log_defect(logger, "%s has ended", "it", fault=ValueError("later"))
    first, second = caplog.records
    assert (first.getMessage(), second.getMessage()) == (f"{MARK}it is at 100 %", f"{MARK}it has ended")
    assert first.exc_info is not None
    assert second.exc_info is not None
    assert "100 % ours" in str(first.exc_info[1])
    assert "later" in str(second.exc_info[1])
    assert first.filename == Path(__file__).name
