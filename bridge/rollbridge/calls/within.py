"""How long servers are waited for in a call that has a time-out of its own, however many questions it takes.

A call of the application opens a context; whatever ZooKeeper and Kafka are asked in it, on the same thread, ends with
it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

GRACE_S: Final = 0.2
"""What a question gets that is asked when the time is over: enough for an answer of a server that is well, so that a
request can be taken back and a fault be explained."""

_until: ContextVar[float | None] = ContextVar("rollbridge_until", default=None)


@contextmanager
def answers_within(timeout_s: float) -> Iterator[None]:
    """Nothing that is asked in this context, on this thread, is waited for longer than this, taken together."""
    until = time.monotonic() + timeout_s
    before = _until.get()
    token = _until.set(until if before is None else min(before, until))
    try:
        yield
    finally:
        _until.reset(token)


def patience_s(most_s: float) -> float:
    """How long to wait for an answer now, in seconds: ``most_s`` where no context says less."""
    until = _until.get()
    return most_s if until is None else min(most_s, max(until - time.monotonic(), GRACE_S))
