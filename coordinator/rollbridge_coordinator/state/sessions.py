"""Search for sessions of clients that nobody needs: how far a leader has come with it. Pure.

There may be a million of them, so each turn of the leader does a little. What a stage needs of those before it is here;
a new leader begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from rollbridge.model.names import Partition

READ_AT_ONCE: Final = 100
"""Records read in one request; each may take up to 1 MiB."""
NAMES_AT_ONCE: Final = 5_000
"""Names looked up in memory in one turn."""


class SearchStage(Enum):
    """What is done next."""

    REST = "nothing, until the next search is due"
    EXAMINE = "find the records that may go"
    LEARN = "know those that stay, before the floor ends what is not known"
    DELETE = "delete those that may go"


@dataclass(slots=True)
class SessionSearch:
    """State of the search.

    Attributes:
        stage: What is done next.
        names: Clients to be looked at in this stage.
        due: Clients whose records may go.
        highest: Highest epoch of these.
        floor: Floor on record, below which everything that is not known will be over.
        began_ms: When the search began, by the lowest clock.
        learned: Sessions on record of which this leader had not heard, by client.
        barrier: Ends of the buffers after these were read.
        strangers: Clients without a record of which frames had told, when the search began.
        count: Records there are, when they were listed last, without those that have gone since; -1 if not known.
    """

    stage: SearchStage = SearchStage.REST
    names: list[str] = field(default_factory=list)
    due: list[str] = field(default_factory=list)
    highest: int = 0
    floor: int = 0
    began_ms: int = 0
    learned: dict[str, int] = field(default_factory=dict)
    barrier: Mapping[Partition, int] | None = None
    strangers: list[str] = field(default_factory=list)
    count: int = -1

    def begin(self, names: list[str], strangers: list[str], now_ms: int) -> None:
        """Begin a search in all records."""
        self.rest()
        self.stage, self.names, self.count = SearchStage.EXAMINE, names, len(names)
        self.strangers, self.began_ms = strangers, now_ms

    def find(self, client: str, epoch: int) -> None:
        """Note a record that may go."""
        self.due.append(client)
        self.highest = max(self.highest, epoch)

    def take(self, is_wanted: Callable[[str], bool]) -> list[str]:
        """Take names away, as many as one turn can do; return those whose records are wanted."""
        wanted: list[str] = []
        for _ in range(min(NAMES_AT_ONCE, len(self.names))):
            name = self.names.pop()
            if is_wanted(name):
                wanted.append(name)
                if len(wanted) >= READ_AT_ONCE:
                    break
        return wanted

    def rest(self) -> None:
        """End the search."""
        self.stage, self.names, self.due, self.highest = SearchStage.REST, [], [], 0
        self.learned, self.barrier, self.strangers = {}, None, []
