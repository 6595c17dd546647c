"""Spark and its Python workers send each other small pieces; none need wait until the one before is acknowledged.

Both ends leave Nagle's algorithm on, which keeps a small piece back until then, and the other end's kernel delays an
acknowledgement for 40 ms, in the hope of an answer that it could go with. A task would stand still for that long
between what it is to do and its rows. The worker's end can avoid both delays: it acknowledges at once, and keeps
nothing back.

Only the connection between Spark and its worker is touched. Spark does not hand it out, but each of its workers runs
``main(infile, outfile)`` of a module of ``pyspark``, and is inside of it whenever code of ours runs: the connection is
that of its ``infile``. Where there is no such call nothing is done. The option ``quickAck`` switches it off.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any, Final, TypeVar

# --------------------------------------------------------------------------------------------------------------------
# Whether this process is one of Spark's Python workers, which live on from call to call.


def is_worker() -> bool:
    """Whether Spark calls this process more than once, as it says by a variable of the environment."""
    return "SPARK_REUSE_WORKER" in os.environ


T = TypeVar("T")

_LINUX: Final = sys.platform == "linux"
"""Elsewhere a process cannot ask for acknowledgements."""


class Prompt:
    """Spark sends its objects to a worker before what they are to work on, which need not wait from then on."""

    @property
    def is_prompt(self) -> bool:
        """Whether it is to do so; asked for when its state is there."""
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.is_prompt:
            _acknowledge_at_once(_connection())


def promptly(items: Iterable[T]) -> Iterator[T]:
    """Yield items that Spark sends to this worker, each of them acknowledged at once."""
    connection = _connection()
    _acknowledge_at_once(connection)
    for item in items:
        yield item
        _acknowledge_at_once(connection)  # the kernel soon falls back to delays


def _connection() -> int | None:
    """Return the descriptor of this worker's connection to Spark; None outside of Spark's workers."""
    if not _LINUX or not is_worker():
        return None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "main" and str(frame.f_globals.get("__name__")).startswith("pyspark."):
            with suppress(AttributeError, OSError, ValueError):  # closed, or another Spark has it otherwise
                return int(frame.f_locals["infile"].fileno()) if "infile" in frame.f_locals else None
        frame = frame.f_back
    return None


def _acknowledge_at_once(connection: int | None) -> None:
    if connection is None:
        return
    with suppress(OSError):  # closed meanwhile, or no connection by TCP
        borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, connection)
        try:
            borrowed.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            borrowed.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        finally:
            borrowed.detach()


# --------------------------------------------------------------------------------------------------------------------
# Spark's Python workers collect garbage after each call; what stays for good need not be looked at each time.


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
