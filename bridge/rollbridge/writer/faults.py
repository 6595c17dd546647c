"""The errors of plain writes, as functions that make them: a new object each time, because it will be raised."""

from __future__ import annotations

from collections.abc import Callable

from rollbridge.errors import InvalidRequestError, OutcomeUnknown, RollbridgeError, UnavailableError
from rollbridge.kafka.errors import NotAuthorizedError

Fault = Callable[[], RollbridgeError]


def denied(topic: str, code: str) -> Fault:
    """The principal may not write there."""
    return lambda: NotAuthorizedError(f"not allowed to write to topic {topic} ({code})", resource=f"topic {topic}")


def refused(topic: str, code: str, detail: str | None) -> Fault:
    """The broker refuses the record for good."""
    why = f" ({detail})" if detail else ""
    return lambda: InvalidRequestError(f"topic {topic} refuses the record: {code}{why}; it was not written")


def unknown(topic: str, why: str) -> Fault:
    """Nobody can tell whether it was written."""
    return lambda: OutcomeUnknown(
        f"the record may have been written to {topic} or not: {why}; read the segment to find out", transaction=""
    )


def late(topic: str, timeout_s: float, doubtful: bool) -> Fault:
    """No answer came within the delivery time-out."""
    if doubtful:
        return unknown(topic, f"no broker has answered for {timeout_s:g} s")
    return lambda: UnavailableError(
        f"the record could not be written to {topic} within {timeout_s:g} s; it was not written"
    )


def closed_before() -> RollbridgeError:
    """The connection was closed before the record was written."""
    return InvalidRequestError("this connection is closed; connect again; the record was not written")


def closed() -> RollbridgeError:
    """The connection was closed while the record was under way."""
    return OutcomeUnknown("the connection was closed before the brokers had answered for this record", transaction="")
