"""Joint transactions: several processes of one session write one, and whoever comes first begins it.

They have no common parent who could begin it for them (the tasks of a Spark job run before the driver is asked for
anything), so they agree on it by its place in a series: number 17 of query Q. The record of the client's session in
ZooKeeper names the latest one, and is only changed on the condition that nobody else has changed it meanwhile. It also
says what became of it, so that a number that comes again after a crash is found to be done, or is done anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Annotated, Final

from xxhash import xxh64_hexdigest

from rollbridge.model.ids import TransactionId
from rollbridge.model.keyspace import HASH_SEED
from rollbridge.model.mapper import StoredAs
from rollbridge.model.outcomes import RETAIN_DEFAULT

FORMER_MAX: Final = 100
"""How many earlier holders of a session are remembered."""
SERIES_KEPT_MS: Final = 30 * 24 * 3_600_000
"""How long it is remembered how far a series came, after another one of its client was begun."""
SESSION_BYTES_MAX: Final = 512 * 1024
"""How large the record of a session may get by the series that it remembers: ZooKeeper takes 1 MiB."""
SERIES_BYTES: Final = 2 * 1024
"""More than a series takes there."""
_DIGESTS: Final = 1 << 64
_SIXTEEN_DIGITS: Final = StoredAs(
    write=lambda content: {"digest": f"{content.digest:016x}"}, read=lambda content: int(content["digest"], 16)
)


class JointState(StrEnum):
    """What the record says of a joint transaction; the outcome itself is on the commit log."""

    OPEN = "open"
    ENDING = "ending"
    """Its commit was asked for, and who asked did not learn the outcome."""
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class JointContent:
    """What a joint transaction holds, whatever the order of its records, and whoever wrote which of them.

    Attributes:
        records: How many records.
        digest: Sum of the hashes of all records, modulo 2^64.
    """

    records: int = 0
    digest: Annotated[int, _SIXTEEN_DIGITS] = 0

    def __add__(self, other: JointContent) -> JointContent:
        """Return what both hold together."""
        return JointContent(self.records + other.records, (self.digest + other.digest) % _DIGESTS)

    def __str__(self) -> str:
        return f"{self.records} records with digest {self.digest:016x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JointWork:
    """The latest joint transaction of a client.

    Attributes:
        series: What its number counts in.
        number: Its place in the series.
        transaction: Its id.
        epoch: Epoch of the session that began it.
        streams: ``scope/stream`` to reference epoch, as in the BEGIN frame.
        content: What its commit names, on record before that is asked for; None if whoever asked did not say.
        once: Whether nobody will ask for this series again.
    """

    series: str
    number: int
    transaction: TransactionId
    epoch: int
    streams: Mapping[str, int]
    lease_ms: int
    retain_ms: int = RETAIN_DEFAULT
    state: JointState = JointState.OPEN
    content: JointContent | None = None
    once: bool = False

    @property
    def label(self) -> str:
        """The label of the transaction."""
        return label_of(self.series, self.number)

    def ended(self, state: JointState) -> JointWork:
        """Return the same with what became of it."""
        return replace(self, state=state)


@dataclass(frozen=True, slots=True)
class FormerSeries:
    """How far a series came that is not the one written last.

    Attributes:
        series: What the numbers count in.
        number: The latest one.
        transaction: Its transaction.
        committed: Whether that was committed; otherwise it was aborted.
        since_ms: When another series came after it, ms since 1970.
        content: What was committed, if it is known.
    """

    series: str
    number: int
    transaction: TransactionId
    committed: bool
    since_ms: int
    content: JointContent | None


@dataclass(frozen=True, slots=True)
class SharedSession:
    """What the processes that share a session agree on.

    Attributes:
        holder: What they all call the session; empty if it is one process's own.
        former: Earlier holders, the latest last.
        work: Their latest joint transaction.
        series: How far the other series came, for :data:`SERIES_KEPT_MS`.
        forgotten: What is left of those that are older: their fingerprints, one after the other.
        complete: Whether there was no other series; older versions remembered the latest one only.
    """

    holder: str
    former: tuple[str, ...] = ()
    work: JointWork | None = None
    series: tuple[FormerSeries, ...] = ()
    forgotten: str = ""
    complete: bool = False

    def taken_over(self, holder: str) -> SharedSession:
        """Return the session that follows: this one's holder cannot come back."""
        former = (*self.former, self.holder) if self.holder else self.former
        return replace(self, holder=holder, former=former[-FORMER_MAX:])

    def with_work(self, work: JointWork, now_ms: int) -> SharedSession:
        """Return the same with another transaction; the one before it has ended, if it is of another series."""
        before, complete = self.work, self.complete or self.work is None
        if before is None or before.series == work.series:
            return replace(self, work=work, complete=complete)
        others = [item for item in self.series if item.series != before.series]
        committed = before.state is JointState.COMMITTED
        if not before.once and (committed or before.number):  # of a number 0 that was aborted nothing need be known
            content = before.content if committed else None
            others.append(FormerSeries(before.series, before.number, before.transaction, committed, now_ms, content))
        horizon_ms = now_ms - SERIES_KEPT_MS
        kept = tuple(item for item in others if item.since_ms > horizon_ms)
        due = [fingerprint(item.series) for item in others if item.since_ms <= horizon_ms]
        forgotten = self.forgotten + "".join(item for item in due if not self._has(item))
        return replace(self, work=work, series=kept, forgotten=forgotten, complete=complete)

    def former_series(self, series: str) -> FormerSeries | None:
        """Return how far a series came that is not the one written last; None if that is not remembered."""
        return next((item for item in self.series if item.series == series), None)

    def has_forgotten(self, series: str) -> bool:
        """Return whether a series was remembered once."""
        return self._has(fingerprint(series))

    def _has(self, wanted: str) -> bool:
        return any(self.forgotten.startswith(wanted, at) for at in range(0, len(self.forgotten), len(wanted)))


def fingerprint(series: str) -> str:
    """Return what is remembered for good of a series: 16 hexadecimal digits."""
    return xxh64_hexdigest(series.encode(), HASH_SEED)


class SeriesStep(Enum):
    """What a process does that wants to write a number of a series."""

    BEGIN = "begin a transaction for it"
    JOIN = "write a part of the transaction that is on record"
    SKIP = "nothing: an earlier session has committed it"
    SETTLE = "see to it that the transaction on record has an outcome, and decide again"
    OVER = "refuse: this session has ended it already"
    BEHIND = "refuse: a later number has been begun"
    LOOK = "see how far this series came before the one on record"


class Distance(Enum):
    """Where the number that is wanted stands, seen from the one on record."""

    SAME = "the same number"
    LATER = "a later number of the series"
    EARLIER = "an earlier number of the series"
    OTHER = "another series"


_D, _S = Distance, JointState

STEPS: Final[Mapping[tuple[Distance, bool, JointState], SeriesStep]] = MappingProxyType(
    {
        # Of this session: its driver begins a number once it knows that the one before is committed.
        (_D.SAME, True, _S.OPEN): SeriesStep.JOIN,
        (_D.SAME, True, _S.ENDING): SeriesStep.OVER,
        (_D.SAME, True, _S.COMMITTED): SeriesStep.OVER,
        (_D.SAME, True, _S.ABORTED): SeriesStep.OVER,
        (_D.LATER, True, _S.OPEN): SeriesStep.BEGIN,
        (_D.LATER, True, _S.ENDING): SeriesStep.BEGIN,
        (_D.LATER, True, _S.COMMITTED): SeriesStep.BEGIN,
        (_D.LATER, True, _S.ABORTED): SeriesStep.BEGIN,
        # Of an earlier session, which may have died anywhere.
        (_D.SAME, False, _S.OPEN): SeriesStep.SETTLE,
        (_D.SAME, False, _S.ENDING): SeriesStep.SETTLE,
        (_D.SAME, False, _S.COMMITTED): SeriesStep.SKIP,
        (_D.SAME, False, _S.ABORTED): SeriesStep.BEGIN,
        (_D.LATER, False, _S.OPEN): SeriesStep.SETTLE,
        (_D.LATER, False, _S.ENDING): SeriesStep.SETTLE,
        (_D.LATER, False, _S.COMMITTED): SeriesStep.BEGIN,
        (_D.LATER, False, _S.ABORTED): SeriesStep.BEGIN,
        # A task that is late, or a series that was wound back.
        **{(_D.EARLIER, own, state): SeriesStep.BEHIND for own in (True, False) for state in JointState},
        # What is on record makes room for another series, so what became of it must be known for good.
        **{(_D.OTHER, own, state): SeriesStep.SETTLE for own in (True, False) for state in (_S.OPEN, _S.ENDING)},
        **{(_D.OTHER, own, state): SeriesStep.LOOK for own in (True, False) for state in (_S.COMMITTED, _S.ABORTED)},
    }
)
"""What to do, by distance, whether this session began the transaction on record, and what became of it."""


def decide_step(known: JointWork | None, *, epoch: int, series: str, number: int) -> SeriesStep:
    """Return what a process of the session with this epoch does that wants to write a number of a series."""
    if known is None:
        return SeriesStep.BEGIN
    if known.series != series:
        distance = Distance.OTHER
    elif number > known.number:
        distance = Distance.LATER
    else:
        distance = Distance.SAME if number == known.number else Distance.EARLIER
    return STEPS[distance, known.epoch == epoch, known.state]


def decide_again(former: FormerSeries, number: int) -> SeriesStep:
    """Return the same for a series that is not the one on record, but was before."""
    if number == former.number:
        return SeriesStep.SKIP if former.committed else SeriesStep.BEGIN
    return SeriesStep.BEGIN if number > former.number else SeriesStep.BEHIND


def label_of(series: str, number: int) -> str:
    """Return the label of a joint transaction."""
    return f"{series}/{number}"
