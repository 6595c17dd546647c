"""The columns of ``format("rollbridge")``: their names and types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from pyspark.sql import types as T

from rollbridge.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_HEADERS: Final = T.ArrayType(
    T.StructType([T.StructField("key", T.StringType()), T.StructField("value", T.BinaryType())])
)
_COLUMNS: Final[Mapping[str, T.DataType]] = {
    "key": T.BinaryType(),
    "value": T.BinaryType(),
    "topic": T.StringType(),
    "partition": T.IntegerType(),
    "offset": T.LongType(),
    "timestamp": T.TimestampType(),
    "timestampType": T.IntegerType(),
    "headers": _HEADERS,
    "stream": T.StringType(),
    "segment": T.LongType(),
    "epoch": T.LongType(),
    "sequenceId": T.LongType(),
    "transactionId": T.StringType(),
    "localSequence": T.LongType(),
    "commitPosition": T.LongType(),
    "committed": T.BooleanType(),
}
HEADERS: Final = ("headers",)
TRANSACTION: Final = ("transactionId", "localSequence")
COMMIT_POSITION: Final = ("commitPosition",)
PREVIEW: Final = ("committed",)
_ON_REQUEST: Final = frozenset((*HEADERS, *TRANSACTION, *COMMIT_POSITION, *PREVIEW))


def schema_of(asked: Iterable[str]) -> StructType:
    """Return the columns that are always there, and those on request that are asked for."""
    wanted = set(asked)
    return T.StructType(
        [T.StructField(name, kind) for name, kind in _COLUMNS.items() if name not in _ON_REQUEST or name in wanted]
    )


def check_schema(schema: StructType) -> list[str]:
    """Return the names of a schema's columns; the schema may be the user's.

    Raises:
        ConfigError: columns are unknown or of another type; all of them are named.
    """
    known = {name.lower(): name for name in _COLUMNS}
    faults, names = [], []
    for field in schema.fields:
        name = known.get(field.name.lower())
        if name is None:
            faults.append(f"there is no column {field.name}; the columns are {', '.join(_COLUMNS)}")
        elif _plain(field.dataType) != _plain(_COLUMNS[name]):
            wanted, given = _COLUMNS[name].simpleString(), field.dataType.simpleString()
            faults.append(f"column {name} is of type {wanted}, not {given}: cast it behind the source")
        else:
            names.append(name)
    if faults:
        raise ConfigError("schema: " + "; ".join(faults))
    return names


def _plain(kind: T.DataType) -> str:
    """Return a type without its nullability, which makes no difference."""
    return str(kind.simpleString())


# Records to Arrow columns
