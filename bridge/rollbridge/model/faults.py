"""The error state of a stream: what keeps its transactions from being merged, while all others go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import rollbridge_schemas
from rollbridge.model.nodes_json import reading

SUSPENDED: Final = "native-transaction-open"
"""Code of a stream whose segments are closed and wait for the native transactions that are open on them to end."""


@dataclass(frozen=True, slots=True)
class StreamFault:
    """Why the transactions of a stream wait.

    Attributes:
        reason: As a sentence for people.
        code: Kafka's name of the error, such as ``TOPIC_AUTHORIZATION_FAILED``.
        topic: Topic that is refused; empty if it is no single one.
        since_ms: Since when, ms since 1970.
    """

    reason: str
    code: str
    topic: str
    since_ms: int

    def to_json(self) -> bytes:
        """Plain JSON."""
        return rollbridge_schemas.codec("stream_fault").to_json(
            {"reason": self.reason, "code": self.code, "topic": self.topic, "since_ms": self.since_ms}
        )

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """The inverse of :meth:`to_json`; raises CorruptDataError."""
        with reading("stream_fault", raw) as datum:
            return cls(**datum)
