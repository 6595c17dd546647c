"""Snapshot records: sizes, both directions, damage, evolution; and the set of aborted transactions behind them."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollbridge_schemas
from rollbridge.base import mapper
from rollbridge.base.ids import COUNTER_MAX, TransactionId
from rollbridge.buffer.snapshots import (
    ID_BYTES_IN_MEMORY,
    AbortedTransactions,
    SegmentCache,
    SegmentIndex,
    Snapshot,
    SnapshotSegment,
    choose,
    decode_segment,
    decode_snapshot,
    index_keys,
    segment_of,
)
from rollbridge.errors import CorruptDataError, NewerFormatError

PARTITION = ("sales.orders.transaction-buffer", 1)
IDS = st.builds(
    lambda epoch, counter: TransactionId.of(epoch, counter).bytes,
    st.integers(0, 0xFFFF),
    st.one_of(st.integers(0, 300), st.integers(0, COUNTER_MAX)),
)


def ids(*counters: int) -> tuple[bytes, ...]:
    return tuple(TransactionId.of(1, counter).bytes for counter in counters)


def one(counter: int) -> bytes:
    return ids(counter)[0]


def framed(content: bytes) -> bytes:
    return bytes([mapper.VERSION]) + zlib.crc32(content).to_bytes(4, "big") + content


def segment(*counters: int, sequence_id: int = 0, first: int = 0, last: int = 10) -> SnapshotSegment:
    return SnapshotSegment(PARTITION, "id", sequence_id, 3, first, last, ids(*counters))


def snapshot(**changes: Any) -> Snapshot:
    made = Snapshot(
        partition=PARTITION,
        topic_id="id",
        generation=4,
        controller_epoch=3,
        taken_ms=1_000,
        position=100,
        max_read_position=90,
        commit_log_position=5,
        commit_log_end=7,
        sequence_id=1,
        indexes=(segment(1, 2).index(17),),
        first_position=20,
        aborts=ids(3, 4),
    )
    return replace(made, **changes)


@given(st.lists(IDS, min_size=1, unique=True).map(tuple))
def test_any_ids_round_trip_in_both_records(aborts: tuple[bytes, ...]) -> None:
    sealed = replace(segment(1), aborts=aborts)
    assert decode_segment(sealed.encode()) == sealed
    assert segment_of(sealed.index(5), PARTITION, "id", sealed.encode()) == sealed
    assert decode_snapshot(snapshot(aborts=aborts).encode()) == snapshot(aborts=aborts)
    datum = rollbridge_schemas.codec("snapshot_segment").decode(sealed.encode()[mapper._FRONT.size :])
    assert framed(rollbridge_schemas.codec("snapshot_segment").encode(datum)) == sealed.encode()


def test_ids_of_neighbours_take_a_few_bytes_each() -> None:
    assert len(segment(*range(10_000, 20_000)).encode()) < 10_000 * 3.1


def test_the_key_is_sequence_id_and_topic_name_and_indexes_take_turns() -> None:
    assert segment(1, sequence_id=7).key == b"7-sales.orders.transaction-buffer-partition-1"
    assert {snapshot(generation=item).key for item in range(5)} == set(index_keys(PARTITION))


def test_every_changed_byte_and_every_truncation_is_noticed() -> None:
    whole = snapshot().encode()
    for place in range(len(whole)):
        with pytest.raises(CorruptDataError):
            decode_snapshot(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with pytest.raises(CorruptDataError):
            decode_snapshot(whole[:place])
    with pytest.raises(CorruptDataError, match="no snapshot record"):
        decode_segment(None)


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(raw: bytes) -> None:
    for value in (raw, framed(raw)):
        for decode in (decode_segment, decode_snapshot):
            with pytest.raises(CorruptDataError):
                decode(value)


def test_a_record_of_a_later_version_is_not_guessed_at() -> None:
    with pytest.raises(NewerFormatError, match="has version 2, and this release knows 1"):
        decode_snapshot(b"\2" + snapshot().encode()[1:])


def test_ids_that_are_none_are_refused() -> None:
    datum = {
        "topic": "t",
        "partition": 0,
        "topic_id": "i",
        "sequence_id": 0,
        "controller_epoch": 0,
        "first_position": 0,
        "max_read_position": 0,
    }
    for wrong in ({"epochs": [1], "counters_high": [], "counters_low": []}, {"epochs": [-1]}, {"epochs": [1 << 20]}):
        whole = {**datum, "epochs": [0], "counters_high": [0], "counters_low": [0], **wrong}
        with pytest.raises(CorruptDataError, match="something other than a transaction id"):
            decode_segment(framed(rollbridge_schemas.codec("snapshot_segment").encode(whole)))


@pytest.mark.parametrize("change", [{"max_read_position": 101}, {"sequence_id": 0}])
def test_a_snapshot_that_contradicts_itself_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(CorruptDataError, match="contradicts itself"):
        decode_snapshot(snapshot(**change).encode())


def test_the_newest_usable_snapshot_is_chosen_and_the_others_are_complained_of() -> None:
    newest = choose([snapshot(generation=4).encode(), None, snapshot(generation=5).encode()], PARTITION, "id", 100, 7)
    assert newest.record is not None
    assert (newest.record.generation, newest.faults) == (5, {})
    later = choose([snapshot().encode(), snapshot(generation=1, controller_epoch=9).encode()], PARTITION, "id", 100, 7)
    assert (later.place, later.faults) == (1, {})
    values = [
        snapshot(generation=9).encode()[:-1],
        snapshot(generation=8, topic_id="other").encode(),
        snapshot(generation=7, position=101).encode(),
        snapshot(generation=6, commit_log_end=8).encode(),
        snapshot(generation=3).encode(),
    ]
    choice = choose(values, PARTITION, "id", 100, 7)
    assert choice.record is not None
    assert choice.record.generation == 3
    assert list(choice.faults) == [0, 1, 2, 3]
    assert choose(values[:4], PARTITION, "id", 100, 7).record is None


@pytest.mark.parametrize(
    "other",
    [
        segment(1, 2, 3),
        segment(1, 2, sequence_id=1),
        replace(segment(1, 2), partition=("t", 0)),
        replace(segment(1, 2), topic_id="x"),
        segment(1, 2, last=11),
    ],
)
def test_a_segment_that_is_not_the_one_that_the_index_means_is_refused(other: SnapshotSegment) -> None:
    entry = segment(1, 2).index(17)
    assert segment_of(entry, PARTITION, "id", segment(1, 2).encode()) == segment(1, 2)
    with pytest.raises(CorruptDataError, match="not segment 0 of sales"):
        segment_of(entry, PARTITION, "id", other.encode())


@given(st.lists(st.tuples(IDS, st.integers(0, 50), st.integers(0, 50)), unique_by=lambda row: row[0]), st.data())
def test_every_transaction_is_found_by_id_and_position_whatever_was_sealed(
    rows: list[tuple[bytes, int, int]], data: st.DataObject
) -> None:
    aborted = AbortedTransactions()
    sealed: dict[int, SnapshotSegment] = {}
    room = 40
    for place, (transaction, first, length) in enumerate(rows):
        aborted.add(transaction, first, first + length)
        if data.draw(st.booleans()):
            everything = data.draw(st.booleans())
            cuts = aborted.seal_all(room) if everything else aborted.cuts(room)
            made = [
                SnapshotSegment(
                    PARTITION, "id", aborted.sequence_id + n, 1, cut.first_position, cut.max_read_position, cut.aborts
                )
                for n, cut in enumerate(cuts)
            ]
            empty = len(replace(segment(1), aborts=()).encode())
            assert all(len(item.encode()) - empty <= room + 8 or len(item.aborts) == 1 for item in made)
            aborted = aborted.without(cuts, [item.index(item.sequence_id) for item in made])
            sealed.update({item.sequence_id: item for item in made})
            assert aborted.encoded.size <= (0 if everything else room)
        assert len(aborted) == place + 1
    assert list(sealed) == list(range(len(sealed)))
    order = [item for number in sorted(sealed) for item in sealed[number].aborts] + list(aborted.unsealed)
    assert order == [row[0] for row in rows]
    for transaction, first, length in rows:
        position = data.draw(st.integers(first, first + length))
        holders = [item.sequence_id for item in aborted.candidates(transaction, position)]
        assert transaction in aborted.unsealed or any(transaction in sealed[item].aborts for item in holders)


def test_a_segment_that_can_not_know_a_transaction_is_not_asked() -> None:
    aborted = AbortedTransactions()
    aborted.indexes = [segment(5, 9, first=10, last=20).index(0), segment(7, 30, sequence_id=1, first=15).index(1)]
    assert [item.sequence_id for item in aborted.candidates(one(8), 20)] == [0, 1]
    assert [item.sequence_id for item in aborted.candidates(one(8), 14)] == [0]
    assert [item.sequence_id for item in aborted.candidates(one(8), 9)] == []
    assert [item.sequence_id for item in aborted.candidates(one(10))] == [1]
    assert aborted.candidates(one(31)) == []
    assert aborted.candidates(TransactionId.of(0, COUNTER_MAX).bytes) == []


def test_segments_below_the_start_of_the_buffer_expire() -> None:
    entries = [segment(1, last=10).index(0), segment(2, sequence_id=1, last=20).index(1)]
    aborted = AbortedTransactions(list(entries), 2)
    assert aborted.expired(10) == []
    assert aborted.expired(11) == entries[:1]
    aborted.expire(entries[:1])
    assert aborted.indexes == entries[1:]
    assert aborted.sequence_id == 2, "a sequence id is never used for another segment"


def test_a_snapshot_gives_back_what_was_in_it() -> None:
    aborted = AbortedTransactions.of(snapshot())
    assert tuple(aborted.unsealed) == ids(3, 4)
    assert set(aborted.unsealed.values()) == {(20, 100)}
    assert (aborted.indexes, aborted.sequence_id) == (list(snapshot().indexes), 1)


def test_the_cache_of_segments_is_bounded_and_keeps_what_was_asked_for_last() -> None:
    cache = SegmentCache(25 * ID_BYTES_IN_MEMORY)
    for number in range(3):
        cache.put(PARTITION, number, ids(*range(10)))
    assert cache.get(PARTITION, 0) is None
    assert cache.get(PARTITION, 1) == frozenset(ids(*range(10)))
    cache.put(PARTITION, 3, ids(1))
    cache.put(PARTITION, 4, ids(*range(10)))
    assert cache.get(PARTITION, 2) is None
    assert cache.get(PARTITION, 1) is not None
    assert cache.put(PARTITION, 5, ids(*range(1_000))) == frozenset(ids(*range(1_000)))
    assert cache.get(PARTITION, 4) is None
    cache.drop(PARTITION, 5)
    assert cache._bytes == 0


def test_the_index_entry_says_what_a_segment_covers() -> None:
    huge = SnapshotSegment(PARTITION, "id", 2, 1, 3, 9, (TransactionId.of(0, COUNTER_MAX).bytes, *ids(4)))
    assert huge.index(44) == SegmentIndex(2, 44, 3, 9, 2, 4, (1 << 63) - 1)
