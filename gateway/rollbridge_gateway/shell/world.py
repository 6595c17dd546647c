"""What a gateway knows of the cluster around it: brokers, live gateways, streams; looked at again every few seconds."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kio.schema.api_versions.v3 import ApiVersionsRequest, ApiVersionsResponse
from kio.schema.metadata.v12 import MetadataRequest, MetadataResponse

from rollbridge.config import ConnectionSettings
from rollbridge.errors import KafkaUnavailableError, RollbridgeError
from rollbridge.kafka.connection import Connection
from rollbridge.security.kafka import Security
from rollbridge_gateway.versions import VersionRange

logger = logging.getLogger(__name__)

_ASK_S = 5.0


@dataclass(frozen=True, slots=True)
class Brokers:
    """The brokers of the cluster.

    Attributes:
        addresses: Host and port of each, by its id.
        versions: What they have in common, by API key.
    """

    addresses: Mapping[int, tuple[str, int]]
    versions: Mapping[int, VersionRange]


def addresses_of(bootstrap_servers: str) -> list[tuple[str, int]]:
    """Return the addresses in ``host:port,host:port``."""
    found = []
    for item in bootstrap_servers.split(","):
        host, _, port = item.strip().rpartition(":")
        found.append((host.strip("[]"), int(port)))
    return found


class BrokerWatch:
    """Asks any broker who the brokers are, with the gateway's own credentials. Belongs to one thread at a time."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings
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
        last: RollbridgeError | None = None
        for host, port in wanted:
            try:
                return self._ask(host, port)
            except RollbridgeError as fault:
                last = fault
        raise KafkaUnavailableError(f"no broker answers: {last}") from last

    def _ask(self, host: str, port: int) -> Brokers:
        connection = Connection(
            host,
            port,
            security=self.security,
            client_id=self._settings.client_name,
            connect_timeout_s=_ASK_S,
            request_timeout_s=_ASK_S,
        )
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
        return Brokers(
            {int(item.node_id): (item.host, int(item.port)) for item in answer.brokers},
            {int(item.api_key): VersionRange(int(item.min_version), int(item.max_version)) for item in said.api_keys},
        )
