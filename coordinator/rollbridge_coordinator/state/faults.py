"""Streams in an error state: their transactions wait, those of all others go on. Pure.

A broker may refuse a topic for good: a permission is missing, it was removed or reconfigured. What waits is tried again
now and then, less and less often, so that the stream leaves this state by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from rollbridge.model.faults import StreamFault
from rollbridge_coordinator.state.housekeeping import Rest

LEADERLESS: Final = "LEADER_NOT_AVAILABLE"
"""Kafka's name of what is wrong with a topic none of whose brokers is there."""
LEADERLESS_S: Final = 3.0
"""How long a segment may have no leader before its stream waits, and all others go on."""
SEAL_TIMEOUT: Final = "seal-timeout"
"""Our name of a seal that took too long; it may work the next time."""


class Faults:
    """The streams of a group that are in an error state, by ``scope/stream``."""

    def __init__(self) -> None:
        self._present: dict[str, StreamFault] = {}
        self._rests: dict[str, Rest] = {}
        self._suspended: set[str] = set()
        self.news: list[str] = []
        """What is worth a line in the log and has not got one yet."""

    def __len__(self) -> int:
        return len(self._present)

    def items(self) -> list[tuple[str, StreamFault]]:
        """All of them, by name."""
        return sorted(self._present.items())

    def get(self, stream: str) -> StreamFault | None:
        """What is wrong with a stream, if anything is."""
        return self._present.get(stream)

    def first_of(self, streams: Collection[str]) -> str | None:
        """One of these streams that is in an error state."""
        return next((name for name in streams if name in self._present), None) if self._present else None

    def note(self, stream: str, fault: StreamFault, now_ms: int) -> bool:
        """A stream has been refused; whether that is new. The next try is twice as far away as the last one was.

        Unless all that it waits for is a broker: this passes by itself, and to look for it costs next to nothing.
        """
        if stream in self._suspended:
            return False
        last = self._rests.get(stream)
        self._rests[stream] = Rest.after(None if fault.code in (LEADERLESS, SEAL_TIMEOUT) else last, now_ms)
        if stream in self._present:
            return False
        self._present[stream] = fault
        if last is None:
            self.news.append(f"stream {stream} is in an error state, its transactions wait: {fault.reason}")
        return True

    def restore(self, stream: str, fault: StreamFault) -> None:
        """An earlier leader has noted it; it is tried again at once."""
        self._present[stream] = fault

    def suspend(self, stream: str, fault: StreamFault) -> None:
        """A stream waits in the middle of a change; it is not tried meanwhile."""
        if stream not in self._suspended:
            self.news.append(f"stream {stream} is suspended, its transactions wait: {fault.reason}")
        self._suspended.add(stream)
        self._rests.pop(stream, None)
        self._present[stream] = fault

    def resume(self, stream: str) -> None:
        """The change is done, or given up."""
        if stream in self._suspended:
            self.news.append(f"stream {stream} is not suspended any more")
        self._suspended.discard(stream)
        self._present.pop(stream, None)

    def due(self, now_ms: int) -> list[str]:
        """The streams that are to be tried again."""
        return [
            name
            for name in self._present
            if name not in self._suspended and (name not in self._rests or self._rests[name].is_over(now_ms))
        ]

    def lift(self, stream: str) -> None:
        """It seems to be well again; what waits is tried."""
        self._present.pop(stream, None)

    def worked(self, streams: Iterable[str]) -> None:
        """Transactions of these streams have been merged."""
        if self._rests:
            for name in streams:
                if self._rests.pop(name, None) is not None:
                    self.news.append(f"stream {name} has left its error state")

    def forget(self, stream: str) -> None:
        """The stream has been deleted."""
        self._suspended.discard(stream)
        self._present.pop(stream, None)
        self._rests.pop(stream, None)
