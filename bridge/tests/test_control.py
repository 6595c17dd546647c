"""Control records: round trips, runs, and what corrupt ones raise."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollbridge_schemas
from bridge.tests.strategies import segment_ids, sns, stream_names, times_ms, transaction_ids
from rollbridge.base.ids import SegmentId, TransactionId
from rollbridge.base.mapper import FRONT, Mapper
from rollbridge.commitlog.control import ControlKind, ControlRecord, Run, add_run, decode_control
from rollbridge.errors import CorruptDataError
from rollbridge.stream.conditions import RefusedCondition

int32 = st.integers(0, (1 << 31) - 1)
runs = st.builds(Run, int32, times_ms, times_ms)
REFUSED = Mapper(RefusedCondition, "control_record.refused")
refusals = st.builds(RefusedCondition, stream_names.map(str), st.none() | st.binary(max_size=9), sns, sns)
records = st.builds(
    ControlRecord,
    transaction=transaction_ids,
    kind=st.sampled_from(ControlKind),
    client_name=st.text(max_size=10),
    begun_ms=times_ms,
    decided_ms=times_ms,
    controller_epoch=int32,
    label=st.none() | st.text(max_size=10),
    reason=st.text(max_size=10),
    records=times_ms,
    size_bytes=times_ms,
    placement=st.dictionaries(
        stream_names.map(str), st.dictionaries(segment_ids, st.lists(runs, max_size=3), max_size=3), max_size=3
    ),
    refused=st.none() | refusals,
    order=st.none() | st.tuples(st.tuples(times_ms, int32), times_ms),
    prepared=st.dictionaries(
        stream_names.map(str), st.dictionaries(segment_ids, int32, min_size=1, max_size=3), max_size=3
    ),
)


@given(records)
def test_control_records_round_trip(record: ControlRecord) -> None:
    assert decode_control(record.transaction.bytes, record.encode_value()) == record


@given(records)
def test_the_encoder_by_hand_writes_what_the_general_one_does(record: ControlRecord) -> None:
    datum = {
        "kind": record.kind.value,
        "reason": record.reason,
        "client_name": record.client_name,
        "label": record.label,
        "records": record.records,
        "bytes": record.size_bytes,
        "begun_ms": record.begun_ms,
        "decided_ms": record.decided_ms,
        "controller_epoch": record.controller_epoch,
        "streams": [
            {
                "stream": stream,
                "segments": [
                    {
                        "segment": int(segment),
                        "runs": [
                            {"part": run.part, "base_offset": run.base_offset, "count": run.count} for run in placed
                        ],
                    }
                    for segment, placed in segments.items()
                ],
            }
            for stream, segments in record.placement.items()
        ],
        "order": None
        if record.order is None
        else {"connection": record.order[0][0], "epoch": record.order[0][1], "number": record.order[1]},
        "refused": None if record.refused is None else REFUSED.to_datum(record.refused),
        "prepared": [
            {"stream": stream, "segment": int(segment), "number": number}
            for stream, numbers in record.prepared.items()
            for segment, number in numbers.items()
        ],
    }
    assert record.encode_value() == FRONT + rollbridge_schemas.codec("control_record").encode(datum)


def test_segments_lists_every_segment_with_its_stream() -> None:
    placement = {"s/a": {SegmentId.of(0, 0): [Run(0, 5, 2)]}, "s/b": {SegmentId.of(1, 3): [Run(0, 0, 1)]}}
    record = ControlRecord(TransactionId.of(0, 1), ControlKind.COMMIT, "c", 0, 0, 1, placement=placement)
    assert list(record.segments()) == [
        ("s/a", SegmentId.of(0, 0), [Run(0, 5, 2)]),
        ("s/b", SegmentId.of(1, 3), [Run(0, 0, 1)]),
    ]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.booleans())))
def test_runs_hold_every_offset_once_in_order_and_join_where_they_can(appends: list[tuple[int, int, bool]]) -> None:
    joined: list[Run] = []
    offset = 0
    flat: list[tuple[int, int]] = []
    for part, count, gap in appends:
        offset += gap
        add_run(joined, part, offset, count)
        flat.extend((part, offset + place) for place in range(count))
        offset += count
    assert [(run.part, run.base_offset + place) for run in joined for place in range(run.count)] == flat
    for before, after in pairwise(joined):
        assert (before.part, before.base_offset + before.count) != (after.part, after.base_offset)


GOOD = ControlRecord(TransactionId.of(0, 1), ControlKind.ABORT, "c", 0, 0, 1)
IMPOSSIBLE_SEGMENT = rollbridge_schemas.codec("control_record").encode(
    {
        "kind": "COMMIT",
        "client_name": "c",
        "begun_ms": 0,
        "decided_ms": 0,
        "controller_epoch": 0,
        "streams": [{"stream": "s/a", "segments": [{"segment": -1, "runs": []}]}],
    }
)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, None),
        (GOOD.transaction.bytes, None),
        (GOOD.transaction.bytes, b""),
        (GOOD.transaction.bytes, GOOD.encode_value()[:-4]),
        (GOOD.transaction.bytes, b"\x01"),
        (GOOD.transaction.bytes, b"\x08" + GOOD.encode_value()[1:]),
        (GOOD.transaction.bytes, b"\x01\x08" + GOOD.encode_value()[2:]),
        (GOOD.transaction.bytes, IMPOSSIBLE_SEGMENT),
        (None, GOOD.encode_value()),
        (b"short", GOOD.encode_value()),
        (b"\xff" * 16, GOOD.encode_value()),
    ],
)
def test_corrupt_control_records(key: bytes | None, value: bytes | None) -> None:
    with pytest.raises(CorruptDataError, match="a message of the commit log is not a control record"):
        decode_control(key, value)


@given(st.binary(max_size=20), st.binary(max_size=200))
def test_any_bytes_decode_or_are_corrupt(key: bytes, value: bytes) -> None:
    try:
        decode_control(key, value)
    except CorruptDataError:
        return
