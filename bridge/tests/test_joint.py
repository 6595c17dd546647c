"""Who begins a joint transaction, who joins it, and what a later session makes of what an earlier one has left."""

from __future__ import annotations

import itertools

import pytest

from bridge.model.identifiers import TransactionId
from bridge.model.joint import FORMER_MAX, STEPS, Distance, JointState, JointWork, SharedSession, Step, decide_step
from bridge.model.records import ClientSession, next_session

EARLIER, OURS = 7, 8
MINUTE_MS = 60_000


def work(number: int = 17, *, epoch: int = OURS, state: JointState = JointState.OPEN, series: str = "q") -> JointWork:
    return JointWork(
        series=series,
        number=number,
        transaction=TransactionId.of(3, 44),
        epoch=epoch,
        streams={"sales/orders": 3, "sales/items": 0},
        lease_ms=1000,
        retain_ms=50,
        state=state,
    )


def test_every_case_is_in_the_table() -> None:
    assert set(STEPS) == set(itertools.product(Distance, (True, False), JointState))


def test_whoever_comes_first_begins() -> None:
    assert decide_step(None, epoch=OURS, series="q", number=0) is Step.BEGIN


@pytest.mark.parametrize(
    ("known", "number", "step"),
    [
        (work(), 17, Step.JOIN),
        (work(state=JointState.COMMITTED), 17, Step.OVER),  # a task that is late
        (work(state=JointState.ENDING), 17, Step.OVER),
        (work(state=JointState.COMMITTED), 18, Step.BEGIN),
        (work(), 18, Step.BEGIN),  # that it is committed could not be put on record
        (work(), 16, Step.BEHIND),
        (work(epoch=EARLIER), 17, Step.SETTLE),  # the driver has died
        (work(epoch=EARLIER, state=JointState.ENDING), 17, Step.SETTLE),
        (work(epoch=EARLIER, state=JointState.COMMITTED), 17, Step.SKIP),
        (work(epoch=EARLIER, state=JointState.ABORTED), 17, Step.BEGIN),
        (work(epoch=EARLIER), 18, Step.SETTLE),
        (work(epoch=EARLIER, state=JointState.COMMITTED), 16, Step.BEHIND),  # a checkpoint was wound back
        (work(epoch=EARLIER, series="other"), 0, Step.SETTLE),
        (work(epoch=EARLIER, series="other", state=JointState.COMMITTED), 0, Step.BEGIN),
    ],
)
def test_what_a_process_does(known: JointWork, number: int, step: Step) -> None:
    assert decide_step(known, epoch=OURS, series="q", number=number) is step


def test_settling_leads_to_an_end() -> None:
    for distance, own, state in STEPS:
        if STEPS[distance, own, state] is Step.SETTLE:
            assert not own, "nobody settles what its own session is writing"
            for ended in (JointState.COMMITTED, JointState.ABORTED):
                assert STEPS[distance, own, ended] in (Step.SKIP, Step.BEGIN)


def test_nothing_that_may_be_committed_is_written_again() -> None:
    again = {state for distance, own, state in STEPS if STEPS[distance, own, state] is Step.BEGIN and not own}
    for state in again - {JointState.ABORTED}:
        assert STEPS[Distance.SAME, False, state] is not Step.BEGIN


def test_a_record_reads_back() -> None:
    session = ClientSession("spark-q", 9, 5, SharedSession("run-2", ("run-0", "run-1"), work(state=JointState.ENDING)))
    assert ClientSession.from_json(session.to_json()) == session
    plain = ClientSession("tester", 9, 5)
    assert ClientSession.from_json(plain.to_json()) == plain
    assert (plain.work, plain.holder) == (None, "")


def test_sessions_follow_each_other_and_keep_the_transaction_on_record() -> None:
    first = next_session(None, "spark-q", "run-1", 3 * MINUTE_MS)
    assert (first.epoch, first.holder, first.is_former("run-1")) == (3, "run-1", False)
    second = next_session(first.with_work(work(), 1), "spark-q", "run-2", 3 * MINUTE_MS)
    assert (second.epoch, second.holder, second.work) == (4, "run-2", work())
    assert second.is_former("run-1")
    alone = next_session(second, "spark-q", "", 3 * MINUTE_MS)
    assert (alone.epoch, alone.holder, alone.work) == (5, "", work())
    assert alone.is_former("run-2")
    assert next_session(None, "tester", "", 0).shared is None


def test_former_holders_are_forgotten_in_the_end() -> None:
    session = next_session(None, "spark-q", "run", 0)
    for number in range(FORMER_MAX + 5):
        session = next_session(session, "spark-q", f"run-{number}", 0)
    assert session.shared is not None
    assert len(session.shared.former) == FORMER_MAX
    assert session.is_former(f"run-{FORMER_MAX + 3}")
    assert not session.is_former("run-0")
