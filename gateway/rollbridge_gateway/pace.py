"""Whether a connection is let go: its client asks for nothing, sends nothing of what it began, or takes no answers.

Nothing has a timer of its own. The gateway looks at its connections every few seconds and tells each one's
:class:`Pace` what it sees; that remembers since when nothing has moved, and says why the connection is to be closed.

What is in the middle of something has less time than what rests, since what has come of a request takes room from
others, as answers do that nobody takes. It moves if :data:`PIECE_BYTES` of it do, so that a byte a minute is nothing.
Once others wait for their room, a whole request has no more time than one piece of it has otherwise.

Source: Kafka's ``connections.max.idle.ms``; it has no limit for the middle of a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

PIECE_BYTES: Final = 64 << 10
"""What has to come or go within a limit of time."""


FIRST_S: Final = 10.0
"""Seconds for a connection's first request, unless others have less: clients begin with it at once."""


class Closing(Enum):
    """Why a connection is closed."""

    MUTE = "mute"
    """Its first request has not come."""
    IDLE = "idle"
    """It has asked for nothing for long."""
    UNFINISHED = "unfinished"
    """The rest of a request has not come."""
    UNTAKEN = "untaken"
    """It does not take its answers."""
    LOGIN = "login"
    """Its client has not authenticated itself."""
    SESSION = "session"
    """Its client has not authenticated itself again before its session was over."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of time, in seconds.

    Attributes:
        idle_s: For a connection at rest, and for each piece of the answers that are not taken.
        request_s: For a login and for each piece of a request; while others wait for room, for a request, and for each
            piece of the answers.
    """

    idle_s: float
    request_s: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is seen of a connection.

    Attributes:
        requests: Requests that have begun to come so far.
        received: Pieces, of :data:`PIECE_BYTES`, of all that has come so far.
        is_within: Whether a request has begun to come that is not whole.
        taken: Bytes of answers that its socket has taken so far.
        unsent: Bytes of answers that were written and not taken.
        held: Bytes of all answers that are there, these included; others may wait for one before them.
        under_way: Requests that are not answered yet.
        is_stranger: Whether its client has yet to authenticate itself.
    """

    requests: int = 0
    received: int = 0
    is_within: bool = False
    taken: int = 0
    unsent: int = 0
    held: int = 0
    under_way: int = 0
    is_stranger: bool = False


class Pace:
    """What has moved on a connection, and when. Times are those of one clock that does not go back."""

    __slots__ = ("_began_s", "_came", "_came_s", "_limits", "_request_s", "_taken", "_went_s")

    def __init__(self, limits: Limits, now_s: float) -> None:
        """Begin with a connection that was just made."""
        self._limits = limits
        self._began_s = self._came_s = self._went_s = self._request_s = now_s
        self._came = (0, 0)
        self._taken = 0

    def look(
        self, seen: Traffic, now_s: float, *, requests_wait: bool = False, answers_wait: bool = False
    ) -> Closing | None:
        """Take what is seen now; return why the connection is to be closed, None if it is not.

        Args:
            seen: What is seen.
            now_s: The time.
            requests_wait: Whether there is no room for other requests.
            answers_wait: Whether there is no room for answers to others.
        """
        limits, came = self._limits, (seen.requests, seen.received)
        if not seen.is_within or came[0] != self._came[0]:
            self._request_s = now_s
        if came != self._came or (seen.under_way and not seen.is_within):
            self._came, self._came_s = came, now_s  # it rests from the last answer on
        if seen.taken >= self._taken + PIECE_BYTES or (not seen.unsent and seen.held < PIECE_BYTES):
            self._taken, self._went_s = seen.taken, now_s
        is_mute = not seen.requests or (seen.requests == 1 and seen.is_within and not seen.received)
        if is_mute and now_s - self._began_s >= (limits.request_s if requests_wait else min(FIRST_S, limits.request_s)):
            return Closing.MUTE
        if seen.is_stranger and now_s - self._began_s >= limits.request_s:
            return Closing.LOGIN
        if seen.is_within and now_s - (self._request_s if requests_wait else self._came_s) >= limits.request_s:
            return Closing.UNFINISHED
        if answers_wait or seen.unsent:
            limit_s = limits.request_s if answers_wait else limits.idle_s
            if now_s - self._went_s >= limit_s:
                return Closing.UNTAKEN
        if not seen.is_within and not seen.under_way and now_s - self._came_s >= limits.idle_s:
            return Closing.IDLE
        return None
