"""Values of options: durations, key ranges, lists of numbers, and text with escapes.

Each function is what click calls with the text of an option; it gives the value, or raises ``click.BadParameter``.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final

import click

_UNITS: Final = {
    "w": timedelta(weeks=1),
    "d": timedelta(days=1),
    "h": timedelta(hours=1),
    "m": timedelta(minutes=1),
    "s": timedelta(seconds=1),
    "ms": timedelta(milliseconds=1),
}
_DURATION: Final = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|[wdhms]))+")
_DURATION_PART: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|[wdhms])")
_SIZE_UNITS: Final = {
    "": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", 1)},
}
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s?((?:[kmgtp]i?b)?)", re.IGNORECASE)
_ESCAPE: Final = re.compile(r"\\(x[0-9a-fA-F]{2}|.|$)", re.DOTALL)
_ESCAPED: Final = {"t": "\t", "n": "\n", "r": "\r", "0": "\0", "\\": "\\"}


def duration(text: str) -> timedelta:
    """``2d``, ``36h``, ``1h30m``, ``500ms``: numbers with their units, added up."""
    if not _DURATION.fullmatch(text):
        raise click.BadParameter(f"{text!r} is no duration; numbers with units are, such as 2d, 36h, 1h30m, 500ms")
    try:
        return sum((float(number) * _UNITS[unit] for number, unit in _DURATION_PART.findall(text)), timedelta(0))
    except OverflowError:
        raise click.BadParameter(f"{text!r} is longer than anything that can be waited for") from None


def size(text: str) -> int:
    """``10GiB``, ``500MB``, ``1000``: a number of bytes."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{text!r} is no size; a number of bytes is, or one with a unit, such as 500MB, 10GiB")
    return int(float(match[1]) * _SIZE_UNITS[match[2].lower()])


def key_range(text: str) -> tuple[float, float]:
    """``0.25:0.5``: the lower end of a key range, inclusive, and its upper end, exclusive."""
    low, colon, high = text.partition(":")
    try:
        if colon:
            return float(low), float(high)
    except ValueError:
        pass
    raise click.BadParameter(f"{text!r} is no key range; LOW:HIGH is, such as 0.25:0.5")


def segment_numbers(text: str) -> tuple[int, ...]:
    """``0`` or ``0,3,4``."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of segment numbers such as 0,3,4") from None


def escaped(text: str) -> str:
    r"""Text in which ``\t``, ``\n``, ``\r``, ``\0``, ``\\`` and ``\xHH`` stand for what they stand for elsewhere."""

    def plain(match: re.Match[str]) -> str:
        code = match[1]
        if len(code) == 3:
            return chr(int(code[1:], 16))
        if code not in _ESCAPED:
            raise click.BadParameter(rf"\{code} is no escape; \t \n \r \0 \\ and \xHH are")
        return _ESCAPED[code]

    return _ESCAPE.sub(plain, text)


def header(text: str) -> tuple[str, bytes]:
    """``name=value``: a header of every record."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise click.BadParameter(f"{text!r} is no header; NAME=VALUE is")
    return name, value.encode("utf-8", "surrogateescape")
