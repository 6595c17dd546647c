"""Compare-and-set as a pure decision on a record that the log has already placed.

A conditional write is appended first, inside a native transaction of its own, and decided afterwards: its offset fixes
which records are earlier, and once all of these are committed or aborted, nothing can change what the condition is
about. :func:`judge` decides a whole round, that is, several writes appended next to each other. It also refuses
transaction ids of the user's that fall, where that is asked for.

==========  =======================================================================================================
scope       the condition holds if
==========  =======================================================================================================
segment     the last committed record before the write, along the lineage of its key, matches what is expected
key         no committed record *with this key* stands after the expected place; EMPTY: the key was never written
==========  =======================================================================================================

Source: DistributedLog CAS proposal: a write is refused "if the provided SN does not match the SN of last written
record", and ``TransactionIdOutOfOrderException``. The scope ``key`` is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import assert_never

from rollbridge.model.errors import InvalidRequestError
from rollbridge.model.lineage import KeyLineage
from rollbridge.model.sn import ANY, DLSN, EMPTY, SN


class Scope(StrEnum):
    """Scope of a condition."""

    SEGMENT = "segment"
    """The last record of the segment in which the key is."""
    KEY = "key"
    """The last record with the same key."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Condition of a write.

    Raises:
        InvalidRequestError: the scope is ``key`` and there is no key.
    """

    expected: SN
    scope: Scope = Scope.SEGMENT
    key: bytes | None = None

    def __post_init__(self) -> None:
        if self.scope is Scope.KEY and self.key is None:
            raise InvalidRequestError('a condition with scope "key" needs a key; nothing was written')

    @property
    def scope_key(self) -> bytes | None:
        """Key whose last record it is about; None if it is about the segment's last one."""
        return self.key if self.scope is Scope.KEY else None


@dataclass(frozen=True, slots=True)
class ConditionalWrite:
    """One write of a round: its records stand next to each other, and are written all or not at all.

    Attributes:
        condition: What it expects, unless ``after`` is given.
        course: The segments of its keys; all writes of a round have the same active one.
        keys: Keys of its records, in order.
        transaction_ids: What the user gave each record as its transaction id.
        after: Place in the round of the write whose last record this one expects to be the last.
        rising_ids: Whether it is refused if one of its transaction ids is lower than the last one before.
    """

    condition: Condition
    course: KeyLineage
    keys: tuple[bytes | None, ...]
    transaction_ids: tuple[int | None, ...]
    after: int | None = None
    rising_ids: bool = False

    @property
    def checks_ids(self) -> bool:
        """True if the last transaction id before the write matters."""
        return self.rising_ids and any(number is not None for number in self.transaction_ids)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The condition holds; where the records stand if the round is committed."""

    sns: tuple[SN, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The condition does not hold.

    Attributes:
        expected: What it was.
        actual: SN of the last record in its scope; ANY if that was truncated away.
    """

    expected: SN
    actual: SN


@dataclass(frozen=True, slots=True)
class Falling:
    """A transaction id of the write is lower than the last one before it; nothing is written, whatever was expected.

    Attributes:
        transaction_id: The one that falls.
        last: The last one before it.
    """

    transaction_id: int
    last: int


Verdict = Accepted | Refused | Falling


def place_of(expected: SN, course: KeyLineage) -> int | None:
    """Return the place of an expected record as a sequence id; None if the SN does not give it.

    In a segment that the history has dropped, only the SN's sequence id gives the place.

    Of a key that lies in another partition since some were added to an adopted topic, only a place in that one is one.

    Raises:
        InvalidRequestError: its segment is not one in which records of this key can stand, or it is of a stream of the
            same name that was deleted.
    """
    if expected.sequence_id is not None and expected.sequence_id < course.born_sequence:
        raise InvalidRequestError(
            f"SN {expected} is of a stream of this name that was deleted: sequence ids of the one that was created "
            f"since begin at {course.born_sequence}; nothing was written"
        )
    if expected.dlsn is None:
        return None if course.former else expected.sequence_id
    if course.is_former(expected.dlsn.segment):
        return None
    base = course.base(expected.dlsn.segment)
    if base is None and course.is_dropped(expected.dlsn.segment):
        return expected.sequence_id
    if base is None:
        raise InvalidRequestError(
            f"SN {expected} names segment {expected.dlsn.segment}, in which no record of this key can stand: it is of "
            "another stream, or of another key range, or of a deleted stream of this name; nothing was written"
        )
    return base + expected.dlsn.offset


def holds(condition: Condition, last: SN, upto: int, course: KeyLineage) -> bool:
    """Return whether a condition holds.

    Args:
        condition: What is expected.
        last: SN of the last committed record in its scope; EMPTY without any, ANY if unknown. With scope ``key`` and
            an expected place, a record at or before that place may be left out.
        upto: Sequence id at which the write stands.
        course: The segments of the key.

    Raises:
        InvalidRequestError: see :func:`place_of`.
    """
    expected = condition.expected
    if expected == ANY:
        return True
    if has_moved(expected, course) or has_moved(last, course):
        return False
    place = place_of(expected, course)
    match condition.scope:
        case Scope.SEGMENT:
            return expected.matches(last)
        case Scope.KEY:
            if expected.empty or place is None:
                return expected.matches(last)
            if place >= upto or expected.sequence_id not in (None, place):
                return False
            if last.sequence_id == place:
                return expected.transaction_id in (None, last.transaction_id)
            # What stands at the expected place is a record of another key then, whose id is not looked at.
            return last.empty or (last.sequence_id is not None and last.sequence_id < place)
        case never:
            assert_never(never)


def has_moved(sn: SN, course: KeyLineage) -> bool:
    """Return whether an SN is of a partition in which the key does not lie any more."""
    return sn.dlsn is not None and course.is_former(sn.dlsn.segment)


def why_moved(expected: SN, actual: SN, course: KeyLineage) -> str:
    """Return why a condition of a key that lies in another partition by now was refused, to follow that; else empty."""
    if not course.former or not (has_moved(expected, course) or has_moved(actual, course)):
        return ""
    numbers = [stage.segment.number for stage in course.former if not stage.segment.is_prepared]
    places = ", ".join(map(str, dict.fromkeys(numbers)))
    return (
        f"; partitions were added to the topic since: the key lies in partition {course.active.number} now and lay in "
        f"{places}, and records of different partitions are in no order: look at it anew, and write it once without an "
        "expectation (ANY)"
    )


def is_refuted(condition: Condition, last: SN, course: KeyLineage) -> bool:
    """Return whether a condition cannot hold any more, whatever follows ``last``, a committed record in its scope.

    A condition that expects a record behind ``last`` is not refuted: its writer may have read that record already.

    Raises:
        InvalidRequestError: see :func:`place_of`.
    """
    expected = condition.expected
    if expected == ANY:
        return False
    if expected.empty:
        return True
    place = place_of(expected, course)
    return place is not None and last.sequence_id is not None and place < last.sequence_id


def judge(
    entries: Sequence[ConditionalWrite],
    offset: int,
    last: SN,
    key_lasts: Mapping[bytes, SN],
    last_ids: Mapping[int, int | None] = MappingProxyType({}),
) -> list[Verdict]:
    """Decide a round that was appended to the active segment of its writes.

    A write may rely on accepted ones before it. If one is refused, the round cannot be committed as it is; the
    verdicts of the refused stand nevertheless, since each rests on what is committed already.

    Args:
        entries: The writes; their records stand side by side in this order.
        offset: Where the first record of the round stands.
        last: SN of the last committed record before ``offset``, along the course of the first write. The others look
            at it only after the first has written, see :class:`Mates`.
        key_lasts: The same by key, for the keys of conditions with scope ``key``.
        last_ids: By place, for writes whose transaction ids must not fall: the last one that was given to a committed
            record before ``offset``, along the course of the write; None if there is none.
    """
    verdicts: list[Verdict] = []
    keys = dict(key_lasts)
    id_in_round: int | None = None
    for place, entry in enumerate(entries):
        condition = entry.condition
        segment, base = entry.course.active, entry.course.active_base
        refused: Refused | Falling | None = None
        if entry.after is not None:
            before = verdicts[entry.after]
            if isinstance(before, Accepted):
                condition = Condition(before.sns[-1], condition.scope, condition.key)
            else:
                refused = before
        actual = last if condition.scope is Scope.SEGMENT else keys.get(condition.key or b"", EMPTY)
        is_awaited = entry.after is not None and actual is condition.expected
        if refused is None and not is_awaited and not holds(condition, actual, base + offset, entry.course):
            refused = Refused(condition.expected, actual)
        if refused is None and entry.rising_ids:
            refused = _falling(entry.transaction_ids, last_ids.get(place) if id_in_round is None else id_in_round)
        if refused is not None:
            verdicts.append(refused)
            offset += len(entry.keys)
            continue
        sns = []
        for key, transaction_id in zip(entry.keys, entry.transaction_ids, strict=True):
            last = SN(DLSN(segment.epoch, segment.number, offset), transaction_id, base + offset)
            sns.append(last)
            if key is not None:
                keys[key] = last
            if transaction_id is not None:
                id_in_round = transaction_id
            offset += 1
        verdicts.append(Accepted(tuple(sns)))
    return verdicts


def _falling(transaction_ids: Sequence[int | None], last: int | None) -> Falling | None:
    for number in transaction_ids:
        if number is not None:
            if last is not None and number < last:
                return Falling(number, last)
            last = number
    return None


class Mates:
    """Writes of a round while it is being assembled."""

    def __init__(self) -> None:
        self.entries: list[ConditionalWrite] = []
        self._place_of_key: dict[bytes | None, int] = {}
        self._last_id: int | None = None

    def fits(self, entry: ConditionalWrite) -> bool:
        """Return whether a write can join the round: the acceptance of the writes before it must not refuse it.

        Its condition on the log before the round is left to :func:`judge`.
        """
        if not self.entries:
            return True
        if entry.rising_ids and _falling(entry.transaction_ids, self._last_id) is not None:
            return False
        if entry.after is None and entry.condition.expected == ANY:
            return True
        match entry.condition.scope:
            case Scope.SEGMENT:
                return entry.after == len(self.entries) - 1
            case Scope.KEY:
                place = self._place_of_key.get(entry.condition.key)
                return place is None or (entry.after is not None and place <= entry.after)
            case never:
                assert_never(never)

    def add(self, entry: ConditionalWrite) -> None:
        """Add a write that fits."""
        for key, number in zip(entry.keys, entry.transaction_ids, strict=True):
            self._place_of_key[key] = len(self.entries)
            if number is not None:
                self._last_id = number
        self.entries.append(entry)


# Arguments of conditional writers.

Expected = SN | DLSN
"""An SN with any of its members, or a DLSN alone. Not a number alone: it might be either of two ids."""


def as_sn(expected: object) -> SN:
    """Return the SN that a caller expects.

    Raises:
        InvalidRequestError: it is none. A number alone is one of them: DistributedLog's proposal means a transaction id
            by it, and a writer that numbers its records would not notice a condition on another number.
    """
    match expected:
        case SN():
            return expected
        case DLSN():
            return SN(dlsn=expected)
        case bool():
            pass
        case int():
            raise InvalidRequestError(
                f"{expected} alone does not say which id it is: say SN(sequence_id={expected}) for the sequence id "
                f"that a tail or a write told, or SN(transaction_id={expected}) for the number that the writer gave "
                "the record; nothing was written"
            )
    raise InvalidRequestError(
        f"{expected!r} cannot be expected: give an SN, a DLSN, ANY, EMPTY, or the future of a conditional "
        "write is; nothing was written"
    )


def as_scope(scope: Scope | str) -> Scope:
    """Return the scope of a condition.

    Raises:
        InvalidRequestError: there is no such scope.
    """
    try:
        return Scope(scope)
    except ValueError:
        raise InvalidRequestError(f"{scope!r} is not a scope: give segment or key; nothing was written") from None
