"""Who begins a cooperative transaction, who joins it, and what a later session makes of what an earlier one left."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.base.ids import TransactionId
from rollbridge.metadata.client_sessions import (
    FORMER_MAX,
    SERIES_KEPT_MS,
    STEPS,
    ClientSession,
    CooperativeContent,
    CooperativeState,
    CooperativeWork,
    Distance,
    SeriesStep,
    SharedSession,
    decide_again,
    decide_step,
    next_session,
)

EARLIER, OURS = 7, 8
MINUTE_MS = 60_000


def work(
    number: int = 17, *, epoch: int = OURS, state: CooperativeState = CooperativeState.OPEN, series: str = "q"
) -> CooperativeWork:
    return CooperativeWork(
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
    assert set(STEPS) == set(itertools.product(Distance, (True, False), CooperativeState))


def test_whoever_comes_first_begins() -> None:
    assert decide_step(None, epoch=OURS, series="q", number=0) is SeriesStep.BEGIN


@pytest.mark.parametrize(
    ("known", "number", "step"),
    [
        (work(), 17, SeriesStep.JOIN),
        (work(state=CooperativeState.COMMITTED), 17, SeriesStep.OVER),  # a task that is late
        (work(state=CooperativeState.ENDING), 17, SeriesStep.OVER),
        (work(state=CooperativeState.COMMITTED), 18, SeriesStep.BEGIN),
        (work(), 18, SeriesStep.BEGIN),  # that it is committed could not be put on record
        (work(), 16, SeriesStep.BEHIND),
        (work(epoch=EARLIER), 17, SeriesStep.SETTLE),  # the driver has died
        (work(epoch=EARLIER, state=CooperativeState.ENDING), 17, SeriesStep.SETTLE),
        (work(epoch=EARLIER, state=CooperativeState.COMMITTED), 17, SeriesStep.SKIP),
        (work(epoch=EARLIER, state=CooperativeState.ABORTED), 17, SeriesStep.BEGIN),
        (work(epoch=EARLIER), 18, SeriesStep.SETTLE),
        (work(epoch=EARLIER, state=CooperativeState.COMMITTED), 16, SeriesStep.BEHIND),  # a checkpoint was wound back
        (work(epoch=EARLIER, series="other"), 0, SeriesStep.SETTLE),
        (work(series="other"), 0, SeriesStep.SETTLE),  # it makes room, so what became of it must be known
        (work(series="other", state=CooperativeState.ENDING), 0, SeriesStep.SETTLE),
        (work(epoch=EARLIER, series="other", state=CooperativeState.COMMITTED), 0, SeriesStep.LOOK),
        (work(series="other", state=CooperativeState.ABORTED), 0, SeriesStep.LOOK),
    ],
)
def test_what_a_process_does(known: CooperativeWork, number: int, step: SeriesStep) -> None:
    assert decide_step(known, epoch=OURS, series="q", number=number) is step


def test_settling_leads_to_an_end() -> None:
    for distance, own, state in STEPS:
        if STEPS[distance, own, state] is SeriesStep.SETTLE:
            assert not own or distance is Distance.OTHER, "nobody settles what its own session is writing"
            for ended in (CooperativeState.COMMITTED, CooperativeState.ABORTED):
                assert STEPS[distance, own, ended] in (SeriesStep.SKIP, SeriesStep.BEGIN, SeriesStep.LOOK)


def test_nothing_that_may_be_committed_is_written_again() -> None:
    again = {state for distance, own, state in STEPS if STEPS[distance, own, state] is SeriesStep.BEGIN and not own}
    for state in again - {CooperativeState.ABORTED}:
        assert STEPS[Distance.SAME, False, state] is not SeriesStep.BEGIN


def test_a_record_reads_back() -> None:
    for content in (None, CooperativeContent(), CooperativeContent(5, 2**64 - 1)):
        latest = replace(work(state=CooperativeState.ENDING), content=content)
        session = ClientSession("spark-q", 9, 5, SharedSession("run-2", ("run-0", "run-1"), latest))
        assert ClientSession.from_json(session.to_json()) == session
        assert latest.ended(CooperativeState.COMMITTED).content == content
    plain = ClientSession("tester", 9, 5)
    assert ClientSession.from_json(plain.to_json()) == plain
    assert (plain.work, plain.holder) == (None, "")


def test_what_an_older_version_wrote_says_nothing_of_the_content() -> None:
    datum = json.loads(ClientSession("q", 9, 5, SharedSession("run", (), work())).to_json())
    del datum["shared"]["work"]["content"]
    assert ClientSession.from_json(json.dumps(datum).encode()).work == work()


def test_a_session_of_an_older_version_does_not_know_all_of_its_series() -> None:
    datum = json.loads(ClientSession("q", 9, 5, SharedSession("run", (), work(), complete=True)).to_json())
    for name in ("series", "forgotten", "complete"):
        del datum["shared"][name]
    read = ClientSession.from_json(json.dumps(datum).encode())
    assert read.shared is not None
    assert (read.shared.series, read.shared.forgotten, read.shared.complete) == ((), "", False)
    after = read.shared.with_work(work(series="b", state=CooperativeState.COMMITTED), 0)
    assert not after.complete, "there may have been others before the one on record"


STATES_AT_THE_END = (CooperativeState.COMMITTED, CooperativeState.ABORTED)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from(STATES_AT_THE_END),
            st.sampled_from([0, SERIES_KEPT_MS, 1]),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_what_was_committed_is_never_begun_again_whatever_was_written_since(
    story: list[tuple[str, CooperativeState, int, bool]],
) -> None:
    session = ClientSession("loader", 1, 0)
    now_ms, committed, numbers = SERIES_KEPT_MS, dict[str, int](), dict[str, int]()
    for series, state, later_ms, is_next in story:
        now_ms += later_ms
        number = numbers.get(series, -1) + is_next if series in numbers else 0
        if _step(session, series, number) is not SeriesStep.BEGIN:
            assert number <= committed.get(series, -1) or _forgotten(session, series), (series, number)
            continue
        assert committed.get(series, -1) < number
        numbers[series] = number
        session = session.with_work(work(number, epoch=EARLIER, series=series), now_ms)
        assert session.work is not None
        session = session.with_work(session.work.ended(state), now_ms)
        session = next_session(session, "loader", f"run-{now_ms}", now_ms)
        if state is CooperativeState.COMMITTED:
            committed[series] = number
        session = ClientSession.from_json(session.to_json())
    for series, number in committed.items():
        assert _step(session, series, number) in (SeriesStep.SKIP, SeriesStep.BEHIND) or _forgotten(session, series)


def _step(session: ClientSession, series: str, number: int) -> SeriesStep:
    """As :class:`rollbridge.SharedClient` decides; LOOK: it refuses."""
    step = decide_step(session.work, epoch=OURS, series=series, number=number)
    if step is not SeriesStep.LOOK:
        return step
    assert session.shared is not None
    assert session.shared.complete
    former = session.shared.former_series(series)
    if former is not None:
        return decide_again(former, number)
    return SeriesStep.LOOK if session.shared.has_forgotten(series) else SeriesStep.BEGIN


def _forgotten(session: ClientSession, series: str) -> bool:
    return session.shared is not None and session.shared.has_forgotten(series)


def test_how_far_a_series_came_is_remembered_by_time_and_then_that_there_was_one() -> None:
    session = ClientSession("loader", 1, 0)
    count = 300
    for label in range(count):
        done = replace(
            work(0, series=f"day-{label}", state=CooperativeState.COMMITTED), content=CooperativeContent(label, 7)
        )
        session = session.with_work(done, now_ms=label)
    shared = session.shared
    assert shared is not None
    assert len(shared.series) == count - 1
    for label in range(count - 1):
        former = shared.former_series(f"day-{label}")
        assert former is not None
        assert (former.committed, former.content) == (True, CooperativeContent(label, 7))
    later = session.with_work(work(0, series="new"), now_ms=SERIES_KEPT_MS + 100).shared
    assert later is not None
    assert [item.series for item in later.series] == [f"day-{label}" for label in range(100, count)]
    assert all(later.has_forgotten(f"day-{label}") for label in range(100))
    assert not any(later.has_forgotten(name) for name in ("day-100", "new", "day-300"))


def test_what_nobody_asks_for_again_is_not_remembered() -> None:
    session = ClientSession("loader", 1, 0)
    for job in range(5):
        session = session.with_work(
            replace(work(0, series=f"job-{job}", state=CooperativeState.COMMITTED), once=True), job
        )
    assert session.shared is not None
    assert (session.shared.series, session.shared.forgotten) == ((), "")


def test_contents_add_up_in_any_order() -> None:
    one, other = CooperativeContent(1, 2**64 - 1), CooperativeContent(2, 7)
    assert one + other == other + one == CooperativeContent(3, 6)
    assert sum([one, other], CooperativeContent()) == one + other


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
