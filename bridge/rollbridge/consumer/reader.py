"""Reader of a stream: committed records of its segments, which follow the epochs by a reading plan.

Any Kafka client can read a stream by subscribing to the pattern of its topics. This reader adds the order across
epochs (predecessors to their sealed ends before successors), positions that can be saved, a start by time or by DLSN,
and previews of open transactions.

It fetches on its own connections (:mod:`rollbridge.kafka.follower`), without a thread that reads ahead: the next
request is sent before what has come is handed out, so brokers answer it meanwhile::

    plan: what may be read -> follower: requests, answers -> stretch: records, as they are taken
          ^------------------- how far it was handed out ------------------'

:func:`locate` and :func:`cut_before` turn a start, or a truncation, into offsets of segments by asking the brokers. A
reader runs on the caller's thread, without locks; only epochs and leaders are looked up on background threads.

Tour of a read, stop 1 of 3: see docs/tour.md.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, Literal, assert_never

from rollbridge.base.arguments import checked
from rollbridge.base.deadlines import BackgroundCall, Closable, Deadline, answers_within
from rollbridge.base.forks import hold
from rollbridge.base.ids import SegmentId
from rollbridge.base.logs import limited
from rollbridge.consumer.adopted import BREAKING
from rollbridge.consumer.fetched_ranges import Batch, FetchedRange
from rollbridge.consumer.preview import PreviewTail
from rollbridge.consumer.records import Origin, Preview, Record, record_of
from rollbridge.errors import (
    CorruptDataError,
    InvalidRequestError,
    KafkaUnavailableError,
    NotFoundError,
    RollbridgeError,
    TruncatedError,
    UnavailableError,
)
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.clients import TICK_S
from rollbridge.kafka.fetch import LogDivergedError
from rollbridge.kafka.fetch_plan import Fetched, FetchError
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.offsets import LogOffsets
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.names import Partition, PlaceIndex, SegmentPlaces, StreamName
from rollbridge.stream.positions import At, Earliest, Latest, ReadPosition, Since, Start, StartLike, parse_start
from rollbridge.stream.reading import ReadingPlan
from rollbridge.stream.truncation import consistent, frontier

# From a start to offsets of segments


@dataclass(frozen=True, slots=True)
class Begin:
    """Offsets with which a :class:`~rollbridge.stream.reading.ReadingPlan` begins."""

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
    """Return the stream cut that deletes what a reader with this start skips; see :mod:`rollbridge.stream.truncation`.

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
_REFRESH_S: Final = 0.02
_AT_ONCE_S: Final = 0.02
"""Time that a poll waits for the epochs; slower ones are taken in by the next poll."""
_PENDING_ENDS_S: Final = 0.1
_RETRY_S: Final = 1.0
_IDLE_S: Final = 2.0
"""Silence after which a reader looks less often whether there are more epochs."""
_IDLE_POLL_S: Final = 0.25


@checked()
class Reader(Closable):
    """Reader of a stream, all its segments, in the order of their epochs; ``b.reader(...)``. Not thread-safe.

    Iterate over it, or take records with :meth:`poll` and :meth:`consume`. Use it in a ``with`` block, or close it.

    Every method that reads raises:
        UnavailableError: Nothing became readable for ``stalled_s``; names what is missing (unless ``follow``).
        StreamNotFoundError: The stream was deleted.
        ConflictError: The stream was deleted and created again, or the topic that it has adopted was.
        TruncatedError: Records that were still to be read have been deleted.
        CorruptDataError: Records lie where none can be.
    """

    def __init__(
        self,
        kafka: KafkaClient,
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
            kafka: Kafka's client; the caller closes it.
            places: Stream to read, and where its segments lie.
            load: Loader of its epochs.
            start: Start position, see :mod:`rollbridge.stream.positions`.
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
        self._origin = Origin(lambda _: self._history, index=PlaceIndex([places]))
        offsets = kafka.offsets
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
        self._planned = -1
        self._refresh_at = 0.0
        self._loading: BackgroundCall[EpochHistory] = BackgroundCall("rollbridge-epochs")
        self._broken: RollbridgeError | None = None
        self._arrived: deque[Fetched | FetchError] = deque()
        self._stretch: FetchedRange | None = None
        self._previews: Iterator[Preview] = iter(())
        self._records: Iterator[Record] = iter(())
        self._is_new = True
        self._follower = kafka.follow(Isolation.READ_COMMITTED, name="rollbridge-reader", check_epochs=True)
        hold(self, "_follower", "_preview")

    def close(self) -> None:
        """Disconnect. The position remains available."""
        if self._preview is not None:
            self._preview.close()
        self._follower.close()

    def stop(self) -> None:
        """Raise InvalidRequestError once what was fetched has been handed out. May be called from any thread."""
        self._follower.stop()

    @property
    def stream(self) -> str:
        """Name of the stream, ``scope/stream``."""
        return str(self._stream)

    @property
    def position(self) -> ReadPosition:
        """Position behind the records handed out: pass it, or its text, as ``start``.

        Previews do not count: a reader that begins there previews the transactions that are open then.
        """
        self._settle()
        offsets = self._plan.frontier()
        if self._stretch is not None:
            offsets[self._stretch.segment] = self._stretch.next
        return ReadPosition(self._stream, offsets)

    def __iter__(self) -> Iterator[Record]:
        """Yield records as they become readable; end at the goal, or never with ``follow``."""
        return chain.from_iterable(self._arriving())

    def _arriving(self) -> Iterator[Iterator[Record]]:
        while True:
            yield self._records
            if not self._fetch(self._slice_s):
                if self._is_finished():
                    return
                self._check_stalled()

    def batches(self) -> Iterator[Batch]:
        """Yield records in batches, as they arrive; a batch counts as handed out as a whole."""
        while True:
            # If the caller leaves the loop at the previews, the committed records are still there when it comes back.
            if previews := list(self._previews):
                yield Batch.of_previews(previews, self._origin)
            if self._stretch is not None:
                self._records = iter(())
                yield from self._stretch.batches()
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
        self._settle()
        return self._is_finished()

    def _is_finished(self) -> bool:
        return self._plan.is_finished() and (self._preview is None or self._preview.is_caught_up)

    @property
    def _slice_s(self) -> float:
        return _IDLE_POLL_S if self._follow and time.monotonic() - self._moved_at >= _IDLE_S else _POLL_S

    def _fetch(self, timeout_s: float) -> bool:
        """Take the records at hand, or that arrive in time, into ``_records``; return False if there are none."""
        previews: list[Preview] = []
        if self._preview is not None:
            timeout_s = min(timeout_s, _PREVIEW_POLL_S)
            wait_s = 0.0 if self._preview.is_caught_up else timeout_s
            previews = list(self._preview.take(wait_s))
            if previews or wait_s:
                timeout_s = 0.0
        # The first previews are handed out while the follower connects.
        is_first, self._is_new = self._is_new, False
        if not (previews and is_first):
            self._fetch_committed(timeout_s)
        self._previews = iter(previews)
        self._records = iter(()) if self._stretch is None else self._stretch.records()
        if previews:
            shown = (record_of(item, self._origin) for item in self._previews)
            self._records = chain(shown, self._records)
        if found := bool(self._stretch or previews):
            self._moved_at = time.monotonic()
        return found

    def _fetch_committed(self, timeout_s: float) -> None:
        """Open the next stretch in which there may be records, unless there is something left of the present one."""
        if self._stretch is not None:
            if not self._stretch.is_exhausted:
                return  # the caller left the loop over its records
            self._close_stretch(self._stretch)
        if self._plan.is_finished():
            return
        self._refresh()
        self._assign()
        if not self._arrived:
            self._arrived += self._follower.poll(timeout_s)
            if self._arrived:
                self._leave_ends()
                self._follower.ask()
        while self._arrived and self._stretch is None:
            item = self._arrived.popleft()
            if isinstance(item, Fetched):
                self._open_stretch(item)
            else:
                self._judge(item, self._placed.get(item.partition))
        if self._stretch is None and self._follower.stopped:
            raise InvalidRequestError(
                f"this reader of {self._stream}, or its connection, was closed; open another one at its position"
            )

    def _leave_ends(self) -> None:
        """Stop fetching segments of which all that is wanted has arrived."""
        for item in self._arrived:
            segment = self._placed.get(item.partition)
            if isinstance(item, Fetched) and segment in self._assigned and self._plan.is_limit(segment, item.end):
                self._follower.leave(item.partition)

    def _open_stretch(self, fetched: Fetched) -> None:
        """Hand out what is wanted of a stretch next, or take note of it if that is nothing."""
        segment = self._placed.get(fetched.partition)
        if segment is None:
            return
        wanted = self._plan.wanted(segment, fetched.end)
        if not wanted:
            return
        stretch = FetchedRange(fetched, segment, wanted, self._origin)
        if stretch.is_empty():
            self._close_stretch(stretch)
        else:
            self._stretch = stretch

    def _settle(self) -> None:
        """Close the present stretch if its last record was handed out."""
        with suppress(CorruptDataError):  # raised to the next caller that reads
            if self._stretch is not None and self._stretch.is_used_up():
                self._close_stretch(self._stretch)

    def _close_stretch(self, stretch: FetchedRange) -> None:
        self._plan.reached(stretch.segment, stretch.end)
        self._stretch = None
        self._moved_at = time.monotonic()  # the caller's time does not count as a stall

    def _judge(self, trouble: FetchError, segment: SegmentId | None) -> None:
        """Raise unless the follower recovers from a fault by itself."""
        if segment not in self._assigned:
            return
        fault = trouble.fault
        if trouble.resume is not None:
            self._load(None)  # raises if the adopted topic was created again, so that its offsets are other ones
            if isinstance(fault, LogDivergedError):
                raise fault
            raise TruncatedError(
                f"segment {segment} of {self._stream} has lost records that were still to be read: {fault}"
            ) from fault
        if isinstance(fault, NotFoundError):
            # Loading raises if the stream is gone. If the segment is not gone either, some brokers do not know its
            # topic yet.
            if self._load(None).is_removed(segment):
                raise TruncatedError(
                    f"segment {segment} of {self._stream} was removed with records that were still to be read"
                )
        elif not isinstance(fault, KafkaUnavailableError):
            raise fault
        logger.info("reader.retrying stream=%s: %s", self._stream, fault)

    def _refresh(self) -> None:
        """Read the epochs again when there may be more, or the end of a segment is missing.

        Runs on a background thread, because ZooKeeper may take long to answer.
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
            logger.warning("reader.epochs_unread stream=%s: retrying: %s", self._stream, exc)
            self._changed.set()
            self._refresh_at = time.monotonic() + _RETRY_S
            return
        if history is not None:
            self._loaded_at = time.monotonic()
            if not self._plan.update(history):
                logger.warning("reader.epochs_lost stream=%s: ZooKeeper holds fewer; rereading", self._stream)
                self._changed.set()
                self._refresh_at = time.monotonic() + _RETRY_S
                return
            self._history = history

    def _assign(self) -> None:
        """Follow exactly the segments that the plan names."""
        if self._planned == self._plan.changes:
            return
        self._planned = self._plan.changes
        readable = self._plan.readable()
        for segment in self._assigned - readable.keys():
            self._follower.leave(self._at.of(segment))
        for segment in sorted(readable.keys() - self._assigned):
            place = self._at.of(segment)
            self._placed[place] = segment
            self._follower.follow(place, readable[segment])
        self._assigned = set(readable)

    def _check_stalled(self) -> None:
        if self._follow or self._plan.is_finished() or time.monotonic() - self._moved_at < self._stalled_s:
            return
        waiting = ", ".join(f"{segment} at {offset}" for segment, offset in self._plan.readable().items())
        raise UnavailableError(
            f"nothing became readable for {self._stalled_s:g} s, although more was written to {self._stream} "
            f"(segments {waiting}): Kafka does not answer, or a native transaction is still open there"
        )
