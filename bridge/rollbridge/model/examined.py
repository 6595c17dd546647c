"""What is known of the end of a segment: its last committed record, the last one of each key that was seen, and the
last transaction id that a user gave.

Everything below ``end`` has been decided and looked at, so a writer reads no offset twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from rollbridge.model.sn import SN

KEYS_MAX: Final = 50_000
"""Most keys that are remembered of one segment; beyond it, they are collected anew."""


class Seen(NamedTuple):
    """A committed record, as far as conditions look at it."""

    offset: int
    key: bytes | None
    sn: SN


class Examined:
    """A growing window of one segment; not thread-safe.

    Attributes:
        keys_from: From here to ``end``, the last record of each key is known.
        end: Every offset below it is decided.
        last: The last committed record below ``end``; None if there is none at or after ``last_from``.
        last_id: The last transaction id that a user gave a record below ``end``; None if there is none since
            ``last_from``.
        last_from: Where looking for ``last`` and ``last_id`` began.
    """

    def __init__(self, start: int, keys_max: int = KEYS_MAX) -> None:
        self.keys_from = start
        self.last_from = start
        self.end = start
        self.last: SN | None = None
        self.last_id: int | None = None
        self._keys: dict[bytes, SN] = {}
        self._keys_max = keys_max

    def extend(self, start: int, end: int, records: Iterable[Seen]) -> None:
        """Take note of what stands in ``start..end-1``; ``start`` may only leave a gap that was truncated away.

        What stood in a gap nobody knows, so what was known from before it is the last of nothing any more.
        """
        if start > self.end:
            self.last = self.last_id = None
            self._keys.clear()
            self.keys_from = self.last_from = start
        for record in records:
            self.last = record.sn
            if record.sn.transaction_id is not None:
                self.last_id = record.sn.transaction_id
            if record.key is not None:
                self._keys[record.key] = record.sn
        self.end = max(end, self.end)
        if len(self._keys) > self._keys_max:
            self._keys.clear()
            self.keys_from = self.end

    def prepend(self, start: int, records: Iterable[Seen]) -> None:
        """Take note of what stands before the window, from ``start`` on, without a gap."""
        last: SN | None = None
        last_id: int | None = None
        older: dict[bytes, SN] = {}
        for record in records:
            last = record.sn
            if record.sn.transaction_id is not None:
                last_id = record.sn.transaction_id
            if record.key is not None:
                older[record.key] = record.sn
        if self.last is None:
            self.last = last
        if self.last_id is None:
            self.last_id = last_id
        if self.last_from == self.keys_from and len(older) + len(self._keys) <= self._keys_max:
            self._keys = older | self._keys
            self.keys_from = start
        self.last_from = start

    def last_of(self, key: bytes) -> SN | None:
        """SN of the last record with a key between ``keys_from`` and ``end``."""
        return self._keys.get(key)
