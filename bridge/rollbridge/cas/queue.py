"""Queue of conditional writes to one segment: what goes together, whose turn it is, and what each is told.

Pure: a thread that holds :attr:`AppendQueue.lock` takes batches, has rounds carried out and settles them; any other may
only put writes. Writes keep the order in which each writer began them; where several writers of the connection contend,
they win in turn.

:class:`Contention` governs how a connection behaves on a segment on which others write, too. Whoever appends and loses
has made everybody after it wait for its abort. So after a loss it backs off for a random time and looks before it
appends: a refusal then costs one fetch, and no native transaction. The back-off grows with every loss after an append,
and shrinks with every round in which no other writer was met. A winner is a round trip ahead of those who must first
learn of its record, and would win for ever; therefore one that was refused by looking a few times in a row appends all
the same, and the winner, which meets that record, backs off as well.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final
from weakref import WeakKeyDictionary

from rollbridge.cas.machine import Committed, ConditionalAppend, Judged, NotWritten, Unclear
from rollbridge.cas.request import AppendRequest
from rollbridge.errors import (
    CasOutcomeUnknownError,
    CasWriteError,
    TransactionIdOutOfOrderError,
    UnavailableError,
)
from rollbridge.kafka.segment_tail import LineageTails
from rollbridge.model.cas import Accepted, Falling, Mates, Refused, Scope, why_moved
from rollbridge.model.ids import SegmentId
from rollbridge.model.names import Partition
from rollbridge.model.sn import DLSN

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
        mates = Mates()
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
            if places and (size + request.size > bytes_max or not mates.fits(entry)):
                break
            places[self.queue.popleft()] = len(places)
            mates.add(entry)
            size += request.size
        if not places:
            return None
        return ConditionalAppend(self.tails, list(places), mates.entries, self.waiting, alone=not self.contended)

    def settle(self, done: ConditionalAppend, took_s: float) -> list[tuple[AppendRequest, Refused]]:
        """Answer the writes of a round that are decided, and put those back that are to be tried again.

        Returns those that are refused, but may be repetitions of what refuses them: whoever settles looks for that.
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
            f"{why_moved(verdict.expected, verdict.actual, request.course)}",
            expected=verdict.expected,
            actual=verdict.actual,
        )

    def _refuse(
        self, request: AppendRequest, verdict: Refused | Falling, doubtful: list[tuple[AppendRequest, Refused]]
    ) -> None:
        """Refuse a write, unless the record that refuses it may be the same write, from an earlier attempt."""
        if isinstance(verdict, Falling):
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
            token = replace(request.token, place=DLSN.of(request.course.active, offset))
            offset += len(request.records)
            request.settle(
                CasOutcomeUnknownError(
                    f"a conditional write to {self._stream} may or may not be committed, and nobody answers: "
                    f"{result.why}; ask with outcome({str(token)!r})",
                    token=token,
                )
            )
