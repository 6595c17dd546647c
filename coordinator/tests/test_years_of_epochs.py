"""Years of epochs: what a stream with a retention leaves behind stays flat, however it is rolled and scaled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from coordinator.tests.makers import Bench
from rollbridge.model import paths
from rollbridge.model.changes import Roll
from rollbridge.model.epochs import EpochHistory, check_chain
from rollbridge.model.ids import SegmentId
from rollbridge.model.names import StreamName
from rollbridge.model.records import CreateNode, DeleteNode, Retention, SetNode
from rollbridge_coordinator.procedures.retention import retain_streams
from rollbridge_coordinator.procedures.rolling import _epochs
from rollbridge_coordinator.procedures.streams import drop_epochs
from rollbridge_coordinator.state import effects as fx
from rollbridge_coordinator.state.group import LeaderSettings
from rollbridge_coordinator.state.streams import LedStream

ORDERS = "sales/orders"
NAME = StreamName.parse(ORDERS)
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
YEAR_DAYS = 365


@dataclass
class Years:
    """A stream with four segments whose time flies: its leader's housekeeping is the real one."""

    bench: Bench = field(default_factory=lambda: Bench({ORDERS: 4}))
    rng: Random = field(default_factory=lambda: Random(17))
    now_ms: int = 0
    nodes: dict[str, bytes] = field(default_factory=dict)
    topics: set[SegmentId] = field(default_factory=set)
    ends: dict[SegmentId, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stream.config = replace(self.stream.config, retention=Retention(ms=7 * DAY_MS))
        self._published(self.history.first)

    @property
    def stream(self) -> LedStream:
        return self.bench.group.streams[ORDERS]

    @property
    def history(self) -> EpochHistory:
        return self.stream.history

    def roll(self) -> None:
        """Merge a large transaction: one segment's records are prepared, and the stream goes on behind them."""
        history = self.history
        number = self.rng.choice(sorted(history.active.numbers))
        prepared = SegmentId.of(history.next_prepared(0), history.active.epoch)
        roll = Roll(
            ORDERS, history.active.reference_epoch, history.active.epoch, history.next_epoch, history.next_epoch + 1,
            prepared={number: prepared},
        )  # fmt: skip
        self.ends[prepared] = 1_000
        self._extend(*_epochs(self.bench.group, roll, self.now_ms))

    def split(self) -> None:
        """Replace a segment by two, or two neighbours by one."""
        active = self.history.active.segments
        place = self.rng.randrange(len(active) - 1)
        if len(active) < 6:
            both, middle = active[place : place + 1], (active[place].range.low + active[place].range.high) / 2
            ranges = [(both[0].range.low, middle), (middle, both[0].range.high)]
        else:
            both = active[place : place + 2]
            ranges = [(both[0].range.low, both[1].range.high)]
        before = self.history.next_epoch
        self.bench.clock_ms = self.now_ms
        self.bench.scale(ORDERS, [item.id.number for item in both], ranges)
        self._settled(before)

    def write(self) -> None:
        """Write to some segments, and leave others empty."""
        for segment in self.history.active.segment_ids:
            self.ends[segment] = self.ends.get(segment, 0) + self.rng.choice((0, 0, 50))

    def housekeep(self) -> None:
        """Let the leader do what is due, and carry out what it asks for."""
        for procedure in (retain_streams, drop_epochs):
            self._carry_out(procedure(self.bench.group, self.now_ms))
        group = self.bench.group
        group.journal.adopt(group.journal.changes(group.streams, {}, ()))
        group.journal.saw(group.streams, {})

    def size(self) -> dict[str, int]:
        """How much there is of it now."""
        history = self.history
        return {
            "topics": len(self.topics),
            "epochs": len(history.records),
            "nodes": len(self.nodes),
            "bytes": sum(len(path) + len(value) for path, value in self.nodes.items()),
            "removed": len(history.removed),
            "marks": len(self.stream.marks),
            "parts": 0 if history.foundation is None else len(history.foundation.lows),
            "graph": len(history.graph.nodes),
            "journal": len(self.bench.group.journal.nodes),
        }

    def _extend(self, *records: Any) -> None:
        first = self.history.next_epoch
        self.stream.history = self.history.with_records(*records)
        self._settled(first)

    def _settled(self, first: int) -> None:
        for epoch in range(first, self.history.next_epoch):
            ends = {item.id: self.ends.get(item.id, 0) for item in self.history.ended_with(epoch)}
            self.stream.history = self.history.with_sealed_ends(epoch, ends)
        self._published(first)

    def _published(self, first: int) -> None:
        for record in self.history.records[first - self.history.first :]:
            self.nodes[paths.epoch(NAME, record.epoch)] = record.to_json()
            self.topics |= record.segment_ids

    def _carry_out(self, procedure: Iterator[Any]) -> None:
        answer: Any = None
        while True:
            try:
                effect = procedure.send(answer)  # type: ignore[attr-defined]
            except StopIteration:
                return
            match effect:
                case fx.StableEnds(places):
                    segments = {self.stream.place_of(item): item for item in self.topics}
                    answer = {place: self.ends.get(segments[place], 0) for place in places}
                case fx.Now():
                    answer = self.now_ms
                case fx.ReadNodes(names):
                    answer = {path: self.nodes.get(path) for path in names}
                case fx.DeleteRecords():
                    answer = frozenset()
                case fx.DeleteTopics(names):
                    self.topics = {item for item in self.topics if self.stream.place_of(item)[0] not in names}
                    answer = True
                case fx.Write(operations):
                    for operation in operations:
                        if isinstance(operation, CreateNode | SetNode):
                            self.nodes[operation.path] = operation.value
                        elif isinstance(operation, DeleteNode):
                            del self.nodes[operation.path]
                    answer = True


def life(days: int, *, scaled_every: int | None, settings: LeaderSettings | None = None) -> list[dict[str, int]]:
    """Let a stream live for so many days, with three large commits a day; gives what there was at the end of each."""
    years = Years()
    if settings is not None:
        years.bench.group.settings = settings
    seen = []
    for day in range(days):
        for hour in (2, 10, 18):
            years.now_ms = day * DAY_MS + hour * HOUR_MS
            years.write()
            years.roll()
            years.housekeep()
        if scaled_every is not None and day % scaled_every == 0:
            years.split()
        seen.append(years.size())
    assert years.history.active.epoch >= 6 * days
    assert check_chain(years.history.records, years.history.first, years.history.born) == []
    return seen


def grown(seen: list[dict[str, int]]) -> dict[str, tuple[int, int]]:
    """What there is more of in the last month than there was in the second: most of it then and now."""
    early, late = seen[30:60], seen[-30:]
    most = {what: (max(item[what] for item in early), max(item[what] for item in late)) for what in seen[0]}
    return {what: both for what, both in most.items() if both[1] > 1.3 * both[0] + 5}


@pytest.mark.parametrize("scaled_every", [None, 1, 45])
def test_two_years_of_large_commits_leave_what_a_month_does(scaled_every: int | None) -> None:
    seen = life(2 * YEAR_DAYS, scaled_every=scaled_every)
    assert grown(seen) == {}
    assert max(item["topics"] for item in seen) < 150
    assert max(item["epochs"] for item in seen) < 100


def test_it_is_found_if_the_root_of_a_stream_that_is_never_scaled_stays_for_ever() -> None:
    settings = replace(LeaderSettings(), epochs_keep_ms=10 * YEAR_DAYS * DAY_MS)
    found = grown(life(120, scaled_every=None, settings=settings))
    assert {"epochs", "nodes", "bytes", "graph", "journal"} <= found.keys()
