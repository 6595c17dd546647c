"""Whether the lengths in a request are within its bytes, before anything is made of them.

The decoder makes room for as many items as an array claims to have. A request of twenty bytes that claims two thousand
million of them has it ask for more memory than there is, and the process ends. So requests are walked through first, by
the same schemas, without making anything.

The walk itself is bounded as well: it is done on the event loop's thread, and an item may be a single byte.

Only fields that requests served here have are known; a test goes through all of them.
"""

from __future__ import annotations

import struct
from dataclasses import fields
from functools import cache
from typing import Any, Final, NamedTuple

from kio.serial._introspect import EntityField, EntityTupleField, classify_field, is_optional

_SIZES: Final = {"bool": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "timedelta_i32": 4, "uuid": 16}
ITEMS_MAX: Final = 50_000
"""Most items of arrays in one request: ten microseconds each, until they are decoded."""
TAGS_MAX: Final = 100
"""Most tagged fields of one entity. None is known that a request served here could have."""
_SHORT: Final = struct.Struct(">h")
_INT: Final = struct.Struct(">i")
_STRING: Final = "string"
_RECORDS: Final = "records"
_OPTIONAL: Final = "optional entity"
_NULL: Final = 0xFF
"""Byte in place of an optional entity that is not there."""


RawMessage = bytes | bytearray
"""A request or an answer, as it came."""


class MalformedError(Exception):
    """Bytes that are no request, or none that is served here; the connection is closed."""


class OutOfBoundsError(MalformedError):
    """A length is beyond the bytes that are there."""


class _Field(NamedTuple):
    """Field of an entity: several of them or one, of a fixed size, of text or bytes, or entities."""

    is_array: bool
    size: int
    kind: str
    entity: Any
    nullable: bool


@cache
def _plan(kind: Any) -> tuple[_Field, ...]:
    found = []
    for field in fields(kind):
        form = classify_field(field)
        if "tag" in field.metadata:
            raise TypeError(f"{kind.__name__}.{field.name} is tagged, and no request served here has such fields")
        word = str(field.metadata.get("kafka_type", ""))
        if isinstance(form, EntityTupleField):
            found.append(_Field(True, 0, "", form.type_, is_optional(field)))
        elif isinstance(form, EntityField) and is_optional(field):
            found.append(_Field(False, 0, _OPTIONAL, form.type_, True))
        elif word in _SIZES:
            found.append(_Field(form.is_array, _SIZES[word], word, None, is_optional(field)))
        elif word in (_STRING, _RECORDS):
            found.append(_Field(form.is_array, 0, word, None, is_optional(field)))
        else:
            raise TypeError(f"{kind.__name__}.{field.name} is {word}, and no request served here has such fields")
    return tuple(found)


def check_bounds(data: RawMessage, place: int, kind: Any) -> int:
    """Walk through an entity, and return the place behind it.

    Args:
        data: The request.
        place: Where the entity begins.
        kind: Its class.

    Raises:
        OutOfBoundsError: a length is negative where there is no null, or beyond the bytes that are there; or there are
            more items than :data:`ITEMS_MAX`, or more tagged fields than :data:`TAGS_MAX`.
        IndexError, struct.error: the bytes end too early.
    """
    return _walk(data, place, kind, [ITEMS_MAX])


def _walk(data: RawMessage, place: int, kind: Any, left: list[int]) -> int:
    flexible = kind.__flexible__
    for field in _plan(kind):
        if not field.is_array:
            place = _one(data, place, field, left, flexible=flexible)
            continue
        count, place = _length(data, place, _INT, flexible=flexible)
        if count > len(data) - place or (count < 0 and not field.nullable):
            raise OutOfBoundsError(f"an array of {count} items, and {len(data) - place} bytes are left")
        left[0] -= max(count, 0)
        if left[0] < 0:
            raise OutOfBoundsError(f"more than {ITEMS_MAX} items in one request")
        for _ in range(count):
            place = _one(data, place, field, left, flexible=flexible)
    return skip_tags(data, place) if flexible else place


def skip_tags(data: RawMessage, place: int) -> int:
    """Return the place behind tagged fields, of which none is known.

    Raises as :func:`check_bounds` does.
    """
    count, place = read_unsigned(data, place)
    if count > TAGS_MAX:
        raise OutOfBoundsError(f"{count} tagged fields")
    for _ in range(count):
        _, place = read_unsigned(data, place)
        size, place = read_unsigned(data, place)
        place = _past(data, place, size)
    return place


def _one(data: RawMessage, place: int, field: _Field, left: list[int], *, flexible: bool) -> int:
    if field.kind == _OPTIONAL:
        if data[place] == _NULL:
            return place + 1
        place += 1
    if field.entity is not None:
        return _walk(data, place, field.entity, left)
    if field.size:
        return _past(data, place, field.size)
    size, place = _length(data, place, _INT if field.kind == _RECORDS else _SHORT, flexible=flexible)
    return _past(data, place, max(size, 0))


def _past(data: RawMessage, place: int, size: int) -> int:
    place += size
    if place > len(data):
        raise OutOfBoundsError(f"{size} bytes are claimed, and the request ends {place - len(data)} before")
    return place


def _length(data: RawMessage, place: int, form: struct.Struct, *, flexible: bool) -> tuple[int, int]:
    """Return a length, -1 for null, and the place behind it."""
    if flexible:
        found, place = read_unsigned(data, place)
        return found - 1, place
    (found,) = form.unpack_from(data, place)
    if found < -1:
        raise OutOfBoundsError(f"a length of {found}")
    return found, place + form.size


def read_unsigned(data: RawMessage, place: int) -> tuple[int, int]:
    """Return an unsigned varint and the place behind it.

    Raises:
        IndexError: the data ends within it.
        OutOfBoundsError: it has more than 35 bits.
    """
    found = 0
    for shift in range(0, 35, 7):
        byte = data[place]
        place += 1
        found |= (byte & 0x7F) << shift
        if byte < 0x80:
            return found, place
    raise OutOfBoundsError("a number of more than five bytes")
