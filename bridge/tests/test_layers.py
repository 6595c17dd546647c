"""How the house is built: which room imports which, and that it goes one way.

A room is a package, or a module that lies loose beside packages. Imports for types count as any other.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "bridge": ("rollbridge", "pyspark_rollbridge", "pyspark_rollbridge_transactions"),
    "coordinator": ("rollbridge_coordinator",),
    "devcluster": ("rollbridge_devcluster",),
    "gateway": ("rollbridge_gateway",),
    "schemas": ("rollbridge_schemas",),
}
FLAT = "rollbridge_devcluster"
LAYERS_MAX = 10
BY_NAME = {
    "rollbridge": "public names are imported when they are first used",
    "rollbridge.cli.main": "so are commands",
    "rollbridge.cli.services": "coordinator and gateway are built on the client, and may not be installed",
    "rollbridge_gateway.wire": "kio has a module for each version of each message",
    "rollbridge.cli.status": "the development cluster is built on the client, and may not be installed",
    "rollbridge_devcluster.__main__": "what talks to a container engine may not be installed",
    "rollbridge_devcluster.reaper": "the same",
}
"""Modules that import others of ours by name, and why."""
LATE = {
    "rollbridge.spark.datasource": "Spark starts several processes for each query, which need one format each",
    "rollbridge.spark.source": "the same, with planning and reading",
}
"""Modules with imports in functions, and why."""

ENVIRONMENT = {
    "rollbridge.config": "settings of a connection, and the home of the development cluster",
    "rollbridge.logs": "where a program's log goes",
    "rollbridge.cli.services": "hands the settings' file on",
    "rollbridge.cli.status": "whether another cluster is named",
    "rollbridge_devcluster.engine": "where a container engine's ports are",
    "rollbridge_devcluster.jars": "the Maven repository",
    "rollbridge_devcluster.java": "JAVA_HOME",
    "rollbridge_devcluster.processes": "what daemons inherit",
    "rollbridge.spark.worker": "Spark's own variable for its workers",
    "rollbridge_coordinator.config": "settings of a coordinator",
    "rollbridge.serving.healthcheck": "where metrics are served",
    "rollbridge_gateway.__main__": "the settings' file",
}
"""Modules that read environment variables, and which. None of them is for tests."""
DEADLY = {"_exit", "abort", "kill", "killpg", "pthread_kill", "raise_signal", "SIGKILL", "SIGSTOP"}
ENDS_PROCESSES = {
    "rollbridge_coordinator.shell.daemon": "a coordinator that was asked to end does, whatever server it waits for",
    "rollbridge_devcluster.nodes": "faults of daemons of the development cluster",
    "rollbridge_devcluster.processes": "the same, and those that do not end when they are asked to",
    "rollbridge_devcluster.containers": "the same, in containers",
    "rollbridge_devcluster.reaper": "the same, when nobody is left who could ask them",
}
"""Modules that end processes or let them stand still, and why. Crash points of tests are injected by them."""

Graph = Mapping[str, Collection[str]]


def modules() -> dict[str, Path]:
    """The files of the product, by module."""
    found: dict[str, Path] = {}
    for folder, packages in PACKAGES.items():
        for package in packages:
            for path in (ROOT / folder / package).rglob("*.py"):
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


FILES = modules()
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def imports_of(tree: ast.AST) -> Iterator[str]:
    """The modules of ours that are imported somewhere below."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name in FILES)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                for name in names:
                    longer = f"{module}.{name.name}"
                    if longer in FILES or module in FILES:
                        yield longer if longer in FILES else module


def names_in(tree: ast.AST) -> set[str]:
    """What a module of Python's is asked for: ``kill`` of ``os.kill`` and of ``from os import kill``."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os" | "signal" | "processes" | "psutil"), attr=name):
                found.add(name)
            case ast.ImportFrom(module="os" | "signal", names=names):
                found |= {name.name for name in names}
    return found


def imports_by_name(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls that import a module of ours, or one of which only the running program knows the name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            match node.args:
                case [ast.Constant(value=str(name))] if not name.startswith("rollbridge"):
                    continue
            yield node


def named_in(tree: ast.AST) -> Iterator[str]:
    """The modules of ours that are imported by a name that stands in the code."""
    for call in imports_by_name(tree):
        match call.args:
            case [ast.Constant(value=str(name)), *_] if name in FILES:
                yield name


def room_of(module: str) -> str:
    """A package, or a loose module; what lies directly in one of the distribution's packages is loose.

    The development cluster is one room, as it has none inside.
    """
    return FLAT if module.partition(".")[0] == FLAT else ".".join(module.split(".")[:2])


def graph_of_modules() -> dict[str, set[str]]:
    return {name: set(imports_of(tree)) - {name} for name, tree in TREES.items()}


def graph_of_rooms() -> dict[str, set[str]]:
    rooms: defaultdict[str, set[str]] = defaultdict(set)
    for name, targets in graph_of_modules().items():
        rooms[room_of(name)] |= {room_of(target) for target in targets} - {room_of(name)}
    return dict(rooms)


def circles(graph: Graph) -> list[list[str]]:
    """Sets of nodes that lead to each other (Tarjan)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = low[node] = len(number)
        stack.append(node)
        for target in graph.get(node, ()):
            if target not in number:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], number[target])
        if low[node] == number[node]:
            place = stack.index(node)
            if len(stack) - place > 1:
                found.append(sorted(stack[place:]))
            del stack[place:]

    for node in graph:
        if node not in number:
            visit(node)
    return found


def longest_chain(graph: Graph) -> list[str]:
    """The longest way along a graph without circles."""

    known: dict[str, list[str]] = {}

    def below(node: str) -> list[str]:
        if node not in known:
            longest: list[str] = []
            for target in sorted(graph.get(node, ())):
                way = below(target)
                longest = way if len(way) > len(longest) else longest
            known[node] = [node, *longest]
        return known[node]

    return below(max(sorted(graph), key=lambda node: len(below(node))))


def test_no_room_and_no_module_leads_back_to_itself() -> None:
    assert circles(graph_of_rooms()) == []
    assert circles(graph_of_modules()) == []


def test_no_import_by_name_leads_back_to_the_module_that_it_is_in() -> None:
    graph = graph_of_modules()
    assert circles({name: graph[name] | set(named_in(tree)) for name, tree in TREES.items()}) == []


def test_there_are_few_layers() -> None:
    chain = longest_chain(graph_of_rooms())
    assert len(chain) <= LAYERS_MAX, " -> ".join(chain)


@pytest.mark.parametrize(
    ("below", "above"),
    [
        ("rollbridge.model", {"rollbridge_schemas"}),
        ("rollbridge_coordinator.state", {"rollbridge.model", "rollbridge.errors"}),
        (
            "rollbridge_coordinator.procedures",
            {"rollbridge.model", "rollbridge.errors", "rollbridge_coordinator.state"},
        ),
        ("rollbridge.config", {"rollbridge.model", "rollbridge.errors", "rollbridge.security"}),
    ],
)
def test_what_is_pure_imports_nothing_that_is_not(below: str, above: set[str]) -> None:
    assert graph_of_rooms()[below] <= above


def test_nothing_of_the_client_imports_the_coordinator_or_the_development_cluster() -> None:
    for room, targets in graph_of_rooms().items():
        assert not targets & {"rollbridge_coordinator"}
        assert room == "rollbridge_devcluster" or "rollbridge_devcluster" not in targets, room


def test_no_import_is_hidden_in_a_function() -> None:
    hidden = {
        name
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(imports_of(node))
    }
    assert hidden == set(LATE)
    assert {name for name, tree in TREES.items() if any(imports_by_name(tree))} == set(BY_NAME)


def test_no_module_reads_the_environment_or_ends_a_process_for_a_test() -> None:
    found = {name: names_in(tree) for name, tree in TREES.items()}
    assert {name for name, names in found.items() if names & {"environ", "getenv", "environb"}} == set(ENVIRONMENT)
    assert {name for name, names in found.items() if names & DEADLY} == set(ENDS_PROCESSES)


def test_what_is_left_out_of_the_locks_is_not_imported() -> None:
    program = "import sys; sys.modules['crc32c'] = None; import rollbridge.connection, "
    program += "rollbridge_coordinator.shell.daemon, rollbridge_gateway.shell.daemon"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not [name for name, tree in TREES.items() if "kio.records" in ast.unparse(tree)]


def test_the_checks_find_what_they_are_for() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": set()}) == []
    assert longest_chain({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == ["a", "b", "c"]
    assert names_in(ast.parse("os.kill(0, signal.SIGKILL)\nfrom os import _exit")) == {"kill", "SIGKILL", "_exit"}
    assert list(imports_of(ast.parse("def f():\n    from rollbridge.kafka import connection"))) == [
        "rollbridge.kafka.connection"
    ]
