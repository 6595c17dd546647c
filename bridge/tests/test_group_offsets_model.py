"""Offsets of consumer groups in a manifest: their bounds, their way through Avro, and frames of earlier versions."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import Consumer
from hypothesis import given
from hypothesis import strategies as st

import rollbridge_schemas
from rollbridge.buffer.frames import Manifest, PieceKey, decode_manifest
from rollbridge.errors import CorruptDataError, InvalidRequestError
from rollbridge.stream.group_offsets import PARTITIONS_MAX, GroupOffsets, parse_group_metadata

NAMES = st.text(min_size=1, max_size=40)
PLACES = st.tuples(NAMES, st.integers(0, (1 << 31) - 1))
GROUPS = st.builds(
    GroupOffsets,
    NAMES,
    st.dictionaries(PLACES, st.integers(0, (1 << 63) - 1), min_size=1, max_size=5),
    st.integers(-1, (1 << 31) - 1),
    st.text(max_size=20),
    st.none() | NAMES,
)


@given(st.lists(GROUPS, max_size=3))
def test_a_manifest_carries_them(groups: list[GroupOffsets]) -> None:
    manifest = Manifest({PieceKey(0, 0, 0): 1}, tuple(groups))
    assert decode_manifest(manifest.encode()) == manifest


def test_a_manifest_of_an_earlier_version_has_none() -> None:
    manifest = Manifest({PieceKey(0, 0, 3): 336_776})
    assert manifest.encode()[-1:] == b"\0"
    assert decode_manifest(manifest.encode()[:-1]) == manifest
    assert decode_manifest(b"\0") == Manifest({})


@pytest.mark.parametrize(
    "change",
    [
        {"group_id": ""},
        {"group_id": "g" * 1_001},
        {"generation": -2},
        {"generation": 1 << 31},
        {"member_id": "m" * 1_001},
        {"offsets": {}},
        {"offsets": {("t", -1): 0}},
        {"offsets": {("t", 1 << 31): 0}},
        {"offsets": {("", 0): 0}},
        {"offsets": {("t" * 250, 0): 0}},
        {"offsets": {("t", 0): -1}},
        {"offsets": {("t", 0): 1 << 63}},
        {"offsets": {("t", number): 0 for number in range(PARTITIONS_MAX + 1)}},
    ],
)
def test_what_there_can_not_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="nothing was sent"):
        GroupOffsets(**{"group_id": "g", "offsets": {("t", 0): 0}, **change})


def test_a_frame_with_what_there_can_not_be_is_corrupt() -> None:
    """A leader must never meet a number that its own requests cannot hold."""
    datum = {
        "entries": [],
        "offsets": [
            {
                "group": "g",
                "generation": -1,
                "member": "",
                "instance": None,
                "topics": [{"topic": "t", "partitions": [{"partition": -5, "offset": 1}]}],
            }
        ],
    }
    with pytest.raises(CorruptDataError, match="impossible offsets or conditions"):
        decode_manifest(rollbridge_schemas.codec("commit_frame").encode(datum))


def test_later_offsets_replace_earlier_ones_of_the_same_partition() -> None:
    first = GroupOffsets("g", {("t", 0): 1, ("t", 1): 1}, 3, "m")
    second = GroupOffsets("g", {("t", 1): 2}, 4, "n")
    assert first.joined(second) == GroupOffsets("g", {("t", 0): 1, ("t", 1): 2}, 4, "n")


@pytest.mark.parametrize("instance", [None, "pod-1"])
def test_the_metadata_of_a_real_consumer_is_understood(instance: str | None) -> None:
    settings: dict[str, Any] = {"bootstrap.servers": "localhost:1", "group.id": "billing", "log_level": 0}
    consumer = Consumer({**settings, **({"group.instance.id": instance} if instance else {})})
    try:
        assert parse_group_metadata(consumer.consumer_group_metadata()) == ("billing", -1, "", instance)
    finally:
        consumer.close()


def test_the_metadata_of_a_member_is_understood() -> None:
    raw = b"CGMDv2:" + (7).to_bytes(4, "little") + b"billing\0rdkafka-1-x\0\x01"
    assert parse_group_metadata(raw) == ("billing", 7, "rdkafka-1-x", None)
    assert parse_group_metadata("billing") == ("billing", -1, "", None)


@pytest.mark.parametrize(
    "metadata", [None, 17, b"", b"CGMDv2:", b"CGMDv2:\0\0\0\0g\0", b"CGMDv1:\0\0\0\0g\0m\0\1", b"g"]
)
def test_metadata_that_is_none_is_refused(metadata: object) -> None:
    with pytest.raises(InvalidRequestError, match="consumer_group_metadata"):
        parse_group_metadata(metadata)
