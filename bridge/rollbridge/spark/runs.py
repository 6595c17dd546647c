"""Where records of transactions stand in a segment, and in the commit log."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollbridge.spark.source_records import Flags, Longs


@dataclass(frozen=True, slots=True)
class Runs:
    """Where records of transactions stand in a segment, in order: runs of offsets, and places in the commit log."""

    start: Longs
    end: Longs
    position: Longs

    def positions(self, offsets: Longs) -> tuple[Longs, Flags]:
        """The place in the commit log of each record, and which of them have none."""
        if not len(self.start):
            return np.zeros_like(offsets), np.ones(len(offsets), np.bool_)
        place = np.searchsorted(self.start, offsets, side="right") - 1
        missing = (place < 0) | (offsets >= self.end[place])
        return np.where(missing, 0, self.position[place]), missing
