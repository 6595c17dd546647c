"""What is advertised: what is here and at the broker, and nothing that is not served."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from kio.static.constants import EntityType

from rollbridge_gateway.protocol import wire
from rollbridge_gateway.protocol.versions import (
    BROKER_RESOURCE,
    NAMINGS,
    TABLE,
    Api,
    Handling,
    VersionRange,
    offered,
    room_of,
)
from rollbridge_gateway.protocol.wire import MalformedError, check_bounds

KAFKA_4_2 = {
    0: (0, 13), 1: (4, 18), 2: (1, 11), 3: (0, 13), 8: (2, 10), 9: (1, 10), 10: (0, 6), 11: (0, 9), 12: (0, 4),
    13: (0, 5), 14: (0, 5), 15: (0, 6), 16: (0, 5), 17: (0, 1), 18: (0, 4), 19: (2, 7), 20: (1, 6), 21: (0, 2),
    22: (0, 5), 23: (2, 4), 24: (0, 5), 25: (0, 4), 26: (0, 5), 27: (1, 2), 28: (0, 5), 29: (1, 3), 32: (1, 4),
    36: (0, 2), 60: (0, 2), 61: (0, 0), 65: (0, 0), 66: (0, 2), 78: (1, 2), 79: (1, 2), 71: (0, 0),
}  # fmt: skip
BROKER = {key: VersionRange(*found) for key, found in KAFKA_4_2.items()}


def test_librdkafka_takes_it_for_a_modern_broker() -> None:
    """It writes record batches only if Fetch 4 is offered, and clients want Produce from version 0."""
    found = offered(BROKER)
    assert found[Api.FETCH].low <= 4 <= found[Api.FETCH].high
    assert found[Api.PRODUCE].low == 0


NAMED = {"OffsetCommit": 8, "OffsetFetch": 9, "DescribeQuorum": 55}
"""Numbers of requests that have no name in the package."""


def test_the_page_names_the_versions_that_end_below_those_of_a_broker() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "gateway.md").read_text(encoding="utf-8").split())
    [said] = re.findall(r"requests end below those of a broker of Kafka 4\.2: (.+?)\. ", page)
    found = dict(re.findall(r"(\w+) (\d+)", said))
    numbers = {name: NAMED.get(name) or Api[re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()] for name in found}
    assert {numbers[name]: int(version) for name, version in found.items()} == {
        key: TABLE[key].high for key in {*numbers.values(), *(key for key in TABLE if _is_lower(key))}
    }


def _is_lower(key: int) -> bool:
    return key in KAFKA_4_2 and TABLE[key].high < KAFKA_4_2[key][1]


def test_nothing_is_offered_that_is_not_served() -> None:
    for key, (low, high) in offered(BROKER).items():
        for version in range(low, high + 1):
            assert room_of(key, version) is not None
    assert room_of(27, 1) is None
    assert not set(offered(BROKER)) & {27, 78, 79, 71}, "markers, share groups with addresses, and the unknown"


def test_addresses_of_brokers_reach_nobody() -> None:
    """Fetch 16 and newer may name them (KIP-951); what else has some is rewritten."""
    assert TABLE[Api.FETCH].high == 15
    for key in (Api.METADATA, Api.FIND_COORDINATOR, Api.DESCRIBE_CLUSTER):
        assert TABLE[key].room is Handling.REWRITTEN


def test_metadata_is_served_to_clients_that_are_told_a_release_and_do_not_look_at_what_is_offered() -> None:
    """kafka-python with ``api_version=(4, 0)`` sends what such brokers know, and begins with Metadata."""
    newest = BROKER[Api.METADATA].high
    assert room_of(Api.METADATA, newest) is Handling.REWRITTEN
    assert offered(BROKER)[Api.METADATA] == BROKER[Api.METADATA]


def test_transactions_do_not_hang_on_the_brokers_versions() -> None:
    found = offered({Api.FETCH: VersionRange(4, 11), Api.PRODUCE: VersionRange(3, 9)})
    assert found[Api.END_TXN] == (0, 5)
    assert found[Api.FETCH] == (4, 11)
    assert found[Api.PRODUCE] == (3, 9)
    assert Api.METADATA not in found


@pytest.mark.parametrize(
    ("key", "version"),
    [
        (key, version)
        for key, served in TABLE.items()
        if served.room is not Handling.RELAYED
        for version in range(served.low, served.high + 1)
        if key != Api.PRODUCE or version >= 3
    ],
)
def test_every_version_that_is_decoded_is_known_in_both_directions(key: int, version: int) -> None:
    request = wire.build(wire.schema(key, version, EntityType.request), {})
    head = wire.Head(key, version, 77, "client", 0)
    data = wire.with_body(head, request)
    read = wire.read_head(data)
    assert (read.key, read.version, read.correlation, read.client_id) == (key, version, 77, "client")
    assert wire.read_body(data, read) == request
    assert check_bounds(data, read.body, type(request)) == len(data)
    if key != Api.DESCRIBE_TRANSACTIONS:
        written = wire.write_answer(key, version, 77, {})
        assert written[:4] == b"\0\0\0M"
        wire.read_answer(written, key, version)


@pytest.mark.parametrize("version", range(14))
def test_an_array_that_claims_more_than_there_is_is_refused_before_room_is_made(version: int) -> None:
    """The decoder's own answer would be the end of the process: it cannot get the memory."""
    data = wire.write_request(Api.METADATA, version, 1, None, {"topics": [{"name": "x"}]})
    head = wire.read_head(data)
    flexible = wire.is_flexible(Api.METADATA, version)
    claim = b"\xff\xff\xff\xff\x07" if flexible else b"\x7f\xff\xff\xff"
    wrong = data[: head.body] + claim + data[head.body + (1 if flexible else 4) :]
    with pytest.raises(MalformedError):
        wire.read_body(wrong, head)


@pytest.mark.parametrize("version", range(6))
def test_there_is_no_null_where_a_list_has_to_be(version: int) -> None:
    data = wire.write_request(Api.TXN_OFFSET_COMMIT, version, 1, None, {"topics": [{"name": "x"}]})
    head = wire.read_head(data)
    empty = wire.write_request(Api.TXN_OFFSET_COMMIT, version, 1, None, {"topics": []})
    flexible = wire.is_flexible(Api.TXN_OFFSET_COMMIT, version)
    wrong = empty[:-2] + b"\0\0" if flexible else empty[:-4] + b"\xff\xff\xff\xff"
    assert wire.read_body(data, head).topics
    with pytest.raises(MalformedError):
        wire.read_body(wrong, wire.read_head(wrong))


# What is answered about streams that are named as topics, in each version of each request.


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
