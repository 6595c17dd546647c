"""The retention of a commit log: when marks are noted, what is kept for whom, and what clocks and damage do to it."""

from __future__ import annotations

import pytest

from coordinator.tests.benches import GROUP, INDEXES, STREAMS, Bench
from coordinator.tests.makers import varied
from rollbridge.base.effects import Steps
from rollbridge.base.ids import TransactionId, counter_of
from rollbridge.buffer.frames import FrameKind
from rollbridge.commitlog.outcomes import EndedIds, ended_key, parse_ended
from rollbridge.errors import OutcomeExpiredError, TransactionNotFoundError
from rollbridge.metadata import paths
from rollbridge.metadata.records import Group, LogMarks
from rollbridge.metadata.requests import AdminAnswer, AdminRequest, RequestKind
from rollbridge.stream.config import Retention
from rollbridge_coordinator.commit.outcome_store import OutcomeStore
from rollbridge_coordinator.core import loop
from rollbridge_coordinator.core.requests import describe
from rollbridge_coordinator.core.settings import LeaderSettings
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.daemon.succession import SPREAD_MAX_MS
from rollbridge_coordinator.history import commit_log
from rollbridge_coordinator.history.commit_log import policy_of

ORDERS = STREAMS[0]
LOG = GROUP.commit_log_topic


class LogBench(Bench):
    """A bench whose brokers delete records; time goes on in the world as for the leader."""

    def begins(self) -> int:
        return self.world.topics[LOG].start

    def ends(self) -> int:
        return len(self.world.topics[LOG].entries)

    def group(self) -> GroupState:
        assert self.leader.group is not None
        return self.leader.group

    def update(self, retention: Retention | None) -> AdminAnswer:
        body = AdminRequest(kind=RequestKind.UPDATE_GROUP, retention=retention, created_ms=0)
        name = self.world.request(GROUP, body.to_json()).rpartition("/")[2]
        while (path := f"{paths.answers(GROUP)}/{name}") not in self.world.nodes:
            self.lead()
        return AdminAnswer.from_json(self.world.nodes[path])

    def work(self, count: int = 4) -> list[TransactionId]:
        """So many transactions begin and are aborted."""
        ids = []
        for _ in range(count):
            self.do("begin", 0, ORDERS)
            ids.append(self.open[0][0])
            self.do("abort", 0, ORDERS)
            self.rest()
        return ids

    def marks(self) -> LogMarks:
        return LogMarks.from_json(self.world.nodes[paths.log_marks(GROUP)])


@pytest.fixture
def bench() -> LogBench:
    found = LogBench.fresh()
    found.world.deletes = True
    return found


def test_what_is_younger_than_the_retention_stays(bench: LogBench) -> None:
    bench.update(Retention(3_600_000))
    bench.work(10)
    assert bench.begins() == 0
    assert len(bench.marks().marks) >= 1
    bench.clock_ms += 3_600_000
    bench.work(1)
    assert bench.begins() > 0
    record = parse_ended(bench.world.latest(INDEXES)[ended_key(GROUP)])
    assert bench.begins() <= record.commit_log_end <= bench.ends()


def test_what_a_takeover_reads_beside_the_snapshots_stays_however_old_it_is(
    bench: LogBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.update(Retention(1_000))
    bench.work(3)
    snapshots = bench.group().snapshots.partitions
    needed = [item.needed for item in snapshots.values()]
    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_snapshots", nothing)
        bench.work(10)
        bench.clock_ms += 3_600_000
        bench.work(1)
    assert [item.needed for item in snapshots.values()] == needed, "no other snapshot was taken"
    assert bench.begins() <= min(item.log_position for item in needed) < bench.ends() - 10
    bench.work(10)
    assert bench.begins() > min(item.log_position for item in needed)


def nothing(*_: object) -> Steps[None]:
    """A chore that does nothing."""
    yield from ()


def test_what_has_ended_is_written_down_before_it_goes_however_rarely_that_is_done_otherwise(bench: LogBench) -> None:
    bench.update(Retention(3_600_000))
    bench.group().settings = varied(bench.group().settings, outcomes_unlisted_max=1_000_000)
    old = bench.work(10)
    bench.clock_ms += 3_600_000
    bench.work(1)
    assert bench.begins() > 0
    record = parse_ended(bench.world.latest(INDEXES)[ended_key(GROUP)])
    assert record.commit_log_end >= bench.begins()
    assert old[0].bytes in EndedIds.of(record)


def test_a_size_is_kept(bench: LogBench) -> None:
    bench.update(Retention(-1, 1_000))
    bench.work(12)
    assert bench.begins() > 0
    assert 100 * (bench.ends() - bench.begins()) >= 1_000, "a record is taken for 100 bytes here"


def test_for_ever_is_for_ever(bench: LogBench) -> None:
    bench.update(Retention())
    bench.work(10)
    bench.clock_ms += 365 * 24 * 3_600_000
    bench.work(1)
    assert bench.begins() == 0


def test_without_a_word_of_the_group_the_coordinator_says_how_long() -> None:
    def kept(settings: LeaderSettings) -> Retention:
        return policy_of(GroupState(GROUP, 1, LogBench.fresh().group().fold, settings))

    assert kept(LeaderSettings()) == Retention(7 * 24 * 3_600_000)
    assert kept(LeaderSettings(commit_log_retention_ms=-1)) == Retention()
    assert kept(LeaderSettings(commit_log_retention_ms=0, commit_log_retention_bytes=5)) == Retention(-1, 5)


def test_nothing_goes_while_clocks_differ(bench: LogBench) -> None:
    bench.update(Retention(1_000))
    bench.work(2)
    times = bench.group().times
    begins = bench.begins()
    times.witness(0, 2 * SPREAD_MAX_MS, 0)
    bench.work(10)
    assert bench.begins() == begins
    times.witness(0, 0, 0)
    bench.work(10)
    assert bench.begins() > begins


def test_a_group_that_is_not_known_keeps_everything(bench: LogBench) -> None:
    bench.update(Retention(1_000, -1, ("audit",)))
    bench.work(10)
    assert bench.begins() == 0
    bench.world.commits["audit"] = {LOG: 5}
    bench.work(10)
    assert bench.begins() == 5


def test_an_open_transaction_stays_open_whatever_goes(bench: LogBench) -> None:
    bench.do("begin", 9, ORDERS)
    still_open = bench.open[9][0].bytes
    bench.update(Retention(1_000))
    bench.work(30)
    assert bench.begins() > 0
    bench.take_over()
    assert list(bench.group().fold.open) == [still_open]
    ended = EndedIds.of(parse_ended(bench.world.latest(INDEXES)[ended_key(GROUP)]))
    assert still_open not in ended


@pytest.mark.parametrize("value", [b"", b"\x01nonsense", None])
def test_if_the_list_is_lost_what_was_recorded_stays_open_and_what_has_ended_stays_ended(
    bench: LogBench, value: bytes | None
) -> None:
    bench.do("begin", 9, ORDERS)
    still_open = bench.open[9][0].bytes
    bench.update(Retention(1_000))
    ended = bench.work(30)
    bench.world.clock_ms = bench.clock_ms  # what comes from now on is appended now
    bench.world.produce(INDEXES, (ended_key(GROUP), value))
    bench.take_over()
    assert list(bench.group().fold.open) == [still_open]
    bench.rest()
    for identifier in (ended[0], ended[-1]):
        bench.open[5] = identifier, bench.open[9][1]
        bench.send(5, FrameKind.BEGIN, str(ORDERS), bench.open[9][1].encode())
    bench.rest()
    # The first one is told by the horizon only once its id was given out long ago; the last one stands in the log.
    assert ended[-1].bytes not in bench.group().fold.open


def test_records_that_somebody_else_has_deleted_take_no_knowledge_with_them(bench: LogBench) -> None:
    bench.update(Retention(1_000))
    ended = bench.work(20)
    assert bench.begins() > 0, "a list has been written"
    bench.update(Retention())
    bench.work(3)
    bench.world.topics[LOG].start = bench.ends()
    bench.take_over()
    known = bench.group().fold.ended
    assert known is not None
    assert ended[0].bytes in known
    assert known.lost_ms > 0, "of those behind the list nothing is known"


def test_what_has_ended_is_written_down_at_once_if_somebody_else_deletes_records(bench: LogBench) -> None:
    ended = bench.work(3)
    bench.do("begin", 9, ORDERS)
    bench.world.topics[LOG].start = bench.ends()
    bench.work(1)
    bench.take_over()
    known = bench.group().fold.ended
    assert known is not None
    assert ended[-1].bytes in known
    assert known.lost_ms == 0
    assert list(bench.group().fold.open) == [bench.open[9][0].bytes]


def test_of_what_may_have_ended_unseen_the_leader_says_that_it_knows_nothing(
    bench: LogBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_log, "_has_outcome", lambda *_: None)
    bench.work(3)
    bench.take_over()
    bench.do("begin", 9, ORDERS)
    bench.do("commit", 9, ORDERS)
    bench.world.topics[LOG].start = bench.ends()
    bench.take_over()
    assert not bench.group().fold.open
    request = AdminRequest(kind=RequestKind.DESCRIBE, transaction=str(bench.open[9][0]), created_ms=0)
    with pytest.raises(OutcomeExpiredError):
        describe(bench.group(), request, bench.clock_ms)


def test_an_id_that_was_not_given_out_does_not_stay_known(bench: LogBench) -> None:
    bench.do("begin", 0, ORDERS)
    begin = bench.open[0][1]
    number = bench.group().counter.number
    forged = TransactionId.of(0, counter_of(number, 1 << 50))
    bench.open[1] = forged, begin
    bench.send(1, FrameKind.BEGIN, str(ORDERS), begin.encode())
    bench.rest()
    assert forged.bytes in bench.world.summary(LOG).terminated, "it was refused"
    for _ in range(2):
        known = bench.group().fold.ended
        assert known is not None
        assert forged.bytes not in known
        bench.take_over()


def test_of_what_has_ended_nobody_says_that_it_has_not(bench: LogBench) -> None:
    [ended] = bench.work(1)
    bench.group().outcome_store = OutcomeStore(10, 1, 100)

    def ask(identifier: TransactionId) -> str:
        body = AdminRequest(kind=RequestKind.LOOK_UP, transaction=str(identifier), created_ms=0)
        name = bench.world.request(GROUP, body.to_json()).rpartition("/")[2]
        path = f"{paths.answers(GROUP)}/{name}"
        for _ in range(1_000):
            if path in bench.world.nodes:
                break
            bench.clock_ms += 10
            bench.lead()
        return AdminAnswer.from_json(bench.world.nodes[path]).code

    assert ask(ended) == OutcomeExpiredError.code
    assert ask(TransactionId.of(0, 1_000_000)) == TransactionNotFoundError.code


def test_who_asks_for_nonsense_is_refused_and_nothing_is_changed(bench: LogBench) -> None:
    answer = bench.update(Retention(0))
    assert not answer.ok
    assert Group.from_json(bench.world.nodes[paths.group(GROUP)]).retention is None
    assert bench.update(Retention(5_000)).ok
    assert Group.from_json(bench.world.nodes[paths.group(GROUP)]).retention == Retention(5_000)
    assert bench.group().journal.nodes[paths.group(GROUP)] == bench.world.nodes[paths.group(GROUP)]
    before = bench.world.nodes[paths.group(GROUP)]
    bench.take_over()
    assert bench.group().log.retention == Retention(5_000)
    assert bench.update(None).ok
    bench.world.nodes[paths.group(GROUP)] = before  # from a backup
    bench.take_over()
    assert bench.group().log.retention is None
    assert Group.from_json(bench.world.nodes[paths.group(GROUP)]).retention is None
    assert bench.group().log.retention is None
