"""Makers of streams to route to."""

from __future__ import annotations

from rollbridge.stream.config import StreamConfig
from rollbridge.stream.names import GroupName, StreamName

CONFIG = StreamConfig(
    name=StreamName("sales", "orders"),
    group=GroupName("sales", "g"),
    buffer_partitions=3,
    record_bytes_max=777,
    created_ms=0,
    buffer_topic_id="",
)
