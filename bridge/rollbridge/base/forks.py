"""Protect connections that a process inherits by ``fork()``: they stay the parent's.

Parent and child would share sockets, a producer id with its sequence numbers, and ids reserved for new transactions.
Acknowledged records would be missing from the log, and both would begin the same transaction. Only the thread that
forked lives in the child, so waits for other threads would never end.

Owners of connections, or of locks that their threads hold, therefore register with :func:`hold`. The child replaces
such objects by one that refuses every use and closes nothing; the parent is not affected, and the child connects again.
librdkafka's clients are never destroyed in the child, since that waits for their threads.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeVar, cast
from weakref import WeakKeyDictionary

from rollbridge.errors import InvalidRequestError

T = TypeVar("T")

_held: WeakKeyDictionary[Any, tuple[tuple[str, ...], Callable[[Any], None] | None]] = WeakKeyDictionary()
_forks = 0


def refusal() -> InvalidRequestError:
    """Return the error of using something that was inherited."""
    return InvalidRequestError(
        "this was made by the process that forked this one, and its connections are that one's: connect again in this "
        "process; nothing was written"
    )


def hold(owner: T, *names: str, then: Callable[[T], None] | None = None) -> None:
    """Name the attributes of an object that are of no use in a child, whatever they are at the time of the fork.

    ``then`` is called in the child with the object. It must take no lock: a thread that does not exist there may hold
    it.
    """
    _held[owner] = names, then


def forks() -> int:
    """Return the number of forks between the first process and this one; it differs from an inherited count."""
    return _forks


class _Gone:
    """Stand-in for an inherited object: refuses every use but closing, which does nothing."""

    def __getattr__(self, name: str) -> NoReturn:
        raise refusal()

    def __enter__(self) -> NoReturn:
        raise refusal()

    def __exit__(self, *_: object) -> None:
        """Leave nothing."""

    def __len__(self) -> NoReturn:
        raise refusal()

    def __iter__(self) -> NoReturn:
        raise refusal()

    def close(self, *_: object) -> int:
        """Leave the closing to the parent."""
        return 0

    stop = purge = close


GONE: Final = cast("Any", _Gone())


def is_gone(held: object) -> bool:
    """Return True if this replaces an inherited object."""
    return held is GONE


def check(held: object) -> None:
    """Raise :func:`refusal` if this replaces an inherited object."""
    if held is GONE:
        raise refusal()


def module_lock() -> threading.Lock:
    """Return a lock for all objects of a module; free in a child, whatever thread of the parent held it at the fork."""
    made = threading.Lock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=made._at_fork_reinit)  # type: ignore[attr-defined]  # as `logging` does
    return made


def _in_child() -> None:
    global _forks
    _forks += 1
    for owner, (names, then) in list(_held.items()):
        if then is not None:
            then(owner)
        for name in names:
            inherited = getattr(owner, name, None)
            if inherited is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))
                setattr(owner, name, GONE)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
