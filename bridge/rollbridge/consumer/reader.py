"""Reader of a stream: a ``read_committed`` consumer that follows the epochs by a reading plan.

Any Kafka client can read a stream by subscribing to the pattern of its topics. This reader adds the order across
epochs (predecessors to their sealed ends before successors), positions that can be saved, a start by time or by DLSN,
and previews of open transactions.

:func:`locate` and :func:`cut_before` turn a start, or a truncation, into offsets of segments by asking the brokers. A
reader runs on the caller's thread, without locks; only the epochs are loaded on a thread beside it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain
from operator import length_hint
from typing import Final, Literal, Self, assert_never

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from rollbridge.calls import Deadline, Errand, answers_within
from rollbridge.config import ConnectionSettings
from rollbridge.consumer.adopted import BREAKING
from rollbridge.consumer.preview import PreviewTail
from rollbridge.consumer.records import Batch, Origin, Preview, Record, last_offsets, record_of, records_of
from rollbridge.consumer.writers import Writers, fetching
from rollbridge.errors import (
    InvalidRequestError,
    KafkaUnavailableError,
    NotFoundError,
    RollbridgeError,
    TruncatedError,
    UnavailableError,
)
from rollbridge.forks import hold
from rollbridge.kafka.clients import TICK_S, assign_more, consumer_config, open_consumer
from rollbridge.kafka.errors import translate
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.offsets import LogOffsets
from rollbridge.kafka.ratelimit import limited
from rollbridge.kafka.standstill import Lookout
from rollbridge.model.epochs import EpochHistory
from rollbridge.model.ids import SegmentId
from rollbridge.model.names import Partition, PlaceIndex, SegmentPlaces, StreamName
from rollbridge.model.position import At, Earliest, Latest, ReadPosition, Since, Start, StartLike, parse_start
from rollbridge.model.reading import ReadingPlan
from rollbridge.model.truncation import consistent, frontier

# From a start to offsets of segments


@dataclass(frozen=True, slots=True)
class Begin:
    """Offsets with which a :class:`~rollbridge.model.reading.ReadingPlan` begins."""

    start: Mapping[SegmentId, int] | None = None
    floor: Mapping[SegmentId, int] = field(default_factory=dict)


def locate(offsets: LogOffsets, places: SegmentPlaces, history: EpochHistory, start: Start) -> Begin:
    """Return the offsets to begin at.

    Raises:
        InvalidRequestError: The start names a segment that the stream does not have, or an offset beyond its end.
        TruncatedError: Records from there on have been deleted.
        StreamRecreatedError: The start belongs to a deleted stream of this name.
        KafkaUnavailableError, NotFoundError.
    """
    stream, stored = places.stream, _placed(places, history.stored())
    removed = {segment: history.sealed_end(segment) or 0 for segment in history.removed}
    match start:
        case Latest():
            return Begin(readable_ends(offsets, places, history, Isolation.READ_COMMITTED))
        case Earliest():
            return Begin(floor=removed | _by_segment(stored, offsets.first(stored)))
        case Since(ms):
            return Begin(floor=removed | since(offsets, stored, ms))
        case At(wanted):
            history.check_life(stream, wanted)
            first = removed | _by_segment(stored, offsets.first(stored))
            end = removed | _by_segment(stored, offsets.end(stored, Isolation.READ_UNCOMMITTED))
            for segment, offset in wanted.items():
                if history.is_dropped(segment):
                    raise TruncatedError(
                        f"segment {segment} of {stream} was removed, and its epoch dropped: whatever it held from "
                        f"offset {offset} on has been deleted; begin at 'earliest', or at a later position"
                    )
                _check(stream, segment, offset, first.get(segment), end.get(segment, 0))
            for segment in sorted(history.graph.descendants(wanted)):
                _check(stream, segment, 0, first.get(segment), end.get(segment, 0))
            return Begin(wanted, first)
        case _:
            assert_never(start)


def cut_before(
    offsets: LogOffsets, places: SegmentPlaces, history: EpochHistory, start: Start
) -> Mapping[SegmentId, int]:
    """Return the stream cut that deletes what a reader with this start skips; see :mod:`rollbridge.model.truncation`.

    Raises:
        InvalidRequestError: The cut would delete nothing.
        StreamRecreatedError: The start belongs to a deleted stream of this name.
        KafkaUnavailableError, NotFoundError.
    """
    match start:
        case At(wanted):
            history.check_life(places.stream, wanted)
            return wanted
        case Since(ms):
            stored = _placed(places, history.stored())
            return frontier(history, consistent(history, since(offsets, stored, ms)))
        case Latest():
            return readable_ends(offsets, places, history, Isolation.READ_COMMITTED)
        case Earliest():
            raise InvalidRequestError("there is nothing before the earliest record; nothing was deleted")
        case _:
            assert_never(start)


def beginning(offsets: LogOffsets, places: SegmentPlaces, history: EpochHistory) -> ReadPosition:
    """Return the position of the first records that are left.

    Raises:
        KafkaUnavailableError, NotFoundError.
    """
    begin = locate(offsets, places, history, Earliest())
    return ReadPosition(places.stream, frontier(history, consistent(history, begin.floor)))


def since(offsets: LogOffsets, stored: Mapping[Partition, SegmentId], ms: int) -> dict[SegmentId, int]:
    """Return the offset of the first record at or after a time (ms since 1970), by segment; the end if there is none.

    Raises:
        KafkaUnavailableError, NotFoundError.
    """
    found = offsets.since_or_end(stored, ms)
    return {segment: found[place] for place, segment in stored.items()}


def readable_ends(
    offsets: LogOffsets, places: SegmentPlaces, history: EpochHistory, isolation: Isolation
) -> dict[SegmentId, int]:
    """Return the ends of the active segments."""
    active = _placed(places, history.active.segment_ids)
    return _by_segment(active, offsets.end(active, isolation))


def _placed(places: SegmentPlaces, segments: Iterable[SegmentId]) -> dict[Partition, SegmentId]:
    return {places.of(segment): segment for segment in segments}


def _by_segment(placed: Mapping[Partition, SegmentId], found: Mapping[Partition, int]) -> dict[SegmentId, int]:
    return {placed[place]: offset for place, offset in found.items()}


def _check(stream: StreamName, segment: SegmentId, offset: int, first: int | None, end: int) -> None:
    if first is None:
        raise InvalidRequestError(f"{stream} has no segment {segment}, so nothing can be begun there")
    if offset > end:
        raise InvalidRequestError(
            f"offset {offset} of segment {segment} of {stream} is beyond its end, which is at {end}"
        )
    if offset < first:
        raise TruncatedError(
            f"segment {segment} of {stream} begins at offset {first} now: the records from {offset} on have been "
            "deleted; begin at 'earliest', or at a later position"
        )


logger = limited(logging.getLogger(__name__))

LoadHistory = Callable[[Callable[[], None] | None], EpochHistory]
"""Loader of the stream's epochs; calls its argument once when there may be more of them."""

IsolationLevel = Literal["read_committed", "read_uncommitted"]

_POLL_S: Final = 0.1
_PREVIEW_POLL_S: Final = 0.02
_BATCH: Final = 500
"""Records per call of ``consume``; larger batches leave the processor's cache before they are processed."""
_REFRESH_S: Final = 0.02
_AT_ONCE_S: Final = 0.02
"""Time that a poll waits for the epochs; slower ones are taken in by the next poll."""
_PENDING_ENDS_S: Final = 0.1
_RETRY_S: Final = 1.0
_QUEUE_FULL_MS: Final = 5
_IDLE_S: Final = 2.0
"""Silence after which a reader asks less often."""
_IDLE_POLL_S: Final = 0.25

_error = Message.error


class Pace(IntEnum):
    """How long brokers may keep a fetch that finds nothing, in ms.

    The library asks a broker for nothing else meanwhile, so a segment that continues another one waits for that twice:
    until its leader is looked up, and until its records are asked for.
    """

    CATCHING_UP = 2
    """Many segments follow each other."""
    FOLLOWING = 10
    """What is read is active, or nearly so."""
    IDLE = 2_000
    """It is, and nothing has been written for a while. Records come as early, but an added segment would wait."""


class Reader:
    """Reader of a stream, all its segments, in the order of their epochs; ``b.reader(...)``. Not thread-safe.

    Iterate over it, or take records with :meth:`poll` and :meth:`consume`. Use it in a ``with`` block, or close it.

    Every method that reads raises:
        UnavailableError: Nothing became readable for ``stalled_s``; names what is missing (unless ``follow``).
        StreamNotFoundError: The stream was deleted.
        ConflictError: The stream was deleted and created again, or the topic that it has adopted was, or has grown.
        TruncatedError: Records that were still to be read have been deleted.
        CorruptDataError: Records stand where none can be.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        places: SegmentPlaces,
        load: LoadHistory,
        *,
        start: StartLike = "earliest",
        isolation: IsolationLevel = "read_committed",
        follow: bool = True,
        stalled_s: float = 30.0,
        preview: PreviewTail | None = None,
    ) -> None:
        """Look up where to begin and, unless ``follow``, where to stop; see :meth:`rollbridge.Bridge.reader`.

        Args:
            settings: How to reach Kafka.
            places: Stream to read, and where its segments lie.
            load: Loader of its epochs.
            start: Start position, see :mod:`rollbridge.model.position`.
            isolation: ``read_uncommitted`` shows records of open transactions, by ``preview``.
            follow: Continue with later commits, in later epochs; otherwise stop where the active segments end now.
            stalled_s: Seconds without a readable record after which reading fails, unless ``follow``.
            preview: Reader of open transactions; closed with this reader.

        Raises:
            InvalidRequestError, TruncatedError: Reading cannot begin there.
            StreamNotFoundError, KafkaUnavailableError, ZooKeeperUnavailableError.
        """
        self._stream = stream = places.stream
        self._at = places
        wanted = parse_start(stream, start)
        self._load = load
        self._follow = follow
        self._stalled_s = stalled_s
        self._preview = preview if isolation == "read_uncommitted" else None
        # Set by ZooKeeper's watches, on a thread of the session; everything else is used by the caller's thread only.
        self._changed = threading.Event()
        self._placed: dict[Partition, SegmentId] = {}
        self._assigned: set[SegmentId] = set()
        self._loaded_at = self._moved_at = time.monotonic()
        history = load(self._changed.set if follow else None)
        self._history = history
        self._writers = Writers(fetching(settings.bootstrap_servers, settings.kafka, settings.client_name))
        self._origin = Origin(lambda _: self._history, index=PlaceIndex([places]), writers=self._writers)
        offsets = LogOffsets(settings.bootstrap_servers, security=settings.kafka, client_id=settings.client_name)
        try:
            begin = locate(offsets, places, history, wanted)
        except NotFoundError:
            fresh = load(None)
            if (fresh.removed, fresh.first) == (history.removed, history.first):
                raise
            self._history = history = fresh  # a segment was removed between the two requests
            begin = locate(offsets, places, history, wanted)
        # Records written before now may still wait for their marker, so the goal is the end, not the last stable
        # offset.
        goals = None if follow else readable_ends(offsets, places, history, Isolation.READ_UNCOMMITTED)
        self._plan = ReadingPlan(history, start=begin.start, floor=begin.floor, goals=goals)
        self._before: dict[SegmentId, int] | None = None
        self._planned = -1
        self._refresh_at = 0.0
        self._loading: Errand[EpochHistory] = Errand("rollbridge-epochs")
        self._broken: RollbridgeError | None = None
        self._batch: list[Message] = []
        self._unjudged: list[Message] = []
        self._rest: Iterator[Message] = iter(self._batch)
        self._previews: Iterator[Preview] = iter(())
        self._records: Iterator[Record] = iter(())
        self._config = {
            **consumer_config(
                settings.bootstrap_servers,
                isolation=Isolation.READ_COMMITTED,
                security=settings.kafka,
                client_id=settings.client_name,
                extra={"fetch.queue.backoff.ms": _QUEUE_FULL_MS},
            ),
            "enable.partition.eof": True,
            "error_cb": lambda error: logger.info("the consumer reports: %s", error),
        }
        self._is_new = True
        self._pace = self._wanted_pace(Pace.FOLLOWING)
        self._consumer = self._open()
        hold(self, "_consumer", "_preview", "_lookout")
        self._lookout = Lookout(
            settings.bootstrap_servers,
            Isolation.READ_COMMITTED,
            security=settings.kafka,
            client_id=settings.client_name,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect. The position remains available."""
        if self._preview is not None:
            self._preview.close()
        self._consumer.close()

    @property
    def stream(self) -> str:
        """Name of the stream, ``scope/stream``."""
        return str(self._stream)

    @property
    def position(self) -> ReadPosition:
        """Position behind the records handed out: pass it, or its text, as ``start``.

        Previews do not count: a reader that begins there previews the transactions that are open then.
        """
        left = length_hint(self._rest)
        if not left:
            return ReadPosition(self._stream, self._plan.frontier())
        begin = len(self._batch) - left
        if self._before is None:  # no segment was finished with this batch, so going back is enough
            offsets = self._plan.frontier()
            offsets |= dict(map(self._place, reversed(self._batch[begin:])))
        else:
            offsets = dict(self._before)
            offsets |= {segment: offset + 1 for segment, offset in map(self._place, self._batch[:begin])}
        return ReadPosition(self._stream, offsets)

    def _place(self, message: Message) -> tuple[SegmentId, int]:
        return self._placed[message.topic() or "", message.partition() or 0], message.offset() or 0

    def __iter__(self) -> Iterator[Record]:
        """Yield records as they become readable; end at the goal, or never with ``follow``."""
        while True:
            yield from self._records
            if not self._fetch(self._slice_s):
                if self._is_finished():
                    return
                self._check_stalled()

    def batches(self) -> Iterator[Batch]:
        """Yield records in batches, as they arrive; a batch counts as handed out as a whole."""
        while True:
            # If the caller leaves the loop at the previews, the committed records are still there when it comes back.
            if previews := list(self._previews):
                yield Batch(previews, self._origin)
            if left := length_hint(self._rest):
                self._rest, self._records = iter(()), iter(())
                yield Batch(self._batch[-left:] if left < len(self._batch) else self._batch, self._origin)
            if not self._fetch(self._slice_s):
                if self._is_finished():
                    return
                self._check_stalled()

    def poll(self, timeout_s: float = 0.0) -> Record | None:
        """Return the next record; None if none arrives in time, or none is left (see :meth:`is_finished`)."""
        return next(iter(self.consume(1, timeout_s)), None)

    def consume(self, records_max: int, timeout_s: float = 0.0) -> list[Record]:
        """Return up to ``records_max`` records: those at hand, or the first that arrive within ``timeout_s``."""
        if records_max < 1:
            raise InvalidRequestError(f"at least one record has to be asked for, not {records_max}")
        deadline = Deadline(timeout_s)
        while True:
            found = [record for _, record in zip(range(records_max), self._records, strict=False)]
            left_s = deadline.left()
            if found or self._is_finished():
                return found
            # A preview may have to look up whether what has just begun had ended before.
            with answers_within(left_s):
                is_more = self._fetch(min(self._slice_s, left_s))
            if not is_more:
                self._check_stalled()
                if left_s < TICK_S:
                    return []

    def is_finished(self) -> bool:
        """Return True if everything up to the goal was handed out; never with ``follow``."""
        return self._is_finished() and not length_hint(self._rest)

    def _is_finished(self) -> bool:
        return self._plan.is_finished() and (self._preview is None or self._preview.is_caught_up)

    @property
    def _slice_s(self) -> float:
        """Interval between checks for new epochs."""
        return _IDLE_POLL_S if self._pace is Pace.IDLE else _POLL_S

    def _fetch(self, timeout_s: float) -> bool:
        """Take the records at hand, or that arrive in time, into ``_records``; return False if there are none."""
        previews: list[Preview] = []
        if self._preview is not None:
            timeout_s = min(timeout_s, _PREVIEW_POLL_S)
            wait_s = 0.0 if self._preview.is_caught_up else timeout_s
            previews = list(self._preview.take(wait_s))
            if previews or wait_s:
                timeout_s = 0.0
        # The first previews are handed out while the consumer connects.
        is_first, self._is_new = self._is_new, False
        messages = [] if previews and is_first else self._fetch_committed(timeout_s)
        self._batch = messages
        self._writers.handed_out(messages)
        self._rest = iter(messages)
        self._records = records_of(messages, self._rest, self._origin)
        self._previews = iter(previews)
        if previews:
            shown = (record_of(item, self._origin) for item in self._previews)
            self._records = chain(shown, self._records)
        if messages or previews:
            self._moved_at = time.monotonic()
        return bool(messages or previews)

    def _fetch_committed(self, timeout_s: float) -> list[Message]:
        if self._plan.is_finished():
            return []
        self._refresh()
        if stuck := self._lookout.stuck(self._positions):
            logger.warning("nothing comes from %s although there is something; reading anew", sorted(stuck))
            self._reopen(self._wanted_pace(Pace.FOLLOWING))
        elif (pace := self._wanted_pace(self._pace)) is not self._pace:
            self._reopen(pace)
        self._assign()
        messages, self._unjudged = self._unjudged, []
        if not messages:
            first = self._consumer.poll(timeout_s)
            if first is None:
                return []
            # consume(n, t) waits for n messages or until t has passed; with 0 it takes what is at hand.
            messages = [first, *self._consumer.consume(_BATCH, 0)]
        if self._take_all(messages):
            self._before = None
            return messages
        self._before = self._plan.frontier()
        return self._take_each(messages)

    def _take_each(self, messages: list[Message]) -> list[Message]:
        """Return the messages to hand out before the first error.

        That error is raised at once if there are none, and otherwise by the next call.
        """
        found: list[Message] = []
        for place, message in enumerate(messages):
            try:
                if self._take(message):
                    found.append(message)
            except RollbridgeError:
                self._unjudged = messages[place:] if found else messages[place + 1 :]
                if found:
                    return found
                raise
        return found

    def _open(self) -> Consumer:
        return open_consumer({**self._config, "fetch.wait.max.ms": self._pace}, f"read {self._stream}", logger)

    def _wanted_pace(self, pace: Pace) -> Pace:
        """Return the pace that follows ``pace``, by what there is to read and for how long nothing has come."""
        silent_s = time.monotonic() - self._moved_at
        if silent_s < _IDLE_S and self._plan.is_far_behind():
            return Pace.CATCHING_UP
        if not self._plan.is_at_front():
            return Pace.FOLLOWING
        if pace is Pace.IDLE or (self._follow and silent_s >= _IDLE_S):
            return Pace.IDLE
        return Pace.FOLLOWING

    def _reopen(self, pace: Pace) -> None:
        """Replace the consumer by one at the same position; what was fetched and not handed out is fetched again."""
        before, self._pace = self._consumer, pace
        self._consumer, self._assigned, self._planned = self._open(), set(), -1
        before.close()

    def _positions(self) -> dict[Partition, int]:
        return {
            self._at.of(segment): offset
            for segment, offset in self._plan.readable().items()
            if segment in self._assigned
        }

    def _take_all(self, messages: list[Message]) -> bool:
        """Record messages all of which are to be handed out; return False if each has to be judged by itself."""
        if any(map(_error, messages)):
            return False
        taken: dict[SegmentId, int] = {}
        for place, last in last_offsets(messages, self._origin.index.adopted).items():
            segment = self._placed.get(place)
            if segment is None:
                return False
            taken[segment] = last
        return self._plan.take(taken)

    def _take(self, message: Message) -> bool:
        error = message.error()
        segment = self._placed.get((message.topic() or "", message.partition() or 0))
        offset = message.offset()
        if error is None:
            return segment is not None and offset is not None and self._plan.accept(segment, offset)
        if error.code() == KafkaError._PARTITION_EOF:
            if segment is not None and offset is not None:
                if offset > self._plan.readable().get(segment, offset):
                    self._moved_at = time.monotonic()
                self._plan.reached(segment, offset)
        else:
            self._judge(error, segment)
        return False

    def _judge(self, error: KafkaError, segment: SegmentId | None) -> None:
        """Raise unless the consumer recovers from an error by itself."""
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            self._load(None)  # raises if the adopted topic was created anew, so that its offsets are other ones
            raise TruncatedError(
                f"segment {segment} of {self._stream} has lost records that were still to be read: {error.str()}"
            )
        fault = translate(error, f"read {self._stream}", f"stream {self._stream}")
        if isinstance(fault, NotFoundError):
            # Loading raises if the stream is gone. If the segment is not gone either, some brokers do not know its
            # topic yet.
            if segment is not None and self._load(None).is_removed(segment):
                raise TruncatedError(
                    f"segment {segment} of {self._stream} was removed with records that were still to be read"
                )
        elif not isinstance(fault, KafkaUnavailableError):
            raise fault
        logger.info("reading %s: %s", self._stream, fault)

    def _refresh(self) -> None:
        """Read the epochs again when there may be more, or the end of a segment is missing.

        Runs on a thread beside the polling one, because ZooKeeper may take long to answer.
        """
        if self._broken is not None:
            raise self._broken
        if not self._loading.under_way:
            now = time.monotonic()
            if now < self._refresh_at:
                return
            self._refresh_at = now + _REFRESH_S
            pending = now - self._loaded_at >= _PENDING_ENDS_S and self._plan.waits_for_ends()
            if not (self._changed.is_set() or pending):
                return
            watch = self._changed.set if self._changed.is_set() else None
            self._changed.clear()
            self._loading.begin(lambda: self._load(watch))
            self._loading.wait(_AT_ONCE_S)
        try:
            history = self._loading.take()
        except BREAKING as fault:
            self._broken = fault
            raise
        except UnavailableError as exc:
            if not self._follow:
                raise
            logger.warning("the epochs of %s cannot be read now, trying again: %s", self._stream, exc)
            self._changed.set()
            self._refresh_at = time.monotonic() + _RETRY_S
            return
        if history is not None:
            self._loaded_at = time.monotonic()
            if not self._plan.update(history):
                logger.warning("ZooKeeper holds fewer epochs of %s than it did; they are read again", self._stream)
                self._changed.set()
                self._refresh_at = time.monotonic() + _RETRY_S
                return
            self._history = history
            if self._pace is Pace.IDLE:
                self._moved_at = self._loaded_at
                self._reopen(self._wanted_pace(Pace.FOLLOWING))

    def _assign(self) -> None:
        """Assign exactly the segments that the plan names to the consumer."""
        if self._planned == self._plan.changes:
            return
        self._planned = self._plan.changes
        readable = self._plan.readable()
        try:
            if done := self._assigned - readable.keys():
                self._consumer.incremental_unassign([TopicPartition(*self._at.of(segment)) for segment in done])
            if fresh := readable.keys() - self._assigned:
                self._placed |= {self._at.of(segment): segment for segment in fresh}
                assign_more(
                    self._consumer,
                    [TopicPartition(*self._at.of(segment), readable[segment]) for segment in sorted(fresh)],
                )
        except KafkaException as exc:
            raise translate(exc, f"read {self._stream}") from exc
        self._assigned = set(readable)

    def _check_stalled(self) -> None:
        if self._follow or self._plan.is_finished() or time.monotonic() - self._moved_at < self._stalled_s:
            return
        waiting = ", ".join(f"{segment} at {offset}" for segment, offset in self._plan.readable().items())
        raise UnavailableError(
            f"nothing became readable for {self._stalled_s:g} s, although more was written to {self._stream} "
            f"(segments {waiting}): Kafka does not answer, or a native transaction is still open there"
        )
