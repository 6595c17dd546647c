"""Committed records as lines: by a format of the user's, or as JSON."""

from __future__ import annotations

import base64
import json
import string
from collections.abc import Callable
from typing import Any, Final, cast

import click

from bridge.errors import InvalidRequestError
from bridge.model.identifiers import TransactionId
from bridge.model.sequence import DLSN, RECORD_HEADER, unpack_record_header
from bridge.reading import Delivered

Line = Callable[[Delivered], bytes]


Headers = list[tuple[str, bytes | None]]


def _headers(record: Delivered) -> Headers:
    # What a consumer hands out is narrower than the type that it shares with what a producer takes.
    return cast("Headers", record.message.headers() or [])


def _origin(headers: Headers) -> tuple[TransactionId, int] | None:
    """Transaction and local sequence number of a record; None for one that was written plainly."""
    for name, value in headers:
        if name == RECORD_HEADER and value is not None:
            try:
                return unpack_record_header(value)
            except InvalidRequestError:
                return None
    return None


def _position(record: Delivered, origin: tuple[TransactionId, int] | None) -> str:
    return str(DLSN.of(record.segment, record.message.offset() or 0, 0 if origin is None else origin[1]))


def _of_users(headers: Headers) -> Headers:
    """Headers as they were written, without the one that rollbridge adds."""
    return [(name, value) for name, value in headers if name != RECORD_HEADER]


def _transaction(record: Delivered) -> bytes:
    origin = _origin(_headers(record))
    return b"" if origin is None else str(origin[0]).encode()


def _local_sequence(record: Delivered) -> bytes:
    origin = _origin(_headers(record))
    return b"" if origin is None else b"%d" % origin[1]


_FIELDS: Final[dict[str, Callable[[Delivered], bytes | None]]] = {
    "key": lambda record: record.message.key(),
    "value": lambda record: record.message.value(),
    "offset": lambda record: b"%d" % (record.message.offset() or 0),
    "segment": lambda record: str(record.segment).encode(),
    "topic": lambda record: (record.message.topic() or "").encode(),
    "timestamp": lambda record: b"%d" % record.message.timestamp()[1],
    "dlsn": lambda record: _position(record, _origin(_headers(record))).encode(),
    "transaction": _transaction,
    "local_sequence": _local_sequence,
    "headers": lambda record: b",".join(
        name.encode() + b"=" + (b"" if value is None else value) for name, value in _of_users(_headers(record))
    ),
}
FIELDS: Final = tuple(_FIELDS)
"""What a format may name."""


def line_of(template: str, null: str) -> Line:
    """A function that puts records into a format such as ``{key}\\t{value}``; bytes go through as they are.

    Raises:
        click.BadParameter: a field that does not exist, or braces that do not match.
    """
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as exc:
        raise click.BadParameter(f"{template!r} is no format: {exc}") from None
    parts: list[bytes | Callable[[Delivered], bytes | None]] = []
    for literal, field, spec, conversion in pieces:
        if literal:
            parts.append(literal.encode("utf-8", "surrogateescape"))
        if field is None:
            continue
        if field not in _FIELDS or spec or conversion:
            raise click.BadParameter(f"{{{field}}} is no field of a record; there are {', '.join(FIELDS)}")
        parts.append(_FIELDS[field])
    nothing = null.encode("utf-8", "surrogateescape")

    def line(record: Delivered) -> bytes:
        out = [part if isinstance(part, bytes) else part(record) for part in parts]
        return b"".join(nothing if part is None else part for part in out) + b"\n"

    return line


def json_line(record: Delivered) -> bytes:
    """One JSON object; bytes that are not UTF-8 are under ``..._base64`` instead."""
    headers = _headers(record)
    origin = _origin(headers)
    document: dict[str, Any] = {
        "dlsn": _position(record, origin),
        "segment": str(record.segment),
        "topic": record.message.topic(),
        "offset": record.message.offset(),
        "timestamp_ms": record.message.timestamp()[1],
        "transaction": None if origin is None else str(origin[0]),
        "local_sequence": None if origin is None else origin[1],
        **_text("key", record.message.key()),
        **_text("value", record.message.value()),
        "headers": [{"name": name, **_text("value", value)} for name, value in _of_users(headers)],
    }
    return json.dumps(document, ensure_ascii=False).encode() + b"\n"


def _text(name: str, raw: bytes | None) -> dict[str, str | None]:
    if raw is None:
        return {name: None}
    try:
        return {name: raw.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(raw).decode()}
