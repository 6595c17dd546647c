"""TLS and SASL for rollbridge's own connections to Kafka, with the keys of confluent-kafka's clients.

Sources: librdkafka's CONFIGURATION.md for the keys; RFC 4616 (PLAIN), RFC 5802 and RFC 7677 (SCRAM).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import re
import secrets
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.serialization import Auth, Connect
from kazoo.security import ACL, CREATOR_ALL_ACL, READ_ACL_UNSAFE

from rollbridge.base.options import keys_of, option, unknown, values_of
from rollbridge.errors import AuthenticationError, ConfigError

_PROBE: Final = "probe"
"""librdkafka's word for the system's authorities."""
NO_SECURITY_SETTING: Final = "is not a security setting that may be passed on"
_PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_SCRAM_HASHES: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
# Bound on the work that a hostile broker can demand (Kafka's own default is 8192 rounds).
_SCRAM_ITERATIONS_MAX: Final = 1_000_000
_SCRAM_ITERATIONS_MIN: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Identity of the client, and trust in the server; secrets show neither in ``repr`` nor in errors."""

    protocol: str = option("PLAINTEXT", key="security.protocol", choices=_PROTOCOLS)
    """Encryption and authentication of connections."""
    ca_location: str | None = option(None, key="ssl.ca.location")
    """File or directory of the only trusted authorities; the system's authorities if left out."""
    certificate_location: str | None = option(None, key="ssl.certificate.location")
    """File of the client's certificate."""
    key_location: str | None = option(None, key="ssl.key.location")
    """File of the certificate's private key."""
    key_password: str | None = option(None, key="ssl.key.password", secret=True)
    """Password of the private key's file."""
    check_hostname: bool = option(
        True, key="ssl.endpoint.identification.algorithm", choices={"https": True, "none": False, "": False}
    )
    """Check that the server's name matches its certificate."""
    mechanism: str | None = option(
        None, key="sasl.mechanism", aliases=("sasl.mechanisms",), choices=("PLAIN", *_SCRAM_HASHES)
    )
    """SASL mechanism; required with SASL."""
    username: str | None = option(None, key="sasl.username")
    """User name; required with SASL."""
    password: str | None = option(None, key="sasl.password", secret=True)
    """Password of the user; required with SASL."""

    @classmethod
    def from_config(cls, config: Mapping[str, str] | None, faults: list[str] | None = None) -> Security:
        """Read librdkafka's keys; add all that are unknown, missing or wrong to ``faults``.

        Raises:
            ConfigError: Keys are unknown, missing or wrong, and no list of ``faults`` was passed.
        """
        config, told, faults = config or {}, faults is not None, [] if faults is None else faults
        faults += unknown(config, SECURITY_KEYS, NO_SECURITY_SETTING)
        read = cls(**values_of(cls, config, faults))
        if read.uses_sasl:
            needed = ("sasl.mechanism", "sasl.username", "sasl.password")
            given = (read.mechanism, read.username, read.password)
            faults += [
                f"{key}: needed with SASL"
                for key, value in zip(needed, given, strict=True)
                if value is None and key not in config
            ]
        if read.key_location is not None and read.certificate_location is None:
            faults.append("ssl.certificate.location: needed with ssl.key.location")
        ConfigError.raise_for(() if told else faults)
        return read

    @property
    def uses_tls(self) -> bool:
        """True if connections are encrypted."""
        return self.protocol.endswith("SSL")

    @property
    def uses_sasl(self) -> bool:
        """True if connections authenticate by SASL."""
        return self.protocol.startswith("SASL_")

    def tls_context(self) -> ssl.SSLContext:
        """Return a new TLS context.

        Only the authorities in ``ssl.ca.location``, a file or a directory, are trusted: with the system's as well, any
        certificate of theirs would be accepted where host names are not checked. If none is named, the system's are.

        Raises:
            ConfigError: A file cannot be read; the error names it.
        """
        named = None if self.ca_location == _PROBE else self.ca_location
        kind = "capath" if named is not None and Path(named).is_dir() else "cafile"
        try:
            context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, **{kind: named})
        except OSError as exc:
            raise ConfigError(f"ssl.ca.location: cannot use {named}: {exc}") from exc
        context.check_hostname = self.check_hostname
        try:
            if self.certificate_location is not None:
                context.load_cert_chain(self.certificate_location, self.key_location, self.key_password or "")
        except OSError as exc:
            raise ConfigError(
                f"ssl.certificate.location, ssl.key.location or ssl.key.password: "
                f"cannot use {self.certificate_location}, {self.key_location}: {exc}"
            ) from exc
        return context

    def authenticate(self, exchange: Callable[[bytes], bytes]) -> None:
        """Run the SASL mechanism; ``exchange`` sends one message and returns the broker's answer.

        Raises:
            AuthenticationError: The broker's side of the exchange is wrong (``exchange`` raises if the broker refuses
                the client).
        """
        username, password = self.username or "", self.password or ""
        if self.mechanism == "PLAIN":
            exchange(b"\0" + username.encode() + b"\0" + password.encode())
            return
        scram = _Scram(_SCRAM_HASHES[self.mechanism or ""], username, password)
        scram.verify(exchange(scram.final(exchange(scram.first()))))


class _Scram:
    """Client side of SCRAM without channel binding."""

    def __init__(self, algorithm: str, username: str, password: str) -> None:
        self._algorithm = algorithm
        self._password = password.encode()
        nonce = base64.b64encode(secrets.token_bytes(24)).decode()
        escaped = username.replace("=", "=3D").replace(",", "=2C")
        self._nonce = nonce
        self._first_bare = f"n={escaped},r={nonce}"
        self._server_signature = b""

    def first(self) -> bytes:
        return f"n,,{self._first_bare}".encode()

    def final(self, server_first: bytes) -> bytes:
        fields = _fields(server_first)
        try:
            nonce, salt, iterations = fields["r"], base64.b64decode(fields["s"], validate=True), int(fields["i"])
        except (KeyError, ValueError) as exc:
            raise AuthenticationError("the broker's SCRAM challenge does not parse") from exc
        if not nonce.startswith(self._nonce) or nonce == self._nonce:
            raise AuthenticationError("the broker's SCRAM challenge does not carry our nonce on")
        if not _SCRAM_ITERATIONS_MIN <= iterations <= _SCRAM_ITERATIONS_MAX:
            raise AuthenticationError(
                f"the broker asks for {iterations} SCRAM iterations, "
                f"outside {_SCRAM_ITERATIONS_MIN}..{_SCRAM_ITERATIONS_MAX}"
            )
        salted = hashlib.pbkdf2_hmac(self._algorithm, self._password, salt, iterations)
        client_key = self._hmac(salted, b"Client Key")
        without_proof = f"c=biws,r={nonce}"
        signed = b",".join((self._first_bare.encode(), server_first, without_proof.encode()))
        signature = self._hmac(hashlib.new(self._algorithm, client_key).digest(), signed)
        proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
        self._server_signature = self._hmac(self._hmac(salted, b"Server Key"), signed)
        return f"{without_proof},p={base64.b64encode(proof).decode()}".encode()

    def verify(self, server_final: bytes) -> None:
        fields = _fields(server_final)
        expected = base64.b64encode(self._server_signature).decode()
        if not hmac.compare_digest(fields.get("v", ""), expected):
            raise AuthenticationError("the broker could not prove that it knows our SCRAM password")

    def _hmac(self, key: bytes, message: bytes) -> bytes:
        return hmac.new(key, message, self._algorithm).digest()


def _fields(message: bytes) -> dict[str, str]:
    pairs = (part.partition("=") for part in message.decode("utf-8", "replace").split(","))
    return {name: value for name, _, value in pairs}


SECURITY_KEYS: Final = keys_of(Security)
TLS_KEYS: Final = frozenset(key for key in SECURITY_KEYS if not key.startswith("sasl."))
"""Keys of TLS: trusted authorities, and the client's certificate."""


# Security of sessions with ZooKeeper: digest identities, TLS, and the ACL of rollbridge's znodes.
#
# The keys are those of Kafka's clients where they mean the same::
#
#     security.protocol                      PLAINTEXT (default) or SSL
#     ssl.ca.location, ssl.certificate.location, ssl.key.location, ssl.key.password,
#     ssl.endpoint.identification.algorithm  as for Kafka
#     digest.username, digest.password       an identity of ZooKeeper's scheme ``digest``
#
# A client with an identity, by digest or by certificate (scheme ``x509``), owns what it creates: it has all permissions
# on such a znode, and everybody else may read it. ``rollbridge.metadata.acls`` grants further permissions. Without
# an identity, znodes are open to all, as is ZooKeeper's default.
#
# Sources: ZooKeeper's programmer's guide (access control using ACLs) and administrator's guide (SSL/TLS options).


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


# When certificates are valid. Pure but for reading their files.
#
# Python's :mod:`ssl` tells that of a peer's certificate only, so what it takes is read here: of a certificate (RFC
# 5280) the sequence ``[version] serial algorithm issuer validity ...``.


WARNED_BEFORE: Final = timedelta(days=14)
"""Time before a certificate expires at which warnings begin."""
_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION: Final = 0xA0
_SHORT_TIME: Final = 0x17
"""With two digits of the year, for 1950 to 2049."""


class Validity(NamedTuple):
    """Time within which a certificate is valid."""

    begin: datetime
    end: datetime


def validities(path: str) -> list[Validity]:
    """Return when the certificates of a file are valid: first the server's own, then those of its authorities.

    A client need not mind one of an authority that has run out: it may know another way to one that it trusts.

    Raises:
        ValueError: there is none that can be read.
        OSError: the file cannot be read.
    """
    found = _PEM.findall(Path(path).read_text(encoding="ascii", errors="replace"))
    if not found:
        raise ValueError(f"{path} holds no certificate in PEM")
    try:
        return [_validity(ssl.PEM_cert_to_DER_cert(pem)) for pem in found]
    except (IndexError, ValueError) as fault:
        raise ValueError(f"{path} holds a certificate that cannot be read") from fault


def _validity(der: bytes) -> Validity:
    _, at, _ = _element(der, 0)
    _, at, _ = _element(der, at)
    kind, start, end = _element(der, at)
    for _ in range(4 if kind == _VERSION else 3):
        at = end
        _, start, end = _element(der, at)
    begin, at = _time(der, start)
    return Validity(begin, _time(der, at)[0])


def _time(der: bytes, at: int) -> tuple[datetime, int]:
    """Return a time, and where what follows it begins."""
    kind, start, end = _element(der, at)
    text = der[start:end].decode("ascii")
    if kind == _SHORT_TIME:
        text = f"{'19' if text >= '50' else '20'}{text}"
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC), end


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of what is encoded at a place, and where its content begins and ends."""
    kind, size, start = der[at], der[at + 1], at + 2
    if size & 0x80:
        start += size & 0x7F
        size = int.from_bytes(der[at + 2 : start], "big")
    return kind, start, start + size
