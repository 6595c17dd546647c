"""Slots: one segment as one part writes to it, and how its records are found again after the commit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Final

from aiokafka.record.default_records import DefaultRecordBatchBuilder

from rollbridge.client.futures import Completion, OutcomeFuture
from rollbridge.model.frames import FRAME_BYTES_DEFAULT
from rollbridge.model.identifiers import SegmentId, local_sequence
from rollbridge.model.routing import Route
from rollbridge.model.sequence import DLSN

Headers = Sequence[tuple[str, bytes | None]]
HeaderList = list[tuple[str, bytes | None]]

FRAME_BYTES_MIN: Final = 16 * 1024
"""Below it a frame's own overhead outweighs what it carries. Segments take batches this much larger than a record."""


class FrameLimits:
    """Bounds of frames and of a transaction's part, in bytes; the codec is a number as in a batch's attributes."""

    __slots__ = ("compression", "frame_bytes", "record_bytes", "transaction_bytes")

    def __init__(
        self,
        *,
        frame_bytes: int = FRAME_BYTES_DEFAULT,
        transaction_bytes: int = 16 * 1024**3,
        record_bytes: int = 64 * 1024**2,
        compression: int = 0,
    ) -> None:
        self.frame_bytes = frame_bytes
        self.transaction_bytes = transaction_bytes
        self.record_bytes = record_bytes
        self.compression = compression


def no_batch(offset: int, timestamp: int | None, key: bytes | None, value: bytes | None, headers: Headers) -> None:
    """Stands in for a batch's ``append`` while there is no open batch: nothing fits."""


class Slot:
    """One segment as one part writes to it: the open batch, and what has been written so far."""

    __slots__ = (
        "_ends",
        "_runs",
        "append",
        "before",
        "builder",
        "completion",
        "first",
        "first_in_batch",
        "in_batch",
        "last",
        "number",
        "opened_s",
        "part",
        "place",
        "ready",
        "segment",
        "stream",
    )

    def __init__(self, completion: Completion, part: int, stream: str, place: int, number: int) -> None:
        self.completion = completion
        self.part = part
        self.stream = stream
        self.place = place
        self.number = number
        self.append: Callable[..., object] = no_batch
        self.builder: DefaultRecordBatchBuilder | None = None
        self.in_batch = 0
        self.first_in_batch = 0
        self.opened_s = 0.0
        self.ready: tuple[bytes, bytes] | None = None
        self.before = 0
        self.first = 0
        self.last = 0
        self.segment: SegmentId | None = None
        self._runs: list[int] = []
        self._ends: list[int] = []

    @property
    def records(self) -> int:
        """How many records were written to the segment: in batches that were cut, and in the open one."""
        return self.before + self.in_batch

    def local_sequence(self, count: int) -> int:
        """The local sequence number of this part's ``count``-th record."""
        return local_sequence(self.part, count)

    def locate(self, index: int, count: int) -> DLSN:
        """The DLSN of the ``index``-th record that the part wrote to this segment; raises what the transaction met."""
        error = self.completion.error()
        if error is not None:
            raise error
        if not self._ends:
            self._find_runs()
        if index >= self._ends[-1]:
            raise self.completion.committed_error()  # without this part, or without this record of it
        run = bisect_right(self._ends, index)
        before = self._ends[run - 1] if run else 0
        assert self.segment is not None
        return DLSN.of(self.segment, self._runs[run] + index - before, local_sequence(self.part, count))

    def _find_runs(self) -> None:
        """Where the commit record says that this part's records stand in the segment."""
        record = self.completion.record
        ends, total = [], 0
        for segment, runs in (record.placement.get(self.stream, {}) if record else {}).items():
            if segment.number == self.number:
                self.segment = segment
                for run in runs:
                    if run.part == self.part:
                        total += run.count
                        self._runs.append(run.base_offset)
                        ends.append(total)
        self._ends = ends or [0]


class Lane:
    """One stream as one part writes to it."""

    __slots__ = ("bounds", "frame_bytes", "open_slots", "place", "record_bytes_max", "route", "slots", "sticky")

    def __init__(self, route: Route, place: int, limits: FrameLimits, sticky: int) -> None:
        self.route = route
        self.place = place
        self.bounds = route.bounds
        self.record_bytes_max = min(route.record_bytes_max, limits.record_bytes)
        self.frame_bytes = min(limits.frame_bytes, max(self.record_bytes_max, FRAME_BYTES_MIN))
        self.slots: list[Slot | None] = [None] * len(route.numbers)
        self.sticky = sticky % len(route.numbers)


class WriteFuture(OutcomeFuture[DLSN]):
    """Where one record will stand: its DLSN after the commit, an error after the abort."""

    # Set by the frame writer, without an __init__: this object is made a million times a second.
    __slots__ = ("count", "index", "slot")

    slot: Slot
    """The segment that holds the record, as its part writes to it."""
    index: int
    """Number of the record among those of its part in the segment, from 0."""
    count: int
    """Number of the record among all those of its part, from 0."""

    @property
    def local_sequence(self) -> int:
        """The record's local sequence number in its transaction, known at once."""
        return self.slot.local_sequence(self.count)

    @property
    def _completion(self) -> Completion:
        return self.slot.completion

    def _value(self) -> DLSN:
        return self.slot.locate(self.index, self.count)
