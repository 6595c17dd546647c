"""Which sealed segments a leader still looks behind, and when. Pure.

A record may come in behind a sealed end (:mod:`rollbridge.kafka.seal` says how). It does so soon or hardly ever, so a
segment is looked behind at growing intervals, for longer than a request, or a native transaction, can live.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from rollbridge.model.epochs import EpochHistory
from rollbridge.model.identifiers import SegmentId

FIRST_MS: Final = 1_000
GAP_MAX_MS: Final = 60_000
_SPARE: Final = 10
AT_ONCE: Final = 200
"""Segments looked behind in one turn; one request for each broker that leads some of them."""

Watched = tuple[str, SegmentId]
"""``scope/stream`` and segment."""


@dataclass(slots=True)
class _Course:
    due_ms: int
    until_ms: int
    gap_ms: int


@dataclass(slots=True)
class LateWatch:
    """The segments that are looked behind.

    Attributes:
        watch_ms: For how long, from when a segment was sealed.
        known: The newest epoch of each stream whose ended segments have been taken up.
    """

    watch_ms: int
    known: dict[str, int] = field(default_factory=dict)
    _courses: dict[Watched, _Course] = field(default_factory=dict)

    def take_up(self, stream: str, history: EpochHistory, now_ms: int, earliest_ms: int | None = None) -> None:
        """Watch the segments that ended with epochs made since the last time.

        A new leader takes up all whose epochs were planned not too long ago: sealing takes its time after that, and
        clocks differ. ``earliest_ms`` is the lowest of the times that they show; None: it is ``now_ms``.
        """
        judged_ms = now_ms if earliest_ms is None else earliest_ms
        since = self.known.get(stream)
        if since == history.active.epoch:
            return
        for record in reversed(history.records[1:]):
            if record.epoch <= (-1 if since is None else since):
                break
            if since is None and judged_ms - record.created_ms > self.watch_ms * _SPARE:
                break
            for segment in record.sealed_ends or ():
                course = _Course(now_ms, now_ms + self.watch_ms, FIRST_MS // 2)
                self._courses.setdefault((stream, segment), course)
        self.known[stream] = history.active.epoch

    def due(self, now_ms: int) -> Sequence[Watched]:
        """What is to be looked behind now, the longest overdue first."""
        found = [(course.due_ms, item) for item, course in self._courses.items() if course.due_ms <= now_ms]
        return [item for _, item in sorted(found)[:AT_ONCE]]

    def looked(self, items: Iterable[Watched], now_ms: int) -> None:
        """Take note that these have been looked behind; the last time is after ``watch_ms`` have passed."""
        for item in items:
            course = self._courses[item]
            if now_ms >= course.until_ms:
                del self._courses[item]
                continue
            course.gap_ms = min(course.gap_ms * 2, GAP_MAX_MS)
            course.due_ms = min(now_ms + course.gap_ms, max(course.until_ms, now_ms + 1))

    def postpone(self, items: Iterable[Watched], now_ms: int) -> None:
        """Look again soon: it could not be told now."""
        for item in items:
            self._courses[item].due_ms = now_ms + FIRST_MS

    def forget(self, items: Iterable[Watched]) -> None:
        """Stop watching these: they are gone."""
        for item in items:
            self._courses.pop(item, None)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is watched."""
        return not self._courses
