"""The clock of a leader: wall time that neither jumps nor runs back while it leads.

Leases are counted from the append times that brokers give to frames. If the wall clock of a leader's machine were set
forward by a day, every lease would seem to have run out. So the wall clock is asked once, and monotonic time counted
on from there.
"""

from __future__ import annotations

import time


class Clock:
    """Counts from the wall time at which it was made."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def now_ms(self) -> int:
        """Milliseconds since 1970."""
        return int((self._offset_s + time.monotonic()) * 1000)

    def wall_ms(self) -> int:
        """What the machine's clock shows by now."""
        return int(time.time() * 1000)
