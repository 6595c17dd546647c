"""Partitions of which a consumer gets nothing although there is something, and nobody says so.

When leaders move and move back within a moment, as after a short partition of the network, librdkafka may go on to ask
a broker that leads a partition no longer: each fetch is refused, nothing is reported, and it does not end by itself. A
new consumer helps. Source: https://github.com/confluentinc/librdkafka/pull/5593.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from bridge.kafka.clients import admin_config, library_logger
from bridge.kafka.metadata import Isolation

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
        self._config = admin_config(bootstrap_servers, security=security, client_id=client_id)
        self._isolation = IsolationLevel[isolation.name]
        self._standstill = Standstill(slack)
        self._admin: AdminClient | None = None
        self._due = time.monotonic() + LOOK_S
        self._asked: Mapping[TopicPartition, Future[Any]] | None = None

    def stuck(self, positions: Callable[[], Mapping[Partition, int]]) -> frozenset[Partition]:
        """Partitions that stand still. Does not wait: it asks, and looks at the answer when it is called again."""
        if self._asked is None:
            if time.monotonic() >= self._due:
                self._ask(positions())
            return frozenset()
        if not all(future.done() for future in self._asked.values()):
            return frozenset()
        ends = {
            (place.topic, place.partition): int(future.result().offset)
            for place, future in self._asked.items()
            if future.exception() is None
        }
        self._asked = None
        self._due = time.monotonic() + LOOK_S
        return self._standstill.observe(positions(), ends)

    def _ask(self, positions: Mapping[Partition, int]) -> None:
        self._due = time.monotonic() + LOOK_S
        if not positions:
            return
        if self._admin is None:
            self._admin = AdminClient(self._config, logger=library_logger)
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        try:
            self._asked = self._admin.list_offsets(
                {TopicPartition(*item): latest for item in positions},
                isolation_level=self._isolation,
                request_timeout=LOOK_S,
            )
        except KafkaException:
            self._asked = None  # as good as no answer


def positions_of(positions: list[TopicPartition], starts: Mapping[Partition, int]) -> dict[Partition, int]:
    """Where a consumer is, from its own answer, which knows nothing of partitions of which nothing has come yet."""
    return {
        item: place.offset if place.offset >= 0 else starts[item]
        for place in positions
        if (item := (place.topic, place.partition)) in starts
    }
