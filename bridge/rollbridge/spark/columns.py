"""The columns of ``format("rollbridge")``: names, types, and which of them have to be asked for."""

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
    """What is always there, and the columns on request that are asked for."""
    wanted = set(asked)
    return T.StructType(
        [T.StructField(name, kind) for name, kind in _COLUMNS.items() if name not in _ON_REQUEST or name in wanted]
    )


def check_schema(schema: StructType) -> list[str]:
    """The columns that a schema, perhaps one that the user gave, has; ConfigError names all that are wrong."""
    known = {name.lower(): name for name in _COLUMNS}
    faults, names = [], []
    for field in schema.fields:
        name = known.get(field.name.lower())
        if name is None:
            faults.append(f"there is no column {field.name}; there are {', '.join(_COLUMNS)}")
        elif _plain(field.dataType) != _plain(_COLUMNS[name]):
            wanted, given = _COLUMNS[name].simpleString(), field.dataType.simpleString()
            faults.append(f"column {name} is of type {wanted}, not {given}: cast it behind the source")
        else:
            names.append(name)
    if faults:
        raise ConfigError("schema: " + "; ".join(faults))
    return names


def _plain(kind: T.DataType) -> str:
    """A type without what makes no difference: whether there may be nulls."""
    return str(kind.simpleString())
