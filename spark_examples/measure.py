"""What the demo measures: waits of a reader, a takeover, and the memory of the coordinators."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Self

import psutil

from spark_examples.small_writer import Commit

_SAMPLE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Waits:
    """How long a reader waited for records whose commit was answered already."""

    longest_s: float
    median_s: float


def waits(commits: Sequence[Commit], arrived_s: Mapping[int, float]) -> Waits:
    """From the answer to each commit to the arrival of its last record; 0 where the reader was faster.

    Args:
        commits: Those to look at, at least one; all must have arrived.
        arrived_s: When each one's last record arrived, on the same clock.
    """
    found = sorted(max(arrived_s[commit.number] - commit.answered_s, 0.0) for commit in commits)
    return Waits(found[-1], found[len(found) // 2])


def longest_silence(arrivals_s: Sequence[float], begin_s: float, end_s: float) -> float:
    """The longest time between ``begin_s`` and ``end_s`` in which nothing arrived."""
    inside = [at for at in arrivals_s if begin_s < at < end_s]
    return max(after - before for before, after in pairwise([begin_s, *inside, end_s]))


def first_answer_after(commits: Sequence[Commit], moment_s: float) -> Commit | None:
    """The first commit that was answered after a moment."""
    return next((commit for commit in commits if commit.answered_s > moment_s), None)


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
