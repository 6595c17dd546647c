"""Looking at segments for the conditions of transactions, for one leader.

What was looked at once is remembered for the leader's term, so a stream whose transactions are conditional is read
once, and no more than its end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from rollbridge.cas.lookup import StreamLogs
from rollbridge.cas.segment_log import WaitedTooLong
from rollbridge.kafka.fetch import LogReader
from rollbridge.kafka.metadata import Cluster, Isolation
from rollbridge.model.cas import Scope
from rollbridge.model.names import StreamName
from rollbridge_coordinator.config import CoordinatorSettings
from rollbridge_coordinator.state.effects import Found, Query, Undecided
from rollbridge_coordinator.state.faults import LEADERLESS_S

CONDITIONS_S: Final = 2.5
"""How long other native transactions that were begun earlier may stay open before a conditional one is refused.

The group's other transactions wait meanwhile. Conditional writers decide within a millisecond or two."""


class Outlook:
    """Answers queries; used by one thread."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        cluster = Cluster(settings.bootstrap_servers, security=settings.security)
        self._reader = LogReader(cluster, retry_timeout_s=LEADERLESS_S)
        self._logs: dict[StreamName, StreamLogs] = {}

    def close(self) -> None:
        """Drop the connections."""
        self._reader.close()

    def forget(self) -> None:
        """Drop what is remembered: a topic may be another one of the same name from now on."""
        self._logs.clear()

    def look(self, queries: Sequence[Query]) -> list[Found | Undecided]:
        """See :class:`rollbridge_coordinator.state.effects.Look`.

        Raises:
            TopicNotFound, NotAuthorizedError, KafkaUnavailable, CorruptDataError
        """
        deadline = time.monotonic() + CONDITIONS_S
        confirmed: set[str] = set()
        return [self._answer(query, deadline, confirmed) for query in queries]

    def _answer(self, query: Query, deadline: float, confirmed: set[str]) -> Found | Undecided:
        logs = self._logs.setdefault(query.stream, StreamLogs(query.stream))
        condition = query.condition
        try:
            log = logs.active(query.course)
            end = log.end_now(self._reader) if query.end is None else query.end
            if log.topic not in confirmed:
                # Once for all conditions of a transaction: its records stand there already, or the segment is sealed.
                confirmed.add(log.topic)
                log.confirm(self._reader, end)
            if condition.scope is Scope.KEY and condition.key is not None:
                last = logs.last_of(query.course, self._reader, condition.key, query.since, end, deadline)
            else:
                last = logs.last(query.course, self._reader, end, deadline)
            disturbed = self._is_disturbed(query, deadline)
        except WaitedTooLong as fault:
            return Undecided(f"an earlier native transaction stays open: {fault}")
        return Found(last, end, disturbed)

    def _is_disturbed(self, query: Query, deadline: float) -> bool:
        """Whether a record of somebody else, committed or not, stands between own ones, in the condition's scope."""
        wanted = query.condition.key if query.condition.scope is Scope.KEY else None
        topic = query.stream.segment_topic(query.course.active)
        for before, after in zip(query.own, query.own[1:], strict=False):
            place = before.end
            while place < after.start:
                part = self._reader.fetch(topic, place, wait_ms=200, isolation=Isolation.READ_UNCOMMITTED)
                if any(record.offset < after.start and wanted in (None, record.key) for record in part.records):
                    return True
                if part.end == place and time.monotonic() >= deadline:
                    raise WaitedTooLong(topic, place, after.start)  # the log has lost what was appended there
                place = part.end
        return False
