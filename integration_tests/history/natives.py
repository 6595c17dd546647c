"""A topic that exists before its stream does."""

from __future__ import annotations

from typing import Final

TOPIC: Final = "history.adopted"
"""It is adopted before anybody writes."""
PARTITIONS: Final = 3
