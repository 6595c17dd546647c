"""Counters of transaction ids: how a group's ids differ from all others, and what of a counter's node is believed.

The 96 bits of a transaction's counter are ``group number(32) | count(64)``. Coordinators number the groups, from a node
that nobody else may write; the count comes from a node of the group, which its members write. So whatever they write
there, ids of other groups stay apart, and go on. Number 0 is that of ids from the counter that all groups shared in
earlier versions; a group that is older than that, or that was repaired, also has ids of *former* numbers.

Clients reserve counts between the ``floor`` and the ``ceiling`` in the group's record, which only coordinators write:
outside of these the node is damaged, and the group's leader sets it right. An id whose count the node has not given out
is forged. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rollbridge.model.errors import CorruptDataError

NUMBER_MAX: Final = (1 << 32) - 1
"""The highest number of a group."""
COUNT_BITS: Final = 64
COUNT_MAX: Final = (1 << 62) - 1
"""The highest count of a group; snapshots show counts in 63 bits."""
SHARED_MAX: Final = COUNT_MAX
"""The highest counter that the shared node may hold."""
FIRST_COUNT: Final = 1
STRIDE: Final = 1 << 40
"""How far the ceiling is above what is known to be given out; a million transactions a second take 12 days for it."""
JUMP: Final = 1 << 32
"""How far a counter that is set right goes beyond all that was seen in use: nobody knows which blocks are reserved."""
START_MAX: Final = 1 << 53
"""The count of an older group begins beyond the shared counter, since connections are told apart by 55 bits of it."""
NOT_GIVEN_OUT: Final = "its id was not given out by the counter of its group: begin it again"
_DIGITS_MAX: Final = 20
"""No number that is believed is longer; Python refuses to convert thousands of digits, and takes long for fewer."""
_COUNTER: Final = slice(4, 16)
_SHOWN: Final = 40


def parse_number(raw: bytes | None, most: int, least: int = 0) -> int | None:
    """The decimal number in a node's value; None if it is none between the bounds, whatever it is."""
    if raw is None or not 0 < len(raw) <= _DIGITS_MAX or not raw.isdigit():
        return None
    number = int(raw)
    return number if least <= number <= most else None


def need_number(path: str, raw: bytes | None, most: int, what_to_do: str) -> int:
    """The same for a node that is needed, of which ``what_to_do`` says how it is put right.

    Raises:
        CorruptDataError: it holds no such number.
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
    """The counter of an id, from the number of its group and a count."""
    return number << COUNT_BITS | count


def split_counter(transaction: bytes) -> tuple[int, int]:
    """The number of the group and the count in the 16 bytes of an id."""
    counter = int.from_bytes(transaction[_COUNTER], "big")
    return counter >> COUNT_BITS, counter & (1 << COUNT_BITS) - 1


class Note(NamedTuple):
    """What a leader has seen of the counters, as its group's journal keeps it.

    The versions count how often the nodes were written, and can not be lowered by those who may write them: where one
    is lower, ZooKeeper was set back; where the value alone is, somebody has written nonsense.
    """

    number: int
    value: int
    version: int
    shared_value: int = 0
    shared_version: int = -1

    def to_text(self) -> bytes:
        """As it stands in the journal."""
        return " ".join(map(str, self)).encode()

    @classmethod
    def from_text(cls, raw: bytes | None) -> Note | None:
        """The inverse; None if there is none, or none of a version that we know."""
        try:
            return None if raw is None or len(raw) > 200 else cls(*(int(item) for item in raw.split()))
        except (TypeError, ValueError):
            return None


NOTHING: Final = Note(0, 0, -1)


@dataclass(slots=True)
class GroupCounter:
    """What the leader of a group knows of its counter.

    Attributes:
        number: The number of the group; 0 before it has one: then all ids are believed.
        formers: Those that it had before.
        ceiling: Up to where clients reserve.
        note: What was seen last of the nodes.
        noted: What of it the journal holds.
    """

    number: int = 0
    formers: frozenset[int] = frozenset()
    ceiling: int = 0
    note: Note = NOTHING
    noted: Note | None = None
    _range: tuple[Note, int, bytes, bytes] = field(init=False, default=(NOTHING, 0, b"", b""))
    """Between what ids of the group are, but for their epochs; for which note and number."""

    @property
    def bound(self) -> int:
        """Above the counters of all ids that were given out, as far as is known."""
        return counter_of(self.number, self.note.value) if self.number else 1 << 96

    def is_given(self, transaction: bytes) -> bool:
        """Whether an id was given out, as far as is known; ids of former numbers can not be told from forged ones.

        These are never given out again, so nobody else's are taken by believing them.
        """
        note, of, low, high = self._range
        if note is not self.note or of != self.number:
            low, high = (counter_of(self.number, count).to_bytes(12, "big") for count in (0, self.note.value))
            self._range = self.note, self.number, low, high
        if low <= transaction[_COUNTER] < high:
            return True
        number, _ = split_counter(transaction)
        if number == self.number:
            return not number
        return not self.number or not number or number in self.formers

    def is_ours(self, transaction: bytes) -> bool:
        """Whether an id has the number of the group, so that a newer look at the counter may tell more of it."""
        return split_counter(transaction)[0] == self.number


def shared_count(transaction: bytes) -> int:
    """The counter of an id that the shared counter may have given out; -1 of others."""
    number, count = split_counter(transaction)
    return -1 if number or count >= SHARED_MAX else count
