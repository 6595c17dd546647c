"""SN: the sequence number by which a conditional write names the record that it expects to be the last one.

======================  ================================================
member                  text
======================  ================================================
``dlsn``                ``dlsn=EPOCH-NUMBER:OFFSET:LOCAL``
``transaction_id``      ``txid=N``, the long that a user gave the record
``sequence_id``         ``seq=N``, grows along the lineage of a segment
======================  ================================================

Members that are given are joined by commas: ``dlsn=4-0:17:0,seq=1017``. All that are given must match. ``any`` is the
SN with none of them, which everything matches; ``empty`` means "nothing has been written yet".

Source: DistributedLog CAS proposal, "struct SN { optional DLSN dlsn; optional long transactionId; optional long
sequenceId }". ``empty`` is added, for the first write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct
from typing import Final, Self

from rollbridge.base.errors import InvalidRequestError
from rollbridge.base.ids import EPOCH_MAX, SEGMENT_NUMBER_MAX, SegmentId

# DLSN, the place of a committed record in the order of its key's lineage.
# Source: DistributedLog transactions, "DLSN, SequenceId", which adds the local sequence number to the position.

TRANSACTION_ID_HEADER: Final = "rollbridge-txid"
"""Name of the Kafka header under which the transaction id that a user gave a record is kept: 8 bytes, big-endian."""

_DLSN: Final = re.compile(r"([0-9]{1,10})-([0-9]{1,10}):([0-9]{1,19}):([0-9]{1,20})")


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


LONG_MAX: Final = (1 << 63) - 1

_HAS_DLSN, _HAS_TRANSACTION_ID, _HAS_SEQUENCE_ID, _IS_EMPTY = 1, 2, 4, 8
_BINARY: Final = Struct(">BQQQQQ")
"""Flags of the given members; segment, offset and local sequence; transaction id; sequence id. Absent ones are 0."""
SN_BYTES: Final = _BINARY.size

_LONG: Final = Struct(">q")


@dataclass(frozen=True, slots=True)
class SN:
    """A sequence number, each member optional; see the module for its meaning and its text.

    Attributes:
        dlsn: Segment, offset and local sequence of the record.
        transaction_id: What the user gave the record as its transaction id, 0 to 2^63 - 1.
        sequence_id: Grows with every record along the lineage of its segment, with gaps; 0 to 2^63 - 1.
        empty: Nothing has been written yet; no other member is given then.

    Raises:
        InvalidRequestError: A number is negative or too large, or ``empty`` is joined with another member.
    """

    dlsn: DLSN | None = None
    transaction_id: int | None = None
    sequence_id: int | None = None
    empty: bool = False

    def __post_init__(self) -> None:
        dlsn = self.dlsn
        if dlsn is not None:
            if not (0 <= dlsn.number <= SEGMENT_NUMBER_MAX and 0 <= dlsn.epoch <= EPOCH_MAX):
                SegmentId.of(dlsn.number, dlsn.epoch)  # says what is wrong; made every time it would cost most of it
            _check_long("offset", dlsn.offset)
            if not 0 <= dlsn.local_sequence < 1 << 64:
                raise InvalidRequestError(f"local sequence {dlsn.local_sequence} is not in 0..{(1 << 64) - 1}")
        if self.transaction_id is not None:
            _check_long("transaction id", self.transaction_id)
        if self.sequence_id is not None:
            _check_long("sequence id", self.sequence_id)
        if self.empty and (self.dlsn, self.transaction_id, self.sequence_id) != (None, None, None):
            raise InvalidRequestError("an SN that is empty has no other member")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse what ``str()`` prints; a DLSN alone is taken as well.

        Raises:
            InvalidRequestError: Not such a text.
        """
        if text == "any":
            return cls()
        if text == "empty":
            return cls(empty=True)
        if "=" not in text and text.count(":") == 2:
            return cls(dlsn=DLSN.parse(text))
        dlsn: DLSN | None = None
        numbers: dict[str, int] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            if name == "dlsn" and dlsn is None:
                dlsn = DLSN.parse(value)
            elif name in ("txid", "seq") and name not in numbers and _is_number(value):
                numbers[name] = int(value)
            else:
                if _is_number(text):
                    raise InvalidRequestError(
                        f"{text} alone does not say which id it is: seq={text} is a sequence id, and txid={text} the "
                        "transaction id that a writer gave its record"
                    )
                raise InvalidRequestError(
                    f"{text!r} is not an SN: any, empty, or some of dlsn=EPOCH-NUMBER:OFFSET:LOCAL, txid=N and seq=N "
                    "with commas between is expected, such as dlsn=4-0:17:0,seq=1017"
                )
        return cls(dlsn, numbers.get("txid"), numbers.get("seq"))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Unpack what ``bytes()`` gives.

        Raises:
            InvalidRequestError: Not such bytes.
        """
        if len(raw) != SN_BYTES:
            raise InvalidRequestError(f"an SN has {SN_BYTES} bytes, not {len(raw)}")
        given, segment, offset, local, transaction_id, sequence_id = _BINARY.unpack(raw)
        if given >> 4:
            raise InvalidRequestError(f"an SN has no members {given:#x}")
        found = cls(
            DLSN.of(SegmentId.from_int(segment), offset, local) if given & _HAS_DLSN else None,
            transaction_id if given & _HAS_TRANSACTION_ID else None,
            sequence_id if given & _HAS_SEQUENCE_ID else None,
            bool(given & _IS_EMPTY),
        )
        if bytes(found) != raw:
            raise InvalidRequestError("an SN holds a number in a member that it does not have")
        return found

    def matches(self, actual: SN) -> bool:
        """Return whether all members given here are the same in ``actual``, the SN of a record in the log.

        A DLSN without local sequence (0) matches the record at its offset whatever its local sequence is.
        """
        if self.empty or actual.empty:
            return self.empty == actual.empty or self == ANY
        return (
            (self.dlsn is None or (actual.dlsn is not None and _same_place(self.dlsn, actual.dlsn)))
            and self.transaction_id in (None, actual.transaction_id)
            and self.sequence_id in (None, actual.sequence_id)
        )

    def __bytes__(self) -> bytes:
        given = self.empty * _IS_EMPTY
        segment = offset = local = 0
        if self.dlsn is not None:
            given |= _HAS_DLSN
            segment, offset, local = int(self.dlsn.segment), self.dlsn.offset, self.dlsn.local_sequence
        if self.transaction_id is not None:
            given |= _HAS_TRANSACTION_ID
        if self.sequence_id is not None:
            given |= _HAS_SEQUENCE_ID
        return _BINARY.pack(given, segment, offset, local, self.transaction_id or 0, self.sequence_id or 0)

    def __str__(self) -> str:
        return "empty" if self.empty else ",".join(self._parts()) or "any"

    def _parts(self) -> Iterator[str]:
        if self.dlsn is not None:
            yield f"dlsn={self.dlsn}"
        if self.transaction_id is not None:
            yield f"txid={self.transaction_id}"
        if self.sequence_id is not None:
            yield f"seq={self.sequence_id}"


ANY: Final = SN()
"""Whatever the last record is."""
EMPTY: Final = SN(empty=True)
"""Nothing has been written yet."""


def pack_transaction_id(transaction_id: int) -> bytes:
    """Return the value of the header :data:`~rollbridge.base.sn.TRANSACTION_ID_HEADER`.

    Raises:
        InvalidRequestError: Negative, or more than 63 bits.
    """
    _check_long("transaction id", transaction_id)
    return _LONG.pack(transaction_id)


def unpack_transaction_id(value: bytes) -> int:
    """Invert :func:`pack_transaction_id`.

    Raises:
        InvalidRequestError: Not such a value.
    """
    if len(value) != _LONG.size:
        raise InvalidRequestError(f"a transaction id has {_LONG.size} bytes, not {len(value)}")
    found: int = _LONG.unpack(value)[0]
    _check_long("transaction id", found)
    return found


def _same_place(expected: DLSN, actual: DLSN) -> bool:
    return expected.segment == actual.segment and (
        expected.offset == actual.offset and expected.local_sequence in (0, actual.local_sequence)
    )


def _check_long(what: str, number: int) -> None:
    if not 0 <= number <= LONG_MAX:
        raise InvalidRequestError(f"{what} {number} is not in 0..{LONG_MAX}")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 19


# Tokens name conditional writes, to look up the outcome of one whose answer was lost. The text of a token is
# ``OPERATION/KEY/SINCE/PLACE``: 32 hexadecimal digits, the key in hexadecimal (``-`` without one), an SN, and the DLSN
# of the write's first record (``-`` while it is not known).

OPERATION_HEADER: Final = "rollbridge-cas"
"""Name of the Kafka header of each conditionally written record: 16 bytes, the same for the records of one write."""
OPERATION_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Token:
    """Name of one conditional write.

    Attributes:
        operation: 16 bytes, unique to the write.
        key: Key of its first record.
        since: The expected SN; if the write happened, its records come after this.
        place: Position of its first record if it was written; None if unknown, as before the first attempt.
    """

    operation: bytes
    key: bytes | None
    since: SN
    place: DLSN | None = None

    def __post_init__(self) -> None:
        if len(self.operation) != OPERATION_BYTES:
            raise InvalidRequestError(f"an operation has {OPERATION_BYTES} bytes, not {len(self.operation)}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse what ``str()`` prints.

        Raises:
            InvalidRequestError: Not such a text.
        """
        try:
            operation, key, since, place = text.split("/")
            return cls(
                bytes.fromhex(operation),
                None if key == "-" else bytes.fromhex(key),
                SN.parse(since),
                None if place == "-" else DLSN.parse(place),
            )
        except ValueError:
            raise InvalidRequestError(f"{text!r} is not a token: OPERATION/KEY/SINCE/PLACE is expected") from None

    def __str__(self) -> str:
        key = "-" if self.key is None else self.key.hex()
        return f"{self.operation.hex()}/{key}/{self.since}/{self.place or '-'}"
