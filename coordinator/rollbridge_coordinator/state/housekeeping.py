"""What a leader knows of its housekeeping: when it was done last, what rests, and where logs begin since. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Self

from rollbridge.model.buffered import Partition

REST_FIRST_MS: Final = 1_000
REST_MAX_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class Rest:
    """What was refused is left alone for a while, each time for twice as long as the last time."""

    length_ms: int
    until_ms: int

    @classmethod
    def after(cls, last: Rest | None, now_ms: int) -> Self:
        """The rest that follows the last one, if there was one."""
        length_ms = REST_FIRST_MS if last is None else min(2 * last.length_ms, REST_MAX_MS)
        return cls(length_ms, now_ms + length_ms)

    def is_over(self, now_ms: int) -> bool:
        """Whether it is to be tried again; so it is if the clock was set back."""
        return not self.until_ms - self.length_ms <= now_ms < self.until_ms


@dataclass(slots=True)
class Housekeeping:
    """State of one leader's housekeeping; a new leader begins with an empty one and loses nothing by that.

    Attributes:
        starts: Where buffer partitions are known to begin.
        done_ms: When each kind of work was done last, by name.
        rests: What was refused and has not been done since.
    """

    starts: dict[Partition, int] = field(default_factory=dict)
    done_ms: dict[str, int] = field(default_factory=dict)
    rests: dict[str, Rest] = field(default_factory=dict)

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
        return work in self.rests and not self.rests[work].is_over(now_ms)

    def rest(self, work: str, now_ms: int) -> int:
        """This work was refused; returns for how many ms it is left alone."""
        self.rests[work] = Rest.after(self.rests.get(work), now_ms)
        return self.rests[work].length_ms

    def rested(self, work: str) -> None:
        """This work was done."""
        self.rests.pop(work, None)
