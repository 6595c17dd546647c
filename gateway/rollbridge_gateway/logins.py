"""How far a client has authenticated itself to its broker, as far as a gateway that only passes tokens on can tell.

The broker decides. That it has accepted a token does not say that it is content: mechanisms have several tokens, and
OAUTHBEARER refuses by a token, too. So nothing is served before the broker has answered something else.

A client authenticates itself again in the middle of its connection (KIP-368): then nothing that was known of it holds
any more until the broker has said so anew. It has to before its session is over, where the broker gives that an end;
then its next request closes the connection, unless it begins a login.

Source: Kafka's ``SaslServerAuthenticator``, and ``Processor.processCompletedReceives``.
"""

from __future__ import annotations

from enum import Enum
from math import inf


class LoginPhase(Enum):
    """How far it has come."""

    STRANGER = "stranger"
    """It has not tried."""
    EXCHANGING = "exchanging"
    """Tokens are on their way, or the broker has refused the last one."""
    ACCEPTED = "accepted"
    """The broker has accepted a token; perhaps not the last one."""
    CONFIRMED = "confirmed"
    """The broker has answered another request since."""


class Login:
    """The login of one connection. Times are those of one clock that does not go back.

    Attributes:
        phase: How far it has come.
        again: How often it has begun in the middle of the connection.
    """

    __slots__ = ("_over_s", "again", "phase")

    def __init__(self, *, is_needed: bool) -> None:
        self.phase = LoginPhase.STRANGER if is_needed else LoginPhase.CONFIRMED
        self.again = 0
        self._over_s = inf

    @property
    def is_confirmed(self) -> bool:
        """Whether the client is who the broker takes it for."""
        return self.phase is LoginPhase.CONFIRMED

    @property
    def is_accepted(self) -> bool:
        """Whether the broker can be asked if it is content."""
        return self.phase in (LoginPhase.ACCEPTED, LoginPhase.CONFIRMED)

    def begin(self) -> None:
        """The client begins to authenticate itself, for the first time or again."""
        self.again += self.phase is LoginPhase.CONFIRMED
        self.phase = LoginPhase.EXCHANGING

    def answered(self, *, accepted: bool, lifetime_s: float, now_s: float) -> None:
        """The broker has answered a token.

        Args:
            accepted: Whether without an error.
            lifetime_s: For how long the session lasts; 0 for ever.
            now_s: The time.
        """
        self.phase = LoginPhase.ACCEPTED if accepted else LoginPhase.EXCHANGING
        self._over_s = now_s + lifetime_s if lifetime_s > 0 else inf

    def confirmed(self) -> None:
        """The broker has answered another request."""
        self.phase = LoginPhase.CONFIRMED

    def is_over(self, now_s: float) -> bool:
        """Whether the session is over, so that only another login is heard."""
        return now_s >= self._over_s and self.phase is not LoginPhase.EXCHANGING
