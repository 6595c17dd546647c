"""``rollbridge group``: list transaction groups, and change how long their commit logs are kept."""

from __future__ import annotations

from typing import Any

import click

from rollbridge.cli.common import CliContext, connected, moment, table
from rollbridge.cli.stream import (
    RETENTION_BYTES,
    RETENTION_GROUP,
    RETENTION_TIME,
    given_options,
    retention_document,
    retention_text,
)
from rollbridge.metadata.records import Group
from rollbridge.stream.config import Retention

_GROUP = click.argument("group_name", metavar="SCOPE[/GROUP]")


def log_retention_text(retention: Retention | None) -> str:
    """Describe how long a commit log is kept, in a few words."""
    return "as long as its coordinators say" if retention is None else retention_text(retention)


@click.group()
def group() -> None:
    """List transaction groups, and change how long their commit logs are kept."""


@group.command("list")
@click.pass_obj
def list_groups(context: CliContext) -> None:
    """List the transaction groups, and how long their commit logs are kept."""
    with connected(context) as b:
        found = b.admin.groups()
        unreadable = b.admin.unreadable_groups()
    for name, why in unreadable.items():
        context.tell(f"group {name} is left out, its record cannot be read: {why}")
    rows = [(str(item.name), moment(item.created_ms), log_retention_text(item.retention)) for item in found]
    context.answer([_document(item) for item in found], table(("GROUP", "CREATED", "COMMIT LOG KEEPS"), rows))


@group.command()
@_GROUP
@RETENTION_TIME
@RETENTION_BYTES
@RETENTION_GROUP
@click.option("--default", is_flag=True, help="Keep it as long as the coordinators say, whatever was set before.")
@click.pass_context
def update(click_context: click.Context, /, group_name: str, default: bool, **_: Any) -> None:
    """Change how long the commit log of a group is kept. Options left out stay as they are; none removes a limit.

    Both limits are minimums: what is beyond either of them is deleted. Give --retention-group once for each consumer
    group that commits its place in the log, or with none.
    """
    given = {name: value for name, value in given_options(click_context).items() if name.startswith("retention_")}
    if bool(given) == default:
        raise click.UsageError(
            "say what to change: --retention-time, --retention-bytes or --retention-group; or --default alone"
        )
    context: CliContext = click_context.obj
    with connected(context) as b:
        found = b.admin.update_group(group_name, **given, default=default)
    context.answer(_document(found), f"{found.name}: {log_retention_text(found.retention)}.")


def _document(found: Group) -> dict[str, Any]:
    return {
        "group": str(found.name),
        "created_ms": found.created_ms,
        "commit_log": found.name.commit_log_topic,
        "retention": None if found.retention is None else retention_document(found.retention),
    }
