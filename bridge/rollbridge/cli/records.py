"""Committed records as lines, by a format or as JSON, and converters of option values.

Converters are called by click with the text of an option; they return the value, or raise ``click.BadParameter``.
"""

from __future__ import annotations

import base64
import json
import re
import string
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import click

from rollbridge.base.sn import SN
from rollbridge.consumer.records import HeaderList, Record
from rollbridge.errors import CorruptDataError, NotFoundError

LineFormat = Callable[[Record], bytes]
_UNKNOWN: Final = "unknown"

_FIELDS: Final[dict[str, Callable[[Record], bytes | None]]] = {
    "key": lambda record: record.key,
    "value": lambda record: record.value,
    "offset": lambda record: _given(record.offset),
    "segment": lambda record: _given(record.segment),
    "topic": lambda record: record.topic.encode(),
    "timestamp_ms": lambda record: _given(record.timestamp_ms),
    "dlsn": lambda record: _known(lambda: record.dlsn),
    "sn": lambda record: _known(lambda: record.sn),
    "transaction": lambda record: _known(lambda: record.transaction_id),
    "local_sequence": lambda record: _known(lambda: record.local_sequence),
    "commit_position": lambda record: _given(record.commit_position),
    "committed": lambda record: b"yes" if record.committed else b"no",
    "headers": lambda record: _headers_text(record),
}
FIELDS: Final = tuple(_FIELDS)
"""Fields that a format may name."""
_FIELDS["timestamp"] = _FIELDS["timestamp_ms"]  # its name before 0.3.0


def line_of(template: str, null: str) -> LineFormat:
    """Return a function that formats records, as in ``{key}\\t{value}``; bytes are passed through unchanged.

    Raises:
        click.BadParameter: A field does not exist, or braces do not match.
    """
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as exc:
        raise click.BadParameter(f"{template!r} is not a format: {exc}") from None
    parts: list[bytes | Callable[[Record], bytes | None]] = []
    for literal, field, spec, conversion in pieces:
        if literal:
            parts.append(literal.encode("utf-8", "surrogateescape"))
        if field is None:
            continue
        if field not in _FIELDS or spec or conversion:
            raise click.BadParameter(f"{{{field}}} is not a field of a record; the fields are {', '.join(FIELDS)}")
        parts.append(_FIELDS[field])
    nothing = null.encode("utf-8", "surrogateescape")

    def line(record: Record) -> bytes:
        out = [part if isinstance(part, bytes) else part(record) for part in parts]
        return b"".join(nothing if part is None else part for part in out) + b"\n"

    return line


def json_line(record: Record) -> bytes:
    """Return one JSON object; bytes that are not UTF-8 are under ``..._base64`` instead."""
    return json.dumps(record_document(record), ensure_ascii=False).encode() + b"\n"


def record_document(record: Record) -> dict[str, Any]:
    """Return a record as JSON."""
    headers = _headers(record)
    sn: SN | None
    transaction: object
    try:
        sn, transaction, local_sequence = record.sn, record.transaction_id, record.local_sequence
    except NotFoundError:
        sn, transaction, local_sequence = None, _UNKNOWN, None
    return {
        "dlsn": None if sn is None else str(sn.dlsn),
        "sequence_id": None if sn is None else sn.sequence_id,
        "transaction_id": None if sn is None else sn.transaction_id,
        "segment": str(record.segment),
        "topic": record.topic,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
        "transaction": None if transaction is None else str(transaction),
        "local_sequence": local_sequence,
        "commit_position": record.commit_position,
        "committed": record.committed,
        **_text("key", record.key),
        **_text("value", record.value),
        "headers": None if headers is None else [{"name": name, **_text("value", value)} for name, value in headers],
    }


def _headers(record: Record) -> HeaderList | None:
    """Return the headers; None if another client gave them names that cannot be printed."""
    try:
        return record.headers
    except CorruptDataError:
        return None


def _headers_text(record: Record) -> bytes | None:
    headers = _headers(record)
    if headers is None:
        return None
    return b",".join(name.encode() + b"=" + (b"" if value is None else value) for name, value in headers)


def _known(ask: Callable[[], object]) -> bytes:
    """Return what depends on who wrote a record, which compaction may have taken away."""
    try:
        return _given(ask())
    except NotFoundError:
        return _UNKNOWN.encode()


def _given(value: object) -> bytes:
    return b"" if value is None else str(value).encode()


def _text(name: str, raw: bytes | None) -> dict[str, str | None]:
    if raw is None:
        return {name: None}
    try:
        return {name: raw.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(raw).decode()}


# Values of options: durations, key ranges, lists of numbers, and text with escapes


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
    """Parse ``2d``, ``36h``, ``1h30m``, ``500ms``: numbers with their units, added up."""
    if not _DURATION.fullmatch(text):
        raise click.BadParameter(f"{text!r} is not a duration; use numbers with units, such as 2d, 36h, 1h30m, 500ms")
    try:
        return sum((float(number) * _UNITS[unit] for number, unit in _DURATION_PART.findall(text)), timedelta(0))
    except OverflowError:
        raise click.BadParameter(f"{text!r} is too long a time to wait") from None


def size(text: str) -> int:
    """Parse ``10GiB``, ``500MB``, ``1000``: a number of bytes."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size; use a number of bytes, or with a unit, such as 500MB, 10GiB")
    return int(float(match[1]) * _SIZE_UNITS[match[2].lower()])


def key_range(text: str) -> tuple[float, float]:
    """Parse ``0.25:0.5``: the lower end of a key range, inclusive, and its upper end, exclusive."""
    low, colon, high = text.partition(":")
    try:
        if colon:
            return float(low), float(high)
    except ValueError:
        pass
    raise click.BadParameter(f"{text!r} is not a key range; use LOW:HIGH, such as 0.25:0.5")


def segment_numbers(text: str) -> tuple[int, ...]:
    """Parse ``0`` or ``0,3,4``."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of segment numbers, such as 0,3,4") from None


def escaped(text: str) -> str:
    r"""Replace the escapes ``\t``, ``\n``, ``\r``, ``\0``, ``\\`` and ``\xHH`` by their characters."""

    def plain(match: re.Match[str]) -> str:
        code = match[1]
        if len(code) == 3:
            return chr(int(code[1:], 16))
        if code not in _ESCAPED:
            raise click.BadParameter(rf"\{code} is not an escape; use \t, \n, \r, \0, \\ or \xHH")
        return _ESCAPED[code]

    return _ESCAPE.sub(plain, text)


def header(text: str) -> tuple[str, bytes]:
    """Parse ``name=value``, a header of every record."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise click.BadParameter(f"{text!r} is not a header; use NAME=VALUE")
    return name, value.encode("utf-8", "surrogateescape")
