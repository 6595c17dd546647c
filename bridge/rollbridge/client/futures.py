"""Futures that cost next to nothing: thousands of writes share the one outcome of their transaction.

A :class:`Completion` is what a transaction has one of: settled by the commit log, waited for by anybody. A
:class:`~rollbridge.client.slots.WriteFuture` is three references; its DLSN is computed from the commit record when
somebody asks for it. So all futures of a transaction resolve, or fail, in the same instant, and there never are some of
each.

Source: DistributedLog transactions, "all the write futures will be satisfied with their written DLSNs […] failed
together. there is no partial failure state".
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

from rollbridge.calls.forks import module_lock
from rollbridge.calls.futures import LightFuture
from rollbridge.calls.user_code import call_back
from rollbridge.errors import (
    CorruptDataError,
    Fenced,
    IncompleteError,
    OutcomeUnknown,
    RollbridgeError,
    TransactionAborted,
    TransactionClosed,
    TransactionCommitted,
    TransactionExpired,
    TransactionRefused,
)
from rollbridge.model.avro import encode_text
from rollbridge.model.control import (
    EXPIRED,
    FENCED,
    ControlKind,
    ControlRecord,
    decode_control,
    has_reason,
    owner_of,
    peek_kind,
)
from rollbridge.model.identifiers import OWNER_PART, TransactionId

logger = logging.getLogger(__name__)

T = TypeVar("T")
_NAME_AT = 2
"""Where the client name stands in a control record that has no reason: behind the kind and an empty text."""
_creation: Final = module_lock()
"""Guards the creation of events and callback lists, which most transactions never need."""


class Author(Protocol):
    """Whoever writes a transaction in this process."""

    def cut_older(self, than_s: float) -> None:
        """Send the batches that were started before ``than_s``, in monotonic seconds."""

    def leave(self) -> None:
        """Let go, in a forked process."""

    def release(self) -> None:
        """Let go: the outcome is known."""


class Completion:
    """The outcome of one transaction, shared by all who write it or wait for it in this process.

    Attributes:
        closed: Whether nothing may be written any more: its end was asked for here, or is known.
        settled: Whether the outcome is known.
        failure: The first send that failed, if one did.
        writers: Who writes the transaction in this process, while its outcome is not known.
        client_name: Who has begun it; None if that is not known here.
        epoch: Of the session in which it is written here; 0 if it is none.
    """

    __slots__ = (
        "_callbacks",
        "_event",
        "_fenced",
        "_record",
        "_unknown",
        "_value",
        "client_name",
        "closed",
        "epoch",
        "failure",
        "key",
        "offset",
        "settled",
        "writers",
    )

    def __init__(self, key: bytes, client_name: str | None = None, epoch: int = 0) -> None:
        self.key = key
        self.client_name = client_name
        self.epoch = epoch
        self.closed = False
        self.settled = False
        self.failure: Exception | None = None
        self.writers: tuple[Author, ...] = ()
        self.offset = -1
        self._value: bytes | None = None
        self._record: ControlRecord | None = None
        self._unknown: str | None = None
        self._fenced = False
        self._event: threading.Event | None = None
        self._callbacks: list[Callable[[], object]] | None = None

    @property
    def transaction(self) -> TransactionId:
        """The id of the transaction."""
        return TransactionId.from_bytes(self.key)

    def is_of_another(self, value: bytes) -> bool:
        """Whether a control record with this id says of another client's transaction how it ended.

        Ids are given out again by a ZooKeeper that was set back and has not been repaired.
        """
        name = self.client_name
        if name is None or value.startswith(encode_text(name), _NAME_AT):
            return False  # the usual case: it has no reason, and nothing is decoded
        try:
            return decode_control(self.key, value).client_name != name
        except CorruptDataError:
            return False

    def settle(self, value: bytes, offset: int) -> None:
        """Take the control record from the commit log; it is decoded when somebody asks for it."""
        self._value = value
        self.offset = offset
        self._finish()

    def give_up(self, why: str) -> None:
        """Let everybody who waits go, with an unknown outcome: this process will not learn it."""
        if not self.settled:
            self._unknown = why
            self._finish()

    def leave(self, why: str) -> None:
        """As :meth:`give_up`, in a forked process: there is nobody to wake, and no lock that can be trusted."""
        for writer in self.writers:
            writer.leave()
        self._unknown = why
        self._event, self._callbacks, self.writers = None, None, ()
        self.closed = self.settled = True

    def fence(self) -> None:
        """Somebody newer has the say; what became of the transaction is not for this process to wait for."""
        if not self.settled:
            self._fenced = True
            self._finish()

    def fail(self) -> None:
        """The transaction can only be aborted, because a send failed before its commit was asked for."""
        self._finish()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the outcome; False if it is not known in time."""
        with _creation:
            if self.settled:
                return True
            event = self._event
            if event is None:
                event = self._event = threading.Event()
        return event.wait(timeout_s)

    def when_settled(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once the outcome is known: now, or on the thread that tails the commit log."""
        with _creation:
            if not self.settled:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        call_back(callback, logger, "a transaction")

    @property
    def record(self) -> ControlRecord | None:
        """The control record; None while, or if for good, the outcome is not known here."""
        if self._record is None and self._value is not None:
            self._record = decode_control(self.key, self._value)
        return self._record

    def error(self) -> RollbridgeError | None:
        """Why a settled transaction is not committed; None if it is. A new object each time: it will be raised."""
        if peek_kind(self._value) is ControlKind.COMMIT:
            return None  # the usual case, and nothing has to be decoded for it
        record = self.record
        name = str(self.transaction)
        if self._fenced or (record is not None and record.reason == FENCED):
            return self.fenced_error()
        if record is None:
            if self._unknown is not None:
                return OutcomeUnknown(
                    f"the outcome of transaction {name} is not known: {self._unknown}", transaction=name
                )
            return self._incomplete(name)
        if record.reason == EXPIRED:
            return TransactionExpired(
                f"the lease of transaction {name} ran out before a commit was asked for; nothing of it is visible",
                transaction=name,
                reason=record.reason,
            )
        if self.failure is not None:
            return self._incomplete(name)
        if record.refused is not None:
            return TransactionRefused(
                f"{record.refused}; transaction {name} is aborted, nothing of it is visible",
                transaction=name,
                stream=record.refused.stream,
                key=record.refused.key,
                expected=record.refused.expected,
                actual=record.refused.actual,
            )
        return TransactionAborted(
            f"transaction {name} is aborted ({record.reason}); nothing of it is visible",
            transaction=name,
            reason=record.reason,
        )

    def refusal(self) -> RollbridgeError:
        """Why nothing can be written any more."""
        name = str(self.transaction)
        if not self.settled:
            return TransactionClosed(
                f"the end of transaction {name} was asked for; this record was not written", transaction=name
            )
        return self.error() or self.committed_error()

    def committed_error(self) -> TransactionCommitted:
        """The refusal of a request that a committed transaction can not meet."""
        name = str(self.transaction)
        return TransactionCommitted(
            f"transaction {name} is committed; this request changed nothing", transaction=name, reason="committed"
        )

    def fenced_error(self) -> Fenced:
        """What an owner is told who has been replaced."""
        return Fenced(
            f"transaction {self.transaction} belongs to a newer session of its client, or to whoever resumed it; "
            "this request changed nothing: ask for the outcome by the id"
        )

    @property
    def owner(self) -> int:
        """The part of who asked for the commit of a committed transaction: 0 unless it was resumed."""
        record = self.record if self._value is not None and has_reason(self._value) else None
        return OWNER_PART if record is None else owner_of(record.reason)

    def _incomplete(self, name: str) -> IncompleteError:
        error = IncompleteError(
            f"a record of transaction {name} could not be sent ({self.failure}), so the transaction is aborted; "
            "nothing of it is visible"
        )
        error.__cause__ = self.failure
        return error

    def _finish(self) -> None:
        with _creation:
            self.closed = True
            self.settled = True
            event, callbacks, self._callbacks = self._event, self._callbacks, None
            writers, self.writers = self.writers, ()
        if event is not None:
            event.set()
        for callback in callbacks or ():
            call_back(callback, logger, "a transaction")
        for writer in writers:
            writer.release()


class OutcomeFuture(LightFuture[T]):
    """The answer of something that ends with its transaction."""

    __slots__ = ()

    @property
    @abstractmethod
    def _completion(self) -> Completion:
        """Whose outcome decides."""

    @abstractmethod
    def _value(self) -> T:
        """The result, computed after the outcome is known; raises the error."""

    def result(self, timeout: float | None = None) -> T:
        """Wait for the outcome of the transaction.

        Args:
            timeout: Seconds; None waits without end.

        Raises:
            TimeoutError: not known in time; ask again.
            TransactionAborted, TransactionExpired, IncompleteError: nothing of the transaction is visible.
            OutcomeUnknown: this process will not learn it.
        """
        completion = self._completion
        if not completion.settled and not completion.wait(timeout):
            raise TimeoutError(f"the outcome of transaction {completion.transaction} is not known after {timeout} s")
        return self._value()

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._completion.settled

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback`` with this future once the outcome is known.

        It runs on the thread that tails the commit log and must not block; its exceptions are logged.
        """
        self._completion.when_settled(lambda: callback(self))
