"""Frames: the header's layout, round trips of the values, and what corrupt ones raise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.strategies import stream_names, transaction_ids
from rollbridge.base.ids import COUNT_MAX, PART_MAX, SEGMENT_NUMBER_MAX, TransactionId
from rollbridge.buffer.frames import (
    BUNDLED_FRAME_BYTES,
    LABEL_CHARACTERS_MAX,
    REASON_CHARACTERS_MAX,
    STREAMS_MAX,
    BeginFrame,
    FrameHeader,
    FrameKind,
    Manifest,
    PieceKey,
    buffer_partition,
    decode_abort,
    decode_begin,
    decode_manifest,
    encode_abort,
    pack_bundle,
    unpack_bundle,
    unpack_header,
)
from rollbridge.commitlog.outcomes import RETAIN_DEFAULT
from rollbridge.errors import CorruptDataError

int32 = st.integers(0, (1 << 31) - 1)
headers = st.builds(
    FrameHeader,
    st.sampled_from(FrameKind),
    transaction_ids.map(lambda item: item.bytes),
    st.integers(0, PART_MAX),
    st.integers(0, SEGMENT_NUMBER_MAX),
    st.integers(0, COUNT_MAX),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, (1 << 32) - 1),
)
begins = st.builds(
    BeginFrame,
    st.sampled_from(["client", "loader-1", "team:a@host"]),
    int32,
    st.none() | st.text(max_size=20),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.dictionaries(stream_names.map(str), int32, min_size=1, max_size=5),
)
manifests = st.dictionaries(st.builds(PieceKey, int32, int32, int32), st.integers(1, (1 << 63) - 1), max_size=20).map(
    Manifest
)


@given(st.binary(max_size=60) | st.binary(min_size=44, max_size=44).map(lambda tail: b"RB\x01" + tail[3:]))
def test_any_key_is_a_header_that_packs_to_itself_or_foreign(key: bytes) -> None:
    header = unpack_header(key)
    assert header is None or header.pack() == key


SOME_ID = TransactionId.of(1, 42).bytes
bundled = st.lists(
    st.tuples(
        headers.filter(lambda header: header.kind is not FrameKind.BUNDLE).map(
            lambda header: header._replace(transaction=SOME_ID)
        ),
        st.binary(max_size=30),
    ),
    min_size=1,
    max_size=6,
)


@given(bundled)
def test_a_bundle_gives_back_its_frames(frames: list[tuple[FrameHeader, bytes]]) -> None:
    key, value = pack_bundle([(header.pack(), content) for header, content in frames])
    header = unpack_header(key)
    assert header == FrameHeader(FrameKind.BUNDLE, SOME_ID, records=len(frames))
    found = unpack_bundle(header, value)
    assert [(inner, content) for inner, _, content in found] == frames
    assert all(value[start : start + len(content)] == content for _, start, content in found)
    assert len(value) == sum(len(content) + BUNDLED_FRAME_BYTES for _, content in frames)


@given(bundled, st.data())
def test_a_bundle_that_is_cut_or_miscounted_is_corrupt(
    frames: list[tuple[FrameHeader, bytes]], data: st.DataObject
) -> None:
    _, value = pack_bundle([(header.pack(), content) for header, content in frames])
    header = FrameHeader(FrameKind.BUNDLE, SOME_ID, records=len(frames))
    damaged = [
        (header, value[: data.draw(st.integers(0, len(value) - 1))]),
        (header, value + data.draw(st.binary(min_size=1, max_size=5))),
        (header._replace(records=len(frames) + 1), value),
        (header._replace(records=len(frames) - 1), value),
        (header._replace(records=0), b""),
    ]
    for wrong, content in damaged:
        with pytest.raises(CorruptDataError):
            unpack_bundle(wrong, content)


def test_no_bundle_stands_in_a_bundle_and_no_frame_is_impossible() -> None:
    inside = FrameHeader(FrameKind.DATA, SOME_ID)
    for wrong in (
        inside._replace(kind=FrameKind.BUNDLE),
        inside._replace(part=PART_MAX + 1),
        inside._replace(segment=SEGMENT_NUMBER_MAX + 1),
        inside._replace(first_count=COUNT_MAX + 1),
    ):
        key, value = pack_bundle([(inside.pack(), b"x"), (wrong.pack(), b"y")])
        header = unpack_header(key)
        assert header is not None
        with pytest.raises(CorruptDataError, match="frame 1 of a bundle"):
            unpack_bundle(header, value)


@given(st.integers(0, 1 << 32), st.binary(max_size=100))
def test_any_bytes_are_a_bundle_or_corrupt(records: int, value: bytes) -> None:
    try:
        unpack_bundle(FrameHeader(FrameKind.BUNDLE, SOME_ID, records=records), value)
    except CorruptDataError:
        return


@given(begins)
def test_begin_frames_round_trip(frame: BeginFrame) -> None:
    again = decode_begin(frame.encode())
    assert again == frame
    assert list(again.streams) == list(frame.streams), "places count from the order"
    assert again.home == next(iter(frame.streams))
    assert [again.places[name] for name in again.streams] == list(range(len(again.streams)))


@given(manifests)
def test_manifests_round_trip(manifest: Manifest) -> None:
    assert decode_manifest(manifest.encode()) == manifest
    assert manifest.records == sum(manifest.pieces.values())


@given(st.text())
def test_reasons_round_trip(reason: str) -> None:
    assert decode_abort(encode_abort(reason)) == reason[:REASON_CHARACTERS_MAX]


def begin_with(*streams: tuple[str, int]) -> bytes:
    """A BEGIN frame with its streams as they are, which the class would not let through."""
    raw = BeginFrame("c", 0, None, 1, {"s/a": 0}).encode()
    head = raw[: raw.index(b"\x02\x06s/a")]
    items = b"".join(
        bytes([2 * len(name)]) + name.encode() + bytes([2 * epoch if epoch >= 0 else 1]) for name, epoch in streams
    )
    return head + (bytes([2 * len(streams)]) + items if streams else b"") + b"\0"


def test_the_hand_made_begin_frame_is_one() -> None:
    assert decode_begin(begin_with(("s/a", 0), ("s/b", 3))).streams == {"s/a": 0, "s/b": 3}


def test_a_begin_frame_of_an_earlier_version_asks_for_no_retention_of_its_own() -> None:
    written = BeginFrame("c", 3, "l", 1, {"s/a": 0}, retain_ms=RETAIN_DEFAULT)
    assert decode_begin(written.encode()[:-1]) == written
    assert decode_begin(replace(written, retain_ms=5_000).encode()).retain_ms == 5_000


def with_streams(names: list[str], client_name: str = "c", label: str | None = None) -> bytes:
    return BeginFrame(client_name, 0, label, 1, dict.fromkeys(names, 0)).encode()


def test_the_largest_begin_frame_that_a_client_may_send() -> None:
    raw = with_streams([f"s/{number}" for number in range(STREAMS_MAX)], "c" * 128, "x" * LABEL_CHARACTERS_MAX)
    assert len(decode_begin(raw).streams) == STREAMS_MAX


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff" * 10,
        begin_with(),
        begin_with(("s/a", 0), ("s/a", 1)),
        begin_with(("s/a", -1)),
        BeginFrame("c", 0, None, 1, {"s/a": 0}).encode()[:-2],
        # What would not fit into the records of a leader: one such frame from one client would otherwise stop the
        # leader of its group at each attempt to record it.
        with_streams([f"s/{number}" for number in range(STREAMS_MAX + 1)]),
        with_streams(["s/a"], label="x" * (LABEL_CHARACTERS_MAX + 1)),
        with_streams(["s/a"], client_name="c" * 129),
        with_streams(["s/a"], client_name="a b"),
        with_streams(["s/a", "no-slash"]),
        with_streams(["s/" + "t" * 250]),
    ],
)
def test_corrupt_begin_frames(raw: bytes) -> None:
    with pytest.raises(CorruptDataError):
        decode_begin(raw)


def test_a_reason_without_end_is_cut() -> None:
    assert decode_abort(encode_abort("x" * 1_000_000)) == "x" * REASON_CHARACTERS_MAX


def one_entry(key: PieceKey, count: int) -> bytes:
    return Manifest({key: count}).encode()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x02",
        one_entry(PieceKey(0, 0, 0), 0),
        one_entry(PieceKey(0, 0, 0), -1),
        one_entry(PieceKey(-1, 0, 0), 1),
        one_entry(PieceKey(0, -1, 0), 1),
        one_entry(PieceKey(0, 0, -1), 1),
        b"\x04" + one_entry(PieceKey(0, 0, 0), 1)[1:-1] * 2 + b"\0",
    ],
)
def test_corrupt_manifests(raw: bytes) -> None:
    with pytest.raises(CorruptDataError):
        decode_manifest(raw)


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_corrupt(raw: bytes) -> None:
    for decode in (decode_begin, decode_manifest, decode_abort):
        try:
            decode(raw)
        except CorruptDataError:
            continue


def test_large_values_are_not_kept_in_the_cache() -> None:
    """4096 cached manifests of a stream with thousands of segments would take gigabytes."""
    manifest = Manifest({PieceKey(0, 0, number): 1 for number in range(1000)})
    raw = manifest.encode()
    assert decode_manifest(raw) == manifest
    assert decode_manifest(raw) is not decode_manifest(raw)
    begin = BeginFrame("c", 0, "x" * 600, 1, {"s/a": 0}).encode()
    assert decode_begin(begin) is not decode_begin(begin)
    small = one_entry(PieceKey(0, 0, 0), 1)
    assert decode_manifest(small) is decode_manifest(small)


@given(st.integers(0, (1 << 96) - 1), st.integers(0, 70_000), st.integers(1, 64))
def test_all_frames_of_a_transaction_go_to_one_partition_whatever_its_epoch(
    counter: int, epoch: int, partitions: int
) -> None:
    partition = buffer_partition(TransactionId.of(epoch, counter), partitions)
    assert 0 <= partition < partitions
    assert partition == buffer_partition(TransactionId.of(0, counter), partitions)
