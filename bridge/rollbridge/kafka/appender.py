"""Transactional appender: forwards ready-made record batches inside native transactions v2.

librdkafka speaks transactions v1 only, where a delayed EndTxn can end the transaction after its own (KAFKA-17754).
With v2 every end raises the producer epoch, so that brokers refuse any straggler.

``PERMISSIONS`` says which operations each state allows, ``AFTER`` to which state each result leads; both tables are
complete. Requests to leaders are in ``session``, those to the coordinator in ``coordination``. An appender belongs to
one thread and holds no lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import partial
from math import inf
from typing import Final, assert_never

from kio.schema.errors import ErrorCode

from rollbridge.base.deadlines import Closable, Deadline
from rollbridge.errors import ConfigError, ConflictError, FencedError, KafkaUnavailableError
from rollbridge.kafka import errors as codes
from rollbridge.kafka.errors import (
    ID_LOCKED,
    AppendRefusedError,
    AppendUnknownError,
    Meaning,
    NotAuthorizedError,
)
from rollbridge.kafka.groups import send_group_offsets
from rollbridge.kafka.metadata import Cluster, Clusters, Isolation
from rollbridge.kafka.offsets import read_end_offset
from rollbridge.kafka.transactions import (
    Addressed,
    Coordination,
    ProducerFields,
    ProducerStanding,
    ProduceSession,
    RequestRefusedError,
    SessionSender,
)
from rollbridge.stream.group_offsets import GroupMember, OffsetDetails
from rollbridge.stream.names import Partition

# States: two complete tables.


class AppenderState(Enum):
    """State of an appender."""

    NEW = "new"
    """Not initialised yet: nothing was sent."""
    READY = "ready"
    """Initialised, no native transaction open."""
    IN_TRANSACTION = "in transaction"
    """Records or offsets were added, and the transaction has not ended yet."""
    MUST_ABORT = "must abort"
    """A request was refused: the open transaction can only be aborted."""
    UNKNOWN = "unknown"
    """An answer was lost: only the coordinator knows."""
    FENCED = "fenced"
    """A newer user has the transactional id."""
    CLOSED = "closed"


class Operation(Enum):
    """Operation that a caller may ask for."""

    INIT = "init"
    APPEND = "append"
    SEND_OFFSETS = "send_offsets"
    COMMIT = "commit"
    ABORT = "abort"
    CLOSE = "close"


class Permission(Enum):
    """Reply of a state to an operation."""

    RUN = "run"
    NOTHING = "nothing to do"
    """The operation succeeds without a request: there is nothing to end or to close."""
    REFUSE = "refuse"
    """The operation raises ConflictError, ``invalid-state``; nothing is sent."""
    FENCED = "fenced"
    """The operation raises FencedError; nothing is sent."""


class Result(Enum):
    """Result of an operation that ran."""

    OK = "ok"
    REFUSED = "refused"
    UNKNOWN = "unknown"
    FENCED = "fenced"
    LOCKED = "locked"
    """Nothing was sent: Kafka has locked the transactional id."""


_S, _R, _N, _X, _F = AppenderState, Permission.RUN, Permission.NOTHING, Permission.REFUSE, Permission.FENCED

PERMISSIONS: Final[Mapping[tuple[AppenderState, Operation], Permission]] = {
    (state, operation): permission
    for state, row in {
        # init, append, send_offsets, commit, abort, close
        _S.NEW: (_R, _X, _X, _X, _X, _R),
        _S.READY: (_R, _R, _R, _N, _N, _R),
        _S.IN_TRANSACTION: (_R, _R, _R, _R, _R, _R),
        _S.MUST_ABORT: (_R, _X, _X, _X, _R, _R),
        _S.UNKNOWN: (_R, _X, _X, _X, _X, _R),
        _S.FENCED: (_F, _F, _F, _F, _F, _R),
        _S.CLOSED: (_X, _X, _X, _X, _X, _N),
    }.items()
    for operation, permission in zip(Operation, row, strict=True)
}

AFTER: Final[Mapping[tuple[Operation, Result], AppenderState]] = {
    (operation, result): state
    for operation, row in {
        # ok, refused, unknown, fenced, locked
        # Until init has succeeded once, the state stays NEW instead: there is no epoch to recover.
        Operation.INIT: (_S.READY, _S.UNKNOWN, _S.UNKNOWN, _S.FENCED, _S.UNKNOWN),
        # An append that sent nothing leaves the state unchanged.
        Operation.APPEND: (_S.IN_TRANSACTION, _S.MUST_ABORT, _S.UNKNOWN, _S.FENCED, _S.READY),
        Operation.SEND_OFFSETS: (_S.IN_TRANSACTION, _S.MUST_ABORT, _S.UNKNOWN, _S.FENCED, _S.READY),
        # A transaction that has records holds its id, so its end is never refused as locked.
        Operation.COMMIT: (_S.READY, _S.MUST_ABORT, _S.UNKNOWN, _S.FENCED, _S.UNKNOWN),
        Operation.ABORT: (_S.READY, _S.UNKNOWN, _S.UNKNOWN, _S.FENCED, _S.UNKNOWN),
        Operation.CLOSE: (_S.CLOSED, _S.CLOSED, _S.CLOSED, _S.CLOSED, _S.CLOSED),
    }.items()
    for result, state in zip(Result, row, strict=True)
}
logger = logging.getLogger(__name__)

_OF_ONE_TOPIC: Final = codes.AWAY | {ErrorCode.unknown_server_error}
"""Answers to Produce that leave the outcome unknown, but name one topic, or the batch sent to it, as the reason."""


class TransactionalAppender(Closable):
    """Native transactions of one transactional id, one at a time. Not thread-safe.

    Take the id with :meth:`init`, then repeat: ``append()`` any number of times, ``commit()`` or ``abort()``. Several
    appenders used in turn never wait for the markers of the previous transaction.

    Args:
        clusters: Pool of connections; a transaction has its own from its first append to its end.
        transaction_timeout_ms: Age at which the coordinator aborts an open transaction; at most the broker's
            ``transaction.max.timeout.ms``, by default 15 minutes.
        request_timeout_ms: Longest wait for the answer to one request.
        retry_timeout_ms: Time for which an operation is retried on retriable answers, such as a leader election.
        unknown_topic_timeout_ms: Time for which a topic that brokers do not know is taken for a new one.
        topic_timeout_ms: Time for which a topic, given its name, may be without a leader; by default
            ``retry_timeout_ms`` for every topic.
        locked_timeout_ms: Time for which the id may be locked before an operation that would begin a transaction
            raises ``ID_LOCKED``; by default ``retry_timeout_ms``, and the outcome is unknown then.

    Raises:
        ConfigError: A setting is wrong.
    """

    def __init__(
        self,
        clusters: Clusters,
        transactional_id: str,
        *,
        transaction_timeout_ms: int = 900_000,
        request_timeout_ms: int = 30_000,
        retry_timeout_ms: int = 60_000,
        unknown_topic_timeout_ms: int = 5_000,
        topic_timeout_ms: Callable[[str], int] | None = None,
        locked_timeout_ms: int | None = None,
    ) -> None:
        if not transactional_id:
            raise ConfigError("transactional.id: must not be empty")
        if transaction_timeout_ms <= 0 or request_timeout_ms <= 0:
            raise ConfigError("transaction_timeout_ms and request_timeout_ms: must be positive")
        self.transactional_id: Final = transactional_id
        self._request_timeout_ms = request_timeout_ms
        self._retry_timeout_ms = retry_timeout_ms
        self._unknown_topic_timeout_ms = unknown_topic_timeout_ms
        self._locked_timeout_s = inf if locked_timeout_ms is None else locked_timeout_ms / 1000
        self._transaction_timeout_ms = transaction_timeout_ms
        self._new_coordination = partial(
            Coordination,
            transactional_id=transactional_id,
            transaction_timeout_ms=transaction_timeout_ms,
            retry_timeout_s=retry_timeout_ms / 1000,
            locked_timeout_s=self._locked_timeout_s,
        )
        self._new_sender = partial(
            SessionSender,
            retry_timeout_ms=retry_timeout_ms,
            unknown_topic_timeout_ms=unknown_topic_timeout_ms,
            topic_timeout_ms=topic_timeout_ms or (lambda _: retry_timeout_ms),
            locked_timeout_s=self._locked_timeout_s,
        )
        self._clusters = clusters
        self._deadline: Deadline | None = None
        self._held: tuple[Cluster, Coordination] | None = None
        self._users = 0
        """Operations under way: an append's batches may come from code that asks for an end."""
        self._state = AppenderState.NEW
        self._producer: ProducerFields | None = None
        self._session = ProduceSession()

    def __repr__(self) -> str:
        return f"<TransactionalAppender {self.transactional_id}, {self._state.value}>"

    @property
    def state(self) -> AppenderState:
        return self._state

    @contextmanager
    def within(self, deadline: Deadline) -> Iterator[None]:
        """Bound all operations in a context by a deadline, within the time-outs that they have anyway."""
        before = self._deadline
        self._bound(deadline)
        try:
            yield
        finally:
            self._bound(before)

    def _bound(self, deadline: Deadline | None) -> None:
        self._deadline = deadline
        if self._held is not None:
            self._held[0].deadline = deadline

    @property
    def _cluster(self) -> Cluster:
        return self._borrowed()[0]

    @property
    def _coordination(self) -> Coordination:
        return self._borrowed()[1]

    def _borrowed(self) -> tuple[Cluster, Coordination]:
        """Return the connections of the open transaction, or of this operation."""
        if self._held is None:
            cluster = self._clusters.take(request_timeout_s=self._request_timeout_ms / 1000)
            cluster.deadline = self._deadline
            self._held = cluster, self._new_coordination(cluster)
        return self._held

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Give the connections back behind an operation, unless a transaction is open on them."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self._give_back()

    def _give_back(self) -> None:
        is_open = self._state in (AppenderState.IN_TRANSACTION, AppenderState.MUST_ABORT)
        if self._held is not None and not is_open and not self._users:
            self._clusters.give_back(self._held[0])
            self._held = None

    def init(self) -> None:
        """Take the transactional id, or recover it; no transaction of it is open afterwards.

        The first call fences the previous user of the id and aborts the transaction left open. A later call, after
        :class:`AppendUnknownError`, ends only this appender's own transaction (read the log to learn its outcome) and
        never takes the id back from a newer user. Waits for restarting brokers, up to ``retry_timeout_ms``.

        Raises:
            FencedError: A newer user has the id.
            KafkaUnavailableError: No answer came in time; may be called again.
            KafkaUnavailableError: ``ID_LOCKED``: What was open is decided, but the id is locked; may be called again.
            NotAuthorizedError, AuthenticationError, InvalidRequestError, ConfigError: The broker refuses.
        """
        self._enter(Operation.INIT)
        with self._using(), self._translated(Operation.INIT):
            self._session = ProduceSession()
            if self._producer is None:
                self._producer = self._coordination.take_over()
            else:
                self._producer = self._coordination.recover(self._producer)
            self._move(Operation.INIT, Result.OK)

    def append(self, batches: Iterable[Addressed]) -> list[int]:
        """Append record batches to the open transaction (the first append opens one) and return their base offsets.

        Args:
            batches: ``(topic, batch)`` for partition 0 or ``(topic, partition, batch)``: complete record batches,
                magic v2, of any compression, whose buffers must not change until this returns. Consumed lazily.

        Returns:
            Base offset of each batch, in the order given, once all in-sync replicas have all of them.

        Raises:
            AppendRefusedError: Definite: the transaction can only be aborted.
            AppendUnknownError: Outcome unknown: call ``init()``.
            KafkaUnavailableError: ``ID_LOCKED``: Nothing was sent, no transaction is open; may be called again.
            FencedError: A newer user has the id. Never init again.
            ConflictError: ``invalid-state``: Not initialised, or the transaction must be aborted first.
            CorruptDataError: One of ``batches`` is not a batch of data. As with any exception raised by iterating
                them, the transaction can only be aborted then, unless nothing was sent yet.
        """
        self._enter(Operation.APPEND)
        with self._using(), self._translated(Operation.APPEND):
            offsets = self._new_sender(self._cluster, self._session, self._current).run(batches)
            if offsets:
                self._move(Operation.APPEND, Result.OK)
            return offsets

    def send_offsets(
        self,
        member: GroupMember | str,
        offsets: Mapping[Partition, int],
        details: Mapping[Partition, OffsetDetails] | None = None,
        *,
        retry_timeout_s: float | None = None,
    ) -> None:
        """Add a consumer group's offsets to the open transaction: they take effect if and only if it commits.

        Args:
            member: Group id, for a caller outside of the group, or the committing member.
            offsets: (topic, partition) to the offset of the next record to read.
            details: Details committed with some of them.
            retry_timeout_s: Time for which to retry while the group coordinator is unavailable; by default the
                appender's.

        Raises: as :meth:`append` does.
        """
        self._enter(Operation.SEND_OFFSETS)
        if not offsets:
            return
        with self._using(), self._translated(Operation.SEND_OFFSETS):
            send_group_offsets(
                self._cluster,
                self._session,
                self._current,
                GroupMember(member) if isinstance(member, str) else member,
                offsets,
                details or {},
                retry_timeout_s=self._retry_timeout_ms / 1000 if retry_timeout_s is None else retry_timeout_s,
                locked_timeout_s=self._locked_timeout_s,
            )
            self._session.joined = True
            self._move(Operation.SEND_OFFSETS, Result.OK)

    def commit(self) -> None:
        """Commit the open transaction; succeed without a request if there is none.

        The decision is durable on return. Readers see it as soon as the markers are written, partition by partition.

        Raises:
            AppendRefusedError: Definite: not committed. Abort.
            AppendUnknownError: Committed or not: call ``init()``, then read the log.
            FencedError: Not committed, and a newer user has the id. Never init again.
        """
        self._end(Operation.COMMIT, committed=True)

    def abort(self) -> None:
        """Abort the open transaction, if any; no ``read_committed`` reader will see any of it.

        Raises:
            AppendUnknownError: Outcome unknown: call ``init()``, which aborts the transaction.
            FencedError: Aborted by a newer user of the id. Never init again.
        """
        self._end(Operation.ABORT, committed=False)

    def close(self) -> None:
        """Close the connections, after aborting an open transaction if the broker answers."""
        if PERMISSIONS[self._state, Operation.CLOSE] is Permission.NOTHING:
            return
        try:
            if self._state in (AppenderState.IN_TRANSACTION, AppenderState.MUST_ABORT):
                self.abort()
        except Exception as exc:  # the coordinator's time-out or the next init ends the transaction anyway
            logger.warning("appender.closed transactional_id=%s transaction=open reason=%s", self.transactional_id, exc)
        finally:
            self._move(Operation.CLOSE, Result.OK)
            self._give_back()

    def end_offset(self, topic: str, isolation: Isolation = Isolation.READ_UNCOMMITTED, partition: int = 0) -> int:
        """Return the end of a partition: its high watermark, or its last stable offset for ``READ_COMMITTED``.

        Uses the same connection as appends, so it costs one short round trip. Allowed in any state but CLOSED, and
        leaves the state unchanged.

        Raises:
            TopicNotFoundError, NotAuthorizedError, KafkaUnavailableError
        """
        if self._state is AppenderState.CLOSED:
            raise self._invalid("end_offset")
        with self._using():
            return read_end_offset(
                self._cluster,
                topic,
                partition,
                isolation,
                retry_timeout_s=self._cluster.bounded_s(self._retry_timeout_ms / 1000),
                unknown_topic_timeout_s=self._unknown_topic_timeout_ms / 1000,
            )

    def is_locked(self) -> bool:
        """Return True while markers of the last transaction are missing: Kafka starts no other one with this id.

        Raises:
            KafkaUnavailableError: The coordinator did not say.
        """
        try:
            with self._using():
                return self._coordination.is_locked()
        except RequestRefusedError as exc:
            raise KafkaUnavailableError(str(exc)) from exc

    @property
    def _current(self) -> ProducerFields:
        if self._producer is None:
            raise self._invalid("append")
        return self._producer

    def _end(self, operation: Operation, *, committed: bool) -> None:
        if not self._enter(operation):
            return
        with self._using(), self._translated(operation):
            self._producer = self._coordination.end(self._session, self._current, committed=committed)
            self._session = ProduceSession()
            self._move(operation, Result.OK)

    def _enter(self, operation: Operation) -> bool:
        """Return whether the operation has to run; raise if the state does not allow it."""
        match PERMISSIONS[self._state, operation]:
            case Permission.RUN:
                return True
            case Permission.NOTHING:
                return False
            case Permission.REFUSE:
                raise self._invalid(operation.value)
            case Permission.FENCED:
                raise self._fenced("PRODUCER_FENCED")
            case never:
                assert_never(never)

    def _move(self, operation: Operation, result: Result) -> None:
        state = AFTER[operation, result]
        if operation is Operation.INIT and result is not Result.OK and self._producer is None:
            state = AppenderState.FENCED if result is Result.FENCED else AppenderState.NEW
        if state is not self._state:
            logger.debug(
                "appender.state transactional_id=%s operation=%s result=%s from=%s to=%s",
                self.transactional_id,
                operation.value,
                result.value,
                self._state.value,
                state.value,
            )
        self._state = state
        if result is Result.UNKNOWN and self._held is not None:
            self._held[0].forget()

    @contextmanager
    def _translated(self, operation: Operation) -> Iterator[None]:
        """Translate errors from the layers below into the documented ones, and move to the state each leads to."""
        try:
            yield
        except RequestRefusedError as exc:
            if exc.error is ErrorCode.concurrent_transactions and exc.meaning is Meaning.REFUSED:
                if self._session.joined:  # unlocked while the last answers came
                    raise self._failed(operation, exc.meaning, exc.error, None, exc) from exc
                self._move(operation, Result.LOCKED)
                self._session = ProduceSession()
                raise KafkaUnavailableError(
                    f"Kafka has locked transactional id {self.transactional_id}, since a partition of its last "
                    f"transaction takes no marker ({exc}); nothing was sent",
                    code=ID_LOCKED,
                ) from exc
            topic = exc.topic if exc.error in codes.CONTENT | codes.TOPIC else None
            raise self._failed(operation, exc.meaning, exc.error, topic, exc) from exc
        except KafkaUnavailableError as exc:
            self._move(operation, Result.UNKNOWN)
            if operation is Operation.INIT:
                raise
            raise self._unknown(operation, exc) from exc
        except Exception:
            # Not a batch, or the caller's iterator failed. If nothing was sent, the state stays as it was.
            if operation is Operation.INIT or self._session.connections:
                self._move(operation, Result.REFUSED)
            else:
                self._session = ProduceSession()
            raise
        except BaseException:
            self._move(operation, Result.UNKNOWN)
            raise

    def _failed(
        self, operation: Operation, meaning: Meaning, code: ErrorCode, topic: str | None, exc: Exception
    ) -> Exception:
        if meaning is Meaning.FENCED and operation in (Operation.APPEND, Operation.SEND_OFFSETS):
            meaning = self._fenced_or_timed_out()
        match meaning:
            case Meaning.FENCED:
                self._move(operation, Result.FENCED)
                return self._fenced(codes.name(code))
            case Meaning.REFUSED | Meaning.DENIED | Meaning.FOLLOW_UP:
                self._move(operation, Result.REFUSED)
                return self._refused(operation, meaning, code, topic, exc)
            case Meaning.UNKNOWN | Meaning.EXPIRED | Meaning.RETRY | Meaning.REFRESH | Meaning.DONE:
                self._move(operation, Result.UNKNOWN)
                if operation is Operation.INIT:
                    return KafkaUnavailableError(f"cannot take transactional id {self.transactional_id}: {exc}")
                return self._unknown(operation, exc)
            case never:
                assert_never(never)

    def _fenced_or_timed_out(self) -> Meaning:
        """Tell fencing from the coordinator's time-out: both raise the epoch, only fencing means a newer user."""
        try:
            match self._coordination.standing(self._current):
                case ProducerStanding.TAKEN:
                    return Meaning.FENCED
                case ProducerStanding.TIMED_OUT:
                    return Meaning.REFUSED
                case ProducerStanding.OURS:
                    return Meaning.UNKNOWN
                case never:
                    assert_never(never)
        except (RequestRefusedError, KafkaUnavailableError) as exc:
            logger.debug("fence.unknown transactional_id=%s reason=%s", self.transactional_id, exc)
            return Meaning.UNKNOWN

    def _refused(
        self, operation: Operation, meaning: Meaning, code: ErrorCode, topic: str | None, exc: Exception
    ) -> Exception:
        resource = f"transactional id {self.transactional_id}" if topic is None else f"topic {topic}"
        match operation, meaning:
            case Operation.INIT, Meaning.DENIED:
                return NotAuthorizedError(f"not allowed to use {resource}: {codes.name(code)}", resource=resource)
            case Operation.INIT, _:
                why = codes.name(code)
                if code is ErrorCode.invalid_transaction_timeout:
                    why += f": {self._transaction_timeout_ms} ms are more than its transaction.max.timeout.ms"
                return ConfigError(f"the broker refuses to set up {resource}: {why}")
            case Operation.ABORT, _:
                return self._unknown(operation, exc)
            case _:
                return AppendRefusedError(
                    f"{operation.value} refused, nothing of this transaction can be committed: {exc}",
                    topic=topic,
                    kafka_error=codes.name(code),
                    batch=exc.batch if isinstance(exc, RequestRefusedError) and code in codes.CONTENT else None,
                )

    def _unknown(self, operation: Operation, exc: Exception) -> AppendUnknownError:
        topic = batch = None
        kafka_error = ""
        if isinstance(exc, RequestRefusedError) and exc.topic is not None and exc.error in _OF_ONE_TOPIC:
            topic, kafka_error = exc.topic, codes.name(exc.error)
            batch = exc.batch if exc.error == ErrorCode.unknown_server_error else None
        return AppendUnknownError(
            f"outcome of {operation.value} with transactional id {self.transactional_id} is unknown: {exc}; "
            "init, then read the log",
            transactional_id=self.transactional_id,
            topic=topic,
            batch=batch,
            kafka_error=kafka_error,
            why=f"{operation.value}: {exc}",
        )

    def _fenced(self, kafka_error: str) -> FencedError:
        return FencedError(
            f"transactional id {self.transactional_id} has been taken over by a newer user ({kafka_error}); "
            "what was open has been aborted",
            transactional_id=self.transactional_id,
            kafka_error=kafka_error,
        )

    def _invalid(self, request: str) -> ConflictError:
        return ConflictError(
            f"cannot {request} with transactional id {self.transactional_id}: it is {self._state.value}",
            transaction=self.transactional_id,
            state=self._state.value,
            request=request,
            code="invalid-state",
        )
