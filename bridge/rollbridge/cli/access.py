"""``rollbridge access``: permissions in ZooKeeper and in Kafka."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from rollbridge.cli.common import CliContext, counted, is_terminal, table, zookeeper_session
from rollbridge.metadata import access as rights
from rollbridge.metadata.access import Right
from rollbridge.metadata.acls import Access, digest_identity, parse_identity, shown
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import DEFAULT_GROUP, GroupName, StreamName, check_adoptable, check_stream_or_topic

_GATEWAYS = "gateways"
_GROUP = click.argument("group", metavar=f"SCOPE/GROUP|{_GATEWAYS}")
_IDENTITIES = click.argument("identities", metavar="IDENTITY...", nargs=-1, required=True)
_ROLES: dict[str, Callable[[StreamName, GroupName, tuple[str, ...], str], Iterator[Right]]] = {
    "reader": lambda stream, _, groups, topic: rights.reader(stream, groups, topic),
    "previewer": rights.previewer,
    "writer": rights.writer,
    "compactor": lambda stream, _, __, topic: rights.compactor(stream, topic),
    "gateway": lambda stream, group, _, topic: rights.gateway(stream, group, topic),
    "coordinator": lambda stream, _, groups, topic: rights.coordinator(stream.scope, groups, topic),
}


@click.group()
def access() -> None:
    """Manage who may use which transaction group (ACLs in ZooKeeper), and print the Kafka ACLs of a role.

    Run commands that change ZooKeeper with the coordinators' credentials. See docs/security.md.
    """


@access.command()
@click.option("--shared-counter", is_flag=True, help="Also close the counter of clients of earlier versions.")
@click.pass_obj
def secure(context: CliContext, *, shared_counter: bool) -> None:
    """Restrict the znodes that were written without credentials, and create those that are missing.

    Coordinators then need the credentials with which this is run; clients need `grant`.
    """
    with _opened(context) as found:
        closed = found.secure(shared_counter=shared_counter)
    context.answer({"closed": closed}, f"{counted(closed, 'node')} closed.")


@access.command()
@_GROUP
@_IDENTITIES
@click.pass_obj
def grant(context: CliContext, group: str, identities: tuple[str, ...]) -> None:
    """Let identities use a transaction group, which is created if it does not exist, or be gateways.

    IDENTITY is digest:USER:HASH, which `rollbridge access identity USER` makes of a password, or x509:SUBJECT. Gateways
    need the groups that they serve as well.
    """
    name = None if group == _GATEWAYS else GroupName.parse(group)
    wanted = [parse_identity(item) for item in identities]
    names = [shown(item) for item in wanted]
    with _opened(context) as found:
        if name is None:
            found.grant_gateways(wanted)
            context.answer({"group": group, "granted": names}, f"Gateways may be {', '.join(names)}.")
            return
        found.grant(name, wanted)
    context.answer({"group": str(name), "granted": names}, f"Group {name} may be used by {', '.join(names)}.")


@access.command()
@_GROUP
@_IDENTITIES
@click.pass_obj
def revoke(context: CliContext, group: str, identities: tuple[str, ...]) -> None:
    """Revoke the use of a transaction group, or of being a gateway, from identities; digest:USER is enough."""
    name = None if group == _GATEWAYS else GroupName.parse(group)
    with _opened(context) as found:
        gone = found.revoke_gateways(identities) if name is None else found.revoke(name, identities)
    names = [shown(item) for item in gone]
    what = "Gateways may no longer be" if name is None else f"Group {name} may no longer be used by"
    text = f"{what} {', '.join(names)}." if names else "None of them might use it."
    context.answer({"group": group if name is None else str(name), "revoked": names}, text)


@access.command("list")
@click.pass_obj
def list_access(context: CliContext) -> None:
    """List who may use which transaction group."""
    with zookeeper_session(context) as session:
        found = Access(session)
        metadata = Metadata(session)
        groups = metadata.groups()
        if not groups:
            metadata.require_layout()
        known = {
            str(name): ["everybody"] if found.is_open(name) else [shown(item) for item in found.members(name)]
            for name in groups
        }
        if gateways := found.gateways():
            known[_GATEWAYS] = [shown(item) for item in gateways]
    rows = [(name, ", ".join(identities) or "coordinators only") for name, identities in known.items()]
    context.answer(known, table(("GROUP", "MAY BE USED BY"), rows) if rows else "There are no transaction groups.")


@access.command()
@click.argument("username")
@click.pass_obj
def identity(context: CliContext, username: str) -> None:
    """Print the ZooKeeper identity of a digest user; the password is prompted for, or read from a pipe."""
    if is_terminal(sys.stdin):
        password = click.prompt("Password", hide_input=True, err=True)
    elif sys.stdin is None:
        raise click.UsageError("standard input is closed, so there is no password")
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    text = digest_identity(username, password)
    context.answer({"identity": text}, text)


@access.command("kafka-acls")
@click.argument("role", type=click.Choice(list(_ROLES)))
@click.argument("stream_name", metavar="SCOPE/STREAM|TOPIC")
@click.option("--topic", metavar="TOPIC", help="Topic that SCOPE/STREAM has adopted.")
@click.option("--principal", default="User:NAME", show_default=True, help="Principal to allow.")
@click.option("--group", default=DEFAULT_GROUP, show_default=True, help="Transaction group of the stream.")
@click.option("--consumer-group", "consumer_groups", multiple=True, metavar="NAME", help="Consumer group to allow.")
@click.pass_obj
def kafka_acls(
    context: CliContext,
    role: str,
    stream_name: str,
    topic: str | None,
    principal: str,
    group: str,
    consumer_groups: tuple[str, ...],
) -> None:
    """Print the commands that grant a role its permissions in Kafka. Contacts no server, and changes nothing.

    A coordinator's permissions cover the whole scope of the stream. For TOPIC, which is to be adopted or was, they are
    those on it and on topics/TOPIC; with another stream than that, name SCOPE/STREAM and `--topic`.
    """
    if not all(principal.partition(":")):
        raise click.UsageError(f"{principal!r} is not a principal: its type and its name, such as User:alice")
    if "/" not in check_stream_or_topic(stream_name):
        if topic is not None:
            raise click.UsageError("give a topic by its name, or SCOPE/STREAM with --topic")
        stream, adopted = StreamName.of_topic(stream_name), stream_name
    else:
        stream, adopted = StreamName.parse(stream_name), topic or ""
    if adopted:
        check_adoptable(adopted)
    wanted = list(_ROLES[role](stream, GroupName(stream.scope, group), consumer_groups, adopted))
    document = [
        {
            "resource": item.resource.value,
            "name": item.name,
            "prefixed": item.prefixed,
            "operations": list(item.operations),
            "why": item.why,
            "command": item.command(principal),
        }
        for item in wanted
    ]
    context.answer(document, "\n".join(f"# {item.why}\n{item.command(principal)}" for item in wanted))


@contextmanager
def _opened(context: CliContext) -> Iterator[Access]:
    with zookeeper_session(context) as session:
        yield Access(session)
