"""Sessions of clients on record in ZooKeeper, and their cooperative transactions.

Several processes of one session write a cooperative transaction, and the first of them begins it. No common parent
could begin it for them (the tasks of a Spark job run before the driver is asked for anything), so they identify it by
its number in a series: number 17 of query Q. The session's record names the latest one, and is only changed at an
expected version. It also holds its outcome, so that a number that is repeated after a crash is found done, or is done
again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Annotated, ClassVar, Final

from xxhash import xxh64_hexdigest

from rollbridge.base.ids import TransactionId, parse_number
from rollbridge.base.mapper import NodeRecord, StoredAs
from rollbridge.commitlog.outcomes import RETAIN_DEFAULT
from rollbridge.stream.config import MINUTE_MS
from rollbridge.stream.keyspace import HASH_SEED

FORMER_MAX: Final = 100
"""Number of earlier holders of a session that are remembered."""
SERIES_KEPT_MS: Final = 30 * 24 * 3_600_000
"""Time for which the progress of a series is remembered after its client began another one."""
SESSION_BYTES_MAX: Final = 512 * 1024
"""How large the record of a session may get by the series that it remembers: ZooKeeper takes 1 MiB."""
SERIES_BYTES: Final = 2 * 1024
"""More than a series takes there."""
_DIGESTS: Final = 1 << 64
_SIXTEEN_DIGITS: Final = StoredAs(
    write=lambda content: {"digest": f"{content.digest:016x}"}, read=lambda content: int(content["digest"], 16)
)


class CooperativeState(StrEnum):
    """State of a cooperative transaction on record; the outcome itself is on the commit log."""

    OPEN = "open"
    ENDING = "ending"
    """Its commit was asked for, and who asked did not learn the outcome."""
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class CooperativeContent:
    """Content of a cooperative transaction, independent of the order and the writers of its records.

    Attributes:
        records: Number of records.
        digest: Sum of the hashes of all records, modulo 2^64.
    """

    records: int = 0
    digest: Annotated[int, _SIXTEEN_DIGITS] = 0

    def __add__(self, other: CooperativeContent) -> CooperativeContent:
        """Return what both hold together."""
        return CooperativeContent(self.records + other.records, (self.digest + other.digest) % _DIGESTS)

    def __str__(self) -> str:
        return f"{self.records} records with digest {self.digest:016x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CooperativeWork:
    """The latest cooperative transaction of a client.

    Attributes:
        series: The series of its number.
        number: Its place in the series.
        transaction: Its id.
        epoch: Epoch of the session that began it.
        streams: ``scope/stream`` to reference epoch, as in the BEGIN frame.
        content: Content of its commit, on record before that is requested; None if the caller did not give it.
        once: True if the series is never asked for again.
    """

    series: str
    number: int
    transaction: TransactionId
    epoch: int
    streams: Mapping[str, int]
    lease_ms: int
    retain_ms: int = RETAIN_DEFAULT
    state: CooperativeState = CooperativeState.OPEN
    content: CooperativeContent | None = None
    once: bool = False

    @property
    def label(self) -> str:
        return label_of(self.series, self.number)

    def ended(self, state: CooperativeState) -> CooperativeWork:
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
    content: CooperativeContent | None


@dataclass(frozen=True, slots=True)
class SharedSession:
    """State shared by the processes of a session.

    Attributes:
        holder: Their common name for the session; empty if it belongs to one process.
        former: Earlier holders, the latest last.
        work: Their latest cooperative transaction.
        series: Progress of the other series, for :data:`SERIES_KEPT_MS`.
        forgotten: Concatenated fingerprints of older series.
        complete: True if there was no other series; older versions remembered the latest one only.
    """

    holder: str
    former: tuple[str, ...] = ()
    work: CooperativeWork | None = None
    series: tuple[FormerSeries, ...] = ()
    forgotten: str = ""
    complete: bool = False

    def taken_over(self, holder: str) -> SharedSession:
        """Return the session that follows: this one's holder cannot come back."""
        former = (*self.former, self.holder) if self.holder else self.former
        return replace(self, holder=holder, former=former[-FORMER_MAX:])

    def with_work(self, work: CooperativeWork, now_ms: int) -> SharedSession:
        """Return the same with another transaction; the one before it has ended, if it is of another series."""
        before, complete = self.work, self.complete or self.work is None
        if before is None or before.series == work.series:
            return replace(self, work=work, complete=complete)
        others = [item for item in self.series if item.series != before.series]
        committed = before.state is CooperativeState.COMMITTED
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
    """Step of a process that wants to write a number of a series."""

    BEGIN = "begin a transaction for it"
    JOIN = "write a part of the transaction that is on record"
    SKIP = "nothing: an earlier session has committed it"
    SETTLE = "see to it that the transaction on record has an outcome, and decide again"
    OVER = "refuse: this session has ended it already"
    BEHIND = "refuse: a later number has been begun"
    LOOK = "see how far this series came before the one on record"


class Distance(Enum):
    """Distance of the wanted number from the one on record."""

    SAME = "the same number"
    LATER = "a later number of the series"
    EARLIER = "an earlier number of the series"
    OTHER = "another series"


_D, _S = Distance, CooperativeState

STEPS: Final[Mapping[tuple[Distance, bool, CooperativeState], SeriesStep]] = MappingProxyType(
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
        **{(_D.EARLIER, own, state): SeriesStep.BEHIND for own in (True, False) for state in CooperativeState},
        # What is on record makes room for another series, so what became of it must be known for good.
        **{(_D.OTHER, own, state): SeriesStep.SETTLE for own in (True, False) for state in (_S.OPEN, _S.ENDING)},
        **{(_D.OTHER, own, state): SeriesStep.LOOK for own in (True, False) for state in (_S.COMMITTED, _S.ABORTED)},
    }
)
"""Next step by distance, whether this session began the transaction on record, and that one's state."""


def decide_step(known: CooperativeWork | None, *, epoch: int, series: str, number: int) -> SeriesStep:
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
    """Return the label of a cooperative transaction."""
    return f"{series}/{number}"


@dataclass(frozen=True, slots=True)
class ClientSession(NodeRecord):
    """The newest session of a client name in a group; it refuses what older ones still send.

    ``shared`` is what the processes that share it agree on; None if none of the client's sessions was ever shared.
    ``renews`` says that who has the session looks at the record again before it begins anything after a long time, so
    that the record may be removed early. ``process`` is the host and the process that began it, for whom it fences.
    """

    SCHEMA: ClassVar = "client_session"

    client_name: str
    epoch: int
    registered_ms: int
    shared: SharedSession | None = None
    renews: bool = False
    process: str = ""

    @property
    def work(self) -> CooperativeWork | None:
        """The client's latest cooperative transaction."""
        return None if self.shared is None else self.shared.work

    @property
    def holder(self) -> str:
        """Return the name that its processes share; empty if it belongs to one process."""
        return "" if self.shared is None else self.shared.holder

    @property
    def has_series(self) -> bool:
        """Return whether it names finished series, such as labels of jobs, which must not be written again."""
        return self.shared is not None and bool(self.shared.series or self.shared.forgotten)

    def is_former(self, holder: str) -> bool:
        """Return whether an earlier session had this holder."""
        return self.shared is not None and holder in self.shared.former

    def with_work(self, work: CooperativeWork, now_ms: int) -> ClientSession:
        """Return the same session with another cooperative transaction."""
        shared = self.shared or SharedSession("")
        return replace(self, registered_ms=now_ms, shared=shared.with_work(work, now_ms))


def next_session(
    before: ClientSession | None, client_name: str, holder: str, now_ms: int, floor: int = 0, process: str = ""
) -> ClientSession:
    """Return the session that follows one; its epoch is above the floor, and at least the minutes since 1970.

    So epochs rise also where the record of an old session has been removed, whose epoch the floor is not below.
    Releases before 0.3.0 know the minutes only, so floors stay behind these.
    """
    epoch = max(0 if before is None else before.epoch + 1, floor + 1, now_ms // MINUTE_MS)
    known = None if before is None else before.shared
    shared = (known or SharedSession("")).taken_over(holder) if known or holder else None
    return ClientSession(client_name, epoch, now_ms, shared, renews=not holder, process=process)


# Life of a session on record: when its client checks it, and when leaders may remove it.
#
# A record is only needed while a process may still use an older session of its client. Most names are used once: a
# Flink job makes one for each checkpoint and subtask. So the record of a session without open transactions, and of a
# client without remembered outcomes, is removed a day after it was last written. Its replacement is one number for the
# whole group, the *floor*, in the value of the records' parent: no session with an epoch up to the floor counts, unless
# it is on record. It is raised before any record is removed, so that
#
# - a session that begins later has an epoch above the floor, and so above that of each session whose record is gone;
# - a leader, this one or a later one, refuses transactions of a session without a record, even of an unknown one.
#
# A client that has begun nothing for long may still live. It checks its record before it begins again, twelve hours at
# most after it last did, and so keeps it for another day, or finds it gone and registers again.
#
# Releases before 0.3.0 do neither: their records do not say so, and stay for a year after they were registered, since
# their clients may use them all that time. Transactions of a client without a record have the minutes since 1970 as
# their session's epoch there; the floor stays a day behind those.


HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
RENEW_MS: Final = 12 * HOUR_MS
"""Age from which on a client looks at its record before it begins anything."""
KEPT_MS: Final = DAY_MS
"""Least age of a record that is removed: the client may look late, and clocks may be wrong by a time zone."""
KEPT_OF_OTHERS_MS: Final = 365 * DAY_MS
"""The same, since it was registered, of a client that does not look at it, and of one that names a cooperative
transaction: without the record, that could be written twice."""
EPOCH_MAX: Final = (1 << 31) - 1


_PLAIN: Final = re.compile(
    rb'\{"version": 1, "client_name": "([A-Za-z0-9._:@-]+)", "epoch": (\d{1,9}), "registered_ms": (\d{1,15}), '
    rb'"shared": null(, "renews": true)?\}'
)
"""The record of a session that was never shared, as we write it."""


def read_session(raw: bytes) -> ClientSession:
    """Return the session in a record, as :meth:`ClientSession.from_json` does; most take a tenth of the time here.

    Raises:
        NewerFormatError, CorruptDataError: as that.
    """
    plain = _PLAIN.fullmatch(raw)
    if plain is None:
        return ClientSession.from_json(raw)
    name, epoch, registered_ms, renews = plain.groups()
    return ClientSession(name.decode(), int(epoch), int(registered_ms), None, renews is not None)


def floor_of(raw: bytes) -> int:
    """Return the floor in the value of the records' parent; 0 if nothing was removed yet, or it cannot be read.

    Who begins a session goes by the minutes then, which floors are behind; a leader sets it right.
    """
    return parse_number(raw, EPOCH_MAX) or 0


def is_damaged(raw: bytes) -> bool:
    """Return True if the value of the records' parent is no floor."""
    return bool(raw) and parse_number(raw, EPOCH_MAX) is None


def highest_floor(now_ms: int, kept_ms: int = KEPT_MS) -> int:
    """Return the highest floor that there may be at this time, by the lowest clock."""
    return max((now_ms - kept_ms) // MINUTE_MS, 0)


def may_go(session: ClientSession, written_ms: int, now_ms: int, kept_ms: int = KEPT_MS) -> bool:
    """Return True if a record may be removed, provided that nothing of its client is open or remembered.

    Args:
        session: The record.
        written_ms: When it was last written, by ZooKeeper's clock, ms since 1970.
        now_ms: By the lowest clock.
        kept_ms: Least age of a record whose client looks at it.
    """
    if session.has_series:
        return False
    if not session.renews or session.shared is not None:
        return session.registered_ms + KEPT_OF_OTHERS_MS < now_ms
    return max(written_ms, session.registered_ms) + kept_ms < now_ms and session.epoch <= highest_floor(now_ms, kept_ms)
