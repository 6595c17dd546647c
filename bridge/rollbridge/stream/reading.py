"""Reading order: which segments of a stream may be read now, and from which offset; and the lineages of keys.

A segment may be read once all its predecessors have been read to their sealed ends, so the records of a key arrive in
the order in which they became visible, across scales and rolling commits. Segments that do not continue each other are
read in parallel.

Source: Pravega's readers finish the segments of a transition before they read its successors, and PDP-24 relies on
that; the known risk is hanging on empty segments and empty epochs (pravega#2679).

Tour of a read, stop 2 of 3: see docs/tour.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import takewhile
from typing import Final

from rollbridge.base.errors import (
    ConflictError,
    InvalidRequestError,
    StreamRecreatedError,
    TruncatedError,
    UnavailableError,
)
from rollbridge.base.ids import SegmentId
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.epochs import ON_TOPIC, EpochCause, EpochHistory
from rollbridge.stream.keyspace import native_partition

# Reading in a consumer group: the group's committed offsets alone say which segments its members may read.
#
# A segment may be read once the group has *committed* all its predecessors to their sealed ends. Neither their reader
# nor the present owner matters, nor a crash in between: an offset that was not committed is read again, and until then
# no later record of the same keys is returned.
#
# Two facts make the committed offsets enough:
#
# * an owner commits a segment's sealed end once everything before it has been returned and committed, because the last
#   offsets of a segment may be markers, which are never returned;
# * no member commits in a segment before it may be read, so a commit in a segment says that its predecessors have been
#   read, even if Kafka has dropped the old commits by then (``offsets.retention.minutes``, KIP-211).
#
# Source: Pravega's reader groups keep the same facts in a state of their own (``ReaderGroupState``, future segments).


class Reset(Enum):
    """Where a group begins that has committed nothing; Kafka's ``auto.offset.reset``."""

    EARLIEST = "earliest"
    LATEST = "latest"
    ERROR = "error"


class SegmentStanding(Enum):
    """State of a segment for its group."""

    DONE = "nothing is left of it to read"
    WAITS = "what it continues has not been read and committed to its sealed end"
    READ = "it is to be read"
    READ_NEW = "it is to be read from its present end on, because the group begins at the latest records"
    NO_OFFSET = "the group has committed nothing and is to treat that as an error"


@dataclass(frozen=True, slots=True)
class SegmentVerdict:
    """State of a segment; ``offset`` is where to continue if it is ``READ``, ``after`` its unread predecessors."""

    standing: SegmentStanding
    offset: int = 0
    after: tuple[SegmentId, ...] = ()


DONE: Final = SegmentVerdict(SegmentStanding.DONE)


def decide(history: EpochHistory, committed: Mapping[SegmentId, int], reset: Reset) -> dict[SegmentId, SegmentVerdict]:
    """Return the standing of every segment of a stream in one group.

    Args:
        history: The stream's epochs; may lag behind the commits.
        committed: Offsets that the group has committed, by segment.
        reset: Where the group begins where it has committed nothing.
    """
    nodes = history.graph.nodes
    passed = history.graph.ancestors(committed.keys() & nodes)
    verdicts: dict[SegmentId, SegmentVerdict] = {}
    # A partition that was added to an adopted topic is read from its beginning by a group that has begun with others.
    begun = {item for item, node in nodes.items() if committed and not node.predecessors and node.first > history.first}
    for segment, node in nodes.items():  # predecessors come first
        end = node.sealed_end
        after = tuple(item for item in node.predecessors if verdicts[item].standing is not SegmentStanding.DONE)
        offset = committed.get(segment)
        if offset is not None or not begun.isdisjoint(node.predecessors):
            begun.add(segment)
        if (
            segment in history.removed
            or segment in passed
            or (offset is not None and end is not None and offset >= end)
        ):
            verdicts[segment] = DONE
        elif offset is not None:
            verdicts[segment] = SegmentVerdict(SegmentStanding.READ, offset)
        elif segment not in begun and reset is Reset.LATEST:
            # Nothing of these keys was ever handed out to the group: it begins with what is written from now on.
            verdicts[segment] = SegmentVerdict(SegmentStanding.READ_NEW) if node.is_active else DONE
        elif after:
            verdicts[segment] = SegmentVerdict(SegmentStanding.WAITS, after=after)
        elif segment not in begun and _is_of_birth(history, segment) and reset is Reset.ERROR:
            verdicts[segment] = SegmentVerdict(SegmentStanding.NO_OFFSET)
        else:
            verdicts[segment] = DONE if end == 0 else SegmentVerdict(SegmentStanding.READ)
    return verdicts


def _is_of_birth(history: EpochHistory, segment: SegmentId) -> bool:
    return segment.epoch == history.born and not segment.is_prepared


def decide_plain(committed: int, reset: Reset) -> SegmentVerdict:
    """Return the standing of a partition of a plain topic, which continues nothing.

    Args:
        committed: Offset that the group has committed in it; negative for none.
        reset: Where the group begins where it has committed nothing.
    """
    if committed >= 0:
        return SegmentVerdict(SegmentStanding.READ, committed)
    return SegmentVerdict(_BEGUN[reset])


_BEGUN: Final = {
    Reset.EARLIEST: SegmentStanding.READ,
    Reset.LATEST: SegmentStanding.READ_NEW,
    Reset.ERROR: SegmentStanding.NO_OFFSET,
}


def wanted(
    history: EpochHistory, committed: Mapping[SegmentId, int], verdicts: Mapping[SegmentId, SegmentVerdict]
) -> frozenset[SegmentId]:
    """Return the segments to subscribe to: all but those that were read, as a commit behind them says.

    Those that have been removed are of no use to anybody.
    """
    nodes = history.graph.nodes
    passed = history.graph.ancestors(committed.keys() & nodes)

    def settled(segment: SegmentId) -> bool:
        if segment in history.removed:
            return True
        if verdicts[segment].standing is not SegmentStanding.DONE:
            return False
        # The commit in a segment that was read is needed until its successors have one; Kafka keeps it as long as the
        # topic has a subscriber.
        return segment not in committed or all(
            item in committed or item in passed for item in nodes[segment].successors
        )

    return frozenset(segment for segment in nodes if not settled(segment))


def ignored(history: EpochHistory, committed: Mapping[SegmentId, int]) -> dict[SegmentId, int]:
    """Return the sealed ends of segments that the group counts as read though its commit in them lies below.

    Commits in what continues them say so. A tool has set the group back there, or a member committed late.
    """
    nodes = history.graph.nodes
    passed = history.graph.ancestors(committed.keys() & nodes) - history.removed
    ends = {segment: nodes[segment].sealed_end or 0 for segment in passed & committed.keys()}
    return {segment: end for segment, end in ends.items() if committed[segment] < end}


_MARK: Final = "rollbridge:"


def mark_of(streams: Iterable[str]) -> str:
    """Return the metadata of every commit of a group: which streams it reads."""
    return _MARK + ",".join(sorted(streams))


def check_streams(group: str, streams: Iterable[str], commits: Iterable[tuple[str, str]]) -> None:
    """Refuse a group that reads other streams than these: its members would take each other's segments away.

    Args:
        group: The group's id.
        streams: What this member wants to read.
        commits: Stream and metadata of all that the group has committed in segments.

    Raises:
        ConflictError: The group has commits for other streams, or commits that were made for another set of streams.
    """
    ours = frozenset(streams)
    for stream, metadata in commits:
        theirs = frozenset(metadata.removeprefix(_MARK).split(",")) if metadata.startswith(_MARK) else ours
        if stream not in ours or theirs != ours:
            named = ", ".join(sorted(theirs | {stream})) if theirs != ours else stream
            raise ConflictError(
                f"consumer group {group} reads {named}, so it cannot read {', '.join(sorted(ours))}: give each set "
                "of streams a group of its own, or delete the offsets of the group if it is not in use any more"
            )


class ReadingPlan:
    """How far a stream has been read. Not thread-safe.

    Ask it with :meth:`readable` what to read, and with :meth:`wanted` what of that to hand out; tell it with
    :meth:`reached` how far that has come, and of new epochs with :meth:`update`. It never leaves a segment before its
    end and never has a record handed out twice.

    Attributes:
        changes: Grows whenever other segments are to be read than before.
    """

    def __init__(
        self,
        history: EpochHistory,
        *,
        start: Mapping[SegmentId, int] | None = None,
        floor: Mapping[SegmentId, int] | None = None,
        goals: Mapping[SegmentId, int] | None = None,
    ) -> None:
        """Plan to read a stream.

        Args:
            history: Its epochs as of now.
            start: Offsets to begin at, by segment; what these segments continue counts as read. None: everything is
                read from the first epoch on.
            floor: Offsets below which there is nothing to be read; they say nothing of other segments.
            goals: Where to stop in each active segment; epochs that are added later are then left out. None: read on
                for ever.

        Raises:
            InvalidRequestError: ``start`` names a segment that the stream does not have, or two of which one continues
                the other.
            StreamRecreatedError: ``start`` is of a stream of the same name that was deleted.
        """
        history.check_life("of this name", start or ())
        self.changes = 0
        self._goals = goals
        self._next_epoch = history.next_epoch
        self._position = {**(floor or {}), **(start or {})}
        self._done: set[SegmentId] = set()
        self._adopt(history)
        for segment in start or ():
            if segment not in self._nodes:
                raise InvalidRequestError(f"there is no segment {segment} in the stream")
        continued = self._history.graph.ancestors(start or ())
        if both := continued.intersection(start or ()):
            raise InvalidRequestError(
                f"what continues segment {min(both)} is to be read from a place of its own, so it cannot be begun at"
            )
        self._done |= continued
        self._adopt(history)

    def update(self, history: EpochHistory) -> bool:
        """Take the stream's epochs as they are now: there may be more, and sealed ends may have become known.

        Returns False if more epochs were known than these; nothing is forgotten then.

        Raises:
            StreamRecreatedError: it is not the same stream any more.
            TruncatedError: epochs were dropped whose records had not all been read, as far as is known here.
        """
        if history.is_outdated(self._history):
            return False
        if not history.is_later(self._history):
            raise StreamRecreatedError("the stream was deleted and created again while it was being read; start again")
        lost = sorted(item for item in self._nodes if item not in self._done and history.is_dropped(item))
        if lost:
            raise TruncatedError(
                f"segment {lost[0]} was removed, and its epoch dropped, before it was known to have been read to its "
                "end; begin at 'earliest', or at a later position"
            )
        self._adopt(history)
        return True

    def readable(self) -> dict[SegmentId, int]:
        """Return the segments to read now, each with its next offset."""
        return {segment: self._position.get(segment, 0) for segment in self._ready}

    def frontier(self) -> dict[SegmentId, int]:
        """Return the ``start`` of a plan that continues from here: the next offset of each segment at the front.

        The front is the segments being read, and those read to their ends whose successors have not been begun.
        """
        front = {
            segment: self._position.get(segment, 0)
            for segment in self._done & self._nodes.keys()
            if not any(after in self._ready or after in self._done for after in self._nodes[segment].successors)
        }
        return front | self.readable()

    def wanted(self, segment: SegmentId, end: int) -> range:
        """Return the offsets to hand out of a segment that was read up to ``end``; none if it is not being read.

        Left out are those handed out before, those beyond the goal, and those behind the end of a sealed segment: such
        records came late, and leaders write them to the successors.
        """
        start = self._position.get(segment, 0)
        if segment not in self._ready:
            return range(start, start)
        limit = self._limit(segment)
        return range(start, max(start, end if limit is None else min(end, limit)))

    def is_limit(self, segment: SegmentId, end: int) -> bool:
        """Return whether nothing of a segment is wanted from ``end`` on, as far as is known."""
        limit = self._limit(segment)
        return limit is not None and end >= limit

    def reached(self, segment: SegmentId, position: int) -> None:
        """Take note that nothing is left below ``position``; markers between and after records take offsets too."""
        if segment not in self._done:
            self._position[segment] = max(position, self._position.get(segment, 0))
            self._open([segment])

    def is_finished(self) -> bool:
        """Return True if everything up to the goals has been read; never without goals."""
        return self._goals is not None and self._done.issuperset(self._nodes)

    def waits_for_ends(self) -> bool:
        """Return True if a segment that is being read was replaced and its end is unknown: reload the history soon."""
        return any(self._nodes[segment].successors and self._limit(segment) is None for segment in self._ready)

    def _adopt(self, history: EpochHistory) -> None:
        if self._goals is not None:
            history = history.before(self._next_epoch)
        self._history = history
        self._nodes = history.graph.nodes
        self._ready: dict[SegmentId, None] = {}
        self.changes += 1
        self._open(self._nodes)

    def _open(self, segments: Iterable[SegmentId]) -> None:
        """Make segments readable whose predecessors are done. What is read already, or empty, is done at once."""
        waiting = deque(segments)
        while waiting:
            segment = waiting.popleft()
            if segment in self._done or not self._done.issuperset(self._nodes[segment].predecessors):
                continue
            limit = self._limit(segment)
            if limit is not None and self._position.get(segment, 0) >= limit:
                self.changes += 1
                self._done.add(segment)
                self._ready.pop(segment, None)
                waiting.extend(self._nodes[segment].successors)
            else:
                self._ready[segment] = None

    def _limit(self, segment: SegmentId) -> int | None:
        """Return the end of a segment for this plan; None while that is open."""
        if self._goals is not None and segment in self._goals:
            return self._goals[segment]
        return self._nodes[segment].sealed_end


# Key lineages: the segments that hold the records of one key, in order, up to the active one.
#
# A segment has several predecessors after a merge and several successors after a split, but a key is in one segment of
# each epoch, so "the last record before" has one meaning for it. See :mod:`rollbridge.stream.segment_graph`.


@dataclass(frozen=True, slots=True)
class Stage:
    """One segment of a lineage; sequence ids in it begin at ``base``; ``end`` is its sealed end, None while active.

    All records of a ``removed`` one have been truncated, and its topic is gone.
    """

    segment: SegmentId
    base: int
    end: int | None
    removed: bool = False


class KeyLineage:
    """Lineage of one position of the key space. Immutable; stages are computed on demand.

    Attributes:
        active: The active segment.
        active_base: Its first sequence id.
        dropped_end: The sequence id after the last possible record of epochs that the history has dropped; 0 if there
            was none.
        born_sequence: The first sequence id of this stream; those below it belong to deleted ones of its name.
        former: Other partitions of an adopted topic that held the key before partitions were added, and the duplicates
            of these, once the stream has left its topic. They continue next to the active segment, so their records
            are neither earlier nor later than its own.
    """

    def __init__(self, history: EpochHistory, position: float, former: Iterable[SegmentId] = ()) -> None:
        """Begin with the active segment.

        Raises:
            UnavailableError: The end of a predecessor is not known yet, while a scale or a rolling commit is under way.
        """
        self._history = history
        self._position = position
        self.active = history.active.segment_at(position).id
        self.active_base = self._base(self.active)
        self.dropped_end = 0 if history.foundation is None else history.foundation.end_at(position)
        self.born_sequence = history.born_sequence
        self.former = tuple(map(self._stage, former))

    @classmethod
    def of(cls, config: StreamConfig, history: EpochHistory, key: bytes | None) -> KeyLineage:
        """Return the lineage of a key. Raises as ``__init__``."""
        return cls(history, config.keys.position(key), former_segments(config, history, key))

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The active segment, then its kept predecessors, newest first."""
        graph = self._history.graph
        return tuple(self._stage(node.segment.id) for node in graph.key_lineage(self.active, self._position))

    def _stage(self, segment: SegmentId) -> Stage:
        end, removed = self._history.sealed_end(segment), self._history.removed
        return Stage(segment, self._base(segment), end, segment in removed)

    def _base(self, segment: SegmentId) -> int:
        base = self._history.graph.sequence_bases.get(segment)
        if base is None:
            raise UnavailableError(
                f"segment {segment} continues one whose end is not known yet; try again; nothing was written"
            )
        return base

    def is_former(self, segment: SegmentId) -> bool:
        """Return whether the key has lain in a segment before partitions were added, and lies in another one now."""
        return any(stage.segment == segment for stage in self.former)

    def former_after(self, segment: SegmentId) -> tuple[Stage, ...]:
        """Return those of ``former`` that have begun after a segment of the lineage had ended."""
        nodes = self._history.graph.nodes
        ended = nodes[segment].successor_epoch
        return tuple(item for item in self.former if ended is not None and nodes[item.segment].first >= ended)

    def base(self, segment: SegmentId) -> int | None:
        """Return the first sequence id of a segment in which the key lies or has lain; None for any other segment."""
        if segment == self.active:
            return self.active_base
        return next((stage.base for stage in (*self.stages, *self.former) if stage.segment == segment), None)

    def is_dropped(self, segment: SegmentId) -> bool:
        """Return True if a segment may have been of this lineage, in an epoch that the history has dropped."""
        return self._history.is_dropped(segment)


def former_segments(config: StreamConfig, history: EpochHistory, key: bytes | None) -> tuple[SegmentId, ...]:
    """Return the partitions of an adopted topic in which a key lay before the last ones were added, and not since.

    Also the duplicates of these: a transaction of before that is committed after the stream has left its topic is
    merged into duplicates of the partitions for which it was written.
    """
    partitioner = config.keys.partitioner
    if partitioner is None or key is None:
        return ()
    on_topic = list(takewhile(lambda item: item.cause in ON_TOPIC, history.records))
    lay = [native_partition(partitioner, key, len(item.segments)) for item in on_topic]
    left = [number for number in dict.fromkeys(lay) if number != lay[-1]]
    if not left:
        return ()
    last = on_topic[-1]
    ranges = {last.segments[number].range for number in left}
    duplicates = (
        item.id
        for record in history.records[len(on_topic) :]
        if record.cause is EpochCause.ROLLING_TRANSACTIONS and record.reference_epoch == last.epoch
        for item in history.began_with(record.epoch)
        if item.range in ranges
    )
    return (*(last.segments[number].id for number in left), *duplicates)
