"""Spark's Python workers collect garbage after each call; what stays for good need not be looked at each time."""

from __future__ import annotations

import gc
import sys

from rollbridge.spark.workers import is_worker

_modules = 0


def keep_what_stays() -> None:
    """Leave out what is there from later collections, if modules have been loaded since the last time.

    Modules are the bulk of it: some hundred thousand objects, which are looked at in 40 ms after each call otherwise.
    Does nothing outside of Spark's workers.
    """
    global _modules
    if is_worker() and len(sys.modules) != _modules:
        _modules = len(sys.modules)
        gc.freeze()
