"""Makers of leaders that remember outcomes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from coordinator.tests.makers import GROUP, Bench
from coordinator.tests.sim_world import World
from rollbridge.base.effects import Steps, run
from rollbridge.buffer.state import BufferedTransaction
from rollbridge.buffer.table import State
from rollbridge.commitlog.control import ControlKind, ControlRecord
from rollbridge.metadata import paths
from rollbridge.metadata.records import Group
from rollbridge.metadata.requests import AdminAnswer, AdminRequest, RequestKind
from rollbridge_coordinator.commit.outcomes import Outcomes, adopt, open_preserver
from rollbridge_coordinator.core.effects import CommitRound
from rollbridge_coordinator.core.requests import answer_questions, put_question
from rollbridge_coordinator.core.settings import LeaderSettings
from rollbridge_coordinator.core.state import GroupState, SearchStage
from rollbridge_coordinator.history.sessions import forget_sessions

T = TypeVar("T")


ORDERS = "sales/orders"


class House:
    """A world with one group whose leader knows what :class:`Bench` feeds it."""

    def __init__(self) -> None:
        self.world = World()
        self.world.identity = self.world.controller_epoch = 1
        for path in (paths.requests(GROUP), paths.answers(GROUP), paths.sessions(GROUP), paths.TRANSACTION_COUNTER):
            self.world.ensure(path)
        self.world.create(GROUP.commit_log_topic)
        self.world.nodes[paths.group(GROUP)] = Group(GROUP, 0).to_json()
        self.world.nodes[paths.TRANSACTION_COUNTER] = b"5001"
        self.bench = Bench({ORDERS: 1})
        self.world.create("sales.orders.transaction-buffer")

    @property
    def group(self) -> GroupState:
        return self.bench.group

    def do(self, steps: Steps[T]) -> T:
        """Carry out a procedure."""
        value: T = run(steps, lambda effect: self.world.execute(effect, 1))
        return value

    def search(self, now_ms: int) -> None:
        """Look for sessions that nobody needs, to the end of the search."""
        self.do(forget_sessions(self.group, now_ms))
        while self.group.sessions.stage is not SearchStage.REST:
            self.do(forget_sessions(self.group, now_ms))

    def open(self, **settings: int) -> None:
        """Begin a term."""
        self.group.settings = replace(LeaderSettings(), **settings)  # type: ignore[arg-type]
        self.group.outcome_store, _ = self.do(open_preserver(GROUP, self.group.settings, -1))
        self.group.predictor.log_end = None
        known = Group.from_json(self.world.nodes[paths.group(GROUP)])
        if not known.commit_log_topic_id:
            self.world.nodes[paths.group(GROUP)] = Group(GROUP, 0, "log", known.terminated_topic_id).to_json()

    def end(self, *transactions: BufferedTransaction, at_ms: int = 1_000) -> None:
        """Log outcomes as the leader does."""
        records = [
            ControlRecord(
                item.transaction_id,
                ControlKind.COMMIT if item.state is State.COMMITTING else ControlKind.ABORT,
                item.begin.client_name,
                0,
                at_ms,
                1,
                reason=item.reason,
            )
            for item in transactions
        ]
        self.do(Outcomes(self.group, transactions).append(records))
        self.do(iter(CommitRound()))
        adopt(self.group)
        for item in transactions:
            self.group.fold.settle(item.id)

    def ask(self, **what: Any) -> AdminAnswer | None:
        """Ask a question; None while there is no answer."""
        request = AdminRequest(created_ms=0, **{"kind": RequestKind.LOOK_UP, **what})
        path = self.world.request(GROUP, request.to_json())
        self.do(put_question(self.group, path.rpartition("/")[2], request))
        return self.answer(path)

    def answer(self, path: str = "") -> AdminAnswer | None:
        self.do(answer_questions(self.group, 0))
        names = self.world.children(paths.answers(GROUP))
        raw = self.world.nodes.pop(path or f"{paths.answers(GROUP)}/{names[-1]}", None) if path or names else None
        return None if raw is None else AdminAnswer.from_json(raw)
