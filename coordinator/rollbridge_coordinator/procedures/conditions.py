"""Conditions of a transaction: look, where its records stand, at what stands before them, and decide.

A transaction with conditions has a round of its own. Its frames are appended first, invisible, because their offsets
fix which records are earlier; then the leader waits until all of these are committed or aborted, looks at the last one
in the scope of each condition, and commits the round or aborts it. In a rolling commit the segments that the
conditions are about are sealed before, so nothing can come between.

A transaction may be larger than a batch, and somebody else may append between two of its batches. What they wrote can
not be told from something that was there before, as long as the round is open. If it is in the scope of a condition,
the round is aborted and done again, behind it.

Source: DistributedLog CAS proposal; DESIGN of conditional writes in docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from rollbridge.errors import InvalidRequestError
from rollbridge.model.buffered import BufferedTransaction, FrameRef
from rollbridge.model.cas import Scope, holds, place_of
from rollbridge.model.conditions import RefusedCondition, StreamCondition
from rollbridge.model.course import Course
from rollbridge.model.epochs import EpochHistory
from rollbridge.model.sn import ANY
from rollbridge_coordinator.state.effects import Found, Query, Span, Undecided
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.planning import conditions_of
from rollbridge_coordinator.state.steps import Steps, look

TRIES = 5
"""How often a round is done again because somebody else wrote in between."""


class Verdict(Enum):
    """What a look at the conditions of a transaction says, unless one of them is not met."""

    HOLD = "hold"
    DISTURBED = "disturbed"


@dataclass(frozen=True, slots=True)
class NotMet:
    """The transaction has to end as aborted; ``condition`` is the one that does not hold, if that is why."""

    reason: str
    condition: RefusedCondition | None = None


@dataclass(frozen=True, slots=True)
class Before:
    """What the streams of a rolling commit were before it: the course of a key ends at a sealed segment.

    Attributes:
        history: The epochs before the new ones.
        whole: All epochs, which know where the others have ended.
    """

    history: EpochHistory
    whole: EpochHistory


NOTHING_ROLLED: Mapping[str, Before] = {}
"""No stream is being rolled."""


def check_conditions(
    group: GroupState,
    transaction: BufferedTransaction,
    items: Sequence[tuple[str, FrameRef]],
    offsets: Sequence[int],
    rolled: Mapping[str, Before],
) -> Steps[Verdict | NotMet]:
    """Decide whether the conditions of a transaction hold.

    Args:
        group: State of the group.
        transaction: The transaction.
        items: Its frames, and the topics to which they were appended.
        offsets: Where the first record of each stands.
        rolled: Streams that are being rolled.
    """
    spans: dict[str, list[Span]] = {}
    for (topic, frame), offset in zip(items, offsets, strict=True):
        spans.setdefault(topic, []).append(Span(offset, offset + frame.records))
    queries: list[Query] = []
    for item in conditions_of(transaction):
        try:
            queries.append(_query(group, transaction, item, spans, rolled))
        except InvalidRequestError as fault:
            return NotMet(f"a condition can never hold: {fault}")
    answers = yield from look(queries)
    for query, answer in zip(queries, answers, strict=True):
        if isinstance(answer, Undecided):
            return NotMet(f"undecided: {answer.why}; begin the transaction again")
        # A refusal rests on what is committed, so it stands whatever has come in between.
        if not holds(query.condition, answer.last, query.course.active_base + answer.end, query.course):
            return (yield from _not_met(query, answer))
    disturbed = any(isinstance(answer, Found) and answer.disturbed for answer in answers)
    return Verdict.DISTURBED if disturbed else Verdict.HOLD


def _not_met(query: Query, answer: Found) -> Steps[NotMet]:
    actual = answer.last
    if actual.empty and query.since is not None:
        # Only what stands after the expected place was looked at; the caller wants to know what is there.
        (again,) = yield from look([replace(query, since=None)])
        actual = again.last if isinstance(again, Found) else ANY
    found = RefusedCondition(str(query.stream), query.condition.key, query.condition.expected, actual)
    return NotMet(str(found), found)


def _query(
    group: GroupState,
    transaction: BufferedTransaction,
    item: StreamCondition,
    spans: Mapping[str, Sequence[Span]],
    rolled: Mapping[str, Before],
) -> Query:
    """What one condition is about.

    Raises:
        InvalidRequestError: it is about nothing that there is.
    """
    names = list(transaction.begin.streams)
    stream = group.streams.get(names[item.stream]) if item.stream < len(names) else None
    if stream is None:
        raise InvalidRequestError(f"there is no stream at place {item.stream} of the transaction")
    name = stream.config.name
    before = rolled.get(str(name))
    history = stream.history if before is None else before.history
    condition = item.condition
    if condition.key is None and len(history.active.segments) > 1:
        raise InvalidRequestError(f"{name} has several segments, so a condition on it needs a key")
    course = Course(history, item.position)
    place = place_of(condition.expected, course)
    # With a transaction id the record itself is wanted, not only whether there is a later one.
    since = place if condition.scope is Scope.KEY and condition.expected.transaction_id is None else None
    if before is None:
        own = tuple(spans.get(name.segment_topic(course.active), ()))
        return Query(name, course, condition, since, own[0].start if own else None, own)
    return Query(name, course, condition, since, before.whole.sealed_end(course.active), ())
