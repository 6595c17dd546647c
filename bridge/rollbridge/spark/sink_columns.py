"""The columns of a data frame as records: those of Spark's Kafka sink, checked before anything is written.

``value`` is needed; ``key``, ``headers``, ``timestamp`` and ``topic`` may be there. Other columns are left out, as
Spark's Kafka sink does, so that what a Kafka source reads can be written as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollbridge.errors import InvalidRequestError, RowRefused
from rollbridge.model.sequence import RECORD_HEADER
from rollbridge.spark.sink_batches import Numbers, Rows, encode_headers

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_TEXT: Final = ("string", "binary")
_HEADERS: Final = "array<struct<key:string,value:binary>>"
_US_PER_MS: Final = 1_000


@dataclass(frozen=True, slots=True)
class Columns:
    """Where in a record batch the columns stand; None: there is no such column."""

    value: int
    key: int | None
    headers: int | None
    timestamp: int | None
    stream: int | None
    """Names the stream of each row; None: all rows go to the same one."""

    @classmethod
    def of(cls, schema: StructType, streams: Sequence[str], *, include_headers: bool) -> Columns:
        """Find the columns.

        Args:
            schema: Of the data frame.
            streams: Where it may be written to. Of several, the column ``topic`` names one for each row.
            include_headers: Whether the column ``headers`` is written.

        Raises:
            InvalidRequestError: one is missing, there twice, or of another type; all are named.
        """
        faults: list[str] = []
        places: dict[str, int] = {}
        for place, field in enumerate(schema.fields):
            name = field.name.lower()
            if name in places:
                faults.append(f"column {name} is there twice")
            places[name] = place

        def find(name: str, *types: str) -> int | None:
            place = places.get(name)
            if place is not None:
                found = schema.fields[place].dataType.simpleString()
                if found.partition("(")[0] not in types and found not in types:
                    faults.append(f"column {name} is {found}, but {' or '.join(types)} is expected")
            return place

        if "value" not in places:
            faults.append(f"column value is missing; there are {', '.join(places) or 'none'}")
        found = cls(
            value=find("value", *_TEXT, "varchar", "char") or 0,
            key=find("key", *_TEXT, "varchar", "char"),
            headers=find("headers", _HEADERS) if include_headers else None,
            timestamp=find("timestamp", "timestamp"),
            stream=find("topic", "string", "varchar", "char") if len(streams) > 1 else None,
        )
        if len(streams) > 1 and "topic" not in places:
            faults.append(f"column topic is missing, which says for each row to which of {', '.join(streams)} it goes")
        if faults:
            raise InvalidRequestError(f"{'; '.join(faults)}; nothing was written")
        return found

    def rows(self, batch: pa.RecordBatch, first: int, now_ms: int) -> Rows:
        """The rows of a batch as records.

        Args:
            batch: Of the data frame.
            first: Number of its first row in its partition.
            now_ms: The time of records that have none.

        Raises:
            RowRefused: one can not be written.
        """
        size = batch.num_rows
        headers = None
        if self.headers is not None:
            headers = encode_headers(list(_headers(batch.column(self.headers), first)))
        return Rows.of(
            pa.nulls(size, pa.binary()) if self.key is None else _binary(batch.column(self.key)),
            _binary(batch.column(self.value)),
            np.arange(first, first + size, dtype=np.int64),
            self._timestamps(batch, first, now_ms),
            headers,
        )

    def stream_places(self, batch: pa.RecordBatch, streams: Sequence[str], first: int) -> Numbers:
        """For each row the place of its stream among ``streams``.

        Raises:
            RowRefused: a row names none, or another one.
        """
        assert self.stream is not None
        named = batch.column(self.stream)
        places = pc.index_in(named, pa.array(streams, named.type)).fill_null(-1).to_numpy(zero_copy_only=False)
        unknown = np.flatnonzero(places < 0)
        if len(unknown):
            name = named[int(unknown[0])].as_py()
            what = "null" if name is None else repr(name)
            raise RowRefused(
                f"its topic is {what}, but one of {', '.join(streams)} is expected", row=first + int(unknown[0])
            )
        return places.astype(np.int64)

    def named_times(self, batch: pa.RecordBatch) -> Numbers | None:
        """The time that each row names, in ms since 1970; -1 where it names none. None: there is no such column."""
        if self.timestamp is None:
            return None
        column = batch.column(self.timestamp).cast(pa.int64())
        found: Numbers = column.fill_null(-1).to_numpy(zero_copy_only=False) // _US_PER_MS
        return found

    def _timestamps(self, batch: pa.RecordBatch, first: int, now_ms: int) -> Numbers:
        if self.timestamp is None:
            return np.full(batch.num_rows, now_ms, np.int64)
        column = batch.column(self.timestamp).cast(pa.int64())
        found = column.fill_null(now_ms * _US_PER_MS).to_numpy(zero_copy_only=False) // _US_PER_MS
        early = np.flatnonzero(found < 0)
        if len(early):
            raise RowRefused(f"its timestamp of {found[early[0]]} ms lies before 1970", row=first + int(early[0]))
        return found


def _binary(column: Any) -> pa.BinaryArray:
    """Text as its bytes; Spark may hand out columns with wide offsets."""
    if pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    return column if pa.types.is_binary(column.type) else column.cast(pa.binary())


def _headers(column: Any, first: int) -> Iterator[list[tuple[str, bytes | None]]]:
    for row, headers in enumerate(column.to_pylist(), first):
        found = [(header["key"], header["value"]) for header in headers or () if header is not None]
        for name, _ in found:
            if name is None:
                raise RowRefused("one of its headers has no name", row=row)
            if name == RECORD_HEADER:
                raise RowRefused(f"the header {RECORD_HEADER!r} is rollbridge's own; name it otherwise", row=row)
        yield found
