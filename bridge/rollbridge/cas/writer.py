"""Conditional writer: appends that are refused unless the log is as the caller believes it to be."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Final

from rollbridge.base.arguments import as_headers, as_record, as_timestamp, checked
from rollbridge.base.deadlines import Closable, Deadline, positive_seconds
from rollbridge.base.effects import Steps
from rollbridge.base.forks import check, hold, is_gone
from rollbridge.base.metrics import TransactionCounts, WriteEnd
from rollbridge.base.sn import ANY, OPERATION_HEADER, SN, TRANSACTION_ID_HEADER, Token, pack_transaction_id
from rollbridge.cas.dispatch import StreamAppenders
from rollbridge.cas.request import AppendRequest, CasFuture, NewRecord, RecordHeaders
from rollbridge.errors import (
    BackpressureError,
    CasOutcomeUnknownError,
    CasWriteError,
    InvalidRequestError,
    RecordTooLargeError,
    RollbridgeError,
    TruncatedError,
    UnavailableError,
)
from rollbridge.kafka.records import record_size_max
from rollbridge.kafka.segment_tail import WaitedTooLongError
from rollbridge.stream.conditions import Condition, Expected, Scope, as_scope, as_sn, place_of
from rollbridge.stream.names import StreamName
from rollbridge.stream.reading import KeyLineage, Stage

PENDING_MAX: Final = 10_000
"""Maximum number of unsettled asynchronous writes per writer; beyond it :meth:`CasWriter.write_async` waits."""


@checked(leave=("expected",))
class CasWriter(Closable):
    """Writer to one stream under conditions. Safe to use from several threads; close it, or use a ``with`` block.

    Needs no coordinator, except to follow a scale. Conditions hold against all writers to the segments: other
    conditional writers, plain producers of any client library, and merges of transactions. A write waits for earlier
    native transactions on the same segment to end, its own included, and so do readers. It holds up the last stable
    offset for about a millisecond, and for ``transaction_timeout`` at most if this process dies in the middle.
    """

    def __init__(
        self,
        channels: StreamAppenders,
        stream: StreamName,
        *,
        timeout: float | timedelta = 30.0,
        transaction_timeout: float | timedelta = 5.0,
        monotonic_ids: bool = False,
        counts: TransactionCounts | None = None,
        owner: object = None,
    ) -> None:
        """Open the writer; see :meth:`rollbridge.Bridge.cas_writer`.

        ``counts`` is where its writes are counted. ``owner`` is closed once it is dropped, so it is held.
        """
        self._owner = owner
        self.stream: Final = stream
        self._counts = counts
        self._monotonic_ids = monotonic_ids
        self._timeout_s = positive_seconds("timeout", timeout)
        transaction_timeout_s = positive_seconds("transaction_timeout", transaction_timeout)
        with ExitStack() as opened:
            channel = opened.enter_context(
                channels.channel(stream, timeout_s=self._timeout_s, transaction_timeout_s=transaction_timeout_s)
            )
            channel.router.look_up()
            self._release = opened.pop_all().close
        self._channel = channel
        self._router = channel.router
        self._random = os.urandom(8)
        self._count = itertools.count()
        self._pending = 0
        self._settled = threading.Condition()
        self._closed = False
        hold(self, "_channel", "_router", "_settled")

    def write(
        self,
        key: bytes | None = None,
        value: bytes | None = None,
        *,
        expected: Expected | CasFuture,
        scope: Scope | str = Scope.SEGMENT,
        headers: RecordHeaders = (),
        timestamp: int | None = None,
        transaction_id: int | None = None,
        token: Token | str | None = None,
    ) -> SN:
        """Write a record if the expectation holds; return its SN once readers can see it.

        Args:
            key: Chooses the segment.
            value: None is a tombstone.
            expected: SN of the record that is expected to be the last, or only its DLSN, or an SN of one of its ids,
                such as ``SN(sequence_id=5)``; ``EMPTY`` for "nothing was written yet", ``ANY`` for no condition; or the
                future of a write in flight, whose record is then expected to be the last.
            scope: ``segment``: the last record of the key's segment must be the expected one. ``key``: no record with
                this key may follow the expected one, which may be any record.
            headers: Kept in their order; rollbridge's own header names are refused.
            timestamp: Milliseconds since 1970; None is now.
            transaction_id: A number of the caller's, 0 to 2^63 - 1, that becomes part of the SN. If the writer was
                opened with ``monotonic_ids``, it must not be lower than that of the record before.
            token: Made by :meth:`token`; makes it safe to write the same again after a crash.

        Raises:
            CasWriteError: another record is there; carries its SN. Nothing was written.
            TransactionIdOutOfOrderError: the transaction id falls; carries the last one. Nothing was written.
            InvalidRequestError: the SN cannot be one of this key's; a header of rollbridge's was given; no key with
                scope ``key``. Nothing was written.
            RecordTooLargeError, StreamNotFoundError, UnavailableError, NotAuthorizedError: nothing was written.
            CasOutcomeUnknownError: the record may have been written; ask with :meth:`outcome`.
        """
        request = self._request([(key, value)], expected, scope, [headers], timestamp, [transaction_id], token)
        self._carry_out(request)
        return request.result()

    def write_all(
        self,
        records: Sequence[tuple[bytes | None, bytes | None]],
        *,
        expected: Expected | CasFuture,
        scope: Scope | str = Scope.SEGMENT,
        headers: Sequence[RecordHeaders] | None = None,
        timestamp: int | None = None,
        transaction_ids: Sequence[int | None] | None = None,
        token: Token | str | None = None,
    ) -> list[SN]:
        """Write a run of records, all or none: the first expects ``expected``, each other one the record before it.

        They are adjacent in one segment, at most 900,000 bytes, or as many as an adopted topic accepts in a batch, and
        cost one native transaction. Headers and transaction ids, where given, are one per record; the timestamp is for
        all.

        Raises:
            InvalidRequestError: the keys are in several segments, or the run is empty or too large; use a transaction.
            CasWriteError: as :meth:`write`, which lists what else is raised.
        """
        request = self._request(records, expected, scope, headers, timestamp, transaction_ids, token)
        self._carry_out(request)
        return request.results()

    def write_async(
        self,
        key: bytes | None = None,
        value: bytes | None = None,
        *,
        expected: Expected | CasFuture,
        scope: Scope | str = Scope.SEGMENT,
        headers: RecordHeaders = (),
        timestamp: int | None = None,
        transaction_id: int | None = None,
        token: Token | str | None = None,
    ) -> CasFuture:
        """Begin to write a record; the future raises what :meth:`write` does.

        Writes to one segment are carried out in the order in which they were begun. Those that go together share a
        native transaction: give each the future of the one before as ``expected``, and a chain costs no more than a
        run. If a link of the chain is refused, so are those after it.

        Raises:
            BackpressureError: 10,000 writes are in flight and none ended in time; nothing was written.
        """
        request = self._request([(key, value)], expected, scope, [headers], timestamp, [transaction_id], token)
        self._admit(request)
        if not self._was_written(request):
            self._channel.enqueue(request)
        return request

    def tail(self, key: bytes | None = None, *, scope: Scope | str = Scope.SEGMENT) -> SN:
        """Return the SN of the last committed record of the key's segment, or of the key itself; ``EMPTY`` without one.

        Covers everything whose writer had its answer before this call.

        Args:
            key: May be left out for a stream of one segment.
            scope: ``segment`` or ``key``.

        Raises:
            InvalidRequestError: no key, and there are several segments or the scope is ``key``.
            UnavailableError: an earlier native transaction stays open.
        """
        self._check_open()
        self._router.check_current()
        if key is None and self._router.segments() > 1:
            raise InvalidRequestError(f"{self.stream} has several segments: a key is needed to choose one")
        condition = Condition(SN(), as_scope(scope), key)
        deadline = Deadline(self._timeout_s)
        lineage = self._router.await_lineage(key, deadline)
        try:
            return self._channel.ask(self._channel.tails.last_now(lineage, condition.scope_key), deadline)
        except WaitedTooLongError as fault:
            raise UnavailableError(f"an earlier native transaction stays open: {fault}; nothing was written") from fault

    def token(self, key: bytes | None, *, expected: Expected) -> Token:
        """Name a write before it is tried, so that it can be asked about and tried again, even after a crash.

        Keep the text of the token where a crash leaves it. Writing with the same token and expectation again writes
        nothing twice, and returns the first answer.

        Raises:
            InvalidRequestError: ``expected`` is ``ANY``, with which a repetition could not be recognised.
        """
        since = as_sn(expected)
        if since == SN():
            raise InvalidRequestError(
                "a write that may be repeated needs an expectation other than ANY; nothing was written"
            )
        return Token(self._operation(), key, since)

    def outcome(self, token: Token | str) -> SN | None:
        """Return the SN of a write's (last) record, or None if it is not in the log.

        For the token of a :class:`CasOutcomeUnknownError`, None is final. For one made by :meth:`token` it is final
        once the writer with this token is gone; writing again with the same token is safe in any case.

        Raises:
            CasOutcomeUnknownError: the write is still being decided.
            TruncatedError: the write was not found, and records were truncated where it may have been.
            InvalidRequestError: no such token, or not one of this stream.
        """
        self._check_open()
        asked = Token.parse(token) if isinstance(token, str) else token
        self._router.check_current()
        deadline = Deadline(self._timeout_s)
        lineage = self._router.await_lineage(asked.key, deadline)
        try:
            found = self._channel.ask(self._find(asked, lineage), deadline)
        except WaitedTooLongError as fault:
            raise CasOutcomeUnknownError(
                f"the write is still being decided: {fault}; ask again", token=asked
            ) from fault
        return found[-1] if found else None

    def flush(self) -> None:
        """Wait until every write that was begun has its answer."""
        with self._settled:
            self._settled.wait_for(lambda: self._pending == 0)

    def close(self) -> None:
        """Carry out what was begun, release the transactional ids, and disconnect. Closing again does nothing."""
        if self._closed or is_gone(self._channel):
            return
        self._closed = True
        self.flush()
        self._release()

    @property
    def closed(self) -> bool:
        """True once the writer is closed."""
        return self._closed

    def __repr__(self) -> str:
        return f"<CasWriter of {self.stream}>"

    def _find(self, token: Token, lineage: KeyLineage) -> Steps[list[SN]]:
        if token.place is None:
            return (yield from self._channel.tails.find(lineage, token))
        base = lineage.base(token.place.segment)
        if base is None and lineage.is_dropped(token.place.segment):
            raise TruncatedError(f"the records at the place of token {token} were truncated: its outcome is unknown")
        if base is None:
            raise InvalidRequestError(f"token {token} is not of stream {self.stream}")
        tail = self._channel.tails.of(Stage(token.place.segment, base, None))
        return (yield from tail.find_run(token.operation, token.place.offset))

    def _request(
        self,
        run: Sequence[tuple[bytes | None, bytes | None]],
        expected: Expected | CasFuture,
        scope: Scope | str,
        headers: Sequence[RecordHeaders] | None,
        timestamp: int | None,
        transaction_ids: Sequence[int | None] | None,
        token: Token | str | None,
    ) -> AppendRequest:
        self._check_open()
        now_ms = time.time_ns() // 1_000_000
        if not run:
            raise InvalidRequestError("a run needs at least one record; nothing was written")
        run = [as_record(record) for record in run]
        if timestamp is not None:
            timestamp = as_timestamp(timestamp)
        if transaction_ids is not None and len(transaction_ids) != len(run):
            raise InvalidRequestError(
                f"{len(transaction_ids)} transaction ids for {len(run)} records; nothing was written"
            )
        if headers is not None and len(headers) != len(run):
            raise InvalidRequestError(f"headers for {len(headers)} of {len(run)} records; nothing was written")
        keys = [key for key, _ in run]
        timestamp_ms = now_ms if timestamp is None else timestamp
        if (fault := self._router.fault_of(keys, timestamp_ms, now_ms)) is not None:
            raise InvalidRequestError(f"{fault}: {self.stream}; nothing was written")
        deadline = Deadline(self._timeout_s)
        checked_scope = as_scope(scope)
        first = run[0][0]
        if checked_scope is Scope.KEY and any(key != first for key, _ in run):
            raise InvalidRequestError('with scope "key" the records of a run have one key; nothing was written')
        if len(run) > 1:
            self._router.check_run(keys)
        elif first is None and self._router.segments() > 1:
            raise InvalidRequestError(
                f"{self.stream} has several segments: a record needs a key to choose one; nothing was written"
            )
        lineage = self._router.await_lineage(first, deadline)
        given = Token.parse(token) if isinstance(token, str) else token
        waited_for = expected if isinstance(expected, AppendRequest) else as_sn(expected)
        condition = Condition(ANY if isinstance(waited_for, AppendRequest) else waited_for, checked_scope, first)
        self._check_place(condition.expected, lineage, first, deadline)
        if given is not None and (given.since != condition.expected or given.key != first):
            raise InvalidRequestError(f"token {given} was made for another key or expectation; nothing was written")
        operation = self._operation() if given is None else given.operation
        mark = (OPERATION_HEADER, operation)
        numbers = transaction_ids or [None] * len(run)
        extra: Sequence[RecordHeaders] = headers or [()] * len(run)
        records = [
            self._record(key, value, extra[place], numbers[place], mark) for place, (key, value) in enumerate(run)
        ]
        request = AppendRequest(
            owner=self,
            records=records,
            expected=waited_for,
            scope=checked_scope,
            operation=operation,
            lineage=lineage,
            deadline=deadline,
            timestamp_ms=timestamp_ms,
            monotonic_ids=self._monotonic_ids,
            repeatable=given is not None,
        )
        run_bytes_max = self._router.round_bytes_max
        if request.size > run_bytes_max and len(run) > 1:
            raise InvalidRequestError(
                f"a run of up to {request.size} bytes exceeds {run_bytes_max}; write it as a "
                "transaction, or as several runs; nothing was written"
            )
        return request

    def _carry_out(self, request: AppendRequest) -> None:
        request.add_done_callback(self._note_end)
        if not self._was_written(request):
            self._channel.carry_out(request)

    def _was_written(self, request: AppendRequest) -> bool:
        """Return whether a write is settled, since its token was tried in the key's partition before the last move.

        Most expectations that held there are refused in the present partition, so the write is searched for.
        """
        expected, lineage = request.expected, request.lineage
        if not request.repeatable or not lineage.former or isinstance(expected, AppendRequest):
            return False
        if expected.dlsn is not None or (expected.empty and request.scope is Scope.KEY):
            return False
        try:
            found = self._channel.ask(self._channel.tails.find(lineage, request.token), request.deadline)
        except (RollbridgeError, WaitedTooLongError) as fault:
            why = f"it is not known whether an earlier attempt was written: {fault}"
            request.settle(CasOutcomeUnknownError(why, token=request.token))
            return True
        if found:
            request.settle(found)
        return bool(found)

    def _note_end(self, done: CasFuture) -> None:
        if self._counts is None:
            return
        fault = done.exception()
        match fault:
            case None:
                self._counts.note_conditional(WriteEnd.WRITTEN)
            case CasWriteError() | InvalidRequestError():
                self._counts.note_conditional(WriteEnd.REFUSED)
            case CasOutcomeUnknownError():
                self._counts.note_conditional(WriteEnd.UNKNOWN)
            case _:
                self._counts.note_conditional(WriteEnd.FAILED)

    def _check_place(self, expected: SN, lineage: KeyLineage, key: bytes | None, deadline: Deadline) -> None:
        """Refuse an SN that cannot be one of this key's, before anything is appended."""
        try:
            place_of(expected, lineage)
        except InvalidRequestError:
            # The SN may come from an epoch that is not cached here yet.
            self._router.check_current()
            place_of(expected, self._router.await_lineage(key, deadline))

    def _record(
        self,
        key: bytes | None,
        value: bytes | None,
        headers: RecordHeaders,
        transaction_id: int | None,
        mark: tuple[str, bytes],
    ) -> NewRecord:
        whole = as_headers(headers)
        if whole and any(name.startswith("rollbridge") for name, _ in whole):
            raise InvalidRequestError("headers that begin with rollbridge are ours; nothing was written")
        if transaction_id is not None:
            whole.append((TRANSACTION_ID_HEADER, pack_transaction_id(transaction_id)))
        whole.append(mark)
        size = record_size_max(key, value, whole)
        limit_bytes = self._router.record_bytes_max
        if size > limit_bytes:
            raise RecordTooLargeError(
                f"the record takes up to {size} bytes, {self.stream} allows {limit_bytes}; nothing was written",
                size_bytes=size,
                limit_bytes=limit_bytes,
            )
        return NewRecord(key, value, whole, transaction_id, size)

    def _operation(self) -> bytes:
        return self._random + next(self._count).to_bytes(8, "big")

    def _admit(self, request: AppendRequest) -> None:
        with self._settled:
            if self._pending >= PENDING_MAX and not self._settled.wait_for(self._has_room, self._timeout_s):
                raise BackpressureError(
                    f"{PENDING_MAX} conditional writes are under way and none ended within {self._timeout_s:g} s; "
                    "nothing was written"
                )
            self._pending += 1
        request.add_done_callback(self._settle)

    def _has_room(self) -> bool:
        return self._pending < PENDING_MAX

    def _settle(self, done: CasFuture) -> None:
        self._note_end(done)  # not a callback of its own: thousands of writes are under way
        with self._settled:
            self._pending -= 1
            if self._pending in (0, PENDING_MAX - 1):
                self._settled.notify_all()

    def _check_open(self) -> None:
        check(self._channel)
        if self._closed:
            raise InvalidRequestError(f"this writer of {self.stream} is closed; nothing was written")
