"""Admin requests and their answers, as ZooKeeper carries them between clients and leaders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Self

import rollbridge_schemas
from rollbridge.model.ids import SegmentId
from rollbridge.model.names import DEFAULT_GROUP
from rollbridge.model.records import Retention, reading
from rollbridge.model.transaction import KnownTransaction, State, TransactionEvent

REASON_CHARACTERS_MAX: Final = 10_000
"""Of the reason in an answer that refuses a request."""
CAUSE_CHARACTERS_MAX: Final = 1_000
"""Of the cause of an event in an answer."""


class RequestKind(StrEnum):
    """What an admin request asks for."""

    CREATE_STREAM = "create-stream"
    SCALE_STREAM = "scale-stream"
    DELETE_STREAM = "delete-stream"
    UPDATE_STREAM = "update-stream"
    TRUNCATE_STREAM = "truncate-stream"
    ABORT_TRANSACTION = "abort-transaction"
    LOOK_UP = "look-up-transactions"
    """Of a transaction, of the latest with a label, or of all open ones of a client."""
    DESCRIBE = "describe-transaction"
    """What its leader knows of one now, with its last events; nothing is waited for."""
    FENCE = "fence-client"
    CLEAR_SNAPSHOTS = "clear-snapshots"
    REBUILD_SNAPSHOTS = "rebuild-snapshots"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An admin request; fields that its kind does not use keep their defaults."""

    kind: RequestKind
    stream: str = ""
    transaction: str = ""
    segments: int = 0
    ranges: tuple[tuple[float, float], ...] = ()
    seal: tuple[int, ...] = ()
    group: str = DEFAULT_GROUP
    buffer_partitions: int = 1
    replication_factor: int = -1
    record_bytes_max: int = 0
    reason: str = ""
    client_name: str = ""
    created_ms: int
    owner: str = ""
    owner_epoch: int = 0
    label: str | None = None
    cut: Mapping[SegmentId, int] = field(default_factory=dict)
    retention: Retention | None = None
    abort_foreign: bool = False

    def to_json(self) -> bytes:
        """Plain JSON."""
        return rollbridge_schemas.codec("request").to_json(
            {
                "kind": self.kind.value,
                "stream": self.stream,
                "transaction": self.transaction,
                "segments": self.segments,
                "ranges": [{"low": low, "high": high} for low, high in self.ranges],
                "seal": list(self.seal),
                "group": self.group,
                "buffer_partitions": self.buffer_partitions,
                "replication_factor": self.replication_factor,
                "record_bytes_max": self.record_bytes_max,
                "reason": self.reason,
                "client_name": self.client_name,
                "created_ms": self.created_ms,
                "owner": self.owner,
                "owner_epoch": self.owner_epoch,
                "label": self.label,
                "cut": [{"segment": int(segment), "offset": offset} for segment, offset in self.cut.items()],
                "retention": None if self.retention is None else self.retention.datum(),
                "abort_foreign": self.abort_foreign,
            }
        )

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """The inverse of :meth:`to_json`; raises CorruptDataError."""
        with reading("request", raw) as datum:
            retention = datum.pop("retention")
            return cls(
                cut={SegmentId.from_int(item["segment"]): item["offset"] for item in datum.pop("cut")},
                retention=None if retention is None else Retention.of_datum(retention),
                kind=RequestKind(datum.pop("kind")),
                ranges=tuple((item["low"], item["high"]) for item in datum.pop("ranges")),
                seal=tuple(datum.pop("seal")),
                **datum,
            )


@dataclass(frozen=True, slots=True)
class Story:
    """The last events of a transaction, oldest first, that the leader of ``controller_epoch`` saw since it took over.

    Attributes:
        serves_since_ms: When that was, ms since 1970.
    """

    events: tuple[TransactionEvent, ...]
    serves_since_ms: int
    controller_epoch: int

    def datum(self) -> rollbridge_schemas.Datum:
        """The Avro record."""
        return {
            "events": [
                {
                    "at_ms": event.at_ms,
                    "before": event.before.value,
                    "after": event.after.value,
                    "event": str(event.event),
                    "cause": event.cause[:CAUSE_CHARACTERS_MAX],
                    "round": event.round,
                }
                for event in self.events
            ],
            "serves_since_ms": self.serves_since_ms,
            "controller_epoch": self.controller_epoch,
        }

    @classmethod
    def of_datum(cls, datum: rollbridge_schemas.Datum, transaction: bytes) -> Self:
        """The inverse of :meth:`datum`; raises ValueError for a state that there is not."""
        events = tuple(
            TransactionEvent(
                item["at_ms"],
                transaction,
                State(item["before"]),
                State(item["after"]),
                item["event"],
                item["cause"],
                item["round"],
                is_unusual=False,
            )
            for item in datum["events"]
        )
        return cls(events, datum["serves_since_ms"], datum["controller_epoch"])


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to an admin request; ``code`` is that of the error class that the client raises.

    ``story`` is that of the one transaction that was described.
    """

    ok: bool
    answered_ms: int
    code: str = ""
    message: str = ""
    epoch: int = -1
    transactions: tuple[KnownTransaction, ...] = ()
    story: Story | None = None

    def to_json(self) -> bytes:
        """Plain JSON."""
        return rollbridge_schemas.codec("answer").to_json(
            {
                "ok": self.ok,
                "code": self.code,
                "message": self.message,
                "epoch": self.epoch,
                "answered_ms": self.answered_ms,
                "transactions": [item.as_datum() for item in self.transactions],
                "story": None if self.story is None else self.story.datum(),
            }
        )

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """The inverse of :meth:`to_json`; raises CorruptDataError."""
        with reading("answer", raw) as datum:
            known = tuple(KnownTransaction.from_datum(item) for item in datum.pop("transactions"))
            said = datum.pop("story")
            story = Story.of_datum(said, known[0].id.bytes) if said is not None and known else None
            return cls(transactions=known, story=story, **datum)


def refusing(code: str, why: str, now_ms: int) -> Answer:
    """Return the answer that refuses a request; a long reason is cut, because the answer has to fit into a node."""
    return Answer(ok=False, answered_ms=now_ms, code=code, message=why[:REASON_CHARACTERS_MAX])
