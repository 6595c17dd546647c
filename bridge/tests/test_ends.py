"""When all of a log up to an end that its leader has told has been read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from rollbridge.errors import CorruptDataError, KafkaUnavailableError
from rollbridge.kafka.batches import BatchBuilder, BatchHeader, parse_header
from rollbridge.kafka.errors import TopicNotFoundError
from rollbridge.kafka.fetch import LogDivergedError
from rollbridge.kafka.fetch_plan import Fetched, Trouble
from rollbridge.kafka.follower import Follower, read_up_to
from rollbridge.model.names import Partition

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

    def __init__(self, *polls: Sequence[Fetched | Trouble]) -> None:
        self.polls = list(polls)
        self.left: list[Partition] = []
        self.moved: list[tuple[Partition, int]] = []
        self.stopped = False

    def poll(self, timeout_s: float) -> Sequence[Fetched | Trouble]:
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
    away = Trouble(T, 0, KafkaUnavailableError("away"))
    assert Script([away], [fetched(0, 2, 2)]).read(t=2) == [0, 1]
    with pytest.raises(KafkaUnavailableError, match="partition 0 of topic t up to offset 2"):
        Script([away]).read(t=2)


@pytest.mark.parametrize(
    "trouble",
    [
        Trouble(T, 0, TopicNotFoundError("gone", topic="t")),
        Trouble(T, 0, CorruptDataError("damaged")),
        Trouble(T, 0, CorruptDataError("truncated"), 1),
        Trouble(T, 0, LogDivergedError("lost its end"), 1),
    ],
)
def test_what_does_not_pass_by_itself_is_raised(trouble: Trouble) -> None:
    with pytest.raises(type(trouble.fault), match=str(trouble.fault)):
        Script([trouble]).read(t=2)


@pytest.mark.parametrize(("resumed", "found", "moved"), [(1, [1], [(T, 1)]), (2, [], [])])
def test_where_records_were_truncated_the_reader_may_go_on(
    resumed: int, found: list[int], moved: list[tuple[Partition, int]]
) -> None:
    script = Script([Trouble(T, 0, CorruptDataError("truncated"), 1)], [fetched(1, 2, 2)])
    records = read_up_to(cast("Follower", script), {T: 2}, 30, lambda trouble: resumed)
    assert [record.offset for _, record in records] == found
    assert (script.moved, script.left) == (moved, [T])
