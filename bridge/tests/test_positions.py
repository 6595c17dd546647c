"""Positions and starts: they parse what they print, and say what is wrong with what they do not."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.strategies import group_names, segment_ids, stream_names
from rollbridge.base.ids import SegmentId
from rollbridge.base.sn import DLSN, SN
from rollbridge.errors import InvalidRequestError
from rollbridge.stream.names import GroupName, StreamName
from rollbridge.stream.positions import At, Earliest, Latest, LogPosition, ReadPosition, Since, StartLike, parse_start

ORDERS = StreamName("sales", "orders")
A, B = SegmentId.of(3, 4), SegmentId.of(0, 12)
offsets = st.integers(0, (1 << 63) - 1)


@given(st.builds(ReadPosition, stream_names, st.dictionaries(segment_ids, offsets, min_size=1, max_size=5)))
def test_a_position_parses_what_it_prints(position: ReadPosition) -> None:
    assert ReadPosition.parse(str(position)) == position
    assert parse_start(position.stream, str(position)) == At(position.offsets)


@given(st.builds(LogPosition, group_names, offsets))
def test_a_position_in_a_commit_log_parses_what_it_prints(position: LogPosition) -> None:
    assert LogPosition.parse(str(position)) == position


def test_the_text_is_sorted_and_short() -> None:
    assert str(ReadPosition(ORDERS, {B: 7, A: 12})) == "sales/orders@4-3:12,12-0:7"
    assert str(LogPosition(GroupName("sales"), 9)) == "sales/default@9"


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("earliest", Earliest()),
        ("latest", Latest()),
        ("1769860800000", Since(1769860800000)),
        (1769860800000, Since(1769860800000)),
        ("2026-01-31T12:00:00Z", Since(1769860800000)),
        ("2026-01-31T13:00:00+01:00", Since(1769860800000)),
        ("2026-01-31", Since(1769817600000)),
        (datetime(2026, 1, 31, 12, tzinfo=UTC), Since(1769860800000)),
        ("4-3:12:1", At({A: 12})),
        ("dlsn=4-3:12:1,seq=99", At({A: 12})),
        (DLSN(4, 3, 12, 1), At({A: 12})),
        (SN(dlsn=DLSN(4, 3, 12), transaction_id=5), At({A: 12})),
        ([DLSN(4, 3, 12), SN(dlsn=DLSN(12, 0, 7))], At({A: 12, B: 7})),
        ("sales/orders@4-3:12,12-0:7", At({A: 12, B: 7})),
    ],
)
def test_starts(start: StartLike, expected: object) -> None:
    assert parse_start(ORDERS, start) == expected


@pytest.mark.parametrize(
    "start",
    [
        "",
        "now",
        "-1",
        -1,
        True,
        None,
        1.5,
        [],
        "any",
        "empty",
        "seq=4",
        SN(sequence_id=4),
        [SN()],
        ["4-3:12:1"],
        DLSN(4, 3, -1),
        [DLSN(4, 3, 12), DLSN(4, 3, 13)],
        "2026-02-30",
        "4-3:12",
        "sales/payments@4-3:12",
        ReadPosition(StreamName("sales", "payments"), {A: 1}),
        "sales/orders@",
        "sales/orders@4-3:12,4-3:13",
        "sales/orders@4-3",
        "sales/orders@4-3:-1",
        f"sales/orders@4-3:{1 << 63}",
        "sales@4-3:12",
        f"sales/orders@{1 << 32}-3:12",
    ],
)
def test_what_is_no_start(start: StartLike) -> None:
    with pytest.raises(InvalidRequestError):
        parse_start(ORDERS, start)


@pytest.mark.parametrize("text", ["", "sales", "sales/default", "sales/default@", "sales/default@-1", "a/b/c@1", "@1"])
def test_what_is_no_position_in_a_commit_log(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        LogPosition.parse(text)
