"""What is known of a segment's end, against logs whose leaders change and that lose their end and grow again."""

from __future__ import annotations

import logging
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from rollbridge.base.effects import AnyEffect, Steps, run
from rollbridge.base.ids import SegmentId
from rollbridge.base.sn import DLSN, SN
from rollbridge.kafka.fetch import LogDivergedError, Stretch
from rollbridge.kafka.records import LogRecord
from rollbridge.kafka.segment_tail import Examined, Read, Seen, SegmentTail, T, sn_of
from rollbridge.stream.group_offsets import NO_EPOCH

PLACE = ("scope.stream.segment-0.epoch-0", 0)
SEGMENT = SegmentId.of(0, 0)
OWN = b"own"


class Entry(NamedTuple):
    """A batch of one record, or a marker, which has no key."""

    epoch: int
    key: bytes | None


class Log:
    """Answers as brokers do: also whether the leader epoch of what was read ended before (KIP-320, KIP-595)."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.epoch = 0

    def append(self, key: bytes | None) -> int:
        self.entries.append(Entry(self.epoch, key))
        return len(self.entries) - 1

    def cut(self, end: int) -> None:
        """Lose what stands from there on; the broker that starts anew leads under another epoch."""
        del self.entries[end:]
        self.epoch += 1

    def records(self, start: int = 0) -> list[LogRecord]:
        found = enumerate(self.entries[start:], start)
        return [LogRecord(offset, 0, entry.key, b"", []) for offset, entry in found if entry.key is not None]

    def ask(self, question: Steps[T]) -> T:
        return run(question, self._answer)

    def _answer(self, need: AnyEffect) -> Stretch:
        assert isinstance(need, Read)
        if need.epoch != NO_EPOCH:
            until = [entry for entry in self.entries if entry.epoch <= need.epoch]
            if not until or until[-1].epoch != need.epoch or len(until) < need.offset:
                raise LogDivergedError(f"{PLACE} has lost what was read of it")
        end = len(self.entries)
        assert need.offset < end or need.offset == need.to, "what is waited for never comes"
        epoch = self.entries[-1].epoch if need.offset < end else NO_EPOCH
        return Stretch(need.offset, end, self.records(need.offset), end, 0, epoch)


def sn(offset: int) -> SN:
    return sn_of(LogRecord(offset, 0, OWN, b"", []), SEGMENT, 0)


def write(log: Log, tail: SegmentTail, key: bytes = OWN) -> int:
    """Write as a round does: append, look at what stands before, commit."""
    offset = log.append(key)
    log.ask(tail.confirm(offset))
    log.ask(tail.last(offset))
    tail.wrote([sn(offset)], [key])
    log.append(None)
    return offset


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


class Leaders(RuleBasedStateMachine):
    """Somebody writes and looks, others write, leaders change, and the log loses its end."""

    @initialize()
    def begin(self) -> None:
        self.log, self.tail = Log(), SegmentTail(PLACE, SEGMENT, 0)
        self.has_lost = False
        self.warnings = Warnings()
        logging.getLogger("rollbridge.kafka.segment_tail").addHandler(self.warnings)

    def teardown(self) -> None:
        logging.getLogger("rollbridge.kafka.segment_tail").removeHandler(self.warnings)

    @rule(key=st.sampled_from([OWN, b"a"]))
    def write(self, key: bytes) -> None:
        write(self.log, self.tail, key)

    @rule(key=st.sampled_from([OWN, b"a", b"b", None]))
    def others(self, key: bytes | None) -> None:
        self.log.append(key)

    @rule()
    def elect(self) -> None:
        self.log.epoch += 1

    @rule(count=st.integers(0, 4))
    def cut(self, count: int) -> None:
        end = max(0, len(self.log.entries) - count)
        self.has_lost |= end < (self.tail.end or 0)
        self.log.cut(end)

    @rule(key=st.sampled_from([None, OWN, b"a", b"b"]))
    def look(self, key: bytes | None) -> None:
        end = len(self.log.entries)
        self.log.ask(self.tail.confirm(end))
        found = self.log.ask(self.tail.last(end) if key is None else self.tail.last_of(key, 0, end))
        there = [record.offset for record in self.log.records() if key in (None, record.key)]
        assert found == (sn(there[-1]) if there else None)
        assert self.has_lost or not self.warnings.count, "nothing of what was known is gone"


TestLeaders = Leaders.TestCase
TestLeaders.settings = settings(TestLeaders.settings, stateful_step_count=20, max_examples=200)


@given(st.integers(0, 3), st.booleans())
def test_what_is_written_under_a_later_leader_is_not_taken_for_a_loss(before: int, confirms: bool) -> None:
    log, tail = Log(), SegmentTail(PLACE, SEGMENT, 0)
    log.append(b"k")
    for _ in range(before):
        write(log, tail)
        log.append(b"k")
    log.ask(tail.last(len(log.entries)))
    log.epoch += 1
    met, last = tail.met, write(log, tail)
    if confirms:
        log.ask(tail.confirm(last + 1))
    assert log.ask(tail.last(len(log.entries))) == sn(last)
    assert tail.met == met, "what was known was forgotten, and read again"


@pytest.mark.parametrize("lost", ["own", "read"])
def test_what_a_log_has_lost_is_said_whoever_wrote_it(lost: str, caplog: pytest.LogCaptureFixture) -> None:
    log, tail = Log(), SegmentTail(PLACE, SEGMENT, 0)
    log.append(b"k")
    log.ask(tail.last(1))
    log.epoch += 1
    last = write(log, tail)
    log.cut(last if lost == "own" else 0)
    while len(log.entries) < 4:
        log.append(b"other")
    assert log.ask(tail.last_of(OWN, 0, 4)) is None
    assert "tail.forgotten" in caplog.text


# What is known of a segment's end: against the log itself, however it was looked at.


KEYS = [b"a", b"b", b"c", b"d"]


def seen(log: list[bytes | None], start: int, end: int) -> list[Seen]:
    return [
        Seen(place, key, SN(DLSN(0, 0, place), 100 + place if key == b"a" else None, place))
        for place, key in enumerate(log[start:end], start)
        if key is not None
    ]


@given(st.lists(st.sampled_from([None, *KEYS]), max_size=20), st.integers(1, 4), st.data())
def test_it_knows_what_the_log_says(log: list[bytes | None], keys_max: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(log)))
    known = Examined(start, keys_max)
    while known.end < len(log):
        if known.last_from and data.draw(st.booleans()):
            earlier = data.draw(st.integers(0, known.last_from))
            known.prepend(earlier, seen(log, earlier, known.last_from))
        end = data.draw(st.integers(known.end + 1, len(log)))
        known.extend(known.end, end, seen(log, known.end, end))
        records = seen(log, known.last_from, known.end)
        assert known.last == (records[-1].sn if records else None)
        ids = [record.sn.transaction_id for record in records if record.sn.transaction_id is not None]
        assert known.last_id == (ids[-1] if ids else None)
        assert known.last_from <= known.keys_from <= known.end or known.keys_from == known.last_from
        for key in KEYS:
            of_key = [record.sn for record in seen(log, known.keys_from, known.end) if record.key == key]
            assert known.last_of(key) == (of_key[-1] if of_key else None)


@pytest.mark.parametrize("before", [[], [Seen(1, b"a", SN(DLSN(0, 0, 1), 101, 1))]])
def test_what_was_truncated_behind_the_window_begins_it_anew(before: list[Seen]) -> None:
    known = Examined(0)
    known.extend(0, 2, before)
    known.extend(7, 9, [])
    assert (known.last_from, known.keys_from, known.end) == (7, 7, 9)
    assert (known.last, known.last_id, known.last_of(b"a")) == (None, None, None)
