"""Wrong wall clocks for single processes; nothing but the wall clock changes.

For Python, the clock can be set from outside while the process runs. libfaketime does this for any program, but Python
3.11 sleeps until an absolute time, which it makes wrong; so it is for servers in Java.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

OFFSET_VARIABLE: Final = "CLOCK_OFFSET"
"""Environment variable with the file that says by how many seconds the clock is ahead."""

SITECUSTOMIZE: Final = f"""
import os, time
_real = time.time
_file = os.environ["{OFFSET_VARIABLE}"]

def _fake():
    with open(_file) as file:
        return _real() + float(file.read())

time.time = _fake
time.time_ns = lambda: int(_fake() * 1e9)
"""
"""Python imports a module ``sitecustomize`` first of all, from wherever it finds one."""


def library() -> Path | None:
    """libfaketime for programs with threads, if this machine has it (Debian: faketime)."""
    return next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


def variables(library: str, offset_s: int) -> dict[str, str]:
    """Environment of a program whose clock is ahead by this much, or behind; ``library`` is where it finds that.

    Waits on the monotonic clock are left alone: what the library would mend about them makes a JVM wait busily.
    """
    return {
        "LD_PRELOAD": library,
        "FAKETIME": f"{offset_s:+d}",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",
    }


class FileClock:
    """The clock of processes of this machine that are started with ``environment``."""

    def __init__(self, folder: Path) -> None:
        self._offset = folder / "offset"
        self.set(0)
        (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
        self.environment: Final = {
            "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
            OFFSET_VARIABLE: str(self._offset),
        }

    def set(self, offset_s: float) -> None:
        """From now on it is ahead of the true time by this much, or behind it."""
        fresh = self._offset.with_suffix(".new")
        fresh.write_text(str(offset_s))
        fresh.replace(self._offset)  # read at every look at the clock, so it must never be seen empty
