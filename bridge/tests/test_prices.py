"""What a fold holds has a price, not below what the memory takes; limits hold while folding, and nobody else pays."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.buffers import Buffer, World, begin_frame, fold_all, new_fold, worlds
from rollbridge.base.ids import COUNT_MAX, PART_MAX, SEGMENT_NUMBER_MAX, TransactionId
from rollbridge.base.sn import EMPTY
from rollbridge.buffer.fold import BufferFold, BufferLimits
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind, Manifest, PieceKey
from rollbridge.buffer.owners import CLIENTS_MAX, OWNERS_MAX
from rollbridge.buffer.state import (
    CACHED_PRICE,
    FRAME_PRICE,
    PIECE_PRICE,
    BufferedTransaction,
    FrameRef,
    HeldFrames,
    begin_price,
)
from rollbridge.buffer.table import State
from rollbridge.commitlog.commit_order import CommitLines, CommitOrder
from rollbridge.stream.conditions import Condition, Scope, StreamCondition
from rollbridge.stream.group_offsets import GroupOffsets, OffsetDetails

TINY = 60
"""Bytes of a frame's batch, about what the smallest record batch takes."""
WASTE = 3.0
"""By how much what is counted may exceed what is taken: limits that count too much refuse for nothing."""

Message = tuple[bytes, bytes]
"""Key and value."""


def identifier(counter: int) -> bytes:
    return TransactionId.of(0, counter).bytes


def begin(counter: int, begin: BeginFrame) -> Message:
    return FrameHeader(FrameKind.BEGIN, identifier(counter)).pack(), begin.encode()


def data(counter: int, first: int, part: int = 0, segment: int = 0) -> Message:
    return FrameHeader(FrameKind.DATA, identifier(counter), part, segment, first, 1).pack(), b"1|".ljust(TINY, b".")


def named(place: int, texts: int) -> str:
    return f"s/{place}-".ljust(texts, "x")


def many_begins() -> Iterator[Message]:
    for counter in range(1, 1_001):
        yield begin(counter, begin_frame("s/a", client=f"client-{counter}"))


def many_streams() -> Iterator[Message]:
    for counter in range(1, 11):
        streams = dict.fromkeys(["s/a", *(f"s/{place}-{counter}" for place in range(800))], 0)
        yield begin(counter, BeginFrame(f"client-{counter}", 1, "l" * 1_000, 1_000, streams))


def tiny_frames() -> Iterator[Message]:
    yield begin(1, begin_frame("s/a"))
    for count in range(10_000):
        yield data(1, count * 1_000)


def tiny_pieces() -> Iterator[Message]:
    yield begin(1, begin_frame("s/a"))
    for count in range(6_000):
        yield data(1, 1 << 39, count, count)


def owners() -> Iterator[Message]:
    for counter in range(1, 6):
        yield begin(counter, begin_frame("s/a"))
        for part in range(1, OWNERS_MAX):
            yield FrameHeader(FrameKind.BEGIN, identifier(counter), part + 1_000).pack(), begin_frame("s/a").encode()


def manifests() -> Iterator[Message]:
    pieces = {PieceKey(part + 1_000, 300, 1_000): 1_000 for part in range(2_000)}
    for counter in range(1, 11):
        yield begin(counter, begin_frame("s/a"))
        conditions = tuple(
            StreamCondition(0, Condition(EMPTY, Scope.KEY, b"%d-%d" % (counter, place))) for place in range(200)
        )
        named = {(f"topic-{counter}-{place}", 0): place + 1_000 for place in range(1_000)}
        details = {where: OffsetDetails(offset, f"read up to {offset}") for where, offset in named.items()}
        offsets = (GroupOffsets("g" * 100, named, details=details),)
        manifest = Manifest(pieces, offsets, conditions)
        yield FrameHeader(FrameKind.COMMIT, identifier(counter)).pack(), manifest.encode()


def taken(fold: BufferFold, messages: Iterator[Message]) -> int:
    """Bytes of memory that are taken after messages were folded and have gone."""
    gc.collect()
    tracemalloc.start()
    try:
        for offset, (key, value) in enumerate(messages):
            fold.fold("s/a", ("buffer", 0), offset, 10**12 + offset, bytes(bytearray(key)), bytes(bytearray(value)))
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("cache", [0, 1 << 40], ids=["positions", "cached"])
@pytest.mark.parametrize("made", [many_begins, many_streams, tiny_frames, tiny_pieces, owners, manifests])
def test_nothing_takes_more_memory_than_is_counted(made: Callable[[], Iterator[Message]], cache: int) -> None:
    def fold() -> BufferFold:
        limits = BufferLimits(cache_bytes_max=cache, cache_bytes_per_transaction_max=1 << 40)
        made = new_fold(limits)
        made.chronicle.is_live = True
        return made

    taken(fold(), made())  # what is made once, such as decoders and caches of theirs
    measured = fold()
    real = taken(measured, made())
    counted = measured.held_bytes + measured.cached_bytes
    assert real <= counted <= WASTE * real, f"{real} bytes are taken, {counted} were counted"
    assert all(item.state is not State.ABORTING for item in measured.open.values())


@pytest.mark.parametrize("made", [many_begins, many_streams])
def test_what_is_noted_of_ended_transactions_takes_no_more_than_is_counted(
    made: Callable[[], Iterator[Message]],
) -> None:
    def fold() -> BufferFold:
        noting = new_fold(terminated=[identifier(counter) for counter in range(1, 1_001)])
        noting.late = {}
        return noting

    taken(fold(), made())
    measured = fold()
    real = taken(measured, made())
    assert real <= measured.late_bytes <= WASTE * real, f"{real} bytes are taken, {measured.late_bytes} were counted"
    assert not measured.open
    for counter in range(1, 1_001):
        measured.forget_late(identifier(counter))
    assert measured.late_bytes == 0


def test_of_ended_transactions_a_new_leader_notes_only_streams_that_there_are() -> None:
    fold = new_fold(terminated=[identifier(counter) for counter in range(1, 11)])
    fold.late, fold.late_streams = {}, {"s/a", "s/b"}
    for offset, (key, value) in enumerate(many_streams()):
        fold.fold("s/a", ("buffer", 0), offset, 0, key, value)
    assert {begun.streams for begun in fold.late.values()} == {("s/a",)}
    assert len(fold.late) == 10


def without_batches(frames: object) -> list[FrameRef]:
    assert isinstance(frames, BufferedTransaction)
    return [replace(frame, batch=None) for frame in frames.merged_frames()]


@given(worlds(), st.integers(0, 4 * (CACHED_PRICE + 5)), st.data())
def test_what_is_merged_does_not_depend_on_what_was_cached(world: World, room: int, data: st.DataObject) -> None:
    messages = world.interleaved(data.draw)
    whole = fold_all(new_fold(), messages)
    ranges = fold_all(new_fold(BufferLimits(cache_bytes_max=0)), messages)
    some = fold_all(new_fold(BufferLimits(cache_bytes_max=room)), messages)
    assert ranges.cached_bytes == 0
    for identifier, item in whole.open.items():
        for other in (ranges.open[identifier], some.open[identifier]):
            assert without_batches(other) == without_batches(item)
            assert (other.state, other.reason, other.held_bytes) == (item.state, item.reason, item.held_bytes)
            assert other.is_complete() == item.is_complete()
            assert other.manifest_fault() == item.manifest_fault()
    assert whole.held_bytes == ranges.held_bytes == sum(item.held_bytes for item in whole.open.values())


FRAMES = st.lists(
    st.builds(
        FrameRef,
        st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 2)),
        st.integers(0, (1 << 63) - 1),
        st.builds(PieceKey, st.integers(0, PART_MAX), st.integers(0, 999), st.integers(0, SEGMENT_NUMBER_MAX)),
        st.integers(0, COUNT_MAX),
        st.integers(1, (1 << 31) - 1),
        st.integers(0, (1 << 31) - 1),
        st.none() | st.just(b"batch"),
        st.integers(0, (1 << 31) - 1),
    )
)


@given(FRAMES)
def test_frames_that_are_packed_are_what_they_were(frames: list[FrameRef]) -> None:
    held = HeldFrames(frames)
    assert list(held) == frames
    assert [held[place] for place in range(len(held))] == frames
    assert held[1:3] == frames[1:3]
    assert held == frames
    assert list(held.counts()) == [(frame.piece, frame.records) for frame in frames]
    assert (held == frames[1:]) is (not frames)


def test_a_transaction_that_takes_too_much_is_aborted_while_it_is_folded_and_no_other() -> None:
    price = begin_price(begin_frame("s/a")) + PIECE_PRICE
    buffer = Buffer(BufferLimits(held_bytes_per_transaction_max=price + 10 * FRAME_PRICE))
    one, other = buffer.begin(1, "s/a"), buffer.begin(2, "s/a")
    buffer.data(other, 0, 1)
    for count in range(10):
        buffer.data(one, count, 1)
    assert buffer.fold.open[one].state is State.OPEN
    buffer.data(one, 10, 1)
    item = buffer.fold.open[one]
    assert item.state is State.ABORTING
    assert "held_bytes_per_transaction_max" in item.reason
    assert not item.frames
    assert buffer.fold.open[other].state is State.OPEN
    assert buffer.fold.held_bytes == sum(item.held_bytes for item in buffer.fold.open.values())


def test_a_commit_that_names_too_much_is_aborted() -> None:
    buffer = Buffer(BufferLimits(held_bytes_per_transaction_max=10_000))
    one = buffer.begin(1)
    buffer.commit(one, {(part, 0, 0): 1 for part in range(100)})
    assert buffer.fold.open[one].state is State.ABORTING
    assert list(buffer.fold.decided) == [one]


def test_when_the_group_is_full_nothing_begins_and_what_is_open_goes_on() -> None:
    price = begin_price(begin_frame("s/a"))
    buffer = Buffer(BufferLimits(held_bytes_max=100 * price))
    honest = buffer.begin(1, "s/a")
    misuse = [buffer.begin(counter, "s/a") for counter in range(2, 200)]
    states = [buffer.fold.open[item].state for item in misuse if item in buffer.fold.open]
    assert states.count(State.OPEN) in (73, 74)
    assert {buffer.fold.open[item].reason for item in misuse[states.count(State.OPEN) : len(states)]} == {
        f"the open transactions of the group take too much of {100 * price} bytes of memory, held_bytes_max"
    }
    assert len(states) < 100, "what finds no room to be refused is dropped"
    assert buffer.fold.rejected["crowded"] == 198 - len(states)
    buffer.data(misuse[-1], 0, 1)
    assert misuse[-1] not in buffer.fold.open
    for count in range(50):
        buffer.data(honest, count, 1)
    buffer.commit(honest, {(0, 0, 0): 50})
    assert buffer.fold.open[honest].is_complete()


def test_when_room_is_needed_the_one_that_takes_the_most_is_aborted() -> None:
    price = begin_price(begin_frame("s/a"))
    buffer = Buffer(BufferLimits(held_bytes_max=10 * price))
    honest, large, other = (buffer.begin(counter, "s/a") for counter in (1, 2, 3))
    for count in range(int(5.7 * price) // FRAME_PRICE - 20):
        buffer.data(large, count, 1)
    assert buffer.fold.open[large].state is State.OPEN
    for count in range(40):
        buffer.data(honest, count, 1)
    states = [buffer.fold.open[item].state for item in (honest, large, other)]
    assert states == [State.OPEN, State.ABORTING, State.OPEN]
    assert "among the largest" in buffer.fold.open[large].reason
    assert buffer.fold.held_bytes < 4 * price


@given(worlds(transactions_max=6), st.integers(0, 60_000), st.integers(0, 10_000), st.data())
def test_memory_limits_hold_after_every_message(
    world: World, group: int, transaction: int, data: st.DataObject
) -> None:
    limits = BufferLimits(held_bytes_max=group, held_bytes_per_transaction_max=transaction)
    fold = new_fold(limits)
    for message in world.interleaved(data.draw):
        fold.fold(*message)
        assert fold.held_bytes == sum(item.held_bytes for item in fold.open.values())
        refused = sum(item.held_bytes for item in fold.open.values() if item.state is State.ABORTING)
        assert fold.refused_bytes == refused
        assert fold.held_bytes - refused <= group * 0.875
        for item in fold.open.values():
            assert item.state is State.ABORTING or item.held_bytes == item.price()
            assert item.state is not State.OPEN or item.held_bytes <= max(transaction, begin_price(item.begin))
    for identifier in list(fold.open):
        if identifier not in fold.decided:
            fold.refuse(identifier, "the end", 1)
        fold.settle(identifier)
    assert (fold.held_bytes, fold.refused_bytes, fold.cached_bytes) == (0, 0, 0)


def test_many_small_ones_make_room_together_and_the_oldest_stay() -> None:
    price = begin_price(begin_frame("s/a"))
    buffer = Buffer(BufferLimits(held_bytes_max=1_000 * price))
    honest = buffer.begin(1, "s/a")
    buffer.now_ms = 1
    misuse = [buffer.begin(counter, "s/a") for counter in range(2, 750)]
    frames = 0
    while all(buffer.fold.open[item].state is State.OPEN for item in misuse):
        buffer.data(misuse[frames % len(misuse)], frames, 1)
        frames += 1
    gone = sum(buffer.fold.open[item].state is State.ABORTING for item in misuse)
    assert 40 < gone < 70, "a sixteenth of the memory at once, so that it is not looked at for every frame"
    assert buffer.fold.open[honest].state is State.OPEN
    buffer.data(honest, 0, 1)
    buffer.commit(honest, {(0, 0, 0): 1})
    assert buffer.fold.open[honest].is_complete()


def test_a_transaction_is_resumed_so_often_and_not_more() -> None:
    buffer = Buffer()
    one, other = buffer.begin(1), buffer.begin(2)
    for part in range(1, OWNERS_MAX + 2):
        value = begin_frame().encode()
        buffer.fold.fold("s/a", ("x", 0), part, 0, FrameHeader(FrameKind.BEGIN, one, part).pack(), value)
        assert buffer.fold.open[one].state is (State.OPEN if part <= OWNERS_MAX else State.ABORTING)
    assert "resumed" in buffer.fold.open[one].reason
    assert buffer.fold.open[other].state is State.OPEN


def test_sessions_of_more_client_names_than_are_held_begin_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollbridge.buffer.owners.CLIENTS_MAX", 3)
    fold = new_fold()
    fold.fences.raise_to("recorded", 1)
    for counter in range(1, 6):
        frame = BeginFrame(f"c{counter}", 1, None, 1_000, {"s/a": 0})
        fold.fold("s/a", ("b", 0), counter, 0, *begin(counter, frame))
    nameless = BeginFrame("unknown", 0, None, 1_000, {"s/a": 0})
    fold.fold("s/a", ("b", 0), 6, 0, *begin(6, nameless))
    fold.fold("s/a", ("b", 0), 7, 0, *begin(7, BeginFrame("recorded", 1, None, 1_000, {"s/a": 0})))
    states = [fold.open[identifier(counter)].state for counter in range(1, 8)]
    assert states == [State.OPEN] * 3 + [State.ABORTING] * 2 + [State.OPEN] * 2
    assert f"more than {CLIENTS_MAX} client names" in fold.open[identifier(5)].reason


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), max_size=60),
    st.integers(0, 12),
)
def test_numbers_that_are_met_out_of_order_are_limited_and_none_is_taken_for_met(
    numbers: list[tuple[int, int]], most: int
) -> None:
    lines: CommitLines[str] = CommitLines(met_max=most)
    real: dict[int, set[int]] = {}
    for connection, number in numbers:
        order = CommitOrder(connection, 0, number, number - 1)
        lines.meet(order)
        met = real.setdefault(connection, set())
        met.add(number)
        line = lines.of(order)
        assert set(range(1, line.floor)) <= met, "all below the floor have been met"
        assert sum(lines.of(CommitOrder(item, 0, 1, 0)).waiting for item in real) <= most


def test_who_makes_up_numbers_loses_them_and_others_do_not() -> None:
    lines: CommitLines[str] = CommitLines(met_max=1_000)
    honest = CommitOrder(1, 0, 3, 2)
    lines.meet(honest)
    for number in range(10, 5_000, 2):
        lines.meet(CommitOrder(2, 0, number, number - 1))
    assert lines.of(honest).waiting == 1
    lines.meet(CommitOrder(1, 0, 1, 0))
    lines.meet(CommitOrder(1, 0, 2, 1))
    assert lines.of(honest).floor == 4
