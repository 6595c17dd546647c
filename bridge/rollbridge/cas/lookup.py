"""What conditions look at: the last record of a key's course, and the last one with the key, across its segments."""

from __future__ import annotations

import threading

from rollbridge.cas.segment_log import Progress, SegmentLog
from rollbridge.kafka.errors import TopicNotFound
from rollbridge.kafka.fetch import LogReader
from rollbridge.model.course import Course, Stage
from rollbridge.model.names import StreamName
from rollbridge.model.sn import ANY, EMPTY, SN


class StreamLogs:
    """What one writer knows of the segments of a stream; safe to use from several threads."""

    def __init__(self, stream: StreamName) -> None:
        self._stream = stream
        self._logs: dict[int, SegmentLog] = {}
        self._removed: set[int] = set()
        self._lock = threading.Lock()

    def of(self, stage: Stage) -> SegmentLog:
        """The log of a segment."""
        with self._lock:
            found = self._logs.get(int(stage.segment))
            if found is None:
                found = SegmentLog(self._stream.segment_topic(stage.segment), stage.segment, stage.base)
                self._logs[int(stage.segment)] = found
            return found

    def active(self, course: Course) -> SegmentLog:
        """The log of the active segment of a course."""
        return self.of(Stage(course.active, course.active_base, None))

    def last(
        self, course: Course, reader: LogReader, to: int, deadline: float, progress: Progress = lambda: None
    ) -> SN:
        """SN of the last committed record of a course before offset ``to`` of its active segment.

        EMPTY if there is none, ANY if it was truncated away. ``progress`` is called as :meth:`SegmentLog.last` does.

        Raises:
            WaitedTooLong: something before is still undecided.
        """
        active = self.active(course)
        with active.lock:
            found = active.last(reader, to, deadline, progress)
        if not found.empty:
            return found
        for stage in course.stages[1:]:
            found = self._last_before(stage, course, reader, deadline)
            if not found.empty:
                return found
        return ANY if course.dropped_end else EMPTY

    def last_id(self, course: Course, reader: LogReader, to: int, deadline: float) -> int | None:
        """The last transaction id that a user gave a committed record of a course before offset ``to``.

        None if there is none, or if all were truncated away.

        Raises:
            WaitedTooLong: something before is still undecided.
        """
        for stage in course.stages:
            if self._is_removed(stage):
                continue
            log = self.of(stage)
            try:
                with log.lock:
                    found = log.last_id(reader, to if stage.segment == course.active else stage.end or 0, deadline)
            except TopicNotFound as fault:
                self._note_removed(stage, course, fault)
                continue
            if found is not None:
                return found
        return None

    def last_of(self, course: Course, reader: LogReader, key: bytes, place: int | None, to: int, deadline: float) -> SN:
        """SN of the last committed record with ``key`` before offset ``to`` of the active segment.

        EMPTY if there is none, ANY if it may have been truncated away.

        Args:
            course: The course of the key.
            reader: Reads.
            key: The key.
            place: Sequence id at and before which nothing is looked for; None: the whole course is.
            to: See above.
            deadline: By ``time.monotonic()``.

        Raises:
            WaitedTooLong: something before is still undecided.
        """
        for stage in course.stages:
            end = to if stage.segment == course.active else stage.end or 0
            since = 0 if place is None else min(max(place + 1 - stage.base, 0), end)
            found, truncated = self._key_last(stage, course, reader, key, since, end, deadline)
            if found is not None:
                return found
            if truncated:
                return ANY
            if place is not None and place >= stage.base:
                return EMPTY
        return ANY if course.dropped_end > (0 if place is None else place + 1) else EMPTY

    def _last_before(self, stage: Stage, course: Course, reader: LogReader, deadline: float) -> SN:
        """The last record of a sealed segment; ANY if that may have been truncated away."""
        if not self._is_removed(stage):
            log = self.of(stage)
            try:
                with log.lock:
                    return log.last(reader, stage.end or 0, deadline)
            except TopicNotFound as fault:
                self._note_removed(stage, course, fault)
        return ANY if stage.end else EMPTY

    def _key_last(
        self, stage: Stage, course: Course, reader: LogReader, key: bytes, since: int, end: int, deadline: float
    ) -> tuple[SN | None, bool]:
        """The last record of a key in a segment from an offset on, and whether something there was truncated away."""
        if not self._is_removed(stage):
            log = self.of(stage)
            try:
                with log.lock:
                    return log.last_of(reader, key, since, end, deadline), log.truncated_at() > since
            except TopicNotFound as fault:
                self._note_removed(stage, course, fault)
        return None, since < end

    def _is_removed(self, stage: Stage) -> bool:
        """Whether a segment is known to be gone: by the history, or by not having been there before."""
        return stage.removed or int(stage.segment) in self._removed

    def _note_removed(self, stage: Stage, course: Course, fault: TopicNotFound) -> None:
        """A segment was removed since the epochs were read; raises the fault if it is the active one."""
        if stage.segment == course.active:
            raise fault
        self._removed.add(int(stage.segment))
