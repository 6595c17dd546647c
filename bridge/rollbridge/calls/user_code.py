"""Code of the application that we run: iterators that it gives and callbacks that it leaves.

It may take long, raise whatever it likes and call us again. So none of it runs under a lock of ours, and nothing that
it raises ends a thread of ours, on which others depend.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final, TypeVar

T = TypeVar("T")

CHUNK: Final = 512
"""How many records are taken from an iterator at a time."""


def in_chunks(items: Iterable[T], take: Callable[[list[T]], object]) -> int:
    """Give ``take`` what an iterator gives, some at a time; returns how many. It is called at the end with none.

    Raises:
        Exception: What ``take`` raises; or the iterator, when what it gave before was taken.
    """
    iterator, taken = iter(items), 0
    while True:
        chunk, fault = next_chunk(iterator)
        take(chunk)
        taken += len(chunk)
        if fault is not None:
            raise fault
        if not chunk:
            return taken


def next_chunk(items: Iterator[T]) -> tuple[list[T], BaseException | None]:
    """The next items, and what the iterator raised behind them, if it did; it is at its end when there are neither."""
    found: list[T] = []
    try:
        found.extend(islice(items, CHUNK))  # keeps what came before an exception
    except BaseException as fault:
        return found, fault
    return found, None


def call_back(callback: Callable[[], object], logger: logging.Logger, what: str) -> None:
    """Call ``callback``; whatever it raises is logged as a failed callback of ``what``.

    Only Ctrl-C, which is meant for the main thread, goes through there.
    """
    try:
        callback()
    except BaseException as fault:
        if isinstance(fault, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        logger.exception("a callback of %s failed", what)
