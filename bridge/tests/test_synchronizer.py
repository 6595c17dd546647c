"""Replicas of a state machine against a log in memory: what they begin with, what they read, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bridge.tests.strategies import segment_ids
from rollbridge.base.ids import SegmentId
from rollbridge.base.sn import DLSN, EMPTY, SN
from rollbridge.cas.shared_state import (
    MARK_HEADER,
    Codec,
    KeyRecord,
    Machine,
    Pointer,
    Replica,
    entry_of,
    mark_of_snapshot,
    mark_of_update,
)
from rollbridge.errors import CorruptDataError, InvalidRequestError, TruncatedError


def append(state: bytes, update: bytes) -> bytes:
    """Of no use but to tell apart every order and number of updates."""
    return state + update


MACHINE: Machine[bytes, bytes] = Machine(b"0", append)


def place(offset: int) -> DLSN:
    return DLSN(0, 0, offset)


def sn(at: DLSN) -> SN:
    return SN(at, None, at.epoch * 1000 + at.offset)


def snapshot(at: DLSN, state: bytes) -> KeyRecord:
    return KeyRecord(at, sn(at), None, state)


def update(at: DLSN, since: DLSN, value: bytes) -> KeyRecord:
    return KeyRecord(at, sn(at), since, value)


@dataclass
class Log:
    """The log of one key in memory, in segments ``epoch-0``; gaps stand for records of others.

    ``reads`` counts entries that were handed out; after ``interrupt_at`` of them another process does ``meanwhile``.
    """

    entries: list[KeyRecord] = field(default_factory=list)
    tail: DLSN = field(default_factory=lambda: place(0))
    first: DLSN = field(default_factory=lambda: place(0))
    reads: int = 0
    interrupt_at: int | None = None
    meanwhile: Callable[[Log], None] = lambda log: None

    def add(self, since: DLSN | None, value: bytes) -> KeyRecord:
        entry = KeyRecord(self.tail, sn(self.tail), since, value)
        self.entries.append(entry)
        self.skip(2)
        return entry

    def skip(self, offsets: int) -> None:
        self.tail = replace(self.tail, offset=self.tail.offset + offsets)

    def scale(self) -> None:
        self.tail = DLSN(self.tail.epoch + 1, 0, 0)

    def truncate(self, before: DLSN) -> None:
        self.first = max(self.first, before)
        self.entries = [entry for entry in self.entries if entry.place >= self.first]

    def end(self) -> DLSN:
        return self.tail

    def between(self, start: DLSN, end: DLSN) -> Iterator[KeyRecord]:
        for entry in list(self.entries):
            if start <= entry.place < end:
                self._check(start)
                self._count()
                yield entry
        self._check(start)

    def backwards(self, end: DLSN) -> Iterator[Pointer]:
        for entry in reversed(list(self.entries)):
            if entry.place < end:
                self._check(entry.place)
                self._count()
                yield entry.pointer
        self._check(place(0))

    def kept_from(self) -> int:
        return self.first.epoch * 1000 + self.first.offset

    def _check(self, start: DLSN) -> None:
        if start < self.first:
            raise TruncatedError(f"the log begins at {self.first}")

    def _count(self) -> None:
        self.reads += 1
        if self.reads == self.interrupt_at:
            self.meanwhile(self)


def delete_before_newest_snapshot(log: Log) -> None:
    log.truncate(max(entry.place for entry in log.entries if entry.since is None))


def compact(log: Log) -> None:
    log.add(None, MACHINE.bootstrap(Log(log.entries, log.tail, log.first)).state)
    delete_before_newest_snapshot(log)


def test_nothing_was_written_and_the_state_is_the_initial_one() -> None:
    log = Log()
    log.skip(5)
    assert MACHINE.bootstrap(log) == Replica(b"0", place(5))


def test_a_replica_that_met_nothing_reads_on_from_where_it_looked_last() -> None:
    log = Log()
    log.skip(5)
    replica = MACHINE.bootstrap(log)
    first = log.add(None, b"0")
    second = log.add(first.place, b"a")
    assert MACHINE.catch_up(replica, log) == Replica(b"0a", log.tail, second.sn, first.place, 1)
    assert log.reads == 2


def test_it_begins_at_the_newest_snapshot_and_reads_nothing_before() -> None:
    log = Log()
    begin = log.add(None, b"0")
    for number in range(100):
        log.add(begin.place, b"%d" % number)
    newer = log.add(None, b"all")
    last = log.add(newer.place, b"!")
    assert MACHINE.bootstrap(log) == Replica(b"all!", log.tail, last.sn, newer.place, 1)
    assert log.reads == 3  # the last one, then the snapshot and the last one again


@pytest.mark.parametrize("meanwhile", [delete_before_newest_snapshot, compact])
@pytest.mark.parametrize("read", range(1, 6))
def test_what_goes_while_it_is_looked_for_is_replaced_by_a_newer_snapshot(
    read: int, meanwhile: Callable[[Log], None]
) -> None:
    log = Log(interrupt_at=read, meanwhile=meanwhile)
    begin = log.add(None, b"0")
    log.add(begin.place, b"a")
    log.add(None, b"0a")
    log.add(begin.place, b"b")
    assert MACHINE.bootstrap(log).state == b"0ab"


@dataclass
class Busy(Log):
    """Others compact right after each of the first looks at the end, and delete everything before it."""

    compactions: int = 0

    def end(self) -> DLSN:
        end = super().end()
        if self.compactions:
            self.compactions -= 1
            compact(self)
        return end


@pytest.mark.parametrize("compactions", range(1, 5))
def test_everything_before_the_end_may_go_again_and_again_while_it_is_looked_at(compactions: int) -> None:
    log = Busy()
    begin = log.add(None, b"0")
    log.add(begin.place, b"a")
    replica = MACHINE.bootstrap(replace(log, compactions=0))
    log.add(begin.place, b"b")
    log.compactions = compactions
    assert MACHINE.catch_up(replica, log).state == b"0ab"


def test_without_any_snapshot_left_nobody_can_tell_the_state() -> None:
    log = Log()
    begin = log.add(None, b"0")
    log.add(begin.place, b"a")
    log.truncate(replace(begin.place, offset=1))
    with pytest.raises(TruncatedError, match="its state is lost"):
        MACHINE.bootstrap(log)


def test_an_empty_key_of_a_truncated_log_may_have_had_a_state() -> None:
    log = Log()
    log.skip(5)
    log.truncate(place(5))
    with pytest.raises(TruncatedError, match="its state is lost"):
        MACHINE.bootstrap(log)


def test_a_snapshot_that_is_not_where_it_should_be_is_said() -> None:
    log = Log()
    begin = log.add(None, b"0")
    later = log.add(begin.place, b"a")
    log.add(later.place, b"b")
    with pytest.raises(CorruptDataError, match=r"no snapshot at 0-0:2:0"):
        MACHINE.bootstrap(log)


def test_an_update_that_rests_on_what_was_not_met_is_refused() -> None:
    replica = MACHINE.take(MACHINE.begin(place(0)), snapshot(place(0), b"0"))
    with pytest.raises(CorruptDataError, match="rests on a snapshot at 0-0:7:0"):
        MACHINE.take(replica, update(place(8), place(7), b"a"))
    with pytest.raises(CorruptDataError, match="rests on a snapshot at 0-0:0:0"):
        MACHINE.take(MACHINE.begin(place(0)), update(place(8), place(0), b"a"))


def test_what_can_not_be_decoded_is_said_with_its_place() -> None:
    machine = Machine(0, lambda state, change: state + change, Codec.json(), Codec.json())
    replica = machine.take(machine.begin(place(0)), snapshot(place(0), b"1"))
    with pytest.raises(CorruptDataError, match=r"update at 0-0:2:0 cannot be decoded"):
        machine.take(replica, update(place(2), place(0), b"{"))
    with pytest.raises(CorruptDataError, match=r"snapshot at 0-0:2:0 cannot be decoded"):
        machine.take(replica, snapshot(place(2), b"{"))


def test_what_apply_raises_is_passed_on_with_its_place() -> None:
    def refuse(state: bytes, change: bytes) -> bytes:
        raise ZeroDivisionError

    machine = Machine(b"0", refuse)
    replica = machine.take(machine.begin(place(0)), snapshot(place(0), b"1"))
    with pytest.raises(ZeroDivisionError) as caught:
        machine.take(replica, update(place(2), place(0), b"a"))
    assert "the update at 0-0:2:0" in caught.value.__notes__[0]


@given(segment_ids, st.integers(0, 1 << 60), segment_ids, st.integers(0, 1 << 60), st.binary())
def test_marks_name_what_they_were_made_of(
    segment: SegmentId, offset: int, other: SegmentId, since: int, value: bytes
) -> None:
    at, base = DLSN.of(segment, offset), DLSN.of(other, since)
    assert entry_of(sn(at), value, [("x", b"y"), mark_of_update(base)]) == KeyRecord(at, sn(at), base, value)
    assert entry_of(sn(at), value, [mark_of_snapshot()]) == KeyRecord(at, sn(at), None, value)


@pytest.mark.parametrize(
    "mark",
    [
        b"",
        None,
        b"2 snapshot",
        b"1 snapshot ",
        b"1 update",
        b"1 update 7",
        b"1 update 0-0:1",
        b"\xff\xfe",
        b"1 update 99999999999-0:1:0",
    ],
)
def test_a_mark_that_is_none_is_refused(mark: bytes | None) -> None:
    with pytest.raises(CorruptDataError, match=r"0-0:1:0"):
        entry_of(sn(place(1)), b"", [(MARK_HEADER, mark)])


@pytest.mark.parametrize("headers", [[], [("x", b"1 snapshot")], [mark_of_snapshot(), mark_of_snapshot()]])
def test_a_record_of_somebody_else_is_no_entry(headers: list[tuple[str, bytes | None]]) -> None:
    with pytest.raises(CorruptDataError, match="not written by a synchronizer"):
        entry_of(sn(place(1)), b"value", headers)


def test_a_tombstone_is_no_entry() -> None:
    with pytest.raises(CorruptDataError, match="not written by a synchronizer"):
        entry_of(sn(place(1)), None, [mark_of_snapshot()])


def test_without_a_codec_states_and_updates_are_bytes() -> None:
    with pytest.raises(InvalidRequestError, match="unless a codec is given"):
        Machine(0, lambda state, change: state)
    with pytest.raises(InvalidRequestError, match="unless a codec is given"):
        MACHINE.updates.encode("text")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="must be a function"):
        Machine(b"", None)  # type: ignore[arg-type]


class Replicas(RuleBasedStateMachine):
    """Any order of conditional and unconditional updates, snapshots, deletions, scales and starts of processes.

    Each replica writes as a synchronizer does: on condition that it has met the last entry, or without one, naming the
    newest snapshot that it knows. The state must be what one obvious list of all updates says.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log = Log()
        self.log.add(None, b"0")
        self.whole = b"0"
        self.replicas = [MACHINE.bootstrap(self.log) for _ in range(3)]
        self.written = 0

    numbers = st.integers(0, 2)

    def _value(self) -> bytes:
        self.written += 1
        return b" %d" % self.written

    def _wins(self, number: int) -> bool:
        return self.replicas[number].sn == self.log.entries[-1].sn

    @rule(number=numbers)
    def update(self, number: int) -> None:
        known = self.replicas[number]
        if not self._wins(number):
            self.catch_up(number)
            return
        assert known.snapshot is not None
        value = self._value()
        entry = self.log.add(known.snapshot, value)
        self.whole += value
        self.replicas[number] = known.with_updates(known.state + value, entry.sn, len(value))

    @rule(number=numbers)
    def update_unconditionally(self, number: int) -> None:
        snapshot = self.replicas[number].snapshot
        assert snapshot is not None
        value = self._value()
        self.log.add(snapshot, value)
        self.whole += value

    @rule(number=numbers, truncate=st.booleans())
    def compact(self, number: int, truncate: bool) -> None:
        self.catch_up(number)
        known = self.replicas[number]
        entry = self.log.add(None, known.state)
        self.replicas[number] = known.with_snapshot(known.state, entry.sn)
        if truncate:
            self.log.truncate(known.read_to)

    @rule(number=numbers)
    def catch_up(self, number: int) -> None:
        self.replicas[number] = MACHINE.catch_up(self.replicas[number], self.log)
        assert self.replicas[number].state == self.whole

    @rule(number=numbers)
    def start(self, number: int) -> None:
        known = self.replicas[number]
        self.replicas[number] = MACHINE.bootstrap(self.log)
        assert self.replicas[number].state == self.whole
        assert MACHINE.catch_up(known, self.log).state == self.whole

    @precondition(lambda self: self.log.tail.epoch < 5)
    @rule()
    def scale(self) -> None:
        self.log.scale()

    @rule(offsets=st.integers(1, 5))
    def others_write(self, offsets: int) -> None:
        self.log.skip(offsets)

    @invariant()
    def each_replica_is_a_prefix(self) -> None:
        assert all(self.whole.startswith(replica.state) for replica in self.replicas)


TestReplicas = Replicas.TestCase
TestReplicas.settings = settings(stateful_step_count=40, deadline=None)


def test_a_replica_of_own_writes_is_as_one_that_reads_them() -> None:
    log = Log()
    first = log.add(None, b"0")
    mine = MACHINE.begin(place(0)).with_snapshot(b"0", first.sn)
    run = [log.add(first.place, b"a"), log.add(first.place, b"b")]
    mine = mine.with_updates(MACHINE.preview(mine.state, [b"a", b"b"]), run[-1].sn, 2)
    assert replace(MACHINE.bootstrap(log), read_to=mine.read_to) == mine
    assert mine.sn != EMPTY
