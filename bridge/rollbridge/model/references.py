"""The streams of a transaction and their reference epochs, as records and messages hold them. Pure.

Source: PDP-24, "Transactions" (a transaction is of the epoch in which it was created).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def encode_streams(streams: Mapping[str, int]) -> list[dict[str, Any]]:
    """Reference epochs by ``scope/stream`` as an Avro array of records."""
    return [{"stream": name, "reference_epoch": epoch} for name, epoch in streams.items()]


def decode_streams(items: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Reference epochs by ``scope/stream``."""
    return {item["stream"]: item["reference_epoch"] for item in items}
