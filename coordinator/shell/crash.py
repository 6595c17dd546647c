"""Crash points for tests: the process kills itself before or after a named effect.

``ROLLBRIDGE_CRASH_AT=procedure/Effect:before|after[:n]`` dies at the n-th (default first) such effect, for example
``finish_roll/Seal:after:2``. The procedure is any one of those under way.
"""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final, Self

from bridge.errors import ConfigError

logger = logging.getLogger(__name__)

VARIABLE: Final = "ROLLBRIDGE_CRASH_AT"
_FORM = re.compile(r"(\w+)/(\w+):(before|after)(?::([1-9]\d*))?")


@dataclass(slots=True)
class CrashPoint:
    """Where to die; ``left`` counts down."""

    procedure: str
    effect: str
    moment: str
    left: int

    @classmethod
    def from_environment(cls) -> Self | None:
        """The crash point that the environment asks for.

        Raises:
            ConfigError: it is malformed.
        """
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        match = _FORM.fullmatch(text)
        if not match:
            raise ConfigError(f"{VARIABLE}={text!r}: procedure/Effect:before|after[:n] is expected")
        procedure, effect, moment, count = match.groups()
        return cls(procedure, effect, moment, int(count or 1))

    def reach(self, procedure: Generator[Any, Any, Any], effect: object, moment: str) -> None:
        """Die if this is the place."""
        if moment != self.moment or type(effect).__name__ != self.effect:
            return
        inner: Any = procedure
        while inner is not None:
            if inner.__name__ == self.procedure:
                self.left -= 1
                if self.left == 0:
                    logger.warning("dying %s %s/%s as asked", moment, self.procedure, self.effect)
                    os.kill(os.getpid(), signal.SIGKILL)
                return
            inner = inner.gi_yieldfrom
