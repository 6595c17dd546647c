"""The graph of a stream's segments: predecessors, successors and key lineages. Pure.

A transition to a new epoch, by a scale or a rolling commit, ends some segments and begins others on the same keys::

    epoch      0       1       2       3
     1.0   ┌───────┬───────┬───────┬───────┐
           │       │  1-3  │       │  3-3  │    epoch 1: a scale splits segment 0-1;
    0.75   │  0-1  ├───────┤  2-1  ├───────┤    epochs 2 and 3: a rolling commit duplicates
           │       │  1-2  │       │  3-2  │    epoch 0, then epoch 1
     0.5   ├───────┴───────┼───────┼───────┤
           │      0-0      │  2-0  │  3-0  │
     0.0   └───────────────┴───────┴───────┘

An edge leads from a segment to each that continues it, and knows the key range that the two share. So 0-1 has the
successors 1-2 and 1-3, both of these have the one successor 2-1, and the key lineage of 0.6 is 0-1, 1-2, 2-1, 3-2
(EPOCH-NUMBER, as in positions). Three rules follow, on which all that reads, truncates or writes is built:

* a key is in one segment of each epoch, so its lineage is a path, and the order of its records has one meaning;
* a segment has no predecessors exactly if it is of the first epoch that is kept, or a partition that was added to an
  adopted topic (a *root*), and no successors exactly while it is active;
* a predecessor begins in a lower epoch, so the order in which segments begin is a topological one.

A graph belongs to one :class:`~rollbridge.stream.epochs.EpochHistory`, which makes it once and grows it with its
epochs. What was truncated stays in it until its epoch is dropped.

Source: Pravega's ``getSuccessors`` (successors with their predecessors) over its epoch records; PDP-24 for duplicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Self

from rollbridge.base.errors import InvalidRequestError
from rollbridge.base.ids import SegmentId
from rollbridge.base.mapper import StoredAs
from rollbridge.stream.keyspace import KeyRange

KeyRanges = Mapping[SegmentId, KeyRange]
"""Neighbours of a segment in order of their ranges, each with the keys that it shares with the segment."""
_Edges = dict[SegmentId, dict[SegmentId, KeyRange]]


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment and the key range that it holds."""

    id: Annotated[SegmentId, StoredAs(fields=("segment",))]
    range: KeyRange

    def precedes(self, other: Segment) -> bool:
        """Return whether some key was in this segment before it was in ``other``, also where the graph has dropped it.

        Of two segments of a key, the one of the lower epoch came first: segments of one epoch do not overlap.
        """
        return self.id.epoch < other.id.epoch and self.range.overlaps(other.range)


@dataclass(frozen=True, slots=True)
class SegmentNode:
    """One segment from the first epoch, of those that are kept, to the last in which it is active.

    Attributes:
        segment: Its id and key range.
        partition: What names it to clients of Kafka as long as the stream lives: segments are counted in the order of
            their first epochs and ranges. A segment's number is given to each duplicate that a rolling commit makes of
            it, this is not.
        first: The epoch in which it begins.
        successor_epoch: The epoch with which its successors begin; None while it is active.
        sealed_end: Offset after its last record; None while it is active or being sealed.
        predecessors: The segments that it continues.
        successors: The segments that continue it.
    """

    segment: Segment
    partition: int
    first: int
    predecessors: KeyRanges = field(default_factory=dict)
    successors: KeyRanges = field(default_factory=dict)
    successor_epoch: int | None = None
    sealed_end: int | None = None

    @property
    def is_active(self) -> bool:
        """Return whether it belongs to the newest epoch."""
        return self.successor_epoch is None

    @property
    def is_sealing(self) -> bool:
        """Return whether it has successors and no known end yet."""
        return self.successor_epoch is not None and self.sealed_end is None


@dataclass(frozen=True, slots=True)
class Transition:
    """Change made by an epoch: segments that end before it, and that begin with it, both in order of their ranges.

    ``sealed_ends`` are the offsets after the last records of those that end; None while they are being sealed.
    ``moved`` are those that continue with other keys.
    """

    epoch: int
    ended: Sequence[Segment]
    began: Sequence[Segment]
    sealed_ends: Mapping[SegmentId, int] | None
    moved: Sequence[Segment] = ()


@dataclass(frozen=True)
class SegmentGraph:
    """The segments of all epochs that are kept. Immutable.

    Attributes:
        nodes: Every segment in order of its first epoch and its range, predecessors before successors.
        root_bases: Where sequence ids begin in each root, in order of their ranges.
    """

    nodes: Mapping[SegmentId, SegmentNode]
    root_bases: tuple[int, ...]

    @classmethod
    def of_epoch(cls, epoch: int, segments: Sequence[Segment], partitions: Iterable[int], bases: Iterable[int]) -> Self:
        """Return the graph of one epoch: each segment is a root, with a partition number and a base."""
        pairs = zip(segments, partitions, strict=True)
        return cls({item.id: SegmentNode(item, number, epoch) for item, number in pairs}, tuple(bases))

    def extended(self, transitions: Iterable[Transition]) -> SegmentGraph:
        """Return this graph with further epochs."""
        nodes = dict(self.nodes)
        partition = 1 + max(node.partition for node in nodes.values())
        for transition in transitions:
            before, after = _shared(transition)
            ends = transition.sealed_ends or {}
            for item in transition.ended:
                nodes[item.id] = replace(
                    nodes[item.id],
                    successors=after[item.id],
                    successor_epoch=transition.epoch,
                    sealed_end=ends.get(item.id),
                )
            for item in transition.moved:
                nodes[item.id] = replace(nodes[item.id], segment=item)
            for item in transition.began:
                nodes[item.id] = SegmentNode(item, partition, transition.epoch, before[item.id])
                partition += 1
        return SegmentGraph(nodes, self.root_bases)

    def with_sealed_ends(self, ended: Iterable[Segment], ends: Mapping[SegmentId, int]) -> SegmentGraph:
        """Return this graph with the ends of segments that have been succeeded."""
        known = {item.id: replace(self.nodes[item.id], sealed_end=ends.get(item.id)) for item in ended}
        return SegmentGraph({**self.nodes, **known}, self.root_bases)

    # One segment ------------------------------------------------------------------------------------------------

    def node(self, segment: SegmentId) -> SegmentNode:
        """Return a segment's node.

        Raises:
            InvalidRequestError: no epoch that is kept has the segment.
        """
        found = self.nodes.get(segment)
        if found is None:
            raise InvalidRequestError(f"segment {segment} is not in the history")
        return found

    def predecessors(self, segment: SegmentId) -> KeyRanges:
        """Return the segments that a segment continues; empty for a root. Raises as :meth:`node`."""
        return self.node(segment).predecessors

    def successors(self, segment: SegmentId) -> KeyRanges:
        """Return the segments that continue a segment; empty while it is active. Raises as :meth:`node`."""
        return self.node(segment).successors

    # Walks ------------------------------------------------------------------------------------------------------

    def ancestors(
        self, segments: Iterable[SegmentId], stop: Callable[[SegmentId], bool] | None = None
    ) -> frozenset[SegmentId]:
        """Return everything that the given segments continue, however far back. Raises as :meth:`node`.

        A segment at which to ``stop`` is still among them, but nothing is for its sake.
        """
        return self._reached(segments, lambda node: node.predecessors, stop)

    def descendants(self, segments: Iterable[SegmentId]) -> frozenset[SegmentId]:
        """Return everything that continues the given segments. Raises as :meth:`node`."""
        return self._reached(segments, lambda node: node.successors, None)

    def key_lineage(self, segment: SegmentId, position: float) -> Iterator[SegmentNode]:
        """Yield a segment that holds a position of the key space, then its predecessors there, back to the root."""
        node: SegmentNode | None = self.node(segment)
        while node is not None:
            yield node
            before = node.predecessors.items()
            node = next((self.nodes[item] for item, shared in before if position in shared), None)

    @cached_property
    def partitions(self) -> dict[SegmentId, int]:
        """The partition number of each segment; see :class:`SegmentNode`."""
        return {segment: node.partition for segment, node in self.nodes.items()}

    @cached_property
    def by_partition(self) -> dict[int, SegmentId]:
        """The segment of each partition number."""
        return {number: segment for segment, number in self.partitions.items()}

    @cached_property
    def sequence_bases(self) -> dict[SegmentId, int]:
        """First sequence id of each segment: the sequence id of a record is this base plus its offset.

        The base of a segment is the largest base plus sealed end of its predecessors, so that sequence ids grow along
        every key lineage. Segments that continue one whose end is not known yet are left out. Added partitions begin
        where the topic's others have begun.
        """
        bases = dict(zip(self.nodes, self.root_bases, strict=False))
        for segment, node in self.nodes.items():
            if not node.predecessors:
                bases.setdefault(segment, self.root_bases[0])
            ends = [(bases.get(item), self.nodes[item].sealed_end) for item in node.predecessors]
            known = [base + end for base, end in ends if base is not None and end is not None]
            if ends and len(known) == len(ends):
                bases[segment] = max(known)
        return bases

    def _reached(
        self,
        segments: Iterable[SegmentId],
        ways: Callable[[SegmentNode], KeyRanges],
        stop: Callable[[SegmentId], bool] | None,
    ) -> frozenset[SegmentId]:
        found: set[SegmentId] = set()
        waiting = list(segments)
        while waiting:
            fresh = ways(self.node(waiting.pop())).keys() - found
            found |= fresh
            waiting.extend(fresh if stop is None else (item for item in fresh if not stop(item)))
        return frozenset(found)


def _shared(transition: Transition) -> tuple[_Edges, _Edges]:
    """Return the predecessors of what begins and the successors of what ends.

    Both are sorted by range, so one sweep finds every overlap.
    """
    ended, began = transition.ended, transition.began
    before: _Edges = {item.id: {} for item in began}
    after: _Edges = {item.id: {} for item in ended}
    old = new = 0
    while old < len(ended) and new < len(began):
        one, other = ended[old], began[new]
        if one.range.overlaps(other.range):
            both = KeyRange(max(one.range.low, other.range.low), min(one.range.high, other.range.high))
            before[other.id][one.id] = after[one.id][other.id] = both
        old += one.range.high <= other.range.high
        new += other.range.high <= one.range.high
    return before, after
