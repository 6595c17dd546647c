"""Identifiers: segments, transactions, parts and local sequence numbers, each with its bit layout.

Source: PDP-24, "Implementation Details": ``long segmentId = 32bit<epoch>32bit<segmentNumber>``;
``UUID txn id = 16 bit epoch + 96 bit counter``.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from functools import total_ordering
from typing import Final, NewType, Self

from rollbridge.model.errors import InvalidRequestError

Epoch = NewType("Epoch", int)
SegmentNumber = NewType("SegmentNumber", int)
PartId = NewType("PartId", int)

SEGMENT_NUMBER_MAX: Final = (1 << 31) - 1
EPOCH_MAX: Final = (1 << 31) - 1
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
    """One segment: ``number`` (primary: which key range lineage) and ``epoch`` (secondary: which incarnation).

    Packs into 64 bits as ``epoch << 32 | number`` and sorts so.
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

    def __int__(self) -> int:
        return self.epoch << 32 | self.number

    def __lt__(self, other: SegmentId) -> bool:
        return int(self) < int(other)

    def __str__(self) -> str:
        return f"{self.number}.#epoch.{self.epoch}"


@total_ordering
@dataclass(frozen=True, slots=True)
class TransactionId:
    """A transaction: 16 bits of its reference epoch, 96 bits of a counter that is unique in the cluster.

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
        """An id as callers may give it: as it is, or as text; raises as :meth:`parse` does."""
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
    """The 64-bit local sequence number of a record: the writing part (23 bits) and its count within it (40 bits).

    For the ordinary one-process transaction the part is 0, so the local sequence number is the plain count from 0.

    Source: DistributedLog transactions, "local sequence number"; parts are our extension for several writers.
    """
    if not 0 <= part <= PART_MAX:
        raise InvalidRequestError(f"part {part} is not in 0..{PART_MAX}")
    if not 0 <= count <= COUNT_MAX:
        raise InvalidRequestError(f"local sequence count {count} is not in 0..{COUNT_MAX}")
    return part << COUNT_BITS | count


def split_local_sequence(value: int) -> tuple[int, int]:
    """The part and the count of a local sequence number; the inverse of :func:`local_sequence`."""
    return value >> COUNT_BITS, value & COUNT_MAX
