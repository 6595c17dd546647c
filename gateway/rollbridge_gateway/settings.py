"""Settings of a gateway, checked together."""

from __future__ import annotations

import logging
import os
import socket
import ssl
from dataclasses import dataclass, field
from datetime import datetime

from rollbridge.base.options import MIB, faults_of, option
from rollbridge.base.security import WARNED_BEFORE, Validity, validities
from rollbridge.config import ConnectionSettings
from rollbridge.errors import ConfigError

logger = logging.getLogger(__name__)


def _default_name() -> str:
    host = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in socket.gethostname())
    return f"gateway-{host[:80] or 'host'}-{os.getpid()}"


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``.

    Raises:
        ConfigError: it is none.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"{address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Settings of a gateway.

    Raises:
        ConfigError: one or several are wrong; all are named.
    """

    connection: ConnectionSettings
    """Brokers, ZooKeeper, and the gateway's own credentials."""
    name: str = field(default_factory=_default_name)
    """Name among the gateways."""
    listen: str = "127.0.0.1:9192"
    """Address of the first port, ``HOST:PORT``. Brokers get the ports behind it; port 0 takes free ones."""
    advertise: str = ""
    """Host that clients are told; empty for that of ``listen``."""
    partitions: int = option(8, low=1, high=1_000)
    """Virtual partitions of a stream with key ranges: over so many a producer spreads its batches."""
    session_timeout_s: float = 4.0
    """Time-out of the ZooKeeper session in seconds, after which another gateway serves the ids of this one."""
    connections_max: int = option(2_000, low=1)
    """Most connections of clients; one more is closed at once."""
    connections_per_ip_max: int = option(0, low=0)
    """Most connections of one address (of IPv6, of one /64 network), as brokers' ``max.connections.per.ip``; 0 for half
    of ``connections_max``. Behind a proxy or NAT all clients have one address: set it to ``connections_max`` there."""
    ids_max: int = option(50_000, low=1)
    """Most transactional ids that are served at once; those not in use make room."""
    under_way_bytes_max: int = option(256 * MIB, low=MIB)
    """Bytes of all requests under way, beyond which connections are not read from; and of brokers' answers that clients
    have not taken yet, beyond which brokers are not read from."""
    workers: int = option(64, low=4, high=1_024)
    """Threads that wait for the leader of a transaction group, for each group; and as many that wait for ZooKeeper."""
    certificate: str = ""
    """File of the certificate for clients' connections; empty: they are not encrypted."""
    key: str = ""
    """File of its private key; empty if it is in the certificate's file."""
    client_ca: str = ""
    """File of the authorities of clients' certificates, which are demanded then."""
    rights_s: float = option(60.0, low=0)
    """Seconds for which a connection's rights are remembered; 0 asks the broker for each request."""
    expiration_days: float = option(7.0, low=0)
    """Days after which an unused transactional id is forgotten, as brokers' ``transactional.id.expiration.ms``; 0 for
    never. All gateways have the same."""
    metrics: str = ""
    """Address for Prometheus and health, ``HOST:PORT``; empty for none."""
    probe_socket: str = ""
    """Path of a Unix socket at which ``/healthz`` and ``/livez`` are answered to probes of this machine, whatever
    strangers do to other addresses; empty for none. ``/tmp/rollbridge.sock`` in the container image."""

    def __post_init__(self) -> None:
        faults = list(faults_of(self))
        for key in ("listen", "metrics"):
            address = getattr(self, key)
            try:
                if address or key == "listen":
                    split_address(address)
            except ConfigError as fault:
                faults.append(f"{key}: {fault}")
        if (self.key or self.client_ca) and not self.certificate:
            faults.append("certificate: needed with key or client-ca")
        ConfigError.raise_for(faults)

    @property
    def per_ip_max(self) -> int:
        """Most connections of one address."""
        return self.connections_per_ip_max or max(self.connections_max // 2, 1)

    def certificate_until(self) -> datetime | None:
        """Return when the certificate, or another one of its file, runs out; None without one.

        Raises:
            ConfigError: it cannot be read.
        """
        return min((item.end for item in self._validities()), default=None)

    def _validities(self) -> list[Validity]:
        try:
            return validities(self.certificate) if self.certificate else []
        except (OSError, ValueError) as fault:
            raise ConfigError(f"certificate: cannot be used: {fault}") from fault

    def check_certificate(self, now: datetime) -> None:
        """Expect the certificate to be valid, for two weeks at least, or else say so in the log.

        Raises:
            ConfigError: it has run out, or is not valid yet; nothing was begun.
        """
        found = self._validities()
        if found and found[0].begin > now:
            raise ConfigError(
                f"certificate: {self.certificate} is valid from {found[0].begin:%Y-%m-%d %H:%M} UTC on, so clients "
                "would refuse it until then; nothing was begun; start it later, take the one before, or set the clock "
                "of this machine right"
            )
        ends = [item.end for item in found]
        if not ends or min(ends) - now > WARNED_BEFORE:
            return
        if ends[0] <= now:
            raise ConfigError(
                f"certificate: {self.certificate} has run out on {ends[0]:%Y-%m-%d}, so clients would refuse it; "
                "nothing was begun; renew it"
            )
        logger.warning(
            "certificate.expires file=%s until=%s: renew it, and restart this gateway; clients refuse it from then on",
            self.certificate,
            f"{min(ends):%Y-%m-%d}",
        )

    def tls_context(self) -> ssl.SSLContext | None:
        """Return how clients' connections are encrypted; None if they are not.

        Raises:
            ConfigError: a file cannot be used.
        """
        if not self.certificate:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key or None)
            if self.client_ca:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as fault:
            raise ConfigError(f"certificate, key or client-ca: cannot be used: {fault}") from fault
        return context
