"""The fold over arbitrary buffers: prefixes, splits, repeats and interleavings give the same; limits always hold."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.buffers import Message, Truth, World, fold_all, new_fold, snapshot, worlds
from rollbridge.buffer.fold import BufferFold, BufferLimits
from rollbridge.buffer.frames import PieceKey, pack_bundle, unpack_header
from rollbridge.buffer.state import CACHED_PRICE, BufferedTransaction
from rollbridge.buffer.table import State
from rollbridge.stream.names import Partition

SMALL = BufferLimits(
    cache_bytes_max=12 + 4 * CACHED_PRICE,
    cache_bytes_per_transaction_max=7 + 3 * CACHED_PRICE,
    transaction_bytes_max=16,
    open_transactions_max=2,
    lease_ms_max=20,
)


@given(worlds(), st.sampled_from([None, SMALL]), st.data())
def test_a_fold_that_is_repeated_and_split_in_any_way_gives_the_same(
    world: World, limits: BufferLimits | None, data: st.DataObject
) -> None:
    messages = world.interleaved(data.draw)
    once = fold_all(new_fold(limits), messages)

    again = new_fold(limits)
    folded = 0
    while folded < len(messages):
        upto = data.draw(st.integers(folded + 1, len(messages)), label="fold up to")
        rewind = data.draw(st.integers(0, folded), label="repeat from")
        fold_all(again, messages[rewind:upto])
        folded = upto
    assert snapshot(again) == snapshot(once)


@given(worlds(), st.data())
def test_a_fold_of_any_prefix_goes_on_where_it_stopped(world: World, data: st.DataObject) -> None:
    messages = world.interleaved(data.draw)
    cut = data.draw(st.integers(0, len(messages)))
    prefix = fold_all(new_fold(), messages[:cut])
    assert prefix.positions == {
        partition: 1 + max(message.offset for message in group)
        for partition, group in groupby(sorted(messages[:cut], key=lambda item: item.partition), lambda m: m.partition)
    }
    assert snapshot(fold_all(prefix, messages)) == snapshot(fold_all(new_fold(), messages))


def cut_into_runs(world: World, draw: st.DrawFn | Any) -> dict[Partition, list[list[Message]]]:
    """The logs, cut into runs of frames of one transaction, each of which could be a bundle."""
    runs: dict[Partition, list[list[Message]]] = {}
    for partition, log in world.logs.items():
        runs[partition] = []
        before: bytes | None = None
        for message in log:
            header = unpack_header(message.key)
            transaction = None if header is None or message.value is None else header.transaction
            if transaction is not None and transaction == before and draw(st.booleans()):
                runs[partition][-1].append(message._replace(appended_ms=runs[partition][-1][0].appended_ms))
            else:
                runs[partition].append([message])
            before = transaction
    return runs


def bundle_of(run: list[Message], offset: int) -> Message:
    """A run as one message."""
    if len(run) == 1:
        return run[0]._replace(offset=offset)
    key, value = pack_bundle([(message.key or b"", message.value or b"") for message in run])
    return run[0]._replace(offset=offset, key=key, value=value)


def meaning(fold: BufferFold) -> tuple[object, ...]:
    """What a fold knows, but for the places of frames in the buffers."""
    return (
        [
            (item.id, item.state, item.reason, item.begin, item.begun_ms, item.manifest, item.decided_ms)
            for item in fold.open.values()
        ],
        [
            [(ref.piece, ref.first_count, ref.records, ref.size, ref.batch) for ref in item.frames]
            for item in fold.open.values()
        ],
        list(fold.decided),
        fold.rejected,
        fold.cached_bytes,
    )


@given(worlds(), st.data())
def test_a_bundle_means_what_its_frames_mean_one_after_the_other(world: World, data: st.DataObject) -> None:
    runs = cut_into_runs(world, data.draw)
    apart, together = new_fold(), new_fold()
    offsets = dict.fromkeys(runs, 0)
    while any(runs.values()):
        partition = data.draw(st.sampled_from(sorted(partition for partition, left in runs.items() if left)))
        run = runs[partition].pop(0)
        fold_all(apart, run)
        message = bundle_of(run, offsets[partition])
        offsets[partition] += 1
        together.fold(*message)
        for item in together.open.values():
            for ref in item.frames:
                if ref.partition == partition and ref.offset == message.offset:
                    assert (message.value or b"")[ref.start : ref.start + ref.size] == ref.batch
    assert meaning(together) == meaning(apart)


def contents(item: BufferedTransaction) -> dict[PieceKey, list[int]]:
    """First counts of the frames that would be merged, by piece."""
    found: dict[PieceKey, list[int]] = {}
    for frame in item.merged_frames():
        found.setdefault(frame.piece, []).append(frame.first_count)
    return found


def expected_state(truth: Truth) -> State:
    if truth.corrupt or truth.end == "abort":
        return State.ABORTING
    return State.COMMITTING if truth.end == "commit" else State.OPEN


@given(worlds(), st.data())
def test_in_whatever_order_the_buffers_are_read_each_transaction_comes_out_the_same(
    world: World, data: st.DataObject
) -> None:
    fold = fold_all(new_fold(), world.interleaved(data.draw))
    assert fold.open.keys() == {truth.id for truth in world.truths}
    for truth in world.truths:
        item = fold.open[truth.id]
        assert item.state is expected_state(truth)
        if item.state is State.COMMITTING:
            assert item.is_complete() == truth.complete
            assert item.manifest_fault() is None
            assert contents(item) == truth.named
            assert item.manifest is not None
            if truth.complete:
                assert sum(frame.records for frame in item.merged_frames()) == item.manifest.records


def finished(fold: BufferFold) -> list[BufferedTransaction]:
    return [item for item in fold.decided.values() if item.state is State.ABORTING or item.is_complete()]


@given(worlds(corrupt=False), st.data())
def test_a_leader_that_settles_at_once_merges_every_transaction_once_and_exactly(
    world: World, data: st.DataObject
) -> None:
    fold = new_fold()
    merged: dict[bytes, dict[PieceKey, list[int]]] = {}
    aborted: list[bytes] = []
    for message in world.interleaved(data.draw):
        fold.fold(*message)
        for item in finished(fold):
            if item.state is State.COMMITTING:
                assert item.id not in merged
                merged[item.id] = contents(item)
            else:
                aborted.append(item.id)
            fold.settle(item.id)
    assert merged == {item.id: item.named for item in world.truths if item.end == "commit" and item.complete}
    assert sorted(aborted) == sorted(item.id for item in world.truths if item.end == "abort")
    assert fold.cached_bytes == sum(frame.size + CACHED_PRICE for item in fold.open.values() for frame in item.frames)
    assert fold.held_bytes == sum(item.price() for item in fold.open.values())


@given(worlds(), st.data())
def test_a_new_leader_that_knows_the_outcomes_opens_nothing_again(world: World, data: st.DataObject) -> None:
    """It folds everything from the start; what stands in the commit log already is left out."""
    ended = data.draw(st.sets(st.sampled_from([truth.id for truth in world.truths])))
    fold = fold_all(new_fold(terminated=ended), world.interleaved(data.draw))
    assert fold.open.keys() == {truth.id for truth in world.truths} - ended
    fresh = fold_all(new_fold(), world.interleaved(data.draw))
    for identifier, item in fold.open.items():
        assert item.state is fresh.open[identifier].state


@given(worlds(transactions_max=6), st.data())
def test_limits_hold_after_every_message(world: World, data: st.DataObject) -> None:
    fold = new_fold(SMALL)
    for message in world.interleaved(data.draw):
        fold.fold(*message)
        cached: Counter[bytes] = Counter()
        for item in fold.open.values():
            for frame in item.frames:
                assert frame.batch is None or len(frame.batch) == frame.size
                cached[item.id] += 0 if frame.batch is None else len(frame.batch) + CACHED_PRICE
            assert item.cached_bytes == cached[item.id] <= SMALL.cache_bytes_per_transaction_max
            assert item.begin.lease_ms <= SMALL.lease_ms_max or item.state is State.ABORTING
            assert item.state is not State.OPEN or item.bytes <= SMALL.transaction_bytes_max
        assert fold.cached_bytes == cached.total() <= SMALL.cache_bytes_max
        assert sum(item.state is State.OPEN for item in fold.open.values()) <= SMALL.open_transactions_max
        assert list(fold.decided) == [
            identifier for identifier in fold.decided if fold.open[identifier].state is not State.OPEN
        ]


@given(worlds(), st.data())
def test_below_the_low_water_mark_everything_is_settled(world: World, data: st.DataObject) -> None:
    fold = new_fold()
    low: dict[tuple[str, int], int] = {}
    seen: list[Message] = []
    for message in world.interleaved(data.draw):
        fold.fold(*message)
        seen.append(message)
        for item in finished(fold):
            if data.draw(st.booleans(), label="settle"):
                fold.settle(item.id)
        before, low = low, fold.low_water()
        assert all(low[partition] >= offset for partition, offset in before.items()), "it never falls"
        assert all(low[partition] <= fold.positions[partition] for partition in low)
        for item in fold.open.values():
            for frame in item.frames:
                assert frame.offset >= low[frame.partition]
    # What remains needs nothing below the mark: a fold that starts there ends with the same open transactions.
    later = fold_all(new_fold(), [message for message in seen if message.offset >= low[message.partition]])
    for identifier, item in fold.open.items():
        if item.state is not State.ABORTING:
            assert later.open[identifier].state is item.state
            assert contents(later.open[identifier]) == contents(item)


@given(worlds(), st.data())
def test_expiry_takes_exactly_the_open_ones_in_order_of_their_deadlines(world: World, data: st.DataObject) -> None:
    fold = fold_all(new_fold(), world.interleaved(data.draw))
    now = data.draw(st.integers(0, 200))
    due = [item for item in fold.open.values() if item.state is State.OPEN and item.deadline_ms < now]
    found = fold.ages.overdue(now)
    assert {item.id for item in found} == {item.id for item in due}
    assert [item.deadline_ms for item in found] == sorted(item.deadline_ms for item in due)
    assert [item.id for item in fold.ages.overdue(now)] == [item.id for item in found], "asking changes nothing"
    for item in found:
        fold.expire(item.id, now)
        assert item.state is State.ABORTING
    assert fold.ages.overdue(now) == []
