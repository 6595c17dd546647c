"""Crash points for tests: the driver dies, or stands still, before, inside or after the commit of a micro-batch.

Inside is when the transaction is committed, and neither Spark's checkpoint nor the session's record says so.
``ROLLBRIDGE_SPARK_CRASH_AT=before-commit|inside-commit|after-commit[:n]`` kills the JVM of the driver, and this process
with it, at the n-th micro-batch (default 0); ``ROLLBRIDGE_SPARK_PAUSE_AT`` stops this process there instead, as SIGSTOP
does, and a SIGCONT to the number in the file ``ROLLBRIDGE_SPARK_PAUSED`` lets it go on.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Final

import psutil

from rollbridge.errors import ConfigError

CRASH: Final = "ROLLBRIDGE_SPARK_CRASH_AT"
PAUSE: Final = "ROLLBRIDGE_SPARK_PAUSE_AT"
PAUSED: Final = "ROLLBRIDGE_SPARK_PAUSED"
_FORM: Final = re.compile(r"((?:before|inside|after)-commit)(?::([0-9]+))?")


def reach(point: str, batch: int) -> None:
    """Die or stand still if this is the place that the environment names.

    Raises:
        ConfigError: what it names is malformed.
    """
    if _is_named(PAUSE, point, batch):
        Path(os.environ[PAUSED]).write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    if _is_named(CRASH, point, batch):
        for parent in psutil.Process().parents():
            if parent.name() == "java":
                parent.kill()
                parent.wait()
                break
        os.kill(os.getpid(), signal.SIGKILL)


def _is_named(variable: str, point: str, batch: int) -> bool:
    text = os.environ.get(variable)
    if not text:
        return False
    match = _FORM.fullmatch(text)
    if not match:
        raise ConfigError(f"{variable}={text!r}: before-commit, inside-commit or after-commit, and :n is expected")
    return match[1] == point and int(match[2] or 0) == batch
