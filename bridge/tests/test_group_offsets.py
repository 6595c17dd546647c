"""Offsets of consumer groups, with leader epochs and metadata: bounds, and their way through frames and savepoints."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from hypothesis import given
from hypothesis import strategies as st

import rollbridge_schemas
from bridge.tests.refusals import raises_code
from bridge.tests.transaction_makers import ORDERS, Bench
from rollbridge.buffer.frames import Manifest, PieceKey, decode_manifest
from rollbridge.buffer.savepoints import SavepointFrame, decode_savepoint
from rollbridge.errors import (
    CorruptDataError,
    InvalidRequestError,
    TransactionTooLargeError,
)
from rollbridge.stream.group_offsets import (
    METADATA_BYTES_MAX,
    METADATA_CHARACTERS_MAX,
    PARTITIONS_MAX,
    GroupOffsets,
    OffsetDetails,
    is_too_large,
    parse_group_metadata,
)

TEXTS = st.text(max_size=20) | st.sampled_from(["", "\0", "note\0", "größe 💡"])
DETAILS = st.builds(OffsetDetails, st.integers(-1, (1 << 31) - 1), TEXTS)
NAMES = st.text(min_size=1, max_size=40)
PLACES = st.tuples(st.sampled_from(["a", "b", "c"]) | NAMES, st.integers(0, 3) | st.integers(0, (1 << 31) - 1))
OFFSETS = st.dictionaries(PLACES, st.tuples(st.integers(0, (1 << 63) - 1), st.none() | DETAILS), min_size=1, max_size=9)


def group_of(
    name: str,
    said: dict[tuple[str, int], tuple[int, OffsetDetails | None]],
    generation: int,
    member: str,
    instance: str | None,
) -> GroupOffsets:
    offsets = {where: offset for where, (offset, _) in said.items()}
    details = {where: item for where, (_, item) in said.items() if item is not None}
    return GroupOffsets(name, offsets, generation, member, instance, details=details)


GROUPS = st.builds(
    group_of,
    st.sampled_from(["g", "h"]) | NAMES,
    OFFSETS,
    st.integers(-1, (1 << 31) - 1),
    st.text(max_size=20),
    st.none() | NAMES,
)


@given(st.lists(GROUPS, max_size=3))
def test_a_manifest_carries_the_details_of_each_offset(groups: list[GroupOffsets]) -> None:
    manifest = Manifest({PieceKey(0, 0, 0): 1}, tuple(groups))
    assert decode_manifest(manifest.encode()) == manifest


@given(st.lists(GROUPS, max_size=3))
def test_who_does_not_know_them_reads_the_offsets(groups: list[GroupOffsets]) -> None:
    """As a release before 0.3.0 does, which passes over what stands behind the fields that it knows."""
    schema = rollbridge_schemas.codec("commit_frame")
    raw = Manifest({}, tuple(groups)).encode()
    lacking = {**schema.decode(raw), "details": []}
    earlier = schema.encode(lacking)[:-1]
    assert raw.startswith(earlier)
    assert [item.offsets for item in decode_manifest(earlier).offsets] == [item.offsets for item in groups]
    assert not any(item.details for item in decode_manifest(earlier).offsets)


@given(st.lists(st.lists(GROUPS, max_size=2), min_size=1, max_size=4))
def test_savepoints_hold_those_that_were_given_last(steps: list[list[GroupOffsets]]) -> None:
    """A model that replaces an offset with all that belongs to it comes to the same."""
    model: dict[str, dict[tuple[str, int], tuple[int, OffsetDetails]]] = {}
    groups: dict[str, GroupOffsets] = {}
    held = SavepointFrame(1, True, Manifest({}))
    for number, step in enumerate(steps, 2):
        before = dict(groups)
        for item in step:
            known = groups.get(item.group_id)
            groups[item.group_id] = item if known is None else known.joined(item)
            model.setdefault(item.group_id, {}).update(
                {where: (offset, item.details.get(where, OffsetDetails())) for where, offset in item.offsets.items()}
            )
        changed = tuple(item for name, item in groups.items() if before.get(name) != item)
        frame = SavepointFrame(number, False, Manifest({}, changed))
        held = decode_savepoint(decode_savepoint(frame.encode()).after(held).encode())
    found = {
        item.group_id: {
            where: (offset, item.details.get(where, OffsetDetails())) for where, offset in item.offsets.items()
        }
        for item in held.manifest.offsets
    }
    assert found == model


def test_what_means_the_same_is_the_same() -> None:
    bare = GroupOffsets("g", {("t", 0): 1, ("t", 1): 1})
    assert GroupOffsets("g", bare.offsets, details={("t", 0): OffsetDetails()}) == bare
    assert Manifest({}, (bare,)).encode().endswith(b"\0\0"), "no conditions, no details"
    noted = GroupOffsets("g", {("t", 0): 1}, details={("t", 0): OffsetDetails(3, "note")})
    assert noted.joined(bare) == bare, "an offset without details replaces one that had some"
    assert bare.joined(noted).details == noted.details


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
        {"details": {("t", 1): OffsetDetails(3)}},
        {"details": {("t", 0): OffsetDetails(-2)}},
        {"details": {("t", 0): OffsetDetails(1 << 31)}},
        {"details": {("t", 0): OffsetDetails(0, "\ud800")}},
        {"details": {("t", 0): OffsetDetails(0, "x" * (METADATA_CHARACTERS_MAX + 1))}},
    ],
)
def test_what_there_can_not_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="nothing was sent"):
        GroupOffsets(**{"group_id": "g", "offsets": {("t", 0): 0}, **change})


@given(st.text("a\uffff💡", min_size=1, max_size=3), st.integers(-3, 3))
def test_metadata_has_as_many_characters_as_brokers_count(piece: str, more: int) -> None:
    units = len(piece.encode("utf-16-le")) // 2
    text = piece * (METADATA_CHARACTERS_MAX // units) + "a" * (METADATA_CHARACTERS_MAX % units + max(more, 0))
    text = text[: len(text) + min(more, 0)]
    assert is_too_large(text) == (len(text.encode("utf-16-le")) // 2 > METADATA_CHARACTERS_MAX)


# Frames of whoever may write to a buffer

ONE: dict[str, Any] = {
    "group": "g",
    "generation": -1,
    "member": "",
    "instance": None,
    "topics": [{"topic": "t", "partitions": [{"partition": 0, "offset": 1}, {"partition": 1, "offset": 2}]}],
}
PLAIN = {"leader_epoch": -1, "metadata": ""}


def commit_of(offsets: list[Any], details: list[Any]) -> bytes:
    return rollbridge_schemas.codec("commit_frame").encode({"entries": [], "offsets": offsets, "details": details})


@pytest.mark.parametrize(
    "details",
    [
        [PLAIN],
        [PLAIN] * 3,
        [PLAIN, {"leader_epoch": -2, "metadata": ""}],
        [PLAIN, {"leader_epoch": 0, "metadata": "x" * (METADATA_CHARACTERS_MAX + 1)}],
    ],
)
def test_a_frame_with_details_that_there_can_not_be_is_corrupt(details: list[Any]) -> None:
    with pytest.raises(CorruptDataError, match="impossible offsets"):
        decode_manifest(commit_of([ONE], details))


def test_a_frame_with_what_there_can_not_be_is_corrupt() -> None:
    """A leader must never meet a number that its own requests cannot hold."""
    wrong = {**ONE, "topics": [{"topic": "t", "partitions": [{"partition": -5, "offset": 1}]}]}
    with pytest.raises(CorruptDataError, match="impossible offsets or conditions"):
        decode_manifest(commit_of([wrong], []))


def test_details_of_no_offsets_are_corrupt() -> None:
    with pytest.raises(CorruptDataError, match="1 details of 0 offsets"):
        decode_manifest(commit_of([], [PLAIN]))


def test_a_place_that_is_named_twice_has_what_was_said_last() -> None:
    twice = {**ONE, "topics": [{"topic": "t", "partitions": [{"partition": 0, "offset": 1}] * 2}]}
    [found] = decode_manifest(commit_of([twice], [{"leader_epoch": 5, "metadata": "old"}, PLAIN])).offsets
    assert (dict(found.offsets), dict(found.details)) == ({("t", 0): 1}, {})


def large(groups: int) -> tuple[GroupOffsets, ...]:
    """Offsets with a quarter of the metadata that a transaction may have, for each group."""
    each = OffsetDetails(0, "x" * METADATA_CHARACTERS_MAX)
    places = [("t", number) for number in range(METADATA_BYTES_MAX // METADATA_CHARACTERS_MAX // 4)]
    return tuple(
        GroupOffsets(f"g{number}", dict.fromkeys(places, 1), details=dict.fromkeys(places, each))
        for number in range(groups)
    )


def test_a_frame_with_too_much_metadata_is_corrupt_however_it_came_together() -> None:
    assert decode_manifest(Manifest({}, large(4)).encode()).offsets == large(4)
    with pytest.raises(CorruptDataError, match="bytes of metadata"):
        decode_manifest(Manifest({}, large(5)).encode())
    held = SavepointFrame(1, True, Manifest({}, large(4)))
    more = SavepointFrame(2, False, Manifest({}, large(5)[4:]))
    with pytest.raises(CorruptDataError, match="bytes of metadata"):
        more.after(held)


@given(st.binary(max_size=40))
def test_whatever_stands_where_details_are_gives_a_manifest_or_an_error(raw: bytes) -> None:
    before = commit_of([ONE], [PLAIN, PLAIN])
    try:
        found = decode_manifest(before[: -len(b"\4\1\0\1\0\0")] + raw)
    except CorruptDataError:
        return
    assert [dict(item.offsets) for item in found.offsets] == [{("t", 0): 1, ("t", 1): 2}]


# Calls


def test_a_transaction_sends_what_each_place_says_as_librdkafka_would() -> None:
    bench = Bench()
    transaction = bench.begin()
    bench.sender.acknowledge()
    places = [
        TopicPartition("topic", 0, 1),
        TopicPartition("topic", 1, 2, metadata=""),
        TopicPartition("topic", 2, 3, metadata="größe", leader_epoch=0),
        TopicPartition("topic", 3, 4, leader_epoch=7),
        TopicPartition("topic", 4, metadata="not read yet"),
    ]
    transaction.send_offsets(places, "group")
    transaction.send_offsets({("topic", 3): 5}, "group")
    transaction.commit_async()
    bench.sender.acknowledge()
    [found] = decode_manifest(bench.sender.sent[-1].value).offsets
    assert dict(found.offsets) == {("topic", 0): 1, ("topic", 1): 2, ("topic", 2): 3, ("topic", 3): 5}
    assert dict(found.details) == {("topic", 1): (-1, "\0"), ("topic", 2): (0, "größe\0")}


def test_metadata_that_is_too_large_is_refused_where_it_is_given_and_the_rest_is_committed() -> None:
    bench = Bench()
    transaction = bench.begin()
    bench.sender.acknowledge()
    transaction.write(ORDERS, key=b"k", value=b"v")
    transaction.send_offsets([TopicPartition("topic", 0, 1, metadata="kept")], "group")
    with raises_code("offset-metadata-too-large"):
        transaction.send_offsets([TopicPartition("topic", 0, 2, metadata="x" * METADATA_CHARACTERS_MAX)], "group")
    whole = "x" * (METADATA_CHARACTERS_MAX - 1)
    many = METADATA_BYTES_MAX // METADATA_CHARACTERS_MAX
    with pytest.raises(TransactionTooLargeError, match="these offsets were not taken, the others were"):
        transaction.send_offsets(
            [TopicPartition("topic", number + 1, 2, metadata=whole) for number in range(many)], "h"
        )
    transaction.commit_async()
    bench.sender.acknowledge()
    [found] = decode_manifest(bench.sender.sent[-1].value).offsets
    assert dict(found.details) == {("topic", 0): (-1, "kept\0")}


def test_as_many_offsets_as_are_possible_may_have_leader_epochs() -> None:
    bench = Bench()
    transaction = bench.begin()
    bench.sender.acknowledge()
    places = [TopicPartition("topic", number, 1 << 40, leader_epoch=1 << 30) for number in range(PARTITIONS_MAX)]
    transaction.send_offsets(places, "group")
    transaction.commit_async()
    bench.sender.acknowledge()
    [found] = decode_manifest(bench.sender.sent[-1].value).offsets
    assert len(found.details) == PARTITIONS_MAX


def test_a_manifest_of_an_earlier_version_has_none() -> None:
    manifest = Manifest({PieceKey(0, 0, 3): 336_776})
    assert manifest.encode()[-1:] == b"\0"
    assert decode_manifest(manifest.encode()[:-1]) == manifest
    assert decode_manifest(b"\0") == Manifest({})


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
