"""Contention: how a writer behaves on a segment on which others write too.

Whoever appends and loses has made everybody after it wait for its abort, so after a loss a writer waits for a random
while, and looks before it appends: what is refused then costs one fetch, and no native transaction. The while grows
with every loss after an append, and shrinks with every round in which nobody else was met.

A winner is a round trip ahead of those who have to learn of its record first, so without more it would win for ever.
Therefore a writer that was refused by looking a few times in a row appends all the same; the winner meets that record,
and waits for a while, too.
"""

from __future__ import annotations

from typing import Final

_FIRST_S: Final = 0.001
_SHARE_OF_NEW: Final = 0.2
_ROUNDS_MAX: Final = 16.0
_ROUNDS_AFTER_MEETING: Final = 4.0
_ROUNDS_MIN: Final = 0.5
_LOOKS_IN_A_ROW_MAX: Final = 3


class Contention:
    """What a writer has met on one segment; times in seconds. Not thread-safe."""

    def __init__(self) -> None:
        self._round_s = _FIRST_S
        self._rounds = 0.0
        self._refused_looks = 0

    def pause_s(self, chance: float) -> float:
        """How long to wait before the next round; ``chance`` is a random number in [0, 1)."""
        return self._rounds * self._round_s * chance

    def looks_first(self) -> bool:
        """Whether to look before appending."""
        return self._rounds > 0 and self._refused_looks < _LOOKS_IN_A_ROW_MAX

    def refused_by_look(self) -> None:
        """Somebody else was faster, and nothing was appended."""
        self._refused_looks += 1

    def lost(self) -> None:
        """Somebody else was faster, and what was appended is aborted."""
        self._refused_looks = 0
        self._rounds = min(max(self._rounds * 2, 1.0), _ROUNDS_MAX)

    def won(self, took_s: float, met_others: bool) -> None:
        """A round was committed."""
        self._refused_looks = 0
        self._round_s += (took_s - self._round_s) * _SHARE_OF_NEW
        if met_others:
            self._rounds = max(self._rounds, _ROUNDS_AFTER_MEETING)
        else:
            self._rounds = self._rounds / 2 if self._rounds > _ROUNDS_MIN else 0.0
