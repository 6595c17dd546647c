"""Errors of the Kafka adapter, sorted by the one question that matters: is it in the log, and what now?

They hang below the tree of :mod:`rollbridge.errors`::

    RollbridgeError
    ├─ AppendRefusedError          definite: the broker refused; nothing of this transaction can be committed: abort
    ├─ AppendUnknownError          the connection or a deadline was lost: init() again, then read the log
    ├─ UnavailableError
    │  └─ KafkaUnavailable
    │     └─ ConnectionLostError   a request was under way; the broker may or may not have acted on it
    ├─ InvalidRequestError
    │  ├─ NotAuthorizedError       the broker knows us and says no
    │  ├─ AuthenticationError      the broker, or we, refused the other's identity
    │  └─ UnsupportedBrokerError   too old, or transactions v2 switched off
    ├─ NotFoundError
    │  └─ TopicNotFound
    ├─ ConflictError
    │  ├─ InvalidTransitionError
    │  │  └─ InvalidStateError     an operation of the appender that its state does not allow
    │  └─ TopicMismatchError       the topic exists, but not as asked for
    ├─ UnavailableError
    │  └─ SealTimeoutError         a topic that could not be sealed in time; carries which
    └─ FencedError
       └─ ProducerFencedError      a newer user of the transactional id exists: never init again
"""

from __future__ import annotations

from collections.abc import Mapping

from rollbridge.errors import (
    AuthenticationError,
    ConflictError,
    FencedError,
    InvalidRequestError,
    InvalidTransitionError,
    KafkaUnavailable,
    NotFoundError,
    RollbridgeError,
    UnavailableError,
)

__all__ = [
    "AppendRefusedError",
    "AppendUnknownError",
    "AuthenticationError",
    "ConnectionLostError",
    "FencedError",
    "InvalidStateError",
    "KafkaUnavailable",
    "NotAuthorizedError",
    "ProducerFencedError",
    "SealTimeoutError",
    "TopicMismatchError",
    "TopicNotFound",
    "UnsupportedBrokerError",
]


class AppendRefusedError(RollbridgeError):
    """The broker refused, so nothing of this native transaction can be committed: abort it, then change the plan.

    Attributes:
        topic: Topic that was refused, or None where the refusal concerns the transaction as a whole.
        kafka_error: Kafka's name of the error, such as ``MESSAGE_TOO_LARGE``.
        batch: Place of the refused batch among those given to ``append()``, if what is in it is the reason; else None.
    """

    code = "append-refused"
    exit_code = 5

    def __init__(self, message: str, *, topic: str | None, kafka_error: str, batch: int | None = None) -> None:
        super().__init__(message)
        self.topic = topic
        self.kafka_error = kafka_error
        self.batch = batch


class AppendUnknownError(RollbridgeError):
    """What the broker did is unknown: call ``init()``, which aborts or completes what was open, then read the log.

    Attributes:
        transactional_id: Identity to init again.
        topic, batch: Of a batch over which a broker stumbled (``UNKNOWN_SERVER_ERROR``), as it does over malformed
            compressed records: its topic, and its place among those given to ``append()``. A topic without a batch is
            one whose own brokers were away for too long. Else None.
        kafka_error: Kafka's name of the error where ``topic`` is given.
    """

    code = "append-unknown"
    exit_code = 6

    def __init__(
        self,
        message: str,
        *,
        transactional_id: str,
        topic: str | None = None,
        batch: int | None = None,
        kafka_error: str = "",
    ) -> None:
        super().__init__(message)
        self.transactional_id = transactional_id
        self.topic = topic
        self.batch = batch
        self.kafka_error = kafka_error


class ConnectionLostError(KafkaUnavailable):
    """The connection broke or timed out with a request under way; the broker may or may not have acted on it."""

    code = "connection-lost"


class ProducerFencedError(FencedError):
    """A newer user has taken over the transactional id; nothing more can be written with this one, ever.

    Attributes:
        transactional_id: Identity that was taken over.
        kafka_error: Kafka's name of the error.
    """

    def __init__(self, message: str, *, transactional_id: str, kafka_error: str) -> None:
        super().__init__(message)
        self.transactional_id = transactional_id
        self.kafka_error = kafka_error


class InvalidStateError(InvalidTransitionError):
    """The appender's state does not allow this operation; nothing was sent."""

    code = "invalid-state"


class NotAuthorizedError(InvalidRequestError):
    """The broker denied the operation; nothing was written.

    Attributes:
        resource: What the permission is missing on, such as ``transactional id merge-1``.
    """

    code = "not-authorized"

    def __init__(self, message: str, *, resource: str) -> None:
        super().__init__(f"{message}; nothing was written; docs/security.md says which rights each role needs")
        self.resource = resource


class UnsupportedBrokerError(InvalidRequestError):
    """The broker lacks what this adapter needs (transactions v2, Kafka 4.0 or later); nothing was written."""

    code = "unsupported-broker"


class TopicNotFound(NotFoundError):
    """The topic does not exist; nothing was written."""

    code = "topic-not-found"

    def __init__(self, message: str, *, topic: str) -> None:
        super().__init__(message)
        self.topic = topic
        self.resource = f"topic {topic}"


class TopicMismatchError(ConflictError):
    """The topic exists, but with other partitions or settings than asked for; it was left as it is.

    Attributes:
        topic: Name of the topic.
        differences: Setting (or ``partitions``) to what was asked for and what is there.
    """

    code = "topic-mismatch"

    def __init__(self, message: str, *, topic: str, differences: Mapping[str, tuple[str, str]]) -> None:
        super().__init__(message)
        self.topic = topic
        self.resource = f"topic {topic}"
        self.differences = dict(differences)


class SealTimeoutError(UnavailableError):
    """Some topics could not be sealed within the deadline; sealing them again goes on from where it stands.

    Attributes:
        topics: Topic to what it waits for.
    """

    code = "seal-timeout"

    def __init__(self, message: str, *, topics: Mapping[str, str]) -> None:
        super().__init__(message)
        self.topics = dict(topics)
        self.resource = f"topic {min(topics)}" if topics else ""
