"""``rollbridge cas`` and ``rollbridge tail`` against a real cluster."""

from __future__ import annotations

import json

import rollbridge
from integration_tests.clients import Site
from integration_tests.command_line import Cli
from rollbridge.cli.common import ExitCode


def test_what_tail_prints_is_what_cas_expects(site: Site, cli: Cli, ledger: str) -> None:
    assert cli("tail", ledger).out == "empty\n"
    first = cli("cas", ledger, "one", "--key", "a", "--expected", "empty", "--transaction-id", "7")
    assert first.code == 0, first
    assert cli("tail", ledger).out == first.out
    fallen = cli("cas", ledger, "no", "--key", "a", "--expected", "any", "--transaction-id", "6", "--monotonic-ids")
    assert fallen.code == ExitCode.REFUSED
    second = cli.json("cas", ledger, "two", "--key", "a", "--expected", first.out.strip(), "--header", "h=v")
    assert cli.json("tail", ledger, "--key", "a", "--scope", "key") == second
    assert [message.value() for message in site.committed(ledger)] == [b"one", b"two"]


def test_a_refused_write_has_an_exit_code_and_says_what_is_there(cli: Cli, ledger: str) -> None:
    first = cli("cas", ledger, "one", "--expected", "empty")
    refused = cli("cas", ledger, "no", "--expected", "empty")
    assert refused.code == ExitCode.CONFLICT
    assert first.out.strip() in refused.err
    error = json.loads(cli("cas", ledger, "no", "--expected", "empty", "--json").err)["error"]
    assert (error["code"], error["status_code"]) == ("cas-write", 525)
    assert (error["expected"], error["actual"]) == ("empty", first.out.strip())


def test_a_token_can_be_asked_with(cli: Cli, client: rollbridge.Bridge, ledger: str) -> None:
    with client.cas_writer(ledger) as writer:
        token = writer.token(b"a", expected=rollbridge.EMPTY)
        assert cli.json("cas", ledger, "--outcome", str(token)) == {"written": False}
        sn = writer.write(b"a", b"1", expected=rollbridge.EMPTY, token=token)
    assert cli("cas", ledger, "--outcome", str(token)).out == f"{sn}\n"
    assert cli("cas", ledger, "--outcome", "nonsense").code == ExitCode.REFUSED


def test_a_stream_that_does_not_exist(cli: Cli, ledger: str) -> None:
    assert cli("tail", f"{ledger}-no").code == ExitCode.NOT_FOUND
    assert cli("cas", f"{ledger}-no", "v", "--expected", "any").code == ExitCode.NOT_FOUND
