"""Plan micro-batches: offset ranges of segments, such that the records of a key never change their order. Pure.

The progress of a query is a *front*: the next offset of every segment at the front, as for readers of the library
(:class:`~rollbridge.stream.positions.ReadPosition`). Predecessors of the segments of a front have been read to their
sealed ends; all segments that are neither in the front nor predecessors are unread. So two fronts define the ranges
between them, whatever has happened to the stream in between, and a repeated micro-batch reads the same::

    segment 0-0  ======sealed      before front A: read to its sealed end
    segment 1-0        ===A---B..  read up to A; the next micro-batch reads A to B
    segment 1-1        A------B..  in the front with its first offset: nothing read yet

The records of a key are in a chain of segments. A segment comes into a micro-batch only when all of its predecessors
have been planned to their sealed ends: either in an earlier micro-batch, or in this one, and then *one task* reads
both, one after the other. That would have one task read everything behind a split, so it is done only while the task
has little to read that could have been read in parallel (:data:`CHAIN_MAX`); otherwise the successors wait for the next
micro-batch, where they are read in parallel again. Segments that follow each other one by one, as after the merge of a
large transaction, are read one after the other anyway, and never wait.

Offsets are JSON in a query's checkpoint. Those of ``format("rollbridge")`` have these fields:

==============  =======================================================================
field           meaning
==============  =======================================================================
``cluster``     Kafka's id of the cluster
``streamId``    Kafka's id of the stream's buffer topic, which another stream of the same name does not have
``position``    ``sales/orders@EPOCH-NUMBER:OFFSET,...``, which ``b.reader(start=...)`` takes as well
``commitLog``   offset at which to begin to read the commit log, only with the column ``commitPosition``
==============  =======================================================================

Those of ``rollbridge-transactions`` have ``cluster``, ``logId`` and a position in the commit log,
``sales/default@17``.

Source: Pravega's readers finish the segments of a transition before they continue; limits are shared out as Spark's
Kafka source does it, except that they are kept exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from pyspark.sql.datasource import InputPartition

from rollbridge.base.ids import SegmentId
from rollbridge.errors import CorruptDataError, InvalidRequestError
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.positions import LogPosition, ReadPosition
from rollbridge.stream.reading import ReadingPlan
from rollbridge.stream.truncation import consistent, frontier

Front = Mapping[SegmentId, int]

CHAIN_MAX: Final = 100_000
"""Maximum number of offsets of a chain that one task reads outside of the chain's longest way, in a micro-batch: those
that would have been read in parallel."""


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets ``start..end-1`` of a segment, those of control markers included."""

    segment: SegmentId
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


def unsealed(history: EpochHistory) -> list[SegmentId]:
    """Return the segments whose ends only the brokers know: those that are active, or being sealed."""
    return [segment for segment in history.stored() if history.sealed_end(segment) is None]


def advance(
    history: EpochHistory,
    start: Front,
    ends: Mapping[SegmentId, int],
    *,
    limit: int | None = None,
    chain_max: int | None = CHAIN_MAX,
) -> dict[SegmentId, int]:
    """Return the front to which the next micro-batch reads.

    The result equals ``start`` exactly if nothing is readable, but for newly known successors of its segments.

    Args:
        history: The epochs as of now.
        start: Front at which the last micro-batch ended.
        ends: Offsets to which the :func:`unsealed` segments can be read; others are readable to their sealed ends.
        limit: Maximum number of offsets to read, 1 or more; None for no limit.
        chain_max: See :data:`CHAIN_MAX`; None where the order of segments does not matter.

    Raises:
        InvalidRequestError: ``start`` names a segment that the stream does not have, or two of which one continues the
            other.
        CorruptDataError: ``ends`` were looked up for other epochs; taking a missing end for 0 would silently stall.
    """
    plan = ReadingPlan(history, start=start)
    begun = _Chains(history, start)
    while limit is None or limit > 0:
        backlog: dict[SegmentId, int] = {}
        for segment, position in plan.readable().items():
            sealed = history.sealed_end(segment)
            size = (_end_of(segment, ends) if sealed is None else sealed) - position
            if size > 0:
                backlog[segment] = size
        if chain_max is not None:
            backlog = begun.fitting(backlog, chain_max)
        if not backlog:
            break
        for segment, size in share(backlog, limit).items():
            begun.add(segment, size)
            plan.reached(segment, plan.readable()[segment] + size)
            limit = None if limit is None else limit - size
    return plan.frontier()


def _end_of(segment: SegmentId, ends: Mapping[SegmentId, int]) -> int:
    end = ends.get(segment)
    if end is None:
        raise CorruptDataError(f"the end of segment {segment} was not looked up; nothing was read")
    return end


def share(backlog: Mapping[SegmentId, int], limit: int | None) -> dict[SegmentId, int]:
    """Share ``limit`` out among segments in proportion to their backlog, with at least one offset each if possible.

    The sum is ``limit``, or the whole backlog if that is less.
    """
    total = sum(backlog.values())
    if limit is None or total <= limit:
        return dict(backlog)
    chosen = sorted(backlog, key=lambda segment: (-backlog[segment], segment))[:limit]
    parts = dict.fromkeys(chosen, 1)
    left = limit - len(chosen)
    rest = sum(backlog[segment] - 1 for segment in chosen)
    for segment in chosen:
        more = left * (backlog[segment] - 1) // rest if rest else 0
        parts[segment] += more
        rest -= backlog[segment] - 1
        left -= more
    return parts


def covered(history: EpochHistory, front: Front) -> dict[SegmentId, int]:
    """Return the offset up to which a front has read each segment; segments that are left out are unread.

    Raises:
        CorruptDataError: a predecessor of the front has no known end.
    """
    found = dict(front)
    for segment in history.graph.ancestors(front):
        end = history.sealed_end(segment)
        if end is None:
            raise CorruptDataError(f"segment {segment} counts as read, but its end is not known")
        found[segment] = end
    return found


def between(history: EpochHistory, start: Front, end: Front) -> list[OffsetRange]:
    """Return the ranges between two fronts, predecessors first."""
    old, new = covered(history, start), covered(history, end)
    ranges = (OffsetRange(item, old.get(item, 0), new.get(item, 0)) for item in history.graph.nodes)
    return [item for item in ranges if item.size > 0]


def chains(history: EpochHistory, start: Front, ranges: Sequence[OffsetRange]) -> list[list[OffsetRange]]:
    """Group ranges that continue each other, each group in the order in which one task has to read it."""
    joined = _Chains(history, start)
    for item in ranges:
        joined.add(item.segment, item.size)
    found: dict[SegmentId, list[OffsetRange]] = {}
    for item in ranges:
        found.setdefault(joined.root(item.segment), []).append(item)
    return list(found.values())


def split(chain: Sequence[OffsetRange], parts: int) -> list[list[OffsetRange]]:
    """Cut a chain into at most ``parts`` pieces of about the same size, in the order of the records."""
    total = sum(item.size for item in chain)
    step = -(-total // max(parts, 1))
    pieces: list[list[OffsetRange]] = [[]]
    room = step
    for item in chain:
        start = item.start
        while start < item.end:
            if not room:
                pieces.append([])
                room = step
            end = min(item.end, start + room)
            pieces[-1].append(OffsetRange(item.segment, start, end))
            room -= end - start
            start = end
    return [piece for piece in pieces if piece]


def without_lost(
    ranges: Iterable[OffsetRange],
    first: Mapping[SegmentId, int],
    removed: Iterable[SegmentId],
    ends: Mapping[SegmentId, int],
) -> tuple[list[OffsetRange], list[str]]:
    """Cut ranges to what is still stored; return these, and a sentence on each loss.

    Args:
        first: First offset that is left of each of their stored segments.
        ends: Highest offsets that the logs of the segments have been seen to reach.
    """
    left: list[OffsetRange] = []
    lost: list[str] = []
    gone = frozenset(removed)
    for item in ranges:
        start = item.end if item.segment in gone else max(item.start, min(first.get(item.segment, 0), item.end))
        if start > item.start:
            lost.append(f"offsets {item.start} to {start - 1} of segment {item.segment} have been deleted")
        end = item.end if item.segment in gone else min(item.end, ends[item.segment])
        if end < item.end:
            lost.append(_shorter(item.segment, end, item.end))
        if start < end:
            left.append(OffsetRange(item.segment, start, end))
    return left, lost


def without_beyond(front: Front, ends: Mapping[SegmentId, int]) -> tuple[Front, list[str]]:
    """Cut a front to the ends of the logs; return it, and a sentence on each log that ends before it.

    A log becomes shorter where Kafka loses records: a power failure, an unclean election. Records written after that
    get offsets that the front has passed, and would never be read.

    ``ends`` are those of the segments whose ends only the brokers know.
    """
    beyond = {item: offset for item, offset in front.items() if offset > ends.get(item, offset)}
    if not beyond:
        return front, []
    lost = [_shorter(item, ends[item], offset) for item, offset in sorted(beyond.items())]
    return {**front, **{item: ends[item] for item in beyond}}, lost


def _shorter(segment: SegmentId, end: int, before: int) -> str:
    return f"segment {segment} has become shorter: it ends at {end}, and was read or to be read up to {before}"


def without_unknown(history: EpochHistory, front: Front) -> tuple[Front, list[str]]:
    """Replace segments of a front that the history no longer knows; return the front, and a sentence on the loss.

    The new front begins with the first records that are left behind what the old one has read.
    """
    missing = sorted(front.keys() - history.graph.nodes)
    if not missing:
        return front, []
    left = {segment: offset for segment, offset in front.items() if segment not in missing}
    what = f"segments {', '.join(map(str, missing))} have been removed, with whatever was still to be read of them"
    return frontier(history, consistent(history, covered(history, left))), [what]


class _Chains:
    """Union-find of the segments of a micro-batch that continue each other, with the size of each chain."""

    def __init__(self, history: EpochHistory, start: Front) -> None:
        self._graph = history.graph
        self._settled = self._graph.ancestors(start)
        self._parent: dict[SegmentId, SegmentId] = {}
        self._size: dict[SegmentId, int] = {}
        self._reach: dict[SegmentId, int] = {}
        """Size of the longest way through the micro-batch that ends with a segment."""
        self._longest: dict[SegmentId, int] = {}
        """Size of the longest way through a chain."""

    def root(self, segment: SegmentId) -> SegmentId:
        """Return the segment that represents a segment's chain."""
        while (parent := self._parent[segment]) != segment:
            segment = parent
        return segment

    def fitting(self, sizes: Mapping[SegmentId, int], beside_max: int) -> dict[SegmentId, int]:
        """Return those of the ranges whose chains would have at most ``beside_max`` outside of their longest way.

        Ranges that would join the same chain do so together, or not at all: read alone, one would delay the others.
        """
        groups: list[tuple[set[SegmentId], dict[SegmentId, int]]] = []
        for segment, size in sizes.items():
            roots, joining = {self.root(item) for item in self._continued(segment)}, {segment: size}
            for group in [group for group in groups if group[0] & roots]:
                groups.remove(group)
                roots, joining = roots | group[0], group[1] | joining
            groups.append((roots, joining))
        fits = set[SegmentId]()
        for roots, joining in groups:
            if not roots or self._beside(roots, joining) <= beside_max:
                fits.update(joining)
        return {segment: size for segment, size in sizes.items() if segment in fits}

    def _beside(self, roots: Iterable[SegmentId], joining: Mapping[SegmentId, int]) -> int:
        """Return what would lie outside of the longest way if ranges joined some chains."""
        reaches = [self._reach_with(self._continued(segment), size) for segment, size in joining.items()]
        longest = max([*reaches, *(self._longest[item] for item in roots)])
        return sum(self._size[item] for item in roots) + sum(joining.values()) - longest

    def add(self, segment: SegmentId, size: int) -> None:
        """Add a range of a segment behind all chains that it continues; add predecessors first."""
        before = self._continued(segment)
        roots = {self.root(item) for item in before}
        self._reach[segment] = self._reach_with(before, size)
        self._parent[segment] = segment
        self._size[segment] = size + sum(self._size[item] for item in roots)
        self._longest[segment] = max([self._reach[segment], *(self._longest[item] for item in roots)])
        for item in roots:
            self._parent[item] = segment

    def _reach_with(self, before: set[SegmentId], size: int) -> int:
        return size + max((self._reach[item] for item in before), default=0)

    def _continued(self, segment: SegmentId) -> set[SegmentId]:
        """Return the segments of the micro-batch that a segment continues next, also through empty segments."""
        before = self._graph.ancestors([segment], stop=lambda item: item in self._parent or item in self._settled)
        return {item for item in before if item in self._parent}


# Offsets in checkpoints


Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """Progress of a query on a stream.

    Attributes:
        cluster: Kafka's id of the cluster.
        stream_id: Kafka's id of its first buffer, which tells the stream from others of the same name.
        position: Stream and offsets.
        commit_log: Offset of the commit log before which no transaction has records behind the position; None if it is
            not known.
    """

    cluster: str
    stream_id: str
    position: ReadPosition
    commit_log: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON; equal offsets give equal texts."""
        found: dict[str, Any] = {"cluster": self.cluster, "streamId": self.stream_id, "position": str(self.position)}
        return found if self.commit_log is None else {**found, "commitLog": self.commit_log}

    @classmethod
    def of_json(cls, found: Json) -> Self:
        """Parse the result of :meth:`as_json`.

        Raises:
            InvalidRequestError: it is something else.
        """
        try:
            commit_log = found.get("commitLog")
            return cls(
                str(found["cluster"]),
                str(found["streamId"]),
                ReadPosition.parse(str(found["position"])),
                None if commit_log is None else int(commit_log),
            )
        except (KeyError, ValueError, AttributeError) as exc:
            raise _foreign(found, "rollbridge") from exc

    def check_same(self, here: Self) -> None:
        """Raise InvalidRequestError unless two offsets are of the same stream of the same cluster."""
        if self.position.stream != here.position.stream:
            raise InvalidRequestError(
                f"the checkpoint belongs to stream {self.position.stream}, not to {here.position.stream}; nothing was "
                "read: give the query the stream that it was started with, or another checkpointLocation"
            )
        _check_cluster(self.cluster, here.cluster)
        if self.stream_id != here.stream_id:
            raise InvalidRequestError(
                f"stream {self.position.stream} was deleted and created again since the checkpoint was written, so its "
                "offsets mean nothing any more; nothing was read: use another checkpointLocation"
            )


@dataclass(frozen=True, slots=True)
class LogOffset:
    """Progress of a query on a commit log; ``log_id`` is Kafka's id of its topic."""

    cluster: str
    log_id: str
    position: LogPosition

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON; equal offsets give equal texts."""
        return {"cluster": self.cluster, "logId": self.log_id, "position": str(self.position)}

    @classmethod
    def of_json(cls, found: Json) -> Self:
        """Parse the result of :meth:`as_json`.

        Raises:
            InvalidRequestError: it is something else.
        """
        try:
            return cls(str(found["cluster"]), str(found["logId"]), LogPosition.parse(str(found["position"])))
        except (KeyError, AttributeError) as exc:
            raise _foreign(found, "rollbridge-transactions") from exc

    def check_same(self, here: Self) -> None:
        """Raise InvalidRequestError unless two offsets are of the same commit log."""
        if self.position.group != here.position.group:
            raise InvalidRequestError(
                f"the checkpoint belongs to the commit log of {self.position.group}, not to that of "
                f"{here.position.group}; nothing was read: use another checkpointLocation"
            )
        _check_cluster(self.cluster, here.cluster)
        if self.log_id != here.log_id:
            raise InvalidRequestError(
                f"the commit log of {self.position.group} is another one than when the checkpoint was written; nothing "
                "was read: use another checkpointLocation"
            )


def _check_cluster(known: str, here: str) -> None:
    if known != here:
        raise InvalidRequestError(
            f"the checkpoint belongs to Kafka cluster {known}, but the brokers are those of cluster {here}; nothing "
            "was read: check the address, or use another checkpointLocation"
        )


def _foreign(found: Json, name: str) -> InvalidRequestError:
    return InvalidRequestError(
        f'{found!r} is not an offset of format("{name}"): the checkpoint belongs to another source; nothing was read: '
        "use another checkpointLocation"
    )


# Input partitions. This module imports nothing that only tasks need, because drivers start often.


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of offsets of transactions in a segment, in order, with the offsets of their commits in the commit log.

    All are arrays of 64-bit integers.
    """

    start: Any
    end: Any
    position: Any


@dataclass(frozen=True, slots=True)
class SegmentPlace:
    """Common properties of all records of a segment."""

    stream: str
    topic: str
    segment: SegmentId
    sequence_base: int | None
    runs: Runs | None = None
    partition: int = 0


@dataclass(frozen=True, slots=True)
class SegmentRange:
    """Offsets ``start..end-1`` of a segment."""

    place: SegmentPlace
    start: int
    end: int


class Portion(InputPartition):  # type: ignore[misc]  # types are checked without PySpark
    """Input partition of one task, which reads the pieces one after the other."""

    def __init__(self, pieces: Sequence[SegmentRange]) -> None:
        super().__init__(None)
        self.pieces = list(pieces)


class PreviewPortion(InputPartition):  # type: ignore[misc]  # types are checked without PySpark
    """Input partition of a task that reads the records of transactions which are open when it runs."""

    def __init__(self, config: StreamConfig) -> None:
        super().__init__(None)
        self.config = config
