"""Pages that follow from the code are up to date, and say so when they are not."""

from __future__ import annotations

import ast
import re
import runpy
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_ROW = re.compile(r"^\| (?P<number>\d+) \| .* \| (?P<held>[^|]*) \|$", re.MULTILINE)
_TEST = re.compile(r"`(?P<file>[\w/]+\.py)::(?P<name>\w+)(?:\[(?P<case>[^\]]+)\])?`")


def test_generated_pages_are_up_to_date() -> None:
    generate = runpy.run_path(str(DOCS / "generate.py"))
    for path, text in generate["pages"]().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is stale: run `python docs/generate.py`"


def test_a_stale_page_is_noticed_and_written_anew(tmp_path: Path) -> None:
    copy = tmp_path / "docs"
    shutil.copytree(DOCS, copy)
    page = copy / "protocol-states.md"
    page.write_text(page.read_text(encoding="utf-8").replace("committing", "comitting"), encoding="utf-8")

    def generate(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, str(copy / "generate.py"), *arguments], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout.strip()

    assert generate("--check") == (1, "stale: protocol-states.md")
    assert generate() == (0, "written: protocol-states.md")
    assert generate("--check") == (0, "")
    assert page.read_bytes() == (DOCS / "protocol-states.md").read_bytes()


def test_each_guarantee_names_tests_that_exist() -> None:
    text = (DOCS / "guarantees.md").read_text(encoding="utf-8")
    promised = text[text.index("## Promised") : text.index("## Not promised")]
    rows = {int(row["number"]): row["held"] for row in _ROW.finditer(promised)}
    assert list(rows) == list(range(1, len(rows) + 1))
    assert len(rows) > 40
    faults = [fault for number, held in rows.items() for fault in _faults_of(number, held)]
    assert not faults, "\n".join(faults)


def test_a_guarantee_without_a_test_that_exists_is_noticed() -> None:
    good = "`bridge/tests/test_docs.py::test_each_guarantee_names_tests_that_exist`"
    assert not _faults_of(1, good)
    assert not _faults_of(1, f"`{_SIMULATION}::test_the_checks_catch_a_defect[no-fencing]`, {good}")
    assert _faults_of(1, "simulation")
    assert _faults_of(1, "`bridge/tests/test_docs.py`, " + good) == ["row 1: no test in `bridge/tests/test_docs.py`"]
    assert _faults_of(1, good.replace("_exist`", "_exists`"))
    assert _faults_of(1, good.replace("test_docs", "test_doc"))
    assert _faults_of(1, f"`{_SIMULATION}::test_the_checks_catch_a_defect[no-defect]`")


_SIMULATION = "coordinator/tests/test_simulation.py"


def _faults_of(number: int, held: str) -> list[str]:
    """Return what is wrong with the tests that a row names, a sentence each."""
    found = []
    for item in re.split(r",\s+(?=`)", held.strip()):
        test = _TEST.fullmatch(item.strip())
        if test is None:
            found.append(f"row {number}: no test in {item}")
        elif test["name"] not in (names := _tests_of(test["file"])):
            found.append(f"row {number}: {item} does not exist")
        elif test["case"] is not None and test["case"] not in names[test["name"]]:
            found.append(f"row {number}: {item} has no such case")
    return found


@cache
def _tests_of(file: str) -> dict[str, set[str]]:
    """Return the tests of a file by name, each with all strings that its decorators, or modules these name, hold."""
    path = ROOT / file
    if not path.exists():
        return {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    beside = list(path.parent.glob("sim_*.py")) if file == _SIMULATION else []
    shared = {text for item in beside for text in _strings(ast.parse(item.read_text(encoding="utf-8")))}
    tests: dict[str, set[str]] = {}
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) if name.startswith("test_"):
                tests[name] = {text for item in node.decorator_list for text in _strings(item)} | shared
            case ast.Assign(targets=[ast.Name(id=name)]) if name.startswith("Test"):
                tests[name] = set()
    return tests


def _strings(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
