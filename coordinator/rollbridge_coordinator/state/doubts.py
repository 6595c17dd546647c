"""Rounds whose outcome nobody knows, and the transaction that is at fault if it is always the same. Pure.

A lost connection or a time-out in the middle of a round ends a leader's term: the next one takes the transactional ids,
which ends what was open one way or the other, and reads in the commit log which it was. If it was not committed, the
round is done again. Should one transaction provoke this, by what is in it, no term would get past it. So the
transactions of such a round are merged one by one; before one of them is tried, something harmless is appended to the
same topics, and taken back, to see that it is not the brokers; and one that has had no known outcome by itself several
times in a row is refused, by a leader that has read in the log that it was not committed.

What is known here outlives the terms of one process, and is forgotten with it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

from rollbridge.model.buffered import BufferedTransaction

UNKNOWN_MAX: Final = 3
"""How often in a row a transaction may have no known outcome in a round of its own."""


class Doubts:
    """What is known of rounds without a known outcome. Not thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}
        self._round: tuple[bytes, ...] = ()
        self._suspect: bytes | None = None

    def begin(self, transactions: Sequence[BufferedTransaction], *, together: bool = False) -> None:
        """A round is begun.

        Args:
            transactions: Those of the round.
            together: Whether they can not be merged one by one; the largest is suspected then.
        """
        self._round = tuple(item.id for item in transactions)
        self._suspect = None
        if len(transactions) == 1:
            self._suspect = transactions[0].id
        elif transactions and together:
            self._suspect = max(transactions, key=lambda item: item.bytes).id

    def end(self) -> None:
        """The outcome of the round is known: it was committed, refused, or never begun."""
        self._round, self._suspect = (), None

    def note_unknown(self) -> None:
        """The term has ended, and with it the round that was under way, if any; nobody knows how."""
        for transaction in self._round:
            self._counts.setdefault(transaction, 0)
        if self._suspect is not None:
            self._counts[self._suspect] += 1
        self.end()

    def keep(self, known: Container[bytes]) -> None:
        """Forget all others: they have an outcome by now."""
        self._counts = {item: count for item, count in self._counts.items() if item in known}

    def forget(self, transaction: bytes) -> None:
        """It has an outcome."""
        self._counts.pop(transaction, None)

    def __bool__(self) -> bool:
        return bool(self._counts)

    def is_suspect(self, transaction: bytes) -> bool:
        """Whether it was in a round without a known outcome, so that it is merged alone."""
        return transaction in self._counts

    def fault_of(self, transaction: BufferedTransaction) -> str | None:
        """Why it is refused now; None if it is not."""
        count = self._counts.get(transaction.id, 0)
        if count < UNKNOWN_MAX:
            return None
        return (
            f"its merge had no known outcome {count} times in a row, while the brokers took other records, and it was "
            "not committed"
        )
