"""The Avro schemas of every record that rollbridge stores, and their codecs.

Records in Kafka are Avro binary without a container or a registry: the topic says which schema applies. Records in
ZooKeeper are the same data as plain JSON, so that any ZooKeeper shell shows them. Every field has a ``doc``.

Each schema has a ``version``. It rises when readers of the versions before would misunderstand a record; they refuse
it then (:attr:`SchemaError.is_newer`). JSON carries it as a field of its own; binary records carry it in front, where
each has a place for it (docs/protocol.md, "Versions and compatibility"). Fields are added without a new version: at
the end, with a default and ``"added": true``. Readers that do not know them skip them. A field in JSON that must not
be skipped has a version of its own (``since``), which records with that field carry; every reader reads the others.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any, Final, cast

import fastavro

Datum = dict[str, Any]
_Fill = Callable[[Any, bool], Any]
"""Takes a value and whether unknown fields are dropped or refused, and gives the value with its defaults."""

NAMES: Final = (
    "abort_frame",
    "answer",
    "begin_frame",
    "client_session",
    "cluster",
    "commit_frame",
    "committing",
    "control_record",
    "controller_epoch",
    "coordinator",
    "ended_transactions",
    "epoch",
    "extend_frame",
    "group",
    "late",
    "log_marks",
    "merging",
    "ongoing_transactions",
    "request",
    "retention",
    "savepoint_frame",
    "scaling",
    "scaling_waits",
    "snapshot_indexes",
    "snapshot_segment",
    "stream",
    "stream_fault",
    "terminated_transactions",
    "transaction",
    "truncation",
)
"""Names of all schemas; each is a file ``NAME.avsc`` of this package."""


VERSION_FIELD: Final = "version"
"""Name of the field of a record in JSON that holds its version; 1 where it is missing, as before there were any."""


class SchemaError(ValueError):
    """Bytes that are not a record of the schema, or a record that does not fit it."""

    is_newer = False
    """True of a record of a version that this code does not know; what it says cannot be told."""


def newer_version(what: str, version: int, known: int) -> SchemaError:
    """Return the error of a record of a version that is not known."""
    fault = SchemaError(f"{what} has version {version}, and this release knows {known} at most: upgrade it")
    fault.is_newer = True
    return fault


class SchemaCodec:
    """Encode and decode the records of one schema."""

    def __init__(self, name: str) -> None:
        text = resources.files(__name__).joinpath(f"{name}.avsc").read_text(encoding="utf-8")
        raw = json.loads(text)
        self.name = name
        self._since: Final[dict[str, int]] = {
            field["name"]: field["since"] for field in raw["fields"] if "since" in field
        }
        self._base: Final[int] = raw["version"]
        self.version: Final[int] = max([self._base, *self._since.values()])
        self.schema: Final = fastavro.parse_schema(raw)
        self._earlier: Final = _earlier_versions(raw)
        self._fill: Final = _record_filler(cast("Any", self.schema)["fields"], name)
        self._sparse: Final = {field["name"]: field["default"] for field in raw["fields"] if field.get("sparse")}

    def encode(self, datum: Datum) -> bytes:
        """Return the Avro binary of a record; missing fields take their defaults.

        Raises:
            SchemaError: the record does not fit the schema.
        """
        out = io.BytesIO()
        try:
            fastavro.schemaless_writer(out, self.schema, datum)
        except Exception as fault:
            raise SchemaError(f"not a record of schema {self.name}: {fault}") from fault
        return out.getvalue()

    def decode(self, raw: bytes) -> Datum:
        """Return the record in ``raw``; fields that a newer version added at its end are skipped.

        Raises:
            SchemaError: truncated or foreign bytes; says how far it got.
        """
        try:
            return self._decode(raw, self.schema)[0]
        except SchemaError:
            for schema, lacking in self._earlier:
                try:
                    datum, end = self._decode(raw, schema)
                except SchemaError:
                    continue
                if end == len(raw):  # otherwise it is a later one that was cut
                    return {**datum, **copy.deepcopy(lacking)}
            raise

    def _decode(self, raw: bytes, schema: Any) -> tuple[Datum, int]:
        """Return a record, and where it ends."""
        source = io.BytesIO(raw)
        try:
            datum = fastavro.schemaless_reader(source, schema, None)
        except Exception as fault:
            raise SchemaError(
                f"{len(raw)} bytes are not a record of schema {self.name} (offset {source.tell()}): {fault!r}"
            ) from fault
        return cast("Datum", datum), source.tell()

    def to_json(self, datum: Datum) -> bytes:
        """Return the plain JSON of a record, with its version in front and defaults filled in, in the schema's order.

        Left out are fields that the schema calls ``sparse``, while they have their defaults.

        Raises:
            SchemaError: the record does not fit the schema.
        """
        whole = self._complete(datum, drop_unknown=False)
        for name, default in self._sparse.items():
            if whole[name] == default:
                del whole[name]
        version = max([self._base, *(since for name, since in self._since.items() if name in whole)])
        return json.dumps({VERSION_FIELD: version, **whole}, ensure_ascii=False).encode()

    def from_json(self, raw: bytes) -> Datum:
        """Return the record in plain JSON; unknown fields are dropped, missing ones take their defaults.

        Raises:
            SchemaError: its version says that it cannot be read like that, with ``is_newer``; not JSON in UTF-8, text
                that is none (lone surrogates), or not a record of the schema.
        """
        try:
            text = raw.decode()  # by itself, the parser takes UTF-16 as well, and surrogates
            datum = json.loads(text)
            if "\\u" in text:
                json.dumps(datum, ensure_ascii=False).encode()  # an answer with it has to be written
        except (ValueError, RecursionError) as fault:
            raise SchemaError(f"not JSON where a record of schema {self.name} was expected: {fault}") from fault
        if not isinstance(datum, dict):
            raise SchemaError(f"not a record of schema {self.name} but {type(datum).__name__}")
        version = datum.get(VERSION_FIELD, 1)
        if type(version) is not int or version < 1:
            raise SchemaError(f"a record does not fit schema {self.name}: its version is {version!r:.50}")
        if version > self.version:
            raise newer_version(f"a record of schema {self.name}", version, self.version)
        return self._complete(datum, drop_unknown=True)

    def _complete(self, datum: Datum, *, drop_unknown: bool) -> Datum:
        whole = cast("Datum", self._fill(datum, drop_unknown))
        if not fastavro.validate(whole, self.schema, raise_errors=False):
            raise SchemaError(f"a record does not fit schema {self.name}: {whole!r:.300}")
        return whole


def _earlier_versions(raw: Datum) -> list[tuple[Any, Datum]]:
    """Return the schema of each earlier version, the latest first, with the defaults of the fields that it lacks."""
    versions = []
    fields = list(raw["fields"])
    lacking: Datum = {}
    while fields[-1].get("added"):
        field = fields.pop()
        lacking = {field["name"]: field["default"], **lacking}
        versions.append((fastavro.parse_schema({**raw, "fields": list(fields)}), lacking))
    return versions


def _filler(schema: Any, where: str) -> _Fill | None:
    """Return a function that fills in defaults of every record in a value of a schema; None if there are none.

    Built once per schema, as nodes are read often. Values of another type are left to validation.
    """
    match schema:
        case {"type": "record", "fields": fields}:
            return _record_filler(fields, where)
        case {"type": "array", "items": items}:
            fill = _filler(items, where)
            if fill is None:  # still a list of its own, as a default must not be shared
                return lambda value, _: list(value) if isinstance(value, list) else value
            return lambda value, drop: [fill(item, drop) for item in value] if isinstance(value, list) else value
        case [*branches]:
            # Our unions are null and one other branch.
            return _filler(next((branch for branch in branches if branch != "null"), "null"), where)
        case _:
            return None


def _record_filler(fields: Any, where: str) -> _Fill:
    known = {
        field["name"]: ("default" in field, field.get("default"), _filler(field["type"], f"{where}.{field['name']}"))
        for field in fields
    }

    def fill(value: Any, drop_unknown: bool) -> Any:
        if not isinstance(value, dict):
            return value
        if not drop_unknown and not value.keys() <= known.keys():
            unknown = next(name for name in value if name not in known)
            raise SchemaError(f"a record of schema {where} has no field {unknown!r}")
        whole: Datum = {}
        for name, (has_default, default, fill_part) in known.items():
            if name in value:
                part = value[name]
            elif has_default:
                part = default
            else:
                raise SchemaError(f"a record of schema {where} lacks {name!r}")
            whole[name] = part if fill_part is None else fill_part(part, drop_unknown)
        return whole

    return fill


@cache
def codec(name: str) -> SchemaCodec:
    """Return the codec of a schema by its name (one of :data:`NAMES`)."""
    return SchemaCodec(name)
