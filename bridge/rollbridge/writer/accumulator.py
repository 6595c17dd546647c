"""Accumulator of plain writes: batches, the futures of their records, and the channel of each stream.

A future holds two references, batch and index; everything else is computed on request. A batch whose segment was split
is divided: it maps each of its records to the piece that now holds it, and futures follow that map.

All writers of a stream on one connection share its channel, because a segment has one order. Everything of a channel
runs under the engine's lock, except :meth:`StreamAccumulator.sequence_base`, which may read ZooKeeper. Events and
watchers of batches have a lock of their own, ``_creation``, since callers wait for a batch and add callbacks to it
without the engine's lock.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, Protocol

from rollbridge.base.arguments import checked
from rollbridge.base.deadlines import LightFuture, call_back
from rollbridge.base.forks import forks, module_lock, refusal
from rollbridge.base.ids import SegmentId
from rollbridge.base.sn import DLSN, SN
from rollbridge.config import WriterOptions
from rollbridge.errors import (
    InvalidRequestError,
    OutcomeUnknownError,
    RecordTooLargeError,
    RollbridgeError,
    StreamNotFoundError,
    UnavailableError,
)
from rollbridge.kafka.errors import NotAuthorizedError
from rollbridge.kafka.queues import Lane, QueuedBatch
from rollbridge.kafka.record_limits import AppendRecord, RecordLimits
from rollbridge.kafka.records import (
    HEADER_BYTES,
    RecordBuilder,
    new_builder,
    parse_header,
    read_parsed,
    uncompressed,
)
from rollbridge.stream.keyspace import HASH_SEED, KeyRange, KeySpace
from rollbridge.stream.names import Partition
from rollbridge.stream.routing import StreamView, locator
from rollbridge.writer.segments import SegmentQueue, StreamQueues

# Errors of plain writes, as factories: each raise needs a new object


Fault = Callable[[], RollbridgeError]


def denied(topic: str, code: str) -> Fault:
    """Return the error of a record that the principal may not write."""
    return lambda: NotAuthorizedError(f"not allowed to write to topic {topic} ({code})", resource=f"topic {topic}")


def refused(topic: str, code: str, detail: str | None) -> Fault:
    """Return the error of a record that the broker rejects permanently."""
    why = f" ({detail})" if detail else ""
    return lambda: InvalidRequestError(f"topic {topic} refuses the record: {code}{why}; it was not written")


def unknown(topic: str, why: str) -> Fault:
    """Return the error of a record whose outcome is unknown."""
    return lambda: OutcomeUnknownError(
        f"the record may or may not have been written to {topic}: {why}; read the segment to find out", transaction=""
    )


def late(topic: str, timeout_s: float, doubtful: bool) -> Fault:
    """Return the error of a record without an answer within the delivery timeout."""
    if doubtful:
        return unknown(topic, f"no broker has answered for {timeout_s:g} s")
    return lambda: UnavailableError(
        f"the record could not be written to {topic} within {timeout_s:g} s; it was not written"
    )


def closed_before() -> RollbridgeError:
    """Return the error of a record given to a closed connection."""
    return InvalidRequestError("this connection is closed; connect again; the record was not written")


def closed() -> RollbridgeError:
    """Return the error of a record that was in flight when the connection was closed."""
    return OutcomeUnknownError(
        "the connection was closed before the brokers had answered for this record", transaction=""
    )


# Options


logger = logging.getLogger(__name__)

Headers = Sequence[tuple[str, bytes | None]]

_MAGIC: Final = 2
_SEGMENT_BYTES_SPARE: Final = 8 * 1024
"""Bytes by which batches made by dividing others stay below a segment's message limit."""
_SEGMENT_BYTES: Final = 1_048_588
Watcher = Callable[["ProducerBatch", int], object]
"""Callback with the batch that holds a settled record, and the index of the record in it."""


_creation: Final = module_lock()
"""Guards events and watchers of batches, which most batches never need; the engine's lock is never taken within it."""


class Account:
    """Failures that one writer still has to report.

    Attributes:
        refused: First fault since the last report; None if there was none.
    """

    __slots__ = ("refused",)

    def __init__(self) -> None:
        self.refused: Fault | None = None


class ProducerBatch(QueuedBatch):
    """Records of one segment: being collected, waiting, in flight, or answered.

    Attributes:
        channel: Channel of its stream.
        append: Method of the builder, while records are collected.
        settled: True once the records were written or have failed.
        queue: Queue in which it was written, once it was.
        base_offset: Offset of its first record, once it was written.
        fault: Reason why it was not written, or why that is unknown.
        ids: Transaction ids that the user gave, by index of the record.
        where: After it was divided, the batch and index to which each record went.
        author: Account of the writer of its last record.
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
        "fault",
        "ids",
        "queue",
        "settled",
        "where",
    )

    def __init__(self, channel: StreamAccumulator, builder: RecordBuilder, opened_s: float) -> None:
        super().__init__(opened_s)
        self.channel = channel
        self.builder: RecordBuilder | None = builder
        self.append: AppendRecord = builder.append
        self.settled = False
        self.queue: SegmentQueue[ProducerBatch] | None = None
        self.base_offset = -1
        self.fault: Fault | None = None
        self.ids: dict[int, int] | None = None
        self.where: list[tuple[ProducerBatch, int]] | None = None
        self._event: threading.Event | None = None
        self._watchers: list[tuple[int, Watcher]] | None = None
        self._forks = forks()
        self.author: Account | None = None
        self._runs: list[tuple[int, Account]] = []

    def begin_run(self, author: Account) -> None:
        """Attribute its last record, and those that follow, to another writer."""
        self.author = author
        self._runs.append((self.count - 1, author))

    def close(self) -> None:
        """Close the batch: build its data and take no more records."""
        if self.builder is not None:
            self.data = bytes(self.builder.build())
            self.builder = None
            self.append = _closed

    def written(self, queue: SegmentQueue[ProducerBatch], base_offset: int) -> None:
        """Settle as written, at ``base_offset``. Watchers are notified later, by :meth:`tell`."""
        self.queue = queue
        self.base_offset = base_offset
        self._settle()

    def failed(self, fault: Fault) -> None:
        """Settle as failed, or with an unknown outcome; each of its writers reports the fault."""
        self.fault = fault
        for _, author in self._runs:
            if author.refused is None:
                author.refused = fault
        self._settle()

    def tell(self) -> None:
        """Notify the watchers; call it without holding any lock, because they run code of the user."""
        with _creation:
            watchers, self._watchers = self._watchers, None
        for index, watcher in watchers or ():
            call_back(partial(watcher, self, index), logger, "a written record")

    def watch(self, index: int, watcher: Watcher) -> None:
        """Notify a watcher of one record: later, or now if the record is settled."""
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

    def find(self, index: int) -> tuple[ProducerBatch, int]:
        """Return the batch that holds a record now, and the record's index in it."""
        batch = self
        while batch.where is not None:
            batch, index = batch.where[index]
        return batch, index

    def is_decided(self) -> bool:
        """Return True if it is settled, or was divided, after which its pieces settle instead."""
        return self.settled or self.where is not None

    def wait(self, timeout_s: float | None) -> None:
        """Wait until it is settled or divided, or the time has passed."""
        if self._forks != forks() and not self.is_decided():
            raise OutcomeUnknownError(
                f"it was being written at a fork, and only the parent will know: {refusal()}", transaction=""
            )
        with _creation:
            if self.settled or self.where is not None:
                return
            if self._event is None:
                self._event = threading.Event()
            event = self._event
        event.wait(timeout_s)

    def take_apart(
        self, heirs: Sequence[SegmentQueue[ProducerBatch]], keys: KeySpace, limit_bytes: int
    ) -> Iterator[tuple[ProducerBatch, SegmentQueue[ProducerBatch]]]:
        """Divide it by key: yield new batches, each with its queue.

        A record goes to the first queue whose range holds its key, without a key to the first queue.
        """
        ranges = [heir.segment.range for heir in heirs]
        pieces = self._divide(
            len(heirs),
            lambda _, key: 0 if key is None else _first(ranges, keys.position(key)),
            limit_bytes,
        )
        for heir, made in zip(heirs, pieces, strict=True):
            for piece in made:
                yield piece, heir

    def take_out(self, faulty: Collection[int], limit_bytes: int) -> tuple[list[ProducerBatch], list[ProducerBatch]]:
        """Divide it by index: return all other records, and the faulty ones in a batch each."""
        order = {place: 1 + rank for rank, place in enumerate(sorted(faulty))}
        rest, *out = self._divide(1 + len(order), lambda place, _: order.get(place, 0), limit_bytes)
        return rest, [batch for batches in out for batch in batches]

    def _divide(
        self, parts: int, part_of: Callable[[int, bytes | None], int], limit_bytes: int
    ) -> list[list[ProducerBatch]]:
        """Divide it by index and key of each record; futures and waiting threads follow their records."""
        pieces: list[list[ProducerBatch]] = [[] for _ in range(parts)]
        where: list[tuple[ProducerBatch, int]] = []
        authors = dict(self._runs)
        author: Account | None = None
        for place, record in enumerate(read_parsed(self.data)):
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
            event.set()  # waiting threads look up which piece to wait for
        for index, watcher in watchers or ():
            self.watch(index, watcher)
        self.data = b""
        for piece in itertools.chain(*pieces):
            piece.close()
        return pieces

    def divide(self, limit_bytes: int) -> list[ProducerBatch]:
        """Divide it into batches of at most ``limit_bytes`` before compression, in order."""
        [pieces] = self._divide(1, lambda _place, _key: 0, limit_bytes)
        return pieces

    @property
    def full_bytes(self) -> int:
        """Bytes of the closed batch, with its records decompressed."""
        return len(uncompressed(parse_header(self.data), self.data))

    def locate(self, index: int) -> SN:
        """Return the SN of a record of this settled batch; raise its fault if it has one."""
        if self.fault is not None:
            raise self.fault()
        assert self.queue is not None
        offset = self.base_offset + index
        segment = self.queue.id
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


@checked()
class PlainFuture(LightFuture[SN]):
    """Future of one record: its SN once the brokers have it, an error if they do not take it."""

    # The writer sets these, without an __init__: a million of these objects are made per second.
    __slots__ = ("batch", "index")

    batch: ProducerBatch
    index: int

    def result(self, timeout: float | None = None) -> SN:
        """Wait until the brokers have the record; return its SN.

        Args:
            timeout: Seconds; None waits without limit, in effect up to the delivery timeout of the writer.

        Raises:
            TimeoutError: The outcome is not known yet; ask again.
            OutcomeUnknownError: The record may have been written or not.
            RollbridgeError: The record was not written.
        """
        batch, index = self.batch.find(self.index)
        while not batch.settled:
            batch.wait(timeout)
            if not batch.is_decided():
                raise TimeoutError(f"the brokers have not answered for this record within {timeout} s")
            batch, index = batch.find(index)
        return batch.locate(index)

    def done(self) -> bool:
        """Return True once the record was written or has failed."""
        return self.batch.find(self.index)[0].settled

    def add_done_callback(self, callback: Callable[[PlainFuture], object]) -> None:
        """Call ``callback`` with this future once the record was written or has failed.

        Runs on the thread that receives the brokers' answers and must not block; exceptions are logged. Runs on the
        calling thread if the record is already settled.
        """
        self.batch.watch(self.index, lambda _batch, _index: callback(self))


class Sending(Protocol):
    """Transport of batches to the brokers, as a channel sees it."""

    @property
    def options(self) -> WriterOptions: ...

    def await_room(self) -> None:
        """Return once there is room for another batch."""

    def opened(self, channel: StreamAccumulator) -> None:
        """Take note of a new open batch."""

    def lane(self, target: Partition) -> Lane[ProducerBatch]:
        """Return the sequence numbers of a partition."""

    def queued(self, queue: SegmentQueue[ProducerBatch], batch: ProducerBatch) -> None:
        """Take note of a batch that was closed and queued."""

    def read_again(self, stream: str) -> StreamView | None:
        """Return the stream as it is now; None if it cannot be read."""

    def replaced(self, size: int, pieces: list[ProducerBatch]) -> None:
        """Take note of a batch of ``size`` bytes that was divided."""


class StreamAccumulator:
    """Stream that is being written. Guarded by the engine's lock, except :meth:`sequence_base`.

    Attributes:
        stream_queues: Its queues.
        bounds: Smallest hash of each active queue but the first.
        queues: Active queues.
        opened: Queues with an open batch.
        unsettled: Batches that are not settled, oldest first.
        records: Records in these batches.
        failure: Factory of the error with which writes fail; None while they succeed.
    """

    def __init__(self, engine: Sending, view: StreamView) -> None:
        self._engine = engine
        self.view = view
        self.stream = str(view.config.name)
        self.limits = self._limits_of(view)
        self.opened: dict[SegmentQueue[ProducerBatch], None] = {}
        self.unsettled: dict[ProducerBatch, None] = {}
        self.failure: Callable[[], RollbridgeError] | None = None
        self._sticky = 0
        self._bases: dict[SegmentId, int] = {}
        self._compression = int(engine.options.codec)
        self.stream_queues: StreamQueues[ProducerBatch] = StreamQueues(
            view.history, view.config.places.of, engine.lane, self._split
        )
        self._route()

    @property
    def records(self) -> int:
        """Number of records that are not settled."""
        return sum(batch.count for batch in self.unsettled)

    def queue_of(self, key: bytes | None) -> SegmentQueue[ProducerBatch]:
        """Return the queue of a record; records without a key share one until its batch is full."""
        if key is None:
            return self.queues[self._sticky % len(self.queues)]
        return self.queues[bisect_right(self.bounds, self.hash_of(key, HASH_SEED))] if self.bounds else self.queues[0]

    def append(
        self,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        timestamp_ms: int | None,
    ) -> ProducerBatch:
        """Append a record to a batch with room for it, or to a new one; the record is the batch's last.

        May release the engine's lock while it waits for room, so segments and batches may change meanwhile.

        Raises:
            RecordTooLargeError, BackpressureError, InvalidRequestError: The record was not written; the writer stays
                usable.
            RollbridgeError: Nothing more can be written.
        """
        self.limits.check(key, value, headers)
        self._engine.await_room()
        if self.failure is not None:
            raise self.failure()
        queue = self.queue_of(key)  # only now: the segments may have changed while this waited
        batch = queue.open
        if batch is not None:
            if batch.append(batch.count, timestamp_ms, key, value, headers) is not None:
                batch.count += 1
                return batch
            self.cut(queue)
            if key is None:
                self._sticky += 1
                queue = self.queue_of(None)
                if queue.open is not None:
                    self.cut(queue)
        batch = self.new_batch(time.monotonic(), self.limits.batch_bytes)
        assert batch.builder is not None  # it is open
        batch.append = self.limits.append_of(batch.builder)
        batch.append(0, timestamp_ms, key, value, headers)
        batch.count = 1
        queue.open = batch
        self.opened[queue] = None
        self._engine.opened(self)
        return batch

    def new_batch(self, opened_s: float, limit_bytes: int) -> ProducerBatch:
        """Return an empty batch of this stream."""
        builder = new_builder(limit_bytes, self._compression)
        batch = ProducerBatch(self, builder, opened_s)
        self.unsettled[batch] = None
        return batch

    def cut(self, queue: SegmentQueue[ProducerBatch]) -> None:
        """Close a queue's open batch and queue it."""
        batch = queue.open
        if batch is not None:
            queue.open = None
            self.opened.pop(queue, None)
            batch.close()
            queue.pending.append(batch)
            self._engine.queued(queue, batch)

    def cut_older(self, than_s: float) -> None:
        """Close the open batches begun before ``than_s`` (monotonic seconds)."""
        for queue in [queue for queue in self.opened if queue.open is not None and queue.open.opened_s <= than_s]:
            self.cut(queue)

    def adopt(self, view: StreamView) -> None:
        """Adopt the current epochs, and route records to the active segments."""
        ids = view.history.active.segment_ids
        for queue in self.queues:
            if queue.id not in ids:
                self.cut(queue)
        if view.config.limits != self.view.config.limits:
            for queue in self.queues:
                self.cut(queue)
        self.limits = self._limits_of(view)
        self.view = view
        self.stream_queues.adopt(view.history)
        self._route()

    def is_of(self, view: StreamView) -> bool:
        """Return True if a view is of this stream, not of one that was deleted and created again."""
        config = self.view.config
        return (config.created_ms, config.identity) == (view.config.created_ms, view.config.identity)

    def is_outdated(self, view: StreamView) -> bool:
        """Return True if a view of the stream has other epochs, or other limits of its adopted topic."""
        return view.history != self.view.history or view.config.limits != self.view.config.limits

    def stop(self, fault: Fault) -> list[ProducerBatch]:
        """Fail all further records with ``fault``; return the batches that are neither settled nor in flight."""
        self.failure = fault
        opened = [queue.open for queue in self.opened if queue.open is not None]
        for queue in self.opened:
            queue.open = None
        self.opened.clear()
        return [*self.stream_queues.close(), *opened]

    def gone(self, *, doubtful: bool = False) -> RollbridgeError:
        """Return the error of records of a stream that was deleted, or whose topic was released.

        Args:
            doubtful: The record may have been written.
        """
        topic = self.view.config.topic
        if not topic:
            return StreamNotFoundError(
                f"stream {self.stream} was deleted; whatever was written of this record is gone with it, and nothing "
                "more can be written: if the stream was made again, open a new writer"
            )
        if doubtful:
            return unknown(topic, f"stream {self.stream} has released the topic, and no broker has answered")()
        return StreamNotFoundError(
            f"stream {self.stream} has released topic {topic}; the record was not written: if the topic was adopted "
            "again, open a new writer"
        )

    def sequence_base(self, segment: SegmentId) -> int | None:
        """Return the sequence id of a segment's first record; None if it is not known yet.

        Called on threads that wait for futures, without the lock, because it may read ZooKeeper.
        """
        base = self._bases.get(segment)
        if base is None:
            self._bases = self.view.history.graph.sequence_bases
            base = self._bases.get(segment)
        if base is None:
            # The end of a segment between two incarnations of the active epoch is stored shortly after its successors.
            view = self._engine.read_again(self.stream)
            if view is not None and self.is_of(view):
                self._bases = view.history.graph.sequence_bases
                base = self._bases.get(segment)
        return base

    def _route(self) -> None:
        self.queues = self.stream_queues.active
        self.bounds, self.hash_of = locator(self.view.config.keys, [queue.segment.range.low for queue in self.queues])

    def take_out(
        self, batch: ProducerBatch, faulty: Collection[int]
    ) -> tuple[list[ProducerBatch], list[ProducerBatch]]:
        """Divide a batch of which the broker refused some records: return batches of the others, and one of each."""
        size = len(batch.data)
        rest, out = batch.take_out(faulty, self._piece_bytes)
        self._replaced(batch, size, [*rest, *out])
        return rest, out

    def is_too_large(self, batch: ProducerBatch) -> bool:
        """Return True if a batch is larger than what the adopted topic takes by now."""
        adopted = self.limits.adopted
        return adopted is not None and batch.full_bytes > adopted.batch_room

    def divide(self, batch: ProducerBatch) -> list[ProducerBatch]:
        """Divide a batch that the adopted topic does not take any more into such that it takes, in order."""
        size = len(batch.data)
        made = batch.divide(self._piece_bytes)
        self._replaced(batch, size, made)
        return made

    def too_large(self, size: int) -> Fault:
        """Return the error of a record that the adopted topic does not take any more."""
        topic, limit = self.limits.topic, self.limits.record_bytes_max
        return lambda: RecordTooLargeError(
            f"topic {topic} takes records of up to {limit} bytes by now, and a batch of this one has {size}; it was "
            "not written",
            size_bytes=size,
            limit_bytes=limit,
        )

    def _split(
        self, batch: ProducerBatch, heirs: Sequence[SegmentQueue[ProducerBatch]]
    ) -> Iterable[tuple[ProducerBatch, SegmentQueue[ProducerBatch]]]:
        size = len(batch.data)
        made = list(batch.take_apart(heirs, self.view.config.keys, self._piece_bytes))
        self._replaced(batch, size, [piece for piece, _ in made])
        return made

    def _replaced(self, batch: ProducerBatch, size: int, pieces: list[ProducerBatch]) -> None:
        self._engine.replaced(size, pieces)
        self.unsettled.pop(batch, None)

    @property
    def _piece_bytes(self) -> int:
        own = self.limits.batch_bytes
        return own if self.limits.adopted is not None else max(_SEGMENT_BYTES - _SEGMENT_BYTES_SPARE, own)

    def _limits_of(self, view: StreamView) -> RecordLimits:
        """Return what the stream's segments take, by its own settings or those of the topic that it has adopted."""
        options, config = self._engine.options, view.config
        record_bytes_max = min(config.record_bytes_max, options.buffer_bytes // 2)
        return RecordLimits(
            str(config.name),
            config.topic,
            config.limits_in(view.history.active),
            record_bytes_max=record_bytes_max,
            batch_bytes=min(options.batch_bytes, max(record_bytes_max, HEADER_BYTES + 1)),
        )


def _first(ranges: Sequence[KeyRange], position: float) -> int:
    return next(place for place, item in enumerate(ranges) if position in item)


def _closed(*_: object) -> None:
    """Replace ``append`` of a closed batch: nothing fits."""
