"""Retention on the command line, of streams and of commit logs: its options, and how it is told."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import click
from click.core import ParameterSource

from rollbridge.cli.records import duration, size
from rollbridge.cli.tables import counted
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
    "--retention-bytes", type=_size_or_none, default=None, metavar="SIZE", help="Keep this many bytes, such as 10GiB."
)
RETENTION_GROUP = click.option(
    "--retention-group",
    "retention_groups",
    multiple=True,
    metavar="GROUP",
    help="Delete nothing that this consumer group has not read.",
)


def retention_text(retention: Retention) -> str:
    """Describe a retention in a few words."""
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
    """Return a retention as JSON."""
    return {
        "time_ms": None if retention.ms == FOREVER else retention.ms,
        "bytes": None if retention.bytes == FOREVER else retention.bytes,
        "groups": list(retention.groups),
    }


def given_retention(
    context: click.Context, time_kept: timedelta | None, bytes_kept: int | None, groups: tuple[str, ...]
) -> dict[str, Any]:
    """Return those of the options that were given, as the arguments of ``update_stream`` and ``update_group``."""
    options = (
        ("retention_time", time_kept),
        ("retention_bytes", bytes_kept),
        ("retention_groups", () if groups == (NONE,) else groups),
    )
    return {name: value for name, value in options if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
