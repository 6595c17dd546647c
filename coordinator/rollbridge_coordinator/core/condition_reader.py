"""Reads of segments and brokers for one leader: conditions, late records, and inputs of retention.

:class:`ConditionReader` reads the tails of segments for the conditions of transactions. It remembers what it has read
for the leader's term, so a stream with conditional transactions is read once, and then only its new end.

:class:`LateRecords` reads records behind sealed ends, and finds their copies. :class:`RetentionReader` asks brokers for
sizes and ends of segments and for commits of consumer groups. A failure there ends no term: what is unknown is left
out, and nothing is deleted meanwhile.

All of them belong to the leader's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final

from rollbridge.base.deadlines import Backoff, Deadline
from rollbridge.base.effects import Steps
from rollbridge.base.logs import limited
from rollbridge.base.sn import SN
from rollbridge.errors import RollbridgeError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.fetch import LogReader
from rollbridge.kafka.metadata import EARLIEST, LATEST, Cluster, Isolation, LeaderQuestion, ask_once
from rollbridge.kafka.offsets import leader_bytes, offsets_question
from rollbridge.kafka.segment_tail import EndOf, LineageTails, WaitedTooLongError, ask
from rollbridge.kafka.topics import delete_records_question
from rollbridge.stream.conditions import Scope
from rollbridge.stream.late import LATE_HEADER, LateRecord, origin
from rollbridge.stream.names import Partition, SegmentPlaces, show_partition
from rollbridge_coordinator.core.effects import Found, Query, Undecided

CONDITIONS_S: Final = 2.5
"""Longest wait for earlier native transactions of others before a conditional transaction is refused.

The group's other transactions wait meanwhile. Conditional writers decide within a millisecond or two."""


class ConditionReader:
    """Reader that answers the queries of conditions; used by one thread."""

    def __init__(self, log: LogReader) -> None:
        self._reader = log
        self._tails: dict[SegmentPlaces, LineageTails] = {}

    def forget(self) -> None:
        """Drop what was read, after a deletion: a name may belong to another topic now."""
        self._tails.clear()

    def look(self, queries: Sequence[Query]) -> list[Found | Undecided]:
        """Carry out :class:`rollbridge_coordinator.core.effects.Look`.

        Raises:
            TopicNotFoundError, NotAuthorizedError, KafkaUnavailableError, CorruptDataError
        """
        deadline = Deadline(CONDITIONS_S)
        confirmed: set[Partition] = set()
        return [self._answer(query, deadline, confirmed) for query in queries]

    def _answer(self, query: Query, deadline: Deadline, confirmed: set[Partition]) -> Found | Undecided:
        try:
            last, end = ask(self._stands(query, confirmed), self._reader, deadline)
            return Found(last, end, self._is_disturbed(query, deadline))
        except WaitedTooLongError as fault:
            return Undecided(f"an earlier native transaction stays open: {fault}")

    def _stands(self, query: Query, confirmed: set[Partition]) -> Steps[tuple[SN, int]]:
        tails = self._tails.setdefault(query.places, LineageTails(query.places.of))
        tail = tails.active(query.lineage)
        end = (yield from EndOf(tail.place)) if query.end is None else query.end
        if tail.place not in confirmed:
            # Once is enough for all conditions of a transaction: its records are appended, or the segment sealed.
            confirmed.add(tail.place)
            yield from tail.confirm(end)
        return (yield from tails.last(query.lineage, query.condition.scope_key, end, query.since)), end

    def _is_disturbed(self, query: Query, deadline: Deadline) -> bool:
        """Return True if another writer's record in scope, committed or not, lies between the query's own."""
        wanted = query.condition.key if query.condition.scope is Scope.KEY else None
        topic, number = active = query.places.of(query.lineage.active)
        for before, after in zip(query.own, query.own[1:], strict=False):
            place = before.end
            while place < after.start:
                part = self._reader.fetch(
                    topic, place, wait_ms=200, partition=number, isolation=Isolation.READ_UNCOMMITTED
                )
                if any(record.offset < after.start and wanted in (None, record.key) for record in part.records):
                    return True
                if part.end == place and deadline.passed():
                    raise WaitedTooLongError(active, place, after.start)  # the log has lost what was appended there
                place = part.end
        return False


# Late records


class LateRecords:
    """Reader of late records and of their copies; used by one thread.

    Raises:
        TopicNotFoundError, NotAuthorizedError, KafkaUnavailableError, CorruptDataError: from any method.
    """

    def __init__(self, log: LogReader) -> None:
        self._reader = log

    def read(self, partition: Partition, start: int, end: int, records_max: int) -> tuple[list[LateRecord], int]:
        """Carry out :class:`rollbridge_coordinator.core.effects.ReadLate`."""
        topic, number = partition
        found: list[LateRecord] = []
        place = start
        while place < end:
            part = self._reader.fetch(topic, place, partition=number)
            for record in part.records:
                if record.offset >= end:
                    break
                found.append(
                    LateRecord(record.offset, record.timestamp, record.key, record.value, tuple(record.headers))
                )
                if len(found) == records_max:
                    return found, record.offset + 1
            if part.end <= place:
                break
            place = part.end
        return found, min(place, end)

    def find(self, source: Partition, offset: int, targets: Mapping[Partition, int]) -> bool | None:
        """Carry out :class:`rollbridge_coordinator.core.effects.FindLate`.

        Records deleted from a target since then count as found: a copy can be deleted only after it was there.
        """
        wanted = LATE_HEADER, origin(source, offset)
        for (topic, number), start in targets.items():
            place, end = start, self._reader.end(topic, partition=number)
            while place < end:
                part = self._reader.fetch(topic, place, partition=number)
                if part.start > place or any(wanted in record.headers for record in part.records):
                    return True
                if part.end <= place:
                    return None
                place = part.end
        return False


# Inputs of retention


logger = limited(logging.getLogger(__name__))

ANSWER_S: Final = 5.0
"""Request time-out of brokers; short, because the group's transactions wait meanwhile."""
CONNECT_S: Final = 2.0
"""Connection time-out of brokers."""
ELECTION_S: Final = 0.2
"""Time to retry a partition without a leader: an election is either short or long."""


SAMPLE_S: Final = 1.0
"""Time for the latest records of one segment."""
STRETCHES: Final = 8
"""Number of places at which they are read."""


def asking(kafka: KafkaClient) -> AbstractContextManager[Cluster]:
    """Lend connections for requests for which the group's transactions wait."""
    return kafka.borrow(connect_timeout_s=CONNECT_S, request_timeout_s=ANSWER_S)


class RetentionReader:
    """Client that asks brokers for the inputs of retention and scaling by load; used by one thread."""

    def __init__(self, kafka: KafkaClient) -> None:
        self._kafka = kafka
        self._is_told = False

    def stable_ends(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        return self._ask(partitions, offsets_question(LATEST, Isolation.READ_COMMITTED), ELECTION_S)

    def log_ends(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        # There is another look in a moment.
        return self._ask(partitions, offsets_question(LATEST, Isolation.READ_UNCOMMITTED), 0.0)

    def starts(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        return self._ask(partitions, offsets_question(EARLIEST, Isolation.READ_UNCOMMITTED), ELECTION_S)

    def delete(self, before: Mapping[Partition, int]) -> frozenset[Partition]:
        """Carry out :class:`rollbridge_coordinator.core.effects.DeleteRecords`."""
        question = delete_records_question(before, Deadline(ANSWER_S))
        return frozenset(before) - self._ask(list(before), question, ELECTION_S).keys()

    def _ask(
        self, partitions: Sequence[Partition], question: LeaderQuestion[int], patience_s: float
    ) -> dict[Partition, int]:
        """Return what leaders have answered in time; a partition without a leader holds up no other."""
        found: dict[Partition, int] = {}
        left = list(partitions)
        if not left:
            return found
        deadline = Deadline(patience_s)
        backoff = Backoff()
        why: object = ""
        try:
            while left:
                with asking(self._kafka) as cluster:
                    answers = ask_once(cluster, left, question)
                found |= answers.found
                left = [place for place in left if place not in answers.found]
                if not left:
                    return found
                place = left[0]
                why = answers.lost.get(place) or answers.refused[place][0].name
                if deadline.passed():
                    break
                backoff.sleep(deadline)
        except RollbridgeError as fault:
            why = fault
        name = show_partition(left[0])
        asked = question.response_type.__name__
        logger.warning(
            'partitions.unanswered partitions=%d first=%s answer=%s reason="%s"', len(left), name, asked, why
        )
        return found

    def disk_bytes(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """Carry out :class:`rollbridge_coordinator.core.effects.DiskBytes`."""
        try:
            with asking(self._kafka) as cluster:
                found = leader_bytes(cluster, partitions)
        except RollbridgeError as fault:
            level = logging.DEBUG if self._is_told else logging.WARNING  # it is asked for again and again
            logger.log(level, 'log-sizes.unknown truncated=none reason="%s"', fault)
            self._is_told = True
            return {}
        self._is_told = False
        return found

    def sample(self, partition: Partition, records: int, bytes_max: int) -> list[tuple[bytes | None, int]]:
        """Carry out :class:`rollbridge_coordinator.core.effects.SampleKeys`: stretches at even distances."""
        topic, number = partition
        found: list[tuple[bytes | None, int]] = []
        reader = self._kafka.log(retry_timeout_s=ELECTION_S, unknown_topic_timeout_s=ELECTION_S)
        deadline = Deadline(SAMPLE_S)
        try:
            with reader.within(Deadline(ANSWER_S)):
                end = reader.end(topic, partition=number)
                step = max(records // STRETCHES, 1)
                for start in range(max(end - step * STRETCHES, 0), end, step):
                    part = reader.fetch(
                        topic,
                        start,
                        partition=number,
                        isolation=Isolation.READ_UNCOMMITTED,
                        max_bytes=bytes_max // STRETCHES,
                    )
                    found += [
                        (item.key, len(item.key or b"") + len(item.value or b""))
                        for item in part.records
                        if start <= item.offset < start + step
                    ]
                    if deadline.passed():
                        break
        except RollbridgeError as fault:
            logger.warning('latest-keys.unreadable partition=%s reason="%s"', show_partition(partition), fault)
        return found

    def group_commits(self, groups: Sequence[str]) -> dict[str, dict[Partition, int]]:
        """Carry out :class:`rollbridge_coordinator.core.effects.GroupCommits`."""
        found: dict[str, dict[Partition, int]] = {}
        for name in groups:
            try:
                commits = self._kafka.group(name).read(timeout_s=ANSWER_S)
                found[name] = {(item.topic, item.partition): item.offset for item in commits}
            except RollbridgeError as fault:
                logger.warning('reader-group.offsets-unknown reader_group=%s reason="%s"', name, fault)
        return found
