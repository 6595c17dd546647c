"""Runs of offsets in which transactions stand, as the commit log tells them: the source of ``commitPosition``.

A COMMIT record names the runs of offsets of its
transaction in each segment, and commits are in the same order in the log and in each segment. So the driver reads the
log once, from the offset in the checkpoint, and gives each task the runs of its ranges. The records of a transaction
and its COMMIT record are one native transaction: every record that can be read has its commit in the log.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Final

import numpy as np

from rollbridge.errors import TruncatedError
from rollbridge.kafka.fetch import LogReader
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.offsets import LogOffsets
from rollbridge.model.control import ControlKind, decode_control, peek_kind
from rollbridge.model.ids import SegmentId
from rollbridge.model.names import GroupName, StreamName
from rollbridge.spark.source_records import Runs
from rollbridge.spark.source_task import ReadTimeout

_WAIT_MS: Final = 500


class CommitRuns:
    """Runs of one stream that were found in its group's commit log; not for several threads."""

    def __init__(self, reader: LogReader, offsets: LogOffsets, stream: StreamName, group: GroupName) -> None:
        self._reader = reader
        self._offsets = offsets
        self._stream = str(stream)
        self._topic = group.commit_log_topic
        self._next: int | None = None
        self._runs: dict[SegmentId, tuple[list[int], list[int], list[int]]] = {}

    def read(self, start: int | None) -> None:
        """Read the commit log to its present end.

        Args:
            start: Offset at which to begin if nothing has been read yet; None for the beginning of the log.

        Raises:
            TopicNotFoundError, NotAuthorizedError, KafkaUnavailableError, CorruptDataError.
            UnavailableError: the log did not become readable for a minute.
            TruncatedError: the log ends before what was read of it.
        """
        if self._next is None:
            first = self._offsets.first([self._topic])[self._topic]
            self._next = first if start is None else max(start, first)
        # Up to the end, not the last stable offset: markers are written partition by partition.
        end = self._offsets.end([self._topic], Isolation.READ_UNCOMMITTED)[self._topic]
        if self._next > end:
            raise TruncatedError(
                f"the commit log {self._topic} has become shorter: it ends at {end}, and was read up to {self._next}; "
                "nothing was read: without commitPosition it is not needed"
            )
        patience = ReadTimeout(self._topic)
        while self._next < end:
            found = self._reader.fetch(self._topic, self._next, wait_ms=_WAIT_MS)
            for record in found.records:
                if peek_kind(record.value) is ControlKind.COMMIT:
                    self._take(record.offset, record.key, record.value)
            patience.moved(self._next, found.end)
            self._next = found.end

    def of(self, segment: SegmentId, start: int, end: int) -> Runs:
        """Return the runs in ``start..end-1`` of a segment."""
        starts, ends, positions = self._runs.get(segment, ([], [], []))
        low, high = bisect_right(ends, start), bisect_right(starts, end - 1)
        return Runs(*(np.array(column[low:high], np.int64) for column in (starts, ends, positions)))

    def forget(self, covered: Mapping[SegmentId, int]) -> None:
        """Drop the runs that have been read."""
        for segment, columns in list(self._runs.items()):
            read = bisect_right(columns[1], covered.get(segment, 0))
            for column in columns:
                del column[:read]
            if not columns[0]:
                del self._runs[segment]

    def begin_behind(self, covered: Mapping[SegmentId, int]) -> int:
        """Return the offset of the first commit with records that are not covered; see ``StreamOffset``."""
        found = self._next or 0
        for segment, (_, ends, positions) in self._runs.items():
            unread = bisect_right(ends, covered.get(segment, 0))
            if unread < len(ends):
                found = min(found, positions[unread])
        return found

    def _take(self, offset: int, key: bytes | None, value: bytes | None) -> None:
        for segment, runs in decode_control(key, value).placement.get(self._stream, {}).items():
            starts, ends, positions = self._runs.setdefault(segment, ([], [], []))
            for run in runs:
                starts.append(run.base_offset)
                ends.append(run.base_offset + run.count)
                positions.append(offset)
