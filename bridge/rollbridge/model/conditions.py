"""Conditions of a transaction, and obstacles to sealing a segment.

They are carried by the COMMIT frame and decided by the leader; :mod:`rollbridge.model.cas` says what holds.

Source: DistributedLog CAS proposal, applied to a transaction as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

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
