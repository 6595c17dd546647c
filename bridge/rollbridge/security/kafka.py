"""TLS and SASL for rollbridge's own connections to Kafka, with the keys of confluent-kafka's clients.

Sources: librdkafka's CONFIGURATION.md for the keys; RFC 4616 (PLAIN), RFC 5802 and RFC 7677 (SCRAM).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollbridge.errors import AuthenticationError, ConfigError
from rollbridge.model.options import keys_of, option, unknown, values_of

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
