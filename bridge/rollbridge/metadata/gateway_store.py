"""Read gateways and transactional ids in ZooKeeper, and remove unused ids."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final

from rollbridge.metadata import paths
from rollbridge.metadata.errors import NodeConflictError, NodeMissingError
from rollbridge.metadata.gateways import GatewayRecord, Holder, IdRecord
from rollbridge.metadata.records import CreateNode, DeleteNode, NodeOperation, SetNode
from rollbridge.metadata.session import Znode, ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import GroupName

logger = logging.getLogger(__name__)

GATEWAYS_MAX: Final = 200
"""Most gateways that are read."""
_AT_ONCE: Final = 1_000
"""Records that are read together: an id may have 32 KiB."""
_REMOVER: Final = b"nobody, as it is being removed"
"""Value of a holder's node while its id is being removed."""


@dataclass(frozen=True, slots=True)
class HeldId:
    """Holder of a transactional id.

    Attributes:
        client: Client name of the id.
        gateway: The gateway whose session it is; empty if no registered one has it.
        said: The gateway that the node names.
        wanted_by: The one that asks for it; empty if none does.
        since_ms: Time of the node's last change, by ZooKeeper's clock.
    """

    client: str
    gateway: str
    said: str
    wanted_by: str
    since_ms: int


def registered(session: ZooKeeperSession, names: Sequence[str]) -> Iterator[tuple[Znode, GatewayRecord]]:
    """Yield the nodes of gateways of these names and what they say; one that cannot be read is left out."""
    for name, node in zip(names, session.get_many([paths.gateway(name) for name in names]), strict=True):
        if node is None:
            continue
        try:
            yield node, GatewayRecord.from_json(name, node.value)
        except ValueError as fault:
            logger.warning("gateway.unreadable gateway=%s reason=%s", name, fault)


def read_gateways(session: ZooKeeperSession) -> dict[int, GatewayRecord]:
    """Return the registered gateways by their ZooKeeper sessions; one whose node cannot be read is left out."""
    found = registered(session, session.children(paths.GATEWAYS_LIVE)[:GATEWAYS_MAX])
    return {node.owner_session_id: said for node, said in found if node.owner_session_id is not None}


def read_records(session: ZooKeeperSession, clients: Iterable[str]) -> dict[str, IdRecord]:
    """Return what is on record of transactional ids, by their client names; what cannot be read is left out."""
    found = {}
    for some in batched(clients, _AT_ONCE):
        for client, node in zip(some, session.get_many([paths.gateway_id(client) for client in some]), strict=True):
            if node is None:
                continue
            try:
                found[client] = IdRecord.from_json(node.value)
            except ValueError as fault:
                logger.warning("client_record.unreadable client=%s reason=%s", client, fault)
    return found


def read_holders(
    session: ZooKeeperSession, clients: Iterable[str], gateways: Mapping[int, GatewayRecord]
) -> dict[str, HeldId]:
    """Return the holders of transactional ids, by client name; ids without a holder are left out."""
    wanted = list(clients)
    found = {}
    for client, node in zip(wanted, session.get_many([paths.gateway_holder(client) for client in wanted]), strict=True):
        if node is None:
            continue
        said, owner = Holder.decode(node.value), gateways.get(node.owner_session_id or 0)
        name = "" if owner is None else owner.name
        found[client] = HeldId(client, name, said.gateway, said.wanted_by, node.modified_ms)
    return found


def list_clients(session: ZooKeeperSession, parent: str) -> list[str]:
    """Return client names below all buckets, which spread them evenly."""
    buckets = [f"{parent}/{name}" for name in session.children(parent)]
    return [client for clients in session.children_many(buckets) for client in clients]


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Result of the removal of unused ids.

    Attributes:
        removed: Transactional ids that were removed, or would be.
        kept: Number of others as old that are in use: served, with a transaction open, or with outcomes that are
            remembered.
    """

    removed: Sequence[str]
    kept: int


def forget_ids(session: ZooKeeperSession, before_ms: int, *, dry_run: bool = False) -> Forgotten:
    """Remove transactional ids whose producers have not begun since a time, and that are not in use.

    Safe while gateways run: an id is removed only while no gateway holds it, and at the version read. A producer that
    returns later begins as if its id were new.

    Args:
        session: A session with the gateways' identity, to which the nodes belong.
        before_ms: Ids are old whose producers have begun before, ms since 1970.
        dry_run: Only return them.

    Raises:
        ZooKeeperUnavailableError, ZooKeeperDeniedError: some may have been removed.
    """
    metadata = Metadata(session)
    groups = metadata.groups()
    is_open = {item.client_name for group in groups for item in metadata.transactions(group)}
    clients, removed, kept = list_clients(session, paths.GATEWAY_IDS), [], 0
    for some in batched(clients, _AT_ONCE):
        old: dict[str, tuple[str, int]] = {}
        for client, node in zip(some, session.get_many([paths.gateway_id(client) for client in some]), strict=True):
            if node is None:
                continue
            try:
                said = IdRecord.from_json(node.value)
            except ValueError as fault:
                logger.warning("client_record.unreadable client=%s reason=%s", client, fault)
                continue
            if said.written_ms < before_ms:
                old[client] = said.transactional_id, node.version
        free = [client for client in old if client not in is_open]
        # In this order, see ``rollbridge_gateway.producer.expiration``.
        used = held_among(session, free) | remembered_among(session, groups, free)
        free = [client for client in free if client not in used]
        kept += len(old) - len(free)
        if dry_run:
            removed += [old[client][0] for client in free]
            continue
        gone = _remove(session, {client: old[client][1] for client in free})
        kept += len(free) - len(gone)
        removed += [old[client][0] for client in gone]
    return Forgotten(removed, kept)


def batched(items: Iterable[str], size: int) -> Iterator[list[str]]:
    """Yield the items in lists of this length, the last one of what is left."""
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some


def held_among(session: ZooKeeperSession, clients: Sequence[str]) -> set[str]:
    """Return those of the clients whose ids some gateway serves."""
    return _present(session, clients, [paths.gateway_holder])


def remembered_among(session: ZooKeeperSession, groups: Sequence[GroupName], clients: Sequence[str]) -> set[str]:
    """Return those of the clients that have a session on record in any of the groups."""
    return _present(session, clients, [partial(paths.session, group) for group in groups])


def _present(session: ZooKeeperSession, clients: Sequence[str], kinds: Sequence[Callable[[str], str]]) -> set[str]:
    """Return those of the clients of which there is a node of any of these kinds."""
    found: set[str] = set()
    for path_of in kinds:
        nodes = session.get_many([path_of(client) for client in clients])
        found |= {client for client, node in zip(clients, nodes, strict=True) if node is not None}
    return found


def _removal(client: str, version: int, *, has_bucket: bool) -> list[NodeOperation]:
    """Return what removes a record unless its id is held, and leaves no node behind that gateways may not write to.

    Its bucket gets another version, by which a gateway's sweep that has stood still learns that it knows nothing.
    """
    holder, bucket = paths.gateway_holder(client), f"{paths.GATEWAY_HOLDERS}/{paths.gateway_bucket(client)}"
    operations: list[NodeOperation] = [
        CreateNode(holder, _REMOVER, ephemeral=True),
        DeleteNode(paths.gateway_id(client), version),
        SetNode(f"{paths.GATEWAY_IDS}/{paths.gateway_bucket(client)}", b""),
        DeleteNode(holder),
    ]
    return operations if has_bucket else [CreateNode(bucket, b""), *operations, DeleteNode(bucket)]


def _remove(session: ZooKeeperSession, versions: Mapping[str, int]) -> list[str]:
    """Remove records at these versions while no gateway holds their ids; return the clients of removed ones."""
    existing = set(session.children(paths.GATEWAY_HOLDERS))
    done = session.multi_pipelined(
        _removal(client, version, has_bucket=paths.gateway_bucket(client) in existing)
        for client, version in versions.items()
    )
    gone = []
    for client, fault in zip(versions, done, strict=True):
        if fault is None:
            gone.append(client)
        elif not isinstance(fault, NodeConflictError | NodeMissingError):
            raise fault
    return gone
