"""Questions to the leaders of partitions, asked again until each has answered or the deadline has passed.

Used for what may be asked any number of times. Who leads what is looked up for all topics at once; each leader gets
one request, and all of them work on theirs at the same time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeVar

from kio.schema.errors import ErrorCode
from kio.static.protocol import Payload

from rollbridge.errors import KafkaUnavailable, NotFoundError
from rollbridge.kafka import codes
from rollbridge.kafka.codes import Meaning
from rollbridge.kafka.metadata import Cluster, CodeError, NodeId
from rollbridge.kafka.patience import Backoff, Deadline
from rollbridge.kafka.translate import is_definite, refusal
from rollbridge.kafka.wire import Connection

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R", bound=Payload)
Place = tuple[str, int]
"""A topic and the number of a partition."""

_UNHEARD_OF_S: Final = 0.2
"""How long brokers may say that there is no such topic: not all hear at once of one that has just been made."""
_NOT_THERE_YET_S: Final = 5.0
"""How long the leader itself may do so, while others name it as the leader."""


class Question(NamedTuple):
    """What is asked of a leader: the request for some of its partitions, and how its answer is read."""

    request: Callable[[list[Place]], Payload]
    response_type: type[Payload]
    answers: Callable[[Payload], Iterable[tuple[Place, ErrorCode, int]]]


class Round(NamedTuple):
    """What came of asking once: answers, Kafka's codes, and faults of connections."""

    found: dict[Place, int]
    refused: dict[Place, tuple[ErrorCode, bool]]
    """The code, and whether it is the leader's own."""
    lost: dict[Place, KafkaUnavailable]


def ask_once(cluster: Cluster, places: Iterable[Place], question: Question) -> Round:
    """Ask the leader of each place once; raises KafkaUnavailable only if nobody can say who leads."""
    result = Round({}, {}, {})
    by_leader: dict[NodeId, list[Place]] = {}
    wanted = sorted(set(places))
    unknown = cluster.learn({topic for topic, _ in wanted})
    for place in wanted:
        try:
            if place[0] in unknown:
                raise CodeError(unknown[place[0]], f"topic {place[0]}")
            by_leader.setdefault(cluster.leader(*place), []).append(place)
        except CodeError as fault:
            result.refused[place] = fault.code, False
    asked: list[tuple[Connection, list[Place]]] = []
    for node, led in by_leader.items():
        try:
            connection = cluster.connection(node)
            connection.send(question.request(led))
            asked.append((connection, led))
        except KafkaUnavailable as fault:
            _lose(cluster, result, led, fault)
    for connection, led in asked:
        try:
            for place, code, value in question.answers(connection.receive(question.response_type)):
                if code is ErrorCode.none:
                    result.found[place] = value
                else:
                    cluster.forget_leader(place[0])
                    result.refused[place] = code, True
        except KafkaUnavailable as fault:
            _lose(cluster, result, led, fault)
    return result


def _lose(cluster: Cluster, result: Round, places: Iterable[Place], fault: KafkaUnavailable) -> None:
    for place in places:
        cluster.forget_leader(place[0])
        result.lost[place] = fault


def ask_leaders(
    cluster: Cluster, places: Iterable[Place], question: Question, doing: str, deadline: Deadline
) -> dict[Place, int]:
    """The answer of each place's leader.

    A partition that has no leader at the moment, or that not all brokers know of yet, is waited for.

    Args:
        doing: What is asked, for errors, such as ``read the end``; the name of the topic follows.

    Raises:
        NotFoundError, NotAuthorizedError, InvalidRequestError: A leader refused, for good.
        KafkaUnavailable: Not all have answered before the deadline.
    """
    pending = set(places)
    found: dict[Place, int] = {}
    backoff = Backoff()
    started = time.monotonic()
    while pending:
        why: object = "no answer"
        try:
            result = ask_once(cluster, pending, question)
        except KafkaUnavailable as fault:
            if deadline.passed():
                raise KafkaUnavailable(f"cannot {doing} within {deadline.timeout_s:g} s: {fault}") from fault
            why = fault
        else:
            found |= result.found
            pending.difference_update(result.found)
            for (topic, partition), (code, by_leader) in result.refused.items():
                why = f"topic {topic}: {codes.name(code)}"
                asked_s = time.monotonic() - started
                _check(code, by_leader, asked_s, f"{doing} of topic {topic}", f"topic {topic}", partition)
            why = next(iter(result.lost.values()), why)
            if pending and deadline.passed():
                raise KafkaUnavailable(
                    f"cannot {doing} of topic {min(pending)[0]} within {deadline.timeout_s:g} s: {why}"
                )
        if pending:
            logger.debug("asking again to %s: %s", doing, why)
            backoff.sleep(deadline)
    return found


def _check(code: ErrorCode, by_leader: bool, asked_s: float, doing: str, resource: str, partition: int) -> None:
    """Raise if asking again is no use."""
    if code is ErrorCode.unknown_topic_or_partition:
        if asked_s >= (_NOT_THERE_YET_S if by_leader else _UNHEARD_OF_S):
            raise NotFoundError(f"cannot {doing}: there is no such topic, or it has no partition {partition}")
    elif codes.meaning(codes.READ, code) not in (Meaning.REFRESH, Meaning.RETRY) and (
        is_definite(code) or code is ErrorCode.unknown_server_error
    ):
        raise refusal(code, doing, resource)
