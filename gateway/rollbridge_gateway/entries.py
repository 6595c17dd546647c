"""What is on record of a transactional id: the newest pair, and what no transaction says about its producer.

One small node in ZooKeeper for each id. It is written when a pair is handed out by InitProducerId, not by each
transaction: with transactions v2 the epochs above the one on record follow from the labels of the transactions that
have ended under them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rollbridge_gateway.identity import Pair
from rollbridge_gateway.producers import PairEnd, Previous


@dataclass(frozen=True, slots=True)
class Entry:
    """A transactional id on record.

    Attributes:
        transactional_id: As its producer spells it; its client name may be a hash.
        pair: Lowest pair that is not over. With transactions v2 later epochs may have been handed out.
        timeout_ms: Its ``transaction.timeout.ms``: the lease of its transactions; -1 for as long as is allowed.
        previous: The pair before ``pair``, if a request with it may come again.
        kept: Pair of a prepared transaction that was left open for ``pair`` to end (KIP-939).
        home: A stream of the group that it wrote to last, for transactions of offsets alone; empty if there is none.
        written_ms: When this was written, ms since 1970.
    """

    transactional_id: str
    pair: Pair
    timeout_ms: int
    previous: Previous | None = None
    kept: Pair | None = None
    home: str = ""
    written_ms: int = 0

    def encode(self, gateway: str = "") -> bytes:
        """Return the value of its node; ``gateway`` is the name of who writes it, for whoever looks for it."""
        document: dict[str, Any] = {
            "id": self.transactional_id,
            "pair": list(self.pair),
            "timeout_ms": self.timeout_ms,
            "home": self.home,
            "written_ms": self.written_ms,
            "gateway": gateway,
        }
        if self.previous is not None:
            document["previous"] = [*self.previous.pair, self.previous.end.value]
        if self.kept is not None:
            document["kept"] = list(self.kept)
        return json.dumps(document).encode()

    @classmethod
    def decode(cls, value: bytes) -> Entry:
        """Return what a node says; fields of later versions are skipped.

        Raises:
            ValueError: it is none.
        """
        try:
            said = json.loads(value)
            previous, kept = said.get("previous"), said.get("kept")
            return cls(
                transactional_id=str(said["id"]),
                pair=_pair(said["pair"]),
                timeout_ms=int(said["timeout_ms"]),
                previous=None if previous is None else Previous(_pair(previous[:2]), PairEnd(previous[2])),
                kept=None if kept is None else _pair(kept),
                home=str(said.get("home", "")),
                written_ms=int(said.get("written_ms", 0)),
            )
        except (KeyError, TypeError, IndexError, AttributeError) as fault:
            raise ValueError(f"not an entry of a transactional id: {fault!r}") from fault


def _pair(said: list[int]) -> Pair:
    producer_id, epoch = said
    return Pair(int(producer_id), int(epoch))
