"""Joint transactions: several processes of one session write one, and whoever comes first begins it.

They have no common parent who could begin it for them (the tasks of a Spark job run before the driver is asked for
anything), so they agree on it by its place in a series: number 17 of query Q. The record of the client's session in
ZooKeeper names the latest one, and is only changed on the condition that nobody else has changed it meanwhile. It also
says what became of it, so that a number that comes again after a crash is found to be done, or is done anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Any, Final, Self

from bridge.model.identifiers import TransactionId
from bridge.model.references import decode_streams, encode_streams
from bridge.model.terminated import RETAIN_DEFAULT

FORMER_MAX: Final = 100
"""How many earlier holders of a session are remembered."""


class JointState(StrEnum):
    """What the record says of a joint transaction; the outcome itself is on the commit log."""

    OPEN = "open"
    ENDING = "ending"
    """Its commit was asked for, and who asked did not learn the outcome."""
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class JointWork:
    """The latest joint transaction of a client.

    Attributes:
        series: What its number counts in.
        number: Its place in the series.
        transaction: Its id.
        epoch: Epoch of the session that began it.
        streams: ``scope/stream`` to reference epoch, as in the BEGIN frame.
    """

    series: str
    number: int
    transaction: TransactionId
    epoch: int
    streams: Mapping[str, int]
    lease_ms: int
    retain_ms: int = RETAIN_DEFAULT
    state: JointState = JointState.OPEN

    @property
    def label(self) -> str:
        """The label of the transaction."""
        return label_of(self.series, self.number)

    def ended(self, state: JointState) -> JointWork:
        """The same with what became of it."""
        return replace(self, state=state)

    def to_datum(self) -> dict[str, Any]:
        """As a record of the schema."""
        return {
            "series": self.series,
            "number": self.number,
            "transaction": str(self.transaction),
            "epoch": self.epoch,
            "state": self.state.value,
            "lease_ms": self.lease_ms,
            "retain_ms": self.retain_ms,
            "streams": encode_streams(self.streams),
        }

    @classmethod
    def of_datum(cls, datum: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_datum`."""
        return cls(
            **{
                **datum,
                "transaction": TransactionId.parse(datum["transaction"]),
                "state": JointState(datum["state"]),
                "streams": decode_streams(datum["streams"]),
            }
        )


@dataclass(frozen=True, slots=True)
class SharedSession:
    """What the processes that share a session agree on.

    Attributes:
        holder: What they all call the session; empty if it is one process's own.
        former: Earlier holders, the latest last.
        work: Their latest joint transaction.
    """

    holder: str
    former: tuple[str, ...] = ()
    work: JointWork | None = None

    def taken_over(self, holder: str) -> SharedSession:
        """The session that follows: this one's holder can not come back."""
        former = (*self.former, self.holder) if self.holder else self.former
        return SharedSession(holder, former[-FORMER_MAX:], self.work)

    def to_datum(self) -> dict[str, Any]:
        """As a record of the schema."""
        work = None if self.work is None else self.work.to_datum()
        return {"holder": self.holder, "former": list(self.former), "work": work}

    @classmethod
    def of_datum(cls, datum: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_datum`."""
        work = datum["work"]
        return cls(datum["holder"], tuple(datum["former"]), None if work is None else JointWork.of_datum(work))


class Step(Enum):
    """What a process does that wants to write a number of a series."""

    BEGIN = "begin a transaction for it"
    JOIN = "write a part of the transaction that is on record"
    SKIP = "nothing: an earlier session has committed it"
    SETTLE = "see to it that the transaction on record has an outcome, and decide again"
    OVER = "refuse: this session has ended it already"
    BEHIND = "refuse: a later number has been begun"


class Distance(Enum):
    """Where the number that is wanted stands, seen from the one on record."""

    SAME = "the same number"
    LATER = "a later number of the series, or another series"
    EARLIER = "an earlier number of the series"


_D, _S = Distance, JointState

STEPS: Final[Mapping[tuple[Distance, bool, JointState], Step]] = MappingProxyType(
    {
        # Of this session: its driver begins a number once it knows that the one before is committed.
        (_D.SAME, True, _S.OPEN): Step.JOIN,
        (_D.SAME, True, _S.ENDING): Step.OVER,
        (_D.SAME, True, _S.COMMITTED): Step.OVER,
        (_D.SAME, True, _S.ABORTED): Step.OVER,
        (_D.LATER, True, _S.OPEN): Step.BEGIN,
        (_D.LATER, True, _S.ENDING): Step.BEGIN,
        (_D.LATER, True, _S.COMMITTED): Step.BEGIN,
        (_D.LATER, True, _S.ABORTED): Step.BEGIN,
        # Of an earlier session, which may have died anywhere.
        (_D.SAME, False, _S.OPEN): Step.SETTLE,
        (_D.SAME, False, _S.ENDING): Step.SETTLE,
        (_D.SAME, False, _S.COMMITTED): Step.SKIP,
        (_D.SAME, False, _S.ABORTED): Step.BEGIN,
        (_D.LATER, False, _S.OPEN): Step.SETTLE,
        (_D.LATER, False, _S.ENDING): Step.SETTLE,
        (_D.LATER, False, _S.COMMITTED): Step.BEGIN,
        (_D.LATER, False, _S.ABORTED): Step.BEGIN,
        # A task that is late, or a series that was wound back.
        **{(_D.EARLIER, own, state): Step.BEHIND for own in (True, False) for state in JointState},
    }
)
"""What to do, by distance, whether this session began the transaction on record, and what became of it."""


def decide_step(known: JointWork | None, *, epoch: int, series: str, number: int) -> Step:
    """What a process of the session with this epoch does that wants to write a number of a series."""
    if known is None:
        return Step.BEGIN
    if known.series != series or number > known.number:
        distance = Distance.LATER
    else:
        distance = Distance.SAME if number == known.number else Distance.EARLIER
    return STEPS[distance, known.epoch == epoch, known.state]


def label_of(series: str, number: int) -> str:
    """The label of a joint transaction."""
    return f"{series}/{number}"
