"""All alerts, and the file of rules that Prometheus reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Final

from rollbridge.errors import NotFoundError
from rollbridge.monitoring.alerts import Alert, Remedy
from rollbridge.monitoring.coordinator_alerts import COORDINATOR_ALERTS
from rollbridge.monitoring.gateway_alerts import GATEWAY_ALERTS
from rollbridge.monitoring.transaction_alerts import TRANSACTION_ALERTS

GROUPS: Final[Mapping[str, tuple[Alert, ...]]] = {
    "rollbridge-coordinators": COORDINATOR_ALERTS,
    "rollbridge-transactions": TRANSACTION_ALERTS,
    "rollbridge-gateways": GATEWAY_ALERTS,
}
"""Groups of rules by name."""
ALERTS: Final[Mapping[str, Alert]] = {alert.full_name: alert for group in GROUPS.values() for alert in group}
"""All alerts by their full names."""
_REMEDIES: Final[Mapping[tuple[str, str], Remedy]] = {
    (remedy.check, remedy.case): remedy for alert in ALERTS.values() for remedy in alert.remedies
}
DOCS: Final = "docs"
"""Where the pages are of which rules link one, unless somebody says where they are served."""


def remedy(check: str, case: str = "", **names: object) -> str:
    """Return what to do about a finding, with the names of what was found.

    Raises:
        KeyError: there is no such finding or case, or a name is missing.
    """
    return _REMEDIES[check, case].text.format_map(names)


def alerts_of(check: str) -> list[Alert]:
    """Return the alerts that go with a finding of the doctor; none for most."""
    return [alert for alert in ALERTS.values() if any(item.check == check for item in alert.remedies)]


def explained(name: str) -> list[Alert]:
    """Return the alerts of a name: that of an alert, however it is spelt, or of a finding of the doctor.

    Raises:
        NotFoundError: there is none.
    """
    wanted = name.casefold()
    found = [alert for alert in ALERTS.values() if wanted in (alert.full_name.casefold(), alert.name.casefold())]
    found = found or alerts_of(wanted)
    if not found:
        raise NotFoundError(
            f"there is no alert {name}, and no finding of that name that goes with one; alerts are "
            f"{', '.join(ALERTS)}; nothing was looked at"
        )
    return found


def rules(docs: str = DOCS) -> str:
    """Return the file of rules, as YAML.

    Args:
        docs: Address of the folder with the page ``operations.md``, or of the site that was made of it
            (``https://.../operations.html`` is linked if it begins with ``http``).
    """
    return "\n".join(_lines(docs)) + "\n"


def runbook_address(alert: Alert, docs: str = DOCS) -> str:
    """Return the address of an alert's section of the runbook."""
    page = "operations.html" if docs.startswith("http") else "operations.md"
    return f"{docs.rstrip('/')}/{page}#{alert.anchor}"


def _lines(docs: str) -> Iterator[str]:
    yield "# Alerts of rollbridge, for `rule_files` of prometheus.yml. Written by `rollbridge monitoring`, which writes"
    yield "# it anew with each release; what each alert means and what to do stands at its `runbook_url`."
    yield "groups:"
    for name, alerts in GROUPS.items():
        yield f"  - name: {name}"
        yield "    rules:"
        for alert in alerts:
            yield f"      - alert: {alert.full_name}"
            yield "        expr: |-"
            yield from (f"          {line}" for line in alert.expression.splitlines())
            yield f"        for: {alert.pending}"
            yield "        labels:"
            yield f"          severity: {alert.urgency}"
            yield "        annotations:"
            yield f"          summary: {_quoted(alert.summary)}"
            yield f"          description: {_quoted(alert.description)}"
            yield f"          runbook_url: {_quoted(runbook_address(alert, docs))}"


def _quoted(text: str) -> str:
    """A scalar in double quotes: JSON's are YAML's."""
    return json.dumps(text, ensure_ascii=False)
