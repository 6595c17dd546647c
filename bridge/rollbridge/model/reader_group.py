"""Reading in a consumer group: which segments the members may read now, told from the group's committed offsets alone.

A segment may be read once the group has *committed* all its predecessors to their sealed ends. Which member read them,
and which one owns the segment now, does not matter, nor does who has crashed meanwhile: an offset that was not
committed is read again, and until then nothing that comes later for the same keys is handed out.

Two facts make the committed offsets enough:

* an owner commits a segment's sealed end once everything before it has been handed out and committed, because the last
  offsets of a segment may be markers, which are never handed out;
* nobody commits in a segment before it may be read, so a commit in a segment says that all it continues has been read,
  also when Kafka has dropped the old commits by then (``offsets.retention.minutes``, KIP-211).

Source: Pravega's reader groups keep the same facts in a state of their own (``ReaderGroupState``, future segments).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from rollbridge.model.epochs import EpochHistory
from rollbridge.model.errors import ConflictError
from rollbridge.model.ids import SegmentId


class Reset(Enum):
    """Where a group begins that has committed nothing; Kafka's ``auto.offset.reset``."""

    EARLIEST = "earliest"
    LATEST = "latest"
    ERROR = "error"


class SegmentStanding(Enum):
    """What a segment is to its group now."""

    DONE = "nothing is left of it to read"
    WAITS = "what it continues has not been read and committed to its sealed end"
    READ = "it is to be read"
    READ_NEW = "it is to be read from its present end on, because the group begins at the latest records"
    NO_OFFSET = "the group has committed nothing and is to treat that as an error"


@dataclass(frozen=True, slots=True)
class SegmentVerdict:
    """A segment's standing; ``offset`` is where to go on if it is ``READ``, ``after`` what it waits for."""

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
    """Return True if a stream was created with a segment; the epoch of a prepared one is not that in which it began."""
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
        # The commit in a segment that was read is needed until there is one behind it; Kafka keeps it for us as long
        # as somebody subscribes to the topic.
        return segment not in committed or all(
            item in committed or item in passed for item in nodes[segment].successors
        )

    return frozenset(segment for segment in nodes if not settled(segment))


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
