"""The command line's frame: where options may stand, what errors look like, and what exit codes say."""

from __future__ import annotations

import io
import json
import logging
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from rollbridge import errors
from rollbridge.cli import main as cli
from rollbridge.cli.common import MEANINGS, CliContext, ExitCode
from rollbridge.cli.main import COMMANDS, main, rollbridge


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[CliContext]:
    """Replaces ``status`` by a command that notes what it is given."""
    contexts: list[CliContext] = []

    @click.command()
    @click.argument("rest", nargs=-1)
    @click.pass_obj
    def status(context: CliContext, rest: tuple[str, ...]) -> None:
        contexts.append(context)
        logging.getLogger("rollbridge.something").info("rest is %s", rest)

    monkeypatch.delenv("ROLLBRIDGE_HOME", raising=False)
    monkeypatch.setattr("rollbridge.cli.status.status", status)
    return contexts


def raising(monkeypatch: pytest.MonkeyPatch, exc: BaseException) -> None:
    @click.command()
    def status() -> None:
        raise exc

    monkeypatch.setattr("rollbridge.cli.status.status", status)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--json", "--zookeeper", "z:1", "--home=/h", "-v", "status"],
        ["status", "--json", "--zookeeper", "z:1", "--home=/h", "-v"],
        ["--zookeeper=z:1", "status", "-v", "--home", "/h", "--json"],
    ],
)
def test_global_options_may_stand_anywhere(arguments: list[str], seen: list[CliContext]) -> None:
    assert main(arguments) == ExitCode.OK
    (context,) = seen
    assert (context.json, context.verbosity, context.named_home) == (True, 1, Path("/h"))
    assert context.flags == {"bootstrap_servers": None, "zookeeper": "z:1"}


def test_behind_two_dashes_nothing_is_an_option(seen: list[CliContext]) -> None:
    assert main(["status", "--", "--json", "-v", "--home"]) == ExitCode.OK
    (context,) = seen
    assert (context.json, context.verbosity) == (False, 0)


@pytest.mark.parametrize(
    "arguments", [["status", "--home"], ["--home"], ["frob"], ["--frob"], ["up", "--kafka-port", "x"]]
)
def test_a_wrong_command_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("rollbridge: ")
    assert captured.err.splitlines()[1].startswith("Try 'rollbridge")


def test_an_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    raising(monkeypatch, errors.StreamNotFoundError("no stream\nof that name"))
    assert main(["status"]) == ExitCode.NOT_FOUND
    assert capsys.readouterr() == ("", "rollbridge: no stream of that name\n")


def test_an_error_steers_no_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    raising(monkeypatch, errors.StreamNotFoundError("no stream '\x1b[2J\x9b\u202e'"))
    main(["status", "-v"])
    assert all(line.isprintable() for line in capsys.readouterr().err.split("\n"))


def test_an_error_in_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    raising(monkeypatch, errors.OutcomeUnknownError("who knows", transaction="t-1"))
    assert main(["status", "--json"]) == ExitCode.OUTCOME_UNKNOWN
    assert json.loads(capsys.readouterr().err) == {
        "error": {"code": "outcome-unknown", "exit_code": 6, "message": "who knows", "transaction": "t-1"}
    }


def test_a_traceback_only_when_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    raising(monkeypatch, ZeroDivisionError("x"))
    assert main(["status"]) == ExitCode.UNEXPECTED
    assert capsys.readouterr().err == "rollbridge: unexpected ZeroDivisionError: x (-v shows where)\n"
    assert main(["status", "-v"]) == ExitCode.UNEXPECTED
    assert capsys.readouterr().err.startswith("Traceback")


def test_interruption(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    raising(monkeypatch, KeyboardInterrupt())
    assert main(["status"]) == ExitCode.INTERRUPTED
    # On a line of its own: the terminal shows ^C before it.
    assert capsys.readouterr().err == "\nrollbridge: interrupted\n"


def test_help_lists_commands_and_exit_codes_without_loading_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} was imported")

    monkeypatch.setattr(cli, "import_module", refuse)
    assert main(["--help"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)
    assert all(meaning.split()[0] in out for meaning in MEANINGS.values())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_in_the_table_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == ExitCode.OK
    assert capsys.readouterr().out.startswith("Usage: ")


def test_logging_is_put_back(seen: list[CliContext], capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = list(root.handlers), root.level
    assert main(["status", "-v", "rest"]) == ExitCode.OK
    assert "rest is ('rest',)" in capsys.readouterr().err
    assert (list(root.handlers), root.level) == before


def test_a_log_that_takes_nothing_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def status() -> None:
        for number in range(3):
            logging.getLogger("rollbridge.something").info("line %d", number)

    monkeypatch.setattr("rollbridge.cli.status.status", status)
    assert main(["status", "-v", "--log-file", "/dev/full"]) == ExitCode.OK
    said = "rollbridge: the log takes nothing ([Errno 28] No space left on device); its lines are lost\n"
    assert capsys.readouterr().err == said


def run(arguments: str, redirected: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a shell does that redirects its standard streams."""
    line = f"exec {shlex.quote(sys.executable)} -m rollbridge {arguments} {redirected}"
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", ["--help", "--version", "stream --help", "stream list --help"])
def test_help_that_nothing_takes_is_told_of(arguments: str) -> None:
    found = run(arguments, ">/dev/full")
    assert (found.returncode, "No space left on device" in found.stderr) == (ExitCode.ENVIRONMENT, True), found
    assert len(found.stderr.splitlines()) == 1


@pytest.mark.parametrize("redirected", ["2>/dev/full", "2>&-"])
@pytest.mark.parametrize(
    ("arguments", "code"),
    [("frob", ExitCode.USAGE), ("doctor --explain frob -v", ExitCode.NOT_FOUND), ("produce s/t", ExitCode.REFUSED)],
)
def test_no_exit_code_depends_on_whether_errors_can_be_told(
    arguments: str, code: ExitCode, redirected: str, tmp_path: Path
) -> None:
    found = run(f"{arguments} --home {tmp_path}", redirected)
    assert (found.returncode, found.stdout) == (code, "")


def test_a_standard_input_that_was_closed_is_told_of(tmp_path: Path) -> None:
    for arguments, words in (
        ("produce s/t", "standard input is closed; name a file"),
        ("stream delete s/t", "stdin is not a terminal: use --yes"),
        ("access identity ann", "there is no password"),
    ):
        found = run(f"{arguments} --home {tmp_path}", "<&-")
        assert (found.returncode, words in found.stderr) == (ExitCode.USAGE, True), found


def test_an_exit_code_is_the_same_if_the_reader_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class Left(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    @click.command()
    @click.pass_obj
    def status(context: CliContext) -> ExitCode:
        context.answer({}, "a finding")
        return ExitCode.FINDINGS

    monkeypatch.setattr("rollbridge.cli.status.status", status)
    for arguments, code in ((["status"], ExitCode.FINDINGS), (["--help"], ExitCode.OK)):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", Left())
            assert main(arguments) == code


def every_error(base: type[errors.RollbridgeError] = errors.RollbridgeError) -> Iterator[type[errors.RollbridgeError]]:
    yield base
    for child in base.__subclasses__():
        yield from every_error(child)


@pytest.mark.parametrize("error", sorted(set(every_error()), key=str))
def test_every_error_has_an_exit_code_that_is_documented(error: type[errors.RollbridgeError]) -> None:
    assert ExitCode(error.exit_code) in MEANINGS
    assert error.exit_code not in (ExitCode.OK, ExitCode.USAGE, ExitCode.INTERRUPTED)


# Commands with bad input, as far as no cluster is needed to see that it is bad.


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("BOOTSTRAP_SERVERS", "ZOOKEEPER", "CONFIG"):
        monkeypatch.delenv(f"ROLLBRIDGE_{name}", raising=False)
    monkeypatch.setenv("ROLLBRIDGE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("stream", "Missing command|Usage"),
        ("stream frob", "No such command 'frob'"),
        ("stream create", "Missing argument 'SCOPE/STREAM'"),
        ("stream create s/t --segments 2 --range 0:1", "--segments and --range exclude each other"),
        ("stream create s/t --segments x", "Invalid value for '--segments'"),
        ("stream create s/t --range 0.5", "use LOW:HIGH"),
        ("stream create s/t --buffer-partitions 0", "Invalid value for '--buffer-partitions'"),
        ("stream scale s/t --into 2", "Missing option '--seal'"),
        ("stream scale s/t --seal 0", "give either --range"),
        ("stream scale s/t --seal 0 --into 2 --range 0:1", "give either --range"),
        ("stream scale s/t --seal zero --into 2", "segment numbers"),
        ("stream scale s/t --seal 0 --into 0", "Invalid value for '--into'"),
        ("stream history s/t --svg - --json", "both write to standard output"),
        ("stream delete s/t --json", "use --yes"),
        ("txn list --min-age soon", "is not a duration"),
        ("stream create s/t --retention-time soon", "is not a duration"),
        ("stream create s/t --retention-bytes much", "is not a size"),
        ("stream truncate s/t --before latest", "stdin is not a terminal: use --yes"),
        ("stream update s/t", "say what to change"),
        ("txn list --state done", "Invalid value for '--state'"),
        ("txn describe", "Missing argument 'ID'"),
        ("produce", "Missing argument 'SCOPE/STREAM|TOPIC'"),
        ("produce s/t /no/such/file", "No such file or directory"),
        ("produce s/t --compression brotli -", "Invalid value for '--compression'"),
        ("produce s/t --header nope -", "use NAME=VALUE"),
        ("produce s/t --key-separator= -", "--key-separator is empty"),
        ("produce s/t --timeout 5 -", "is not a duration"),
        ("cas s/t v", "VALUE and --expected are needed"),
        ("cas s/t --expected any", "VALUE and --expected are needed"),
        ("cas s/t v --expected seq=-1", "is not an SN"),
        ("cas s/t v --expected 5", "seq=5 is a sequence id, and txid=5 the transaction id"),
        ("cas s/t v --expected any --scope stream", "Invalid value for '--scope'"),
        ("cas s/t v --outcome x", "goes with neither"),
        ("tail", "Missing argument 'SCOPE/STREAM|TOPIC'"),
        ("tail s/t --scope all", "Invalid value for '--scope'"),
        ("consume s/t --from-end", "would print nothing"),
        ("consume s/t --max-records 0", "Invalid value for '--max-records'"),
        ("consume s/t --format {nope}", "is not a field of a record"),
        (r"consume s/t --format {key}\q", "is not an escape"),
        ("consume s/t/0/#epoch.0 --segment --transactions", "--segment goes with neither"),
    ],
)
def test_wrong_usage(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split(" ")) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    if "--json" in arguments:
        assert words in json.loads(captured.err)["error"]["message"]
    else:
        assert any(word in captured.err for word in words.split("|"))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("stream delete __t --yes", "invalid-name"),
        ("produce s.commit-log -", "invalid-name"),
        ("produce s/t/u -", "invalid-name"),
        ("consume s/__", "invalid-name"),
        ("txn list --group s/t/u", "invalid-name"),
        ("txn describe 42", "invalid-request"),
        ("txn abort 6ba7b810-9dad-11d1-80b4-00c04fd430c8", "invalid-request"),
    ],
)
def test_names_and_ids_are_looked_at_before_anything_is_connected(
    arguments: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments.split(), "--json"]) == ExitCode.REFUSED
    assert json.loads(capsys.readouterr().err)["error"]["code"] == code


@pytest.mark.parametrize(
    "arguments",
    [
        "stream create s/t",
        "stream list",
        "stream describe s/t",
        "stream scale s/t --seal 0 --into 2",
        "stream delete s/t --yes",
        "stream history s/t",
        "txn list",
        "txn describe 00010000-0000-0000-0000-00000000002a",
        "txn abort 00010000-0000-0000-0000-00000000002a",
        "produce s/t -",
        "consume s/t",
    ],
)
def test_without_a_cluster_each_command_says_how_to_get_one(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == ExitCode.REFUSED
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "start one with `rollbridge up`" in captured.err


def commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, name
        yield f"{path} {name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")


def test_every_command_and_every_option_has_its_help() -> None:
    found = dict(commands(rollbridge, "rollbridge"))
    assert {"rollbridge stream history", "rollbridge txn abort", "rollbridge produce"} <= found.keys()
    for path, command in found.items():
        assert command.help, path
        for parameter in command.params:
            assert not isinstance(parameter, click.Option) or parameter.help, f"{path} {parameter.name}"
