"""Rights of a client: the brokers' own decision, asked for on the client's own connection.

A transaction here writes to topics that the client's requests never reach, so only the gateway can ask whether it may.
Brokers are asked what they ask themselves, by requests that can change nothing: AddPartitionsToTxn and
AddOffsetsToTxn with a producer id that no broker has handed out. Brokers check rights first, and the id after that.

==============================  ====================================================
a client that                    needs in Kafka
==============================  ====================================================
writes to an adopted topic       WRITE on the topic
writes to ``scope.stream``       WRITE on the buffer's topic ``scope.stream.transaction-buffer``
has a transactional id           WRITE on that transactional id
commits a group's offsets        READ on the group, and on the topics of the offsets
lists or describes transactions  DESCRIBE on their transactional ids, and on the topics that are named
describes producers              READ on the topics
==============================  ====================================================

For a stream ``scope.stream`` "on the topic" means its buffer's, here as well. What was allowed is remembered for a
minute, per connection; what was denied is asked again. A cluster without an authorizer allows everything.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from kio.schema.errors import ErrorCode

from rollbridge_gateway.protocol.versions import Api
from rollbridge_gateway.server.relay import Upstream

REMEMBERED_MAX: Final = 10_000
_PROBE_ID: Final = (1 << 62) - 1
"""Producer id of probes: brokers are far from it, and gateways hand out higher ones only."""
_DENIED_ID: Final = ErrorCode.transactional_id_authorization_failed
_DENIED_TOPIC: Final = ErrorCode.topic_authorization_failed
_DENIED_GROUP: Final = ErrorCode.group_authorization_failed
READ: Final = 1 << 3
DESCRIBE: Final = 1 << 8
"""Bits of ``topic_authorized_operations``: the codes of Kafka's ``AclOperation``."""


class Rights:
    """Rights of one connection, as its broker sees them. Belongs to the event loop."""

    def __init__(self, upstream: Callable[[], Awaitable[Upstream]], remembered_s: float) -> None:
        """Know nothing yet; what was allowed is not asked again for ``remembered_s`` seconds."""
        self._upstream = upstream
        self._remembered_s = remembered_s
        self._allowed: dict[tuple[str, ...], float] = {}
        self._partitions: dict[str, int] = {}

    @property
    def upstream(self) -> Callable[[], Awaitable[Upstream]]:
        """Return the client's own connection to its broker."""
        return self._upstream

    def _is_known(self, *what: str) -> bool:
        until = self._allowed.get(what)
        return until is not None and time.monotonic() < until

    def _remember(self, *what: str) -> None:
        if len(self._allowed) >= REMEMBERED_MAX:
            self.forget()
        self._allowed[what] = time.monotonic() + self._remembered_s

    def forget(self) -> None:
        """Ask for everything again: the client may be another one from now on."""
        self._allowed.clear()
        self._partitions.clear()

    def knows(self, transactional_id: str, topics: Iterable[str] = ()) -> bool:
        """Return whether these are known to be allowed, so that there is nothing to ask."""
        return self._is_known("id", transactional_id) and all(self._is_known("topic", topic) for topic in topics)

    async def check(
        self, transactional_id: str, topics: Iterable[str] = (), group: str | None = None
    ) -> dict[str, ErrorCode]:
        """Return what is denied: by topic, ``""`` for the transactional id or the group; empty if all is allowed.

        Raises:
            BrokerGoneError: the broker does not answer.
        """
        wanted = [topic for topic in dict.fromkeys(topics) if not self._is_known("topic", topic)]
        if wanted or not self._is_known("id", transactional_id):
            denied = await self._check_topics(transactional_id, wanted)
            if denied:
                return denied
        if group is not None and not self._is_known("group", group):
            return await self._check_group(transactional_id, group)
        return {}

    async def without(self, operation: int, topics: Iterable[str]) -> dict[str, ErrorCode]:
        """Return those of the topics on which the client has not got an operation, and why; empty if it has on all.

        Args:
            operation: :data:`READ` or :data:`DESCRIBE`.
        Raises:
            BrokerGoneError: the broker does not answer.
        """
        wanted = [topic for topic in dict.fromkeys(topics) if not self._is_known(str(operation), topic)]
        if not wanted:
            return {}
        upstream = await self._upstream()
        answer = await upstream.ask(
            Api.METADATA,
            12,
            None,
            {
                "topics": [{"name": topic} for topic in wanted],
                "allow_auto_topic_creation": False,
                "include_topic_authorized_operations": True,
            },
        )
        found = {str(item.name): item for item in answer.topics}
        denied: dict[str, ErrorCode] = {}
        for topic in wanted:
            item = found.get(topic)
            if item is None or item.error_code is _DENIED_TOPIC:
                denied[topic] = _DENIED_TOPIC
            elif item.error_code is ErrorCode.unknown_topic_or_partition:
                denied[topic] = item.error_code
            elif not int(item.topic_authorized_operations) & operation:
                denied[topic] = _DENIED_TOPIC
            else:
                self._remember(str(operation), topic)
                self._partitions[topic] = len(item.partitions)
        return denied

    async def missing(self, operation: int, places: Iterable[tuple[str, int]]) -> set[tuple[str, int]]:
        """Return those of the partitions that there are not; of topics on which the client has an operation.

        Raises:
            BrokerGoneError: the broker does not answer.
        """
        wanted = [where for where in places if not 0 <= where[1] < self._partitions.get(where[0], 0)]
        for topic, _ in wanted:
            self._allowed.pop((str(operation), topic), None)  # it may have got more partitions
        denied = await self.without(operation, [topic for topic, _ in wanted])
        return {
            where
            for where in wanted
            if where[0] not in denied and not 0 <= where[1] < self._partitions.get(where[0], 0)
        }

    async def describable(self, transactional_ids: Iterable[str]) -> set[str]:
        """Return those of the transactional ids of which the client may know.

        Raises:
            BrokerGoneError: the broker does not answer.
        """
        wanted = list(dict.fromkeys(transactional_ids))
        if not wanted:
            return set()
        upstream = await self._upstream()
        answer = await upstream.ask(Api.DESCRIBE_TRANSACTIONS, 0, None, {"transactional_ids": wanted})
        return {str(item.transactional_id) for item in answer.transaction_states if item.error_code is not _DENIED_ID}

    async def _check_topics(self, transactional_id: str, topics: list[str]) -> dict[str, ErrorCode]:
        upstream = await self._upstream()
        answer = await upstream.ask(
            Api.ADD_PARTITIONS_TO_TXN,
            3,
            None,
            {
                "v3_and_below_transactional_id": transactional_id,
                "v3_and_below_producer_id": _PROBE_ID,
                "v3_and_below_producer_epoch": 0,
                "v3_and_below_topics": [{"name": topic, "partitions": [0]} for topic in topics or ["rollbridge"]],
            },
        )
        codes = {
            str(topic.name): part.partition_error_code
            for topic in answer.results_by_topic_v3_and_below
            for part in topic.results_by_partition
        }
        if _DENIED_ID in codes.values():
            return {"": _DENIED_ID}
        self._remember("id", transactional_id)
        denied: dict[str, ErrorCode] = {
            topic: code for topic, code in codes.items() if code is _DENIED_TOPIC and topic in topics
        }
        for topic in topics:
            if topic not in denied:
                self._remember("topic", topic)
        return denied

    async def _check_group(self, transactional_id: str, group: str) -> dict[str, ErrorCode]:
        upstream = await self._upstream()
        answer = await upstream.ask(
            Api.ADD_OFFSETS_TO_TXN,
            3,
            None,
            {
                "transactional_id": transactional_id,
                "producer_id": _PROBE_ID,
                "producer_epoch": 0,
                "group_id": group,
            },
        )
        if answer.error_code in (_DENIED_ID, _DENIED_GROUP):
            return {"": answer.error_code}
        self._remember("group", group)
        return {}
