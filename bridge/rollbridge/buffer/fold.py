"""Fold the transaction buffers: frames in, open and decided transactions out.

The fold is deterministic and does no I/O: the same frames in the same order per partition give the same transactions,
however the sequence is split or repeated, because each partition's position is remembered and older offsets are
ignored. The caller decides what happens next: a leader, a standby or a preview.

The table :data:`rollbridge.buffer.table.DECISIONS` decides the effect of a frame. The fold classifies a frame by kind,
place and sender (:class:`~rollbridge.buffer.table.Event`), and carries out the table's decision. The memory of a
transaction has a price (:mod:`rollbridge.buffer.state`), and limits hold while folding: transactions that take too much
are refused, which is an event like any other.

A fold has one owner and one thread; nothing in it is locked.

Source: DistributedLog transactions (readers buffer pending records until the commit record); PDP-24 (a commit is first
marked, so that waiting transactions can be collected).

Tour of a commit, stop 4 of 8: see docs/tour.md.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from sys import intern
from typing import Final, NamedTuple

from rollbridge.base.errors import CorruptDataError
from rollbridge.base.ids import BEGUN_TWICE, OWNER_PART
from rollbridge.base.options import GIB, MIB
from rollbridge.buffer import joins
from rollbridge.buffer.frames import (
    ANYBODY,
    VERSION,
    BeginFrame,
    FrameHeader,
    FrameKind,
    decode_abort,
    decode_begin,
    decode_extend,
    decode_manifest,
    newer_version,
    piece_key,
    unpack_bundle,
    unpack_header,
)
from rollbridge.buffer.owners import CLIENTS_MAX, OWNERS_MAX, Fences
from rollbridge.buffer.replay import OngoingTransaction
from rollbridge.buffer.savepoints import HeldSavepoint, decode_savepoint
from rollbridge.buffer.state import (
    CACHED_PRICE,
    FRAME_PRICE,
    LATE_PLACE_PRICE,
    NO_FRAMES,
    OWNER_PRICE,
    PIECE_PRICE,
    Ages,
    BufferedTransaction,
    FrameRef,
    LateBegin,
    begin_price,
    late_price,
    manifest_price,
    savepoint_price,
    text_price,
)
from rollbridge.buffer.table import DECISIONS, AbortCause, Chronicle, Event, Move, Rejection, Row, State, Stay, decide
from rollbridge.commitlog.commit_order import CommitLines, CommitOrder, LineKey
from rollbridge.commitlog.control import (
    EXPIRED,
    FENCED,
    FORSAKEN,
    FRAMES_HARMLESS,
    OVERTAKEN,
    long_lease_reason,
    resumed_reason,
    scattered_reason,
)
from rollbridge.commitlog.outcomes import EndedIds
from rollbridge.stream.names import Partition

# Looking a member up in its enum takes longer, in CPython 3.11, than all else that the table costs a DATA frame.
_DATA: Final = Event.DATA
_BEGIN: Final = Event.BEGIN
_COMMIT: Final = Event.COMMIT
_MERGED: Final = Event.MERGED
_TAKEN: Final = Stay.TAKEN
_UNKNOWN: Final = State.UNKNOWN
_OPEN: Final = State.OPEN
_COMMITTING: Final = State.COMMITTING
_ENDED: Final = State.ENDED
_DATA_FRAME: Final = FrameKind.DATA
_BEGIN_FRAME: Final = FrameKind.BEGIN
_COMMIT_FRAME: Final = FrameKind.COMMIT
_ABORT_FRAME: Final = FrameKind.ABORT
_EXTEND_FRAME: Final = FrameKind.EXTEND
_SAVEPOINT_FRAME: Final = FrameKind.SAVEPOINT
_BUNDLE: Final = FrameKind.BUNDLE
_LIMIT: Final = AbortCause.LIMIT

TOMBSTONES_MAX: Final = 100_000
"""Transactions that have ended and whose ids are kept, so that no BEGIN frame that is read later opens them again."""
TOLD_LESS: Final = (
    "it was resumed by an owner that does not know of a stream that joined it just before, and whose records its last "
    "savepoint counts"
)
"""Reason of an ABORT record: two owners were at work at the same time."""
_ROOM_TO_BEGIN: Final = 0.75
"""Share of the memory up to which transactions may begin; more is for those that are open, to grow."""
_ROOM_TO_GROW: Final = 0.875
"""Share up to which they grow; beyond it, the largest are aborted until :data:`_ROOM_LEFT` is not exceeded any more."""
_ROOM_LEFT: Final = 0.8125
_ROOM_TO_REFUSE: Final = 0.125
"""Share for refused transactions, until they are logged as aborted.

If even that is full, which takes a takeover or thousands at once, a transaction is dropped like a foreign frame: its
records cannot be committed.
"""


def crowded_reason(bytes_max: int) -> str:
    """Return the reason of an ABORT record whose transaction found no room in its group."""
    return f"the open transactions of the group take too much of {bytes_max} bytes of memory, held_bytes_max"


def largest_reason(bytes_max: int) -> str:
    """Return the reason for one that took the most when others needed room."""
    return f"{crowded_reason(bytes_max)}, and this one was among the largest"


def too_large_reason(bytes_max: int) -> str:
    """Return the reason for one that is too large by itself."""
    return (
        f"what a leader has to hold of it takes more than {bytes_max} bytes of memory, held_bytes_per_transaction_max: "
        "too many frames, of too many parts and segments; write more at once, or less in one transaction"
    )


def newer_reason(version: int) -> str:
    """Return the reason for one whose client writes frames that only a newer release can read."""
    return (
        f"its client writes frames of version {version}, and its coordinator knows {VERSION}: upgrade all coordinators "
        "first"
    )


@lru_cache(maxsize=1024)
def _of_client(client: str, stream: str) -> str:
    return f"client {client}, a frame of {stream}"


@lru_cache(maxsize=1024)
def _of_stream(stream: str) -> str:
    return f"a frame of {stream}"


STRANGER_BYTES: Final = 60
"""Bytes kept of the key and of the value of a foreign message."""


class Stranger(NamedTuple):
    """A message of a buffer that is no frame: where and when it came, and how its key and value begin."""

    partition: Partition
    offset: int
    appended_ms: int
    key: bytes | None
    value: bytes | None


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """Bounds of what a fold holds."""

    cache_bytes_max: int = 256 * MIB
    """Memory that cached frames of open transactions of a group take, objects included; beyond it only positions are
    kept and frames are read again."""
    cache_bytes_per_transaction_max: int = 192 * MIB
    """The same for one transaction, so that a huge one leaves room for the small ones."""
    transaction_bytes_max: int = 16 * GIB
    """Largest transaction; a larger one is aborted."""
    open_transactions_max: int = 100_000
    """Most open transactions of a group; further ones are aborted at once."""
    held_bytes_max: int = GIB
    """Other memory that transactions of a group may take in a leader: the streams they began with, and frame positions.

    From three quarters on, further ones are aborted at once; from seven eighths on, those that take the most. See
    docs/guarantees.md#limits.
    """
    held_bytes_per_transaction_max: int = 64 * MIB
    """The same for one transaction; one that takes more is aborted."""
    lease_ms_max: int = 7 * 24 * 3600 * 1000
    """Longest lease. A transaction that asks for a longer one is refused, at its begin where the client knows the
    limit, otherwise by the leader. A lower limit counts for open transactions too whose BEGIN frames a new leader reads
    again: set it where nothing with a longer lease is open."""


class BufferFold:
    """State of one group, folded from its buffers.

    Attributes:
        limits: bounds of the memory.
        open: transactions that are open, committing or aborting, by the 16 bytes of their id.
        ages: how long they have been so.
        cached_bytes: memory of cached frames.
        held_bytes: other memory of the transactions, by its price.
        refused_bytes: the part of it of transactions that are to be logged as aborted.
        decided: decided transactions, in the order of the decisions, until :meth:`settle` removes them. Commits of one
            connection keep the order in which they were requested.
        lines: commits that are not decided yet because earlier ones of their connection have not been folded.
        positions: per buffer partition the next offset to fold.
        rejected: counts of messages that changed nothing, by reason.
        stranger: the last message that was no frame.
        fences: the newest session of each client, for refusing frames of older ones.
        appended_ms: the latest append time so far, ms since 1970; 0 before.
        now_ms: the caller's clock, set by it from time to time; 0 if commit latency is not needed.
        log_position: an offset that the commit log had reached before the next frames were folded.
        chronicle: the transactions' events, for the caller's log.
        fresh: ids of opened transactions that the caller has not checked yet; None if it does not check.
        extended: ids of transactions whose leases or streams have changed, until the caller records it.
        ended: every ended transaction; a leader has that; None elsewhere.
        late: the ``terminated`` transactions whose owners' BEGIN frames were met; None if they are not collected.
        late_streams: streams whose names in BEGIN frames ``late`` records; None: any.
        late_bytes: memory of ``late``, by its price.
        joined_late: of a leader: positions of BEGIN frames with which streams joined transactions that were already
            aborted, until it records them.
    """

    def __init__(
        self,
        limits: BufferLimits,
        check_batch: Callable[[bytes, int], str | None],
        terminated: Collection[bytes] = (),
    ) -> None:
        """Start empty.

        Args:
            limits: Bounds of the memory.
            check_batch: Returns the fault of a record batch that should hold a number of records; None without one.
            terminated: Ids whose outcome is in the commit log already; their frames are dropped.
        """
        self.limits = limits
        self._check_batch = check_batch
        self._terminated = terminated
        self._tombstones: OrderedDict[bytes, bool] = OrderedDict()
        self.open: dict[bytes, BufferedTransaction] = {}
        self.ages = Ages(self.open)
        self.decided: OrderedDict[bytes, BufferedTransaction] = OrderedDict()
        self.positions: dict[Partition, int] = {}
        self.rejected: Counter[str] = Counter()
        self.stranger: Stranger | None = None
        self.cached_bytes = 0
        self.held_bytes = self.refused_bytes = 0
        self.fences = Fences()
        self.lines: CommitLines[BufferedTransaction] = CommitLines()
        self.log_position = 0
        self.appended_ms = self.now_ms = 0
        self.fresh: list[bytes] | None = None
        self.extended: set[bytes] = set()
        self.ended: EndedIds | None = None
        self.late: dict[bytes, LateBegin] | None = None
        self.late_streams: Collection[str] | None = None
        self.late_bytes = 0
        self.joined_late: list[tuple[bytes, Partition, int]] = []
        self.chronicle = Chronicle()

    def fold(
        self, stream: str, partition: Partition, offset: int, appended_ms: int, key: bytes | None, value: bytes | None
    ) -> None:
        """Take one message of a buffer.

        Args:
            stream: scope/stream whose buffer it is.
            partition: Topic and partition it comes from.
            offset: Its offset.
            appended_ms: Its append time, ms since 1970 (the broker's clock).
            key: Kafka key.
            value: Kafka value.
        """
        positions = self.positions
        if offset < positions.get(partition, 0):
            self.rejected[Rejection.REPEATED] += 1
            return
        positions[partition] = offset + 1
        if appended_ms > self.appended_ms:
            self.appended_ms = appended_ms
        self.chronicle.at_ms = appended_ms
        header = unpack_header(key)
        if header is None or value is None:
            self._pass_over(partition, offset, appended_ms, key, value)
            return
        if header.kind is not _BUNDLE:
            self._frame(header, stream, partition, offset, 0, appended_ms, value)
            return
        try:
            frames = unpack_bundle(header, value)
        except CorruptDataError:
            self._corrupt(header, appended_ms)
            return
        for inner, start, content in frames:
            self._frame(inner, stream, partition, offset, start, appended_ms, content)

    def _pass_over(
        self, partition: Partition, offset: int, appended_ms: int, key: bytes | None, value: bytes | None
    ) -> None:
        """Count a message that is no frame of a version known here, and refuse the transaction that lacks it."""
        newer = newer_version(key)
        if newer is None:
            self.rejected[Rejection.FOREIGN] += 1
            begins = (None if content is None else content[:STRANGER_BYTES] for content in (key, value))
            self.stranger = Stranger(partition, offset, appended_ms, *begins)
            return
        self.rejected[Rejection.NEWER] += 1
        transaction, version = newer
        item = self.open.get(transaction)
        if item is not None and item.state is State.OPEN:
            self.refuse(transaction, newer_reason(version), appended_ms)

    def request_abort(self, transaction: bytes, reason: str, now_ms: int) -> bool:
        """Decide on abort for an open transaction; False if its commit is decided already.

        Raises:
            KeyError: no such transaction is open.
        """
        item = self.open[transaction]
        self._end(item, Event.ABORT, AbortCause.OPERATOR, reason, now_ms, is_unusual=True)
        return item.state is State.ABORTING

    def refuse(self, transaction: bytes, reason: str, now_ms: int, cause: AbortCause = AbortCause.OTHER) -> None:
        """Decide on abort because the transaction cannot be merged, also after its commit was asked for."""
        self._end(self.open[transaction], Event.REFUSE, cause, reason, now_ms, is_unusual=True)

    def expire(self, transaction: bytes, now_ms: int) -> None:
        """Decide that a lease has run out; changes nothing unless the transaction is still open."""
        item = self.open.get(transaction)
        if item is not None:
            self._end(item, Event.EXPIRE, AbortCause.EXPIRED, EXPIRED, now_ms, is_unusual=True)

    def forsake(self, now_ms: int, patience_ms: int) -> int:
        """Refuse held commits that wait for what will not come; return how many.

        They are those of sessions that a newer one has fenced, so that nothing more of theirs is heard, and those whose
        lease has run out and that have been held for longer than the patience.
        """
        forsaken = self._forsaken(now_ms, patience_ms)
        for item, reason in forsaken:
            self.refuse(item.id, reason, now_ms, AbortCause.FENCED if reason is FENCED else AbortCause.ORDER)
        return len(forsaken)

    def has_forsaken(self, now_ms: int, patience_ms: int) -> bool:
        """Return whether :meth:`forsake` would refuse any."""
        return bool(self._forsaken(now_ms, patience_ms))

    def _forsaken(self, now_ms: int, patience_ms: int) -> list[tuple[BufferedTransaction, str]]:
        return [
            (item, FENCED if is_fenced else FORSAKEN)
            for item in self.lines.held()
            if (is_fenced := self.fences.holds_off(item.ended_by))
            or now_ms > max(item.deadline_ms, item.decided_ms + patience_ms)
        ]

    def learn_order(self, numbers: Mapping[LineKey, int]) -> None:
        """Take note, by line, of the highest number that the commit log says was committed."""
        for key, number in numbers.items():
            self.lines.conclude(key, number)
            self._decide_due(key)

    def settle(self, transaction: bytes, *, rolled: bool = False) -> None:
        """Forget a transaction whose outcome is in the commit log, ``rolled`` if a rolling commit put it there.

        Raises:
            KeyError: no such transaction is open.
            ConflictError: its end is not decided.
        """
        item = self.open[transaction]
        before = item.state
        event = _MERGED if before is _COMMITTING else Event.ABORT_LOGGED
        row = decide(before, event, item)
        if isinstance(row, Move):
            item.state = row.to
        if rolled or self.chronicle.is_noting:
            cause = "by a rolling commit" if rolled else item.reason
            self.chronicle.changed(transaction, before, item.state, event, cause, is_unusual=rolled)
        del self.open[transaction]
        self.decided.pop(transaction, None)  # a rolling commit of an earlier leader may name some that are held here
        if item.order is not None and event is _MERGED:
            if self.lines:
                self.lines.release(item.order, item)
            self.lines.conclude(item.order.line, item.order.number)
            if self.lines:
                self._decide_due(item.order.line)
        self._let_go(item)
        self.ages.shed()
        # A BEGIN frame of it may still be unread, in another stream's buffer or doubled by a writer that is not
        # idempotent: it must not open the transaction again, which would end it a second time.
        self._bury(transaction, ended=True, aborted=event is not _MERGED)

    def restore(self, stream: str, partition: Partition, known: OngoingTransaction) -> None:
        """Put back what a partition said of an open transaction; nothing of the partition has been folded yet."""
        item = self.open.get(known.id)
        if item is None:
            item = self._open(BufferedTransaction(known.id, known.begin, known.begun_ms), begin_price(known.begin))
            item.log_position = known.log_position
            if known.lister != OWNER_PART:
                joins.guess(item, known.lister)  # what the home stream's buffer says may be older
            self.fences.raise_to(known.begin.client_name, known.begin.client_epoch)
        before_ms = item.deadline_ms
        known.restore(item, stream, partition)
        if item.deadline_ms != before_ms:
            self.ages.extend(item)
        price = item.price()
        self.held_bytes += price - item.held_bytes
        item.held_bytes = price

    def bring_back(self, transaction: bytes, begin: BeginFrame, begun_ms: int, reason: str, now_ms: int) -> None:
        """Open a transaction again of which only a record elsewhere is left, to decide that it ends as aborted."""
        item = self._open(BufferedTransaction(transaction, begin, begun_ms), begin_price(begin))
        item.log_position = self.log_position
        self.refuse(transaction, reason, now_ms)

    def caught_up(self) -> None:
        """Forget all but the latest terminated ids: what was written before the fold began has been folded."""
        for transaction in list(self._terminated)[-TOMBSTONES_MAX:]:
            self._bury(transaction)
        self._terminated = ()
        self.late = self.late_streams = None
        self.late_bytes = 0

    def discard(self, transaction: bytes) -> None:
        """Forget a transaction that turns out to have had an outcome before its BEGIN frame was folded.

        Raises:
            KeyError: no such transaction is open.
        """
        item = self.open[transaction]
        self._drop(decide(item.state, Event.OUTCOME_KNOWN, item))
        del self.open[transaction]
        self.decided.pop(transaction, None)
        if item.order is not None:
            self.lines.release(item.order, item)
        self._let_go(item)
        item.state = State.ABORTED
        self.chronicle.forget(transaction)
        self._bury(transaction, ended=True)

    def conclude(self, transaction: bytes) -> None:
        """Record an outcome from the commit log in :attr:`late` and ``terminated``.

        For followers of a leader: the state becomes that of a fold which knew the outcomes before.
        """
        item = self.open.get(transaction)
        if item is not None:
            for partition, offset in item.first_offsets.items() if self.late is not None else ():
                self.note_late(transaction, item.begin.streams, partition, offset)
            self.discard(transaction)

    def note_late(self, transaction: bytes, streams: Iterable[str], partition: Partition, offset: int) -> None:
        """Record the position of a BEGIN frame of a transaction that has an outcome; :attr:`late` is not None.

        Such a frame may name streams that do not exist.
        """
        assert self.late is not None
        known = self.late.get(transaction)
        wanted = self.late_streams
        named = tuple(streams) if wanted is None else tuple(intern(name) for name in streams if name in wanted)
        if known is None:
            known = self.late[transaction] = LateBegin(named)
            self.late_bytes += late_price(known)
        elif not set(named) <= set(known.streams):  # some have joined late
            self.late_bytes -= late_price(known)
            whole = tuple(dict.fromkeys((*known.streams, *named)))
            known = self.late[transaction] = LateBegin(whole, known.first_offsets)
            self.late_bytes += late_price(known)
        if partition not in known.first_offsets:
            known.first_offsets[partition] = offset
            self.late_bytes += LATE_PLACE_PRICE

    def forget_late(self, transaction: bytes) -> None:
        """Drop what was noted of a transaction in :attr:`late`, if anything was."""
        known = None if self.late is None else self.late.pop(transaction, None)
        if known is not None:
            self.late_bytes -= late_price(known)

    def log_floor(self) -> dict[Partition, int]:
        """Return, per partition with open transactions, where the log tells of all that began after them."""
        floor: dict[Partition, int] = {}
        for item in self.open.values():
            for partition in item.first_offsets:
                floor[partition] = min(floor.get(partition, item.log_position), item.log_position)
        return floor

    def low_water(self) -> dict[Partition, int]:
        """Return PIP-196's max read position of each partition: no undecided transaction has a frame below it."""
        low = dict(self.positions)
        for item in self.open.values():
            for partition, offset in item.first_offsets.items():
                low[partition] = min(low[partition], offset)
        return low

    def references(self) -> dict[str, int]:
        """Return, per stream of an undecided transaction, the lowest epoch to which one refers."""
        lowest: dict[str, int] = {}
        for item in self.open.values():
            for stream, epoch in item.all_streams().items():
                lowest[stream] = min(lowest.get(stream, epoch), epoch)
        return lowest

    def _state_of(self, transaction: bytes) -> State:
        if transaction in self._terminated or transaction in self._tombstones:
            return _ENDED
        return _ENDED if self.ended is not None and transaction in self.ended else _UNKNOWN

    def _drop(self, row: Row) -> None:
        if isinstance(row, Rejection):
            self.rejected[row] += 1

    def _bury(self, transaction: bytes, *, ended: bool = False, aborted: bool = False) -> None:
        if ended and self.ended is not None:
            self.ended.add(transaction)
        self._tombstones[transaction] = aborted
        if len(self._tombstones) > TOMBSTONES_MAX:
            self._tombstones.popitem(last=False)

    def _frame(
        self,
        header: FrameHeader,
        stream: str,
        partition: Partition,
        offset: int,
        start: int,
        appended_ms: int,
        value: bytes,
    ) -> None:
        transaction = self.open.get(header.transaction)
        kind = header.kind
        if transaction is None:
            if kind is not _BEGIN_FRAME and self.chronicle.is_live:
                self.chronicle.rejected(header.transaction, _UNKNOWN, f"{kind.name} of none that is open")
        elif partition not in transaction.first_offsets and stream in transaction.begin.places:
            # Its own BEGIN frame comes first, unless a client is at fault; what is needed is not truncated even then.
            transaction.first_offsets[partition] = offset
        try:
            if kind is _DATA_FRAME:
                self._data(transaction, header, stream, partition, offset, start, appended_ms, value)
            elif kind is _BEGIN_FRAME:
                if transaction is None:
                    self._begin(header, stream, partition, offset, appended_ms, value)
                else:
                    self._begin_again(transaction, header, stream, partition, offset, appended_ms, value)
            elif kind is _COMMIT_FRAME or kind is _ABORT_FRAME:
                order = header.order
                try:
                    self._hear_end(transaction, header, stream, value, appended_ms, order)
                finally:
                    if order is not None:
                        self._meet(transaction, order)
            elif kind is _EXTEND_FRAME:
                self._extend(transaction, header, stream, decode_extend(value), appended_ms)
            elif kind is _SAVEPOINT_FRAME:
                self._savepoint(transaction, header, stream, value, appended_ms)
        except CorruptDataError:
            self._corrupt(header, appended_ms)

    def _extend(
        self,
        transaction: BufferedTransaction | None,
        header: FrameHeader,
        stream: str,
        lease_ms: int,
        appended_ms: int,
    ) -> None:
        """Let a lease end later: so long after the frame as it says, at most as the limit for a lease allows."""
        if transaction is None:
            self._drop(decide(self._state_of(header.transaction), Event.EXTEND))
            return
        event = Event.EXTEND if stream == transaction.begin.home else Event.ASTRAY
        if header.part != ANYBODY and self._is_fenced(transaction, header):
            event = Event.END_OF_FORMER
        row = decide(transaction.state, event, transaction)
        if row is not Stay.TAKEN:
            self._drop(row)
            return
        deadline_ms = appended_ms + min(lease_ms, self.limits.lease_ms_max)
        if deadline_ms > transaction.deadline_ms:
            transaction.begin = replace(transaction.begin, lease_ms=deadline_ms - transaction.begun_ms)
            transaction.barrier = None
            self.ages.extend(transaction)
            self.extended.add(transaction.id)
            cause = f"its lease ends {deadline_ms - appended_ms} ms after the frame"
            state = transaction.state
            self.chronicle.changed(transaction.id, state, state, Event.EXTEND, cause, is_unusual=True)

    def _savepoint(
        self,
        transaction: BufferedTransaction | None,
        header: FrameHeader,
        stream: str,
        value: bytes,
        appended_ms: int,
    ) -> None:
        """Keep what the present owner says that counts.

        A session that a newer one has fenced is heard, unlike when it asks for an end: what is said here decides
        nothing, all of it is in the buffers, and where later leaders read it again they know of newer sessions.
        """
        if transaction is None:
            self._drop(decide(self._state_of(header.transaction), Event.SAVEPOINT))
            return
        said = decode_savepoint(value)
        event = Event.SAVEPOINT if stream == transaction.begin.home else Event.ASTRAY
        before = transaction.savepoint
        is_next = before is not None and before.part == header.part
        if header.part != transaction.owners.part:
            event = Event.END_OF_FORMER
        elif event is Event.SAVEPOINT and transaction.state is _OPEN and before is not None and is_next:
            event = Event.SAVEPOINT_AGAIN if said.number <= before.frame.number else event
        row = decide(transaction.state, event, transaction)
        if row is not _TAKEN:
            self._drop(row)
            return
        if before is not None and is_next:
            said = said.after(before.frame)
        elif not said.whole:
            raise CorruptDataError("the first savepoint of an owner does not say all that counts")
        transaction.savepoint = HeldSavepoint(header.part, said)
        self._charge(transaction, savepoint_price(transaction.savepoint) - savepoint_price(before), appended_ms)

    def _hear_end(
        self,
        transaction: BufferedTransaction | None,
        header: FrameHeader,
        stream: str,
        value: bytes,
        appended_ms: int,
        order: CommitOrder | None,
    ) -> None:
        if transaction is not None and self._is_fenced(transaction, header):
            self._drop(decide(transaction.state, Event.END_OF_FORMER, transaction))
            if self.chronicle.is_live:
                cause = f"{header.kind.name} of a former owner or an older session"
                self.chronicle.rejected(header.transaction, transaction.state, cause)
        elif header.kind is _COMMIT_FRAME:
            self._commit(transaction, header, stream, value, appended_ms, order)
        else:
            self._abort(transaction, header, stream, decode_abort(value), appended_ms)

    def _meet(self, transaction: BufferedTransaction | None, order: CommitOrder) -> None:
        """Record the number of an end, and decide on the commits that have waited for it.

        A session that is fenced is over: what it still sends releases nothing that waits for it.
        """
        if transaction is not None and self.fences.holds_off(transaction.owners.session):
            return
        self.lines.meet(order)
        if self.lines:
            self._decide_due(order.line)

    def _decide_due(self, key: LineKey) -> None:
        for item in self.lines.due(key):
            self.decided[item.id] = item

    def _is_fenced(self, transaction: BufferedTransaction, header: FrameHeader) -> bool:
        """Return whether an end is requested by a sender that does not own the transaction any more."""
        fences = self.fences
        if fences.decided_before:
            decided = fences.decided_before.get(transaction.id)
            if decided is not None:
                return header.part != decided
        owners = transaction.owners
        return header.part != owners.part or fences.holds_off(owners.session)

    def _corrupt(self, header: FrameHeader, appended_ms: int) -> None:
        """Drop a frame that cannot be read, and refuse the transaction that lacks it, if it is open."""
        transaction = self.open.get(header.transaction)
        state = self._state_of(header.transaction) if transaction is None else transaction.state
        self._drop(decide(state, Event.CORRUPT, header.transaction.hex()))
        if transaction is not None:
            self.refuse(header.transaction, f"a {header.kind.name} frame is corrupt", appended_ms)

    def _begin_again(
        self,
        transaction: BufferedTransaction,
        header: FrameHeader,
        stream: str,
        partition: Partition,
        offset: int,
        appended_ms: int,
        value: bytes,
    ) -> None:
        """Take a further BEGIN frame: in another stream's buffer, doubled, or of a new owner.

        With it a stream may join, or a new owner's list of streams arrive.
        """
        part, owners = header.part, transaction.owners
        is_resumed = part != OWNER_PART
        begin = decode_begin(value)
        is_join = header.segment > 0
        differs = transaction.lists is not None or not joins.is_same(begin.streams, transaction.begin.streams)
        if (is_join or differs) and joins.learn(transaction, part, begin, is_join=is_join):
            self._learned(transaction, appended_ms)
        event = Event.RESUME if is_resumed else Event.BEGIN
        if transaction.place_of(stream) is None:
            event = Event.ASTRAY
        elif is_resumed and header.first_count and owners.last(stream) not in (header.first_count - 1, part):
            event = Event.RESUME_OF_FORMER
        row = decide(transaction.state, event, transaction)
        if row is not Stay.TAKEN:
            self._drop(row)
            if event is Event.RESUME_OF_FORMER and stream == transaction.begin.home:
                joins.bar(transaction, part)
                self._reprice(transaction, appended_ms)
            return
        # A new owner begins it in all its buffers, even where its predecessor died before it had.
        transaction.begun_in.add(stream)
        transaction.first_offsets.setdefault(partition, offset)
        if is_join and stream != transaction.begin.home:
            joins.note_join(transaction, part, stream)
            self._reprice(transaction, appended_ms)
        if not is_resumed:
            if transaction.state is State.OPEN and not transaction.begin.is_of(begin):
                self.refuse(transaction.id, BEGUN_TWICE, appended_ms)  # whose its records are cannot be told
            elif appended_ms < transaction.begun_ms and stream == transaction.begin.home:
                transaction.begun_ms = appended_ms  # what was met before is that of a stream which joined late
                self.ages.extend(transaction)
        elif owners.is_full(stream):
            self.refuse(transaction.id, f"it was resumed more than {OWNERS_MAX} times", appended_ms, _LIMIT)
        elif owners.hand_over(stream, part, begin):
            self._charge(transaction, OWNER_PRICE, appended_ms)
            if stream == transaction.begin.home and transaction.state is State.OPEN:
                self._hand_over(transaction, part, begin, appended_ms)

    def _hand_over(self, transaction: BufferedTransaction, part: int, begin: BeginFrame, appended_ms: int) -> None:
        """Continue with the streams of a new owner; refuse a transaction of which more was promised than it knows."""
        if joins.told_less(transaction, begin):
            self.refuse(transaction.id, TOLD_LESS, appended_ms)
        elif joins.hand_over(transaction, part, begin):
            self._learned(transaction, appended_ms)

    def _learned(self, transaction: BufferedTransaction, appended_ms: int) -> None:
        """Account for streams that have joined a transaction, or are not on its list any more."""
        transaction.barrier = None
        self.extended.add(transaction.id)
        self.ages.extend(transaction)
        self._reprice(transaction, appended_ms)

    def _reprice(self, transaction: BufferedTransaction, appended_ms: int) -> None:
        if transaction.state is not State.ABORTING:
            self._charge(transaction, transaction.price() - transaction.held_bytes, appended_ms)

    def _begin(
        self, header: FrameHeader, stream: str, partition: Partition, offset: int, appended_ms: int, value: bytes
    ) -> None:
        """Open a transaction with the first of its BEGIN frames that is read."""
        state = self._state_of(header.transaction)
        ended = self.ended
        if (
            state is _UNKNOWN
            and ended is not None
            and 0 < ended.lost_ms >= appended_ms
            and ended.is_lost(header.transaction, appended_ms, decode_begin(value).client_name)
        ):
            state = _ENDED
            ended.add(header.transaction)  # so that questions about it are answered with "unknown outcome"
        is_owners = header.part == OWNER_PART
        # The buffer of a stream that joined a later owner holds no earlier frames.
        event = _BEGIN if is_owners or header.segment else Event.RESUME
        if state is _ENDED:
            self._drop(decide(state, event))
            # Only its owner's BEGIN could open it again; the frame in the buffer may be a later owner's.
            if self.late is not None and event is _BEGIN and header.transaction in self._terminated:
                self.note_late(header.transaction, decode_begin(value).streams, partition, offset)
            elif header.segment and self.ended is not None and self._tombstones.get(header.transaction):
                self.joined_late.append((header.transaction, partition, offset))
            return
        begin = decode_begin(value)
        price, room = begin_price(begin), self.limits.held_bytes_max
        is_crowded = self.held_bytes - self.refused_bytes + price > room * _ROOM_TO_BEGIN
        if stream not in begin.places:
            event = Event.ASTRAY
        elif is_crowded and event is _BEGIN and self.refused_bytes + price > room * _ROOM_TO_REFUSE:
            event = Event.CROWDED
        row = decide(state, event)
        if not isinstance(row, Move):
            self._drop(row)
            if event is Event.CROWDED:
                self._bury(header.transaction)
            return
        item = self._open(
            BufferedTransaction(
                header.transaction, begin, appended_ms, row.to, begun_in={stream}, log_position=self.log_position
            ),
            price,
        )
        item.first_offsets[partition] = offset
        if header.segment and stream != begin.home:
            joins.note_join(item, header.part, stream)
        if not is_owners:
            item.owners.hand_over(stream, header.part, begin)
            joins.guess(item, header.part)
        if item.lists is not None:
            self._reprice(item, appended_ms)
        if self.chronicle.is_noting:
            self.chronicle.changed(item.id, state, row.to, _BEGIN, _of_client(begin.client_name, stream))
        if len(self.open) - len(self.decided) > self.limits.open_transactions_max:
            self.refuse(
                item.id, f"more than {self.limits.open_transactions_max} transactions are open", appended_ms, _LIMIT
            )
        if begin.lease_ms > self.limits.lease_ms_max:
            self.refuse(item.id, long_lease_reason(begin.lease_ms, self.limits.lease_ms_max), appended_ms, _LIMIT)
        if is_crowded:
            self.refuse(item.id, crowded_reason(room), appended_ms, _LIMIT)
        if not is_owners or self.fences.epoch_of(begin.client_name) == begin.client_epoch:
            return  # its session is the newest, as it mostly is
        if self.fences.refuses(item.owners.session):
            self.refuse(item.id, FENCED, appended_ms, AbortCause.FENCED)
        elif self.fences.has_room_for(begin.client_name):
            self.fences.hear_of(item.owners.session)
        elif begin.client_epoch:
            self.refuse(item.id, f"more than {CLIENTS_MAX} client names have sessions", appended_ms, _LIMIT)

    def _open(self, item: BufferedTransaction, price: int) -> BufferedTransaction:
        self.open[item.id] = item
        self.ages.add(item)
        item.held_bytes = price
        self.held_bytes += price
        if self.fresh is not None:
            self.fresh.append(item.id)
        return item

    def _charge(self, item: BufferedTransaction, price: int, now_ms: int) -> None:
        """Count what a frame makes the fold hold, and refuse who takes too much: the transaction, or the largest."""
        item.held_bytes += price
        self.held_bytes += price
        limits = self.limits
        if item.state is State.ABORTING:
            self.refused_bytes += price
        elif item.held_bytes > limits.held_bytes_per_transaction_max:
            self.refuse(item.id, too_large_reason(limits.held_bytes_per_transaction_max), now_ms, _LIMIT)
        elif self.held_bytes - self.refused_bytes > limits.held_bytes_max * _ROOM_TO_GROW:
            self._make_room(item, now_ms)

    def _make_room(self, item: BufferedTransaction, now_ms: int) -> None:
        """Refuse the largest of those that are open, or that grow; of those that are alike the newest."""
        bound = self.limits.held_bytes_max
        growing = [other for other in self.open.values() if other.state is State.OPEN or other is item]
        for other in sorted(growing, key=lambda other: (other.held_bytes, other.begun_ms), reverse=True):
            if self.held_bytes - self.refused_bytes <= bound * _ROOM_LEFT:
                break
            self.refuse(other.id, largest_reason(bound), now_ms, _LIMIT)

    def _let_go(self, item: BufferedTransaction) -> None:
        """Release the bytes of an ended transaction: other references to it do not hold its frames."""
        self.cached_bytes -= item.cached_bytes
        self.held_bytes -= item.held_bytes
        if item.is_refused:
            self.refused_bytes -= item.held_bytes
        item.cached_bytes = item.held_bytes = 0
        item.frames = NO_FRAMES

    def _data(
        self,
        transaction: BufferedTransaction | None,
        header: FrameHeader,
        stream: str,
        partition: Partition,
        offset: int,
        start: int,
        appended_ms: int,
        value: bytes,
    ) -> None:
        if transaction is None:
            row = DECISIONS[self._state_of(header.transaction)][_DATA]
            if isinstance(row, Rejection):
                self.rejected[row] += 1
            return
        place = transaction.begin.places.get(stream)
        if place is None:
            place = transaction.place_of(stream)
        if place is None:
            self._drop(decide(transaction.state, Event.ASTRAY, transaction))
            return
        piece = piece_key((header.part, place, header.segment))
        event = _DATA
        if transaction.owners.is_former(stream, header.part):
            event = Event.DATA_OF_FORMER
        elif header.first_count <= transaction.last_count.get(piece, -1):
            event = Event.DATA_AGAIN
        row = DECISIONS[transaction.state][event]  # what decide() gives, without a call for each frame
        if row is not _TAKEN:
            self._drop(row)
            return
        fault = self._check_batch(value, header.records) if header.records else "a DATA frame without records"
        if fault is not None:
            raise CorruptDataError(fault)
        size = len(value)
        price = FRAME_PRICE if piece in transaction.last_count else FRAME_PRICE + PIECE_PRICE
        transaction.last_count[piece] = header.first_count
        transaction.bytes += size
        if place:
            transaction.note_beside(place, size)
        limits = self.limits
        if transaction.bytes > limits.transaction_bytes_max:
            self.refuse(transaction.id, f"it exceeds {limits.transaction_bytes_max} bytes", appended_ms, _LIMIT)
            return
        weight = size + CACHED_PRICE
        if (
            self.cached_bytes + weight <= limits.cache_bytes_max
            and transaction.cached_bytes + weight <= limits.cache_bytes_per_transaction_max
        ):
            self.cached_bytes += weight
            transaction.cached_bytes += weight
            transaction.frames.append_cached(
                FrameRef(partition, offset, piece, header.first_count, header.records, size, value, start)
            )
        else:
            transaction.frames.append_place(partition, offset, piece, header.first_count, header.records, size, start)
        transaction.held_bytes += price
        self.held_bytes += price
        if (
            transaction.held_bytes > limits.held_bytes_per_transaction_max
            or self.held_bytes - self.refused_bytes > limits.held_bytes_max * _ROOM_TO_GROW
        ):
            self._charge(transaction, 0, appended_ms)
        if len(transaction.frames) > FRAMES_HARMLESS and transaction.is_too_scattered():
            self.refuse(transaction.id, scattered_reason(len(transaction.frames)), appended_ms, _LIMIT)

    def _commit(
        self,
        transaction: BufferedTransaction | None,
        header: FrameHeader,
        stream: str,
        value: bytes,
        appended_ms: int,
        order: CommitOrder | None,
    ) -> None:
        if transaction is None:
            self._drop(decide(self._state_of(header.transaction), _COMMIT))
            return
        event = _COMMIT if stream == transaction.begin.home else Event.ASTRAY
        row = decide(transaction.state, event, transaction)
        if not isinstance(row, Move):
            self._drop(row)
            return
        state = row.to
        transaction.manifest = decode_manifest(value)
        price = manifest_price(transaction.manifest)
        if self.chronicle.is_noting:
            self.chronicle.changed(transaction.id, transaction.state, state, _COMMIT, _of_stream(stream))
        transaction.state = state
        transaction.barrier = None
        owners = transaction.owners
        transaction.ended_by = owners.session
        if owners.part != OWNER_PART:
            transaction.reason = resumed_reason(owners.part)
        transaction.decided_ms = appended_ms
        transaction.met_ms = self.now_ms
        self._charge(transaction, price, appended_ms)
        if transaction.state is not state:
            return
        transaction.order = order
        if order is None:
            self.decided[transaction.id] = transaction
            return
        line = self.lines.of(order)
        if self.lines:
            self._decide_due(order.line)  # those before it that its connection no longer counts on come first
        if order.number == line.floor:
            self.decided[transaction.id] = transaction
        elif order.number > line.floor:
            self.lines.hold(order, transaction)
        elif transaction.id in self.fences.decided_before:
            self.decided[transaction.id] = transaction
        else:
            self.refuse(transaction.id, OVERTAKEN, appended_ms, AbortCause.ORDER)

    def _abort(
        self,
        transaction: BufferedTransaction | None,
        header: FrameHeader,
        stream: str,
        reason: str,
        appended_ms: int,
    ) -> None:
        if transaction is None:
            self._drop(decide(self._state_of(header.transaction), Event.ABORT))
        elif stream != transaction.begin.home:
            self._drop(decide(transaction.state, Event.ASTRAY, transaction))
        else:
            if transaction.state is State.OPEN:
                transaction.ended_by = transaction.owners.session
            self._end(transaction, Event.ABORT, AbortCause.CLIENT, reason, appended_ms)

    def _end(
        self,
        transaction: BufferedTransaction,
        event: Event,
        cause: AbortCause,
        reason: str,
        now_ms: int,
        *,
        is_unusual: bool = False,
    ) -> None:
        """Move towards ABORTING where the table says so; frames are of no use any more then."""
        row = decide(transaction.state, event, transaction)
        if not isinstance(row, Move):
            self._drop(row)
            return
        self.chronicle.changed(transaction.id, transaction.state, row.to, event, reason, is_unusual=is_unusual)
        transaction.state = row.to
        transaction.barrier = None
        transaction.reason = reason
        transaction.cause = cause
        transaction.decided_ms = now_ms
        if transaction.order is not None:
            self.lines.release(transaction.order, transaction)
        self.decided[transaction.id] = transaction  # a refused commit keeps its place in the order of decisions
        self._let_go(transaction)
        transaction.last_count.clear()
        transaction.is_refused = True
        transaction.held_bytes = begin_price(transaction.begin) + text_price(reason)
        self.held_bytes += transaction.held_bytes
        self.refused_bytes += transaction.held_bytes
