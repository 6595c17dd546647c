"""Where a transaction begins that has offsets before its first record: where something is written, if it is soon."""

from __future__ import annotations

from typing import Any

import pytest

from rollbridge.base.effects import AnyEffect, Steps
from rollbridge.errors import InvalidRequestError
from rollbridge_gateway.producer.procedures import (
    AddOffsets,
    BeginTransaction,
    Carry,
    GroupCommit,
    IdState,
    Incoming,
    NothingWrittenError,
    OffsetToCommit,
    RefusedError,
    Save,
    WriteEntry,
    add,
    send_offsets,
    write,
)
from rollbridge_gateway.producer.table import Entry, KafkaFault, Pair, ProducerPhase, ProducerState

PAIR = Pair(1 << 62, 0)
GUESSED, WRITTEN, FORMER = "one/guessed", "other/written", "other/former"
OFFSETS = GroupCommit("group", {("topic", 0): OffsetToCommit(7)})
NOW_MS = 1_000_000


def held(home: str = "") -> IdState:
    return IdState(Entry("id", PAIR, -1, home=home, written_ms=NOW_MS), ProducerState(PAIR))


def carry_out(procedure: Steps[Any]) -> list[AnyEffect]:
    """Carry a procedure out where each stream is of a group of its own; return what it did."""
    done: list[AnyEffect] = []
    begun = GUESSED
    try:
        effect = next(procedure)
        while True:
            done.append(effect)
            if isinstance(effect, BeginTransaction):
                begun = effect.stream
            if isinstance(effect, Carry) and effect.batch != begun:
                refused = NothingWrittenError("another group")
                refused.__cause__ = InvalidRequestError("another group", code="group-mismatch")
                effect = procedure.throw(refused)
            else:
                effect = procedure.send(None)
    except StopIteration:
        return done


def begun_in(done: list[AnyEffect]) -> list[str]:
    return [item.stream for item in done if isinstance(item, BeginTransaction)]


def batch(stream: str, first: int = 0) -> Incoming:
    return Incoming(("topic", 0), stream, PAIR, first, 1, stream)


def offsets(of: IdState, stream: str = GUESSED, *, is_sure: bool, v2: bool = True) -> list[AnyEffect]:
    if v2:
        return carry_out(send_offsets(of, PAIR, OFFSETS, stream, NOW_MS, v2=True, is_sure=is_sure))
    return carry_out(add(of, PAIR, stream, NOW_MS, is_home=True, is_sure=is_sure))


@pytest.mark.parametrize("v2", [False, True])
def test_a_guess_waits_for_a_write_until_it_is_to_be_taken(v2: bool) -> None:
    item = held()
    for stream in ("", GUESSED):
        with pytest.raises(RefusedError, check=lambda fault: fault.fault is KafkaFault.NOWHERE):
            offsets(item, stream, is_sure=False, v2=v2)
    with pytest.raises(RefusedError, check=lambda fault: fault.fault is KafkaFault.NOWHERE):
        offsets(item, "", is_sure=True, v2=v2)
    assert begun_in(offsets(item, is_sure=True, v2=v2)) == [GUESSED]
    assert item.entry is not None
    assert item.entry.home == GUESSED


def test_a_write_that_comes_meanwhile_tells_where() -> None:
    item = held()
    with pytest.raises(RefusedError, check=lambda fault: fault.fault is KafkaFault.NOWHERE):
        offsets(item, is_sure=False)
    assert begun_in(carry_out(write(item, PAIR, [batch(WRITTEN)], NOW_MS, v2=True))) == [WRITTEN]
    assert any(isinstance(effect, AddOffsets) for effect in offsets(item, is_sure=False))


def test_where_it_wrote_before_waits_for_nothing() -> None:
    assert begun_in(offsets(held(FORMER), is_sure=False)) == [FORMER]


def homes_recorded(done: list[AnyEffect]) -> list[str]:
    return [effect.entry.home for effect in done if isinstance(effect, WriteEntry)]


def test_a_wrong_guess_is_mended_for_the_next_attempt() -> None:
    item = held()
    offsets(item, is_sure=True)
    assert item.producer is not None
    assert item.producer.state is ProducerPhase.OPEN
    done = carry_out(write(item, PAIR, [batch(WRITTEN)], NOW_MS, v2=True))
    assert homes_recorded(done) == [WRITTEN]
    assert isinstance(done[-2], Save), "what was written is behind a savepoint before anything else may fail"
    assert homes_recorded(carry_out(write(item, PAIR, [batch(WRITTEN)], NOW_MS, v2=True))) == [], "it is on record"
    item.producer = ProducerState(PAIR)
    assert begun_in(offsets(item, is_sure=False)) == [WRITTEN]


def test_a_stray_batch_of_a_transaction_that_has_records_mends_nothing() -> None:
    item = held()
    carry_out(write(item, PAIR, [batch(GUESSED)], NOW_MS, v2=True))
    assert homes_recorded(carry_out(write(item, PAIR, [batch(WRITTEN, 1)], NOW_MS, v2=True))) == []
    item.producer = ProducerState(PAIR)
    offsets(item, is_sure=False)
    assert homes_recorded(carry_out(write(item, PAIR, [batch(WRITTEN, 1)], NOW_MS, v2=True))) == [WRITTEN]
