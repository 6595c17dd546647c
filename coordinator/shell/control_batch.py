"""Control records as record batches for the commit log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bridge.kafka.batches import BatchBuilder
from bridge.model.control import ControlRecord

BATCH_BYTES_MAX: Final = 512 * 1024


def control_batches(records: Sequence[ControlRecord]) -> tuple[list[bytes], list[tuple[int, int]]]:
    """Batches that hold the records in order, and for each record its batch and its place in it.

    A record larger than a batch should be gets one of its own.
    """
    batches: list[bytes] = []
    places: list[tuple[int, int]] = []
    builder = BatchBuilder(BATCH_BYTES_MAX)
    for record in records:
        key, value = record.transaction.bytes, record.encode_value()
        if not builder.append(record.decided_ms, key, value):
            batches.append(builder.build())
            builder.append(record.decided_ms, key, value)
        places.append((len(batches), builder.count - 1))
    if builder.count:
        batches.append(builder.build())
    return batches, places
