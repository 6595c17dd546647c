"""The outbox of a transaction: small frames wait there for a moment, and leave as one message.

A small transaction is then a single message, with its begin, its records and its commit: a third of the work for the
producer, the broker and the leader, and one request where there would be two or three.
"""

from __future__ import annotations

import time
from typing import Final

from rollbridge.model.frames import BUNDLE_BYTES_MAX, BUNDLED_FRAME_BYTES, FrameKind, pack_bundle

HOLD_S: Final = 0.1
"""How long frames may wait in an outbox, to within the interval of housekeeping."""

Frame = tuple[bytes, bytes]
"""Packed header and value."""

_KIND: Final = 3
"""Where the kind stands in a packed header."""


class Outbox:
    """Frames for one buffer partition, in order. Not thread-safe: whoever owns it holds a lock.

    Attributes:
        since_s: When the oldest frame came (monotonic seconds); 0 if there is none.
    """

    __slots__ = ("_bytes", "_frames", "since_s")

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._bytes = 0
        self.since_s = 0.0

    def __bool__(self) -> bool:
        return bool(self._frames)

    def has_room(self, value: bytes) -> bool:
        """Whether a frame with this value can wait here together with the others."""
        return self._bytes + len(value) + BUNDLED_FRAME_BYTES <= BUNDLE_BYTES_MAX

    def add(self, key: bytes, value: bytes) -> None:
        """Let a frame wait."""
        if not self._frames:
            self.since_s = time.monotonic()
        self._frames.append((key, value))
        self._bytes += len(value) + BUNDLED_FRAME_BYTES

    def packed(self, *more: Frame, data: bool = True) -> Frame:
        """One frame that means what all those here do, and then ``more``; the outbox stays as it is.

        ``data`` says whether DATA frames are among them; an abort has no use for them.
        """
        frames = self._frames if data else [frame for frame in self._frames if frame[0][_KIND] != FrameKind.DATA]
        together = [*frames, *more]
        return together[0] if len(together) == 1 else pack_bundle(together)

    def clear(self) -> None:
        """Forget the frames: they have been sent, or nobody needs them."""
        if self._frames:
            self._frames = []
            self._bytes = 0
            self.since_s = 0.0
