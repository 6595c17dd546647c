"""Hypothesis strategies for the values of the model: names, ids, key ranges and epoch histories."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from rollbridge.base.ids import COUNTER_MAX, EPOCH_MAX, SEGMENT_NUMBER_MAX, SegmentId, TransactionId
from rollbridge.base.sn import DLSN, EMPTY, LONG_MAX, SN
from rollbridge.stream.epochs import EpochHistory, EpochRecord
from rollbridge.stream.keyspace import KeyRange
from rollbridge.stream.names import GroupName, StreamName

NAME_CHARACTERS = "ABCXYZabcxyz0123456789_-"

names = st.text(NAME_CHARACTERS, min_size=1, max_size=20).filter(lambda text: not text.startswith("__"))
stream_names = st.builds(StreamName, names, names)
group_names = st.builds(GroupName, names, names)
segment_ids = st.builds(SegmentId.of, st.integers(0, SEGMENT_NUMBER_MAX), st.integers(0, EPOCH_MAX))
transaction_ids = st.builds(TransactionId.of, st.integers(0, EPOCH_MAX), st.integers(0, COUNTER_MAX))
times_ms = st.integers(0, 1 << 45)
longs = st.integers(0, LONG_MAX)
dlsns = st.builds(DLSN.of, segment_ids, longs, st.integers(0, (1 << 64) - 1))
sns = st.builds(SN, st.none() | dlsns, st.none() | longs, st.none() | longs) | st.just(EMPTY)

cuts = st.floats(0.0, 1.0, exclude_min=True, exclude_max=True, allow_subnormal=False) | st.integers(1, 15).map(
    lambda number: number / 16
)
"""Inner points of the key space; sixteenths make it likely that two histories share some."""


@st.composite
def partitions(draw: st.DrawFn, segments_max: int = 5) -> list[KeyRange]:
    """Sorted ranges that partition the key space."""
    inner = draw(st.sets(cuts, max_size=segments_max - 1))
    return [KeyRange(low, high) for low, high in pairwise([0.0, *sorted(inner), 1.0])]


@st.composite
def recut(draw: st.DrawFn, ranges: list[KeyRange]) -> list[KeyRange]:
    """Ranges that cover the same as ``ranges``, cut elsewhere."""
    whole: list[tuple[float, float]] = []
    for item in sorted(ranges):
        if whole and whole[-1][1] == item.low:
            whole[-1] = (whole[-1][0], item.high)
        else:
            whole.append((item.low, item.high))
    inner = draw(st.sets(cuts, max_size=4))
    return [
        KeyRange(low, high)
        for first, last in whole
        for low, high in pairwise([first, *sorted(cut for cut in inner if first < cut < last), last])
    ]


@st.composite
def rolls_of(draw: st.DrawFn, history: EpochHistory, epoch: int, now: int) -> tuple[EpochRecord, EpochRecord]:
    """A rolling commit of transactions that wrote to some segments, or of the whole stream."""
    replaced = sorted(history.record(epoch).numbers - history.active.numbers)
    return history.plan_rolling(epoch, now, draw(st.just([]) | st.lists(st.sampled_from(replaced), unique=True)))


@st.composite
def histories(draw: st.DrawFn, steps_max: int = 6) -> EpochHistory:
    """The history of a stream after any sequence of scales and rolling commits, all sealed ends known.

    Sealed ends are small, so that empty segments and whole empty epochs are common.
    """
    history = EpochHistory.create(draw(partitions()), 0)
    for now in range(1, 1 + draw(st.integers(0, steps_max))):
        roots = [
            record.epoch
            for record in history.records
            if record.reference_epoch != history.active.reference_epoch and record.numbers != history.active.numbers
        ]
        roll = draw(st.booleans())
        records: tuple[EpochRecord, ...]
        if roots and roll:
            duplicate, again = draw(rolls_of(history, draw(st.sampled_from(roots)), now))
            records = duplicate, history.renewed(again, 0) if draw(st.booleans()) else again
        else:
            active = list(history.active.segments)
            sealed = draw(st.lists(st.sampled_from(active), min_size=1, unique_by=lambda item: item.id))
            ranges = draw(recut([item.range for item in sealed]))
            records = (history.plan_scale([item.id.number for item in sealed], ranges, now),)
        history = history.with_records(*records)
        for record in records:
            ends = {item.id: draw(st.integers(0, 3)) for item in history.ended_with(record.epoch)}
            history = history.with_sealed_ends(record.epoch, ends)
    return history
