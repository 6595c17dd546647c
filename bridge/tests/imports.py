"""The import graph of the product: which module imports which, by what its source says."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = {
    "bridge": ("rollbridge", "pyspark_rollbridge", "pyspark_rollbridge_transactions"),
    "coordinator": ("rollbridge_coordinator",),
    "devcluster": ("rollbridge_devcluster",),
    "gateway": ("rollbridge_gateway",),
    "schemas": ("rollbridge_schemas",),
}

Graph = Mapping[str, Collection[str]]


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return the files of the product, by module."""
    found: dict[str, Path] = {}
    for folder, packages in PACKAGES.items():
        for package in packages:
            for path in (root / folder / package).rglob("*.py"):
                parts = path.relative_to(root / folder).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def parse(files: Mapping[str, Path]) -> dict[str, ast.Module]:
    """Return the syntax trees of files, by module."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in files.items()}


FILES: Final = modules()
TREES: Final = parse(FILES)


def imports_of(tree: ast.AST, known: Collection[str] = FILES) -> Iterator[str]:
    """Yield the ``known`` modules that are imported somewhere below."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name in known)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                for name in names:
                    longer = f"{module}.{name.name}"
                    if longer in known or module in known:
                        yield longer if longer in known else module


def graph_of_modules(trees: Mapping[str, ast.AST] = TREES) -> dict[str, set[str]]:
    """Return for each module those that it imports."""
    return {name: set(imports_of(tree, trees)) - {name} for name, tree in trees.items()}


def longest_chain(graph: Graph) -> list[str]:
    """Return the longest path along a graph without circles."""
    known: dict[str, list[str]] = {}

    def below(node: str) -> list[str]:
        if node not in known:
            longest: list[str] = []
            for target in sorted(graph.get(node, ())):
                way = below(target)
                longest = way if len(way) > len(longest) else longest
            known[node] = [node, *longest]
        return known[node]

    return max((below(node) for node in sorted(graph)), key=len)
