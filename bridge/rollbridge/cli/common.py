"""Common parts of all commands: the global options, the connection that follows from them, answers and exit codes.

Exit codes are stable, so that scripts can rely on them. Every error of ``rollbridge.errors`` carries its own;
:class:`ExitCode` lists them all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from typing import IO, Final

import click
from rich.cells import cell_len

from rollbridge.base.text import printable, printable_lines
from rollbridge.client.connection import Bridge, connect
from rollbridge.config import ClientOptions, ConnectionSettings, default_home, load_settings
from rollbridge.errors import LocalEnvironmentError
from rollbridge.kafka.client import KafkaClient
from rollbridge.metadata.session import ZooKeeperSession

# Text for people: tables readable in a pipe, ages, times and counts.


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> str:
    """Return columns padded to their widest cell, two spaces apart.

    Cells may come from other users (labels, client names), so characters that could steer a terminal are replaced.

    Args:
        head: Headings.
        rows: Cells of each row, as many as there are headings.
        right: Headings of the columns that are aligned to the right.
    """
    cells = [list(head), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(cell_len(row[column]) for row in cells) for column in range(len(head))]
    lines = []
    for row in cells:
        padded = []
        for heading, cell, width in zip(head, row, widths, strict=True):
            space = " " * (width - cell_len(cell))
            padded.append(space + cell if heading in right else cell + space)
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def duration(milliseconds: int) -> str:
    """Return the two largest units: ``3d 4h``, ``12m 5s``, ``0.3s``; negative ones with a sign."""
    sign = "-" if milliseconds < 0 else ""
    left = abs(milliseconds) // 1000
    if left < 10:
        return f"{sign}{abs(milliseconds) / 1000:.1f}s"
    for (unit, size), (next_unit, next_size) in (
        (("d", 86_400), ("h", 3_600)),
        (("h", 3_600), ("m", 60)),
        (("m", 60), ("s", 1)),
    ):
        if left >= size:
            return f"{sign}{left // size}{unit} {left % size // next_size}{next_unit}"
    return f"{sign}{left}s"


def moment(milliseconds: int) -> str:
    """Return a point in time, UTC, to the second."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def counted(count: int, word: str) -> str:
    """Return ``1 record``, ``336,776 records``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


SHOWN_MAX: Final = 2_000
"""Characters of a result that the error quotes if it cannot be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CliContext:
    """Global options of one call; commands receive them with ``@click.pass_obj``."""

    flags: Mapping[str, str | None] = field(default_factory=dict)
    """Connection settings from the command line, by key; None where not given."""
    config_file: Path | None = None
    named_home: Path | None = None
    """Directory of the embedded cluster, if a flag or environment variable names one."""
    json: bool = False
    """Print JSON on standard output."""
    verbosity: int = 0

    @property
    def home(self) -> Path:
        """Directory of the embedded cluster."""
        return self.named_home or default_home()

    def settings(self) -> ConnectionSettings:
        """Return the addresses of the cluster and its connection settings.

        Raises:
            ConfigError: A setting is wrong, or no cluster is named.
        """
        return load_settings(self.flags, config_file=self.config_file, home=self.home)

    def kafka(self) -> KafkaClient:
        """Return a client of Kafka, whose connections end with the process; raise as :meth:`settings` does."""
        return KafkaClient.of(self.settings())

    def answer(self, document: object, text: str) -> None:
        """Print the result: the document with ``--json``, the text otherwise."""
        shown = json.dumps(document, indent=2) if self.json else printable_lines(text)
        try:
            click.echo(shown)
        except BrokenPipeError:
            sys.stdout = None  # its reader has seen enough, and the exit code is what it would be
        except OSError as fault:
            sys.stdout = None  # the flush at exit would fail, too
            raise LocalEnvironmentError(
                f"standard output takes nothing ({fault.strerror}), but this was carried out: {shown[:SHOWN_MAX]}"
            ) from fault

    def tell(self, line: str) -> None:
        """Print progress to standard error, so that it never mixes with the result."""
        say(printable_lines(line) + "\n")


def say(text: str) -> None:
    """Print to standard error, if that takes anything: the exit code does not depend on it."""
    try:
        click.echo(text, err=True, nl=False)
    except OSError:
        sys.stderr = None  # the flush at exit would fail, too


def is_terminal(stream: IO[str] | None) -> bool:
    """Return whether a standard stream is a terminal; one that was closed is None."""
    return stream is not None and stream.isatty()


def confirm(context: CliContext, question: str, yes: bool, what: str) -> None:
    """Ask before ``what`` is deleted, unless ``--yes`` was given; raise an error if nobody can be asked or says no."""
    if not yes:
        if context.json or not is_terminal(sys.stdin):
            raise click.UsageError(f"this deletes {what}, and stdin is not a terminal: use --yes")
        click.confirm(question, abort=True, err=True)


# Connection


def connected(context: CliContext, options: ClientOptions | None = None) -> Bridge:
    """Connect to the cluster that the command line names; the caller closes the connection.

    Raises:
        ConfigError, KafkaUnavailableError, ZooKeeperUnavailableError, InvalidRequestError: See
            :func:`rollbridge.connect`.
    """
    settings = context.settings()
    return connect(
        settings.bootstrap_servers,
        zookeeper=settings.zookeeper,
        zookeeper_root=settings.zookeeper_root,
        client_name=settings.client_name,
        kafka=settings.kafka,
        zookeeper_security=settings.zookeeper_security,
        options=options,
    )


def zookeeper_session(context: CliContext) -> ZooKeeperSession:
    """Return a ZooKeeper session as the command line says, which its ``with`` block opens; Kafka is not contacted."""
    return ZooKeeperSession.of(context.settings())


# Exit codes


class ExitCode(IntEnum):
    """Exit codes of all commands."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    NOT_FOUND = 3
    REFUSED = 4
    CONFLICT = 5
    OUTCOME_UNKNOWN = 6
    UNAVAILABLE = 7
    ENVIRONMENT = 8
    FINDINGS = 9
    INTERRUPTED = 130


MEANINGS: Final = {
    ExitCode.OK: "done",
    ExitCode.UNEXPECTED: "internal error or corrupt data",
    ExitCode.USAGE: "the command line is wrong",
    ExitCode.NOT_FOUND: "what the command names does not exist; nothing was written",
    ExitCode.REFUSED: "the request or a setting can never be right as it is; nothing was written",
    ExitCode.CONFLICT: "the state is not what the request assumes; it wrote nothing",
    ExitCode.OUTCOME_UNKNOWN: "it may have happened or not; ask again with the id in the message",
    ExitCode.UNAVAILABLE: "Kafka, ZooKeeper or the coordinator does not answer; try again later",
    ExitCode.ENVIRONMENT: "this machine lacks something: Java, a free port, space on disk",
    ExitCode.FINDINGS: "the doctor found a problem; it says what to do",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C",
}
