"""Tokens: the names of conditional writes, to ask with what became of one whose answer was lost.

A token's text is ``OPERATION/KEY/SINCE/PLACE``: 32 hexadecimal digits, the key in hexadecimal (``-`` without one), an
SN, and the DLSN of the write's first record (``-`` while it is not known).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from rollbridge.model.errors import InvalidRequestError
from rollbridge.model.sequence import DLSN
from rollbridge.model.sn import SN

OPERATION_HEADER: Final = "rollbridge-cas"
"""Name of the Kafka header of each conditionally written record: 16 bytes, the same for the records of one write."""
OPERATION_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Token:
    """Names one conditional write.

    Attributes:
        operation: 16 bytes that no other write has.
        key: Key of its first record.
        since: What it expected: if it was written, then after this.
        place: Where its first record stands if it was written; None if that is not known, as before it was tried.
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
