"""Seal topics for every writer: native transactions, idempotent producers and plain ones alike.

Two settings together close a topic to data and leave it open to the 78-byte markers that end native transactions:

- ``max.message.bytes=78`` refuses every batch that is larger, that is, all but the tiniest;
- ``compression.type=gzip`` makes the broker recompress the tiniest, and check the size again;
  gzip alone adds 18 bytes, so that none is left below 79. Markers are never compressed.

A lower limit would refuse markers as well. Then a transaction that is open on the topic never ends. Neither does one
that merely tried to write to it: its partition joined before its batch was refused, so its transactional id waits for a
marker that cannot be written until the topic is deleted.

A changed setting reaches the leader some time after the controller has accepted it, so it is confirmed by a probe: a
batch with a wrong checksum. The leader checks the size first, so the answer is CORRUPT_MESSAGE before the limit is in
force and MESSAGE_TOO_LARGE after; nothing is written in either case. The controller writes both settings as one unit,
so one probe confirms both.

A marker, not time, defines the end of a sealed topic: an append that passed the size check before the limit came into
force may hold the log's lock, or wait for it, for as long as a disk stalls. So once the limit is in force, the
partition joins a native transaction of the sealer's own (:mod:`rollbridge.kafka.transactions`), which is then aborted.
Its marker takes the same lock. An append that held the lock lands below the marker; a later one is recompressed under
the new settings, checked again, and refused. The exception is a batch that arrives compressed with gzip, which is not
checked again: if it passed the first check and got the lock after the marker, it lands after the end. Nothing can rule
that out, so leaders check sealed topics for a while (``coordinator/rollbridge_coordinator/streams/late.py``).

The settings are a topic's, so all its partitions are closed together; each has its own end and leader.

All of this must happen under one leader of the partition, since another one may learn of the settings later: sealing
restarts if the leader epoch at the end differs from that at the beginning.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf
from typing import Final, NamedTuple, TypeVar

from kio.schema.errors import ErrorCode
from kio.schema.list_offsets.v7 import ListOffsetsResponse

from rollbridge.base.deadlines import Backoff, Deadline
from rollbridge.errors import InvalidRequestError, KafkaUnavailableError, UnavailableError
from rollbridge.kafka import errors as codes
from rollbridge.kafka.errors import Meaning, NotAuthorizedError, TopicNotFoundError
from rollbridge.kafka.metadata import (
    CLIENT,
    LATEST,
    Cluster,
    CodeError,
    Isolation,
    LeaderQuestion,
    ask_once,
    of_partitions,
    offsets_request,
)
from rollbridge.kafka.transactions import Barrier, refused_batch
from rollbridge.stream.names import Partition, show_partition

logger = logging.getLogger(__name__)

# Size of a batch with a commit or abort marker.
_MARKER_BYTES: Final = 78
SEALED: Final[Mapping[str, str]] = {"compression.type": "gzip", "max.message.bytes": str(_MARKER_BYTES)}
"""Settings that a sealed topic has and keeps."""
SEALING_ID: Final = "rollbridge.seal"
"""Transactional id of a sealer that acts for no group."""

# ListOffsets with the id of a debugging replica returns the log end offset, which can be ahead of consumers' high
# watermark: records in between become readable as soon as all replicas have them.
_DEBUGGING_REPLICA: Final = -2
_BACKOFF_FIRST_S: Final = 0.001
_BACKOFF_MAX_S: Final = 0.1
_UNKNOWN_TOPIC_S: Final = 5.0
_AWAY_S: Final = 3.0
"""Time after which an unavailable leader is given up for now; a slow one is waited for."""


class EndOfLog(NamedTuple):
    """End offset of a log, and the epoch of the leader that reported it."""

    leader_epoch: int
    offset: int


V = TypeVar("V")
_PROBE: Final = refused_batch()


class Sealer:
    """Sealer of whole topics, by their partitions. Used once, not thread-safe."""

    def __init__(
        self,
        cluster: Cluster,
        configure: Callable[[Iterable[str], Mapping[str, str | None]], None],
        *,
        transactional_id: str,
        timeout_s: float,
    ) -> None:
        """Prepare to seal.

        Args:
            cluster: Cluster of the topics.
            configure: ``configure(topics, settings)`` changes settings and returns when the controller has accepted
                them.
            transactional_id: Transactional id for the markers that define the ends. Two sealers that share one at the
                same time only slow each other down.
            timeout_s: Time-out in seconds.
        """
        self._cluster = cluster
        self._configure = configure
        self._barrier = Barrier(cluster, transactional_id)
        self._deadline = Deadline(timeout_s)
        self._started = time.monotonic()
        self._waiting_for: dict[Partition, str] = {}
        self._away_since: dict[Partition, float] = {}
        self._away_s = inf

    def seal(self, partitions: Iterable[Partition], foreign_s: float | None = None) -> dict[Partition, int]:
        """Seal ``partitions`` and return their end offsets: no record will be at or after them, only markers.

        The module docstring names the exception for batches compressed with gzip. All partitions of a topic must be
        given. Those on which native transactions stay open for longer than ``foreign_s`` are closed, but left out of
        the result. With that bound, unavailable leaders are waited for only a few seconds.

        Raises:
            UnavailableError: Some partitions could not be sealed in time; call again.
            TopicNotFoundError, NotAuthorizedError, InvalidRequestError, KafkaUnavailableError
        """
        wanted = list(dict.fromkeys(partitions))
        self._away_s = inf if foreign_s is None else _AWAY_S
        self._require_whole_topics(wanted)
        self._configure(dict.fromkeys(topic for topic, _ in wanted), SEALED)
        ends: dict[Partition, int] = {}
        held: set[Partition] = set()
        while len(ends) + len(held) < len(wanted):
            places = self._await_in_force([item for item in wanted if item not in ends and item not in held])
            self._pass_barrier(places)
            settled, open_ones = self._await_ends(places, foreign_s)
            ends.update(settled)
            held |= open_ones
        for item, end in ends.items():
            logger.info("topic.sealed topic=%r end=%d", show_partition(item), end)
        for item in sorted(held):
            why = self._waiting_for[item]
            logger.info("topic.seal_waiting topic=%r reason=%s", show_partition(item), why)
        return ends

    def _require_whole_topics(self, partitions: Iterable[Partition]) -> None:
        """Refuse topics with other partitions, which would be closed without an end, before any change."""
        pending = set(partitions)
        # What is known may be of before partitions were added.
        self._cluster.expire({topic for topic, _ in pending})
        self._cluster.learn({topic for topic, _ in pending})
        given: dict[str, int] = {}
        for topic, _ in pending:
            given[topic] = given.get(topic, 0) + 1
        backoff = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S)
        while pending:
            for item in sorted(pending):
                topic, number = item
                try:
                    self._cluster.leader(topic, number)
                except CodeError as exc:
                    self._note(item, exc.code)
                    continue
                if self._cluster.partition_count(topic) != given[topic]:
                    wanted = "one partition" if given[topic] == 1 else f"the {given[topic]} partitions to be sealed"
                    fault = InvalidRequestError(f"cannot seal topic {topic}: it has more than {wanted}")
                    fault.resource = f"topic {topic}"
                    raise fault
                pending.discard(item)
            self._pause(pending, backoff)

    def _await_in_force(self, partitions: Iterable[Partition]) -> dict[Partition, EndOfLog]:
        """Wait until every leader refuses batches larger than a marker; return the ends of the logs shortly before.

        The leader epoch is read before the probe is sent, so if it is unchanged later, the probe was answered under it.
        """

        pending = set(partitions)
        confirmed: dict[Partition, EndOfLog] = {}
        backoff = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S)
        while pending:
            places = self._list_offsets(pending, _DEBUGGING_REPLICA, Isolation.READ_UNCOMMITTED)
            answers, refused = self._ask_leaders(places, _PROBE)
            for item, code in answers.items():
                match code:
                    case ErrorCode.message_too_large:
                        pending.discard(item)
                        confirmed[item] = places[item]
                    case ErrorCode.corrupt_message:
                        self._waiting_for[item] = "its new settings to reach its leader"
                    case _:
                        raise KafkaUnavailableError(
                            f"the leader of topic {show_partition(item)} accepted a batch with a wrong checksum"
                        )
            for item, code in refused.items():
                self._note(item, code)
            self._pause(pending, backoff)
        return confirmed

    def _pass_barrier(self, partitions: Iterable[Partition]) -> None:
        """Have a marker written to each partition, behind every append that held its log's lock."""
        pending = set(partitions)
        joined: set[Partition] = set()
        backoff = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S)
        while True:
            try:
                self._barrier.open(self._deadline.left())
                # CORRUPT_MESSAGE comes from a new leader without the settings: the epoch will differ.
                answers, refused = self._ask_leaders(pending, self._barrier.joining())
                pending.difference_update(answers)
                joined.update(answers)
                for item, code in refused.items():
                    match code:
                        case ErrorCode.concurrent_transactions:
                            self._waiting_for[item] = "markers of an earlier seal to be written"
                        case _ if codes.meaning(codes.PRODUCE, code) in (Meaning.FENCED, Meaning.EXPIRED):
                            self._barrier.forget()
                        case _:
                            self._note(item, code)
                if not self._barrier.is_open:
                    pending, joined = pending | joined, set()
                elif not pending:
                    self._barrier.close(self._deadline.left())
                    return
            except KafkaUnavailableError as exc:
                logger.info("seal.barrier_retried reason=%s", exc)
                self._cluster.forget()
                self._barrier.forget()
                pending, joined = pending | joined, set()
                for item in pending:
                    self._waiting_for[item] = f"a marker to be written ({exc})"
            self._pause(pending, backoff)

    def _await_ends(
        self, before: Mapping[Partition, EndOfLog], foreign_s: float | None
    ) -> tuple[dict[Partition, int], frozenset[Partition]]:
        """Return the ends of partitions without open native transactions, and the partitions that keep one too long.

        Those whose leader has changed are in neither. The end is behind the marker, so it is beyond that in
        ``before``. A broker that does not know yet that it was replaced as the leader cannot report such an end: its
        last stable offset does not move.
        """
        pending = set(before)
        settled: dict[Partition, int] = {}
        foreign = Deadline(inf if foreign_s is None else foreign_s)
        backoff = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S)
        while pending:
            is_over = foreign.passed()
            held: set[Partition] = set()
            for item, (stable, end) in self._ends(pending).items():
                if end.leader_epoch != before[item].leader_epoch:
                    logger.info('seal.restarted topic=%r reason="leader changed"', show_partition(item))
                    self._waiting_for[item] = "its new leader"
                    pending.discard(item)
                elif stable.offset != end.offset:
                    held.add(item)
                    self._waiting_for[item] = (
                        f"a native transaction to end (last stable offset {stable.offset}, end offset {end.offset})"
                    )
                elif end.offset <= before[item].offset:
                    self._waiting_for[item] = "its leader to tell of a marker"
                    self._cluster.forget_leader(item[0])
                else:
                    settled[item] = end.offset
            pending.difference_update(settled)
            if is_over and pending == held:
                return settled, frozenset(held)
            self._pause(pending, backoff)
        return settled, frozenset()

    def _ends(self, partitions: Iterable[Partition]) -> dict[Partition, tuple[EndOfLog, EndOfLog]]:
        """Return (last stable offset, log end offset) of each one whose leader answered; the end is read last."""
        stable = self._list_offsets(partitions, CLIENT, Isolation.READ_COMMITTED)
        ends = self._list_offsets(stable, _DEBUGGING_REPLICA, Isolation.READ_UNCOMMITTED)
        return {item: (stable[item], end) for item, end in ends.items()}

    def _list_offsets(
        self, partitions: Iterable[Partition], replica: int, isolation: Isolation
    ) -> dict[Partition, EndOfLog]:
        ends = of_partitions(lambda item: EndOfLog(item.leader_epoch, item.offset))
        request = partial(offsets_request, LATEST, isolation, replica=replica)
        found, refused = self._ask_leaders(partitions, LeaderQuestion(request, ListOffsetsResponse, ends))
        for item, code in refused.items():
            if code == ErrorCode.offset_not_available:
                self._waiting_for[item] = "its new leader to know how far its log is replicated"
            else:
                self._note(item, code)
        return found

    def _ask_leaders(
        self, partitions: Iterable[Partition], question: LeaderQuestion[V]
    ) -> tuple[dict[Partition, V], dict[Partition, ErrorCode]]:
        """Send one request to each leader; return what they answer, and the codes of what was refused.

        Partitions whose leader does not answer now are in neither.
        """
        answers = ask_once(self._cluster, partitions, question)
        for item in (*answers.found, *(item for item, (_, by_leader) in answers.refused.items() if by_leader)):
            self._away_since.pop(item, None)
        for item, fault in answers.lost.items():
            self._note_away(item)
            # Once our own deadline has passed, it is what cut the request short.
            if not self._deadline.passed() or item not in self._waiting_for:
                self._waiting_for[item] = f"its leader to answer ({fault})"
        return answers.found, {item: code for item, (code, _) in answers.refused.items()}

    def _note_away(self, partition: Partition) -> None:
        self._away_since.setdefault(partition, time.monotonic())

    def _note(self, partition: Partition, code: ErrorCode) -> None:
        """Record the reason why this partition waits; raise if waiting cannot help."""
        topic, _ = partition
        if code == ErrorCode.unknown_topic_or_partition and time.monotonic() - self._started > _UNKNOWN_TOPIC_S:
            raise TopicNotFoundError(f"cannot seal topic {topic}: it does not exist", topic=topic)
        match codes.meaning(codes.PRODUCE, code):
            case Meaning.REFRESH | Meaning.RETRY:
                if code in codes.AWAY:
                    self._note_away(partition)
                self._cluster.forget_leader(topic)
                self._waiting_for[partition] = f"its leader to recover from {codes.name(code)}"
            case Meaning.DENIED:
                raise NotAuthorizedError(
                    f"cannot seal topic {topic}: {codes.name(code)} (needed: Write and Describe)",
                    resource=f"topic {topic}",
                )
            case _:
                raise KafkaUnavailableError(f"cannot seal topic {topic}: {codes.name(code)}")

    def _pause(self, pending: Iterable[Partition], backoff: Backoff) -> None:
        """Sleep before the next attempt if partitions are pending."""
        left = {item: self._waiting_for.get(item, "its leader to answer") for item in sorted(pending)}
        if not left:
            return
        now = time.monotonic()
        waited_s = now - self._started
        away_s = max((now - self._away_since[item] for item in left if item in self._away_since), default=0.0)
        if self._deadline.passed() or away_s >= self._away_s:
            reasons = "; ".join(f"{show_partition(item)} waits for {reason}" for item, reason in left.items())
            raise UnavailableError(
                f"not sealed within {waited_s:.0f} s: {reasons}. Nothing is lost: sealing again continues from here",
                topics={topic: reason for (topic, _), reason in left.items()},
                resource=f"topic {min(left)[0]}",
                code="seal-timeout",
            )
        time.sleep(backoff.grow())
