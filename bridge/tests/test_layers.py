"""How the house is built: which room imports which, what is pure, and how long the longest chain of imports is.

A room is a package of the client library, or a module next to packages; coordinator, gateway and development cluster
are one room each. Imports for types count as any other.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from bridge.tests.imports import FILES, ROOT, TREES, Graph, graph_of_modules, imports_of, longest_chain

ROOMS: Final = (
    "rollbridge.version",
    "rollbridge.base",
    "rollbridge.stream",
    "rollbridge.commitlog",
    "rollbridge.kafka",
    "rollbridge.buffer",
    "rollbridge.metadata",
    "rollbridge.lease",
    "rollbridge.config",
    "rollbridge.writer",
    "rollbridge.cas",
    "rollbridge.consumer",
    "rollbridge.client",
    "rollbridge.spark",
    "rollbridge.metrics",
    "rollbridge.observe",
    "rollbridge.monitoring",
    "rollbridge.doctor",
    "rollbridge.cli",
)
"""Rooms of the client library: each imports what is above it."""
KERNEL: Final = frozenset(ROOMS[: ROOMS.index("rollbridge.writer")]) | {"rollbridge.observe", "rollbridge.metrics"}
"""What coordinator and gateway are built on."""
BEYOND_KERNEL: Final[Mapping[str, frozenset[str]]] = {
    "rollbridge_coordinator.page.server": frozenset({"rollbridge.client"}),
    "rollbridge_coordinator.page.sources": frozenset({"rollbridge.doctor"}),
    "rollbridge_gateway.__main__": frozenset({"rollbridge.client"}),
    "rollbridge_gateway.producer.transactions": frozenset({"rollbridge.client"}),
    "rollbridge_gateway.producer.writes": frozenset({"rollbridge.client"}),
    "rollbridge_gateway.server.context": frozenset({"rollbridge.client"}),
    "rollbridge_gateway.server.server": frozenset({"rollbridge.client"}),
    "rollbridge_gateway.server.topics": frozenset({"rollbridge.client"}),
}
"""Files that use more: the page acts as a client and shows what the doctor says; gateways write client transactions."""
KERNEL_NAMES_MAX: Final = 470
"""Names of the kernel that coordinator and gateway import; about 60 will do once each of them exists once."""
CHAIN_MAX: Final = 25
"""Modules of the longest chain of imports."""

PURE: Final[Mapping[str, frozenset[str]]] = {
    "rollbridge.stream": frozenset(),
    "rollbridge.commitlog": frozenset(),
    "rollbridge.buffer": frozenset({"snapshot_topic"}),
    "rollbridge.metadata": frozenset({"session", "store", "catalog", "acls", "errors", "gateway_store"}),
    "rollbridge_coordinator.core": frozenset(
        {"interpreter", "frame_reader", "merge_pool", "condition_reader", "transactional_ids"}
    ),
    "rollbridge_coordinator.commit": frozenset(),
    "rollbridge_coordinator.streams": frozenset(),
    "rollbridge_coordinator.history": frozenset({"standby"}),
    "rollbridge_gateway.protocol": frozenset({"errors"}),
    "rollbridge_gateway.producer": frozenset({"expiration", "ids", "transactions", "writes"}),
}
"""Rooms that are pure, but for the files named: no thread, clock, socket, environment or client library."""
PURE_FILES: Final = {
    *("errors", "base.arguments", "base.attribution", "base.avro", "base.effects", "base.errors"),
    *("base.ids", "base.mapper", "base.metrics", "base.options", "base.sn", "base.text", "cas.shared_state"),
    *("kafka.records", "kafka.committed", "kafka.describe", "kafka.queues", "kafka.record_limits", "writer.segments"),
}
PURE_PAGE: Final = {"daemon.succession", "page.admission", "page.documents", "page.overview"}
"""Pure files of other rooms."""
WORLD: Final = {
    *("asyncio", "concurrent", "confluent_kafka", "http", "kazoo", "multiprocessing", "os", "pathlib", "pyspark"),
    *(
        "prometheus_client",
        "queue",
        "random",
        "selectors",
        "signal",
        "socket",
        "ssl",
        "subprocess",
        "threading",
        "time",
    ),
    "uvloop",
}
"""Modules that a pure file does not import."""
BY_NAME = {
    "rollbridge": "public names are imported when they are first used",
    "rollbridge.cli.main": "so are commands",
    "rollbridge.cli.services": "coordinator and gateway are built on the client, and may not be installed",
    "rollbridge_gateway.protocol.wire": "kio has a module for each version of each message",
    "rollbridge.cli.status": "the development cluster is built on the client, and may not be installed",
    "rollbridge_devcluster.__main__": "psutil may not be installed",
}
"""Modules that import others of ours by name, and why."""
LATE = {
    "rollbridge.spark.datasource": "Spark starts several processes for each query, which need one format each",
    "rollbridge.spark.source": "the same, with planning and reading",
}
"""Modules with imports in functions, and why."""

ENVIRONMENT = {
    "rollbridge.config": "settings of a connection, and the home of the development cluster",
    "rollbridge.base.logs": "where a program's log goes",
    "rollbridge.cli.services": "hands the settings' file on",
    "rollbridge.cli.status": "whether another cluster is named",
    "rollbridge_devcluster.jars": "the Maven repository",
    "rollbridge_devcluster.java": "JAVA_HOME",
    "rollbridge_devcluster.processes": "what daemons inherit",
    "rollbridge.spark.worker": "Spark's own variable for its workers",
    "rollbridge_coordinator.config": "settings of a coordinator",
    "rollbridge.observe.healthcheck": "where metrics are served",
    "rollbridge_gateway.__main__": "the settings' file",
}
"""Modules that read environment variables, and which. None of them is for tests."""
DEADLY = {"_exit", "abort", "kill", "killpg", "pthread_kill", "raise_signal", "SIGKILL", "SIGSTOP"}
ENDS_PROCESSES = {
    "rollbridge_coordinator.daemon.main": "a coordinator that was asked to end does, whatever server it waits for",
    "rollbridge_devcluster.nodes": "faults of daemons of the development cluster",
    "rollbridge_devcluster.processes": "the same, and those that do not end when they are asked to",
    "rollbridge_devcluster.reaper": "the same, when nobody is left who could ask them",
}
"""Modules that end processes or let them stand still, and why. Crash points of tests are injected by them."""


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
    """Return the room of a module: a package of the client library, or one of the programs as a whole."""
    if module == "rollbridge.errors":  # public, so it is outside of the package
        return "rollbridge.base"
    names = module.split(".")
    return ".".join(names[:2]) if names[0] == "rollbridge" else names[0]


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


def test_no_room_and_no_module_leads_back_to_itself() -> None:
    assert circles(graph_of_rooms()) == []
    assert circles(graph_of_modules()) == []


def test_no_import_by_name_leads_back_to_the_module_that_it_is_in() -> None:
    graph = graph_of_modules()
    assert circles({name: graph[name] | set(named_in(tree)) for name, tree in TREES.items()}) == []


def test_each_room_imports_what_is_above_it() -> None:
    places = {room: place for place, room in enumerate(ROOMS)}
    graph = {room: targets for room, targets in graph_of_rooms().items() if room in places}
    assert {room_of(name) for name in FILES if name.startswith("rollbridge.")} == {*ROOMS, "rollbridge.__main__"}
    wrong = [(room, item) for room, targets in graph.items() for item in targets if places.get(item, 0) > places[room]]
    assert sorted(wrong) == []
    assert {item for targets in graph.values() for item in targets} <= {*places, "rollbridge", "rollbridge_schemas"}


def test_the_longest_chain_of_modules_is_short() -> None:
    chain = longest_chain(graph_of_modules())
    assert len(chain) <= CHAIN_MAX, " -> ".join(chain)


def outside(tree: ast.AST) -> set[str]:
    """Return the packages that are imported somewhere below."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found |= {name.name.partition(".")[0] for name in names}
            case ast.ImportFrom(module=str(module)):
                found.add(module.partition(".")[0])
    return found


def pure_files(names: Iterable[str] = FILES) -> set[str]:
    """Return the files of pure rooms that do no I/O, and the pure ones of other rooms."""
    found = {f"rollbridge.{name}" for name in PURE_FILES} | {f"rollbridge_coordinator.{name}" for name in PURE_PAGE}
    for name in names:
        room, _, leaf = name.rpartition(".")
        if room in PURE and leaf not in PURE[room]:
            found.add(name)
    return found


def test_pure_files_import_only_pure_files() -> None:
    pure = pure_files()
    assert pure <= set(FILES)
    allowed = pure | set(PURE) | {"rollbridge_schemas"}
    graph = graph_of_modules()
    assert {name: sorted(graph[name] - allowed) for name in pure if graph[name] - allowed} == {}
    found = {name: sorted(outside(TREES[name]) & WORLD) for name in pure}
    assert {name: world for name, world in found.items() if world} == IMPURE


IMPURE: Final[Mapping[str, list[str]]] = {
    "rollbridge.base.metrics": ["threading"],
    "rollbridge.kafka.record_limits": ["time"],
    "rollbridge.stream.keyspace": ["confluent_kafka"],
    "rollbridge_coordinator.page.admission": ["http"],
}
"""Pure files that use the world all the same: a lock for counters, the time of a write, a hash, names of statuses."""


def kernel_names() -> set[tuple[str, str]]:
    """Return the names of the client library that coordinator and gateway import, with their modules."""
    found: set[tuple[str, str]] = set()
    for name, tree in TREES.items():
        if name.startswith(("rollbridge_coordinator", "rollbridge_gateway")):
            for node in ast.walk(tree):
                match node:
                    case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] == "rollbridge":
                        found |= {(module, item.name) for item in names}
    return found


def test_coordinator_and_gateway_are_built_on_the_kernel() -> None:
    for name, targets in graph_of_modules().items():
        if name.startswith(("rollbridge_coordinator", "rollbridge_gateway")):
            rooms = {room_of(target) for target in targets if target.startswith("rollbridge.")}
            assert rooms - KERNEL == BEYOND_KERNEL.get(name, frozenset()), name
            assert not targets & set(FILES) & {item for item in FILES if item.startswith("rollbridge_devcluster")}
    assert len(kernel_names()) <= KERNEL_NAMES_MAX
    programs = {"rollbridge_coordinator", "rollbridge_gateway", "rollbridge_devcluster"}
    assert not graph_of_rooms()["rollbridge_coordinator"] & programs
    assert not graph_of_rooms()["rollbridge_gateway"] & programs


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
    program = "import sys; sys.modules['crc32c'] = None; import rollbridge.client.connection, "
    program += "rollbridge_coordinator.daemon.main, rollbridge_gateway.__main__"
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


def test_no_test_imports_from_a_file_of_tests() -> None:
    found = {
        str(path.relative_to(ROOT)): node.module
        for path in ROOT.glob("*/**/*.py")
        if "tests" in str(path.relative_to(ROOT)) and ".venv" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and re.search(r"(^|\.)test_\w+$", node.module or "")
    }
    assert found == {}
