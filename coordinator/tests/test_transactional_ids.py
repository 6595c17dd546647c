"""Transactional ids of a leader: locked ones are left out, and no leader that was paused commits with one later."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from rollbridge.errors import KafkaUnavailableError
from rollbridge.kafka.appender import TransactionalAppender
from rollbridge.kafka.client import KafkaClient
from rollbridge_coordinator.core import transactional_ids
from rollbridge_coordinator.core.transactional_ids import (
    ADVANCE_MAX,
    FENCE_RECORDS,
    IDENTITIES,
    LOOK_S,
    UNANSWERED_S,
    CommitGuard,
    Rotation,
)

# One id and two leaders: all interleavings of an earlier leader's round, of a takeover, and of the moment at which the
# partition takes its marker. The guard is the product's; the broker's part is Kafka's table of states.


class CommittedTwiceError(AssertionError):
    """The earlier leader has committed after the takeover had read the logs."""


class StuckError(AssertionError):
    """The takeover does not end while the earlier leader is paused."""


@dataclass
class Log:
    """The commit log: only its end matters."""

    end: int = 100

    def append(self, records: int) -> list[int]:
        self.end += records
        return list(range(self.end - records, self.end))


@dataclass
class Model:
    """Two leaders, one id that was locked at first, and the fence in ZooKeeper.

    Attributes:
        state: Kafka's of the id; PREPARE while markers are missing.
        is_ours: False once the takeover has fenced the earlier leader.
    """

    steps: tuple[str, ...] = ()
    state: str = "PREPARE"
    is_ours: bool = True
    fence: int = 1
    has_read: bool = False
    log: Log = field(default_factory=Log)
    guard: CommitGuard = field(default_factory=CommitGuard)
    old: int = 0
    new: int = 0
    place: int = 0
    needed: int = 0
    is_deposed: bool = False

    OLD = ("append", "check", "commit")
    NEW = ("raise the fence", "ask", "write", "ask again", "wait", "read")
    """The takeover; a variant leaves one out."""


def old_step(model: Model) -> None:
    """Let the earlier leader do its next step: a round on the id, or nothing while that is locked."""
    step = Model.OLD[model.old]
    if step == "append":
        if model.state == "PREPARE" or not model.is_ours:
            return
        model.state = "ONGOING"
        (model.place,) = model.log.append(1)
        model.guard.appended([model.place])
    elif step == "check":
        if not model.guard.is_safe:
            if model.fence != 1:
                model.is_deposed = True
                return
            model.guard.checked()
    elif model.state == "ONGOING" and model.is_ours:
        model.state = "COMPLETE"
        if model.has_read:
            raise CommittedTwiceError(model.steps)
    model.old += 1


def new_step(model: Model, takeover: tuple[str, ...]) -> None:
    """Let the new leader do its next step."""
    match takeover[model.new]:
        case "raise the fence":
            model.fence = 2
        case "write":
            model.log.append(len(FENCE_RECORDS) + 1)
            model.needed = model.log.end
        case "ask" | "ask again":
            if model.state != "PREPARE":  # an open transaction is aborted, and the earlier leader is fenced
                model.state, model.is_ours = "COMPLETE", False
        case "wait" if model.state == "ONGOING" and model.place < model.needed:
            return
        case "read":
            model.has_read = True
    model.new += 1


def orders() -> Iterator[tuple[str, ...]]:
    """Yield every order of the steps of both leaders, with the partition's return at each place."""
    steps = len(Model.OLD) + len(Model.NEW)
    for places in itertools.combinations(range(steps), len(Model.OLD)):
        order = ["old" if place in places else "new" for place in range(steps)]
        for place in range(steps + 1):
            yield (*order[:place], "unlock", *order[place:], *["new"] * steps, "end", *["old"] * steps)


def play(takeover: tuple[str, ...], advance: int = 1, *, is_known: bool = True) -> int:
    """Play all schedules; return in how many the earlier leader has committed.

    Args:
        advance: Offsets between the earlier leader's last append and its next: its own markers.
    """
    committed = 0
    for order in orders():
        model = Model(order)
        if is_known:
            model.guard.appended(model.log.append(1))
            model.guard.checked()
            model.guard.begin()
        model.log.append(advance)
        for step in order:
            if step == "unlock":
                model.state = "COMPLETE" if model.state == "PREPARE" else model.state
            elif step == "new" and model.new < len(takeover):
                new_step(model, takeover)
            elif step == "old" and model.old < len(Model.OLD) and not model.is_deposed:
                old_step(model)
            if step == "end" and model.new < len(takeover):
                raise StuckError(order)
        committed += model.old == len(Model.OLD)
    return committed


@pytest.mark.parametrize("advance", range(ADVANCE_MAX + 3))
@pytest.mark.parametrize("is_known", [True, False])
def test_nothing_is_committed_with_a_locked_id_once_a_takeover_has_read(advance: int, is_known: bool) -> None:
    assert play(Model.NEW, advance, is_known=is_known), "in some orders the earlier leader was in time"


@pytest.mark.parametrize(
    ("left_out", "fault"),
    [
        ({"raise the fence"}, CommittedTwiceError),
        ({"write"}, CommittedTwiceError),
        ({"ask again"}, StuckError),
        ({"ask again", "wait"}, CommittedTwiceError),
    ],
)
def test_each_step_of_the_takeover_is_needed(left_out: set[str], fault: type[AssertionError]) -> None:
    with pytest.raises(fault):
        play(tuple(step for step in Model.NEW if step not in left_out))


def test_the_fence_is_raised_and_written_before_the_last_question() -> None:
    with pytest.raises(CommittedTwiceError):
        play(("raise the fence", "ask again", "wait", "write", "read"))
    with pytest.raises(CommittedTwiceError):
        play(("write", "ask again", "wait", "raise the fence", "read"))


def test_a_guard_that_trusts_every_append_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactional_ids, "ADVANCE_MAX", 10 * len(FENCE_RECORDS))
    with pytest.raises(CommittedTwiceError):
        play(Model.NEW)


def test_the_records_of_a_takeover_are_more_than_own_markers() -> None:
    assert ADVANCE_MAX > 1 + IDENTITIES
    assert len(FENCE_RECORDS) > ADVANCE_MAX


def is_safe(guard: CommitGuard) -> bool:
    return guard.is_safe


def test_a_round_is_safe_only_with_a_record_right_behind_the_last_one() -> None:
    guard = CommitGuard()
    assert not is_safe(guard)
    guard.appended([5, 6])
    assert not is_safe(guard), "the first append of a term"
    guard.checked()
    assert is_safe(guard)
    guard.begin()
    assert not is_safe(guard), "a round without a control record"
    guard.appended([8])
    assert is_safe(guard)
    guard.begin()
    guard.appended([8 + ADVANCE_MAX + 1])
    assert not is_safe(guard)
    guard.appended([8 + ADVANCE_MAX + 2])
    assert not is_safe(guard), "what lies behind an append that was not checked proves nothing"
    guard.begin()
    guard.appended([8 + ADVANCE_MAX + 4])
    assert not is_safe(guard), "nor does it in a later round"


class Ids:
    """Appenders that never connect, and which of their ids Kafka has locked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = IDENTITIES) -> None:
        self.made = [KafkaClient("broker:9092").appender(f"id-{number}") for number in range(count)]
        self.locked: set[TransactionalAppender] = set()
        self.taken: list[TransactionalAppender] = []
        self.idle: list[TransactionalAppender] = []
        self.now_s = 0.0
        monkeypatch.setattr(TransactionalAppender, "is_locked", lambda appender: appender in self.locked)
        monkeypatch.setattr(TransactionalAppender, "init", lambda appender: self.taken.append(appender))
        monkeypatch.setattr("rollbridge_coordinator.core.transactional_ids.time.monotonic", lambda: self.now_s)
        self.rotation = Rotation(self.made, lambda: self.idle.pop() if self.idle else None)

    def lock(self, *numbers: int) -> None:
        for number in numbers:
            self.locked.add(self.made[number])
            self.rotation.lock(self.made[number], "a partition takes no marker")

    def is_any_locked(self) -> bool:
        return self.rotation.is_any_locked

    def next(self) -> str:
        appender, is_borrowed = self.rotation.advance()
        return f"{'borrowed ' if is_borrowed else ''}{appender.transactional_id}"


def test_ids_are_used_in_turn_and_locked_ones_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = Ids(monkeypatch)
    assert [ids.next() for _ in range(4)] == ["id-1", "id-2", "id-0", "id-1"]
    assert not ids.is_any_locked()
    ids.lock(2)
    assert ids.is_any_locked()
    assert [ids.next() for _ in range(3)] == ["id-0", "id-1", "id-0"]
    assert ids.taken == []


def test_where_all_are_locked_one_is_borrowed_and_else_one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = Ids(monkeypatch)
    ids.idle = [KafkaClient("broker:9092").appender("id-of-merges")]
    ids.lock(0, 1, 2)
    assert ids.next() == "borrowed id-of-merges"
    assert ids.next() in {"id-0", "id-1", "id-2"}


def test_an_id_comes_back_once_it_is_unlocked_and_is_taken_if_it_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = Ids(monkeypatch)
    ids.lock(0, 1)
    ids.locked.clear()
    assert [ids.next() for _ in range(2)] == ["id-2", "id-2"], "they are asked for once a second"
    ids.now_s += LOOK_S
    assert {ids.next() for _ in range(3)} == {"id-0", "id-1", "id-2"}
    assert ids.taken == ids.made[:2], "neither was initialised before"
    assert not ids.is_any_locked()


def test_an_id_that_stays_locked_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = Ids(monkeypatch)
    ids.lock(1)
    for _ in range(3):
        ids.now_s += LOOK_S
        assert {ids.next() for _ in range(4)} == {"id-0", "id-2"}
    ids.locked.clear()
    ids.now_s += LOOK_S / 2
    assert {ids.next() for _ in range(4)} == {"id-0", "id-2"}
    ids.now_s += LOOK_S / 2
    assert {ids.next() for _ in range(4)} == {"id-0", "id-1", "id-2"}


def test_a_broker_that_does_not_answer_is_asked_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, asked = Ids(monkeypatch), []

    def hangs(appender: TransactionalAppender) -> bool:
        asked.append(appender)
        raise KafkaUnavailableError("no answer in time")

    monkeypatch.setattr(TransactionalAppender, "is_locked", hangs)
    ids.lock(1)
    for _ in range(round(2 * UNANSWERED_S)):
        ids.now_s += LOOK_S
        ids.next()
    assert len(asked) == 2
