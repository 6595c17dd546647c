"""Compare-and-set as a pure decision on a record that the log has already placed.

A conditional write is appended first, in a native transaction of its own. Its offset fixes which records are earlier;
once all of these are committed or aborted, it is decided. :func:`judge` decides a whole round, that is, several
adjacent writes. On request it also refuses decreasing transaction ids of the user's.

===========  =======================================================================================================
scope        the condition holds if
===========  =======================================================================================================
``segment``  the last committed record before the write, along the lineage of its key, matches what is expected
``key``      no committed record *with this key* is after the expected place; EMPTY: the key was never written
===========  =======================================================================================================

Source: DistributedLog CAS proposal: a write is refused "if the provided SN does not match the SN of last written
record", and ``TransactionIdOutOfOrderException``. The scope ``key`` is added.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final, assert_never

from rollbridge.base.errors import InvalidRequestError
from rollbridge.base.sn import ANY, DLSN, EMPTY, SN
from rollbridge.stream.names import show_partition
from rollbridge.stream.reading import KeyLineage


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
    """One write of a round: its records are adjacent, and are written all or not at all.

    Attributes:
        condition: Its expectation, unless ``after`` is given.
        lineage: The segments of its keys; all writes of a round have the same active one.
        keys: Keys of its records, in order.
        transaction_ids: The user's transaction id of each record.
        after: Index in the round of the write whose last record this one expects to be the last.
        monotonic_ids: True to refuse it if one of its transaction ids is lower than the one before.
    """

    condition: Condition
    lineage: KeyLineage
    keys: tuple[bytes | None, ...]
    transaction_ids: tuple[int | None, ...]
    after: int | None = None
    monotonic_ids: bool = False

    @property
    def checks_ids(self) -> bool:
        """True if the last transaction id before the write matters."""
        return self.monotonic_ids and any(number is not None for number in self.transaction_ids)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The condition holds; carries the records' positions, valid if the round is committed."""

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
class NonMonotonicId:
    """A transaction id of the write is lower than the last one before it; nothing is written, whatever was expected.

    Attributes:
        transaction_id: The one that falls.
        last: The last one before it.
    """

    transaction_id: int
    last: int


Verdict = Accepted | Refused | NonMonotonicId


def place_of(expected: SN, lineage: KeyLineage) -> int | None:
    """Return the place of an expected record as a sequence id; None if the SN does not give it.

    In a segment that the history has dropped, only the SN's sequence id gives the place. If a key moved to another
    partition when some were added to an adopted topic, only a place in the new partition counts.

    Raises:
        InvalidRequestError: its segment cannot hold records of this key, or belongs to a deleted stream of the same
            name.
    """
    if expected.sequence_id is not None and expected.sequence_id < lineage.born_sequence:
        raise InvalidRequestError(
            f"SN {expected} is of a stream of this name that was deleted: sequence ids of the one that was created "
            f"since begin at {lineage.born_sequence}; nothing was written"
        )
    if expected.dlsn is None:
        return None if lineage.former else expected.sequence_id
    if lineage.is_former(expected.dlsn.segment):
        return None
    base = lineage.base(expected.dlsn.segment)
    if base is None and lineage.is_dropped(expected.dlsn.segment):
        return expected.sequence_id
    if base is None:
        raise InvalidRequestError(
            f"SN {expected} names segment {expected.dlsn.segment}, which cannot hold records of this key: it belongs "
            "to another stream, another key range, or a deleted stream of this name; nothing was written"
        )
    return base + expected.dlsn.offset


def holds(condition: Condition, last: SN, upto: int, lineage: KeyLineage) -> bool:
    """Return whether a condition holds.

    Args:
        condition: The expectation.
        last: SN of the last committed record in its scope; EMPTY without any, ANY if unknown. With scope ``key`` and
            an expected place, a record at or before that place may be left out.
        upto: Sequence id of the write.
        lineage: The segments of the key.

    Raises:
        InvalidRequestError: see :func:`place_of`.
    """
    expected = condition.expected
    if expected == ANY:
        return True
    if has_moved(expected, lineage) or has_moved(last, lineage):
        return False
    place = place_of(expected, lineage)
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
            # The record at the expected place has another key then, and its id is not checked.
            return last.empty or (last.sequence_id is not None and last.sequence_id < place)
        case never:
            assert_never(never)


def has_moved(sn: SN, lineage: KeyLineage) -> bool:
    """Return whether an SN is of a partition in which the key does not lie any more."""
    return sn.dlsn is not None and lineage.is_former(sn.dlsn.segment)


def why_moved(expected: SN, actual: SN, lineage: KeyLineage) -> str:
    """Return why a condition of a key that lies in another partition by now was refused, to follow that; else empty."""
    if not lineage.former or not (has_moved(expected, lineage) or has_moved(actual, lineage)):
        return ""
    numbers = [stage.segment.number for stage in lineage.former if not stage.segment.is_prepared]
    places = ", ".join(map(str, dict.fromkeys(numbers)))
    return (
        f"; partitions were added to the topic since: the key is in partition {lineage.active.number} now and was in "
        f"{places}, and records of different partitions have no order: read it again, and write it once without an "
        "expectation (ANY)"
    )


def is_refuted(condition: Condition, last: SN, lineage: KeyLineage) -> bool:
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
    place = place_of(expected, lineage)
    return place is not None and last.sequence_id is not None and place < last.sequence_id


def judge(
    entries: Sequence[ConditionalWrite],
    offset: int,
    last: SN,
    key_lasts: Mapping[bytes, SN],
    last_ids: Mapping[int, int | None] = MappingProxyType({}),
) -> list[Verdict]:
    """Decide a round that was appended to the active segment of its writes.

    A write may rely on accepted ones before it. If one is refused, the round cannot be committed as it is; the refusals
    are final nevertheless, since each depends on committed records only.

    Args:
        entries: The writes; their records are adjacent, in this order.
        offset: Offset of the first record of the round.
        last: SN of the last committed record before ``offset``, along the lineage of the first write. The others are
            checked only after the first has written, see :class:`RoundBuilder`.
        key_lasts: The same by key, for the keys of conditions with scope ``key``.
        last_ids: By index, for writes whose transaction ids must not decrease: the last id of a committed record
            before ``offset``, along the lineage of the write; None if there is none.
    """
    verdicts: list[Verdict] = []
    keys = dict(key_lasts)
    id_in_round: int | None = None
    for place, entry in enumerate(entries):
        condition = entry.condition
        segment, base = entry.lineage.active, entry.lineage.active_base
        refused: Refused | NonMonotonicId | None = None
        if entry.after is not None:
            before = verdicts[entry.after]
            if isinstance(before, Accepted):
                condition = Condition(before.sns[-1], condition.scope, condition.key)
            else:
                refused = before
        actual = last if condition.scope is Scope.SEGMENT else keys.get(condition.key or b"", EMPTY)
        is_awaited = entry.after is not None and actual is condition.expected
        if refused is None and not is_awaited and not holds(condition, actual, base + offset, entry.lineage):
            refused = Refused(condition.expected, actual)
        if refused is None and entry.monotonic_ids:
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


def _falling(transaction_ids: Sequence[int | None], last: int | None) -> NonMonotonicId | None:
    for number in transaction_ids:
        if number is not None:
            if last is not None and number < last:
                return NonMonotonicId(number, last)
            last = number
    return None


class RoundBuilder:
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
        if entry.monotonic_ids and _falling(entry.transaction_ids, self._last_id) is not None:
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


# Conditions of a transaction, and obstacles to sealing a segment.
#
# They are carried by the COMMIT frame and decided by the leader; :func:`holds` says which hold.
#
# Source: DistributedLog CAS proposal, applied to a transaction as a whole.


CONDITIONS_MAX: Final = 1_000
"""Most conditions of a transaction; its leader looks at the log for each."""
KEY_BYTES_MAX: Final = 128 * 1024
"""Most bytes of the keys of a transaction's conditions, together; its manifest stays below a megabyte with them."""


@dataclass(frozen=True, slots=True)
class StreamCondition:
    """A condition of a transaction.

    Attributes:
        stream: Place of the stream in the BEGIN frame.
        condition: What is expected of the lineage of its key.
    """

    stream: int
    condition: Condition


@dataclass(frozen=True, slots=True)
class RefusedCondition:
    """Condition that did not hold where the transaction would have been merged.

    Attributes:
        stream: scope/stream.
        key: Its key.
        expected: The expected SN.
        actual: The SN found; ANY if the record was truncated.
    """

    stream: str
    key: bytes | None
    expected: SN
    actual: SN

    def __str__(self) -> str:
        key = "" if self.key is None else f" with key {self.key!r:.200}"
        return f"525: {self.stream}{key}: expected {self.expected}, the log has {self.actual}"


# Obstacles to sealing: open native transactions of other producers, and missing leaders.

NAMED_MAX: Final = 5
"""Number of obstacles of a kind that are named."""


@dataclass(frozen=True, slots=True)
class ForeignTransaction:
    """Open native transaction on a partition, which cannot be sealed before it ends.

    Attributes:
        topic: The topic.
        producer_id, producer_epoch: Its producer.
        start_offset: Offset of its first record.
        coordinator_epoch: Epoch of the transaction coordinator that wrote its last marker there; -1 if there is none.
        transactional_id: Its id; empty if no transaction coordinator knows or tells it.
        partition: Number of the partition.
    """

    topic: str
    producer_id: int
    producer_epoch: int
    start_offset: int
    coordinator_epoch: int = -1
    transactional_id: str = ""
    partition: int = 0

    def __str__(self) -> str:
        name = f"transactional id {self.transactional_id}" if self.transactional_id else "no known transactional id"
        return (
            f"producer {self.producer_id}, epoch {self.producer_epoch}, {name}, open on "
            f"{show_partition((self.topic, self.partition))} since offset {self.start_offset}"
        )


@dataclass(frozen=True, slots=True)
class Leaderless:
    """Partition whose leader is unreachable; only the leader knows where its log ends."""

    topic: str
    partition: int = 0

    def __str__(self) -> str:
        return f"the leader of topic {show_partition((self.topic, self.partition))}, which cannot be reached"


@dataclass(frozen=True, slots=True)
class OwnTransaction:
    """Decided native transaction of the group's leader, without its marker on the partition."""

    topic: str
    start_offset: int
    partition: int = 0

    def __str__(self) -> str:
        return f"the marker of the leader's own native transaction on {show_partition((self.topic, self.partition))}"


@dataclass(frozen=True, slots=True)
class Unreplicated:
    """Topic that takes nothing, so not the marker that a seal ends with."""

    topic: str

    def __str__(self) -> str:
        return f"topic {self.topic}, which has too few in-sync replicas"


Obstacle = ForeignTransaction | Leaderless | OwnTransaction | Unreplicated
"""Obstacle that a seal has to wait for."""


def with_own(found: Iterable[Obstacle], transactional_ids: Collection[str]) -> list[Obstacle]:
    """Return obstacles; native transactions of a leader's own ids, not to be aborted, as such."""
    return [
        OwnTransaction(item.topic, item.start_offset, item.partition)
        if isinstance(item, ForeignTransaction) and item.transactional_id in transactional_ids
        else item
        for item in found
    ]


def name_some(found: Collection[Obstacle]) -> str:
    """Describe obstacles for people; empty if there are none."""
    foreign = sorted(str(item) for item in found if isinstance(item, ForeignTransaction))
    away = sorted(str(item) for item in found if not isinstance(item, ForeignTransaction))
    named = [f"native transactions of others: {_some(foreign)}"] if foreign else []
    return " and ".join([*named, _some(away)] if away else named)


def _some(names: Sequence[str]) -> str:
    named = "; ".join(names[:NAMED_MAX])
    return named if len(names) <= NAMED_MAX else f"{named}; and {len(names) - NAMED_MAX} more"
