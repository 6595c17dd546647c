"""Late records: copy records behind the end of a sealed segment to its successors, exactly once.

:mod:`rollbridge.kafka.seal` says how a record can arrive there; it was acknowledged, and no reader would ever see it.
The copies are appended in one native transaction of the leader's. ZooKeeper records before it the intent, with the
places to search for copies, and after it the completion. A leader that finds an intent searches for a copy: all of them
are in one transaction, which no earlier leader can commit any more, so one copy proves that all exist.

Copies keep the order of their segment, and come after all earlier records of the successor. An order relative to other
concurrent records of the same key was never promised.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from rollbridge.base.effects import Steps
from rollbridge.base.ids import SegmentId
from rollbridge.metadata import paths
from rollbridge.stream.config import StreamState as Lifecycle
from rollbridge.stream.late import Forwarding, LateNotes, LateRecord, heir_of
from rollbridge.stream.names import Partition, show_partition
from rollbridge_coordinator.commit.refusals import apart
from rollbridge_coordinator.core.bookkeeping import Watched
from rollbridge_coordinator.core.effects import (
    AppendLate,
    CommitRound,
    EndOffsets,
    FindLate,
    ReadLate,
    StableEnds,
    TopicIds,
)
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.stream_state import LedStream
from rollbridge_coordinator.streams.adopt import is_its_topic
from rollbridge_coordinator.streams.pending_changes import find_closed, reopen
from rollbridge_coordinator.streams.retention import save

logger = logging.getLogger(__name__)

RECORDS_MAX: Final = 500
"""Most records forwarded in one native transaction."""
_MAY_PASS: Final = "_AUTHORIZATION_FAILED"


def look_behind(group: GroupState, now_ms: int) -> Steps[None]:
    """Read behind the ends of recently sealed segments, and forward the records there."""
    earliest_ms = 0 if group.times.differ else group.times.earliest(now_ms)
    for name, stream in group.streams.items():
        change, unsealed = group.suspended_on(name), stream.history.unsealed()
        if change is not None or unsealed:
            # The ends of some of its segments are not known yet. It may take hours, and leaders may come and go.
            begun_ms = unsealed[0].created_ms if change is None else change.work.created_ms
            group.watch.defer(name, min(earliest_ms, begun_ms))
            continue
        group.watch.take_up(name, stream.history, now_ms, earliest_ms)
        if stream.late.forwarding is not None:
            group.watch.add((name, stream.late.forwarding.segment), now_ms)  # however long ago it was sealed
    due = group.watch.due(now_ms)
    if not due:
        return
    looks: list[tuple[Watched, LedStream, int | None]] = []
    for item in due:
        watched = group.streams.get(item[0])
        if watched is None or watched.config.state is not Lifecycle.ACTIVE:
            group.watch.forget([item])
        elif group.is_suspended(item[0]):
            group.watch.postpone([item], now_ms)  # the segments that continue this one are closed
        else:
            looks.append((item, watched, _end(watched, item[1])))
    ends = yield from StableEnds(sorted(stream.place_of(item[1]) for item, stream, end in looks if end is not None))
    ours: dict[str, bool] = {}
    for item, stream, end in looks:
        part = _look(group, stream, item, end, ends, ours, now_ms)
        is_settled = yield from apart(group, item[0], "late records", part)
        if is_settled:
            group.watch.looked([item], now_ms)
        elif is_settled is None:
            group.watch.rest(item, now_ms)
        else:
            group.watch.postpone([item], now_ms)


def _look(
    group: GroupState,
    stream: LedStream,
    item: Watched,
    end: int | None,
    ends: Mapping[Partition, int],
    ours: dict[str, bool],
    now_ms: int,
) -> Steps[bool]:
    """Forward the records behind the end of a segment, if they are the stream's; return False if that must wait.

    Args:
        end: Its sealed end; None if it is the stream's no longer.
        ours: Whether adopted topics are still the streams', as far as this turn has asked.
    """
    name, segment = item
    if end is None:
        return (yield from _give_up(group, stream, item))
    place = stream.place_of(segment)
    if place[0] == stream.config.topic:
        if name not in ours:
            ours[name] = yield from is_its_topic(stream.config)
        if not ours[name]:  # records in another topic of that name are not its own
            logger.warning("late-records.gone partition=%s", show_partition(place))
            return (yield from _give_up(group, stream, item))
    stable = ends.get(place)
    if stable is not None:
        return (yield from _settle(group, stream, segment, end, stable, now_ms))
    if not group.watch.is_long_over(item, now_ms) or place[0] in (yield from TopicIds([place[0]])):
        return False
    # Deleted by its retention, of which a ZooKeeper that was set back does not tell.
    logger.warning("late-records.gone partition=%s", show_partition(place))
    return (yield from _give_up(group, stream, item))


def _give_up(group: GroupState, stream: LedStream, item: Watched) -> Steps[bool]:
    """Look behind a segment no longer, as its records are gone, or are another topic's; none will be copied again.

    An intent to copy some ends with it: it would hold up whatever deletes records of the stream.
    """
    if stream.late.forwarding is not None and stream.late.forwarding.segment == item[1]:
        yield from _note(stream, replace(stream.late, forwarding=None))
    group.watch.forget([item])
    return True


def _end(stream: LedStream, segment: SegmentId) -> int | None:
    if stream.history.is_removed(segment) or stream.history.is_former(segment):
        return None  # a former segment is from a former life of the stream
    return stream.history.sealed_end(segment)


def _settle(
    group: GroupState, stream: LedStream, segment: SegmentId, end: int, stable: int, now_ms: int
) -> Steps[bool]:
    """Forward records between a sealed end and the last stable offset; return False if that must wait."""
    if stream.late.forwarding is not None and not (yield from _finish(group, stream, stream.late.forwarding)):
        return False
    source = stream.place_of(segment)
    place = stream.late.looked_to(segment, end)
    most = RECORDS_MAX
    while place < stable:
        records, reached = yield from ReadLate(source, place, stable, most)
        if not records:
            if reached <= place:
                return False
            place = reached
            continue
        logger.warning(
            "late-records.found records=%d segment=%s stream=%s offset=%d: its successors get them",
            len(records),
            segment,
            stream.config.name,
            records[0].offset,
        )
        reason = yield from _forward(group, stream, segment, records, reached)
        if reason is None:
            yield from _note(stream, stream.late.settled(segment, reached, forwarded=len(records)))
            group.counts["late_records"] += len(records)
        elif (yield from _is_any_closed(stream)):
            # Its scale was interrupted, and is no longer on record since ZooKeeper was set back: no record is at fault.
            yield from _note(stream, replace(stream.late, forwarding=None))
            yield from reopen(group, [str(stream.config.name)], group.times.stamp(now_ms))
            return False
        elif reason.endswith(_MAY_PASS) or len(records) > 1:
            yield from _note(stream, replace(stream.late, forwarding=None))
            if reason.endswith(_MAY_PASS):
                logger.error('late-records.postponed segment=%s reason="%s"', segment, reason)
                return False
            most = 1  # find the records that are refused one by one
            continue
        else:
            name = show_partition(source)
            logger.error('late-records.refused offset=%d partition=%s reason="%s"', place, name, reason)
            yield from _note(stream, stream.late.settled(segment, reached, refused=1, reason=reason))
            group.counts["late_records_refused"] += 1
        place = reached
    return True


def _forward(
    group: GroupState, stream: LedStream, segment: SegmentId, records: Sequence[LateRecord], reached: int
) -> Steps[str | None]:
    """Append and commit copies; return the reason if one is refused, and then none was committed."""
    heirs = [heir_of(stream.history, stream.config.keys, segment, record.key) for record in records]
    places = {heir: stream.place_of(heir) for heir in heirs}
    ends = yield from EndOffsets(sorted(places.values()))
    targets = {heir: ends[place] for heir, place in places.items()}
    forwarding = Forwarding(segment, records[0].offset, reached, targets)
    yield from _note(stream, replace(stream.late, forwarding=forwarding))
    items = [(places[heir], record) for heir, record in zip(heirs, records, strict=True)]
    reason = yield from AppendLate(stream.place_of(segment), items)
    if reason is None:
        yield from CommitRound()
    group.predictor.forget(places.values())
    return reason


def _is_any_closed(stream: LedStream) -> Steps[bool]:
    targets = stream.late.forwarding.targets if stream.late.forwarding is not None else ()
    return bool((yield from find_closed([stream.place_of(item) for item in targets])))


def _finish(group: GroupState, stream: LedStream, begun: Forwarding) -> Steps[bool]:
    """Find out if the intended copies were committed; return False if that is unknown now."""
    source = stream.place_of(begun.segment)
    targets = {
        stream.place_of(item): offset for item, offset in begun.targets.items() if not stream.history.is_removed(item)
    }
    gone = len(targets) < len(begun.targets) or stream.history.is_removed(begun.segment)
    found = True if gone else (yield from FindLate(source, begun.start, targets))
    if found is None:
        return False
    if not found:
        yield from _note(stream, replace(stream.late, forwarding=None))
        return True
    records: Sequence[LateRecord] = ()
    is_lost = source[0] == stream.config.topic and not (yield from is_its_topic(stream.config))
    if not is_lost and not stream.history.is_removed(begun.segment):
        records, _ = yield from ReadLate(source, begun.start, begun.end, RECORDS_MAX)
    yield from _note(stream, stream.late.settled(begun.segment, begun.end, forwarded=len(records)))
    group.counts["late_records"] += len(records)
    return True


def _note(stream: LedStream, notes: LateNotes) -> Steps[None]:
    notes = replace(notes.without(stream.history), revision=stream.late.revision + 1)
    yield from save(stream, paths.late(stream.config.name), notes.to_json())
    stream.late = notes
