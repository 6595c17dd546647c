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

That a record belongs to no run is only known from the first head on that was handed out, or where a batch was fetched;
and, once the consumer has gone on elsewhere, only up to where it has come since then.

Source: Kafka's ``Fetcher``, which skips the records of a batch before the offset that was asked for.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Final

from confluent_kafka import Message

from rollbridge.errors import InvalidRequestError
from rollbridge.kafka.batches import complete_batches, parse_header
from rollbridge.kafka.clients import get_headers
from rollbridge.kafka.committed import iterate_any_records
from rollbridge.kafka.fetch import LogReader
from rollbridge.kafka.metadata import Cluster, Isolation
from rollbridge.model.attribution import Attribution, own_header, unpack_run
from rollbridge.model.names import Partition

RUNS_MAX: Final = 4_096
"""Runs of a partition beyond which the older half is forgotten; whoever asks for them then has them fetched."""
NUMBERS_MAX: Final = 1_000_000
"""The same for single numbers of runs with gaps: a stranger's header may have a million."""
_FETCH_BYTES: Final = 256 * 1024

Heads = tuple[range, Iterable[tuple[int, bytes]]]
"""Offsets that were looked through, and those of the heads among them, with their headers."""


class Writers:
    """What is known of who wrote the records of some partitions. Thread-safe."""

    def __init__(self, fetch: Callable[[Partition, int], Heads]) -> None:
        """Know nothing.

        Args:
            fetch: Looks through what a broker returns for an offset, from the beginning of its batch on.
        """
        self._fetch = fetch
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._known: dict[Partition, _KnownRuns] = {}
        self._latest: Sequence[Message] = ()
        self._is_asked = self._has_moved = False

    def handed_out(self, messages: Sequence[Message]) -> None:
        """Note messages as a consumer hands them out, in order."""
        if not self._is_asked:
            self._latest = messages
            return
        with self._lock:
            self._latest = messages
            self._learn(messages)

    def moved(self, place: Partition) -> None:
        """Note that the consumer goes on elsewhere in a partition."""
        with self._lock:
            self._has_moved |= bool(self._latest)
            if not self._is_asked:
                self._latest = ()
            elif (known := self._known.get(place)) is not None:
                known.since, known.end = None, 0

    def find(self, place: Partition, offset: int) -> tuple[bytes, int] | None:
        """Return the id of the transaction that wrote a record without a header, and its local sequence; None if none.

        Raises:
            KafkaUnavailableError, NotFoundError: it would have to be looked up, and cannot be.
        """
        if self._process != os.getpid():  # in a child, another thread of the parent may have held the lock at the fork
            self._lock, self._process = threading.RLock(), os.getpid()
        with self._lock:
            if not self._is_asked:
                self._is_asked = True
                self._learn(self._latest)
            known = self._known.setdefault(place, _KnownRuns())
            found = known.find(offset)
            is_handed_out = offset < known.end or not self._has_moved
            if found is not None or offset in known.looked or (is_handed_out and known.is_since(offset)):
                return found
            looked, heads = self._fetch(place, offset)
            for head, value in heads:
                known.add(head, value)
            known.looked = looked
            if known.since is None and any(map(_is_at(place, offset), self._latest)):
                known.since = offset
            return known.find(offset)

    def _learn(self, messages: Sequence[Message]) -> None:
        for message in messages:
            headers = get_headers(message)
            if not headers or (value := own_header(headers)) is None:
                continue
            place, offset = (message.topic() or "", message.partition() or 0), message.offset() or 0
            known = self._known.setdefault(place, _KnownRuns())
            known.add(offset, value)
            if known.since is None:
                known.since = offset
        if self._has_moved:
            for message in messages:
                place = message.topic() or "", message.partition() or 0
                self._known.setdefault(place, _KnownRuns()).end = (message.offset() or 0) + 1


class _KnownRuns:
    """What is known of a partition.

    Attributes:
        since: Offset from which on all heads have been learned, of what was handed out; None if of nothing.
        end: Offset behind what was handed out since the consumer has gone on elsewhere.
        looked: Offsets that were looked through at last.
    """

    __slots__ = ("_begins", "_numbers", "_runs", "end", "looked", "since")

    def __init__(self) -> None:
        self._numbers = 0
        self._begins: list[int] = []
        self._runs: list[tuple[Attribution, Sequence[int]]] = []
        self.since: int | None = None
        self.end = 0
        self.looked = range(0)

    def add(self, offset: int, value: bytes) -> None:
        """Add the run that begins at an offset, unless it is of one record, which carries a header itself."""
        try:
            run = unpack_run(value)
        except InvalidRequestError:
            return  # a plain writer used the name for something else
        if run.records == 1:
            return
        at = bisect_right(self._begins, offset)
        if at and self._begins[at - 1] == offset:
            return
        self._begins.insert(at, offset)
        self._runs.insert(at, (run, run.sequences()))
        self._numbers += len(run.steps)
        if len(self._begins) > 1 and (len(self._begins) > RUNS_MAX or self._numbers > NUMBERS_MAX):
            half = len(self._begins) // 2
            self._numbers -= sum(len(old.steps) for old, _ in self._runs[:half])
            del self._begins[:half], self._runs[:half]
            self.looked = range(0)
            if self.since is not None:
                self.since = max(self.since, self._begins[0])

    def find(self, offset: int) -> tuple[bytes, int] | None:
        """Return the id and the local sequence of a record without a header; None if it belongs to no known run."""
        at = bisect_right(self._begins, offset) - 1
        if at < 0:
            return None
        run, sequences = self._runs[at]
        place = offset - self._begins[at]
        return (run.transaction, sequences[place]) if place < run.records else None

    def is_since(self, offset: int) -> bool:
        """Return whether a record that was handed out, and belongs to no known run, belongs to none."""
        return self.since is not None and offset >= self.since


def _is_at(place: Partition, offset: int) -> Callable[[Message], bool]:
    def tells(message: Message) -> bool:
        return message.offset() == offset and (message.topic(), message.partition()) == place

    return tells


def fetching(
    bootstrap_servers: str, security: Mapping[str, str] | None = None, client_id: str = "rollbridge"
) -> Callable[[Partition, int], Heads]:
    """Return what looks for heads from the beginning of an offset's batch on, on connections of its own each time."""

    def fetch(place: Partition, offset: int) -> Heads:
        topic, number = place
        cluster = Cluster(bootstrap_servers, security=security, client_id=client_id)
        with closing(LogReader(cluster)) as reader:
            raw = reader.fetch_raw(
                topic, offset, partition=number, isolation=Isolation.READ_UNCOMMITTED, max_bytes=_FETCH_BYTES
            )
        heads: list[tuple[int, bytes]] = []
        begin = end = offset
        for batch in complete_batches(raw.batches):
            header = parse_header(batch)
            begin, end = min(begin, header.base_offset), header.base_offset + header.last_offset_delta + 1
            if header.is_control:
                continue
            for record in iterate_any_records(batch):
                value = own_header(record.headers)
                if value is not None:
                    heads.append((record.offset, value))
        return range(begin, end), heads

    return fetch
