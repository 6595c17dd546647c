"""Spark and its Python workers send each other small pieces; none need wait until the one before is acknowledged.

Both ends leave Nagle's algorithm on, which keeps a small piece back until then, and the other end's kernel delays an
acknowledgement for 40 ms, in the hope of an answer that it could go with. A task would stand still for that long
between what it is to do and its rows. The worker's end can avoid both delays: it acknowledges at once, and keeps
nothing back. Spark does not hand out its connections, so all those of the worker are set so, which is right for the
others, too.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Final, TypeVar

T = TypeVar("T")

_LINUX: Final = sys.platform == "linux"
"""Elsewhere a process can not ask for acknowledgements."""
_DESCRIPTORS: Final = "/proc/self/fd"
_REUSED: Final = "SPARK_REUSE_WORKER"
"""Spark sets it for workers that are called more than once."""


class Prompt:
    """Spark sends its objects to a worker before what they are to work on, which need not wait from then on."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        be_prompt()


def be_prompt() -> None:
    """Acknowledge at once what has come, and keep back nothing from now on; nothing outside of Spark's workers."""
    _set(_connections(), nodelay=True)


def promptly(items: Iterable[T]) -> Iterator[T]:
    """Items that Spark sends to this worker, each of them acknowledged at once."""
    connections = _connections()
    _set(connections, nodelay=True)
    for item in items:
        yield item
        _set(connections)  # the kernel soon falls back to delays


def _connections() -> list[int]:
    """Descriptors of the connections that this process has now."""
    if not _LINUX or _REUSED not in os.environ:
        return []
    return [number for number in map(int, os.listdir(_DESCRIPTORS)) if _is_connection(number)]


def _is_connection(descriptor: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        found = socket.socket(fileno=descriptor)
    except OSError:
        return False  # closed meanwhile
    family, kind = found.family, found.type
    found.detach()  # it is somebody else's
    return family in (socket.AF_INET, socket.AF_INET6) and kind == socket.SOCK_STREAM


def _set(connections: Iterable[int], *, nodelay: bool = False) -> None:
    for descriptor in connections:
        with suppress(OSError):  # closed meanwhile
            borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
            try:
                if nodelay:
                    borrowed.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                borrowed.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            finally:
                borrowed.detach()
