"""Pages follow from the code, name what exists, and show programs that tests run."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from functools import cache
from itertools import dropwhile
from pathlib import Path

import click
import pytest

import rollbridge
from rollbridge.cli.main import rollbridge as command_line
from rollbridge_gateway.__main__ import main as gateway_command

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_ROW = re.compile(r"^\| (?P<number>\d+) \| .* \| (?P<held>[^|]*) \|$", re.MULTILINE)
_TEST = re.compile(r"`(?P<file>[\w/]+\.py)::(?P<name>\w+)(?:\[(?P<case>[^\]]+)\])?`")


def test_generated_pages_are_up_to_date() -> None:
    generate = runpy.run_path(str(DOCS / "generate.py"))
    for path, text in generate["pages"]().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is stale: run `python docs/generate.py`"


@pytest.mark.long
def test_a_stale_page_is_noticed_and_written_anew(tmp_path: Path) -> None:
    copy = tmp_path / "docs"
    shutil.copytree(DOCS, copy)
    shutil.copytree(ROOT / "spark_examples", tmp_path / "spark_examples")
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


def test_pictures_are_as_they_are_drawn() -> None:
    for path, drawn in runpy.run_path(str(DOCS / "pictures.py"))["pictures"]().items():
        assert path.read_text(encoding="utf-8") == drawn, f"{path.name} is stale: run `python docs/pictures.py`"


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "index.md"], ids=lambda page: page.name)
def test_pictures_stand_at_the_top(page: Path) -> None:
    top = page.read_text(encoding="utf-8").partition("\n## ")[0]
    assert "architecture.svg)" in top
    assert "rolling-commit.svg)" in top


def test_the_reference_has_every_public_name() -> None:
    page = (DOCS / "api.rst").read_text(encoding="utf-8")
    public = page.partition("What else is handed out")[0]
    assert sorted(re.findall(r"^\.\. (?:auto\w+|data):: (\w+)$", public, re.MULTILINE)) == sorted(
        [*rollbridge.__all__, "__version__"]
    )


def test_each_guarantee_names_tests_that_exist() -> None:
    text = (DOCS / "guarantees.md").read_text(encoding="utf-8")
    promised = text[text.index("## Promised") : text.index("## Not promised")]
    found = [(int(row["number"]), row["held"]) for row in _ROW.finditer(promised)]
    rows = dict(found)
    assert [number for number, _ in found] == sorted(rows), "in order, each number once"
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


PROGRAMS = ROOT / "spark_examples"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])
_FENCE = re.compile(r"^ *```(?P<language>[^`\n]*)\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL)
_RUN = {"python": ".py", "bash": ".sh"}
"""Languages of blocks that are programs, with the endings of their files. The integration tests run all of those."""
_SHOWN = {"{toctree}", "console", "json", "properties", "text", "toml", "yaml"}
"""Languages of what is shown only: settings, also of others' programs, pictures, output, sessions at a prompt."""


_RUN_BY = {
    "existing-topics.md": "integration_tests/test_existing_topic.py",
    **dict.fromkeys(
        [f"gateway-{client}.md" for client in ("flink", "go", "java", "node", "python")],
        "integration_tests/test_gateway_pages.py",
    ),
}
"""Pages whose programs are in no file, and the test that runs all of them."""
_RUN_THERE = {*_RUN, "go", "java", "javascript"}


def _blocks(page: Path) -> list[tuple[str, str]]:
    return [(block["language"].strip(), block["text"]) for block in _FENCE.finditer(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_program_of_a_page_is_a_file_that_a_test_runs(page: Path) -> None:
    programs = {(path.suffix, path.read_text(encoding="utf-8")) for path in PROGRAMS.iterdir() if path.is_file()}
    test = _RUN_BY.get(page.name)
    assert test is None or page.name in (ROOT / test).read_text(encoding="utf-8")
    for language, text in _blocks(page):
        if language in _RUN_THERE and test is not None:
            continue
        if language in _RUN:
            assert (_RUN[language], text) in programs, f"no file of {PROGRAMS.name} holds:\n{text}"
        else:
            assert language in _SHOWN, f"a block of {page.name} is neither a program nor shown only: {language!r}"


def test_every_program_is_on_the_page_of_examples() -> None:
    generate = runpy.run_path(str(DOCS / "generate.py"))
    shown = [name for names in generate["PROGRAMS"].values() for name in names]
    files = [path.name for path in PROGRAMS.iterdir() if path.suffix in _RUN.values() and path.stem != "__init__"]
    assert sorted(shown) == sorted(files)
    lengths = {name: len((PROGRAMS / name).read_text(encoding="utf-8").splitlines()) for name in shown}
    assert all(length <= 40 for length in lengths.values()), lengths


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for language, text in _blocks(page):
        for line in text.splitlines():
            line = line.strip()
            if language != "console" or not line.startswith("$ "):
                continue
            words = shlex.split(line.removeprefix("$ ").rpartition("| ")[2], comments=True)
            words = list(dropwhile(lambda word: "=" in word, words))
            if words[0] == "make":
                wanted = [word for word in words[1:] if "=" not in word]
                assert set(wanted) <= targets, line
            elif words[0] == "rollbridge":
                _check_command(words[1:], line)


_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#[^)\s]*)?\)")
_PATH = re.compile(
    r"(?<![\w/])(?:bridge|coordinator|devcluster|schemas|integration_tests|spark_examples|benchmarks|docs|requirements|stubs)"
    r"/[\w./-]*\.(?:py|md|rst|svg|avsc|lock|json|sh)\b"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [link for link in _LINK.findall(text) if not (page.parent / link).exists()] == []
    assert [path for path in _PATH.findall(text) if not (ROOT / path).exists()] == []


def test_the_hooks_before_a_commit_run_what_is_pinned() -> None:
    lines = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8").splitlines()
    assert [line.strip() for line in lines if "repo:" in line] == ["- repo: local"]
    entries = [line.partition("entry: ")[2] for line in lines if "entry: " in line]
    pinned = (ROOT / "requirements" / "dev.lock").read_text(encoding="utf-8")
    assert entries
    for entry in entries:
        tool = entry.split()[0].removeprefix(".venv/bin/")
        assert tool in ("make", "sh") or f"\n{tool}==" in pinned, entry


def _check_command(words: list[str], line: str) -> None:
    """Fail if the command line has no such command, or this one no such option."""
    command: click.Command = command_line
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words.pop(0))
        assert found is not None, line
        command = found
    if command.name == "gateway":
        command = gateway_command
    known = {name for parameter in (*command.params, *command_line.params) for name in parameter.opts}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, line


def test_the_tour_passes_through_files_that_tell_their_part() -> None:
    page = (DOCS / "tour.md").read_text(encoding="utf-8")
    tours = re.findall(r"^## One ([a-z ]+), in (\w+) files$(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL)
    assert [(name, words) for name, words, _ in tours] == [
        ("commit", "eight"),
        ("read", "three"),
        ("gateway request", "five"),
    ]
    for name, words, stops in tours:
        files = re.findall(r"^\d\. .*\]\(\.\./([\w/]+\.py)\)", stops, re.MULTILINE)
        assert len(files) == {"eight": 8, "three": 3, "five": 5}[words]
        for number, file in enumerate(files, 1):
            docstring = ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8")))
            assert docstring is not None
            assert f"Tour of a {name}, stop {number} of {len(files)}: see docs/tour.md." in docstring, file
