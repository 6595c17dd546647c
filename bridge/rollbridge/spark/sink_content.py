"""What the rows of a task amount to, so that a replay can be compared with what was committed: a number and a digest.

Each record as it is written has a hash, of its stream, key, value, headers and event time, and their sum is the
digest: it is the same in whatever order, partitions and batches the rows come, and a row that comes twice counts twice.
What differs from run to run is left out: the part and the number of a record, and the time of a row that names none.

The digest of a micro-batch is compared with one that another version may have put on record, so it never changes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import repeat
from typing import Final

import numpy as np
import pyarrow as pa
from xxhash import xxh64_intdigest

from rollbridge.model.joint import JointContent
from rollbridge.model.keyspace import HASH_SEED
from rollbridge.spark.sink_batches import Numbers, Rows
from rollbridge.spark.sink_columns import Columns

_NULL: Final = np.uint64(0x6E75_6C6C_6E75_6C6C)
"""Stands for the hash of what is null."""
_FIRST, _SECOND, _STEP = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15)


def hashes_of(column: pa.BinaryArray) -> Numbers:
    """xxHash64 of each value, with the seed by which keys choose their segments."""
    if column.null_count == len(column):
        return np.full(len(column), _NULL)
    present = column.fill_null(b"") if column.null_count else column
    values = present.to_numpy(zero_copy_only=False).tolist()
    found = np.fromiter(map(xxh64_intdigest, values, repeat(HASH_SEED)), np.uint64, len(column))
    if column.null_count:
        found[column.is_null().to_numpy(zero_copy_only=False)] = _NULL
    return found


class PartitionReader:
    """Reads the rows of a partition of a data frame, and adds up what they amount to.

    Attributes:
        content: Of all rows so far.
    """

    def __init__(self, columns: Columns, streams: Sequence[str]) -> None:
        """Begin; ``columns`` are where they stand, and ``streams`` where rows may go."""
        self.content = JointContent()
        self._columns = columns
        self._streams = streams
        self._hashes = np.array([xxh64_intdigest(stream.encode(), HASH_SEED) for stream in streams], np.uint64)

    def read(self, batch: pa.RecordBatch) -> tuple[Rows, Numbers, Numbers | None]:
        """The rows of a batch, the hashes of their keys, and the places of their streams; None: there is only one.

        Raises:
            RowRefused: one of them can not be written.
        """
        first = self.content.records
        rows = self._columns.rows(batch, first, int(time.time() * 1000))
        places = None if len(self._streams) == 1 else self._columns.stream_places(batch, self._streams, first)
        keys = hashes_of(rows.keys)
        found = _mixed(keys ^ (self._hashes[0] if places is None else self._hashes[places]))
        found = _mixed(found ^ hashes_of(rows.values))
        if rows.headers is not None:
            some = rows.header_counts > 0
            if some.any():
                found[some] = _mixed(found[some] ^ hashes_of(rows.headers)[some])
        times = self._columns.named_times(batch)
        if times is not None:
            found = _mixed(found ^ times.astype(np.uint64))
        self.content += JointContent(len(rows), int(_mixed(found).sum(dtype=np.uint64)))
        return rows, keys, places


def _mixed(numbers: Numbers) -> Numbers:
    """Each number's bits spread over all of it. Source: the finalizer of SplitMix64."""
    found = numbers + _STEP
    found ^= found >> np.uint64(30)
    found *= _FIRST
    found ^= found >> np.uint64(27)
    found *= _SECOND
    found ^= found >> np.uint64(31)
    return found
