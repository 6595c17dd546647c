"""Metrics as a file, for Prometheus' node exporter (its textfile collector) and whoever else looks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from coordinator.group import GroupState
from coordinator.metrics import count_lines

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 1.0


class MetricsFile:
    """Written anew every second while a group is led or followed, and gone after; without a directory nothing is."""

    def __init__(self, directory: str, group: str, suffix: str = "") -> None:
        name = f"rollbridge-{group.replace('/', '.')}{suffix}.prom"
        self._path = Path(directory) / name if directory else None
        self._next_s = 0.0

    def write(self, lines: Callable[[], Iterable[str]]) -> None:
        """Replace the file by the present metrics, if it is time. What can not be written is logged, once."""
        if self._path is None or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + INTERVAL_S
        text = "\n".join(lines()) + "\n"
        draft = self._path.with_suffix(".tmp")
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(self._path)
        except OSError as fault:
            logger.warning("metrics are not written any more: %s", fault)
            self._path = None

    def remove(self) -> None:
        """The group is not led, or followed, here any more."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def leader_lines(group: GroupState) -> Iterator[str]:
    """The metrics of a leader."""
    segments = sum(len(item.aborted.indexes) for item in group.snapshots.partitions.values())
    yield from count_lines(str(group.name), group.counts)
    yield from group.snapshots.metrics.lines(str(group.name), segments)
