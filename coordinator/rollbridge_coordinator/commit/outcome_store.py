"""The preserver: a group's remembered outcomes, so that an end can be requested again.

A round's outcomes are *appended* to a draft, which is then *flushed*: one record for each client name, for all of its
transactions in the round. The draft is adopted once the native transaction that holds these records, and the outcomes
themselves, is committed. Pure: the caller writes the records.

Source: PIP-255, ``OutcomeStore`` with ``append`` and ``flush``. Differs: a flush is atomic with the
outcome, and a horizon tells unknown transactions from forgotten ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from operator import attrgetter
from typing import Final

from rollbridge.base.ids import TransactionId
from rollbridge.commitlog.outcomes import GONE, Terminated, decode_terminated, encode_terminated
from rollbridge.errors import CorruptDataError

KeyValue = tuple[bytes, bytes | None]
"""Key and value of a message of the compacted topic; None is a tombstone."""

RECORD_BYTES_MAX: Final = 4 * 1024 * 1024
"""Limit of one client's record: with long labels or reasons it holds fewer transactions."""
ITEMS_HARMLESS: Final = 400
"""Transactions that fit into a record, with the longest label and reason."""
_HOUR_MS: Final = 3_600_000


class Absence(Enum):
    """Reason why a transaction is not remembered."""

    UNKNOWN = "no outcome of it was ever logged"
    FORGOTTEN = "it may have ended so long ago that it has been forgotten"


@dataclass(frozen=True, slots=True)
class ClientHistory:
    """Outcomes of one client: its latest terminated transactions, each with its encoding, oldest first."""

    items: tuple[tuple[Terminated, bytes], ...] = ()
    forgotten_below: int = 0

    def encode(self) -> bytes:
        return encode_terminated([raw for _, raw in self.items], self.forgotten_below)


@dataclass(frozen=True, slots=True)
class Draft:
    """Messages to write, and the memory once they are durable; None for a name to remove."""

    records: Sequence[KeyValue]
    histories: Mapping[str, ClientHistory | None]
    gone_below: int
    added: Sequence[tuple[str, Terminated]] = ()
    removed: Sequence[Terminated] = ()
    appended: int = 0


class OutcomeStore:
    """The latest terminated transactions of each client of a group. Not thread-safe.

    Attributes:
        gone_below: The horizon of clients without remembered transactions.
    """

    def __init__(self, count: int, hours: int, total: int) -> None:
        """Begin without memory.

        Args:
            count: Transactions remembered of each client, at least 1.
            hours: Time for which they are, unless a transaction specifies its own.
            total: Transactions remembered of all clients together; beyond it the oldest are forgotten.
        """
        self._count = count
        self._total = total
        self._default_ms = hours * _HOUR_MS
        self._histories: dict[str, ClientHistory] = {}
        self._index: dict[bytes, tuple[str, Terminated]] = {}
        self.gone_below = 0
        self._is_given: Callable[[bytes], bool] = lambda _: True

    def believe(self, is_given: Callable[[bytes], bool], bound: int) -> None:
        """Ignore ids that were never given out when raising the horizon, and lower a horizon that they have raised.

        Args:
            is_given: Tells ids that were given out; asked again each time.
            bound: Value above the counters of all that were given out.
        """
        self._is_given = is_given
        self.gone_below = min(self.gone_below, bound)
        self._histories = {
            client: item if item.forgotten_below <= bound else replace(item, forgotten_below=bound)
            for client, item in self._histories.items()
        }

    def __len__(self) -> int:
        return len(self._histories)

    @property
    def is_crowded(self) -> bool:
        """Return True if more is remembered than allowed: :meth:`expire` then forgets the oldest tenth."""
        return len(self._index) > self._total

    def restore(self, records: Mapping[bytes, bytes]) -> list[str]:
        """Load the compacted topic: the latest value of each key.

        Returns:
            Faults: unreadable records are left out, and :attr:`gone_below` must be raised.
        """
        faults = []
        for key, value in records.items():
            try:
                client = key.decode()
                found, forgotten_below = decode_terminated(value)
            except (UnicodeDecodeError, CorruptDataError) as fault:
                faults.append(f"client {key!r}: {fault}")
                continue
            if client == GONE:
                self.gone_below = max(self.gone_below, forgotten_below)
                continue
            self._histories[client] = ClientHistory(tuple((item, item.encode()) for item in found), forgotten_below)
            self._index.update((item.transaction.bytes, (client, item)) for item in found)
        return faults

    def flush(self, appended: Sequence[tuple[str, Terminated]]) -> Draft:
        """Return the draft of a round: one record for each client.

        Outcomes beyond the limit of a client are not even encoded.

        Args:
            appended: Client name and transaction, in the order of the commit log.
        """
        by_client: dict[str, list[Terminated]] = {}
        for client, item in appended:
            known = by_client.get(client)
            if known is None:
                by_client[client] = [item]
            else:
                known.append(item)
        histories: dict[str, ClientHistory | None] = {}
        records: list[KeyValue] = []
        added: list[tuple[str, Terminated]] = []
        removed: list[Terminated] = []
        for client, fresh in by_client.items():
            before = self._histories.get(client, ClientHistory())
            kept = [item for item in fresh if item.retain_ms != 0]
            unkept = [item for item in fresh if item.retain_ms == 0]
            if len(kept) > self._count:
                unkept += kept[: -self._count]
                del kept[: -self._count]
            items = (*before.items, *((item, item.encode()) for item in kept))
            over = [item for item, _ in items[: _excess(items, self._count)]]
            after = ClientHistory(items[len(over) :], self._raised(before.forgotten_below, [*over, *unkept]))
            histories[client] = after
            records.append((client.encode(), after.encode()))
            added += [(client, item) for item in kept]
            removed += over
        return Draft(records, histories, self.gone_below, added, removed, len(appended))

    def raise_horizon(self, gone_below: int) -> Draft:
        """Return the draft that records that transactions with a lower counter may have been forgotten."""
        return Draft([_horizon(gone_below)], {}, max(self.gone_below, gone_below))

    def expire(self, now_ms: int) -> Draft | None:
        """Return the draft that forgets expired outcomes, with tombstones for empty names; None if none is due."""
        changed: dict[str, ClientHistory | None] = {}
        removed: list[Terminated] = []
        gone_below = self.gone_below
        before_ms = self._crowded_before_ms()
        for client, history in self._histories.items():
            due = [
                item
                for item, _ in history.items
                if item.decided_ms < before_ms or item.forgotten_at_ms(self._default_ms) <= now_ms
            ]
            if due or not history.items:
                left = tuple(entry for entry in history.items if entry[0] not in due)
                horizon = self._raised(history.forgotten_below, due)
                changed[client] = ClientHistory(left, horizon) if left else None
                gone_below = gone_below if left else max(gone_below, horizon)
                removed += due
        if not changed:
            return None
        records: list[KeyValue] = [] if gone_below == self.gone_below else [_horizon(gone_below)]
        records += [
            (client.encode(), None if history is None else history.encode()) for client, history in changed.items()
        ]
        return Draft(records, changed, gone_below, removed=removed)

    def _raised(self, horizon: int, forgotten: Iterable[Terminated]) -> int:
        for transaction in sorted((item.transaction for item in forgotten), key=_counter, reverse=True):
            if transaction.counter < horizon:
                break
            if self._is_given(transaction.bytes):
                return transaction.counter + 1
        return horizon

    def _crowded_before_ms(self) -> int:
        """Return the time before which outcomes are forgotten if there are too many, a tenth or slightly more."""
        if not self.is_crowded:
            return 0
        over = len(self._index) - self._total + self._total // 10
        return max(heapq.nsmallest(over, (item.decided_ms for _, item in self._index.values()))) + 1

    def adopt(self, draft: Draft) -> None:
        """Adopt a draft that has become durable."""
        for client, history in draft.histories.items():
            if history is None:
                self._histories.pop(client, None)
            else:
                self._histories[client] = history
        self._index.update((item.transaction.bytes, (client, item)) for client, item in draft.added)
        for item in draft.removed:
            self._index.pop(item.transaction.bytes, None)
        self.gone_below = draft.gone_below

    def find(self, transaction: TransactionId, client: str = "") -> tuple[str, Terminated] | Absence:
        """Return a terminated transaction and its client, or the reason why it is not here.

        Args:
            client: Its client, if known: then the horizons of others do not matter.
        """
        found = self._index.get(transaction.bytes)
        if found is not None:
            return found
        of_clients = [self._histories.get(client)] if client else self._histories.values()
        horizon = max((item.forgotten_below for item in of_clients if item is not None), default=0)
        return Absence.FORGOTTEN if transaction.counter < max(horizon, self.gone_below) else Absence.UNKNOWN

    def labelled(self, client: str, label: str) -> Terminated | Absence:
        """Return the client's latest transaction with a label, or the reason why there is none."""
        history = self._histories.get(client, ClientHistory())
        found = next((item for item, _ in reversed(history.items) if item.label == label), None)
        if found is not None:
            return found
        return Absence.FORGOTTEN if history.forgotten_below or self.gone_below else Absence.UNKNOWN

    def committed(self) -> Iterator[Terminated]:
        return (item for _, item in self._index.values() if item.committed)

    def remembers(self, client: str) -> bool:
        return client in self._histories

    def contents(self) -> Mapping[str, tuple[Terminated, ...]]:
        return {client: tuple(item for item, _ in history.items) for client, history in self._histories.items()}


_counter: Final = attrgetter("counter")


def _excess(items: Sequence[tuple[Terminated, bytes]], count: int) -> int:
    """Return how many of the oldest exceed the limits of count and size."""
    excess = max(len(items) - count, 0)
    if len(items) - excess > ITEMS_HARMLESS:
        size = sum(len(raw) for _, raw in items[excess:])
        while size > RECORD_BYTES_MAX:
            size -= len(items[excess][1])
            excess += 1
    return excess


def _horizon(gone_below: int) -> KeyValue:
    return GONE.encode(), encode_terminated((), gone_below)
