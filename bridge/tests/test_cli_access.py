"""``rollbridge access``: what it prints without a cluster, and what it refuses."""

from __future__ import annotations

import io
import json
import sys

import pytest

from rollbridge.cli.common import ExitCode
from rollbridge.cli.main import main


def test_the_rights_of_a_role_are_printed_as_commands(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["access", "kafka-acls", "writer", "sales/orders", "--group", "eu", "--consumer-group", "billing"]
    assert main([*arguments, "--principal", "User:alice"]) == ExitCode.OK
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert all(line.startswith("kafka-acls.sh ") and "--allow-principal User:alice" in line for line in lines)
    for expected in (
        "--operation Read --operation Write --topic sales.orders. --resource-pattern-type prefixed",
        "--operation Write --transactional-id sales.orders. --resource-pattern-type prefixed",
        "--operation Read --topic sales.eu.commit-log",
        "--operation Read --group billing",
    ):
        assert any(line.endswith(expected) for line in lines), lines
    assert main([*arguments, "--json"]) == ExitCode.OK
    document = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in document] == [
        "sales.orders.",
        "sales.orders.",
        "sales.eu.commit-log",
        "rollbridge",
        "billing",
    ]
    assert document[0]["operations"] == ["Read", "Write"]
    assert all(item["command"].startswith("kafka-acls.sh ") for item in document)


def test_a_gateway_needs_little(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["access", "kafka-acls", "gateway", "shop.orders", "--json"]) == ExitCode.OK
    document = json.loads(capsys.readouterr().out)
    assert [(item["name"], item["operations"], item["prefixed"]) for item in document] == [
        ("topics.shop_orders.transaction-buffer", ["Write"], True),
        ("__transaction_buffer_topics.6a1a7c020defccc3", ["Write"], True),
        ("topics.default.commit-log", ["Read"], False),
        ("rollbridge", ["Describe"], True),
    ]


@pytest.mark.parametrize("role", ["reader", "previewer", "writer", "compactor", "coordinator"])
def test_every_role_has_rights(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["access", "kafka-acls", role, "sales/orders"]) == ExitCode.OK
    assert "--topic sales." in capsys.readouterr().out
    for arguments, own in ((["shop.orders"], "topics."), (["sales/all", "--topic", "shop.orders"], "sales.")):
        assert main(["access", "kafka-acls", role, *arguments]) == ExitCode.OK
        lines = capsys.readouterr().out.splitlines()
        assert any(line.endswith("--topic shop.orders") for line in lines), "on the adopted topic, and on no other"
        assert any(f"--topic {own}" in line and line.endswith("prefixed") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["kafka-acls", "king", "sales/orders"], ExitCode.USAGE),
        (["kafka-acls", "writer", "orders", "--topic", "orders"], ExitCode.USAGE),
        (["kafka-acls", "writer", "__consumer_offsets"], ExitCode.REFUSED),
        (["kafka-acls", "writer", "sales/orders", "--topic", "sales.default.commit-log"], ExitCode.REFUSED),
        (["kafka-acls", "writer", "sales/orders", "--group", "a.b"], ExitCode.REFUSED),
        (["kafka-acls", "writer", "sales/orders", "--principal", ""], ExitCode.USAGE),
        (["kafka-acls", "writer", "sales/orders", "--principal", "alice"], ExitCode.USAGE),
        (["grant", "sales/default"], ExitCode.USAGE),
        (["grant", "gateways"], ExitCode.USAGE),
        (["grant", "gateways", "alice"], ExitCode.REFUSED),
        (["grant", "sales", "x509:CN=a"], ExitCode.REFUSED),
        (["grant", "sales/default", "alice"], ExitCode.REFUSED),
        (["grant", "sales/default", "digest:alice:secret"], ExitCode.REFUSED),
        (["identity", "a:b"], ExitCode.REFUSED),
    ],
)
def test_bad_input_is_refused_before_anything_is_asked(
    arguments: list[str], code: ExitCode, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("secret\n"))
    assert main(["access", *arguments]) == code
    said = capsys.readouterr()
    assert "secret" not in said.out + said.err


def test_an_identity_is_made_of_a_password_from_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("secret\n"))
    assert main(["access", "identity", "alice"]) == ExitCode.OK
    assert capsys.readouterr().out == "digest:alice:aYXlLOpEooaV1cRAvUL1fp9Qt7E=\n"
