"""Facts of the doctor about gateways, and how it gathers them: from ZooKeeper, and from the gateways themselves.

A gateway is asked where it says that clients find it, for its versions, and for Metadata where nobody has to log in.
The doctor never logs in at a gateway: where that is stands in a node that others than coordinators write, and no
credential goes to an address that such a node names.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Final

from kio.schema.metadata.v12 import MetadataRequest, MetadataResponse
from kio.schema.sasl_handshake.v1 import SaslHandshakeRequest

from rollbridge.doctor.probes import accepts
from rollbridge.errors import ConfigError, RollbridgeError
from rollbridge.kafka.connection import Connection
from rollbridge.kafka.errors import AuthenticationError
from rollbridge.model import paths
from rollbridge.model.gateways import GATEWAYS_FROM, GatewayRecord, IdHolder, IdRecord
from rollbridge.security.kafka import Security
from rollbridge.zookeeper.session import ZooKeeperSession

logger = logging.getLogger(__name__)

ANSWER_S: Final = 3.0
"""Longest wait for each answer of a gateway."""
GATEWAYS_MAX: Final = 200
"""Gateways that are looked at."""
PORTS_MAX: Final = 50
"""Ports of brokers that are tried at each."""
HOLDERS_MAX: Final = 20_000
IDS_MAX: Final = 20_000
"""Nodes of transactional ids that are read; of more, a part is."""
_THREADS: Final = 16
_DOCTORS_ID: Final = "rollbridge-doctor"


class Reach(Enum):
    """How far one gets at a gateway."""

    ANSWERS = "answers"
    NOTHING_LISTENS = "nothing listens"
    SILENT = "silent"
    """Something accepts connections, and does not answer as a gateway does."""
    DENIED = "denied"
    """It answers, and does not let the doctor in."""
    NO_BROKER = "no broker"
    """It answers, and does not get an answer from a broker."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a gateway has answered.

    Attributes:
        reach: How far that went.
        detail: What went wrong, if anything did.
        brokers: The brokers that it tells its clients of; None if it was not asked, or has not answered.
        closed: Brokers at whose port nothing listens.
    """

    reach: Reach
    detail: str = ""
    brokers: frozenset[int] | None = None
    closed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GatewayFacts:
    """A gateway that is registered.

    Attributes:
        record: What it says of itself.
        answer: What it has answered.
        held: How many transactional ids it serves, of those that were looked at.
    """

    record: GatewayRecord
    answer: Answer
    held: int = 0


@dataclass(frozen=True, slots=True)
class HeldId:
    """Who serves a transactional id.

    Attributes:
        client: Client name of the id.
        gateway: The gateway whose session it is; empty if no registered one has it.
        said: The gateway that the node names; empty once another one asks for it.
        wanted_by: The one that asks for it; empty if none does.
        since_ms: Since when that stands there, by ZooKeeper's clock.
    """

    client: str
    gateway: str
    said: str
    wanted_by: str
    since_ms: int


@dataclass(frozen=True, slots=True)
class IdFacts:
    """Transactional ids of producers at gateways.

    Attributes:
        count: How many are on record.
        records: Those that were read, by client name: all, or a part of many.
        held: Those that are served, likewise.
        of_open: Those of open transactions that gateways began, whether or not they are among ``records``.
    """

    count: int = 0
    records: Mapping[str, IdRecord] = field(default_factory=dict)
    held: Mapping[str, HeldId] = field(default_factory=dict)
    of_open: Mapping[str, IdRecord] = field(default_factory=dict)


def read_gateways(session: ZooKeeperSession) -> dict[int, GatewayRecord]:
    """Return the registered gateways by their ZooKeeper sessions; one whose node cannot be read is left out."""
    names = session.children(paths.GATEWAYS_LIVE)[:GATEWAYS_MAX]
    found: dict[int, GatewayRecord] = {}
    for name, node in zip(names, session.get_many([paths.gateway(name) for name in names]), strict=True):
        if node is None or node.owner_session_id is None:
            continue
        try:
            found[node.owner_session_id] = GatewayRecord.from_json(name, node.value)
        except ValueError as fault:
            logger.warning("the node of gateway %s cannot be read: %s", name, fault)
    return found


def read_records(session: ZooKeeperSession, clients: Iterable[str]) -> dict[str, IdRecord]:
    """Return what is on record of transactional ids, by their client names; what cannot be read is left out."""
    wanted = list(clients)
    found = {}
    for client, node in zip(wanted, session.get_many([paths.gateway_id(client) for client in wanted]), strict=True):
        if node is None:
            continue
        try:
            found[client] = IdRecord.from_json(node.value)
        except ValueError as fault:
            logger.warning("the record of client %s cannot be read: %s", client, fault)
    return found


def read_holders(
    session: ZooKeeperSession, clients: Iterable[str], gateways: Mapping[int, GatewayRecord]
) -> dict[str, HeldId]:
    """Return who serves transactional ids, by their client names; those that nobody serves are left out."""
    wanted = list(clients)
    found = {}
    for client, node in zip(wanted, session.get_many([paths.gateway_holder(client) for client in wanted]), strict=True):
        if node is None:
            continue
        said, owner = IdHolder.from_value(node.value), gateways.get(node.owner_session_id or 0)
        name = "" if owner is None else owner.name
        found[client] = HeldId(client, name, said.gateway, said.wanted_by, node.modified_ms)
    return found


def gather_gateways(
    session: ZooKeeperSession, kafka: Mapping[str, str], open_clients: Collection[str]
) -> tuple[list[GatewayFacts], IdFacts]:
    """Gather the facts about gateways, and about the transactional ids of their producers.

    Args:
        session: ZooKeeper.
        kafka: The doctor's own security settings, of which gateways get no credential.
        open_clients: Clients of open transactions that gateways began.

    Raises:
        ZooKeeperUnavailableError: no server answers.
    """
    registered = read_gateways(session)
    held = read_holders(session, _clients(session, paths.GATEWAY_HOLDERS)[:HOLDERS_MAX], registered)
    on_record = _clients(session, paths.GATEWAY_IDS)
    ids = IdFacts(
        len(on_record), read_records(session, on_record[:IDS_MAX]), held, read_records(session, sorted(open_clients))
    )
    serving = Counter(item.gateway for item in held.values())
    security = Security.from_config(kafka)
    with ThreadPoolExecutor(_THREADS, "gateway") as pool:
        answers = list(pool.map(partial(ask_gateway, security=security), registered.values()))
    return [
        GatewayFacts(record, answer, serving[record.name])
        for record, answer in zip(registered.values(), answers, strict=True)
    ], ids


def _clients(session: ZooKeeperSession, parent: str) -> list[str]:
    """Return client names below all buckets, which spread them evenly."""
    buckets = [f"{parent}/{name}" for name in session.children(parent)]
    return [client for clients in session.children_many(buckets) for client in clients]


def ask_gateway(record: GatewayRecord, security: Security) -> Answer:
    """Return what a gateway answers where it says that clients find it."""
    if not accepts(record.address):
        return Answer(Reach.NOTHING_LISTENS, f"nothing listens at {record.address}, as seen from here")
    trust = replace(security, protocol="SSL" if record.encrypted else "PLAINTEXT", mechanism=None)
    try:
        connection = Connection(
            record.host,
            record.port,
            security=replace(trust, username=None, password=None),
            client_id=_DOCTORS_ID,
            connect_timeout_s=ANSWER_S,
            request_timeout_s=ANSWER_S,
        )
    except (AuthenticationError, ConfigError) as fault:
        return Answer(Reach.DENIED, str(fault))
    except RollbridgeError as fault:
        return Answer(Reach.SILENT, str(fault))
    closed = tuple(broker for broker, port in record.ports[:PORTS_MAX] if not accepts(_address(record, port)))
    try:
        if SaslHandshakeRequest.__api_key__ in connection.api_versions:
            return Answer(Reach.ANSWERS, closed=closed)  # before a login it tells nothing more
        answer = connection.call(
            MetadataRequest(topics=(), allow_auto_topic_creation=False, include_topic_authorized_operations=False),
            MetadataResponse,
        )
    except RollbridgeError as fault:
        return Answer(Reach.NO_BROKER, str(fault), closed=closed)
    finally:
        connection.close()
    brokers = frozenset(int(item.node_id) for item in answer.brokers if item.node_id < GATEWAYS_FROM)
    return Answer(Reach.ANSWERS, "", brokers, closed)


def _address(record: GatewayRecord, port: int) -> str:
    return replace(record, port=port).address
