"""Who wrote the records that a native consumer hands out, of which only the first of a frame says it.

confluent-kafka hands out records one by one, without their batches. So what the first record of a frame says of those
behind it (:class:`.Attribution`) is remembered, and a record is looked up by its offset. Nothing is done for an
application that never asks: messages are looked through once it has asked, and from then on as they come.

A consumer that begins in the middle of a frame is not given the first record. Brokers return whole batches, whatever
offset is asked for; so the batch is fetched once more, without librdkafka, if somebody asks::

                       begins here
                            v
    | head 1 2 3 4 5 | head 1 2 3 4 | head 1 2 ...
      ^---- not handed out ---^       ^ from the first head on, everything is known

A run that a head has announced is known for good. That a record belongs to *no* run is said only of offsets of which
every record was seen: from a head on without a gap, as they were handed out, or in what was fetched last. So nothing
has to be told of seeks, resets and logs that were cut: they leave a gap, and whatever follows a gap is unknown until
the next head, or fetched.

Source: Kafka's ``Fetcher``, which skips the records of a batch before the offset that was asked for.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from confluent_kafka import Message

from rollbridge.errors import InvalidRequestError, NotFoundError, TruncatedError
from rollbridge.forks import hold, is_gone
from rollbridge.kafka.batches import BatchHeader, complete_batches, parse_header
from rollbridge.kafka.clients import get_headers
from rollbridge.kafka.committed import iterate_any_records
from rollbridge.kafka.fetch import LogReader
from rollbridge.kafka.metadata import Cluster, Isolation
from rollbridge.model.attribution import Attribution, own_header, unpack_run
from rollbridge.model.names import Partition, show_partition

RUNS_MAX: Final = 4_096
"""Runs of a partition beyond which the older half is forgotten; whoever asks for them then has them fetched."""
NUMBERS_MAX: Final = 1_000_000
"""The same for single numbers of runs with gaps: a stranger's header may have a million."""
_FETCH_BYTES: Final = 256 * 1024
_NEVER: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class FetchedHeads:
    """Records of a partition of which all are known, fetched from a broker.

    Attributes:
        offsets: Where they lie.
        heads: Offset and header of each head, and the end of its batch, where its run ends at the latest.
        doubtful: Records of which compaction may have taken the head.
    """

    offsets: range
    heads: Sequence[tuple[int, bytes, int]]
    doubtful: frozenset[int] = frozenset()


class Writers:
    """Knowledge of who wrote the records of some partitions. Thread-safe."""

    def __init__(self, fetch: Callable[[Partition, int], FetchedHeads]) -> None:
        """Know nothing; ``fetch`` returns what a broker gives for an offset, from the beginning of its batch on."""
        self._fetch = fetch
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._known: dict[Partition, _KnownRuns] = {}
        self._latest: Sequence[Message] = ()
        self._is_asked = False

    def handed_out(self, messages: Sequence[Message]) -> None:
        """Note messages as a consumer hands them out, in order."""
        if not self._is_asked:
            self._latest = messages
            return
        with self._lock:
            self._learn(messages)

    def find(self, place: Partition, offset: int) -> tuple[bytes, int] | None:
        """Return the id of the transaction that wrote a record without a header, and its local sequence; None if none.

        Raises:
            KafkaUnavailableError: It would have to be looked up, and no broker answers.
            NotFoundError: It cannot be known any more: its frame was deleted, or compaction may have taken the head.
        """
        if self._process != os.getpid():  # in a child, another thread of the parent may have held the lock at the fork
            self._lock, self._process = threading.RLock(), os.getpid()
        with self._lock:
            if not self._is_asked:
                self._is_asked = True
                self._learn(self._latest)
                self._latest = ()
            known = self._known.setdefault(place, _KnownRuns())
            found = known.handed_out.find(offset)
            if found is not None or known.since <= offset < known.end:
                return found
            if offset not in known.fetched_offsets:
                known.take(self._fetch(place, offset), place, offset)
            if offset in known.doubtful:
                raise NotFoundError(why_unknown(place, offset))
            return known.fetched.find(offset)

    def _learn(self, messages: Sequence[Message]) -> None:
        for message in messages:
            place = message.topic() or "", message.partition() or 0
            known = self._known.get(place)
            if known is None:
                known = self._known[place] = _KnownRuns()
            headers = get_headers(message)
            known.learn(message.offset() or 0, own_header(headers) if headers else None)


class _KnownRuns:
    """What is known of a partition.

    Attributes:
        handed_out: Runs that were announced by records that were handed out.
        begin, end: Offsets between which all records were handed out, up to the last one, without a gap.
        since: Offset from which on all runs of these are in ``handed_out``: that of a head, or of a batch.
        fetched, fetched_offsets, doubtful: What was fetched last.
    """

    __slots__ = ("begin", "doubtful", "end", "fetched", "fetched_offsets", "handed_out", "since")

    def __init__(self) -> None:
        self.begin = self.end = 0
        self.since = _NEVER
        self.handed_out = self.fetched = _Runs()
        self.fetched_offsets = range(0)
        self.doubtful: frozenset[int] = frozenset()

    def learn(self, offset: int, value: bytes | None) -> None:
        """Note a record that is handed out, with its header."""
        if offset != self.end:
            if offset < self.end:
                self.handed_out = _Runs()  # the consumer has gone back
            self.begin, self.since = offset, _NEVER
        self.end = offset + 1
        if value is not None:
            self.handed_out.add(offset, value)
            self.since = min(self.since, offset)
        self.since = max(self.since, self.handed_out.begin)

    def take(self, seen: FetchedHeads, place: Partition, offset: int) -> None:
        """Replace what was fetched before by what was fetched for an offset.

        Raises:
            TruncatedError: It does not hold the offset.
        """
        if offset not in seen.offsets:
            raise TruncatedError(
                f"offset {offset} of {show_partition(place)} has been deleted: who wrote it cannot be known any more"
            )
        self.fetched, self.fetched_offsets, self.doubtful = _Runs(), seen.offsets, seen.doubtful
        for head, value, end in seen.heads:
            self.fetched.add(head, value, end)
        if self.begin <= offset < self.end:
            # A batch begins where it ends, and no run reaches into that.
            self.since = max(min(self.since, seen.offsets.stop), self.handed_out.begin)


class _Runs:
    """Runs of records by their offsets; beyond a bound, the older half is forgotten.

    Attributes:
        begin: Offset below which runs may have been forgotten.
    """

    __slots__ = ("_begins", "_ends", "_numbers", "_runs", "begin")

    def __init__(self) -> None:
        self._numbers = self.begin = 0
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._runs: list[tuple[Attribution, Sequence[int]]] = []

    def add(self, offset: int, value: bytes, end: int | None = None) -> None:
        """Add a run behind the others, which ends at ``end`` at the latest; any header ends the run before it.

        A single record carries a header itself.
        """
        if self._ends and self._ends[-1] > offset:
            self._ends[-1] = offset
        try:
            run = unpack_run(value)
        except InvalidRequestError:
            return  # a plain writer used the name for something else
        if run.records == 1:
            return
        self._begins.append(offset)
        self._runs.append((run, run.sequences()))
        self._ends.append(min(offset + run.records, end or offset + run.records))
        self._numbers += len(run.steps)
        if end is None and len(self._begins) > 1 and (len(self._begins) > RUNS_MAX or self._numbers > NUMBERS_MAX):
            half = len(self._begins) // 2
            self._numbers -= sum(len(old.steps) for old, _ in self._runs[:half])
            del self._begins[:half], self._ends[:half], self._runs[:half]
            self.begin = self._begins[0]

    def find(self, offset: int) -> tuple[bytes, int] | None:
        """Return the id and the local sequence of a record without a header; None if it belongs to no known run."""
        at = bisect_right(self._begins, offset) - 1
        if at < 0:
            return None
        run, sequences = self._runs[at]
        return (run.transaction, sequences[offset - self._begins[at]]) if offset < self._ends[at] else None


def seen_in(raw: bytes | memoryview, offset: int) -> FetchedHeads:
    """Return what a broker's answer for an offset tells.

    In a batch of a native transaction, as leaders write them, a record behind a gap may be one whose head is gone. A
    leader's batch begins with a head, so one that begins with another record is none.
    """
    heads: list[tuple[int, bytes, int]] = []
    doubtful: set[int] = set()
    begin: int | None = None
    end = offset
    for batch in complete_batches(raw):
        header = parse_header(batch)
        begin = header.base_offset if begin is None else begin
        end = header.base_offset + header.last_offset_delta + 1
        if header.is_control:
            continue
        next_offset = run_end = header.base_offset
        may_be_leaders, has_gap = may_lack_heads(header), False
        for record in iterate_any_records(batch):
            has_gap |= record.offset != next_offset
            next_offset = record.offset + 1
            value = own_header(record.headers)
            if value is not None:
                heads.append((record.offset, value, end))
                run_end = record.offset
                with suppress(InvalidRequestError):
                    run_end += unpack_run(value).records
            elif record.offset == header.base_offset:
                may_be_leaders = False
            elif has_gap and may_be_leaders and record.offset >= run_end:
                doubtful.add(record.offset)
    return FetchedHeads(range(offset if begin is None else begin, end), heads, frozenset(doubtful))


def may_lack_heads(header: BatchHeader) -> bool:
    """Return whether compaction may have taken heads out of a batch, and left records of their runs."""
    return header.is_transactional and header.is_compacted


def why_unknown(place: Partition, offset: int) -> str:
    """Return what is said of a record whose head compaction may have taken."""
    return (
        f"compaction has taken records before offset {offset} of {show_partition(place)} out of its batch: whether a "
        "transaction wrote it cannot be known any more"
    )


class BatchFetcher:
    """Fetch of the batches at an offset, on a connection of its own that is kept."""

    def __init__(
        self, bootstrap_servers: str, security: Mapping[str, str] | None = None, client_id: str = "rollbridge"
    ) -> None:
        self._connect = partial(Cluster, bootstrap_servers, security=security, client_id=client_id)
        self._reader: LogReader | None = None

    def __call__(self, place: Partition, offset: int) -> FetchedHeads:
        """Return what is seen from the beginning of the batch on that holds an offset.

        Raises:
            KafkaUnavailableError, NotFoundError, NotAuthorizedError, CorruptDataError.
        """
        topic, number = place
        if self._reader is None or is_gone(self._reader):
            self._reader = LogReader(self._connect())
            hold(self, "_reader")
        raw = self._reader.fetch_raw(
            topic, offset, partition=number, isolation=Isolation.READ_UNCOMMITTED, max_bytes=_FETCH_BYTES
        )
        return seen_in(raw.batches, offset)

    def close(self) -> None:
        """Disconnect; the next fetch connects again."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
