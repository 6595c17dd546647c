"""Control records, and messages beside them, as record batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import time
from typing import Final

from rollbridge.kafka.batches import BatchBuilder
from rollbridge.model.control import ControlRecord
from rollbridge_coordinator.state.effects import Messages

BATCH_BYTES_MAX: Final = 512 * 1024

Batches = tuple[list[bytes], list[tuple[int, int]]]
"""Batches that hold records in order, and for each record its batch and its place in it."""


def control_batches(records: Sequence[ControlRecord]) -> Batches:
    """Control records, stamped with the time of their decision."""
    return record_batches((record.decided_ms, record.transaction.bytes, record.encode_value()) for record in records)


def record_batches(rows: Iterable[tuple[int, bytes, bytes | None]]) -> Batches:
    """Records as (time in ms, key, value); one larger than a batch should be gets a batch of its own."""
    batches: list[bytes] = []
    places: list[tuple[int, int]] = []
    builder = BatchBuilder(BATCH_BYTES_MAX)
    for timestamp, key, value in rows:
        if not builder.append(timestamp, key, value):
            batches.append(builder.build())
            builder.append(timestamp, key, value)
        places.append((len(batches), builder.count - 1))
    if builder.count:
        batches.append(builder.build())
    return batches, places


def message_batches(messages: Messages) -> Batches:
    """Messages, stamped with the present time."""
    now_ms = int(time() * 1000)
    return record_batches((now_ms, key, value) for key, value in messages.items)


def beside_batches(messages: Messages | None) -> list[tuple[str, bytes]]:
    """The batches of what is to stand beside control records, if anything is, each with its topic."""
    return [] if messages is None else [(messages.topic, batch) for batch in message_batches(messages)[0]]
