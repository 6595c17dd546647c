"""Reading a stream: a plain ``read_committed`` consumer that is led through the epochs by a reading plan.

Any Kafka client can read a stream by subscribing to the pattern of its topics. What this adds is the order across
epochs: predecessors to their sealed ends before successors.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, Self

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from bridge.config import ConnectionSettings
from bridge.errors import CorruptDataError, KafkaUnavailable, NotFoundError, UnavailableError
from bridge.kafka.clients import consumer_config
from bridge.kafka.metadata import Isolation
from bridge.kafka.topics import TopicAdmin
from bridge.kafka.translate import translate
from bridge.model.epochs import EpochHistory
from bridge.model.identifiers import SegmentId
from bridge.model.names import StreamName
from bridge.model.reading import ReadingPlan

logger = logging.getLogger(__name__)

LoadHistory = Callable[[Callable[[], None] | None], EpochHistory]
"""Reads the epochs of the stream; what it is given is called once when there may be more of them."""

_POLL_S: Final = 0.1
_BATCH: Final = 2_000
_PENDING_ENDS_S: Final = 0.1
_RETRY_S: Final = 1.0
_QUEUED_KIB: Final = 16 * 1024
_QUEUE_FULL_MS: Final = 5


class Delivered(NamedTuple):
    """A committed record and the segment in which it stands."""

    segment: SegmentId
    message: Message


class StreamReader:
    """Reads the committed records of a stream in the order of their epochs. Use it in a ``with`` block."""

    def __init__(
        self,
        settings: ConnectionSettings,
        stream: StreamName,
        load: LoadHistory,
        *,
        from_end: bool = False,
        follow: bool = False,
        stalled_s: float = 30.0,
    ) -> None:
        """Look up where to begin and, unless it follows, where to stop.

        Args:
            settings: How to reach Kafka.
            stream: What to read.
            load: Reads its epochs.
            from_end: Begin with what becomes readable from now on, instead of the first record of the first epoch.
            follow: Go on with what is committed later, in epochs that are made later; otherwise stop where the
                active segments end now.
            stalled_s: How long nothing may become readable before reading gives up, unless it follows.

        Raises:
            StreamNotFound, KafkaUnavailable, ZooKeeperUnavailable.
        """
        self._stream = stream
        self._load = load
        self._follow = follow
        self._stalled_s = stalled_s
        self._changed = threading.Event()
        self._topics: dict[str, SegmentId] = {}
        self._assigned: set[SegmentId] = set()
        self._loaded_at = time.monotonic()
        self._moved_at = self._loaded_at
        history = load(self._changed.set if follow else None)
        admin = TopicAdmin(settings.bootstrap_servers, security=settings.kafka, client_id=settings.client_name)
        ends = _ends(admin, stream, history, Isolation.READ_COMMITTED if from_end else Isolation.READ_UNCOMMITTED)
        # What was written before now may still wait for its marker, so the goal is the end, not the last stable offset.
        self._plan = ReadingPlan(history, start=ends if from_end else None, goals=None if follow else ends)
        config = {
            **consumer_config(
                settings.bootstrap_servers,
                isolation=Isolation.READ_COMMITTED,
                security=settings.kafka,
                client_id=settings.client_name,
                extra={"queued.max.messages.kbytes": _QUEUED_KIB, "fetch.queue.backoff.ms": _QUEUE_FULL_MS},
            ),
            "enable.partition.eof": True,
            "error_cb": lambda error: logger.info("the consumer reports: %s", error),
        }
        try:
            self._consumer = Consumer(config, logger=logger)
        except (KafkaException, ValueError, TypeError) as exc:
            raise translate(exc, f"read {stream}") from exc

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect."""
        self._consumer.close()

    def batches(self) -> Iterator[list[Delivered]]:
        """What can be read, as it arrives; ends at the goal, or never when it follows.

        Raises:
            UnavailableError: nothing became readable for ``stalled_s``; says what is waited for.
            StreamNotFound: the stream was deleted.
            ConflictError: it was deleted and created again.
            CorruptDataError: records are gone, or stand where none can be.
        """
        poll, consume = self._consumer.poll, self._consumer.consume
        while not self._plan.is_finished():
            self._refresh()
            self._assign()
            first = poll(_POLL_S)
            if first is None:
                self._check_stalled()
                continue
            # consume(n, t) waits until there are n messages or t has passed; with 0 it takes what is there.
            records = [item for message in (first, *consume(_BATCH, 0)) for item in self._take(message)]
            if records:
                self._moved_at = time.monotonic()
                yield records
            else:
                self._check_stalled()

    def _take(self, message: Message) -> Iterator[Delivered]:
        error = message.error()
        segment = self._topics.get(message.topic() or "")
        offset = message.offset()
        if error is None:
            if segment is not None and offset is not None and self._plan.accept(segment, offset):
                yield Delivered(segment, message)
        elif error.code() == KafkaError._PARTITION_EOF:
            if segment is not None and offset is not None and offset > self._plan.readable().get(segment, offset):
                self._moved_at = time.monotonic()
            if segment is not None and offset is not None:
                self._plan.reached(segment, offset)
        else:
            self._judge(error, segment)

    def _judge(self, error: KafkaError, segment: SegmentId | None) -> None:
        """Raise unless the consumer gets over an error by itself."""
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            raise CorruptDataError(
                f"segment {segment} of {self._stream} has lost records that were still to be read: {error.str()}"
            )
        fault = translate(error, f"read {self._stream}", f"stream {self._stream}")
        if isinstance(fault, NotFoundError):
            self._load(None)  # says so if the stream is gone; otherwise not all brokers know the topic yet
        elif not isinstance(fault, KafkaUnavailable):
            raise fault
        logger.info("reading %s: %s", self._stream, fault)

    def _refresh(self) -> None:
        """Read the epochs again when there may be more, or the end of a segment is missing."""
        age_s = time.monotonic() - self._loaded_at
        if not (self._changed.is_set() or (age_s >= _PENDING_ENDS_S and self._plan.waits_for_ends())):
            return
        try:
            watch = self._changed.set if self._changed.is_set() else None
            self._changed.clear()
            self._plan.update(self._load(watch))
            self._loaded_at = time.monotonic()
        except UnavailableError as exc:
            if not self._follow:
                raise
            logger.warning("the epochs of %s can not be read now, trying again: %s", self._stream, exc)
            self._changed.set()
            time.sleep(_RETRY_S)

    def _assign(self) -> None:
        """Have the consumer read exactly what the plan says."""
        readable = self._plan.readable()
        try:
            if fresh := readable.keys() - self._assigned:
                self._topics |= {self._stream.segment_topic(segment): segment for segment in fresh}
                self._consumer.incremental_assign(
                    [
                        # The log may begin later than at 0 if retention is set on the topic.
                        TopicPartition(self._stream.segment_topic(segment), 0, readable[segment] or OFFSET_BEGINNING)
                        for segment in sorted(fresh)
                    ]
                )
            if done := self._assigned - readable.keys():
                self._consumer.incremental_unassign(
                    [TopicPartition(self._stream.segment_topic(segment), 0) for segment in done]
                )
        except KafkaException as exc:
            raise translate(exc, f"read {self._stream}") from exc
        self._assigned = set(readable)

    def _check_stalled(self) -> None:
        if self._follow or time.monotonic() - self._moved_at < self._stalled_s:
            return
        waiting = ", ".join(f"{segment} at {offset}" for segment, offset in self._plan.readable().items())
        raise UnavailableError(
            f"nothing became readable for {self._stalled_s:g} s, although more was written to {self._stream} "
            f"(segments {waiting}): Kafka does not answer, or a native transaction is still open there"
        )


def _ends(admin: TopicAdmin, stream: StreamName, history: EpochHistory, isolation: Isolation) -> dict[SegmentId, int]:
    """Where the active segments end."""
    topics = {segment: stream.segment_topic(segment) for segment in history.active.segment_ids}
    found = admin.end_offsets(topics.values(), isolation)
    return {segment: found[topic] for segment, topic in topics.items()}
