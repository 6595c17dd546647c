"""Transactions that have an outcome: the latest of each client, with what it is, and the ids of all.

A group's memory of each client's latest ones, the *terminated* transactions, is stored in a compacted topic.

The Kafka key is the client name, the value the whole list, so that compaction keeps one record for each name. The
record also holds the *horizon*: the counter below which transactions of the client may have been forgotten. A
transaction that is not in the list has certainly no outcome, if its counter is not below the horizon.

Source: PIP-255, ``OutcomeStore``, ``Map<ClientName, List<TxnMeta>>``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Final, NamedTuple, Self

import rollbridge_schemas
from rollbridge.base.avro import encode_long, encode_string
from rollbridge.base.errors import CorruptDataError, InvalidRequestError
from rollbridge.base.ids import (
    COUNTER_BYTES,
    COUNTER_MAX,
    ISSUED_BITS,
    ISSUED_MAX,
    NUMBER_MAX,
    TransactionId,
    counter_of,
)
from rollbridge.base.mapper import FRONT, Mapper, content_of, seal, unseal
from rollbridge.stream.names import GroupName

RETAIN_DEFAULT: Final = -1
"""Retention of a transaction that names none: the group's."""
GONE: Final = ""
"""Key in the topic, in place of a client name, of the memory of deleted names; no name is empty."""

_HALF: Final = 48
_LOW: Final = (1 << _HALF) - 1
_NO, _YES = b"\0", b"\1"
_NULL, _PRESENT = encode_long(0), encode_long(1)
_END: Final = encode_long(0)
_EMPTY: Final = encode_string("")


class Terminated(NamedTuple):
    """A terminated transaction.

    Attributes:
        transaction: Its id.
        committed: Whether it was committed; otherwise it was aborted.
        position: Offset of its record on the commit log; -1 before that is known.
        records: How many records became visible.
        decided_ms: Clock of the leader, ms since 1970.
        retain_ms: How long it is remembered; RETAIN_DEFAULT is the group's setting.
        label: Given by the user.
        reason: Why it was aborted; empty otherwise.
    """

    transaction: TransactionId
    committed: bool
    position: int
    records: int
    decided_ms: int
    retain_ms: int = RETAIN_DEFAULT
    label: str | None = None
    reason: str = ""

    def forgotten_at_ms(self, default_ms: int) -> int:
        """Return when it may be forgotten, ms since 1970."""
        return self.decided_ms + (default_ms if self.retain_ms == RETAIN_DEFAULT else self.retain_ms)

    def encode(self) -> bytes:
        """Encode the list's item in Avro, by hand: a leader writes one for every transaction."""
        counter = self.transaction.counter
        return b"".join(
            (
                _high(self.transaction.epoch, counter >> _HALF),
                encode_long(counter & _LOW),
                _YES if self.committed else _NO,
                encode_long(self.position),
                encode_long(self.records),
                _moments(self.decided_ms, self.retain_ms),
                _NULL if self.label is None else _PRESENT + encode_string(self.label),
                encode_string(self.reason) if self.reason else _EMPTY,
            )
        )


@lru_cache(maxsize=1024)
def _high(epoch: int, counter_high: int) -> bytes:
    return encode_long(epoch) + encode_long(counter_high)


@lru_cache(maxsize=1024)
def _moments(decided_ms: int, retain_ms: int) -> bytes:
    return encode_long(decided_ms) + encode_long(retain_ms)


def encode_terminated(items: Sequence[bytes], forgotten_below: int) -> bytes:
    """Return the value of a client's record.

    Args:
        items: What :meth:`Terminated.encode` gives, oldest first.
        forgotten_below: The horizon.
    """
    head = FRONT + encode_long(forgotten_below >> _HALF) + encode_long(forgotten_below & _LOW)
    return b"".join((head, encode_long(len(items)), *items, _END)) if items else head + _END


def decode_terminated(value: bytes) -> tuple[tuple[Terminated, ...], int]:
    """Return a client's terminated transactions, oldest first, and its horizon.

    Raises:
        NewerFormatError: it is of a version that is not known here.
        CorruptDataError: not such a value.
    """
    content = content_of("a record of terminated transactions", value)
    try:
        datum = rollbridge_schemas.codec("terminated_transactions").decode(content)
        found = tuple(
            Terminated(
                transaction=TransactionId.of(
                    item["reference_epoch"], _joined(item["counter_high"], item["counter_low"])
                ),
                committed=item["committed"],
                position=item["position"],
                records=item["records"],
                decided_ms=item["decided_ms"],
                retain_ms=item["retain_ms"],
                label=item["label"],
                reason=item["reason"],
            )
            for item in datum["transactions"]
        )
        return found, _joined(datum["forgotten_high"], datum["forgotten_low"])
    except (rollbridge_schemas.SchemaError, InvalidRequestError) as fault:
        raise CorruptDataError(f"a record of terminated transactions cannot be read: {fault}") from fault


def _joined(high: int, low: int) -> int:
    if not (0 <= high <= _LOW and 0 <= low <= _LOW):
        raise InvalidRequestError(f"{high} and {low} are not halves of a counter of {COUNTER_MAX.bit_length()} bits")
    return high << _HALF | low


# Ended transactions: the ids of a group that have an outcome, for as long as any of their frames may still come.
#
# A BEGIN frame may arrive long after the outcome of its transaction: doubled by a writer that is not idempotent, sent
# by a process that was suspended, or from the buffer of another stream that lags. By then the commit log may be
# truncated, or its record far back. If the frame opened the transaction again, it would end a second time. So a leader
# knows *every* id that has ended. That takes little memory: counters are given out in increasing blocks and used in
# order, so the ended ids are a few ranges, with a gap for each block that is in use, or was given up before it was used
# up.
#
# Abandoned gaps would add up over the years. Above a number of ranges, the oldest gaps are closed: all counters below a
# *horizon* count as ended, except those of open transactions. The horizon only passes counters that were given out days
# ago; clients give a block up after a day.
#
# The set is written from time to time as one record, with the offset of the commit log up to which it holds every
# outcome. A leader that takes over reads the commit log from there. If the record is unusable, the ranges are rebuilt
# from the rest of the commit log. Then transactions begun, by the broker's clock, while the log still held older
# records (:class:`LogMark`) count as ended unless they are known to be open; so do all counters that no client can use
# any more.
#
# Source: the counters are PDP-24's ("UUID txn id = 16 bit epoch + 96 bit counter"); a set of ranges is what TCP keeps
# of segments that came out of order (RFC 2018).


RANGES_MAX: Final = 100_000
"""Most ranges kept if too many gaps are young, as with counters used at random.

An isolated id is then known for as long as the fold remembers it.
"""
_COUNT_MASK: Final = (1 << ISSUED_BITS) - 1


@dataclass(frozen=True, slots=True)
class EndedNumber:
    """Ended counters with one number of a group; see ``ended_transactions.avsc``."""

    number: int
    horizon: int
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    spared: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedTransactions:
    """The record of a group's ended transactions; see ``ended_transactions.avsc``."""

    group: GroupName
    topic_id: str
    controller_epoch: int
    commit_log_end: int
    lost_ms: int
    numbers: tuple[EndedNumber, ...]

    def encode(self) -> bytes:
        """Return its Kafka value."""
        return seal(_RECORD, self)


_RECORD: Final = Mapper(EndedTransactions, "ended_transactions")


def ended_key(group: GroupName) -> bytes:
    """Return the Kafka key of a group's record, in the topic of indexes of its scope; no partition has it."""
    return f"ended-{group.node}".encode()


def parse_ended(value: bytes | None) -> EndedTransactions:
    """Return what is in a record, of whatever group.

    Raises:
        CorruptDataError: there is none, or of a version that is not known here, or it is damaged.
    """
    return unseal(_RECORD, value)


def decode_ended(value: bytes | None, group: GroupName, topic_id: str, log_end: int) -> EndedTransactions:
    """Return the record of a group whose commit log has this id and end.

    Raises:
        CorruptDataError: there is none, or of a version that is not known here, it is damaged, or of another log.
    """
    found = parse_ended(value)
    if found.group != group or found.topic_id != topic_id:
        raise CorruptDataError(f"it is of group {found.group}, whose commit log has id {found.topic_id}")
    if not 0 <= found.commit_log_end <= log_end:
        raise CorruptDataError(f"it says what ended before offset {found.commit_log_end}, the log ends at {log_end}")
    return found


class EndedIds(Container[bytes]):
    """The ids of ended transactions; a container of their 16 bytes. Not thread-safe.

    The reference epoch in an id is ignored: a counter is given out once.

    Attributes:
        log_end: Outcomes at lower offsets of the commit log are in the last record that was written.
        fresh: Number of ids added since.
        left_out: Number of ids left out because there are too many ranges.
        lost_ms: Transactions begun until then, ms since 1970, have ended unless known to be open; 0 if not used.
        has_outcome: Tells whether a client's transaction has an outcome, by the outcomes remembered apart from the
            commit log; None if that is unknown.
        is_given: Tells ids that were given out. A member of the group may have others refused, which ends them; these
            are not added, since they may be given out later.
    """

    __slots__ = (
        "_ends",
        "_horizons",
        "_is_whole",
        "_spared",
        "_starts",
        "fresh",
        "has_outcome",
        "is_given",
        "left_out",
        "log_end",
        "lost_ms",
    )

    def __init__(self, log_end: int = 0) -> None:
        """Start empty."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._horizons: dict[int, int] = {}
        self._spared: set[int] = set()
        self.log_end = log_end
        self.fresh = 0
        self.left_out = 0
        self.lost_ms = 0
        self.is_given: Callable[[bytes], bool] = lambda _: True
        self.has_outcome: Callable[[bytes, str], bool | None] = lambda *_: None
        self._is_whole = True

    @classmethod
    def of(cls, record: EndedTransactions) -> Self:
        """Return what a record says.

        Raises:
            CorruptDataError: it contradicts itself.
        """
        made = cls(record.commit_log_end)
        made.lost_ms = record.lost_ms
        made._is_whole = not record.lost_ms or any(item.horizon for item in record.numbers)
        for item in sorted(record.numbers, key=lambda item: item.number):
            starts = list(accumulate(item.starts))
            ends = [start + length for start, length in zip(starts, item.lengths, strict=False)]
            sound = (
                0 <= item.number <= NUMBER_MAX
                and len(item.starts) == len(item.lengths)
                and min(item.lengths, default=1) > 0
                and all(end < start for end, (_, start) in zip(ends, pairwise(starts), strict=False))
                and 0 <= min((*starts, *item.spared, item.horizon)) <= max((*ends, *item.spared, item.horizon))
                and max((*ends, *item.spared, item.horizon)) <= ISSUED_MAX + 1
            )
            if not sound:
                raise CorruptDataError(f"what has ended of number {item.number} contradicts itself")
            made._starts += [counter_of(item.number, start) for start in starts]
            made._ends += [counter_of(item.number, end) for end in ends]
            made._spared.update(counter_of(item.number, count) for count in item.spared)
            if item.horizon:
                made._horizons[item.number] = item.horizon
        return made

    def record(
        self, group: GroupName, topic_id: str, controller_epoch: int, log_end: int, open_ids: Iterable[bytes]
    ) -> EndedTransactions:
        """Return the record of all this, which says nothing of transactions that are open."""
        living = {counter for counter in map(_counter, open_ids) if counter is not None}
        kept = EndedIds()
        kept._starts, kept._ends, kept._horizons = list(self._starts), list(self._ends), dict(self._horizons)
        for counter in living:
            kept._take_out(counter)
        numbers: dict[int, tuple[list[int], list[int]]] = {number: ([], []) for number in self._horizons}
        if self.lost_ms:
            numbers.update({counter >> ISSUED_BITS: ([], []) for counter in living})
        for start, end in zip(kept._starts, kept._ends, strict=True):
            starts, lengths = numbers.setdefault(start >> ISSUED_BITS, ([], []))
            starts.append(start & _COUNT_MASK)
            lengths.append(end - start)
        spared = [counter for counter in living if self.lost_ms or self._is_below(counter)]
        return EndedTransactions(
            group=group,
            topic_id=topic_id,
            controller_epoch=controller_epoch,
            commit_log_end=log_end,
            lost_ms=self.lost_ms,
            numbers=tuple(
                EndedNumber(
                    number,
                    self._horizons.get(number, 0),
                    tuple(after - before for before, after in pairwise([0, *starts])),
                    tuple(lengths),
                    tuple(sorted(item & _COUNT_MASK for item in spared if item >> ISSUED_BITS == number)),
                )
                for number, (starts, lengths) in sorted(numbers.items())
            ),
        )

    def written(self, log_end: int) -> None:
        """Record that a record is durable that holds every outcome below an offset."""
        self.log_end = log_end
        self.fresh = 0

    def __contains__(self, transaction: object) -> bool:
        counter = _counter(transaction) if isinstance(transaction, bytes) else None
        if counter is None or counter in self._spared:
            return False
        place = bisect_right(self._starts, counter) - 1
        return (place >= 0 and counter < self._ends[place]) or self._is_below(counter)

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, transaction: bytes) -> None:
        """Add the id of a transaction that has ended."""
        counter = _counter(transaction)
        if counter is None or not self.is_given(transaction):
            return
        self.fresh += 1
        self._spared.discard(counter)
        starts, ends = self._starts, self._ends
        place = bisect_right(starts, counter)
        if (place and counter < ends[place - 1]) or self._is_below(counter):
            return
        follows = place > 0 and ends[place - 1] == counter
        precedes = place < len(starts) and starts[place] == counter + 1
        if follows and precedes:
            ends[place - 1] = ends[place]
            del starts[place], ends[place]
        elif follows:
            ends[place - 1] = counter + 1
        elif precedes:
            starts[place] = counter
        elif len(starts) < RANGES_MAX:
            starts.insert(place, counter)
            ends.insert(place, counter + 1)
        else:
            self.left_out += 1

    def merge(self, other: EndedIds) -> None:
        """Add all ranges of another set; what was spared and is in one of them has ended since."""
        self._spared = {counter for counter in self._spared if not other._is_in_range(counter)}
        ranges = sorted([*zip(self._starts, self._ends, strict=True), *zip(other._starts, other._ends, strict=True)])
        self._starts, self._ends = [], []
        for start, end in ranges:
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._starts.append(start)
                self._ends.append(end)
        self.fresh += other.fresh

    def cut(self, number: int, count: int, deleted_streams: Container[int]) -> None:
        """Forget ids that were not given out, however they came here.

        Args:
            number: The group's; 0 if it has none, and then nothing is known.
            count: None of that number was given out from it on.
            deleted_streams: Its former numbers. Number 0 is that of clients of earlier versions.
        """
        if not number:
            return
        high = counter_of(number, count)
        ranges = [
            (start, min(end, high) if start >> ISSUED_BITS == number else end)
            for start, end in zip(self._starts, self._ends, strict=True)
            if (its := start >> ISSUED_BITS) in (0, number) or its in deleted_streams
        ]
        self._starts = [start for start, end in ranges if start < end]
        self._ends = [end for start, end in ranges if start < end]

    def close_gaps(self, number: int, count: int, open_ids: Iterable[bytes], ranges_kept: int) -> bool:
        """Raise the horizon to a count if there are too many ranges, or something was lost; tell if it rose.

        It does not rise beyond an open transaction.

        Args:
            number: The group's.
            count: All below it were given out long ago.
            open_ids: Of the transactions that are open.
            ranges_kept: How many ranges are not too many.
        """
        if len(self) <= ranges_kept and self._is_whole:
            return False
        self._is_whole = True
        low, high = counter_of(number, 0), counter_of(number, count)
        found = [item for item in map(_counter, open_ids) if item is not None and low <= item < high]
        high = min([high, *found])
        if high <= counter_of(number, self._horizons.get(number, 0)):
            return False
        self.void(number, high & _COUNT_MASK, ())
        return True

    def lose(self, until_ms: int, open_ids: Iterable[bytes]) -> None:
        """Count as ended what was begun until a time, ms since 1970, but for the transactions that are open."""
        self.lost_ms = max(until_ms, self.lost_ms)
        self._is_whole = False
        self._spared.update(item for item in map(_counter, open_ids) if item is not None)

    def is_lost(self, transaction: bytes, begun_ms: int, client: str = "") -> bool:
        """Return whether one that a client began at a time counts as ended, as the log does not tell that any more."""
        return (
            0 < self.lost_ms >= begun_ms
            and _counter(transaction) not in self._spared
            and self.has_outcome(transaction, client) is not False
        )

    def void(self, number: int, count: int, open_ids: Iterable[bytes]) -> None:
        """Count everything below a count as ended, but for the transactions that are open."""
        if count <= self._horizons.get(number, 0):
            return
        self._horizons[number] = count
        self._spared.update(item for item in map(_counter, open_ids) if item is not None and self._is_void(item))
        low, high = counter_of(number, 0), counter_of(number, count)
        first, last = bisect_left(self._starts, low), bisect_left(self._starts, high)
        if last > first and self._ends[last - 1] > high:
            last -= 1
            self._starts[last] = high
        del self._starts[first:last], self._ends[first:last]

    def _is_in_range(self, counter: int) -> bool:
        place = bisect_right(self._starts, counter) - 1
        return place >= 0 and counter < self._ends[place]

    def _is_void(self, counter: int) -> bool:
        return self._is_below(counter) and counter not in self._spared

    def _is_below(self, counter: int) -> bool:
        """Return whether a counter is below the horizon of its number."""
        if not self._horizons:
            return False
        return counter & _COUNT_MASK < self._horizons.get(counter >> ISSUED_BITS, 0)

    def _take_out(self, counter: int) -> None:
        place = bisect_right(self._starts, counter) - 1
        if place < 0 or counter >= self._ends[place]:
            return
        start, end = self._starts[place], self._ends[place]
        parts = [(low, high) for low, high in ((start, counter), (counter + 1, end)) if low < high]
        self._starts[place : place + 1] = [low for low, _ in parts]
        self._ends[place : place + 1] = [high for _, high in parts]


def _counter(transaction: bytes) -> int | None:
    """Return the counter in an id; None for one that no counter ever gives out."""
    counter = int.from_bytes(transaction[COUNTER_BYTES], "big")
    return counter if counter & _COUNT_MASK <= ISSUED_MAX else None


@dataclass(frozen=True, slots=True)
class LogMark:
    """How far a group's commit log and its counter had come at some time.

    Attributes:
        ms: When, by the latest of the clocks, ms since 1970.
        written: How many bytes had been written to the log until then, as far as they were counted.
        offset: Where the log ended.
        count: What was given out until then has a lower count, or another number of the group.
    """

    ms: int
    written: int
    offset: int
    count: int


MARKS_PER_LIMIT: Final = 50
"""Marks that are about as many as each limit of a retention has."""
MARKS_MAX: Final = 500


def gap_ms(limits_ms: Iterable[int]) -> int:
    """Return how long after a mark the next one is noted, so that each limit has about fifty."""
    return max(min(limits_ms) // MARKS_PER_LIMIT, 1)


def marks_to_keep(marks: Sequence[LogMark], place: int, now_ms: int, kept_ms: int) -> list[LogMark]:
    """Return the marks that are needed once the log is truncated at that in a place.

    Before it, those by which counters are told to be old: one that is older than ``kept_ms``, and later ones.

    Args:
        marks: Oldest first.
        place: Of the mark at which it is truncated; 0 if it is not.
        now_ms: The earliest time that it may be.
        kept_ms: For how long counters are not old.
    """
    every_ms = gap_ms([kept_ms])
    old = max((index for index, mark in enumerate(marks) if now_ms - mark.ms >= kept_ms), default=0)
    kept: list[LogMark] = []
    for mark in marks[min(old, place) : place]:
        if not kept or mark.ms - kept[-1].ms >= every_ms:
            kept.append(mark)
    kept += marks[place:]
    while len(kept) > MARKS_MAX:
        del kept[-2::-2]
    return kept


def counted_before(marks: Sequence[LogMark], now_ms: int, kept_ms: int, count: int) -> int | None:
    """Return the count that the group's counter had reached a time ago; None if no mark tells.

    A mark with a higher count than a later one is of an earlier number of the group, as all before it are.

    Args:
        marks: Oldest first.
        now_ms: The earliest time that it may be.
        kept_ms: How long ago.
        count: What the counter has reached now.
    """
    for mark in reversed(marks):
        if mark.count > count:
            return None
        if now_ms - mark.ms >= kept_ms:
            return mark.count
        count = mark.count
    return None


def short_until_ms(marks: Iterable[LogMark], offset: int) -> int | None:
    """Return a time, ms since 1970, at which the log had come to an offset, or further; None if no mark tells."""
    return min((mark.ms for mark in marks if mark.offset >= offset), default=None)
