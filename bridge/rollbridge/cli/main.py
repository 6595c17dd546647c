"""The ``rollbridge`` command: global options, the table of commands, and one line for every error.

Each command's module is imported only when the command is used. Global options are accepted anywhere on the line:
``rollbridge status --json`` and ``rollbridge --json status`` are the same.
"""

from __future__ import annotations

import errno
import json
import logging
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Final

import click

from rollbridge.base.logs import FILE_VARIABLE, FORMAT_VARIABLE, FORMATS, JSON, LogOutput, handler_of
from rollbridge.base.text import printable, printable_lines
from rollbridge.cli.common import MEANINGS, CliContext, ExitCode, say
from rollbridge.config import HOME_VARIABLE
from rollbridge.errors import ConfigError, LocalEnvironmentError, RollbridgeError
from rollbridge.version import __version__, what_brings


@dataclass(frozen=True, slots=True)
class _Entry:
    """Entry of the table of commands.

    Attributes:
        module: Module with a click command of the command's name.
        help: One line.
        extra: Extra that must be installed for the command, if any; :func:`what_brings` says how.
    """

    module: str
    help: str
    extra: str = ""


_DEVCLUSTER: Final = "rollbridge_devcluster.command"

COMMANDS: Final[Mapping[str, _Entry]] = {
    "up": _Entry(_DEVCLUSTER, "Start Kafka, ZooKeeper and a coordinator on this machine.", "local"),
    "status": _Entry("rollbridge.cli.status", "Show what runs, and where.", "local"),
    "restart": _Entry(
        "rollbridge_devcluster.command", "Stop one part of the embedded cluster and start it again.", "local"
    ),
    "down": _Entry(_DEVCLUSTER, "Stop the embedded cluster; its data is kept.", "local"),
    "coordinator": _Entry("rollbridge.cli.services", "Run a coordinator in the foreground.", "coordinator"),
    "gateway": _Entry("rollbridge.cli.services", "Run a gateway for transactional Kafka producers.", "gateway"),
    "stream": _Entry("rollbridge.cli.stream", "Create, list, describe, scale and delete streams."),
    "group": _Entry("rollbridge.cli.group", "List transaction groups, and say how long their commit logs are kept."),
    "txn": _Entry("rollbridge.cli.txn", "List, describe, commit and abort transactions."),
    "ids": _Entry("rollbridge.cli.ids", "List and forget transactional ids of producers at gateways."),
    "snapshot": _Entry("rollbridge.cli.doctor", "List, describe, verify, rebuild and clear snapshots of buffers."),
    "produce": _Entry("rollbridge.cli.produce", "Write lines as one transaction."),
    "cas": _Entry("rollbridge.cli.produce", "Write a record if the last one is as expected."),
    "tail": _Entry("rollbridge.cli.produce", "Show the sequence number of the last record."),
    "consume": _Entry("rollbridge.cli.consume", "Read committed records."),
    "access": _Entry("rollbridge.cli.access", "Grant and revoke the use of transaction groups; print Kafka ACLs."),
    "doctor": _Entry("rollbridge.cli.doctor", "Check the cluster, and say what to do."),
    "verify": _Entry("rollbridge.cli.verify", "Prove that each committed record is where the commit log says."),
    "monitoring": _Entry("rollbridge.cli.doctor", "Write alert rules for Prometheus and a board for Grafana."),
    "repair": _Entry("rollbridge.cli.doctor", "Repair ZooKeeper after it was restored from a backup."),
}

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

TEXT_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_FLAGS = frozenset({"--json", "-v", "-vv", "--verbose"})
_LOG_OPTIONS: Final = {
    "--log-format": "format",
    "--log-file": "file",
}
_OPTIONS_WITH_VALUE = frozenset({"--bootstrap-servers", "--zookeeper", "--config", "--home", *_LOG_OPTIONS})


class _Commands(click.Group):
    """Group that loads commands from the table, and accepts global options anywhere on the line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        try:
            command = getattr(import_module(entry.module), cmd_name)
        except ModuleNotFoundError as missing:
            raise _lacking(cmd_name, missing) from missing
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(int(code)), meaning) for code, meaning in MEANINGS.items()])

    def invoke(self, ctx: click.Context) -> object:
        try:
            with _output_that_ends():
                return super().invoke(ctx)
        except ModuleNotFoundError as missing:
            raise _lacking(ctx.invoked_subcommand or "", missing) from missing

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _output_that_ends():  # of --help and --version
            return super().parse_args(ctx, _global_options_first(args))


@contextmanager
def _output_that_ends() -> Iterator[None]:
    """End without a failure where the reader of the output has left, and with one of this machine where it is full."""
    try:
        yield
    except BrokenPipeError:
        # A pager, or head, has seen enough; click would exit with 1. The flush at exit must not fail either.
        sys.stdout = None
        raise click.exceptions.Exit(ExitCode.OK) from None
    except OSError as fault:
        if fault.errno not in _FULL:
            raise
        sys.stdout = None
        raise LocalEnvironmentError(
            f"there is no room for the output ({fault}); what was done before remains done"
        ) from fault


def _lacking(command: str, missing: ModuleNotFoundError) -> Exception:
    """Return the error of a command that imports a missing package; the error names what to install."""
    extra = COMMANDS[command].extra if command in COMMANDS else ""
    if not extra:
        return missing
    return LocalEnvironmentError(
        f"{missing.name} is not installed, which `rollbridge {command}` needs; nothing was done; {what_brings(extra)}"
    )


def _global_options_first(arguments: Sequence[str]) -> list[str]:
    """Move global options, with their values, before the command; arguments after ``--`` stay untouched."""
    first: list[str] = []
    rest: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        if argument == "--":
            rest.append(argument)
            break
        name, equals, _ = argument.partition("=")
        if argument in _FLAGS or (name in _OPTIONS_WITH_VALUE and equals):
            first.append(argument)
        elif argument in _OPTIONS_WITH_VALUE:
            first += [argument, *islice(waiting, 1)]
        else:
            rest.append(argument)
    return [*first, *rest, *waiting]


@click.command(
    cls=_Commands,
    name="rollbridge",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option("--bootstrap-servers", metavar="HOST:PORT,...", help="Kafka brokers; the embedded cluster if left out.")
@click.option("--zookeeper", metavar="HOST:PORT,...", help="ZooKeeper servers; needed with --bootstrap-servers.")
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML file with these and other settings.",
)
@click.option(
    "--home",
    envvar=HOME_VARIABLE,
    show_envvar=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of the embedded cluster.",
)
@click.option("--json", is_flag=True, help="Print answers and errors as JSON.")
@click.option(
    "-v", "--verbose", count=True, help="Log to standard error, and show where errors come from; -vv for more."
)
@click.option(
    "--log-format",
    envvar=FORMAT_VARIABLE,
    show_envvar=True,
    type=click.Choice(FORMATS),
    expose_value=False,
    help="Form of the log's lines.  [default: text]",
)
@click.option(
    "--log-file",
    envvar=FILE_VARIABLE,
    show_envvar=True,
    type=click.Path(dir_okay=False),
    expose_value=False,
    help="Log to this file, which may be moved meanwhile, instead of to standard error.",
)
@click.version_option(__version__)
@click.pass_context
def rollbridge(
    ctx: click.Context,
    bootstrap_servers: str | None,
    zookeeper: str | None,
    config: Path | None,
    home: Path | None,
    json: bool,
    verbose: int,
) -> None:
    """Rolling transactions on real Kafka topics.

    Global options are also accepted after the command.
    """
    ctx.obj = CliContext(
        flags={"bootstrap_servers": bootstrap_servers, "zookeeper": zookeeper},
        config_file=config,
        named_home=home.expanduser() if home else None,
        json=json,
        verbosity=verbose,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code (``rollbridge.cli.common``). Raises nothing but ``SystemExit``."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    said = arguments[: arguments.index("--")] if "--" in arguments else arguments
    verbosity = sum({"-v": 1, "--verbose": 1, "-vv": 2}.get(argument, 0) for argument in said)
    as_json = "--json" in said
    try:
        settings = LogOutput.of(_log_options(said))
        handler = handler_of(settings, TEXT_FORMAT)
    except ConfigError as fault:
        _complain(str(fault), fault.code, fault.exit_code, as_json)
        return fault.exit_code
    with _logging_by(handler, verbosity):
        return _run(arguments, as_json=as_json or settings.format == JSON, verbose=verbosity > 0)


def _log_options(said: Sequence[str]) -> dict[str, str | None]:
    """Return the options of the log: it is set up before the command line is parsed, which may fail."""
    found: dict[str, str | None] = {}
    waiting = iter(said)
    for argument in waiting:
        name, equals, value = argument.partition("=")
        if name in _LOG_OPTIONS:
            found[_LOG_OPTIONS[name]] = value if equals else next(waiting, None)
    return found


def _run(arguments: list[str], *, as_json: bool, verbose: bool) -> int:
    try:
        code = rollbridge.main(args=arguments, prog_name="rollbridge", standalone_mode=False)
        # A command without an exit code of its own returns None.
        return code if isinstance(code, int) else ExitCode.OK
    except click.ClickException as exc:
        _complain(exc.format_message(), "usage", ExitCode.USAGE, as_json)
        if not as_json:
            context = exc.ctx if isinstance(exc, click.UsageError) else None
            path = context.command_path if context else "rollbridge"
            say(f"Try '{path} --help' for help.\n")
        return ExitCode.USAGE
    except RollbridgeError as exc:
        _complain(str(exc), exc.code, exc.exit_code, as_json, details=vars(exc), cause=exc if verbose else None)
        return exc.exit_code
    except (KeyboardInterrupt, click.Abort):
        _complain("interrupted", "interrupted", ExitCode.INTERRUPTED, as_json)
        return ExitCode.INTERRUPTED
    except Exception as exc:
        message = f"unexpected {type(exc).__name__}: {exc}" + ("" if verbose else " (-v shows where)")
        _complain(message, "unexpected", ExitCode.UNEXPECTED, as_json, cause=exc if verbose else None)
        return ExitCode.UNEXPECTED


@contextmanager
def _logging_by(handler: logging.Handler, verbosity: int) -> Iterator[None]:
    _bear_with(handler)
    root, kazoo = logging.getLogger(), logging.getLogger("kazoo")
    before = root.level, kazoo.level
    root.addHandler(handler)
    root.setLevel({0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG))
    # Lost connections are shown to those who ask for details only; to all others, rollbridge's own errors report them.
    kazoo.setLevel(logging.NOTSET if verbosity else logging.CRITICAL)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before[0])
        kazoo.setLevel(before[1])
        with suppress(OSError):  # of lines that were told of as they could not be written
            handler.close()


def _bear_with(handler: logging.Handler) -> None:
    """Have a handler that cannot write its lines say so once: what a command does and returns does not depend on it."""
    usual, told = handler.handleError, False

    def handle(record: logging.LogRecord) -> None:
        nonlocal told
        fault = sys.exc_info()[1]
        if not isinstance(fault, OSError):
            usual(record)
        elif not told:
            told = True
            say(f"rollbridge: the log takes nothing ({fault}); its lines are lost\n")

    handler.handleError = handle  # type: ignore[method-assign]


def _complain(
    message: str,
    code: str,
    exit_code: int,
    as_json: bool,
    *,
    details: Mapping[str, object] | None = None,
    cause: BaseException | None = None,
) -> None:
    """Print an error to standard error: in one line, or as JSON, with the traceback first if there is one."""
    if cause is not None:
        say(printable_lines("".join(traceback.format_exception(cause))))
    if as_json:
        public = {name: value for name, value in (details or {}).items() if not name.startswith("_")}
        error = {"code": code, "exit_code": int(exit_code), "message": message, **public}
        say(json.dumps({"error": error}, default=str) + "\n")
    else:
        say(printable(f"rollbridge: {' '.join(message.split())}") + "\n")
