"""One mapper between dataclasses and the records of the schemas, for every record that is not hot.

A dataclass and its Avro schema together say how each field is stored: the schema gives names and shapes, the type of
the field what its values become again.

======================================  ==================================================================== type of the
field                       in the record ======================================
==================================================================== ``str``, ``int``, ``float``, ``bool``   the same
enum                                    its value a class with ``parse``                  string, as ``str()`` prints it
(names, transaction ids, sequence numbers) a class with ``from_int``               long, as ``int()`` gives it (segment
ids) ``bytes``                               string, in hexadecimal dataclass or ``NamedTuple``             record, by
the names of its fields; where the schema has no field of its name,
                                        its fields are in the record around it
``tuple[A, B]``                         record, its fields in order ``tuple[A, ...]``                       array
``frozenset[A]``                        array in ascending order ``Mapping[A, B]``                       array of
records: the fields of the key, then those of the value ``A | None``                            union with null
======================================  ====================================================================

Exceptions are annotated at the field, ``Annotated[int, StoredAs(...)]``. A field that the schema lacks is not stored,
and needs a default. The mapping is built once for each class, with its first record, so importing costs nothing.

Records written for each transaction are coded by hand, since the mapper takes longer: manifests of COMMIT frames (30 %
to write), control records (five times to write, 16 % to read), and terminated transactions (15 % to read). Others take
0 to 20 % longer than code by hand, a few microseconds.

cattrs and msgspec map dataclasses by their types alone. Here only the schema knows the field names of a mapping's
records, and values are spread over the record around them, so most classes would need a hook. Importing cattrs takes as
long as importing confluent_kafka.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import cached_property
from operator import attrgetter
from struct import Struct
from types import NoneType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Generic,
    NamedTuple,
    Self,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import rollbridge_schemas
from rollbridge.base.errors import CorruptDataError, InvalidRequestError, NewerFormatError
from rollbridge_schemas import Datum

VERSION: Final = 1
"""Format version, for changes that no schema evolution covers; added fields are read as :mod:`schemas` says."""
_FRONT: Final = Struct(">BI")
Record = TypeVar("Record")


def seal(mapper: Mapper[Record], record: Record) -> bytes:
    """Return the Kafka value of a record of a snapshot."""
    return _sealed(rollbridge_schemas.codec(mapper.schema).encode(mapper.to_datum(record)))


def _sealed(content: bytes) -> bytes:
    return _FRONT.pack(VERSION, zlib.crc32(content)) + content


def unseal(mapper: Mapper[Record], value: bytes | None) -> Record:
    """Return the record of a snapshot in a Kafka value.

    Raises:
        CorruptDataError: there is none, or of a version that is not known here, or it is damaged.
    """
    if value is None or len(value) < _FRONT.size:
        raise CorruptDataError("there is no snapshot record where one should be")
    version, checksum = _FRONT.unpack_from(value)
    content = value[_FRONT.size :]
    if version != VERSION:
        kind = NewerFormatError if version > VERSION else CorruptDataError
        raise kind(f"a snapshot record has version {version}, and this release knows {VERSION}")
    if zlib.crc32(content) != checksum:
        raise CorruptDataError("a snapshot record is damaged: its checksum does not fit")
    try:
        return mapper.of_datum(rollbridge_schemas.codec(mapper.schema).decode(content))
    except rollbridge_schemas.SchemaError as fault:
        raise CorruptDataError(f"a snapshot record cannot be read: {fault}") from fault
    except InvalidRequestError as fault:
        raise CorruptDataError(f"a snapshot record contradicts itself: {fault}") from fault


# Versions of records in Kafka: which a reader knows, and what it says of those that it does not.
#
# A record carries its version in front of its Avro::
#
#     control records, terminated transactions       snapshots, ongoing and ended transactions
#     +---------+------+---------- - - -             +---------+--------+------+---------- - - -
#     | version | kind | rest of the Avro            | version | CRC-32 | Avro
#     +---------+------+---------- - - -             +---------+--------+------+---------- - - -
#     0         1      2                             0         1        5
#
#     version  of a control record, or of terminated transactions: an odd byte, 1 for version 1, 3 for version 2 and
#              so on up to 127
#              of a snapshot: 1 for version 1, 2 for version 2
#
# Before 0.2.0, control records and terminated transactions had no version; Avro begins there with a number that is not
# negative, which Avro writes as an even byte, so they are told apart, and are read as ever. Frames carry theirs in the
# key (:mod:`rollbridge.buffer.frames`), JSON in a field (:mod:`rollbridge_schemas`).
#
# The rule of all of them is in docs/protocol.md, "Versions and compatibility".


FRONT: Final = b"\1"
"""Prefix of control records and of terminated transactions: version 1."""
_KNOWN: Final = 1
_VERSION_BITS: Final = 0x81


def is_version(first: int) -> bool:
    """Return whether the first byte of a control record, or of terminated transactions, is a version, of any number."""
    return first & _VERSION_BITS == 1


def content_of(what: str, value: bytes) -> bytes:
    """Return the Avro of a control record, or of terminated transactions, without the version in front of it.

    Raises:
        NewerFormatError: it is of a version that is not known here; ``what`` says of what.
    """
    front = value[:1]
    if front == FRONT:
        return value[1:]
    if front and is_version(front[0]):
        version = (front[0] + 1) // 2
        raise NewerFormatError(str(rollbridge_schemas.newer_version(what, version, _KNOWN)))
    return value


def unreadable(what: str, fault: Exception) -> CorruptDataError:
    """Return the error for a record that does not decode; it says if a newer release wrote it."""
    kind = NewerFormatError if getattr(fault, "is_newer", False) else CorruptDataError
    return kind(f"{what}: {fault}")


REASON_CHARACTERS_MAX: Final = 300
"""Of what is wrong with a field: it may quote a value of any length."""

Value = TypeVar("Value")
_Schemas = Mapping[str, Any]
"""Names of fields in a record, with the schema of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAs:
    """Say that a field is stored otherwise than its name and type tell.

    Attributes:
        fields: The fields of the record that hold it; a tuple takes several.
        ascending: Whether a mapping is written in order of its keys.
        write: For what has a form of its own: its fields of the record, from the whole object.
        read: The inverse: its value, from the whole record.
    """

    fields: tuple[str, ...] = ()
    ascending: bool = False
    write: Callable[[Any], Datum] | None = None
    read: Callable[[Datum], Any] | None = None


class _Form(NamedTuple):
    """Form in which a value is stored: one field of a record, or a record with the value's fields and maybe others."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


_PLAIN: Final = _Form(lambda value: value, lambda value: value)


class Mapper(Generic[Value]):
    """Turn objects of a class into records of a schema, and back.

    Args:
        cls: A dataclass or named tuple.
        schema: The name of a schema, or the way to a record in it, such as ``commit_frame.conditions``.
    """

    def __init__(self, cls: type[Value], schema: str) -> None:
        self._cls = cls
        self.schema: Final = schema

    @cached_property
    def _form(self) -> _Form:
        name, *path = self.schema.split(".")
        found: Any = rollbridge_schemas.codec(name).schema
        for step in path:
            found = _inside(_fields(found)[step])
        return _record(self._cls, _fields(found), self.schema)

    def to_datum(self, value: Value) -> Datum:
        """Return the record of an object."""
        return cast("Datum", self._form.write(value))

    def of_datum(self, datum: Datum) -> Value:
        """Return the object that a record of the schema holds.

        Raises:
            InvalidRequestError: a value that there cannot be; names the field.
        """
        return cast("Value", self._form.read(datum))


class NodeRecord:
    """Dataclass stored in a ZooKeeper node, as plain JSON of its schema."""

    __slots__ = ()
    SCHEMA: ClassVar[str]
    _MAPPER: ClassVar[Mapper[Any]]

    def __init_subclass__(cls) -> None:
        # Called a second time for the class with slots, which ``dataclass`` puts in place of the first one.
        cls._MAPPER = Mapper(cls, cls.SCHEMA)

    def to_json(self) -> bytes:
        """Return its plain JSON.

        Raises:
            SchemaError: it does not fit its schema.
        """
        return rollbridge_schemas.codec(self.SCHEMA).to_json(self._MAPPER.to_datum(self))

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """Return the record in a node.

        Raises:
            NewerFormatError: a newer release has written it, and this one would misunderstand it.
            CorruptDataError: the node holds something else, or what there cannot be; names schema and field.
        """
        try:
            return cast("Self", cls._MAPPER.of_datum(rollbridge_schemas.codec(cls.SCHEMA).from_json(raw)))
        except (InvalidRequestError, rollbridge_schemas.SchemaError) as fault:
            raise unreadable(
                f"a ZooKeeper node does not hold a record of schema {cls.SCHEMA} that can be read", fault
            ) from fault


# How a type is stored


def _fields(schema: Any) -> _Schemas:
    return {field["name"]: field["type"] for field in schema["fields"]}


def _inside(schema: Any) -> Any:
    """Return the item type of an array, or the other member of a union with null."""
    if isinstance(schema, list):
        return next(branch for branch in schema if branch != "null")
    return schema.get("items", schema)


def _is_spread(hint: Any) -> bool:
    """Return whether a type has fields of its own that are stored by their names."""
    has_fields = is_dataclass(hint) or hasattr(hint, "_fields")
    return has_fields and not hasattr(hint, "parse") and not hasattr(hint, "from_int")


def _attributes(cls: Any) -> Iterator[tuple[str, Any, StoredAs]]:
    """Return what an object is made from: names, types, and how they are stored."""
    hints = get_type_hints(cls, include_extras=True)
    for name in [item.name for item in dataclasses.fields(cls) if item.init] if is_dataclass(cls) else cls._fields:
        hint, said = hints[name], StoredAs()
        if get_origin(hint) is Annotated:
            hint, said = get_args(hint)
        yield name, hint, said


def _record(cls: Any, schemas: _Schemas, where: str) -> _Form:
    """Return how an object is stored in the fields of a record by their names."""
    plain: list[tuple[str, str]] = []
    converted: list[tuple[str, str, _Form]] = []
    spread: list[tuple[str, _Form]] = []
    for name, hint, said in _attributes(cls):
        fields = {field: schemas[field] for field in said.fields or (name,) if field in schemas}
        if said.write is not None and said.read is not None:
            spread.append((name, _Form(said.write, said.read)))
        elif len(fields) == 1:
            ((field, schema),) = fields.items()
            form = _value(hint, schema, f"{where}.{field}", ascending=said.ascending)
            if form is _PLAIN:
                plain.append((name, field))
            else:
                converted.append((name, field, form))
        elif fields:
            spread.append((name, _of_attribute(name, _tuple(hint, fields, where))))
        elif _is_spread(hint):
            spread.append((name, _of_attribute(name, _record(hint, schemas, where))))

    def write(item: Any) -> Datum:
        datum = {field: getattr(item, name) for name, field in plain}
        for name, field, form in converted:
            datum[field] = form[0](getattr(item, name))
        for _, form in spread:
            datum |= form[0](item)
        return datum

    def read(datum: Datum) -> Any:
        values = {name: datum[field] for name, field in plain}
        place = ""
        try:
            for name, place, form in converted:
                values[name] = form[1](datum[place])
            for place, form in spread:
                values[place] = form[1](datum)
            place = ""
            return cls(**values)
        except (InvalidRequestError, ValueError, OverflowError) as fault:
            if getattr(fault, "has_place", False):
                raise
            at = f"{where}.{place}" if place else where
            raise InvalidRequestError(f"{at}: {fault!s:.{REASON_CHARACTERS_MAX}}", has_place=True) from fault

    return _Form(write, read)


def _of_attribute(name: str, form: _Form) -> _Form:
    """Return the form that writes from the object which has the value."""
    to, of = form
    return _Form(lambda item: to(getattr(item, name)), of)


def _in_field(name: str, form: _Form) -> _Form:
    """Return how a value is stored in one field of a record."""
    to, of = form
    return _Form(lambda item: {name: to(item)}, lambda datum: of(datum[name]))


def _tuple(hint: Any, schemas: _Schemas, where: str) -> _Form:
    """Return how a tuple of fixed size is stored in the fields of a record, in their order."""
    kinds = zip(get_args(hint), schemas.items(), strict=True)
    forms = [(name, _value(kind, schema, f"{where}.{name}")) for kind, (name, schema) in kinds]
    return _Form(
        lambda items: {name: form.write(item) for item, (name, form) in zip(items, forms, strict=True)},
        lambda datum: tuple(form.read(datum[name]) for name, form in forms),
    )


def _whole(hint: Any, schemas: _Schemas, where: str) -> _Form:
    """Return how a value is stored in the fields of a record, all of which are its own."""
    if _is_spread(hint):
        return _record(hint, schemas, where)
    if len(schemas) > 1:
        return _tuple(hint, schemas, where)
    ((name, schema),) = schemas.items()
    return _in_field(name, _value(hint, schema, f"{where}.{name}"))


def _value(hint: Any, schema: Any, where: str, *, ascending: bool = False) -> _Form:
    """Return how a value is stored in one field."""
    hint = getattr(hint, "__supertype__", hint)
    match schema:
        case [*_]:
            (some,) = (kind for kind in get_args(hint) if kind is not NoneType)
            form = _value(some, _inside(schema), where, ascending=ascending)
            return form if form is _PLAIN else _or_none(form)
        case {"type": "array", "items": items}:
            is_mapping = get_origin(hint) is Mapping
            return _mapping(hint, _fields(items), where, ascending) if is_mapping else _array(hint, items, where)
        case {"type": "record"}:
            return _whole(hint, _fields(schema), where)
    if hint in (str, int, float, bool):
        return _PLAIN
    if hint is bytes:
        return _Form(bytes.hex, bytes.fromhex)
    if issubclass(hint, Enum):
        return _Form(attrgetter("value"), hint)
    return _Form(str, hint.parse) if schema == "string" else _Form(int, hint.from_int)


def _or_none(form: _Form) -> _Form:
    to, of = form
    return _Form(lambda item: None if item is None else to(item), lambda raw: None if raw is None else of(raw))


def _array(hint: Any, schema: Any, where: str) -> _Form:
    to, of = form = _value(get_args(hint)[0], schema, where)
    build: Callable[[Iterable[Any]], Any] = get_origin(hint)
    arrange: Callable[[Iterable[Any]], list[Any]] = sorted if build is frozenset else list
    if form is _PLAIN:
        return _Form(arrange, build)
    return _Form(lambda items: [to(item) for item in arrange(items)], lambda raw: build(map(of, raw)))


def _mapping(hint: Any, schemas: _Schemas, where: str, ascending: bool) -> _Form:
    """Return how a mapping is stored as an array of records: a key without fields of its own takes the first one."""
    of_key, of_value = get_args(hint)
    names = [name for name, _, _ in _attributes(of_key)] if _is_spread(of_key) else [next(iter(schemas))]
    key = _whole(of_key, {name: schemas[name] for name in names}, where)
    value = _whole(of_value, {name: schema for name, schema in schemas.items() if name not in names}, where)
    arrange: Callable[[Iterable[Any]], Iterable[Any]] = sorted if ascending else iter
    return _Form(
        lambda items: [{**key.write(name), **value.write(items[name])} for name in arrange(items)],
        lambda raw: {key.read(item): value.read(item) for item in raw},
    )
