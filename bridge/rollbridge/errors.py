"""Errors of rollbridge, with the answer to "did it happen, and may I retry?".

The tree::

    RollbridgeError                       also: zookeeper-outdated (it was restored from a backup; repair it)
    ├─ InvalidRequestError               nothing was written; the request can never succeed as it is. Also:
    │  │                                 group-mismatch, invalid-ranges, invalid-timeout,
    │  │                                 offset-metadata-too-large, row-refused (of a data frame; carries its number
    │  │                                 in its partition), unsupported-broker, wrong-cluster
    │  ├─ InvalidNameError               scope, stream, group or client name
    │  ├─ RecordTooLargeError            refused at write time
    │  ├─ TransactionTooLargeError       refused at write time
    │  ├─ TransactionIdOutOfOrderError   a user's transaction id is lower than the one before
    │  ├─ ConfigError                    one or several settings, all named
    │  ├─ AuthenticationError            one side refused the other's identity
    │  └─ NotAuthorizedError             the broker denies an operation; carries the resource
    ├─ NotFoundError                     nothing was written. Also: nothing-served (no coordinator has been there)
    │  ├─ StreamNotFoundError            also: scope-not-found
    │  ├─ TransactionNotFoundError
    │  ├─ OutcomeExpiredError            of a transaction; it has been forgotten
    │  └─ TruncatedError                 records to be read from have been deleted
    ├─ ConflictError                     nothing was written by this request; the state is not what it assumes. Also:
    │  │                                 invalid-state, invalid-transition (both with transaction, state, request),
    │  │                                 replay-differs, rolled-back, stream-busy, topic-mismatch
    │  ├─ StreamExistsError              also: stream-differs (from what was asked for; names each setting)
    │  ├─ StreamRecreatedError           the stream was deleted and created again; the request names the former one
    │  ├─ CasWriteError                  a condition does not hold; carries what was expected and the actual SN
    │  └─ TransactionClosedError         write or commit after the end; carries the outcome when known
    │     ├─ TransactionAbortedError     carries the reason. Also: already-aborted, transaction-expired
    │     │  └─ TransactionRefusedError  a condition of it does not hold; a CasWriteError as well
    │     └─ TransactionCommittedError   also: already-committed (its abort was asked for)
    ├─ IncompleteError                   a send of this transaction failed; it can only be aborted
    ├─ OutcomeUnknownError               may have been written; carries the id to ask again with
    │  └─ CasOutcomeUnknownError         a conditional write; carries the token to ask again with
    ├─ UnknownWriteError                 a write to ZooKeeper may have been carried out: read whether it was
    ├─ TransactionPreserverClosedError   outcomes are not remembered here, so it is unknown
    ├─ UnavailableError                  nothing is known to be written; try again later. Also: seal-timeout
    │  ├─ CoordinatorUnavailableError
    │  ├─ KafkaUnavailableError          also: transactional-id-locked (nothing was sent with it)
    │  ├─ ZooKeeperUnavailableError      also: zookeeper-untrusted (TLS failed: waiting does not mend that)
    │  └─ BackpressureError              the client's buffer stayed full for the whole time allowed
    ├─ FencedError                       a newer user of the same identity exists; stop
    │  └─ ClientFencedError              a newer session of the same client name, or owner of the transaction
    ├─ CorruptDataError                  bytes that are not what they claim to be; carries where
    │  └─ NewerFormatError               a newer release wrote them: upgrade this one
    └─ LocalEnvironmentError             this machine lacks something (Java, a free port, disk). Also:
                                         checksum-mismatch (of a file that was fetched)

Errors carry data as attributes, not just text. ``code`` is stable and printed by ``--json``: that of the class, or one
of those behind "also", for what needs no class of its own. ``exit_code`` is the process exit code that the command line
uses.
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, ClassVar, Final

from rollbridge.base.errors import ConflictError as ConflictError
from rollbridge.base.errors import CorruptDataError as CorruptDataError
from rollbridge.base.errors import InvalidNameError as InvalidNameError
from rollbridge.base.errors import InvalidRequestError as InvalidRequestError
from rollbridge.base.errors import NewerFormatError as NewerFormatError
from rollbridge.base.errors import NotFoundError as NotFoundError
from rollbridge.base.errors import RollbridgeError as RollbridgeError
from rollbridge.base.errors import StreamRecreatedError as StreamRecreatedError
from rollbridge.base.errors import TruncatedError as TruncatedError
from rollbridge.base.errors import UnavailableError as UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rollbridge.base.sn import SN, Token

ZOOKEEPER_UNTRUSTED: Final = "zookeeper-untrusted"
CAS_WRITE_EXCEPTION: Final = 525
"""Status code of a refused conditional write, as in DistributedLog's proposal."""
EVENTS_SHOWN_MAX: Final = 3
"""Events in the text of an error; its attribute ``events`` has them all."""


class WithEvents:
    """Mixin of errors about a transaction: the last events that its leader saw of it, if the leader reports them.

    Attributes:
        events: One line per event, oldest first: time, old and new state, and cause. Empty if unknown;
            ``b.story(...)`` and ``rollbridge txn describe`` ask again.
    """

    args: tuple[object, ...]
    events: tuple[str, ...] = ()

    def tell(self, events: Iterable[str]) -> None:
        """Set the events, and append the last of them to the text."""
        self.events = tuple(events)
        if self.events:
            self.args = (f"{self}; its leader saw: {'; '.join(self.events[-EVENTS_SHOWN_MAX:])}",)


class RecordTooLargeError(InvalidRequestError):
    """The record, headers included, exceeds the limit; it was not written and the transaction stays usable."""

    code = "record-too-large"

    def __init__(self, message: str, *, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(message)
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class TransactionTooLargeError(InvalidRequestError):
    """The transaction, or the message that commits it, would exceed its limit; the request was not accepted."""

    code = "transaction-too-large"

    def __init__(self, message: str, *, limit_bytes: int) -> None:
        super().__init__(message)
        self.limit_bytes = limit_bytes


class TransactionIdOutOfOrderError(InvalidRequestError):
    """A transaction id given by the user is lower than the one before; the record was not written.

    Source: DistributedLog, ``TransactionIdOutOfOrderException``.
    """

    code = "transaction-id-out-of-order"

    def __init__(self, message: str, *, transaction_id: int, last: int) -> None:
        super().__init__(message)
        self.transaction_id = transaction_id
        self.last = last


class ConfigError(InvalidRequestError):
    """One or several settings are wrong; the message names each.

    Attributes:
        faults: Descriptions, each beginning with the key of the setting.
    """

    code = "config"

    def __init__(self, *faults: str) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults

    @classmethod
    def raise_for(cls, faults: Iterable[str]) -> None:
        """Raise an error that names all faults, if there are any."""
        if named := tuple(faults):
            raise cls(*named)


class StreamNotFoundError(NotFoundError):
    """The stream does not exist, or no stream was ever created in its scope."""

    code = "stream-not-found"
    codes: ClassVar[tuple[str, ...]] = ("scope-not-found",)


class TransactionNotFoundError(NotFoundError):
    """No open transaction has this id."""

    code = "transaction-not-found"


class OutcomeExpiredError(NotFoundError):
    """The transaction is not open, and its outcome, if it had one, is past its retention and has been forgotten."""

    code = "outcome-expired"


class StreamExistsError(ConflictError):
    """A stream of this name exists already; nothing was changed.

    Attributes:
        differences: Settings that are others than were asked for, each as ``name: it is X, and Y was asked for``.
    """

    code = "stream-exists"
    codes: ClassVar[tuple[str, ...]] = ("stream-differs",)

    def __init__(self, message: str, *, code: str = "", differences: Iterable[str] = ()) -> None:
        super().__init__(message, code=code)
        self.differences = tuple(differences)


class CasWriteError(ConflictError):
    """The condition of a conditional write does not hold; nothing of it is visible to a ``read_committed`` reader.

    Attributes:
        status_code: 525, the number in DistributedLog's proposal.
        expected: SN that the condition expected.
        actual: SN of the last record in the scope of the condition, to expect next time. EMPTY if there is none,
            ANY if that record has been truncated.
    """

    code = "cas-write"

    def __init__(self, message: str, *, expected: SN, actual: SN) -> None:
        super().__init__(message)
        self.status_code = CAS_WRITE_EXCEPTION
        self.expected = expected
        self.actual = actual


class TransactionClosedError(ConflictError, WithEvents):
    """The transaction has ended, or its end was asked for; this request wrote nothing."""

    code = "transaction-closed"

    def __init__(self, message: str, *, transaction: str, reason: str = "", code: str = "") -> None:
        super().__init__(message, code=code)
        self.transaction = transaction
        self.reason = reason


class TransactionCommittedError(TransactionClosedError):
    """The transaction is committed; the opposite request cannot be met."""

    code = "transaction-committed"
    codes: ClassVar[tuple[str, ...]] = ("already-committed",)


class TransactionAbortedError(TransactionClosedError):
    """The transaction is aborted: none of its records is or will be visible; ``reason`` says why.

    Its code is ``already-aborted`` if a commit was asked for after that, and ``transaction-expired`` if its lease ran
    out before.
    """

    code = "transaction-aborted"
    codes: ClassVar[tuple[str, ...]] = ("already-aborted", "transaction-expired")


class TransactionRefusedError(TransactionAbortedError, CasWriteError):
    """A condition of the transaction did not hold at its merge; the transaction is aborted.

    Attributes:
        stream: Stream of the condition, ``scope/stream``.
        key: Key of the condition.
        expected, actual: See :class:`CasWriteError`.
    """

    code = "transaction-refused"

    def __init__(
        self, message: str, *, transaction: str, stream: str, key: bytes | None, expected: SN, actual: SN
    ) -> None:
        RollbridgeError.__init__(self, message)
        self.status_code = CAS_WRITE_EXCEPTION
        self.transaction = transaction
        self.reason = message
        self.stream = stream
        self.key = key
        self.expected = expected
        self.actual = actual


class IncompleteError(RollbridgeError):
    """A send of this transaction failed, so it can only be aborted; nothing of it is visible."""

    code = "incomplete"
    exit_code = 5


class OutcomeUnknownError(RollbridgeError, WithEvents):
    """The request may or may not have taken effect; ask again with ``transaction``."""

    code = "outcome-unknown"
    exit_code = 6

    def __init__(self, message: str, *, transaction: str) -> None:
        super().__init__(message)
        self.transaction = transaction


class CasOutcomeUnknownError(OutcomeUnknownError):
    """A conditional write may or may not have taken effect; ask with ``writer.outcome(error.token)``.

    Attributes:
        token: Identifies the write; its text form can be stored, and used from another process.
    """

    code = "cas-outcome-unknown"

    def __init__(self, message: str, *, token: Token) -> None:
        super().__init__(message, transaction=str(token))
        self.token = token


class UnknownWriteError(RollbridgeError):
    """The connection to ZooKeeper was lost with a write in flight, which may have been carried out.

    Read, or make the request again, to learn whether it was.
    """

    code = "write-unknown"
    exit_code = 6


class TransactionPreserverClosedError(RollbridgeError):
    """The group does not remember outcomes of its transactions, so this one cannot be told.

    Attributes:
        status_code: 26, the number in PIP-255.
    """

    code = "transaction-preserver-closed"
    exit_code = 6
    status_code: ClassVar[int] = 26


class CoordinatorUnavailableError(UnavailableError):
    """No coordinator answered within the time allowed."""

    code = "coordinator-unavailable"


class KafkaUnavailableError(UnavailableError):
    """No broker answered within the time allowed."""

    code = "kafka-unavailable"
    codes: ClassVar[tuple[str, ...]] = ("transactional-id-locked",)


class ZooKeeperUnavailableError(UnavailableError):
    """ZooKeeper did not answer within the time allowed."""

    code = "zookeeper-unavailable"
    codes: ClassVar[tuple[str, ...]] = (ZOOKEEPER_UNTRUSTED,)


class BackpressureError(UnavailableError):
    """The client's buffer stayed full for the whole time allowed; this record was not written."""

    code = "backpressure"


class FencedError(RollbridgeError):
    """A newer user of the same identity has taken over; this one must stop and never retry."""

    code = "fenced"
    exit_code = 5


class ClientFencedError(FencedError):
    """A newer session of the same client name has begun, or another process has resumed the transaction.

    This request changed nothing. The outcome of a transaction can be asked for by its id, from any session.
    """

    code = "client-fenced"


class NotAuthorizedError(InvalidRequestError):
    """The broker denied the operation; nothing was written.

    Attributes:
        resource: Resource that the permission is missing on, such as ``transactional id merge-1``.
    """

    code = "not-authorized"

    def __init__(self, message: str, *, resource: str) -> None:
        super().__init__(f"{message}; nothing was written; docs/security.md says which rights each role needs")
        self.resource = resource


class AuthenticationError(InvalidRequestError):
    """TLS or SASL failed: one side refused the other's identity; nothing was written."""

    code = "authentication"


class LocalEnvironmentError(RollbridgeError):
    """This machine lacks something the command needs; the message names it."""

    code = "environment"
    codes: ClassVar[tuple[str, ...]] = ("checksum-mismatch",)
    exit_code = 8


def class_of(code: str, base: type[RollbridgeError] = RollbridgeError) -> type[RollbridgeError] | None:
    """Return the class, from ``base`` down, of an error with this code; None if there is none."""
    if code == base.code or code in vars(base).get("codes", ()):
        return base
    return next((found for kind in base.__subclasses__() if (found := class_of(code, kind))), None)


if not TYPE_CHECKING:  # names that are wrong are faults

    def __getattr__(name):
        """Return the class that has taken the place of one of the last release, such as ``StreamBusyError``.

        It is wider: only its ``code`` says what the former one did.
        """
        code = re.sub("(?<!^)(?=[A-Z])", "-", name.removesuffix("Error")).lower().replace("zoo-keeper", "zookeeper")
        kind = class_of(code)
        if kind is None or kind.code == code:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        why = f"rollbridge.errors.{name} is a {kind.__name__} now, with the code {code!r}"
        warnings.warn(why, FutureWarning, stacklevel=2)
        return kind
