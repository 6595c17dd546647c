"""``make house``: size and shape of the product in figures, each with a ceiling that ``make check`` keeps.

Ceilings are in ``integration_tests/house.toml``: they are lowered when a figure has sunk (``--lower``), and raised by
hand, in a commit that says why. :data:`IDEAS` names the definitions that make up an idea: rename them there, too. It
names no modules, so that definitions may move.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bridge.tests.imports import ROOT, TREES, graph_of_modules, longest_chain, modules, parse

CEILINGS: Final = "integration_tests/house.toml"
SHORT_LINES: Final = 3
WELL_BELOW: Final = 0.99
"""Share of its ceiling below which a figure is worth a new one."""

CLIENTS: Final = re.compile(r"(Deserializing)?Consumer|Producer|AdminClient|KafkaClient|Cluster")
"""Classes whose objects dial brokers by their addresses: confluent-kafka's, and ours."""

IDEAS: Final[Mapping[str, str]] = {
    "a wait of the leader": r"""
        (Live)?Wait WaitingRequest HeldRoll Suspended PendingChange Preparation MergeRetry Lingering LateCommits Faults
        BlockedStreams Doubts UnknownOutcomes Rest RetryAfter (why|must)_waits? (give_up|refuse|answer)_waiting
        retry_held hold_request suspend plan_preparation follow_preparations watch_linger await_frames forsake_held""",
    "fencing": r"""
        Fences Owners Lookout FenceMonitor \w*FencedError FenceOthers LostTransactionError FencedError StaleStateError
        ControllerEpoch ProducerFields Lease Lead Leadership ClientSessions fence""",
    "an outcome": r"""
        Outcomes? Outcome(Future|Tail|Client|Store) \w*Outcome(Unknown|Expired|Lost)Error TransactionMetadataPreserver
        Terminated Ended(Ids|Transactions) outcome_(of|document) check_outcomes""",
    "a snapshot": r"""
        \w*Snapshots? Snapshot(Reader|Segment|Plan|Settings|Aborts) (take|write|clear|restore|check)_snapshots
        snapshot_topic(_spec)?""",
    "an adopted topic": r"""
        Adoption TopicGuard adopted adopted_(topics|stream) check_adoptable look_at_topic watch_topics
        ON_ADOPTED ADOPTED_OPERATIONS""",
    "what precedes a segment": r"""
        KeyLineage LineageTails Stage Foundation TruncatedHistory EpochHistory SegmentGraph ReadingPlan
        Chains lineage_svg without_epochs""",
    "a metric": r"""
        \w*Metrics Metrics(Page|Board|Sheet) (Process)?Samples? SampleCollector Family Histogram RequestTimes Counts
        Survey Vitals Tally Counters TransactionCounts Alert (\w+_)?ALERTS Panel board \w+_samples""",
    "a lease": r"""
        (\w+)?Lease SessionPool Lead Leadership Presence Liveness Vigils? PeerWatch
        Coordinator(Roll|Registry) Tenure Witness Register registered""",
    "a record batch": r"""
        RawBatch Batch(Header|Builder|Author) FetchedBatches \w*Record(Batch)?Builder read_chunks
        decode_record rebatch committed_(records|columns) SignedBatch signed_batch encode_batch Slices ProducedBatch
        carry""",
    "a connection to a broker": r"""
        KafkaClient Connection Clusters? ask_leaders LogReader Follower BrokerLink BatchFetcher TransactionalAppender
        Upstream Brokers BrokerWatch Pulse KafkaProbe (ConnectionLost|BrokerGone)Error""",
    "the client's transaction": r"""
        Transaction RawTransaction (Owner)?Writing RecordWriter Part Part(Writer|Stream|Segment) Outbox ManifestRoom
        FrameLayout Completion
        (Write|Commit|Abort|End|Savepoint)Future SavepointLog RequestedEnd (Joint|Cooperative)\w+ Resum(ed\w+|ing|er)
        Author TransactionWriter Runtime TransactionContext Machinery ClientContext BeginPlan Planner CommitsInFlight
        TransactionSpan""",
    "a savepoint": r"""
        Savepoint(\w*[a-z])? (Held|Stored)Savepoint savepoint(_of|_price)? decode_savepoint Save""",
    "a client's session": r"""
        ClientSessions? SharedSession FormerSeries Session(Search|Name|CommitNumbers) Fences Owners Lookout FenceMonitor
        FindSessions (read|next)_session (load|forget)_sessions sessions?""",
    "commit order": r"""
        CommitOrder CommitLines? LineKey OrderKey (Session)?CommitNumbers CommitsInFlight CommitRuns ReadOrders
        order_of (read|highest)_orders""",
    "an option": r"\w*Options? \w*Settings option faults_of",
}
"""For each idea the names of the definitions that make it up, without leading underscores, as regular expressions.

Names that a class is to have are there beside those that it has.
"""

MARKERS: Final = re.compile(
    r"\b(?:nobody|somebody|whoever|stands?|beside|anew|(?:goes|go|going|went) on|(?:is|are|was|were|be) looked)\b",
    re.IGNORECASE,
)
"""Words of sentences that do not say subject, verb, object in the field's words."""
OPENINGS: Final = re.compile(
    r"(?:What|Whether|Who|Whose|Whom|Somebody|Whoever|Nobody|(?:For h|H)ow (?:often|long|many|much))\b"
)
"""How no docstring begins: a function's says what it does, verb first; an attribute's is a noun."""


@dataclass
class House:
    """Figures of a checkout, and what was found for those that are counted by name."""

    figures: dict[str, int]
    chain: Sequence[str]
    clients: Sequence[str]
    ideas: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """All figures, with the number of files of each idea."""
        return {**self.figures, **{f"files for {idea}": len(files) for idea, files in self.ideas.items()}}


def measure(root: Path = ROOT) -> House:
    """Count in a checkout."""
    files = modules(root)
    trees = TREES if root == ROOT else parse(files)
    texts = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    chain = longest_chain(graph_of_modules(trees))
    clients: list[str] = []
    docstrings = comments = code = functions = short = options = errors = requests = markers = 0
    for name, tree in trees.items():
        lines = texts[name].splitlines()
        strings, docs = _string_lines(tree)
        docstrings += len(docs)
        for number, line in enumerate(lines, 1):
            is_comment = line.lstrip().startswith("#") and number not in strings
            comments += is_comment
            code += bool(line.strip()) and not is_comment and number not in docs
        markers += len(list(sentence_markers(texts[name], tree, strings)))
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    functions += 1
                    short += (node.end_lineno or 0) - node.body[0].lineno < SHORT_LINES
                case ast.Call() if CLIENTS.fullmatch(_called(node)):
                    clients.append(f"{name}:{node.lineno} {_called(node)}")
                case ast.ClassDef(name=kind):
                    errors += kind.endswith("Error")
                    options += len(_fields(node)) if kind.endswith(("Options", "Settings")) else 0
                    requests += len(_members(node)) if kind == "RequestKind" else 0
    tests = [*root.glob("*/tests/**/*.py"), *(root / "integration_tests").rglob("*.py"), *root.glob("conftest.py")]
    figures = {
        "lines of the product": sum(_lines(text) for text in texts.values()),
        "files of the product": len(files),
        "lines of tests": sum(_lines(path.read_text(encoding="utf-8")) for path in tests),
        "lines of code": code,
        "lines of docstrings": docstrings,
        "lines of comments": comments,
        "functions": functions,
        "functions of at most three lines, %": 100 * short // max(functions, 1),
        "modules of the longest chain": len(chain),
        "places that construct a Kafka client object": len(clients),
        "options": options,
        "exception classes": errors,
        "kinds of requests over znodes": requests,
        "sentence markers of the product": markers,
        "sentence markers of docs": sum(len(MARKERS.findall(path.read_text(encoding="utf-8"))) for path in pages(root)),
    }
    return House(figures, chain, clients, {idea: files_of(names, trees) for idea, names in IDEAS.items()})


def pages(root: Path) -> list[Path]:
    """Return the pages for readers; what a changelog says of earlier releases stays as it was."""
    return [*root.glob("docs/*.md"), *root.glob("[A-BD-Z]*.md"), *root.glob("CONTRIBUTING.md")]


def sentence_markers(text: str, tree: ast.AST, strings: set[int]) -> Iterator[tuple[int, str]]:
    """Yield line and marker of each in comments and strings, and of each docstring that begins with an opening."""
    for number, line in enumerate(text.splitlines(), 1):
        _, mark, comment = line.partition("#")
        if mark and number not in strings:
            yield from ((number, found[0]) for found in MARKERS.finditer(comment))
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(docstring))) if opening := OPENINGS.match(docstring):
                yield node.lineno, opening[0]
            case ast.Constant(value=str(words)):
                yield from ((node.lineno, found[0]) for found in MARKERS.finditer(words))


def files_of(names: str, trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Return the modules that define one of the names, and what each defines of them."""
    pattern = re.compile("|".join(names.split()))
    found = {
        module: [name for name in definitions(tree) if pattern.fullmatch(name.lstrip("_"))]
        for module, tree in sorted(trees.items())
    }
    return {module: defined for module, defined in found.items() if defined}


def definitions(tree: ast.Module) -> Iterator[str]:
    """Yield the names of a module's classes, functions and constants."""
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def _lines(text: str) -> int:
    return len(text.splitlines())


def _string_lines(tree: ast.AST) -> tuple[set[int], set[int]]:
    """Return the lines within strings of several lines, where no comment begins, and those of docstrings."""
    strings: set[int] = set()
    docs: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                docs.update(range(node.lineno, (node.end_lineno or 0) + 1))
            case ast.Constant(value=str()) | ast.JoinedStr() if node.lineno != node.end_lineno:
                strings.update(range(node.lineno + 1, (node.end_lineno or 0) + 1))
    return strings | docs, docs


def _called(call: ast.Call) -> str:
    target = call.func.value if isinstance(call.func, ast.Subscript) else call.func
    match target:
        case ast.Attribute(attr="of", value=ast.Name(id="KafkaClient" as name)):
            return name
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [item for item in node.body if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.dump(item)]


def _members(node: ast.ClassDef) -> list[ast.Assign]:
    return [item for item in node.body if isinstance(item, ast.Assign)]


# Ceilings


def judge(counts: Mapping[str, int], ceilings: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """Return the faults, and the ceilings that can be lowered."""
    faults = [f"{CEILINGS} has a ceiling for {name!r}, which is no figure" for name in ceilings.keys() - counts.keys()]
    lower: list[str] = []
    for name, count in counts.items():
        ceiling = ceilings.get(name)
        if count == 0 and name.startswith("files for "):
            faults.append(f"{name}: nothing is defined that IDEAS names; name there what makes it up now")
        elif ceiling is None:
            continue
        elif count > ceiling:
            faults.append(
                f"{name}: {count:,}, and the ceiling is {ceiling:,}. Take something away; if it has to grow, raise the "
                f"ceiling in {CEILINGS} and say why in the commit"
            )
        elif count < WELL_BELOW * ceiling:
            lower.append(f"{name}: {count:,}, and the ceiling is {ceiling:,}. Lower it: make house ARGS=--lower")
    return faults, lower


def read_ceilings(root: Path) -> dict[str, int]:
    """Return the ceilings of a checkout."""
    return {str(name): int(value) for name, value in tomllib.loads((root / CEILINGS).read_text()).items()}


def lower_ceilings(root: Path, counts: Mapping[str, int]) -> None:
    """Replace each ceiling by the figure if that is lower."""
    path = root / CEILINGS
    lines = path.read_text().splitlines()
    for name, ceiling in read_ceilings(root).items():
        lines = [
            f'"{name}" = {min(ceiling, counts.get(name, ceiling))}' if line.startswith(f'"{name}" =') else line
            for line in lines
        ]
    path.write_text("\n".join(lines) + "\n")


def _verbose(house: House) -> Iterable[str]:
    yield "longest chain: " + " -> ".join(house.chain)
    yield from ("", "Kafka client objects:", *(f"    {place}" for place in house.clients))
    for idea, files in house.ideas.items():
        yield from ("", f"{idea}:", *(f"    {module}: {' '.join(names)}" for module, names in files.items()))


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Print the figures, or check them; return the exit code."""
    parser = argparse.ArgumentParser(prog="make house", description="Size and shape of the product in figures.")
    parser.add_argument("--verbose", action="store_true", help="also list what was counted, by module")
    parser.add_argument(
        "--trips", action="store_true", help="also count the calls of six trips, on servers of their own"
    )
    parser.add_argument("--markers", metavar="PREFIX", help="list the sentence markers of modules, by line")
    parser.add_argument("--check", action="store_true", help="print nothing but what is above its ceiling, and fail")
    parser.add_argument("--lower", action="store_true", help="lower the ceilings to the figures")
    given = parser.parse_args(arguments)
    if given.markers is not None:
        for name, path in sorted(modules(root).items()):
            if name.startswith(given.markers):
                text = path.read_text(encoding="utf-8")
                tree = ast.parse(text)
                for row, marker in sorted(sentence_markers(text, tree, _string_lines(tree)[0])):
                    print(f"{path.relative_to(root)}:{row}: {marker}")
        return 0
    house = measure(root)
    if given.lower:
        lower_ceilings(root, house.counts)
    if given.check:
        faults, lower = judge(house.counts, read_ceilings(root))
        for line in [*faults, *lower]:
            print(line, file=sys.stderr)
        return 1 if faults else 0
    ceilings = read_ceilings(root)
    for name, count in house.counts.items():
        print(f"{name:<45}{count:>9,}" + (f"   at most {ceilings[name]:,}" if name in ceilings else ""))
    if given.verbose:
        print("", *_verbose(house), sep="\n")
    if given.trips:
        from integration_tests.trips import print_trips

        print_trips()
    return 0


if __name__ == "__main__":
    sys.exit(main())
