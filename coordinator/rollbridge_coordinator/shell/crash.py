"""Crash points for tests: the process kills or stops itself before or after a named effect.

``ROLLBRIDGE_CRASH_AT=procedure/Effect:before|fenced|after[:n]`` dies at the n-th (default first) such effect, for
example ``finish_roll/Seal:after:2``. The procedure is any one of those under way. ``fenced`` is the moment between the
last look at the fence and the request, of the effects that Kafka fences nobody from.

``ROLLBRIDGE_STOP_AT`` takes the same; the process stops itself with SIGSTOP there, until somebody sends SIGCONT.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final, Self

from rollbridge.errors import ConfigError

logger = logging.getLogger(__name__)

SIGNALS: Final = {"ROLLBRIDGE_CRASH_AT": signal.SIGKILL, "ROLLBRIDGE_STOP_AT": signal.SIGSTOP}
"""What a process sends itself, by the variable that asks for it."""
_FORM = re.compile(r"(\w+)/(\w+):(before|fenced|after)(?::([1-9]\d*))?")


@dataclass(slots=True)
class CrashPoint:
    """Where to die or to stop; ``left`` counts down."""

    procedure: str
    effect: str
    moment: str
    left: int
    signal: signal.Signals = signal.SIGKILL

    @classmethod
    def from_environment(cls) -> Self | None:
        """The crash point that the environment asks for.

        Raises:
            ConfigError: it is malformed.
        """
        for variable, sent in SIGNALS.items():
            text = os.environ.get(variable)
            if not text:
                continue
            match = _FORM.fullmatch(text)
            if not match:
                raise ConfigError(f"{variable}={text!r}: procedure/Effect:before|fenced|after[:n] is expected")
            procedure, effect, moment, count = match.groups()
            return cls(procedure, effect, moment, int(count or 1), sent)
        return None

    def reach(self, procedure: Generator[Any, Any, Any], effect: object, moment: str) -> None:
        """Die, or stop for a while, if this is the place."""
        if moment != self.moment or type(effect).__name__ != self.effect:
            return
        inner: Any = procedure
        while inner is not None:
            if inner.__name__ == self.procedure:
                self.left -= 1
                if self.left == 0:
                    logger.warning("%s %s %s/%s as asked", self.signal.name, moment, self.procedure, self.effect)
                    # Sent to the process, any of its threads might take it, and this one run on until that wakes up.
                    signal.pthread_kill(threading.get_ident(), self.signal)
                return
            inner = inner.gi_yieldfrom
