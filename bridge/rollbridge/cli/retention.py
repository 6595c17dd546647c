"""Options and words for how long a stream keeps its records."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import click

from rollbridge.cli.tables import counted
from rollbridge.cli.values import duration, size
from rollbridge.model.records import FOREVER, Retention

NONE: Final = "none"


def _time_or_none(text: str) -> timedelta | None:
    return None if text == NONE else duration(text)


def _size_or_none(text: str) -> int | None:
    return None if text == NONE else size(text)


RETENTION_TIME = click.option(
    "--retention-time", type=_time_or_none, default=None, metavar="TIME", help="Keep records this long, such as 7d."
)
RETENTION_BYTES = click.option(
    "--retention-bytes", type=_size_or_none, default=None, metavar="SIZE", help="Keep this much, such as 10GiB."
)
RETENTION_GROUP = click.option(
    "--retention-group",
    "retention_groups",
    multiple=True,
    metavar="GROUP",
    help="Delete nothing that this consumer group has not read.",
)


def retention_text(retention: Retention) -> str:
    """What a stream keeps, in a few words."""
    limits = []
    if retention.ms != FOREVER:
        limits.append(f"records for {timedelta(milliseconds=retention.ms)}")
    if retention.bytes != FOREVER:
        limits.append(f"{retention.bytes:,} bytes")
    text = " or ".join(limits) if limits else "all records"
    if retention.groups:
        text += f"; waits for {counted(len(retention.groups), 'group')}: {', '.join(retention.groups)}"
    return text


def retention_document(retention: Retention) -> dict[str, Any]:
    """The same for ``--json``."""
    return {
        "time_ms": None if retention.ms == FOREVER else retention.ms,
        "bytes": None if retention.bytes == FOREVER else retention.bytes,
        "groups": list(retention.groups),
    }
