"""The published test vectors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import (
    FrameHeader,
    FrameKind,
)
from rollbridge.buffer.replay import OngoingTransactions, decode_ongoing
from rollbridge.buffer.snapshots import Snapshot, SnapshotSegment, decode_segment, decode_snapshot
from rollbridge.commitlog.outcomes import (
    EndedTransactions,
    parse_ended,
)

ROOT = Path(__file__).parents[2] / "schemas"


Vector = dict[str, Any]


def vectors(name: str) -> Any:
    return json.loads((ROOT / "vectors" / f"{name}.json").read_text(encoding="utf-8"))


def header_of(vector: Vector) -> FrameHeader:
    said = vector["header"]
    transaction = TransactionId.parse(said["transaction"]).bytes
    numbers = (said[name] for name in ("part", "segment", "first_count", "records", "epoch"))
    return FrameHeader(FrameKind[said["kind"]], transaction, *numbers)


Sealed = SnapshotSegment | Snapshot | OngoingTransactions | EndedTransactions


READERS: dict[str, Callable[[bytes], Sealed]] = {
    "snapshot_segment": decode_segment,
    "snapshot_indexes": decode_snapshot,
    "ongoing_transactions": decode_ongoing,
    "ended_transactions": parse_ended,
}
