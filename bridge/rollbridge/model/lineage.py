"""Key lineages: the segments in which the records of one key stand, one after the other, up to the active one.

A segment has several predecessors after a merge and several successors after a split, but a key is in one segment of
each epoch, so that "the last record before" has one meaning for it. See :mod:`rollbridge.model.segment_graph`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from rollbridge.model.epochs import ON_TOPIC, EpochCause, EpochHistory
from rollbridge.model.errors import InvalidRequestError, StreamRecreatedError, TruncatedError, UnavailableError
from rollbridge.model.ids import SegmentId
from rollbridge.model.names import Partition, SegmentPlaces
from rollbridge.model.partitioners import native_partition
from rollbridge.model.records import StreamConfig


def place_of_partition(
    places: SegmentPlaces, partition: int, known: EpochHistory, reread: Callable[[], EpochHistory]
) -> Partition:
    """Return where the segment lies that a partition number of a stream names.

    Args:
        places: The stream, and where its segments lie.
        partition: The number.
        known: The stream's epochs as they were last seen.
        reread: Reads them again; called for a number that they do not have yet.

    Raises:
        InvalidRequestError: no segment has had it so far.
        TruncatedError: the segment was removed, and its epochs have been dropped since.
        StreamRecreatedError: it was one of a stream that was deleted before this one was created.
    """
    history = known if partition <= max(known.graph.by_partition) else reread()
    segments = history.graph.by_partition
    found = segments.get(partition)
    if found is not None:
        return places.of(found)
    last, stream = max(segments), places.stream
    if not 0 <= partition <= last:
        raise InvalidRequestError(f"{stream} has had no partition {partition} so far; the last one is {last}")
    if history.first == history.born:
        raise StreamRecreatedError(
            f"partition {partition} is of a stream {stream} that was deleted; the one that was created under its name "
            f"since begins with partition {min(segments)}"
        )
    raise TruncatedError(f"partition {partition} of {stream} was removed: all its records have been truncated")


@dataclass(frozen=True, slots=True)
class Stage:
    """One segment of a course; sequence ids in it begin at ``base``; ``end`` is its sealed end, None while active.

    All records of a ``removed`` one have been truncated, and its topic is gone.
    """

    segment: SegmentId
    base: int
    end: int | None
    removed: bool = False


class KeyLineage:
    """The key lineage of one position of the key space. Immutable; stages are worked out when they are asked for.

    Attributes:
        active: The active segment.
        active_base: Where its sequence ids begin.
        dropped_end: The sequence id after the last record that may have stood in epochs which the history has dropped;
            0 if there was none.
        born_sequence: The first sequence id of this life of the stream; those below it are of former ones.
        former: Other partitions of an adopted topic in which the key has lain before partitions were added, and the
            duplicates of these, once the stream has left its topic. They go on beside the active segment, so nothing
            in them is earlier or later than what stands there.
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
        """Newest first: the active segment, then what it continues, as far as it is kept."""
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
