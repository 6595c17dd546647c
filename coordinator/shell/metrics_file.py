"""The metrics of a leader as a file, for Prometheus' node exporter (its textfile collector) and whoever else looks."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Final

from coordinator.group import GroupState
from coordinator.metrics import count_lines

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 1.0


class MetricsFile:
    """Written anew every second while a group is led, and gone after; without a directory nothing is written."""

    def __init__(self, directory: str, group: str) -> None:
        self._path = Path(directory) / f"rollbridge-{group.replace('/', '.')}.prom" if directory else None
        self._next_s = 0.0

    def write(self, group: GroupState) -> None:
        """Replace the file by the present metrics, if it is time. What can not be written is logged, once."""
        if self._path is None or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + INTERVAL_S
        segments = sum(len(item.aborted.indexes) for item in group.snapshots.partitions.values())
        name = str(group.name)
        lines = [*count_lines(name, group.counts), *group.snapshots.metrics.lines(name, segments)]
        draft = self._path.with_suffix(".tmp")
        try:
            draft.write_text("\n".join(lines) + "\n", encoding="utf-8")
            draft.replace(self._path)
        except OSError as fault:
            logger.warning("metrics are not written any more: %s", fault)
            self._path = None

    def remove(self) -> None:
        """The group is not led here any more."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
