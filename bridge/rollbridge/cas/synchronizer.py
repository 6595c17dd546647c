"""State shared by several processes: a replicated state machine on conditional writes under one key of a stream.

:class:`TopicKeyLog` reads the records of the key forwards and backwards along its segments; :class:`Synchronizer` holds
the state. Its lock guards the replica and is held across reads and writes; it is not held while the application's
generator or compactor runs, which is why each write checks that the replica is still the one that it was made for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Generic, TypeVar, cast

from rollbridge.base.arguments import checked
from rollbridge.base.deadlines import Closable, Deadline, positive_seconds
from rollbridge.base.forks import hold, is_gone
from rollbridge.base.ids import SegmentId
from rollbridge.base.sn import ANY, DLSN, EMPTY, SN, Token
from rollbridge.cas.dispatch import StreamAppenders
from rollbridge.cas.router import SegmentRouter
from rollbridge.cas.shared_state import (
    KeyRecord,
    Machine,
    Pointer,
    Replica,
    S,
    U,
    entry_of,
    mark_of_snapshot,
    mark_of_update,
)
from rollbridge.cas.writer import CasWriter
from rollbridge.errors import (
    CasOutcomeUnknownError,
    CasWriteError,
    ConflictError,
    InvalidRequestError,
    RecordTooLargeError,
    RollbridgeError,
    TruncatedError,
    UnavailableError,
)
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.errors import TopicNotFoundError
from rollbridge.kafka.fetch import LogDivergedError
from rollbridge.kafka.segment_tail import FIRST_STEP, STEP_FACTOR, LineageTails, WaitedTooLongError, ask, sn_of
from rollbridge.stream.conditions import Scope
from rollbridge.stream.group_offsets import NO_EPOCH
from rollbridge.stream.positions import ReadPosition
from rollbridge.stream.reading import KeyLineage, Stage

# The records of one key


_STEP_MAX: Final = 1 << 15
"""Maximum number of offsets per step backwards, and so of the pointers kept meanwhile."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Part of a lineage: the offsets ``start..end-1`` of one segment."""

    stage: Stage
    start: int
    end: int


class TopicKeyLog:
    """Log of one key on real topics: a :class:`rollbridge.cas.shared_state.KeyLog`. Not thread-safe.

    Raises, from each method and iterator:
        WaitedTooLongError: an earlier native transaction is undecided.
        StreamNotFoundError, UnavailableError: the stream was deleted; a scale of it does not end.
        ConflictError: the key's records are in a partition to which it does not belong any more.
    """

    def __init__(self, kafka: KafkaClient, router: SegmentRouter, key: bytes, timeout_s: float) -> None:
        """Connect; ``timeout_s`` bounds each reading from one place to another."""
        self._reader = kafka.log(retry_timeout_s=timeout_s)
        self._router = router
        self._key = key
        self._timeout_s = timeout_s
        self._tails = LineageTails(router.place)
        self._looked_at: SegmentId | None = None
        self._read_to: tuple[DLSN, int] | None = None
        """Place where reading forwards has ended, and the leader epoch of the last batch before that."""

    def close(self) -> None:
        """Drop the connections."""
        self._reader.close()

    def end(self) -> DLSN:
        """Return the place after everything whose writer had its answer before this call."""
        self._router.check_current()
        lineage = self._lineage()
        return DLSN.of(lineage.active, self._end_of(lineage.stages[0]))

    def between(self, start: DLSN, end: DLSN) -> Iterator[KeyRecord]:
        """Yield the entries from ``start`` to ``end``, exclusive.

        Raises:
            TruncatedError: part of that was deleted, or what was read before ``start`` is not in the log any more
                because the log has lost its end.
        """
        for stretch in reversed(self._stretches(self._lineage(), end, start)):
            self._check_kept(stretch)
            epoch = self._epoch_before(stretch)
            if stretch.start < stretch.end:
                for entry in self._entries(stretch, epoch):
                    self._check_whole(stretch)
                    yield entry
                self._check_whole(stretch)
                self._note_read(stretch)
            elif epoch != NO_EPOCH and stretch.stage.end is None:
                with self._looking_at(stretch.stage):
                    tail = self._tails.of(stretch.stage)
                    ask(tail.part(stretch.start, stretch.start, epoch), self._reader, self._deadline())

    def backwards(self, end: DLSN) -> Iterator[Pointer]:
        """Yield pointers to the entries before ``end``, newest first.

        Raises:
            TruncatedError: the search has come to what was deleted.
        """
        step = FIRST_STEP
        lineage = self._lineage()
        for whole in self._stretches(lineage, end):
            self._check_kept(whole)
            upper = whole.end
            while upper > 0:
                stretch = _Stretch(whole.stage, max(0, upper - step), upper)
                pointers = [entry.pointer for entry in self._entries(stretch)]
                if DLSN.of(whole.stage.segment, upper) == end:
                    self._note_read(stretch)  # if nothing is found, reading forwards continues here
                yield from reversed(pointers)
                self._check_whole(stretch)
                upper = stretch.start
                step = min(step * STEP_FACTOR, _STEP_MAX)
        if lineage.dropped_end:
            raise TruncatedError(f"the first epochs of {self._router.stream} were dropped with all their records")

    def kept_from(self) -> int:
        """Return the sequence id before which everything was deleted, as far as was seen; never decreases."""
        lineage = self._lineage()
        return max(lineage.dropped_end, *map(self._kept_from, lineage.stages))

    def _kept_from(self, stage: Stage) -> int:
        kept = self._tails.of(stage).truncated_at
        if stage.removed and stage.end is not None:
            kept = stage.end
        return stage.base + kept if kept else 0

    def foreign_before(self, end: DLSN) -> tuple[DLSN, bytes | None] | None:
        """Return place and key of the first record before ``end`` with another key; None if there is none.

        Covers everything that a truncation at ``end`` deletes: what is below it in its segment, and all predecessors of
        that, also where the segment continues several, of which only one has the key.
        """
        last = self._stretches(self._lineage(), end)[0]
        before = [_Stretch(stage, 0, self._end_of(stage)) for stage in self._router.before(end.segment)]
        for stretch in (*before, last):
            if stretch.stage.removed:
                continue
            log = self._tails.of(stretch.stage)
            start = min(log.truncated_at, stretch.end)
            with suppress(TruncatedError), self._looking_at(stretch.stage):
                for record in log.records(self._reader, start, stretch.end, self._deadline()):
                    if record.key != self._key:
                        return DLSN.of(stretch.stage.segment, record.offset), record.key
        return None

    def _note_read(self, stretch: _Stretch) -> None:
        self._read_to = DLSN.of(stretch.stage.segment, stretch.end), self._tails.of(stretch.stage).read_epoch

    def _epoch_before(self, stretch: _Stretch) -> int:
        """Return the leader epoch of the records read before a stretch; ``NO_EPOCH`` if there were none."""
        place, epoch = self._read_to or (None, NO_EPOCH)
        is_next = place is not None and place.segment == stretch.stage.segment and place.offset <= stretch.start
        return epoch if is_next else NO_EPOCH

    def _entries(self, stretch: _Stretch, epoch: int = NO_EPOCH) -> Iterator[KeyRecord]:
        log = self._tails.of(stretch.stage)
        with self._looking_at(stretch.stage):
            for record in log.records(self._reader, stretch.start, stretch.end, self._deadline(), epoch):
                if record.key == self._key:
                    yield entry_of(sn_of(record, log.segment, log.base), record.value, record.headers)

    @contextmanager
    def _looking_at(self, stage: Stage) -> Iterator[None]:
        """Translate what a concurrent truncation or removal of the segment causes into TruncatedError."""
        try:
            yield
        except TopicNotFoundError as fault:
            if not self._router.is_removed(stage.segment):
                raise
            raise TruncatedError(f"segment {stage.segment} of {self._router.stream} was removed") from fault
        except LogDivergedError as fault:
            self._read_to = None
            raise TruncatedError(str(fault)) from fault

    def _check_kept(self, stretch: _Stretch) -> None:
        if stretch.stage.removed and stretch.end > stretch.start:
            raise TruncatedError(f"segment {stretch.stage.segment} of {self._router.stream} was removed")

    def _check_whole(self, stretch: _Stretch) -> None:
        first = self._tails.of(stretch.stage).truncated_at
        if first > stretch.start:
            segment = stretch.stage.segment
            raise TruncatedError(f"segment {segment} of {self._router.stream} begins at offset {first} by now")

    def _stretches(self, lineage: KeyLineage, end: DLSN, start: DLSN | None = None) -> list[_Stretch]:
        """Return the lineage from ``start``, or its beginning, to ``end``; newest segment first."""
        found: list[_Stretch] = []
        for stage in lineage.stages:
            if stage.segment == end.segment:
                found.append(_Stretch(stage, 0, end.offset))
            elif found:
                found.append(_Stretch(stage, 0, self._end_of(stage)))
            if found and start is not None and stage.segment == start.segment:
                if start.offset > found[-1].end and stage.end is None:
                    self._read_to = None
                    raise TruncatedError(f"segment {stage.segment} of {self._router.stream} ends before {start} by now")
                found[-1] = _Stretch(stage, min(start.offset, found[-1].end), found[-1].end)
                return found
        if not found or start is not None:
            place = start if found and start is not None else end
            if lineage.is_dropped(place.segment):
                raise TruncatedError(f"segment {place.segment} of {self._router.stream} was removed, its epoch dropped")
            raise InvalidRequestError(
                f"{start or end} is in no segment of {self._router.stream} that can hold this key: was the stream "
                "deleted and created again?"
            )
        return found

    def _lineage(self) -> KeyLineage:
        lineage = self._router.await_lineage(self._key, self._deadline())
        if lineage.former and lineage.active != self._looked_at:
            last = ask(self._tails.last_former(lineage, self._key), self._reader, self._deadline())
            if last != EMPTY:
                raise ConflictError(
                    f"key {self._key!r} of {self._router.stream} is in partition {lineage.active.number} of the topic "
                    f"since partitions were added to it, and its earlier records are in another one, up to {last}: "
                    f"they have no common order; nothing was written; start under another key"
                )
            self._looked_at = lineage.active
        return lineage

    def _end_of(self, stage: Stage) -> int:
        if stage.end is not None:
            return stage.end
        topic, partition = self._tails.of(stage).place
        return self._reader.end(topic, partition=partition)

    def _deadline(self) -> Deadline:
        return Deadline(self._timeout_s)


logger = logging.getLogger(__name__)

T = TypeVar("T")


@checked(leave=("expected",))
class Synchronizer(Closable, Generic[S, U]):
    """One state held by any number of processes, each of which may change it if it knows the newest version.

    The state is the initial state with the updates under the key applied in log order. An update is written on
    condition that no other one came in between, so its writer has seen everything before it. Optimism should be
    justified: processes that change one state all the time make each other try again.

    Only synchronizers may write records under the key. Other keys may live in the same segments, and cost no more than
    being read past. States and updates are records, so each must fit into one.

    Safe to use from several threads, one operation at a time; close it, or use a ``with`` block. ``apply`` and codecs
    are part of an operation, which other threads wait for: they must be functions of their arguments, and quick.

    Source: Pravega, ``StateSynchronizer``.
    """

    def __init__(
        self,
        kafka: KafkaClient,
        channels: StreamAppenders,
        router: SegmentRouter,
        key: bytes,
        machine: Machine[S, U],
        cut: Callable[[ReadPosition], object],
        *,
        timeout: float | timedelta = 30.0,
        transaction_timeout: float | timedelta = 5.0,
        owner: object = None,
    ) -> None:
        """Read the state; see :meth:`rollbridge.Bridge.synchronizer`. ``cut`` truncates the stream."""
        if not isinstance(key, bytes):
            raise InvalidRequestError(f"a synchronizer needs a key of bytes, not {key!r}; nothing was written")
        self.stream: Final = router.stream
        self.key: Final = key
        self._cut = cut
        self._machine = machine
        self._lock = threading.RLock()
        self._asking: set[int] = set()
        """Threads on which a generator or compactor of the application is running."""
        self._closed = False
        self._writer = CasWriter(
            channels, self.stream, timeout=timeout, transaction_timeout=transaction_timeout, owner=owner
        )
        self._log = TopicKeyLog(kafka, router, key, positive_seconds("timeout", timeout))
        hold(self, "_lock", "_writer", "_log")
        try:
            self._replica = self._read(machine.bootstrap)
        except BaseException:
            self.close()
            raise

    @property
    def state(self) -> S:
        """State as this process knows it, without a read. Never change it in place: updates do that."""
        return self._replica.state

    @property
    def sn(self) -> SN:
        """SN of the last record applied to :attr:`state`; EMPTY if nothing has been written under the key."""
        return self._replica.sn

    @property
    def bytes_since_snapshot(self) -> int:
        """Bytes of updates in :attr:`state` since the newest snapshot, which a starting process would have to apply."""
        return self._replica.bytes_since

    def fetch(self) -> S:
        """Read all updates whose writers had their answers before this call; return the state.

        Raises:
            TruncatedError: records were deleted, and no snapshot replaces them.
            CorruptDataError: another program wrote under the key, or a record cannot be decoded; the state is
                unchanged.
            UnavailableError: an earlier native transaction stays open, or brokers do not answer.
            Exception: raised by ``apply``; the state is unchanged.
        """
        with self._lock:
            self._check_open()
            self._catch_up()
            return self._replica.state

    def update(self, generator: Callable[[S], Iterable[U] | None]) -> SN | None:
        """Change the state; return the SN of the last update once readers can see it, or None if there is no update.

        The updates of one call are written all or none, adjacent. They are applied here before they are written, so
        that updates which ``apply`` or a codec refuses never enter the log. None is returned only for a state that was
        the newest after this call began. The first update ever writes the initial state before it.

        Args:
            generator: Gets the newest state and returns updates for it, or None; called again with a newer state
                whenever another process was faster, until the updates win. It may take its time, and must not change
                this state in another way.

        Raises:
            InvalidRequestError: the generator returns something else, or more than a run of records may take, or
                changes the state itself; nothing was written.
            RecordTooLargeError, NotAuthorizedError, UnavailableError: nothing was written.
            CasOutcomeUnknownError: the updates may have been written; :meth:`fetch` or :meth:`outcome` shows it. After
                an answer that was merely lost, the log has been checked already.
            TruncatedError, CorruptDataError: see :meth:`fetch`.
        """
        is_newest = False
        while True:
            with self._lock:
                self._check_open()
                known = self._replica
            updates = self._encoded(self._asked(generator, known.state))
            with self._lock:
                self._check_open()
                if self._replica is not known:
                    continue  # another thread has read on, or written
                if updates:
                    try:
                        return self._write_updates(updates)
                    except CasWriteError as refusal:
                        self._learn_from(refusal)
                elif is_newest:
                    return None
                else:
                    self._catch_up()
            is_newest = True

    def update_unconditionally(self, updates: Iterable[U]) -> SN:
        """Write updates whatever the state is; return the SN of the last. :meth:`fetch` applies them here.

        They must make sense in any state: what ``apply`` refuses stays in the log, and no replica gets past it.

        Raises:
            InvalidRequestError: no updates; nothing was written. Others as :meth:`update` does.
        """
        self._check_not_asked()
        encoded = self._encoded(updates)
        with self._lock:
            self._check_open()
            if not encoded:
                raise InvalidRequestError("there is no update to write; nothing was written")
            while True:
                try:
                    self._begin()
                    break
                except CasWriteError as refusal:
                    self._learn_from(refusal)
            return self._write_run(encoded, ANY)

    def compact(self, compactor: Callable[[S], S | None] | None = None, *, truncate: bool = False) -> SN | None:
        """Write the newest state as a snapshot, from which new replicas start; return its SN.

        Args:
            compactor: Gets the newest state and returns an equivalent one, perhaps smaller; or None, to write nothing.
                By default the state is written as it is.
            truncate: Also truncate the stream before the snapshot: :meth:`rollbridge.Admin.truncate`, carried out by
                the coordinator, in the key's segment and all its predecessors. Right only if these hold no other
                keys, which is checked first. Slower plain readers lose these records; groups that the stream waits for
                do not.

        Raises:
            ConflictError: truncation was asked for, and the segments hold records of other keys; nothing was written
                and nothing deleted. Or, with a note that the snapshot itself is written, a group that the stream waits
                for has not read what would be deleted.
            RecordTooLargeError: the state does not fit into a record; nothing was written.
            NotAuthorizedError, CoordinatorUnavailableError, UnknownWriteError: with a note that the truncation failed:
                the snapshot itself is written.
            TruncatedError, CorruptDataError, UnavailableError, CasOutcomeUnknownError: see :meth:`update`.
        """
        with self._lock:
            self._check_open()
            self._catch_up()
            before = self._replica
        while True:
            state: S | None = before.state
            if compactor is not None:
                state = self._asked(compactor, before.state)
                if state is None:
                    return None
            with self._lock:
                self._check_open()
                if self._replica is before:
                    if truncate:
                        self._check_alone(before)
                    try:
                        sn = self._write_snapshot(cast("S", state))
                    except CasWriteError as refusal:
                        self._learn_from(refusal)
                    else:
                        if truncate:
                            self._truncate(before)
                        return sn
                before = self._replica

    def outcome(self, token: Token | str) -> SN | None:
        """Return the SN of the last record of a write that ended with :class:`CasOutcomeUnknownError`, or None."""
        return self._writer.outcome(token)

    def close(self) -> None:
        """Disconnect. The state can still be read. Closing again does nothing."""
        if is_gone(self._lock):
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._writer.close()
                self._log.close()

    @property
    def closed(self) -> bool:
        """True once the synchronizer is closed."""
        return self._closed

    def __repr__(self) -> str:
        return f"<Synchronizer of {self.stream} under {self.key!r}>"

    def _asked(self, function: Callable[[S], T], state: S) -> T:
        """Return what a function of the application makes of a state.

        No lock is held meanwhile: the function may take long, and may call this object, which refuses changes from
        there.
        """
        self._check_not_asked()
        self._asking.add(threading.get_ident())
        try:
            return function(state)
        finally:
            self._asking.discard(threading.get_ident())

    def _check_not_asked(self) -> None:
        if threading.get_ident() in self._asking:
            raise InvalidRequestError(
                f"a function that is given the state of {self.stream} must return its updates, and change nothing by "
                "itself; nothing was written"
            )

    def _catch_up(self) -> None:
        self._replica = self._read(lambda log: self._machine.catch_up(self._replica, log))

    def _read(self, how: Callable[[TopicKeyLog], Replica[S]]) -> Replica[S]:
        try:
            return how(self._log)
        except WaitedTooLongError as fault:
            raise UnavailableError(f"an earlier native transaction stays open: {fault}; nothing was written") from fault

    def _learn_from(self, refusal: CasWriteError) -> None:
        known = self._replica.sn
        self._catch_up()
        if self._replica.sn == known:  # the same write would be refused again
            raise refusal

    def _encoded(self, updates: object) -> list[bytes]:
        if updates is None:
            return []
        if isinstance(updates, str | bytes | dict) or not isinstance(updates, Iterable):
            raise InvalidRequestError(
                f"a list of updates is wanted, or None, not {updates!r}; put a single one into a list; "
                "nothing was written"
            )
        return [self._machine.updates.encode(update) for update in updates]

    def _begin(self) -> None:
        if self._replica.snapshot is None:
            self._write_snapshot(self._machine.initial)

    def _write_updates(self, encoded: Sequence[bytes]) -> SN:
        state = self._machine.preview(self._replica.state, encoded)
        self._begin()
        before = self._replica
        sn = self._write_run(encoded, before.sn)
        self._replica = before.with_updates(state, sn, sum(map(len, encoded)))
        return sn

    def _write_run(self, encoded: Sequence[bytes], expected: SN) -> SN:
        snapshot = self._replica.snapshot
        if snapshot is None:
            raise InvalidRequestError("an update needs a snapshot to rest on; nothing was written")
        return self._write(encoded, expected, mark_of_update(snapshot))

    def _write_snapshot(self, state: S) -> SN:
        value = self._machine.states.encode(state)
        try:
            sn = self._write([value], self._replica.sn, mark_of_snapshot())
        except RecordTooLargeError as fault:
            raise RecordTooLargeError(
                f"a snapshot must fit into one record, and the state encodes to {len(value)} bytes: {fault}",
                size_bytes=fault.size_bytes,
                limit_bytes=fault.limit_bytes,
            ) from fault
        # As any other process will see it.
        self._replica = self._replica.with_snapshot(self._machine.states.decode(value), sn)
        return sn

    def _write(self, values: Sequence[bytes], expected: SN, mark: tuple[str, bytes]) -> SN:
        run = [(self.key, value) for value in values]
        try:
            return self._writer.write_all(run, expected=expected, scope=Scope.KEY, headers=[[mark]] * len(run))[-1]
        except CasOutcomeUnknownError as unknown:
            try:
                found = self._writer.outcome(unknown.token)
            except (CasOutcomeUnknownError, UnavailableError) as fault:
                raise unknown from fault
            if found is None:
                raise UnavailableError(f"the write did not take effect: {unknown}; nothing was written") from unknown
            return found

    def _check_alone(self, before: Replica[S]) -> None:
        foreign = self._log.foreign_before(before.read_to)
        if foreign is not None:
            place, key = foreign
            raise ConflictError(
                f"{self.stream} holds records of other keys where it was to be truncated, the first at {place} with "
                f"key {key!r}: compact without truncating, or give the state a stream of its own; nothing was written, "
                "and nothing deleted"
            )

    def _truncate(self, before: Replica[S]) -> None:
        """Truncate up to the checked records; those between them and the snapshot stay until the next time."""
        place = before.read_to
        logger.info("stream.truncating synchronizer=%r before=%s", self, place)
        try:
            self._cut(ReadPosition(self.stream, {place.segment: place.offset}))
        except RollbridgeError as fault:
            fault.add_note("raised while truncating the stream before a snapshot; the snapshot itself is written")
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequestError(f"this synchronizer of {self.stream} is closed; nothing was written")
