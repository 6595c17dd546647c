"""``rollbridge ids``: transactional ids of producers at gateways."""

from __future__ import annotations

import time
from datetime import timedelta

import click

from rollbridge.cli import records as values
from rollbridge.cli.common import CliContext, counted, duration, moment, table, zookeeper_session
from rollbridge.metadata import paths
from rollbridge.metadata.gateway_store import forget_ids, list_clients, read_gateways, read_holders, read_records

_SHOWN = 20


@click.group()
def ids() -> None:
    """List and forget transactional ids of producers at gateways."""


@ids.command("list")
@click.option("--gateway", metavar="NAME", help="Show only ids that this gateway serves.")
@click.option("--limit", type=click.IntRange(1), default=1_000, show_default=True, help="Show so many at most.")
@click.pass_obj
def list_ids(context: CliContext, gateway: str | None, limit: int) -> None:
    """List transactional ids, which gateway serves them, and when their producers last began."""
    with zookeeper_session(context) as session:
        clients = list_clients(session, paths.GATEWAY_HOLDERS if gateway else paths.GATEWAY_IDS)
        held = read_holders(session, clients, read_gateways(session))
        if gateway:
            clients = [client for client in clients if client in held and held[client].gateway == gateway]
        found = read_records(session, clients[:limit])
    shown = sorted(found.items(), key=lambda pair: pair[1].transactional_id)
    served = {client: item.gateway for client, item in held.items()}
    documents = [
        {
            "transactional_id": item.transactional_id,
            "client": client,
            "gateway": served.get(client) or None,
            "wanted_by": held[client].wanted_by or None if client in held else None,
            "begun_ms": item.written_ms,
            "begun_at": item.gateway or None,
            "timeout_ms": item.timeout_ms if item.timeout_ms >= 0 else None,
        }
        for client, item in shown
    ]
    rows = [
        (
            item.transactional_id,
            served.get(client) or "-",
            moment(item.written_ms),
            "longest" if item.timeout_ms < 0 else duration(item.timeout_ms),
        )
        for client, item in shown
    ]
    text = table(("TRANSACTIONAL ID", "SERVED BY", "BEGUN", "LEASE"), rows) if rows else "There are none."
    if len(clients) > limit:
        text += f"\n{len(clients) - limit:,} more are not shown: see --limit."
    context.answer({"count": len(clients), "ids": documents}, text)


@ids.command()
@click.option(
    "--idle",
    type=values.duration,
    default="30d",
    show_default=True,
    metavar="DURATION",
    help="Forget ids with which no producer has begun for so long.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be done, and change nothing.")
@click.pass_obj
def forget(context: CliContext, idle: timedelta, dry_run: bool) -> None:
    """Forget transactional ids that are not in use. Run it with the gateways' credentials.

    Kept are ids that a gateway serves, that have a transaction open, or of which outcomes are remembered. A producer
    that comes back later begins as if its id had never been used; one that has run all the time without writing is
    told so by an error, and has to be started again.
    """
    before_ms = int((time.time() - idle.total_seconds()) * 1000)
    with zookeeper_session(context) as session:
        found = forget_ids(session, before_ms, dry_run=dry_run)
    document = {"done": not dry_run, "count": len(found.removed), "ids": list(found.removed), "kept": found.kept}
    head = "Would forget" if dry_run else "Forgot"
    names = ", ".join(found.removed[:_SHOWN]) + (", ..." if len(found.removed) > _SHOWN else "")
    text = f"{head} {counted(len(found.removed), 'transactional id')}" + (f": {names}" if names else "")
    context.answer(document, f"{text}; {found.kept:,} as old are in use.")
