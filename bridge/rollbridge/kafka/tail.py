"""Follow partitions that untrusted clients write to, with bounds that a consumer lacks.

Any writer of a buffer chooses the compression of its batches. librdkafka allocates whatever gzip claims (a batch of
0.9 MB took 900 MB), and fetches a zstd batch of more than 100 MB again without end: no group could be led behind one.
Here a batch is decompressed up to a bound. One that exceeds it, does not parse, or does not number its records one by
one is passed over, and handed out as a single message without key and value.

A thread of its own, :class:`_Fetcher`, fetches whole batches ahead up to ``AHEAD_BYTES``; it owns the cluster and its
connections. The reading thread opens the batches. Both meet in :class:`_Shared`, whose lock is never held during I/O
other than a byte to the pipe that wakes the fetcher.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Final, NamedTuple

from kio.schema.errors import ErrorCode
from kio.schema.fetch.v12 import FetchResponse

from rollbridge.errors import CorruptDataError, RollbridgeError
from rollbridge.kafka import errors as codes
from rollbridge.kafka.batches import LogRecord, check_crc, complete_batches, parse_header
from rollbridge.kafka.committed import iterate_any_records
from rollbridge.kafka.connection import Connection
from rollbridge.kafka.fetch import NO_EPOCH, Wanted, diverged, fetch_request
from rollbridge.kafka.metadata import Cluster, Isolation, NodeId
from rollbridge.kafka.retry import Backoff, limited

logger = limited(logging.getLogger(__name__))

Partition = tuple[str, int]

INFLATED_BYTES_MAX: Final = 64 * 1024 * 1024
"""Limit on a batch's decompressed bytes. Our clients compress only the batches within their messages, so this is far
above the size of any batch that they write to a buffer."""
AT_ONCE: Final = 2_000
"""Messages handed out at once."""
FETCH_BYTES: Final = 4 * 1024 * 1024
"""Bytes requested at once of a partition, and of all of a broker; the first batch comes whole even if it is larger."""
AHEAD_BYTES: Final = 16 * 1024 * 1024
"""Bytes fetched and not yet handed out beyond which no request is sent."""
IDLE_WAIT_MS: Final = 500
"""Longest delay of an empty answer at the broker. New records are answered at once."""
_CONNECT_S: Final = 3.0
_REQUEST_S: Final = 10.0
_END_S: Final = 1.0


class TailMessage(NamedTuple):
    """Message of a partition; one with neither key nor value stands for all unreadable ones up to it."""

    partition: Partition
    offset: int
    appended_ms: int
    key: bytes | None
    value: bytes | None


class _Follow(NamedTuple):
    """Next position to fetch in a partition.

    Attributes:
        token: Number of the assignment for which it is read.
        offset: Next offset.
        epoch: Leader epoch of the batch before it, if that was read.
    """

    token: int
    offset: int
    epoch: int = NO_EPOCH


class _Chunk(NamedTuple):
    """Batches of one partition, fetched for an assignment that may have been revoked since."""

    partition: Partition
    token: int
    start: int
    raw: bytes


class Tail:
    """Reader of partitions from given offsets on, ``READ_UNCOMMITTED``. Not thread-safe.

    Attributes:
        skipped: Number of batches that could not be read.
        epochs: Leader epoch of the last message handed out of each partition.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        security: Mapping[str, str],
        *,
        client_id: str = "rollbridge",
        inflated_bytes_max: int = INFLATED_BYTES_MAX,
    ) -> None:
        """Prepare the reader; no request is sent before the first :meth:`assign`."""
        self.skipped = 0
        self.epochs: dict[Partition, int] = {}
        self._inflated_bytes_max = inflated_bytes_max
        self._shared = _Shared()
        self._fetcher = _Fetcher(
            self._shared,
            Cluster(
                bootstrap_servers,
                security=security,
                client_id=client_id,
                connect_timeout_s=_CONNECT_S,
                request_timeout_s=_REQUEST_S,
            ),
        )
        self._assigned: dict[Partition, int] = {}
        self._tokens = 0
        self._opened: Iterator[TailMessage] = iter(())

    def assign(self, wanted: Mapping[Partition, int], epochs: Mapping[Partition, int] | None = None) -> None:
        """Read exactly these partitions: new ones from their offsets on, the others from their present positions.

        Args:
            wanted: Next offset of each partition.
            epochs: Leader epochs of the messages before these offsets, where they are known: if a log has lost them
                since, this shows, also if it has grown again.
        """
        if self._assigned.keys() == wanted.keys():
            return
        for item in self._assigned.keys() - wanted.keys():
            del self._assigned[item]
        fresh: dict[Partition, _Follow] = {}
        for item in wanted.keys() - self._assigned.keys():
            self._tokens += 1
            self._assigned[item] = self._tokens
            fresh[item] = _Follow(self._tokens, wanted[item], (epochs or {}).get(item, NO_EPOCH))
        self._shared.change(frozenset(self._assigned), fresh)
        if not self._fetcher.is_alive():
            self._fetcher.start()

    def poll(self, timeout_s: float) -> Iterator[TailMessage]:
        """Iterate over the messages that have arrived, at most :data:`AT_ONCE`; wait ``timeout_s`` for the first.

        Raises:
            CorruptDataError: The next records were deleted, or have a wrong checksum.
            LogDivergedError: Records handed out are no longer in the log: it lost its end and has grown again.
        """
        count = 0
        while count < AT_ONCE:
            for message in islice(self._opened, AT_ONCE - count):
                count += 1
                yield message
            if count < AT_ONCE:
                chunk = self._shared.take(0.0 if count else timeout_s)
                if chunk is None:
                    return
                self._opened = self._open(chunk)

    def ends(self) -> dict[Partition, int]:
        """Return the end of each partition at its last fetch, as far as it is known."""
        return self._shared.ends()

    def close(self) -> None:
        """Stop reading."""
        self._shared.close()
        if self._fetcher.is_alive():
            self._fetcher.join(_END_S)  # it may be waiting for a broker, and then ends by itself
        else:
            self._fetcher.finish()

    def _open(self, chunk: _Chunk) -> Iterator[TailMessage]:
        partition, token, position, raw = chunk
        for batch in complete_batches(raw):
            if self._assigned.get(partition) != token:
                return
            header = parse_header(batch)
            end = header.base_offset + header.last_offset_delta + 1
            if end <= position:
                continue
            self.epochs[partition] = header.partition_leader_epoch
            if not header.is_control:
                check_crc(header, batch)
                try:
                    records = read_numbered(batch, header.base_offset, end, self._inflated_bytes_max)
                    for record in records:
                        if record.offset >= position:
                            position = record.offset + 1
                            yield TailMessage(partition, record.offset, record.timestamp, record.key, record.value)
                except CorruptDataError as fault:
                    self.skipped += 1
                    logger.warning(
                        "messages up to offset %d of partition %d of %s are passed over, since they cannot be read: %s",
                        end - 1,
                        partition[1],
                        partition[0],
                        fault,
                    )
            if position < end:
                position = end
                yield TailMessage(partition, end - 1, max(header.max_timestamp, 0), None, None)


def read_numbered(batch: memoryview, base: int, end: int, limit_bytes: int) -> Iterator[LogRecord]:
    """Iterate over the records of a batch, parsing each only when it is asked for.

    Brokers do not check the numbering of an uncompressed batch, and a reader that trusted it could continue anywhere.

    Raises:
        CorruptDataError: While iterating: the batch exceeds ``limit_bytes``, does not parse, or is not numbered one by
            one.
    """
    offset = base
    for record in iterate_any_records(batch, limit_bytes=limit_bytes):
        if record.offset != offset or offset >= end:
            raise CorruptDataError(f"record {offset - base} of a batch is numbered {record.offset - base}")
        offset += 1
        yield record


class _Shared:
    """State shared by the fetching and the reading thread; the condition's lock guards all of it."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._waker, self._wakes = os.pipe()
        os.set_blocking(self._waker, False)
        self._places: dict[Partition, _Follow] = {}
        self._ends: dict[Partition, int] = {}
        self._chunks: deque[_Chunk] = deque()
        self._ahead = 0
        self._fault: RollbridgeError | None = None
        self._is_closed = False

    def change(self, kept: frozenset[Partition], fresh: Mapping[Partition, _Follow]) -> None:
        """Replace the partitions: keep ``kept`` and add ``fresh`` ones from their places on."""
        with self._lock:
            self._places = {item: place for item, place in self._places.items() if item in kept} | dict(fresh)
            self._ends = {item: end for item, end in self._ends.items() if item in kept}
        self._wake()

    def take(self, timeout_s: float) -> _Chunk | None:
        """Return the next batches; wait ``timeout_s`` for some, and return None without."""
        with self._lock:
            if not self._chunks and self._fault is None and timeout_s > 0:
                self._lock.wait_for(lambda: self._chunks or self._fault is not None or self._is_closed, timeout_s)
            if not self._chunks:
                if self._fault is not None:
                    raise self._fault
                return None
            chunk = self._chunks.popleft()
            was_full = self._ahead > AHEAD_BYTES
            self._ahead -= len(chunk.raw)
        if was_full:
            self._wake()
        return chunk

    def ends(self) -> dict[Partition, int]:
        with self._lock:
            return dict(self._ends)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        self._wake()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def waker(self) -> int:
        """Descriptor that becomes readable when something has changed for the fetching thread."""
        return self._waker

    def hush(self) -> None:
        """Drain the waking pipe."""
        try:
            while os.read(self._waker, 512):
                pass
        except BlockingIOError:
            pass

    def places(self) -> dict[Partition, _Follow]:
        """Return the places to fetch; none while ``AHEAD_BYTES`` wait to be taken, or after a fault."""
        with self._lock:
            return {} if self._ahead > AHEAD_BYTES or self._fault is not None else dict(self._places)

    def give(self, partition: Partition, asked: _Follow, raw: bytes, after: _Follow, end: int) -> None:
        """Add fetched batches; ``after`` is the next place and ``end`` the partition's high watermark."""
        with self._lock:
            if self._places.get(partition) != asked:
                return
            self._ends[partition] = end
            if after.offset > asked.offset:
                self._places[partition] = after
                self._chunks.append(_Chunk(partition, asked.token, asked.offset, raw))
                self._ahead += len(raw)
                self._lock.notify_all()

    def fail(self, partition: Partition, token: int, fault: RollbridgeError) -> None:
        """Stop reading with a fault: the next records can never be read."""
        with self._lock:
            known = self._places.get(partition)
            if known is not None and known.token == token:
                self._fault = fault
                self._lock.notify_all()

    def release(self) -> None:
        with self._lock:
            os.close(self._waker)
            os.close(self._wakes)
            self._waker = self._wakes = -1

    def _wake(self) -> None:
        with self._lock:
            if self._wakes >= 0:
                os.write(self._wakes, b"x")


class _AskedFetch(NamedTuple):
    connection: Connection
    places: dict[Partition, _Follow]


class _Fetcher(threading.Thread):
    """Thread that fetches ahead from the leaders of partitions, with one request in flight per broker."""

    def __init__(self, shared: _Shared, cluster: Cluster) -> None:
        super().__init__(name="rollbridge-tail", daemon=True)
        self._shared = shared
        self._cluster = cluster
        self._asked: dict[NodeId, _AskedFetch] = {}
        self._pauses: dict[str, tuple[Backoff, float]] = {}
        self._served: dict[Partition, int] = {}
        self._turn = 0

    def run(self) -> None:
        """Fetch until closed."""
        try:
            while not self._shared.is_closed:
                try:
                    self._shared.hush()
                    self._ask()
                    self._wait()
                except RollbridgeError as fault:  # nobody says who leads what
                    logger.info("partitions cannot be followed now: %s", fault)
                    self._sleep(0.2)
                except Exception:
                    logger.exception("a defect ended a look at partitions; going on")
                    self._drop()
                    self._sleep(1.0)
        finally:
            self.finish()

    def finish(self) -> None:
        """Close the connections and the pipe."""
        self._drop()
        self._cluster.close()
        self._shared.release()

    def _ask(self) -> None:
        """Send a request to each leader that has none, for all of its partitions."""
        places = self._shared.places()
        now = time.monotonic()
        for node, asked in list(self._asked.items()):
            known = (item for item in places if self._cluster.known_leader(*item) == node)
            if any(item not in asked.places or places[item].token != asked.places[item].token for item in known):
                self._forget(node)  # a new partition would wait for the answer in flight
        due = {item for item in places if self._pauses.get(item[0], (None, 0.0))[1] <= now}
        for topic, code in self._cluster.learn(topic for topic, _ in due).items():
            self._pause(topic, codes.name(code))
        wanted: dict[NodeId, dict[Partition, _Follow]] = {}
        for item in sorted(due, key=lambda item: (self._served.get(item, 0), item)):
            leader = self._cluster.known_leader(*item)
            if leader is None:
                self._pause(item[0], "LEADER_NOT_AVAILABLE")
            elif leader not in self._asked:
                wanted.setdefault(leader, {})[item] = places[item]
        for node, mine in wanted.items():
            try:
                connection = self._cluster.connection(node)
                requested = (Wanted(*item, place.offset, place.epoch) for item, place in mine.items())
                connection.send(fetch_request(requested, IDLE_WAIT_MS, Isolation.READ_UNCOMMITTED, FETCH_BYTES))
            except RollbridgeError as fault:
                for topic, _ in mine:
                    self._pause(topic, str(fault))
            else:
                self._asked[node] = _AskedFetch(connection, mine)

    def _wait(self) -> None:
        """Wait for answers, a change of the assignment, or the end of a back-off."""
        poller = select.poll()
        poller.register(self._shared.waker, select.POLLIN)
        for asked in self._asked.values():
            poller.register(asked.connection.fileno(), select.POLLIN)
        now = time.monotonic()
        pauses = [until - now for _, until in self._pauses.values() if until > now]
        if not any(asked.connection.has_answer() for asked in self._asked.values()):
            poller.poll(round(1000 * min([IDLE_WAIT_MS / 1000, *pauses])) + 1)
        for node, asked in list(self._asked.items()):
            if asked.connection.has_answer():
                self._hear(node, asked)
            elif asked.connection.overdue():
                self._forget(node)
                for topic, _ in asked.places:
                    self._pause(topic, "no answer in time")

    def _hear(self, node: NodeId, asked: _AskedFetch) -> None:
        del self._asked[node]
        try:
            answer = asked.connection.receive(FetchResponse)
        except RollbridgeError as fault:
            for topic, _ in asked.places:
                self._pause(topic, str(fault))
            return
        for responses in answer.responses:
            for found in responses.partitions:
                partition = str(responses.topic), int(found.partition_index)
                place = asked.places[partition]
                if found.error_code == ErrorCode.none and found.diverging_epoch.end_offset >= 0:
                    self._shared.fail(partition, place.token, diverged(partition[0], place.offset))
                elif found.error_code == ErrorCode.none:
                    self._pauses.pop(partition[0], None)
                    raw = found.records or b""
                    try:
                        after = _place_after(raw, place)
                    except CorruptDataError as fault:
                        self._shared.fail(partition, place.token, fault)
                        continue
                    if after.offset > place.offset:
                        self._turn += 1
                        self._served[partition] = self._turn
                    self._shared.give(partition, place, raw, after, found.high_watermark)
                elif found.error_code == ErrorCode.offset_out_of_range:
                    text = f"a buffer does not hold what it should: offset {place.offset} of {partition[0]} is gone"
                    self._shared.fail(partition, place.token, CorruptDataError(text))
                else:
                    self._pause(partition[0], codes.name(found.error_code))

    def _pause(self, topic: str, why: str) -> None:
        """Back off from a topic, and look up its leader again then."""
        self._cluster.forget_leader(topic)
        backoff = self._pauses[topic][0] if topic in self._pauses else Backoff()
        self._pauses[topic] = backoff, time.monotonic() + backoff.grow()
        logger.info("topic %s is asked again soon: %s", topic, why)

    def _forget(self, node: NodeId) -> None:
        """Close a connection with its in-flight request; the next request opens another."""
        self._asked.pop(node).connection.close()

    def _drop(self) -> None:
        for node in list(self._asked):
            self._forget(node)

    def _sleep(self, pause_s: float) -> None:
        poller = select.poll()
        poller.register(self._shared.waker, select.POLLIN)
        poller.poll(round(1000 * pause_s))


def _place_after(raw: bytes, place: _Follow) -> _Follow:
    """Return the place behind the last whole batch."""
    for batch in complete_batches(raw):
        header = parse_header(batch)
        end = max(place.offset, header.base_offset + header.last_offset_delta + 1)
        place = place._replace(offset=end, epoch=header.partition_leader_epoch)
    return place
