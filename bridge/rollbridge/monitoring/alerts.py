"""Alerts as values: a rule for Prometheus, and what whoever is called by it is told.

The text of an alert is written once. Rules take summary and description of it, the runbook in ``docs/operations.md``
the rest, ``rollbridge doctor --explain`` all of it, and the doctor's findings their remedies.

Expressions sum over the coordinators of one installation, which is one ``job`` of Prometheus: only the leader of a
group tells of it, and which coordinator that is must not matter for how long an alert has been pending.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

NAME_PREFIX: Final = "Rollbridge"
_PLACEHOLDER: Final = re.compile(r"\{(\w+)\}")


class Urgency(StrEnum):
    """Who is told of an alert, as its label ``severity``."""

    CRITICAL = "critical"
    """Somebody is called now: transactions do not commit, or data that was acknowledged is not read."""
    WARNING = "warning"
    """Somebody looks in the course of the day: it works, and may not go on to."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to do about a finding of the doctor, or about one case of it.

    Attributes:
        check: The finding's name.
        text: What to do; names in braces are filled in by the doctor, and shown in capitals elsewhere.
        case: Of what the finding is, where its name alone does not say it.
    """

    check: str
    text: str
    case: str = ""

    @property
    def shown(self) -> str:
        """The text for those who know no particular case."""
        return _PLACEHOLDER.sub(lambda name: name[1].upper(), self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alert of Prometheus with its runbook.

    Attributes:
        name: Without the prefix ``Rollbridge``.
        expression: PromQL; fires while it returns anything.
        pending: For how long it has to before the alert fires, as Prometheus writes it.
        summary, description: Templates of Prometheus. A summary fits into a line of a pager.
        means: What the alert says, and what follows from it.
        look: Where to look, in this order.
        remedies: What to do about what the doctor finds.
        actions: What else to do.
        avoid: What not to do, and why.
        threshold: Why the limits are what they are.
    """

    name: str
    expression: str
    pending: str
    urgency: Urgency
    summary: str
    description: str
    means: str
    look: tuple[str, ...]
    actions: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    avoid: str
    threshold: str

    @property
    def full_name(self) -> str:
        """The name in Prometheus, and the title in the runbook."""
        return NAME_PREFIX + self.name

    @property
    def anchor(self) -> str:
        """The name of its section in ``docs/operations.md``."""
        return self.full_name.lower()


_EMPHASIS: Final = re.compile(r"\*+|`")
_LINK: Final = re.compile(r"\[([^\]]+)\]\((#?)([^)]+)\)")
_WIDTH: Final = 100


def plain_runbook(alert: Alert) -> str:
    """Return the same for a terminal, with its title, in lines of 100 columns at most."""
    linked = _LINK.sub(lambda link: f"{link[1]} (docs/{'operations.md#' if link[2] else ''}{link[3]})", runbook(alert))
    lines = [alert.full_name, ""]
    for line in _EMPHASIS.sub("", linked).splitlines():
        lines += textwrap.wrap(line, _WIDTH, subsequent_indent=_hanging(line), break_on_hyphens=False) or [""]
    return "\n".join(lines) + "\n"


def _hanging(line: str) -> str:
    """The indentation of what follows the first line of an item of a list."""
    mark = re.match(r"(?:-|\d+\.) ", line)
    return " " * len(mark[0]) if mark else ""


def runbook(alert: Alert) -> str:
    """Return the section of an alert in the runbook, in Markdown, without its title."""
    after = "" if alert.pending == "0s" else f", after {alert.pending}"
    parts = [f"*{alert.urgency.capitalize()}{after}.* {alert.means}", f"**Limits.** {alert.threshold}"]
    parts.append("**Look at**\n\n" + "\n".join(f"{number}. {line}" for number, line in enumerate(alert.look, 1)))
    todo = [f"- {line}" for line in alert.actions]
    for remedy in alert.remedies:
        case = f", {remedy.case}" if remedy.case else ""
        todo.append(f"- `{remedy.check}` in `rollbridge doctor`{case}: {remedy.shown}")
    parts.append("**Do**\n\n" + "\n".join(todo))
    parts.append(f"**Do not** {alert.avoid}")
    return "\n\n".join(parts) + "\n"
