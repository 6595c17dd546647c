"""The committed offsets of a consumer group, as its coordinator has them: OffsetFetch over a connection of our own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from kio.schema.errors import ErrorCode
from kio.schema.offset_fetch.v9 import OffsetFetchRequest, OffsetFetchResponse
from kio.schema.offset_fetch.v9.request import OffsetFetchRequestGroup, OffsetFetchRequestTopics
from kio.schema.types import GroupId, TopicName
from kio.static.primitive import i32

from bridge.errors import KafkaUnavailable
from bridge.kafka.metadata import Cluster, Clusters, CodeError, CoordinatorType
from bridge.kafka.patience import Backoff, Deadline
from bridge.kafka.translate import is_definite, refusal

_TIMEOUT_S: Final = 30.0


class Committed(NamedTuple):
    """What a group has committed in a partition, and what it has put beside that."""

    topic: str
    partition: int
    offset: int
    metadata: str


class GroupCommits:
    """Reads what one group has committed; safe to use from several threads."""

    def __init__(
        self, bootstrap_servers: str, group_id: str, *, security: Mapping[str, str] | None, client_id: str
    ) -> None:
        self._group_id = group_id
        self._clusters = Clusters(bootstrap_servers, security=security, client_id=client_id)

    def close(self) -> None:
        """Drop the connections; another question opens them again."""
        self._clusters.close()

    def read(self, topics: Iterable[str] | None = None, *, timeout_s: float = _TIMEOUT_S) -> list[Committed]:
        """Commits in partition 0 of these topics, or of all: in any order.

        Offsets in a native transaction that is not decided yet are waited for: they may become commits.

        Raises:
            KafkaUnavailable: no answer, or not decided, within ``timeout_s`` seconds; ask again.
            NotAuthorizedError: the group may not be described.
        """
        wanted = None if topics is None else sorted(set(topics))
        if wanted == []:
            return []
        doing = f"read the commits of group {self._group_id}"
        deadline = Deadline(timeout_s)
        backoff = Backoff()
        with self._clusters.borrow(deadline) as cluster:
            while True:
                why: Exception
                try:
                    return self._ask(cluster, wanted)
                except KafkaUnavailable as fault:
                    why = fault
                except CodeError as fault:
                    if fault.code is ErrorCode.group_id_not_found:
                        return []
                    if is_definite(fault.code):
                        raise refusal(fault.code, doing, fault.subject) from fault
                    why = fault
                # Whatever it was, another broker may have the group by now.
                cluster.forget_coordinator(CoordinatorType.GROUP, self._group_id)
                if deadline.passed():
                    raise KafkaUnavailable(f"cannot {doing} within {timeout_s:g} s: {why}") from why
                backoff.sleep(deadline)

    def _ask(self, cluster: Cluster, topics: list[str] | None) -> list[Committed]:
        """Ask the coordinator once; raises CodeError, KafkaUnavailable."""
        request = OffsetFetchRequest(
            groups=(
                OffsetFetchRequestGroup(
                    group_id=GroupId(self._group_id),
                    topics=None
                    if topics is None
                    else tuple(
                        OffsetFetchRequestTopics(name=TopicName(name), partition_indexes=(i32(0),)) for name in topics
                    ),
                ),
            ),
            require_stable=True,
        )
        node = cluster.coordinator(CoordinatorType.GROUP, self._group_id)
        [group] = cluster.connection(node).call(request, OffsetFetchResponse).groups
        _check(group.error_code, f"group {self._group_id}")
        found = []
        for topic in group.topics:
            for place in topic.partitions:
                _check(place.error_code, f"topic {topic.name}")
                if place.committed_offset >= 0:
                    found.append(
                        Committed(
                            str(topic.name),
                            int(place.partition_index),
                            int(place.committed_offset),
                            # The library sends its terminating zero, too.
                            (place.metadata or "").partition("\0")[0],
                        )
                    )
        return found


def _check(code: ErrorCode, subject: str) -> None:
    if code is not ErrorCode.none:
        raise CodeError(code, subject)
