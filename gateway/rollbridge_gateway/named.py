"""Requests that name topics: what of them is about streams, which no broker knows, and what is answered about those.

A stream with key ranges is listed as a topic, so whoever asks about all topics asks about it, too. To readers it is an
empty topic: its records lie in the topics of its segments, under other names. It is not created, changed or deleted as
a topic; who tries is told what to do. All else in a request goes to the broker, whose answer gets ours behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

from rollbridge_gateway.versions import Api

TOPIC_RESOURCE: Final = 2
BROKER_RESOURCE: Final = 4
"""Codes of Kafka's ``ConfigResource.Type``."""
_EMPTY_AT: Final = frozenset((-1, -2, -4))
"""Timestamps of ListOffsets that mean an end or a beginning, which an empty partition has as well."""

AnswerOfTopic = Callable[[str, Any, int, ErrorCode], Mapping[str, Any]]
"""Makes an entry of the answer: of a stream's topic, what was asked of it, its partitions, and why it is refused."""


class Naming(NamedTuple):
    """Where a request and its answer have topics.

    Attributes:
        asked: Fields of requests with entries that name topics; the first one that a version has.
        name: Field of an entry with the name; entries without it are names themselves.
        answered: Field of the answer with entries about topics.
        answer: Makes an entry about a stream.
    """

    asked: tuple[str, ...]
    name: str
    answered: str
    answer: AnswerOfTopic

    def field(self, body: Any) -> str:
        """Return the field of a request with its entries."""
        return next(field for field in self.asked if hasattr(body, field))

    def split(self, body: Any, virtual: Container[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the entries for the broker, and those about streams by the names of their topics."""
        others: list[Any] = []
        ours: dict[str, Any] = {}
        for entry in getattr(body, self.field(body)) or ():
            name = getattr(entry, self.name, entry)
            if name in virtual and getattr(entry, "resource_type", TOPIC_RESOURCE) == TOPIC_RESOURCE:
                ours[str(name)] = entry
            else:
                others.append(entry)
        return tuple(others), ours


def _offsets(name: str, entry: Any, count: int, code: ErrorCode) -> Mapping[str, Any]:
    def of(part: Any) -> Mapping[str, Any]:
        found = {"partition_index": part.partition_index, "error_code": _code(part.partition_index, count, code)}
        if found["error_code"] is ErrorCode.none and int(part.timestamp) in _EMPTY_AT:
            return {**found, "timestamp": -1, "offset": 0, "leader_epoch": 0}
        return {**found, "timestamp": -1, "offset": -1, "leader_epoch": -1}

    return {"name": name, "partitions": [of(part) for part in entry.partitions]}


def _epochs(name: str, entry: Any, count: int, code: ErrorCode) -> Mapping[str, Any]:
    return {
        "topic": name,
        "partitions": [
            {
                "partition": part.partition,
                "error_code": _code(part.partition, count, code),
                "leader_epoch": 0,
                "end_offset": 0,
            }
            for part in entry.partitions
        ],
    }


def _code(partition: int, count: int, code: ErrorCode) -> ErrorCode:
    if code is ErrorCode.none and not 0 <= partition < count:
        return ErrorCode.unknown_topic_or_partition
    return code


def _refusal(otherwise: ErrorCode, advice: str) -> AnswerOfTopic:
    def refused(name: str, _entry: Any, _count: int, code: ErrorCode) -> Mapping[str, Any]:
        is_known = code is ErrorCode.none
        return {
            "name": name,
            "resource_type": TOPIC_RESOURCE,
            "resource_name": name,
            "error_code": otherwise if is_known else code,
            "error_message": f"{name} is a stream of rollbridge; nothing was changed: {advice}" if is_known else None,
        }

    return refused


_SETTINGS: Final = _refusal(ErrorCode.invalid_request, "use `rollbridge stream update`")

NAMINGS: Final[Mapping[int, Naming]] = {
    Api.LIST_OFFSETS: Naming(("topics",), "name", "topics", _offsets),
    Api.OFFSET_FOR_LEADER_EPOCH: Naming(("topics",), "topic", "topics", _epochs),
    Api.CREATE_TOPICS: Naming(
        ("topics",), "name", "topics", _refusal(ErrorCode.topic_already_exists, "choose another name")
    ),
    Api.DELETE_TOPICS: Naming(
        ("topics", "topic_names"),
        "name",
        "responses",
        _refusal(ErrorCode.invalid_request, "use `rollbridge stream delete`"),
    ),
    Api.CREATE_PARTITIONS: Naming(
        ("topics",), "name", "results", _refusal(ErrorCode.invalid_request, "use `rollbridge stream scale`")
    ),
    Api.ALTER_CONFIGS: Naming(("resources",), "resource_name", "responses", _SETTINGS),
    Api.INCREMENTAL_ALTER_CONFIGS: Naming(("resources",), "resource_name", "responses", _SETTINGS),
    Api.DESCRIBE_CONFIGS: Naming(("resources",), "resource_name", "results", _SETTINGS),
}
"""How requests name topics; DescribeConfigs is answered by the settings of the stream's buffer."""
