"""Segment tails: the last records of a key's segments, with as few reads as possible.

Conditional writers, the leader's conditions and synchronizers share this view. Conditions are about the last committed
record of a key's segments, the last one with the key, and the last transaction id of a user.

:class:`SegmentTail` knows one segment, :class:`LineageTails` follows a key lineage across segments. Both are pure: a
question is a procedure (:mod:`rollbridge.base.effects`) whose effects are reads. :func:`ask` answers with a
:class:`LogReader`; simulations answer from a log of their own. None of it is thread-safe.

Every answer was compared with the log after the question: the leader epoch of a read shows whether it continues the
known records, and where nothing is to be read, :meth:`SegmentTail.confirm` asks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from rollbridge.base.attribution import own_header, unpack_record_header
from rollbridge.base.deadlines import Deadline
from rollbridge.base.effects import AnyEffect, Effect, Steps, run
from rollbridge.base.errors import PortableError
from rollbridge.base.ids import SegmentId
from rollbridge.base.sn import (
    ANY,
    DLSN,
    EMPTY,
    OPERATION_HEADER,
    SN,
    TRANSACTION_ID_HEADER,
    Token,
    unpack_transaction_id,
)
from rollbridge.errors import InvalidRequestError, TruncatedError
from rollbridge.kafka.errors import TopicNotFoundError
from rollbridge.kafka.fetch import LogDivergedError, LogReader, Stretch
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.records import FetchedBatches, LogRecord
from rollbridge.stream.conditions import place_of
from rollbridge.stream.group_offsets import NO_EPOCH
from rollbridge.stream.names import Partition, is_segment_topic, show_partition
from rollbridge.stream.reading import KeyLineage, Stage

logger = logging.getLogger(__name__)

FIRST_STEP: Final = 64
"""Offsets before the end read first in search of the last record; each further step reads eight times as many."""
STEP_FACTOR: Final = 8
GAP_MAX: Final = 5_000
"""Offsets appended by others beyond which the last record is searched from the end, instead of reading up to it."""
WAIT_MS: Final = 200
"""Time in milliseconds that a broker may hold back the answer to a fetch while there is nothing to return."""
_ANSWER_S: Final = 1.0
"""Time left before a deadline below which no answer is waited for; a quarter of the whole time if that is shorter."""
RUN_MAX: Final = 1_000_000
"""More than the records of any batch."""
KEYS_MAX: Final = 50_000
"""Most keys that are remembered of one segment; beyond it, they are collected again."""


# What a question asks for


@dataclass(frozen=True, slots=True)
class Read(Effect[Stretch]):
    """Read the decided stretch from ``offset`` on; see :meth:`LogReader.fetch`.

    The broker is waited for until something is there; ``to`` is how far the question has to read.
    """

    place: Partition
    offset: int
    to: int
    epoch: int = NO_EPOCH


@dataclass(frozen=True, slots=True)
class EndOf(Effect[int]):
    """Read the end of a partition, of a leader that knows it, unlike a fetch's (KIP-207)."""

    place: Partition


@dataclass(frozen=True, slots=True)
class Missing(Effect[bool]):
    """Look whether offsets are missing in ``offset..to-1``, where everything is decided."""

    place: Partition
    offset: int
    to: int


T = TypeVar("T")


class WaitedTooLongError(PortableError):
    """Raised if the deadline passes while an earlier native transaction of another producer is open."""

    def __init__(self, place: Partition, offset: int, wanted: int) -> None:
        super().__init__(f"topic {show_partition(place)} is decided up to offset {offset} only, {wanted} is waited for")
        self.offset = offset


def ask(question: Steps[T], reader: LogReader, deadline: Deadline) -> T:
    """Answer a question by reading; raise what it raises.

    Raises:
        WaitedTooLongError: something that it has to read is still undecided.
        TopicNotFoundError, NotAuthorizedError, KafkaUnavailableError, CorruptDataError
    """
    return run(question, lambda effect: answer_of(effect, reader, deadline))


def answer_of(effect: AnyEffect, reader: LogReader, deadline: Deadline) -> Stretch | int:
    """Ask a broker what a question needs; raise as :func:`ask` does."""
    match effect:
        case EndOf((topic, number)):
            return reader.end(topic, partition=number)
        case Missing():
            return _is_missing(effect, reader)
        case Read((topic, number) as place, offset, to, epoch):
            # The answer is to arrive before the deadline, which would cut the request off without a word on what it
            # waits for.
            left_ms = (deadline.left() - min(_ANSWER_S, deadline.timeout_s / 4)) * 1000
            wait_ms = int(min(WAIT_MS, max(left_ms, 0))) if offset < to else 0
            part = reader.fetch(topic, offset, wait_ms=wait_ms, partition=number, last_epoch=epoch)
            if part.end == offset < to and left_ms <= wait_ms:
                raise WaitedTooLongError(place, offset, to)
            return part
        case _:
            raise AssertionError(f"{effect} is nothing to be read")


def _is_missing(need: Missing, reader: LogReader) -> bool:
    (topic, number), place, to = need.place, need.offset, need.to
    while place < to:
        raw = reader.fetch_raw(topic, place, partition=number, isolation=Isolation.READ_UNCOMMITTED)
        if raw.start > place:
            return True
        before = place
        for header, _ in FetchedBatches(raw.batches):
            if header.base_offset > place or header.record_count != header.last_offset_delta + 1:
                return True
            place = max(place, header.base_offset + header.last_offset_delta + 1)
            if place >= to:
                break
        if place == before:
            return True  # the log ends here, so it has lost what was read of it
    return False


# What is known


class Seen(NamedTuple):
    """A committed record, as far as conditions look at it."""

    offset: int
    key: bytes | None
    sn: SN


class Examined:
    """A growing window of one segment, so that no offset is read twice.

    Attributes:
        keys_from: From here to ``end``, the last record of each key is known.
        end: Every offset below it is decided.
        last: The last committed record below ``end``; None if there is none at or after ``last_from``.
        last_id: The last transaction id that a user gave a record below ``end``; None if there is none since
            ``last_from``.
        last_from: Where looking for ``last`` and ``last_id`` began.
    """

    def __init__(self, start: int, keys_max: int = KEYS_MAX) -> None:
        self.keys_from = self.last_from = self.end = start
        self.last: SN | None = None
        self.last_id: int | None = None
        self._keys: dict[bytes, SN] = {}
        self._keys_max = keys_max

    def extend(self, start: int, end: int, records: Iterable[Seen]) -> None:
        """Record the contents of ``start..end-1``; ``start`` may only leave a gap that was truncated away.

        Records in a gap are unknown, so nothing known from before it is a last record any more.
        """
        if start > self.end:
            self.last = self.last_id = None
            self._keys.clear()
            self.keys_from = self.last_from = start
        for _, key, sn in records:
            self.last = sn
            if sn.transaction_id is not None:
                self.last_id = sn.transaction_id
            if key is not None:
                self._keys[key] = sn
        self.end = max(end, self.end)
        if len(self._keys) > self._keys_max:
            self._keys.clear()
            self.keys_from = self.end

    def prepend(self, start: int, records: Sequence[Seen]) -> None:
        """Record the contents before the window, from ``start`` on, without a gap."""
        older = Examined(start, len(records))
        older.extend(start, start, records)
        if self.last is None:
            self.last = older.last
        if self.last_id is None:
            self.last_id = older.last_id
        if self.last_from == self.keys_from and len(older._keys) + len(self._keys) <= self._keys_max:
            self._keys = older._keys | self._keys
            self.keys_from = start
        self.last_from = start

    def last_of(self, key: bytes) -> SN | None:
        """Return SN of the last record with a key between ``keys_from`` and ``end``."""
        return self._keys.get(key)


def sn_of(record: LogRecord, segment: SegmentId, base: int) -> SN:
    """Return the SN of a committed record.

    Headers under rollbridge's names that do not parse count as absent, since anybody may write.
    """
    local, transaction_id = 0, None
    own = own_header(record.headers)
    if own is not None:
        with suppress(InvalidRequestError):
            local = unpack_record_header(own)[1]
    for name, value in record.headers:
        if name == TRANSACTION_ID_HEADER and value is not None:
            with suppress(InvalidRequestError):
                transaction_id = unpack_transaction_id(value)
    return SN(DLSN.of(segment, record.offset, local), transaction_id, base + record.offset)


class SegmentTail:
    """Knowledge about one segment; ``to`` is the offset below which a question looks.

    Attributes:
        epoch: Leader epoch of the last batch of what is known; own batches behind it may have a later one.
        read_epoch: Leader epoch of the last batch that :meth:`records` has come to; independent of what is known.
        high_watermark: High watermark of the segment at the last read.
        truncated_at: Offset at which the log begins, as far as was seen.
        met: Number of records read that others appended, and of aborted ones; grows only.
    """

    def __init__(self, place: Partition, segment: SegmentId, base: int) -> None:
        self.place: Final = place
        self.segment: Final = segment
        self.base: Final = base
        self._known: Examined | None = None
        self._own: list[Seen] = []
        """Own records at the end of what is known, which were not read."""
        self.epoch = self.read_epoch = NO_EPOCH
        self.high_watermark = self.truncated_at = self.met = 0

    @property
    def end(self) -> int | None:
        """Offset below which everything is known; None before the first look."""
        return None if self._known is None else self._known.end

    @property
    def awaited_marker(self) -> Read | None:
        """Return the read of the marker after the last own record; None if that record is not the end."""
        if not self._own or self.end is None:
            return None
        return Read(self.place, self.end, self.end + 1, self.epoch)

    def known_last(self, key: bytes | None) -> SN | None:
        """Return the last committed record seen, or the last one with a key; None if there is none."""
        if self._known is None:
            return None
        return self._known.last if key is None else self._known.last_of(key)

    def confirm(self, to: int) -> Steps[None]:
        """Forget what is known up to ``to`` if it is not in the log any more.

        Asks the log only if the known records reach ``to``: otherwise the next read compares them.
        """
        while self._known is not None and self._known.end == to and self.epoch != NO_EPOCH:
            try:
                yield from self.part(to, to, self.epoch)
                return
            except LogDivergedError as fault:
                yield from self._compare(fault)

    def wrote(self, sns: Sequence[SN], keys: Iterable[bytes | None]) -> None:
        """Record own records, committed at the end of what is known, without reading them.

        Does nothing without a leader epoch: should the log lose its end, nothing would show it.
        """
        known = self._known
        start = sns[0].dlsn.offset if sns and sns[0].dlsn is not None else None
        if known is not None and known.end == start and self.epoch != NO_EPOCH:
            seen = [Seen(start + place, key, sn) for place, (sn, key) in enumerate(zip(sns, keys, strict=True))]
            known.extend(start, start + len(seen), seen)
            self._own += seen

    def last(self, to: int) -> Steps[SN | None]:
        """Return the SN of the last committed record below ``to``; None if none is left."""
        return (yield from self._look_back(to, lambda known: known.last is not None)).last

    def last_id(self, to: int) -> Steps[int | None]:
        """Return the last transaction id that a user gave a committed record below ``to``; None if none is left.

        Searches back once, to the beginning of the log if need be; later ids are known from reading on.
        """
        return (yield from self._look_back(to, lambda known: known.last_id is not None)).last_id

    def last_of(self, key: bytes, since: int, to: int) -> Steps[SN | None]:
        """Return the SN of the last committed record with ``key`` in ``since..to-1``; None if there is none."""
        known = yield from self._examine(min(since, to), to, math.inf)
        found = known.last_of(key)
        if found is None and since < known.keys_from:
            early = yield from self._all(since, known.keys_from)
            found = next((sn for _, of, sn in reversed(early) if of == key), None)
        return found

    def find(self, operation: bytes, since: int, to: int) -> Steps[list[SN]]:
        """Return the SNs of a write's committed records in ``since..to-1``; empty if it is not there and never was.

        Raises:
            TruncatedError: the write was not found, and may have stood where records were truncated or compacted.
        """
        found: list[SN] = []

        def take(part: Stretch) -> None:
            for record in part.records:
                if any(name == OPERATION_HEADER and value == operation for name, value in record.headers):
                    found.append(sn_of(record, self.segment, self.base))

        lost = ""
        try:
            yield from self._read(since, to, take)
            if not found and since < min(self.truncated_at, to):
                lost = f"segment {self.segment} was truncated to offset {self.truncated_at}"
            elif not found and not is_segment_topic(self.place[0]) and (yield from Missing(self.place, since, to)):
                lost = f"topic {show_partition(self.place)} was compacted"  # ours keep each offset from the first on
        except TopicNotFoundError as fault:
            raise TruncatedError(f"segment {self.segment} is deleted: whether it held the write is unknown") from fault
        if lost:
            raise TruncatedError(f"{lost}: whether the write was there, from offset {since} on, is unknown")
        return found

    def find_run(self, operation: bytes, offset: int) -> Steps[list[SN]]:
        """Return the SNs of a write's records that begin at ``offset``; empty and raising as :meth:`find` does."""
        if not (yield from self.find(operation, offset, offset + 1)):
            return []
        # The write is decided, and its records are one batch, which a fetch returns whole.
        whole = yield from self.part(offset, offset + RUN_MAX)
        return (yield from self.find(operation, offset, whole.end))

    def part(self, offset: int, to: int, epoch: int = NO_EPOCH) -> Steps[Stretch]:
        """Return what is decided from ``offset`` on, cut off at ``to``; nothing may be.

        Raises:
            LogDivergedError: what was read before, last under leader epoch ``epoch``, is not there any more.
        """
        part = yield from Read(self.place, offset, to, epoch)
        self.high_watermark = part.high_watermark
        if part.start > offset:
            self.truncated_at = max(self.truncated_at, part.start)
        if part.end > to:
            part = part._replace(end=to, records=[record for record in part.records if record.offset < to])
        return part

    def records(
        self, reader: LogReader, since: int, to: int, deadline: Deadline, epoch: int = NO_EPOCH
    ) -> Iterator[LogRecord]:
        """Yield the committed records in ``since..to-1``; afterwards :attr:`read_epoch` is that of the last batch.

        Raises:
            LogDivergedError: what was read before ``since``, last under leader epoch ``epoch``, is not there any more.
            Exception: see :func:`ask`.
        """
        self.read_epoch = epoch
        while since < to:
            part = ask(self.part(since, to, epoch), reader, deadline)
            self.read_epoch = _later(part, self.read_epoch)
            yield from part.records
            since, epoch = part.end, _later(part, epoch) if epoch != NO_EPOCH else NO_EPOCH

    def _look_back(self, to: int, found: Callable[[Examined], bool]) -> Steps[Examined]:
        """Read backwards from ``to`` until what is searched for is found or the beginning of the log is reached."""
        known = yield from self._examine(max(0, to - FIRST_STEP), to, GAP_MAX)
        step = FIRST_STEP
        while not found(known) and known.last_from > self.truncated_at:
            step *= STEP_FACTOR
            start = max(self.truncated_at, known.last_from - step)
            early = yield from self._all(start, known.last_from)
            known.prepend(max(start, self.truncated_at), early)
        return known

    def _examine(self, start: int, to: int, gap_max: float) -> Steps[Examined]:
        """Read on to ``to`` from what is known; from ``start`` if nothing is, or what is known ends too far back.

        Also begins at ``start`` where the log was cut off before the end of what is known, or has grown again since.
        """

        def take(part: Stretch) -> None:
            self.met += len(part.records) + part.aborted
            if part.end > known.end:
                self._own = []
            known.extend(part.start, part.end, self._seen(part))
            self.epoch = _later(part, self.epoch)

        known = self._known or Examined(start)
        while self._known is not None and 0 <= to - known.end <= gap_max:
            try:
                yield from self._read(known.end, to, take, self.epoch)
                return known
            except LogDivergedError as fault:
                yield from self._compare(fault)
        self._known = known = Examined(start)
        self._own, self.epoch = [], NO_EPOCH
        yield from self._read(start, to, take)
        return known

    def _all(self, start: int, to: int) -> Steps[list[Seen]]:
        found: list[Seen] = []
        yield from self._read(start, to, lambda part: found.extend(self._seen(part)))
        return found

    def _read(self, start: int, to: int, take: Callable[[Stretch], object], epoch: int = NO_EPOCH) -> Steps[None]:
        """Pass on the records of ``start..to-1`` in parts."""
        while start < to:
            part = yield from self.part(start, to, epoch)
            take(part)
            # An epoch before this batch's ended here, or earlier.
            start, epoch = part.end, _later(part, epoch) if epoch != NO_EPOCH else NO_EPOCH

    def _compare(self, why: LogDivergedError) -> Steps[None]:
        """Forget what is known, unless all of it is still there and own records were appended under a later epoch."""
        found: list[Seen] = []
        epoch = self.epoch

        def take(part: Stretch) -> None:
            nonlocal epoch
            found.extend(self._seen(part))
            epoch = _later(part, epoch)

        if self._own:
            with suppress(LogDivergedError):
                yield from self._read(self._own[0].offset, self._own[-1].offset + 1, take, epoch)
        is_kept = bool(self._own) and found == self._own
        self._own, self.epoch = [], epoch
        if not is_kept:
            logger.warning("tail.forgotten reason=%s", why)
            self._known, self.epoch = None, NO_EPOCH

    def _seen(self, part: Stretch) -> list[Seen]:
        return [Seen(record.offset, record.key, sn_of(record, self.segment, self.base)) for record in part.records]


def _later(part: Stretch, epoch: int) -> int:
    return epoch if part.epoch == NO_EPOCH else part.epoch


# The tails of a key's segments


class LineageTails:
    """Knowledge about the segments of a stream."""

    def __init__(self, place: Callable[[SegmentId], Partition]) -> None:
        """Start without knowledge; ``place`` says which partition a segment is."""
        self._place = place
        self._tails: dict[int, SegmentTail] = {}
        self._removed: set[int] = set()

    def of(self, stage: Stage) -> SegmentTail:
        """Return the tail of a segment."""
        found = self._tails.get(int(stage.segment))
        if found is None:
            found = SegmentTail(self._place(stage.segment), stage.segment, stage.base)
            self._tails[int(stage.segment)] = found
        return found

    def active(self, lineage: KeyLineage) -> SegmentTail:
        return self.of(Stage(lineage.active, lineage.active_base, None))

    def last(self, lineage: KeyLineage, key: bytes | None, to: int, since: int | None = None) -> Steps[SN]:
        """Return the SN of the last committed record of a lineage before offset ``to`` of its active segment.

        EMPTY if there is none, ANY if it may have been truncated. With a ``key``, of the last record with that key;
        nothing is searched up to and including sequence id ``since`` then.
        """
        for stage in lineage.stages:
            end = to if stage.segment == lineage.active else stage.end or 0
            start = _offset_after(since, stage, end)
            tail = self.of(stage)
            question = tail.last(end) if key is None else tail.last_of(key, start, end)
            found, is_gone = yield from self._asked(stage, lineage, question)
            if found is None and (start < end if is_gone else tail.truncated_at > start):
                return ANY
            if found is not None or (since is not None and since >= stage.base):
                later = (
                    EMPTY
                    if key is None
                    else (yield from self._last_of(lineage.former_after(stage.segment), lineage, key))
                )
                return later if found is None or later != EMPTY else found
        if lineage.dropped_end > (0 if since is None else since + 1):
            return ANY
        return (yield from self.last_former(lineage, key)) if key is not None and since is None else EMPTY

    def last_former(self, lineage: KeyLineage, key: bytes) -> Steps[SN]:
        """Return the SN of the last committed record with a key where it has lain before partitions were added."""
        return (yield from self._last_of(lineage.former, lineage, key))

    def _last_of(self, stages: Iterable[Stage], lineage: KeyLineage, key: bytes) -> Steps[SN]:
        last = EMPTY
        for stage in stages:
            tail = self.of(stage)
            end = (yield from EndOf(tail.place)) if stage.end is None else stage.end
            if stage.end is None:
                yield from tail.confirm(end)
            found, is_gone = yield from self._asked(stage, lineage, tail.last_of(key, 0, end))
            if found is not None:
                return found
            last = ANY if is_gone or tail.truncated_at > 0 else last
        return last

    def last_now(self, lineage: KeyLineage, key: bytes | None) -> Steps[SN]:
        """Return the same before the end of the log, which covers everything that was acknowledged before."""
        tail = self.active(lineage)
        end = yield from EndOf(tail.place)
        yield from tail.confirm(end)
        return (yield from self.last(lineage, key, end))

    def last_id(self, lineage: KeyLineage, to: int) -> Steps[int | None]:
        """Return the last transaction id that a user gave a committed record of a lineage before offset ``to``.

        None if there is none, or if all were truncated.
        """
        for stage in lineage.stages:
            end = to if stage.segment == lineage.active else stage.end or 0
            found, _ = yield from self._asked(stage, lineage, self.of(stage).last_id(end))
            if found is not None:
                return found
        return None

    def find(self, lineage: KeyLineage, token: Token) -> Steps[list[SN]]:
        """Return the SNs of a write's committed records, searching everything appended until now.

        Also where the key has lain, unless a record is expected where it lies: what has met that was written there.

        Raises:
            TruncatedError: the write may have stood where records were truncated.
        """
        since = place_of(token.since, lineage)
        lost: TruncatedError | None = None
        for stage in (*lineage.stages, *(lineage.former if since is None else ())):
            tail = self.of(stage)
            end = (yield from EndOf(tail.place)) if stage.end is None else stage.end
            try:
                if found := (yield from tail.find(token.operation, _offset_after(since, stage, end), end)):
                    return found
            except TruncatedError as fault:
                lost = fault
            if since is not None and since >= stage.base:
                break
        else:
            if lineage.dropped_end > (0 if since is None else since + 1):
                lost = TruncatedError(f"all segments that may hold token {token} were truncated")
        if lost is not None:
            raise lost
        return []

    def _asked(self, stage: Stage, lineage: KeyLineage, question: Steps[T]) -> Steps[tuple[T | None, bool]]:
        """Return what a segment answers, and True instead if it is gone: by the history, or as its topic is missing."""
        if stage.removed or int(stage.segment) in self._removed:
            return None, True
        try:
            return (yield from question), False
        except TopicNotFoundError:
            if stage.segment == lineage.active:
                raise
            self._removed.add(int(stage.segment))
            return None, True


def _offset_after(since: int | None, stage: Stage, end: int) -> int:
    return 0 if since is None else min(max(since + 1 - stage.base, 0), end)
