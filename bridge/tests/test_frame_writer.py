"""The frame writer: what it wrote comes out again, once, in order, at the right segment and with the right headers."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.tests.frame_makers import ID, ORDERS, PAYMENTS, Frames, history_of, route_to, writer_for
from rollbridge.base.attribution import RECORD_HEADER, unpack_record_header
from rollbridge.base.ids import local_sequence
from rollbridge.buffer.frames import FrameKind, PieceKey
from rollbridge.client.frame_writer import PartWriter
from rollbridge.client.futures import FRAME_BYTES_MIN, FrameLimits
from rollbridge.errors import BackpressureError, InvalidRequestError, RecordTooLargeError, TransactionTooLargeError
from rollbridge.kafka.committed import attributed
from rollbridge.kafka.records import Compression, LogRecord, parse_header, read_records, validate_frame
from rollbridge.stream.config import HeaderForm, TopicLimits
from rollbridge.stream.keyspace import KeySpace

keys = st.one_of(st.none(), st.binary(max_size=3))
values = st.one_of(st.none(), st.binary(max_size=2_000))
user_headers = st.lists(
    st.tuples(st.text(max_size=5).filter(lambda name: name != RECORD_HEADER), st.one_of(st.none(), st.binary())),
    max_size=3,
)
records = st.lists(
    st.tuples(st.sampled_from([ORDERS, PAYMENTS]), keys, values, user_headers, st.integers(0, 2**40)), max_size=80
)


def own_count(record: LogRecord, part: int) -> int:
    """The count that our header gives a record, which must carry it last."""
    name, raw = record.headers[-1]
    assert name == RECORD_HEADER
    assert raw is not None
    transaction, local = unpack_record_header(raw)
    assert transaction == ID
    return local - local_sequence(part, 0)


@given(
    records,
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 5),
    st.sampled_from(list(Compression)),
    st.sampled_from(list(HeaderForm)),
)
@settings(deadline=None)
def test_every_record_comes_out_once_in_order_with_its_headers(
    written: list[tuple[str, bytes | None, bytes | None, list[tuple[str, bytes | None]], int]],
    order_segments: int,
    payment_segments: int,
    part: int,
    compression: Compression,
    form: HeaderForm,
) -> None:
    frames = Frames()
    routes = (route_to(ORDERS, order_segments, headers=form), route_to(PAYMENTS, payment_segments))
    limits = FrameLimits(frame_bytes=FRAME_BYTES_MIN, compression=int(compression))
    writer = writer_for(frames, *routes, part=part, limits=limits)
    for stream, key, value, headers, timestamp in written:
        writer.write(stream, key, value, headers, timestamp)
    writer.cut_all()

    came_out: dict[int, tuple[object, ...]] = {}
    for place, segments in ((0, order_segments), (1, payment_segments)):
        for number, found in frames.records(place).items():
            before = -1
            for record in found:
                count = own_count(record, part)
                assert count > before, "a segment's records are in the order in which they were written"
                before = count
                assert count not in came_out
                came_out[count] = (
                    routes[place].stream,
                    record.key,
                    record.value,
                    record.headers[:-1],
                    record.timestamp,
                )
                if record.key is not None:
                    home = history_of(segments).active.segment_at(KeySpace().position(record.key))
                    assert home.id.number == number
    assert [came_out[count] for count in sorted(came_out)] == written


@given(records)
@settings(deadline=None)
def test_frame_headers_and_pieces_tell_what_the_frames_hold(
    written: list[tuple[str, bytes | None, bytes | None, list[tuple[str, bytes | None]], int]],
) -> None:
    frames = Frames()
    writer = writer_for(frames, route_to(ORDERS, 2), route_to(PAYMENTS, 3), part=2)
    for stream, key, value, headers, timestamp in written:
        writer.write(stream, key, value, headers, timestamp)
    pieces = {piece.key: piece for piece in writer.pieces()}
    writer.cut_all()

    counts: dict[PieceKey, list[int]] = defaultdict(list)
    for place, header, value in frames.taken:
        validate_frame(value, header.records)
        held = [own_count(record, 2) for record in attributed(read_records(value))]
        assert header.kind is FrameKind.DATA
        assert (header.transaction, header.part) == (ID.bytes, 2)
        assert (header.first_count, header.records) == (held[0], len(held))
        counts[PieceKey(2, place, header.segment)] += held
    assert pieces.keys() == counts.keys()
    for name, held in counts.items():
        piece = pieces[name]
        assert (piece.records, piece.first_count, piece.last_count) == (len(held), held[0], held[-1])
    assert {piece.key: piece for piece in writer.pieces()} == pieces, "cutting changes nothing of what was written"
    assert writer.count == len(written)


@given(
    st.lists(st.tuples(keys, st.one_of(st.none(), st.binary(max_size=300))), max_size=1200),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 1200), st.integers(1, 500)), max_size=3),
    st.sampled_from(list(HeaderForm)),
)
@settings(deadline=None, max_examples=20)
def test_many_at_once_are_the_same_as_one_by_one(
    written: list[tuple[bytes | None, bytes | None]],
    segments: int,
    between: list[tuple[int, int]],
    form: HeaderForm,
) -> None:
    one_by_one, at_once = Frames(), Frames()
    routes = route_to(ORDERS, segments, headers=form), route_to(PAYMENTS, 1, headers=form)
    first, second = writer_for(one_by_one, *routes), writer_for(at_once, *routes)
    # In between, records go to the other stream, so that those of this one do not follow each other.
    cuts = sorted({0, len(written), *(min(at, len(written)) for at, _ in between)})
    others = iter(number for _, number in between)
    for begin, end in itertools.pairwise(cuts):
        for key, value in written[begin:end]:
            first.write(ORDERS, key, value, (), 5)
        assert second.write_some(ORDERS, written[begin:end]) == end - begin
        for _ in range(next(others, 0)):
            first.write(PAYMENTS, b"k", b"v", (), 5)
            second.write(PAYMENTS, b"k", b"v", (), 5)
    first.cut_all()
    second.cut_all()
    assert [header for _, header, _ in one_by_one.taken] == [header for _, header, _ in at_once.taken]
    without_time = [
        {
            number: [(record.key, record.value, record.headers) for record in found]
            for number, found in frames.records(0).items()
        }
        for frames in (one_by_one, at_once)
    ]
    assert without_time[0] == without_time[1]
    assert first.pieces() == second.pieces()


def test_the_numbers_of_scattered_records_have_their_room_in_a_frame() -> None:
    # Each number takes two bytes: more than the record that it is of, with its lengths.
    limits = TopicLimits(20_000)
    route = replace(route_to(ORDERS, 256), limits=limits)
    key_of: dict[int, bytes] = {}
    for number in itertools.count():
        key = b"%d" % number
        key_of.setdefault(history_of(256).active.segment_at(KeySpace().position(key)).id.number, key)
        if len(key_of) == 256:
            break
    for one_by_one, size in itertools.product((False, True), (0, 18, 20, 22, 100)):
        frames = Frames()
        writer = writer_for(frames, route, limits=FrameLimits())
        turn = [(key_of[number], b"x" * size) for number in range(256)]
        for _ in range(2_500):
            if one_by_one:
                for key, value in turn[:2]:
                    writer.write(ORDERS, key, value, (), 5)
                writer.count += 254  # as if the others were written, too
            else:
                writer.write_some(ORDERS, turn[:2])
                writer.count += 254
        writer.cut_all()
        assert len(frames.taken) > 4
        assert max(len(value) for _, _, value in frames.taken) <= limits.batch_room
        for _, _, value in frames.taken:
            assert [own_count(record, 0) % 256 for record in attributed(read_records(value))] == [
                own_count(next(attributed(read_records(value))), 0) % 256
            ] * validate_frame(value, parse_header(value).record_count).record_count


def test_frames_keep_below_their_limit_and_a_larger_record_gets_one_of_its_own() -> None:
    frames = Frames()
    writer = writer_for(frames, route_to(ORDERS, 1))
    for size in (5_000, 5_000, 5_000, 5_000, 100_000, 10):
        writer.write(ORDERS, b"k", b"x" * size, (), None)
    writer.cut_all()
    sizes = [(header.records, len(value) <= FRAME_BYTES_MIN) for _, header, value in frames.taken]
    assert sizes == [(3, True), (1, True), (1, False), (1, True)]


@pytest.mark.parametrize("limit", [50_000, 1_000], ids=["above the size of a frame", "below"])
def test_a_record_over_the_limit_is_refused_and_leaves_nothing_behind(limit: int) -> None:
    frames = Frames()
    writer = writer_for(frames, route_to(ORDERS, 1, record_bytes_max=limit))
    writer.write(ORDERS, b"a", b"x" * 100, (), None)
    with pytest.raises(RecordTooLargeError) as refused:
        writer.write(ORDERS, b"b", b"x" * limit, (), None)
    assert refused.value.limit_bytes == limit
    assert refused.value.size_bytes > limit
    writer.write(ORDERS, b"c", b"small", (), None)
    writer.cut_all()
    assert [record.key for record in frames.records(0)[0]] == [b"a", b"c"]
    assert [header.records for _, header, _ in frames.taken] == [2], "what is refused cuts no batch"
    assert writer.count == 2


def test_the_limit_counts_key_value_and_headers() -> None:
    writer = writer_for(Frames(), route_to(ORDERS, 1, record_bytes_max=50_000))
    with pytest.raises(RecordTooLargeError):
        writer.write(ORDERS, b"k" * 25_000, b"v" * 25_000, (), None)
    with pytest.raises(RecordTooLargeError):
        writer.write(ORDERS, b"", b"", [("h", b"x" * 50_000)], None)


def test_a_transaction_over_its_limit_is_refused_and_keeps_what_it_has() -> None:
    frames = Frames()
    limits = FrameLimits(frame_bytes=FRAME_BYTES_MIN, transaction_bytes=40_000)
    writer = writer_for(frames, route_to(ORDERS, 1), limits=limits)
    many = [(b"k", b"x" * 1_000)] * 100
    with pytest.raises(TransactionTooLargeError):
        writer.write_some(ORDERS, many)
    writer.cut_all()
    assert sum(header.records for _, header, _ in frames.taken) == writer.count > 0


def test_our_own_header_may_not_come_from_the_user() -> None:
    writer = writer_for(Frames(), route_to(ORDERS, 1))
    with pytest.raises(InvalidRequestError, match="rollbridge"):
        writer.write(ORDERS, b"k", b"v", [(RECORD_HEADER, b"x")], None)
    assert writer.count == 0


def test_a_foreign_stream_is_refused() -> None:
    writer = writer_for(Frames(), route_to(ORDERS, 1))
    for attempt in (
        lambda: writer.write(PAYMENTS, b"k", b"v", (), None),
        lambda: writer.write_some(PAYMENTS, [(b"k", b"v")]),
    ):
        with pytest.raises(InvalidRequestError, match="sales/payments"):
            attempt()


@pytest.mark.parametrize(
    ("key", "value", "headers"),
    [
        ("text", b"v", ()),
        (b"k", "text", ()),
        (b"k", 5, ()),
        (b"k", b"v", [("h", "text")]),
        (b"k", b"v", [(b"h", b"x")]),
    ],
)
def test_wrong_types_are_refused_and_leave_nothing_behind(key: bytes, value: bytes, headers: list[object]) -> None:
    frames = Frames()
    writer = writer_for(frames, route_to(ORDERS, 1))
    writer.write(ORDERS, b"a", b"1", (), None)
    with pytest.raises(TypeError):
        writer.write(ORDERS, key, value, headers, None)  # type: ignore[arg-type]
    writer.write(ORDERS, b"b", b"2", (), None)
    writer.cut_all()
    assert [(record.key, record.value) for record in frames.records(0)[0]] == [(b"a", b"1"), (b"b", b"2")]
    assert [header.records for _, header, _ in frames.taken] == [2]


def test_a_record_that_fails_keeps_what_was_written_before() -> None:
    frames = Frames()
    writer = writer_for(frames, route_to(ORDERS, 2))
    with pytest.raises(TypeError):
        writer.write_some(ORDERS, cast("list[tuple[bytes, bytes]]", [(b"a", b"1"), (b"b", b"2"), (b"c", 3)]))
    writer.write(ORDERS, b"d", b"4", (), None)
    writer.cut_all()
    held = sorted((record.key, record.value) for found in frames.records(0).values() for record in found)
    assert held == [(b"a", b"1"), (b"b", b"2"), (b"d", b"4")]
    assert writer.count == 3


def test_records_without_a_key_stay_together_for_a_batch_then_move_on() -> None:
    frames = Frames()
    writer = writer_for(frames, route_to(ORDERS, 3), sticky=4)
    for _ in range(40):
        writer.write(ORDERS, None, b"x" * 2_000, (), None)
    writer.cut_all()
    segments = [header.segment for _, header, _ in frames.taken]
    assert segments[:4] == [1, 2, 0, 1], "the first is given, then one after the other"
    assert all(header.records > 1 for _, header, _ in frames.taken[:-1])


def test_a_frame_that_could_not_be_handed_over_goes_first_next_time() -> None:
    frames = Frames()
    writer = writer_for(frames, route_to(ORDERS, 1))
    writer.write(ORDERS, b"a", b"x" * 16_000, (), None)
    frames.full = lambda: True
    for _ in range(3):
        with pytest.raises(BackpressureError):
            writer.write(ORDERS, b"b", b"x" * 16_000, (), None)
    with pytest.raises(BackpressureError):
        writer.cut_all()
    assert writer.count == 1
    frames.full = lambda: False
    writer.write(ORDERS, b"c", b"y", (), None)
    writer.cut_all()
    assert [(header.first_count, header.records) for _, header, _ in frames.taken] == [(0, 1), (1, 1)]
    assert [record.key for record in frames.records(0)[0]] == [b"a", b"c"]


def assert_nothing_open(writer: PartWriter) -> None:
    assert writer.opened_s is None


def test_only_batches_older_than_asked_are_cut() -> None:
    frames = Frames()
    writer = writer_for(frames, route_to(ORDERS, 1), route_to(PAYMENTS, 1))
    assert_nothing_open(writer)
    writer.write(ORDERS, b"a", b"", (), None)
    first = writer.opened_s
    assert first is not None
    writer.cut_older(first - 1)
    assert frames.taken == []
    writer.write(PAYMENTS, b"b", b"", (), None)
    part_segment = writer.part_streams[PAYMENTS].slots[0]
    assert part_segment is not None
    part_segment.opened_s = first + 10
    writer.cut_older(first)
    assert [place for place, _, _ in frames.taken] == [0]
    assert writer.opened_s == first + 10
    writer.cut_older(first + 10)
    assert [place for place, _, _ in frames.taken] == [0, 1]
    assert_nothing_open(writer)


def test_after_the_end_nothing_is_handed_over() -> None:
    frames = Frames()
    writer = writer_for(frames, route_to(ORDERS, 1))
    writer.write(ORDERS, b"a", b"", (), None)
    writer.release()
    writer.cut_all()
    assert frames.taken == []


def test_the_timestamp_is_now_unless_given() -> None:
    frames = Frames()
    writer = writer_for(frames, replace(route_to(ORDERS, 1)))
    writer.write(ORDERS, b"a", b"", (), 1_234)
    writer.write(ORDERS, b"a", b"", (), None)
    writer.cut_all()
    given, now = (record.timestamp for record in frames.records(0)[0])
    assert given == 1_234
    assert now > 1_600_000_000_000
