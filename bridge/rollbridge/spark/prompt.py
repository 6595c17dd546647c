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

from rollbridge.spark.workers import is_worker

T = TypeVar("T")

_LINUX: Final = sys.platform == "linux"
"""Elsewhere a process can not ask for acknowledgements."""
_DESCRIPTORS: Final = "/proc/self/fd"


class Prompt:
    """Spark sends its objects to a worker before what they are to work on, which need not wait from then on."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        be_prompt()


def be_prompt() -> None:
    """Acknowledge at once what has come, and keep back nothing from now on; nothing outside of Spark's workers."""
    _set(_sockets())


def promptly(items: Iterable[T]) -> Iterator[T]:
    """Items that Spark sends to this worker, each of them acknowledged at once."""
    sockets = _sockets()
    _set(sockets)
    for item in items:
        yield item
        _set(sockets)  # the kernel soon falls back to delays


def _sockets() -> list[int]:
    """Descriptors of the sockets that this process has now."""
    if not _LINUX or not is_worker():
        return []
    return [number for number in map(int, os.listdir(_DESCRIPTORS)) if _is_socket(number)]


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False  # closed meanwhile


def _set(sockets: Iterable[int]) -> None:
    for descriptor in sockets:
        with suppress(OSError):  # closed meanwhile, or no connection by TCP
            borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
            try:
                borrowed.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                borrowed.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            finally:
                borrowed.detach()
