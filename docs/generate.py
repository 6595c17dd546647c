"""Write the parts of these pages that follow from the code: state table, command line reference, tables of options,
small programs, the runbook.

``python docs/generate.py`` writes them; with ``--check`` it only says which are stale, and exits with 1 if any is. A
test does the same.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from datetime import timedelta
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, Final

import click

import rollbridge  # so that every module with error classes is loaded
from rollbridge.base import metrics as client_metrics
from rollbridge.base.metrics import Family
from rollbridge.base.options import GIB, KIB, MIB, Option, table_of
from rollbridge.base.security import Security, ZooKeeperSecurity
from rollbridge.buffer.fold import BufferLimits
from rollbridge.buffer.table import DECISIONS, AbortCause, Event, Move, Rejection, Row, State, Stay
from rollbridge.cli.common import MEANINGS
from rollbridge.cli.main import rollbridge as command_line
from rollbridge.config import ClientOptions, ConnectionSettings, ConsumerOptions, WriterOptions
from rollbridge.errors import RollbridgeError
from rollbridge.monitoring.runbook import alerts, runbook
from rollbridge_coordinator.commit.waiting import CAUSES
from rollbridge_coordinator.config import CoordinatorSettings
from rollbridge_coordinator.core import metric_samples
from rollbridge_coordinator.core.metrics import CommitPath
from rollbridge_coordinator.core.settings import LeaderSettings, ScalingSettings, SnapshotSettings
from rollbridge_gateway import __main__ as gateway_main
from rollbridge_gateway.server import metrics as gateway_families

try:
    from rollbridge.spark.settings import JobOptions, SinkOptions, SourceOptions, SparkOptions
except ImportError:  # Without PySpark its tables are left as they are.
    SPARK: dict[str, tuple[type, ...]] = {}
else:
    SPARK = {
        "sink": (SparkOptions, JobOptions, SinkOptions),
        "source": (SparkOptions, SourceOptions),
    }

HERE: Final = Path(__file__).parent
_BOUNDS: Final = re.compile(r"\[[0-9]*<?=?x[<>]=?[0-9]+\]")
"""What click says of the bounds of a number; the message of a wrong one says it better."""

STATES_PAGE: Final = """\
# The life of a transaction

What each event does to a transaction in each state. The leader folds the buffers by this table, frame by frame
(`bridge/rollbridge/buffer/fold.py`); the page is written by `docs/generate.py` from
`bridge/rollbridge/buffer/table.py`. A test drives the fold through every row, and another fails when the page is
stale.

![Transactions go from unknown over open and committing to committed, or from open and committing over aborting to
aborted.](transaction-states.svg)

## States

{states}

## Events

{events}

## Table

{table}

An arrow is a change of state. An empty cell cannot be: the event cannot be told there, as nothing is known of who owns
an unknown transaction, or the leader has a defect, and ends its term with `invalid-transition`, having written
nothing. A transaction that is `committed` or `aborted` is gone from the fold but for its id: it is `ended`. Where
nothing changes state:

{stays}

What is dropped is counted under the reason for it:

{drops}
"""


def protocol_states() -> str:
    """The page ``protocol-states.md``."""
    return STATES_PAGE.format(
        states=_members(State),
        events=_members(Event),
        table=_markdown_table(
            ("", *(f"`{state}`" for state in DECISIONS)),
            [(f"`{event}`", *(_cell(rows.get(event)) for rows in DECISIONS.values())) for event in Event],
        ),
        stays=_markdown_table(("", ""), [(_word(stay), stay.value) for stay in Stay]),
        drops=_members(Rejection, _word),
    )


def _cell(row: Row | None) -> str:
    return "" if row is None else f"**→ `{row.to}`**" if isinstance(row, Move) else _word(row)


def _word(member: Enum) -> str:
    return member.name.lower()


def _members(kind: type[StrEnum], word: Callable[[StrEnum], str] = lambda member: f"`{member}`") -> str:
    """The members of an enumeration, each with the docstring that follows it."""
    (declared,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(declared, ast.ClassDef)
    said: dict[str, str] = {}
    for line, following in itertools.pairwise(declared.body):
        if isinstance(line, ast.Assign) and isinstance(following, ast.Expr):
            said[ast.unparse(line.targets[0])] = inspect.cleandoc(ast.literal_eval(following.value))
    return _markdown_table(("", ""), [(word(member), said[member.name]) for member in kind])


def command_reference() -> str:
    """Every command with its options, and the exit codes: the last part of ``cli.md``."""
    parts = ["## Global options", "", "They may stand before or behind the command.", ""]
    parts += [_options(command_line), "", "## Commands"]
    for path, command in _commands(command_line, "rollbridge"):
        context = click.Context(command, info_name=path)
        usage = " ".join(command.collect_usage_pieces(context))
        parts += ["", f"### `{path}`", "", f"`{path} {usage}`", "", _prose(command.help or "")]
        if options := _options(command):
            parts += ["", options]
    parts += ["", "## Exit codes", "", "With `--json` an error is an object with its `code` on standard error.", ""]
    rows = [
        (str(int(code)), meaning, ", ".join(f"`{name}`" for name in _codes(int(code))) or "")
        for code, meaning in MEANINGS.items()
    ]
    parts.append(_markdown_table(("exit code", "meaning", "`code` of the error"), rows))
    return "\n".join(parts) + "\n"


# --------------------------------------------------------------------------------------------------------------------
# What an option does is said by the string under its field.


OPTIONS: Final[Mapping[str, tuple[type, ...]]] = {
    "client": (ClientOptions,),
    "connection": (ConnectionSettings,),
    "consumer": (ConsumerOptions,),
    "coordinator": (CoordinatorSettings, BufferLimits, LeaderSettings, SnapshotSettings, ScalingSettings),
    "kafka": (Security,),
    "writer": (WriterOptions,),
    "zookeeper": (ZooKeeperSecurity,),
    **SPARK,
}
"""What stands in the table of a name; pages say where, between two comments."""
MARKED_PAGES: Final = tuple(
    HERE / f"{name}.md"
    for name in (
        "coordinator-options",
        "gateway",
        "logs-and-tracing",
        "metrics",
        "options",
        "runbook",
        "runbook-gateways",
        "security",
        "spark",
        "troubleshooting",
    )
)
"""Pages with tables or a runbook between two comments."""
_MARK: Final = re.compile(r"(<!-- options: (\w+) -->\n\n)(?:\|.*\n)*(\n?<!-- end of options -->\n)")
_TYPES: Final = {
    "str": "text",
    "int": "whole number",
    "float": "number",
    "bool": "`true` or `false`",
    "timedelta": "`timedelta`",
}
_UNITS: Final = {
    "KiB": (r"kbytes", ()),
    "bytes": (r"bytes|size", ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))),
    "ms": (r"[_.]ms\b|_ms_|millis$", ((86_400_000, "days"), (3_600_000, "hours"), (60_000, "minutes"), (1_000, "s"))),
    "s": (r"_s$|seconds?$", ()),
    "hours": (r"hours?$", ()),
}
"""Units of numbers: the keys that are in them, and larger ones."""


def option_table(name: str) -> str:
    """The table of a name, with the line feed at its end."""
    head = ("option", "type", "default", "range", "what it does")
    return _markdown_table(head, [_row(kind, row) for kind in OPTIONS[name] for row in table_of(kind)]) + "\n"


def _row(kind: type, row: Option) -> tuple[str, ...]:
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        texts |= _texts(base)
    text = re.sub(r"docs/(\w+)\.md(#[\w-]+)?", r"[\1](\1.md\2)", texts[row.name].replace("``", "`"))
    word = next((word for word, value in row.choices.items() if value == row.default), None)
    return (
        ", ".join(f"`{key}`" for key in row.keys),
        "word" if row.choices else _TYPES.get(row.kind, "function" if "Callable" in row.kind else "text"),
        "needed" if row.needed else _shown(word if row.choices else row.default, row.key),
        _range(row),
        f"{text} Its former name is `{'`, `'.join(row.former)}`." if row.former else text,
    )


def _texts(kind: type) -> dict[str, str]:
    """The strings under the fields of a class."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, below in itertools.pairwise(definition.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def _range(row: Option) -> str:
    if row.choices:
        return ", ".join(f"`{word}`" for word in row.choices if word)
    if not row.is_number:
        return ""
    low, high = (_shown(bound, row.key) for bound in (row.low, row.high))
    if row.low is not None:
        return f"{low} to {high}" if high else f"from {low} on"
    return f"positive, up to {high}" if high else "positive"


def _shown(value: Any, key: str) -> str:
    """A value with its unit, which the key says."""
    if value in (None, "", (), MISSING):
        return ""
    match value:
        case timedelta():
            return _shown(value / timedelta(milliseconds=1), ".ms")
        case bool():
            return f"`{str(value).lower()}`"
        case str():
            return f"`{value}`"
        case int() | float():
            unit, (_, larger) = next((item for item in _UNITS.items() if re.search(item[1][0], key)), ("", ("", ())))
            factor, name = next((item for item in larger if value >= item[0] and value % item[0] == 0), (1, unit))
            count = value / factor
            name = name.removesuffix("s") if count == 1 and name.endswith(("ays", "ours", "tes")) else name
            return f"{int(count) if count == int(count) else count:,} {name}".strip()
    return str(value)


SERVICES: Final[Mapping[str, tuple[str, click.Command]]] = {"gateway": (gateway_main.PREFIX, gateway_main.main)}
"""Services whose options are those of their command line, with the beginning of their variables."""
_OF_ALL: Final = re.compile(r"bootstrap_servers|zookeeper|zookeeper_root|log_\w+")
"""Options of all commands, which have variables of their own."""


def service_table(name: str) -> str:
    """The options of a service, each with its variable, with the line feed at its end."""
    prefix, command = SERVICES[name]
    context = click.Context(command, info_name=name)
    rows = []
    for option in command.params:
        record = option.get_help_record(context)
        if record is not None and not _OF_ALL.fullmatch(str(option.name)):
            variable = option.envvar or f"{prefix}_{option.name}".upper()
            rows.append((f"`{' '.join(record[0].split())}`", f"`{variable}`", " ".join(record[1].split())))
    return _markdown_table(("option", "variable", "what it does"), rows) + "\n"


def _with_options(text: str) -> str:
    def filled(mark: re.Match[str]) -> str:
        name = mark[2]
        table = option_table(name) if name in OPTIONS else service_table(name) if name in SERVICES else None
        return mark[0] if table is None else mark[1] + table + mark[3]

    return _MARK.sub(filled, text)


# --------------------------------------------------------------------------------------------------------------------
# Metrics say themselves what they mean; PIP-196 calls some of them by names of its own.

METRICS: Final[Mapping[str, Sequence[Family]]] = {
    "client": client_metrics.FAMILIES,
    "coordinator": metric_samples.OF_COORDINATOR,
    "transactions": metric_samples.OF_TRANSACTIONS,
    "rounds": metric_samples.OF_ROUNDS,
    "streams": metric_samples.OF_STREAMS,
    "leaders": metric_samples.OF_LEADERS,
    "standbys": metric_samples.OF_STANDBY,
    "snapshots": metric_samples.OF_SNAPSHOTS,
    "counts": metric_samples.OF_COUNTS,
    "gateway": gateway_families.FAMILIES,
}
VALUES: Final[Mapping[str, type[StrEnum]]] = {
    "reasons": AbortCause,
    "paths": CommitPath,
    "ends": client_metrics.Unfinished,
}
"""Sets of label values, by the name of their table."""
_METRICS_MARK: Final = re.compile(r"(<!-- metrics: (\w+) -->\n\n)(?:\|.*\n)*\n?(<!-- end of metrics -->\n)")


def metrics_table(name: str) -> str:
    """The table of a name, with the line feed at its end."""
    if name in VALUES:
        return _members(VALUES[name]) + "\n"
    rows = [
        (
            f"`{item.name}`" + (f" {{{', '.join(item.labels)}}}" if item.labels else ""),
            item.kind.value,
            item.about,
            item.advice,
        )
        for item in METRICS[name]
    ]
    return _markdown_table(("metric, with its labels", "kind", "meaning", "what to do"), rows) + "\n"


def _with_metrics(text: str) -> str:
    return _METRICS_MARK.sub(lambda mark: f"{mark[1]}{metrics_table(mark[2])}\n{mark[3]}", text)


# --------------------------------------------------------------------------------------------------------------------
# The runbook, a section for each alert.

_RUNBOOK: Final = re.compile(r"(<!-- runbook: (\w+) -->\n).*(<!-- end of runbook -->\n)", re.DOTALL)


def runbooks(of: str) -> str:
    """The sections of all alerts of coordinators, or of gateways."""
    names = [name for name in alerts() if ("Gateway" in name) == (of == "gateways")]
    return "\n".join(f"## {name}\n\n{runbook(alerts()[name])}" for name in names)


_WAITS: Final = re.compile(r"(<!-- waits -->\n\n)(?:\|.*\n)*\n?(<!-- end of waits -->\n)")


def waits_table() -> str:
    """The causes of waits, with the line feed at the end of their table."""
    rows = [(f"`{cause}`", *rule) for cause, rule in CAUSES.items()]
    return _markdown_table(("cause", "what waits", "tried again", "who is told", "bound"), rows) + "\n"


def _with_waits(text: str) -> str:
    return _WAITS.sub(lambda mark: f"{mark[1]}{waits_table()}\n{mark[2]}", text)


def _with_tables(text: str) -> str:
    return _with_waits(_with_runbook(_with_metrics(_with_options(text))))


def _with_runbook(text: str) -> str:
    return _RUNBOOK.sub(lambda mark: f"{mark[1]}\n{runbooks(mark[2])}\n{mark[3]}", text)


# --------------------------------------------------------------------------------------------------------------------


def _commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path} {name}")
        elif command is not None:
            yield f"{path} {name}", command


def _options(command: click.Command) -> str:
    context = click.Context(command, info_name=command.name)
    records = [
        parameter.get_help_record(context) for parameter in command.params if isinstance(parameter, click.Option)
    ]
    rows = [
        (f"`{' '.join(names.split())}`", " ".join(_BOUNDS.sub("", text).split()))
        for names, text in filter(None, records)
    ]
    return _markdown_table(("option", ""), rows) if rows else ""


def _prose(text: str) -> str:
    return re.sub(r"(?<!`)(--[a-z-]+)", r"`\1`", inspect.cleandoc(text))


def _codes(exit_code: int) -> list[str]:
    found = {1: ["unexpected"], 2: ["usage"], 130: ["interrupted"]}.get(exit_code, [])
    kinds = [kind for kind in _errors(RollbridgeError) if kind.exit_code == exit_code]
    return found + sorted({code for kind in kinds for code in (kind.code, *vars(kind).get("codes", ()))})


def _errors(base: type[RollbridgeError]) -> Iterator[type[RollbridgeError]]:
    """The errors of the package itself: what tests and examples derive is nobody's exit code."""
    if base.__module__.startswith(("rollbridge.", "rollbridge_devcluster.")):
        yield base
    for error in base.__subclasses__():
        yield from _errors(error)


PROGRAMS: Final = {
    "Reading and writing": ["produce.py", "consume.py", "first_look.sh"],
    "Rolling transactions": [
        "rolling_transaction.py",
        "resume_after_crash.py",
        "savepoints.py",
        "read_transactions.py",
    ],
    "Conditional writes": ["conditional_write.py", "shared_state.py"],
    "Consumer groups, and moving from confluent-kafka": [
        "group_with_offsets.py",
        "moving_before.py",
        "moving_after.py",
    ],
    "Apache Spark": ["spark_write.py", "spark_read.py"],
    "Rights": ["kafka_acls.sh"],
}
EXAMPLES_PAGE: Final = """\
# Small programs to copy

Each of these is a file of `spark_examples/`, makes the streams that it needs, and can be run again; a test runs all of
them, twice and in both orders. They find the cluster of `make up`, or the one that `ROLLBRIDGE_BOOTSTRAP_SERVERS` and
`ROLLBRIDGE_ZOOKEEPER` name: `make example NAME=produce`. Larger programs are in `spark_examples/demo/`. This page is
written by `docs/generate.py`; a test fails when it is stale.

`b.reader` and `b.transactions` follow the stream for ever, as a Kafka consumer does; `follow=False` ends where the
stream ends now, which is what a small program wants.
"""


def examples() -> str:
    """The page ``examples.md``."""
    folder, parts = HERE.parent / "spark_examples", [EXAMPLES_PAGE]
    for title, names in PROGRAMS.items():
        parts.append(f"## {title}\n")
        for name in names:
            program = (folder / name).read_text(encoding="utf-8")
            language = {".py": "python", ".sh": "bash"}[Path(name).suffix]
            parts.append(f"`{name}`\n\n```{language}\n{program}```\n")
    return "\n".join(parts)


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---" for _ in head], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def pages() -> dict[Path, str]:
    """Every page that this writes, as it should be."""
    cli = HERE / "cli.md"
    written, marker, _ = cli.read_text(encoding="utf-8").partition("<!-- From here on")
    end_of_marker = " written by docs/generate.py; a test fails when it is stale. -->\n\n"
    return {
        HERE / "protocol-states.md": protocol_states(),
        HERE / "examples.md": examples(),
        **{path: _with_tables(path.read_text(encoding="utf-8")) for path in MARKED_PAGES},
        cli: written + (marker or "<!-- From here on") + end_of_marker + command_reference(),
    }


def main(arguments: list[str]) -> int:
    """Write or check; returns the exit code."""
    assert rollbridge.__all__
    stale = []
    for path, text in pages().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
            if "--check" not in arguments:
                path.write_text(text, encoding="utf-8")
    if stale:
        print(("stale" if "--check" in arguments else "written") + f": {', '.join(stale)}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
