"""Segment tails: the end of the log that conditions are about, read no more than needed.

Conditions are about the last committed record of a key's segments, the last one with the key, and the last transaction
id that a user gave. :class:`SegmentLog` knows one segment, :class:`StreamLogs` follows a course across segments.

Whatever is reported has been compared with the log after it was asked for: what is read shows by its leader epoch
whether it continues what is known, and where nothing is to be read, :meth:`SegmentLog.confirm` asks.

Each :class:`SegmentLog` has a lock, which threads that share the log hold across fetches; ``StreamLogs._lock`` only
guards the table of logs and is never held across a fetch.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from rollbridge.calls import Deadline
from rollbridge.errors import InvalidRequestError
from rollbridge.kafka.batches import LogRecord, complete_batches, parse_header
from rollbridge.kafka.errors import TopicNotFoundError
from rollbridge.kafka.fetch import NO_EPOCH, LogDivergedError, LogReader, Stretch
from rollbridge.kafka.metadata import Isolation
from rollbridge.model.attribution import RECORD_HEADER, unpack_record_header
from rollbridge.model.conditions import Examined, Seen
from rollbridge.model.ids import SegmentId
from rollbridge.model.lineage import KeyLineage, Stage
from rollbridge.model.names import Partition, is_segment_topic, show_partition
from rollbridge.model.sn import ANY, DLSN, EMPTY, SN, TRANSACTION_ID_HEADER, unpack_transaction_id

logger = logging.getLogger(__name__)

FIRST_STEP: Final = 64
"""Offsets before the end read first in search of the last record; each further step reads eight times as many."""
_STEP_FACTOR: Final = 8
GAP_MAX: Final = 5_000
"""Offsets appended by others beyond which the last record is searched from the end, instead of reading up to it."""
WAIT_MS: Final = 200
"""Time in milliseconds that a broker may hold back the answer to a fetch while there is nothing to return."""
Progress = Callable[[], object]


def _ignore() -> None:
    """Ignore progress."""


class WaitedTooLongError(Exception):
    """Deadline passed while an earlier native transaction of somebody else is still open."""

    def __init__(self, place: Partition, offset: int, wanted: int) -> None:
        super().__init__(f"topic {show_partition(place)} is decided up to offset {offset} only, {wanted} is waited for")
        self.offset = offset


def sn_of(record: LogRecord, segment: SegmentId, base: int) -> SN:
    """Return the SN of a committed record.

    Headers under rollbridge's names that do not parse count as absent, since anybody may write.
    """
    local, transaction_id = 0, None
    for name, value in record.headers:
        if value is None:
            continue
        try:
            if name == RECORD_HEADER:
                local = unpack_record_header(value)[1]
            elif name == TRANSACTION_ID_HEADER:
                transaction_id = unpack_transaction_id(value)
        except InvalidRequestError:
            continue
    return SN(DLSN.of(segment, record.offset, local), transaction_id, base + record.offset)


class SegmentLog:
    """Knowledge of one writer about one segment. Hold ``lock`` while using it.

    Methods take a reader, the offset ``to`` below which they look, and a deadline.
    """

    def __init__(self, place: Partition, segment: SegmentId, base: int) -> None:
        self.place: Final = place
        self.segment: Final = segment
        self.base: Final = base
        self.lock: Final = threading.RLock()
        self._examined: Examined | None = None
        self._truncated_at = 0
        self._own_end: int | None = None
        self.epoch = NO_EPOCH
        """Leader epoch of the last batch of what is known; own batches behind it may have a later one."""
        self.read_epoch = NO_EPOCH
        """Leader epoch of the last batch that :meth:`records` has come to; independent of what is known."""
        self.high_watermark = 0
        """High watermark of the segment at the last read."""
        self.met = 0
        """Number of records read that others appended, and of aborted ones; grows only."""

    @property
    def end(self) -> int | None:
        """Offset below which everything is known; None before the first look."""
        return None if self._examined is None else self._examined.end

    @property
    def marker_expected(self) -> bool:
        """True if what is known ends with an own record, so that its marker stands there, or is about to."""
        return self._own_end is not None and self._own_end == self.end

    def known_last(self, key: bytes | None) -> SN | None:
        """Return the last committed record seen, or the last one with a key; None if there is none."""
        if self._examined is None:
            return None
        return self._examined.last if key is None else self._examined.last_of(key)

    def fetch(self, reader: LogReader, offset: int, *, wait_ms: int = 0, last_epoch: int = NO_EPOCH) -> Stretch:
        """Fetch from an offset on; see :meth:`LogReader.fetch`."""
        topic, number = self.place
        return reader.fetch(topic, offset, wait_ms=wait_ms, partition=number, last_epoch=last_epoch)

    def end_now(self, reader: LogReader) -> int:
        """Return the high watermark of a leader that knows it, unlike the one that comes with a fetch (KIP-207)."""
        return reader.end(self.place[0], partition=self.place[1])

    def confirm(self, reader: LogReader, to: int) -> None:
        """Forget what is known up to ``to`` if it is not in the log any more.

        Asks nobody unless something is known right up to ``to``: what ends before is read on from, which compares it.
        """
        known = self._examined
        if known is None or known.end != to or self.epoch == NO_EPOCH:
            return
        try:
            self.high_watermark = self.fetch(reader, to, last_epoch=self.epoch).high_watermark
        except LogDivergedError as fault:
            self._forget(fault)

    def wrote(self, sns: Sequence[SN], keys: Iterable[bytes | None]) -> None:
        """Record own records, committed at the end of what is known, without reading them.

        Does nothing without a leader epoch: should the log lose its end, nothing would show it.
        """
        known = self._examined
        start = sns[0].dlsn.offset if sns and sns[0].dlsn is not None else None
        if known is not None and known.end == start and self.epoch != NO_EPOCH:
            records = [Seen(start + place, key, sn) for place, (sn, key) in enumerate(zip(sns, keys, strict=True))]
            known.extend(start, start + len(records), records)
            self._own_end = known.end

    def last(self, reader: LogReader, to: int, deadline: Deadline, progress: Progress = _ignore) -> SN:
        """Return the SN of the last committed record below ``to``; EMPTY if there is none, ANY if it was truncated.

        ``progress`` is called whenever more is known, which may be before everything is.

        Raises:
            WaitedTooLongError: something below ``to`` is still undecided.
        """
        known = self._look_back(reader, to, deadline, lambda known: known.last is not None, progress)
        if known.last is None:
            return ANY if self._truncated_at else EMPTY
        return known.last

    def last_id(self, reader: LogReader, to: int, deadline: Deadline) -> int | None:
        """Return the last transaction id that a user gave a committed record below ``to``; None if none is left.

        Searches back once, to the beginning of the log if need be; later ids are known from reading on.

        Raises:
            WaitedTooLongError: something below ``to`` is still undecided.
        """
        return self._look_back(reader, to, deadline, lambda known: known.last_id is not None).last_id

    def last_of(self, reader: LogReader, key: bytes, since: int, to: int, deadline: Deadline) -> SN | None:
        """Return the SN of the last committed record with ``key`` in ``since..to-1``; None if there is none.

        Raises:
            WaitedTooLongError: something below ``to`` is still undecided.
        """
        known = self._examine(reader, min(since, to), to, deadline)
        found = known.last_of(key)
        if found is None and since < known.keys_from:
            for part in self._read(reader, since, known.keys_from, deadline):
                for seen in self._seen(part):
                    if seen.key == key:
                        found = seen.sn
        return found

    def truncated_at(self) -> int:
        """Return the offset at which the log begins, as far as was seen."""
        return self._truncated_at

    def records(
        self, reader: LogReader, since: int, to: int, deadline: Deadline, epoch: int = NO_EPOCH
    ) -> Iterator[LogRecord]:
        """Yield the committed records in ``since..to-1``; afterwards :attr:`read_epoch` is that of the last batch.

        Raises:
            LogDivergedError: what was read before ``since``, last under leader epoch ``epoch``, is not there any more.
        """
        self.read_epoch = epoch
        for part in self._read(reader, since, to, deadline, epoch):
            if part.epoch != NO_EPOCH:
                self.read_epoch = part.epoch
            yield from part.records

    def is_compacted(self, reader: LogReader, since: int, to: int) -> bool:
        """Return whether records are missing in ``since..to-1``, where everything is decided.

        Only adopted topics may be compacted: our own keep each offset, behind the beginning of the log.
        """
        topic, number = self.place
        if is_segment_topic(topic):
            return False
        place = since
        while place < to:
            raw = reader.fetch_raw(topic, place, partition=number, isolation=Isolation.READ_UNCOMMITTED)
            if raw.start > place:
                return True
            before = place
            for batch in complete_batches(raw.batches):
                header = parse_header(batch)
                if header.base_offset > place or header.record_count != header.last_offset_delta + 1:
                    return True
                place = max(place, header.base_offset + header.last_offset_delta + 1)
                if place >= to:
                    break
            if place == before:
                return True  # the log ends here, so it has lost what was read of it
        return False

    def _look_back(
        self,
        reader: LogReader,
        to: int,
        deadline: Deadline,
        found: Callable[[Examined], bool],
        progress: Progress = _ignore,
    ) -> Examined:
        """Read backwards from ``to`` until what is searched for is found or the beginning of the log is reached."""
        known = self._examine(reader, max(0, to - FIRST_STEP), to, deadline, progress, GAP_MAX)
        step = FIRST_STEP
        while not found(known) and known.last_from > self._truncated_at:
            step *= _STEP_FACTOR
            start = max(self._truncated_at, known.last_from - step)
            stretch = [
                seen for part in self._read(reader, start, known.last_from, deadline) for seen in self._seen(part)
            ]
            known.prepend(max(start, self._truncated_at), stretch)
        return known

    def _examine(
        self,
        reader: LogReader,
        start: int,
        to: int,
        deadline: Deadline,
        progress: Progress = _ignore,
        gap_max: float = math.inf,
    ) -> Examined:
        """Read on to ``to`` from what is known; from ``start`` if nothing is known, or what is known ends too far back.

        Also begins at ``start`` where the log was cut off before the end of what is known, or has grown again since
        then.
        """
        known = self._examined
        if known is not None and 0 <= to - known.end <= gap_max:
            try:
                self._catch_up(known, reader, to, deadline, progress, self.epoch)
            except LogDivergedError as fault:
                self._forget(fault)
            else:
                return known
        self._examined = known = Examined(start)
        self._own_end, self.epoch = None, NO_EPOCH
        self._catch_up(known, reader, to, deadline, progress, NO_EPOCH)
        return known

    def _forget(self, why: LogDivergedError) -> None:
        logger.warning("what was known of a segment is forgotten: %s", why)
        self._examined = self._own_end = None
        self.epoch = NO_EPOCH

    def _catch_up(
        self, known: Examined, reader: LogReader, to: int, deadline: Deadline, progress: Progress, epoch: int
    ) -> None:
        if known.end >= to:
            return
        for part in self._read(reader, known.end, to, deadline, epoch):
            self.met += len(part.records) + part.aborted
            known.extend(part.start, part.end, self._seen(part))
            if part.epoch != NO_EPOCH:
                self.epoch = part.epoch
            progress()

    def _read(
        self, reader: LogReader, start: int, to: int, deadline: Deadline, epoch: int = NO_EPOCH
    ) -> Iterator[Stretch]:
        """Yield what stands in ``start..to-1`` part by part, waiting for what is undecided.

        Raises:
            LogDivergedError: what was known before, last under leader epoch ``epoch``, is not there any more.
        """
        position = start
        while position < to:
            part = self.fetch(reader, position, wait_ms=WAIT_MS, last_epoch=epoch)
            self.high_watermark = part.high_watermark
            if part.start > position:
                self._truncated_at = max(self._truncated_at, part.start)
            if part.end == position and deadline.passed():
                raise WaitedTooLongError(self.place, position, to)
            position = part.end
            if epoch != NO_EPOCH and part.epoch != NO_EPOCH:
                epoch = part.epoch  # the epoch before ended where this batch stands, or earlier
            if part.end > to:
                part = part._replace(end=to, records=[record for record in part.records if record.offset < to])
            yield part

    def _seen(self, part: Stretch) -> list[Seen]:
        return [Seen(record.offset, record.key, sn_of(record, self.segment, self.base)) for record in part.records]


# The tails of a key's segments


class StreamLogs:
    """Knowledge of one writer about the segments of a stream. Safe to use from several threads."""

    def __init__(self, place: Callable[[SegmentId], Partition]) -> None:
        """Start without knowledge; ``place`` says which partition a segment is."""
        self._place = place
        self._logs: dict[int, SegmentLog] = {}
        self._removed: set[int] = set()
        self._lock = threading.Lock()

    def of(self, stage: Stage) -> SegmentLog:
        """Return the log of a segment."""
        with self._lock:
            found = self._logs.get(int(stage.segment))
            if found is None:
                found = SegmentLog(self._place(stage.segment), stage.segment, stage.base)
                self._logs[int(stage.segment)] = found
            return found

    def active(self, course: KeyLineage) -> SegmentLog:
        """Return the log of the active segment of a course."""
        return self.of(Stage(course.active, course.active_base, None))

    def last(
        self, course: KeyLineage, reader: LogReader, to: int, deadline: Deadline, progress: Progress = lambda: None
    ) -> SN:
        """Return the SN of the last committed record of a course before offset ``to`` of its active segment.

        EMPTY if there is none, ANY if it was truncated. ``progress`` is called as :meth:`SegmentLog.last` does.

        Raises:
            WaitedTooLongError: something before is still undecided.
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

    def last_id(self, course: KeyLineage, reader: LogReader, to: int, deadline: Deadline) -> int | None:
        """Return the last transaction id that a user gave a committed record of a course before offset ``to``.

        None if there is none, or if all were truncated.

        Raises:
            WaitedTooLongError: something before is still undecided.
        """
        for stage in course.stages:
            if self._is_removed(stage):
                continue
            log = self.of(stage)
            try:
                with log.lock:
                    found = log.last_id(reader, to if stage.segment == course.active else stage.end or 0, deadline)
            except TopicNotFoundError as fault:
                self._note_removed(stage, course, fault)
                continue
            if found is not None:
                return found
        return None

    def last_of(
        self, course: KeyLineage, reader: LogReader, key: bytes, place: int | None, to: int, deadline: Deadline
    ) -> SN:
        """Return the SN of the last committed record with ``key`` before offset ``to`` of the active segment.

        EMPTY if there is none, ANY if it may have been truncated.

        Args:
            course: The course of the key.
            reader: Reader to read on with.
            key: The key.
            place: Sequence id up to and including which nothing is searched; None searches the whole course.
            to: Offset in the active segment, exclusive.
            deadline: Deadline for what stands before to be decided.

        Raises:
            WaitedTooLongError: something before is still undecided.
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

    def _last_before(self, stage: Stage, course: KeyLineage, reader: LogReader, deadline: Deadline) -> SN:
        """Return the last record of a sealed segment; ANY if it may have been truncated."""
        if not self._is_removed(stage):
            log = self.of(stage)
            try:
                with log.lock:
                    return log.last(reader, stage.end or 0, deadline)
            except TopicNotFoundError as fault:
                self._note_removed(stage, course, fault)
        return ANY if stage.end else EMPTY

    def _key_last(
        self, stage: Stage, course: KeyLineage, reader: LogReader, key: bytes, since: int, end: int, deadline: Deadline
    ) -> tuple[SN | None, bool]:
        """Return a key's last record in a segment from an offset on, and True if records there were truncated."""
        if not self._is_removed(stage):
            log = self.of(stage)
            try:
                with log.lock:
                    return log.last_of(reader, key, since, end, deadline), log.truncated_at() > since
            except TopicNotFoundError as fault:
                self._note_removed(stage, course, fault)
        return None, since < end

    def _is_removed(self, stage: Stage) -> bool:
        """Return True if a segment is known to be gone: by the history, or because its topic was missing before."""
        return stage.removed or int(stage.segment) in self._removed

    def _note_removed(self, stage: Stage, course: KeyLineage, fault: TopicNotFoundError) -> None:
        """Remember that a segment was removed after the epochs were read; raise the fault if it is the active one."""
        if stage.segment == course.active:
            raise fault
        self._removed.add(int(stage.segment))
