"""Reading order: nothing before its predecessors, nothing skipped, nothing twice, and it always goes on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.strategies import histories
from rollbridge.base.ids import SegmentId
from rollbridge.errors import ConflictError, InvalidRequestError
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import KeyRange, even_ranges
from rollbridge.stream.reading import ReadingPlan


@dataclass
class Topics:
    """What stands in the segments: ends, and offsets of records below them (the others are markers)."""

    history: EpochHistory
    ends: dict[SegmentId, int]
    records: dict[SegmentId, list[int]]
    delivered: list[tuple[SegmentId, int]] = field(default_factory=list)

    def everything(self) -> list[tuple[SegmentId, int]]:
        return sorted((segment, offset) for segment, offsets in self.records.items() for offset in offsets)

    def deliver(self, segment: SegmentId, offset: int) -> None:
        for before in self.history.graph.predecessors(segment):
            for earlier in self.records[before]:
                assert (before, earlier) in self.delivered, f"{segment} came before {before} was read"
        self.delivered.append((segment, offset))


@st.composite
def topics(draw: st.DrawFn) -> Topics:
    history = draw(histories())
    ends: dict[SegmentId, int] = {}
    for segment in history.segments():
        end = history.sealed_end(segment)
        ends[segment] = draw(st.integers(0, 3)) if end is None else end
    records = {segment: sorted(draw(st.sets(st.integers(0, end - 1)))) if end else [] for segment, end in ends.items()}
    return Topics(history, ends, records)


def as_seen(history: EpochHistory, epochs: int, sealed: bool) -> EpochHistory:
    """The first ``epochs`` epochs, the ends of the last transition known or not."""
    records = list(history.records[:epochs])
    if not sealed and epochs > 1:
        records[-1] = replace(records[-1], sealed_ends=None)
    return EpochHistory(tuple(records))


def read_step(world: Topics, plan: ReadingPlan, draw: st.DataObject) -> bool:
    """Let one readable segment be read some way, and hand out what the plan wants; False if none has anything left."""
    open_segments = {
        segment: position for segment, position in plan.readable().items() if position < world.ends[segment]
    }
    if not open_segments:
        return False
    segment = draw.draw(st.sampled_from(sorted(open_segments)), label="segment")
    position = open_segments[segment]
    upto = draw.draw(st.integers(position + 1, world.ends[segment]), label="up to")
    wanted = plan.wanted(segment, upto)
    # What is handed out may be told in steps, the last one behind the markers.
    told = draw.draw(st.integers(wanted.start, wanted.stop), label="told in between")
    for part in (range(wanted.start, told), range(told, wanted.stop)):
        assert not part or plan.wanted(segment, part.stop) == part
        for offset in world.records[segment]:
            if offset in part:
                world.deliver(segment, offset)
        plan.reached(segment, part.stop)
    assert not plan.wanted(segment, upto), "nothing is handed out twice"
    return True


@given(topics(), st.data())
def test_following_reads_everything_once_and_in_order_while_epochs_appear(world: Topics, data: st.DataObject) -> None:
    epochs, sealed = 1, True
    plan = ReadingPlan(as_seen(world.history, 1, True))
    total = len(world.history.records)
    while True:
        if data.draw(st.booleans(), label="history grows") or not read_step(world, plan, data):
            if (epochs, sealed) == (total, True):
                if not read_step(world, plan, data):
                    break
            elif sealed:
                epochs, sealed = epochs + 1, False
            else:
                sealed = True
            plan.update(as_seen(world.history, epochs, sealed))
    assert sorted(world.delivered) == world.everything()
    assert plan.readable().keys() == world.history.active.segment_ids
    assert not plan.is_finished()
    assert not plan.waits_for_ends()


@given(topics(), st.data())
def test_reading_to_a_goal_ends_with_exactly_what_was_there(world: Topics, data: st.DataObject) -> None:
    """Epochs that appear meanwhile, and records behind the goal, are left out."""
    epochs = data.draw(st.integers(1, len(world.history.records)))
    seen = as_seen(world.history, epochs, data.draw(st.booleans(), label="ends known"))
    goals = {
        segment: data.draw(st.integers(0, world.ends[segment]), label=str(segment))
        for segment in sorted(seen.active.segment_ids)
    }
    plan = ReadingPlan(seen, goals=goals)
    while not plan.is_finished():
        if not read_step(world, plan, data):
            assert plan.waits_for_ends(), "it never waits without a reason"
            plan.update(world.history)
    wanted = [
        (segment, offset)
        for segment, offset in world.everything()
        if segment in seen.segments() and offset < goals.get(segment, 99)
    ]
    assert sorted(world.delivered) == wanted
    assert plan.readable() == {}


@given(topics(), st.data())
def test_beginning_at_the_end_reads_only_what_comes_later(world: Topics, data: st.DataObject) -> None:
    epochs = data.draw(st.integers(1, len(world.history.records)))
    seen = as_seen(world.history, epochs, True)
    start = {segment: data.draw(st.integers(0, world.ends[segment])) for segment in sorted(seen.active.segment_ids)}
    old = [(segment, offset) for segment in seen.segments() for offset in world.records[segment]]
    skipped = [(segment, offset) for segment, offset in old if segment not in start or offset < start[segment]]
    world.delivered.extend(skipped)
    plan = ReadingPlan(seen, start=start)
    plan.update(world.history)
    while read_step(world, plan, data):
        pass
    assert sorted(world.delivered) == world.everything()
    assert len(world.delivered) == len(set(world.delivered))


@given(topics(), st.data())
def test_a_plan_that_goes_on_at_a_frontier_reads_the_rest(world: Topics, data: st.DataObject) -> None:
    """Stopped anywhere, resumed with more epochs than there were: everything once, and in order."""
    total = len(world.history.records)
    epochs = data.draw(st.integers(1, total), label="epochs")
    seen = as_seen(world.history, epochs, True)
    plan = ReadingPlan(seen)
    for _ in range(data.draw(st.integers(0, 12), label="steps")):
        if not read_step(world, plan, data):
            break
    front = plan.frontier()
    assert front
    again = ReadingPlan(seen, start=front)
    assert again.readable() == plan.readable()
    assert again.frontier() == front
    later = ReadingPlan(world.history, start=front)
    while read_step(world, later, data):
        pass
    assert sorted(world.delivered) == world.everything()
    assert len(world.delivered) == len(set(world.delivered))


@given(topics(), st.data())
def test_a_floor_leaves_out_what_is_below_it_in_each_segment(world: Topics, data: st.DataObject) -> None:
    floor = {segment: data.draw(st.integers(0, end)) for segment, end in sorted(world.ends.items())}
    below = [(segment, offset) for segment, offset in world.everything() if offset < floor[segment]]
    world.delivered.extend(below)
    plan = ReadingPlan(world.history, floor=floor)
    while read_step(world, plan, data):
        pass
    assert sorted(world.delivered) == world.everything()
    assert len(world.delivered) == len(set(world.delivered))


@given(histories())
def test_a_stream_without_a_record_leads_straight_to_its_active_segments(history: EpochHistory) -> None:
    for record in history.records:
        history = history.with_sealed_ends(record.epoch, {item.id: 0 for item in history.ended_with(record.epoch)})
    assert ReadingPlan(history).readable() == dict.fromkeys(history.active.segment_ids, 0)
    finished = ReadingPlan(history, goals=dict.fromkeys(history.active.segment_ids, 0))
    assert finished.is_finished()


TWO = EpochHistory.create(even_ranges(2), 0)
SPLIT = TWO.with_records(TWO.plan_scale([0], [KeyRange(0.0, 0.25), KeyRange(0.25, 0.5)], 1))
S0, S1, S2, S3 = SegmentId.of(0, 0), SegmentId.of(1, 0), SegmentId.of(2, 1), SegmentId.of(3, 1)


def test_a_segment_waits_until_the_end_of_its_predecessor_is_known_and_reached() -> None:
    plan = ReadingPlan(SPLIT)
    assert plan.readable() == {S0: 0, S1: 0}
    assert plan.waits_for_ends()
    plan.reached(S0, 1)
    assert not plan.is_limit(S0, 3)
    plan.update(SPLIT.with_sealed_ends(1, {S0: 3}))
    assert not plan.waits_for_ends()
    assert (plan.is_limit(S0, 2), plan.is_limit(S0, 3), plan.is_limit(S1, 3)) == (False, True, False)
    plan.reached(S0, 2)
    assert plan.readable() == {S0: 2, S1: 0}
    plan.reached(S0, 3)
    assert plan.readable() == {S1: 0, S2: 0, S3: 0}


def test_each_change_of_what_is_read_is_counted_so_that_readers_look_again() -> None:
    plan = ReadingPlan(SPLIT)
    seen = plan.changes
    plan.reached(S0, 1)
    assert plan.changes == seen, "the same segments are read"
    plan.update(SPLIT.with_sealed_ends(1, {S0: 3}))
    assert plan.changes > seen
    seen = plan.changes
    plan.reached(S0, 3)
    assert plan.changes > seen


def test_an_end_that_was_passed_before_it_was_known_counts_at_once() -> None:
    plan = ReadingPlan(SPLIT)
    plan.reached(S0, 5)
    plan.update(SPLIT.with_sealed_ends(1, {S0: 5}))
    assert plan.readable() == {S1: 0, S2: 0, S3: 0}


def test_nothing_is_wanted_of_a_segment_whose_turn_has_not_come_or_is_over() -> None:
    plan = ReadingPlan(SPLIT.with_sealed_ends(1, {S0: 1}))
    assert not plan.wanted(S2, 5)
    assert plan.wanted(S0, 1) == range(1)
    plan.reached(S0, 1)
    assert not plan.wanted(S0, 5)
    assert plan.wanted(S2, 5) == range(5)
    plan.reached(S0, 9)
    assert plan.readable() == {S1: 0, S2: 0, S3: 0}


def test_a_record_behind_a_sealed_end_is_left_to_its_copy_in_a_successor() -> None:
    plan = ReadingPlan(SPLIT.with_sealed_ends(1, {S0: 2}))
    assert plan.wanted(S0, 7) == range(2)
    plan.reached(S0, plan.wanted(S0, 7).stop)
    assert plan.readable() == {S1: 0, S2: 0, S3: 0}


def test_a_start_names_segments_of_the_stream_that_do_not_continue_each_other() -> None:
    with pytest.raises(InvalidRequestError, match=r"no segment 9\.#epoch\.9"):
        ReadingPlan(TWO, start={SegmentId.of(9, 9): 0})
    with pytest.raises(InvalidRequestError, match=r"continues segment 0\.#epoch\.0"):
        ReadingPlan(SPLIT, start={S0: 0, S2: 0})


def test_positions_never_go_back() -> None:
    plan = ReadingPlan(TWO)
    plan.reached(S0, 5)
    plan.reached(S0, 3)
    assert plan.readable() == {S0: 5, S1: 0}


def test_fewer_epochs_than_were_known_change_nothing() -> None:
    plan = ReadingPlan(SPLIT)
    readable = plan.readable()
    assert not plan.update(TWO)  # from a ZooKeeper server that lags, or was set back
    assert plan.readable() == readable
    assert plan.update(SPLIT.with_sealed_ends(1, {S0: 3}))


@pytest.mark.parametrize(
    "other",
    [EpochHistory.create(even_ranges(2), 1), EpochHistory.create(even_ranges(3), 0)],
    ids=["younger", "other ranges"],
)
def test_another_stream_of_the_same_name_is_noticed(other: EpochHistory) -> None:
    plan = ReadingPlan(SPLIT)
    with pytest.raises(ConflictError, match="deleted and created again"):
        plan.update(other)
