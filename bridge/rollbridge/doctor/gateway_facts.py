"""Facts of the doctor about gateways, and how it gathers them: from ZooKeeper, and from the gateways themselves.

A gateway is asked at the address that it gives to clients, for its versions, and for Metadata where no login is needed.
The doctor never logs in at a gateway: the address is in a node that others than coordinators write, and no credential
goes to an address that such a node names.
"""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import islice
from typing import Final

from kio.schema.metadata.v12 import MetadataRequest, MetadataResponse
from kio.schema.sasl_handshake.v1 import SaslHandshakeRequest

from rollbridge.base.security import Security
from rollbridge.doctor.probes import RUNNING, PartStatus, accepts
from rollbridge.errors import ConfigError, RollbridgeError
from rollbridge.kafka.connection import Connection
from rollbridge.kafka.errors import AuthenticationError
from rollbridge.metadata import paths
from rollbridge.metadata.gateway_store import HeldId, list_clients, read_gateways, read_holders, read_records
from rollbridge.metadata.gateways import GATEWAYS_FROM, GatewayRecord, IdRecord
from rollbridge.metadata.session import ZooKeeperSession

ANSWER_S: Final = 5.0
"""Longest wait for each answer of a gateway."""
PORTS_MAX: Final = 50
"""Ports of brokers that are tried at each."""
CLOSED_MAX: Final = 5
"""Closed ports after which no more are tried: each may take a second."""
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
class GatewayAnswer:
    """Answer of a gateway.

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
    """Registered gateway.

    Attributes:
        record: Its record in ZooKeeper.
        answer: Its answer.
        held: Number of transactional ids that it serves, of those that were read.
    """

    record: GatewayRecord
    answer: GatewayAnswer
    held: int = 0


@dataclass(frozen=True, slots=True)
class IdFacts:
    """Transactional ids of producers at gateways.

    Attributes:
        count: Number of ids on record.
        records: Those that were read, by client name: all, or a part of many.
        held: Those that are served, likewise.
        of_open: Those of open transactions that gateways began, whether or not they are among ``records``.
    """

    count: int = 0
    records: Mapping[str, IdRecord] = field(default_factory=dict)
    held: Mapping[str, HeldId] = field(default_factory=dict)
    of_open: Mapping[str, IdRecord] = field(default_factory=dict)


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
    held = read_holders(session, list_clients(session, paths.GATEWAY_HOLDERS)[:HOLDERS_MAX], registered)
    on_record = list_clients(session, paths.GATEWAY_IDS)
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


def ask_gateway(record: GatewayRecord, security: Security) -> GatewayAnswer:
    """Return what a gateway answers where it says that clients find it."""
    if not accepts(record.address):
        return GatewayAnswer(Reach.NOTHING_LISTENS, f"nothing listens at {record.address}, as seen from here")
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
        return GatewayAnswer(Reach.DENIED, str(fault))
    except RollbridgeError as fault:
        return GatewayAnswer(Reach.DENIED if _is_distrust(fault) else Reach.SILENT, str(fault))
    shut = (broker for broker, port in record.ports[:PORTS_MAX] if not accepts(_address(record, port)))
    closed = tuple(islice(shut, CLOSED_MAX))
    try:
        if SaslHandshakeRequest.__api_key__ in connection.api_versions:
            return GatewayAnswer(Reach.ANSWERS, closed=closed)  # before a login it tells nothing more
        answer = connection.call(
            MetadataRequest(topics=(), allow_auto_topic_creation=False, include_topic_authorized_operations=False),
            MetadataResponse,
        )
    except RollbridgeError as fault:
        return GatewayAnswer(Reach.NO_BROKER, str(fault), closed=closed)
    finally:
        connection.close()
    brokers = frozenset(int(item.node_id) for item in answer.brokers if item.node_id < GATEWAYS_FROM)
    return GatewayAnswer(Reach.ANSWERS, "", brokers, closed)


def _is_distrust(fault: BaseException | None) -> bool:
    """Return whether TLS is the cause: with TLS 1.3 a certificate that is missing shows at the first answer."""
    while fault is not None and not isinstance(fault, ssl.SSLError):
        fault = fault.__cause__ or fault.__context__
    return fault is not None


_NOT_RUNNING: Final = {
    Reach.NOTHING_LISTENS: "not answering",
    Reach.SILENT: "not answering",
    Reach.NO_BROKER: "no broker answers it",
}


def gateway_parts(records: Sequence[GatewayRecord], kafka: Mapping[str, str]) -> list[PartStatus]:
    """Return registered gateways as parts of a cluster; one that does not trust the doctor runs all the same."""
    security = Security.from_config(kafka)
    with ThreadPoolExecutor(_THREADS, "gateway") as pool:
        answers = list(pool.map(partial(ask_gateway, security=security), records))
    return [
        PartStatus(
            part=f"gateway {record.name}",
            state=_NOT_RUNNING.get(answer.reach) or "; ".join(record.faults) or RUNNING,
            address=record.address,
        )
        for record, answer in zip(records, answers, strict=True)
    ]


def _address(record: GatewayRecord, port: int) -> str:
    return replace(record, port=port).address
