"""What the transactions of one connection share, and what a begun transaction is derived from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rollbridge.client.commit_line import CommitLines
from rollbridge.client.outcomes import OutcomeTail
from rollbridge.client.sender import Sender
from rollbridge.client.slots import FrameLimits
from rollbridge.model.frames import BeginFrame
from rollbridge.model.identifiers import TransactionId
from rollbridge.model.names import GroupName
from rollbridge.model.routing import Route
from rollbridge.zookeeper.catalog import Catalog


@dataclass(frozen=True, slots=True)
class Runtime:
    """The machinery of one connection."""

    sender: Sender
    catalog: Catalog
    outcomes: OutcomeTail
    limits: FrameLimits
    commit_timeout_s: float
    commits: CommitLines
    who_leads: Callable[[GroupName], str]
    """In half a sentence why a group may not answer."""
    events: Callable[[GroupName, TransactionId], Sequence[str]]
    """The last events of a transaction, one line for each, if its leader tells them within a moment; else none."""


@dataclass(frozen=True)
class Plan:
    """What all transactions that begin alike have in common."""

    group: GroupName
    begin: BeginFrame
    routes: tuple[Route, ...]
    generation: int
    """Of the catalog when this was derived."""
    begin_value: bytes = field(init=False)
    buffers: tuple[tuple[str, int], ...] = field(init=False)
    """Topic and number of partitions of each stream's buffer."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "begin_value", self.begin.encode())
        object.__setattr__(
            self, "buffers", tuple((route.buffer_topic, route.buffer_partitions) for route in self.routes)
        )

    @cached_property
    def id_prefix(self) -> int:
        """The upper bits of the ids: the reference epoch of the first stream."""
        return TransactionId.of(self.routes[0].epoch, 0).value
