"""Conditional writes against a simulated log, seed by seed: what is promised holds whatever is lost, late or contended.

And the judgement is worth something: each way to get the protocol wrong is noticed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.tests.sim_cas import Stuck, World, faults
from rollbridge.base.effects import AnyEffect, Steps
from rollbridge.base.sn import DLSN, EMPTY, SN
from rollbridge.cas import machine
from rollbridge.cas.machine import (
    EVENTS,
    MOVES,
    AppendQueue,
    Began,
    ConditionalAppend,
    Ended,
    Lost,
    Refuted,
    Replied,
    RoundState,
    Stable,
)
from rollbridge.cas.request import AppendRequest
from rollbridge.errors import UnavailableError
from rollbridge.kafka.fetch import Stretch
from rollbridge.kafka.segment_tail import LineageTails, Read, SegmentTail
from rollbridge.stream.conditions import Accepted, NonMonotonicId, Refused
from rollbridge.stream.group_offsets import NO_EPOCH
from rollbridge.stream.reading import KeyLineage

SEEDS = range(80)


def run(seed: int) -> World:
    world = World(seed)
    world.run()
    return world


def test_no_promise_is_broken_whatever_is_lost_late_or_contended(monkeypatch: pytest.MonkeyPatch) -> None:
    visited: set[tuple[RoundState, type[machine.RoundEvent]]] = set()

    def handle(round_: ConditionalAppend, event: machine.RoundEvent) -> AnyEffect | None:
        visited.add((round_.state, type(event)))
        return original(round_, event)

    original = ConditionalAppend.handle
    monkeypatch.setattr(ConditionalAppend, "handle", handle)
    answers: Counter[str] = Counter()
    for seed in SEEDS:
        world = run(seed)
        assert faults(world) == [], f"seed {seed}"
        for connection in world.connections:
            for client in connection.clients:
                for attempt in client.attempts:
                    answers[type(attempt.answers[0][1]).__name__] += 1
    missing = [pair for pair, move in MOVES.items() if move is not None and pair not in visited]
    assert not missing, f"never came to {missing}"
    told = {"list", "CasWriteError", "CasOutcomeUnknownError", "TransactionIdOutOfOrderError", "UnavailableError"}
    assert told <= answers.keys()


def test_every_event_in_every_state_is_in_the_table() -> None:
    assert set(MOVES) == set(itertools.product(RoundState, EVENTS))
    assert set(EVENTS) == set(machine.RoundEvent.__args__)
    assert all(move is None for (state, _), move in MOVES.items() if state is RoundState.DONE)


def test_the_protocol_shows_the_table() -> None:
    shown = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    *rows, done = machine._GRID.strip("\n").splitlines()
    assert "\n".join(rows) in shown
    assert set(done.split()[1:]) == {"-"}


@pytest.mark.parametrize(("state", "event"), [pair for pair, move in MOVES.items() if move is None])
def test_what_cannot_happen_is_no_event(state: RoundState, event: type[machine.RoundEvent]) -> None:
    world = World(0)
    client = world.connections[0].clients[0]
    client._write(b"a", None)
    (queue,) = world.connections[0].queues.values()
    round_ = queue.take(1)
    assert isinstance(round_, ConditionalAppend)
    round_.state = state
    with pytest.raises(RuntimeError, match=state.value):
        round_.handle(event(*["" for _ in event._fields]))  # type: ignore[arg-type]


# Ways to get it wrong


def looking_before_appending(patch: pytest.MonkeyPatch) -> None:
    """What is accepted by a look is not looked at again where the records stand."""

    def decide(round_: ConditionalAppend, event: machine.Appended) -> AnyEffect | None:
        round_.state, round_._offset = RoundState.DECIDING, event.offset
        return round_.handle(Stable(_all_accepted(round_, event.offset)))

    patch.setitem(MOVES, (RoundState.APPENDING, machine.Appended), decide)
    patch.setitem(MOVES, (RoundState.NEW, Began), lambda round_, _: ConditionalAppend._begin(round_, Began(looks=True)))


def _all_accepted(round_: ConditionalAppend, offset: int) -> list[Accepted]:
    sns = (_sn(round_, place) for place in itertools.count(offset))
    return [Accepted(tuple(itertools.islice(sns, len(entry.keys)))) for entry in round_.entries]


def _sn(round_: ConditionalAppend, offset: int) -> SN:
    tail = round_.tail
    return SN(DLSN.of(tail.segment, offset), None, tail.base + offset)


def not_waiting(patch: pytest.MonkeyPatch) -> None:
    """What is undecided is taken for nothing."""

    def part(self: SegmentTail, offset: int, to: int, epoch: int = NO_EPOCH) -> Steps[Stretch]:
        found = yield from Read(self.place, offset, offset, epoch)
        return found._replace(end=to, records=[record for record in found.records if record.offset < to])

    patch.setattr(SegmentTail, "part", part)


def trusting_offsets(patch: pytest.MonkeyPatch) -> None:
    """What stands right behind the expected record is taken for its marker."""

    def verdicts(round_: ConditionalAppend, offset: int) -> Steps[list[object]]:
        expected = round_.entries[0].condition.expected.dlsn
        found = yield from original(round_, offset)
        if expected is not None and expected.segment == round_.tail.segment and 0 < offset - expected.offset <= 2:
            return list(_all_accepted(round_, offset))
        return list(found)

    original = ConditionalAppend._verdicts
    patch.setattr(ConditionalAppend, "_verdicts", verdicts)


def not_searching(patch: pytest.MonkeyPatch) -> None:
    """After a lost commit the transactional id is recovered, but the log is not asked what it did."""
    patch.setitem(MOVES, (RoundState.RECOVERING, Ended), lambda round_, _: ConditionalAppend._repeat(round_, Lost("")))


def repeating_lost_commits(patch: pytest.MonkeyPatch) -> None:
    """A commit without an answer is taken for none."""
    patch.setitem(MOVES, (RoundState.COMMITTING, Lost), ConditionalAppend._repeat)


def believing_lost_commits(patch: pytest.MonkeyPatch) -> None:
    """A commit without an answer is taken for one."""
    patch.setitem(MOVES, (RoundState.COMMITTING, Lost), lambda round_, _: ConditionalAppend._write(round_, Ended()))


def doubting_at_once(patch: pytest.MonkeyPatch) -> None:
    """A commit without an answer is called unknown without a look."""
    patch.setitem(MOVES, (RoundState.COMMITTING, Lost), ConditionalAppend._doubt)


def refusing_repetitions(patch: pytest.MonkeyPatch) -> None:
    """A write that comes again is refused because of itself."""

    def refuse(self: AppendQueue, request: AppendRequest, verdict: Refused | NonMonotonicId, _: object) -> None:
        request.settle(self.refusal(request, verdict) if isinstance(verdict, Refused) else UnavailableError(""))

    patch.setattr(AppendQueue, "_refuse", refuse)


def refusing_in_old_segments(patch: pytest.MonkeyPatch) -> None:
    """A look refuses without asking whether the segment is sealed."""

    def choose(round_: ConditionalAppend, event: Stable) -> AnyEffect | None:
        effect = ConditionalAppend._choose(round_, event)
        return round_.handle(Replied(None)) if round_.state is RoundState.CHECKING else effect

    patch.setitem(MOVES, (RoundState.LOOKING, Stable), choose)


def forgetting_predecessors(patch: pytest.MonkeyPatch) -> None:
    """An empty segment is taken for a stream in which nothing was written."""

    def last(
        self: LineageTails, lineage: KeyLineage, key: bytes | None, to: int, since: int | None = None
    ) -> Steps[SN]:
        tail = self.active(lineage)
        return (yield from tail.last(to) if key is None else tail.last_of(key, 0, to)) or EMPTY

    patch.setattr(LineageTails, "last", last)


def calling_written_what_was_aborted(patch: pytest.MonkeyPatch) -> None:
    """What was aborted early counts as written."""

    def judge(round_: ConditionalAppend, _: Stable) -> None:
        round_._finish(machine.Committed([verdict.sns for verdict in _all_accepted(round_, round_._offset)]))

    patch.setitem(MOVES, (RoundState.JUDGING, Stable), judge)


def refuting_latecomers(patch: pytest.MonkeyPatch) -> None:
    """Whoever waits when a round ends is refused with it, also if it was asked for after the log was read."""

    def refute(round_: ConditionalAppend) -> None:
        round_._behind = round_.waiting()
        original(round_)

    original = ConditionalAppend._refute
    patch.setattr(ConditionalAppend, "_refute", refute)
    patch.setitem(MOVES, (RoundState.COMMITTING, Ended), _write_and_refute)


def _write_and_refute(round_: ConditionalAppend, event: Ended) -> None:
    round_._refute()
    ConditionalAppend._write(round_, event)


def repeating_commits(patch: pytest.MonkeyPatch) -> None:
    """What is committed stays in the queue."""

    def settle(self: AppendQueue, done: ConditionalAppend, took_s: float) -> object:
        if isinstance(done.result, machine.Committed):
            self.queue.extendleft(done.requests)
        return original(self, done, took_s)

    original = AppendQueue.settle
    patch.setattr(AppendQueue, "settle", settle)


def committing_what_is_refuted(patch: pytest.MonkeyPatch) -> None:
    """What is refuted early is committed before it is read on."""

    def hurry(round_: ConditionalAppend, _: Refuted) -> AnyEffect | None:
        return round_.handle(Stable(_all_accepted(round_, round_._offset)))

    patch.setitem(MOVES, (RoundState.DECIDING, Refuted), hurry)


MUTANTS = [
    looking_before_appending,
    not_waiting,
    trusting_offsets,
    not_searching,
    repeating_lost_commits,
    believing_lost_commits,
    doubting_at_once,
    refusing_repetitions,
    refusing_in_old_segments,
    forgetting_predecessors,
    calling_written_what_was_aborted,
    refuting_latecomers,
    repeating_commits,
    committing_what_is_refuted,
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_simulation_catches(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    for seed in SEEDS:
        try:
            if faults(run(seed)):
                return
        except Stuck:
            return
    pytest.fail("no run has noticed it")
