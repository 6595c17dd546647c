"""DLSN: where a committed record stands, ordered along the lineage of its key; and the header that records carry.

Source: DistributedLog transactions, "DLSN, SequenceId": the position gets the local sequence number as a further field.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from struct import Struct
from typing import Final, Self

from rollbridge.model.errors import InvalidRequestError
from rollbridge.model.identifiers import SegmentId, TransactionId

RECORD_HEADER: Final = "rollbridge"
"""Name of the Kafka header that each record of a transaction carries: 16 bytes of id, 8 of local sequence."""

TRANSACTION_ID_HEADER: Final = "rollbridge-txid"
"""Name of the Kafka header under which the transaction id that a user gave a record is kept: 8 bytes, big-endian."""

_DLSN: Final = re.compile(r"([0-9]{1,10})-([0-9]{1,10}):([0-9]{1,19}):([0-9]{1,20})")
HEADER_VALUE: Final = Struct(">16sQ")
"""Layout of the header's value: the transaction id's 16 bytes, the local sequence number."""
HEADER_VALUE_BYTES: Final = HEADER_VALUE.size


@dataclass(frozen=True, slots=True, order=True)
class DLSN:
    """Position of a committed record: epoch and number of its segment, offset in the topic, local sequence.

    Segments of one key's lineage have rising epochs, so DLSNs of one key sort in the order of its records.
    """

    epoch: int
    number: int
    offset: int
    local_sequence: int = 0

    @classmethod
    def of(cls, segment: SegmentId, offset: int, local_sequence: int = 0) -> Self:
        """Build from a segment id."""
        return cls(segment.epoch, segment.number, offset, local_sequence)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse what ``str()`` prints."""
        match = _DLSN.fullmatch(text)
        if match is None:
            raise InvalidRequestError(
                f"{text!r} is not a DLSN: EPOCH-NUMBER:OFFSET:LOCAL is expected, such as 4-0:17:3"
            )
        return cls(*map(int, match.groups()))

    @property
    def segment(self) -> SegmentId:
        """The segment that holds the record."""
        return SegmentId.of(self.number, self.epoch)

    def __str__(self) -> str:
        return f"{self.epoch}-{self.number}:{self.offset}:{self.local_sequence}"


def pack_record_header(transaction: TransactionId, local_sequence: int) -> bytes:
    """The value of the ``rollbridge`` header of a record."""
    return HEADER_VALUE.pack(transaction.bytes, local_sequence)


def unpack_record_header(value: bytes) -> tuple[TransactionId, int]:
    """Transaction id and local sequence number of a record's ``rollbridge`` header.

    Raises:
        InvalidRequestError: not such a value.
    """
    if len(value) != HEADER_VALUE_BYTES:
        raise InvalidRequestError(f"a {RECORD_HEADER} header has {HEADER_VALUE_BYTES} bytes, not {len(value)}")
    raw, local = HEADER_VALUE.unpack(value)
    return TransactionId.from_bytes(raw), local
