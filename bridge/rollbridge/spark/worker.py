"""Spark's Python workers: avoid delays of their connection to Spark, and of their garbage collections.

Spark and its worker exchange small packets. Both ends leave Nagle's algorithm on, which holds a small packet back until
the one before is acknowledged, and the other end's kernel delays acknowledgements by 40 ms, to send them with an
answer. A task would wait for that long between its instructions and its rows. The worker's end can avoid both
delays: it acknowledges at once (``TCP_QUICKACK``), and holds nothing back (``TCP_NODELAY``).

Only the connection between Spark and its worker is touched. Spark does not hand it out, but each worker runs
``main(infile, outfile)`` of a module of ``pyspark``, and is inside it whenever our code runs: the connection is that of
its ``infile``. Without such a call nothing is done.

Workers collect garbage after each call; :func:`keep_what_stays` exempts loaded modules.
"""

from __future__ import annotations

import atexit
import gc
import os
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any, Final, Generic, Protocol, TypeVar

from rollbridge.config import ConnectionSettings
from rollbridge.kafka.client import KafkaClient


def is_worker() -> bool:
    """Return True in a Python worker that Spark reuses, which an environment variable of Spark's tells."""
    return "SPARK_REUSE_WORKER" in os.environ


T = TypeVar("T")

_LINUX: Final = sys.platform == "linux"
"""True on Linux, the only system on which a process can ask for immediate acknowledgements."""


class Prompt:
    """Base of objects that Spark sends to a worker ahead of their work; unpickling one ends the delays for the rest."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _acknowledge_at_once(_connection())


def promptly(items: Iterable[T]) -> Iterator[T]:
    """Yield items that Spark sends to this worker, each of them acknowledged at once."""
    connection = _connection()
    _acknowledge_at_once(connection)
    for item in items:
        yield item
        _acknowledge_at_once(connection)  # TCP_QUICKACK does not last: the kernel soon falls back to delays


def _connection() -> int | None:
    """Return the descriptor of this worker's connection to Spark; None outside of Spark's workers."""
    if not _LINUX or not is_worker():
        return None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "main" and str(frame.f_globals.get("__name__")).startswith("pyspark."):
            with suppress(AttributeError, OSError, ValueError):  # closed, or another kind of file in this Spark
                return int(frame.f_locals["infile"].fileno()) if "infile" in frame.f_locals else None
        frame = frame.f_back
    return None


def _acknowledge_at_once(connection: int | None) -> None:
    if connection is None:
        return
    with suppress(OSError):  # closed meanwhile, or no TCP connection
        borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, connection)
        try:
            borrowed.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            borrowed.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        finally:
            borrowed.detach()


# Garbage collection


_modules = 0


def keep_what_stays() -> None:
    """Exempt all present objects from later garbage collections, if modules have been loaded since the last call.

    Most of them belong to modules: some hundred thousand objects, whose collection takes 40 ms after each call of a
    task otherwise. Does nothing outside Spark's workers.
    """
    global _modules
    if is_worker() and len(sys.modules) != _modules:
        _modules = len(sys.modules)
        gc.freeze()


# Connections that outlive a task: Spark reuses its Python processes, and connecting costs more than a small batch.


KEPT_MAX: Final = 4
"""Maximum connections kept by a process, to different clusters or with different credentials; an LRU cache."""


class _Closable(Protocol):
    def close(self) -> None:
        """Disconnect."""


C = TypeVar("C", bound=_Closable)


class Kept(Generic[C]):
    """Cache of connections for later tasks, keyed by servers and credentials, so that none is given to another user."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, C] = OrderedDict()

    def get(self, key: Hashable, connect: Callable[[], C]) -> C:
        """Return the connection under a key, or make it; close the least recently used one beyond the limit."""
        found = self._kept.pop(key, None) or connect()
        self._kept[key] = found
        while len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)[1].close()
        return found

    def close(self) -> None:
        while self._kept:
            self._kept.popitem()[1].close()


_clients: Final[Kept[KafkaClient]] = Kept()
atexit.register(_clients.close)


def kafka_client(connection: ConnectionSettings) -> KafkaClient:
    """Return this process's client of a cluster, which is kept for later tasks."""
    return _clients.get(connection.identity(), lambda: KafkaClient.of(connection))
