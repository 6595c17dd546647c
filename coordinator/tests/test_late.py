"""When leaders look behind sealed ends, and what they do where a copy is refused."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from coordinator.tests.makers import Bench
from rollbridge.base.effects import AnyEffect, run
from rollbridge.base.ids import SegmentId
from rollbridge.errors import UnavailableError
from rollbridge.metadata import paths
from rollbridge.metadata.requests import AdminRequest, RequestKind
from rollbridge.stream.config import Retention
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import even_ranges
from rollbridge.stream.late import Forwarding, LateNotes, LateRecord
from rollbridge.stream.names import StreamName
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.bookkeeping import GAP_MAX_MS, LateWatch
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.streams.late import look_behind
from rollbridge_coordinator.streams.retention import remove_emptied, retain_streams, truncate_stream

S0 = SegmentId.of(0, 0)
WATCH_MS = 20 * 60 * 1000


def sealed_at(end: int, created_ms: int = 0) -> EpochHistory:
    """A stream whose only segment was replaced by another."""
    history = EpochHistory.create(even_ranges(1), 0)
    record = history.plan_scale([0], even_ranges(1), created_ms)
    return history.with_records(replace(record, sealed_ends={S0: end}))


def test_a_segment_is_looked_behind_at_growing_intervals_until_its_time_is_up() -> None:
    watch = LateWatch(WATCH_MS)
    watch.take_up("s/a", sealed_at(5), 0)
    looks = []
    for now_ms in range(0, 2 * WATCH_MS, 500):
        watch.take_up("s/a", sealed_at(5), now_ms)
        due = watch.due(now_ms)
        if due:
            looks.append(now_ms)
            watch.looked(due, now_ms)
    gaps = [after - before for before, after in pairwise(looks)]
    assert looks[0] == 0
    assert max(gaps) <= GAP_MAX_MS
    assert WATCH_MS <= looks[-1] <= WATCH_MS + GAP_MAX_MS
    assert len(looks) < 40
    assert watch.is_idle


def test_a_new_leader_takes_up_what_was_sealed_lately_and_the_last() -> None:
    watch = LateWatch(WATCH_MS)
    watch.take_up("s/a", sealed_at(5, created_ms=0), WATCH_MS)
    watch.take_up("s/b", sealed_at(5, created_ms=0), 11 * WATCH_MS)  # by a clock that may have been behind
    watch.take_up("s/c", sealed_at(5, created_ms=WATCH_MS), 0)  # by a clock that is ahead
    assert watch.due(20 * WATCH_MS) == [("s/c", S0), ("s/a", S0), ("s/b", S0)]


def test_what_was_sealed_before_a_stream_was_suspended_is_taken_up_after_it_however_long_that_took() -> None:
    watch = LateWatch(WATCH_MS)
    history = sealed_at(5, created_ms=0)
    latest = history.plan_scale([1], even_ranges(1), 30 * WATCH_MS)
    history = history.with_records(replace(latest, sealed_ends={next(iter(history.active.segment_ids)): 7}))
    watch.defer("s/a", WATCH_MS)  # a change of that time
    watch.defer("s/a", 20 * WATCH_MS)
    watch.take_up("s/a", history, 30 * WATCH_MS)
    assert [segment.epoch for _, segment in watch.due(30 * WATCH_MS)] == [0, 1]
    others = LateWatch(WATCH_MS)
    others.take_up("s/a", history, 30 * WATCH_MS)
    assert [segment.epoch for _, segment in others.due(30 * WATCH_MS)] == [1], "it is that long ago"


@pytest.mark.parametrize(("then", "taken"), [(50, [1, 2, 3]), (44, [3])])
def test_what_was_sealed_behind_something_is_no_older_whatever_a_clock_that_is_behind_has_stamped(
    then: int, taken: list[int]
) -> None:
    history = EpochHistory.create(even_ranges(1), 0)
    for number, created in enumerate([0, then, 1, 2]):
        sealed = next(iter(history.active.segment_ids))
        record = history.plan_scale([sealed.number], even_ranges(1), created * WATCH_MS)
        history = history.with_records(replace(record, sealed_ends={sealed: number}))
    watch = LateWatch(WATCH_MS)
    watch.take_up("s/a", history, 55 * WATCH_MS)
    assert [segment.epoch for _, segment in watch.due(55 * WATCH_MS)] == taken


class Answers:
    """Answers the effects of :func:`look_behind` for a segment with late records, some of which are refused."""

    def __init__(self, refused: set[int], reason: str) -> None:
        self.refused = refused
        self.reason = reason
        self.committed: list[int] = []
        self.appended: list[int] = []
        self.nodes: dict[str, bytes] = {}
        self.found: bool | None = None
        self.closed: set[str] = set()
        self.is_gone = False
        self.topics: dict[str, str] = {}

    def run(self, procedure: Generator[AnyEffect, Any, None]) -> None:
        """Carry out a procedure."""
        run(procedure, self._answer)

    def _answer(self, effect: AnyEffect) -> Any:
        match effect:
            case fx.StableEnds(topics):
                return {} if self.is_gone else dict.fromkeys(topics, 10)
            case fx.TopicIds():
                return self.topics
            case fx.ReadLate(_, start, end, most):
                records = [LateRecord(offset, 0, b"k", b"v") for offset in range(max(start, 6), end)][:most]
                return records, records[-1].offset + 1 if len(records) == most else end
            case fx.EndOffsets(partitions):
                return dict.fromkeys(partitions, 0)
            case fx.AppendLate(_, items):
                if any(record.offset in self.refused for _, record in items):
                    return self.reason
                self.appended = [record.offset for _, record in items]
            case fx.CommitRound():
                self.committed += self.appended
            case fx.FindLate():
                return self.found
            case fx.Closed(topics):
                return self.closed.intersection(topics)
            case fx.ReadNodes(paths):
                return {path: self.nodes.get(path) for path in paths}
            case fx.Write(operations):
                self.nodes.update({item.path: item.value for item in operations if hasattr(item, "value")})
                return True
        return None


@pytest.fixture
def group() -> GroupState:
    bench = Bench({"sales/a": 1})
    bench.group.streams["sales/a"].history = sealed_at(5)
    return bench.group


def notes_of(group: GroupState) -> LateNotes:
    """What is remembered."""
    return group.streams["sales/a"].late


def test_one_record_that_is_refused_holds_up_no_other(group: GroupState) -> None:
    answers = Answers({7}, "INVALID_TIMESTAMP")
    answers.run(look_behind(group, 0))
    assert answers.committed == [6, 8, 9]
    known = notes_of(group).segments[S0]
    assert (known.looked_to, known.forwarded, known.refused, known.reason) == (10, 3, 1, "INVALID_TIMESTAMP")
    answers.run(look_behind(group, 10**7))
    assert answers.committed == [6, 8, 9]


def test_a_right_that_is_missing_is_waited_for(group: GroupState) -> None:
    answers = Answers({6}, "TOPIC_AUTHORIZATION_FAILED")
    answers.run(look_behind(group, 0))
    assert notes_of(group) == LateNotes(revision=2)
    answers.refused.clear()
    answers.run(look_behind(group, 10_000))
    assert answers.committed == [6, 7, 8, 9]


def test_records_whose_heir_is_closed_wait_for_the_segment_that_continues_it(group: GroupState) -> None:
    """A scale that ZooKeeper has forgotten has closed it."""
    heir = StreamName.parse("sales/a").segment_topic(SegmentId.of(1, 1))
    answers = Answers({6, 7, 8, 9}, "MESSAGE_TOO_LARGE")
    answers.closed.add(heir)
    answers.run(look_behind(group, 0))
    assert notes_of(group) == LateNotes(revision=2), "no record is refused"
    (work,) = (item.work for item in group.waits.pending_changes.values())
    assert (work.streams, work.epoch, work.seal) == (("sales/a",), 2, (1,))  # type: ignore[union-attr]
    assert group.watch.due(10_000) == [("sales/a", S0)], "and it is tried again"


@pytest.mark.parametrize(
    ("found", "committed"), [(True, []), (False, [6, 7, 8, 9]), (None, [])], ids=["there", "not there", "not told"]
)
def test_what_an_earlier_leader_began_is_looked_for(
    group: GroupState, found: bool | None, committed: list[int]
) -> None:
    begun = Forwarding(S0, 6, 10, {SegmentId.of(1, 1): 0})
    group.streams["sales/a"].late = LateNotes({}, begun)
    answers = Answers(set(), "")
    answers.found = found
    answers.run(look_behind(group, 0))
    assert answers.committed == committed
    assert notes_of(group).forwarding == (begun if found is None else None)
    assert (S0 in notes_of(group).segments) == (found is not None)


def test_segments_that_a_rolling_commit_has_left_open_are_looked_behind_once_they_are_sealed(group: GroupState) -> None:
    stream = group.streams["sales/a"]
    history = EpochHistory.create(even_ranges(1), 0)
    stream.history = history.with_records(history.plan_scale([0], even_ranges(1), 0))
    assert stream.history.unsealed()
    answers = Answers(set(), "")
    for now_ms in (0, WATCH_MS, 30 * WATCH_MS):
        answers.run(look_behind(group, now_ms))
    assert answers.committed == []
    stream.history = sealed_at(5)
    answers.run(look_behind(group, 60 * WATCH_MS))
    assert answers.committed == [6, 7, 8, 9]


@pytest.mark.parametrize("code", ["corrupt-data", "not-authorized"])
@pytest.mark.parametrize("begun", [True, False])
def test_what_nobody_can_read_holds_up_no_other_stream(begun: bool, code: str) -> None:
    group = Bench({"sales/a": 1, "sales/b": 1}).group
    for stream in group.streams.values():
        stream.history = sealed_at(5)
    if begun:
        group.streams["sales/a"].late = LateNotes(forwarding=Forwarding(S0, 6, 10, {SegmentId.of(1, 1): 0}))
    answers = Answers(set(), "")

    def answer(effect: AnyEffect) -> Any:
        if isinstance(effect, fx.ReadLate | fx.FindLate) and "sales.a" in str(effect):
            raise fx.EffectRefusedError(effect, "it cannot be read", code=code)
        return answers._answer(effect)

    run(look_behind(group, 0), answer)
    assert answers.committed == [6, 7, 8, 9]
    assert group.watch.due(GAP_MAX_MS) == [("sales/a", S0), ("sales/b", S0)], "and it is tried again"


def test_a_segment_whose_topic_is_gone_is_watched_no_longer_than_twice_its_time(
    group: GroupState, caplog: pytest.LogCaptureFixture
) -> None:
    answers = Answers(set(), "")
    answers.is_gone = True

    def is_idle() -> bool:
        return group.watch.is_idle

    for now_ms in range(0, 2 * WATCH_MS, 1_000):
        answers.run(look_behind(group, now_ms))
        assert not is_idle()
    answers.topics = {"sales.a.segment-0.epoch-0": "id"}
    answers.run(look_behind(group, 2 * WATCH_MS))
    assert not is_idle(), "only its leader is away"
    answers.topics = {}
    answers.run(look_behind(group, 2 * WATCH_MS + 1_000))
    assert is_idle()
    assert "late-records.gone partition=sales.a.segment-0.epoch-0" in caplog.text


def test_an_intent_to_copy_ends_with_the_segment_whose_records_are_gone(group: GroupState) -> None:
    """Else retention and truncation of the stream would wait for it for good."""
    stream = group.streams["sales/a"]
    stream.late = LateNotes(forwarding=Forwarding(S0, 6, 10, {SegmentId.of(1, 1): 0}))
    answers = Answers(set(), "")
    answers.is_gone = True
    answers.run(look_behind(group, 0))
    assert notes_of(group).forwarding is not None, "its leader may only be away"
    answers.run(look_behind(group, 2 * WATCH_MS))
    assert notes_of(group).forwarding is None
    assert b'"forwarding":null' in answers.nodes[paths.late(stream.config.name)].replace(b" ", b"")


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_an_intent_to_copy_ends_with_a_segment_that_is_the_streams_no_longer(how: str, group: GroupState) -> None:
    stream = group.streams["sales/a"]
    stream.late = LateNotes(forwarding=Forwarding(S0, 6, 10, {SegmentId.of(1, 1): 0}))
    answers = Answers(set(), "")
    if how == "removed":
        stream.history = stream.history.with_removed([S0])
    else:
        stream.config = replace(stream.config, topic="orders", topic_id="first")
        answers.topics = {"orders": "second"}
    answers.run(look_behind(group, 0))
    assert stream.late.forwarding is None
    assert answers.committed == []


def test_an_intent_to_copy_is_followed_up_however_long_ago_its_segment_was_sealed() -> None:
    """A leader after it looks behind recently sealed segments only."""
    group = Bench({"sales/a": 1}).group
    stream = group.streams["sales/a"]
    history = sealed_at(5)
    for epoch in (2, 3):
        record = history.plan_scale([epoch - 1], even_ranges(1), 0)
        history = history.with_records(replace(record, sealed_ends={SegmentId.of(epoch - 1, epoch - 1): 0}))
    stream.history = history
    stream.late = LateNotes(forwarding=Forwarding(S0, 6, 10, {SegmentId.of(1, 1): 0}))
    answers = Answers(set(), "")
    answers.found = True
    answers.run(look_behind(group, 100 * WATCH_MS))
    assert stream.late.forwarding is None


def test_nothing_is_deleted_while_it_is_not_known_whether_copies_are_there() -> None:
    group = Bench({"sales/a": 1}).group
    stream = group.streams["sales/a"]
    stream.history = sealed_at(5)
    stream.config = replace(stream.config, retention=Retention(bytes=1))
    stream.late = LateNotes(forwarding=Forwarding(S0, 6, 10, {SegmentId.of(1, 1): 0}))
    asked: list[AnyEffect] = []
    request = AdminRequest(kind=RequestKind.TRUNCATE_STREAM, stream="sales/a", cut={S0: 3}, created_ms=0)
    with pytest.raises(UnavailableError, match="late records of sales/a are being copied; nothing was deleted"):
        run(truncate_stream(group, stream, "request-0", request, 0), asked.append)
    run(retain_streams(group, 10**9), asked.append)
    run(remove_emptied(group, 10**9), asked.append)
    assert not asked
