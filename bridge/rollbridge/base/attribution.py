"""The ``rollbridge`` header of records: which transaction wrote them, and their local sequence numbers.

The first record of a frame carries one header for all records of the frame. These are adjacent in one batch, even if
the leader has joined small frames of several transactions. So each header begins a *run* of as many records as it says;
the others carry nothing::

    offset  bytes  field
           +------------------------------+
    0      | 16    transaction id         |
    16     | 8     local sequence number  |  of this record, big-endian
           +------------------------------+  <- a run of one record ends here: 24 bytes
    24     | 1     version, 1             |
    25     | 1..5  records in the run     |  LEB128, 2 or more
           | ...   steps                  |  left out if all are 1
           +------------------------------+

    steps: one LEB128 number for each further record, by how much its local sequence number exceeds that of the record
    before it; 1 where the transaction wrote to no other segment in between

In a stream with ``headers=each`` every record carries the form of 24 bytes, so other readers see in each record who
wrote it. So do the records of a compacted topic, since compaction may delete the first record of a run.

Every client with write access to a segment may write such headers. A run never extends beyond its batch, where the
batch is known; no guarantee depends on that.

Source: DistributedLog transactions, "DLSN, SequenceId", which adds the local sequence number to the position. One
header for a batch, instead of one for each record, is ours.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from struct import Struct
from typing import Final, NamedTuple

from rollbridge.base.errors import InvalidRequestError
from rollbridge.base.ids import TransactionId

RECORD_HEADER: Final = "rollbridge"
"""Name of the Kafka header that begins a run."""
HEADER_VALUE: Final = Struct(">16sQ")
"""Layout of the header of a run of one record, which the header of a longer one begins with."""
HEADER_VALUE_BYTES: Final = HEADER_VALUE.size
VERSION: Final = 1
"""Version of the header after its first 24 bytes. A run of a later version is read as one of a single record."""
RUN_MAX: Final = (1 << 31) - 1
ONE_BYTE: Final = 1 << 7
"""A step below this takes one byte."""
_SEQUENCE_MAX: Final = (1 << 63) - 1
"""Largest local sequence number: 23 bits of part and 40 of count. A signed 64-bit column holds it."""
_NUMBER_BYTES_MAX: Final = 5


class Attribution(NamedTuple):
    """Records of one transaction, one behind the other."""

    transaction: bytes
    """Its id, 16 bytes."""
    first: int
    """Local sequence number of the first record."""
    records: int
    """Number of records in the run."""
    steps: Sequence[int]
    """By how much each further number exceeds the one before; empty if that is always 1."""

    def sequences(self) -> Sequence[int]:
        """Return the local sequence numbers of all records."""
        if not self.steps:
            return range(self.first, self.first + self.records)
        return array("Q", accumulate(self.steps, initial=self.first))


def pack_record_header(transaction: TransactionId, local_sequence: int) -> bytes:
    """Return the header of a run of one record."""
    return HEADER_VALUE.pack(transaction.bytes, local_sequence)


def pack_run(transaction: bytes, first: int, count: int, steps: bytes | bytearray) -> bytes:
    """Return the header of a run.

    Args:
        transaction: Its id, 16 bytes.
        first: Local sequence number of the first record.
        count: Number of records, 1 or more.
        steps: One LEB128 number for each further record, as :func:`append_step` appends them.
    """
    return HEADER_VALUE.pack(transaction, first) + pack_rest(count, steps)


def pack_rest(count: int, steps: bytes | bytearray) -> bytes:
    """Return what the header of a run has beyond that of a run of one; see :func:`pack_run`."""
    if count == 1:
        return b""
    rest = bytearray((VERSION,))
    append_step(rest, count)
    if steps.count(1) != len(steps) or len(steps) != count - 1:
        rest += steps
    return bytes(rest)


def append_step(steps: bytearray, step: int) -> None:
    """Append a number of 0 or more in LEB128."""
    while step >= ONE_BYTE:
        steps.append(step & 0x7F | 0x80)
        step >>= 7
    steps.append(step)


def unpack_run(value: bytes) -> Attribution:
    """Unpack the header of a run.

    Raises:
        InvalidRequestError: not such a value.
    """
    if len(value) < HEADER_VALUE_BYTES:
        raise InvalidRequestError(f"a {RECORD_HEADER} header has at least {HEADER_VALUE_BYTES} bytes, not {len(value)}")
    raw, first = HEADER_VALUE.unpack_from(value)
    TransactionId.from_bytes(raw)
    if first > _SEQUENCE_MAX:
        raise InvalidRequestError(f"a {RECORD_HEADER} header has a number of more than 63 bits")
    if len(value) == HEADER_VALUE_BYTES or value[HEADER_VALUE_BYTES] != VERSION:
        return Attribution(raw, first, 1, ())
    count, place = _number(value, HEADER_VALUE_BYTES + 1)
    if not 2 <= count <= RUN_MAX:
        raise InvalidRequestError(f"a {RECORD_HEADER} header is of 2 to {RUN_MAX} records, not of {count}")
    if place == len(value):
        steps: Sequence[int] = ()
        last = first + count - 1
    else:
        steps = _numbers(value, place)
        if len(steps) != count - 1:
            raise InvalidRequestError(f"a {RECORD_HEADER} header of {count} records has {len(steps)} steps")
        last = first + sum(steps)
    if last > _SEQUENCE_MAX:
        raise InvalidRequestError(f"a {RECORD_HEADER} header has a number of more than 63 bits")
    return Attribution(raw, first, count, steps)


def unpack_record_header(value: bytes) -> tuple[TransactionId, int]:
    """Unpack the transaction id and the local sequence number of the record that carries a header.

    Raises:
        InvalidRequestError: not such a value.
    """
    run = unpack_run(value)
    return TransactionId.from_bytes(run.transaction), run.first


def _numbers(value: bytes, place: int) -> Sequence[int]:
    rest = value[place:]
    if max(rest) < ONE_BYTE:
        return rest  # the usual case: each is a byte
    found: list[int] = []
    while place < len(value):
        number, place = _number(value, place)
        found.append(number)
    return found


def _number(value: bytes, place: int) -> tuple[int, int]:
    number = shift = 0
    for byte in value[place : place + 2 * _NUMBER_BYTES_MAX]:
        place += 1
        number |= (byte & 0x7F) << shift
        if byte < ONE_BYTE:
            return number, place
        shift += 7
    raise InvalidRequestError(f"a {RECORD_HEADER} header ends within a number, or has one that is too large")


def own_header(headers: Iterable[tuple[str, bytes | None]]) -> bytes | None:
    """Return the value of the first ``rollbridge`` header; None if there is none."""
    return next((value for name, value in headers if name == RECORD_HEADER and value is not None), None)
