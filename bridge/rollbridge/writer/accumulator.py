"""A batch on its way, and the futures of its records.

A future is two references; everything is computed when somebody asks. A batch that is taken apart, because its segment
was split, says where each of its records went, and its futures follow.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from aiokafka.record.default_records import DefaultRecordBatchBuilder

from bridge.errors import OutcomeUnknown, RollbridgeError
from bridge.futures import LightFuture
from bridge.inherited import forks, refusal
from bridge.kafka.batches import read_records
from bridge.model.keyspace import KeyRange, position_of_key
from bridge.model.sequence import DLSN
from bridge.model.sn import SN
from bridge.user_code import call_back
from bridge.writer.lanes import Lane, Parcel

if TYPE_CHECKING:
    from bridge.writer.channel import Channel

logger = logging.getLogger(__name__)

Fault = Callable[[], RollbridgeError]
"""Makes the error of a record; a new object each time, because it will be raised."""
Watcher = Callable[["Batch", int], object]
"""Is told the batch that holds a record, and the record's place in it, once its fate is known."""


_creation = threading.Lock()
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


def _first(ranges: Sequence[KeyRange], position: float) -> int:
    return next(place for place, item in enumerate(ranges) if position in item)


def _closed(*_: object) -> None:
    """Stands in for ``append`` of a batch that takes no more records: nothing fits."""
