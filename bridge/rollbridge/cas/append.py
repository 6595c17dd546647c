"""One round of conditional writes: append in a native transaction, commit if the conditions hold at that offset.

1. Append at offset o, invisible. Appending before reading is what makes a condition hold against any other writer:
   whoever comes later gets a later offset.
2. Wait until every offset below o is decided, reading only what was not read before. Earlier writers never wait for
   later ones, so there is no cycle of waiters.
3. Commit if the conditions hold for what is committed below o; otherwise abort. If what was read so far already refutes
   a condition, abort at once, so that those who wait for this round wait no longer than they must.

Writes of the same connection that wait behind a round are refused together with it where what it read refutes them.
They must have been queued before the end of the log was read, so that the SN reported as the last one is not older than
they are.

A commit whose answer is lost is looked up: the same transactional id is initialised again, which ends whatever was open
under it, and then the log shows whether the record at o is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rollbridge.calls import Deadline
from rollbridge.cas.request import AppendRequest
from rollbridge.cas.router import ROUND_BYTES_MAX
from rollbridge.cas.session import TransactionalSession
from rollbridge.cas.tail import WAIT_MS, SegmentLog, StreamLogs, WaitedTooLongError, sn_of
from rollbridge.errors import InvalidRequestError, RollbridgeError, TruncatedError
from rollbridge.kafka.appender import TransactionalAppender
from rollbridge.kafka.batches import BatchBuilder, Compression
from rollbridge.kafka.errors import AppendUnknownError, ProducerFencedError, TopicNotFoundError
from rollbridge.kafka.fetch import LogReader
from rollbridge.model.cas import Accepted, ConditionalWrite, Refused, Scope, Verdict, is_refuted, judge, place_of
from rollbridge.model.lineage import KeyLineage
from rollbridge.model.names import show_partition
from rollbridge.model.sn import ANY, OPERATION_HEADER, SN, Token

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AppendCommitted:
    """Committed round, visible to readers; SNs per write."""

    sns: Sequence[tuple[SN, ...]]


@dataclass(frozen=True, slots=True)
class Judged:
    """Aborted round: some writes are refused, or can never succeed; the accepted ones may be tried again."""

    verdicts: Sequence[Verdict | InvalidRequestError]


@dataclass(frozen=True, slots=True)
class NotWritten:
    """Round that left nothing behind and may be tried again."""

    why: str


@dataclass(frozen=True, slots=True)
class Unclear:
    """Round of which nobody can tell at present whether it is visible; ``offset`` is that of its first record."""

    offset: int
    why: str


RoundResult = AppendCommitted | Judged | NotWritten | Unclear


@dataclass(frozen=True, slots=True)
class AppendDeadlines:
    """Deadlines of a round."""

    earlier: Deadline
    """Deadline for earlier native transactions to end; it lies before the time-out of the round's own transaction."""
    answer: Deadline
    """Deadline for finding out the outcome of a commit."""


class ConditionalAppend:
    """One round of writes to one segment; used once, by one thread."""

    def __init__(
        self,
        engine: TransactionalSession,
        logs: StreamLogs,
        requests: Sequence[AppendRequest],
        entries: Sequence[ConditionalWrite],
        waiting: Callable[[], Sequence[AppendRequest]] = tuple,
        *,
        alone: bool = True,
    ) -> None:
        """Prepare a round of writes that go together.

        Args:
            engine: Transactional id and reader of the round.
            logs: What is known of the stream's segments.
            requests: The writes.
            entries: The same writes, as the decision takes them.
            waiting: Returns the writes queued behind this round.
            alone: True if no other writer of the same connection is known to contend.
        """
        self._appender: Final[TransactionalAppender] = engine.appender
        self._reader: Final[LogReader] = engine.reader
        self._engine = engine
        self._logs = logs
        self._requests = requests
        self._entries = entries
        self._log: Final[SegmentLog] = logs.active(requests[0].course)
        self._met_before = self._log.met
        self._waiting = waiting
        self._alone = alone
        self._appended = self._aborted = False
        self.refuted: dict[AppendRequest, Refused] = {}
        """Writes queued behind the round that are refused whatever its own outcome."""

    @property
    def met_others(self) -> bool:
        """True if others have appended since this writer last looked, whether or not they committed."""
        return self._log.met > self._met_before

    def look(self, deadline: Deadline) -> Sequence[Verdict | InvalidRequestError]:
        """Return what would be decided now, without appending anything.

        A refusal is as good as one after an append as long as the segment is active; only an append notices that it was
        sealed.

        Raises:
            WaitedTooLongError: an earlier native transaction is still open.
        """
        behind = self._waiting()
        end = self._log.end_now(self._reader)
        verdicts = self._decide(end, deadline)
        self._refute(behind)
        return verdicts

    def is_refuted(self) -> bool:
        """Return True if what is known already refutes the first condition, so that appending it is of no use."""
        entry = self._entries[0]
        condition = entry.condition
        known = self._log.known_last(condition.key if condition.scope is Scope.KEY else None)
        if known is None or entry.after is not None:
            return False
        try:
            return is_refuted(condition, known, entry.course)
        except InvalidRequestError:
            return False

    def run(self, patience: AppendDeadlines) -> RoundResult:
        """Append, decide, then commit or abort.

        Raises:
            AppendRefusedError: the segment does not accept the append: sealed, gone or not allowed; nothing was
                written.
            ProducerFencedError: another writer has the transactional id; nothing was written.
            KafkaUnavailableError: nothing was written.
        """
        try:
            alone = self._alone and not self._waiting()
            if alone and self._log.marker_expected:
                # The broker answers as soon as the marker is there, usually before it acknowledges the append.
                topic, number = self._log.place
                self._reader.ask(
                    topic, self._log.end or 0, wait_ms=WAIT_MS, partition=number, last_epoch=self._log.epoch
                )
            offset = self._append()
            self._appended = True
            behind = () if alone else self._waiting()
            try:
                verdicts = self._decide(offset, patience.earlier)
            except WaitedTooLongError as fault:
                self._engine.rollback()
                return NotWritten(f"an earlier native transaction is still open: {fault}")
            sns = [verdict.sns for verdict in verdicts if isinstance(verdict, Accepted)]
            if len(sns) < len(verdicts):
                self._engine.rollback()
                return Judged(verdicts)
            if self._aborted:
                return NotWritten("it was aborted too early")
        except AppendUnknownError as fault:
            # No commit was asked for, so the next initialisation of this transactional id aborts the append.
            return NotWritten(str(fault))
        except BaseException:
            self._engine.rollback()
            raise
        finally:
            self._reader.unask()
        result = self._commit(offset, sns, patience.answer)
        end = offset + sum(len(written) for written in sns)
        if isinstance(result, AppendCommitted) and self._log.high_watermark == self._log.end == end:
            self._refute(behind)
        return result

    def _append(self) -> int:
        builder = BatchBuilder(ROUND_BYTES_MAX * 2, Compression.NONE)
        for request in self._requests:
            for record in request.records:
                builder.append(request.timestamp_ms, record.key, record.value, record.headers)
        return self._appender.append([(*self._log.place, builder.build())])[0]

    def _decide(self, offset: int, deadline: Deadline) -> list[Verdict | InvalidRequestError]:
        entries = self._entries
        with self._log.lock:
            self._log.confirm(self._reader, offset)
        faults: dict[int, InvalidRequestError] = {}
        key_lasts: dict[bytes, SN] = {}
        for place, entry in enumerate(entries):
            try:
                place_of(entry.condition.expected, entry.course)
            except InvalidRequestError as fault:
                faults[place] = fault
                continue
            condition = entry.condition
            # A write without an expectation may share its key with one that has one, and must not hide the key's last
            # record.
            key, expected = condition.key, condition.expected
            if key is not None and condition.scope is Scope.KEY and entry.after is None and expected != ANY:
                key_lasts[key] = self._key_last(key, expected, entry.course, offset, deadline)
        if faults:
            return [faults.get(place, Accepted(())) for place in range(len(entries))]
        last = self._logs.last(entries[0].course, self._reader, offset, deadline, self._abort_if_refuted)
        verdicts: list[Verdict | InvalidRequestError] = []
        last_ids = {
            place: self._logs.last_id(entry.course, self._reader, offset, deadline)
            for place, entry in enumerate(entries)
            if entry.checks_ids
        }
        for entry, verdict in zip(entries, judge(entries, offset, last, key_lasts, last_ids), strict=True):
            key = entry.condition.key
            if (
                isinstance(verdict, Refused)
                and entry.condition.scope is Scope.KEY
                and verdict.actual.empty
                and key is not None
            ):
                # Only what stands after the expected place was read; the caller wants the SN that is actually there.
                actual = self._logs.last_of(entry.course, self._reader, key, None, offset, deadline)
                verdict = Refused(verdict.expected, actual)
            verdicts.append(verdict)
        return verdicts

    def _abort_if_refuted(self) -> None:
        if self._appended and not self._aborted and self.is_refuted():
            self._aborted = True
            self._engine.rollback()

    def _refute(self, behind: Sequence[AppendRequest]) -> None:
        """Record which of the writes behind this round are refused by what is known, whatever stands beyond that.

        Nothing depends on where the log seemed to end: right after a leader election that may be less than what
        somebody has already seen.
        """
        for request in behind:
            if request in self.refuted or request.broken_chain() or request.awaited({}):
                continue
            condition = request.condition()
            actual = self._log.known_last(condition.key if condition.scope is Scope.KEY else None)
            try:
                if actual is not None and is_refuted(condition, actual, request.course):
                    self.refuted[request] = Refused(condition.expected, actual)
            except InvalidRequestError:
                continue  # its own round reports this

    def _key_last(self, key: bytes, expected: SN, course: KeyLineage, offset: int, deadline: Deadline) -> SN:
        # With a transaction id the record itself is needed, not only whether a later one exists.
        place = None if expected.transaction_id is not None else place_of(expected, course)
        return self._logs.last_of(course, self._reader, key, place, offset, deadline)

    def _commit(self, offset: int, sns: Sequence[tuple[SN, ...]], deadline: Deadline) -> RoundResult:
        try:
            self._appender.commit()
        except AppendUnknownError as fault:
            return self._look_up(offset, sns, deadline, fault)
        except RollbridgeError:
            self._engine.rollback()
            raise
        with self._log.lock:
            keys = (record.key for request in self._requests for record in request.records)
            self._log.wrote([sn for written in sns for sn in written], keys)
        return AppendCommitted(sns)

    def _look_up(
        self, offset: int, sns: Sequence[tuple[SN, ...]], deadline: Deadline, fault: AppendUnknownError
    ) -> RoundResult:
        """Settle an unclear commit: initialise the transactional id, which ends it, then see what the log says."""
        logger.info("looking into %s for what became of a commit: %s", show_partition(self._log.place), fault)
        operation = self._requests[0].operation
        try:
            try:
                self._appender.init()
            except ProducerFencedError:
                logger.info("somebody else has ended transactional id %s", self._appender.transactional_id)
            found = find_operation(self._log, self._reader, operation, offset, offset + 1, deadline)
        except (RollbridgeError, WaitedTooLongError) as exc:
            return Unclear(offset, str(exc))  # the place could not be read, which says nothing about the commit
        return AppendCommitted(sns) if found else NotWritten("the commit did not take effect")


def find_operation(
    log: SegmentLog, reader: LogReader, operation: bytes, since: int, to: int, deadline: Deadline
) -> list[SN]:
    """Return the SNs of a write's committed records in ``since..to-1``; empty if the write is not there and never was.

    Raises:
        WaitedTooLongError: something before ``to`` is still undecided.
        TruncatedError: the write was not found, and may have stood where records were truncated or compacted.
    """
    try:
        found = [
            sn_of(record, log.segment, log.base)
            for record in log.records(reader, since, to, deadline)
            if any(name == OPERATION_HEADER and value == operation for name, value in record.headers)
        ]
    except TopicNotFoundError as fault:
        raise TruncatedError(f"segment {log.segment} is gone: nobody can tell whether it held the write") from fault
    if not found and since < min(log.truncated_at(), to):
        raise TruncatedError(
            f"segment {log.segment} was truncated to offset {log.truncated_at()}: nobody can tell whether the write "
            f"stood there, from offset {since} on"
        )
    if not found and log.is_compacted(reader, since, to):
        raise TruncatedError(
            f"topic {show_partition(log.place)} was compacted: nobody can tell whether the write stood there, from "
            f"offset {since} on"
        )
    return found


def find_write(logs: StreamLogs, course: KeyLineage, reader: LogReader, token: Token, deadline: Deadline) -> list[SN]:
    """Return the SNs of a write's committed records, searching everything appended until now.

    Raises:
        WaitedTooLongError: something is still undecided.
        TruncatedError: the write may have stood where records were truncated.
    """
    place = place_of(token.since, course)
    lost: TruncatedError | None = None
    for stage in course.stages:
        log = logs.of(stage)
        end = log.end_now(reader) if stage.end is None else stage.end
        since = 0 if place is None else min(max(place + 1 - stage.base, 0), end)
        try:
            if found := find_operation(log, reader, token.operation, since, end, deadline):
                return found
        except TruncatedError as fault:
            lost = fault
        if place is not None and place >= stage.base:
            break
    else:
        if course.dropped_end > (0 if place is None else place + 1):
            lost = TruncatedError(f"what token {token} is looked for in was truncated, segments and all")
    if lost is not None:
        raise lost
    return []


def patience(transaction_timeout_s: float, answer_s: float) -> AppendDeadlines:
    """Return a round's deadlines: half of the transaction's time-out for earlier ones, the rest for ending it."""
    return AppendDeadlines(Deadline(transaction_timeout_s / 2), Deadline(transaction_timeout_s + answer_s))
