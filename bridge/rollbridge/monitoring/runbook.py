"""The board, and the runbook: what an alert means, where to look, what to do.

``rules.yaml`` has the rule of each alert, ``runbook.toml`` its runbook. ``docs/runbook*.md`` show it, ``rollbridge
doctor --explain`` prints it, and the doctor's findings take their remedies from it. ``findings.toml`` explains the
findings that go with no alert.
"""

from __future__ import annotations

import json
import re
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

from rollbridge.errors import NotFoundError
from rollbridge.metadata.changes import UNLED
from rollbridge.monitoring import __name__ as _PACKAGE

DOCS: Final = "docs"
"""Folder of the pages of the runbook, to which the rules link unless told otherwise."""
_PAGE: Final = re.compile(rf'(?<=runbook_url: "){DOCS}/([\w-]+)\.md')


def text(name: str) -> str:
    """Return the text of a file of this package."""
    return files(_PACKAGE).joinpath(name).read_text(encoding="utf-8")


def rules(docs: str = DOCS) -> str:
    """Return the alert rules, as YAML.

    Args:
        docs: Address of the folder with the page ``runbook.md``, or of the site that was made of it
            (``https://.../runbook.html`` is linked if it begins with ``http``).
    """
    ending = "html" if docs.startswith("http") else "md"
    folder = json.dumps(docs.rstrip("/"), ensure_ascii=False)[1:-1]
    return _PAGE.sub(lambda page: f"{folder}/{page[1]}.{ending}", text("rules.yaml"))


def board() -> str:
    """Return the board, as JSON that Grafana 11 and newer import."""
    return text("board.json")


NAME_PREFIX: Final = "Rollbridge"


@dataclass(frozen=True, slots=True)
class Remedy:
    """Remedy of a finding of the doctor, or of one case of it.

    Attributes:
        check: Name of the finding.
        do: What to do; the doctor fills in names in braces, elsewhere they are shown in capitals.
        case: Cause of the finding, where its name alone does not say it.
    """

    check: str
    do: str
    case: str = ""

    @property
    def shown(self) -> str:
        """The text with names in capitals."""
        return re.sub(r"\{(\w+)\}", lambda name: name[1].upper(), self.do)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alert of Prometheus with its runbook.

    Attributes:
        name: Without the prefix ``Rollbridge``.
        expression: PromQL.
        pending: Time for which the expression has to hold before the alert fires, as Prometheus writes it.
        severity: ``critical`` (call a person now) or ``warning`` (look in the course of the day).
        means: What the alert says, and what follows from it.
        limits: Why the limits are what they are.
        look: Where to look, in this order.
        do: What to do, apart from remedies of findings.
        do_not: What not to do, and why.
        findings: Remedies of what the doctor finds.
    """

    name: str
    expression: str
    pending: str
    severity: str
    means: str
    limits: str
    look: tuple[str, ...]
    do: tuple[str, ...]
    do_not: str
    findings: tuple[Remedy, ...]

    @property
    def full_name(self) -> str:
        """The name in Prometheus, and the title in the runbook."""
        return NAME_PREFIX + self.name

    @property
    def anchor(self) -> str:
        """The name of its section in the runbook."""
        return self.full_name.lower()


# Clients do without a parser of YAML. Tests compare this with what one reads.
_RULE: Final = re.compile(
    r" - alert: (?P<name>\w+)\n"
    r" +expr: \|-\n(?P<expression>(?: {10}.*\n)+)"
    r" +for: (?P<pending>\w+)\n"
    r" +labels:\n +severity: (?P<severity>\w+)\n"
)


@cache
def alerts() -> Mapping[str, Alert]:
    """Return all alerts by their full names, in the order of the rules."""
    runbooks = tomllib.loads(text("runbook.toml"))
    return {rule["name"]: _alert(rule, runbooks[rule["name"]]) for rule in _RULE.finditer(rules())}


def _alert(rule: re.Match[str], section: Mapping[str, Any]) -> Alert:
    return Alert(
        name=rule["name"].removeprefix(NAME_PREFIX),
        expression=textwrap.dedent(rule["expression"]).rstrip("\n"),
        pending=rule["pending"],
        severity=rule["severity"],
        means=_joined(section["means"]),
        limits=_joined(section["limits"]),
        look=tuple(map(_joined, section["look"])),
        do=tuple(map(_joined, section.get("do", ()))),
        do_not=_joined(section["do_not"]),
        findings=tuple(Remedy(**{**item, "do": _joined(item["do"])}) for item in section.get("findings", ())),
    )


def _joined(lines: str) -> str:
    return " ".join(lines.split())


def remedy(check: str, case: str = "", **names: object) -> str:
    """Return what to do about a finding, with the names of what was found.

    Raises:
        KeyError: there is no such finding or case, or a name is missing.
    """
    return _remedies()[check, case].do.format_map(names)


@cache
def _remedies() -> Mapping[tuple[str, str], Remedy]:
    return {(item.check, item.case): item for alert in alerts().values() for item in alert.findings}


def alerts_of(check: str) -> list[Alert]:
    """Return the alerts that go with a finding of the doctor; none for most."""
    return [alert for alert in alerts().values() if any(item.check == check for item in alert.findings)]


@dataclass(frozen=True, slots=True)
class FindingNote:
    """Explanation of a finding of the doctor that goes with no alert.

    Attributes:
        check: Its name.
        means: What it says, and what follows from it.
        do: What to do, with names in capitals.
    """

    check: str
    means: str
    do: str


@cache
def notes() -> Mapping[str, FindingNote]:
    """Return the notes by the names of their findings."""
    given = tomllib.loads(text("findings.toml"))
    return {check: FindingNote(check, _joined(item["means"]), _joined(item["do"])) for check, item in given.items()}


_UNLED: Final = "unled"
"""Remedy of all findings that have the code of the fault of a stream that is not led."""


def explained(name: str) -> list[Alert | FindingNote]:
    """Return the alerts of a name: that of an alert, in any spelling, or of a finding of the doctor, with its note.

    Raises:
        NotFoundError: there is neither.
    """
    wanted = name.casefold()
    found: list[Alert | FindingNote] = [
        alert for alert in alerts().values() if wanted in (alert.full_name.casefold(), alert.name.casefold())
    ]
    if not found:
        found += [notes()[wanted]] if wanted in notes() else []
        found += alerts_of(_UNLED if wanted in UNLED else wanted)
    if not found:
        raise NotFoundError(
            f"there is no alert {name}, and no finding of that name; alerts are {', '.join(alerts())}; nothing was done"
        )
    return found


def runbook(alert: Alert) -> str:
    """Return the section of an alert in the runbook, in Markdown, without its title."""
    parts = [f"*{alert.severity.capitalize()}, after {alert.pending}.* {alert.means}", f"**Limits.** {alert.limits}"]
    parts.append("**Look at**\n\n" + "\n".join(f"{number}. {line}" for number, line in enumerate(alert.look, 1)))
    todo = [f"- {line}" for line in alert.do]
    for item in alert.findings:
        case = f", {item.case}" if item.case else ""
        todo.append(f"- `{item.check}` in `rollbridge doctor`{case}: {item.shown}")
    parts.append("**Do**\n\n" + "\n".join(todo))
    parts.append(f"**Do not** {alert.do_not}")
    return "\n\n".join(parts) + "\n"


_EMPHASIS: Final = re.compile(r"\*+|`")
_LINK: Final = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")
_WIDTH: Final = 100


def plain_runbook(told: Alert | FindingNote) -> str:
    """Return the same, or a note, for a terminal, with its title, in lines of 100 columns at most."""
    if isinstance(told, FindingNote):
        title, whole = f"{told.check} in rollbridge doctor", f"{told.means}\n\nDo\n\n- {told.do}"
    else:
        title, whole = told.full_name, _EMPHASIS.sub("", _LINK.sub(r"\1 (docs/\2)", runbook(told)))
    lines = [title, ""]
    for line in whole.splitlines():
        lines += textwrap.wrap(line, _WIDTH, subsequent_indent=_hanging(line), break_on_hyphens=False) or [""]
    return "\n".join(lines) + "\n"


def _hanging(line: str) -> str:
    mark = re.match(r"(?:-|\d+\.) ", line)
    return " " * len(mark[0]) if mark else ""
