"""Common parts of all commands: the global options, the connection that follows from them, answers and exit codes.

Exit codes are stable, so that scripts can rely on them. Every error of ``rollbridge.errors`` carries its own;
:class:`ExitCode` lists them all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import IO, Final

import click

from rollbridge.client.runtime import ClientOptions
from rollbridge.config import ConnectionSettings, default_home, load_settings
from rollbridge.connection import Bridge, connect
from rollbridge.errors import LocalEnvironmentError
from rollbridge.model.text import printable_lines
from rollbridge.zookeeper.session import ZooKeeperSession

SHOWN_MAX: Final = 2_000
"""Characters of a result that stand in the error if it cannot be written."""


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


# Connection


def connected(context: CliContext, options: ClientOptions | None = None) -> Bridge:
    """Connect to the cluster that the command line names; the caller closes the connection.

    Raises:
        ConfigError, KafkaUnavailableError, ZooKeeperUnavailableError, WrongClusterError: See
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
    settings = context.settings()
    return ZooKeeperSession(
        settings.zookeeper,
        root=settings.zookeeper_root,
        name=settings.client_name,
        security=settings.zookeeper_security,
    )


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
    ExitCode.UNEXPECTED: "an error that nobody foresaw, or data that is not what it claims to be",
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
