"""One mapper between dataclasses and the records of the schemas, for every record that is not hot.

A dataclass and its Avro schema together say how each field is stored: the schema gives names and shapes, the type of
the field what its values become again.

====================================  ====================================================================
type of the field                     in the record
====================================  ====================================================================
``str``, ``int``, ``float``, ``bool``   the same
enum                                  its value
a class with ``parse``                string, as ``str()`` prints it (names, transaction ids, sequence numbers)
a class with ``from_int``             long, as ``int()`` gives it (segment ids)
``bytes``                             string, in hexadecimal
dataclass or ``NamedTuple``           record, by the names of its fields; where the schema has no field of its name,
                                      its fields stand in the record around it
``tuple[A, B]``                       record, its fields in order
``tuple[A, ...]``                     array
``frozenset[A]``                      array in ascending order
``Mapping[A, B]``                     array of records: the fields of the key, then those of the value
``A | None``                          union with null
====================================  ====================================================================

What differs from that is said at the field, ``Annotated[int, StoredAs(...)]``. A field that the schema lacks is not
stored, and has to have a default. All of it is worked out once for each class, when its first record is read or
written, and never on import.

Hot records are written by hand (:mod:`rollbridge.model.frames`, :mod:`~rollbridge.model.control`,
:mod:`~rollbridge.model.outcomes`, and the columns of :mod:`~rollbridge.model.ongoing`).

cattrs and msgspec map dataclasses as well, but by their types alone. Here a mapping is an array of records whose
field names only the schema knows, and values are spread over the record around them, so most classes would need a hook
beside the library; and importing cattrs takes as long as importing confluent_kafka.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import cached_property
from operator import attrgetter, itemgetter
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
from rollbridge.model.errors import CorruptDataError, InvalidRequestError
from rollbridge_schemas import Datum

REASON_CHARACTERS_MAX: Final = 300
"""Of what is wrong with a field: it may quote a value of any length."""

Value = TypeVar("Value")
_Schemas = Mapping[str, Any]
"""Fields of a record: their names, with the schema of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAs:
    """Say that a field is stored otherwise than its name and type tell.

    Attributes:
        fields: The fields of the record that hold it; a tuple takes several.
        ascending: Whether a mapping is written in order of its keys.
        write: Gives its fields of the record, for what has a form of its own.
        read: The inverse: the value, from the whole record.
    """

    fields: tuple[str, ...] = ()
    ascending: bool = False
    write: Callable[[Any], Datum] | None = None
    read: Callable[[Datum], Any] | None = None


class _Value(NamedTuple):
    """How one value is stored in one field."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


class _Part(NamedTuple):
    """How a value is stored in some fields of a record."""

    write: Callable[[Any], Datum]
    read: Callable[[Datum], Any]


class _FieldFault(ValueError):
    """What is wrong with a record, with the place in it."""


class Mapper(Generic[Value]):
    """Turn objects of a class into records of a schema, and back; worked out when it is first used.

    Args:
        cls: A dataclass or named tuple.
        schema: The name of a schema, or the way to a record in it, such as ``commit_frame.conditions``.
    """

    def __init__(self, cls: type[Value], schema: str) -> None:
        self._cls = cls
        self._schema = schema

    @cached_property
    def _part(self) -> _Part:
        name, *path = self._schema.split(".")
        found: Any = rollbridge_schemas.codec(name).schema
        for step in path:
            found = _record_in(_fields(found)[step])
        return _record(self._cls, _fields(found), self._schema)

    def to_datum(self, value: Value) -> Datum:
        """Return the record of an object."""
        return self._part.write(value)

    def of_datum(self, datum: Datum) -> Value:
        """Return the object that a record of the schema holds.

        Raises:
            InvalidRequestError: a value that there cannot be; names the field.
        """
        try:
            return cast("Value", self._part.read(datum))
        except _FieldFault as fault:
            raise InvalidRequestError(str(fault)) from fault


class NodeRecord:
    """A dataclass that stands in a ZooKeeper node, as plain JSON of its schema."""

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
            CorruptDataError: the node holds something else, or what there cannot be; names schema and field.
        """
        try:
            return cast("Self", cls._MAPPER.of_datum(rollbridge_schemas.codec(cls.SCHEMA).from_json(raw)))
        except (InvalidRequestError, rollbridge_schemas.SchemaError) as fault:
            raise CorruptDataError(
                f"a ZooKeeper node does not hold a record of schema {cls.SCHEMA}: {fault}"
            ) from fault


# --------------------------------------------------------------------------------------------------------------------
# Working it out, from a type and a schema.


def _fields(schema: Any) -> _Schemas:
    return {field["name"]: field["type"] for field in schema["fields"]}


def _record_in(schema: Any) -> Any:
    """Return the record in an array or a union."""
    match schema:
        case {"items": items}:
            return _record_in(items)
        case [*branches]:
            return next(branch for branch in branches if branch != "null")
    return schema


def _is_spread(hint: Any) -> bool:
    """Return whether a type has fields of its own that are stored by their names."""
    whole = is_dataclass(hint) or hasattr(hint, "_fields")
    return whole and not hasattr(hint, "parse") and not hasattr(hint, "from_int")


def _attributes(cls: Any) -> list[tuple[str, Any, bool]]:
    """Return what a dataclass or named tuple is made from: names, types, and whether there is a default."""
    hints = get_type_hints(cls, include_extras=True)
    if not is_dataclass(cls):
        return [(name, hints[name], name in cls._field_defaults) for name in cls._fields]
    return [
        (
            item.name,
            hints[item.name],
            item.default is not dataclasses.MISSING or item.default_factory is not dataclasses.MISSING,
        )
        for item in dataclasses.fields(cls)
        if item.init
    ]


def _record(cls: Any, schemas: _Schemas, where: str) -> _Part:
    """Return how an object is stored in the fields of a record by their names."""
    plain: list[tuple[str, str]] = []
    parts: list[tuple[str, _Part]] = []
    for name, hint, has_default in _attributes(cls):
        form = StoredAs()
        if get_origin(hint) is Annotated:
            hint, *said = get_args(hint)
            form = next((item for item in said if isinstance(item, StoredAs)), form)
        fields = form.fields or (name,)
        if form.write is not None and form.read is not None:
            parts.append((name, _Part(form.write, form.read)))
        elif fields[0] not in schemas:
            if _is_spread(hint):
                parts.append((name, _record(hint, schemas, where)))
            elif not has_default:
                raise TypeError(f"schema {where} has no field for {cls.__name__}.{name}")
        elif len(fields) > 1:
            parts.append((name, _tuple(hint, {field: schemas[field] for field in fields}, where)))
        else:
            (field,) = fields
            value = _value(hint, schemas[field], f"{where}.{field}", ascending=form.ascending)
            if value is None:
                plain.append((name, field))
            else:
                parts.append((name, _field(field, value)))

    def write(item: Any) -> Datum:
        datum = {field: getattr(item, name) for name, field in plain}
        for name, part in parts:
            datum |= part.write(getattr(item, name))
        return datum

    def read(datum: Datum) -> Any:
        values = {name: datum[field] for name, field in plain}
        place = where
        try:
            for name, part in parts:
                place = f"{where}.{name}"
                values[name] = part.read(datum)
            place = where
            return cls(**values)
        except _FieldFault:
            raise
        except (InvalidRequestError, ValueError) as fault:
            raise _FieldFault(f"{place}: {fault!s:.{REASON_CHARACTERS_MAX}}") from fault

    return _Part(write, read)


def _field(name: str, value: _Value | None) -> _Part:
    """Return how a value is stored in one field of a record."""
    if value is None:
        return _Part(lambda item: {name: item}, itemgetter(name))
    to, of = value
    return _Part(lambda item: {name: to(item)}, lambda datum: of(datum[name]))


def _part(hint: Any, schemas: _Schemas, where: str) -> _Part:
    """Return how a value is stored in the fields of a record, of which it takes all."""
    if _is_spread(hint):
        return _record(hint, schemas, where)
    if get_origin(hint) is tuple and get_args(hint)[-1] is not Ellipsis:
        return _tuple(hint, schemas, where)
    ((name, schema),) = schemas.items()
    return _field(name, _value(hint, schema, f"{where}.{name}"))


def _tuple(hint: Any, schemas: _Schemas, where: str) -> _Part:
    """Return how a tuple of fixed size is stored in the fields of a record, in their order."""
    kinds = get_args(hint)
    parts = [
        _field(name, _value(kind, schema, f"{where}.{name}"))
        for kind, (name, schema) in zip(kinds, schemas.items(), strict=True)
    ]

    def write(items: Any) -> Datum:
        datum: Datum = {}
        for item, part in zip(items, parts, strict=True):
            datum |= part.write(item)
        return datum

    return _Part(write, lambda datum: tuple(part.read(datum) for part in parts))


def _value(hint: Any, schema: Any, where: str, *, ascending: bool = False) -> _Value | None:
    """Return how a value is stored in one field; None if it is stored as it is."""
    hint = getattr(hint, "__supertype__", hint)
    match schema:
        case [*_]:
            (whole,) = (kind for kind in get_args(hint) if kind is not NoneType)
            return _or_none(_value(whole, _record_in(schema), where, ascending=ascending))
        case {"type": "array", "items": items}:
            if get_origin(hint) is not None and issubclass(get_origin(hint), Mapping):
                return _mapping(hint, _fields(items), where, ascending=ascending)
            return _array(hint, items, where)
        case {"type": "record"}:
            return _Value(*_part(hint, _fields(schema), where))
    if hint in (str, int, float, bool):
        return None
    if hint is bytes:
        return _Value(bytes.hex, bytes.fromhex)
    if issubclass(hint, Enum):
        return _Value(attrgetter("value"), hint)
    return _Value(str, hint.parse) if schema == "string" else _Value(int, hint.from_int)


def _or_none(value: _Value | None) -> _Value | None:
    if value is None:
        return None
    to, of = value
    return _Value(lambda item: None if item is None else to(item), lambda raw: None if raw is None else of(raw))


def _array(hint: Any, schema: Any, where: str) -> _Value:
    value = _value(get_args(hint)[0], schema, where)
    build: Callable[[Iterable[Any]], Any] = get_origin(hint)
    arrange: Callable[[Iterable[Any]], list[Any]] = sorted if build is frozenset else list
    if value is None:
        return _Value(arrange, build)
    to, of = value
    return _Value(lambda items: [to(item) for item in arrange(items)], lambda raw: build(map(of, raw)))


def _mapping(hint: Any, schemas: _Schemas, where: str, *, ascending: bool) -> _Value:
    """Return how a mapping is stored as an array of records; what has no fields of its own takes the next one."""
    of_key, of_value = get_args(hint)
    names = [name for name, _, _ in _attributes(of_key)] if _is_spread(of_key) else [next(iter(schemas))]
    key = _part(of_key, {name: schemas[name] for name in names}, where)
    value = _part(of_value, {name: schema for name, schema in schemas.items() if name not in names}, where)
    arrange: Callable[[Iterable[Any]], Iterable[Any]] = sorted if ascending else iter
    return _Value(
        lambda items: [{**key.write(name), **value.write(items[name])} for name in arrange(items)],
        lambda raw: {key.read(item): value.read(item) for item in raw},
    )
