"""Metrics as values: their declarations, their counts, and what is counted of a connection. Pure.

A :class:`Family` declares for exposition and docs a metric's name, its meaning and what to do about it. Counters are
plain numbers and :class:`Histogram`; a scrape makes :class:`Sample` of them. Only :mod:`rollbridge.metrics`, which
turns those into Prometheus' format, needs its client.

A name ends with its unit, and a counter's with ``_total`` (Prometheus, "Metric and label naming").

Of a connection nothing is counted for each record: transactions are counted when they end, the outcomes of many under
one lock, and writes by batches, under the lock that their sender has anyway.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple, Self

PREFIX: Final = "rollbridge"

LATENCY_BOUNDS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0
)  # fmt: skip
"""Bounds of what clients wait for, in seconds: up to the 15 minutes that a merge may take."""
REQUEST_BOUNDS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bounds of single requests, in seconds."""


class FamilyKind(StrEnum):
    """Type of a metric, as Prometheus calls it."""

    COUNTER = "counter"
    """It only grows, from 0 with each term of a leader, or each process."""
    GAUGE = "gauge"
    """It is as it is now; not a number (NaN) while that is unknown."""
    HISTOGRAM = "histogram"
    """Counts of observations up to each bound, their number and their sum."""
    SUMMARY = "summary"
    """The number of them and their sum."""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric that is exposed.

    Attributes:
        name: As it is scraped, with the unit at its end, and ``_total`` where it is a counter.
        kind: What kind of metric it is.
        about: What it means, in one sentence; Prometheus shows it as HELP.
        labels: Names of its labels, in order.
        advice: What an operator does about it; empty if nothing follows from it alone.
    """

    name: str
    kind: FamilyKind
    about: str
    labels: tuple[str, ...] = ()
    advice: str = ""


@dataclass(slots=True)
class Histogram:
    """How values were distributed. Not thread-safe.

    Attributes:
        bounds: Upper bounds of the buckets, ascending; values beyond the last are in one more.
        counts: Of each bucket alone.
        total: The sum of all values.
    """

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def note(self, value: float, times: int = 1) -> None:
        """Count a value, so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def buckets(self) -> Iterator[tuple[float, int]]:
        """Iterate over the bounds, infinity last, each with the number of values that do not exceed it."""
        below = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            below += count
            yield bound, below

    def copy(self) -> Self:
        """Return an independent copy."""
        return type(self)(self.bounds, list(self.counts), self.total)


class Spent(NamedTuple):
    """Number and sum: what a summary counts."""

    times: int = 0
    total: float = 0.0


class Sample(NamedTuple):
    """Value of a family for one combination of labels."""

    family: Family
    labels: tuple[str, ...]
    value: float | Histogram | Spent


class Unfinished(StrEnum):
    """How a transaction of a connection has ended that is not known to be committed."""

    ABORTED = "aborted"
    """It was aborted: by its client, by an operator, or by the leader for another reason than these."""
    EXPIRED = "expired"
    """Its lease has run out."""
    REFUSED = "refused"
    """An expectation about the stream does not hold."""
    INCOMPLETE = "incomplete"
    """Something of it could not be sent."""
    FENCED = "fenced"
    """Fenced by a newer session of its client, or by a client that resumed it."""
    UNKNOWN = "unknown"
    """This connection will not learn its outcome."""


class WriteEnd(StrEnum):
    """How a conditional write has ended."""

    WRITTEN = "written"
    REFUSED = "refused"
    """Another record is there, or its transaction id falls."""
    UNKNOWN = "unknown"
    """It may have been written."""
    FAILED = "failed"
    """Nothing was written, for another reason."""


CommitAsked = tuple[float, int, int]
"""A commit that was asked for: when, by the monotonic clock in seconds; its records; bytes written here for it."""


@dataclass(slots=True)
class SenderCounts:
    """Counters of a sender; guarded by its lock.

    Attributes:
        batches, messages, bytes: Acknowledged by brokers; a message is a frame, or a record.
        failed: Messages that were given up.
        waits, waited_s: Number of waits for buffer memory, and their total time.
    """

    batches: int = 0
    messages: int = 0
    bytes: int = 0
    failed: int = 0
    waits: int = 0
    waited_s: float = 0.0


class TransactionCounts:
    """Transactions of one connection, counted from several threads."""

    def __init__(self) -> None:
        """Start at zero."""
        self._lock = threading.Lock()
        self._begun = 0
        self._records = self._bytes = 0
        self._latency = Histogram(LATENCY_BOUNDS_S)
        self._unfinished: Counter[Unfinished] = Counter()
        self._conditional: Counter[WriteEnd] = Counter()

    def note_commits(self, asked: Iterable[CommitAsked | None], now_s: float) -> None:
        """Count commits that are known now; None for one that was asked for elsewhere, which has no latency here."""
        latency = self._latency
        bounds, counts, total = latency.bounds, latency.counts, 0.0
        with self._lock:
            for item in asked:
                if item is not None:  # written out, since each small transaction pays for a call here
                    at_s, records, size = item
                    took_s = now_s - at_s
                    counts[bisect_left(bounds, took_s)] += 1
                    total += took_s
                    self._records += records
                    self._bytes += size
            latency.total += total

    def note_unfinished(self, how: Unfinished) -> None:
        """Count a transaction that is not known to be committed, and never will be here."""
        with self._lock:
            self._unfinished[how] += 1

    def note_conditional(self, end: WriteEnd) -> None:
        with self._lock:
            self._conditional[end] += 1

    def read(
        self, under_way: int, sender: SenderCounts, retries: int, waiting_bytes: int, plain: PlainCounts
    ) -> ClientMetrics:
        """Return everything as it is now.

        Args:
            under_way: Transactions that were begun here and whose end is not counted yet.
            sender: What the sender of frames has counted.
            retries: Batches that it has sent again.
            waiting_bytes: Bytes that wait there.
            plain: What plain writers have done.
        """
        with self._lock:
            # Beginning a transaction costs nothing that way. Some may just be on their way from here to there.
            self._begun = max(self._begun, self._latency.count + self._unfinished.total() + under_way)
            return ClientMetrics(
                transactions_begun=self._begun,
                transactions_committed=self._latency.count,
                transactions_unfinished={how: self._unfinished[how] for how in Unfinished},
                commit_latency=self._latency.copy(),
                records_committed=self._records,
                bytes_committed=self._bytes,
                frames_sent=sender.messages,
                frame_bytes_sent=sender.bytes,
                batches_retried=retries + plain.retries,
                backpressure_waits=sender.waits + plain.waits,
                backpressure_waited_s=sender.waited_s + plain.waited_s,
                bytes_waiting=waiting_bytes + plain.waiting_bytes,
                plain_records_written=plain.records,
                plain_bytes_written=plain.bytes,
                plain_records_failed=plain.failed,
                conditional_writes={end: self._conditional[end] for end in WriteEnd},
            )


@dataclass(slots=True)
class PlainCounts:
    """Counters of all plain writers of a connection."""

    records: int = 0
    bytes: int = 0
    failed: int = 0
    retries: int = 0
    waits: int = 0
    waited_s: float = 0.0
    waiting_bytes: int = 0

    def add(self, counts: SenderCounts, retries: int, waiting_bytes: int) -> None:
        """Add what one sender has counted."""
        self.records += counts.messages
        self.bytes += counts.bytes
        self.failed += counts.failed
        self.retries += retries
        self.waits += counts.waits
        self.waited_s += counts.waited_s
        self.waiting_bytes += waiting_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientMetrics:
    """Counters of a connection, as plain numbers; times are in seconds.

    Attributes:
        transactions_begun: Transactions begun by this connection; resumed ones are not.
        transactions_committed: Those whose commit was asked for here and is known.
        transactions_unfinished: Those that have ended otherwise, as far as this connection is concerned.
        commit_latency: Time from asking for a commit to the known outcome.
        records_committed: Records of committed transactions, parts of other processes included.
        bytes_committed: Bytes of the frames that this connection wrote for them.
        frames_sent, frame_bytes_sent: Messages to buffers that brokers have acknowledged, and their bytes.
        batches_retried: Batches that were sent again, of frames and of plain records.
        backpressure_waits, backpressure_waited_s: Number of waits for buffer memory, and their total time.
        bytes_waiting: Bytes not yet acknowledged.
        plain_records_written, plain_bytes_written, plain_records_failed: Of all plain writers.
        conditional_writes: Runs of conditional writes, by their ends.
    """

    transactions_begun: int
    transactions_committed: int
    transactions_unfinished: Mapping[Unfinished, int]
    commit_latency: Histogram
    records_committed: int
    bytes_committed: int
    frames_sent: int
    frame_bytes_sent: int
    batches_retried: int
    backpressure_waits: int
    backpressure_waited_s: float
    bytes_waiting: int
    plain_records_written: int
    plain_bytes_written: int
    plain_records_failed: int
    conditional_writes: Mapping[WriteEnd, int] = field(default_factory=dict)


def _total(name: str, about: str, advice: str = "", label: str = "") -> Family:
    return _family(f"{name}_total", about, advice, label, FamilyKind.COUNTER)


def _family(name: str, about: str, advice: str, label: str, kind: FamilyKind) -> Family:
    labels = ("client", label) if label else ("client",)
    return Family(f"{PREFIX}_client_{name}", kind, about, labels, advice)


_OF_METRICS: Final = {
    "transactions_begun": _total("transactions_begun", "Transactions begun by the connection."),
    "transactions_committed": _total("transactions_committed", "Transactions whose commit is known."),
    "transactions_unfinished": _total(
        "transactions_unfinished",
        "Transactions that have ended otherwise, as far as the connection is concerned.",
        "the error of the call says more; `unknown`: ask with `b.outcome(ID)`",
        "reason",
    ),
    "commit_latency": _family(
        "commit_latency_seconds",
        "Time from asking for a commit to the known outcome.",
        "compare with the leader's `rollbridge_commit_latency_seconds`",
        "",
        FamilyKind.HISTOGRAM,
    ),
    "records_committed": _total("committed_records", "Records of committed transactions."),
    "bytes_committed": _total("committed_bytes", "Bytes of frames that the connection wrote for them."),
    "frames_sent": _total("sent_frames", "Messages to buffers that brokers have acknowledged."),
    "frame_bytes_sent": _total("sent_frame_bytes", "Bytes of the batches of these messages."),
    "batches_retried": _total(
        "retried_batches", "Batches that were sent again.", "brokers were away, or partitions have moved"
    ),
    "backpressure_waits": _total(
        "backpressure_waits",
        "Times that a writer had to wait for room.",
        "brokers take less than is written: raise `buffer_bytes`, or write less",
    ),
    "backpressure_waited_s": _total("backpressure_waited_seconds", "Time that writers have waited for room."),
    "bytes_waiting": _family("waiting_bytes", "Bytes that wait for brokers.", "", "", FamilyKind.GAUGE),
    "plain_records_written": _total("plain_records", "Records that plain writers have written."),
    "plain_bytes_written": _total("plain_bytes", "Bytes of the batches of these records."),
    "plain_records_failed": _total(
        "plain_failed_records", "Records that plain writers gave up.", "their futures say why"
    ),
    "conditional_writes": _total(
        "conditional_writes",
        "Conditional writes, by their ends.",
        "many `refused`: several write under one condition",
        "result",
    ),
}
FAMILIES: Final = tuple(_OF_METRICS.values())
"""All that a connection tells, each with the label ``client``."""


def client_samples(client: str, metrics: ClientMetrics) -> Iterator[Sample]:
    """Return what a connection tells as samples of :data:`FAMILIES`."""
    for name, family in _OF_METRICS.items():
        value = getattr(metrics, name)
        if isinstance(value, Mapping):
            for label, times in value.items():
                yield Sample(family, (client, label), times)
        else:
            yield Sample(family, (client,), value)
