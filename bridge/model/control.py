"""Control records: the entries of a group's commit log, one COMMIT or ABORT for every transaction, in commit order.

A COMMIT record lists where the records went as runs of consecutive offsets, so clients resolve their futures, and
auditors their counts, from the commit log alone.

Source: DistributedLog transactions, "commit log stream" and begin/commit/abort control records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import schemas
from bridge.errors import CorruptDataError, InvalidRequestError
from bridge.model.identifiers import SegmentId, TransactionId

EXPIRED = "expired"
"""The reason of an ABORT record whose transaction outlived its lease."""


class ControlKind(StrEnum):
    """What a control record says."""

    BEGIN = "BEGIN"
    COMMIT = "COMMIT"
    ABORT = "ABORT"


@dataclass(frozen=True, slots=True)
class Run:
    """Records of one part at consecutive offsets of a segment."""

    part: int
    base_offset: int
    count: int


Placement = Mapping[str, Mapping[SegmentId, Sequence[Run]]]
"""Where the records of a transaction stand: scope/stream → segment → runs in order of offset."""


@dataclass(frozen=True, slots=True)
class ControlRecord:
    """One record of a commit log."""

    transaction: TransactionId
    kind: ControlKind
    client_name: str
    begun_ms: int
    decided_ms: int
    controller_epoch: int
    label: str | None = None
    reason: str = ""
    records: int = 0
    size_bytes: int = 0
    placement: Placement = field(default_factory=dict)

    def encode_value(self) -> bytes:
        """Avro binary of the record; its Kafka key is the transaction id's 16 bytes."""
        return schemas.codec("control_record").encode(
            {
                "kind": self.kind.value,
                "reason": self.reason,
                "client_name": self.client_name,
                "label": self.label,
                "records": self.records,
                "bytes": self.size_bytes,
                "begun_ms": self.begun_ms,
                "decided_ms": self.decided_ms,
                "controller_epoch": self.controller_epoch,
                "streams": [
                    {
                        "stream": stream,
                        "segments": [
                            {
                                "segment": int(segment),
                                "runs": [
                                    {"part": run.part, "base_offset": run.base_offset, "count": run.count}
                                    for run in runs
                                ],
                            }
                            for segment, runs in segments.items()
                        ],
                    }
                    for stream, segments in self.placement.items()
                ],
            }
        )

    def segments(self) -> Iterator[tuple[str, SegmentId, Sequence[Run]]]:
        """Every stream and segment that holds records, with its runs."""
        for stream, segments in self.placement.items():
            for segment, runs in segments.items():
                yield stream, segment, runs


def decode_control(key: bytes | None, value: bytes | None) -> ControlRecord:
    """The control record in a message of a commit log.

    Raises:
        CorruptDataError: the message is not one.
    """
    try:
        datum = schemas.codec("control_record").decode(value or b"")
        return ControlRecord(
            transaction=TransactionId.from_bytes(key or b""),
            kind=ControlKind(datum["kind"]),
            client_name=datum["client_name"],
            begun_ms=datum["begun_ms"],
            decided_ms=datum["decided_ms"],
            controller_epoch=datum["controller_epoch"],
            label=datum["label"],
            reason=datum["reason"],
            records=datum["records"],
            size_bytes=datum["bytes"],
            placement={
                item["stream"]: {
                    SegmentId.from_int(segment["segment"]): [
                        Run(run["part"], run["base_offset"], run["count"]) for run in segment["runs"]
                    ]
                    for segment in item["segments"]
                }
                for item in datum["streams"]
            },
        )
    except (schemas.SchemaError, InvalidRequestError) as fault:
        raise CorruptDataError(f"a message of the commit log is no control record: {fault}") from fault


_KINDS = tuple(ControlKind)


def peek_kind(value: bytes | None) -> ControlKind | None:
    """The kind of a control record from its first byte, without decoding the rest; None if it can not be one.

    The kind is the schema's first field, and Avro writes an enum as the zigzag number of its symbol.
    """
    return _KINDS[value[0] >> 1] if value and value[0] in (0, 2, 4) else None


def add_run(runs: list[Run], part: int, base_offset: int, count: int) -> None:
    """Append to a segment's runs, joining with the last one where the offsets continue."""
    if runs and runs[-1].part == part and runs[-1].base_offset + runs[-1].count == base_offset:
        runs[-1] = Run(part, runs[-1].base_offset, runs[-1].count + count)
    else:
        runs.append(Run(part, base_offset, count))
