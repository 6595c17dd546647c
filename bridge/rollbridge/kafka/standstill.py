"""Stalled fetches: partitions of which a librdkafka consumer silently gets nothing although there are records.

When leaders move away and back within a moment, as after a short network partition, librdkafka may keep asking a broker
that no longer leads the partition: each fetch is refused, nothing is reported, and it never recovers. A new consumer
helps. Source: https://github.com/confluentinc/librdkafka/pull/5593.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from rollbridge.calls import Deadline, Errand
from rollbridge.errors import RollbridgeError
from rollbridge.kafka.metadata import Clusters, Isolation, ask_once
from rollbridge.kafka.offsets import LATEST, offsets_question
from rollbridge.model.names import Partition

logger = logging.getLogger(__name__)

LOOK_S: Final = 5.0
"""Interval between checks; a stall is noticed at the second one."""


class Standstill:
    """Detector of stalled partitions, from a consumer's positions and the partitions' ends.

    ``slack`` is the number of offsets before the end at which a consumer may rightly stop: markers are not handed out.
    """

    def __init__(self, slack: int) -> None:
        self._slack = slack
        self._behind: dict[Partition, tuple[int, int]] = {}
        self._told: dict[Partition, tuple[int, int]] = {}

    def observe(self, positions: Mapping[Partition, int], ends: Mapping[Partition, int]) -> frozenset[Partition]:
        """Return the partitions that were behind last time too and have not moved; each is reported once.

        Args:
            positions: Next offset of each partition.
            ends: Ends read before the positions; unknown ones are left out.
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
    """Periodic check for stalled partitions beside a consumer in use. Not thread-safe."""

    def __init__(
        self,
        bootstrap_servers: str,
        isolation: Isolation,
        *,
        slack: int = 0,
        security: Mapping[str, str] | None = None,
        client_id: str = "rollbridge",
    ) -> None:
        """Prepare the check; see :class:`Standstill` for ``slack``."""
        self._clusters = Clusters(bootstrap_servers, security=security, client_id=client_id)
        self._question = offsets_question(LATEST, isolation)
        self._standstill = Standstill(slack)
        self._due = time.monotonic() + LOOK_S
        self._errand: Errand[dict[Partition, int]] = Errand("rollbridge-lookout")

    def stuck(self, positions: Callable[[], Mapping[Partition, int]]) -> frozenset[Partition]:
        """Return the stalled partitions without blocking: ends asked for in one call are evaluated in a later one."""
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
        """Return the ends that leaders report, asked once. Runs on the errand's thread."""
        deadline = Deadline(LOOK_S)
        try:
            with self._clusters.borrow(deadline) as cluster:
                return ask_once(cluster, places, self._question).found
        except RollbridgeError as fault:
            logger.debug("where partitions end cannot be told now: %s", fault)
            return {}
