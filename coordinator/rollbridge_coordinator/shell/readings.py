"""Readings: what a leader's threads know besides its state, taken once a second for its metrics.

Nothing here asks anybody: the tail knows where the buffers ended at its last fetch, the interpreter how long effects
took. All open transactions are looked at, and rarely where there are very many (:class:`.Survey`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rollbridge.kafka.tail import Tail
from rollbridge.model.metrics import Sample
from rollbridge_coordinator.state.families import leader_samples
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.metrics import (
    BufferSizes,
    EffectTimes,
    LeaderView,
    Survey,
    Takeovers,
    survey,
)

UNHEARD_S: Final = 2.0
"""Silence of a partition from which on it is told; brokers with nothing new say so after half a second."""


class Readings:
    """Readings of one term of a leader; used by its thread only."""

    def __init__(self, group: GroupState, tail: Tail, times: EffectTimes, takeovers: Takeovers) -> None:
        """Begin; all of these go on changing."""
        self._group = group
        self._tail = tail
        self._times = times
        self._takeovers = takeovers
        self._sizes = BufferSizes()
        self._survey: Survey | None = None

    def samples(self, now_ms: int) -> Iterator[Sample]:
        """Return the leader's metrics as of now, by its clock."""
        return leader_samples(self._group, self.view(now_ms))

    def view(self, now_ms: int) -> LeaderView:
        """Return what there is to know besides the leader's state."""
        group, fold = self._group, self._group.fold
        partitions = group.partitions()
        positions = {partition: fold.positions.get(partition, 0) for partition in partitions}
        seen = self._survey
        if seen is None or not seen.at_ms <= now_ms < seen.due_ms:
            seen = self._survey = survey(fold.open.values(), positions, now_ms)
        self._sizes.keep(partitions)
        for partition, position in positions.items():
            self._sizes.note(partition, position, self._tail.read_bytes.get(partition, 0))
        held = {item: self._sizes.behind(item, seen.needed.get(item, offset)) for item, offset in positions.items()}
        return LeaderView(
            now_ms=now_ms,
            survey=seen,
            ends=self._tail.ends(),
            appended_ms=self._tail.appended_ms,
            unheard_ms={
                partition: round(1000 * seconds)
                for partition, seconds in self._tail.unheard_s().items()
                if seconds >= UNHEARD_S
            },
            held_bytes=held,
            times=self._times,
            takeovers=self._takeovers,
        )
