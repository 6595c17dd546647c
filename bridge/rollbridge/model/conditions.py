"""Conditions of a transaction, the segment tails that decide them, and obstacles to sealing a segment.

They are carried by the COMMIT frame and decided by the leader; :mod:`rollbridge.model.cas` says what holds.

Source: DistributedLog CAS proposal, applied to a transaction as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from rollbridge.model.cas import Condition
from rollbridge.model.names import show_partition
from rollbridge.model.sn import SN

CONDITIONS_MAX: Final = 1_000
"""Most conditions of a transaction; its leader looks at the log for each."""
KEY_BYTES_MAX: Final = 128 * 1024
"""Most bytes of the keys of a transaction's conditions, together; its manifest stays below a megabyte with them."""


@dataclass(frozen=True, slots=True)
class StreamCondition:
    """A condition of a transaction.

    Attributes:
        stream: Place of the stream in the BEGIN frame.
        condition: What is expected of the course of its key.
    """

    stream: int
    condition: Condition


@dataclass(frozen=True, slots=True)
class RefusedCondition:
    """A condition that did not hold where the transaction would have been merged.

    Attributes:
        stream: scope/stream.
        key: Its key.
        expected: What it expected.
        actual: What stands there; ANY if that was truncated away.
    """

    stream: str
    key: bytes | None
    expected: SN
    actual: SN

    def __str__(self) -> str:
        key = "" if self.key is None else f" with key {self.key!r:.200}"
        return f"525: {self.stream}{key}: expected {self.expected}, the log has {self.actual}"


# Segment tail: the last committed record, the last one of each key seen, and the last transaction id that a user gave.
# Everything below ``end`` is decided and was examined, so a writer reads no offset twice.

KEYS_MAX: Final = 50_000
"""Most keys that are remembered of one segment; beyond it, they are collected anew."""


class Seen(NamedTuple):
    """A committed record, as far as conditions look at it."""

    offset: int
    key: bytes | None
    sn: SN


class Examined:
    """A growing window of one segment; not thread-safe.

    Attributes:
        keys_from: From here to ``end``, the last record of each key is known.
        end: Every offset below it is decided.
        last: The last committed record below ``end``; None if there is none at or after ``last_from``.
        last_id: The last transaction id that a user gave a record below ``end``; None if there is none since
            ``last_from``.
        last_from: Where looking for ``last`` and ``last_id`` began.
    """

    def __init__(self, start: int, keys_max: int = KEYS_MAX) -> None:
        self.keys_from = start
        self.last_from = start
        self.end = start
        self.last: SN | None = None
        self.last_id: int | None = None
        self._keys: dict[bytes, SN] = {}
        self._keys_max = keys_max

    def extend(self, start: int, end: int, records: Iterable[Seen]) -> None:
        """Take note of what stands in ``start..end-1``; ``start`` may only leave a gap that was truncated away.

        What stood in a gap nobody knows, so what was known from before it is the last of nothing any more.
        """
        if start > self.end:
            self.last = self.last_id = None
            self._keys.clear()
            self.keys_from = self.last_from = start
        for record in records:
            self.last = record.sn
            if record.sn.transaction_id is not None:
                self.last_id = record.sn.transaction_id
            if record.key is not None:
                self._keys[record.key] = record.sn
        self.end = max(end, self.end)
        if len(self._keys) > self._keys_max:
            self._keys.clear()
            self.keys_from = self.end

    def prepend(self, start: int, records: Iterable[Seen]) -> None:
        """Take note of what stands before the window, from ``start`` on, without a gap."""
        last: SN | None = None
        last_id: int | None = None
        older: dict[bytes, SN] = {}
        for record in records:
            last = record.sn
            if record.sn.transaction_id is not None:
                last_id = record.sn.transaction_id
            if record.key is not None:
                older[record.key] = record.sn
        if self.last is None:
            self.last = last
        if self.last_id is None:
            self.last_id = last_id
        if self.last_from == self.keys_from and len(older) + len(self._keys) <= self._keys_max:
            self._keys = older | self._keys
            self.keys_from = start
        self.last_from = start

    def last_of(self, key: bytes) -> SN | None:
        """Return SN of the last record with a key between ``keys_from`` and ``end``."""
        return self._keys.get(key)


# Obstacles to sealing: open native transactions of other producers, and missing leaders.

NAMED_MAX: Final = 5
"""Number of obstacles of a kind that are named."""


@dataclass(frozen=True, slots=True)
class ForeignTransaction:
    """A native transaction that is open on a partition, which cannot be sealed before it has ended.

    Attributes:
        topic: The topic.
        producer_id, producer_epoch: Who writes it.
        start_offset: Where its first record stands.
        coordinator_epoch: Of the transaction coordinator that wrote its last marker there; -1 if none did.
        transactional_id: Its id; empty if no transaction coordinator knows it, or tells us.
        partition: Which partition of the topic.
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
    """A partition whose leader cannot be reached now; where its log ends is told by nobody else."""

    topic: str
    partition: int = 0

    def __str__(self) -> str:
        return f"the leader of topic {show_partition((self.topic, self.partition))}, which cannot be reached"


Obstacle = ForeignTransaction | Leaderless
"""Obstacle that a seal has to wait for."""


def name_some(found: Collection[Obstacle]) -> str:
    """Return who holds native transactions open and which leaders are away, for people; empty if it is nobody."""
    foreign = sorted(str(item) for item in found if isinstance(item, ForeignTransaction))
    away = sorted(str(item) for item in found if not isinstance(item, ForeignTransaction))
    named = [f"native transactions of others: {_some(foreign)}"] if foreign else []
    return " and ".join([*named, _some(away)] if away else named)


def _some(names: Sequence[str]) -> str:
    named = "; ".join(names[:NAMED_MAX])
    return named if len(names) <= NAMED_MAX else f"{named}; and {len(names) - NAMED_MAX} more"
