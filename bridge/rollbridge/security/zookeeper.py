"""Security of sessions with ZooKeeper: digest identities, TLS, and the ACL of rollbridge's znodes.

The keys are those of Kafka's clients where they mean the same::

    security.protocol                      PLAINTEXT (default) or SSL
    ssl.ca.location, ssl.certificate.location, ssl.key.location, ssl.key.password,
    ssl.endpoint.identification.algorithm  as for Kafka
    digest.username, digest.password       an identity of ZooKeeper's scheme ``digest``

A client with an identity, by digest or by certificate (scheme ``x509``), owns what it creates: it has all permissions
on such a znode, and everybody else may read it. ``rollbridge.zookeeper.access`` grants further permissions. Without an
identity, znodes are open to all, as is ZooKeeper's default.

Sources: ZooKeeper's programmer's guide (access control using ACLs) and administrator's guide (SSL/TLS options).
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.serialization import Auth, Connect
from kazoo.security import ACL, CREATOR_ALL_ACL, READ_ACL_UNSAFE

from rollbridge.errors import ConfigError
from rollbridge.model.options import keys_of, option, unknown, values_of
from rollbridge.security.kafka import NO_SECURITY_SETTING, TLS_KEYS, Security

_PREFIX: Final = "zookeeper."
OWNED: Final = (*CREATOR_ALL_ACL, *READ_ACL_UNSAFE)
"""ACL of a znode whose creator has an identity: all permissions for that identity, read for all others."""

_HANDSHAKE_S: Final = 3.0

__all__ = ["ACL", "OWNED", "PREFIXED_KEYS", "ZOOKEEPER_SECURITY_KEYS", "Quieter", "ZooKeeperSecurity", "take_prefixed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooKeeperSecurity:
    """Identity of a session, and trust in the server; passwords show neither in ``repr`` nor in errors."""

    tls: Security = field(default_factory=Security)
    username: str | None = option(None, key="digest.username")
    """Identity of ZooKeeper's scheme ``digest``; requires its password."""
    password: str | None = option(None, key="digest.password", secret=True)
    """Password of the identity."""

    @classmethod
    def from_config(cls, config: Mapping[str, str] | None, faults: list[str] | None = None) -> ZooKeeperSecurity:
        """Read the keys above; add all that are unknown, missing or wrong to ``faults``.

        Raises:
            ConfigError: Keys are unknown, missing or wrong, and no list of ``faults`` was passed.
        """
        config, told, faults = config or {}, faults is not None, [] if faults is None else faults
        faults += unknown(config, ZOOKEEPER_SECURITY_KEYS, NO_SECURITY_SETTING)
        protocol = config.get("security.protocol", "").upper()
        if protocol.startswith("SASL"):
            faults.append(f"security.protocol: {protocol!r} is neither PLAINTEXT nor SSL; SASL is not offered")
            config = {**config, "security.protocol": protocol.removeprefix("SASL_")}
        tls = Security.from_config({key: config[key] for key in TLS_KEYS & config.keys()}, faults)
        read = cls(tls=tls, **values_of(cls, config, faults))
        if (read.username is None) != (read.password is None):
            faults.append(f"digest.{'password' if read.password is None else 'username'}: needed with the other one")
        if read.username is not None and (not read.username or ":" in read.username):
            faults.append("digest.username: is empty or holds a colon, which ends it")
        if not tls.uses_tls:
            needless = sorted(key for key in config if key.startswith("ssl."))
            faults += [f"{key}: has no effect without security.protocol=SSL" for key in needless]
        ConfigError.raise_for(() if told else faults)
        return read

    @property
    def has_identity(self) -> bool:
        """True if the session has an identity for ZooKeeper."""
        return self.username is not None or (self.tls.uses_tls and self.tls.certificate_location is not None)

    @property
    def identity(self) -> str:
        """Description of the identity, for messages."""
        if self.username is not None:
            return f"digest user {self.username}"
        if self.has_identity:
            return f"the certificate {self.tls.certificate_location}"
        return "a client without identity"

    def kazoo_options(self) -> dict[str, Any]:
        """Return the arguments of a KazooClient.

        Raises:
            ConfigError: A file cannot be used; kazoo itself would retry for ever without a message.
        """
        options: dict[str, Any] = {}
        if self.username is not None:
            options["auth_data"] = [("digest", f"{self.username}:{self.password}")]
        if self.has_identity:
            options["default_acl"] = list(OWNED)
        if self.tls.uses_tls:
            self.tls.tls_context()
            options |= {"use_ssl": True, "handler": _TlsHandler(self.tls)}
        return options

    def tls_fault(self, addresses: str) -> str:
        """Return the TLS fault of the first reachable server; empty if its handshake succeeds, or none answers.

        kazoo itself would give no reason, retry for ever, and leave the sockets to the garbage collector.
        """
        if not self.tls.uses_tls:
            return ""
        context = self.tls.tls_context()
        for address in addresses.split(","):
            host, _, port = address.strip().rpartition(":")
            try:
                with (
                    socket.create_connection((host.strip("[]"), int(port)), timeout=_HANDSHAKE_S) as raw,
                    context.wrap_socket(raw, server_hostname=host.strip("[]")),
                ):
                    return ""
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                continue  # the server may just be stopping
            except ssl.SSLError as fault:
                return f"the TLS handshake with {address.strip()} fails: {fault}"
            except (OSError, ValueError):
                continue
        return ""


class _TlsHandler(SequentialThreadingHandler):
    """kazoo's threads with rollbridge's TLS context: kazoo's own also trusts the system's authorities."""

    def __init__(self, tls: Security) -> None:
        super().__init__()
        self._tls = tls

    def create_connection(
        self, address: tuple[str, int], hostname: str | None = None, timeout: float | None = None, **_: object
    ) -> socket.socket:
        """Connect to a server; the files are read each time, so that a new certificate takes effect.

        Raises:
            OSError: The server cannot be reached or is not trusted, or a file cannot be used now; kazoo tries again.
        """
        try:
            context = self._tls.tls_context()
        except ConfigError as fault:
            raise OSError(str(fault)) from fault
        raw = socket.create_connection(address[:2], timeout)
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return context.wrap_socket(raw, server_hostname=hostname)
        except BaseException:
            raw.close()
            raise


ZOOKEEPER_SECURITY_KEYS: Final = TLS_KEYS | keys_of(ZooKeeperSecurity)
PREFIXED_KEYS: Final = frozenset(_PREFIX + key for key in ZOOKEEPER_SECURITY_KEYS)
"""The same keys with a prefix, for configurations that also hold those of Kafka's clients."""


def take_prefixed(config: Mapping[str, object]) -> dict[str, str]:
    """Return ZooKeeper's settings from a Kafka client's configuration, without their prefix."""
    return {key.removeprefix(_PREFIX): str(config[key]) for key in PREFIXED_KEYS & config.keys()}


class Quieter(logging.LoggerAdapter[logging.Logger]):
    """Log of kazoo with reconnects at INFO, since failures are raised, and without secrets.

    At DEBUG, kazoo logs every request, including those with the client's and the session's password; below DEBUG it
    logs the session's password again.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        if level < logging.DEBUG:
            return
        shown = tuple(f"{type(item).__name__}(...)" if isinstance(item, Auth | Connect) else item for item in args)
        super().log(logging.INFO if level == logging.WARNING else level, msg, *shown, **kwargs)
