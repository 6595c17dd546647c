"""Gateways' records in ZooKeeper, as doctor, live page and ``rollbridge status`` read them. Pure.

A gateway registers with a node of its own, and with one for each transactional id that it serves; the record of an id
outlives it. Everything is read tolerantly: gateways are upgraded one after the other, and every identity with a
gateway's rights may write anything.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple, Self

FIRST_PRODUCER_ID: Final = 1 << 62
"""Producer ids of gateways begin here; brokers count theirs from 0."""
GATEWAYS_FROM: Final = 1_000_000_000
"""Broker ids under which clients are told of gateways begin here; Kafka reserves its own from 1,000 on."""
EPOCH_MAX: Final = 32_766
"""Highest epoch that is handed out; Kafka keeps 32,767 for fencing."""
LACKING_MAX: Final = 20
"""Rights that a gateway says it lacks; further ones are likely to have the same cause."""
_TEXT_MAX: Final = 256
_PORTS_MAX: Final = 10_000
_PORT_MAX: Final = 65_535
_MOMENT_MAX_MS: Final = 1 << 47
"""In the year 6429: what reads it can show it."""
_NAME: Final = re.compile(r"[\w./-]+", re.ASCII)
"""Names of topics and streams; anything else would end up in commands that operators are told to run."""
_LABEL: Final = re.compile(r"([1-9][0-9]{18})\.(0|[1-9][0-9]{0,4})")


class LackingRight(NamedTuple):
    """A right in Kafka that a gateway lacks: an operation on a topic, and the stream for which it needs that."""

    operation: str
    topic: str
    stream: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRecord:
    """A gateway that is there, as its ephemeral node says.

    Attributes:
        name: Its name, which no other one has.
        host: Where clients reach it.
        port: Its first port.
        ports: Port of each broker that it knows, by the broker's id.
        life: Under which it holds transactional ids: name of its lease.
        release: The version of rollbridge that it runs; empty of one that does not say.
        cluster_id: Id of the Kafka cluster that it relays to; empty of one that does not say.
        metrics: Where its metrics and health are, ``HOST:PORT``; empty if nowhere.
        encrypted: Whether its clients' connections are.
        certificate_until_ms: When their certificate runs out, ms since 1970; 0 of one that has none, or does not say.
        since_ms: When it began to serve, ms since 1970; 0 of one that does not say.
        lacking: Rights in Kafka that it has found missing.
        faults: What keeps it from serving, as it says at ``/healthz``.
    """

    name: str
    host: str
    port: int
    ports: tuple[tuple[int, int], ...] = ()
    life: str = ""
    release: str = ""
    cluster_id: str = ""
    metrics: str = ""
    encrypted: bool = False
    certificate_until_ms: int = 0
    since_ms: int = 0
    lacking: tuple[LackingRight, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """Bootstrap address for its clients, ``HOST:PORT``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def to_json(self) -> bytes:
        """Return the value of its node; the name is that of the node."""
        document = asdict(replace(self, lacking=self.lacking[:LACKING_MAX]))
        del document["name"]
        return json.dumps(document).encode()

    @classmethod
    def from_json(cls, name: str, value: bytes) -> Self:
        """Return what a node says; fields of later versions are skipped.

        Raises:
            ValueError: it says nothing that a gateway says.
        """
        said = _object(value)
        try:
            return cls(
                name=name,
                host=_text(said["host"]),
                port=_port(said["port"]),
                ports=tuple((int(broker), int(port)) for broker, port in said["ports"][:_PORTS_MAX]),
                life=_text(said.get("life", "")),
                release=_text(said.get("release", "")),
                cluster_id=_text(said.get("cluster_id", "")),
                metrics=_text(said.get("metrics", "")),
                encrypted=bool(said.get("encrypted", False)),
                certificate_until_ms=_moment(said.get("certificate_until_ms", 0)),
                since_ms=_moment(said.get("since_ms", 0)),
                lacking=tuple(_right(item) for item in said.get("lacking", ())[:LACKING_MAX]),
                faults=tuple(_text(item) for item in said.get("faults", ())[:LACKING_MAX]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as fault:
            raise ValueError(f"not what a gateway says of itself: {fault!r}") from fault


class Holder(NamedTuple):
    """Value of a holder's node: a gateway's name and life, and the gateway that wants the id; empty if none does."""

    gateway: str
    life: str
    wanted_by: str = ""

    def encode(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @classmethod
    def decode(cls, value: bytes) -> Holder:
        """Read a value; one that cannot be read is that of a life that is over."""
        try:
            said = _object(value)
            return cls(_text(said["gateway"]), _text(said["life"]), _text(said["wanted_by"]))
        except (ValueError, KeyError, TypeError):
            return cls("", "")


@dataclass(frozen=True, slots=True)
class IdRecord:
    """Record of a transactional id, as far as others than gateways need it.

    Attributes:
        transactional_id: As its producer spells it, or its beginning: Kafka accepts 32 KiB.
        timeout_ms: Lease of its transactions; -1 for the longest allowed.
        written_ms: Time when a producer last began with it, ms since 1970.
        gateway: Name of the gateway at which it began; empty if unknown.
    """

    transactional_id: str
    timeout_ms: int
    written_ms: int
    gateway: str = ""

    @classmethod
    def from_json(cls, value: bytes) -> Self:
        """Return what a node says.

        Raises:
            ValueError: it is no record of an id.
        """
        said = _object(value)
        try:
            return cls(
                _text(said["id"]),
                int(said["timeout_ms"]),
                _moment(said.get("written_ms", 0)),
                _text(said.get("gateway", "")),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as fault:
            raise ValueError(f"not a record of a transactional id: {fault!r}") from fault


def is_gateway_label(label: str | None) -> bool:
    """Return whether a transaction has a label as gateways give: its producer began it through one."""
    found = None if label is None else _LABEL.fullmatch(label)
    if found is None:
        return False
    return FIRST_PRODUCER_ID <= int(found[1]) < FIRST_PRODUCER_ID << 1 and int(found[2]) <= EPOCH_MAX


def _object(value: bytes) -> dict[str, Any]:
    try:
        found = json.loads(value)
    except RecursionError as fault:
        raise ValueError("nested too deeply") from fault
    if not isinstance(found, dict):
        raise ValueError(f"{type(found).__name__} instead of an object")
    return found


def _port(value: Any) -> int:
    if not 0 <= int(value) <= _PORT_MAX:
        raise ValueError(f"{value!r} is no port")
    return int(value)


def _moment(value: Any) -> int:
    return max(0, min(int(value), _MOMENT_MAX_MS))


def _right(value: Any) -> LackingRight:
    found = LackingRight(*map(_text, value))
    if not all(map(_NAME.fullmatch, found)):
        raise ValueError(f"{value!r} names no right")
    return found


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value[:_TEXT_MAX]
