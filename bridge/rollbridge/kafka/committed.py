"""What a ``read_committed`` reader sees in the bytes of a log: the records of batches that were not aborted.

A broker answers a fetch with whole batches, markers included, up to the last stable offset, and with a list of the
aborted transactions among them; sorting these out is up to the client.

Source: KIP-98, "Consumer: Reading transactional messages"; Kafka's ``Fetcher`` does the same.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Final, NamedTuple

from rollbridge.errors import CorruptDataError
from rollbridge.kafka.batches import BatchHeader, Record, complete_batches, parse_header, read_records
from rollbridge.kafka.foreign_names import read_any_records

_CONTROL_KEY: Final = struct.Struct(">hh")
_ABORT: Final = 0


class AbortedSpan(NamedTuple):
    """An aborted native transaction, as a broker lists it: of which producer, and from which offset on."""

    producer_id: int
    first_offset: int


class Committed(NamedTuple):
    """Records of a stretch of log that were committed.

    Attributes:
        records: The records.
        end: The offset up to which the log has been looked at.
        aborted: How many batches of aborted records are among it.
        epoch: Leader epoch under which its last batch was appended; -1 if it has none.
    """

    records: list[Record]
    end: int
    aborted: int
    epoch: int


def committed_records(raw: bytes, start: int, aborted: Iterable[AbortedSpan]) -> Committed:
    """The committed records from ``start`` on.

    Args:
        raw: Batches one after the other; the last may be cut short, and is left out then.
        start: Records before it are left out; the first batch may begin earlier.
        aborted: Transactions that were aborted and reach into the stretch.

    Raises:
        CorruptDataError: It is no sequence of batches, or a record does not parse.
    """
    records: list[Record] = []
    end, aborted_batches, epoch = start, 0, -1
    for header, batch, standing in judged_batches(raw, aborted):
        if standing is Standing.COMMITTED:
            records.extend(record for record in read_any_records(batch) if record.offset >= start)
        aborted_batches += standing is Standing.ABORTED
        end = max(end, header.base_offset + header.last_offset_delta + 1)
        epoch = header.partition_leader_epoch
    return Committed(records, end, aborted_batches, epoch)


class Standing(Enum):
    """What a batch of a log is to a ``read_committed`` reader."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    MARKER = "marker"


def judged_batches(
    raw: bytes | memoryview, aborted: Iterable[AbortedSpan]
) -> Iterator[tuple[BatchHeader, memoryview, Standing]]:
    """The batches of a stretch of log, in order, and whether a reader sees them.

    Args:
        raw: Batches one after the other; the last may be cut short, and is left out then.
        aborted: Transactions that were aborted and reach into the stretch.

    Raises:
        CorruptDataError: While iterating: it is no sequence of batches.
    """
    spans = deque(sorted(aborted, key=lambda span: span.first_offset))
    gone: set[int] = set()
    for batch in complete_batches(raw):
        header = parse_header(batch)
        while spans and spans[0].first_offset <= header.base_offset + header.last_offset_delta:
            gone.add(spans.popleft().producer_id)
        if header.is_control:
            if _is_abort(batch):
                gone.discard(header.producer_id)
            yield header, batch, Standing.MARKER
        else:
            yield header, batch, Standing.ABORTED if _is_gone(header, gone) else Standing.COMMITTED


def _is_gone(header: BatchHeader, gone: set[int]) -> bool:
    return header.is_transactional and header.producer_id in gone


def _is_abort(batch: memoryview) -> bool:
    for record in read_records(batch):
        if record.key is None or len(record.key) < _CONTROL_KEY.size:
            raise CorruptDataError("a control batch holds a record without a control key")
        return bool(_CONTROL_KEY.unpack_from(record.key)[1] == _ABORT)
    return False
