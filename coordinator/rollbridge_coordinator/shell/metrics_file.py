"""Metrics as a file, for Prometheus' node exporter (its textfile collector), and on a board for whoever asks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.metrics import clock_lines, count_lines, fault_lines

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 1.0


class MetricsBoard:
    """What the leaders and standbys of one coordinator have written last; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sheets: dict[str, list[str]] = {}

    def put(self, name: str, lines: list[str]) -> None:
        """Replace what stands under this name."""
        with self._lock:
            self._sheets[name] = lines

    def drop(self, name: str) -> None:
        """Remove it, if there is any."""
        with self._lock:
            self._sheets.pop(name, None)

    def sheets(self) -> list[list[str]]:
        """All that there is, by name."""
        with self._lock:
            return [self._sheets[name] for name in sorted(self._sheets)]


class MetricsFile:
    """Written anew every second while a group is led or followed, and gone after.

    Without a directory there is no file, and without a board nothing is put there.
    """

    def __init__(self, directory: str, group: str, suffix: str = "", board: MetricsBoard | None = None) -> None:
        self._name = f"rollbridge-{group.replace('/', '.')}{suffix}.prom"
        self._path = Path(directory) / self._name if directory else None
        self._board = board
        self._next_s = 0.0

    def write(self, lines: Callable[[], Iterable[str]]) -> None:
        """Replace the file by the present metrics, if it is time. What can not be written is logged, once."""
        if (self._path is None and self._board is None) or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + INTERVAL_S
        present = list(lines())
        if self._board is not None:
            self._board.put(self._name, present)
        if self._path is None:
            return
        draft = self._path.with_suffix(".tmp")
        try:
            draft.write_text("\n".join(present) + "\n", encoding="utf-8")
            draft.replace(self._path)
        except OSError as fault:
            logger.warning("metrics are not written any more: %s", fault)
            self._path = None

    def remove(self) -> None:
        """The group is not led, or followed, here any more."""
        if self._board is not None:
            self._board.drop(self._name)
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def leader_lines(group: GroupState) -> Iterator[str]:
    """The metrics of a leader."""
    segments = sum(len(item.aborted.indexes) for item in group.snapshots.partitions.values())
    yield from count_lines(str(group.name), group.counts)
    yield from fault_lines(str(group.name), ((name, fault.code) for name, fault in group.faults.items()))
    yield from clock_lines(str(group.name), group.times.spread_ms, differ=group.times.differ)
    yield from group.snapshots.metrics.lines(str(group.name), segments)
