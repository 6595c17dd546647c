"""Crash points for tests: the driver dies before, inside or after the commit of a micro-batch.

Inside is when the transaction is committed, and neither Spark's checkpoint nor the session's record says so.
``ROLLBRIDGE_SPARK_CRASH_AT=before-commit|inside-commit|after-commit[:n]`` kills the JVM of the driver, and this process
with it, at the n-th micro-batch (default 0).
"""

from __future__ import annotations

import os
import re
import signal
from typing import Final

import psutil

from bridge.errors import ConfigError

VARIABLE: Final = "ROLLBRIDGE_SPARK_CRASH_AT"
_FORM: Final = re.compile(r"((?:before|inside|after)-commit)(?::([0-9]+))?")


def reach(point: str, batch: int) -> None:
    """Die if this is the place that the environment names.

    Raises:
        ConfigError: what it names is malformed.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return
    match = _FORM.fullmatch(text)
    if not match:
        raise ConfigError(f"{VARIABLE}={text!r}: before-commit, inside-commit or after-commit, and :n is expected")
    if match[1] == point and int(match[2] or 0) == batch:
        for parent in psutil.Process().parents():
            if parent.name() == "java":
                parent.kill()
                parent.wait()
                break
        os.kill(os.getpid(), signal.SIGKILL)
