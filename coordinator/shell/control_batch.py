"""Control records, and messages beside them, as record batches."""

from __future__ import annotations

from collections.abc import Sequence
from time import time
from typing import Final

from bridge.kafka.batches import BatchBuilder
from bridge.model.control import ControlRecord
from coordinator.effects import Messages

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


def message_batches(messages: Messages | None) -> list[tuple[str, bytes]]:
    """Batches that hold the messages in order, each with its topic."""
    if messages is None or not messages.items:
        return []
    batches: list[tuple[str, bytes]] = []
    builder = BatchBuilder(BATCH_BYTES_MAX)
    now_ms = int(time() * 1000)
    for key, value in messages.items:
        if not builder.append(now_ms, key, value):
            batches.append((messages.topic, builder.build()))
            builder.append(now_ms, key, value)
    batches.append((messages.topic, builder.build()))
    return batches
