"""Partitions added to an adopted topic: the epoch that has grown, for keys, for readers and for conditions."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rollbridge.base.effects import AnyEffect, Steps, run
from rollbridge.base.ids import PREPARED_FIRST, SegmentId
from rollbridge.base.sn import ANY, DLSN, EMPTY, OPERATION_HEADER, SN, Token
from rollbridge.errors import InvalidRequestError
from rollbridge.kafka.fetch import Stretch
from rollbridge.kafka.records import LogRecord
from rollbridge.kafka.segment_tail import EndOf, LineageTails, Read, T
from rollbridge.stream.conditions import Condition, Scope, holds, is_refuted, place_of, why_moved
from rollbridge.stream.config import StreamConfig, TopicLimits
from rollbridge.stream.epochs import EpochCause, EpochHistory, check_chain, without_epochs
from rollbridge.stream.group_offsets import NO_EPOCH
from rollbridge.stream.keyspace import KeyRange, Partitioner, even_ranges, native_partition
from rollbridge.stream.names import GroupName, Partition, StreamName
from rollbridge.stream.reading import KeyLineage, ReadingPlan, Reset, SegmentStanding, decide
from rollbridge.stream.routing import StreamView
from rollbridge.stream.truncation import consistent, first_needed, frontier

NAME = StreamName("topics", "orders")
CONFIG = StreamConfig(
    name=NAME,
    group=GroupName("topics"),
    created_ms=0,
    buffer_topic_id="b",
    topic="orders",
    partitioner="murmur2",
    partitions=3,
    topic_id="t",
    limits=TopicLimits(1_000_000),
)
ADOPTED = EpochHistory.create(even_ranges(2), 0)
GROWN = ADOPTED.with_records(ADOPTED.plan_growth(3, 1))
KEYS = [b"%d" % number for number in range(100)]


def of(number: int) -> SegmentId:
    return SegmentId.of(number, 0)


def left(history: EpochHistory) -> EpochHistory:
    """The history of a stream that has left its topic for segments with the same keys."""
    active = history.active.segments
    record = history.plan_scale([item.id.number for item in active], [item.range for item in active], 2)
    return history.with_records(record).with_sealed_ends(record.epoch, {item.id: 10 for item in active})


def rolled(history: EpochHistory, prepared: Mapping[int, SegmentId] | None = None) -> EpochHistory:
    """The same after a transaction of the first epoch, which has written to partition 0, was committed."""
    duplicate, active = history.plan_rolling(0, 3, [0], prepared)
    ends = {item.id: 20 for item in history.ending_with(duplicate)}
    longer = history.with_records(duplicate, active).with_sealed_ends(duplicate.epoch, ends)
    return longer.with_sealed_ends(active.epoch, {item.id: 1 for item in longer.began_with(duplicate.epoch)})


def key_that_lay(before: int, now: int) -> bytes:
    """A key that has gone from one partition of two to one of three."""
    return next(
        key
        for key in KEYS
        if native_partition(Partitioner.MURMUR2, key, 2) == before
        and native_partition(Partitioner.MURMUR2, key, 3) == now
    )


def test_all_segments_go_on_and_new_ones_continue_nothing() -> None:
    assert check_chain(GROWN.records) == []
    assert GROWN.active.cause is EpochCause.GROWN
    assert GROWN.reference.epoch == 1
    assert [item.id for item in GROWN.active.segments] == [of(0), of(1), of(2)]
    assert GROWN.ended_with(1) == ()
    assert [item.id for item in GROWN.began_with(1)] == [of(2)]
    assert GROWN.unsealed() == ()
    assert GROWN.graph.nodes[of(0)].segment.range == even_ranges(3)[0]
    assert GROWN.graph.partitions == {of(number): number for number in range(3)}, "Kafka's own numbers"
    assert GROWN.graph.sequence_bases == dict.fromkeys(map(of, range(3)), 0)
    assert GROWN.graph == EpochHistory(GROWN.records).graph
    assert CONFIG.place(of(2)) == ("orders", 2)
    away = left(GROWN)
    assert check_chain(away.records) == []
    for number, item in enumerate(away.active.segments):
        assert away.graph.predecessors(item.id).keys() == {of(number)}


def test_a_later_life_grows_with_the_numbers_of_its_own() -> None:
    born = EpochHistory.create(even_ranges(2), 0, 7, 1_000, 0)
    grown = born.with_records(born.plan_growth(4, 1))
    assert check_chain(grown.records, 7, 7) == []
    assert [item.id for item in grown.active.segments] == [SegmentId.of(number, 7) for number in range(4)]
    assert set(grown.graph.sequence_bases.values()) == {1_000}


@pytest.mark.parametrize("spoiled", ["ended", "nothing began"])
def test_an_epoch_that_has_not_grown_is_noticed(spoiled: str) -> None:
    count = 1 if spoiled == "ended" else 2
    wrong = ADOPTED.with_records(ADOPTED.plan_growth(count, 1))
    assert any("has not grown" in fault for fault in check_chain(wrong.records))


def test_whoever_began_before_goes_on_in_the_epoch_that_has_grown() -> None:
    again = GROWN.with_records(GROWN.plan_growth(5, 2))
    assert [len(again.grown_from(epoch).segments) for epoch in range(3)] == [5, 5, 5]
    away = left(again)
    assert away.grown_from(0) == again.active
    assert away.grown_from(3) == away.active
    # Of the epoch that the topic has grown to are the segments that a late transaction is merged into.
    duplicate, active = away.plan_rolling(0, 3, [0, 4])
    assert check_chain([*away.records, duplicate, active]) == []
    assert duplicate.reference_epoch == 2
    began = {item.id.number: item.range for item in duplicate.segments if item.id.epoch == duplicate.epoch}
    assert began == {0: KeyRange(0.0, 0.2), 4: KeyRange(0.8, 1.0)}


def test_settings_are_those_of_the_history_that_was_read_with_them() -> None:
    for history, partitions in ((ADOPTED, 2), (GROWN, 3), (left(GROWN), 3)):
        view = StreamView.of(CONFIG, history)
        assert view.config.partitions == partitions
        assert view.config.is_on_topic(history.active) is (history.active.cause is not EpochCause.SCALE)
    route = StreamView.of(CONFIG, GROWN).route
    assert route.known is not None, "keys are looked up by partition"
    assert route.limits == CONFIG.limits
    for key in KEYS:
        assert route.hash_of(key, 42) == native_partition(Partitioner.MURMUR2, key, 3)


def test_epochs_that_say_where_keys_have_lain_are_kept_as_long_as_something_is_left_there() -> None:
    again = GROWN.with_records(GROWN.plan_growth(5, 2))
    assert first_needed(again, since_ms=1 << 50) == 0
    away = left(left(again))
    gone = away.with_removed(item.id for record in again.records for item in record.segments)
    assert first_needed(gone, since_ms=1 << 50) > 0
    kept = without_epochs(gone, first_needed(gone, since_ms=1 << 50))
    assert check_chain(kept.records, kept.first) == []
    late = rolled(away)
    (duplicate,) = late.began_with(5)
    gone = late.with_removed(item for item in late.segments() if not late.active.segment_ids & {item})
    assert first_needed(gone, since_ms=1 << 50) > 0
    assert first_needed(gone, since_ms=1 << 50, topics_left=[duplicate.id]) == 0, "something is left of a duplicate"


# Readers


def test_a_reader_takes_added_partitions_up_from_their_beginning() -> None:
    plan = ReadingPlan(ADOPTED, start={of(0): 7, of(1): 9})
    assert plan.update(GROWN)
    assert plan.readable() == {of(0): 7, of(1): 9, of(2): 0}
    saved = ReadingPlan(GROWN, start={of(0): 7, of(1): 9})
    assert saved.readable() == plan.readable()
    assert frontier(GROWN, consistent(GROWN, {of(0): 7, of(2): 4})) == {of(0): 7, of(1): 0, of(2): 4}


@pytest.mark.parametrize("reset", Reset)
@pytest.mark.parametrize("committed", [{}, {of(0): 7}])
def test_a_group_that_has_begun_reads_added_partitions_from_their_beginning(
    reset: Reset, committed: Mapping[SegmentId, int]
) -> None:
    found = decide(GROWN, committed, reset)[of(2)]
    fresh = {
        Reset.EARLIEST: SegmentStanding.READ,
        Reset.LATEST: SegmentStanding.READ_NEW,
        Reset.ERROR: SegmentStanding.NO_OFFSET,
    }
    assert found.standing is (SegmentStanding.READ if committed else fresh[reset])
    assert found.offset == 0


# Conditions


def sn(number: int, offset: int) -> SN:
    return SN(DLSN(0, number, offset), None, offset)


def test_a_key_that_stays_has_conditions_as_before() -> None:
    stays = key_that_lay(0, 0)
    lineage = KeyLineage.of(CONFIG, GROWN, stays)
    assert lineage.former == ()
    assert place_of(sn(0, 7), lineage) == 7
    assert holds(Condition(sn(0, 7), Scope.KEY, stays), EMPTY, 20, lineage)
    with pytest.raises(InvalidRequestError, match="another key range"):
        place_of(sn(1, 7), lineage)


def test_an_expectation_of_a_key_that_has_moved_is_refused_and_says_why() -> None:
    moved = key_that_lay(0, 2)
    lineage = KeyLineage.of(CONFIG, GROWN, moved)
    assert lineage.active == of(2)
    assert [stage.segment for stage in lineage.former] == [of(0)]
    for scope in Scope:
        was = Condition(sn(0, 7), scope, moved)
        assert place_of(was.expected, lineage) is None
        for last in (EMPTY, sn(0, 7), sn(2, 3)):
            assert not holds(was, last, 20, lineage)
        assert holds(Condition(ANY, scope, moved), sn(2, 3), 20, lineage)
        assert holds(Condition(sn(2, 3), scope, moved), sn(2, 3), 20, lineage)
    # What is told is the record that stands where the key has lain, if there is none where it lies.
    assert not holds(Condition(EMPTY, Scope.KEY, moved), sn(0, 7), 20, lineage)
    assert holds(Condition(EMPTY, Scope.KEY, moved), EMPTY, 20, lineage)
    # A sequence id alone does not say in which partition.
    assert not holds(Condition(SN(sequence_id=7), Scope.KEY, moved), EMPTY, 20, lineage)
    assert not is_refuted(Condition(SN(sequence_id=7), Scope.KEY, moved), sn(2, 9), lineage)
    assert "is in partition 2 now and was in 0" in why_moved(sn(0, 7), EMPTY, lineage)
    assert "is in partition 2 now and was in 0" in why_moved(EMPTY, sn(0, 7), lineage)
    assert why_moved(sn(2, 1), sn(2, 3), lineage) == ""
    assert [stage.segment for stage in KeyLineage.of(CONFIG, left(GROWN), moved).former] == [of(0)], "left or not"


def test_a_key_that_has_come_back_lies_where_it_lay() -> None:
    again = GROWN.with_records(GROWN.plan_growth(4, 2))
    config = StreamView.of(CONFIG, again).config
    key = next(
        key for key in KEYS if [native_partition(Partitioner.MURMUR2, key, n) for n in (2, 3, 4)] == [0, 2, 0]
    )  # fmt: skip
    lineage = KeyLineage.of(config, again, key)
    assert lineage.active == of(0)
    assert [stage.segment for stage in lineage.former] == [of(2)]


class Logs:
    """Records by partition, all of them committed."""

    def __init__(self, logs: Mapping[Partition, list[LogRecord]]) -> None:
        self.logs = logs

    def ask(self, question: Steps[T]) -> T:
        return run(question, self._answer)

    def _answer(self, need: AnyEffect) -> Stretch | int | bool:
        match need:
            case EndOf(place):
                return len(self.logs.get(place, []))
            case Read(place, offset, to):
                return Stretch(offset, to, self.logs.get(place, [])[offset:to], to, 0, NO_EPOCH)
            case _:
                return False  # no offsets are missing


def test_a_write_is_found_where_its_key_lay() -> None:
    moved, mark = key_that_lay(0, 2), b"a" * 16
    record = LogRecord(0, 0, moved, b"", [(OPERATION_HEADER, mark)])
    logs, tails = Logs({CONFIG.place(of(0)): [record]}), LineageTails(CONFIG.place)
    for history in (GROWN, left(GROWN)):
        lineage = KeyLineage.of(CONFIG, history, moved)
        for since in (EMPTY, sn(0, 7), SN(sequence_id=7)):
            assert logs.ask(tails.find(lineage, Token(mark, moved, since))) == [sn(0, 0)]
        assert logs.ask(tails.find(lineage, Token(b"b" * 16, moved, EMPTY))) == []
        assert lineage.base(of(0)) == 0, "a token that names its place is looked for there"
        # What expects a record where the key lies now was written there.
        assert logs.ask(tails.find(lineage, Token(mark, moved, sn(2, 0)))) == []


@pytest.mark.parametrize("prepared", [{}, {0: SegmentId.of(PREPARED_FIRST, 3)}])
def test_a_late_transaction_is_seen_where_it_is_merged_after_the_topic_was_left(
    prepared: Mapping[int, SegmentId],
) -> None:
    moved, late = key_that_lay(0, 2), rolled(left(GROWN), prepared)
    (duplicate,) = late.began_with(3)
    lineage = KeyLineage.of(CONFIG, late, moved)
    assert [stage.segment for stage in lineage.former] == [of(0), duplicate.id]
    before, after = lineage.stages[-1], lineage.active
    assert lineage.former_after(before.segment) == lineage.former[-1:]
    assert lineage.former_after(after) == (), "beside what is active"
    stays = key_that_lay(0, 0)
    assert KeyLineage.of(CONFIG, late, stays).former == ()
    logs = Logs({CONFIG.place(duplicate.id): [LogRecord(0, 0, moved, b"", [])]})
    tails, base = LineageTails(CONFIG.place), late.graph.sequence_bases[duplicate.id]
    merged = SN(DLSN(duplicate.id.epoch, duplicate.id.number, 0), None, base)
    expected = sn(2, 3)
    assert place_of(expected, lineage) == 3
    for since in (None, 3):
        last = logs.ask(tails.last(lineage, moved, 0, since))
        assert last == merged
        for item in (EMPTY, expected, last):
            condition = Condition(item, Scope.KEY, moved)
            assert not holds(condition, last, lineage.active_base, lineage)
            assert "was in 0, and" in why_moved(item, last, lineage)
    # Once it was written where the key lies now, expectations hold.
    logs.logs = {**logs.logs, CONFIG.place(after): [LogRecord(0, 0, moved, b"", [])]}
    now = SN(DLSN(after.epoch, after.number, 0), None, lineage.active_base)
    assert logs.ask(LineageTails(CONFIG.place).last(lineage, moved, 1)) == now
    assert holds(Condition(now, Scope.KEY, moved), now, lineage.active_base + 1, lineage)
