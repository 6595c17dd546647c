"""What an operator is told of alerts is written once: rules, runbook, the doctor's findings and ``--explain`` agree."""

from __future__ import annotations

import ast
import importlib
import json
import re
import tomllib
from pathlib import Path

import click
import pytest
import yaml

from rollbridge.cli.common import ExitCode
from rollbridge.cli.doctor import BOARD_FILE, RULES_FILE
from rollbridge.cli.main import main
from rollbridge.cli.main import rollbridge as command_line
from rollbridge.metadata.changes import TOPIC_CLOSED, TOPIC_DELETED, UNLED, WATCHED
from rollbridge.monitoring.runbook import Alert, alerts, alerts_of, notes, plain_runbook, remedy, rules, runbook

ROOT = Path(__file__).parents[2]
DOCTOR = ROOT / "bridge" / "rollbridge" / "doctor"
PACKAGE = ROOT / "bridge" / "rollbridge" / "monitoring"
ALERTS = alerts()
REMEDIES = [item for alert in ALERTS.values() for item in alert.findings]


def test_each_rule_has_a_runbook_in_the_same_order() -> None:
    given = [rule for group in yaml.safe_load(rules())["groups"] for rule in group["rules"]]
    assert [
        (alert.full_name, alert.expression, alert.pending, {"severity": alert.severity}) for alert in ALERTS.values()
    ] == [(rule["alert"], rule["expr"], rule["for"], rule["labels"]) for rule in given]
    assert {alert.severity for alert in ALERTS.values()} == {"critical", "warning"}
    sections = tomllib.loads((PACKAGE / "runbook.toml").read_text(encoding="utf-8"))
    assert list(sections) == list(ALERTS)
    known = {"means", "limits", "look", "do", "do_not", "findings"}
    assert all(section.keys() <= known for section in sections.values())


def calls(name: str) -> list[ast.Call]:
    """The calls of a function in the modules of the doctor."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in DOCTOR.glob("*.py")]
    found = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [node for node in found if ast.unparse(node.func) == name]


def strings(call: ast.Call) -> list[str]:
    return [item.value for item in call.args if isinstance(item, ast.Constant) and isinstance(item.value, str)]


def test_each_remedy_is_that_of_a_finding_and_written_once() -> None:
    used = {(given[0], given[1] if len(given) > 1 else "") for given in map(strings, calls("remedy"))}
    assert used == {(item.check, item.case) for item in REMEDIES}
    assert len({(item.check, item.case) for item in REMEDIES}) == len(REMEDIES)
    checks = {strings(call)[0] for call in (*calls("problem"), *calls("warning")) if strings(call)}
    checks.add("unled")  # whose findings have the code of the stream's fault
    assert {item.check for item in REMEDIES} <= checks


def test_each_remedy_is_given_the_names_that_it_has() -> None:
    for call in calls("remedy"):
        check, *case = strings(call)
        names = {item.arg: f"<{item.arg}>" for item in call.keywords if item.arg}
        text = remedy(check, *case, **names)
        assert all(name in text for name in names.values()), check
        assert "{" not in text


def test_elsewhere_names_in_a_remedy_stand_in_capitals() -> None:
    [alert] = alerts_of("late-records-refused")
    assert "read them from topic PLACE, below offset OFFSET" in runbook(alert)
    assert all("{" not in runbook(alert) for alert in ALERTS.values())


@pytest.mark.parametrize("alert", ALERTS.values(), ids=lambda alert: alert.name)
def test_each_alert_has_a_section_to_which_its_rule_leads(alert: Alert) -> None:
    [address] = re.findall(rf'runbook_url: "(.*#{alert.anchor})"', rules())
    path, _, anchor = address.partition("#")
    page = (ROOT / path).read_text(encoding="utf-8")
    assert f"\n## {alert.full_name}\n\n{runbook(alert)}" in page
    titles = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    assert [title for title in titles if title.lower().replace(" ", "-") == anchor] == [alert.full_name]


@pytest.mark.parametrize("alert", ALERTS.values(), ids=lambda alert: alert.name)
def test_links_of_a_runbook_lead_somewhere(alert: Alert) -> None:
    docs = ROOT / "docs"
    for page, anchor in re.findall(r"\]\(([\w.-]+)#?([\w-]*)\)", runbook(alert)):
        text = (docs / page).read_text(encoding="utf-8")
        titles = [
            re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.M)
        ]
        assert not anchor or anchor in titles


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("name", ["RollbridgeNoStandby", "nostandby", "no-standby", "NoStandby"])
def test_the_doctor_explains_an_alert_by_any_of_its_names(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, "doctor", "--explain", name)
    assert code == ExitCode.OK
    assert out.startswith("RollbridgeNoStandby\n\n")
    assert "- no-standby in rollbridge doctor: start another one, on another machine\n" in out
    code, out, _ = told(capsys, "doctor", "--explain", name, "--json")
    assert [item["alert"] for item in json.loads(out)] == ["RollbridgeNoStandby"]


def test_a_finding_that_goes_with_several_alerts_has_all_of_them_explained(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = told(capsys, "doctor", "--explain", "stream-error", "--json")
    assert [item["alert"] for item in json.loads(out)] == ["RollbridgeChangeWaits", "RollbridgeStreamInError"]


def named_checks() -> set[str]:
    """The names of all findings: the doctor's modules have them literally, by a constant, or as a stream's fault."""
    found = set[str]()
    for path in DOCTOR.glob("*.py"):
        module = importlib.import_module(f"rollbridge.doctor.{path.stem}")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = (
                ast.walk(node.func) if isinstance(node, ast.Call) else ()
            )  # also (problem if ... else warning)(...)
            if not {"problem", "warning"} & {item.id for item in called if isinstance(item, ast.Name)}:
                continue
            assert isinstance(node, ast.Call)
            match node.args[0]:
                case ast.Constant(value=str(name)):
                    found.add(name)
                case ast.Name(id=constant):
                    found.add(getattr(module, constant))
                case ast.Attribute(attr="code"):
                    found |= WATCHED | UNLED
                case other:
                    pytest.fail(f"what is {ast.unparse(other)}?")
    return found


def test_the_doctor_explains_each_of_its_findings(capsys: pytest.CaptureFixture[str]) -> None:
    checks = named_checks()
    assert {"orphan", "name-clash", "short-retention", TOPIC_DELETED, TOPIC_CLOSED, "no-leader"} <= checks
    for check in sorted(checks):
        code, out, _ = told(capsys, "doctor", "--explain", check)
        assert code == ExitCode.OK, check
        assert max(map(len, out.splitlines())) <= 100
        assert told(capsys, "doctor", "--explain", check, "--json")[0] == ExitCode.OK
    assert notes().keys() <= checks
    assert not {check for check in notes() if alerts_of(check)}, "the runbook has these"


def test_a_finding_that_goes_with_no_alert_is_told_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = told(capsys, "doctor", "--explain", "Topic-Deleted")
    assert out.startswith(
        "topic-deleted in rollbridge doctor\n\nThe topic that a stream has adopted was deleted: commits"
    )
    assert "\n- rollbridge stream release TOPIC, which ends what is open as aborted\n" in out
    _, out, _ = told(capsys, "doctor", "--explain", "orphan", "--json")
    [note] = json.loads(out)
    assert (note["finding"], len(note["do"])) == ("orphan", 1)
    _, out, _ = told(capsys, "doctor", "--explain", "buffer-lost", "--json")
    assert [item["alert"] for item in json.loads(out)] == ["RollbridgeStreamInError"]


def test_a_name_that_there_is_not_is_an_error_that_names_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = told(capsys, "doctor", "--explain", "no-such")
    assert (code, out) == (ExitCode.NOT_FOUND, "")
    assert "there is no alert no-such" in err
    assert "RollbridgeFoldLag" in err


@pytest.mark.parametrize("alert", ALERTS.values(), ids=lambda alert: alert.name)
def test_on_a_terminal_a_runbook_is_plain_and_not_wide(alert: Alert) -> None:
    text = plain_runbook(alert)
    assert max(map(len, text.splitlines())) <= 100
    assert "`" not in text
    assert "](" not in text
    assert "**" not in text
    links_spelt_out = re.sub(r"\[([^\]]+)\]\(([^)]+)\)", r"\1 (docs/\2)", runbook(alert))
    assert text.split()[1:] == re.sub(r"\*+|`", "", links_spelt_out).split()


# ``rollbridge monitoring``


def test_the_command_writes_the_files_that_the_docs_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "folder"
    code, out, _ = told(capsys, "monitoring", str(folder), "--json")
    assert code == ExitCode.OK
    assert json.loads(out) == {"written": [str(folder / RULES_FILE), str(folder / BOARD_FILE)]}
    assert sorted(path.name for path in folder.iterdir()) == sorted([RULES_FILE, BOARD_FILE])
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    for written, name in ((RULES_FILE, "rules.yaml"), (BOARD_FILE, "board.json")):
        assert (folder / written).read_bytes() == (PACKAGE / name).read_bytes()
        assert f"](../bridge/rollbridge/monitoring/{name})" in page
    assert told(capsys, "monitoring", str(folder))[0] == ExitCode.OK, "again, with nothing changed"


def test_a_file_that_was_changed_is_not_replaced_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = tmp_path / BOARD_FILE
    changed.write_text("{}")
    code, _, err = told(capsys, "monitoring", str(tmp_path))
    assert code == ExitCode.CONFLICT
    assert str(changed) in err
    assert "nothing was written" in err
    assert changed.read_text() == "{}"
    assert not (tmp_path / RULES_FILE).exists()
    assert told(capsys, "monitoring", str(tmp_path), "--overwrite")[0] == ExitCode.OK
    assert changed.read_text() != "{}"


def test_rules_lead_to_where_the_docs_are_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told(capsys, "monitoring", str(tmp_path), "--docs", "https://docs.example.com/rollbridge")
    text = (tmp_path / RULES_FILE).read_text(encoding="utf-8")
    assert 'runbook_url: "https://docs.example.com/rollbridge/runbook.html#rollbridgenoleader"' in text


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = told(capsys, "monitoring", str(tmp_path / "file" / "below"))
    assert code == ExitCode.ENVIRONMENT
    assert str(tmp_path / "file" / "below") in err


# What a runbook names


COMMAND = re.compile(r"\brollbridge ((?:[a-z]+(?:-[a-z]+)* ?)+)((?:--[a-z-]+)?)")


@pytest.mark.parametrize("alert", ALERTS.values(), ids=lambda alert: alert.name)
def test_commands_and_settings_of_a_runbook_exist(alert: Alert) -> None:
    text = runbook(alert)
    for words, option in COMMAND.findall(text):
        command: click.Command = command_line
        for word in words.split():
            if not isinstance(command, click.Group):
                break  # the sentence goes on
            found = command.get_command(click.Context(command), word)
            assert found is not None, f"rollbridge {words}"
            command = found
        known = {name for parameter in (*command.params, *command_line.params) for name in parameter.opts}
        assert not option or option in known, f"rollbridge {words}{option}"
    page = (ROOT / "docs" / "coordinator-options.md").read_text(encoding="utf-8")
    for setting in re.findall(r"`([A-Z]+(?:_[A-Z]+)+)`", text):
        assert f"| `{setting.lower()}` |" in page, setting
