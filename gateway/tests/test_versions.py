"""What is advertised: what is here and at the broker, and nothing that is not served."""

from __future__ import annotations

import pytest
from kio.static.constants import EntityType

from rollbridge_gateway import wire
from rollbridge_gateway.bounds import MalformedError, check_bounds
from rollbridge_gateway.versions import TABLE, Api, Handling, VersionRange, offered, room_of

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
