"""``make mutants``: break one line for each guarantee, and see whether the tests that its row names notice.

:data:`ROWS` names code that holds the promise of that number in ``docs/guarantees.md``. One place in it is chosen at
random and changed: a condition is negated, a comparison or a number is off by one, or a statement is left out. Then the
row's tests run: those that need no servers and are no simulations, but for rows that nothing smaller holds
(:data:`WHOLE`). A mutant that they do not notice *survives*: a hole in the tests, or a change that makes no difference,
which :data:`SAME` says then.

All of it happens in a copy of the checkout, which stays as it is. ``--write`` puts the survivors into
``docs/testing.md``.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
GUARANTEES: Final = "docs/guarantees.md"
REPORT: Final = "docs/testing.md"
SOURCES: Final = ("bridge", "coordinator", "devcluster", "gateway", "schemas")
TESTS_S: Final = 600.0
"""A mutant that makes the tests of a row take longer is noticed."""

ROWS: Final[Mapping[int, Sequence[str]]] = {
    3: ("bridge/rollbridge/buffer/state.py: BufferedTransaction.merged_frames BufferedTransaction._matched",),
    5: ("bridge/rollbridge/commitlog/commit_order.py: CommitLine order_of CommitLines.release CommitLines.due",),
    6: ("bridge/rollbridge/stream/reading.py: ReadingPlan",),
    9: ("bridge/rollbridge/buffer/fold.py: BufferFold.expire",),
    14: ("bridge/rollbridge/stream/reading.py: ReadingPlan",),
    18: ("bridge/rollbridge/stream/conditions.py: holds is_refuted place_of",),
    28: ("bridge/rollbridge/stream/conditions.py: _falling",),
    33: ("bridge/rollbridge/buffer/owners.py: Owners",),
    36: ("bridge/rollbridge/stream/truncation.py: floors_of consistent removable",),
    39: ("bridge/rollbridge/stream/epochs.py: without_epochs", "bridge/rollbridge/stream/truncation.py: first_needed"),
    41: ("bridge/rollbridge/metadata/client_sessions.py: decide_step decide_again SharedSession",),
    65: ("bridge/rollbridge/metadata/client_sessions.py: SharedSession decide_step",),
    68: ("bridge/rollbridge/stream/keyspace.py: KeySpace native_partition",),
    72: ("bridge/rollbridge/stream/epochs.py: EpochHistory.plan_rolling common_parts",),
    73: ("coordinator/rollbridge_coordinator/core/waits.py: Lingering LateCommits",),
    75: ("bridge/rollbridge/commitlog/outcomes.py: EndedIds",),
    77: (
        "bridge/rollbridge/kafka/committed.py: seen_in may_lack_heads",
        "bridge/rollbridge/consumer/records.py: _KnownRuns",
    ),
    78: ("bridge/rollbridge/base/mapper.py: is_version content_of unreadable",),
    81: ("bridge/rollbridge/doctor/verification.py: SegmentCheck",),
    86: ("bridge/rollbridge/buffer/savepoints.py: SavepointFrame HeldSavepoint StoredSavepoint",),
    88: ("gateway/rollbridge_gateway/producer/table.py: found ProducerState",),
    89: ("gateway/rollbridge_gateway/server/framing.py: Pace",),
    92: ("gateway/rollbridge_gateway/server/handlers.py: Login",),
    93: ("bridge/rollbridge/lease.py: Tenure Witness Lease",),
    94: ("gateway/rollbridge_gateway/producer/expiration.py: is_due sweep",),
    96: ("gateway/rollbridge_gateway/server/cluster.py: Departures ToldDepartures",),
    97: ("coordinator/rollbridge_coordinator/core/requests.py: put_question _delete",),
    98: ("coordinator/rollbridge_coordinator/core/state.py: GroupState.is_folded",),
    99: (
        "coordinator/rollbridge_coordinator/streams/unled.py: load_streams buffer_fault _load _exclude",
        "coordinator/rollbridge_coordinator/core/waits.py: Suspects",
        "bridge/rollbridge/metadata/journal.py: deleted_by_hand",
    ),
    100: (
        "coordinator/rollbridge_coordinator/streams/unled.py: end_lost _end_unread _is_lost",
        "bridge/rollbridge/kafka/topics.py: view_each _view",
    ),
    101: (
        "coordinator/rollbridge_coordinator/history/takeover.py: _finish",
        "coordinator/rollbridge_coordinator/streams/pending_changes.py: read_change halt",
    ),
    102: (
        "coordinator/rollbridge_coordinator/core/merge_pool.py: is_late",
        "coordinator/rollbridge_coordinator/commit/large.py: _begin_again",
    ),
    103: ("bridge/rollbridge/client/sessions.py: ClientSessions.places ClientSessions.take_over",),
    104: ("bridge/rollbridge/kafka/dispatch.py: Dispatcher.reach Dispatcher._open Dispatcher.reset",),
    105: (
        "bridge/rollbridge/kafka/metadata.py: MetadataCache Cluster.forget_leader Cluster._believed Cluster._in_turn",
        "bridge/rollbridge/kafka/transactions.py: ask_coordinator",
    ),
    106: ("bridge/rollbridge/doctor/checks.py: native_transactions",),
    107: ("bridge/rollbridge/kafka/queues.py: Lane",),
    108: (
        "bridge/rollbridge/metadata/records.py: TopicNames.of",
        "gateway/rollbridge_gateway/server/topics.py: Topics.look Topics.saw Topics.stream_of Topics._read",
    ),
    109: ("bridge/rollbridge/writer/sender.py: PlainSender._leave PlainSender._lose PlainSender.changed",),
    110: ("bridge/rollbridge/client/connection.py: _Parts",),
    111: ("bridge/rollbridge/consumer/consumer.py: as_kafka_exception as_theirs",),
    112: ("bridge/rollbridge/base/attribution.py: unpack_run own_header",),
    113: ("bridge/rollbridge/base/errors.py: PortableError _restored",),
    114: ("bridge/rollbridge/observe/http_service.py: ConnectionSlots network_of",),
    115: (
        "bridge/rollbridge/metadata/picture.py: stream_state GroupPicture.fault ClusterPicture.faults",
        "bridge/rollbridge/doctor/checks.py: reach fold",
        "coordinator/rollbridge_coordinator/daemon/health.py: ReachWatch.look _fault_of",
    ),
    116: ("bridge/rollbridge/base/text.py: printable",),
    117: (
        "gateway/rollbridge_gateway/server/server.py: telling",
        "bridge/rollbridge/base/security.py: validities _validity _time _element",
        "gateway/rollbridge_gateway/settings.py: GatewaySettings.check_certificate",
    ),
    118: ("coordinator/rollbridge_coordinator/daemon/succession.py: stands_in_s hands_over_to Setbacks",),
    119: (
        "bridge/rollbridge/metadata/journal.py: begin_log _streams_in",
        "coordinator/rollbridge_coordinator/streams/unled.py: look_at_streams _make_buffers",
        "coordinator/rollbridge_coordinator/history/commit_log.py: keep_emptied _has_outcome may_have_ended",
    ),
    122: ("coordinator/rollbridge_coordinator/core/transactional_ids.py: CommitGuard",),
    123: ("bridge/rollbridge/kafka/metadata.py: Clusters",),
    124: ("bridge/rollbridge/kafka/metadata.py: Cluster.expire Cluster.learn",),
    125: (
        "bridge/rollbridge/kafka/metadata.py: Clusters.give_back Cluster.forget",
        "bridge/rollbridge/kafka/transactions.py: ProduceSession.check",
    ),
    128: ("bridge/rollbridge/client/protocol.py: TransactionProtocol.due TransactionProtocol.commit",),
}
"""Code that holds a row: ``FILE: FUNCTION CLASS CLASS.METHOD ...``."""

WHOLE: Final = frozenset({103, 104, 109, 110, 111, 119, 128})
"""Rows of which all tests run, simulations and those with servers: minutes for each mutant."""

SAME: Final[Mapping[str, str]] = {
    "bridge/rollbridge/commitlog/commit_order.py CommitLine: `number < self.floor` → `(number <= self.floor)`": (
        "a commit that is held has been met, so its own number never is the floor"
    ),
    "bridge/rollbridge/client/sessions.py ClientSessions.take_over: `unanswered[group] = fault` → `pass`": (
        "who asks then asks that group once more, and is not answered either"
    ),
    "bridge/rollbridge/doctor/checks.py native_transactions: `native.age_s > HANGING.total_seconds()` → "
    "`(native.age_s >= HANGING.total_seconds())`": "no age is that to the last digit",
    "bridge/rollbridge/kafka/metadata.py Clusters.give_back: `time.monotonic() - self._idle[0][1] > _IDLE_S` → "
    "`(time.monotonic() - self._idle[0][1] >= _IDLE_S)`": "nothing is idle for that to the last digit",
    "bridge/rollbridge/kafka/transactions.py ask_coordinator: `time.sleep(min(pause_s, _MARKERS_BACKOFF_MAX_S) if "
    "markers else pause_s)` → `pass`": "it asks more often, and gets the same answer",
    "bridge/rollbridge/kafka/transactions.py ask_coordinator: `markers` → `(not (markers))`": (
        "it asks at another pace, and gets the same answer"
    ),
    "bridge/rollbridge/observe/http_service.py ConnectionSlots: `del self._taken[id(leaves)]` → `pass`": (
        "the thread of who is sent away gives the place back, a moment later"
    ),
    "coordinator/rollbridge_coordinator/daemon/succession.py Setbacks: `now_s - began_s > REST_MAX_S` → "
    "`(now_s - began_s >= REST_MAX_S)`": "no term lasts for that to the last digit",
    "gateway/rollbridge_gateway/server/server.py telling: `raise self._fault` → `pass`": (
        "OpenSSL raises the same again, to a client that goes on to send after its alert"
    ),
}
"""Mutants that make no difference, as ``FILE FUNCTION: CHANGE``, and why."""

_ROW: Final = re.compile(r"^\| (?P<number>\d+) \|.*\| (?P<held>[^|]*) \|$", re.MULTILINE)
_TEST: Final = re.compile(r"`([\w/]+\.py::[^`]+)`")
_NEXT: Final[Mapping[type[ast.cmpop], str]] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_MARKS: Final = ("<!-- survivors of `make mutants` -->", "<!-- end of survivors -->")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of a file: what stands from ``start`` to ``end``, in bytes, is replaced."""

    file: str
    name: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file} {self.name}: `{_short(self.old)}` → `{_short(self.new)}`"

    def apply(self, root: Path) -> bytes:
        """Change the file, and return what it was."""
        path = root / self.file
        before = path.read_bytes()
        path.write_bytes(before[: self.start] + self.new.encode() + before[self.end :])
        return before


def mutants_of(root: Path, place: str) -> list[Mutant]:
    """Return all mutants of the functions that a place of :data:`ROWS` names.

    Raises:
        LookupError: one of them is not in the file.
    """
    file, _, names = place.partition(": ")
    source = (root / file).read_text(encoding="utf-8")
    known = dict(_definitions(ast.parse(source)))
    lines = [0, *(len(line.encode()) for line in source.splitlines(keepends=True))]
    begins = [sum(lines[: number + 1]) for number in range(len(lines))]
    raw = source.encode()
    found = []
    for name in names.split():
        if name not in known:
            raise LookupError(f"{file} has no {name}; mend ROWS")
        for node, new in _changes(known[name]):
            start, end = (begins[at - 1] + column for at, column in _span(node))
            old = raw[start:end].decode()
            text = new.format(old) if "{}" in new else new
            ast.parse(raw[:start] + text.encode() + raw[end:])
            found.append(Mutant(file, name, node.lineno, start, end, old, text))
    return found


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{it.name}", it) for it in node.body if isinstance(it, ast.FunctionDef))


def _changes(tree: ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield each expression or statement that can be changed, and its replacement; ``{}`` is what it was."""
    # Python 3.11 does not know where in a file the parts of an f-string are; what the log says is left alone.
    spared = {part for it in ast.walk(tree) if isinstance(it, ast.JoinedStr) or _logs(it) for part in ast.walk(it)}
    for node in filter(lambda it: it not in spared, ast.walk(tree)):
        match node:
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                yield test, "(not ({}))"
            case ast.comprehension(ifs=tests):
                yield from ((test, "(not ({}))") for test in tests)
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _NEXT:
                yield node, f"({ast.unparse(left)} {_NEXT[type(op)]} {ast.unparse(right)})"
            case ast.BoolOp(values=[first, *_]):
                yield node, f"({ast.unparse(first)})"
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=ast.Constant(value=int())):
                yield node, f"({ast.unparse(left)})"
            case ast.Raise() | ast.Delete() | ast.AugAssign() | ast.Continue():
                yield node, "pass"
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield node, "pass"
            case ast.Expr(value=ast.Call()):
                yield node, "pass"
            case _:
                pass


def _logs(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith("logger.")


def _span(node: ast.expr | ast.stmt) -> tuple[tuple[int, int], tuple[int, int]]:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _short(text: str) -> str:
    shown = " ".join(text.split()).replace("`", "'").replace("|", "¦")
    return shown if len(shown) <= 90 else f"{shown[:89]}…"


def named_tests(root: Path, number: int) -> list[str]:
    """Return the tests of a row that run here."""
    text = (root / GUARANTEES).read_text(encoding="utf-8")
    held = {int(row["number"]): row["held"] for row in _ROW.finditer(text)}[number]
    small = [
        test for test in _TEST.findall(held) if not test.startswith("integration_tests/") and "imulation" not in test
    ]
    return _TEST.findall(held) if number in WHOLE else small


def copied(root: Path, place: Path) -> Path:
    """Copy what git knows of a checkout, changes that are not committed included."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (root / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, place / name)
    return place


def passes(root: Path, tests: Sequence[str]) -> bool:
    """Return whether tests pass with the code of a copy, within :data:`TESTS_S`."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(str(root / name) for name in SOURCES)}
    environ["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    with subprocess.Popen(
        command, cwd=root, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as running:
        try:
            return running.wait(TESTS_S) == 0
        except BaseException as fault:
            os.killpg(running.pid, signal.SIGKILL)
            if isinstance(fault, subprocess.TimeoutExpired):
                return False
            raise


def survivors(root: Path, rows: Sequence[int], each: int, seed: int) -> Iterator[tuple[int, Mutant]]:
    """Try mutants of each row, in a copy that may be changed, and yield those that its tests do not notice.

    Raises:
        RuntimeError: the tests of a row fail without a mutant.
    """
    for number in rows:
        choice, tests = random.Random(f"{seed} {number}"), named_tests(root, number)
        found = [it for place in ROWS[number] for it in mutants_of(root, place) if str(it) not in SAME]
        if not passes(root, tests):
            raise RuntimeError(f"row {number}: its tests fail as it is: {' '.join(tests)}")
        for mutant in choice.sample(found, min(each, len(found))):
            begun, before = time.monotonic(), mutant.apply(root)
            try:
                survives = passes(root, tests)
            finally:
                (root / mutant.file).write_bytes(before)
            what = "SURVIVES" if survives else "noticed"
            print(f"row {number:3} {what:8} {time.monotonic() - begun:4.0f} s line {mutant.line}: {mutant}", flush=True)
            if survives:
                yield number, mutant


def main() -> int:
    """Run, and return 1 if a mutant has survived."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=lambda text: [int(it) for it in text.split(",")], default=list(ROWS))
    parser.add_argument("--each", type=int, default=1, help="mutants of each row")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="repeats a choice")
    parser.add_argument("--write", action="store_true", help=f"put the survivors into {REPORT}")
    given = parser.parse_args()
    print(f"--seed {given.seed}")
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        found = list(survivors(copied(ROOT, Path(place)), given.rows, given.each, given.seed))
    lines = [f"| {number} | {mutant} |" for number, mutant in found] or ["| – | none |"]
    print(*lines, sep="\n")
    if given.write:
        path, (begin, end) = ROOT / REPORT, _MARKS
        head, rest = path.read_text(encoding="utf-8").split(begin)
        table = "\n".join([begin, "", "| row | mutant |", "|---|---|", *lines, "", end])
        path.write_text(head + table + rest.partition(end)[2], encoding="utf-8")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
