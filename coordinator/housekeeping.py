"""What a leader knows of its housekeeping: when it was done last, and where logs begin since. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from bridge.model.buffered import Partition

REST_FIRST_MS: Final = 1_000
REST_MAX_MS: Final = 60_000


@dataclass(slots=True)
class Housekeeping:
    """State of one leader's housekeeping; a new leader begins with an empty one and loses nothing by that.

    Attributes:
        starts: Where buffer partitions are known to begin.
        done_ms: When each kind of work was done last, by name.
        rests: For what was refused: for how long it is left alone, and until when.
    """

    starts: dict[Partition, int] = field(default_factory=dict)
    done_ms: dict[str, int] = field(default_factory=dict)
    rests: dict[str, tuple[int, int]] = field(default_factory=dict)

    def is_due(self, work: str, now_ms: int, every_ms: int, *, at_once: bool = True) -> bool:
        """Whether ``every_ms`` have passed since this work was done last; if so, it counts as done now.

        A clock that was set back makes it due as well. What a new leader does not do ``at_once`` counts as done when it
        is first asked for.
        """
        done_ms = self.done_ms.setdefault(work, now_ms) if not at_once else self.done_ms.get(work)
        if done_ms is not None and 0 <= now_ms - done_ms < every_ms:
            return False
        self.done_ms[work] = now_ms
        return True

    def is_resting(self, work: str, now_ms: int) -> bool:
        """Whether this work was refused a while ago and is left alone."""
        if work not in self.rests:
            return False
        length, until_ms = self.rests[work]
        return until_ms - length <= now_ms < until_ms

    def rest(self, work: str, now_ms: int) -> int:
        """This work was refused; returns for how many ms it is left alone, twice as long as the last time."""
        length = min(2 * self.rests[work][0], REST_MAX_MS) if work in self.rests else REST_FIRST_MS
        self.rests[work] = length, now_ms + length
        return length

    def rested(self, work: str) -> None:
        """This work was done."""
        self.rests.pop(work, None)
