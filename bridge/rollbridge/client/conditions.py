"""What a user may make a transaction depend on, checked before it is sent as far as that is possible."""

from __future__ import annotations

from rollbridge.client.runtime import Plan, Runtime
from rollbridge.errors import InvalidRequestError, UnavailableError
from rollbridge.model.cas import Condition, Scope, place_of
from rollbridge.model.conditions import CONDITIONS_MAX, KEY_BYTES_MAX, StreamCondition
from rollbridge.model.course import Course
from rollbridge.model.epochs import EpochHistory
from rollbridge.model.expectations import Expected, as_scope, as_sn
from rollbridge.model.keyspace import position_of


def new_condition(
    runtime: Runtime, plan: Plan, stream: str, key: bytes | None, sn: Expected, scope: Scope | str
) -> StreamCondition:
    """The condition that a user states.

    Raises:
        InvalidRequestError: the stream is none of the transaction's, or no record of this key can have that SN.
    """
    place = plan.begin.places.get(stream)
    if place is None:
        raise InvalidRequestError(
            f"{stream} is none of the transaction's streams, which are {', '.join(plan.begin.streams)}; nothing was "
            "sent"
        )
    if not isinstance(key, bytes | None):
        raise InvalidRequestError(f"a key is bytes, not {type(key).__name__}; nothing was sent")
    condition = Condition(as_sn(sn), as_scope(scope), key)
    try:
        _check_place(runtime.catalog.view(stream).history, stream, condition)
    except InvalidRequestError:
        # It may come from an epoch that is not known here yet.
        _check_place(runtime.catalog.read(stream).history, stream, condition)
    return StreamCondition(place, condition)


def with_condition(known: tuple[StreamCondition, ...], condition: StreamCondition) -> tuple[StreamCondition, ...]:
    """The conditions of a transaction with one more.

    Raises:
        InvalidRequestError: they would be too many, or their keys too large.
    """
    whole = sum(len(item.condition.key or b"") for item in (*known, condition))
    if len(known) >= CONDITIONS_MAX or whole > KEY_BYTES_MAX:
        raise InvalidRequestError(
            f"a transaction has at most {CONDITIONS_MAX} conditions, and {KEY_BYTES_MAX} bytes of keys in them; this "
            "one was not taken, the others were"
        )
    return (*known, condition)


def _check_place(history: EpochHistory, stream: str, condition: Condition) -> None:
    if condition.key is None and len(history.active.segments) > 1:
        raise InvalidRequestError(f"{stream} has several segments: a condition needs a key to choose one")
    try:
        course = Course(history, position_of(condition.key))
    except UnavailableError:
        return  # a scale is under way; the leader will see
    place_of(condition.expected, course)
