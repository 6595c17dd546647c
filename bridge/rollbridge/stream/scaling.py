"""Scaling policies: the rate that each segment of a stream is meant to take, and how many segments there may be. Pure.

What a leader makes of one is in ``rollbridge_coordinator.streams.scaling_policy``. Source: Pravega's ``ScalingPolicy``;
here the number of segments has an upper limit as well, because each is a topic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

from rollbridge.base.errors import InvalidRequestError
from rollbridge.base.mapper import NodeRecord
from rollbridge.stream.keyspace import SEGMENTS_MAX
from rollbridge.stream.names import StreamName

RATE_MAX: Final = 10**12
"""Highest target, in records or bytes per second; beyond it is a mistake."""
SEGMENTS_MAX_DEFAULT: Final = 32
"""Most segments of a stream whose policy does not say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPolicy:
    """Policy by which a stream follows its load; without a rate it does not.

    Attributes:
        events_per_second: Target rate of records for one segment; 0 if bytes are given.
        bytes_per_second: Target rate of bytes, as stored by one replica; 0 if records are given.
        min_segments: Fewest segments of the stream.
        max_segments: Most segments of the stream.
    """

    events_per_second: int = 0
    bytes_per_second: int = 0
    min_segments: int = 1
    max_segments: int = SEGMENTS_MAX_DEFAULT

    @property
    def is_fixed(self) -> bool:
        """Return whether the stream is scaled by request only."""
        return not self.events_per_second and not self.bytes_per_second

    @property
    def target(self) -> int:
        """The rate that one segment is meant to take, in :attr:`unit` per second."""
        return self.events_per_second or self.bytes_per_second

    @property
    def unit(self) -> str:
        """Return the unit of the rate: ``events`` or ``bytes``."""
        return "events" if self.events_per_second else "bytes"

    def check(self) -> None:
        """Raise InvalidRequestError, which names all faults, unless it makes sense."""
        faults = [] if self == FIXED else list(self._faults())
        if faults:
            raise InvalidRequestError(f"no scaling policy: {'; '.join(faults)}; nothing was written")

    def _faults(self) -> Iterator[str]:
        for name in ("events_per_second", "bytes_per_second"):
            value = getattr(self, name)
            if not 0 <= value <= RATE_MAX:
                yield f"{name} is from 1 to {RATE_MAX:,}, not {value:,}"
        if bool(self.events_per_second) == bool(self.bytes_per_second):
            yield "give one of events_per_second and bytes_per_second"
        for name in ("min_segments", "max_segments"):
            value = getattr(self, name)
            if not 1 <= value <= SEGMENTS_MAX:
                yield f"{name} is from 1 to {SEGMENTS_MAX:,}, not {value:,}"
        if self.min_segments > self.max_segments:
            yield f"min_segments, {self.min_segments:,}, is above max_segments, {self.max_segments:,}"

    def __str__(self) -> str:
        if self.is_fixed:
            return "by request only"
        unit = "events/s" if self.events_per_second else "bytes/s"
        return f"at {self.target:,} {unit} a segment, from {self.min_segments:,} to {self.max_segments:,} segments"


FIXED: Final = ScalingPolicy()
"""No scaling by load."""


@dataclass(frozen=True, slots=True)
class ScalingWait:
    """Why a stream is not scaled although its policy asks for it.

    Attributes:
        stream: Its name.
        reason: What is to be done, and what it waits for.
        since_ms: Since when, ms since 1970.
    """

    stream: StreamName
    reason: str
    since_ms: int


@dataclass(frozen=True, slots=True)
class ScalingWaits(NodeRecord):
    """The streams of a group that wait to be scaled, by their names."""

    SCHEMA: ClassVar = "scaling_waits"

    waits: tuple[ScalingWait, ...] = ()
