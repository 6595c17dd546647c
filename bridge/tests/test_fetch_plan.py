"""Which partitions are asked of whom, and what becomes of one after each answer; without any broker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import cast

import pytest
from kio.schema.errors import ErrorCode
from kio.schema.fetch.v12 import FetchResponse
from kio.schema.fetch.v12.response import EpochEndOffset, FetchableTopicResponse, PartitionData
from kio.schema.types import TopicName
from kio.static.primitive import Records, i32, i32Timedelta, i64

from rollbridge.errors import CorruptDataError, KafkaUnavailableError
from rollbridge.kafka.errors import AuthenticationError, NotAuthorizedError, TopicNotFoundError
from rollbridge.kafka.fetch import LogDivergedError, Wanted
from rollbridge.kafka.fetch_plan import LOOK_UP_S, UNHEARD_OF_S, Fetched, FetchError, FetchPlan, Range
from rollbridge.kafka.follower import Follower, read_up_to
from rollbridge.kafka.records import BatchBuilder, BatchHeader, parse_header
from rollbridge.stream.group_offsets import NO_EPOCH
from rollbridge.stream.names import Partition

A, B, C = ("a", 0), ("a", 1), ("c", 0)
ONE, TWO = 1, 2
LATER = 10.0


def batch(base: int, *values: bytes, epoch: int = 3) -> bytes:
    """A batch that was appended at an offset, under a leader epoch."""
    builder = BatchBuilder(1 << 20)
    for value in values:
        builder.append(7, b"k", value)
    built = bytearray(builder.build())
    built[:8] = base.to_bytes(8, "big")
    built[12:16] = epoch.to_bytes(4, "big")
    return bytes(built)


def data(
    number: int, records: bytes = b"", code: ErrorCode = ErrorCode.none, diverging: int | None = None
) -> PartitionData:
    return PartitionData(
        partition_index=i32(number),
        error_code=code,
        high_watermark=i64(100),
        last_stable_offset=i64(90),
        aborted_transactions=(),
        records=Records(records),
        diverging_epoch=EpochEndOffset() if diverging is None else EpochEndOffset(end_offset=i64(diverging)),
    )


def answer(parts: Mapping[str, tuple[PartitionData, ...]], code: ErrorCode = ErrorCode.none) -> FetchResponse:
    return FetchResponse(
        throttle_time=i32Timedelta.parse(timedelta()),
        error_code=code,
        responses=tuple(
            FetchableTopicResponse(topic=TopicName(topic), partitions=found) for topic, found in parts.items()
        ),
    )


def followed(leaders: Mapping[Partition, int], *, check_epochs: bool = False) -> FetchPlan:
    """A plan of partitions that are read from 0 on, whose leaders are known."""
    plan = FetchPlan(check_epochs=check_epochs)
    for partition in leaders:
        plan.follow(partition, 0)
    assert plan.unknown(0.0) == {topic for topic, _ in leaders}
    assert plan.learn({topic for topic, _ in leaders}, leaders, {}, 0.0) == []
    return plan


def send(plan: FetchPlan, now: float = 0.0) -> dict[int, list[Wanted]]:
    """Send what is to be asked."""
    requests = plan.requests(now)
    for node, wanted in requests.items():
        plan.sent(node, wanted, now)
    return requests


def test_silence_lasts_until_a_partition_is_told_of_and_an_answer_without_it_is_none() -> None:
    """A broker that enforces a quota answers at once, with nothing of any partition."""
    plan = followed({A: ONE, C: ONE})
    assert plan.unheard_s(A, 5.0) == 0, "it was not asked for yet"
    send(plan, 5.0)
    plan.answered(ONE, answer({"a": (data(0),)}), 6.0)
    assert [plan.unheard_s(item, 8.0) for item in (A, C)] == [2, 3]
    send(plan, 8.0)
    plan.answered(ONE, answer({}), 8.0)
    assert [plan.unheard_s(item, 9.0) for item in (A, C)] == [3, 4]
    plan.lost(ONE, KafkaUnavailableError("away"), 9.0)
    assert plan.unheard_s(A, 20.0) == 14
    plan.leave(A)
    assert plan.unheard_s(A, 20.0) == 0


def test_each_leader_has_one_request_for_all_its_partitions() -> None:
    plan = followed({A: ONE, B: TWO, C: ONE})
    assert send(plan) == {ONE: [Wanted(*A, 0), Wanted(*C, 0)], TWO: [Wanted(*B, 0)]}
    assert send(plan) == {}
    (found,) = plan.answered(ONE, answer({"a": (data(0, batch(0, b"x", b"y")),), "c": (data(0),)}), 0.0)
    assert isinstance(found, Fetched)
    assert (found.partition, found.start, found.end, found.high_watermark, found.stable_end) == (A, 0, 2, 100, 90)
    assert [(record.offset, record.value) for record in found.records()] == [(0, b"x"), (1, b"y")]
    assert send(plan) == {ONE: [Wanted(*C, 0), Wanted(*A, 2)]}, "who was served last comes last"
    assert [plan.end(item) for item in (A, C)] == [100, 100], "an empty answer tells the end as well"
    assert plan.end(B) is None


def test_records_before_the_wanted_offset_and_a_batch_that_is_cut_short_are_left_out() -> None:
    plan = FetchPlan()
    plan.follow(A, 1)
    plan.learn({"a"}, {A: ONE}, {}, 0.0)
    send(plan)
    cut = batch(0, b"x", b"y") + batch(2, b"z")[:-1]
    (found,) = plan.answered(ONE, answer({"a": (data(0, cut),)}), 0.0)
    assert isinstance(found, Fetched)
    assert (found.start, found.end, [record.value for record in found.records()]) == (1, 2, [b"y"])


def test_a_partition_that_is_added_does_not_wait_for_the_request_that_is_under_way() -> None:
    plan = followed({A: ONE})
    send(plan)
    assert plan.superseded(0.0) == []
    plan.follow(B, 5)
    assert plan.unknown(0.0) == {"a"}
    plan.learn({"a"}, {A: ONE, B: ONE}, {}, 0.0)
    assert plan.superseded(0.0) == [ONE]
    plan.withdrawn(ONE)
    assert send(plan) == {ONE: [Wanted(*A, 0), Wanted(*B, 5)]}
    assert plan.superseded(0.0) == []


def test_an_answer_for_where_a_partition_was_before_it_was_moved_or_left_is_none() -> None:
    plan = followed({A: ONE, C: ONE})
    send(plan)
    plan.follow(A, 50)
    plan.leave(C)
    assert plan.superseded(0.0) == [ONE]
    late = answer({"a": (data(0, batch(0, b"x")),), "c": (data(0, batch(0, b"x")),)})
    assert plan.answered(ONE, late, 0.0) == []
    assert send(plan) == {ONE: [Wanted(*A, 50)]}


def test_a_leader_that_has_moved_is_looked_up_after_a_pause_and_others_do_not_wait() -> None:
    plan = followed({A: ONE, C: ONE})
    send(plan)
    moved = answer({"a": (data(0, code=ErrorCode.not_leader_or_follower),), "c": (data(0, batch(0, b"x")),)})
    (found,) = plan.answered(ONE, moved, 0.0)
    assert found.partition == C
    assert plan.unknown(0.0) == frozenset()
    assert send(plan) == {ONE: [Wanted(*C, 1)]}
    assert 0.0 < plan.next_due(0.0) < 0.1
    assert plan.unknown(LATER) == {"a"}
    plan.learn({"a"}, {A: TWO}, {}, LATER)
    assert send(plan, LATER) == {TWO: [Wanted(*A, 0)]}
    assert plan.superseded(LATER) == []
    assert plan.leads(TWO)


def test_pauses_grow_until_something_is_answered() -> None:
    plan = followed({A: ONE})
    now, pauses = 0.0, []
    for _ in range(12):
        send(plan, now)
        assert plan.lost(ONE, KafkaUnavailableError("gone"), now) == []
        due = plan.next_due(now)
        pauses.append(due - now)
        now = due
        plan.learn({"a"}, {A: ONE}, {}, now)
    assert pauses[0] <= 0.01
    assert 0.4 < pauses[-1] <= 1.0
    send(plan, now)
    plan.answered(ONE, answer({"a": (data(0),)}), now)
    send(plan, now)
    plan.lost(ONE, KafkaUnavailableError("gone"), now)
    assert plan.next_due(now) - now <= 0.01


def test_leaders_are_looked_up_now_and_then_although_nobody_complains() -> None:
    plan = followed({A: ONE, C: TWO})
    send(plan)
    assert plan.unknown(LOOK_UP_S - 0.1) == frozenset()
    assert plan.next_due(1.0) == LOOK_UP_S
    assert plan.unknown(LOOK_UP_S) == {"a", "c"}
    plan.not_learned({"a", "c"}, KafkaUnavailableError("nobody answers"), LOOK_UP_S)
    plan.answered(ONE, answer({"a": (data(0),)}), LOOK_UP_S)
    assert send(plan, LOOK_UP_S) == {ONE: [Wanted(*A, 0)]}, "who could be asked is asked still"
    plan.learn({"a", "c"}, {A: TWO, C: TWO}, {}, LOOK_UP_S)
    plan.answered(ONE, answer({"a": (data(0, batch(0, b"x")),)}), LOOK_UP_S)
    plan.answered(TWO, answer({"c": (data(0),)}), LOOK_UP_S)
    assert send(plan, LOOK_UP_S) == {TWO: [Wanted(*C, 0), Wanted(*A, 1)]}


def test_nobody_is_looked_up_where_nothing_is_followed() -> None:
    plan = FetchPlan()
    assert plan.unknown(0.0) == frozenset()
    assert plan.next_due(0.0) == float("inf")


def test_a_topic_that_nobody_has_heard_of_is_told_after_a_while_and_asked_for_still() -> None:
    plan = FetchPlan()
    plan.follow(A, 0)
    unheard = {"a": ErrorCode.unknown_topic_or_partition}
    assert plan.learn({"a"}, {}, unheard, 0.0) == []
    assert plan.learn({"a"}, {}, unheard, UNHEARD_OF_S - 1) == []
    (trouble,) = plan.learn({"a"}, {}, unheard, UNHEARD_OF_S + 1)
    assert isinstance(trouble.fault, TopicNotFoundError)
    assert trouble.resume is None
    assert plan.unknown(UNHEARD_OF_S + 3) == {"a"}
    plan.learn({"a"}, {A: ONE}, {}, UNHEARD_OF_S + 3)
    assert send(plan, UNHEARD_OF_S + 3) == {ONE: [Wanted(*A, 0)]}


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (ErrorCode.topic_authorization_failed, NotAuthorizedError),
        (ErrorCode.unknown_server_error, KafkaUnavailableError),
    ],
)
def test_what_does_not_pass_by_itself_is_told_and_asked_for_still(code: ErrorCode, fault: type[Exception]) -> None:
    plan = followed({A: ONE})
    send(plan)
    (trouble,) = plan.answered(ONE, answer({"a": (data(0, code=code),)}), 0.0)
    assert isinstance(trouble, FetchError)
    assert isinstance(trouble.fault, fault)
    assert (trouble.partition, trouble.offset, trouble.resume) == (A, 0, None)
    assert plan.unknown(LATER) == {"a"}
    plan.learn({"a"}, {A: ONE}, {}, LATER)
    assert send(plan, LATER) == {ONE: [Wanted(*A, 0)]}


def test_a_broker_that_refuses_our_credentials_is_told() -> None:
    plan = followed({A: ONE, C: TWO})
    (trouble,) = plan.lost(ONE, AuthenticationError("refused"), 0.0)
    assert (trouble.partition, type(trouble.fault)) == (A, AuthenticationError)
    assert send(plan) == {TWO: [Wanted(*C, 0)]}


@pytest.mark.parametrize(
    ("found", "fault", "resume"),
    [
        (Range(5, 9), CorruptDataError, 5),
        (Range(0, 2), LogDivergedError, 2),
        (Range(0, 9), None, None),
    ],
)
def test_where_there_is_nothing_at_an_offset_it_is_told_where_there_is(
    found: Range, fault: type[Exception] | None, resume: int | None
) -> None:
    plan = FetchPlan()
    plan.follow(A, 3)
    plan.learn({"a"}, {A: ONE}, {}, 0.0)
    send(plan)
    assert plan.answered(ONE, answer({"a": (data(0, code=ErrorCode.offset_out_of_range),)}), 0.0) == []
    assert plan.requests(LATER) == {}, "not before it is known what there is"
    assert plan.unknown(LATER) == {"a"}
    assert plan.doubted() == {A}
    plan.learn({"a"}, {A: ONE}, {}, LATER)
    troubles = plan.learn_ranges({A: found}, LATER)
    assert plan.doubted() == frozenset()
    if fault is None:
        assert troubles == []
    else:
        (trouble,) = troubles
        assert (type(trouble.fault), trouble.offset, trouble.resume) == (fault, 3, resume)
        assert resume is not None
        plan.follow(A, resume)
    assert send(plan, LATER + 2) == {ONE: [Wanted(*A, 3 if resume is None else resume)]}


@pytest.mark.parametrize("check_epochs", [False, True])
def test_leaders_are_told_under_which_epoch_what_they_had_was_appended_if_that_is_wanted(check_epochs: bool) -> None:
    plan = followed({A: ONE}, check_epochs=check_epochs)
    send(plan)
    plan.answered(ONE, answer({"a": (data(0, batch(0, b"x", epoch=3) + batch(1, b"y", epoch=4)),)}), 0.0)
    assert send(plan) == {ONE: [Wanted(*A, 2, 4 if check_epochs else NO_EPOCH)]}
    (trouble,) = plan.answered(ONE, answer({"a": (data(0, diverging=1),)}), 0.0)
    assert isinstance(trouble, FetchError)
    assert (type(trouble.fault), trouble.offset, trouble.resume) == (LogDivergedError, 2, 1)


def test_a_damaged_batch_is_told_once_it_is_the_next_and_asked_for_again() -> None:
    plan = followed({A: ONE})
    send(plan)
    damaged = bytearray(batch(1, b"y"))
    damaged[-1] ^= 1
    (good,) = plan.answered(ONE, answer({"a": (data(0, batch(0, b"x") + bytes(damaged)),)}), 0.0)
    assert isinstance(good, Fetched)
    assert [record.value for record in good.records()] == [b"x"]
    send(plan)
    (trouble,) = plan.answered(ONE, answer({"a": (data(0, bytes(damaged)),)}), 0.0)
    assert isinstance(trouble, FetchError)
    assert (type(trouble.fault), trouble.offset, trouble.resume) == (CorruptDataError, 1, None)
    assert plan.requests(0.0) == {}
    assert send(plan, LATER) == {ONE: [Wanted(*A, 1)]}


def test_a_leader_that_answers_at_once_that_there_is_nothing_is_not_asked_at_once() -> None:
    plan = followed({A: ONE})
    send(plan)
    assert plan.answered(ONE, answer({"a": (data(0),)}), 0.001) == []
    assert send(plan, 0.001) == {}
    due = plan.next_due(0.001)
    assert 0.001 < due <= 0.1
    assert send(plan, due) == {ONE: [Wanted(*A, 0)]}
    plan.answered(ONE, answer({"a": (data(0),)}), due + 0.5)
    assert send(plan, due + 0.5) == {ONE: [Wanted(*A, 0)]}, "it has held its answer back"


def test_an_answer_that_is_a_fault_as_a_whole_counts_as_none() -> None:
    plan = followed({A: ONE, C: ONE})
    send(plan)
    assert plan.answered(ONE, answer({}, ErrorCode.request_timed_out), 0.0) == []
    assert plan.unknown(LATER) == {"a", "c"}


# When all of a log up to an end that its leader has told has been read.


T: Partition = ("t", 0)
U: Partition = ("t", 1)


def fetched(start: int, end: int, high_watermark: int, partition: Partition = T, marker: bool = False) -> Fetched:
    """Records from one offset to another, or only a marker; the leader tells this end of the log."""
    batches: list[tuple[BatchHeader, memoryview]] = []
    if not marker:
        builder = BatchBuilder(1 << 20)
        for offset in range(start, end):
            builder.append(0, None, b"%d" % offset)
        built = memoryview(start.to_bytes(8, "big") + bytes(builder.build())[8:])
        batches = [(parse_header(built), built)]
    return Fetched(partition, start, end, batches, [], high_watermark, high_watermark)


class Script:
    """What a follower's polls give, one after another."""

    def __init__(self, *polls: Sequence[Fetched | FetchError]) -> None:
        self.polls = list(polls)
        self.left: list[Partition] = []
        self.moved: list[tuple[Partition, int]] = []
        self.stopped = False

    def poll(self, timeout_s: float) -> Sequence[Fetched | FetchError]:
        self.stopped = not self.polls
        return self.polls.pop(0) if self.polls else []

    def ask(self) -> None:
        """Ask nobody."""

    def leave(self, partition: Partition) -> None:
        self.left.append(partition)

    def follow(self, partition: Partition, offset: int) -> None:
        self.moved.append((partition, offset))

    def read(self, **ends: int) -> list[int]:
        """Read partition 0, and 1 if its end is given."""
        wanted = {partition: ends[name] for partition, name in ((T, "t"), (U, "u")) if name in ends}
        return [record.offset for _, record in read_up_to(cast("Follower", self), wanted, 30)]


def test_the_end_that_a_new_leader_tells_before_it_has_caught_up_is_none() -> None:
    """Its high watermark is 5 for a moment, although its predecessor had acknowledged everything up to 9."""
    script = Script([fetched(3, 5, 5)], [fetched(5, 7, 9)], [fetched(7, 9, 9, marker=True)])
    assert script.read(t=9) == [3, 4, 5, 6]
    assert (script.polls, script.left) == ([], [T])


def test_the_last_record_is_the_end_where_no_marker_follows() -> None:
    assert Script([fetched(7, 8, 12)], [fetched(8, 12, 12)]).read(t=9) == [7, 8]


def test_each_partition_is_read_to_an_end_of_its_own() -> None:
    script = Script([fetched(0, 2, 2), fetched(0, 1, 3, U)], [fetched(1, 3, 3, U)])
    assert script.read(t=2, u=3) == [0, 1, 0, 1, 2]
    assert script.left == [T, U]


def test_a_leader_that_cannot_be_asked_is_no_end() -> None:
    away = FetchError(T, 0, KafkaUnavailableError("away"))
    assert Script([away], [fetched(0, 2, 2)]).read(t=2) == [0, 1]
    with pytest.raises(KafkaUnavailableError, match="partition 0 of topic t up to offset 2"):
        Script([away]).read(t=2)


@pytest.mark.parametrize(
    "trouble",
    [
        FetchError(T, 0, TopicNotFoundError("gone", topic="t")),
        FetchError(T, 0, CorruptDataError("damaged")),
        FetchError(T, 0, CorruptDataError("truncated"), 1),
        FetchError(T, 0, LogDivergedError("lost its end"), 1),
    ],
)
def test_what_does_not_pass_by_itself_is_raised(trouble: FetchError) -> None:
    with pytest.raises(type(trouble.fault), match=str(trouble.fault)):
        Script([trouble]).read(t=2)


@pytest.mark.parametrize(("resumed", "found", "moved"), [(1, [1], [(T, 1)]), (2, [], [])])
def test_where_records_were_truncated_the_reader_may_go_on(
    resumed: int, found: list[int], moved: list[tuple[Partition, int]]
) -> None:
    script = Script([FetchError(T, 0, CorruptDataError("truncated"), 1)], [fetched(1, 2, 2)])
    records = read_up_to(cast("Follower", script), {T: 2}, 30, lambda trouble: resumed)
    assert [record.offset for _, record in records] == found
    assert (script.moved, script.left) == (moved, [T])
