"""Housekeeping of a leader: the work done last, the work due, and where logs begin. Pure.

**Retention.** Writers choose the timestamps of their records, so these do not measure age. Instead the leader records
now and then where the active segments end, with the time and the bytes written to the stream so far. Each such *mark*
bounds the age of the records before it. A stream is truncated at a mark. So at least what the limits say is kept, and
at most about a fiftieth more, or as much as is written between two marks.

**Late records.** A record may arrive behind a sealed end (:mod:`rollbridge.kafka.seal` says how), soon or hardly ever.
So the leader checks behind each sealed segment at growing intervals, for longer than a request or a native transaction
can live.

Source: Pravega's retention set (``RetentionSet``, "Pravega Stream Retention").
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from rollbridge.base.ids import SegmentId
from rollbridge.commitlog.outcomes import MARKS_PER_LIMIT, LogMark, gap_ms
from rollbridge.metadata.records import Mark, RetentionMarks
from rollbridge.stream.config import FOREVER, Retention
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.names import Partition
from rollbridge_coordinator.core.waits import RetryAfter


@dataclass(slots=True)
class Housekeeping:
    """State of one leader's housekeeping; a new leader begins with an empty one, at no loss.

    Attributes:
        starts: Start offsets of buffer partitions, as far as known.
        done_ms: Time at which each kind of work was last done, by name.
        rests: Back-offs of work refused and not done since.
        unmended: Segments that may have Kafka's limits of timestamps; None until a leader begins to look.
    """

    starts: dict[Partition, int] = field(default_factory=dict)
    done_ms: dict[str, int] = field(default_factory=dict)
    rests: dict[str, RetryAfter] = field(default_factory=dict)
    unmended: list[tuple[str, SegmentId]] | None = None

    def is_due(self, work: str, now_ms: int, every_ms: int, *, at_once: bool = True) -> bool:
        """Return True if ``every_ms`` have passed since this work was last done; then it counts as done now.

        True also if the clock was set back. Work that a new leader does not do ``at_once`` counts as done when it is
        first asked for.
        """
        done_ms = self.done_ms.setdefault(work, now_ms) if not at_once else self.done_ms.get(work)
        if done_ms is not None and 0 <= now_ms - done_ms < every_ms:
            return False
        self.done_ms[work] = now_ms
        return True

    def is_resting(self, work: str, now_ms: int) -> bool:
        return work in self.rests and not self.rests[work].is_over(now_ms)

    def rest(self, work: str, now_ms: int) -> int:
        """Postpone refused work; return for how many ms."""
        self.rests[work] = RetryAfter.after(self.rests.get(work), now_ms)
        return self.rests[work].length_ms

    def rested(self, work: str) -> None:
        self.rests.pop(work, None)


# Retention


PLACES_MAX: Final = 5_000
"""Offsets in the marks of one limit; a ZooKeeper node holds 1 MiB."""


@dataclass(slots=True)
class ByteCounter:
    """Counter of the bytes written to a stream, from the sizes of its segments at each look.

    A new leader continues from the last mark. Bytes written between that and its first look are not counted, so more is
    kept for a while than required.
    """

    written: int | None = None
    epoch: int = -1
    sizes: dict[SegmentId, int] = field(default_factory=dict)

    def wanted(self, history: EpochHistory) -> list[SegmentId]:
        """Return the segments that may have grown since the last look, for :meth:`count`."""
        active = history.active.segment_ids
        return [
            item
            for item in history.stored()
            if item in active or item in self.sizes or (self.written is not None and item.epoch > self.epoch)
        ]

    def count(self, history: EpochHistory, sizes: Mapping[SegmentId, int], marks: Sequence[Mark]) -> int:
        """Add the growth since the last sizes, in bytes; return the total written so far."""
        if self.written is None:
            self.written = marks[-1].written if marks else sum(sizes.values())
        else:
            self.written += sum(max(size - self.sizes.get(item, 0), 0) for item, size in sizes.items())
        active = history.active.segment_ids
        known = self.sizes | dict(sizes)
        self.sizes = {item: size for item, size in known.items() if item in active}
        self.epoch = history.active.epoch
        return self.written


def is_mark_due(
    marks: Sequence[Mark], now_ms: int, written: int, cut: Mapping[SegmentId, int], policy: Retention
) -> bool:
    """Return True if the leader should record now that the active segments end at ``cut``."""
    if not marks:
        return True
    last = marks[-1]
    if dict(last.cut) == dict(cut):
        return False  # what ended there then ends there still
    share = max(1, min(MARKS_PER_LIMIT, PLACES_MAX // len(cut)))
    return (policy.ms != FOREVER and (now_ms - last.ms) * share >= policy.ms) or (
        policy.bytes != FOREVER and (written - last.written) * share >= policy.bytes
    )


def marks_within(history: EpochHistory, marks: Iterable[Mark]) -> list[Mark]:
    """Return the marks whose segments are all in the history; nothing before the others is left to truncate."""
    known = history.segments().keys()
    return [mark for mark in marks if mark.cut.keys() <= known]


def marks_that_fit(marks: Sequence[Mark], bytes_max: int) -> list[Mark]:
    """Return as many marks as fit into a node of so many bytes; with fewer, slightly more is kept."""
    kept = list(marks)
    while kept and len(RetentionMarks(tuple(kept)).to_json()) > bytes_max:
        del kept[-2::-2]
        if len(kept) == 1:
            break
    return kept


def place_to_truncate(marks: Sequence[Mark | LogMark], now_ms: int, written: int, policy: Retention) -> int | None:
    """Return the index of the latest mark before which everything may go; None if there is none."""
    for place in range(len(marks) - 1, -1, -1):
        mark = marks[place]
        if (policy.ms != FOREVER and now_ms - mark.ms >= policy.ms) or (
            policy.bytes != FOREVER and written - mark.written >= policy.bytes
        ):
            return place
    return None


# Retention of a commit log


@dataclass(slots=True)
class CommitLog:
    """Retention state of a group's commit log, as its leader knows it.

    Attributes:
        listed_in: Topics in which the takeover found a record of ended transactions.
        doubtful: Transactions with records in ZooKeeper at a takeover that found a part of the log deleted by others.
        retention: Retention of its records; None: the coordinator's setting.
        marks: Its ends at some times, oldest first, as ZooKeeper has them.
        written: Bytes written to it; None if unknown.
        size: Its bytes on disk at the last look.
        now_ms: Lower bound of the time of the last look; 0 before.
    """

    topic_id: str = ""
    listed_in: set[str] = field(default_factory=set)
    doubtful: frozenset[bytes] = frozenset()
    retention: Retention | None = None
    marks: list[LogMark] = field(default_factory=list)
    written: int | None = None
    size: int = 0
    now_ms: int = 0

    def count(self, size: int) -> int:
        """Add the growth since the last size, in bytes; return the total written so far, as :class:`ByteCounter`."""
        if self.written is None:
            self.written = self.marks[-1].written if self.marks else size
        else:
            self.written += max(size - self.size, 0)
        self.size = size
        return self.written

    def is_mark_due(self, mark: LogMark, policy: Retention, kept_ms: int) -> bool:
        """Return True if a mark should be recorded; the counters in marks are needed for ``kept_ms``."""
        if not self.marks:
            return True
        last = self.marks[-1]
        limits = [kept_ms] if policy.ms == FOREVER else [kept_ms, policy.ms]
        return last.offset != mark.offset and (
            mark.ms - last.ms >= gap_ms(limits)
            or (policy.bytes != FOREVER and (mark.written - last.written) * MARKS_PER_LIMIT >= policy.bytes)
        )


# Late records


FIRST_MS: Final = 1_000
GAP_MAX_MS: Final = 60_000
_SPARE: Final = 10
AT_ONCE: Final = 200
"""Segments checked in one turn; one request for each broker that leads some of them."""

Watched = tuple[str, SegmentId]
"""``scope/stream`` and segment."""


@dataclass(slots=True)
class _Course:
    due_ms: int
    until_ms: int
    gap_ms: int


@dataclass(slots=True)
class LateWatch:
    """Sealed segments that are checked for late records.

    Attributes:
        watch_ms: Time from a segment's seal during which it is checked.
        known: Newest epoch of each stream whose ended segments are watched.
    """

    watch_ms: int
    known: dict[str, int] = field(default_factory=dict)
    _courses: dict[Watched, _Course] = field(default_factory=dict)
    _deferred_ms: dict[str, int] = field(default_factory=dict)

    def take_up(self, stream: str, history: EpochHistory, now_ms: int, earliest_ms: int | None = None) -> None:
        """Watch the segments that ended with epochs made since the last time.

        A new leader watches those of the last epoch, and of all epochs planned recently: sealing follows later, and
        clocks differ. An epoch planned after another is no older, whatever its time stamp says. ``earliest_ms`` is the
        lowest of the times that the clocks show; None: ``now_ms``.
        """
        judged_ms = now_ms if earliest_ms is None else earliest_ms
        judged_ms = min(judged_ms, self._deferred_ms.pop(stream, judged_ms))
        since = self.known.get(stream)
        if since == history.active.epoch:
            return
        records = history.records[1:]
        if since is None:
            planned_ms = list(accumulate((record.created_ms for record in records), max))
            old = bisect_left(planned_ms, judged_ms - self.watch_ms * _SPARE)
            fresh = records[min(old, len(records) - 1) :]
        else:
            fresh = tuple(record for record in records if record.epoch > since)
        for record in fresh:
            for segment in record.sealed_ends or ():
                self.add((stream, segment), now_ms)
        self.known[stream] = history.active.epoch

    def add(self, item: Watched, now_ms: int) -> None:
        """Watch a segment from now on, unless it is watched already."""
        if item not in self._courses:
            self._courses[item] = _Course(now_ms, now_ms + self.watch_ms, FIRST_MS // 2)

    def defer(self, stream: str, since_ms: int) -> None:
        """Note that a stream cannot be taken up: what was recent when that began has to be watched afterwards."""
        self._deferred_ms[stream] = min(since_ms, self._deferred_ms.get(stream, since_ms))

    def due(self, now_ms: int) -> Sequence[Watched]:
        """Return the segments to check now, the longest overdue first."""
        found = [(course.due_ms, item) for item, course in self._courses.items() if course.due_ms <= now_ms]
        return [item for _, item in sorted(found)[:AT_ONCE]]

    def looked(self, items: Iterable[Watched], now_ms: int) -> None:
        """Note that these were checked; the last check is after ``watch_ms``."""
        for item in items:
            course = self._courses.get(item)
            if course is None:
                continue  # forgotten meanwhile
            if now_ms >= course.until_ms:
                del self._courses[item]
                continue
            course.gap_ms = min(course.gap_ms * 2, GAP_MAX_MS)
            course.due_ms = min(now_ms + course.gap_ms, max(course.until_ms, now_ms + 1))

    def postpone(self, items: Iterable[Watched], now_ms: int) -> None:
        """Check these again soon, as brokers did not answer."""
        for item in items:
            self._courses[item].due_ms = now_ms + FIRST_MS

    def rest(self, item: Watched, now_ms: int) -> None:
        """Check a segment again after ever longer pauses, as brokers refuse."""
        course = self._courses[item]
        course.gap_ms = min(course.gap_ms * 2, GAP_MAX_MS)
        course.due_ms = now_ms + course.gap_ms

    def is_long_over(self, item: Watched, now_ms: int) -> bool:
        """Return True if a segment was to be checked no longer for as long as it is watched."""
        return now_ms >= self._courses[item].until_ms + self.watch_ms

    def forget(self, items: Iterable[Watched]) -> None:
        for item in items:
            self._courses.pop(item, None)

    @property
    def is_idle(self) -> bool:
        return not self._courses
