"""What is answered about streams that are named as topics, in each version of each request."""

from __future__ import annotations

from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from kio.static.constants import EntityType

from rollbridge_gateway import wire
from rollbridge_gateway.named import BROKER_RESOURCE, NAMINGS
from rollbridge_gateway.versions import TABLE, Api

STREAM, TOPIC = "sales.orders", "plain"
COUNT = 2
_PARTITIONS = [
    {"partition_index": number, "partition": number, "timestamp": timestamp}
    for number, timestamp in ((0, -1), (1, -2), (1, 1_700_000_000_000), (1, -3), (COUNT, -1))
]
VERSIONS = [(key, version) for key in NAMINGS for version in range(TABLE[key].low, TABLE[key].high + 1)]


def entry(name: str) -> dict[str, Any]:
    return {"name": name, "topic": name, "partitions": _PARTITIONS, "resource_name": name, "resource_type": 2}


def request(key: int, version: int, *entries: Any) -> Any:
    """A request as it was sent, encoded and decoded."""
    kind = wire.schema(key, version, EntityType.request)
    head = wire.Head(key, version, 7, "me", 0)
    values = {"topics": entries, "resources": entries, "topic_names": [item["name"] for item in entries]}
    data = wire.with_body(head, wire.build(kind, values))
    return wire.read_body(data, wire.read_head(data))


def told(key: int, version: int, code: ErrorCode = ErrorCode.none) -> list[Any]:
    """The entries of an answer about the stream, encoded and decoded."""
    naming = NAMINGS[key]
    _, ours = naming.split(request(key, version, entry(STREAM), entry(TOPIC)), {STREAM: COUNT})
    values = {naming.answered: [naming.answer(name, item, COUNT, code) for name, item in ours.items()]}
    data = wire.write_answer(key, version, 7, values)
    return list(getattr(wire.read_answer(data, key, version), naming.answered))


def name_of(item: Any) -> str:
    return str(next(getattr(item, field) for field in ("name", "topic", "resource_name") if hasattr(item, field)))


@pytest.mark.parametrize(("key", "version"), VERSIONS)
def test_each_version_is_divided_between_the_broker_and_us(key: int, version: int) -> None:
    naming = NAMINGS[key]
    theirs, ours = naming.split(request(key, version, entry(STREAM), entry(TOPIC)), {STREAM: COUNT})
    assert [str(getattr(item, naming.name, item)) for item in theirs] == [TOPIC]
    assert list(ours) == [STREAM]
    assert [name_of(item) for item in told(key, version)] == [STREAM]


@pytest.mark.parametrize("version", range(1, 12))
def test_a_stream_is_empty_from_its_beginning_to_its_end(version: int) -> None:
    [found] = told(Api.LIST_OFFSETS, version)
    assert [int(part.offset) for part in found.partitions] == [0, 0, -1, -1, -1]
    assert [part.error_code for part in found.partitions] == [ErrorCode.none] * 4 + [
        ErrorCode.unknown_topic_or_partition
    ]
    [found] = told(Api.LIST_OFFSETS, version, ErrorCode.topic_authorization_failed)
    assert {part.error_code for part in found.partitions} == {ErrorCode.topic_authorization_failed}
    assert {int(part.offset) for part in found.partitions} == {-1}


@pytest.mark.parametrize(
    ("key", "code"),
    [
        (Api.CREATE_TOPICS, ErrorCode.topic_already_exists),
        (Api.DELETE_TOPICS, ErrorCode.invalid_request),
        (Api.CREATE_PARTITIONS, ErrorCode.invalid_request),
        (Api.ALTER_CONFIGS, ErrorCode.invalid_request),
        (Api.INCREMENTAL_ALTER_CONFIGS, ErrorCode.invalid_request),
    ],
)
def test_a_stream_is_not_changed_and_who_may_not_know_of_it_is_not_told_that(key: Api, code: ErrorCode) -> None:
    [known] = told(key, TABLE[key].high)
    assert known.error_code is code
    assert "nothing was changed" in known.error_message
    [hidden] = told(key, TABLE[key].high, ErrorCode.topic_authorization_failed)
    assert hidden.error_code is ErrorCode.topic_authorization_failed
    assert hidden.error_message is None


def test_a_broker_of_the_name_of_a_stream_is_none() -> None:
    asked = {"resource_name": STREAM, "resource_type": BROKER_RESOURCE, "name": STREAM}
    theirs, ours = NAMINGS[Api.DESCRIBE_CONFIGS].split(request(Api.DESCRIBE_CONFIGS, 4, asked), {STREAM: COUNT})
    assert len(theirs) == 1
    assert not ours
