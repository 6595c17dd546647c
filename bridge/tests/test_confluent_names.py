"""Clients have confluent-kafka's calls, with its parameters, or the page says why one is absent."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

import rollbridge

PAGE = Path(__file__).parents[2] / "docs" / "moving-from-confluent-kafka.md"
CLASSES = ["Consumer", "Message"]
_STUB = Path(confluent_kafka.__file__).with_name("cimpl.pyi")
_CLASSES = {node.name: node for node in ast.parse(_STUB.read_text()).body if isinstance(node, ast.ClassDef)}
_ROW = re.compile(r"^\| `(\w+)\.(\w+)` \| (.+) \|$", re.MULTILINE)


def absent() -> set[tuple[str, str]]:
    """What the page names as absent, with its reason."""
    return {(kind, name) for kind, name, _ in _ROW.findall(PAGE.read_text(encoding="utf-8"))}


def theirs(kind: str) -> set[str]:
    """The public names of a class, by the class itself and by its stub."""
    stubs = {node.name for node in _CLASSES[kind].body if isinstance(node, ast.FunctionDef)}
    names = stubs | set(dir(getattr(confluent_kafka, kind)))
    return {name for name in names if not name.startswith("_")} | (names & {"__len__", "__enter__", "__exit__"})


def parameters(kind: str) -> dict[str, dict[str, Any]]:
    """Parameters and defaults of the calls, by the stub; of a call with several forms, all parameters."""
    found: dict[str, dict[str, Any]] = {}
    for node in _CLASSES[kind].body:
        if not isinstance(node, ast.FunctionDef) or node.name == "__init__":
            continue
        names = [item.arg for item in node.args.args]
        defaults = dict(zip(reversed(names), reversed(node.args.defaults), strict=False))
        more = {item.arg for item in node.args.kwonlyargs}
        known = found.setdefault(node.name, {})
        known |= {name: ast.literal_eval(defaults[name]) if name in defaults else ... for name in names[1:]}
        known |= dict.fromkeys(more, None)
    return found


@pytest.mark.parametrize("kind", CLASSES)
def test_every_call_is_there_or_the_page_says_why_not(kind: str) -> None:
    missing = {(kind, name) for name in theirs(kind) if not hasattr(getattr(rollbridge, kind), name)}
    assert missing == {item for item in absent() if item[0] == kind}


@pytest.mark.parametrize("kind", CLASSES)
def test_calls_have_the_same_parameters_in_the_same_order(kind: str) -> None:
    for name, wanted in parameters(kind).items():
        if (kind, name) in absent() or name.startswith("__"):
            continue
        ours = inspect.signature(getattr(getattr(rollbridge, kind), name)).parameters
        given = {key: item.default for key, item in ours.items() if key != "self"}
        if name == "commit":  # its forms are told apart by keywords
            assert set(given) == set(wanted)
            continue
        assert list(given) == list(wanted), name
        assert [... if value is inspect.Parameter.empty else value for value in given.values()] == list(
            wanted.values()
        ), name
