"""One meaning for each word: no two classes, and no class and type alias, of the product share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from bridge.tests.imports import TREES


def types_in(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The classes and type aliases of a module, by name, with what they are: aliases of the same type mean the same."""
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name):
                yield name, ""
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() | ast.BinOp() as value):
                # Type aliases are written in CamelCase, constants in capitals.
                if name[0].isupper() and not name.isupper():
                    yield name, ast.unparse(value)


def meanings(trees: dict[str, ast.Module]) -> dict[str, set[tuple[str, str]]]:
    """For each name its meanings: the module of a class, the type of an alias."""
    found: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    for module, tree in trees.items():
        for name, alias in types_in(tree):
            found[name].add(("", alias) if alias else (module, ""))
    return dict(found)


def test_no_name_of_a_type_has_two_meanings() -> None:
    several = {name: sorted(of) for name, of in meanings(TREES).items() if len(of) > 1}
    assert several == {}


def test_the_check_finds_what_it_is_for() -> None:
    one = ast.parse("class Batch: ...\nclass Lane: ...\nHeaders = list[str]\nLIMIT = 3 + 4")
    other = ast.parse("class Batch: ...\nLane = int | str\nHeaders = list[str]\nLIMIT = 4 + 5")
    assert set(meanings({"a": one})) == {"Batch", "Lane", "Headers"}
    assert {name for name, of in meanings({"a": one, "b": other}).items() if len(of) > 1} == {"Batch", "Lane"}
