"""What keeps a segment from being sealed: native transactions of others that are open there, or nobody leads it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

NAMED_MAX: Final = 5
"""How many obstacles of a kind are named."""


@dataclass(frozen=True, slots=True)
class ForeignTransaction:
    """A native transaction that is open on a topic; no topic can be sealed before it has ended.

    Attributes:
        topic: The topic.
        producer_id, producer_epoch: Who writes it.
        start_offset: Where its first record stands.
        coordinator_epoch: Of the transaction coordinator that wrote its last marker there; -1 if none did.
        transactional_id: Its id; empty if no transaction coordinator knows it, or tells us.
    """

    topic: str
    producer_id: int
    producer_epoch: int
    start_offset: int
    coordinator_epoch: int = -1
    transactional_id: str = ""

    def __str__(self) -> str:
        name = f"transactional id {self.transactional_id}" if self.transactional_id else "no known transactional id"
        return (
            f"producer {self.producer_id}, epoch {self.producer_epoch}, {name}, open on {self.topic} since offset "
            f"{self.start_offset}"
        )


@dataclass(frozen=True, slots=True)
class Leaderless:
    """A topic whose leader can not be reached now; where its log ends is told by nobody else."""

    topic: str

    def __str__(self) -> str:
        return f"the leader of topic {self.topic}, which can not be reached"


Obstacle = ForeignTransaction | Leaderless
"""For what a seal has to wait."""


def name_some(found: Collection[Obstacle]) -> str:
    """Return who holds native transactions open and which leaders are away, for people; empty if it is nobody."""
    foreign = sorted(str(item) for item in found if isinstance(item, ForeignTransaction))
    away = sorted(str(item) for item in found if not isinstance(item, ForeignTransaction))
    named = [f"native transactions of others: {_some(foreign)}"] if foreign else []
    return " and ".join([*named, _some(away)] if away else named)


def _some(names: Sequence[str]) -> str:
    named = "; ".join(names[:NAMED_MAX])
    return named if len(names) <= NAMED_MAX else f"{named}; and {len(names) - NAMED_MAX} more"
