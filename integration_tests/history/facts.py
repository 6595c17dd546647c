"""What follows from a history, worked out once for all that is checked in it. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from integration_tests.history.events import History, Kind, Operation, Row
from rollbridge.base.ids import SegmentId
from rollbridge.commitlog.control import ControlKind, ControlRecord
from rollbridge.stream.reading import KeyLineage


@dataclass(frozen=True)
class Facts:
    """A history with what follows from it."""

    history: History

    @cached_property
    def writer_of(self) -> Mapping[str, Operation]:
        """Which operation wrote a value."""
        return {write.value: item for item in self.history.operations for write in item.writes}

    @cached_property
    def places(self) -> Mapping[str, Sequence[tuple[str, SegmentId, Row]]]:
        """Where each value stands."""
        found: dict[str, list[tuple[str, SegmentId, Row]]] = defaultdict(list)
        for stream, state in self.history.streams.items():
            for segment, rows in state.rows.items():
                for row in rows:
                    found[row.value].append((stream, segment, row))
        return found

    @cached_property
    def outcomes(self) -> Mapping[str, tuple[int, ControlRecord]]:
        """The first outcome of each transaction on the commit log."""
        found: dict[str, tuple[int, ControlRecord]] = {}
        for position, record in self.history.log:
            if record.kind is not ControlKind.BEGIN:
                found.setdefault(str(record.transaction), (position, record))
        return found

    def is_sent_again(self, value: str) -> bool:
        """Whether a record that stands there more than once is one that Kafka may hold twice, in its one partition."""
        writer = self.writer_of.get(value)
        in_one = len({(stream, segment) for stream, segment, _ in self.places[value]}) == 1
        return writer is not None and writer.kind is Kind.UNSEQUENCED and in_one

    def is_written(self, operation: Operation) -> bool:
        """Whether anything of it stands in the log."""
        return any(write.value in self.places for write in operation.writes)

    def lineage(self, stream: str, key: str) -> Iterator[tuple[int, SegmentId, Row]]:
        """All records along the course of a key, oldest first, with their sequence ids."""
        state = self.history.streams[stream]
        for stage in reversed(KeyLineage(state.history, state.keys.position(key.encode())).stages):
            for row in state.rows.get(stage.segment, ()):
                yield stage.base + row.offset, stage.segment, row
