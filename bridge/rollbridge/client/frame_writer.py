"""From records to frames: one part of a transaction routes its records, batches them per segment and cuts frames.

Nothing here depends on Kafka: finished frames go to ``emit``. This is the client's hot loop, so it does per record only
what cannot be done per batch: hash the key, number the record, append it to a compiled batch builder. What may be
written is checked when a batch is started, see :mod:`rollbridge.kafka.record_limits`.

:class:`ManifestRoom` tracks the size that the manifest of an open transaction will have. A manifest is the value of a
single message, the COMMIT frame, and names every segment to which a part has written, every offset and every condition.
What would make it too large for the buffer's topic is refused at once: noticed only at the commit, everything written
before would be lost.

:class:`Outbox` holds small frames back for a moment and sends them as one message. A small transaction is then a single
message, with its begin, its records and its commit: a third of the work for the producer, the broker and the leader,
and one request where there would be two or three. The layout is that of :func:`rollbridge.buffer.frames.pack_bundle`::

      key, 44 bytes                    value: the frames in order, each with a header of 29 bytes
    +-------------------------------+  +-------+-------+------+--------------+-----+--------+----------+
    | BUNDLE, transaction, 3 frames |  | BEGIN | begin | DATA | record batch | ... | COMMIT | manifest |
    +-------------------------------+  +-------+-------+------+--------------+-----+--------+----------+
                                         |               |                           |
                                         kind 1, part 4, segment 4, first count 8, records 4, epoch 4, size of value 4

No class here is thread-safe: :class:`~rollbridge.client.writing.Writing` holds its lock while it writes and cuts.

Tour of a commit, stop 2 of 8: see docs/tour.md.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Final

from rollbridge.base.arguments import as_headers
from rollbridge.base.attribution import (
    HEADER_VALUE,
    HEADER_VALUE_BYTES,
    ONE_BYTE,
    RECORD_HEADER,
    append_step,
    pack_rest,
)
from rollbridge.base.deadlines import wall_ms
from rollbridge.base.ids import COUNT_MAX, local_sequence
from rollbridge.buffer.frames import (
    BUNDLE_BYTES_MAX,
    BUNDLED_FRAME_BYTES,
    HEADER,
    MAGIC,
    VERSION,
    FrameKind,
    PieceKey,
    pack_bundle,
)
from rollbridge.client.futures import (
    Completion,
    FrameLimits,
    HeaderList,
    Headers,
    PartSegment,
    PartStream,
    WriteFuture,
    no_batch,
)
from rollbridge.client.results import Piece
from rollbridge.commitlog.control import CONTROL_RECORD_BYTES_MAX, FRAMES_HARMLESS, is_too_scattered, scattered_reason
from rollbridge.errors import InvalidRequestError, TransactionTooLargeError
from rollbridge.kafka.records import finished, new_builder
from rollbridge.stream.conditions import StreamCondition
from rollbridge.stream.config import RECORD_BYTES_MAX_DEFAULT
from rollbridge.stream.group_offsets import GroupOffsets
from rollbridge.stream.keyspace import HASH_SEED, KnownKeys
from rollbridge.stream.routing import Route

# Size of the manifest


_BLOCK_BYTES: Final = 6
"""Maximum bytes of an Avro array's counts: one in front of its items, and a zero behind them."""
_ARRAYS: Final = 4


def long_bytes(number: int) -> int:
    """Return the number of bytes that a number of 0 or more takes in Avro."""
    return max(((number << 1).bit_length() + 6) // 7, 1)


_RECORDS_BYTES: Final = long_bytes(COUNT_MAX)


class ManifestRoom:
    """Byte counter of one manifest: an upper bound of its size so far, and the limit. Its owner holds a lock."""

    __slots__ = ("bytes", "limit")

    def __init__(self, record_bytes_max: int) -> None:
        """Start with an empty manifest.

        Args:
            record_bytes_max: Largest record of the stream in whose buffer the commit is asked for: the limit of a
                message there is not less than that, and not less than the default.
        """
        self.limit = max(record_bytes_max, RECORD_BYTES_MAX_DEFAULT)
        self.bytes = _ARRAYS * _BLOCK_BYTES

    def has(self, size: int) -> bool:
        """Return True if this many more bytes fit."""
        return self.bytes + size <= self.limit

    def take(self, size: int, transaction: object, what: str) -> None:
        """Count this many more bytes.

        Raises:
            TransactionTooLargeError: they do not fit; nothing was counted.
        """
        if not self.has(size):
            raise TransactionTooLargeError(
                f"the commit of transaction {transaction} would be a message of more than {self.limit} bytes: it names "
                f"each segment that a part has written to, each offset and each condition; {what}",
                limit_bytes=self.limit,
            )
        self.bytes += size


@lru_cache(maxsize=4096)
def piece_bytes(key: PieceKey) -> int:
    """Return the maximum bytes of a piece in a manifest, however many records it will have."""
    return sum(map(long_bytes, key)) + _RECORDS_BYTES


def check_parts(parts: int, segments: Sequence[tuple[int, int]], each: int | None, limit: int) -> None:
    """Refuse a number of parts that could not be committed together if each of them writes to all segments.

    Args:
        parts: Least number of parts.
        segments: Place of the stream and number of each segment.
        each: Maximum number of these segments that a part writes to, if known.
        limit: Maximum size of the manifest in bytes.

    Raises:
        TransactionTooLargeError: their manifest, or the record of their commit, would be too large.
    """
    wanted = len(segments) if each is None else min(each, len(segments))
    pieces = parts * wanted
    size = fewest_bytes(parts, segments, wanted)
    if size <= limit and not is_too_scattered(pieces, pieces):
        return
    raise TransactionTooLargeError(
        f"a commit names each segment that each part has written to: {parts} parts with {wanted} segments each are "
        f"{pieces} names and take at least {size} bytes; {FRAMES_HARMLESS} names and {limit} bytes are possible",
        limit_bytes=limit,
    )


def fewest_bytes(parts: int, segments: Sequence[tuple[int, int]], each: int) -> int:
    """Return the minimum bytes in a manifest of parts that write to ``each`` of the segments."""
    of_part = sum(sorted(long_bytes(stream) + long_bytes(number) + 1 for stream, number in segments)[:each])
    # Of the numbers from 1 on, those from 64 on take another byte, those from 8,192 on one more, and so on.
    of_numbers = parts + sum(max(parts + 1 - (1 << 7 * more - 1), 0) for more in range(1, 5))
    return parts * of_part + of_numbers * each


def condition_bytes(item: StreamCondition) -> int:
    """Return the maximum bytes of a condition in a manifest."""
    key = 2 * len(item.condition.key or b"")
    expected = len(str(item.condition.expected))
    return long_bytes(item.stream) + 1 + long_bytes(key) + key + 1 + long_bytes(expected) + expected


def offsets_bytes(item: GroupOffsets) -> int:
    """Return the maximum bytes of a consumer group's offsets in a manifest."""
    names = (item.group_id, item.member_id, item.instance_id or "", *{topic for topic, _ in item.offsets})
    size = sum(long_bytes(length) + length + _BLOCK_BYTES for length in (len(name.encode()) for name in names))
    size += sum(long_bytes(partition) + long_bytes(offset) for (_, partition), offset in item.offsets.items())
    # Where one offset has details, all have, of other groups as well: two bytes where there are none.
    size += 2 * len(item.offsets)
    for epoch, metadata in item.details.values():
        length = len(metadata.encode())
        size += long_bytes(max(epoch, 0)) + long_bytes(length) + length
    return size


Emit = Callable[[int, bytes, bytes], None]
"""Takes the place of the stream, and the key and value of a frame. If it raises, it is called again later."""

Join = Callable[[str], PartStream]
"""Has a stream join the transaction of a part; raises if it cannot."""

_DATA: Final = int(FrameKind.DATA)


def _nowhere(place: int, key: bytes, value: bytes) -> None:
    """Drop a frame that is cut after the end of the transaction."""


class PartWriter:
    """Writer of one part of a transaction. Not thread-safe: its owner holds a lock.

    Attributes:
        count: Records written so far; the next one's count.
        frames: Frames handed over so far.
        opened_s: Start of the oldest open batch (monotonic seconds); None if there is none.
        room: Room in the manifest for segments that have not been written to.
    """

    __slots__ = (
        "_base",
        "_client_epoch",
        "_emit",
        "_join",
        "_key",
        "_limits",
        "_sticky",
        "bytes",
        "completion",
        "count",
        "frames",
        "opened_s",
        "part",
        "part_streams",
        "room",
    )

    def __init__(
        self,
        completion: Completion,
        part: int,
        routes: Sequence[Route],
        limits: FrameLimits,
        emit: Emit,
        *,
        sticky: int = 0,
        client_epoch: int = 0,
        room: ManifestRoom | None = None,
        join: Join | None = None,
    ) -> None:
        """Start with nothing written.

        Args:
            routes: Streams of the transaction, in the order of its BEGIN frame.
            emit: Takes finished frames.
            sticky: Place of the segment that gets records without a key first.
            client_epoch: Session epoch that frames carry.
            room: Size limit of the manifest; by default as the first stream's buffer allows.
            join: Has another stream join the transaction, where the part may do that.
        """
        self.completion = completion
        self.part = part
        self.count = 0
        self.frames = 0
        self.bytes = 0
        self.opened_s: float | None = None
        self.part_streams = {
            route.stream: PartStream(route, place, limits, sticky) for place, route in enumerate(routes)
        }
        if room is None:
            # The writer of a transaction that has ended already has no streams: it refuses each record anyway.
            room = ManifestRoom(routes[0].record_bytes_max if routes else 0)
        self.room = room
        self._key = completion.key
        self._base = local_sequence(part, 0)
        self._limits = limits
        self._emit = emit
        self._join = join
        self._client_epoch = client_epoch
        self._sticky = sticky

    def write(
        self, stream: str, key: bytes | None, value: bytes | None, headers: Headers, timestamp_ms: int | None
    ) -> WriteFuture:
        """Append one record to the open batch of its segment.

        Raises:
            InvalidRequestError: not a stream of the transaction, one of rollbridge's headers among the user's, or what
                the topic that the stream has adopted does not take.
            RecordTooLargeError, TransactionTooLargeError: nothing was written; the transaction stays usable.
        """
        part_stream = self.part_streams.get(stream) or self.part_stream_of(stream)
        if timestamp_ms is not None:
            part_stream.layout.check_time(timestamp_ms)
        if key is None:
            at = part_stream.sticky
        elif part_stream.bounds:
            at = bisect_right(part_stream.bounds, part_stream.hash_of(key, HASH_SEED))
        else:
            at = 0
        part_segment = part_stream.slots[at]
        if part_segment is None:
            part_segment = self._open_part_segment(part_stream, at)
        count = self.count
        given: HeaderList = _checked_headers(headers) if headers else []
        if part_stream.each:
            given.append((RECORD_HEADER, HEADER_VALUE.pack(self._key, self._base + count)))
        in_batch = part_segment.in_batch
        if part_segment.append(in_batch, timestamp_ms, key, value, given) is None:
            part_segment = self._start_batch(part_stream, part_segment, timestamp_ms, key, value, given)
            in_batch = part_segment.in_batch - 1
        else:
            part_segment.in_batch = in_batch + 1
            step = count - part_segment.last
            if step < ONE_BYTE:
                part_segment.steps.append(step)
            else:
                append_step(part_segment.steps, step)
            if len(part_segment.steps) > part_stream.steps_max:
                part_segment.append = no_batch
        self.count = count + 1
        part_segment.last = count
        future = WriteFuture()
        future.part_segment = part_segment
        future.index = part_segment.before + in_batch
        future.count = count
        return future

    def write_some(self, stream: str, records: Sequence[tuple[bytes | None, bytes | None]]) -> int:
        """Append records; return their number. Faster than one by one: all get the same timestamp, read once.

        Raises:
            As :meth:`write`; the records before the one at fault were written.
        """
        part_stream = self.part_streams.get(stream) or self.part_stream_of(stream)
        first = self.count
        write = self._write_to_one if len(part_stream.slots) == 1 else self._write_to_many
        known = part_stream.route.known
        if known is not None and not known.helps(len(records)):
            known = None
        now_ms = wall_ms()
        chunk = part_stream.layout.chunk
        for at in range(0, len(records), chunk):
            write(part_stream, records if len(records) <= chunk else records[at : at + chunk], now_ms, known)
            for part_segment in part_stream.slots:
                if part_segment is not None and len(part_segment.steps) > part_stream.steps_max:
                    part_segment.append = no_batch
        return self.count - first

    def _write_to_many(
        self,
        part_stream: PartStream,
        records: Sequence[tuple[bytes | None, bytes | None]],
        now_ms: int,
        known: KnownKeys | None,
    ) -> None:
        bounds, slots, each = part_stream.bounds, part_stream.slots, part_stream.each
        hash_of, locate, seed = part_stream.hash_of, bisect_right, HASH_SEED
        headers: HeaderList = []
        count = self.count
        try:
            for key, value in records:
                if key is None:
                    at = part_stream.sticky
                elif known is None:
                    at = locate(bounds, hash_of(key, seed))
                else:
                    at = known[key]
                part_segment = slots[at]
                if part_segment is None:
                    part_segment = self._open_part_segment(part_stream, at)
                in_batch = part_segment.in_batch
                if each:
                    headers = [(RECORD_HEADER, HEADER_VALUE.pack(self._key, self._base + count))]
                if part_segment.append(in_batch, now_ms, key, value, headers) is None:
                    self.count = count
                    part_segment = self._start_batch(part_stream, part_segment, now_ms, key, value, headers)
                else:
                    part_segment.in_batch = in_batch + 1
                    step = count - part_segment.last
                    if step < ONE_BYTE:
                        part_segment.steps.append(step)
                    else:
                        append_step(part_segment.steps, step)
                part_segment.last = count
                count += 1
        finally:
            self.count = count

    def _write_to_one(
        self,
        part_stream: PartStream,
        records: Sequence[tuple[bytes | None, bytes | None]],
        now_ms: int,
        _: KnownKeys | None,
    ) -> None:
        """Append records to a lane with one segment: no look-ups, and the slot is updated once for all records."""
        each = part_stream.each
        part_segment = part_stream.slots[0] or self._open_part_segment(part_stream, 0)
        append, in_batch, begun = part_segment.append, part_segment.in_batch, part_segment.in_batch
        headers: HeaderList = []
        count = self.count
        try:
            for key, value in records:
                if each:
                    headers = [(RECORD_HEADER, HEADER_VALUE.pack(self._key, self._base + count))]
                if append(in_batch, now_ms, key, value, headers) is None:
                    part_segment.add_steps(count, in_batch - begun)
                    part_segment.in_batch, self.count = in_batch, count
                    begun = in_batch
                    self._start_batch(part_stream, part_segment, now_ms, key, value, headers)
                    append, in_batch, begun = part_segment.append, part_segment.in_batch, part_segment.in_batch
                    part_segment.last = count
                else:
                    in_batch += 1
                count += 1
        finally:
            part_segment.add_steps(count, in_batch - begun)
            if part_segment.builder is not None:  # otherwise the batch was cut, and another could not be started
                part_segment.in_batch = in_batch
            self.count = count

    def put_batch(self, stream: str, at: int, batch: bytes, first: int, last: int, records: int) -> None:
        """Hand over a ready-made record batch as a frame, instead of records one by one.

        Args:
            at: Place of the segment among those of the stream's route.
            batch: The batch; its first record, or each, has rollbridge's header.
            first, last: Counts of its first and last record within the part, which rise from batch to batch.

        Raises:
            TransactionTooLargeError: the batch was not taken.
        """
        part_stream = self.part_streams.get(stream) or self.part_stream_of(stream)
        self._check_room(len(batch))
        part_segment = part_stream.slots[at] or self._open_part_segment(part_stream, at)
        key = HEADER.pack(
            MAGIC, VERSION, _DATA, self._key, self.part, part_segment.number, first, records, self._client_epoch
        )
        self._emit(part_segment.place, key, batch)
        if not part_segment.before:
            part_segment.first = first
        part_segment.last = last
        part_segment.before += records
        self.frames += 1
        self.bytes += len(batch)
        self.count = max(self.count, last + 1)

    def cut_all(self) -> None:
        """Hand over every open batch as a frame."""
        for part_stream in self.part_streams.values():
            for part_segment in part_stream.slots:
                if part_segment is not None:
                    self._cut(part_segment)
        self.opened_s = None

    def cut_older(self, than_s: float) -> None:
        """Hand over the open batches that were started before ``than_s`` (monotonic seconds).

        Once half of the frames that a transaction may have are used up, only full ones are handed over, so that single
        records written over days do not use up the rest.
        """
        if self.opened_s is None or self.opened_s > than_s or self.frames > FRAMES_HARMLESS // 2:
            return
        oldest: float | None = None
        for part_stream in self.part_streams.values():
            for part_segment in part_stream.slots:
                if part_segment is None:
                    continue
                if part_segment.ready is not None or (part_segment.in_batch and part_segment.opened_s <= than_s):
                    self._cut(part_segment)
                elif part_segment.in_batch:
                    oldest = part_segment.opened_s if oldest is None else min(oldest, part_segment.opened_s)
        self.opened_s = oldest

    def pieces(self) -> list[Piece]:
        """Return the pieces written so far, cut or not."""
        return [
            Piece(
                self.part,
                part_segment.place,
                part_segment.number,
                part_segment.records,
                part_segment.first,
                part_segment.last,
            )
            for part_stream in self.part_streams.values()
            for part_segment in part_stream.slots
            if part_segment is not None and part_segment.records
        ]

    def release(self) -> None:
        """Drop ``emit``: no frames are handed over any more."""
        self._emit = _nowhere
        self._join = None

    def slots(self) -> Iterator[PartSegment]:
        """Iterate over the segments that were written to."""
        return (
            part_segment
            for part_stream in self.part_streams.values()
            for part_segment in part_stream.slots
            if part_segment is not None
        )

    def add(self, route: Route) -> PartStream:
        """Add a stream behind all others."""
        part_stream = PartStream(route, len(self.part_streams), self._limits, self._sticky)
        self.part_streams[route.stream] = part_stream
        return part_stream

    def _open_part_segment(self, part_stream: PartStream, at: int) -> PartSegment:
        self.room.take(
            self._piece_bytes(part_stream, at),
            self.completion.transaction,
            f"there is no room for another segment of {part_stream.route.stream}, so this record was not written: "
            "commit what there is, or abort",
        )
        part_segment = PartSegment(
            self.completion,
            self.part,
            part_stream.route.stream,
            part_stream.place,
            part_stream.route.numbers[at],
            is_each=part_stream.each,
        )
        part_stream.slots[at] = part_segment
        return part_segment

    def _piece_bytes(self, part_stream: PartStream, at: int) -> int:
        return piece_bytes(PieceKey(self.part, part_stream.place, part_stream.route.numbers[at]))

    def _next_slot(self, part_stream: PartStream, part_segment: PartSegment) -> PartSegment:
        """Return the slot of the next segment in turn; the same one if the manifest has no room for another segment."""
        following = (part_stream.sticky + 1) % len(part_stream.slots)
        found = part_stream.slots[following]
        if found is None:
            if not self.room.has(self._piece_bytes(part_stream, following)):
                return part_segment
            found = self._open_part_segment(part_stream, following)
        part_stream.sticky = following
        return found

    def _start_batch(
        self,
        part_stream: PartStream,
        part_segment: PartSegment,
        timestamp_ms: int | None,
        key: bytes | None,
        value: bytes | None,
        headers: HeaderList,
    ) -> PartSegment:
        """Cut the slot's batch, if any, and start another with this record; return the slot that took it.

        Raises before anything is changed, except that a cut batch may have been handed over.
        """
        layout = part_stream.layout
        # The header of a run of one, which is made longer when the batch is cut.
        own = (
            headers
            if part_stream.each
            else [*headers, (RECORD_HEADER, HEADER_VALUE.pack(self._key, self._base + self.count))]
        )
        self._check_room(layout.check(key, value, own))
        self._cut(part_segment)
        if key is None and part_segment.records and len(part_stream.slots) > 1:
            # Records without a key stay together for a batch, then the next segment is used.
            part_segment = self._next_slot(part_stream, part_segment)
            if part_segment.append(part_segment.in_batch, timestamp_ms, key, value, headers) is not None:
                part_segment.in_batch += 1
                append_step(part_segment.steps, self.count - part_segment.last)
                return part_segment
            self._cut(part_segment)
        builder = new_builder(layout.batch_bytes)
        builder.append(0, timestamp_ms, key, value, own)
        if not part_segment.before:
            part_segment.first = self.count
        part_segment.builder = builder
        part_segment.steps.clear()
        part_segment.in_batch = 1
        part_segment.first_in_batch = self.count
        part_segment.opened_s = time.monotonic()
        if self.opened_s is None:
            self.opened_s = part_segment.opened_s
        part_segment.append = layout.append_of(builder)
        return part_segment

    def _cut(self, part_segment: PartSegment) -> None:
        """Hand over the slot's batch as a frame; a frame that could not be handed over before goes first."""
        if part_segment.ready is not None:
            self._emit(part_segment.place, *part_segment.ready)
            part_segment.ready = None
        if part_segment.builder is None:
            return
        rest = b"" if part_segment.is_each else pack_rest(part_segment.in_batch, part_segment.steps)
        value = finished(part_segment.builder.build(), rest, HEADER_VALUE_BYTES, self._limits.compression)
        key = HEADER.pack(
            MAGIC,
            VERSION,
            _DATA,
            self._key,
            self.part,
            part_segment.number,
            part_segment.first_in_batch,
            part_segment.in_batch,
            self._client_epoch,
        )
        part_segment.ready = (key, value)
        part_segment.builder = None
        part_segment.append = no_batch
        part_segment.before += part_segment.in_batch
        part_segment.in_batch = 0
        self.frames += 1
        self.bytes += len(value)
        self._emit(part_segment.place, key, value)
        part_segment.ready = None

    def _check_room(self, size: int) -> None:
        if self.bytes + size > self._limits.transaction_bytes:
            raise TransactionTooLargeError(
                f"transaction {self.completion.transaction} would exceed {self._limits.transaction_bytes} bytes; "
                "this record was not written: commit what there is, or abort",
                limit_bytes=self._limits.transaction_bytes,
            )
        if self.frames >= FRAMES_HARMLESS:
            self._check_frames()

    def _check_frames(self) -> None:
        """Refuse a frame that could make the commit record too large; open batches count, since they become frames."""
        slots = [
            part_segment
            for part_stream in self.part_streams.values()
            for part_segment in part_stream.slots
            if part_segment is not None
        ]
        frames = self.frames + len(slots) + 1
        if is_too_scattered(frames, len(slots) + 1):
            raise TransactionTooLargeError(
                f"transaction {self.completion.transaction} cannot be continued: {scattered_reason(frames)}; this "
                "record was not written: commit what there is, or abort",
                limit_bytes=CONTROL_RECORD_BYTES_MAX,
            )

    def part_stream_of(self, name: str) -> PartStream:
        """Return the lane of a stream by its name, or by that of the topic that it has adopted.

        A stream that is none of the transaction's joins it, if the part may do that.

        Raises:
            InvalidRequestError: not a stream of the transaction.
        """
        part_stream = self.part_streams.get(name)
        if part_stream is None and name:
            part_stream = next((item for item in self.part_streams.values() if item.route.topic == name), None)
        if part_stream is not None:
            return part_stream
        if self._join is None:
            raise self._foreign(name)
        return self._join(name)

    def _foreign(self, stream: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"{stream} is not a stream of transaction {self.completion.transaction}, which was begun for "
            f"{', '.join(self.part_streams)}, and only its owner may have others join; the record was not written"
        )


def _checked_headers(headers: Headers) -> HeaderList:
    """Return the user's headers.

    Raises:
        TypeError: they are not pairs of a name and a value.
        InvalidRequestError: one of them has the name of rollbridge's.
    """
    found = as_headers(headers)
    for name, _ in found:
        if name == RECORD_HEADER:
            raise InvalidRequestError(
                f"the header {RECORD_HEADER!r} is rollbridge's own; the record was not written: name it otherwise"
            )
    return found


# The outbox of a transaction


HOLD_S: Final = 0.1
"""Maximum seconds that frames wait in an outbox, to within the interval of housekeeping."""

Frame = tuple[bytes, bytes]
"""Packed header and value."""

_KIND: Final = 3
"""Offset of the kind in a packed header."""


class Outbox:
    """Frames waiting for one buffer partition, in order. Not thread-safe: its owner holds a lock.

    ``since_s`` is the arrival of the oldest frame (monotonic seconds); 0 if there is none.
    """

    __slots__ = ("_bytes", "_frames", "since_s")

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._bytes = 0
        self.since_s = 0.0

    def __bool__(self) -> bool:
        return bool(self._frames)

    def has_room(self, value: bytes) -> bool:
        """Return True if a frame with this value fits in with those that wait."""
        return self._bytes + len(value) + BUNDLED_FRAME_BYTES <= BUNDLE_BYTES_MAX

    def add(self, key: bytes, value: bytes) -> None:
        """Queue a frame."""
        if not self._frames:
            self.since_s = time.monotonic()
        self._frames.append((key, value))
        self._bytes += len(value) + BUNDLED_FRAME_BYTES

    def packed(self, *more: Frame, data: bool = True) -> Frame:
        """Return one frame that holds all those here, followed by ``more``; the outbox stays as it is.

        ``data`` is False to leave out DATA frames, which an abort has no use for.
        """
        frames = self._frames if data else [frame for frame in self._frames if frame[0][_KIND] != FrameKind.DATA]
        together = [*frames, *more]
        return together[0] if len(together) == 1 else pack_bundle(together)

    def clear(self) -> None:
        """Drop the frames: they have been sent, or are not needed any more."""
        if self._frames:
            self._frames = []
            self._bytes = 0
            self.since_s = 0.0
