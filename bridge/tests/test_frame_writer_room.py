"""The size of a manifest is known before the commit, and what would make it too large is refused where it is added."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.tests.transaction_makers import ORDERS, PAYMENTS, Bench
from rollbridge.base.avro import encode_long
from rollbridge.base.ids import COUNT_MAX
from rollbridge.base.sn import ANY, DLSN, EMPTY, SN
from rollbridge.buffer.frames import FrameKind, Manifest, PieceKey, decode_manifest
from rollbridge.client.frame_writer import (
    ManifestRoom,
    check_parts,
    condition_bytes,
    fewest_bytes,
    offsets_bytes,
    piece_bytes,
)
from rollbridge.client.results import PartHandle, Piece
from rollbridge.errors import TransactionTooLargeError
from rollbridge.stream.conditions import Condition, Scope, StreamCondition
from rollbridge.stream.config import RECORD_BYTES_MAX_DEFAULT
from rollbridge.stream.group_offsets import GroupOffsets, OffsetDetails

BIG = st.integers(0, (1 << 31) - 1)
LONG = st.integers(0, (1 << 63) - 1)
CONDITIONS = st.builds(
    StreamCondition,
    st.integers(0, 999),
    st.builds(
        Condition,
        st.sampled_from([ANY, EMPTY, SN(sequence_id=5), SN(DLSN(4, 7, 17, 3), 42, 1017)]),
        st.sampled_from(Scope),
        st.binary(max_size=30),
    ),
)
OFFSETS = st.builds(
    GroupOffsets,
    st.text("gü", min_size=1, max_size=90),
    st.dictionaries(st.tuples(st.text("t-ö", min_size=1, max_size=9), BIG), LONG, min_size=1, max_size=20),
    BIG,
    st.text(max_size=40),
    st.none() | st.text(max_size=40),
).flatmap(
    lambda item: st.builds(
        replace,
        st.just(item),
        details=st.dictionaries(
            st.sampled_from(sorted(item.offsets)),
            st.builds(OffsetDetails, BIG | st.just(-1), st.text("ü", max_size=200)),
        ),
    )
)


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(st.builds(PieceKey, BIG, st.integers(0, 999), BIG), st.integers(1, COUNT_MAX), max_size=40),
    st.lists(OFFSETS, max_size=3),
    st.lists(CONDITIONS, max_size=5),
)
def test_no_manifest_is_larger_than_was_counted(
    pieces: dict[PieceKey, int], offsets: list[GroupOffsets], conditions: list[StreamCondition]
) -> None:
    room = ManifestRoom(0)
    for sizes in (
        map(piece_bytes, pieces),
        map(offsets_bytes, offsets),
        map(condition_bytes, conditions),
    ):
        for size in sizes:
            room.take(size, "t", "")
    manifest = Manifest(pieces, tuple(offsets), tuple(conditions)).encode()
    assert len(manifest) <= room.bytes


def test_each_call_that_would_make_the_manifest_too_large_is_refused_and_the_rest_is_committed() -> None:
    bench = Bench()
    transaction = bench.begin()
    bench.sender.acknowledge()
    transaction.write(ORDERS, key=b"k", value=b"v")
    transaction.send_offsets({("topic", 0): 7}, "group")
    transaction.expect(ORDERS, key=b"k", sn=EMPTY)
    room = transaction._writing.writer.room
    room.limit = room.bytes
    with pytest.raises(TransactionTooLargeError, match="this record was not written: commit what there is"):
        transaction.write(PAYMENTS, key=b"k", value=b"no")
    with pytest.raises(TransactionTooLargeError, match="this record was not written"):
        transaction.write_all(PAYMENTS, [(b"k", b"no")])
    with pytest.raises(TransactionTooLargeError, match="these offsets were not taken, the others were"):
        transaction.send_offsets({("topic", 1): 9}, "group")
    with pytest.raises(TransactionTooLargeError, match="this condition was not taken, the others were"):
        transaction.expect(ORDERS, key=b"k", sn=ANY)
    transaction.send_offsets({("topic", 0): 8}, "group")  # in place of what is counted already
    transaction.write(ORDERS, key=b"k", value=b"v")
    transaction.commit_async()
    bench.sender.acknowledge()
    manifest = decode_manifest(bench.sender.sent[-1].value)
    assert manifest.pieces == {(0, 0, 0): 2}
    assert [dict(item.offsets) for item in manifest.offsets] == [{("topic", 0): 8}]
    assert len(manifest.conditions) == 1


def test_parts_that_would_make_the_manifest_too_large_are_refused_and_the_transaction_stays_open() -> None:
    bench = Bench()
    transaction = bench.begin()
    bench.sender.acknowledge()
    parts = [
        PartHandle(
            transaction.id, part, tuple(Piece(part, 0, segment, 10**9, 0, 10**9 - 1) for segment in range(50_000))
        )
        for part in range(1, 4)
    ]
    with pytest.raises(TransactionTooLargeError, match="written to 150000 segments together; nothing was asked for"):
        transaction.commit(parts)
    assert FrameKind.COMMIT not in bench.sender.kinds(ORDERS)
    transaction.write(ORDERS, key=b"k", value=b"still open")
    transaction.commit_async(parts[:1])
    bench.sender.acknowledge()
    assert len(decode_manifest(bench.sender.sent[-1].value).pieces) == 50_001


def test_records_without_a_key_stay_where_they_are_if_there_is_no_room_for_another_segment() -> None:
    bench = Bench()
    bench.use(ORDERS, segments=2)
    transaction = bench.begin()
    transaction.write(ORDERS, value=bytes(500_000))
    room = transaction._writing.writer.room
    room.limit = room.bytes
    for _ in range(3):
        transaction.write(ORDERS, value=bytes(500_000))
    transaction.commit_async()
    assert list(decode_manifest(bench.sender.sent[-1].value).pieces.values()) == [4]


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([1, 2, 62, 63, 64, 65, 200, 8191, 8192, 8193]),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 63, 64, 9000])), min_size=1, max_size=4, unique=True),
    st.integers(1, 5),
)
def test_parts_that_write_to_every_segment_take_what_was_counted_at_least(
    parts: int, segments: list[tuple[int, int]], each: int
) -> None:
    each = min(each, len(segments))
    cheapest = sorted(segments, key=lambda item: len(encode_long(item[0])) + len(encode_long(item[1])))[:each]
    pieces = {PieceKey(part, *place): 1 for part in range(1, parts + 1) for place in cheapest}
    size = len(Manifest(pieces).encode())
    overhead = size - fewest_bytes(parts, segments, each)
    assert 0 < overhead <= 2 + 8  # the counts and the ends of the arrays


def test_parts_that_could_not_be_committed_together_are_refused_with_both_numbers() -> None:
    segments = [(0, number) for number in range(100)]
    limit = RECORD_BYTES_MAX_DEFAULT
    fitting = max(parts for parts in range(1, 3_000) if fewest_bytes(parts, segments, 100) <= limit)
    assert 1_500 < fitting < 2_500, "about 165,000 to 250,000 names, by the sizes of the numbers"
    check_parts(fitting, segments, None, limit)
    with pytest.raises(TransactionTooLargeError, match=f"{fitting + 1} parts with 100 segments each") as refused:
        check_parts(fitting + 1, segments, None, limit)
    assert refused.value.limit_bytes == limit
    check_parts(50 * fitting, segments, 1, limit)
    with pytest.raises(TransactionTooLargeError, match="5000 parts with 100 segments each are 500000 names"):
        check_parts(5_000, segments, None, 1 << 30)  # the record of the commit would be too large
