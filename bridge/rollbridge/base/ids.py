"""Identifiers: segments, transactions, parts and local sequence numbers, each with its bit layout.

The 96-bit counter of a transaction id is ``group number(32) | count(64)``. Coordinators number the groups, from a node
that only they may write; the count comes from a node of the group, which its members write. So whatever they write
there, other groups' ids stay distinct. Number 0 marks ids from the counter that all groups shared in earlier versions;
a group that is older than that, or that was repaired, also has ids of *former* numbers. Clients reserve counts between
the ``floor`` and the ``ceiling`` in the group's record, which only coordinators write: a node outside of these is
damaged, and the group's leader repairs it. An id whose count the node has not issued is forged. Pure.

Source: PDP-24, "Implementation Details": ``long segmentId = 32bit<epoch>32bit<segmentNumber>``;
``UUID txn id = 16 bit epoch + 96 bit counter``.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from functools import total_ordering
from typing import Final, NamedTuple, NewType, Self

from rollbridge.base.errors import CorruptDataError, InvalidRequestError

Epoch = NewType("Epoch", int)
SegmentNumber = NewType("SegmentNumber", int)
PartId = NewType("PartId", int)

SEGMENT_NUMBER_MAX: Final = (1 << 31) - 1
EPOCH_MAX: Final = (1 << 31) - 1
PREPARED_FIRST: Final = 1 << 30
"""First number of segments that are prepared for large transactions, before it is known in which epoch they begin. They
are counted for themselves, so no other segment ever has the number of one."""
COUNTER_MAX: Final = (1 << 96) - 1

PART_BITS: Final = 23
COUNT_BITS: Final = 40
PART_MAX: Final = (1 << PART_BITS) - 1
COUNT_MAX: Final = (1 << COUNT_BITS) - 1
OWNER_PART: Final = PartId(0)

_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(-?)[0-9a-fA-F]{4}\1[0-9a-fA-F]{4}\1[0-9a-fA-F]{4}\1[0-9a-fA-F]{12}")
"""Stricter than ``uuid.UUID``, which also takes braces, ``urn:uuid:`` and hyphens anywhere."""


@total_ordering
@dataclass(frozen=True, slots=True)
class SegmentId:
    """Segment id: ``number`` (primary id, names the key range) and ``epoch`` (secondary id, names the incarnation).

    Packs into 64 bits as ``epoch << 32 | number``, and sorts by that.
    """

    number: SegmentNumber
    epoch: Epoch

    def __post_init__(self) -> None:
        if not 0 <= self.number <= SEGMENT_NUMBER_MAX:
            raise InvalidRequestError(f"segment number {self.number} is not in 0..{SEGMENT_NUMBER_MAX}")
        if not 0 <= self.epoch <= EPOCH_MAX:
            raise InvalidRequestError(f"segment epoch {self.epoch} is not in 0..{EPOCH_MAX}")

    @classmethod
    def of(cls, number: int, epoch: int) -> Self:
        """Build from plain integers."""
        return cls(SegmentNumber(number), Epoch(epoch))

    @classmethod
    def from_int(cls, value: int) -> Self:
        """Unpack from 64 bits; the inverse of ``int(segment_id)``."""
        return cls(SegmentNumber(value & 0xFFFF_FFFF), Epoch(value >> 32))

    @property
    def is_prepared(self) -> bool:
        """True for a segment that was prepared for a large transaction."""
        return self.number >= PREPARED_FIRST

    def __int__(self) -> int:
        return self.epoch << 32 | self.number

    def __lt__(self, other: SegmentId) -> bool:
        return int(self) < int(other)

    def __str__(self) -> str:
        return f"{self.number}.#epoch.{self.epoch}"


@total_ordering
@dataclass(frozen=True, slots=True)
class TransactionId:
    """Transaction id: 16 bits of its reference epoch, 96 bits of a counter that is unique in the cluster.

    Laid out in a UUID as ``epoch(16) | zero(16) | counter(96)``, so ids sort by counter within an epoch. A reference
    epoch beyond 65,535 keeps its low 16 bits here; the BEGIN frame carries the whole number for every stream.
    """

    value: int

    def __post_init__(self) -> None:
        if not 0 <= self.value < 1 << 128:
            raise InvalidRequestError(f"transaction id {self.value:#x} has more than 128 bits")
        if self.value >> 96 & 0xFFFF:
            raise InvalidRequestError(
                f"{uuid.UUID(int=self.value)} is not a transaction id: bits 16 to 31 of one are zero"
            )

    @classmethod
    def of(cls, epoch: int, counter: int) -> Self:
        """Build from the reference epoch (its low 16 bits are kept) and the counter."""
        if not 0 <= counter <= COUNTER_MAX:
            raise InvalidRequestError(f"transaction counter {counter} has more than 96 bits")
        return cls((epoch & 0xFFFF) << 112 | counter)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Unpack 16 bytes, big-endian."""
        if len(raw) != 16:
            raise InvalidRequestError(f"a transaction id has 16 bytes, not {len(raw)}")
        return cls(int.from_bytes(raw, "big"))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse what ``str()`` prints (a UUID, with or without hyphens)."""
        if not _UUID.fullmatch(text):
            raise InvalidRequestError(
                f"{text!r} is not a transaction id (a UUID such as 00010000-0000-0000-0000-00000000002a)"
            )
        return cls(int(text.replace("-", ""), 16))

    @classmethod
    def of_any(cls, transaction: TransactionId | str) -> TransactionId:
        """Return an id given as such or as text; raise as :meth:`parse` does."""
        return cls.parse(transaction) if isinstance(transaction, str) else transaction

    @property
    def epoch(self) -> int:
        """Low 16 bits of the reference epoch of the transaction's first stream."""
        return self.value >> 112

    @property
    def counter(self) -> int:
        """The 96-bit counter."""
        return self.value & COUNTER_MAX

    @property
    def bytes(self) -> bytes:
        """16 bytes, big-endian; sorts as the id does."""
        return self.value.to_bytes(16, "big")

    def __lt__(self, other: TransactionId) -> bool:
        return self.value < other.value

    def __str__(self) -> str:
        return str(uuid.UUID(int=self.value))


def local_sequence(part: int, count: int) -> int:
    """Return a record's 64-bit local sequence number: the writing part (23 bits) and its count there (40 bits).

    For the ordinary one-process transaction the part is 0, so the local sequence number is the plain count from 0.

    Source: DistributedLog transactions, "local sequence number"; parts are our extension for several writers.
    """
    if not 0 <= part <= PART_MAX:
        raise InvalidRequestError(f"part {part} is not in 0..{PART_MAX}")
    if not 0 <= count <= COUNT_MAX:
        raise InvalidRequestError(f"local sequence count {count} is not in 0..{COUNT_MAX}")
    return part << COUNT_BITS | count


def split_local_sequence(value: int) -> tuple[int, int]:
    """Return the part and the count of a local sequence number; the inverse of :func:`local_sequence`."""
    return value >> COUNT_BITS, value & COUNT_MAX


# Counters of transaction ids.


NUMBER_MAX: Final = (1 << 32) - 1
"""Highest number of a group."""
ISSUED_BITS: Final = 64
ISSUED_MAX: Final = (1 << 62) - 1
"""Highest count of a group; snapshots show counts in 63 bits."""
SHARED_MAX: Final = ISSUED_MAX
"""Highest counter that the shared node may hold."""
FIRST_COUNT: Final = 1
STRIDE: Final = 1 << 40
"""Distance of the ceiling above the highest issued count; a million transactions a second use it up in 12 days."""
JUMP: Final = 1 << 32
"""Distance of a repaired counter above all counts seen in use, since the reserved blocks are unknown."""
START_MAX: Final = 1 << 53
"""Limit on the shared counter, beyond which an older group's count begins: connections are told apart by 55 bits."""
NOT_GIVEN_OUT: Final = "its id was not given out by the counter of its group: begin it again"
BEGUN_TWICE: Final = "two clients have begun it, as after ZooKeeper was set back: begin it again"
_DIGITS_MAX: Final = 20
"""Longest number accepted; Python refuses to convert thousands of digits, and takes long for fewer."""
COUNTER_BYTES: Final = slice(4, 16)
"""Bytes of the counter within the 16 bytes of an id."""
_SHOWN: Final = 40


def parse_number(raw: bytes | None, most: int, least: int = 0) -> int | None:
    """Parse the decimal number in a node's value; return None for any other value, or one out of bounds."""
    if raw is None or not 0 < len(raw) <= _DIGITS_MAX or not raw.isdigit():
        return None
    number = int(raw)
    return number if least <= number <= most else None


def need_number(path: str, raw: bytes | None, most: int, what_to_do: str) -> int:
    """Parse the number in a required node; ``what_to_do`` tells in the error how to repair it.

    Raises:
        CorruptDataError: The node holds no such number.
    """
    number = parse_number(raw, most)
    if number is None:
        holds = "does not exist" if raw is None else f"holds {raw[:_SHOWN]!r} ({len(raw)} bytes)"
        raise CorruptDataError(
            f"ZooKeeper node {path} {holds} where a decimal number up to {most} is expected; nothing was written; "
            f"{what_to_do}"
        )
    return number


def counter_of(number: int, count: int) -> int:
    """Return the counter of an id, from the number of its group and a count."""
    return number << ISSUED_BITS | count


def split_counter(transaction: bytes) -> tuple[int, int]:
    """Return the number of the group and the count in the 16 bytes of an id."""
    counter = int.from_bytes(transaction[COUNTER_BYTES], "big")
    return counter >> ISSUED_BITS, counter & (1 << ISSUED_BITS) - 1


class CounterCheckpoint(NamedTuple):
    """Counters as last seen by a leader, kept in its group's journal.

    The znode versions count writes, and clients that may write the nodes cannot lower them: a lower version means that
    ZooKeeper was restored, a lower value alone that a client wrote nonsense.
    """

    number: int
    value: int
    version: int
    shared_value: int = 0
    shared_version: int = -1

    def to_text(self) -> bytes:
        """Return the text for the journal."""
        return " ".join(map(str, self)).encode()

    @classmethod
    def from_text(cls, raw: bytes | None) -> CounterCheckpoint | None:
        """Parse the text of :meth:`to_text`; return None if there is none, or something else.

        What a newer version added behind it is passed over.
        """
        try:
            return None if raw is None or len(raw) > 200 else cls(*(int(item) for item in raw.split()[: len(NOTHING)]))
        except (TypeError, ValueError):
            return None


NOTHING: Final = CounterCheckpoint(0, 0, -1)


@dataclass(slots=True)
class GroupCounter:
    """Counter of a group as its leader knows it.

    Attributes:
        number: Number of the group; 0 before it has one: then all ids are accepted.
        deleted_streams: Former numbers of the group.
        ceiling: Count up to which clients reserve.
        note: Nodes as last seen.
        noted: Note in the journal.
    """

    number: int = 0
    deleted_streams: frozenset[int] = frozenset()
    ceiling: int = 0
    note: CounterCheckpoint = NOTHING
    noted: CounterCheckpoint | None = None
    _range: tuple[CounterCheckpoint, int, bytes, bytes] = field(init=False, default=(NOTHING, 0, b"", b""))
    """Bounds of the group's ids without their epochs, cached for a note and number."""

    @property
    def bound(self) -> int:
        """Bound above the counters of all issued ids, as far as is known."""
        return counter_of(self.number, self.note.value) if self.number else 1 << 96

    def is_given(self, transaction: bytes) -> bool:
        """Return whether an id was issued, as far as is known; true for all ids of former numbers.

        Forged ids of a former number cannot be recognised, but are never issued again, so they take no one else's.
        """
        note, of, low, high = self._range
        if note is not self.note or of != self.number:
            low, high = (counter_of(self.number, count).to_bytes(12, "big") for count in (0, self.note.value))
            self._range = self.note, self.number, low, high
        if low <= transaction[COUNTER_BYTES] < high:
            return True
        number, _ = split_counter(transaction)
        if number == self.number:
            return not number
        return not self.number or not number or number in self.deleted_streams

    def is_ours(self, transaction: bytes) -> bool:
        """Return whether an id has the number of the group, so that a fresh read of the counter may decide it."""
        return split_counter(transaction)[0] == self.number


def shared_count(transaction: bytes) -> int:
    """Return the counter of an id that the shared counter may have issued; -1 for others."""
    number, count = split_counter(transaction)
    return -1 if number or count >= SHARED_MAX else count
