"""Counters of ids: ids of groups never meet, and of what stands in a node only what can be is believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.base.ids import (
    COUNTER_MAX,
    JUMP,
    NUMBER_MAX,
    SHARED_MAX,
    START_MAX,
    STRIDE,
    CounterCheckpoint,
    GroupCounter,
    TransactionId,
    counter_of,
    need_number,
    parse_number,
    shared_count,
    split_counter,
)
from rollbridge.base.ids import ISSUED_MAX as COUNT_MAX
from rollbridge.buffer.snapshots import COUNTER_SHOWN_MAX, shown_counter
from rollbridge.commitlog.commit_order import CONNECTION_MAX
from rollbridge.errors import CorruptDataError
from rollbridge.metadata.records import Group
from rollbridge.stream.names import GroupName

GROUP = GroupName("sales")
numbers, counts = st.integers(0, NUMBER_MAX), st.integers(0, COUNT_MAX)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"1", 1),
        (b"0", 0),
        (b"007", 7),
        (b"100", 100),
        (b"101", None),
        (None, None),
        (b"", None),
        (b"-1", None),
        (b"+1", None),
        (b" 1", None),
        (b"1\n", None),
        (b"1_0", None),
        (b"1e2", None),
        (b"0x1", None),
        ("٣".encode(), None),
        (b"\xb2", None),
        (b"\xff\x00", None),
        (b"9" * 21, None),
        (b"9" * 4_301, None),
        (b"9" * 1_000_000, None),
        (b"0" * 1_000_000, None),
    ],
)
def test_whatever_stands_in_a_node_is_a_number_within_bounds_or_none(raw: bytes | None, expected: int | None) -> None:
    assert parse_number(raw, 100) == expected
    if expected is None:
        with pytest.raises(CorruptDataError, match=r"node /x .* up to 100 is expected.*do this") as raised:
            need_number("/x", raw, 100, "do this")
        assert len(str(raised.value)) < 400
    else:
        assert need_number("/x", raw, 100, "") == expected


@given(st.binary(max_size=30), st.integers(0, COUNT_MAX), st.integers(0, COUNT_MAX))
def test_no_value_is_an_error_or_beyond_its_bounds(raw: bytes, least: int, most: int) -> None:
    found = parse_number(raw, most, least)
    assert found is None or least <= found <= most


@given(counts)
def test_what_is_written_is_read(count: int) -> None:
    assert parse_number(b"%d" % count, COUNT_MAX) == count


@given(numbers, counts, numbers, counts, st.integers(0, 1 << 16))
def test_ids_of_groups_never_meet_and_sort_by_number(a: int, m: int, b: int, n: int, epoch: int) -> None:
    one, two = (TransactionId.of(epoch, counter_of(*pair)) for pair in ((a, m), (b, n)))
    assert split_counter(one.bytes) == (a, m)
    assert (one == two) == ((a, m) == (b, n))
    assert (one < two) == ((a, m) < (b, n))
    assert counter_of(a, m) <= COUNTER_MAX


@given(counts)
def test_ids_of_the_shared_counter_are_those_of_no_group(count: int) -> None:
    identifier = TransactionId.of(3, count).bytes
    assert split_counter(identifier) == (0, count)
    assert shared_count(identifier) == (count if count < SHARED_MAX else -1)
    assert shared_count(TransactionId.of(3, counter_of(1, count)).bytes) == -1


@given(numbers, counts, counts)
def test_what_a_snapshot_shows_tells_ids_of_a_group_apart(number: int, low: int, high: int) -> None:
    shown = [shown_counter(TransactionId.of(0, counter_of(number, item)).bytes) for item in (low, high)]
    assert shown == [low, high]
    assert max(shown) < COUNTER_SHOWN_MAX


def test_an_older_groups_connections_are_told_apart_from_those_before() -> None:
    assert START_MAX + JUMP + STRIDE < CONNECTION_MAX


@pytest.mark.parametrize(
    ("number", "count", "expected"),
    [
        (7, 0, True),
        (7, 99, True),
        (7, 100, False),
        (7, COUNT_MAX, False),
        (7, (1 << 64) - 1, False),
        (5, 1 << 63, True),
        (0, 1 << 60, True),
        (6, 1, False),
        (8, 1, False),
        (NUMBER_MAX, 0, False),
    ],
)
def test_an_id_is_believed_if_the_counter_has_given_it_out(number: int, count: int, expected: bool) -> None:
    counter = GroupCounter(7, frozenset({5}), 1_000, CounterCheckpoint(7, 100, 3))
    identifier = TransactionId.of(9, counter_of(number, count)).bytes
    assert counter.is_given(identifier) == expected
    assert counter.is_ours(identifier) == (number == 7)
    assert counter.bound == counter_of(7, 100)
    assert GroupCounter().is_given(identifier), "a group without a number believes all of them"


@given(st.builds(CounterCheckpoint, numbers, counts, st.integers(-1), counts, st.integers(-1, 1 << 31)))
def test_a_note_stands_in_the_journal(note: CounterCheckpoint) -> None:
    if note.version < 1 << 31:
        assert CounterCheckpoint.from_text(note.to_text()) == note


@pytest.mark.parametrize("raw", [None, b"", b"1 2", b"1 2 3 4 5x 6", b"x y z", b"9" * 9_000])
def test_a_note_that_can_not_be_read_is_none(raw: bytes | None) -> None:
    assert CounterCheckpoint.from_text(raw) is None


def test_a_group_of_an_earlier_version_has_no_number() -> None:
    old = b'{"name": "sales/default", "commit_log_topic_id": "log", "created_ms": 5, "terminated_topic_id": ""}'
    assert Group.from_json(old) == Group(GROUP, 5, "log")
    fresh = Group(GROUP, 5, "log", "", 7, (3, 5), 100, 1_000)
    assert Group.from_json(fresh.to_json()) == fresh
