"""Commands with bad input, as far as no cluster is needed to see that it is bad."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from rollbridge.cli.common import ExitCode
from rollbridge.cli.main import main, rollbridge


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
        ("stream delete s/t --json", "give --yes"),
        ("txn list --min-age soon", "is not a duration"),
        ("stream create s/t --retention-time soon", "is not a duration"),
        ("stream create s/t --retention-bytes much", "is not a size"),
        ("stream truncate s/t --before latest", "give --yes where nobody can be asked"),
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
