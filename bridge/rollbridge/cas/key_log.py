"""The records of one key, read forwards and backwards along its course; what a synchronizer sees of the log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from rollbridge.cas.lookup import StreamLogs
from rollbridge.cas.segment_log import FIRST_STEP, sn_of
from rollbridge.cas.shape import Shape
from rollbridge.errors import InvalidRequestError, TruncatedError
from rollbridge.kafka.errors import TopicNotFound
from rollbridge.kafka.fetch import NO_EPOCH, LogDivergedError, LogReader
from rollbridge.kafka.metadata import Cluster, Isolation
from rollbridge.kafka.offsets import read_end_offset
from rollbridge.model.course import Course, Stage
from rollbridge.model.keyspace import position_of_key
from rollbridge.model.sequence import DLSN
from rollbridge.model.synchronizer import Entry, Pointer, entry_of

_STEP_FACTOR: Final = 8
_STEP_MAX: Final = 1 << 15
"""Most offsets that are looked at in one step backwards, and so most places that are kept meanwhile."""
_UNKNOWN_TOPIC_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Part of a course: the offsets ``start..end-1`` of one segment."""

    stage: Stage
    start: int
    end: int


class KeyLog:
    """A :class:`rollbridge.model.synchronizer.KeyLog` of real topics; not thread-safe.

    Raises, from each method and iterator:
        WaitedTooLong: Something before is still undecided.
        StreamNotFound, UnavailableError: The stream is gone; a scale of it does not end.
    """

    def __init__(self, cluster: Cluster, shape: Shape, key: bytes, timeout_s: float) -> None:
        """``timeout_s`` bounds each reading from one place to another."""
        self._cluster = cluster
        self._reader = LogReader(cluster)
        self._shape = shape
        self._key = key
        self._position = position_of_key(key)
        self._timeout_s = timeout_s
        self._logs = StreamLogs(shape.stream)
        self._read_to: tuple[DLSN, int] | None = None
        """Where reading forwards has ended, and the leader epoch of the last batch before that."""

    def close(self) -> None:
        """Drop the connections."""
        self._cluster.close()

    def end(self) -> DLSN:
        """The place after everything whose writer had its answer before this was asked."""
        self._shape.check_current()
        course = self._course()
        return DLSN.of(course.active, self._end_of(course.stages[0]))

    def between(self, start: DLSN, end: DLSN) -> Iterator[Entry]:
        """Entries from ``start`` up to, without it, ``end``; raises TruncatedError if some of that was deleted.

        As well if what was read before ``start`` is not in the log any more, because that has lost its end.
        """
        for stretch in reversed(self._stretches(self._course(), end, start)):
            self._check_kept(stretch)
            epoch = self._epoch_before(stretch)
            if stretch.start < stretch.end:
                for entry in self._entries(stretch, epoch):
                    self._check_whole(stretch)
                    yield entry
                self._check_whole(stretch)
                self._note_read(stretch)
            elif epoch != NO_EPOCH and stretch.stage.end is None:
                with self._looking_at(stretch.stage):
                    self._reader.fetch(self._logs.of(stretch.stage).topic, stretch.start, last_epoch=epoch)

    def backwards(self, end: DLSN) -> Iterator[Pointer]:
        """Where entries before ``end`` stand, the newest first; TruncatedError where it comes to what was deleted."""
        step = FIRST_STEP
        course = self._course()
        for whole in self._stretches(course, end):
            self._check_kept(whole)
            upper = whole.end
            while upper > 0:
                stretch = _Stretch(whole.stage, max(0, upper - step), upper)
                pointers = [entry.pointer for entry in self._entries(stretch)]
                if DLSN.of(whole.stage.segment, upper) == end:
                    self._note_read(stretch)  # where nothing is found, reading forwards goes on here
                yield from reversed(pointers)
                self._check_whole(stretch)
                upper = stretch.start
                step = min(step * _STEP_FACTOR, _STEP_MAX)
        if course.dropped_end:
            raise TruncatedError(f"the first epochs of {self._shape.stream} were dropped with all their records")

    def kept_from(self) -> int:
        """The sequence id before which all was deleted, as far as was met so far; it only grows."""
        course = self._course()
        return max(course.dropped_end, *map(self._kept_from, course.stages))

    def _kept_from(self, stage: Stage) -> int:
        kept = self._logs.of(stage).truncated_at()
        if stage.removed and stage.end is not None:
            kept = stage.end
        return stage.base + kept if kept else 0

    def foreign_before(self, end: DLSN) -> tuple[DLSN, bytes | None] | None:
        """Place and key of the first record before ``end`` that has another key; None if there is none.

        It looks at everything that a truncation there deletes: what is below it in its segment, and all that this
        continues, also where it continues several, of which only one has the key.
        """
        last = self._stretches(self._course(), end)[0]
        before = [_Stretch(stage, 0, self._end_of(stage)) for stage in self._shape.before(end.segment)]
        for stretch in (*before, last):
            if stretch.stage.removed:
                continue
            log = self._logs.of(stretch.stage)
            start = min(log.truncated_at(), stretch.end)
            with suppress(TruncatedError), self._looking_at(stretch.stage):
                for record in log.records(self._reader, start, stretch.end, self._deadline()):
                    if record.key != self._key:
                        return DLSN.of(stretch.stage.segment, record.offset), record.key
        return None

    def _note_read(self, stretch: _Stretch) -> None:
        self._read_to = DLSN.of(stretch.stage.segment, stretch.end), self._logs.of(stretch.stage).read_epoch

    def _epoch_before(self, stretch: _Stretch) -> int:
        """Leader epoch of what was read before a stretch, if reading goes on there."""
        place, epoch = self._read_to or (None, NO_EPOCH)
        is_next = place is not None and place.segment == stretch.stage.segment and place.offset <= stretch.start
        return epoch if is_next else NO_EPOCH

    def _entries(self, stretch: _Stretch, epoch: int = NO_EPOCH) -> Iterator[Entry]:
        log = self._logs.of(stretch.stage)
        with self._looking_at(stretch.stage):
            for record in log.records(self._reader, stretch.start, stretch.end, self._deadline(), epoch):
                if record.key == self._key:
                    yield entry_of(sn_of(record, log.segment, log.base), record.value, record.headers)

    @contextmanager
    def _looking_at(self, stage: Stage) -> Iterator[None]:
        """Others may truncate meanwhile, and the segment be removed: then it is TruncatedError, as before it was."""
        try:
            yield
        except TopicNotFound as fault:
            if not self._shape.is_removed(stage.segment):
                raise
            raise TruncatedError(f"segment {stage.segment} of {self._shape.stream} was removed") from fault
        except LogDivergedError as fault:
            self._read_to = None
            raise TruncatedError(str(fault)) from fault

    def _check_kept(self, stretch: _Stretch) -> None:
        if stretch.stage.removed and stretch.end > stretch.start:
            raise TruncatedError(f"segment {stretch.stage.segment} of {self._shape.stream} was removed")

    def _check_whole(self, stretch: _Stretch) -> None:
        first = self._logs.of(stretch.stage).truncated_at()
        if first > stretch.start:
            segment = stretch.stage.segment
            raise TruncatedError(f"segment {segment} of {self._shape.stream} begins at offset {first} by now")

    def _stretches(self, course: Course, end: DLSN, start: DLSN | None = None) -> list[_Stretch]:
        """The course from ``start``, or its beginning, to ``end``; the newest segment first."""
        found: list[_Stretch] = []
        for stage in course.stages:
            if stage.segment == end.segment:
                found.append(_Stretch(stage, 0, end.offset))
            elif found:
                found.append(_Stretch(stage, 0, self._end_of(stage)))
            if found and start is not None and stage.segment == start.segment:
                if start.offset > found[-1].end and stage.end is None:
                    self._read_to = None
                    raise TruncatedError(f"segment {stage.segment} of {self._shape.stream} ends before {start} by now")
                found[-1] = _Stretch(stage, min(start.offset, found[-1].end), found[-1].end)
                return found
        if not found or start is not None:
            place = start if found and start is not None else end
            if course.is_dropped(place.segment):
                raise TruncatedError(f"segment {place.segment} of {self._shape.stream} was removed, its epoch dropped")
            raise InvalidRequestError(
                f"{start or end} is in no segment of {self._shape.stream} in which this key can stand: was the stream "
                "deleted and created again?"
            )
        return found

    def _course(self) -> Course:
        return self._shape.await_course(self._position, self._deadline())

    def _end_of(self, stage: Stage) -> int:
        if stage.end is not None:
            return stage.end
        return read_end_offset(
            self._cluster,
            self._logs.of(stage).topic,
            0,
            Isolation.READ_UNCOMMITTED,
            retry_timeout_s=self._timeout_s,
            unknown_topic_timeout_s=_UNKNOWN_TOPIC_TIMEOUT_S,
        )

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s
