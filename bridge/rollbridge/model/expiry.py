"""Expiry of epochs: which of the oldest epochs of a stream nobody needs any more, and a history without them. Pure.

An epoch can go when every segment that ended up to its own end is removed, topic included. It is still needed

* as the epoch to which transactions refer: those that are open or undecided, and those that clients begin, which may
  not have heard for a while that there is a newer one;
* by whoever names its segments: marks of a retention;
* for the epoch after it: the segments that begin there continue removed ones, whose ends a reader that stands there
  still has to find. So one epoch more is kept than has anything left.

Source: Pravega truncates its epoch history by nothing but stream deletion; its ``StreamTruncationRecord`` says up to
where it would not be asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Final

from rollbridge.model.epochs import EpochCause, EpochHistory
from rollbridge.model.foundation import Foundation, overlaid
from rollbridge.model.identifiers import SegmentId
from rollbridge.model.lineage import lineage
from rollbridge.model.sn import sequence_bases

SEGMENTS_AT_ONCE: Final = 20_000
"""Segments, counted in each epoch, of what is dropped in one step."""
EPOCHS_AT_ONCE: Final = 500
"""Epochs that are dropped in one step: each is one operation of a ZooKeeper multi."""


def first_needed(
    history: EpochHistory,
    *,
    topics_left: Collection[SegmentId] = (),
    since_ms: int,
    references: Iterable[int] = (),
    named: Iterable[SegmentId] = (),
) -> int:
    """The first epoch that somebody needs.

    Args:
        history: The stream's epochs.
        topics_left: Removed segments whose topics may still be there.
        since_ms: What was the active epoch at this time or later may still be what clients take for it.
        references: Epochs to which open or undecided transactions refer.
        named: Segments that are named somewhere.
    """
    gone = history.removed.difference(topics_left)
    last = history.first
    for record in history.records[1:]:
        if record.sealed_ends is None or any(item.id not in gone for item in history.ended_with(record.epoch)):
            break
        last = record.epoch
    if last - 1 <= history.first:
        return history.first
    later = next((place for place, item in enumerate(history.records) if item.created_ms > since_ms), None)
    in_force = history.records[max((len(history.records) if later is None else later) - 1, 0) :]
    roots = [item.reference_epoch for item in in_force if item.cause is not EpochCause.ROLLING_TRANSACTIONS]
    ends = [_last_epoch(history, item) for item in named]
    return max(min(last - 1, history.active.reference_epoch, *roots, *references, *ends), history.first)


def without_epochs(history: EpochHistory, first: int) -> EpochHistory:
    """The history without the epochs before ``first``; everything that still lives has the numbers that it had.

    Raises:
        InvalidRequestError: ``first`` is not in the history.
    """
    if first <= history.first:
        return history
    record = history.record(first)
    bases, numbers = sequence_bases(history), lineage(history).partitions
    old = history.foundation
    lows, ends = ((0.0,), (0,)) if old is None else (old.lows, old.ends)
    for epoch in range(history.first + 1, first + 1):
        over = {}
        for item in history.ended_with(epoch):
            if end := history.sealed_end(item.id):
                over[item.range] = bases[item.id] + end
        lows, ends = overlaid(lows, ends, over)
    foundation = Foundation(
        record.epoch,
        history.created_ms,
        tuple(bases[item.id] for item in record.segments),
        lows,
        ends,
        history.born,
        history.born_sequence,
        tuple(numbers[item.id] for item in record.segments),
    )
    kept = replace(history, records=history.records[first - history.first :], foundation=foundation)
    return replace(kept, removed=history.removed & kept.segments().keys())


def step_towards(history: EpochHistory, first: int) -> int:
    """How far to go at once on the way to drop everything before ``first``."""
    segments = 0
    for place, record in enumerate(history.records[:EPOCHS_AT_ONCE]):
        segments += len(record.segments)
        if record.epoch == first or (place and segments > SEGMENTS_AT_ONCE):
            return record.epoch
    return min(first, history.first + EPOCHS_AT_ONCE)


def _last_epoch(history: EpochHistory, segment: SegmentId) -> int:
    """The last epoch in which a segment is active; the first that is kept if it was before."""
    return max((record.epoch for record in history.records if segment in record.segment_ids), default=history.first)
