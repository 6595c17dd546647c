"""``rollbridge doctor``: is the cluster, and what rollbridge keeps in it, as it should be?"""

from __future__ import annotations

from dataclasses import asdict

import click

from rollbridge.cli.context import CliContext
from rollbridge.cli.exit_codes import ExitCode
from rollbridge.doctor.checks import find
from rollbridge.doctor.facts import Severity
from rollbridge.doctor.gather import gather


@click.command()
@click.pass_obj
def doctor(context: CliContext) -> ExitCode:
    """Check the cluster and rollbridge's own state, and say for each finding what to do. Changes nothing.

    Exits with 0 if nothing is wrong, or warnings are all there is, and with 9 if there is a problem.
    """
    facts = gather(context.settings())
    found = find(facts)
    document = {
        "looked_at": {"streams": len(facts.streams), "groups": len(facts.groups), "topics": len(facts.topics)},
        "findings": [{**asdict(finding), "severity": finding.severity.name.lower()} for finding in found],
    }
    lines = [
        f"{finding.severity.name} {finding.check}: {finding.what}\n    to do: {finding.remedy}" for finding in found
    ]
    lines.append(
        f"{len(facts.brokers)} brokers, {len(facts.coordinators)} coordinators, {len(facts.groups)} groups, "
        f"{len(facts.streams)} streams and {len(facts.topics)} topics: {len(found) or 'no'} findings"
    )
    context.answer(document, "\n".join(lines))
    return ExitCode.FINDINGS if any(finding.severity is Severity.PROBLEM for finding in found) else ExitCode.OK
