"""Follow partitions that untrusted clients write to, with bounds that a consumer lacks.

Any writer of a buffer chooses the compression of its batches. librdkafka allocates whatever gzip claims (a batch of
0.9 MB took 900 MB), and fetches a zstd batch of more than 100 MB again without end: no group could be led behind one.
Here a batch is decompressed up to a bound. One that exceeds it, does not parse, or does not number its records one by
one is passed over, and handed out as a single message without key and value.

The reading thread does everything. While it is behind the end of a partition, the next request is sent as soon as the
answer before it is in, so that the broker works meanwhile. At the end it is sent only when the reader asks for more:
what comes while the reader is busy then arrives as one answer, and not as many small ones.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

from rollbridge.errors import CorruptDataError
from rollbridge.kafka.batches import PlainRecord, plain_records
from rollbridge.kafka.committed import iterate_any_records
from rollbridge.kafka.fetch import NO_EPOCH
from rollbridge.kafka.fetch_plan import Fetched, Trouble
from rollbridge.kafka.follower import Follower
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.ratelimit import limited
from rollbridge.model.names import Partition

logger = limited(logging.getLogger(__name__))

INFLATED_BYTES_MAX: Final = 64 * 1024 * 1024
"""Limit on a batch's decompressed bytes. Our clients compress only the batches within their messages, so this is far
above the size of any batch that they write to a buffer."""
AT_ONCE: Final = 2_000
"""Messages handed out at once."""
FETCH_BYTES: Final = 4 * 1024 * 1024
"""Bytes requested at once of a partition, and of all of a broker; the first batch comes whole even if it is larger."""


class TailMessage(NamedTuple):
    """Message of a partition; one with neither key nor value stands for all unreadable ones up to it."""

    partition: Partition
    offset: int
    appended_ms: int
    key: bytes | None
    value: bytes | None


class Tail:
    """Reader of partitions from given offsets on, ``READ_UNCOMMITTED``. Not thread-safe.

    Attributes:
        skipped: Number of batches that could not be read.
        epochs: Leader epoch of the last message handed out of each partition.
        appended_ms: Latest time in the batch that it came in; its append time, where the broker gives that.
        read_bytes: Bytes of the batches of each partition that have been handed out, or begun to be.
        failed: Partition that the latest CorruptDataError was about.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        security: Mapping[str, str],
        *,
        client_id: str = "rollbridge",
        inflated_bytes_max: int = INFLATED_BYTES_MAX,
    ) -> None:
        """Prepare the reader; no request is sent before the first :meth:`poll`."""
        self.skipped = 0
        self.epochs: dict[Partition, int] = {}
        self.appended_ms: dict[Partition, int] = {}
        self.read_bytes: dict[Partition, int] = {}
        self.failed: Partition | None = None
        self._inflated_bytes_max = inflated_bytes_max
        self._follower = Follower(
            bootstrap_servers,
            Isolation.READ_UNCOMMITTED,
            name="rollbridge-tail-errand",
            security=security,
            client_id=client_id,
            max_bytes=FETCH_BYTES,
            check_epochs=True,
        )
        self._assigned: frozenset[Partition] = frozenset()
        self._arrived: deque[Fetched | Trouble] = deque()
        self._opened: Iterator[TailMessage] = iter(())
        self._opened_of: Partition | None = None

    def assign(self, wanted: Mapping[Partition, int], epochs: Mapping[Partition, int] | None = None) -> None:
        """Read exactly these partitions: new ones from their offsets on, the others from their present positions.

        Args:
            wanted: Next offset of each partition.
            epochs: Leader epochs of the messages before these offsets, where they are known: if a log has lost them
                since, this shows, also if it has grown again.
        """
        if self._assigned == wanted.keys():
            return
        for partition in self._assigned - wanted.keys():
            self._follower.leave(partition)
        for partition in wanted.keys() - self._assigned:
            self._follower.follow(partition, wanted[partition], (epochs or {}).get(partition, NO_EPOCH))
        # What has arrived of a partition that is left is not handed out: it may come back with another offset.
        self._arrived = deque(item for item in self._arrived if item.partition in wanted)
        if self._opened_of not in wanted:
            self._opened = iter(())
        self._assigned = frozenset(wanted)

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
            if count < AT_ONCE and not self._open_next(0.0 if count else timeout_s):
                return

    def ends(self) -> dict[Partition, int]:
        """Return the end of each partition at its last fetch, as far as it is known."""
        ends = ((partition, self._follower.end(partition)) for partition in self._assigned)
        return {partition: end for partition, end in ends if end is not None}

    def interrupt(self) -> None:
        """See :meth:`Follower.interrupt`."""
        self._follower.interrupt()

    def unheard_s(self) -> dict[Partition, float]:
        """Return for how long nothing has been heard of each partition, not even that it has nothing new."""
        return {partition: self._follower.unheard_s(partition) for partition in self._assigned}

    def close(self) -> None:
        """Stop reading."""
        self._follower.close()

    def _open_next(self, timeout_s: float) -> bool:
        """Open what has arrived next; wait ``timeout_s`` for it, and return False without."""
        if not self._arrived:
            self._arrived.extend(self._follower.poll(timeout_s))
            if any(isinstance(item, Fetched) and item.end < item.high_watermark for item in self._arrived):
                self._follower.ask()
        if not self._arrived:
            return False
        found = self._arrived.popleft()
        if isinstance(found, Fetched):
            self._opened, self._opened_of = self._open(found), found.partition
        elif isinstance(found.fault, CorruptDataError):
            self.failed = found.partition
            raise found.fault
        else:
            logger.info("%s cannot be followed now: %s", found.partition[0], found.fault)
        return True

    def _open(self, fetched: Fetched) -> Iterator[TailMessage]:
        partition, position = fetched.partition, fetched.start
        for header, batch in fetched.batches:
            end = header.base_offset + header.last_offset_delta + 1
            if end <= position:
                continue
            self.epochs[partition] = header.partition_leader_epoch
            self.appended_ms[partition] = header.max_timestamp
            self.read_bytes[partition] = self.read_bytes.get(partition, 0) + len(batch)
            if not header.is_control:
                try:
                    for record in read_numbered(batch, header.base_offset, end, self._inflated_bytes_max):
                        if record.offset >= position:
                            position = record.offset + 1
                            yield _message((partition, position - 1, record.timestamp, record.key, record.value))
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


_message: Final[Callable[[tuple[Partition, int, int, bytes | None, bytes | None]], TailMessage]] = partial(
    tuple.__new__, TailMessage
)
"""What ``TailMessage(*fields)`` gives, in half the time."""


def read_numbered(batch: memoryview, base: int, end: int, limit_bytes: int) -> Iterator[PlainRecord]:
    """Iterate over the records of a batch, parsing each only when it is asked for if they may be many.

    Brokers do not check the numbering of an uncompressed batch, and a reader that trusted it could continue anywhere.

    Raises:
        CorruptDataError: While iterating: the batch exceeds ``limit_bytes``, does not parse, or is not numbered one by
            one.
    """
    offset = base
    found: Iterable[PlainRecord] = plain_records(batch) or iterate_any_records(batch, limit_bytes=limit_bytes)
    for record in found:
        if record.offset != offset or offset >= end:
            raise CorruptDataError(f"record {offset - base} of a batch is numbered {record.offset - base}")
        offset += 1
        yield record
