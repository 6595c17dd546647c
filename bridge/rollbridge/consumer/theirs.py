"""What callers of confluent-kafka expect: its exceptions, and its answer of a closed consumer.

Code that was written for it catches ``KafkaException``, and looks at ``args[0].code()``. So that is what
:class:`rollbridge.Consumer` raises; rollbridge's own error is the ``__cause__``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar

from confluent_kafka import KafkaError, KafkaException

from rollbridge.errors import (
    ConflictError,
    FencedError,
    InvalidRequestError,
    NotFoundError,
    OutcomeUnknownError,
    RollbridgeError,
    TruncatedError,
    UnavailableError,
)
from rollbridge.kafka.errors import AuthenticationError, NotAuthorizedError

_CODES: Final[tuple[tuple[type[RollbridgeError], int], ...]] = (
    (NotAuthorizedError, KafkaError.TOPIC_AUTHORIZATION_FAILED),
    (AuthenticationError, KafkaError._AUTHENTICATION),
    (InvalidRequestError, KafkaError._INVALID_ARG),
    (TruncatedError, KafkaError._AUTO_OFFSET_RESET),
    (NotFoundError, KafkaError.UNKNOWN_TOPIC_OR_PART),
    (FencedError, KafkaError._FENCED),
    (ConflictError, KafkaError._CONFLICT),
    (OutcomeUnknownError, KafkaError._TIMED_OUT),
    (UnavailableError, KafkaError._TIMED_OUT),
)
"""Error codes; the first class that matches decides."""


def as_kafka_exception(fault: RollbridgeError) -> KafkaException:
    """Return an error as confluent-kafka would raise it; ``retriable()`` if the same call may succeed later."""
    code = next((code for kind, code in _CODES if isinstance(fault, kind)), KafkaError._FAIL)
    return KafkaException(KafkaError(code, str(fault), retriable=isinstance(fault, UnavailableError)))


class _Checked(Protocol):
    def check_usable(self) -> None: ...


P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=_Checked)


def as_theirs(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """Have a method refuse a closed consumer, and raise rollbridge's errors as confluent-kafka's."""

    @wraps(method)
    def call(self: C, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            self.check_usable()
            return method(self, *args, **kwargs)
        except RollbridgeError as fault:
            raise as_kafka_exception(fault) from fault

    return call
