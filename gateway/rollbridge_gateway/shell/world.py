"""What a gateway knows of the cluster around it: brokers, live gateways, streams; looked at again every few seconds."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from kio.schema.api_versions.v3 import ApiVersionsRequest, ApiVersionsResponse
from kio.schema.errors import ErrorCode
from kio.schema.metadata.v12 import MetadataRequest, MetadataResponse
from kio.schema.metadata.v12.request import MetadataRequestTopic
from kio.schema.metadata.v12.response import MetadataResponseTopic
from kio.schema.types import TopicName

from rollbridge.config import ConnectionSettings
from rollbridge.errors import KafkaUnavailableError, RollbridgeError
from rollbridge.kafka.connection import Connection
from rollbridge.model.gateways import LackingRight
from rollbridge.security.kafka import Security
from rollbridge_gateway.versions import VersionRange

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ASK_S = 5.0
_OPERATIONS: Final = {"Read": 1 << 3, "Write": 1 << 4, "Describe": 1 << 8}
"""Bits of ``topic_authorized_operations``: the codes of Kafka's ``AclOperation``."""


@dataclass(frozen=True, slots=True)
class Brokers:
    """The brokers of the cluster.

    Attributes:
        addresses: Host and port of each, by its id.
        versions: What they have in common, by API key.
        cluster_id: Id of the cluster.
    """

    addresses: Mapping[int, tuple[str, int]]
    versions: Mapping[int, VersionRange]
    cluster_id: str = ""


def addresses_of(bootstrap_servers: str) -> list[tuple[str, int]]:
    """Return the addresses in ``host:port,host:port``."""
    found = []
    for item in bootstrap_servers.split(","):
        host, _, port = item.strip().rpartition(":")
        found.append((host.strip("[]"), int(port)))
    return found


class BrokerWatch:
    """Asks any broker, with the gateway's own credentials; first the one that answered last."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._answers: tuple[str, int] | None = None
        self.security = Security.from_config(settings.kafka)

    def tls_context(self) -> ssl.SSLContext | None:
        """Return how clients' connections to brokers are encrypted; None if they are not.

        Without SASL a broker takes a connection for whoever's certificate it has: clients do not get the gateway's.
        """
        if not self.security.uses_tls:
            return None
        if self.security.uses_sasl:
            return self.security.tls_context()
        return replace(self.security, certificate_location=None, key_location=None, key_password=None).tls_context()

    def ask(self, known: Brokers | None) -> Brokers:
        """Return the brokers.

        Raises:
            KafkaUnavailableError: none of those known, or named at the start, answered.
        """
        wanted = [*(known.addresses.values() if known else ()), *addresses_of(self._settings.bootstrap_servers)]
        return self._of_any(wanted, self._ask)

    def lacking(self, known: Brokers, needs: Sequence[LackingRight]) -> list[LackingRight]:
        """Return what this gateway lacks of what it needs; topics that are not there count for nothing.

        Raises:
            KafkaUnavailableError: no broker answered.
        """
        if not needs:
            return []
        found = {str(item.name): item for item in self.look(known, {item.topic for item in needs})}
        return [
            item
            for item in needs
            if item.topic in found
            and (
                found[item.topic].error_code is ErrorCode.topic_authorization_failed
                or (
                    found[item.topic].error_code is ErrorCode.none
                    and not int(found[item.topic].topic_authorized_operations) & _OPERATIONS[item.operation]
                )
            )
        ]

    def look(self, known: Brokers, names: Collection[str]) -> Sequence[MetadataResponseTopic]:
        """Return what a broker answers to Metadata about topics, which are not made by that.

        Raises:
            KafkaUnavailableError: no broker answered.
        """
        wanted = tuple(MetadataRequestTopic(topic_id=None, name=TopicName(name)) for name in sorted(names))
        request = MetadataRequest(
            topics=wanted, allow_auto_topic_creation=False, include_topic_authorized_operations=True
        )

        def ask(host: str, port: int) -> Sequence[MetadataResponseTopic]:
            with closing(self._connection(host, port)) as connection:
                return connection.call(request, MetadataResponse).topics

        return self._of_any(known.addresses.values(), ask)

    def _of_any(self, wanted: Iterable[tuple[str, int]], ask: Callable[[str, int], T]) -> T:
        last: RollbridgeError | None = None
        for address in sorted(wanted, key=lambda item: item != self._answers):
            try:
                found = ask(*address)
            except RollbridgeError as fault:
                last = fault
            else:
                self._answers = address
                return found
        raise KafkaUnavailableError(f"no broker answers: {last}") from last

    def _connection(self, host: str, port: int) -> Connection:
        return Connection(
            host,
            port,
            security=self.security,
            client_id=self._settings.client_name,
            connect_timeout_s=_ASK_S,
            request_timeout_s=_ASK_S,
        )

    def _ask(self, host: str, port: int) -> Brokers:
        connection = self._connection(host, port)
        try:
            answer = connection.call(
                MetadataRequest(topics=(), allow_auto_topic_creation=False, include_topic_authorized_operations=False),
                MetadataResponse,
            )
            said = connection.call(
                ApiVersionsRequest(client_software_name="rollbridge-gateway", client_software_version="1"),
                ApiVersionsResponse,
            )
        finally:
            connection.close()
        if not answer.brokers:  # it stood still, and the controller has taken it for dead
            raise KafkaUnavailableError(f"broker {host}:{port} knows none that is alive, not even itself")
        return Brokers(
            {int(item.node_id): (item.host, int(item.port)) for item in answer.brokers},
            {int(item.api_key): VersionRange(int(item.min_version), int(item.max_version)) for item in said.api_keys},
            answer.cluster_id or "",
        )
