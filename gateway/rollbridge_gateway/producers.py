"""The producer of one transactional id: every state and request, transactions v1 and v2, as one table.

With v1 a producer keeps its pair from one transaction to the next, so an end names no particular one. With v2 each end
is answered with the next pair: the pair names the transaction. Both may meet the same producer: Flink writes with v2
and commits what it recovers with v1.

A gateway that has just started knows a producer's state from what became of the transaction with its label
(:func:`found`), so every row here is met both by a gateway that has lived through it and by one that has not.

What differs from Kafka's coordinator: a transaction whose lease ran out is ``LOST``, not fenced. Its producer can go on
with the next one, since nobody has taken its pair away. And with v1 the abort of nothing is fine: librdkafka asks for
it after a refusal, and takes another one for fatal.

Source: Kafka's ``TransactionCoordinator.endTransaction`` and ``TransactionMetadata``; KIP-360, KIP-890, KIP-939.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, NamedTuple, assert_never

from rollbridge_gateway.identity import Pair, next_pair

ABORTED_BY_PRODUCER: Final = "its producer asked for it"
"""Reason of an abort that a producer has asked for; the label's outcome carries it to other gateways."""

UNACKNOWLEDGED: Final = "nothing of it was acknowledged"
"""Reason of the abort of a transaction without a savepoint: for its producer it has not begun."""


class ProducerPhase(Enum):
    """What the transaction of a producer's pair is."""

    EMPTY = "empty"
    """There was none."""
    OPEN = "open"
    COMMITTING = "committing"
    """Its commit was asked for; the answer is not known here."""
    ABORTING = "aborting"
    COMMITTED = "committed"
    ABORTED = "aborted"
    """As its producer asked."""
    LOST = "lost"
    """Aborted by somebody else: its lease ran out, or an operator did it."""


class Request(Enum):
    """What producers ask for."""

    ADD = "add"
    """AddPartitionsToTxn, AddOffsetsToTxn."""
    WRITE_V1 = "write v1"
    """Produce up to v11, TxnOffsetCommit up to v4: what they name was added before."""
    WRITE_V2 = "write v2"
    """Produce v12, TxnOffsetCommit v5: they add what they name."""
    COMMIT_V1 = "commit v1"
    ABORT_V1 = "abort v1"
    COMMIT_V2 = "commit v2"
    ABORT_V2 = "abort v2"
    RENEW = "renew"
    """InitProducerId with a pair (KIP-360)."""


class Step(Enum):
    """What to do about a request."""

    BEGIN = "begin"
    """Begin a transaction under the pair's label, and carry the request out in it."""
    GO = "go"
    """Carry it out in the open transaction."""
    COMMIT = "commit"
    """Ask for the commit, or for its answer again."""
    ABORT = "abort"
    RENEW = "renew"
    """Hand out the next pair; nothing is open."""
    ABORT_RENEW = "abort, renew"
    """Abort what is open, then hand out the next pair."""
    DONE = "done"
    """It has happened: answer as then."""
    WAIT = "wait"
    """CONCURRENT_TRANSACTIONS: ask again."""
    INVALID = "invalid"
    """INVALID_TXN_STATE; nothing is changed."""
    ABORTABLE = "abortable"
    """The producer can only abort: TRANSACTION_ABORTABLE, where the version knows it."""
    STALE = "stale"
    """The pair is over: PRODUCER_FENCED or INVALID_PRODUCER_EPOCH."""


_S, _R = ProducerPhase, Request

TABLE: Final[Mapping[tuple[ProducerPhase, Request], Step]] = {
    (_S.EMPTY, _R.ADD): Step.BEGIN,
    (_S.EMPTY, _R.WRITE_V1): Step.ABORTABLE,
    (_S.EMPTY, _R.WRITE_V2): Step.BEGIN,
    (_S.EMPTY, _R.COMMIT_V1): Step.INVALID,
    (_S.EMPTY, _R.ABORT_V1): Step.DONE,
    (_S.EMPTY, _R.COMMIT_V2): Step.INVALID,
    (_S.EMPTY, _R.ABORT_V2): Step.RENEW,
    (_S.EMPTY, _R.RENEW): Step.RENEW,
    (_S.OPEN, _R.ADD): Step.GO,
    (_S.OPEN, _R.WRITE_V1): Step.GO,
    (_S.OPEN, _R.WRITE_V2): Step.GO,
    (_S.OPEN, _R.COMMIT_V1): Step.COMMIT,
    (_S.OPEN, _R.ABORT_V1): Step.ABORT,
    (_S.OPEN, _R.COMMIT_V2): Step.COMMIT,
    (_S.OPEN, _R.ABORT_V2): Step.ABORT,
    (_S.OPEN, _R.RENEW): Step.ABORT_RENEW,
    (_S.COMMITTING, _R.ADD): Step.WAIT,
    (_S.COMMITTING, _R.WRITE_V1): Step.INVALID,
    (_S.COMMITTING, _R.WRITE_V2): Step.WAIT,
    (_S.COMMITTING, _R.COMMIT_V1): Step.COMMIT,
    (_S.COMMITTING, _R.ABORT_V1): Step.INVALID,
    (_S.COMMITTING, _R.COMMIT_V2): Step.COMMIT,
    (_S.COMMITTING, _R.ABORT_V2): Step.INVALID,
    (_S.COMMITTING, _R.RENEW): Step.WAIT,
    (_S.ABORTING, _R.ADD): Step.WAIT,
    (_S.ABORTING, _R.WRITE_V1): Step.INVALID,
    (_S.ABORTING, _R.WRITE_V2): Step.WAIT,
    (_S.ABORTING, _R.COMMIT_V1): Step.INVALID,
    (_S.ABORTING, _R.ABORT_V1): Step.ABORT,
    (_S.ABORTING, _R.COMMIT_V2): Step.INVALID,
    (_S.ABORTING, _R.ABORT_V2): Step.ABORT,
    (_S.ABORTING, _R.RENEW): Step.ABORT_RENEW,
    # With v1 the next transaction has the same pair. With v2 the end was answered with the next one.
    (_S.COMMITTED, _R.ADD): Step.BEGIN,
    (_S.COMMITTED, _R.WRITE_V1): Step.ABORTABLE,
    (_S.COMMITTED, _R.WRITE_V2): Step.STALE,
    (_S.COMMITTED, _R.COMMIT_V1): Step.DONE,
    (_S.COMMITTED, _R.ABORT_V1): Step.INVALID,
    (_S.COMMITTED, _R.COMMIT_V2): Step.RENEW,
    (_S.COMMITTED, _R.ABORT_V2): Step.INVALID,
    (_S.COMMITTED, _R.RENEW): Step.RENEW,
    (_S.ABORTED, _R.ADD): Step.BEGIN,
    (_S.ABORTED, _R.WRITE_V1): Step.ABORTABLE,
    (_S.ABORTED, _R.WRITE_V2): Step.STALE,
    (_S.ABORTED, _R.COMMIT_V1): Step.INVALID,
    (_S.ABORTED, _R.ABORT_V1): Step.DONE,
    (_S.ABORTED, _R.COMMIT_V2): Step.INVALID,
    (_S.ABORTED, _R.ABORT_V2): Step.RENEW,
    (_S.ABORTED, _R.RENEW): Step.RENEW,
    (_S.LOST, _R.ADD): Step.ABORTABLE,
    (_S.LOST, _R.WRITE_V1): Step.ABORTABLE,
    (_S.LOST, _R.WRITE_V2): Step.ABORTABLE,
    (_S.LOST, _R.COMMIT_V1): Step.ABORTABLE,
    (_S.LOST, _R.ABORT_V1): Step.DONE,
    (_S.LOST, _R.COMMIT_V2): Step.ABORTABLE,
    (_S.LOST, _R.ABORT_V2): Step.RENEW,
    (_S.LOST, _R.RENEW): Step.RENEW,
}


class PairEnd(Enum):
    """How a pair came to be over."""

    COMMIT = "commit"
    ABORT = "abort"
    RENEWED = "renewed"


class Previous(NamedTuple):
    """The pair before a producer's, of which an answer may have been lost."""

    pair: Pair
    end: PairEnd


_REPEATS: Final[Mapping[tuple[PairEnd, Request], Step]] = {
    (PairEnd.COMMIT, _R.COMMIT_V2): Step.DONE,
    (PairEnd.COMMIT, _R.ABORT_V2): Step.INVALID,
    (PairEnd.COMMIT, _R.RENEW): Step.DONE,
    (PairEnd.ABORT, _R.COMMIT_V2): Step.INVALID,
    (PairEnd.ABORT, _R.ABORT_V2): Step.DONE,
    (PairEnd.ABORT, _R.RENEW): Step.DONE,
    (PairEnd.RENEWED, _R.RENEW): Step.DONE,
}
"""Requests with the previous pair that are not simply stale: their answers were lost."""


@dataclass(frozen=True, slots=True)
class ProducerState:
    """A producer as a gateway knows it.

    Attributes:
        pair: The last one that was handed out.
        state: Of the transaction under ``label``.
        previous: The pair before it, if that is known.
        kept: Pair in the label of a transaction that a former producer had prepared (KIP-939); None for its own.
    """

    pair: Pair
    state: ProducerPhase = ProducerPhase.EMPTY
    previous: Previous | None = None
    kept: Pair | None = None

    @property
    def label(self) -> str:
        """Label of its present transaction."""
        return (self.kept or self.pair).label

    def decide(self, request: Request, pair: Pair) -> Step:
        """Return what to do about a request that carries a pair."""
        if pair == self.pair:
            return TABLE[self.state, request]
        if self.previous is not None and pair == self.previous.pair:
            return _REPEATS.get((self.previous.end, request), Step.STALE)
        return Step.STALE

    def begun(self) -> ProducerState:
        """Return the producer with a transaction of its own open."""
        return replace(self, state=ProducerPhase.OPEN, kept=None)

    def asked(self, *, commit: bool) -> ProducerState:
        """Return the producer once an end was asked for."""
        return replace(self, state=ProducerPhase.COMMITTING if commit else ProducerPhase.ABORTING)

    def ended(self, *, commit: bool) -> ProducerState:
        """Return the producer whose transaction has ended as it asked; the pair stays, as with v1."""
        return replace(self, state=ProducerPhase.COMMITTED if commit else ProducerPhase.ABORTED)

    def renewed(self, end: PairEnd, random: int) -> ProducerState:
        """Return the producer with the next pair, and nothing under it.

        Args:
            end: What it was that the next pair answers.
            random: For another producer id, once the epochs are used up.
        """
        return ProducerState(next_pair(self.pair, random), ProducerPhase.EMPTY, Previous(self.pair, end))

    def lost(self) -> ProducerState:
        """Return the producer whose transaction somebody else has aborted."""
        return replace(self, state=ProducerPhase.LOST)


class KnownEnd(Enum):
    """What is known of a label, wherever its transaction was begun."""

    NONE = "none"
    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


def found(
    pair: Pair, known: KnownEnd, reason: str, previous: Previous | None = None, kept: Pair | None = None
) -> ProducerState:
    """Return the producer of a pair that this gateway has not served before.

    Args:
        pair: The pair, which is not over.
        known: What became of the transaction with its label.
        reason: Why it was aborted.
        previous: The pair before it, if that is known.
        kept: Pair whose label it was, if it is not that of ``pair``.
    """
    match known:
        case KnownEnd.NONE:
            state = ProducerPhase.EMPTY
        case KnownEnd.OPEN:
            state = ProducerPhase.OPEN
        case KnownEnd.COMMITTED:
            state = ProducerPhase.COMMITTED
        case KnownEnd.ABORTED if reason == UNACKNOWLEDGED:
            state = ProducerPhase.EMPTY
        case KnownEnd.ABORTED:
            state = ProducerPhase.ABORTED if reason == ABORTED_BY_PRODUCER else ProducerPhase.LOST
        case _:
            assert_never(known)
    return ProducerState(pair, state, previous, kept)
