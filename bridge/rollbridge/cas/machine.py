"""One round of conditional writes, as a state machine: append, then commit if the conditions hold at that offset.

1. Append at offset o, in a native transaction, invisible. Appending before reading is what makes a condition hold
   against any other writer: whoever comes later gets a later offset.
2. Wait until every offset below o is decided, reading only what was not read before. Earlier writers never wait for
   later ones, so there is no cycle of waiters.
3. Commit if the conditions hold for what is committed below o; otherwise abort. If what was read so far already refutes
   a condition, abort at once, so that those who wait for this round wait no longer than they must.

Where others contend, a round looks first: a refusal then costs no native transaction. A look does not notice that the
segment was sealed, as an append does, so that is asked before anybody is refused.

Writes of the same connection that wait behind a round are refused together with it where what it read refutes them.
They must have been queued before the end of the log was read, so that the SN reported as the last one is not older than
they are.

A commit whose answer is lost is looked up: the same transactional id is initialised again, which ends whatever was open
under it, and then the log shows whether the record at o is there.

The machine has no input or output: :meth:`ConditionalAppend.handle` takes an event and returns the next effect, or None
at the end. :data:`MOVES` says for each state and event what happens; what is not there cannot happen, and raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple

from rollbridge.cas.request import AppendRequest
from rollbridge.errors import InvalidRequestError, RollbridgeError
from rollbridge.kafka.segment_tail import EndOf, LineageTails, Need, Question, Read, SegmentTail
from rollbridge.model.cas import Accepted, ConditionalWrite, Refused, Verdict, is_refuted, judge, place_of
from rollbridge.model.names import Partition
from rollbridge.model.sn import ANY, SN


class RoundState(Enum):
    """State of a round."""

    NEW = "new"
    """Nothing was asked for."""
    LOOKING = "looking"
    """What stands there is read; nothing is appended."""
    CHECKING = "checking"
    """Refusals are due, if this is still the active segment."""
    APPENDING = "appending"
    DECIDING = "deciding"
    """Appended; what stands before is read."""
    ABORTING = "aborting"
    JUDGING = "judging"
    """Aborted early; what stands before is read on."""
    COMMITTING = "committing"
    RECOVERING = "recovering"
    """The answer to the commit was lost; the transactional id is initialised, which ends the transaction."""
    SEARCHING = "searching"
    """The log is read at the place of the records."""
    DONE = "done"


# Effects, besides what is to be read


class Append(NamedTuple):
    """Append the round's records in a native transaction; ask for what is read ``ahead`` before."""

    ahead: Read | None


class End(NamedTuple):
    """End the native transaction. One that cannot be aborted now is when its id is next used."""

    commits: bool


class Recover(NamedTuple):
    """Initialise the transactional id."""


class CheckActive(NamedTuple):
    """See whether the segment is still the active one; answered with ``Replied(None)`` if so, or ``Sealed``."""


RoundEffect = Need | Append | End | Recover | CheckActive


# Events


class Began(NamedTuple):
    """The round begins, by a look or by an append."""

    looks: bool


class Appended(NamedTuple):
    """The records stand there, in an open native transaction."""

    offset: int


class Replied(NamedTuple):
    """Answer to what was to be read, or its fault."""

    answer: object


class Stable(NamedTuple):
    """Everything that is asked about is decided: verdicts, or the SNs that are found."""

    answer: Any


class Refuted(NamedTuple):
    """What was read so far refutes the first condition already."""


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
    """Round of which nobody can tell at present whether it is visible; ``offset`` is that of its first record."""

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
        self.tail: SegmentTail = self.tails.active(self.requests[0].course)
        self.hopeless = self._is_refuted()
        """True if what was known at the beginning refuted the first condition, so that appending it is of no use."""
        self._met_before = self.tail.met
        self._offset = 0
        self._behind: Sequence[AppendRequest] = ()
        self._sns: list[tuple[SN, ...]] = []
        self._question: Question[Any] = self._look()
        self._need: Need = EndOf(self.place)
        """What is read on after an early abort."""

    @property
    def place(self) -> Partition:
        """Partition that the records are appended to."""
        return self.tail.place

    @property
    def met_others(self) -> bool:
        """True if others have appended since this writer last looked, whether or not they committed."""
        return self.tail.met > self._met_before

    def handle(self, event: RoundEvent) -> RoundEffect | None:
        """Take an event; return the next effect, or None once there is a result.

        Raises:
            RuntimeError: the event cannot happen in this state.
        """
        move = MOVES[self.state, type(event)]
        if move is None:
            raise RuntimeError(f"a round that is {self.state.value} cannot be told {event}")
        return move(self, event)

    # Moves

    def _begin(self, event: Began) -> RoundEffect | None:
        if not event.looks:
            return self._append()
        self._behind = self.waiting()
        return self._ask(RoundState.LOOKING, self._look())

    def _append(self) -> RoundEffect:
        # The broker tells of the marker as soon as it is there, usually before it acknowledges the append.
        alone = self.alone = self.alone and not self.waiting()
        return self._to(RoundState.APPENDING, Append(self.tail.awaited_marker if alone else None))

    def _decide(self, event: Appended) -> RoundEffect | None:
        self.appended = True
        self._offset = event.offset
        self._behind = () if self.alone else self.waiting()
        return self._ask(RoundState.DECIDING, self._verdicts(event.offset))

    def _read_on(self, event: Replied) -> RoundEffect | None:
        answer = event.answer
        try:
            question = self._question
            need = question.throw(answer) if isinstance(answer, Exception) else question.send(answer)
        except StopIteration as done:
            return self.handle(Stable(done.value))
        except RollbridgeError as why:
            return self.handle(Failed(why))
        if self.state is RoundState.DECIDING and self._is_refuted():
            self._need = need
            return self.handle(Refuted())
        return need

    def _choose(self, event: Stable) -> RoundEffect | None:
        if not any(isinstance(verdict, Exception) for verdict in event.answer):
            self._refute()  # with one, nothing was read
        if all(isinstance(verdict, Accepted) for verdict in event.answer):
            return self._append()
        self.result = Judged(event.answer)
        return self._to(RoundState.CHECKING, CheckActive())

    def _confirm(self, _: Replied) -> None:
        self.state = RoundState.DONE

    def _end(self, event: Stable) -> RoundEffect | None:
        self._sns = [verdict.sns for verdict in event.answer if isinstance(verdict, Accepted)]
        if len(self._sns) == len(event.answer):
            return self._to(RoundState.COMMITTING, End(commits=True))
        return self._abort(Judged(event.answer))

    def _hurry(self, _: Refuted) -> RoundEffect | None:
        return self._to(RoundState.ABORTING, End(commits=False))

    def _undo(self, event: Stalled | Sealed | Failed) -> RoundEffect | None:
        return self._abort(NotWritten(event.why) if isinstance(event, Stalled) else event)

    def _undone(self, _: RoundEvent) -> RoundEffect | None:
        if self.result is None:
            return self._to(RoundState.JUDGING, self._need)
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

    def _recover(self, _: Lost) -> RoundEffect:
        return self._to(RoundState.RECOVERING, Recover())

    def _search(self, _: Ended | Fenced) -> RoundEffect | None:
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

    def _to(self, state: RoundState, effect: RoundEffect) -> RoundEffect:
        self.state = state
        return effect

    def _ask(self, state: RoundState, question: Question[Any]) -> RoundEffect | None:
        self.state, self._question = state, question
        return self._read_on(Replied(None))

    def _abort(self, result: RoundResult) -> RoundEffect:
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
            return known is not None and is_refuted(entry.condition, known, entry.course)
        except InvalidRequestError:
            return False

    def _look(self) -> Question[list[Verdict | InvalidRequestError]]:
        end: int = yield EndOf(self.place)
        return (yield from self._verdicts(end))

    def _verdicts(self, offset: int) -> Question[list[Verdict | InvalidRequestError]]:
        """Decide what is to be written from ``offset`` on."""
        yield from self.tail.confirm(offset)
        faults: dict[int, InvalidRequestError] = {}
        key_lasts: dict[bytes, SN] = {}
        for number, entry in enumerate(self.entries):
            condition, course = entry.condition, entry.course
            try:
                since = place_of(condition.expected, course)
            except InvalidRequestError as fault:
                faults[number] = fault
                continue
            # A write without an expectation may share its key with one that has one, and must not hide the key's last
            # record.
            key = condition.scope_key
            if key is not None and entry.after is None and condition.expected != ANY:
                # With a transaction id the record itself is needed, not only whether a later one exists.
                since = None if condition.expected.transaction_id is not None else since
                key_lasts[key] = yield from self.tails.last(course, key, offset, since)
        if faults:
            return [faults.get(number, Accepted(())) for number in range(len(self.entries))]
        last = yield from self.tails.last(self.entries[0].course, None, offset)
        last_ids: dict[int, int | None] = {}
        for number, entry in enumerate(self.entries):
            if entry.checks_ids:
                last_ids[number] = yield from self.tails.last_id(entry.course, offset)
        verdicts: list[Verdict | InvalidRequestError] = []
        for entry, verdict in zip(self.entries, judge(self.entries, offset, last, key_lasts, last_ids), strict=True):
            key = entry.condition.scope_key
            if isinstance(verdict, Refused) and key is not None and verdict.actual.empty:
                # Only what stands after the expected place was read; the caller wants the SN that is actually there.
                actual = yield from self.tails.last(entry.course, key, offset)
                verdict = Refused(verdict.expected, actual)
            verdicts.append(verdict)
        return verdicts

    def _refute(self) -> None:
        """Record which of the writes behind this round are refused by what is known, whatever stands beyond that.

        Nothing depends on where the log seemed to end: right after a leader election that may be less than what
        somebody has already seen.
        """
        for request in self._behind:
            if request in self.refuted or request.broken_chain() or request.awaited({}):
                continue
            condition = request.condition()
            actual = self.tail.known_last(condition.scope_key)
            try:
                if actual is not None and is_refuted(condition, actual, request.course):
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
    Mapping[tuple[RoundState, type[RoundEvent]], Callable[[ConditionalAppend, Any], RoundEffect | None] | None]
] = {
    (RoundState(name), event): None if move == "-" else getattr(ConditionalAppend, f"_{move}")
    for name, *moves in map(str.split, _GRID.strip().splitlines()[1:])
    for event, move in zip(EVENTS, moves, strict=True)
}
"""What happens in each state at each event; None for what cannot happen."""
