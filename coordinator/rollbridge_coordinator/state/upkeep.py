"""Housekeeping of a leader: what was done last, what is due, and where logs begin since. Pure.

**Retention.** Writers choose the timestamps of their records, so these are no measure of age. Instead the leader notes
now and then where the active segments end, with the time and with how much had been written to the stream. Each such
*mark* bounds the age of the records before it. A stream is truncated at a mark, so at least what the limits say is
kept, and at most about a fiftieth more, or as much as is written between two marks.

**Late records.** A record may arrive behind a sealed end (:mod:`rollbridge.kafka.seal` says how), soon or hardly ever.
So the leader looks behind each sealed segment at growing intervals, for longer than a request or a native transaction
can live.

Source: Pravega's retention set (``RetentionSet``, "Pravega Stream Retention").
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, Self

from rollbridge.model.ended import MARKS_PER_LIMIT, LogMark, gap_ms
from rollbridge.model.epochs import EpochHistory
from rollbridge.model.ids import SegmentId
from rollbridge.model.names import Partition
from rollbridge.model.records import FOREVER, Mark, Retention, RetentionMarks

REST_FIRST_MS: Final = 1_000
REST_MAX_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class Rest:
    """What was refused is left alone for a while, each time for twice as long as the last time.

    Attributes:
        length_ms, until_ms: How long, and until when.
        times: Which time this is.
    """

    length_ms: int
    until_ms: int
    times: int = 1

    @classmethod
    def after(cls, last: Rest | None, now_ms: int) -> Self:
        """Return the rest that follows the last one, if there was one."""
        if last is None:
            return cls(REST_FIRST_MS, now_ms + REST_FIRST_MS)
        length_ms = min(2 * last.length_ms, REST_MAX_MS)
        return cls(length_ms, now_ms + length_ms, last.times + 1)

    def is_over(self, now_ms: int) -> bool:
        """Return True if it is to be tried again, which it is too if the clock was set back."""
        return not self.until_ms - self.length_ms <= now_ms < self.until_ms


@dataclass(slots=True)
class Housekeeping:
    """State of one leader's housekeeping; a new leader begins with an empty one and loses nothing by that.

    Attributes:
        starts: Where buffer partitions are known to begin.
        done_ms: When each kind of work was done last, by name.
        rests: What was refused and has not been done since.
    """

    starts: dict[Partition, int] = field(default_factory=dict)
    done_ms: dict[str, int] = field(default_factory=dict)
    rests: dict[str, Rest] = field(default_factory=dict)

    def is_due(self, work: str, now_ms: int, every_ms: int, *, at_once: bool = True) -> bool:
        """Return True if ``every_ms`` have passed since this work was done last; then it counts as done now.

        A clock that was set back makes it due as well. What a new leader does not do ``at_once`` counts as done when it
        is first asked for.
        """
        done_ms = self.done_ms.setdefault(work, now_ms) if not at_once else self.done_ms.get(work)
        if done_ms is not None and 0 <= now_ms - done_ms < every_ms:
            return False
        self.done_ms[work] = now_ms
        return True

    def is_resting(self, work: str, now_ms: int) -> bool:
        """Return True if this work was refused a while ago and is left alone."""
        return work in self.rests and not self.rests[work].is_over(now_ms)

    def rest(self, work: str, now_ms: int) -> int:
        """Leave refused work alone for a while; return for how many ms."""
        self.rests[work] = Rest.after(self.rests.get(work), now_ms)
        return self.rests[work].length_ms

    def rested(self, work: str) -> None:
        """Note that this work was done."""
        self.rests.pop(work, None)


# Retention


PLACES_MAX: Final = 5_000
"""Offsets in the marks of one limit; a ZooKeeper node holds 1 MiB."""


@dataclass(slots=True)
class ByteCounter:
    """How much has been written to a stream, told from the sizes of its segments at each look.

    A new leader goes on from the last mark; what was written between that and its first look is not counted, so more
    is kept for a while than has to be.
    """

    written: int | None = None
    epoch: int = -1
    sizes: dict[SegmentId, int] = field(default_factory=dict)

    def wanted(self, history: EpochHistory) -> list[SegmentId]:
        """Return the segments that may have grown since the last look; :meth:`count` wants their sizes."""
        active = history.active.segment_ids
        return [
            item
            for item in history.stored()
            if item in active or item in self.sizes or (self.written is not None and item.epoch > self.epoch)
        ]

    def count(self, history: EpochHistory, sizes: Mapping[SegmentId, int], marks: Sequence[Mark]) -> int:
        """Take note of sizes in bytes; gives how much has been written so far."""
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
    """Return True if the leader should note now that the active segments end at ``cut``."""
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
    """Return the marks whose segments are all in the history; before the others nothing is left to truncate."""
    known = history.segments().keys()
    return [mark for mark in marks if mark.cut.keys() <= known]


def marks_that_fit(marks: Sequence[Mark], bytes_max: int) -> list[Mark]:
    """Return as many of the marks as fit into a node of so many bytes; with fewer, a little more is kept."""
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
    """What a leader knows of the retention of its group's commit log.

    Attributes:
        topic_id: Kafka's id of the log.
        listed_in: Topics in which a record of ended transactions was found at the takeover.
        doubtful: Transactions with records in ZooKeeper at a takeover that has met a part of the log deleted by others.
        retention: How long its records are kept; None is as long as the coordinator says.
        marks: How far it had come at some times, oldest first; as they stand in ZooKeeper.
        written: How many bytes have been written to it; None if that has not been looked at.
        size: How many it had on disk at the last look.
        now_ms: The earliest time that it may have been at the last look; 0 before.
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
        """Take note of its size on disk; gives how many bytes have been written so far, as :class:`ByteCounter`."""
        if self.written is None:
            self.written = self.marks[-1].written if self.marks else size
        else:
            self.written += max(size - self.size, 0)
        self.size = size
        return self.written

    def is_mark_due(self, mark: LogMark, policy: Retention, kept_ms: int) -> bool:
        """Return True if a mark should be noted; ``kept_ms`` is how long marks are needed for the counters in them."""
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

        A new leader takes up the last, and all whose epochs were planned not too long ago: sealing takes its time after
        that, and clocks differ. One that was planned behind another is no older, whatever a wrong clock has stamped.
        ``earliest_ms`` is the lowest of the times that they show; None: it is ``now_ms``.
        """
        judged_ms = now_ms if earliest_ms is None else earliest_ms
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
                course = _Course(now_ms, now_ms + self.watch_ms, FIRST_MS // 2)
                self._courses.setdefault((stream, segment), course)
        self.known[stream] = history.active.epoch

    def due(self, now_ms: int) -> Sequence[Watched]:
        """Return the segments to look behind now, the longest overdue first."""
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
