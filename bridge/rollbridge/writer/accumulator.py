"""Records on their way: batches, the futures of their records, and for each stream what is open and in line.

A future is two references; everything is computed when somebody asks. A batch that is taken apart, because its segment
was split, says where each of its records went, and its futures follow.

All writers of a stream on one connection share its channel, because the order of a segment is one. Everything of a
channel is done under the engine's lock.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from aiokafka.record.default_records import DefaultRecordBatchBuilder
from xxhash import xxh64_intdigest

from rollbridge.calls import LightFuture, call_back
from rollbridge.errors import (
    ConfigError,
    InvalidRequestError,
    OutcomeUnknown,
    RecordTooLargeError,
    RollbridgeError,
    StreamNotFound,
    UnavailableError,
)
from rollbridge.forks import forks, module_lock, refusal
from rollbridge.kafka.batches import BUFFER_BYTES_MIN, HEADER_BYTES, Compression, read_records
from rollbridge.kafka.errors import NotAuthorizedError
from rollbridge.model.frames import FRAME_BYTES_DEFAULT
from rollbridge.model.ids import SegmentId
from rollbridge.model.keyspace import HASH_SEED, KeyRange, position_of_key
from rollbridge.model.options import KIB, MIB, faults_of, option
from rollbridge.model.routing import StreamView, hash_bounds
from rollbridge.model.sn import DLSN, SN
from rollbridge.writer.lanes import Course, Lane, Parcel

# --------------------------------------------------------------------------------------------------------------------
# The errors of plain writes, as functions that make them: a new object each time, because it will be raised.


Fault = Callable[[], RollbridgeError]


def denied(topic: str, code: str) -> Fault:
    """The principal may not write there."""
    return lambda: NotAuthorizedError(f"not allowed to write to topic {topic} ({code})", resource=f"topic {topic}")


def refused(topic: str, code: str, detail: str | None) -> Fault:
    """The broker refuses the record for good."""
    why = f" ({detail})" if detail else ""
    return lambda: InvalidRequestError(f"topic {topic} refuses the record: {code}{why}; it was not written")


def unknown(topic: str, why: str) -> Fault:
    """Nobody can tell whether it was written."""
    return lambda: OutcomeUnknown(
        f"the record may have been written to {topic} or not: {why}; read the segment to find out", transaction=""
    )


def late(topic: str, timeout_s: float, doubtful: bool) -> Fault:
    """No answer came within the delivery time-out."""
    if doubtful:
        return unknown(topic, f"no broker has answered for {timeout_s:g} s")
    return lambda: UnavailableError(
        f"the record could not be written to {topic} within {timeout_s:g} s; it was not written"
    )


def closed_before() -> RollbridgeError:
    """The connection was closed before the record was written."""
    return InvalidRequestError("this connection is closed; connect again; the record was not written")


def closed() -> RollbridgeError:
    """The connection was closed while the record was under way."""
    return OutcomeUnknown("the connection was closed before the brokers had answered for this record", transaction="")


# --------------------------------------------------------------------------------------------------------------------
# How plain writes behave: sizes, delays and limits, each with its unit, default and reason.


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    """Options of plain writes; checked on construction.

    Raises:
        ConfigError: one or several are wrong; all are named.
    """

    linger_s: float = option(0.005, low=0, high=900)
    """How long a record waits for others to share its batch; 0 sends it as soon as nothing else is under way."""
    batch_bytes: int = option(FRAME_BYTES_DEFAULT, low=KIB, high=MIB)
    """Largest batch before compression; larger ones cost less each record."""
    compression: str = option("none", check=Compression.named)
    """Codec of the batches: none, gzip, snappy, lz4 or zstd."""
    buffer_bytes: int = option(64 * MIB, low=BUFFER_BYTES_MIN)
    """How much may wait for the brokers; beyond it writers wait."""
    block_s: float = 60.0
    """How long a writer waits for room before it gets a ``BackpressureError``."""
    delivery_timeout_s: float = 300.0
    """How long a record may stay without an answer before it fails; as librdkafka's ``message.timeout.ms``."""
    request_timeout_s: float = 30.0
    """How long the answer to one request may take before its connection is given up."""
    in_flight_max: int = option(5, low=1, high=5)
    """Most requests under way to one broker: brokers recognise the last five batches of a producer."""

    def __post_init__(self) -> None:
        ConfigError.raise_for(faults_of(self))

    @property
    def codec(self) -> Compression:
        """The codec's number."""
        return Compression.named(self.compression)


logger = logging.getLogger(__name__)

Headers = Sequence[tuple[str, bytes | None]]

_MAGIC: Final = 2
_SEGMENT_BYTES_SPARE: Final = 8 * 1024
"""How much smaller than a segment's message limit the batches are that are made when others are taken apart."""
_SEGMENT_BYTES: Final = 1_048_588
Watcher = Callable[["Batch", int], object]
"""Is told the batch that holds a record, and the record's place in it, once its fate is known."""


_creation: Final = module_lock()
"""Guards events and watchers, which most batches never need."""


class Account:
    """What one writer is still to be told of its records.

    Attributes:
        refused: The first fault since it was told last; None if there was none.
    """

    __slots__ = ("refused",)

    def __init__(self) -> None:
        self.refused: Fault | None = None


class Batch(Parcel):
    """Records of one segment: being collected, waiting, under way, or answered.

    Attributes:
        channel: The stream.
        append: Of the builder, while records are collected.
        data: The batch as Kafka has it, once it is closed.
        opened_s: When the first record came (monotonic seconds).
        settled: Whether its fate is known.
        lane: Where it was written, once it was.
        base_offset: Offset of its first record, once it was written.
        fault: Why it was not written, or is not known to be.
        ids: Transaction ids that the user gave, by place of the record.
        where: After it was taken apart, the batch and the place to which each record went.
        author: Who wrote its last record.
    """

    __slots__ = (
        "_event",
        "_forks",
        "_runs",
        "_watchers",
        "append",
        "author",
        "base_offset",
        "builder",
        "channel",
        "data",
        "fault",
        "ids",
        "lane",
        "opened_s",
        "settled",
        "where",
    )

    def __init__(self, channel: Channel, builder: DefaultRecordBatchBuilder, opened_s: float) -> None:
        super().__init__()
        self.channel = channel
        self.builder: DefaultRecordBatchBuilder | None = builder
        self.append: Callable[..., object] = builder.append
        self.data = b""
        self.opened_s = opened_s
        self.settled = False
        self.lane: Lane[Batch] | None = None
        self.base_offset = -1
        self.fault: Fault | None = None
        self.ids: dict[int, int] | None = None
        self.where: list[tuple[Batch, int]] | None = None
        self._event: threading.Event | None = None
        self._watchers: list[tuple[int, Watcher]] | None = None
        self._forks = forks()
        self.author: Account | None = None
        self._runs: list[tuple[int, Account]] = []

    def begin_run(self, author: Account) -> None:
        """From its last record on, what is added is somebody else's."""
        self.author = author
        self._runs.append((self.count - 1, author))

    def close(self) -> None:
        """Take no more records."""
        if self.builder is not None:
            self.data = bytes(self.builder.build())
            self.builder = None
            self.append = _closed

    def written(self, lane: Lane[Batch], base_offset: int) -> None:
        """It stands in the log. Watchers are told by :meth:`tell`."""
        self.lane = lane
        self.base_offset = base_offset
        self._settle()

    def failed(self, fault: Fault) -> None:
        """It will not be written, or nobody will learn whether it was; each of its authors is to be told."""
        self.fault = fault
        for _, author in self._runs:
            if author.refused is None:
                author.refused = fault
        self._settle()

    def tell(self) -> None:
        """Tell the watchers; outside of any lock, because they run code of the user."""
        with _creation:
            watchers, self._watchers = self._watchers, None
        for index, watcher in watchers or ():
            call_back(partial(watcher, self, index), logger, "a written record")

    def watch(self, index: int, watcher: Watcher) -> None:
        """Have a watcher told of one record: later, or now if its fate is known."""
        batch = self
        while True:
            batch, index = batch.find(index)
            with _creation:
                if batch.where is not None:
                    continue
                if not batch.settled:
                    if batch._watchers is None:
                        batch._watchers = []
                    batch._watchers.append((index, watcher))
                    return
            call_back(partial(watcher, batch, index), logger, "a written record")
            return

    def find(self, index: int) -> tuple[Batch, int]:
        """The batch that holds a record now, and the record's place in it."""
        batch = self
        while batch.where is not None:
            batch, index = batch.where[index]
        return batch, index

    def is_decided(self) -> bool:
        """Whether its fate is known, or it was taken apart, after which it has none."""
        return self.settled or self.where is not None

    def wait(self, timeout_s: float | None) -> None:
        """Wait until its fate is known, or it is taken apart, or the time is over."""
        if self._forks != forks() and not self.is_decided():
            raise OutcomeUnknown(
                f"it was being written at a fork, and only the parent will know: {refusal()}", transaction=""
            )
        with _creation:
            if self.settled or self.where is not None:
                return
            if self._event is None:
                self._event = threading.Event()
            event = self._event
        event.wait(timeout_s)

    def take_apart(self, heirs: Sequence[Lane[Batch]], limit_bytes: int) -> Iterator[tuple[Batch, Lane[Batch]]]:
        """The same records in other batches: each in one for the first lane that holds its key, or has none."""
        ranges = [heir.segment.range for heir in heirs]
        pieces = self._divide(
            len(heirs),
            lambda _, key: 0 if key is None else _first(ranges, position_of_key(key)),
            limit_bytes,
        )
        for heir, made in zip(heirs, pieces, strict=True):
            for piece in made:
                yield piece, heir

    def take_out(self, faulty: Collection[int], limit_bytes: int) -> tuple[list[Batch], list[Batch]]:
        """The same records in other batches: those at the given places, each in one of its own, and all others."""
        order = {place: 1 + rank for rank, place in enumerate(sorted(faulty))}
        rest, *out = self._divide(1 + len(order), lambda place, _: order.get(place, 0), limit_bytes)
        return rest, [batch for batches in out for batch in batches]

    def _divide(self, parts: int, part_of: Callable[[int, bytes | None], int], limit_bytes: int) -> list[list[Batch]]:
        """Take it apart by the place and the key of each record; what waits for a record finds it again."""
        pieces: list[list[Batch]] = [[] for _ in range(parts)]
        where: list[tuple[Batch, int]] = []
        authors = dict(self._runs)
        author: Account | None = None
        for place, record in enumerate(read_records(self.data)):
            author = authors.get(place, author)
            mine = pieces[part_of(place, record.key)]
            row = (record.timestamp, record.key, record.value, record.headers)
            if not mine or mine[-1].append(mine[-1].count, *row) is None:
                mine.append(self.channel.new_batch(self.opened_s, limit_bytes))
                mine[-1].append(0, *row)
            piece = mine[-1]
            where.append((piece, piece.count))
            if self.ids is not None and place in self.ids:
                piece.ids = {**(piece.ids or {}), piece.count: self.ids[place]}
            piece.count += 1
            if author is not None and piece.author is not author:
                piece.begin_run(author)
        with _creation:
            self.where = where
            watchers, self._watchers = self._watchers, None
            event = self._event
        if event is not None:
            event.set()  # whoever waits finds out where to wait now
        for index, watcher in watchers or ():
            self.watch(index, watcher)
        self.data = b""
        for piece in itertools.chain(*pieces):
            piece.close()
        return pieces

    def locate(self, index: int) -> SN:
        """Where a record of this batch, which was written, stands; raises what it met otherwise."""
        if self.fault is not None:
            raise self.fault()
        assert self.lane is not None
        offset = self.base_offset + index
        segment = self.lane.id
        base = self.channel.sequence_base(segment)
        return SN(
            DLSN.of(segment, offset),
            None if self.ids is None else self.ids.get(index),
            None if base is None else base + offset,
        )

    def _settle(self) -> None:
        with _creation:
            self.settled = True
            event = self._event
        self.data = b""
        if event is not None:
            event.set()


class PlainFuture(LightFuture[SN]):
    """Where one record will stand: its SN once the brokers have it, an error if they will not take it."""

    # Set by the writer, without an __init__: this object is made a million times a second.
    __slots__ = ("batch", "index")

    batch: Batch
    index: int

    def result(self, timeout: float | None = None) -> SN:
        """Wait until the brokers have the record, and say where it stands.

        Args:
            timeout: Seconds; None waits without end, or rather until the delivery time-out of the writer.

        Raises:
            TimeoutError: not known in time; ask again.
            OutcomeUnknown: it may have been written or not.
            RollbridgeError: it was not written.
        """
        batch, index = self.batch.find(self.index)
        while not batch.settled:
            batch.wait(timeout)
            if not batch.is_decided():
                raise TimeoutError(f"the brokers have not answered for this record within {timeout} s")
            batch, index = batch.find(index)
        return batch.locate(index)

    def done(self) -> bool:
        """Whether the record's fate is known."""
        return self.batch.find(self.index)[0].settled

    def add_done_callback(self, callback: Callable[[PlainFuture], object]) -> None:
        """Call ``callback`` with this future once the record's fate is known.

        It runs on the thread that hears from the brokers and must not block; its exceptions are logged.
        """
        self.batch.watch(self.index, lambda _batch, _index: callback(self))


class Sending(Protocol):
    """What carries batches to the brokers, as a channel sees it."""

    @property
    def options(self) -> WriterOptions: ...

    def await_room(self) -> None:
        """Return once there is room for another batch."""

    def opened(self, channel: Channel) -> None:
        """A batch was begun."""

    def queued(self, lane: Lane[Batch], batch: Batch) -> None:
        """A batch was closed and put in line."""

    def read_again(self, stream: str) -> StreamView | None:
        """The stream as it is now."""

    def replaced(self, size: int, pieces: list[Batch]) -> None:
        """A batch was taken apart."""


class Channel:
    """A stream that is being written.

    Attributes:
        course: Its lanes.
        bounds: The smallest hash of each active lane but the first.
        lanes: The active lanes.
        opened: The lanes with an open batch.
        unsettled: Batches whose fate is not known, oldest first.
        records: Records of these batches.
        failure: Why nothing more can be written; None while it can.
    """

    def __init__(self, engine: Sending, view: StreamView) -> None:
        self._engine = engine
        self.view = view
        self.stream = str(view.config.name)
        self.record_bytes_max = min(view.config.record_bytes_max, engine.options.buffer_bytes // 2)
        self.batch_bytes = min(engine.options.batch_bytes, max(self.record_bytes_max, HEADER_BYTES + 1))
        self.opened: dict[Lane[Batch], None] = {}
        self.unsettled: dict[Batch, None] = {}
        self.failure: Callable[[], RollbridgeError] | None = None
        self._sticky = 0
        self._bases: dict[SegmentId, int] = {}
        self._compression = int(engine.options.codec)
        self.course: Course[Batch] = Course(view.history, view.config.name.segment_topic, self._split)
        self._route()

    @property
    def records(self) -> int:
        """Records whose fate is not known."""
        return sum(batch.count for batch in self.unsettled)

    def lane_of(self, key: bytes | None) -> Lane[Batch]:
        """Where a record goes now; those without a key stay together for a batch."""
        if key is None:
            return self.lanes[self._sticky % len(self.lanes)]
        return self.lanes[bisect_right(self.bounds, xxh64_intdigest(key, HASH_SEED))] if self.bounds else self.lanes[0]

    def append(
        self,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        timestamp_ms: int | None,
    ) -> Batch:
        """Append a record to a batch with room for it, or to a new one; the record is the batch's last.

        Raises:
            RecordTooLargeError, BackpressureError: it was not written; the writer stays usable.
            RollbridgeError: nothing more can be written.
        """
        size = DefaultRecordBatchBuilder.size_of(key, value, headers)
        if size > self.record_bytes_max:
            raise RecordTooLargeError(
                f"a record of {size} bytes (key, value and headers) exceeds the limit of {self.record_bytes_max} of "
                f"stream {self.stream}; it was not written, the writer is usable",
                size_bytes=size,
                limit_bytes=self.record_bytes_max,
            )
        self._engine.await_room()
        if self.failure is not None:
            raise self.failure()
        lane = self.lane_of(key)  # only now: while this waited, the segments may have changed
        batch = lane.open
        if batch is not None:
            if batch.append(batch.count, timestamp_ms, key, value, headers) is not None:
                batch.count += 1
                return batch
            self.cut(lane)
            if key is None:
                self._sticky += 1
                lane = self.lane_of(None)
                if lane.open is not None:
                    self.cut(lane)
        batch = self.new_batch(time.monotonic(), self.batch_bytes)
        if self.batch_bytes > self.record_bytes_max:
            batch.append = _checked(batch.append, self.record_bytes_max)
        batch.append(0, timestamp_ms, key, value, headers)
        batch.count = 1
        lane.open = batch
        self.opened[lane] = None
        self._engine.opened(self)
        return batch

    def new_batch(self, opened_s: float, limit_bytes: int) -> Batch:
        """An empty batch of this stream."""
        builder = DefaultRecordBatchBuilder(_MAGIC, self._compression, 0, -1, -1, -1, limit_bytes)
        batch = Batch(self, builder, opened_s)
        self.unsettled[batch] = None
        return batch

    def cut(self, lane: Lane[Batch]) -> None:
        """Close a lane's open batch and put it in line."""
        batch = lane.open
        if batch is not None:
            lane.open = None
            self.opened.pop(lane, None)
            batch.close()
            lane.queue.append(batch)
            self._engine.queued(lane, batch)

    def cut_older(self, than_s: float) -> None:
        """Close the open batches that were begun before ``than_s`` (monotonic seconds)."""
        for lane in [lane for lane in self.opened if lane.open is not None and lane.open.opened_s <= than_s]:
            self.cut(lane)

    def adopt(self, view: StreamView) -> None:
        """Take the epochs as they are now."""
        ids = view.history.active.segment_ids
        for lane in self.lanes:
            if lane.id not in ids:
                self.cut(lane)
        self.view = view
        self.course.adopt(view.history)
        self._route()

    def is_of(self, view: StreamView) -> bool:
        """Whether a view is of the same stream, not of one that was deleted and made again."""
        config = self.view.config
        return (config.created_ms, config.buffer_topic_id) == (view.config.created_ms, view.config.buffer_topic_id)

    def stop(self, fault: Callable[[], RollbridgeError]) -> list[Batch]:
        """Refuse all further records and give up on those whose fate is not known; gives their batches."""
        self.failure = fault
        for lane in tuple(self.opened):
            lane.open = None
        self.opened.clear()
        self.course.close()
        return [batch for batch in self.unsettled if batch.where is None]

    def gone(self) -> RollbridgeError:
        """The error of records of a stream that was deleted."""
        return StreamNotFound(
            f"stream {self.stream} was deleted; whatever was written of this record is gone with it, and nothing more "
            "can be written: if the stream was made again, open a new writer"
        )

    def sequence_base(self, segment: SegmentId) -> int | None:
        """Where the sequence ids of a segment begin; None if that is not known yet."""
        base = self._bases.get(segment)
        if base is None:
            self._bases = self.view.history.graph.sequence_bases
            base = self._bases.get(segment)
        if base is None:
            # The end of a segment between two incarnations of the active epoch is noted a moment after its successors.
            view = self._engine.read_again(self.stream)
            if view is not None and self.is_of(view):
                self._bases = view.history.graph.sequence_bases
                base = self._bases.get(segment)
        return base

    def _route(self) -> None:
        self.lanes = self.course.active
        self.bounds = hash_bounds([lane.segment.range.low for lane in self.lanes])

    def take_out(self, batch: Batch, faulty: Collection[int]) -> tuple[list[Batch], list[Batch]]:
        """Take a batch apart of which some records were refused, by their places: the others, and each of these."""
        size = len(batch.data)
        rest, out = batch.take_out(faulty, self._piece_bytes)
        self._replaced(batch, size, [*rest, *out])
        return rest, out

    def _split(self, batch: Batch, heirs: Sequence[Lane[Batch]]) -> Iterable[tuple[Batch, Lane[Batch]]]:
        size = len(batch.data)
        made = list(batch.take_apart(heirs, self._piece_bytes))
        self._replaced(batch, size, [piece for piece, _ in made])
        return made

    def _replaced(self, batch: Batch, size: int, pieces: list[Batch]) -> None:
        self._engine.replaced(size, pieces)
        self.unsettled.pop(batch, None)

    @property
    def _piece_bytes(self) -> int:
        return max(_SEGMENT_BYTES - _SEGMENT_BYTES_SPARE, self.batch_bytes)


def _first(ranges: Sequence[KeyRange], position: float) -> int:
    return next(place for place, item in enumerate(ranges) if position in item)


def _closed(*_: object) -> None:
    """Stands in for ``append`` of a batch that takes no more records: nothing fits."""


def _checked(append: Callable[..., object], limit_bytes: int) -> Callable[..., object]:
    """``append`` for a stream whose records must be smaller than a batch: each of them is measured."""

    def measured(
        offset: int, timestamp: int | None, key: bytes | None, value: bytes | None, headers: Headers
    ) -> object:
        if DefaultRecordBatchBuilder.size_of(key, value, headers) > limit_bytes:
            return None  # as if it did not fit: what starts a batch says why it is refused
        return append(offset, timestamp, key, value, headers)

    return measured
