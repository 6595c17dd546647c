"""What a group's leader knows of one transaction, as it answers those who ask: open, or how and where it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import rollbridge_schemas
from rollbridge.model.frames import PieceKey
from rollbridge.model.identifiers import TransactionId
from rollbridge.model.references import decode_streams, encode_streams
from rollbridge.model.terminated import RETAIN_DEFAULT
from rollbridge.model.transaction import State


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTransaction:
    """One transaction.

    Attributes:
        id: Its id.
        state: OPEN, COMMITTED or ABORTED.
        client_name, label: Given at its begin.
        position: Offset of its record on the commit log; -1 while it is open.
        records: How many became visible, or arrived so far.
        decided_ms: When it ended, or when it began if it is open, ms since 1970.
        reason: Why it was aborted.
        lease_ms, retain_ms: How long it may stay open after that, and how long its outcome is remembered.
        streams: Of an open one: ``scope/stream`` to its reference epoch.
        pieces: Of an open one: how many records its owners have written, as far as the leader has them.
    """

    id: TransactionId
    state: State
    client_name: str
    label: str | None = None
    position: int = -1
    records: int = 0
    decided_ms: int = 0
    reason: str = ""
    lease_ms: int = 0
    retain_ms: int = RETAIN_DEFAULT
    streams: Mapping[str, int] = field(default_factory=dict)
    pieces: Mapping[PieceKey, int] = field(default_factory=dict)

    def as_datum(self) -> rollbridge_schemas.Datum:
        """The Avro record."""
        return {
            "id": str(self.id),
            "state": self.state.value,
            "client_name": self.client_name,
            "label": self.label,
            "position": self.position,
            "records": self.records,
            "decided_ms": self.decided_ms,
            "reason": self.reason,
            "lease_ms": self.lease_ms,
            "retain_ms": self.retain_ms,
            "streams": encode_streams(self.streams),
            "pieces": [{**key._asdict(), "records": records} for key, records in self.pieces.items()],
        }

    @classmethod
    def from_datum(cls, datum: rollbridge_schemas.Datum) -> Self:
        """The inverse of :meth:`as_datum`.

        Raises:
            ValueError, InvalidRequestError: there can be no such transaction.
        """
        plain = {
            name: datum[name]
            for name in ("client_name", "label", "position", "records", "decided_ms", "reason", "lease_ms", "retain_ms")
        }
        return cls(
            id=TransactionId.parse(datum["id"]),
            state=State(datum["state"]),
            streams=decode_streams(datum["streams"]),
            pieces={
                PieceKey(item["part"], item["stream"], item["segment"]): item["records"] for item in datum["pieces"]
            },
            **plain,
        )
