"""The wall clock of a Python process, which can be set from outside; nothing but the wall clock changes.

libfaketime would do this for any process, but Python 3.11 sleeps until an absolute time, which it makes wrong.
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
