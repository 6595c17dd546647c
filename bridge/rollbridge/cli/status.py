"""``rollbridge status``: the parts of a cluster and whether they run."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from importlib import import_module

import click

from rollbridge.cli.common import CliContext, ExitCode
from rollbridge.config import CONFIG_VARIABLE
from rollbridge.doctor.probes import RUNNING, ClusterStatus
from rollbridge.doctor.status import cluster_status, zookeeper_parts
from rollbridge.model.text import printable

_PART_COLUMNS = 14


@click.command()
@click.pass_obj
def status(context: CliContext) -> int:
    """Show what runs, and where; exit code 7 if not everything does, or a group or stream has a fault.

    Looks at the embedded cluster unless another one is named.
    """
    found = _look(context)
    document = asdict(found) | {"ok": found.ok}
    context.answer(document, _status_text(found))
    return ExitCode.OK if found.ok else ExitCode.UNAVAILABLE


def _look(context: CliContext) -> ClusterStatus:
    named = (*context.flags.values(), context.config_file, os.environ.get(CONFIG_VARIABLE))
    named += tuple(os.environ.get(f"ROLLBRIDGE_{key}") for key in ("BOOTSTRAP_SERVERS", "ZOOKEEPER"))
    if any(named):
        return cluster_status(context.settings())
    # Imported by name: only this command needs the module that looks at processes.
    found: ClusterStatus = import_module("rollbridge_devcluster.command").look(context.home)
    if not any(part.part == "zookeeper" and part.state == RUNNING for part in found.parts):
        return found
    wrong = [part for part in zookeeper_parts(context.settings()) if part.state != RUNNING and " " in part.part]
    return replace(found, parts=(*found.parts, *wrong))  # what is not named there is known from its process


def _status_text(found: ClusterStatus) -> str:
    if not found.parts:
        return f"There is no cluster in {found.home}; `rollbridge up` starts one."
    lines = []
    width = max(_PART_COLUMNS, *(len(part.part) + 2 for part in found.parts))
    for part in found.parts:
        columns = (
            f"{printable(part.part):<{width}}",
            f"{printable(part.state):<14}",
            f"{printable(part.address or ''):<22}",
        )
        lines.append("".join(columns) + (f"process {part.pid}" if part.pid else ""))
        lines += [f"  {what:<14}{path}" for what, path in part.files.items()]
    if found.home and not found.ok:
        lines.append("`rollbridge up` starts what does not run.")
    return "\n".join(line.rstrip() for line in lines)
