"""Segment router of a conditional writer: the active segment of each key, and the predecessors of that segment."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from rollbridge.base.deadlines import Backoff, Deadline
from rollbridge.base.ids import SegmentId
from rollbridge.errors import InvalidRequestError, UnavailableError
from rollbridge.metadata.catalog import Catalog
from rollbridge.metadata.paths import epochs
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.config import KEYLESS, StreamConfig, TopicLimits
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.names import Partition, StreamName
from rollbridge.stream.reading import KeyLineage, Stage, former_segments

ROUND_BYTES_MAX: Final = 900_000
"""Maximum size of a round in bytes where the topic does not say less."""
_PAUSE_FIRST_S: Final = 0.005
_PAUSE_MAX_S: Final = 0.2


class _Known:
    """One epoch history and the lineages asked for; positions between the same two bounds of any epoch share one."""

    def __init__(self, history: EpochHistory) -> None:
        self.history: Final = history
        bounds = {segment.range.low for record in history.records for segment in record.segments}
        self._bounds = sorted(bounds.union(() if history.foundation is None else history.foundation.lows))
        self._lineages: dict[int, KeyLineage] = {}

    def lineage(self, config: StreamConfig, key: bytes | None) -> KeyLineage:
        position, former = config.keys.position(key), former_segments(config, self.history, key)
        if former:
            return KeyLineage(self.history, position, former)
        place = bisect_right(self._bounds, position)
        found = self._lineages.get(place)
        if found is None:
            self._lineages[place] = found = KeyLineage(self.history, position)
        return found


class SegmentRouter:
    """Router of keys to the active segments of one stream. Safe to use from several threads."""

    def __init__(self, catalog: Catalog, session: ZooKeeperSession, stream: StreamName) -> None:
        self.stream: Final = stream
        self._name = str(stream)
        self._catalog = catalog
        self._session = session
        self._known: _Known | None = None

    def look_up(self) -> None:
        """Raise StreamNotFoundError unless the stream is there."""
        self._catalog.view(self._name)

    @property
    def record_bytes_max(self) -> int:
        """Maximum size of a record of the stream, in bytes."""
        config, limits = self._catalog.view(self._name).config, self.limits
        return config.record_bytes_max if limits is None else min(config.record_bytes_max, limits.record_room)

    @property
    def limits(self) -> TopicLimits | None:
        """Limits of the active segments, if they are partitions of an adopted topic."""
        view = self._catalog.view(self._name)
        return view.config.limits_in(view.history.active)

    @property
    def round_bytes_max(self) -> int:
        """Maximum size of a round in bytes; it is one record batch, so that its records are adjacent."""
        limits = self.limits
        return ROUND_BYTES_MAX if limits is None else min(ROUND_BYTES_MAX, limits.batch_room)

    def fault_of(self, keys: Sequence[bytes | None], timestamp_ms: int, now_ms: int) -> str | None:
        """Return why an adopted topic would not take records; None if it would, or there is none."""
        limits = self.limits
        if limits is None:
            return None
        if limits.is_compacted and None in keys:
            return KEYLESS
        return limits.fault_of(timestamp_ms, now_ms)

    def suspect(self) -> None:
        """Have the stream read again soon: its topic has refused what it should take."""
        self._catalog.suspect(self._name)

    def place(self, segment: SegmentId) -> Partition:
        """Return the partition that a segment is."""
        return self._catalog.view(self._name).config.place(segment)

    def segments(self) -> int:
        """Return the number of active segments."""
        return len(self._catalog.view(self._name).history.active.segments)

    def lineage(self, key: bytes | None) -> KeyLineage:
        """Return the lineage of a key as of the cached history.

        Raises:
            UnavailableError: the end of a predecessor is not known yet; see :meth:`await_lineage`.
            StreamNotFoundError: there is no such stream.
        """
        view, known = self._catalog.view(self._name), self._known
        if known is None or known.history is not view.history:
            self._known = known = _Known(view.history)
        return known.lineage(view.config, key)

    def before(self, segment: SegmentId) -> list[Stage]:
        """Return all predecessors of a segment, however far back and whatever their keys, oldest first.

        Raises:
            UnavailableError: the end of one of them is not known yet; nothing was written.
            StreamNotFoundError: there is no such stream.
        """
        history, found = self._catalog.view(self._name).history, []
        for item in sorted(history.graph.ancestors([segment])):
            end, base = history.sealed_end(item), history.graph.sequence_bases.get(item)
            if end is None or base is None:
                raise UnavailableError(f"the end of segment {item} is not known yet; try again; nothing was written")
            found.append(Stage(item, base, end, item in history.removed))
        return found

    def await_lineage(
        self,
        key: bytes | None,
        deadline: Deadline,
        sealed: SegmentId | None = None,
        taken: TopicLimits | None = None,
    ) -> KeyLineage:
        """Wait until a key can be written in a segment other than ``sealed``; return its lineage.

        ``sealed`` may be no more than a partition of an adopted topic that takes less than what was ``taken`` for its
        limits: its lineage is returned once other ones are on record.

        Raises:
            UnavailableError: not writable by the deadline; nothing was written.
            StreamNotFoundError: there is no such stream.
        """
        backoff = Backoff(_PAUSE_FIRST_S, _PAUSE_MAX_S)
        while True:
            try:
                lineage = self.lineage(key)
                if lineage.active != sealed or self.limits != taken:
                    return lineage
                why = f"segment {sealed} is sealed and its successor is not known"
                if taken is not None:
                    why = f"the adopted topic takes smaller batches than it did, or {why}"
            except UnavailableError as fault:
                why = str(fault)
            if deadline.passed():
                raise UnavailableError(
                    f"{why}; a scale or a rolling commit of {self.stream} is under way: is a coordinator running? "
                    "Nothing was written"
                )
            backoff.sleep(deadline)
            self._catalog.forget(self._name)

    def check_current(self) -> None:
        """Ask ZooKeeper whether there is an epoch that is not cached here; if so, have it read before the next use."""
        self._session.sync()
        names = self._session.children(epochs(self.stream))
        if not names or int(names[-1]) != self._catalog.view(self._name).history.active.epoch:
            self._catalog.forget(self._name)

    def is_removed(self, segment: SegmentId) -> bool:
        """Return True if a segment was truncated as a whole; asks ZooKeeper.

        Raises:
            ZooKeeperUnavailableError: no answer in time.
            StreamNotFoundError: the stream does not exist any more.
        """
        self._session.sync()
        self._catalog.forget(self._name)
        return self._catalog.view(self._name).history.is_removed(segment)

    def has_moved(self, key: bytes | None, segment: SegmentId, *, is_lost: bool = False) -> bool:
        """Return True if a key has another active segment by now, or is about to; asks ZooKeeper.

        If the segment's topic ``is_lost``, nothing that is cached is trusted.

        Raises:
            ZooKeeperUnavailableError: no answer in time.
            StreamNotFoundError: the stream does not exist any more.
        """
        if is_lost:
            self._session.sync()
            self._catalog.forget(self._name)
        else:
            self.check_current()
        try:
            return self.lineage(key).active != segment
        except UnavailableError:
            return True

    def check_run(self, keys: Sequence[bytes | None]) -> None:
        """Check that a run can be written to one segment.

        Raises:
            InvalidRequestError: the keys of the run are in several segments.
        """
        view = self._catalog.view(self._name)
        if len({view.history.active.segment_at(view.config.keys.position(key)).id for key in keys}) > 1:
            raise InvalidRequestError(
                f"the {len(keys)} records of a run are in several segments of {self.stream}, and a condition is about "
                f"one: write them as a transaction, or as one run for each segment; nothing was written"
            )
