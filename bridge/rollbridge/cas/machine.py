"""One round of conditional writes, as a state machine: append, then commit if the conditions hold at that offset.

1. Append at offset o, in a native transaction, invisible. Appending before reading makes a condition hold
   against all other writers: a later writer gets a later offset.
2. Wait until every offset below o is decided, reading only what was not read before. Earlier writers never wait for
   later ones, so there is no cycle of waiters.
3. Commit if the conditions hold for what is committed below o; otherwise abort. If the records read so far already
   refute a condition, abort at once, so that later writers wait no longer than they must.

Under contention, a round reads first: a refusal then costs no native transaction. A read does not notice that the
segment was sealed, as an append does, so that is checked before a write is refused.

Writes of the same connection that wait behind a round are refused with it if the records it read refute them. They must
have been queued before the end of the log was read, so that the SN reported as the last one is not older than they are.

After a lost answer to a commit, the same transactional id is initialised again, which ends its open transaction; then
the log shows whether the record at o is there.

The machine has no input or output: :meth:`ConditionalAppend.handle` takes an event and returns the next effect, or None
at the end. :data:`MOVES` has the next step for each state and event; a missing pair cannot happen, and raises.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from rollbridge.base.effects import AnyEffect, Effect, Steps, UnderWay
from rollbridge.base.ids import SegmentId
from rollbridge.base.sn import ANY, DLSN, SN
from rollbridge.cas.request import AppendRequest
from rollbridge.errors import (
    CasOutcomeUnknownError,
    CasWriteError,
    InvalidRequestError,
    RollbridgeError,
    TransactionIdOutOfOrderError,
    UnavailableError,
)
from rollbridge.kafka.segment_tail import EndOf, LineageTails, Read, SegmentTail
from rollbridge.stream.conditions import (
    Accepted,
    ConditionalWrite,
    NonMonotonicId,
    Refused,
    RoundBuilder,
    Scope,
    Verdict,
    is_refuted,
    judge,
    place_of,
    why_moved,
)
from rollbridge.stream.names import Partition


class RoundState(Enum):
    """State of a round."""

    NEW = "new"
    """Nothing was asked for."""
    LOOKING = "looking"
    """Reading the log; nothing is appended."""
    CHECKING = "checking"
    """Refusals are due, if this is still the active segment."""
    APPENDING = "appending"
    DECIDING = "deciding"
    """Appended; reading the earlier records."""
    ABORTING = "aborting"
    JUDGING = "judging"
    """Aborted early; still reading the earlier records."""
    COMMITTING = "committing"
    RECOVERING = "recovering"
    """The answer to the commit was lost; the transactional id is initialised, which ends the transaction."""
    SEARCHING = "searching"
    """The log is read at the place of the records."""
    DONE = "done"


# Effects, besides what is to be read. Their results are events.


@dataclass(frozen=True, slots=True)
class Append(Effect["RoundEvent"]):
    """Append the round's records in a native transaction; ask for what is read ``ahead`` before."""

    ahead: Read | None


@dataclass(frozen=True, slots=True)
class End(Effect["RoundEvent"]):
    """End the native transaction. One that cannot be aborted now is when its id is next used."""

    commits: bool


@dataclass(frozen=True, slots=True)
class Recover(Effect["RoundEvent"]):
    """Initialise the transactional id."""


@dataclass(frozen=True, slots=True)
class CheckActive(Effect["RoundEvent"]):
    """See whether the segment is still the active one; answered with ``Replied(None)`` if so, or ``Sealed``."""


# Events


class Began(NamedTuple):
    """The round begins, by a look or by an append."""

    looks: bool


class Appended(NamedTuple):
    """The records are in the log, in an open native transaction."""

    offset: int


class Replied(NamedTuple):
    """Answer to what was to be read, or its fault."""

    answer: object


class Stable(NamedTuple):
    """Everything that is asked about is decided: verdicts, or the SNs that are found."""

    answer: Any


class Refuted(NamedTuple):
    """The records read so far refute the first condition."""


class Stalled(NamedTuple):
    """Something earlier stays undecided for too long."""

    why: str


class Ended(NamedTuple):
    """The native transaction is ended as it was to be, or none is open any more."""


class Sealed(NamedTuple):
    """The segment takes no more records; also the result of a round whose writes go to its successors."""


class Lost(NamedTuple):
    """An answer was lost, or the transaction coordinator's time-out has ended the native transaction."""

    why: str


class Fenced(NamedTuple):
    """Another writer has the transactional id."""

    why: str


class Failed(NamedTuple):
    """Nothing was written, and trying again is of no use; also the result of such a round."""

    fault: RollbridgeError


RoundEvent = Began | Appended | Replied | Stable | Refuted | Stalled | Ended | Sealed | Lost | Fenced | Failed
EVENTS: Final = (Began, Appended, Replied, Stable, Refuted, Stalled, Ended, Sealed, Lost, Fenced, Failed)


# Results


class Committed(NamedTuple):
    """Committed round, visible to readers; SNs per write."""

    sns: Sequence[tuple[SN, ...]]


class Judged(NamedTuple):
    """Round of which nothing is written: some writes are refused, or can never succeed; try the accepted ones again."""

    verdicts: Sequence[Verdict | InvalidRequestError]


class NotWritten(NamedTuple):
    """Round that left nothing behind and may be tried again."""

    why: str


class Unclear(NamedTuple):
    """Round whose visibility is unknown at present; ``offset`` is that of its first record."""

    offset: int
    why: str


RoundResult = Committed | Judged | NotWritten | Unclear | Sealed | Failed


@dataclass(eq=False)
class ConditionalAppend:
    """One round of writes to one segment that go together; used once.

    Attributes:
        tails: What is known of the stream's segments.
        requests: The writes.
        entries: The same writes, as the decision takes them.
        waiting: Returns the writes queued behind this round.
        alone: True if no other writer of the same connection is known to contend.
        appended: True once something was appended.
        refuted: Writes queued behind the round that are refused whatever its own outcome.
        result: How it ended.
    """

    tails: LineageTails
    requests: Sequence[AppendRequest]
    entries: Sequence[ConditionalWrite]
    waiting: Callable[[], Sequence[AppendRequest]] = tuple
    alone: bool = True

    def __post_init__(self) -> None:
        self.state = RoundState.NEW
        self.result: RoundResult | None = None
        self.refuted: dict[AppendRequest, Refused] = {}
        self.appended = False
        self.tail: SegmentTail = self.tails.active(self.requests[0].lineage)
        self.hopeless = self._is_refuted()
        """True if what was known at the beginning refuted the first condition, so that appending it is of no use."""
        self._met_before = self.tail.met
        self._offset = 0
        self._behind: Sequence[AppendRequest] = ()
        self._sns: list[tuple[SN, ...]] = []
        self._question: UnderWay[Any]

    @property
    def place(self) -> Partition:
        """Partition that the records are appended to."""
        return self.tail.place

    @property
    def met_others(self) -> bool:
        """True if others have appended since this writer last looked, whether or not they committed."""
        return self.tail.met > self._met_before

    def handle(self, event: RoundEvent) -> AnyEffect | None:
        """Take an event; return the next effect, or None once there is a result.

        Raises:
            RuntimeError: the event cannot happen in this state.
        """
        move = MOVES[self.state, type(event)]
        if move is None:
            raise RuntimeError(f"a round that is {self.state.value} cannot be told {event}")
        return move(self, event)

    # Moves

    def _begin(self, event: Began) -> AnyEffect | None:
        if not event.looks:
            return self._append()
        self._behind = self.waiting()
        return self._ask(RoundState.LOOKING, self._look())

    def _append(self) -> AnyEffect:
        # The broker tells of the marker as soon as it is there, usually before it acknowledges the append.
        alone = self.alone = self.alone and not self.waiting()
        return self._to(RoundState.APPENDING, Append(self.tail.awaited_marker if alone else None))

    def _decide(self, event: Appended) -> AnyEffect | None:
        self.appended = True
        self._offset = event.offset
        self._behind = () if self.alone else self.waiting()
        return self._ask(RoundState.DECIDING, self._verdicts(event.offset))

    def _read_on(self, event: Replied) -> AnyEffect | None:
        question, answer = self._question, event.answer
        question.refuse(answer) if isinstance(answer, Exception) else question.reply(answer)
        return self._read()

    def _choose(self, event: Stable) -> AnyEffect | None:
        if not any(isinstance(verdict, Exception) for verdict in event.answer):
            self._refute()  # with one, nothing was read
        if all(isinstance(verdict, Accepted) for verdict in event.answer):
            return self._append()
        self.result = Judged(event.answer)
        return self._to(RoundState.CHECKING, CheckActive())

    def _confirm(self, _: Replied) -> None:
        self.state = RoundState.DONE

    def _end(self, event: Stable) -> AnyEffect | None:
        self._sns = [verdict.sns for verdict in event.answer if isinstance(verdict, Accepted)]
        if len(self._sns) == len(event.answer):
            return self._to(RoundState.COMMITTING, End(commits=True))
        return self._abort(Judged(event.answer))

    def _hurry(self, _: Refuted) -> AnyEffect | None:
        return self._to(RoundState.ABORTING, End(commits=False))

    def _undo(self, event: Stalled | Sealed | Failed) -> AnyEffect | None:
        return self._abort(NotWritten(event.why) if isinstance(event, Stalled) else event)

    def _undone(self, _: RoundEvent) -> AnyEffect | None:
        if self.result is None:
            self.state = RoundState.JUDGING
            return self._question.effect  # the read that the early abort came before
        self._finish(self.result)
        return None

    def _judge(self, event: Stable) -> None:
        is_refused = not all(isinstance(verdict, Accepted) for verdict in event.answer)
        self._finish(Judged(event.answer) if is_refused else NotWritten("it was aborted too early"))

    def _write(self, _: Ended) -> None:
        keys = (record.key for request in self.requests for record in request.records)
        self.tail.wrote([sn for written in self._sns for sn in written], keys)
        if self.tail.high_watermark == self.tail.end == self._offset + sum(map(len, self._sns)):
            self._refute()
        self._finish(Committed(self._sns))

    def _recover(self, _: Lost) -> AnyEffect:
        return self._to(RoundState.RECOVERING, Recover())

    def _search(self, _: Ended | Fenced) -> AnyEffect | None:
        return self._ask(
            RoundState.SEARCHING, self.tail.find(self.requests[0].operation, self._offset, self._offset + 1)
        )

    def _find(self, event: Stable) -> None:
        self._finish(Committed(self._sns) if event.answer else NotWritten("the commit did not take effect"))

    def _doubt(self, event: Stalled | Failed) -> None:
        # That the place cannot be read says nothing about the commit.
        self._finish(Unclear(self._offset, str(event.fault) if isinstance(event, Failed) else event.why))

    def _repeat(self, event: Stalled | Lost | Fenced) -> None:
        self._finish(NotWritten(event.why))

    def _stop(self, event: Sealed | Failed) -> None:
        self._finish(event)

    # Helpers

    def _to(self, state: RoundState, effect: AnyEffect) -> AnyEffect:
        self.state = state
        return effect

    def _ask(self, state: RoundState, question: Steps[Any]) -> AnyEffect | None:
        self.state, self._question = state, UnderWay(question)
        return self._read()

    def _read(self) -> AnyEffect | None:
        try:
            need = self._question.look_ahead()
        except RollbridgeError as why:
            return self.handle(Failed(why))
        if need is None:
            return self.handle(Stable(self._question.result))
        if self.state is RoundState.DECIDING and self._is_refuted():
            return self.handle(Refuted())
        return need

    def _abort(self, result: RoundResult) -> AnyEffect:
        self.result = result
        return self._to(RoundState.ABORTING, End(commits=False))

    def _finish(self, result: RoundResult) -> None:
        self.state, self.result = RoundState.DONE, result

    # Decisions

    def _is_refuted(self) -> bool:
        """Return True if what is known refutes the first condition."""
        entry = self.entries[0]
        known = None if entry.after is not None else self.tail.known_last(entry.condition.scope_key)
        try:
            return known is not None and is_refuted(entry.condition, known, entry.lineage)
        except InvalidRequestError:
            return False

    def _look(self) -> Steps[list[Verdict | InvalidRequestError]]:
        end = yield from EndOf(self.place)
        return (yield from self._verdicts(end))

    def _verdicts(self, offset: int) -> Steps[list[Verdict | InvalidRequestError]]:
        """Decide what is to be written from ``offset`` on."""
        yield from self.tail.confirm(offset)
        faults: dict[int, InvalidRequestError] = {}
        key_lasts: dict[bytes, SN] = {}
        for number, entry in enumerate(self.entries):
            condition, lineage = entry.condition, entry.lineage
            try:
                since = place_of(condition.expected, lineage)
            except InvalidRequestError as fault:
                faults[number] = fault
                continue
            # A write without an expectation may share its key with one that has one, and must not hide the key's last
            # record.
            key = condition.scope_key
            if key is not None and entry.after is None and condition.expected != ANY:
                # With a transaction id the record itself is needed, not only whether a later one exists.
                since = None if condition.expected.transaction_id is not None else since
                key_lasts[key] = yield from self.tails.last(lineage, key, offset, since)
        if faults:
            return [faults.get(number, Accepted(())) for number in range(len(self.entries))]
        last = yield from self.tails.last(self.entries[0].lineage, None, offset)
        last_ids: dict[int, int | None] = {}
        for number, entry in enumerate(self.entries):
            if entry.checks_ids:
                last_ids[number] = yield from self.tails.last_id(entry.lineage, offset)
        verdicts: list[Verdict | InvalidRequestError] = []
        for entry, verdict in zip(self.entries, judge(self.entries, offset, last, key_lasts, last_ids), strict=True):
            key = entry.condition.scope_key
            if isinstance(verdict, Refused) and key is not None and verdict.actual.empty:
                # Only records after the expected place were read; the caller wants the SN that is actually there.
                actual = yield from self.tails.last(entry.lineage, key, offset)
                verdict = Refused(verdict.expected, actual)
            verdicts.append(verdict)
        return verdicts

    def _refute(self) -> None:
        """Record which of the writes behind this round are refused by the known records, whatever follows them.

        The end of the log must not matter: right after a leader election it may be lower than an end already reported.
        """
        for request in self._behind:
            if request in self.refuted or request.broken_chain() or request.awaited({}):
                continue
            condition = request.condition()
            actual = self.tail.known_last(condition.scope_key)
            try:
                if actual is not None and is_refuted(condition, actual, request.lineage):
                    self.refuted[request] = Refused(condition.expected, actual)
            except InvalidRequestError:
                continue  # its own round reports this


_GRID: Final = """
             Began  Appended Replied Stable Refuted Stalled Ended  Sealed Lost    Fenced Failed
new          begin  -        -       -      -       -       -      -      -       -      -
looking      -      -        read_on choose -       repeat  -      -      -       -      stop
checking     -      -        confirm -      -       -       -      stop   -       -      stop
appending    -      decide   -       -      -       -       -      undo   repeat  repeat undo
deciding     -      -        read_on end    hurry   undo    -      -      -       -      undo
aborting     -      -        -       -      -       -       undone -      undone  undone undone
judging      -      -        read_on judge  -       repeat  -      -      -       -      stop
committing   -      -        -       -      -       -       write  -      recover repeat undo
recovering   -      -        -       -      -       -       search -      -       search doubt
searching    -      -        read_on find   -       doubt   -      -      -       -      doubt
done         -      -        -       -      -       -       -      -      -       -      -
"""

MOVES: Final[
    Mapping[tuple[RoundState, type[RoundEvent]], Callable[[ConditionalAppend, Any], AnyEffect | None] | None]
] = {
    (RoundState(name), event): None if move == "-" else getattr(ConditionalAppend, f"_{move}")
    for name, *moves in map(str.split, _GRID.strip().splitlines()[1:])
    for event, move in zip(EVENTS, moves, strict=True)
}
"""Step for each state and event; None for what cannot happen."""


# Queue of conditional writes to one segment: it forms rounds, schedules them and settles writes.
#
# Pure: a thread that holds :attr:`AppendQueue.lock` takes batches, has rounds carried out and settles them; any other
# may only put writes. Writes keep the order in which each writer began them; where several writers of the connection
# contend, they win in turn.
#
# :class:`Contention` adapts a connection to other writers on a segment. An append that loses has made all later ones
# wait for its abort. So after a loss the connection backs off for a random time and reads before it appends: a refusal
# then costs one fetch, and no native transaction. The back-off grows with every loss after an append, and shrinks with
# every round without another writer. A winner is a round trip ahead of those that must first learn of its record, and
# would win for ever; therefore a connection that was refused by reading a few times in a row appends all the same, and
# the winner, which meets that record, backs off as well.


WAITING_MAX: Final = 64
"""Maximum number of writes behind a round that are considered when it is decided."""
ROUND_WRITES_MAX: Final = 2_000
_FIRST_S: Final = 0.001
_SHARE_OF_NEW: Final = 0.2
_ROUNDS_MAX: Final = 16.0
_ROUNDS_AFTER_MEETING: Final = 4.0
_ROUNDS_MIN: Final = 0.5
_LOOKS_IN_A_ROW_MAX: Final = 3


class Contention:
    """Back-off of a connection on one segment; times in seconds."""

    def __init__(self) -> None:
        self._round_s = _FIRST_S
        self._rounds = 0.0
        self._refused_looks = 0

    def pause_s(self, chance: float) -> float:
        """Return the back-off before the next round; ``chance`` is a random number in [0, 1)."""
        return self._rounds * self._round_s * chance

    def looks_first(self) -> bool:
        """Return True if the next round should look before it appends."""
        return self._rounds > 0 and self._refused_looks < _LOOKS_IN_A_ROW_MAX

    def refused_by_look(self) -> None:
        """Record that another writer was faster and nothing was appended."""
        self._refused_looks += 1

    def lost(self) -> None:
        """Record that another writer was faster and what was appended is aborted."""
        self._refused_looks = 0
        self._rounds = min(max(self._rounds * 2, 1.0), _ROUNDS_MAX)

    def won(self, took_s: float, met_others: bool) -> None:
        """Record that a round was committed after ``took_s`` seconds."""
        self._refused_looks = 0
        self._round_s += (took_s - self._round_s) * _SHARE_OF_NEW
        if met_others:
            self._rounds = max(self._rounds, _ROUNDS_AFTER_MEETING)
        else:
            self._rounds = self._rounds / 2 if self._rounds > _ROUNDS_MIN else 0.0


class AppendQueue:
    """Queue of conditional writes to one segment. Any thread may call :meth:`put`; all else needs ``lock``."""

    def __init__(self, stream: str, segment: SegmentId, place: Callable[[SegmentId], Partition]) -> None:
        """Begin empty; ``place`` says which partition a segment is."""
        self.segment: Final = segment
        self.tails: Final = LineageTails(place)
        self.queue: deque[AppendRequest] = deque()
        self.lock = threading.Lock()
        self.came = threading.Event()
        """Set when the writer whose turn it is has put a write."""
        self.contention = Contention()
        self.scheduled = False
        self._stream = stream
        self._wins = itertools.count(1)
        self._last_win: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._due: object = None
        self._is_mixed = False

    @property
    def contended(self) -> bool:
        """True if writers of this queue have just been refused because of each other."""
        return self._due is not None

    def put(self, request: AppendRequest, *, is_moved: bool = False) -> None:
        """Append a write to the queue; ``is_moved`` if it has waited for a sealed segment before."""
        self.queue.append(request)
        self._is_mixed |= is_moved
        if request.owner is self._due:
            self.came.set()

    def drain(self) -> list[AppendRequest]:
        """Remove all writes."""
        return [self.queue.popleft() for _ in range(len(self.queue))]

    def waiting(self) -> list[AppendRequest]:
        """Return the waiting writes, oldest first, at most ``WAITING_MAX``."""
        # By index, since other threads may append meanwhile; only the holder of the lock removes.
        return [self.queue[place] for place in range(min(len(self.queue), WAITING_MAX))]

    def take_turns(self) -> bool:
        """Move to the front a write of the contender whose last win is oldest; return False if it has none here."""
        if self._due is None:
            return True
        for request in self.waiting():
            # A write that expects another one waiting here has to stay behind it.
            if request.owner is self._due and not request.awaited({}):
                self.queue.remove(request)
                self.queue.appendleft(request)
                return True
        return False

    def take(self, bytes_max: int) -> ConditionalAppend | AppendRequest | None:
        """Take the writes that go together, oldest first, and return their round.

        Returns None if nothing waits. If the first one expects a write that waits elsewhere, that is returned instead.
        """
        if self._is_mixed:
            # What has come from a sealed segment was begun before what others put here already, which may expect it.
            self._is_mixed = False
            self.queue.extendleft(sorted(self.drain(), key=lambda request: -request.number))
        places: dict[AppendRequest, int] = {}
        round_builder = RoundBuilder()
        size = 0
        while self.queue and len(places) < ROUND_WRITES_MAX:
            request = self.queue[0]
            fault = request.broken_chain() or self.overdue(request)
            if fault is not None:
                self.queue.popleft().settle(fault)
                continue
            before = request.awaited(places)
            if before is not None:
                if places:
                    break
                return before
            entry = request.entry(places)
            if places and (size + request.size > bytes_max or not round_builder.fits(entry)):
                break
            places[self.queue.popleft()] = len(places)
            round_builder.add(entry)
            size += request.size
        if not places:
            return None
        return ConditionalAppend(
            self.tails, list(places), round_builder.entries, self.waiting, alone=not self.contended
        )

    def settle(self, done: ConditionalAppend, took_s: float) -> list[tuple[AppendRequest, Refused]]:
        """Settle the decided writes of a round, and requeue those that are to be tried again.

        Returns refused writes that may be repetitions of the record that refuses them: the caller searches for it.
        """
        doubtful: list[tuple[AppendRequest, Refused]] = []
        for request in self._take_out(done.refuted):
            self._refuse(request, done.refuted[request], doubtful)
        result, again = done.result, list[AppendRequest]()
        match result:
            case Committed():
                self.contention.won(took_s, done.met_others)
                self._last_win[done.requests[-1].owner] = next(self._wins)
                for request, sns in zip(done.requests, result.sns, strict=True):
                    request.settle(sns)
            case Judged():
                if done.appended:
                    self.contention.lost()
                elif not done.hopeless:
                    self.contention.refused_by_look()
                for request, verdict in zip(done.requests, result.verdicts, strict=True):
                    if isinstance(verdict, Accepted):
                        again.append(request)
                    elif isinstance(verdict, Exception):
                        request.settle(verdict)
                    else:
                        self._refuse(request, verdict, doubtful)
            case NotWritten():
                for request in done.requests:
                    request.last_try = result.why
                    again.append(request)
            case Unclear():
                self._tell_unclear(done.requests, result)
            case _:
                raise RuntimeError(f"{result} is not for the queue to settle")
        self.queue.extendleft(reversed(again))
        return doubtful

    def overdue(self, request: AppendRequest) -> UnavailableError | None:
        """Return the error of a write whose time is over, with what its last try waited for; None if it has time."""
        if not request.deadline.passed():
            return None
        why = f": {request.last_try}" if request.last_try else ""
        return UnavailableError(f"the conditional write to {self._stream} took too long{why}; nothing was written")

    def refusal(self, request: AppendRequest, verdict: Refused) -> CasWriteError:
        """Return the error of a write that is refused."""
        what = "the segment's last record" if request.scope is Scope.SEGMENT else "the last record with this key"
        return CasWriteError(
            f"525: expected {verdict.expected} in {self._stream}, but {what} is {verdict.actual}; nothing was written"
            f"{why_moved(verdict.expected, verdict.actual, request.lineage)}",
            expected=verdict.expected,
            actual=verdict.actual,
        )

    def _refuse(
        self, request: AppendRequest, verdict: Refused | NonMonotonicId, doubtful: list[tuple[AppendRequest, Refused]]
    ) -> None:
        """Refuse a write, unless the record that refuses it may be the same write, from an earlier attempt."""
        if isinstance(verdict, NonMonotonicId):
            fault = (
                f"transaction id {verdict.transaction_id} is lower than {verdict.last}, the last one in its part of "
                f"{self._stream}; nothing was written"
            )
            request.settle(
                TransactionIdOutOfOrderError(fault, transaction_id=verdict.transaction_id, last=verdict.last)
            )
        elif request.repeatable:
            doubtful.append((request, verdict))
        else:
            request.settle(self.refusal(request, verdict))

    def _take_out(self, refuted: Iterable[AppendRequest]) -> list[AppendRequest]:
        """Remove writes that are refused without a round of their own; the writer whose last win is oldest comes first.

        The next round also waits for that writer for a moment, since the winner, who has its answer at the same time,
        would otherwise be first again and again.
        """
        order = sorted(refuted, key=lambda request: self._last_win.get(request.owner, 0))
        for request in order:
            self.queue.remove(request)
        self.came.clear()
        self._due = order[0].owner if order else None
        return order

    def _tell_unclear(self, requests: Sequence[AppendRequest], result: Unclear) -> None:
        offset = result.offset
        for request in requests:
            token = replace(request.token, place=DLSN.of(request.lineage.active, offset))
            offset += len(request.records)
            request.settle(
                CasOutcomeUnknownError(
                    f"a conditional write to {self._stream} may or may not be committed, and brokers do not answer: "
                    f"{result.why}; ask with outcome({str(token)!r})",
                    token=token,
                )
            )
