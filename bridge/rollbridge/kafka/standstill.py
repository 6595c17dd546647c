"""Partitions of which a consumer gets nothing although there is something, and nobody says so.

When leaders move and move back within a moment, as after a short partition of the network, librdkafka may go on to ask
a broker that leads a partition no longer: each fetch is refused, nothing is reported, and it does not end by itself. A
new consumer helps. Source: https://github.com/confluentinc/librdkafka/pull/5593.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from rollbridge.errors import RollbridgeError
from rollbridge.kafka.metadata import Clusters, Isolation, ask_once
from rollbridge.kafka.offsets import LATEST, offsets_question
from rollbridge.kafka.retry import Deadline, Errand

logger = logging.getLogger(__name__)

LOOK_S: Final = 5.0
"""How often it is looked; a standstill is noticed the second time."""

Partition = tuple[str, int]


class Standstill:
    """Tells from where a consumer is, and where partitions end, which of them stand still.

    ``slack`` is how many offsets before the end a consumer may stop for good: a marker is not handed out.
    """

    def __init__(self, slack: int) -> None:
        self._slack = slack
        self._behind: dict[Partition, tuple[int, int]] = {}
        self._told: dict[Partition, tuple[int, int]] = {}

    def observe(self, positions: Mapping[Partition, int], ends: Mapping[Partition, int]) -> frozenset[Partition]:
        """Those that have been behind since the last time and not moved; each is told once as long as nothing changes.

        Args:
            positions: The next offset of each partition.
            ends: Where they ended before the positions were looked up; what is not known is left out.
        """
        behind = {
            item: (position, ends[item])
            for item, position in positions.items()
            if item in ends and ends[item] > position + self._slack
        }
        found = frozenset(
            item
            for item, place in behind.items()
            if item in self._behind and self._behind[item][0] == place[0] and self._told.get(item) != place
        )
        self._behind = behind
        self._told |= {item: behind[item] for item in found}
        return found


class Lookout:
    """Looks for standstills now and then, beside a consumer that is polled all the time. Not for several threads."""

    def __init__(
        self,
        bootstrap_servers: str,
        isolation: Isolation,
        *,
        slack: int = 0,
        security: Mapping[str, str] | None = None,
        client_id: str = "rollbridge",
    ) -> None:
        """``slack``: see :class:`Standstill`."""
        self._clusters = Clusters(bootstrap_servers, security=security, client_id=client_id)
        self._question = offsets_question(LATEST, isolation)
        self._standstill = Standstill(slack)
        self._due = time.monotonic() + LOOK_S
        self._errand: Errand[dict[Partition, int]] = Errand("rollbridge-lookout")

    def stuck(self, positions: Callable[[], Mapping[Partition, int]]) -> frozenset[Partition]:
        """Partitions that stand still. Does not wait: it asks, and looks at the answer when it is called again."""
        if not self._errand.under_way:
            if time.monotonic() >= self._due:
                self._due = time.monotonic() + LOOK_S
                wanted = frozenset(positions())
                if wanted:
                    self._errand.begin(lambda: self._ends(wanted))
            return frozenset()
        if not self._errand.done:
            return frozenset()
        self._due = time.monotonic() + LOOK_S
        return self._standstill.observe(positions(), self._errand.take() or {})

    def _ends(self, places: frozenset[Partition]) -> dict[Partition, int]:
        """Where partitions end, asked once, in the background; what is not answered is left out until next time."""
        deadline = Deadline(LOOK_S)
        try:
            with self._clusters.borrow(deadline) as cluster:
                return ask_once(cluster, places, self._question).found
        except RollbridgeError as fault:
            logger.debug("where partitions end can not be told now: %s", fault)
            return {}
