"""``rollbridge stream`` and ``rollbridge txn`` against a real cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from xml.etree import ElementTree

import pytest

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.command_line import Cli
from integration_tests.patience import eventually
from rollbridge.base.ids import TransactionId
from rollbridge.cli.common import ExitCode
from rollbridge.errors import TransactionAbortedError
from rollbridge.metadata.session import ZooKeeperSession


@pytest.fixture
def stream(scope: str) -> str:
    return f"{scope}/stream"


def test_a_stream_from_create_to_delete(cli: Cli, scope: str, stream: str, tmp_path: Path) -> None:
    created = cli.json("stream", "create", stream, "--segments", "2")
    assert [(item["segment"], item["low"], item["high"]) for item in created["segments"]] == [
        ("0.#epoch.0", 0.0, 0.5),
        ("1.#epoch.0", 0.5, 1.0),
    ]
    again = cli("stream", "create", stream)
    assert again.code == ExitCode.CONFLICT
    assert "exists" in again.err
    kept = cli.json("stream", "create", stream, "--segments", "2", "--if-not-exists")
    assert kept == created
    differs = cli("stream", "create", stream, "--segments", "5", "--record-bytes-max", "2000", "--if-not-exists")
    assert differs.code == ExitCode.CONFLICT
    for told in ("largest record: it is 1000000, and 2000", "began with 2", "nothing was changed"):
        assert told in differs.err
    assert "exists, with 2 segments" in cli("stream", "create", stream, "--if-not-exists").out

    assert stream in [item["stream"] for item in cli.json("stream", "list")]
    assert stream in cli("stream", "list", "--scope", scope).out
    assert cli.json("stream", "list", "--scope", "no-such-scope") == []

    scaled = cli.json("stream", "scale", stream, "--seal", "0", "--into", "2")
    assert cli("stream", "create", stream, "--segments", "2", "--if-not-exists").code == 0, "it is the same stream"
    assert (scaled["epoch"], scaled["reference_epoch"], scaled["cause"]) == (1, 1, "scale")
    assert [item["number"] for item in scaled["segments"]] == [2, 3, 1]
    merged = cli("stream", "scale", stream, "--seal", "3,2", "--range", "0:0.5")
    assert merged.code == ExitCode.OK
    assert "[0, 0.5)" in merged.out

    described = cli.json("stream", "describe", stream)
    assert (described["epochs"], described["group"]) == (3, f"{scope}/default")
    assert described["leader"]
    assert stream in cli("stream", "describe", stream).out

    picture = tmp_path / "lineage.svg"
    history = cli.json("stream", "history", stream, "--svg", str(picture))
    assert [epoch["cause"] for epoch in history["epochs"]] == ["create", "scale", "scale"]
    assert history["epochs"][1]["sealed_ends"] == {"0.#epoch.0": 1}  # the marker of its end
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert cli("stream", "history", stream, "--svg", "-").out == picture.read_text(encoding="utf-8")
    assert "2.#epoch.1 at 1" in cli("stream", "history", stream).out

    assert cli("stream", "delete", stream, "--yes").code == ExitCode.OK
    for arguments in (["describe"], ["history"], ["delete", "--yes"], ["scale", "--seal", "0", "--into", "2"]):
        gone = cli("stream", arguments[0], stream, *arguments[1:])
        assert gone.code == ExitCode.NOT_FOUND
        assert f"stream {stream} does not exist" in gone.err
    assert cli("stream", "delete", stream, "--yes", "--if-exists").code == ExitCode.OK
    assert cli("stream", "delete", "no-such-scope/stream", "--yes", "--if-exists").code == ExitCode.OK


def test_a_stream_keeps_what_it_is_told_to_and_is_truncated(cli: Cli, client: rollbridge.Bridge, stream: str) -> None:
    cli.json("stream", "create", stream, "--retention-time", "7d", "--retention-group", "billing")
    described = cli.json("stream", "describe", stream)
    assert described["retention"] == {"time_ms": 7 * 24 * 3600 * 1000, "bytes": None, "groups": ["billing"]}
    changed = cli("stream", "update", stream, "--retention-bytes", "10GiB", "--retention-group", "none")
    assert "keeps" in cli("stream", "describe", stream).out
    assert "records for 7 days or 10,737,418,240 bytes" in changed.out
    updated = cli.json("stream", "update", stream, "--retention-time", "none")
    assert updated["retention"] == {"time_ms": None, "bytes": 10 * 1024**3, "groups": []}
    with client.transaction(stream) as txn:
        for number in range(4):
            txn.write(stream, key=b"k", value=b"%d" % number)
    assert cli("stream", "truncate", stream, "--before", "0-0:1:0").code == ExitCode.USAGE
    assert cli.json("stream", "truncate", stream, "--before", "0-0:1:0", "--yes")["begins"] == f"{stream}@0-0:1"
    client.admin.scale(stream, seal=[0], ranges=[(0.0, 1.0)])
    truncated = cli("stream", "truncate", stream, "--before", "latest", "--yes")
    assert truncated.code == ExitCode.OK
    assert f"{stream} begins at {stream}@1-1:0 now." in truncated.out
    assert ", removed" in cli("stream", "history", stream).out
    assert cli.json("stream", "history", stream)["removed"] == ["0.#epoch.0"]
    for arguments, code, words in (
        (["truncate", stream, "--before", "1-1:99:0", "--yes"], ExitCode.REFUSED, "beyond its last stable offset"),
        (["truncate", stream, "--before", "soon", "--yes"], ExitCode.REFUSED, "not a place to begin at"),
        (["truncate", f"{stream}x", "--before", "latest", "--yes"], ExitCode.NOT_FOUND, "does not exist"),
        (["update", stream, "--retention-bytes", "0"], ExitCode.REFUSED, "retention size is positive"),
        (["update", stream], ExitCode.USAGE, "say what to change"),
    ):
        refused = cli("stream", *arguments)
        assert (refused.code, words in refused.err) == (code, True), refused


def test_a_deletion_is_asked_about(cli: Cli, stream: str) -> None:
    cli("stream", "create", stream)
    refused = cli("stream", "delete", stream)
    assert refused.code == ExitCode.USAGE
    assert "--yes" in refused.err
    assert cli("stream", "describe", stream).code == ExitCode.OK


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seal", "0", "--range", "0:0.4"], "must cover exactly [0, 0.5)"),
        (["--seal", "0", "--range", "0:0.3", "--range", "0.2:0.5"], "overlap"),
        (["--seal", "0", "--range", "0:2"], "is not a key range"),
        (["--seal", "7", "--range", "0:0.5"], "not active: 7; active in epoch 0 are 0, 1"),
        (["--seal", "7", "--into", "2"], "active are 0, 1"),
    ],
)
def test_a_scale_that_can_not_be_changes_nothing(cli: Cli, stream: str, arguments: list[str], words: str) -> None:
    cli("stream", "create", stream, "--segments", "2")
    refused = cli("stream", "scale", stream, *arguments, "--json")
    assert refused.code == ExitCode.REFUSED
    assert words in json.loads(refused.err)["error"]["message"]
    assert cli.json("stream", "describe", stream)["epochs"] == 1


@pytest.mark.parametrize("arguments", [["stream", "describe"], ["stream", "history"], ["produce"], ["consume"]])
def test_an_unknown_scope_is_named(cli: Cli, arguments: list[str], unique_name: Callable[[str], str]) -> None:
    scope = unique_name("nowhere")
    found = cli(*arguments, f"{scope}/t")
    assert found.code == ExitCode.NOT_FOUND
    assert f"there is no scope {scope}" in found.err


def test_a_picture_that_can_not_be_written(cli: Cli, stream: str, tmp_path: Path) -> None:
    cli("stream", "create", stream)
    found = cli("stream", "history", stream, "--svg", str(tmp_path / "missing" / "x.svg"))
    assert found.code == ExitCode.ENVIRONMENT
    assert "No such file or directory" in found.err


def test_open_transactions_are_found_described_and_aborted(
    cli: Cli, client: rollbridge.Bridge, scope: str, stream: str
) -> None:
    cli("stream", "create", stream)
    label = f"load\x1b[31m of {stream}"
    txn = client.begin(stream, label=label, timeout=timedelta(hours=2))
    txn.write(stream, value=b"never seen").add_done_callback(lambda future: None)
    txn.flush()
    other = client.begin(stream)
    other.flush()
    mine = ["txn", "list", "--stream", stream]
    eventually(lambda: len(cli.json(*mine)) == 2, "both are on record")

    def ids(*arguments: str) -> list[str]:
        return [item["transaction"] for item in cli.json(*mine, *arguments)]

    assert ids() == [str(txn.id), str(other.id)], "oldest first"
    assert ids("--label", "load") == [str(txn.id)]
    assert ids("--client", "tester", "--max-lease", "3h") == [str(txn.id)]
    assert ids("--client", "somebody-else") == []
    assert ids("--group", f"{scope}/default", "--min-age", "100ms", "--state", "open") == [str(txn.id), str(other.id)]
    assert cli("txn", "list", "--group", f"{scope}/nobodys").code == ExitCode.NOT_FOUND
    assert ids("--min-age", "1h") == []
    assert ids("--state", "committing") == []

    described = cli.json("txn", "describe", str(txn.id))
    assert (described["label"], described["lease_ms"], described["streams"]) == (label, 7_200_000, {stream: 0})
    assert described["lease_left_ms"] + described["age_ms"] == described["lease_ms"]
    for text in (cli(*mine).out, cli("txn", "describe", str(txn.id)).out, cli("stream", "describe", stream).out):
        assert f"load\ufffd[31m of {stream}" in text
        assert "\x1b" not in text

    aborted = cli.json("txn", "abort", str(txn.id), "--reason", "stuck since Monday")
    assert aborted == {"transaction": str(txn.id), "aborted": True, "reason": "stuck since Monday"}
    with pytest.raises(TransactionAbortedError, match="stuck since Monday"):
        txn.commit()
    eventually(lambda: ids() == [str(other.id)], "the record goes")  # a moment after the outcome is known
    assert cli.json("txn", "describe", str(txn.id))["state"] == "aborted"
    assert cli.json("txn", "abort", str(txn.id), "--reason", "again") == aborted, "asked again, it answers the same"
    assert cli("txn", "abort", "ffff0000-0000-0000-0000-00000000002a").code == ExitCode.NOT_FOUND
    found = cli.json("txn", "outcome", str(txn.id))
    assert (found["state"], found["reason"], found["label"]) == ("aborted", "stuck since Monday", label)
    assert found == cli.json("txn", "outcome", "--label", label, "--client", "tester", "--group", f"{scope}/default")
    assert "\x1b" not in cli("txn", "outcome", str(txn.id)).out
    assert cli.json("txn", "outcome", str(other.id))["position"] is None
    for code, *wrong in (
        (ExitCode.NOT_FOUND, "ffff0000-0000-0000-0000-00000000002a"),
        (ExitCode.NOT_FOUND, str(txn.id), "--group", "no-such/group"),
        (ExitCode.REFUSED, "nonsense"),
        (ExitCode.REFUSED,),
        (ExitCode.USAGE, "--label", label),
    ):
        assert cli("txn", "outcome", *wrong).code == code
    client.admin.abort_transaction(other.id, group=f"{scope}/default")
    eventually(lambda: not cli.json(*mine), "the other record goes")
    assert "No open transaction" in cli(*mine).out


def test_what_is_listed_of_a_wrong_path_is_an_error_and_writes_nothing(
    cluster: AnyCluster, cli: Cli, unique_name: Callable[[str], str]
) -> None:
    root = f"/{unique_name('mistyped')}"
    lost = Cli(cluster, root)
    for command in (
        ("stream", "list"),
        ("stream", "list", "--scope", "cli"),
        ("stream", "describe", "cli/orders"),
        ("group", "list"),
        ("txn", "list"),
        ("txn", "outcome", str(TransactionId.of(0, 7))),
        ("snapshot", "list"),
        ("access", "list"),
    ):
        found = lost(*command)
        assert (found.code, found.out) == (ExitCode.NOT_FOUND, ""), (command, found)
        assert f"ZooKeeper path {root} at" in found.err
        assert "was never served by a coordinator" in found.err
    with ZooKeeperSession(cluster.zookeeper, root="/") as session:
        assert session.exists(root) is None
    assert cli("stream", "list", "--scope", "no-such-scope").code == 0
