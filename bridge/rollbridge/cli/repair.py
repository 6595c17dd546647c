"""``rollbridge repair``: bring a ZooKeeper that was restored from a backup up to what Kafka knows."""

from __future__ import annotations

import time

import click

from rollbridge.cli.context import CliContext
from rollbridge.cli.exit_codes import ExitCode
from rollbridge.doctor.repair import carry_out, gather_evidence, lost_groups, outdated_groups, read_nodes
from rollbridge.model.repair import plan
from rollbridge.zookeeper.metadata import Metadata
from rollbridge.zookeeper.session import ZooKeeperSession


@click.command()
@click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
@click.option("--force", is_flag=True, help="Also if no coordinator has found that ZooKeeper was set back.")
@click.pass_obj
def repair(context: CliContext, dry_run: bool, force: bool) -> ExitCode:
    """Repair ZooKeeper after it was restored from a backup. Run it with the coordinators' credentials.

    What counts up is raised beyond all that was given out since the backup, and what was lost is written again, from
    the journals, commit logs and buffers in Kafka. Sessions of named clients end, pending admin requests are dropped.
    It can be run again after it was interrupted. See docs/operations.md.
    """
    settings = context.settings()
    with ZooKeeperSession(
        settings.zookeeper,
        root=settings.zookeeper_root,
        name=settings.client_name,
        security=settings.zookeeper_security,
    ) as session:
        found = outdated_groups(session)
        if not found and not force:
            context.answer({"outdated": [], "steps": []}, "no coordinator has found that ZooKeeper was set back")
            return ExitCode.OK
        # All of them: they share the transaction counter, and a group without a leader has noticed nothing yet.
        names, nodes = Metadata(session).groups(), read_nodes(session)
        names += lost_groups(settings, nodes, names)
        steps = plan(nodes, gather_evidence(settings, names), int(time.time() * 1000))
        if not dry_run:
            carry_out(session, steps, context.tell)
    document = {"outdated": [str(name) for name in found], "done": not dry_run, "steps": [item.what for item in steps]}
    head = "this would be done:" if dry_run else f"done, in {len(steps)} steps; coordinators lead again by themselves"
    context.answer(document, "\n".join([head, *(f"  {item.what}" for item in steps)] if dry_run else [head]))
    return ExitCode.OK
