"""Kafka's requests and answers in any version, by kio's schemas: bytes to entities, and plain values to bytes.

A request is split at once into its head, with client and API, and a body that is decoded only by its handler here: what
is relayed stays bytes. Everything in here is bounded by the bytes that are there, and raises :class:`MalformedError`
for any others, whatever a client sends.

Source: the Kafka protocol guide; kio's generated schemas.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from importlib import import_module
from typing import Any, Final, Literal, NamedTuple, cast

from kio.schema.index import api_key_map, schema_name_map
from kio.serial import entity_reader, entity_writer
from kio.serial._implicit_defaults import get_implicit_default
from kio.serial._introspect import EntityField, EntityTupleField, classify_field, is_optional
from kio.static.constants import EntityType

from rollbridge.kafka.describe import DescribeTransactionsResponse
from rollbridge_gateway.protocol.versions import Api

# Check that the lengths in a request are within its bytes, before anything is made of them.
#
# The decoder makes room for as many items as an array claims to have. A request of twenty bytes that claims two
# thousand million of them has it ask for more memory than there is, and the process ends. So requests are walked
# through first, by the same schemas, without making anything.
#
# The walk itself is bounded as well: it is done on the event loop's thread, and an item may be a single byte.
#
# Only fields that requests served here have are known; a test goes through all of them.


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


class _Field(NamedTuple):
    """Field of an entity: several of them or one, of a fixed size, of text or bytes, or entities."""

    is_array: bool
    size: int
    kind: str
    entity: Any
    nullable: bool


@cache
def _fields(kind: Any) -> tuple[_Field, ...]:
    found = []
    for item in fields(kind):
        form = classify_field(item)
        if "tag" in item.metadata:
            raise TypeError(f"{kind.__name__}.{item.name} is tagged, and no request served here has such fields")
        word = str(item.metadata.get("kafka_type", ""))
        if isinstance(form, EntityTupleField):
            found.append(_Field(True, 0, "", form.type_, is_optional(item)))
        elif isinstance(form, EntityField) and is_optional(item):
            found.append(_Field(False, 0, _OPTIONAL, form.type_, True))
        elif word in _SIZES:
            found.append(_Field(form.is_array, _SIZES[word], word, None, is_optional(item)))
        elif word in (_STRING, _RECORDS):
            found.append(_Field(form.is_array, 0, word, None, is_optional(item)))
        else:
            raise TypeError(f"{kind.__name__}.{item.name} is {word}, and no request served here has such fields")
    return tuple(found)


def check_bounds(data: RawMessage, place: int, kind: Any) -> int:
    """Walk through an entity of a class at a place of a request, and return the place behind it.

    Raises:
        IndexError: a length is negative where there is no null, or beyond the bytes that are there; or there are
            more items than :data:`ITEMS_MAX`, or more tagged fields than :data:`TAGS_MAX`.
        IndexError, struct.error: the bytes end too early.
    """
    return _walk(data, place, kind, [ITEMS_MAX])


def _walk(data: RawMessage, place: int, kind: Any, left: list[int]) -> int:
    flexible = kind.__flexible__
    for item in _fields(kind):
        if not item.is_array:
            place = _one(data, place, item, left, flexible=flexible)
            continue
        count, place = _length(data, place, _INT, flexible=flexible)
        if count > len(data) - place or (count < 0 and not item.nullable):
            raise IndexError(f"an array of {count} items, and {len(data) - place} bytes are left")
        left[0] -= max(count, 0)
        if left[0] < 0:
            raise IndexError(f"more than {ITEMS_MAX} items in one request")
        for _ in range(count):
            place = _one(data, place, item, left, flexible=flexible)
    return skip_tags(data, place) if flexible else place


def skip_tags(data: RawMessage, place: int) -> int:
    """Return the place behind tagged fields, of which none is known.

    Raises as :func:`check_bounds` does.
    """
    count, place = read_unsigned(data, place)
    if count > TAGS_MAX:
        raise IndexError(f"{count} tagged fields")
    for _ in range(count):
        _, place = read_unsigned(data, place)
        size, place = read_unsigned(data, place)
        place = _past(data, place, size)
    return place


def _one(data: RawMessage, place: int, item: _Field, left: list[int], *, flexible: bool) -> int:
    if item.kind == _OPTIONAL:
        if data[place] == _NULL:
            return place + 1
        place += 1
    if item.entity is not None:
        return _walk(data, place, item.entity, left)
    if item.size:
        return _past(data, place, item.size)
    size, place = _length(data, place, _INT if item.kind == _RECORDS else _SHORT, flexible=flexible)
    return _past(data, place, max(size, 0))


def _past(data: RawMessage, place: int, size: int) -> int:
    place += size
    if place > len(data):
        raise IndexError(f"{size} bytes are claimed, and the request ends {place - len(data)} before")
    return place


def _length(data: RawMessage, place: int, form: struct.Struct, *, flexible: bool) -> tuple[int, int]:
    """Return a length, -1 for null, and the place behind it."""
    if flexible:
        found, place = read_unsigned(data, place)
        return found - 1, place
    (found,) = form.unpack_from(data, place)
    if found < -1:
        raise IndexError(f"a length of {found}")
    return found, place + form.size


def read_unsigned(data: RawMessage, place: int) -> tuple[int, int]:
    """Return an unsigned varint and the place behind it.

    Raises:
        IndexError: the data ends within it.
        IndexError: it has more than 35 bits.
    """
    found = 0
    for shift in range(0, 35, 7):
        byte = data[place]
        place += 1
        found |= (byte & 0x7F) << shift
        if byte < 0x80:
            return found, place
    raise IndexError("a number of more than five bytes")


_HEAD: Final = struct.Struct(">hhih")
_CORRELATION: Final = struct.Struct(">i")
LENGTH_BYTES: Final = 4
"""Bytes before each request and answer that say how long it is."""
API_VERSIONS_MAX: Final = 4
FLEXIBLE_PRODUCE: Final = 9
"""Version of Produce from which lengths are compact."""


MessageKind = Literal[EntityType.request, EntityType.response]


@dataclass(frozen=True, slots=True)
class Head:
    """Head of a request.

    Attributes:
        key, version: Of the API.
        correlation: Number that its answer carries.
        client_id: Name that the client gives itself.
        body: Place of the body.
    """

    key: int
    version: int
    correlation: int
    client_id: str | None
    body: int


class Peeked(NamedTuple):
    """Fields in the first bytes of a Produce request."""

    transactional_id: str | None
    acks: int


@cache
def schema(key: int, version: int, kind: MessageKind) -> type[Any]:
    """Return the class of a request or an answer.

    Raises:
        MalformedError: kio does not know that version.
    """
    if (key, version, kind) == (Api.DESCRIBE_TRANSACTIONS, 0, EntityType.response):
        return DescribeTransactionsResponse
    try:
        module, _, name = schema_name_map[api_key_map[key]][version][kind].partition(":")
    except KeyError:
        raise MalformedError(f"version {version} of API {key} is not known") from None
    found: type[Any] = getattr(import_module(module), name)
    return found


@cache
def is_flexible(key: int, version: int) -> bool:
    """Return whether a request's head has tagged fields."""
    return bool(schema(key, version, EntityType.request).__header_schema__.__flexible__)


def read_head(data: RawMessage, *, is_flexible_request: Callable[[int, int], bool] = is_flexible) -> Head:
    """Return the head of a request.

    Raises:
        MalformedError: it is cut short, or its client id is no text.
    """
    try:
        key, version, correlation, length = _HEAD.unpack_from(data)
        place = _HEAD.size
        client_id = None
        if length >= 0:
            raw = data[place : place + length]
            if len(raw) != length:
                raise MalformedError(f"a client id of {length} bytes, of which {len(raw)} are there")
            client_id = raw.decode()
            place += length
        # What is behind the head of an ApiVersions of the future is not read.
        if (key != Api.API_VERSIONS or 0 <= version <= API_VERSIONS_MAX) and is_flexible_request(key, version):
            place = skip_tags(data, place)
    except (struct.error, UnicodeDecodeError, IndexError) as fault:
        raise MalformedError(f"not the head of a request: {fault}") from fault
    return Head(key, version, correlation, client_id, place)


def peek_produce(data: RawMessage, head: Head) -> Peeked:
    """Return the transactional id of a Produce request of version 3 or newer, and its acks, without decoding it.

    Raises:
        MalformedError: it is cut short.
    """
    place = head.body
    try:
        if head.version < 3:
            return Peeked(None, _SHORT.unpack_from(data, place)[0])
        if head.version >= FLEXIBLE_PRODUCE:
            length, place = read_unsigned(data, place)
            length -= 1
        else:
            (length,) = _SHORT.unpack_from(data, place)
            place += _SHORT.size
        name = None
        if length >= 0:
            name = data[place : place + length].decode()
            place += length
        return Peeked(name, _SHORT.unpack_from(data, place)[0])
    except (struct.error, UnicodeDecodeError, IndexError) as fault:
        raise MalformedError(f"not a Produce request: {fault}") from fault


def is_transactional_start(data: RawMessage, head: Head) -> bool:
    """Return whether an InitProducerId request has a transactional id."""
    try:
        if is_flexible(head.key, head.version):
            return read_unsigned(data, head.body)[0] > 0
        return bool(_SHORT.unpack_from(data, head.body)[0] >= 0)
    except (struct.error, IndexError) as fault:
        raise MalformedError(f"not an InitProducerId request: {fault}") from fault


def read_body(data: RawMessage, head: Head) -> Any:
    """Return the body of a request, an entity of kio's.

    What follows it is passed over, as brokers do: librdkafka's Metadata has some bytes too many.

    Raises:
        MalformedError: it is not one.
    """
    kind = schema(head.key, head.version, EntityType.request)
    try:
        check_bounds(data, head.body, kind)
    except (IndexError, struct.error) as fault:
        raise MalformedError(f"not a {kind.__name__}: {fault}") from fault
    return _read(data, head.body, kind)


def read_answer(data: RawMessage, key: int, version: int) -> Any:
    """Return the body of a broker's answer, which begins with its correlation id.

    Raises:
        MalformedError: it is not one.
    """
    kind = schema(key, version, EntityType.response)
    place = _CORRELATION.size
    if kind.__header_schema__.__flexible__:
        try:
            place = skip_tags(data, place)
        except IndexError as fault:
            raise MalformedError("an answer without a head") from fault
    return _read(data, place, kind)


def _read(data: RawMessage, place: int, kind: type[Any]) -> Any:
    try:
        body, _ = entity_reader(kind)(memoryview(data).toreadonly(), place)  # kio takes nothing that can be written to
    except Exception as fault:  # kio raises errors of its own, of struct, and of the types of fields
        raise MalformedError(f"not a {kind.__name__}: {fault!r}") from fault
    return body


def write_answer(key: int, version: int, correlation: int, values: Mapping[str, Any]) -> bytes:
    """Return an answer without its length.

    Fields that ``values`` lacks have their defaults; those that the version lacks are left out.
    """
    return write_entity(build(schema(key, version, EntityType.response), values), correlation)


def write_entity(entity: Any, correlation: int) -> bytes:
    """Return an answer without its length."""
    body = io.BytesIO()
    entity_writer(type(entity))(body, entity)
    flexible = b"\0" if entity.__header_schema__.__flexible__ else b""
    return b"".join((_CORRELATION.pack(correlation), flexible, body.getvalue()))


def numbered(answer: bytes, correlation: int) -> bytes:
    """Return an answer with another correlation id, for another request."""
    return _CORRELATION.pack(correlation) + answer[_CORRELATION.size :]


def write_request(key: int, version: int, correlation: int, client_id: str | None, values: Mapping[str, Any]) -> bytes:
    """Return a request without its length."""
    return with_body(
        Head(key, version, correlation, client_id, 0), build(schema(key, version, EntityType.request), values)
    )


def with_body(head: Head, entity: Any) -> bytes:
    """Return a request with this head and another body."""
    body = io.BytesIO()
    entity_writer(type(entity))(body, entity)
    raw = None if head.client_id is None else head.client_id.encode()
    start = _HEAD.pack(head.key, head.version, head.correlation, -1 if raw is None else len(raw))
    flexible = b"\0" if is_flexible(head.key, head.version) else b""
    return b"".join((start, raw or b"", flexible, body.getvalue()))


def framed(data: RawMessage) -> bytes:
    """Return a request or an answer with its length before it."""
    return _CORRELATION.pack(len(data)) + data


@cache
def _plan(kind: type[Any]) -> tuple[tuple[str, type[Any] | None, bool, Any], ...]:
    """Return of each field: its name, the class of nested entities, whether there are several, and its default."""
    plan: list[tuple[str, type[Any] | None, bool, Any]] = []
    for item in fields(kind):
        form = classify_field(item)
        nested = form.type_ if isinstance(form, EntityField | EntityTupleField) else None
        default: Any
        if item.default is not MISSING:
            default = item.default
        elif form.is_array:
            default = ()
        elif nested is not None or is_optional(item):
            default = None
        else:
            try:
                default = get_implicit_default(form.type_)
            except KeyError:
                kind_: Any = form.type_
                default = kind_(0)  # an error code, or a truth value
        plan.append((item.name, nested, form.is_array, default))
    return tuple(plan)


def build(kind: Any, values: Mapping[str, Any]) -> Any:
    """Return an entity of plain values: mappings for nested entities, any iterable for several."""
    made: dict[str, Any] = {}
    plan: tuple[tuple[str, Any, bool, Any], ...] = _plan(cast(Hashable, kind))
    for name, nested, several, default in plan:
        value = values.get(name, MISSING)
        if value is MISSING:
            made[name] = default
        elif nested is not None and several:
            made[name] = tuple(build(nested, item) for item in value)
        elif several:
            made[name] = tuple(value)
        else:
            made[name] = build(nested, value) if nested is not None and isinstance(value, Mapping) else value
    return kind(**made)
