"""What gateways say of themselves in ZooKeeper: read back as it was written, and tolerantly."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.cli.common import moment
from rollbridge.metadata import paths
from rollbridge.metadata.gateways import (
    EPOCH_MAX,
    FIRST_PRODUCER_ID,
    LACKING_MAX,
    GatewayRecord,
    Holder,
    IdRecord,
    LackingRight,
    is_gateway_label,
)

TEXTS = st.text(max_size=40)
NAMES = st.text("abcAZ09._-/", min_size=1, max_size=40)
RECORDS = st.builds(
    GatewayRecord,
    name=TEXTS,
    host=TEXTS,
    port=st.integers(0, 65_535),
    ports=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 65_535)), max_size=4).map(tuple),
    release=TEXTS,
    cluster_id=TEXTS,
    metrics=TEXTS,
    encrypted=st.booleans(),
    since_ms=st.integers(0, 1 << 47),
    lacking=st.lists(st.builds(LackingRight, NAMES, NAMES, NAMES), max_size=3).map(tuple),
)


@given(RECORDS)
def test_a_record_is_read_as_it_was_written(record: GatewayRecord) -> None:
    assert GatewayRecord.from_json(record.name, record.to_json()) == record


def test_a_gateway_of_before_says_less_and_one_of_later_more() -> None:
    said = {"host": "gw", "port": 9192, "ports": [[1, 9193]], "news": {}}
    found = GatewayRecord.from_json("one", json.dumps(said).encode())
    assert found == GatewayRecord(name="one", host="gw", port=9192, ports=((1, 9193),))
    assert (found.address, GatewayRecord(name="six", host="::1", port=1).address) == ("gw:9192", "[::1]:1")


def test_what_is_lacking_is_told_up_to_a_limit() -> None:
    many = tuple(LackingRight("Write", f"t{number}", "a/b") for number in range(2 * LACKING_MAX))
    record = GatewayRecord(name="one", host="gw", port=1, lacking=many)
    assert GatewayRecord.from_json("one", record.to_json()).lacking == many[:LACKING_MAX]


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"{}",
        b'{"host": "gw", "port": "x", "ports": []}',
        b'{"host": 7, "port": 1, "ports": []}',
        b'{"host": "gw", "port": 1, "ports": [[1]]}',
        b'{"host": "gw", "port": 1, "ports": [], "lacking": [["a"]]}',
        b'{"host": "gw", "port": 1e999, "ports": []}',
        b'{"host": "gw", "port": 1, "ports": [], "lacking": 7}',
        b"\xff",
        b"[" * 100_000,
        b'{"host": "gw", "port": 65536, "ports": []}',
        b'{"host": "gw", "port": 1, "ports": [], "lacking": [["Write", "t", "a/b; rm -rf x"]]}',
    ],
)
def test_what_no_gateway_says_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - any text
        GatewayRecord.from_json("one", value)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(value: bytes) -> None:
    Holder.decode(value)
    for read in (IdRecord.from_json, lambda value: GatewayRecord.from_json("one", value)):
        with suppress(ValueError):
            read(value)


def test_moments_are_such_as_can_be_shown() -> None:
    said = {"host": "gw", "port": 1, "ports": [], "since_ms": 10**30}
    since_ms = GatewayRecord.from_json("one", json.dumps(said).encode()).since_ms
    assert moment(since_ms).startswith("6429-")
    entry = IdRecord.from_json(b'{"id": "x", "timeout_ms": 1, "written_ms": 1e30}')
    assert moment(entry.written_ms).startswith("6429-")
    assert IdRecord.from_json(b'{"id": "x", "timeout_ms": 1, "written_ms": -5}').written_ms == 0


def test_who_holds_an_id_and_who_wants_it() -> None:
    wanted = Holder("gw-1", "a life", "gw-2")
    assert Holder.decode(wanted.encode()) == wanted
    assert Holder.decode(b"gw-1") == Holder("", ""), "one that cannot be read is that of a life that is over"


def test_what_is_on_record_of_an_id() -> None:
    said = {"id": "billing-7", "pair": [1, 2], "timeout_ms": 60_000, "written_ms": 5, "gateway": "gw-1"}
    assert IdRecord.from_json(json.dumps(said).encode()) == IdRecord("billing-7", 60_000, 5, "gw-1")
    del said["gateway"], said["written_ms"]
    assert IdRecord.from_json(json.dumps(said).encode()) == IdRecord("billing-7", 60_000, 0, "")


@pytest.mark.parametrize(
    ("label", "is_one"),
    [
        (f"{FIRST_PRODUCER_ID}.0", True),
        (f"{2 * FIRST_PRODUCER_ID - 1}.{EPOCH_MAX}", True),
        (f"{FIRST_PRODUCER_ID - 1}.0", False),
        (f"{2 * FIRST_PRODUCER_ID}.0", False),
        (f"{FIRST_PRODUCER_ID}.{EPOCH_MAX + 1}", False),
        (f"{FIRST_PRODUCER_ID}.00", False),
        (f"{FIRST_PRODUCER_ID}", False),
        (f"x{FIRST_PRODUCER_ID}.0", False),
        (f"{FIRST_PRODUCER_ID}.0\n", False),
        ("nightly", False),
        ("", False),
        (None, False),
    ],
)
def test_labels_of_gateways_are_known(label: str | None, is_one: bool) -> None:
    assert is_gateway_label(label) is is_one


def test_nodes_of_an_id_are_in_one_bucket_each() -> None:
    assert paths.gateway("gw-1") == "/gateways/live/gw-1"
    assert paths.gateway_id("billing-7") == f"/gateways/ids/{paths.gateway_bucket('billing-7')}/billing-7"
    assert paths.gateway_holder("billing-7") == f"/gateways/held/{paths.gateway_bucket('billing-7')}/billing-7"
    buckets = {paths.gateway_bucket(f"id-{number}") for number in range(20_000)}
    assert len(buckets) == paths.GATEWAY_BUCKETS
