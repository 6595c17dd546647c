"""How long to wait, as callers say it."""

from __future__ import annotations

from datetime import timedelta

from rollbridge.errors import InvalidRequestError

Timeout = float | timedelta | None
"""Seconds, or a timedelta; None is the default of whoever waits, which its documentation names."""


def as_seconds(timeout: Timeout, default_s: float) -> float:
    """The seconds of a time-out, or the default."""
    if timeout is None:
        return default_s
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)


def positive_seconds(what: str, timeout: float | timedelta) -> float:
    """Seconds.

    Raises:
        InvalidRequestError: not positive.
    """
    seconds = as_seconds(timeout, 0.0)
    if not seconds > 0:
        raise InvalidRequestError(f"{what} must be positive, not {seconds:g} s")
    return seconds
