"""SN: the sequence number by which a conditional write names the record that it expects to be the last one.

======================  ================================================
member                  text
======================  ================================================
``dlsn``                ``dlsn=EPOCH-NUMBER:OFFSET:LOCAL``
``transaction_id``      ``txid=N``, the long that a user gave the record
``sequence_id``         ``seq=N``, grows along the lineage of a segment
======================  ================================================

Members that are given are joined by commas: ``dlsn=4-0:17:0,seq=1017``. All that are given must match. ``any`` is the
SN with none of them, which everything matches; ``empty`` stands for "nothing has been written yet".

Source: DistributedLog CAS proposal, "struct SN { optional DLSN dlsn; optional long transactionId; optional long
sequenceId }". ``empty`` is added, for the first write.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct
from typing import Final, Self

from rollbridge.model.epochs import EpochHistory
from rollbridge.model.errors import InvalidRequestError
from rollbridge.model.identifiers import EPOCH_MAX, SEGMENT_NUMBER_MAX, SegmentId
from rollbridge.model.sequence import DLSN

LONG_MAX: Final = (1 << 63) - 1

_HAS_DLSN, _HAS_TRANSACTION_ID, _HAS_SEQUENCE_ID, _IS_EMPTY = 1, 2, 4, 8
_BINARY: Final = Struct(">BQQQQQ")
"""Which members are given; segment, offset and local sequence; transaction id; sequence id. Absent ones are 0."""
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
        """Whether everything that is given here is the same in ``actual``, which is what stands in the log.

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
    """The value of the header :data:`~rollbridge.model.sequence.TRANSACTION_ID_HEADER`.

    Raises:
        InvalidRequestError: Negative, or more than 63 bits.
    """
    _check_long("transaction id", transaction_id)
    return _LONG.pack(transaction_id)


def unpack_transaction_id(value: bytes) -> int:
    """The inverse of :func:`pack_transaction_id`.

    Raises:
        InvalidRequestError: Not such a value.
    """
    if len(value) != _LONG.size:
        raise InvalidRequestError(f"a transaction id has {_LONG.size} bytes, not {len(value)}")
    found: int = _LONG.unpack(value)[0]
    _check_long("transaction id", found)
    return found


def sequence_bases(history: EpochHistory) -> dict[SegmentId, int]:
    """Where the sequence ids of each segment begin: the sequence id of a record is this base plus its offset.

    The base of a segment is the largest base plus sealed end of its predecessors, 0 without any, so that sequence ids
    grow along every lineage. Segments that continue one whose end is not known yet are left out. Those of the first
    epoch have the base that the history stands on, if it has dropped what they continue.
    """
    segments = history.records[0].segments
    known = (0,) * len(segments) if history.foundation is None else history.foundation.bases
    bases = {item.id: base for item, base in zip(segments, known, strict=True)}
    for record in history.records[1:]:
        for item in history.began_with(record.epoch):
            base: int | None = 0
            for before in history.predecessors(item.id):
                end, start = history.sealed_end(before.id), bases.get(before.id)
                base = None if base is None or end is None or start is None else max(base, start + end)
            if base is not None:
                bases[item.id] = base
    return bases


def _same_place(expected: DLSN, actual: DLSN) -> bool:
    return expected.segment == actual.segment and (
        expected.offset == actual.offset and expected.local_sequence in (0, actual.local_sequence)
    )


def _check_long(what: str, number: int) -> None:
    if not 0 <= number <= LONG_MAX:
        raise InvalidRequestError(f"{what} {number} is not in 0..{LONG_MAX}")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 19
