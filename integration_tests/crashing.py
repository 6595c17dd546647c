"""A coordinator that kills or stops itself, or has other constants: ``python crashing.py ARGUMENTS``.

The coordinator's interpreter tells a hook of each effect; this file is that hook and the way to inject it, so the
product knows nothing of it. Variables of the environment say where, and with what:

``CRASH_AT=procedure/Effect:before|fenced|after[:n]``
    dies by SIGKILL at the n-th (default first) such effect, for example ``finish_roll/Seal:after:2``. The procedure is
    any one of those under way. ``fenced`` is the moment between the last look at the fence and the request, of the
    effects that Kafka fences nobody from.
``STOP_AT``
    takes the same; the process stops itself with SIGSTOP there, until somebody sends SIGCONT.
``FORGET_AFTER_MS``
    is the age at which sessions are forgotten in which nothing is open, and of whose clients nothing is remembered.
``CONSTANT_BOOKKEEPING_MS=200``
    is a number in place of the constant ``bookkeeping_ms`` of a leader's settings; likewise of the others.

It imports nothing but the product, since containers get this one file.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from rollbridge.base.effects import AnyEffect, Steps
from rollbridge.base.options import constants_of
from rollbridge_coordinator.__main__ import main
from rollbridge_coordinator.core.interpreter import Moment
from rollbridge_coordinator.core.settings import LeaderSettings, ScalingSettings, SnapshotSettings
from rollbridge_coordinator.history import sessions

logger = logging.getLogger("crashing")

CRASH_AT: Final = "CRASH_AT"
STOP_AT: Final = "STOP_AT"
FORGET_AFTER_MS: Final = "FORGET_AFTER_MS"
CONSTANT: Final = "CONSTANT_"
PROGRAM: Final = str(Path(__file__).resolve())
"""What is run in place of ``-m rollbridge_coordinator``."""
_SIGNALS: Final = {CRASH_AT: signal.SIGKILL, STOP_AT: signal.SIGSTOP}
_SETTINGS: Final = (LeaderSettings, SnapshotSettings, ScalingSettings)
_FORM: Final = re.compile(r"(\w+)/(\w+):(before|fenced|after)(?::([1-9]\d*))?")


@dataclass(slots=True)
class CrashPoint:
    """Where to die or to stop; ``left`` counts down."""

    procedure: str
    effect: str
    moment: str
    left: int
    signal: signal.Signals = signal.SIGKILL

    @classmethod
    def named_in(cls, environment: Mapping[str, str]) -> Self | None:
        """Return the point that the environment names, if it names one.

        Raises:
            ValueError: it is malformed.
        """
        for variable, sent in _SIGNALS.items():
            text = environment.get(variable)
            if not text:
                continue
            match = _FORM.fullmatch(text)
            if not match:
                raise ValueError(f"{variable}={text!r}: procedure/Effect:before|fenced|after[:n] is expected")
            procedure, effect, moment, count = match.groups()
            return cls(procedure, effect, moment, int(count or 1), sent)
        return None

    def __call__(self, procedure: Steps[Any], effect: AnyEffect, moment: Moment) -> None:
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


def is_crashing(environment: Mapping[str, str]) -> bool:
    """Whether a coordinator with this environment is to be run by this file."""
    return any(name in (*_SIGNALS, FORGET_AFTER_MS) or name.startswith(CONSTANT) for name in environment)


def program(environment: Mapping[str, str]) -> list[str]:
    """Return what Python is to run as a coordinator with this environment."""
    return [PROGRAM] if is_crashing(environment) else ["-m", "rollbridge_coordinator"]


def forget_early(environment: Mapping[str, str]) -> None:
    """Have sessions forgotten as the environment says."""
    if FORGET_AFTER_MS in environment:
        vars(sessions).update(KEPT_MS=int(environment[FORGET_AFTER_MS]), CHECK_MS=1)


def set_constants(environment: Mapping[str, str]) -> None:
    """Replace constants as the environment says."""
    for name in (name for name in environment if name.startswith(CONSTANT)):
        constant = name.removeprefix(CONSTANT).lower()
        (kind,) = (kind for kind in _SETTINGS if constant in constants_of(kind))
        setattr(kind, constant, int(environment[name]))


if __name__ == "__main__":
    set_constants(os.environ)
    forget_early(os.environ)
    main(sys.argv[1:], obj=CrashPoint.named_in(os.environ))
