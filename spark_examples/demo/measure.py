"""What the demo measures: waits of a reader, a takeover, and the memory of the coordinators."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Self

import psutil

from spark_examples.demo.small_writer import Commit

_SAMPLE_SECONDS = 0.1


def waits(commits: Sequence[Commit], arrived_s: Mapping[int, float]) -> list[float]:
    """How long a reader waited for records whose commit was answered already, in seconds, sorted.

    Args:
        commits: The small transactions to look at; all must have arrived.
        arrived_s: When each one's last record arrived, on the same clock.

    Returns:
        For each, the time from the answer to its commit to the arrival; 0 where the reader had it before the writer
        had its answer.
    """
    return sorted(max(arrived_s[commit.number] - commit.answered_s, 0.0) for commit in commits)


def longest_silence(arrivals_s: Sequence[float], begin_s: float, end_s: float) -> float:
    """The longest time between ``begin_s`` and ``end_s`` in which nothing arrived."""
    inside = [at for at in arrivals_s if begin_s < at < end_s]
    return max(after - before for before, after in pairwise([begin_s, *inside, end_s]))


def takeover(commits: Sequence[Commit], killed_s: float) -> float | None:
    """From a kill to the answer to the first commit that was asked for after it; None if there is none yet.

    One that was asked for before the kill may have been decided before it.
    """
    return next((commit.answered_s - killed_s for commit in commits if commit.asked_s > killed_s), None)


class PeakMemory:
    """The highest resident memory of some processes, looked at ten times a second."""

    def __init__(self) -> None:
        self._peaks: dict[int, int] = {}
        self._processes: list[psutil.Process] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def watch(self, process: psutil.Process) -> None:
        """Look at one more process."""
        self._processes.append(process)

    def mib(self, pid: int) -> float:
        """The highest that was seen of a process, in MiB."""
        return self._peaks.get(pid, 0) / (1024 * 1024)

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            for process in list(self._processes):
                try:
                    now = int(process.memory_info().rss)
                except psutil.Error:
                    # It was killed, as the story wants it; what it held before stays noted.
                    self._processes.remove(process)
                    continue
                self._peaks[process.pid] = max(now, self._peaks.get(process.pid, 0))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
